#pragma once

// CPU side of _moe_mlp. The entry functions in MoEMLPCPU.cpp validate, check
// values and allocate; the kernels behind these stubs only compute.

#include <ATen/native/DispatchStub.h>
#include <ATen/native/MoEMLPUtils.h>

namespace at::native {

// Gradients in the order of output_mask; one that is not wanted is undefined.
struct MoEMLPGrads {
  Tensor input; // (T, D), contiguous
  // The largest ones by far: the kernel allocates those that are wanted, when
  // buffers that it no longer needs are gone.
  Tensor w_in; // shape and strides of w_in
  Tensor w_out; // (E, D, F), strides of w_out
  Tensor w_up; // (E, F, D), strides of w_up
  bool wants_w_in = false;
  bool wants_w_out = false;
  bool wants_w_up = false;
  Tensor topk_weights; // (T, K), contiguous, zero-filled
  Tensor b_in; // (E, G*F), contiguous
  Tensor b_out; // (E, D), contiguous
};

// Writes every element of `output` (T, D), and of `preact` (R, G*F) unless that
// is undefined.
using moe_mlp_fn = void (*)(
    const moe::MLPInputs& inputs,
    const moe::ActivationSpec& activation,
    const Tensor& output,
    const Tensor& preact);

using moe_mlp_backward_fn = void (*)(
    const moe::MLPInputs& inputs,
    const moe::ActivationSpec& activation,
    const Tensor& grad_out,
    const Tensor& preact,
    MoEMLPGrads& grads);

DECLARE_DISPATCH(moe_mlp_fn, moe_mlp_stub)
DECLARE_DISPATCH(moe_mlp_backward_fn, moe_mlp_backward_stub)

// Raises on values of offs, row_slots and slot_rows that the kernels would trust.
void check_mlp_values(const char* op, const moe::MLPInputs& in, int64_t num_rows);

} // namespace at::native
