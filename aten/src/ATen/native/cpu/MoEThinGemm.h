#pragma once

// Products of a few rows with a weight that lies along K, for the kernels of
// _moe_mlp: a decode step, which reads every weight once and should do little else.
// MoEVectorGemm.h multiplies each weight by 16 rows, of which all but these few are
// zeros. Here 16 lines of the weight are transposed in registers, and a product is of
// 16 lines and one row. The order of addition is the same, so that the bits of a row
// do not depend on how many others there are.

#include <ATen/native/cpu/MoEAvx512Packing.h>
#include <ATen/native/cpu/MoEVectorGemm.h>

#include <algorithm>
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
// Words (fp32, or a pair of bfloat16) of a line that are transposed at once, and
// between two looks at the prefetch.
constexpr int64_t kWords = 16;

using moe_vector::Prefetch;

// kLines lines of a weight, `stride` bytes apart: not always a multiple of a word.
struct Lines {
  const char* data;
  int64_t stride;

  Lines from(int64_t line, int64_t word) const {
    return {
        data + line * stride + word * static_cast<int64_t>(sizeof(float)),
        stride};
  }
};

// out[i][line] = word i of a line. All words of a line are read before those of the
// next: lines are often a multiple of a page apart, and then they all meet in the few
// places of L1 that an address can have.
C10_ALWAYS_INLINE void transpose_lines(
    const Lines& lines,
    __m512 (&out)[kWords]) {
  __m512 quads[4][4]; // [words 4 i to 4 i + 3][lines j, 4 + j, 8 + j, 12 + j]
  const auto load = [&](int64_t i, int64_t line) {
    return _mm_loadu_ps(reinterpret_cast<const float*>(
        lines.data + line * lines.stride + i * sizeof(__m128)));
  };
  MOE_UNROLL
  for (int64_t j = 0; j < 4; ++j) {
    MOE_UNROLL
    for (int64_t i = 0; i < 4; ++i) {
      quads[i][j] = _mm512_castps128_ps512(load(i, j));
    }
  }
  const auto insert = [&](auto part) {
    MOE_UNROLL
    for (int64_t j = 0; j < 4; ++j) {
      MOE_UNROLL
      for (int64_t i = 0; i < 4; ++i) {
        quads[i][j] = _mm512_insertf32x4(
            quads[i][j], load(i, 4 * part.value + j), part.value);
      }
    }
  };
  insert(std::integral_constant<int, 1>());
  insert(std::integral_constant<int, 2>());
  insert(std::integral_constant<int, 3>());
  MOE_UNROLL
  for (int64_t i = 0; i < 4; ++i) {
    moe_avx512::transpose_quads(quads[i], out + 4 * i);
  }
}

// sums[r] += lines x[r] over the first `words` of kWords words. x is [words][ld_x].
template <typename compute_t, int64_t rows>
MOE_AVX512_BF16_TARGET C10_ALWAYS_INLINE void add_products(
    const Lines& lines,
    const float* x,
    int64_t ld_x,
    int64_t words,
    __m512 (&sums)[rows]) {
  __m512 weight[kWords];
  transpose_lines(lines, weight);
  MOE_UNROLL
  for (int64_t word = 0; word < kWords; ++word) {
    if (word < words) {
      MOE_UNROLL
      for (int64_t r = 0; r < rows; ++r) {
        sums[r] = moe_vector::add_product<compute_t>(
            sums[r],
            weight[word],
            moe_vector::broadcast_word(x + word * ld_x + r));
      }
    }
  }
}

// The same of fewer lines or words.
template <typename compute_t, int64_t rows>
MOE_AVX512_BF16_TARGET C10_NOINLINE void add_last_products(
    const Lines& lines,
    int64_t count,
    const float* x,
    int64_t ld_x,
    int64_t words,
    __m512 (&sums)[rows]) {
  float part[kLines][kWords] = {};
  for (const auto i : c10::irange(count)) {
    std::memcpy(part[i], lines.from(i, 0).data, words * sizeof(float));
  }
  add_products<compute_t, rows>(
      {reinterpret_cast<const char*>(part), sizeof(part[0])},
      x,
      ld_x,
      words,
      sums);
}

// c[i][r] = or += lines[i] x[r] for `count` lines.
template <typename compute_t, int64_t rows>
MOE_AVX512_BF16_TARGET void multiply_lines(
    const Lines& lines,
    int64_t count,
    int64_t words,
    const float* x,
    float* c,
    int64_t ld_c,
    bool accumulate,
    Prefetch& prefetch) {
  __m512 sums[rows];
  MOE_UNROLL
  for (int64_t r = 0; r < rows; ++r) {
    sums[r] = _mm512_setzero_ps();
  }
  int64_t word = 0;
  if (count == kLines) {
    for (; word + kWords <= words; word += kWords) {
      prefetch.next(kLines);
      add_products<compute_t, rows>(
          lines.from(0, word), x + word * rows, rows, kWords, sums);
    }
  }
  for (; word < words; word += kWords) {
    add_last_products<compute_t, rows>(
        lines.from(0, word),
        count,
        x + word * rows,
        rows,
        std::min(kWords, words - word),
        sums);
  }
  for (const auto r : c10::irange(rows)) {
    alignas(64) float sum[kLines];
    _mm512_store_ps(sum, sums[r]);
    for (const auto i : c10::irange(count)) {
      float& to = c[i * ld_c + r];
      to = accumulate ? to + sum[i] : sum[i];
    }
  }
}

template <typename compute_t>
using multiply_lines_fn = void (*)(
    const Lines&,
    int64_t,
    int64_t,
    const float*,
    float*,
    int64_t,
    bool,
    Prefetch&);

template <typename compute_t, size_t... i>
multiply_lines_fn<compute_t> multiply_lines_of(
    int64_t rows,
    std::index_sequence<i...>) {
  static constexpr multiply_lines_fn<compute_t> table[] = {
      &multiply_lines<compute_t, i + 1>...};
  return table[rows - 1];
}

// C (n, m) = A (n, k) X [+ C] for m <= kMaxRows and k a multiple of v = kVnni, with X
// packed as [k / v][m][v]. `prefetch` is what will be multiplied after A.
template <typename compute_t>
inline void multiply(
    int64_t n,
    int64_t m,
    int64_t k,
    const compute_t* a,
    int64_t ld_a,
    const compute_t* x,
    float* c,
    int64_t ld_c,
    bool accumulate,
    Prefetch prefetch) {
  const auto multiply_lines = multiply_lines_of<compute_t>(
      m, std::make_index_sequence<kMaxRows>());
  const Lines lines{
      reinterpret_cast<const char*>(a),
      ld_a * static_cast<int64_t>(sizeof(compute_t))};
  for (int64_t i = 0; i < n; i += kLines) {
    multiply_lines(
        lines.from(i, 0),
        std::min(kLines, n - i),
        k / moe_avx512::kVnni<compute_t>,
        reinterpret_cast<const float*>(x),
        c + i * ld_c,
        ld_c,
        accumulate,
        prefetch);
  }
}

} // namespace moe_thin
} // namespace CPU_CAPABILITY
} // namespace at::native
