#pragma once

// The instructions of MoELowBitDecoder.h in AVX512: 16 lines of low-bit weights side by side in a
// register, a word of two bfloat16 of each. Float rows take two floats from a word by a shift and
// a mask. Few rows are multiplied right after decoding, others from the packed panel. The
// order of addition is that of VecGemm with DotProducts, or with floats, on packed panels.
// Included by MoELowBit.h.
//
//   e4m3, int8   two table look-ups of 128 bytes each, for the two bytes of a bfloat16
//   4 bits       one look-up of 32 bytes; a bit selects the byte of the bfloat16
//   folded E8M0  tables times 2^kBias; an unsigned saturating subtraction corrects the
//                exponents, and 0 stays 0. Floats are multiplied
//
// The caller decodes rare cases one element at a time: NaN codes with
// folded scales, scales above 2^kBias, and columns that are not a multiple of 16.

#include <ATen/cpu/vec/vec.h>

#include <ATen/native/cpu/MoEMicroGemmX86.h>

#if defined(MOE_HAS_AMX) && defined(__GNUC__)
#define MOE_HAS_LOW_BIT_AVX512
#endif

#ifdef MOE_HAS_LOW_BIT_AVX512
// The files of this capability are compiled for AVX512; only code between these pragmas may
// use more.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512vbmi,avx512bf16,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512vbmi,avx512bf16,avx512vnni")
#endif

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {
namespace low_bit_avx512 {

constexpr int64_t kLines = kPanelLines, kStretch = 16, kMaxRows = 8, kMaxInt8Rows = 4;
constexpr int kGroups[] = {4, 2, 1, 1};
constexpr bool kUnrolls = true, kMasksTails = true, kSlicesInt8 = true,
               kReadsInPlace = true;
constexpr int kBias = 118;

// ---- registers ----------------------------------------------------------------------

using Floats = __m512;
using Ints = __m512i;
using Rare = __mmask16;

C10_ALWAYS_INLINE Floats all_floats(float x) {
  return _mm512_set1_ps(x);
}
C10_ALWAYS_INLINE Floats load_floats(const float* from) {
  return _mm512_loadu_ps(from);
}
C10_ALWAYS_INLINE void store_floats(float* to, Floats x) {
  _mm512_storeu_ps(to, x);
}
C10_ALWAYS_INLINE Floats add_floats(Floats a, Floats b) {
  return _mm512_add_ps(a, b);
}
C10_ALWAYS_INLINE Floats multiply_floats(Floats a, Floats b) {
  return _mm512_mul_ps(a, b);
}
C10_ALWAYS_INLINE Floats fma(Floats a, Floats b, Floats c) {
  return _mm512_fmadd_ps(a, b, c);
}
C10_ALWAYS_INLINE Floats to_floats(Ints x) {
  return _mm512_cvtepi32_ps(x);
}
C10_ALWAYS_INLINE Floats as_floats(Ints x) {
  return _mm512_castsi512_ps(x);
}
C10_ALWAYS_INLINE Ints as_ints(Floats x) {
  return _mm512_castps_si512(x);
}
C10_ALWAYS_INLINE Ints multiply_ints(Ints a, Ints b) {
  return _mm512_mullo_epi32(a, b);
}
C10_ALWAYS_INLINE Ints all_ints(int32_t x) {
  return _mm512_set1_epi32(x);
}
C10_ALWAYS_INLINE Ints load_ints(const void* from) {
  return _mm512_loadu_si512(from);
}
C10_ALWAYS_INLINE Ints load_bytes(const uint8_t* from) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
C10_ALWAYS_INLINE void store_ints(void* to, Ints x) {
  _mm512_storeu_si512(to, x);
}
C10_ALWAYS_INLINE bool is_any(Rare x) {
  return x != 0;
}

// ---- reading 16 lines -----------------------------------------------------------------

// Transposes 64 bytes of 16 lines, of which `bytes` exist, to 16 registers with 4 bytes of each.
template <bool whole>
C10_ALWAYS_INLINE void
transpose_some(const uint8_t* p, int64_t pitch, int64_t bytes, __m512i (&out)[16]) {
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

C10_ALWAYS_INLINE void transpose_lines(const uint8_t* p, int64_t pitch, __m512i (&out)[16]) {
  transpose_some<true>(p, pitch, 64, out);
}
// The same for `bytes` bytes; not inlined, as it is rare and much code.
C10_NOINLINE inline void
transpose_tail(const uint8_t* p, int64_t pitch, int64_t bytes, __m512i (&out)[16]) {
  transpose_some<false>(p, pitch, bytes, out);
}

// Bytes of a double word in the order of panels, in which unpacking pairs the bytes of a word.
template <int64_t bits, bool panels>
C10_ALWAYS_INLINE Ints ordered(Ints v) {
  return panels || bits == 4
      ? v
      : _mm512_shuffle_epi8(
            v, _mm512_broadcast_i32x4(
                   _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)));
}

// 16 lines of `count` bytes, transposed, as double words.
inline void stage_bytes(
    const uint8_t* from, int64_t pitch, int64_t count, int32_t (&staged)[kLines][kLines]) {
  const auto mask = static_cast<__mmask16>((1u << count) - 1);
  __m128i a[16], b[16];
  for (int i = 0; i < 16; ++i) {
    a[i] = _mm_maskz_loadu_epi8(mask, from + i * pitch);
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
    store_ints(staged[i], _mm512_cvtepu8_epi32(a[i]));
  }
}

// ---- scales -----------------------------------------------------------------------------

C10_ALWAYS_INLINE Floats pow2_of(Ints bytes, Rare& rare) {
  rare |= _mm512_cmpeq_epi32_mask(bytes, all_ints(255));
  // Byte 0 is 2^-127.
  return as_floats(_mm512_max_epi32(_mm512_slli_epi32(bytes, 23), all_ints(0x00400000)));
}

// FoldedE4M3 subtracts it; ScaledE4M3 multiplies by it as floats.
using Fold = Ints;
C10_ALWAYS_INLINE Fold unfolded() {
  return _mm512_setzero_si512();
}
// Numbers that bfloat16 has to round become 0 here, too.
template <typename>
C10_ALWAYS_INLINE bool underflows(Ints, const Ints*, int64_t) {
  return false;
}

// ---- tables -----------------------------------------------------------------------------

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

// ---- decoding: 16 double words (of a line each, see ordered()) into words of bfloat16 ----

// n words, of elements 2 j and 2 j + 1 each.
template <int n>
struct Decoding {
  using Numbers = Ints[n];
  template <int j>
  C10_ALWAYS_INLINE Ints pair(const Numbers& words, Fold) const {
    return words[j];
  }
  bool is_rare() const {
    return false;
  }
};

struct E4M3 : Decoding<2> {
  static constexpr int64_t kBits = 8;
  const Ints low0, low1, high0, high1, sign;
  explicit E4M3(const uint8_t (&table)[2][128] = tables().e4m3)
      : low0(_mm512_load_si512(table[0])), low1(_mm512_load_si512(table[0] + 64)),
        high0(_mm512_load_si512(table[1])), high1(_mm512_load_si512(table[1] + 64)),
        sign(_mm512_set1_epi8(static_cast<char>(0x80))) {}

  C10_ALWAYS_INLINE void decode(Ints v, Fold, Numbers& words) {
    const Ints low = _mm512_permutex2var_epi8(low0, v, low1);
    const Ints high = _mm512_ternarylogic_epi32(
        _mm512_permutex2var_epi8(high0, v, high1), v, sign, 0xF8);  // a | (b & c)
    words[0] = _mm512_unpacklo_epi8(low, high);
    words[1] = _mm512_unpackhi_epi8(low, high);
  }
};

// Two floats of each line.
struct FloatPair {
  Floats first, second;
};
C10_ALWAYS_INLINE FloatPair floats_of(Ints words) {
  return {
      as_floats(_mm512_slli_epi32(words, 16)),
      as_floats(_mm512_and_si512(words, all_ints(static_cast<int32_t>(0xffff0000))))};
}

struct ScaledE4M3 : E4M3 {
  C10_ALWAYS_INLINE static Fold fold(Ints bytes, Rare& rare) {
    return _mm512_castps_si512(pow2_of(bytes, rare));
  }
  template <int j>
  C10_ALWAYS_INLINE FloatPair pair(const Numbers& words, Fold scale) const {
    const FloatPair two = floats_of(words[j]);
    return {
        multiply_floats(two.first, as_floats(scale)),
        multiply_floats(two.second, as_floats(scale))};
  }
};

struct FoldedE4M3 : E4M3 {
  Ints seen = _mm512_setzero_si512();
  FoldedE4M3() : E4M3(tables().biased) {}

  // The excess of the exponents: (kBias + 127 - byte) << 7 in both halves of a double word.
  C10_ALWAYS_INLINE static Fold fold(Ints bytes, Rare& rare) {
    rare |= _mm512_cmpgt_epi32_mask(bytes, all_ints(kBias + 127));
    const Ints d = _mm512_sub_epi32(all_ints(kBias + 127), bytes);
    return _mm512_or_si512(_mm512_slli_epi32(d, 7), _mm512_slli_epi32(d, 23));
  }
  C10_ALWAYS_INLINE void decode(Ints v, Fold minus, Numbers& words) {
    const Ints low = _mm512_permutex2var_epi8(low0, v, low1);
    const Ints high = _mm512_permutex2var_epi8(high0, v, high1);
    seen = _mm512_or_si512(seen, high);
    const Ints signs = _mm512_set1_epi16(static_cast<short>(0x8000));
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
template <typename Row>
using FoldedCodes = std::conditional_t<std::is_same_v<Row, float>, ScaledE4M3, FoldedE4M3>;

struct Int8 : Decoding<2> {
  static constexpr int64_t kBits = 8;
  const Ints low0, low1, high0, high1, minus0, minus1;
  Int8()
      : low0(_mm512_load_si512(tables().int8[0])), low1(_mm512_load_si512(tables().int8[0] + 64)),
        high0(_mm512_load_si512(tables().int8[1])),
        high1(_mm512_load_si512(tables().int8[1] + 64)),
        minus0(_mm512_load_si512(tables().int8[2])),
        minus1(_mm512_load_si512(tables().int8[2] + 64)) {}

  C10_ALWAYS_INLINE void decode(Ints v, Fold, Numbers& words) {
    const Ints magnitude = _mm512_abs_epi8(v);
    const Ints low = _mm512_permutex2var_epi8(low0, magnitude, low1);
    const Ints high = _mm512_mask_blend_epi8(
        _mm512_movepi8_mask(v), _mm512_permutex2var_epi8(high0, magnitude, high1),
        _mm512_permutex2var_epi8(minus0, magnitude, minus1));
    words[0] = _mm512_unpacklo_epi8(low, high);
    words[1] = _mm512_unpackhi_epi8(low, high);
  }
};

struct FourBits : Decoding<4> {
  static constexpr int64_t kBits = 4;
  const Ints table, low_bits, second;
  Ints shifts[4];
  explicit FourBits(const uint8_t (&bytes)[64])
      : table(_mm512_load_si512(bytes)), low_bits(_mm512_set1_epi8(15)),
        second(_mm512_set1_epi16(0x1000)) {
    for (int j = 0; j < 4; ++j) {
      // First bit of byte i in the 64 bits of two lines; a line has four bytes.
      alignas(64) uint8_t from[64];
      for (int i = 0; i < 64; ++i) {
        from[i] = static_cast<uint8_t>((i & 4 ? 32 : 0) + 8 * j + (i & 2 ? 4 : 0));
      }
      shifts[j] = _mm512_load_si512(from);
    }
  }

  C10_ALWAYS_INLINE void decode(Ints v, Fold, Numbers& words) {
    MOE_UNROLL
    for (int j = 0; j < 4; ++j) {
      const Ints codes = _mm512_multishift_epi64_epi8(shifts[j], v);
      words[j] = _mm512_permutexvar_epi8(
          _mm512_ternarylogic_epi32(second, codes, low_bits, 0xF8), table);
    }
  }
};
struct E2M1 : FourBits {
  E2M1() : FourBits(tables().e2m1) {}
};
struct Int4 : FourBits {
  Int4() : FourBits(tables().int4) {}
};

// ---- numbers in use ---------------------------------------------------------------------

C10_ALWAYS_INLINE Floats add_pair(Floats sum, Ints words, const BFloat16* x) {
  int32_t word;
  std::memcpy(&word, x, sizeof(word));
  return _mm512_dpbf16_ps(
      sum, reinterpret_cast<__m512bh>(words), reinterpret_cast<__m512bh>(all_ints(word)));
}
C10_ALWAYS_INLINE Floats add_pair(Floats sum, const FloatPair& two, const float* x) {
  return fma(all_floats(x[1]), two.second, fma(all_floats(x[0]), two.first, sum));
}
C10_ALWAYS_INLINE Floats add_pair(Floats sum, Ints words, const float* x) {
  return add_pair(sum, floats_of(words), x);
}

struct Vnni {
  // Of bytes that are not negative with those of a row.
  C10_ALWAYS_INLINE static Ints add(Ints sum, Ints weights, Ints row) {
    return _mm512_dpbusd_epi32(sum, weights, row);
  }
};

// Twice the weights plus 12, by code: 0 to 24.
struct ShiftedE2M1 : Vnni {
  static constexpr int64_t kBits = 4;
  static constexpr int32_t kShift = 12;
  static constexpr float kUnit = 0.5f;
  const Ints table = _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const Ints low_bits = _mm512_set1_epi8(15);

  C10_ALWAYS_INLINE void shift(Ints v, Ints (&words)[2]) const {
    words[0] = _mm512_shuffle_epi8(table, _mm512_and_si512(v, low_bits));
    words[1] =
        _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(v, 4), low_bits));
  }
};

struct ShiftedInt4 : Vnni {
  static constexpr int64_t kBits = 4;
  static constexpr int32_t kShift = 8;
  static constexpr float kUnit = 1;
  const Ints low_bits = _mm512_set1_epi8(15);

  C10_ALWAYS_INLINE void shift(Ints v, Ints (&words)[2]) const {
    words[0] = _mm512_and_si512(v, low_bits);
    words[1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low_bits);
  }
};

struct ShiftedInt8 : Vnni {
  static constexpr int64_t kBits = 8;
  static constexpr int32_t kShift = 128;
  static constexpr float kUnit = 1;
  // From the order of panels to that of K.
  const Ints order = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  const Ints sign = _mm512_set1_epi8(static_cast<char>(0x80));

  C10_ALWAYS_INLINE void shift(Ints v, Ints (&words)[1]) const {
    words[0] = _mm512_xor_si512(_mm512_shuffle_epi8(v, order), sign);
  }
};

// Adds products of 32 elements of Q groups of lines with the codes of M rows from double word `at`.
template <int Q, int M, typename Weights>
C10_ALWAYS_INLINE void add_int8(
    const Ints* const (&from)[Q], const Weights& weights, const int32_t* const (&codes)[M],
    int64_t at, Ints (&products)[Q][M]) {
  constexpr int n = 8 / Weights::kBits;
  MOE_UNROLL
  for (int64_t i = 0; i < 8 / n; ++i) {
    Ints words[Q][n];
    MOE_UNROLL
    for (int q = 0; q < Q; ++q) {
      weights.shift(load_ints(from[q] + i), words[q]);
    }
    MOE_UNROLL
    for (int j = 0; j < n; ++j) {
      MOE_UNROLL
      for (int r = 0; r < M; ++r) {
        const Ints row = all_ints(codes[r][at + i * n + j]);
        MOE_UNROLL
        for (int q = 0; q < Q; ++q) {
          products[q][r] = Weights::add(products[q][r], words[q][j], row);
        }
      }
    }
  }
}

C10_ALWAYS_INLINE void store_pair(Ints words, BFloat16* to, int64_t) {
  store_ints(to, words);
}
C10_ALWAYS_INLINE void store_pair(const FloatPair& two, float* to, int64_t ld) {
  store_floats(to, two.first);
  store_floats(to + ld, two.second);
}
C10_ALWAYS_INLINE void store_pair(Ints words, float* to, int64_t ld) {
  store_pair(floats_of(words), to, ld);
}

struct Traits {
  static constexpr int64_t kRows = kMaxRows, kLines = low_bit_avx512::kLines;

  template <typename Micro>
  static constexpr bool multiplies() {
    return std::is_base_of_v<VecGemm<BFloat16, DotProducts>, Micro> ||
        std::is_base_of_v<VecGemm<float>, Micro>;
  }
  // Only products of bfloat16 rows use AVX512-BF16, and dispatch_fast_micro_gemm() chooses them only on
  // CPUs that have it.
  static bool is_available() {
    static const bool found = has_instructions("avx512_vbmi") && has_instructions("avx512_vnni");
    return found;
  }
  static bool is_regular(const LowBitView& w, int64_t row, int64_t count) {
    return row % kLines == 0 && count % kLines == 0 &&
        w.depth % (w.scaling == Scaling::Rows ? 8 : 32) == 0;
  }
};

#include <ATen/native/cpu/MoELowBitDecoder.h>

}  // namespace low_bit_avx512

using Avx512LowBit = low_bit_avx512::Decoder;

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // MOE_HAS_LOW_BIT_AVX512
