"""Expert weights on a placement: moved without a file, and kept equal on replicas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._moe.topology import Placement
from torch.distributed.tensor import DTensor


if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = ["migrate", "sum_replica_gradients"]


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


def _move_rows(
    tensor: Tensor,
    moves: list[tuple[int, int, int, int]],
    rank: int,
    group: ProcessGroup | None,
) -> None:
    """Applies ``moves`` to the slots (first dimension) of one local tensor."""
    # (other rank, slot here) in the order of the other side's list.
    out = [(m[2], m[1]) for m in moves if m[0] == rank and m[2] != rank]
    into = [(m[0], m[3]) for m in moves if m[2] == rank and m[0] != rank]
    out.sort(key=lambda x: x[0])
    into.sort(key=lambda x: x[0])
    received = _send_rows(tensor, out, into, group)
    stay = [(m[1], m[3]) for m in moves if m[0] == m[2] == rank and m[1] != m[3]]
    kept = tensor[[source for source, _ in stay]]
    tensor[[target for _, target in stay]] = kept
    tensor[[slot for _, slot in into]] = received


def _send_rows(
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
        optimizer (Optimizer, optional): its state of these parameters moves too,
            every tensor of a parameter's shape. Default: None
        group (ProcessGroup, optional): as many ranks as the placements have.
            Default: the default group

    Returns:
        int: replicas that changed rank, summed over the ranks.
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
    for param in params:
        tensors = [param]
        if optimizer is not None:
            state = optimizer.state.get(param, {}).values()
            tensors += [
                v for v in state if isinstance(v, Tensor) and v.shape == param.shape
            ]
        for tensor in tensors:
            _move_rows(_slots("migrate", tensor, placement), moves, rank, group)
    return sum(m[0] != m[2] for m in moves)


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
        received = _send_rows(grad, to_first, to_others, group)
        wide = torch.promote_types(grad.dtype, torch.float32)
        totals = {slot: grad[slot].to(wide) for _, slot in to_others}
        for (_, slot), row in zip(to_others, received):
            totals[slot] += row
        for slot, total in totals.items():
            grad[slot] = total.to(grad.dtype)
        summed = _send_rows(grad, to_others, to_first, group)
        grad[[slot for _, slot in to_first]] = summed
