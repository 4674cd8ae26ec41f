#pragma once

// bfloat16 products of _moe_mlp on the AMX tiles of a CPU. cpublas::brgemm
// generates a kernel per shape and loads it in every call. Here a product is a sequence of
// 32 x 32 blocks, with the left operand of a step in L1, and any number of rows costs only
// what it computes. TileGemm multiplies weights along K where they lie.

#include <ATen/native/cpu/MoEPackingX86.h>

#if defined(CPU_CAPABILITY_AVX512) && defined(__x86_64__) && defined(__linux__) && \
    (defined(__clang__) || __GNUC__ >= 11)
#define MOE_HAS_AMX
#include <immintrin.h>
// The files of this capability are compiled for AVX512; only these functions may
// use tile instructions.
#define MOE_AMX_TARGET __attribute__((target("amx-tile,amx-bf16,amx-int8")))

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

// Rounds two vectors of floats to one of bfloat16, and denormals to 0, as products do.
struct NativeRounding {
  C10_ALWAYS_INLINE static vec::Vectorized<BFloat16>
  round(const vec::Vectorized<float>& low, const vec::Vectorized<float>& high) {
    __m512i rounded;
    asm("vcvtne2ps2bf16 %2, %1, %0"
        : "=v"(rounded)
        : "v"(static_cast<__m512>(high)), "v"(static_cast<__m512>(low)));
    return rounded;
  }
};

class AmxGemm : public NativeRounding {
 protected:
  // Rows (and columns of floats, and pairs of bfloat16) of a tile.
  static constexpr int64_t kTile = 16;
  static constexpr int64_t kBlock = 2 * kTile;
  // Depth of a step along K: 32 rows of the left operand are 32 KiB then.
  static constexpr int64_t kStep = 512;

 public:
  using operand_t = BFloat16;

  static constexpr int64_t kTileRows = kBlock;
  static constexpr int64_t kTileCols = kPanelCols;
  static constexpr int64_t kDepth = 1024;
  static constexpr int64_t kMinDepth = kDepth;
  static constexpr bool kDenseRows = true;
  static constexpr bool kFetchesWithin = false;

  // The tiles of a thread between the first product and the last one.
  struct Session {
    MOE_AMX_TARGET Session() {
      configure(kBlock, kBlock);
    }
    MOE_AMX_TARGET ~Session() {
      _tile_release();
    }
    C10_DISABLE_COPY_AND_ASSIGN(Session);
  };

  template <typename Fn>
  MOE_AMX_TARGET static void multiply(
      int64_t m, int64_t n, int64_t k, const RowLines<BFloat16>& a, const BFloat16* b,
      const ProductTile<float>& out, Fn&& between) {
    const int64_t whole = k / kBlock * kBlock;
    for (int64_t row = 0; row < m; row += kBlock) {
      const int64_t rows = std::min(kBlock, m - row);
      const auto block = rows > kTile ? &multiply_block<true> : &multiply_block<false>;
      for (int64_t k0 = 0, depth = 0; k0 < k; k0 += depth) {
        depth = k0 < whole ? std::min(kStep, whole - k0) : k - whole;
        if (k0 == whole || (k0 == 0 && rows < kBlock)) {
          configure(rows, std::min(depth, kBlock));
        }
        for (int64_t j = 0; j < n; j += kBlock) {
          block(
              a.lines[row] + a.offset + k0, a.ld, b + k0 * kPanelCols + 2 * j, depth,
              {out.c + row * kPanelCols + j, out.accumulate || k0 > 0}, nullptr);
        }
      }
      if (rows < kBlock || whole < k) {
        configure(kBlock, kBlock);
      }
      between();
    }
  }

  // Adds the product of 32 rows of int8, `pitch` bytes apart, and of 32 columns of bytes to integers. A row
  // of b has four rows of the right operand, with the columns side by side. The sums of columns 16 to 31
  // are at c_right.
  static void multiply_bytes(
      int64_t depth, const int8_t* a, int64_t pitch, const uint8_t* b, float* c, float* c_right) {
    const int64_t whole = depth / (2 * kBlock) * (2 * kBlock);
    multiply_whole_bytes(whole, a, pitch, b, c, c_right);
    if (whole < depth) {
      configure(kBlock, (depth - whole) / 2);
      multiply_whole_bytes(depth - whole, a + whole, pitch, b + whole * kBlock, c, c_right);
      configure(kBlock, kBlock);
    }
  }

 protected:
  // The operand of LDTILECFG for blocks of `rows` rows and steps of that depth, at most
  // 32 each. Tiles 0 to 3 are a block of C, 4 and 5 rows of A, 6 and 7 columns of B. The
  // last half of C and A may have fewer rows.
  struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  };

  MOE_AMX_TARGET static void configure(int64_t block_rows, int64_t depth) {
    TileConfig config;
    const int64_t upper = std::min(block_rows, kTile);
    const int64_t lower = block_rows > kTile ? block_rows - kTile : kTile;
    const int64_t pairs = (depth + 1) / 2;
    int64_t rows[] = {upper, upper, lower, lower, upper, lower, pairs, pairs};
    std::copy_n(rows, 8, config.rows);
    config.row_bytes[4] = config.row_bytes[5] = static_cast<uint16_t>(4 * pairs);
    // The compiler assumes that the instruction reads only eight bytes of its operand, and may
    // drop stores to the others.
    asm volatile("" : : "m"(config));
    _tile_loadconfig(&config);
  }

  // 32 columns and up to 32 rows of C; with_lower: more than 16 rows. Rows of B and C have `cols` words.
  // Fetches the rows of A from `next` on, unless it is null.
  template <bool with_lower, int64_t cols = kPanelCols>
  MOE_AMX_TARGET static void multiply_block(
      const BFloat16* a, int64_t ld_a, const BFloat16* b, int64_t depth,
      const ProductTile<float>& out, const BFloat16* next) {
    constexpr int64_t ld = 4 * cols;  // in bytes
    float* c_lower = out.c + kTile * cols;
    if (out.accumulate) {
      _tile_loadd(0, out.c, ld);
      _tile_loadd(1, out.c + kTile, ld);
      if constexpr (with_lower) {
        _tile_loadd(2, c_lower, ld);
        _tile_loadd(3, c_lower + kTile, ld);
      }
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += kBlock) {
      for (int64_t i = 0; next != nullptr && i < (with_lower ? kBlock : kTile); ++i) {
        prefetch(next + i * ld_a + k);
      }
      _tile_loadd(4, a + k, 2 * ld_a);
      _tile_loadd(6, b + k * cols, ld);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + k * cols + kBlock, ld);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (with_lower) {
        _tile_loadd(5, a + kTile * ld_a + k, 2 * ld_a);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, out.c, ld);
    _tile_stored(1, out.c + kTile, ld);
    if constexpr (with_lower) {
      _tile_stored(2, c_lower, ld);
      _tile_stored(3, c_lower + kTile, ld);
    }
  }

  // The same for steps of the depth of the tiles.
  MOE_AMX_TARGET static void multiply_whole_bytes(
      int64_t depth, const int8_t* a, int64_t pitch, const uint8_t* b, float* c, float* c_right) {
    constexpr int64_t ld = 4 * kPanelCols, width = 4 * kBlock;
    _tile_loadd(0, c, ld);
    _tile_loadd(1, c_right, ld);
    _tile_loadd(2, c + kTile * kPanelCols, ld);
    _tile_loadd(3, c_right + kTile * kPanelCols, ld);
    for (int64_t k = 0; k < depth; k += 2 * kBlock, b += kTile * width) {
      _tile_loadd(4, a + k, pitch);
      _tile_loadd(6, b, width);
      _tile_dpbsud(0, 4, 6);
      _tile_loadd(7, b + 4 * kTile, width);
      _tile_dpbsud(1, 4, 7);
      _tile_loadd(5, a + kTile * pitch + k, pitch);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, c, ld);
    _tile_stored(1, c_right, ld);
    _tile_stored(2, c + kTile * kPanelCols, ld);
    _tile_stored(3, c_right + kTile * kPanelCols, ld);
  }
};

// Multiplies weights that lie along K as they are stored: 32 of their lines are the left operand, and 32
// rows of a block, which are packed once, the right one. Products are added in the order of AmxGemm, so a
// row has the same bits.
struct TileGemm : FastGemm<AmxGemm> {
  // Whether the rows of a block are packed with pack_rows(). An odd K would need the elements after a line.
  static bool packs_rows(const WeightSource<BFloat16>& weights) {
    return weights.part_depth % 2 == 0 && weights.is_along_k();
  }

  static constexpr int64_t kPackedRows = kTileRows;

  // Packs that many rows, null for zeros, as the columns of a panel of that many.
  static void pack_rows(const BFloat16* const* rows, int64_t depth, BFloat16* to) {
    for (int64_t i = 0; i < kBlock; i += kTile) {
      for (int64_t k = 0; k < depth; k += kBlock) {
        const int64_t pairs = std::min(kTile, (depth - k) / 2);
        const auto mask = static_cast<__mmask16>((1 << pairs) - 1);
        transpose_words(
            [&](int64_t j) {
              const BFloat16* row = rows[i + j];
              return row == nullptr
                  ? _mm512_setzero_ps()
                  : _mm512_castsi512_ps(_mm512_maskz_loadu_epi32(mask, row + k));
            },
            [&](int64_t pair, __m512 x) {
              if (pair < pairs) {
                _mm512_storeu_ps(to + (k / 2 + pair) * 2 * kBlock + 2 * i, x);
              }
            });
      }
    }
  }

  // See ThinGemm.
  static bool multiply_stored(
      const WeightSource<BFloat16>& weights, const Block& block, const PanelColumns& columns,
      const Panel& next, const BFloat16* const* rows, std::span<float> /*scratch*/, float* c) {
    if (!packs_rows(weights)) {
      return false;
    }
    for (const auto i : c10::irange(2)) {
      for (int64_t first = 0; first < columns.spans[i].count; first += kBlock) {
        multiply_lines(
            weights, block, columns.spans[i], first, next.expert, next.columns.spans[i], rows, c);
      }
    }
    return true;
  }

 private:
  // The lines of a span from `first` on. Few rows fetch those that are read next: the lines that follow,
  // or the first ones of the next panel.
  MOE_AMX_TARGET static void multiply_lines(
      const WeightSource<BFloat16>& weights, const Block& block, const PanelSpan& span,
      int64_t first, int64_t next_expert, const PanelSpan& next_span, const BFloat16* const* rows,
      float* c) {
    const bool is_last = first + kBlock >= span.count;
    const int64_t depth = weights.part_depth, whole = depth / kBlock * kBlock;
    const int64_t lines = std::min(kBlock, span.count - first);
    const bool has_tails = lines < kBlock || whole < depth;
    const auto multiply =
        lines > kTile ? &multiply_block<true, kBlock> : &multiply_block<false, kBlock>;
    alignas(64) float sums[kBlock * kBlock];
    for (int64_t row = 0; row < block.rows(); row += kBlock) {
      for (const auto part : c10::irange(weights.k_parts)) {
        const auto w = weights.view(block.expert, span, part, 0);
        const BFloat16* from = w.data + first * w.n_stride;
        const BFloat16* next = is_last ? weights.view(next_expert, next_span, part, 0).data
                                       : from + kBlock * w.n_stride;
        const BFloat16* x = rows[row] + part * depth * kBlock;
        for (int64_t k = 0, count = 0; k < depth; k += count) {
          count = k < whole ? whole : depth - whole;
          if (has_tails) {
            configure(lines, std::min(count, kBlock));
          }
          multiply(
              from + k, w.n_stride, x + k * kBlock, count, {sums, part + k > 0},
              block.rows() <= kBlock ? next + k : nullptr);
        }
      }
      for (int64_t i = 0; i < lines; i += kTile) {
        for (int64_t j = 0; j < std::min(kBlock, block.rows() - row); j += kTile) {
          float* to = c + (row + j) * kPanelCols + span.at + first + i;
          transpose_words(
              [&](int64_t line) { return _mm512_load_ps(sums + (i + line) * kBlock + j); },
              [&](int64_t at, __m512 x) { _mm512_storeu_ps(to + at * kPanelCols, x); });
        }
      }
    }
    if (has_tails) {
      configure(kBlock, kBlock);
    }
  }
};

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native

#endif
