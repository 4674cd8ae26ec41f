// _moe_permutation on CPU: a stable counting sort. See MoEUtils.h for the notation.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEUtils.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_moe_permutation_native.h>
#include <ATen/ops/empty.h>
#endif

#include <algorithm>
#include <vector>

namespace at::native {
namespace {

using PermutationResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Number of slots of each expert. Raises on an id outside [-1, E].
template <typename index_t>
std::vector<int32_t> count_slots(
    const index_t* experts,
    int64_t num_slots,
    int64_t top_k,
    int64_t num_experts) {
  std::vector<int32_t> counts(num_experts, 0);
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    const int64_t expert = experts[slot];
    moe::check_expert_id(expert, num_experts, slot, top_k);
    if (expert >= 0 && expert < num_experts) {
      ++counts[expert];
    }
  }
  return counts;
}

// Stable counting sort: an expert's slots take its rows in ascending slot id.
template <typename index_t>
void permute_slots(
    const Tensor& topk_indices,
    int64_t num_experts,
    int64_t num_rows,
    int64_t row_alignment,
    const PermutationResult& result) {
  const auto* experts = topk_indices.const_data_ptr<index_t>();
  const int64_t num_slots = topk_indices.numel();
  const auto counts =
      count_slots(experts, num_slots, topk_indices.size(1), num_experts);

  const auto& [row_slots, slot_rows, offs, counts_out] = result;
  auto* offs_data = offs.mutable_data_ptr<int32_t>();
  std::copy(
      counts.begin(), counts.end(), counts_out.mutable_data_ptr<int32_t>());
  std::vector<int64_t> next_row(num_experts);
  int64_t start = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    next_row[e] = start;
    const int64_t blocks = (counts[e] + row_alignment - 1) / row_alignment;
    // Clipping the running start keeps the sum small and changes no result: a
    // slot whose row is num_rows or more does not fit anyway.
    start = std::min(start + blocks * row_alignment, num_rows);
    offs_data[e] = static_cast<int32_t>(start);
  }

  auto* row_slots_data = row_slots.mutable_data_ptr<int32_t>();
  auto* slot_rows_data = slot_rows.mutable_data_ptr<int32_t>();
  std::fill_n(row_slots_data, num_rows, -1);
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    const int64_t expert = experts[slot];
    slot_rows_data[slot] = -1;
    if (expert < 0 || expert >= num_experts) {
      continue;
    }
    const int64_t row = next_row[expert]++;
    if (row < num_rows) {
      slot_rows_data[slot] = static_cast<int32_t>(row);
      row_slots_data[row] = static_cast<int32_t>(slot);
    }
  }
}

} // namespace

PermutationResult moe_permutation_cpu(
    const Tensor& topk_indices,
    int64_t num_experts,
    std::optional<int64_t> num_rows,
    int64_t row_alignment) {
  const int64_t rows = moe::check_permutation(
                           topk_indices, num_experts, num_rows, row_alignment)
                           .expect_int();
  const auto options = topk_indices.options().dtype(kInt);
  PermutationResult result(
      at::empty({rows}, options),
      at::empty(topk_indices.sizes(), options),
      at::empty({num_experts}, options),
      at::empty({num_experts}, options));
  const auto indices = topk_indices.contiguous();
  if (indices.scalar_type() == kInt) {
    permute_slots<int32_t>(indices, num_experts, rows, row_alignment, result);
  } else {
    permute_slots<int64_t>(indices, num_experts, rows, row_alignment, result);
  }
  return result;
}

} // namespace at::native
