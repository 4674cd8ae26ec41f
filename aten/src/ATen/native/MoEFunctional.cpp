// moe_mlp and grouped_mlp of torch.nn.functional: leading dimensions, routing, and whether the
// pre-activations are kept. The arithmetic is _moe_mlp's.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEFunctional.h>
#include <ATen/native/MoEUtils.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_moe_mlp.h>
#include <ATen/ops/_moe_permutation.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/grouped_mlp_native.h>
#include <ATen/ops/moe_mlp_native.h>
#endif

#include <algorithm>
#include <string_view>

namespace at::native {
namespace moe {
namespace {

// (N, C) of (*, C)
Tensor flatten_leading(const Tensor& tensor) {
  return tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor.flatten(0, -2);
}

} // namespace

RoutedTokens route_tokens(
    const char* op,
    const Tensor& input,
    const Tensor& topk_indices,
    const std::optional<Tensor>& topk_weights,
    const Tensor& w_in,
    const std::optional<c10::SymInt>& num_rows) {
  TORCH_CHECK_VALUE(
      input.dim() > 0, op, ": input must have shape (*, D), got a scalar");
  TORCH_CHECK_VALUE(
      topk_indices.dim() > 0 &&
          have_equal_sizes(
              topk_indices.sym_sizes().slice(0, topk_indices.dim() - 1),
              input.sym_sizes().slice(0, input.dim() - 1)),
      op,
      ": topk_indices must have shape (*, K) with the leading dimensions of input ",
      shape_string(input.sym_sizes()),
      ", got ",
      shape_string(topk_indices.sym_sizes()));
  check_rank(op, "w_in", w_in, 3, "(E, gF, D)");
  check_placement(op, "topk_indices", topk_indices, "input", input);

  RoutedTokens routed;
  routed.input = flatten_leading(input);
  if (topk_weights.has_value()) {
    TORCH_CHECK_VALUE(
        have_equal_sizes(topk_weights->sym_sizes(), topk_indices.sym_sizes()),
        op,
        ": topk_weights must have the shape of topk_indices ",
        shape_string(topk_indices.sym_sizes()),
        ", got ",
        shape_string(topk_weights->sym_sizes()));
    const auto weights = flatten_leading(*topk_weights);
    // The op takes weights in float32 or the dtype of input.
    const bool widens =
        weights.is_floating_point() && weights.scalar_type() != input.scalar_type();
    routed.topk_weights = widens ? weights.to(kFloat) : weights;
  }
  std::tie(routed.row_slots, routed.slot_rows, routed.offs, std::ignore) =
      at::_moe_permutation_symint(
          flatten_leading(topk_indices), w_in.sym_size(0), num_rows);
  return routed;
}

bool may_need_grad(std::initializer_list<std::optional<Tensor>> tensors) {
  // Inside a transform of torch.func, tensors of an outer level do not say that they require grad.
  // Under vmap alone, pre-activations are kept without need.
  const bool is_transformed = c10::impl::tls_is_dispatch_key_included(
      c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  return c10::GradMode::is_enabled() &&
      (is_transformed ||
       std::any_of(tensors.begin(), tensors.end(), [](const std::optional<Tensor>& t) {
         return t.has_value() && t->requires_grad();
       }));
}

} // namespace moe

Tensor moe_mlp_symint(
    const Tensor& input,
    const Tensor& topk_indices,
    const std::optional<Tensor>& topk_weights,
    const Tensor& w_in,
    const Tensor& w_out,
    const std::optional<Tensor>& w_up,
    const std::optional<Tensor>& b_in,
    const std::optional<Tensor>& b_out,
    std::string_view activation,
    bool gate_interleaved,
    std::optional<double> alpha,
    std::optional<double> limit,
    std::optional<c10::SymInt> num_rows) {
  const auto routed = moe::route_tokens(
      "moe_mlp", input, topk_indices, topk_weights, w_in, num_rows);
  const auto output = std::get<0>(at::_moe_mlp(
      routed.input,
      w_in,
      w_out,
      routed.offs,
      routed.topk_weights,
      routed.row_slots,
      routed.slot_rows,
      b_in,
      b_out,
      w_up,
      activation,
      gate_interleaved,
      alpha,
      limit,
      moe::may_need_grad({input, w_in, w_out, topk_weights, w_up, b_in, b_out})));
  return at::_unsafe_view_symint(output, input.sym_sizes());
}

Tensor grouped_mlp(
    const Tensor& input,
    const Tensor& w_in,
    const Tensor& w_out,
    const Tensor& offs,
    const std::optional<Tensor>& w_up,
    const std::optional<Tensor>& b_in,
    const std::optional<Tensor>& b_out,
    std::string_view activation,
    bool gate_interleaved,
    std::optional<double> alpha,
    std::optional<double> limit) {
  return std::get<0>(at::_moe_mlp(
      input,
      w_in,
      w_out,
      offs,
      /*topk_weights=*/std::nullopt,
      /*row_slots=*/std::nullopt,
      /*slot_rows=*/std::nullopt,
      b_in,
      b_out,
      w_up,
      activation,
      gate_interleaved,
      alpha,
      limit,
      moe::may_need_grad({input, w_in, w_out, w_up, b_in, b_out})));
}

} // namespace at::native
