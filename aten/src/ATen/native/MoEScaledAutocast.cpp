// The autocast rule of _moe_mlp_scaled: tokens are cast to the lower precision. Parameters in
// float32 stay: they are quantised, and a cast before would round twice. Router weights are
// computed with in float32, as in _moe_mlp. The composite ops that call it have a rule for the
// reason that MoEAutocast.cpp gives.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_scaled_moe_mlp_native.h>
#include <ATen/ops/moe_mlp_native.h>
#endif

namespace at::autocast {
namespace {

// Boxed: the rule is about four of the 24 arguments. cached_cast leaves indices as they are.
template <c10::DeviceType device_type>
void moe_mlp_scaled_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(
      get_autocast_dispatch_key_from_device_type(device_type));
  const auto lower = get_lower_precision_fp_from_device_type(device_type);
  const auto& arguments = op.schema().arguments();
  auto* values = &*(stack->end() - static_cast<int64_t>(arguments.size()));
  for (const auto i : c10::irange(arguments.size())) {
    if (!values[i].isTensor()) {
      continue;
    }
    const auto x = values[i].toTensor();
    const auto& name = arguments[i].name();
    // Parameters of the other 16-bit dtype go with the tokens, as they can not stay.
    if (name == "input" || !x.defined() || x.scalar_type() != kFloat) {
      values[i] = cached_cast(name == "topk_weights" ? kFloat : lower, x, device_type);
    }
  }
  op.callBoxed(stack);
}

template <c10::DeviceType device_type>
void register_to(torch::Library& m) {
  constexpr auto* rule = &moe_mlp_scaled_autocast<device_type>;
  m.impl("_moe_mlp_scaled", torch::CppFunction::makeFromBoxedFunction<rule>());
  m.impl("_scaled_moe_mlp", TORCH_FN(native::scaled_moe_mlp_symint));
  m.impl("moe_mlp.recipe", TORCH_FN(native::moe_mlp_recipe_symint));
}

} // namespace

TORCH_LIBRARY_IMPL(aten, AutocastCPU, m) {
  register_to<c10::DeviceType::CPU>(m);
}

TORCH_LIBRARY_IMPL(aten, AutocastCUDA, m) {
  register_to<c10::DeviceType::CUDA>(m);
}

TORCH_LIBRARY_IMPL(aten, AutocastXPU, m) {
  register_to<c10::DeviceType::XPU>(m);
}

} // namespace at::autocast
