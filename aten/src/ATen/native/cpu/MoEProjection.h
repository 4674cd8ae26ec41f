#pragma once

// Shared by forward and backward of _moe_mlp: routed rows times a
// matrix per expert, summed per token, and the choice of a micro-GEMM.

#include <ATen/native/cpu/MoEActivation.h>
#include <ATen/native/cpu/MoEDriver.h>
#include <ATen/native/cpu/MoEMicroGemmX86.h>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

// Bytes of routed rows of y and dX that exist at a time (columns are cut). They are still
// in cache when they are summed, and malloc recycles a buffer of this size instead of mapping and
// zeroing it anew. dX has more, as its weights are read in pieces as wide as the cut.
constexpr int64_t kCombineBytes = 4 * 1024 * 1024;
constexpr int64_t kGradCombineBytes = 16 * 1024 * 1024;
constexpr int64_t kMinCombineCols = 4 * kPanelCols;

// Rows of an elementwise loop that are worth another thread.
inline int64_t rows_grain(int64_t elements_per_row) {
  return std::max<int64_t>(1, kMinElements / std::max<int64_t>(1, elements_per_row));
}

// Whether the functions of a call may be less exact than those of float, as its results are
// rounded to fewer bits.
template <typename scalar_t>
constexpr bool kFastMath = !std::is_same_v<scalar_t, acc_type<scalar_t>>;

// Calls fn(scalar_t(0), Micro()) for a dtype and its micro-GEMM on this CPU. Without
// instructions for 16-bit operands these are multiplied as float.
template <typename Fn>
void dispatch_micro_gemm(ScalarType dtype, const Fn& fn) {
#ifdef MOE_HAS_FAST_GEMM
  return dispatch_fast_micro_gemm(dtype, fn);
#else
  switch (dtype) {
    case kDouble:
      return fn(double(0), VecGemm<double>());
    case kFloat:
      return fn(float(0), VecGemm<float>());
    case kHalf:
      return fn(Half(0), VecGemm<float>());
    default:
      return fn(BFloat16(0), VecGemm<float>());
  }
#endif
}

// Zeroes the rows of x (rows, cols) outside every expert's block.
template <typename scalar_t, typename acc_t>
void zero_unrouted(const Routing<acc_t>& routing, scalar_t* x, int64_t rows, int64_t cols) {
  int64_t begin = 0;
  for (const auto& e : routing.experts) {
    std::fill(x + begin * cols, x + e.begin * cols, scalar_t(0));
    begin = e.end;
  }
  std::fill(x + begin * cols, x + rows * cols, scalar_t(0));
}

// out[t, :cols] = sum over the slots of t, in slot order, of float(its row)
template <typename scalar_t, typename Micro>
void combine(
    const Routing<acc_type<scalar_t>>& routing, const scalar_t* rows, int64_t ld, int64_t cols,
    scalar_t* out, int64_t ld_out) {
  const auto* slot_rows = routing.slot_rows.template const_data_ptr<int32_t>();
  at::parallel_for(
      0, routing.tokens, rows_grain(cols * routing.top_k), [&](int64_t begin, int64_t end) {
        std::vector<const scalar_t*> from(routing.top_k);
        for (const auto t : c10::irange(begin, end)) {
          int64_t count = 0;
          for (const auto k : c10::irange(routing.top_k)) {
            const int64_t row = slot_rows[t * routing.top_k + k];
            if (row >= 0 && row < routing.last_row) {
              from[count++] = rows + row * ld;
            }
          }
          store_row<Micro>(out + t * ld_out, cols, [&](int64_t i, int64_t n) {
            VecOf<scalar_t> sum(0);
            for (const auto j : c10::irange(count)) {
              sum = sum + load_lanes(from[j] + i, n);
            }
            return sum;
          });
        }
      });
}

// out (T, D): round(s_r * (rows of `source` times B of `weights` + bias)), summed per token in slot
// order. bias (E, D) may be null; s_r is 1 unless `weighted`. Of routed rows combine_bytes exist.
template <typename scalar_t, typename Micro, typename Weights>
void project_tokens(
    const Routing<acc_type<scalar_t>>& routing, const RowSource<scalar_t>& source,
    const Weights& weights, const scalar_t* bias, bool weighted, int64_t combine_bytes,
    const Tensor& out) {
  using acc_t = acc_type<scalar_t>;
  using Vec = VecOf<scalar_t>;
  const int64_t d = out.size(1);
  const bool sums = routing.slot_rows.defined();
  const int64_t column_bytes =
      static_cast<int64_t>(sizeof(scalar_t)) * std::max<int64_t>(1, routing.last_row);
  const int64_t fitting = combine_bytes / column_bytes / kPanelCols * kPanelCols;
  const int64_t width = sums ? std::min(d, std::max(kMinCombineCols, fitting)) : d;
  auto* data = out.mutable_data_ptr<scalar_t>();
  const Tensor rows = sums ? out.new_empty({routing.last_row, width}) : out;
  auto* routed = rows.template mutable_data_ptr<scalar_t>();
  for (int64_t d0 = 0; d0 < d; d0 += width) {
    const int64_t cols = std::min(width, d - d0);
    ExpertGemm<scalar_t, Micro, Weights>(routing, source, weights, cols)
        .run(
            [&](int64_t n0, int64_t n) { return plain_panel(d0 + n0, n); },
            [&](const Block& block, int64_t n0, int64_t n, const acc_t* c) {
              alignas(64) acc_t added[kPanelCols] = {};
              if (bias != nullptr) {
                convert_row(bias + block.expert * d + d0 + n0, added, n);
              }
              for (const auto row : c10::irange(block.begin, block.end)) {
                const Vec scale(weighted ? routing.weight(row) : acc_t(1));
                const acc_t* from = c + (row - block.begin) * kPanelCols;
                store_row<Micro>(routed + row * width + n0, n, [&](int64_t j, int64_t) {
                  return scale * (load_lanes(from + j) + load_lanes(added + j));
                });
              }
            });
    if (sums) {
      combine<scalar_t, Micro>(routing, routed, width, cols, data + d0, d);
    }
  }
  if (!sums) {
    zero_unrouted(routing, data, routing.tokens, d);
  }
}

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native
