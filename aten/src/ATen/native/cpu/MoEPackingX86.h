#pragma once

// What the micro-GEMMs for x86 share: look-ups of instructions, fetches of the next panel during
// products, and packing in registers.

#include <ATen/cpu/Utils.h>
#include <ATen/native/cpu/MoEDriver.h>

#include <tuple>
#include <utility>

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

// None if cpuinfo does not know it.
inline c10::IValue cpu_capability(const char* name) {
  const auto capabilities = at::cpu::get_cpu_capabilities();
  const auto found = capabilities.find(name);
  return found == capabilities.end() ? c10::IValue() : found->second;
}

inline bool has_instructions(const char* name) {
  const auto found = cpu_capability(name);
  return found.isBool() && found.toBool();
}

// Whether L1 has at least 48 KiB, as on Zen 5 (two products a cycle), not 32 KiB, as on Zen 4 (one).
inline bool has_large_l1() {
  static const bool has = [] {
    const auto bytes = cpu_capability("l1d_cache_size");
    return bytes.isInt() && bytes.toInt() >= 48 * 1024;
  }();
  return has;
}

// Fetches the next panel into L2 during products: some cache lines per call, so that
// nothing waits for them.
class PanelPrefetch {
 public:
  // Fetches at most `depth` rows of a part of K from k0 in `calls` calls; nothing for 0. `within`:
  // the calls are those of after_word().
  template <typename Weights>
  PanelPrefetch(
      const Weights& weights, const Panel& panel, int64_t k_part, int64_t k0, int64_t depth,
      int64_t calls, bool within)
      : within_(within) {
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

  bool is_within() const {
    return within_;
  }
  // Called after a word of K, in a loop whose sums have to stay in registers, or after some rows.
  C10_ALWAYS_INLINE void after_word() {
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
  void operator()() {
    after_word();
  }

 private:
  struct Part {
    const char* line;
    int64_t lines, bytes, stride;
  };

  // `lines` of `bytes` bytes, `stride` bytes apart. They may be outside of every allocation.
  void add(const void* data, int64_t lines, int64_t bytes, int64_t stride) {
    if (lines > 0 && bytes > 0) {
      parts_[count_++] = {static_cast<const char*>(data), lines, bytes, stride};
      left_ += lines * ((bytes + 63) / 64);
    }
  }

  Part parts_[2];
  int64_t count_ = 0, part_ = 0, at_ = 0, left_ = 0, share_ = 0;
  bool within_;
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

// Transposes floats, or words of two bfloat16, in registers. vec::transpose_mxn keeps
// them in memory, at a third of the speed.
template <typename operand_t>
struct FastPacking {
  // See transpose_square.
  static void transpose(const float* from, int64_t ld, float* to, int64_t ld_to) {
    transpose_words(
        [&](int64_t i) { return _mm512_loadu_ps(from + i * ld); },
        [&](int64_t w, __m512 x) { _mm512_storeu_ps(to + w * ld_to, x); });
  }

  // pack_lines for 16 lines that are dense along K, 16 whole words at a time. Returns the
  // packed depth.
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

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native

#endif
