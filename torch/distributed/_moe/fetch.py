"""Sends weights of experts from home to the ranks that run them, and gradients back.

See plan.py for the terms.

Contract
    A parameter is always ``Shard(0)``, so that optimizers, clipping and checkpoints see each
    expert once. Experts at home run on the shard itself; copies run in a separate call and
    are the only extra memory. A copy is the output of an autograd function: backward sends
    its gradient home, where gradients are added in the order of the ranks. After
    ``backward()`` every ``.grad`` is final. One message per pair of ranks has all tensors of a
    layer.

When
    A fetch is communication in flight (in_flight.py): on the communication thread, or the side stream,
    with its own group. It is issued before the tokens of its layer, or while the previous layer
    computes (``ahead``). The layer waits for it after the experts at home. Backward is the
    mirror: gradients of copies leave before the experts at home compute theirs, and the
    previous layer waits for them.
    In a graph, while tracing and in selective checkpointing, a fetch stays inside its layer.

What is reused
    Copies fetched ahead are used once, kept copies (``keep``) as often as possible.
    Both need the same moves, and weights that nobody has written since, by the version
    counter. Each backward returns the gradient of a kept copy at once. If its rank added them up
    until the step ends, ``.grad`` would not be final before.
    Activation checkpointing fetches again in the recomputation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed._moe.exchange import Exchange, meet, Splits, sum_in_order
from torch.distributed._moe.in_flight import begin, end, use_own_groups
from torch.distributed._moe.payload import decode, encode, is_traced, pack, unpack


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed._moe.plan import Plan


__all__ = ["after_fetch", "Copies", "Fetch", "Fetcher", "Made", "Moves", "moves_of"]


class Moves(NamedTuple):
    """What one rank sends and receives to get its copies.

    Attributes:
        splits (Splits): experts sent to and received from each rank.
        sent (Tensor): (sent) int64 rows of the local shard, by target rank.
        away (Tensor): (A) int64 rows of the local shard that others have copies of.
        returned (Tensor): (A, P) int64 places in ``sent`` of those copies, by rank; missing ones
            have the number of sent rows.
        checksum (int): of the plan.
    """

    splits: Splits
    sent: Tensor
    away: Tensor
    returned: Tensor
    checksum: int

    def to(self, device: torch.device) -> Moves:
        return self._make(t.to(device) if isinstance(t, Tensor) else t for t in self)


def moves_of(plan: Plan, rank: int) -> Moves:
    """Moves of ``rank``, a function of the plan alone, on CPU.

    Args:
        plan (Plan): slots of a rank have its own experts, in order, then copies, ascending, then -1.
    """
    num_ranks = plan.topology.num_ranks
    each = plan.num_experts // num_ranks
    for target, row in enumerate(plan.slot_experts.tolist()):
        at_home = list(range(target * each, (target + 1) * each))
        copies = sorted(e for e in row[each:] if e >= 0)
        if row != at_home + copies + [-1] * (len(row) - each - len(copies)):
            raise ValueError(
                "moves_of: slots must have the experts of the rank, then copies, ascending, "
                f"then -1; got {row} on rank {target} of {num_ranks}"
            )
    # (E, W) whether a rank has a copy.
    copied = plan.slots() >= each
    mine = copied[rank * each : (rank + 1) * each]
    target, sent = mine.t().nonzero(as_tuple=True)
    away = mine.any(1).nonzero().flatten()
    places = torch.full(mine.shape, len(sent), device=mine.device)
    places[sent, target] = torch.arange(len(sent), device=mine.device)
    returned = places[away].sort(1).values[:, : int(mine.sum(1).max())]
    received = copied[:, rank].view(num_ranks, each).sum(1)
    splits = Splits(mine.sum(0).tolist(), received.tolist())
    return Moves(splits, sent, away, returned, plan.checksum())


@dataclass(eq=False)
class Copies:
    """Local shards -> weights of the copies; backward adds up at home.

    Args:
        exchange (Exchange): ranks that share the experts.
        moves (Moves): of this rank; all ranks have those of one plan.
        wire_dtype (torch.dtype, optional): dtype of sent matrices, as in a token switch.
            Default: None (their own)
        kept (sequence of Tensor, optional): the copies, if they are kept. Default: None
    """

    exchange: Exchange
    moves: Moves
    wire_dtype: torch.dtype | None = None
    kept: Sequence[Tensor] | None = None

    @property
    def switch(self) -> Exchange:
        return self.exchange

    def forward(self, *weights: Tensor) -> tuple[Tensor, ...]:
        if self.kept is not None:
            # Without the history that autograd gives to a function's outputs.
            return tuple(t.detach() for t in self.kept)
        moves, dtype = self.moves, self.wire_dtype
        sent, index = [w.flatten(1) for w in weights], moves.sent
        coded = [dtype is not None and w.dim() > 2 for w in weights]
        if dtype is not None:
            # Only sent matrices are rounded.
            sent, index = [rows.index_select(0, index) for rows in sent], None
            sent = [encode(r, dtype) if c else r for r, c in zip(sent, coded)]
        parts = [(rows.shape[1], rows.dtype) for rows in sent]
        message = pack(sent, index=index)
        # It depends on dtypes that nothing has compared yet.
        size = message.shape[1] * message.element_size()
        facts: dict[str, int | Tensor] = {"bytes of an expert": size}
        facts["checksum of the plan"] = moves.checksum
        meet(self.exchange.levels, message, "experts", facts)
        message = self.exchange.send(message, moves.splits, "experts")
        outputs = []
        for w, rows, c in zip(weights, unpack(message, parts), coded):
            rows = rows.contiguous()
            if c and dtype is not None:
                rows = decode(rows, dtype, w[0].numel(), w.dtype)
            outputs.append(rows.view(-1, *w.shape[1:]))
        return tuple(outputs)

    def traced(self, *weights: Tensor) -> tuple[Tensor, ...]:
        return _Inline.apply(self, *weights)

    def backward(
        self, needs: Sequence[bool], *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        moves, local = self.moves, self.exchange.local_experts
        wanted = [i for i, needed in enumerate(needs) if needed]
        flat = [grads[i].flatten(1) for i in wanted]
        message, back = pack(flat), moves.splits.flipped()
        message = self.exchange.send(message, back, "expert_grads", spare=True)
        arrived = unpack(message, [(g.shape[1], g.dtype) for g in flat])
        results: list[Tensor | None] = [None] * len(grads)
        for i, rows in zip(wanted, arrived):
            sums = sum_in_order(rows, moves.returned)
            total = sums.new_zeros(local, sums.shape[1])
            # Selective checkpointing may keep any operator's result.
            copy = Tensor.index_copy if is_traced(total) else Tensor.index_copy_
            total = copy(total, 0, moves.away, sums)
            results[i] = total.view(local, *grads[i].shape[1:])
        return tuple(results)


class _Inline(torch.autograd.Function):
    """Both directions of :class:`Copies`, each waited for at once."""

    @staticmethod
    # pyrefly: ignore [bad-override]
    def forward(ctx: Any, copies: Copies, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.copies = copies
        return copies.forward(*weights)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.copies.backward(ctx.needs_input_grad[1:], *grads)


# (E/W, ...) local shards by name. Which of them require gradients is the same on all ranks.
Weights = Mapping[str, Tensor]
# Versions of the DTensors, as their shards do not count in-place operations on them. None if neither
# existing copies may be used nor new ones kept.
Versions = tuple[int, ...] | None


class Made(NamedTuple):
    """What copies were made of. It holds moves and weights, so that their memory is not reused."""

    facts: tuple[Any, ...]
    modes: tuple[bool, ...]  # of gradients, which a graph depends on but copies do not
    held: tuple[Moves, list[Tensor]]

    @staticmethod
    def of(moves: Moves, weights: Weights, versions: Versions) -> Made | None:
        """None without versions, as of inference tensors, which do not count what is written to them."""
        held = [w.detach() for w in weights.values()]
        if versions is None or any(w.is_inference() for w in held):
            return None
        places = [(w.untyped_storage()._cdata, w.storage_offset()) for w in held]
        states = [(w.shape, w.stride(), w._version) for w in held]
        facts = id(moves), versions, places, states
        modes = torch.is_grad_enabled(), *(w.requires_grad for w in weights.values())
        return Made(facts, modes, (moves, held))


class Fetch(NamedTuple):
    """A fetch that was issued.

    Attributes:
        made (Made, optional): its sources, if other forwards may use it.
        flight (tuple): arguments of the wait.
        sends (bool): whether something is sent; equal on all ranks, or some would hang.
    """

    made: Made | None
    flight: tuple[Any, Any]
    sends: bool = True


class Fetcher:
    """Copies for the forwards of one layer: fetched in the forward, ahead of it, or kept.

    Args:
        exchange, wire_dtype: of :class:`Copies`.
        keep (bool): copies stay until weights or moves change.
    """

    def __init__(
        self, exchange: Exchange, wire_dtype: torch.dtype | None, keep: bool
    ) -> None:
        self.exchange, self.wire_dtype, self.keep = exchange, wire_dtype, keep
        self.forget()

    def forget(self) -> None:
        """Makes the next forward fetch."""
        self._ahead: tuple[Made, Fetch] | None = None
        self._kept: tuple[Made, list[Tensor]] | None = None

    def ahead(self, moves: Moves, weights: Weights, versions: Versions) -> None:
        """Issues the fetch of a later forward, unless copies are kept. Collective."""
        made = Made.of(moves, weights, versions)
        if made is not None and self.kept_as(made) is None:
            self._ahead = made, self._issue(moves, weights, made)

    def begin(self, moves: Moves, weights: Weights, versions: Versions) -> Fetch:
        """Issues the fetch of a forward if it needs one. Collective."""
        made = Made.of(moves, weights, versions)
        if made is not None:
            ahead, self._ahead = self._ahead, None
            if ahead is not None and ahead[0][:2] == made[:2]:
                return ahead[1]._replace(sends=False)
        return self._issue(moves, weights, made)

    def end(self, fetch: Fetch, weights: Weights) -> dict[str, Tensor]:
        """Waits; (copies of this rank, ...) of each weight."""
        arrived = end(*fetch.flight)
        # A single output is not in a tuple.
        arrived = [arrived] if isinstance(arrived, Tensor) else arrived
        if self.keep and fetch.made is not None:
            self._kept = fetch.made, [t.detach() for t in arrived]
        # Frozen weights get no gradient.
        pairs = zip(arrived, weights.items())
        return {n: t if w.requires_grad else t.detach() for t, (n, w) in pairs}

    def kept_as(self, made: Made) -> list[Tensor] | None:
        """The kept copies, if they were made of the same."""
        if self._kept is not None:
            kept, copies = self._kept
            usable = torch.is_inference_mode_enabled() or not copies[0].is_inference()
            if usable and kept.facts == made.facts:
                return copies
        self._kept = None  # Before others need the memory.
        return None

    def _issue(self, moves: Moves, weights: Weights, made: Made | None) -> Fetch:
        kept = None if made is None else self.kept_as(made)
        copies = Copies(self.exchange, moves, self.wire_dtype, kept)
        values = tuple(weights.values())
        if values[0].device.type == "cpu" and not torch.compiler.is_compiling():
            use_own_groups(self.exchange)
        return Fetch(made, begin(copies, values), kept is None)


class _After(torch.autograd.Function):
    """Identity with an edge to the copies, whether or not they get a gradient."""

    @staticmethod
    # pyrefly: ignore [bad-override]
    def forward(ctx: Any, output: Tensor, *weights: Tensor) -> Tensor:
        # Recomputation, which fetches, begins here on every rank, before gradients are sent.
        ctx.save_for_backward(output.new_empty(0))
        return output.view_as(output)

    @staticmethod
    # pyrefly: ignore [bad-override]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


def after_fetch(output: Tensor, weights: Weights) -> Tensor:
    """``output``, whose backward returns gradients of ``weights`` on every rank.

    A rank may have no copies, and experts without tokens may not use their weights, but other
    ranks still wait for their message.
    """
    if torch.compiler.is_compiling():
        sums = [w.sum().to(output.dtype) for w in weights.values() if not len(w)]
        return output + sum(sums) if sums else output
    return _After.apply(output, *weights.values())
