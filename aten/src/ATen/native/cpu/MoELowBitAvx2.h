#pragma once

// The instructions of MoELowBitDecoder.h in AVX2: 8 lines of low-bit weights side by side in a
// register. For CPUs without the instructions of MoELowBitAvx512.h. The order of addition is that of
// VecGemm with FusedMultiplyAdd on packed panels.
//
//   int4, int8   a mask makes a code the mantissa of a float whose exponent gives its last bit
//                the value 1; a subtraction leaves the number. e2m1 needs a look-up in 16 bytes
//   e4m3         exponent and mantissa become those of a float x, and a power of two, which
//                includes an E8M0 scale, corrects its size. min(x, 2 x - least) is right for
//                subnormal codes, too. (As denormal floats they would take an Intel
//                CPU 150 cycles.)
//
// The caller handles rare cases: NaN codes, and folded scales above 2^7 or those that
// bfloat16 has to round.

#include <ATen/cpu/vec/vec.h>

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
#define MOE_HAS_LOW_BIT_AVX2

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {
namespace low_bit_avx2 {

constexpr int64_t kLines = 8, kStretch = 8, kMaxRows = 4, kMaxInt8Rows = kMaxRows;
constexpr int kGroups[] = {4, 2, 1};
constexpr bool kUnrolls = false, kMasksTails = false, kSlicesInt8 = false,
               kReadsInPlace = false;

// ---- registers ------------------------------------------------------------------------------

using Floats = __m256;
using Ints = __m256i;
using Rare = __m256i;

C10_ALWAYS_INLINE Floats all_floats(float x) {
  return _mm256_set1_ps(x);
}
C10_ALWAYS_INLINE Floats load_floats(const float* from) {
  return _mm256_loadu_ps(from);
}
C10_ALWAYS_INLINE void store_floats(float* to, Floats x) {
  _mm256_storeu_ps(to, x);
}
C10_ALWAYS_INLINE Floats add_floats(Floats a, Floats b) {
  return _mm256_add_ps(a, b);
}
C10_ALWAYS_INLINE Floats multiply_floats(Floats a, Floats b) {
  return _mm256_mul_ps(a, b);
}
C10_ALWAYS_INLINE Floats fma(Floats a, Floats b, Floats c) {
  return _mm256_fmadd_ps(a, b, c);
}
C10_ALWAYS_INLINE Floats to_floats(Ints x) {
  return _mm256_cvtepi32_ps(x);
}
C10_ALWAYS_INLINE Floats as_floats(Ints x) {
  return _mm256_castsi256_ps(x);
}
C10_ALWAYS_INLINE Ints as_ints(Floats x) {
  return _mm256_castps_si256(x);
}
C10_ALWAYS_INLINE Ints multiply_ints(Ints a, Ints b) {
  return _mm256_mullo_epi32(a, b);
}
C10_ALWAYS_INLINE Ints all_ints(int32_t x) {
  return _mm256_set1_epi32(x);
}
C10_ALWAYS_INLINE Ints load_ints(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
C10_ALWAYS_INLINE Ints load_bytes(const uint8_t* from) {
  return _mm256_cvtepu8_epi32(_mm_loadu_si64(from));
}
C10_ALWAYS_INLINE void store_ints(void* to, Ints x) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), x);
}
C10_ALWAYS_INLINE bool is_any(Ints x) {
  return _mm256_testz_si256(x, x) == 0;
}

// ---- reading 8 lines ------------------------------------------------------------------------

// Transposes 32 bytes of 8 lines to 8 registers with 4 bytes of each.
C10_ALWAYS_INLINE void transpose_lines(const uint8_t* p, int64_t pitch, __m256i (&out)[8]) {
  __m256i q[2][4];
  MOE_UNROLL
  for (int half = 0; half < 2; ++half) {
    MOE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const auto load = [&](int line) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + line * pitch + half * 16));
      };
      q[half][i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load(i)), load(4 + i), 1);
    }
  }
  MOE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const __m256i a = _mm256_unpacklo_epi32(q[half][0], q[half][1]);
    const __m256i b = _mm256_unpackhi_epi32(q[half][0], q[half][1]);
    const __m256i c = _mm256_unpacklo_epi32(q[half][2], q[half][3]);
    const __m256i d = _mm256_unpackhi_epi32(q[half][2], q[half][3]);
    out[4 * half + 0] = _mm256_unpacklo_epi64(a, c);
    out[4 * half + 1] = _mm256_unpackhi_epi64(a, c);
    out[4 * half + 2] = _mm256_unpacklo_epi64(b, d);
    out[4 * half + 3] = _mm256_unpackhi_epi64(b, d);
  }
}

// The same for `bytes` bytes.
inline void
transpose_tail(const uint8_t* p, int64_t pitch, int64_t bytes, __m256i (&out)[8]) {
  alignas(32) uint8_t part[kLines][kStretch * 4] = {};
  for (const auto i : c10::irange(kLines)) {
    std::copy_n(p + i * pitch, bytes, part[i]);
  }
  transpose_lines(part[0], kStretch * 4, out);
}

// Bytes of a double word in the order of K. Panels store pairs of them apart, see LowBitView::at.
template <int64_t bits, bool panels>
C10_ALWAYS_INLINE Ints ordered(Ints v) {
  return !panels || bits == 4
      ? v
      : _mm256_shuffle_epi8(
            v, _mm256_broadcastsi128_si256(
                   _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)));
}

// 8 lines of 8 bytes, transposed, as double words.
inline void
stage_bytes(const uint8_t* from, int64_t pitch, int64_t, int32_t (&staged)[kLines][kLines]) {
  __m128i a[8], b[8];
  MOE_UNROLL
  for (int i = 0; i < 8; ++i) {
    a[i] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i * pitch));
  }
  MOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm_unpacklo_epi8(a[i], a[4 + i]);
  }
  MOE_UNROLL
  for (int i = 0; i < 2; ++i) {
    a[2 * i] = _mm_unpacklo_epi8(b[i], b[2 + i]);
    a[2 * i + 1] = _mm_unpackhi_epi8(b[i], b[2 + i]);
  }
  MOE_UNROLL
  for (int i = 0; i < 2; ++i) {
    b[2 * i] = _mm_unpacklo_epi8(a[i], a[2 + i]);
    b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[2 + i]);
  }
  MOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    store_ints(staged[2 * i], _mm256_cvtepu8_epi32(b[i]));
    store_ints(staged[2 * i + 1], _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(b[i], b[i])));
  }
}

// ---- scales ---------------------------------------------------------------------------------

C10_ALWAYS_INLINE Floats pow2_of(Ints bytes, Rare&) {
  const Ints is_nan = _mm256_cmpeq_epi32(bytes, all_ints(255));
  // Byte 0 is 2^-127.
  return _mm256_or_ps(
      as_floats(is_nan),
      as_floats(_mm256_max_epi32(_mm256_slli_epi32(bytes, 23), all_ints(0x00400000))));
}

// The factor of e4m3 numbers: 2^kBias, times a folded scale.
using Fold = Floats;
constexpr int kBias = 56;
C10_ALWAYS_INLINE Fold unfolded() {
  return as_floats(all_ints((kBias + 127) << 23));
}

// Whether nonzero numbers times their scale may be below the range of bfloat16.
C10_NOINLINE inline bool are_numbers_small(Ints is_small, const Ints* codes, int64_t count) {
  Ints any = _mm256_setzero_si256();
  for (const auto i : c10::irange(count)) {
    any = _mm256_or_si256(any, codes[i]);
  }
  return is_any(_mm256_and_si256(_mm256_and_si256(any, _mm256_set1_epi8(0x7f)), is_small));
}
template <typename operand_t>
C10_ALWAYS_INLINE bool underflows(Ints bytes, const Ints* codes, int64_t count) {
  const Ints is_small = _mm256_cmpgt_epi32(all_ints(16), bytes);
  return std::is_same_v<operand_t, BFloat16> && is_any(is_small) &&
      are_numbers_small(is_small, codes, count);
}

// ---- decoding: a double word of each of 8 lines into floats --------------------------------

struct FloatPair {
  Floats first, second;
};

// `Codes` has value<j>(), a number of a double word.
template <typename Codes>
struct Decoding {
  template <int j, typename Numbers>
  C10_ALWAYS_INLINE FloatPair pair(const Numbers& n, Fold fold) const {
    const auto* self = static_cast<const Codes*>(this);
    return {self->template value<2 * j>(n, fold), self->template value<2 * j + 1>(n, fold)};
  }
  bool is_rare() const {
    return false;
  }
};

// Bits [pos, pos + bits) of each double word as an integer, halved if `halves`, minus `bias`.
// They become the mantissa of a float whose exponent gives bit `pos` the value 1 or 1 / 2.
template <int pos, int bits, int bias, bool halves = false>
C10_ALWAYS_INLINE __m256 number_at(__m256i v) {
  constexpr int exponent = 23 - pos - (halves ? 1 : 0);
  static_assert(pos + bits <= 23);
  constexpr float base = static_cast<float>(1 << exponent);
  const __m256i code = _mm256_and_si256(v, _mm256_set1_epi32(((1 << bits) - 1) << pos));
  return _mm256_sub_ps(
      _mm256_or_ps(_mm256_castsi256_ps(code), _mm256_set1_ps(base)),
      _mm256_set1_ps(base + static_cast<float>(bias)));
}

struct Int4 : Decoding<Int4> {
  static constexpr int64_t kBits = 4;
  struct Numbers {
    Ints v, upper;
  };
  C10_ALWAYS_INLINE void decode(Ints v, Fold, Numbers& n) const {
    n = {v, _mm256_srli_epi32(v, 12)};
  }
  template <int j>
  C10_ALWAYS_INLINE Floats value(const Numbers& n, Fold) const {
    return j < 5 ? number_at<4 * (j < 5 ? j : 0), 4, 8>(n.v)
                 : number_at<4 * (j < 5 ? 0 : j - 3), 4, 8>(n.upper);
  }
};

// Twice the values plus 12, by code.
inline Ints shifted_weights() {
  return _mm256_broadcastsi128_si256(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

struct E2M1 : Decoding<E2M1> {
  static constexpr int64_t kBits = 4;
  const Ints table = shifted_weights(), low_bits = _mm256_set1_epi8(15);
  struct Numbers {
    Ints numbers[2], upper[2];  // of even and odd k
  };
  C10_ALWAYS_INLINE void decode(Ints v, Fold, Numbers& n) const {
    const Ints even = _mm256_shuffle_epi8(table, _mm256_and_si256(v, low_bits));
    const Ints odd =
        _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi32(v, 4), low_bits));
    n = {{even, odd}, {_mm256_srli_epi32(even, 16), _mm256_srli_epi32(odd, 16)}};
  }
  template <int j>
  C10_ALWAYS_INLINE Floats value(const Numbers& n, Fold) const {
    return j < 6 ? number_at<j / 2 * 8 % 24, 5, 6, true>(n.numbers[j % 2])
                 : number_at<8, 5, 6, true>(n.upper[j % 2]);
  }
};

struct Int8 : Decoding<Int8> {
  static constexpr int64_t kBits = 8;
  struct Numbers {
    Ints v, upper;
  };
  C10_ALWAYS_INLINE void decode(Ints v, Fold, Numbers& n) const {
    const Ints positive = _mm256_xor_si256(v, _mm256_set1_epi8(static_cast<char>(0x80)));
    n = {positive, _mm256_srli_epi32(positive, 16)};
  }
  template <int j>
  C10_ALWAYS_INLINE Floats value(const Numbers& n, Fold) const {
    return number_at<j % 2 * 8, 8, 128>(j < 2 ? n.v : n.upper);
  }
};

struct E4M3 : Decoding<E4M3> {
  static constexpr int64_t kBits = 8;
  using Numbers = Ints;
  // The largest code without its sign; a NaN has all bits set.
  Ints largest = _mm256_setzero_si256();

  C10_ALWAYS_INLINE void decode(Ints v, Fold, Numbers& n) {
    n = v;
    largest = _mm256_max_epu8(largest, _mm256_and_si256(v, _mm256_set1_epi8(0x7f)));
  }
  template <int j>
  C10_ALWAYS_INLINE Floats value(const Numbers& n, Fold factor) const {
    const Ints top = j == 3 ? n : _mm256_slli_epi32(n, 24 - 8 * j);
    // The exponent of e4m3, whose bias is 7, plus 64: the number times 2^-kBias.
    const Floats x = as_floats(_mm256_or_si256(
        _mm256_and_si256(_mm256_srli_epi32(top, 4), all_ints(0x07f00000)), all_ints(64 << 23)));
    const Floats least = as_floats(all_ints(65 << 23));
    const Floats size = _mm256_min_ps(x, _mm256_fmsub_ps(x, all_floats(2), least));
    const Floats sign = _mm256_and_ps(as_floats(top), all_floats(-0.0f));
    return _mm256_mul_ps(_mm256_or_ps(size, sign), factor);
  }
  C10_ALWAYS_INLINE static Fold fold(Ints bytes, Rare& rare) {
    rare = _mm256_or_si256(rare, _mm256_cmpgt_epi32(bytes, all_ints(134)));
    return as_floats(_mm256_slli_epi32(_mm256_add_epi32(bytes, all_ints(kBias)), 23));
  }
  bool is_rare() const {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, _mm256_set1_epi8(0x7f))) != 0;
  }
};
template <typename>
using FoldedCodes = E4M3;

// ---- numbers in use -------------------------------------------------------------------------

C10_ALWAYS_INLINE Floats add_pair(Floats sum, const FloatPair& two, const float* x) {
  sum = fma(_mm256_broadcast_ss(x), two.first, sum);
  return fma(_mm256_broadcast_ss(x + 1), two.second, sum);
}

struct ShiftedE2M1 {
  static constexpr int64_t kBits = 4;
  static constexpr int32_t kShift = 12;
  static constexpr float kUnit = 0.5f;
  const Ints table = shifted_weights(), low_bits = _mm256_set1_epi8(15);

  C10_ALWAYS_INLINE void shift(Ints v, Ints* words) const {
    words[0] = _mm256_shuffle_epi8(table, _mm256_and_si256(v, low_bits));
    words[1] =
        _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v, 4), low_bits));
  }
};

struct ShiftedInt4 {
  static constexpr int64_t kBits = 4;
  static constexpr int32_t kShift = 8;
  static constexpr float kUnit = 1;
  const Ints low_bits = _mm256_set1_epi8(15);

  C10_ALWAYS_INLINE void shift(Ints v, Ints* words) const {
    words[0] = _mm256_and_si256(v, low_bits);
    words[1] = _mm256_and_si256(_mm256_srli_epi16(v, 4), low_bits);
  }
};

// As they are: sums of two products of bytes up to 255 would not fit into 16 bits.
struct ShiftedInt8 {
  static constexpr int64_t kBits = 8;
  static constexpr int32_t kShift = 0;
  static constexpr float kUnit = 1;
};

// Adds products of 32 elements of a group of lines with the codes of M rows from double word `at`.
template <int M, typename Weights>
C10_ALWAYS_INLINE void add_int8(
    const Ints* const (&from)[1], const Weights& weights, const int32_t* const (&codes)[M],
    int64_t at, Ints (&products)[1][M]) {
  const Ints ones = _mm256_set1_epi16(1);
  if constexpr (Weights::kBits == 8) {
    MOE_UNROLL
    for (int64_t i = 0; i < 8; ++i) {
      const Ints v = load_ints(from[0] + i), sizes = _mm256_abs_epi8(v);  // 128 at most
      MOE_UNROLL
      for (int r = 0; r < M; ++r) {
        const Ints word = _mm256_sign_epi8(all_ints(codes[r][at + i]), v);
        const Ints sum = _mm256_maddubs_epi16(sizes, word);
        products[0][r] = _mm256_add_epi32(products[0][r], _mm256_madd_epi16(sum, ones));
      }
    }
  } else {
    // Sums of 8 products of at most 24 * 127 fit into 16 bits.
    MOE_UNROLL
    for (int64_t i = 0; i < 8; i += 4) {
      Ints words[4];
      weights.shift(load_ints(from[0] + i / 2), words);
      weights.shift(load_ints(from[0] + i / 2 + 1), words + 2);
      MOE_UNROLL
      for (int r = 0; r < M; ++r) {
        Ints sum = _mm256_setzero_si256();
        MOE_UNROLL
        for (int j = 0; j < 4; ++j) {
          const Ints word = all_ints(codes[r][at + i + j]);
          sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(words[j], word));
        }
        products[0][r] = _mm256_add_epi32(products[0][r], _mm256_madd_epi16(sum, ones));
      }
    }
  }
}

// Stores elements k and k + 1 of 8 lines in the panel's order.
C10_ALWAYS_INLINE void store_pair(const FloatPair& two, float* to, int64_t ld) {
  store_floats(to, two.first);
  store_floats(to + ld, two.second);
}
C10_ALWAYS_INLINE void store_pair(const FloatPair& two, BFloat16* to, int64_t) {
  const Ints words = _mm256_blend_epi16(
      _mm256_srli_epi32(_mm256_castps_si256(two.first), 16), _mm256_castps_si256(two.second),
      0xaa);
  store_ints(to, words);
}

struct Traits {
  static constexpr int64_t kRows = kMaxRows, kLines = low_bit_avx2::kLines;

  template <typename Micro>
  static constexpr bool multiplies() {
    return std::is_base_of_v<VecGemm<float, FusedMultiplyAdd>, Micro>;
  }
  static bool is_regular(const LowBitView& w, int64_t row, int64_t count) {
    return (!w.panels || row % kLines == 0) && count % kLines == 0 && w.depth % 8 == 0;
  }
};

#include <ATen/native/cpu/MoELowBitDecoder.h>

}  // namespace low_bit_avx2

using Avx2LowBit = low_bit_avx2::Decoder;

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native
#endif  // MOE_HAS_LOW_BIT_AVX2
