#pragma once

// What the backward of _moe_mlp and that of its low-precision sibling share: products over the
// rows of an expert, the derivative of the activation, and which gradients are made.

#include <ATen/native/MoEMLPComposite.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#endif

#include <array>
#include <tuple>

namespace at::native::moe_composite {

// (E, P, Q): per expert lhs^T rhs over its rows; lhs (R, P), rhs (R, Q)
Tensor reduce_experts(const Routing& routing, const Tensor& lhs, const Tensor& rhs);

// (E, Q): per expert the sum of its rows (R, Q)
Tensor sum_experts(const Routing& routing, const Tensor& rows);

// grad with the strides that empty_like(operand) has; those of dimensions of size 1
// mean nothing.
Tensor with_strides_of(const Tensor& operand, const Tensor& grad);

// dH (R, G*F) in the dtype of H, from H and the gradient of act(H)
Tensor preact_grad(const Tensor& preact, const Tensor& grad, const ActivationSpec& spec);

// (T, K) from (R), 0 for a slot without a row
Tensor slots_of_rows(const Tensor& values, const Routing& routing);

// Of the operands in the order of output_mask.
using Gradients = std::array<Tensor, 7>;

// The gradients that output_mask asks for, where there is an operand: those that
// compute(wanted, gradients) leaves undefined are 0. The others are empty, but defined, as
// Inductor's C++ wrapper can not unpack an undefined tensor.
template <typename ComputeFn>
auto make_gradients(
    const moe::MLPInputs& in,
    const std::array<bool, 7>& output_mask,
    const ComputeFn& compute) {
  const Gradients operands = {
      in.input, in.w_in, in.w_out, in.topk_weights, in.b_in, in.b_out, in.w_up};
  std::array<bool, 7> wanted{};
  for (size_t i = 0; i < operands.size(); ++i) {
    wanted[i] = output_mask[i] && operands[i].defined();
  }
  Gradients grads;
  compute(wanted, grads);
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!wanted[i]) {
      grads[i] = at::empty({0}, in.input.options());
    } else if (!grads[i].defined()) {
      const bool is_weight = i == 1 || i == 2 || i == 6;
      grads[i] = at::zeros_like(
          operands[i], is_weight ? MemoryFormat::Preserve : MemoryFormat::Contiguous);
    }
  }
  return std::tuple_cat(grads);
}

} // namespace at::native::moe_composite
