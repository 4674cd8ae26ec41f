"""Weights of experts on their way: from home to the ranks that run them, gradients back.

Terms
    home    the rank whose shard of the expert parameter has the expert: rank ``e // (E/W)``
    copy    weights of an expert on a rank that is not its home, for one forward and backward

A parameter is always ``Shard(0)``, so that optimizers, clipping and checkpoints see one
expert once. A copy is the output of an autograd function: backward sends its gradient home,
where the gradients are added in the order of the ranks. After ``backward()`` every ``.grad``
is final. One message per pair of ranks has all tensors of a layer. Activation checkpointing
fetches again in the recomputation, and keeps no copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed._moe.exchange import Exchange, Splits, take
from torch.distributed._moe.wire import pack, unpack


if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = ["after_fetch", "busiest", "fetch", "Moves", "moves_of"]


class Moves(NamedTuple):
    """What one rank sends and receives so that its slots have their experts.

    Attributes:
        splits (Splits): experts sent to and received from each rank.
        sent (Tensor): (sent) int64 rows of the local shard, by target rank.
        slots (Tensor): (received) int64 slots that they fill, by source rank.
        kept (Tensor): (slots_per_rank) int64 row of the local shard of each slot; 0 for
            the slots that are received or free.
        own (Tensor): (E/W) int64 slot of each expert of this rank, -1 if it runs elsewhere.
        returned (Tensor): (E/W, P) int64 places in ``sent`` of the copies of each expert, by
            rank; as many as were sent where there are fewer than P.
    """

    splits: Splits
    sent: Tensor
    slots: Tensor
    kept: Tensor
    own: Tensor
    returned: Tensor

    def to(self, device: torch.device) -> Moves:
        return self._make(t.to(device) if isinstance(t, Tensor) else t for t in self)


def moves_of(slot_experts: Tensor, num_experts: int, rank: int) -> Moves:
    """Moves of ``rank``, a function of the plan alone, on CPU.

    Args:
        slot_experts (Tensor): (num_ranks, slots_per_rank) int64 expert of each slot, or -1.
        num_experts (int): E, a multiple of the ranks.
    """
    num_ranks, slots_per_rank = slot_experts.shape
    home = num_experts // num_ranks
    out: list[list[int]] = [[] for _ in range(num_ranks)]
    into: list[list[int]] = [[] for _ in range(num_ranks)]
    kept, own = [0] * slots_per_rank, [-1] * home
    for target, row in enumerate(slot_experts.tolist()):
        for slot, expert in enumerate(row):
            source, at = divmod(expert, home)
            if expert < 0:
                continue
            if source == target == rank:
                kept[slot], own[at] = at, slot
            elif source == rank:
                out[target].append(at)
            elif target == rank:
                into[source].append(slot)
    sent = [at for rows in out for at in rows]
    places: list[list[int]] = [[] for _ in range(home)]
    for place, at in enumerate(sent):
        places[at].append(place)
    most = max(map(len, places))
    returned = [p + [len(sent)] * (most - len(p)) for p in places]
    slots = [slot for rows in into for slot in rows]
    splits = Splits([len(rows) for rows in out], [len(rows) for rows in into])

    def table(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    places_of = table(returned).view(home, most)
    return Moves(splits, table(sent), table(slots), table(kept), table(own), places_of)


def busiest(slot_experts: Tensor, num_experts: int) -> int:
    """Most experts that a rank sends or receives for a plan, which is what it waits for."""
    num_ranks = len(slot_experts)
    sent, received = [0] * num_ranks, [0] * num_ranks
    for target, row in enumerate(slot_experts.tolist()):
        for expert in row:
            source = expert // (num_experts // num_ranks)
            if expert >= 0 and source != target:
                sent[source] += 1
                received[target] += 1
    return max(*sent, *received)


class _Fetch(torch.autograd.Function):
    """Local shards -> weights of the slots; backward adds up at home."""

    @staticmethod
    # pyrefly: ignore [bad-override]
    def forward(
        ctx: Any, exchange: Exchange, moves: Moves, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.moves = exchange, moves
        flat = [w.flatten(1) for w in weights]
        parts = [(w.shape[1], w.dtype) for w in flat]
        message = exchange.send(pack(flat, index=moves.sent), moves.splits, "experts")
        outputs = []
        for weight, rows, arrived in zip(weights, flat, unpack(message, parts)):
            rows = rows.index_select(0, moves.kept)
            rows = rows.index_copy(0, moves.slots, arrived)
            outputs.append(rows.view(-1, *weight.shape[1:]))
        frozen = zip(outputs, ctx.needs_input_grad[2:])
        ctx.mark_non_differentiable(*(out for out, needs in frozen if not needs))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        moves, needs = ctx.moves, ctx.needs_input_grad[2:]
        flat = [grad.flatten(1) for grad, needed in zip(grads, needs) if needed]
        message = pack(flat, index=moves.slots)
        back = moves.splits.flipped()
        message = ctx.exchange.send(message, back, "expert_grads", spare=True)
        arrived = iter(unpack(message, [(g.shape[1], g.dtype) for g in flat]))
        results: list[Tensor | None] = [None, None]
        for grad, needed in zip(grads, needs):
            if not needed:
                results.append(None)
                continue
            copies = next(arrived)
            total = take(grad.flatten(1), moves.own)
            total = total.to(torch.promote_types(grad.dtype, torch.float32))
            for places in moves.returned.unbind(1):
                total = total + copies.index_select(0, places)
            total = total.to(grad.dtype)
            results.append(total.view(total.shape[0], *grad.shape[1:]))
        return tuple(results)


def fetch(
    exchange: Exchange, moves: Moves, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Weights of this rank's slots. Collective over the ranks of ``exchange``.

    Args:
        exchange (Exchange): ranks that share the experts.
        moves (Moves): of this rank; all ranks have those of one plan.
        weights (dict[str, Tensor]): (E/W, ...) local shards. Which of them require gradients
            is the same on all ranks.

    Returns:
        dict[str, Tensor]: (slots_per_rank, ...) of each; free slots have what does not matter.
    """
    return dict(zip(weights, _Fetch.apply(exchange, moves, *weights.values())))


class _After(torch.autograd.Function):
    """Identity; an edge to the copies, with or without a gradient of theirs."""

    @staticmethod
    # pyrefly: ignore [bad-override]
    def forward(ctx: Any, output: Tensor, *weights: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    # pyrefly: ignore [bad-override]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


def after_fetch(output: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """``output``, whose backward returns gradients of ``weights`` on every rank.

    Experts that got no tokens may not use their weights; other ranks wait for their message
    nevertheless.
    """
    if torch.compiler.is_compiling():
        return output
    return _After.apply(output, *weights.values())
