"""Continues a served model after ranks were lost, with copies or weights from a checkpoint."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed._moe.fetch import Made
from torch.distributed._moe.groups import sub_group
from torch.distributed._moe.plan import Plan, Topology
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel._expert_placed_layer import (
    PlacedLayer,
    with_weights,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.distributed_c10d import ProcessGroup
    from torch.distributed.tensor.parallel._expert_adapters import Experts
    from torch.distributed.tensor.parallel._expert_placement import ExpertPlacement


__all__ = ["recover", "Recovery"]


class Recovery(NamedTuple):
    """What :meth:`ExpertPlacement.recover` did. Equal on all ranks except for the time.

    Attributes:
        lost (list[int]): lost ranks of the default group.
        seconds (float): from the call until this rank could continue.
        tokens (dict[int, int]): tokens of the failed forward on each remaining rank, which
            have to run again; those of lost ranks are lost.
        copies (list[list[int]]): experts of each layer that continue from a copy.
        loaded (list[list[int]]): experts of each layer whose weights were loaded.
    """

    lost: list[int]
    seconds: float
    tokens: dict[int, int]
    copies: list[list[int]]
    loaded: list[list[int]]


class ServedLayer(PlacedLayer):
    """A layer on the remaining ranks. Its slots have weights of their own, which stay where they are.

    Attributes:
        resident (dict[str, Tensor]): (slots_per_rank, ...) weights of the experts of this rank.
        versions (tuple[int, ...]): of the parameters that they were taken from.
    """

    def __init__(
        self,
        lost: PlacedLayer,
        group: ProcessGroup,
        plan: Plan,
        resident: dict[str, Tensor],
        versions: tuple[int, ...],
    ) -> None:
        super().__init__(lost.owner, lost.index, plan, group)
        self.resident, self.versions = resident, versions

    def use(self, plan: Plan) -> None:
        super().use(self.home)

    def planned(self, counts: Tensor, tries: int = 1) -> Plan:
        return self.home

    def route(
        self,
        module: nn.Module,
        topk_indices: Tensor,
        weights: Mapping[str, Tensor],
        row_bytes: int,
        experts: Experts,
    ) -> tuple[Tensor, Experts]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "ExpertPlacement: after a rank was lost a model serves, under no_grad; "
                "training goes on from a checkpoint"
            )
        versions = _region(module).versions
        if not torch.compiler.is_compiling() and versions not in ((), self.versions):
            raise RuntimeError(
                "ExpertPlacement: experts were written after recover, and it serves those from before; "
                "new weights need a new model on the remaining ranks"
            )
        self._to(topk_indices.device)
        self.owner._record(self.index, self._counts(topk_indices))

        made: dict[Any, Any] = {}  # for all chunks

        def run(*args: Any, **kwargs: Any) -> Tensor:
            with with_weights(module, self.resident, made):
                return experts(*args, **kwargs)

        return self._at_home.take(topk_indices.long() + 1), run


def ranks_left(
    group_name: str, ranks: list[int], attempt: int, wait: float
) -> list[int]:
    """The members of ``ranks`` that call this within ``wait`` seconds of the first; the same on all."""
    store, key = c10d._get_default_store(), f"moe_recovery/{group_name}/{attempt}/"
    me, end = dist.get_rank(), time.monotonic() + wait
    store.set(key + str(me), "")
    heard: list[int] = []
    while len(heard) < len(ranks) and time.monotonic() < end:
        if store.check([key + "left"]):
            break
        heard = [rank for rank in ranks if store.check([key + str(rank)])]
        time.sleep(0.05)
    # The first rank to decide decides for all.
    text = ",".join(map(str, heard))
    decided = store.compare_set(key + "left", "", text).decode()
    left = [int(rank) for rank in decided.split(",")]
    if me not in left:
        raise RuntimeError(
            f"ExpertPlacement.recover: rank {me} came after ranks {left} went on, which "
            f"waited for {wait} s"
        )
    return left


def recover(
    self: ExpertPlacement,
    model: nn.Module,
    weights: Callable[[str, int], Tensor] | None = None,
    *,
    seconds: float = 10.0,
) -> Recovery:
    """Continues to serve ``model`` on the remaining ranks after ranks were lost.

    Every remaining rank calls it after a forward raised because others did not answer.
    Ranks that do not call it within ``seconds`` are lost. An expert of a lost rank
    continues from a copy, if a rank has kept one, or is loaded. From then on experts stay
    where they are, without gradients, also with ``online=True``, and loads are counted anew. An
    eager forward raises if the parameters of experts were written since (not inference tensors).
    The store of the default group must be alive.

    Every rank raises before a layer is changed if there are too few slots, if nobody has an
    expert and ``weights`` is not given, or if ``ranks_per_node`` of a hierarchical switch
    does not divide the remaining ranks.

    Args:
        model (nn.Module): has all layers of this placement.
        weights (callable, optional): ``weights(name, expert)`` loads the weights of one
            expert of a parameter, as from a checkpoint. Default: None (an error if it
            is needed)

    Keyword Args:
        seconds (float): seconds to wait for other ranks. Default: 10.0

    Returns:
        Recovery: lost ranks, the pause, tokens to run again, and where weights came from.
    """
    start = time.monotonic()
    old = c10d._resolve_process_group(self.layers[0].group_name)
    ranks = dist.get_process_group_ranks(old)
    self.recoveries += 1
    left = ranks_left(old.group_name, ranks, self.recoveries, seconds)
    group = c10d._resolve_process_group(sub_group(old, left))
    found = {
        m._expert_parallel.placed: (name, m)
        for name, m in model.named_modules()
        if getattr(getattr(m, "_expert_parallel", None), "placed", None)
    }
    layers = [(layer, *found[layer]) for layer in self.layers]
    tokens = max(_region(module).tokens for _, _, module in layers)
    held = [_held(layer, module) for layer, _, module in layers]
    # 2 for an expert at home, 1 for a copy of one.
    mine = [{e: 1 + at_home for e, (_, at_home) in rows.items()} for _, rows in held]
    # Objects, not a tensor: PyTorch knows the device on which the group's backend sends them.
    gathered: list[Any] = [None] * len(left)
    dist.all_gather_object(gathered, (tokens, mine), group=group)
    of_ranks = {rank: n for rank, (n, _) in zip(left, gathered)}
    # Errors are raised here, before a layer is changed.
    plans, switches = [], []
    for i, (layer, name, module) in enumerate(layers):
        have = [kinds[i] for _, kinds in gathered]
        plans.append(_plan(layer, name, have, weights is not None))
        switches.append(_switch(layer, module, group))
    residents, text, error = [], "", None
    try:
        for (_, name, _), (plan, _), rows in zip(layers, plans, held):
            experts = plan.slot_experts[dist.get_rank(group)].tolist()
            residents.append(_resident(name, *rows, weights, experts))
    except Exception as e:
        text, error = f"{type(e).__name__}: {e}", e
    # Otherwise ranks would send tokens to one that has no weights, and wait for it forever.
    failures: list[Any] = [None] * len(left)
    dist.all_gather_object(failures, text, group=group)
    failed = {rank: text for rank, text in zip(left, failures) if text}
    if failed:
        raise RuntimeError(
            f"ExpertPlacement.recover: weights could not be loaded on ranks {failed}; no layer "
            "was changed, and recover may be called again"
        ) from error
    settled = zip(layers, plans, switches, residents)
    for (layer, _, module), (plan, _), switch, resident in settled:
        region = _region(module)
        # What is resident may be of an earlier recovery.
        versions = layer.versions if isinstance(layer, ServedLayer) else region.versions
        served = ServedLayer(layer, group, plan, resident, versions)
        self.layers[layer.index] = region.placed = served
        region.switch, region.tokens = switch, 0
    copies = [[e for e, kind in enumerate(kinds) if kind == 1] for _, kinds in plans]
    loaded = [[e for e, kind in enumerate(kinds) if kind == 0] for _, kinds in plans]
    # They have the name of the lost group.
    self._stats = None
    lost = [rank for rank in ranks if rank not in left]
    return Recovery(lost, time.monotonic() - start, of_ranks, copies, loaded)


def _region(module: nn.Module) -> Any:
    return module._expert_parallel


def _held(
    layer: PlacedLayer, module: nn.Module
) -> tuple[dict[str, Tensor], dict[int, tuple[dict[str, Tensor], bool]]]:
    """Local shards, and the weights on this rank by expert, with whether they are at home here."""
    region = _region(module)
    local = region.local_parameters(module, region.expert_names)
    each, copies, rows = layer.exchange.local_experts, None, {}
    if isinstance(layer, ServedLayer):
        each, copies = 0, layer.resident
    elif layer.moves is not None:
        made = Made.of(layer.moves, local, region.versions)
        kept = None if made is None else layer.fetcher.kept_as(made)
        copies = None if kept is None else dict(zip(local, kept))
    for slot, e in enumerate(layer.plan.slot_experts[layer.exchange.rank].tolist()):
        if slot < each:
            rows[e] = {k: w[slot] for k, w in local.items()}, True
        elif e >= 0 and copies is not None:
            rows[e] = {k: w[slot - each] for k, w in copies.items()}, False
    return local, rows


def _plan(
    layer: PlacedLayer, name: str, have: list[dict[int, int]], loads: bool
) -> tuple[Plan, list[int]]:
    """Plan of the remaining ranks, and what the rank of each expert has of it, 0 if it loads it.

    Args:
        have (list[dict[int, int]]): what each rank has by expert, as in :func:`recover`.
    """
    E, slots = layer.home.num_experts, layer.home.topology.slots_per_rank
    table: list[dict[int, int]] = [{} for _ in have]
    kinds = [0] * E
    best = [max(held.get(e, 0) for held in have) for e in range(E)]
    # Experts at home come first, then those with a copy; others go where there is most room.
    for e in sorted(range(E), key=lambda e: -best[e]):
        room = [r for r, row in enumerate(table) if len(row) < slots]
        if not room:
            raise RuntimeError(
                f"ExpertPlacement.recover: {len(have)} ranks of {slots} slots have no room for "
                f"{E} experts; slots_per_rank must be larger"
            )
        rank = min(room, key=lambda r: (have[r].get(e, 0) < best[e], len(table[r])))
        table[rank][e], kinds[e] = 1, have[rank].get(e, 0)
    missing = [e for held in table for e in held if not kinds[e]]
    if missing and not loads:
        raise RuntimeError(
            f"ExpertPlacement.recover: nobody who has room has experts {missing} of {name!r}; "
            "weights must load them"
        )
    return Plan.of(Topology(1, len(have), slots), table), kinds


def _switch(layer: PlacedLayer, module: nn.Module, group: dist.ProcessGroup) -> Any:
    """Token switch of ``module`` over the slots of the remaining ranks."""
    region = _region(module)
    mesh = DeviceMesh.from_group(group, region.mesh_device_type)
    slots = layer.home.topology.slots_per_rank
    switch = region.make_switch(mesh, mesh.size() * slots)
    if hasattr(switch, "name_owner"):
        switch.name_owner(region.switch.levels[0].owner, region.switch.layer)
    return switch


def _resident(
    name: str,
    local: dict[str, Tensor],
    rows: dict[int, tuple[dict[str, Tensor], bool]],
    weights: Callable[[str, int], Tensor] | None,
    experts: list[int],
) -> dict[str, Tensor]:
    """Weights of ``experts`` in the slots of this rank; missing ones are loaded."""
    resident = {k: w.new_zeros(len(experts), *w.shape[1:]) for k, w in local.items()}
    with torch.no_grad():
        for slot, e in enumerate(experts):
            for key, out in resident.items():
                if e in rows:
                    out[slot].copy_(rows[e][0][key])
                elif weights is not None and e >= 0:
                    out[slot].copy_(weights(f"{name}.{key}".lstrip("."), e))
    return resident
