# Owner(s): ["oncall: distributed"]

import torch
from torch.distributed._moe.payload import decode, encode
from torch.testing._internal.common_utils import run_tests, TestCase


class TestWire(TestCase):
    def test_fp8_error_and_range(self):
        torch.manual_seed(0)
        for dim in (1, 127, 128, 300):
            self.assertEqual(
                encode(torch.empty(0, dim), torch.float8_e4m3fn).numel(), 0
            )
            x = torch.randn(7, dim) * torch.logspace(-20, 20, 7)[:, None]
            x[3] = 0
            packed = encode(x, torch.float8_e4m3fn)
            self.assertEqual(packed.shape, (7, dim + -(-dim // 128)))
            back = decode(packed, torch.float8_e4m3fn, dim, x.dtype)
            self.assertEqual(back[3], x[3])
            # 3 mantissa bits: half a unit of 2**-3 relative, or of the smallest
            # subnormal of a block whose largest value is 2**8 and above.
            largest = x.abs().amax(1, keepdim=True)
            allowed = torch.maximum(x.abs() / 16, largest * 2.0**-17)
            self.assertTrue(((back - x).abs() <= allowed).all())

    def test_fp8_twice_is_once(self):
        x = torch.randn(5, 256)
        for _ in range(2):
            once = decode(
                encode(x, torch.float8_e4m3fn),
                torch.float8_e4m3fn,
                256,
                torch.bfloat16,
            )
            if x.dtype == torch.bfloat16:
                self.assertEqual(once, x, atol=0, rtol=0)
            x = once

    def test_fp8_keeps_what_is_not_finite(self):
        x = torch.randn(3, 300)
        x[0, 5], x[1, 130], x[2, 299] = torch.inf, -torch.inf, torch.nan
        # Torch ops compute the rule in float64. Other dtypes may use a single op.
        for dtype in (torch.float64, torch.float32):
            packed = encode(x.to(dtype), torch.float8_e4m3fn)
            back = decode(packed, torch.float8_e4m3fn, 300, x.dtype)
            for row, block in ((0, 0), (1, 1), (2, 2)):
                self.assertTrue(
                    back[row, 128 * block : 128 * block + 128].isnan().all()
                )
                self.assertEqual(back[row].isnan().sum(), min(128, 300 - 128 * block))


if __name__ == "__main__":
    run_tests()
