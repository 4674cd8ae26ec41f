"""Policy of the ranks that run experts: loads, when to plan, and what a plan must be worth."""

from __future__ import annotations

import math
from typing import Any, cast, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed._moe.loads import LoadStats, StepTimes
from torch.distributed._moe.plan import busiest, Plan, plan, Topology
from torch.distributed.tensor.parallel._expert_placed_layer import (
    LayerOrder,
    PlacedLayer,
)
from torch.distributed.tensor.parallel._expert_recovery import recover, Recovery


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = ["ExpertPlacement"]


# Plans by average loads that are compared.
_TRIES = 3
# Steps whose times are compared, where there is no ``every``: at home, and in a trial of copies, which may
# be slower.
_WINDOW, _TRIAL = 8, 4


class ExpertPlacement:
    """Decides which ranks run which expert, by the loads of a model that trains.

    Is the ``placement`` of :class:`~torch.distributed.tensor.parallel.ExpertParallel`. One
    object is shared by all layers of a model.

    Every expert has a home, the rank whose ``Shard(0)`` of the parameter has it, and never
    leaves it: parameters, gradients, optimizer state and checkpoints are those of a model
    without a placement. A forward may run it on other ranks, on several, and not at home.
    They fetch its weights, and backward brings the gradients home. After ``backward()`` every
    ``.grad`` is final. Who runs what is planned

    - every ``every`` steps, by the average loads since, for all forwards until the next plan;
    - or, with ``online=True``, in every forward by its counts, which are read on the host.

    Where no plan is worth its fetches, experts run at home and nothing is sent. A plan by average
    loads is worth them if the one before it was, for the loads that came since: loads may
    change as fast as plans are made. Online plans that stay at home are made ever more seldom.

    Keyword Args:
        slots_per_rank (int): experts that a rank runs in a forward, at least E/W. Those above
            E/W are copies, whose memory is needed while a layer runs, and until its backward
            without activation checkpointing.
        ranks_per_node (int, optional): ranks that fetch from each other, as those with fast
            links between them. Default: None (all)
        every (int, optional): steps between plans, see :meth:`step`; None never plans by
            average loads. Default: 100
        online (bool): plan every forward instead. Default: ``False``
        decay (float): weight of the past in the average of loads. Default: 0.9
        copy_cost (float, optional): what it takes a rank to fetch one expert and to return
            its gradient, or to send it, in the time of one token copy there. The cost model
            knows it, see ``torch.distributed._tools.moe_planner``. Default: None (at first
            the bytes of both; where steps with copies then take longer than those at home, by
            the clock, experts go home, and the price is raised. Plans then depend on times: for
            runs that are to have the same bits, give a price. The times of few steps between
            plans say little)
        keep (bool): fetched copies stay, in training and in inference, until the plan or the
            weights change: micro-batches of a step share them, and serving fetches once.
            Takes the memory of the copies of all layers. What is written through ``.data`` is
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
        if copy_cost is not None and not 0 <= copy_cost < math.inf:
            raise ValueError(
                "ExpertPlacement: copy_cost must be finite and at least 0, got "
                f"{copy_cost}"
            )
        self.slots_per_rank = slots_per_rank
        self.ranks_per_node = ranks_per_node
        self.every = every
        self.online = online
        self.decay = decay
        self.copy_cost = copy_cost
        self.keep = keep
        self.wire_dtype = wire_dtype
        self.order = LayerOrder()
        self.recoveries = 0
        self.layers: list[PlacedLayer] = []
        self.loads: Tensor | None = None
        # Of steps, where the price of a copy is not given. The first window is at home.
        self._times = StepTimes() if copy_cost is None else None
        self._rests = self._times is not None and online
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
        home = Plan.home(topology, num_experts)
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
        if self._stats is not None:
            raise RuntimeError("ExpertPlacement: layers come before the first forward")
        layer = PlacedLayer(self, len(self.layers), home, group)
        self.layers.append(layer)
        return layer

    @property
    def slot_experts(self) -> list[Tensor]:
        """(W, slots_per_rank) expert that runs in each slot, or -1, of each layer."""
        return [layer.plan.slot_experts for layer in self.layers]

    def imbalance(self) -> list[float]:
        """Heaviest over mean rank load of each layer: of its average loads, or its last online plan."""
        if self.online:
            plans = [layer.last_plan for layer in self.layers]
            return [p.imbalance(p.quotas.sum(1)) for p in plans if p is not None]
        if self.loads is None:
            return []
        return [
            layer.plan.imbalance(loads) for layer, loads in zip(self.layers, self.loads)
        ]

    def step(self) -> None:
        """Counts a step, and plans where it is time to. Collective.

        Called once per optimizer step, on all ranks, when no backward is to come any more:
        what is recomputed must find the plan of its forward.
        """
        self._steps += 1
        self.forget()
        window = self.every
        if self.online:
            for layer in () if self._rests else self.layers:
                layer.step()
            usual = _WINDOW if self._rests else _TRIAL
            window = None if self._times is None else window or usual
        if self._times is not None:
            self._times.tick()
        if window is None or self._steps % window:
            return
        if self._times is not None:
            self._compare(self._times)
        if self._stats is not None:
            before, self.loads = self.loads, self._stats.update()
            self._plan(before, self._stats.latest)

    def _compare(self, times: StepTimes) -> None:
        """Rests at home after a window that was slower with copies."""
        for layer in self.layers:
            if not self.online and layer.moves:
                layer.tried = layer.plan
        tried = [layer for layer in self.layers if layer.tried is not None]
        first = self.layers[0]
        group = c10d._resolve_process_group(first.group_name)
        device = first.exchange.needed.device
        self._rests, raises = times.slower(bool(tried), group, device)
        for layer in tried:
            plan, layer.tried = cast(Plan, layer.tried), None
            if raises:
                # Not again for less than twice as much a copy.
                gain = layer.home.cost(counts := plan.quotas.sum(1)) - plan.cost(counts)
                layer.copy_cost = (
                    2 * gain / max(1, busiest(plan.slot_experts, len(counts)))
                )

    def forget(self) -> None:
        """Fetches again what :attr:`keep` kept, as after a write through ``.data``."""
        for layer in self.layers:
            layer.fetcher.forget()

    def recover(
        self,
        model: nn.Module,
        weights: Callable[[str, int], Tensor] | None = None,
        *,
        seconds: float = 10.0,
    ) -> Recovery:
        """Goes on serving ``model`` after ranks were lost, on those that are left.

        Called by every rank that is left, once a forward raised as others did not answer.
        Ranks that do not call it within ``seconds`` are lost. An expert of a lost rank
        goes on from a copy, where a rank has kept one, or is loaded. From then on experts stay
        where they are, without gradients, also with ``online=True``, and loads are counted anew.
        The store of the default group must be alive.

        What cannot go on is refused on every rank before a layer is changed: too few slots, an
        expert that nobody has without ``weights``, ``ranks_per_node`` of a hierarchical switch
        that does not divide the ranks that are left.

        Args:
            model (nn.Module): has all layers of this placement.
            weights (callable, optional): ``weights(name, expert)`` loads the weights of one
                expert of a parameter, as from a checkpoint. Default: None (an error where it
                is needed)

        Keyword Args:
            seconds (float): to wait for other ranks. Default: 10.0

        Returns:
            Recovery: lost ranks, the pause, tokens to run again, and where weights came from.
        """
        return recover(self, model, weights, seconds)

    def _plan(self, before: Tensor | None = None, latest: Tensor | None = None) -> None:
        """Plans by :attr:`loads`. What the loads ``before`` gave must pay for the ``latest``:
        a plan is not for loads that change as fast as it is made."""
        if self.loads is None or self.online:
            return
        for i, layer in enumerate(self.layers):
            if layer.resident is not None:
                continue  # Its weights are where they are.
            price, topology = layer.copy_cost or 0.0, layer.home.topology
            found = layer.home
            if not self._rests:
                found = plan(self.loads[i], topology, price=price, tries=_TRIES)
            if before is not None and latest is not None and found is not layer.home:
                tried = layer.plan
                if not layer.moves:
                    tried = plan(before[i], topology, price=price, tries=_TRIES)
                if tried.cost(latest[i], price) > layer.home.cost(latest[i]):
                    found = layer.home
            layer.use(found)

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
            "quotas": [layer.plan.quotas.clone() for layer in self.layers],
            "loads": None if self.loads is None else self.loads.clone(),
            "copy_costs": [layer.copy_cost for layer in self.layers],
            "pauses": [(layer.pause, layer.pauses) for layer in self.layers],
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
        for i, layer in enumerate(self.layers):
            layer.pause, layer.pauses = state["pauses"][i]
            if self.copy_cost is None:
                layer.copy_cost = state["copy_costs"][i]
        plans = zip(self.layers, state["slot_experts"], state["quotas"])
        for layer, slots, quotas in plans:
            if layer.resident is not None or self.online:
                continue
            if slots.shape == layer.home.slot_experts.shape:
                layer.use(Plan(layer.home.topology, slots, quotas))
            else:
                self._plan()
                break
        if self._stats is not None and state["stats"] is not None:
            self._stats.load_state_dict(state["stats"])
        else:
            self._to_load = state["stats"]
