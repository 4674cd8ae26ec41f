"""Moves expert weights and optimizer state to a new placement, without a file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._moe.placement import Placement
from torch.distributed.tensor import DTensor


if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = ["migrate"]


def _moves(previous: Placement, placement: Placement) -> list[tuple[int, ...]]:
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
    tensor: Tensor, moves: list[tuple[int, ...]], rank: int, group: ProcessGroup | None
) -> None:
    """Applies ``moves`` to the slots (first dimension) of one local tensor."""
    num_ranks = dist.get_world_size(group)
    # (other rank, slot here) in the order of the other side's list.
    out = [(m[2], m[1]) for m in moves if m[0] == rank and m[2] != rank]
    into = [(m[0], m[3]) for m in moves if m[2] == rank and m[0] != rank]
    out.sort(key=lambda x: x[0])
    into.sort(key=lambda x: x[0])
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
    stay = [(m[1], m[3]) for m in moves if m[0] == m[2] == rank and m[1] != m[3]]
    kept = tensor[[source for source, _ in stay]]
    tensor[[target for _, target in stay]] = kept
    tensor[[slot for _, slot in into]] = received.view(tensor.dtype).view(
        len(into), *tensor.shape[1:]
    )


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
    num_ranks = dist.get_world_size(group)
    if num_ranks != placement.topology.num_ranks:
        raise ValueError(
            f"migrate: the placement is for {placement.topology.num_ranks} ranks, "
            f"group has {num_ranks}"
        )
    slots = placement.topology.slots_per_rank
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
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.dim() == 0 or local.shape[0] != slots:
                raise ValueError(
                    f"migrate: params must have {slots} slots in their first "
                    f"dimension, got shape {tuple(local.shape)}"
                )
            _move_rows(local, moves, rank, group)
    return sum(m[0] != m[2] for m in moves)
