# Owner(s): ["module: inductor"]
"""What an expert-parallel layer becomes in code that Inductor generates for CUDA. Without a GPU."""

import fake_gpu


fake_gpu.require()  # before torch

import re
from unittest import mock

from moe_lowering_problems import moe_calls

import torch
from torch import nn
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ExpertParallel, parallelize_module
from torch.testing._internal.common_moe import FakeRanksTest, slow_subtest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


RANKS = FakeRanksTest.world_size
T, D, H, E, K = 512, 256, 128, 64, 4


def emit(training, capacity):
    """The graphs of an ``nn.MoE`` on rank 0; without a capacity the numbers of rows are unbacked."""
    with (
        fake_gpu.fake_gpu(),
        mock.patch.object(torch.cuda, "device_count", lambda: RANKS),
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        torch.set_grad_enabled(training),
    ):
        mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("ep",))
        with torch.device("meta"):
            layer = nn.MoE(D, H, E, K, dtype=torch.bfloat16)
        parallelize_module(layer, mesh, ExpertParallel(capacity=capacity))
        # The ranks of a mesh are a tensor with values.
        with FakeTensorMode(allow_non_fake_inputs=True):
            layer.to_empty(device="cuda")
            x = torch.empty(T, D, device="cuda", dtype=torch.bfloat16)
            x.requires_grad_(training)
            return fake_gpu.emitted(torch.compile(layer, fullgraph=True), x)


@config.patch({"triton.moe_kernels": True})
@instantiate_parametrized_tests
class TestMoeParallelLowering(FakeRanksTest):
    @parametrize("capacity", [None, T])
    @parametrize("training", [slow_subtest(False), True])
    def test_no_moe_operator_is_called(self, training, capacity):
        graphs = emit(training, capacity)
        self.assertEqual(len(graphs), 1 + training)
        for graph in graphs:
            self.assertEqual(moe_calls(graph), [])
            sent = [c for c in graph.extern_calls if "all_to_all_single" in c]
            # Forward: sizes if there is no capacity, rows and what returns; backward: the last two.
            sizes = capacity is None and graph is graphs[0]
            self.assertEqual(len(sent), 2 + sizes)
        for kernel in ("topk_kernel", "up_kernel", "grouped_mm_kernel"):
            self.assertEqual(graphs[0].launched.count(kernel), 1, kernel)
        if training:
            for kernel, count in (
                ("act_backward_kernel", 1),
                ("weight_grad_kernel", 2),
            ):
                self.assertEqual(graphs[1].launched.count(kernel), count, kernel)

    def test_received_rows_are_not_copied(self):
        (graph,) = emit(False, None)
        # The kernel reads columns of a view of the message: D of rows with K weights and K ids.
        stride = (2 * D + 4 * K + 4 * K) // 2
        rows = rf"up_kernel_\d+\.run\(reinterpret_tensor\((\w+), \([^)]*, {D}\), \({stride}, 1\), 0\)"
        found = re.search(rows, graph.source)
        self.assertIsNotNone(found)
        view = (
            rf"\b{found[1]} = torch\.ops\.aten\.view\.dtype\((\w+), torch\.bfloat16\)"
        )
        (message,) = re.findall(view, graph.source)
        self.assertRegex(
            graph.source, rf"\b{message} = \S+all_to_all_single\.default\("
        )

    def test_flag(self):
        with config.patch({"triton.moe_kernels": False}):
            forward, backward = emit(True, None)
        calls = [c.removeprefix("torch.ops.aten.") for c in moe_calls(forward)]
        self.assertEqual(
            sorted(set(calls)),
            ["_moe_mlp.default", "_moe_permutation.default", "_moe_topk.default"],
        )
        self.assertEqual(len(moe_calls(backward)), 2)


if __name__ == "__main__":
    run_tests()
