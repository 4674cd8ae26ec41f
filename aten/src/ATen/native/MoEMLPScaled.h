#pragma once

// _moe_mlp_scaled with the kernels of a CPU behind stubs. See MoEMLPScaledUtils.h.

#include <ATen/native/DispatchStub.h>
#include <ATen/native/MoEMLPScaledUtils.h>

namespace at::native {

// Weight-only inference (recipe_a [], every weight as a list of [data, scale]). Writes
// every element of `output` (T, D), and returns false where it has no kernel for these
// formats: then the composite runs.
using moe_mlp_weight_only_fn = bool (*)(const moe::ScaledCall& call, const Tensor& output);

DECLARE_DISPATCH(moe_mlp_weight_only_fn, moe_mlp_weight_only_stub)

} // namespace at::native
