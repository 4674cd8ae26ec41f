// Forward of _moe_mlp on CPU: MoEForward.h with weights of the input's dtype.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLPCPU.h>
#include <ATen/native/cpu/MoEForward.h>

namespace at::native {
namespace {

using namespace moe_cpu;

void moe_mlp_kernel(
    const moe::MLPInputs& inputs, const moe::ActivationSpec& activation, const Tensor& output,
    const Tensor& preact) {
  dispatch_micro_gemm(inputs.input.scalar_type(), [&](auto zero, auto micro) {
    using scalar_t = decltype(zero);
    ForwardPass<scalar_t, decltype(micro)> pass(inputs, activation, inputs.w_out.size(2), preact);
    const WeightSource<scalar_t> w_in(
        inputs.w_in, inputs.w_up, pass.layout().halves(), /*transposed=*/true);
    const WeightSource<scalar_t> w_out(inputs.w_out, {}, 1, /*transposed=*/true);
    pass.run(w_in, w_out, output);
  });
}

}  // namespace

ALSO_REGISTER_AVX512_DISPATCH(moe_mlp_stub, &moe_mlp_kernel)

}  // namespace at::native
