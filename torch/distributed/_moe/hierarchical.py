"""Token switch over two levels: between nodes, then inside the node.

Terms are those of all_to_all.py, with N nodes of L ranks each. Rank (n, l) of the mesh
is expert-parallel rank ``n * L + l``: it holds the experts of that E/(N*L)-th.

Dispatch
    node   Rank (m, l) sends each token once to every node n with one of its experts,
           to the rank (n, l) of the same local index.
    local  That rank sends it once to every rank of the node with one of its experts.
    Where several ranks of a node have experts of a token, the slower network between
    nodes carries it once, not once per rank.

Combine is the way back: with ``combine="reduce"`` rows are summed on the expert rank,
then on the relay, then at the source; with ``"exact"`` the relay forwards the rows of
all slots, and the source adds them in slot order.

The relay computes the second level's routing from the ids that it received. In compact
mode every rank tells the relays beforehand how much each rank of the node will get, so
that the sizes of both levels are read in one host sync.
"""

from __future__ import annotations

from typing import Literal, TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed._moe.all_to_all import TokenSwitchAllToAll
from torch.distributed._moe.exchange import Demand, Exchange, Route, Sizes, Splits


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


__all__ = ["TokenSwitchHierarchical"]


class TokenSwitchHierarchical(TokenSwitchAllToAll):
    """Token switch that crosses the node boundary once per token and node.

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
        self._check_options(num_experts, mesh.size(), combine, wire_dtype)
        node, local = self._capacities(capacity)
        groups, per_node = mesh.get_all_groups(), num_experts // mesh.size(0)
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

    def _plan(self, idx: Tensor) -> tuple[Route, ...]:
        node, local = self.levels
        demand = node.demand(idx)
        first, second = None, None
        if node.capacity is None:
            first, second = self._sizes(idx, demand)
        route = node.plan(idx, demand, first)
        # What arrived is routed again: ids of the node's experts.
        idx = route.recv_idx
        return route, local.plan(idx, local.demand(idx), second)

    def _sizes(self, idx: Tensor, demand: Demand) -> tuple[Sizes, Sizes]:
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
        first, second = (
            Sizes(*(Splits(*pair) for pair in zip(send, recv)))
            for send, recv in (read[:2], read[2:])
        )
        return first, second
