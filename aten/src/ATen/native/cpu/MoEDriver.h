#pragma once

// The one loop of the CPU kernels of _moe_mlp: routed rows times a matrix per expert,
// over a list of (block, panel) tasks. A "block" is a run of rows of one expert, a
// "panel" kPanelCols columns of the product. Around it, from the bottom up:
//   MoEPacking.h     rows as vectors, and operands as packed panels
//   MoEMicroGemm.h   products of these; MoEMicroGemmX86.h, MoEAmx.h: faster ones
//   MoEDriver.h      routing, work of the threads, sources of weights, the loop
//   MoEActivation.h  activations, derivatives, where gate and up are
//   MoEProjection.h  products summed per token; which micro-GEMM a call gets
//   MoEForward.h     _moe_mlp, called by MoEMLPKernel.cpp
//   MoEWeightGrad.h  gradients of weights and biases, for MoEMLPBackwardKernel.cpp

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLPCPU.h>
#include <ATen/native/cpu/MoEMicroGemm.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <span>
#include <vector>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

// None of these numbers changes a bit of a result.
// Most rows of a block: their sums stay in L2, and all use one packed panel.
constexpr int64_t kMaxBlockRows = 384;
// Blocks are cut to at least this for more tasks or less scratch.
constexpr int64_t kMinBlockRows = 48;
// From this many rows the next panel is fetched after each word of K.
constexpr int64_t kMinFetchRows = 8;
// Most elements of a block's packed rows.
constexpr int64_t kPackedElements = 512 * 1024;
// Most scratch of all threads together.
constexpr int64_t kScratchBytes = 4 * 1024 * 1024;
// Fewest tasks per thread, so that threads wait for the last one at most a few percent of
// the time.
constexpr int64_t kTasksPerThread = 32;
// Below this fewer threads are used, as each has its own scratch.
constexpr int64_t kMinTasksPerThread = 4;
// Products, and elements of an elementwise loop, that are worth another thread.
constexpr int64_t kMinProducts = 256 * 1024;
constexpr int64_t kMinElements = 32 * 1024;

// ---- routing --------------------------------------------------------------------

// Rows [begin, end) of one expert.
struct Block {
  int64_t expert;
  int64_t begin;
  int64_t end;

  int64_t rows() const {
    return end - begin;
  }
};

inline Tensor contiguous_or_undefined(const Tensor& x) {
  return x.defined() ? x.contiguous() : x;
}

template <typename scalar_t>
inline const scalar_t* data_or_null(const Tensor& x) {
  return x.defined() ? x.const_data_ptr<scalar_t>() : nullptr;
}

// Which token, slot and router weight a routed row has.
template <typename acc_t>
struct Routing {
  int64_t tokens;
  int64_t top_k = 1;
  int64_t last_row = 0;        // offs[-1]
  int64_t most_rows = 0;       // of an expert
  std::vector<Block> experts;  // rows of each expert without trailing padding
  Tensor row_slots;            // (R) or undefined: the slot of row r is r
  Tensor slot_rows;            // (T, K) or undefined
  Tensor weights;              // (T, K) or undefined: 1

  explicit Routing(const moe::MLPInputs& in)
      : tokens(in.input.size(0)),
        row_slots(contiguous_or_undefined(in.row_slots)),
        slot_rows(contiguous_or_undefined(in.slot_rows)) {
    if (slot_rows.defined()) {
      top_k = slot_rows.size(1);
    }
    if (in.topk_weights.defined()) {
      weights = in.topk_weights.to(c10::CppTypeToScalarType<acc_t>::value).contiguous();
    }
    slot_of_row_ = data_or_null<int32_t>(row_slots);
    weight_of_slot_ = data_or_null<acc_t>(weights);
    const Tensor offs = in.offs.contiguous();
    const auto* ends = offs.const_data_ptr<int32_t>();
    for (const auto e : c10::irange(offs.numel())) {
      int64_t end = ends[e];
      while (end > last_row && slot(end - 1) < 0) {
        --end;
      }
      experts.push_back({e, last_row, end});
      most_rows = std::max(most_rows, end - last_row);
      last_row = ends[e];
    }
  }

  // -1 for a padding row.
  int64_t slot(int64_t row) const {
    return slot_of_row_ == nullptr ? row : slot_of_row_[row];
  }
  // 0 for a padding row.
  acc_t weight(int64_t row) const {
    const int64_t s = slot(row);
    if (s < 0) {
      return acc_t(0);
    }
    return weight_of_slot_ == nullptr ? acc_t(1) : weight_of_slot_[s];
  }

 private:
  const int32_t* slot_of_row_ = nullptr;
  const acc_t* weight_of_slot_ = nullptr;
};

// Rows of a matrix by routed row: its own rows, or with `routing` those of the token
// (null for padding).
template <typename scalar_t>
struct RowSource {
  const scalar_t* data = nullptr;
  int64_t ld = 0;
  const Routing<acc_type<scalar_t>>* routing = nullptr;

  const scalar_t* row(int64_t r, int64_t col = 0) const {
    if (routing == nullptr) {
      return data + r * ld + col;
    }
    const int64_t slot = routing->slot(r);
    return slot < 0 ? nullptr : data + slot / routing->top_k * ld + col;
  }
};

// x (T, cols) with contiguous rows, by routed row.
template <typename scalar_t>
inline RowSource<scalar_t>
rows_of_tokens(const Tensor& x, const Routing<acc_type<scalar_t>>& routing) {
  return {
      x.const_data_ptr<scalar_t>(), x.stride(0), routing.slot_rows.defined() ? &routing : nullptr};
}

// x, copied if its rows are not contiguous.
inline Tensor with_dense_rows(const Tensor& x) {
  return x.size(1) <= 1 || x.stride(1) == 1 ? x : x.contiguous();
}

// Cuts each expert's rows into blocks of at most max_rows, a multiple of `multiple`. They
// are about equal, as each packs all panels.
inline std::vector<Block>
make_blocks(const std::vector<Block>& experts, int64_t max_rows, int64_t multiple) {
  std::vector<Block> blocks;
  for (const auto& expert : experts) {
    const int64_t count = std::max<int64_t>(1, ceil_div(expert.rows(), max_rows));
    const int64_t rows = round_up(ceil_div(expert.rows(), count), multiple);
    for (int64_t row = expert.begin; row < expert.end; row += rows) {
      blocks.push_back({expert.expert, row, std::min(row + rows, expert.end)});
    }
  }
  return blocks;
}

// ---- work -----------------------------------------------------------------------

// Distributes blocks x panels to threads dynamically. A thread takes a block, walks its
// panels, a few at a time, and helps with other blocks when none is left, so that a slow thread
// gets less. A (block, panel) has the same result on every thread.
class WorkList {
 public:
  WorkList(std::vector<Block> blocks, int64_t panels, int64_t max_threads, int64_t tasks_per_thread)
      : blocks_(std::move(blocks)),
        panels_(panels),
        threads_(std::max<int64_t>(1, std::min(max_threads, tasks()))),
        per_task_(
            std::clamp<int64_t>(
                tasks() / (tasks_per_thread * threads_), 1, std::max<int64_t>(1, panels))) {}

  int64_t tasks() const {
    return static_cast<int64_t>(blocks_.size()) * panels_;
  }
  int64_t threads() const {
    return threads_;
  }

  // fn(thread, block, panel_begin, panel_end) for every task. A thread runs its tasks of a
  // block one after the other.
  template <typename Session, typename Fn>
  void run(const Fn& fn) const {
    if (tasks() == 0) {
      return;
    }
    const auto blocks = static_cast<int64_t>(blocks_.size());
    std::atomic<int64_t> next_block{0};
    std::vector<std::atomic<int64_t>> next_panel(blocks);
    at::parallel_for(0, threads_, 1, [&](int64_t begin, int64_t end) {
      [[maybe_unused]] const Session session;
      for (const auto thread : c10::irange(begin, end)) {
        const auto work_on = [&](int64_t block) {
          auto& panel = next_panel[block];
          for (int64_t first = panel.fetch_add(per_task_); first < panels_;
               first = panel.fetch_add(per_task_)) {
            const int64_t last = std::min(first + per_task_, panels_);
            fn(thread, blocks_[block], first, last);
          }
        };
        for (int64_t block = next_block++; block < blocks; block = next_block++) {
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
  int64_t threads_;
  int64_t per_task_;
};

// Bytes that threads may allocate beside those of a product; the rest is for pre-activations.
inline int64_t scratch_limit(int64_t held) {
  return std::max(kScratchBytes / 4 * 3 - held, held / 2);
}

// Threads worth using for this many products.
inline int64_t threads_for(int64_t products) {
  return std::clamp<int64_t>(products / kMinProducts, 1, at::get_num_threads());
}

// Cache-line aligned buffers of each thread, from one allocation.
class Scratch {
 public:
  // Adds a buffer of this many elements.
  template <typename T>
  void add(int64_t elements) {
    begins_.push_back(bytes_);
    bytes_ += round_up(elements * static_cast<int64_t>(sizeof(T)), int64_t{64});
  }
  // Bytes of a thread. One more cache line, as equal addresses modulo a page share a set.
  int64_t bytes() const {
    return bytes_ + 64;
  }
  void allocate(int64_t threads) {
    storage_ = c10::GetCPUAllocator()->allocate(threads * bytes());
  }
  template <typename T>
  T* at(int64_t thread, size_t buffer) const {
    auto* base = static_cast<char*>(storage_.get());
    return reinterpret_cast<T*>(base + thread * bytes() + begins_[buffer]);
  }

 private:
  std::vector<int64_t> begins_;
  int64_t bytes_ = 0;
  c10::DataPtr storage_;
};

// ---- weights --------------------------------------------------------------------

// Columns [first, first + count) of a part of a weight source, at column `at` of a panel
// and alone in `width` columns of it.
struct PanelSpan {
  int64_t part = 0;
  int64_t first = 0;
  int64_t count = 0;
  int64_t at = 0;
  int64_t width = kPanelCols;
};

// The columns of one panel: gate and up halves are two spans.
struct PanelColumns {
  PanelSpan spans[2];

  int64_t end() const {
    const PanelSpan& last = spans[spans[1].count > 0 ? 1 : 0];
    return last.at + last.count;
  }
};

struct Panel {
  int64_t expert;
  PanelColumns columns;
};

inline PanelColumns plain_panel(int64_t first, int64_t count) {
  return {{{0, first, count}, PanelSpan{}}};
}

// The only place that knows how expert weights are stored; it packs panels for a
// micro-GEMM. These weights are (E, rows, cols) with any strides, in one part, or in
// two for gate and up, which may be two tensors. Low-bit weights are another source. A source
// without kPacks has multiply instead of pack, which computes a whole tile of the product, and
// may have convert_row, which makes a row its operand.
template <typename scalar_t>
class WeightSource {
 public:
  // If `transposed`, B is W^T: its columns are rows of W, in parts. Otherwise B is W, with
  // the parts along K.
  WeightSource(const Tensor& w, const Tensor& w_up, int64_t parts, bool transposed)
      : k_parts(transposed ? 1 : parts),
        part_depth(transposed ? w.size(2) : w.size(1) / (w_up.defined() ? 1 : parts)),
        transposed_(transposed) {
    const int64_t part_rows = w.size(1) / (w_up.defined() ? 1 : parts);
    for (const auto part : c10::irange(parts)) {
      const Tensor source = w_up.defined() ? (part == 0 ? w : w_up)
                                           : w.narrow(1, part * part_rows, part_rows);
      parts_[part] = {
          source.const_data_ptr<scalar_t>(), source.stride(0), stride_of(source, 1),
          stride_of(source, 2)};
    }
  }

  static constexpr bool kPacks = true;
  // K has k_parts parts of part_depth elements.
  const int64_t k_parts;
  const int64_t part_depth;

  // The stored weights: columns of `span`, rows from k0 of a part of K.
  StridedView<scalar_t>
  view(int64_t expert, const PanelSpan& span, int64_t k_part, int64_t k0) const {
    const Part& part = parts_[transposed_ ? span.part : k_part];
    const int64_t k_stride = transposed_ ? part.col_stride : part.row_stride;
    const int64_t n_stride = transposed_ ? part.row_stride : part.col_stride;
    return {
        part.data + expert * part.expert_stride + k0 * k_stride + span.first * n_stride, k_stride,
        n_stride};
  }

  // Whether all columns are dense along K.
  bool is_along_k() const {
    return std::all_of(std::begin(parts_), std::end(parts_), [&](const Part& part) {
      return part.data == nullptr || (transposed_ ? part.col_stride : part.row_stride) == 1;
    });
  }

  // Packs columns of `span`, rows [k0, k0 + depth) of a part of K, into a panel. `fetches`
  // the next operand: the same columns further down, then those of the next panel.
  template <typename Micro>
  void pack(
      int64_t expert, const PanelSpan& span, int64_t k_part, int64_t k0, int64_t depth,
      bool fetches, typename Micro::operand_t* panel) const {
    const auto b = view(expert, span, k_part, k0);
    const int64_t ahead = k0 + depth < part_depth ? depth * b.k_stride
                                                  : span.width * b.n_stride - k0 * b.k_stride;
    pack_panel<Micro>(b, span.count, depth, span.at, span.width, panel, fetches ? ahead : 0);
  }

 private:
  struct Part {
    const scalar_t* data;
    int64_t expert_stride;
    int64_t row_stride;
    int64_t col_stride;
  };

  // The stride of a dimension of one element is arbitrary.
  static int64_t stride_of(const Tensor& w, int64_t dim) {
    return w.size(dim) <= 1 ? 1 : w.stride(dim);
  }

  Part parts_[2] = {};
  bool transposed_;
};

// ---- the loop -------------------------------------------------------------------

// Rows of a tile that are finished together, while their sums are in L1.
template <typename Micro>
constexpr int64_t kFinishRows = (48 + Micro::kTileRows - 1) / Micro::kTileRows * Micro::kTileRows;

// x B for the routed rows x of `source` and B of `weights`, which has `cols` columns (or hidden
// units), `width` of them in a panel. columns(first, count) returns PanelColumns.
// epilogue(rows, first, count, c) gets the finished tile of some rows of a block, with
// leading dimension kPanelCols; values outside the spans are undefined.
template <typename scalar_t, typename Micro, typename Weights>
class ExpertGemm {
  using operand_t = typename Micro::operand_t;
  using acc_t = acc_type<scalar_t>;

  static constexpr bool kConvertsRows =
      requires(const Weights& w, const scalar_t* row, operand_t* out) { w.convert_row(row, out); };

 public:
  ExpertGemm(
      const Routing<acc_t>& routing, const RowSource<scalar_t>& source, const Weights& weights,
      int64_t cols, int64_t width = kPanelCols)
      : source_(source),
        weights_(weights),
        cols_(cols),
        width_(width),
        padded_depth_(round_up(weights.part_depth, kWordElements<operand_t>)),
        row_size_(weights.k_parts * padded_depth_),
        in_place_(
            std::is_same_v<scalar_t, operand_t> && !Micro::kDenseRows && !kConvertsRows &&
            padded_depth_ == weights.part_depth),
        zeros_(in_place_ ? row_size_ : 0) {
    const int64_t panels = ceil_div(cols, width);
    int64_t threads =
        threads_for(routing.last_row * panels * kPanelCols * std::max<int64_t>(1, row_size_));
    const int64_t least = round_up(kMinBlockRows, Micro::kTileRows);
    int64_t rows =
        round_up(std::clamp<int64_t>(routing.most_rows, 1, kMaxBlockRows), Micro::kTileRows);
    auto blocks = make_blocks(routing.experts, rows, Micro::kTileRows);
    const auto tasks = [&] { return static_cast<int64_t>(blocks.size()) * panels; };
    // Rows that evict each other are copied, if that takes at most half of the limit below.
    bool spreads = false;
    if constexpr (requires { Micro::spreads_rows(weights, source.ld); }) {
      spreads = in_place_ && rows >= kMinFetchRows && Micro::spreads_rows(weights, source.ld);
      in_place_ = in_place_ && !spreads;
      row_length_ += spreads ? Micro::kRowGap : 0;
    }
    // Many rows get deep panels, if these take at most half of the scratch.
    if (rows < kMinBlockRows || 2 * threads * reserve(rows).bytes() > kScratchBytes) {
      depth_ = Micro::kMinDepth;
    }
    // Cut for more tasks, or for less scratch.
    while (rows > least &&
           ((threads > 1 && tasks() < kTasksPerThread * threads) ||
            threads * reserve(rows).bytes() > kScratchBytes ||
            (!in_place_ && std::min(rows, routing.most_rows) * row_size_ > kPackedElements))) {
      rows = std::max(least, round_up(rows / 2, Micro::kTileRows));
      blocks = make_blocks(routing.experts, rows, Micro::kTileRows);
    }
    threads = std::min(threads, ceil_div(tasks(), kMinTasksPerThread));
    // If that is still too much beside operands and results, each panel packs the rows again,
    // a part of K at a time, and fewer threads run.
    const int64_t source_rows = source.routing == nullptr ? routing.last_row : routing.tokens;
    const int64_t limit = scratch_limit(
        (source_rows * row_size_ + (routing.last_row + routing.tokens) * cols) *
        static_cast<int64_t>(sizeof(scalar_t)));
    if (spreads && 2 * threads * reserve(rows).bytes() > limit) {
      in_place_ = true;
      row_length_ = row_size_;
    }
    // If rows must have all of K, blocks get fewer rows instead.
    if constexpr (requires { Micro::needs_whole_rows(weights); }) {
      if (Micro::needs_whole_rows(weights)) {
        depth_ = kPanelCols;  // no panel is packed
        rows = std::clamp<int64_t>(routing.most_rows, 1, rows);
        while (rows > Micro::kTileRows && threads * reserve(rows).bytes() > limit) {
          rows = std::max(Micro::kTileRows, round_up(rows / 2, Micro::kTileRows));
          blocks = make_blocks(routing.experts, rows, Micro::kTileRows);
        }
        threads = std::min(threads, std::max<int64_t>(1, limit / reserve(rows).bytes()));
      }
    }
    if (threads > 1 && threads * reserve(rows).bytes() > limit) {
      row_length_ = Weights::kPacks && !in_place_ ? std::min(row_size_, depth_) : row_size_;
      threads = std::clamp<int64_t>(limit / reserve(rows).bytes(), 1, threads);
    }
    // These sums may exceed kScratchBytes, but not `limit`: then fewer are kept, in the panel's buffer.
    if constexpr (requires { Micro::kept_sums(weights, rows); }) {
      constexpr auto size = static_cast<int64_t>(sizeof(acc_t) / sizeof(operand_t));
      kept_ = size * Micro::kept_sums(weights, rows);
      if (threads * reserve(rows).bytes() > limit) {
        kept_ = 0;
      }
    }
    work_.emplace(std::move(blocks), panels, threads, kTasksPerThread);
    scratch_ = reserve(rows);
    scratch_.allocate(work_->threads());
    if constexpr (requires { Micro::packs_rows(weights); }) {
      packs_rows_ = row_length_ >= row_size_ && Micro::packs_rows(weights);
    }
  }

  template <typename ColumnsFn, typename EpilogueFn>
  void run(const ColumnsFn& columns, const EpilogueFn& epilogue) const {
    std::vector<const Block*> prepared(work_->threads());
    work_->template run<typename Micro::Session>(
        [&](int64_t thread, const Block& block, int64_t first, int64_t last) {
          const Buffers at{
              scratch_.at<const operand_t*>(thread, 0), scratch_.at<acc_t>(thread, 1),
              scratch_.at<operand_t>(thread, 2), scratch_.at<operand_t>(thread, 3)};
          if (prepared[thread] != &block && row_length_ >= row_size_) {
            for (const auto part : c10::irange(weights_.k_parts)) {
              prepare_rows(block, part, 0, weights_.part_depth, part * padded_depth_, at);
            }
            prepared[thread] = &block;
          }
          const auto columns_from = [&](int64_t col) {
            return columns(col, std::min(width_, cols_ - col));
          };
          const int64_t end = std::min(last * width_, cols_);
          int64_t col = first * width_;
          const auto finish = [&](const Block& rows, const acc_t* sums) {
            epilogue(rows, col, std::min(width_, cols_ - col), sums);
          };
          if constexpr (Weights::kPacks && requires { Micro::kFewRows; }) {
            for (int64_t made = row_length_ >= row_size_ ? 1 : 0; made > 0 && col < end;) {
              made = Micro::multiply_runs(
                  weights_, block, [&](int64_t p) { return columns_from(col + p * width_); },
                  ceil_div(end - col, width_), at.lines, panel_as_sums(at));
              for (int64_t p = 0; p < made; ++p, col += width_) {
                finish(block, panel_as_sums(at).data() + p * block.rows() * kPanelCols);
              }
            }
          }
          for (; col < end; col += width_) {
            if constexpr (Weights::kPacks) {
              // Usually the next expert's first panel follows the last panel.
              const bool is_last = col + width_ >= cols_;
              const Panel next{
                  block.expert + (is_last ? work_->threads() : 0),
                  columns_from(is_last ? 0 : col + width_)};
              pack_and_multiply(block, columns_from(col), next, at, finish);
            } else {
              weights_.template multiply<Micro>(
                  block.expert, columns_from(col), block.rows(), {at.lines, row_size_, 0},
                  at.panel, at.c);
              finish(block, at.c);
            }
          }
        });
  }

 private:
  struct Buffers {
    const operand_t** lines;
    acc_t* c;
    operand_t* panel;
    operand_t* rows;
  };

  int64_t panel_size() const {
    return std::max(kPanelCols * std::min(padded_depth_, depth_), kept_);
  }

  // Products that pack no panel have its buffer for sums.
  std::span<acc_t> panel_as_sums(const Buffers& at) const {
    return {
        reinterpret_cast<acc_t*>(at.panel), panel_size() * sizeof(operand_t) / sizeof(acc_t)};
  }

  // Scratch of a thread for blocks of `rows` rows.
  Scratch reserve(int64_t rows) const {
    Scratch scratch;
    scratch.add<const operand_t*>(rows);
    scratch.add<acc_t>(rows * kPanelCols);
    scratch.add<operand_t>(panel_size());
    scratch.add<operand_t>(in_place_ ? 0 : rows * row_length_);
    return scratch;
  }

  // Prepares the rows of a block as a left operand: in place, or [k0, k0 + depth) of a
  // part of K packed at `offset` of a packed row.
  void prepare_rows(
      const Block& block, int64_t part, int64_t k0, int64_t depth, int64_t offset,
      const Buffers& at) const {
    const int64_t rows = block.rows();
    if constexpr (requires { Micro::packs_rows(weights_); }) {
      if (packs_rows_) {
        for (int64_t i = 0; i < rows; i += Micro::kPackedRows) {
          const scalar_t* from[Micro::kPackedRows] = {};
          for (const auto j : c10::irange(std::min(Micro::kPackedRows, rows - i))) {
            from[j] = source_.row(block.begin + i + j, part * depth);
          }
          at.lines[i] = at.rows + i * row_length_;
          Micro::pack_rows(from, depth, at.rows + i * row_length_ + offset * Micro::kPackedRows);
        }
        return;
      }
    }
    for (const auto i : c10::irange(in_place_ ? rows : round_up(rows, Micro::kTileRows))) {
      const scalar_t* row = i < rows ? source_.row(block.begin + i) : nullptr;
      if constexpr (std::is_same_v<scalar_t, operand_t>) {
        if (in_place_) {
          at.lines[i] = row != nullptr ? row : zeros_.data();
          continue;
        }
      }
      at.lines[i] = at.rows + i * row_length_;
      operand_t* out = at.rows + i * row_length_ + offset;
      if constexpr (kConvertsRows) {
        if (row != nullptr) {
          weights_.convert_row(row, out);
          continue;
        }
      }
      const int64_t filled = row == nullptr ? 0 : depth;
      convert_row(row == nullptr ? row : row + part * weights_.part_depth + k0, out, filled);
      std::fill(out + filled, out + round_up(depth, kWordElements<operand_t>), operand_t(0));
    }
  }

  template <typename FinishFn>
  void pack_and_multiply(
      const Block& block, const PanelColumns& columns, const Panel& next, const Buffers& at,
      const FinishFn& finish) const {
    const int64_t rows = block.rows();
    const int64_t depth = weights_.part_depth;
    if (depth == 0) {
      std::fill_n(at.c, rows * kPanelCols, acc_t(0));
      return finish(block, at.c);
    }
    if constexpr (requires {
                    Micro::multiply_stored(
                        weights_, block, columns, next, at.lines, panel_as_sums(at), at.c);
                  }) {
      for (int64_t row = 0; row_length_ >= row_size_ && row < rows; row += kFinishRows<Micro>) {
        const int64_t m = std::min(kFinishRows<Micro>, rows - row);
        const Block part{block.expert, block.begin + row, block.begin + row + m};
        if (!Micro::multiply_stored(
                weights_, part, columns, next, at.lines + row, panel_as_sums(at), at.c)) {
          break;
        }
        finish(part, at.c);
        if (row + m == rows) {
          return;
        }
      }
    }
    // The products of few rows are shorter than the fetch of the next panel, unless it is
    // fetched between all of them.
    const bool within = Micro::kFetchesWithin && rows >= kMinFetchRows && rows < kMinBlockRows;
    const bool few = rows < kMinBlockRows && !within;
    for (const auto part : c10::irange(weights_.k_parts)) {
      for (int64_t k0 = 0; k0 < depth; k0 += depth_) {
        const int64_t k = std::min(depth_, depth - k0);
        for (const auto& span : columns.spans) {
          if (span.count > 0) {
            weights_.template pack<Micro>(block.expert, span, part, k0, k, few, at.panel);
          }
        }
        const int64_t offset = row_length_ < row_size_ ? 0 : part * padded_depth_ + k0;
        if (row_length_ < row_size_) {
          prepare_rows(block, part, k0, k, offset, at);
        }
        const bool ends_part = k0 + k == depth;
        const bool is_last = ends_part && part + 1 == weights_.k_parts;
        typename Micro::Prefetch ahead(
            weights_, is_last ? next : Panel{block.expert, columns},
            is_last ? 0 : part + (ends_part ? 1 : 0), ends_part ? 0 : k0 + k, depth_,
            few ? 0
                : ceil_div(rows, Micro::kTileRows) * ceil_div(columns.end(), Micro::kTileCols) *
                    (within ? ceil_div(k, kWordElements<operand_t>) : 1),
            within);
        for (int64_t row = 0; row < rows; row += kFinishRows<Micro>) {
          const int64_t m = std::min(kFinishRows<Micro>, rows - row);
          acc_t* sums = at.c + row * kPanelCols;
          Micro::multiply(
              m, columns.end(), k, {at.lines + row, row_length_, offset}, at.panel,
              {sums, /*accumulate=*/part + k0 > 0}, ahead);
          if (is_last) {
            finish({block.expert, block.begin + row, block.begin + row + m}, sums);
          }
        }
      }
    }
  }

  const RowSource<scalar_t>& source_;
  const Weights& weights_;
  const int64_t cols_;
  const int64_t width_;
  const int64_t padded_depth_;  // of a part of K
  const int64_t row_size_;      // elements of a row as an operand
  bool in_place_;               // rows in memory are operands
  bool packs_rows_ = false;     // with Micro::pack_rows()
  const std::vector<operand_t> zeros_;  // the row of padding in place
  int64_t row_length_ = row_size_;      // elements of a row packed at a time, or between rows
  int64_t depth_ = Micro::kDepth;       // of a packed panel
  int64_t kept_ = 0;                    // elements of its buffer for Micro::kept_sums()
  std::optional<WorkList> work_;
  Scratch scratch_;
};

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native
