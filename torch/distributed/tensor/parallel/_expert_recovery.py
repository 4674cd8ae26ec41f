"""A served model goes on after ranks were lost: with copies, or weights from a checkpoint."""

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

    from torch.distributed.tensor.parallel._expert_placement import (
        ExpertPlacement,
        PlacedLayer,
    )

    Weights = Callable[[str, int], Tensor]


__all__ = ["recover", "Recovery"]


class Recovery(NamedTuple):
    """What :meth:`ExpertPlacement.recover` did. Equal on all ranks but for the time.

    Attributes:
        lost (list[int]): ranks, as of the default group.
        seconds (float): from the call until this rank could go on.
        tokens (dict[int, int]): of each rank that is left, those of the forward that failed,
            to be run again; those of lost ranks are lost.
        copies (list[list[int]]): of each layer, experts that go on from a copy.
        loaded (list[list[int]]): of each layer, experts whose weights were loaded.
    """

    lost: list[int]
    seconds: float
    tokens: dict[int, int]
    copies: list[list[int]]
    loaded: list[list[int]]


def ranks_left(
    group_name: str, ranks: list[int], attempt: int, wait: float
) -> list[int]:
    """Those of ``ranks`` that call this within ``wait`` seconds of the first; on all the same."""
    store, key = c10d._get_default_store(), f"moe_recovery/{group_name}/{attempt}/"
    me, end = dist.get_rank(), time.monotonic() + wait
    store.set(key + str(me), "")
    heard: list[int] = []
    while len(heard) < len(ranks) and time.monotonic() < end:
        if store.check([key + "left"]):
            break
        heard = [rank for rank in ranks if store.check([key + str(rank)])]
        time.sleep(0.05)
    # The first to decide does so for all.
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
    tokens = torch.tensor(max(layer.tokens for layer in placement.layers))
    gathered = [torch.empty_like(tokens) for _ in left]
    dist.all_gather(gathered, tokens, group=group)
    copies, loaded = [], []
    for layer in placement.layers:
        name, module = found[layer]
        from_copies, from_weights = _settle(layer, name, module, weights, group)
        copies.append(from_copies)
        loaded.append(from_weights)
    # Nobody sends tokens to a rank that has not its weights yet.
    dist.barrier(group=group)
    lost = [rank for rank in ranks if rank not in left]
    of_ranks = {rank: int(n) for rank, n in zip(left, gathered)}
    return Recovery(lost, time.monotonic() - start, of_ranks, copies, loaded)


def _settle(
    layer: PlacedLayer,
    name: str,
    module: nn.Module,
    weights: Weights | None,
    group: dist.ProcessGroup,
) -> tuple[list[int], list[int]]:
    """Gives every expert one of the ranks that are left, which has or loads its weights."""
    region: Any = module._expert_parallel
    E, slots = layer.home.num_experts, layer.home.topology.slots_per_rank
    local = region.local_parameters(module, region.expert_names)
    rows = layer.rows(local, region.versions)
    mine = torch.zeros(E, dtype=torch.int64)
    mine[list(rows)] = (
        1 + torch.tensor([at_home for _, at_home in rows.values()]).long()
    )
    have = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(have, mine, group=group)
    table: list[list[int]] = [[] for _ in have]
    # Experts at home first, then those with a copy; the others where there is most room.
    for e in sorted(range(E), key=lambda e: -max(int(h[e]) for h in have)):
        options = [
            r for r, h in enumerate(have) if int(h[e]) == max(int(g[e]) for g in have)
        ]
        options = [r for r in options if len(table[r]) < slots] or [
            r for r in range(len(have)) if len(table[r]) < slots
        ]
        if not options:
            raise RuntimeError(
                f"ExpertPlacement.recover: {len(have)} ranks of {slots} slots have no room for "
                f"{E} experts; slots_per_rank must be larger"
            )
        table[min(options, key=lambda r: len(table[r]))].append(e)
    loaded = [e for r, held in enumerate(table) for e in held if not int(have[r][e])]
    if loaded and weights is None:
        raise RuntimeError(
            f"ExpertPlacement.recover: nobody who has room has experts {loaded} of {name!r}; "
            "weights must load them"
        )
    me = dist.get_rank(group)
    resident = {key: w.new_zeros(slots, *w.shape[1:]) for key, w in local.items()}
    with torch.no_grad():
        for slot, e in enumerate(table[me]):
            for key, out in resident.items():
                if e in rows:
                    out[slot].copy_(rows[e][0][key])
                elif weights is not None:
                    out[slot].copy_(weights(f"{name}.{key}".lstrip("."), e))
    padded = [held + [-1] * (slots - len(held)) for held in table]
    held = torch.tensor(padded)
    quotas = (slots_of(held, E) >= 0).long()
    layer.settle(Plan(Topology(1, len(have), slots), held, quotas), resident, group)
    mesh = DeviceMesh.from_group(group, region.mesh_device_type)
    region.switch = region.make_switch(mesh, len(have) * slots)
    copies = [e for r, h in enumerate(table) for e in h if int(have[r][e]) == 1]
    return sorted(copies), sorted(loaded)
