"""Policy of the ranks that run experts: loads, when to plan, and what a plan must be worth."""

from __future__ import annotations

import math
import weakref
from typing import Any, cast, TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed._moe.exchange import Exchange
from torch.distributed._moe.fetch import (
    after_fetch,
    busiest,
    Fetcher,
    Moves,
    moves_of,
)
from torch.distributed._moe.placement import Placement, plan, Topology
from torch.distributed._moe.quota import (
    plan_step,
    reroute,
    slots_of,
    split_by_source,
    StepPlan,
)
from torch.nn.utils.stateless import _reparametrize_module


if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.distributed_c10d import ProcessGroup
    from torch.distributed.tensor.parallel._expert_adapters import Experts


__all__ = ["ExpertPlacement", "LoadStats", "PlacedLayer"]


class LoadStats:
    """Token copies of a forward, per layer and expert: sum over ranks, average over time.

    :meth:`record` adds the router's counts on their device. :meth:`start` begins
    one asynchronous sum over ranks, :meth:`result` takes it in a later step, when
    it has long arrived. Neither reads a value on the host, except ``result``.

    What a backward records is not counted: activation checkpointing runs a layer again
    there.

    Args:
        num_layers (int): number of MoE layers.
        num_experts (int): number of experts of each.

    Keyword Args:
        group (ProcessGroup or name, optional): ranks to sum over. Default: the default
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
        group: ProcessGroup | c10d.GroupName | None = None,
        decay: float = 0.9,
        device: torch.device | str | None = None,
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"LoadStats: decay must be in [0, 1), got {decay}")
        # By name, as a group that is kept alive keeps its threads.
        self._group_name = getattr(group, "group_name", group)
        self._decay = decay
        # Behind the experts, how many forwards there were.
        self._sums = torch.zeros(
            num_layers, num_experts + 1, dtype=torch.int64, device=device
        )
        # The sum that was started, and what to wait for; None where it was loaded.
        self._flight: tuple[Tensor, dist.Work | None] | None = None
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
        num_experts = self._sums.shape[1] - 1
        if counts.shape != (num_experts,):
            raise ValueError(
                f"LoadStats.record: counts must have shape ({num_experts},), "
                f"got {tuple(counts.shape)}"
            )
        if not torch.compiler.is_compiling():
            # Inside a backward: a layer that is recomputed was counted before.
            if torch._C._current_graph_task_id() != -1:
                return
        self._sums[layer, :num_experts] += counts
        self._sums[layer, num_experts] += 1

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
        arrived = self._arrived()
        if arrived is None:
            raise RuntimeError("LoadStats.result: call start() first")
        self._flight = None
        total = arrived.double().cpu()
        forwards = total[:, -1:] / dist.get_world_size(self._group)
        latest = total[:, :-1] / forwards.clamp_min(1)
        if self._average is None:
            self._average = latest
        else:
            self._average = self._average.lerp(latest, 1 - self._decay)
        return self._average.clone()

    def _arrived(self) -> Tensor | None:
        if self._flight is None:
            return None
        snapshot, work = self._flight
        if work is not None:
            work.wait()
        return snapshot

    def state_dict(self) -> dict[str, Tensor | None]:
        """Average, the sum in flight, and what was recorded since. Collective.

        Equal on all ranks, so that one of them may save it. Changes nothing: a sum in flight
        is waited for, and stays to be taken.
        """
        recorded = self._sums.clone()
        dist.all_reduce(recorded, group=self._group)
        parts = {"average": self._average, "in_flight": self._arrived()}
        copies = {k: None if t is None else t.clone() for k, t in parts.items()}
        return {"recorded": recorded, **copies}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        """Goes on from ``state``, on as many ranks as one likes."""
        recorded, average = state["recorded"], state["average"]
        if recorded is None or recorded.shape != self._sums.shape:
            got = None if recorded is None else tuple(recorded.shape)
            raise ValueError(
                "LoadStats: state must be of (num_layers, num_experts + 1) = "
                f"{tuple(self._sums.shape)}, got {got}"
            )
        flight = state["in_flight"]
        self._flight = None if flight is None else (flight.to(self._sums.device), None)
        # It is the sum over all ranks: counted once.
        self._sums.copy_(recorded if dist.get_rank(self._group) == 0 else recorded * 0)
        self._average = None if average is None else average.clone()


class PlacedLayer:
    """One expert-parallel layer of an :class:`ExpertPlacement`.

    Attributes:
        placement (Placement): which ranks run its experts, until the next plan.
        home (Placement): which ranks have its parameters.
        last_plan (StepPlan, optional): of the last forward, if planned online.
    """

    def __init__(
        self, owner: ExpertPlacement, index: int, home: Placement, group: ProcessGroup
    ) -> None:
        self.owner = owner
        self.index = index
        self.home = home
        # Flights have a group of their own; counts and loads are not sent by their thread.
        self.group_name = group.group_name
        self.exchange = Exchange(group, home.num_experts, None, level="experts")
        self.levels = (self.exchange,)  # for count_wire_bytes
        self.fetcher = Fetcher(
            self.exchange, wire_dtype=owner.wire_dtype, keep=owner.keep
        )
        self.last_plan: StepPlan | None = None
        self.copy_cost = owner.copy_cost
        self.use(home)

    def use(self, placement: Placement) -> None:
        """From the next forward on; nothing moves."""
        self.placement = placement
        self._slots = slots_of(placement.slot_experts, placement.num_experts)
        self._moves = self._moves_of(placement.slot_experts)
        copies = placement.rank_holds().sum(0)
        ranks = torch.arange(placement.topology.num_ranks)
        slots = self._slots + ranks * placement.topology.slots_per_rank
        # Of experts that run on one rank each; behind them -1, for no expert.
        slots = slots.masked_fill(self._slots < 0, -1).amax(1)
        self._slot_of = torch.cat([slots, slots.new_full((1,), -1)])
        self._shared = int(copies.max()) > 1

    def _moves_of(self, slot_experts: Tensor) -> Moves | None:
        if torch.equal(slot_experts, self.home.slot_experts):
            return None  # Weights are used where they are.
        return moves_of(slot_experts, self.home.num_experts, self.exchange.rank)

    def cost(self, heaviest: float, slot_experts: Tensor) -> float:
        """Of a forward and backward, in token copies of the heaviest rank."""
        copies = busiest(slot_experts, self.home.num_experts)
        return heaviest + copies * (self.copy_cost or 0.0)

    def plan(self, loads: Tensor) -> Placement:
        """Best placement for (num_experts) token copies of a forward, fetching included."""
        home, topology, online = self.home, self.home.topology, self.owner.online
        E, price = home.num_experts, self.copy_cost or 0.0
        replicas = self.owner.replicas
        if replicas is None:
            replicas = 0 if online else topology.num_slots - E
        groups = E if online and topology.num_nodes > 1 else None
        options = {"num_replicas": E + replicas, "num_groups": groups}
        found = [home, plan(loads, topology, previous=home, **options)]
        if price:
            priced = {"previous": home, "migration_cost": price}
            found.append(plan(loads, topology, **options, **priced))
        if replicas:
            # Copies where they help most, and no others.
            fewest = max(1, math.ceil(price))
            step = plan_step(loads.round().long(), home, min_tokens_per_replica=fewest)
            if int((step.slot_experts >= 0).sum()) <= E + replicas:
                found.append(Placement(topology, E, step.slot_experts))

        def cost(placement: Placement) -> float:
            heaviest = placement.rank_loads(loads).max().item()
            return self.cost(heaviest, placement.slot_experts)

        return min(found, key=cost)

    def route(
        self,
        module: nn.Module,
        topk_indices: Tensor,
        weights: Mapping[str, Tensor],
        row_bytes: int,
        experts: Experts,
    ) -> tuple[Tensor, Experts | PlacedExperts]:
        """Slots of the experts in this forward, and what runs those of this rank.

        Args:
            module (nn.Module): the layer.
            topk_indices (Tensor): (T, K) expert ids of this rank.
            weights (dict[str, Tensor]): local expert parameters.
            row_bytes (int): of a token.
            experts (Experts): run those whose weights ``module`` has.

        Returns:
            (Tensor, Experts): (T, K) slots, -1 for no expert, and ``experts`` with the copies.
        """
        device, topology = topk_indices.device, self.home.topology
        E, slots_per_rank = self.home.num_experts, topology.slots_per_rank
        self._to(device)
        if self.copy_cost is None:
            size = sum(w[0].numel() * w.element_size() for w in weights.values())
            # Weights there and gradients back, next to two rows there and two back.
            self.copy_cost = 2 * size / max(1, 4 * row_bytes)
        _, _, _, counts = torch._moe_permutation(topk_indices, E)
        counts = counts.long()
        self.owner._record(self.index, counts)
        table, moves, split = self._slots, self._moves, None
        if self.owner.online:
            step, source = self._plan_step(counts)
            table = slots_of(step.slot_experts, E).to(device)
            moves = self._moves_of(step.slot_experts)
            moves = None if moves is None else moves.to(device)
            split = split_by_source(source, step.quotas.to(device), self.exchange.rank)
        elif self._shared:
            held = (table >= 0).long()
            copies = held.sum(1, keepdim=True)
            share, rest = counts[:, None] // copies, counts[:, None] % copies
            split = (share + (held.cumsum(1) <= rest)) * held
        if split is None:
            known = (topk_indices >= 0) & (topk_indices < E)
            slots = self._slot_of[torch.where(known, topk_indices, E).long()]
        else:
            slots = reroute(topk_indices, split, table, slots_per_rank)
        ahead = self.owner._next_of(module, self) if _reusable(module) else None
        if moves is None and ahead is None:
            return slots, experts
        return slots, PlacedExperts(self, module, moves, weights, experts, ahead)

    def _to(self, device: torch.device) -> None:
        if self._slots.device != device:
            self._slots, self._slot_of = (
                self._slots.to(device),
                self._slot_of.to(device),
            )
            self._moves = None if self._moves is None else self._moves.to(device)

    def fetch_ahead(self, module: nn.Module) -> None:
        """Issues the fetch of the next forward of ``module``, which has this layer."""
        region = cast(Any, module)._expert_parallel
        if self._moves is None or self.owner.online or not _reusable(module):
            return
        weights = region.local_parameters(module, region.expert_names)
        self._to(next(iter(weights.values())).device)
        self.fetcher.ahead(self._moves, weights, region.versions)

    def _plan_step(self, counts: Tensor) -> tuple[StepPlan, Tensor]:
        """Plan by the counts of this forward, and those of every rank."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "ExpertPlacement: online=True plans on the host and can't be compiled"
            )
        E, num_ranks = self.home.num_experts, self.exchange.num_ranks
        source = counts.new_empty(num_ranks * E)
        group = c10d._resolve_process_group(self.group_name)
        dist.all_gather_into_tensor(source, counts, group=group)
        source = source.view(-1, E)
        total = source.sum(0).cpu()
        fewest = max(1, math.ceil(self.copy_cost or 0.0))
        step = plan_step(total, self.placement, min_tokens_per_replica=fewest)
        at_home = self.home.rank_loads(total).max().item()
        heaviest = step.quotas.sum(0).max().item()
        if self.cost(heaviest, step.slot_experts) >= self.cost(
            at_home, self.home.slot_experts
        ):
            quotas = torch.zeros(E, num_ranks, dtype=torch.int64)
            quotas[torch.arange(E), torch.arange(E) // (E // num_ranks)] = total
            step = StepPlan(self.home.slot_experts, quotas)
        self.last_plan = step
        return step, source


class PlacedExperts:
    """Experts of a rank in one forward, with the copies, which are on their way until then."""

    def __init__(
        self,
        layer: PlacedLayer,
        module: nn.Module,
        moves: Moves | None,
        weights: Mapping[str, Tensor],
        experts: Experts,
        ahead: nn.Module | None,
    ) -> None:
        self._fetcher, self._module, self._weights = layer.fetcher, module, weights
        self._experts, self._ahead = experts, ahead
        self._fetch = self._copies = None
        if moves is not None:
            region = cast(Any, module)._expert_parallel
            versions = region.versions if _reusable(module) else None
            self._fetch = self._fetcher.begin(moves, weights, versions)

    @property
    def sends(self) -> bool:
        return self._fetch is not None and self._fetch.sends

    def __call__(self, *rows: Any, **options: Any) -> Tensor:
        if self._copies is None:
            self._copies = {}
            if self._fetch is not None:
                self._copies = self._fetcher.end(self._fetch, self._weights)
            if self._ahead is not None:
                self._ahead._expert_parallel.placed.fetch_ahead(self._ahead)
        with _reparametrize_module(self._module, self._copies):
            return self._experts(*rows, **options)

    def after(self, output: Tensor) -> Tensor:
        return after_fetch(output, self._copies) if self._copies else output


def _reusable(module: nn.Module) -> bool:
    """Whether a copy may outlive what it is fetched in.

    Not in a graph; in a region that is recomputed, or under a mode that records what is done
    there; or where FSDP gives a parameter other values behind its version.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._current_graph_task_id() != -1
        or getattr(module, "_is_fsdp_managed_module", False)
    )


class ExpertPlacement:
    """Decides which ranks run which expert, by the loads of a model that trains.

    Is the ``placement`` of :class:`~torch.distributed.tensor.parallel.ExpertParallel`. One
    object is shared by all layers of a model.

    Every expert has a home, the rank whose ``Shard(0)`` of the parameter has it, and never
    leaves it: parameters, gradients, optimizer state and checkpoints are those of a model
    without a placement. A forward may run it on other ranks, on several, and not at home.
    They fetch its weights, and backward brings the gradients home. After ``backward()`` every
    ``.grad`` is final. Who runs what is planned on two time scales:

    - every ``every`` steps, by the average loads since, for all forwards until the next plan.
    - ``online=True``: in every forward, by the counts of that forward, ranks of a node also
      take experts of each other into free slots. Reads the counts on the host.

    Where no plan is worth its fetches, experts run at home and nothing is sent.

    Keyword Args:
        slots_per_rank (int): experts that a rank runs in a forward, at least E/W. Memory of
            their weights is needed while a layer runs, and until its backward without
            activation checkpointing.
        ranks_per_node (int, optional): ranks with fast links between them; what is planned
            online stays inside a node. Default: None (all)
        every (int, optional): steps between plans, see :meth:`step`; None never plans by
            average loads. Default: 100
        replicas (int, optional): slots filled by such a plan beyond one for each expert; the
            others are free for plans of a forward. Default: None (all, or with ``online`` none)
        online (bool): plan every forward as well. Default: ``False``
        decay (float): weight of the past in the average of loads. Default: 0.9
        copy_cost (float, optional): what it takes a rank to fetch one expert and to return
            its gradient, or to send it, in the time of one token copy there. The cost model
            knows it, see ``torch.distributed._tools.moe_planner``. Default: None (the bytes
            of both, as if only bytes took time)
        keep (bool): fetched copies stay, in training and in inference, until the plan or the
            weights change: micro-batches of a step share them, and serving fetches once.
            Takes the memory of the slots of all layers. What is written through ``.data`` is
            seen after :meth:`step` or :meth:`forget`. Not under FSDP. Default: ``False``
        wire_dtype (torch.dtype, optional): of matrices that are fetched: ``torch.bfloat16``,
            or ``torch.float8_e4m3fn`` with a power-of-two scale per 128 values. Gradients keep
            their dtype. Copies are rounded then, the weights at home are not. Default: None
            (that of the weights)

    Example::
        >>> # xdoctest: +SKIP("needs ranks")
        >>> placement = ExpertPlacement(slots_per_rank=10, every=100)
        >>> parallelize_module(model, mesh, {"moe": ExpertParallel(placement=placement)})
        >>> for x in batches:
        ...     model(x).sum().backward()
        ...     optimizer.step()
        ...     placement.step()
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
        copy_cost: float | None = None,
        keep: bool = False,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        if wire_dtype not in (None, torch.bfloat16, torch.float8_e4m3fn):
            raise ValueError(
                "ExpertPlacement: wire_dtype must be None, torch.bfloat16 or "
                f"torch.float8_e4m3fn, got {wire_dtype}"
            )
        if every is not None and every < 1:
            raise ValueError(f"ExpertPlacement: every must be at least 1, got {every}")
        for name, value in (("replicas", replicas), ("copy_cost", copy_cost)):
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(
                    f"ExpertPlacement: {name} must be finite and at least 0, got {value}"
                )
        self.slots_per_rank = slots_per_rank
        self.ranks_per_node = ranks_per_node
        self.every = every
        self.replicas = replicas
        self.online = online
        self.decay = decay
        self.copy_cost = copy_cost
        self.keep = keep
        self.wire_dtype = wire_dtype
        # Which module ran after which, to fetch ahead for it.
        self._last: weakref.ref[nn.Module] | None = None
        self._next: WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]
        self._next = WeakKeyDictionary()
        self.layers: list[PlacedLayer] = []
        self.loads: Tensor | None = None
        self._stats: LoadStats | None = None
        self._to_load: dict[str, Any] | None = None  # of stats that are not made yet
        self._steps = 0

    def add_layer(self, num_experts: int, group: ProcessGroup) -> PlacedLayer:
        """A layer whose experts run at home."""
        ranks = dist.get_world_size(group)
        per_node = self.ranks_per_node or ranks
        if ranks % per_node:
            raise ValueError(
                f"ExpertPlacement: ranks_per_node must divide the {ranks} ranks of the "
                f"layer, got {per_node}"
            )
        topology = Topology(ranks // per_node, per_node, self.slots_per_rank)
        home = Placement.contiguous(topology, num_experts)
        first = self.layers[0] if self.layers else None
        if first is not None and (
            first.home.num_experts != num_experts
            or first.group_name != group.group_name
        ):
            raise ValueError(
                "ExpertPlacement: layers must have one number of experts and one group, "
                f"got {num_experts} experts after {first.home.num_experts}; use one "
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
        layer = PlacedLayer(self, len(self.layers), home, group)
        self.layers.append(layer)
        return layer

    @property
    def slot_experts(self) -> list[Tensor]:
        """(W, slots_per_rank) expert that runs in each slot, or -1, of each layer."""
        return [layer.placement.slot_experts for layer in self.layers]

    def imbalance(self) -> list[float]:
        """Heaviest over mean rank load of each layer under the average loads."""
        if self.loads is None:
            return []
        return [
            layer.placement.imbalance(loads)
            for layer, loads in zip(self.layers, self.loads)
        ]

    def step(self) -> None:
        """Counts a step, and plans where it is time to. Collective.

        Called once per optimizer step, on all ranks, when no backward is to come any more:
        what is recomputed must find the plan of its forward.
        """
        self._steps += 1
        self.forget()
        if self.every is None or self._stats is None:
            return
        # Summed while the next step runs, where there is a next one before the plan.
        if self._stats.pending:
            self.loads = self._stats.result()
            self._plan()
        if self._steps % self.every == 0:
            self._stats.start()

    def forget(self) -> None:
        """Fetches again what :attr:`keep` kept, as after a write through ``.data``."""
        for layer in self.layers:
            layer.fetcher.forget()

    def _next_of(self, module: nn.Module, layer: PlacedLayer) -> nn.Module | None:
        """The layer that followed ``module``, which runs now, in the forward before."""
        last = None if self._last is None else self._last()
        self._last = weakref.ref(module)
        if last is not None:
            placed = cast(Any, last)._expert_parallel.placed
            if placed.index < layer.index:
                self._next[last] = self._last
        following = self._next.get(module)
        return None if following is None else following()

    def _plan(self) -> None:
        for layer, loads in zip(
            self.layers, self.loads if self.loads is not None else ()
        ):
            layer.use(layer.plan(loads))

    def _record(self, index: int, counts: Tensor) -> None:
        if self._stats is None:
            first = self.layers[0]
            self._stats = LoadStats(
                len(self.layers),
                first.home.num_experts,
                group=first.group_name,
                decay=self.decay,
                device=counts.device,
            )
            if self._to_load is not None:
                self._stats.load_state_dict(self._to_load)
                self._to_load = None
        self._stats.record(index, counts)

    def state_dict(self) -> dict[str, Any]:
        """Plans, loads and steps; equal on all ranks. Collective; changes nothing."""
        return {
            "slot_experts": [slots.clone() for slots in self.slot_experts],
            "loads": None if self.loads is None else self.loads.clone(),
            "copy_costs": [layer.copy_cost for layer in self.layers],
            "steps": self._steps,
            "stats": self._to_load if self._stats is None else self._stats.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from ``state``. On another number of ranks, or slots, by a new plan."""
        if len(state["slot_experts"]) != len(self.layers):
            raise ValueError(
                f"ExpertPlacement: state has {len(state['slot_experts'])} layers, the "
                f"model has {len(self.layers)}"
            )
        self._steps, self.loads = state["steps"], state["loads"]
        for layer, cost in zip(self.layers, state["copy_costs"]):
            layer.copy_cost = cost if self.copy_cost is None else self.copy_cost
        for layer, slots in zip(self.layers, state["slot_experts"]):
            if slots.shape == layer.home.slot_experts.shape:
                home = layer.home
                layer.use(Placement(home.topology, home.num_experts, slots))
            else:
                self._plan()
                break
        if self._stats is not None and state["stats"] is not None:
            self._stats.load_state_dict(state["stats"])
        else:
            self._to_load = state["stats"]
