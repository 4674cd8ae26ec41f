// scaled_moe_mlp of torch.nn.functional, and moe_mlp with a recipe: names of recipes, and the
// steps before _moe_mlp_scaled that MoEFunctional.h has.
#include <ATen/BlasBackend.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEFunctional.h>
#include <ATen/native/MoEUtils.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_moe_mlp_scaled.h>
#include <ATen/ops/_scaled_moe_mlp.h>
#include <ATen/ops/_scaled_moe_mlp_native.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/moe_mlp.h>
#include <ATen/ops/moe_mlp_native.h>
#endif

#include <string_view>
#include <utility>

namespace at::native {
namespace {

using at::blas::ScalingType;

struct Recipe {
  std::string_view name;
  ScalingType activations;
  ScalingType weights;
};

constexpr Recipe kRecipes[] = {
    {"mxfp8", ScalingType::BlockWise1x32, ScalingType::BlockWise1x32},
    {"fp8_blockwise", ScalingType::BlockWise1x128, ScalingType::BlockWise128x128},
    {"fp8_rowwise", ScalingType::RowWise, ScalingType::RowWise},
};

const Recipe& find_recipe(const char* rule, std::string_view name) {
  std::string names;
  for (const auto& recipe : kRecipes) {
    if (recipe.name == name) {
      return recipe;
    }
    names += (names.empty() ? "" : ", ") + std::string(recipe.name);
  }
  TORCH_CHECK_VALUE(false, rule, names, ", got '", name, "'");
}

// The op takes rows and weights of two dtypes, as master weights are; parameters agree.
void check_parameter_dtypes(
    const Tensor& input,
    const Tensor& w_in,
    std::initializer_list<std::pair<const char*, std::optional<Tensor>>> parameters) {
  const auto device = input.device().type();
  if (at::autocast::is_autocast_available(device) &&
      at::autocast::is_autocast_enabled(device)) {
    return;
  }
  for (const auto& [name, parameter] : parameters) {
    TORCH_CHECK_TYPE(
        !parameter.has_value() || parameter->scalar_type() == w_in.scalar_type(),
        "moe_mlp: ", name, " must have the dtype of w_in, ",
        moe::dtype_name(w_in.scalar_type()), ", got ",
        moe::dtype_name(parameter->scalar_type()));
  }
}

} // namespace

Tensor scaled_moe_mlp_symint(
    const Tensor& input,
    const Tensor& topk_indices,
    const std::optional<Tensor>& topk_weights,
    const Tensor& w_in,
    const Tensor& w_out,
    std::string_view recipe,
    TensorList input_scaled,
    TensorList w_in_scaled,
    TensorList w_out_scaled,
    TensorList w_up_scaled,
    const std::optional<Tensor>& w_up,
    const std::optional<Tensor>& b_in,
    const std::optional<Tensor>& b_out,
    std::optional<ScalarType> preact_dtype,
    bool recompute,
    bool hp_wgrad,
    std::string_view activation,
    bool gate_interleaved,
    std::optional<double> alpha,
    std::optional<double> limit,
    std::optional<c10::SymInt> num_rows) {
  const auto& found = find_recipe("scaled_moe_mlp: recipe must be one of ", recipe);
  TORCH_CHECK_VALUE(
      !recompute || preact_dtype == kFloat8_e4m3fn,
      "scaled_moe_mlp: recompute=True keeps no pre-activations, so that preact_dtype has no "
      "meaning, got ",
      preact_dtype.has_value() ? moe::dtype_name(*preact_dtype) : "None");
  check_parameter_dtypes(
      input, w_in, {{"w_out", w_out}, {"w_up", w_up}, {"b_in", b_in}, {"b_out", b_out}});
  const auto routed =
      moe::route_tokens("moe_mlp", input, topk_indices, topk_weights, w_in, num_rows);
  const bool keeps_preact = !recompute &&
      moe::may_need_grad({input, w_in, w_out, topk_weights, w_up, b_in, b_out});
  const auto output = std::get<0>(at::_moe_mlp_scaled(
      routed.input, w_in, w_out, routed.offs, routed.topk_weights, routed.row_slots,
      routed.slot_rows, b_in, b_out, w_up, input_scaled, w_in_scaled, w_out_scaled, w_up_scaled,
      {static_cast<int64_t>(found.activations)}, {static_cast<int64_t>(found.weights)},
      /*swizzle_w=*/{}, preact_dtype, hp_wgrad, activation, gate_interleaved, alpha, limit,
      keeps_preact));
  return at::_unsafe_view_symint(output, input.sym_sizes());
}

Tensor moe_mlp_recipe_symint(
    const Tensor& input,
    const Tensor& topk_indices,
    const std::optional<Tensor>& topk_weights,
    const Tensor& w_in,
    const Tensor& w_out,
    std::optional<std::string_view> recipe,
    const std::optional<Tensor>& w_up,
    const std::optional<Tensor>& b_in,
    const std::optional<Tensor>& b_out,
    std::string_view activation,
    bool gate_interleaved,
    std::optional<double> alpha,
    std::optional<double> limit,
    std::optional<c10::SymInt> num_rows) {
  if (!recipe.has_value()) {
    return at::moe_mlp_symint(
        input, topk_indices, topk_weights, w_in, w_out, w_up, b_in, b_out,
        activation, gate_interleaved, alpha, limit, num_rows);
  }
  find_recipe("moe_mlp: recipe must be None or one of ", *recipe);
  return at::_scaled_moe_mlp_symint(
      input, topk_indices, topk_weights, w_in, w_out, *recipe,
      {}, {}, {}, {}, w_up, b_in, b_out, kFloat8_e4m3fn, /*recompute=*/false, /*hp_wgrad=*/false,
      activation, gate_interleaved, alpha, limit, num_rows);
}

} // namespace at::native
