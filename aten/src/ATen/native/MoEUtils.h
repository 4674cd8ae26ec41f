#pragma once

// What the validators of the Mixture-of-Experts ops are made of, and that of
// _moe_permutation. Sizes are SymInt, so the CPU, the composite and the Meta
// kernels run the same lines and report the same text.
//
// T tokens, E experts, K experts per token, R routed rows. A slot is one
// (token, k) pair and has the id t * K + k. A row is one place in the
// expert-major order.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

namespace at::native::moe {

// Slot and row ids are int32; a count of them has to fit too. A symbolic size
// is left to the kernel that runs: a bound here would be a guard in every graph
// with dynamic shapes, and export rejects a bound that its Dim does not name.
constexpr int64_t kMaxIndex = std::numeric_limits<int32_t>::max();

inline bool fits_index(const c10::SymInt& count) {
  const auto value = count.maybe_as_int();
  return !value.has_value() || *value <= kMaxIndex;
}

inline std::string shape_string(c10::SymIntArrayRef sizes) {
  std::ostringstream out;
  out << '(';
  for (size_t i = 0; i < sizes.size(); ++i) {
    out << (i == 0 ? "" : ", ") << sizes[i];
  }
  out << ')';
  return out.str();
}

inline std::string_view dtype_name(ScalarType dtype) {
  return c10::getDtypeNames(dtype).first;
}

// `rule` begins the message: "self must have dtype".
inline void check_dtype(
    const char* op,
    std::string_view rule,
    ScalarType dtype,
    std::initializer_list<ScalarType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), dtype) != allowed.end()) {
    return;
  }
  std::ostringstream names;
  for (const auto* it = allowed.begin(); it != allowed.end(); ++it) {
    names << (it == allowed.begin() ? "" : it + 1 == allowed.end() ? " or " : ", ")
          << dtype_name(*it);
  }
  TORCH_CHECK_TYPE(false, op, ": ", rule, " ", names.str(), ", got ", dtype_name(dtype));
}

inline void check_rank(
    const char* op,
    const char* name,
    const Tensor& tensor,
    int64_t rank,
    const char* rule) {
  TORCH_CHECK_VALUE(
      tensor.dim() == rank,
      op,
      ": ",
      name,
      " must have ",
      rank,
      rank == 1 ? " dimension " : " dimensions ",
      rule,
      ", got shape ",
      shape_string(tensor.sym_sizes()));
}

// Sizes that are not known while tracing are compared when the graph runs.
inline bool have_equal_sizes(c10::SymIntArrayRef sizes, c10::SymIntArrayRef expected) {
  return std::equal(
      sizes.begin(),
      sizes.end(),
      expected.begin(),
      expected.end(),
      [](const c10::SymInt& size, const c10::SymInt& other) {
        return size.sym_eq(other).expect_true(__FILE__, __LINE__);
      });
}

inline void check_shape(
    const char* op,
    const char* name,
    const Tensor& tensor,
    const char* rule,
    c10::SymIntArrayRef expected,
    const char* hint = "") {
  TORCH_CHECK_VALUE(
      have_equal_sizes(tensor.sym_sizes(), expected),
      op,
      ": ",
      name,
      " must have shape ",
      rule,
      " = ",
      shape_string(expected),
      ", got ",
      shape_string(tensor.sym_sizes()),
      hint);
}

// Device and layout of `tensor` against those of the op's first tensor.
inline void check_placement(
    const char* op,
    const char* name,
    const Tensor& tensor,
    const char* first_name,
    const Tensor& first) {
  TORCH_CHECK(
      tensor.device() == first.device(),
      op,
      ": all tensors must be on one device, got ",
      first_name,
      " on ",
      first.device(),
      " and ",
      name,
      " on ",
      tensor.device());
  TORCH_CHECK_VALUE(
      tensor.layout() == kStrided,
      op,
      ": ",
      name,
      " must be a strided tensor, got layout ",
      tensor.layout());
}

// Validates the arguments of _moe_permutation and returns R.
inline c10::SymInt check_permutation(
    const Tensor& topk_indices,
    const c10::SymInt& num_experts,
    const std::optional<c10::SymInt>& num_rows,
    const c10::SymInt& row_alignment) {
  constexpr const char* op = "_moe_permutation";
  check_placement(
      op, "topk_indices", topk_indices, "topk_indices", topk_indices);
  check_dtype(op, "topk_indices must have dtype", topk_indices.scalar_type(), {kInt, kLong});
  check_rank(op, "topk_indices", topk_indices, 2, "(T, K)");
  TORCH_CHECK_VALUE(
      num_experts.sym_ge(1).expect_true(__FILE__, __LINE__) &&
          fits_index(num_experts),
      op,
      ": num_experts must be in [1, 2**31), got ",
      num_experts);
  TORCH_CHECK_VALUE(
      row_alignment.sym_ge(1).expect_true(__FILE__, __LINE__) &&
          fits_index(row_alignment),
      op,
      ": row_alignment must be in [1, 2**31), got ",
      row_alignment);
  const c10::SymInt num_slots = topk_indices.sym_numel();
  TORCH_CHECK_VALUE(
      fits_index(num_slots),
      op,
      ": topk_indices must have fewer than 2**31 elements, got shape ",
      shape_string(topk_indices.sym_sizes()));
  if (num_rows.has_value()) {
    TORCH_CHECK_VALUE(
        num_rows->sym_ge(0).expect_true(__FILE__, __LINE__) &&
            fits_index(*num_rows),
        op,
        ": num_rows must be in [0, 2**31), got ",
        *num_rows);
    return *num_rows;
  }
  // Each expert that has a slot wastes at most row_alignment - 1 rows.
  const c10::SymInt bound =
      num_slots + num_experts.min(num_slots) * (row_alignment - 1);
  TORCH_CHECK_VALUE(
      fits_index(bound),
      op,
      ": the number of rows T*K + min(E, T*K) * (row_alignment - 1) must be"
      " less than 2**31, got ",
      bound,
      "; pass num_rows");
  return bound;
}

// Raises on an id outside [-1, E]; `slot` says where it stands.
inline void check_expert_id(int64_t id, int64_t num_experts, int64_t slot, int64_t top_k) {
  TORCH_CHECK_INDEX(
      id >= -1 && id <= num_experts,
      "_moe_permutation: topk_indices must be in [-1, ",
      num_experts,
      "] (-1 and num_experts mean no expert), got ",
      id,
      " at [",
      slot / top_k,
      ", ",
      slot % top_k,
      "]");
}

} // namespace at::native::moe
