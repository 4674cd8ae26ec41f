#pragma once

// Building blocks of the brgemm kernels of _moe_mlp and _moe_mlp_backward:
// operand packing, the blocked GEMM loop and the static work split. A "block"
// is a run of rows of one expert, a "panel" is kPanelCols output columns of that
// expert's GEMM. MoEGemm.h is the portable counterpart.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/irange.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty.h>
#endif

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_brgemm {

using Vec = vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();

// Blocking. None of these numbers depends on the number of rows of an expert
// or on the thread count: the order in which one output element is accumulated
// is a function of D, F and this table alone.
// Output columns of a packed weight panel. 64 fp32 columns are four zmm, with
// which brgemm reaches its peak from 8 rows on.
constexpr int64_t kPanelCols = 64;
// Rows of one brgemm call: its 64 x 64 fp32 result (16 KiB) is still in L1
// when the epilogue reads it.
constexpr int64_t kTileRows = 64;
// Bytes of one packed panel along K: a quarter of a 1 MiB L2.
constexpr int64_t kPanelBytes = 256 * 1024;
// Bytes of gathered rows one thread keeps; beyond that the panels are packed
// again for the next block of rows.
constexpr int64_t kBlockBytes = 2 * 1024 * 1024;
constexpr int64_t kMaxBlockTiles = 64;
// (block, panel) steps that every thread should get at least: the split is at
// step granularity, so this bounds the imbalance to a quarter.
constexpr int64_t kStepsPerThread = 4;
// Rows whose GEMM costs as much as packing their weight panel (work split).
constexpr int64_t kPackCostRows = 24;
// The routed rows of y and dX exist only this many bytes at a time (columns
// are cut): they are still in L3 when they are summed, and a buffer of this
// size is recycled by malloc instead of being mapped and zeroed anew.
constexpr int64_t kCombineBytes = 8 * 1024 * 1024;
constexpr int64_t kMinCombineCols = 4 * kPanelCols;
// Tokens that are worth another thread.
constexpr int64_t kCombineGrain = 16;
// Weight gradient: macro tile and rows reduced per step. The packed operands
// and the fp32 tile are 0.4 MiB in bf16.
constexpr int64_t kGradTile = 256;
constexpr int64_t kGradRows = 256;
// Rows of a reduction step are padded with zeros to this multiple, so that a
// handful of brgemm kernels serves every expert size.
constexpr int64_t kGradRowsMultiple = 8;
// Rows whose product costs as much as writing the finished tile (work split).
constexpr int64_t kGradWriteRows = 64;

// Type of the packed GEMM operands. brgemm has a bfloat16 dot product on every
// AVX512 machine; float16 would need avx512_fp16 and is multiplied in fp32.
template <typename scalar_t>
using compute_type =
    std::conditional_t<std::is_same_v<scalar_t, BFloat16>, BFloat16, float>;

// Elements along K that the packed layout keeps together: [K/v][N][v].
template <typename compute_t>
constexpr int64_t kVnni = sizeof(float) / sizeof(compute_t);

template <typename compute_t>
constexpr int64_t kPanelDepth =
    kPanelBytes / (kPanelCols * static_cast<int64_t>(sizeof(compute_t)));

inline int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

template <typename scalar_t>
inline Vec load_float(const scalar_t* src) {
  if constexpr (std::is_same_v<scalar_t, float>) {
    return Vec::loadu(src);
  } else {
    Vec out;
    vec::load_to_float<scalar_t>(src, out);
    return out;
  }
}

template <typename scalar_t>
inline Vec load_float(const scalar_t* src, int64_t n) {
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
inline void store_float(scalar_t* dst, const Vec& x, int64_t n = kLanes) {
  if constexpr (std::is_same_v<scalar_t, float>) {
    x.store(dst, std::min(n, kLanes));
  } else {
    vec::convert_from_float<scalar_t>(x, x).store(dst, std::min(n, kLanes));
  }
}

// The value a float has after a round trip through scalar_t.
template <typename scalar_t>
inline Vec round_through(const Vec& x) {
  if constexpr (std::is_same_v<scalar_t, float>) {
    return x;
  } else {
    return std::get<0>(
        vec::convert_to_float<scalar_t>(vec::convert_from_float<scalar_t>(x, x)));
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

// ---- packing of the right operand: dst is [ceil(K/v)][kPanelCols][v] -------

// Transposes a 16 x 16 block of 32-bit units (one float or two bfloat16).
inline void transpose16(const float* src, int64_t ld_src, float* dst) {
  vec::transpose_mxn<float, 16, 16>(src, ld_src, dst, kPanelCols);
}

// Columns n of the source are contiguous along K: src[n * ld + k].
template <typename scalar_t, typename compute_t>
void pack_along_k(
    const scalar_t* src,
    int64_t ld,
    int64_t n,
    int64_t k,
    compute_t* dst,
    int64_t width) {
  constexpr int64_t v = kVnni<compute_t>;
  constexpr int64_t step = 16 * v;
  const bool whole_words =
      std::is_same_v<scalar_t, compute_t> && (v == 1 || ld % v == 0);
  auto* words = reinterpret_cast<float*>(dst);
  alignas(64) compute_t stage[16 * step];
  alignas(64) float flipped[16 * kPanelCols];
  for (int64_t n0 = 0; n0 < width; n0 += 16) {
    const int64_t cols = std::clamp<int64_t>(n - n0, 0, 16);
    for (int64_t k0 = 0; k0 < k; k0 += step) {
      const int64_t depth = std::min(step, k - k0);
      const scalar_t* block = src + n0 * ld + k0;
      float* out = words + k0 / v * kPanelCols + n0;
      if (whole_words && cols == 16 && depth == step) {
        transpose16(reinterpret_cast<const float*>(block), ld / v, out);
        continue;
      }
      if (cols < 16 || depth < step) {
        std::memset(stage, 0, sizeof(stage));
      }
      for (const auto i : c10::irange(cols)) {
        convert_row(block + i * ld, stage + i * step, depth);
      }
      if (depth == step) {
        transpose16(reinterpret_cast<const float*>(stage), 16, out);
        continue;
      }
      transpose16(reinterpret_cast<const float*>(stage), 16, flipped);
      for (const auto i : c10::irange((depth + v - 1) / v)) {
        std::memcpy(
            out + i * kPanelCols, flipped + i * kPanelCols, 16 * sizeof(float));
      }
    }
  }
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
  const __m512i low = _mm512_set_epi16(
      47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
      39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_set_epi16(
      63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24,
      55, 23, 54, 22, 53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
  for (; i + 32 <= n; i += 32) {
    const __m512i a =
        row0 ? _mm512_loadu_si512(row0 + i) : _mm512_setzero_si512();
    const __m512i b =
        row1 ? _mm512_loadu_si512(row1 + i) : _mm512_setzero_si512();
    _mm512_storeu_si512(dst + 2 * i, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(
        dst + 2 * i + 32, _mm512_permutex2var_epi16(a, high, b));
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

// One expert's weight as a right operand B[k][n] = data[n * ld_n + k * ld_k],
// with one of the two strides equal to 1.
template <typename scalar_t>
struct WeightView {
  const scalar_t* data;
  int64_t ld_n;
  int64_t ld_k;

  // Packs columns [n0, n0 + n) and rows [k0, k0 + k); columns n..width are 0.
  template <typename compute_t>
  void pack(
      int64_t n0,
      int64_t n,
      int64_t k0,
      int64_t k,
      compute_t* dst,
      int64_t width) const {
    const scalar_t* src = data + n0 * ld_n + k0 * ld_k;
    if (ld_k == 1) {
      pack_along_k<scalar_t, compute_t>(src, ld_n, n, k, dst, width);
    } else {
      pack_along_n<scalar_t, compute_t>(
          [&](int64_t i) { return src + i * ld_k; }, n, k, dst, width);
    }
  }
};

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

// dst[i][k] = row(k)[i] for i < n, k < rows; zeros up to k_padded. ld of dst is
// kGradRows. Goes through a small contiguous copy because rows are gathered.
template <typename scalar_t, typename compute_t, typename RowFn>
void pack_transposed(
    const RowFn& row,
    int64_t n,
    int64_t rows,
    int64_t k_padded,
    compute_t* dst) {
  constexpr int64_t side = 16 * kVnni<compute_t>;
  alignas(64) compute_t stage[side * kGradTile];
  alignas(64) compute_t flipped[side * side];
  for (int64_t k0 = 0; k0 < k_padded; k0 += side) {
    const int64_t keep = std::min(side, k_padded - k0);
    for (const auto i : c10::irange(side)) {
      const scalar_t* from = k0 + i < rows ? row(k0 + i) : nullptr;
      compute_t* out = stage + i * kGradTile;
      if (from != nullptr) {
        convert_row(from, out, n);
      } else {
        std::memset(out, 0, n * sizeof(compute_t));
      }
    }
    for (int64_t i0 = 0; i0 < n; i0 += side) {
      const int64_t cols = std::min(side, n - i0);
      if (keep == side && cols == side) {
        vec::transpose_mxn<compute_t, side, side>(
            stage + i0, kGradTile, dst + i0 * kGradRows + k0, kGradRows);
        continue;
      }
      vec::transpose_mxn<compute_t, side, side>(
          stage + i0, kGradTile, flipped, side);
      for (const auto i : c10::irange(cols)) {
        std::memcpy(
            dst + (i0 + i) * kGradRows + k0, flipped + i * side,
            keep * sizeof(compute_t));
      }
    }
  }
}

// ---- blocked GEMM ----------------------------------------------------------

// Number of rows of the next brgemm call. Every distinct number is a kernel
// that brgemm generates once per thread, so there are only 18 of them; a row's
// result does not depend on the choice.
inline int64_t next_tile_rows(int64_t left) {
  if (left >= kTileRows) {
    return kTileRows;
  }
  if (left >= 32) {
    return 32;
  }
  return left > 16 ? 16 : left;
}

template <typename compute_t>
inline void brgemm(
    int64_t m,
    int64_t k,
    const compute_t* a,
    int64_t ld_a,
    const compute_t* b,
    float* c,
    int64_t ld_c,
    bool accumulate) {
  cpublas::brgemm(
      m, kPanelCols, k, ld_a, kPanelCols, ld_c, accumulate, a, b, c,
      /*is_vnni=*/kVnni<compute_t> > 1);
}

// C[rows, kPanelCols] = A[rows, k] * panel, one kPanelDepth of K at a time.
// pack(k0, depth, dst) fills the panel; epilogue(row0, rows, c) sees a finished
// tile with leading dimension kPanelCols.
template <typename compute_t, typename PackFn, typename EpilogueFn>
void gemm_panel(
    const compute_t* a,
    int64_t ld_a,
    int64_t rows,
    int64_t k,
    compute_t* panel,
    float* c,
    const PackFn& pack,
    const EpilogueFn& epilogue) {
  constexpr int64_t depth = kPanelDepth<compute_t>;
  const bool single = k <= depth;
  for (int64_t k0 = 0; k0 < k; k0 += depth) {
    const int64_t kb = std::min(depth, k - k0);
    pack(k0, kb, panel);
    const bool last = k0 + depth >= k;
    for (int64_t m0 = 0; m0 < rows;) {
      const int64_t m = next_tile_rows(rows - m0);
      float* tile = single ? c : c + m0 * kPanelCols;
      brgemm<compute_t>(
          m, round_up(kb, kVnni<compute_t>), a + m0 * ld_a + k0, ld_a, panel,
          tile, kPanelCols, k0 > 0);
      if (last) {
        epilogue(m0, m, tile);
      }
      m0 += m;
    }
  }
}

// ---- work split ------------------------------------------------------------

// Rows [begin, end) of one expert and the number of panels of its GEMM.
struct Block {
  int64_t expert;
  int64_t begin;
  int64_t end;
};

// Splits blocks x panels over the threads by estimated cost, at panel
// granularity and in a fixed order. Each (block, panel) is computed by exactly
// one thread in exactly one way, so the split cannot change a bit.
class WorkList {
 public:
  WorkList(std::vector<Block> blocks, int64_t panels, int64_t fixed_cost)
      : blocks_(std::move(blocks)), panels_(panels), fixed_cost_(fixed_cost) {
    for (const auto& block : blocks_) {
      total_ += panels_ * cost(block);
    }
  }

  // fn(thread, block, panel_begin, panel_end) for every block a thread shares.
  template <typename Fn>
  void run(int64_t threads, const Fn& fn, bool uses_vnni) const {
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (const auto thread : c10::irange(begin, end)) {
        run_thread(thread, threads, fn);
      }
      cpublas::brgemm_release(uses_vnni);
    });
  }

 private:
  int64_t cost(const Block& block) const {
    return fixed_cost_ + block.end - block.begin;
  }

  template <typename Fn>
  void run_thread(int64_t thread, int64_t threads, const Fn& fn) const {
    const int64_t low = share(thread, threads);
    const int64_t high = share(thread + 1, threads);
    int64_t start = 0;
    for (const auto& block : blocks_) {
      const int64_t each = cost(block);
      const auto panel_at = [&](int64_t bound) {
        return std::clamp<int64_t>(
            (bound - start + each - 1) / each, 0, panels_);
      };
      const int64_t first = bound_panel(panel_at, low, start);
      const int64_t last = bound_panel(panel_at, high, start);
      if (first < last) {
        fn(thread, block, first, last);
      }
      start += panels_ * each;
      if (start >= high) {
        break;
      }
    }
  }

  template <typename PanelAt>
  static int64_t bound_panel(
      const PanelAt& panel_at,
      int64_t bound,
      int64_t start) {
    return bound <= start ? 0 : panel_at(bound);
  }

  int64_t share(int64_t thread, int64_t threads) const {
    // Split the product so that it cannot overflow.
    return total_ / threads * thread + total_ % threads * thread / threads;
  }

  std::vector<Block> blocks_;
  int64_t panels_;
  int64_t fixed_cost_;
  int64_t total_ = 0;
};

// Cuts each expert's rows into blocks of at most max_rows (at least one block
// per expert when keep_empty).
inline std::vector<Block> make_blocks(
    const std::vector<Block>& experts,
    int64_t max_rows,
    bool keep_empty = false) {
  std::vector<Block> blocks;
  for (const auto& expert : experts) {
    if (expert.begin == expert.end && keep_empty) {
      blocks.push_back(expert);
    }
    for (int64_t row = expert.begin; row < expert.end; row += max_rows) {
      blocks.push_back(
          {expert.expert, row, std::min(row + max_rows, expert.end)});
    }
  }
  return blocks;
}

// Cache-line aligned per-thread buffers cut out of one allocation.
class Scratch {
 public:
  Scratch(int64_t threads, int64_t bytes)
      : stride_(round_up(bytes, 64) + 64),
        storage_(at::empty({threads * stride_ + 64}, at::kByte)) {
    auto address = reinterpret_cast<uintptr_t>(storage_.data_ptr());
    base_ = reinterpret_cast<char*>((address + 63) / 64 * 64);
  }
  char* at(int64_t thread) const {
    return base_ + thread * stride_;
  }

 private:
  int64_t stride_;
  Tensor storage_;
  char* base_;
};

} // namespace moe_brgemm
} // namespace CPU_CAPABILITY
} // namespace at::native
