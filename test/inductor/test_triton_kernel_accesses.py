# Owner(s): ["module: inductor"]
"""What a user's Triton kernel reads and writes is found out once per kind of launch."""

import unittest
from unittest import mock

import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._triton import has_triton_package


if has_triton_package():
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget

    @triton.jit
    def copy_kernel(x, y, z, n, TO_Z: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        out = z if TO_Z else y
        tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@unittest.skipIf(not has_triton_package(), "needs Triton, but no GPU")
class TestTritonKernelAccesses(TestCase):
    def setUp(self):
        super().setUp()
        triton_kernel_wrap._ACCESSES.clear()
        # The analysis needs the target of a GPU, not a GPU.
        driver = mock.Mock(get_current_target=lambda: GPUTarget("cuda", 90, 32))
        for patch in (
            mock.patch.object(triton.runtime.driver, "_active", driver),
            mock.patch.object(
                triton_kernel_wrap,
                "generate_ttir",
                wraps=triton_kernel_wrap.generate_ttir,
            ),
        ):
            self.generate_ttir = patch.start()
            self.addCleanup(patch.stop)

    def written(self, to_z, dtype=torch.float32, n=8):
        with FakeTensorMode():
            tensors = {name: torch.empty(8, dtype=dtype) for name in "xyz"}
        kwargs = {**tensors, "n": n, "TO_Z": to_z, "BLOCK": 8}
        found = triton_kernel_wrap.identify_accessed_tensors(copy_kernel, kwargs, {})
        return [dep.name for dep in found.read_writes.writes]

    def test_launches_that_differ_do_not_share_a_result(self):
        self.assertEqual(self.written(False), ["y"])
        self.assertEqual(self.written(False), ["y"])
        self.assertEqual(self.generate_ttir.call_count, 1)
        self.assertEqual(self.written(True), ["z"])
        self.assertEqual(self.written(1), ["z"])
        self.assertEqual(self.written(False, dtype=torch.float16), ["y"])
        self.assertEqual(self.written(False, n=1), ["y"])
        self.assertEqual(self.generate_ttir.call_count, 5)

    def test_a_failure_is_not_kept(self):
        with mock.patch.object(
            triton_kernel_wrap, "ttir_to_functions", side_effect=RuntimeError
        ):
            self.assertEqual(self.written(False), ["x", "y", "z"])
        self.assertEqual(self.written(False), ["y"])


if __name__ == "__main__":
    run_tests()
