// _scaled_grouped_mm and _scaled_grouped_mm_v2 on CPU: the operands of a group as float32,
// then one product. No kernel for speed, but the meaning of the op where there is no GPU:
// for tests, for models that are looked at on a laptop, and as what a GPU is compared with.
//
//   2D x 3D   offs divides the rows of a (M, K); b is (G, K, N); out is (M, N)
//   2D x 2D   offs divides the contraction of a (M, K) and b (K, N); out is (G, M, N)
//
// K and offs count numbers, of which float4_e2m1fn_x2 has two in an element.
// Groups may be empty. Rows behind the last group are 0.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEScaling.h>
#include <c10/util/irange.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_scaled_grouped_mm_native.h>
#include <ATen/ops/_scaled_grouped_mm_v2_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#endif

#include <vector>

namespace at::native {

namespace {

using moe::check_dtype;
using moe::ScalingRule;
using moe::ScalingType;
using moe::SwizzleType;

constexpr const char* kOp = "scaled_grouped_mm";

int64_t ceil_div(int64_t x, int64_t y) {
  return (x + y - 1) / y;
}

int64_t padded(int64_t x, int64_t multiple) {
  return ceil_div(x, multiple) * multiple;
}

struct Operand {
  const char* name;
  Tensor data; // (rows, K), or (G, rows, K) of weights
  Tensor scale;
  const ScalingRule& rule;
  bool swizzled;

  bool is_stack() const {
    return data.dim() == 3;
  }
  bool is_fp4() const {
    return data.scalar_type() == kFloat4_e2m1fn_x2;
  }
  int64_t depth() const {
    return data.size(-1) * (is_fp4() ? 2 : 1);
  }
  int64_t block_rows() const {
    return rule.square ? rule.block : 1;
  }
  int64_t scales_along(int64_t depth) const {
    return rule.block == 0 ? 1 : ceil_div(depth, rule.block);
  }
  // Whether each group has scales of all rows and of a whole depth.
  bool is_scaled_by_group(bool divides_depth) const {
    return is_stack() || (divides_depth && rule.block == 0);
  }
};

const ScalingRule& check_recipe(const char* name, IntArrayRef recipe, const Tensor& data) {
  const bool is_fp4 = data.scalar_type() == kFloat4_e2m1fn_x2;
  for (const auto& rule : moe::kScalingRules) {
    if (recipe.size() == 1 && recipe[0] == static_cast<int64_t>(rule.type) &&
        (!is_fp4 || rule.type == ScalingType::BlockWise1x32)) {
      return rule;
    }
  }
  TORCH_CHECK_VALUE(
      false, kOp, ": recipe_", name, " on CPU must be one of ", moe::scaling_names(),
      ", of float4_e2m1fn_x2 BlockWise1x32, got ", recipe);
}

Operand check_operand(
    const char* name, const Tensor& data, TensorList scale, IntArrayRef recipe,
    IntArrayRef swizzle) {
  check_dtype(
      kOp, std::string("mat_") + name + " on CPU must have dtype", data.scalar_type(),
      {kFloat8_e4m3fn, kFloat8_e5m2, kFloat4_e2m1fn_x2});
  const auto& rule = check_recipe(name, recipe, data);
  TORCH_CHECK_VALUE(
      scale.size() == 1, kOp, ": scale_", name, " must be one tensor on CPU, got ", scale.size());
  check_dtype(
      kOp, std::string("scale_") + name + " must have dtype", scale[0].scalar_type(),
      {rule.scale_dtype});
  const auto code = swizzle.empty() ? 0 : swizzle[0];
  const bool swizzled = code == static_cast<int64_t>(SwizzleType::SWIZZLE_32_4_4);
  TORCH_CHECK_VALUE(
      swizzle.size() <= 1 &&
          (code == 0 || (swizzled && rule.type == ScalingType::BlockWise1x32)),
      kOp, ": swizzle_", name, " on CPU must be NO_SWIZZLE (0) or, with BlockWise1x32,"
      " SWIZZLE_32_4_4 (1), got ", swizzle);
  return {name, data, scale[0].contiguous(), rule, swizzled};
}

// Group ends; unlike on a GPU they can be checked.
std::vector<int64_t> group_ends(const Tensor& offs, int64_t length, int64_t multiple) {
  const auto values = offs.contiguous();
  const auto* data = values.const_data_ptr<int32_t>();
  std::vector<int64_t> ends(data, data + values.numel());
  int64_t last = 0;
  for (const auto g : c10::irange(ends.size())) {
    TORCH_CHECK_VALUE(
        ends[g] >= last && ends[g] <= length,
        kOp, ": offs must be non-decreasing in [0, ", length, "], got ", ends[g], " at [", g,
        "] after ", last);
    TORCH_CHECK_VALUE(
        ends[g] % multiple == 0 || ends[g] == length,
        kOp, ": offs must be multiples of ", multiple, ", the block of the scales along the"
        " contraction, got ", ends[g], " at [", g, "]");
    last = ends[g];
  }
  return ends;
}

// What of an operand belongs to a group.
struct Part {
  int64_t group;
  int64_t row; // first of its rows, where offs divides them
  int64_t rows;
  int64_t k; // first along the contraction, where offs divides that
  int64_t depth;
  int64_t tiles_at; // bytes of the scales of groups before it, in swizzled order
};

void check_scale(const Operand& x, int64_t groups, bool divides_depth) {
  const int64_t rows = x.data.size(-2), along = x.scales_along(x.depth());
  const int64_t numel = (x.is_scaled_by_group(divides_depth) ? groups : 1) *
      ceil_div(rows, x.block_rows()) * along;
  // Padding of every group comes on top: only a lower bound then.
  const int64_t least = x.is_stack() ? groups * padded(rows, 128) * padded(along, 4) : 0;
  TORCH_CHECK_VALUE(
      x.swizzled ? x.scale.numel() >= least : x.scale.numel() == numel,
      kOp, ": scale_", x.name, " must have ", x.swizzled ? "at least " : "",
      x.swizzled ? least : numel, " elements, got shape ", x.scale.sizes());
}

// (row blocks, scales along the depth) of a group, float32.
Tensor scales_of(const Operand& x, const Part& part, bool divides_depth) {
  const int64_t row_blocks = ceil_div(x.data.size(-2), x.block_rows());
  const int64_t along = x.scales_along(part.depth);
  const auto flat = x.scale.view(-1);
  if (x.swizzled) {
    const int64_t size = padded(part.rows, 128) * padded(along, 4);
    const int64_t at = x.is_stack() ? part.group * size : part.tiles_at;
    TORCH_CHECK_VALUE(
        at + size <= flat.numel(),
        kOp, ": scale_", x.name, " must have at least ", at + size, " elements for the groups"
        " of offs, each padded to 128 rows and 4 scales, got ", flat.numel());
    const auto tiles = flat.narrow(0, at, size).unsqueeze(0);
    return moe::without_swizzle(tiles, part.rows, along)[0].view(flat.scalar_type()).to(kFloat);
  }
  if (x.is_scaled_by_group(divides_depth)) {
    return flat.view({-1, row_blocks, along})[part.group].to(kFloat);
  }
  const auto scale = flat.view({row_blocks, x.scales_along(x.depth())});
  if (divides_depth) {
    return scale.narrow(1, part.k / x.rule.block, along).to(kFloat);
  }
  // The squares of rows that offs divides begin with the first row of all.
  const int64_t first = part.row / x.block_rows();
  const int64_t end = ceil_div(part.row + part.rows, x.block_rows());
  return scale.narrow(0, first, end - first).to(kFloat);
}

// (rows, depth) of a group in float32.
Tensor values_of(const Operand& x, const Part& part, bool divides_depth) {
  const int64_t per_element = x.is_fp4() ? 2 : 1;
  const auto matrix = x.is_stack() ? x.data[part.group] : x.data;
  const auto data = (x.is_stack() ? matrix : matrix.narrow(0, part.row, part.rows))
                        .narrow(1, part.k / per_element, part.depth / per_element);
  const auto numbers = x.is_fp4() ? moe::unpack_pairs(data.contiguous()) : data.to(kFloat);
  auto scale = scales_of(x, part, divides_depth);
  if (x.block_rows() > 1) {
    scale = scale.repeat_interleave(x.block_rows(), 0)
                .narrow(0, part.row % x.block_rows(), part.rows);
  }
  if (x.rule.block > 0) {
    scale = scale.repeat_interleave(x.rule.block, 1).narrow(1, 0, part.depth);
  }
  return numbers * scale;
}

// b as b^T: (N, K) or (G, N, K)
void multiply(
    const Operand& a, const Operand& b, const Tensor& offs, const std::optional<Tensor>& bias,
    const Tensor& out) {
  TORCH_CHECK_VALUE(
      a.data.dim() == 2 && offs.defined(),
      kOp, " on CPU takes a 2D mat_a, a 2D or 3D mat_b and offs, got ", a.data.dim(), "D and ",
      b.data.dim(), "D", offs.defined() ? "" : " without offs");
  const bool divides_depth = !b.is_stack();
  TORCH_CHECK_VALUE(
      a.is_fp4() == b.is_fp4() && a.data.size(-1) == b.data.size(-1),
      kOp, ": mat_a and mat_b must agree in their contraction, got ", a.data.sizes(), " and ",
      b.data.transpose(-2, -1).sizes());
  const int64_t m = a.data.size(0), n = b.data.size(-2);
  const int64_t depth = a.depth(), groups = offs.numel();
  const auto ends = group_ends(
      offs,
      divides_depth ? depth : m,
      divides_depth ? std::max<int64_t>({1, a.rule.block, b.rule.block}) : 1);
  check_scale(a, groups, divides_depth);
  check_scale(b, groups, divides_depth);
  out.zero_();
  Part pa{}, pb{};
  int64_t begin = 0;
  for (const auto g : c10::irange(groups)) {
    const int64_t size = ends[g] - begin;
    const int64_t k = divides_depth ? size : depth;
    pa = {g, divides_depth ? 0 : begin, divides_depth ? m : size, divides_depth ? begin : 0, k, pa.tiles_at};
    pb = {g, 0, n, divides_depth ? begin : 0, k, pb.tiles_at};
    if (size > 0) {
      auto product = at::mm(values_of(a, pa, divides_depth), values_of(b, pb, divides_depth).t());
      if (bias.has_value() && bias->defined()) {
        product += bias->dim() == 2 ? (*bias)[g] : *bias;
      }
      (divides_depth ? out[g] : out.narrow(0, begin, size)).copy_(product);
    }
    pa.tiles_at += padded(pa.rows, 128) * padded(a.scales_along(k), 4);
    pb.tiles_at += padded(n, 128) * padded(b.scales_along(k), 4);
    begin = ends[g];
  }
}

} // namespace

TORCH_IMPL_FUNC(_scaled_grouped_mm_cpu_v2_out)
(const Tensor& mat_a,
 const Tensor& mat_b,
 const ITensorListRef& scale_a,
 IntArrayRef recipe_a,
 IntArrayRef swizzle_a,
 const ITensorListRef& scale_b,
 IntArrayRef recipe_b,
 IntArrayRef swizzle_b,
 OptionalTensorRef offs,
 OptionalTensorRef bias,
 std::optional<ScalarType> out_dtype,
 IntArrayRef contraction_dim,
 bool use_fast_accum,
 const Tensor& out) {
  const auto list = [](const ITensorListRef& scales) {
    return std::vector<Tensor>(scales.begin(), scales.end());
  };
  multiply(
      check_operand("a", mat_a, list(scale_a), recipe_a, swizzle_a),
      check_operand("b", mat_b.transpose(-2, -1), list(scale_b), recipe_b, swizzle_b),
      offs.has_value() ? *offs : Tensor(),
      bias.has_value() ? std::optional<Tensor>(*bias) : std::nullopt,
      out);
}

// RowWise scales.
Tensor _scaled_grouped_mm_cpu(
    const Tensor& mat_a,
    const Tensor& mat_b,
    const Tensor& scale_a,
    const Tensor& scale_b,
    const std::optional<Tensor>& offs,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& scale_result,
    std::optional<ScalarType> out_dtype,
    bool use_fast_accum) {
  // As on CUDA, and as tracing has it.
  TORCH_CHECK(
      mat_a.scalar_type() == kFloat8_e4m3fn && mat_b.scalar_type() == kFloat8_e4m3fn,
      "Expected inputs of E4M3 FP8 type but got mat_a.dtype=torch.",
      c10::getDtypeNames(mat_a.scalar_type()).first, " and mat_b.dtype=torch.",
      c10::getDtypeNames(mat_b.scalar_type()).first, ".");
  TORCH_CHECK(
      !bias.has_value() || !bias->defined(), "Bias tensor provided, but it is not supported yet.");
  TORCH_CHECK(
      out_dtype.value_or(kBFloat16) == kBFloat16,
      "If output dtype provided, it must be torch.bfloat16.");
  TORCH_CHECK(
      !scale_result.has_value(), "Scale result tensor provided, but it is not supported yet.");
  const int64_t recipe = scale_a.scalar_type() == kFloat8_e8m0fnu
      ? static_cast<int64_t>(ScalingType::BlockWise1x32)
      : static_cast<int64_t>(ScalingType::RowWise);
  const int64_t swizzle = recipe == static_cast<int64_t>(ScalingType::BlockWise1x32);
  const auto a = check_operand("a", mat_a, scale_a, recipe, swizzle);
  const auto b = check_operand("b", mat_b.transpose(-2, -1), scale_b, recipe, swizzle);
  TORCH_CHECK_VALUE(
      offs.has_value() && mat_a.dim() == 2,
      "_scaled_grouped_mm on CPU takes a 2D mat_a and offs");
  std::vector<int64_t> sizes = {mat_a.size(0), mat_b.size(-1)};
  if (mat_b.dim() == 2) {
    sizes.insert(sizes.begin(), offs->numel());
  }
  const auto out = at::empty(sizes, mat_a.options().dtype(out_dtype.value_or(kBFloat16)));
  multiply(a, b, *offs, bias, out);
  return out;
}

} // namespace at::native
