"""Meshes of a model with expert parallelism.

The dense part of the model and the experts arrange the same ranks differently:

    dense    [pp, dp_replicate, dp_shard, cp, tp]
    sparse   [pp, dp_replicate, efsdp, ep]         efsdp * ep = dp_shard * cp * tp

A token is on one rank of dp_shard * cp, and with sequence parallelism also on one of tp, so
these ranks can share the experts. ``efsdp`` has the remaining ranks, which shard or
replicate each expert.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed._moe.groups import group_timeout
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.distributed.tensor.parallel._expert_adapters import present_name
from torch.utils.weak import WeakTensorKeyDictionary


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        ShardPlacementResult,
    )


__all__ = ["expert_shard_placement", "fold_expert_parallel"]


def fold_expert_parallel(
    mesh: DeviceMesh,
    ep_degree: int,
    *,
    dims: Sequence[str] = ("dp_shard", "cp", "tp"),
    ep_dim: str = "ep",
    efsdp_dim: str = "efsdp",
) -> DeviceMesh:
    """The mesh of the experts over the ranks of ``mesh``.

    The folded dims become two: ``ep_dim``, of ``ep_degree`` neighbouring ranks
    with different experts, and ``efsdp_dim``, whose ranks have the same experts. The other
    dims of ``mesh`` come first, unchanged. Both meshes have the same root, which FSDP
    requires. New groups have the timeout of the first folded dim.

    Args:
        mesh (DeviceMesh): mesh of the dense part, with named dims.
        ep_degree (int): ranks that share the experts.

    Keyword Args:
        dims (sequence of str): dims to fold, those of them that ``mesh`` has; at least one.
            Default: ``("dp_shard", "cp", "tp")``
        ep_dim (str): Default: ``"ep"``
        efsdp_dim (str): Default: ``"efsdp"``

    Returns:
        DeviceMesh: with dims (rest of ``mesh``, ``efsdp_dim``, ``ep_dim``).

    Raises:
        ValueError: ``mesh`` has none of ``dims``, or already a dim of a new name, or
            ``ep_degree`` does not divide the product of the folded sizes.

    Example::
        >>> # xdoctest: +SKIP("needs ranks")
        >>> dense = init_device_mesh(
        ...     "cuda", (2, 4, 2), mesh_dim_names=("pp", "dp_shard", "tp")
        ... )
        >>> fold_expert_parallel(dense, 4)  # pp 2, efsdp 2, ep 4
    """
    names = mesh.mesh_dim_names or ()
    folded = tuple(name for name in names if name in dims)
    if not folded:
        raise ValueError(
            "fold_expert_parallel: mesh must have at least one of the dims "
            f"{tuple(dims)}, got mesh_dim_names {mesh.mesh_dim_names}"
        )
    taken = [name for name in (ep_dim, efsdp_dim) if name in names]
    if taken:
        raise ValueError(
            f"fold_expert_parallel: mesh must not have a dim {taken[0]!r} yet, got "
            f"mesh_dim_names {names}"
        )
    sizes = [mesh.size(names.index(name)) for name in folded]
    size = math.prod(sizes)
    if ep_degree < 1 or size % ep_degree:
        product = " * ".join(f"{n}={s}" for n, s in zip(folded, sizes))
        raise ValueError(
            f"fold_expert_parallel: ep_degree must divide {product} = {size}, "
            f"got {ep_degree}"
        )
    flat = mesh[folded[0]] if len(folded) == 1 else mesh[folded]._flatten()
    sparse = flat._unflatten(0, (size // ep_degree, ep_degree), (efsdp_dim, ep_dim))
    # Groups of a new mesh have a timeout of half an hour, whatever the original groups have. A dim
    # of all ranks is the default group, which must not change.
    timeout = group_timeout(mesh.get_group(folded[0]))
    world = c10d._get_default_group()
    given = {group.group_name for group in (world, *mesh.get_all_groups())}
    for group in sparse.get_all_groups():
        if timeout is not None and group.group_name not in given:
            dist.set_timeout(timeout, group)
    rest = [mesh[name] for name in names if name not in folded]
    return DeviceMesh._concatenate([*rest, sparse]) if rest else sparse


def expert_shard_placement(
    model: nn.Module, expert_mesh: DeviceMesh, dense_mesh: DeviceMesh
) -> Callable[[nn.Parameter], Shard | ShardPlacementResult | None]:
    """``shard_placement_fn`` of ``fully_shard`` that gives experts their own mesh.

    Expert parameters of expert-parallel modules in ``model`` are sharded
    over ``expert_mesh``, on dim 0. If a rank has fewer experts than there are shards, they are
    sharded on dim 1 if it divides evenly, else on dim 0 with some empty shards. All
    other parameters are sharded over ``dense_mesh``, as ``fully_shard`` does by default.

    Args:
        model (nn.Module): after ``parallelize_module`` with ``ExpertParallel``, before any
            ``fully_shard``.
        expert_mesh (DeviceMesh): ``sparse["efsdp"]``, or
            ``sparse["dp_replicate", "efsdp"]`` for hybrid sharding, with ``sparse`` from
            :func:`fold_expert_parallel`.
        dense_mesh (DeviceMesh): the mesh that ``fully_shard`` is called with.

    FSDP divides gradients by the size of the mesh that it reduces over. An expert's gradient
    is already a sum over the ranks of ep, so FSDP's factor would give experts and dense
    parameters different means. ``set_gradient_divide_factor`` with the size of the dense
    data parallel mesh gives all of them the mean over data parallel ranks.

    Example::
        >>> # xdoctest: +SKIP("needs ranks")
        >>> dp = dense["dp_shard"]
        >>> placement = expert_shard_placement(model, sparse["efsdp"], dp)
        >>> for block in model.blocks:
        ...     fully_shard(block, mesh=dp, shard_placement_fn=placement)
        ...     block.set_gradient_divide_factor(dp.size())
    """
    # FSDP imports DTensor, whose styles import this module.
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )

    info: FSDPMeshInfo
    if expert_mesh.ndim == 1:
        info = FSDPMeshInfo(expert_mesh, shard_mesh_dim=0)
    elif expert_mesh.ndim == 2:
        info = HSDPMeshInfo(expert_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    else:
        raise ValueError(
            "expert_shard_placement: expert_mesh must be 1-D, or 2-D with the replicas "
            f"first, got a {expert_mesh.ndim}-D mesh with dims "
            f"{expert_mesh.mesh_dim_names}"
        )
    # FSDP requires one mesh object per process group, as without expert parallelism.
    groups, dense_groups = (
        [group.group_name for group in mesh.get_all_groups()]
        for mesh in (expert_mesh, dense_mesh)
    )
    same = groups == dense_groups
    # Weak, as FSDP frees the unsharded parameters but keeps the function.
    results = WeakTensorKeyDictionary()
    for module in model.modules():
        region = getattr(module, "_expert_parallel", None)
        for name in () if region is None else region.expert_names:
            param = module.get_parameter(present_name(module, name))
            if not isinstance(param, DTensor):
                raise ValueError(
                    f"expert_shard_placement: parameter {name!r} must be the DTensor that "
                    f"parallelize_module made, got {type(param).__name__}"
                )
            experts, rows = param.to_local().shape[:2]
            # FSDP pads dim 0 only.
            few, even = experts < info.shard_mesh_size, rows % info.shard_mesh_size == 0
            shard = Shard(1 if few and even else 0)
            results[param] = shard if same else ShardPlacementResult(shard, info)
    if not results:
        raise ValueError(
            "expert_shard_placement: model must have a module that is expert parallel; "
            "call parallelize_module with ExpertParallel first"
        )
    return results.get
