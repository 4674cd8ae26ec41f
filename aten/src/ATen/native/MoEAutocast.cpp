#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/grouped_mlp_native.h>
#include <ATen/ops/moe_mlp_native.h>
#endif

#include <string_view>

// The autocast rule of _moe_mlp: tokens and expert parameters are cast to the lower precision,
// router weights are not. They are few, a router computes them in float32, and the kernels
// multiply them in float32 before they round. Those that come in 16 bits are cast to float32: next
// to operands of the other 16-bit dtype they would be an error. moe_mlp and grouped_mlp call
// _moe_mlp, and have a rule only because torch.export keeps composite ops: run_decompositions
// would decompose them below autocast, where _moe_mlp has no rule any more.

namespace at::autocast {
namespace {

template <c10::DeviceType device_type>
std::tuple<Tensor, Tensor> moe_mlp_autocast(
    const Tensor& input,
    const Tensor& w_in,
    const Tensor& w_out,
    const Tensor& offs,
    const std::optional<Tensor>& topk_weights,
    const std::optional<Tensor>& row_slots,
    const std::optional<Tensor>& slot_rows,
    const std::optional<Tensor>& b_in,
    const std::optional<Tensor>& b_out,
    const std::optional<Tensor>& w_up,
    std::string_view activation,
    bool gate_interleaved,
    std::optional<double> alpha,
    std::optional<double> limit,
    bool compute_preact) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(
      get_autocast_dispatch_key_from_device_type(device_type));
  const auto dtype = get_lower_precision_fp_from_device_type(device_type);
  return at::_moe_mlp(
      cached_cast(dtype, input, device_type),
      cached_cast(dtype, w_in, device_type),
      cached_cast(dtype, w_out, device_type),
      offs,
      cached_cast(kFloat, topk_weights, device_type),
      row_slots,
      slot_rows,
      cached_cast(dtype, b_in, device_type),
      cached_cast(dtype, b_out, device_type),
      cached_cast(dtype, w_up, device_type),
      activation,
      gate_interleaved,
      alpha,
      limit,
      compute_preact);
}

template <c10::DeviceType device_type>
void register_moe_mlp(torch::Library& m) {
  m.impl("_moe_mlp", TORCH_FN(moe_mlp_autocast<device_type>));
  m.impl("moe_mlp", TORCH_FN(native::moe_mlp_symint));
  m.impl("grouped_mlp", TORCH_FN(native::grouped_mlp));
}

} // namespace

TORCH_LIBRARY_IMPL(aten, AutocastCPU, m) {
  register_moe_mlp<c10::DeviceType::CPU>(m);
}

TORCH_LIBRARY_IMPL(aten, AutocastCUDA, m) {
  register_moe_mlp<c10::DeviceType::CUDA>(m);
}

TORCH_LIBRARY_IMPL(aten, AutocastXPU, m) {
  register_moe_mlp<c10::DeviceType::XPU>(m);
}

TORCH_LIBRARY_IMPL(aten, AutocastMPS, m) {
  register_moe_mlp<c10::DeviceType::MPS>(m);
}

} // namespace at::autocast
