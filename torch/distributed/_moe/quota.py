"""Exact balance of one step: per-step replicas and token quotas inside a node.

Terms
    quota      tokens of an expert that a rank computes in this step
    host       a rank that has the expert's weights in this step
    cap        most tokens any rank may get; the smallest feasible one is searched
    free slot  slot that :func:`~torch.distributed._moe.placement.plan` left empty

Contract
    The router's counts of this very step are known before the tokens travel. Ranks
    above the cap export tokens of their experts to ranks of the same node, which
    borrow the expert's weights into a free slot for this step. Experts that the
    placement put on several ranks or nodes share their tokens without borrowing.
    Weights never leave a node, so borrowing uses its fast links only.

Every function here is deterministic in its arguments: each rank computes the
same plan from the same all-gathered counts, and nothing else is exchanged.

The search for the smallest cap and the greedy export rule are written from the
description of UltraEP's quota planner; levelling experts that several nodes hold
and splitting quotas over sources by interval overlap are this module's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed._moe.topology import Placement


if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["StepPlan", "plan_step", "reroute", "split_by_source"]


# Rounds of levelling experts over their nodes; the third changes the heaviest node
# by less than 0.1 % at 256 experts on 8 nodes.
_LEVEL_TURNS = 3


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Who computes how many tokens of which expert in one step.

    Attributes:
        slot_experts (Tensor): (num_ranks, slots_per_rank) int64, expert in each
            slot during the step, the borrowed ones included; -1 is unused.
        quotas (Tensor): (num_experts, num_ranks) int64, tokens of an expert that
            a rank computes. Rows sum to the counts.
    """

    slot_experts: Tensor
    quotas: Tensor

    def imbalance(self) -> float:
        """Heaviest rank load over the mean one."""
        loads = self.quotas.sum(0).double()
        return (loads.max() / loads.mean().clamp_min(1e-300)).item()

    def slots_of(self) -> Tensor:
        """Slot of each expert on each rank, (num_experts, num_ranks) int64, or -1."""
        num_experts, num_ranks = self.quotas.shape
        slots = torch.full((num_experts + 1, num_ranks), -1)
        rank = torch.arange(num_ranks)[:, None].expand_as(self.slot_experts)
        slot = torch.arange(self.slot_experts.shape[1]).expand_as(self.slot_experts)
        slots[self.slot_experts, rank] = slot
        return slots[:num_experts]


def plan_step(
    counts: Tensor,
    placement: Placement,
    *,
    min_tokens_per_replica: int = 1,
    tolerance: float = 1e-3,
) -> StepPlan:
    """Borrows experts and sets quotas so that the heaviest rank is lightest.

    Args:
        counts (Tensor): (num_experts) integer token copies of each expert in
            this step, summed over the ranks. One transfer if on a device.
        placement (Placement): weights in place, with free slots to borrow into.

    Keyword Args:
        min_tokens_per_replica (int): an expert is only borrowed for at least
            so many tokens; below, moving its weights costs more. Default: 1
        tolerance (float): width, relative to the mean load, at which the search
            for the cap ends. Default: 1e-3

    Returns:
        StepPlan: slots and quotas of this step.
    """
    E = placement.num_experts
    if tuple(counts.shape) != (E,):
        raise ValueError(
            f"plan_step: counts must have shape (num_experts) = ({E},), "
            f"got {tuple(counts.shape)}"
        )
    if counts.is_floating_point() or counts.is_complex() or bool((counts < 0).any()):
        raise ValueError(
            f"plan_step: counts must be integers that are not negative, got {counts}"
        )
    if min_tokens_per_replica < 1:
        raise ValueError(
            "plan_step: min_tokens_per_replica must be at least 1, "
            f"got {min_tokens_per_replica}"
        )
    start = _share_static_replicas(counts.tolist(), placement)
    loads = [sum(row.values()) for row in start]
    per_node = placement.topology.ranks_per_node
    node_loads = [sum(loads[s : s + per_node]) for s in range(0, len(loads), per_node)]
    low = -(-max(node_loads) // per_node)
    high = max(loads)
    width = max(1, int(tolerance * sum(loads) / len(loads)))
    best = start
    # The best cap is often just above the lower bound: try there first.
    cap = min(high, low + width)
    while low < high:
        trial = _export(start, placement, cap, min_tokens_per_replica)
        if trial is None:
            low = cap + 1
        else:
            best, high = trial, cap
        if high - low < width:
            break
        cap = (low + high) // 2
    return _to_step_plan(best, placement)


def _share_static_replicas(
    counts: list[int], placement: Placement
) -> list[dict[int, int]]:
    """Tokens of each expert on each rank before anything is borrowed.

    An expert on several ranks is levelled: first over its nodes, so that no node
    is heavier than it must be, then over its ranks in each node.
    """
    per_node = placement.topology.ranks_per_node
    hosts: list[list[int]] = [[] for _ in counts]
    for rank, row in enumerate(placement.slot_experts.tolist()):
        for e in row:
            if e >= 0:
                hosts[e].append(rank)
    held: list[dict[int, int]] = [{} for _ in range(placement.topology.num_ranks)]
    rank_loads = [0] * len(held)
    node_loads = [0] * placement.topology.num_nodes
    # Experts without a choice first, then the heavy ones. Shared experts are
    # levelled again, as each sees the others only after its first turn.
    order = sorted(range(len(counts)), key=lambda e: (len(hosts[e]) > 1, -counts[e]))
    nodes_of = [sorted({rank // per_node for rank in ranks}) for ranks in hosts]
    on_nodes = [[0] * len(nodes) for nodes in nodes_of]
    for turn in range(_LEVEL_TURNS):
        for e in order:
            nodes = nodes_of[e]
            if turn and len(nodes) == 1:
                continue
            for node, amount in zip(nodes, on_nodes[e]):
                node_loads[node] -= amount
            on_nodes[e] = _level(counts[e], [node_loads[n] for n in nodes])
            for node, amount in zip(nodes, on_nodes[e]):
                node_loads[node] += amount
    for e in order:
        for node, amount in zip(nodes_of[e], on_nodes[e]):
            ranks = [r for r in hosts[e] if r // per_node == node]
            on_ranks = _level(amount, [rank_loads[r] for r in ranks])
            for rank, tokens in zip(ranks, on_ranks):
                rank_loads[rank] += tokens
                held[rank][e] = tokens
    return held


def _level(amount: int, levels: list[int]) -> list[int]:
    """Splits ``amount`` so that the lowest levels rise to one common height."""
    if len(levels) == 1:
        return [amount]
    order = sorted(range(len(levels)), key=levels.__getitem__)
    shares = [0] * len(levels)
    below = 0
    for used in range(1, len(order) + 1):
        below += levels[order[used - 1]]
        height, rest = divmod(amount + below, used)
        if used == len(order) or height <= levels[order[used]]:
            break
    for position, i in enumerate(order[:used]):
        shares[i] = height + (position < rest) - levels[i]
    return shares


def _export(
    start: list[dict[int, int]],
    placement: Placement,
    cap: int,
    min_tokens: int,
) -> list[dict[int, int]] | None:
    """Tokens per rank and expert with no rank above ``cap``, or None.

    Nodes are independent here; where one choice of targets leaves a node above the
    cap, another one is tried on that node.
    """
    per_node = placement.topology.ranks_per_node
    free = (placement.slot_experts < 0).sum(1).tolist()
    held: list[dict[int, int]] = []
    for first in range(0, len(start), per_node):
        node = slice(first, first + per_node)
        for choose in (_most_room, _tightest_fit):
            done = _export_in_node(start[node], free[node], cap, min_tokens, choose)
            if done is not None:
                break
        else:
            return None
        held += done
    return held


def _most_room(hosts: list[int], room: list[int], amount: int) -> int:
    """Fewest targets for one expert."""
    return max(hosts, key=room.__getitem__)


def _tightest_fit(hosts: list[int], room: list[int], amount: int) -> int:
    """Fewest targets that stay half full: room is lost once the slots are used up."""
    fitting = [r for r in hosts if room[r] >= amount]
    if fitting:
        return min(fitting, key=room.__getitem__)
    return _most_room(hosts, room, amount)


def _export_in_node(
    start: list[dict[int, int]],
    free: list[int],
    cap: int,
    min_tokens: int,
    choose: Callable[[list[int], list[int], int], int],
) -> list[dict[int, int]] | None:
    """:func:`_export` of the ranks of one node.

    Greedy: the heaviest rank gives from its heaviest expert to the rank that
    ``choose`` takes from those that hold the expert or can borrow it.
    """
    held = [dict(row) for row in start]
    free = list(free)
    room = [cap - sum(row.values()) for row in held]
    for source in sorted(range(len(held)), key=room.__getitem__):
        if room[source] >= 0:
            break
        for e, tokens in sorted(held[source].items(), key=lambda x: -x[1]):
            while room[source] < 0 and tokens > 0:
                least = min(min_tokens, tokens)
                hosts = [
                    r
                    for r, space in enumerate(room)
                    if space > 0 and (e in held[r] or (free[r] and space >= least))
                ]
                if not hosts:
                    break
                amount = min(max(-room[source], least), tokens)
                target = choose(hosts, room, amount)
                amount = min(amount, room[target])
                if e not in held[target]:
                    free[target] -= 1
                    held[target][e] = 0
                held[target][e] += amount
                held[source][e] -= amount
                room[target] -= amount
                room[source] += amount
                tokens -= amount
            if room[source] >= 0:
                break
        if room[source] < 0:
            return None
    return held


def _to_step_plan(held: list[dict[int, int]], placement: Placement) -> StepPlan:
    slots = placement.slot_experts.tolist()
    quotas = torch.zeros(placement.num_experts, len(held), dtype=torch.int64)
    for rank, row in enumerate(held):
        borrowed = sorted(set(row) - set(slots[rank]))
        for slot, e in enumerate(slots[rank]):
            if e < 0 and borrowed:
                slots[rank][slot] = borrowed.pop(0)
        if row:
            quotas[list(row), rank] = torch.tensor(list(row.values()))
    return StepPlan(torch.tensor(slots), quotas)


def split_by_source(source_counts: Tensor, quotas: Tensor) -> Tensor:
    """Splits the quotas over the ranks that the tokens come from.

    A rank computes its own tokens first, which then need no transfer. The rest of
    an expert's sources and hosts are laid out as two divisions of one line; what a
    source sends to a host is the overlap of their intervals. Both sums are exact
    by construction and most sources send to few hosts.

    Args:
        source_counts (Tensor): (num_ranks, num_experts) int64, token copies that
            each rank's router produced.
        quotas (Tensor): (num_experts, num_ranks) int64 of :class:`StepPlan`, for
            the same total per expert.

    Returns:
        Tensor: (num_ranks, num_experts, num_ranks) int64, copies of an expert's
        tokens (second index) from one rank (first) to another (third).
    """
    sources, num_experts = source_counts.shape
    if tuple(quotas.shape) != (num_experts, sources):
        raise ValueError(
            "split_by_source: quotas must have shape (num_experts, num_ranks) = "
            f"{(num_experts, sources)}, got {tuple(quotas.shape)}"
        )
    totals = source_counts.sum(0)
    if not torch.equal(totals, quotas.sum(1)):
        e = int((totals != quotas.sum(1)).nonzero()[0])
        raise ValueError(
            f"split_by_source: expert {e} has {int(totals[e])} token copies but "
            f"quotas for {int(quotas[e].sum())}"
        )
    own = torch.minimum(source_counts, quotas.t())
    source_end = (source_counts - own).cumsum(0).t()  # (experts, sources)
    host_end = (quotas - own.t()).cumsum(1)  # (experts, hosts)
    source_begin = source_end - (source_counts - own).t()
    host_begin = host_end - (quotas - own.t())
    overlap = torch.minimum(source_end[:, :, None], host_end[:, None, :])
    overlap = overlap - torch.maximum(source_begin[:, :, None], host_begin[:, None, :])
    split = overlap.clamp_min(0).transpose(0, 1).contiguous()
    rank = torch.arange(sources, device=split.device)
    split[rank, :, rank] += own
    return split


def reroute(topk_indices: Tensor, split: Tensor, slots_of: Tensor, slots_per_rank: int):
    """Turns expert ids into ids of physical slots, following the quotas.

    The n-th copy (in token order) of an expert's tokens goes to the host in whose
    share of ``split`` n falls. The result is what a token switch with
    ``num_experts = num_slots`` dispatches.

    Args:
        topk_indices (Tensor): (T, K) integer expert ids of this rank's tokens; -1
            and ``num_experts`` mean no expert.
        split (Tensor): (num_experts, num_ranks) int64, this rank's row of
            :func:`split_by_source`.
        slots_of (Tensor): (num_experts, num_ranks) of :meth:`StepPlan.slots_of`.
        slots_per_rank (int): slots of each rank.

    Returns:
        Tensor: (T, K) int64 of ``rank * slots_per_rank + slot``, -1 for no expert.
    """
    num_experts, num_ranks = split.shape
    flat = topk_indices.flatten().long()
    valid = (flat >= 0) & (flat < num_experts)
    expert = torch.where(valid, flat, num_experts)
    order = torch.argsort(expert, stable=True)
    counts = torch.bincount(expert, minlength=num_experts + 1)
    # Position of every copy among the copies of its expert.
    begin = counts.cumsum(0) - counts
    nth = torch.empty_like(flat)
    nth[order] = torch.arange(len(flat), device=flat.device) - begin[expert[order]]
    # One search over all experts: shift each expert's thresholds past the others'.
    shift = torch.arange(num_experts, device=flat.device) * (len(flat) + 1)
    ends = (split.cumsum(1) + shift[:, None]).flatten()
    safe = torch.where(valid, flat, 0)
    host = torch.searchsorted(ends, nth + shift[safe], right=True) - safe * num_ranks
    host = torch.where(valid, host, 0).clamp_max(num_ranks - 1)
    slot = host * slots_per_rank + slots_of[safe, host]
    return torch.where(valid, slot, -1).view_as(topk_indices)
