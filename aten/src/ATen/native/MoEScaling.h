#pragma once

// The scales that scaled_grouped_mm on CPU and the low-precision MoE ops know. A number is
// `data * scale`; the ops quantise with powers of two, so that a row that is quantised again
// along another axis loses next to nothing. See MoEUtils.h for the notation.

#include <ATen/BlasBackend.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/MoEUtils.h>
#include <c10/util/bit_cast.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#endif

#include <array>
#include <cstdint>

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

// 2^(byte - 127), NaN for kNaNByte.
inline float power_of_two(int32_t byte) {
  return c10::bit_cast<float>(
      byte == 0 ? 0x00400000 : byte == kNaNByte ? 0x7FC00000 : byte << 23);
}

// Numbers of 4 bits, two to a byte, as float32: float4_e2m1fn_x2, or in uint8 int4 plus 8.
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

// (E, rows, columns) bytes of scales (E, padded) in the order of SWIZZLE_32_4_4: of a tile of
// 128 x 4, row r, column c is at (r % 32) * 16 + r / 32 * 4 + c.
inline Tensor without_swizzle(const Tensor& scale, int64_t rows, int64_t columns) {
  const int64_t row_tiles = (rows + 127) / 128, column_tiles = (columns + 3) / 4;
  return scale.contiguous()
      .view(kByte)
      .view({scale.size(0), row_tiles, column_tiles, 32, 4, 4})
      .permute({0, 1, 4, 3, 2, 5})
      .reshape({scale.size(0), row_tiles * 128, column_tiles * 4})
      .narrow(1, 0, rows)
      .narrow(2, 0, columns)
      .contiguous();
}

} // namespace at::native::moe
