"""Storage of quantised expert weights for the CPU kernels of ``_moe_mlp_scaled``.

A weight of 8 or 4 bits works as a checkpoint stores it: (E, N, K) numbers, row after row. The CPU
kernels multiply 16 rows at a time and must transpose them on every call. :func:`pack_panels`
transposes once: same bytes and shapes, another order (``swizzle_w=[2]``).
"""

import torch
from torch import Tensor


__all__ = ["pack_panels"]

_LINES = 16  # kPanelLines of aten/src/ATen/native/MoEMLPScaledUtils.h


def pack_panels(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Order a quantised expert weight and its scales for ``swizzle_w=[2]``.

    .. note:: Prototype: the order of bytes may change between releases, so do not store it.

    Args:
        data: (E, N, K) float8_e4m3fn or int8, or (E, N, K / 2) float4_e2m1fn_x2 or uint8 (int4
            plus 8), two numbers a byte. N must be a multiple of 16, K of 8.
        scale: scales of rows, (E, N, blocks) float8_e8m0fnu or float32. Scales of 128 x 128 blocks
            or of the tensor are returned unchanged.

    Returns:
        tuple: data and scale, contiguous, of the same shapes and dtypes.

    Raises:
        ValueError: another shape or dtype.

    Example::

        >>> import torch
        >>> from torch.nn.utils._moe_low_bit import pack_panels
        >>> data, scale = torch._moe_quantize(torch.randn(2, 32, 64), 3)
        >>> data, scale = pack_panels(data, scale)
    """
    wide = data.dtype in (torch.float8_e4m3fn, torch.int8)
    if not wide and data.dtype not in (torch.float4_e2m1fn_x2, torch.uint8):
        raise ValueError(
            "data must have dtype float8_e4m3fn, int8, float4_e2m1fn_x2 or uint8, "
            f"got {data.dtype}"
        )
    bytes_of_8 = 8 if wide else 4
    if data.dim() != 3 or data.shape[1] % _LINES or data.shape[2] % bytes_of_8:
        raise ValueError(
            "data must be (E, N, K) with N a multiple of 16 and K of 8 numbers, "
            f"got shape {tuple(data.shape)} of {data.dtype}"
        )
    E, N, row_bytes = data.shape
    rows = data.view(torch.uint8).reshape(E, N // _LINES, _LINES, row_bytes // 4, 4)
    panels = rows.transpose(2, 3)
    if wide:
        # Interleave pairs of bytes: a kernel unpacks them with another half to get bfloat16.
        panels = panels.reshape(E, N // _LINES, row_bytes // 4, 4, 4, 2, 2)
        panels = panels.transpose(4, 5)
    data = panels.reshape(E, N, row_bytes).contiguous().view(data.dtype)
    if scale.dim() != 3 or scale.shape[1] != N:
        return data, scale.contiguous()
    blocks = scale.shape[2]
    of_rows = scale.view(torch.uint8) if scale.itemsize == 1 else scale
    of_rows = of_rows.reshape(E, N // _LINES, _LINES, blocks).transpose(2, 3)
    return data, of_rows.reshape(E, N, blocks).contiguous().view(scale.dtype)
