"""One level of expert-parallel communication: tokens to the ranks of a group and back.

:class:`Exchange` is what token switches are made of. The flat switch has one, the
hierarchical switch one between nodes and one inside the node.

Terms (T tokens, K slots of the router per token, W ranks, E experts, E/W per rank)
    row      a token on its way to one rank. A token with several slots on a rank
             travels there once.
    slot     one (token, k) pair
    compact  buffers have the exact number of rows, and ids and router weights travel
             only for the slots of the destination. The sizes are read on the host.
    static   every pair of ranks has ``capacity`` rows of K slots. Nothing is read on
             the host; rows that do not fit are counted on the device.

Every direction is a gather, an all-to-all and another gather, so that no float is
added atomically, and nothing here branches on data: a branch would need a host sync,
break a graph, or be impossible for the many ranks of one LocalTensorMode process (where
sizes differ by rank too, and a dimension of such a size cannot be sliced with ``[:]``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false


if TYPE_CHECKING:
    from torch.distributed._moe.accounting import WireBytes
    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = [
    "Demand",
    "Exchange",
    "Route",
    "Sizes",
    "Splits",
    "read_on_host",
    "sum_in_order",
    "take",
]


@dataclass(frozen=True, slots=True)
class Splits:
    """Rows to and from each rank; None where all pairs of ranks have as many."""

    send: list[int] | None
    recv: list[int] | None

    @property
    def num_sent(self) -> int:
        """To all ranks, where pairs of ranks differ."""
        if self.send is None:
            raise AssertionError("even splits have no numbers of rows")
        return sum(self.send)

    def flipped(self) -> Splits:
        return Splits(self.recv, self.send)


EVEN = Splits(None, None)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Splits of the rows and of the slots of a compact route."""

    rows: Splits
    slots: Splits


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """Which ranks the tokens of this rank go to.

    Attributes:
        dest (Tensor): (T, K) int64 rank of each slot, W for no expert.
        is_first (Tensor): (T, K) bool, the token's first slot on that rank.
        row_counts (Tensor): (W) int64 rows for each rank.
        slot_counts (Tensor): (W) int64 slots for each rank.
    """

    dest: Tensor
    is_first: Tensor
    row_counts: Tensor
    slot_counts: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Routing of one batch over one level, used by both directions and backwards.

    Attributes:
        sizes (Sizes): splits of what is sent to the experts.
        send_token (Tensor): (rows sent) int64 token of the row; static: -1 if unused.
        send_slot (Tensor): (slots sent) int64 slot ``t * K + k``; static: -1 if unused.
        row_index (Tensor): (T, K) int64 returned row to add for the slot, or -1. A row
            belongs to the first of its slots.
        slot_index (Tensor): (T, K) int64 returned slot, or -1.
        recv_idx (Tensor): (M, K) int64 local expert ids of the received rows, -1 none.
        recv_slot (Tensor, optional): (slots received) int64 position of the slot in
            ``recv_idx``; None if every position has one, in order.
    """

    sizes: Sizes
    send_token: Tensor
    send_slot: Tensor
    row_index: Tensor
    slot_index: Tensor
    recv_idx: Tensor
    recv_slot: Tensor | None


def take(source: Tensor, index: Tensor) -> Tensor:
    """Rows of ``source``, zeros where ``index`` is -1."""
    size = source.shape[0]
    if torch.compiler.is_compiling():
        some = guard_or_false(size > 0)
    else:
        # LocalTensorMode has a size per rank, which cannot be compared.
        some = type(size) is int and size > 0
    if some:
        rows = source[index.clamp_min(0)]
        missing = (index < 0).view(index.shape + (1,) * (source.dim() - 1))
        return rows.masked_fill(missing, 0)
    padded = torch.cat([source, source.new_zeros((1,) + source.shape[1:])])
    return padded[torch.where(index < 0, size, index)]


class Exchange:
    """Sends rows and slots to the ranks of a group with ``all_to_all_single``.

    Args:
        group (ProcessGroup): rank r of it holds the experts ``[r*E/W, (r+1)*E/W)``.
        num_experts (int): E, a multiple of the W ranks.
        capacity (int, optional): rows for every pair of ranks; None for compact.

    Keyword Args:
        level (str): name for error messages and accounting.
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_experts: int,
        capacity: int | None,
        *,
        level: str,
    ) -> None:
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self.num_experts = num_experts
        self.capacity = capacity
        self.level = level
        # Largest number of rows that a pair of ranks needed since the last check.
        self.needed: Tensor | None = None
        # Where accounting.count_wire_bytes has its counts written to.
        self.counter: WireBytes | None = None

    def demand(self, idx: Tensor, num_ranks: int | None = None) -> Demand:
        """Ranks of the (T, K) int64 expert ids; every id outside [0, E) is no expert.

        Args:
            num_ranks (int, optional): that share the experts; W by default.
        """
        W = self.num_ranks if num_ranks is None else num_ranks
        valid = (idx >= 0) & (idx < self.num_experts)
        dest = torch.where(valid, idx // (self.num_experts // W), W)
        slots = torch.arange(idx.shape[1], device=idx.device)
        earlier = slots[:, None] > slots
        same = dest.unsqueeze(2) == dest.unsqueeze(1)
        is_first = valid & ~(same & earlier).any(dim=2)
        return Demand(
            dest,
            is_first,
            _count(torch.where(is_first, dest, W), W),
            _count(dest, W),
        )

    def exchange_counts(self, *columns: Tensor) -> tuple[Tensor, Tensor]:
        """(W) integers for every rank each -> (W, C) sent and (W, C) received."""
        mine = torch.stack(columns, dim=1).int()
        return mine, self.send(mine, EVEN, "sizes")

    def plan(self, idx: Tensor, demand: Demand, sizes: Sizes | None) -> Route:
        """Exchanges the expert ids of the (T, K) slots.

        Args:
            sizes (Sizes, optional): of a compact route; None for static.
        """
        if sizes is None:
            return self._plan_static(idx, demand)
        return self._plan_compact(idx, demand, sizes)

    def _plan_compact(self, idx: Tensor, demand: Demand, sizes: Sizes) -> Route:
        T, K = idx.shape
        num_rows, num_slots = sizes.rows.num_sent, sizes.slots.num_sent
        order = torch.argsort(demand.dest.flatten(), stable=True)
        # Rows are in the order of their first slots, by rank and then by token.
        row = demand.is_first.flatten()[order].cumsum(0) - 1
        rows = torch.arange(num_rows, device=idx.device)
        send_token = order[torch.searchsorted(row, rows)] // max(K, 1)
        send_slot = order.narrow(0, 0, num_slots)
        at = torch.arange(T * K, device=idx.device)
        slot_index = torch.empty_like(order).scatter(0, order, at).view(T, K)
        row_index = row[slot_index].masked_fill(~demand.is_first, -1)
        slot_index = slot_index.masked_fill(demand.dest == self.num_ranks, -1)
        # All that is on the wire of rows and slots: a bit that starts a new row, and k.
        slots = torch.arange(K, device=idx.device)
        ids = idx % (self.num_experts // self.num_ranks)
        ids = ((ids * K + slots) * 2 + demand.is_first).flatten()[send_slot].int()
        ids = self.send(ids, sizes.slots, "ids").long()
        recv_row = (ids % 2).cumsum(0) - 1
        slot = ids // 2
        recv_slot = recv_row * K + slot % max(K, 1)
        received = sizes.rows.flipped().num_sent
        recv_idx = ids.new_full((received * K,), -1)
        recv_idx = recv_idx.index_copy(0, recv_slot, slot // max(K, 1))
        return Route(
            sizes,
            send_token,
            send_slot,
            row_index,
            slot_index,
            recv_idx.view(received, K),
            recv_slot,
        )

    def _plan_static(self, idx: Tensor, demand: Demand) -> Route:
        T, K = idx.shape
        W, capacity = self.num_ranks, self.capacity
        if capacity is None:
            raise AssertionError("static route without a capacity")
        # How many rows for the same rank come before the one of this slot.
        at_rank = idx.new_zeros(T, W + 1).scatter(1, demand.dest, 1)
        nth = (at_rank.cumsum(0) - 1).gather(1, demand.dest)
        fits = (demand.dest < W) & (nth < capacity)
        row = torch.where(fits, demand.dest * capacity + nth, -1)
        row_index = row.masked_fill(~demand.is_first, -1)
        slots = torch.arange(K, device=idx.device)
        slot_index = torch.where(fits, row * K + slots, -1)
        at = torch.arange(T * K, device=idx.device)
        send_token = _invert(row_index, at // max(K, 1), W * capacity)
        send_slot = _invert(slot_index, at, W * capacity * K)
        needed = demand.row_counts.max()
        self.needed = (
            needed if self.needed is None else torch.maximum(self.needed, needed)
        )
        local = idx % (self.num_experts // W)
        ids = (take(local.flatten() + 1, send_slot) - 1).int()
        ids = self.send(ids, EVEN, "ids").long()
        return Route(
            Sizes(EVEN, EVEN),
            send_token,
            send_slot,
            row_index,
            slot_index,
            ids.view(W * capacity, K),
            None,
        )

    def send(
        self, x: Tensor, splits: Splits, kind: str, scale_bytes: int = 0
    ) -> Tensor:
        """Rows of ``x`` to their ranks; the only place that communicates.

        Args:
            kind (str): what it is, for accounting.
            scale_bytes (int): how many bytes of a row are FP8 scales.
        """
        if self.counter is not None:
            self.counter.add(self, x, splits.send, kind, scale_bytes)
        out = funcol.all_to_all_single(
            x.contiguous(), splits.recv, splits.send, self.group
        )
        return funcol.wait_tensor(out)

    def send_rows(self, route: Route, x: Tensor, scale_bytes: int = 0) -> Tensor:
        """(T, D) of the tokens -> (M, D) of the received rows."""
        rows = self._gather(route, x, route.send_token)
        return self.send(rows, route.sizes.rows, "rows", scale_bytes)

    def send_slots(self, route: Route, values: Tensor) -> Tensor:
        """(T, K) of the slots -> one value per received slot."""
        slots = self._gather(route, values.flatten(), route.send_slot)
        return self.send(slots, route.sizes.slots, "weights")

    def return_rows(self, route: Route, rows: Tensor) -> Tensor:
        """(M, D) of the received rows -> (T, D): sum over ranks in slot order."""
        rows = self.send(rows, route.sizes.rows.flipped(), "returned")
        return sum_in_order(rows, route.row_index)

    def return_slots(
        self, route: Route, slots: Tensor, kind: str = "returned"
    ) -> Tensor:
        """One row per received slot -> one per sent slot; ``slot_index`` names them."""
        return self.send(slots, route.sizes.slots.flipped(), kind)

    def slots_of(self, route: Route, values: Tensor) -> Tensor:
        """(M, K) -> the values of the received slots."""
        values = values.flatten()
        return values if route.recv_slot is None else values[route.recv_slot]

    def slots_to_matrix(self, route: Route, slots: Tensor) -> Tensor:
        """Inverse of :meth:`slots_of`: (M, K), 0 where there is no slot."""
        if route.recv_slot is None:
            return slots.view(route.recv_idx.shape)
        out = slots.new_zeros(route.recv_idx.numel())
        return out.index_copy(0, route.recv_slot, slots).view(route.recv_idx.shape)

    def rows_to_slots(self, route: Route, rows: Tensor) -> Tensor:
        """(M, D) of the received rows -> one row per received slot."""
        K = route.recv_idx.shape[1]
        if route.recv_slot is None:
            return rows.repeat_interleave(K, dim=0)
        return rows[route.recv_slot // max(K, 1)]

    def _gather(self, route: Route, source: Tensor, index: Tensor) -> Tensor:
        # A compact route has no unused places.
        return source[index] if route.recv_slot is not None else take(source, index)


def sum_in_order(rows: Tensor, index: Tensor) -> Tensor:
    """(T, D) sums of the ``rows`` that (T, K) ``index`` names, from k = 0 on, in fp32."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = rows.new_zeros(index.shape[0], rows.shape[1], dtype=wide)
    for k in index.unbind(1):
        total = total + take(rows, k)
    return total.to(rows.dtype)


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


def _count(dest: Tensor, num_ranks: int) -> Tensor:
    """(W) int64 how often each rank occurs; ``num_ranks`` is not counted."""
    flat = dest.flatten()
    counts = flat.new_zeros(num_ranks + 1)
    return counts.scatter_add(0, flat, torch.ones_like(flat))[:num_ranks]


def _invert(index: Tensor, value: Tensor, size: int) -> Tensor:
    """(size) the flat ``value`` at each (T, K) ``index``, -1 at places without one."""
    # One place too many: where everything goes that has no index.
    out = index.new_full((size + 1,), -1)
    index = torch.where(index < 0, size, index)
    return out.scatter(0, index.flatten(), value)[:size]
