"""One layer of an ExpertPlacement: maps tokens to slots, fetches copies of weights and runs experts on them."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, cast, TYPE_CHECKING
from weakref import ref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, Tensor
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed._moe.agreement import CheckedTokenSwitch
from torch.distributed._moe.exchange import Exchange, meet, MEETS_FOR
from torch.distributed._moe.fetch import after_fetch, Fetch, Fetcher, Moves, moves_of
from torch.distributed._moe.payload import is_traced
from torch.distributed._moe.plan import Plan, plan, reroute, split_by_source
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


__all__ = ["PlacedExperts", "PlacedLayer", "with_weights"]


# Most steps without online plans.
_LONGEST_PAUSE = 15


class PlacedLayer:
    """One expert-parallel layer of an :class:`ExpertPlacement`.

    Attributes:
        plan (Plan): which ranks run its experts, until the next plan.
        moves (Moves, optional): what this rank sends and receives for its copies, if it has any.
        home (Plan): which ranks have its parameters.
        last_plan (Plan, optional): the plan of the last forward that was planned online.
        tried (Plan, optional): the last plan with copies since times of steps were compared.
        is_loaded (bool): whether the plan is of a saved state, which ranks have not compared yet.
    """

    is_loaded = False

    def __init__(
        self, owner: ExpertPlacement, index: int, home: Plan, group: ProcessGroup
    ) -> None:
        self.owner = owner
        self.index = index
        self.home = home
        # Flights have their own group; their thread does not send counts and loads.
        self.group_name = group.group_name
        self.counts = Exchange(group, home.num_experts, None, level="counts")
        self.exchange = Exchange(group, home.num_experts, None, level="experts")
        self.levels = (self.exchange,)  # for count_wire_bytes
        self.fetcher = Fetcher(self.exchange, owner.wire_dtype, owner.keep)
        self.last_plan: Plan | None = None
        self.copy_cost = owner.copy_cost
        # Steps without online plans after one whose plan stayed at home.
        self.pause = self.pauses = 0
        # The one slot of each expert by id + 1; none for -1 and E, which mean no expert.
        slots = home.slot_experts.flatten().argsort()[-home.num_experts :]
        self._at_home = F.pad(slots, (1, 1), value=-1)
        self.use(home)

    def use(self, plan: Plan) -> None:
        """Uses ``plan`` from the next forward on; nothing moves."""
        self.moves = self._moves_of(plan)
        self.plan = plan
        self.tried = None if self.moves is None else plan
        self._plan_text = str(plan.slot_experts.tolist())
        self._slots = plan.slots()
        self._shares = plan.shares().cumsum(1)

    def _moves_of(self, plan: Plan) -> Moves | None:
        if torch.equal(plan.slot_experts, self.home.slot_experts):
            return None  # Weights stay where they are.
        return moves_of(plan, self.exchange.rank)

    def planned(self, counts: Tensor, tries: int = 1) -> Plan:
        """A plan by ``counts``, at the price of a copy."""
        price = self.copy_cost or 0.0
        return plan(counts, self.home.topology, price=price, tries=tries)

    def route(
        self,
        module: nn.Module,
        topk_indices: Tensor,
        weights: Mapping[str, Tensor],
        row_bytes: int,
        experts: Experts,
    ) -> tuple[Tensor, Experts | PlacedExperts]:
        """(T, K) slots of the experts in this forward, -1 for no expert, and ``experts`` with the copies.

        Args:
            topk_indices (Tensor): (T, K) expert ids of this rank.
            weights (dict[str, Tensor]): local expert parameters.
            row_bytes (int): of a token.
        """
        self._to(topk_indices.device)
        switch = _switch(module)
        if isinstance(switch, CheckedTokenSwitch) and not torch.compiler.is_compiling():
            # Before the counts of an online plan and before a fetch, which ranks with other settings
            # or another plan do not send. Loads of all layers are summed in one message.
            number = {"number of layers of the placement": len(self.owner.layers)}
            switch._must_agree(**number)
            if self.is_loaded:
                name = "checksum of the loaded plan"
                switch._agreed.discard((name,))
                switch._must_agree(**{name: self.plan.checksum()})
                self.is_loaded = False
            self.counts.owner = self.exchange.owner = switch.levels[0].owner
        if torch.compiler.is_compiling():
            # This never happens. Reading the text makes Dynamo guard on the whole plan, so all ranks
            # recompile together and reach torch._dynamo.config.recompile_limit together.
            if not self._plan_text:
                raise AssertionError("a plan without slots")
        elif self.owner._times is not None and torch.is_grad_enabled():
            self.owner._times.begin()
        if self.copy_cost is None:
            size = sum(w[0].numel() * w.element_size() for w in weights.values())
            # Weights there and gradients back, over two rows each way.
            self.copy_cost = 2 * size / max(1, 4 * row_bytes)
        online, moves, table, split = self.owner.online, self.moves, self._slots, None
        if online and not self.owner._rests and not self.pause:
            moves, table, split = self._plan_online(topk_indices)
        elif not online:
            counts = self._counts(topk_indices)
            self.owner._record(self.index, counts)
            if moves is not None:
                # Cumulative shares end at 1, so all copies are covered.
                ends = (counts[:, None] * self._shares).round().long()
                split = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
        if split is None:
            slots = self._at_home.take(topk_indices.long() + 1)
        else:
            per_rank = self.home.topology.slots_per_rank
            slots = reroute(topk_indices, split, table, per_rank)
        ahead = None if online else self._next_of(module)
        if moves is None and ahead is None:
            return slots, experts
        fetch = None
        if moves is not None:
            fetch = self.fetcher.begin(moves, weights, _versions(module))
        return slots, PlacedExperts(self, module, fetch, weights, experts, ahead)

    def _to(self, device: torch.device) -> None:
        if self._slots.device != device:
            self._slots, self._shares = self._slots.to(device), self._shares.to(device)
            self._at_home = self._at_home.to(device)
            self.moves = None if self.moves is None else self.moves.to(device)

    def _next_of(self, module: nn.Module) -> nn.Module | None:
        """The module that followed ``module``, which runs now, in the previous forward; None if it
        needs no fetch."""
        if _versions(module) is None:
            return None
        following, now = self.owner.following, ref(module)
        last = None if self.owner.last is None else self.owner.last()
        self.owner.last = now
        if last is not None and _placed(last).index < self.index:
            following[last] = now
        ahead = following[module]() if module in following else None
        if ahead is None or _placed(ahead).moves is None:
            return None
        # A plan that was loaded is compared first, when its own layer runs.
        return None if _placed(ahead).is_loaded else ahead

    def fetch_ahead(self, module: nn.Module) -> None:
        """Issues the fetch of the next forward of ``module``, which has this layer."""
        region = cast(Any, module)._expert_parallel
        weights = region.local_parameters(module, region.expert_names)
        self._to(next(iter(weights.values())).device)
        if self.moves is not None:
            self.fetcher.ahead(self.moves, weights, _versions(module))

    def _counts(self, topk_indices: Tensor) -> Tensor:
        """(num_experts) int32 token copies of this rank."""
        return torch._moe_permutation(topk_indices, self.home.num_experts).counts

    def _plan_online(
        self, topk_indices: Tensor
    ) -> tuple[Moves | None, Tensor, Tensor | None]:
        """Moves, slots and split of a plan by the counts of all ranks; at home there is no split."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "ExpertPlacement: online=True plans on the host and can't be compiled"
            )
        counts = self._counts(topk_indices).long()
        source = counts.new_empty(self.exchange.num_ranks, len(counts))
        meet((self.counts,), counts, "counts", {MEETS_FOR: 2 + self.index})
        operands = source.view(-1), counts
        gather = functools.partial(
            dist.all_gather_into_tensor, *operands, group=self.counts.group
        )
        self.counts.named("counts", gather)
        # An activation checkpointing policy may keep results, which must not be overwritten.
        with _disable_current_modes():
            self.last_plan = found = self.planned(source.sum(0))
            moves = self._moves_of(found)
            if moves is None:
                return None, self._slots, None
            self.tried = found
            device = counts.device
            split = split_by_source(source, found.quotas.to(device), self.exchange.rank)
            return moves.to(device), found.slots().to(device), split

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
        fetch: Fetch | None,
        weights: Mapping[str, Tensor],
        experts: Experts,
        ahead: nn.Module | None,
    ) -> None:
        self._layer, self._module, self._weights = layer, module, weights
        self._fetch, self._experts, self._ahead = fetch, experts, ahead
        self.sends = fetch is not None and fetch.sends
        # For all chunks: the copies, and what parametrizations computed from them.
        self._copies: dict[str, Tensor] = {}
        self._made: dict[Any, Any] = {}

    def __call__(
        self,
        rows: Tensor,
        ids: Tensor,
        weights: Tensor,
        num_rows: int | None = None,
        **options: Any,
    ) -> Tensor:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            _placed(ahead).fetch_ahead(ahead)
        rest = functools.partial(self._experts, **options)
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
            with with_weights(self._module, self._copies, self._made):
                others = rest(rows, there, weights, _bound(there, num_rows))
            if ids.shape[1] == 1:
                output = torch.where(there < 0, output, others)
            else:
                output = output + others
        return after_fetch(output, self._copies)


@contextlib.contextmanager
def with_weights(
    module: nn.Module, weights: dict[str, Tensor], made: dict[Any, Any]
) -> Iterator[None]:
    """Gives ``module`` other weights, and parametrizations (LoRA) of them the cache ``made``."""
    cached = parametrize._cache
    if parametrize._cache_enabled:
        parametrize._cache = made
    try:
        with _reparametrize_module(module, weights):
            yield
    finally:
        if parametrize._cache_enabled:
            parametrize._cache = cached


def _placed(module: nn.Module) -> PlacedLayer:
    return cast(Any, module)._expert_parallel.placed


def _switch(module: nn.Module) -> Any:
    return cast(Any, module)._expert_parallel.switch


def _bound(ids: Tensor, num_rows: int | None) -> int | None:
    """Upper bound of ``ids`` that are not -1; exact if reading them is free."""
    if num_rows is None or ids.device.type != "cpu" or is_traced(ids):
        return num_rows
    return int((ids >= 0).sum())


# Modes that are active on all ranks or on none, besides infra modes (FakeTensorMode).
_SHARED_MODES = (LocalTensorMode, _CachedTorchDispatchMode, _CachingTorchDispatchMode)


def _versions(module: nn.Module) -> tuple[int, ...] | None:
    """Versions of the parameters, if a copy may outlive the forward or region that fetches it.

    It may not in a graph, during tracing, in a recomputed region or one whose results
    are kept, and if FSDP changes a parameter without its version. Other modes, such as a
    FLOP counter, must not matter: a single rank may have them, and all must send the same.
    """
    if (
        torch.compiler.is_compiling()
        or any(
            mode.is_infra_mode() or isinstance(mode, _SHARED_MODES)
            for mode in _get_current_dispatch_mode_stack()
        )
        or torch._C._current_graph_task_id() != -1
        or getattr(module, "_is_fsdp_managed_module", False)
    ):
        return None
    return cast(Any, module)._expert_parallel.versions
