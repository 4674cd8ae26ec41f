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
from collections.abc import Callable, Iterator
from typing import NamedTuple

from moe_mlp_experts import (
    activation_of,
    current_plan,
    experts_forward,
    hooked,
    log_once,
    NAME,
)
from packages import require_transformers

import torch.nn.functional as F
from torch import nn, Tensor
from torch.nn.utils import moe_lora, moe_replay


class _Within:
    """Second argument of a child's call, ``child(x, _Within(f))``: it returns ``f(c, x)``.

    ``c`` is the child itself below its wrappers. What a wrapper or a hook does around a call (gathers
    or loads weights, puts an adapter on them) is done around ``f``, which may call the next child
    alike: so one op has the weights of several children.
    """

    def __init__(self, function: Callable) -> None:
        self.function = function


# Forwards of classes that do not use the interface. Each has the arguments of the class's own and
# runs when the choice is NAME. It calls its children, and does not read their parameters.


def _llama4(self: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Weights multiply the input of the experts; each expert's own code sees every token."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    # The choice of the router's topk, by sort: routing.py would take a second topk for a choice.
    top_scores, ids = (t[:, : self.top_k] for t in scores.sort(dim=1, descending=True))
    rows = (x[:, None] * top_scores[..., None]).flatten(0, 1)

    def routed(experts: nn.Module, rows: Tensor) -> Tensor:
        w_in, w_out = experts.gate_up_proj.mT, experts.down_proj.mT
        flat, activation = (
            ids.reshape(-1, 1).to(rows.device),
            activation_of(experts.act_fn),
        )
        return F.moe_mlp(rows, flat, None, w_in, w_out, activation=activation)

    output = self.experts(rows, _Within(routed))
    return self.shared_expert(x) + output.view(*ids.shape, -1).sum(1), logits


def _dbrx(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Gate and up are two parameters, and all three lie as (E*F, D)."""
    x = hidden_states.reshape(-1, self.hidden_size)
    sizes = (self.num_experts, self.ffn_hidden_size, self.hidden_size)

    def routed(mlp: nn.Module, x: Tensor) -> Tensor:
        gate, up, down = (w.view(sizes) for w in (mlp.w1, mlp.v1, mlp.w2))
        routing = (ids.to(x.device), weights.to(x.device))
        activation = activation_of(mlp.activation_fn)
        return F.moe_mlp(x, *routing, gate, down.mT, w_up=up, activation=activation)

    y = self.mlp(x, _Within(routed)).to(x.dtype)
    return y.view(hidden_states.shape[0], -1, self.hidden_size)


def _jetmoe(self: nn.Module, layer_input: Tensor) -> Tensor:
    """The router's selection without its host sync."""
    x = layer_input.reshape(-1, self.input_size)

    def selection(router: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        top_logits, ids = router.layer(x).float().topk(router.top_k, dim=1)
        return ids, top_logits.softmax(1).type_as(x)

    ids, weights = self.router(x, _Within(selection))

    def routed(input_linear: nn.Module, x: Tensor) -> Tensor:
        def both(output_linear: nn.Module, x: Tensor) -> Tensor:
            w_in, w_out = input_linear.weight, output_linear.weight
            routing = (ids.to(x.device), weights.to(x.device))
            activation = activation_of(self.activation)
            return F.moe_mlp(x, *routing, w_in, w_out, activation=activation)

        return self.output_linear(x, _Within(both))

    y = self.input_linear(x, _Within(routed))
    return y.view_as(layer_input) + self.bias


def _longcat(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Ids above the routed experts are identity experts."""
    E = self.num_routed_experts
    identity = (weights * (ids >= E)).sum(-1, keepdim=True) * hidden_states
    ids = ids.clamp(max=E)  # E means no expert
    weights = (weights, self.gate_up_proj[:E], self.down_proj)
    activation = activation_of(self.act_fn)
    y = F.moe_mlp(hidden_states, ids, *weights, activation=activation)
    return (y + identity).to(hidden_states.dtype)


def _step(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    weights = (weights, self.gate_up_proj, self.down_proj)
    activation = activation_of(self.act_fn)
    y = F.moe_mlp(hidden_states, ids, *weights, activation=activation)
    return y.to(hidden_states.dtype)


class Adapter(NamedTuple):
    """How a class without the interface is computed."""

    forward: Callable  # its forward by F.moe_mlp
    activation: str  # the attribute that has it,
    holder: str | None = None  # of this class instead of the adapted one
    children: dict[str, str] = {}  # called with _Within: attribute and class
    called: tuple[str, ...] = ()  # children that are called as the original calls them


_LINEAR = "JetMoeParallelExperts"
ADAPTERS = {
    "Llama4TextMoe": Adapter(
        _llama4, "act_fn", "Llama4TextExperts", {"experts": "Llama4TextExperts"},
        ("router", "shared_expert"),
    ),
    "DbrxExperts": Adapter(
        _dbrx, "activation_fn", "DbrxExpertGLU", {"mlp": "DbrxExpertGLU"}
    ),
    "JetMoeMoE": Adapter(
        _jetmoe, "activation", None,
        {"router": "JetMoeTopKGating", "input_linear": _LINEAR, "output_linear": _LINEAR},
    ),
    "LongcatFlashExperts": Adapter(_longcat, "act_fn"),
    "Step3p7Experts": Adapter(_step, "act_fn"),
}  # fmt: skip
# Wrappers that pass their arguments to the wrapped module and return its result.
_WRAPPERS: dict[str, Callable[[nn.Module], list[nn.Module]]] = {
    "ParamWrapper": lambda m: [m.base_layer],
    "ModulesToSaveWrapper": lambda m: [m.original_module, *m.modules_to_save.values()],
    "CheckpointWrapper": lambda m: [m._checkpoint_wrapped_module],
    "FullyShardedDataParallel": lambda m: [m._fsdp_wrapped_module],
}


def _class_of(module: nn.Module) -> type[nn.Module] | None:
    """The class of ADAPTERS that a module is of; FSDP2 and parametrizations subclass it."""
    return next((c for c in type(module).__mro__ if c.__name__ in ADAPTERS), None)


def adapter_reason(module: nn.Module) -> str | None:
    """Why a module of ADAPTERS cannot have its forward there."""
    name = _class_of(module).__name__
    adapter = ADAPTERS[name]
    holders = [module] if adapter.holder is None else list(module.modules())
    for holder in holders:
        if adapter.holder and not _is(holder, adapter.holder):
            continue
        act_fn = getattr(holder, adapter.activation)
        if activation_of(act_fn) is None:
            return f"the activation of {name} is {act_fn}"
    if name == "Step3p7Experts" and module.limit != float("inf"):
        return f"{name} clamps the gate after the activation"
    return None


def _is(module: nn.Module, class_name: str) -> bool:
    return any(c.__name__ == class_name for c in type(module).__mro__)


def _obstacles(module: nn.Module) -> Iterator[str]:
    """Why F.moe_mlp cannot be used now: what it would skip that calls of the original do."""
    name = _class_of(module).__name__
    adapter = ADAPTERS[name]
    if (reason := adapter_reason(module)) is not None:
        yield reason
    for attribute, child in module._modules.items():
        if child is None or attribute in adapter.called:
            continue
        where = f"{attribute} of {name}"
        if attribute in adapter.children:
            yield from _obstacles_around(child, adapter.children[attribute], where)
        elif hooked(child):
            yield f"{where} has hooks"


def _obstacles_around(child: nn.Module, class_name: str, where: str) -> Iterator[str]:
    """The same for a child, or what it wraps, that is called with _Within."""
    if hooked(child, recurse=False):
        yield f"{where} has hooks"  # they would see what _Within's function takes and returns
    elif _is(child, class_name):
        if not _reaches(child):
            yield f"the forward of {where} was replaced"
        for attribute, part in child._modules.items():
            # JetMoe's router calls its layer as the original does.
            if part is not None and attribute != "layer" and hooked(part):
                yield f"{attribute} in {where} has hooks"
    elif inner := _WRAPPERS.get(type(child).__name__):
        for wrapped in inner(child):
            yield from _obstacles_around(wrapped, class_name, where)
    else:
        yield f"{where} is a {type(child).__name__}"


def _reaches(module: nn.Module) -> bool:
    """Whether a call gets to the forward of its class.

    Hooks of accelerate and add_lora replace an instance's, and call it.
    """
    forward = vars(module).get("forward")
    if getattr(forward, "func", None) is moe_replay._forward:
        forward = forward.args[2]
    if forward is None:
        return True
    forward = vars(module).get("_old_forward", forward)
    if getattr(forward, "__module__", None) == moe_lora.__name__:
        forward = vars(module)["_merged_forward"]
    return getattr(forward, "__func__", None) is type(module).forward


def _adapt(experts_class: type[nn.Module]) -> None:
    """Gives a class of ADAPTERS the choice, once, and takes _Within into its children."""
    if "_moe_mlp_original" in vars(experts_class):
        return
    adapter = ADAPTERS[experts_class.__name__]
    for class_name in set(adapter.children.values()):
        _open(vars(sys.modules[experts_class.__module__])[class_name])
    original = experts_class._moe_mlp_original = experts_class.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if not getattr(self, "_uses_moe_mlp", False):
            return original(self, *args, **kwargs)
        for obstacle in _obstacles(self):
            log_once(f'experts_implementation="{NAME}" falls back: {obstacle}')
            return original(self, *args, **kwargs)
        return adapter.forward(self, *args, **kwargs)

    experts_class.forward = forward


def _open(child_class: type[nn.Module]) -> None:
    """Lets a child take _Within, once."""
    original = child_class.forward
    if hasattr(original, "_takes_within"):
        return

    @functools.wraps(original)
    def forward(self, x, *args, **kwargs):
        if args and isinstance(args[0], _Within):
            return args[0].function(self, x)
        return original(self, x, *args, **kwargs)

    forward._takes_within = True
    child_class.forward = forward


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
    # Only their own attributes: a wrapper of PEFT shows every attribute of what it wraps.
    return [
        m for m in model.modules() if "_is_expert_parallel" in vars(m) or _adapted(m)
    ]


def _adapted(module: nn.Module) -> bool:
    return hasattr(type(module), "_moe_mlp_original")


def fused_experts(model: nn.Module) -> list[nn.Module]:
    """The modules that F.moe_mlp computes now."""

    def fused(m: nn.Module) -> bool:
        if _adapted(m):
            return (
                getattr(m, "_uses_moe_mlp", False) and next(_obstacles(m), None) is None
            )
        return (
            m.config._experts_implementation == NAME and current_plan(m).reason is None
        )

    return [m for m in experts_of(model) if fused(m)]


_MOE_LIKE = re.compile("MoE|Moe|Experts|SparseM")


def _settle(model: nn.Module, *, asked: bool) -> None:
    """Takes the choice in a model's configs to its modules; says where it has no effect.

    Where nobody ``asked`` for this model, only one that looks like an MoE is worth a word.
    """
    from transformers import PreTrainedModel

    wanted = asked  # transformers drops a choice that it has no place for
    parts = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    configs = [part.config for part in parts]
    for part in parts:
        choice = part.config._experts_implementation
        chosen = choice == NAME
        wanted |= chosen
        for module in part.modules():
            own = vars(module).get("config")
            if "_is_expert_parallel" in vars(module) and all(
                own is not c for c in configs
            ):
                own._experts_implementation = (
                    choice  # a copy, as PEFT makes of modules_to_save
                )
            if "_is_expert_parallel" in vars(module) and chosen:
                if not _reaches(module):
                    log_once(
                        f"the forward of this {type(module).__name__} was replaced before: F.moe_mlp "
                        "computes it only where that calls the forward of the class"
                    )
            if not _adapted(module):
                continue
            reason = adapter_reason(module)
            if reason is None and not _reaches(module):
                reason = (
                    f"the forward of this {type(module).__name__} was replaced before"
                )
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
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if NAME in ALL_EXPERTS_FUNCTIONS:
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, experts_forward)

    def around(owner: type, name: str) -> Callable[[Callable], Callable]:
        """The decorated function replaces the method, and gets the old one as its first argument."""

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
        of_parts = isinstance(implementation, dict)
        chosen = implementation.values() if of_parts else [implementation]
        _settle(self, asked=NAME in chosen)

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

    def unpickle(self, state):
        # In another process, after torch.save of a whole model or when a worker receives one.
        super(PreTrainedModel, self).__setstate__(state)
        if self.config._experts_implementation == NAME:
            _open_interface(type(self))

    PreTrainedModel.__setstate__ = unpickle

    @around(PreTrainedConfig, "_remove_keys_not_serialized")
    def save(original, self, d):
        # transformers does not save a choice of kernels, but the user made this one.
        chosen = d.get("_experts_implementation_internal") == NAME
        original(self, d)
        if chosen:
            d["experts_implementation"] = NAME


require_transformers()
register()
