// Backward of _moe_mlp on brgemm. No GEMM of the forward is repeated:
//   1. dA' = dO W_out, and in its epilogue A from H, dS = <dA', A>,
//      dH = dAct(s * dA', H) and s * A;
//   2. dX = dH W_in, summed per token;
//   3. dW_in = dH^T X and dW_out = dO^T (s * A), written once, in the strides of
//      the weights, and the bias gradients.
// Tokens are gathered while operands are packed; only dH and s * A exist for
// all rows. dW reduces over the rows of an expert and is the one result that
// depends on other tokens (but not on the thread count).
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLP.h>

#if defined(CPU_CAPABILITY_AVX512)
#include <ATen/native/cpu/MoEActivation.h>
#include <ATen/native/cpu/MoEBrgemmOperands.h>

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
using namespace moe_brgemm;
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

// grad (E, I, J) = sum over the expert's rows r of left_r^T right_r.
template <typename scalar_t>
class WeightGrad {
  using compute_t = compute_type<scalar_t>;

 public:
  // left has I columns and right has J. The operands change sides when I is the
  // dense dimension of the gradient.
  WeightGrad(
      const Tensor& grad,
      const RowSource<scalar_t>& left,
      const RowSource<scalar_t>& right)
      : grad_(grad), left_(left), right_(right) {
    const bool rows_dense = grad.size(1) <= 1 || grad.stride(1) == 1;
    const bool cols_dense = grad.size(2) <= 1 || grad.stride(2) == 1;
    target_ = rows_dense || cols_dense
        ? grad
        : at::empty(grad.sizes(), grad.options());
    const bool swapped = rows_dense && !cols_dense;
    lines_ = grad.size(swapped ? 2 : 1);
    length_ = grad.size(swapped ? 1 : 2);
    line_stride_ = target_.stride(swapped ? 2 : 1);
    if (swapped) {
      std::swap(left_, right_);
    }
  }

  void run(const std::vector<Block>& experts) const {
    const int64_t threads = at::get_num_threads();
    const int64_t across = (length_ + kGradTile - 1) / kGradTile;
    const int64_t tiles = (lines_ + kGradLines - 1) / kGradLines * across;
    const int64_t lines = std::min(kGradLines, round_up(lines_, 32));
    const int64_t c_bytes = lines * kGradTile * sizeof(float);
    const int64_t left_bytes = lines * kGradRows * sizeof(compute_t);
    const Scratch scratch(threads, c_bytes + left_bytes + kRightBytes);
    // A task is a row of tiles: its left operand is packed once.
    WorkList(experts, tiles, across)
        .run(
            threads,
            [&](int64_t thread,
                const Block& block,
                int64_t first,
                int64_t last) {
              char* base = scratch.at(thread);
              auto* c = reinterpret_cast<float*>(base);
              auto* a = reinterpret_cast<compute_t*>(base + c_bytes);
              auto* b =
                  reinterpret_cast<compute_t*>(base + c_bytes + left_bytes);
              map_lines(block, first / across * kGradLines);
              for (const auto tile : c10::irange(first, last)) {
                const bool packed =
                    tile > first && block.end - block.begin <= kGradRows;
                tile_of(
                    block,
                    tile / across * kGradLines,
                    tile % across * kGradTile,
                    packed,
                    a,
                    b,
                    c);
              }
            },
            kVnni<compute_t> > 1);
    if (!target_.is_same(grad_)) {
      grad_.copy_(target_);
    }
  }

 private:
  static constexpr int64_t kRightBytes =
      kPanelCols * kGradRows * sizeof(compute_t);

  // The lines of a row of macro tiles, if they are one piece of memory.
  void map_lines(const Block& block, int64_t i0) const {
    if (line_stride_ == length_) {
      map_pages(
          target_.mutable_data_ptr<scalar_t>() +
              block.expert * target_.stride(0) + i0 * line_stride_,
          std::min(kGradLines, lines_ - i0) * length_ *
              static_cast<int64_t>(sizeof(scalar_t)));
    }
  }

  void tile_of(
      const Block& block,
      int64_t i0,
      int64_t j0,
      bool packed,
      compute_t* a,
      compute_t* b,
      float* c) const {
    const int64_t height = std::min(kGradLines, lines_ - i0);
    const int64_t width = std::min(kGradTile, length_ - j0);
    scalar_t* out = target_.mutable_data_ptr<scalar_t>() +
        block.expert * target_.stride(0) + i0 * line_stride_ + j0;
    if (block.begin == block.end) {
      for (const auto i : c10::irange(height)) {
        std::fill_n(out + i * line_stride_, width, scalar_t(0));
      }
      return;
    }
    const int64_t last = block.begin +
        (block.end - block.begin - 1) / kGradRows * kGradRows;
    for (int64_t r0 = block.begin; r0 < block.end; r0 += kGradRows) {
      const int64_t rows = std::min(kGradRows, block.end - r0);
      const int64_t depth = round_up(rows, kGradRowsMultiple);
      if (!packed) {
        pack_transposed<scalar_t, compute_t>(
            [&](int64_t r) {
              const scalar_t* row = left_.row(r0 + r);
              return row == nullptr ? row : row + i0;
            },
            height,
            rows,
            depth,
            a);
      }
      const scalar_t* right[kGradRows] = {};
      for (const auto r : c10::irange(rows)) {
        const scalar_t* row = right_.row(r0 + r);
        right[r] = row == nullptr ? row : row + j0;
      }
      multiply(
          right,
          Extent{height, width, depth, length_ - j0},
          /*is_first=*/r0 == block.begin,
          /*is_last=*/r0 == last,
          a,
          b,
          c,
          out);
    }
  }

  struct Extent {
    int64_t height;
    int64_t width;
    int64_t depth;
    int64_t left; // columns from the tile's first one on
  };

  // Asks for the next panel's rows, or the next macro tile's, in the share of
  // lines [m0, m0 + m).
  void prefetch_rows(
      const scalar_t* const* right,
      int64_t ahead,
      const Extent& extent,
      int64_t m0,
      int64_t m) const {
    if (extent.left <= ahead) {
      return;
    }
    constexpr int64_t line = 64 / sizeof(scalar_t);
    for (const auto r : c10::irange(
             extent.depth * m0 / extent.height,
             extent.depth * (m0 + m) / extent.height)) {
      if (right[r] == nullptr) {
        continue;
      }
      for (int64_t j = 0; j < kPanelCols; j += line) {
        _mm_prefetch(
            reinterpret_cast<const char*>(right[r] + ahead + j), _MM_HINT_T1);
      }
    }
  }

  // Adds one step to the macro tile; the last one writes it while a product is
  // still in cache. c holds its kGradTileRows x kPanelCols products one after
  // the other, and only one if the first step is the last one.
  void multiply(
      const scalar_t* const* right,
      const Extent& extent,
      bool is_first,
      bool is_last,
      const compute_t* a,
      compute_t* b,
      float* c,
      scalar_t* out) const {
    for (int64_t n0 = 0; n0 < extent.width; n0 += kPanelCols) {
      pack_along_n<scalar_t, compute_t>(
          [&](int64_t r) {
            return right[r] == nullptr ? right[r] : right[r] + n0;
          },
          extent.width - n0,
          extent.depth,
          b,
          kPanelCols);
      for (int64_t m0 = 0; m0 < extent.height;) {
        const int64_t m = std::min(kGradTileRows, extent.height - m0);
        prefetch_rows(right, n0 + kPanelCols, extent, m0, m);
        float* sums = is_first && is_last
            ? c
            : c + (n0 * extent.height + m0 * kPanelCols);
        brgemm<compute_t>(
            m,
            extent.depth,
            a + m0 * extent.depth,
            extent.depth,
            b,
            sums,
            kPanelCols,
            /*accumulate=*/!is_first);
        if (is_last) {
          const int64_t n = std::min(kPanelCols, extent.width - n0);
          for (const auto i : c10::irange(m)) {
            const float* from = sums + i * kPanelCols;
            store_row(
                out + (m0 + i) * line_stride_ + n0, n, [&](int64_t j) {
                  return Vec::loadu(from + j);
                });
          }
        }
        m0 += m;
      }
    }
  }

  const Tensor& grad_;
  RowSource<scalar_t> left_, right_;
  Tensor target_;
  int64_t lines_, length_, line_stride_;
};

// grad (E, cols) = sum over the expert's rows r of [weight_r *] source_r.
template <typename scalar_t>
void column_sums(
    const Routing& routing,
    const RowSource<scalar_t>& source,
    bool weighted,
    const Tensor& grad) {
  const int64_t cols = grad.size(1);
  const int64_t chunks = (cols + kGradTile - 1) / kGradTile;
  const int64_t experts = grad.size(0);
  auto* out = grad.mutable_data_ptr<scalar_t>();
  at::parallel_for(0, experts * chunks, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sum[kGradTile];
    for (const auto task : c10::irange(begin, end)) {
      const auto& block = routing.experts[task / chunks];
      const int64_t c0 = task % chunks * kGradTile;
      const int64_t n = std::min(kGradTile, cols - c0);
      std::fill_n(sum, kGradTile, 0.f);
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
    if (grads.w_out.defined()) {
      weighted_act_ = at::empty({rows, layout_.hidden}, input_.options());
      weighted_act_data_ = weighted_act_.template mutable_data_ptr<scalar_t>();
    }
    if (grads.topk_weights.defined()) {
      grad_weight_parts_ =
          at::empty({rows, panels_}, input_.options().dtype(kFloat));
      parts_data_ = grad_weight_parts_.mutable_data_ptr<float>();
    }
    moe_cpu::dispatch_activation(spec.kind, [&](auto kind) {
      grad_row_ = &BackwardPass::template grad_row<decltype(kind)::value>;
    });
  }

  void run() {
    const int64_t d = input_.size(1);
    const auto grad_out = tokens(grad_out_);
    if (grad_hidden_.defined() || weighted_act_.defined() ||
        grad_weight_parts_.defined()) {
      grad_hidden(grad_out);
    }
    if (grad_weight_parts_.defined()) {
      grad_topk_weights(grad_out);
    }
    grad_weight_parts_.reset();
    if (grads_.w_out.defined()) {
      const RowSource<scalar_t> act{
          data_or_null<scalar_t>(weighted_act_), layout_.hidden};
      WeightGrad<scalar_t>(grads_.w_out, grad_out, act).run(routing_.experts);
    }
    // The routed rows of dX may take its place.
    weighted_act_.reset();
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
              d},
          grads_.input);
    }
    if (grads_.wants_w_in) {
      grads_.w_in = at::empty_like(in_.w_in);
      WeightGrad<scalar_t>(grads_.w_in, grad_hidden, tokens(input_))
          .run(routing_.experts);
    }
    if (grads_.b_in.defined()) {
      column_sums(routing_, grad_hidden, /*weighted=*/false, grads_.b_in);
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

  // Step 1 for all rows. dW_out alone needs no dA', only A.
  void grad_hidden(const RowSource<scalar_t>& grad_out) const {
    const int64_t d = input_.size(1);
    const bool multiply =
        grad_hidden_.defined() || grad_weight_parts_.defined();
    for_each_task(
        routing_,
        grad_out,
        d,
        panels_,
        w_out_.plain(0).along_k(),
        [&](const Block& block,
            int64_t first,
            int64_t last,
            const RowOperand<compute_t>& x,
            compute_t* packed,
            float* c) {
          const int64_t rows = block.end - block.begin;
          const auto epilogue =
              [&](int64_t panel, int64_t m0, int64_t m, const float* tile) {
                for (const auto i : c10::irange(m)) {
                  (this->*grad_row_)(
                      block.begin + m0 + i,
                      panel,
                      units_of(panel),
                      tile + i * kPanelCols);
                }
              };
          if (!multiply) {
            static constexpr float zeros[kTileRows * kPanelCols] = {};
            for (const auto panel : c10::irange(first, last)) {
              for (int64_t m0 = 0; m0 < rows; m0 += kTileRows) {
                epilogue(panel, m0, std::min(kTileRows, rows - m0), zeros);
              }
            }
            return;
          }
          const auto w = w_out_.plain(block.expert);
          PanelTask<scalar_t, compute_t>{w, first, last, x, rows, d, packed, c}
              .run(
                  [&](int64_t panel) {
                    return PanelColumns{
                        {{panel * kPanelCols, units_of(panel)}, PanelSpan{}}};
                  },
                  epilogue,
                  [&](int64_t panel, int64_t m0, int64_t m) {
                    prefetch_preact(block.begin + m0, m, panel);
                  });
        });
  }

  int64_t units_of(int64_t panel) const {
    return std::min(kPanelCols, layout_.hidden - panel * kPanelCols);
  }

  // H is read in pieces of a panel's width, from memory, by the epilogue.
  void prefetch_preact(int64_t row, int64_t rows, int64_t panel) const {
    const int64_t gates = layout_.interleaved ? 2 : 1;
    const int64_t halves = layout_.gated && !layout_.interleaved ? 2 : 1;
    constexpr int64_t line = 64 / sizeof(scalar_t);
    for (const auto i : c10::irange(rows)) {
      const scalar_t* h =
          preact_data_ + (row + i) * layout_.cols() + panel * kPanelCols * gates;
      for (const auto half : c10::irange(halves)) {
        for (int64_t j = 0; j < units_of(panel) * gates; j += line) {
          _mm_prefetch(
              reinterpret_cast<const char*>(h + half * layout_.hidden + j),
              _MM_HINT_T0);
        }
      }
    }
  }

  // dH, s * A and a part of dS of one row from its dA' (fp32).
  template <Activation kind>
  void grad_row(int64_t row, int64_t panel, int64_t units, const float* grad_act)
      const {
    const int64_t f0 = panel * kPanelCols;
    scalar_t* grad_h = row_of(grad_hidden_data_, row, layout_.cols());
    scalar_t* act = row_of(weighted_act_data_, row, layout_.hidden);
    if (routing_.slot(row) < 0) {
      if (grad_h != nullptr) {
        layout_.zero(grad_h, f0, units);
      }
      if (act != nullptr) {
        std::fill_n(act + f0, units, scalar_t(0));
      }
      return;
    }
    const scalar_t* h = preact_data_ + row * layout_.cols();
    const Vec scale(routing_.weight(row));
    Vec grad_weight(0.f);
    for (int64_t j = 0; j < units; j += kLanes) {
      const int64_t n = std::min(kLanes, units - j);
      Vec gate, up;
      layout_.load(h, f0 + j, n, gate, up);
      const Vec grad = Vec::loadu(grad_act + j);
      const Vec a = round_through<scalar_t>(
          moe_cpu::activate<kind>(gate, up, constants_));
      if (parts_data_ != nullptr) {
        grad_weight = grad_weight + Vec::set(Vec(0.f), grad * a, n);
      }
      if (act != nullptr) {
        store_float(act + f0 + j, scale * a, n);
      }
      if (grad_h != nullptr) {
        const auto [grad_gate, grad_up] = moe_cpu::activate_backward<kind>(
            gate, up, scale * grad, constants_);
        layout_.store(grad_h, f0 + j, n, grad_gate, grad_up);
      }
    }
    if (parts_data_ != nullptr) {
      parts_data_[row * panels_ + panel] =
          vec::vec_reduce_all<float>(
              [](const Vec& x, const Vec& y) { return x + y; }, grad_weight);
    }
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
  Tensor weighted_act_; // s * A (last_row, F)
  Tensor grad_weight_parts_; // (last_row, panels_) float
  // Of the three above, null where they are undefined.
  scalar_t* grad_hidden_data_ = nullptr;
  scalar_t* weighted_act_data_ = nullptr;
  float* parts_data_ = nullptr;
  grad_row_fn grad_row_ = nullptr;
};
#endif

bool moe_mlp_backward_brgemm_kernel(
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
    moe_mlp_backward_brgemm_stub,
    &moe_mlp_backward_brgemm_kernel)

} // namespace at::native
