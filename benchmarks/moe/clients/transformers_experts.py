"""F.moe_mlp as an ``experts_implementation`` of transformers.

``register()`` once, then ``config._experts_implementation = "moe_mlp"`` or
``model.set_experts_implementation("moe_mlp")``. Router, attention and checkpoints stay
those of transformers.
"""

import importlib.util
import os
import pathlib
import sys

from layouts import from_transformers

import torch
import torch.nn.functional as F
from torch import Tensor


NAME = "moe_mlp"

# Name of what a module has as act_fn, the class of a module or a function's own.
_GATED = {
    "SiLUActivation": "swiglu",
    "SiLU": "swiglu",
    "silu": "swiglu",
    "GELUActivation": "geglu",
    "GELUTanh": "geglu_tanh",
    "ReLU": "reglu",
}

# Where a gate is defined that is swiglu_oai, and what it calls alpha and limit. By name:
# other gates have a limit as well, and clamp something else.
_CLAMPED = {
    "GptOssExperts._apply_gate": ("alpha", "limit"),
    "OpenAIPrivacyFilterExperts._apply_gate": ("alpha", "limit"),
    "MiniMaxM3VLExperts._apply_gate": ("swiglu_alpha", "swiglu_limit"),
}


DEFAULT_FOLDER = "build/clients"


def add_client_packages() -> None:
    """Makes the packages of ``$MOE_CLIENTS``, else build/clients, importable, after all others."""
    default = pathlib.Path(__file__).resolve().parents[3] / DEFAULT_FOLDER
    folder = os.environ.get("MOE_CLIENTS", str(default))
    if folder not in sys.path:
        sys.path.append(folder)


def require_transformers() -> None:
    """Makes transformers importable.

    Raises:
        RuntimeError: it is not installed; names the command that installs it.
    """
    add_client_packages()
    if importlib.util.find_spec("transformers") is None:
        raise RuntimeError(
            "transformers is not installed. In the root of the repository run\n"
            f"    python3 tools/stage.py python -m pip install --target {DEFAULT_FOLDER} "
            "-r benchmarks/moe/clients/requirements.txt\n"
            "or set MOE_CLIENTS to a folder that has it"
        )


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
    gate = type(experts)._apply_gate.__qualname__
    if gate in _CLAMPED:
        alpha, limit = (getattr(experts, name) for name in _CLAMPED[gate])
        return {"activation": "swiglu_oai", "alpha": alpha, "limit": limit}
    if gate != "_default_apply_gate":
        raise NotImplementedError(
            f"{type(experts).__name__} has a gate of its own, {gate}, which is not known "
            f"here; known are {', '.join(_CLAMPED)} and the default"
        )
    # Not the name in the config, which models keep under several keys or not at all.
    act = experts.act_fn
    name = type(act).__name__ if isinstance(act, torch.nn.Module) else act.__name__
    if name not in _GATED:
        raise NotImplementedError(
            f"act_fn of {type(experts).__name__} must be one of {', '.join(_GATED)}, got "
            f"{name}"
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
