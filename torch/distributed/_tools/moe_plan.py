# mypy: allow-untyped-defs
"""A plan: the layout with the most tokens a second that fits, and a reason per choice.

:func:`plan` gets the layouts from :mod:`.moe_search`, the choices of a layer from
:mod:`.moe_layer_plan` and the reasons from :mod:`.moe_reasons`. :class:`Plan` returns arguments of
``ExpertParallel`` and of torchtitan's ``ParallelDims``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass, replace
from typing import Any, TYPE_CHECKING

import torch
from torch.distributed._tools.moe_arguments import check, check_dtypes
from torch.distributed._tools.moe_config import MoEConfig
from torch.distributed._tools.moe_cost_model import copy_cost, LOW_PRECISION
from torch.distributed._tools.moe_layer_plan import (
    Choice,
    chunk_choice,
    default_dtypes,
    fastest_dtypes,
    load_choices,
    OVERFLOW,
    rounding_choice,
)
from torch.distributed._tools.moe_profile import HELD_OUT_ERROR, profile
from torch.distributed._tools.moe_reasons import choices_of, node_limit
from torch.distributed._tools.moe_search import gigabytes, Search
from torch.distributed._tools.moe_simulator import rows_of_pair


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed._tools.moe_layout import Layout
    from torch.distributed._tools.moe_memory_model import Memory
    from torch.distributed._tools.moe_profile import Profile
    from torch.distributed._tools.moe_step_model import Step
    from torch.distributed._tools.moe_traced_model import Traced
    from torch.distributed.tensor.parallel import ExpertPlacement


__all__ = ["Plan", "plan"]

EVEN = 1.02  # heaviest rank over mean; below it, layouts are compared as if balanced


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` found.

    Attributes:
        layout, step, memory: the best one, its step and its bytes.
        choices: one per dimension.
        best: (tokens per second and GPU, layout) of the best layouts, best first, with
            the model's own node limit.
        error: median relative error of the model on training rows it was not fitted on;
            it cannot distinguish layouts closer than that.
        chunks, capacity_factor, replicas, row_alignment, recipe: of the MoE layers.
        domain: ranks joined by the fast link.
        tokens: of a rank in a layer.
        copy_cost: of an expert that runs away from home, in token copies.
        global_batch, seq: of a step.
    """

    model: MoEConfig
    device: str
    provenance: str
    layout: Layout
    step: Step
    memory: Memory
    choices: tuple[Choice, ...]
    best: tuple[tuple[float, Layout], ...]
    error: float
    chunks: int
    capacity_factor: float
    replicas: int
    row_alignment: int
    recipe: dict[str, str]
    domain: int
    tokens: int
    copy_cost: float
    global_batch: int
    seq: int

    def expert_parallel(self, *, static: bool = False) -> dict[str, Any]:
        """Keyword arguments of ``ExpertParallel``; the mesh is ``(layout.ep,)``.

        ``static`` adds the capacity for the chosen factor; otherwise exact sizes are sent.
        """
        from torch.distributed._moe.overlap_schedule import OverlapSchedule

        x = self.layout
        wire = torch.float8_e4m3fn if x.wire in LOW_PRECISION else None
        options: dict[str, Any] = {"wire_dtype": wire}
        if x.algorithm == "hierarchical" and x.ep > self.domain:
            options |= {"token_switch": "hierarchical", "ranks_per_node": self.domain}
        if self.chunks > 1:
            options["schedule"] = OverlapSchedule(num_chunks=self.chunks)
        if static and x.ep > 1:
            nodes = x.ep // self.domain if "token_switch" in options else 1
            tokens = math.ceil(self.tokens / self.chunks)
            known = self.model.experts, self.model.k, self.capacity_factor, OVERFLOW
            near = rows_of_pair(tokens * nodes, x.ep, *known)
            far = rows_of_pair(tokens, nodes, *known)
            options["capacity"] = (far, near) if nodes > 1 else near
        if self.placement is not None:
            options["placement"] = self.placement
        return options

    @functools.cached_property
    def placement(self) -> ExpertPlacement | None:
        """Placement of the layers of one model, if experts have replicas.

        Experts stay at home until its ``step()``, called after every optimizer step, has planned.
        """
        if not self.replicas:
            return None
        from torch.distributed.tensor.parallel import ExpertPlacement

        return ExpertPlacement(
            slots_per_rank=(self.model.experts + self.replicas) // self.layout.ep,
            ranks_per_node=min(self.layout.ep, self.domain),
            copy_cost=self.copy_cost,
        )

    def parallel_dims(self) -> dict[str, int]:
        """Keyword arguments of torchtitan's ``ParallelDims``; ``ep`` borrows shards."""
        x = self.layout
        return {
            "dp_replicate": x.replicate, "dp_shard": x.dp // x.replicate, "cp": x.cp, "tp": x.tp, "pp": x.pp,
            "ep": x.ep, "world_size": x.gpus,
        }  # fmt: skip

    def micro_batches(self, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """This rank's sequences of a step, by micro-batch.

        Args:
            batch (Tensor): (``global_batch``, \\*), the same on all ranks. Ranks of ``tp`` get equal
                parts; the mean of the losses over micro-batches and ranks is the batch's.
        """
        if batch.shape[0] != self.global_batch:
            raise ValueError(
                f"micro_batches: batch must have {self.global_batch} sequences, as it was "
                f"planned for, got {batch.shape[0]}"
            )
        x, rank = self.layout, 0
        if torch.distributed.is_initialized():
            rank = torch.distributed.get_rank()
        return batch.chunk(x.dp)[rank // x.tp].split(x.micro_batch)

    def explain(self) -> str:
        """Every choice with its reason in numbers, and the cost of the next best."""
        lines = [
            f"{self.step.tokens_per_second:,.0f} tokens/s/GPU, step {self.step.seconds:.3f} s, "
            f"{gigabytes(self.memory.total)} GB a GPU\n"
        ]
        for c in self.choices:
            value = c.value
            if isinstance(value, dict):
                value = ", ".join(f"{k} {v}" for k, v in value.items())
            lines += [f"  {c.name:16} {value}", f"  {'':16} because: {c.reason}"]
            if c.other_loss is not None:
                apart = c.other_loss >= self.error / 4
                close = "" if apart else ", not told apart by this model"
                lines.append(f"  {'':16} next: {c.other} ({-c.other_loss:+.1%}{close})")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        asked = ("device", "provenance", "global_batch", "seq")
        layers = (
            "chunks",
            "capacity_factor",
            "replicas",
            "row_alignment",
            "recipe",
            "error",
        )
        return {
            "phase": "train",
            **{name: getattr(self, name) for name in asked},
            "layout": dataclasses.asdict(self.layout),
            "tokens_per_second_per_gpu": self.step.tokens_per_second,
            "step": self.step._asdict(),
            "memory": {**self.memory._asdict(), "total": self.memory.total},
            "parallel_dims": self.parallel_dims(),
            **{name: getattr(self, name) for name in layers},
            "choices": [c._asdict() for c in self.choices],
            "best": [[t, dataclasses.asdict(x)] for t, x in self.best],
        }


def plan(
    model: MoEConfig | str,
    device: Profile | str,
    gpus: int,
    *,
    global_batch: int,
    seq: int = 4096,
    dtypes: Sequence[str] | None = None,
    load: Sequence[float] | None = None,
    exposed: float = 0.25,
    top: int = 5,
    traced: Traced | None = None,
    **fixed: Any,
) -> Plan:
    """The layout with the most tokens a second that fits.

    Args:
        model (MoEConfig or str): the model, or its name.
        device (Profile or str): the GPU, or its name.
        gpus (int): how many.

    Keyword Args:
        global_batch (int): sequences of a step.
        seq (int): length of a sequence.
        dtypes (sequence of str, optional): of products. Default: bf16 and the device's
            8-bit format
        load (sequence of float, optional): current load of every expert, from ``LoadStats``. Past
            routing predicts it badly (47 % error from an earlier half of a trace, 1.7 %
            from the current load). Default: uniform
        exposed (float): share of exchanges that the schedule does not hide.
        top (int): layouts to keep in ``Plan.best``.
        traced (Traced, optional): the model's work beside its experts, for a CPU.
        fixed: given values of :class:`Layout`: ``ep=8``, ``recompute="full"``.

    Raises:
        ValueError: nothing divides or fits, with the nearest that works; the
            device does not multiply a dtype; or a number is out of its range.

    Example::
        >>> p = plan("qwen3-30b-a3b", "H100", 16, global_batch=512)
        >>> p.layout.ep, p.parallel_dims()
    """
    model = MoEConfig.by_name(model) if isinstance(model, str) else model
    p = profile(device) if isinstance(device, str) else device
    check(
        "plan", gpus=gpus, global_batch=global_batch, seq=seq, exposed=exposed, top=top
    )
    if p.cpu is not None and traced is None:
        raise ValueError(
            f"plan: device must be a GPU, got the profile of {p.name}; see cpu_table, or "
            "parallelize_moe for a model at hand"
        )
    if isinstance(load, torch.Tensor):
        load = load.tolist()
    for x in load if load is not None else ():
        check("plan", load=x)
    check_dtypes("plan", dtypes)
    dtypes = default_dtypes(p) if dtypes is None else tuple(dtypes)
    search = Search(model, p, gpus, global_batch, seq, dtypes, exposed, traced, fixed)
    search.check()
    for dtype in (*dtypes, fixed.get("dtype", "bf16")):
        p.check_dtype("plan", dtype)
    ranked = search.ranked(search.candidates())
    if not ranked:
        raise search.nothing_fits()

    def loaded() -> tuple[Choice, Choice, float]:
        """Capacity, replicas and imbalance of the best layout; the heaviest rank slows all."""
        x = ranked[0][1]
        return load_choices(model, x, x.micro_batch * seq / x.cp / x.tp, load, p)

    capacity, replicas, imbalance = loaded()
    if imbalance > EVEN:
        ranked = search.ranked([e[1] for e in ranked[:64]], imbalance)
        capacity, replicas, imbalance = loaded()
    _, x, step, m = ranked[0]
    tokens = x.micro_batch * seq / x.cp / x.tp
    uneven = imbalance if imbalance > EVEN else 1.0
    stepped = functools.partial(search.step, imbalance=uneven)
    limit = node_limit(search, x, stepped)
    if limit.value != x.node_limit:
        x = replace(x, node_limit=limit.value)
        step = stepped(x)
    rows = tokens * model.k
    chunks = chunk_choice(p, model, x, tokens)
    rounding, align = rounding_choice(p, model, x, rows)
    sizes = (rows, model.d, model.gated_f, model.experts / x.ep)
    recipe, times = fastest_dtypes(p, *sizes, dtypes)
    recipe_reason = "; ".join(
        f"{which} " + ", ".join(f"{dt} {1e3 * t:.2f} ms" for dt, t in s.items())
        for which, s in times.items()
    )
    choices = [
        *choices_of(search, ranked, x, step, stepped), limit,
        Choice("recipe", recipe, recipe_reason), chunks, capacity, replicas, rounding,
    ]  # fmt: skip
    return Plan(
        model, p.name, p.provenance, x, step, m, tuple(choices),
        tuple((rate, y) for rate, y, *_ in ranked[:top]), HELD_OUT_ERROR["train"][0],
        chunks.value, capacity.value, replicas.value, align, recipe, search.domain,
        math.ceil(tokens), copy_cost(p, *sizes, x.ep, x.domain), global_batch, seq,
    )  # fmt: skip
