// Inference of _moe_mlp_scaled on CPU with 8-bit and 4-bit weights: MoEForward.h with a
// source of panels that decodes weights (MoELowBit.h).
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLPScaledUtils.h>
#include <ATen/native/MoEQuantize.h>
#include <ATen/native/cpu/MoEForward.h>
#include <ATen/native/cpu/MoELowBit.h>
#include <c10/util/bit_cast.h>
#include <c10/util/irange.h>

#include <algorithm>

namespace at::native {
namespace {

using namespace moe_cpu;

// Whether rounding rows to int8 again gives the same numbers: no code is -128, and scales are those of
// _moe_quantize, powers of two from 2^-127 (for zeros; a denormal) on, or NaN.
bool round_to_themselves(const moe::Quantized& rows) {
  const auto* codes = rows.data.const_data_ptr<int8_t>();
  bool has_lowest = false;
  for (const auto i : c10::irange(rows.data.numel())) {
    has_lowest |= codes[i] == -128; // without a branch, so that it is vectorized
  }
  if (has_lowest || rows.scale.scalar_type() == kFloat8_e8m0fnu) {
    return !has_lowest;
  }
  const auto* scales = rows.scale.const_data_ptr<float>();
  return std::all_of(scales, scales + rows.scale.numel(), [](float scale) {
    const auto bits = c10::bit_cast<uint32_t>(scale);
    return (bits & 0x7fffff) == 0 || bits == 0x400000 || scale != scale;
  });
}

bool moe_mlp_low_bit_kernel(const moe::ScaledCall& call, const Tensor& output) {
  const auto view = [&](TensorList scaled) {
    return LowBitView(scaled, call.rule_w, call.has_panels());
  };
  const auto w_in = view(call.lists.w_in), w_out = view(call.lists.w_out);
  std::optional<LowBitView> w_up;
  if (!call.lists.w_up.empty()) {
    w_up = view(call.lists.w_up);
    if (w_up->codes != w_in.codes) {
      return false;  // gate and up are one panel
    }
  }
  moe::MLPInputs in = call.inputs;
  const auto dtype = in.input.scalar_type();
  const bool has_int8_rows = call.row_dtype() == kChar;
  if (has_int8_rows) {
    const auto& codes = call.lists.input[0];
    const moe::Quantized rows{codes.contiguous(), call.lists.input[1].contiguous()};
    // The rows become numbers first, exact except in float16, and int8 again in the products.
    if (dtype == kHalf || !Int8LowBitSource::is_supported(w_in) ||
        !Int8LowBitSource::is_supported(w_out) || !round_to_themselves(rows)) {
      return false;
    }
    in.input = codes.new_empty(codes.sizes(), codes.options().dtype(dtype));
    moe_dequantize_stub(kCPU, rows, *call.rule_a, in.input);
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
          in, call.call.activation, w_out.depth, /*preact=*/{});
      const int64_t halves = pass.layout().halves();
      if (!has_int8_rows) {
        pass.run(LowBitSource(w_in, w_up, halves), LowBitSource(w_out, {}, 1), output);
      } else if constexpr (!std::is_same_v<scalar_t, Half>) {
        pass.run(Int8LowBitSource(w_in, w_up, halves), Int8LowBitSource(w_out, {}, 1), output);
      }
    }
  });
  return true;
}

}  // namespace

ALSO_REGISTER_AVX512_DISPATCH(moe_mlp_weight_only_stub, &moe_mlp_low_bit_kernel)

}  // namespace at::native
