"""Token switch over functional all-to-all collectives: any backend, CPU included.

Terms (T tokens, K slots of the router per token, W ranks, E experts, E/W per rank)
    row      a token on its way to one rank. A token with several slots on a rank
             travels there once, with the local expert id of every slot.
    slot     one (token, k) pair
    compact  buffers have the exact number of rows. The row and slot counts of every
             pair of ranks are exchanged and read on the host: the one sync, in
             :meth:`TokenSwitchAllToAll.create_routing`.
    static   every pair of ranks has ``capacity`` rows. Nothing is read on the host;
             rows that do not fit are counted and reported by ``check_overflow``.

Combine modes
    reduce   experts return one row per received row, already summed over the slots on
             that rank; the source adds the rows of its ranks. Fewest bytes.
    exact    dispatch hands out one row per slot, and one row per slot returns, so that
             the source adds the same terms in the same order as one rank would:
             output, input gradient and router gradient are the bits of
             expert-parallel degree 1. The way there still carries each token once
             per rank.

Both directions are gathers and both backwards reuse the routing: the backward of
dispatch is combine and the other way round, and no float is ever added atomically.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed._moe import wire
from torch.distributed._token_switch import Routing, TokenSwitch


if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from torch.distributed.distributed_c10d import ProcessGroup

    R = TypeVar("R")


__all__ = ["TokenSwitchAllToAll", "grow_and_rerun"]


@dataclass(frozen=True, slots=True)
class _Splits:
    """Rows to and from each rank; None where all are ``capacity``."""

    send: list[int] | None
    recv: list[int] | None

    def flipped(self) -> _Splits:
        return _Splits(self.recv, self.send)


@dataclass(frozen=True, slots=True, eq=False)
class _Handle:
    """Routing of one batch, made once and used by both directions and backwards.

    Attributes:
        rows (_Splits): of the dispatched rows.
        slots (_Splits): of what returns: the rows, or in exact mode the slots.
        send_token (Tensor): (rows sent) int64, token of the row, -1 if unused.
        here (Tensor): (rows sent, K) bool, slots of the token on the row's rank.
        slot_row (Tensor): (T, K) int64, row of the slot, -1 if it has none.
        slot_return (Tensor): (T, K) int64, returned row to add for the slot, or
            -1. In reduce mode a row belongs to its first slot only.
        expand (Tensor, optional): exact mode, (slots received) int64 position of the
            slot in the received (rows, K).
        recv_idx (Tensor): local expert ids that dispatch returns, -1 not here.
    """

    rows: _Splits
    slots: _Splits
    send_token: Tensor
    here: Tensor
    slot_row: Tensor
    slot_return: Tensor
    expand: Tensor | None
    recv_idx: Tensor


def _take(source: Tensor, index: Tensor) -> Tensor:
    """Rows of ``source``, zeros where ``index`` is -1."""
    if source.shape[0] == 0:
        return source.new_zeros(index.shape + source.shape[1:])
    rows = source[index.clamp_min(0)]
    return rows.masked_fill(
        (index < 0).view(index.shape + (1,) * (source.dim() - 1)), 0
    )


class TokenSwitchAllToAll(TokenSwitch):
    """Token switch that sends rows with ``all_to_all_single``.

    Args:
        group (ProcessGroup): ranks that share the experts; rank r of it holds the
            experts ``[r * E/W, (r + 1) * E/W)``.
        num_experts (int): number E of experts, a multiple of the W ranks.

    Keyword Args:
        combine (str): ``"reduce"`` or ``"exact"``. Default: ``"reduce"``
        capacity (int, optional): rows for every pair of ranks, which makes all
            shapes static; ``None`` sends exactly what there is. Default: None
        wire_dtype (torch.dtype, optional): precision of token rows on the way to
            the experts: ``torch.bfloat16``, or ``torch.float8_e4m3fn`` with one
            power-of-two scale per 128 values. Gradients and the way back keep
            the dtype of the tokens. Default: None (the dtype of the tokens)

    ``dispatch`` returns in reduce mode the received rows (M, D), their weights
    (M, K) float and local expert ids (M, K) int64 with -1 for slots that are on
    other ranks; in exact mode the same with one row per slot and K = 1. Both are
    operands of :func:`torch.nn.functional.moe_mlp`.

    Example::
        >>> # xdoctest: +SKIP("needs a process group")
        >>> switch = TokenSwitchAllToAll(group, num_experts=64)
        >>> routing = switch.create_routing(topk_indices, layout="flat")
        >>> rows, weights, ids = switch.dispatch(routing, tokens, topk_weights)
        >>> out = F.moe_mlp(rows, ids, weights, w_in, w_out)  # local experts
        >>> y = switch.combine(routing, out)
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_experts: int,
        *,
        combine: Literal["reduce", "exact"] = "reduce",
        capacity: int | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._group = group
        self._num_ranks = dist.get_world_size(group)
        if num_experts < 1 or num_experts % self._num_ranks:
            raise ValueError(
                "TokenSwitchAllToAll: num_experts must be a multiple of the "
                f"{self._num_ranks} ranks of group, got {num_experts}"
            )
        if combine not in ("reduce", "exact"):
            raise ValueError(
                "TokenSwitchAllToAll: combine must be 'reduce' or 'exact', "
                f"got {combine!r}"
            )
        if capacity is not None and capacity < 1:
            raise ValueError(
                f"TokenSwitchAllToAll: capacity must be at least 1, got {capacity}"
            )
        wire.check_dtype(wire_dtype)
        self._num_experts = num_experts
        self._exact = combine == "exact"
        self._wire_dtype = wire_dtype
        self.capacity = capacity
        # Largest number of rows a pair of ranks needed since the last check.
        self._needed: Tensor | None = None

    def create_routing(
        self,
        topk_idx: Tensor,
        per_expert_token_counts: Tensor | None = None,
        *,
        layout: str = "flat",
    ) -> Routing:
        """Exchanges counts and expert ids for the tokens of this rank.

        Args:
            topk_idx (Tensor): (T, K) integer expert ids in [-1, E]; -1 and E mean
                no expert. K must be equal on all ranks.
            per_expert_token_counts (Tensor, optional): (E/W) int32, filled with
                the token copies that this rank's experts receive.

        Keyword Args:
            layout (str): only ``"flat"``. Default: ``"flat"``
        """
        if layout != "flat":
            raise ValueError(
                f"TokenSwitchAllToAll: layout must be 'flat', got {layout!r}"
            )
        if topk_idx.dim() != 2 or topk_idx.is_floating_point():
            raise ValueError(
                "TokenSwitchAllToAll: topk_idx must be an integer tensor of shape "
                f"(T, K), got {topk_idx.dtype} of shape {tuple(topk_idx.shape)}"
            )
        idx = topk_idx.long()
        # Without a sync where the ids are on a device.
        torch._assert_async(
            ((idx >= -1) & (idx <= self._num_experts)).all(),
            "TokenSwitchAllToAll: topk_idx must be in [-1, num_experts]; -1 and "
            "num_experts mean no expert",
        )
        local = self._num_experts // self._num_ranks
        valid = (idx >= 0) & (idx < self._num_experts)
        dest = torch.where(valid, idx // local, self._num_ranks)
        first = _first_slot(dest)
        make = self._compact if self.capacity is None else self._static
        handle = make(idx, dest, first)
        if per_expert_token_counts is not None:
            ids = handle.recv_idx.flatten()
            ids = torch.where(ids < 0, local, ids)
            counts = ids.new_zeros(local + 1).scatter_add_(0, ids, ids * 0 + 1)
            per_expert_token_counts[:local].copy_(counts[:local])
        return Routing(handle=handle, topk_idx=topk_idx, layout=layout)

    def _compact(self, idx: Tensor, dest: Tensor, first: Tensor) -> _Handle:
        T, K = idx.shape
        W = self._num_ranks
        is_first = (first == torch.arange(K, device=idx.device)) & (dest < W)
        row_order, row_counts = _sort_by_rank(torch.where(is_first, dest, W), W)
        slot_order, slot_counts = _sort_by_rank(dest, W)
        # K and E travel along: ranks that disagree on them would exchange garbage.
        width = torch.full_like(row_counts, K)
        experts = torch.full_like(row_counts, self._num_experts)
        mine = torch.stack([row_counts, slot_counts, width, experts], dim=1)
        theirs = self._exchange(mine, _Splits(None, None))
        # The documented sync: exact buffer sizes.
        sizes = torch.stack([mine, theirs]).permute(0, 2, 1).tolist()
        (send, send_slots, _, _), (recv, recv_slots, widths, totals) = sizes
        for name, values in (("K", widths), ("num_experts", totals)):
            if min(values) != max(values):
                raise RuntimeError(
                    f"TokenSwitchAllToAll: {name} must be the same on all ranks, "
                    f"ranks 0 to {W - 1} have {values}"
                )
        row_order = row_order[: sum(send)]
        send_token = row_order // max(K, 1)
        slot_row = _inverse(row_order, T, K).gather(1, first.clamp_max(max(K - 1, 0)))
        slot_row = slot_row.masked_fill(dest == W, -1)
        rows = _Splits(send, recv)
        here, recv_idx = self._send_ids(idx, dest, send_token, rows, row_counts)
        if not self._exact:
            slot_return = slot_row.masked_fill(~is_first, -1)
            return _Handle(
                rows, rows, send_token, here, slot_row, slot_return, None, recv_idx
            )
        expand = torch.argsort((recv_idx < 0).flatten(), stable=True)
        expand = expand[: sum(recv_slots)]
        return _Handle(
            rows,
            _Splits(send_slots, recv_slots),
            send_token,
            here,
            slot_row,
            _inverse(slot_order[: sum(send_slots)], T, K),
            expand,
            recv_idx.flatten()[expand][:, None],
        )

    def _static(self, idx: Tensor, dest: Tensor, first: Tensor) -> _Handle:
        T, K = idx.shape
        W, capacity = self._num_ranks, self.capacity
        if capacity is None:
            raise AssertionError("static layout without a capacity")
        slots = torch.arange(K, device=idx.device)
        is_first = (first == slots) & (dest < W)
        key = torch.where(is_first, dest, W)
        order, counts = _sort_by_rank(key, W)
        begin = counts.cumsum(0) - counts
        nth = _inverse(order, T, K) - torch.cat([begin, begin.new_zeros(1)])[key]
        row = torch.where(is_first & (nth < capacity), key * capacity + nth, -1)
        # One place too many: where everything goes that has no row.
        token = torch.arange(T, device=idx.device)[:, None].expand(T, K)
        send_token = idx.new_full((W * capacity + 1,), -1)
        send_token.scatter_(
            0, torch.where(row < 0, W * capacity, row).flatten(), token.flatten()
        )
        send_token = send_token[:-1]
        slot_row = row.gather(1, first).masked_fill(dest == W, -1)
        needed = counts.max()
        self._needed = (
            needed if self._needed is None else torch.maximum(self._needed, needed)
        )
        even = _Splits(None, None)
        here, recv_idx = self._send_ids(idx, dest, send_token, even, None)
        if not self._exact:
            slot_return = slot_row.masked_fill(~is_first, -1)
            return _Handle(
                even, even, send_token, here, slot_row, slot_return, None, recv_idx
            )
        slot_return = torch.where(slot_row < 0, -1, slot_row * K + slots)
        expand = torch.arange(recv_idx.numel(), device=idx.device)
        return _Handle(
            even,
            even,
            send_token,
            here,
            slot_row,
            slot_return,
            expand,
            recv_idx.view(-1, 1),
        )

    def _send_ids(
        self,
        idx: Tensor,
        dest: Tensor,
        send_token: Tensor,
        splits: _Splits,
        row_counts: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(rows sent, K) slots of the row's rank, (rows received, K) local ids."""
        ranks = torch.arange(self._num_ranks, device=idx.device)
        if row_counts is None:
            rank = ranks.repeat_interleave(self.capacity)
        else:
            rank = ranks.repeat_interleave(row_counts, output_size=send_token.shape[0])
        token = send_token.clamp_min(0)
        if idx.shape[0] == 0:
            # A rank without tokens still has its static rows to send.
            here = torch.zeros(
                send_token.shape[0], idx.shape[1], dtype=torch.bool, device=idx.device
            )
            ids = here.int() - 1
        else:
            here = (dest[token] == rank[:, None]) & (send_token >= 0)[:, None]
            local = idx[token] % (self._num_experts // self._num_ranks)
            ids = torch.where(here, local, -1).int()
        return here, self._exchange(ids, splits).long()

    def _exchange(self, x: Tensor, splits: _Splits) -> Tensor:
        """Rows of ``x`` to their ranks; the only place that communicates."""
        out = funcol.all_to_all_single(
            x.contiguous(), splits.recv, splits.send, self._group
        )
        return funcol.wait_tensor(out)

    def _exact_recv_tokens(self, routing: Routing) -> int:
        return routing.handle.recv_idx.shape[0]

    def _dispatch_rows(self, handle: _Handle, rows: Tensor) -> Tensor:
        """(T, D) tokens or their gradients -> rows for the experts."""
        rows = self._exchange(_take(rows, handle.send_token), handle.rows)
        if handle.expand is None:
            return rows
        return rows[handle.expand // max(handle.here.shape[1], 1)]

    def _return_rows(self, handle: _Handle, rows: Tensor) -> Tensor:
        """Expert outputs or gradients -> (T, D): sum in slot order, in fp32."""
        rows = self._exchange(rows, handle.slots.flipped())
        T, K = handle.slot_return.shape
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        total = rows.new_zeros(T, rows.shape[1], dtype=wide)
        for k in range(K):
            total = total + _take(rows, handle.slot_return[:, k])
        return total.to(rows.dtype)

    def _dispatch_new(
        self,
        routing: Routing,
        tokens: Tensor,
        topk_weights: Tensor,
        max_recv_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        handle = routing.handle
        if max_recv_tokens < handle.recv_idx.shape[0]:
            raise ValueError(
                "TokenSwitchAllToAll: max_recv_tokens must be at least the "
                f"{handle.recv_idx.shape[0]} received rows, got {max_recv_tokens}"
            )
        if tokens.dim() != 2 or tokens.shape[0] != routing.topk_idx.shape[0]:
            raise ValueError(
                "TokenSwitchAllToAll: tokens must have shape (T, D) with T = "
                f"{routing.topk_idx.shape[0]}, got {tuple(tokens.shape)}"
            )
        if topk_weights.shape != routing.topk_idx.shape:
            raise ValueError(
                "TokenSwitchAllToAll: topk_weights must have shape (T, K) = "
                f"{tuple(routing.topk_idx.shape)}, got {tuple(topk_weights.shape)}"
            )
        if self._wire_dtype is None:
            out_tokens = self._dispatch_rows(handle, tokens)
        else:
            packed = self._dispatch_rows(handle, wire.encode(tokens, self._wire_dtype))
            out_tokens = wire.decode(
                packed, self._wire_dtype, tokens.shape[1], tokens.dtype
            )
        weights = _take(topk_weights, handle.send_token)
        weights = weights.masked_fill(~handle.here, 0)
        out_weights = self._exchange(weights, handle.rows)
        if handle.expand is not None:
            out_weights = out_weights.flatten()[handle.expand][:, None]
        # A copy, as the routing keeps its own for the backward.
        return out_tokens, out_weights, handle.recv_idx.clone()

    def _combine_new(self, routing: Routing, expert_tokens: Tensor) -> Tensor:
        rows = self._exact_recv_tokens(routing)
        if expert_tokens.dim() != 2 or expert_tokens.shape[0] != rows:
            raise ValueError(
                "TokenSwitchAllToAll: expert_tokens must have shape (M, D) with M = "
                f"{rows} dispatched rows, got {tuple(expert_tokens.shape)}"
            )
        return self._return_rows(routing.handle, expert_tokens)

    def _dispatch_grad(
        self,
        routing: Routing,
        grad_out_tokens: Tensor,
        expert_shape: torch.Size,
        expert_dtype: torch.dtype,
    ) -> Tensor:
        return self._dispatch_rows(routing.handle, grad_out_tokens.to(expert_dtype))

    def _combine_topk_weights(
        self, routing: Routing, grad_out_topk_weights: Tensor
    ) -> Tensor:
        handle = routing.handle
        grads = self._exchange(grad_out_topk_weights, handle.slots.flipped())
        K = handle.here.shape[1]
        if handle.expand is not None:
            return _take(grads[:, 0], handle.slot_return)
        slot = torch.arange(K, device=grads.device)
        flat = torch.where(handle.slot_row < 0, -1, handle.slot_row * K + slot)
        return _take(grads.flatten(), flat)

    def _alloc_dispatch_outputs(
        self,
        routing: Routing,
        tokens: Tensor,
        topk_weights: Tensor,
        max_recv_tokens: int,
        H: int,
        K: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        recv_idx = routing.handle.recv_idx
        return (
            tokens.new_empty(recv_idx.shape[0], H),
            topk_weights.new_empty(recv_idx.shape),
            torch.empty_like(recv_idx),
        )

    def _dispatch(
        self,
        routing: Routing,
        tokens: Tensor,
        topk_weights: Tensor,
        out_tokens: Tensor,
        out_topk_weights: Tensor | None,
        out_topk_idx: Tensor | None,
    ) -> None:
        rows = self._exact_recv_tokens(routing)
        results = self._dispatch_new(routing, tokens, topk_weights, rows)
        for out, result in zip((out_tokens, out_topk_weights, out_topk_idx), results):
            if out is not None:
                out.copy_(result)

    def _combine(
        self, routing: Routing, expert_tokens: Tensor, out_tokens: Tensor
    ) -> None:
        out_tokens.copy_(self._combine_new(routing, expert_tokens))

    def required_capacity(self) -> int:
        """Capacity that the static routings since the last call needed, on all ranks.

        Collective over the group, and one sync.
        """
        if self._needed is None:
            raise RuntimeError(
                "TokenSwitchAllToAll: no static routing was made since the last check"
            )
        needed = self._needed.clone()
        self._needed = None
        dist.all_reduce(needed, dist.ReduceOp.MAX, group=self._group)
        return int(needed)

    def check_overflow(self) -> None:
        """Raises on every rank if rows did not fit since the last check.

        Collective over the group, and one sync: call it once per step, before
        the optimizer uses what was computed.
        """
        if self.capacity is None:
            return
        needed = self.required_capacity()
        if needed > self.capacity:
            raise RuntimeError(
                f"TokenSwitchAllToAll: a pair of ranks needed {needed} rows but "
                f"capacity is {self.capacity}; tokens were left out. Set capacity to "
                f"at least {needed} and run the step again, see grow_and_rerun"
            )


def _first_slot(dest: Tensor) -> Tensor:
    """(T, K) -> for each slot, the token's first slot with the same destination."""
    K = dest.shape[1]
    slots = torch.arange(K, device=dest.device)
    same = dest[:, :, None] == dest[:, None, :]
    if K == 0:
        return dest
    return torch.where(same, slots, K).amin(dim=2)


def _sort_by_rank(key: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Flat positions of ``key`` by rank, then position; counts per rank."""
    flat = key.flatten()
    counts = flat.new_zeros(num_ranks + 1).scatter_add_(0, flat, flat * 0 + 1)
    return torch.argsort(flat, stable=True), counts[:num_ranks]


def _inverse(order: Tensor, T: int, K: int) -> Tensor:
    """(T, K) position in ``order`` of every flat index, -1 if it is not there."""
    inverse = order.new_full((T * K,), -1)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return inverse.view(T, K)


def grow_and_rerun(
    switches: list[TokenSwitchAllToAll], step: Callable[[], R], *, max_reruns: int = 2
) -> R:
    """Runs ``step`` and, if tokens did not fit, again with enough capacity.

    Collective over the groups of ``switches``; all ranks rerun together.

    Args:
        switches (list[TokenSwitchAllToAll]): static switches that ``step`` uses.
        step (callable): forward and backward of one step. Runs again from the
            start: it must zero its gradients itself, and change nothing else.

    Keyword Args:
        max_reruns (int): one is enough unless a rerun routes differently, as when
            a later layer routes tokens that an earlier one left out. Default: 2

    Returns:
        What the last ``step`` returned; nothing was left out in it.
    """
    for _ in range(max_reruns + 1):
        result = step()
        overflow = False
        for switch in switches:
            if switch.capacity is None:
                continue
            needed = switch.required_capacity()
            if needed > switch.capacity:
                switch.capacity, overflow = needed, True
        if not overflow:
            return result
    raise RuntimeError(
        f"grow_and_rerun: tokens still did not fit after {max_reruns} reruns; "
        f"capacities are now {[s.capacity for s in switches]}"
    )
