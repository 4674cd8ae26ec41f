#pragma once

// Activations of _moe_mlp and their derivatives on vectors, and the places of gate and up of a
// hidden unit in a row of pre-activations. Activations without a gate read only `gate`.

#include <ATen/native/MoEMLPUtils.h>
#include <ATen/native/cpu/MoEPacking.h>
#include <c10/util/MathConstants.h>

#include <algorithm>
#include <cstdint>
#include <utility>

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
template <size_t first = 0, typename Fn>
inline void dispatch_activation(const moe::ActivationSpec& spec, const Fn& fn) {
  constexpr auto entry = moe::kActivations[first];
  if (spec.kind != entry.kind) {
    if constexpr (first + 1 < moe::kActivations.size()) {
      dispatch_activation<first + 1>(spec, fn);
    }
  } else if (entry.has_limit && spec.is_limited()) {
    fn(ActivationType<entry.kind, entry.has_limit>{});
  } else {
    fn(ActivationType<entry.kind, false>{});
  }
}

// With `fast`, for 16-bit results, the exponential has an error of at most 20 float ulps. It
// overflows to infinity, as the sigmoid of a large negative number must be 0.
template <bool fast, typename Vec>
C10_ALWAYS_INLINE Vec sigmoid(const Vec& x) {
  return Vec(1) / (Vec(1) + (fast ? x.neg().exp_u20() : x.neg().exp()));
}

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

// Gate and up of some hidden units.
template <typename Vec>
struct GateUp {
  Vec gate, up;
};

// The output of an activation, and the gradients of gate and up from the output's.
template <typename Vec>
struct ActivationGrads {
  Vec act;
  GateUp<Vec> grads;
};

// Without the clamp.
template <Activation kind, bool fast, typename Vec>
C10_ALWAYS_INLINE ActivationGrads<Vec> unclamped_grads(
    const GateUp<Vec>& h, const Vec& grad, const ActivationConstants<Vec>& constants) {
  const auto& [gate, up] = h;
  const Vec zero(0);
  // From the function of the gate and its derivative.
  const auto gated = [&](const std::pair<Vec, Vec>& f) -> ActivationGrads<Vec> {
    return {f.first * h.up, {grad * h.up * f.second, grad * f.first}};
  };
  const auto plain = [&](const std::pair<Vec, Vec>& f) -> ActivationGrads<Vec> {
    return {f.first, {grad * f.second, zero}};
  };
  if constexpr (kind == Activation::SwiGLU) {
    return gated(silu_with_grad<fast>(gate));
  } else if constexpr (kind == Activation::GeGLU) {
    return gated(gelu_with_grad(gate));
  } else if constexpr (kind == Activation::GeGLUTanh) {
    return gated(gelu_tanh_with_grad(gate));
  } else if constexpr (kind == Activation::ReGLU) {
    const Vec positive = vec::maximum(gate, zero);
    return {positive * up, {Vec::blendv(grad * up, zero, gate <= zero), grad * positive}};
  } else if constexpr (kind == Activation::SwiGLUOAI) {
    const Vec s = sigmoid<fast>(constants.alpha * gate);
    // Not alpha * gate first: it may overflow while s is 0.
    const Vec gate_s = gate * s;
    const Vec gate_grad = s + constants.alpha * gate_s * (Vec(1) - s);
    return {gate_s * (up + Vec(1)), {grad * (up + Vec(1)) * gate_grad, grad * gate_s}};
  } else if constexpr (kind == Activation::SiLU) {
    return plain(silu_with_grad<fast>(gate));
  } else if constexpr (kind == Activation::GELU) {
    return plain(gelu_with_grad(gate));
  } else if constexpr (kind == Activation::ReLU) {
    return {vec::maximum(gate, zero), {Vec::blendv(grad, zero, gate <= zero), zero}};
  } else {
    static_assert(kind == Activation::ReLU2);
    const Vec positive = vec::maximum(gate, zero);
    const Vec gate_grad = Vec::blendv(grad * (Vec(2) * positive), zero, gate <= zero);
    return {positive * positive, {gate_grad, zero}};
  }
}

// Values at the limit pass no gradient, as in torch.clamp; NaN passes none either.
template <typename Act, bool fast, typename Vec>
C10_ALWAYS_INLINE ActivationGrads<Vec> activate_with_grads(
    const GateUp<Vec>& h, const Vec& grad, const ActivationConstants<Vec>& constants) {
  if constexpr (!Act::clamps) {
    return unclamped_grads<Act::kind, fast>(h, grad, constants);
  } else {
    const Vec& limit = constants.limit;
    const GateUp<Vec> clamped{
        vec::minimum(h.gate, limit), vec::minimum(vec::maximum(h.up, limit.neg()), limit)};
    const auto [act, grads] = unclamped_grads<Act::kind, fast>(clamped, grad, constants);
    const Vec zero(0);
    return {
        act,
        {Vec::blendv(zero, grads.gate, h.gate < limit),
         Vec::blendv(zero, grads.up, h.up.abs() < limit)}};
  }
}

template <typename Act, bool fast, typename Vec>
C10_ALWAYS_INLINE Vec activate(const GateUp<Vec>& h, const ActivationConstants<Vec>& constants) {
  // Nobody reads the gradients, so compilers drop them.
  return activate_with_grads<Act, fast>(h, Vec(0), constants).act;
}

// Where gate and up of hidden unit f are in a row of H or dH.
struct HiddenLayout {
  int64_t hidden;  // F
  bool gated;
  bool interleaved;

  int64_t cols() const {
    return gated ? 2 * hidden : hidden;
  }
  // 2 if all gates precede all ups.
  int64_t halves() const {
    return gated && !interleaved ? 2 : 1;
  }

  // Loads units [f, f + n) of a row, zeros after n. Ups that are apart begin at `up_offset`.
  template <typename scalar_t>
  C10_ALWAYS_INLINE GateUp<VecOf<scalar_t>>
  load(const scalar_t* row, int64_t up_offset, int64_t f, int64_t n) const {
    constexpr int64_t lanes = kLanes<scalar_t>;
    if (!interleaved) {
      const auto gate = load_lanes(row + f, n);
      return {gate, gated ? load_lanes(row + up_offset + f, n) : gate};
    }
    const auto a = load_lanes(row + 2 * f, 2 * n);
    const auto b = load_lanes(row + 2 * f + lanes, std::max<int64_t>(0, 2 * n - lanes));
    const auto [gate0, up0] = vec::deinterleave2(a[0], a[1]);
    const auto [gate1, up1] = vec::deinterleave2(b[0], b[1]);
    return {{gate0, gate1}, {up0, up1}};
  }

  // Stores them unless row is null. Returns the values rounded to scalar_t.
  template <typename scalar_t, typename Micro>
  C10_ALWAYS_INLINE GateUp<VecOf<scalar_t>>
  store(scalar_t* row, int64_t f, int64_t n, const GateUp<VecOf<scalar_t>>& x) const {
    constexpr int64_t lanes = kLanes<scalar_t>;
    const auto to = [&](int64_t at) { return row == nullptr ? row : row + at; };
    if (!interleaved) {
      const auto gate = store_lanes<scalar_t, Micro>(to(f), x.gate, n);
      return {gate, gated ? store_lanes<scalar_t, Micro>(to(hidden + f), x.up, n) : gate};
    }
    const auto [a0, a1] = vec::interleave2(x.gate[0], x.up[0]);
    const auto [b0, b1] = vec::interleave2(x.gate[1], x.up[1]);
    store_lanes<scalar_t, Micro>(to(2 * f), {a0, a1}, 2 * n);
    store_lanes<scalar_t, Micro>(
        2 * n > lanes ? to(2 * f + lanes) : nullptr, {b0, b1}, 2 * n - lanes);
    return {
        store_lanes<scalar_t, Micro>(nullptr, x.gate), store_lanes<scalar_t, Micro>(nullptr, x.up)};
  }

  // fn(elements, their number) for each half of these units, unless row is null.
  template <typename scalar_t, typename Fn>
  void for_each_half(scalar_t* row, int64_t f, int64_t n, const Fn& fn) const {
    const int64_t width = interleaved ? 2 : 1;
    for (int64_t half = 0; row != nullptr && half < halves(); ++half) {
      fn(row + half * hidden + width * f, width * n);
    }
  }
};

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native
