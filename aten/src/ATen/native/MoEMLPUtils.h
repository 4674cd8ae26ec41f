#pragma once

// Rules of _moe_mlp and _moe_mlp_backward: activation names, and the one
// validator of shapes, dtypes and devices. See MoEUtils.h for the notation;
// D model dim, F expert hidden dim, G = 2 for gated activations else 1.

#include <ATen/native/MoEUtils.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
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
static_assert(std::all_of(
    kActivations.begin(),
    kActivations.end(),
    [](const ActivationName& entry) {
      return activation_name(entry.kind).name == entry.name;
    }));

// The arguments of the op that say which activation.
struct ActivationOptions {
  std::string_view activation;
  bool gate_interleaved;
  std::optional<double> alpha;
  std::optional<double> limit;
};

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

inline ActivationSpec parse_activation(const char* op, const ActivationOptions& options) {
  const auto& [activation, gate_interleaved, alpha, limit] = options;
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
  TORCH_CHECK_VALUE(!std::isnan(alpha.value_or(0)), op, ": alpha must be a number, got nan");
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
  const double limit_value =
      limit.value_or(is_oai ? 7.0 : std::numeric_limits<double>::infinity());
  TORCH_CHECK_VALUE(limit_value > 0, op, ": limit must be > 0, got ", limit_value);
  return {
      found->kind, found->is_gated, gate_interleaved, alpha.value_or(1.702), limit_value};
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

inline void check_dtype_of_input(
    const char* op,
    const char* name,
    const Tensor& tensor,
    const Tensor& input) {
  TORCH_CHECK_TYPE(
      tensor.scalar_type() == input.scalar_type(),
      op,
      ": ",
      name,
      " must have the dtype of input, ",
      dtype_name(input.scalar_type()),
      ", got ",
      dtype_name(tensor.scalar_type()));
}

// Devices, layouts and dtypes.
inline void check_mlp_tensors(const char* op, const MLPInputs& in) {
  const auto dtype = in.input.scalar_type();
  const auto is_placed = [&](const char* name, const Tensor& tensor) {
    if (tensor.defined()) {
      check_placement(op, name, tensor, "input", in.input);
    }
    return tensor.defined();
  };
  is_placed("input", in.input);
  check_dtype(op, "input must have dtype", dtype, {kDouble, kFloat, kBFloat16, kHalf});
  using Operands = std::initializer_list<std::pair<const char*, const Tensor&>>;
  for (const auto& [name, tensor] : Operands{
           {"w_in", in.w_in},
           {"w_out", in.w_out},
           {"b_in", in.b_in},
           {"b_out", in.b_out},
           {"w_up", in.w_up}}) {
    if (is_placed(name, tensor)) {
      check_dtype_of_input(op, name, tensor, in.input);
    }
  }
  for (const auto& [name, tensor] : Operands{
           {"offs", in.offs}, {"row_slots", in.row_slots}, {"slot_rows", in.slot_rows}}) {
    TORCH_CHECK_TYPE(
        !is_placed(name, tensor) || tensor.scalar_type() == kInt,
        op,
        ": ",
        name,
        " must have dtype int32, got ",
        dtype_name(tensor.scalar_type()));
  }
  TORCH_CHECK_TYPE(
      !is_placed("topk_weights", in.topk_weights) ||
          in.topk_weights.scalar_type() == kFloat || in.topk_weights.scalar_type() == dtype,
      op,
      ": topk_weights must have dtype float32 or the dtype of input, ",
      dtype_name(dtype),
      ", got ",
      dtype_name(in.topk_weights.scalar_type()));
}

// Validates the operands and returns the sizes they imply.
inline MLPSizes check_mlp_inputs(
    const char* op,
    const MLPInputs& in,
    const ActivationSpec& activation) {
  check_mlp_tensors(op, in);
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
  TORCH_CHECK_VALUE(
      in.row_slots.defined() == in.slot_rows.defined(),
      op,
      ": row_slots and slot_rows must be given together, got only ",
      in.row_slots.defined() ? "row_slots" : "slot_rows");
  const char* w_in_rule = has_up ? "(E, F, D), the gate next to w_up,"
      : activation.is_gated      ? "(E, 2*F, D)"
                                 : "(E, F, D)";
  check_rank(op, "input", in.input, 2, "(T, D)");
  check_rank(op, "w_in", in.w_in, 3, w_in_rule);
  check_rank(op, "w_out", in.w_out, 3, "(E, D, F)");

  MLPSizes sizes;
  auto& [T, D, F, GF, E, K, R] = sizes;
  T = in.input.sym_size(0);
  D = in.input.sym_size(1);
  E = in.w_in.sym_size(0);
  F = in.w_out.sym_size(2);
  GF = F * activation.gates();
  const auto has_shape = [&](const char* name,
                             const Tensor& tensor,
                             const char* rule,
                             c10::SymIntArrayRef expected) {
    if (tensor.defined()) {
      check_shape(op, name, tensor, rule, expected);
    }
  };
  // If the weights agree about D, the error is of the input. Unbacked sizes count as equal here;
  // check_shape() compares them.
  const auto D_of_weights = in.w_in.sym_size(2);
  const auto is_equal = [](const c10::SymInt& a, const c10::SymInt& b) {
    return a.sym_eq(b).expect_true(__FILE__, __LINE__);
  };
  if (!is_equal(D, D_of_weights) && is_equal(in.w_out.sym_size(1), D_of_weights)) {
    has_shape("input", in.input, "(T, D)", {T, D_of_weights});
  }
  has_shape("w_out", in.w_out, "(E, D, F)", {E, D, F});
  has_shape("w_in", in.w_in, w_in_rule, {E, has_up ? F : GF, D});
  has_shape("w_up", in.w_up, "(E, F, D)", {E, F, D});
  has_shape("offs", in.offs, "(E)", {E});
  if (in.row_slots.defined()) {
    check_rank(op, "row_slots", in.row_slots, 1, "(R)");
    check_rank(op, "slot_rows", in.slot_rows, 2, "(T, K)");
    R = in.row_slots.sym_size(0);
    K = in.slot_rows.sym_size(1);
  } else {
    R = T;
    K = 1;
  }
  has_shape("slot_rows", in.slot_rows, "(T, K)", {T, K});
  TORCH_CHECK_VALUE(
      fits_index(T * K), op, ": T*K must be less than 2**31, got T = ", T, " and K = ", K);
  TORCH_CHECK_VALUE(
      fits_index(R), op, ": the number of rows R must be less than 2**31, got ", R);
  has_shape("topk_weights", in.topk_weights, "(T, K)", {T, K});
  has_shape("b_in", in.b_in, activation.is_gated ? "(E, 2*F)" : "(E, F)", {E, GF});
  has_shape("b_out", in.b_out, "(E, D)", {E, D});
  return sizes;
}

// What forward and backward of every backend start from: operands, activation and sizes,
// validated.
struct MLPCall {
  MLPInputs inputs;
  ActivationSpec activation;
  MLPSizes sizes;

  MLPCall(const char* op, MLPInputs operands, const ActivationOptions& options)
      : inputs(std::move(operands)),
        activation(parse_activation(op, options)),
        sizes(check_mlp_inputs(op, inputs, activation)) {}

  // The two operands that only the backward has.
  void check_backward(const char* op, const Tensor& grad_out, const Tensor& preact) const {
    const auto check = [&](const char* name,
                           const Tensor& tensor,
                           const char* rule,
                           c10::SymIntArrayRef expected,
                           const char* hint) {
      check_placement(op, name, tensor, "input", inputs.input);
      check_dtype_of_input(op, name, tensor, inputs.input);
      check_shape(op, name, tensor, rule, expected, hint);
    };
    check("grad_out", grad_out, "(T, D)", {sizes.num_tokens, sizes.model_dim}, "");
    check(
        "preact",
        preact,
        activation.is_gated ? "(R, 2*F)" : "(R, F)",
        {sizes.num_rows, sizes.gated_dim},
        "; preact has 0 rows when the forward ran with compute_preact=False");
  }
};

// Raises where offs decreases or leaves [0, R]; offs is on CPU.
inline void check_offs(const char* op, const Tensor& offs, int64_t num_rows) {
  const auto contiguous = offs.contiguous();
  const auto* data = contiguous.const_data_ptr<int32_t>();
  int32_t previous = 0;
  for (int64_t e = 0; e < contiguous.numel(); ++e) {
    TORCH_CHECK_VALUE(
        data[e] >= previous && data[e] <= num_rows,
        op,
        ": offs must be non-decreasing in [0, R] = [0, ",
        num_rows,
        "], got ",
        data[e],
        " at [",
        e,
        "] after ",
        previous);
    previous = data[e];
  }
}

} // namespace at::native::moe
