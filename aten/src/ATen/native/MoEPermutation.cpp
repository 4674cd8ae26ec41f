// _moe_permutation: from each token's expert ids to the expert-major row order
// that grouped matmuls want, and back. See MoEUtils.h for the notation.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEUtils.h>
#include <c10/util/irange.h>

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

namespace at::native {
namespace {

using PermutationResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Where the device has assertions, they check the ids without a sync. Elsewhere the ids are read on
// the host, so that the error names the id.
void check_ids(const Tensor& topk_indices, int64_t num_experts) {
  if (topk_indices.is_cuda() || topk_indices.is_mps() || topk_indices.is_xpu()) {
    at::_assert_async(
        topk_indices.ge(-1).logical_and(topk_indices.le(num_experts)).all(),
        "_moe_permutation: topk_indices must be in [-1, num_experts] (-1 and"
        " num_experts mean no expert)");
    return;
  }
  const auto ids = topk_indices.to(kCPU, kLong).contiguous();
  const auto* data = ids.const_data_ptr<int64_t>();
  for (const auto slot : c10::irange(ids.numel())) {
    moe::check_expert_id(data[slot], num_experts, slot, ids.size(1));
  }
}

} // namespace

// No shape depends on data. Nothing syncs with the host but check_ids, on some devices.
PermutationResult moe_permutation_composite(
    const Tensor& topk_indices,
    int64_t num_experts,
    std::optional<int64_t> num_rows,
    int64_t row_alignment) {
  const int64_t rows = moe::check_permutation(
                           topk_indices, num_experts, num_rows, row_alignment)
                           .expect_int();
  const int64_t num_slots = topk_indices.numel();
  const auto long_options = topk_indices.options().dtype(kLong);

  check_ids(topk_indices, num_experts);
  const auto experts = topk_indices.reshape({-1}).to(kLong);
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
