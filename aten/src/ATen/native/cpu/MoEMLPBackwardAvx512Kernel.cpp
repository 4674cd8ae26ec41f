// Backward of _moe_mlp with AVX512. No GEMM of the forward is repeated:
//   1. dA' = dO W_out, and in its epilogue A from H, dS = <dA', A> and
//      dH = dAct(s * dA', H);
//   2. dX = dH W_in, summed per token;
//   3. dW_in = dH^T X, then dW_out = dO^T (s * A), written once, in the strides of
//      the weights, and the bias gradients. dH is gone when the last gradient is
//      allocated.
// Tokens are gathered and A is computed again while operands are packed; only dH
// exists for all rows. dW reduces over the rows of an expert and is the one result that
// depends on other tokens (but not on the thread count).
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLP.h>

#if defined(CPU_CAPABILITY_AVX512)
#include <ATen/native/cpu/MoEActivation.h>
#include <ATen/native/cpu/MoEAvx512HiddenLayout.h>
#include <ATen/native/cpu/MoEAvx512Projection.h>
#include <ATen/native/cpu/MoEAvx512WeightGrad.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#endif
#endif

namespace at::native {
namespace {

#if defined(CPU_CAPABILITY_AVX512)
using namespace moe_avx512;
using moe_cpu::Activation;

// Fixed order of addition: lanes, then across lanes.
template <typename scalar_t>
float dot(const scalar_t* a, const scalar_t* b, int64_t n) {
  Vec sum(0.f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec product = load_float(a + i, n - i) * load_float(b + i, n - i);
    sum = sum + Vec::set(Vec(0.f), product, std::min(kLanes, n - i));
  }
  return vec::vec_reduce_all<float>(
      [](const Vec& x, const Vec& y) { return x + y; }, sum);
}

// grad (E, cols) = sum over the expert's rows r of [weight_r *] source_r.
template <typename scalar_t>
void column_sums(
    const Routing& routing,
    const RowSource<scalar_t>& source,
    bool weighted,
    const Tensor& grad) {
  const int64_t cols = grad.size(1);
  constexpr int64_t kChunk = 256;
  const int64_t chunks = (cols + kChunk - 1) / kChunk;
  const int64_t experts = grad.size(0);
  auto* out = grad.mutable_data_ptr<scalar_t>();
  at::parallel_for(0, experts * chunks, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sum[kChunk];
    for (const auto task : c10::irange(begin, end)) {
      // Neighbouring tasks are other experts': one with most of the rows is shared.
      const auto& block = routing.experts[task % experts];
      const int64_t c0 = task / experts * kChunk;
      const int64_t n = std::min(kChunk, cols - c0);
      std::fill_n(sum, kChunk, 0.f);
      for (const auto r : c10::irange(block.begin, block.end)) {
        const scalar_t* row = source.row(r);
        if (row == nullptr) {
          continue;
        }
        const Vec scale(weighted ? routing.weight(r) : 1.f);
        for (int64_t j = 0; j < n; j += kLanes) {
          vec::fmadd(
              scale, load_float(row + c0 + j, n - j), Vec::loadu(sum + j))
              .store(sum + j);
        }
      }
      for (int64_t j = 0; j < n; j += kLanes) {
        store_float(
            out + block.expert * cols + c0 + j, Vec::loadu(sum + j), n - j);
      }
    }
  });
}

template <typename scalar_t>
class BackwardPass {
  using compute_t = compute_type<scalar_t>;

 public:
  BackwardPass(
      const moe::MLPInputs& in,
      const moe::ActivationSpec& spec,
      const Tensor& grad_out,
      const Tensor& preact,
      MoEMLPGrads& grads)
      : in_(in),
        grads_(grads),
        routing_(in),
        layout_{in.w_out.size(2), spec.is_gated, spec.interleaved},
        panels_((layout_.hidden + kPanelCols - 1) / kPanelCols),
        constants_(spec),
        input_(with_dense_rows(in.input)),
        grad_out_(with_dense_rows(grad_out)),
        preact_(preact.contiguous()),
        preact_data_(preact_.template const_data_ptr<scalar_t>()),
        w_out_(in.w_out) {
    const int64_t rows = routing_.last_row;
    if (grads.input.defined() || grads.wants_w_in || grads.b_in.defined()) {
      grad_hidden_ = at::empty({rows, layout_.cols()}, input_.options());
      grad_hidden_data_ = grad_hidden_.template mutable_data_ptr<scalar_t>();
    }
    if (grads.topk_weights.defined()) {
      grad_weight_parts_ =
          at::empty({rows, panels_}, input_.options().dtype(kFloat));
      parts_data_ = grad_weight_parts_.mutable_data_ptr<float>();
    }
    moe_cpu::dispatch_activation(spec.kind, [&](auto kind) {
      grad_row_ = &BackwardPass::template grad_row<decltype(kind)::value>;
      weighted_act_ =
          &BackwardPass::template weighted_act<decltype(kind)::value>;
    });
  }

  void run() {
    const int64_t d = input_.size(1);
    const auto grad_out = tokens(grad_out_);
    if (grad_hidden_.defined() || grad_weight_parts_.defined()) {
      grad_hidden(grad_out);
    }
    if (grad_weight_parts_.defined()) {
      grad_topk_weights(grad_out);
    }
    grad_weight_parts_.reset();
    const RowSource<scalar_t> grad_hidden{
        data_or_null<scalar_t>(grad_hidden_), layout_.cols()};
    if (grads_.input.defined()) {
      const WeightStack<scalar_t> w_in(in_.w_in);
      project_tokens(
          routing_,
          grad_hidden,
          Projection<scalar_t>{
              w_in,
              /*transposed=*/false,
              /*bias=*/nullptr,
              /*weighted=*/false,
              layout_.cols(),
              d,
              kGradCombineBytes},
          grads_.input);
    }
    if (grads_.wants_w_in) {
      grads_.w_in = at::empty_like(in_.w_in);
      WeightGrad<scalar_t>(grads_.w_in, {grad_hidden}, {tokens(input_)})
          .run(routing_.experts);
    }
    if (grads_.b_in.defined()) {
      column_sums(routing_, grad_hidden, /*weighted=*/false, grads_.b_in);
    }
    grad_hidden_.reset();
    if (grads_.wants_w_out) {
      grads_.w_out = at::empty_like(in_.w_out);
      const auto act = [this](int64_t row, int64_t f0, int64_t n, scalar_t* out) {
        (this->*weighted_act_)(row, f0, n, out);
      };
      WeightGrad<scalar_t>(grads_.w_out, {grad_out}, {{}, act})
          .run(routing_.experts);
    }
    if (grads_.b_out.defined()) {
      column_sums(routing_, grad_out, /*weighted=*/true, grads_.b_out);
    }
  }

 private:
  RowSource<scalar_t> tokens(const Tensor& x) const {
    return {
        x.const_data_ptr<scalar_t>(),
        x.stride(0),
        routing_.slot_rows.defined() ? &routing_ : nullptr};
  }

  // Step 1 for all rows.
  void grad_hidden(const RowSource<scalar_t>& grad_out) const {
    const int64_t d = input_.size(1);
    for_each_task<scalar_t>(
        routing_,
        grad_out,
        d,
        panels_,
        w_out_.plain(0).along_k(),
        [&](const Task<compute_t>& task) {
          const auto epilogue =
              [&](int64_t panel, int64_t m0, int64_t m, const float* tile) {
                for (const auto i : c10::irange(m)) {
                  if (i + kRowsAhead < m) {
                    prefetch_preact(task.block.begin + m0 + i + kRowsAhead, panel);
                  }
                  (this->*grad_row_)(
                      task.block.begin + m0 + i,
                      panel,
                      units_of(panel),
                      tile + i * kPanelCols);
                }
              };
          PanelTask<scalar_t, compute_t>(
              task,
              [&](int64_t expert) { return w_out_.plain(expert); },
              panels_,
              d)
              .run(
                  [&](int64_t panel) {
                    return PanelColumns{
                        {{panel * kPanelCols, units_of(panel)}, PanelSpan{}}};
                  },
                  epilogue);
        });
  }

  int64_t units_of(int64_t panel) const {
    return std::min(kPanelCols, layout_.hidden - panel * kPanelCols);
  }

  // H is read in pieces of a panel's width, from memory, by the epilogue.
  void prefetch_preact(int64_t row, int64_t panel) const {
    const int64_t gates = layout_.interleaved ? 2 : 1;
    const int64_t halves = layout_.gated && !layout_.interleaved ? 2 : 1;
    constexpr int64_t line = 64 / sizeof(scalar_t);
    const scalar_t* h =
        preact_data_ + row * layout_.cols() + panel * kPanelCols * gates;
    for (const auto half : c10::irange(halves)) {
      for (int64_t j = 0; j < units_of(panel) * gates; j += line) {
        _mm_prefetch(
            reinterpret_cast<const char*>(h + half * layout_.hidden + j),
            _MM_HINT_T0);
      }
    }
  }

  struct HiddenGrads {
    Vec gate, up;
  };

  // Of units [f, f + n) of a row, n <= kLanes; adds their part of dS.
  template <Activation kind>
  C10_ALWAYS_INLINE HiddenGrads grad_lanes(
      const scalar_t* h,
      int64_t f,
      int64_t n,
      const Vec& grad,
      const Vec& scale,
      Vec& grad_weight) const {
    constexpr bool fast = kFastMath<scalar_t>;
    Vec gate, up;
    layout_.load(h, f, n, gate, up);
    const auto grads = moe_cpu::activate_with_grads<kind, fast>(
        gate, up, scale * grad, constants_);
    if (parts_data_ != nullptr) {
      const Vec a = round_through<scalar_t>(grads.act);
      grad_weight = grad_weight +
          (n < kLanes ? Vec::set(Vec(0.f), grad * a, n) : grad * a);
    }
    return {grads.gate, grads.up};
  }

  // dH and a part of dS of one row from its dA' (fp32).
  template <Activation kind>
  void grad_row(int64_t row, int64_t panel, int64_t units, const float* grad_act)
      const {
    const int64_t f0 = panel * kPanelCols;
    scalar_t* grad_h = row_of(grad_hidden_data_, row, layout_.cols());
    if (routing_.slot(row) < 0) {
      if (grad_h != nullptr) {
        layout_.zero(grad_h, f0, units);
      }
      return;
    }
    const scalar_t* h = preact_data_ + row * layout_.cols();
    const Vec scale(routing_.weight(row));
    Vec grad_weight(0.f);
    const auto lanes = [&](int64_t j, int64_t n) {
      return grad_lanes<kind>(
          h, f0 + j, n, Vec::loadu(grad_act + j), scale, grad_weight);
    };
    int64_t j = 0;
    for (; j + 2 * kLanes <= units; j += 2 * kLanes) {
      const HiddenGrads first = lanes(j, kLanes);
      const HiddenGrads second = lanes(j + kLanes, kLanes);
      if (grad_h != nullptr) {
        layout_.store_two(
            grad_h, f0 + j, first.gate, first.up, second.gate, second.up);
      }
    }
    for (; j < units; j += kLanes) {
      const int64_t n = std::min(kLanes, units - j);
      const HiddenGrads tail = lanes(j, n);
      if (grad_h != nullptr) {
        layout_.store(grad_h, f0 + j, n, tail.gate, tail.up);
      }
    }
    if (parts_data_ != nullptr) {
      parts_data_[row * panels_ + panel] =
          vec::vec_reduce_all<float>(
              [](const Vec& x, const Vec& y) { return x + y; }, grad_weight);
    }
  }

  // s * A of units [f0, f0 + n) of a row.
  template <Activation kind>
  void weighted_act(int64_t row, int64_t f0, int64_t n, scalar_t* out) const {
    if (routing_.slot(row) < 0) {
      std::fill_n(out, n, scalar_t(0));
      return;
    }
    const scalar_t* h = preact_data_ + row * layout_.cols();
    const Vec scale(routing_.weight(row));
    store_row(out, n, [&](int64_t j) {
      Vec gate, up;
      layout_.load(h, f0 + j, std::min(kLanes, n - j), gate, up);
      return scale *
          round_through<scalar_t>(
                 moe_cpu::activate<kind, kFastMath<scalar_t>>(
                     gate, up, constants_));
    });
  }

  // dS of a slot: its row's parts in panel order, and <dO, b_out>.
  void grad_topk_weights(const RowSource<scalar_t>& grad_out) const {
    const Tensor sums = at::zeros(
        grads_.topk_weights.sizes(), input_.options().dtype(kFloat));
    auto* out = sums.mutable_data_ptr<float>();
    const auto* parts = grad_weight_parts_.const_data_ptr<float>();
    const Tensor b_out = contiguous_or_undefined(in_.b_out);
    const auto* bias = data_or_null<scalar_t>(b_out);
    const int64_t d = input_.size(1);
    const auto blocks = make_blocks(routing_.experts, kTileRows);
    at::parallel_for(0, blocks.size(), 1, [&](int64_t begin, int64_t end) {
      for (const auto i : c10::irange(begin, end)) {
        for (const auto row : c10::irange(blocks[i].begin, blocks[i].end)) {
          const int64_t slot = routing_.slot(row);
          if (slot < 0) {
            continue;
          }
          float sum = 0.f;
          for (const auto panel : c10::irange(panels_)) {
            sum += parts[row * panels_ + panel];
          }
          if (bias != nullptr) {
            sum += dot(grad_out.row(row), bias + blocks[i].expert * d, d);
          }
          out[slot] = sum;
        }
      }
    });
    grads_.topk_weights.copy_(sums);
  }

  // Rows of H that are on their way while one is used.
  static constexpr int64_t kRowsAhead = 6;

  static scalar_t* row_of(scalar_t* x, int64_t row, int64_t cols) {
    return x == nullptr ? x : x + row * cols;
  }

  using grad_row_fn = void (BackwardPass::*)(
      int64_t,
      int64_t,
      int64_t,
      const float*) const;

  const moe::MLPInputs& in_;
  MoEMLPGrads& grads_;
  const Routing routing_;
  const HiddenLayout layout_;
  const int64_t panels_; // of F
  const moe_cpu::ActivationConstants<Vec> constants_;
  const Tensor input_, grad_out_, preact_;
  const scalar_t* preact_data_;
  const WeightStack<scalar_t> w_out_;
  Tensor grad_hidden_; // dH (last_row, G*F)
  Tensor grad_weight_parts_; // (last_row, panels_) float
  // Of the two above, null where they are undefined.
  scalar_t* grad_hidden_data_ = nullptr;
  float* parts_data_ = nullptr;
  grad_row_fn grad_row_ = nullptr;
  void (BackwardPass::*weighted_act_)(int64_t, int64_t, int64_t, scalar_t*)
      const = nullptr;
};
#endif

bool moe_mlp_backward_avx512_kernel(
    const moe::MLPInputs& inputs,
    const moe::ActivationSpec& activation,
    const Tensor& grad_out,
    const Tensor& preact,
    MoEMLPGrads& grads) {
#if defined(CPU_CAPABILITY_AVX512)
  if (!is_eligible(inputs)) {
    return false;
  }
  dispatch_dtype(inputs.input.scalar_type(), [&](auto zero) {
    BackwardPass<decltype(zero)>(inputs, activation, grad_out, preact, grads)
        .run();
  });
  return true;
#else
  return false;
#endif
}

} // namespace

ALSO_REGISTER_AVX512_DISPATCH(
    moe_mlp_backward_avx512_stub,
    &moe_mlp_backward_avx512_kernel)

} // namespace at::native
