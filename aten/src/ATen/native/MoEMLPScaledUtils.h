#pragma once

// Rules of _moe_mlp_scaled and its backward: recipes, formats of weights, and what they
// ask of the operands beyond the rules of _moe_mlp. See MoEMLPUtils.h for the notation.
//
// recipe_a  [] : activations keep their 16 or 32 bits (weight-only inference);
//           [code of ScalingType]: rows of X, A, dO and dH are float8_e4m3fn; in inference
//           with input_scaled in int8, rows of X and A are int8.
// recipe_w  [code]: how the weights are scaled, along the dimension that is summed.
// swizzle_w [] or [code of WeightLayout]: how weights that come quantised are stored.
// A list of a weight is [] (w is quantised in the call), [data, scale] or, for a weight
// whose gradient of the rows is wanted with 1-D blocks, [data, scale, data_t, scale_t]:
// the same weight quantised along its rows, dim 1. Where w_up is given, the halves of dH are rows
// of two products, and quantised each for itself.

#include <ATen/native/MoEMLPUtils.h>
#include <ATen/native/MoEQuantize.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/zeros.h>
#endif

#include <array>
#include <optional>

namespace at::native::moe {

enum class WeightLayout : uint8_t {
  Plain = 0, // as _moe_quantize makes them, and as checkpoints have them
  // SwizzleType::SWIZZLE_32_4_4 of the scales, as _moe_quantize(swizzle=1) makes them
  Swizzled32x4x4 = 1,
  Panels = 2, // made for the CPU kernels: see kPanelLines
};

// Panels: a weight (E, N, K) and its scales of rows are stored, in tensors of the same
// shapes, as (E, N / 16, dwords, 16 rows, 4 bytes) and (E, N / 16, blocks, 16 rows). Of
// 8-bit numbers those 64 bytes are (4, 2, 4, 2) instead of (4, 4 rows, 2, 2 bytes).
constexpr int64_t kPanelLines = 16;

// How H is kept in 8 bits, with every recipe.
inline constexpr const ScalingRule& kPreactRule = kScalingRules[1];
static_assert(kPreactRule.type == ScalingType::BlockWise1x32);

// One scale of all weights; only for weights that come quantised.
constexpr ScalingRule kTensorWise = {ScalingType::TensorWise, "TensorWise", 0, false, kFloat};

// A type of quantised weights. Two numbers of 4 bits share a byte, the one with the even
// index in the low half; int4 is stored plus 8, in uint8.
struct WeightFormat {
  ScalarType data;
  ScalingType scaling;
  ScalarType scale;
  int64_t per_element; // numbers in an element of data
};

constexpr std::array<WeightFormat, 11> kWeightFormats = {{
    {kFloat8_e4m3fn, ScalingType::TensorWise, kFloat, 1},
    {kFloat8_e4m3fn, ScalingType::RowWise, kFloat, 1},
    {kFloat8_e4m3fn, ScalingType::BlockWise1x32, kFloat8_e8m0fnu, 1},
    {kFloat8_e4m3fn, ScalingType::BlockWise1x128, kFloat, 1},
    {kFloat8_e4m3fn, ScalingType::BlockWise128x128, kFloat, 1},
    {kChar, ScalingType::RowWise, kFloat, 1},
    {kChar, ScalingType::BlockWise1x32, kFloat8_e8m0fnu, 1},
    {kChar, ScalingType::BlockWise1x128, kFloat, 1},
    {kFloat4_e2m1fn_x2, ScalingType::BlockWise1x32, kFloat8_e8m0fnu, 2},
    {kByte, ScalingType::BlockWise1x32, kFloat, 2},
    {kByte, ScalingType::BlockWise1x128, kFloat, 2},
}};

// The format of [data, scale] under a rule.
inline const WeightFormat& weight_format(
    const char* op, const std::string& name, TensorList scaled, const ScalingRule& rule) {
  const auto data = scaled[0].scalar_type(), scale = scaled[1].scalar_type();
  std::ostringstream formats;
  for (const auto& format : kWeightFormats) {
    if (format.scaling == rule.type) {
      if (format.data == data && format.scale == scale) {
        return format;
      }
      formats << (formats.tellp() > 0 ? ", " : "") << dtype_name(format.data) << " and "
              << dtype_name(format.scale);
    }
  }
  TORCH_CHECK_TYPE(
      false, op, ": ", name, " with recipe ", rule.name, " must have data and scale of dtypes ",
      formats.str(), ", got ", dtype_name(data), " and ", dtype_name(scale));
}

// Operands that _moe_mlp does not have.
struct ScaledLists {
  TensorList input;
  TensorList w_in;
  TensorList w_out;
  TensorList w_up;
};

struct ScaledOptions {
  IntArrayRef recipe_a;
  IntArrayRef recipe_w;
  IntArrayRef swizzle_w;
  std::optional<ScalarType> preact_dtype;
};

namespace detail {

inline void check_list_size(const char* op, const char* name, TensorList list, bool transposed) {
  TORCH_CHECK_VALUE(
      list.empty() || list.size() == 2 || (transposed && list.size() == 4),
      op, ": ", name, transposed ? "_scaled must be [], [data, scale] or [data, scale, data_t, scale_t]"
                                 : "_scaled must be [] or [data, scale]",
      ", got ", list.size(), " tensors");
}

// data (E, N, K / per_element) and its scale, blocks along dim.
inline void check_scaled_pair(
    const char* op, const std::string& name, TensorList pair, const ScalingRule& rule,
    c10::SymIntArrayRef logical, int64_t dim, const Tensor& input, bool swizzled = false) {
  const auto data_name = name + " data", scale_name = name + " scale";
  check_placement(op, data_name.c_str(), pair[0], "input", input);
  check_placement(op, scale_name.c_str(), pair[1], "input", input);
  const auto per_element = weight_format(op, name, pair, rule).per_element;
  auto sizes = logical.vec();
  const auto& last = sizes.back();
  TORCH_CHECK_VALUE(
      per_element == 1 || (last % per_element).sym_eq(0).expect_true(__FILE__, __LINE__),
      op, ": ", name, " with two numbers in a byte needs an even last dimension, got ", last);
  sizes.back() = last / per_element;
  check_shape(
      op, data_name.c_str(), pair[0], logical.size() == 2 ? "(T, D)" : "of the weight", sizes);
  sizes = logical.vec();
  if (rule.type == ScalingType::TensorWise) {
    sizes = {1};
  } else if (rule.square) {
    sizes[1] = scale_count(rule, sizes[1]);
    sizes[2] = scale_count(rule, sizes[2]);
  } else {
    sizes[dim] = scale_count(rule, sizes[dim]);
  }
  if (swizzled) {
    const auto dtype_rule = scale_name + " with swizzle_w [1] (SWIZZLE_32_4_4) must have dtype";
    check_dtype(op, dtype_rule, pair[1].scalar_type(), {kFloat8_e8m0fnu});
    // The scaled dimension last.
    std::swap(sizes[dim], sizes.back());
    sizes = swizzled_sizes(std::move(sizes));
  }
  check_shape(
      op, scale_name.c_str(), pair[1], swizzled ? "of its swizzled blocks" : "of its blocks", sizes);
}

} // namespace detail

// What forward and backward, CPU, composite and Meta all start from. `call.inputs` has
// stand-ins without memory for the weights, in the dtype of input.
struct ScaledCall {
  const char* op;
  const ScalingRule* rule_a; // null: weight-only
  const ScalingRule& rule_w;
  WeightLayout layout;
  std::optional<ScalarType> preact_dtype; // of a quantised H
  MLPInputs inputs; // as they came
  ScaledLists lists;
  MLPCall call;

  bool weight_only() const {
    return rule_a == nullptr;
  }
  bool has_panels() const {
    return layout == WeightLayout::Panels;
  }
  bool is_swizzled() const {
    return layout == WeightLayout::Swizzled32x4x4;
  }
  // Type of the rows of X, A, dO and dH.
  ScalarType row_dtype() const {
    return lists.input.empty() ? kFloat8_e4m3fn : lists.input[0].scalar_type();
  }

  ScaledCall(
      const char* op,
      MLPInputs operands,
      ScaledLists scaled,
      const ScaledOptions& options,
      const ActivationOptions& activation)
      : op(op),
        rule_a(parse_rule_a(op, options.recipe_a)),
        rule_w(parse_rule_w(op, options.recipe_w)),
        layout(parse_layout(op, options.swizzle_w, rule_w)),
        preact_dtype(parse_preact_dtype(op, operands.input, options.preact_dtype)),
        inputs(std::move(operands)),
        lists(scaled),
        call(op, with_stand_ins(op, inputs, lists, rule_w), activation) {
    check_recipes(op);
    check_weights(op);
    check_rows(op);
  }

 private:
  static const ScalingRule* parse_rule_a(const char* op, IntArrayRef recipe) {
    if (recipe.empty()) {
      return nullptr;
    }
    TORCH_CHECK_VALUE(
        recipe.size() == 1, op, ": recipe_a must be [] or have one code, got ", recipe.size());
    return &scaling_rule(op, "recipe_a", recipe[0]);
  }

  static const ScalingRule& parse_rule_w(const char* op, IntArrayRef recipe) {
    TORCH_CHECK_VALUE(
        recipe.size() == 1, op, ": recipe_w must have one code, got ", recipe.size());
    return recipe[0] == static_cast<int64_t>(ScalingType::TensorWise)
        ? kTensorWise
        : scaling_rule(op, "recipe_w", recipe[0]);
  }

  static std::optional<ScalarType> parse_preact_dtype(
      const char* op, const Tensor& input, std::optional<ScalarType> dtype) {
    if (!dtype.has_value() || *dtype == input.scalar_type()) {
      return std::nullopt;
    }
    TORCH_CHECK_TYPE(
        *dtype == kFloat8_e4m3fn || *dtype == kChar,
        op, ": preact_dtype must be None, float8_e4m3fn, int8 or the dtype of input, ",
        dtype_name(input.scalar_type()), ", got ", dtype_name(*dtype));
    return dtype;
  }

  static WeightLayout parse_layout(
      const char* op, IntArrayRef swizzle_w, const ScalingRule& rule_w) {
    const auto code = swizzle_w.empty() ? 0 : swizzle_w[0];
    const bool can_swizzle = rule_w.type == ScalingType::BlockWise1x32;
    TORCH_CHECK_VALUE(
        swizzle_w.size() <= 1 &&
            (code == static_cast<int64_t>(WeightLayout::Plain) ||
             code == static_cast<int64_t>(WeightLayout::Panels) ||
             (code == static_cast<int64_t>(WeightLayout::Swizzled32x4x4) && can_swizzle)),
        op, ": swizzle_w must be [], [0] (plain), [2] (panels) or, with recipe_w BlockWise1x32,"
        " [1] (SWIZZLE_32_4_4), got ", swizzle_w, " with recipe_w ", rule_w.name);
    return static_cast<WeightLayout>(code);
  }

  static MLPInputs with_stand_ins(
      const char* op, const MLPInputs& in, const ScaledLists& lists, const ScalingRule& rule) {
    const auto dtype = in.input.scalar_type();
    check_dtype(op, "input must have dtype", dtype, {kFloat, kBFloat16, kHalf});
    check_placement(op, "input", in.input, "input", in.input);
    detail::check_list_size(op, "input", lists.input, false);
    const auto stand_in = [&](c10::SymIntArrayRef sizes) {
      return at::zeros({}, in.input.options()).expand_symint(sizes);
    };
    const auto parameter = [&](const char* name, Tensor& x) {
      if (!x.defined()) {
        return;
      }
      check_placement(op, name, x, "input", in.input);
      TORCH_CHECK_TYPE(
          x.scalar_type() == dtype || x.scalar_type() == kFloat,
          op, ": ", name, " must have dtype float32 or the dtype of input, ", dtype_name(dtype),
          ", got ", dtype_name(x.scalar_type()));
      x = stand_in(x.sym_sizes());
    };
    const auto weight = [&](const char* name, Tensor& w, TensorList scaled) {
      detail::check_list_size(op, name, scaled, true);
      if (w.defined() || scaled.empty()) {
        return parameter(name, w);
      }
      auto sizes = scaled[0].sym_sizes().vec();
      if (!sizes.empty()) {
        sizes.back() = sizes.back() * weight_format(op, name, scaled, rule).per_element;
      }
      w = stand_in(sizes);
    };
    MLPInputs out = in;
    weight("w_in", out.w_in, lists.w_in);
    weight("w_out", out.w_out, lists.w_out);
    weight("w_up", out.w_up, lists.w_up);
    for (const auto& [name, w] : {std::pair("w_in", out.w_in), std::pair("w_out", out.w_out)}) {
      TORCH_CHECK_VALUE(
          w.defined(), op, ": ", name, " or ", name, "_scaled must be given, got neither");
    }
    parameter("b_in", out.b_in);
    parameter("b_out", out.b_out);
    return out;
  }

  void check_recipes(const char* op) const {
    const bool fits = weight_only() ||
        (rule_a->type == ScalingType::BlockWise1x128
             ? rule_w.type == ScalingType::BlockWise1x128 ||
                 rule_w.type == ScalingType::BlockWise128x128
             : rule_a->type == rule_w.type && !rule_a->square);
    TORCH_CHECK_VALUE(
        fits,
        op, ": recipe_a and recipe_w must be RowWise both, BlockWise1x32 both, or BlockWise1x128"
        " with BlockWise1x128 or BlockWise128x128, or recipe_a [], got ",
        weight_only() ? "[]" : rule_a->name, " and ", rule_w.name);
  }

  void check_weights(const char* op) const {
    const auto check = [&](const std::string& name, const Tensor& w, TensorList scaled,
                           const Tensor& logical) {
      const auto list = name + "_scaled";
      const auto sizes = logical.sym_sizes();
      if (!scaled.empty()) {
        detail::check_scaled_pair(
            op, list, scaled.slice(0, 2), rule_w, sizes, 2, inputs.input, is_swizzled());
      }
      if (scaled.size() == 4) {
        detail::check_scaled_pair(
            op, list + "[2:]", scaled.slice(2, 2), rule_w, sizes, 1, inputs.input, is_swizzled());
      }
      TORCH_CHECK_VALUE(
          !has_panels() || scaled.size() == 2,
          op, ": ", list, " must be [data, scale] with swizzle_w [2] (panels), got ",
          scaled.size(), " tensors");
      TORCH_CHECK_VALUE(
          !has_panels() ||
              ((sizes[1] % kPanelLines).sym_eq(0).expect_true(__FILE__, __LINE__) &&
               (sizes[2] % 8).sym_eq(0).expect_true(__FILE__, __LINE__)),
          op, ": ", name, " with swizzle_w [2] (panels) must be (E, N, K) with N a multiple of 16"
          " and K of 8, got ", shape_string(sizes));
      TORCH_CHECK_VALUE(
          rule_w.type != ScalingType::TensorWise || !w.defined() || !scaled.empty(),
          op, ": ", name,
          " cannot be quantised with recipe TensorWise, which needs quantised weights");
    };
    check("w_in", inputs.w_in, lists.w_in, call.inputs.w_in);
    check("w_out", inputs.w_out, lists.w_out, call.inputs.w_out);
    if (call.inputs.w_up.defined()) {
      check("w_up", inputs.w_up, lists.w_up, call.inputs.w_up);
    }
  }

  // Rows that come quantised.
  void check_rows(const char* op) const {
    if (lists.input.empty()) {
      return;
    }
    TORCH_CHECK_VALUE(
        !weight_only(), op, ": input_scaled needs recipe_a, got recipe_a []");
    const bool takes_int8 =
        !lists.w_in.empty() && lists.w_in[0].scalar_type() != kFloat8_e4m3fn;
    TORCH_CHECK_TYPE(
        row_dtype() == kFloat8_e4m3fn || (row_dtype() == kChar && takes_int8),
        op, ": input_scaled data must have dtype float8_e4m3fn, or int8 if w_in_scaled has int8,"
        " int4 (uint8) or float4_e2m1fn_x2, got ", dtype_name(row_dtype()),
        lists.w_in.empty() ? " without w_in_scaled" : " with w_in_scaled in ",
        lists.w_in.empty() ? "" : dtype_name(lists.w_in[0].scalar_type()));
    const auto &D = call.sizes.model_dim, &F = call.sizes.hidden_dim;
    TORCH_CHECK_VALUE(
        row_dtype() != kChar ||
            ((D % 32).sym_eq(0).expect_true(__FILE__, __LINE__) &&
             (F % 32).sym_eq(0).expect_true(__FILE__, __LINE__)),
        op, ": D and F must be multiples of 32 with input_scaled in int8, got ", D, " and ", F);
    detail::check_scaled_pair(
        op, "input_scaled", lists.input, *rule_a, inputs.input.sym_sizes(), 1, inputs.input);
  }
};

// What the backward reads besides: grad_out stands for the forward's input in `scaled`.
struct ScaledSaved {
  Tensor input_data; // (T, D), or empty with input_scaled or weight-only
  Tensor input_scale;
  Tensor preact; // (R, G*F); 0 rows: H is computed again
  Tensor preact_scale; // (R, ceil(G*F / 32)) of a quantised one, else empty
};

inline void check_grad_out(const char* op, const Tensor& grad_out) {
  check_rank(op, "grad_out", grad_out, 2, "(T, D)");
  check_dtype(
      op, "grad_out must have dtype", grad_out.scalar_type(), {kFloat, kBFloat16, kHalf});
}

inline void check_saved(
    const char* op,
    const ScaledCall& scaled,
    const ScaledSaved& saved,
    const std::array<bool, 7>& output_mask) {
  const auto& sizes = scaled.call.sizes;
  const auto& x = scaled.inputs.input;
  TORCH_CHECK_NOT_IMPLEMENTED(
      scaled.row_dtype() != kChar,
      op, ": no gradients with input_scaled in int8, which is for inference");
  check_placement(op, "preact", saved.preact, "grad_out", x);
  check_placement(op, "preact_scale", saved.preact_scale, "grad_out", x);
  check_rank(op, "preact", saved.preact, 2, "(R, G*F)");
  // A size that nobody knows is not 0 here: then the shapes below have to fit.
  const bool has_no_preact = TORCH_GUARD_OR_FALSE(saved.preact.sym_size(0).sym_eq(0));
  const bool is_recomputed =
      has_no_preact && !TORCH_GUARD_OR_FALSE(sizes.num_rows.sym_eq(0));
  const bool wants_w_in = output_mask[1] || (output_mask[6] && scaled.inputs.w_up.defined());
  TORCH_CHECK_VALUE(
      !scaled.weight_only() || !(wants_w_in || is_recomputed),
      op, ": gradients of w_in and w_up, and any after a forward with compute_preact=False, need"
      " recipe_a, got recipe_a []");
  if (!scaled.weight_only() && scaled.lists.input.empty()) {
    check_dtype(
        op, "input_data must have dtype", saved.input_data.scalar_type(), {kFloat8_e4m3fn});
    detail::check_scaled_pair(
        op, "input", {saved.input_data, saved.input_scale}, *scaled.rule_a, x.sym_sizes(), 1, x);
  }
  for (const auto& [i, name, w] :
       {std::tuple(1, "w_in", scaled.inputs.w_in),
        std::tuple(2, "w_out", scaled.inputs.w_out)}) {
    TORCH_CHECK_VALUE(
        !output_mask[i] || w.defined(),
        op, ": output_mask asks for the gradient of ", name, ", which was not given");
  }
  if (has_no_preact) {
    return;
  }
  check_dtype(
      op, "preact must have dtype", saved.preact.scalar_type(),
      {scaled.preact_dtype.value_or(x.scalar_type())});
  check_shape(op, "preact", saved.preact, "(R, G*F)", {sizes.num_rows, sizes.gated_dim});
  if (scaled.preact_dtype.has_value()) {
    check_dtype(
        op, "preact_scale must have dtype", saved.preact_scale.scalar_type(),
        {kPreactRule.scale_dtype});
    check_shape(
        op, "preact_scale", saved.preact_scale, "(R, ceil(G*F / 32))",
        {sizes.num_rows, scale_count(kPreactRule, sizes.gated_dim)});
  }
}

} // namespace at::native::moe

namespace at::native {

// ---- kernels of the CPU ----

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
