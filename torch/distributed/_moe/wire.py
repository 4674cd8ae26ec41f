"""Token rows in fewer bytes, for the way to the experts.

FP8 rows are ``D`` float8_e4m3fn bytes followed by one byte per 128 values with the
exponent of their scale. A power-of-two scale changes no mantissa, so that a value is
rounded once, and rows can be requantised along the other axis without loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


__all__ = ["check_dtype", "decode", "encode"]

_BLOCK = 128
_E4M3_EXPONENT = 8  # 2**8 <= largest e4m3 value 448 < 2**9
_BIAS = 127


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raises ValueError unless ``dtype`` is one that rows can travel in."""
    if dtype not in (None, torch.bfloat16, torch.float8_e4m3fn):
        raise ValueError(
            "wire_dtype must be None, torch.bfloat16 or torch.float8_e4m3fn, "
            f"got {dtype}"
        )


def encode(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """(T, D) rows as they travel: (T, D) bfloat16 or (T, D + D/128) uint8."""
    if dtype == torch.bfloat16:
        return rows.to(dtype)
    T, D = rows.shape
    blocks = F.pad(rows.float(), (0, -D % _BLOCK)).view(T, -(-D // _BLOCK), _BLOCK)
    # amax < 2**exponent; scaled values stay below 2**8, which e4m3 can hold.
    exponent = torch.frexp(blocks.abs().amax(dim=2)).exponent - _E4M3_EXPONENT
    exponent = exponent.clamp(-_BIAS, 255 - _BIAS)
    scaled = torch.ldexp(blocks, -exponent[:, :, None]).flatten(1)[:, :D]
    payload = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([payload, (exponent + _BIAS).to(torch.uint8)], dim=1)


def decode(packed: Tensor, dtype: torch.dtype, dim: int, out: torch.dtype) -> Tensor:
    """Inverse of :func:`encode` up to rounding: (T, dim) rows of dtype ``out``."""
    if dtype == torch.bfloat16:
        return packed.to(out)
    values = packed[:, :dim].view(torch.float8_e4m3fn).float()
    exponent = packed[:, dim:].int() - _BIAS
    exponent = exponent.repeat_interleave(_BLOCK, dim=1)[:, :dim]
    return torch.ldexp(values, exponent).to(out)
