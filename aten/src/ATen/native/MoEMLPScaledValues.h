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
#endif

namespace at::native::moe {

// In which products are computed: quantised numbers are exact in bfloat16, not in float16.
inline ScalarType product_type(const Tensor& input) {
  return input.scalar_type() == kBFloat16 ? kBFloat16 : kFloat;
}

// A weight in the order of WeightLayout::Panels, as it is without it.
inline Quantized without_panels(const Quantized& weight, const ScalingRule& rule) {
  const auto& [data, scale] = weight;
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
  const auto lines = scale.contiguous().view({experts, groups, -1, kPanelLines});
  return {numbers, lines.transpose(2, 3).reshape(scale.sizes())};
}

// Kernels of the CPU, or ATen ops anywhere: the same numbers, but for the order in which
// products are summed.
enum class Backend : uint8_t { Native, Composite };

// Makes the numbers of one call, in the type of its products.
class ScaledValues {
 public:
  ScaledValues(const ScaledCall& call, Backend backend)
      : dtype(product_type(call.inputs.input)), call_(call), backend_(backend) {}

  const ScalarType dtype;

  // x rounded to what it stands for once quantised, contiguous.
  Tensor rounded(
      const Tensor& x, const ScalingRule& rule, int64_t dim, const Tensor& offs = {},
      ScalarType data_dtype = kFloat8_e4m3fn) const {
    if (backend_ == Backend::Composite) {
      const auto q = quantize_composite(x, rule, dim, data_dtype, offs);
      return dequantize(q, rule, dim, dtype, offs).contiguous();
    }
    auto values = at::empty(x.sizes(), x.options().dtype(dtype));
    const QuantizeOutputs out{Tensor(), Tensor(), values, data_dtype};
    moe_quantize_stub(kCPU, x.contiguous(), rule, dim, offs, out);
    return values;
  }

  // Codes and scales (R, C) along the rows; in values, if given, what they stand for.
  Quantized quantized_rows(
      const Tensor& rows, const ScalingRule& rule, ScalarType data_dtype,
      Tensor* values = nullptr) const {
    if (backend_ == Backend::Composite) {
      auto q = quantize_composite(rows, rule, 1, data_dtype, {});
      if (values != nullptr) {
        *values = dequantize(q, rule, 1, dtype);
      }
      return q;
    }
    const auto options = rows.options();
    const int64_t count = scale_count(rule, rows.size(1)).expect_int();
    const QuantizeOutputs out{
        at::empty(rows.sizes(), options.dtype(data_dtype)),
        at::empty({rows.size(0), count}, options.dtype(rule.scale_dtype)),
        values == nullptr ? Tensor() : at::empty(rows.sizes(), options.dtype(dtype)),
        data_dtype};
    moe_quantize_stub(kCPU, rows.contiguous(), rule, 1, Tensor(), out);
    if (values != nullptr) {
      *values = out.values;
    }
    return {out.data, out.scale};
  }

  // What data and scale stand for, in the order of data.
  Tensor dequantized(const Quantized& quantized, const ScalingRule& rule, int64_t dim) const {
    if (backend_ == Backend::Composite) {
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

  // Those of a weight (E, N, K), quantised along dim; with one pair only, for weights that
  // come quantised, that serves both products.
  Tensor weight(const Tensor& w, TensorList scaled, int64_t dim) const {
    const auto& rule = call_.rule_w;
    if (scaled.empty()) {
      return rounded(w, rule, dim);
    }
    const bool transposed = dim == 1 && scaled.size() == 4;
    const int64_t scaled_dim = transposed ? 1 : 2;
    Quantized q{scaled[transposed ? 2 : 0], scaled[transposed ? 3 : 1]};
    if (call_.has_panels()) {
      q = without_panels(q, rule);
    }
    const auto type = q.data.scalar_type();
    const bool packed = type == kByte || type == kFloat4_e2m1fn_x2;
    if (packed) {
      q.data = unpack_pairs(q.data);
    }
    if (rule.type == ScalingType::TensorWise) {
      return (q.data.to(kFloat) * q.scale).to(dtype);
    }
    if (call_.is_swizzled()) {
      const auto count = scale_count(rule, q.data.size(scaled_dim)).expect_int();
      q.scale = without_swizzle(q.scale, q.data.size(3 - scaled_dim), count)
                    .view(q.scale.scalar_type())
                    .movedim(-1, scaled_dim);
    }
    return packed ? dequantize(q, rule, scaled_dim, dtype) : dequantized(q, rule, scaled_dim);
  }

 private:
  const ScaledCall& call_;
  const Backend backend_;
};

} // namespace at::native::moe
