# mypy: allow-untyped-defs
"""Time and memory of a mixture-of-experts model: a block, a training step, inference.

A :class:`.MoEConfig` is a model by its sizes, a :class:`Layout` says how it is spread. What
they cost is summed from :mod:`.moe_cost_model`. :class:`MoERuntimeEstimator` does the same for a module
that runs under ``FakeTensorMode``, in the manner of ``RuntimeEstimator``.

    >>> config = MoEConfig.by_name("qwen3-30b-a3b")
    >>> step = train_step(profile("H100"), config, Layout(gpus=16, ep=8), global_batch=512)
    >>> step.tokens_per_second, memory(config, Layout(gpus=16, ep=8)).total
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch.distributed._tools import moe_cost_model as cost
from torch.distributed._tools.moe_arguments import check, RANGES
from torch.distributed._tools.moe_config import MoEConfig
from torch.distributed._tools.moe_cost_model import LOW_PRECISION, US
from torch.distributed._tools.moe_cpu_model import cpu_experts, cpu_rate
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._runtime_estimation import _IGNORE_OPS, _VIEW_OPS
from torch.utils.flop_counter import flop_registry


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed._tools.moe_profile import Profile


__all__ = [
    "Layout",
    "Memory",
    "cpu_table",
    "MoERuntimeEstimator",
    "Step",
    "block",
    "infer",
    "inference_table",
    "inductor_estimate",
    "layer_peak",
    "memory",
    "op_seconds",
    "saved_bytes",
    "train_step",
]


# ---- layouts ---------------------------------------------------------------------------

# Work of a step that activation checkpointing repeats, of a forward pass.
_REPEATED = {"none": 0.0, "selective": 0.0, "full": 1.0}
_CHOICES: dict[str, Mapping[str, Any]] = {
    "dtype": cost.ITEMSIZE,
    "wire": cost.ITEMSIZE,
    "recompute": _REPEATED,
    "algorithm": cost.ALL_TO_ALLS,
    "kernel": cost.EXPERT_KERNELS,
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


# ---- time ------------------------------------------------------------------------------


class Block(NamedTuple):
    """Seconds of one decoder block with experts, one pass of one micro-batch."""

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
) -> Block:
    """Seconds of the parts of one block.

    Args:
        p (Profile): the device.
        model (MoEConfig): the model.
        layout (Layout): how it is spread.
        tokens (float): of a micro-batch of a data-parallel rank; a tensor-parallel rank
            keeps ``tokens / tp`` of them between its products.
        seq (int): length of a sequence.
        pass_ (str): ``"fwd"`` or ``"bwd"``.
        imbalance (float): heaviest expert rank over the mean.
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
    links = 0.0
    if tp > 1:  # gather and reduce-scatter around attention, part of them hidden
        # ... and in backward the inputs again, for the gradients of the weights.
        gathered = (4 if forward else 6) * local * model.d * 2 * (tp - 1) / tp
        links = 0.7 * gathered / (dev.fast * c.fast)
    return Block(
        attention,
        cost.experts(
            p, mine * model.k * imbalance, model.d, int(model.f / layout.expert_tp),
            model.experts / layout.ep,
            kernel=layout.kernel, dtype=layout.dtype, pass_=pass_, tokens=mine,
        ),
        cost.dense_mlp(p, local, model.d, model.shared_f, layout.dtype, pass_, tp),
        cost.router(p, mine, model.d, model.experts, model.k, pass_),
        links,
        0.0 if forward else cost.stream(p, 6 * _block_weights(model, layout)),
        sum(
            cost.all_to_all(
                p, mine, model.d, model.k, layout.ep, domain=layout.domain or None,
                dtype=wire, algorithm=layout.algorithm, node_limit=layout.node_limit,
                imbalance=imbalance, combine=back,
            )
            for wire, back in ((layout.wire, False), ("bf16", True))
        ),
    )  # fmt: skip


def _block_weights(model: MoEConfig, layout: Layout) -> float:
    """Weights of a block on a rank, whose gradients are added up in float32."""
    own = model.matrices * model.d * model.f * model.experts
    own /= layout.ep * layout.expert_tp
    other = sum(n * k for n, k in model.attention())
    return own + (other + model.matrices * model.d * model.shared_f) / layout.tp


class Step(NamedTuple):
    """A training step.

    Attributes:
        tokens_per_second: per GPU.
        seconds: of the step.
        layer: seconds of a block, forward and backward, with what is not hidden.
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


# Share of the host's work that CUDA graphs leave: none, of parts, of the whole step.
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
        exposed (float, optional): share of the exchanges that nothing hides. Default: what
            published frameworks leave, a fitted constant
        year (float): of the software; published numbers grow with it.
    """
    check(
        "train_step", global_batch=global_batch, seq=seq, imbalance=imbalance, year=year
    )
    c = p.constants
    tokens, accumulation = layout.micro_batch * seq, layout.accumulation(global_batch)
    exposed = c.exposed if exposed is None else exposed
    check("train_step", exposed=exposed)
    speed = math.exp(-c.drift * (year - 2026.0))
    parts: dict[str, float] = defaultdict(float)
    layer, host_bound = 0.0, False
    for pass_, share in (("fwd", 0.4), ("bwd", 0.6)):
        b = block(p, model, layout, tokens, seq, pass_, imbalance)
        repeated = 1 + (_REPEATED[layout.recompute] if pass_ == "fwd" else 0.0)
        host = c.host_us * US * share * _GRAPHS[layout.graphs]
        work = b.compute * c.stack
        host_bound |= host > work
        layer += repeated * speed * (cost.smooth_max(work, host) + exposed * b.comm)
        for name, seconds in b._asdict().items():
            parts[name] += seconds * repeated
    layers = model.layers + model.mtp
    vocab = model.vocab / layout.tp
    head = 3 * cost.gemm(p, 1, tokens / layout.cp, int(vocab), model.d)
    head = head * (1 + model.mtp) + cost.stream(p, tokens / layout.cp * vocab * 10, 4)
    micro = layer * layers + head
    if layout.pp > 1:  # whole layers per stage, one of which has the head as well
        deepest = math.ceil((layers + head / layer) / layout.pp - 0.35)
        micro = max(head, layer * max(deepest, 1))
    bubble = (layout.pp - 1) / (layout.virtual * accumulation)
    seconds = accumulation * micro * (1 + bubble)
    seconds += _step_ends(p, model, layout, micro, accumulation)
    rate = global_batch * seq / seconds / layout.gpus
    return Step(rate, seconds, layer, parts["comm"], bubble, dict(parts), host_bound)


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
    if layout.fsdp:  # gathered in both passes of a micro-batch, and reduced
        moved = 8 * reduced / link - 0.7 * micro
        return accumulation * max(0.0, moved) + cost.stream(p, 20 * owned, 4)
    return max(0.0, 4 * reduced / link - hidden) + cost.stream(p, 20 * owned, 4)


def infer(
    p: Profile,
    model: MoEConfig,
    tokens: float,
    context: int,
    *,
    ep: int,
    phase: str,
    domain: int = 0,
    redundant: int = 0,
    imbalance: float = 1.0,
    two_batches: bool = True,
    dtype: str = "fp8",
) -> float:
    """Tokens per second and GPU of prefill or decode, data-parallel attention.

    Args:
        p (Profile): the device.
        model (MoEConfig): the model.
        tokens (float): of a GPU: sequences in decode, tokens in prefill.
        context (int): tokens of the cache of a sequence.

    Keyword Args:
        ep (int): ranks that share the experts.
        phase (str): ``"prefill"`` or ``"decode"``.
        domain (int): ranks joined by the fast link; 0 for the device's.
        redundant (int): replicas of experts over all ranks.
        imbalance (float): heaviest expert rank over the mean.
        two_batches (bool): hide exchanges behind the other half of the tokens.
        dtype (str): of weights and products.
    """
    if phase not in ("prefill", "decode"):
        raise ValueError(f"infer: phase must be prefill or decode, got {phase!r}")
    check("infer", tokens=tokens, context=context, ep=ep, domain=domain,
          redundant=redundant, imbalance=imbalance)  # fmt: skip
    half = tokens / 2 if two_batches else tokens
    dev = p.device
    shapes = [(int(n), int(k)) for n, k in model.attention()]
    compute = sum(cost.gemm(p, 1, half, n, k, dtype) for n, k in shapes)
    compute += sum(cost.quantize(p, half * k) for _, k in shapes)
    if phase == "prefill":
        compute += model.core_flops(half, context) / (0.55 * dev.bf16)
    else:
        cache = 576 * 2 if model.mla else 4 * model.kv_heads * model.head_dim
        flops = 4 * half * context * model.heads * 576 if model.mla else 0
        read = cost.stream(p, half * context * cache, 2)
        compute += cost.smooth_max(read, flops / (0.6 * dev.bf16))
    compute += cost.stream(p, half * model.d * 20, 10)
    compute += cost.experts(
        p, half * model.k * imbalance, model.d, model.f, (model.experts + redundant) / ep,
        kernel="deepgemm++", dtype=dtype, tokens=half,
    )  # fmt: skip
    compute += cost.dense_mlp(p, half, model.d, model.shared_f, dtype)
    compute += cost.router(p, half, model.d, model.experts, model.k)
    comm = sum(
        cost.all_to_all(
            p, half, model.d, model.k, ep, domain=domain or None, dtype=wire,
            algorithm="hierarchical" if phase == "prefill" else "low_latency",
            node_limit=model.node_limit, imbalance=imbalance, combine=wire == "bf16",
        )
        for wire in (dtype, "bf16")
    )  # fmt: skip
    compute *= p.constants.stack
    layer = 2 * max(compute, comm) if two_batches else compute + comm
    head = cost.gemm(p, 1, tokens if phase == "decode" else 8, model.vocab, model.d)
    return tokens / (layer * model.layers + head)


def inference_table(
    model: MoEConfig,
    p: Profile,
    gpus: int,
    *,
    phase: str,
    tokens: int,
    context: int,
    imbalance: Callable[[int], float] = lambda ep: 1.0,
    dtype: str | None = None,
    ep: int | None = None,
    domain: int = 0,
) -> list[dict[str, Any]]:
    """Tokens a second over the EP degrees that fit, best first.

    Args:
        model (MoEConfig): the model.
        p (Profile): the GPU.
        gpus (int): how many; a smaller EP runs copies of the group.

    Keyword Args:
        phase (str): ``"prefill"`` or ``"decode"``.
        tokens (int): of a GPU: tokens in prefill, sequences in decode.
        context (int): tokens of a sequence in the cache.
        imbalance (callable): heaviest expert rank over the mean, of an EP degree.
        dtype (str, optional): of weights and products. Default: FP8 where the device
            multiplies it, else bf16
        ep (int, optional): the only degree to try.
        domain (int): ranks joined by the fast link; 0 for the device's.
    """
    check("inference_table", gpus=gpus, tokens=tokens, context=context, domain=domain)
    dtype = dtype or ("fp8" if "fp8" in p.device.dtypes else "bf16")
    p.check_dtype("inference_table", dtype)
    degrees = [2**i for i in range(gpus.bit_length())] if ep is None else [ep]
    degrees = [e for e in degrees if gpus % e == 0 == model.experts % e]
    if not degrees:
        raise ValueError(
            f"inference_table: ep must divide {gpus} GPUs and {model.experts} experts, "
            f"got {ep}"
        )
    weights, size = model.parameters(), cost.ITEMSIZE[dtype]
    row = 576 if model.mla else 2 * model.kv_heads * model.head_dim
    held = tokens * (context if phase == "decode" else 1) * row * 2 * model.layers
    held += tokens * model.d * 20 * (phase == "prefill")
    need = {
        e: (weights["expert"] / e + weights["other"]) * size + held for e in degrees
    }
    out = [
        {
            "ep": e,
            "tokens_per_second_per_gpu": infer(
                p, model, tokens, context, ep=e, phase=phase, domain=domain,
                imbalance=imbalance(e), dtype=dtype,
            ),
            "dtype": dtype,
            "memory": need[e],
            "imbalance": imbalance(e),
        }
        for e in degrees
        if need[e] <= 0.9 * p.device.memory
    ]  # fmt: skip
    if not out:
        least = min(need, key=need.__getitem__)
        raise ValueError(
            f"inference_table: {dtype} weights and cache fit on no ep of {gpus} GPUs with "
            f"{p.device.memory / 1e9:.0f} GB; at ep={least} they need "
            f"{need[least] / 1e9:.0f} GB"
        )
    return sorted(out, key=lambda r: -r["tokens_per_second_per_gpu"])


def cpu_table(
    model: MoEConfig, p: Profile, tokens: Sequence[int] = (1, 64, 2048)
) -> list[dict[str, Any]]:
    """Tokens a second of a model on a CPU, by dtype, tokens of a step and pass.

    Attention's cache is not counted; projections and the experts are. A row says whether
    the weights (and, in training, gradients and Adam's moments) fit.
    """
    if p.cpu is None:
        raise ValueError(f"cpu_table: {p.name} is not a profile of a CPU")
    weights, moe = model.parameters(), model.layers - model.dense
    out = []
    for dtype, t, pass_ in itertools.product(
        ("bf16", "fp32"), tokens, ("fwd", "fwd+bwd")
    ):
        if pass_ == "fwd+bwd" and t == 1:
            continue
        experts = cpu_experts(
            p.cpu, t, model.d, model.f, model.experts, model.k, dtype=dtype, pass_=pass_
        )
        dense = 2 * t * weights["other"] / cpu_rate(p.cpu, t, dtype)
        dense = cost.smooth_max(
            dense, weights["other"] * cost.ITEMSIZE[dtype] / p.cpu.memory
        )
        dense *= 3 if pass_ == "fwd+bwd" else 1
        need = sum(weights.values()) * (cost.ITEMSIZE[dtype] if pass_ == "fwd" else 16)
        out.append({
            "dtype": dtype, "tokens": t, "pass": pass_,
            "layer_ms": 1e3 * experts,
            "tokens_per_second": t / (moe * experts + dense),
            "memory": need, "fits": need <= 0.9 * p.device.memory,
        })  # fmt: skip
    return out


# ---- memory ----------------------------------------------------------------------------


def saved_bytes(
    tokens: float,
    rows: float,
    d: int,
    f: float,
    *,
    k: int = 0,
    num_experts: int = 0,
    gated: bool = True,
    itemsize: float = 2,
    kernel: str = "moe_mlp",
) -> float:
    """Bytes that the experts of one layer keep for backward.

    ``moe_mlp`` keeps its input and the pre-activations; with ``k`` and ``num_experts``
    also the router weights (float32), slots of rows, rows of slots and offsets. The others
    are what those libraries keep by their papers.

    Args:
        tokens, rows (float): T and R.
        d (int): D.
        f (float): F.

    Keyword Args:
        k, num_experts (int): of the metadata of ``moe_mlp``; 0 leaves it out.
        gated (bool): gate and up projections.
        itemsize (float): of the activations.
        kernel (str): ``moe_mlp``, ``deepgemm++``, ``scattermoe`` or ``mcore``.
    """
    g = 2 if gated else 1
    kept = {
        "moe_mlp": tokens * d + g * rows * f,
        "deepgemm++": (tokens + rows) * d + g * rows * f,
        "scattermoe": (tokens + rows) * d + (g + 2) * rows * f,
        "mcore": rows * d + (g + 1) * rows * f,
    }
    if kernel not in kept:
        raise ValueError(
            f"saved_bytes: kernel must be one of {list(kept)}, got {kernel!r}"
        )
    metadata = 0.0
    if kernel == "moe_mlp" and k:
        metadata = tokens * k * 4 + 4 * rows + 4 * tokens * k + 4 * num_experts
    return itemsize * kept[kernel] + metadata


class Memory(NamedTuple):
    """Bytes on the first pipeline rank.

    Attributes:
        weights: bf16 weights, gradients, sharded optimizer state.
        attention, experts: activations kept for backward, all micro-batches in flight.
        reserve: of the framework, its buffers and fragmentation.
        total: of all.
    """

    weights: float
    attention: float
    experts: float
    reserve: float

    @property
    def total(self) -> float:
        return sum(self)


def memory(
    model: MoEConfig,
    layout: Layout,
    *,
    seq: int = 4096,
    global_batch: int | None = None,
    capacity: float = 1.0,
) -> Memory:
    """Peak bytes of a GPU in training.

    Recomputation: ``"selective"`` makes norms, activation functions and the up-projections
    of latent attention again, ``"full"`` keeps the input of a block only.

    Keyword Args:
        seq (int): length of a sequence.
        global_batch (int, optional): bounds the micro-batches in flight.
        capacity (float): rows that the experts' buffers hold, over the mean.
    """
    weights = model.parameters()
    other = weights["other"] / layout.tp / layout.pp
    expert = weights["expert"] / layout.ep / layout.expert_tp / layout.pp
    own = expert / layout.expert_dp * uneven(model, layout)
    sharded = (other / layout.dp + own) * layout.replicate
    held = (2 + layout.gradient_bytes) * (other + expert)
    held += layout.optimizer_bytes * sharded
    if layout.fsdp:
        held = (layout.gradient_bytes + layout.optimizer_bytes) * sharded
        held += _gathered(model, layout)
    t = layout.micro_batch * seq / layout.cp / layout.tp
    rows, low = t * model.k * capacity, layout.dtype in LOW_PRECISION
    attention = t * 2 * (model.d * 4 + sum(n for n, _ in model.attention()))
    experts = saved_bytes(t, rows, model.d, model.f, kernel=layout.kernel)
    shared = saved_bytes(t, t, model.d, model.shared_f) if model.shared_f else 0.0
    if layout.recompute == "full":
        attention = experts = shared = 0.0
    elif layout.recompute == "selective":
        attention *= (0.35 if model.mla else 0.6) * (0.6 if low else 1)
        experts = saved_bytes(t, rows, model.d, model.f)
        if layout.kernel == "mcore":  # its gathered input as well, in 8 bits if low
            experts += rows * model.d * (1 if low else 2)
    flight = layout.pp
    if global_batch is not None:
        flight = min(layout.accumulation(global_batch), layout.pp)
    if layout.virtual > 1:
        flight *= 1 + (layout.pp - 1) / (layout.pp * layout.virtual)
    layers = model.layers / layout.pp * flight
    attention = (attention + 2 * t * model.d) * layers
    return Memory(held, attention, (experts + shared) * layers, 6e9)


def uneven(model: MoEConfig, layout: Layout) -> float:
    """Largest shard over the mean, where FSDP has whole experts to share out."""
    local, shards = model.experts // layout.ep, layout.expert_dp // layout.replicate
    if not layout.fsdp or local < shards:
        return 1.0
    return math.ceil(local / shards) * shards / local


def _gathered(model: MoEConfig, layout: Layout) -> float:
    """Bytes that FSDP has together: what is around the layers, two of them, a layer's gradients."""
    around = 2 * model.vocab * model.d
    return cost.ITEMSIZE["bf16"] * (around + 3 * _block_weights(model, layout))


def layer_peak(
    tokens: float,
    rows: float,
    d: int,
    f: float,
    local: float,
    *,
    shared_f: int = 0,
    low: bool = False,
    kernel: str = "moe_mlp",
) -> float:
    """Peak bytes of one layer forward and backward: weights, gradients, what is kept, and
    the largest transients (dH, dA and the rows of dX)."""
    weights = 3 * d * f * local + 3 * d * shared_f
    saved = saved_bytes(tokens, rows, d, f, kernel=kernel)
    if shared_f:
        saved += saved_bytes(tokens, tokens, d, shared_f) + 2 * tokens * shared_f
    return weights * (4 + 2 * low) + saved + rows * (6 * f + 2 * d) + 8 * tokens * d


# ---- a module under fake tensors -------------------------------------------------------

_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def _moe_op_seconds(p: Profile, name: str, args: Sequence[Any]) -> float:
    """Of ``_moe_mlp`` and its backward, whose balance is unknown: experts share evenly."""
    shift = 1 if name == "_moe_mlp_backward" else 0
    x, w_in, w_out, offs = args[shift : shift + 4]
    slots = args[shift + 5] if len(args) > shift + 5 else None
    rows = slots.shape[0] if slots is not None else x.shape[0]
    (e, d, f), dtype = w_out.shape, _DTYPES.get(x.dtype, "bf16")
    pass_ = "bwd" if shift else "fwd"
    if p.cpu is not None:
        whole = {
            q: cpu_experts(p.cpu, rows, d, f, e, 1, dtype=dtype, pass_=q)
            for q in ("fwd", "fwd+bwd")
        }
        return whole["fwd"] if pass_ == "fwd" else whole["fwd+bwd"] - whole["fwd"]
    return cost.experts(
        p, rows, d, f, e, kernel="moe_mlp", dtype=dtype, pass_=pass_, tokens=x.shape[0]
    )


def op_seconds(p: Profile, func: Any, args: Sequence[Any], out: Any) -> float:
    """Seconds of one op by its fake or meta tensors; 0 for views.

    Products and ``_moe_mlp`` are modelled, other ops stream their bytes once.
    """
    packet = getattr(func, "_overloadpacket", func)
    name = packet.__name__
    if packet in _VIEW_OPS or packet in _IGNORE_OPS or func.namespace != "aten":
        return 0.0
    if name in ("_moe_mlp", "_moe_mlp_backward"):
        return _moe_op_seconds(p, name, args)
    tensors = [t for t in (*args, *(out if isinstance(out, (tuple, list)) else (out,)))
               if isinstance(t, torch.Tensor)]  # fmt: skip
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        a, b = args[-2:] if name in ("mm", "bmm") else args[1:3]
        groups = a.shape[0] if a.dim() == 3 else 1
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        dtype = _DTYPES.get(a.dtype, "bf16")
        if p.cpu is None:
            return cost.gemm(p, groups, m, n, k, dtype)
        rate = p.cpu.rate32 if dtype == "fp32" else p.cpu.rate16
        moved = sum(t.numel() * t.element_size() for t in tensors) / p.cpu.memory
        return cost.smooth_max(2 * groups * m * n * k / rate, moved)
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    if p.cpu is not None:
        moved = nbytes / p.cpu.memory
        if packet in flop_registry:  # attention
            rate = p.cpu.rate32 if tensors[0].dtype == torch.float32 else p.cpu.rate16
            moved = cost.smooth_max(
                flop_registry[packet](*args, out_val=out) / rate, moved
            )
        return moved
    seconds = cost.stream(p, nbytes)
    if name == "_grouped_mm":
        a, b = args[:2]
        groups = b.shape[0] if b.dim() == 3 else args[2].shape[0]
        m, k, n = a.shape[-2] / groups, a.shape[-1], b.shape[-1]
        if b.dim() == 2:  # weight gradients: the summed dimension is the ragged one
            m, k = a.shape[-2], a.shape[-1] / groups
        relative = p.constants.grouped16
        return cost.gemm(
            p, groups, m, n, k, _DTYPES.get(a.dtype, "bf16"), relative=relative
        )
    if packet in flop_registry:
        flops = flop_registry[packet](*args, out_val=out)
        return cost.smooth_max(flops / (0.55 * p.device.bf16), seconds)
    return seconds


def inductor_estimate(p: Profile) -> Callable[[Any, int | None], float | None]:
    """``custom_runtime_estimation`` of Inductor's overlap scheduling, for MoE layers.

    Milliseconds of ``_moe_mlp`` and its backward, and with a profile of a CPU, whose links are
    measured, of an all-to-all; None, which leaves the node to Inductor, for everything else.
    All ranks need the same profile: from others, they would order collectives differently.

    Example::
        >>> config = torch._inductor.config.aten_distributed_optimizations
        >>> config.custom_runtime_estimation = inductor_estimate(profile("H100"))
    """
    # Can be pickled, as the keys of Inductor's caches are.
    return functools.partial(_inductor_milliseconds, p)


def _inductor_milliseconds(
    p: Profile, node: Any, override_size: int | None = None
) -> float | None:
    name = getattr(getattr(node.target, "_overloadpacket", None), "__name__", "")
    if name == "all_to_all_single" and p.cpu is not None:
        x, splits, *_ = node.args
        nbytes = _by_hints(x).nbytes if override_size is None else override_size
        sent = nbytes * (1 - 1 / len(splits))
        start = p.constants.fast_us * cost.US
        return 1e3 * cost.link_seconds(start, p.device.fast, sent, turn=p.cpu.turn)
    if name not in ("_moe_mlp", "_moe_mlp_backward"):
        return None
    args = torch.fx.map_arg(node.args, _by_hints)
    return 1e3 * op_seconds(p, node.target, args, None)


def _by_hints(node: torch.fx.Node) -> Any:
    """What a node returns, of the sizes that a dynamic one hints at: an estimate is no guard."""
    from torch._inductor.config import unbacked_symint_fallback as fallback

    x = node.meta.get("val")
    if not isinstance(x, torch.Tensor):
        return x
    sizes = [optimization_hint(n, fallback) for n in x.shape]
    return torch.empty(sizes, dtype=x.dtype, device="meta")


class MoERuntimeEstimator(TorchDispatchMode):
    """Sums the modelled seconds and the counted FLOPs of the ops of a module.

    Like ``RuntimeEstimator``, under ``FakeTensorMode`` nothing is computed or allocated;
    unlike it, routed experts cost what their products and their balance cost.

    Args:
        profile (Profile): the device.

    Attributes:
        seconds (float): of all ops.
        flops (int): of all ops, as ``FlopCounterMode`` counts them.
        by_op (dict[str, float]): seconds by op.

    Example::
        >>> # xdoctest: +SKIP("needs a model")
        >>> with FakeTensorMode(), MoERuntimeEstimator(profile("H100")) as estimate:
        ...     model(tokens).sum().backward()
        >>> estimate.seconds, estimate.by_op["_moe_mlp"]
    """

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self.profile = profile
        self.seconds, self.flops = 0.0, 0
        self.by_op: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        seconds = op_seconds(self.profile, func, args, out)
        packet = func._overloadpacket
        self.seconds += seconds
        self.by_op[packet.__name__] += seconds
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        return out
