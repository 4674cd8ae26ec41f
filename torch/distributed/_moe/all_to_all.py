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
The communication itself is in exchange.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast, Literal, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._moe import wire
from torch.distributed._moe.consistency import SameOnAllRanks
from torch.distributed._moe.exchange import (
    Exchange,
    read_on_host,
    Route,
    Sizes,
    Splits,
    sum_in_order,
    take,
)
from torch.distributed._token_switch import Routing, TokenSwitch


if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = ["TokenSwitchAllToAll"]


@dataclass(frozen=True, slots=True, eq=False)
class _Handle:
    """Routing of one batch, made once and used by both directions and backwards.

    Attributes:
        routes (tuple[Route, ...]): one per level, in the order of dispatch.
        recv_idx (Tensor): local expert ids that dispatch returns, -1 not here.
    """

    routes: tuple[Route, ...]
    recv_idx: Tensor


def _handle_of(routing: Routing) -> _Handle:
    return cast("_Handle", routing.handle)


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
    other ranks; in exact mode the same with one row per slot and K = 1. All three
    are operands of :func:`torch.nn.functional.moe_mlp`.

    Attributes:
        levels (tuple[Exchange, ...]): where the communication happens.

    Example::
        >>> # xdoctest: +SKIP("needs a process group")
        >>> switch = TokenSwitchAllToAll(group, num_experts=64)
        >>> routing = switch.create_routing(topk_indices, layout="flat")
        >>> rows, weights, ids = switch.dispatch(routing, tokens, topk_weights)
        >>> R = switch.num_slots(routing)
        >>> out = F.moe_mlp(rows, ids, weights, w_in, w_out, num_rows=R)  # local experts
        >>> y = switch.combine(routing, out)
    """

    levels: tuple[Exchange, ...]

    def __init__(
        self,
        group: ProcessGroup,
        num_experts: int,
        *,
        combine: Literal["reduce", "exact"] = "reduce",
        capacity: int | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._check_options(
            num_experts, dist.get_world_size(group), combine, wire_dtype
        )
        self._check_capacity("capacity", capacity)
        self.levels = (Exchange(group, num_experts, capacity, level="flat"),)

    def _check_options(
        self,
        num_experts: int,
        num_ranks: int,
        combine: str,
        wire_dtype: torch.dtype | None,
    ) -> None:
        name = type(self).__name__
        if num_experts < 1 or num_experts % num_ranks:
            raise ValueError(
                f"{name}: num_experts must be a multiple of the {num_ranks} ranks "
                f"that share them, got {num_experts}"
            )
        if combine not in ("reduce", "exact"):
            raise ValueError(
                f"{name}: combine must be 'reduce' or 'exact', got {combine!r}"
            )
        wire.check_dtype(wire_dtype)
        self._num_experts = num_experts
        self._num_ranks = num_ranks
        self._exact = combine == "exact"
        self._wire_dtype = wire_dtype
        self._agreed: SameOnAllRanks | None = None

    def _check_capacity(self, argument: str, capacity: int | None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(
                f"{type(self).__name__}: {argument} must be at least 1, got {capacity}"
            )

    @property
    def capacity(self) -> int | tuple[int, ...] | None:
        """Rows for every pair of ranks, None for compact."""
        return self.levels[0].capacity

    @capacity.setter
    def capacity(self, capacity: int | None) -> None:
        self._check_capacity("capacity", capacity)
        self.levels[0].capacity = capacity

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
        name = type(self).__name__
        if layout != "flat":
            raise ValueError(f"{name}: layout must be 'flat', got {layout!r}")
        if topk_idx.dim() != 2 or topk_idx.is_floating_point():
            raise ValueError(
                f"{name}: topk_idx must be an integer tensor of shape (T, K), got "
                f"{topk_idx.dtype} of shape {tuple(topk_idx.shape)}"
            )
        self._must_agree(
            num_experts=self._num_experts,
            K=topk_idx.shape[1],
            combine="exact" if self._exact else "reduce",
            capacity=self.capacity,
            wire_dtype=self._wire_dtype,
        )
        idx = topk_idx.long()
        # Without a sync where the ids are on a device.
        torch._assert_async(
            ((idx >= -1) & (idx <= self._num_experts)).all(),
            f"{name}: topk_idx must be in [-1, num_experts]; -1 and num_experts mean "
            "no expert",
        )
        routes = self._plan(idx)
        recv_idx = routes[-1].recv_idx
        if self._exact:
            recv_idx = self.levels[-1].slots_of(routes[-1], recv_idx).unsqueeze(1)
        if per_expert_token_counts is not None:
            local = self._num_experts // self._num_ranks
            ids = recv_idx.flatten()
            ids = torch.where(ids < 0, local, ids)
            counts = ids.new_zeros(local + 1).scatter_add(0, ids, torch.ones_like(ids))
            per_expert_token_counts[:local].copy_(counts[:local])
        return Routing(
            handle=_Handle(routes, recv_idx), topk_idx=topk_idx, layout=layout
        )

    def _must_agree(self, **values: object) -> None:
        """Raises on all ranks where ``values`` differ; see :class:`SameOnAllRanks`."""
        if torch.compiler.is_compiling():
            return
        if self._agreed is None:
            groups = [level.group for level in self.levels]
            self._agreed = SameOnAllRanks(type(self).__name__, groups)
        self._agreed.check(**values)

    def _plan(self, idx: Tensor) -> tuple[Route, ...]:
        """Routes of the levels for (T, K) int64 ids."""
        (level,) = self.levels
        demand = level.demand(idx)
        if level.capacity is not None:
            return (level.plan(idx, demand, None),)
        rows, slots = demand.row_counts, demand.slot_counts
        mine, theirs = level.exchange_counts(rows, slots, *self._shape(rows, idx))
        (send, send_slots), (recv, recv_slots) = self._read(
            mine[:, :2], theirs[:, :2], agree=theirs[:, 2:]
        )
        sizes = Sizes(Splits(send, recv), Splits(send_slots, recv_slots))
        return (level.plan(idx, demand, sizes),)

    def _shape(self, counts: Tensor, idx: Tensor) -> tuple[Tensor, Tensor]:
        """K and E for every rank: ranks that disagree would exchange garbage."""
        return (
            torch.full_like(counts, idx.shape[1]),
            torch.full_like(counts, self._num_experts),
        )

    def _read(self, *tables: Tensor, agree: Tensor) -> list[list[list[int]]]:
        """Host values of the tables; raises if a column of ``agree`` is not constant."""
        name = type(self).__name__
        if torch.compiler.is_compiling():
            # Reading more values would only make more symbols.
            torch._assert_async(
                (agree == agree[:1]).all(),
                f"{name}: K and num_experts must be the same on all ranks",
            )
            return read_on_host(*tables)
        *columns, shapes = read_on_host(*tables, agree)
        for what, values in zip(("K", "num_experts"), shapes):
            if min(values) != max(values):
                raise RuntimeError(
                    f"{name}: {what} must be the same on all ranks, ranks 0 to "
                    f"{len(values) - 1} have {values}"
                )
        return columns

    def num_slots(self, routing: Routing) -> int:
        """Bound of the rows that the local experts compute: ``num_rows`` of moe_mlp.

        Exact in compact mode, where it saves moe_mlp the memory of empty places.
        """
        route = _handle_of(routing).routes[-1]
        if route.recv_slot is None:
            return route.recv_idx.numel()
        return route.recv_slot.shape[0]

    def _exact_recv_tokens(self, routing: Routing) -> int:
        return _handle_of(routing).recv_idx.shape[0]

    def _dispatch_rows(
        self, handle: _Handle, rows: Tensor, scale_bytes: int = 0
    ) -> Tensor:
        """(T, D) tokens or their gradients -> rows for the experts."""
        for level, route in zip(self.levels, handle.routes):
            rows = level.send_rows(route, rows, scale_bytes)
        if self._exact:
            rows = self.levels[-1].rows_to_slots(handle.routes[-1], rows)
        return rows

    def _return_slots(self, handle: _Handle, slots: Tensor, kind: str) -> Tensor:
        """One row per received slot -> the rows that the first level's slots name."""
        for i in reversed(range(len(self.levels))):
            route = handle.routes[i]
            slots = self.levels[i].return_slots(route, slots, kind)
            if i:
                # What returned, in the order in which the level before received it.
                index = self.levels[i - 1].slots_of(
                    handle.routes[i - 1], route.slot_index
                )
                slots = take(slots, index)
        return slots

    def _return_rows(self, handle: _Handle, rows: Tensor) -> Tensor:
        """Expert outputs or gradients -> (T, D): sum in slot order, in fp32."""
        if self._exact:
            slots = self._return_slots(handle, rows, "returned")
            return sum_in_order(slots, handle.routes[0].slot_index)
        for level, route in zip(reversed(self.levels), reversed(handle.routes)):
            rows = level.return_rows(route, rows)
        return rows

    def _dispatch_weights(self, handle: _Handle, weights: Tensor) -> Tensor:
        """(T, K) of the slots -> weights of the rows for the experts."""
        slots = weights
        for level, route in zip(self.levels, handle.routes):
            slots = level.send_slots(route, weights)
            weights = level.slots_to_matrix(route, slots)
        return slots.unsqueeze(1) if self._exact else weights

    def _dispatch_new(
        self,
        routing: Routing,
        tokens: Tensor,
        topk_weights: Tensor,
        max_recv_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        name, handle = type(self).__name__, _handle_of(routing)
        if max_recv_tokens < handle.recv_idx.shape[0]:
            raise ValueError(
                f"{name}: max_recv_tokens must be at least the "
                f"{handle.recv_idx.shape[0]} received rows, got {max_recv_tokens}"
            )
        if tokens.dim() != 2 or tokens.shape[0] != routing.topk_idx.shape[0]:
            raise ValueError(
                f"{name}: tokens must have shape (T, D) with T = "
                f"{routing.topk_idx.shape[0]}, got {tuple(tokens.shape)}"
            )
        if topk_weights.shape != routing.topk_idx.shape:
            raise ValueError(
                f"{name}: topk_weights must have shape (T, K) = "
                f"{tuple(routing.topk_idx.shape)}, got {tuple(topk_weights.shape)}"
            )
        self._must_agree(
            D=tokens.shape[1],
            tokens_dtype=tokens.dtype,
            topk_weights_dtype=topk_weights.dtype,
        )
        if self._wire_dtype is None:
            out_tokens = self._dispatch_rows(handle, tokens)
        else:
            D, dtype = tokens.shape[1], self._wire_dtype
            packed = wire.encode(tokens, dtype)
            packed = self._dispatch_rows(handle, packed, packed.shape[1] - D)
            out_tokens = wire.decode(packed, dtype, D, tokens.dtype)
        out_weights = self._dispatch_weights(handle, topk_weights)
        # A copy, as the routing keeps its own for the backward.
        return out_tokens, out_weights, handle.recv_idx.clone()

    def _combine_new(self, routing: Routing, expert_tokens: Tensor) -> Tensor:
        rows = self._exact_recv_tokens(routing)
        if expert_tokens.dim() != 2 or expert_tokens.shape[0] != rows:
            raise ValueError(
                f"{type(self).__name__}: expert_tokens must have shape (M, D) with M = "
                f"{rows} dispatched rows, got {tuple(expert_tokens.shape)}"
            )
        return self._return_rows(_handle_of(routing), expert_tokens)

    def _dispatch_grad(
        self,
        routing: Routing,
        grad_out_tokens: Tensor,
        expert_shape: torch.Size,
        expert_dtype: torch.dtype,
    ) -> Tensor:
        return self._dispatch_rows(
            _handle_of(routing), grad_out_tokens.to(expert_dtype)
        )

    def _combine_topk_weights(
        self, routing: Routing, grad_out_topk_weights: Tensor
    ) -> Tensor:
        handle = _handle_of(routing)
        grads = grad_out_topk_weights
        if self._exact:
            grads = grads.select(1, 0)
        else:
            grads = self.levels[-1].slots_of(handle.routes[-1], grads)
        grads = self._return_slots(handle, grads, "weight_grads")
        return take(grads, handle.routes[0].slot_index)

    def _alloc_dispatch_outputs(
        self,
        routing: Routing,
        tokens: Tensor,
        topk_weights: Tensor,
        max_recv_tokens: int,
        H: int,
        K: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        recv_idx = _handle_of(routing).recv_idx
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

    def _required(self) -> list[int]:
        """Capacity that every level needed since the last call, on all its ranks."""
        needed = [level.needed for level in self.levels if level.needed is not None]
        if len(needed) < len(self.levels):
            raise RuntimeError(
                f"{type(self).__name__}: no static routing was made since the last "
                "check"
            )
        worst = torch.stack(needed)
        for level in self.levels:
            level.needed = None
            # One group after the other reaches all ranks of a mesh.
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=level.group)
        return worst.tolist()

    def required_capacity(self) -> int | tuple[int, ...]:
        """Capacity that the static routings since the last call needed, on all ranks.

        Collective over the group, and one sync.
        """
        return self._required()[0]

    def check_overflow(self) -> None:
        """Raises on every rank if rows did not fit since the last check.

        Collective over the group, and one sync: call it once per step, before
        the optimizer uses what was computed.
        """
        if self.capacity is None:
            return
        for level, needed in zip(self.levels, self._required()):
            if level.capacity is not None and needed > level.capacity:
                where = "" if level.level == "flat" else f" of level {level.level!r}"
                raise RuntimeError(
                    f"{type(self).__name__}: a pair of ranks needed {needed} rows but "
                    f"capacity{where} is {level.capacity}; tokens were left out. Set "
                    f"it to at least {needed} and run the step again, see "
                    "grow_and_rerun"
                )

    def grow(self) -> bool:
        """Makes capacity what was needed since the last check; whether it had to.

        Collective over the group, and one sync. The answer is the same on all ranks.
        """
        if self.capacity is None:
            return False
        grew = False
        for level, needed in zip(self.levels, self._required()):
            if level.capacity is not None and needed > level.capacity:
                level.capacity, grew = needed, True
        return grew
