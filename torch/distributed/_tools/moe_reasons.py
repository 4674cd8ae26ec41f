# mypy: allow-untyped-defs
"""Why a layout was chosen: a reason per dimension with its numbers, and the next best value."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TYPE_CHECKING

from torch.distributed._tools.moe_exchange_model import all_to_all, wire_bytes
from torch.distributed._tools.moe_layer_plan import Choice, default_dtypes


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed._tools.moe_layout import Layout
    from torch.distributed._tools.moe_search import Found, Search
    from torch.distributed._tools.moe_step_model import Step


__all__ = ["choices_of", "node_limit"]

DIMENSIONS = ("ep", "tp", "pp", "cp", "micro_batch", "recompute", "dtype", "algorithm")
# Most nodes of a token: the published value for K = 8, and twice that. A limit restricts the
# router and has to be trained, so it has to pay for itself.
NODE_LIMITS = (8, 4)
LIMIT_PAYS = 0.03


def choices_of(
    search: Search,
    ranked: Sequence[Found],
    x: Layout,
    step: Step,
    stepped: Callable[[Layout], Step],
) -> list[Choice]:
    """One choice per dimension.

    Args:
        search (Search): what was searched.
        ranked (sequence): its layouts, best first.
        x (Layout), step (Step): the best layout, with its node limit.
        stepped (callable): computes the step of another layout.
    """
    reasons, best = _reasons(search, x, step, ranked), ranked[0]
    reasons["dtype"] += _as_fast(search, x, stepped)

    def other(name: str) -> tuple[Any, float | None]:
        chosen = getattr(best[1], name)
        others = ((getattr(y, name), 1 - rate / best[0]) for rate, y, *_ in ranked)
        return next((o for o in others if o[0] != chosen), (None, None))

    names = DIMENSIONS[:-1]
    choices = [Choice(n, getattr(x, n), reasons[n], *other(n)) for n in names]
    return [*choices, Choice("algorithm", _algorithm(x, search), reasons["algorithm"])]


def _algorithm(x: Layout, search: Search) -> str:
    """Name of the exchange that runs; inside a node it has one level."""
    if x.ep == 1 or x.ep > search.domain or x.algorithm not in ("hierarchical", "flat"):
        return x.algorithm if x.ep > 1 else "none"
    return "a copy per rank" if x.algorithm == "hierarchical" else "a copy per expert"


def _reasons(
    search: Search, x: Layout, step: Step, ranked: Sequence[Found]
) -> dict[str, str]:
    """Reasons in numbers, per dimension."""
    p, model, domain, m = search.p, search.model, search.domain, ranked[0][3]
    weights = model.parameters()["expert"]
    tokens = x.micro_batch * search.seq / x.cp / x.tp
    parts, busy = step.parts, sum(step.parts.values())
    share = {k: f"{v / busy:.0%}" for k, v in parts.items()}
    other = "flat" if x.algorithm == "hierarchical" else "hierarchical"
    name, other_name = (
        _algorithm(replace(x, algorithm=which), search)
        for which in (x.algorithm, other)
    )

    def exchange(algorithm: str) -> float:
        return 1e3 * sum(
            all_to_all(
                p, tokens, model.d, model.experts, model.k, x.ep, domain=domain, dtype=w,
                algorithm=algorithm, node_limit=x.node_limit, combine=w == "bf16",
            ) for w in (x.wire, "bf16")
        )  # fmt: skip

    wire = wire_bytes(
        tokens, model.d, model.experts, model.k, x.ep, domain, x.wire,
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
        f"{exchange(x.algorithm):.2f} ms, {other_name} {exchange(other):.2f} ms; sends {sent}",
    }  # fmt: skip


def _as_fast(search: Search, x: Layout, stepped: Callable[[Layout], Step]) -> str:
    """Other formats that are equally fast, and their common limit."""
    p, now = search.p, stepped(x)
    others = {*default_dtypes(p), *(("fp8", "mxfp8") if x.dtype != "bf16" else ())}
    equal = [
        dtype for dtype in sorted((others & {*p.device.dtypes}) - {x.dtype})
        if abs(stepped(replace(x, dtype=dtype)).seconds / now.seconds - 1) < 0.005
    ]  # fmt: skip
    if not equal:
        return ""
    host = p.constants.host_us + p.constants.expert_us * search.model.experts / x.ep
    limit = (
        "the host, which issues the kernels of a layer in "
        f"{1e-3 * host:.1f} ms without CUDA graphs (graphs)"
        if now.host_bound
        else "one constant of this model for products of 8 bits"
        if "bf16" not in (x.dtype, *equal)
        else "what is not a product"
    )
    return f"; {', '.join(equal)} is as fast, as the limit is {limit}"


def node_limit(search: Search, x: Layout, stepped: Callable[[Layout], Step]) -> Choice:
    """Most nodes of a token: given, the model's, or the loosest limit that pays in a step."""
    model, given = search.model, "node_limit" in search.fixed
    nodes = math.ceil(x.ep / search.domain)
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
    times = {n: stepped(replace(x, node_limit=n)).seconds for n in (0, *limits)}
    shown = ", ".join(
        f"at most {n}: {t:.3f} s" if n else f"any node: step {t:.3f} s"
        for n, t in times.items()
    )
    if given or model.node_limit:
        why = "given" if given else "what the model's router is trained with"
        return Choice("node_limit", x.node_limit, f"{why}; {shown}")
    pays = [n for n in limits if times[n] < (1 - LIMIT_PAYS) * times[0]]
    best = pays[0] if pays else 0
    other = 0 if best else limits[-1]
    reason = f"{shown}; from {LIMIT_PAYS:.0%} on it pays to train the router with one"
    return Choice("node_limit", best, reason, other, 1 - times[best] / times[other])
