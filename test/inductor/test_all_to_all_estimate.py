# Owner(s): ["module: inductor"]

from unittest import mock

import torch
from torch._inductor import comm_analysis, config
from torch._inductor.comm_analysis import (
    estimate_nccl_collective_runtime_impl,
    NCCL_COLL,
    NVIDIA_GPU_TYPE,
)
from torch.testing._internal.common_utils import run_tests, TestCase


MB = 1 << 20


def milliseconds(nbytes, ranks, coll=NCCL_COLL.ALL_TO_ALL, *, direct=True, gpus=8):
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
        return estimate_nccl_collective_runtime_impl(nbytes, ranks, coll)


class TestAllToAllEstimate(TestCase):
    def test_off_by_default(self):
        self.assertFalse(config.estimate_direct_all_to_all)
        ring = milliseconds(64 * MB, 8, direct=False)
        gather = milliseconds(64 * MB, 8, NCCL_COLL.ALL_GATHER, direct=False)
        self.assertGreater(ring, 1.9 * gather)

    def test_published(self):
        # DeepEP's legacy.md, H800 with 400 Gb/s: rows of 7168 bytes and scales, 128
        # tokens to 8 experts each, 77 us in a node (NVLink at 200 GB/s) and 173 us on 64.
        nbytes = 128 * 8 * 7392
        with config.patch(intra_node_bw=160):
            for ranks, published in ((8, 77), (64, 173)):
                new = 1e3 * milliseconds(nbytes, ranks)
                old = 1e3 * milliseconds(nbytes, ranks, direct=False)
                self.assertLess(abs(new / published - 1), 0.25)
                self.assertGreater(abs(old / published - 1), abs(new / published - 1))

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
