#pragma once

// Quantisation with power-of-two scales out of ATen ops: the composite kernel of
// _moe_quantize, and what the low-precision MLP reads back.

#include <ATen/core/Tensor.h>
#include <ATen/native/MoEScaling.h>

namespace at::native::moe {

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

// 2^(byte - 127) in float32 of a float8_e8m0fnu scale; a float32 scale as it is.
Tensor scale_value(const Tensor& scale);

} // namespace at::native::moe
