"""Who computes how many tokens of which expert in one forward.

Terms
    quota      tokens of an expert that a rank computes in this step
    host       a rank that has the expert's weights in this step
    cap        most tokens any rank may get; the smallest feasible one is searched
    free slot  slot that :func:`~torch.distributed._moe.placement.plan` left empty

Contract of a step
    The router's counts of this very step are known before the tokens travel. Ranks
    above the cap export tokens of their experts to ranks of the same node, which
    borrow the expert's weights into a free slot for this step. Experts that the
    placement put on several ranks or nodes share their tokens without borrowing.
    Weights never leave a node, so borrowing uses its fast links only.

    :func:`plan_step` is deterministic in its arguments: each rank computes the same plan
    from the same all-gathered counts, and nothing else is exchanged.

The search for the smallest cap and the greedy export rule are written from the
description of UltraEP's quota planner; levelling experts that several nodes hold
and splitting quotas over sources by interval overlap are this module's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed._moe.placement import Placement


if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["plan_step", "reroute", "slots_of", "split_by_source", "StepPlan"]


# -- tokens of a step


# Rounds of levelling one expert after the other, before chains are looked for.
_LEVEL_TURNS = 2
# Chains of tokens handed on; bounds the time only, see _GOOD_ENOUGH.
_CHAINS_PER_PLACE = 16
# Nothing is looked for below this: 1 % of a step is less than its noise.
_GOOD_ENOUGH = 1.01


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


def slots_of(slot_experts: Tensor, num_experts: int) -> Tensor:
    """Slot of each expert on each rank, (num_experts, num_ranks) int64, or -1."""
    num_ranks, slots_per_rank = slot_experts.shape
    slots = torch.full((num_experts + 1, num_ranks), -1)
    rank = torch.arange(num_ranks)[:, None].expand_as(slot_experts)
    slot = torch.arange(slots_per_rank).expand_as(slot_experts)
    slots[slot_experts, rank] = slot
    return slots[:num_experts]


def plan_step(
    counts: Tensor,
    placement: Placement,
    *,
    min_tokens_per_replica: int = 1,
    tolerance: float = 1e-3,
) -> StepPlan:
    """Borrows experts and sets quotas so that the heaviest rank is lightest.

    Never heavier than replicas that share their experts evenly, and within 1 % of the
    best split of the tokens over the replicas that ``placement`` has (a maximum flow);
    borrowing goes below that.

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
    amounts = counts.tolist()
    hosts = [held.nonzero().flatten().tolist() for held in placement.rank_holds().t()]
    ranks, per_node = placement.topology.num_ranks, placement.topology.ranks_per_node
    width = max(1, int(tolerance * sum(amounts) / ranks))
    nodes_of = [sorted({rank // per_node for rank in held}) for held in hosts]
    on_nodes = _balance(amounts, nodes_of, placement.topology.num_nodes)
    node_loads = _loads(on_nodes, placement.topology.num_nodes)
    bound = -(-max(node_loads) // per_node)
    free = (placement.slot_experts < 0).sum(1).tolist()
    best: list[dict[int, int]] | None = None
    if any(free):
        # Borrowing levels the ranks of a node, so that nodes come first.
        start: list[dict[int, int]] = [{} for _ in hosts]
        for node in range(placement.topology.num_nodes):
            experts = [e for e, share in enumerate(on_nodes) if node in share]
            local = _balance(
                [on_nodes[e][node] for e in experts],
                [[r for r in hosts[e] if r // per_node == node] for e in experts],
                ranks,
            )
            for e, share in zip(experts, local):
                start[e].update(share)
        best = _borrow(start, placement, free, min_tokens_per_replica, width)
    heaviest = None if best is None else max(map(_sum, best))
    if heaviest is None or (per_node < ranks and heaviest > bound * _GOOD_ENOUGH):
        # Where slots are scarce, level the ranks whatever that makes of the nodes.
        start = _balance(amounts, hosts, ranks)
        other = _borrow(start, placement, free, min_tokens_per_replica, width, heaviest)
        best = best if other is None else other
    if best is None:
        raise AssertionError("without a bound there is always a plan")
    return _to_step_plan(best, placement)


def _sum(held: dict[int, int]) -> int:
    return sum(held.values())


def _loads(split: list[dict[int, int]], num_places: int) -> list[int]:
    loads = [0] * num_places
    for share in split:
        for place, tokens in share.items():
            loads[place] += tokens
    return loads


def _balance(
    amounts: list[int], hosts: list[list[int]], num_places: int
) -> list[dict[int, int]]:
    """Splits amounts over their hosts so that the heaviest place is lightest.

    Levelling one expert after the other comes near. What is left are chains: a place
    can hand tokens of an expert to another of its hosts, which hands tokens of another
    expert on. They are found by a search from the heaviest place; all that it reaches
    can't hold less than its mean, which is when to stop.

    Args:
        amounts (list[int]): tokens of each expert.
        hosts (list[list[int]]): places that have each expert.
        num_places (int): ranks, or nodes.

    Returns:
        list[dict[int, int]]: tokens by place, of each expert.
    """
    loads = [0] * num_places
    split: list[dict[int, int]] = [{} for _ in amounts]
    for e, places in enumerate(hosts):
        if len(places) == 1:
            split[e][places[0]] = amounts[e]
            loads[places[0]] += amounts[e]
    shared = [e for e, places in enumerate(hosts) if len(places) > 1]
    shared.sort(key=lambda e: -amounts[e])
    on_place: list[list[int]] = [[] for _ in range(num_places)]
    for e in shared:
        for place in hosts[e]:
            on_place[place].append(e)
    for turn in range(_LEVEL_TURNS):
        for e in shared:
            places = hosts[e]
            if turn:
                for place, tokens in split[e].items():
                    loads[place] -= tokens
            shares = _level(amounts[e], [loads[p] for p in places])
            split[e] = dict(zip(places, shares))
            for place, tokens in split[e].items():
                loads[place] += tokens
    for _ in range(_CHAINS_PER_PLACE * num_places):
        heavy = max(range(num_places), key=loads.__getitem__)
        came: dict[int, tuple[int, int]] = {heavy: (-1, -1)}
        queue = [heavy]
        for place in queue:
            for e in on_place[place]:
                if split[e][place]:
                    for other in hosts[e]:
                        if other not in came:
                            came[other] = (place, e)
                            queue.append(other)
        reached = [loads[p] for p in queue]
        lightest = min(queue, key=loads.__getitem__)
        gap = loads[heavy] - loads[lightest]
        if gap < 2 or loads[heavy] * len(reached) <= sum(reached) * _GOOD_ENOUGH:
            break
        chain = []
        place = lightest
        while place != heavy:
            before, e = came[place]
            chain.append((before, e, place))
            place = before
        amount = min(gap // 2, *(split[e][before] for before, e, _ in chain))
        for before, e, after in chain:
            split[e][before] -= amount
            split[e][after] += amount
        loads[heavy] -= amount
        loads[lightest] += amount
    return split


def _borrow(
    start: list[dict[int, int]],
    placement: Placement,
    free: list[int],
    min_tokens: int,
    width: int,
    below: int | None = None,
) -> list[dict[int, int]] | None:
    """Tokens by expert on each rank after borrowing, heaviest rank as light as found.

    Nodes are independent. The node that starts with the heaviest rank is searched first;
    another one is only searched where it can't stay below what that one needs.

    Args:
        start (list[dict[int, int]]): tokens by rank of each expert.
        free (list[int]): free slots of each rank.
        min_tokens (int): fewest to borrow an expert for.
        width (int): the search for a cap ends at this width.
        below (int, optional): None is returned unless the heaviest rank is lighter.
    """
    held: list[dict[int, int]] = [{} for _ in free]
    for e, share in enumerate(start):
        for rank, tokens in share.items():
            held[rank][e] = tokens
    per_node = placement.topology.ranks_per_node
    loads = [_sum(row) for row in held]
    nodes = [slice(f, f + per_node) for f in range(0, len(held), per_node)]
    nodes.sort(key=lambda node: -max(loads[node]))
    reached = 0
    for node in nodes:
        rows, heaviest = held[node], max(loads[node])
        low = max(reached, -(-sum(loads[node]) // per_node))
        if not any(free[node]) or heaviest <= low:
            reached = max(reached, heaviest)
        else:
            most = heaviest if below is None else min(heaviest, below)

            def trial(cap: int) -> list[dict[int, int]] | None:
                return _export(rows, free[node], cap, min_tokens)

            found, high = _least_cap(trial, low, most, width)
            held[node] = rows if found is None else found
            reached = max(reached, heaviest if found is None else high)
        if below is not None and reached >= below:
            return None
    return held


def _least_cap(
    trial: Callable[[int], list[dict[int, int]] | None], low: int, most: int, width: int
) -> tuple[list[dict[int, int]] | None, int]:
    """The trial at the least cap in ``[low, most)`` that has one, up to ``width``.

    The best cap is often the lower bound, and seldom far from it: caps are tried from
    there on in growing steps, and then halved.
    """
    found, high, step = None, most, width
    while low < high:
        cap = (low + high) // 2 if found else min(low + step, high - 1)
        new = trial(cap)
        if new is None:
            low, step = cap + 1, 4 * step
        else:
            found, high = new, cap
        if found and high - low < width:
            break
    return found, high


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
    start: list[dict[int, int]], free: list[int], cap: int, min_tokens: int
) -> list[dict[int, int]] | None:
    """Tokens per rank and expert of a node with no rank above ``cap``, or None."""
    for choose in (_most_room, _tightest_fit):
        done = _export_in_node(start, free, cap, min_tokens, choose)
        if done is not None:
            return done
    return None


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
    roomy = [r for r, space in enumerate(room) if space > 0]
    for source in sorted(range(len(held)), key=room.__getitem__):
        if room[source] >= 0:
            break
        for e, tokens in sorted(held[source].items(), key=lambda x: -x[1]):
            while room[source] < 0 and tokens > 0:
                least = min(min_tokens, tokens)
                hosts = [
                    r for r in roomy if e in held[r] or (free[r] and room[r] >= least)
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
                if not room[target]:
                    roomy.remove(target)
                room[source] += amount
                tokens -= amount
            if room[source] >= 0:
                break
        if room[source] < 0:
            return None
        if room[source] > 0:  # gave more than it had to, for min_tokens
            roomy.append(source)
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


def split_by_source(
    source_counts: Tensor, quotas: Tensor, rank: int | None = None
) -> Tensor:
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
        rank (int, optional): only for the tokens of this rank. Default: None (all)

    Returns:
        Tensor: (num_ranks, num_experts, num_ranks) int64, copies of an expert's
        tokens (second index) from one rank (first) to another (third); without the
        first dimension for one ``rank``.
    """
    sources, num_experts = source_counts.shape
    if tuple(quotas.shape) != (num_experts, sources):
        raise ValueError(
            "split_by_source: quotas must have shape (num_experts, num_ranks) = "
            f"{(num_experts, sources)}, got {tuple(quotas.shape)}"
        )
    _check_totals(source_counts.sum(0), quotas.sum(1))
    own = torch.minimum(source_counts, quotas.t())
    sent = (source_counts - own).t()  # (experts, sources)
    taken = quotas - own.t()  # (experts, hosts)
    source_end, host_end = sent.cumsum(1), taken.cumsum(1)
    source_begin, host_begin = source_end - sent, host_end - taken
    if rank is not None:
        overlap = torch.minimum(source_end[:, rank, None], host_end)
        overlap = overlap - torch.maximum(source_begin[:, rank, None], host_begin)
        split = overlap.clamp_min_(0)
        split[:, rank] += own[rank]
        return split
    overlap = torch.minimum(source_end[:, :, None], host_end[:, None, :])
    overlap = overlap - torch.maximum(source_begin[:, :, None], host_begin[:, None, :])
    split = overlap.clamp_min(0).transpose(0, 1).contiguous()
    ranks = torch.arange(sources, device=split.device)
    split[ranks, :, ranks] += own
    return split


def _check_totals(copies: Tensor, quotas: Tensor) -> None:
    if copies.device.type != "cpu":
        # Without a sync.
        torch._assert_async(
            (copies == quotas).all(),
            "split_by_source: quotas must sum to the token copies of each expert",
        )
    elif not torch.equal(copies, quotas):
        e = int((copies != quotas).nonzero()[0])
        raise ValueError(
            f"split_by_source: expert {e} has {int(copies[e])} token copies but "
            f"quotas for {int(quotas[e])}"
        )


def reroute(
    topk_indices: Tensor, split: Tensor, slots_of: Tensor, slots_per_rank: int
) -> Tensor:
    """Turns expert ids into ids of physical slots, following the quotas.

    The n-th copy (in token order) of an expert's tokens goes to the host in whose
    share of ``split`` n falls. The result is what a token switch with
    ``num_experts = num_slots`` dispatches. Nothing is read on the host.

    Args:
        topk_indices (Tensor): (T, K) integer expert ids of this rank's tokens; -1
            and ``num_experts`` mean no expert.
        split (Tensor): (num_experts, num_ranks) int64, this rank's row of
            :func:`split_by_source`.
        slots_of (Tensor): (num_experts, num_ranks) of :func:`slots_of`.
        slots_per_rank (int): slots of each rank.

    Returns:
        Tensor: (T, K) int64 of ``rank * slots_per_rank + slot``, -1 for no expert.
    """
    num_experts, num_ranks = split.shape
    # Where each copy stands if copies are sorted by expert and then by token.
    _, place, _, _ = torch._moe_permutation(topk_indices, num_experts)
    first = torch.arange(num_ranks, device=split.device) * slots_per_rank
    slots = (slots_of + first).flatten()
    size = topk_indices.numel()
    # Shares of an expert follow each other; copies without an expert come last.
    shares = split.flatten()
    shares = torch.cat([shares, size - shares.sum(0, keepdim=True)])
    slots = torch.cat([slots, slots.new_full((1,), -1)])
    slot_at = torch.repeat_interleave(slots, shares, output_size=size)
    return slot_at[place.long()].masked_fill(place < 0, -1) if size else place.long()
