"""Quantised expert weights that serve several micro-batches. Prototype: may change."""

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType
from torch.optim.optimizer import register_optimizer_step_post_hook


__all__ = ["WeightCache", "quantize_weight"]


def quantize_weight(weight: Tensor, recipe: str) -> tuple[Tensor, ...]:
    """``weight`` (E, N, K) as :func:`torch.nn.functional.scaled_moe_mlp` quantises it.

    Args:
        weight: float32, bfloat16 or float16.
        recipe: one of :func:`torch.nn.functional.scaled_moe_mlp`.

    Returns:
        ``(data, scale, data_t, scale_t)``: quantised along the last dimension, then along dim 1 for the
        gradients of the rows. For ``"fp8_blockwise"``, whose square blocks serve both, ``(data, scale)``.

    Raises:
        ValueError: ``recipe`` is none of them.
    """
    recipes = F._MOE_RECIPES
    if recipe not in recipes:
        raise ValueError(
            f"quantize_weight: recipe must be one of {', '.join(recipes)}, got {recipe!r}"
        )
    code = recipes[recipe][1]
    rows = torch.ops.aten._moe_quantize(weight.detach(), code)
    if code == ScalingType.BlockWise128x128.value:
        return tuple(rows)
    return (*rows, *torch.ops.aten._moe_quantize(weight.detach(), code, dim=1))


class WeightCache:
    r"""Quantises a weight once and remembers it until it may have changed.

    It quantises again after a step of any :class:`torch.optim.Optimizer`, after an in-place write (also by
    ``load_state_dict``, and under :func:`torch.no_grad`), for another tensor or other memory
    (``weight.data = ...``), and after :meth:`clear`. Until the next optimizer step it misses writes that
    autograd misses (into ``weight.data``, or by the gather of FSDP2). Call :meth:`clear` after loading a
    checkpoint into the shards of FSDP2.

    The gradient still goes to the weight, which is passed next to its quantised form. The cache is state, so
    call it outside of :func:`torch.compile`, or let the graph quantise.

    Args:
        recipe: one of :func:`torch.nn.functional.scaled_moe_mlp`.

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
        self.recipe = recipe
        self._weight: weakref.ref[Tensor] | None = None
        self._state: tuple[int, int] | None = None
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
        known = self._weight() if self._weight is not None else None
        # Tensor subclasses may have no storage.
        has_memory = type(weight) in (Tensor, torch.nn.Parameter)
        state = weight._version, weight.data_ptr() if has_memory else 0
        if known is not weight or self._state != state:
            self._scaled = quantize_weight(weight, self.recipe)
            self._weight, self._state = weakref.ref(weight), state
        return self._scaled

    def clear(self) -> None:
        """Forgets the weight: the next call quantises."""
        self._weight, self._scaled = None, ()
