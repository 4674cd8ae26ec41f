# Owner(s): ["oncall: distributed"]
"""DTensor lets go of destroyed process groups: their threads do not meet the shutdown of Python."""

import gc
import subprocess
import sys
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


SCRIPT = """
import gc
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, Replicate, Shard


def gloo_threads():
    tasks = (f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task"))
    return [name for task in tasks if "gloo" in (name := open(task).read())]


def product():
    a = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    b = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    (a @ b).relu().sum().full_tensor()


def redistribution():
    a = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    a.redistribute(mesh, [Replicate()]).redistribute(mesh, [Shard(1)])


def fsdp():
    model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    del model, optimizer
    gc.collect()  # a model under FSDP2 is in cycles


gc.disable()
for _ in range(2):  # a second group is served as the first one was
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(4))  # or it may not have a thread yet
    mesh = init_device_mesh("cpu", (1,))
    WHAT()
    while not gloo_threads():
        pass
    del mesh
    dist.destroy_process_group()
    assert not gloo_threads(), gloo_threads()
"""


AT_SHUTDOWN = """
import sys
import types

import torch.distributed as dist
from torch.distributed.tensor import DTensor


class Owner:
    def __del__(self, destroy=dist.destroy_process_group):
        destroy()
        print("destroyed")


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
# Ends when Python ends its modules.
trainer = sys.modules["trainer"] = types.ModuleType("trainer")
trainer.owner = Owner()
del trainer
"""


class TestDestroyedMeshes(TestCase):
    @parametrize("what", ("product", "redistribution", "fsdp"))
    def test_no_thread_outlives_the_group(self, what):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.replace("WHAT", what)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_shutdown_of_python(self):
        done = subprocess.run(
            [sys.executable, "-c", AT_SHUTDOWN],
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.assertEqual(done.stdout, "destroyed\n", done.stderr)


class TestPlanners(TestCase):
    def setUp(self):
        super().setUp()
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        meta = TensorMeta(torch.Size([4, 4]), (4, 1), torch.float32)
        self.key = init_device_mesh("cpu", (1,)), meta

    def test_freed_without_collection(self):
        gc.disable()
        self.addCleanup(gc.enable)
        planner = weakref.ref(_redistribute.get_redistribute_planner(*self.key))
        _redistribute.clear_redistribute_planner_cache()
        self.assertIsNone(planner())

    def test_cleared_by_another_thread(self):
        class Cleared(dict):
            """As if every entry were cleared right after it was put in."""

            def __setitem__(self, key, value):
                pass

        with mock.patch.object(_redistribute, "_planner_cache", Cleared()):
            planner = _redistribute.get_redistribute_planner(*self.key)
        self.assertIs(planner.device_mesh, self.key[0])


instantiate_parametrized_tests(TestDestroyedMeshes)

if __name__ == "__main__":
    run_tests()
