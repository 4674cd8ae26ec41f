# Owner(s): ["oncall: distributed"]
"""A destroyed process group is gone: its threads do not meet the shutdown of Python."""

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

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(4)


def gloo_threads():
    tasks = (f"/proc/self/task/{task}/comm" for task in os.listdir("/proc/self/task"))
    return [name for task in tasks if "gloo" in (name := open(task).read())]


def dynamo():
    import torch._dynamo


def functional():
    import torch.distributed._functional_collectives as functional

    functional.all_reduce(x, "sum", dist.group.WORLD) + 1


def default_groups():
    import torch.distributed.nn.functional as functional

    # The group that is there when they are called.
    y = functional.all_reduce(x.clone().requires_grad_())
    y.sum().backward()
    functional.broadcast(x, 0)
    functional.all_gather(x)
    functional.all_to_all([torch.empty(4)], [x])
    functional.all_to_all_single(torch.empty(4), x)


dist.all_reduce(x)  # or it may not have a thread yet
%s()
while not gloo_threads():
    pass
dist.destroy_process_group()
assert not gloo_threads(), gloo_threads()
"""


class TestDefaultGroup(TestCase):
    @parametrize("what", ("dynamo", "functional", "default_groups"))
    def test_no_thread_outlives_the_group(self, what):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT % what],
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.assertEqual(done.returncode, 0, done.stderr)


instantiate_parametrized_tests(TestDefaultGroup)

if __name__ == "__main__":
    run_tests()
