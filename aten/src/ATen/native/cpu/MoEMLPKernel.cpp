// Portable CPU kernel of _moe_mlp and _moe_mlp_backward: expert after expert,
// a block of its rows at a time: gather, matmul, activation, matmul, and at the
// end a sum over each token's slots in slot order. Everything between operand
// and result is in the accumulation type (float, or double for double), in
// buffers that are reused from block to block.
//
// No result of a token depends on the other tokens or on the number of threads:
// gemm() guarantees it, and every other loop works on one row.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLP.h>
#include <ATen/native/cpu/MoEActivation.h>
#include <ATen/native/cpu/MoEGemm.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#endif

namespace at::native {
namespace {

using namespace moe_cpu;

// Rows that go through the matmuls together. Bounds the buffers.
constexpr int64_t kBlockOfRows = 2 * kBlockRows;

// The operands as the kernel reads them: rows and index tensors contiguous.
template <typename scalar_t>
struct Operands {
  using acc_t = at::opmath_type<scalar_t>;

  Tensor input, offs, row_slots, slot_rows, weights, b_in, b_out;
  const Tensor& w_in;
  const Tensor& w_out;
  int64_t tokens, model_dim, hidden, gated, experts, top_k, live_rows;

  Operands(const moe::MLPInputs& in, const moe::ActivationSpec& spec)
      : input(in.input.contiguous()),
        offs(in.offs.contiguous()),
        w_in(in.w_in),
        w_out(in.w_out),
        tokens(in.input.size(0)),
        model_dim(in.input.size(1)),
        hidden(in.w_out.size(2)),
        gated(in.w_out.size(2) * spec.gates()),
        experts(in.w_in.size(0)),
        top_k(1),
        live_rows(
            experts == 0 ? 0 : offs.const_data_ptr<int32_t>()[experts - 1]) {
    if (in.row_slots.defined()) {
      row_slots = in.row_slots.contiguous();
      slot_rows = in.slot_rows.contiguous();
      top_k = slot_rows.size(1);
    }
    if (in.topk_weights.defined()) {
      weights = in.topk_weights.to(c10::CppTypeToScalarType<acc_t>::value)
                    .contiguous();
    }
    if (in.b_in.defined()) {
      b_in = in.b_in.to(c10::CppTypeToScalarType<acc_t>::value).contiguous();
    }
    if (in.b_out.defined()) {
      b_out = in.b_out.to(c10::CppTypeToScalarType<acc_t>::value).contiguous();
    }
  }

  int64_t rows_end(int64_t expert) const {
    return offs.const_data_ptr<int32_t>()[expert];
  }
  int64_t rows_begin(int64_t expert) const {
    return expert == 0 ? 0 : rows_end(expert - 1);
  }
  acc_t weight(int64_t slot) const {
    return weights.defined() ? weights.const_data_ptr<acc_t>()[slot] : acc_t(1);
  }
  const acc_t* b_in_of(int64_t expert) const {
    return b_in.defined() ? b_in.const_data_ptr<acc_t>() + expert * gated
                          : nullptr;
  }
  const acc_t* b_out_of(int64_t expert) const {
    return b_out.defined() ? b_out.const_data_ptr<acc_t>() + expert * model_dim
                           : nullptr;
  }
  // W_e of a (E, rows, cols) weight, or its transpose.
  static MatrixView<scalar_t> weight_of(const Tensor& w, int64_t expert) {
    return {
        w.const_data_ptr<scalar_t>() + expert * w.stride(0),
        w.stride(1),
        w.stride(2)};
  }
  static MatrixView<scalar_t> weight_of_t(const Tensor& w, int64_t expert) {
    const auto view = weight_of(w, expert);
    return {view.data, view.col_stride, view.row_stride};
  }
  // Without slot_rows a row is its own slot and its own token.
  const int32_t* row_slots_data() const {
    return row_slots.defined() ? row_slots.const_data_ptr<int32_t>() : nullptr;
  }
};

struct RoutedRow {
  int64_t row;
  int64_t slot;
};

// The rows of `expert` that have a slot, in ascending order.
template <typename scalar_t>
void collect_rows(
    const Operands<scalar_t>& ops,
    int64_t expert,
    std::vector<RoutedRow>& rows) {
  rows.clear();
  const int32_t* row_slots = ops.row_slots_data();
  for (int64_t row = ops.rows_begin(expert); row < ops.rows_end(expert);
       ++row) {
    const int64_t slot = row_slots == nullptr ? row : row_slots[row];
    if (slot >= 0) {
      rows.push_back({row, slot});
    }
  }
}

template <typename scalar_t>
int64_t largest_block(const Operands<scalar_t>& ops) {
  int64_t most = 0;
  for (int64_t e = 0; e < ops.experts; ++e) {
    most = std::max(most, ops.rows_end(e) - ops.rows_begin(e));
  }
  return std::min(most, kBlockOfRows);
}

template <typename acc_t>
Tensor buffer(int64_t rows, int64_t cols) {
  return at::empty(
      {rows, cols},
      at::TensorOptions().dtype(c10::CppTypeToScalarType<acc_t>::value));
}

template <typename Fn>
void parallel_rows(int64_t rows, int64_t cols, const Fn& fn) {
  at::parallel_for(
      0,
      rows,
      std::max<int64_t>(1, kMinWork / 4 / std::max<int64_t>(1, cols)),
      fn);
}

// dst (n, cols) <- src[token of the row]
template <typename acc_t, typename scalar_t>
void gather_tokens(
    const scalar_t* src,
    const RoutedRow* rows,
    int64_t n,
    int64_t top_k,
    int64_t cols,
    acc_t* dst) {
  parallel_rows(n, cols, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      load_row(src + rows[i].slot / top_k * cols, dst + i * cols, cols);
    }
  });
}

template <typename acc_t>
inline void scale_row(acc_t scale, const acc_t* src, acc_t* dst, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    dst[i] = scale * src[i];
  }
}

template <typename acc_t>
inline void add_row(const acc_t* src, acc_t* dst, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    dst[i] += src[i];
  }
}

// out (T, cols) <- sum of each token's rows of `routed` in slot order, in the
// accumulation type. A slot without a live row adds nothing.
template <typename scalar_t>
void combine_slots(
    const Operands<scalar_t>& ops,
    const scalar_t* routed,
    scalar_t* out) {
  using acc_t = at::opmath_type<scalar_t>;
  const int64_t cols = ops.model_dim;
  const auto* slot_rows = ops.slot_rows.template const_data_ptr<int32_t>();
  parallel_rows(ops.tokens, cols, [&](int64_t begin, int64_t end) {
    std::vector<acc_t> sum(cols), row_values(cols);
    for (int64_t t = begin; t < end; ++t) {
      std::fill(sum.begin(), sum.end(), acc_t(0));
      for (int64_t k = 0; k < ops.top_k; ++k) {
        const int64_t row = slot_rows[t * ops.top_k + k];
        if (row >= 0 && row < ops.live_rows) {
          load_row(routed + row * cols, row_values.data(), cols);
          add_row(row_values.data(), sum.data(), cols);
        }
      }
      store_row(sum.data(), out + t * cols, cols);
    }
  });
}

// Where the routed rows of a (T, D) result go before they are summed: into the
// result itself when the rows are the tokens.
template <typename scalar_t>
struct RoutedOutput {
  const Operands<scalar_t>& ops;
  Tensor out;
  Tensor routed;

  RoutedOutput(const Operands<scalar_t>& ops, const Tensor& out)
      : ops(ops),
        out(out),
        routed(
            ops.slot_rows.defined()
                ? at::empty({ops.live_rows, ops.model_dim}, out.options())
                : out) {}

  scalar_t* row(int64_t row) const {
    return routed.template mutable_data_ptr<scalar_t>() + row * ops.model_dim;
  }
  void finish() const {
    if (ops.slot_rows.defined()) {
      combine_slots(
          ops,
          routed.template const_data_ptr<scalar_t>(),
          out.template mutable_data_ptr<scalar_t>());
    } else {
      std::fill(row(ops.live_rows), row(ops.tokens), scalar_t(0));
    }
  }
};

template <typename scalar_t>
void zero_rows_without_slot(
    const Operands<scalar_t>& ops,
    const Tensor& preact) {
  const int32_t* row_slots = ops.row_slots_data();
  auto* data = preact.mutable_data_ptr<scalar_t>();
  for (int64_t row = 0; row < preact.size(0); ++row) {
    if (row >= ops.live_rows || (row_slots != nullptr && row_slots[row] < 0)) {
      std::fill_n(data + row * ops.gated, ops.gated, scalar_t(0));
    }
  }
}

// act (n, F) <- activation(round(projected + bias)), and preact <- the rounded
// values, from which the backward recomputes the same activation.
template <typename scalar_t, typename acc_t>
void activate_rows(
    const Operands<scalar_t>& ops,
    const moe::ActivationSpec& spec,
    const RoutedRow* rows,
    int64_t n,
    const acc_t* bias,
    acc_t* projected,
    scalar_t* preact,
    acc_t* act) {
  parallel_rows(n, ops.gated, [&](int64_t begin, int64_t end) {
    std::vector<acc_t> gate_up(2 * ops.hidden);
    std::vector<scalar_t> rounded(ops.gated);
    for (int64_t i = begin; i < end; ++i) {
      acc_t* h = projected + i * ops.gated;
      if (bias != nullptr) {
        add_row(bias, h, ops.gated);
      }
      scalar_t* kept =
          preact == nullptr ? rounded.data() : preact + rows[i].row * ops.gated;
      store_row(h, kept, ops.gated);
      load_row(kept, h, ops.gated);
      acc_t* gate = gate_up.data();
      acc_t* up = gate + ops.hidden;
      split_gate(h, ops.hidden, spec, gate, up);
      acc_t* a = act + i * ops.hidden;
      activate_row(gate, up, ops.hidden, spec, a);
      store_row(a, rounded.data(), ops.hidden);
      load_row(rounded.data(), a, ops.hidden);
    }
  });
}

template <typename scalar_t>
void forward(
    const moe::MLPInputs& inputs,
    const moe::ActivationSpec& spec,
    const Tensor& output,
    const Tensor& preact) {
  using acc_t = at::opmath_type<scalar_t>;
  const Operands<scalar_t> ops(inputs, spec);
  const int64_t D = ops.model_dim;
  const int64_t block = largest_block(ops);
  const Tensor token_buffer = buffer<acc_t>(block, D);
  const Tensor hidden_buffer = buffer<acc_t>(block, ops.gated);
  const Tensor act_buffer = buffer<acc_t>(block, ops.hidden);
  auto* x = token_buffer.mutable_data_ptr<acc_t>();
  auto* h = hidden_buffer.mutable_data_ptr<acc_t>();
  auto* act = act_buffer.mutable_data_ptr<acc_t>();
  const auto* input = ops.input.template const_data_ptr<scalar_t>();
  const RoutedOutput<scalar_t> result(ops, output);

  std::vector<RoutedRow> rows;
  for (int64_t e = 0; e < ops.experts; ++e) {
    collect_rows(ops, e, rows);
    const acc_t* b_out = ops.b_out_of(e);
    for (size_t first = 0; first < rows.size(); first += block) {
      const RoutedRow* block_rows = rows.data() + first;
      const int64_t n = std::min<int64_t>(block, rows.size() - first);
      gather_tokens(input, block_rows, n, ops.top_k, D, x);
      gemm<acc_t, scalar_t>(
          n,
          ops.gated,
          D,
          {x, D, 1},
          ops.weight_of_t(ops.w_in, e),
          h,
          ops.gated,
          /*accumulate=*/false);
      activate_rows(
          ops,
          spec,
          block_rows,
          n,
          ops.b_in_of(e),
          h,
          preact.defined() ? preact.mutable_data_ptr<scalar_t>() : nullptr,
          act);
      acc_t* projected = x;
      gemm<acc_t, scalar_t>(
          n,
          D,
          ops.hidden,
          {act, ops.hidden, 1},
          ops.weight_of_t(ops.w_out, e),
          projected,
          D,
          /*accumulate=*/false);
      parallel_rows(n, D, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          acc_t* y = projected + i * D;
          if (b_out != nullptr) {
            add_row(b_out, y, D);
          }
          scale_row(ops.weight(block_rows[i].slot), y, y, D);
          store_row(y, result.row(block_rows[i].row), D);
        }
      });
    }
  }
  result.finish();
  if (preact.defined()) {
    zero_rows_without_slot(ops, preact);
  }
}

// ----- backward

template <typename acc_t>
inline acc_t dot(const acc_t* a, const acc_t* b, int64_t n) {
  using Vec = vec::Vectorized<acc_t>;
  Vec sum(0);
  for (int64_t i = 0; i < n; i += Vec::size()) {
    const int64_t count = std::min<int64_t>(Vec::size(), n - i);
    // Vec::loadu of a part leaves the other lanes undefined.
    const Vec product = Vec::loadu(a + i, count) * Vec::loadu(b + i, count);
    sum = sum + Vec::set(Vec(0), product, count);
  }
  return vec::vec_reduce_all<acc_t>(
      [](const Vec& x, const Vec& y) { return x + y; }, sum);
}

// sum (cols) [+]= sum over rows of scale[row] * values[row]
template <typename acc_t, typename Scale>
void add_columns(
    const acc_t* values,
    int64_t rows,
    int64_t cols,
    const Scale& scale,
    acc_t* sum) {
  at::parallel_for(
      0,
      cols,
      std::max<int64_t>(64, kMinWork / rows),
      [&](int64_t begin, int64_t end) {
        for (int64_t i = 0; i < rows; ++i) {
          const acc_t s = scale(i);
          const acc_t* row = values + i * cols;
          for (int64_t c = begin; c < end; ++c) {
            sum[c] += s * row[c];
          }
        }
      });
}

// Gradient of one expert's weight matrix: lhs^T rhs summed over blocks of rows.
// It lands in the strides of the gradient; in its storage when that is float or
// double, else through a buffer of the accumulation type.
template <typename scalar_t>
class WeightGrad {
 public:
  using acc_t = at::opmath_type<scalar_t>;

  WeightGrad(const Tensor& grad) : grad_(grad) {
    if (!grad_.defined()) {
      return;
    }
    rows_ = grad_.size(1);
    cols_ = grad_.size(2);
    // Write along the dense dimension.
    transposed_ = grad_.stride(1) == 1 && grad_.stride(2) != 1;
    if (!direct()) {
      buffer_ = buffer<acc_t>(rows_, cols_);
    }
  }

  void add(
      int64_t expert,
      const acc_t* lhs,
      const acc_t* rhs,
      int64_t n,
      bool first) {
    if (!grad_.defined()) {
      return;
    }
    const MatrixView<acc_t> lhs_t{lhs, 1, rows_}, rhs_t{rhs, 1, cols_};
    const MatrixView<acc_t> lhs_n{lhs, rows_, 1}, rhs_n{rhs, cols_, 1};
    acc_t* c = target(expert);
    if (transposed_) {
      gemm<acc_t, acc_t>(
          cols_, rows_, n, rhs_t, lhs_n, c, line_stride(), !first);
    } else {
      gemm<acc_t, acc_t>(
          rows_, cols_, n, lhs_t, rhs_n, c, line_stride(), !first);
    }
  }

  // After the last block of rows, or instead of it when there is none.
  void finish(int64_t expert, bool empty) {
    if (!grad_.defined() || (!empty && direct())) {
      return;
    }
    const int64_t lines = transposed_ ? cols_ : rows_;
    const int64_t length = transposed_ ? rows_ : cols_;
    scalar_t* slice = slice_of(expert);
    const int64_t step = grad_.stride(transposed_ ? 1 : 2);
    const auto* sums =
        empty ? nullptr : buffer_.template const_data_ptr<acc_t>();
    parallel_rows(lines, length, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        scalar_t* line = slice + i * grad_.stride(transposed_ ? 2 : 1);
        if (!empty && step == 1) {
          store_row(sums + i * length, line, length);
          continue;
        }
        for (int64_t j = 0; j < length; ++j) {
          line[j * step] =
              empty ? scalar_t(0) : static_cast<scalar_t>(sums[i * length + j]);
        }
      }
    });
  }

 private:
  bool direct() const {
    return std::is_same_v<scalar_t, acc_t> &&
        (grad_.stride(1) == 1 || grad_.stride(2) == 1);
  }
  scalar_t* slice_of(int64_t expert) const {
    return grad_.template mutable_data_ptr<scalar_t>() +
        expert * grad_.stride(0);
  }
  acc_t* target(int64_t expert) {
    if constexpr (std::is_same_v<scalar_t, acc_t>) {
      if (direct()) {
        return slice_of(expert);
      }
    }
    return buffer_.template mutable_data_ptr<acc_t>();
  }
  int64_t line_stride() const {
    if (direct()) {
      return grad_.stride(transposed_ ? 2 : 1);
    }
    return transposed_ ? rows_ : cols_;
  }

  const Tensor& grad_;
  Tensor buffer_;
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  bool transposed_ = false;
};

// Gradient of one expert's bias row.
template <typename scalar_t>
class BiasGrad {
 public:
  using acc_t = at::opmath_type<scalar_t>;

  explicit BiasGrad(const Tensor& grad)
      : grad_(grad), sum_(grad.defined() ? grad.size(1) : 0) {}

  template <typename Scale>
  void add(const acc_t* values, int64_t rows, const Scale& scale) {
    if (grad_.defined()) {
      add_columns<acc_t>(values, rows, cols(), scale, sum_.data());
    }
  }
  void finish(int64_t expert) {
    if (grad_.defined()) {
      store_row(
          sum_.data(),
          grad_.template mutable_data_ptr<scalar_t>() + expert * cols(),
          cols());
      std::fill(sum_.begin(), sum_.end(), acc_t(0));
    }
  }

 private:
  int64_t cols() const {
    return static_cast<int64_t>(sum_.size());
  }

  const Tensor& grad_;
  std::vector<acc_t> sum_;
};

template <typename scalar_t>
class BackwardPass {
 public:
  using acc_t = at::opmath_type<scalar_t>;

  BackwardPass(
      const moe::MLPInputs& inputs,
      const moe::ActivationSpec& spec,
      const Tensor& grad_out,
      const Tensor& preact,
      const MoEMLPGrads& grads)
      : ops_(inputs, spec),
        spec_(spec),
        grad_out_(grad_out.contiguous()),
        preact_(preact.contiguous()),
        grads_(grads),
        wants_hidden_(
            grads.input.defined() || grads.wants_w_in || grads.b_in.defined()),
        block_size_(largest_block(ops_)),
        tokens_(buffer<acc_t>(block_size_, ops_.model_dim)),
        act_(buffer<acc_t>(block_size_, ops_.hidden)),
        hidden_(buffer<acc_t>(block_size_, ops_.gated)),
        grad_w_in_(grads.w_in),
        grad_w_out_(grads.w_out),
        grad_b_in_(grads.b_in),
        grad_b_out_(grads.b_out) {
    if (grads.input.defined()) {
      grad_input_.emplace(ops_, grads.input);
    }
    if (grads.topk_weights.defined()) {
      grad_weights_ = at::zeros(grads.topk_weights.sizes(), act_.options());
    }
  }

  void run() {
    std::vector<RoutedRow> rows;
    for (int64_t e = 0; e < ops_.experts; ++e) {
      collect_rows(ops_, e, rows);
      for (size_t first = 0; first < rows.size(); first += block_size_) {
        const int64_t n = std::min<int64_t>(block_size_, rows.size() - first);
        run_block(e, rows.data() + first, n, first == 0);
      }
      grad_w_in_.finish(e, rows.empty());
      grad_w_out_.finish(e, rows.empty());
      grad_b_in_.finish(e);
      grad_b_out_.finish(e);
    }
    if (grad_input_.has_value()) {
      grad_input_->finish();
    }
    if (grad_weights_.defined()) {
      grads_.topk_weights.copy_(grad_weights_);
    }
  }

 private:
  // The buffers hold in turn: tokens_ dO, X and dX; act_ dA' and s * A.
  void run_block(
      int64_t expert,
      const RoutedRow* rows,
      int64_t n,
      bool is_first) {
    const int64_t D = ops_.model_dim;
    auto* tokens = tokens_.template mutable_data_ptr<acc_t>();
    auto* act = act_.template mutable_data_ptr<acc_t>();
    auto* hidden = hidden_.template mutable_data_ptr<acc_t>();
    gather_tokens(
        grad_out_.template const_data_ptr<scalar_t>(),
        rows,
        n,
        ops_.top_k,
        D,
        tokens);
    if (wants_hidden_ || grad_weights_.defined()) {
      gemm<acc_t, scalar_t>(
          n,
          ops_.hidden,
          D,
          {tokens, D, 1},
          ops_.weight_of(ops_.w_out, expert),
          act,
          ops_.hidden,
          /*accumulate=*/false);
    }
    activate_rows_backward(expert, rows, n);
    grad_w_out_.add(expert, tokens, act, n, is_first);
    grad_b_out_.add(
        tokens, n, [&](int64_t i) { return ops_.weight(rows[i].slot); });
    grad_b_in_.add(hidden, n, [](int64_t) { return acc_t(1); });
    if (grads_.w_in.defined()) {
      gather_tokens(
          ops_.input.template const_data_ptr<scalar_t>(),
          rows,
          n,
          ops_.top_k,
          D,
          tokens);
      grad_w_in_.add(expert, hidden, tokens, n, is_first);
    }
    if (grad_input_.has_value()) {
      gemm<acc_t, scalar_t>(
          n,
          D,
          ops_.gated,
          {hidden, ops_.gated, 1},
          ops_.weight_of(ops_.w_in, expert),
          tokens,
          D,
          /*accumulate=*/false);
      parallel_rows(n, D, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          store_row(tokens + i * D, grad_input_->row(rows[i].row), D);
        }
      });
    }
  }

  // From dA' and the saved pre-activation: dS, dH and s * A.
  void activate_rows_backward(
      int64_t expert,
      const RoutedRow* rows,
      int64_t n) {
    const int64_t F = ops_.hidden;
    const auto* preact = preact_.template const_data_ptr<scalar_t>();
    const auto* tokens = tokens_.template const_data_ptr<acc_t>();
    auto* act = act_.template mutable_data_ptr<acc_t>();
    auto* hidden = hidden_.template mutable_data_ptr<acc_t>();
    parallel_rows(n, ops_.gated, [&](int64_t begin, int64_t end) {
      std::vector<acc_t> gate_up(2 * F), recomputed(F), h(ops_.gated);
      std::vector<scalar_t> rounded(F);
      acc_t* gate = gate_up.data();
      acc_t* up = gate + F;
      for (int64_t i = begin; i < end; ++i) {
        const auto [row, slot] = rows[i];
        const acc_t s = ops_.weight(slot);
        acc_t* act_row = act + i * F;
        load_row(preact + row * ops_.gated, h.data(), ops_.gated);
        split_gate(h.data(), F, spec_, gate, up);
        activate_row(gate, up, F, spec_, recomputed.data());
        store_row(recomputed.data(), rounded.data(), F);
        load_row(rounded.data(), recomputed.data(), F);
        if (grad_weights_.defined()) {
          acc_t grad = dot(act_row, recomputed.data(), F);
          if (const acc_t* b_out = ops_.b_out_of(expert)) {
            grad += dot(tokens + i * ops_.model_dim, b_out, ops_.model_dim);
          }
          grad_weights_.template mutable_data_ptr<acc_t>()[slot] = grad;
        }
        if (wants_hidden_) {
          scale_row(s, act_row, act_row, F);
          activate_backward_row(gate, up, act_row, F, spec_);
          merge_gate(gate, up, F, spec_, hidden + i * ops_.gated);
        }
        scale_row(s, recomputed.data(), act_row, F);
      }
    });
  }

  const Operands<scalar_t> ops_;
  const moe::ActivationSpec& spec_;
  const Tensor grad_out_;
  const Tensor preact_;
  const MoEMLPGrads& grads_;
  const bool wants_hidden_; // some gradient needs dH
  const int64_t block_size_;
  const Tensor tokens_; // (block, D)
  const Tensor act_; // (block, F)
  const Tensor hidden_; // (block, G*F), dH
  Tensor grad_weights_; // (T, K) in the accumulation type
  std::optional<RoutedOutput<scalar_t>> grad_input_;
  WeightGrad<scalar_t> grad_w_in_, grad_w_out_;
  BiasGrad<scalar_t> grad_b_in_, grad_b_out_;
};

void moe_mlp_kernel(
    const moe::MLPInputs& inputs,
    const moe::ActivationSpec& activation,
    const Tensor& output,
    const Tensor& preact) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      kBFloat16, kHalf, inputs.input.scalar_type(), "moe_mlp_cpu", [&] {
        forward<scalar_t>(inputs, activation, output, preact);
      });
}

void moe_mlp_backward_kernel(
    const moe::MLPInputs& inputs,
    const moe::ActivationSpec& activation,
    const Tensor& grad_out,
    const Tensor& preact,
    MoEMLPGrads& grads) {
  if (grads.wants_w_in) {
    grads.w_in = at::empty_like(inputs.w_in);
  }
  if (grads.wants_w_out) {
    grads.w_out = at::empty_like(inputs.w_out);
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      kBFloat16,
      kHalf,
      inputs.input.scalar_type(),
      "moe_mlp_backward_cpu",
      [&] {
        BackwardPass<scalar_t>(inputs, activation, grad_out, preact, grads)
            .run();
      });
}

} // namespace

ALSO_REGISTER_AVX512_DISPATCH(moe_mlp_stub, &moe_mlp_kernel)
ALSO_REGISTER_AVX512_DISPATCH(moe_mlp_backward_stub, &moe_mlp_backward_kernel)

} // namespace at::native
