#pragma once

// The blocked GEMM loop of the AVX512 kernels of _moe_mlp and _moe_mlp_backward. A
// "block" is a run of rows of one expert, a "panel" is kPanelCols output columns
// of that expert's GEMM, a "task" some panels of one block. The products are those of
// MoEAmx.h where the CPU has tiles, else of MoEVectorGemm.h and, for a few rows,
// MoEThinGemm.h. MoEGemm.h is the portable counterpart.

#include <ATen/native/cpu/MoEAmx.h>
#include <ATen/native/cpu/MoEAvx512Packing.h>
#include <ATen/native/cpu/MoEAvx512Work.h>
#include <ATen/native/cpu/MoEThinGemm.h>
#include <ATen/native/cpu/MoEVectorGemm.h>

#include <type_traits>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_avx512 {

// Blocking. None of these numbers depends on the number of rows of an expert
// or on the thread count: the order in which one output element is accumulated
// is a function of D, F, the kind of product, the dense side of the weight and this
// table.
// Rows of a tile: its 64 x 64 fp32 sums (16 KiB) are still in L1 when the epilogue
// reads them.
constexpr int64_t kTileRows = 64;
// The same where the weight lies along N: 64 KiB that the epilogue finds in L2.
// Along K, rows whose sums exist before the next panel.
constexpr int64_t kMaxTileRows = 256;
// Bytes of gathered rows one thread keeps; beyond that the panels are packed
// again for the next block of rows.
constexpr int64_t kBlockBytes = 2 * 1024 * 1024;
constexpr int64_t kMaxBlockTiles = 64;
// Tasks that every thread should get at least: this bounds what the others wait
// for the last one to a few percent.
constexpr int64_t kTasksPerThread = 32;
// The routed rows of y and dX exist only so many bytes at a time (columns are cut):
// they are still in cache when they are summed, and a buffer of this size is
// recycled by malloc instead of being mapped and zeroed anew. More for dX, whose
// weights are read in pieces as wide as the cut.
constexpr int64_t kCombineBytes = 4 * 1024 * 1024;
constexpr int64_t kGradCombineBytes = 16 * 1024 * 1024;
constexpr int64_t kMinCombineCols = 4 * kPanelCols;
// Tokens that are worth another thread.
constexpr int64_t kCombineGrain = 16;

// Depth of one product along K. In bfloat16 a packed panel of it is a quarter of
// a 1 MiB L2. In float32, sums of sums round less than one long sum: as at::mm
// does, so that the result is not less exact than with separate ops.
template <typename compute_t>
constexpr int64_t kPanelDepth = kVnni<compute_t> > 1 ? 2048 : 256;

// Along N, neighbouring panels are packed together: the pieces of weight rows
// that are read get longer, and fewer pages are visited per byte.
constexpr int64_t kMaxGroup = 4;
constexpr int64_t kGroupBytes = 512 * 1024;
// Rows packed for one panel of a group before the next panel's turn.
constexpr int64_t kGroupRows = 8;

// Lines of a weight along K that are on their way to L2 while others are multiplied.
constexpr int64_t kLinesAhead = 12;

// How a GEMM of depth k goes through its panels: `group` of them at a time, and
// `depth` of K per step.
struct PanelSteps {
  int64_t depth;
  int64_t group;

  template <typename compute_t>
  static PanelSteps of(int64_t k, bool along_k) {
    constexpr int64_t most = kPanelDepth<compute_t>;
    if (along_k) {
      return {most, 1};
    }
    const int64_t depth = k <= most
        ? round_up(std::max<int64_t>(k, 1), kVnni<compute_t>)
        : std::min<int64_t>(most, 1024);
    const int64_t bytes =
        depth * kPanelCols * static_cast<int64_t>(sizeof(compute_t));
    return {depth, std::clamp<int64_t>(kGroupBytes / bytes, 1, kMaxGroup)};
  }
};

// One expert's weight, the factor W of x W: W[k][n] = data[n * ld_n + k * ld_k]
// with one of the two strides equal to 1. The dense one decides which operand
// of a product the weight is:
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

  // The same part, on its way to L2.
  moe_vector::Prefetch prefetch(int64_t n0, int64_t n, int64_t k0, int64_t k)
      const {
    const scalar_t* src = data + n0 * ld_n + k0 * ld_k;
    return along_k() ? moe_vector::Prefetch(src, n, k, ld_n)
                     : moe_vector::Prefetch(src, k, n, ld_k);
  }
};

// Columns [first, first + count) of a GEMM, at column `at` of a panel and alone
// in `width` columns of it.
struct PanelSpan {
  int64_t first = 0;
  int64_t count = 0;
  int64_t at = 0;
  int64_t width = kPanelCols;
};

// The columns of one panel: gate and up halves are two spans.
struct PanelColumns {
  PanelSpan spans[2];
};

// ---- blocked GEMM ----------------------------------------------------------

// C (m, n) = A (m, k) B [+ C], B packed.
template <typename compute_t>
inline void multiply_packed(
    int64_t m,
    int64_t n,
    int64_t k,
    const compute_t* a,
    int64_t ld_a,
    const compute_t* b,
    int64_t ld_b,
    float* c,
    int64_t ld_c,
    bool accumulate,
    moe_vector::PacedPrefetch& prefetch) {
#ifdef MOE_HAS_AMX
  if constexpr (std::is_same_v<compute_t, BFloat16>) {
    if (uses_tiles<compute_t>()) {
      moe_amx::multiply(m, n, k, ld_a, ld_b, ld_c, accumulate, a, b, c);
      return;
    }
  }
#endif
  moe_vector::multiply(
      m, n, k, a, ld_a, b, ld_b, c, ld_c, accumulate, prefetch);
}

// Whether a block of so few rows is multiplied by moe_thin if its weight lies along k.
template <typename compute_t>
inline bool is_thin(int64_t rows) {
  return rows <= moe_thin::kMaxRows && !uses_tiles<compute_t>();
}

// Columns of a packed right operand for this many rows of x, at most kTileRows.
inline int64_t tile_width(int64_t rows, bool is_thin) {
  return is_thin ? rows : round_up(std::min(rows, kTileRows), 16);
}

// The rows of a block as an operand of PanelTask: row major with leading
// dimension ld, or, where the weight lies along k, packed by pack_along_k one tile of
// kTileRows after the other.
template <typename compute_t>
struct RowOperand {
  const compute_t* data;
  int64_t ld;
  bool is_thin = false;
};

// Packs rows [k0, k0 + k) of neighbouring panels, whose weight lies along N, one
// panel after the other.
template <typename scalar_t, typename compute_t>
inline void pack_group(
    const WeightView<scalar_t>& w,
    const PanelColumns* columns,
    int64_t panels,
    int64_t k0,
    int64_t k,
    compute_t* packed) {
  constexpr int64_t v = kVnni<compute_t>;
  constexpr int64_t line = 64 / sizeof(scalar_t);
  const int64_t panel_size = round_up(k, v) * kPanelCols;
  for (int64_t r0 = 0; r0 < k; r0 += kGroupRows) {
    const int64_t rows = std::min(kGroupRows, k - r0);
    const int64_t ahead = std::min(r0 + 2 * kGroupRows, k);
    const int64_t ahead_end = std::min(ahead + kGroupRows, k);
    for (const auto panel : c10::irange(panels)) {
      for (const auto& span : columns[panel].spans) {
        if (span.count == 0) {
          continue;
        }
        for (const auto r : c10::irange(ahead, ahead_end)) {
          const scalar_t* from = w.data + span.first + (k0 + r) * w.ld_k;
          for (int64_t i = 0; i < span.count; i += line) {
            _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T0);
          }
        }
        w.pack(
            span.first,
            span.count,
            k0 + r0,
            rows,
            packed + panel * panel_size + r0 * kPanelCols + span.at * v,
            span.width);
      }
    }
  }
}

// A tile as the products of weights that lie along K leave it: one column of the
// panel after the other, kTileRows apart.
struct TransposedTile {
  const float* data;

  const float* column(int64_t i) const {
    return data + i * kTileRows;
  }
};

template <typename EpilogueFn>
constexpr bool takes_transposed = std::
    is_invocable_v<const EpilogueFn&, int64_t, int64_t, int64_t, TransposedTile>;

// out[row][col] = in[col][row], both kTileRows x kPanelCols at most.
inline void transpose_tile(const TransposedTile& in, int64_t rows, float* out) {
  static_assert(kTileRows == kPanelCols);
  for (int64_t col = 0; col < kPanelCols; col += 16) {
    for (int64_t row = 0; row < rows; row += 16) {
      vec::transpose_mxn<float, 16, 16>(
          in.column(col) + row,
          kTileRows,
          out + row * kPanelCols + col,
          kPanelCols);
    }
  }
}

// Lines of the left operand, at most most_lines, and depth of one product for m rows
// of x. A product on tiles is cheap to start: it is cut so that the lines' share is
// still in L1 for the next tile of rows.
struct ProductStep {
  int64_t lines;
  int64_t depth;

  template <typename compute_t>
  static ProductStep of(int64_t m, int64_t depth, int64_t most_lines) {
    if (uses_tiles<compute_t>()) {
      return {moe_amx::kBlock, m > kTileRows ? moe_amx::kStep : depth};
    }
    return {most_lines, depth};
  }
};

// Panels [first, last) of a block, with what for_each_task prepared for them.
template <typename compute_t>
struct Task {
  const Block& block;
  const Block* next; // most likely this thread's next block, or null
  int64_t first;
  int64_t last;
  const RowOperand<compute_t>& x;
  compute_t* packed; // scratch
  float* c; // scratch

  int64_t rows() const {
    return block.end - block.begin;
  }
};

// A task's panels of x W, and what to do with them. columns(panel) is a
// PanelColumns. epilogue(panel, row0, rows, c) sees a finished tile with leading
// dimension kPanelCols, or a TransposedTile if it can take one and the weight lies
// along K; what it holds outside the spans is undefined.
template <typename scalar_t, typename compute_t>
class PanelTask {
 public:
  // view(expert) is the WeightView of W, which has k rows and `panels` panels.
  template <typename ViewFn>
  PanelTask(
      const Task<compute_t>& task,
      const ViewFn& view,
      int64_t panels,
      int64_t k)
      : w_(view(task.block.expert)),
        next_w_(task.next != nullptr ? view(task.next->expert) : Weight{}),
        first_(task.first),
        last_(task.last),
        panels_(panels),
        x_(task.x),
        rows_(task.rows()),
        k_(k),
        packed_(task.packed),
        c_(task.c) {}

  template <typename ColumnsFn, typename EpilogueFn>
  void run(const ColumnsFn& columns, const EpilogueFn& epilogue) const {
    if (!w_.along_k()) {
      run_along_n(columns, epilogue);
      return;
    }
    for (const auto panel : c10::irange(first_, last_)) {
      run_along_k(panel, columns, epilogue);
    }
  }

 private:
  using Weight = WeightView<scalar_t>;

  template <typename ColumnsFn, typename EpilogueFn>
  void run_along_n(const ColumnsFn& columns, const EpilogueFn& epilogue) const {
    constexpr int64_t v = kVnni<compute_t>;
    const auto steps = PanelSteps::of<compute_t>(k_, /*along_k=*/false);
    const bool single = k_ <= steps.depth;
    for (int64_t p0 = first_; p0 < last_; p0 += steps.group) {
      const int64_t group = std::min(steps.group, last_ - p0);
      PanelColumns group_columns[kMaxGroup];
      for (const auto i : c10::irange(group)) {
        group_columns[i] = columns(p0 + i);
      }
      for (int64_t k0 = 0; k0 < k_; k0 += steps.depth) {
        const int64_t kb = std::min(steps.depth, k_ - k0);
        const int64_t padded = round_up(kb, v);
        pack_group(w_, group_columns, group, k0, kb, packed_);
        auto prefetch = next_group(columns, steps, p0, k0);
        prefetch.set_looks(
            group * moe_vector::looks<compute_t>(rows_, padded));
        for (const auto i : c10::irange(group)) {
          for (int64_t m0 = 0; m0 < rows_; m0 += kMaxTileRows) {
            const int64_t m = std::min(kMaxTileRows, rows_ - m0);
            float* tile = single ? c_ : c_ + (i * rows_ + m0) * kPanelCols;
            multiply_packed<compute_t>(
                m, kPanelCols, padded, x_.data + m0 * x_.ld + k0, x_.ld,
                packed_ + i * padded * kPanelCols, kPanelCols, tile, kPanelCols,
                k0 > 0, prefetch);
            if (k0 + kb == k_) {
              epilogue(p0 + i, m0, m, tile);
            }
          }
        }
      }
    }
  }

  // What pack_group reads after the group of p0 from k0 on.
  template <typename ColumnsFn>
  moe_vector::PacedPrefetch next_group(
      const ColumnsFn& columns,
      const PanelSteps& steps,
      int64_t p0,
      int64_t k0) const {
    Weight w = w_;
    k0 += steps.depth;
    if (k0 >= k_) {
      k0 = 0;
      p0 += steps.group;
      if (p0 >= panels_) {
        p0 = 0;
        w = next_w_;
      }
    }
    moe_vector::PacedPrefetch prefetch;
    if (w.data == nullptr) {
      return prefetch;
    }
    const auto begin = columns(p0);
    const auto end = columns(std::min(p0 + steps.group, panels_) - 1);
    for (const auto i : c10::irange(2)) {
      const auto& first = begin.spans[i];
      const auto& last = end.spans[i];
      prefetch.parts[i] = w.prefetch(
          first.first,
          last.first + last.count - first.first,
          k0,
          std::min(steps.depth, k_ - k0));
    }
    return prefetch;
  }

  // C^T = W^T x^T.
  template <typename ColumnsFn, typename EpilogueFn>
  void run_along_k(
      int64_t panel,
      const ColumnsFn& columns,
      const EpilogueFn& epilogue) const {
    constexpr int64_t depth = kPanelDepth<compute_t>;
    constexpr int64_t v = kVnni<compute_t>;
    const bool in_place = std::is_same_v<scalar_t, compute_t> && k_ % v == 0 &&
        w_.ld_n % v == 0;
    const bool is_last = panel + 1 == panels_;
    const Lines lines{
        columns(panel),
        columns(is_last ? 0 : panel + 1),
        is_last ? next_w_ : w_,
        in_place};
    for (int64_t m0 = 0; m0 < rows_; m0 += kMaxTileRows) {
      const int64_t m = std::min(kMaxTileRows, rows_ - m0);
      for (int64_t k0 = 0; k0 < k_; k0 += depth) {
        const int64_t kb = std::min(depth, k_ - k0);
        const int64_t padded = round_up(kb, v);
        if (!in_place) {
          for (const auto& span : lines.columns.spans) {
            pack_rows<scalar_t, compute_t>(
                [&](int64_t i) {
                  return w_.data + (span.first + i) * w_.ld_n + k0;
                },
                span.count,
                kb,
                packed_ + span.at * padded);
          }
        }
        for (const auto i : c10::irange(2)) {
          if (x_.is_thin) {
            multiply_thin(lines, i, k0, padded);
          } else {
            multiply_along_k(lines, i, m0, m, k0, padded);
          }
        }
      }
      finish_along_k(panel, m0, m, epilogue);
    }
  }

  // The lines of a panel whose weight lies along K, and those that most likely
  // follow.
  struct Lines {
    PanelColumns columns;
    PanelColumns next_columns;
    Weight next_w;
    bool in_place; // not packed
  };

  // A span's lines from k0 on, packed unless they are read in place.
  const compute_t* lines_of(
      const PanelSpan& span,
      int64_t k0,
      int64_t depth,
      bool in_place) const {
    if constexpr (std::is_same_v<scalar_t, compute_t>) {
      if (in_place) {
        return w_.data + span.first * w_.ld_n + k0;
      }
    }
    return packed_ + span.at * depth;
  }

  // At most `most` lines of those that are read after span i from k0 on.
  moe_vector::Prefetch following(
      const Lines& lines,
      int64_t i,
      int64_t k0,
      int64_t most) const {
    constexpr int64_t depth = kPanelDepth<compute_t>;
    const auto part = [&](const Weight& w, const PanelSpan& span, int64_t k1) {
      return w.prefetch(
          span.first,
          std::min(most, span.count),
          k1,
          std::min(depth, k_ - k1));
    };
    if (!lines.in_place) {
      return {};
    }
    if (i == 0 && lines.columns.spans[1].count > 0) {
      return part(w_, lines.columns.spans[1], k0);
    }
    if (k0 + depth < k_) {
      return part(w_, lines.columns.spans[0], k0 + depth);
    }
    if (lines.next_w.data == nullptr) {
      return {};
    }
    return part(lines.next_w, lines.next_columns.spans[0], 0);
  }

  // One step of K of span i for rows [m0, m0 + m).
  void multiply_along_k(
      const Lines& lines,
      int64_t i,
      int64_t m0,
      int64_t m,
      int64_t k0,
      int64_t depth) const {
    const int64_t x_depth = round_up(k_, kVnni<compute_t>);
    const auto& span = lines.columns.spans[i];
    const int64_t ld = lines.in_place ? w_.ld_n : depth;
    const auto step = ProductStep::of<compute_t>(m, depth, kPanelCols);
    const compute_t* from = lines_of(span, k0, depth, lines.in_place);
    auto prefetch = m0 == 0 ? next_lines(lines, i, k0, depth)
                            : moe_vector::PacedPrefetch();
    for (int64_t l = 0; l < span.count; l += step.lines) {
      for (int64_t kk = 0; kk < depth; kk += step.depth) {
        for (int64_t t = 0; t < m; t += kTileRows) {
          const int64_t width = tile_width(m - t, /*is_thin=*/false);
          // A look per kWords of each row of a block: a cache line of each.
          prefetch.pace = t == 0 ? moe_vector::block_rows(width) : 0;
          multiply_packed<compute_t>(
              std::min(step.lines, span.count - l),
              width,
              std::min(step.depth, depth - kk),
              from + l * ld + kk,
              ld,
              x_.data + (m0 + t) * x_depth + (k0 + kk) * width,
              width,
              c_ + t * kPanelCols + (span.at + l) * kTileRows,
              kTileRows,
              /*accumulate=*/k0 + kk > 0,
              prefetch);
        }
      }
    }
  }

  // The lines of span i from kLinesAhead on, and as many of those that follow.
  moe_vector::PacedPrefetch next_lines(
      const Lines& lines,
      int64_t i,
      int64_t k0,
      int64_t depth) const {
    const auto& span = lines.columns.spans[i];
    moe_vector::PacedPrefetch prefetch;
    if (lines.in_place) {
      prefetch.parts[0] = w_.prefetch(
          span.first + kLinesAhead, span.count - kLinesAhead, k0, depth);
      prefetch.parts[1] = following(lines, i, k0, kLinesAhead);
    }
    return prefetch;
  }

  // The same for all rows of a thin block, which wait for the weight.
  void multiply_thin(
      const Lines& lines,
      int64_t i,
      int64_t k0,
      int64_t depth) const {
    const auto& span = lines.columns.spans[i];
    moe_thin::multiply<compute_t>(
        span.count,
        rows_,
        depth,
        lines_of(span, k0, depth, lines.in_place),
        lines.in_place ? w_.ld_n : depth,
        x_.data + k0 * rows_,
        c_ + span.at * kTileRows,
        kTileRows,
        /*accumulate=*/k0 > 0,
        following(lines, i, k0, kPanelCols));
  }

  template <typename EpilogueFn>
  void finish_along_k(
      int64_t panel,
      int64_t m0,
      int64_t m,
      const EpilogueFn& epilogue) const {
    for (int64_t t = 0; t < m; t += kTileRows) {
      const int64_t tile_rows = std::min(kTileRows, m - t);
      const TransposedTile sums{c_ + t * kPanelCols};
      if constexpr (takes_transposed<EpilogueFn>) {
        epilogue(panel, m0 + t, tile_rows, sums);
      } else {
        alignas(64) float tile[kTileRows * kPanelCols];
        transpose_tile(sums, tile_rows, tile);
        epilogue(panel, m0 + t, tile_rows, tile);
      }
    }
  }

  const Weight w_;
  const Weight next_w_; // without data if there is none
  int64_t first_, last_, panels_;
  const RowOperand<compute_t>& x_;
  int64_t rows_, k_;
  compute_t* packed_;
  float* c_;
};

} // namespace moe_avx512
} // namespace CPU_CAPABILITY
} // namespace at::native
