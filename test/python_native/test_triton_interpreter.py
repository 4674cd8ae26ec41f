# Owner(s): ["module: dsl-native-ops"]
"""The instruments of triton_interpreter.py measure what they claim to."""

import contextlib
import os


# Before anything can import Triton: its own helpers decide at import time.
os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton_interpreter import (
    exact_floats,
    MemorySanitizer,
    require_interpreter,
    shuffled_programs,
)

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


require_interpreter()


@triton.jit
def _float_ops_kernel(x, y, total, product, less, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i[:, None] * N + i[None, :])
    b = tl.load(y + i[:, None] * N + i[None, :])
    tl.store(total + i[:, None] * N + i[None, :], a + b)
    tl.store(product + i[:, None] * N + i[None, :], tl.dot(a, b))
    tl.store(less + i[:, None] * N + i[None, :], (a < b).to(tl.int32))


@triton.jit
def _cast_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def _dot_kernel(x, y, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    a = tl.load(x + m * K + k[None, :])
    b = tl.load(y + k[:, None] * N + n)
    tl.store(out + m * N + n, tl.dot(a, b))


@triton.jit
def _dot_scaled_kernel(
    x, x_scale, y, y_scale, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    FORM_X: tl.constexpr, FORM_Y: tl.constexpr, PACK_X: tl.constexpr, PACK_Y: tl.constexpr,
):  # fmt: skip
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[:, None]
    kx, ky = tl.arange(0, K // PACK_X), tl.arange(0, K // PACK_Y)
    ks = tl.arange(0, K // 32)[None, :]
    a = tl.load(x + m * (K // PACK_X) + kx[None, :])
    b = tl.load(y + n * (K // PACK_Y) + ky[None, :])
    sa = tl.load(x_scale + m * (K // 32) + ks)
    sb = tl.load(y_scale + n * (K // 32) + ks)
    acc = tl.full((M, N), 1.0, tl.float32)
    acc = tl.dot_scaled(a, sa, FORM_X, tl.trans(b), sb, FORM_Y, acc)
    tl.store(out + m * N + tl.arange(0, N)[None, :], acc)


@triton.jit
def _copy_kernel(x, out, n, OFFSET: tl.constexpr, STEP: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * STEP + tl.arange(0, N) + OFFSET
    tl.store(out + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def _constant_store_kernel(out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N) // 2, tl.arange(0, N))


@triton.jit
def _turn_kernel(last, turn):
    # Racy: the first to run takes turn 0, and so on.
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    now = tl.load(last)
    tl.store(turn + (x * 3 + y) * 4 + z, now)
    tl.store(last, now + 1)


class TestInterpreter(TestCase):
    def _run_float_ops(self):
        n = 16
        x, y = torch.randn(2, n, n, dtype=torch.bfloat16).unbind()
        total = torch.empty_like(x)
        product = torch.empty(n, n)
        less = torch.empty(n, n, dtype=torch.int32)
        _float_ops_kernel[(1,)](x, y, total, product, less, N=n)
        return (total, product, less), (x + y, x.float() @ y.float(), (x < y).int())

    def test_bfloat16_arithmetic_is_exact(self):
        with exact_floats():
            actual, expected = self._run_float_ops()
        self.assertEqual(actual, expected, atol=1e-5, rtol=0)

    def test_stock_interpreter_is_wrong(self):
        # When this fails, Triton computes bfloat16 itself and exact_floats can go.
        actual, expected = self._run_float_ops()
        self.assertNotEqual(actual[0], expected[0])
        self.assertNotEqual(actual[1], expected[1])

    @parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
    def test_casts_round_to_nearest_even(self, dtype):
        x = torch.randn(1024) * 16
        out = torch.empty(1024, dtype=dtype)
        with exact_floats():
            _cast_kernel[(1,)](x, out, N=1024)
        self.assertEqual(out.float(), x.to(dtype).float(), atol=0, rtol=0)

    @parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_casts_to_float8_saturate(self, dtype):
        largest = torch.finfo(dtype).max
        inf = float("inf")
        x = torch.tensor(
            [largest * 1.5, -inf, inf, -largest * 9, -float("nan"), 1e-9, -0.0, 1]
        )
        out = torch.empty(8, dtype=dtype)
        with exact_floats():
            _cast_kernel[(1,)](x, out, N=8)
        expected = torch.tensor([1.0, -1, 1, -1]) * largest
        self.assertEqual(out.float()[:4], expected)
        self.assertEqual(out.view(torch.uint8)[4:7].tolist(), [0x7F, 0, 0x80])

    @parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_dot_of_float8_is_exact(self, dtype):
        x, y = (torch.randn(shape).to(dtype) for shape in ((16, 64), (64, 32)))
        out = torch.empty(16, 32)
        with exact_floats():
            _dot_kernel[(1,)](x, y, out, M=16, K=64, N=32)
        self.assertEqual(out, (x.double() @ y.double()).float(), atol=0, rtol=0)

    def _scaled(self, form, rows, k):
        """Raw operand, elements per byte, scales and float64 numbers (rows, k)."""
        byte = torch.randint(120, 134, (rows, k // 32), dtype=torch.uint8)
        byte[0, 0] = 0
        scale = byte.view(torch.float8_e8m0fnu).double()
        pack = 2 if form == "e2m1" else 1
        if form == "e2m1":
            raw = torch.randint(256, (rows, k // 2)).to(torch.uint8)
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
            table = torch.cat((table, -table))
            value = table[torch.stack((raw & 15, raw >> 4), -1).flatten(-2).long()]
        else:
            dtype = {
                "e4m3": torch.float8_e4m3fn,
                "e5m2": torch.float8_e5m2,
                "bf16": torch.bfloat16,
            }
            raw = torch.randn(rows, k).to(dtype[form])
            value = raw.double()
        value = (value.unflatten(1, (-1, 32)) * scale[..., None]).flatten(1)
        return raw, pack, byte, value

    @parametrize(
        "form_x,form_y",
        [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e2m1"), ("bf16", "e2m1")],
    )
    def test_dot_scaled_is_exact(self, form_x, form_y):
        torch.manual_seed(0)
        x, pack_x, x_scale, x_value = self._scaled(form_x, 16, 128)
        y, pack_y, y_scale, y_value = self._scaled(form_y, 32, 128)
        expected = (x_value @ y_value.T).float() + 1
        out = torch.empty(16, 32)
        args = (x, x_scale, y, y_scale, out)
        sizes = dict(
            M=16,
            K=128,
            N=32,
            FORM_X=form_x,
            FORM_Y=form_y,
            PACK_X=pack_x,
            PACK_Y=pack_y,
        )
        with exact_floats():
            _dot_scaled_kernel[(1,)](*args, **sizes)
        self.assertEqual(out, expected, atol=0, rtol=0)
        # A block that is no number makes its row one.
        x_scale[3, 1] = 255
        with exact_floats():
            _dot_scaled_kernel[(1,)](*args, **sizes)
        self.assertEqual(out.isnan().all(1).tolist(), [i == 3 for i in range(16)])

    def test_sanitizer_accepts_a_correct_kernel(self):
        x, out = torch.randn(100), torch.empty(100)
        sanitizer = MemorySanitizer()
        with sanitizer():
            _copy_kernel[(7,)](x, out, 100, OFFSET=0, STEP=16, N=16)
        self.assertEqual(out, x)
        self.assertEqual(sanitizer.num_accesses, 14)

    def test_sanitizer_finds_an_access_out_of_bounds(self):
        # The neighbour of x in memory is x's own storage, so nothing would crash.
        storage = torch.randn(256)
        x, out = storage[:100], torch.empty(256)
        with MemorySanitizer()():
            with self.assertRaisesRegex(InterpreterError, "load out of bounds"):
                _copy_kernel[(7,)](x, out, 112, OFFSET=0, STEP=16, N=16)
        with MemorySanitizer()():
            with self.assertRaisesRegex(InterpreterError, "store out of bounds"):
                _copy_kernel[(7,)](storage, out[:100], 112, OFFSET=0, STEP=16, N=16)

    def test_sanitizer_finds_a_write_race(self):
        x, out = torch.randn(100), torch.empty(100)
        with MemorySanitizer()():
            with self.assertRaisesRegex(InterpreterError, "store to one address"):
                _copy_kernel[(7,)](x, out, 100, OFFSET=0, STEP=15, N=16)
        with MemorySanitizer()():
            with self.assertRaisesRegex(InterpreterError, "two lanes"):
                _constant_store_kernel[(1,)](torch.empty(8, dtype=torch.int32), N=16)

    def test_shuffled_programs(self):
        # Each once, in an order of the seed; what depends on it has other results.
        orders = []
        for seed in (None, 0, 1, 1):
            last, turn = (torch.zeros(size, dtype=torch.int32) for size in (1, 24))
            shuffle = (
                contextlib.nullcontext() if seed is None else shuffled_programs(seed)
            )
            with shuffle:
                _turn_kernel[(2, 3, 4)](last, turn)
            orders.append(turn.tolist())
            self.assertEqual(last.item(), 24)
        in_order, first, second, again = orders
        self.assertEqual(in_order, list(range(24)))
        self.assertEqual(sorted(first), in_order)
        self.assertEqual(second, again)
        self.assertEqual(len({*map(tuple, orders)}), 3)
        # The sanitizer has another view of the same mistake.
        with MemorySanitizer()(), shuffled_programs(0):
            with self.assertRaisesRegex(InterpreterError, "store to one address"):
                _turn_kernel[(2, 3, 4)](last, turn)


instantiate_parametrized_tests(TestInterpreter)

if __name__ == "__main__":
    run_tests()
