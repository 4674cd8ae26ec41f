// Backward of _moe_mlp on CPU. It repeats no product of the forward:
//   1. dA' = dO W_out; in its epilogue A from H, dS = <dA', A> and dH = dAct(s * dA', H);
//   2. dX = dH W_in, summed per token;
//   3. dW_in = dH^T X, then dW_out = dO^T (s * A), in the strides of the weights, and the
//      bias gradients. dH is freed before the last gradient is allocated.
// Packing the operands gathers tokens and computes A again; only dH is stored
// for all rows. dW and the bias gradients sum over the rows of an expert, so only they
// depend on other tokens (but not on the thread count).
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLPCPU.h>
#include <ATen/native/cpu/MoEWeightGrad.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty_like.h>
#endif

#include <cmath>
#include <numeric>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace at::native {
namespace {

using namespace moe_cpu;

// malloc maps gradients from this size anew each time. They ask for huge pages if the system gives
// them on demand: with few rows per expert, faults of 4 KiB pages take longer than the products.
void map_huge_pages([[maybe_unused]] const Tensor& x) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 2 * 1024 * 1024, kMinBytes = 16 * kPage;
  const auto data = reinterpret_cast<uintptr_t>(x.storage().mutable_data());
  const uintptr_t begin = round_up(data, kPage), end = data + x.storage().nbytes();
  if (end - data >= kMinBytes) {
    madvise(reinterpret_cast<void*>(begin), (end - begin) / kPage * kPage, MADV_HUGEPAGE);
  }
#endif
}

template <typename scalar_t, typename Micro>
class BackwardPass {
  using acc_t = acc_type<scalar_t>;
  using Vec = VecOf<scalar_t>;

 public:
  BackwardPass(
      const moe::MLPInputs& in, const moe::ActivationSpec& spec, const Tensor& grad_out,
      const Tensor& preact, const std::array<bool, 7>& wanted, std::array<Tensor, 7>& grads)
      : in_(in),
        wanted_(wanted),
        grads_(grads),
        routing_(in),
        layout_{in.w_out.size(2), spec.is_gated, spec.interleaved},
        panels_(ceil_div(layout_.hidden, kPanelCols)),
        constants_(spec),
        input_(with_dense_rows(in.input)),
        grad_out_(with_dense_rows(grad_out)),
        preact_(preact.contiguous()),
        preact_data_(preact_.template const_data_ptr<scalar_t>()) {
    const int64_t rows = routing_.last_row;
    if (wanted[0] || wanted[1] || wanted[4] || wanted[6]) {
      grad_hidden_ = input_.new_empty({rows, layout_.cols()});
      grad_hidden_data_ = grad_hidden_.template mutable_data_ptr<scalar_t>();
    }
    if (wanted[3]) {
      grad_weight_parts_ =
          input_.new_empty({rows, panels_}, c10::CppTypeToScalarType<acc_t>::value);
      parts_data_ = grad_weight_parts_.template mutable_data_ptr<acc_t>();
    }
    dispatch_activation(spec, [&](auto act) {
      grad_row_ = &BackwardPass::template grad_row<decltype(act)>;
      weighted_act_ = &BackwardPass::template weighted_act<decltype(act)>;
    });
  }

  void run() {
    const auto grad_out = rows_of_tokens<scalar_t>(grad_out_, routing_);
    if (grad_hidden_.defined() || grad_weight_parts_.defined()) {
      compute_grad_hidden(grad_out);
    }
    if (grad_weight_parts_.defined()) {
      compute_grad_topk_weights(grad_out);
    }
    grad_weight_parts_.reset();
    const RowSource<scalar_t> grad_hidden{grad_hidden_data_, layout_.cols()};
    if (wanted_[0]) {
      grads_[0] = input_.new_empty(input_.sizes());
      const WeightSource<scalar_t> w_in(in_.w_in, in_.w_up, layout_.halves(), /*transposed=*/false);
      project_tokens<scalar_t, Micro>(
          routing_, grad_hidden, w_in, /*bias=*/nullptr, /*weighted=*/false, kGradCombineBytes,
          grads_[0]);
    }
    const auto input = rows_of_tokens<scalar_t>(input_, routing_);
    if (wanted_[1]) {
      weight_grad(grads_[1], in_.w_in, {grad_hidden, {}}, {input, {}});
    }
    if (wanted_[6]) {
      const Tensor up = grad_hidden_.narrow(1, layout_.hidden, layout_.hidden);
      const RowSource<scalar_t> grad_up{up.const_data_ptr<scalar_t>(), layout_.cols()};
      weight_grad(grads_[6], in_.w_up, {grad_up, {}}, {input, {}});
    }
    if (wanted_[4]) {
      grads_[4] = in_.b_in.new_empty(in_.b_in.sizes());
      column_sums(routing_, grad_hidden, /*weighted=*/false, grads_[4]);
    }
    grad_hidden_.reset();
    if (wanted_[2]) {
      const auto act = [this](int64_t row, int64_t f0, int64_t n, scalar_t* out) {
        (this->*weighted_act_)(row, f0, n, out);
      };
      weight_unit_ = weight_unit();
      weight_grad(grads_[2], in_.w_out, {grad_out, {}}, {{}, act}, weight_unit_);
    }
    if (wanted_[5]) {
      grads_[5] = in_.b_out.new_empty(in_.b_out.sizes());
      column_sums(routing_, grad_out, /*weighted=*/true, grads_[5]);
    }
  }

 private:
  void weight_grad(
      Tensor& grad, const Tensor& weight, const GradOperand<scalar_t>& left,
      const GradOperand<scalar_t>& right, acc_t unit = 1) const {
    grad = at::empty_like(weight);
    map_huge_pages(grad);
    WeightGrad<scalar_t, Micro>(grad, left, right, unit).run(routing_);
  }

  // A power of two by which router weights are divided before s * A is rounded to float16, whose
  // range it could leave.
  acc_t weight_unit() const {
    acc_t largest = 1;
    if constexpr (std::is_same_v<scalar_t, Half>) {
      for (const auto row : c10::irange(routing_.last_row)) {
        const acc_t weight = std::abs(routing_.weight(row));
        largest = weight > largest && std::isfinite(weight) ? weight : largest;
      }
    }
    return std::exp2(static_cast<acc_t>(std::ilogb(largest)));
  }

  void compute_grad_hidden(const RowSource<scalar_t>& grad_out) const {
    const WeightSource<scalar_t> w_out(in_.w_out, {}, 1, /*transposed=*/false);
    ExpertGemm<scalar_t, Micro, WeightSource<scalar_t>>(
        routing_, grad_out, w_out, layout_.hidden)
        .run(&plain_panel, [&](const Block& block, int64_t f0, int64_t units, const acc_t* c) {
          for (const auto row : c10::irange(block.begin, block.end)) {
            (this->*grad_row_)(row, f0, units, c);
            c += kPanelCols;
          }
        });
  }

  // dH and the part of dS of one row from its dA'.
  template <typename Act>
  void grad_row(int64_t row, int64_t f0, int64_t units, const acc_t* grad_act) const {
    scalar_t* grad_h =
        grad_hidden_data_ == nullptr ? nullptr : grad_hidden_data_ + row * layout_.cols();
    if (routing_.slot(row) < 0) {
      layout_.for_each_half(
          grad_h, f0, units, [](scalar_t* x, int64_t n) { std::fill_n(x, n, 0); });
      return;
    }
    const scalar_t* h = preact_data_ + row * layout_.cols();
    const Vec scale(routing_.weight(row));
    vec::Vectorized<acc_t> grad_weight(0);
    for (int64_t j = 0; j < units; j += kLanes<scalar_t>) {
      const int64_t n = std::min(kLanes<scalar_t>, units - j);
      const auto x = layout_.load(h, layout_.hidden, f0 + j, n);
      const auto grad = load_lanes(grad_act + j, n);
      const auto at = activate_with_grads<Act, kFastMath<scalar_t>>(x, scale * grad, constants_);
      if (grad_h != nullptr) {
        layout_.template store<scalar_t, Micro>(grad_h, f0 + j, n, at.grads);
      }
      const auto act = store_lanes<scalar_t, Micro>(nullptr, at.act);
      grad_weight = grad_weight + grad[0] * act[0] + grad[1] * act[1];
    }
    if (parts_data_ != nullptr) {
      parts_data_[row * panels_ + f0 / kPanelCols] =
          vec::vec_reduce_all<acc_t>(std::plus<>(), grad_weight);
    }
  }

  // s * A of units [f0, f0 + n) of a row, over weight_unit_.
  template <typename Act>
  void weighted_act(int64_t row, int64_t f0, int64_t n, scalar_t* out) const {
    if (routing_.slot(row) < 0) {
      std::fill_n(out, n, scalar_t(0));
      return;
    }
    const scalar_t* h = preact_data_ + row * layout_.cols();
    layout_.for_each_half(
        h, f0 + n, n, [](const scalar_t* x, int64_t count) { prefetch(x, count); });
    const Vec scale(routing_.weight(row) / weight_unit_);
    store_row<Micro>(out, n, [&](int64_t j, int64_t count) {
      const auto x = layout_.load(h, layout_.hidden, f0 + j, count);
      return scale *
          store_lanes<scalar_t, Micro>(
                 nullptr, activate<Act, kFastMath<scalar_t>>(x, constants_));
    });
  }

  // dS of a slot: its row's parts in panel order, and <dO, b_out>.
  void compute_grad_topk_weights(const RowSource<scalar_t>& grad_out) const {
    const Tensor sums = grad_weight_parts_.new_zeros(in_.topk_weights.sizes());
    auto* out = sums.template mutable_data_ptr<acc_t>();
    const Tensor b_out = contiguous_or_undefined(in_.b_out);
    const auto* bias = data_or_null<scalar_t>(b_out);
    const int64_t d = input_.size(1);
    const auto blocks = make_blocks(routing_.experts, kMaxBlockRows, 1);
    at::parallel_for(
        0, static_cast<int64_t>(blocks.size()),
        rows_grain(kMaxBlockRows * (panels_ + (bias == nullptr ? 0 : d))),
        [&](int64_t begin, int64_t end) {
          for (const auto i : c10::irange(begin, end)) {
            for (const auto row : c10::irange(blocks[i].begin, blocks[i].end)) {
              const int64_t slot = routing_.slot(row);
              if (slot < 0) {
                continue;
              }
              const acc_t* parts = parts_data_ + row * panels_;
              acc_t sum = std::accumulate(parts, parts + panels_, acc_t(0));
              if (bias != nullptr) {
                sum += dot(grad_out.row(row), bias + blocks[i].expert * d, d);
              }
              out[slot] = sum;
            }
          }
        });
    grads_[3] = sums.to(in_.topk_weights.scalar_type());
  }

  const moe::MLPInputs& in_;
  const std::array<bool, 7>& wanted_;
  std::array<Tensor, 7>& grads_;
  const Routing<acc_t> routing_;
  const HiddenLayout layout_;
  const int64_t panels_;  // of F
  const ActivationConstants<Vec> constants_;
  const Tensor input_, grad_out_, preact_;
  const scalar_t* preact_data_;
  Tensor grad_hidden_;        // dH (last_row, G*F)
  Tensor grad_weight_parts_;  // (last_row, panels_)
  acc_t weight_unit_ = 1;
  // Data of the two above, or null.
  scalar_t* grad_hidden_data_ = nullptr;
  acc_t* parts_data_ = nullptr;
  void (BackwardPass::*grad_row_)(int64_t, int64_t, int64_t, const acc_t*) const = nullptr;
  void (BackwardPass::*weighted_act_)(int64_t, int64_t, int64_t, scalar_t*) const = nullptr;
};

void moe_mlp_backward_kernel(
    const moe::MLPInputs& inputs, const moe::ActivationSpec& activation, const Tensor& grad_out,
    const Tensor& preact, const std::array<bool, 7>& wanted, std::array<Tensor, 7>& grads) {
  dispatch_micro_gemm(inputs.input.scalar_type(), [&](auto zero, auto micro) {
    BackwardPass<decltype(zero), decltype(micro)>(
        inputs, activation, grad_out, preact, wanted, grads)
        .run();
  });
}

}  // namespace

ALSO_REGISTER_AVX512_DISPATCH(moe_mlp_backward_stub, &moe_mlp_backward_kernel)

}  // namespace at::native
