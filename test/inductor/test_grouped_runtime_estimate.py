# Owner(s): ["module: inductor"]
"""What the overlap scheduler thinks that ops on grouped rows take. Runs without a GPU."""

import fake_gpu


fake_gpu.require()  # before torch

from unittest import mock

import torch
import torch.utils._runtime_estimation as runtime_estimation
from torch._inductor.fx_passes import overlap_scheduling
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


R, D, H, E = 32768, 2048, 768, 64
TFLOPS, GB_PER_SECOND = 989.0, 3350.0


def graph_of(op):
    """One call of ``op`` on fake CUDA operands."""

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="cuda")

    x, w_in, w_out = empty(R, D), empty(E, 2 * H, D), empty(E, D, H)
    offs = empty(E, dtype=torch.int32)
    experts = (x, w_in, w_out, offs, *[None] * 6)
    calls = {
        "_grouped_mm": lambda: torch._grouped_mm(x, w_in.mT, offs=offs),
        "_moe_mlp": lambda: torch._moe_mlp(*experts)[0],
        "_moe_mlp_backward": lambda: torch.ops.aten._moe_mlp_backward(
            x, *experts, empty(R, 2 * H), [True] * 3 + [False] * 4
        )[0],
        "mm": lambda: x @ empty(D, H),
    }
    graph = make_fx(calls[op])().graph
    (node,) = (n for n in graph.nodes if overlap_scheduling.is_compute_node(n))
    return node


class TestGroupedRuntimeEstimate(TestCase):
    def estimate(self, op):
        """(milliseconds, whether it was benchmarked)"""
        benchmarked = []

        def benchmark(function):
            benchmarked.append(function)
            return 1e-3

        with (
            fake_gpu.fake_gpu(),
            FakeTensorMode(),
            mock.patch.object(
                overlap_scheduling, "get_collective_do_bench", lambda: benchmark
            ),
            mock.patch.object(
                overlap_scheduling, "get_cached_node_time", lambda key: None
            ),
            mock.patch.object(
                overlap_scheduling, "set_cached_node_time", lambda *args: None
            ),
            mock.patch.object(
                torch._dynamo.testing, "rand_strided", lambda *args, **options: None
            ),
            mock.patch.object(
                runtime_estimation, "get_device_tflops", lambda *args, **kw: TFLOPS
            ),
            mock.patch.object(
                runtime_estimation,
                "get_device_dram_gbps",
                lambda *args, **kw: GB_PER_SECOND,
            ),
        ):
            milliseconds = overlap_scheduling.benchmark_node(graph_of(op))
        return milliseconds, bool(benchmarked)

    @parametrize(
        "op,products",
        [("_grouped_mm", 2), ("_moe_mlp", 3), ("_moe_mlp_backward", 6)],
    )
    def test_roofline(self, op, products):
        # products of (rows, D, F), forward and backward
        milliseconds, benchmarked = self.estimate(op)
        self.assertFalse(benchmarked)
        # Inductor counts a multiplication and its addition as one, at 75 % of the peak.
        compute = R * D * H * products / (0.75 * TFLOPS * 1e12) * 1e3
        self.assertGreaterEqual(milliseconds, 0.99 * compute)
        self.assertLessEqual(milliseconds, 2 * compute)

    def test_others_are_benchmarked(self):
        self.assertEqual(self.estimate("mm"), (1e-3, True))


instantiate_parametrized_tests(TestGroupedRuntimeEstimate)

if __name__ == "__main__":
    run_tests()
