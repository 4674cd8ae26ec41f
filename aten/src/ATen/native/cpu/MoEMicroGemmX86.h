#pragma once

// Faster micro-GEMMs for x86 than those of MoEMicroGemm.h. They fetch the next panel ahead and
// pack panels in registers (MoEPackingX86.h). bfloat16 uses AMX tiles (MoEAmx.h) or AVX512-BF16 if these
// are faster than floats. Others are for few rows.

#include <ATen/native/cpu/MoEAmx.h>
#include <ATen/native/cpu/MoEPackingX86.h>

#include <cstring>
#include <limits>

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
// dispatch_fast_micro_gemm() exists.
#define MOE_HAS_FAST_GEMM

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

// Products of few rows with stored, not packed weights: a decode step reads every weight
// once and should do little else. The order of addition is that of VecGemm, so a row has the
// same bits as among many others.
template <typename operand, typename Products = FusedMultiplyAdd>
struct ThinGemm : FastGemm<VecGemm<operand, Products>> {
  using Wide = VecGemm<operand, Products>;
  using Vec = vec::Vectorized<float>;
  // Most rows of a block: their sums for two vectors of columns fit into the registers.
  static constexpr int64_t kFewRows = Vec::size() == 16 ? 8 : 6;

  // For weights that are dense along N. It multiplies several panels at once, as rows of adjacent
  // panels are runs of memory, and rows of one panel only a cache line or two of a page. Their
  // tiles fill at most half of `sums`. Returns how many of `panels` were multiplied.
  template <typename scalar_t, typename ColumnsFn>
  static int64_t multiply_runs(
      const WeightSource<scalar_t>& weights, const Block& block, const ColumnsFn& columns,
      int64_t panels, const operand* const* rows, std::span<float> sums) {
    const int64_t tile = block.rows() * kPanelCols;
    panels = std::min(panels, std::ssize(sums) / (2 * tile));
    const bool is_whole = weights.part_depth % kWordElements<operand> == 0;
    if (block.rows() > kFewRows || panels == 0 || weights.part_depth == 0 || !is_whole) {
      return 0;
    }
    const PanelColumns first = columns(0), last = columns(panels - 1);
    for (const auto i : c10::irange(2)) {
      const PanelSpan &from = first.spans[i], &to = last.spans[i];
      bool fits = (from.count | to.count) % Vec::size() == 0 &&
          (to.count == 0 || to.first == from.first + (panels - 1) * from.count);
      for (const auto part : c10::irange(weights.k_parts)) {
        const auto w = weights.view(block.expert, from, part, 0);
        // Overlapping weights can lie along both: those are multiplied along K, for any rows.
        fits &= to.count == 0 || (w.n_stride == 1 && w.k_stride != 1);
      }
      if (!fits) {
        return 0;
      }
    }
    with_constant<kFewRows>(block.rows(), [&](auto count) {
      for (const auto part : c10::irange(weights.k_parts)) {
        multiply_part<count>(weights, block.expert, first, last, panels, part, rows, sums.data());
      }
    });
    return panels;
  }

#ifdef CPU_CAPABILITY_AVX512
  // For weights that are dense along K. 16 lines of a weight are transposed in registers, and a
  // product takes one word of each and one row. If rows are floats and weights have 16 bits, a word
  // has two elements. Returns false if the block has too many rows, or the weights are not whole
  // blocks of lines.
  template <typename scalar_t>
  static bool multiply_stored(
      const WeightSource<scalar_t>& weights, const Block& block, const PanelColumns& columns,
      const Panel& /*next*/, const operand* const* rows, std::span<float> /*scratch*/, float* c) {
    const int64_t depth = weights.part_depth;
    bool fits =
        block.rows() <= kFewRows && weights.k_parts == 1 && depth % kBlockDepth<scalar_t> == 0;
    for (const auto& span : columns.spans) {
      fits = fits && span.count % kLines == 0 &&
          (span.count == 0 || weights.view(0, span, 0, 0).k_stride == 1);
    }
    for (int64_t s = 0; fits && s < 2; ++s) {
      const PanelSpan& span = columns.spans[s];
      if (span.count > 0) {
        const auto w = weights.view(block.expert, span, 0, 0);
        with_constant<kFewRows>(block.rows(), [&](auto count) {
          const auto multiply = [&](int64_t i, auto vectors) {
            multiply_block<count, vectors>(
                depth, rows, w.data + i * w.n_stride, w.n_stride, c + span.at + i);
          };
          // A sum waits for its own last product, and a word of two elements has two products:
          // few sums take twice as many lines.
          constexpr int64_t vectors = count <= 2 && !std::is_same_v<scalar_t, operand> ? 2 : 1;
          int64_t i = 0;
          for (; i + vectors * kLines <= span.count; i += vectors * kLines) {
            multiply(i, std::integral_constant<int64_t, vectors>());
          }
          for (; i < span.count; i += kLines) {
            multiply(i, std::integral_constant<int64_t, 1>());
          }
        });
      }
    }
    return fits;
  }
#endif

 private:
  // Rows of a weight that are read together, each a stream; and rows fetched into L2.
  static constexpr int64_t kRunDepth = 16, kAhead = 8;
  static_assert(Wide::kSumDepth % kRunDepth == 0);

  template <int64_t rows, typename scalar_t>
  static void multiply_part(
      const WeightSource<scalar_t>& weights, int64_t expert, const PanelColumns& columns,
      const PanelColumns& last, int64_t panels, int64_t k_part, const operand* const* x,
      float* sums) {
    constexpr int64_t most = rows <= (Vec::size() == 16 ? 6 : 2) ? 4 : 2;
    const int64_t depth = weights.part_depth, size = panels * rows * kPanelCols;
    // Sums of at most kSumDepth products are computed separately, then added.
    float* open = Wide::kOneSum ? sums : sums + size;
    const bool is_first = k_part == 0;
    for (int64_t k = 0; k < depth; k += kRunDepth) {
      const int64_t count = std::min(kRunDepth, depth - k);
      if (Wide::kOneSum ? is_first && k == 0 : k % Wide::kSumDepth == 0) {
        std::fill_n(open, size, 0.f);
      }
      for (int64_t p = 0; p < panels; ++p) {
        // The next to be read: this many panels further, or in the rows that follow.
        const int64_t ahead_rows = (p + kAhead) / panels * kRunDepth;
        const int64_t ahead_panels = (p + kAhead) % panels - p;
        for (const auto i : c10::irange(2)) {
          const PanelSpan& span = columns.spans[i];
          const auto w = weights.view(expert, span, k_part, k);
          const scalar_t* line = w.data + p * span.count;
          const int64_t ahead = ahead_rows * w.k_stride + ahead_panels * span.count;
          float* c = open + p * rows * kPanelCols + span.at;
          const auto multiply = [&](int64_t n, auto vectors) {
            multiply_run<rows, vectors>(
                x, k_part * depth + k, count, line + n, w.k_stride, ahead, c + n);
          };
          const int64_t width = p + 1 < panels ? span.count : last.spans[i].count;
          int64_t n = 0;
          for (; n + most * Vec::size() <= width; n += most * Vec::size()) {
            multiply(n, std::integral_constant<int64_t, most>());
          }
          for (; n < width; n += Vec::size()) {
            multiply(n, std::integral_constant<int64_t, 1>());
          }
        }
      }
      const int64_t end = k + count;
      if (!Wide::kOneSum && (end == depth || end % Wide::kSumDepth == 0)) {
        for (int64_t i = 0; i < size; i += Vec::size()) {
          const Vec sum = Vec::loadu(open + i);
          (is_first && k < Wide::kSumDepth ? sum : Vec::loadu(sums + i) + sum).store(sums + i);
        }
      }
    }
  }

  // c += rows k to k + depth of x times those of w.
  template <int64_t rows, int64_t vectors, typename scalar_t>
  C10_NOINLINE static void multiply_run(
      const operand* const* x, int64_t k, int64_t depth, const scalar_t* w, int64_t stride,
      int64_t ahead, float* c) {
    constexpr int64_t v = kWordElements<operand>;
    // Not between products, where GCC would keep the sums in memory.
    for (int64_t d = 0; d < depth; ++d) {
      prefetch(w + d * stride + ahead, vectors * Vec::size());
    }
    const operand* a[rows];
    std::copy_n(x, rows, a);
    Vec sums[rows][vectors];
    MOE_UNROLL
    for (int64_t i = 0; i < rows; ++i) {
      MOE_UNROLL
      for (int64_t j = 0; j < vectors; ++j) {
        sums[i][j] = Vec::loadu(c + i * kPanelCols + j * Vec::size());
      }
    }
    for (int64_t d = 0; d < depth; d += v, w += v * stride) {
      Vec words[vectors];
      MOE_UNROLL
      for (int64_t j = 0; j < vectors; ++j) {
        words[j] = load_words(w + j * Vec::size(), stride);
      }
      Products::add(a, k + d, words, sums);
    }
    MOE_UNROLL
    for (int64_t i = 0; i < rows; ++i) {
      MOE_UNROLL
      for (int64_t j = 0; j < vectors; ++j) {
        sums[i][j].store(c + i * kPanelCols + j * Vec::size());
      }
    }
  }

  // A vector of words of a weight. For 16-bit operands a word has element i of two
  // rows.
  template <typename scalar_t>
  static Vec load_words(const scalar_t* row, int64_t stride) {
    Vec words;
    if constexpr (std::is_same_v<scalar_t, float>) {
      words = Vec::loadu(row);
    } else {
      vec::load_to_float<scalar_t>(row, words);
    }
    if constexpr (kWordElements<operand> == 2) {
      Vec upper;
      vec::load_to_float<scalar_t>(row + stride, upper);
      words = vec::cast<float>(join_halves(words, upper));
    }
    return words;
  }

#ifdef CPU_CAPABILITY_AVX512
  static constexpr int64_t kLines = 16;
  template <typename scalar_t>
  static constexpr int64_t kBlockDepth = 64 / sizeof(scalar_t);

  // Element 0 or 1 of each word.
  template <typename scalar_t>
  static __m512 element_of(__m512 words, int64_t element) {
    const __m512i x = _mm512_castps_si512(words);
    if constexpr (std::is_same_v<scalar_t, Half>) {
      return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(element == 0 ? x : _mm512_srli_epi32(x, 16)));
    } else {
      return _mm512_castsi512_ps(
          element == 0 ? _mm512_slli_epi32(x, 16) : _mm512_and_si512(x, _mm512_set1_epi32(~0xffff)));
    }
  }

  template <int64_t rows, int64_t vectors, typename scalar_t>
  static void multiply_block(
      int64_t depth, const operand* const* x, const scalar_t* w, int64_t stride, float* c) {
    constexpr int64_t block = kBlockDepth<scalar_t>, v = block / 16;
    static_assert(Wide::kSumDepth % block == 0);
    // Further along each line, then in the lines that follow: reading many 4 KiB pages in
    // turn is faster than one after the other.
    constexpr int64_t ahead = 16 * block;
    const operand* a[rows];
    std::copy_n(x, rows, a);
    for (int64_t k0 = 0; k0 < depth; k0 += Wide::kSumDepth) {
      const int64_t end = std::min(k0 + Wide::kSumDepth, depth);
      Vec sums[rows][vectors];
      MOE_UNROLL
      for (int64_t r = 0; r < rows; ++r) {
        std::fill_n(sums[r], vectors, Vec(0));
      }
      for (int64_t k = k0; k < end; k += block) {
        const scalar_t* next =
            w + k + ahead + (k + ahead < depth ? 0 : vectors * kLines * stride - depth);
        __m512 words[vectors][16];
        MOE_UNROLL
        for (int64_t j = 0; j < vectors; ++j) {
          const scalar_t* lines = w + j * kLines * stride + k;
          transpose_words(
              [&](int64_t i) {
                prefetch(next + (j * kLines + i) * stride);
                return _mm512_loadu_ps(lines + i * stride);
              },
              [&](int64_t at, __m512 word) { words[j][at] = word; });
        }
        MOE_UNROLL
        for (int64_t at = 0; at < 16; ++at) {
          const auto add = [&](int64_t element, const auto& part) {
            Vec right[vectors];
            MOE_UNROLL
            for (int64_t j = 0; j < vectors; ++j) {
              right[j] = part(words[j][at]);
            }
            Products::add(a, k + at * v + element, right, sums);
          };
          if constexpr (std::is_same_v<scalar_t, operand>) {
            add(0, [](__m512 word) { return word; });
          } else {
            add(0, [](__m512 word) { return element_of<scalar_t>(word, 0); });
            add(1, [](__m512 word) { return element_of<scalar_t>(word, 1); });
          }
        }
      }
      MOE_UNROLL
      for (int64_t r = 0; r < rows; ++r) {
        MOE_UNROLL
        for (int64_t j = 0; j < vectors; ++j) {
          float* to = c + r * kPanelCols + j * kLines;
          (k0 > 0 ? Vec::loadu(to) + sums[r][j] : sums[r][j]).store(to);
        }
      }
    }
  }
#endif
};

using FloatGemm = ThinGemm<float>;

#ifdef MOE_HAS_AMX
// Adds the two products of each word to sum. In assembly, as this capability is compiled for AVX512
// without BF16.
C10_ALWAYS_INLINE __m512 add_dot(__m512 sum, __m512i a, __m512i b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

// The words of VecGemm, with one instruction per vector of them.
struct DotProducts : NativeRounding {
  template <int64_t rows, int64_t vectors>
  C10_ALWAYS_INLINE static void
  add(const BFloat16* const (&a)[rows], int64_t k, const vec::Vectorized<float> (&b)[vectors],
      vec::Vectorized<float> (&sums)[rows][vectors]) {
    MOE_UNROLL
    for (int64_t i = 0; i < rows; ++i) {
      int32_t word;
      std::memcpy(&word, a[i] + k, sizeof(word));
      MOE_UNROLL
      for (int64_t j = 0; j < vectors; ++j) {
        sums[i][j] = add_dot(sums[i][j], _mm512_set1_epi32(word), _mm512_castps_si512(b[j]));
      }
    }
  }

  // See LineGemm.
  template <int64_t rows, int64_t lines>
  C10_ALWAYS_INLINE static void add_lines(
      const BFloat16* const (&a)[rows], const BFloat16* w, int64_t stride, int64_t k, int64_t words,
      __m512 (&sums)[rows][lines]) {
    const auto mask = static_cast<__mmask16>((1 << words) - 1);
    __m512i right[lines];
    MOE_UNROLL
    for (int64_t j = 0; j < lines; ++j) {
      right[j] = _mm512_maskz_loadu_epi32(mask, w + j * stride + k);
    }
    MOE_UNROLL
    for (int64_t r = 0; r < rows; ++r) {
      const __m512i left = _mm512_maskz_loadu_epi32(mask, a[r] + k);
      MOE_UNROLL
      for (int64_t j = 0; j < lines; ++j) {
        sums[r][j] = add_dot(sums[r][j], left, right[j]);
      }
    }
  }
};

// Multiplies lines of bfloat16 by rows of floats. On some CPUs the two products of a word take less time
// than the one of DotProducts. A vector of words becomes two of floats, of the first elements and of the
// second ones; rows are packed in this order.
struct SplitProducts {
  static __m512 half_of(__m512i words, int64_t element) {
    return _mm512_castsi512_ps(
        element == 0 ? _mm512_slli_epi32(words, 16)
                     : _mm512_and_si512(words, _mm512_set1_epi32(~0xffff)));
  }

  // See LineGemm. In assembly, as GCC would keep sums in memory.
  template <int64_t rows, int64_t lines>
  C10_ALWAYS_INLINE static void add_lines(
      const float* const (&a)[rows], const BFloat16* w, int64_t stride, int64_t k, int64_t words,
      __m512 (&sums)[rows][lines]) {
    const auto mask = static_cast<__mmask16>((1 << words) - 1);
    MOE_UNROLL
    for (int64_t element = 0; element < 2; ++element) {
      __m512 right[lines];
      MOE_UNROLL
      for (int64_t j = 0; j < lines; ++j) {
        right[j] = half_of(_mm512_maskz_loadu_epi32(mask, w + j * stride + k), element);
      }
      MOE_UNROLL
      for (int64_t r = 0; r < rows; ++r) {
        const __m512 left = _mm512_maskz_loadu_ps(mask, a[r] + k + element * words);
        MOE_UNROLL
        for (int64_t j = 0; j < lines; ++j) {
          asm("vfmadd231ps %2, %1, %0" : "+v"(sums[r][j]) : "v"(left), "v"(right[j]));
        }
      }
    }
  }

  // Packs one row, null for zeros: of each 16 words the first elements, then the second ones.
  static void pack_row(const BFloat16* row, int64_t depth, float* to) {
    for (int64_t k = 0; k < depth; k += 32) {
      const int64_t words = std::min<int64_t>(32, depth - k) / 2;
      const auto mask = static_cast<__mmask16>((1 << words) - 1);
      const auto x =
          row == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi32(mask, row + k);
      for (const auto element : c10::irange(2)) {
        _mm512_mask_storeu_ps(to + k + element * words, mask, half_of(x, element));
      }
    }
  }
};

// Multiplies weights that lie along K as they are stored. Each lane of a sum has every 16th word of
// K, and the lanes are added at the end. No weight is packed or transposed, and a decode step reads
// one line after the other, as fast as a sum over memory. Any number of rows is multiplied like
// this, so a row has the same bits alone and among others.
// Products::add_lines(a, w, stride, k, words, sums) adds `words` words, at most 16, of each row and
// line from k on.
template <typename Thin, typename Products>
struct LineGemm : Thin {
  using Thin::kTileRows;
  using operand = typename Thin::operand_t;
  static constexpr bool kSplitsRows = std::is_same_v<operand, float>;
  static constexpr int64_t kPackedRows = 1;

  // Whether the rows of a block are packed with pack_rows(), one at a time.
  static bool packs_rows(const WeightSource<BFloat16>& weights) requires kSplitsRows {
    return takes(weights);
  }

  static void pack_rows(const BFloat16* const* row, int64_t depth, float* to) requires kSplitsRows {
    Products::pack_row(*row, depth, to);
  }

  // Other products would have other bits, and multiply_stored() reads all of K.
  static bool needs_whole_rows(const WeightSource<BFloat16>& weights) requires kSplitsRows {
    return takes(weights);
  }

  // Whether the rows of a block are copied, kRowGap elements apart. Rows and lines of a tile that are
  // multiples of 4 KiB apart share one set of L1 and evict each other.
  static bool spreads_rows(const WeightSource<BFloat16>& weights, int64_t ld) {
    return ld % 2048 == 0 && weights.view(0, PanelSpan(), 0, 0).k_stride == 1;
  }
  static constexpr int64_t kRowGap = 32;

  // See ThinGemm. One or two rows read lines in order, and those of a span go on in the next panel:
  // gate and up in turn, a few lines of each, are read at 0.87 of the speed.
  template <typename ColumnsFn>
  static int64_t multiply_runs(
      const WeightSource<BFloat16>& weights, const Block& block, const ColumnsFn& columns,
      int64_t panels, const operand* const* rows, std::span<float> sums) {
    const int64_t tile = block.rows() * kPanelCols;
    if (block.rows() > 2 || !takes(weights)) {
      return Thin::multiply_runs(weights, block, columns, panels, rows, sums);
    }
    panels = std::min(panels, std::ssize(sums) / tile);
    for (const auto i : c10::irange(2)) {
      for (const auto p : c10::irange(panels)) {
        const Panel panel{block.expert, columns(p)};
        multiply_span(weights, block, panel.columns, i, panel, rows, {}, sums.data() + p * tile);
      }
    }
    return panels;
  }

  // See ThinGemm, which may take few rows of other weights.
  static bool multiply_stored(
      const WeightSource<BFloat16>& weights, const Block& block, const PanelColumns& columns,
      const Panel& next, const operand* const* rows, std::span<float> scratch, float* c) {
    if (!takes(weights)) {
      if constexpr (kSplitsRows) {
        return Thin::multiply_stored(weights, block, columns, next, rows, scratch, c);
      }
      return false;
    }
    for (const auto i : c10::irange(2)) {
      multiply_span(weights, block, columns, i, next, rows, scratch, c);
    }
    return true;
  }

  // How many lanes of sums a thread keeps between two parts of K; 0 if blocks of at most `most_rows`
  // rows do not cut it.
  static int64_t kept_sums(const WeightSource<BFloat16>& weights, int64_t most_rows) {
    const int64_t groups = ceil_div(std::min(most_rows, kFinishRows<Thin>), kTileRows);
    const int64_t depth = weights.part_depth;
    const bool cuts = takes(weights) && groups > 1 && cut_depth(depth) < depth;
    return cuts ? groups * kTileRows * kCutLines * kLanes : 0;
  }

 private:
  static bool takes(const WeightSource<BFloat16>& weights) {
    const int64_t depth = weights.part_depth;
    return depth > 0 && depth <= kMostDepth && depth % 2 == 0 && weights.is_along_k();
  }

  // Each thread packs whole rows, and the scratch of all threads is limited.
  static constexpr int64_t kMostDepth = kSplitsRows ? 4096 : std::numeric_limits<int64_t>::max();

  // Multiplies the rows of a block by the lines of span s, and fetches lines of the same span of `next`.
  // A long K is cut into parts. All rows are multiplied by a part of kCutLines lines before the next part
  // is read, so that this part of six rows stays in L1 and of the lines in L2. `kept` holds the lanes of
  // the sums between two parts, so that no bit changes. If it is small, fewer lines are read together.
  static void multiply_span(
      const WeightSource<BFloat16>& weights, const Block& block, const PanelColumns& columns,
      int64_t s, const Panel& next, const operand* const* rows, std::span<float> kept, float* c) {
    const PanelSpan& span = columns.spans[s];
    const int64_t depth = weights.part_depth;
    const int64_t groups = ceil_div(block.rows(), kTileRows);
    const int64_t cut = groups > 1 ? cut_depth(depth) : depth;
    const int64_t fitting = std::ssize(kept) / (groups * kTileRows * kLanes);
    const int64_t lines =
        cut < depth ? std::min(kCutLines, fitting / kLinesAtOnce * kLinesAtOnce) : kPanelCols;
    // How many of the next kLinesAtOnce lines each group of rows fetches.
    const int64_t share = cut < depth ? 1 : ceil_div(kLinesAtOnce, groups);
    for (const auto part : c10::irange(span.count > 0 ? weights.k_parts : 0)) {
      const auto w = weights.view(block.expert, span, part, 0);
      const auto soon = weights.view(next.expert, next.columns.spans[s], part, 0);
      for (int64_t i = 0; i < span.count; i += lines) {
        const BFloat16* from = w.data + i * w.n_stride;
        for (int64_t k = 0; k < depth; k += cut) {
          const int64_t count = std::min(cut, depth - k);
          const BFloat16* ahead = k + count < depth ? from + k + count
              : i + lines < span.count              ? from + lines * w.n_stride
                                                    : soon.data;
          for (const auto group : c10::irange(groups)) {
            const int64_t first = share * group;
            // Equal groups: each sum waits for its last product, so a small group would be slow.
            const int64_t begin = block.rows() * group / groups;
            const int64_t end = block.rows() * (group + 1) / groups;
            with_constant<kTileRows>(end - begin, [&](auto size) {
              const operand* x[size];
              for (const auto r : c10::irange(int64_t{size})) {
                x[r] = rows[begin + r] + part * depth + k;
              }
              float* to = c + begin * kPanelCols + span.at + i;
              float* lanes =
                  cut < depth ? kept.data() + group * kTileRows * lines * kLanes : nullptr;
              multiply_lines<size>(
                  count, x, from + k, w.n_stride, std::min(lines, span.count - i),
                  ahead + first * w.n_stride, std::clamp<int64_t>(kLinesAtOnce - first, 0, share),
                  part > 0, k + count < depth ? nullptr : to, lanes, k > 0);
            });
          }
        }
      }
    }
  }

  static constexpr int64_t kStep = 32;   // elements of a vector
  static constexpr int64_t kLanes = 16;  // sums of a vector
  static constexpr int64_t kLinesAtOnce = 4;
  // A cache line of a page that comes soon is fetched with each line, so that its address is known in
  // time.
  static constexpr int64_t kPageAhead = 4096;

  // How far ahead one or two rows fetch, which read lines one after the other.
  static int64_t ahead() {
    return has_large_l1() ? 4096 : 1024;
  }

  // Elements of K of a part, so that six rows of it stay in L1. Up to a quarter more is not worth a cut.
  // Zen 4 reads rows from L2 in time.
  static int64_t cut_depth(int64_t depth) {
    constexpr int64_t most = 4096 / sizeof(operand);
    if (!has_large_l1() || depth <= most + most / 4) {
      return depth;
    }
    return round_up(ceil_div(depth, ceil_div(depth, most)), kStep);
  }

  // Lines of a weight that are read together if K is cut.
  static constexpr int64_t kCutLines = 32;

  // Multiplies x by `lines` lines of w, see multiply_tile.
  template <int64_t rows>
  static void multiply_lines(
      int64_t depth, const operand* const (&x)[rows], const BFloat16* w, int64_t stride,
      int64_t lines, const BFloat16* next, int64_t fetched, bool accumulate, float* c, float* kept,
      bool continues) {
    const auto at = [](float* from, int64_t i) { return from == nullptr ? from : from + i; };
    int64_t i = 0;
    if constexpr (rows > 2) {
      for (; i + kLinesAtOnce <= lines; i += kLinesAtOnce) {
        multiply_tile<rows, kLinesAtOnce>(
            depth, x, w + i * stride, stride, next + i * stride, fetched, accumulate, at(c, i),
            at(kept, i * rows * kLanes), continues);
      }
    }
    for (; i < lines; ++i) {
      const BFloat16* line = w + i * stride;
      prefetch(line + kPageAhead);
      multiply_tile<rows, 1>(
          depth, x, line, 0, line + ahead(), 1, accumulate, at(c, i), at(kept, i * rows * kLanes),
          continues);
    }
  }

  // Fetches `fetched` cache lines from `next` on with each vector of K. depth may be a part of K: if it
  // `continues` another part, sums begin with the lanes in `kept`, and if c is null, more parts follow,
  // and the lanes are stored there.
  template <int64_t rows, int64_t lines>
  C10_NOINLINE static void multiply_tile(
      int64_t depth, const operand* const (&x)[rows], const BFloat16* w, int64_t stride,
      const BFloat16* next, int64_t fetched, bool accumulate, float* c, float* kept, bool continues) {
    const operand* a[rows];
    std::copy_n(x, rows, a);
    __m512 sums[rows][lines];
    MOE_UNROLL
    for (int64_t r = 0; r < rows; ++r) {
      MOE_UNROLL
      for (int64_t j = 0; j < lines; ++j) {
        sums[r][j] = _mm512_setzero_ps();
      }
    }
    if (continues) {
      MOE_UNROLL
      for (int64_t r = 0; r < rows; ++r) {
        MOE_UNROLL
        for (int64_t j = 0; j < lines; ++j) {
          sums[r][j] = _mm512_load_ps(kept + (r * lines + j) * kLanes);
        }
      }
    }
    int64_t k = 0;
    for (; k + kStep <= depth; k += kStep) {
      Products::add_lines(a, w, stride, k, kLanes, sums);
      for (int64_t i = 0; i < fetched; ++i, next += kStep) {
        prefetch(next);
      }
    }
    if (k < depth) {
      Products::add_lines(a, w, stride, k, (depth - k) / 2, sums);
    }
    if (c == nullptr) {
      MOE_UNROLL
      for (int64_t r = 0; r < rows; ++r) {
        MOE_UNROLL
        for (int64_t j = 0; j < lines; ++j) {
          _mm512_store_ps(kept + (r * lines + j) * kLanes, sums[r][j]);
        }
      }
      return;
    }
    MOE_UNROLL
    for (int64_t r = 0; r < rows; ++r) {
      float* to = c + r * kPanelCols;
      if constexpr (lines == 4) {
        const __m128 sum = add_lanes(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        _mm_storeu_ps(to, accumulate ? _mm_add_ps(_mm_loadu_ps(to), sum) : sum);
      } else {
        const float sum = _mm_cvtss_f32(add_lanes(sums[r][0], sums[r][0], sums[r][0], sums[r][0]));
        *to = accumulate ? *to + sum : sum;
      }
    }
  }

  // Returns the sums of the lanes of each vector.
  C10_ALWAYS_INLINE static __m128 add_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_castps_pd(ab), high = _mm512_castps_pd(cd);
    const __m512 quads = _mm512_add_ps(
        _mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
        _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    const __m256 half = _mm256_add_ps(
        _mm512_castps512_ps256(quads),
        _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(quads), 1)));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
};

using DotGemm = LineGemm<ThinGemm<BFloat16, DotProducts>, DotProducts>;
using SplitGemm = LineGemm<FloatGemm, SplitProducts>;
#endif

// Calls fn(scalar_t(0), Micro()), see dispatch_micro_gemm in MoEProjection.h.
template <typename Fn>
void dispatch_fast_micro_gemm(ScalarType dtype, const Fn& fn) {
  switch (dtype) {
    case kDouble:
      return fn(double(0), FastGemm<VecGemm<double>>());
    case kFloat:
      return fn(float(0), FloatGemm());
    case kHalf:
      return fn(Half(0), FloatGemm());
    default:
#ifdef MOE_HAS_AMX
      static const bool has_dot = has_instructions("avx512_bf16");
      static const bool has_amx =
          has_dot && has_instructions("amx_bf16") && at::cpu::init_amx();
      if (has_amx) {
        return fn(BFloat16(0), TileGemm());
      }
      // On Intel the instruction takes as long as four float products and computes two.
      static const bool is_fast = has_dot && !__builtin_cpu_is("intel");
      if (is_fast) {
        return fn(BFloat16(0), DotGemm());
      }
      return fn(BFloat16(0), SplitGemm());
#else
      return fn(BFloat16(0), FloatGemm());
#endif
  }
}

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native

#endif
