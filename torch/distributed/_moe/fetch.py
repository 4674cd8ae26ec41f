"""Weights of experts on their way: from home to the ranks that run them, gradients back.

Terms
    home    the rank whose shard of the expert parameter has the expert: rank ``e // (E/W)``
    copy    weights of an expert on a rank that is not its home, for one forward and backward

Contract
    A parameter is always ``Shard(0)``, so that optimizers, clipping and checkpoints see one
    expert once. Experts at home run on the shard itself; copies are a call of their own, and
    take memory of their own only. A copy is the output of an autograd function: backward sends
    its gradient home, where the gradients are added in the order of the ranks. After
    ``backward()`` every ``.grad`` is final. One message per pair of ranks has all tensors of a
    layer.

When
    A fetch is communication in flight (in_flight.py): on the communication thread, or the side stream, in a
    group of its own. It is issued before the tokens of its layer are, or while the layer before
    it computes (``ahead``), and waited for when the experts at home are done. Backward is the
    mirror: gradients of copies leave before those of the experts at home are computed, and are
    waited for in the layer before.
    In a graph, while one is traced and in selective checkpointing, a fetch stays inside its layer.

What is reused
    Copies that were fetched ahead are used once, kept ones (``keep``) as often as possible;
    both only for the same moves, and for weights that nobody wrote to since, by the version
    counter. A copy that is kept still has a gradient per backward, returned at once: were it
    added up on its rank until the step ends, ``.grad`` would not be final before.
    Activation checkpointing fetches again in the recomputation.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed._moe.exchange import Exchange, Splits
from torch.distributed._moe.in_flight import begin, end, use_own_groups
from torch.distributed._moe.payload import decode, encode, is_traced, pack, unpack


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


__all__ = ["after_fetch", "Copies", "Fetch", "Fetcher", "Moves", "moves_of"]


class Moves(NamedTuple):
    """What one rank sends and receives so that its copies are there.

    Attributes:
        splits (Splits): experts sent to and received from each rank.
        sent (Tensor): (sent) int64 rows of the local shard, by target rank.
        away (Tensor): (A) int64 rows of the local shard that others have copies of.
        returned (Tensor): (A, P) int64 places in ``sent`` of those copies, by rank; as many
            as were sent where there are fewer than P.
    """

    splits: Splits
    sent: Tensor
    away: Tensor
    returned: Tensor

    def to(self, device: torch.device) -> Moves:
        return self._make(t.to(device) if isinstance(t, Tensor) else t for t in self)


def moves_of(slot_experts: Tensor, num_experts: int, rank: int) -> Moves:
    """Moves of ``rank``, a function of the plan alone, on CPU.

    Args:
        slot_experts (Tensor): (num_ranks, slots_per_rank) int64: the experts of the rank, in
            order, then its copies, ascending, then -1.
        num_experts (int): E, a multiple of the ranks.
    """
    num_ranks, _ = slot_experts.shape
    each = num_experts // num_ranks
    targets: list[list[int]] = [[] for _ in range(num_ranks)]
    received = [0] * num_ranks
    for target, row in enumerate(slot_experts.tolist()):
        copies = [e for e in row[each:] if e >= 0]
        at_home = list(range(target * each, (target + 1) * each))
        if row != at_home + sorted(copies) + [-1] * (len(row) - each - len(copies)):
            raise ValueError(
                "moves_of: slots must have the experts of the rank, then copies, ascending, "
                f"then -1; got {row} on rank {target} of {num_ranks}"
            )
        for source, at in (divmod(e, each) for e in copies):
            if source == rank:
                targets[target].append(at)
            if target == rank:
                received[source] += 1
    sent = [at for rows in targets for at in rows]
    away = sorted(set(sent))
    places = [[i for i, at in enumerate(sent) if at == row] for row in away]
    most = max(map(len, places), default=0)
    returned = [p + [len(sent)] * (most - len(p)) for p in places]

    def table(values: list[Any], *shape: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).view(*shape)

    return Moves(
        Splits([len(rows) for rows in targets], received),
        table(sent, -1),
        table(away, -1),
        table(returned, len(away), most),
    )


class Copies:
    """Local shards -> weights of the copies; backward adds up at home.

    Args:
        exchange (Exchange): ranks that share the experts.
        moves (Moves): of this rank; all ranks have those of one plan.
        wire_dtype (torch.dtype, optional): of matrices on their way, as of a token switch.
            Default: None (their own)
        kept (sequence of Tensor, optional): what would arrive. Default: None
    """

    def __init__(
        self,
        exchange: Exchange,
        moves: Moves,
        wire_dtype: torch.dtype | None = None,
        kept: Sequence[Tensor] | None = None,
    ) -> None:
        self.exchange, self.moves, self.kept = exchange, moves, kept
        self.wire_dtype = wire_dtype
        self.levels = (exchange,)  # for count_wire_bytes

    @property
    def switch(self) -> Copies:
        return self

    def use_own_groups(self) -> None:
        self.exchange.use_own_group()

    def forward(self, *weights: Tensor) -> tuple[Tensor, ...]:
        if self.kept is not None:
            # Without the history that autograd gives to what a function returns.
            return tuple(t.detach() for t in self.kept)
        moves, dtype = self.moves, self.wire_dtype
        sent, index = [w.flatten(1) for w in weights], moves.sent
        coded = [dtype is not None and w.dim() > 2 for w in weights]
        if dtype is not None:
            # Only what travels is rounded.
            sent, index = [rows.index_select(0, index) for rows in sent], None
            sent = [encode(r, dtype) if c else r for r, c in zip(sent, coded)]
        parts = [(rows.shape[1], rows.dtype) for rows in sent]
        message = pack(sent, index=index)
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
        flat = [grad.flatten(1) for grad, needed in zip(grads, needs) if needed]
        message, back = pack(flat), moves.splits.flipped()
        message = self.exchange.send(message, back, "expert_grads", spare=True)
        arrived = iter(unpack(message, [(g.shape[1], g.dtype) for g in flat]))
        results: list[Tensor | None] = []
        for grad, needed in zip(grads, needs):
            if not needed:
                results.append(None)
                continue
            copies, wide = next(arrived), torch.promote_types(grad.dtype, torch.float32)
            total = copies.new_zeros(local, copies.shape[1])
            sums = copies.new_zeros(len(moves.away), copies.shape[1], dtype=wide)
            for places in moves.returned.unbind(1):
                sums = sums + copies.index_select(0, places)
            # Selective checkpointing may keep what any operator returned.
            copy = Tensor.index_copy if is_traced(total) else Tensor.index_copy_
            total = copy(total, 0, moves.away, sums.to(grad.dtype))
            results.append(total.view(local, *grad.shape[1:]))
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


# Of the DTensors: what is done to them in place is not counted in their shards.
Versions = tuple[int, ...]


class _Made(NamedTuple):
    """What copies were made of. Holds moves and weights, so that no others get their memory."""

    moves: Moves
    weights: list[Tensor]
    facts: tuple[Any, ...]

    @staticmethod
    def of(moves: Moves, weights: Mapping[str, Tensor], versions: Versions) -> _Made:
        held = [w.detach() for w in weights.values()]
        return _Made(moves, held, (id(moves), versions, [_place(w) for w in held]))


def _place(w: Tensor) -> tuple[Any, ...]:
    storage = w.untyped_storage()._cdata
    return storage, w.storage_offset(), w.shape, w.stride(), w._version


def _modes(weights: Mapping[str, Tensor]) -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *(w.requires_grad for w in weights.values())


class Fetch(NamedTuple):
    """A fetch that was issued.

    Attributes:
        made (_Made, optional): where others may use it too.
        modes (tuple[bool]): of the graph behind it.
        flight (tuple): what waits for it.
        sends (bool): whether something travels; equal on all ranks, or some would wait.
    """

    made: _Made | None
    modes: tuple[bool, ...]
    flight: tuple[Any, Any]
    sends: bool = True


class Fetcher:
    """Copies for the forwards of one layer: fetched then, ahead of it, or kept.

    Args:
        exchange (Exchange): ranks that share the experts.

    Keyword Args:
        wire_dtype (torch.dtype, optional): see :class:`Copies`. Default: None
        keep (bool): copies stay until weights or moves change. Default: ``False``
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        wire_dtype: torch.dtype | None = None,
        keep: bool = False,
    ) -> None:
        self.exchange, self.wire_dtype, self.keep = exchange, wire_dtype, keep
        self.forget()

    def forget(self) -> None:
        """The next forward fetches."""
        self._ahead: Fetch | None = None
        self._kept: tuple[_Made, list[Tensor]] | None = None

    def ahead(
        self, moves: Moves, weights: Mapping[str, Tensor], versions: Versions
    ) -> None:
        """Issues the fetch of a forward to come, unless copies are kept. Collective."""
        made = _Made.of(moves, weights, versions)
        if self._kept_as(made) is None:
            self._ahead = self._issue(moves, weights, made, None)

    def begin(
        self,
        moves: Moves,
        weights: Mapping[str, Tensor],
        versions: Versions | None,
    ) -> Fetch:
        """Issues the fetch of a forward where it needs one. Collective.

        Args:
            moves (Moves): of this rank; all ranks have those of one plan.
            weights (dict[str, Tensor]): (E/W, ...) local shards. Which of them require
                gradients is the same on all ranks.
            versions (tuple[int], optional): of the parameters, if copies that are there may
                be used, and others kept.
        """
        if versions is None or any(w.is_inference() for w in weights.values()):
            return self._issue(moves, weights, None, None)
        made, ahead = _Made.of(moves, weights, versions), self._ahead
        self._ahead = None
        if ahead is not None and ahead.modes == _modes(weights):
            if ahead.made is not None and ahead.made.facts == made.facts:
                return ahead._replace(sends=False)
        return self._issue(moves, weights, made, self._kept_as(made))

    def end(self, fetch: Fetch, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Waits. (copies of this rank, ...) of each."""
        arrived = end(*fetch.flight)
        # One output comes alone.
        arrived = [arrived] if isinstance(arrived, Tensor) else arrived
        if self.keep and fetch.made is not None:
            self._kept = fetch.made, [t.detach() for t in arrived]
        # Nobody computes a gradient of frozen ones.
        pairs = zip(arrived, weights.items())
        return {n: t if w.requires_grad else t.detach() for t, (n, w) in pairs}

    def kept(
        self, moves: Moves, weights: Mapping[str, Tensor], versions: Versions
    ) -> dict[str, Tensor] | None:
        """Copies that are kept, if they are those of ``moves`` and ``weights``."""
        copies = self._kept_as(_Made.of(moves, weights, versions))
        return None if copies is None else dict(zip(weights, copies))

    def _kept_as(self, made: _Made) -> list[Tensor] | None:
        if self._kept is not None:
            kept, copies = self._kept
            usable = torch.is_inference_mode_enabled() or not copies[0].is_inference()
            if usable and kept.facts == made.facts:
                return copies
        self._kept = None  # Before others need the memory.
        return None

    def _issue(
        self,
        moves: Moves,
        weights: Mapping[str, Tensor],
        made: _Made | None,
        kept: list[Tensor] | None,
    ) -> Fetch:
        copies = Copies(self.exchange, moves, self.wire_dtype, kept)
        values = tuple(weights.values())
        if values[0].device.type == "cpu" and not torch.compiler.is_compiling():
            use_own_groups(copies)
        flight = begin(copies, values)
        return Fetch(made, _modes(weights), flight, kept is None)


class _After(torch.autograd.Function):
    """Identity; an edge to the copies, with or without a gradient of theirs."""

    @staticmethod
    # pyrefly: ignore [bad-override]
    def forward(ctx: Any, output: Tensor, *weights: Tensor) -> Tensor:
        # Recomputation, which fetches, begins here on every rank: before a gradient is sent.
        ctx.save_for_backward(output.new_empty(0))
        return output.view_as(output)

    @staticmethod
    # pyrefly: ignore [bad-override]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


def after_fetch(output: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """``output``, whose backward returns gradients of ``weights`` on every rank.

    A rank may have no copies, and experts that got no tokens may not use their weights; others
    wait for their message nevertheless.
    """
    if torch.compiler.is_compiling():
        sums = [w.sum().to(output.dtype) for w in weights.values() if not len(w)]
        return output + sum(sums) if sums else output
    return _After.apply(output, *weights.values())
