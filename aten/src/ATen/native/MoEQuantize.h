#pragma once

// _moe_quantize: its validator, its composite and CPU kernels, and what the low-precision MLP
// reads back.

#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/MoEScaling.h>

#include <optional>
#include <vector>

namespace at::native {
namespace moe {

// The arguments of _moe_quantize, checked.
struct QuantizeCall {
  const ScalingRule& rule;
  int64_t dim;
  ScalarType dtype;
  SwizzleType swizzle;
  std::vector<c10::SymInt> scale_sizes; // before the swizzle
};

inline QuantizeCall check_quantize(
    const Tensor& self,
    int64_t recipe,
    const std::optional<Tensor>& offs,
    int64_t dim,
    std::optional<ScalarType> dtype,
    int64_t swizzle) {
  constexpr const char* op = "_moe_quantize";
  check_placement(op, "self", self, "self", self);
  check_dtype(op, "self must have dtype", self.scalar_type(), {kFloat, kBFloat16, kHalf});
  const auto& rule = scaling_rule(op, "recipe", recipe);
  const int64_t rank = self.dim();
  TORCH_CHECK_VALUE(
      rank >= (rule.square ? 2 : 1),
      op, ": self must have at least ", rule.square ? "2 dimensions" : "1 dimension",
      " with recipe ", rule.name, ", got shape ", shape_string(self.sym_sizes()));
  TORCH_CHECK_INDEX(
      dim >= -rank && dim < rank,
      op, ": dim must be in [", -rank, ", ", rank, "), got ", dim);
  dim += dim < 0 ? rank : 0;
  const auto data_type = dtype.value_or(kFloat8_e4m3fn);
  check_dtype(op, "dtype must be", data_type, {kFloat8_e4m3fn, kChar});
  TORCH_CHECK_VALUE(
      swizzle == static_cast<int64_t>(SwizzleType::NO_SWIZZLE) ||
          (swizzle == static_cast<int64_t>(SwizzleType::SWIZZLE_32_4_4) &&
           rule.type == ScalingType::BlockWise1x32 && (rank == 2 || rank == 3)),
      op, ": swizzle must be 0 (NO_SWIZZLE) or, for recipe BlockWise1x32 and 2 or 3 dimensions,"
      " 1 (SWIZZLE_32_4_4), got ", swizzle, " with recipe ", rule.name, " and shape ",
      shape_string(self.sym_sizes()));
  std::vector<c10::SymInt> sizes = self.sym_sizes().vec();
  if (offs.has_value() && offs->defined()) {
    check_placement(op, "offs", *offs, "self", self);
    check_dtype(op, "offs must have dtype", offs->scalar_type(), {kInt});
    check_rank(op, "offs", *offs, 1, "(E)");
    TORCH_CHECK_VALUE(
        offs->sym_size(0).sym_ge(1).expect_true(__FILE__, __LINE__),
        op, ": offs must have at least 1 element, got shape (0)");
    TORCH_CHECK_VALUE(
        rank == 2 && dim == 0 && !rule.square,
        op, ": offs needs a self of 2 dimensions, dim=0 and a recipe other than"
        " BlockWise128x128, got shape ", shape_string(self.sym_sizes()), ", dim=", dim,
        " and recipe ", rule.name);
    TORCH_CHECK_VALUE(swizzle == 0, op, ": swizzle must be 0 with offs, got ", swizzle);
    sizes[0] = scale_count_of_experts(rule, sizes[0], offs->sym_size(0));
  } else if (rule.square) {
    sizes[rank - 2] = scale_count(rule, sizes[rank - 2]);
    sizes[rank - 1] = scale_count(rule, sizes[rank - 1]);
  } else {
    sizes[dim] = scale_count(rule, sizes[dim]);
  }
  return {
      rule, dim, data_type, static_cast<SwizzleType>(swizzle), std::move(sizes)};
}

// Sizes of the scales, of shape (..., R, C) with the scaled dimension last, in the order
// of SWIZZLE_32_4_4: R is padded to 128 and C to 4; of 3 dimensions, the last two are one.
inline std::vector<c10::SymInt> swizzled_sizes(std::vector<c10::SymInt> sizes) {
  const size_t rank = sizes.size();
  sizes[rank - 2] = (sizes[rank - 2] + 127) / 128 * 128;
  sizes[rank - 1] = (sizes[rank - 1] + 3) / 4 * 4;
  if (rank == 3) {
    sizes[1] = sizes[1] * sizes[2];
    sizes.pop_back();
  }
  return sizes;
}

struct Quantized {
  Tensor data;
  Tensor scale;
};

// data and scale of x along dim (any, for a square rule). With offs (E) the blocks of
// dim 0 begin at the first rows of the experts; what lies behind the last expert is 0.
Quantized quantize_composite(
    const Tensor& x,
    const ScalingRule& rule,
    int64_t dim,
    ScalarType dtype,
    const Tensor& offs);

// The numbers that data and scale stand for, exact in bfloat16 and wider types (where
// they are not subnormal).
Tensor dequantize(
    const Quantized& quantized,
    const ScalingRule& rule,
    int64_t dim,
    ScalarType dtype,
    const Tensor& offs = {});

// What the CPU kernel makes of a contiguous x: of those that are defined, codes and scales,
// dense along dim, and the numbers that they stand for, contiguous, in bfloat16 or float32.
struct QuantizeOutputs {
  Tensor data;
  Tensor scale;
  Tensor values;
  ScalarType dtype;
};

} // namespace moe

using moe_quantize_fn = void (*)(
    const Tensor& x,
    const moe::ScalingRule& rule,
    int64_t dim,
    const Tensor& offs,
    const moe::QuantizeOutputs& out);

// dequantize on CPU into values (bfloat16 or float32); all contiguous, scaled along the last
// dimension.
using moe_dequantize_fn = void (*)(
    const moe::Quantized& quantized,
    const moe::ScalingRule& rule,
    const Tensor& values);

DECLARE_DISPATCH(moe_quantize_fn, moe_quantize_stub)
DECLARE_DISPATCH(moe_dequantize_fn, moe_dequantize_stub)

} // namespace at::native
