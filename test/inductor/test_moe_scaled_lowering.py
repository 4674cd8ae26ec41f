# Owner(s): ["module: inductor"]
"""The MoE ops of low precision stay calls in code for CUDA and say why. Runs without a GPU."""

import os


os.environ.pop("TRITON_INTERPRET", None)

import fake_gpu


fake_gpu.require()  # before torch

import re
from collections import Counter

import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


LOGGER = "torch._inductor.kernel.moe"
OPS = ("_moe_mlp_scaled", "_moe_mlp_scaled_backward")


def emit(recipe, device="cuda", tokens=512):
    """The graphs of a router with experts of ``recipe``, forward and backward."""

    def layer(x, router, w_in, w_out):
        ids, weights = F.moe_topk(F.linear(x, router), 2)
        return F.moe_mlp(x, ids, weights, w_in, w_out, recipe=recipe)

    D, H, E = 256, 128, 8
    with fake_gpu.fake_gpu("sm_90"), FakeTensorMode():
        args = [
            torch.empty(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
            for shape in ((tokens, D), (E, D), (E, 2 * H, D), (E, D, H))
        ]
        torch._dynamo.mark_dynamic(args[0], 0)
        return fake_gpu.emitted(torch.compile(layer, fullgraph=True), *args)


class TestMoeScaledLowering(TestCase):
    @parametrize("recipe", list(F._MOE_RECIPES))
    def test_reason_of_the_extern_calls(self, recipe):
        with self.assertLogs(LOGGER, "INFO") as logs:
            graphs = emit(recipe)
        said = Counter(
            re.search(r"(\w+) stays an extern call: Inductor does not trace", line)[1]
            for line in logs.output
        )
        self.assertEqual(said, Counter(OPS))
        calls = [c for g in graphs for c in g.extern_calls if "_moe_" in c]
        # Router and permutation are kernels of the graph here as well.
        self.assertEqual(calls, [f"torch.ops.aten.{op}.default" for op in OPS])

    def test_flag_is_the_first_reason(self):
        with (
            config.patch({"triton.moe_kernels": False}),
            self.assertLogs(LOGGER, "INFO") as logs,
        ):
            emit("mxfp8")
        for op in OPS:
            text = f"{op} stays an extern call: config.triton.moe_kernels is False"
            self.assertEqual(len([o for o in logs.output if text in o]), 1, op)

    def test_quantize(self):
        def quantize(x):
            return torch.ops.aten._moe_quantize.default(x, 3)

        with (
            fake_gpu.fake_gpu("sm_90"),
            FakeTensorMode(),
            self.assertLogs(LOGGER, "INFO") as logs,
        ):
            x = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
            (graph,) = fake_gpu.emitted(torch.compile(quantize, fullgraph=True), x)
        said = "_moe_quantize stays an extern call: Inductor does not trace"
        self.assertIn(said, logs.output[0])
        self.assertIn("torch.ops.aten._moe_quantize.default", graph.extern_calls)


instantiate_parametrized_tests(TestMoeScaledLowering)

if __name__ == "__main__":
    run_tests()
