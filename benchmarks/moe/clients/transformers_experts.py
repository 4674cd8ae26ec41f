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
import operator
import re
import sys
from collections.abc import Callable

from moe_mlp_experts import activation_of, cached_plan, experts_forward, log_once, NAME
from packages import require_transformers

import torch.nn.functional as F
from torch import nn, Tensor


# Forwards of classes that do not use the interface. Each has the arguments of the class's own, and
# is called when the choice is NAME.


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


# class -> (its forward by F.moe_mlp, where it has its activation)
ADAPTERS: dict[str, tuple[Callable, str]] = {
    "Llama4TextMoe": (_llama4, "experts.act_fn"),
    "DbrxExperts": (_dbrx, "mlp.activation_fn"),
    "JetMoeMoE": (_jetmoe, "activation"),
    "LongcatFlashExperts": (_longcat, "act_fn"),
    "Step3p7Experts": (_step, "act_fn"),
}


def adapter_reason(module: nn.Module) -> str | None:
    """Why a module of ADAPTERS cannot have its forward there."""
    name = type(module).__name__
    act_fn = operator.attrgetter(ADAPTERS[name][1])(module)
    if activation_of(act_fn) is None:
        return f"the activation of {name} is {act_fn}"
    if name == "Step3p7Experts" and module.limit != float("inf"):
        return f"{name} clamps the gate after the activation"
    return None


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

    def fused(m: nn.Module) -> bool:
        if getattr(m, "_uses_moe_mlp", False):
            return True
        has_choice = hasattr(m, "_is_expert_parallel")
        chosen = has_choice and m.config._experts_implementation == NAME
        return chosen and cached_plan(m).reason is None

    return [m for m in experts_of(model) if fused(m)]


_MOE_LIKE = re.compile("MoE|Moe|Experts|SparseM")


def _settle(model: nn.Module, *, asked: bool) -> None:
    """Takes the choice in a model's configs to its modules; says where it has no effect.

    Where nobody ``asked`` for this model, only one that looks like an MoE is worth a word.
    """
    from transformers import PreTrainedModel

    wanted = False
    for part in (m for m in model.modules() if isinstance(m, PreTrainedModel)):
        chosen = part.config._experts_implementation == NAME
        wanted |= chosen
        for module in part.modules():
            if not hasattr(module, "_moe_mlp_original"):
                continue
            reason = adapter_reason(module)
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

    def around(owner: type, name: str) -> Callable[[Callable], Callable]:
        """The decorated function becomes the method; its first argument is what that was."""

        def decorate(function: Callable) -> Callable:
            method = vars(owner)[name]
            original = getattr(method, "__func__", method)

            @functools.wraps(original)
            def wrapped(*args, **kwargs):
                return function(original, *args, **kwargs)

            is_plain = method is original
            setattr(owner, name, wrapped if is_plain else classmethod(wrapped))
            return function

        return decorate

    @around(PreTrainedModel, "get_correct_experts_implementation")
    def choose(original, self, requested):
        if requested == NAME:
            _open_interface(type(self))
        return original(self, requested)

    @around(PreTrainedModel, "set_experts_implementation")
    def switch(original, self, implementation):
        _open_interface(type(self))
        original(self, implementation)
        _settle(self, asked=implementation == NAME)

    @around(PreTrainedModel, "from_pretrained")
    @around(PreTrainedModel, "_from_config")
    def build(original, cls, *args, **kwargs):
        asked = kwargs.get("experts_implementation") == NAME
        result = original(cls, *args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        _settle(model, asked=asked)
        return result

    @around(PreTrainedModel, "post_init")
    def finish(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.config._experts_implementation == NAME:
            _settle(self, asked=False)

    @around(PreTrainedConfig, "_remove_keys_not_serialized")
    def save(original, self, d):
        # transformers saves no choice of kernels; this one is one that a user made.
        chosen = d.get("_experts_implementation_internal") == NAME
        original(self, d)
        if chosen:
            d["experts_implementation"] = NAME


require_transformers()
register()
