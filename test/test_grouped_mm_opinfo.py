# Owner(s): ["module: nn"]
"""The OpInfo of grouped_mm, and what the generic suites do with it.

The suites themselves (TestCommon, TestGradients, TestCompositeCompliance, ...)
pick the OpInfo up from op_db; the checks here call the same helpers on it alone.
"""

import doctest
import inspect

import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import make_tensor
from torch.testing._internal import composite_compliance, optests
from torch.testing._internal.common_device_type import (
    instantiate_device_type_tests,
    OpDTypes,
    ops,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import noncontiguous_like, run_tests, TestCase


grouped_mm_ops = [op for op in op_db if op.name == "nn.functional.grouped_mm"]


def tensors_of(sample):
    return [
        x
        for x in (sample.input, *sample.args, *sample.kwargs.values())
        if isinstance(x, torch.Tensor)
    ]


class TestGroupedMMOpInfo(TestCase):
    def test_one_opinfo(self, device):
        self.assertEqual(len(grouped_mm_ops), 1)

    @ops(grouped_mm_ops, allowed_dtypes=(torch.float32, torch.float64))
    def test_reference(self, device, dtype, op):
        for sample in op.reference_inputs(device, dtype):
            self.compare_with_reference(op, op.ref, sample, exact_dtype=True)

    @ops(grouped_mm_ops, dtypes=OpDTypes.none)
    def test_dtypes(self, device, op):
        claimed = op.supported_dtypes(torch.device(device).type)
        mat = {
            dtype: make_tensor((2, 16, 16), device=device, dtype=dtype)
            for dtype in (*claimed, torch.int32, torch.complex64, torch.bool)
        }
        works = set()
        for dtype, x in mat.items():
            try:
                op(x, x)
            except RuntimeError:
                continue
            works.add(dtype)
        self.assertEqual(works, set(claimed))

    @ops(grouped_mm_ops, dtypes=OpDTypes.none)
    def test_errors(self, device, op):
        count = 0
        for error in op.error_inputs(device):
            sample = error.sample_input
            with self.assertRaisesRegex(error.error_type, error.error_regex):
                op(sample.input, *sample.args, **sample.kwargs)
            count += 1
        self.assertGreaterEqual(count, 6)

    @ops(grouped_mm_ops)
    def test_noncontiguous_samples(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype, requires_grad=True):
            expected = op(sample.input, *sample.args, **sample.kwargs)
            other = sample.transform(
                lambda x: noncontiguous_like(x) if isinstance(x, torch.Tensor) else x
            )
            actual = op(other.input, *other.args, **other.kwargs)
            self.assertEqual(actual, expected)
            grads = []
            for out, inputs in ((expected, sample), (actual, other)):
                leaves = [x for x in tensors_of(inputs) if x.requires_grad]
                grads.append(torch.autograd.grad(out.sum(), leaves))
            self.assertEqual(grads[1], grads[0])

    @ops(grouped_mm_ops, allowed_dtypes=(torch.float64,))
    def test_gradients(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype, requires_grad=True):
            leaves = [x for x in tensors_of(sample) if x.requires_grad]
            # The fast mode compares a random projection of both Jacobians.
            function = lambda *_: op(sample.input, *sample.args, **sample.kwargs)  # noqa: E731
            self.assertTrue(gradcheck(function, leaves, fast_mode=True))
            self.assertTrue(gradgradcheck(function, leaves, fast_mode=True))

    @ops(grouped_mm_ops, allowed_dtypes=(torch.float32,))
    def test_composite_compliance(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype, requires_grad=False):
            args = [sample.input, *sample.args]
            composite_compliance.check_with_mode(
                op, args, sample.kwargs, self.assertEqual
            )
            composite_compliance.check_all_permutations(
                op, args, sample.kwargs, self.assertEqual
            )
        for sample in op.sample_inputs(device, dtype, requires_grad=True):
            args = [sample.input, *sample.args]
            composite_compliance.check_backward_formula(
                op.get_op(), args, sample.kwargs, None, None, self.assertEqual
            )

    @ops(grouped_mm_ops, allowed_dtypes=(torch.float32, torch.bfloat16))
    def test_opcheck(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype, requires_grad=True):
            if "bias" in sample.kwargs:
                continue  # F.grouped_mm adds it, the op does not take it
            torch.library.opcheck(
                torch.ops.aten._grouped_mm.default,
                (sample.input, *sample.args),
                sample.kwargs,
            )

    @ops(grouped_mm_ops)
    def test_meta(self, device, dtype, op):
        # As TestMeta: no fake tensors, which know their device, but those of the meta device.
        for sample in op.sample_inputs(device, dtype):
            expected = op(sample.input, *sample.args, **sample.kwargs)
            meta = sample.transform(
                lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x
            )
            actual = op(meta.input, *meta.args, **meta.kwargs)
            self.assertEqual(actual.device.type, "meta")
            self.assertEqual(
                (actual.shape, actual.stride(), actual.dtype),
                (expected.shape, expected.stride(), expected.dtype),
            )

    @ops(grouped_mm_ops, allowed_dtypes=(torch.float32,))
    def test_tracing(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype, requires_grad=True):
            args, kwargs = (sample.input, *sample.args), sample.kwargs
            optests.fake_check(op, args, kwargs)
            for dynamic in (False, True):
                optests.aot_autograd_check(op.get_op(), args, kwargs, dynamic)

    def test_docstring_example(self, device):
        doc = inspect.getdoc(F.grouped_mm)
        example = doctest.DocTestParser().get_doctest(
            doc, {"torch": torch, "F": F}, "grouped_mm", None, None
        )
        self.assertEqual(len(example.examples), 6)
        self.assertEqual(doctest.DocTestRunner().run(example).failed, 0)

    def test_other_out_dtype_is_an_error(self, device):
        mat = torch.randn(2, 8, 8, dtype=torch.bfloat16, device=device)
        with self.assertRaisesRegex(RuntimeError, "output dtype must match"):
            F.grouped_mm(mat, mat, out_dtype=torch.float32)

    @ops(grouped_mm_ops, allowed_dtypes=(torch.float64,))
    def test_vmap(self, device, dtype, op):
        # No batching rule: vmap falls back to a loop and says so once.
        mat_a = make_tensor((2, 24, 16), device=device, dtype=dtype)
        mat_b = make_tensor((3, 16, 8), device=device, dtype=dtype)
        offs = torch.tensor([8, 8, 24], dtype=torch.int32, device=device)

        def one(a):
            return F.grouped_mm(a, mat_b, offs=offs)

        self.assertEqual(torch.vmap(one)(mat_a), torch.stack([one(a) for a in mat_a]))


instantiate_device_type_tests(TestGroupedMMOpInfo, globals(), only_for="cpu")

if __name__ == "__main__":
    run_tests()
