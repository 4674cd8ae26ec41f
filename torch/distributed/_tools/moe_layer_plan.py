# mypy: allow-untyped-defs
"""How one expert-parallel layer runs on given ranks: precision, chunks, capacity, replicas.

The planner makes these decisions for a layer after it has chosen the layout. Others use single ones:
``OverlapSchedule`` the chunks, ``select_recipe`` the faster precision.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple, TYPE_CHECKING

from torch.distributed._tools import moe_cost_model as cost
from torch.distributed._tools.moe_arguments import check, check_layer
from torch.distributed._tools.moe_cpu_model import cpu_parts
from torch.distributed._tools.moe_exchange_model import all_to_all
from torch.distributed._tools.moe_simulator import (
    expected_imbalance,
    replicated_imbalance,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed._tools.moe_config import MoEConfig
    from torch.distributed._tools.moe_layout import Layout
    from torch.distributed._tools.moe_profile import Profile


__all__ = [
    "Choice", "Chunks", "choose_chunks", "fastest_dtypes", "layer_chunks", "overlap_schedule",
]  # fmt: skip

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


# ---- precision -------------------------------------------------------------------------


def default_dtypes(p: Profile) -> tuple[str, ...]:
    """bf16, and the 8-bit format of the device, if it has one."""
    low = [dtype for dtype in p.device.dtypes if dtype in cost.LOW_PRECISION]
    return ("bf16", *low[:1])


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
    check("fastest_dtypes", {"width": "f"}, rows=rows, d=d, width=f, local=local)
    times = cost.recipe_seconds(p, rows, d, f, local, dtypes or default_dtypes(p))
    return {which: min(s, key=lambda dt: s[dt]) for which, s in times.items()}, times


# ---- chunks ----------------------------------------------------------------------------


class Chunks(NamedTuple):
    """How a layer runs under ``OverlapSchedule``.

    Attributes:
        seconds: of the layer.
        num_chunks: of its tokens.
        shared: whether the shared experts run beside ``"dispatch"`` or ``"combine"``.
    """

    seconds: float
    num_chunks: int
    shared: Literal["dispatch", "combine"]


def choose_chunks(
    parts: Callable[[int], tuple[float, float, float]],
    shared: float = 0.0,
    candidates: Sequence[int] = (1, 2, 4, 8),
) -> list[Chunks]:
    """A layer under ``OverlapSchedule``, best first, each number of chunks once.

    Args:
        parts (callable): number of chunks -> seconds of dispatch, experts and combine
            of one chunk, including starts of exchanges and effects of small products.
        shared (float): seconds of the shared experts, which run beside the first dispatches
            or the last combine, whichever hides more.
        candidates (sequence of int): chunks to compare; fewer win a tie.
    """
    from torch.distributed._moe.overlap_schedule import (
        OverlapSchedule,
        PartSeconds,
        simulated_seconds,
    )

    if not candidates:
        raise ValueError(
            "choose_chunks: candidates must have a number of chunks, got none"
        )
    for n in candidates:
        check("choose_chunks", {"chunks": "candidates"}, chunks=n)

    def best(n: int) -> Chunks:
        dispatch, experts, combine = ((part,) * n for part in parts(n))
        whole = PartSeconds(dispatch, experts, combine, shared)
        sides: tuple[Literal["dispatch", "combine"], ...] = ("dispatch", "combine")
        both = (
            Chunks(simulated_seconds(OverlapSchedule(n, beside), whole), n, beside)
            for beside in sides
        )
        return min(both, key=lambda choice: choice.seconds)

    return sorted(best(n) for n in candidates)


def layer_chunks(
    p: Profile,
    tokens: float,
    d: int,
    f: int,
    num_experts: int,
    k: int,
    ep: int,
    *,
    shared_f: int = 0,
    dtype: str = "bf16",
    wire_dtype: str = "bf16",
    kernel: str = "moe_mlp",
    imbalance: float = 1.0,
    candidates: Sequence[int] = (1, 2, 4, 8),
    **exchange: Any,
) -> list[Chunks]:
    """The forward of an expert-parallel layer in chunks, best first.

    Args:
        p (Profile): the device.
        tokens (float): T of a rank.
        d, f, num_experts, k (int): D, F, E, K.
        ep (int): ranks that share the experts.

    Keyword Args:
        shared_f (int): width of the shared experts.
        dtype (str): of the products, see :func:`experts`.
        kernel (str): of the products. A CPU ignores it, ``wire_dtype``, ``imbalance`` and ``exchange``.
        wire_dtype (str): of the rows on their way to the experts; bf16 returns.
        imbalance (float): heaviest rank over mean rank.
        candidates (sequence of int): chunks to compare.
        exchange: ``domain``, ``algorithm`` and ``node_limit`` of :func:`all_to_all`.
    """
    check_layer("layer_chunks", tokens, d, f, num_experts, k, ep)
    if p.cpu is not None:
        args = (tokens, d, f, num_experts, k, ep)
        parts = functools.partial(cpu_parts, p, *args, dtype=dtype)
        *_, shared = parts(1, shared_f=shared_f)
        return choose_chunks(lambda n: parts(n)[:3], shared, candidates)

    def gpu_parts(n: int) -> tuple[float, float, float]:
        t = tokens / n
        there, back = (
            all_to_all(
                p, t, d, num_experts, k, ep, imbalance=imbalance, combine=combine, dtype=wire,
                **exchange,
            )
            for combine, wire in ((False, wire_dtype), (True, "bf16"))
        )  # fmt: skip
        work = cost.experts(
            p, t * k * imbalance, d, f, num_experts / ep,
            kernel=kernel, dtype=dtype, tokens=t,
        )  # fmt: skip
        return there, work, back

    return choose_chunks(
        gpu_parts, cost.dense_mlp(p, tokens, d, shared_f, dtype), candidates
    )


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
    """The ``OverlapSchedule`` that is first in ``layer_chunks``."""
    from torch.distributed._moe.overlap_schedule import OverlapSchedule

    check("overlap_schedule", tokens=tokens)
    check_layer("overlap_schedule", tokens, d, f, num_experts, k, ep)
    best = layer_chunks(p, tokens, d, f, num_experts, k, ep, **kw)[0]
    return OverlapSchedule(best.num_chunks, best.shared)


def chunk_choice(p: Profile, model: MoEConfig, x: Layout, tokens: float) -> Choice:
    if x.ep == 1:
        return Choice("chunks", 1, "no exchange to hide")
    ranked = layer_chunks(
        p, tokens, model.d, model.gated_f, model.experts, model.k, x.ep, shared_f=model.shared_f,
        dtype=x.dtype, kernel=x.kernel, domain=x.domain or None, algorithm=x.algorithm,
        node_limit=x.node_limit,
    )  # fmt: skip
    times = ", ".join(
        f"{n}: {1e3 * t:.2f} ms" for t, n, _ in sorted(ranked, key=lambda e: e[1])
    )
    (best, n, _), (second, m, _) = ranked[:2]
    return Choice("chunks", n, f"forward of a layer with {times}", m, 1 - best / second)


# ---- load ------------------------------------------------------------------------------


def load_choices(
    model: MoEConfig, x: Layout, tokens: float, load: Sequence[float] | None, p: Profile
) -> tuple[Choice, Choice, float]:
    """Capacity factor and replicas, and the imbalance that is left."""
    what = "the given load" if load is not None else "uniform routing (no load given)"
    share = list(load) if load is not None else [1.0] * model.experts
    if len(share) != model.experts:
        raise ValueError(
            f"plan: load must have {model.experts} entries, one per expert, got {len(share)}"
        )
    if not any(share):
        raise ValueError(
            f"plan: load must be above 0 for an expert at least, got {len(share)} zeros"
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
    # A replica costs weights, gradients and time: it pays from a few per cent of imbalance.
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
    # Replicas remove the systematic part of the imbalance; noise stays.
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


def rounding_choice(
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
    rounded = cost.experts(p, full, model.d, model.gated_f, local, **kw)
    ragged = cost.experts(
        p, rows + local * tile / 2, model.d, model.gated_f, local, **kw
    )
    gain = 1 - rounded / ragged * (mean / (round(mean / tile) * tile))
    align = tile if gain > 0.03 else 1
    reason = f"{mean:.0f} rows an expert; half a tile of {tile} each is {gain:.1%} of the experts' time"
    return Choice("row_alignment", align, reason, 1 if align > 1 else tile, None), align
