# Owner(s): ["module: inductor"]
"""An AOTInductor package of an MoE layer in FP8 for CUDA holds our kernels. Runs without a GPU."""

from test_moe_lowering_aoti import (  # first, as it imports fake_gpu before torch
    check_package,
    Layer,
    packaged,
)

from torch.testing._internal.common_moe import slow_subtest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


class TestMoeScaledAoti(TestCase):
    @parametrize(
        "recipe,arch,of_weights",
        [
            ("fp8_blockwise", "sm_90", "quantize_square_kernel"),
            slow_subtest(("mxfp8", "sm_100", "scaled_up_kernel")),
            slow_subtest(("mxfp8", "sm_90", "scaled_up_kernel")),
            slow_subtest(("fp8_rowwise", "sm_90", "scaled_up_kernel")),
        ],
    )
    def test_package_with_a_dynamic_number_of_tokens(self, recipe, arch, of_weights):
        # The last is the sum with the residual.
        kernels = ("scaled_up_kernel", "scaled_mm_kernel", of_weights, "triton_")
        check_package(self, packaged(Layer(recipe=recipe), arch), kernels)


instantiate_parametrized_tests(TestMoeScaledAoti)

if __name__ == "__main__":
    run_tests()
