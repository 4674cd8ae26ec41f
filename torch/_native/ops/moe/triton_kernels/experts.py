"""What an expert layer is, as one value: the operands of ``aten::_moe_mlp`` and its activation.

Eligibility (../triton_impl.py), launchers and Inductor's lowerings pass it. Imports no Triton.
"""

import dataclasses

from torch import Tensor


GATED_ACTIVATIONS: tuple[str, ...] = (
    "swiglu",
    "geglu",
    "geglu_tanh",
    "reglu",
    "swiglu_oai",
)
PLAIN_ACTIVATIONS: tuple[str, ...] = ("silu", "gelu", "relu", "relu2")
# Gated activations whose halves may be clamped; swiglu_oai always clamps them.
LIMITED_ACTIVATIONS: tuple[str, ...] = ("swiglu", "geglu", "swiglu_oai")

# Defaults of swiglu_oai.
DEFAULT_ALPHA = 1.702
DEFAULT_LIMIT = 7.0


@dataclasses.dataclass(frozen=True)
class Activation:
    """The keyword arguments of ``_moe_mlp`` that define the activation."""

    activation: str = "swiglu"
    gate_interleaved: bool = False
    alpha: float | None = None
    limit: float | None = None

    @property
    def gated(self) -> bool:
        return self.activation in GATED_ACTIVATIONS

    def kernel_args(self) -> dict[str, object]:
        limited = self.activation == "swiglu_oai" or self.limit is not None
        return {
            "alpha": DEFAULT_ALPHA if self.alpha is None else self.alpha,
            "limit": DEFAULT_LIMIT if self.limit is None else self.limit,
            "ACTIVATION": self.activation,
            "HAS_LIMIT": limited,
            "GATED": self.gated,
            "INTERLEAVED": self.gate_interleaved,
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Experts:
    """The operands of ``_moe_mlp`` in the order of its schema, and the activation.

    T tokens, D model dim, F expert hidden dim, E experts, K experts per token, R routed rows,
    g = 2 for a gated activation else 1.

    Attributes:
        input: (T, D); in a backward that does without it, a tensor of its shape and dtype.
        w_in: (E, g*F, D), or (E, F, D), the gate, beside ``w_up``.
        w_out: (E, D, F).
        offs: (E,) int32, where the rows of each expert end.
        topk_weights: (T, K), or None for ones.
        row_slots, slot_rows: (R,) and (T, K) int32 of ``_moe_permutation``; None where the rows
            are in the experts' order already, with K = 1.
        b_in, b_out: (E, g*F) and (E, D), or None.
        w_up: (E, F, D), or None.
        act: the activation.
    """

    input: Tensor
    w_in: Tensor
    w_out: Tensor
    offs: Tensor
    topk_weights: Tensor | None = None
    row_slots: Tensor | None = None
    slot_rows: Tensor | None = None
    b_in: Tensor | None = None
    b_out: Tensor | None = None
    w_up: Tensor | None = None
    act: Activation = dataclasses.field(default=Activation(), kw_only=True)

    @classmethod
    def of_call(cls, *operands, **named):
        """From the arguments of an op; those of the activation are keywords."""
        names = [field.name for field in dataclasses.fields(Activation)]
        act = Activation(**{n: named.pop(n) for n in names if n in named})
        return cls(*operands, act=act, **named)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The given weights, by name."""
        named = {"w_in": self.w_in, "w_out": self.w_out, "w_up": self.w_up}
        return {name: w for name, w in named.items() if w is not None}

    @property
    def tensors(self) -> list[Tensor]:
        """All given tensors."""
        found: list[Tensor] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            found += value if isinstance(value, list) else [value]
        return [x for x in found if isinstance(x, Tensor)]

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The operands with a gradient, in the order of the output mask."""
        weights = (self.w_in, self.w_out, self.topk_weights)
        return (self.input, *weights, self.b_in, self.b_out, self.w_up)

    @property
    def num_hidden(self) -> int:
        return self.w_out.shape[2]

    @property
    def width(self) -> int:
        """Columns of H."""
        return self.num_hidden * (2 if self.act.gated else 1)

    @property
    def halves_adjacent(self) -> bool:
        """Whether rows of H have all gates, then all ups."""
        return self.act.gated and not self.act.gate_interleaved


def row_major(x: Tensor) -> Tensor:
    """``x`` (rows, C) with unit stride in its last dimension, copied only if it lacks one."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
