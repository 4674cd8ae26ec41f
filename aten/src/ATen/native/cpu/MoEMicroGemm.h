#pragma once

// The micro-GEMMs of _moe_mlp: c (m, n) = [c +] a (m, k) b (k, n) in the accumulation
// type, for n <= kPanelCols and b packed by pack_panel. A micro-GEMM has
//   operand_t    type of its operands
//   kTileCols    columns of a tile of a packed panel
//   kDepth       largest K of one product
//   kMinDepth    smallest K of one product; a larger one may be cut into multiples of it
//   kTileRows    blocks of rows are multiples of it
//   kDenseRows   whether rows of a must have equal distances, and the last kTileRows be readable
//   Session      state of a thread while it multiplies
//   Prefetch     fetches the next panel: multiply() calls it after every few rows, and with
//                kFetchesWithin its after_word() after each word of K
// and, as those of MoEMicroGemmX86.h, may have
//   transpose(), pack_dense()  parts of the packing
//   round()                    how results become bfloat16
//   multiply_stored()          a product with weights as they are stored
//   kept_sums()                how many sums its scratch should hold
//   multiply_runs(), kFewRows  products of few rows with panels side by side
//   spreads_rows(), kRowGap    whether many rows are copied, with a gap in between
//   packs_rows(), pack_rows()  whether rows are packed for multiply_stored(), kPackedRows at a time
//   needs_whole_rows()         whether the rows of a block must have all of K then
// An element is summed over ascending k, in an order independent of the number of
// rows and threads.

#include <ATen/native/cpu/MoEPacking.h>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

// Rows of a left operand: row i begins at lines[i] + offset. ld is their distance if it
// is the same for all.
template <typename operand_t>
struct RowLines {
  const operand_t* const* lines;
  int64_t ld;
  int64_t offset;
};

// The result of a product: [c +] a b with leading dimension kPanelCols. If `scales` is not null, each
// column of a b is multiplied by its scale first; only micro-GEMMs with kSumDepth can, for K up to it.
template <typename acc_t>
struct ProductTile {
  acc_t* c;
  bool accumulate;
  const acc_t* scales = nullptr;
};

struct NoPrefetch {
  explicit NoPrefetch(const auto&...) {}
  void operator()() const {}
};

// fn(std::integral_constant<int64_t, n>()), for n from 1 to `most`.
template <int64_t most, typename Fn>
void with_constant(int64_t n, const Fn& fn) {
  if constexpr (most > 1) {
    if (n < most) {
      return with_constant<most - 1>(n, fn);
    }
  }
  fn(std::integral_constant<int64_t, most>());
}

// ---- products in vector registers ----------------------------------------------

// sums[i][j] += a[i][k] * b[j], for one word of K.
struct FusedMultiplyAdd {
  template <typename operand_t, int64_t rows, int64_t vectors>
  C10_ALWAYS_INLINE static void
  add(const operand_t* const (&a)[rows], int64_t k,
      const vec::Vectorized<operand_t> (&b)[vectors],
      vec::Vectorized<operand_t> (&sums)[rows][vectors]) {
    MOE_UNROLL
    for (int64_t i = 0; i < rows; ++i) {
      const vec::Vectorized<operand_t> left(a[i][k]);
      MOE_UNROLL
      for (int64_t j = 0; j < vectors; ++j) {
        sums[i][j] = vec::fmadd(left, b[j], sums[i][j]);
      }
    }
  }
};

template <typename operand, typename Products = FusedMultiplyAdd>
struct VecGemm : Products {
  using operand_t = operand;
  using acc_t = acc_type<operand_t>;
  using Vec = vec::Vectorized<acc_t>;
  using Prefetch = NoPrefetch;
  struct Session {};

  // Vectors of a row of a tile. The sums of kTileRows rows fill the registers; CPUs with
  // 64-byte registers have twice as many.
  static constexpr int64_t kVectors = sizeof(Vec) == 64 ? 4 : 2;
  static constexpr int64_t kTileRows = 6;
  static constexpr int64_t kTileCols = kVectors * Vec::size();
  static constexpr int64_t kMinDepth = 256;
  static constexpr int64_t kDepth = std::is_same_v<operand_t, BFloat16> ? 512 : kMinDepth;
  // Floats are summed in parts of 128 products, which round less than one long sum. bfloat16
  // does not need this, and loads and stores its sums less often.
  static constexpr bool kOneSum = std::is_same_v<operand_t, BFloat16>;
  static constexpr int64_t kSumDepth = kOneSum ? kDepth : 128;
  static constexpr bool kDenseRows = false;
  static constexpr bool kFetchesWithin = true;
  static_assert(kPanelCols % kTileCols == 0);

  template <typename Fn>
  static void multiply(
      int64_t m, int64_t n, int64_t k, const RowLines<operand_t>& a, const operand_t* b,
      const ProductTile<acc_t>& out, Fn&& between) {
    if constexpr (requires { between.after_word(); }) {
      if (between.is_within()) {
        return multiply_rows(m, n, k, a, b, out, NoPrefetch(), [&]() { between.after_word(); });
      }
    }
    multiply_rows(m, n, k, a, b, out, between, NoPrefetch());
  }

 private:
  template <typename Fn, typename WordFn>
  C10_ALWAYS_INLINE static void multiply_rows(
      int64_t m, int64_t n, int64_t k, const RowLines<operand_t>& a, const operand_t* b,
      const ProductTile<acc_t>& out, Fn&& between, const WordFn& after_word) {
    const int64_t tiles = ceil_div(n, kTileCols);
    const int64_t whole = m / kTileRows * kTileRows;
    for (const auto tile : c10::irange(tiles)) {
      for (int64_t row = 0; row < m; row += kTileRows) {
        if (row < whole) {
          multiply_block<kTileRows, 1>(row, tile, k, a, b, out, after_word);
        }
        between();
      }
    }
    // The last rows. Very few rows are multiplied by several tiles at a time: a sum waits for its
    // own last product, so other products must come between.
    if (whole < m) {
      with_constant<kTileRows - 1>(m - whole, [&](auto rows) {
        constexpr int64_t at_once =
            std::min<int64_t>(rows == 1 ? 4 : rows <= 3 ? 2 : 1, kPanelCols / kTileCols);
        int64_t tile = 0;
        for (; tile + at_once <= tiles; tile += at_once) {
          multiply_block<rows, at_once>(whole, tile, k, a, b, out, after_word);
        }
        for (; tile < tiles; ++tile) {
          multiply_block<rows, 1>(whole, tile, k, a, b, out, after_word);
        }
      });
    }
  }

  // Not inlined: values of a larger function would take its registers.
  template <int64_t rows, int64_t tiles, typename WordFn>
  C10_NOINLINE static void multiply_block(
      int64_t row, int64_t tile, int64_t depth, const RowLines<operand_t>& in,
      const operand_t* panel, const ProductTile<acc_t>& out, const WordFn& after_word) {
    constexpr int64_t v = kWordElements<operand_t>;
    constexpr int64_t vectors = tiles * kVectors;
    const operand_t* a[rows];
    const operand_t* b[vectors];
    acc_t* c = out.c + row * kPanelCols + tile * kTileCols;
    MOE_UNROLL
    for (int64_t i = 0; i < rows; ++i) {
      a[i] = in.lines[row + i] + in.offset;
    }
    MOE_UNROLL
    for (int64_t j = 0; j < vectors; ++j) {
      b[j] = panel + (tile + j / kVectors) * kTileCols * round_up(depth, v) +
             j % kVectors * Vec::size() * v;
    }
    bool accumulate = out.accumulate;
    for (int64_t begin = 0; begin < depth || begin == 0; begin += kSumDepth) {
      Vec sums[rows][vectors];
      MOE_UNROLL
      for (int64_t i = 0; i < rows; ++i) {
        MOE_UNROLL
        for (int64_t j = 0; j < vectors; ++j) {
          const acc_t* from = c + i * kPanelCols + j * Vec::size();
          sums[i][j] =
              kOneSum && accumulate && out.scales == nullptr ? Vec::loadu(from) : Vec(0);
        }
      }
      for (int64_t k = begin; k < std::min(begin + kSumDepth, depth); k += v) {
        Vec words[vectors];
        MOE_UNROLL
        for (int64_t j = 0; j < vectors; ++j) {
          words[j] = Vec::loadu(b[j]);
          b[j] += kTileCols * v;
        }
        Products::add(a, k, words, sums);
        after_word();
      }
      MOE_UNROLL
      for (int64_t i = 0; i < rows; ++i) {
        MOE_UNROLL
        for (int64_t j = 0; j < vectors; ++j) {
          acc_t* to = c + i * kPanelCols + j * Vec::size();
          Vec sum = sums[i][j];
          if (out.scales != nullptr) {
            const acc_t* scales = out.scales + tile * kTileCols + j * Vec::size();
            sum = vec::fmadd(
                sum, Vec::loadu(scales), accumulate ? Vec::loadu(to) : Vec(0));
          } else if (!kOneSum && accumulate) {
            sum = Vec::loadu(to) + sum;
          }
          sum.store(to);
        }
      }
      accumulate = true;
    }
  }
};

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native
