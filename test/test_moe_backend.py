# Owner(s): ["module: nn"]
"""What moe_kernel() accepts and restores, whatever kernels this build has."""

import pathlib
from unittest import mock

from torch.nn.utils.moe_kernel import _enabled_backends, moe_kernel, MoeBackend
from torch.testing._internal.common_moe import run_code_blocks
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
            "torch.nn.utils.moe_kernel._triton_is_registered", lambda: True
        )
        registered.start()
        self.addCleanup(registered.stop)

    def test_context_nests_and_restores(self):
        with moe_kernel([MoeBackend.COMPOSITE, MoeBackend.TRITON]):
            with self.assertRaisesRegex(KeyError, "inside"):
                with moe_kernel(MoeBackend.TRITON):
                    self.assertEqual(_enabled_backends(), (MoeBackend.TRITON,))
                    raise KeyError("inside")
            self.assertEqual(len(_enabled_backends()), 2)
        self.assertEqual(_enabled_backends(), tuple(MoeBackend))

    @parametrize("backends", [[], ["triton"], [MoeBackend.TRITON, None]])
    def test_bad_arguments(self, backends):
        with self.assertRaisesRegex(ValueError, "backends must be"):
            with moe_kernel(backends):
                pass

    def test_triton_that_is_not_there(self):
        with mock.patch(
            "torch.nn.utils.moe_kernel._triton_is_registered", lambda: False
        ):
            with self.assertRaisesRegex(RuntimeError, "not available"):
                with moe_kernel(MoeBackend.TRITON):
                    pass
            with moe_kernel([MoeBackend.TRITON, MoeBackend.COMPOSITE]):
                pass

    def test_documentation(self):
        # The code block of the page runs.
        page = pathlib.Path(__file__).resolve().parents[1] / "docs" / "source"
        text = (page / "nn.utils.moe_kernel.md").read_text()
        count, names = run_code_blocks(text)
        self.assertEqual(count, 1)
        self.assertEqual(names["y"].shape, names["x"].shape)


if __name__ == "__main__":
    run_tests()
