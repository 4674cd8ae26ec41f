"""Quantised expert weights that serve several micro-batches. Prototype: may change."""

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import ScalingType
from torch.optim.optimizer import register_optimizer_step_post_hook


__all__ = ["WeightCache", "quantize_weight"]


def _check_recipe(name: str, recipe: str) -> None:
    recipes = F._MOE_RECIPES
    if recipe not in recipes:
        raise ValueError(
            f"{name}: recipe must be one of {', '.join(recipes)}, got {recipe!r}"
        )


def quantize_weight(weight: Tensor, recipe: str) -> tuple[Tensor, ...]:
    """``weight`` (E, N, K) as :func:`torch.nn.functional.scaled_moe_mlp` quantises it.

    Args:
        weight: float32, bfloat16 or float16.
        recipe: one of :func:`torch.nn.functional.scaled_moe_mlp`.

    Returns:
        ``(data, scale, data_t, scale_t)``: quantised along the last dimension, then along dim 1 for the
        gradients of the rows. For ``"fp8_blockwise"``, whose square blocks serve both, ``(data, scale)``.

    Raises:
        ValueError: ``recipe`` is none of them, or ``weight`` has not three dimensions.
        TypeError: ``weight`` is of another dtype.
    """
    _check_recipe("quantize_weight", recipe)
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            "quantize_weight: weight must be float32, bfloat16 or float16, got "
            f"{weight.dtype}"
        )
    if weight.dim() != 3:
        raise ValueError(
            f"quantize_weight: weight must have shape (E, N, K), got {tuple(weight.shape)}"
        )
    code = F._MOE_RECIPES[recipe][1]
    rows = torch.ops.aten._moe_quantize(weight.detach(), code)
    if code == ScalingType.BlockWise128x128.value:
        return tuple(rows)
    return (*rows, *torch.ops.aten._moe_quantize(weight.detach(), code, dim=1))


class WeightCache:
    r"""Quantises a weight once and remembers it until it may have changed.

    It quantises again after a step of any :class:`torch.optim.Optimizer`, after an in-place write (also by
    ``load_state_dict``, and under :func:`torch.no_grad`), for other memory (another tensor, or
    ``weight.data = ...``), and after :meth:`clear`. Until the next optimizer step it misses writes that
    autograd misses (into ``weight.data``, into a weight made in inference mode, or by the gather of FSDP2).
    Call :meth:`clear` after loading a checkpoint into the shards of FSDP2. A tensor subclass, such as a
    DTensor, is quantised in each call. Copies, also those of pickle, begin empty.

    The gradient still goes to the weight, which is passed next to its quantised form. The cache is state, so
    call it outside of :func:`torch.compile`, or let the graph quantise.

    Args:
        recipe: one of :func:`torch.nn.functional.scaled_moe_mlp`.

    Raises:
        ValueError: ``recipe`` is none of them.

    Example::

        >>> cache_in, cache_out = WeightCache("mxfp8"), WeightCache("mxfp8")
        >>> w_in = torch.randn(4, 64, 32, requires_grad=True)
        >>> w_out = torch.randn(4, 32, 32, requires_grad=True)
        >>> for micro_batch in torch.randn(3, 10, 32):
        ...     ids = torch.randint(4, (10, 2))
        ...     y = F.scaled_moe_mlp(
        ...         micro_batch, ids, None, w_in, w_out, recipe="mxfp8",
        ...         w_in_scaled=cache_in(w_in), w_out_scaled=cache_out(w_out),
        ...     )
    """

    def __init__(self, recipe: str) -> None:
        _check_recipe("WeightCache", recipe)
        self.recipe = recipe
        # The memory, not the tensor: Module.to can't swap a tensor that has weak references.
        self._memory: StorageWeakRef | None = None
        self._state: tuple[Any, ...] = ()
        self._scaled: tuple[Tensor, ...] = ()
        me = weakref.ref(self)

        def forget(optimizer, args, kwargs):
            cache = me()
            if cache is not None:
                cache.clear()

        handle = register_optimizer_step_post_hook(forget)
        weakref.finalize(self, handle.remove)

    def __call__(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The tuple of :func:`quantize_weight` for ``weight`` (E, N, K)."""
        # Others may have no memory.
        plain = type(weight) in (Tensor, torch.nn.Parameter)
        if not plain or torch._C._functorch.is_functorch_wrapped_tensor(weight):
            return quantize_weight(weight, self.recipe)
        # No other memory has this number as long as the weak reference exists.
        memory = StorageWeakRef(weight.untyped_storage())
        version = -1 if weight.is_inference() else weight._version
        view = weight.shape, weight.stride(), weight.storage_offset(), weight.dtype
        view += (weight.is_neg(),)
        state = memory.cdata, weight.data_ptr(), version, view
        if self._state != state:
            # The next forward may record gradients.
            with torch.inference_mode(False):
                self._scaled = quantize_weight(weight, self.recipe)
            self._memory, self._state = memory, state
        return self._scaled

    def clear(self) -> None:
        """Forgets the weight: the next call quantises."""
        self._memory, self._state, self._scaled = None, (), ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.recipe,)
