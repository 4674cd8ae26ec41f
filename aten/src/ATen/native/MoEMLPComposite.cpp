// _moe_mlp of ATen ops, for every backend, and the Meta function. See MoEMLPUtils.h for the
// notation; MoEMLPBackward.cpp has the backward.
//
// Where the rules of _grouped_mm allow it, the matmuls are grouped ones. Then no shape
// depends on data, and nothing syncs with the host unless _grouped_mm does: its kernel for
// bfloat16 on sm_90 and later does not, its fallback for all else reads `offs`.
// Otherwise a loop over the experts reads `offs` on the host once.
//
// Each matmul rounds its result to the dtype of input. Biases are added, and router weights
// multiplied into the activation, in the accumulation type.
//
// Rows without a slot may be uninitialised, as _grouped_mm leaves those behind offs[-1]. H and
// all gradients set them to zero; combine_slots reads live rows only.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLPComposite.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/_moe_mlp_native.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#endif

namespace at::native {
namespace moe_composite {

using moe::Activation;

namespace {

// Whether the data starts at a multiple of 16 bytes.
bool starts_aligned(const Tensor& w) {
  return reinterpret_cast<uintptr_t>(w.const_data_ptr()) % 16 == 0;
}

} // namespace

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

bool has_work(const char* op, const moe::MLPCall& call) {
  const auto& [in, spec, sizes] = call;
  // Inside a fake kernel only device() is meta; is_meta() reads the key set, which keeps the
  // device that the fake tensor stands for.
  if (in.input.device().is_meta()) {
    return false;
  }
  const int64_t num_rows = sizes.num_rows.expect_int();
  if (in.offs.is_cpu()) {
    moe::check_offs(op, in.offs, num_rows);
  }
  return in.input.size(0) > 0 && in.offs.size(0) > 0 && num_rows > 0 &&
      sizes.top_k.expect_int() > 0;
}

Routing make_routing(
    const char* op,
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
      in.slot_rows.defined() ? in.slot_rows.contiguous() : row.unsqueeze(1);
  routing.slot_is_live = slot_row.ge(0).logical_and(slot_row.lt(live_rows));
  routing.slot_row = at::where(routing.slot_is_live, slot_row, 0).to(kLong);
  if (in.offs.is_cpu()) {
    routing.all_rows_live = *is_live.all().const_data_ptr<bool>();
    routing.all_slots_live = *routing.slot_is_live.all().const_data_ptr<bool>();
  }
  if (!use_grouped_mm) {
    const auto host_offs = routing.offs.cpu();
    // Those on CPU are checked by has_work.
    if (!in.offs.is_cpu()) {
      moe::check_offs(op, host_offs, num_rows);
    }
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

ScalarType accumulate_type(const Tensor& input) {
  return at::toOpMathType(input.scalar_type());
}

Tensor combine_slots(const Routing& routing, const Tensor& rows) {
  const auto top_k = routing.slot_row.size(1);
  auto result = at::empty({routing.slot_row.size(0), rows.size(1)}, rows.options());
  for_parts(result, top_k * rows.size(1), [&](int64_t begin, int64_t count) {
    auto slots =
        rows.index_select(0, routing.slot_row.narrow(0, begin, count).reshape({-1}))
            .view({count, top_k, rows.size(1)});
    if (!routing.all_slots_live) {
      const auto is_live = routing.slot_is_live.narrow(0, begin, count);
      slots = at::where(is_live.unsqueeze(2), slots, 0);
    }
    result.narrow(0, begin, count).copy_(top_k == 1 ? slots.squeeze(1) : slots.sum(1));
  });
  return result;
}

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

std::pair<Tensor, Tensor> clamp_gate(
    const Tensor& gate,
    const Tensor& up,
    const ActivationSpec& spec) {
  if (!spec.is_limited()) {
    return {gate, up};
  }
  return {gate.clamp_max(spec.limit), up.clamp(-spec.limit, spec.limit)};
}

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

Tensor weights_of_rows(const Tensor& topk_weights, const Routing& routing) {
  return topk_weights.reshape({-1})
      .index_select(0, routing.row_slot)
      .unsqueeze(1);
}

namespace {

// (R, G*F) = x W_in^T, of two matmuls with w_up
Tensor project_in(const moe::MLPInputs& in, const Routing& routing, const Tensor& x) {
  const auto h = multiply_experts(routing, x, in.w_in.transpose(1, 2));
  if (!in.w_up.defined()) {
    return h;
  }
  const auto up = multiply_experts(routing, x, in.w_up.transpose(1, 2));
  return at::cat({h, up}, 1);
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
      {input, w_in, w_out, offs, topk_weights, row_slots, slot_rows, b_in, b_out, w_up},
      {activation, gate_interleaved, alpha, limit});
  const auto& [in, spec, sizes] = call;
  if (!has_work("_moe_mlp", call)) {
    const auto kept_rows = compute_preact ? sizes.num_rows : c10::SymInt(0);
    return {
        at::zeros_symint(input.sym_sizes(), input.options()),
        at::zeros_symint({kept_rows, sizes.gated_dim}, input.options())};
  }

  // The ops below compute in the dtypes that they are given.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto dtype = input.scalar_type();
  const auto type = accumulate_type(input);
  const auto routing = make_routing(
      "_moe_mlp", in, sizes.num_rows.expect_int(), can_use_grouped_mm(in));
  // H of a row without a slot is that of token 0, until it is masked.
  auto h = project_in(in, routing, input.index_select(0, routing.row_token));
  if (in.b_in.defined()) {
    for_parts(h, h.size(1), [&](int64_t begin, int64_t count) {
      const auto experts = routing.row_expert.narrow(0, begin, count);
      h.narrow(0, begin, count).add_(in.b_in.index_select(0, experts));
    });
  }
  routing.mask_(h);
  const auto s = in.topk_weights.defined()
      ? weights_of_rows(in.topk_weights, routing)
      : Tensor();
  // F columns rather than D are weighted; those of float16 could leave its range.
  const bool weights_act = s.defined() && dtype != kHalf;
  auto act = at::empty({h.size(0), in.w_out.size(2)}, h.options());
  for_parts(act, act.size(1), [&](int64_t begin, int64_t count) {
    const auto a = activate(h.narrow(0, begin, count), spec);
    act.narrow(0, begin, count).copy_(weights_act ? a * s.narrow(0, begin, count) : a);
  });
  auto o = multiply_experts(routing, act, w_out.transpose(1, 2));
  act.reset();
  const bool weights_out = s.defined() && !weights_act;
  if (in.b_out.defined() || weights_out) {
    for_parts(o, o.size(1), [&](int64_t begin, int64_t count) {
      const auto part = [&](const Tensor& x) { return x.narrow(0, begin, count); };
      auto y = part(o).to(type);
      if (in.b_out.defined()) {
        const auto bias = in.b_out.index_select(0, part(routing.row_expert)).to(type);
        y = y + (weights_act ? bias * part(s) : bias);
      }
      part(o).copy_(weights_out ? y * part(s) : y);
    });
  }
  return {
      combine_slots(routing, o),
      compute_preact ? h : at::empty({0, h.size(1)}, input.options())};
}

// Checks the arguments and allocates the results. Kernels in Python call the Meta key to check a
// call, with tensors on their device. Without this function the composite would compute there.
static std::tuple<Tensor, Tensor> moe_mlp_meta(
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
      {input, w_in, w_out, offs, topk_weights, row_slots, slot_rows, b_in, b_out, w_up},
      {activation, gate_interleaved, alpha, limit});
  const auto kept_rows = compute_preact ? call.sizes.num_rows : c10::SymInt(0);
  return {
      at::empty_symint(input.sym_sizes(), input.options()),
      at::empty_symint({kept_rows, call.sizes.gated_dim}, input.options())};
}

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("_moe_mlp", TORCH_FN(moe_mlp_meta));
}

} // namespace at::native
