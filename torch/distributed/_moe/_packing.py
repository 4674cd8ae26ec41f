"""Packing of weighted items into equal packs, for :mod:`.placement`.

An item has a load and an owner (the expert or group it is a replica of); two
items of one owner never share a pack. A pack has ``capacity`` places.
"""

from __future__ import annotations

import math

import torch


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


def overlap_matching(new: list[set[int]], old: list[set[int]]) -> list[int]:
    """Old name for each new set, most common members first.

    Args:
        new (list[set[int]]): sets to name.
        old (list[set[int]]): as many sets that have the names.

    Returns:
        list[int]: a permutation; index into ``old`` for each new set.
    """
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
