#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/GroupedMMUtils.h>
#include <c10/util/irange.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_grouped_mm_native.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>
#endif

namespace at::native {

namespace {

// The rules of _grouped_mm_validate_inputs, less those that only TMA and the
// GPU kernels need: any strides are accepted, and float64.
void check_grouped_mm_cpu_inputs(
    const Tensor& mat_a,
    const Tensor& mat_b,
    const std::optional<Tensor>& offs,
    const std::optional<Tensor>& bias) {
  const auto dtype = mat_a.scalar_type();
  TORCH_CHECK(
      dtype == kDouble || dtype == kFloat || dtype == kBFloat16 ||
          dtype == kHalf,
      "Expected mat_a to be Float64, Float32, BFloat16 or Float16 matrix, got ",
      dtype);
  TORCH_CHECK(
      mat_b.scalar_type() == dtype,
      "Expected mat_a and mat_b to have the same dtype, got ",
      dtype,
      " and ",
      mat_b.scalar_type());
  TORCH_CHECK(
      mat_a.dim() == 2 || mat_a.dim() == 3,
      "mat_a has to be 2 or 3d, got ",
      mat_a.dim(),
      "d");
  TORCH_CHECK(
      mat_b.dim() == 2 || mat_b.dim() == 3,
      "mat_b has to be 2 or 3d, got ",
      mat_b.dim(),
      "d");
  const bool ragged = mat_a.dim() == 2 || mat_b.dim() == 2;
  TORCH_CHECK(
      mat_a.size(-1) == mat_b.size(-2),
      "contraction dimension of mat_a and mat_b must match, got ",
      mat_a.size(-1),
      " and ",
      mat_b.size(-2));
  TORCH_CHECK(
      offs.has_value() == ragged,
      "Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d");
  if (offs.has_value()) {
    TORCH_CHECK(offs->dim() == 1, "offs has to be 1D, got ", offs->dim(), "D");
    TORCH_CHECK(
        offs->scalar_type() == kInt,
        "Offsets have to be int32, got ",
        offs->scalar_type());
    TORCH_CHECK(
        offs->device().is_cpu(),
        "offs has to be on the same device as mat_a (cpu), got ",
        offs->device());
  }
  TORCH_CHECK(!bias.has_value(), "Bias not supported yet");
}

// The ends of the groups. Unlike on an accelerator the values can be read here
// without a synchronization, so that a wrong one is an error.
ArrayRef<int32_t> checked_group_ends(const Tensor& offs, int64_t length) {
  ArrayRef<int32_t> ends(offs.const_data_ptr<int32_t>(), offs.numel());
  int32_t start = 0;
  for (const auto group : c10::irange(ends.size())) {
    TORCH_CHECK(
        ends[group] >= start && ends[group] <= length,
        "offs must be non-decreasing with values in [0, ",
        length,
        "], the length of the dimension that it divides, got offs[",
        group,
        "] = ",
        ends[group],
        " for a group that starts at ",
        start);
    start = ends[group];
  }
  return ends;
}

} // namespace

// Grouped matmul on the CPU, one `mm` per group. `offs` divides
//   2d x 3d: the rows of mat_a and of the output; rows beyond offs[-1] are zero
//   3d x 2d: the columns of mat_b and of the output; likewise
//   2d x 2d: the summed dimension; summands beyond offs[-1] are ignored
// and 3d x 3d is `bmm`.
Tensor _grouped_mm_cpu(
    const Tensor& mat_a,
    const Tensor& mat_b,
    const std::optional<Tensor>& offs,
    const std::optional<Tensor>& bias,
    std::optional<ScalarType> out_dtype) {
  check_grouped_mm_cpu_inputs(mat_a, mat_b, offs, bias);
  const auto dtype = _resolve_grouped_mm_out_dtype(mat_a, mat_b, out_dtype);
  Tensor out = create_grouped_gemm_output_tensor(mat_a, mat_b, offs, dtype);
  if (!offs.has_value()) {
    at::bmm_out(out, mat_a, mat_b);
    return out;
  }

  const bool a_is_2d = mat_a.dim() == 2;
  const bool b_is_2d = mat_b.dim() == 2;
  const int64_t length = !b_is_2d ? mat_a.size(0)
      : !a_is_2d                  ? mat_b.size(1)
                                  : mat_a.size(1);
  const Tensor contiguous_offs = offs->contiguous();
  const auto ends = checked_group_ends(contiguous_offs, length);
  int64_t start = 0;
  for (const auto group : c10::irange(static_cast<int64_t>(ends.size()))) {
    const int64_t end = ends[group];
    if (!b_is_2d) {
      Tensor out_rows = out.slice(0, start, end);
      at::mm_out(out_rows, mat_a.slice(0, start, end), mat_b.select(0, group));
    } else if (!a_is_2d) {
      Tensor out_columns = out.slice(1, start, end);
      at::mm_out(
          out_columns, mat_a.select(0, group), mat_b.slice(1, start, end));
    } else {
      Tensor out_group = out.select(0, group);
      at::mm_out(
          out_group, mat_a.slice(1, start, end), mat_b.slice(0, start, end));
    }
    start = end;
  }
  if (a_is_2d != b_is_2d) {
    out.slice(a_is_2d ? 0 : 1, start).zero_();
  }
  return out;
}

} // namespace at::native
