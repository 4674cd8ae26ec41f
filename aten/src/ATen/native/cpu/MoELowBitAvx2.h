#pragma once

// Weights of few bits decoded in AVX2 registers, for CPUs without what MoELowBitAvx512.h asks
// for, and for rows that are multiplied as float: 8 lines of a matrix side by side. The order
// of addition is that of VecGemm with FusedMultiplyAdd on packed panels.
//
//   int4, int8   a code becomes a mantissa by a mask and an exponent for which it counts in
//                ones: subtracting leaves the number; e2m1 through a look-up in 16 bytes
//   e4m3         exponent and mantissa become those of a float x that a power of two makes right,
//                E8M0 scales included. Where a code has no leading one, 2 x less its first one
//                is right, and elsewhere that is no less than x. (As denormal floats such codes
//                would take an Intel CPU 150 cycles.)
//
// What is rare is left to the caller: NaN codes, and where scales are folded those above 2^7
// and those that bfloat16 has to round.

#include <ATen/cpu/vec/vec.h>

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
#define MOE_HAS_LOW_BIT_AVX2

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {
namespace low_bit_avx2 {

constexpr int64_t kLines = 8;
constexpr int64_t kStretch = 8;   // double words of a line that are read at a time
constexpr int64_t kAhead = 4096;  // bytes that panels are fetched ahead

// ---- decoding: a double word of each of 8 lines into floats --------------------------------

// Bits [pos, pos + bits) of each double word, times `one`, minus `bias`. They become the
// mantissa of a number whose exponent makes bit `pos` count `one`, 1 or 1 / 2.
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

struct Int4 {
  static constexpr int64_t kBits = 4;
  struct Word {
    __m256i v, upper;
  };
  C10_ALWAYS_INLINE Word word(__m256i v) const {
    return {v, _mm256_srli_epi32(v, 12)};
  }
  template <int j>
  C10_ALWAYS_INLINE __m256 value(const Word& w, __m256) const {
    return j < 5 ? number_at<4 * (j < 5 ? j : 0), 4, 8>(w.v)
                 : number_at<4 * (j < 5 ? 0 : j - 3), 4, 8>(w.upper);
  }
};

// Twice the values plus 12, by code.
inline __m256i shifted_weights() {
  return _mm256_broadcastsi128_si256(
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

struct E2M1 {
  static constexpr int64_t kBits = 4;
  const __m256i table = shifted_weights(), low_bits = _mm256_set1_epi8(15);
  struct Word {
    __m256i numbers[2], upper[2];  // of even and odd k
  };
  C10_ALWAYS_INLINE Word word(__m256i v) const {
    const __m256i even = _mm256_shuffle_epi8(table, _mm256_and_si256(v, low_bits));
    const __m256i odd =
        _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi32(v, 4), low_bits));
    return {{even, odd}, {_mm256_srli_epi32(even, 16), _mm256_srli_epi32(odd, 16)}};
  }
  template <int j>
  C10_ALWAYS_INLINE __m256 value(const Word& w, __m256) const {
    return j < 6 ? number_at<j / 2 * 8 % 24, 5, 6, true>(w.numbers[j % 2])
                 : number_at<8, 5, 6, true>(w.upper[j % 2]);
  }
};

struct Int8 {
  static constexpr int64_t kBits = 8;
  struct Word {
    __m256i v, upper;
  };
  C10_ALWAYS_INLINE Word word(__m256i v) const {
    const __m256i positive = _mm256_xor_si256(v, _mm256_set1_epi8(static_cast<char>(0x80)));
    return {positive, _mm256_srli_epi32(positive, 16)};
  }
  template <int j>
  C10_ALWAYS_INLINE __m256 value(const Word& w, __m256) const {
    return number_at<j % 2 * 8, 8, 128>(j < 2 ? w.v : w.upper);
  }
};

struct E4M3 {
  static constexpr int64_t kBits = 8;
  struct Word {
    __m256i v;
  };
  C10_ALWAYS_INLINE Word word(__m256i v) const {
    return {v};
  }
  // `factor` is 2^kBias, times the scale where that is folded.
  static constexpr int kBias = 56;
  template <int j>
  C10_ALWAYS_INLINE __m256 value(const Word& w, __m256 factor) const {
    const __m256i top = j == 3 ? w.v : _mm256_slli_epi32(w.v, 24 - 8 * j);
    // 64 above the exponent of e4m3, whose bias is 7: 2^-kBias of the number.
    const __m256 x = _mm256_castsi256_ps(_mm256_or_si256(
        _mm256_and_si256(_mm256_srli_epi32(top, 4), _mm256_set1_epi32(0x07f00000)),
        _mm256_set1_epi32(64 << 23)));
    const __m256 least = _mm256_castsi256_ps(_mm256_set1_epi32(65 << 23));
    const __m256 size = _mm256_min_ps(x, _mm256_fmsub_ps(x, _mm256_set1_ps(2), least));
    const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(top), _mm256_set1_ps(-0.0f));
    return _mm256_mul_ps(_mm256_or_ps(size, sign), factor);
  }
};

// fn(integral_constant<int, j>()) for j < n.
template <int n, typename Fn, int... j>
C10_ALWAYS_INLINE void unrolled(const Fn& fn, std::integer_sequence<int, j...>) {
  (fn(std::integral_constant<int, j>()), ...);
}
template <int n, typename Fn>
C10_ALWAYS_INLINE void unrolled(const Fn& fn) {
  unrolled<n>(fn, std::make_integer_sequence<int, n>());
}

// ---- reading 8 lines ----------------------------------------------------------------------

// 32 bytes of 8 lines as 8 registers of 4 bytes of each.
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

// Of a line, from double word d0 on, `here` of at most kStretch.
template <typename Codes>
C10_ALWAYS_INLINE void read_lines(
    const LowBitView& w, const uint8_t* lines, int64_t d0, int64_t here, __m256i (&out)[8]) {
  if (w.panels) {
    for (const auto i : c10::irange(here)) {
      const uint8_t* from = lines + (d0 + i) * 64;
      _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_T1);
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      // Pairs of bytes lie apart, see LowBitView::at.
      out[i] = Codes::kBits == 4
          ? v
          : _mm256_shuffle_epi8(
                v, _mm256_broadcastsi128_si256(_mm_setr_epi8(
                       0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)));
    }
  } else if (here == kStretch) {
    transpose_lines(lines + d0 * 4, w.row_bytes, out);
  } else {
    alignas(32) uint8_t part[kLines][kStretch * 4] = {};
    for (const auto i : c10::irange(kLines)) {
      std::copy_n(lines + i * w.row_bytes + d0 * 4, here * 4, part[i]);
    }
    transpose_lines(part[0], kStretch * 4, out);
  }
}

// Scales of 8 lines, for one block of K after the other.
class LineScales {
 public:
  LineScales(const LowBitView& w, int64_t expert, int64_t row)
      : scale_(&w.scale),
        expert_(expert),
        row_(row),
        first_(w.scale.offset(expert, row, 0)),
        blocks_((w.depth + w.scale.block_cols - 1) / w.scale.block_cols),
        is_one_(scale_->row_stride == 0 || (scale_->block_rows % kLines == 0 &&
                                            row % scale_->block_rows % kLines == 0)) {}
  LineScales() = default;

  C10_ALWAYS_INLINE __m256 values(int64_t block) {
    if (scale_->is_pow2) {
      const __m256i b = bytes(block);
      const __m256 is_nan =
          _mm256_castsi256_ps(_mm256_cmpeq_epi32(b, _mm256_set1_epi32(255)));
      // Byte 0 is 2^-127.
      return _mm256_or_ps(
          is_nan,
          _mm256_castsi256_ps(_mm256_max_epi32(
              _mm256_slli_epi32(b, 23), _mm256_set1_epi32(0x00400000))));
    }
    if (is_one_) {
      return _mm256_set1_ps(*floats(block));
    }
    if (scale_->is_dense_along_rows()) {
      return _mm256_loadu_ps(floats(block));
    }
    load_blocks(block);
    return _mm256_castsi256_ps(
        _mm256_load_si256(reinterpret_cast<const __m256i*>(staged_[block % kLines])));
  }

  C10_ALWAYS_INLINE __m256 factors(int64_t block) {
    const __m256i b = bytes(block);
    rare_ = _mm256_or_si256(rare_, _mm256_cmpgt_epi32(b, _mm256_set1_epi32(134)));
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(E4M3::kBias)), 23));
  }
  // Whether products with e4m3 may be below the range of bfloat16, unless they are 0.
  C10_ALWAYS_INLINE bool are_small(int64_t block) {
    return !is_zero(small(block));
  }
  C10_NOINLINE bool are_numbers_small(int64_t block, const __m256i (&codes)[8], int64_t count) {
    __m256i any = _mm256_setzero_si256();
    for (const auto i : c10::irange(count)) {
      any = _mm256_or_si256(any, codes[i]);
    }
    return !is_zero(
        _mm256_and_si256(_mm256_and_si256(any, _mm256_set1_epi8(0x7f)), small(block)));
  }

  bool is_rare() const {
    return !is_zero(rare_);
  }

 private:
  static bool is_zero(__m256i x) {
    return _mm256_testz_si256(x, x) != 0;
  }

  C10_ALWAYS_INLINE __m256i small(int64_t block) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(16), bytes(block));
  }

  const uint8_t* bytes_from(int64_t block) const {
    return static_cast<const uint8_t*>(scale_->data) + first_ + block * scale_->col_stride;
  }
  const float* floats(int64_t block) const {
    return static_cast<const float*>(scale_->data) + first_ + block * scale_->col_stride;
  }

  C10_ALWAYS_INLINE __m256i bytes(int64_t block) {
    if (scale_->panels) {
      return _mm256_cvtepu8_epi32(_mm_loadu_si64(bytes_from(block)));
    }
    load_blocks(block);
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(staged_[block % kLines]));
  }

  // That block and its neighbours, 8 at a time, as double words.
  C10_ALWAYS_INLINE void load_blocks(int64_t block) {
    if (block / kLines != loaded_) {
      loaded_ = block / kLines;
      stage(loaded_ * kLines, std::min(kLines, blocks_ - loaded_ * kLines));
    }
  }

  C10_NOINLINE void stage(int64_t first, int64_t count) {
    if (count == kLines && scale_->col_stride == 1 && scale_->block_rows == 1) {
      if (scale_->is_pow2) {
        stage_bytes(bytes_from(first));
      } else {
        __m256i turned[8];
        transpose_lines(
            reinterpret_cast<const uint8_t*>(floats(first)), scale_->row_stride * 4, turned);
        for (const auto i : c10::irange(8)) {
          _mm256_store_si256(reinterpret_cast<__m256i*>(staged_[i]), turned[i]);
        }
      }
      return;
    }
    for (const auto line : c10::irange(kLines)) {
      for (const auto i : c10::irange(count)) {
        const int64_t k = (first + i) * scale_->block_cols;
        const int64_t from = scale_->offset(expert_, row_ + line, k);
        if (scale_->is_pow2) {
          staged_[i][line] = static_cast<const uint8_t*>(scale_->data)[from];
        } else {
          std::memcpy(
              &staged_[i][line], static_cast<const float*>(scale_->data) + from, sizeof(float));
        }
      }
    }
  }

  // 8 lines of 8 bytes, turned around.
  void stage_bytes(const uint8_t* from) {
    __m128i a[8], b[8];
    MOE_UNROLL
    for (int i = 0; i < 8; ++i) {
      a[i] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i * scale_->row_stride));
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
      auto* to = reinterpret_cast<__m256i*>(staged_[2 * i]);
      _mm256_store_si256(to, _mm256_cvtepu8_epi32(b[i]));
      _mm256_store_si256(to + 1, _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(b[i], b[i])));
    }
  }

  const ScaleView* scale_;
  int64_t expert_, row_;
  int64_t first_;  // offset of the first block
  int64_t blocks_;
  bool is_one_;  // of all lines
  __m256i rare_ = _mm256_setzero_si256();
  int64_t loaded_ = -1;  // the 8 blocks in staged_
  alignas(32) int32_t staged_[kLines][kLines];
};

// The largest code without its sign of what has been read: a NaN has all bits.
template <typename Codes>
struct SeenCodes {
  __m256i largest = _mm256_setzero_si256();

  C10_ALWAYS_INLINE void add(__m256i v) {
    if constexpr (std::is_same_v<Codes, E4M3>) {
      largest = _mm256_max_epu8(largest, _mm256_and_si256(v, _mm256_set1_epi8(0x7f)));
    }
  }
  bool has_nan() const {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, _mm256_set1_epi8(0x7f))) != 0;
  }
};

// ---- few rows --------------------------------------------------------------------------------

// Element k and the next one of a row.
C10_ALWAYS_INLINE void broadcast_pair(const float* x, __m256 (&out)[2]) {
  out[0] = _mm256_broadcast_ss(x);
  out[1] = _mm256_broadcast_ss(x + 1);
}

// c[m] = x[m] times the lines of Q groups, whose sums are made over `segment` elements at a
// time. Several groups, as a sum waits for its own last product.
template <typename Micro, typename Codes, Scaling scaling, int M, int Q>
bool multiply_lines(
    const LineGroup* groups, int64_t expert, const typename Micro::operand_t* const* x) {
  constexpr int kElements = 32 / Codes::kBits;  // of a double word
  const LowBitView& w = *groups[0].w;
  const int64_t depth = w.depth, total = depth / kElements;
  const int64_t segment = scaling == Scaling::Blocks ? w.scale.block_cols
      : Micro::kOneSum                                ? depth
                                                      : Micro::kSumDepth;
  int64_t end = std::min(segment, depth), sums_done = 0;
  Codes codes;
  LineScales scales[Q];
  SeenCodes<Codes> seen;
  const uint8_t* lines[Q];
  __m256 parts[Q][M], factors[Q];
  bool is_rare = false;
  MOE_UNROLL
  for (int q = 0; q < Q; ++q) {
    scales[q] = LineScales(*groups[q].w, expert, groups[q].row);
    lines[q] = groups[q].w->at(expert, groups[q].row, 0);
    factors[q] = _mm256_castsi256_ps(_mm256_set1_epi32((E4M3::kBias + 127) << 23));
    MOE_UNROLL
    for (int r = 0; r < M; ++r) {
      parts[q][r] = _mm256_setzero_ps();
    }
  }
  for (int64_t d0 = 0; d0 < total; d0 += kStretch) {
    const int64_t here = std::min(kStretch, total - d0);
    __m256i raw[Q][kStretch];
    MOE_UNROLL
    for (int q = 0; q < Q; ++q) {
      if (!groups[q].w->panels) {
        // What comes next lies behind, see LineGroup: in the order of addresses.
        MOE_UNROLL
        for (int i = 0; i < 4; ++i) {
          prefetch(lines[q] + groups[q].ahead + d0 * 32 + i * 64);
        }
      }
      read_lines<Codes>(*groups[q].w, lines[q], d0, here, raw[q]);
    }
    for (int64_t i = 0; i < here; ++i) {
      const int64_t k0 = (d0 + i) * kElements;
      typename Codes::Word words[Q];
      MOE_UNROLL
      for (int q = 0; q < Q; ++q) {
        const __m256i v = raw[q][i];
        seen.add(v);
        words[q] = codes.word(v);
        if constexpr (scaling == Scaling::Folded) {
          if (i == 0) {  // a stretch is a block
            factors[q] = scales[q].factors(d0 / kStretch);
          }
        }
      }
      unrolled<kElements / 2>([&](auto pair) {
        constexpr int j = 2 * decltype(pair)::value;
        __m256 left[M][2];
        MOE_UNROLL
        for (int r = 0; r < M; ++r) {
          broadcast_pair(x[r] + k0 + j, left[r]);
        }
        MOE_UNROLL
        for (int q = 0; q < Q; ++q) {
          const __m256 first = codes.template value<j>(words[q], factors[q]);
          const __m256 second = codes.template value<j + 1>(words[q], factors[q]);
          MOE_UNROLL
          for (int r = 0; r < M; ++r) {
            parts[q][r] = _mm256_fmadd_ps(left[r][0], first, parts[q][r]);
            parts[q][r] = _mm256_fmadd_ps(left[r][1], second, parts[q][r]);
          }
        }
      });
      if (k0 + kElements < end) {
        continue;
      }
      // A sum is whole: c = sum, c + sum, or c + scale * sum.
      const int64_t at = sums_done++;
      end = std::min(end + segment, depth);
      MOE_UNROLL
      for (int q = 0; q < Q; ++q) {
        MOE_UNROLL
        for (int r = 0; r < M; ++r) {
          float* c = groups[q].c + r * kPanelCols;
          const __m256 before = at == 0 ? _mm256_setzero_ps() : _mm256_loadu_ps(c);
          _mm256_storeu_ps(
              c, scaling == Scaling::Blocks
                  ? _mm256_fmadd_ps(parts[q][r], scales[q].values(at), before)
                  : at == 0 ? parts[q][r]
                            : _mm256_add_ps(before, parts[q][r]));
          parts[q][r] = _mm256_setzero_ps();
        }
      }
    }
  }
  for (int q = 0; q < Q; ++q) {
    if constexpr (scaling == Scaling::Rows) {
      const __m256 scale = scales[q].values(0);
      for (int r = 0; r < M; ++r) {
        float* c = groups[q].c + r * kPanelCols;
        _mm256_storeu_ps(c, _mm256_mul_ps(_mm256_loadu_ps(c), scale));
      }
    }
    is_rare |= scaling == Scaling::Folded && scales[q].is_rare();
  }
  return !is_rare && !seen.has_nan();
}

template <typename Row>
struct Kernel {
  bool (*run)(const LineGroup*, int64_t, const Row* const*) = nullptr;
  size_t groups = 1;  // of lines at a time
};

template <typename Micro, typename Codes, Scaling scaling>
Kernel<typename Micro::operand_t> multiply_lines_of(int64_t rows) {
  using Found = Kernel<typename Micro::operand_t>;
  return rows == 1 ? Found{&multiply_lines<Micro, Codes, scaling, 1, 4>, 4}
      : rows == 2  ? Found{&multiply_lines<Micro, Codes, scaling, 2, 2>, 2}
                   : Found{&multiply_lines<Micro, Codes, scaling, 4, 1>, 1};
}

template <typename Micro>
Kernel<typename Micro::operand_t> find_multiply(const LowBitView& w, int64_t rows) {
  switch (w.codes) {
    case LowBitCodes::Int4:
      return multiply_lines_of<Micro, Int4, Scaling::Blocks>(rows);
    case LowBitCodes::E2M1:
      return multiply_lines_of<Micro, E2M1, Scaling::Blocks>(rows);
    case LowBitCodes::Int8:
      return multiply_lines_of<Micro, Int8, Scaling::Rows>(rows);
    default:
      return w.scaling == Scaling::Folded
          ? multiply_lines_of<Micro, E4M3, Scaling::Folded>(rows)
          : w.scaling == Scaling::Rows
          ? multiply_lines_of<Micro, E4M3, Scaling::Rows>(rows)
          : multiply_lines_of<Micro, E4M3, Scaling::Blocks>(rows);
  }
}

// Runs the kernel find(rows) for all rows, 4, 2 or 1 at a time, and all groups.
template <typename Row, typename FindFn>
bool multiply_groups(
    const std::vector<LineGroup>& groups, int64_t expert, int64_t rows, const Row* const* lines,
    const FindFn& find) {
  for (int64_t r0 = 0; r0 < rows; r0 += 4) {
    const int64_t count = std::min<int64_t>(4, rows - r0);
    int64_t padded = count == 3 ? 4 : count;
    Kernel<Row> kernel = find(padded);
    if (groups.size() < kernel.groups) {
      padded = 4;
      kernel = find(padded);
    }
    const Row* here[4];
    for (const auto r : c10::irange(padded)) {
      here[r] = lines[r0 + std::min(r, count - 1)];
    }
    for (size_t g = 0; g < groups.size(); g += kernel.groups) {
      // The last ones once more rather than fewer at a time.
      const LineGroup* from = &groups[std::min(g, groups.size() - kernel.groups)];
      alignas(32) float sums[4 * kPanelCols];
      LineGroup some[4];
      for (const auto q : c10::irange(kernel.groups)) {
        some[q] = from[q];
        some[q].c = padded == count ? from[q].c + r0 * kPanelCols : sums + q * kLines;
      }
      if (!kernel.run(some, expert, here)) {
        return false;
      }
      for (size_t q = 0; padded != count && q < kernel.groups; ++q) {
        for (const auto r : c10::irange(count)) {
          std::copy_n(
              sums + r * kPanelCols + q * kLines, kLines, from[q].c + (r0 + r) * kPanelCols);
        }
      }
    }
  }
  return true;
}

// ---- int8 rows ---------------------------------------------------------------------------------

template <int M, int Q>
bool multiply_int8_lines(const LineGroup* groups, int64_t expert, const void* const* x) {
  const int64_t depth = groups[0].w->depth, total = depth / 8;
  const __m256i table = shifted_weights(), low_bits = _mm256_set1_epi8(15);
  const __m256i ones = _mm256_set1_epi16(1);
  LineScales scales[Q];
  const uint8_t* lines[Q];
  __m256 sums[Q][M];
  MOE_UNROLL
  for (int q = 0; q < Q; ++q) {
    scales[q] = LineScales(*groups[q].w, expert, groups[q].row);
    lines[q] = groups[q].w->at(expert, groups[q].row, 0);
    MOE_UNROLL
    for (int r = 0; r < M; ++r) {
      sums[q][r] = _mm256_setzero_ps();
    }
  }
  for (int64_t d0 = 0; d0 < total; d0 += kStretch) {
    const int64_t here = std::min(kStretch, total - d0);
    __m256i raw[Q][kStretch];
    MOE_UNROLL
    for (int q = 0; q < Q; ++q) {
      if (!groups[q].w->panels) {
        MOE_UNROLL
        for (int i = 0; i < 4; ++i) {
          prefetch(lines[q] + groups[q].ahead + d0 * 32 + i * 64);
        }
      }
      read_lines<E2M1>(*groups[q].w, lines[q], d0, here, raw[q]);
    }
    for (int64_t piece = 0; piece < here; piece += 4) {
      const int64_t block = (d0 + piece) / 4;
      __m256i products[Q][M];
      MOE_UNROLL
      for (int r = 0; r < M; ++r) {
        void* record = const_cast<void*>(x[r]);
        MOE_UNROLL
        for (int q = 0; q < Q; ++q) {
          products[q][r] = _mm256_set1_epi32(Int8Row::corrections(record, depth)[block]);
        }
      }
      // Sums of 8 products of at most 24 * 127 fit into 16 bits.
      MOE_UNROLL
      for (int64_t i = piece; i < piece + 4; i += 2) {
        MOE_UNROLL
        for (int q = 0; q < Q; ++q) {
          __m256i weights[4];
          MOE_UNROLL
          for (int half = 0; half < 2; ++half) {
            const __m256i v = raw[q][i + half];
            weights[2 * half] = _mm256_shuffle_epi8(table, _mm256_and_si256(v, low_bits));
            weights[2 * half + 1] = _mm256_shuffle_epi8(
                table, _mm256_and_si256(_mm256_srli_epi16(v, 4), low_bits));
          }
          MOE_UNROLL
          for (int r = 0; r < M; ++r) {
            const auto* codes = static_cast<const float*>(x[r]) + 2 * (d0 + i);
            __m256i sum = _mm256_setzero_si256();
            MOE_UNROLL
            for (int j = 0; j < 4; ++j) {
              const __m256i word = _mm256_castps_si256(_mm256_broadcast_ss(codes + j));
              sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights[j], word));
            }
            products[q][r] = _mm256_add_epi32(products[q][r], _mm256_madd_epi16(sum, ones));
          }
        }
      }
      MOE_UNROLL
      for (int q = 0; q < Q; ++q) {
        const __m256 scale = scales[q].values(block);
        MOE_UNROLL
        for (int r = 0; r < M; ++r) {
          sums[q][r] = _mm256_fmadd_ps(
              _mm256_mul_ps(_mm256_cvtepi32_ps(products[q][r]), scale),
              _mm256_set1_ps(Int8Row::scales(const_cast<void*>(x[r]), depth)[block]),
              sums[q][r]);
        }
      }
    }
  }
  MOE_UNROLL
  for (int q = 0; q < Q; ++q) {
    MOE_UNROLL
    for (int r = 0; r < M; ++r) {
      _mm256_storeu_ps(groups[q].c + r * kPanelCols, sums[q][r]);
    }
  }
  return true;
}

inline Kernel<void> find_multiply_int8(int64_t rows) {
  return rows == 1 ? Kernel<void>{&multiply_int8_lines<1, 2>, 2}
      : rows == 2  ? Kernel<void>{&multiply_int8_lines<2, 2>, 2}
                   : Kernel<void>{&multiply_int8_lines<4, 1>, 1};
}

// ---- into a panel --------------------------------------------------------------------------------

// Elements k and k + 1 of 8 lines, as the panel has them.
C10_ALWAYS_INLINE void store_pair(__m256 first, __m256 second, float* to, int64_t ld) {
  _mm256_storeu_ps(to, first);
  _mm256_storeu_ps(to + ld, second);
}
C10_ALWAYS_INLINE void store_pair(__m256 first, __m256 second, BFloat16* to, int64_t) {
  const __m256i words = _mm256_blend_epi16(
      _mm256_srli_epi32(_mm256_castps_si256(first), 16), _mm256_castps_si256(second), 0xaa);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
}

// 8 lines, [k0, k0 + depth) of K, into the columns from `panel` on of a tile of `ld` columns.
template <typename operand_t, typename Codes>
bool pack_lines_8(
    const LowBitView& w, int64_t expert, int64_t row, int64_t k0, int64_t depth, int64_t ld,
    operand_t* panel) {
  constexpr int kElements = 32 / Codes::kBits;
  const bool folded = w.scaling == Scaling::Folded;
  Codes codes;
  LineScales scales(w, expert, row);
  SeenCodes<Codes> seen;
  __m256 factor = _mm256_castsi256_ps(_mm256_set1_epi32((E4M3::kBias + 127) << 23));
  const uint8_t* lines = w.at(expert, row, 0);
  const int64_t end = (k0 + depth) / kElements;
  bool is_rare = false;
  for (int64_t d0 = k0 / kElements; d0 < end; d0 += kStretch) {
    const int64_t here = std::min(kStretch, end - d0);
    __m256i raw[kStretch];
    read_lines<Codes>(w, lines, d0, here, raw);
    if (std::is_same_v<Codes, E4M3> && folded) {
      factor = scales.factors(d0 / kStretch);
      is_rare |= std::is_same_v<operand_t, BFloat16> && scales.are_small(d0 / kStretch) &&
          scales.are_numbers_small(d0 / kStretch, raw, here);
    }
    for (const auto i : c10::irange(here)) {
      seen.add(raw[i]);
      const typename Codes::Word word = codes.word(raw[i]);
      operand_t* to = panel + ((d0 + i) * kElements - k0) * ld;
      unrolled<kElements / 2>([&](auto pair) {
        constexpr int j = 2 * decltype(pair)::value;
        store_pair(
            codes.template value<j>(word, factor), codes.template value<j + 1>(word, factor),
            to + j * ld, ld);
      });
    }
  }
  return !is_rare && !scales.is_rare() && !seen.has_nan();
}

template <typename operand_t>
auto find_pack(LowBitCodes codes) {
  return codes == LowBitCodes::E4M3 ? &pack_lines_8<operand_t, E4M3>
      : codes == LowBitCodes::Int8  ? &pack_lines_8<operand_t, Int8>
      : codes == LowBitCodes::E2M1  ? &pack_lines_8<operand_t, E2M1>
                                    : &pack_lines_8<operand_t, Int4>;
}

// Denormal numbers count, whatever torch.set_flush_denormal says.
struct KeepDenormals {
  static constexpr uint32_t kFlags = 0x8040;
  const uint32_t before = _mm_getcsr();

  KeepDenormals() {
    _mm_setcsr(before & ~kFlags);
  }
  C10_DISABLE_COPY_AND_ASSIGN(KeepDenormals);
  ~KeepDenormals() {
    _mm_setcsr(before);
  }
};

}  // namespace low_bit_avx2

// What LowBitSource asks, see NoLowBit.
struct Avx2LowBit {
  static constexpr int64_t kRows = 4;
  static constexpr int64_t kLines = low_bit_avx2::kLines;

  template <typename Micro>
  static constexpr bool multiplies() {
    return std::is_base_of_v<VecGemm<float, FusedMultiplyAdd>, Micro>;
  }
  static bool is_available() {
    return true;
  }
  static bool is_regular(const LowBitView& w, int64_t row, int64_t count) {
    return (!w.panels || row % kLines == 0) && count % kLines == 0 && w.depth % 8 == 0;
  }

  template <typename Micro>
  static bool multiply(
      const std::vector<LineGroup>& groups, int64_t expert, int64_t rows,
      const typename Micro::operand_t* const* lines) {
    const LowBitView& w = *groups[0].w;
    if (w.codes == LowBitCodes::E4M3 &&
        (_mm_getcsr() & low_bit_avx2::KeepDenormals::kFlags) != 0) {
      return false;
    }
    return low_bit_avx2::multiply_groups(groups, expert, rows, lines, [&](int64_t m) {
      return low_bit_avx2::find_multiply<Micro>(w, m);
    });
  }

  template <typename operand_t>
  static bool multiply_int8(
      const std::vector<LineGroup>& groups, int64_t expert, int64_t rows,
      const operand_t* const* lines) {
    return low_bit_avx2::multiply_groups(
        groups, expert, rows, reinterpret_cast<const void* const*>(lines),
        &low_bit_avx2::find_multiply_int8);
  }

  // Columns of a span from column `at` of a panel on.
  template <typename operand_t>
  static bool pack(
      const LowBitView& w, int64_t expert, int64_t row, int64_t count, int64_t k0, int64_t depth,
      int64_t at, int64_t tile_cols, operand_t* panel) {
    constexpr int64_t v = kWordElements<operand_t>;
    if (!is_regular(w, row, count) || k0 % 32 != 0 || depth % 8 != 0 || at % kLines != 0 ||
        (w.scaling == Scaling::Folded && w.scale.block_cols != 32)) {
      return false;
    }
    const low_bit_avx2::KeepDenormals keep;
    const auto fn = low_bit_avx2::find_pack<operand_t>(w.codes);
    for (int64_t n = 0; n < count; n += kLines) {
      const int64_t in_tile = (at + n) % tile_cols;
      operand_t* to = panel + (at + n - in_tile) * round_up(depth, v) + in_tile * v;
      if (!fn(w, expert, row + n, k0, depth, tile_cols, to)) {
        return false;
      }
    }
    return true;
  }
};

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native
#endif  // MOE_HAS_LOW_BIT_AVX2
