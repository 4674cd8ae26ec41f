"""One level of expert-parallel communication: tokens to the ranks of a group and back.

Token switches consist of :class:`Exchange` levels. The flat switch has one, the
hierarchical switch has one between nodes and one inside the node.

Terms (T tokens, K slots of the router per token, W ranks, E experts, E/W per rank)
    row      a token on its way to one rank. A token with several slots on a rank
             travels there once.
    slot     one (token, k) pair
    message  the bytes of a row: its values, and on the way to the experts also its K
             expert ids and K router weights. One collective per direction.
    compact  buffers have the exact number of rows. Sizes are exchanged first and
             read on the host.
    static   every pair of ranks has ``capacity`` rows of K slots. Nothing is read on
             the host; rows that do not fit are counted on the device.

Each direction is a gather, an all-to-all and another gather, so no float is
added atomically. Nothing here branches on data: a branch would need a host sync,
break a graph, or be impossible for the many ranks of one LocalTensorMode process (where
sizes differ by rank, and a dimension of such a size cannot be sliced with ``[:]``).
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed._local_tensor import local_tensor_mode
from torch.distributed._moe.groups import own_group, scalar_device
from torch.distributed._moe.payload import (
    empty_message,
    is_traced,
    pack,
    rows_or,
    unmerged_zero,
    unpack,
    with_row,
)
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils._python_dispatch import _disable_current_modes


if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from torch.distributed._moe.wire_bytes import WireBytes
    from torch.distributed.distributed_c10d import ProcessGroup

    R = TypeVar("R")


__all__ = [
    "counter_maximum",
    "Demand",
    "Exchange",
    "meet",
    "MEETS_FOR",
    "read_on_host",
    "Route",
    "Splits",
    "sum_in_order",
    "take",
]


# -- routes


@dataclass(frozen=True, slots=True)
class Splits:
    """Rows to and from each rank; None if all pairs of ranks have equally many."""

    send: list[int] | None
    recv: list[int] | None

    @property
    def num_sent(self) -> int:
        """Rows sent to all ranks, if pairs of ranks differ."""
        if self.send is None:
            raise AssertionError("even splits have no numbers of rows")
        return sum(self.send)

    def flipped(self) -> Splits:
        return Splits(self.recv, self.send)


EVEN = Splits(None, None)


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """Which ranks the tokens of this rank go to.

    Attributes:
        dest (Tensor): (T, K) int64 rank of each slot; -1 and W mean no expert.
        columns (Tensor): (T, P) the ranks of a token, each once, in P = min(W, K)
            columns; others are -1 or W.
        token_of (Tensor): (T * P) int32 ``t * P + p`` of each row, by rank and token.
        row_of (Tensor): (T, P) int32 row of each column, or -1.
        row_counts (Tensor): (W) int32 rows for each rank.
        slot_of (Tensor): (T, K) int32 slot in the order of ranks, tokens and k, or -1.
        slot_counts (Tensor): (W) int32 slots for each rank.
    """

    dest: Tensor
    columns: Tensor
    token_of: Tensor
    row_of: Tensor
    row_counts: Tensor
    slot_of: Tensor
    slot_counts: Tensor


@dataclass(slots=True, eq=False)
class Route:
    """Routing of one batch over one level, used by both directions and backwards.

    Attributes:
        rows (Splits): of the rows that are sent to the experts.
        slots (Splits): of their slots.
        send_token (Tensor): (rows sent) int64 token of the row; T where unused.
        row_index (Tensor): (T, P) int64 returned row to add for the token, or -1.
        slot_index (Tensor): (T, K) int64 returned slot, or -1.
        columns (Tensor): (T, P) rank of each column of ``row_index``.
        dest (Tensor): (T, K) rank of each slot.
        num_rows (int): M rows that arrive.
        num_slots (int): slots that arrive; static: M * K.
        recv_slot (Tensor, optional): (num_slots) int64 position in (M, K) of the slots
            that arrive, known after they arrived; None if every position is one, in order.
        mark (int or Tensor): sent with each row of a static route.
        marks (Tensor, optional): (M, K) int64 of the received rows; not in graphs.
        calls (Tensor, optional): on CPU, what ``wait_for_all`` of a static route gets and returned.
    """

    rows: Splits
    slots: Splits
    send_token: Tensor
    row_index: Tensor
    slot_index: Tensor
    columns: Tensor
    dest: Tensor
    num_rows: int
    num_slots: int
    recv_slot: Tensor | None = None
    mark: int | Tensor = 0
    marks: Tensor | None = None
    calls: Tensor | None = None

    @property
    def is_static(self) -> bool:
        return self.rows.send is None

    def slots_in_rows(self, K: int) -> Tensor:
        """(T, K) int64 place of each slot in returned rows of K each, or -1."""
        same = self.dest.unsqueeze(2) == self.columns.unsqueeze(1)
        rows = torch.where(same, self.row_index.unsqueeze(1), -1)
        if not rows.shape[2]:
            return self.dest.new_full(same.shape[:2], -1)
        row, slots = rows.amax(2), torch.arange(K, device=rows.device)
        return torch.where(row < 0, -1, row * K + slots)


def take(source: Tensor, index: Tensor) -> Tensor:
    """Rows of ``source``, zeros where ``index`` is -1."""
    size = source.shape[0]
    if torch.compiler.is_compiling():
        some = guard_or_false(size > 0)
    else:
        # In LocalTensorMode sizes differ by rank and cannot be compared.
        some = type(size) is int and size > 0
    if some:
        rows = source[index.clamp_min(0)]
        missing = (index < 0).view(index.shape + (1,) * (source.dim() - 1))
        # Selective checkpointing may keep any operator's result, and does not copy it.
        return (Tensor.masked_fill if is_traced(rows) else Tensor.masked_fill_)(
            rows, missing, 0
        )
    return with_row(source)[torch.where(index < 0, size, index)]


# Values of sums that stay in a core's cache while terms are added.
_BLOCK_OF_SUMS = 2**19


def sum_in_order(rows: Tensor, index: Tensor, spare: bool = True) -> Tensor:
    """(T, D) sums of the ``rows`` that (T, P) ``index`` names, in order and in fp32.

    Args:
        spare (bool): the last of the ``rows`` is zeros, and is used where ``index`` is -1.
    """
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    (T, columns), D = index.shape, rows.shape[1]
    if not columns:
        return rows.new_zeros(T, D)

    add = torch.add if is_traced(rows) else Tensor.add_  # as in take

    def summed(index: Tensor) -> Tensor:
        first, *others = index.unbind(1)
        total = rows.index_select(0, first).to(wide)
        for column in others:
            total = add(total, rows.index_select(0, column))
        return total

    if not spare:
        terms = [take(rows, column).to(wide) for column in index.unbind(1)]
        return functools.reduce(torch.add, terms).to(rows.dtype)
    index = torch.where(index < 0, rows.shape[0] - 1, index)
    if is_traced(rows) or T * D <= _BLOCK_OF_SUMS:
        return summed(index).to(rows.dtype)
    out, size = rows.new_empty(T, D), max(1, _BLOCK_OF_SUMS // D)
    for part, at in zip(out.split(size), index.split(size)):
        part.copy_(summed(at))
    return out


def _may_mix(x: Tensor) -> bool:
    """Whether the ranks must meet before messages of the device of ``x``.

    The n-th collective of a rank is that of the others, whatever it is for. A rank that goes on alone,
    after an exception or with a loss that leaves a layer out, is elsewhere, and gloo ends a
    process whose message has another size than expected. It never takes one kind of collective for
    another: ranks wait, and time out with errors that say where. So tokens and gradients are sent
    by all-to-all. Before them, forward has an all_gather, whose size is that of the group alone, and all
    else an all_reduce of two numbers: a backward, a fetch, and what ranks compare or plan by.
    """
    return x.device.type == "cpu" and local_tensor_mode() is None


def counter_maximum(counter: Tensor, value: Tensor) -> Tensor:
    """The counter after ``value``, computed outside of dispatch modes.

    A checkpoint whose policy keeps the results of all ops would return the counter of its forward
    when it recomputes, and later calls would be forgotten.
    """
    plain = not torch.compiler.is_compiling() and type(value) is Tensor
    has_modes = plain and is_traced(value)
    with _disable_current_modes() if has_modes else contextlib.nullcontext():
        return torch.maximum(counter, value)


# Names of kinds of messages in errors; all others are "combine".
_PHASES = {
    "agree": "comparison",
    "sizes": "exchange of sizes",
    "counts": "counts of an online plan",
    "rows": "dispatch",
    "backward": "comparison before backward",
    "experts": "fetch of experts",
    "expert_grads": "return of their gradients",
}


# -- one level


class Exchange:
    """Sends rows and slots to the ranks of a group with ``all_to_all_single``.

    Args:
        group (ProcessGroup): rank r of it holds the experts ``[r*E/W, (r+1)*E/W)``.
        num_experts (int): E, a multiple of the W ranks.
        capacity (int, optional): rows for every pair of ranks; None for compact.

    Keyword Args:
        level (str): name for error messages and accounting.
        columns (int): numbers for a rank in an exchange of sizes of the group, which a static route
            sends in vain.
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_experts: int,
        capacity: int | None,
        *,
        level: str,
        columns: int = 0,
    ) -> None:
        self.group_name = group.group_name
        self.ranks = dist.get_process_group_ranks(group)
        self.num_ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.num_experts = num_experts
        self.local_experts = num_experts // self.num_ranks
        self.capacity = capacity
        self.level, self.columns = level, columns
        # Its owner, for error messages.
        self.owner = "token switch"
        # Most rows that a pair of ranks needed since the last check; -1 for none, to avoid a new graph.
        self.needed = torch.tensor(-1, dtype=torch.int32, device=scalar_device(group))
        # Counts of count_wire_bytes.
        self.counter: WireBytes | None = None
        # Rows and parts (width, dtype) of the last static message to the experts.
        self._last_message: tuple[int, list[tuple[int, torch.dtype]]] | None = None

    @property
    def group(self) -> ProcessGroup:
        try:
            group = c10d._resolve_process_group(self.group_name)
            # A group made later may have the name of a destroyed one.
            if dist.get_process_group_ranks(group) == self.ranks:
                return group
        except (RuntimeError, ValueError, KeyError):
            pass
        raise RuntimeError(
            f"{self.owner}: its process group of ranks {self.ranks} was destroyed; call "
            "parallelize_module on a new model"
        )

    # -- planning

    def demand(self, idx: Tensor, num_ranks: int | None = None) -> Demand:
        """Ranks of the (T, K) int64 expert ids; -1 and E are no expert.

        Args:
            num_ranks (int, optional): ranks that share the experts. Default: W
        """
        W = self.num_ranks if num_ranks is None else num_ranks
        K = idx.shape[1]
        dest = torch.div(idx, self.num_experts // W, rounding_mode="floor")
        if W <= K:
            # -1 and W have separate columns, which are cut off.
            goes = idx.new_zeros(idx.shape[0], W + 2).scatter(1, dest + 1, 1)
            ranks = torch.arange(W, device=idx.device)
            columns = torch.where(goes.narrow(1, 1, W) > 0, ranks, W)
        else:
            slots = torch.arange(K, device=idx.device)
            same = dest.unsqueeze(2) == dest.unsqueeze(1)
            columns = dest.masked_fill((same & (slots[:, None] > slots)).any(2), W)
        token_of, row_of, _, row_counts = torch._moe_permutation(columns, W)
        _, slot_of, _, slot_counts = torch._moe_permutation(dest, W)
        return Demand(dest, columns, token_of, row_of, row_counts, slot_of, slot_counts)

    def exchange_counts(
        self, *columns: Tensor, calls: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """C columns of (W) integers, one for each rank -> (W, C) sent and (W, C) received.

        On CPU also the largest ``calls`` of the ranks, (1) int32; None is 0.
        """
        mine = torch.stack(columns, dim=1).int()
        if _may_mix(mine):
            every, calls = self._gather(mine, "sizes", calls)
            self._check_kind(every, sizes=True)
            return mine, every.unflatten(1, mine.shape).select(1, self.rank), calls
        sent = mine
        if torch.compiler.is_compiling():
            sent = mine + unmerged_zero(mine.device).int()
        return mine, self.send(sent, EVEN, "sizes"), None

    def wait_for_all(self, x: Tensor, calls: Tensor | None = None) -> Tensor | None:
        """Waits until all ranks are about to send ``x``, if no exchange of sizes comes before it.

        Returns:
            Tensor, optional: as the last one of :meth:`exchange_counts`.
        """
        if not _may_mix(x):
            return None
        none = x.new_full((self.num_ranks * self.columns,), -1, dtype=torch.int32)
        every, calls = self._gather(none, "rows", calls)
        self._check_kind(every, sizes=False)
        return calls

    def _check_kind(self, every: Tensor, sizes: bool) -> None:
        """Raises where some ranks exchange sizes, which are not negative, and others have a capacity."""
        if is_traced(every) or bool(((every >= 0) == sizes).all()):
            return
        raise RuntimeError(
            f"{self.owner}: the layer must be the same on all ranks, or have a capacity on all; this "
            f"one has {'none' if sizes else self.capacity}, and others have {'one' if sizes else 'none'}"
        )

    def _maximum(self, x: Tensor) -> Tensor:
        """``x`` of the ranks, the largest of each element."""
        if is_traced(x):
            return funcol.wait_tensor(funcol.all_reduce(x, "max", self.group_name))
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def _gather(
        self, x: Tensor, kind: str, calls: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(W, n) int32 ``x`` of all ranks, and the largest ``calls``."""
        x = x.flatten()
        # In a graph, or no call; a number is no fake tensor.
        if calls is None or isinstance(x, FakeTensor):
            calls = unmerged_zero(x.device).int()
        message = torch.cat([x, calls])
        self._count(message)
        every = self.named(kind, functools.partial(self._all_gather, message))
        every = every.view(self.num_ranks, -1)
        return every[:, :-1], every[:, -1:].amax(0)

    def _all_gather(self, x: Tensor) -> Tensor:
        if is_traced(x):
            out = funcol.all_gather_single(x, 0, self.group_name)
            return funcol.wait_tensor(out)
        out = x.new_empty(self.num_ranks * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x, group=self.group)
        return out

    def _count(self, x: Tensor) -> None:
        """Counts ``x`` as sizes for all other ranks."""
        if self.counter is not None:
            size = x.numel() * x.element_size()
            self.counter.add(self.level, "sizes", self.num_ranks - 1, {"sizes": size})

    def compact(self, demand: Demand, rows: Splits, slots: Splits) -> Route:
        """Route without padding, with the sizes that the host has read."""
        num_rows, columns = rows.num_sent, demand.columns.shape[1]
        token = demand.token_of.narrow(0, 0, num_rows).long()
        return Route(
            rows,
            slots,
            token // max(columns, 1),
            demand.row_of.long(),
            demand.slot_of.long(),
            demand.columns,
            demand.dest,
            rows.flipped().num_sent,
            slots.flipped().num_sent,
        )

    def static(self, demand: Demand) -> Route:
        """Route with ``capacity`` rows for every pair of ranks."""
        (T, K), columns = demand.dest.shape, demand.columns.shape[1]
        W, capacity = self.num_ranks, self.capacity
        if capacity is None:
            raise AssertionError("static route without a capacity")
        begin = demand.row_counts.cumsum(0) - demand.row_counts
        # How many rows for the same rank come before this one.
        rank = demand.columns.clamp(0, W - 1)
        nth = demand.row_of - begin[rank]
        fits = (demand.row_of >= 0) & (nth < capacity)
        row_index = torch.where(fits, rank * capacity + nth, -1)
        # One extra place for everything without a row.
        rows = torch.where(fits, row_index, W * capacity).flatten()
        at = torch.arange(T * columns, device=rows.device) // max(columns, 1)
        token = at.new_full((W * capacity + 1,), T).scatter(0, rows, at)
        needed = demand.row_counts.max()
        if torch.compiler.is_compiling() or not isinstance(needed, FakeTensor):
            self.needed = counter_maximum(self.needed.to(needed.device), needed)
        route = Route(
            EVEN,
            EVEN,
            token.narrow(0, 0, W * capacity).clone(),
            row_index,
            row_index,
            demand.columns,
            demand.dest,
            W * capacity,
            W * capacity * K,
        )
        route.slot_index = route.slots_in_rows(K)
        return route

    # -- communication

    def dispatch(
        self,
        route: Route,
        values: Tensor,
        weights: Tensor,
        idx: Tensor,
        *,
        find_slots: bool,
        scale_bytes: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(T, D) values, (T, K) weights and expert ids -> those of the received rows.

        Args:
            find_slots (bool): whether ``route.recv_slot`` is needed.
            scale_bytes (int): bytes of the values that are FP8 scales.

        Returns:
            (M, D) values and (M, K) weights, views of one message, and (M, K) int64 ids
            of the experts of this rank, -1 for all others.
        """
        # Unused rows of a static route have no expert. A graph needs such a row to index.
        fill: list[Any] | None = None
        if route.is_static or torch.compiler.is_compiling():
            fill = [0, 0, -1]
        marked, stride = (
            fill and not torch.compiler.is_compiling(),
            self.num_experts + 2,
        )
        if marked:
            idx = idx + (1 + route.mark * stride)
            fill = [0, 0, route.mark * stride]
        parts = [(t.shape[1], t.dtype) for t in (values, weights)]
        parts.append((idx.shape[1], torch.int32))
        if marked:
            self._last_message = len(route.send_token), parts
            route.calls = self.wait_for_all(values, route.calls)
        message = pack([values, weights, idx.int()], fill, route.send_token)
        kinds = {
            "rows": values.shape[1] * values.element_size() - scale_bytes,
            "weights": weights.shape[1] * weights.element_size(),
            "ids": idx.shape[1] * 4,
            "scales": scale_bytes,
        }
        message = self.send(message, route.rows, "rows", kinds)
        values, weights, ids = unpack(message, parts)
        ids = ids.long()
        if marked:
            route.marks = torch.div(ids, stride, rounding_mode="floor")
            ids = ids - (1 + route.marks * stride)
        ids = ids - self.rank * self.local_experts
        ids = ids.masked_fill(ids >= self.local_experts, -1).clamp_min(-1)
        if find_slots and not route.is_static:
            route.recv_slot = self._positions(ids >= 0, route.num_slots)
        return values, weights, ids

    def announce(self, mark: int) -> bool:
        """Sends ``mark``, and no tokens, to ranks that expect a static message like the last one.

        Returns:
            bool: whether all ranks have sent it. One host sync.
        """
        if self._last_message is None:
            raise AssertionError("announce before a static message")
        rows, parts = self._last_message
        message = empty_message(rows, parts, self.needed.device).zero_()
        self.wait_for_all(message)
        stride = self.num_experts + 2
        unpack(message, parts)[-1].fill_(mark * stride)
        ids = unpack(self.send(message, EVEN, "rows"), parts)[-1]
        return bool((torch.div(ids, stride, rounding_mode="floor") == mark).all())

    def _positions(self, here: Tensor, size: int) -> Tensor:
        """(size) positions of the slots that are here, in the flat (M, K)."""
        flat = here.flatten()
        place = torch.where(flat, flat.cumsum(0) - 1, size)
        out = place.new_zeros(size + 1)
        at = torch.arange(flat.shape[0], device=flat.device)
        # Not a view, which a traced autograd function can't return.
        return out.scatter(0, place, at).narrow(0, 0, size).clone()

    def send_rows(self, route: Route, x: Tensor) -> Tensor:
        """(T, D) of the tokens -> (M, D) of the received rows."""
        if torch.compiler.is_compiling():
            return self.send(rows_or(x, route.send_token, 0), route.rows, "rows")
        if route.is_static or not x.shape[0]:
            x = torch.cat([x, x.new_zeros(1, x.shape[1])])
        return self.send(x.index_select(0, route.send_token), route.rows, "rows")

    def return_rows(
        self, route: Route, rows: Tensor, weight_grads: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(M, D) of the received rows -> (T, D): sum over ranks.

        Args:
            weight_grads (Tensor, optional): (M, K), to the slots they belong to.

        Returns:
            (T, D) sums, and (T, K) of ``weight_grads``.
        """
        rows, grads = self.send_back(route.rows, rows, weight_grads)
        if grads is not None:
            index = route.slots_in_rows(grads.shape[1])
            grads = take(grads.contiguous().flatten(), index)
        return sum_in_order(rows, route.row_index, self.has_spare(route.rows)), grads

    @staticmethod
    def has_spare(splits: Splits) -> bool:
        """Whether :meth:`send_back` appends a row of zeros.

        A graph would copy all rows for it. A static route has a row of zeros already.
        """
        return splits.send is not None or not torch.compiler.is_compiling()

    def send_back(
        self, splits: Splits, rows: Tensor, weight_grads: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Sends rows that were received with ``splits`` back, see :meth:`has_spare`."""
        spare, splits = self.has_spare(splits), splits.flipped()
        if weight_grads is None:
            return self.send(rows, splits, "returned", spare=spare), None
        kinds = {
            "returned": rows.shape[1] * rows.element_size(),
            "weight_grads": weight_grads.shape[1] * weight_grads.element_size(),
        }
        message = pack([rows, weight_grads])
        message = self.send(message, splits, "returned", kinds, spare=spare)
        parts = [(t.shape[1], t.dtype) for t in (rows, weight_grads)]
        rows, weight_grads = unpack(message, parts)
        return rows, weight_grads

    def slots_of(self, route: Route, values: Tensor) -> Tensor:
        """(M, K) -> the values of the received slots."""
        values = values.contiguous().flatten()
        return values if route.recv_slot is None else values[route.recv_slot]

    def rows_to_slots(self, route: Route, rows: Tensor, K: int) -> Tensor:
        """(M, D) of the received rows -> one row per received slot."""
        if route.recv_slot is None:
            return rows.repeat_interleave(K, dim=0)
        return rows.index_select(0, route.recv_slot // max(K, 1))

    def send(
        self,
        x: Tensor,
        splits: Splits,
        kind: str,
        kinds: dict[str, int] | None = None,
        *,
        spare: bool = False,
    ) -> Tensor:
        """Rows of ``x`` to their ranks.

        Args:
            kind (str): kind of message, for accounting and errors.
            kinds (dict[str, int], optional): bytes of a row by kind, if it has
                several parts.
            spare (bool): appends a row of zeros to what arrives.
        """
        if self.counter is not None:
            # Bytes that a rank sends to itself do not count.
            send, rows = splits.send, x.shape[0]
            rows -= rows // self.num_ranks if send is None else send[self.rank]
            width = x.element_size() * (x.shape[1] if x.dim() > 1 else 1)
            self.counter.add(self.level, kind, rows, kinds or {kind: width})
        return self.named(kind, functools.partial(self._send, x, splits, spare))

    def named(self, kind: str, work: Callable[[], R]) -> R:
        """Returns ``work()`` and adds a note to its errors that says where they occurred."""
        try:
            return work()
        except RuntimeError as error:
            if not torch.compiler.is_compiling():
                error.add_note(self._failure(kind))
            raise

    def _send(self, x: Tensor, splits: Splits, spare: bool) -> Tensor:
        x, group = x.contiguous(), self.group_name
        if is_traced(x):
            out = funcol.all_to_all_single(x, splits.recv, splits.send, group)
            out = funcol.wait_tensor(out)
            return with_row(out) if spare else out
        # Not the functional collective: waiting for its tensor takes longer than a small message,
        # and its threads outlive the group.
        rows = x.shape[0] if splits.recv is None else sum(splits.recv)
        out = x.new_empty((rows + spare, *x.shape[1:]))
        out.narrow(0, rows, int(spare)).zero_()
        operands = out.narrow(0, 0, rows), x, splits.recv, splits.send
        dist.all_to_all_single(*operands, group=self.group)
        return out

    def _failure(self, kind: str) -> str:
        phase = _PHASES.get(kind, "combine")
        where = f"{self.owner}: {phase} failed at level {self.level!r}"
        # It does not ask who was missing. A lost store would not answer, and a Python thread that
        # waits in c10d while the interpreter shuts down aborts the process.
        where += f", group {self.group_name!r} of ranks {self.ranks}"
        return f"{where}, on rank {self.ranks[self.rank]}"

    @property
    def levels(self) -> tuple[Exchange]:
        """As those of a token switch, for an exchange that is used alone."""
        return (self,)

    def use_own_groups(self) -> None:
        """Communicates over a group that nobody else uses, see :func:`own_group`."""
        self.group_name = own_group(self.group)


# Of a meeting before messages whose sizes differ between layers.
MEETS_FOR = "message (1 for a comparison, 1 + n for the online plan of layer n)"


def meet(
    levels: tuple[Exchange, ...], x: Tensor, kind: str, values: dict[str, int | Tensor]
) -> None:
    """Raises on all ranks of the ``levels``, before ``x`` is sent, if they have other ``values``.

    Args:
        kind (str): kind of message, for errors.
        values (dict[str, int or Tensor]): by what they are, all but the first below 2**31. One of
            0 says that a rank has no values; they equal any others.
    """
    if not _may_mix(x):
        return
    # One number: gloo takes twice as long for four as for two.
    numbers = (
        torch.as_tensor(value, dtype=torch.int64, device=x.device).reshape(1)
        for value in values.values()
    )
    mine = next(numbers)
    known = mine > 0
    for number in numbers:
        mine, known = mine * 2**31 + number, known & (number > 0)
    bounds = torch.cat([mine, -mine]).masked_fill(~known, torch.iinfo(torch.int64).min)
    if torch.compiler.is_compiling():
        # What is of constants alone would not stay in the graph of the backward, before ``x``.
        bounds = bounds + x[:1].isnan().sum().clamp(0, 0) + unmerged_zero(x.device)
    for level in levels:
        if kind != "agree":  # once, and beside objects of any size
            level._count(bounds)
        bounds = level.named(kind, functools.partial(level._maximum, bounds))
    error = f"{levels[0].owner}: the %s must be the same on all ranks"
    if is_traced(x):
        torch._assert_async(bounds[0] <= -bounds[1], error % " and the ".join(values))
        return
    most, least = bounds.tolist()
    if most <= -least:
        return
    upper = 0  # digits of the values before
    for at, (what, value) in enumerate(values.items(), 1 - len(values)):
        low, high = (n // 2 ** (-31 * at) - upper for n in (-least, most))
        if low != high:
            raise RuntimeError(
                f"{error % what}, they have {low} to {high}, this one {int(value)}"
            )
        upper = (upper + low) * 2**31


def read_on_host(*tables: Tensor) -> list[list[list[int]]]:
    """Columns of the (W, C) tables: the one host sync of compact routing."""
    values = torch.cat([t.flatten() for t in tables]).cpu().tolist()
    columns, at = [], 0
    for table in tables:
        size, width = table.numel(), table.shape[1]
        columns.append([values[at + c : at + size : width] for c in range(width)])
        at += size
    if torch.compiler.is_compiling():
        for value in values:
            torch._check(value >= 0)
    return columns
