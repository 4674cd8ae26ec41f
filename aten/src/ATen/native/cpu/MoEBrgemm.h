#pragma once

// Building blocks of the brgemm kernels of _moe_mlp and _moe_mlp_backward: the
// blocked GEMM loop, on AMX tiles where the CPU has them, and the work split. A
// "block" is a run of rows of one expert, a "panel" is kPanelCols output columns
// of that expert's GEMM, a "task" some panels of one block. MoEGemm.h is the
// portable counterpart.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/native/cpu/MoEAmx.h>
#include <ATen/native/cpu/MoEBrgemmPacking.h>
#include <ATen/native/cpu/MoEThinGemm.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty.h>
#endif

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <atomic>
#include <optional>
#include <type_traits>
#include <vector>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_brgemm {

// Blocking. None of these numbers depends on the number of rows of an expert
// or on the thread count: the order in which one output element is accumulated
// is a function of D, F and this table alone.
// Rows of one brgemm call: its 64 x 64 fp32 result (16 KiB) is still in L1
// when the epilogue reads it.
constexpr int64_t kTileRows = 64;
// The same where the weight lies along N: fewer calls, and 64 KiB that the
// epilogue finds in L2. Along K, rows whose sums exist before the next panel.
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

// Number of rows of the next brgemm call. Every distinct number is a kernel
// that brgemm generates once per thread, so there are only 20 of them; a row's
// result does not depend on the choice.
inline int64_t next_tile_rows(int64_t left) {
  for (int64_t rows = kMaxTileRows; rows > 16; rows /= 2) {
    if (left >= rows) {
      return rows;
    }
  }
  return std::min<int64_t>(left, 16);
}

// Whether products of this type run on AMX tiles.
template <typename compute_t>
inline bool uses_tiles() {
  return std::is_same_v<compute_t, BFloat16> && moe_amx::is_available();
}

// C (m, n) = A (m, k) B [+ C], B packed.
template <typename compute_t>
inline void multiply(
    int64_t m,
    int64_t n,
    int64_t k,
    const compute_t* a,
    int64_t ld_a,
    const compute_t* b,
    int64_t ld_b,
    float* c,
    int64_t ld_c,
    bool accumulate) {
#ifdef MOE_HAS_AMX
  if constexpr (std::is_same_v<compute_t, BFloat16>) {
    if (uses_tiles<compute_t>()) {
      moe_amx::multiply(m, n, k, ld_a, ld_b, ld_c, accumulate, a, b, c);
      return;
    }
  }
#endif
  cpublas::brgemm(
      m, n, k, ld_a, ld_b, ld_c, accumulate, a, b, c,
      /*is_vnni=*/kVnni<compute_t> > 1);
}

// What a thread has to hold while it calls multiply.
template <typename compute_t>
class GemmSession {
 public:
  GemmSession() {
#ifdef MOE_HAS_AMX
    if (uses_tiles<compute_t>()) {
      tiles_.emplace();
    }
#endif
  }
  ~GemmSession() {
#ifdef MOE_HAS_AMX
    if (tiles_) {
      return;
    }
#endif
    cpublas::brgemm_release(/*is_vnni=*/kVnni<compute_t> > 1);
  }
  GemmSession(const GemmSession&) = delete;
  GemmSession& operator=(const GemmSession&) = delete;

#ifdef MOE_HAS_AMX
 private:
  std::optional<moe_amx::Session> tiles_;
#endif
};

// Columns of a packed right operand for this many rows of x, at most kTileRows.
inline int64_t tile_width(int64_t rows) {
  return round_up(std::min(rows, kTileRows), 16);
}

// Whether a block of so few rows is multiplied by moe_thin if its weight lies along k.
template <typename compute_t>
inline bool is_thin(int64_t rows) {
  return moe_thin::is_available<compute_t>() && rows <= moe_thin::kMaxRows &&
      !uses_tiles<compute_t>();
}

// The rows of a block as an operand of PanelTask: row major with leading
// dimension ld, or, where the weight lies along k and the block is not thin, packed
// by pack_along_k one tile of kTileRows after the other.
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

// Panels [first, last) of x W for `rows` rows of x, and what to do with them.
// columns(panel) is a PanelColumns. epilogue(panel, row0, rows, c) sees a
// finished tile with leading dimension kPanelCols, or a TransposedTile if it can
// take one and the weight lies along K; what it holds outside the spans is
// undefined. `packed` and c are scratch, see for_each_task.
template <typename scalar_t, typename compute_t>
struct PanelTask {
  const WeightView<scalar_t>& w;
  int64_t first;
  int64_t last;
  int64_t panels; // of the block
  const RowOperand<compute_t>& x;
  int64_t rows;
  int64_t k;
  compute_t* packed;
  float* c;

  template <typename ColumnsFn, typename EpilogueFn>
  void run(const ColumnsFn& columns, const EpilogueFn& epilogue) const {
    if (!w.along_k()) {
      run_along_n(columns, epilogue);
      return;
    }
    for (const auto panel : c10::irange(first, last)) {
      // Most likely the next one here.
      const auto next =
          panel + 1 < panels ? columns(panel + 1) : PanelColumns{};
      run_along_k(panel, columns(panel), next, epilogue);
    }
  }

 private:
  template <typename ColumnsFn, typename EpilogueFn>
  void run_along_n(const ColumnsFn& columns, const EpilogueFn& epilogue) const {
    constexpr int64_t v = kVnni<compute_t>;
    const auto steps = PanelSteps::of<compute_t>(k, /*along_k=*/false);
    const bool single = k <= steps.depth;
    for (int64_t p0 = first; p0 < last; p0 += steps.group) {
      const int64_t group = std::min(steps.group, last - p0);
      PanelColumns group_columns[kMaxGroup];
      for (const auto i : c10::irange(group)) {
        group_columns[i] = columns(p0 + i);
      }
      for (int64_t k0 = 0; k0 < k; k0 += steps.depth) {
        const int64_t kb = std::min(steps.depth, k - k0);
        const int64_t padded = round_up(kb, v);
        pack_group(w, group_columns, group, k0, kb, packed);
        for (const auto i : c10::irange(group)) {
          for (int64_t m0 = 0; m0 < rows;) {
            const int64_t m = next_tile_rows(rows - m0);
            float* tile = single ? c : c + (i * rows + m0) * kPanelCols;
            multiply<compute_t>(
                m, kPanelCols, padded, x.data + m0 * x.ld + k0, x.ld,
                packed + i * padded * kPanelCols, kPanelCols, tile, kPanelCols,
                k0 > 0);
            if (k0 + kb == k) {
              epilogue(p0 + i, m0, m, tile);
            }
            m0 += m;
          }
        }
      }
    }
  }

  // C^T = W^T x^T. With tiles or brgemm the weight is left to the hardware's
  // prefetcher: asking for the next panel in software made them 10 to 30 % slower,
  // from 4 to 128 rows. A thin block waits for nothing else and asks.
  template <typename EpilogueFn>
  void run_along_k(
      int64_t panel,
      const PanelColumns& columns,
      const PanelColumns& next,
      const EpilogueFn& epilogue) const {
    constexpr int64_t depth = kPanelDepth<compute_t>;
    constexpr int64_t v = kVnni<compute_t>;
    const bool in_place = std::is_same_v<scalar_t, compute_t> && k % v == 0;
    for (int64_t m0 = 0; m0 < rows; m0 += kMaxTileRows) {
      const int64_t m = std::min(kMaxTileRows, rows - m0);
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
                packed + span.at * padded);
          }
        }
        if (x.is_thin) {
          multiply_thin(columns, next, k0, padded, in_place);
        } else {
          multiply_along_k(columns, m0, m, k0, padded, in_place);
        }
      }
      finish_along_k(panel, m0, m, epilogue);
    }
  }

  // The weight's lines of a span from k0 on, packed unless they are read in place.
  const compute_t* lines_of(
      const PanelSpan& span,
      int64_t k0,
      int64_t depth,
      bool in_place) const {
    if constexpr (std::is_same_v<scalar_t, compute_t>) {
      if (in_place) {
        return w.data + span.first * w.ld_n + k0;
      }
    }
    return packed + span.at * depth;
  }

  // One step of K for rows [m0, m0 + m).
  void multiply_along_k(
      const PanelColumns& columns,
      int64_t m0,
      int64_t m,
      int64_t k0,
      int64_t depth,
      bool in_place) const {
    const int64_t x_depth = round_up(k, kVnni<compute_t>);
    const int64_t ld = in_place ? w.ld_n : depth;
    const auto step = ProductStep::of<compute_t>(m, depth, kPanelCols);
    for (const auto& span : columns.spans) {
      const compute_t* lines = lines_of(span, k0, depth, in_place);
      for (int64_t i = 0; i < span.count; i += step.lines) {
        for (int64_t kk = 0; kk < depth; kk += step.depth) {
          for (int64_t t = 0; t < m; t += kTileRows) {
            const int64_t width = tile_width(m - t);
            multiply<compute_t>(
                std::min(step.lines, span.count - i),
                width,
                std::min(step.depth, depth - kk),
                lines + i * ld + kk,
                ld,
                x.data + (m0 + t) * x_depth + (k0 + kk) * width,
                width,
                c + t * kPanelCols + (span.at + i) * kTileRows,
                kTileRows,
                /*accumulate=*/k0 + kk > 0);
          }
        }
      }
    }
  }

  // The same for all rows of a thin block, which wait for the weight.
  void multiply_thin(
      const PanelColumns& columns,
      const PanelColumns& next,
      int64_t k0,
      int64_t depth,
      bool in_place) const {
    const int64_t ld = in_place ? w.ld_n : depth;
    const PanelSpan order[] = {
        columns.spans[0], columns.spans[1], next.spans[0]};
    for (const auto i : c10::irange(2)) {
      const auto& span = order[i];
      // The first span is followed by the second, if there is one.
      const auto& follower = order[i + 1].count > 0 ? order[i + 1] : order[2];
      const moe_thin::Prefetch prefetch = in_place
          ? moe_thin::Prefetch(
                lines_of(follower, k0, depth, in_place),
                std::min(follower.count, moe_thin::kGroups * moe_thin::kLines),
                depth,
                ld)
          : moe_thin::Prefetch();
      moe_thin::multiply<compute_t>(
          span.count,
          rows,
          depth,
          lines_of(span, k0, depth, in_place),
          ld,
          x.data + k0,
          x.ld,
          c + span.at * kTileRows,
          kTileRows,
          /*accumulate=*/k0 > 0,
          prefetch);
    }
  }

  template <typename EpilogueFn>
  void finish_along_k(
      int64_t panel,
      int64_t m0,
      int64_t m,
      const EpilogueFn& epilogue) const {
    for (int64_t t = 0; t < m; t += kTileRows) {
      const int64_t tile_rows = std::min(kTileRows, m - t);
      const TransposedTile sums{c + t * kPanelCols};
      if constexpr (takes_transposed<EpilogueFn>) {
        epilogue(panel, m0 + t, tile_rows, sums);
      } else {
        alignas(64) float tile[kTileRows * kPanelCols];
        transpose_tile(sums, tile_rows, tile);
        epilogue(panel, m0 + t, tile_rows, tile);
      }
    }
  }
};

// ---- work split ------------------------------------------------------------

// Rows [begin, end) of one expert and the number of panels of its GEMM.
struct Block {
  int64_t expert;
  int64_t begin;
  int64_t end;
};

// Hands out blocks x panels to the threads as they come. A thread takes a block and
// goes through its panels, a few at a time, and helps with the others' blocks when
// none is left, so that one that the system or a neighbour slows down gets less.
// Each (block, panel) is computed in exactly one way, whichever thread gets it.
class WorkList {
 public:
  // At most panels_per_task panels of a block are handed out at once.
  WorkList(std::vector<Block> blocks, int64_t panels, int64_t panels_per_task)
      : blocks_(std::move(blocks)),
        panels_(panels),
        per_task_(std::clamp<int64_t>(panels_per_task, 1, panels)) {}

  // fn(thread, block, panel_begin, panel_end) for every task. The tasks of a block
  // come one after the other on the thread that took it.
  template <typename compute_t, typename Fn>
  void run(int64_t threads, const Fn& fn) const {
    const auto blocks = static_cast<int64_t>(blocks_.size());
    std::atomic<int64_t> next_block{0};
    std::vector<std::atomic<int64_t>> next_panel(blocks);
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      const GemmSession<compute_t> session;
      for (const auto thread : c10::irange(begin, end)) {
        const auto work_on = [&](int64_t block) {
          auto& next = next_panel[block];
          for (int64_t first = next.fetch_add(per_task_); first < panels_;
               first = next.fetch_add(per_task_)) {
            fn(thread,
               blocks_[block],
               first,
               std::min(first + per_task_, panels_));
          }
        };
        for (int64_t block = next_block++; block < blocks;
             block = next_block++) {
          work_on(block);
        }
        for (const auto block : c10::irange(blocks)) {
          work_on(block);
        }
      }
    });
  }

 private:
  std::vector<Block> blocks_;
  int64_t panels_;
  int64_t per_task_;
};

// Rows of the expert that has most.
inline int64_t most_rows(const std::vector<Block>& experts) {
  int64_t most = 0;
  for (const auto& expert : experts) {
    most = std::max(most, expert.end - expert.begin);
  }
  return most;
}

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

// Maps the pages of memory that is about to be written. Weight gradients are as
// large as the weights and new in every step, so that each of their pages is
// touched for the first time here; asking for them together costs about half of
// the page faults. Huge pages would cost less yet, but not where a hypervisor takes
// free memory back: after a pause a step was a quarter slower with them. Only a
// hint: failing (an older kernel) changes nothing.
inline void map_pages(void* data, int64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  constexpr uintptr_t page = 4096;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (begin < end) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
  }
#endif
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
