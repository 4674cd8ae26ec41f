"""What the expert-parallel tests on gloo processes share."""

from __future__ import annotations

import functools
import multiprocessing

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_distributed import MultiProcContinuousTest


class GlooTest(MultiProcContinuousTest):
    """Four gloo processes on the CPU."""

    world_size = 4

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    @classmethod
    def _spawn_processes(cls, world_size: int) -> None:
        # Ranks without a GPU can share the imports, most of what a short test takes.
        multiprocessing.set_start_method("forkserver", force=True)
        multiprocessing.set_forkserver_preload([MultiProcContinuousTest.__module__])
        super()._spawn_processes(world_size)

    @staticmethod
    @functools.cache
    def mesh(names: tuple[str, ...] | None, *shape: int) -> DeviceMesh:
        """Made once each, as a gloo group owns threads."""
        return init_device_mesh("cpu", shape, mesh_dim_names=names)
