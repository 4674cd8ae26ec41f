#pragma once

// Gradients of one matrix per expert: grad[e] = left_e^T right_e over the rows of
// expert e, for the brgemm backward of _moe_mlp.

#include <ATen/core/Tensor.h>
#include <ATen/native/cpu/MoEBrgemmOperands.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty.h>
#endif

#include <vector>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_brgemm {

// Lines of a gradient that one task computes.
constexpr int64_t kGradLines = 512;
// Rows reduced per step. An expert with more keeps its sums in fp32 between the
// steps, 1 MiB for a task.
constexpr int64_t kGradRows = 512;
// Bytes of the packed right operand: as many columns as fit are multiplied with
// all lines of the task before the next ones.
constexpr int64_t kGradBytes = 512 * 1024;
// Lines of one product. A call of brgemm costs some 0.5 us before it starts, which
// is a quarter of a 64 x 64 product of 128 rows.
constexpr int64_t kGradProductLines = 256;
// Rows of a reduction step are padded with zeros to this multiple, so that a
// handful of brgemm kernels serves every expert size. It is the depth of an AMX
// bf16 instruction.
constexpr int64_t kGradRowsMultiple = 32;

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
    const int64_t right_bytes = std::min(
        kGradBytes,
        round_up(length_, kPanelCols) * depth *
            static_cast<int64_t>(sizeof(compute_t)));
    const int64_t sums_bytes = sizeof(float) *
        (most > kGradRows ? lines * columns_of(kGradRows)
                          : kGradProductLines * kPanelCols);
    const Scratch scratch(threads, left_bytes + right_bytes + sums_bytes);
    std::vector<const Block*> packed(threads);
    WorkList(experts, (lines_ + kGradLines - 1) / kGradLines, 1)
        .template run<compute_t>(
            threads,
            [&](int64_t thread,
                const Block& block,
                int64_t first,
                int64_t last) {
              char* base = scratch.at(thread);
              const Buffers buffers{
                  reinterpret_cast<compute_t*>(base),
                  reinterpret_cast<compute_t*>(base + left_bytes),
                  reinterpret_cast<float*>(base + left_bytes + right_bytes)};
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
    compute_t* right; // [panel][depth / v][kPanelCols][v]
    float* sums; // [panel][lines][kPanelCols], or one product's
  };

  // A step's share of a task: `rows` rows from row0 on, zero padded to `depth`, for
  // lines [i0, i0 + height) and columns [j0, j0 + width).
  struct Step {
    int64_t row0, rows, depth;
    int64_t i0, height;
    int64_t j0, width;
    bool is_first, is_last;
  };

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
    const int64_t depth =
        round_up(std::min(rows, kGradRows), kGradRowsMultiple);
    const int64_t width = columns_of(depth);
    for (int64_t j0 = 0; j0 < length_; j0 += width) {
      for (int64_t r0 = 0; r0 < rows; r0 += kGradRows) {
        const int64_t count = std::min(kGradRows, rows - r0);
        const Step step{
            block.begin + r0,
            count,
            round_up(count, kGradRowsMultiple),
            i0,
            height,
            j0,
            std::min(width, length_ - j0),
            r0 == 0,
            r0 + count == rows};
        if (!single || j0 == 0) {
          pack_left(step, buffers.left);
        }
        if (!has_right || !single || width < length_) {
          pack_right(step, buffers.right);
        }
        multiply_step(block, step, buffers);
      }
    }
  }

  void pack_left(const Step& step, compute_t* out) const {
    pack_transposed<scalar_t, compute_t>(
        [&](int64_t r) {
          const scalar_t* row = left_.row(step.row0 + r);
          return row == nullptr ? row : row + step.i0;
        },
        step.height,
        step.rows,
        step.depth,
        out);
  }

  // Row by row, all panels.
  void pack_right(const Step& step, compute_t* out) const {
    constexpr int64_t v = kVnni<compute_t>;
    for (int64_t r = 0; r < step.depth; r += v) {
      const scalar_t* from[v];
      for (const auto i : c10::irange(v)) {
        const scalar_t* row =
            r + i < step.rows ? right_.row(step.row0 + r + i) : nullptr;
        from[i] = row == nullptr ? row : row + step.j0;
      }
      for (int64_t j = 0; j < step.width; j += kPanelCols) {
        pack_along_n<scalar_t, compute_t>(
            [&](int64_t i) {
              return from[i] == nullptr ? from[i] : from[i] + j;
            },
            step.width - j,
            v,
            out + (j * step.depth + r * kPanelCols),
            kPanelCols);
      }
    }
  }

  // Adds a step; the last one writes a product while it is still in cache.
  void multiply_step(
      const Block& block,
      const Step& step,
      const Buffers& buffers) const {
    const int64_t lines =
        ProductStep::of<compute_t>(step.height, step.depth, kGradProductLines)
            .lines;
    const bool single = step.is_first && step.is_last;
    for (int64_t i = 0; i < step.height; i += lines) {
      const int64_t m = std::min(lines, step.height - i);
      for (int64_t j = 0; j < step.width; j += kPanelCols) {
        float* sums = single
            ? buffers.sums
            : buffers.sums + (j * step.height + i * kPanelCols);
        multiply<compute_t>(
            m,
            kPanelCols,
            step.depth,
            buffers.left + i * step.depth,
            step.depth,
            buffers.right + j * step.depth,
            kPanelCols,
            sums,
            kPanelCols,
            /*accumulate=*/!step.is_first);
        if (!step.is_last) {
          continue;
        }
        const int64_t n = std::min(kPanelCols, step.width - j);
        for (const auto l : c10::irange(m)) {
          const float* from = sums + l * kPanelCols;
          store_row(
              line(block, step.i0 + i + l) + step.j0 + j, n, [&](int64_t at) {
                return Vec::loadu(from + at);
              });
        }
      }
    }
  }

  const Tensor& grad_;
  RowSource<scalar_t> left_, right_;
  Tensor target_;
  scalar_t* data_; // of target_
  int64_t lines_, length_, line_stride_, expert_stride_;
};

} // namespace moe_brgemm
} // namespace CPU_CAPABILITY
} // namespace at::native
