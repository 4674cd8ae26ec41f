#pragma once

// The matmul of the portable _moe_mlp kernel. Why not at::mm or cpublas::gemm:
//  - every element adds its products over ascending k, in blocks that depend on
//    K alone, so a row of the result depends neither on the other rows nor on the
//    number of threads; library GEMMs pick another summation order for other M;
//  - the result stays in the accumulation type until bias, router weight and
//    activation have been applied, so that there is one rounding;
//  - the weights may have any strides, and are converted while being packed.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/Unroll.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

template <typename acc_t, typename scalar_t>
inline void load_row(const scalar_t* src, acc_t* dst, int64_t n) {
  if constexpr (std::is_same_v<acc_t, scalar_t>) {
    std::copy_n(src, n, dst);
  } else {
    using Vec = vec::Vectorized<scalar_t>;
    int64_t i = 0;
    for (; i + Vec::size() <= n; i += Vec::size()) {
      auto [low, high] = vec::convert_to_float<scalar_t>(Vec::loadu(src + i));
      low.store(dst + i);
      high.store(dst + i + Vec::size() / 2);
    }
    for (; i < n; ++i) {
      dst[i] = static_cast<acc_t>(src[i]);
    }
  }
}

template <typename acc_t, typename scalar_t>
inline void store_row(const acc_t* src, scalar_t* dst, int64_t n) {
  if constexpr (std::is_same_v<acc_t, scalar_t>) {
    std::copy_n(src, n, dst);
  } else {
    using Vec = vec::Vectorized<scalar_t>;
    using FloatVec = vec::Vectorized<float>;
    int64_t i = 0;
    for (; i + Vec::size() <= n; i += Vec::size()) {
      vec::convert_from_float<scalar_t>(
          FloatVec::loadu(src + i), FloatVec::loadu(src + i + Vec::size() / 2))
          .store(dst + i);
    }
    for (; i < n; ++i) {
      dst[i] = static_cast<scalar_t>(src[i]);
    }
  }
}

// Rows and columns of one register tile: 2 vectors by as many rows as leave
// registers for one row of B and one element of A.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif
template <typename acc_t>
constexpr int kTileCols = 2 * vec::Vectorized<acc_t>::size();

// A packed block of B (kBlockK x kTileCols) fits the first-level cache. The
// block lengths must not depend on M, see the top of this file.
constexpr int64_t kBlockK = 256;
constexpr int64_t kBlockRows = 240;
constexpr int64_t kTilesPerTask = 2;

// Elements of an elementwise loop that are worth another thread.
constexpr int64_t kMinWork = 32768;

// Read-only matrix of any strides.
template <typename scalar_t>
struct MatrixView {
  const scalar_t* data;
  int64_t row_stride;
  int64_t col_stride;
};

// dst (rows of B, kTileCols) <- B[k0 : k0 + depth, n0 : n0 + cols],
// zero-padded.
template <typename acc_t, typename scalar_t>
void pack_tile(
    const MatrixView<scalar_t>& b,
    int64_t k0,
    int64_t depth,
    int64_t n0,
    int64_t cols,
    acc_t* dst) {
  constexpr int64_t width = kTileCols<acc_t>;
  const scalar_t* src = b.data + k0 * b.row_stride + n0 * b.col_stride;
  if (cols < width) {
    std::fill_n(dst, depth * width, acc_t(0));
  }
  if (b.col_stride == 1) {
    for (int64_t k = 0; k < depth; ++k) {
      load_row(src + k * b.row_stride, dst + k * width, cols);
    }
    return;
  }
  // A column of B is a line of storage in the usual case, a weight (N, K).
  constexpr int64_t length = 64;
  acc_t lines[width * length];
  for (int64_t k = 0; k < depth; k += length) {
    const int64_t count = std::min(length, depth - k);
    for (int64_t n = 0; n < cols; ++n) {
      const scalar_t* column = src + k * b.row_stride + n * b.col_stride;
      if (b.row_stride == 1) {
        load_row(column, lines + n * length, count);
        continue;
      }
      for (int64_t i = 0; i < count; ++i) {
        lines[n * length + i] = static_cast<acc_t>(column[i * b.row_stride]);
      }
    }
    vec::transpose_mxn<acc_t>(
        lines,
        length,
        dst + k * width,
        width,
        static_cast<int>(cols),
        static_cast<int>(count));
  }
}

// c (rows, kTileCols) = [c +] a (rows, depth) * tile (depth, kTileCols). What c
// holds is added last: sums of sums round less than one long sum.
template <int rows, typename acc_t>
inline void multiply_tile(
    int64_t depth,
    const MatrixView<acc_t>& a,
    const acc_t* tile,
    acc_t* c,
    int64_t c_stride,
    bool accumulate) {
  using Vec = vec::Vectorized<acc_t>;
  constexpr int lanes = Vec::size();
  Vec sum[rows][2];
  c10::ForcedUnroll<rows>{}([&](auto i) {
    sum[i][0] = Vec(0);
    sum[i][1] = Vec(0);
  });
  for (int64_t k = 0; k < depth; ++k) {
    const Vec b0 = Vec::loadu(tile + k * 2 * lanes);
    const Vec b1 = Vec::loadu(tile + k * 2 * lanes + lanes);
    const acc_t* a_column = a.data + k * a.col_stride;
    c10::ForcedUnroll<rows>{}([&](auto i) {
      const Vec element(a_column[i * a.row_stride]);
      sum[i][0] = vec::fmadd(element, b0, sum[i][0]);
      sum[i][1] = vec::fmadd(element, b1, sum[i][1]);
    });
  }
  c10::ForcedUnroll<rows>{}([&](auto i) {
    acc_t* out = c + i * c_stride;
    if (accumulate) {
      sum[i][0] = Vec::loadu(out) + sum[i][0];
      sum[i][1] = Vec::loadu(out + lanes) + sum[i][1];
    }
    sum[i][0].store(out);
    sum[i][1].store(out + lanes);
  });
}

template <int max_rows, typename acc_t>
inline void multiply_tile_of(
    int64_t rows,
    int64_t depth,
    const MatrixView<acc_t>& a,
    const acc_t* tile,
    acc_t* c,
    int64_t c_stride,
    bool accumulate) {
  if constexpr (max_rows > 1) {
    if (rows < max_rows) {
      multiply_tile_of<max_rows - 1>(
          rows, depth, a, tile, c, c_stride, accumulate);
      return;
    }
  }
  multiply_tile<max_rows>(depth, a, tile, c, c_stride, accumulate);
}

// One packed tile against `rows` rows of A. The last columns of C may be fewer
// than a tile: those go through a tile-wide copy.
template <typename acc_t>
void multiply_rows(
    int64_t rows,
    int64_t depth,
    int64_t cols,
    const MatrixView<acc_t>& a,
    const acc_t* tile,
    acc_t* c,
    int64_t c_stride,
    bool accumulate) {
  constexpr int64_t width = kTileCols<acc_t>;
  acc_t edge[kTileRows * width];
  for (int64_t m = 0; m < rows; m += kTileRows) {
    const int64_t tile_rows = std::min<int64_t>(kTileRows, rows - m);
    const MatrixView<acc_t> a_rows{
        a.data + m * a.row_stride, a.row_stride, a.col_stride};
    acc_t* c_rows = c + m * c_stride;
    if (cols == width) {
      multiply_tile_of<kTileRows>(
          tile_rows, depth, a_rows, tile, c_rows, c_stride, accumulate);
      continue;
    }
    for (int64_t i = 0; i < tile_rows; ++i) {
      if (accumulate) {
        std::copy_n(c_rows + i * c_stride, cols, edge + i * width);
        std::fill_n(edge + i * width + cols, width - cols, acc_t(0));
      }
    }
    multiply_tile_of<kTileRows>(
        tile_rows, depth, a_rows, tile, edge, width, accumulate);
    for (int64_t i = 0; i < tile_rows; ++i) {
      std::copy_n(edge + i * width, cols, c_rows + i * c_stride);
    }
  }
}

// c (M, N; row-major) = [c +] a (M, K) * b (K, N), in parallel over tiles of c.
template <typename acc_t, typename scalar_t>
void gemm(
    int64_t M,
    int64_t N,
    int64_t K,
    const MatrixView<acc_t>& a,
    const MatrixView<scalar_t>& b,
    acc_t* c,
    int64_t c_stride,
    bool accumulate) {
  constexpr int64_t width = kTileCols<acc_t>;
  constexpr int64_t task_cols = kTilesPerTask * width;
  if (M == 0 || N == 0) {
    return;
  }
  if (K == 0) {
    for (int64_t m = 0; m < (accumulate ? 0 : M); ++m) {
      std::fill_n(c + m * c_stride, N, acc_t(0));
    }
    return;
  }
  const int64_t row_blocks = (M + kBlockRows - 1) / kBlockRows;
  const int64_t col_blocks = (N + task_cols - 1) / task_cols;
  const int64_t work_per_task =
      std::min(M, kBlockRows) * std::min(N, task_cols) * K;
  const int64_t grain = std::max<int64_t>(1, 16 * kMinWork / work_per_task);
  at::parallel_for(
      0, row_blocks * col_blocks, grain, [&](int64_t begin, int64_t end) {
        std::vector<acc_t> tile(std::min(K, kBlockK) * width);
        for (int64_t task = begin; task < end; ++task) {
          const int64_t m0 = task % row_blocks * kBlockRows;
          const int64_t rows = std::min(kBlockRows, M - m0);
          const int64_t n_begin = task / row_blocks * task_cols;
          const int64_t n_end = std::min(n_begin + task_cols, N);
          for (int64_t n0 = n_begin; n0 < n_end; n0 += width) {
            const int64_t cols = std::min(width, n_end - n0);
            for (int64_t k0 = 0; k0 < K; k0 += kBlockK) {
              const int64_t depth = std::min(kBlockK, K - k0);
              pack_tile(b, k0, depth, n0, cols, tile.data());
              multiply_rows<acc_t>(
                  rows,
                  depth,
                  cols,
                  {a.data + m0 * a.row_stride + k0 * a.col_stride,
                   a.row_stride,
                   a.col_stride},
                  tile.data(),
                  c + m0 * c_stride + n0,
                  c_stride,
                  accumulate || k0 > 0);
            }
          }
        }
      });
}

} // namespace moe_cpu
} // namespace CPU_CAPABILITY
} // namespace at::native
