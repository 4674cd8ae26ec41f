"""Plans which rank holds which expert, every few hundred steps.

Terms
    replica    one copy of an expert's weights in one slot of one rank
    group      experts that must stay on one node (group-limited routing)
    load       routed token copies ("slots" of the router) of an expert
    imbalance  heaviest rank load / mean rank load; 1 is perfect

:func:`plan` runs every few hundred steps on averaged counts and may move
weights between any two ranks. What changes inside one step, on the exact counts
of that step and only inside a node, is :mod:`torch.distributed._moe.balance`.

The three steps (groups to nodes, replicas inside a node, replicas to ranks) and
both greedy rules follow the policy that DeepSeek's EPLB describes; the swap
refinement, the rule that a rank never holds an expert twice, slots left free
for quotas, experts shared by several nodes and the migration price are added
here.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed._moe.placement import assign_slots, Placement, Topology


__all__ = ["plan"]


# -- packing of weighted items into equal packs
#
# An item has a load and an owner (the expert or group it is a replica of); two items of
# one owner never share a pack. A pack has ``capacity`` places.


# Swapping ends when the heaviest pack is this close to the best possible one:
# below the noise of any load measurement.
_CLOSE_ENOUGH = 1e-3
# Each swap makes the heaviest pack lighter, so this only bounds the time.
_SWAPS_PER_PACK = 2
# Pairs against pairs grow with the fourth power of the capacity.
_PAIR_SEARCH_CAPACITY = 10


class Effort:
    """What a search has cost and may cost, in swaps of about 0.1 ms on a CPU core.

    Counted, not timed, so that all ranks find the same plan.

    Attributes:
        spent (float): so far.
        limit (float): the search ends here.
    """

    def __init__(self) -> None:
        self.spent = 0.0
        self.limit = math.inf

    def left(self) -> bool:
        return self.spent < self.limit


# Beside a swap: a search for two against two, and, per item and pack, a packing.
_PAIR_SEARCH_EFFORT = 2.0
PACK_EFFORT = 1e-3


def pack(
    loads: list[float], owners: list[int], num_packs: int, capacity: int
) -> list[int]:
    """Puts items, heaviest first, on the lightest pack that may take them.

    Args:
        loads (list[float]): load of each item.
        owners (list[int]): owner of each item, on at most ``num_packs`` items.
        num_packs (int): number of packs.
        capacity (int): most items of a pack.

    Returns:
        list[int]: pack of each item.
    """
    total = [0.0] * num_packs
    members: list[list[int]] = [[] for _ in range(num_packs)]
    held: list[set[int]] = [set() for _ in range(num_packs)]
    # Stable in the index, so that equal loads always give the same plan.
    for item in sorted(range(len(loads)), key=lambda i: -loads[i]):
        open_packs = [p for p in range(num_packs) if len(members[p]) < capacity]
        allowed = [p for p in open_packs if owners[item] not in held[p]]
        if allowed:
            target = min(allowed, key=lambda p: total[p])
        else:
            target = _make_room(item, open_packs[0], loads, owners, members, held)
            other = members[target].pop()
            members[open_packs[0]].append(other)
            held[target].remove(owners[other])
            held[open_packs[0]].add(owners[other])
            total[target] -= loads[other]
            total[open_packs[0]] += loads[other]
        members[target].append(item)
        held[target].add(owners[item])
        total[target] += loads[item]
    result = [0] * len(loads)
    for p, items in enumerate(members):
        for item in items:
            result[item] = p
    return result


def _make_room(item, open_pack, loads, owners, members, held) -> int:
    """Pack whose last member can go to ``open_pack`` so that ``item`` fits.

    Only packs that hold the owner of ``item`` still have room. A full pack
    without it exists, as an owner has at most as many items as there are packs,
    and it has a member that ``open_pack`` lacks, as it has more members.
    """
    best, best_gap = -1, float("inf")
    for p, items in enumerate(members):
        if owners[item] in held[p]:
            continue
        movable = [i for i in items if owners[i] not in held[open_pack]]
        if not movable:
            continue
        lightest = min(movable, key=lambda i: abs(loads[i] - loads[item]))
        gap = abs(loads[lightest] - loads[item])
        if gap < best_gap:
            best, best_gap = p, gap
            items.remove(lightest)
            items.append(lightest)
    return best


def refine(
    loads: list[float],
    owners: list[int],
    packs: list[int],
    num_packs: int,
    capacity: int,
    *,
    floor: float = 0.0,
    price: float = 0.0,
    effort: Effort | None = None,
) -> list[int]:
    """Swaps items of the heaviest pack against items elsewhere while that helps.

    An empty place takes part as an item without load, so that a swap can also be
    a move. Of all swaps the one with the lightest heavier side is taken; where no
    single swap helps, swaps of two items against two are tried.

    Args:
        loads (list[float]): load of each item.
        owners (list[int]): owner of each item.
        packs (list[int]): pack of each item to begin with.
        num_packs (int): number of packs.
        capacity (int): most items of a pack.

    Keyword Args:
        floor (float): a heaviest pack of this load is good enough. Default: 0.0
        price (float): price of a moved item in the unit of the loads; the
            result minimises heaviest pack plus price times moved items over the
            sequence of swaps. Default: 0.0
        effort (Effort, optional): counts this search and may end it. Default: None

    Returns:
        list[int]: pack of each item, heaviest pack not heavier than before.
    """
    effort = effort or Effort()
    if num_packs == 1 or not loads:
        return packs
    state = _State(loads, owners, packs, num_packs, capacity)
    first = state.place.clone()
    best, best_cost = first, state.total.max().item()
    floor = max(floor, state.total.mean().item(), max(loads))
    if capacity == 2:
        # The heaviest next to the lightest is the best pairing.
        down = state.load.sort(descending=True).values
        floor = max(floor, (down + down.flip(0))[:num_packs].max().item())
    floor *= 1 + _CLOSE_ENOUGH
    for _ in range(_SWAPS_PER_PACK * num_packs):
        heavy = int(state.total.argmax())
        if state.total[heavy].item() <= floor or not effort.left():
            break
        effort.spent += 1
        swap = state.best_swap(heavy)
        if swap is None and capacity <= _PAIR_SEARCH_CAPACITY:
            effort.spent += _PAIR_SEARCH_EFFORT
            swap = state.best_pair_swap(heavy)
        if swap is None:
            break
        state.apply(*swap)
        moved = (state.place != first)[: len(loads)].sum().item() if price else 0
        cost = state.total.max().item() + price * moved
        if cost < best_cost:
            best, best_cost = state.place.clone(), cost
    return best[: len(loads)].tolist()


class _State:
    """Packs during refinement, as tensors.

    Empty places are items at the end: load 0, owner ``empty``.
    """

    def __init__(self, loads, owners, packs, num_packs, capacity) -> None:
        room = [capacity] * num_packs
        for p in packs:
            room[p] -= 1
        places = [p for p, n in enumerate(room) for _ in range(n)]
        self.empty = max(owners) + 1
        self.capacity = capacity
        self.loads = loads + [0.0] * len(places)
        self.owners = owners + [self.empty] * len(places)
        self.load = torch.tensor(self.loads, dtype=torch.float64)
        self.owner = torch.tensor(self.owners)
        self.place = torch.tensor(packs + places)
        self.total = torch.zeros(num_packs, dtype=torch.float64)
        self.total.index_add_(0, self.place, self.load)
        self.holds = torch.zeros(num_packs, self.empty + 1, dtype=torch.bool)
        self.holds[self.place, self.owner] = True
        self.holds[:, self.empty] = False

    def apply(self, mine: list[int], theirs: list[int]) -> None:
        """Exchanges the items ``mine`` of one pack with ``theirs`` of another."""
        here, there = int(self.place[mine[0]]), int(self.place[theirs[0]])
        # Scalars, as an indexed write of a few items costs ten times as much.
        for items, source, target in ((mine, here, there), (theirs, there, here)):
            for i in items:
                load, owner = self.loads[i], self.owners[i]
                self.place[i] = target
                self.total[source] -= load
                self.total[target] += load
                if owner != self.empty:
                    self.holds[source, owner] = False
                    self.holds[target, owner] = True

    def best_swap(self, heavy: int) -> tuple[list[int], list[int]] | None:
        """One item of ``heavy`` and one elsewhere, or None if none helps."""
        mine = (self.place == heavy).nonzero().flatten()
        gain = self.load[mine, None] - self.load
        heavier = torch.maximum(self.total[heavy] - gain, self.total[self.place] + gain)
        # An item must not meet a sibling, neither there nor here.
        illegal = self.holds[:, self.owner[mine]].t()[:, self.place]
        illegal = illegal | (self.holds[heavy, self.owner] | (self.place == heavy))
        heavier.masked_fill_(illegal, float("inf"))
        at = int(heavier.argmin())
        if not heavier.flatten()[at] < self.total[heavy]:
            return None
        return [int(mine[at // len(self.load)])], [at % len(self.load)]

    def best_pair_swap(self, heavy: int) -> tuple[list[int], list[int]] | None:
        """Two items of ``heavy`` and two of another pack, or None."""
        pair = torch.triu_indices(self.capacity, self.capacity, 1)
        items = torch.argsort(self.place, stable=True).view(-1, self.capacity)
        pairs = items[:, pair]  # (packs, 2, pairs)
        load = self.load[pairs].sum(1)  # (packs, pairs)
        gain = load[heavy, :, None, None] - load  # (mine, packs, theirs)
        heavier = torch.maximum(
            self.total[heavy] - gain, self.total[None, :, None] + gain
        )
        mine_there = self.holds[:, self.owner[pairs[heavy]]].any(1)  # (packs, mine)
        theirs_here = self.holds[heavy, self.owner[pairs]].any(1)  # (packs, theirs)
        illegal = mine_there.t()[:, :, None] | theirs_here
        heavier.masked_fill_(illegal, float("inf"))
        heavier[:, heavy] = float("inf")
        at = int(heavier.argmin())
        if not heavier.flatten()[at] < self.total[heavy]:
            return None
        packs, theirs = load.shape
        i, rest = divmod(at, packs * theirs)
        p, j = divmod(rest, theirs)
        return pairs[heavy, :, i].tolist(), pairs[p, :, j].tolist()


# -- plans


def _replicate(loads: list[float], budget: int, limit: int) -> list[int]:
    """Number of replicas per expert: each further one where it lowers most.

    Giving the next replica to the largest load per replica minimises the largest
    load per replica. No expert gets more than ``limit`` (a rank holds it once);
    what cannot be used stays free.
    """
    copies = [1] * len(loads)
    heap = [(-load, e) for e, load in enumerate(loads)]
    heapq.heapify(heap)
    while budget > 0 and heap:
        _, e = heapq.heappop(heap)
        if copies[e] < limit:
            copies[e] += 1
            budget -= 1
            heapq.heappush(heap, (-loads[e] / copies[e], e))
    return copies


# A quarter of the free slots at most: the others are what quotas borrow into.
_FREE_SLOTS_FOR_NODES = 4
# Standard deviations of a node's load that its shared experts must be able to level.
# The heaviest of 8 nodes is expected 1.4 above the mean; some of the nodes it shares
# experts with are above it, too.
_DRIFT_COVER = 3.0


def _node_replicas_for_drift(
    loads: list[float], topology: Topology, drift: float, free_slots: int
) -> int:
    """Node replicas with which nodes can be levelled after loads drifted.

    If expert loads change by independent factors of relative spread ``drift``, that of
    a node changes by ``drift`` times the root of the sum of squares of its experts'
    loads. What a node can hand over without moving weights are its parts of the
    experts that other nodes hold too, on average the load of all shared experts
    over the nodes.
    """
    nodes = topology.num_nodes
    spread = drift * (sum(w * w for w in loads) / nodes) ** 0.5

    def handed_over(num: int) -> float:
        copies = _replicate(loads, num, nodes)
        return sum(w for w, c in zip(loads, copies) if c > 1) / nodes

    most = free_slots // _FREE_SLOTS_FOR_NODES
    return bisect_left(range(most), _DRIFT_COVER * spread, key=handed_over)


def _needed_node_replicas(loads: list[float], num_nodes: int) -> int:
    """Fewest node replicas that leave no part of an expert above a node's share."""
    share = sum(loads) / num_nodes
    return sum(math.ceil(w / share * (1 - 1e-9)) - 1 for w in loads if w > share)


def _items(experts: list[int], loads: list[float], copies: list[int]):
    """One (expert, load) item per replica."""
    owner = [e for e, c in zip(experts, copies) for _ in range(c)]
    load = [w / c for w, c in zip(loads, copies) for _ in range(c)]
    return owner, load


# Effort of packings with another split of the replicas, first packings included; this
# keeps a plan at some 10 ms per layer on one CPU core.
_EFFORT = 44.0
# Heaviest experts that give or take a replica in those trials.
_TRIAL_EXPERTS = 4
# Swaps end here where free slots let quotas level the ranks in every step anyway.
_LEFT_TO_QUOTAS = 1.05
# Trials end here: what is left is below the noise of the counts.
_GOOD_ENOUGH = 1.002


class _Search(NamedTuple):
    """How the replicas of a node are packed onto its ranks."""

    ranks: int
    use_swaps: bool
    floor: float
    effort: Effort


class _Packed(NamedTuple):
    """Experts of a node with their loads and replicas, and those of each rank."""

    heaviest: float
    experts: list[int]
    loads: list[float]
    copies: list[int]
    held: list[list[int]]


def _pack_replicas(
    experts: list[int], loads: list[float], copies: list[int], search: _Search
) -> _Packed:
    """Packs given replicas onto the ranks of a node."""
    owner, load = _items(experts, loads, copies)
    ranks = search.ranks
    # Spread what is placed, so that every rank keeps its share of free slots.
    capacity = -(-len(owner) // ranks)
    search.effort.spent += PACK_EFFORT * len(load) * ranks
    packs = pack(load, owner, ranks, capacity)
    if search.use_swaps:
        packs = refine(
            *(load, owner, packs, ranks, capacity),
            floor=search.floor,
            effort=search.effort,
        )
    held: list[list[int]] = [[] for _ in range(ranks)]
    total = [0.0] * ranks
    for expert, w, rank in zip(owner, load, packs):
        held[rank].append(expert)
        total[rank] += w
    return _Packed(max(total), experts, loads, copies, held)


def _other_replicas(node: _Packed, ranks: int) -> list[list[int]]:
    """Replicas after one or two moves between the heaviest experts, to try in this order.

    Those that leave the smallest largest replica come first. Left out is where a rank
    would hold an expert twice, an expert would be on no rank, or one replica alone is
    as heavy as the heaviest rank now.
    """
    loads = node.loads
    heavy = heapq.nlargest(_TRIAL_EXPERTS, range(len(loads)), key=loads.__getitem__)
    one = [(a, b) for a in heavy for b in heavy if a != b]
    two = [(m, n) for i, m in enumerate(one) for n in one[i:] if m[0] != n[1]]
    found = []
    for moves in [(m,) for m in one] + two:
        copies = list(node.copies)
        for give, take in moves:
            copies[give] -= 1
            copies[take] += 1
        if all(1 <= copies[e] <= ranks for e in heavy):
            largest = max(loads[e] / copies[e] for e in heavy)
            if largest < node.heaviest:
                found.append((largest, copies))
    return [copies for _, copies in sorted(found)]


def _with_other_replicas(node: _Packed, search: _Search) -> list[list[int]]:
    """Experts of each rank after moves of replicas between the heaviest experts.

    The smallest largest replica is not always the best: more replicas above half
    a rank's share than ranks leave two of them on one rank. Therefore a replica
    is moved between two of the heaviest experts while that helps.
    """
    ranks, effort = search.ranks, search.effort
    # Of a trial alone.
    effort.limit -= PACK_EFFORT * sum(node.copies) * ranks
    floor = max(search.floor, sum(node.loads) / ranks)
    others = _other_replicas(node, ranks)
    while others and effort.left() and node.heaviest > floor * _GOOD_ENOUGH:
        trial = _pack_replicas(node.experts, node.loads, others.pop(0), search)
        if trial.heaviest < node.heaviest:
            node = trial
            others = _other_replicas(node, ranks)
    return node.held


def _groups_to_nodes(
    counts: list[float],
    topology: Topology,
    num_groups: int,
    num_node_replicas: int,
    use_swaps: bool,
) -> list[dict[int, float]]:
    """Experts of each node with the part of their load that the node expects."""
    size = len(counts) // num_groups
    group_loads = [sum(counts[g * size : (g + 1) * size]) for g in range(num_groups)]
    copies = [1] * num_groups
    if num_node_replicas:
        copies = _replicate(group_loads, num_node_replicas, topology.num_nodes)
    owner, load = _items(list(range(num_groups)), group_loads, copies)
    capacity = -(-len(owner) // topology.num_nodes)
    packs = pack(load, owner, topology.num_nodes, capacity)
    if use_swaps:
        packs = refine(load, owner, packs, topology.num_nodes, capacity)
    nodes: list[dict[int, float]] = [{} for _ in range(topology.num_nodes)]
    for g, node in zip(owner, packs):
        for e in range(g * size, (g + 1) * size):
            nodes[node][e] = counts[e] / copies[g]
    return nodes


def _nodes_of(previous: Placement, counts: list[float]) -> list[dict[int, float]]:
    """The node step that ``previous`` made, with the loads of today."""
    topology = previous.topology
    holds = previous.rank_holds().view(
        topology.num_nodes, topology.ranks_per_node, previous.num_experts
    )
    on_node = holds.sum(1) > 0
    share = on_node.sum(0).tolist()
    return [
        {e: counts[e] / share[e] for e in row.nonzero().flatten().tolist()}
        for row in on_node
    ]


def _fill_nodes(
    nodes: list[dict[int, float]],
    topology: Topology,
    num_replicas: int,
    use_swaps: bool,
) -> list[list[int]]:
    """Experts held by each rank, given the experts of each node."""
    base, extra = divmod(num_replicas, topology.num_nodes)
    total = sum(len(node) for node in nodes)
    floor = max(sum(node.values()) for node in nodes) / topology.ranks_per_node
    if num_replicas < topology.num_slots:
        floor *= _LEFT_TO_QUOTAS
    search = _Search(topology.ranks_per_node, use_swaps, floor, Effort())
    packed = []
    for n, node in enumerate(nodes):
        # Node replicas come on top: they are why a node has more experts.
        share = base + (1 if n < extra else 0) if num_replicas > total else 0
        loads = list(node.values())
        copies = _replicate(loads, max(0, share - len(node)), search.ranks)
        packed.append(_pack_replicas(list(node), loads, copies, search))
    held = [node.held for node in packed]
    if use_swaps:
        for n in sorted(range(len(nodes)), key=lambda n: -packed[n].heaviest):
            search.effort.limit = _EFFORT
            held[n] = _with_other_replicas(packed[n], search)
    return [rank for node in held for rank in node]


def _swap_in_place(
    previous: Placement, counts: list[float], price: float
) -> list[list[int]]:
    """``previous`` after the swaps inside its nodes that are worth their moves."""
    topology = previous.topology
    copies = previous.rank_holds().sum(0).tolist()
    nodes = _nodes_of(previous, counts)
    floor = max(sum(node.values()) for node in nodes) / topology.ranks_per_node
    held: list[list[int]] = []
    for n in range(topology.num_nodes):
        start = n * topology.ranks_per_node
        rows = previous.slot_experts[start : start + topology.ranks_per_node].tolist()
        owner = [e for row in rows for e in row if e >= 0]
        rank = [r for r, row in enumerate(rows) for e in row if e >= 0]
        load = [counts[e] / copies[e] for e in owner]
        capacity = max(rank.count(r) for r in range(topology.ranks_per_node))
        rank = refine(
            load,
            owner,
            rank,
            topology.ranks_per_node,
            capacity,
            floor=floor,
            price=price,
        )
        node: list[list[int]] = [[] for _ in rows]
        for e, r in zip(owner, rank):
            node[r].append(e)
        held += node
    return held


def _check(
    counts: Tensor,
    topology: Topology,
    num_replicas: int,
    num_groups: int | None,
    num_node_replicas: int,
    drift: float,
    migration_cost: float,
    previous: Placement | None,
) -> None:
    if counts.dim() != 1 or counts.numel() == 0:
        raise ValueError(
            f"plan: counts must have shape (num_experts), got {tuple(counts.shape)}"
        )
    E = counts.numel()
    if counts.dtype.is_complex or not bool((counts >= 0).all()):
        raise ValueError("plan: counts must be real, finite and not negative")
    if not bool(torch.isfinite(counts.double()).all()):
        raise ValueError("plan: counts must be real, finite and not negative")
    most = topology.num_slots
    if not E + num_node_replicas <= num_replicas <= most:
        raise ValueError(
            "plan: num_replicas must be in [num_experts + num_node_replicas, "
            f"num_slots] = [{E + num_node_replicas}, {most}], got {num_replicas}"
        )
    if num_groups is not None:
        nodes = topology.num_nodes
        if num_groups < nodes or num_groups % nodes or E % num_groups:
            raise ValueError(
                f"plan: num_groups must divide the {E} experts and be a multiple of "
                f"the {nodes} nodes, got {num_groups}"
            )
    if num_node_replicas < 0 or (num_node_replicas and num_groups != E):
        raise ValueError(
            "plan: num_node_replicas must be 0 unless num_groups equals the number "
            f"of experts ({E}), got {num_node_replicas} with num_groups={num_groups}"
        )
    if not 0 <= drift < math.inf or (drift and num_groups != E):
        raise ValueError(
            "plan: drift must be finite and not negative, and 0 unless num_groups "
            f"equals the number of experts ({E}), got {drift} with "
            f"num_groups={num_groups}"
        )
    if migration_cost < 0 or (migration_cost and previous is None):
        raise ValueError(
            "plan: migration_cost must not be negative and needs previous, got "
            f"{migration_cost} with previous {'given' if previous else 'None'}"
        )
    if previous is not None and (
        previous.topology != topology or previous.num_experts != E
    ):
        raise ValueError(
            f"plan: previous must be a placement of {E} experts on {topology}, got "
            f"{previous.num_experts} experts on {previous.topology}"
        )


def plan(
    counts: Tensor,
    topology: Topology,
    *,
    num_replicas: int | None = None,
    num_groups: int | None = None,
    num_node_replicas: int | None = None,
    drift: float = 0.0,
    previous: Placement | None = None,
    migration_cost: float = 0.0,
    use_swaps: bool = True,
) -> Placement:
    """Places experts on ranks so that the heaviest rank is as light as possible.

    Args:
        counts (Tensor): (num_experts) load of each expert, any real dtype, for
            example from :class:`~torch.distributed._moe.placement.LoadStats`.
        topology (Topology): the machine.

    Keyword Args:
        num_replicas (int, optional): slots to fill; the others stay free for
            :func:`~torch.distributed._moe.balance.plan_step`. Default: all slots.
        num_groups (int, optional): consecutive experts form this many groups,
            and a group never spans nodes. ``num_experts`` makes every expert its
            own group, which is the node step for online quotas. ``None`` places
            freely over all ranks. Default: None
        num_node_replicas (int, optional): how many times an expert is put on one
            more node, heaviest expert first; needs ``num_groups == num_experts``
            unless 0. They are a part of ``num_replicas``. ``None`` is as many as
            leave no expert heavier than a node's share: such an expert makes its
            node the heaviest whatever happens inside. ``num_replicas`` grows where
            it has no room for them. Default: None
        drift (float): expected relative spread of an expert's load until the next
            plan (standard deviation of its logarithm). As many node replicas as
            level the nodes under it are added to ``num_replicas`` and
            ``num_node_replicas``, at most a quarter of the free slots; needs
            ``num_groups == num_experts``. Default: 0.0
        previous (Placement, optional): placement in use; nodes, ranks and slots
            are then named so that most weights stay. Default: None
        migration_cost (float): price of moving one replica, in the unit of
            ``counts``. The plan with the smallest heaviest-rank load plus
            price of its moves wins, and leaving everything in place is one of
            the plans. Default: 0.0
        use_swaps (bool): refine both packings by swaps. Default: True

    Returns:
        Placement: an expert on at least one rank, at most once on each.
    """
    counts = counts.detach().cpu()
    if num_replicas is None:
        num_replicas = topology.num_slots
    _check(
        counts,
        topology,
        num_replicas,
        num_groups,
        num_node_replicas or 0,
        drift,
        migration_cost,
        previous,
    )
    E = counts.numel()
    loads = counts.double().tolist()
    if num_node_replicas is None:
        num_node_replicas = 0
        if num_groups == E:
            needed = _needed_node_replicas(loads, topology.num_nodes)
            num_node_replicas = min(needed, topology.num_slots - E)
            num_replicas = max(num_replicas, E + num_node_replicas)
    if drift:
        # Free before any node replica.
        free_slots = topology.num_slots - num_replicas + num_node_replicas
        for_drift = _node_replicas_for_drift(loads, topology, drift, free_slots)
        added = max(0, for_drift - num_node_replicas)
        num_node_replicas += added
        num_replicas += added
    free = Topology(1, topology.num_ranks, topology.slots_per_rank)
    if num_groups is None:
        domain, nodes = free, [dict(enumerate(loads))]
    else:
        domain = topology
        nodes = _groups_to_nodes(
            loads, topology, num_groups, num_node_replicas, use_swaps
        )
    held = _fill_nodes(nodes, domain, num_replicas, use_swaps)
    if previous is None:
        return assign_slots(held, topology, E, None)

    if num_groups is None:
        previous = Placement(free, E, previous.slot_experts)
    candidates = [assign_slots(held, domain, E, previous)]
    if migration_cost:
        candidates.append(previous)
        swapped = _swap_in_place(previous, loads, migration_cost)
        candidates.append(assign_slots(swapped, domain, E, previous))
        if num_groups is not None:
            kept = _fill_nodes(
                _nodes_of(previous, loads), domain, num_replicas, use_swaps
            )
            candidates.append(assign_slots(kept, domain, E, previous))
    best = min(
        candidates,
        key=lambda p: (
            p.rank_loads(counts).max().item() + migration_cost * p.moves_from(previous)
        ),
    )
    return Placement(topology, E, best.slot_experts)
