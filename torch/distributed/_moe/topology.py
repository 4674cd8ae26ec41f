"""The shape of a machine, and which rank holds which expert of a MoE layer.

Terms
    slot       room for the weights of one expert on one rank
    replica    one copy of an expert's weights in one slot of one rank
    load       routed token copies of an expert
    imbalance  heaviest rank load / mean rank load; 1 is perfect

What makes a placement is :func:`torch.distributed._moe.placement.plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed._moe._packing import overlap_matching


__all__ = ["assign_slots", "Placement", "Topology"]


@dataclass(frozen=True)
class Topology:
    """The shape of the machine as placement sees it.

    Rank ``r`` is on node ``r // ranks_per_node``.

    Attributes:
        num_nodes (int): nodes; the links inside one are the fast ones.
        ranks_per_node (int): ranks of each node.
        slots_per_rank (int): experts whose weights a rank has room for,
            slots left free for :func:`~torch.distributed._moe.quota.plan_step`
            included.
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
        """Experts in order, ``num_experts / num_ranks`` to a rank, no replicas.

        Args:
            topology (Topology): the machine.
            num_experts (int): number of experts, a multiple of the ranks.

        Returns:
            Placement: where sharding the expert dimension puts them.
        """
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
        flat = self.slot_experts
        holds = torch.zeros(flat.shape[0], self.num_experts + 1, dtype=torch.int64)
        holds.scatter_add_(
            1, torch.where(flat < 0, self.num_experts, flat), torch.ones_like(flat)
        )
        return holds[:, : self.num_experts]

    def rank_loads(self, counts: Tensor) -> Tensor:
        """Load per rank if the replicas of an expert share its load evenly.

        Args:
            counts (Tensor): (num_experts) load of each expert.

        Returns:
            Tensor: (num_ranks) float64.
        """
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

    Args:
        held (list[list[int]]): experts of each rank, at most ``slots_per_rank``.
        topology (Topology): the machine.
        num_experts (int): number of experts.
        previous (Placement, optional): placement in use.
    """
    if previous is not None:
        held = _relabel(held, topology, previous)
    slots = torch.full((topology.num_ranks, topology.slots_per_rank), -1)
    for rank, experts in enumerate(held):
        left = sorted(experts)
        row = [-1] * topology.slots_per_rank
        if previous is not None:
            for slot, e in enumerate(previous.slot_experts[rank].tolist()):
                if e in left:
                    row[slot] = e
                    left.remove(e)
        for slot, e in enumerate(row):
            if e < 0 and left:
                row[slot] = left.pop(0)
        slots[rank] = torch.tensor(row)
    return Placement(topology, num_experts, slots)


def _relabel(
    held: list[list[int]], topology: Topology, previous: Placement
) -> list[list[int]]:
    """Renames nodes, and ranks inside a node, to keep most replicas in place.

    Nodes are alike and so are the ranks of a node, therefore a renaming changes
    no load, only how much moves.
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
