#pragma once

// The operands of _moe_mlp as the AVX512 kernels read them, and the step that
// forward and backward share: routed rows times an expert matrix, summed per
// token.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLP.h>
#include <ATen/native/cpu/MoEAvx512.h>
#include <ATen/native/cpu/MoECpuFeatures.h>

#include <vector>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_avx512 {

// Which token, slot and router weight a routed row has.
struct Routing {
  int64_t tokens;
  int64_t top_k = 1;
  int64_t last_row = 0; // offs[-1]
  std::vector<Block> experts; // rows of each expert without trailing padding
  Tensor row_slots; // (R) or undefined: the slot of row r is r
  Tensor slot_rows; // (T, K) or undefined
  Tensor weights; // (T, K) float or undefined: 1

  explicit Routing(const moe::MLPInputs& in) : tokens(in.input.size(0)) {
    if (in.row_slots.defined()) {
      row_slots = in.row_slots.contiguous();
      slot_rows = in.slot_rows.contiguous();
      top_k = slot_rows.size(1);
      slot_of_row_ = row_slots.const_data_ptr<int32_t>();
    }
    if (in.topk_weights.defined()) {
      weights = in.topk_weights.to(kFloat).contiguous();
      weight_of_slot_ = weights.const_data_ptr<float>();
    }
    const Tensor offs = in.offs.contiguous();
    const auto* ends = offs.const_data_ptr<int32_t>();
    for (const auto e : c10::irange(offs.numel())) {
      int64_t end = ends[e];
      while (end > last_row && slot(end - 1) < 0) {
        --end;
      }
      experts.push_back({e, last_row, end});
      last_row = ends[e];
    }
  }

  int64_t slot(int64_t row) const {
    return slot_of_row_ == nullptr ? row : slot_of_row_[row];
  }
  // 0 for a padding row.
  float weight(int64_t row) const {
    const int64_t s = slot(row);
    if (s < 0) {
      return 0.f;
    }
    return weight_of_slot_ == nullptr ? 1.f : weight_of_slot_[s];
  }

 private:
  const int32_t* slot_of_row_ = nullptr;
  const float* weight_of_slot_ = nullptr;
};

// Rows of a matrix by routed row: its own rows, or those of the row's token
// (null for padding) when `routing` is given.
template <typename scalar_t>
struct RowSource {
  const scalar_t* data;
  int64_t ld;
  const Routing* routing = nullptr;

  const scalar_t* row(int64_t r) const {
    if (routing == nullptr) {
      return data + r * ld;
    }
    const int64_t slot = routing->slot(r);
    return slot < 0 ? nullptr : data + slot / routing->top_k * ld;
  }
};

// Routed rows that are already what row_operand makes of rows for weights along k:
// expert by expert, each from a multiple of kRowsMultiple on. All rows of an expert
// are thin, or none.
template <typename scalar_t>
struct PackedRows {
  static constexpr int64_t kRowsMultiple = 16;

  scalar_t* data;
  int64_t ld;
  const Routing* routing;
  const int64_t* first_rows; // of each expert

  static std::vector<int64_t> make_first_rows(const Routing& routing) {
    std::vector<int64_t> first{0};
    for (const auto& expert : routing.experts) {
      first.push_back(
          first.back() + round_up(expert.end - expert.begin, kRowsMultiple));
    }
    return first;
  }
  bool is_thin(int64_t expert) const {
    const auto& block = routing->experts[expert];
    return moe_avx512::is_thin<scalar_t>(block.end - block.begin);
  }
  // The tile that begins at this row of the expert.
  scalar_t* tile(int64_t expert, int64_t row) const {
    return data +
        (first_rows[expert] + row - routing->experts[expert].begin) * ld;
  }
};

// x (rows, cols), copied if its rows are not contiguous.
inline Tensor with_dense_rows(const Tensor& x) {
  return x.size(1) <= 1 || x.stride(1) == 1 ? x : x.contiguous();
}

// (E, rows, cols) weights read in place if rows or columns are dense.
template <typename scalar_t>
class WeightStack {
 public:
  explicit WeightStack(const Tensor& w)
      : storage_(is_dense(w, 1) || is_dense(w, 2) ? w : w.contiguous()),
        data_(storage_.template const_data_ptr<scalar_t>()),
        expert_stride_(storage_.stride(0)),
        row_stride_(storage_.stride(1)),
        col_stride_(storage_.stride(2)) {
    if (is_dense(storage_, 2)) {
      col_stride_ = 1;
    } else {
      row_stride_ = 1;
    }
  }
  // x w^T: the columns of the product are the rows of w.
  WeightView<scalar_t> transposed(int64_t e) const {
    return {data_ + e * expert_stride_, row_stride_, col_stride_};
  }
  // x w
  WeightView<scalar_t> plain(int64_t e) const {
    return {data_ + e * expert_stride_, col_stride_, row_stride_};
  }

 private:
  static bool is_dense(const Tensor& w, int64_t dim) {
    return w.size(dim) <= 1 || w.stride(dim) == 1;
  }

  Tensor storage_;
  const scalar_t* data_;
  int64_t expert_stride_, row_stride_, col_stride_;
};

template <typename compute_t>
inline int64_t block_rows(int64_t k) {
  const int64_t row_bytes = round_up(k, 2) * sizeof(compute_t);
  return kTileRows *
      std::clamp<int64_t>(
             kBlockBytes / row_bytes / kTileRows, 1, kMaxBlockTiles);
}

// The (block, panel) steps of a GEMM of this depth. Blocks are cut finer when
// there would be too few steps to keep every thread busy.
template <typename compute_t>
inline WorkList gemm_work(
    const std::vector<Block>& experts,
    int64_t max_rows,
    int64_t panels,
    int64_t threads) {
  const int64_t wanted = kTasksPerThread * threads;
  int64_t rows = max_rows;
  auto blocks = make_blocks(experts, rows);
  while (rows > kTileRows &&
         static_cast<int64_t>(blocks.size()) * panels < wanted) {
    rows = round_up(rows / 2, kTileRows);
    blocks = make_blocks(experts, rows);
  }
  const int64_t per_task = panels * static_cast<int64_t>(blocks.size()) / wanted;
  return WorkList(std::move(blocks), panels, per_task);
}

// Whether the rows of a source are an operand of PanelTask where they are:
// they have its type, stay put, begin at words, need no padding and no transposition.
template <typename scalar_t>
inline bool is_operand(
    const RowSource<scalar_t>& source,
    int64_t k,
    bool along_k) {
  constexpr int64_t v = kVnni<compute_type<scalar_t>>;
  return std::is_same_v<scalar_t, compute_type<scalar_t>> && !along_k &&
      source.routing == nullptr && k % v == 0 && source.ld % v == 0;
}

template <typename scalar_t>
inline bool is_operand(const PackedRows<scalar_t>&, int64_t, bool) {
  return true;
}

template <typename scalar_t, typename compute_t>
inline RowOperand<compute_t> row_operand(
    const PackedRows<scalar_t>& source,
    const Block& block,
    int64_t,
    bool,
    compute_t*) {
  if constexpr (std::is_same_v<scalar_t, compute_t>) {
    return {
        source.tile(block.expert, block.begin),
        source.ld,
        source.is_thin(block.expert)};
  }
  TORCH_INTERNAL_ASSERT(false, "packed rows have the operand's type");
}

// The operand of a block, packed into `buffer` unless is_operand.
template <typename scalar_t, typename compute_t>
inline RowOperand<compute_t> row_operand(
    const RowSource<scalar_t>& source,
    const Block& block,
    int64_t k,
    bool along_k,
    compute_t* buffer) {
  if constexpr (std::is_same_v<scalar_t, compute_t>) {
    if (is_operand(source, k, along_k)) {
      return {source.row(block.begin), source.ld};
    }
  }
  const int64_t ld = round_up(k, kVnni<compute_t>);
  const int64_t rows = block.end - block.begin;
  if (!along_k) {
    pack_rows<scalar_t, compute_t>(
        [&](int64_t r) { return source.row(block.begin + r); },
        rows,
        k,
        buffer);
    return {buffer, ld};
  }
  const bool thin = is_thin<compute_t>(rows);
  for (int64_t m0 = 0; m0 < rows; m0 += kTileRows) {
    const int64_t m = std::min(kTileRows, rows - m0);
    pack_along_k<scalar_t, compute_t>(
        [&](int64_t r) { return source.row(block.begin + m0 + r); },
        m,
        k,
        buffer + m0 * ld,
        tile_width(m, thin));
  }
  return {buffer, ld, thin};
}

// Runs fn(task) for every Task, with x the block's rows of `source` as an operand for
// weights that lie along k or not, and per-thread buffers for PanelTask.
template <typename scalar_t, typename Source, typename Fn>
void for_each_task(
    const Routing& routing,
    const Source& source,
    int64_t k,
    int64_t panels,
    bool along_k,
    const Fn& fn) {
  using compute_t = compute_type<scalar_t>;
  const int64_t threads = at::get_num_threads();
  const int64_t most = most_rows(routing.experts);
  const int64_t depth = round_up(k, kVnni<compute_t>);
  // Not larger than this call needs: a small layer is called often.
  const int64_t max_rows =
      std::min(block_rows<compute_t>(k), round_up(most, kTileRows));
  const auto steps = PanelSteps::of<compute_t>(k, along_k);
  const int64_t group = std::min(steps.group, panels);
  const int64_t panel_bytes = group * kPanelCols *
      std::min(depth, steps.depth) * static_cast<int64_t>(sizeof(compute_t));
  const int64_t c_rows = along_k || k <= steps.depth
      ? std::min(kMaxTileRows, max_rows)
      : group * max_rows;
  const int64_t c_bytes = c_rows * kPanelCols * sizeof(float);
  const int64_t x_bytes = is_operand(source, k, along_k)
      ? 0
      : max_rows * depth * sizeof(compute_t);
  const Scratch scratch(threads, panel_bytes + c_bytes + x_bytes);
  // The block whose rows a thread has packed.
  std::vector<const Block*> packed_block(threads);
  std::vector<RowOperand<compute_t>> operands(threads);
  gemm_work<compute_t>(routing.experts, max_rows, panels, threads)
      .template run<compute_t>(
          threads,
          [&](int64_t thread,
              const Block& block,
              const Block* next,
              int64_t first,
              int64_t last) {
            char* base = scratch.at(thread);
            auto* packed = reinterpret_cast<compute_t*>(base);
            auto* c = reinterpret_cast<float*>(base + panel_bytes);
            auto& x = operands[thread];
            if (packed_block[thread] != &block) {
              x = row_operand<scalar_t, compute_t>(
                  source,
                  block,
                  k,
                  along_k,
                  reinterpret_cast<compute_t*>(base + panel_bytes + c_bytes));
              packed_block[thread] = &block;
            }
            fn(Task<compute_t>{block, next, first, last, x, packed, c});
          });
}

// One matrix per expert, with what its epilogue adds.
template <typename scalar_t>
struct Projection {
  const WeightStack<scalar_t>& weights;
  bool transposed;
  const scalar_t* bias; // (E, D) or null
  bool weighted; // by the router weight
  int64_t depth; // columns of the source
  int64_t dim; // D
  int64_t combine_bytes; // of routed rows that exist at a time

  WeightView<scalar_t> of(int64_t expert) const {
    return transposed ? weights.transposed(expert) : weights.plain(expert);
  }
};

// Where project_rows writes: routed row r at data + r * ld.
template <typename scalar_t>
struct ProjectedRows {
  scalar_t* data;
  int64_t ld;
};

// out[r, n0 : n0 + n] = round(s_r * (tile + bias)) for the m rows from row0 on.
template <typename scalar_t>
MOE_AVX512_BF16_TARGET inline void store_projected(
    const float* tile,
    const float* bias,
    const float* scales,
    int64_t m,
    int64_t n,
    const ProjectedRows<scalar_t>& out) {
  for (const auto i : c10::irange(m)) {
    const Vec scale(scales[i]);
    const float* from = tile + i * kPanelCols;
    __m512 values[kPanelCols / kLanes];
    MOE_UNROLL
    for (int64_t j = 0; j < kPanelCols / kLanes; ++j) {
      values[j] =
          scale * (Vec::loadu(from + j * kLanes) + Vec::loadu(bias + j * kLanes));
    }
    moe_vector::store_registers(out.data + i * out.ld, n, values);
  }
}

template <typename scalar_t>
MOE_AVX512_BF16_TARGET inline void store_projected(
    const TransposedTile& tile,
    const float* bias,
    const float* scales,
    int64_t m,
    int64_t n,
    const ProjectedRows<scalar_t>& out) {
  if constexpr (std::is_same_v<scalar_t, BFloat16>) {
    for (int64_t i = 0; i < m; i += kLanes) {
      const Vec scale = Vec::loadu(scales + i);
      for (int64_t j = 0; j < n; j += 2 * kLanes) {
        __m512i words[kLanes];
        for (const auto pair : c10::irange(kLanes)) {
          const int64_t at = j + 2 * pair;
          const auto value = [&](int64_t col) {
            return scale * (Vec::loadu(tile.column(col) + i) + Vec(bias[col]));
          };
          words[pair] = pack_pair(value(at), value(at + 1));
        }
        store_pairs(
            words, m - i, n - j, out.data + i * out.ld + j, out.ld);
      }
    }
  } else {
    alignas(64) float rows[kTileRows * kPanelCols];
    transpose_tile(tile, m, rows);
    store_projected(rows, bias, scales, m, n, out);
  }
}

// out[r, :cols] = round(s_r * (source_r * W_e[:, d0 : d0 + cols] + bias))
template <typename scalar_t, typename Source>
void project_rows(
    const Routing& routing,
    const Source& source,
    const Projection<scalar_t>& projection,
    int64_t d0,
    int64_t cols,
    scalar_t* out,
    int64_t ld_out) {
  using compute_t = compute_type<scalar_t>;
  const int64_t panels = (cols + kPanelCols - 1) / kPanelCols;
  const auto columns = [&](int64_t panel) {
    const int64_t n0 = panel * kPanelCols;
    return PanelColumns{
        {{d0 + n0, std::min(kPanelCols, cols - n0)}, PanelSpan{}}};
  };
  const auto task_fn = [&](const Task<compute_t>& task) {
    const auto epilogue =
        [&](int64_t panel, int64_t m0, int64_t m, const auto& tile) {
          const int64_t n0 = panel * kPanelCols;
          const int64_t n = std::min(kPanelCols, cols - n0);
          alignas(64) float bias[kPanelCols] = {};
          if (projection.bias != nullptr) {
            convert_row(
                projection.bias + task.block.expert * projection.dim + d0 + n0,
                bias,
                n);
          }
          alignas(64) float scales[kMaxTileRows] = {};
          const int64_t row = task.block.begin + m0;
          for (const auto i : c10::irange(m)) {
            scales[i] = projection.weighted ? routing.weight(row + i) : 1.f;
          }
          store_projected(
              tile,
              bias,
              scales,
              m,
              n,
              ProjectedRows<scalar_t>{out + row * ld_out + n0, ld_out});
        };
    PanelTask<scalar_t, compute_t>(
        task,
        [&](int64_t expert) { return projection.of(expert); },
        panels,
        projection.depth)
        .run(columns, epilogue);
  };
  for_each_task<scalar_t>(
      routing,
      source,
      projection.depth,
      panels,
      projection.of(0).along_k(),
      task_fn);
}

// Columns of the routed rows that exist at a time: whole panels within so many
// bytes, but at least kMinCombineCols.
template <typename scalar_t>
inline int64_t combine_width(int64_t rows, int64_t d, int64_t bytes) {
  const int64_t column_bytes =
      std::max<int64_t>(1, rows) * static_cast<int64_t>(sizeof(scalar_t));
  const int64_t fits = bytes / column_bytes / kPanelCols * kPanelCols;
  return std::min(d, std::max(kMinCombineCols, fits));
}

// out[t, :cols] = sum over the slots of t, in slot order, of float(its row)
template <typename scalar_t>
void combine(
    const Routing& routing,
    const scalar_t* rows,
    int64_t ld,
    int64_t cols,
    scalar_t* out,
    int64_t ld_out) {
  const auto* slot_rows = routing.slot_rows.const_data_ptr<int32_t>();
  at::parallel_for(
      0, routing.tokens, kCombineGrain, [&](int64_t begin, int64_t end) {
        std::vector<const scalar_t*> from(routing.top_k);
        for (const auto t : c10::irange(begin, end)) {
          int64_t count = 0;
          for (const auto k : c10::irange(routing.top_k)) {
            const int64_t row = slot_rows[t * routing.top_k + k];
            if (row >= 0 && row < routing.last_row) {
              from[count++] = rows + row * ld;
            }
          }
          store_row(out + t * ld_out, cols, [&](int64_t i) {
            Vec sum(0.f);
            for (const auto j : c10::irange(count)) {
              sum = sum + load_float(from[j] + i, cols - i);
            }
            return sum;
          });
        }
      });
}

// Zeroes the rows of x (rows, cols) outside every expert's block.
template <typename scalar_t>
void zero_unrouted(
    const Routing& routing,
    scalar_t* x,
    int64_t rows,
    int64_t cols) {
  int64_t begin = 0;
  for (const auto& e : routing.experts) {
    std::fill(x + begin * cols, x + e.begin * cols, scalar_t(0));
    begin = e.end;
  }
  std::fill(x + begin * cols, x + rows * cols, scalar_t(0));
}

// out (T, D): the projected rows of each token, summed in slot order.
template <typename scalar_t, typename Source>
void project_tokens(
    const Routing& routing,
    const Source& source,
    const Projection<scalar_t>& projection,
    const Tensor& out) {
  const int64_t d = projection.dim;
  auto* data = out.mutable_data_ptr<scalar_t>();
  if (!routing.slot_rows.defined()) {
    project_rows(routing, source, projection, 0, d, data, d);
    zero_unrouted(routing, data, routing.tokens, d);
    return;
  }
  const int64_t width = combine_width<scalar_t>(
      routing.last_row, d, projection.combine_bytes);
  const Tensor rows = at::empty({routing.last_row, width}, out.options());
  auto* routed = rows.mutable_data_ptr<scalar_t>();
  for (int64_t d0 = 0; d0 < d; d0 += width) {
    const int64_t cols = std::min(width, d - d0);
    project_rows(routing, source, projection, d0, cols, routed, width);
    combine(routing, routed, width, cols, data + d0, d);
  }
}

// Where gate and up of hidden unit f are in a row of H or dH.
struct HiddenLayout {
  int64_t hidden; // F
  bool gated;
  bool interleaved;

  int64_t cols() const {
    return gated ? 2 * hidden : hidden;
  }

  // Gate and up of units [f, f + n), n <= kLanes.
  template <typename scalar_t>
  C10_ALWAYS_INLINE void load(
      const scalar_t* row,
      int64_t f,
      int64_t n,
      Vec& gate,
      Vec& up) const {
    if (!interleaved) {
      gate = load_float(row + f, n);
      up = gated ? load_float(row + hidden + f, n) : gate;
      return;
    }
    const Vec low = load_float(row + 2 * f, 2 * n);
    const Vec high = 2 * n > kLanes
        ? load_float(row + 2 * f + kLanes, 2 * n - kLanes)
        : Vec(0.f);
    std::tie(gate, up) = vec::deinterleave2(low, high);
  }

  template <typename scalar_t>
  C10_ALWAYS_INLINE void store(
      scalar_t* row,
      int64_t f,
      int64_t n,
      const Vec& gate,
      const Vec& up) const {
    if (!interleaved) {
      store_float(row + f, gate, n);
      if (gated) {
        store_float(row + hidden + f, up, n);
      }
      return;
    }
    const auto [low, high] = vec::interleave2(gate, up);
    store_float(row + 2 * f, low, 2 * n);
    if (2 * n > kLanes) {
      store_float(row + 2 * f + kLanes, high, 2 * n - kLanes);
    }
  }

  // Of units [f, f + 2 * kLanes).
  template <typename scalar_t>
  C10_ALWAYS_INLINE void store_two(
      scalar_t* row,
      int64_t f,
      const Vec& gate0,
      const Vec& up0,
      const Vec& gate1,
      const Vec& up1) const {
    if (!interleaved) {
      store_rounded(row + f, gate0, gate1);
      if (gated) {
        store_rounded(row + hidden + f, up0, up1);
      }
      return;
    }
    const auto [low0, high0] = vec::interleave2(gate0, up0);
    const auto [low1, high1] = vec::interleave2(gate1, up1);
    store_rounded(row + 2 * f, low0, high0);
    store_rounded(row + 2 * f + 2 * kLanes, low1, high1);
  }

  template <typename scalar_t>
  void zero(scalar_t* row, int64_t f, int64_t n) const {
    if (interleaved) {
      std::fill_n(row + 2 * f, 2 * n, scalar_t(0));
      return;
    }
    std::fill_n(row + f, n, scalar_t(0));
    if (gated) {
      std::fill_n(row + hidden + f, n, scalar_t(0));
    }
  }
};

template <typename scalar_t>
inline const scalar_t* data_or_null(const Tensor& x) {
  return x.defined() ? x.const_data_ptr<scalar_t>() : nullptr;
}

inline Tensor contiguous_or_undefined(const Tensor& x) {
  return x.defined() ? x.contiguous() : x;
}

// Whether these kernels take a call. Otherwise the portable kernel does:
// float64, empty matrices, bfloat16 on a CPU or from a compiler without AVX512-BF16,
// where ONEDNN_MAX_CPU_ISA forbids the instructions, and where torch.backends.mkldnn
// is disabled, the switch with which one asks for plain kernels on CPU.
inline bool is_eligible(const moe::MLPInputs& in) {
  const auto dtype = in.input.scalar_type();
  return (dtype == kFloat || dtype == kHalf ||
          (dtype == kBFloat16 && moe_vector::kHasBFloat16 &&
           moe_cpu::has_avx512_bf16())) &&
      moe_cpu::may_use_avx512() && at::globalContext().userEnabledMkldnn() &&
      in.w_out.size(1) > 0 && in.w_out.size(2) > 0;
}

// Calls fn with a zero of the dtype, which is one of is_eligible's.
template <typename Fn>
inline void dispatch_dtype(ScalarType dtype, const Fn& fn) {
  if (dtype == kFloat) {
    fn(0.f);
  } else if (dtype == kBFloat16) {
    fn(BFloat16(0));
  } else {
    fn(Half(0));
  }
}

} // namespace moe_avx512
} // namespace CPU_CAPABILITY
} // namespace at::native
