# Owner(s): ["module: dsl-native-ops"]
"""The Triton kernels of ``_moe_quantize``: what they compile to, whom they serve, and traces.

Nothing runs. What they compute: test_moe_quantize_triton.py.
"""

import os


os.environ.pop("TRITON_INTERPRET", None)

import inspect
import math
import unittest
from unittest import mock

import test_moe_triton_eligibility as eligibility
import triton
from triton_static_gate import ARCHITECTURES, compile_only

import torch
from torch._native.ops.moe import quantize_impl, triton_impl
from torch._native.ops.moe.triton_kernels import quantize
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import ScalingType
from torch.testing._internal.common_moe import traced_size
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
    TestCase,
)


MX = ScalingType.BlockWise1x32.value
ROW = ScalingType.RowWise.value
BLOCK = ScalingType.BlockWise1x128.value
SQUARE = ScalingType.BlockWise128x128.value


def compile_all(arch, few=False):
    """Every flag of both kernels, on sizes that Triton specializes on and others."""
    x = torch.empty(4096, 2048, dtype=torch.bfloat16)
    odd = torch.empty(33, 77)
    offs = torch.empty(64, dtype=torch.int32)
    calls = [
        (x, MX, {}),
        (x, BLOCK, {"dim": 0}),
        (x, MX, {"dim": 0, "offs": offs}),
        (odd, SQUARE, {}),
    ]
    if not few:
        calls += [
            (x, BLOCK, {}),
            (x, SQUARE, {}),
            (x.t(), SQUARE, {}),
            (x, ROW, {}),
            (x, MX, {"dim": 0}),
            (x, ROW, {"dim": 0}),
            (x, BLOCK, {"dim": 0, "offs": offs}),
            (x, ROW, {"dim": 0, "offs": offs}),
            (x.t().contiguous().t(), MX, {"dim": 0, "offs": offs}),
            (x, MX, {"swizzle": 1}),
            (x, MX, {"dtype": torch.int8}),
            (x, MX, {"dtype": torch.int8, "dim": 0, "offs": offs}),
            (odd.half(), MX, {"dim": 0}),
            (odd, ROW, {}),
            (odd, MX, {"dim": 0, "offs": offs}),
        ]
    native = arch in ("sm_90", "sm_100", "sm_103")
    with compile_only(arch) as reports:
        for x, recipe, options in calls:
            quantize.moe_quantize(x, recipe, native=native, **options)
    return reports


class TestMoeQuantizeStaticGate(TestCase):
    def check(self, reports):
        self.assertEqual(
            {r.kernel for r in reports},
            {
                "quantize_kernel",
                "quantize_segments_kernel",
                "quantize_square_kernel",
            },
        )
        for report in reports:
            self.assertEqual(report.problems(matrix=False), [], report)
            has_offs = report.constants.get("HAS_OFFS", False)
            self.assertEqual("assert" in report.instructions, has_offs, report)

    @parametrize("arch", ["sm_80", "sm_90"])
    def test_kernels_compile(self, arch):
        reports = compile_all(arch, few=True)
        self.check(reports)
        self.assertEqual(len(reports), 4)

    @slowTest
    @parametrize("arch", [a for a in ARCHITECTURES if a.startswith("sm_")])
    def test_every_kernel(self, arch):
        self.check(compile_all(arch))

    @slowTest
    def test_every_kernel_on_rocm(self):
        for report in compile_all("gfx942"):
            self.assertEqual(report.problems(matrix=False), [], report)


class TestMoeQuantizeEligibility(eligibility.EligibilityTestCase):
    def test_served(self):
        x, offs = torch.randn(64, 96), torch.tensor([64], dtype=torch.int32)
        reason = quantize_impl.quantize_reason
        for capability in ((8, 0), (9, 0), (10, 0)):
            self.capability = capability
            for recipe in (ROW, MX, BLOCK, SQUARE):
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    self.assertIsNone(reason(x.to(dtype), recipe))
            self.assertIsNone(reason(x, MX, offs=offs, dim=0, dtype=torch.int8))
            self.assertIsNone(reason(x, MX, swizzle=1, dim=0))
            native = quantize_impl.converts_float8(0)
            self.assertEqual(native, capability > (8, 0))
        self.assertIsNone(reason(x[0], MX))
        self.assertIsNone(reason(x[:0], ROW))
        self.assertIsNone(reason(x[:, :0], ROW))

    def test_not_served(self):
        x = torch.randn(64, 96)
        far = torch.empty(2**27, 1024, device="meta")
        for args, options, part in (
            ((x.double(), MX), {}, "self has dtype torch.float64"),
            ((x, 2), {}, "recipe is 2"),
            ((x, MX), {"dtype": torch.uint8}, "dtype is torch.uint8"),
            ((far, MX), {}, "than int32 can count"),
        ):
            self.assertIn(part, quantize_impl.quantize_reason(*args, **options))
        self.capability = (8, 6)
        self.assertIn("capability", quantize_impl.quantize_reason(x, MX))

    def test_malformed_calls(self):
        x, offs = torch.randn(64, 96), torch.tensor([64], dtype=torch.int32)
        cond = triton_impl.cond_of("_moe_quantize", quantize_impl.quantize_reason)
        for args, options in (
            ((x[0], SQUARE), {}),
            ((x, MX), {"dim": 2}),
            ((x, BLOCK), {"swizzle": 1}),
            ((x, MX), {"swizzle": 1, "offs": offs, "dim": 0}),
            ((x, MX), {"offs": offs.long(), "dim": 0}),
            ((x, MX), {"offs": offs}),
        ):
            self.check_error(*args, op="_moe_quantize", cond=cond, **options)

    def test_reasons_know_every_argument(self):
        schema = torch.ops.aten._moe_quantize.default._schema
        names = [argument.name for argument in schema.arguments]
        options = inspect.signature(quantize_impl.quantize_reason).parameters
        self.assertEqual(names, [n for n in options if n != "memory"])

    @unittest.skipIf(not torch.backends.cuda.is_built(), "needs a CUDA build")
    def test_is_registered(self):
        from torch._native.registry import _graphs

        nodes = _graphs.get(("aten", "_moe_quantize", "CUDA"), [])
        self.assertEqual([node.dsl_name for node in nodes], ["triton"])


@unittest.skipIf(
    not torch.backends.cuda.is_built(), "fake CUDA tensors need a CUDA build"
)
class TestMoeQuantizeTracing(TestCase):
    @parametrize("tokens", ["static", "backed", "unbacked"])
    def test_launcher_reads_no_value(self, tokens):
        launched, shape_env = [], ShapeEnv()

        def run(self, *args, grid, warmup, **kwargs):
            launched.append((self.__name__, kwargs["enable_fp_fusion"]))

        def check(x, recipe, **options):
            actual = quantize.moe_quantize(
                x, recipe, native=True, bound=lambda _: math.inf, **options
            )
            expected = torch.ops.aten._moe_quantize(x, recipe, **options)
            for a, e in zip(actual, expected):
                self.assertEqual((a.dtype, a.device), (e.dtype, e.device))
                self.assertEqual(str(a.shape), str(e.shape))
                self.assertEqual(str(a.stride()), str(e.stride()))

        with (
            mock.patch.object(triton.runtime.jit.JITFunction, "run", run),
            FakeTensorMode(shape_env=shape_env),
        ):
            T = traced_size(40, tokens, shape_env)
            x = torch.empty(T, 256, dtype=torch.bfloat16, device="cuda")
            offs = torch.empty(8, dtype=torch.int32, device="cuda")
            for recipe in (ROW, MX, BLOCK):
                check(x, recipe)
                check(x, recipe, dim=0, offs=offs)
            check(x, SQUARE)
            check(x, MX, swizzle=1)
        self.assertEqual(len(launched), 8)
        self.assertEqual({fusion for _, fusion in launched}, {True})
        self.assertEqual(shape_env.guards, [])


instantiate_parametrized_tests(TestMoeQuantizeStaticGate)
instantiate_parametrized_tests(TestMoeQuantizeTracing)

if __name__ == "__main__":
    run_tests()
