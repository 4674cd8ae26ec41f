#pragma once

// The tile instructions of AMX in AVX512, for run.py: MoEAmx.h includes this in place of the target of
// its functions. A tile without a configuration, or sizes that do not fit each other, end the process with
// a message; a CPU raises an invalid opcode. Sums are rounded after each product, and denormals are 0, as
// in Intel's description of TDPBF16PS.

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace amx_emulation {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Tile {
  alignas(64) uint8_t data[kRows][kRowBytes];
  int rows;
  int row_bytes;
};

inline thread_local Tile tiles[kTiles];

inline void require(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "AMX: %s\n", what);
    std::abort();
  }
}

inline Tile& configured(int i) {
  require(tiles[i].rows > 0 && tiles[i].row_bytes > 0, "the tile is not configured");
  return tiles[i];
}

inline void release() {
  std::memset(tiles, 0, sizeof(tiles));
}

inline void load_config(const void* operand) {
  uint8_t bytes[64];
  std::memcpy(bytes, operand, sizeof(bytes));
  require(bytes[0] == 1 && bytes[1] == 0, "palette or start_row");
  release();
  for (int i = 0; i < 16; ++i) {
    const int row_bytes = bytes[16 + 2 * i] + 256 * bytes[17 + 2 * i], rows = bytes[48 + i];
    require(i < 2 || i >= 16 || bytes[i] == 0, "reserved bytes");
    require((rows == 0) == (row_bytes == 0), "rows without bytes, or bytes without rows");
    require(rows <= (i < kTiles ? kRows : 0) && row_bytes <= kRowBytes, "too large a tile");
    if (i < kTiles) {
      tiles[i].rows = rows;
      tiles[i].row_bytes = row_bytes;
    }
  }
}

inline void zero(int i) {
  std::memset(configured(i).data, 0, sizeof(Tile::data));
}

inline void load(int i, const void* from, int64_t stride) {
  zero(i);
  for (int row = 0; row < tiles[i].rows; ++row) {
    std::memcpy(
        tiles[i].data[row], static_cast<const char*>(from) + row * stride, tiles[i].row_bytes);
  }
}

inline void store(int i, void* to, int64_t stride) {
  const Tile& tile = configured(i);
  for (int row = 0; row < tile.rows; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, tile.data[row], tile.row_bytes);
  }
}

inline __m512 without_denormals(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), sign = _mm512_set1_epi32(INT32_MIN);
  const __mmask16 small = _mm512_cmplt_epu32_mask(
      _mm512_andnot_si512(sign, bits), _mm512_set1_epi32(0x00800000));
  return _mm512_castsi512_ps(_mm512_mask_and_epi32(bits, small, bits, sign));
}

// The lower or the upper bfloat16 of each word.
inline __m512 floats_of(__m512i words, bool upper) {
  return without_denormals(_mm512_castsi512_ps(
      upper ? _mm512_and_si512(words, _mm512_set1_epi32(-65536)) : _mm512_slli_epi32(words, 16)));
}

inline void require_sizes(int to, int left, int right) {
  const Tile &c = configured(to), &a = configured(left), &b = configured(right);
  require(c.rows == a.rows && c.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows, "sizes");
  require(to != left && to != right && left != right, "a tile twice");
}

inline void add_products(int to, int left, int right) {
  require_sizes(to, left, right);
  Tile &c = tiles[to], &a = tiles[left], &b = tiles[right];
  const auto columns = static_cast<__mmask16>((1 << c.row_bytes / 4) - 1);
  for (int row = 0; row < c.rows; ++row) {
    __m512 sum = _mm512_load_ps(c.data[row]);
    for (int pair = 0; pair < b.rows; ++pair) {
      int32_t word;
      std::memcpy(&word, a.data[row] + 4 * pair, 4);
      for (const bool upper : {false, true}) {
        const __m512 x = floats_of(_mm512_set1_epi32(word), upper);
        const __m512 y = floats_of(_mm512_load_si512(b.data[pair]), upper);
        sum = without_denormals(_mm512_fmadd_ps(x, y, sum));
      }
    }
    _mm512_mask_store_ps(c.data[row], columns, sum);
  }
}

// Signed bytes times bytes.
inline void add_byte_products(int to, int left, int right) {
  require_sizes(to, left, right);
  Tile &c = tiles[to], &a = tiles[left], &b = tiles[right];
  for (int row = 0; row < c.rows; ++row) {
    int32_t sums[kRowBytes / 4];
    std::memcpy(sums, c.data[row], sizeof(sums));
    for (int k = 0; k < 4 * b.rows; ++k) {
      const auto x = static_cast<int8_t>(a.data[row][k]);
      for (int i = 0; i < c.row_bytes / 4; ++i) {
        sums[i] += x * b.data[k / 4][4 * i + k % 4];
      }
    }
    std::memcpy(c.data[row], sums, c.row_bytes);
  }
}

}  // namespace amx_emulation

#define MOE_AMX_TARGET
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig amx_emulation::load_config
#define _tile_release amx_emulation::release
#define _tile_zero amx_emulation::zero
#define _tile_loadd amx_emulation::load
#define _tile_stored amx_emulation::store
#define _tile_dpbf16ps amx_emulation::add_products
#define _tile_dpbsud amx_emulation::add_byte_products
