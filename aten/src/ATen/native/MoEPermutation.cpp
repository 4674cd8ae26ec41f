// _moe_permutation: from each token's expert ids to the expert-major row order
// that grouped matmuls want, and back. See MoEUtils.h for the notation.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/MoEUtils.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/_moe_permutation_native.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#endif

#include <algorithm>
#include <vector>

namespace at::native {
namespace {

using PermutationResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

int64_t check_permutation_concrete(
    const Tensor& topk_indices,
    int64_t num_experts,
    std::optional<int64_t> num_rows,
    int64_t row_alignment) {
  const auto rows = num_rows.has_value() ? std::optional<c10::SymInt>(*num_rows)
                                         : std::nullopt;
  return moe::check_permutation(topk_indices, num_experts, rows, row_alignment)
      .expect_int();
}

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
    TORCH_CHECK_INDEX(
        expert >= -1 && expert <= num_experts,
        "_moe_permutation: topk_indices must be in [-1, ",
        num_experts,
        "] (-1 and num_experts mean no expert), got ",
        expert,
        " at [",
        slot / top_k,
        ", ",
        slot % top_k,
        "]");
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

// Where the backend has an assertion that runs on the device.
void check_ids_on_device(const Tensor& experts, int64_t num_experts) {
  static const auto assertion = c10::Dispatcher::singleton().findSchemaOrThrow(
      "aten::_assert_async", "msg");
  const auto backend = c10::highestPriorityBackendTypeId(experts.key_set());
  if (assertion.hasComputedKernelForDispatchKey(backend)) {
    at::_assert_async(
        experts.ge(-1).logical_and(experts.le(num_experts)).all(),
        "_moe_permutation: topk_indices must be in [-1, num_experts] (-1 and"
        " num_experts mean no expert)");
  }
}

} // namespace

PermutationResult moe_permutation_cpu(
    const Tensor& topk_indices,
    int64_t num_experts,
    std::optional<int64_t> num_rows,
    int64_t row_alignment) {
  const int64_t rows = check_permutation_concrete(
      topk_indices, num_experts, num_rows, row_alignment);
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

// Any backend, with neither a host sync nor a data-dependent shape: the ids can
// only be checked on the device.
PermutationResult moe_permutation_composite(
    const Tensor& topk_indices,
    int64_t num_experts,
    std::optional<int64_t> num_rows,
    int64_t row_alignment) {
  const int64_t rows = check_permutation_concrete(
      topk_indices, num_experts, num_rows, row_alignment);
  const int64_t num_slots = topk_indices.numel();
  const auto long_options = topk_indices.options().dtype(kLong);

  const auto experts = topk_indices.reshape({-1}).to(kLong);
  check_ids_on_device(experts, num_experts);
  const auto [sorted, order] = at::sort(
      at::where(experts.lt(0), num_experts, experts),
      /*stable=*/std::optional<bool>(true),
      /*dim=*/0,
      /*descending=*/false);

  const auto ends = at::searchsorted(
      sorted,
      at::arange(num_experts, long_options),
      /*out_int32=*/false,
      /*right=*/true);
  const auto counts = ends.diff(1, 0, at::zeros({1}, long_options));
  const auto aligned =
      (counts + (row_alignment - 1)).floor_divide(row_alignment) *
      row_alignment;
  const auto stops = aligned.cumsum(0);

  // The slot at sorted position p is number p - (ends[e] - counts[e]) of its
  // expert e. Sorted id E, "no expert", reads a filler that is never used.
  const auto expert = sorted.clamp_max(num_experts - 1);
  const auto first = (stops - aligned - ends + counts).index_select(0, expert);
  const auto row = at::arange(num_slots, long_options) + first;
  const auto fits = sorted.lt(num_experts).logical_and(row.lt(rows));

  // Row `rows` collects the slots that do not fit and is cut off.
  auto row_slots = at::full({rows + 1}, -1, long_options);
  row_slots.scatter_(0, at::where(fits, row, rows), order);
  auto slot_rows = at::empty({num_slots}, long_options);
  slot_rows.scatter_(0, order, at::where(fits, row, -1));
  return PermutationResult(
      row_slots.narrow(0, 0, rows).to(kInt),
      slot_rows.view(topk_indices.sizes()).to(kInt),
      stops.clamp_max(rows).to(kInt),
      counts.to(kInt));
}

PermutationResult moe_permutation_meta_symint(
    const Tensor& topk_indices,
    c10::SymInt num_experts,
    std::optional<c10::SymInt> num_rows,
    c10::SymInt row_alignment) {
  const auto rows = moe::check_permutation(
      topk_indices, num_experts, num_rows, row_alignment);
  const auto options = topk_indices.options().dtype(kInt);
  return PermutationResult(
      at::empty_symint({rows}, options),
      at::empty_symint(topk_indices.sym_sizes(), options),
      at::empty_symint({num_experts}, options),
      at::empty_symint({num_experts}, options));
}

} // namespace at::native
