#pragma once

// The step that the AVX512 forward and backward of _moe_mlp share: routed rows times an
// expert matrix, summed per token.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/cpu/MoEAvx512Operands.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty.h>
#endif

#include <algorithm>
#include <type_traits>
#include <vector>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_avx512 {

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

} // namespace moe_avx512
} // namespace CPU_CAPABILITY
} // namespace at::native
