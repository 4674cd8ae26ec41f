// _moe_quantize: data * scale with power-of-two scales, for low-precision MoE layers.
//
// The byte of a scale is e + 127 with e = ceil(log2(largest magnitude / largest number of
// the data type)), at least -127: data never saturates. A block of zeros has byte 0, one with an
// infinity or a NaN has byte 255, which is NaN, and NaN as data (int8: 0).
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEQuantize.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_moe_quantize_native.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#endif

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace at::native {

DEFINE_DISPATCH(moe_quantize_stub);
DEFINE_DISPATCH(moe_dequantize_stub);

namespace moe {
namespace {

constexpr int64_t kNaNBits = 0x7FC00000;

// scale_byte of a tensor (int32)
Tensor scale_bytes(const Tensor& amax_bits, ScalarType dtype) {
  const auto byte = (amax_bits + scale_byte_offset(dtype)).bitwise_right_shift(23).clamp_min(0);
  return at::where(amax_bits.ge(kInfinityBits), kNaNByte, byte);
}

// 2^(byte - 127), NaN for 255
Tensor power_of_two(const Tensor& byte) {
  const auto bits = at::where(byte.eq(0), 0x00400000, byte.bitwise_left_shift(23));
  return at::where(byte.eq(255), kNaNBits, bits).to(kInt).view(kFloat);
}

Tensor as_scale(const Tensor& byte, const ScalingRule& rule) {
  return rule.scale_dtype == kFloat ? power_of_two(byte)
                                    : byte.to(kByte).view(kFloat8_e8m0fnu);
}

Tensor magnitude_bits(const Tensor& x) {
  return x.view(kInt).bitwise_and(0x7FFFFFFF);
}

// x * 2^(127 - byte) rounded to the data type; byte has the shape of x or broadcasts.
Tensor round_data(const Tensor& x, const Tensor& byte, ScalarType dtype) {
  const auto is_nan = byte.eq(255);
  const auto scaled = x * power_of_two((byte.neg() + 254).clamp_min(0));
  if (dtype == kChar) {
    return at::where(is_nan, 0, scaled.round().clamp(-127, 127)).to(kChar);
  }
  return at::where(is_nan, std::numeric_limits<double>::quiet_NaN(), scaled.clamp(-448, 448))
      .to(dtype);
}

// For each of L elements of a dimension the place of its scale.
Tensor scale_places(
    const ScalingRule& rule,
    int64_t length,
    const Tensor& offs,
    const TensorOptions& options) {
  const auto place = at::arange(length, options.dtype(kLong));
  if (!offs.defined()) {
    return rule.block == 0 ? place.mul(0) : place.floor_divide(rule.block);
  }
  const auto ends = offs.to(kLong);
  const auto expert =
      at::searchsorted(ends, place, /*out_int32=*/false, /*right=*/true)
          .clamp_max(offs.size(0) - 1);
  if (rule.block == 0) {
    return expert;
  }
  const auto begin = at::where(
      expert.gt(0), ends.index_select(0, (expert - 1).clamp_min(0)), 0);
  return begin.floor_divide(rule.block) + expert +
      (place - begin).floor_divide(rule.block);
}

// (..., N, K) in squares of `block`: (..., n, block, k, block), padded with zeros.
Tensor squares(const Tensor& x, int64_t block) {
  const int64_t n = x.size(-2), k = x.size(-1);
  const auto padded = at::constant_pad_nd(
      x, {0, (block - k % block) % block, 0, (block - n % block) % block});
  return padded.unflatten(-1, {padded.size(-1) / block, block})
      .unflatten(-3, {padded.size(-2) / block, block});
}

Quantized quantize_square(const Tensor& x, const ScalingRule& rule, ScalarType dtype) {
  const auto blocks = squares(x.to(kFloat).contiguous(), rule.block);
  const auto byte =
      scale_bytes(magnitude_bits(blocks).amax({-3, -1}, /*keepdim=*/true), dtype);
  const auto data = round_data(blocks, byte, dtype).flatten(-2).flatten(-3, -2);
  return {
      data.narrow(-2, 0, x.size(-2)).narrow(-1, 0, x.size(-1)).contiguous(),
      as_scale(byte.squeeze(-1).squeeze(-2).contiguous(), rule)};
}

// Scales (..., R, C) in the order in which tensor cores read them: tiles of 128 x 4, in
// which row r, column c is at (r % 32) * 16 + r / 32 * 4 + c. See SWIZZLE_32_4_4.
Tensor swizzle_scales(const Tensor& scale) {
  const int64_t rows = scale.size(-2), cols = scale.size(-1);
  const auto padded = at::constant_pad_nd(
      scale.view(kByte), {0, (4 - cols % 4) % 4, 0, (128 - rows % 128) % 128});
  // ..., R/128, 4, 32, C/4, 4 becomes ..., R/128, C/4, 32, 4, 4
  const auto ordered = padded.unflatten(-1, {padded.size(-1) / 4, 4})
                           .unflatten(-3, {padded.size(-2) / 128, 4, 32})
                           .transpose(-2, -4)
                           .contiguous();
  const auto flat = ordered.flatten(-5);
  return (scale.dim() == 3 ? flat : flat.view({padded.size(-2), padded.size(-1)}))
      .view(kFloat8_e8m0fnu);
}

// Strides of a tensor without gaps in which `dense` is the dense dimension.
std::vector<c10::SymInt> dense_strides(const std::vector<c10::SymInt>& sizes, int64_t dense) {
  std::vector<c10::SymInt> strides(sizes.size());
  c10::SymInt stride = 1;
  const auto take = [&](int64_t dim) {
    strides[dim] = stride;
    stride = stride * sizes[dim].max(1);
  };
  take(dense);
  for (auto dim = static_cast<int64_t>(sizes.size()) - 1; dim >= 0; --dim) {
    if (dim != dense) {
      take(dim);
    }
  }
  return strides;
}

// data and scale, dense along the scaled dimension; the scale before its swizzle. Of symbolic
// sizes too, which views of a meta tensor would specialize.
Quantized allocate(const Tensor& self, const QuantizeCall& call) {
  const int64_t dense = call.rule.square ? self.dim() - 1 : call.dim;
  const auto empty_with = [&](const std::vector<c10::SymInt>& sizes, ScalarType type) {
    return at::empty_strided_symint(
        sizes, dense_strides(sizes, dense), self.options().dtype(type));
  };
  return {
      empty_with(self.sym_sizes().vec(), call.dtype),
      empty_with(call.scale_sizes, call.rule.scale_dtype)};
}

// With the scales in the order of the call.
std::tuple<Tensor, Tensor> in_order(const Quantized& q, const QuantizeCall& call) {
  const bool swizzled = call.swizzle == SwizzleType::SWIZZLE_32_4_4;
  return {q.data, swizzled ? swizzle_scales(q.scale.movedim(call.dim, -1)) : q.scale};
}

} // namespace

Quantized quantize_composite(
    const Tensor& self,
    const ScalingRule& rule,
    int64_t dim,
    ScalarType dtype,
    const Tensor& offs) {
  if (rule.square) {
    return quantize_square(self, rule, dtype);
  }
  // The scaled dimension is the dense one of both results: what GEMMs of FP8 read.
  auto x = self.movedim(dim, -1).contiguous().to(kFloat);
  const int64_t length = x.size(-1);
  Tensor is_live;
  if (offs.defined()) {
    is_live = at::arange(length, offs.options()).lt(offs.narrow(0, offs.size(0) - 1, 1));
    x = at::where(is_live, x, 0);
  }
  const auto place = scale_places(rule, length, offs, x.options());
  auto sizes = x.sizes().vec();
  sizes.back() = (offs.defined() ? scale_count_of_experts(rule, length, offs.size(0))
                                 : scale_count(rule, length))
                     .expect_int();
  auto amax = at::zeros(sizes, x.options().dtype(kInt));
  if (x.numel() > 0) {
    // Bits of magnitudes are in their order, with infinity and NaN on top.
    amax = amax.scatter_reduce(-1, place.expand(x.sizes()), magnitude_bits(x), "amax");
  }
  const auto byte = scale_bytes(amax, dtype);
  auto spread = byte.index_select(-1, place);
  if (is_live.defined()) {
    // Rows behind the last expert read its scale, which may be NaN.
    spread = at::where(is_live, spread, 0);
  }
  const auto data = round_data(x, spread, dtype);
  return {data.movedim(-1, dim), as_scale(byte, rule).movedim(-1, dim)};
}

Tensor dequantize(
    const Quantized& quantized,
    const ScalingRule& rule,
    int64_t dim,
    ScalarType dtype,
    const Tensor& offs) {
  const auto value = quantized.scale.to(kFloat);
  const auto data = quantized.data.to(kFloat);
  if (rule.square) {
    const auto padded =
        squares(data, rule.block) * value.unsqueeze(-1).unsqueeze(-3);
    return padded.flatten(-2)
        .flatten(-3, -2)
        .narrow(-2, 0, data.size(-2))
        .narrow(-1, 0, data.size(-1))
        .to(dtype);
  }
  const auto place = scale_places(rule, data.size(dim), offs, data.options());
  return (data * value.index_select(dim, place)).to(dtype);
}

} // namespace moe

std::tuple<Tensor, Tensor> moe_quantize_composite(
    const Tensor& self,
    int64_t recipe,
    const std::optional<Tensor>& offs,
    int64_t dim,
    std::optional<ScalarType> dtype,
    int64_t swizzle) {
  const auto call = moe::check_quantize(self, recipe, offs, dim, dtype, swizzle);
  const auto q = moe::quantize_composite(
      self, call.rule, call.dim, call.dtype, offs.value_or(Tensor()));
  return moe::in_order(q, call);
}

std::tuple<Tensor, Tensor> moe_quantize_meta(
    const Tensor& self,
    int64_t recipe,
    const std::optional<Tensor>& offs,
    int64_t dim,
    std::optional<ScalarType> dtype,
    int64_t swizzle) {
  const auto call = moe::check_quantize(self, recipe, offs, dim, dtype, swizzle);
  auto [data, scale] = moe::allocate(self, call);
  if (call.swizzle == moe::SwizzleType::SWIZZLE_32_4_4) {
    auto sizes = call.scale_sizes;
    std::rotate(sizes.begin() + call.dim, sizes.begin() + call.dim + 1, sizes.end());
    scale = at::empty_symint(moe::swizzled_sizes(std::move(sizes)), scale.options());
  }
  return {data, scale};
}

std::tuple<Tensor, Tensor> moe_quantize_cpu(
    const Tensor& self,
    int64_t recipe,
    const std::optional<Tensor>& offs,
    int64_t dim,
    std::optional<ScalarType> dtype,
    int64_t swizzle) {
  const auto call = moe::check_quantize(self, recipe, offs, dim, dtype, swizzle);
  const auto q = moe::allocate(self, call);
  auto x = self;
  int64_t scaled_dim = call.dim;
  // With offs the kernel wants rows first, however they lie.
  const bool has_offs = offs.has_value() && offs->defined();
  if (!call.rule.square && !has_offs && !x.is_contiguous() &&
      x.movedim(call.dim, -1).is_contiguous()) {
    x = x.movedim(call.dim, -1);
    scaled_dim = x.dim() - 1;
  }
  const moe::QuantizeOutputs out{q.data, q.scale, Tensor(), call.dtype};
  moe_quantize_stub(
      kCPU, x.contiguous(), call.rule, scaled_dim, offs.value_or(Tensor()), out);
  return moe::in_order(q, call);
}

} // namespace at::native
