#pragma once

// Operand packing for the AVX512 kernels of _moe_mlp: rows of tokens and expert
// weights into the layouts that the products read, and rows of floats back.
// MoEAvx512.h has the loops around it.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

// The files of a capability are compiled for AVX512; only functions of this target
// may hold instructions of AVX512-BF16.
#if defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 11)
#define MOE_HAS_AVX512_BF16
#define MOE_AVX512_BF16_TARGET __attribute__((target("avx512bf16")))
#else
#define MOE_AVX512_BF16_TARGET
#endif

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_avx512 {

using Vec = vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();

// Output columns of a packed weight panel: four registers of floats, so that a
// product of six rows keeps all the registers busy.
constexpr int64_t kPanelCols = 64;

// Type of the packed GEMM operands. float16 has no product that is summed in fp32
// and is multiplied as float32.
template <typename scalar_t>
using compute_type =
    std::conditional_t<std::is_same_v<scalar_t, BFloat16>, BFloat16, float>;

// Whether the functions of a call may be less exact than float's: its results are
// rounded to fewer bits.
template <typename scalar_t>
constexpr bool kFastMath = !std::is_same_v<scalar_t, float>;

// Elements along K that the packed layout keeps together: [K/v][N][v].
template <typename compute_t>
constexpr int64_t kVnni = sizeof(float) / sizeof(compute_t);

inline int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

template <typename scalar_t>
C10_ALWAYS_INLINE Vec load_float(const scalar_t* src) {
  if constexpr (std::is_same_v<scalar_t, float>) {
    return Vec::loadu(src);
  } else {
    Vec out;
    vec::load_to_float<scalar_t>(src, out);
    return out;
  }
}

template <typename scalar_t>
C10_ALWAYS_INLINE Vec load_float(const scalar_t* src, int64_t n) {
  if (n >= kLanes) {
    return load_float(src);
  }
  if constexpr (std::is_same_v<scalar_t, float>) {
    return Vec::loadu(src, n);
  } else {
    return std::get<0>(vec::convert_to_float<scalar_t>(
        vec::Vectorized<scalar_t>::loadu(src, n)));
  }
}

template <typename scalar_t>
C10_ALWAYS_INLINE void store_float(
    scalar_t* dst,
    const Vec& x,
    int64_t n = kLanes) {
  if constexpr (std::is_same_v<scalar_t, float>) {
    x.store(dst, std::min(n, kLanes));
  } else {
    vec::convert_from_float<scalar_t>(x, x).store(dst, std::min(n, kLanes));
  }
}

// Stores value(j), the lanes [j, j + kLanes) of a row, for j < n.
template <typename scalar_t, typename ValueFn>
C10_ALWAYS_INLINE void store_row(
    scalar_t* dst,
    int64_t n,
    const ValueFn& value) {
  int64_t j = 0;
  if constexpr (!std::is_same_v<scalar_t, float>) {
    // Two registers of floats are one of scalar_t.
    for (; j + 2 * kLanes <= n; j += 2 * kLanes) {
      vec::convert_from_float<scalar_t>(value(j), value(j + kLanes))
          .store(dst + j);
    }
  }
  for (; j < n; j += kLanes) {
    store_float(dst + j, value(j), n - j);
  }
}

// The value a float has after a round trip through scalar_t.
template <typename scalar_t>
C10_ALWAYS_INLINE Vec round_through(const Vec& x) {
  if constexpr (std::is_same_v<scalar_t, float>) {
    return x;
  } else {
    return std::get<0>(
        vec::convert_to_float<scalar_t>(vec::convert_from_float<scalar_t>(x, x)));
  }
}

// Two registers of floats rounded to scalar_t: stored, unless dst is null, and
// returned as the floats that scalar_t holds.
template <typename scalar_t>
C10_ALWAYS_INLINE std::pair<Vec, Vec> store_rounded(
    scalar_t* dst,
    const Vec& low,
    const Vec& high) {
  if constexpr (std::is_same_v<scalar_t, float>) {
    if (dst != nullptr) {
      low.store(dst);
      high.store(dst + kLanes);
    }
    return {low, high};
  } else {
    const auto rounded = vec::convert_from_float<scalar_t>(low, high);
    if (dst != nullptr) {
      rounded.store(dst);
    }
    const auto [first, second] = vec::convert_to_float<scalar_t>(rounded);
    return {first, second};
  }
}

template <typename scalar_t, typename compute_t>
inline void convert_row(const scalar_t* src, compute_t* dst, int64_t n) {
  if constexpr (std::is_same_v<scalar_t, compute_t>) {
    std::memcpy(dst, src, n * sizeof(scalar_t));
  } else {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      load_float(src + i).store(dst + i);
    }
    for (; i < n; ++i) {
      dst[i] = static_cast<float>(src[i]);
    }
  }
}

// ---- packing of the right operand: dst is [ceil(K/v)][width][v] ------------

C10_ALWAYS_INLINE __m128 load_quad(const void* row, int64_t word) {
  return _mm_loadu_ps(static_cast<const float*>(row) + word);
}

// Four words of every fourth of 16 rows.
C10_ALWAYS_INLINE __m512 load_quads(const void* const* rows, int64_t word) {
  __m512 x = _mm512_castps128_ps512(load_quad(rows[0], word));
  x = _mm512_insertf32x4(x, load_quad(rows[4], word), 1);
  x = _mm512_insertf32x4(x, load_quad(rows[8], word), 2);
  return _mm512_insertf32x4(x, load_quad(rows[12], word), 3);
}

// out[w][r] = word w of row r of 16, where quads[i] has four words of each of rows i,
// 4 + i, 8 + i and 12 + i: only the 4 x 4 blocks inside lanes are left to transpose.
C10_ALWAYS_INLINE void transpose_quads(const __m512 (&quads)[4], __m512* out) {
  const __m512d ab_low =
      _mm512_castps_pd(_mm512_unpacklo_ps(quads[0], quads[1]));
  const __m512d ab_high =
      _mm512_castps_pd(_mm512_unpackhi_ps(quads[0], quads[1]));
  const __m512d cd_low =
      _mm512_castps_pd(_mm512_unpacklo_ps(quads[2], quads[3]));
  const __m512d cd_high =
      _mm512_castps_pd(_mm512_unpackhi_ps(quads[2], quads[3]));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_low, cd_low));
  out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_low, cd_low));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high));
  out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high));
}

// out[w * ld + r] = the w-th of the 16 words (fp32, or a pair of bfloat16) at
// from[r].
C10_ALWAYS_INLINE void transpose_words(
    const void* const* from,
    float* out,
    int64_t ld) {
  for (int64_t word = 0; word < 16; word += 4) {
    const __m512 quads[4] = {
        load_quads(from, word),
        load_quads(from + 1, word),
        load_quads(from + 2, word),
        load_quads(from + 3, word)};
    __m512 words[4];
    transpose_quads(quads, words);
    for (const auto i : c10::irange(4)) {
      _mm512_storeu_ps(out + (word + i) * ld, words[i]);
    }
  }
}

// Two registers rounded to bfloat16, one after the other. The instruction makes 0 of
// subnormal floats, as the products do.
MOE_AVX512_BF16_TARGET C10_ALWAYS_INLINE __m512i
round_two(const Vec& low, const Vec& high) {
#ifdef MOE_HAS_AVX512_BF16
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
#else
  return __m512i(vec::convert_from_float<BFloat16>(low, high));
#endif
}

// Two columns rounded to bfloat16, the first in the lower halves.
MOE_AVX512_BF16_TARGET C10_ALWAYS_INLINE __m512i
pack_pair(const Vec& low, const Vec& high) {
  const __m512i interleave = _mm512_set_epi16(
      31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
      23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(interleave, round_two(low, high));
}

C10_ALWAYS_INLINE std::pair<Vec, Vec> unpack_pair(__m512i pair) {
  return {
      _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)),
      _mm512_castsi512_ps(
          _mm512_and_si512(pair, _mm512_set1_epi32(0xffff0000)))};
}

// dst[r][2 * i + j] = half j of words[i][r], for r < rows and 2 * i + j < columns.
inline void store_pairs(
    const __m512i* words,
    int64_t rows,
    int64_t columns,
    BFloat16* dst,
    int64_t ld) {
  const void* from[16];
  for (const auto i : c10::irange(16)) {
    from[i] = words + i;
  }
  if (rows >= 16 && columns >= 32 && ld % 2 == 0) {
    transpose_words(from, reinterpret_cast<float*>(dst), ld / 2);
    return;
  }
  alignas(64) float flipped[16 * 16];
  transpose_words(from, flipped, 16);
  rows = std::min<int64_t>(rows, 16);
  columns = std::min<int64_t>(columns, 32);
  for (const auto r : c10::irange(rows)) {
    std::memcpy(dst + r * ld, flipped + r * 16, columns * sizeof(BFloat16));
  }
}

// Rows of length k that become columns: column(n) is a pointer or null (zeros),
// and so is every column from n to width. dst is [ceil(k/v)][width][v].
template <typename scalar_t, typename compute_t, typename ColumnFn>
void pack_along_k(
    const ColumnFn& column,
    int64_t n,
    int64_t k,
    compute_t* dst,
    int64_t width) {
  constexpr int64_t v = kVnni<compute_t>;
  constexpr int64_t step = 16 * v;
  constexpr bool same_type = std::is_same_v<scalar_t, compute_t>;
  auto* words = reinterpret_cast<float*>(dst);
  alignas(64) static constexpr char zeros[64] = {};
  alignas(64) compute_t stage[16 * step];
  alignas(64) float flipped[16 * 16];
  for (int64_t n0 = 0; n0 < width; n0 += 16) {
    const int64_t columns = std::min<int64_t>(16, width - n0);
    const scalar_t* source[16];
    const void* from[16];
    for (const auto i : c10::irange(16)) {
      source[i] = n0 + i < n ? column(n0 + i) : nullptr;
      from[i] = zeros;
    }
    for (int64_t k0 = 0; k0 < k; k0 += step) {
      const int64_t depth = std::min(step, k - k0);
      for (const auto i : c10::irange(16)) {
        if (source[i] == nullptr) {
          continue;
        }
        from[i] = source[i] + k0;
        _mm_prefetch(
            reinterpret_cast<const char*>(source[i] + k0 + 4 * step),
            _MM_HINT_T0);
        if (!same_type || depth < step) {
          std::fill_n(stage + i * step + depth, step - depth, compute_t(0));
          convert_row(source[i] + k0, stage + i * step, depth);
          from[i] = stage + i * step;
        }
      }
      float* out = words + k0 / v * width + n0;
      if (depth == step && columns == 16) {
        transpose_words(from, out, width);
        continue;
      }
      transpose_words(from, flipped, 16);
      for (const auto i : c10::irange((depth + v - 1) / v)) {
        std::memcpy(out + i * width, flipped + i * 16, columns * sizeof(float));
      }
    }
  }
}

// Words of an element of a and the same of b: the first 16 and the others.
struct InterleavedWords {
  __m512i low, high;
};

C10_ALWAYS_INLINE InterleavedWords interleave_words(__m512i a, __m512i b) {
  const __m512i low = _mm512_set_epi16(
      47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
      39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_set_epi16(
      63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24,
      55, 23, 54, 22, 53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
  return {
      _mm512_permutex2var_epi16(a, low, b),
      _mm512_permutex2var_epi16(a, high, b)};
}

// Two rows of the right operand (either may be null: zeros) interleaved.
template <typename scalar_t, typename compute_t>
inline void interleave_rows(
    const scalar_t* row0,
    const scalar_t* row1,
    int64_t n,
    compute_t* dst,
    int64_t width) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512i a =
        row0 ? _mm512_loadu_si512(row0 + i) : _mm512_setzero_si512();
    const __m512i b =
        row1 ? _mm512_loadu_si512(row1 + i) : _mm512_setzero_si512();
    const auto words = interleave_words(a, b);
    _mm512_storeu_si512(dst + 2 * i, words.low);
    _mm512_storeu_si512(dst + 2 * i + 32, words.high);
  }
  for (; i < n; ++i) {
    dst[2 * i] = row0 ? row0[i] : scalar_t(0);
    dst[2 * i + 1] = row1 ? row1[i] : scalar_t(0);
  }
  for (; i < width; ++i) {
    dst[2 * i] = dst[2 * i + 1] = scalar_t(0);
  }
}

// Rows k of the source are contiguous along N; row(k) is a pointer or null.
template <typename scalar_t, typename compute_t, typename RowFn>
void pack_along_n(
    const RowFn& row,
    int64_t n,
    int64_t k,
    compute_t* dst,
    int64_t width) {
  n = std::clamp<int64_t>(n, 0, width);
  if constexpr (kVnni<compute_t> == 2) {
    for (int64_t i = 0; i < k; i += 2) {
      interleave_rows<scalar_t, compute_t>(
          row(i), i + 1 < k ? row(i + 1) : nullptr, n, dst + i * kPanelCols,
          width);
    }
  } else {
    for (const auto i : c10::irange(k)) {
      float* out = dst + i * kPanelCols;
      const scalar_t* from = row(i);
      if (from != nullptr) {
        convert_row(from, out, n);
      }
      const int64_t filled = from != nullptr ? n : 0;
      std::fill(out + filled, out + width, 0.f);
    }
  }
}

// ---- packing of the left operand -------------------------------------------

// Rows of length k, zero padded to a multiple of v; row(r) null: zeros.
template <typename scalar_t, typename compute_t, typename RowFn>
void pack_rows(
    const RowFn& row,
    int64_t rows,
    int64_t k,
    compute_t* dst) {
  const int64_t ld = round_up(k, kVnni<compute_t>);
  for (const auto r : c10::irange(rows)) {
    const scalar_t* from = row(r);
    compute_t* out = dst + r * ld;
    if (from == nullptr) {
      std::memset(out, 0, ld * sizeof(compute_t));
    } else {
      convert_row(from, out, k);
      std::fill(out + k, out + ld, compute_t(0));
    }
  }
}

// From row + i on 32 elements, zeros from n on; row may be null: zeros.
C10_ALWAYS_INLINE __m512i
load_part(const BFloat16* row, int64_t i, int64_t n) {
  if (row == nullptr) {
    return _mm512_setzero_si512();
  }
  return n - i >= 32
      ? _mm512_loadu_si512(row + i)
      : _mm512_maskz_loadu_epi16((1u << (n - i)) - 1, row + i);
}

// 32 columns of 32 rows, transposed: pairs of rows are words, and a line of the
// result is 16 words.
template <typename RowFn>
void transpose_pairs(
    const RowFn& row,
    int64_t i,
    int64_t n,
    BFloat16* dst,
    int64_t ld) {
  __m512i low[16], high[16];
  for (const auto pair : c10::irange(16)) {
    const auto words = interleave_words(
        load_part(row(2 * pair), i, n), load_part(row(2 * pair + 1), i, n));
    low[pair] = words.low;
    high[pair] = words.high;
  }
  store_pairs(low, n - i, 32, dst, ld);
  if (n - i > 16) {
    store_pairs(high, n - i - 16, 32, dst + 16 * ld, ld);
  }
}

// dst[i][k] = row(k)[i] for i < n, k < rows; zeros up to k_padded, which is ld of
// dst and a multiple of 32.
template <typename scalar_t, typename compute_t, typename RowFn>
void pack_transposed(
    const RowFn& row,
    int64_t n,
    int64_t rows,
    int64_t k_padded,
    compute_t* dst) {
  if constexpr (std::is_same_v<compute_t, BFloat16>) {
    for (int64_t k0 = 0; k0 < k_padded; k0 += 32) {
      const scalar_t* from[32];
      for (const auto k : c10::irange(32)) {
        from[k] = k0 + k < rows ? row(k0 + k) : nullptr;
      }
      for (int64_t i = 0; i < n; i += 32) {
        transpose_pairs(
            [&](int64_t k) { return from[k]; },
            i,
            n,
            dst + i * k_padded + k0,
            k_padded);
      }
    }
  } else {
    // Without pairs the two layouts are one.
    pack_along_k<scalar_t, compute_t>(row, rows, n, dst, k_padded);
  }
}

} // namespace moe_avx512
} // namespace CPU_CAPABILITY
} // namespace at::native
