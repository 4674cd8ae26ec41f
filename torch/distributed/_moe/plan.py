"""Plans: which ranks run which experts of a layer, and how many tokens of each.

Terms
    home    the rank that has an expert's parameters: rank ``e // (E/W)``, always
    slot    room for the weights of one expert on one rank; those of its own experts first
    copy    an expert in a slot of another rank, fetched for a forward
    quota   tokens of an expert that a rank computes
    cap     most tokens any rank may get; the smallest feasible one is searched

:func:`plan` makes a plan from the counts of a forward, before its tokens travel, or from average
loads, for all forwards until the next plan. Ranks above the cap export tokens of their experts
to ranks of their node with a free slot, which fetch the weights. A fetch has a price in
tokens; if no plan is worth it, everything runs at home. The function is deterministic:
every rank finds the same plan from the same counts, and nothing else is exchanged.

EPLB packs experts onto ranks anew. Here each expert away from home is
fetched in every forward, and a packing moves nearly all of them, so plans do not.

The search for the smallest cap and the greedy export rule are written from the description of
UltraEP's quota planner; prices and splitting quotas over sources by interval overlap are this
module's own.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


__all__ = ["Plan", "plan", "reroute", "split_by_source", "Topology"]


@dataclass(frozen=True)
class Topology:
    """The shape of the machine for placement.

    Rank ``r`` is on node ``r // ranks_per_node``.

    Attributes:
        num_nodes (int): nodes; the links inside one are the fast ones.
        ranks_per_node (int): ranks of each node.
        slots_per_rank (int): experts that a rank has room for, including copies of others.
    """

    num_nodes: int
    ranks_per_node: int
    slots_per_rank: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"Topology: {name} must be at least 1, got {value}")

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, eq=False)
class Plan:
    """Who runs which expert, for how many tokens.

    Attributes:
        topology (Topology): the machine it was made for.
        slot_experts (Tensor): (num_ranks, slots_per_rank) int64 on CPU, expert of the slot or
            -1 for a free one. Every expert is on some rank, and at most once on a rank.
        quotas (Tensor): (num_experts, num_ranks) int64 on CPU, tokens of an expert that a rank
            computes. Rows sum to the counts of the plan; other counts are split in their ratio.
    """

    topology: Topology
    slot_experts: Tensor
    quotas: Tensor

    def __post_init__(self) -> None:
        ranks, slots = self.topology.num_ranks, self.topology.slots_per_rank
        if tuple(self.slot_experts.shape) != (ranks, slots):
            raise ValueError(
                "Plan: slot_experts must have shape (num_ranks, slots_per_rank) = "
                f"{(ranks, slots)}, got {tuple(self.slot_experts.shape)}"
            )
        for rank, row in enumerate(self.slot_experts.tolist()):
            experts = [e for e in row if e >= 0]
            if len(set(experts)) < len(experts):
                raise ValueError(f"Plan: rank {rank} has an expert twice, got {row}")
        held = self.slots() >= 0
        missing = (~held.any(1)).nonzero().flatten().tolist()
        if missing:
            raise ValueError(f"Plan: experts {missing} are on no rank")
        if bool(((self.quotas > 0) & ~held).any()):
            raise ValueError("Plan: quotas must be of experts that the rank has")

    @staticmethod
    def home(topology: Topology, num_experts: int) -> Plan:
        """The plan that runs each expert where ``Shard(0)`` has its parameters."""
        return Plan.of(topology, _at_home(topology, [1] * num_experts))

    @staticmethod
    def of(topology: Topology, held: list[dict[int, int]]) -> Plan:
        """The plan of the tokens by expert on each rank. Copies follow its own experts, ascending."""
        num_experts = len(set().union(*held))
        quotas = [[0] * len(held) for _ in range(num_experts)]
        each, slots = num_experts // len(held), []
        for rank, row in enumerate(held):
            experts = list(row)
            experts[each:] = sorted(experts[each:])
            slots.append(experts + [-1] * (topology.slots_per_rank - len(row)))
            for expert, tokens in row.items():
                quotas[expert][rank] = tokens
        # On the host, whatever the default device.
        tables = (torch.tensor(rows, device="cpu") for rows in (slots, quotas))
        return Plan(topology, *tables)

    @property
    def num_experts(self) -> int:
        return len(self.quotas)

    def slots(self) -> Tensor:
        """Slot of each expert on each rank, (num_experts, num_ranks) int64, or -1."""
        num_ranks, slots_per_rank = self.slot_experts.shape
        device = self.slot_experts.device
        slots = torch.full((self.num_experts + 1, num_ranks), -1, device=device)
        ranks = torch.arange(num_ranks, device=device)[:, None]
        slots[self.slot_experts, ranks] = torch.arange(slots_per_rank, device=device)
        return slots[:-1]

    def is_inside_nodes(self) -> bool:
        """Whether all copies are on the node of their home."""
        num_ranks, per_node = self.topology.num_ranks, self.topology.ranks_per_node
        ranks = torch.arange(num_ranks, device=self.slot_experts.device)[:, None]
        home = self.slot_experts // (self.num_experts // num_ranks)
        home = torch.where(self.slot_experts < 0, ranks, home)
        return bool((home // per_node == ranks // per_node).all())

    def checksum(self) -> int:
        """Of :attr:`slot_experts`, in [1, 2**31), so that ranks compare their plans by one number."""
        text = str(self.slot_experts.tolist())
        return zlib.crc32(text.encode()) % (2**31 - 1) + 1

    def busiest(self) -> int:
        """Most experts that a rank sends or receives, which others wait for."""
        num_ranks = len(self.slot_experts)
        # Negative of a free slot.
        source = self.slot_experts // (self.num_experts // num_ranks)
        ranks = torch.arange(num_ranks, device=source.device)[:, None]
        away = (source >= 0) & (source != ranks)
        sent, received = source[away].bincount(minlength=num_ranks), away.sum(1)
        return int(torch.maximum(sent, received).max())

    def shares(self) -> Tensor:
        """(num_experts, num_ranks) float64 share of each expert's tokens; even if it has none."""
        held = (self.slots() >= 0).double()
        quotas = self.quotas.double()
        quotas = torch.where(quotas.sum(1, keepdim=True) > 0, quotas, held)
        return quotas / quotas.sum(1, keepdim=True)

    def rank_loads(self, counts: Tensor) -> Tensor:
        """(num_ranks) float64 if the (num_experts) counts are split by the shares."""
        return counts.double().cpu() @ self.shares()

    def cost(self, counts: Tensor, price: float = 0.0) -> float:
        """Heaviest rank load, plus the most fetches of a rank at ``price`` each."""
        fetches = self.busiest() if price else 0
        return self.rank_loads(counts).max().item() + price * fetches

    def imbalance(self, counts: Tensor) -> float:
        """Heaviest rank load over the mean one."""
        loads = self.rank_loads(counts)
        return (loads.max() / loads.mean().clamp_min(1e-300)).item()


def _at_home(topology: Topology, amounts: list[int]) -> list[dict[int, int]]:
    """The ``amounts`` of the experts by their home."""
    each, rest = divmod(len(amounts), topology.num_ranks)
    if rest or each > topology.slots_per_rank:
        raise ValueError(
            f"Plan.home: num_experts must be a multiple of the {topology.num_ranks} "
            "ranks and fill at most slots_per_rank = "
            f"{topology.slots_per_rank} each, got {len(amounts)}"
        )
    starts = range(0, len(amounts), each)
    return [{e: amounts[e] for e in range(start, start + each)} for start in starts]


# The search for the cap ends at this width, relative to the mean load.
_TOLERANCE = 1e-3


def plan(
    counts: Tensor, topology: Topology, *, price: float = 0.0, tries: int = 1
) -> Plan:
    """The plan of least :meth:`Plan.cost` among those tried.

    Args:
        counts (Tensor): (num_experts) token copies of each expert, summed over the ranks; average
            loads are rounded. One transfer if on a device.
        topology (Topology): the machine. Weights stay in a node.

    Keyword Args:
        price (float): of a fetch, in token copies. All ranks wait for the rank with the most
            fetches, sent or received. Default: 0.0
        tries (int): plans to compare. Each makes a copy for half as many tokens
            as the one before. Default: 1

    Returns:
        Plan: everything at home, unless another plan costs less.
    """
    if counts.dim() != 1 or counts.is_complex():
        raise ValueError(
            f"plan: counts must be real, of shape (num_experts), got {counts.dtype} of "
            f"shape {tuple(counts.shape)}"
        )
    if not bool(((counts >= 0) & (counts < math.inf)).all()):
        raise ValueError(f"plan: counts must be finite, not negative, got {counts}")
    if not 0 <= price < math.inf:
        raise ValueError(f"plan: price must be finite and not negative, got {price}")
    amounts = counts.detach().round().long().tolist()
    start = _at_home(topology, amounts)
    best, cost = None, float(max(sum(row.values()) for row in start))
    if cost <= sum(amounts) / topology.num_ranks + price:
        tries = 0  # Perfect balance would save less than the price of one fetch.
    least = max(1, math.ceil(price))
    for n in reversed(range(tries)):
        found = Plan.of(topology, _borrow(start, topology, least * 2**n))
        heaviest = int(found.quotas.sum(0).max())
        new = heaviest + price * found.busiest()
        if new < cost:
            best, cost = found, new
    return Plan.of(topology, start) if best is None else best


def _borrow(
    start: list[dict[int, int]], topology: Topology, min_tokens: int
) -> list[dict[int, int]]:
    """Tokens by expert on each rank after borrowing, heaviest rank as light as found.

    Nodes are independent. The node with the heaviest rank is searched first;
    another node is searched only if it exceeds the cap of that one.

    Args:
        start (list[dict[int, int]]): tokens at home, by rank and expert.
        min_tokens (int): fewest to borrow an expert for.
    """
    held, per_node = list(start), topology.ranks_per_node
    free = topology.slots_per_rank - len(start[0])
    loads = [sum(row.values()) for row in start]
    width = max(1, int(_TOLERANCE * sum(loads) / len(loads)))
    nodes = [slice(f, f + per_node) for f in range(0, len(held), per_node)]
    nodes.sort(key=lambda node: -max(loads[node]))
    reached = 0
    for node in nodes:
        low = max(reached, -(-sum(loads[node]) // per_node))
        found, high = None, max(loads[node])
        while free and high - low >= (width if found else 1):
            cap = (low + high) // 2
            new = _export(start[node], free, cap, min_tokens)
            if new is None:
                low = cap + 1
            else:
                found, high = new, cap
        held[node] = found or start[node]
        reached = max(reached, high)
    return held


def _export(
    start: list[dict[int, int]], free_slots: int, cap: int, min_tokens: int
) -> list[dict[int, int]] | None:
    """Tokens per rank and expert of a node with no rank above ``cap``, or None.

    Greedy: the heaviest rank gives from its heaviest expert, to a rank that holds the expert or can
    borrow it. That is the rank with the least room that suffices, else the one with the most room.
    Few ranks should stay half full, as room is lost once the slots are used up.
    """
    held = [dict(row) for row in start]
    free = [free_slots] * len(held)
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
                fitting = [r for r in hosts if room[r] >= amount]
                if fitting:
                    target = min(fitting, key=room.__getitem__)
                else:
                    target = max(hosts, key=room.__getitem__)
                amount = min(amount, room[target])
                if e not in held[target]:
                    free[target] -= 1
                held[target][e] = held[target].get(e, 0) + amount
                held[source][e] -= amount
                room[target] -= amount
                if not room[target]:
                    roomy.remove(target)
                room[source] += amount
                tokens -= amount
        if room[source] < 0:
            return None
        if room[source] > 0:  # gave more than needed, because of min_tokens
            roomy.append(source)
    return held


def split_by_source(source_counts: Tensor, quotas: Tensor, rank: int) -> Tensor:
    """Splits the quotas over the ranks that the tokens come from, for those of one rank.

    A rank computes its own tokens first, which need no transfer. The remaining tokens of
    an expert divide one line by source and by host; a
    source sends to a host the overlap of their intervals. Both sums are exact
    by construction, and most sources send to few hosts.

    Args:
        source_counts (Tensor): (num_ranks, num_experts) int64, token copies that
            each rank's router produced.
        quotas (Tensor): (num_experts, num_ranks) int64 of a :class:`Plan`, for
            the same total per expert.
        rank (int): whose tokens.

    Returns:
        Tensor: (num_experts, num_ranks) int64, its copies of an expert's tokens to each rank.
    """
    sources, num_experts = source_counts.shape
    if tuple(quotas.shape) != (num_experts, sources):
        raise ValueError(
            "split_by_source: quotas must have shape (num_experts, num_ranks) = "
            f"{(num_experts, sources)}, got {tuple(quotas.shape)}"
        )
    own = torch.minimum(source_counts, quotas.t())
    sent = (source_counts - own).t()  # (experts, sources)
    taken = quotas - own.t()  # (experts, hosts)
    source_end, host_end = sent.cumsum(1)[:, rank, None], taken.cumsum(1)
    source_begin = source_end - sent[:, rank, None]
    begin = torch.maximum(source_begin, host_end - taken)
    split = (torch.minimum(source_end, host_end) - begin).clamp_min_(0)
    split[:, rank] += own[rank]
    return split


def reroute(
    topk_indices: Tensor, split: Tensor, slots: Tensor, slots_per_rank: int
) -> Tensor:
    """Turns expert ids into ids of physical slots, following the quotas.

    The n-th copy (in token order) of an expert's tokens goes to the host in whose
    share of ``split`` n falls. The result is what a token switch with
    ``num_experts`` = the slots of all ranks dispatches. Nothing is read on the host.

    Args:
        topk_indices (Tensor): (T, K) integer expert ids of this rank's tokens; -1
            and ``num_experts`` mean no expert.
        split (Tensor): (num_experts, num_ranks) int64, this rank's row of
            :func:`split_by_source`.
        slots (Tensor): (num_experts, num_ranks) of :meth:`Plan.slots`.
        slots_per_rank (int): slots of each rank.

    Returns:
        Tensor: (T, K) int64 of ``rank * slots_per_rank + slot``, -1 for no expert.
    """
    num_experts, num_ranks = split.shape
    # Position of each copy if copies are sorted by expert, then by token.
    _, place, _, _ = torch._moe_permutation(topk_indices, num_experts)
    first = torch.arange(num_ranks, device=split.device) * slots_per_rank
    slots = (slots + first).flatten()
    size = topk_indices.numel()
    # Shares of an expert are consecutive; copies without an expert come last.
    shares = split.flatten()
    shares = torch.cat([shares, size - shares.sum(0, keepdim=True)])
    slots = F.pad(slots, (0, 1), value=-1)
    slot_at = torch.repeat_interleave(slots, shares, output_size=size)
    return slot_at[place.long()].masked_fill(place < 0, -1) if size else place.long()
