#pragma once

// Activations of _moe_mlp and their derivatives, on vectors, and where gate and up of a
// hidden unit are in a row of pre-activations. Activations without a gate read `gate`
// only.

#include <ATen/native/MoEMLPUtils.h>
#include <ATen/native/cpu/MoEPacking.h>
#include <c10/util/MathConstants.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <type_traits>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

using moe::Activation;

// An activation as a type. clamps: gate and up are clamped at spec.limit.
template <Activation kind_, bool clamps_>
struct ActivationType {
  static constexpr Activation kind = kind_;
  static constexpr bool clamps = clamps_;
};

// Calls fn with the ActivationType of a spec.
template <typename Fn>
inline void dispatch_activation(const moe::ActivationSpec& spec, const Fn& fn) {
  const bool clamps = std::isfinite(spec.limit);
#define MOE_CASE(name)   \
  case Activation::name: \
    return fn(ActivationType<Activation::name, false>{});
#define MOE_CASE_WITH_LIMIT(name)                                \
  case Activation::name:                                         \
    return clamps ? fn(ActivationType<Activation::name, true>{}) \
                  : fn(ActivationType<Activation::name, false>{});
  switch (spec.kind) {
    MOE_CASE_WITH_LIMIT(SwiGLU)
    MOE_CASE_WITH_LIMIT(GeGLU)
    MOE_CASE(GeGLUTanh)
    MOE_CASE(ReGLU)
    MOE_CASE_WITH_LIMIT(SwiGLUOAI)
    MOE_CASE(SiLU)
    MOE_CASE(GELU)
    MOE_CASE(ReLU)
    MOE_CASE(ReLU2)
  }
#undef MOE_CASE
#undef MOE_CASE_WITH_LIMIT
}

// With `fast`, for results that are rounded to 16 bits, the exponential is exact to
// 20 units in the last place of a float. It overflows to infinity, as the sigmoid of a
// large negative number must be 0.
template <bool fast, typename Vec>
C10_ALWAYS_INLINE Vec sigmoid(const Vec& x) {
  if constexpr (fast) {
    return Vec(1) / (Vec(1) + x.neg().exp_u20());
  } else {
    return Vec(1) / (Vec(1) + x.neg().exp());
  }
}

template <typename Vec>
inline Vec relu(const Vec& x) {
  return vec::maximum(x, Vec(0));
}

// silu(x) and its derivative
template <bool fast, typename Vec>
C10_ALWAYS_INLINE std::pair<Vec, Vec> silu_with_grad(const Vec& x) {
  const Vec s = sigmoid<fast>(x);
  return {x * s, s * (Vec(1) + x * (Vec(1) - s))};
}

template <typename Vec>
inline std::pair<Vec, Vec> gelu_with_grad(const Vec& x) {
  using acc_t = typename Vec::value_type;
  const Vec cdf = Vec(0.5) * (Vec(1) + (x * Vec(c10::frac_sqrt_2<acc_t>)).erf());
  const Vec pdf_of_0(static_cast<acc_t>(c10::frac_sqrt_2<double> * c10::frac_1_sqrt_pi<double>));
  const Vec pdf = pdf_of_0 * (x * x * Vec(-0.5)).exp();
  return {x * cdf, cdf + x * pdf};
}

template <typename Vec>
inline std::pair<Vec, Vec> gelu_tanh_with_grad(const Vec& x) {
  using acc_t = typename Vec::value_type;
  const Vec beta(static_cast<acc_t>(c10::sqrt_2<double> * c10::frac_1_sqrt_pi<double>));
  const Vec kappa(static_cast<acc_t>(0.044715));
  const Vec x2 = x * x;
  const Vec t = (beta * x * (Vec(1) + kappa * x2)).tanh();
  const Vec inner_grad = beta * (Vec(1) + Vec(3) * kappa * x2);
  const Vec half_sum = Vec(0.5) * (Vec(1) + t);
  return {x * half_sum, half_sum + Vec(0.5) * x * (Vec(1) - t * t) * inner_grad};
}

template <typename Vec>
struct ActivationConstants {
  Vec alpha;
  Vec limit;

  explicit ActivationConstants(const moe::ActivationSpec& spec)
      : alpha(static_cast<typename Vec::value_type>(spec.alpha)),
        limit(static_cast<typename Vec::value_type>(spec.limit)) {}
};

// An activation's output and, from the gradient of it, those of gate and up.
template <typename Vec>
struct ActivationGrads {
  Vec act, gate, up;
};

// Without the clamp.
template <Activation kind, bool fast, typename Vec>
C10_ALWAYS_INLINE ActivationGrads<Vec> unclamped_grads(
    const Vec& gate, const Vec& up, const Vec& grad, const ActivationConstants<Vec>& constants) {
  const Vec zero(0);
  // From the function of the gate and its derivative.
  const auto gated = [&](const std::pair<Vec, Vec>& f) {
    return ActivationGrads<Vec>{f.first * up, grad * up * f.second, grad * f.first};
  };
  const auto plain = [&](const std::pair<Vec, Vec>& f) {
    return ActivationGrads<Vec>{f.first, grad * f.second, zero};
  };
  if constexpr (kind == Activation::SwiGLU) {
    return gated(silu_with_grad<fast>(gate));
  } else if constexpr (kind == Activation::GeGLU) {
    return gated(gelu_with_grad(gate));
  } else if constexpr (kind == Activation::GeGLUTanh) {
    return gated(gelu_tanh_with_grad(gate));
  } else if constexpr (kind == Activation::ReGLU) {
    const Vec positive = relu(gate);
    return {positive * up, Vec::blendv(grad * up, zero, gate <= zero), grad * positive};
  } else if constexpr (kind == Activation::SwiGLUOAI) {
    const Vec s = sigmoid<fast>(constants.alpha * gate);
    // Not alpha * gate first, which overflows where s is 0.
    const Vec gate_s = gate * s;
    const Vec gate_grad = s + constants.alpha * gate_s * (Vec(1) - s);
    return {gate_s * (up + Vec(1)), grad * (up + Vec(1)) * gate_grad, grad * gate_s};
  } else if constexpr (kind == Activation::SiLU) {
    return plain(silu_with_grad<fast>(gate));
  } else if constexpr (kind == Activation::GELU) {
    return plain(gelu_with_grad(gate));
  } else if constexpr (kind == Activation::ReLU) {
    return {relu(gate), Vec::blendv(grad, zero, gate <= zero), zero};
  } else {
    static_assert(kind == Activation::ReLU2);
    const Vec positive = relu(gate);
    return {positive * positive, Vec::blendv(grad * (Vec(2) * positive), zero, gate <= zero), zero};
  }
}

// Like torch.clamp, a value at the limit passes no gradient, nor does NaN.
template <typename Act, bool fast, typename Vec>
C10_ALWAYS_INLINE ActivationGrads<Vec> activate_with_grads(
    const Vec& gate, const Vec& up, const Vec& grad, const ActivationConstants<Vec>& constants) {
  if constexpr (!Act::clamps) {
    return unclamped_grads<Act::kind, fast>(gate, up, grad, constants);
  } else {
    const Vec& limit = constants.limit;
    const auto grads = unclamped_grads<Act::kind, fast>(
        vec::minimum(gate, limit), vec::minimum(vec::maximum(up, limit.neg()), limit), grad,
        constants);
    const Vec zero(0);
    return {
        grads.act, Vec::blendv(zero, grads.gate, gate < limit),
        Vec::blendv(zero, grads.up, up.abs() < limit)};
  }
}

template <typename Act, bool fast, typename Vec>
C10_ALWAYS_INLINE Vec
activate(const Vec& gate, const Vec& up, const ActivationConstants<Vec>& constants) {
  // Compilers drop the gradients, which nobody reads.
  return activate_with_grads<Act, fast>(gate, up, Vec(0), constants).act;
}

// Two vectors of hidden units.
template <typename Vec>
struct GateUp {
  std::pair<Vec, Vec> gate, up;
};

template <typename Act, bool fast, typename Vec>
C10_ALWAYS_INLINE std::pair<Vec, Vec>
activate_pair(const GateUp<Vec>& h, const ActivationConstants<Vec>& constants) {
  return {
      activate<Act, fast>(h.gate.first, h.up.first, constants),
      activate<Act, fast>(h.gate.second, h.up.second, constants)};
}

// Where gate and up of hidden unit f are in a row of H or dH.
struct HiddenLayout {
  int64_t hidden;  // F
  bool gated;
  bool interleaved;

  int64_t cols() const {
    return gated ? 2 * hidden : hidden;
  }
  // 2 if the gates of all units come before the ups.
  int64_t halves() const {
    return gated && !interleaved ? 2 : 1;
  }

  // Of units [f, f + n) of a row whose ups, if apart, begin at `up_offset`; zeros after n.
  template <typename scalar_t>
  C10_ALWAYS_INLINE GateUp<VecOf<scalar_t>>
  load(const scalar_t* row, int64_t up_offset, int64_t f, int64_t n) const {
    constexpr int64_t lanes = kPairLanes<scalar_t>;
    if (!interleaved) {
      const auto gate = load_pair(row + f, n);
      return {gate, gated ? load_pair(row + up_offset + f, n) : gate};
    }
    const auto a = load_pair(row + 2 * f, 2 * n);
    const auto b = load_pair(row + 2 * f + lanes, std::max<int64_t>(0, 2 * n - lanes));
    const auto [gate0, up0] = vec::deinterleave2(a.first, a.second);
    const auto [gate1, up1] = vec::deinterleave2(b.first, b.second);
    return {{gate0, gate1}, {up0, up1}};
  }

  // Stores them, unless row is null, and returns what scalar_t holds.
  template <typename scalar_t, typename Micro>
  C10_ALWAYS_INLINE GateUp<VecOf<scalar_t>>
  store(scalar_t* row, int64_t f, int64_t n, const GateUp<VecOf<scalar_t>>& x) const {
    constexpr int64_t lanes = kPairLanes<scalar_t>;
    const auto to = [&](int64_t at) { return row == nullptr ? row : row + at; };
    if (!interleaved) {
      const auto gate = store_pair<scalar_t, Micro>(to(f), x.gate, n);
      return {gate, gated ? store_pair<scalar_t, Micro>(to(hidden + f), x.up, n) : gate};
    }
    const auto [a0, a1] = vec::interleave2(x.gate.first, x.up.first);
    const auto [b0, b1] = vec::interleave2(x.gate.second, x.up.second);
    store_pair<scalar_t, Micro>(to(2 * f), {a0, a1}, 2 * n);
    store_pair<scalar_t, Micro>(
        2 * n > lanes ? to(2 * f + lanes) : nullptr, {b0, b1}, 2 * n - lanes);
    return {
        store_pair<scalar_t, Micro>(nullptr, x.gate), store_pair<scalar_t, Micro>(nullptr, x.up)};
  }

  // That these units will be read.
  template <typename scalar_t>
  void prefetch_units(const scalar_t* row, int64_t f, int64_t n) const {
    const int64_t width = interleaved ? 2 : 1;
    for (int64_t half = 0; half < halves(); ++half) {
      prefetch(row + half * hidden + width * f, width * n);
    }
  }

  template <typename scalar_t>
  void zero(scalar_t* row, int64_t f, int64_t n) const {
    const int64_t width = interleaved ? 2 : 1;
    for (int64_t half = 0; row != nullptr && half < halves(); ++half) {
      std::fill_n(row + half * hidden + width * f, width * n, scalar_t(0));
    }
  }
};

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native
