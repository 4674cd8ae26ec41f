#pragma once

// What every kernel of _moe_topk has to keep to.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace at::native {

// Against a sum of 0: all K scores may have underflowed.
constexpr double kMoETopkSumGuard = 1e-20;

// Of the scores and the weights.
inline ScalarType moe_topk_dtype(const Tensor& logits) {
  return logits.scalar_type() == kDouble ? kDouble : kFloat;
}

void check_moe_topk(
    const Tensor& logits,
    int64_t k,
    const std::optional<Tensor>& bias,
    std::string_view score,
    std::optional<int64_t> num_groups,
    std::optional<int64_t> top_groups);

void check_moe_topk_backward(
    const Tensor& grad_weights,
    const Tensor& logits,
    const Tensor& topk_indices,
    std::string_view score);

} // namespace at::native
