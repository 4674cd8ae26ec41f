"""Policy of the ranks that run experts: loads, when to plan, and what a plan must be worth."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from typing import Any, cast, TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed._moe.exchange import Exchange
from torch.distributed._moe.fetch import after_fetch, Fetcher, Moves, moves_of
from torch.distributed._moe.loads import LoadStats, StepTimes
from torch.distributed._moe.payload import is_traced
from torch.distributed._moe.plan import (
    busiest,
    Plan,
    plan,
    reroute,
    slots_of,
    split_by_source,
    Topology,
)
from torch.distributed.tensor.parallel._expert_recovery import recover, Recovery
from torch.nn.utils import parametrize
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.distributed.distributed_c10d import ProcessGroup
    from torch.distributed.tensor.parallel._expert_adapters import Experts


__all__ = ["ExpertPlacement", "PlacedLayer"]


class PlacedLayer:
    """One expert-parallel layer of an :class:`ExpertPlacement`.

    Attributes:
        plan (Plan): which ranks run its experts, until the next plan.
        home (Plan): which ranks have its parameters.
        last_plan (Plan, optional): of the last forward that was planned online.
        tried (Plan, optional): the last one with copies since the times of steps were compared.
    """

    def __init__(
        self, owner: ExpertPlacement, index: int, home: Plan, group: ProcessGroup
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
        self.last_plan: Plan | None = None
        self.tried: Plan | None = None
        self.copy_cost = owner.copy_cost
        self.tokens = 0  # of the forward that runs, or failed
        # Steps without online plans after one in which all plans were to stay at home.
        self.pause = self.pauses = 0
        # Weights of the slots, once ranks were lost.
        self.resident: dict[str, Tensor] | None = None
        self.use(home)

    @property
    def moves(self) -> bool:
        """Whether ``plan`` has copies."""
        return self._moves is not None

    def use(self, plan: Plan) -> None:
        """From the next forward on; nothing moves."""
        self._moves = self._moves_of(plan)
        self.plan = plan
        self._slots = slots_of(plan.slot_experts, plan.num_experts)
        self._shares = plan.shares().cumsum(1)
        # Slots at home by id + 1; none for -1 and E.
        first = self.home.topology.slots_per_rank * torch.arange(
            self.home.topology.num_ranks
        )
        at_home = slots_of(self.home.slot_experts, self.home.num_experts)
        at_home = torch.where(at_home < 0, -1, at_home + first).amax(1)
        self._at_home = nn.functional.pad(at_home, (1, 1), value=-1)

    def _moves_of(self, plan: Plan) -> Moves | None:
        if torch.equal(plan.slot_experts, self.home.slot_experts):
            return None  # Weights are used where they are.
        return moves_of(plan.slot_experts, plan.num_experts, self.exchange.rank)

    def rows(
        self, local: Mapping[str, Tensor], versions: tuple[int, ...]
    ) -> dict[int, tuple[dict[str, Tensor], bool]]:
        """Weights that are here, by expert, and whether they are those at home."""
        mine = self.plan.slot_experts[self.exchange.rank].tolist()
        each, copies, rows = self.exchange.local_experts, self.resident, {}
        if copies is not None:
            each = 0
        elif self._moves is not None:
            copies = self.fetcher.kept(self._moves, local, versions)
        for slot, e in enumerate(mine):
            if slot < each:
                rows[e] = {k: w[slot] for k, w in local.items()}, True
            elif e >= 0 and copies is not None:
                rows[e] = {k: w[slot - each] for k, w in copies.items()}, False
        return rows

    def settle(
        self, plan: Plan, resident: dict[str, Tensor], group: ProcessGroup
    ) -> None:
        """Runs by ``plan`` over ``group``, on weights that are in its slots."""
        self.fetcher.forget()
        self.group_name = group.group_name
        self.exchange = Exchange(group, plan.num_experts, None, level="experts")
        self.resident, self.tokens, self.home = resident, 0, plan
        self.use(plan)

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
        device, E = topk_indices.device, self.home.num_experts
        self._to(device)
        if self.resident is not None and torch.is_grad_enabled():
            raise RuntimeError(
                "ExpertPlacement: after a rank was lost a model serves, under no_grad; "
                "training goes on from a checkpoint"
            )
        if not torch.compiler.is_compiling():
            self.tokens = len(topk_indices)
            if self.owner._times is not None and torch.is_grad_enabled():
                self.owner._times.begin()
        if self.copy_cost is None:
            size = sum(w[0].numel() * w.element_size() for w in weights.values())
            # Weights there and gradients back, next to two rows there and two back.
            self.copy_cost = 2 * size / max(1, 4 * row_bytes)
        online = self.owner.online and self.resident is None
        plans = online and not self.owner._rests and not self.pause
        table, moves, split = self._slots, self._moves, None
        if plans:
            source = self._counts_of_ranks(self._counts(topk_indices))
            # What a policy of activation checkpointing keeps must not be written into.
            with _disable_current_modes():
                plan = self._plan_online(source.sum(0))
                moves = self._moves_of(plan)
                if moves is not None:
                    self.tried, moves = plan, moves.to(device)
                    table, quotas = (
                        slots_of(plan.slot_experts, E),
                        plan.quotas.to(device),
                    )
                    split = split_by_source(source, quotas, self.exchange.rank)
        elif not online:
            counts = self._counts(topk_indices)
            self.owner._record(self.index, counts)
            if moves is not None or self.resident is not None:
                # Ends on all of them, as the shares of an expert do on 1.
                ends = (counts[:, None] * self._shares).round().long()
                split = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
        if split is None:
            slots = self._at_home.take(topk_indices.long() + 1)
        else:
            per_rank = self.home.topology.slots_per_rank
            slots = reroute(topk_indices, split, table.to(device), per_rank)
        follows = not self.owner.online and _reusable(module)
        ahead = self.owner._next_of(module, self) if follows else None
        if moves is None and ahead is None and self.resident is None:
            return slots, experts
        return slots, PlacedExperts(self, module, moves, weights, experts, ahead)

    def _to(self, device: torch.device) -> None:
        if self._slots.device != device:
            self._slots, self._shares = self._slots.to(device), self._shares.to(device)
            self._at_home = self._at_home.to(device)
            self._moves = None if self._moves is None else self._moves.to(device)

    def fetch_ahead(self, module: nn.Module) -> None:
        """Issues the fetch of the next forward of ``module``, which has this layer."""
        region = cast(Any, module)._expert_parallel
        if self._moves is None or not _reusable(module):
            return
        weights = region.local_parameters(module, region.expert_names)
        self._to(next(iter(weights.values())).device)
        self.fetcher.ahead(self._moves, weights, region.versions)

    def _counts(self, topk_indices: Tensor) -> Tensor:
        """(num_experts) int64 token copies of this rank."""
        _, _, _, counts = torch._moe_permutation(topk_indices, self.home.num_experts)
        return counts.long()

    def _counts_of_ranks(self, counts: Tensor) -> Tensor:
        """(num_ranks, num_experts) token copies of this forward."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "ExpertPlacement: online=True plans on the host and can't be compiled"
            )
        source = counts.new_empty(self.exchange.num_ranks * len(counts))
        group = c10d._resolve_process_group(self.group_name)
        dist.all_gather_into_tensor(source, counts, group=group)
        return source.view(-1, len(counts))

    def _plan_online(self, counts: Tensor) -> Plan:
        """Plan by the (num_experts) counts of all ranks."""
        price = self.copy_cost or 0.0
        self.last_plan = plan(counts, self.home.topology, price=price)
        return self.last_plan

    def step(self) -> None:
        """Plans online seldom while no plan pays, twice as seldom each time."""
        if self.pause:
            self.pause -= 1
        elif self.last_plan is not None:
            stays = self.tried is not self.last_plan
            self.pauses = min(2 * self.pauses + 1, _LONGEST_PAUSE) if stays else 0
            self.pause = self.pauses


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
        self._layer, self._module, self._weights = layer, module, weights
        self._experts, self._ahead = experts, ahead
        self._fetch = None
        self._copies: dict[str, Tensor] = {}
        if moves is not None:
            region = cast(Any, module)._expert_parallel
            versions = region.versions if _reusable(module) else None
            self._fetch = layer.fetcher.begin(moves, weights, versions)

    @property
    def sends(self) -> bool:
        return self._fetch is not None and self._fetch.sends

    def __call__(
        self,
        rows: Tensor,
        ids: Tensor,
        weights: Tensor,
        num_rows: int | None = None,
        **options: Any,
    ) -> Tensor:
        if self._ahead is not None:
            ahead, self._ahead = cast(Any, self._ahead), None
            ahead._expert_parallel.placed.fetch_ahead(ahead)
        rest = functools.partial(self._experts, **options)
        if self._layer.resident is not None:
            with _with_weights(self._module, self._layer.resident):
                return rest(rows, ids, weights, num_rows)
        if self._fetch is None:
            return rest(rows, ids, weights, num_rows)
        each = self._layer.exchange.local_experts
        # While the copies are on their way.
        here = ids.masked_fill(ids >= each, -1)
        output = rest(rows, here, weights, _bound(here, num_rows))
        if not self._copies:
            self._copies = self._layer.fetcher.end(self._fetch, self._weights)
        if len(next(iter(self._copies.values()))):
            there = (ids - each).clamp_min(-1)
            with _with_weights(self._module, self._copies):
                others = rest(rows, there, weights, _bound(there, num_rows))
            if ids.shape[1] == 1:
                output = torch.where(there < 0, output, others)
            else:
                output = output + others
        return after_fetch(output, self._copies)


@contextlib.contextmanager
def _with_weights(module: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """``module`` has other weights; what parametrizations, as LoRA, cached of its own is not theirs."""
    cached = parametrize._cache
    if parametrize._cache_enabled:
        parametrize._cache = {}
    try:
        with _reparametrize_module(module, weights):
            yield
    finally:
        if parametrize._cache_enabled:
            parametrize._cache = cached


def _bound(ids: Tensor, num_rows: int | None) -> int | None:
    """Of ``ids`` that are not -1, exact where reading it is free."""
    if num_rows is None or ids.device.type != "cpu" or is_traced(ids):
        return num_rows
    return int((ids >= 0).sum())


# That all ranks have if one of them has, besides those of compilers (FakeTensorMode).
_SHARED_MODES = (LocalTensorMode, _CachedTorchDispatchMode, _CachingTorchDispatchMode)


def _reusable(module: nn.Module) -> bool:
    """Whether a copy may outlive what it is fetched in.

    Not in a graph, or while one is traced; in a region that is recomputed, or whose operators
    are kept; or where FSDP gives a parameter other values behind its version. Other modes, as
    one that counts FLOPs, do not matter: one rank alone may have them, and all must send the same.
    """
    return not (
        torch.compiler.is_compiling()
        or any(
            mode.is_infra_mode() or isinstance(mode, _SHARED_MODES)
            for mode in _get_current_dispatch_mode_stack()
        )
        or torch._C._current_graph_task_id() != -1
        or getattr(module, "_is_fsdp_managed_module", False)
    )


# Plans by average loads that are compared.
_TRIES = 3
# Steps whose times are compared, where there is no ``every``: at home, and in a trial of copies, which may
# be slower. And most steps without online plans.
_WINDOW, _TRIAL, _LONGEST_PAUSE = 8, 4, 15


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
        # Which module ran after which, to fetch ahead for it.
        self._last: weakref.ref[nn.Module] | None = None
        self._next: WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]
        self._next = WeakKeyDictionary()
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
