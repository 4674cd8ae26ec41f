# Owner(s): ["module: dsl-native-ops"]
"""The Triton kernels of ``_moe_quantize`` have the bits of the CPU op.

In Triton's interpreter on CPU tensors: NaN in fresh allocations, every access checked. What
they compile to: test_moe_quantize_triton_gate.py.
"""

import os


# Before anything can import Triton: its own helpers decide at import time.
os.environ["TRITON_INTERPRET"] = "1"

import dataclasses
import random
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton_interpreter import (
    exact_floats,
    MemorySanitizer,
    require_interpreter,
    shuffled_programs,
)

import torch
from torch._native.ops.moe.triton_kernels import quantize
from torch.nn.functional import ScalingType
from torch.testing._internal.common_moe import (
    fill_uninitialized_memory,
    parametrize_named,
)
from torch.testing._internal.common_utils import (
    DeterministicGuard,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
    TestCase,
)
from torch.testing._internal.moe_quantized_reference import RECIPES


require_interpreter()

op = torch.ops.aten._moe_quantize.default
MX = ScalingType.BlockWise1x32
SQUARE = ScalingType.BlockWise128x128
RECIPE = parametrize_named("recipe", RECIPES)
LINEAR = parametrize_named("recipe", [r for r in RECIPES if r != SQUARE])


def wild(*shape, dtype=torch.bfloat16):
    """Numbers over 60 binades, zeros of both signs, and places that are no numbers."""
    x = torch.randn(shape)
    low, high = (-12, 10) if dtype == torch.float16 else (-30, 30)
    x = x * torch.exp2(torch.randint(low, high, shape))
    draw = torch.rand(shape)
    x = torch.where(draw < 0.05, -0.0, x)
    for i, special in enumerate((torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-40)):
        x = torch.where((draw - 0.1 - i * 1e-3).abs() < 2e-4, special, x)
    return x.to(dtype)


class TestMoeQuantizeTriton(TestCase):
    def setUp(self):
        super().setUp()
        torch.manual_seed(0)
        self.enter(exact_floats())
        self.enter(fill_uninitialized_memory())

    def enter(self, context):
        context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)

    def check_accesses(self):
        """From here on, every load and store of the test."""
        self.enter(MemorySanitizer()())

    def check(self, x, recipe, native=False, **kwargs):
        """Bits, dtypes, shapes and strides of the CPU op."""
        expected = op(x, recipe.value, **kwargs)
        actual = quantize.moe_quantize(x, recipe.value, native=native, **kwargs)
        for name, a, e in zip(("data", "scale"), actual, expected):
            self.assertEqual((a.dtype, a.shape), (e.dtype, e.shape), msg=name)
            if e.numel() > 0:
                self.assertEqual(a.stride(), e.stride(), msg=name)
            integer = torch.int32 if e.dtype == torch.float32 else torch.uint8
            self.assertEqual(a.view(integer), e.view(integer), msg=name)
        return actual

    @RECIPE
    @parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_bits(self, recipe, dtype):
        for shape in ((9, 300), (1, 33), (2, 9, 129)):
            x = wild(*shape, dtype=dtype)
            for dim in range(-len(shape), 0):
                self.check(x, recipe, native=len(shape) == 3, dim=dim)
        for native in (False, True):
            self.check(wild(4, 80, dtype=dtype), recipe, native, dtype=torch.int8)
        self.check(wild(80, 5), recipe, native, dtype=torch.int8, dim=0)

    @RECIPE
    def test_strides(self, recipe):
        self.check_accesses()
        self.check(wild(140, 40).t(), recipe)
        self.check(wild(20, 280)[:, ::2], recipe, dim=0)
        self.check(wild(3, 40, 33).transpose(1, 2), recipe, dim=1)
        self.check(wild(3, 40, 33).permute(2, 0, 1), recipe, dim=1)
        self.check(wild(1, 33).expand(5, 33), recipe)
        # More outer dimensions than two: merged where they can be, else copied.
        x = wild(2, 3, 4, 40)
        for dim in range(4):
            self.check(x, recipe, dim=dim)
        self.check(x.permute(2, 1, 0, 3), recipe)
        self.check(wild(2, 1, 3, 1, 40).transpose(0, 2), recipe, dim=2)

    @RECIPE
    def test_empty(self, recipe):
        self.check_accesses()
        for shape in ((0, 64), (4, 0), (0, 0), (2, 0, 64), (2, 64, 0)):
            for dim in range(len(shape)):
                self.check(torch.zeros(shape), recipe, dim=dim)
        if recipe.name != "BlockWise128x128":
            self.check(torch.zeros(2, 4, 3, 8)[:, :2, :2, :0], recipe)

    @LINEAR
    def test_one_dimension(self, recipe):
        self.check_accesses()
        for length in (0, 1, 31, 32, 600):
            self.check(wild(length), recipe)

    @LINEAR
    def test_blocks_begin_with_experts(self, recipe, native=True):
        self.check_accesses()
        x = wild(150, 20)
        for ends in ([0, 5, 5, 133, 150], [0, 0, 0], list(range(2, 150, 3))):
            offs = torch.tensor(ends, dtype=torch.int32)
            self.check(x, recipe, native, dim=0, offs=offs)
        offs = torch.tensor([40, 41], dtype=torch.int32)
        for dtype in (torch.int8, torch.float8_e4m3fn):
            self.check(wild(70, 64).t(), recipe, native, dim=0, offs=offs, dtype=dtype)
        # No rows; offsets by stride.
        zero = torch.zeros(3, dtype=torch.int32)
        self.check(torch.zeros(0, 64), recipe, dim=0, offs=zero)
        self.check(torch.zeros(64, 0), recipe, dim=0, offs=zero)
        self.check(x, recipe, dim=0, offs=torch.tensor([7, 9, 150, 0]).int()[::2])

    def test_swizzle(self, native=False):
        self.check_accesses()
        for rows, columns in ((1, 32), (130, 40), (5, 200), (0, 64), (64, 0), (3, 1)):
            x = wild(rows, columns)
            self.check(x, MX, native, swizzle=1)
            self.check(x.t(), MX, native, swizzle=1, dim=0)
            self.check(x, MX, native, swizzle=1, dim=0)
        x = wild(2, 9, 140)
        for dim in range(3):
            self.check(x, MX, native, swizzle=1, dim=dim)
        self.check(x.transpose(0, 1), MX, native, swizzle=1, dtype=torch.int8)
        self.check(wild(1, 1, 40), MX, native, swizzle=1)

    @slowTest
    def test_every_amax(self):
        amax = torch.arange(0x7F81, dtype=torch.int16).view(torch.bfloat16)
        x = torch.zeros(len(amax), 2, dtype=torch.bfloat16)
        x[:, 1] = -amax
        for native in (False, True):
            for dtype in (torch.float8_e4m3fn, torch.int8):
                self.check(x, MX, native, dtype=dtype)
        self.check(x.t().contiguous(), MX, dim=0)

    def test_fuzz(self):
        """Anything the op takes."""
        self.check_accesses()
        draw = random.Random(0)
        for _ in range(24):
            recipe = draw.choice(RECIPES)
            rank = draw.choice((2, 2, 3))
            shape = [draw.choice((1, 2, 5, 31, 64, 129, 160)) for _ in range(rank)]
            shape[0] = min(shape[0], 5) if rank == 3 else shape[0]
            dtype = draw.choice((torch.bfloat16, torch.float16, torch.float32))
            x = wild(*shape, dtype=dtype)
            if draw.random() < 0.3:
                x = x.transpose(draw.randrange(rank), draw.randrange(rank))
            if draw.random() < 0.2:
                x = x[..., draw.randrange(2) :: 2]
            kwargs = {"dim": draw.randrange(-rank, rank)}
            kwargs["dtype"] = draw.choice((None, torch.int8, torch.float8_e4m3fn))
            if recipe == MX and draw.random() < 0.4:
                kwargs["swizzle"] = 1
            elif rank == 2 and recipe != SQUARE and draw.random() < 0.5:
                rows = x.shape[0]
                ends = sorted(
                    draw.randrange(rows + 1) for _ in range(draw.randrange(1, 9))
                )
                kwargs.update(dim=0, offs=torch.tensor(ends, dtype=torch.int32))
            with self.subTest(shape=x.shape, recipe=recipe, **kwargs):
                self.check(x, recipe, draw.random() < 0.5, **kwargs)

    def test_programs_in_any_order(self):
        x, offs = wild(300, 20), torch.tensor([3, 3, 100, 250], dtype=torch.int32)
        for seed in range(2):
            with shuffled_programs(seed):
                self.check(x, MX, dim=0, offs=offs)
                self.check(x, ScalingType.RowWise, dim=0, offs=offs)
                self.check(x, MX, swizzle=1)

    def test_offsets_are_checked_on_the_device(self):
        x = torch.randn(64, 32)
        builder = interpreter.interpreter_builder
        options = dataclasses.replace(builder.options, debug=True)
        self.enter(mock.patch.object(builder, "options", options))
        for ends in ([4, 3, 64], [-1, 64], [65], [0, 65, 64]):
            offs = torch.tensor(ends, dtype=torch.int32)
            with self.assertRaisesRegex(
                InterpreterError, "offs must be non-decreasing"
            ):
                quantize.moe_quantize(x, MX.value, dim=0, offs=offs, native=False)

    def test_strides_past_int32(self):
        for shape, strides in (
            ((3, 40), (2**30 + 16, 1)),
            ((40, 3), (1, 2**30 + 16)),
            ((2, 3, 40), (2**31 + 64, 2**20, 1)),
            ((3, 2, 33), (2**20, 2**31 + 64, 1)),
        ):
            extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides))
            with DeterministicGuard(False):
                storage = torch.empty(extent, dtype=torch.bfloat16)
            x = storage.as_strided(shape, strides).copy_(wild(*shape))
            for recipe in (MX, SQUARE, ScalingType.RowWise):
                self.check(x, recipe)
            self.check(x, MX, dim=0, swizzle=1)
            if x.dim() == 2:
                self.check(x, MX, dim=0, offs=torch.tensor([1, 2], dtype=torch.int32))

    @RECIPE
    def test_more_than_int32_elements(self, recipe):
        """The last program of a result of which only the pages in use exist."""
        rows, length = 2**21 + 40, 1048
        row = wild(1, length)
        cases = [(row.expand(rows, length), row.expand(128, length), {})]
        if recipe != SQUARE:
            offs = torch.tensor([length], dtype=torch.int32)
            options = {"dim": 0, "offs": offs}
            cases.append((cases[0][0].t(), cases[0][1].t(), options))
        for x, few, options in cases:
            with DeterministicGuard(False):
                data, scale = quantize.moe_quantize(
                    x, recipe.value, native=False, kernel=last_program, **options
                )
            expected, expected_scale = op(few, recipe.value, **options)
            if options:
                data, expected = data.t(), expected.t()
                scale, expected_scale = scale.t(), expected_scale.t()
            bits = torch.uint8
            # What one program writes of its last row: a tile, or a row.
            written = data[-1].view(bits) == expected[-1].view(bits)
            self.assertGreaterEqual(int(written.sum()), 24)
            self.assertTrue(written[-24:].all())
            self.assertEqual(
                scale[-1, -1:].view(bits), expected_scale[-1, -1:].view(bits)
            )


def last_program(kernel):
    """``kernel``, of whose grid only the last program runs."""

    class Launch:
        def __getitem__(self, grid):
            def program_id(builder, axis):
                index = np.array([grid[axis] - 1 if axis < len(grid) else 0], np.int32)
                return interpreter.TensorHandle(index, tl.int32)

            def run(*args, **kwargs):
                builder = interpreter.InterpreterBuilder
                with mock.patch.object(builder, "create_get_program_id", program_id):
                    kernel[(1,)](*args, **kwargs)

            return run

    return Launch()


instantiate_parametrized_tests(TestMoeQuantizeTriton)

if __name__ == "__main__":
    run_tests()
