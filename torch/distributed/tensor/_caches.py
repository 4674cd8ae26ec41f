"""Clears DTensor's caches by device mesh when process groups are destroyed."""

import torch
from torch.distributed.tensor._api import DTensor
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    clear_redistribute_planner_cache,
)


__all__ = ["forget_meshes"]


def forget_meshes() -> None:
    """Clears every cache that holds a device mesh, and with it its process groups.

    Other threads may run DTensors meanwhile. Sharding propagation also has per-thread caches,
    which end with their threads.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    type(propagator)._propagate_tensor_meta_cached.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()
