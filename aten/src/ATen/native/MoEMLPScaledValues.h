#pragma once

// The numbers that products of _moe_mlp_scaled read: rows and weights, rounded to what
// their codes and scales stand for, in the type of the products.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLPScaledUtils.h>
#include <ATen/native/MoEQuantize.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#endif

#include <array>

namespace at::native::moe {

// In which products are computed: quantised numbers are exact in bfloat16, not in float16.
inline ScalarType product_type(const Tensor& input) {
  return input.scalar_type() == kBFloat16 ? kBFloat16 : kFloat;
}

// Numbers of 4 bits, two to a byte, as float32.
inline Tensor unpack_pairs(const Tensor& data) {
  const auto bytes = data.view(kByte);
  const auto codes = at::stack({bytes.bitwise_and(15), bytes.bitwise_right_shift(4)}, -1)
                         .flatten(-2)
                         .to(kLong);
  if (data.scalar_type() == kByte) {
    return codes.to(kFloat) - 8;
  }
  const auto table = at::tensor(
      {0.F, 0.5F, 1.F, 1.5F, 2.F, 3.F, 4.F, 6.F, -0.F, -0.5F, -1.F, -1.5F, -2.F, -3.F, -4.F, -6.F},
      bytes.options().dtype(kFloat));
  return table.index_select(0, codes.flatten()).view(codes.sizes());
}

// [data, scale] of a weight in the order of WeightLayout::Panels, as they are without it.
inline std::array<Tensor, 2> without_panels(TensorList scaled, const ScalingRule& rule) {
  const auto &data = scaled[0], &scale = scaled[1];
  const int64_t experts = data.size(0), rows = data.size(1), groups = rows / kPanelLines;
  const auto bytes = data.contiguous().view(kByte);
  const bool is_byte = data.scalar_type() == kFloat8_e4m3fn || data.scalar_type() == kChar;
  const auto plain = is_byte
      ? bytes.view({experts, groups, -1, 4, 2, 4, 2}).permute({0, 1, 3, 5, 2, 4, 6})
      : bytes.view({experts, groups, -1, kPanelLines, 4}).transpose(2, 3);
  const auto numbers = plain.reshape(bytes.sizes()).view(data.scalar_type());
  if (rule.square || rule.type == ScalingType::TensorWise) {
    return {numbers, scale};
  }
  return {
      numbers,
      scale.contiguous()
          .view({experts, groups, -1, kPanelLines})
          .transpose(2, 3)
          .reshape(scale.sizes())};
}

// (E, rows, columns) of scales (E, padded) in the order of SWIZZLE_32_4_4.
inline Tensor without_swizzle(const Tensor& scale, int64_t rows, int64_t columns) {
  const int64_t row_tiles = (rows + 127) / 128, column_tiles = (columns + 3) / 4;
  return scale.contiguous()
      .view(kByte)
      .view({scale.size(0), row_tiles, column_tiles, 32, 4, 4})
      .permute({0, 1, 4, 3, 2, 5})
      .reshape({scale.size(0), row_tiles * 128, column_tiles * 4})
      .narrow(1, 0, rows)
      .narrow(2, 0, columns)
      .contiguous()
      .view(scale.scalar_type());
}

// Kernels of the CPU, or ATen ops anywhere: the same numbers, but for the order in which
// products are summed.
enum class Backend : uint8_t { Native, Composite };

// x rounded to what it stands for once quantised, contiguous and in dtype.
inline Tensor rounded_values(
    Backend backend,
    const Tensor& x,
    const ScalingRule& rule,
    int64_t dim,
    ScalarType dtype,
    const Tensor& offs = {},
    ScalarType data_dtype = kFloat8_e4m3fn) {
  if (backend == Backend::Composite) {
    const auto q = quantize_composite(x, rule, dim, data_dtype, offs);
    return dequantize(q, rule, dim, dtype, offs).contiguous();
  }
  auto values = at::empty(x.sizes(), x.options().dtype(dtype));
  moe_quantize_stub(
      kCPU,
      x.contiguous(),
      rule,
      dim,
      offs,
      QuantizeOutputs{Tensor(), Tensor(), values, data_dtype});
  return values;
}

// What data and scale stand for, in the order of data.
inline Tensor dequantized_values(
    Backend backend,
    const Quantized& quantized,
    const ScalingRule& rule,
    int64_t dim,
    ScalarType dtype) {
  if (backend == Backend::Composite) {
    return dequantize(quantized, rule, dim, dtype);
  }
  const int64_t dense = rule.square ? quantized.data.dim() - 1 : dim;
  const Quantized lines{
      quantized.data.movedim(dense, -1).contiguous(),
      quantized.scale.movedim(dense, -1).contiguous()};
  const auto values = at::empty(lines.data.sizes(), lines.data.options().dtype(dtype));
  moe_dequantize_stub(kCPU, lines, rule, values);
  return values.movedim(-1, dense);
}

// The numbers of a weight (E, N, K), quantised along dim; with one pair only, for weights
// that come quantised, those serve both products.
inline Tensor weight_values(
    Backend backend,
    const Tensor& w,
    TensorList scaled,
    const ScalingRule& rule,
    int64_t dim,
    ScalarType dtype,
    WeightLayout layout) {
  if (scaled.empty()) {
    return rounded_values(backend, w, rule, dim, dtype);
  }
  if (layout == WeightLayout::Panels) {
    return weight_values(
        backend, w, without_panels(scaled, rule), rule, dim, dtype, WeightLayout::Plain);
  }
  const bool transposed = dim == 1 && scaled.size() == 4;
  const int64_t scaled_dim = transposed ? 1 : 2;
  const auto& data = scaled[transposed ? 2 : 0];
  auto scale = scaled[transposed ? 3 : 1];
  const bool packed = data.scalar_type() == kByte || data.scalar_type() == kFloat4_e2m1fn_x2;
  const auto numbers = packed ? unpack_pairs(data) : data;
  if (rule.type == ScalingType::TensorWise) {
    return (numbers.to(kFloat) * scale).to(dtype);
  }
  if (layout == WeightLayout::Swizzled32x4x4) {
    const auto count = scale_count(rule, numbers.size(scaled_dim)).expect_int();
    scale = without_swizzle(scale, numbers.size(3 - scaled_dim), count)
                .movedim(-1, scaled_dim);
  }
  return dequantized_values(
      packed ? Backend::Composite : backend, {numbers, scale}, rule, scaled_dim, dtype);
}

} // namespace at::native::moe
