# Owner(s): ["module: dsl-native-ops"]
"""The bit rules of triton_kernels/scaling.py are those of ``_moe_quantize`` on CPU."""

import os


# Before anything can import Triton: its own helpers decide at import time.
os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl
from triton_interpreter import exact_floats, require_interpreter

import torch
from torch._native.ops.moe.triton_kernels import scaling
from torch.nn.functional import ScalingType
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


require_interpreter()

quantize_op = torch.ops.aten._moe_quantize.default
MX = ScalingType.BlockWise1x32.value
INT8 = parametrize("int8", [False, True])
NATIVE = parametrize("native", [False, True])


@triton.jit
def _rows_kernel(
    x, code, byte, back, rows,
    M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    INT8: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * M + tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    v = tl.load(x + m * N + n, mask=m < rows, other=0.0)
    if COLUMNS:
        q, b = scaling.quantize_columns(v, M, N, BLOCK)
        y = scaling.dequantize_rows(tl.trans(q), tl.trans(b), N, M, BLOCK, False)
        y = tl.trans(y)
        mb = tl.program_id(0) * (M // BLOCK) + tl.arange(0, M // BLOCK)[:, None]
        tl.store(byte + mb * N + n, b, mask=mb * BLOCK < rows)
    else:
        q, b = scaling.quantize_rows(v, M, N, BLOCK, INT8, NATIVE)
        y = scaling.dequantize_rows(q, b, M, N, BLOCK, INT8)
        nb = tl.arange(0, N // BLOCK)[None, :]
        tl.store(byte + m * (N // BLOCK) + nb, b, mask=m < rows)
    tl.store(code + m * N + n, q, mask=m < rows)
    tl.store(back + m * N + n, y, mask=m < rows)


@triton.jit
def _codes_kernel(out, INT8: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(out + i, scaling.decode(i.to(tl.uint8), INT8))


@triton.jit
def _scales_kernel(scale, inverse):
    i = tl.arange(0, 256)
    tl.store(scale + i, scaling.power_of_two(i))
    tl.store(inverse + i, scaling.reciprocal(i))


def bits(x):
    return x.contiguous().view(torch.uint8)


class TestMoeScaling(TestCase):
    def setUp(self):
        super().setUp()
        context = exact_floats()
        context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)

    def run_rows(self, x, int8, native, columns=False):
        """Codes, bytes and numbers of x (R, N) float32, in blocks of 32."""
        rows, n = x.shape
        m = min(1024, triton.next_power_of_2(rows))
        code = torch.empty(rows, n, dtype=torch.uint8)
        shape = (rows // 32, n) if columns else (rows, n // 32)
        byte = torch.empty(shape, dtype=torch.int32)
        back = torch.empty(rows, n)
        _rows_kernel[(triton.cdiv(rows, m),)](
            x, code, byte, back, rows, M=m, N=n, BLOCK=32, COLUMNS=columns, INT8=int8,
            NATIVE=native,
        )  # fmt: skip
        return code, byte, back

    def check(self, x, int8, native):
        dtype = torch.int8 if int8 else torch.float8_e4m3fn
        data, scale = quantize_op(x, MX, dtype=dtype)
        code, byte, back = self.run_rows(x, int8, native)
        self.assertEqual(byte.to(torch.uint8), scale.view(torch.uint8))
        self.assertEqual(code, bits(data))
        number = data.double().unflatten(1, (-1, 32)) * scale.double()[..., None]
        # Equal but for what float32 cannot hold.
        self.assertEqual(back, number.flatten(1).float(), rtol=0, atol=0)

    @INT8
    @NATIVE
    def test_every_bfloat16_amax(self, int8, native):
        amax = torch.arange(0x7F81, dtype=torch.int16).view(torch.bfloat16).float()
        x = torch.zeros(len(amax), 32)
        x[:, 3] = -amax
        x[:, 9] = amax / 3
        self.check(x, int8, native)

    @INT8
    @NATIVE
    def test_edges(self, int8, native):
        """float32 around the places where the rules change, and what is no number."""
        torch.manual_seed(0)
        # Where the byte goes up: 448 and 127 times powers of two.
        base = torch.tensor([448.0, 127.0, 464.0, 126.5])
        exponents = torch.tensor(
            [-149, -140, -136, -135, -134, -126, -9, 0, 5, 118, 119]
        )
        centre = (base[:, None] * torch.exp2(exponents.double())).float().flatten()
        near = centre.view(torch.int32)[:, None] + torch.arange(-3, 4)
        amax = near.clamp(0, 0x7F7FFFFF).view(torch.float32).flatten()
        # And codes on both sides of every tie of a block.
        ties = torch.arange(-16, 16) / 16
        x = amax[:, None] * torch.where(ties == 0, 1.0, ties)
        special = torch.tensor(
            [torch.inf, -torch.inf, torch.nan, -torch.nan, 0.0, -0.0]
        )
        y = torch.randn(6, 32)
        y[:, 5] = special
        y[4:] = special[4:, None]
        largest = torch.full((1, 32), torch.finfo(torch.float32).max)
        smallest = torch.full((1, 32), -(2.0**-149))
        self.check(torch.cat((x, y, largest, smallest)), int8, native)

    def test_columns(self):
        torch.manual_seed(0)
        x = torch.randn(128, 64) * torch.exp2(
            torch.randint(-140, 100, (128, 64)).float()
        )
        x[3, 4], x[40, 5] = torch.inf, torch.nan
        code, byte, back = self.run_rows(x.T.contiguous(), False, True)
        columns = self.run_rows(x, False, True, columns=True)
        self.assertEqual(columns, (code.T, byte.T, back.T))

    @INT8
    def test_codes_and_scales(self, int8):
        out, scale, inverse = (torch.empty(256) for _ in range(3))
        _codes_kernel[(1,)](out, INT8=int8)
        dtype = torch.int8 if int8 else torch.float8_e4m3fn
        codes = torch.arange(256).to(torch.uint8)
        self.assertEqual(out, codes.view(dtype).float(), rtol=0, atol=0)
        _scales_kernel[(1,)](scale, inverse)
        expected = codes.view(torch.float8_e8m0fnu).float()
        self.assertEqual(scale, expected, rtol=0, atol=0)
        self.assertEqual(inverse[:255], 1 / expected[:255], rtol=0, atol=0)


instantiate_parametrized_tests(TestMoeScaling)

if __name__ == "__main__":
    run_tests()
