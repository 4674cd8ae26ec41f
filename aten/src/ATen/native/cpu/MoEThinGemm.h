#pragma once

// Products of a few rows with weights that lie along K, as they are stored: a decode step,
// which reads every weight once and should do little else. 16 lines of a weight are
// transposed in registers, and a product is of one word of them and of one row. The order
// of addition is that of VecGemm, so that a row has the same bits among many others.

#include <ATen/native/cpu/MoEMicroGemm.h>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

#if defined(CPU_CAPABILITY_AVX512)

template <typename operand, typename Products = FusedMultiplyAdd>
struct ThinGemm : VecGemm<operand, Products> {
  using operand_t = operand;
  using Vec = vec::Vectorized<float>;

  static constexpr int64_t kThinRows = 8;
  static constexpr int64_t kThinLines = 16;
  static constexpr int64_t kThinDepth = 16 * kWordElements<operand>;
  static_assert(VecGemm<operand, Products>::kMinDepth % kThinDepth == 0);

  // c[row * kPanelCols + i] = sum over k of rows[row][k] w[i * stride + k], for m rows and
  // i < lines.
  static void multiply_lines(
      int64_t m, int64_t lines, int64_t depth, const operand* const* rows, const operand* w,
      int64_t stride, float* c) {
    multiply_rows<kThinRows>(m, lines, depth, rows, w, stride, c);
  }

 private:
  // Cache lines of a line of w between what is multiplied and what is fetched.
  static constexpr int64_t kAhead = 8 * kThinDepth;

  template <int64_t most>
  static void multiply_rows(
      int64_t m, int64_t lines, int64_t depth, const operand* const* rows, const operand* w,
      int64_t stride, float* c) {
    if constexpr (most > 1) {
      if (m < most) {
        return multiply_rows<most - 1>(m, lines, depth, rows, w, stride, c);
      }
    }
    for (int64_t i = 0; i < lines; i += kThinLines) {
      multiply_block<most>(depth, rows, w + i * stride, stride, c + i);
    }
  }

  template <int64_t rows>
  static void multiply_block(
      int64_t depth, const operand* const* x, const operand* w, int64_t stride, float* c) {
    using Wide = VecGemm<operand, Products>;
    const int64_t step = Wide::kOneSum ? depth : Wide::kMinDepth;
    Vec total[rows];
    for (int64_t k0 = 0; k0 < depth; k0 += step) {
      const int64_t end = std::min(k0 + step, depth);
      Vec sums[rows];
      MOE_UNROLL
      for (int64_t r = 0; r < rows; ++r) {
        sums[r] = Vec(0);
      }
      for (int64_t k = k0; k < end; k += kThinDepth) {
        // Further along the lines, then along those that follow.
        const int64_t next = k + kAhead < depth ? kAhead : kAhead - depth + kThinLines * stride;
        __m512 words[16];
        transpose_words(
            [&](int64_t i) {
              prefetch(w + i * stride + k + next);
              return _mm512_loadu_ps(w + i * stride + k);
            },
            [&](int64_t at, __m512 word) { words[at] = word; });
        MOE_UNROLL
        for (int64_t at = 0; at < 16; ++at) {
          MOE_UNROLL
          for (int64_t r = 0; r < rows; ++r) {
            sums[r] = Products::add_word(x[r] + k + at * kWordElements<operand>, words[at], sums[r]);
          }
        }
      }
      MOE_UNROLL
      for (int64_t r = 0; r < rows; ++r) {
        total[r] = k0 > 0 ? total[r] + sums[r] : sums[r];
      }
    }
    MOE_UNROLL
    for (int64_t r = 0; r < rows; ++r) {
      total[r].store(c + r * kPanelCols);
    }
  }
};

#endif

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native
