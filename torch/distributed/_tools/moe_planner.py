# mypy: allow-untyped-defs
"""How to run this mixture-of-experts model on these GPUs, and why.

    python -m torch.distributed._tools.moe_planner qwen3-30b-a3b --device H100 --gpus 8

:func:`plan` tries every layout that divides, keeps those that fit, sums their steps from
:mod:`.moe_estimator`, and explains the best one: a reason per choice with its numbers, and
the next best alternative, for ``ExpertParallel`` and torchtitan's ``ParallelDims``.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch.distributed._tools import moe_cost_model as cost
from torch.distributed._tools.moe_calibration import DEVICES, HELD_OUT_ERROR, profile
from torch.distributed._tools.moe_config import MODELS, MoEConfig
from torch.distributed._tools.moe_estimator import (
    cpu_table,
    inference_table,
    Layout,
    Memory,
    memory,
    Step,
    train_step,
)
from torch.distributed._tools.moe_simulator import (
    expected_imbalance,
    replicated_imbalance,
    rows_of_pair,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed._tools.moe_calibration import Profile


__all__ = ["Choice", "Plan", "fastest_dtypes", "overlap_schedule", "plan"]

DIMENSIONS = ("ep", "tp", "pp", "micro_batch", "recompute", "dtype", "algorithm")
FILL = 0.95  # of the device's memory
LAYERS_PER_STAGE = 3  # sends between stages are not modelled; short ones would show
# Nodes of a token at most: what was published for K = 8, and twice that. A limit costs the
# router freedom and has to be trained, so that it has to pay for itself.
NODE_LIMITS = (8, 4)
LIMIT_PAYS = 0.03
EVEN = 1.02  # heaviest rank over mean, up to which layouts are compared without it
OVERFLOW = 1e-4  # probability that a step's heaviest rank exceeds its capacity


class Choice(NamedTuple):
    """One decision.

    Attributes:
        name: of the dimension.
        value: chosen.
        reason: with its numbers.
        other: the next best value, or None.
        other_loss: tokens a second lost with it, as a share; None where unknown.
    """

    name: str
    value: Any
    reason: str
    other: Any = None
    other_loss: float | None = None


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
        tokens, copy_cost: of a rank in a layer; of ``ExpertPlacement``.
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

    def expert_parallel(self, *, static: bool = False) -> dict[str, Any]:
        """Keyword arguments of ``ExpertParallel``; the mesh is ``(layout.ep,)``.

        ``static``: with the capacity for the chosen factor, else exact sizes are sent.
        """
        from torch.distributed._moe.schedule import OverlapSchedule

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
        if self.replicas:
            from torch.distributed.tensor.parallel import ExpertPlacement

            options["placement"] = ExpertPlacement(
                slots_per_rank=(self.model.experts + self.replicas) // x.ep,
                ranks_per_node=min(x.ep, self.domain),
                replicas=self.replicas,
                copy_cost=self.copy_cost,
            )
        return options

    def parallel_dims(self) -> dict[str, int]:
        """Keyword arguments of torchtitan's ``ParallelDims``; ``ep`` borrows shards."""
        x = self.layout
        return {
            "dp_replicate": 1, "dp_shard": x.dp, "cp": x.cp, "tp": x.tp, "pp": x.pp,
            "ep": x.ep, "world_size": x.gpus,
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "provenance": self.provenance,
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


# ---- candidates ------------------------------------------------------------------------


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(int(math.log2(max(limit, 1))) + 1)]


def _low_precision(p: Profile) -> str | None:
    return {"hopper": "fp8", "blackwell": "mxfp8", "cdna": "fp8"}.get(
        p.device.generation
    )


def _check_fixed(model: MoEConfig, gpus: int, fixed: dict[str, Any]) -> None:
    """Errors of fixed values that no layout can have, with the nearest that can."""

    def divisors(n: int, limit: int) -> list[int]:
        return [i for i in range(1, limit + 1) if n % i == 0]

    unknown = set(fixed) - {f.name for f in dataclasses.fields(Layout)}
    if unknown:
        known = ", ".join(f.name for f in dataclasses.fields(Layout))
        raise ValueError(
            f"plan: {sorted(unknown)} are not dimensions; those are {known}"
        )
    for name, whole, what in (
        ("ep", model.experts, "the experts"),
        ("tp", model.heads, "the attention heads"),
    ):
        value = fixed.get(name)
        if value is not None and (value < 1 or whole % value):
            works = [i for i in divisors(whole, whole) if i <= gpus]
            nearest = min(works, key=lambda i: abs(i - value))
            raise ValueError(
                f"plan: {name} must divide {what}, {whole}, got {value}; nearest that "
                f"works: {name}={nearest}"
            )
    for name in ("ep", "tp", "pp"):
        value = fixed.get(name, 1)
        if gpus % value:
            nearest = min(divisors(gpus, gpus), key=lambda i: abs(i - value))
            raise ValueError(
                f"plan: {name} must divide the {gpus} GPUs, got {value}; nearest that "
                f"works: {name}={nearest}"
            )


def _candidates(
    model: MoEConfig, p: Profile, gpus: int, batch: int, dtypes: Sequence[str],
    fixed: dict[str, Any],
) -> Iterator[Layout]:  # fmt: skip
    domain = fixed.get("domain") or p.device.domain
    options: dict[str, Sequence[Any]] = {
        "tp": _powers(min(8, gpus)),
        "pp": _powers(min(32, model.layers, gpus)),
        "ep": [e for e in _powers(min(model.experts, gpus)) if model.experts % e == 0],
        "micro_batch": (1, 2, 4),
        "dtype": dtypes,
        "recompute": ("selective", "full"),
        "algorithm": ("hierarchical",),  # flat sends more; its time is in the reason
    }
    options |= {k: (v,) for k, v in fixed.items() if k in options}
    rest = {k: v for k, v in fixed.items() if k not in options}
    for values in itertools.product(*options.values()):
        x = dict(zip(options, values))
        tp, pp, ep, mbs = x["tp"], x["pp"], x["ep"], x["micro_batch"]
        if tp > domain or gpus % (tp * pp) or gpus % (pp * ep) or model.heads % tp:
            continue
        if pp > 1 and pp * LAYERS_PER_STAGE > model.layers:
            continue
        dp = gpus // (tp * pp)
        if batch % (mbs * dp) or (pp > 1 and batch // (mbs * dp) < pp):
            continue
        if ep > domain and ep % domain:
            continue
        virtual = 1 if pp == 1 else max(1, min(8, model.layers // pp // 2))
        x |= {"virtual": virtual, "node_limit": model.node_limit, **rest}
        yield Layout(gpus=gpus, **x)


def _ranked(
    model: MoEConfig, p: Profile, layouts: Sequence[Layout], batch: int, seq: int,
    imbalance: float, exposed: float,
) -> list[tuple[float, Layout, Step, Memory]]:  # fmt: skip
    """Layouts that fit, best first."""
    out = []
    for x in layouts:
        m = memory(model, x, seq=seq, global_batch=batch)
        if m.total > FILL * p.device.memory:
            continue
        kw = {"global_batch": batch, "seq": seq, "imbalance": imbalance}
        step = train_step(p, model, x, exposed=exposed, **kw)
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


def _nothing_fits(
    model: MoEConfig, p: Profile, gpus: int, batch: int, seq: int, dtypes: Sequence[str],
    fixed: dict[str, Any],
) -> ValueError:  # fmt: skip
    layouts = list(_candidates(model, p, gpus, batch, dtypes, fixed))
    if not layouts:
        return ValueError(
            f"plan: no layout divides gpus={gpus}, global_batch={batch} and {fixed or 'the model'};"
            f" the batch must be a multiple of micro-batch times data-parallel ranks, for "
            f"example global_batch={gpus * max(1, round(batch / gpus))}"
        )
    sized = [(memory(model, x, seq=seq, global_batch=batch).total, x) for x in layouts]
    least, x = min(sized, key=lambda e: e[0])
    message = (
        f"plan: nothing fits in {FILL:.0%} of {p.device.memory / 1e9:.0f} GB; the smallest, "
        f"ep={x.ep} tp={x.tp} pp={x.pp} recompute={x.recompute}, needs {least / 1e9:.0f} GB"
    )
    free = {k: v for k, v in fixed.items() if k in ("dtype", "domain", "graphs")}
    counts = {*_powers(64 * gpus), *(gpus * more for more in _powers(64))}
    for n in sorted(counts, key=lambda n: abs(n - gpus)):
        each = math.ceil(batch / gpus)
        for y in _candidates(model, p, n, n * each, dtypes, free):
            m = memory(model, y, seq=seq, global_batch=n * each).total
            if m <= FILL * p.device.memory:
                return ValueError(
                    f"{message}. Nearest that works: gpus={n}, ep={y.ep} tp={y.tp} pp={y.pp}"
                )
    return ValueError(message)


# ---- the MoE layer's own choices -------------------------------------------------------


def fastest_dtypes(
    p: Profile,
    rows: float,
    d: int,
    f: float,
    local: float,
    dtypes: Sequence[str] | None = None,
) -> tuple[dict[str, str], dict[str, dict[str, float]]]:
    """The faster dtype of every GEMM of the experts, quantisation included.

    Args:
        p (Profile): the device.
        rows (float): routed rows of a GPU.
        d, f (int): D, F.
        local (float): experts of the GPU.
        dtypes (sequence of str, optional): to compare. Default: bf16 and the device's
            8-bit format

    Returns:
        ``{"forward": dtype, "dgrad": dtype, "wgrad": dtype}``, and the seconds compared.
    """
    if dtypes is None:
        low = _low_precision(p)
        dtypes = ("bf16", low) if low else ("bf16",)
    times = cost.recipe_seconds(p, rows, d, f, local, dtypes)
    return {which: min(s, key=lambda dt: s[dt]) for which, s in times.items()}, times


def overlap_schedule(
    p: Profile,
    tokens: int,
    d: int,
    f: int,
    num_experts: int,
    k: int,
    ep: int,
    **kw: Any,
):  # type: ignore[no-untyped-def]
    """The ``OverlapSchedule`` that is first in ``moe_cost_model.layer_chunks``."""
    from torch.distributed._moe.schedule import OverlapSchedule

    best = cost.layer_chunks(p, tokens, d, f, num_experts, k, ep, **kw)[0]
    return OverlapSchedule(best.num_chunks, best.shared)


def _chunks(p: Profile, model: MoEConfig, x: Layout, tokens: float) -> Choice:
    if x.ep == 1:
        return Choice("chunks", 1, "no exchange to hide")
    ranked = cost.layer_chunks(
        p, tokens, model.d, model.f, model.experts, model.k, x.ep, shared_f=model.shared_f,
        dtype=x.dtype, kernel=x.kernel, domain=x.domain or None, algorithm=x.algorithm,
        node_limit=x.node_limit,
    )  # fmt: skip
    times = ", ".join(
        f"{n}: {1e3 * t:.2f} ms" for t, n, _ in sorted(ranked, key=lambda e: e[1])
    )
    (best, n, _), (second, m, _) = ranked[:2]
    return Choice("chunks", n, f"forward of a layer with {times}", m, 1 - best / second)


def _load_choices(
    model: MoEConfig, x: Layout, tokens: float, load: Sequence[float] | None, p: Profile
) -> tuple[Choice, Choice, float]:
    """Capacity factor and replicas, and the imbalance that is left."""
    what = "the given load" if load is not None else "uniform routing (no load given)"
    share = list(load) if load is not None else [1.0] * model.experts
    if len(share) != model.experts:
        raise ValueError(
            f"plan: load must have {model.experts} entries, one per expert, got {len(share)}"
        )
    if x.ep == 1:
        return (
            Choice("capacity_factor", 1.0, "all experts are here: no capacity needed"),
            Choice("replicas", 0, "all experts are here"),
            1.0,
        )
    group = tokens * x.ep
    plain = expected_imbalance(share, group, model.k, x.ep)
    replicas, imbalance = 0, plain
    options = [f"none: {plain:.3f}"]
    # A replica's weights, gradients and its share of time: pays from a few per cent.
    for extra in (x.ep, 2 * x.ep):
        domain = min(x.domain or p.device.domain, x.ep)
        new = replicated_imbalance(share, group, model.k, x.ep, domain, extra)
        if new is None:
            break
        options.append(f"{extra}: {new:.3f}")
        if new < imbalance - 0.02:
            replicas, imbalance = extra, new
    reason = f"heaviest rank over mean, {what}: {', '.join(options)}"
    other = 0 if replicas else x.ep
    quantile = expected_imbalance(share, group, model.k, x.ep, quantile=1 - OVERFLOW)
    # Noise stays; the systematic part is what replicas take away.
    quantile *= imbalance / plain
    capacity = math.ceil(20 * quantile) / 20
    return (
        Choice(
            "capacity_factor", capacity,
            f"the heaviest rank is at {imbalance:.3f} of the mean, and below {quantile:.3f} "
            f"in all but one step of {1 / OVERFLOW:,.0f}, {what}",
        ),
        Choice("replicas", replicas, reason, other),
        imbalance,
    )  # fmt: skip


def _rounding(
    p: Profile, model: MoEConfig, x: Layout, rows: float
) -> tuple[Choice, int]:
    """Whether to round an expert's tokens to tiles (``token_rounding``)."""
    local = model.experts / x.ep
    mean, tile = rows / local, 128
    if mean < tile:
        return Choice(
            "row_alignment", 1, f"{mean:.0f} rows an expert are below a tile of {tile}"
        ), 1
    kw: dict[str, Any] = {"kernel": x.kernel, "dtype": x.dtype, "pass_": "fwd+bwd"}
    full = local * round(mean / tile) * tile
    rounded = cost.experts(p, full, model.d, model.f, local, **kw)
    ragged = cost.experts(p, rows + local * tile / 2, model.d, model.f, local, **kw)
    gain = 1 - rounded / ragged * (mean / (round(mean / tile) * tile))
    align = tile if gain > 0.03 else 1
    reason = f"{mean:.0f} rows an expert; half a tile of {tile} each is {gain:.1%} of the experts' time"
    return Choice("row_alignment", align, reason, 1 if align > 1 else tile, None), align


# ---- the plan --------------------------------------------------------------------------


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
        "micro_batch": f"{tokens * model.k * x.ep / model.experts:.0f} rows an expert"
        + (", host-bound" if step.host_bound else ""),
        "recompute": f"activations {(m.attention + m.experts) / 1e9:.0f} GB, total "
        f"{m.total / 1e9:.0f} of {p.device.memory / 1e9:.0f} GB",
        "dtype": f"products of experts {share['experts']} of the layer",
        "algorithm": "no exchange" if x.ep == 1 else f"dispatch and combine: {name} "
        f"{exchange(x.algorithm, x.node_limit):.2f} ms, {other_name} "
        f"{exchange(other, x.node_limit):.2f} ms; sends {sent}",
    }  # fmt: skip


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
        reason = f"{nodes} nodes, {model.k} experts of a token: nothing to limit"
        return Choice("node_limit", x.node_limit, reason)
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
        fixed: values of :class:`Layout` that are given: ``ep=8``, ``recompute="full"``.

    Raises:
        ValueError: where nothing divides or fits, with the nearest that works.

    Example::
        >>> p = plan("qwen3-30b-a3b", "H100", 16, global_batch=512)
        >>> p.layout.ep, p.parallel_dims()
    """
    model = MoEConfig.by_name(model) if isinstance(model, str) else model
    p = profile(device) if isinstance(device, str) else device
    if gpus < 1 or global_batch < 1:
        raise ValueError(
            f"plan: gpus and global_batch must be at least 1, got {gpus}, {global_batch}"
        )
    if p.cpu is not None:
        raise ValueError(
            "plan: this profile is of a CPU; see cpu_table, or --device with a GPU's name"
        )
    _check_fixed(model, gpus, fixed)
    low = _low_precision(p)
    dtypes = dtypes or (("bf16", low) if low else ("bf16",))
    layouts = list(_candidates(model, p, gpus, global_batch, dtypes, fixed))
    ranked = _ranked(model, p, layouts, global_batch, seq, 1.0, exposed)
    if not ranked:
        raise _nothing_fits(model, p, gpus, global_batch, seq, dtypes, fixed)
    x = ranked[0][1]
    tokens = x.micro_batch * seq / x.cp / x.tp
    capacity, replicas, imbalance = _load_choices(model, x, tokens, load, p)
    if imbalance > EVEN:  # the heaviest rank sets the pace of every layout
        near = [e[1] for e in ranked[:64]]
        ranked = _ranked(model, p, near, global_batch, seq, imbalance, exposed)
        x = ranked[0][1]
        tokens = x.micro_batch * seq / x.cp / x.tp
        capacity, replicas, imbalance = _load_choices(model, x, tokens, load, p)
    _, x, step, m = ranked[0]

    def stepped(layout: Layout) -> Step:
        return train_step(
            p, model, layout, global_batch=global_batch, seq=seq,
            imbalance=imbalance if imbalance > EVEN else 1.0, exposed=exposed,
        )  # fmt: skip

    limit = _node_limit(
        p, model, x, "node_limit" in fixed, lambda layout: stepped(layout).seconds
    )
    if limit.value != x.node_limit:
        x = replace(x, node_limit=limit.value)
        step = stepped(x)
    reasons = _reasons(p, model, x, step, m, tokens)
    choices = [
        Choice(name, getattr(x, name), reasons[name], *_alternative(ranked, name))
        for name in DIMENSIONS[:-1]
    ]
    name = _algorithm(x, x.domain or p.device.domain)
    choices.append(Choice("algorithm", name, reasons["algorithm"]))
    rows = tokens * model.k
    chunks = _chunks(p, model, x, tokens)
    rounding, align = _rounding(p, model, x, rows)
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
        tuple((rate, y) for rate, y, *_ in ranked[:top]), HELD_OUT_ERROR["train"],
        chunks.value, capacity.value, replicas.value, align, recipe,
        x.domain or p.device.domain, math.ceil(tokens),
        cost.copy_cost(p, rows, model.d, model.f, model.experts / x.ep, x.ep, x.domain),
    )  # fmt: skip


# ---- command line ----------------------------------------------------------------------


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table of dicts with the same keys."""
    cells = [[str(k) for k in rows[0]]]
    for r in rows:
        cells.append([f"{v:,.4g}" if type(v) is float else str(v) for v in r.values()])
    widths = [max(len(c[i]) for c in cells) for i in range(len(cells[0]))]
    for line in cells:
        yield "  ".join(c.rjust(w) for c, w in zip(line, widths))


def print_plan(found: Plan) -> None:
    x, step = found.layout, found.step
    print(f"{x.gpus} x {found.device}, constants {found.provenance}")
    print(
        f"{step.tokens_per_second:,.0f} tokens/s/GPU, step {step.seconds:.3f} s, "
        f"{found.memory.total / 1e9:.0f} GB a GPU\n"
    )
    for c in found.choices:
        value = ", ".join(f"{k} {v}" for k, v in c.value.items()) if isinstance(
            c.value, dict) else c.value  # fmt: skip
        print(f"  {c.name:16} {value}")
        print(f"  {'':16} because: {c.reason}")
        if c.other_loss is not None:
            apart = c.other_loss >= found.error / 4
            close = "" if apart else ", not told apart by this model"
            print(f"  {'':16} next: {c.other} ({-c.other_loss:+.1%}{close})")
    print("\nbest layouts")
    fields = ("ep", "tp", "pp", "virtual", "micro_batch", "recompute", "dtype")
    rows = [
        {"tokens/s/GPU": float(rate), **{f: getattr(y, f) for f in fields}}
        for rate, y in found.best
    ]
    print("\n".join(_lines(rows)))
    print(
        f"\nuncertainty: half of the published training rows that no constant was fitted on "
        f"are within {found.error:.0%}; the order of layouts is more certain than their speed"
    )
    print(f"torchtitan ParallelDims: {found.parallel_dims()}")


def plot_plan(
    model: MoEConfig, p: Profile, found: Plan, batch: int, seq: int, path: str
) -> None:
    """Draws the parts of a layer and the memory over EP. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x = found.layout
    limit = min(model.experts, x.gpus // x.pp)
    degrees = [e for e in _powers(limit) if model.experts % e == 0]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    bottom = [0.0] * len(degrees)
    kw = {"global_batch": batch, "seq": seq}
    steps = [train_step(p, model, replace(x, ep=e), **kw) for e in degrees]
    for part in steps[0].parts:
        heights = [1e3 * s.parts[part] for s in steps]
        left.bar([str(e) for e in degrees], heights, bottom=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, heights)]
    left.set(xlabel="EP", ylabel="ms a layer, forward and backward")
    left.legend(fontsize=7)
    sizes = [memory(model, replace(x, ep=e), **kw) for e in degrees]
    bottom = [0.0] * len(degrees)
    for part in sizes[0]._fields:
        heights = [getattr(m, part) / 1e9 for m in sizes]
        right.bar([str(e) for e in degrees], heights, bottom=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, heights)]
    right.axhline(p.device.memory / 1e9, color="k", ls="--", lw=1)
    right.set(xlabel="EP", ylabel="GB a GPU")
    right.legend(fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch.distributed._tools.moe_planner",
        description="How to run a mixture-of-experts model on these GPUs, and why.",
        epilog="first plan: python -m torch.distributed._tools.moe_planner qwen3-30b-a3b "
        "--device H100 --gpus 8",
    )
    parser.add_argument("model", help=f"config.json of a model, or {', '.join(MODELS)}")
    parser.add_argument(
        "--device", default="H100", help=f"{', '.join(DEVICES)}, or a .json profile"
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--batch", type=int, help="sequences of a step (16 a GPU)")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--dtype", nargs="+", help="of products: bf16 fp8 mxfp8 nvfp4")
    parser.add_argument(
        "--load",
        help="JSON list: load of every expert now, as LoadStats.result() has it",
    )
    parser.add_argument(
        "--phase", choices=("train", "prefill", "decode"), default="train"
    )
    parser.add_argument(
        "--tokens", type=int, default=128, help="of a GPU, in inference"
    )
    for name in ("ep", "tp", "pp", "micro-batch", "domain", "graphs", "node-limit"):
        parser.add_argument(f"--{name}", type=int, help="fixed instead of chosen")
    parser.add_argument("--recompute", choices=("none", "selective", "full"))
    parser.add_argument("--json", help="write the plan here; - for the terminal")
    parser.add_argument("--plot", help="draw time and memory over EP into this file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        if args.model.endswith(".json"):
            with open(args.model) as file:
                model = MoEConfig.from_config(json.load(file))
        else:
            model = MoEConfig.by_name(args.model)
        p = profile(args.device)
        load = None
        if args.load:
            with open(args.load) as file:
                load = json.load(file)
        if p.cpu is not None:
            print("\n".join(_lines(cpu_table(model, p))))
            return 0
        if args.phase != "train":
            rows = inference_table(
                model, p, args.gpus, phase=args.phase, tokens=args.tokens,
                context=args.seq,
                imbalance=lambda ep: expected_imbalance(
                    load or [1.0] * model.experts, args.tokens * ep, model.k, ep
                ),
            )  # fmt: skip
            print("\n".join(_lines(rows)))
            return 0
        names = "ep tp pp micro_batch domain graphs node_limit recompute".split()
        fixed = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
        batch = args.batch or 16 * args.gpus
        found = plan(
            model, p, args.gpus, global_batch=batch, seq=args.seq, dtypes=args.dtype,
            load=load, **fixed,
        )  # fmt: skip
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    if args.json == "-":
        print(json.dumps(found.to_json(), indent=1))
        return 0
    print_plan(found)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found.to_json(), file, indent=1)
    if args.plot:
        plot_plan(model, p, found, batch, args.seq, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
