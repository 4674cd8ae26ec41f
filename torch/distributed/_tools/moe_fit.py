# mypy: allow-untyped-defs
"""Fits constants to measured seconds by a coordinate search.

``moe_calibration`` measures the seconds of this machine, ``benchmarks/moe/published.py`` reads
published ones.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple, TYPE_CHECKING

from torch.distributed._tools.moe_cost_model import expert_flops, ITEMSIZE
from torch.distributed._tools.moe_cpu_model import cpu_experts
from torch.distributed._tools.moe_exchange_model import link_seconds
from torch.distributed._tools.moe_profile import CpuConstants


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


__all__ = ["CpuRow", "fit", "fit_cpu", "fit_link"]


class CpuRow(NamedTuple):
    """A call of the microbenchmark: shape, dtype, pass, layout of the weights."""

    T: int
    D: int
    F: int
    E: int
    K: int
    dtype: str = "bf16"
    pass_: str = "fwd"
    transposed: bool = False


def fit(
    start: Mapping[str, float],
    loss: Callable[[dict[str, float]], float],
    *,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    stiffness: Callable[[str], float] = lambda name: 0.03,
    steps: Sequence[float] = (2, 1.5, 1.25, 1.12, 1.06, 1.03, 1.015),
) -> dict[str, float]:
    """Values with the least loss: a coordinate search in log space.

    The loss is a sum of a few absolute log errors and not smooth, so gradients are not used.
    Ties go to the start value, which keeps values that the rows do not determine.

    Args:
        start (dict): start values, positive.
        loss (callable): of a dict of values.

    Keyword Args:
        bounds (dict, optional): lowest and highest value by name.
        stiffness (callable): weight of a value's distance from its start, in logs.
        steps (sequence of float): factors to try, coarse to fine.
    """
    now = dict(start)

    def total() -> float:
        ties = sum(stiffness(n) * abs(math.log(now[n] / start[n])) for n in now)
        return loss(now) + ties

    best = total()
    for step in steps:
        for _ in range(4):
            before = best
            for name in now:
                for factor in (step, 1 / step):
                    old = now[name]
                    low, high = (bounds or {}).get(name, (0.0, math.inf))
                    now[name] = min(high, max(low, old * factor))
                    new = best if now[name] == old else total()
                    if new < best - 1e-9:
                        best = new
                    else:
                        now[name] = old
            if before - best < 1e-4:
                break
    return now


def fit_cpu(
    rows: Sequence[CpuRow], hit: Sequence[float], seconds: Sequence[float],
    memory: float = math.inf,
) -> CpuConstants:  # fmt: skip
    """Constants of a CPU from measured calls.

    The search starts at the best rates among the calls. It tries few and many rows of a
    block for half of the rate, cheap and expensive experts, and no kernel or one
    for few rows.

    Args:
        rows (sequence of CpuRow): the calls.
        hit (sequence of float): experts with rows, of each.
        seconds (sequence of float): of each.
        memory (float): upper bound of memory B/s, as the rows alone may not determine it.
    """

    def loss(thin: float, v: dict[str, float]) -> float:
        c, total = CpuConstants(**v, thin_rows=thin), 0.0
        for row, h, t in zip(rows, hit, seconds):
            got = cpu_experts(
                c, *row[:5], hit=h, dtype=row.dtype, pass_=row.pass_,
                transposed=row.transposed,
            )  # fmt: skip
            total += abs(math.log(got / t))
        return total

    here = ("rate16", "rate32", "half_rows", "half_rows_t", "wgrad", "memory", "fault",
            "expert_us", "call_us")  # fmt: skip
    start = {name: getattr(CpuConstants(), name) for name in here}
    flops = [
        expert_flops(r.T * r.K, r.D, r.F, pass_=r.pass_) / t
        for r, t in zip(rows, seconds)
    ]
    for name, dtype in (("rate16", "bf16"), ("rate32", "fp32")):
        best = [f for f, r in zip(flops, rows) if r.dtype == dtype]
        start[name] = 1.25 * max(best, default=start[name])
    read = [h * 3 * r.D * r.F * ITEMSIZE[r.dtype] for r, h in zip(rows, hit)]
    start["memory"] = min(memory, 1.5 * max(n / t for n, t in zip(read, seconds)))
    found = []
    for thin, half, expert in itertools.product((0.0, 8.0), (10.0, 40.0), (5.0, 50.0)):
        start |= {"half_rows": half, "half_rows_t": half, "expert_us": expert}
        v = fit(start, functools.partial(loss, thin), stiffness=lambda name: 0.01,
                bounds={"memory": (0.0, memory)})  # fmt: skip
        found.append((loss(thin, v), thin, v))
    _, thin, best = min(found, key=lambda x: x[0])
    return CpuConstants(
        **{k: float(f"{v:.4g}") for k, v in best.items()}, thin_rows=thin
    )


def fit_link(
    points: Sequence[tuple[float, float]], turns: bool = True
) -> tuple[float, float, float]:
    """(start, rate, turn) of :func:`.link_seconds` with the least relative error.

    Args:
        points (sequence of tuple): bytes to others, and their seconds.
        turns (bool): allow a turn; it is kept if it at least halves the error.
    """

    def loss(turn: float, v: dict[str, float]) -> float:
        law = functools.partial(link_seconds, v["start"], v["rate"], turn=turn)
        return sum(abs(math.log(law(n) / t)) for n, t in points)

    def best(turn: float) -> tuple[float, float, float, float]:
        start = {"start": 1e-4, "rate": 1e9}
        v = fit(start, functools.partial(loss, turn), stiffness=lambda name: 0.0,
                steps=(10, 3, 2, 1.5, 1.25, 1.12, 1.06, 1.03, 1.015))  # fmt: skip
        return loss(turn, v), v["start"], v["rate"], turn

    plain = best(0.0)
    # One search over all three would stay at the rate that fits without a turn.
    found = min(best(2 ** (n / 4)) for n in range(56, 77)) if turns else plain
    return (found if 2 * found[0] <= plain[0] else plain)[1:]
