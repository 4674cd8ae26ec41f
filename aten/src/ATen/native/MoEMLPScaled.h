#pragma once

// _moe_mlp_scaled with the kernels of a CPU behind stubs. See MoEMLPScaledUtils.h.

#include <ATen/native/DispatchStub.h>
#include <ATen/native/MoEMLPScaledUtils.h>

namespace at::native {

// Inference with every weight as a list of [data, scale] and rows in 16 or 32 bits (recipe_a
// []) or int8 (row_dtype()). Writes every element of `output` (T, D), and returns false where it has no kernel for these
// formats: then the composite runs.
using moe_mlp_weight_only_fn = bool (*)(const moe::ScaledCall& call, const Tensor& output);

DECLARE_DISPATCH(moe_mlp_weight_only_fn, moe_mlp_weight_only_stub)

} // namespace at::native
