# Owner(s): ["module: inductor"]

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor import comm_analysis, config
from torch._inductor.comm_analysis import (
    estimate_nccl_collective_runtime_impl,
    NCCL_COLL,
    NVIDIA_GPU_TYPE,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import run_tests, TestCase


MB = 1 << 20


@contextlib.contextmanager
def on_h100(gpus, direct):
    """On nodes of H100s, whatever this machine is."""
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", lambda: gpus),
        mock.patch.object(comm_analysis, "_has_nvlink", lambda: True),
        mock.patch.object(
            comm_analysis, "get_gpu_type", lambda: NVIDIA_GPU_TYPE.HOPPER
        ),
        config.patch(estimate_direct_all_to_all=direct),
    ):
        yield


def milliseconds(nbytes, ranks, coll=NCCL_COLL.ALL_TO_ALL, *, direct=True, **options):
    with on_h100(gpus=8, direct=direct):
        return estimate_nccl_collective_runtime_impl(nbytes, ranks, coll, **options)


class TestAllToAllEstimate(TestCase):
    def test_off_by_default(self):
        self.assertFalse(config.estimate_direct_all_to_all)
        ring = milliseconds(64 * MB, 8, direct=False)
        gather = milliseconds(64 * MB, 8, NCCL_COLL.ALL_GATHER, direct=False)
        self.assertGreater(ring, 1.9 * gather)

    def test_published(self):
        # DeepEP's legacy.md, H800 with 400 Gb/s: rows of 7168 bytes and scales, 128 tokens to
        # 8 experts each, 77 us in a node (NVLink at 200 GB/s), 155 and 173 us on 32 and 64.
        nbytes = 128 * 8 * 7392
        with config.patch(intra_node_bw=164):
            for ranks, published in ((8, 77), (32, 155), (64, 173)):
                new = 1e3 * milliseconds(nbytes, ranks)
                old = 1e3 * milliseconds(nbytes, ranks, direct=False)
                self.assertLess(abs(new / published - 1), 0.15)
                self.assertGreater(abs(old / published - 1), 0.5)

    def test_groups_by_their_ranks(self):
        dist.init_process_group("fake", rank=0, world_size=32)
        self.addCleanup(dist.destroy_process_group)
        n = 64 * MB

        def of(ranks):
            name = dist.new_group(ranks).group_name
            return milliseconds(n, len(ranks), group_name=name)

        # One rank on each node, although as few as fit on one; nodes of the world in order.
        self.assertEqual(of([0, 8, 16, 24]), 0.035 + n * 3 / 4 / 50e9 * 1e3)
        self.assertEqual(of([0, 1, 2, 3]), 0.033 + n * 3 / 4 / 370e9 * 1e3)
        # Half of the group on each of two nodes.
        self.assertEqual(of([0, 1, 8, 9]), 0.035 + n / 2 / 50e9 * 1e3)
        self.assertEqual(of(list(range(32))), milliseconds(n, 32))

    def test_graph_has_the_group(self):
        dist.init_process_group("fake", rank=0, world_size=32)
        self.addCleanup(dist.destroy_process_group)
        group = dist.new_group([0, 8, 16, 24])

        def send(x):
            splits = [x.shape[0] // 4] * 4
            sent = torch.ops._c10d_functional.all_to_all_single(
                x, splits, splits, group.group_name
            )
            return torch.ops._c10d_functional.wait_tensor(sent)

        with FakeTensorMode():
            graph = make_fx(send)(torch.empty(64 * MB, dtype=torch.uint8)).graph
        (node,) = (n for n in graph.nodes if "all_to_all" in str(n.target))
        with on_h100(gpus=8, direct=True):
            got = comm_analysis.estimate_nccl_collective_runtime_from_fx_node(node)
        self.assertEqual(got, 0.035 + 64 * MB * 3 / 4 / 50e9 * 1e3)

    def test_levels_run_at_once(self):
        n = 256 * MB
        start = milliseconds(0, 64)
        # 56 of 64 parts leave the node at 50 GB/s; 7 stay, much faster.
        self.assertEqual(milliseconds(n, 64) - start, n * 56 / 64 / 50e9 * 1e3)
        start = milliseconds(0, 8)
        self.assertEqual(milliseconds(n, 8) - start, n * 7 / 8 / 370e9 * 1e3)

    def test_monotone(self):
        for ranks in (2, 8, 16, 64):
            times = [milliseconds(n, ranks) for n in (0, MB, 64 * MB, 512 * MB)]
            self.assertEqual(times, sorted(times))
        n = 64 * MB
        with config.patch(inter_node_bw=100):
            fast = milliseconds(n, 64)
        self.assertLess(fast, milliseconds(n, 64))

    def test_others_unchanged(self):
        for coll in (NCCL_COLL.ALL_GATHER, NCCL_COLL.ALL_REDUCE, NCCL_COLL.P2P):
            new, old = (milliseconds(MB, 16, coll, direct=d) for d in (True, False))
            self.assertEqual(new, old)
        self.assertEqual(milliseconds(MB, 1), 0)


if __name__ == "__main__":
    run_tests()
