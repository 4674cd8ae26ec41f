#pragma once

// What forward and backward of _moe_mlp and of its low-precision sibling share: routing as
// index tensors, products over the experts, and the activations, all of ATen ops. See
// MoEMLPUtils.h for the notation.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLPUtils.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace at::native::moe_composite {

using moe::ActivationSpec;

// Rows and slots as index tensors. Rows and slots that are not live hold index 0; callers
// mask what they gather with it.
struct Routing {
  Tensor offs; // (E) int32
  Tensor row_slot; // (R) int64
  Tensor row_token; // (R) int64
  Tensor row_expert; // (R) int64
  Tensor row_is_live; // (R, 1) bool
  Tensor slot_row; // (T, K) int64
  Tensor slot_is_live; // (T, K) bool
  // Whether all rows and slots are live. Always false where reading it would sync.
  bool all_rows_live = false;
  bool all_slots_live = false;
  // offs on the host, for the loop over experts; empty with grouped matmuls.
  std::vector<int64_t> ends;

  // Sets rows without a slot to zero, in place, and returns `rows`.
  const Tensor& mask_(const Tensor& rows) const {
    if (!all_rows_live) {
      rows.masked_fill_(row_is_live.logical_not(), 0);
    }
    return rows;
  }
};

// Whether the rules of _grouped_mm hold for the weights.
bool can_use_grouped_mm(const moe::MLPInputs& in);

// Whether there are values to compute: neither a call on the meta device nor one without
// rows. Checks offs where it is on CPU.
bool has_work(const char* op, const moe::MLPCall& call);

// Without grouped matmuls offs is read on the host.
Routing make_routing(
    const char* op,
    const moe::MLPInputs& in,
    int64_t num_rows,
    bool use_grouped_mm);

// (R, N) = rows (R, K) times w_e (E, K, N), e the expert of the row
Tensor multiply_experts(const Routing& routing, const Tensor& rows, const Tensor& w);

ScalarType accumulate_type(const Tensor& input);

// Calls fn(begin, count) on consecutive parts of `rows`, so that elementwise intermediates in the
// accumulation type stay small: in the L2 of each core on CPU and, whatever the number of threads, an
// eighth of all; 64 MB elsewhere, where smaller parts would cost more launches.
template <typename Fn>
void for_parts(const Tensor& rows, int64_t columns, const Fn& fn) {
  const int64_t num_rows = rows.size(0);
  constexpr int64_t per_thread = int64_t{1} << 16;
  const int64_t elements = rows.is_cpu()
      ? std::min(at::get_num_threads() * per_thread, std::max(per_thread, num_rows * columns / 8))
      : int64_t{1} << 24;
  const int64_t step = std::max<int64_t>(1, elements / std::max<int64_t>(1, columns));
  for (int64_t begin = 0; begin < num_rows; begin += step) {
    fn(begin, std::min(step, num_rows - begin));
  }
}

// (T, D) from (R, D): the sum of each token's rows, in the accumulation type.
Tensor combine_slots(const Routing& routing, const Tensor& rows);

// Gate and up (R, F) of H (R, G*F) in the accumulation type. Without a gate, `up` is
// undefined.
std::pair<Tensor, Tensor> split_gate(const Tensor& preact, const ActivationSpec& spec);

// Gate and up as the activation sees them: clamped where it has a limit.
std::pair<Tensor, Tensor> clamp_gate(
    const Tensor& gate,
    const Tensor& up,
    const ActivationSpec& spec);

// act(H) in the accumulation type, (R, F)
Tensor activate(const Tensor& preact, const ActivationSpec& spec);

// (R, 1): the router weight of each row, of slot 0 where it has none
Tensor weights_of_rows(const Tensor& topk_weights, const Routing& routing);

} // namespace at::native::moe_composite
