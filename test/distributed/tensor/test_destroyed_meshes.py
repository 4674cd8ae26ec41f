# Owner(s): ["oncall: distributed"]
"""DTensor lets go of destroyed process groups: their threads do not meet the shutdown of Python."""

import subprocess
import sys

from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


SCRIPT = """
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


instantiate_parametrized_tests(TestDestroyedMeshes)

if __name__ == "__main__":
    run_tests()
