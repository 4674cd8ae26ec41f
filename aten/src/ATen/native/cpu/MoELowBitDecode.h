#pragma once

// How 16 lines of a matrix of few bits become registers of bfloat16 words, and their scales
// floats: see MoELowBitAvx512.h, which includes this between its pragmas.

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {
namespace low_bit {

constexpr int kBias = 118;
constexpr int64_t kStretch = 16;  // double words of a line that are read at a time: 64 bytes
constexpr int64_t kAhead = 4096;  // bytes that panels are fetched ahead

// ---- tables ------------------------------------------------------------------------

inline uint16_t bits_of(float value) {
  return c10::BFloat16(value).x;
}

struct Tables {
  alignas(64) uint8_t e4m3[2][128], biased[2][128], int8[3][128], e2m1[64], int4[64];

  Tables() {
    const auto& e4 = values_of(LowBitCodes::E4M3);
    const auto both = [](uint8_t (&table)[2][128], int i, uint16_t bits) {
      table[0][i] = static_cast<uint8_t>(bits);
      table[1][i] = static_cast<uint8_t>(bits >> 8);
    };
    for (int i = 0; i < 128; ++i) {
      both(e4m3, i, bits_of(e4[i]));
      // NaN alone has the highest bit.
      both(biased, i, i == 127 ? 0xffff : bits_of(std::ldexp(e4[i], kBias)));
      // By magnitude: low byte, high byte of i, and of -i, where 0 is -128.
      int8[0][i] = static_cast<uint8_t>(bits_of(static_cast<float>(i)));
      int8[1][i] = static_cast<uint8_t>(bits_of(static_cast<float>(i)) >> 8);
      int8[2][i] =
          static_cast<uint8_t>(bits_of(static_cast<float>(i == 0 ? -128 : -i)) >> 8);
    }
    const auto by_byte = [](uint8_t (&table)[64], LowBitCodes codes) {
      for (int i = 0; i < 64; ++i) {
        const uint16_t bits = bits_of(values_of(codes)[i & 15]);
        table[i] = static_cast<uint8_t>((i & 16) != 0 ? bits >> 8 : bits);
      }
    };
    by_byte(e2m1, LowBitCodes::E2M1);
    by_byte(int4, LowBitCodes::Int4);
  }
};

inline const Tables& tables() {
  static const Tables t;
  return t;
}

// ---- decoding: 16 double words (of a line each, see read_lines) into words of bfloat16 --

struct E4M3 {
  static constexpr int64_t kBits = 8;
  const __m512i low0, low1, high0, high1, sign;
  explicit E4M3(const uint8_t (&table)[2][128] = tables().e4m3)
      : low0(_mm512_load_si512(table[0])), low1(_mm512_load_si512(table[0] + 64)),
        high0(_mm512_load_si512(table[1])), high1(_mm512_load_si512(table[1] + 64)),
        sign(_mm512_set1_epi8(static_cast<char>(0x80))) {}

  C10_ALWAYS_INLINE void decode(__m512i v, __m512i, __m512i (&words)[2]) {
    const __m512i low = _mm512_permutex2var_epi8(low0, v, low1);
    const __m512i high = _mm512_ternarylogic_epi32(
        _mm512_permutex2var_epi8(high0, v, high1), v, sign, 0xF8);  // a | (b & c)
    words[0] = _mm512_unpacklo_epi8(low, high);
    words[1] = _mm512_unpackhi_epi8(low, high);
  }
  bool is_rare() const {
    return false;
  }
};

struct FoldedE4M3 : E4M3 {
  __m512i seen = _mm512_setzero_si512();
  FoldedE4M3() : E4M3(tables().biased) {}

  // `minus` is what the exponents have too much.
  C10_ALWAYS_INLINE void decode(__m512i v, __m512i minus, __m512i (&words)[2]) {
    const __m512i low = _mm512_permutex2var_epi8(low0, v, low1);
    const __m512i high = _mm512_permutex2var_epi8(high0, v, high1);
    seen = _mm512_or_si512(seen, high);
    const __m512i signs = _mm512_set1_epi16(static_cast<short>(0x8000));
    words[0] = _mm512_ternarylogic_epi32(
        _mm512_subs_epu16(_mm512_unpacklo_epi8(low, high), minus), _mm512_unpacklo_epi8(v, v),
        signs, 0xF8);
    words[1] = _mm512_ternarylogic_epi32(
        _mm512_subs_epu16(_mm512_unpackhi_epi8(low, high), minus), _mm512_unpackhi_epi8(v, v),
        signs, 0xF8);
  }
  bool is_rare() const {
    return _mm512_movepi8_mask(seen) != 0;
  }
};

struct Int8 {
  static constexpr int64_t kBits = 8;
  const __m512i low0, low1, high0, high1, minus0, minus1;
  Int8()
      : low0(_mm512_load_si512(tables().int8[0])), low1(_mm512_load_si512(tables().int8[0] + 64)),
        high0(_mm512_load_si512(tables().int8[1])),
        high1(_mm512_load_si512(tables().int8[1] + 64)),
        minus0(_mm512_load_si512(tables().int8[2])),
        minus1(_mm512_load_si512(tables().int8[2] + 64)) {}

  C10_ALWAYS_INLINE void decode(__m512i v, __m512i, __m512i (&words)[2]) {
    const __m512i magnitude = _mm512_abs_epi8(v);
    const __m512i low = _mm512_permutex2var_epi8(low0, magnitude, low1);
    const __m512i high = _mm512_mask_blend_epi8(
        _mm512_movepi8_mask(v), _mm512_permutex2var_epi8(high0, magnitude, high1),
        _mm512_permutex2var_epi8(minus0, magnitude, minus1));
    words[0] = _mm512_unpacklo_epi8(low, high);
    words[1] = _mm512_unpackhi_epi8(low, high);
  }
  bool is_rare() const {
    return false;
  }
};

struct FourBits {
  static constexpr int64_t kBits = 4;
  const __m512i table, low_bits, second;
  __m512i shifts[4];
  explicit FourBits(const uint8_t (&bytes)[64])
      : table(_mm512_load_si512(bytes)), low_bits(_mm512_set1_epi8(15)),
        second(_mm512_set1_epi16(0x1000)) {
    for (int j = 0; j < 4; ++j) {
      // Of the 64 bits of two lines, from which bit on: byte i of four of a line.
      alignas(64) uint8_t from[64];
      for (int i = 0; i < 64; ++i) {
        from[i] = static_cast<uint8_t>((i & 4 ? 32 : 0) + 8 * j + (i & 2 ? 4 : 0));
      }
      shifts[j] = _mm512_load_si512(from);
    }
  }

  C10_ALWAYS_INLINE void decode(__m512i v, __m512i, __m512i (&words)[4]) {
    MOE_UNROLL
    for (int j = 0; j < 4; ++j) {
      const __m512i codes = _mm512_multishift_epi64_epi8(shifts[j], v);
      words[j] = _mm512_permutexvar_epi8(
          _mm512_ternarylogic_epi32(second, codes, low_bits, 0xF8), table);
    }
  }
  bool is_rare() const {
    return false;
  }
};
struct E2M1 : FourBits {
  E2M1() : FourBits(tables().e2m1) {}
};
struct Int4 : FourBits {
  Int4() : FourBits(tables().int4) {}
};

// ---- reading 16 lines -----------------------------------------------------------------

// 64 bytes of 16 lines, of which `bytes` are there, as 16 registers of 4 bytes of each.
template <bool whole>
C10_ALWAYS_INLINE void
transpose_lines(const uint8_t* p, int64_t pitch, int64_t bytes, __m512i (&out)[16]) {
  __m512i q[4][4];
  const auto load = [&](int i, int line) {
    const uint8_t* from = p + line * pitch + i * 16;
    if constexpr (whole) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    } else {
      const int64_t left = std::clamp<int64_t>(bytes - i * 16, 0, 16);
      return _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << left) - 1), from);
    }
  };
  MOE_UNROLL
  for (int j = 0; j < 4; ++j) {
    MOE_UNROLL
    for (int i = 0; i < 4; ++i) {
      q[i][j] = _mm512_castsi128_si512(load(i, j));
      q[i][j] = _mm512_inserti32x4(q[i][j], load(i, 4 + j), 1);
      q[i][j] = _mm512_inserti32x4(q[i][j], load(i, 8 + j), 2);
      q[i][j] = _mm512_inserti32x4(q[i][j], load(i, 12 + j), 3);
    }
  }
  MOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_unpacklo_epi32(q[i][0], q[i][1]);
    const __m512i b = _mm512_unpackhi_epi32(q[i][0], q[i][1]);
    const __m512i c = _mm512_unpacklo_epi32(q[i][2], q[i][3]);
    const __m512i d = _mm512_unpackhi_epi32(q[i][2], q[i][3]);
    out[4 * i + 0] = _mm512_unpacklo_epi64(a, c);
    out[4 * i + 1] = _mm512_unpackhi_epi64(a, c);
    out[4 * i + 2] = _mm512_unpacklo_epi64(b, d);
    out[4 * i + 3] = _mm512_unpackhi_epi64(b, d);
  }
}

// The same of `bytes`, in a function of its own: it is rare, and much code.
C10_NOINLINE inline void
transpose_tail(const uint8_t* p, int64_t pitch, int64_t bytes, __m512i (&out)[16]) {
  transpose_lines<false>(p, pitch, bytes, out);
}

// Of 16 lines, from double word d0 of `total` on, a stretch or what there is of it. Bytes of a
// double word are in the order in which unpacking pairs those of a word; that of panels.
template <typename Codes>
C10_ALWAYS_INLINE void read_lines(
    const LowBitView& w, const uint8_t* lines, int64_t d0, int64_t total,
    __m512i (&raw)[kStretch]) {
  const int64_t here = std::min(kStretch, total - d0);
  if (w.panels) {
    for (const auto i : c10::irange(here)) {
      const uint8_t* from = lines + (d0 + i) * 64;
      _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_T1);
      raw[i] = _mm512_loadu_si512(from);
    }
    return;
  }
  if (here == kStretch) {
    transpose_lines<true>(lines + d0 * 4, w.row_bytes, 64, raw);
  } else {
    transpose_tail(lines + d0 * 4, w.row_bytes, here * 4, raw);
  }
  if constexpr (Codes::kBits == 8) {
    const __m512i order = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    MOE_UNROLL
    for (int i = 0; i < kStretch; ++i) {
      raw[i] = _mm512_shuffle_epi8(raw[i], order);
    }
  }
}

// The lines that come next lie behind these: fetched in the order of addresses, a kilobyte
// for each that is read. Into L2: they are more than L1 holds.
C10_ALWAYS_INLINE void prefetch(const LineGroup& group, const uint8_t* p) {
  for (int i = 0; !group.w->panels && i < 16; ++i) {
    _mm_prefetch(reinterpret_cast<const char*>(p + group.ahead + i * 64), _MM_HINT_T1);
  }
}

// Scales of 16 lines, for one block of K after the other.
class LineScales {
 public:
  void begin(const LowBitView& w, int64_t expert, int64_t row) {
    scale_ = &w.scale;
    expert_ = expert;
    row_ = row;
    first_ = w.scale.offset(expert, row, 0);
    blocks_ = (w.depth + w.scale.block_cols - 1) / w.scale.block_cols;
  }

  // E8M0 bytes as double words.
  C10_ALWAYS_INLINE __m512i bytes(int64_t block) {
    if (scale_->panels) {
      return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(
          static_cast<const uint8_t*>(scale_->data) + first_ + block * scale_->col_stride)));
    }
    load_blocks(block);
    return _mm512_load_si512(staged_[block % 16]);
  }

  C10_ALWAYS_INLINE __m512 values(int64_t block) {
    if (scale_->is_pow2) {
      const __m512i b = bytes(block);
      rare_ |= _mm512_cmpeq_epi32_mask(b, _mm512_set1_epi32(255));
      // Byte 0 is 2^-127.
      return _mm512_castsi512_ps(
          _mm512_max_epi32(_mm512_slli_epi32(b, 23), _mm512_set1_epi32(0x00400000)));
    }
    const auto* from =
        static_cast<const float*>(scale_->data) + first_ + block * scale_->col_stride;
    if (scale_->row_stride == 0 || scale_->block_rows % kPanelLines == 0) {
      return _mm512_set1_ps(*from);
    }
    if (scale_->is_dense_along_rows()) {
      return _mm512_loadu_ps(from);
    }
    load_blocks(block);
    return _mm512_castsi512_ps(_mm512_load_si512(staged_[block % 16]));
  }

  // (kBias + 127 - byte) << 7 in both halves of a double word.
  C10_ALWAYS_INLINE __m512i minus(int64_t block) {
    const __m512i b = bytes(block);
    rare_ |= _mm512_cmpgt_epi32_mask(b, _mm512_set1_epi32(kBias + 127));
    const __m512i d = _mm512_sub_epi32(_mm512_set1_epi32(kBias + 127), b);
    return _mm512_or_si512(_mm512_slli_epi32(d, 7), _mm512_slli_epi32(d, 23));
  }

  bool is_rare() const {
    return rare_ != 0;
  }

 private:
  // That block and its neighbours, 16 at a time, as double words.
  C10_ALWAYS_INLINE void load_blocks(int64_t block) {
    if (block / 16 != loaded_) {
      loaded_ = block / 16;
      stage(loaded_ * 16, std::min<int64_t>(16, blocks_ - loaded_ * 16));
    }
  }

  C10_NOINLINE void stage(int64_t first, int64_t count) {
    const auto* bytes = static_cast<const uint8_t*>(scale_->data);
    const auto* floats = static_cast<const float*>(scale_->data);
    if (scale_->col_stride == 1 && scale_->block_rows == 1) {
      if (scale_->is_pow2) {
        stage_bytes(bytes + first_ + first, count);
      } else {
        __m512i turned[16];
        transpose_lines<false>(
            reinterpret_cast<const uint8_t*>(floats + first_ + first), scale_->row_stride * 4,
            count * 4, turned);
        for (const auto i : c10::irange(16)) {
          _mm512_store_si512(staged_[i], turned[i]);
        }
      }
      return;
    }
    for (const auto line : c10::irange(16)) {
      for (const auto i : c10::irange(count)) {
        const int64_t from =
            scale_->offset(expert_, row_ + line, (first + i) * scale_->block_cols);
        staged_[i][line] =
            scale_->is_pow2 ? bytes[from] : c10::bit_cast<int32_t>(floats[from]);
      }
    }
  }

  // 16 lines of 16 bytes, turned around.
  void stage_bytes(const uint8_t* from, int64_t count) {
    const auto mask = static_cast<__mmask16>((1u << count) - 1);
    __m128i a[16], b[16];
    for (int i = 0; i < 16; ++i) {
      a[i] = _mm_maskz_loadu_epi8(mask, from + i * scale_->row_stride);
    }
    const auto mix = [](const __m128i (&from)[16], __m128i (&to)[16]) {
      for (int i = 0; i < 8; ++i) {
        to[2 * i] = _mm_unpacklo_epi8(from[i], from[i + 8]);
        to[2 * i + 1] = _mm_unpackhi_epi8(from[i], from[i + 8]);
      }
    };
    mix(a, b);
    mix(b, a);
    mix(a, b);
    mix(b, a);
    for (int i = 0; i < 16; ++i) {
      _mm512_store_si512(staged_[i], _mm512_cvtepu8_epi32(a[i]));
    }
  }

  const ScaleView* scale_;
  int64_t expert_, row_, blocks_;
  int64_t first_;  // offset of the first block
  __mmask16 rare_ = 0;
  int64_t loaded_ = -1;  // the 16 blocks in staged_
  alignas(64) int32_t staged_[16][16];
};

}  // namespace low_bit
}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native
