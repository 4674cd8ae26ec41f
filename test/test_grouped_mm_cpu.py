# Owner(s): ["module: nn"]
"""The CPU kernel of grouped_mm: values, gradients, strides, offs, and its meta."""

import contextlib
import unittest

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)


G = 4
# The length of the ragged dimension and the ends of its four groups.
OFFS = {
    "balanced": (16, (4, 8, 12, 16)),
    "empty_groups": (16, (0, 9, 9, 16)),
    "left_over": (16, (3, 5, 9, 11)),
    "nothing": (16, (0, 0, 0, 0)),
    "no_rows": (0, (0, 0, 0, 0)),
}
LAYOUTS = ("2d_3d", "3d_3d", "2d_2d", "3d_2d")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def as_strides(tensor, kind):
    """The same values with other strides."""
    if kind == "contiguous":
        return tensor
    if kind == "transposed":
        return tensor.transpose(-2, -1).contiguous().transpose(-2, -1)
    if kind == "every_other":  # no dimension has stride 1
        wide = tensor.new_empty((*tensor.shape[:-1], 2 * tensor.shape[-1]))
        return wide[..., ::2].copy_(tensor)
    if kind == "expanded":
        return tensor[..., :1].expand(tensor.shape)
    raise AssertionError(kind)


def operands(layout, offs="balanced", dtype=torch.float64, k=6, n=10, m=7):
    """mat_a, mat_b, offs; sizes that are no multiple of 16 bytes."""
    torch.manual_seed(0)
    length, ends = OFFS[offs]
    shapes = {
        "2d_3d": ((length, k), (G, k, n)),
        "3d_3d": ((G, m, k), (G, k, n)),
        "2d_2d": ((m, length), (length, n)),
        "3d_2d": ((G, m, k), (k, length)),
    }[layout]
    ends = None if layout == "3d_3d" else torch.tensor(ends, dtype=torch.int32)
    return *(torch.randn(shape, dtype=dtype) for shape in shapes), ends


def loop(mat_a, mat_b, offs):
    """What grouped_mm means: one matmul per group, zero where no group is."""
    if offs is None:
        return torch.stack([a @ b for a, b in zip(mat_a, mat_b)])
    ends = [0, *offs.tolist()]
    spans = list(zip(ends[:-1], ends[1:]))
    if mat_a.dim() == 2 and mat_b.dim() == 2:
        return torch.stack([mat_a[:, s:e] @ mat_b[s:e] for s, e in spans])
    if mat_a.dim() == 2:
        rows = [mat_a[s:e] @ mat_b[g] for g, (s, e) in enumerate(spans)]
        left = mat_a.shape[0] - ends[-1]
        return torch.cat([*rows, rows[0].new_zeros(left, mat_b.shape[-1])])
    columns = [mat_a[g] @ mat_b[:, s:e] for g, (s, e) in enumerate(spans)]
    left = mat_b.shape[1] - ends[-1]
    return torch.cat([*columns, columns[0].new_zeros(mat_a.shape[1], left)], dim=1)


class TestGroupedMMCPU(TestCase):
    def _check_close(self, actual, reference, unfused):
        """Within twice the error of a plain loop in the same dtype."""
        eps = torch.finfo(actual.dtype).eps
        scale = reference.abs().amax().item() if reference.numel() else 0.0
        error = (unfused.double() - reference).abs()
        bound = 2 * (error.amax().item() if error.numel() else 0.0) + 4 * eps * scale
        self.assertEqual(actual.double(), reference, atol=bound, rtol=0)

    @parametrize("layout", LAYOUTS)
    @parametrize("offs", list(OFFS))
    @parametrize("dtype", DTYPES)
    def test_values_and_gradients(self, layout, offs, dtype):
        mat_a, mat_b, ends = operands(layout, offs, dtype)
        results = []
        for function, cast in (
            (lambda a, b: F.grouped_mm(a, b, offs=ends), dtype),
            (lambda a, b: loop(a, b, ends), torch.float64),
            (lambda a, b: loop(a, b, ends), dtype),
        ):
            a, b = (x.to(cast).requires_grad_() for x in (mat_a, mat_b))
            out = function(a, b)
            # Seeded again: the same gradient for all three.
            torch.manual_seed(1)
            grad = torch.randn(out.shape, dtype=dtype).to(cast)
            results.append((out, *torch.autograd.grad(out, (a, b), grad)))
        for actual, reference, unfused in zip(*results):
            self.assertEqual(actual.dtype, dtype)
            self.assertEqual(actual.shape, reference.shape)
            self._check_close(actual.detach(), reference.detach(), unfused.detach())

    @parametrize("layout", LAYOUTS)
    @parametrize("kind", ("transposed", "every_other", "expanded"))
    def test_any_strides(self, layout, kind):
        mat_a, mat_b, offs = operands(layout, dtype=torch.float32)
        mat_a, mat_b = (as_strides(x, kind) for x in (mat_a, mat_b))
        if offs is not None:
            offs = offs.repeat_interleave(2)[::2]
        out = F.grouped_mm(mat_a, mat_b, offs=offs)
        self.assertEqual(out, loop(mat_a, mat_b, offs))

    @parametrize("layout", LAYOUTS)
    def test_expanded_gradient(self, layout):
        mat_a, mat_b, offs = operands(layout)
        mat_a.requires_grad_()
        mat_b.requires_grad_()
        expected = torch.autograd.grad(loop(mat_a, mat_b, offs).sum(), (mat_a, mat_b))
        F.grouped_mm(mat_a, mat_b, offs=offs).sum().backward()
        self.assertEqual((mat_a.grad, mat_b.grad), expected)

    @parametrize("layout", LAYOUTS)
    def test_gradcheck(self, layout):
        mat_a, mat_b, offs = operands(layout, "left_over", m=3, k=2, n=3)
        mat_a.requires_grad_()
        mat_b.requires_grad_()

        def function(a, b):
            return F.grouped_mm(a, b, offs=offs)

        self.assertTrue(torch.autograd.gradcheck(function, (mat_a, mat_b)))
        self.assertTrue(torch.autograd.gradgradcheck(function, (mat_a, mat_b)))

    @parametrize("layout", ("2d_3d", "3d_2d"))
    def test_rows_without_a_group_are_zero(self, layout):
        mat_a, mat_b, offs = operands(layout, "left_over")
        shape = loop(mat_a, mat_b, offs).shape
        for _ in range(20):
            # The next allocation of this size reuses this memory.
            poison = [torch.full(shape, float("nan")).double() for _ in range(8)]
            del poison
            out = F.grouped_mm(mat_a, mat_b, offs=offs)
            self.assertEqual(out, loop(mat_a, mat_b, offs))

    @parametrize("layout", ("2d_3d", "2d_2d", "3d_2d"))
    @parametrize(
        "ends,bad",
        [
            subtest(((4, 8, 6, 16), r"offs\[2\] = 6 for a group that starts at 8"), name="decreasing"),
            subtest(((-1, 8, 12, 16), r"offs\[0\] = -1 for a group that starts at 0"), name="negative"),
            subtest(((4, 8, 12, 17), r"offs\[3\] = 17 for a group that starts at 12"), name="too_long"),
        ],
    )  # fmt: skip
    def test_bad_offs(self, layout, ends, bad):
        mat_a, mat_b, _ = operands(layout)
        offs = torch.tensor(ends, dtype=torch.int32)
        message = r"offs must be non-decreasing with values in \[0, 16\].* got " + bad
        with self.assertRaisesRegex(RuntimeError, message):
            F.grouped_mm(mat_a, mat_b, offs=offs)

    def test_other_errors(self):
        mat_a, mat_b, offs = operands("2d_3d")
        for args, message in (
            (
                (mat_a.int(), mat_b.int(), offs),
                "Float32, BFloat16 or Float16 matrix .or Float64",
            ),
            ((mat_a.float(), mat_b, offs), "same dtype, got Float and Double"),
            ((mat_a[0], mat_b, offs), "mat_a has to be 2 or 3d"),
            ((mat_a, mat_b[0, 0], offs), "mat_b has to be 2 or 3d"),
            ((mat_a[:, 1:], mat_b, offs), "must match, got 5 and 6"),
            ((mat_a, mat_b, None), "Have to provide offsets if there is a 2d matrix"),
            ((mat_b, mat_b.mT, offs), "no offset if both matrices are 3d"),
            ((mat_a, mat_b, offs.long()), "Offsets have to be int32"),
            ((mat_a, mat_b, offs[None]), "offs has to be 1D"),
            ((mat_a, mat_b, offs[:3]), "matrix batch sizes have to match"),
        ):
            with self.assertRaisesRegex(RuntimeError, message):
                torch._grouped_mm(*args)
        with self.assertRaisesRegex(RuntimeError, "output dtype must match"):
            F.grouped_mm(mat_a, mat_b, offs=offs, out_dtype=torch.float32)

    @parametrize("layout", LAYOUTS)
    @parametrize("fake", (False, True))
    def test_contraction_error(self, layout, fake):
        # In 2d_2d the summed dimension is the one that offs divides, yet both have it.
        mat_a, mat_b, offs = operands(layout, "left_over")
        mat_b = mat_b[..., 1:, :]
        with FakeTensorMode() if fake else contextlib.nullcontext() as mode:
            if fake:
                mat_a, mat_b = map(mode.from_tensor, (mat_a, mat_b))
                offs = offs if offs is None else mode.from_tensor(offs)
            message = f"must match, got {mat_a.shape[-1]} and {mat_a.shape[-1] - 1}"
            with self.assertRaisesRegex(RuntimeError, message):
                F.grouped_mm(mat_a, mat_b, offs=offs)

    @parametrize("layout", LAYOUTS)
    @parametrize("dtype", DTYPES)
    @parametrize("kind", ("contiguous", "transposed", "every_other", "expanded"))
    def test_fake_agrees_with_eager(self, layout, dtype, kind):
        mat_a, mat_b, offs = operands(layout, dtype=dtype)
        mat_a, mat_b = (as_strides(x, kind) for x in (mat_a, mat_b))
        real = F.grouped_mm(mat_a, mat_b, offs=offs)
        with FakeTensorMode() as mode:
            fakes = [
                x if x is None else mode.from_tensor(x) for x in (mat_a, mat_b, offs)
            ]
            fake = F.grouped_mm(*fakes[:2], offs=fakes[2])
        self.assertEqual(fake.dtype, real.dtype)
        self.assertEqual(fake.shape, real.shape)
        self.assertEqual(fake.stride(), real.stride())

    @parametrize("layout", LAYOUTS)
    @parametrize("backend", ("aot_eager", "inductor"))
    def test_compile(self, layout, backend):
        # An odd width: the eager output has padded strides, and so must the
        # one that the compiled code expects.
        mat_a, mat_b, offs = operands(layout, dtype=torch.float32, n=5)

        def function(a, b, offs):
            return F.grouped_mm(a, b, offs=offs).relu()

        compiled = torch.compile(function, fullgraph=True, backend=backend)
        results = []
        for f in (function, compiled):
            a, b = (x.clone().requires_grad_() for x in (mat_a, mat_b))
            out = f(a, b, offs)
            out.sum().backward()
            results.append((out, a.grad, b.grad))
        self.assertEqual(results[1], results[0])

    @unittest.skipIf(not dist.is_available(), "needs torch.distributed")
    def test_dtensor_takes_any_strides(self):
        # Rows of 12 bytes: DTensor asked for those of 16 that GPU kernels need, and found no
        # sharding at all, not even that of replicated operands.
        mat_a, mat_b = torch.randn(7, 3), torch.randn(3, 3, 5)
        offs = torch.tensor([2, 3, 7], dtype=torch.int32)
        dist.init_process_group("fake", rank=0, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,))
            operands = [
                DTensor.from_local(x, mesh, [Replicate()]) for x in (mat_a, mat_b, offs)
            ]
            out = F.grouped_mm(*operands[:2], offs=operands[2])
            self.assertEqual(out.to_local(), F.grouped_mm(mat_a, mat_b, offs=offs))
        finally:
            dist.destroy_process_group()


instantiate_parametrized_tests(TestGroupedMMCPU)

if __name__ == "__main__":
    run_tests()
