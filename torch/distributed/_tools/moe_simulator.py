# mypy: allow-untyped-defs
"""A training job on 1 to 100,000 GPUs: skew, jitter, stragglers, failures and restarts.

A layer waits for the heaviest rank of its expert group, a step for its slowest pipeline, a
job for its restarts. Inside a group the expected maximum is a closed form (the largest of
independent normals); over groups and steps it is drawn. Every assumption is a field of
:class:`Assumptions` with its source, and a seed gives the same numbers again.

    >>> rows = simulate(profile("H100"), MoEConfig.by_name("deepseek-v3"),
    ...                 Layout(tp=2, pp=8, ep=64, dtype="fp8"), gpus=[1024, 102400])
    >>> [(r.gpus, r.slowdown, r.goodput) for r in rows]
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import NamedTuple, TYPE_CHECKING

import torch
from torch.distributed._tools.moe_arguments import check
from torch.distributed._tools.moe_exchange_model import hit_share
from torch.distributed._tools.moe_step_model import train_step


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed._tools.moe_config import MoEConfig
    from torch.distributed._tools.moe_layout import Layout
    from torch.distributed._tools.moe_profile import Profile


__all__ = [
    "Assumptions", "SimulatedJob", "expected_imbalance", "largest_normal", "replicated_imbalance",
    "rows_of_pair", "simulate",
]  # fmt: skip


# ---- imbalance -------------------------------------------------------------------------


def expected_imbalance(
    load: Sequence[float],
    tokens: float,
    k: int,
    ep: int,
    *,
    design: float = 1.0,
    placement: Sequence[int] | None = None,
    quantile: float | None = None,
) -> float:
    """Expected load of the heaviest rank over the mean, or a quantile of it.

    Shares of the ranks plus multinomial noise: the largest of independent normals, exact
    except for their weak correlation. ``load`` must be current (``LoadStats``), as routing drifts:
    an earlier half of a trace predicts the later one with an error of 47 %, the
    current load with 1.7 %.

    Args:
        load (sequence of float): of every expert, in any unit.
        tokens (float): T of a step over all ranks of the group.
        k (int): K.
        ep (int): ranks.

    Keyword Args:
        design (float): variance over that of independent slots; above 1 if neighbouring tokens
            route alike.
        placement (sequence of int, optional): rank of every expert. Default: contiguous
        quantile (float, optional): load that the heaviest rank stays below with this
            probability, which is what a capacity needs. Default: None (the mean)
    """
    share = torch.as_tensor(load, dtype=torch.float64)
    if share.dim() != 1 or not 0 < share.sum() < math.inf or not (share >= 0).all():
        raise ValueError(
            "expected_imbalance: load must be one non-negative number per expert, not all "
            f"zero, got shape {tuple(share.shape)}"
        )
    if placement is None and share.numel() % ep:
        raise ValueError(
            f"expected_imbalance: {share.numel()} experts do not divide over ep = {ep}"
        )
    share = share / share.sum()
    if placement is None:
        share = share.view(ep, -1).sum(1)
    else:
        share = torch.zeros(ep, dtype=torch.float64).index_add_(
            0, torch.as_tensor(placement), share
        )
    slots = tokens * k
    if ep == 1 or not slots:
        return 1.0
    mean = share * slots
    sd = (share * (1 - share) * slots * design).clamp_min(1e-12).sqrt()
    x = torch.linspace(
        float((mean - 6 * sd).min()), float((mean + 6 * sd).max()), 2001,
        dtype=torch.float64,
    )  # fmt: skip
    z = (x[:, None] - mean) / sd
    below = torch.special.log_ndtr(z).sum(1).exp()
    if quantile is not None:
        at = int(torch.searchsorted(below, quantile).clamp_max(len(x) - 1))
        return float(x[at]) * ep / slots
    return float(x[-1] - torch.trapezoid(below, x)) * ep / slots


def replicated_imbalance(
    load: Sequence[float], tokens: float, k: int, ep: int, domain: int, replicas: int
) -> float | None:
    """:func:`expected_imbalance` on a plan of ``torch.distributed._moe`` with copies of experts.

    Args:
        load, tokens, k, ep: as there.
        domain (int): ranks of a node.
        replicas (int): copies of experts, beyond one each.

    Returns:
        None where the slots do not divide.
    """
    from torch.distributed._moe.plan import plan, Topology

    slots = len(load) + replicas
    if len(load) % ep or ep % domain or slots % ep:
        return None
    counts = torch.tensor(load, dtype=torch.float64)
    counts *= tokens * k / counts.sum()
    found = plan(counts, Topology(ep // domain, domain, slots // ep))
    noise = expected_imbalance([1.0] * ep, tokens, k, ep)
    return max(1.0, found.imbalance(counts)) * noise


def rows_of_pair(
    tokens: int, ranks: int, num_experts: int, k: int, factor: float, overflow: float
) -> int:
    """Rows from one rank to another, exceeded in a share ``overflow`` of steps.

    A token goes to a rank once, however many of its experts are there.

    Args:
        tokens (int): of the sender.
        ranks (int): ranks that have the experts, and send.
        num_experts (int): E.
        k (int): K.
        factor (float): heaviest rank over mean.
        overflow (float): for all pairs together.
    """
    hit = hit_share(min(1.0, factor / ranks), num_experts, k)
    z = statistics.NormalDist().inv_cdf(1 - overflow / ranks**2)
    rows = tokens * hit + z * math.sqrt(tokens * hit * (1 - hit))
    return min(tokens, math.ceil(rows))


def largest_normal(n: int, sd: float = 1.0) -> float:
    """Expected maximum of ``n`` independent normals (the extreme-value expansion)."""
    if n <= 1:
        return 0.0
    if n == 2:
        return sd / math.sqrt(math.pi)
    a = math.sqrt(2 * math.log(n))
    shift = (math.log(math.log(n)) + math.log(4 * math.pi)) / (2 * a)
    return sd * (a - shift + 0.5772 / a)


# ---- a job -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Assumptions:
    """Noise and failures of a job. Every field can be replaced; sources are beside the defaults.

    Attributes:
        imbalance: heaviest expert rank over the mean. Balanced by replicas, as reported
            of EPLB and UltraEP in use: 1.01 to 1.10.
        expert_share: share of a layer's time that grows with the imbalance; products of
            experts and their exchange. Default: from the model, as None.
        jitter: deviation of a layer's time on one GPU. Kernels repeat within 1 %.
        silicon: deviation of speed between GPUs: 0.3 %, clocks under one power limit.
        slow_share, slow_by: GPUs that stay slow, and by how much: one in a thousand,
            10 % (ByteDance's MegaScale, arXiv 2402.15627, found 0.5 % of machines).
        mtbf_hours: of one GPU with its share of host and network: 50,000 (Llama 3, arXiv
            2407.21783: 419 unexpected interruptions of 16,384 GPUs in 54 days).
        detect_seconds, restart_seconds: until a failure is seen and until training goes on.
        save_seconds: time that a checkpoint stops training; interval by Young and Daly.
    """

    imbalance: float = 1.05
    expert_share: float | None = None
    jitter: float = 0.01
    silicon: float = 0.003
    slow_share: float = 1e-3
    slow_by: float = 0.10
    mtbf_hours: float = 50_000
    detect_seconds: float = 60
    restart_seconds: float = 420
    save_seconds: float = 30

    def __post_init__(self) -> None:
        given = {n: v for n, v in vars(self).items() if v is not None}
        check("Assumptions", **given)


class SimulatedJob(NamedTuple):
    """A job on ``gpus`` GPUs.

    Attributes:
        gpus: in whole expert groups and pipelines; at most the requested number.
        ideal: seconds of a step if all GPUs were equal and balanced.
        step: mean seconds of a step.
        slowdown: step over ideal.
        skew: slowdown by imbalance and jitter inside the groups alone.
        straggler: slowdown by the slowest GPU alone.
        goodput: share of the time that is not lost to failures and checkpoints.
        mtbf_minutes, save_minutes: between failures, and between checkpoints.
        tokens_per_second: per GPU, goodput included.
    """

    gpus: int
    ideal: float
    step: float
    slowdown: float
    skew: float
    straggler: float
    goodput: float
    mtbf_minutes: float
    save_minutes: float
    tokens_per_second: float


def _goodput(a: Assumptions, gpus: int) -> tuple[float, float, float]:
    """(goodput, seconds between failures, seconds between checkpoints).

    Between failures, each checkpoint takes its time. A failure loses half
    an interval, its detection and the restart (Young 1974, Daly 2006).
    """
    mtbf = a.mtbf_hours * 3600 / gpus
    interval = math.sqrt(2 * a.save_seconds * mtbf) if a.save_seconds else 1.0
    lost = a.detect_seconds + a.restart_seconds + interval / 2
    # A failure during recovery recovers again: time to complete one interval.
    useful = mtbf / (mtbf + lost) * interval / (interval + a.save_seconds)
    return useful, mtbf, interval


def _one(
    p: Profile, model: MoEConfig, layout: Layout, gpus: int, batch_per_dp: int, seq: int,
    a: Assumptions, steps: int, seed: int,
) -> SimulatedJob:  # fmt: skip
    unit = math.lcm(layout.tp * layout.pp * layout.cp, layout.pp * layout.ep)
    if gpus < unit:
        raise ValueError(
            f"simulate: {gpus} GPUs are fewer than one expert group with its pipelines; "
            f"tp={layout.tp}, pp={layout.pp}, ep={layout.ep} need a multiple of {unit}"
        )
    gpus = gpus // unit * unit
    layout = replace(layout, gpus=gpus)
    batch = batch_per_dp * layout.dp
    ideal = train_step(p, model, layout, global_batch=batch, seq=seq)
    share = a.expert_share
    if share is None:
        share = (ideal.parts["experts"] + ideal.comm) / sum(ideal.parts.values())
    groups = gpus // (layout.ep * layout.pp)
    gen = torch.Generator().manual_seed(seed)
    speed = 1 + a.silicon * torch.randn(gpus, generator=gen)
    speed += a.slow_by * (torch.rand(gpus, generator=gen) < a.slow_share)
    # A group is as slow as its slowest GPU, a pipeline as its slowest stage.
    slowest = speed.view(layout.pp, groups, layout.ep).amax(2).amax(0)
    # Per layer, the heaviest and latest rank of a group; layers of a step average out.
    skew = 1 + (a.imbalance - 1) * share + largest_normal(layout.ep, a.jitter)
    layers = 2 * model.layers / layout.pp * layout.accumulation(batch)
    spread = a.jitter * 0.6 / math.sqrt(layers) if layout.ep > 1 else 0.0
    noise = torch.randn(steps, groups, generator=gen) * spread
    # The gradient reduction waits for all groups.
    step = float((ideal.seconds * skew * slowest * (1 + noise)).amax(1).mean())
    goodput, mtbf, interval = _goodput(a, gpus)
    rate = batch * seq / step / gpus * goodput
    return SimulatedJob(
        gpus, ideal.seconds, step, step / ideal.seconds, skew, float(slowest.max()),
        goodput, mtbf / 60, interval / 60, rate,
    )  # fmt: skip


def simulate(
    p: Profile,
    model: MoEConfig,
    layout: Layout,
    gpus: Sequence[int],
    *,
    batch_per_dp: int = 16,
    seq: int = 4096,
    assumptions: Assumptions | None = None,
    steps: int = 64,
    seed: int = 0,
) -> list[SimulatedJob]:
    """Jobs of the same layout on growing numbers of GPUs, the batch growing with them.

    Args:
        p (Profile): the device.
        model (MoEConfig): the model.
        layout (Layout): of one job; its ``gpus`` is replaced.
        gpus (sequence of int): numbers of GPUs, each rounded down to whole groups.

    Keyword Args:
        batch_per_dp (int): sequences of a step per data-parallel rank.
        seq (int): length of a sequence.
        assumptions (Assumptions, optional): of noise and failures.
        steps (int): drawn.
        seed (int): of all draws.

    Returns:
        One :class:`SimulatedJob` per number of GPUs.
    """
    a = assumptions or Assumptions()
    check("simulate", batch_per_dp=batch_per_dp, seq=seq, steps=steps, seed=seed)
    for n in gpus:
        check("simulate", gpus=n)
    return [_one(p, model, layout, n, batch_per_dp, seq, a, steps, seed) for n in gpus]
