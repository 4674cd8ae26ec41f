#pragma once

// Products in AVX512 registers for the kernels of _moe_mlp, in place of cpublas::brgemm:
// nothing is generated, a finished row is handed over while it is in registers, and what
// will be read next from memory is asked for in between.

#include <ATen/cpu/vec/vec.h>
#include <ATen/native/cpu/MoEAvx512Packing.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

// The sums of a product are registers only if the loops over them, of at most 16
// iterations, are unrolled.
#if defined(__clang__)
#define MOE_UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define MOE_UNROLL _Pragma("GCC unroll 16")
#else
#define MOE_UNROLL
#endif

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_vector {

// Words (fp32, or a pair of bfloat16) of a line between two looks at the prefetch.
constexpr int64_t kWords = 16;
// Registers of a row of the result.
constexpr int64_t kMaxRegisters = moe_avx512::kPanelCols / moe_avx512::kLanes;

// Rows of the result that are computed together: with their registers about as many
// as there are, and enough that a sum does not wait for its own last product. Not more
// than L1 has ways: rows that are a multiple of a page apart meet in one set of it.
constexpr int64_t block_rows(int64_t columns) {
  return columns > 48 ? 6 : 8;
}
template <int64_t registers>
constexpr int64_t kRows = block_rows(registers * moe_avx512::kLanes);

// Whether this compiler can make products of bfloat16.
#ifdef MOE_HAS_AVX512_BF16
constexpr bool kHasBFloat16 = true;
#else
constexpr bool kHasBFloat16 = false;
#endif

// sum + a * b of words.
template <typename compute_t>
MOE_AVX512_BF16_TARGET C10_ALWAYS_INLINE __m512
add_product(__m512 sum, __m512 a, __m512 b) {
  if constexpr (std::is_same_v<compute_t, float>) {
    return _mm512_fmadd_ps(a, b, sum);
  } else {
#ifdef MOE_HAS_AVX512_BF16
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    TORCH_INTERNAL_ASSERT(false, "see is_eligible");
#endif
  }
}

// A word in every lane. It is not always aligned, nor a float.
C10_ALWAYS_INLINE __m512 broadcast_word(const float* word) {
  float value;
  std::memcpy(&value, word, sizeof(value));
  return _mm512_set1_ps(value);
}

// Stores the first n floats of the registers, rounded to scalar_t.
template <typename scalar_t, int64_t registers>
MOE_AVX512_BF16_TARGET C10_ALWAYS_INLINE void
store_registers(scalar_t* dst, int64_t n, const __m512 (&from)[registers]) {
  using moe_avx512::kLanes;
  using moe_avx512::Vec;
  if constexpr (std::is_same_v<scalar_t, BFloat16>) {
    static_assert(registers % 2 == 0);
    MOE_UNROLL
    for (int64_t j = 0; j < registers; j += 2) {
      const auto left = std::clamp<int64_t>(n - j * kLanes, 0, 2 * kLanes);
      _mm512_mask_storeu_epi16(
          dst + j * kLanes,
          static_cast<__mmask32>((uint64_t{1} << left) - 1),
          moe_avx512::round_two(from[j], from[j + 1]));
    }
  } else if constexpr (std::is_same_v<scalar_t, float>) {
    MOE_UNROLL
    for (int64_t j = 0; j < registers; ++j) {
      Vec(from[j]).store(
          dst + j * kLanes, std::clamp<int64_t>(n - j * kLanes, 0, kLanes));
    }
  } else {
    moe_avx512::store_row(
        dst, n, [&](int64_t j) { return Vec(from[j / kLanes]); });
  }
}

// Matrices that are asked for in the order of their addresses, on their way to L2,
// while others are multiplied.
class Prefetch {
 public:
  Prefetch() = default;
  template <typename compute_t>
  Prefetch(const compute_t* data, int64_t lines, int64_t length, int64_t ld)
      : line_(reinterpret_cast<const char*>(data)),
        lines_(lines),
        bytes_(length * static_cast<int64_t>(sizeof(compute_t))),
        ld_(ld * static_cast<int64_t>(sizeof(compute_t))) {}

  bool is_done() const {
    return lines_ <= 0;
  }
  // Cache lines of all, before the first call of next.
  int64_t size() const {
    return std::max<int64_t>(lines_, 0) * ((bytes_ + 63) / 64);
  }

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

// Two matrices one after the other, so many cache lines of them per look.
struct PacedPrefetch {
  Prefetch parts[2];
  int64_t pace = 0;

  // The pace at which they are complete after so many looks.
  void set_looks(int64_t looks) {
    pace = (parts[0].size() + parts[1].size() + looks - 1) / looks;
  }

  C10_ALWAYS_INLINE void next() {
    if (pace > 0) {
      parts[parts[0].is_done() ? 1 : 0].next(pace);
    }
  }
};

// The operands of a product: a row major, b packed as [words][ld_b], in words.
struct Operands {
  const float* a;
  int64_t ld_a;
  const float* b;
  int64_t ld_b;
  int64_t words;
};

// out.begin(i) and, with the sums in registers, out.finish(i, sums) for each of
// `rows` rows from row on.
template <typename compute_t, int64_t rows, int64_t registers, typename Output>
MOE_AVX512_BF16_TARGET inline void multiply_block(
    const Operands& in,
    int64_t row,
    PacedPrefetch& prefetch,
    const Output& out) {
  const float* a = in.a + row * in.ld_a;
  const float* b = in.b;
  const int64_t ld_a = in.ld_a;
  __m512 sums[rows][registers];
  MOE_UNROLL
  for (int64_t i = 0; i < rows; ++i) {
    out.begin(row + i);
    MOE_UNROLL
    for (int64_t j = 0; j < registers; ++j) {
      sums[i][j] = _mm512_setzero_ps();
    }
  }
  for (int64_t step = 0; step < in.words; step += kWords) {
    prefetch.next();
    const int64_t end = std::min(step + kWords, in.words);
    for (int64_t word = step; word < end; ++word, b += in.ld_b) {
      __m512 right[registers];
      MOE_UNROLL
      for (int64_t j = 0; j < registers; ++j) {
        right[j] = _mm512_loadu_ps(b + j * moe_avx512::kLanes);
      }
      MOE_UNROLL
      for (int64_t i = 0; i < rows; ++i) {
        const __m512 left = broadcast_word(a + i * ld_a + word);
        MOE_UNROLL
        for (int64_t j = 0; j < registers; ++j) {
          sums[i][j] = add_product<compute_t>(sums[i][j], left, right[j]);
        }
      }
    }
  }
  MOE_UNROLL
  for (int64_t i = 0; i < rows; ++i) {
    out.finish(row + i, sums[i]);
  }
}

// The last rows, fewer than make a block.
template <typename compute_t, int64_t rows, int64_t registers, typename Output>
MOE_AVX512_BF16_TARGET inline void multiply_rest(
    int64_t left,
    const Operands& in,
    int64_t row,
    PacedPrefetch& prefetch,
    const Output& out) {
  if constexpr (rows > 0) {
    if (left == rows) {
      multiply_block<compute_t, rows, registers>(in, row, prefetch, out);
    } else {
      multiply_rest<compute_t, rows - 1, registers>(
          left, in, row, prefetch, out);
    }
  }
}

// All m rows of a result of registers * kLanes columns.
template <typename compute_t, int64_t registers, typename Output>
MOE_AVX512_BF16_TARGET inline void multiply_rows(
    int64_t m,
    const Operands& in,
    PacedPrefetch& prefetch,
    const Output& out) {
  constexpr int64_t rows = kRows<registers>;
  int64_t row = 0;
  for (; row + rows <= m; row += rows) {
    multiply_block<compute_t, rows, registers>(in, row, prefetch, out);
  }
  multiply_rest<compute_t, rows - 1, registers>(
      m - row, in, row, prefetch, out);
}

// Looks at the prefetch during a product of m rows.
template <typename compute_t>
inline int64_t looks(int64_t m, int64_t k) {
  constexpr int64_t rows = kRows<kMaxRegisters>;
  const int64_t words = k / moe_avx512::kVnni<compute_t>;
  return (m + rows - 1) / rows * ((words + kWords - 1) / kWords);
}

// Rows of floats, added to what is there or not.
template <int64_t registers>
struct FloatRows {
  float* c;
  int64_t ld;
  bool accumulate;

  C10_ALWAYS_INLINE void begin(int64_t) const {}
  C10_ALWAYS_INLINE void finish(int64_t row, const __m512* sums) const {
    float* to = c + row * ld;
    MOE_UNROLL
    for (int64_t j = 0; j < registers; ++j, to += moe_avx512::kLanes) {
      _mm512_storeu_ps(
          to,
          accumulate ? _mm512_add_ps(_mm512_loadu_ps(to), sums[j]) : sums[j]);
    }
  }
};

// C (m, n) = A (m, k) B [+ C] with B packed as [k / v][ld_b][v], v = kVnni, for n a
// multiple of kLanes, at most kPanelCols, and k and ld_a of v.
template <typename compute_t>
inline void multiply(
    int64_t m,
    int64_t n,
    int64_t k,
    const compute_t* a,
    int64_t ld_a,
    const compute_t* b,
    int64_t ld_b,
    float* c,
    int64_t ld_c,
    bool accumulate,
    PacedPrefetch& prefetch) {
  constexpr int64_t v = moe_avx512::kVnni<compute_t>;
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(k % v == 0 && ld_a % v == 0);
  const Operands in{
      reinterpret_cast<const float*>(a),
      ld_a / v,
      reinterpret_cast<const float*>(b),
      ld_b,
      k / v};
  const auto run = [&](auto registers) {
    multiply_rows<compute_t, registers.value>(
        m, in, prefetch, FloatRows<registers.value>{c, ld_c, accumulate});
  };
  switch (n / moe_avx512::kLanes) {
    case 1:
      return run(std::integral_constant<int64_t, 1>());
    case 2:
      return run(std::integral_constant<int64_t, 2>());
    case 3:
      return run(std::integral_constant<int64_t, 3>());
    default:
      return run(std::integral_constant<int64_t, 4>());
  }
}

} // namespace moe_vector
} // namespace CPU_CAPABILITY
} // namespace at::native
