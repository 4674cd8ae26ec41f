"""Policy of expert placement: loads, when to plan, and what a plan must gain."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, cast, TYPE_CHECKING
from weakref import ref, WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed._moe.agreement import check_counts
from torch.distributed._moe.loads import LoadStats, StepTimes
from torch.distributed._moe.plan import Plan, Topology
from torch.distributed.tensor.parallel._expert_placed_layer import PlacedLayer
from torch.distributed.tensor.parallel._expert_recovery import recover


if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = ["ExpertPlacement"]


# Plans compared by average loads.
_TRIES = 3
# Steps of a window without ``every``, and of a trial of copies unless that is most of a window.
_WINDOW, _TRIAL = 8, 4


@dataclass(kw_only=True, eq=False, repr=False)
class ExpertPlacement:
    """Decides which ranks run which expert, by the loads of a model in training.

    It is the ``placement`` of :class:`~torch.distributed.tensor.parallel.ExpertParallel`. All layers
    of a model share one object.

    Every expert has a home, the rank whose ``Shard(0)`` of the parameter has it. It never
    leaves: parameters, gradients, optimizer state and checkpoints are those of a model
    without a placement. A forward may run an expert on one or more other ranks instead.
    They fetch its weights, and backward sends the gradients home. After ``backward()`` every
    ``.grad`` is final. Plans are made

    - every ``every`` steps, by the average loads since, for all forwards until the next plan;
    - or, with ``online=True``, in every forward by its counts, which are read on the host.

    If no plan is worth its fetches, experts run at home and nothing is sent. As loads may
    change as fast as plans are made, a plan by average loads is used only if a plan by the previous
    loads would have paid for the loads since. Online plans that stay at home are made less and
    less often.

    Keyword Args:
        slots_per_rank (int): experts that a rank runs in a forward, at least E/W. Those above
            E/W are copies. Their memory is needed while a layer runs; without activation
            checkpointing, until its backward.
        ranks_per_node (int, optional): ranks that fetch from each other, such as those with fast
            links. Default: None (all)
        every (int, optional): steps between plans, see :meth:`step`; None never plans by
            average loads. Default: 100
        online (bool): plan every forward instead. Default: ``False``
        decay (float): weight of the past in the average of loads. Default: 0.9
        copy_cost (float, optional): time in which a rank sends an expert, or fetches it and
            returns its gradient, over the time of one token copy.
            ``torch.distributed._tools.moe_planner`` computes it. Default: None (the ratio of their
            bytes at first. If measured steps with copies are slower than those at home,
            experts go home and the price rises. Plans then depend on times; runs that must have
            the same bits need a price. Few steps between plans give noisy times)
        keep (bool): fetched copies stay, in training and in inference, until the plan or the
            weights change: micro-batches of a step share them, and serving fetches once.
            Takes the memory of the copies of all layers. Writes that no version counts are
            seen after :meth:`step` or :meth:`forget`: through ``.data``, by a collective or a
            ``recv`` into ``to_local()``, and into ``to_local()`` of a detached parameter, as in a
            ``state_dict()`` (``torch.distributed.checkpoint.load``). Not under FSDP. Default: ``False``
        wire_dtype (torch.dtype, optional): dtype of fetched matrices: ``torch.bfloat16``,
            or ``torch.float8_e4m3fn`` with a power-of-two scale per 128 values. It rounds copies,
            not the weights at home; gradients keep their dtype. Default: None (that of the
            weights)

    Example::
        >>> # xdoctest: +SKIP("needs ranks")
        >>> placement = ExpertPlacement(slots_per_rank=10, every=100)
        >>> parallelize_module(model, mesh, {"moe": ExpertParallel(placement=placement)})
        >>> for x in batches:
        ...     model(x).sum().backward()
        ...     optimizer.step()
        ...     placement.step()
    """

    slots_per_rank: int
    ranks_per_node: int | None = None
    every: int | None = 100
    online: bool = False
    decay: float = 0.9
    copy_cost: float | None = None
    keep: bool = False
    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        copy_cost = self.copy_cost
        if self.wire_dtype not in (None, torch.bfloat16, torch.float8_e4m3fn):
            raise ValueError(
                "ExpertPlacement: wire_dtype must be None, torch.bfloat16 or "
                f"torch.float8_e4m3fn, got {self.wire_dtype}"
            )
        for name in ("slots_per_rank", "ranks_per_node", "every"):
            value = getattr(self, name)
            if value is not None or name == "slots_per_rank":
                check_counts("ExpertPlacement", **{name: value})
        if not 0 <= self.decay < 1:
            raise ValueError(
                f"ExpertPlacement: decay must be in [0, 1), got {self.decay}"
            )
        if copy_cost is not None and not 0 <= copy_cost < math.inf:
            raise ValueError(
                "ExpertPlacement: copy_cost must be finite and at least 0, got "
                f"{copy_cost}"
            )
        # The layer of the running forward, and those that followed each one, to fetch ahead.
        self.last: ref[nn.Module] | None = None
        self.following = WeakKeyDictionary[nn.Module, ref[nn.Module]]()
        self.recoveries = 0
        self.layers: list[PlacedLayer] = []
        self.loads: Tensor | None = None
        # Times of steps, if no price of a copy is given. The first window is at home.
        self._times = StepTimes() if copy_cost is None else None
        self._rests = self._times is not None and self.online
        self._stats: LoadStats | None = None
        self._to_load: dict[str, Any] | None = None  # state of stats not made yet
        self._steps = 0

    @property
    def settings(self) -> str:
        """The arguments as text, which ranks compare."""
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))

    def make_layer(self, num_experts: int, group: ProcessGroup) -> PlacedLayer:
        """The next layer, whose experts run at home at first. The caller appends it to ``layers``."""
        ranks = dist.get_world_size(group)
        per_node = self.ranks_per_node or ranks
        if ranks % per_node:
            raise ValueError(
                f"ExpertPlacement: ranks_per_node must divide the {ranks} ranks of the "
                f"layer, got {per_node}"
            )
        topology = Topology(ranks // per_node, per_node, self.slots_per_rank)
        home = Plan.home(topology, num_experts)
        for layer in self.layers:
            before = layer.home.num_experts
            if before != num_experts or layer.group_name != group.group_name:
                raise ValueError(
                    "ExpertPlacement: layers must have one number of experts and one group, "
                    f"got {num_experts} experts after {before}; use one object for each kind"
                )
        if self._stats is not None:
            raise RuntimeError("ExpertPlacement: layers come before the first forward")
        return PlacedLayer(self, len(self.layers), home, group)

    @property
    def slot_experts(self) -> list[Tensor]:
        """(W, slots_per_rank) of each layer, the expert that runs in each slot, or -1."""
        return [layer.plan.slot_experts for layer in self.layers]

    def imbalance(self) -> list[float]:
        """Heaviest over mean rank load of each layer, by its average loads or its online plan, as of
        the last time it planned."""
        if self.online:
            plans = [layer.last_plan for layer in self.layers]
            return [p.imbalance(p.quotas.sum(1)) for p in plans if p is not None]
        pairs = () if self.loads is None else zip(self.layers, self.loads)
        return [layer.plan.imbalance(loads) for layer, loads in pairs]

    def step(self) -> None:
        """Counts a step, and plans if it is time to. Collective.

        Call it once per optimizer step, on all ranks, after the last backward, as
        recomputation must find the plan of its forward.
        """
        self._steps += 1
        self.forget()
        if self.online and not self._rests:
            for layer in self.layers:
                layer.step()
        window = self.every or _WINDOW
        at = self._steps % window
        if self._times is not None:
            self._times.tick()
            if at == 0 or at == _TRIAL <= window // 2:
                self._compare(self._times, trial=at != 0)
        if self.every and not at and not self._rests and self._stats is not None:
            before = self.loads
            self.loads, latest = self._stats.update()
            self._plan(before, latest)

    def _compare(self, times: StepTimes, trial: bool) -> None:
        """Goes home after a window or a trial that was slower with copies."""
        tried = [layer for layer in self.layers if layer.tried is not None]
        if trial and not (tried and times.fresh):
            return
        self._rests, raises = times.slower(tried[0].exchange.group if tried else None)
        for layer in tried:
            plan = cast(Plan, layer.tried)
            if self._rests or self.online:
                layer.use(layer.home)
            if raises:
                # A copy must gain at least twice as much next time.
                counts = plan.quotas.sum(1)
                gain = layer.home.cost(counts) - plan.cost(counts)
                layer.copy_cost = 2 * gain / max(1, plan.busiest())

    def forget(self) -> None:
        """Drops copies kept by :attr:`keep`, as after a write that no version counts."""
        for layer in self.layers:
            layer.fetcher.forget()

    recover = recover

    def _plan(self, before: Tensor | None = None, latest: Tensor | None = None) -> None:
        """Plans by :attr:`loads`, if a plan by the loads ``before`` would have paid for the ``latest``
        ones: loads may change as fast as plans are made."""
        if self.loads is None or self.online:
            return
        for i, layer in enumerate(self.layers):
            found = layer.planned(self.loads[i], _TRIES)
            if before is not None and latest is not None and found is not layer.home:
                tried = layer.plan if layer.moves else layer.planned(before[i], _TRIES)
                price = layer.copy_cost or 0.0
                if tried.cost(latest[i], price) > layer.home.cost(latest[i]):
                    found = layer.home
            layer.use(found)

    def _record(self, index: int, counts: Tensor) -> None:
        if self._stats is None:
            self._stats = LoadStats(
                len(self.layers),
                len(counts),
                group=self.layers[0].group_name,
                decay=self.decay,
                device=counts.device,
            )
            if self._to_load is not None:
                self._load_stats(self._stats)
        self._stats.record(index, counts)

    def state_dict(self) -> dict[str, Any]:
        """Plans, loads and steps; equal on all ranks. Collective; changes nothing.

        It has numbers and lists of them and no tensors, and always the same keys, so that
        ``torch.distributed.checkpoint`` loads it at any step and on any number of ranks.
        """
        stats = dict(self._to_load or {"average": None, "recorded": None})
        if self._stats is not None:
            stats = {k: _listed(v) for k, v in self._stats.state_dict().items()}
        return {
            "slot_experts": [slots.tolist() for slots in self.slot_experts],
            "quotas": [layer.plan.quotas.tolist() for layer in self.layers],
            "loads": _listed(self.loads),
            "copy_costs": [layer.copy_cost for layer in self.layers],
            "pauses": [[layer.pause, layer.pauses] for layer in self.layers],
            "steps": self._steps,
            "stats": stats,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state``, with a new plan for another number of ranks or slots.

        A state whose copies would cross nodes makes a new plan as well. All ranks load the same
        state. The next eager forward compares which ranks have which experts; a rank that loads
        nothing, where others do, is seen when they time out.

        Raises:
            ValueError: the state is of another number of layers or experts, or is no plan of them.
                Nothing is changed.
        """
        saved = [len(quotas) for quotas in state["quotas"]]
        experts = [layer.home.num_experts for layer in self.layers]
        if saved != experts or len(state["slot_experts"]) != len(experts):
            raise ValueError(
                f"ExpertPlacement: state has {len(state['slot_experts'])} plans of layers of {saved} "
                f"experts, the model has layers of {experts}"
            )
        plans, fits, stats = [], True, state["stats"]
        for layer, *tables in zip(self.layers, state["slot_experts"], state["quotas"]):
            slots, quotas = (torch.tensor(numbers, device="cpu") for numbers in tables)
            same = slots.shape == layer.home.slot_experts.shape
            if same and slots.max() >= len(quotas):
                raise ValueError(
                    f"ExpertPlacement: state has expert {slots.max()} in a layer of {len(quotas)}"
                )
            found = Plan(layer.home.topology, slots, quotas) if same else None
            if found is not None:
                layer._moves_of(found)  # checks the order of slots
                same = found.is_inside_nodes()
            plans.append(found if same else None)
            fits = fits and same
        self._steps, self.loads = state["steps"], _tensor(state["loads"], torch.float64)
        for i, (layer, saved_plan) in enumerate(zip(self.layers, plans)):
            layer.pause, layer.pauses = state["pauses"][i]
            if self.copy_cost is None:
                layer.copy_cost = state["copy_costs"][i]
            if saved_plan is not None and not self.online:
                layer.use(saved_plan)
        if not fits:
            self._plan()
        for layer in self.layers:
            layer.is_loaded = True
        # Without records the state is from before the first forward.
        self._to_load = dict(stats) if stats["recorded"] else None
        if self._to_load is None:
            self._stats = None
        elif self._stats is not None:
            self._load_stats(self._stats)

    def _load_stats(self, stats: LoadStats) -> None:
        state, self._to_load = cast("dict[str, Any]", self._to_load), None
        average = _tensor(state["average"], torch.float64)
        recorded = _tensor(state["recorded"], torch.int64)
        stats.load_state_dict({"average": average, "recorded": recorded})


def _listed(tensor: Tensor | None) -> list[Any] | None:
    return None if tensor is None else tensor.tolist()


def _tensor(numbers: list[Any] | None, dtype: torch.dtype) -> Tensor | None:
    # On the host also where the user builds a model on another device.
    return None if numbers is None else torch.tensor(numbers, dtype=dtype, device="cpu")
