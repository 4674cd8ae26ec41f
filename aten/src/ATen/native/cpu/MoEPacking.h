#pragma once

// Rows of any dtype as vectors of the accumulation type, and the packing of operands
// for the micro-GEMMs of MoEMicroGemm.h.

#include <ATen/OpMathType.h>
#include <ATen/ceil_div.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <type_traits>

// Arrays of vectors are registers only if the loops over them are unrolled.
#if defined(__clang__)
#define MOE_UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define MOE_UNROLL _Pragma("GCC unroll 16")
#else
#define MOE_UNROLL
#endif

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

template <typename scalar_t>
using acc_type = at::opmath_type<scalar_t>;
// Elements of a row in the accumulation type: as many as a vector of 16-bit values holds.
template <typename scalar_t>
using VecOf = vec::VectorizedN<acc_type<scalar_t>, 2>;
template <typename scalar_t>
constexpr int64_t kLanes = VecOf<scalar_t>::size();
// The same elements as stored, in one vector or two.
template <typename scalar_t>
constexpr int kStored = std::is_same_v<scalar_t, acc_type<scalar_t>> ? 2 : 1;
template <typename scalar_t>
using StoredVec = vec::VectorizedN<scalar_t, kStored<scalar_t>>;

// A word of a packed operand is one element along K, or two of bfloat16.
template <typename operand_t>
constexpr int64_t kWordElements = std::is_same_v<operand_t, BFloat16> ? 2 : 1;
template <typename operand_t>
using word_type = std::conditional_t<std::is_same_v<operand_t, double>, double, float>;

// Columns of a packed panel, and of the tile that a product makes.
constexpr int64_t kPanelCols = 64;

// ---- rows as vectors ---------------------------------------------------------------

// The first n elements, and zeros.
template <typename scalar_t>
C10_ALWAYS_INLINE VecOf<scalar_t>
load_lanes(const scalar_t* src, int64_t n = kLanes<scalar_t>) {
  if (n < kLanes<scalar_t>) {
    alignas(64) scalar_t part[kLanes<scalar_t>] = {};
    std::copy_n(src, n, part);
    return load_lanes<scalar_t>(part);
  }
  return vec::convert<acc_type<scalar_t>, 2>(StoredVec<scalar_t>::loadu(src));
}

// Rounds to scalar_t, stores the first n elements unless dst is null, and returns the
// rounded values. A micro-GEMM may have an instruction for that.
template <typename scalar_t, typename Micro = void>
C10_ALWAYS_INLINE VecOf<scalar_t>
store_lanes(scalar_t* dst, const VecOf<scalar_t>& x, int64_t n = kLanes<scalar_t>) {
  if (dst != nullptr && n < kLanes<scalar_t>) {
    alignas(64) scalar_t part[kLanes<scalar_t>];
    const auto rounded = store_lanes<scalar_t, Micro>(part, x);
    std::copy_n(part, n, dst);
    return rounded;
  }
  StoredVec<scalar_t> rounded;
  if constexpr (requires { rounded = Micro::round(x[0], x[1]); }) {
    rounded = Micro::round(x[0], x[1]);
  } else {
    rounded = vec::convert<scalar_t, kStored<scalar_t>>(x);
  }
  if (dst != nullptr) {
    rounded.store(dst);
  }
  return vec::convert<acc_type<scalar_t>, 2>(rounded);
}

// Stores value(j), the elements [j, j + kLanes) of a row, for j < n.
template <typename Micro = void, typename scalar_t, typename ValueFn>
C10_ALWAYS_INLINE void store_row(scalar_t* dst, int64_t n, const ValueFn& value) {
  for (int64_t j = 0; j < n; j += kLanes<scalar_t>) {
    const int64_t count = std::min(kLanes<scalar_t>, n - j);
    store_lanes<scalar_t, Micro>(dst + j, value(j, count), count);
  }
}

template <typename scalar_t, typename operand_t>
inline void convert_row(const scalar_t* src, operand_t* dst, int64_t n) {
  if constexpr (std::is_same_v<scalar_t, operand_t>) {
    std::copy_n(src, n, dst);
  } else {
    store_row(dst, n, [&](int64_t j, int64_t count) { return load_lanes(src + j, count); });
  }
}

// sum over i < n of a[i] * b[i]: lanes, then across lanes.
template <typename scalar_t>
inline acc_type<scalar_t> dot(const scalar_t* a, const scalar_t* b, int64_t n) {
  using Vec = vec::Vectorized<acc_type<scalar_t>>;
  Vec sum(0);
  for (int64_t i = 0; i < n; i += kLanes<scalar_t>) {
    const int64_t count = std::min(kLanes<scalar_t>, n - i);
    const auto x = load_lanes(a + i, count), y = load_lanes(b + i, count);
    sum = sum + x[0] * y[0] + x[1] * y[1];
  }
  return vec::vec_reduce_all<acc_type<scalar_t>>(std::plus<>(), sum);
}

// ---- packing -----------------------------------------------------------------

// A part of a matrix: element (k, n) is data[k * k_stride + n * n_stride].
template <typename scalar_t>
struct StridedView {
  const scalar_t* data;
  int64_t k_stride;
  int64_t n_stride;
};

// Fetches the cache line at x into L2: lines of a weight are often a multiple of a page apart,
// and L1 has few places for those. x may be outside of every allocation. Always inlined, as GCC
// drops calls of functions that it takes to have no effect.
C10_ALWAYS_INLINE void prefetch(const void* x) {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
  _mm_prefetch(static_cast<const char*>(x), _MM_HINT_T1);
#endif
}

template <typename scalar_t>
C10_ALWAYS_INLINE void prefetch(const scalar_t* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(scalar_t))) {
    prefetch(x + i);
  }
}

// to[j * ld_to + i] = from[i * ld + j] for i and j below the lanes of a vector.
template <typename Micro, typename word_t>
C10_ALWAYS_INLINE void transpose_square(const word_t* from, int64_t ld, word_t* to, int64_t ld_to) {
  if constexpr (requires { Micro::transpose(from, ld, to, ld_to); }) {
    Micro::transpose(from, ld, to, ld_to);
  } else {
    constexpr int64_t lanes = vec::Vectorized<word_t>::size();
    vec::transpose_mxn<word_t, lanes, lanes>(from, ld, to, ld_to);
  }
}

// dst[w * ld + i] = word w of line i, for `lines` lines of `depth` elements: element e of
// line i is src[i * line_stride + e * stride]. Zero padded to whole words, and to `width`
// lines. The elements `ahead` are probably packed next and are fetched, unless it is 0.
template <typename Micro, typename scalar_t, typename operand_t>
void pack_lines(
    const scalar_t* src, int64_t line_stride, int64_t stride, int64_t lines, int64_t depth,
    int64_t width, int64_t ld, int64_t ahead, operand_t* dst) {
  using word_t = word_type<operand_t>;
  constexpr int64_t v = kWordElements<operand_t>;
  constexpr int64_t lanes = vec::Vectorized<word_t>::size();
  // At least a cache line of bfloat16 at a time.
  constexpr int64_t words = std::max<int64_t>(lanes, 16);
  alignas(64) operand_t staged[lanes][words * v];
  alignas(64) word_t flipped[words][lanes];
  auto* out = reinterpret_cast<word_t*>(dst);
  for (int64_t i0 = 0; i0 < width; i0 += lanes) {
    const scalar_t* block = src + i0 * line_stride;
    const int64_t columns = std::min(lanes, width - i0);
    int64_t k0 = 0;
    if constexpr (requires { Micro::pack_dense(block, line_stride, depth, ahead, out, ld); }) {
      if (stride == 1 && i0 + lanes <= lines) {
        k0 = Micro::pack_dense(block, line_stride, depth, ahead, out + i0, ld);
      }
    }
    for (; k0 < depth; k0 += words * v) {
      const int64_t count = std::min(words * v, depth - k0);
      for (const auto i : c10::irange(lanes)) {
        const scalar_t* from = block + i * line_stride + k0 * stride;
        const int64_t filled = i0 + i < lines ? count : 0;
        if (stride == 1) {
          convert_row(from, staged[i], filled);
        } else {
          for (const auto k : c10::irange(filled)) {
            staged[i][k] = static_cast<operand_t>(from[k * stride]);
          }
        }
        std::fill(staged[i] + filled, staged[i] + words * v, operand_t(0));
      }
      const bool whole = count == words * v && columns == lanes;
      word_t* to = out + k0 / v * ld + i0;
      for (int64_t w = 0; w < words; w += lanes) {
        transpose_square<Micro>(
            reinterpret_cast<const word_t*>(staged[0]) + w, words, whole ? to + w * ld : flipped[w],
            whole ? ld : lanes);
      }
      for (int64_t w = 0; !whole && w < ceil_div(count, v); ++w) {
        std::copy_n(flipped[w], columns, to + w * ld);
      }
    }
  }
}

// Words of two bfloat16, each the upper half of a float.
C10_ALWAYS_INLINE vec::Vectorized<int32_t>
join_halves(const vec::Vectorized<float>& lower, const vec::Vectorized<float>& upper) {
  using Words = vec::Vectorized<int32_t>;
  const Words low = (vec::cast<int32_t>(lower) >> Words(16)) & Words(0xffff);
  return low | vec::cast<int32_t>(upper);
}

// Words of two rows: element i of the first, then of the second.
inline void interleave_rows(const BFloat16* row0, const BFloat16* row1, int64_t n, BFloat16* dst) {
  using Words = vec::Vectorized<int32_t>;
  int64_t i = 0;
  for (; i + kLanes<BFloat16> <= n; i += kLanes<BFloat16>) {
    const auto lower = load_lanes(row0 + i), upper = load_lanes(row1 + i);
    for (const auto half : c10::irange(2)) {
      join_halves(lower[half], upper[half]).store(dst + 2 * (i + half * Words::size()));
    }
  }
  for (; i < n; ++i) {
    dst[2 * i] = row0[i];
    dst[2 * i + 1] = row1[i];
  }
}

// dst[w * ld + i] = word w of column i, for `depth` rows that are dense along the at most
// kPanelCols columns. row(k) may be null: zeros. Zero padded like pack_lines.
template <typename scalar_t, typename operand_t, typename RowFn>
void pack_rows(
    const RowFn& row, int64_t columns, int64_t depth, int64_t width, int64_t ld, operand_t* dst) {
  constexpr int64_t v = kWordElements<operand_t>;
  static const scalar_t zeros[kPanelCols] = {};
  const auto row_or_zeros = [&](int64_t k) {
    const scalar_t* from = k < depth ? row(k) : nullptr;
    return from != nullptr ? from : zeros;
  };
  for (int64_t k = 0; k < depth; k += v, dst += ld * v) {
    if constexpr (v == 2) {
      interleave_rows(row_or_zeros(k), row_or_zeros(k + 1), columns, dst);
    } else {
      convert_row(row_or_zeros(k), dst, columns);
    }
    std::fill(dst + columns * v, dst + width * v, operand_t(0));
  }
}

// Packs columns [at, at + width) of a panel: `columns` from b, then zeros.
// A panel is kPanelCols / tile_cols tiles of [words of depth][tile_cols]. `ahead` is as
// in pack_lines.
template <typename Micro, typename scalar_t, typename operand_t>
void pack_panel(
    const StridedView<scalar_t>& b, int64_t columns, int64_t depth, int64_t at, int64_t width,
    operand_t* panel, int64_t ahead = 0) {
  constexpr int64_t tile_cols = Micro::kTileCols;
  constexpr int64_t v = kWordElements<operand_t>;
  for (int64_t n = 0, count = 0; n < width; n += count) {
    const int64_t in_tile = (at + n) % tile_cols;
    count = std::min(tile_cols - in_tile, width - n);
    const int64_t filled = std::clamp<int64_t>(columns - n, 0, count);
    operand_t* dst = panel + (at + n - in_tile) * round_up(depth, v) + in_tile * v;
    const scalar_t* src = b.data + n * b.n_stride;
    if (b.n_stride == 1 && b.k_stride != 1) {
      const auto row = [&](int64_t k) {
        const scalar_t* from = src + k * b.k_stride;
        prefetch(from + ahead, ahead != 0 ? filled : 0);
        return from;
      };
      pack_rows<scalar_t>(row, filled, depth, count, tile_cols, dst);
    } else {
      pack_lines<Micro>(
          src, b.n_stride, b.k_stride, filled, depth, count, tile_cols, ahead, dst);
    }
  }
}

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native
