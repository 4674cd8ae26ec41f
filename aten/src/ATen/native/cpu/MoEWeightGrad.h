#pragma once

// Sums over the rows of an expert for the backward of _moe_mlp: gradients of weights, grad[e] =
// left_e^T right_e, and of biases. The order of addition depends only on the rows.

#include <ATen/core/Tensor.h>
#include <ATen/native/cpu/MoEProjection.h>

#include <functional>
#include <vector>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

// Most and fewest lines of a gradient in a task; fewer lines make more tasks and need less
// scratch.
constexpr int64_t kMaxGradLines = 240;
constexpr int64_t kMinGradLines = 48;
// Scratch of a thread for the packed left operand of a task and the packed right operand of
// an expert; an operand that does not fit is packed in parts. Few threads have more.
// The third number is for all threads together.
constexpr int64_t kGradLeftBytes = 512 * 1024;
constexpr int64_t kGradRightBytes = 2 * 1024 * 1024;
constexpr int64_t kGradScratchBytes = 8 * 1024 * 1024;

// Columns of an operand by routed row: from a RowSource, or computed during packing,
// which is cheaper than memory traffic if they do not fit the caches.
template <typename scalar_t>
struct GradOperand {
  RowSource<scalar_t> rows;
  // make(row, c0, n, out) writes columns [c0, c0 + n) of a row.
  std::function<void(int64_t, int64_t, int64_t, scalar_t*)> make;

  // from[i] <- columns [c0, c0 + n) of row row0 + i for i < count, or null for zeros. Computed
  // ones are in buffer (count, n). The next n columns are probably needed next.
  void locate(
      int64_t row0, int64_t count, int64_t c0, int64_t n, scalar_t* buffer,
      const scalar_t** from) const {
    for (const auto i : c10::irange(count)) {
      if (make) {
        make(row0 + i, c0, n, buffer + i * n);
        from[i] = buffer + i * n;
      } else if ((from[i] = rows.row(row0 + i, c0)) != nullptr) {
        prefetch(from[i] + n, n);
      }
    }
  }
};

// grad (E, I, J) = [grad +] sum over the expert's rows r of left_r^T right_r, the sum rounded
// to scalar_t before it is added: as if it had been a tensor of its own.
template <typename scalar_t, typename Micro>
class WeightGrad {
  using operand_t = typename Micro::operand_t;
  using word_t = word_type<operand_t>;
  using acc_t = acc_type<scalar_t>;
  static constexpr int64_t v = kWordElements<operand_t>;
  static constexpr int64_t lanes = vec::Vectorized<word_t>::size();
  static constexpr int64_t kRowsMultiple = lanes * v;  // rows transposed at once
  static_assert(Micro::kMinDepth % kRowsMultiple == 0);
  // Lines that are multiplied before they are stored.
  static constexpr int64_t kStoredLines = std::max<int64_t>(12, Micro::kTileRows);

 public:
  // left has I columns and right has J. The operands change sides when I is the
  // dense dimension of the gradient. In float16 the sums are multiplied by unit.
  WeightGrad(
      const Tensor& grad, const GradOperand<scalar_t>& left, const GradOperand<scalar_t>& right,
      acc_t unit)
      : grad_(grad), left_(left), right_(right), unit_(unit) {
    const bool rows_dense = grad.size(1) <= 1 || grad.stride(1) == 1;
    const bool cols_dense = grad.size(2) <= 1 || grad.stride(2) == 1;
    target_ = rows_dense || cols_dense ? grad : grad.new_empty(grad.sizes());
    const bool swapped = rows_dense && !cols_dense;
    lines_ = grad.size(swapped ? 2 : 1);
    length_ = grad.size(swapped ? 1 : 2);
    line_stride_ = target_.stride(swapped ? 2 : 1);
    data_ = target_.template mutable_data_ptr<scalar_t>();
    if (swapped) {
      std::swap(left_, right_);
    }
  }

  void run(const Routing<acc_t>& routing) {
    if (lines_ > 0 && length_ > 0) {
      compute(routing);
    }
    if (!target_.is_same(grad_)) {
      grad_.copy_(target_);
    }
  }

 private:
  struct Buffers {
    operand_t* left;          // [lines][depth]
    operand_t* right;         // [panel][step][packed panel]
    acc_t* sums;              // [lines][kPanelCols]
    scalar_t* made;           // [step][kPanelCols], if an operand is computed
    const scalar_t** from;    // [step]
    const operand_t** lines;  // [lines]
  };

  void compute(const Routing<acc_t>& routing) {
    constexpr auto size = static_cast<int64_t>(sizeof(operand_t));
    const int64_t threads = threads_for(routing.last_row * lines_ * length_);
    // Twice the operands' size, as most operands have to be packed or computed first.
    const int64_t limit = scratch_limit(
        2 * routing.last_row * (lines_ + length_) * static_cast<int64_t>(sizeof(scalar_t)));
    const int64_t share =
        (threads > 1 ? std::min(kGradScratchBytes, limit) : kGradScratchBytes) / threads;
    if (kPanelCols * step_ * size > share / 16) {
      step_ = Micro::kMinDepth;
    }
    const int64_t experts = std::max<int64_t>(1, static_cast<int64_t>(routing.experts.size()));
    const int64_t most = round_up(std::max<int64_t>(1, routing.most_rows), kRowsMultiple);
    const int64_t step = std::min(most, step_);
    // Rows of most experts. An expert with more, whose operands do not fit, packs them again.
    const int64_t depth =
        std::clamp(round_up(2 * routing.last_row / experts, kRowsMultiple), step, most);
    // Lines whose left operand fits, and that leave tasks for all threads.
    const int64_t lines_fit = std::min(kGradLeftBytes, share / 4) / (depth * size);
    const int64_t lines_shared = lines_ * experts / (2 * threads);
    task_lines_ = round_up(
        std::min(
            lines_, std::clamp(std::min(lines_fit, lines_shared), kMinGradLines, kMaxGradLines)),
        Micro::kTileRows);
    const int64_t height = round_up(task_lines_, kPanelCols);
    left_size_ = height *
        std::clamp(share / 4 / size / height, lines_fit >= task_lines_ ? depth : step, most);
    // Few threads have room for the largest expert's right operand; many would need too much.
    const bool are_few = share / 2 >= kGradRightBytes;
    const int64_t right_fits = (are_few ? share / 8 * 5 : share / 2) / size;
    right_size_ = round_up(length_, kPanelCols) * (are_few ? most : depth);
    if (right_size_ > right_fits) {
      right_size_ = are_few ? right_fits : kPanelCols * step;
    }
    Scratch scratch;
    scratch.add<operand_t>(left_size_);
    scratch.add<operand_t>(right_size_);
    scratch.add<acc_t>(task_lines_ * kPanelCols);
    scratch.add<scalar_t>(left_.make || right_.make ? step * kPanelCols : 0);
    scratch.add<const scalar_t*>(step);
    scratch.add<const operand_t*>(task_lines_);
    const WorkList work(
        routing.experts, ceil_div(lines_, task_lines_), std::min(threads, limit / scratch.bytes()),
        2);
    scratch.allocate(work.threads());
    std::vector<const Block*> packed(work.threads());
    work.template run<typename Micro::Session>(
        [&](int64_t thread, const Block& block, int64_t first, int64_t last) {
          const Buffers at{
              scratch.at<operand_t>(thread, 0),       scratch.at<operand_t>(thread, 1),
              scratch.at<acc_t>(thread, 2),           scratch.at<scalar_t>(thread, 3),
              scratch.at<const scalar_t*>(thread, 4), scratch.at<const operand_t*>(thread, 5)};
          for (const auto task : c10::irange(first, last)) {
            compute_lines(block, task * task_lines_, packed[thread] == &block, at);
            packed[thread] = &block;
          }
        });
  }

  // Computes the lines of a task. has_right: the expert's right operand
  // is already packed, if it fits.
  void compute_lines(const Block& block, int64_t i0, bool has_right, const Buffers& at) const {
    const int64_t height = std::min(task_lines_, lines_ - i0);
    const int64_t rows = block.rows();
    scalar_t* out = data_ + block.expert * target_.stride(0) + i0 * line_stride_;
    if (rows == 0) {
      for (const auto i : c10::irange(height)) {
        std::fill_n(out + i * line_stride_, length_, scalar_t(0));
      }
      return;
    }
    const int64_t depth = round_up(rows, kRowsMultiple);
    const bool left_fits = round_up(height, kPanelCols) * depth <= left_size_;
    const bool right_fits = round_up(length_, kPanelCols) * depth <= right_size_;
    const int64_t ld = left_fits ? depth : step_;
    for (const auto i : c10::irange(task_lines_)) {
      at.lines[i] = at.left + i * ld;
    }
    for (int64_t j0 = 0; j0 < length_; j0 += kPanelCols) {
      const int64_t n = std::min(kPanelCols, length_ - j0);
      for (int64_t r0 = 0; r0 < rows; r0 += step_) {
        // Kernels for dense rows are generated per depth, so there should be few depths.
        const int64_t k =
            round_up(std::min(step_, rows - r0), Micro::kDenseRows ? kRowsMultiple : v);
        const Block part{block.expert, block.begin + r0, std::min(block.end, block.begin + r0 + k)};
        const int64_t offset = left_fits ? r0 : 0;
        if (!left_fits || j0 == 0) {
          pack_left(part, i0, height, at, at.left + offset, ld);
        }
        operand_t* right = at.right + (right_fits ? j0 * depth + r0 * kPanelCols : 0);
        if (!right_fits || !has_right) {
          pack_right(part, j0, n, k, at, right);
        }
        for (int64_t i = 0; i < height; i += kStoredLines) {
          const int64_t m = std::min(kStoredLines, height - i);
          acc_t* sums = at.sums + i * kPanelCols;
          // Fetches what will be written, as a gradient is larger than the caches.
          for (int64_t line = i; line < i + m; ++line) {
            prefetch(out + line * line_stride_ + j0, n);
          }
          Micro::multiply(m, n, k, {at.lines + i, ld, offset}, right, {sums, r0 > 0}, [] {});
          if (r0 + step_ >= rows) {
            store_lines(sums, m, n, out + i * line_stride_ + j0);
          }
        }
      }
    }
  }

  void store_lines(const acc_t* sums, int64_t lines, int64_t n, scalar_t* out) const {
    for (const auto i : c10::irange(lines)) {
      store_row<Micro>(out + i * line_stride_, n, [&](int64_t j, int64_t) {
        const auto sum = load_lanes(sums + i * kPanelCols + j);
        if constexpr (std::is_same_v<scalar_t, Half>) {
          return VecOf<scalar_t>(unit_) * sum;
        } else {
          return sum;
        }
      });
    }
  }

  // dst[i * ld + r] = row r of the part at column i0 + i; zeros after the last row.
  void pack_left(
      const Block& part, int64_t i0, int64_t height, const Buffers& at, operand_t* dst,
      int64_t ld) const {
    alignas(64) operand_t staged[kRowsMultiple * kPanelCols] = {};
    const int64_t rows = part.rows();
    for (int64_t c0 = 0; c0 < height; c0 += kPanelCols) {
      const int64_t n = std::min(kPanelCols, height - c0);
      left_.locate(part.begin, rows, i0 + c0, n, at.made, at.from);
      for (int64_t r0 = 0; r0 < rows; r0 += kRowsMultiple) {
        pack_rows<scalar_t>(
            [&](int64_t r) { return r0 + r < rows ? at.from[r0 + r] : nullptr; }, n, kRowsMultiple,
            n, kPanelCols, staged);
        for (int64_t i = 0; i < n; i += lanes) {
          transpose_square<Micro>(
              reinterpret_cast<const word_t*>(staged) + i, kPanelCols,
              reinterpret_cast<word_t*>(dst + (c0 + i) * ld + r0), ld / v);
        }
      }
    }
  }

  // The panel of columns [j0, j0 + n), of depth k; zeros after the last row.
  void pack_right(
      const Block& part, int64_t j0, int64_t n, int64_t k, const Buffers& at,
      operand_t* panel) const {
    const int64_t rows = part.rows();
    right_.locate(part.begin, rows, j0, n, at.made, at.from);
    for (int64_t j = 0; j < n; j += Micro::kTileCols) {
      pack_rows<scalar_t>(
          [&](int64_t r) { return r < rows && at.from[r] != nullptr ? at.from[r] + j : nullptr; },
          std::min(Micro::kTileCols, n - j), k, Micro::kTileCols, Micro::kTileCols, panel + j * k);
    }
  }

  const Tensor& grad_;
  GradOperand<scalar_t> left_, right_;
  acc_t unit_;
  Tensor target_;
  scalar_t* data_;  // of target_
  int64_t lines_, length_, line_stride_;
  int64_t task_lines_ = 0, left_size_ = 0, right_size_ = 0;
  int64_t step_ = Micro::kDepth;  // rows reduced per product
};

// Columns of a bias gradient in a task, and rows that are summed one after the other.
// These sums are added in pairs, so errors grow with the logarithm of the number of rows.
constexpr int64_t kSumCols = 128;
constexpr int64_t kSumRows = 32;

// sum (kSumCols) <- sum over rows [begin, end) of weight(r) * row(r)[0 : n], in an order
// that depends on their number alone. row(r) may be null: zeros.
template <typename scalar_t, typename RowFn, typename WeightFn>
void sum_rows(
    int64_t begin, int64_t end, int64_t n, const RowFn& row, const WeightFn& weight,
    acc_type<scalar_t>* sum) {
  using Vec = VecOf<scalar_t>;
  std::fill_n(sum, kSumCols, 0);
  if (end - begin <= kSumRows) {
    for (const auto r : c10::irange(begin, end)) {
      const scalar_t* from = row(r);
      const Vec scale(weight(r));
      for (int64_t j = 0; from != nullptr && j < n; j += kLanes<scalar_t>) {
        const auto x = load_lanes(from + j, n - j);
        vec::fmadd(scale, x, load_lanes(sum + j)).store(sum + j);
      }
    }
    return;
  }
  alignas(64) acc_type<scalar_t> second[kSumCols];
  const int64_t middle = begin + (end - begin) / 2;
  sum_rows<scalar_t>(begin, middle, n, row, weight, sum);
  sum_rows<scalar_t>(middle, end, n, row, weight, second);
  for (const auto j : c10::irange(kSumCols)) {
    sum[j] += second[j];
  }
}

// grad (E, cols) = sum over the expert's rows r of [weight_r *] source_r
template <typename scalar_t>
void column_sums(
    const Routing<acc_type<scalar_t>>& routing, const RowSource<scalar_t>& source, bool weighted,
    const Tensor& grad) {
  using acc_t = acc_type<scalar_t>;
  const int64_t cols = grad.size(1);
  const int64_t experts = grad.size(0);
  const int64_t chunks = ceil_div(cols, kSumCols);
  auto* out = grad.mutable_data_ptr<scalar_t>();
  at::parallel_for(
      0, experts * chunks,
      rows_grain((routing.last_row / std::max<int64_t>(1, experts) + 1) * kSumCols),
      [&](int64_t begin, int64_t end) {
        for (const auto task : c10::irange(begin, end)) {
          // Neighbouring tasks are of different experts, so threads share one with most rows.
          const Block& block = routing.experts[task % experts];
          const int64_t c0 = task / experts * kSumCols;
          const int64_t n = std::min(kSumCols, cols - c0);
          alignas(64) acc_t sum[kSumCols];
          sum_rows<scalar_t>(
              block.begin, block.end, n,
              [&](int64_t r) { return source.row(r, c0); },
              [&](int64_t r) { return weighted ? routing.weight(r) : acc_t(1); }, sum);
          store_row(out + block.expert * cols + c0, n, [&](int64_t j, int64_t) {
            return load_lanes(sum + j);
          });
        }
      });
}

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native
