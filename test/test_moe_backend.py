# Owner(s): ["module: nn"]
"""What moe_kernel() accepts and restores, whatever kernels this build has."""

from unittest import mock

import torch
from torch.nn.utils.moe_kernel import _enabled_backends, moe_kernel, MoeBackend
from torch.testing._internal.common_moe import read_page, run_code_blocks
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


@instantiate_parametrized_tests
class TestMoeBackend(TestCase):
    def setUp(self):
        super().setUp()
        registered = mock.patch(
            "torch.nn.utils.moe_kernel._is_registered", lambda b: True
        )
        registered.start()
        self.addCleanup(registered.stop)

    def test_context_nests_and_restores(self):
        default = _enabled_backends()
        # Kernels that have not run on a GPU run where they are asked for.
        self.assertEqual(default, (MoeBackend.COMPOSITE,))
        with moe_kernel([MoeBackend.COMPOSITE, MoeBackend.TRITON]):
            with self.assertRaisesRegex(KeyError, "inside"):
                with moe_kernel(MoeBackend.TRITON):
                    self.assertEqual(_enabled_backends(), (MoeBackend.TRITON,))
                    raise KeyError("inside")
            # In the order in which they are asked.
            self.assertEqual(_enabled_backends(), (MoeBackend.TRITON, *default))
        self.assertEqual(_enabled_backends(), default)

    def test_inside_a_compiled_function(self):
        # Dynamo would trace the context away and leave the operators without it.
        seen = []

        @torch._dynamo.allow_in_graph
        def operator(x):
            seen.append(_enabled_backends())
            return x + 1

        def function(x):
            with moe_kernel(MoeBackend.COMPOSITE):
                return operator(x)

        torch.compile(function, backend="eager")(torch.ones(2))
        self.assertEqual(seen[-1], (MoeBackend.COMPOSITE,))
        torch._dynamo.reset()
        with self.assertRaisesRegex(torch._dynamo.exc.Unsupported, "around the comp"):
            torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))

    @parametrize("backends", [[], ["triton"], [MoeBackend.TRITON, None]])
    def test_bad_arguments(self, backends):
        with self.assertRaisesRegex(ValueError, "backends must be"):
            with moe_kernel(backends):
                pass

    def test_kernels_that_are_not_there(self):
        with mock.patch("torch.nn.utils.moe_kernel._is_registered", lambda b: False):
            with self.assertRaisesRegex(RuntimeError, "not available.*Triton >= 3.6"):
                with moe_kernel(MoeBackend.TRITON):
                    pass
            with self.assertRaisesRegex(RuntimeError, "not available.*nvidia-cutlass"):
                with moe_kernel(MoeBackend.CUTEDSL):
                    pass
            with moe_kernel([MoeBackend.TRITON, MoeBackend.COMPOSITE]):
                pass

    def test_documentation(self):
        count, names = run_code_blocks(read_page(__file__, "nn.utils.moe_kernel.md"))
        self.assertEqual(count, 1)
        self.assertEqual(names["y"].shape, names["x"].shape)


if __name__ == "__main__":
    run_tests()
