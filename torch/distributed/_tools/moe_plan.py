# mypy: allow-untyped-defs
"""The layout with the most tokens a second that fits, and a reason per choice.

:func:`plan` tries every layout that divides, keeps those that fit, sums their steps from
:mod:`.moe_estimator`, and explains the best one: a reason per choice with its numbers, and
the next best alternative per dimension. Its result speaks the languages of
``ExpertParallel`` and of torchtitan's ``ParallelDims``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, TYPE_CHECKING

import torch
from torch.distributed._tools import moe_cost_model as cost
from torch.distributed._tools.moe_arguments import check, RANGES
from torch.distributed._tools.moe_config import MoEConfig
from torch.distributed._tools.moe_estimator import (
    Layout,
    Memory,
    memory,
    Step,
    train_step,
)
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
from torch.distributed._tools.moe_simulator import rows_of_pair


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed._tools.moe_profile import Profile
    from torch.distributed._tools.moe_trace import Traced
    from torch.distributed.tensor.parallel import ExpertPlacement


__all__ = ["Plan", "plan"]

DIMENSIONS = ("ep", "tp", "pp", "cp", "micro_batch", "recompute", "dtype", "algorithm")
FILL = 0.95  # of the device's memory
# Ranks that FSDP shards over: each starts a message of a ring, and a tensor when it is made.
MOST_SHARDS = 1024
LAYERS_PER_STAGE = 3  # sends between stages are not modelled; short ones would show
# Nodes of a token at most: what was published for K = 8, and twice that. A limit costs the
# router freedom and has to be trained, so that it has to pay for itself.
NODE_LIMITS = (8, 4)
LIMIT_PAYS = 0.03
EVEN = 1.02  # heaviest rank over mean, up to which layouts are compared without it


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` found.

    Attributes:
        layout, step, memory: the best one, its step and its bytes.
        choices: one per dimension.
        best: (tokens per second and GPU, layout) of the best layouts, best first, with
            the model's own node limit.
        error: median relative error of the model on training rows it was not fitted on;
            layouts closer than that are not told apart by it.
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

        ``static``: with the capacity for the chosen factor, else exact sizes are sent.
        """
        from torch.distributed._moe.overlap_schedule import OverlapSchedule

        x = self.layout
        wire = torch.float8_e4m3fn if x.wire in cost.LOW_PRECISION else None
        options: dict[str, Any] = {"wire_dtype": wire}
        if x.algorithm == "hierarchical" and x.ep > self.domain:
            options |= {"token_switch": "hierarchical", "ranks_per_node": self.domain}
        if self.chunks > 1:
            options["schedule"] = OverlapSchedule(num_chunks=self.chunks)
        if static and x.ep > 1:
            nodes = x.ep // self.domain if "token_switch" in options else 1
            tokens = math.ceil(self.tokens / self.chunks)
            known = self.model.k, self.capacity_factor, OVERFLOW
            near = rows_of_pair(tokens * nodes, x.ep, *known)
            far = rows_of_pair(tokens, nodes, *known)
            options["capacity"] = (far, near) if nodes > 1 else near
        if self.placement is not None:
            options["placement"] = self.placement
        return options

    @functools.cached_property
    def placement(self) -> ExpertPlacement | None:
        """Of the layers of one model, where experts have replicas.

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
        """What this rank has of a step's sequences, one micro-batch after the other.

        Args:
            batch (Tensor): (``global_batch``, \\*), the same on all ranks. Those of ``tp`` get equal
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
        """Every choice: why, with its numbers, and what the next best would cost."""
        lines = [
            f"{self.step.tokens_per_second:,.0f} tokens/s/GPU, step {self.step.seconds:.3f} s, "
            f"{_gb(self.memory.total)} GB a GPU\n"
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
        return {
            "phase": "train",
            "device": self.device,
            "provenance": self.provenance,
            "global_batch": self.global_batch,
            "seq": self.seq,
            "layout": dataclasses.asdict(self.layout),
            "tokens_per_second_per_gpu": self.step.tokens_per_second,
            "step": self.step._asdict(),
            "memory": {**self.memory._asdict(), "total": self.memory.total},
            "parallel_dims": self.parallel_dims(),
            "chunks": self.chunks,
            "capacity_factor": self.capacity_factor,
            "replicas": self.replicas,
            "row_alignment": self.row_alignment,
            "recipe": self.recipe,
            "error": self.error,
            "choices": [c._asdict() for c in self.choices],
            "best": [[t, dataclasses.asdict(x)] for t, x in self.best],
        }


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.{0 if nbytes > 1e10 else 3}f}"


# ---- candidates ------------------------------------------------------------------------


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length())]


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def _check_fixed(
    model: MoEConfig, p: Profile, gpus: int, seq: int, fixed: dict[str, Any]
) -> None:
    """Errors of fixed values that no layout can have, with the nearest that can."""
    known = [f.name for f in dataclasses.fields(Layout) if f.name != "gpus"]
    if unknown := fixed.keys() - set(known):
        raise ValueError(
            f"plan: {sorted(unknown)} are not dimensions; those are {', '.join(known)}"
        )
    check("plan", **{n: v for n, v in fixed.items() if n in RANGES})
    Layout(**fixed)  # the choices that are names
    domain = fixed.get("domain") or p.device.domain
    whole = {
        "ep": (model.experts, f"the experts, {model.experts}"),
        "tp": (model.heads, f"the attention heads, {model.heads}"),
        "cp": (seq, f"the tokens of a sequence, {seq}"),
        "expert_tp": (model.f, f"the width of an expert, {model.f}"),
    }
    counts = ("ep", "tp", "pp", "cp", "expert_tp")
    shared = ("tp",) if fixed.get("fsdp") else ()  # who share out a sequence
    for n, what, names in (
        *((n, what, (name,)) for name, (n, what) in whole.items()),
        (math.gcd(seq, model.heads), whole["cp"][1], shared),
        (gpus, f"the {gpus} GPUs", (*counts, "replicate")),
    ):
        for name in names:
            value = fixed.get(name, 1)
            if n % value:
                works = [i for i in _divisors(n) if i <= gpus]
                nearest = min(works, key=lambda i: abs(i - value))
                raise ValueError(
                    f"plan: {name} must divide {what}, got {value}; nearest that works: "
                    f"{name}={nearest}"
                )
    for name, most, what in (
        ("tp", domain, "ranks that the fast link joins"),
        ("pp", max(1, model.layers // LAYERS_PER_STAGE), "stages of three layers"),
        ("virtual", model.layers // fixed.get("pp", 1), "layers of a stage"),
    ):
        if fixed.get(name, 1) > most:
            raise ValueError(
                f"plan: {name} must be at most the {most} {what}, got {fixed[name]}"
            )
    for a, b in (("tp", "cp"), ("pp", "ep"), ("ep", "expert_tp")):
        together = math.prod(fixed.get(n, 1) for n in {a, b, "pp"})
        if gpus % together:
            raise ValueError(
                f"plan: {a} x {b} with pp, {together}, must divide the {gpus} GPUs"
            )


def _options(
    model: MoEConfig, gpus: int, dtypes: Sequence[str], fixed: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Every combination of what is searched, with what is fixed."""
    options: dict[str, Sequence[Any]] = {
        "tp": _powers(min(8, gpus)),
        "pp": _powers(min(32, model.layers, gpus)),
        "cp": (1,),
        "ep": [e for e in _powers(min(model.experts, gpus)) if model.experts % e == 0],
        "micro_batch": (1, 2, 4),
        "dtype": dtypes,
        "recompute": ("none", "full") if fixed.get("fsdp") else ("selective", "full"),
        "algorithm": ("hierarchical",),  # flat sends more; its time is in the reason
    }
    options |= {k: (v,) for k, v in fixed.items() if k in options}
    rest = {k: v for k, v in fixed.items() if k not in options}
    for values in itertools.product(*options.values()):
        yield {"node_limit": model.node_limit, **rest, **dict(zip(options, values))}


def _unit(x: dict[str, Any]) -> int:
    """What divides the GPUs of a layout."""
    return math.lcm(
        x["tp"] * x["pp"] * x["cp"], x["pp"] * x["ep"] * x.get("expert_tp", 1)
    )


def _layout(
    model: MoEConfig, domain: int, gpus: int, batch: int, seq: int, x: dict[str, Any]
) -> Layout | None:
    """The layout of a combination, or None where it does not divide."""
    tp, pp, ep, virtual = x["tp"], x["pp"], x["ep"], x.get("virtual", 1)
    if (
        gpus % _unit(x)
        or tp > domain
        or model.heads % tp
        or (x.get("fsdp") and not model.mla and model.kv_heads % tp)
        or (x.get("fsdp") and seq % tp)  # ranks of tp share out a sequence
        or (ep > domain and ep % domain)
    ):
        return None
    copies = x.get("replicate", 1)  # each has all experts
    if gpus % copies or (gpus // copies) % _unit(x):
        return None
    if pp > 1 and pp * LAYERS_PER_STAGE > model.layers or pp * virtual > model.layers:
        return None
    replicas = x["micro_batch"] * gpus // (tp * pp * x["cp"])
    if batch % replicas or (pp > 1 and batch // replicas < pp):
        return None
    if pp > 1 and "virtual" not in x:
        x = {**x, "virtual": max(1, min(8, model.layers // pp // 2))}
    if x.get("fsdp") and "replicate" not in x:
        x = {**x, "replicate": max(1, gpus // (tp * pp * x["cp"]) // MOST_SHARDS)}
    return Layout(gpus=gpus, **x)


def _candidates(
    model: MoEConfig, p: Profile, gpus: int, batch: int, seq: int, dtypes: Sequence[str],
    fixed: dict[str, Any],
) -> Iterator[Layout]:  # fmt: skip
    domain = fixed.get("domain") or p.device.domain
    for x in _options(model, gpus, dtypes, fixed):
        if (layout := _layout(model, domain, gpus, batch, seq, x)) is not None:
            yield layout


def _memory(
    model: MoEConfig, x: Layout, batch: int, seq: int, traced: Traced | None = None
) -> Memory:
    if traced is not None:
        return traced.memory(model, x, seq, batch)
    return memory(model, x, seq=seq, global_batch=batch)


def _step(
    p: Profile, model: MoEConfig, x: Layout, batch: int, seq: int, imbalance: float,
    exposed: float, traced: Traced | None,
) -> Step:  # fmt: skip
    kw = {"global_batch": batch, "seq": seq, "imbalance": imbalance}
    if traced is not None:
        return traced.step(p, model, x, **kw)
    return train_step(p, model, x, exposed=exposed, **kw)


def _ranked(
    model: MoEConfig, p: Profile, layouts: Sequence[Layout], batch: int, seq: int,
    imbalance: float, exposed: float, traced: Traced | None = None,
) -> list[tuple[float, Layout, Step, Memory]]:  # fmt: skip
    """Layouts that fit, best first."""
    out = []
    for x in layouts:
        m = _memory(model, x, batch, seq, traced)
        if m.total > FILL * p.device.memory:
            continue
        step = _step(p, model, x, batch, seq, imbalance, exposed, traced)
        out.append((step.tokens_per_second, x, step, m))
    out.sort(key=lambda e: -e[0])
    if out:  # of equals, the one with less machinery
        equal = [e for e in out if e[0] > 0.995 * out[0][0]]
        best = min(
            equal, key=lambda e: (e[1].dtype != "bf16", e[1].tp * e[1].pp, e[1].ep)
        )
        out.remove(best)
        out.insert(0, best)
    return out


def _nearest(
    model: MoEConfig, p: Profile, gpus: int, batch: int, seq: int, dtypes: Sequence[str],
    fixed: dict[str, Any], traced: Traced | None,
) -> str:  # fmt: skip
    """The next smaller and the next larger number of GPUs on which something fits."""
    domain, each = fixed.get("domain") or p.device.domain, math.ceil(batch / gpus)
    below: tuple[int, Layout] | None = None
    above: tuple[int, Layout] | None = None

    def fitting(n: int, x: dict[str, Any]) -> Layout | None:
        layout = _layout(model, domain, n, n * each, seq, x)
        if layout is None or n * each > RANGES["global_batch"][1]:
            return None
        size = _memory(model, layout, n * each, seq, traced).total
        return layout if size <= FILL * p.device.memory else None

    most = min(64 * gpus, int(RANGES["gpus"][1]))
    for x in _options(model, most, dtypes, fixed):
        unit = _unit(x)
        low, high = (gpus - 1) // unit, most // unit
        if (
            low
            and (below is None or low * unit > below[0])
            and (y := fitting(low * unit, x))
        ):
            below = (low * unit, y)
        low = gpus // unit + 1
        if low > high or (above is not None and low * unit >= above[0]):
            continue
        if fitting(high * unit, x) is None:
            continue
        while low < high:  # more GPUs share the optimizer's state
            middle = (low + high) // 2
            low, high = (
                (low, middle) if fitting(middle * unit, x) else (middle + 1, high)
            )
        if above is None or low * unit < above[0]:
            y = fitting(low * unit, x)
            above = (low * unit, y) if y else above
    shown = [
        f"gpus={n}, ep={y.ep} tp={y.tp} pp={y.pp} with a batch of {n * each}"
        for n, y in filter(None, (below, above))
    ]
    return f". Nearest that works: {'; or '.join(shown)}" if shown else ""


def _nothing_fits(
    model: MoEConfig, p: Profile, gpus: int, batch: int, seq: int, dtypes: Sequence[str],
    fixed: dict[str, Any], traced: Traced | None,
) -> ValueError:  # fmt: skip
    layouts = list(_candidates(model, p, gpus, batch, seq, dtypes, fixed))
    if layouts:
        sized = [(_memory(model, x, batch, seq, traced).total, x) for x in layouts]
        least, x = min(sized, key=lambda e: e[0])
        message = (
            f"plan: training: nothing fits in {FILL:.0%} of {_gb(p.device.memory)} GB; "
            f"the smallest that divides {gpus} GPUs, ep={x.ep} tp={x.tp} pp={x.pp} "
            f"recompute={x.recompute}, needs {_gb(least)} GB for weights, gradients, "
            "optimizer and activations"
        )
        return ValueError(
            message + _nearest(model, p, gpus, batch, seq, dtypes, fixed, traced)
        )
    domain, batches = fixed.get("domain") or p.device.domain, set()
    for x in _options(model, gpus, dtypes, fixed):
        if not gpus % _unit(x):
            ranks = x["micro_batch"] * gpus // (x["tp"] * x["pp"] * x["cp"])
            least = max(1, x["pp"])
            near = (batch // ranks, batch // ranks + 1, least)
            batches |= {
                n * ranks for n in near
                if n >= least and _layout(model, domain, gpus, n * ranks, seq, x)
            }  # fmt: skip
    if batches:
        below = max((n for n in batches if n < batch), default=None)
        above = min((n for n in batches if n > batch), default=None)
        works = " or ".join(f"global_batch={n}" for n in (below, above) if n)
        return ValueError(
            f"plan: training: no layout divides gpus={gpus}, global_batch={batch} and "
            f"{fixed or 'the model'}: the batch must be a multiple of micro-batch times "
            f"data-parallel ranks, and fill every pipeline; nearest that works: {works}"
        )
    return ValueError(
        f"plan: training: no layout divides gpus={gpus} and {fixed or 'the model'}: "
        "tp x pp x cp and pp x ep must divide the GPUs"
        + _nearest(model, p, gpus, batch, seq, dtypes, fixed, traced)
    )


# ---- reasons ---------------------------------------------------------------------------


def _alternative(
    ranked: list[tuple[float, Layout, Step, Memory]], name: str
) -> tuple[Any, float | None]:
    best = ranked[0]
    chosen = getattr(best[1], name)
    for rate, x, *_ in ranked:
        if getattr(x, name) != chosen:
            return getattr(x, name), 1 - rate / best[0]
    return None, None


def _algorithm(x: Layout, domain: int) -> str:
    """Name of the exchange that runs: a node has one level."""
    if x.ep == 1 or x.ep > domain or x.algorithm not in ("hierarchical", "flat"):
        return x.algorithm if x.ep > 1 else "none"
    return "a copy per rank" if x.algorithm == "hierarchical" else "a copy per expert"


def _reasons(
    p: Profile, model: MoEConfig, x: Layout, step: Step, m: Memory, tokens: float
) -> dict[str, str]:
    """Why, in numbers, per dimension."""
    weights = model.parameters()["expert"]
    domain = x.domain or p.device.domain
    parts, busy = step.parts, sum(step.parts.values())
    share = {k: f"{v / busy:.0%}" for k, v in parts.items()}
    other = "flat" if x.algorithm == "hierarchical" else "hierarchical"
    name, other_name = (
        _algorithm(x, domain),
        _algorithm(replace(x, algorithm=other), domain),
    )

    def exchange(algorithm: str, limit: int) -> float:
        return 1e3 * sum(
            cost.all_to_all(
                p, tokens, model.d, model.k, x.ep, domain=domain, dtype=w,
                algorithm=algorithm, node_limit=limit, combine=w == "bf16",
            ) for w in (x.wire, "bf16")
        )  # fmt: skip

    wire = cost.wire_bytes(
        tokens, model.d, model.k, x.ep, domain, x.wire,
        node_limit=x.node_limit, dedup=x.algorithm != "flat",
    )  # fmt: skip
    sent = ", ".join(f"{v / 1e6:.0f} MB {k}" for k, v in wire.items())
    return {
        "ep": f"experts of a rank {6 * weights / x.ep / x.pp / 1e9:.0f} GB with gradients; "
        f"exchange {1e3 * step.comm:.2f} ms of a layer's {1e3 * step.layer:.2f} ms",
        "tp": f"attention and dense products {share['attention']} of the layer, links of tp "
        f"{share['tp_links']}",
        "pp": f"bubble {step.bubble:.1%}, weights {m.weights / 1e9:.0f} GB",
        "cp": "1 rank has a whole sequence"
        if x.cp == 1
        else f"given: {x.cp} ranks share a sequence; their exchange of keys and values is "
        "not in the time",
        "micro_batch": f"{tokens * model.k * x.ep / model.experts:.0f} rows an expert"
        + (", host-bound" if step.host_bound else ""),
        "recompute": f"activations {(m.attention + m.experts) / 1e9:.0f} GB, total "
        f"{m.total / 1e9:.0f} of {p.device.memory / 1e9:.0f} GB",
        "dtype": f"products of experts {share['experts']} of the layer",
        "algorithm": "no exchange" if x.ep == 1 else f"dispatch and combine: {name} "
        f"{exchange(x.algorithm, x.node_limit):.2f} ms, {other_name} "
        f"{exchange(other, x.node_limit):.2f} ms; sends {sent}",
    }  # fmt: skip


def _as_fast(p: Profile, x: Layout, stepped: Callable[[Layout], Step]) -> str:
    """The other formats that are as fast, and the limit that they share."""
    now = stepped(x)
    others = {*default_dtypes(p), *(("fp8", "mxfp8") if x.dtype != "bf16" else ())}
    equal = [
        dtype for dtype in sorted((others & {*p.device.dtypes}) - {x.dtype})
        if abs(stepped(replace(x, dtype=dtype)).seconds / now.seconds - 1) < 0.005
    ]  # fmt: skip
    if not equal:
        return ""
    limit = (
        "the host, which issues the kernels of a layer in "
        f"{1e-3 * p.constants.host_us:.1f} ms without CUDA graphs (graphs)"
        if now.host_bound
        else "one constant of this model for products of 8 bits"
        if "bf16" not in (x.dtype, *equal)
        else "what is not a product"
    )
    return f"; {', '.join(equal)} is as fast, as the limit is {limit}"


def _node_limit(
    p: Profile,
    model: MoEConfig,
    x: Layout,
    given: bool,
    seconds: Callable[[Layout], float],
) -> Choice:
    """Nodes of a token: given, the model's, or the loosest limit that pays in a step."""
    nodes = math.ceil(x.ep / (x.domain or p.device.domain))
    known = given or bool(model.node_limit)
    tried = (x.node_limit,) if x.node_limit else NODE_LIMITS
    limits = [n for n in tried if n < min(nodes, model.k)]
    if not limits:
        where = "one node" if nodes == 1 else f"{nodes} nodes"
        reason = f"ep={x.ep} is on {where}, a token has {model.k} experts: "
        if x.node_limit:
            whose = "given" if given else "the model's"
            return Choice(
                "node_limit", x.node_limit, f"{reason}the limit, {whose}, never binds"
            )
        return Choice("node_limit", 0, f"{reason}nothing to limit")
    times = {n: seconds(replace(x, node_limit=n)) for n in (0, *limits)}
    shown = ", ".join(
        f"at most {n}: {t:.3f} s" if n else f"any node: step {t:.3f} s"
        for n, t in times.items()
    )
    if known:
        why = "given" if given else "what the model's router is trained with"
        return Choice("node_limit", x.node_limit, f"{why}; {shown}")
    pays = [n for n in limits if times[n] < (1 - LIMIT_PAYS) * times[0]]
    best = pays[0] if pays else 0
    other = 0 if best else limits[-1]
    reason = f"{shown}; from {LIMIT_PAYS:.0%} on it pays to train the router with one"
    return Choice("node_limit", best, reason, other, 1 - times[best] / times[other])


# ---- the plan --------------------------------------------------------------------------


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
        load (sequence of float, optional): of every expert now, from ``LoadStats``. Past
            routing predicts it badly (47 % error from an earlier half of a trace, 1.7 %
            from the current load). Default: uniform
        exposed (float): share of exchanges that the schedule does not hide.
        top (int): layouts to keep in ``Plan.best``.
        traced (Traced, optional): what the model does beside its experts, for a CPU.
        fixed: values of :class:`Layout` that are given: ``ep=8``, ``recompute="full"``.

    Raises:
        ValueError: where nothing divides or fits, with the nearest that works; where the
            device does not multiply a dtype; where a number is out of its range.

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
    _check_fixed(model, p, gpus, seq, fixed)
    dtypes = tuple(dtypes) if dtypes else default_dtypes(p)
    for dtype in (*dtypes, fixed.get("dtype", "bf16")):
        p.check_dtype("plan", dtype)
    layouts = list(_candidates(model, p, gpus, global_batch, seq, dtypes, fixed))
    ranked = _ranked(model, p, layouts, global_batch, seq, 1.0, exposed, traced)
    if not ranked:
        raise _nothing_fits(model, p, gpus, global_batch, seq, dtypes, fixed, traced)
    x = ranked[0][1]
    tokens = x.micro_batch * seq / x.cp / x.tp
    capacity, replicas, imbalance = load_choices(model, x, tokens, load, p)
    if imbalance > EVEN:  # the heaviest rank sets the pace of every layout
        near = [e[1] for e in ranked[:64]]
        ranked = _ranked(model, p, near, global_batch, seq, imbalance, exposed, traced)
        x = ranked[0][1]
        tokens = x.micro_batch * seq / x.cp / x.tp
        capacity, replicas, imbalance = load_choices(model, x, tokens, load, p)
    _, x, step, m = ranked[0]

    def stepped(layout: Layout) -> Step:
        uneven = imbalance if imbalance > EVEN else 1.0
        return _step(p, model, layout, global_batch, seq, uneven, exposed, traced)

    limit = _node_limit(
        p, model, x, "node_limit" in fixed, lambda layout: stepped(layout).seconds
    )
    if limit.value != x.node_limit:
        x = replace(x, node_limit=limit.value)
        step = stepped(x)
    reasons = _reasons(p, model, x, step, m, tokens)
    reasons["dtype"] += _as_fast(p, x, stepped)
    choices = [
        Choice(name, getattr(x, name), reasons[name], *_alternative(ranked, name))
        for name in DIMENSIONS[:-1]
    ]
    name = _algorithm(x, x.domain or p.device.domain)
    choices.append(Choice("algorithm", name, reasons["algorithm"]))
    rows = tokens * model.k
    chunks = chunk_choice(p, model, x, tokens)
    rounding, align = rounding_choice(p, model, x, rows)
    recipe, times = fastest_dtypes(
        p, rows, model.d, model.f, model.experts / x.ep, dtypes
    )
    recipe_reason = "; ".join(
        f"{which} " + ", ".join(f"{dt} {1e3 * t:.2f} ms" for dt, t in s.items())
        for which, s in times.items()
    )
    choices += [
        limit,
        Choice("recipe", recipe, recipe_reason), chunks, capacity, replicas, rounding,
    ]  # fmt: skip
    return Plan(
        model, p.name, p.provenance, x, step, m, tuple(choices),
        tuple((rate, y) for rate, y, *_ in ranked[:top]), HELD_OUT_ERROR["train"][0],
        chunks.value, capacity.value, replicas.value, align, recipe,
        x.domain or p.device.domain, math.ceil(tokens),
        cost.copy_cost(p, rows, model.d, model.f, model.experts / x.ep, x.ep, x.domain),
        global_batch, seq,
    )  # fmt: skip
