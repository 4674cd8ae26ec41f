#pragma once

// Quantisation with power-of-two scales out of ATen ops: the composite kernel of
// _moe_quantize, and what the low-precision MLP reads back.

#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/MoEScaling.h>

namespace at::native {
namespace moe {

struct Quantized {
  Tensor data;
  Tensor scale;
};

// data and scale of x along dim (any, for a square rule). With offs (E) the blocks of
// dim 0 begin at the first rows of the experts; what lies behind the last expert is 0.
Quantized quantize_composite(
    const Tensor& x,
    const ScalingRule& rule,
    int64_t dim,
    ScalarType dtype,
    const Tensor& offs);

// The numbers that data and scale stand for, exact in bfloat16 and wider types (where
// they are not subnormal).
Tensor dequantize(
    const Quantized& quantized,
    const ScalingRule& rule,
    int64_t dim,
    ScalarType dtype,
    const Tensor& offs = {});

// What the CPU kernel makes of a contiguous x: of those that are defined, codes and scales,
// dense along dim, and the numbers that they stand for, contiguous, in bfloat16 or float32.
struct QuantizeOutputs {
  Tensor data;
  Tensor scale;
  Tensor values;
  ScalarType dtype;
};

} // namespace moe

using moe_quantize_fn = void (*)(
    const Tensor& x,
    const moe::ScalingRule& rule,
    int64_t dim,
    const Tensor& offs,
    const moe::QuantizeOutputs& out);

// dequantize on CPU into values (bfloat16 or float32); all contiguous, scaled along the last
// dimension.
using moe_dequantize_fn = void (*)(
    const moe::Quantized& quantized,
    const moe::ScalingRule& rule,
    const Tensor& values);

DECLARE_DISPATCH(moe_quantize_fn, moe_quantize_stub)
DECLARE_DISPATCH(moe_dequantize_fn, moe_dequantize_stub)

} // namespace at::native
