# Owner(s): ["module: nn"]
"""``F.grouped_mm(bias=...)``: values, gradients, errors."""

import re

import torch
import torch.nn.functional as F
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


# 16 rows of which the last two belong to no group; the second group is empty.
G, T, K, N = 3, 16, 8, 24
ENDS = (6, 6, 14)
SHAPES = {
    "2d_3d": ((T, K), (G, K, N)),
    "3d_3d": ((G, T, K), (G, K, N)),
    "2d_2d": ((K, T), (T, N)),
}


def operands(layout, dtype=torch.float64):
    torch.manual_seed(0)
    mat_a, mat_b = (torch.randn(shape, dtype=dtype) for shape in SHAPES[layout])
    offs = None if layout == "3d_3d" else torch.tensor(ENDS, dtype=torch.int32)
    return mat_a, mat_b, offs, torch.randn(G, N, dtype=dtype)


def loop(mat_a, mat_b, offs, bias):
    """One ``addmm`` per group."""
    if offs is None:
        return torch.stack(
            [torch.addmm(c, a, b) for a, b, c in zip(mat_a, mat_b, bias)]
        )
    spans = list(zip((0, *ENDS[:-1]), ENDS))
    if mat_b.dim() == 2:
        return torch.stack(
            [
                torch.addmm(c, mat_a[:, s:e], mat_b[s:e])
                for c, (s, e) in zip(bias, spans)
            ]
        )
    rows = [torch.addmm(c, mat_a[s:e], b) for b, c, (s, e) in zip(mat_b, bias, spans)]
    return torch.cat([*rows, mat_a.new_zeros(T - ENDS[-1], N)])


class TestGroupedMMBias(TestCase):
    def _results(self, function, inputs, offs):
        inputs = [x.detach().clone().requires_grad_() for x in inputs]
        out = function(inputs[0], inputs[1], offs, inputs[2])
        torch.manual_seed(1)
        grad = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
        return (out.detach(), *torch.autograd.grad(out, inputs, grad))

    def _grouped(self, mat_a, mat_b, offs, bias):
        return F.grouped_mm(mat_a, mat_b, offs=offs, bias=bias)

    @parametrize("layout", list(SHAPES))
    @parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
    def test_values_and_gradients(self, layout, dtype):
        mat_a, mat_b, offs, bias = operands(layout, dtype)
        inputs = (mat_a, mat_b, bias)
        actual = self._results(self._grouped, inputs, offs)
        reference = self._results(loop, [x.double() for x in inputs], offs)
        unfused = self._results(loop, inputs, offs)
        for a, r, u in zip(actual, reference, unfused):
            self.assertEqual(a.dtype, dtype)
            error = (u.double() - r).abs().amax().item()
            bound = 2 * error + 4 * torch.finfo(dtype).eps * r.abs().amax().item()
            self.assertEqual(a.double(), r, atol=bound, rtol=0)

    @parametrize("layout", list(SHAPES))
    def test_gradcheck(self, layout):
        mat_a, mat_b, offs, bias = operands(layout)
        mat_a, mat_b, bias = (x.requires_grad_() for x in (mat_a, mat_b, bias))
        self.assertTrue(
            torch.autograd.gradcheck(
                lambda a, b, c: self._grouped(a, b, offs, c), (mat_a, mat_b, bias)
            )
        )

    @parametrize("layout", list(SHAPES))
    def test_one_bias_for_all_groups(self, layout):
        mat_a, mat_b, offs, bias = operands(layout)
        shared = self._results(self._grouped, (mat_a, mat_b, bias[0]), offs)
        each = self._results(self._grouped, (mat_a, mat_b, bias[0].expand(G, N)), offs)
        self.assertEqual(shared[:3], each[:3])
        self.assertEqual(shared[3], each[3].sum(0))

    def test_bias_gradient_is_summed_in_float32(self):
        # 4096 ones: a sum that is kept in bfloat16 stops growing at 256.
        rows = 4096
        bias = torch.zeros(1, 16, dtype=torch.bfloat16, requires_grad=True)
        out = F.grouped_mm(
            torch.zeros(rows, 16, dtype=torch.bfloat16),
            torch.zeros(1, 16, 16, dtype=torch.bfloat16),
            offs=torch.tensor([rows], dtype=torch.int32),
            bias=bias,
        )
        out.backward(torch.ones_like(out))
        self.assertEqual(bias.grad, torch.full_like(bias, rows))

    @parametrize("backend", ("aot_eager", "inductor"))
    def test_compile(self, backend):
        mat_a, mat_b, offs, bias = operands("2d_3d", torch.float32)
        compiled = torch.compile(self._grouped, fullgraph=True, backend=backend)
        inputs = (mat_a, mat_b, bias)
        self.assertEqual(
            self._results(compiled, inputs, offs),
            self._results(self._grouped, inputs, offs),
        )

    def test_errors(self):
        mat_a, mat_b, offs, bias = operands("2d_3d")
        for bad in (bias[0, 1:], bias[:2], bias[:, 1:], bias[None]):
            message = (
                "grouped_mm: bias must have shape (G, N) = (3, 24) or (N,), "
                f"got {tuple(bad.shape)}"
            )
            with self.assertRaisesRegex(ValueError, re.escape(message)):
                self._grouped(mat_a, mat_b, offs, bad)
        with self.assertRaisesRegex(ValueError, "dtype of mat_a, torch.float64, got"):
            self._grouped(mat_a, mat_b, offs, bias.float())
        with self.assertRaisesRegex(ValueError, "mat_a is 3D and mat_b is 2D"):
            self._grouped(mat_b.mT, mat_a.mT, offs, bias)


instantiate_parametrized_tests(TestGroupedMMBias)

if __name__ == "__main__":
    run_tests()
