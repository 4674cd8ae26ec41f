#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/GroupedMMUtils.h>
#include <c10/util/irange.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_grouped_mm_native.h>
#endif

namespace at::native {

// Grouped matmul on the CPU, one `mm` per group. Unlike on an accelerator the values of
// offs can be read without a synchronization, so that a wrong one is an error and what lies
// beyond the last group is zero.
Tensor _grouped_mm_cpu(
    const Tensor& mat_a,
    const Tensor& mat_b,
    const std::optional<Tensor>& offs,
    const std::optional<Tensor>& bias,
    std::optional<ScalarType> out_dtype) {
  _grouped_mm_validate_inputs(mat_a, mat_b, offs, bias, out_dtype);
  const auto dtype = _resolve_grouped_mm_out_dtype(mat_a, mat_b, out_dtype);
  Tensor out = create_grouped_gemm_output_tensor(mat_a, mat_b, offs, dtype);
  if (offs.has_value()) {
    TORCH_CHECK(
        offs->device().is_cpu(),
        "offs has to be on the same device as mat_a (cpu), got ",
        offs->device());
    const bool a_is_2d = mat_a.dim() == 2;
    const bool b_is_2d = mat_b.dim() == 2;
    const auto length = a_is_2d ? mat_a.size(b_is_2d ? 1 : 0) : mat_b.size(1);
    const Tensor ends = offs->contiguous();
    const auto* end = ends.const_data_ptr<int32_t>();
    int32_t start = 0;
    for (const auto group : c10::irange(ends.numel())) {
      TORCH_CHECK(
          end[group] >= start && end[group] <= length,
          "offs must be non-decreasing with values in [0, ",
          length,
          "], the length of the dimension that it divides, got offs[",
          group,
          "] = ",
          end[group],
          " for a group that starts at ",
          start);
      start = end[group];
    }
    if (a_is_2d != b_is_2d) {
      out.slice(a_is_2d ? 0 : 1, start).zero_();
    }
  }
  _grouped_mm_fallback(mat_a, mat_b, offs, bias, dtype, out);
  return out;
}

} // namespace at::native
