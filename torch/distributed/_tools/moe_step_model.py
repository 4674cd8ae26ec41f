# mypy: allow-untyped-defs
"""Seconds of a training step of a layout, summed from the kernels and exchanges of its blocks.

>>> config = MoEConfig.by_name("qwen3-30b-a3b")
>>> step = train_step(profile("H100"), config, Layout(gpus=16, ep=8), global_batch=512)
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple, TYPE_CHECKING

from torch.distributed._tools import moe_cost_model as cost
from torch.distributed._tools.moe_arguments import check
from torch.distributed._tools.moe_cost_model import LOW_PRECISION, US
from torch.distributed._tools.moe_exchange_model import all_to_all
from torch.distributed._tools.moe_layout import Layout, REPEATED
from torch.distributed._tools.moe_memory_model import block_weights


if TYPE_CHECKING:
    from torch.distributed._tools.moe_config import MoEConfig
    from torch.distributed._tools.moe_profile import Profile


__all__ = ["block", "Step", "train_step"]


class Block(NamedTuple):
    """Seconds of one decoder block, one pass of one micro-batch."""

    attention: float
    experts: float
    shared: float
    router: float
    tp_links: float
    accumulate: float
    comm: float

    @property
    def compute(self) -> float:
        return sum(self) - self.comm


def block(
    p: Profile,
    model: MoEConfig,
    layout: Layout,
    tokens: float,
    seq: int,
    pass_: str,
    imbalance: float = 1.0,
    dense: bool = False,
) -> Block:
    """Seconds of the parts of one block, with experts or ``dense``.

    Args:
        p (Profile): the device.
        model (MoEConfig): the model.
        layout (Layout): how it is spread.
        tokens (float): of a micro-batch of a data-parallel rank; a tensor-parallel rank
            keeps ``tokens / tp`` of them between its products.
        seq (int): length of a sequence.
        pass_ (str): ``"fwd"`` or ``"bwd"``.
        imbalance (float): heaviest expert rank over the mean.
        dense (bool): its MLP has no experts; ``shared`` is then its time.
    """
    c, dev, tp = p.constants, p.device, layout.tp
    forward = pass_ == "fwd"
    local = tokens / layout.cp
    mine = local / tp if layout.expert_tp == 1 else local
    shapes = [(int(n), int(k)) for n, k in model.attention(tp)]
    attention = sum(cost.gemm(p, 1, local, n, k, layout.dtype) for n, k in shapes)
    attention *= 1 if forward else 2
    if layout.dtype in LOW_PRECISION:
        attention += sum(cost.quantize(p, local * k, not forward) for _, k in shapes)
    core = model.core_flops(local, seq, tp) * (1 if forward else 2.5)
    attention += core / (0.55 * dev.bf16) + c.launch_us * US
    # Norms, residuals and rotations.
    attention += cost.stream(p, local / tp * model.d * 2 * (16 if forward else 24), 12)
    rows, links = mine * model.k, 0.0
    if tp > 1:  # gather and reduce-scatter around attention, partly hidden
        # In backward also the inputs again, for the gradients of the weights.
        gathered = (4 if forward else 6) * local * model.d * 2 * (tp - 1) / tp
        links = 0.7 * gathered / (dev.fast * c.fast)
    width = (model.dense_f if dense else model.shared_f) * model.matrices / 3
    shared = cost.dense_mlp(p, local, model.d, width, layout.dtype, pass_, tp)
    accumulate = 0.0
    if not forward:
        accumulate = cost.stream(p, 6 * block_weights(model, layout, dense))
    if dense:
        return Block(attention, 0.0, shared, 0.0, links, accumulate, 0.0)
    seconds = cost.experts(
        p, rows * imbalance, model.d, max(1, model.gated_f // layout.expert_tp),
        model.experts / layout.ep,
        kernel=layout.kernel, dtype=layout.dtype, pass_=pass_, tokens=mine,
    )  # fmt: skip
    if model.biased and layout.kernel == "mcore":
        # Megatron multiplies the output bias by the router weight, in float32, one kernel an op.
        seconds += cost.stream(p, rows * model.d * (28 if forward else 40), 8)
    if (
        layout.expert_tp > 1
    ):  # rows for the ranks that share an expert's width, and their sums
        sent = 4 * local * model.k * model.d * (1 - 1 / layout.expert_tp)
        links += sent / (dev.fast * c.fast)
    return Block(
        attention,
        seconds,
        shared,
        cost.router(p, mine, model.d, model.experts, model.k, pass_),
        links,
        accumulate,
        sum(
            all_to_all(
                p, mine, model.d, model.experts, model.k, layout.ep,
                domain=layout.domain or None, dtype=wire, algorithm=layout.algorithm, node_limit=layout.node_limit,
                imbalance=imbalance, combine=back,
            )
            for wire, back in ((layout.wire, False), ("bf16", True))
        ),
    )  # fmt: skip


class Step(NamedTuple):
    """A training step.

    Attributes:
        tokens_per_second: per GPU.
        seconds: of the step.
        layer: seconds of a block with experts, forward and backward, with exposed communication.
        comm: seconds of its exchanges, hidden or not.
        bubble: idle share of the pipeline over its busy time.
        parts: seconds of a block by part, both passes.
        host_bound: whether issuing kernels takes longer than running them.
    """

    tokens_per_second: float
    seconds: float
    layer: float
    comm: float
    bubble: float
    parts: dict[str, float]
    host_bound: bool


# Share of the host's work that remains without CUDA graphs, with those of parts, and of the step.
_GRAPHS = (1.0, 0.35, 0.05)


def train_step(
    p: Profile,
    model: MoEConfig,
    layout: Layout,
    *,
    global_batch: int,
    seq: int = 4096,
    imbalance: float = 1.0,
    exposed: float | None = None,
    year: float = 2026.0,
) -> Step:
    """A training step of ``global_batch`` sequences.

    Keyword Args:
        imbalance (float): heaviest expert rank over the mean, see
            ``moe_simulator.expected_imbalance``.
        exposed (float, optional): share of the exchanges that nothing hides. Default: a constant
            fitted on published frameworks with a pipeline, whose other micro-batches hide
            exchanges; 1 without a pipeline
        year (float): of the software, as published speeds grow with it.
    """
    check(
        "train_step", global_batch=global_batch, seq=seq, imbalance=imbalance, year=year
    )
    c = p.constants
    tokens, accumulation = layout.micro_batch * seq, layout.accumulation(global_batch)
    if exposed is None:
        exposed = c.exposed if layout.pp > 1 else 1.0
    check("train_step", exposed=exposed)
    speed = math.exp(-c.drift * (year - 2026.0))
    parts: dict[str, float] = defaultdict(float)
    layer, plain, host_bound = 0.0, 0.0, False
    for pass_, share in (("fwd", 0.4), ("bwd", 0.6)):
        repeated = 1 + (REPEATED[layout.recompute] if pass_ == "fwd" else 0.0)
        b = block(p, model, layout, tokens, seq, pass_, imbalance)
        issue = US * share * _GRAPHS[layout.graphs]
        host = (c.host_us + c.expert_us * model.experts / layout.ep) * issue
        work = b.compute * c.stack
        host_bound |= host > work
        # The exchange waits for counts on the host, which cannot run ahead of the device.
        layer += repeated * speed * (work + host + exposed * b.comm)
        for name, seconds in b._asdict().items():
            parts[name] += seconds * repeated
        if model.dense:
            b = block(p, model, layout, tokens, seq, pass_, dense=True)
            plain += repeated * speed * max(b.compute * c.stack, c.host_us * issue)
    layers = model.layers + model.mtp
    body = layer * (layers - model.dense) + plain * model.dense
    vocab = model.vocab / layout.tp
    head = 3 * cost.gemm(p, 1, tokens / layout.cp, int(vocab), model.d)
    head = head * (1 + model.mtp) + cost.stream(p, tokens / layout.cp * vocab * 10, 4)
    micro = _slowest_stage(body, layers, head, layout.pp)
    bubble = (layout.pp - 1) / (layout.virtual * accumulation)
    seconds = accumulation * micro * (1 + bubble)
    seconds += _step_ends(p, model, layout, micro, accumulation)
    rate = global_batch * seq / seconds / layout.gpus
    return Step(rate, seconds, layer, parts["comm"], bubble, dict(parts), host_bound)


def _slowest_stage(body: float, layers: int, head: float, stages: int) -> float:
    """Seconds of the slowest stage: whole layers, of which the last, with the head, has fewer."""
    if stages == 1:
        return body + head
    return min(
        max(head + body * last / layers, body * depth / layers)
        for last in range(layers // stages + 1)
        for depth in [math.ceil((layers - last) / (stages - 1))]
    )


def _step_ends(
    p: Profile, model: MoEConfig, layout: Layout, micro: float, accumulation: int
) -> float:
    """Seconds of gradient reduction that backward does not hide, and of the optimizer."""
    weights = model.parameters()
    other = weights["other"] / layout.tp / layout.pp
    expert = weights["expert"] / (layout.ep * layout.expert_tp) / layout.pp
    nodes = layout.gpus > (layout.domain or p.device.domain)
    link = (p.device.slow if nodes else p.device.fast) * 0.8
    reduced = other * (layout.dp > 1) + expert * (layout.expert_dp > 1)
    hidden = 0.7 * micro * min(accumulation, 2)
    owned = (other / layout.dp + expert / layout.expert_dp) * layout.replicate
    if layout.fsdp:  # weights gathered in both passes, gradients reduced
        moved = 8 * reduced / link - 0.7 * micro
        return accumulation * max(0.0, moved) + cost.stream(p, 20 * owned, 4)
    return max(0.0, 4 * reduced / link - hidden) + cost.stream(p, 20 * owned, 4)
