"""F.moe_mlp as an ``experts_implementation`` of transformers.

``register()`` once, then ``config._experts_implementation = "moe_mlp"`` or
``model.set_experts_implementation("moe_mlp")``. Router, attention and checkpoints stay
those of transformers.
"""

import os
import sys

from layouts import from_transformers

import torch
import torch.nn.functional as F
from torch import Tensor


NAME = "moe_mlp"

_GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "relu": "reglu",
}


def add_client_packages() -> None:
    """Makes the packages of the folder ``$MOE_CLIENTS`` importable, after all others."""
    folder = os.environ.get("MOE_CLIENTS")
    if folder and folder not in sys.path:
        sys.path.append(folder)


def activation_arguments(experts: torch.nn.Module) -> dict[str, object]:
    """The activation of a transformers experts module, as arguments of F.moe_mlp.

    Raises:
        NotImplementedError: a module that computes something F.moe_mlp does not.
    """
    if not experts.has_gate or experts.has_post_expert_norm:
        raise NotImplementedError(
            f"{type(experts).__name__}: experts without gates or with a norm after them "
            "have no F.moe_mlp equivalent here"
        )
    if hasattr(experts, "limit"):
        # The clamped gate of gpt-oss.
        return {
            "activation": "swiglu_oai",
            "alpha": experts.alpha,
            "limit": experts.limit,
        }
    if type(experts)._apply_gate.__name__ != "_default_apply_gate":
        raise NotImplementedError(
            f"{type(experts).__name__} has a gate of its own, which is not known here"
        )
    name = experts.config.hidden_act
    if name not in _GATED:
        raise NotImplementedError(
            f"hidden_act must be one of {', '.join(_GATED)}, got {name}"
        )
    return {"activation": _GATED[name]}


def experts_forward(
    self: torch.nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """What transformers calls in place of the forward of an experts module.

    Args:
        self: the experts module.
        hidden_states: ``(T, D)``.
        top_k_index: ``(T, K)``; the number of experts means none.
        top_k_weights: ``(T, K)``.
    """
    weights = from_transformers(self)
    return F.moe_mlp(
        hidden_states,
        top_k_index,
        top_k_weights,
        weights.w_in,
        weights.w_out,
        b_in=weights.b_in,
        b_out=weights.b_out,
        gate_interleaved=weights.gate_interleaved,
        **activation_arguments(self),
    )


def register() -> None:
    """Adds ``"moe_mlp"`` to the implementations that transformers can choose from."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
