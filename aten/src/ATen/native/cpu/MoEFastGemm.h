#pragma once

// Micro-GEMMs in place of those of MoEMicroGemm.h: with the next panel fetched ahead and
// panels packed in registers, for bfloat16 with instructions of their own where those are faster
// than floats, AMX tiles (MoEAmx.h), else AVX512-BF16, and for few rows.

#include <ATen/cpu/Utils.h>
#include <ATen/native/cpu/MoEAmx.h>
#include <ATen/native/cpu/MoEDriver.h>

#include <cstring>
#include <tuple>
#include <utility>

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
// dispatch_fast_micro_gemm() is there.
#define MOE_HAS_FAST_GEMM

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

// What will be packed next, on its way to L2 while others are multiplied: some cache lines
// per call, so that nothing waits for them.
class PanelPrefetch {
 public:
  // At most `depth` rows of a part of K from k0 on, in so many calls, or nothing.
  template <typename Weights>
  PanelPrefetch(
      const Weights& weights, const Panel& panel, int64_t k_part, int64_t k0, int64_t depth,
      int64_t calls) {
    const int64_t k = std::min(depth, weights.part_depth - k0);
    for (const auto& span : panel.columns.spans) {
      const auto b = weights.view(panel.expert, span, k_part, k0);
      constexpr auto size = static_cast<int64_t>(sizeof(*b.data));
      if (b.k_stride == 1) {
        add(b.data, span.count, k * size, b.n_stride * size);
      } else if (b.n_stride == 1) {
        add(b.data, k, span.count * size, b.k_stride * size);
      }
    }
    share_ = calls == 0 ? 0 : ceil_div(left_, calls);
  }

  void operator()() {
    for (int64_t i = 0; i < share_ && part_ < count_; ++i) {
      Part& part = parts_[part_];
      prefetch(part.line + at_);
      at_ += 64;
      if (at_ >= part.bytes) {
        at_ = 0;
        part.line += part.stride;
        part_ += --part.lines == 0 ? 1 : 0;
      }
    }
  }

 private:
  struct Part {
    const char* line;
    int64_t lines, bytes, stride;
  };

  // `lines` of so many bytes, `stride` bytes apart. May be outside of every allocation.
  void add(const void* data, int64_t lines, int64_t bytes, int64_t stride) {
    if (lines > 0 && bytes > 0) {
      parts_[count_++] = {static_cast<const char*>(data), lines, bytes, stride};
      left_ += lines * ((bytes + 63) / 64);
    }
  }

  Part parts_[2];
  int64_t count_ = 0, part_ = 0, at_ = 0, left_ = 0, share_ = 0;
};

#if defined(CPU_CAPABILITY_AVX512)
// store(w, words w of all lines), for 16 lines of 16 words that load(i) returns.
template <typename LoadFn, typename StoreFn>
C10_ALWAYS_INLINE void transpose_words(const LoadFn& load, const StoreFn& store) {
  __m512 x[16], y[16];
  MOE_UNROLL
  for (int64_t i = 0; i < 16; ++i) {
    x[i] = load(i);
  }
  MOE_UNROLL
  for (int64_t i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  const auto unpack = [&](int64_t i, int64_t j) {
    const __m512d a = _mm512_castps_pd(y[i]), b = _mm512_castps_pd(y[j]);
    return std::pair{
        _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b))};
  };
  // x[4 q + w] <- words w, 4 + w, 8 + w and 12 + w of lines 4 q to 4 q + 3.
  MOE_UNROLL
  for (int64_t i = 0; i < 16; i += 4) {
    std::tie(x[i], x[i + 1]) = unpack(i, i + 2);
    std::tie(x[i + 2], x[i + 3]) = unpack(i + 1, i + 3);
  }
  MOE_UNROLL
  for (int64_t w = 0; w < 4; ++w) {
    const __m512 even_low = _mm512_shuffle_f32x4(x[w], x[4 + w], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(x[w], x[4 + w], 0xdd);
    const __m512 even_high = _mm512_shuffle_f32x4(x[8 + w], x[12 + w], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(x[8 + w], x[12 + w], 0xdd);
    store(w, _mm512_shuffle_f32x4(even_low, even_high, 0x88));
    store(4 + w, _mm512_shuffle_f32x4(odd_low, odd_high, 0x88));
    store(8 + w, _mm512_shuffle_f32x4(even_low, even_high, 0xdd));
    store(12 + w, _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd));
  }
}

// Floats, and words of two bfloat16, turned around in registers: vec::transpose_mxn keeps
// them in memory, at a third of the speed.
template <typename operand_t>
struct FastPacking {
  // See transpose_square.
  static void transpose(const float* from, int64_t ld, float* to, int64_t ld_to) {
    transpose_words(
        [&](int64_t i) { return _mm512_loadu_ps(from + i * ld); },
        [&](int64_t w, __m512 x) { _mm512_storeu_ps(to + w * ld_to, x); });
  }

  // pack_lines for 16 lines that are dense along K. Returns the depth up to which it is
  // done: 16 whole words at a time.
  template <typename scalar_t>
  static int64_t pack_dense(
      const scalar_t* lines, int64_t line_stride, int64_t depth, int64_t ahead, float* to,
      int64_t ld) {
    constexpr int64_t v = kWordElements<operand_t>, step = 16 * v;
    int64_t k = 0;
    for (; k + step <= depth; k += step, to += 16 * ld) {
      const auto load = [&](int64_t i) -> __m512 {
        const scalar_t* from = lines + i * line_stride + k;
        _mm_prefetch(reinterpret_cast<const char*>(from + 2 * step), _MM_HINT_T0);
        if (ahead != 0) {
          prefetch(from + ahead);
        }
        if constexpr (std::is_same_v<scalar_t, operand_t>) {
          return _mm512_loadu_ps(from);
        } else {
          vec::Vectorized<float> x;
          vec::load_to_float<scalar_t>(from, x);
          return x;
        }
      };
      transpose_words(load, [&](int64_t w, __m512 x) { _mm512_storeu_ps(to + w * ld, x); });
    }
    return k;
  }
};
#else
template <typename operand_t>
struct FastPacking {};
#endif

template <typename Micro>
struct FastGemm : Micro, FastPacking<typename Micro::operand_t> {
  using Prefetch = PanelPrefetch;
};

#if !defined(CPU_CAPABILITY_AVX512)
using FloatGemm = FastGemm<VecGemm<float>>;
#else
// Products of a few rows with weights that lie along K, as they are stored: a decode step,
// which reads every weight once and should do little else. 16 lines of a weight are
// transposed in registers, and a product is of one word of them and of one row. Where rows are
// floats and weights bfloat16, the upper halves of floats, a word is two of them by a shift and a
// mask. The order of addition is that of VecGemm, so that a row has the same bits among many others.
template <typename operand, typename Products = FusedMultiplyAdd>
struct ThinGemm : FastGemm<VecGemm<operand, Products>> {
  using Vec = vec::Vectorized<float>;

  // The product of a block with a panel, unless it has more rows, or the weights are no whole
  // blocks of lines.
  template <typename scalar_t>
  static bool multiply_stored(
      const WeightSource<scalar_t>& weights, const Block& block, const PanelColumns& columns,
      const operand* const* rows, float* c) {
    const int64_t depth = weights.part_depth;
    bool fits =
        block.rows() <= kRows && weights.k_parts == 1 && depth % kBlockDepth<scalar_t> == 0;
    for (const auto& span : columns.spans) {
      fits = fits && span.count % kLines == 0 &&
          (span.count == 0 || weights.view(0, span, 0, 0).k_stride == 1);
    }
    for (int64_t s = 0; fits && s < 2; ++s) {
      const PanelSpan& span = columns.spans[s];
      if (span.count > 0) {
        const auto w = weights.view(block.expert, span, 0, 0);
        with_constant<kRows>(block.rows(), [&](auto count) {
          const auto multiply = [&](int64_t i, auto vectors) {
            multiply_block<count, vectors>(
                depth, rows, w.data + i * w.n_stride, w.n_stride, c + span.at + i);
          };
          // A sum waits for its own last product, of which a word of two floats has two: where
          // there are few sums, twice as many lines.
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

 private:
  static constexpr int64_t kRows = 8;
  static constexpr int64_t kLines = 16;
  template <typename scalar_t>
  static constexpr int64_t kBlockDepth = 16 * kWordElements<scalar_t>;

  template <int64_t rows, int64_t vectors, typename scalar_t>
  static void multiply_block(
      int64_t depth, const operand* const* x, const scalar_t* w, int64_t stride, float* c) {
    using Wide = VecGemm<operand, Products>;
    constexpr int64_t v = kWordElements<scalar_t>, block = kBlockDepth<scalar_t>;
    static_assert(Wide::kSumDepth % block == 0);
    // Cache lines of a line of w between what is multiplied and what is fetched.
    constexpr int64_t ahead = 8 * block;
    const int64_t step = Wide::kOneSum ? depth : Wide::kSumDepth;
    const operand* a[rows];
    std::copy_n(x, rows, a);
    for (int64_t k0 = 0; k0 < depth; k0 += step) {
      const int64_t end = std::min(k0 + step, depth);
      Vec sums[rows][vectors];
      MOE_UNROLL
      for (int64_t r = 0; r < rows; ++r) {
        std::fill_n(sums[r], vectors, Vec(0));
      }
      for (int64_t k = k0; k < end; k += block) {
        // Further along the lines, then along those that follow.
        const int64_t next = k + ahead < depth ? ahead : ahead - depth + vectors * kLines * stride;
        __m512 words[vectors][16];
        MOE_UNROLL
        for (int64_t j = 0; j < vectors; ++j) {
          const scalar_t* lines = w + j * kLines * stride + k;
          transpose_words(
              [&](int64_t i) {
                prefetch(lines + i * stride + next);
                return _mm512_loadu_ps(lines + i * stride);
              },
              [&](int64_t at, __m512 word) { words[j][at] = word; });
        }
        MOE_UNROLL
        for (int64_t at = 0; at < 16; ++at) {
          const auto add = [&](int64_t element, const auto& part) {
            __m512 right[vectors];
            const operand* b[vectors];
            MOE_UNROLL
            for (int64_t j = 0; j < vectors; ++j) {
              right[j] = part(words[j][at]);
              b[j] = reinterpret_cast<const operand*>(&right[j]);
            }
            Products::add(a, k + at * v + element, b, sums);
          };
          if constexpr (std::is_same_v<scalar_t, operand>) {
            add(0, [](__m512 word) { return word; });
          } else {
            add(0, [](__m512 word) {
              return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(word), 16));
            });
            add(1, [](__m512 word) {
              return _mm512_castsi512_ps(_mm512_and_si512(
                  _mm512_castps_si512(word), _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))));
            });
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
};

using FloatGemm = ThinGemm<float>;
#endif

#ifdef MOE_HAS_AMX
// The words of VecGemm, with one instruction per vector of them. In assembly, as the files of a
// capability are compiled for AVX512 without it.
struct DotProducts : NativeRounding {
  template <int64_t rows, int64_t vectors>
  C10_ALWAYS_INLINE static void
  add(const BFloat16* const (&a)[rows], int64_t k, const BFloat16* const (&b)[vectors],
      vec::Vectorized<float> (&sums)[rows][vectors]) {
    __m512i right[vectors];
    MOE_UNROLL
    for (int64_t j = 0; j < vectors; ++j) {
      right[j] = _mm512_loadu_si512(b[j]);
    }
    MOE_UNROLL
    for (int64_t i = 0; i < rows; ++i) {
      int32_t word;
      std::memcpy(&word, a[i] + k, sizeof(word));
      const __m512i left = _mm512_set1_epi32(word);
      MOE_UNROLL
      for (int64_t j = 0; j < vectors; ++j) {
        __m512 sum = sums[i][j];
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right[j]));
        sums[i][j] = sum;
      }
    }
  }
};

inline bool has_instructions(const char* name) {
  const auto capabilities = at::cpu::get_cpu_capabilities();
  const auto found = capabilities.find(name);
  return found != capabilities.end() && found->second.toBool();
}

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
      return fn(Half(0), FastGemm<VecGemm<float>>());
    default:
#ifdef MOE_HAS_AMX
      static const bool has_dot = has_instructions("avx512_bf16");
      static const bool has_amx =
          has_dot && has_instructions("amx_bf16") && at::cpu::init_amx();
      if (has_amx) {
        return fn(BFloat16(0), FastGemm<AmxGemm>());
      }
      // Those of Intel take as long as four products of floats, and multiply two.
      static const bool is_fast = has_dot && !__builtin_cpu_is("intel");
      if (is_fast) {
        return fn(BFloat16(0), ThinGemm<BFloat16, DotProducts>());
      }
#endif
      return fn(BFloat16(0), FloatGemm());
  }
}

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native

#endif
