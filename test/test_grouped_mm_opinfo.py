# Owner(s): ["module: nn"]
"""What the generic suites do not ask of grouped_mm's OpInfo and docstring."""

import doctest
import inspect

import torch
import torch.nn.functional as F
from torch.testing._internal.common_device_type import (
    instantiate_device_type_tests,
    ops,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import run_tests, TestCase


grouped_mm_ops = [op for op in op_db if op.name == "nn.functional.grouped_mm"]


class TestGroupedMMOpInfo(TestCase):
    def test_one_opinfo(self, device):
        self.assertEqual(len(grouped_mm_ops), 1)

    @ops(grouped_mm_ops, allowed_dtypes=(torch.float32, torch.float64))
    def test_samples_agree_with_the_reference(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype):
            self.compare_with_reference(op, op.ref, sample, exact_dtype=True)

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


instantiate_device_type_tests(TestGroupedMMOpInfo, globals(), only_for="cpu")

if __name__ == "__main__":
    run_tests()
