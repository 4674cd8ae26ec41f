"""Converts quantised expert weights of other libraries to operands of ``_moe_mlp_scaled``.

Nothing is quantised again: numbers and scales are unchanged, so the values equal the library's own
dequantisation. Forms that the op does not take are refused.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType


__all__ = [
    "QuantizedWeight",
    "from_compressed_tensors",
    "from_fp8_blocks",
    "from_mxfp4_blocks",
    "from_torchao",
]


class QuantizedWeight(NamedTuple):
    """A weight of ``_moe_mlp_scaled``: ``[data, scale]`` is the operand.

    Attributes:
        data: (E, N, K), or (E, N, K / 2) with two numbers a byte.
        scale: float32 or float8_e8m0fnu, in the shape of its blocks.
        recipe: of ``recipe_w``, the same for all weights of a call.
    """

    data: Tensor
    scale: Tensor
    recipe: int


def from_mxfp4_blocks(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """gpt-oss: ``*_blocks`` and ``*_scales`` of a checkpoint, without a copy.

    Args:
        blocks: (E, N, K / 32, 16) uint8, two numbers a byte, the even one in the low bits.
        scales: (E, N, K / 32) uint8, exponents of two plus 127.

    Raises:
        ValueError: another shape or dtype.
    """
    bytes_of = (blocks.dtype, scales.dtype) == (torch.uint8, torch.uint8)
    if not bytes_of or blocks.dim() != 4 or blocks.shape != (*scales.shape, 16):
        raise ValueError(
            "from_mxfp4_blocks: blocks (E, N, K / 32, 16) and scales (E, N, K / 32) must be "
            f"uint8, got {tuple(blocks.shape)} of {blocks.dtype} and "
            f"{tuple(scales.shape)} of {scales.dtype}"
        )
    data = blocks.flatten(2).view(torch.float4_e2m1fn_x2)
    scale = scales.view(torch.float8_e8m0fnu)
    return QuantizedWeight(data, scale, ScalingType.BlockWise1x32.value)


def from_fp8_blocks(weight: Tensor, weight_scale_inv: Tensor) -> QuantizedWeight:
    """DeepSeek: FP8 weights with a scale for every square of 128, stacked by expert.

    Args:
        weight: (E, N, K) float8_e4m3fn.
        weight_scale_inv: (E, ceil(N / 128), ceil(K / 128)) floating point, a factor despite
            its name.

    Raises:
        ValueError: another shape or dtype.
    """
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 3:
        raise ValueError(
            "from_fp8_blocks: weight must be (E, N, K) float8_e4m3fn, got "
            f"{tuple(weight.shape)} of {weight.dtype}"
        )
    E, N, K = weight.shape
    blocks = (E, -(-N // 128), -(-K // 128))
    if tuple(weight_scale_inv.shape) != blocks:
        raise ValueError(
            f"from_fp8_blocks: weight_scale_inv must be {blocks}, of blocks of 128 x 128, "
            f"got {tuple(weight_scale_inv.shape)}"
        )
    _check_factors("from_fp8_blocks", "weight_scale_inv", weight_scale_inv)
    scale, recipe = weight_scale_inv.float(), ScalingType.BlockWise128x128
    return QuantizedWeight(weight, scale, recipe.value)


def from_compressed_tensors(
    weight: Tensor,
    weight_scale: Tensor,
    *,
    weight_shape: tuple[int, int] | None = None,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
    block: int | None = None,
) -> QuantizedWeight:
    """compressed-tensors: ``weight`` or ``weight_packed`` of its checkpoints, stacked by expert.

    Args:
        weight: (E, N, K) float8_e4m3fn or int8, (E, N, K / 8) int32 of 4-bit numbers
            ("pack-quantized"), or (E, N, K / 2) uint8 ("mxfp4-pack-quantized").
        weight_scale: (E, N, groups), or (E, 1) for one scale per expert; floating point. The group
            size is a multiple of 32 for int4, and a multiple of 128 or a whole row for
            float8_e4m3fn and int8. In the MXFP4 and MXFP8 formats, (E, N, K / 32) uint8 exponents.
        weight_shape: (N, K) of an expert, for int32.
        weight_zero_point: must be zero; in int32, 8 of them plus 8, as the weights are packed.
        weight_g_idx: must have no group: columns that are ordered by activation are refused.
        block: elements of a scale of the result, 32 or 128, for int4: equal for all weights of a
            call, so 32 if a whole row of one of them is no multiple of 128. Default: 128 if it
            divides the group size

    Raises:
        ValueError: a form that ``_moe_mlp_scaled`` does not take.
    """
    name = "from_compressed_tensors"
    words = weight.dtype == torch.int32
    if words and weight_zero_point is not None:
        if weight_zero_point.dtype == torch.int32:
            # (E, ceil(N / 8), groups): eight rows in a word, and no row is 0.
            shifts = 4 * torch.arange(8, device=weight_zero_point.device)
            rows = (weight_zero_point.unsqueeze(2) >> shifts.view(8, 1)) & 15
            weight_zero_point = rows.flatten(1, 2)[:, : weight.shape[1]] - 8
    _check_zero_point(name, weight_zero_point)
    if weight_g_idx is not None and bool((weight_g_idx >= 0).any()):
        raise ValueError(
            f"{name}: weight_g_idx must be -1, the op has no order of columns"
        )
    if torch.uint8 in (weight.dtype, weight_scale.dtype):
        return _with_exponents(name, weight, weight_scale)
    if words:
        if isinstance(weight_shape, Tensor):
            weight_shape = weight_shape.tolist()
        sizes = (*weight.shape[1:-1], weight.shape[-1] * 8)
        if weight_shape is None or tuple(weight_shape) != sizes:
            raise ValueError(
                f"{name}: int32 must pack 8 numbers of 4 bits and K be a multiple of 8, with the "
                f"weight_shape (N, K) of one expert, got {tuple(weight.shape)} for {weight_shape}"
            )
        # Low bits first, with an offset of 8: on little-endian machines this is the op's format.
        weight = weight.contiguous().view(torch.uint8)
    return _grouped(name, weight, weight_scale, block)


def from_torchao(weight: Any) -> QuantizedWeight:
    """torchao: an ``Int8Tensor`` or ``Float8Tensor``, as ``quantize_`` makes of a parameter.

    Args:
        weight: (E, N, K).

    Raises:
        ValueError: a form that ``_moe_mlp_scaled`` does not take.
    """
    kind = type(weight).__name__
    if kind not in ("Int8Tensor", "Float8Tensor"):
        raise ValueError(
            "from_torchao: weight must be an Int8Tensor or a Float8Tensor of torchao, got "
            f"{kind}; quantise its dequantize() with torch._moe_quantize instead"
        )
    _check_zero_point("from_torchao", getattr(weight, "zero_point", None))
    return _grouped("from_torchao", weight.qdata, weight.scale)


def _check_zero_point(name: str, zero_point: Tensor | None) -> None:
    if zero_point is not None and bool(zero_point.count_nonzero()):
        raise ValueError(f"{name}: zero points must be 0, the op has none")


def _check_factors(name: str, argument: str, scale: Tensor) -> None:
    if not scale.is_floating_point():
        raise ValueError(
            f"{name}: {argument} must be floating point, got {scale.dtype}; view the exponents of "
            "two as float8_e8m0fnu"
        )


def _with_exponents(name: str, data: Tensor, scale: Tensor) -> QuantizedWeight:
    """FP4 and FP8 whose scales of 32 are exponents of two plus 127."""
    per_byte = {torch.uint8: 2, torch.float8_e4m3fn: 1}.get(data.dtype)
    if (
        data.dim() != 3
        or per_byte is None
        or scale.dtype != torch.uint8
        or (
            (*scale.shape[:-1], scale.shape[-1] * 32)
            != (*data.shape[:-1], data.shape[-1] * per_byte)
        )
    ):
        raise ValueError(
            f"{name}: numbers (E, N, K / 2) of FP4 in uint8 or (E, N, K) float8_e4m3fn need scales "
            f"(E, N, K / 32) of exponents in uint8, got {tuple(data.shape)} of {data.dtype} and "
            f"{tuple(scale.shape)} of {scale.dtype}"
        )
    if per_byte == 2:
        data = data.view(torch.float4_e2m1fn_x2)
    exponents = scale.view(torch.float8_e8m0fnu)
    return QuantizedWeight(data, exponents, ScalingType.BlockWise1x32.value)


def _grouped(
    name: str, data: Tensor, scale: Tensor, block: int | None = None
) -> QuantizedWeight:
    """Scales of groups along K, one per row, or one per expert."""
    packed = data.dtype == torch.uint8
    allowed = {torch.uint8: (32, 128), torch.float8_e4m3fn: (128,), torch.int8: (128,)}
    if block is not None and (not packed or block not in allowed[data.dtype]):
        raise ValueError(
            f"{name}: block must be 32 or 128 and the numbers int4, got {block}"
        )
    if data.dim() != 3 or data.dtype not in allowed:
        raise ValueError(
            f"{name}: numbers must be (E, N, K) float8_e4m3fn, int8 or int4, got "
            f"{tuple(data.shape)} of {data.dtype}"
        )
    E, N, K = data.shape
    K *= 2 if packed else 1
    _check_factors(name, "scale", scale)
    if scale.numel() == 1 or scale.shape in ((E,), (E, 1), (E, 1, 1)):
        scale = scale.reshape(-1, 1, 1).expand(E, N, 1)
    groups = scale.shape[-1]
    if scale.shape != (E, N, groups) or groups == 0 or K % groups:
        raise ValueError(
            f"{name}: scales must be one for all, for each expert, or (E, N, groups) with "
            f"groups that divide K = {K}, got {tuple(scale.shape)}"
        )
    size = K // groups
    scale = scale.float()
    if groups == 1 and not packed:
        return QuantizedWeight(data, scale.contiguous(), ScalingType.RowWise.value)
    blocks = allowed[data.dtype] if block is None else (block,)
    block = max((b for b in blocks if size % b == 0), default=None)
    if block is None:
        rule = (
            f"of a multiple of {min(blocks)}"
            if packed
            else f"of whole rows or one of {list(allowed[data.dtype])}"
        )
        raise ValueError(f"{name}: groups of {data.dtype} must be {rule}, got {size}")
    recipe = {32: ScalingType.BlockWise1x32, 128: ScalingType.BlockWise1x128}[block]
    scale = scale.repeat_interleave(size // block, -1)
    return QuantizedWeight(data, scale.contiguous(), recipe.value)
