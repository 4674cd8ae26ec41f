#pragma once

// CPU side of _moe_mlp. The entry functions in MoEMLPCPU.cpp validate, check
// values; the kernels behind these stubs only compute.

#include <ATen/native/DispatchStub.h>
#include <ATen/native/MoEMLPUtils.h>

#include <array>

namespace at::native {

// Writes every element of `output` (T, D), and of `preact` (R, G*F) unless that
// is undefined.
using moe_mlp_fn = void (*)(
    const moe::MLPInputs& inputs,
    const moe::ActivationSpec& activation,
    const Tensor& output,
    const Tensor& preact);

// Allocates and writes the gradients that are wanted, in the order of output_mask: those of expert
// weights with the strides of their operands, the others contiguous.
using moe_mlp_backward_fn = void (*)(
    const moe::MLPInputs& inputs,
    const moe::ActivationSpec& activation,
    const Tensor& grad_out,
    const Tensor& preact,
    const std::array<bool, 7>& wanted,
    std::array<Tensor, 7>& grads);

DECLARE_DISPATCH(moe_mlp_fn, moe_mlp_stub)
DECLARE_DISPATCH(moe_mlp_backward_fn, moe_mlp_backward_stub)

// Raises on values of offs, row_slots and slot_rows that the kernels would trust.
void check_mlp_values(const char* op, const moe::MLPInputs& in, int64_t num_rows);

} // namespace at::native
