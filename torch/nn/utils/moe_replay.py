"""Records which experts a model's routers choose, and repeats the choice. Prototype: may change.

In reinforcement learning a model is trained on its own samples. The router's logits are computed
twice, in two engines or two precisions. If two experts have close scores, the second pass may choose
another one, and its loss is then that of another model. A record of the first pass makes the second
choose the same experts. The weights and gradients come from the logits of the second pass.

A router here is any module whose ``forward`` has the keyword arguments of :class:`torch.nn.MoE`:
``need_routing=True`` makes it return ``(output, logits (*, E), topk_indices (*, K))``, and with
``topk_indices`` it takes these experts instead of choosing. Its first argument, or ``input``, is the
tokens, ``(*, D)``. The output may be anything.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, ExitStack
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils.moe import _below_functorch, _tokens
from torch.optim.swa_utils import AveragedModel


__all__ = ["record_routing", "replay_routing"]

# Wrappers add these to names; a record fits the model with and without them.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_ADD_MODULE = (DataParallel, DistributedDataParallel, AveragedModel)


def _unwrapped(model: Module, name: str) -> str:
    """The name of a submodule without the parts that wrappers add."""
    kept = []
    for part in filter(None, name.split(".")):
        added = part in _WRAPPERS or part == "module" and isinstance(model, _ADD_MODULE)
        kept += [] if added else [part]
        model = model.get_submodule(part)
    return ".".join(kept)


def _routers(model: Module) -> dict[str, Module]:
    found = {}
    for name, module in model.named_modules():
        # Also check the class's forward: a replacement on the instance, as of add_lora, may take anything.
        if any(
            {"need_routing", "topk_indices"}
            <= inspect.signature(forward).parameters.keys()
            for forward in (module.forward, type(module).forward)
        ):
            found[_unwrapped(model, name)] = module
    if not found:
        raise ValueError(
            "moe_replay: no module of the model has need_routing and topk_indices among the "
            "arguments of forward, as torch.nn.MoE has"
        )
    return found


def _is_recomputed() -> bool:
    """Whether activation checkpointing runs this forward, in a backward."""
    if torch.compiler.is_compiling():
        return False  # a compiler recomputes operators, not modules
    return torch._C._current_graph_task_id() != -1


# By router: the thread of its contexts, and which these are, outermost first.
_contexts: WeakKeyDictionary[Module, tuple[int, tuple[str, ...]]] = WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def _of_one_thread(routers: Iterable[Module], context: str) -> Iterator[None]:
    """All threads run the same hooks: two threads that replay one model would mix up their experts."""
    me, routers = threading.get_ident(), list(routers)
    with _lock:
        if any(_contexts.get(module, (me,))[0] != me for module in routers):
            raise RuntimeError(
                "moe_replay: another thread records or replays the routing of this model; use a copy of "
                "it in each thread, or a lock around the context"
            )
        for module in routers:
            _set_contexts(module, me, (*_contexts.get(module, (me, ()))[1], context))
    try:
        yield
    finally:
        with _lock:
            for module in routers:
                remaining = list(_contexts[module][1])
                remaining.remove(context)
                _set_contexts(module, me, tuple(remaining))


def _set_contexts(module: Module, thread: int, contexts: tuple[str, ...]) -> None:
    """Also gives ``module`` a forward of its own inside of contexts.

    Dynamo guards that a module has none, but not that it has no hooks: inside a context it would run
    what was compiled outside.
    """
    own = vars(module)
    outside = forward = own.get("forward")  # of add_lora or accelerate
    if ours := isinstance(forward, partial) and forward.func is _forward:
        outside = forward.args[2]
    if contexts:
        _contexts[module] = thread, contexts
        # A wrapper that was added inside may keep the last one: each of them knows what it calls.
        new: Any = partial(_forward, module, " ".join(contexts), outside)
        own["forward"] = new
        bound = MethodType(type(module).forward, module)
        new.__signature__ = inspect.signature(outside or bound)
        return
    _contexts.pop(module, None)
    if ours:
        del own["forward"]
        if outside is not None:
            own["forward"] = outside


def _forward(
    module: Module,
    contexts: str,  # so that a graph is of one combination
    outside: Callable[..., Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if outside is None:
        return type(module).forward(module, *args, **kwargs)
    return outside(*args, **kwargs)


class _Hook:
    """A hook of one router in one context. A copy, as of a model inside of the context, does nothing."""

    def __init__(self, hook: Callable[..., Any] | None) -> None:
        self.hook = hook

    def __reduce__(self) -> Any:
        return _Hook, (None,)

    def __call__(self, *args: Any) -> Any:
        return None if self.hook is None else self.hook(*args)


def _checkpoints() -> list[Any]:
    """Checkpoints that may recompute the running code, innermost first: the same objects in each recomputation."""
    autograd, hooks, found = torch._C._autograd, [], []
    try:
        while pair := autograd._top_saved_tensors_default_hooks(True):
            autograd._pop_saved_tensors_default_hooks()
            hooks.append(pair)
    finally:
        for pair in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*pair)
    for pack, _ in hooks:
        if getattr(pack, "_checkpoint_internal", False):
            names = inspect.getclosurevars(inspect.unwrap(pack)).nonlocals
            found.append(names.get("frame") or names["target_frame_ref"]())
    # Reentrant checkpoints, also of other libraries, are an autograd.Function with one ctx.
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals.get("ctx")
            if isinstance(ctx, torch.autograd.function.FunctionCtx):
                found.append(ctx)
        frame = frame.f_back
    return found


# By router: the experts that it took in each checkpoint that may recompute it.
_replayed: WeakKeyDictionary[Module, WeakKeyDictionary[Any, Tensor]] = (
    WeakKeyDictionary()
)


class _Refusal:
    """The hook that :func:`replay_routing` leaves on a router that ran in a checkpoint.

    A backward outside of the context would recompute the router without the record, and compute the
    gradients of other experts. The hook is removed when the checkpoints are gone.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        known = _replayed.get(module)  # no checkpoint recomputes a copy
        if not known:
            self.remove_from(module)
        elif _is_recomputed() and "replay" not in _contexts.get(module, (0, ()))[1]:
            if any(checkpoint in known for checkpoint in _checkpoints()):
                raise RuntimeError(
                    f"replay_routing: {self.name!r} is computed again for a backward outside of the context, where it "
                    "would choose other experts; end the context after backward"
                )

    @staticmethod
    def remove_from(module: Module) -> None:
        hooks: dict[int, Any] = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Refusal)]:
            del hooks[key]

    @staticmethod
    @contextmanager
    def around(
        routers: Mapping[str, Module], record: Mapping[str, Tensor]
    ) -> Iterator[Callable[[str], Tensor | None]]:
        """Yields the function from a router's name to the experts that it takes.

        A recomputation takes the experts of its forward: of another record, or, with None, its own choice.
        """
        # Checkpoints around the context recompute the whole context.
        outside = {id(checkpoint) for checkpoint in _checkpoints()}
        task = torch._C._current_graph_task_id()

        def experts(name: str) -> Tensor | None:
            running, known = [], {}
            if not torch.compiler.is_compiling():
                running = [c for c in _checkpoints() if id(c) not in outside]
                known = _replayed.setdefault(routers[name], WeakKeyDictionary())
            if running and torch._C._current_graph_task_id() != task:
                ids = next((known[c] for c in running if c in known), None)
                if ids is None:
                    return None
            elif name in record:
                ids = record[name]
            else:
                raise ValueError(
                    f"replay_routing: {name!r} runs, and the record has nothing of it, only of "
                    f"{sorted(record)}"
                )
            known.update((c, ids) for c in running)
            return ids

        try:
            yield experts
        finally:
            for name, module in routers.items():
                _Refusal.remove_from(module)
                if _replayed.get(module):
                    module.register_forward_pre_hook(_Refusal(name))


def _smallest(topk_indices: Tensor, num_experts: int) -> Tensor:
    """``topk_indices`` in the fewest bytes that hold -1 to E, without torch.func's temporary wrappers."""
    whole = _below_functorch(topk_indices)
    if whole.dim() != topk_indices.dim():
        raise RuntimeError(
            "record_routing: a router runs under vmap; a record is of one forward"
        )
    for dtype in (torch.int8, torch.int16):
        if num_experts <= torch.iinfo(dtype).max:
            return whole.to(dtype)
    return whole.to(torch.int32)


@contextmanager
def record_routing(model: Module) -> Iterator[dict[str, Tensor]]:
    r"""Records the experts that each router of a model chooses in one forward pass.

    Recomputations of activation checkpointing in ``backward`` are not recorded again.

    Args:
        model: a model whose routers fit the module docstring of ``torch.nn.utils.moe_replay``.

    Yields:
        dict[str, Tensor]: keyed by the router's name in the model, the ``(T, K)`` expert ids of
        its T tokens in order. The dtype is the smallest of int8, int16 and int32 that holds E, and
        the device is that of the ids. It is a plain dict of contiguous tensors, which work with
        ``torch.save``, safetensors and ``torch.cat`` along the tokens.

    Raises:
        ValueError: the model has no router.
        RuntimeError: a router runs a second time, or under :func:`torch.func.vmap`, or another thread
            records or replays the same modules. A record is of one forward; join several with
            ``torch.cat``.

    Example::

        >>> model = torch.nn.Sequential(torch.nn.MoE(16, 32, num_experts=8, top_k=2))
        >>> x = torch.randn(10, 16)
        >>> with record_routing(model) as record:
        ...     _ = model(x)
        >>> record["0"].shape, record["0"].dtype
        (torch.Size([10, 2]), torch.int8)
        >>> with replay_routing(model, record):
        ...     model(x + 0.1).sum().backward()
    """
    record: dict[str, Tensor] = {}
    asked: dict[str, Any] = {}

    def hooks(name: str) -> tuple[Any, Any]:
        def ask(module: Module, args: Any, kwargs: dict[str, Any]) -> Any:
            given = inspect.signature(type(module).forward).parameters.get(
                "need_routing"
            )
            asked[name] = kwargs.get("need_routing", given and given.default is True)
            return args, kwargs | {"need_routing": True}

        def keep(module: Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            if not isinstance(output, tuple) or len(output) != 3:
                raise RuntimeError(
                    f"record_routing: {name!r} must return (output, logits, topk_indices) with "
                    f"need_routing=True, got {type(output).__name__}"
                )
            y, logits, topk_indices = output
            if not _is_recomputed():
                if name in record:
                    raise RuntimeError(
                        f"record_routing: {name!r} ran a second time; a record is of one forward"
                    )
                ids = _tokens(topk_indices.detach())
                ids = ids.reshape(-1, ids.shape[-1])
                record[name] = _smallest(ids, logits.shape[-1]).contiguous()
            return output if asked[name] else y

        return ask, keep

    routers = _routers(model)
    with _of_one_thread(routers.values(), "record"), ExitStack() as stack:
        for name, module in routers.items():
            ask, keep = hooks(name)
            stack.enter_context(
                module.register_forward_pre_hook(_Hook(ask), with_kwargs=True)
            )
            stack.enter_context(
                module.register_forward_hook(
                    _Hook(keep), with_kwargs=True, prepend=True
                )
            )
        yield record


@contextmanager
def replay_routing(model: Module, record: Mapping[str, Tensor]) -> Iterator[None]:
    r"""Makes the routers of a model take the experts of a record.

    Routers may run in any order and any number of times, each on all tokens of the record. Each
    micro-batch has its own record. With activation checkpointing, ``backward`` must run inside a
    context of the model too, because it runs the routers again. They then take the experts of their forward.

    Args:
        model: with the routers of the record, wrapped or not; see :func:`record_routing`.
        record: keyed by the router's name, ``(T, K)`` expert ids of a signed integer dtype. -1 is
            no expert. K may differ from the router's, and tokens may have different numbers of experts.

    Raises:
        ValueError: the model lacks a router of the record or can't replay it, a router outside of the
            record runs, or a router gets another number of tokens.
        RuntimeError: activation checkpointing recomputes a router of the context after its end, or
            another thread records or replays the same modules.
    """
    routers = _routers(model)
    if unknown := sorted(record.keys() - routers.keys()):
        raise ValueError(
            f"replay_routing: the record is of routers that the model does not have: {unknown}; it "
            f"has {sorted(routers)}"
        )
    for name in record:
        route = getattr(routers[name], "route", None)
        if route and "topk_indices" not in inspect.signature(route).parameters:
            raise ValueError(
                f"replay_routing: {name!r} can't be replayed, as route of its class "
                f"{type(routers[name]).__name__} has no argument topk_indices"
            )

    def hook(name: str) -> Any:
        def give(module: Module, args: Any, kwargs: dict[str, Any]) -> Any:
            ids = experts(name)
            if ids is None:
                return args, kwargs
            input = args[0] if args else kwargs["input"]
            tokens = _tokens(input).shape[:-1]
            if tokens.numel() != ids.shape[0]:
                raise ValueError(
                    f"replay_routing: {name!r} got {tokens.numel()} tokens of shape "
                    f"{tuple(tokens)}, the record has {ids.shape[0]}"
                )
            ids = ids.to(input.device).view(*tokens, ids.shape[-1])
            return args, kwargs | {"topk_indices": ids}

        return give

    with (
        _of_one_thread(routers.values(), "replay"),
        _Refusal.around(routers, record) as experts,
        ExitStack() as stack,
    ):
        for name, module in routers.items():
            stack.enter_context(
                module.register_forward_pre_hook(_Hook(hook(name)), with_kwargs=True)
            )
        yield
