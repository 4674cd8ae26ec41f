// _moe_mlp and its backward on CPU: checks of the values that the kernels trust.
// See MoEMLPUtils.h for the notation and the rules.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLPBackward.h>
#include <ATen/native/MoEMLPCPU.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#else
#include <ATen/ops/_moe_mlp_backward_native.h>
#include <ATen/ops/_moe_mlp_native.h>
#include <ATen/ops/empty.h>
#endif

namespace at::native {

DEFINE_DISPATCH(moe_mlp_stub);
DEFINE_DISPATCH(moe_mlp_backward_stub);

namespace {

// An index tensor, what one of its positions is, and what its values are below.
struct SlotIndex {
  const char* name;
  const char* position;
  const char* range;
  Tensor ids;
  int64_t limit;

  const int32_t* data() const {
    return ids.const_data_ptr<int32_t>();
  }
};

void check_range(const char* op, const SlotIndex& index) {
  const auto* ids = index.data();
  for (int64_t i = 0; i < index.ids.numel(); ++i) {
    TORCH_CHECK_INDEX(
        ids[i] >= -1 && ids[i] < index.limit,
        op,
        ": ",
        index.name,
        " must be in ",
        index.range,
        " = [-1, ",
        index.limit,
        "), got ",
        ids[i],
        " at ",
        index.position,
        " ",
        i);
  }
}

void check_inverse(
    const char* op,
    const SlotIndex& index,
    const SlotIndex& inverse) {
  const auto* ids = index.data();
  const auto* inverse_ids = inverse.data();
  for (int64_t i = 0; i < index.ids.numel(); ++i) {
    TORCH_CHECK_VALUE(
        ids[i] == -1 || inverse_ids[ids[i]] == i,
        op,
        ": row_slots and slot_rows must be inverse to each other, but ",
        index.name,
        " has ",
        ids[i],
        " at ",
        index.position,
        " ",
        i,
        " and ",
        inverse.name,
        " has ",
        inverse_ids[ids[i]],
        " at ",
        inverse.position,
        " ",
        ids[i]);
  }
}

// Ids per thread, each worth a few instructions.
constexpr int64_t kCheckGrain = 16384;

// Whether the ids of both are in range and inverse to each other. A look at every row,
// from there at its slot, and a count: as many slots as rows that found theirs leave
// none that could hold anything else.
bool are_inverse(const SlotIndex& row_slots, const SlotIndex& slot_rows) {
  const auto* slots = row_slots.data();
  const auto* rows = slot_rows.data();
  const auto count = [](int64_t size, const auto& is_live) {
    return at::parallel_reduce(
        0,
        size,
        kCheckGrain,
        int64_t(0),
        [&](int64_t begin, int64_t end, int64_t live) {
          for (int64_t i = begin; i < end; ++i) {
            live += is_live(i);
          }
          return live;
        },
        std::plus<int64_t>());
  };
  const int64_t num_rows = row_slots.ids.numel();
  const int64_t num_slots = slot_rows.ids.numel();
  const int64_t rows_without = count(num_rows, [&](int64_t r) { return slots[r] == -1; });
  const int64_t rows_found = count(num_rows, [&](int64_t r) {
    return slots[r] >= 0 && slots[r] < num_slots && rows[slots[r]] == r;
  });
  const int64_t slots_without = count(num_slots, [&](int64_t s) { return rows[s] == -1; });
  return rows_without + rows_found == num_rows && slots_without + rows_found == num_slots;
}

} // namespace

void check_mlp_values(const char* op, const moe::MLPInputs& in, int64_t num_rows) {
  moe::check_offs(op, in.offs, num_rows);
  if (!in.row_slots.defined()) {
    return;
  }
  const SlotIndex row_slots{
      "row_slots",
      "row",
      "[-1, T*K)",
      in.row_slots.contiguous(),
      in.slot_rows.numel()};
  const SlotIndex slot_rows{
      "slot_rows", "slot", "[-1, R)", in.slot_rows.contiguous(), num_rows};
  if (are_inverse(row_slots, slot_rows)) {
    return;
  }
  // One of these says where and how.
  check_range(op, row_slots);
  check_range(op, slot_rows);
  check_inverse(op, row_slots, slot_rows);
  check_inverse(op, slot_rows, row_slots);
}

std::tuple<Tensor, Tensor> moe_mlp_cpu(
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
  constexpr const char* op = "_moe_mlp";
  const moe::MLPCall call(
      op,
      {input, w_in, w_out, offs, topk_weights, row_slots, slot_rows, b_in, b_out, w_up},
      {activation, gate_interleaved, alpha, limit});
  const int64_t num_rows = call.sizes.num_rows.expect_int();
  check_mlp_values(op, call.inputs, num_rows);

  auto output = at::empty(input.sizes(), input.options());
  auto preact = at::empty(
      {compute_preact ? num_rows : 0, call.sizes.gated_dim.expect_int()},
      input.options());
  const Tensor kept_preact = compute_preact ? preact : Tensor();
  moe_mlp_stub(kCPU, call.inputs, call.activation, output, kept_preact);
  return {std::move(output), std::move(preact)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
moe_mlp_backward_cpu(
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
  check_mlp_values(op, call.inputs, call.sizes.num_rows.expect_int());

  return moe_composite::make_gradients(
      call.inputs,
      output_mask,
      [&](const std::array<bool, 7>& wanted, moe_composite::Gradients& grads) {
        moe_mlp_backward_stub(
            kCPU, call.inputs, call.activation, grad_out, preact, wanted, grads);
      });
}

} // namespace at::native
