#pragma once

// Products of a few rows with a weight that lies along K, for the kernels of
// _moe_mlp: a decode step, which reads every weight once and should do little else.
// MoEVectorGemm.h multiplies each weight by 16 rows, of which all but these few are
// zeros. Here 16 lines of the weight are transposed in registers, and a product is of
// 16 lines and one row. The order of addition is the same, so that the bits of a row
// do not depend on how many others there are.

#include <ATen/native/cpu/MoEAvx512Packing.h>
#include <ATen/native/cpu/MoEVectorGemm.h>

#include <cstring>
#include <type_traits>
#include <utility>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_thin {

// Rows up to which this is the faster one.
constexpr int64_t kMaxRows = 8;
// Lines of the weight in a register.
constexpr int64_t kLines = 16;
// Such registers at a time: a sum waits for its own last product.
constexpr int64_t kGroups = 2;
// Words (fp32, or a pair of bfloat16) of a line that are transposed at once.
constexpr int64_t kWords = 16;

using moe_vector::Prefetch;

// out[word][line] for the next kWords words of kLines lines, at most `left`.
C10_ALWAYS_INLINE void transpose_lines(
    const float* const* lines,
    int64_t word,
    int64_t left,
    float* out) {
  const void* from[kLines];
  for (const auto i : c10::irange(kLines)) {
    from[i] = lines[i] + word;
  }
  if (left >= kWords) {
    moe_avx512::transpose_words(from, out, kLines);
    return;
  }
  alignas(64) float rest[kLines * kWords];
  for (const auto i : c10::irange(kLines)) {
    std::memcpy(rest + i * kWords, from[i], left * sizeof(float));
    from[i] = rest + i * kWords;
  }
  moe_avx512::transpose_words(from, out, kLines);
}

// kGroups * kLines lines by `rows` rows.
template <typename compute_t, int64_t rows>
MOE_AVX512_BF16_TARGET void multiply_lines(
    const float* const* lines,
    int64_t words,
    const float* x,
    int64_t ld_x,
    Prefetch& prefetch,
    __m512* out) {
  __m512 sums[kGroups * rows];
  for (int64_t i = 0; i < kGroups * rows; ++i) {
    sums[i] = _mm512_setzero_ps();
  }
  alignas(64) float transposed[kGroups][kWords * kLines];
  for (int64_t word = 0; word < words; word += kWords) {
    const int64_t left = words - word;
    prefetch.next(kGroups * kLines);
    for (int64_t g = 0; g < kGroups; ++g) {
      transpose_lines(lines + g * kLines, word, left, transposed[g]);
    }
    for (int64_t w = 0; w < std::min(kWords, left); ++w) {
      for (int64_t r = 0; r < rows; ++r) {
        const __m512 x_word = _mm512_set1_ps(x[r * ld_x + word + w]);
        for (int64_t g = 0; g < kGroups; ++g) {
          const __m512 line_words = _mm512_load_ps(transposed[g] + w * kLines);
          __m512& sum = sums[g * rows + r];
          sum = moe_vector::add_product<compute_t>(sum, line_words, x_word);
        }
      }
    }
  }
  for (int64_t i = 0; i < kGroups * rows; ++i) {
    out[i] = sums[i];
  }
}

template <typename compute_t>
using multiply_lines_fn = void (*)(
    const float* const*,
    int64_t,
    const float*,
    int64_t,
    Prefetch&,
    __m512*);

template <typename compute_t, size_t... i>
multiply_lines_fn<compute_t> multiply_lines_of(
    int64_t rows,
    std::index_sequence<i...>) {
  static constexpr multiply_lines_fn<compute_t> table[] = {
      &multiply_lines<compute_t, i + 1>...};
  return table[rows - 1];
}

// C (n, m) = A (n, k) X^T (k, m) [+ C] for m <= kMaxRows and k a multiple of kVnni:
// both operands as they lie in memory. `next` is what will be multiplied after A.
template <typename compute_t>
inline void multiply(
    int64_t n,
    int64_t m,
    int64_t k,
    const compute_t* a,
    int64_t ld_a,
    const compute_t* x,
    int64_t ld_x,
    float* c,
    int64_t ld_c,
    bool accumulate,
    Prefetch next) {
  constexpr int64_t v = moe_avx512::kVnni<compute_t>;
  const auto multiply_lines = multiply_lines_of<compute_t>(
      m, std::make_index_sequence<kMaxRows>());
  for (int64_t i = 0; i < n; i += kGroups * kLines) {
    const int64_t count = std::min(kGroups * kLines, n - i);
    const float* lines[kGroups * kLines];
    for (const auto j : c10::irange(kGroups * kLines)) {
      // What there is more than `count` is not stored.
      lines[j] = reinterpret_cast<const float*>(
          a + (i + std::min(j, count - 1)) * ld_a);
    }
    const int64_t following = i + kGroups * kLines;
    Prefetch prefetch = following < n
        ? Prefetch(
              a + following * ld_a,
              std::min(kGroups * kLines, n - following),
              k,
              ld_a)
        : next;
    __m512 sums[kGroups * kMaxRows];
    multiply_lines(
        lines,
        k / v,
        reinterpret_cast<const float*>(x),
        ld_x / v,
        prefetch,
        sums);
    for (const auto g : c10::irange(kGroups)) {
      for (const auto r : c10::irange(m)) {
        alignas(64) float sum[kLines];
        _mm512_store_ps(sum, sums[g * m + r]);
        float* to = c + (i + g * kLines) * ld_c + r;
        for (const auto j : c10::irange(std::min(kLines, count - g * kLines))) {
          to[j * ld_c] = accumulate ? to[j * ld_c] + sum[j] : sum[j];
        }
      }
    }
  }
}

} // namespace moe_thin
} // namespace CPU_CAPABILITY
} // namespace at::native
