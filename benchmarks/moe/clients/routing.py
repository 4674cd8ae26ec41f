"""Router replay for models of transformers and torchtitan: their experts of one forward, given to another.

    with record_routing(model) as record:          # a rollout
        model(input_ids)
    with replay_routing(model, record):            # a training step, its backward too
        model(input_ids, labels=labels).loss.backward()

A record is that of ``torch.nn.utils.moe_replay``, by the name of the module that routes. Nothing here knows a router's
rule: its own code runs, and the one ``topk`` over all experts in it returns the experts of the record, with the scores
that they have now. So weights and gradients are the router's own. A module that chooses in another way, with no such topk or with several, is
refused by name when it runs.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn, Tensor
from torch.nn.utils.moe_replay import (
    _is_recomputed,
    _of_one_thread,
    _Refusal,
    _smallest,
    _unwrapped,
    _WRAPPERS,
)
from torch.overrides import TorchFunctionMode


__all__ = ["record_routing", "replay_routing"]

# Classes that may be between a module that routes and its experts, besides _WRAPPERS.
_AROUND = ("ParamWrapper", "ModulesToSaveWrapper", "ModuleDict")


class _TopK(TorchFunctionMode):
    """Keeps what the topk over experts returns; returns ``given`` in its place."""

    def __init__(
        self, num_experts: int, num_tokens: int | None, given: Tensor | None
    ) -> None:
        super().__init__()
        self.num_experts, self.num_tokens, self.given = num_experts, num_tokens, given
        self.chosen: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        # Groups of experts, and the experts of a group, are fewer. Experts that choose tokens have another row
        # for each expert, or another dimension.
        if (
            scores.dim() < 2
            or scores.shape[-1] < self.num_experts
            or dim not in (-1, scores.dim() - 1)
            or self.num_tokens not in (None, scores.shape[:-1].numel())
        ):
            return func(*args, **kwargs)
        if self.given is None:
            result = func(*args, **kwargs)
        else:
            ids, tokens = self.given, scores.shape[:-1]
            if ids.shape[0] != tokens.numel():
                raise ValueError(
                    f"replay_routing: a router got {tokens.numel()} tokens, the record has "
                    f"{ids.shape[0]}"
                )
            ids = ids.to(scores.device, torch.int64).view(*tokens, ids.shape[-1])
            result = torch.return_types.topk((scores.gather(-1, ids), ids))
        # Outer modes must not see this topk, which one of them might record.
        modes = torch.overrides._get_current_function_mode_stack()
        for mode in (self, *modes) if self.given is not None else (self,):
            if isinstance(mode, _TopK):
                mode.chosen.append((result[1].flatten(0, -2), scores.shape[-1]))
        return result


def _routers(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """By name, the modules that route and their numbers of experts."""
    names = {module: name for name, module in model.named_modules()}
    found = {
        module: module.num_experts
        for module in names
        if any(c.__name__ == "TokenChoiceTopKRouter" for c in type(module).__mro__)
    }
    if not found and "transformers" in sys.modules:
        from transformers_experts import _class_of

        for experts, name in names.items():
            adapted = _class_of(experts) is not None
            if not adapted and "_is_expert_parallel" not in vars(experts):
                continue
            module = experts
            # Some with an adapter have their router within.
            if not adapted or "router" not in experts._modules:
                child = ""
                while (
                    module is experts
                    or type(module).__name__ in _AROUND
                    or child in _WRAPPERS
                ):
                    name, _, child = name.rpartition(".")
                    module = model.get_submodule(name)
            # From the weights: the number of experts that are stacked.
            stacked = (p.shape[0] for p in experts.parameters() if p.dim() == 3)
            found[module] = getattr(experts, "num_experts", None) or next(stacked)
    if not found:
        raise ValueError(
            "no module of the model is a router of torchtitan, or has experts of transformers; "
            "torch.nn.utils.moe_replay is for torch.nn.MoE"
        )
    routers = {}
    for module, num_experts in found.items():
        routers[_unwrapped(model, names[module])] = module, num_experts
    return routers


@contextlib.contextmanager
def _watched(
    routers: dict,
    keep: Callable | None = None,
    experts: Callable[[str], Tensor | None] = lambda name: None,
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        context = "replay" if keep is None else "record"
        modules = [module for module, _ in routers.values()]
        stack.enter_context(_of_one_thread(modules, context))
        for name, (module, num_experts) in routers.items():
            running: list[_TopK] = []

            def enter(
                module,
                args,
                kwargs,
                *,
                name=name,
                num_experts=num_experts,
                running=running,
            ):
                if torch.compiler.is_compiling():
                    raise RuntimeError(
                        f"the routing of {name!r} is replayed in eager mode only"
                    )
                ids = experts(name)
                x = next(
                    (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)),
                    None,
                )
                num_tokens = None if x is None else x.shape[:-1].numel()
                running.append(_TopK(num_experts, num_tokens, ids))
                running[-1].__enter__()

            def leave(module, args, output, *, name=name, running=running):
                if not running:  # refused
                    return
                mode = running.pop()
                mode.__exit__(None, None, None)
                if output is None:  # an error is on its way
                    return
                if len(mode.chosen) != 1:
                    raise NotImplementedError(
                        f"{name!r} ({type(module).__name__}) has {len(mode.chosen)} topk over its "
                        "experts, not one: its routing is neither recorded nor replayed"
                    )
                if keep is not None and not _is_recomputed():
                    keep(name, *mode.chosen[0])

            stack.enter_context(
                module.register_forward_pre_hook(enter, with_kwargs=True)
            )
            stack.enter_context(module.register_forward_hook(leave, always_call=True))
        yield


@contextlib.contextmanager
def record_routing(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """As ``torch.nn.utils.moe_replay.record_routing``: (T, K) ids by the name of what routes."""
    record: dict[str, Tensor] = {}

    def keep(name: str, ids: Tensor, num_experts: int) -> None:
        if name in record:
            raise RuntimeError(
                f"record_routing: {name!r} ran a second time; a record is of one forward"
            )
        record[name] = _smallest(ids.detach(), num_experts).contiguous()

    with _watched(_routers(model), keep):
        yield record


@contextlib.contextmanager
def replay_routing(model: nn.Module, record: Mapping[str, Tensor]) -> Iterator[None]:
    """As ``torch.nn.utils.moe_replay.replay_routing``; every token has experts, no id is -1."""
    routers = _routers(model)
    if not record.keys() <= routers.keys():
        raise ValueError(
            f"replay_routing: the record is of {sorted(record)}, the model has {sorted(routers)}"
        )
    for name, ids in record.items():
        if ids.numel() and int(ids.min()) < 0:
            raise ValueError(
                f"replay_routing: {name!r} has tokens without an expert, which its router cannot have"
            )
    modules = {name: module for name, (module, _) in routers.items()}
    with _Refusal.around(modules, record) as experts:
        with _watched(routers, experts=experts):
            yield
