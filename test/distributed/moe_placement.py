"""Loads, placed experts, and what plans and traffic are compared with: a peer and fewest rows.

Shared by tests and benchmarks.
"""

from __future__ import annotations

import cProfile
import pstats
from typing import Any, TYPE_CHECKING

import torch
from torch import Tensor


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.distributed._moe.plan import Plan, Topology
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ExpertPlacement


LOADS = ("uniform", "lognormal_0.5", "lognormal_1.0", "zipf_1")


def num_calls(fn: Callable[[], object]) -> int:
    """Function calls that ``fn`` makes, builtins included.

    How much planning costs, the same on every machine. Milliseconds are in
    benchmarks/moe/results/ep_placement.json.
    """
    profile = cProfile.Profile()
    profile.runcall(fn)
    return pstats.Stats(profile).total_calls


def expert_loads(kind: str, num_experts: int, seed: int) -> Tensor:
    """Loads of one layer, (num_experts) float64, sum 1.

    Args:
        kind (str): one of :data:`LOADS`. Zipf-1 gives the i-th most used expert
            a share proportional to 1/i; which expert that is, is random.
        num_experts (int): number of experts.
        seed (int): seed of the draw.
    """
    g = torch.Generator().manual_seed(seed)
    if kind == "uniform":
        loads = torch.rand(num_experts, generator=g, dtype=torch.float64)
    elif kind == "zipf_1":
        order = torch.randperm(num_experts, generator=g)
        loads = 1 / (1 + order.double())
    else:
        sigma = float(kind.removeprefix("lognormal_"))
        noise = torch.randn(num_experts, generator=g, dtype=torch.float64)
        loads = (sigma * noise).exp()
    return loads / loads.sum()


def drifted(loads: Tensor, sigma: float, seed: int) -> Tensor:
    """``loads`` after each expert changed by a lognormal factor, sum 1."""
    g = torch.Generator().manual_seed(1000 + seed)
    noise = torch.randn(loads.shape, generator=g, dtype=torch.float64)
    loads = loads * (sigma * noise).exp()
    return loads / loads.sum()


def any_plan(topology: Topology, num_experts: int, seed: int) -> Plan:
    """Experts on random ranks, one or several, not at home or there too, in random parts."""
    from torch.distributed._moe.plan import Plan

    g = torch.Generator().manual_seed(seed)
    ranks, slots = topology.num_ranks, topology.slots_per_rank
    table = Plan.home(topology, num_experts).slot_experts
    each = num_experts // ranks
    quotas = torch.zeros(num_experts, ranks, dtype=torch.int64)
    for rank in range(ranks):
        others = torch.randperm(num_experts, generator=g)
        others = others[others // each != rank]
        extra = int(torch.randint(0, slots - each + 1, (), generator=g))
        table[rank, each : each + extra] = others[:extra].sort().values
        held = table[rank][table[rank] >= 0]
        quotas[held, rank] = torch.randint(0, 9, held.shape, generator=g)
    # Some that run elsewhere do not run at home.
    for e in range(num_experts):
        others = quotas[e].clone()
        others[e // each] = 0
        if others.sum() and torch.randint(0, 2, (), generator=g):
            quotas[e] = others
    return Plan(topology, table, quotas)


def place_experts(
    module: nn.Module,
    mesh: DeviceMesh,
    layers: str | None = None,
    style: dict[str, Any] | None = None,
    **options: Any,
) -> ExpertPlacement:
    """Parallelizes MoE layers with an ExpertPlacement.

    Args:
        module (nn.Module): an MoE layer, or what contains it.
        mesh (DeviceMesh): of the ranks that share the experts.
        layers (str, optional): the pattern of the layers' names in ``module``.
        style (dict[str, Any], optional): further arguments of ExpertParallel.
        options: arguments of ExpertPlacement.

    Returns:
        The placement.
    """
    from torch.distributed.tensor import parallel

    placement = parallel.ExpertPlacement(**options)
    expert_parallel = parallel.ExpertParallel(placement=placement, **(style or {}))
    plan = expert_parallel if layers is None else {layers: expert_parallel}
    parallel.parallelize_module(module, mesh, plan)
    return placement


def _balanced_packs(weights: list[float], num_packs: int) -> list[int]:
    """Heaviest first onto the lightest pack that is not full yet."""
    room = len(weights) // num_packs
    total, size = [0.0] * num_packs, [0] * num_packs
    result = [0] * len(weights)
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        pack = min(
            (p for p in range(num_packs) if size[p] < room), key=total.__getitem__
        )
        result[i] = pack
        total[pack] += weights[i]
        size[pack] += 1
    return result


def eplb_rank_experts(
    loads: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int
) -> tuple[list[list[int]], list[int]]:
    """The published load balancer of DeepSeek, from its description.

    Groups are packed onto nodes, replicas are added inside a node one by one to the
    expert with the largest load per replica, then replicas are packed onto the
    ranks of the node. Where groups do not divide over nodes it takes all ranks as
    one node. Source: README of deepseek-ai/EPLB.

    Args:
        loads (Tensor): (num_experts) loads.
        num_replicas (int): replicas in total.
        num_groups (int): groups of consecutive experts.
        num_nodes (int): nodes.
        num_ranks (int): ranks in total.

    Returns:
        tuple: experts of each rank (one may come twice), replicas of each expert.
    """
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    size = len(loads) // num_groups
    groups = loads.view(num_groups, size).sum(1).tolist()
    node_of_group = _balanced_packs(groups, num_nodes)
    ranks: list[list[int]] = []
    copies = [1] * len(loads)
    for node in range(num_nodes):
        experts = [e for e in range(len(loads)) if node_of_group[e // size] == node]
        replicas = list(experts)
        for _ in range(num_replicas // num_nodes - len(experts)):
            heaviest = max(experts, key=lambda e: float(loads[e]) / copies[e])
            copies[heaviest] += 1
            replicas.append(heaviest)
        weights = [float(loads[e]) / copies[e] for e in replicas]
        packs = _balanced_packs(weights, num_ranks // num_nodes)
        for rank in range(num_ranks // num_nodes):
            ranks.append([e for e, p in zip(replicas, packs) if p == rank])
    return ranks, copies


def eplb_imbalance(loads: Tensor, planned: Tensor, *args: int) -> float:
    """Heaviest over mean rank load under ``loads`` of a plan for ``planned``.

    ``args`` are the further arguments of :func:`eplb_rank_experts`.
    """
    ranks, copies = eplb_rank_experts(planned, *args)
    rank_loads = [sum(float(loads[e]) / copies[e] for e in rank) for rank in ranks]
    return max(rank_loads) * len(rank_loads) / float(loads.sum())


def deduplicated_rows(
    topk_indices: list[Tensor], num_experts: int, mesh_shape: tuple[int, ...]
) -> dict[str, list[int]]:
    """Fewest token rows that every rank must send to others, by level.

    Args:
        topk_indices (list[Tensor]): of each rank, (T, K) expert ids in [-1, E].
        num_experts (int): E; flat rank r holds ``[r * E/W, (r + 1) * E/W)``.
        mesh_shape (tuple[int, ...]): ``(W,)`` for one level: each token once to every
            other rank with one of its experts. ``(N, L)`` for nodes of L ranks: each
            token once to every other node, where the rank of the same local index
            sends it on to the other ranks of the node.

    Returns:
        ``{"flat": rows of each rank}`` or ``{"node": ..., "local": ...}``.
    """
    W = len(topk_indices)
    if len(mesh_shape) not in (1, 2) or W != torch.Size(mesh_shape).numel():
        raise ValueError(
            f"deduplicated_rows: mesh_shape must be ({W},) or (N, L) with N * L = {W} "
            f"ranks of topk_indices, got {tuple(mesh_shape)}"
        )
    L = mesh_shape[-1]
    flat, node, local = [0] * W, [0] * W, [0] * W
    for source, idx in enumerate(topk_indices):
        valid = (idx >= 0) & (idx < num_experts)
        rank = torch.where(valid, idx // (num_experts // W), W)
        # (T, W) whether the token has an expert on the rank.
        goes = torch.zeros(idx.shape[0], W + 1, dtype=torch.bool)
        goes = goes.scatter(1, rank.long().cpu(), True)[:, :W]
        counts = goes.sum(0).tolist()
        nodes = goes.view(-1, W // L, L).any(2).sum(0).tolist()
        flat[source] = sum(counts) - counts[source]
        node[source] = sum(nodes) - nodes[source // L]
        for dest, count in enumerate(counts):
            relay = dest // L * L + source % L
            local[relay] += count if relay != dest else 0
    if len(mesh_shape) == 1:
        return {"flat": flat}
    return {"node": node, "local": local}
