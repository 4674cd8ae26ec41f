#pragma once

// Activations of _moe_mlp and their derivatives, on vectors and on rows. The
// activations without a gate read `gate` only.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/MoEMLPUtils.h>
#include <c10/util/MathConstants.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

using moe::Activation;

// Calls fn(std::integral_constant<Activation, kind>).
template <typename Fn>
inline void dispatch_activation(Activation kind, const Fn& fn) {
#define MOE_CASE(name)                                          \
  case Activation::name:                                        \
    fn(std::integral_constant<Activation, Activation::name>{}); \
    return;
  switch (kind) {
    MOE_CASE(SwiGLU)
    MOE_CASE(GeGLU)
    MOE_CASE(GeGLUTanh)
    MOE_CASE(ReGLU)
    MOE_CASE(SwiGLUOAI)
    MOE_CASE(SiLU)
    MOE_CASE(GELU)
    MOE_CASE(ReLU)
    MOE_CASE(ReLU2)
  }
#undef MOE_CASE
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
  const Vec cdf =
      Vec(0.5) * (Vec(1) + (x * Vec(c10::frac_sqrt_2<acc_t>)).erf());
  const Vec pdf_of_0(static_cast<acc_t>(
      c10::frac_sqrt_2<double> * c10::frac_1_sqrt_pi<double>));
  const Vec pdf = pdf_of_0 * (x * x * Vec(-0.5)).exp();
  return {x * cdf, cdf + x * pdf};
}

template <typename Vec>
inline std::pair<Vec, Vec> gelu_tanh_with_grad(const Vec& x) {
  using acc_t = typename Vec::value_type;
  const Vec beta(static_cast<acc_t>(
      c10::sqrt_2<double> * c10::frac_1_sqrt_pi<double>));
  const Vec kappa(static_cast<acc_t>(0.044715));
  const Vec x2 = x * x;
  const Vec t = (beta * x * (Vec(1) + kappa * x2)).tanh();
  const Vec inner_grad = beta * (Vec(1) + Vec(3) * kappa * x2);
  const Vec half_sum = Vec(0.5) * (Vec(1) + t);
  return {
      x * half_sum, half_sum + Vec(0.5) * x * (Vec(1) - t * t) * inner_grad};
}

template <typename Vec>
struct ActivationConstants {
  Vec alpha;
  Vec limit;
  // From here on nothing has a gradient: the limit, or NaN where there is none.
  Vec tie;

  explicit ActivationConstants(const moe::ActivationSpec& spec)
      : alpha(static_cast<typename Vec::value_type>(spec.alpha)),
        limit(static_cast<typename Vec::value_type>(spec.limit)),
        tie(static_cast<typename Vec::value_type>(
            spec.is_limited() ? spec.limit
                              : std::numeric_limits<double>::quiet_NaN())) {}
};

template <typename Vec>
C10_ALWAYS_INLINE std::pair<Vec, Vec> clamp_gate(
    const Vec& gate,
    const Vec& up,
    const Vec& limit) {
  return {
      vec::minimum(gate, limit),
      vec::minimum(vec::maximum(up, limit.neg()), limit)};
}

template <Activation kind, bool fast = false, typename Vec>
C10_ALWAYS_INLINE Vec activate(
    const Vec& raw_gate,
    const Vec& raw_up,
    const ActivationConstants<Vec>& constants) {
  Vec gate = raw_gate, up = raw_up;
  if constexpr (moe::activation_name(kind).has_limit) {
    std::tie(gate, up) = clamp_gate(raw_gate, raw_up, constants.limit);
  }
  if constexpr (kind == Activation::SwiGLU) {
    return gate * sigmoid<fast>(gate) * up;
  } else if constexpr (kind == Activation::GeGLU) {
    return gelu_with_grad(gate).first * up;
  } else if constexpr (kind == Activation::GeGLUTanh) {
    return gelu_tanh_with_grad(gate).first * up;
  } else if constexpr (kind == Activation::ReGLU) {
    return relu(gate) * up;
  } else if constexpr (kind == Activation::SwiGLUOAI) {
    return gate * sigmoid<fast>(constants.alpha * gate) * (up + Vec(1));
  } else if constexpr (kind == Activation::SiLU) {
    return gate * sigmoid<fast>(gate);
  } else if constexpr (kind == Activation::GELU) {
    return gelu_with_grad(gate).first;
  } else if constexpr (kind == Activation::ReLU) {
    return relu(gate);
  } else {
    static_assert(kind == Activation::ReLU2);
    const Vec positive = relu(gate);
    return positive * positive;
  }
}

// An activation's output and, from the gradient of it, those of gate and up.
template <typename Vec>
struct ActivationGrads {
  Vec act, gate, up;
};

template <Activation kind, bool fast, typename Vec>
C10_ALWAYS_INLINE ActivationGrads<Vec> clamped_with_grads(
    const Vec& gate,
    const Vec& up,
    const Vec& grad,
    const ActivationConstants<Vec>& constants) {
  const Vec zero(0);
  // From the function of the gate and its derivative.
  const auto gated = [&](const std::pair<Vec, Vec>& f) {
    return ActivationGrads<Vec>{
        f.first * up, grad * up * f.second, grad * f.first};
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
    return {
        positive * up,
        Vec::blendv(grad * up, zero, gate <= zero),
        grad * positive};
  } else if constexpr (kind == Activation::SwiGLUOAI) {
    const Vec s = sigmoid<fast>(constants.alpha * gate);
    // Not alpha * gate first, which overflows where s is 0.
    const Vec g_s = gate * s;
    const Vec g_grad = s + constants.alpha * g_s * (Vec(1) - s);
    return {
        g_s * (up + Vec(1)), grad * (up + Vec(1)) * g_grad, grad * g_s};
  } else if constexpr (kind == Activation::SiLU) {
    return plain(silu_with_grad<fast>(gate));
  } else if constexpr (kind == Activation::GELU) {
    return plain(gelu_with_grad(gate));
  } else if constexpr (kind == Activation::ReLU) {
    return {relu(gate), Vec::blendv(grad, zero, gate <= zero), zero};
  } else {
    static_assert(kind == Activation::ReLU2);
    const Vec positive = relu(gate);
    return {
        positive * positive,
        Vec::blendv(grad * (Vec(2) * positive), zero, gate <= zero),
        zero};
  }
}

// Like the backward of torch.clamp, a value exactly at the limit passes no gradient. An
// infinite one passes it where there is no limit.
template <Activation kind, bool fast = false, typename Vec>
C10_ALWAYS_INLINE ActivationGrads<Vec> activate_with_grads(
    const Vec& gate,
    const Vec& up,
    const Vec& grad,
    const ActivationConstants<Vec>& constants) {
  if constexpr (!moe::activation_name(kind).has_limit) {
    return clamped_with_grads<kind, fast>(gate, up, grad, constants);
  } else {
    const auto [g, u] = clamp_gate(gate, up, constants.limit);
    const auto grads = clamped_with_grads<kind, fast>(g, u, grad, constants);
    const Vec zero(0);
    return {
        grads.act,
        Vec::blendv(grads.gate, zero, gate >= constants.tie),
        Vec::blendv(grads.up, zero, up.abs() >= constants.tie)};
  }
}

// One pre-activation row (G*F) as gate (F) and up (F). Without a gate, `up` is
// not written.
template <typename acc_t>
inline void split_gate(
    const acc_t* row,
    int64_t hidden,
    const moe::ActivationSpec& spec,
    acc_t* gate,
    acc_t* up) {
  if (!spec.interleaved) {
    std::copy_n(row, hidden, gate);
    if (spec.is_gated) {
      std::copy_n(row + hidden, hidden, up);
    }
    return;
  }
  for (int64_t f = 0; f < hidden; ++f) {
    gate[f] = row[2 * f];
    up[f] = row[2 * f + 1];
  }
}

// Inverse of split_gate.
template <typename acc_t>
inline void merge_gate(
    const acc_t* gate,
    const acc_t* up,
    int64_t hidden,
    const moe::ActivationSpec& spec,
    acc_t* row) {
  if (!spec.interleaved) {
    std::copy_n(gate, hidden, row);
    if (spec.is_gated) {
      std::copy_n(up, hidden, row + hidden);
    }
    return;
  }
  for (int64_t f = 0; f < hidden; ++f) {
    row[2 * f] = gate[f];
    row[2 * f + 1] = up[f];
  }
}

// out (F) = act(gate, up)
template <typename acc_t>
inline void activate_row(
    const acc_t* gate,
    const acc_t* up,
    int64_t hidden,
    const moe::ActivationSpec& spec,
    acc_t* out) {
  using Vec = vec::Vectorized<acc_t>;
  const ActivationConstants<Vec> constants(spec);
  dispatch_activation(spec.kind, [&](auto kind) {
    for (int64_t f = 0; f < hidden; f += Vec::size()) {
      const int64_t count = std::min<int64_t>(Vec::size(), hidden - f);
      activate<decltype(kind)::value>(
          Vec::loadu(gate + f, count), Vec::loadu(up + f, count), constants)
          .store(out + f, count);
    }
  });
}

// In place: gate and up become their gradients.
template <typename acc_t>
inline void activate_backward_row(
    acc_t* gate,
    acc_t* up,
    const acc_t* grad,
    int64_t hidden,
    const moe::ActivationSpec& spec) {
  using Vec = vec::Vectorized<acc_t>;
  const ActivationConstants<Vec> constants(spec);
  dispatch_activation(spec.kind, [&](auto kind) {
    for (int64_t f = 0; f < hidden; f += Vec::size()) {
      const int64_t count = std::min<int64_t>(Vec::size(), hidden - f);
      const auto grads = activate_with_grads<decltype(kind)::value>(
          Vec::loadu(gate + f, count),
          Vec::loadu(up + f, count),
          Vec::loadu(grad + f, count),
          constants);
      grads.gate.store(gate + f, count);
      grads.up.store(up + f, count);
    }
  });
}

} // namespace moe_cpu
} // namespace CPU_CAPABILITY
} // namespace at::native
