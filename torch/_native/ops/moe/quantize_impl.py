"""Triton kernel for ``aten::_moe_quantize``.

It supports (``quantize_reason`` returns why not) the recipes of ``F.moe_mlp`` and both dtypes of codes, on
the devices of triton_impl.py, with at most 2^31 - 1 scales and no copy-on-write tensor. Compute
capability 8.0 and ROCm have no conversion to float8_e4m3fn with these rules; there the kernel
computes the bits with integer arithmetic.
"""

import math

import torch
from torch import Tensor

from . import triton_impl
from .triton_impl import INT32_MAX, MAX_ROWS, ROUTER_DTYPES
from .triton_kernels.scaling_rules import SCALING_RULES


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

    As the reasons of triton_impl.py.
    """
    if self.dtype not in ROUTER_DTYPES:
        return f"self has dtype {self.dtype}, not one of {ROUTER_DTYPES}"
    if recipe not in SCALING_RULES:
        return f"recipe is {recipe}"
    if dtype not in (None, torch.float8_e4m3fn, torch.int8):
        return f"dtype is {dtype}"
    if swizzle not in (0, 1):
        return f"swizzle is {swizzle}"
    sizes = list(self.shape)
    length = sizes.pop(dim)
    block = SCALING_RULES[recipe].block or max(length, 1)
    scales = math.prod(sizes) * (length // block + 1)
    if max(*sizes, length, 0) > MAX_ROWS or scales > INT32_MAX:
        return "more rows or scales than int32 can count"
    return triton_impl.device_reason((self, offs), memory)


def converts_float8(device_index: int) -> bool:
    """Whether the device converts float32 to float8_e4m3fn as the op rounds."""
    if torch.version.hip is not None:
        return False
    return triton_impl.capability_of(device_index) >= (8, 9)


def _quantize_impl(self, recipe, **options):
    from .triton_kernels.quantize import moe_quantize

    native = converts_float8(self.get_device())
    with triton_impl.on_device(self):
        return moe_quantize(self, recipe, native=native, **options)


def register_to_dispatch() -> None:
    cond = triton_impl.cond_of("_moe_quantize", quantize_reason)
    triton_impl.register("_moe_quantize", cond, _quantize_impl)
