"""Continues a served model after ranks were lost, with copies or weights from a checkpoint."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed._moe.exchange import sub_group
from torch.distributed._moe.plan import Plan, slots_of, Topology
from torch.distributed.device_mesh import DeviceMesh


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.tensor.parallel._expert_placed_layer import PlacedLayer
    from torch.distributed.tensor.parallel._expert_placement import ExpertPlacement

    Weights = Callable[[str, int], Tensor]


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
    placement: ExpertPlacement, model: nn.Module, weights: Weights | None, wait: float
) -> Recovery:
    """See :meth:`ExpertPlacement.recover`."""
    start = time.monotonic()
    old = c10d._resolve_process_group(placement.layers[0].group_name)
    ranks = dist.get_process_group_ranks(old)
    placement.recoveries += 1
    left = ranks_left(old.group_name, ranks, placement.recoveries, wait)
    group = c10d._resolve_process_group(sub_group(old, left))
    found = {
        m._expert_parallel.placed: (name, m)
        for name, m in model.named_modules()
        if getattr(getattr(m, "_expert_parallel", None), "placed", None)
    }
    layers = [(layer, *found[layer]) for layer in placement.layers]
    tokens = max(layer.tokens for layer in placement.layers)
    # 2 for an expert at home, 1 for a copy of one.
    mine = [
        {e: 1 + at_home for e, (_, at_home) in layer.rows(module)[1].items()}
        for layer, _, module in layers
    ]
    # Objects, not a tensor: PyTorch knows the device on which the group's backend sends them.
    gathered: list[Any] = [None] * len(left)
    dist.all_gather_object(gathered, (tokens, mine), group=group)
    of_ranks = {rank: n for rank, (n, _) in zip(left, gathered)}
    # Errors are raised here, before a layer is changed.
    tables, switches = [], []
    for i, (layer, name, module) in enumerate(layers):
        have = [held[i] for _, held in gathered]
        tables.append((have, _table(layer, name, have, weights is not None)))
        switches.append(_switch(layer, module, group))
    residents: list[dict[str, Tensor]] = []
    error: Exception | None = None
    try:
        for (layer, name, module), (_, table) in zip(layers, tables):
            mine_now = table[dist.get_rank(group)]
            residents.append(_resident(layer, name, module, weights, mine_now))
    except Exception as e:
        error = e
    # Otherwise ranks would send tokens to one that has no weights, and wait for it forever.
    failures: list[Any] = [None] * len(left)
    text = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(failures, text, group=group)
    failed = {rank: text for rank, text in zip(left, failures) if text is not None}
    if failed:
        raise RuntimeError(
            f"ExpertPlacement.recover: weights could not be loaded on ranks {failed}; no layer "
            "was changed, and recover may be called again"
        ) from error
    copies, loaded = [], []
    settled = zip(layers, tables, switches, residents)
    for (layer, _, module), (have, table), switch, resident in settled:
        E, slots = layer.home.num_experts, layer.home.topology.slots_per_rank
        table = [row + [-1] * (slots - len(row)) for row in table]
        quotas = (slots_of(torch.tensor(table), E) >= 0).long()
        topology = Topology(1, len(table), slots)
        layer.settle(Plan(topology, torch.tensor(table), quotas), resident, group)
        module._expert_parallel.switch = switch
        held = [
            (have[r].get(e), e) for r, row in enumerate(table) for e in row if e >= 0
        ]
        copies.append(sorted(e for kind, e in held if kind == 1))
        loaded.append(sorted(e for kind, e in held if kind is None))
    # They have the name of the lost group.
    placement._stats = None
    lost = [rank for rank in ranks if rank not in left]
    return Recovery(lost, time.monotonic() - start, of_ranks, copies, loaded)


def _table(
    layer: PlacedLayer, name: str, have: list[dict[int, int]], loads: bool
) -> list[list[int]]:
    """Experts of each remaining rank, which has them (``have``) or loads them."""
    E, slots = layer.home.num_experts, layer.home.topology.slots_per_rank
    table: list[list[int]] = [[] for _ in have]
    best = [max(held.get(e, 0) for held in have) for e in range(E)]
    # Experts at home come first, then those with a copy; others go where there is most room.
    for e in sorted(range(E), key=lambda e: -best[e]):
        options = [r for r, held in enumerate(have) if held.get(e, 0) == best[e]]
        options = [r for r in options if len(table[r]) < slots] or [
            r for r in range(len(have)) if len(table[r]) < slots
        ]
        if not options:
            raise RuntimeError(
                f"ExpertPlacement.recover: {len(have)} ranks of {slots} slots have no room for "
                f"{E} experts; slots_per_rank must be larger"
            )
        table[min(options, key=lambda r: len(table[r]))].append(e)
    missing = [e for r, held in enumerate(table) for e in held if e not in have[r]]
    if missing and not loads:
        raise RuntimeError(
            f"ExpertPlacement.recover: nobody who has room has experts {missing} of {name!r}; "
            "weights must load them"
        )
    return table


def _switch(layer: PlacedLayer, module: nn.Module, group: dist.ProcessGroup) -> Any:
    """Token switch of ``module`` over the slots of the remaining ranks."""
    region: Any = module._expert_parallel
    mesh = DeviceMesh.from_group(group, region.mesh_device_type)
    slots = layer.home.topology.slots_per_rank
    switch = region.make_switch(mesh, mesh.size() * slots)
    if hasattr(switch, "name_owner"):
        switch.name_owner(region.switch.levels[0].owner, region.switch.layer)
    return switch


def _resident(
    layer: PlacedLayer,
    name: str,
    module: nn.Module,
    weights: Weights | None,
    experts: list[int],
) -> dict[str, Tensor]:
    """Weights of ``experts`` in the slots of this rank; missing ones are loaded."""
    slots = layer.home.topology.slots_per_rank
    local, rows = layer.rows(module)
    resident = {key: w.new_zeros(slots, *w.shape[1:]) for key, w in local.items()}
    with torch.no_grad():
        for slot, e in enumerate(experts):
            for key, out in resident.items():
                if e in rows:
                    out[slot].copy_(rows[e][0][key])
                elif weights is not None:
                    out[slot].copy_(weights(f"{name}.{key}".lstrip("."), e))
    return resident
