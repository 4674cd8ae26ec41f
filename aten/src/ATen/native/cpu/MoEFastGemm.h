#pragma once

// Micro-GEMMs in place of those of MoEMicroGemm.h: for bfloat16 with instructions of their
// own, AMX tiles (MoEAmx.h), else AVX512-BF16, and for few rows.

#include <ATen/cpu/Utils.h>
#include <ATen/native/cpu/MoEAmx.h>
#include <ATen/native/cpu/MoEMicroGemm.h>

#ifdef MOE_HAS_AMX
// dispatch_fast_micro_gemm() is there.
#define MOE_HAS_FAST_GEMM

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

// The words of VecGemm, with one instruction per vector of them instead of two shifts,
// two masks and two products. In assembly, as the files of a capability are compiled
// for AVX512 without it.
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

// Products of a few rows with weights that lie along K, as they are stored: a decode step,
// which reads every weight once and should do little else. 16 lines of a weight are
// transposed in registers, and a product is of one word of them and of one row. The order
// of addition is that of VecGemm, so that a row has the same bits among many others.
template <typename operand, typename Products = FusedMultiplyAdd>
struct ThinGemm : VecGemm<operand, Products> {
  using operand_t = operand;
  using Vec = vec::Vectorized<float>;

  static constexpr int64_t kThinRows = 8;
  static constexpr int64_t kThinLines = 16;
  static constexpr int64_t kThinDepth = 16 * kWordElements<operand>;
  static_assert(VecGemm<operand, Products>::kMinDepth % kThinDepth == 0);

  // c[row * kPanelCols + i] = sum over k of rows[row][k] w[i * stride + k], for m rows and
  // i < lines.
  static void multiply_lines(
      int64_t m, int64_t lines, int64_t depth, const operand* const* rows, const operand* w,
      int64_t stride, float* c) {
    with_constant<kThinRows>(m, [&](auto count) {
      for (int64_t i = 0; i < lines; i += kThinLines) {
        multiply_block<count>(depth, rows, w + i * stride, stride, c + i);
      }
    });
  }

 private:
  // Cache lines of a line of w between what is multiplied and what is fetched.
  static constexpr int64_t kAhead = 8 * kThinDepth;

  template <int64_t rows>
  static void multiply_block(
      int64_t depth, const operand* const* x, const operand* w, int64_t stride, float* c) {
    using Wide = VecGemm<operand, Products>;
    const int64_t step = Wide::kOneSum ? depth : Wide::kMinDepth;
    const operand* a[rows];
    std::copy_n(x, rows, a);
    for (int64_t k0 = 0; k0 < depth; k0 += step) {
      const int64_t end = std::min(k0 + step, depth);
      Vec sums[rows][1];
      MOE_UNROLL
      for (int64_t r = 0; r < rows; ++r) {
        sums[r][0] = Vec(0);
      }
      for (int64_t k = k0; k < end; k += kThinDepth) {
        // Further along the lines, then along those that follow.
        const int64_t next = k + kAhead < depth ? kAhead : kAhead - depth + kThinLines * stride;
        __m512 words[16];
        transpose_words(
            [&](int64_t i) {
              prefetch(w + i * stride + k + next);
              return _mm512_loadu_ps(w + i * stride + k);
            },
            [&](int64_t at, __m512 word) { words[at] = word; });
        MOE_UNROLL
        for (int64_t at = 0; at < 16; ++at) {
          const operand* const word[1] = {reinterpret_cast<const operand*>(&words[at])};
          Products::add(a, k + at * kWordElements<operand>, word, sums);
        }
      }
      MOE_UNROLL
      for (int64_t r = 0; r < rows; ++r) {
        float* to = c + r * kPanelCols;
        (k0 > 0 ? Vec::loadu(to) + sums[r][0] : sums[r][0]).store(to);
      }
    }
  }
};

inline bool has_instructions(const char* name) {
  const auto capabilities = at::cpu::get_cpu_capabilities();
  const auto found = capabilities.find(name);
  return found != capabilities.end() && found->second.toBool();
}

// Calls fn(scalar_t(0), Micro()) if there is one of these for the dtype and this CPU.
template <typename Fn>
bool dispatch_fast_micro_gemm(ScalarType dtype, const Fn& fn) {
  static const bool has_dot = has_instructions("avx512_bf16");
  static const bool has_amx = has_dot && has_instructions("amx_bf16") && at::cpu::init_amx();
  if (dtype == kFloat) {
    fn(float(0), ThinGemm<float>());
  } else if (dtype == kBFloat16 && has_amx) {
    fn(BFloat16(0), AmxGemm());
  } else if (dtype == kBFloat16 && has_dot) {
    fn(BFloat16(0), ThinGemm<BFloat16, DotProducts>());
  } else {
    return false;
  }
  return true;
}

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native

#endif
