# Owner(s): ["module: unknown"]

"""FLOPs of F.scaled_mm: those of the product, as of mm."""

import torch
import torch.nn.functional as F
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils.flop_counter import FlopCounterMode


class TestScaledMMFlops(TestCase):
    def test_scaled_mm(self):
        M, N, K = 16, 8, 32
        a = torch.randn(M, K).to(torch.float8_e4m3fn)
        b = torch.randn(N, K).to(torch.float8_e4m3fn).t()
        scale, kind = torch.ones(()), F.ScalingType.TensorWise
        with FlopCounterMode(display=False) as scaled:
            F.scaled_mm(a, b, scale, kind, scale, kind, output_dtype=torch.bfloat16)
        with FlopCounterMode(display=False) as plain:
            torch.mm(a.bfloat16(), b.bfloat16())
        self.assertEqual(scaled.get_total_flops(), 2 * M * N * K)
        self.assertEqual(scaled.get_total_flops(), plain.get_total_flops())


if __name__ == "__main__":
    run_tests()
