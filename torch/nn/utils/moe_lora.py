"""Low-rank adapters for stacked expert weights. Prototype: may change.

For every expert e, ``scale * b[e] @ a[e]`` is added to a frozen weight ``(E, out, in)``, and a and b are
trained (LoRA, arXiv:2106.09685). A fused layer takes whole weights, so the forward merges the update into the
frozen weight. If autograd saved the merged weights, the model's weights would take twice the memory. Instead
the backward merges again, and no merged weight is saved.
"""

import functools
import math
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import init, Module, Parameter
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


__all__ = ["add_lora"]

_hooks_are_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


class _LowRank(Module):
    """The parametrization: ``weight + scale * b @ a``."""

    def __init__(self, weight: Tensor, rank: int, scale: float) -> None:
        super().__init__()
        num_experts, rows, columns = weight.shape
        self.a = Parameter(weight.new_empty(num_experts, rank, columns))
        self.b = Parameter(weight.new_empty(num_experts, rows, rank))
        self.scale = scale
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # As in nn.Linear. b is zero, so that the layer starts unchanged.
        bound = 1 / math.sqrt(self.a.shape[-1])
        init.uniform_(self.a, -bound, bound)
        init.zeros_(self.b)

    def forward(self, weight: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not _running.depth:
            return self.merge(weight, self.a, self.b)
        # Merges once, however often the weight is read.
        parts = weight, self.a, self.b
        versions = [-1 if t.is_inference() else t._version for t in parts]
        key = (*map(id, parts), *versions, torch.is_grad_enabled())
        if key not in _running.known:
            # Read here, because the forward of a parallel module sees only the rank's own parts.
            merge = functools.partial(self.merge, a=self.a, b=self.b)
            _running.known[key] = merge, weight, merge(weight)
        _, _, merged = known = _running.known[key]
        if merged.requires_grad:
            _running.merged[merged.untyped_storage()._cdata] = known
        return merged

    def merge(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.to(weight.dtype), b.to(weight.dtype)
        # In the weight's dtype: autocast may be off when the backward merges again.
        with _without_autocast(weight.device.type):
            return torch.baddbmm(weight, b, a, alpha=self.scale)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


# The function that merges a weight again, the frozen weight and the merged weight.
_Known = tuple[functools.partial[Tensor], Tensor, Tensor]


class _Running(threading.local):
    """The running forwards of adapted modules in one thread, and the weights that they merged.

    :func:`parametrize.cached` does not serve here: its cache is shared by all threads.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.known: dict[tuple[int, ...], _Known] = {}
        # Keyed by storage. No other tensor can have it while the merged weight is alive.
        self.merged: dict[int, _Known] = {}


_running = _Running()


class _Saved:
    """A saved tensor. A merged weight is replaced by what is needed to merge it again.

    Autograd does not compare versions of tensors that hooks pack, so this class does.
    """

    def __init__(
        self, kept: Tensor, view: Tensor, merge: functools.partial[Tensor] | None
    ) -> None:
        self.kept, self.merge = kept, merge
        parts = (kept, *merge.keywords.values()) if merge else (kept,)
        self.versions = [(part, part._version) for part in parts]
        self.view = view.size(), view.stride(), view.storage_offset()

    def make(self) -> Tensor:
        for part, version in self.versions:
            if part._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: shape {tuple(part.shape)}, version "
                    f"{part._version} instead of {version}, in a module of add_lora"
                )
        if self.merge is None:
            return self.kept
        with torch.no_grad():
            return self.merge(self.kept).as_strided(*self.view)


def _are_there(known: _Known) -> bool:
    """Whether the weight can be merged again: ZeRO-3 frees parameters after their module's forward."""
    merge, weight, _ = known
    parts = weight, *merge.keywords.values()
    return all(part.untyped_storage().nbytes() for part in parts)


@contextmanager
def _merging_again() -> Iterator[None]:
    """Autograd saves no merged weight.

    Module hooks do not serve here: an interrupt would leave the context that they entered.
    """
    # Autograd calls only the innermost hooks, so ours pass all other tensors to the outer
    # hooks, such as those of checkpointing or offloading.
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: Tensor) -> Any:
        known = _running.merged.get(tensor.untyped_storage()._cdata)
        if known and _are_there(known):
            return _Saved(known[1], tensor, known[0])
        return outer[0](tensor) if outer else _Saved(tensor, tensor, None)

    def unpack(packed: Any) -> Tensor:
        return packed.make() if isinstance(packed, _Saved) else outer[1](packed)

    _running.depth += 1
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _running.depth -= 1
        if not _running.depth:
            _running.known.clear()
            _running.merged.clear()


def _merging(base: type[Module], replaced: bool) -> Callable[..., Any]:
    """Returns a method with the name and the signature of ``forward`` of a class, which it calls.

    If ``replaced``, it calls the module's own forward instead. Export reads the signature. pickle finds a
    bound method by its name, and so it finds the class's for a module that was merged for good.
    """

    @functools.wraps(base.forward, assigned=("__name__",))
    def merging(module: Module, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(base.forward, module)
        if replaced:
            call = module.__dict__["_merged_forward"]
        # The compiler itself decides what to recompute, and torch.func allows no hooks.
        if torch.compiler.is_compiling() or not _hooks_are_allowed():
            return call(*args, **kwargs)
        with _merging_again():
            return call(*args, **kwargs)

    return merging


def add_lora(
    module: Module,
    rank: int,
    *,
    alpha: float | None = None,
    names: Iterable[str] | None = None,
) -> list[Parameter]:
    r"""Freezes the stacked expert weights of a module and trains low-rank updates of them.

    It registers a parametrization (:mod:`torch.nn.utils.parametrize`), so that a module of any class
    sees merged weights. In the state dict, attribute ``w`` becomes
    ``parametrizations.w.original`` (frozen), ``parametrizations.w.0.a`` :math:`(E, r, in)` and
    ``parametrizations.w.0.b`` :math:`(E, out, r)`.
    :func:`~torch.nn.utils.parametrize.remove_parametrizations` merges for good. A forward saves what the
    frozen module saves, and a and b. The backward merges again for each use of the weight. It needs the
    memory of one whole weight gradient at a time to compute the gradients of a and b. Both have the
    dtype of the weight and may be cast, as ``layer.parametrizations.w_in[0].float()`` does.

    Args:
        module: with experts, such as :class:`torch.nn.MoE`; call it once for each layer.
        rank: r, at least 1.
        alpha: the update is scaled by alpha / r. Default: r, no scale
        names: of the parameters :math:`(E, out, in)` to adapt. Default: all 3-d parameters that the
            module itself has

    Returns:
        list[Parameter]: the new parameters, for an optimizer: a and b of each name.

    Raises:
        ValueError: a rank that is no integer of at least 1, a name that is no 3-d parameter of the
            module, is adapted already or is given twice, no such parameter, a distributed
            parameter, or a weight that has another parametrization.

    .. note::
        This describes eager mode: ``torch.compile`` itself decides what to save. Merged weights are saved
        where saved tensors may have no hooks, as in :func:`torch.func.grad`, and where hooks free the
        parameters after the parametrization's forward, as ZeRO-3 of DeepSpeed does. Under autocast the
        cast of a merged weight is saved, as the cast of a plain weight is.

    Example::

        >>> layer = torch.nn.MoE(16, 32, num_experts=8, top_k=2)
        >>> x = torch.randn(10, 16)
        >>> y = layer(x)
        >>> parameters = add_lora(layer, rank=4)
        >>> assert torch.equal(layer(x), y)
        >>> [tuple(p.shape) for p in parameters]
        [(8, 4, 16), (8, 64, 4), (8, 4, 32), (8, 16, 4)]
    """
    own = dict(module.named_parameters(recurse=False))
    names = names if names is None or isinstance(names, str) else list(names)
    adapted = False
    for name, parts in getattr(module, "parametrizations", {}).items():
        adapted |= isinstance(parts[0], _LowRank)
        is_3d = any(p.dim() == 3 for p in parts.parameters(recurse=False))
        wanted = is_3d if names is None else name in names
        if wanted and not isinstance(parts[0], _LowRank):
            raise ValueError(
                f"add_lora: {name!r} has a parametrization, {type(parts[0]).__name__}; remove it with "
                "torch.nn.utils.parametrize.remove_parametrizations, or give the names of other weights"
            )
    if names is None:
        names = [name for name, p in own.items() if p.dim() == 3]
    wrong = isinstance(names, str) or len({*names}) < len(names) or not names
    wrong = wrong or not isinstance(rank, int) or rank < 1
    if wrong or any(n not in own or own[n].dim() != 3 for n in names):
        raise ValueError(
            "add_lora: rank must be an integer of at least 1, and names a list of different 3-d "
            f"parameters of the module itself, got rank={rank}, names={names!r}; it has "
            f"{[(name, tuple(p.shape)) for name, p in own.items()]}, and has adapted "
            f"{[*getattr(module, 'parametrizations', ())]} already"
        )
    distributed = [n for n in names if is_traceable_wrapper_subclass(own[n])]
    if distributed:
        raise ValueError(
            "add_lora: must come before parallelize_module and fully_shard, which distribute the new "
            f"parameters as well; {distributed} are of type {type(own[distributed[0]]).__name__}"
        )
    found = []
    for name in names:
        weight = own[name].requires_grad_(False)
        low_rank = _LowRank(weight, rank, 1.0 if alpha is None else alpha / rank)
        parametrize.register_parametrization(module, name, low_rank)
        found += [low_rank.a, low_rank.b]
    # register_parametrization made this class for the module; copies of the module share it.
    kind = type(module)
    if "forward" not in module.__dict__:
        if not adapted:
            kind.forward = _merging(kind.__bases__[0], replaced=False)
    elif "_merged_forward" not in module.__dict__:
        module.__dict__["_merged_forward"] = module.forward
        module.forward = types.MethodType(_merging(kind, replaced=True), module)
    return found
