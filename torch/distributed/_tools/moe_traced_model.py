# mypy: allow-untyped-defs
"""Seconds and bytes of a training step on CPU ranks, for a model traced on one rank.

:func:`.moe_trace.trace` has the model's work beside its experts; a layout distributes it here.
"""

from __future__ import annotations

from typing import NamedTuple, TYPE_CHECKING

from torch.distributed._tools.moe_cost_model import ITEMSIZE, US
from torch.distributed._tools.moe_cpu_model import cpu_exchange, cpu_experts
from torch.distributed._tools.moe_exchange_model import copies
from torch.distributed._tools.moe_memory_model import Memory, uneven
from torch.distributed._tools.moe_step_model import Step


if TYPE_CHECKING:
    from torch.distributed._tools.moe_config import MoEConfig
    from torch.distributed._tools.moe_layout import Layout
    from torch.distributed._tools.moe_profile import Profile


__all__ = ["Traced"]


class Traced(NamedTuple):
    """A trace of one sequence.

    Attributes:
        dense: seconds of forward and backward without ``_moe_mlp``.
        split: the part of ``dense`` that tensor parallelism splits.
        repeated: seconds of the forward, which runs twice if the layers are checkpointed.
        bytes: by ``recompute``, two peaks of activations and temporary tensors: until the last layer
            gets its gradient, and after that without the gradients of a layer's experts.
        ops: numbers of ops, of both passes and of the forward.
        styled: modules that tensor parallelism wraps.
        expert, parameters: numbers of parameters of the experts, and of the model; 0 for those of
            the configuration.
    """

    dense: float
    split: float
    repeated: float
    bytes: dict[str, tuple[float, float]]
    ops: tuple[int, int] = (0, 0)
    styled: int = 0
    expert: float = 0.0
    parameters: float = 0.0

    def memory(
        self, model: MoEConfig, x: Layout, seq: int, global_batch: int
    ) -> Memory:
        """Peak bytes of a rank: its shards, tensors that FSDP has unsharded, and activations."""
        size, (expert, split, around) = ITEMSIZE[x.dtype], self._weights(model)
        own = expert / x.ep / x.expert_dp * uneven(model, x)
        owned = ((split / x.tp + around) / x.dp + own) * x.replicate
        layer = (expert / x.ep + split / x.tp) / model.layers
        # Beside the gathered vocabulary and the gradient of its head: two layers, the gradients
        # of one, and in float32 the scattered gradients and their sum.
        around *= 1.5 * size
        layers = 3 * layer * size + 4 * layer * (1 + 1 / x.gpus)
        share = 1 - self.split / self.dense * (1 - 1 / x.tp)
        head, kept = (x.micro_batch * n * share for n in self.bytes[x.recompute])
        rows = 0.0
        if x.ep > 1:  # received and returned rows of experts
            tokens = x.micro_batch * seq / x.tp
            rows = 2 * tokens * copies(x.ep, x.ep, model.experts, model.k).ranks
            rows *= 1 if x.recompute == "full" else model.layers - model.dense
        exchanged, gradients = rows * model.d * size, x.gradient_bytes * owned
        if x.accumulation(global_batch) == 1:  # gradients replace activations
            gradients = max(0.0, gradients - kept - exchanged)
        held = x.optimizer_bytes * owned + around + gradients
        if head > kept + layers:
            return Memory(held, head, exchanged, 0.0)
        return Memory(held + layers, kept, exchanged, 0.0)

    def step(
        self,
        p: Profile,
        model: MoEConfig,
        x: Layout,
        *,
        global_batch: int,
        seq: int,
        imbalance: float = 1.0,
    ) -> Step:
        """A training step on CPU ranks, where no part hides another."""
        if (c := p.cpu) is None:
            raise ValueError(f"step: {p.name} must be the profile of a CPU")
        accumulation, full = x.accumulation(global_batch), x.recompute == "full"
        layers, size = model.layers, ITEMSIZE[x.dtype]
        moe = layers - model.dense
        tokens = x.micro_batch * seq / x.tp  # tokens that a rank sends to the experts
        sizes = (tokens, model.d, model.gated_f, model.experts // x.ep, model.k)
        work = cpu_experts(c, *sizes, pass_="fwd+bwd", dtype=x.dtype)
        if full:
            work += cpu_experts(c, *sizes, pass_="fwd", dtype=x.dtype)
        sent = cpu_exchange(
            p, tokens, model.d, model.experts, model.k, x.ep, pass_="fwd+bwd", dtype=x.dtype
        )  # fmt: skip

        expert, split, around = self._weights(model)
        expert, other = expert / x.ep, split / x.tp + around
        # Gathered in both passes, reduced in float32; a single rank copies them, too.
        moved, links = 2 * size + 4, 0.0
        fsdp = 3 * (layers + moe + 1) * c.shard_us * US
        for n, ranks in ((other, x.dp), (expert, x.expert_dp)):
            fsdp += n * moved * (1 - 1 / ranks) / min(c.shard, p.device.fast)
            fsdp += 2 * n * moved / ranks / c.memory
        if x.tp > 1:  # sums of attention in both passes, and tokens around the experts
            row = x.micro_batch * seq * model.d * size
            # A sum passes the links twice.
            rate = min(c.reduce, p.device.fast / 2)
            links = (2 + full) * (2 * layers + moe) * row / rate
            links += (1 + full / 2) * self.styled * c.tp_us * US
        dense = self.dense - self.split * (1 - 1 / x.tp) + full * self.repeated
        issued = (self.ops[0] * c.op_us + full * self.ops[1] * c.recompute_us) * US
        owned = (other / x.dp + expert / x.expert_dp) * x.replicate
        parts = {
            "attention": x.micro_batch * dense * p.constants.stack + issued,
            "experts": moe * work * imbalance,
            "comm": moe * sent,
            "tp_links": links,
            "fsdp": fsdp,
        }
        micro = sum(parts.values())
        seconds = accumulation * micro + 28 * owned / c.memory
        rate = global_batch * seq / seconds / x.gpus
        # Per block, as in the steps of GPUs.
        of_block = {name: value / layers for name, value in parts.items()}
        layer = sum(of_block.values())
        return Step(rate, seconds, layer, of_block["comm"], 0.0, of_block, False)

    def _weights(self, model: MoEConfig) -> tuple[float, float, float]:
        """Parameters of experts, those that tensor parallelism splits, and router and vocabulary."""
        expert, other = model.parameters().values()
        if self.parameters:
            expert, other = self.expert, self.parameters - self.expert
        around = 2 * model.vocab * model.d
        around += (model.layers - model.dense) * model.d * model.experts
        around = min(around, other)  # a tied vocabulary exists once
        return expert, other - around, around
