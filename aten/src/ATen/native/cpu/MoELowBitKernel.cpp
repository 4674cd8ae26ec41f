// Inference of _moe_mlp_scaled on CPU with 8-bit and 4-bit weights: MoEForward.h with a
// source of panels that decodes weights (MoELowBit.h).
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLPScaled.h>
#include <ATen/native/MoEQuantize.h>
#include <ATen/native/cpu/MoEForward.h>
#include <ATen/native/cpu/MoELowBit.h>

namespace at::native {
namespace {

using namespace moe_cpu;

struct LowBitWeights {
  LowBitView w_in;
  LowBitView w_out;
  std::optional<LowBitView> w_up;

  explicit LowBitWeights(const moe::ScaledCall& call)
      : w_in(call.lists.w_in, call.rule_w, call.has_panels()),
        w_out(call.lists.w_out, call.rule_w, call.has_panels()) {
    if (!call.lists.w_up.empty()) {
      w_up.emplace(call.lists.w_up, call.rule_w, call.has_panels());
    }
  }
};

template <typename Source, typename Pass>
void run_with(Pass& pass, const LowBitWeights& weights, const Tensor& output) {
  const Source w_in(weights.w_in, weights.w_up, pass.layout().halves());
  const Source w_out(weights.w_out, std::nullopt, 1);
  pass.run(w_in, w_out, output);
}

bool moe_mlp_low_bit_kernel(const moe::ScaledCall& call, const Tensor& output) {
  const LowBitWeights weights(call);
  if (weights.w_up.has_value() && weights.w_up->codes != weights.w_in.codes) {
    return false;  // gate and up are one panel
  }
  moe::MLPInputs in = call.inputs;
  const auto dtype = in.input.scalar_type();
  const bool has_int8_rows = call.row_dtype() == kChar;
  if (has_int8_rows) {
    // Exact except in float16. Rounding to int8 again gives the same numbers.
    if (dtype == kHalf) {
      return false;
    }
    in.input = moe::dequantize({call.lists.input[0], call.lists.input[1]}, *call.rule_a, 1, dtype);
  }
  for (Tensor* bias : {&in.b_in, &in.b_out}) {
    if (bias->defined()) {
      *bias = bias->to(dtype);
    }
  }
  dispatch_micro_gemm(dtype, [&](auto zero, auto micro) {
    using scalar_t = decltype(zero);
    if constexpr (!std::is_same_v<scalar_t, double>) {  // which the validator refuses
      ForwardPass<scalar_t, decltype(micro)> pass(
          in, call.call.activation, weights.w_out.depth, /*preact=*/{});
      if (!has_int8_rows) {
        run_with<LowBitSource>(pass, weights, output);
      } else if constexpr (!std::is_same_v<scalar_t, Half>) {
        run_with<Int8LowBitSource>(pass, weights, output);
      }
    }
  });
  return true;
}

}  // namespace

ALSO_REGISTER_AVX512_DISPATCH(moe_mlp_weight_only_stub, &moe_mlp_low_bit_kernel)

}  // namespace at::native
