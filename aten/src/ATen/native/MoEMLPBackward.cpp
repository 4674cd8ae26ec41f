// _moe_mlp_backward of ATen ops, for every backend, and the Meta function. MoEMLPBackward.h has
// what low precision needs as well.
//
// No matmul of the forward runs again where H was kept: the activation is computed again from H,
// and the gradient of a router weight is <dO W_out, A>.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLPBackward.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torch/library.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/_moe_mlp_backward_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp2.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#endif

namespace at::native {
namespace moe_composite {

using moe::Activation;

Tensor reduce_experts(
    const Routing& routing,
    const Tensor& lhs,
    const Tensor& rhs) {
  if (routing.ends.empty()) {
    return at::_grouped_mm(lhs.t(), rhs, routing.offs);
  }
  const auto num_experts = static_cast<int64_t>(routing.ends.size());
  auto result =
      at::zeros({num_experts, lhs.size(1), rhs.size(1)}, lhs.options());
  int64_t begin = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t count = routing.ends[e] - begin;
    if (count > 0) {
      auto out = result.select(0, e);
      at::mm_out(
          out, lhs.narrow(0, begin, count).t(), rhs.narrow(0, begin, count));
    }
    begin = routing.ends[e];
  }
  return result;
}

// In a fixed order, unlike index_add. A loop over the experts has their rows: sum adds them
// in a tree, a matmul one after the other. As a grouped matmul: 8 equal columns meet the
// 16-byte rule. A copy, as the result must not keep the other 7 alive.
Tensor sum_experts(const Routing& routing, const Tensor& rows) {
  if (routing.ends.empty()) {
    const auto ones = at::ones({rows.size(0), 8}, rows.options());
    return reduce_experts(routing, ones, rows)
        .select(1, 0)
        .clone(MemoryFormat::Contiguous);
  }
  const auto num_experts = static_cast<int64_t>(routing.ends.size());
  auto result = at::zeros({num_experts, rows.size(1)}, rows.options());
  int64_t begin = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t count = routing.ends[e] - begin;
    if (count > 0) {
      auto out = result.select(0, e);
      at::sum_out(out, rows.narrow(0, begin, count), /*dim=*/0);
    }
    begin = routing.ends[e];
  }
  return result;
}

Tensor with_strides_of(const Tensor& operand, const Tensor& grad) {
  const auto strides =
      at::infer_dense_strides(operand.sizes(), operand.strides());
  for (const auto dim : c10::irange(grad.dim())) {
    if (grad.size(dim) != 1 && grad.stride(dim) != strides[dim]) {
      return at::empty_like(operand).copy_(grad);
    }
  }
  return grad;
}

Tensor slots_of_rows(const Tensor& values, const Routing& routing) {
  const auto slots = values.index_select(0, routing.slot_row.reshape({-1}));
  return at::where(routing.slot_is_live, slots.view(routing.slot_row.sizes()), 0);
}

namespace {

// Gradients of the clamped gate and up (undefined without a gate) from that of act(H).
std::pair<Tensor, Tensor> activate_backward(
    const Tensor& gate,
    const Tensor& up,
    const Tensor& grad,
    const ActivationSpec& spec) {
  switch (spec.kind) {
    case Activation::SwiGLU:
      return {at::silu_backward(grad * up, gate), grad * at::silu(gate)};
    case Activation::GeGLU:
      return {at::gelu_backward(grad * up, gate), grad * at::gelu(gate)};
    case Activation::GeGLUTanh:
      return {
          at::gelu_backward(grad * up, gate, "tanh"),
          grad * at::gelu(gate, "tanh")};
    case Activation::ReGLU:
      return {at::threshold_backward(grad * up, gate, 0), grad * gate.relu()};
    case Activation::SwiGLUOAI: {
      const auto s = (gate * spec.alpha).sigmoid();
      // Not gate * alpha first, which overflows where s is 0.
      const auto g_s = gate * s;
      return {
          grad * (up + 1) * (s + g_s * spec.alpha * (1 - s)), grad * g_s};
    }
    case Activation::SiLU:
      return {at::silu_backward(grad, gate), Tensor()};
    case Activation::GELU:
      return {at::gelu_backward(grad, gate), Tensor()};
    case Activation::ReLU:
      return {at::threshold_backward(grad, gate, 0), Tensor()};
    case Activation::ReLU2:
      return {at::threshold_backward(grad * gate * 2, gate, 0), Tensor()};
  }
  TORCH_INTERNAL_ASSERT(false, "unhandled activation");
}

} // namespace

Tensor preact_grad(
    const Tensor& preact,
    const Tensor& grad,
    const ActivationSpec& spec) {
  const auto [raw_gate, raw_up] = split_gate(preact, spec);
  const auto [gate, up] = clamp_gate(raw_gate, raw_up, spec);
  auto [grad_gate, grad_up] = activate_backward(gate, up, grad, spec);
  const auto dtype = preact.scalar_type();
  if (!spec.is_gated) {
    return grad_gate.to(dtype);
  }
  if (spec.is_limited()) {
    // As the backward of clamp: nothing at the limit either.
    grad_gate = grad_gate.masked_fill(raw_gate.ge(spec.limit), 0);
    grad_up = grad_up.masked_fill(raw_up.abs().ge(spec.limit), 0);
  }
  grad_gate = grad_gate.to(dtype);
  grad_up = grad_up.to(dtype);
  return spec.interleaved ? at::stack({grad_gate, grad_up}, 2).flatten(1)
                          : at::cat({grad_gate, grad_up}, 1);
}

namespace {

// (R, D) = dH W_in
Tensor project_in_backward(
    const moe::MLPInputs& in,
    const Routing& routing,
    const Tensor& grad_gate,
    const Tensor& grad_up) {
  auto dx = multiply_experts(routing, grad_gate, in.w_in);
  if (in.w_up.defined()) {
    dx.add_(multiply_experts(routing, grad_up, in.w_up));
  }
  return dx;
}

// Gradients of w_in, w_up, b_in and input, which all need dH.
void backward_of_preact(
    const moe::MLPInputs& in,
    const Routing& routing,
    const Tensor& grad_preact,
    const std::array<bool, 7>& wanted,
    Gradients& grads) {
  // The columns of w_in, which with w_up are the first half.
  const int64_t columns = in.w_in.size(1);
  const auto grad_gate = grad_preact.narrow(1, 0, columns);
  const auto grad_up =
      grad_preact.narrow(1, columns, grad_preact.size(1) - columns);
  if (wanted[0]) {
    grads[0] = combine_slots(
        routing, project_in_backward(in, routing, grad_gate, grad_up));
  }
  if (wanted[1] || wanted[6]) {
    const auto x = routing.mask_(in.input.index_select(0, routing.row_token));
    if (wanted[1]) {
      grads[1] =
          with_strides_of(in.w_in, reduce_experts(routing, grad_gate, x));
    }
    if (wanted[6]) {
      grads[6] = with_strides_of(in.w_up, reduce_experts(routing, grad_up, x));
    }
  }
  if (wanted[4]) {
    grads[4] = sum_experts(routing, grad_preact);
  }
}

// Splits float16's router weights `s` (R, 1) into a power of two, which is returned and which dO is
// multiplied by, and the rest: no product is more than twice the gradient that it is for, as
// where autograd weights the experts' outputs. Rows of dO below 1 are not made smaller, which
// would cost them bits.
Tensor split_scale(Tensor& s, const Tensor& dy) {
  const auto [mantissa, exponent] = at::frexp(s);
  const auto largest = at::linalg_vector_norm(dy, INFINITY, /*dim=*/1, /*keepdim=*/true);
  const auto smallest = std::get<1>(at::frexp(largest)).neg().clamp_max(0);
  // The smallest power of two that is not below s.
  const auto wanted = exponent - mantissa.abs().eq(0.5).to(kInt);
  const auto scale = at::exp2(at::maximum(wanted, smallest).clamp_max(15).to(s.scalar_type()));
  s = s / scale;
  return scale;
}

void backward_of_live_rows(
    const moe::MLPInputs& in,
    const Routing& routing,
    const ActivationSpec& spec,
    const Tensor& grad_out,
    const Tensor& preact,
    const std::array<bool, 7>& wanted,
    Gradients& grads) {
  const auto dtype = in.input.scalar_type();
  const auto type = accumulate_type(in.input);
  auto dy = routing.mask_(grad_out.index_select(0, routing.row_token));
  const auto multiply_dy = [&](const Tensor& factor) {
    for_parts(dy, dy.size(1), [&](int64_t begin, int64_t count) {
      dy.narrow(0, begin, count).mul_(factor.narrow(0, begin, count));
    });
  };
  Tensor s, scale;
  if (in.topk_weights.defined()) {
    // Rows without a slot would take the weight of slot 0, which may be infinite.
    s = routing.mask_(weights_of_rows(in.topk_weights, routing)).to(type);
    if (dtype == kHalf && dy.numel() > 0) {
      scale = split_scale(s, dy);
      multiply_dy(scale);
    }
  }
  // dA' = dO W_out, of which both dS and dH are made.
  const bool wants_preact_grad =
      wanted[0] || wanted[1] || wanted[4] || wanted[6];
  auto grad_act = wants_preact_grad || wanted[3]
      ? routing.mask_(multiply_experts(routing, dy, in.w_out))
      : Tensor();
  const auto options = preact.options();
  const int64_t num_rows = preact.size(0), hidden = in.w_out.size(2);
  auto weighted_act = at::empty({wanted[2] ? num_rows : 0, hidden}, options);
  auto row_grad = at::empty({wanted[3] ? num_rows : 0}, options.dtype(type));
  const auto grad_preact =
      at::empty({wants_preact_grad ? num_rows : 0, preact.size(1)}, options);
  for_parts(preact, hidden, [&](int64_t begin, int64_t count) {
    const auto part = [&](const Tensor& x) { return x.narrow(0, begin, count); };
    const auto weighted = [&](const Tensor& x) { return s.defined() ? x * part(s) : x; };
    const auto h = routing.all_rows_live
        ? part(preact)
        : at::where(part(routing.row_is_live), part(preact), 0);
    const auto act = wanted[2] || wanted[3] ? activate(h, spec).to(dtype) : Tensor();
    if (wanted[2]) {
      part(weighted_act).copy_(weighted(act));
    }
    const auto grad = grad_act.defined() ? part(grad_act).to(type) : Tensor();
    if (wanted[3]) {
      part(row_grad).copy_((grad * act).sum(1));
      if (in.b_out.defined()) {
        const auto bias = in.b_out.index_select(0, part(routing.row_expert));
        part(row_grad).add_((part(dy).to(type) * bias).sum(1));
      }
    }
    if (wants_preact_grad) {
      part(grad_preact).copy_(preact_grad(h, weighted(grad), spec));
    }
  });
  grad_act.reset();
  if (wanted[2]) {
    grads[2] = with_strides_of(in.w_out, reduce_experts(routing, dy, weighted_act));
  }
  weighted_act.reset();
  if (wanted[5]) {
    if (s.defined()) {
      multiply_dy(s);
    }
    grads[5] = sum_experts(routing, dy);
  }
  dy.reset();
  if (wanted[3]) {
    if (scale.defined()) {
      row_grad.div_(scale.squeeze(1));
    }
    grads[3] = slots_of_rows(row_grad, routing).to(in.topk_weights.scalar_type());
  }
  if (wants_preact_grad) {
    backward_of_preact(in, routing, grad_preact, wanted, grads);
  }
}

} // namespace
} // namespace moe_composite

using namespace moe_composite;

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
moe_mlp_backward(
    const Tensor& grad_out,
    const Tensor& input,
    const Tensor& w_in,
    const Tensor& w_out,
    const Tensor& offs,
    const std::optional<Tensor>& topk_weights,
    const std::optional<Tensor>& row_slots,
    const std::optional<Tensor>& slot_rows,
    const std::optional<Tensor>& b_in,
    const std::optional<Tensor>& b_out,
    const std::optional<Tensor>& w_up,
    const Tensor& preact,
    std::array<bool, 7> output_mask,
    std::string_view activation,
    bool gate_interleaved,
    std::optional<double> alpha,
    std::optional<double> limit) {
  constexpr const char* op = "_moe_mlp_backward";
  const moe::MLPCall call(
      op,
      {input, w_in, w_out, offs, topk_weights, row_slots, slot_rows, b_in, b_out, w_up},
      {activation, gate_interleaved, alpha, limit});
  call.check_backward(op, grad_out, preact);
  const auto& in = call.inputs;
  // The ops below compute in the dtypes that they are given.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return make_gradients(
      in, output_mask, [&](const std::array<bool, 7>& wanted, Gradients& grads) {
        if (has_work(op, call)) {
          const auto routing =
              make_routing(op, in, call.sizes.num_rows.expect_int(), can_use_grouped_mm(in));
          backward_of_live_rows(
              in, routing, call.activation, grad_out, preact, wanted, grads);
        }
      });
}

// See moe_mlp_meta.
static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
moe_mlp_backward_meta(
    const Tensor& grad_out,
    const Tensor& input,
    const Tensor& w_in,
    const Tensor& w_out,
    const Tensor& offs,
    const std::optional<Tensor>& topk_weights,
    const std::optional<Tensor>& row_slots,
    const std::optional<Tensor>& slot_rows,
    const std::optional<Tensor>& b_in,
    const std::optional<Tensor>& b_out,
    const std::optional<Tensor>& w_up,
    const Tensor& preact,
    std::array<bool, 7> output_mask,
    std::string_view activation,
    bool gate_interleaved,
    std::optional<double> alpha,
    std::optional<double> limit) {
  constexpr const char* op = "_moe_mlp_backward";
  const moe::MLPCall call(
      op,
      {input, w_in, w_out, offs, topk_weights, row_slots, slot_rows, b_in, b_out, w_up},
      {activation, gate_interleaved, alpha, limit});
  call.check_backward(op, grad_out, preact);
  return make_gradients(
      call.inputs, output_mask, [](const std::array<bool, 7>&, Gradients&) {});
}

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("_moe_mlp_backward", TORCH_FN(moe_mlp_backward_meta));
}

} // namespace at::native
