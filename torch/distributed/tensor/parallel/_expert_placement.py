"""Placement of the experts of a model while it trains."""

from __future__ import annotations

from typing import Any, cast, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed._moe.placement import Placement, plan, Topology
from torch.distributed._moe.replicas import (
    lent,
    migrate,
    plan_step,
    reroute,
    send_rows,
    split_by_source,
    StepPlan,
    sum_replica_gradients,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = ["ExpertPlacement", "LoadStats", "PlacedLayer"]


class LoadStats:
    """Exponential average of token copies per layer and expert over all ranks.

    :meth:`record` adds the router's counts on their device. :meth:`start` begins
    one asynchronous sum over ranks, :meth:`result` takes it in a later step, when
    it has long arrived. Neither reads a value on the host, except ``result``.

    What a backward records is not counted: activation checkpointing runs a layer again
    there.

    Args:
        num_layers (int): number of MoE layers.
        num_experts (int): number of experts of each.

    Keyword Args:
        group (ProcessGroup, optional): ranks to sum over. Default: the default
            group
        decay (float): weight of the past in the average, in [0, 1). Default: 0.9
        device (torch.device, optional): device of the counts. Default: cpu

    Example::
        >>> # xdoctest: +SKIP("needs a process group")
        >>> stats = LoadStats(num_layers=24, num_experts=64)
        >>> for layer, counts in enumerate(counts_of_this_step):
        ...     stats.record(layer, counts)
        >>> if step % 100 == 0:
        ...     stats.start()
        >>> if step % 100 == 50 and stats.pending:
        ...     loads = stats.result()  # then plan(loads[layer], topology)
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        group: ProcessGroup | None = None,
        decay: float = 0.9,
        device: torch.device | str | None = None,
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"LoadStats: decay must be in [0, 1), got {decay}")
        # By name, as a group that is kept alive keeps its threads.
        self._group_name = None if group is None else group.group_name
        self._decay = decay
        self._sums = torch.zeros(
            num_layers, num_experts, dtype=torch.int64, device=device
        )
        self._flight: tuple[Tensor, dist.Work] | None = None
        self._average: Tensor | None = None

    @property
    def _group(self) -> ProcessGroup | None:
        if self._group_name is None:
            return None
        return c10d._resolve_process_group(self._group_name)

    @property
    def pending(self) -> bool:
        """Whether a sum was started and not yet taken."""
        return self._flight is not None

    def record(self, layer: int, counts: Tensor) -> None:
        """Adds the counts of one forward pass of one layer.

        Args:
            layer (int): index of the layer.
            counts (Tensor): (num_experts) integer, on the device of this object.
        """
        if counts.shape != self._sums.shape[1:]:
            raise ValueError(
                f"LoadStats.record: counts must have shape "
                f"({self._sums.shape[1]},), got {tuple(counts.shape)}"
            )
        if not torch.compiler.is_compiling():
            # Inside a backward: a layer that is recomputed was counted before.
            if torch._C._current_graph_task_id() != -1:
                return
        self._sums[layer] += counts

    def start(self) -> None:
        """Begins to sum over ranks what was recorded since the last start."""
        if self._flight is not None:
            raise RuntimeError("LoadStats.start: take result() of the last start first")
        snapshot = self._sums.clone()
        self._sums.zero_()
        work = dist.all_reduce(snapshot, group=self._group, async_op=True)
        self._flight = (snapshot, work)

    def result(self) -> Tensor:
        """Waits for the sum and adds it to the average.

        Returns:
            Tensor: (num_layers, num_experts) float64 on CPU, equal on all ranks.
        """
        if self._flight is None:
            raise RuntimeError("LoadStats.result: call start() first")
        snapshot, work = self._flight
        work.wait()
        self._flight = None
        latest = snapshot.double().cpu()
        if self._average is None:
            self._average = latest
        else:
            self._average = self._average.lerp(latest, 1 - self._decay)
        return self._average.clone()

    def state_dict(self) -> dict[str, Tensor | None]:
        """Average, and what was recorded since the last sum. Collective.

        A sum in flight is taken first. Equal on all ranks, so that one of them may save it.
        """
        if self.pending:
            self.result()
        recorded = self._sums.clone()
        dist.all_reduce(recorded, group=self._group)
        average = None if self._average is None else self._average.clone()
        return {"recorded": recorded, "average": average}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        """Goes on from ``state``, on as many ranks as one likes."""
        recorded, average = state["recorded"], state["average"]
        if recorded is None or recorded.shape != self._sums.shape:
            got = None if recorded is None else tuple(recorded.shape)
            raise ValueError(
                "LoadStats: state must be of (num_layers, num_experts) = "
                f"{tuple(self._sums.shape)}, got {got}"
            )
        self._flight = None
        # It is the sum over all ranks: counted once.
        self._sums.copy_(recorded if dist.get_rank(self._group) == 0 else recorded * 0)
        self._average = None if average is None else average.clone()


def _even_split(counts: Tensor, slots_of: Tensor) -> Tensor:
    """(num_experts, num_ranks) share of this rank's tokens for every replica."""
    held = (slots_of >= 0).long()
    copies = held.sum(1, keepdim=True)
    share, rest = counts[:, None] // copies, counts[:, None] % copies
    return (share + (held.cumsum(1) <= rest)) * held


class _Borrow(torch.autograd.Function):
    """Rows of other ranks into free slots; the gradients go back and are added."""

    @staticmethod
    # pyrefly: ignore [bad-override]
    def forward(
        ctx: Any,
        weight: Tensor,
        out: list[tuple[int, int]],
        into: list[tuple[int, int]],
        group_name: c10d.GroupName,
    ) -> Tensor:
        ctx.moved = (out, into, group_name)
        group = c10d._resolve_process_group(group_name)
        rows = send_rows(weight, out, into, group)
        return weight.index_copy(0, _slots_in(into, weight), rows)

    @staticmethod
    # pyrefly: ignore [bad-override]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, into, group_name = ctx.moved
        group = c10d._resolve_process_group(group_name)
        rows = send_rows(grad, into, out, group)
        grad = grad.index_fill(0, _slots_in(into, grad), 0)
        # One lender may serve several ranks: added in the order of ranks.
        for (_, slot), row in zip(out, rows):
            grad[slot] += row
        return grad, None, None, None


def _slots_in(moves: list[tuple[int, int]], like: Tensor) -> Tensor:
    slots = [slot for _, slot in moves]
    return torch.tensor(slots, dtype=torch.int64, device=like.device)


class PlacedLayer:
    """One expert-parallel layer of an :class:`ExpertPlacement`.

    Attributes:
        placement (Placement): where its experts are now.
        last_plan (StepPlan, optional): of the last forward, if planned online.
    """

    def __init__(
        self,
        owner: ExpertPlacement,
        index: int,
        placement: Placement,
        group_name: c10d.GroupName,
        params: Callable[[], list[Tensor]],
    ) -> None:
        self.owner = owner
        self.index = index
        self.group_name = group_name
        self.params = params
        self.last_plan: StepPlan | None = None
        self.move_to(placement)

    @property
    def group(self) -> ProcessGroup:
        return c10d._resolve_process_group(self.group_name)

    def move_to(self, placement: Placement) -> None:
        """Tables of a placement whose weights are in place."""
        self.placement = placement
        quotas = torch.zeros(
            placement.num_experts, placement.topology.num_ranks, dtype=torch.int64
        )
        self._slots_of = StepPlan(placement.slot_experts, quotas).slots_of()

    def route(
        self, topk_indices: Tensor, weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Slots of the experts in this step, and the weights that borrowing changes.

        Args:
            topk_indices (Tensor): (T, K) expert ids of this rank.
            weights (dict[str, Tensor]): local expert parameters.

        Returns:
            (Tensor, dict[str, Tensor]): (T, K) slots, -1 for no expert, and those of
            ``weights`` that are others in this step.
        """
        placement, device = self.placement, topk_indices.device
        E, slots_per_rank = placement.num_experts, placement.topology.slots_per_rank
        _, _, _, counts = torch._moe_permutation(topk_indices, E)
        counts = counts.long()
        self.owner._record(self.index, counts)
        slots_of, changed = self._slots_of.to(device), {}
        if not self.owner.online:
            split = _even_split(counts, slots_of)
        else:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "ExpertPlacement: online=True plans on the host and can't be compiled"
                )
            group = self.group
            source = counts.new_empty(placement.topology.num_ranks * E)
            dist.all_gather_into_tensor(source, counts, group=group)
            source = source.view(-1, E)
            step = self.last_plan = plan_step(
                source.sum(0).cpu(),
                placement,
                min_tokens_per_replica=self.owner.min_tokens_per_replica,
            )
            rank = dist.get_rank(group)
            split = split_by_source(source, step.quotas.to(device), rank)
            slots_of = step.slots_of().to(device)
            out, into = lent(placement, step.slot_experts, rank)
            if bool((step.slot_experts != placement.slot_experts).any()):
                changed = {
                    name: cast(
                        "Tensor", _Borrow.apply(weight, out, into, self.group_name)
                    )
                    for name, weight in weights.items()
                }
        return reroute(topk_indices, split, slots_of, slots_per_rank), changed


class ExpertPlacement:
    """Decides which rank computes which expert, and moves experts while a model trains.

    Is the ``placement`` of :class:`~torch.distributed.tensor.parallel.ExpertParallel`. One
    object is shared by all layers of a model. On two time scales:

    - every ``every`` steps, experts are placed anew by their average loads, and weights,
      gradients and optimizer state move to their new ranks. Experts may be on several
      ranks: their tokens are shared, their gradients summed, so that replicas stay equal.
    - ``online=True``: in every forward, by the counts of that forward, ranks of a node borrow
      experts of each other into free slots; gradients go back to the lender. Reads the
      counts on the host, and copies the weights of layers that borrow.

    An expert parameter of shape (E, ...) becomes one of (W * slots_per_rank, ...): a
    row is a slot, whose expert :attr:`slot_experts` names.

    Keyword Args:
        slots_per_rank (int): experts that a rank has memory for, at least E/W.
        ranks_per_node (int, optional): ranks with fast links between them; borrowing stays
            inside a node. Default: None (all)
        every (int, optional): optimizer steps between plans; None never moves.
            Default: 100
        replicas (int, optional): slots filled by a plan beyond one for each expert; the
            others are free to borrow into. Default: None (all, or with ``online`` none)
        online (bool): plan every forward as well. Default: ``False``
        decay (float): weight of the past in the average of loads. Default: 0.9
        migration_cost (float): price of moving one expert, in token copies of one
            step. Default: 0.0
        min_tokens_per_replica (int): fewest tokens to borrow an expert for. Default: 1

    Example::
        >>> # xdoctest: +SKIP("needs ranks")
        >>> placement = ExpertPlacement(slots_per_rank=10, every=100)
        >>> parallelize_module(model, mesh, {"moe": ExpertParallel(placement=placement)})
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> placement.attach(optimizer)
        >>> # then train as ever
    """

    def __init__(
        self,
        *,
        slots_per_rank: int,
        ranks_per_node: int | None = None,
        every: int | None = 100,
        replicas: int | None = None,
        online: bool = False,
        decay: float = 0.9,
        migration_cost: float = 0.0,
        min_tokens_per_replica: int = 1,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"ExpertPlacement: every must be at least 1, got {every}")
        if replicas is not None and replicas < 0:
            raise ValueError(
                f"ExpertPlacement: replicas must be at least 0, got {replicas}"
            )
        self.slots_per_rank = slots_per_rank
        self.ranks_per_node = ranks_per_node
        self.every = every
        self.replicas = replicas
        self.online = online
        self.decay = decay
        self.migration_cost = migration_cost
        self.min_tokens_per_replica = min_tokens_per_replica
        self.layers: list[PlacedLayer] = []
        self.loads: Tensor | None = None
        self._stats: LoadStats | None = None
        self._steps = 0

    def add_layer(
        self, num_experts: int, group: ProcessGroup, params: Callable[[], list[Tensor]]
    ) -> PlacedLayer:
        """A layer whose experts are in order, one slot each."""
        ranks = dist.get_world_size(group)
        per_node = self.ranks_per_node or ranks
        if ranks % per_node:
            raise ValueError(
                f"ExpertPlacement: ranks_per_node must divide the {ranks} ranks of the "
                f"layer, got {per_node}"
            )
        topology = Topology(ranks // per_node, per_node, self.slots_per_rank)
        placement = Placement.contiguous(topology, num_experts)
        first = self.layers[0] if self.layers else None
        if first is not None and (
            first.placement.num_experts != num_experts
            or first.group_name != group.group_name
        ):
            raise ValueError(
                "ExpertPlacement: layers must have one number of experts and one group, "
                f"got {num_experts} experts after {first.placement.num_experts}; use one "
                "object for each kind"
            )
        if (
            self.replicas is not None
            and self.replicas > topology.num_slots - num_experts
        ):
            raise ValueError(
                f"ExpertPlacement: replicas must be at most the {topology.num_slots} slots "
                f"less {num_experts} experts, got {self.replicas}"
            )
        if self._stats is not None:
            raise RuntimeError("ExpertPlacement: layers come before the first forward")
        layer = PlacedLayer(self, len(self.layers), placement, group.group_name, params)
        self.layers.append(layer)
        return layer

    @property
    def slot_experts(self) -> list[Tensor]:
        """(W, slots_per_rank) expert of every slot, or -1, of each layer."""
        return [layer.placement.slot_experts for layer in self.layers]

    def imbalance(self) -> list[float]:
        """Heaviest over mean rank load of each layer under the average loads."""
        if self.loads is None:
            return []
        return [
            layer.placement.imbalance(loads)
            for layer, loads in zip(self.layers, self.loads)
        ]

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Sums gradients of replicas before, and moves experts after its steps."""
        optimizer.register_step_pre_hook(lambda *_: self.sum_gradients())

        def move(optimizer: torch.optim.Optimizer, *_: object) -> None:
            self.after_step(optimizer)

        optimizer.register_step_post_hook(move)

    def sum_gradients(self) -> None:
        """Gives replicas the sum of their gradients. Collective."""
        for layer in self.layers:
            if int(layer.placement.rank_holds().sum(0).max()) > 1:
                sum_replica_gradients(
                    layer.params(), layer.placement, group=layer.group
                )

    def after_step(self, optimizer: torch.optim.Optimizer) -> int:
        """Plans and moves where it is time to. Collective.

        Returns:
            int: replicas that changed rank, of all layers.
        """
        self._steps += 1
        if self.every is None or self._stats is None:
            return 0
        moved = 0
        # Summed while the next step runs, where there is a next one before the plan.
        if self._stats.pending:
            self.loads = self._stats.result()
            for layer, loads in zip(self.layers, self.loads):
                moved += self._move(layer, loads, optimizer)
        if self._steps % self.every == 0:
            self._stats.start()
        return moved

    def _move(
        self, layer: PlacedLayer, loads: Tensor, optimizer: torch.optim.Optimizer
    ) -> int:
        old = layer.placement
        E, topology = old.num_experts, old.topology
        replicas = self.replicas
        if replicas is None:
            replicas = 0 if self.online else topology.num_slots - E
        new = plan(
            loads,
            topology,
            num_replicas=E + replicas,
            num_groups=E if self.online and topology.num_nodes > 1 else None,
            previous=old,
            migration_cost=self.migration_cost,
        )
        if torch.equal(new.slot_experts, old.slot_experts):
            return 0
        params = layer.params()
        moved = migrate(params, old, new, optimizer=optimizer, group=layer.group)
        grads = [p.grad for p in params if p.grad is not None]
        migrate(grads, old, new, group=layer.group)
        layer.move_to(new)
        return moved

    def _record(self, index: int, counts: Tensor) -> None:
        if self._stats is None:
            first = self.layers[0]
            self._stats = LoadStats(
                len(self.layers),
                first.placement.num_experts,
                group=first.group,
                decay=self.decay,
                device=counts.device,
            )
        self._stats.record(index, counts)

    def state_dict(self) -> dict[str, Any]:
        """Placements, loads and steps; equal on all ranks. Collective."""
        return {
            "slot_experts": [slots.clone() for slots in self.slot_experts],
            "steps": self._steps,
            "stats": None if self._stats is None else self._stats.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over where parameters and optimizer state were saved with ``state``."""
        if len(state["slot_experts"]) != len(self.layers):
            raise ValueError(
                f"ExpertPlacement: state has {len(state['slot_experts'])} layers, the "
                f"model has {len(self.layers)}"
            )
        for layer, slots in zip(self.layers, state["slot_experts"]):
            old = layer.placement
            layer.move_to(Placement(old.topology, old.num_experts, slots))
        self._steps = state["steps"]
        if state["stats"] is not None:
            if self._stats is None:
                device = self.layers[0].params()[0].device
                E = self.layers[0].placement.num_experts
                self._record(0, torch.zeros(E, dtype=torch.int64, device=device))
            cast("LoadStats", self._stats).load_state_dict(state["stats"])
