"""Which rank holds which expert of a MoE layer, planned every few hundred steps.

Terms
    slot       room for the weights of one expert on one rank
    replica    one copy of an expert's weights in one slot of one rank
    group      experts that must stay on one node (group-limited routing)
    load       routed token copies of an expert
    imbalance  heaviest rank load / mean rank load; 1 is perfect

:func:`plan` works on averaged loads and may put weights on any rank. What replicas share
in one step is :mod:`torch.distributed._moe.quota`, how weights get where a plan wants them
:mod:`torch.distributed._moe.fetch`.

The three steps (groups to nodes, replicas inside a node, replicas to ranks) and both
greedy rules follow the policy that DeepSeek's EPLB describes; the swaps, no expert twice
on a rank, free slots for quotas, experts on several nodes and migration price are our own.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


__all__ = ["Placement", "plan", "Topology"]


@dataclass(frozen=True)
class Topology:
    """The shape of the machine as placement sees it.

    Rank ``r`` is on node ``r // ranks_per_node``.

    Attributes:
        num_nodes (int): nodes; the links inside one are the fast ones.
        ranks_per_node (int): ranks of each node.
        slots_per_rank (int): experts whose weights a rank has room for, slots left free
            for :func:`~torch.distributed._moe.quota.plan_step` included.
    """

    num_nodes: int
    ranks_per_node: int
    slots_per_rank: int

    def __post_init__(self) -> None:
        for name in ("num_nodes", "ranks_per_node", "slots_per_rank"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"Topology: {name} must be at least 1, got {getattr(self, name)}"
                )

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def num_slots(self) -> int:
        return self.num_ranks * self.slots_per_rank


@dataclass(frozen=True, eq=False)
class Placement:
    """Expert of every slot of every rank.

    Attributes:
        topology (Topology): the machine it was made for.
        num_experts (int): number E of experts.
        slot_experts (Tensor): (num_ranks, slots_per_rank) int64 on CPU, expert
            of the slot or -1 for a free slot. Every expert is somewhere, and a
            rank holds an expert at most once.
    """

    topology: Topology
    num_experts: int
    slot_experts: Tensor

    def __post_init__(self) -> None:
        shape = (self.topology.num_ranks, self.topology.slots_per_rank)
        if tuple(self.slot_experts.shape) != shape:
            raise ValueError(
                "Placement: slot_experts must have shape (num_ranks, slots_per_rank) "
                f"= {shape}, got {tuple(self.slot_experts.shape)}"
            )
        holds = self.rank_holds()
        if (holds > 1).any():
            rank, expert = (holds > 1).nonzero()[0].tolist()
            raise ValueError(f"Placement: rank {rank} holds expert {expert} twice")
        missing = (holds.sum(0) == 0).nonzero().flatten().tolist()
        if missing:
            raise ValueError(f"Placement: experts {missing} are on no rank")

    @staticmethod
    def contiguous(topology: Topology, num_experts: int) -> Placement:
        """Where sharding the expert dimension puts them: in order, no replicas."""
        home, rest = divmod(num_experts, topology.num_ranks)
        if rest or home > topology.slots_per_rank:
            raise ValueError(
                "Placement.contiguous: num_experts must be a multiple of the "
                f"{topology.num_ranks} ranks and fill at most slots_per_rank = "
                f"{topology.slots_per_rank} each, got {num_experts}"
            )
        slots = torch.full((topology.num_ranks, topology.slots_per_rank), -1)
        slots[:, :home] = torch.arange(num_experts).view(topology.num_ranks, home)
        return Placement(topology, num_experts, slots)

    def rank_holds(self) -> Tensor:
        """Replicas of each expert per rank, (num_ranks, num_experts) int64."""
        # Free slots count for one expert more, which is cut off.
        slots = self.slot_experts
        experts = torch.where(slots < 0, self.num_experts, slots)
        holds = experts.new_zeros(experts.shape[0], self.num_experts + 1)
        holds.scatter_add_(1, experts, torch.ones_like(experts))
        return holds[:, : self.num_experts]

    def rank_loads(self, counts: Tensor) -> Tensor:
        """(num_ranks) float64 if the replicas share the (num_experts) loads evenly."""
        holds = self.rank_holds().double()
        return holds @ (counts.double().cpu() / holds.sum(0))

    def imbalance(self, counts: Tensor) -> float:
        """Heaviest rank load over the mean one, replicas sharing evenly."""
        loads = self.rank_loads(counts)
        return (loads.max() / loads.mean().clamp_min(1e-300)).item()

    def moves_from(self, previous: Placement) -> int:
        """Replicas that a rank must receive when ``previous`` becomes ``self``."""
        return int((self.rank_holds() > previous.rank_holds()).sum())


def assign_slots(
    held: list[list[int]],
    topology: Topology,
    num_experts: int,
    previous: Placement | None,
) -> Placement:
    """Placement of the experts that each rank is to hold.

    With ``previous``, nodes, and ranks inside a node, are renamed so that most replicas
    stay, and a replica that stays keeps its slot.
    """
    if previous is not None:
        held = _relabel(held, topology, previous)
    slots = torch.full((topology.num_ranks, topology.slots_per_rank), -1)
    for rank, experts in enumerate(held):
        row = [-1] * topology.slots_per_rank
        if previous is not None:
            row = previous.slot_experts[rank].tolist()
            row = [e if e in experts else -1 for e in row]
        left = iter(sorted(set(experts) - set(row)))
        slots[rank] = torch.tensor([next(left, -1) if e < 0 else e for e in row])
    return Placement(topology, num_experts, slots)


def _relabel(
    held: list[list[int]], topology: Topology, previous: Placement
) -> list[list[int]]:
    """Renames nodes, and ranks inside a node, to keep most replicas in place.

    They are alike, therefore a renaming changes no load, only how much moves.
    """
    per_node = topology.ranks_per_node
    old = [set(row) - {-1} for row in previous.slot_experts.tolist()]
    starts = range(0, topology.num_ranks, per_node)
    new_nodes = [set().union(*held[s : s + per_node]) for s in starts]
    old_nodes = [set().union(*old[s : s + per_node]) for s in starts]
    result: list[list[int]] = [[] for _ in held]
    for new, kept in enumerate(overlap_matching(new_nodes, old_nodes)):
        source = held[new * per_node : (new + 1) * per_node]
        target = old[kept * per_node : (kept + 1) * per_node]
        ranks = overlap_matching([set(s) for s in source], target)
        for experts, rank in zip(source, ranks):
            result[kept * per_node + rank] = experts
    return result


def overlap_matching(new: list[set[int]], old: list[set[int]]) -> list[int]:
    """Index into ``old`` for each set of ``new``, most common members first."""
    pairs = sorted(
        ((-len(a & b), i, j) for i, a in enumerate(new) for j, b in enumerate(old))
    )
    name = [-1] * len(new)
    taken: set[int] = set()
    for _, i, j in pairs:
        if name[i] < 0 and j not in taken:
            name[i] = j
            taken.add(j)
    return name


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


@dataclass
class Effort:
    """What a search has cost and may cost, in swaps of about 0.1 ms on a CPU core.

    Counted, not timed, so that all ranks find the same plan.
    """

    spent: float = 0.0
    limit: float = math.inf

    def left(self) -> bool:
        return self.spent < self.limit


# Beside a swap: a search for two against two, and, per item and pack, a packing.
_PAIR_SEARCH_EFFORT = 2.0
_PACK_EFFORT = 1e-3


def pack(
    loads: list[float], owners: list[int], num_packs: int, capacity: int
) -> list[int]:
    """Pack of each item: heaviest first, on the lightest pack that may take it."""
    total = [0.0] * num_packs
    members: list[list[int]] = [[] for _ in range(num_packs)]
    held: list[set[int]] = [set() for _ in range(num_packs)]
    # Stable in the index, so that equal loads always give the same plan.
    for item in sorted(range(len(loads)), key=lambda i: -loads[i]):
        open_packs = [p for p in range(num_packs) if len(members[p]) < capacity]
        allowed = [p for p in open_packs if owners[item] not in held[p]]
        if allowed:
            placed = [(item, min(allowed, key=lambda p: total[p]))]
        else:
            target = _make_room(item, open_packs[0], loads, owners, members, held)
            other = members[target].pop()
            held[target].remove(owners[other])
            total[target] -= loads[other]
            placed = [(other, open_packs[0]), (item, target)]
        for i, p in placed:
            members[p].append(i)
            held[p].add(owners[i])
            total[p] += loads[i]
    pack_of = {item: p for p, items in enumerate(members) for item in items}
    return [pack_of[item] for item in range(len(loads))]


def _make_room(item, open_pack, loads, owners, members, held) -> int:
    """Pack whose last member can go to ``open_pack`` so that ``item`` fits.

    Only packs that hold the owner of ``item`` still have room. One without it exists, as an
    owner has at most as many items as there are packs, and it has a member that
    ``open_pack`` lacks, as it has more members.
    """
    best, best_gap = -1, float("inf")
    for p, items in enumerate(members):
        if owners[item] in held[p]:
            continue
        movable = [i for i in items if owners[i] not in held[open_pack]]
        if not movable:
            continue
        nearest = min(movable, key=lambda i: abs(loads[i] - loads[item]))
        gap = abs(loads[nearest] - loads[item])
        if gap < best_gap:
            best, best_gap = p, gap
            items.remove(nearest)
            items.append(nearest)
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

    An empty place is an item without load, so that a swap can be a move. The swap with the
    lightest heavier side is taken; where none helps, two items against two are tried.

    Args:
        packs (list[int]): pack of each item to begin with.
        floor (float): a heaviest pack of this load is good enough.
        price (float): of a moved item, in the unit of the loads; heaviest pack plus
            price times moved items is least over the sequence of swaps.
        effort (Effort, optional): counts this search and may end it.

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
        there = self.total[None, :, None]
        heavier = torch.maximum(self.total[heavy] - gain, there + gain)
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
    """Replicas of each expert: the next one goes to the largest load per replica.

    No expert gets more than ``limit`` (a rank holds it once); others stay free.
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
# Standard deviations of a node's load that its shared experts must be able to level: the
# heaviest of 8 nodes is expected 1.4 above the mean, as are some that it shares with.
_DRIFT_COVER = 3.0


def _node_replicas_for_drift(
    loads: list[float], topology: Topology, drift: float, free_slots: int
) -> int:
    """Node replicas with which nodes can be levelled after loads drifted.

    If expert loads change by independent factors of relative spread ``drift``, that of
    a node changes by ``drift`` times the root of the sum of squares of its experts'
    loads. A node can hand over its parts of the experts that other nodes hold too,
    on average the load of all shared experts over the nodes.
    """
    nodes = topology.num_nodes
    spread = drift * (sum(w * w for w in loads) / nodes) ** 0.5

    def handed_over(num: int) -> float:
        copies = _replicate(loads, num, nodes)
        return sum(w for w, c in zip(loads, copies) if c > 1) / nodes

    most = free_slots // _FREE_SLOTS_FOR_NODES
    return bisect_left(range(most), _DRIFT_COVER * spread, key=handed_over)


def _needed_node_replicas(loads: list[float], num_nodes: int) -> int:
    """Fewest that leave no part of an expert above a node's share."""
    share = sum(loads) / num_nodes
    return sum(math.ceil(w / share * (1 - 1e-9)) - 1 for w in loads if w > share)


def _items(experts: list[int], loads: list[float], copies: list[int]):
    """One (expert, load) item per replica."""
    owner = [e for e, c in zip(experts, copies) for _ in range(c)]
    return owner, [w / c for w, c in zip(loads, copies) for _ in range(c)]


# Of packings with other replicas, first packings included: 10 ms a layer on one CPU core.
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
    search.effort.spent += _PACK_EFFORT * len(load) * ranks
    packs = pack(load, owner, ranks, capacity)
    if search.use_swaps:
        limits = {"floor": search.floor, "effort": search.effort}
        packs = refine(load, owner, packs, ranks, capacity, **limits)
    held: list[list[int]] = [[] for _ in range(ranks)]
    total = [0.0] * ranks
    for expert, w, rank in zip(owner, load, packs):
        held[rank].append(expert)
        total[rank] += w
    return _Packed(max(total), experts, loads, copies, held)


def _other_replicas(node: _Packed, ranks: int) -> list[list[int]]:
    """Replicas after one or two moves between the heaviest experts, to try in this order.

    The smallest largest replica comes first. Left out is where a rank would hold an expert
    twice, an expert would be on no rank, or one replica is as heavy as the heaviest rank.
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
    a rank's share than ranks leave two of them on one rank.
    """
    ranks, effort = search.ranks, search.effort
    # Of a trial alone.
    effort.limit -= _PACK_EFFORT * sum(node.copies) * ranks
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
        packs = (rank, topology.ranks_per_node, capacity)
        rank = refine(load, owner, *packs, floor=floor, price=price)
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
    if counts.is_complex() or not ((counts >= 0) & torch.isfinite(counts)).all():
        raise ValueError("plan: counts must be real, finite and not negative")
    least, most, nodes = E + num_node_replicas, topology.num_slots, topology.num_nodes
    if not least <= num_replicas <= most:
        raise ValueError(
            "plan: num_replicas must be in [num_experts + num_node_replicas, "
            f"num_slots] = [{least}, {most}], got {num_replicas}"
        )
    if num_groups is not None:
        if num_groups < nodes or num_groups % nodes or E % num_groups:
            raise ValueError(
                f"plan: num_groups must divide the {E} experts and be a multiple of "
                f"the {nodes} nodes, got {num_groups}"
            )
    for name, value in (("num_node_replicas", num_node_replicas), ("drift", drift)):
        if not 0 <= value < math.inf or (value and num_groups != E):
            raise ValueError(
                f"plan: {name} must be finite and not negative, and 0 unless num_groups "
                f"equals the number of experts ({E}), got {value} with "
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
            example from :class:`~torch.distributed.tensor.parallel._expert_placement.LoadStats`.
        topology (Topology): the machine.

    Keyword Args:
        num_replicas (int, optional): slots to fill; the others stay free for
            :func:`~torch.distributed._moe.quota.plan_step`. Default: all slots
        num_groups (int, optional): consecutive experts form this many groups,
            and a group never spans nodes. ``num_experts`` makes every expert its
            own group, which is the node step for online quotas. ``None`` places
            freely over all ranks. Default: None
        num_node_replicas (int, optional): how many times an expert is put on one
            more node, heaviest expert first; needs ``num_groups == num_experts``
            unless 0. They are a part of ``num_replicas``, which grows where it has no room
            for them. Default: None (as many as leave no expert heavier than a node's share)
        drift (float): expected relative spread of an expert's load until the next
            plan (standard deviation of its logarithm). As many node replicas as
            level the nodes under it are added to ``num_replicas`` and
            ``num_node_replicas``, at most a quarter of the free slots; needs
            ``num_groups == num_experts``. Default: 0.0
        previous (Placement, optional): placement in use; nodes, ranks and slots
            are then named so that most weights stay. Default: None
        migration_cost (float): price of moving one replica, in the unit of ``counts``.
            The smallest heaviest-rank load plus price of moves wins, and leaving
            everything in place is one of the plans. Default: 0.0
        use_swaps (bool): refine both packings by swaps. Default: True

    Returns:
        Placement: every expert on a rank, at most once on each.
    """
    counts = counts.detach().cpu()
    if num_replicas is None:
        num_replicas = topology.num_slots
    shape = (num_replicas, num_groups, num_node_replicas or 0)
    _check(counts, topology, *shape, drift, migration_cost, previous)
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
        groups = (num_groups, num_node_replicas)
        nodes = _groups_to_nodes(loads, topology, *groups, use_swaps)
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
            nodes = _nodes_of(previous, loads)
            kept = _fill_nodes(nodes, domain, num_replicas, use_swaps)
            candidates.append(assign_slots(kept, domain, E, previous))

    def cost(p: Placement) -> float:
        return p.rank_loads(counts).max().item() + migration_cost * p.moves_from(
            previous
        )

    best = min(candidates, key=cost)
    return Placement(topology, E, best.slot_experts)
