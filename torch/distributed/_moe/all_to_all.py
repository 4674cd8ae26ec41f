"""Token switches move tokens to the ranks of their experts and back.

Terms are those of exchange.py: T tokens, K slots of the router per token, W ranks, E
experts; compact and static routes.

    TokenSwitchAllToAll      one all-to-all each way, any backend, CPU included
    TokenSwitchHierarchical  one all-to-all between nodes, one inside the node, each way
    TokenSwitchAllGather     for decoding, in all_gather.py

Combine modes
    reduce   experts return one row per received row, already summed over the slots on
             that rank; the source adds the rows of its ranks. Fewest bytes.
    exact    dispatch returns one row per slot, and one row per slot travels back. The source
             adds the same terms in the same order as one rank would. So output, input
             gradient and router gradient have the bits of expert-parallel degree 1, if a
             row's bits do not depend on the rows beside it. The kernels of F.moe_mlp
             promise that; its composite form does not.

Collectives of a layer, per level: in forward 3 if compact (sizes, rows with their ids and
weights, rows back), where the host reads the sizes of all levels once, and 2 if static. In
backward 2, as dispatch and combine change places. On CPU one more in backward, and in a static
forward outside graphs, as ranks meet there (exchange.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, Literal, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._moe.agreement import (
    AGREED,
    check_counts,
    CheckedTokenSwitch,
    ODD,
)
from torch.distributed._moe.exchange import (
    counter_maximum,
    Demand,
    Exchange,
    meet,
    read_on_host,
    Route,
    Splits,
    sum_in_order,
    take,
)
from torch.distributed._moe.groups import scalar_device
from torch.distributed._moe.payload import decode, encode, scaled_rows
from torch.distributed._token_switch import Routing


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import ProcessGroup

    R = TypeVar("R")


__all__ = [
    "any_rank",
    "grow_and_rerun",
    "TokenSwitchAllToAll",
    "TokenSwitchHierarchical",
]


# The bits of what requires gradients are unbounded and a message is int32. 2 is a primitive root of this
# prime, so remainders of numbers that differ in one or two bits differ.
_PRIME = 2**31 - 19


@dataclass(slots=True, eq=False)
class _Handle:
    """Routing of one batch, used by both directions and backwards."""

    top_k: int
    recv_rows: int  # rows that dispatch returns
    num_slots: int  # bound of the rows that the local experts compute
    sizes: tuple[Splits, Splits] | None  # of rows and slots of a level not routed yet
    routes: list[Route]  # by level; later ones are known once rows have arrived there
    call: int | Tensor = 0  # its number, equal on all ranks; 0 if unknown
    scaled: tuple[Tensor, ...] = ()  # codes and scales of the rows, see keep_scaled


def _handle_of(routing: Routing) -> _Handle:
    return cast("_Handle", routing.handle)


class TokenSwitchAllToAll(CheckedTokenSwitch):
    """Token switch that sends rows with ``all_to_all_single``.

    Args:
        group (ProcessGroup): ranks that share the experts; rank r of it holds the
            experts ``[r * E/W, (r + 1) * E/W)``.
        num_experts (int): number E of experts, a multiple of the W ranks.

    Keyword Args:
        combine (str): ``"reduce"`` or ``"exact"``. Default: ``"reduce"``
        capacity (int, optional): rows for every pair of ranks, which makes all
            shapes static; ``None`` sends no padding. Default: None
        wire_dtype (torch.dtype, optional): precision of token rows on the way to
            the experts: ``torch.bfloat16``, or ``torch.float8_e4m3fn`` with one
            power-of-two scale per 128 values. Gradients and the way back keep
            the dtype of the tokens. Default: None (the dtype of the tokens)

    ``dispatch`` returns in reduce mode the received rows (M, D), their weights
    (M, K) float and local expert ids (M, K) int64 with -1 for slots that are on
    other ranks; in exact mode the same with one row per slot and K = 1. All three
    are operands of ``F.moe_mlp``, with ``num_slots(routing)`` as its ``num_rows``.

    Attributes:
        levels (tuple[Exchange, ...]): where the communication happens.

    Example::
        >>> # xdoctest: +SKIP("needs a process group")
        >>> switch = TokenSwitchAllToAll(group, num_experts=64)
        >>> routing = switch.create_routing(topk_indices, layout="flat")
        >>> rows, weights, ids = switch.dispatch(routing, tokens, topk_weights)
        >>> out = F.moe_mlp(rows, ids, weights, w_in, w_out)  # those of this rank
        >>> y = switch.combine(routing, out)
    """

    levels: tuple[Exchange, ...]
    # FP8 rows stay in the handle as they arrived; dispatch returns NaN instead of values.
    keep_scaled = False
    row_bytes = 0  # of a token and its weights, if known before dispatch

    def __init__(
        self,
        group: ProcessGroup,
        num_experts: int,
        *,
        combine: Literal["reduce", "exact"] = "reduce",
        capacity: int | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        ranks = dist.get_process_group_ranks(group)
        self._check_options(num_experts, ranks, combine, wire_dtype)
        (capacity,) = self._capacities(capacity)
        columns = 2 + len(AGREED)
        self.levels = (
            Exchange(group, num_experts, capacity, level="flat", columns=columns),
        )

    def _check_options(
        self,
        num_experts: int,
        ranks: list[int],
        combine: str,
        wire_dtype: torch.dtype | None,
    ) -> None:
        name = type(self).__name__
        self._set_experts(num_experts, ranks)
        if combine not in ("reduce", "exact"):
            raise ValueError(
                f"{name}: combine must be 'reduce' or 'exact', got {combine!r}"
            )
        if wire_dtype not in (None, torch.bfloat16, torch.float8_e4m3fn):
            raise ValueError(
                f"{name}: wire_dtype must be None, torch.bfloat16 or "
                f"torch.float8_e4m3fn, got {wire_dtype}"
            )
        # Largest number of a call.
        self._calls = torch.zeros(1, dtype=torch.int32, device="cpu")
        self._exact = combine == "exact"
        self._wire_dtype = wire_dtype

    def _capacities(self, capacity: Any) -> tuple[int | None, ...]:
        """Checks the capacity; one for every level."""
        name = type(self).__name__
        if isinstance(capacity, tuple):
            raise ValueError(
                f"{name}: a pair of capacities is for 'hierarchical', got {capacity}"
            )
        if capacity is not None:
            check_counts(name, capacity=capacity)
        return (capacity,)

    @property
    def capacity(self) -> int | tuple[int | None, ...] | None:
        """Rows for every pair of ranks, a tuple with several levels; None for compact."""
        values = tuple(level.capacity for level in self.levels)
        return values[0] if len(values) == 1 or values[0] is None else values

    @capacity.setter
    def capacity(self, capacity: int | tuple[int, int] | None) -> None:
        for level, value in zip(self.levels, self._capacities(capacity)):
            level.capacity = value

    def use_own_groups(self) -> None:
        """See :meth:`Exchange.use_own_groups`; collective. A second call does nothing."""
        for level in self.levels:
            level.use_own_groups()

    def create_routing(
        self,
        topk_idx: Tensor,
        per_expert_token_counts: Tensor | None = None,
        *,
        layout: str = "flat",
    ) -> Routing:
        """Routes the tokens of this rank; compact routing exchanges sizes.

        Args:
            topk_idx (Tensor): (T, K) integer expert ids in [-1, E]; -1 and E mean
                no expert. K must be equal on all ranks.
            per_expert_token_counts (Tensor, optional): (E/W) int32, filled with
                the token copies of all ranks for this rank's experts, which
                takes one more collective per level.
            layout (str): only ``"flat"``.
        """
        self._check_ids(topk_idx, layout)
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

    def _plan(self, idx: Tensor) -> _Handle:
        """Routing of (T, K) int64 ids, at least of the first level."""
        (level,) = self.levels
        demand = level.demand(idx)
        if level.capacity is not None:
            return self._handle(level.static(demand), level)
        rows, slots = demand.row_counts, demand.slot_counts
        mine, theirs, calls = level.exchange_counts(
            rows, slots, *self._shape(rows, idx), calls=self._last_call()
        )
        ranks = f"ranks 0 to {level.num_ranks - 1}"
        tables = (mine[:, :2], theirs[:, :2])
        sizes = self._read(*tables, agree=theirs[:, 2:], ranks=ranks)
        route = level.compact(demand, *(Splits(*pair) for pair in zip(*sizes)))
        handle = self._handle(route, level)
        handle.call = self._count_call(calls)
        return handle

    def _handle(
        self,
        route: Route,
        last: Exchange,
        sizes: tuple[Splits, Splits] | None = None,
    ) -> _Handle:
        """The handle from the first level's route and the rows that arrive at the last level."""
        K, rows, slots = route.dest.shape[1], route.num_rows, route.num_slots
        if last.capacity is not None:
            rows = last.num_ranks * last.capacity
            slots = rows * K
        elif sizes is not None:
            rows, slots = (splits.flipped().num_sent for splits in sizes)
        return _Handle(K, slots if self._exact else rows, slots, sizes, [route])

    def _last_call(self) -> Tensor | None:
        return None if torch.compiler.is_compiling() else self._calls

    def _count_call(self, most: Tensor | None) -> int | Tensor:
        """Number of a call, one more than the ``most`` of all ranks; 0 where no rank sent one.

        A rank that was in a graph, or failed, counted fewer than others. A recomputation that
        does not communicate has the number of its forward.
        """
        if torch.compiler.is_compiling() or type(most) is not Tensor:
            return 0
        call = most + 1
        self._calls = counter_maximum(self._calls, call)
        return call

    def _shape(self, counts: Tensor, idx: Tensor) -> tuple[Tensor, ...]:
        """Values that shapes depend on, for every rank; ranks that disagree would exchange garbage."""
        K, E = idx.shape[1], self._num_experts
        # A graph with a number would be of one layer.
        layer = 0 if torch.compiler.is_compiling() else self.layer
        values = (layer, K, E, self.row_bytes, self._grad_bits() % _PRIME)
        return tuple(torch.full_like(counts, n) for n in values)

    def _read(
        self, *tables: Tensor, agree: Tensor, ranks: str = "ranks"
    ) -> list[list[list[int]]]:
        """Host values of the tables; raises if a column of ``agree`` is not constant."""
        name = type(self).__name__
        if torch.compiler.is_compiling():
            # Reading more values would only add symbols.
            agree = agree[:, 1:]  # ranks without a graph send their layer
            torch._assert_async(
                (agree == agree[:1]).all(),
                f"{name}: {', '.join(AGREED[1:])} must be the same on all ranks",
            )
            return read_on_host(*tables)
        *columns, shapes = read_on_host(*tables, agree)
        shapes[0] = [layer or self.layer for layer in shapes[0]]
        for what, values in zip(AGREED, shapes):
            if min(values) != max(values):
                raise RuntimeError(
                    f"{name}: {what} must be the same on all ranks, {ranks} have {values}"
                )
        return columns

    def num_slots(self, routing: Routing) -> int:
        """Bound of the rows that the local experts compute: ``num_rows`` of moe_mlp.

        It is exact in compact mode, so moe_mlp allocates no empty rows.
        """
        return _handle_of(routing).num_slots

    def _exact_recv_tokens(self, routing: Routing) -> int:
        return _handle_of(routing).recv_rows

    def _dispatch_new(
        self,
        routing: Routing,
        tokens: Tensor,
        topk_weights: Tensor,
        max_recv_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        handle = _handle_of(routing)
        if max_recv_tokens < handle.recv_rows:
            raise ValueError(
                f"{type(self).__name__}: max_recv_tokens must be at least the "
                f"{handle.recv_rows} received rows, got {max_recv_tokens}"
            )
        self._check_tokens(routing.topk_idx, tokens, topk_weights)
        facts = {
            "D": tokens.shape[1],
            "tokens_dtype": tokens.dtype,
            "topk_weights_dtype": topk_weights.dtype,
        }
        # Backward sends only needed gradients.
        needs = {
            "tokens_requires_grad": tokens.requires_grad,
            "topk_weights_requires_grad": topk_weights.requires_grad,
        }
        self._must_agree(**facts, **needs)
        D, scale_bytes = tokens.shape[1], 0
        mark: int | Tensor = 0
        calls = self._last_call()
        if self.capacity is not None:
            K = topk_weights.shape[1]
            mark = self._compare_facts(K=K, **facts, capacity=self.capacity)
        values, weights, ids = tokens, topk_weights, routing.topk_idx.long()
        if self._wire_dtype is not None:
            values = encode(tokens, self._wire_dtype)
            scale_bytes = values.shape[1] - D
        for i, level in enumerate(self.levels):
            if i == len(handle.routes):
                # Received rows are routed again, by ids of the node's experts.
                demand, sizes = level.demand(ids), handle.sizes
                static = sizes is None
                route = (
                    level.static(demand) if static else level.compact(demand, *sizes)
                )
                handle.routes.append(route)
            route = handle.routes[i]
            route.mark, route.calls = mark, calls
            values, weights, ids = level.dispatch(
                route,
                values,
                weights,
                ids,
                find_slots=self._exact,
                scale_bytes=scale_bytes,
            )
            calls = route.calls
            if route.marks is not None:
                # Sizes are not exchanged. The next level informs ranks that were not reached.
                same = (route.marks == mark).all()
                mark = torch.where(same, mark, ODD)
        if handle.routes[0].is_static:
            handle.call = self._count_call(calls)
        if isinstance(mark, Tensor):
            self._same_mark(mark != ODD)
        keeps = self.keep_scaled and scale_bytes > 0
        if self._wire_dtype is not None and not keeps:
            values = decode(values, self._wire_dtype, D, tokens.dtype)
        if self._exact:
            level, route = self.levels[-1], handle.routes[-1]
            values = level.rows_to_slots(route, values, handle.top_k)
            weights = level.slots_of(route, weights).unsqueeze(1)
            ids = level.slots_of(route, ids).unsqueeze(1)
        if keeps:
            handle.scaled = scaled_rows(values, D)
            values = tokens.new_full((1, 1), torch.nan).expand(len(values), D)
        return values, weights, ids

    def _combine_new(self, routing: Routing, expert_tokens: Tensor) -> Tensor:
        self._check_expert_tokens(expert_tokens, self._exact_recv_tokens(routing))
        return self._return(_handle_of(routing), expert_tokens, None)[0]

    def _return(
        self, handle: _Handle, rows: Tensor, weight_grads: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Expert outputs or gradients -> (T, D), summed in fp32; and gradients of the weights."""
        for i in reversed(range(len(self.levels))):
            level, route = self.levels[i], handle.routes[i]
            if not self._exact:
                rows, weight_grads = level.return_rows(route, rows, weight_grads)
                continue
            rows, weight_grads = level.send_back(route.slots, rows, weight_grads)
            index = route.slot_index
            if i:
                # Returned rows, in the order in which the previous level received them.
                index = self.levels[i - 1].slots_of(handle.routes[i - 1], index)
                rows = take(rows, index)
            else:
                rows = sum_in_order(rows, index, level.has_spare(route.slots))
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
        values: dict[str, int | Tensor] = {}
        # A graph with a number would be of one layer, and a switch without a layer has none.
        if self.layer and not torch.compiler.is_compiling():
            values["number (from 1) of the layer whose backward runs"] = self.layer
        values["number (from 1) of the call whose backward runs"] = handle.call
        meet(self.levels, rows, "backward", values)
        for level, route in zip(self.levels, handle.routes):
            rows = level.send_rows(route, rows)
        if self._exact:
            rows = self.levels[-1].rows_to_slots(handle.routes[-1], rows, handle.top_k)
        return rows

    def _needed(self) -> list[int]:
        """Capacity that each level needed on all its ranks since the last call; -1 if it did not run."""
        needed = [level.needed for level in self.levels]
        worst = torch.stack([n.to(needed[0].device) for n in needed])
        for level in self.levels:
            level.needed = torch.full_like(level.needed, -1)
            # One group after the other reaches all ranks of a mesh.
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=level.group)
        return worst.tolist()

    def required_capacity(self) -> int | tuple[int, ...]:
        """Capacity needed since the last call, on all ranks. Collective, and one sync."""
        needed = self._needed()
        if min(needed) < 0:
            raise RuntimeError(
                f"{type(self).__name__}: no static routing was made since the last "
                "check"
            )
        return needed[0] if len(needed) == 1 else tuple(needed)

    def _too_small(self) -> list[tuple[Exchange, int]]:
        """Static levels that needed more than their capacity since the last call, and how much."""
        if self.capacity is None:
            return []
        pairs = zip(self.levels, self._needed())
        return [(level, n) for level, n in pairs if n > (level.capacity or n)]

    def overflow(self) -> str:
        """The error of :meth:`check_overflow`, or "" if rows fit. Collective, and one sync."""
        small = self._too_small()
        if not small:
            return ""
        level, needed = small[0]
        where = "" if level.level == "flat" else f" of level {level.level!r}"
        return (
            f"{type(self).__name__}: a pair of ranks needed {needed} rows but "
            f"capacity{where} is {level.capacity}; tokens were left out. Set it to at "
            f"least {needed} and run the step again, see grow_and_rerun"
        )

    def check_overflow(self) -> None:
        """Raises on every rank of the switch if rows did not fit since the last check.

        Collective, and one sync: call it once per step, before the optimizer's.
        """
        if error := self.overflow():
            raise RuntimeError(error)

    def grow(self) -> bool:
        """Raises capacity to what was needed; whether it had to. Collective, and one sync."""
        small = self._too_small()
        for level, needed in small:
            level.capacity = needed
        return bool(small)


class TokenSwitchHierarchical(TokenSwitchAllToAll):
    """Token switch that crosses the node boundary once per token and node.

    With N nodes of L ranks each, rank (n, l) of the mesh is expert-parallel rank
    ``n * L + l`` and holds that E/(N*L)-th of the experts.

    Dispatch sends each token once to every node n with one of its experts, from rank
    (m, l) to its relay, rank (n, l). The relay sends it once to every rank of the node
    with one of its experts. So the slower network carries a token once per node, not per rank.
    Combine is the reverse. With ``combine="reduce"`` rows are summed on the expert rank, then on
    the relay, then at the source; with ``"exact"`` the relay forwards the rows of all slots.

    The relay routes by the ids that it received. In compact mode every rank tells the
    relays beforehand how many rows each rank of the node will get, so that one host sync
    reads the sizes of both levels.

    Args:
        mesh (DeviceMesh): (N, L) nodes and ranks of a node.
        num_experts (int): number E of experts, a multiple of the N * L ranks.

    Keyword Args:
        combine (str): ``"reduce"`` or ``"exact"``. Default: ``"reduce"``
        capacity (tuple[int, int], optional): rows for every pair of nodes and for
            every pair of ranks of a node, which makes all shapes static. Rows that do not fit
            the first level do not reach the second, so a rerun may
            find that the second is too small as well. Default: None
        wire_dtype (torch.dtype, optional): as of :class:`TokenSwitchAllToAll`. Rows
            are rounded once, at their source. Default: None

    Its methods are those of :class:`TokenSwitchAllToAll`, with one capacity per level.
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
        ranks = mesh.mesh.flatten().tolist()
        self._check_options(num_experts, ranks, combine, wire_dtype)
        node, local = self._capacities(capacity)
        groups, per_node = mesh.get_all_groups(), num_experts // mesh.size(0)
        for dim in range(2):
            # Groups of a mesh are sorted, whatever its order.
            if (mesh.mesh.diff(dim=dim) <= 0).any():
                raise ValueError(
                    f"{name}: ranks must ascend in each dimension of mesh, got "
                    f"{mesh.mesh.tolist()}"
                )
        self.levels = (
            Exchange(
                groups[0],
                num_experts,
                node,
                level="node",
                columns=2 + len(AGREED) + 2 * mesh.size(1),
            ),
            Exchange(
                groups[1],
                per_node,
                local,
                level="local",
                columns=2 + 2 * len(AGREED),
            ),
        )

    def _capacities(self, capacity: Any) -> tuple[int | None, ...]:
        if capacity is None:
            return None, None
        if not isinstance(capacity, tuple) or len(capacity) != 2:
            raise ValueError(
                f"{type(self).__name__}: capacity must be None or a tuple (rows per "
                f"pair of nodes, rows per pair of ranks of a node), got {capacity!r}"
            )
        checked = super()._capacities
        return *checked(capacity[0]), *checked(capacity[1])

    def _plan(self, idx: Tensor) -> _Handle:
        node, local = self.levels
        demand = node.demand(idx)
        if node.capacity is not None:
            return self._handle(node.static(demand), local)
        (first, second), calls = self._sizes(idx, demand)
        handle = self._handle(node.compact(demand, *first), local, second)
        handle.call = self._count_call(calls)
        return handle

    def _sizes(
        self, idx: Tensor, demand: Demand
    ) -> tuple[list[tuple[Splits, Splits]], Tensor | None]:
        """Exact sizes of both levels, in one host sync, and the largest number of calls."""
        node, local = self.levels
        N, L = node.num_ranks, local.num_ranks
        ranks = node.demand(idx, N * L)
        rows, slots = ranks.row_counts.view(N, L), ranks.slot_counts.view(N, L)
        mine, theirs, calls = node.exchange_counts(
            demand.row_counts,
            demand.slot_counts,
            *self._shape(demand.row_counts, idx),
            *rows.unbind(1),
            *slots.unbind(1),
            calls=self._last_call(),
        )
        # Rows for each rank, of the tokens that arrive here from all nodes.
        shapes, relayed = (
            theirs.narrow(1, 2, len(AGREED)),
            theirs[:, 2 + len(AGREED) :],
        )
        relayed = relayed.sum(0).view(2, L)
        # Every rank of the node gets the extremes of the ranks that the others relay.
        extremes = torch.cat([shapes.amin(0), shapes.amax(0)]).expand(L, -1)
        sent, received, calls = local.exchange_counts(
            *relayed.unbind(0), *extremes.unbind(1), calls=calls
        )
        agree = received[:, 2:].reshape(2 * L, len(AGREED))
        tables = (mine[:, :2], theirs[:, :2], sent[:, :2], received[:, :2])
        ranks = "the least and the most of every column of ranks"
        read = self._read(*tables, agree=agree, ranks=ranks)
        sizes = [
            (Splits(send[0], recv[0]), Splits(send[1], recv[1]))
            for send, recv in (read[:2], read[2:])
        ]
        return sizes, calls


def any_rank(flag: bool, groups: Sequence[ProcessGroup]) -> bool:
    """Whether ``flag`` is set on any rank. Collective over one group after the other."""
    for group in groups:
        most = torch.tensor([flag], dtype=torch.int32, device=scalar_device(group))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        flag = bool(most)
    return flag


def grow_and_rerun(
    switches: list[TokenSwitchAllToAll],
    step: Callable[[], R],
    *,
    max_reruns: int = 2,
    groups: Sequence[ProcessGroup] = (),
) -> R:
    """Runs ``step`` and, if tokens did not fit, again with enough capacity.

    Collective over the groups of ``switches``; all ranks rerun together.

    Args:
        switches (list[TokenSwitchAllToAll]): static switches that ``step`` uses.
        step (callable): forward and backward of one step. It may run again from the
            start, so it must zero its gradients itself, and change nothing else.

    Keyword Args:
        max_reruns (int): one is enough unless a rerun routes differently. A later layer or
            level that routes tokens which an earlier one left out needs one more each.
            Default: 2
        groups (Sequence[ProcessGroup]): ranks outside the groups of the switches that ``step``
            communicates with, such as data-parallel replicas. If one has to
            rerun, all do. Default: ()

    Returns:
        What the last ``step`` returned; nothing was left out in it.
    """
    for _ in range(max_reruns + 1):
        result = step()
        # Every switch communicates: no rank stops at the first overflow.
        grown = [switch.grow() for switch in switches]
        if not any_rank(any(grown), groups):
            return result
    raise RuntimeError(
        f"grow_and_rerun: tokens still did not fit after {max_reruns} reruns; "
        f"capacities are now {[s.capacity for s in switches]}"
    )
