#pragma once

// CPU side of _moe_topk. The entry functions in MoETopkCPU.cpp validate and
// allocate; the kernels behind these stubs only compute.

#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>

#include <cstdint>

namespace at::native {

// The options of _moe_topk; without groups, one of one.
struct MoETopkSpec {
  bool softmax; // else sigmoid
  bool normalize;
  int64_t num_groups = 1;
  int64_t top_groups = 1;
  double scale;
};

// logits (T, E) of double, float, bfloat16 or half, with contiguous rows; bias
// (E) contiguous and of the dtype of the scores, or undefined. Writes every
// element of indices and weights (T, K).
using moe_topk_fn = void (*)(
    const Tensor& logits,
    const Tensor& bias,
    const MoETopkSpec& spec,
    const Tensor& indices,
    const Tensor& weights);

// logits as above, indices and grad_weights (T, K) contiguous, grad_weights of
// the dtype of the scores. Writes every element of grad_logits (T, E).
using moe_topk_backward_fn = void (*)(
    const Tensor& grad_weights,
    const Tensor& logits,
    const Tensor& indices,
    const MoETopkSpec& spec,
    const Tensor& grad_logits);

DECLARE_DISPATCH(moe_topk_fn, moe_topk_stub)
DECLARE_DISPATCH(moe_topk_backward_fn, moe_topk_backward_stub)

} // namespace at::native
