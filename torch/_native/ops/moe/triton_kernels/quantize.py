"""``aten::_moe_quantize``: codes and power-of-two scales of a tensor.

A tensor is seen as (A, B, L): L elements along the scaled dimension, which is dense in
both results, and all other dimensions merged into two. The input may have any strides; if B is
dense in it, a tile is transposed between load and store.

    quantize_kernel            blocks of 1x32 and 1x128: a tile, read once
    quantize_square_kernel     blocks of 128x128, read twice, the second time from a cache
    quantize_segments_kernel   one scale per row, and blocks that begin with experts: read twice

scaling.py has the rules. Indices are int32, offsets int64.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

import torch
from torch import Tensor

from .configs import itself, OPTIONS
from .scaling import (
    as_scale,
    encode,
    magnitude_bits,
    NAN_BYTE,
    quantize_rows,
    reciprocal,
    scale_byte,
)
from .scaling_rules import SCALING_RULES, ScalingRule


@triton.jit
def _load(x, a, b, l, b_end, l_end, stride_a, stride_b, stride_l):
    """float32 elements (a, b, l) of ``x`` for one a, 0 past the ends, and a mask of those inside."""
    mask = (b < b_end)[:, None] & (l < l_end)[None, :]
    row = a.to(tl.int64) * stride_a + b.to(tl.int64) * stride_b
    ptrs = x + (row[:, None] + (l.to(tl.int64) * stride_l)[None, :])
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32), mask


@triton.jit
def _swizzled(a, row, column, rows, columns):
    """int64 places of scales in SWIZZLE_32_4_4; ``rows`` and ``columns`` are padded."""
    tile = (row // 128).to(tl.int64) * (columns // 4) + column // 4
    within = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    return a.to(tl.int64) * rows * columns + tile * 512 + within


@triton.jit(do_not_specialize=["num_b", "scale_rows"])
def quantize_kernel(
    x,  # (A, B, L) by strides
    data,  # (A, B, L) uint8 contiguous, written
    scale,  # (A, scale_rows, scale_columns), contiguous or swizzled, written
    num_b, num_l, stride_a, stride_b, stride_l, scale_rows, scale_columns,
    BLOCK: tl.constexpr, SWIZZLE: tl.constexpr,
    INT8: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """One tile. Grid: (A * tiles of rows * tiles of columns of the scales,)."""
    COLUMNS: tl.constexpr = BLOCK_L // BLOCK
    tiles_l = tl.cdiv(scale_columns, COLUMNS)
    tiles_b = tl.cdiv(scale_rows, BLOCK_B)
    index = tl.program_id(0)
    tile_l = index % tiles_l
    a = index // tiles_l // tiles_b
    b = index // tiles_l % tiles_b * BLOCK_B + tl.arange(0, BLOCK_B)
    l = tile_l * BLOCK_L + tl.arange(0, BLOCK_L)
    v, mask = _load(x, a, b, l, num_b, num_l, stride_a, stride_b, stride_l)
    code, byte = quantize_rows(v, BLOCK_B, BLOCK_L, BLOCK, INT8, NATIVE)
    row = b[:, None]
    column = tile_l * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if SWIZZLE:
        place = _swizzled(a, row, column, scale_rows, scale_columns)
    else:
        place = (a.to(tl.int64) * scale_rows + row) * scale_columns + column
    scale_mask = (row < scale_rows) & (column < scale_columns)
    tl.store(scale + place, as_scale(byte, scale.dtype.element_ty), mask=scale_mask)
    to = data + a.to(tl.int64) * num_b * num_l
    tl.store(to + row.to(tl.int64) * num_l + l[None, :], code, mask=mask)


@triton.jit(do_not_specialize=["num_b"])
def quantize_square_kernel(
    x,  # (A, B, L) by strides
    data,  # (A, B, L) uint8 contiguous, written
    scale,  # (A, cdiv(B, BLOCK), cdiv(L, BLOCK)) float32 contiguous, written
    num_b, num_l, stride_a, stride_b, stride_l,
    BLOCK: tl.constexpr, INT8: tl.constexpr, NATIVE: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """A square, BLOCK_B rows at a time. Grid: (scales,)."""
    index = tl.program_id(0)
    squares_l = tl.cdiv(num_l, BLOCK)
    squares_b = tl.cdiv(num_b, BLOCK)
    a = index // squares_l // squares_b
    first_b = index // squares_l % squares_b * BLOCK
    l = index % squares_l * BLOCK + tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK_B,), dtype=tl.int32)
    for first in range(first_b, first_b + BLOCK, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        v, mask = _load(x, a, b, l, num_b, num_l, stride_a, stride_b, stride_l)
        largest = tl.maximum(largest, tl.max(magnitude_bits(v), 1))
    byte = scale_byte(tl.max(largest, 0), INT8)
    tl.store(scale + index, as_scale(byte, scale.dtype.element_ty))
    to = data + a.to(tl.int64) * num_b * num_l
    for first in range(first_b, first_b + BLOCK, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        v, mask = _load(x, a, b, l, num_b, num_l, stride_a, stride_b, stride_l)
        code = encode(v * reciprocal(byte), byte == NAN_BYTE, INT8, NATIVE)
        place = (b.to(tl.int64) * num_l)[:, None] + l[None, :]
        tl.store(to + place, code, mask=mask)


@triton.jit
def _block_of_expert(
    offs, place, num_experts, num_rows, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Begin and end of the rows with the scales at ``place``; with BLOCK 0, of an expert."""
    before = tl.zeros((), dtype=tl.int32)
    for first in range(0, num_experts, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        inside = e < num_experts
        begin = tl.load(offs + e - 1, mask=inside & (e > 0), other=0)
        end = tl.load(offs + e, mask=inside, other=num_rows)
        tl.device_assert(
            (begin >= 0) & (begin <= end) & (end <= num_rows),
            "_moe_quantize: offs must be non-decreasing in [0, R]",
        )
        if BLOCK == 0:
            start = e
        else:
            start = begin // BLOCK + e
        before += tl.sum((inside & (start <= place)).to(tl.int32), 0)
    expert = before - 1
    begin = tl.load(offs + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs + expert)
    if BLOCK != 0:
        begin += (place - begin // BLOCK - expert) * BLOCK
        end = tl.minimum(end, begin + BLOCK)
    return begin, end


@triton.jit(do_not_specialize=["num_b", "num_places", "num_experts"])
def quantize_segments_kernel(
    x,  # (A, B, L) by strides
    data,  # (A, B, L) uint8 contiguous, written
    scale,  # (A, B, num_places) contiguous, written
    offs,  # (E,) int32; not read without HAS_OFFS
    num_b, num_l, stride_a, stride_b, stride_l, num_places, num_experts,
    BLOCK: tl.constexpr, HAS_OFFS: tl.constexpr,
    INT8: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """BLOCK_B segments of L with a scale each. Grid: (A * cdiv(B, BLOCK_B) * num_places,)."""
    tiles_b = tl.cdiv(num_b, BLOCK_B)
    index = tl.program_id(0)
    b = index % tiles_b * BLOCK_B + tl.arange(0, BLOCK_B)
    place = index // tiles_b % num_places
    a = index // tiles_b // num_places
    begin = 0
    end = num_l
    if HAS_OFFS:
        begin, end = _block_of_expert(offs, place, num_experts, num_l, BLOCK, BLOCK_E)
    amax = tl.zeros((BLOCK_B,), dtype=tl.int32)
    for first in range(begin, end, BLOCK_L):
        l = first + tl.arange(0, BLOCK_L)
        v, mask = _load(x, a, b, l, num_b, end, stride_a, stride_b, stride_l)
        amax = tl.maximum(amax, tl.max(magnitude_bits(v), 1))
    byte = scale_byte(amax, INT8)
    row = a.to(tl.int64) * num_b + b
    ptrs = scale + row * num_places + place
    tl.store(ptrs, as_scale(byte, scale.dtype.element_ty), mask=b < num_b)
    is_nan = (byte == NAN_BYTE)[:, None]
    factor = reciprocal(byte)[:, None]
    to = data + (row * num_l)[:, None]
    for first in range(begin, end, BLOCK_L):
        l = first + tl.arange(0, BLOCK_L)
        v, mask = _load(x, a, b, l, num_b, end, stride_a, stride_b, stride_l)
        tl.store(to + l[None, :], encode(v * factor, is_nan, INT8, NATIVE), mask=mask)
    if HAS_OFFS:
        # Rows behind every expert, some for each place.
        tail = tl.load(offs + num_experts - 1) + place.to(tl.int64) * BLOCK_L
        zero = tl.zeros((BLOCK_B, BLOCK_L), dtype=tl.uint8)
        for first in range(tail, num_l, num_places.to(tl.int64) * BLOCK_L):
            l = first + tl.arange(0, BLOCK_L)
            mask = (b < num_b)[:, None] & (l < num_l)[None, :]
            tl.store(to + l[None, :], zero, mask=mask)


_FLOAT8 = torch.float8_e4m3fn


class _Tile(NamedTuple):
    """Elements of a tile along B and L, and the warps that work on it."""

    block_b: int
    block_l: int
    num_warps: int


# For inputs dense along L, and along B. 16 or 32 elements per thread: more would spill.
_TILES = {True: _Tile(32, 128, 4), False: _Tile(64, 128, 8)}
_SQUARE = _Tile(32, 128, 8)
_SEGMENTS = {True: _Tile(8, 512, 4), False: _Tile(16, 128, 4)}


def _matrices(
    x: Tensor, keep_rows: bool = False
) -> tuple[Tensor, list[int], list[int]]:
    """(A, B) and their strides, merged from all dimensions of x but the last; x, or a copy of it.

    With ``keep_rows`` B is the last dimension but one, whatever its size.
    """
    if keep_rows and x.dim() > 3:
        x = x.flatten(0, -3)
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1]):
        if not keep_rows and isinstance(size, int) and size == 1:
            continue
        if not keep_rows and sizes and strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > 2:
        # Not contiguous(): without elements it returns x, whatever its strides.
        return _matrices(x.clone(memory_format=torch.contiguous_format))
    missing = 2 - len(sizes)
    return x, [1] * missing + sizes, [0] * missing + strides


def _round_up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def moe_quantize(
    self: Tensor,
    recipe: int,
    *,
    offs: Tensor | None = None,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    swizzle: int = 0,
    native: bool,
    kernel: Callable[[Any], Any] = itself,
    bound: Callable[[int], float] = itself,
) -> tuple[Tensor, Tensor]:
    """``aten::_moe_quantize``: data and scale, of its shapes and strides.

    Args:
        self, recipe, offs, dim, dtype, swizzle: of the op, checked.
        native: whether the device converts float32 to float8_e4m3fn itself.
        kernel, bound: as in ``permutation.moe_permutation``.
    """
    rule = SCALING_RULES[recipe]
    dtype = _FLOAT8 if dtype is None else dtype
    dim = self.dim() - 1 if rule.square else dim % self.dim()
    x = self.movedim(dim, -1)
    length = x.shape[-1]
    data = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    outer = list(x.shape[:-1])
    places = 1 if rule.block == 0 else triton.cdiv(length, rule.block)
    if offs is not None:
        places = (length // rule.block if rule.block else 0) + offs.shape[0]
    if rule.square:
        outer[-1] = triton.cdiv(outer[-1], rule.block)
    if swizzle:
        outer[-1], places = _round_up(outer[-1], 128), _round_up(places, 4)
    scale_type = torch.uint8 if rule.as_byte else torch.float32
    scale = torch.empty([*outer, places], dtype=scale_type, device=x.device)
    if bound(scale.numel()) != 0:
        shared = {"INT8": dtype == torch.int8, "NATIVE": native}
        if rule.block == 0 or offs is not None:
            _launch_segments(x, data, scale, offs, rule, shared, kernel)
        else:
            _launch_tiles(x, data, scale, rule, bool(swizzle), shared, kernel)
    # Views as 8-bit types come last: a compiler supports few of their operators.
    data = data.movedim(-1, dim).view(dtype)
    if not swizzle:
        scale = scale.movedim(-1, dim)
    elif scale.dim() == 3:
        scale = scale.flatten(1)
    return data, scale.view(torch.float8_e8m0fnu) if rule.as_byte else scale


def _launch_tiles(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    rule: ScalingRule,
    swizzle: bool,
    shared: dict[str, bool],
    kernel: Callable[[Any], Any],
) -> None:
    """Blocks that begin at multiples of their size, of x (..., L)."""
    whole = rule.square or swizzle
    x, (num_a, num_b), (stride_a, stride_b) = _matrices(x, keep_rows=whole)
    args = (x, data, scale, num_b, x.shape[-1], stride_a, stride_b, x.stride(-1))
    scale_rows, scale_columns = scale.shape[-2] if whole else num_b, scale.shape[-1]
    options = {"BLOCK": rule.block, **shared, **OPTIONS}
    if rule.square:
        kernel(quantize_square_kernel)[(num_a * scale_rows * scale_columns,)](
            *args, BLOCK_B=_SQUARE.block_b, num_warps=_SQUARE.num_warps, **options
        )
        return
    tile = _TILES[x.stride(-1) == 1]
    tiles = triton.cdiv(scale_columns, tile.block_l // rule.block)
    kernel(quantize_kernel)[(num_a * triton.cdiv(scale_rows, tile.block_b) * tiles,)](
        *args, scale_rows, scale_columns, SWIZZLE=swizzle,
        BLOCK_B=tile.block_b, BLOCK_L=tile.block_l, num_warps=tile.num_warps, **options,
    )  # fmt: skip


def _launch_segments(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    offs: Tensor | None,
    rule: ScalingRule,
    shared: dict[str, bool],
    kernel: Callable[[Any], Any],
) -> None:
    """Segments of x (..., L): a row's elements, or the rows of experts, in blocks or not."""
    x, (num_a, num_b), (stride_a, stride_b) = _matrices(x)
    # Blocks of experts begin anywhere and take the smaller tile; the other one would spill.
    tile = _SEGMENTS[offs is None and x.stride(-1) == 1]
    block_l = rule.block or tile.block_l
    block_b = tile.block_b * tile.block_l // block_l
    num_experts = 0 if offs is None else offs.shape[0]
    grid = (num_a * triton.cdiv(num_b, block_b) * scale.shape[-1],)
    kernel(quantize_segments_kernel)[grid](
        x, data, scale, scale if offs is None else offs.contiguous(),
        num_b, x.shape[-1], stride_a, stride_b, x.stride(-1), scale.shape[-1], num_experts,
        BLOCK=rule.block, HAS_OFFS=offs is not None, BLOCK_B=block_b, BLOCK_L=block_l,
        BLOCK_E=min(128, triton.next_power_of_2(max(num_experts, 1))),
        num_warps=tile.num_warps,
        # Only the device assert on the offsets.
        debug=True, sanitize_overflow=False, **shared, **OPTIONS,
    )  # fmt: skip
