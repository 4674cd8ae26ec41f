#pragma once

// The pre-activation H of _moe_mlp, and its gradient, as the AVX512 kernels read and write it.

#include <ATen/native/cpu/MoEAvx512Packing.h>

#include <algorithm>
#include <tuple>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_avx512 {

// Where gate and up of hidden unit f are in a row of H or dH.
struct HiddenLayout {
  int64_t hidden; // F
  bool gated;
  bool interleaved;

  int64_t cols() const {
    return gated ? 2 * hidden : hidden;
  }

  // Gate and up of units [f, f + n), n <= kLanes.
  template <typename scalar_t>
  C10_ALWAYS_INLINE void load(
      const scalar_t* row,
      int64_t f,
      int64_t n,
      Vec& gate,
      Vec& up) const {
    if (!interleaved) {
      gate = load_float(row + f, n);
      up = gated ? load_float(row + hidden + f, n) : gate;
      return;
    }
    const Vec low = load_float(row + 2 * f, 2 * n);
    const Vec high = 2 * n > kLanes
        ? load_float(row + 2 * f + kLanes, 2 * n - kLanes)
        : Vec(0.f);
    std::tie(gate, up) = vec::deinterleave2(low, high);
  }

  template <typename scalar_t>
  C10_ALWAYS_INLINE void store(
      scalar_t* row,
      int64_t f,
      int64_t n,
      const Vec& gate,
      const Vec& up) const {
    if (!interleaved) {
      store_float(row + f, gate, n);
      if (gated) {
        store_float(row + hidden + f, up, n);
      }
      return;
    }
    const auto [low, high] = vec::interleave2(gate, up);
    store_float(row + 2 * f, low, 2 * n);
    if (2 * n > kLanes) {
      store_float(row + 2 * f + kLanes, high, 2 * n - kLanes);
    }
  }

  // Of units [f, f + 2 * kLanes).
  template <typename scalar_t>
  C10_ALWAYS_INLINE void store_two(
      scalar_t* row,
      int64_t f,
      const Vec& gate0,
      const Vec& up0,
      const Vec& gate1,
      const Vec& up1) const {
    if (!interleaved) {
      store_rounded(row + f, gate0, gate1);
      if (gated) {
        store_rounded(row + hidden + f, up0, up1);
      }
      return;
    }
    const auto [low0, high0] = vec::interleave2(gate0, up0);
    const auto [low1, high1] = vec::interleave2(gate1, up1);
    store_rounded(row + 2 * f, low0, high0);
    store_rounded(row + 2 * f + 2 * kLanes, low1, high1);
  }

  template <typename scalar_t>
  void zero(scalar_t* row, int64_t f, int64_t n) const {
    if (interleaved) {
      std::fill_n(row + 2 * f, 2 * n, scalar_t(0));
      return;
    }
    std::fill_n(row + f, n, scalar_t(0));
    if (gated) {
      std::fill_n(row + hidden + f, n, scalar_t(0));
    }
  }
};

} // namespace moe_avx512
} // namespace CPU_CAPABILITY
} // namespace at::native
