#pragma once

// Gradients of one matrix per expert: grad[e] = left_e^T right_e over the rows of
// expert e, for the AVX512 backward of _moe_mlp.

#include <ATen/core/Tensor.h>
#include <ATen/native/cpu/MoEAvx512Operands.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty.h>
#endif

#include <functional>
#include <vector>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_avx512 {

// Lines of a gradient that one task computes.
constexpr int64_t kGradLines = 512;
// Rows reduced per step. An expert with more keeps its sums in fp32 between the
// steps, at most 1 MiB for a task.
constexpr int64_t kGradRows = 512;
// Bytes of the packed right operand: as many columns as fit are multiplied with
// all lines of the task before the next ones.
constexpr int64_t kGradBytes = 512 * 1024;
// The same for an operand whose rows are made: all columns of all steps, if they fit,
// are packed once per expert. The threads together do not use more than the operand's
// rows would, had they been written, or kGradBytes each.
constexpr int64_t kGradMadeBytes = 2 * 1024 * 1024;
// Lines of one product, stored from registers: so few that they stay in L1 and their
// pages of the gradient in the TLB.
constexpr int64_t kGradProductLines = 60;
// Rows of a reduction step are padded with zeros to this multiple: the depth of an AMX
// instruction, and what pack_transposed writes at once.
constexpr int64_t kGradRowsMultiple = 32;

// Columns of the right operand that are made at once, and elements of either.
constexpr int64_t kMadeColumns = 8 * 1024;
constexpr int64_t kMadeElements = 2 * kMadeColumns;

// The rows of an operand: those of a RowSource, or made when they are packed, which
// costs less than to write and read them once they do not fit the caches.
template <typename scalar_t>
struct GradOperand {
  RowSource<scalar_t> rows;
  // make(row, c0, n, out) writes columns [c0, c0 + n) of a row.
  std::function<void(int64_t, int64_t, int64_t, scalar_t*)> make;

  // Columns [c0, c0 + n) of a row, null: zeros. In `buffer` if they are made.
  const scalar_t* part(int64_t row, int64_t c0, int64_t n, scalar_t* buffer)
      const {
    if (make) {
      make(row, c0, n, buffer);
      return buffer;
    }
    const scalar_t* source = rows.row(row);
    return source == nullptr ? source : source + c0;
  }
};

// grad (E, I, J) = sum over the expert's rows r of left_r^T right_r.
template <typename scalar_t>
class WeightGrad {
  using compute_t = compute_type<scalar_t>;

 public:
  // left has I columns and right has J. The operands change sides when I is the
  // dense dimension of the gradient.
  WeightGrad(
      const Tensor& grad,
      const GradOperand<scalar_t>& left,
      const GradOperand<scalar_t>& right)
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
    expert_stride_ = target_.stride(0);
    data_ = target_.mutable_data_ptr<scalar_t>();
    if (swapped) {
      std::swap(left_, right_);
    }
  }

  void run(const std::vector<Block>& experts) const {
    const int64_t threads = at::get_num_threads();
    const int64_t most = most_rows(experts);
    const int64_t depth =
        round_up(std::min(most, kGradRows), kGradRowsMultiple);
    const int64_t lines = std::min(kGradLines, round_up(lines_, 32));
    const int64_t left_bytes = lines * depth * sizeof(compute_t);
    // What lies behind it is aligned, too.
    const int64_t right_bytes = round_up(
        std::min(most_right_bytes(experts, threads), right_bytes_of(most)), 64);
    const int64_t sums_bytes = sizeof(float) *
        (most > kGradRows ? lines * columns_of(kGradRows)
                          : kGradProductLines * kPanelCols);
    const int64_t made_bytes = left_.make || right_.make
        ? kMadeElements * static_cast<int64_t>(sizeof(scalar_t))
        : 0;
    const Scratch scratch(
        threads, left_bytes + right_bytes + sums_bytes + made_bytes);
    std::vector<const Block*> packed(threads);
    WorkList(experts, (lines_ + kGradLines - 1) / kGradLines, 1)
        .template run<compute_t>(
            threads,
            [&](int64_t thread,
                const Block& block,
                const Block*,
                int64_t first,
                int64_t last) {
              char* base = scratch.at(thread);
              const Buffers buffers{
                  reinterpret_cast<compute_t*>(base),
                  reinterpret_cast<compute_t*>(base + left_bytes),
                  right_bytes,
                  reinterpret_cast<float*>(base + left_bytes + right_bytes),
                  reinterpret_cast<scalar_t*>(
                      base + left_bytes + right_bytes + sums_bytes)};
              for (const auto i : c10::irange(first, last)) {
                compute_lines(
                    block, i * kGradLines, packed[thread] == &block, buffers);
                packed[thread] = &block;
              }
            });
    if (!target_.is_same(grad_)) {
      grad_.copy_(target_);
    }
  }

 private:
  struct Buffers {
    compute_t* left; // [lines][depth]
    compute_t* right; // [step][panel][depth / v][kPanelCols][v]
    int64_t right_bytes;
    float* sums; // [panel][lines][kPanelCols], or one product's
    scalar_t* made; // kMadeElements, if an operand is made
  };

  // A step's share of a task: `rows` rows from row0 on, zero padded to `depth`, for
  // lines [i0, i0 + height) and columns [j0, j0 + width).
  struct Step {
    int64_t row0, rows, depth;
    int64_t i0, height;
    int64_t j0, width;
    bool is_first, is_last;
  };

  // Of the packed right operand of an expert with so many rows.
  int64_t right_bytes_of(int64_t rows) const {
    return round_up(rows, kGradRowsMultiple) * round_up(length_, kPanelCols) *
        static_cast<int64_t>(sizeof(compute_t));
  }

  int64_t most_right_bytes(const std::vector<Block>& experts, int64_t threads)
      const {
    if (!right_.make || experts.empty()) {
      return kGradBytes;
    }
    const int64_t rows_bytes = experts.back().end * length_ *
        static_cast<int64_t>(sizeof(scalar_t));
    return std::clamp(rows_bytes / threads, kGradBytes, kGradMadeBytes);
  }

  // Columns whose packed rows fit kGradBytes.
  int64_t columns_of(int64_t depth) const {
    static_assert(
        kGradRows * kPanelCols * sizeof(compute_t) <= kGradBytes,
        "one panel fits");
    const int64_t fits = kGradBytes /
        (depth * kPanelCols * static_cast<int64_t>(sizeof(compute_t)));
    return std::min(round_up(length_, kPanelCols), fits * kPanelCols);
  }

  scalar_t* line(const Block& block, int64_t i) const {
    return data_ + block.expert * expert_stride_ + i * line_stride_;
  }

  // kGradLines lines of an expert's gradient. has_right: the right operand of all
  // its rows and columns is packed already, if it fits.
  void compute_lines(
      const Block& block,
      int64_t i0,
      bool has_right,
      const Buffers& buffers) const {
    const int64_t height = std::min(kGradLines, lines_ - i0);
    const int64_t rows = block.end - block.begin;
    if (rows == 0) {
      for (const auto i : c10::irange(height)) {
        std::fill_n(line(block, i0 + i), length_, scalar_t(0));
      }
      return;
    }
    if (line_stride_ == length_) {
      map_pages(
          line(block, i0),
          height * length_ * static_cast<int64_t>(sizeof(scalar_t)));
    }
    const bool single = rows <= kGradRows;
    const bool right_fits = right_bytes_of(rows) <= buffers.right_bytes;
    const auto step_of = [&](int64_t r0, int64_t j0, int64_t width) {
      const int64_t count = std::min(kGradRows, rows - r0);
      return Step{
          block.begin + r0,
          count,
          round_up(count, kGradRowsMultiple),
          i0,
          height,
          j0,
          std::min(width, length_ - j0),
          r0 == 0,
          r0 + count == rows};
    };
    const auto right_of = [&](const Step& step) {
      return right_fits ? buffers.right + step.j0 * step.depth +
              (step.row0 - block.begin) * round_up(length_, kPanelCols)
                        : buffers.right;
    };
    if (right_fits && !has_right) {
      for (int64_t r0 = 0; r0 < rows; r0 += kGradRows) {
        const auto step = step_of(r0, 0, length_);
        pack_right(step, buffers.made, right_of(step));
      }
    }
    const int64_t width =
        columns_of(round_up(std::min(rows, kGradRows), kGradRowsMultiple));
    for (int64_t j0 = 0; j0 < length_; j0 += width) {
      for (int64_t r0 = 0; r0 < rows; r0 += kGradRows) {
        const auto step = step_of(r0, j0, width);
        if (!single || j0 == 0) {
          pack_left(step, buffers);
        }
        if (!right_fits) {
          pack_right(step, buffers.made, buffers.right);
        }
        multiply_step(block, step, right_of(step), buffers);
      }
    }
  }

  void pack_left(const Step& step, const Buffers& buffers) const {
    static_assert(kGradRowsMultiple * kGradLines <= kMadeElements);
    pack_transposed<scalar_t, compute_t>(
        [&](int64_t r) {
          return left_.part(
              step.row0 + r,
              step.i0,
              step.height,
              buffers.made + r % kGradRowsMultiple * step.height);
        },
        step.height,
        step.rows,
        step.depth,
        buffers.left);
  }

  // Row by row, all panels.
  void pack_right(const Step& step, scalar_t* made, compute_t* out) const {
    constexpr int64_t v = kVnni<compute_t>;
    static_assert(v * kMadeColumns <= kMadeElements);
    for (int64_t j0 = 0; j0 < step.width; j0 += kMadeColumns) {
      const int64_t width = std::min(kMadeColumns, step.width - j0);
      for (int64_t r = 0; r < step.depth; r += v) {
        const scalar_t* from[v];
        for (const auto i : c10::irange(v)) {
          from[i] = r + i < step.rows
              ? right_.part(
                    step.row0 + r + i, step.j0 + j0, width, made + i * width)
              : nullptr;
        }
        for (int64_t j = 0; j < width; j += kPanelCols) {
          pack_along_n<scalar_t, compute_t>(
              [&](int64_t i) {
                return from[i] == nullptr ? from[i] : from[i] + j;
              },
              width - j,
              v,
              out + ((j0 + j) * step.depth + r * kPanelCols),
              kPanelCols);
        }
      }
    }
  }

  // Adds a step; the last one writes the gradient.
  void multiply_step(
      const Block& block,
      const Step& step,
      const compute_t* right,
      const Buffers& buffers) const {
    if (!uses_tiles<compute_t>() && step.is_last) {
      multiply_last(block, step, right, buffers);
      return;
    }
    const int64_t lines =
        ProductStep::of<compute_t>(step.height, step.depth, kGradProductLines)
            .lines;
    const bool single = step.is_first && step.is_last;
    moe_vector::PacedPrefetch no_prefetch;
    for (int64_t i = 0; i < step.height; i += lines) {
      const int64_t m = std::min(lines, step.height - i);
      for (int64_t j = 0; j < step.width; j += kPanelCols) {
        float* sums = single
            ? buffers.sums
            : buffers.sums + (j * step.height + i * kPanelCols);
        multiply_packed<compute_t>(
            m,
            kPanelCols,
            step.depth,
            buffers.left + i * step.depth,
            step.depth,
            right + j * step.depth,
            kPanelCols,
            sums,
            kPanelCols,
            /*accumulate=*/!step.is_first,
            no_prefetch);
        if (!step.is_last) {
          continue;
        }
        // While the product is still in cache.
        const int64_t n = std::min(kPanelCols, step.width - j);
        for (const auto l : c10::irange(m)) {
          store_line(
              line(block, step.i0 + i + l) + step.j0 + j,
              n,
              sums + l * kPanelCols);
        }
      }
    }
  }

  // n of the kPanelCols floats from `sums` on.
  MOE_AVX512_BF16_TARGET static void store_line(
      scalar_t* dst,
      int64_t n,
      const float* sums) {
    __m512 out[kPanelCols / kLanes];
    MOE_UNROLL
    for (int64_t j = 0; j < kPanelCols / kLanes; ++j) {
      out[j] = _mm512_loadu_ps(sums + j * kLanes);
    }
    moe_vector::store_registers(dst, n, out);
  }

  // Writes the gradient's rows from the registers of a product. Their memory is asked
  // for before it, or the stores would wait for it one after the other.
  struct GradRows {
    scalar_t* data;
    int64_t ld;
    int64_t columns;
    const float* sums; // of the steps before, or null

    C10_ALWAYS_INLINE void begin(int64_t row) const {
      constexpr int64_t line = 64 / sizeof(scalar_t);
      for (int64_t j = 0; j < kPanelCols; j += line) {
        _mm_prefetch(
            reinterpret_cast<const char*>(data + row * ld + j), _MM_HINT_T0);
      }
    }
    template <int64_t registers>
    MOE_AVX512_BF16_TARGET C10_ALWAYS_INLINE void finish(
        int64_t row,
        const __m512 (&products)[registers]) const {
      __m512 out[registers];
      MOE_UNROLL
      for (int64_t j = 0; j < registers; ++j) {
        out[j] = sums == nullptr
            ? products[j]
            : _mm512_add_ps(
                  _mm512_loadu_ps(sums + row * kPanelCols + j * kLanes),
                  products[j]);
      }
      moe_vector::store_registers(data + row * ld, columns, out);
    }
  };

  void multiply_last(
      const Block& block,
      const Step& step,
      const compute_t* right,
      const Buffers& buffers) const {
    constexpr int64_t v = kVnni<compute_t>;
    moe_vector::PacedPrefetch no_prefetch;
    for (int64_t i = 0; i < step.height; i += kGradProductLines) {
      for (int64_t j = 0; j < step.width; j += kPanelCols) {
        moe_vector::multiply_rows<compute_t, moe_vector::kMaxRegisters>(
            std::min(kGradProductLines, step.height - i),
            moe_vector::Operands{
                reinterpret_cast<const float*>(buffers.left + i * step.depth),
                step.depth / v,
                reinterpret_cast<const float*>(right + j * step.depth),
                kPanelCols,
                step.depth / v},
            no_prefetch,
            GradRows{
                line(block, step.i0 + i) + step.j0 + j,
                line_stride_,
                std::min(kPanelCols, step.width - j),
                step.is_first ? nullptr
                              : buffers.sums + j * step.height + i * kPanelCols});
      }
    }
  }

  const Tensor& grad_;
  GradOperand<scalar_t> left_, right_;
  Tensor target_;
  scalar_t* data_; // of target_
  int64_t lines_, length_, line_stride_, expert_stride_;
};

} // namespace moe_avx512
} // namespace CPU_CAPABILITY
} // namespace at::native
