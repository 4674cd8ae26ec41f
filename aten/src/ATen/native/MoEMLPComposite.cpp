// _moe_mlp for every backend that has no kernel of its own, from ATen ops. See
// MoEMLPUtils.h for the notation.
//
// Where the rules of _grouped_mm allow it, the matmuls are grouped ones: then
// nothing here syncs with the host and no shape depends on data, so the op can
// be captured in a CUDA graph. Otherwise a loop over the experts reads `offs`
// on the host: one sync.
//
// A row without a slot is set to zero before each use, as _grouped_mm leaves
// the rows behind offs[-1] uninitialised.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLPComposite.h>
#include <c10/util/irange.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/_moe_mlp_backward_native.h>
#include <ATen/ops/_moe_mlp_native.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/searchsorted.h>
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
namespace {

using moe::Activation;

// Whether the data starts at a multiple of 16 bytes. Fake tensors have no address: there
// it is an offset into a storage that an allocator would have aligned.
bool starts_aligned(const Tensor& w) {
  if (!w.has_storage() || w.storage().device_type() == kMeta) {
    return w.storage_offset() * w.element_size() % 16 == 0;
  }
  return reinterpret_cast<uintptr_t>(w.const_data_ptr()) % 16 == 0;
}

bool can_use_grouped_mm(const moe::MLPInputs& in) {
  if (in.input.scalar_type() == kDouble) {
    return false;
  }
  const int64_t alignment = 16 / in.input.element_size();
  const auto aligned = [&](const Tensor& w) {
    const bool row_major = w.stride(2) == 1 && w.stride(1) >= w.size(2) &&
        w.stride(1) % alignment == 0;
    const bool col_major = w.stride(1) == 1 && w.stride(2) >= w.size(1) &&
        w.stride(2) % alignment == 0;
    return w.numel() > 0 && w.size(1) % alignment == 0 &&
        w.size(2) % alignment == 0 && (row_major || col_major) &&
        w.stride(0) % alignment == 0 && starts_aligned(w);
  };
  return aligned(in.w_in) && aligned(in.w_out) &&
      (!in.w_up.defined() || aligned(in.w_up));
}

} // namespace

Routing make_routing(
    const moe::MLPInputs& in,
    int64_t num_rows,
    bool use_grouped_mm) {
  const int64_t num_experts = in.offs.size(0);
  const auto index_options = in.offs.options();
  Routing routing;
  routing.offs = in.offs.contiguous();
  const auto row = at::arange(num_rows, index_options);
  const auto live_rows = routing.offs.narrow(0, num_experts - 1, 1);
  const auto slot = in.row_slots.defined() ? in.row_slots : row;
  const auto is_live = slot.ge(0).logical_and(row.lt(live_rows));
  const int64_t top_k = in.slot_rows.defined() ? in.slot_rows.size(1) : 1;
  routing.row_is_live = is_live.unsqueeze(1);
  routing.row_slot = at::where(is_live, slot, 0).to(kLong);
  routing.row_token = routing.row_slot.floor_divide(top_k);
  routing.row_expert =
      at::searchsorted(routing.offs, row, /*out_int32=*/false, /*right=*/true)
          .clamp_max(num_experts - 1);
  const auto slot_row =
      in.slot_rows.defined() ? in.slot_rows : row.unsqueeze(1);
  routing.slot_is_live = slot_row.ge(0).logical_and(slot_row.lt(live_rows));
  routing.slot_row = at::where(routing.slot_is_live, slot_row, 0).to(kLong);
  if (!use_grouped_mm) {
    const auto host_offs = routing.offs.cpu();
    const auto* data = host_offs.const_data_ptr<int32_t>();
    routing.ends.assign(data, data + num_experts);
  }
  return routing;
}

Tensor multiply_experts(
    const Routing& routing,
    const Tensor& rows,
    const Tensor& w) {
  if (routing.ends.empty()) {
    return at::_grouped_mm(rows, w, routing.offs);
  }
  auto result = at::zeros({rows.size(0), w.size(2)}, rows.options());
  int64_t begin = 0;
  for (size_t e = 0; e < routing.ends.size(); ++e) {
    const int64_t count = routing.ends[e] - begin;
    if (count > 0) {
      auto out = result.narrow(0, begin, count);
      at::mm_out(
          out,
          rows.narrow(0, begin, count),
          w.select(0, static_cast<int64_t>(e)));
    }
    begin = routing.ends[e];
  }
  return result;
}

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

ScalarType accumulate_type(const Tensor& input) {
  return at::toOpMathType(input.scalar_type());
}

Tensor combine_slots(const Routing& routing, const Tensor& rows) {
  const auto type = accumulate_type(rows);
  auto sum = at::zeros(
      {routing.slot_row.size(0), rows.size(1)}, rows.options().dtype(type));
  for (int64_t k = 0; k < routing.slot_row.size(1); ++k) {
    const auto values =
        rows.index_select(0, routing.slot_row.select(1, k)).to(type);
    sum.add_(
        at::where(routing.slot_is_live.select(1, k).unsqueeze(1), values, 0));
  }
  return sum.to(rows.scalar_type());
}

namespace {

// Gate and up (R, F) of H (R, G*F) in the accumulation type. Without a gate,
// `up` is undefined.
std::pair<Tensor, Tensor> split_gate(
    const Tensor& preact,
    const ActivationSpec& spec) {
  const auto h = preact.to(accumulate_type(preact));
  if (!spec.is_gated) {
    return {h, Tensor()};
  }
  if (spec.interleaved) {
    const auto pairs = h.unflatten(1, {-1, 2});
    return {pairs.select(2, 0), pairs.select(2, 1)};
  }
  const int64_t hidden = h.size(1) / 2;
  return {h.narrow(1, 0, hidden), h.narrow(1, hidden, hidden)};
}

// Gate and up as the activation sees them: clamped where it has a limit.
std::pair<Tensor, Tensor> clamp_gate(
    const Tensor& gate,
    const Tensor& up,
    const ActivationSpec& spec) {
  if (!spec.is_limited()) {
    return {gate, up};
  }
  return {gate.clamp_max(spec.limit), up.clamp(-spec.limit, spec.limit)};
}

} // namespace

Tensor activate(const Tensor& preact, const ActivationSpec& spec) {
  const auto [raw_gate, raw_up] = split_gate(preact, spec);
  const auto [gate, up] = clamp_gate(raw_gate, raw_up, spec);
  switch (spec.kind) {
    case Activation::SwiGLU:
      return at::silu(gate) * up;
    case Activation::GeGLU:
      return at::gelu(gate) * up;
    case Activation::GeGLUTanh:
      return at::gelu(gate, "tanh") * up;
    case Activation::ReGLU:
      return gate.relu() * up;
    case Activation::SwiGLUOAI:
      return gate * (gate * spec.alpha).sigmoid() * (up + 1);
    case Activation::SiLU:
      return at::silu(gate);
    case Activation::GELU:
      return at::gelu(gate);
    case Activation::ReLU:
      return gate.relu();
    case Activation::ReLU2:
      return gate.relu().square();
  }
  TORCH_INTERNAL_ASSERT(false, "unhandled activation");
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
  if (!spec.is_gated) {
    return grad_gate;
  }
  if (spec.is_limited()) {
    // As the backward of clamp: nothing at the limit either.
    grad_gate = grad_gate.masked_fill(raw_gate.ge(spec.limit), 0);
    grad_up = grad_up.masked_fill(raw_up.abs().ge(spec.limit), 0);
  }
  return spec.interleaved ? at::stack({grad_gate, grad_up}, 2).flatten(1)
                          : at::cat({grad_gate, grad_up}, 1);
}

Tensor weights_of_rows(const Tensor& topk_weights, const Routing& routing) {
  return topk_weights.reshape({-1})
      .index_select(0, routing.row_slot)
      .unsqueeze(1);
}

namespace {

bool has_work(const moe::MLPInputs& in, const moe::MLPSizes& sizes) {
  return in.input.size(0) > 0 && in.offs.size(0) > 0 &&
      sizes.num_rows.expect_int() > 0 && sizes.top_k.expect_int() > 0;
}

using Gradients = std::array<Tensor, 7>;

// (R, G*F) = x W_in^T, of two matmuls with w_up
Tensor project_in(const moe::MLPInputs& in, const Routing& routing, const Tensor& x) {
  const auto h = multiply_experts(routing, x, in.w_in.transpose(1, 2));
  if (!in.w_up.defined()) {
    return h;
  }
  const auto up = multiply_experts(routing, x, in.w_up.transpose(1, 2));
  return at::cat({h, up}, 1);
}

// (R, D) = dH W_in
Tensor project_in_backward(
    const moe::MLPInputs& in,
    const Routing& routing,
    const Tensor& grad_gate,
    const Tensor& grad_up) {
  const auto dx = multiply_experts(routing, grad_gate, in.w_in);
  if (!in.w_up.defined()) {
    return dx;
  }
  const auto type = accumulate_type(dx);
  const auto dx_up = multiply_experts(routing, grad_up, in.w_up);
  return (dx.to(type) + dx_up).to(dx.scalar_type());
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
    const auto x = routing.masked(in.input.index_select(0, routing.row_token));
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
  const auto dy = routing.masked(grad_out.index_select(0, routing.row_token));
  const auto h = routing.masked(preact);
  const auto act = activate(h, spec).to(dtype);
  // Rows without a slot would take the weight of slot 0, which may be infinite.
  const auto s = in.topk_weights.defined()
      ? routing.masked(weights_of_rows(in.topk_weights, routing)).to(type)
      : at::ones({1, 1}, in.input.options().dtype(type));
  if (wanted[2]) {
    grads[2] = with_strides_of(
        in.w_out, reduce_experts(routing, dy, (act * s).to(dtype)));
  }
  if (wanted[5]) {
    grads[5] = sum_experts(routing, (dy * s).to(dtype));
  }

  const bool wants_preact_grad =
      wanted[0] || wanted[1] || wanted[4] || wanted[6];
  if (!wants_preact_grad && !wanted[3]) {
    return;
  }
  // dA' = dO W_out, of which both dS and dH are made.
  const auto grad_act =
      routing.masked(multiply_experts(routing, dy, in.w_out)).to(type);
  if (wanted[3]) {
    auto row_grad = (grad_act * act).sum(1);
    if (in.b_out.defined()) {
      row_grad = row_grad +
          (dy.to(type) * in.b_out.index_select(0, routing.row_expert)).sum(1);
    }
    const auto slot_grad =
        row_grad.index_select(0, routing.slot_row.reshape({-1}))
            .view(routing.slot_row.sizes());
    grads[3] = at::where(routing.slot_is_live, slot_grad, 0)
                   .to(in.topk_weights.scalar_type());
  }
  if (wants_preact_grad) {
    const auto grad_preact =
        routing.masked(preact_grad(h, grad_act * s, spec)).to(dtype);
    backward_of_preact(in, routing, grad_preact, wanted, grads);
  }
}

} // namespace
} // namespace moe_composite

using namespace moe_composite;

std::tuple<Tensor, Tensor> moe_mlp_composite(
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
    std::string_view activation,
    bool gate_interleaved,
    std::optional<double> alpha,
    std::optional<double> limit,
    bool compute_preact) {
  const moe::MLPCall call(
      "_moe_mlp",
      {input,
       w_in,
       w_out,
       offs,
       topk_weights,
       row_slots,
       slot_rows,
       b_in,
       b_out,
       w_up},
      activation,
      gate_interleaved,
      alpha,
      limit);
  const auto& [in, spec, sizes] = call;
  const int64_t num_rows = sizes.num_rows.expect_int();
  const int64_t gated_dim = sizes.gated_dim.expect_int();
  if (!has_work(in, sizes)) {
    return {
        at::zeros(input.sizes(), input.options()),
        at::zeros({compute_preact ? num_rows : 0, gated_dim}, input.options())};
  }

  const auto dtype = input.scalar_type();
  const auto type = accumulate_type(input);
  const auto routing = make_routing(in, num_rows, can_use_grouped_mm(in));
  const auto x = routing.masked(input.index_select(0, routing.row_token));
  auto h = project_in(in, routing, x);
  if (in.b_in.defined()) {
    h = (h.to(type) + in.b_in.index_select(0, routing.row_expert)).to(dtype);
  }
  h = routing.masked(h);
  const auto act = activate(h, spec).to(dtype);
  auto o = multiply_experts(routing, act, w_out.transpose(1, 2)).to(type);
  if (in.b_out.defined()) {
    o = o + in.b_out.index_select(0, routing.row_expert);
  }
  if (in.topk_weights.defined()) {
    o = o * weights_of_rows(in.topk_weights, routing);
  }
  return {
      combine_slots(routing, o.to(dtype)),
      compute_preact ? h : at::empty({0, gated_dim}, input.options())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
moe_mlp_backward_composite(
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
      {input,
       w_in,
       w_out,
       offs,
       topk_weights,
       row_slots,
       slot_rows,
       b_in,
       b_out,
       w_up},
      activation,
      gate_interleaved,
      alpha,
      limit);
  moe::check_mlp_backward_inputs(op, call, grad_out, preact);
  const auto& [in, spec, sizes] = call;
  const Gradients operands = {
      input, w_in, w_out, in.topk_weights, in.b_in, in.b_out, in.w_up};
  std::array<bool, 7> wanted{};
  for (size_t i = 0; i < operands.size(); ++i) {
    wanted[i] = output_mask[i] && operands[i].defined();
  }
  Gradients grads;
  if (has_work(in, sizes)) {
    const auto routing = make_routing(
        in, sizes.num_rows.expect_int(), can_use_grouped_mm(in));
    backward_of_live_rows(in, routing, spec, grad_out, preact, wanted, grads);
  }
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!wanted[i]) {
      // Defined but empty, see defined_grads in MoEMLP.cpp.
      grads[i] = at::empty({0}, input.options());
    } else if (!grads[i].defined()) {
      const bool is_weight = i == 1 || i == 2 || i == 6;
      grads[i] = at::zeros_like(
          operands[i],
          is_weight ? MemoryFormat::Preserve : MemoryFormat::Contiguous);
    }
  }
  return std::tuple_cat(grads);
}

} // namespace at::native
