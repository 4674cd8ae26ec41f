# mypy: allow-untyped-defs
"""How a mixture-of-experts model is spread over ranks: the dimensions of a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from torch.distributed._tools.moe_arguments import check, RANGES
from torch.distributed._tools.moe_cost_model import EXPERT_KERNELS, ITEMSIZE
from torch.distributed._tools.moe_exchange_model import ALL_TO_ALLS


if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = ["Layout", "REPEATED"]


# Share of a forward pass that activation checkpointing repeats.
REPEATED = {"none": 0.0, "selective": 0.0, "full": 1.0}
_CHOICES: dict[str, Mapping[str, Any]] = {
    "dtype": ITEMSIZE,
    "wire": ITEMSIZE,
    "recompute": REPEATED,
    "algorithm": ALL_TO_ALLS,
    "kernel": EXPERT_KERNELS,
}


@dataclass(frozen=True)
class Layout:
    """How a model is spread over GPUs, and how its steps run.

    Attributes:
        gpus, ep, tp, pp, cp: ranks, and sizes of expert, tensor, pipeline, context
            parallelism; ``ep`` borrows data-parallel ranks.
        expert_tp: ranks that share the width of an expert.
        virtual: pipeline stages of a rank.
        micro_batch: sequences of a micro-batch.
        dtype: of the products, weights of attention included.
        recompute: ``"none"``, ``"selective"`` or ``"full"``.
        algorithm, node_limit, wire: of the all-to-all, see ``moe_cost_model``.
        domain: ranks joined by the fast link; 0 for the device's.
        graphs: CUDA graphs: 0 none, 1 partial, 2 whole step.
        kernel: of the experts, see ``moe_cost_model.EXPERT_KERNELS``.
        fsdp: weights and gradients are sharded over data-parallel ranks as well, by layers.
        replicate: groups of data-parallel ranks, each of which has all shards.
        gradient_bytes, optimizer_bytes: of a parameter; the optimizer's are sharded over
            data-parallel ranks. Float32 gradients, master weights and moments are 4 and
            12; bfloat16 gradients and moments 2 and 8.
    """

    gpus: int = 1
    ep: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    expert_tp: int = 1
    virtual: int = 1
    micro_batch: int = 1
    dtype: str = "bf16"
    recompute: str = "selective"
    algorithm: str = "hierarchical"
    node_limit: int = 0
    wire: str = "bf16"
    domain: int = 0
    graphs: int = 0
    kernel: str = "mcore"
    fsdp: bool = False
    replicate: int = 1
    gradient_bytes: float = 4
    optimizer_bytes: float = 12

    def __post_init__(self) -> None:
        check("Layout", **{n: v for n, v in vars(self).items() if n in RANGES})
        for name, known in _CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(
                    f"Layout: {name} must be one of {', '.join(known)}, got {value!r}"
                )

    @property
    def dp(self) -> int:
        return max(1, self.gpus // (self.tp * self.pp * self.cp))

    @property
    def expert_dp(self) -> int:
        return max(1, self.gpus // (self.pp * self.ep * self.expert_tp))

    def accumulation(self, global_batch: int) -> int:
        return max(1, round(global_batch / (self.micro_batch * self.dp)))
