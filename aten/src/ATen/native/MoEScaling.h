#pragma once

// What scales the low-precision MoE ops know, and the validator of _moe_quantize. A
// number is `data * scale`; the scale is a power of two, so that a row that is quantised
// again along another axis loses next to nothing. See MoEUtils.h for the notation.

#include <ATen/BlasBackend.h>
#include <ATen/native/MoEUtils.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace at::native::moe {

// The codes of `recipe`, `recipe_a` and `recipe_w`, and of swizzles: those of scaled_mm. In
// Python they are torch.nn.functional.ScalingType and SwizzleType.
using at::blas::ScalingType;
using at::blas::SwizzleType;

// What one scale covers.
struct ScalingRule {
  ScalingType type;
  const char* name;
  // Neighbours along the scaled dimension; 0: all of them.
  int64_t block;
  // As many neighbours along the last two dimensions instead.
  bool square;
  // float8_e8m0fnu: the biased exponent as a byte. float32: the power of two itself.
  ScalarType scale_dtype;
};

constexpr std::array<ScalingRule, 4> kScalingRules = {{
    {ScalingType::RowWise, "RowWise", 0, false, kFloat},
    {ScalingType::BlockWise1x32, "BlockWise1x32", 32, false, kFloat8_e8m0fnu},
    {ScalingType::BlockWise1x128, "BlockWise1x128", 128, false, kFloat},
    {ScalingType::BlockWise128x128, "BlockWise128x128", 128, true, kFloat},
}};

inline std::string scaling_names() {
  std::ostringstream names;
  for (const auto& rule : kScalingRules) {
    names << (names.tellp() > 0 ? ", " : "") << static_cast<int64_t>(rule.type)
          << " (" << rule.name << ')';
  }
  return names.str();
}

inline const ScalingRule& scaling_rule(
    const char* op,
    const char* name,
    int64_t code) {
  for (const auto& rule : kScalingRules) {
    if (static_cast<int64_t>(rule.type) == code) {
      return rule;
    }
  }
  TORCH_CHECK_VALUE(
      false, op, ": ", name, " must be one of ", scaling_names(), ", got ", code);
}

// Scales along a dimension of so many elements.
inline c10::SymInt scale_count(
    const ScalingRule& rule,
    const c10::SymInt& size) {
  return rule.block == 0 ? c10::SymInt(1)
                         : (size + (rule.block - 1)) / rule.block;
}

// Scales along the rows of E experts. Blocks begin at the first row of their expert, so
// that alignment changes no bit: block j of expert e, whose rows begin at b, is
// b / block + e + j. Not all of so many are used.
inline c10::SymInt scale_count_of_experts(
    const ScalingRule& rule,
    const c10::SymInt& rows,
    const c10::SymInt& num_experts) {
  return (rule.block == 0 ? c10::SymInt(0) : rows / rule.block) + num_experts;
}

constexpr int32_t kNaNByte = 255; // of a block with an infinity or a NaN
constexpr int32_t kInfinityBits = 0x7F800000;

// What scale_byte adds to the bits of a largest magnitude: a step of the exponent counts from
// the largest number of the type on, and the bias is 127.
constexpr int32_t scale_byte_offset(ScalarType dtype) {
  return 0x3FFFFFFF - (dtype == kChar ? 0x42FE0000 : 0x43E00000); // bits of 127 and 448
}

// The byte of a block whose largest magnitude has these bits of float32: e + 127 with
// e = ceil(log2(magnitude / largest number)), at least -127.
constexpr int32_t scale_byte(int32_t amax_bits, int32_t offset) {
  const int32_t byte = (amax_bits + offset) >> 23;
  return amax_bits >= kInfinityBits ? kNaNByte : byte < 0 ? 0 : byte;
}

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
  const auto type = self.scalar_type();
  TORCH_CHECK_TYPE(
      type == kFloat || type == kBFloat16 || type == kHalf,
      op,
      ": self must have dtype float32, bfloat16 or float16, got ",
      dtype_name(type));
  const auto& rule = scaling_rule(op, "recipe", recipe);
  const int64_t rank = self.dim();
  TORCH_CHECK_VALUE(
      rank >= (rule.square ? 2 : 1),
      op,
      ": self must have at least ",
      rule.square ? "2 dimensions" : "1 dimension",
      " with recipe ",
      rule.name,
      ", got shape ",
      shape_string(self.sym_sizes()));
  TORCH_CHECK_INDEX(
      dim >= -rank && dim < rank,
      op,
      ": dim must be in [",
      -rank,
      ", ",
      rank,
      "), got ",
      dim);
  dim += dim < 0 ? rank : 0;
  const auto data_type = dtype.value_or(kFloat8_e4m3fn);
  TORCH_CHECK_TYPE(
      data_type == kFloat8_e4m3fn || data_type == kChar,
      op,
      ": dtype must be float8_e4m3fn or int8, got ",
      dtype_name(data_type));
  TORCH_CHECK_VALUE(
      swizzle == static_cast<int64_t>(SwizzleType::NO_SWIZZLE) ||
          (swizzle == static_cast<int64_t>(SwizzleType::SWIZZLE_32_4_4) &&
           rule.type == ScalingType::BlockWise1x32 && (rank == 2 || rank == 3)),
      op,
      ": swizzle must be 0 (NO_SWIZZLE) or, for recipe BlockWise1x32 and 2 or 3 dimensions,"
      " 1 (SWIZZLE_32_4_4), got ",
      swizzle,
      " with recipe ",
      rule.name,
      " and shape ",
      shape_string(self.sym_sizes()));
  std::vector<c10::SymInt> sizes = self.sym_sizes().vec();
  if (offs.has_value() && offs->defined()) {
    check_placement(op, "offs", *offs, "self", self);
    TORCH_CHECK_TYPE(
        offs->scalar_type() == kInt,
        op,
        ": offs must have dtype int32, got ",
        dtype_name(offs->scalar_type()));
    check_rank(op, "offs", *offs, 1, "(E)");
    TORCH_CHECK_VALUE(
        offs->sym_size(0).sym_ge(1).expect_true(__FILE__, __LINE__),
        op,
        ": offs must have at least 1 element, got shape (0)");
    TORCH_CHECK_VALUE(
        rank == 2 && dim == 0 && !rule.square,
        op,
        ": offs needs a self of 2 dimensions, dim=0 and a recipe other than"
        " BlockWise128x128, got shape ",
        shape_string(self.sym_sizes()),
        ", dim=",
        dim,
        " and recipe ",
        rule.name);
    TORCH_CHECK_VALUE(
        swizzle == 0, op, ": swizzle must be 0 with offs, got ", swizzle);
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

} // namespace at::native::moe
