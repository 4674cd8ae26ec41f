#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <string_view>

/*
The autocast rule of _moe_mlp_scaled: tokens are cast to the lower precision. Parameters are
not, which are quantised from whatever they are: a cast before would round twice. Router
weights are computed with in float32, as in _moe_mlp.
*/

namespace at::autocast {
namespace {

template <c10::DeviceType device_type>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> moe_mlp_scaled_autocast(
    const Tensor& input,
    const std::optional<Tensor>& w_in,
    const std::optional<Tensor>& w_out,
    const Tensor& offs,
    const std::optional<Tensor>& topk_weights,
    const std::optional<Tensor>& row_slots,
    const std::optional<Tensor>& slot_rows,
    const std::optional<Tensor>& b_in,
    const std::optional<Tensor>& b_out,
    const std::optional<Tensor>& w_up,
    TensorList input_scaled,
    TensorList w_in_scaled,
    TensorList w_out_scaled,
    TensorList w_up_scaled,
    IntArrayRef recipe_a,
    IntArrayRef recipe_w,
    IntArrayRef swizzle_w,
    std::optional<ScalarType> preact_dtype,
    bool hp_wgrad,
    std::string_view activation,
    bool gate_interleaved,
    std::optional<double> alpha,
    std::optional<double> limit,
    bool compute_preact) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(
      get_autocast_dispatch_key_from_device_type(device_type));
  const auto dtype = get_lower_precision_fp_from_device_type(device_type);
  // Parameters of the other 16-bit dtype go with the tokens, as they can not stay.
  const auto parameter = [&](const std::optional<Tensor>& w) {
    return w.has_value() && w->defined() && w->scalar_type() == kFloat
        ? w
        : cached_cast(dtype, w, device_type);
  };
  return at::_moe_mlp_scaled(
      cached_cast(dtype, input, device_type),
      parameter(w_in),
      parameter(w_out),
      offs,
      cached_cast(kFloat, topk_weights, device_type),
      row_slots,
      slot_rows,
      parameter(b_in),
      parameter(b_out),
      parameter(w_up),
      input_scaled,
      w_in_scaled,
      w_out_scaled,
      w_up_scaled,
      recipe_a,
      recipe_w,
      swizzle_w,
      preact_dtype,
      hp_wgrad,
      activation,
      gate_interleaved,
      alpha,
      limit,
      compute_preact);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, AutocastCPU, m) {
  m.impl("_moe_mlp_scaled", TORCH_FN(moe_mlp_scaled_autocast<c10::DeviceType::CPU>));
}

TORCH_LIBRARY_IMPL(aten, AutocastCUDA, m) {
  m.impl("_moe_mlp_scaled", TORCH_FN(moe_mlp_scaled_autocast<c10::DeviceType::CUDA>));
}

TORCH_LIBRARY_IMPL(aten, AutocastXPU, m) {
  m.impl("_moe_mlp_scaled", TORCH_FN(moe_mlp_scaled_autocast<c10::DeviceType::XPU>));
}

} // namespace at::autocast
