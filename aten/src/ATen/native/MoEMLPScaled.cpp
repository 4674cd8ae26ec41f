// _moe_mlp_scaled and its backward: the expert MLP with operands of 8 bits and fewer. See
// MoEMLPScaledUtils.h for recipes and rules.
//
// Every product reads operands that are quantised along the dimension that it sums:
//
//   H  = q(X) q(W_in)^T        rows of X and W_in along D
//   O  = q(A) q(W_out)^T       rows of A and W_out along F
//   dA = q(dO) q'(W_out)       rows of dO, columns of W_out, along D
//   dX = q(dH) q'(W_in)        rows of dH, columns of W_in, along G*F; with w_up along F, twice
//   dW_in = c(q(dH))^T c(q(X)), dW_out = c(q(dO))^T c(s * A)    columns, along the rows
//
// c blocks begin at an expert's first row. X and H are kept in 8 bits only: with powers of
// two as scales, c(q(X)) has the codes of c(X) but for a few percent. A, and H where it
// is recomputed or kept whole, come from 16 bits.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLPBackward.h>
#include <ATen/native/MoEMLPCPU.h>
#include <ATen/native/MoEMLPScaledUtils.h>
#include <ATen/native/MoEQuantize.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_moe_mlp_scaled_backward_native.h>
#include <ATen/ops/_moe_mlp_scaled_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#endif

#include <array>
#include <tuple>

namespace at::native {

DEFINE_DISPATCH(moe_mlp_weight_only_stub);
DEFINE_DISPATCH(moe_activation_stub);
DEFINE_DISPATCH(moe_expert_gemm_stub);
DEFINE_DISPATCH(moe_expert_grad_stub);

namespace {

using namespace moe_composite;
using moe::Quantized;
using moe::ScaledCall;
using moe::ScalingRule;
using GradTuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// In which products are computed: quantised numbers are exact in bfloat16, not in float16.
ScalarType product_type(const Tensor& input) {
  return input.scalar_type() == kBFloat16 ? kBFloat16 : kFloat;
}

// A weight in the order of WeightLayout::Panels, as it is without it.
Quantized without_panels(const Quantized& weight, const ScalingRule& rule) {
  const auto& [data, scale] = weight;
  const int64_t experts = data.size(0), rows = data.size(1), groups = rows / moe::kPanelLines;
  const auto bytes = data.contiguous().view(kByte);
  const bool is_byte = data.scalar_type() == kFloat8_e4m3fn || data.scalar_type() == kChar;
  const auto plain = is_byte
      ? bytes.view({experts, groups, -1, 4, 2, 4, 2}).permute({0, 1, 3, 5, 2, 4, 6})
      : bytes.view({experts, groups, -1, moe::kPanelLines, 4}).transpose(2, 3);
  const auto numbers = plain.reshape(bytes.sizes()).view(data.scalar_type());
  if (rule.square || rule.type == moe::ScalingType::TensorWise) {
    return {numbers, scale};
  }
  const auto lines = scale.contiguous().view({experts, groups, -1, moe::kPanelLines});
  return {numbers, lines.transpose(2, 3).reshape(scale.sizes())};
}

// Kernels of the CPU, or ATen ops anywhere: the same numbers, but for the order in which
// products are summed.
enum class Backend : uint8_t { Native, Composite };

// One call: its operands in the type of the products.
class ScaledPass {
 public:
  ScaledPass(const ScaledCall& scaled, Backend backend)
      : scaled_(scaled),
        backend_(backend),
        in_(scaled.inputs),
        spec_(scaled.call.activation),
        dtype_(product_type(in_.input)),
        routing_(make_routing(
            scaled.op,
            scaled.call.inputs,
            scaled.call.sizes.num_rows.expect_int(),
            backend == Backend::Native || can_use_grouped_mm())) {}

  // What x stands for once it is quantised, contiguous; with codes, which x (R, C) has along its
  // rows only, also those and their scales.
  moe::QuantizeOutputs rounded(
      const Tensor& x, const ScalingRule& rule, int64_t dim, const Tensor& offs = {},
      ScalarType data_dtype = kFloat8_e4m3fn, bool codes = false, bool values = true) const {
    if (backend_ == Backend::Composite) {
      const auto q = moe::quantize_composite(x, rule, dim, data_dtype, offs);
      const auto number = [&] { return moe::dequantize(q, rule, dim, dtype_, offs).contiguous(); };
      return {q.data, q.scale, values ? number() : Tensor(), data_dtype};
    }
    const auto make = [&](bool wanted, IntArrayRef sizes, ScalarType dtype) {
      return wanted ? at::empty(sizes, x.options().dtype(dtype)) : Tensor();
    };
    const int64_t count = moe::scale_count(rule, x.size(dim)).expect_int();
    moe::QuantizeOutputs out{
        make(codes, x.sizes(), data_dtype),
        make(codes, {x.size(0), count}, rule.scale_dtype),
        make(values, x.sizes(), dtype_),
        data_dtype};
    moe_quantize_stub(kCPU, x.contiguous(), rule, dim, offs, out);
    return out;
  }

  // What data and scale stand for, in the order of data.
  Tensor dequantized(const Quantized& quantized, const ScalingRule& rule, int64_t dim) const {
    if (backend_ == Backend::Composite) {
      return moe::dequantize(quantized, rule, dim, dtype_);
    }
    const int64_t dense = rule.square ? quantized.data.dim() - 1 : dim;
    const Quantized lines{
        quantized.data.movedim(dense, -1).contiguous(),
        quantized.scale.movedim(dense, -1).contiguous()};
    const auto values = at::empty(lines.data.sizes(), lines.data.options().dtype(dtype_));
    moe_dequantize_stub(kCPU, lines, rule, values);
    return values.movedim(-1, dense);
  }

  // Those of a weight (E, N, K), quantised along dim; with one pair only, for weights that
  // come quantised, that serves both products.
  Tensor weight(const Tensor& w, TensorList scaled, int64_t dim) const {
    const auto& rule = scaled_.rule_w;
    if (scaled.empty()) {
      return rounded(w, rule, dim).values;
    }
    const bool transposed = dim == 1 && scaled.size() == 4;
    const int64_t scaled_dim = transposed ? 1 : 2;
    Quantized q{scaled[transposed ? 2 : 0], scaled[transposed ? 3 : 1]};
    if (scaled_.has_panels()) {
      q = without_panels(q, rule);
    }
    const auto type = q.data.scalar_type();
    const bool packed = type == kByte || type == kFloat4_e2m1fn_x2;
    if (packed) {
      q.data = moe::unpack_pairs(q.data);
    }
    if (rule.type == moe::ScalingType::TensorWise) {
      return (q.data.to(kFloat) * q.scale).to(dtype_);
    }
    if (scaled_.is_swizzled()) {
      const auto count = moe::scale_count(rule, q.data.size(scaled_dim)).expect_int();
      q.scale = moe::without_swizzle(q.scale, q.data.size(3 - scaled_dim), count)
                    .view(q.scale.scalar_type())
                    .movedim(-1, scaled_dim);
    }
    return packed ? moe::dequantize(q, rule, scaled_dim, dtype_) : dequantized(q, rule, scaled_dim);
  }

  // Rows along their own dimension.
  Tensor row_values(const Tensor& rows) const {
    if (scaled_.weight_only()) {
      return rows.to(dtype_);
    }
    return rounded(rows, *scaled_.rule_a, 1, {}, scaled_.row_dtype()).values;
  }

  Tensor gather(const Tensor& tokens) const {
    return routing_.mask_(tokens.index_select(0, routing_.row_token));
  }

  // H from the numbers of X, in the type of the products.
  Tensor project_in(const Tensor& x) const {
    const auto rows = gather(x);
    auto h = multiply(rows, in_.w_in, scaled_.lists.w_in, /*transposed=*/true);
    if (scaled_.call.inputs.w_up.defined()) {
      h = at::cat({h, multiply(rows, in_.w_up, scaled_.lists.w_up, /*transposed=*/true)}, 1);
    }
    if (in_.b_in.defined()) {
      h = (h.to(kFloat) + in_.b_in.index_select(0, routing_.row_expert)).to(dtype_);
    }
    return routing_.mask_(h);
  }

  Tensor project_out(const Tensor& h) const {
    const auto act = row_values(activation(h));
    auto o = multiply(act, in_.w_out, scaled_.lists.w_out, /*transposed=*/true).to(kFloat);
    if (in_.b_out.defined()) {
      o = o + in_.b_out.index_select(0, routing_.row_expert);
    }
    if (in_.topk_weights.defined()) {
      o = o * weights_of_rows(in_.topk_weights, routing_);
    }
    return combine_slots(routing_, o.to(in_.input.scalar_type()));
  }

  // H as it is saved in 8 bits. The gradient depends on which side of the limit a value is, so
  // those close to it are moved as far as 8 bits round, and those beyond it to one value.
  Tensor apart_from_limit(const Tensor& h) const {
    if (!spec_.is_limited()) {
      return h;
    }
    const auto limit = static_cast<float>(spec_.limit);
    const float inside = 0.9375F * limit, outside = 1.125F * limit;
    const auto moved = at::empty_like(h);
    for_parts(h, h.size(1), [&](int64_t begin, int64_t count) {
      const auto [gate, up] = split_gate(h.narrow(0, begin, count), spec_);
      const auto size = up.abs();
      const std::array<Tensor, 2> halves = {
          at::where(gate.ge(limit), outside, gate.clamp_max(inside)),
          at::where(size.ge(limit), outside, size.clamp_max(inside)).copysign_(up)};
      moved.narrow(0, begin, count)
          .copy_(spec_.interleaved ? at::stack(halves, 2).flatten(1) : at::cat(halves, 1));
    });
    return moved;
  }

  void backward(
      const moe::ScaledSaved& saved,
      const std::array<bool, 7>& wanted,
      bool hp_wgrad,
      Gradients& grads) const;

 private:
  bool can_use_grouped_mm() const {
    const auto& s = scaled_.call.sizes;
    const int64_t multiple = 16 / static_cast<int64_t>(c10::elementSize(dtype_));
    return s.model_dim.expect_int() % multiple == 0 && s.hidden_dim.expect_int() % multiple == 0;
  }

  // (R, N) = rows times the numbers of w_e^T (transposed: w is (E, N, K)) or, to multiply
  // gradients, of w_e
  Tensor multiply(
      const Tensor& rows, const Tensor& w, TensorList list, bool transposed) const {
    const auto numbers = weight(w, list, transposed ? 2 : 1);
    if (backend_ == Backend::Composite) {
      return multiply_experts(routing_, rows, transposed ? numbers.transpose(1, 2) : numbers);
    }
    const auto out = at::empty({rows.size(0), numbers.size(transposed ? 1 : 2)}, rows.options());
    moe_expert_gemm_stub(kCPU, scaled_.call.inputs, rows, numbers, transposed, out);
    return out;
  }

  // X as it was saved.
  Tensor saved_input(const moe::ScaledSaved& saved) const {
    const auto& list = scaled_.lists.input;
    const Quantized x = list.empty() ? Quantized{saved.input_data, saved.input_scale}
                                     : Quantized{list[0], list[1]};
    return dequantized(x, *scaled_.rule_a, 1);
  }

  Tensor saved_preact(const moe::ScaledSaved& saved) const {
    if (saved.preact.size(0) == 0) {
      return project_in(saved_input(saved));
    }
    const auto h = scaled_.preact_dtype.has_value()
        ? dequantized({saved.preact, saved.preact_scale}, moe::kPreactRule, 1)
        : saved.preact.to(dtype_);
    return routing_.all_rows_live ? h : at::where(routing_.row_is_live, h, 0);
  }

  // (E, I, J) with the dtype and the strides of w
  Tensor weight_grad(const Tensor& w, const Tensor& left, const Tensor& right) const {
    if (backend_ == Backend::Composite) {
      return with_strides_of(w, reduce_experts(routing_, left, right).to(w.scalar_type()));
    }
    const auto grad = at::empty_like(w, w.options().dtype(dtype_));
    moe_expert_grad_stub(kCPU, scaled_.call.inputs, left, right, grad);
    return grad.to(w.scalar_type());
  }

  // (E, N): per expert the sum of its rows (R, N)
  Tensor sum_rows(const Tensor& rows) const {
    if (backend_ == Backend::Composite) {
      return sum_experts(routing_, rows);
    }
    const auto ones = at::ones({rows.size(0), 1}, rows.options());
    const auto sums =
        at::empty({routing_.offs.size(0), 1, rows.size(1)}, rows.options());
    moe_expert_grad_stub(kCPU, scaled_.call.inputs, ones, rows, sums);
    return sums.select(1, 0);
  }

  // A (R, F) of H in the type of the products, or dH from `grad`, that of A in float32.
  Tensor activation(const Tensor& h, const std::optional<Tensor>& grad = std::nullopt) const {
    if (backend_ == Backend::Composite) {
      return (grad.has_value() ? preact_grad(h, *grad, spec_) : activate(h, spec_)).to(dtype_);
    }
    const int64_t width =
        grad.has_value() ? h.size(1) : scaled_.call.sizes.hidden_dim.expect_int();
    const auto out = at::empty({h.size(0), width}, h.options());
    const auto grad_act = grad.has_value() ? grad->contiguous() : Tensor();
    moe_activation_stub(kCPU, h.contiguous(), grad_act, spec_, out);
    return out;
  }

  // The ops below compute in the dtypes that they are given.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
  const ScaledCall& scaled_;
  const Backend backend_;
  const moe::MLPInputs& in_;
  const ActivationSpec& spec_;
  const ScalarType dtype_;
  const Routing routing_;
};

void ScaledPass::backward(
    const moe::ScaledSaved& saved,
    const std::array<bool, 7>& wanted,
    bool hp_wgrad,
    Gradients& grads) const {
  const auto dtype = in_.input.scalar_type();
  const bool keeps_columns = hp_wgrad || scaled_.weight_only();
  // Columns (R, N), blocks along the rows of each expert.
  const auto column = [&](const Tensor& rows) {
    return keeps_columns ? rows : rounded(rows, *scaled_.rule_a, 0, routing_.offs).values;
  };
  const auto dy = gather(in_.input.to(dtype_));
  // A row of dO once, not once for each of its experts.
  const auto dy_values = gather(row_values(in_.input.to(dtype_)));
  const auto h = saved_preact(saved);
  const auto act = activation(h);
  const auto s = in_.topk_weights.defined()
      ? routing_.mask_(weights_of_rows(in_.topk_weights, routing_)).to(kFloat)
      : at::ones({1, 1}, h.options().dtype(kFloat));
  if (wanted[2]) {
    const auto left = column(keeps_columns ? dy : dy_values);
    grads[2] = weight_grad(in_.w_out, left, column((act * s).to(dtype_)));
  }
  if (wanted[5]) {
    grads[5] = sum_rows((dy * s).to(dtype_)).to(in_.b_out.scalar_type());
  }
  const bool wants_preact_grad = wanted[0] || wanted[1] || wanted[4] || wanted[6];
  if (!wants_preact_grad && !wanted[3]) {
    return;
  }
  const auto grad_act = routing_.mask_(
      multiply(dy_values, in_.w_out, scaled_.lists.w_out, /*transposed=*/false)).to(kFloat);
  if (wanted[3]) {
    auto row_grad = (grad_act * act).sum(1);
    if (in_.b_out.defined()) {
      row_grad = row_grad +
          (dy.to(kFloat) * in_.b_out.index_select(0, routing_.row_expert)).sum(1);
    }
    grads[3] = slots_of_rows(row_grad, routing_).to(in_.topk_weights.scalar_type());
  }
  if (!wants_preact_grad) {
    return;
  }
  const auto dh = routing_.mask_(activation(h, grad_act * s));
  // With w_up the up half of H is a matrix of its own.
  const int64_t up = dh.size(1) / 2;
  const bool has_up = scaled_.call.inputs.w_up.defined();
  const auto gate_of = [&](const Tensor& x) { return has_up ? x.narrow(1, 0, up) : x; };
  const auto up_of = [&](const Tensor& x) { return x.narrow(1, up, up); };
  const auto dh_values = has_up
      ? at::cat({row_values(gate_of(dh)), row_values(up_of(dh))}, 1)
      : row_values(dh);
  if (wanted[0]) {
    const auto& lists = scaled_.lists;
    auto dx = multiply(gate_of(dh_values), in_.w_in, lists.w_in, /*transposed=*/false);
    if (has_up) {
      const auto up_dx = multiply(up_of(dh_values), in_.w_up, lists.w_up, /*transposed=*/false);
      dx = (dx.to(kFloat) + up_dx).to(dtype_);
    }
    grads[0] = combine_slots(routing_, dx.to(dtype));
  }
  if (wanted[1] || wanted[6]) {
    const auto left = column(keeps_columns ? dh : dh_values);
    const auto right = column(gather(saved_input(saved)));
    if (wanted[1]) {
      grads[1] = weight_grad(in_.w_in, gate_of(left), right);
    }
    if (wanted[6]) {
      grads[6] = weight_grad(in_.w_up, up_of(left), right);
    }
  }
  if (wanted[4]) {
    grads[4] = sum_rows(dh).to(in_.b_in.scalar_type());
  }
}

using ForwardTuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// (T, D), then X and H as the backward wants them; empty where it does not. Every return is
// a tensor of its own, as generated code asserts.
ForwardTuple forward_outputs(const ScaledCall& call, bool compute_preact, bool zeros) {
  const auto& input = call.inputs.input;
  const auto& sizes = call.call.sizes;
  const auto make = [&](c10::SymIntArrayRef shape, ScalarType dtype) {
    const auto options = input.options().dtype(dtype);
    auto out = at::empty_symint(shape, options);
    if (zeros && out.numel() > 0) {
      // Not zero_(), which float8_e8m0fnu lacks.
      out.view(kByte).zero_();
    }
    return out;
  };
  const auto none = [&] { return make({0}, input.scalar_type()); };
  ForwardTuple out = {
      make(input.sym_sizes(), input.scalar_type()), none(), none(), none(), none()};
  if (!call.weight_only() && call.lists.input.empty()) {
    std::get<1>(out) = make(input.sym_sizes(), kFloat8_e4m3fn);
    std::get<2>(out) = make(
        {sizes.num_tokens, moe::scale_count(*call.rule_a, sizes.model_dim)},
        call.rule_a->scale_dtype);
  }
  const auto rows = compute_preact ? sizes.num_rows : c10::SymInt(0);
  const auto preact_dtype = call.preact_dtype.value_or(input.scalar_type());
  std::get<3>(out) = make({rows, sizes.gated_dim}, preact_dtype);
  if (compute_preact && call.preact_dtype.has_value()) {
    std::get<4>(out) = make(
        {rows, moe::scale_count(moe::kPreactRule, sizes.gated_dim)}, kFloat8_e8m0fnu);
  }
  return out;
}

// Whether a kernel may read the weights as they are stored, without values of them.
bool reads_low_bit(const ScaledCall& call) {
  const auto& lists = call.lists;
  return (call.weight_only() || call.row_dtype() == kChar) && !call.is_swizzled() &&
      !lists.w_in.empty() && !lists.w_out.empty() &&
      (!call.call.inputs.w_up.defined() || !lists.w_up.empty()) &&
      moe_mlp_weight_only_stub.is_device_supported(kCPU);
}

// Without a backend: shapes only.
ForwardTuple forward(
    const char* op, const ScaledCall& call, std::optional<Backend> backend, bool compute_preact) {
  if (backend == Backend::Native) {
    check_mlp_values(op, call.inputs, call.call.sizes.num_rows.expect_int());
  }
  if (!backend.has_value() || !has_work(op, call.call)) {
    return forward_outputs(call, compute_preact, /*zeros=*/backend.has_value());
  }
  auto out = forward_outputs(call, /*compute_preact=*/false, /*zeros=*/false);
  auto& [output, input_data, input_scale, preact, preact_scale] = out;
  if (backend == Backend::Native && !compute_preact && reads_low_bit(call) &&
      moe_mlp_weight_only_stub(kCPU, call, output)) {
    return out;
  }
  const auto& input = call.inputs.input;
  const ScaledPass pass(call, *backend);
  Tensor x;
  if (call.weight_only()) {
    x = input.to(product_type(input));
  } else if (call.lists.input.empty()) {
    const auto q = pass.rounded(input, *call.rule_a, 1, {}, kFloat8_e4m3fn, /*codes=*/true);
    input_data = q.data;
    input_scale = q.scale;
    x = q.values;
  } else {
    x = pass.dequantized({call.lists.input[0], call.lists.input[1]}, *call.rule_a, 1);
  }
  const auto h = pass.project_in(x);
  output = pass.project_out(h);
  if (compute_preact && call.preact_dtype.has_value()) {
    const auto q = pass.rounded(
        pass.apart_from_limit(h), moe::kPreactRule, 1, {}, *call.preact_dtype,
        /*codes=*/true, /*values=*/false);
    preact = q.data;
    preact_scale = q.scale;
  } else if (compute_preact) {
    preact = h.to(input.scalar_type());
  }
  return out;
}

GradTuple backward(
    const char* op,
    const ScaledCall& call,
    const moe::ScaledSaved& saved,
    const std::array<bool, 7>& output_mask,
    bool hp_wgrad,
    std::optional<Backend> backend) {
  moe::check_saved(op, call, saved, output_mask);
  if (backend == Backend::Native) {
    check_mlp_values(op, call.inputs, call.call.sizes.num_rows.expect_int());
  }
  return make_gradients(
      call.inputs, output_mask, [&](const std::array<bool, 7>& wanted, Gradients& grads) {
        if (backend.has_value() && has_work(op, call.call)) {
          ScaledPass(call, *backend).backward(saved, wanted, hp_wgrad, grads);
        }
      });
}

} // namespace

// What the schemas of all entry points below have in common.
#define MOE_SCALED_OPERANDS                                                                \
  const std::optional<Tensor>&w_in, const std::optional<Tensor>&w_out, const Tensor &offs, \
      const std::optional<Tensor>&topk_weights, const std::optional<Tensor>&row_slots,     \
      const std::optional<Tensor>&slot_rows, const std::optional<Tensor>&b_in,             \
      const std::optional<Tensor>&b_out, const std::optional<Tensor>&w_up,                 \
      TensorList input_scaled, TensorList w_in_scaled, TensorList w_out_scaled,            \
      TensorList w_up_scaled
#define MOE_SCALED_KEYWORDS                                          \
  IntArrayRef recipe_a, IntArrayRef recipe_w, IntArrayRef swizzle_w, \
      std::optional<ScalarType> preact_dtype, bool hp_wgrad,         \
      std::string_view activation, bool gate_interleaved,            \
      std::optional<double> alpha, std::optional<double> limit
#define MOE_SCALED_CALL(op, rows)                                                              \
  ScaledCall(                                                                                  \
      op,                                                                                      \
      {rows, w_in.value_or(Tensor()), w_out.value_or(Tensor()), offs, topk_weights, row_slots, \
       slot_rows, b_in, b_out, w_up},                                                          \
      {input_scaled, w_in_scaled, w_out_scaled, w_up_scaled},                                  \
      {recipe_a, recipe_w, swizzle_w, preact_dtype},                                           \
      {activation, gate_interleaved, alpha, limit})

#define MOE_SCALED_FORWARD(name, backend)                                    \
  ForwardTuple name(                                                         \
      const Tensor& input,                                                   \
      MOE_SCALED_OPERANDS,                                                   \
      MOE_SCALED_KEYWORDS,                                                   \
      bool compute_preact) {                                                 \
    constexpr const char* op = "_moe_mlp_scaled";                            \
    return forward(op, MOE_SCALED_CALL(op, input), backend, compute_preact); \
  }

#define MOE_SCALED_BACKWARD(name, backend)                 \
  GradTuple name(                                          \
      const Tensor& grad_out,                              \
      MOE_SCALED_OPERANDS,                                 \
      const Tensor& input_data,                            \
      const Tensor& input_scale,                           \
      const Tensor& preact,                                \
      const Tensor& preact_scale,                          \
      std::array<bool, 7> output_mask,                     \
      MOE_SCALED_KEYWORDS) {                               \
    constexpr const char* op = "_moe_mlp_scaled_backward"; \
    moe::check_grad_out(op, grad_out);                     \
    return backward(                                       \
        op,                                                \
        MOE_SCALED_CALL(op, grad_out),                     \
        {input_data, input_scale, preact, preact_scale},   \
        output_mask,                                       \
        hp_wgrad,                                          \
        backend);                                          \
  }

MOE_SCALED_FORWARD(moe_mlp_scaled_composite, Backend::Composite)
MOE_SCALED_FORWARD(moe_mlp_scaled_cpu, Backend::Native)
MOE_SCALED_FORWARD(moe_mlp_scaled_meta, std::nullopt)
MOE_SCALED_BACKWARD(moe_mlp_scaled_backward_composite, Backend::Composite)
MOE_SCALED_BACKWARD(moe_mlp_scaled_backward_cpu, Backend::Native)
MOE_SCALED_BACKWARD(moe_mlp_scaled_backward_meta, std::nullopt)

#undef MOE_SCALED_BACKWARD
#undef MOE_SCALED_FORWARD
#undef MOE_SCALED_CALL
#undef MOE_SCALED_KEYWORDS
#undef MOE_SCALED_OPERANDS

} // namespace at::native
