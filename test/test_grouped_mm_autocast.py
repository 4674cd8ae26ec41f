# Owner(s): ["module: amp (automated mixed precision)"]
"""Autocast casts grouped_mm as it casts mm."""

import torch
import torch.nn.functional as F
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


G, T, K, N = 2, 32, 16, 24
SHAPES = {
    "2d_3d": ((T, K), (G, K, N)),
    "3d_3d": ((G, T, K), (G, K, N)),
    "2d_2d": ((K, T), (T, N)),
    "3d_2d": ((G, N, K), (K, T)),
}


def operands(layout, dtype=torch.float32):
    torch.manual_seed(0)
    mat_a, mat_b = (torch.randn(shape, dtype=dtype) for shape in SHAPES[layout])
    offs = None if layout == "3d_3d" else torch.tensor((8, T), dtype=torch.int32)
    return mat_a, mat_b, offs


class TestGroupedMMAutocast(TestCase):
    @parametrize("layout", list(SHAPES))
    @parametrize("dtype", (torch.bfloat16, torch.float16))
    def test_cast_to_lower_precision(self, layout, dtype):
        mat_a, mat_b, offs = operands(layout)
        with torch.autocast("cpu", dtype):
            out = F.grouped_mm(mat_a, mat_b, offs=offs)
        self.assertEqual(out.dtype, dtype)
        self.assertEqual(out, F.grouped_mm(mat_a.to(dtype), mat_b.to(dtype), offs=offs))

    def test_mixed_operands(self):
        mat_a, mat_b, offs = operands("2d_3d")
        with torch.autocast("cpu", torch.bfloat16):
            out = F.grouped_mm(mat_a.bfloat16(), mat_b, offs=offs)
        self.assertEqual(
            out, F.grouped_mm(mat_a.bfloat16(), mat_b.bfloat16(), offs=offs)
        )

    def test_disabled(self):
        mat_a, mat_b, offs = operands("2d_3d")
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                out = F.grouped_mm(mat_a, mat_b, offs=offs)
        self.assertEqual(out.dtype, torch.float32)

    def test_float64_stays(self):
        mat_a, mat_b, offs = operands("2d_3d", torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            out = F.grouped_mm(mat_a, mat_b, offs=offs)
        self.assertEqual(out.dtype, torch.float64)

    @parametrize("compiled", (False, True))
    def test_gradients_are_those_of_the_parameters(self, compiled):
        # As an autocast model has it: float32 leaves, bfloat16 inside.
        def function(x, weight, bias, offs):
            with torch.autocast("cpu", torch.bfloat16):
                return F.grouped_mm(x, weight, offs=offs, bias=bias).relu()

        if compiled:
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        x, weight, offs = operands("2d_3d")
        leaves = [x, weight, torch.randn(G, N)]
        for leaf in leaves:
            leaf.requires_grad_()
        out = function(*leaves, offs)
        self.assertEqual(out.dtype, torch.bfloat16)
        out.sum().backward()

        low = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
        F.grouped_mm(*low[:2], offs=offs, bias=low[2]).relu().sum().backward()
        for leaf, expected in zip(leaves, low):
            self.assertEqual(leaf.grad.dtype, torch.float32)
            self.assertEqual(leaf.grad, expected.grad.float())

    def test_row_of_the_autocast_test_list(self):
        rows = [
            r for r in AutocastCPUTestLists("cpu").torch_16 if r[0] == "_grouped_mm"
        ]
        self.assertEqual(len(rows), 1)
        with torch.autocast("cpu", torch.bfloat16):
            self.assertEqual(torch._grouped_mm(*rows[0][1]).dtype, torch.bfloat16)


instantiate_parametrized_tests(TestGroupedMMAutocast)

if __name__ == "__main__":
    run_tests()
