#pragma once

// _moe_mlp_scaled with the kernels of a CPU behind stubs. See MoEMLPScaledUtils.h.

#include <ATen/native/DispatchStub.h>
#include <ATen/native/MoEMLPScaledUtils.h>

namespace at::native {

// Inference with every weight as a list of [data, scale] and rows in 16 or 32 bits (recipe_a
// []) or int8 (row_dtype()). Writes every element of `output` (T, D), and returns false where
// it has no kernel for these formats: then weights are dequantised first.
using moe_mlp_weight_only_fn = bool (*)(const moe::ScaledCall& call, const Tensor& output);

DECLARE_DISPATCH(moe_mlp_weight_only_fn, moe_mlp_weight_only_stub)

// out (R, N) = rows (R, K) times w_e^T, w (E, N, K), or without `transposed` times w_e,
// w (E, K, N). Both of one type, bfloat16 or float32; rows with a dense second dimension. Rows
// of no expert, and padding behind those of an expert, become zero. The routing is that
// of `inputs`, whose weights are not looked at.
using moe_expert_gemm_fn = void (*)(
    const moe::MLPInputs& inputs,
    const Tensor& rows,
    const Tensor& w,
    bool transposed,
    const Tensor& out);

// grad (E, I, J) = the sum over an expert's rows of left_r^T right_r, rows of padding
// included: they must be zero.
using moe_expert_grad_fn = void (*)(
    const moe::MLPInputs& inputs,
    const Tensor& left,
    const Tensor& right,
    const Tensor& grad);

// A (R, F) = act(H), of H (R, G*F) in bfloat16 or float32, which is out's type, too; with grad
// (R, F) in float32, the gradient of A, dH (R, G*F). All contiguous. A row's bits depend on that
// row only, which those of ATen's activations do not: their vectors end where a thread's part of
// the tensor does.
using moe_activation_fn = void (*)(
    const Tensor& preact,
    const Tensor& grad,
    const moe::ActivationSpec& spec,
    const Tensor& out);

DECLARE_DISPATCH(moe_activation_fn, moe_activation_stub)
DECLARE_DISPATCH(moe_expert_gemm_fn, moe_expert_gemm_stub)
DECLARE_DISPATCH(moe_expert_grad_fn, moe_expert_grad_stub)

} // namespace at::native
