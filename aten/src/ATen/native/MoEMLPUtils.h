#pragma once

// Rules of _moe_mlp and _moe_mlp_backward: activation names, and the one
// validator of shapes, dtypes and devices. See MoEUtils.h for the notation;
// D model dim, F expert hidden dim, G = 2 for gated activations else 1.

#include <ATen/native/MoEUtils.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

namespace at::native::moe {

enum class Activation : uint8_t {
  SwiGLU,
  GeGLU,
  GeGLUTanh,
  ReGLU,
  SwiGLUOAI,
  SiLU,
  GELU,
  ReLU,
  ReLU2,
};

struct ActivationName {
  std::string_view name;
  Activation kind;
  bool is_gated;
  // Takes `limit`: the gate is clamped to at most that, the up projection to
  // [-limit, limit].
  bool has_limit;
};

constexpr std::array<ActivationName, 9> kActivations = {{
    {"swiglu", Activation::SwiGLU, true, true},
    {"geglu", Activation::GeGLU, true, true},
    {"geglu_tanh", Activation::GeGLUTanh, true, false},
    {"reglu", Activation::ReGLU, true, false},
    {"swiglu_oai", Activation::SwiGLUOAI, true, true},
    {"silu", Activation::SiLU, false, false},
    {"gelu", Activation::GELU, false, false},
    {"relu", Activation::ReLU, false, false},
    {"relu2", Activation::ReLU2, false, false},
}};

// The entry of `kind`; the table is in the order of the enum.
constexpr const ActivationName& activation_name(Activation kind) {
  return kActivations[static_cast<size_t>(kind)];
}

struct ActivationSpec {
  Activation kind;
  bool is_gated;
  // Gate and up alternate (H[:, 0::2], H[:, 1::2]) instead of being two halves.
  bool interleaved;
  // Only swiglu_oai reads it.
  double alpha;
  // Of activations with has_limit; infinity where nothing is clamped.
  double limit;

  bool is_limited() const {
    return limit < std::numeric_limits<double>::infinity();
  }

  int64_t gates() const {
    return is_gated ? 2 : 1;
  }
};

// The names of those entries of the table for which `holds`, with commas.
template <typename Predicate>
std::string activation_names(const Predicate& holds) {
  std::ostringstream names;
  for (const auto& entry : kActivations) {
    if (holds(entry)) {
      names << (names.tellp() > 0 ? ", " : "") << entry.name;
    }
  }
  return names.str();
}

inline ActivationSpec parse_activation(
    const char* op,
    std::string_view activation,
    bool gate_interleaved,
    std::optional<double> alpha,
    std::optional<double> limit) {
  const ActivationName* found = nullptr;
  for (const auto& entry : kActivations) {
    if (entry.name == activation) {
      found = &entry;
    }
  }
  TORCH_CHECK_VALUE(
      found != nullptr,
      op,
      ": activation must be one of ",
      activation_names([](const ActivationName&) { return true; }),
      ", got '",
      activation,
      "'");
  TORCH_CHECK_VALUE(
      found->is_gated || !gate_interleaved,
      op,
      ": gate_interleaved=True needs an activation with a gate, got '",
      activation,
      "'");
  const bool is_oai = found->kind == Activation::SwiGLUOAI;
  TORCH_CHECK_VALUE(
      is_oai || !alpha.has_value(),
      op,
      ": alpha is an argument of activation 'swiglu_oai' only, got alpha=",
      alpha.value_or(0),
      " with '",
      activation,
      "'");
  TORCH_CHECK_VALUE(
      found->has_limit || !limit.has_value(),
      op,
      ": limit is an argument of activations ",
      activation_names([](const ActivationName& a) { return a.has_limit; }),
      " only, got limit=",
      limit.value_or(0),
      " with '",
      activation,
      "'");
  const double limit_value = limit.value_or(
      is_oai ? 7.0 : std::numeric_limits<double>::infinity());
  TORCH_CHECK_VALUE(
      limit_value > 0, op, ": limit must be > 0, got ", limit_value);
  return {
      found->kind,
      found->is_gated,
      gate_interleaved,
      alpha.value_or(1.702),
      limit_value};
}

// Tensor operands. Absent optional tensors are undefined tensors: this is also
// how autograd hands a saved `Tensor?` to the backward.
struct MLPInputs {
  Tensor input; // (T, D)
  Tensor w_in; // (E, G*F, D), or with w_up the gate alone, (E, F, D)
  Tensor w_out; // (E, D, F)
  Tensor offs; // (E) int32
  Tensor topk_weights; // (T, K)
  Tensor row_slots; // (R) int32
  Tensor slot_rows; // (T, K) int32
  Tensor b_in; // (E, G*F), gate before up also with w_up
  Tensor b_out; // (E, D)
  Tensor w_up; // (E, F, D)

  MLPInputs(
      const Tensor& input,
      const Tensor& w_in,
      const Tensor& w_out,
      const Tensor& offs,
      const std::optional<Tensor>& topk_weights,
      const std::optional<Tensor>& row_slots,
      const std::optional<Tensor>& slot_rows,
      const std::optional<Tensor>& b_in,
      const std::optional<Tensor>& b_out,
      const std::optional<Tensor>& w_up)
      : input(input),
        w_in(w_in),
        w_out(w_out),
        offs(offs),
        topk_weights(topk_weights.value_or(Tensor())),
        row_slots(row_slots.value_or(Tensor())),
        slot_rows(slot_rows.value_or(Tensor())),
        b_in(b_in.value_or(Tensor())),
        b_out(b_out.value_or(Tensor())),
        w_up(w_up.value_or(Tensor())) {}
};

struct MLPSizes {
  c10::SymInt num_tokens; // T
  c10::SymInt model_dim; // D
  c10::SymInt hidden_dim; // F
  c10::SymInt gated_dim; // G*F
  c10::SymInt num_experts; // E
  c10::SymInt top_k; // K
  c10::SymInt num_rows; // R
};

inline void check_mlp_dtypes(const char* op, const MLPInputs& in) {
  const auto dtype = in.input.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == kDouble || dtype == kFloat || dtype == kBFloat16 ||
          dtype == kHalf,
      op,
      ": input must have dtype float64, float32, bfloat16 or float16, got ",
      dtype_name(dtype));
  const auto same_as_input = [&](const char* name, const Tensor& tensor) {
    TORCH_CHECK_TYPE(
        !tensor.defined() || tensor.scalar_type() == dtype,
        op,
        ": ",
        name,
        " must have the dtype of input, ",
        dtype_name(dtype),
        ", got ",
        dtype_name(tensor.scalar_type()));
  };
  same_as_input("w_in", in.w_in);
  same_as_input("w_out", in.w_out);
  same_as_input("b_in", in.b_in);
  same_as_input("b_out", in.b_out);
  same_as_input("w_up", in.w_up);
  const auto is_int32 = [&](const char* name, const Tensor& tensor) {
    TORCH_CHECK_TYPE(
        !tensor.defined() || tensor.scalar_type() == kInt,
        op,
        ": ",
        name,
        " must have dtype int32, got ",
        dtype_name(tensor.scalar_type()));
  };
  is_int32("offs", in.offs);
  is_int32("row_slots", in.row_slots);
  is_int32("slot_rows", in.slot_rows);
  TORCH_CHECK_TYPE(
      !in.topk_weights.defined() || in.topk_weights.scalar_type() == kFloat ||
          in.topk_weights.scalar_type() == dtype,
      op,
      ": topk_weights must have dtype float32 or the dtype of input, ",
      dtype_name(dtype),
      ", got ",
      dtype_name(in.topk_weights.scalar_type()));
}

inline void check_mlp_placement(const char* op, const MLPInputs& in) {
  const std::array<std::pair<const char*, const Tensor*>, 10> operands = {{
      {"input", &in.input},
      {"w_in", &in.w_in},
      {"w_out", &in.w_out},
      {"offs", &in.offs},
      {"topk_weights", &in.topk_weights},
      {"row_slots", &in.row_slots},
      {"slot_rows", &in.slot_rows},
      {"b_in", &in.b_in},
      {"b_out", &in.b_out},
      {"w_up", &in.w_up},
  }};
  for (const auto& [name, tensor] : operands) {
    if (tensor->defined()) {
      check_placement(op, name, *tensor, "input", in.input);
    }
  }
}

// Validates the operands and returns the sizes they imply.
inline MLPSizes check_mlp_inputs(
    const char* op,
    const MLPInputs& in,
    const ActivationSpec& activation) {
  check_mlp_placement(op, in);
  check_mlp_dtypes(op, in);
  const bool has_up = in.w_up.defined();
  TORCH_CHECK_VALUE(
      !has_up || activation.is_gated,
      op,
      ": w_up needs an activation with a gate, got '",
      activation_name(activation.kind).name,
      "'");
  TORCH_CHECK_VALUE(
      !has_up || !activation.interleaved,
      op,
      ": gate_interleaved=True needs gate and up in one tensor, got w_up");
  const char* w_in_rule = has_up ? "(E, F, D), the gate next to w_up,"
      : activation.is_gated      ? "(E, 2*F, D)"
                                 : "(E, F, D)";
  check_rank(op, "input", in.input, 2, "(T, D)");
  check_rank(op, "w_in", in.w_in, 3, w_in_rule);
  check_rank(op, "w_out", in.w_out, 3, "(E, D, F)");
  TORCH_CHECK_VALUE(
      in.row_slots.defined() == in.slot_rows.defined(),
      op,
      ": row_slots and slot_rows must be given together, got only ",
      in.row_slots.defined() ? "row_slots" : "slot_rows");

  MLPSizes sizes;
  sizes.num_tokens = in.input.sym_size(0);
  sizes.model_dim = in.input.sym_size(1);
  sizes.num_experts = in.w_in.sym_size(0);
  sizes.hidden_dim = in.w_out.sym_size(2);
  sizes.gated_dim = sizes.hidden_dim * activation.gates();
  check_shape(
      op,
      "w_out",
      in.w_out,
      "(E, D, F)",
      {sizes.num_experts, sizes.model_dim, sizes.hidden_dim});
  check_shape(
      op,
      "w_in",
      in.w_in,
      w_in_rule,
      {sizes.num_experts,
       has_up ? sizes.hidden_dim : sizes.gated_dim,
       sizes.model_dim});
  if (has_up) {
    check_shape(
        op,
        "w_up",
        in.w_up,
        "(E, F, D)",
        {sizes.num_experts, sizes.hidden_dim, sizes.model_dim});
  }
  check_shape(op, "offs", in.offs, "(E)", {sizes.num_experts});
  if (in.row_slots.defined()) {
    check_rank(op, "row_slots", in.row_slots, 1, "(R)");
    check_rank(op, "slot_rows", in.slot_rows, 2, "(T, K)");
    sizes.num_rows = in.row_slots.sym_size(0);
    sizes.top_k = in.slot_rows.sym_size(1);
    check_shape(
        op,
        "slot_rows",
        in.slot_rows,
        "(T, K)",
        {sizes.num_tokens, sizes.top_k});
  } else {
    sizes.num_rows = sizes.num_tokens;
    sizes.top_k = 1;
  }
  TORCH_CHECK_VALUE(
      fits_index(sizes.num_tokens * sizes.top_k),
      op,
      ": T*K must be less than 2**31, got T = ",
      sizes.num_tokens,
      " and K = ",
      sizes.top_k);
  TORCH_CHECK_VALUE(
      fits_index(sizes.num_rows),
      op,
      ": the number of rows R must be less than 2**31, got ",
      sizes.num_rows);
  if (in.topk_weights.defined()) {
    check_shape(
        op,
        "topk_weights",
        in.topk_weights,
        "(T, K)",
        {sizes.num_tokens, sizes.top_k});
  }
  if (in.b_in.defined()) {
    check_shape(
        op,
        "b_in",
        in.b_in,
        activation.is_gated ? "(E, 2*F)" : "(E, F)",
        {sizes.num_experts, sizes.gated_dim});
  }
  if (in.b_out.defined()) {
    check_shape(
        op, "b_out", in.b_out, "(E, D)", {sizes.num_experts, sizes.model_dim});
  }
  return sizes;
}

// What forward and backward, CPU, composite and Meta all start from.
struct MLPCall {
  MLPInputs inputs;
  ActivationSpec activation;
  MLPSizes sizes;

  MLPCall(
      const char* op,
      MLPInputs operands,
      std::string_view activation_name,
      bool gate_interleaved,
      std::optional<double> alpha,
      std::optional<double> limit)
      : inputs(std::move(operands)),
        activation(parse_activation(
            op,
            activation_name,
            gate_interleaved,
            alpha,
            limit)),
        sizes(check_mlp_inputs(op, inputs, activation)) {}
};

// The two operands that only the backward has.
inline void check_mlp_backward_inputs(
    const char* op,
    const MLPCall& call,
    const Tensor& grad_out,
    const Tensor& preact) {
  const auto& [in, activation, sizes] = call;
  const auto dtype = in.input.scalar_type();
  const std::array<std::pair<const char*, const Tensor*>, 2> operands = {
      {{"grad_out", &grad_out}, {"preact", &preact}}};
  for (const auto& [name, tensor] : operands) {
    check_placement(op, name, *tensor, "input", in.input);
    TORCH_CHECK_TYPE(
        tensor->scalar_type() == dtype,
        op,
        ": ",
        name,
        " must have the dtype of input, ",
        dtype_name(dtype),
        ", got ",
        dtype_name(tensor->scalar_type()));
  }
  check_shape(
      op, "grad_out", grad_out, "(T, D)", {sizes.num_tokens, sizes.model_dim});
  check_shape(
      op,
      "preact",
      preact,
      activation.is_gated ? "(R, 2*F)" : "(R, F)",
      {sizes.num_rows, sizes.gated_dim},
      "; preact has 0 rows when the forward ran with compute_preact=False");
}

} // namespace at::native::moe
