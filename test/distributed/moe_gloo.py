"""What the expert-parallel tests on gloo processes share."""

from __future__ import annotations

import functools
import gc
import multiprocessing
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_distributed import MultiProcContinuousTest


def forked_ranks() -> multiprocessing.context.BaseContext:
    """For ranks without a GPU, which can share the imports, most of what a short test takes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([MultiProcContinuousTest.__module__])
    return context


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
        multiprocessing.set_start_method(forked_ranks().get_start_method(), force=True)
        super()._spawn_processes(world_size)

    @classmethod
    def _worker_loop(cls, *args: Any) -> None:
        # A collection would go over the objects of the imports, and copy their pages.
        gc.freeze()
        super()._worker_loop(*args)

    @staticmethod
    @functools.cache
    def mesh(names: tuple[str, ...] | None, *shape: int) -> DeviceMesh:
        """Made once each, as a gloo group owns threads."""
        return init_device_mesh("cpu", shape, mesh_dim_names=names)
