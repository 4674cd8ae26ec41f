"""F.moe_mlp as the forward of a transformers experts module.

What of a module is passed to ``torch.nn.functional.moe_mlp`` is decided in each call, as activation, gate and
limit may be replaced between two, by :func:`plan_of`; a module that computes something else keeps the forward of "grouped_mm", and the
log says why. transformers.patch is the rest of what transformers needs; this file goes beside its moe.py.
"""

import logging
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.parametrize import ParametrizationList


logger = logging.getLogger(__name__)
NAME = "moe_mlp"

# Activations with and without a gate, by ``act_fn`` (the class of a module, or a function's name).
_ACTIVATIONS = {
    "SiLUActivation": ("swiglu", "silu"),
    "SiLU": ("swiglu", "silu"),
    "silu": ("swiglu", "silu"),
    "GELUActivation": ("geglu", "gelu"),
    "GELU": ("geglu", "gelu"),
    "GELUTanh": ("geglu_tanh", None),
    "NewGELUActivation": ("geglu_tanh", None),
    "ReLU": ("reglu", "relu"),
    "ReLUSquaredActivation": (None, "relu2"),
}


class _Gate(NamedTuple):
    """A gate that is not ``act_fn(gate) * up``, as F.moe_mlp has it."""

    activation: str | None  # None is that of ``act_fn``
    # The module's attribute with the limit that gate and up are clamped to first.
    limit: str | None = None
    alpha: str | None = None  # likewise
    # Whether its experts compute in float32, whatever the dtype of the weights.
    float32: bool = False


# By the class that defines it: other gates also have a limit, and clamp something else.
_OAI = _Gate("swiglu_oai", "limit", "alpha")
_GATES = {
    "_default_apply_gate": _Gate(None),
    "BeamExperts._apply_gate": _Gate(None),  # in float32, as F.moe_mlp always is
    "DeepseekV4Experts._apply_gate": _Gate(None, "limit"),
    "Glm5NextTextExperts._apply_gate": _Gate("swiglu", "swiglu_limit"),
    "HYV4Experts._apply_gate": _Gate("swiglu", "swiglu_limit"),
    "HYV4VLExperts._apply_gate": _Gate("swiglu", "swiglu_limit"),
    "GptOssExperts._apply_gate": _OAI,
    "OpenAIPrivacyFilterExperts._apply_gate": _OAI._replace(float32=True),
    "MiniMaxM3VLExperts._apply_gate": _Gate(_OAI[0], "swiglu_limit", "swiglu_alpha"),
    # For all models; what its attributes say, see _fp8_gate.
    "FP8Experts._apply_gate": _Gate(None),
}


class Plan(NamedTuple):
    """How a module is computed."""

    options: dict[str, object]  # keyword arguments of F.moe_mlp, without tensors
    reason: str | None = None  # why it is not F.moe_mlp
    float32: bool = False  # of operands in 16 bits
    fp8: bool = False  # whether it is transformers' FP8Experts


def activation_of(act_fn: object, *, gated: bool = True) -> str | None:
    """Name of an activation for F.moe_mlp; None if it has none."""
    # Not the name in the config, which models keep under several keys or not at all.
    is_module = isinstance(act_fn, torch.nn.Module)
    name = type(act_fn).__name__ if is_module else getattr(act_fn, "__name__", "")
    if isinstance(act_fn, torch.nn.GELU) and act_fn.approximate == "tanh":
        name = "GELUTanh"
    return _ACTIVATIONS.get(name, (None, None))[0 if gated else 1]


def plan_of(experts: torch.nn.Module) -> Plan:
    """What F.moe_mlp needs to compute a module of ``use_experts_implementation``."""
    name = type(experts).__name__
    if getattr(experts, "has_post_expert_norm", False):
        return Plan({}, f"{name} has a norm between the experts and the sum over them")
    fp8 = any(c.__name__ == "FP8Experts" for c in type(experts).__mro__)
    if fp8 and (reason := _fp8_reason(experts)) is not None:
        return Plan({}, reason, fp8=True)
    options: dict[str, object] = {}
    act_fn, gate = getattr(experts, "act_fn", None), _Gate(None)
    if experts.has_gate:
        own_gate = vars(experts).get("_apply_gate", type(experts)._apply_gate)
        where = getattr(own_gate, "__qualname__", repr(own_gate))
        if where not in _GATES:
            own = f"{name} has a gate of its own, {where}, which is not known"
            return Plan({}, own, fp8=fp8)
        gate = _fp8_gate(experts) if fp8 else _GATES[where]
        options["gate_interleaved"] = not experts.is_concatenated
    activation = gate.activation or activation_of(act_fn, gated=experts.has_gate)
    if activation is None:
        known = ", ".join(_ACTIVATIONS)
        reason = f"act_fn of {name} is {act_fn}, which is none of {known}"
        return Plan({}, reason, fp8=fp8)
    options["activation"] = activation
    for argument in ("limit", "alpha"):
        if attribute := getattr(gate, argument):
            options[argument] = float(getattr(experts, attribute))
    return Plan(options, float32=gate.float32, fp8=fp8)


def _fp8_gate(experts: torch.nn.Module) -> _Gate:
    if experts.swiglu_alpha is not None:
        return _Gate("swiglu_oai", "swiglu_limit", "swiglu_alpha")
    return _Gate(None, None if experts.limit is None else "limit")


def _fp8_reason(experts: torch.nn.Module) -> str | None:
    """Why the op does not take the gate or the weights of an FP8Experts."""
    if experts.gate_softcap is not None:
        return "FP8Experts has a gate with a softcap"
    first = first_name(experts)
    for name in (first, "down_proj"):
        try:
            _fp8_weight(experts, name)
        except ValueError as error:
            return f"{name} of FP8Experts is not taken by the op: {error}"
    return None


def current_plan(experts: torch.nn.Module) -> Plan:
    """The current :func:`plan_of`. The first module of a class that falls back logs why.

    Hooks come and go: a module whose activation has one falls back while it does.
    """
    plan = plan_of(experts)
    if any(part is not None and hooked(part) for part in experts._modules.values()):
        reason = f"a part of {type(experts).__name__} has hooks"
        plan = Plan({}, reason, fp8=plan.fp8)
    if plan.reason is not None:
        log_once(f'experts_implementation="{NAME}" falls back: {plan.reason}')
    return plan


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def hooked(module: torch.nn.Module, recurse: bool = True) -> bool:
    """Whether calls of a module, or of a part of it, have hooks; not those of FSDP.

    F.moe_mlp computes what parts of experts do without calling them, so a hook of theirs would see
    nothing. Those of FSDP only gather parameters, and parametrizations run where a weight is read.
    """
    if isinstance(module, ParametrizationList):
        return False
    for name in _HOOKS:
        for hook in getattr(module, name).values():
            where = getattr(hook, "__module__", None) or ""
            if not where.startswith("torch.distributed."):
                return True
    parts = module._modules.values() if recurse else ()
    return any(part is not None and hooked(part) for part in parts)


_logged: set[str] = set()


def log_once(message: str) -> None:
    # Inside of a graph there is no log: a capture without graph breaks is worth more.
    if message not in _logged and not torch.compiler.is_compiling():
        _logged.add(message)
        logger.warning(message)


def experts_forward(self, hidden_states, top_k_index, top_k_weights) -> Tensor:
    """What transformers calls in place of the forward of an experts module.

    Of ``top_k_index``, (T, K), the number of experts means none.
    """
    plan, routed = current_plan(self), (hidden_states, top_k_index, top_k_weights)
    if plan.reason is not None:
        if plan.fp8:
            from transformers.integrations import finegrained_fp8

            return finegrained_fp8.fp8_grouped_mm_experts_forward(self, *routed)
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(self, *routed)
    weights = stored(self)
    if plan.fp8:
        first, last = (_fp8_weight(self, n) for n in (first_name(self), "down_proj"))
        return _quantized_forward(self, routed, first, last, {}, plan.options)
    if type(weights[0]).__module__.startswith("torchao."):
        return _torchao_forward(self, routed, *weights, plan.options)
    return compute(self, plan, routed, weights)


def first_name(experts: torch.nn.Module) -> str:
    """The first weight's name."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def stored(experts: torch.nn.Module) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Weights as they are stored, and biases as F.moe_mlp names them."""
    first, biases = first_name(experts), {}
    if experts.has_bias:
        biases["b_in"] = getattr(experts, f"{first}_bias")
        biases["b_out"] = experts.down_proj_bias
    return getattr(experts, first), experts.down_proj, biases


def compute(
    experts: torch.nn.Module,
    plan: Plan,
    routed: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor, dict[str, Tensor]],
    num_rows: int | None = None,
) -> Tensor:
    """F.moe_mlp of ``routed`` tokens, ids and router weights, by :func:`stored` weights."""
    (hidden_states, ids, scores), (w_in, w_out, biases) = routed, weights
    dtype = hidden_states.dtype
    if experts.is_transposed:
        w_in, w_out = w_in.mT, w_out.mT
    if plan.float32 and w_in.dtype.itemsize < 4:
        hidden_states, scores = hidden_states.float(), scores.float()
        w_in, w_out = w_in.float(), w_out.float()
        biases = {name: bias.float() for name, bias in biases.items()}
    operands = (hidden_states, ids, scores, w_in, w_out)
    output = F.moe_mlp(*operands, num_rows=num_rows, **biases, **plan.options)
    # Under autocast the op returns 16 bits. All implementations return the dtype of the input.
    return output.to(dtype)


def _torchao_forward(self, routed, w_in, w_out, biases: dict, options: dict) -> Tensor:
    """The same on numbers and scales of torchao, as they are; the weights are frozen."""
    from torch.nn.utils._moe_checkpoints import from_torchao

    if self.is_transposed:
        raise NotImplementedError(
            f"torchao has a scale for each row of {type(self).__name__}'s weights, which are (E, in, "
            "out), and the op one for each output. Quantise their .mT, dequantize() them, or use "
            'experts_implementation="eager"'
        )
    weights = from_torchao(w_in), from_torchao(w_out)
    return _quantized_forward(self, routed, *weights, biases, options)


def _fp8_weight(experts: torch.nn.Module, name: str):
    """A weight of FP8Experts as an operand of the op.

    Raises:
        ValueError: the op does not take it.
    """
    from torch.nn.utils._moe_checkpoints import from_compressed_tensors, from_fp8_blocks

    weight, scale = (
        getattr(experts, f"{name}{suffix}") for suffix in ("", "_scale_inv")
    )
    if weight.dtype == torch.int8:  # two numbers of FP4 a byte
        exponents = scale.view(torch.uint8) if scale.element_size() == 1 else scale
        return from_compressed_tensors(weight.view(torch.uint8), exponents)
    return from_fp8_blocks(weight.detach(), scale.detach())


def _quantized_forward(
    self, routed, w_in, w_out, biases: dict, options: dict
) -> Tensor:
    """By the op on quantised weights. Rows keep their dtype: they are not rounded to 8 bits."""
    x, ids, topk_weights = routed
    if w_in.recipe != w_out.recipe:
        raise NotImplementedError(
            f"{type(self).__name__} has weights with scales of {w_in.recipe} and {w_out.recipe}; the "
            "op takes one kind of both"
        )
    row_slots, slot_rows, offs, _ = torch._moe_permutation(ids, w_in.data.shape[0])
    b_in, b_out = (
        b if b is None else b.to(x.dtype) for b in map(biases.get, ("b_in", "b_out"))
    )
    return torch._moe_mlp_scaled(
        x, None, None, offs, topk_weights, row_slots, slot_rows, b_in, b_out, None,
        [], [*w_in[:2]], [*w_out[:2]], [], recipe_w=[w_in.recipe], **options,
    )[0]  # fmt: skip
