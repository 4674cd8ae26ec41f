#pragma once

// What the functionals of the MoE layer do before their op: they flatten leading dimensions, sort
// the slots by expert and tell whether a backward may follow. See MoEUtils.h for the notation.

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <initializer_list>
#include <optional>

namespace at::native::moe {

// Operands of _moe_mlp that come from tokens with leading dimensions and their routing.
struct RoutedTokens {
  Tensor input; // (T, D)
  std::optional<Tensor> topk_weights; // (T, K)
  Tensor row_slots; // (R) int32
  Tensor slot_rows; // (T, K) int32
  Tensor offs; // (E) int32
};

// Checks what flattening would hide; every other rule is in the validators of the ops.
RoutedTokens route_tokens(
    const char* op,
    const Tensor& input,
    const Tensor& topk_indices,
    const std::optional<Tensor>& topk_weights,
    const Tensor& w_in,
    const std::optional<c10::SymInt>& num_rows);

// Whether autograd may ask for the backward of an op on these tensors.
bool may_need_grad(std::initializer_list<std::optional<Tensor>> tensors);

} // namespace at::native::moe
