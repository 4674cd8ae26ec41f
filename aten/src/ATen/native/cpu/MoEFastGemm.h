#pragma once

// Micro-GEMMs in place of those of MoEMicroGemm.h: for bfloat16 with instructions of their
// own, AMX tiles (MoEAmx.h), else AVX512-BF16, and for few rows (MoEThinGemm.h).

#include <ATen/cpu/Utils.h>
#include <ATen/native/cpu/MoEAmx.h>
#include <ATen/native/cpu/MoEMicroGemm.h>
#include <ATen/native/cpu/MoEThinGemm.h>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

#if defined(MOE_HAS_AMX)

// Of two vectors of floats to one of bfloat16, to the nearest; denormals to 0, as in products.
struct NativeRounding {
  C10_ALWAYS_INLINE static vec::Vectorized<BFloat16>
  round(const vec::Vectorized<float>& low, const vec::Vectorized<float>& high) {
    __m512i rounded;
    asm("vcvtne2ps2bf16 %2, %1, %0"
        : "=v"(rounded)
        : "v"(static_cast<__m512>(high)), "v"(static_cast<__m512>(low)));
    return rounded;
  }
};

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
        sums[i][j] = dot(left, right[j], sums[i][j]);
      }
    }
  }

  C10_ALWAYS_INLINE static vec::Vectorized<float>
  add_word(const BFloat16* a, __m512 words, const vec::Vectorized<float>& sum) {
    int32_t word;
    std::memcpy(&word, a, sizeof(word));
    return dot(_mm512_set1_epi32(word), _mm512_castps_si512(words), sum);
  }

 private:
  C10_ALWAYS_INLINE static __m512 dot(__m512i left, __m512i right, __m512 sum) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right));
    return sum;
  }
};

struct AmxGemm : NativeRounding {
  using operand_t = BFloat16;
  using Session = moe_amx::Session;

  static constexpr int64_t kTileRows = moe_amx::kBlock;
  static constexpr int64_t kTileCols = kPanelCols;
  static constexpr int64_t kDepth = 1024;
  static constexpr int64_t kMinDepth = kDepth;
  static constexpr bool kDenseRows = true;

  template <typename Fn = Nothing>
  static void multiply(
      int64_t m, int64_t n, int64_t k, const RowLines<BFloat16>& a, const BFloat16* b,
      const ProductTile<float>& out, const Fn& between = {}) {
    for (int64_t row = 0; row < m; row += kTileRows) {
      moe_amx::multiply(
          std::min(kTileRows, m - row), round_up(n, moe_amx::kTile),
          round_up(k, kWordElements<BFloat16>), a.ld, kPanelCols, kPanelCols, out.accumulate,
          a.lines[row] + a.offset, b, out.c + row * kPanelCols);
      between();
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

#else

template <typename Fn>
bool dispatch_fast_micro_gemm(ScalarType, const Fn&) {
  return false;
}

#endif

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native
