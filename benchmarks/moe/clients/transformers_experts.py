"""F.moe_mlp as an ``experts_implementation`` of transformers, by one import.

    import transformers_experts
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moe_mlp")

``set_experts_implementation("moe_mlp")`` switches a model that exists; ``save_pretrained`` writes
the choice into config.json, so that a later ``from_pretrained`` takes it up. Router, attention and
checkpoints stay those of transformers. Nothing is silent: experts that F.moe_mlp cannot compute run
as before and the log says why, and so it does when a whole model has none that it could.

Some models do not use transformers' interface for experts. Those in ADAPTERS get the same choice
here, by forwards that replace theirs when it is made.
"""

import functools
import re
import sys
from collections.abc import Callable

from moe_mlp_experts import activation_of, cached_plan, experts_forward, log_once, NAME
from packages import require_transformers

import torch.nn.functional as F
from torch import nn, Tensor


# Forwards of classes that do not use the interface. Each has the arguments of the class's own, and
# is called when the choice is NAME. None from a `reason` function means that it can be.


def _llama4(self: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Weights multiply the input of the experts; each expert's own code sees every token."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    top_scores, ids = scores.topk(self.top_k, dim=1)
    rows = (x[:, None] * top_scores[..., None]).flatten(0, 1)
    w_in, w_out = self.experts.gate_up_proj.mT, self.experts.down_proj.mT
    activation = activation_of(self.experts.act_fn)
    routed = F.moe_mlp(rows, ids.view(-1, 1), None, w_in, w_out, activation=activation)
    return self.shared_expert(x) + routed.view(*ids.shape, -1).sum(1), logits


def _dbrx(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Gate and up are two parameters, and all three lie as (E*F, D)."""
    x = hidden_states.reshape(-1, self.hidden_size)
    sizes = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    gate, up, down = (w.view(sizes) for w in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
    activation = activation_of(self.mlp.activation_fn)
    y = F.moe_mlp(x, ids, weights, gate, down.mT, w_up=up, activation=activation)
    return y.view(hidden_states.shape[0], -1, self.hidden_size)


def _jetmoe(self: nn.Module, layer_input: Tensor) -> Tensor:
    """The router's selection without its host sync."""
    x = layer_input.reshape(-1, self.input_size)
    top_logits, ids = self.router.layer(x).float().topk(self.router.top_k, dim=1)
    weights = top_logits.softmax(1).type_as(x)
    w_in, w_out = self.input_linear.weight, self.output_linear.weight
    activation = activation_of(self.activation)
    y = F.moe_mlp(x, ids, weights, w_in, w_out, activation=activation)
    return y.view_as(layer_input) + self.bias


def _longcat(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Ids above the routed experts are identity experts."""
    E = self.num_routed_experts
    identity = (weights * (ids >= E)).sum(-1, keepdim=True) * hidden_states
    ids = ids.clamp(max=E)  # E means no expert
    weights = (weights, self.gate_up_proj[:E], self.down_proj)
    activation = activation_of(self.act_fn)
    y = F.moe_mlp(hidden_states, ids, *weights, activation=activation)
    return y + identity.to(y.dtype)


def _step(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    weights = (weights, self.gate_up_proj, self.down_proj)
    activation = activation_of(self.act_fn)
    return F.moe_mlp(hidden_states, ids, *weights, activation=activation)


def _unknown(act_fn: Callable[[nn.Module], object]) -> Callable:
    def reason(module: nn.Module) -> str | None:
        found = act_fn(module)
        if activation_of(found) is None:
            return f"the activation of {type(module).__name__} is {found}"
        return None

    return reason


def _step_reason(module: nn.Module) -> str | None:
    if module.limit != float("inf"):
        return f"{type(module).__name__} clamps the gate after the activation"
    return _unknown(lambda m: m.act_fn)(module)


# class -> (its forward by F.moe_mlp, module -> why that cannot be)
ADAPTERS: dict[str, tuple[Callable, Callable[[nn.Module], str | None]]] = {
    "Llama4TextMoe": (_llama4, _unknown(lambda m: m.experts.act_fn)),
    "DbrxExperts": (_dbrx, _unknown(lambda m: m.mlp.activation_fn)),
    "JetMoeMoE": (_jetmoe, _unknown(lambda m: m.activation)),
    "LongcatFlashExperts": (_longcat, _unknown(lambda m: m.act_fn)),
    "Step3p7Experts": (_step, _step_reason),
}


def _adapt(experts_class: type[nn.Module]) -> None:
    """Gives a class of ADAPTERS the choice, once."""
    if "_moe_mlp_original" in vars(experts_class):
        return
    ours, _ = ADAPTERS[experts_class.__name__]
    original = experts_class._moe_mlp_original = experts_class.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        chosen = ours if getattr(self, "_uses_moe_mlp", False) else original
        return chosen(self, *args, **kwargs)

    experts_class.forward = forward


def _open_interface(model_class: type) -> None:
    """Adapts what the model's own module defines, and lets transformers set the choice there."""
    module = sys.modules.get(model_class.__module__)
    found = [c for n, c in vars(module).items() if n in ADAPTERS] if module else []
    for experts_class in found:
        _adapt(experts_class)
    for candidate in vars(module).values() if found else ():
        if hasattr(candidate, "_can_set_experts_implementation"):
            candidate._can_set_experts_implementation_cached_value = True


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Modules of a model whose forward the choice decides, first layer first."""
    chosen = ("_is_expert_parallel", "_moe_mlp_original")
    return [m for m in model.modules() if any(hasattr(m, name) for name in chosen)]


def fused_experts(model: nn.Module) -> list[nn.Module]:
    """Those that F.moe_mlp computes now."""
    return [
        m
        for m in experts_of(model)
        if getattr(m, "_uses_moe_mlp", False)
        or (
            hasattr(m, "_is_expert_parallel")
            and m.config._experts_implementation == NAME
            and cached_plan(m).reason is None
        )
    ]


_MOE_LIKE = re.compile("MoE|Moe|Experts|SparseM")


def _settle(model: nn.Module, *, asked: bool) -> None:
    """Takes the choice in a model's configs to its modules; says where it has no effect.

    Args:
        asked: somebody named this model; else only one that looks like an MoE is worth a word.
    """
    from transformers import PreTrainedModel

    wanted = False
    for part in (m for m in model.modules() if isinstance(m, PreTrainedModel)):
        chosen = part.config._experts_implementation == NAME
        wanted |= chosen
        for module in part.modules():
            if not hasattr(module, "_moe_mlp_original"):
                continue
            reason = ADAPTERS[type(module).__name__][1](module)
            module._uses_moe_mlp = chosen and reason is None
            if chosen and reason is not None:
                log_once(f'experts_implementation="{NAME}" falls back: {reason}')
    if not wanted or fused_experts(model):
        return
    names = {type(m).__name__ for m in model.modules()}
    if asked or any(_MOE_LIKE.search(name) for name in names):
        log_once(
            f'experts_implementation="{NAME}" has no effect on {type(model).__name__}: '
            "none of its modules computes experts that F.moe_mlp can, with an interface or an "
            "adapter for it. The model runs as without it."
        )


def register() -> None:
    """Adds ``"moe_mlp"`` to the implementations of transformers, once."""
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if NAME in ALL_EXPERTS_FUNCTIONS:
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)

    def wrap(owner: type, name: str, make: Callable[[Callable], Callable]) -> None:
        original = vars(owner)[name]
        is_class_method = isinstance(original, classmethod)
        function = original.__func__ if is_class_method else original
        wrapped = functools.wraps(function)(make(function))
        setattr(owner, name, classmethod(wrapped) if is_class_method else wrapped)

    def choosing(original):
        def get_correct_experts_implementation(self, requested):
            if requested == NAME:
                _open_interface(type(self))
            return original(self, requested)

        return get_correct_experts_implementation

    def switching(original):
        def set_experts_implementation(self, implementation):
            _open_interface(type(self))
            original(self, implementation)
            _settle(self, asked=implementation == NAME)

        return set_experts_implementation

    def building(original):
        def build(cls, *args, **kwargs):
            asked = kwargs.get("experts_implementation") == NAME
            result = original(cls, *args, **kwargs)
            model = result[0] if isinstance(result, tuple) else result
            _settle(model, asked=asked)
            return result

        return build

    def finishing(original):
        def post_init(self, *args, **kwargs):
            original(self, *args, **kwargs)
            if self.config._experts_implementation == NAME:
                _settle(self, asked=False)

        return post_init

    def saving(original):
        # transformers saves no choice of kernels; this one is one that a user made.
        def _remove_keys_not_serialized(self, d):
            chosen = d.get("_experts_implementation_internal") == NAME
            original(self, d)
            if chosen:
                d["experts_implementation"] = NAME

        return _remove_keys_not_serialized

    wrap(PreTrainedModel, "get_correct_experts_implementation", choosing)
    wrap(PreTrainedModel, "set_experts_implementation", switching)
    wrap(PreTrainedModel, "from_pretrained", building)
    wrap(PreTrainedModel, "_from_config", building)
    wrap(PreTrainedModel, "post_init", finishing)
    wrap(PreTrainedConfig, "_remove_keys_not_serialized", saving)


require_transformers()
register()
