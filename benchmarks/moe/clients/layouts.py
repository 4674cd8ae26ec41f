"""Expert weights of other libraries as the operands of F.moe_mlp, and back.

Terms: E experts, F hidden dimension of an expert, D model dimension. Ours is the layout
of nn.Linear: w_in ``(E, 2F, D)``, w_out ``(E, D, F)``.

    library                      gate and up                    down
    transformers, most models    (E, 2F, D), gates first        (E, D, F)
    transformers, gpt-oss        (E, D, 2F), interleaved        (E, F, D)
    torchtitan                   w1, w3: (E, F, D) each         w2: (E, D, F)

All conversions are exact. Those from a library are views, so that an optimizer keeps working on the
tensors of the model: torchtitan's w3 is F.moe_mlp's w_up.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ExpertWeights(NamedTuple):
    """Operands of F.moe_mlp.

    Attributes:
        w_in: ``(E, 2F, D)``, or the gates ``(E, F, D)`` beside ``w_up``.
        w_out: ``(E, D, F)``.
        b_in: ``(E, 2F)`` or None.
        b_out: ``(E, D)`` or None.
        gate_interleaved: whether row 2i of w_in is gate i and row 2i + 1 is up i; else
            the F gates stand before the F ups.
        w_up: ``(E, F, D)`` or None.
    """

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None = None
    b_out: Tensor | None = None
    gate_interleaved: bool = False
    w_up: Tensor | None = None


def interleave(weights: ExpertWeights) -> ExpertWeights:
    """The same experts with interleaved gates (a copy of w_in and b_in)."""
    if weights.gate_interleaved:
        return weights
    weights = concatenate(weights)

    def rows(x: Tensor) -> Tensor:
        return torch.stack(x.chunk(2, dim=1), dim=2).flatten(1, 2)

    b_in = None if weights.b_in is None else rows(weights.b_in)
    return weights._replace(w_in=rows(weights.w_in), b_in=b_in, gate_interleaved=True)


def concatenate(weights: ExpertWeights) -> ExpertWeights:
    """The same experts with the gates first in one tensor (a copy of w_in and b_in)."""
    if weights.w_up is not None:
        w_in = torch.cat([weights.w_in, weights.w_up], dim=1)
        return weights._replace(w_in=w_in, w_up=None)
    if not weights.gate_interleaved:
        return weights

    def rows(x: Tensor) -> Tensor:
        return torch.cat([x[:, 0::2], x[:, 1::2]], dim=1)

    b_in = None if weights.b_in is None else rows(weights.b_in)
    return weights._replace(w_in=rows(weights.w_in), b_in=b_in, gate_interleaved=False)


def from_transformers(experts: torch.nn.Module) -> ExpertWeights:
    """Views of the parameters of a transformers experts module with gates."""
    w_in, w_out = experts.gate_up_proj, experts.down_proj
    if experts.is_transposed:
        w_in, w_out = w_in.mT, w_out.mT
    return ExpertWeights(
        w_in,
        w_out,
        experts.gate_up_proj_bias if experts.has_bias else None,
        experts.down_proj_bias if experts.has_bias else None,
        gate_interleaved=not experts.is_concatenated,
    )


def to_transformers(
    weights: ExpertWeights, *, is_transposed: bool = False, is_concatenated: bool = True
) -> dict[str, Tensor]:
    """The state dict of a transformers experts module.

    Args:
        weights: in either order of gates.
        is_transposed: as the module stores its matrices (True for gpt-oss).
        is_concatenated: likewise (False for gpt-oss).
    """
    weights = concatenate(weights) if is_concatenated else interleave(weights)
    w_in, w_out = weights.w_in, weights.w_out
    if is_transposed:
        w_in, w_out = w_in.mT, w_out.mT
    state = {"gate_up_proj": w_in, "down_proj": w_out}
    if weights.b_in is not None:
        state["gate_up_proj_bias"] = weights.b_in
    if weights.b_out is not None:
        state["down_proj_bias"] = weights.b_out
    return {name: tensor.contiguous() for name, tensor in state.items()}


def from_torchtitan(w1: Tensor, w2: Tensor, w3: Tensor) -> ExpertWeights:
    """torchtitan's GroupedExperts: w1 gate and w3 up ``(E, F, D)``, w2 down ``(E, D, F)``."""
    return ExpertWeights(w1, w2, w_up=w3)


def to_torchtitan(weights: ExpertWeights) -> dict[str, Tensor]:
    """The state dict of torchtitan's GroupedExperts.

    Raises:
        ValueError: experts with biases, for which it has no parameters.
    """
    if weights.b_in is not None or weights.b_out is not None:
        raise ValueError("torchtitan's GroupedExperts has no biases, these experts do")
    w1, w3 = weights.w_in, weights.w_up
    if w3 is None:
        w1, w3 = concatenate(weights).w_in.chunk(2, dim=1)
    state = {"w1": w1, "w2": weights.w_out, "w3": w3}
    return {name: tensor.contiguous() for name, tensor in state.items()}
