#pragma once

// Weights of few bits decoded in AVX512 registers: for a few rows right before they are
// multiplied, else into the packed panel. A register holds 16 lines of a matrix side by side,
// a word of two bfloat16 of each, or where rows are floats two floats by a shift and a mask. The
// order of addition is that of VecGemm with DotProducts, or with floats, on packed panels.
// Included by MoELowBit.h.
//
//   e4m3, int8   two table look-ups of 128 bytes each, for the two bytes of a bfloat16
//   4 bits       one look-up of 32 bytes, of which a bit chooses the byte
//   folded E8M0  tables times 2^kBias, from whose exponents an unsigned saturating
//                subtraction takes what is too much: 0 stays 0. Floats are multiplied
//
// What is rare is left to the caller, who decodes one element at a time: NaN codes where
// scales are folded, scales above 2^kBias, and columns that are not 16 at a time.

#include <ATen/cpu/vec/vec.h>

#include <limits>

#if __has_include(<ATen/native/cpu/MoEFastGemm.h>)
#include <ATen/native/cpu/MoEFastGemm.h>
#endif

#if defined(MOE_HAS_AMX) && defined(__GNUC__)
#define MOE_HAS_LOW_BIT_AVX512
#endif

#ifdef MOE_HAS_LOW_BIT_AVX512
// Of a lambda.
#define MOE_INLINE __attribute__((always_inline))
// The files of a capability are compiled for AVX512; only what is between these may hold
// more.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512vbmi,avx512bf16,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512vbmi,avx512bf16,avx512vnni")
#endif

#include <ATen/native/cpu/MoELowBitDecode.h>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {
namespace low_bit {

constexpr int64_t kBlock = 32;    // elements: those of the smallest block of a scale
// VecGemm's: one sum of bfloat16.
template <typename Row>
constexpr int64_t kSumDepth = std::is_same_v<Row, float> ? VecGemm<float>::kSumDepth
                                                         : std::numeric_limits<int64_t>::max();

// ---- few rows ---------------------------------------------------------------------------

C10_ALWAYS_INLINE __m512 dot_word(__m512 sum, __m512i words, const BFloat16* x) {
  int32_t word;
  std::memcpy(&word, x, sizeof(word));
  return _mm512_dpbf16_ps(
      sum, reinterpret_cast<__m512bh>(words), reinterpret_cast<__m512bh>(_mm512_set1_epi32(word)));
}

// `factor` is the scale where that is folded.
template <bool folded>
C10_ALWAYS_INLINE __m512 add_word(__m512 sum, __m512i words, const BFloat16* x, __m512) {
  return dot_word(sum, words, x);
}

template <bool folded>
C10_ALWAYS_INLINE __m512 add_word(__m512 sum, __m512i words, const float* x, __m512 factor) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
  __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  __m512 second = _mm512_castsi512_ps(_mm512_and_si512(words, upper));
  if constexpr (folded) {
    first = _mm512_mul_ps(first, factor);
    second = _mm512_mul_ps(second, factor);
  }
  return _mm512_fmadd_ps(
      _mm512_set1_ps(x[1]), second, _mm512_fmadd_ps(_mm512_set1_ps(x[0]), first, sum));
}

// c[m] = x[m] times the lines of Q groups, whose sums are made over `segment` elements at a
// time. Several groups, as a sum waits for its own last product. A block of kBlock elements is
// unrolled and no more: there are a hundred of these kernels to compile, and to fetch.
template <typename Row, typename Codes, Scaling scaling, int64_t segment, int M, int Q>
bool multiply_lines(const LineGroup* groups, int64_t expert, const Row* const* x) {
  constexpr bool folded = scaling == Scaling::Folded;
  constexpr int64_t kElements = 32 / Codes::kBits;  // of a double word
  constexpr int64_t kWords = kElements / 2;
  constexpr int64_t kPiece = kBlock / kElements;
  const int64_t depth = groups[0].w->depth, total = depth / kElements;
  Codes codes;
  LineScales scales[Q];
  const uint8_t* lines[Q];
  __m512 sums[Q][M], parts[Q][M];
  __m512i raw[Q][kStretch];
  MOE_UNROLL
  for (int q = 0; q < Q; ++q) {
    scales[q].begin(*groups[q].w, expert, groups[q].row);
    lines[q] = groups[q].w->at(expert, groups[q].row, 0);
    MOE_UNROLL
    for (int r = 0; r < M; ++r) {
      sums[q][r] = parts[q][r] = _mm512_setzero_ps();
    }
  }
  for (int64_t d0 = 0; d0 < total; d0 += kPiece) {
    if (d0 % kStretch == 0) {
      MOE_UNROLL
      for (int q = 0; q < Q; ++q) {
        prefetch(groups[q], lines[q] + d0 * 64);
        read_lines<Codes>(*groups[q].w, lines[q], d0, total, raw[q]);
      }
    }
    __m512i minus[Q] = {};
    __m512 factors[Q] = {};
    if constexpr (folded) {
      MOE_UNROLL
      for (int q = 0; q < Q; ++q) {
        if constexpr (std::is_same_v<Row, float>) {
          factors[q] = scales[q].values(d0 / kPiece);
        } else {
          minus[q] = scales[q].minus(d0 / kPiece);
        }
      }
    }
    const auto add = [&](int64_t i) MOE_INLINE {
      MOE_UNROLL
      for (int q = 0; q < Q; ++q) {
        __m512i words[kWords];
        codes.decode(raw[q][i % kStretch], minus[q], words);
        MOE_UNROLL
        for (int64_t j = 0; j < kWords; ++j) {
          MOE_UNROLL
          for (int r = 0; r < M; ++r) {
            parts[q][r] =
                add_word<folded>(parts[q][r], words[j], x[r] + i * kElements + 2 * j, factors[q]);
          }
        }
      }
    };
    if (d0 + kPiece <= total) {
      MOE_UNROLL
      for (int64_t i = 0; i < kPiece; ++i) {
        add(d0 + i);
      }
    } else {
      for (int64_t i = d0; i < total; ++i) {
        add(i);
      }
    }
    const int64_t next = (d0 + kPiece) * kElements;
    if (segment > kBlock && next % segment != 0 && next < depth) {
      continue;
    }
    MOE_UNROLL
    for (int q = 0; q < Q; ++q) {
      __m512 scale = _mm512_set1_ps(1);
      if constexpr (scaling == Scaling::Blocks) {
        scale = scales[q].values(d0 * kElements / segment);
      }
      MOE_UNROLL
      for (int r = 0; r < M; ++r) {
        sums[q][r] = scaling == Scaling::Blocks ? _mm512_fmadd_ps(parts[q][r], scale, sums[q][r])
                                                : _mm512_add_ps(sums[q][r], parts[q][r]);
        parts[q][r] = _mm512_setzero_ps();
      }
    }
  }
  bool is_rare = codes.is_rare();
  for (int q = 0; q < Q; ++q) {
    __m512 scale = _mm512_set1_ps(1);
    if constexpr (scaling == Scaling::Rows) {
      scale = scales[q].values(0);
    }
    for (int r = 0; r < M; ++r) {
      _mm512_storeu_ps(
          groups[q].c + r * kPanelCols,
          scaling == Scaling::Rows ? _mm512_mul_ps(sums[q][r], scale) : sums[q][r]);
    }
    is_rare = is_rare || scales[q].is_rare();
  }
  return !is_rare;
}

// A kernel for so many rows, and how many groups of lines it takes.
template <typename Row>
struct Kernel {
  bool (*run)(const LineGroup*, int64_t, const Row* const*) = nullptr;
  int groups = 1;
};

// By rows: 1, 2, 4 and 8.
template <typename Row, typename Codes, Scaling scaling, int64_t segment = kSumDepth<Row>>
Kernel<Row> multiply_lines_of(int64_t rows) {
  return rows == 1
      ? Kernel<Row>{&multiply_lines<Row, Codes, scaling, segment, 1, 2>, 2}
      : rows == 2 ? Kernel<Row>{&multiply_lines<Row, Codes, scaling, segment, 2, 2>, 2}
      : rows == 4 ? Kernel<Row>{&multiply_lines<Row, Codes, scaling, segment, 4, 1>, 1}
                  : Kernel<Row>{&multiply_lines<Row, Codes, scaling, segment, 8, 1>, 1};
}

template <typename Row>
Kernel<Row> find_multiply(const LowBitView& w, int64_t rows) {
  const int64_t block = w.scale.block_cols;
  switch (w.scaling) {
    case Scaling::Folded: {
      using Codes = std::conditional_t<std::is_same_v<Row, float>, E4M3, FoldedE4M3>;
      return multiply_lines_of<Row, Codes, Scaling::Folded>(rows);
    }
    case Scaling::Rows:
      return w.codes == LowBitCodes::E4M3
          ? multiply_lines_of<Row, E4M3, Scaling::Rows>(rows)
          : w.codes == LowBitCodes::Int8
          ? multiply_lines_of<Row, Int8, Scaling::Rows>(rows)
          : Kernel<Row>{};
    default:
      break;
  }
  if (w.codes == LowBitCodes::E4M3 && block == 128) {
    return multiply_lines_of<Row, E4M3, Scaling::Blocks, 128>(rows);
  }
  if (w.codes == LowBitCodes::E2M1 && block == 32) {
    return multiply_lines_of<Row, E2M1, Scaling::Blocks, 32>(rows);
  }
  if (w.codes == LowBitCodes::Int4) {
    return block == 32 ? multiply_lines_of<Row, Int4, Scaling::Blocks, 32>(rows)
                       : multiply_lines_of<Row, Int4, Scaling::Blocks, 128>(rows);
  }
  return {};
}

// ---- into a panel --------------------------------------------------------------------------

template <typename Codes>
bool pack_lines_16(
    const LowBitView& w, int64_t expert, int64_t row, int64_t k0, int64_t depth, BFloat16* panel) {
  constexpr int64_t kElements = 32 / Codes::kBits;
  constexpr int64_t kWords = kElements / 2;
  Codes codes;
  LineScales scales;
  scales.begin(w, expert, row);
  const uint8_t* lines = w.at(expert, row, 0);
  const int64_t end = (k0 + depth) / kElements;
  for (int64_t d0 = k0 / kElements; d0 < end; d0 += kStretch) {
    __m512i raw[kStretch];
    read_lines<Codes>(w, lines, d0, end, raw);
    __m512i minus = _mm512_setzero_si512();
    for (const auto i : c10::irange(std::min(kStretch, end - d0))) {
      if constexpr (std::is_same_v<Codes, FoldedE4M3>) {
        if (i % 8 == 0) {
          minus = scales.minus((d0 + i) / 8);
        }
      }
      __m512i words[kWords];
      codes.decode(raw[i], minus, words);
      BFloat16* to = panel + ((d0 + i) * kElements - k0) * kPanelCols;
      for (const auto j : c10::irange(kWords)) {
        _mm512_storeu_si512(to + 2 * j * kPanelCols, words[j]);
      }
    }
  }
  return !codes.is_rare() && !scales.is_rare();
}

inline auto find_pack(const LowBitView& w) {
  switch (w.codes) {
    case LowBitCodes::E4M3:
      return w.scaling == Scaling::Folded ? &pack_lines_16<FoldedE4M3> : &pack_lines_16<E4M3>;
    case LowBitCodes::Int8:
      return &pack_lines_16<Int8>;
    case LowBitCodes::E2M1:
      return &pack_lines_16<E2M1>;
    default:
      return &pack_lines_16<Int4>;
  }
}

// ---- int8 rows --------------------------------------------------------------------------------

// Twice the weights plus 12, by code: 0 to 24.
inline __m512i shifted_weights() {
  return _mm512_broadcast_i32x4(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

template <int M, int Q>
bool multiply_int8_lines(const LineGroup* groups, int64_t expert, const void* const* x) {
  constexpr int64_t kPiece = Int8Row::kBlock / 8;
  const int64_t depth = groups[0].w->depth, total = depth / 8;
  const __m512i table = shifted_weights(), low_bits = _mm512_set1_epi8(15);
  __m512i raw[Q][kStretch];
  LineScales scales[Q];
  const uint8_t* lines[Q];
  __m512 sums[Q][M];
  const int32_t* codes[M];
  const float* row_scales[M];
  const int32_t* corrections[M];
  MOE_UNROLL
  for (int q = 0; q < Q; ++q) {
    scales[q].begin(*groups[q].w, expert, groups[q].row);
    lines[q] = groups[q].w->at(expert, groups[q].row, 0);
    MOE_UNROLL
    for (int r = 0; r < M; ++r) {
      sums[q][r] = _mm512_setzero_ps();
    }
  }
  MOE_UNROLL
  for (int r = 0; r < M; ++r) {
    void* record = const_cast<void*>(x[r]);
    codes[r] = reinterpret_cast<const int32_t*>(Int8Row::codes(record));
    row_scales[r] = Int8Row::scales(record, depth);
    corrections[r] = Int8Row::corrections(record, depth);
  }
  for (int64_t d0 = 0; d0 < total; d0 += kPiece) {
    if (d0 % kStretch == 0) {
      MOE_UNROLL
      for (int q = 0; q < Q; ++q) {
        prefetch(groups[q], lines[q] + d0 * 64);
        read_lines<E2M1>(*groups[q].w, lines[q], d0, total, raw[q]);
      }
    }
    const int64_t block = d0 / kPiece;
    __m512i products[Q][M];
    MOE_UNROLL
    for (int q = 0; q < Q; ++q) {
      MOE_UNROLL
      for (int r = 0; r < M; ++r) {
        products[q][r] = _mm512_set1_epi32(corrections[r][block]);
      }
    }
    MOE_UNROLL
    for (int64_t i = d0; i < d0 + kPiece; ++i) {
      MOE_UNROLL
      for (int q = 0; q < Q; ++q) {
        const __m512i v = raw[q][i % kStretch];
        const __m512i even = _mm512_shuffle_epi8(table, _mm512_and_si512(v, low_bits));
        const __m512i odd =
            _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(v, 4), low_bits));
        MOE_UNROLL
        for (int r = 0; r < M; ++r) {
          const int32_t* at = codes[r] + 2 * i;
          products[q][r] = _mm512_dpbusd_epi32(products[q][r], even, _mm512_set1_epi32(at[0]));
          products[q][r] = _mm512_dpbusd_epi32(products[q][r], odd, _mm512_set1_epi32(at[1]));
        }
      }
    }
    MOE_UNROLL
    for (int q = 0; q < Q; ++q) {
      const __m512 scale = scales[q].values(block);
      MOE_UNROLL
      for (int r = 0; r < M; ++r) {
        sums[q][r] = _mm512_fmadd_ps(
            _mm512_mul_ps(_mm512_cvtepi32_ps(products[q][r]), scale),
            _mm512_set1_ps(row_scales[r][block]), sums[q][r]);
      }
    }
  }
  bool is_rare = false;
  for (int q = 0; q < Q; ++q) {
    for (int r = 0; r < M; ++r) {
      _mm512_storeu_ps(groups[q].c + r * kPanelCols, sums[q][r]);
    }
    is_rare = is_rare || scales[q].is_rare();
  }
  return !is_rare;
}

inline Kernel<void> find_multiply_int8(int64_t rows) {
  return rows == 1   ? Kernel<void>{&multiply_int8_lines<1, 2>, 2}
      : rows == 2    ? Kernel<void>{&multiply_int8_lines<2, 2>, 2}
      : rows == 4    ? Kernel<void>{&multiply_int8_lines<4, 2>, 2}
                     : Kernel<void>{&multiply_int8_lines<8, 1>, 1};
}

// find(rows) is a Kernel: runs it for all rows, 8, 4, 2 or 1 at a time, and all groups.
template <typename Row, typename FindFn>
bool multiply_groups(
    const std::vector<LineGroup>& groups, int64_t expert, int64_t rows, const Row* const* lines,
    const FindFn& find) {
  for (int64_t r0 = 0; r0 < rows; r0 += 8) {
    const int64_t count = std::min<int64_t>(8, rows - r0);
    const int64_t padded = count <= 2 ? count : count <= 4 ? 4 : 8;
    const Row* here[8];
    for (const auto r : c10::irange(padded)) {
      here[r] = lines[r0 + std::min(r, count - 1)];
    }
    const Kernel<Row> kernel = find(padded);
    if (kernel.run == nullptr) {
      return false;
    }
    for (size_t g = 0; g < groups.size(); g += kernel.groups) {
      alignas(64) float sums[2][8 * kPanelCols];
      LineGroup some[2];
      for (int q = 0; q < kernel.groups; ++q) {
        some[q] = groups[std::min(g + q, groups.size() - 1)];
        some[q].c = padded == count ? some[q].c + r0 * kPanelCols : sums[q];
      }
      if (!kernel.run(some, expert, here)) {
        return false;
      }
      for (int q = 0; padded != count && q < kernel.groups; ++q) {
        float* c = groups[std::min(g + q, groups.size() - 1)].c + r0 * kPanelCols;
        for (const auto r : c10::irange(count)) {
          std::copy_n(sums[q] + r * kPanelCols, kPanelLines, c + r * kPanelCols);
        }
      }
    }
  }
  return true;
}

}  // namespace low_bit

// What LowBitSource asks, see NoLowBit.
struct Avx512LowBit {
  static constexpr int64_t kRows = 8;
  static constexpr int64_t kLines = kPanelLines;

  template <typename Micro>
  static constexpr bool multiplies() {
    return std::is_base_of_v<VecGemm<BFloat16, DotProducts>, Micro> ||
        std::is_base_of_v<VecGemm<float>, Micro>;
  }

  static bool is_available() {
    static const bool found = has_instructions("avx512_vbmi") &&
        has_instructions("avx512_bf16") && has_instructions("avx512_vnni");
    return found;
  }

  static bool is_regular(const LowBitView& w, int64_t row, int64_t count) {
    return row % kPanelLines == 0 && count % kPanelLines == 0 &&
        w.depth % (w.scaling == Scaling::Rows ? 8 : 32) == 0;
  }

  // The groups are of one format.
  template <typename Micro>
  static bool multiply(
      const std::vector<LineGroup>& groups, int64_t expert, int64_t rows,
      const typename Micro::operand_t* const* lines) {
    using Row = typename Micro::operand_t;
    return low_bit::multiply_groups(groups, expert, rows, lines, [&](int64_t m) {
      return low_bit::find_multiply<Row>(*groups[0].w, m);
    });
  }

  template <typename operand_t>
  static bool multiply_int8(
      const std::vector<LineGroup>& groups, int64_t expert, int64_t rows,
      const operand_t* const* lines) {
    return low_bit::multiply_groups(
        groups, expert, rows, reinterpret_cast<const void* const*>(lines),
        &low_bit::find_multiply_int8);
  }

  template <typename operand_t>
  static bool pack(
      const LowBitView& w, int64_t expert, int64_t row, int64_t count, int64_t k0, int64_t depth,
      int64_t at, int64_t tile_cols, operand_t* panel) {
    if (!std::is_same_v<operand_t, BFloat16> || tile_cols != kPanelCols ||
        !is_regular(w, row, count) || k0 % 32 != 0 || depth % 8 != 0 ||
        (w.scaling == Scaling::Folded && w.scale.block_cols != 32)) {
      return false;
    }
    auto* columns = reinterpret_cast<BFloat16*>(panel) + 2 * at;
    const auto fn = low_bit::find_pack(w);
    for (int64_t n = 0; n < count; n += kPanelLines) {
      if (!fn(w, expert, row + n, k0, depth, columns + 2 * n)) {
        return false;
      }
    }
    return true;
  }
};

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // MOE_HAS_LOW_BIT_AVX512
