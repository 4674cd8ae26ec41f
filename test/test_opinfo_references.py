# Owner(s): ["module: testing"]
"""The samples of the OpInfos that this stack adds agree with their references.

This file is not for upstream, where test_ops.py checks every OpInfo and xdoctest every docstring.
"""

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


# Only those that this prefix of the stack has.
ours = [
    op
    for op in op_db
    if ("grouped" in op.name or "moe" in op.name) and op.ref is not None
]


class TestOpInfoReferences(TestCase):
    def test_there_are_some(self, device):
        self.assertIn("nn.functional.grouped_mm", {op.name for op in op_db})
        self.assertGreater(len(ours), 0)

    @ops(ours, allowed_dtypes=(torch.float64, torch.int32))
    def test_samples(self, device, dtype, op):
        for sample in op.reference_inputs(device, dtype):
            self.compare_with_reference(op, op.ref, sample, exact_dtype=True)

    def test_docstring_of_grouped_mm(self, device):
        doc = inspect.getdoc(F.grouped_mm)
        example = doctest.DocTestParser().get_doctest(
            doc, {"torch": torch, "F": F}, "grouped_mm", None, None
        )
        self.assertEqual(len(example.examples), 6)
        self.assertEqual(doctest.DocTestRunner().run(example).failed, 0)


instantiate_device_type_tests(TestOpInfoReferences, globals(), only_for="cpu")

if __name__ == "__main__":
    run_tests()
