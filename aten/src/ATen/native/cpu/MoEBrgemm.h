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
#include <atomic>
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
// Tasks that every thread should get at least: this bounds what the others wait
// for the last one to a few percent.
constexpr int64_t kTasksPerThread = 32;
// The routed rows of y and dX exist only this many bytes at a time (columns
// are cut): they are still in L3 when they are summed, and a buffer of this
// size is recycled by malloc instead of being mapped and zeroed anew.
constexpr int64_t kCombineBytes = 8 * 1024 * 1024;
constexpr int64_t kMinCombineCols = 4 * kPanelCols;
// Tokens that are worth another thread.
constexpr int64_t kCombineGrain = 16;
// Weight gradient: lines and columns of a macro tile, and rows reduced per step.
// The packed operands and the fp32 tile are 0.8 MiB in bf16.
constexpr int64_t kGradLines = 512;
constexpr int64_t kGradTile = 256;
constexpr int64_t kGradRows = 256;
// Rows of a reduction step are padded with zeros to this multiple, so that a
// handful of brgemm kernels serves every expert size.
constexpr int64_t kGradRowsMultiple = 8;

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

// Rows of length k that become columns: column(n) is a pointer or null (zeros),
// and so is every column from n to width, a multiple of 16. dst is
// [ceil(k/v)][width][v].
template <typename scalar_t, typename compute_t, typename ColumnFn>
void pack_along_k(
    const ColumnFn& column,
    int64_t n,
    int64_t k,
    compute_t* dst,
    int64_t width) {
  constexpr int64_t v = kVnni<compute_t>;
  constexpr int64_t step = 16 * v;
  auto* words = reinterpret_cast<float*>(dst);
  alignas(64) compute_t stage[16 * step];
  alignas(64) float flipped[16 * 16];
  for (int64_t n0 = 0; n0 < width; n0 += 16) {
    const scalar_t* from[16];
    for (const auto i : c10::irange(16)) {
      from[i] = n0 + i < n ? column(n0 + i) : nullptr;
    }
    std::memset(stage, 0, sizeof(stage));
    for (int64_t k0 = 0; k0 < k; k0 += step) {
      const int64_t depth = std::min(step, k - k0);
      if (depth < step) {
        std::memset(stage, 0, sizeof(stage));
      }
      for (const auto i : c10::irange(16)) {
        if (from[i] != nullptr) {
          convert_row(from[i] + k0, stage + i * step, depth);
        }
      }
      float* out = words + k0 / v * width + n0;
      const auto* in = reinterpret_cast<const float*>(stage);
      // A block of 16 x 16 words: one float or two bfloat16 each.
      if (depth == step) {
        vec::transpose_mxn<float, 16, 16>(in, 16, out, width);
        continue;
      }
      vec::transpose_mxn<float, 16, 16>(in, 16, flipped, 16);
      for (const auto i : c10::irange((depth + v - 1) / v)) {
        std::memcpy(out + i * width, flipped + i * 16, 16 * sizeof(float));
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

// One expert's weight, the factor W of x W: W[k][n] = data[n * ld_n + k * ld_k]
// with one of the two strides equal to 1. The dense one decides which operand
// of brgemm the weight is:
//  - along k, its columns are rows of a left operand as they lie in memory. The
//    product is transposed, W^T x^T, and only x is packed: with some hundred
//    rows per expert that is several times less than the weight, and a decode
//    step touches every weight byte once, in the order of its addresses;
//  - along n, it is packed as a right operand by interleaving rows.
template <typename scalar_t>
struct WeightView {
  const scalar_t* data;
  int64_t ld_n;
  int64_t ld_k;

  bool along_k() const {
    return ld_k == 1;
  }

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
    pack_along_n<scalar_t, compute_t>(
        [&](int64_t i) { return src + i * ld_k; }, n, k, dst, width);
  }
};

// Columns [first, first + count) of a GEMM, at column `at` of a panel and alone
// in `width` columns of it.
struct PanelSpan {
  int64_t first;
  int64_t count;
  int64_t at = 0;
  int64_t width = kPanelCols;
};

// The columns of one panel: gate and up halves are two spans. `ahead` is how far
// to the right the next panel's columns are, 0 if this thread has none.
struct PanelColumns {
  PanelSpan spans[2];
  int64_t ahead = 0;
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
  alignas(64) compute_t stage[side * kGradLines];
  alignas(64) compute_t flipped[side * side];
  for (int64_t k0 = 0; k0 < k_padded; k0 += side) {
    const int64_t keep = std::min(side, k_padded - k0);
    for (const auto i : c10::irange(side)) {
      const scalar_t* from = k0 + i < rows ? row(k0 + i) : nullptr;
      compute_t* out = stage + i * kGradLines;
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
            stage + i0, kGradLines, dst + i0 * kGradRows + k0, kGradRows);
        continue;
      }
      vec::transpose_mxn<compute_t, side, side>(
          stage + i0, kGradLines, flipped, side);
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

// Columns of a packed right operand for this many rows of x, at most kTileRows.
inline int64_t tile_width(int64_t rows) {
  return round_up(std::min(rows, kTileRows), 16);
}

// The rows of a block as an operand of gemm_panel: row major with leading
// dimension ld, or, where the weight lies along k, packed by pack_along_k one
// tile of kTileRows after the other.
template <typename compute_t>
struct RowOperand {
  const compute_t* data;
  int64_t ld;
};

// Asks for a share of the next panel's weight while this one is multiplied.
template <typename scalar_t>
inline void prefetch_lines(
    const WeightView<scalar_t>& w,
    const PanelColumns& columns,
    int64_t k,
    int64_t share,
    int64_t shares) {
  if (columns.ahead == 0) {
    return;
  }
  constexpr int64_t line = 64 / sizeof(scalar_t);
  for (const auto& span : columns.spans) {
    const int64_t first = span.first + columns.ahead;
    for (const auto n : c10::irange(
             first + span.count * share / shares,
             first + span.count * (share + 1) / shares)) {
      const scalar_t* from = w.data + n * w.ld_n;
      for (int64_t i = 0; i < k; i += line) {
        _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T1);
      }
    }
  }
}

// out[row][col] = in[col][row], both kTileRows x kPanelCols at most.
inline void transpose_tile(const float* in, int64_t rows, float* out) {
  static_assert(kTileRows == kPanelCols);
  for (int64_t col = 0; col < kPanelCols; col += 16) {
    for (int64_t row = 0; row < rows; row += 16) {
      vec::transpose_mxn<float, 16, 16>(
          in + col * kTileRows + row,
          kTileRows,
          out + row * kPanelCols + col,
          kPanelCols);
    }
  }
}

// gemm_panel for a weight along k: C^T = W^T x^T.
template <typename scalar_t, typename compute_t, typename EpilogueFn>
void gemm_panel_along_k(
    const WeightView<scalar_t>& w,
    const PanelColumns& columns,
    const RowOperand<compute_t>& x,
    int64_t rows,
    int64_t k,
    compute_t* panel,
    float* c,
    const EpilogueFn& epilogue) {
  constexpr int64_t depth = kPanelDepth<compute_t>;
  constexpr int64_t v = kVnni<compute_t>;
  const bool in_place = std::is_same_v<scalar_t, compute_t> && k % v == 0;
  const int64_t x_depth = round_up(k, v);
  const int64_t steps = (k + depth - 1) / depth;
  const int64_t shares = steps * ((rows + kTileRows - 1) / kTileRows);
  int64_t share = 0;
  alignas(64) float tile[kTileRows * kPanelCols];
  for (int64_t k0 = 0; k0 < k; k0 += depth) {
    const int64_t kb = std::min(depth, k - k0);
    const int64_t padded = round_up(kb, v);
    if (!in_place) {
      for (const auto& span : columns.spans) {
        pack_rows<scalar_t, compute_t>(
            [&](int64_t i) {
              return w.data + (span.first + i) * w.ld_n + k0;
            },
            span.count,
            kb,
            panel + span.at * padded);
      }
    }
    for (int64_t m0 = 0; m0 < rows; m0 += kTileRows) {
      const int64_t m = std::min(kTileRows, rows - m0);
      const int64_t width = tile_width(m);
      float* sums = steps == 1 ? c : c + m0 * kPanelCols;
      prefetch_lines(w, columns, k, share++, shares);
      for (const auto& span : columns.spans) {
        if (span.count == 0) {
          continue;
        }
        const compute_t* lines = panel + span.at * padded;
        if constexpr (std::is_same_v<scalar_t, compute_t>) {
          lines = in_place ? w.data + span.first * w.ld_n + k0 : lines;
        }
        cpublas::brgemm(
            span.count,
            width,
            padded,
            in_place ? w.ld_n : padded,
            width,
            kTileRows,
            /*add_C=*/k0 > 0,
            lines,
            x.data + m0 * x_depth + k0 * width,
            sums + span.at * kTileRows,
            /*is_vnni=*/v > 1);
      }
      if (k0 + depth >= k) {
        transpose_tile(sums, m, tile);
        epilogue(m0, m, tile);
      }
    }
  }
}

// A panel of x W: [rows, k] times the columns' weights, one kPanelDepth of K at
// a time. epilogue(row0, rows, c) sees a finished tile with leading dimension
// kPanelCols; what it holds outside the spans is undefined. `panel` and c are
// scratch, see for_each_panel.
template <typename scalar_t, typename compute_t, typename EpilogueFn>
void gemm_panel(
    const WeightView<scalar_t>& w,
    const PanelColumns& columns,
    const RowOperand<compute_t>& x,
    int64_t rows,
    int64_t k,
    compute_t* panel,
    float* c,
    const EpilogueFn& epilogue) {
  if (w.along_k()) {
    gemm_panel_along_k(w, columns, x, rows, k, panel, c, epilogue);
    return;
  }
  constexpr int64_t depth = kPanelDepth<compute_t>;
  constexpr int64_t v = kVnni<compute_t>;
  const bool single = k <= depth;
  for (int64_t k0 = 0; k0 < k; k0 += depth) {
    const int64_t kb = std::min(depth, k - k0);
    for (const auto& span : columns.spans) {
      if (span.count > 0) {
        w.pack(
            span.first, span.count, k0, kb, panel + span.at * v, span.width);
      }
    }
    for (int64_t m0 = 0; m0 < rows;) {
      const int64_t m = next_tile_rows(rows - m0);
      float* tile = single ? c : c + m0 * kPanelCols;
      brgemm<compute_t>(
          m, round_up(kb, v), x.data + m0 * x.ld + k0, x.ld, panel, tile,
          kPanelCols, k0 > 0);
      if (k0 + depth >= k) {
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

// Hands out blocks x panels to the threads as they come, a few panels of one
// block at a time. Each (block, panel) is computed in exactly one way, so it
// does not matter which thread gets it, and a thread that the system or a
// neighbour slows down gets less.
class WorkList {
 public:
  // At most panels_per_task panels of a block are handed out at once.
  WorkList(std::vector<Block> blocks, int64_t panels, int64_t panels_per_task)
      : blocks_(std::move(blocks)),
        panels_(panels),
        per_task_(std::clamp<int64_t>(panels_per_task, 1, panels)) {}

  // fn(thread, block, panel_begin, panel_end) for every task.
  template <typename Fn>
  void run(int64_t threads, const Fn& fn, bool uses_vnni) const {
    const int64_t tasks_per_block = (panels_ + per_task_ - 1) / per_task_;
    const int64_t tasks =
        static_cast<int64_t>(blocks_.size()) * tasks_per_block;
    std::atomic<int64_t> next{0};
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (const auto thread : c10::irange(begin, end)) {
        for (int64_t task = next++; task < tasks; task = next++) {
          const int64_t first = task % tasks_per_block * per_task_;
          fn(thread,
             blocks_[task / tasks_per_block],
             first,
             std::min(first + per_task_, panels_));
        }
      }
      cpublas::brgemm_release(uses_vnni);
    });
  }

 private:
  std::vector<Block> blocks_;
  int64_t panels_;
  int64_t per_task_;
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
