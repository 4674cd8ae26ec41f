// _moe_topk and its backward on CPU: what is validated as by the composite goes to the kernels
// of cpu/MoETopkKernel.cpp.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/MoETopk.h>
#include <ATen/native/MoETopkCPU.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_moe_topk_backward_native.h>
#include <ATen/ops/_moe_topk_native.h>
#include <ATen/ops/empty.h>
#endif

namespace at::native {

DEFINE_DISPATCH(moe_topk_stub);
DEFINE_DISPATCH(moe_topk_backward_stub);

namespace {

// What the kernels read: no float8, and contiguous rows.
Tensor rows_of(const Tensor& logits) {
  const auto dtype = logits.scalar_type();
  const auto wide =
      c10::isFloat8Type(dtype) ? logits.to(kFloat) : logits;
  return wide.stride(1) == 1 ? wide : wide.contiguous();
}

} // namespace

std::tuple<Tensor, Tensor> moe_topk_cpu(
    const Tensor& logits,
    int64_t k,
    const std::optional<Tensor>& bias,
    std::string_view score,
    bool normalize,
    std::optional<int64_t> num_groups,
    std::optional<int64_t> top_groups,
    double scale) {
  check_moe_topk(logits, k, bias, score, num_groups, top_groups);
  const MoETopkSpec spec{
      score == "softmax",
      normalize,
      num_groups.value_or(1),
      top_groups.value_or(1),
      scale};
  const auto rows = rows_of(logits);
  Tensor shift;
  if (bias.has_value()) {
    shift = bias->to(moe_topk_dtype(logits)).contiguous();
  }
  const auto T = logits.size(0);
  auto indices = at::empty({T, k}, logits.options().dtype(kLong));
  auto weights = at::empty({T, k}, logits.options().dtype(moe_topk_dtype(logits)));
  moe_topk_stub(kCPU, rows, shift, spec, indices, weights);
  return {std::move(indices), std::move(weights)};
}

Tensor moe_topk_backward_cpu(
    const Tensor& grad_weights,
    const Tensor& logits,
    const Tensor& topk_indices,
    std::string_view score,
    bool normalize,
    double scale) {
  check_moe_topk_backward(grad_weights, logits, topk_indices, score);
  const MoETopkSpec spec{score == "softmax", normalize, 1, 1, scale};
  const auto rows = rows_of(logits);
  auto grad = at::empty(logits.sizes(), rows.options());
  moe_topk_backward_stub(
      kCPU,
      grad_weights.to(moe_topk_dtype(logits)).contiguous(),
      rows,
      topk_indices.contiguous(),
      spec,
      grad);
  return grad.to(logits.scalar_type());
}

} // namespace at::native
