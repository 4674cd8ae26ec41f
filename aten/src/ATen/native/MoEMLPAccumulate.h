#pragma once

// The backward of _moe_mlp on CPU that adds weight gradients to tensors that are there,
// for the derivative in torch/csrc/autograd/functions/moe_mlp.h.

#include <ATen/native/MoEMLPUtils.h>

#include <array>
#include <tuple>

namespace at::native {

// _moe_mlp_backward. Those of `accumulate` (w_in, w_out, w_up) that are defined are added
// to and returned in place of new gradients: each sum is rounded to the dtype before, as
// `+=` of the new gradient would have it.
TORCH_API std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
moe_mlp_backward_accumulate(
    const Tensor& grad_out,
    const moe::MLPInputs& inputs,
    const Tensor& preact,
    std::array<bool, 7> output_mask,
    std::string_view activation,
    bool gate_interleaved,
    std::optional<double> alpha,
    std::optional<double> limit,
    const std::array<Tensor, 3>& accumulate);

} // namespace at::native
