#pragma once

// bfloat16 products on AMX tiles for _moe_mlp, where the CPU has them. cpublas::brgemm
// generates a kernel per shape and pays for loading it in every call; here a product is
// one 32 x 32 block after the other, with the left operand's share of a step in L1, and
// any number of rows costs what it computes.

#include <c10/util/BFloat16.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <array>
#include <cstring>

#if defined(CPU_CAPABILITY_AVX512) && defined(__x86_64__) && defined(__linux__) && \
    (defined(__clang__) || __GNUC__ >= 11)
#define MOE_HAS_AMX
#include <immintrin.h>
// The files of a capability are compiled for AVX512; only these functions may
// hold tile instructions.
#define MOE_AMX_TARGET __attribute__((target("amx-tile,amx-bf16")))
#endif

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_amx {

// Rows (and columns of floats, and pairs of bfloat16) of a tile.
constexpr int64_t kTile = 16;
constexpr int64_t kBlock = 2 * kTile;
// Depth of a step along K: 32 rows of the left operand are 32 KiB then.
constexpr int64_t kStep = 512;

#ifdef MOE_HAS_AMX

// The operand of LDTILECFG for blocks of so many rows, at most 32. Tiles 0 to 3 are
// a block of C, 4 and 5 rows of A, 6 and 7 columns of B. The lower half of C and A
// may have fewer rows, or the upper if there is no lower.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};

  constexpr explicit TileConfig(int64_t block_rows = kBlock) {
    const bool with_lower = block_rows > kTile;
    const auto upper = static_cast<uint8_t>(with_lower ? kTile : block_rows);
    const auto lower = static_cast<uint8_t>(with_lower ? block_rows - kTile : kTile);
    rows[0] = rows[1] = rows[4] = upper;
    rows[2] = rows[3] = rows[5] = lower;
    rows[6] = rows[7] = kTile;
  }
};

// Not from the stack: to the compiler the instruction reads the first eight bytes
// of its operand, and stores to the others may be dropped.
MOE_AMX_TARGET inline void configure(int64_t block_rows) {
  static const auto configs = [] {
    std::array<TileConfig, kBlock + 1> result;
    for (const auto rows : c10::irange(kBlock)) {
      result[rows] = TileConfig(rows);
    }
    return result;
  }();
  _tile_loadconfig(&configs[block_rows]);
}

// The tiles of a thread between the first product and the last one.
class Session {
 public:
  MOE_AMX_TARGET Session() {
    configure(kBlock);
  }
  MOE_AMX_TARGET ~Session() {
    _tile_release();
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

// A block of C, at most 32 x 32: with_lower and with_right say whether it has more
// than 16 rows and columns. Leading dimensions are bytes.
template <bool with_lower, bool with_right>
MOE_AMX_TARGET inline void multiply_block(
    const char* a, int64_t ld_a, const char* b, int64_t ld_b, char* c, int64_t ld_c, int64_t steps,
    bool accumulate) {
  char* c_lower = c + kTile * ld_c;
  if (accumulate) {
    _tile_loadd(0, c, ld_c);
    if constexpr (with_right) {
      _tile_loadd(1, c + 64, ld_c);
    }
    if constexpr (with_lower) {
      _tile_loadd(2, c_lower, ld_c);
    }
    if constexpr (with_lower && with_right) {
      _tile_loadd(3, c_lower + 64, ld_c);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const char* a_lower = a + kTile * ld_a;
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(4, a, ld_a);
    _tile_loadd(6, b, ld_b);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (with_right) {
      _tile_loadd(7, b + 64, ld_b);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (with_lower) {
      _tile_loadd(5, a_lower, ld_a);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (with_lower && with_right) {
      _tile_dpbf16ps(3, 5, 7);
    }
    a += 64;
    a_lower += 64;
    b += kTile * ld_b;
  }
  _tile_stored(0, c, ld_c);
  if constexpr (with_right) {
    _tile_stored(1, c + 64, ld_c);
  }
  if constexpr (with_lower) {
    _tile_stored(2, c_lower, ld_c);
  }
  if constexpr (with_lower && with_right) {
    _tile_stored(3, c_lower + 64, ld_c);
  }
}

// `rows` of C, at most 32, for n columns, a multiple of 16.
MOE_AMX_TARGET inline void multiply_rows(
    int64_t rows, int64_t n, const char* a, int64_t ld_a, const char* b, int64_t ld_b, char* c,
    int64_t ld_c, int64_t steps, bool accumulate) {
  for (int64_t j = 0; j < n; j += kBlock) {
    const char* bj = b + j * 4;
    char* cj = c + j * 4;
    const bool with_right = j + kTile < n;
    const auto multiply =
        rows > kTile ? (with_right ? multiply_block<true, true> : multiply_block<true, false>)
                     : (with_right ? multiply_block<false, true> : multiply_block<false, false>);
    multiply(a, ld_a, bj, ld_b, cj, ld_c, steps, accumulate);
  }
}

// The same for the last `depth` of K, less than the 32 that a tile has: both operands
// are copied next to zeros.
MOE_AMX_TARGET inline void multiply_tail(
    int64_t rows, int64_t n, int64_t depth, const BFloat16* a, int64_t ld_a, const BFloat16* b,
    int64_t ld_b, float* c, int64_t ld_c, bool accumulate) {
  alignas(64) BFloat16 left[kBlock * kBlock] = {};
  for (const auto i : c10::irange(rows)) {
    std::memcpy(left + i * kBlock, a + i * ld_a, depth * sizeof(BFloat16));
  }
  for (int64_t j = 0; j < n; j += kBlock) {
    const int64_t columns = std::min(kBlock, n - j);
    alignas(64) BFloat16 right[kBlock * 2 * kBlock] = {};
    for (const auto pair : c10::irange((depth + 1) / 2)) {
      std::memcpy(
          right + pair * 2 * kBlock, b + (pair * ld_b + j) * 2, columns * 2 * sizeof(BFloat16));
    }
    multiply_rows(
        rows, columns, reinterpret_cast<const char*>(left), 64,
        reinterpret_cast<const char*>(right), 4 * kBlock, reinterpret_cast<char*>(c + j), ld_c * 4,
        1, accumulate);
  }
}

// C (m, n) = A (m, k) B [+ C] with B packed as [ceil(k / 2)][ld_b][2], its last pair
// complete, and n a multiple of 16.
// The order of addition of an element of C depends on k alone. Needs a Session.
MOE_AMX_TARGET inline void multiply(
    int64_t m, int64_t n, int64_t k, int64_t ld_a, int64_t ld_b, int64_t ld_c, bool accumulate,
    const BFloat16* a, const BFloat16* b, float* c) {
  const int64_t whole = k / kBlock * kBlock;
  for (int64_t m0 = 0; m0 < m; m0 += kBlock) {
    const int64_t rows = std::min(kBlock, m - m0);
    const BFloat16* am = a + m0 * ld_a;
    float* cm = c + m0 * ld_c;
    if (rows < kBlock) {
      configure(rows);
    }
    for (int64_t k0 = 0; k0 < whole; k0 += kStep) {
      multiply_rows(
          rows, n, reinterpret_cast<const char*>(am + k0), ld_a * 2,
          reinterpret_cast<const char*>(b + k0 * ld_b), ld_b * 4, reinterpret_cast<char*>(cm),
          ld_c * 4, std::min(kStep, whole - k0) / kBlock, accumulate || k0 > 0);
    }
    if (whole < k) {
      multiply_tail(
          rows, n, k - whole, am + whole, ld_a, b + whole * ld_b, ld_b, cm, ld_c,
          accumulate || whole > 0);
    }
    if (rows < kBlock) {
      configure(kBlock);
    }
  }
}

#endif

}  // namespace moe_amx
}  // namespace CPU_CAPABILITY
}  // namespace at::native
