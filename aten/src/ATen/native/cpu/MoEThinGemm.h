#pragma once

// Products of a few rows with a weight that lies along K, for the kernels of
// _moe_mlp: a decode step, which reads every weight once and should do little else.
// cpublas::brgemm without AMX multiplies each weight by 16 rows, of which all but
// these few are zeros. Here 16 lines of the weight are transposed in registers, and
// a product is of 16 lines and one row. The order of addition is brgemm's, so that
// the bits of a row do not depend on how many others there are.

#include <ATen/native/cpu/MoEBrgemmPacking.h>

#include <cstring>
#include <type_traits>
#include <utility>

// The files of a capability are compiled for AVX512; only functions of this target
// may hold instructions of AVX512-BF16.
#if defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 11)
#define MOE_HAS_AVX512_BF16
#define MOE_AVX512_BF16_TARGET __attribute__((target("avx512bf16")))
#else
#define MOE_AVX512_BF16_TARGET
#endif

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_thin {

// Rows up to which this is the faster one.
constexpr int64_t kMaxRows = 8;
// Lines of the weight in a register.
constexpr int64_t kLines = 16;
// Such registers at a time: a sum waits for its own last product.
constexpr int64_t kGroups = 2;
// Words (fp32, or a pair of bfloat16) of a line that are transposed at once.
constexpr int64_t kWords = 16;

// A matrix that is asked for in the order of its addresses, on its way to L2, while
// another one is multiplied. Lines are read 32 at a time and 64 bytes of each, which
// the hardware fetches at half of the speed of one long run.
class Prefetch {
 public:
  Prefetch() = default;
  template <typename compute_t>
  Prefetch(const compute_t* data, int64_t lines, int64_t length, int64_t ld)
      : line_(reinterpret_cast<const char*>(data)),
        lines_(lines),
        bytes_(length * static_cast<int64_t>(sizeof(compute_t))),
        ld_(ld * static_cast<int64_t>(sizeof(compute_t))) {}

  C10_ALWAYS_INLINE void next(int64_t count) {
    while (count > 0 && lines_ > 0) {
      const int64_t run = std::min(count, (bytes_ - at_ + 63) / 64);
      for (const auto i : c10::irange(run)) {
        _mm_prefetch(line_ + at_ + i * 64, _MM_HINT_T1);
      }
      count -= run;
      at_ += run * 64;
      if (at_ >= bytes_) {
        at_ = 0;
        line_ += ld_;
        --lines_;
      }
    }
  }

 private:
  const char* line_ = nullptr;
  int64_t lines_ = 0;
  int64_t bytes_ = 0;
  int64_t ld_ = 0;
  int64_t at_ = 0;
};

// out[word][line] for the next kWords words of kLines lines, at most `left`.
C10_ALWAYS_INLINE void transpose_lines(
    const float* const* lines,
    int64_t word,
    int64_t left,
    float* out) {
  const void* from[kLines];
  for (const auto i : c10::irange(kLines)) {
    from[i] = lines[i] + word;
  }
  if (left >= kWords) {
    moe_brgemm::transpose_words(from, out, kLines);
    return;
  }
  alignas(64) float rest[kLines * kWords];
  for (const auto i : c10::irange(kLines)) {
    std::memcpy(rest + i * kWords, from[i], left * sizeof(float));
    from[i] = rest + i * kWords;
  }
  moe_brgemm::transpose_words(from, out, kLines);
}

// Whether this compiler can make products of the type. The CPU can: without
// AVX512-BF16 brgemm has no kernel for bfloat16 either, see is_eligible.
template <typename compute_t>
constexpr bool is_available() {
#ifdef MOE_HAS_AVX512_BF16
  return true;
#else
  return std::is_same_v<compute_t, float>;
#endif
}

// kGroups * kLines lines by `rows` rows.
template <typename compute_t, int64_t rows>
MOE_AVX512_BF16_TARGET void multiply_lines(
    const float* const* lines,
    int64_t words,
    const float* x,
    int64_t ld_x,
    Prefetch& prefetch,
    __m512* out) {
  __m512 sums[kGroups * rows];
  for (int64_t i = 0; i < kGroups * rows; ++i) {
    sums[i] = _mm512_setzero_ps();
  }
  alignas(64) float transposed[kGroups][kWords * kLines];
  for (int64_t word = 0; word < words; word += kWords) {
    const int64_t left = words - word;
    prefetch.next(kGroups * kLines);
    for (int64_t g = 0; g < kGroups; ++g) {
      transpose_lines(lines + g * kLines, word, left, transposed[g]);
    }
    for (int64_t w = 0; w < std::min(kWords, left); ++w) {
      for (int64_t r = 0; r < rows; ++r) {
        const __m512 x_word = _mm512_set1_ps(x[r * ld_x + word + w]);
        for (int64_t g = 0; g < kGroups; ++g) {
          const __m512 line_words = _mm512_load_ps(transposed[g] + w * kLines);
          __m512& sum = sums[g * rows + r];
          if constexpr (std::is_same_v<compute_t, float>) {
            sum = _mm512_fmadd_ps(line_words, x_word, sum);
          } else {
#ifdef MOE_HAS_AVX512_BF16
            sum = _mm512_dpbf16_ps(sum, (__m512bh)line_words, (__m512bh)x_word);
#endif
          }
        }
      }
    }
  }
  for (int64_t i = 0; i < kGroups * rows; ++i) {
    out[i] = sums[i];
  }
}

template <typename compute_t>
using multiply_lines_fn = void (*)(
    const float* const*,
    int64_t,
    const float*,
    int64_t,
    Prefetch&,
    __m512*);

template <typename compute_t, size_t... i>
multiply_lines_fn<compute_t> multiply_lines_of(
    int64_t rows,
    std::index_sequence<i...>) {
  static constexpr multiply_lines_fn<compute_t> table[] = {
      &multiply_lines<compute_t, i + 1>...};
  return table[rows - 1];
}

// C (n, m) = A (n, k) X^T (k, m) [+ C] for m <= kMaxRows and k a multiple of kVnni:
// both operands as they lie in memory. `next` is what will be multiplied after A.
template <typename compute_t>
inline void multiply(
    int64_t n,
    int64_t m,
    int64_t k,
    const compute_t* a,
    int64_t ld_a,
    const compute_t* x,
    int64_t ld_x,
    float* c,
    int64_t ld_c,
    bool accumulate,
    Prefetch next) {
  constexpr int64_t v = moe_brgemm::kVnni<compute_t>;
  const auto multiply_lines = multiply_lines_of<compute_t>(
      m, std::make_index_sequence<kMaxRows>());
  for (int64_t i = 0; i < n; i += kGroups * kLines) {
    const int64_t count = std::min(kGroups * kLines, n - i);
    const float* lines[kGroups * kLines];
    for (const auto j : c10::irange(kGroups * kLines)) {
      // What there is more than `count` is not stored.
      lines[j] = reinterpret_cast<const float*>(
          a + (i + std::min(j, count - 1)) * ld_a);
    }
    const int64_t following = i + kGroups * kLines;
    Prefetch prefetch = following < n
        ? Prefetch(
              a + following * ld_a,
              std::min(kGroups * kLines, n - following),
              k,
              ld_a)
        : next;
    __m512 sums[kGroups * kMaxRows];
    multiply_lines(
        lines,
        k / v,
        reinterpret_cast<const float*>(x),
        ld_x / v,
        prefetch,
        sums);
    for (const auto g : c10::irange(kGroups)) {
      for (const auto r : c10::irange(m)) {
        alignas(64) float sum[kLines];
        _mm512_store_ps(sum, sums[g * m + r]);
        float* to = c + (i + g * kLines) * ld_c + r;
        for (const auto j : c10::irange(std::min(kLines, count - g * kLines))) {
          to[j * ld_c] = accumulate ? to[j * ld_c] + sum[j] : sum[j];
        }
      }
    }
  }
}

} // namespace moe_thin
} // namespace CPU_CAPABILITY
} // namespace at::native
