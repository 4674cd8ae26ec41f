# Owner(s): ["module: nn"]
"""The docstring of F.grouped_mm says what F.grouped_mm does."""

import doctest
import inspect
import re

import torch
import torch.nn.functional as F
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


DOC = inspect.getdoc(F.grouped_mm)
SIZES = {"G": 3, "T": 24, "K": 16, "M": 32, "N": 8}


class TestGroupedMMDocs(TestCase):
    def test_layout_table(self):
        rows = re.findall(r"^``\((.*?)\)``\s+``\((.*?)\)``\s+``\((.*?)\)``\s+(.*)$", DOC, re.M)  # fmt: skip
        self.assertEqual(len(rows), 4)
        for *names, divides in rows:
            mat_a, mat_b, out = (
                [SIZES[name] for name in shape.split(", ")] for shape in names
            )
            offs = torch.tensor((8, 8, 24), dtype=torch.int32)
            if "None" in divides:
                offs = None
            actual = F.grouped_mm(torch.randn(mat_a), torch.randn(mat_b), offs=offs)
            self.assertEqual(list(actual.shape), out)

    def test_example(self):
        example = doctest.DocTestParser().get_doctest(
            DOC, {"torch": torch, "F": F}, "grouped_mm", None, None
        )
        self.assertEqual(len(example.examples), 6)
        self.assertEqual(doctest.DocTestRunner().run(example).failed, 0)

    @parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
    def test_dtypes(self, dtype):
        name = str(dtype).removeprefix("torch.")
        self.assertIn(f"``{name}``", DOC)
        mat = torch.randn(2, 8, 8).to(dtype)
        self.assertEqual(F.grouped_mm(mat, mat, out_dtype=dtype).dtype, dtype)

    def test_other_out_dtype_is_an_error(self):
        mat = torch.randn(2, 8, 8, dtype=torch.bfloat16)
        with self.assertRaisesRegex(RuntimeError, "output dtype must match"):
            F.grouped_mm(mat, mat, out_dtype=torch.float32)


instantiate_parametrized_tests(TestGroupedMMDocs)

if __name__ == "__main__":
    run_tests()
