"""Which rank holds which expert of a MoE layer, and how weights get there.

Terms
    slot       room for the weights of one expert on one rank
    replica    one copy of an expert's weights in one slot of one rank
    load       routed token copies of an expert
    imbalance  heaviest rank load / mean rank load; 1 is perfect

What makes a placement is :func:`torch.distributed._moe.planner.plan`; :func:`migrate`
moves weights and optimizer state from one to another without a file, and
:func:`sum_replica_gradients` keeps replicas equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor


if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = [
    "assign_slots",
    "lent",
    "LoadStats",
    "migrate",
    "Placement",
    "send_rows",
    "sum_replica_gradients",
    "Topology",
]


@dataclass(frozen=True)
class Topology:
    """The shape of the machine as placement sees it.

    Rank ``r`` is on node ``r // ranks_per_node``.

    Attributes:
        num_nodes (int): nodes; the links inside one are the fast ones.
        ranks_per_node (int): ranks of each node.
        slots_per_rank (int): experts whose weights a rank has room for,
            slots left free for :func:`~torch.distributed._moe.balance.plan_step`
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


# -- moving weights


def _moves(
    previous: Placement, placement: Placement
) -> list[tuple[int, int, int, int]]:
    """(source rank, source slot, target rank, target slot) of every filled slot.

    A replica that a rank already had is taken from there, others from the rank
    that has sent least, of the same node if one holds the expert. Every rank
    computes the same list.
    """
    topology = placement.topology
    old: dict[int, list[tuple[int, int]]] = {}
    for rank, row in enumerate(previous.slot_experts.tolist()):
        for slot, e in enumerate(row):
            if e >= 0:
                old.setdefault(e, []).append((rank, slot))
    sent = [0] * topology.num_ranks
    moves = []
    for target, row in enumerate(placement.slot_experts.tolist()):
        node = target // topology.ranks_per_node
        for slot, e in enumerate(row):
            if e < 0:
                continue
            source, source_slot = min(
                old[e],
                key=lambda at: (
                    at[0] != target,
                    at[0] // topology.ranks_per_node != node,
                    sent[at[0]],
                    at[0],
                ),
            )
            sent[source] += source != target
            moves.append((source, source_slot, target, slot))
    return moves


def lent(
    placement: Placement, slot_experts: Tensor, rank: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What ``rank`` sends and receives to have ``slot_experts`` for a step.

    Returns:
        (target rank, slot) and (source rank, slot), for :func:`send_rows`.
    """
    step = Placement(placement.topology, placement.num_experts, slot_experts)
    return _out_and_in(_moves(placement, step), rank)


def _out_and_in(
    moves: list[tuple[int, int, int, int]], rank: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(other rank, slot here) in the order of the other side's list."""
    out = [(m[2], m[1]) for m in moves if m[0] == rank and m[2] != rank]
    into = [(m[0], m[3]) for m in moves if m[2] == rank and m[0] != rank]
    return sorted(out, key=lambda x: x[0]), sorted(into, key=lambda x: x[0])


def _move_rows(
    tensor: Tensor,
    moves: list[tuple[int, int, int, int]],
    rank: int,
    group: ProcessGroup | None,
) -> None:
    """Applies ``moves`` to the slots (first dimension) of one local tensor."""
    out, into = _out_and_in(moves, rank)
    received = send_rows(tensor, out, into, group)
    stay = [(m[1], m[3]) for m in moves if m[0] == m[2] == rank and m[1] != m[3]]
    kept = tensor[[source for source, _ in stay]]
    tensor[[target for _, target in stay]] = kept
    tensor[[slot for _, slot in into]] = received


def send_rows(
    tensor: Tensor,
    out: list[tuple[int, int]],
    into: list[tuple[int, int]],
    group: ProcessGroup | None,
) -> Tensor:
    """Sends slots to ranks.

    Args:
        tensor (Tensor): its rows are sent.
        out (list): (target rank, slot) of each row to send, by rank.
        into (list): (source rank, any) of each row to receive, by rank.

    Returns:
        Tensor: the received rows, in the order of ``into``.
    """
    num_ranks = dist.get_world_size(group)
    # Bytes, because not every backend knows every dtype.
    width = tensor[0].numel()
    rows = tensor[[slot for _, slot in out]].reshape(len(out), width)
    rows = rows.view(torch.uint8)
    received = rows.new_empty(len(into), rows.shape[1])
    dist.all_to_all_single(
        received,
        rows,
        [sum(r == other for r, _ in into) for other in range(num_ranks)],
        [sum(r == other for r, _ in out) for other in range(num_ranks)],
        group=group,
    )
    return received.view(tensor.dtype).view(len(into), *tensor.shape[1:])


@torch.no_grad()
def migrate(
    params: Iterable[Tensor],
    previous: Placement,
    placement: Placement,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    group: ProcessGroup | None = None,
) -> int:
    """Moves what each slot holds from one placement to another, in place.

    The values are copied as bytes: after the move every replica has exactly the
    weights and state it had on the rank that sent it. Free slots keep whatever
    they held. Collective over ``group``; the data of one tensor at a time is in
    flight, only the rows that change rank.

    Args:
        params (iterable of Tensor): parameters of this rank whose first dimension
            is ``slots_per_rank``; a :class:`DTensor` is changed in its local part.
        previous (Placement): where the experts are.
        placement (Placement): where they shall be.

    Keyword Args:
        optimizer (Optimizer, optional): its state of these parameters moves too:
            every tensor whose first dimension is that of the parameter, such as moments
            or factored ones. Single values are left, as all experts share them.
            Default: None
        group (ProcessGroup, optional): as many ranks as the placements have.
            Default: the default group

    Returns:
        int: replicas that changed rank, summed over the ranks.

    Raises:
        ValueError: the placements do not fit each other, the group or ``params``, or the
            optimizer has state that can't be told apart by expert; nothing has moved.
    """
    if previous.topology != placement.topology or (
        previous.num_experts != placement.num_experts
    ):
        raise ValueError(
            "migrate: both placements must be of one topology and number of experts, "
            f"got {previous.num_experts} experts on {previous.topology} and "
            f"{placement.num_experts} on {placement.topology}"
        )
    _check_group("migrate", placement, group)
    moves = _moves(previous, placement)
    rank = dist.get_rank(group)
    tensors = []
    for param in params:
        tensors.append(_slots("migrate", param, placement))
        if optimizer is not None:
            tensors += _state_by_slot(optimizer, param, placement)
    for tensor in tensors:
        _move_rows(tensor, moves, rank, group)
    return sum(m[0] != m[2] for m in moves)


def _state_by_slot(
    optimizer: torch.optim.Optimizer, param: Tensor, placement: Placement
) -> list[Tensor]:
    """Optimizer state of ``param`` that belongs to its slots."""
    tensors: list[Tensor] = []
    state: dict[str, Any] = optimizer.state.get(param, {})
    for name, value in state.items():
        if isinstance(value, Tensor):
            if value.dim() and value.shape[0] == param.shape[0]:
                tensors.append(_slots("migrate", value, placement))
                continue
            if value.numel() <= 1:
                continue
            got = f"shape {tuple(value.shape)}"
        elif value is None or isinstance(value, (bool, int, float, str)):
            continue
        else:
            got = type(value).__name__
        raise ValueError(
            f"migrate: state {name!r} of {type(optimizer).__name__} must be a single "
            f"value, or have the {param.shape[0]} slots of its parameter of shape "
            f"{tuple(param.shape)} in its first dimension to move with them, got {got}"
        )
    return tensors


def _check_group(name: str, placement: Placement, group: ProcessGroup | None) -> None:
    num_ranks = dist.get_world_size(group)
    if num_ranks != placement.topology.num_ranks:
        raise ValueError(
            f"{name}: the placement is for {placement.topology.num_ranks} ranks, "
            f"group has {num_ranks}"
        )


def _slots(name: str, tensor: Tensor, placement: Placement) -> Tensor:
    """The local part, whose first dimension is slots."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    slots = placement.topology.slots_per_rank
    if local.dim() == 0 or local.shape[0] != slots:
        raise ValueError(
            f"{name}: params must have {slots} slots in their first "
            f"dimension, got shape {tuple(local.shape)}"
        )
    return local


@torch.no_grad()
def sum_replica_gradients(
    params: Iterable[Tensor],
    placement: Placement,
    *,
    group: ProcessGroup | None = None,
) -> None:
    """Gives all replicas of an expert the sum of their gradients, in place.

    Without it replicas would drift apart, as each only sees its share of the tokens. The
    rank that holds the expert first adds the gradients in the order of ranks, in
    fp32, and sends the sum back: all replicas have the same bits. Collective over
    ``group``; call it between backward and the optimizer's step.

    An expert that was borrowed for one step is a replica of ``Placement(topology,
    num_experts, step_plan.slot_experts)``; :func:`migrate` to that placement is
    what fetches its weights.

    Args:
        params (iterable of Tensor): parameters of this rank whose first dimension is
            ``slots_per_rank``; one without a gradient counts as zero and gets one.
        placement (Placement): where the replicas are.

    Keyword Args:
        group (ProcessGroup, optional): as many ranks as the placement has. Default:
            the default group
    """
    _check_group("sum_replica_gradients", placement, group)
    rank = dist.get_rank(group)
    holders: dict[int, list[tuple[int, int]]] = {}
    for holder, row in enumerate(placement.slot_experts.tolist()):
        for slot, e in enumerate(row):
            if e >= 0:
                holders.setdefault(e, []).append((holder, slot))
    # (other rank, slot here), by rank and then expert on both sides.
    to_first: list[tuple[int, int]] = []
    to_others: list[tuple[int, int]] = []
    for _, (first, *others) in sorted(holders.items()):
        for other in others:
            if other[0] == rank:
                to_first.append((first[0], other[1]))
            if first[0] == rank:
                to_others.append((other[0], first[1]))
    to_first.sort(key=lambda x: x[0])
    to_others.sort(key=lambda x: x[0])
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        grad = _slots("sum_replica_gradients", param.grad, placement)
        received = send_rows(grad, to_first, to_others, group)
        wide = torch.promote_types(grad.dtype, torch.float32)
        totals = {slot: grad[slot].to(wide) for _, slot in to_others}
        for (_, slot), row in zip(to_others, received):
            totals[slot] += row
        for slot, total in totals.items():
            grad[slot] = total.to(grad.dtype)
        summed = send_rows(grad, to_others, to_first, group)
        grad[[slot for _, slot in to_first]] = summed


# -- loads


class LoadStats:
    """Exponential average of token copies per layer and expert over all ranks.

    :meth:`record` adds the router's counts on their device. :meth:`start` begins
    one asynchronous sum over ranks, :meth:`result` takes it in a later step, when
    it has long arrived. Neither reads a value on the host, except ``result``.

    What a backward records is not counted: activation checkpointing runs a layer again
    there.

    Args:
        num_layers (int): number of MoE layers.
        num_experts (int): number of experts of each.

    Keyword Args:
        group (ProcessGroup, optional): ranks to sum over. Default: the default
            group
        decay (float): weight of the past in the average, in [0, 1). Default: 0.9
        device (torch.device, optional): device of the counts. Default: cpu

    Example::
        >>> # xdoctest: +SKIP("needs a process group")
        >>> stats = LoadStats(num_layers=24, num_experts=64)
        >>> for layer, counts in enumerate(counts_of_this_step):
        ...     stats.record(layer, counts)
        >>> if step % 100 == 0:
        ...     stats.start()
        >>> if step % 100 == 50 and stats.pending:
        ...     loads = stats.result()  # then plan(loads[layer], topology)
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        group: ProcessGroup | None = None,
        decay: float = 0.9,
        device: torch.device | str | None = None,
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"LoadStats: decay must be in [0, 1), got {decay}")
        # By name, as a group that is kept alive keeps its threads.
        self._group_name = None if group is None else group.group_name
        self._decay = decay
        self._sums = torch.zeros(
            num_layers, num_experts, dtype=torch.int64, device=device
        )
        self._flight: tuple[Tensor, dist.Work] | None = None
        self._average: Tensor | None = None

    @property
    def _group(self) -> ProcessGroup | None:
        if self._group_name is None:
            return None
        return c10d._resolve_process_group(self._group_name)

    @property
    def pending(self) -> bool:
        """Whether a sum was started and not yet taken."""
        return self._flight is not None

    def record(self, layer: int, counts: Tensor) -> None:
        """Adds the counts of one forward pass of one layer.

        Args:
            layer (int): index of the layer.
            counts (Tensor): (num_experts) integer, on the device of this object.
        """
        if counts.shape != self._sums.shape[1:]:
            raise ValueError(
                f"LoadStats.record: counts must have shape "
                f"({self._sums.shape[1]},), got {tuple(counts.shape)}"
            )
        if not torch.compiler.is_compiling():
            # Inside a backward: a layer that is recomputed was counted before.
            if torch._C._current_graph_task_id() != -1:
                return
        self._sums[layer] += counts

    def start(self) -> None:
        """Begins to sum over ranks what was recorded since the last start."""
        if self._flight is not None:
            raise RuntimeError("LoadStats.start: take result() of the last start first")
        snapshot = self._sums.clone()
        self._sums.zero_()
        work = dist.all_reduce(snapshot, group=self._group, async_op=True)
        self._flight = (snapshot, work)

    def result(self) -> Tensor:
        """Waits for the sum and adds it to the average.

        Returns:
            Tensor: (num_layers, num_experts) float64 on CPU, equal on all ranks.
        """
        if self._flight is None:
            raise RuntimeError("LoadStats.result: call start() first")
        snapshot, work = self._flight
        work.wait()
        self._flight = None
        latest = snapshot.double().cpu()
        if self._average is None:
            self._average = latest
        else:
            self._average = self._average.lerp(latest, 1 - self._decay)
        return self._average.clone()

    def state_dict(self) -> dict[str, Tensor | None]:
        """Average, and what was recorded since the last sum. Collective.

        A sum in flight is taken first. Equal on all ranks, so that one of them may save it.
        """
        if self.pending:
            self.result()
        recorded = self._sums.clone()
        dist.all_reduce(recorded, group=self._group)
        average = None if self._average is None else self._average.clone()
        return {"recorded": recorded, "average": average}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        """Goes on from ``state``, on as many ranks as one likes."""
        recorded, average = state["recorded"], state["average"]
        if recorded is None or recorded.shape != self._sums.shape:
            got = None if recorded is None else tuple(recorded.shape)
            raise ValueError(
                "LoadStats: state must be of (num_layers, num_experts) = "
                f"{tuple(self._sums.shape)}, got {got}"
            )
        self._flight = None
        # It is the sum over all ranks: counted once.
        self._sums.copy_(recorded if dist.get_rank(self._group) == 0 else recorded * 0)
        self._average = None if average is None else average.clone()
