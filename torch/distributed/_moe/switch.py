"""Token switches: what moves tokens to the ranks of their experts and back.

Terms are those of exchange.py: T tokens, K slots of the router per token, W ranks, E
experts; compact and static routes.

    TokenSwitchAllToAll      one all-to-all each way, any backend, CPU included
    TokenSwitchHierarchical  one all-to-all between nodes, one inside the node, each way

Combine modes
    reduce   experts return one row per received row, already summed over the slots on
             that rank; the source adds the rows of its ranks. Fewest bytes.
    exact    dispatch hands out one row per slot, and one row per slot returns, so that
             the source adds the same terms in the same order as one rank would:
             output, input gradient and router gradient are the bits of
             expert-parallel degree 1. The way there still carries each token once
             per rank.

Collectives of a layer, per level: compact 3 in forward (sizes, rows with their ids and
weights, rows back), of which the host reads the sizes once for all levels; static 2. 2 in
backward. The backward of dispatch is combine and the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, Literal, TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._moe.exchange import (
    decode,
    Demand,
    encode,
    Exchange,
    read_on_host,
    Route,
    Splits,
    sum_in_order,
    take,
)
from torch.distributed._moe.groups import SameOnAllRanks
from torch.distributed._token_switch import Routing, TokenSwitch


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = [
    "check_ids",
    "check_switch",
    "check_tokens",
    "NewTensorsSwitch",
    "run_experts",
    "TokenSwitchAllToAll",
    "TokenSwitchHierarchical",
]


@dataclass(slots=True, eq=False)
class _Handle:
    """Routing of one batch, used by both directions and backwards.

    Attributes:
        top_k (int): K.
        recv_rows (int): rows that dispatch returns.
        num_slots (int): bound of the rows that the local experts compute.
        sizes (tuple): splits of rows and of slots, of levels that are not routed yet.
        routes (list[Route]): one per level, in the order of dispatch. Those behind the
            first are known once the rows have arrived there.
    """

    top_k: int
    recv_rows: int
    num_slots: int
    sizes: tuple[Splits, Splits] | None
    routes: list[Route]


def _handle_of(routing: Routing) -> _Handle:
    return cast("_Handle", routing.handle)


def check_switch(name: str, num_experts: int, num_ranks: int) -> None:
    if num_experts < 1 or num_experts % num_ranks:
        raise ValueError(
            f"{name}: num_experts must be a multiple of the {num_ranks} ranks "
            f"that share them, got {num_experts}"
        )


def check_ids(name: str, topk_idx: Tensor, num_experts: int, layout: str) -> None:
    if layout != "flat":
        raise ValueError(f"{name}: layout must be 'flat', got {layout!r}")
    if topk_idx.dim() != 2 or topk_idx.is_floating_point():
        raise ValueError(
            f"{name}: topk_idx must be an integer tensor of shape (T, K), got "
            f"{topk_idx.dtype} of shape {tuple(topk_idx.shape)}"
        )
    # Without a sync where the ids are on a device.
    torch._assert_async(
        (topk_idx.clamp(-1, num_experts) == topk_idx).all(),
        f"{name}: topk_idx must be in [-1, num_experts]; -1 and num_experts mean "
        "no expert",
    )


def check_tokens(
    name: str, topk_idx: Tensor, tokens: Tensor, topk_weights: Tensor
) -> None:
    if tokens.dim() != 2 or tokens.shape[0] != topk_idx.shape[0]:
        raise ValueError(
            f"{name}: tokens must have shape (T, D) with T = "
            f"{topk_idx.shape[0]}, got {tuple(tokens.shape)}"
        )
    if topk_weights.shape != topk_idx.shape:
        raise ValueError(
            f"{name}: topk_weights must have shape (T, K) = "
            f"{tuple(topk_idx.shape)}, got {tuple(topk_weights.shape)}"
        )


def run_experts(
    rows: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    num_rows: int | None = None,
    **options: Any,
) -> Tensor:
    """:func:`torch.nn.functional.moe_mlp` of dispatched rows, with a bound of their slots.

    Args:
        rows, ids, weights (Tensor): (M, D), (M, K) and (M, K) of ``dispatch``.
        w_in, w_out (Tensor): of the local experts.
        num_rows (int, optional): ``num_slots`` of the switch: the rows that memory is
            needed for. Default: None (M * K)
        options: of :func:`torch.nn.functional.moe_mlp`.
    """
    # pyrefly: ignore[missing-attribute]
    return F._moe_mlp_in_rows(
        rows, ids, weights, w_in, w_out, num_rows=num_rows, **options
    )


class NewTensorsSwitch(TokenSwitch):
    """Token switch whose transport makes its outputs."""

    ranks: list[int]

    # pyrefly: ignore[bad-override]
    def _alloc_dispatch_outputs(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("dispatch makes its outputs")

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
        if rows is None:
            raise AssertionError("a switch of this module knows its rows")
        results = self._dispatch_new(routing, tokens, topk_weights, rows)
        for out, result in zip((out_tokens, out_topk_weights, out_topk_idx), results):
            if out is not None:
                # pyrefly: ignore[bad-argument-type]
                out.copy_(result)

    def _combine(
        self, routing: Routing, expert_tokens: Tensor, out_tokens: Tensor
    ) -> None:
        out_tokens.copy_(self._combine_new(routing, expert_tokens))


class TokenSwitchAllToAll(NewTensorsSwitch):
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
    are operands of :func:`run_experts`.

    Attributes:
        levels (tuple[Exchange, ...]): where the communication happens.
        ranks (list[int]): global ranks in the order of the experts that they hold.

    Example::
        >>> # xdoctest: +SKIP("needs a process group")
        >>> switch = TokenSwitchAllToAll(group, num_experts=64)
        >>> routing = switch.create_routing(topk_indices, layout="flat")
        >>> rows, weights, ids = switch.dispatch(routing, tokens, topk_weights)
        >>> R = switch.num_slots(routing)
        >>> out = run_experts(rows, ids, weights, w_in, w_out, R)  # local ones
        >>> y = switch.combine(routing, out)
    """

    levels: tuple[Exchange, ...]
    ranks: list[int]

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
            num_experts, dist.get_process_group_ranks(group), combine, wire_dtype
        )
        self._check_capacity("capacity", capacity)
        self.levels = (Exchange(group, num_experts, capacity, level="flat"),)

    def _check_options(
        self,
        num_experts: int,
        ranks: list[int],
        combine: str,
        wire_dtype: torch.dtype | None,
    ) -> None:
        name = type(self).__name__
        check_switch(name, num_experts, len(ranks))
        if combine not in ("reduce", "exact"):
            raise ValueError(
                f"{name}: combine must be 'reduce' or 'exact', got {combine!r}"
            )
        if wire_dtype not in (None, torch.bfloat16, torch.float8_e4m3fn):
            raise ValueError(
                f"{name}: wire_dtype must be None, torch.bfloat16 or "
                f"torch.float8_e4m3fn, got {wire_dtype}"
            )
        self._num_experts = num_experts
        self.ranks = ranks
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

    def name_owner(self, owner: str) -> None:
        """What the switch belongs to, for the errors of its communication."""
        for level in self.levels:
            level.owner = owner

    def use_own_groups(self) -> None:
        """See :meth:`Exchange.use_own_group`; collective, and nothing the second time."""
        for level in self.levels:
            level.use_own_group()

    def create_routing(
        self,
        topk_idx: Tensor,
        per_expert_token_counts: Tensor | None = None,
        *,
        layout: str = "flat",
    ) -> Routing:
        """Plans the way of the tokens of this rank; compact: exchanges sizes.

        Args:
            topk_idx (Tensor): (T, K) integer expert ids in [-1, E]; -1 and E mean
                no expert. K must be equal on all ranks.
            per_expert_token_counts (Tensor, optional): (E/W) int32, filled with
                the token copies that the ranks have for this rank's experts, which
                takes one more collective per level.

        Keyword Args:
            layout (str): only ``"flat"``. Default: ``"flat"``
        """
        name = type(self).__name__
        check_ids(name, topk_idx, self._num_experts, layout)
        self._must_agree(
            num_experts=self._num_experts,
            K=topk_idx.shape[1],
            combine="exact" if self._exact else "reduce",
            capacity=self.capacity,
            wire_dtype=self._wire_dtype,
        )
        idx = topk_idx.long()
        handle = self._plan(idx)
        if per_expert_token_counts is not None:
            counts = idx.new_zeros(self._num_experts + 2).scatter_add(
                0, (idx + 1).flatten(), torch.ones_like(idx).flatten()
            )
            counts = counts.narrow(0, 1, self._num_experts)
            for level in self.levels:
                counts = counts.view(level.num_ranks, -1)
                counts = level.exchange_counts(*counts.unbind(1))[1].sum(0)
            per_expert_token_counts[: len(counts)].copy_(counts)
        return Routing(handle=handle, topk_idx=topk_idx, layout=layout)

    def _must_agree(self, **values: object) -> None:
        """Raises on all ranks where ``values`` differ; see :class:`SameOnAllRanks`."""
        if torch.compiler.is_compiling():
            return
        if self._agreed is None:
            groups = [level.group for level in self.levels]
            self._agreed = SameOnAllRanks(type(self).__name__, groups)
        self._agreed.check(**values)

    def _plan(self, idx: Tensor) -> _Handle:
        """Routing of (T, K) int64 ids, of the first level at least."""
        (level,) = self.levels
        demand = level.demand(idx)
        if level.capacity is not None:
            return self._handle(level.static(demand), level)
        rows, slots = demand.row_counts, demand.slot_counts
        mine, theirs = level.exchange_counts(rows, slots, *self._shape(rows, idx))
        (send, send_slots), (recv, recv_slots) = self._read(
            mine[:, :2], theirs[:, :2], agree=theirs[:, 2:]
        )
        route = level.compact(
            demand, Splits(send, recv), Splits(send_slots, recv_slots)
        )
        return self._handle(route, level)

    def _handle(
        self,
        route: Route,
        last: Exchange,
        sizes: tuple[Splits, Splits] | None = None,
    ) -> _Handle:
        """Of the first level's route, and what arrives at the last level."""
        K = route.dest.shape[1]
        if last.capacity is not None:
            rows = last.num_ranks * last.capacity
            slots = rows * K
        elif sizes is None:
            rows, slots = route.num_rows, route.num_slots
        else:
            rows, slots = (splits.flipped().num_sent for splits in sizes)
        return _Handle(K, slots if self._exact else rows, slots, sizes, [route])

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
        return _handle_of(routing).num_slots

    def _exact_recv_tokens(self, routing: Routing) -> int:
        return _handle_of(routing).recv_rows

    def _next_route(self, handle: _Handle, idx: Tensor) -> Route:
        """Route of the level behind those that are routed, for the ids that arrived."""
        raise AssertionError("the only level is routed in create_routing")

    def _dispatch_new(
        self,
        routing: Routing,
        tokens: Tensor,
        topk_weights: Tensor,
        max_recv_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        name, handle = type(self).__name__, _handle_of(routing)
        if max_recv_tokens < handle.recv_rows:
            raise ValueError(
                f"{name}: max_recv_tokens must be at least the "
                f"{handle.recv_rows} received rows, got {max_recv_tokens}"
            )
        check_tokens(name, routing.topk_idx, tokens, topk_weights)
        self._must_agree(
            D=tokens.shape[1],
            tokens_dtype=tokens.dtype,
            topk_weights_dtype=topk_weights.dtype,
        )
        D, scale_bytes = tokens.shape[1], 0
        values, weights, ids = tokens, topk_weights, routing.topk_idx.long()
        if self._wire_dtype is not None:
            values = encode(tokens, self._wire_dtype)
            scale_bytes = values.shape[1] - D
        for i, level in enumerate(self.levels):
            if i == len(handle.routes):
                handle.routes.append(self._next_route(handle, ids))
            values, weights, ids = level.dispatch(
                handle.routes[i],
                values,
                weights,
                ids,
                find_slots=self._exact,
                scale_bytes=scale_bytes,
            )
        if self._wire_dtype is not None:
            values = decode(values, self._wire_dtype, D, tokens.dtype)
        if self._exact:
            level, route = self.levels[-1], handle.routes[-1]
            values = level.rows_to_slots(route, values, handle.top_k)
            weights = level.slots_of(route, weights).unsqueeze(1)
            ids = level.slots_of(route, ids).unsqueeze(1)
        return values, weights, ids

    def _combine_new(self, routing: Routing, expert_tokens: Tensor) -> Tensor:
        rows = self._exact_recv_tokens(routing)
        if expert_tokens.dim() != 2 or expert_tokens.shape[0] != rows:
            raise ValueError(
                f"{type(self).__name__}: expert_tokens must have shape (M, D) with M = "
                f"{rows} dispatched rows, got {tuple(expert_tokens.shape)}"
            )
        return self._return(_handle_of(routing), expert_tokens, None)[0]

    def _return(
        self, handle: _Handle, rows: Tensor, weight_grads: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Expert outputs or gradients -> (T, D), summed in fp32; and of the weights."""
        for i in reversed(range(len(self.levels))):
            level, route = self.levels[i], handle.routes[i]
            if not self._exact:
                rows, weight_grads = level.return_rows(route, rows, weight_grads)
                continue
            rows, weight_grads = level.return_slots(route, rows, weight_grads)
            index = route.slot_index
            if i:
                # What returned, in the order in which the level before received it.
                index = self.levels[i - 1].slots_of(handle.routes[i - 1], index)
                rows = take(rows, index)
            else:
                rows = sum_in_order(rows, index)
            if weight_grads is not None:
                weight_grads = take(weight_grads.contiguous().flatten(), index)
                weight_grads = weight_grads.unsqueeze(1) if i else weight_grads
        return rows, weight_grads

    def _dispatch_backward(
        self,
        routing: Routing,
        grad_tokens: Tensor | None,
        grad_topk_weights: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        rows = grad_tokens
        if rows is None:
            if grad_topk_weights is None:
                return None, None
            rows = grad_topk_weights.new_empty(grad_topk_weights.shape[0], 0)
        rows, grad_topk_weights = self._return(
            _handle_of(routing), rows, grad_topk_weights
        )
        return None if grad_tokens is None else rows, grad_topk_weights

    def _dispatch_grad(
        self,
        routing: Routing,
        grad_out_tokens: Tensor,
        expert_shape: torch.Size,
        expert_dtype: torch.dtype,
    ) -> Tensor:
        handle, rows = _handle_of(routing), grad_out_tokens.to(expert_dtype)
        for level, route in zip(self.levels, handle.routes):
            rows = level.send_rows(route, rows)
        if self._exact:
            rows = self.levels[-1].rows_to_slots(handle.routes[-1], rows, handle.top_k)
        return rows

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


class TokenSwitchHierarchical(TokenSwitchAllToAll):
    """Token switch that crosses the node boundary once per token and node.

    With N nodes of L ranks each, rank (n, l) of the mesh is expert-parallel rank
    ``n * L + l``: it holds the experts of that E/(N*L)-th.

    Dispatch sends each token once to every node n with one of its experts, from rank
    (m, l) to the rank (n, l) of the same local index, and that rank sends it once to every
    rank of the node with one of its experts. Where several ranks of a node have experts
    of a token, the slower network between nodes carries it once, not once per rank.
    Combine is the way back: with ``combine="reduce"`` rows are summed on the expert rank,
    then on the relay, then at the source; with ``"exact"`` the relay forwards the rows of
    all slots, and the source adds them in slot order.

    The relay computes the second level's routing from the ids that it received. In
    compact mode every rank tells the relays beforehand how much each rank of the node
    will get, so that the sizes of both levels are read in one host sync.

    Args:
        mesh (DeviceMesh): (N, L) nodes and ranks of a node.
        num_experts (int): number E of experts, a multiple of the N * L ranks.

    Keyword Args:
        combine (str): ``"reduce"`` or ``"exact"``. Default: ``"reduce"``
        capacity (tuple[int, int], optional): rows for every pair of nodes and for
            every pair of ranks of a node, which makes all shapes static. Rows that the
            first level has no room for do not reach the second, so that a rerun may
            find that the second is too small as well. Default: None
        wire_dtype (torch.dtype, optional): as of :class:`TokenSwitchAllToAll`. Rows
            are rounded once, at their source. Default: None

    Its methods are those of :class:`TokenSwitchAllToAll`; ``required_capacity`` returns
    one number per level.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        num_experts: int,
        *,
        combine: Literal["reduce", "exact"] = "reduce",
        capacity: tuple[int, int] | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        if mesh.ndim != 2:
            raise ValueError(
                f"{name}: mesh must have 2 dimensions (node, local), got "
                f"{mesh.ndim} of shape {tuple(mesh.shape)}"
            )
        self._check_options(
            num_experts, mesh.mesh.flatten().tolist(), combine, wire_dtype
        )
        node, local = self._capacities(capacity)
        groups, per_node = mesh.get_all_groups(), num_experts // mesh.size(0)
        for dim in range(2):
            # Groups of a mesh are sorted, whatever the order in the mesh.
            if (mesh.mesh.diff(dim=dim) <= 0).any():
                raise ValueError(
                    f"{name}: ranks must ascend in each dimension of mesh, got "
                    f"{mesh.mesh.tolist()}"
                )
        self.levels = (
            Exchange(groups[0], num_experts, node, level="node"),
            Exchange(groups[1], per_node, local, level="local"),
        )

    def _capacities(
        self, capacity: tuple[int, int] | None
    ) -> tuple[int | None, int | None]:
        if capacity is None:
            return None, None
        if not isinstance(capacity, tuple) or len(capacity) != 2:
            raise ValueError(
                f"{type(self).__name__}: capacity must be None or a tuple (rows per "
                f"pair of nodes, rows per pair of ranks of a node), got {capacity!r}"
            )
        for value in capacity:
            self._check_capacity("capacity", value)
        return capacity

    @property
    # pyrefly: ignore[bad-override]
    def capacity(self) -> tuple[int, int] | None:
        """Rows for every pair of nodes, and of ranks of a node; None for compact."""
        node, local = (level.capacity for level in self.levels)
        return None if node is None or local is None else (node, local)

    @capacity.setter
    def capacity(self, capacity: tuple[int, int] | None) -> None:
        for level, value in zip(self.levels, self._capacities(capacity)):
            level.capacity = value

    def required_capacity(self) -> tuple[int, int]:
        """Capacity that the static routings since the last call needed, per level.

        Collective over the mesh, and one sync.
        """
        node, local = self._required()
        return node, local

    def _plan(self, idx: Tensor) -> _Handle:
        node, local = self.levels
        demand = node.demand(idx)
        if node.capacity is not None:
            return self._handle(node.static(demand), local)
        first, second = self._sizes(idx, demand)
        return self._handle(node.compact(demand, *first), local, second)

    def _next_route(self, handle: _Handle, idx: Tensor) -> Route:
        # What arrived is routed again: ids of the node's experts.
        local = self.levels[1]
        demand = local.demand(idx)
        if handle.sizes is None:
            return local.static(demand)
        return local.compact(demand, *handle.sizes)

    def _sizes(self, idx: Tensor, demand: Demand) -> list[tuple[Splits, Splits]]:
        """Exact sizes of both levels, in one host sync."""
        node, local = self.levels
        N, L = node.num_ranks, local.num_ranks
        ranks = node.demand(idx, N * L)
        rows, slots = ranks.row_counts.view(N, L), ranks.slot_counts.view(N, L)
        mine, theirs = node.exchange_counts(
            demand.row_counts,
            demand.slot_counts,
            *self._shape(demand.row_counts, idx),
            *rows.unbind(1),
            *slots.unbind(1),
        )
        # What the tokens that arrive here from all nodes need of each rank.
        relayed = theirs[:, 4:].sum(0).view(2, L)
        sent, received = local.exchange_counts(*relayed.unbind(0))
        tables = (mine[:, :2], theirs[:, :2], sent, received)
        read = self._read(*tables, agree=theirs[:, 2:4])
        return [
            (Splits(send[0], recv[0]), Splits(send[1], recv[1]))
            for send, recv in (read[:2], read[2:])
        ]
