"""Triton kernel for ``aten::_moe_quantize``.

Served (``quantize_reason`` returns why not): everything that the op takes, on the devices of
triton_impl.py, with at most 2^31 - 1 scales and no copy-on-write tensor. Compute capability 8.0
and ROCm have no conversion to float8_e4m3fn of these rules, so that the kernel makes its bits by
integer arithmetic there. What is malformed falls through to the composite kernel, which owns the
error messages.
"""

import math

import torch
from torch import Tensor

from ... import triton_utils as tu
from . import triton_impl
from .triton_impl import _choose, _INT32_MAX, _MAX_ROWS, _on_device, _ROUTER_DTYPES


# As in triton_kernels/quantize.py, which cannot be imported before Triton: elements per scale
# by the number of the recipe. test_moe_quantize_triton_gate.py compares the two.
_BLOCKS = {1: 0, 3: 32, 4: 128, 5: 128}
_SQUARE, _MX = 5, 3


def _offs_reason(self: Tensor, recipe: int, offs: Tensor, dim: int) -> str | None:
    if offs.dim() != 1 or offs.dtype != torch.int32 or offs.shape[0] < 1:
        return "offs is not (E,) int32"
    if self.dim() != 2 or dim % 2 != 0 or recipe == _SQUARE:
        return "offs without a matrix that is scaled along dimension 0"
    return None


def quantize_reason(
    self: Tensor,
    recipe: int,
    *,
    offs: Tensor | None = None,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    swizzle: int = 0,
    memory: bool = True,
) -> str | None:
    """Why Triton cannot run ``_moe_quantize`` on these arguments, or None.

    Without ``memory`` for tensors that have none.
    """
    if self.dtype not in _ROUTER_DTYPES:
        return f"self has dtype {self.dtype}, not one of {_ROUTER_DTYPES}"
    if recipe not in _BLOCKS:
        return f"recipe is {recipe}"
    if self.dim() < (2 if recipe == _SQUARE else 1):
        return f"self has {self.dim()} dimensions"
    if not -self.dim() <= dim < self.dim():
        return f"dim is {dim}"
    if dtype not in (None, torch.float8_e4m3fn, torch.int8):
        return f"dtype is {dtype}"
    is_swizzled = recipe == _MX and self.dim() in (2, 3) and offs is None
    if swizzle not in ((0, 1) if is_swizzled else (0,)):
        return f"swizzle is {swizzle}"
    if offs is not None:
        reason = _offs_reason(self, recipe, offs, dim)
        if reason is not None:
            return reason
    sizes = list(self.shape)
    length = sizes.pop(dim)
    scales = math.prod(sizes) * (length // (_BLOCKS[recipe] or max(length, 1)) + 1)
    if max(*sizes, length, 0) > _MAX_ROWS or scales > _INT32_MAX:
        return "more rows or scales than int32 can count"
    return triton_impl._device_reason((self, offs), memory)


def _converts_float8(device_index: int) -> bool:
    """Whether the device converts float32 to float8_e4m3fn as the op rounds."""
    if torch.version.hip is not None:
        return False
    return triton_impl._capability(device_index) >= (8, 9)


def _quantize_cond(*args, **kwargs) -> bool:
    return _choose("_moe_quantize", quantize_reason, args, kwargs)


def _quantize_impl(self, recipe, **options):
    from .triton_kernels.quantize import moe_quantize

    native = _converts_float8(self.get_device())
    with _on_device(self):
        return moe_quantize(self, recipe, native=native, **options)


def register_to_dispatch() -> None:
    tu.register_op_override(
        "aten",
        "_moe_quantize",
        "CUDA",
        cond=_quantize_cond,
        impl=_quantize_impl,
        allow_multiple_override=True,
    )
