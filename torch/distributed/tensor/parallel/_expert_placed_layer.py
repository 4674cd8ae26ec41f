"""One layer of an ExpertPlacement: maps tokens to slots, fetches copies of weights and runs experts on them."""

from __future__ import annotations

import contextlib
import functools
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
from torch.distributed._moe.payload import is_traced
from torch.distributed._moe.plan import Plan, plan, reroute, slots_of, split_by_source
from torch.nn.utils import parametrize
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed.distributed_c10d import ProcessGroup
    from torch.distributed.tensor.parallel._expert_adapters import Experts
    from torch.distributed.tensor.parallel._expert_placement import ExpertPlacement


__all__ = ["LayerOrder", "PlacedExperts", "PlacedLayer"]


class LayerOrder:
    """The order of the layers of a placement, to fetch ahead for the next one."""

    def __init__(self) -> None:
        self._last: weakref.ref[nn.Module] | None = None
        self._next: WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]
        self._next = WeakKeyDictionary()

    def next_of(self, module: nn.Module, layer: PlacedLayer) -> nn.Module | None:
        """The layer that followed ``module``, which runs now, in the previous forward."""
        last = None if self._last is None else self._last()
        self._last = weakref.ref(module)
        if last is not None:
            placed = cast(Any, last)._expert_parallel.placed
            if placed.index < layer.index:
                self._next[last] = self._last
        following = self._next.get(module)
        return None if following is None else following()


# Most steps without online plans.
_LONGEST_PAUSE = 15


class PlacedLayer:
    """One expert-parallel layer of an :class:`ExpertPlacement`.

    Attributes:
        plan (Plan): which ranks run its experts, until the next plan.
        home (Plan): which ranks have its parameters.
        last_plan (Plan, optional): the plan of the last forward that was planned online.
        tried (Plan, optional): the last plan with copies since times of steps were compared.
    """

    def __init__(
        self, owner: ExpertPlacement, index: int, home: Plan, group: ProcessGroup
    ) -> None:
        self.owner = owner
        self.index = index
        self._join(group, home)
        self.fetcher = Fetcher(
            self.exchange, wire_dtype=owner.wire_dtype, keep=owner.keep
        )
        self.last_plan: Plan | None = None
        self.tried: Plan | None = None
        self.copy_cost = owner.copy_cost
        self.tokens = 0  # of the running or failed forward
        # Steps without online plans after one whose plan stayed at home.
        self.pause = self.pauses = 0
        # Weights of the slots, after ranks were lost.
        self.resident: dict[str, Tensor] | None = None
        self.use(home)

    def _join(self, group: ProcessGroup, home: Plan) -> None:
        """Runs over ``group``, on weights placed by ``home``."""
        self.home = home
        # Flights have their own group; their thread does not send counts and loads.
        self.group_name = group.group_name
        self.exchange = Exchange(group, home.num_experts, None, level="experts")
        self.levels = (self.exchange,)  # for count_wire_bytes
        # Slots at home by id + 1; none for -1 and E.
        ranks, slots = home.slot_experts.shape
        at_home = slots_of(home.slot_experts, home.num_experts)
        at_home = torch.where(at_home < 0, -1, at_home + slots * torch.arange(ranks))
        self._at_home = nn.functional.pad(at_home.amax(1), (1, 1), value=-1)

    @property
    def moves(self) -> bool:
        """Whether ``plan`` has copies."""
        return self._moves is not None

    def use(self, plan: Plan) -> None:
        """Uses ``plan`` from the next forward on; nothing moves."""
        self._moves = self._moves_of(plan)
        self.plan = plan
        self._plan_text = str(plan.slot_experts.tolist())
        self._slots = slots_of(plan.slot_experts, plan.num_experts)
        self._shares = plan.shares().cumsum(1)

    def _moves_of(self, plan: Plan) -> Moves | None:
        if torch.equal(plan.slot_experts, self.home.slot_experts):
            return None  # Weights stay where they are.
        return moves_of(plan.slot_experts, plan.num_experts, self.exchange.rank)

    def rows(
        self, module: nn.Module
    ) -> tuple[dict[str, Tensor], dict[int, tuple[dict[str, Tensor], bool]]]:
        """Local shards, and the weights on this rank by expert, with whether they are at home here."""
        region = cast(Any, module)._expert_parallel
        local = region.local_parameters(module, region.expert_names)
        mine = self.plan.slot_experts[self.exchange.rank].tolist()
        each, copies, rows = self.exchange.local_experts, self.resident, {}
        if copies is not None:
            each = 0
        elif self._moves is not None:
            copies = self.fetcher.kept(self._moves, local, region.versions)
        for slot, e in enumerate(mine):
            if slot < each:
                rows[e] = {k: w[slot] for k, w in local.items()}, True
            elif e >= 0 and copies is not None:
                rows[e] = {k: w[slot - each] for k, w in copies.items()}, False
        return local, rows

    def settle(
        self, plan: Plan, resident: dict[str, Tensor], group: ProcessGroup
    ) -> None:
        """Runs ``plan`` over ``group``, on weights in its slots."""
        self.fetcher.forget()
        self._join(group, plan)
        self.resident, self.tokens = resident, 0
        self.use(plan)

    def route(
        self,
        module: nn.Module,
        topk_indices: Tensor,
        weights: Mapping[str, Tensor],
        row_bytes: int,
        experts: Experts,
    ) -> tuple[Tensor, Experts | PlacedExperts]:
        """Slots of the experts in this forward, and the function that runs those of this rank.

        Args:
            module (nn.Module): the layer.
            topk_indices (Tensor): (T, K) expert ids of this rank.
            weights (dict[str, Tensor]): local expert parameters.
            row_bytes (int): of a token.
            experts (Experts): runs experts with the weights of ``module``.

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
        elif not self._plan_text:
            # This never happens. Reading the text makes Dynamo guard on the whole plan, so all ranks
            # recompile together and reach torch._dynamo.config.recompile_limit together.
            raise AssertionError("a plan without slots")
        if self.copy_cost is None:
            size = sum(w[0].numel() * w.element_size() for w in weights.values())
            # Weights there and gradients back, over two rows each way.
            self.copy_cost = 2 * size / max(1, 4 * row_bytes)
        online = self.owner.online and self.resident is None
        plans = online and not self.owner._rests and not self.pause
        table, moves, split = self._slots, self._moves, None
        if plans:
            source = self._counts_of_ranks(self._counts(topk_indices))
            # An activation checkpointing policy may keep results, which must not be overwritten.
            with _disable_current_modes():
                plan = self._plan_online(source.sum(0))
                moves = self._moves_of(plan)
                if moves is not None:
                    self.tried, moves = plan, moves.to(device)
                    table = slots_of(plan.slot_experts, E)
                    quotas = plan.quotas.to(device)
                    split = split_by_source(source, quotas, self.exchange.rank)
        elif not online:
            counts = self._counts(topk_indices)
            self.owner._record(self.index, counts)
            if moves is not None or self.resident is not None:
                # Cumulative shares end at 1, so all copies are covered.
                ends = (counts[:, None] * self._shares).round().long()
                split = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
        if split is None:
            slots = self._at_home.take(topk_indices.long() + 1)
        else:
            per_rank = self.home.topology.slots_per_rank
            slots = reroute(topk_indices, split, table.to(device), per_rank)
        follows = not self.owner.online and _reusable(module)
        ahead = self.owner.order.next_of(module, self) if follows else None
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
        """Plans by the (num_experts) counts of all ranks."""
        price = self.copy_cost or 0.0
        self.last_plan = plan(counts, self.home.topology, price=price)
        return self.last_plan

    def step(self) -> None:
        """Pauses online plans while none pays, about twice as long each time."""
        if self.pause:
            self.pause -= 1
        elif self.last_plan is not None:
            stays = self.tried is not self.last_plan
            self.pauses = min(2 * self.pauses + 1, _LONGEST_PAUSE) if stays else 0
            self.pause = self.pauses


class PlacedExperts:
    """Experts of a rank in one forward, including copies that may still be in flight."""

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
        # For all chunks: the copies, and what parametrizations computed from them.
        self._copies: dict[str, Tensor] = {}
        self._made: dict[Any, Any] = {}
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
            with self._with_weights(self._layer.resident):
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
            with self._with_weights(self._copies):
                others = rest(rows, there, weights, _bound(there, num_rows))
            if ids.shape[1] == 1:
                output = torch.where(there < 0, output, others)
            else:
                output = output + others
        return after_fetch(output, self._copies)

    @contextlib.contextmanager
    def _with_weights(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Gives the module other weights, and a separate cache to parametrizations (LoRA) of them."""
        cached = parametrize._cache
        if parametrize._cache_enabled:
            parametrize._cache = self._made
        try:
            with _reparametrize_module(self._module, weights):
                yield
        finally:
            if parametrize._cache_enabled:
                parametrize._cache = cached


def _bound(ids: Tensor, num_rows: int | None) -> int | None:
    """Upper bound of ``ids`` that are not -1; exact if reading them is free."""
    if num_rows is None or ids.device.type != "cpu" or is_traced(ids):
        return num_rows
    return int((ids >= 0).sum())


# Modes that are active on all ranks or on none, besides infra modes (FakeTensorMode).
_SHARED_MODES = (LocalTensorMode, _CachedTorchDispatchMode, _CachingTorchDispatchMode)


def _reusable(module: nn.Module) -> bool:
    """Whether a copy may outlive the forward or region that fetches it.

    It may not in a graph, during tracing, in a recomputed region or one whose results
    are kept, and if FSDP changes a parameter without its version. Other modes, such as a
    FLOP counter, must not matter: a single rank may have them, and all must send the same.
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
