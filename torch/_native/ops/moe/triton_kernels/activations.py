"""Expert activations and their derivatives, as Triton device functions.

Everything here is elementwise in float32. ``gate`` and ``up`` are the two
halves of the pre-activation H for a gated (GLU) activation; a plain activation
only has ``gate``. Names and formulas are those of ``aten::_moe_mlp``.

Every formula maps an input row of zeros to zeros, so that padding rows
need no masking after the activation.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda


# Triton's interpreter has none.
INLINE_ASM = tl.constexpr(not triton.knobs.runtime.interpret)

_LOG2_E = tl.constexpr(1.4426950408889634)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
# Of 2u, where gelu_tanh(x) = x/2 * (1 + tanh(u)) and u = c * (x + 0.044715 x^3).
_TANH_SCALE = tl.constexpr(2 * 0.7978845608028654)
_TANH_CUBIC = tl.constexpr(2 * 0.7978845608028654 * 0.044715)
_TANH_CUBIC_SLOPE = tl.constexpr(3 * 2 * 0.7978845608028654 * 0.044715)


@triton.jit
def _sigmoid(x):
    # A division guards against overflow with seven instructions. The denominator needs
    # no guard, and the reciprocal's error of one ulp is half of the division's. The
    # exponential guards results below 2^-126 with three; added to 1 they vanish.
    if INLINE_ASM and is_cuda():
        y = tl.inline_asm_elementwise(
            """
            {
                .reg .f32 t;
                ex2.approx.ftz.f32 t, $1;
                add.f32 t, t, 0f3F800000;
                rcp.approx.ftz.f32 $0, t;
            }
            """,
            "=f,f",
            [x * -_LOG2_E],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        y = tl.sigmoid(x)
    return y


@triton.jit
def _gelu_tanh_sigmoid(x):
    # (1 + tanh(u)) / 2 == sigmoid(2u); the sigmoid form has no cancellation
    # near zero and needs no libdevice tanh, which the interpreter lacks.
    return _sigmoid(x * (x * x * _TANH_CUBIC + _TANH_SCALE))


@triton.jit
def unary_forward(x, KIND: tl.constexpr):
    """``f(x)`` of a plain activation, or of what a gated one does to its gate.

    Args:
        x: float32 block.
        KIND: name of the activation.
    """
    if KIND == "silu" or KIND == "swiglu":
        y = x * _sigmoid(x)
    elif KIND == "gelu" or KIND == "geglu":
        y = x * (0.5 + 0.5 * tl.erf(x * _SQRT_HALF))
    elif KIND == "geglu_tanh":
        y = x * _gelu_tanh_sigmoid(x)
    elif KIND == "relu" or KIND == "reglu":
        y = tl.where(x <= 0.0, 0.0, x)
    else:
        tl.static_assert(KIND == "relu2", "unknown activation")
        r = tl.where(x <= 0.0, 0.0, x)
        y = r * r
    return y


@triton.jit
def unary_backward(grad, x, KIND: tl.constexpr):
    """``grad * f'(x)`` of :func:`unary_forward`; ``grad`` and ``x`` are float32.

    Where relu and relu2 are flat it is 0, also for an infinite ``grad``.
    """
    if KIND == "silu" or KIND == "swiglu":
        s = _sigmoid(x)
        dx = grad * (s * (1.0 + x * (1.0 - s)))
    elif KIND == "gelu" or KIND == "geglu":
        cdf = 0.5 + 0.5 * tl.erf(x * _SQRT_HALF)
        dx = grad * (cdf + x * _INV_SQRT_2PI * tl.exp(x * x * -0.5))
    elif KIND == "geglu_tanh":
        s = _gelu_tanh_sigmoid(x)
        slope = x * x * _TANH_CUBIC_SLOPE + _TANH_SCALE
        dx = grad * (s + x * s * (1.0 - s) * slope)
    elif KIND == "relu" or KIND == "reglu":
        dx = tl.where(x <= 0.0, 0.0, grad)
    else:
        tl.static_assert(KIND == "relu2", "unknown activation")
        dx = tl.where(x <= 0.0, 0.0, grad * (2.0 * x))
    return dx


@triton.jit
def _clamp_halves(gate, up, limit, HAS_LIMIT: tl.constexpr):
    """``min(gate, limit)`` and ``clamp(up, -limit, limit)``; NaN stays NaN."""
    if HAS_LIMIT:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, up


@triton.jit
def apart_from_limit(gate, up, limit):
    """The halves as they are saved in 8 bits, where rounding may not move them to the limit.

    Only the side on which a value is counts for gradients; those beyond become one value.
    """
    inside, outside = 0.9375 * limit, 1.125 * limit
    gate = tl.where(gate >= limit, outside, tl.where(gate > inside, inside, gate))
    edge = tl.where(tl.abs(up) >= limit, outside, inside)
    up = tl.where(up > inside, edge, tl.where(up < -inside, -edge, up))
    return gate, up


@triton.jit
def glu_forward(
    gate, up, alpha, limit, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr
):
    """``A`` from the two halves of H (float32 in, float32 out)."""
    g, u = _clamp_halves(gate, up, limit, HAS_LIMIT)
    if ACTIVATION == "swiglu_oai":
        a = g * _sigmoid(alpha * g) * (u + 1.0)
    else:
        a = unary_forward(g, ACTIVATION) * u
    return a


@triton.jit
def glu_backward(
    grad, gate, up, alpha, limit, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr
):
    """``(d gate, d up)`` for ``grad = dA`` (float32 in, float32 out).

    At the limit and beyond it the gradient is zero, as ``torch.clamp``'s is.
    """
    g, u = _clamp_halves(gate, up, limit, HAS_LIMIT)
    if ACTIVATION == "swiglu_oai":
        s = _sigmoid(alpha * g)
        # Not alpha * g first: it may overflow while s is 0.
        g_s = g * s
        d_gate = grad * (u + 1.0) * (s + alpha * g_s * (1.0 - s))
        d_up = grad * g_s
    else:
        d_gate = unary_backward(grad * u, g, ACTIVATION)
        d_up = grad * unary_forward(g, ACTIVATION)
    if HAS_LIMIT:
        # As of gate and up, which need no registers any more.
        d_gate = tl.where(g < limit, d_gate, 0.0)
        d_up = tl.where(tl.abs(u) < limit, d_up, 0.0)
    return d_gate, d_up
