#pragma once

// The operands of _moe_mlp as the AVX512 kernels read them: routed rows, and weights of
// any strides.

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
