"""The bytes sent between ranks: rows in fewer bytes, and messages of several tensors.

See exchange.py for the terms.
"""

from __future__ import annotations

from typing import NamedTuple, TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false


if TYPE_CHECKING:
    from collections.abc import Iterable


__all__ = [
    "decode",
    "empty_message",
    "encode",
    "is_traced",
    "pack",
    "rows_or",
    "scaled_rows",
    "unmerged_zero",
    "unpack",
    "with_row",
]


_BLOCK = 128
_LARGEST = 448  # of float8_e4m3fn
_BIAS = 127


def _quantize_blocks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn (T, D), and the biased exponents (T, ceil(D / 128)) of the scales, uint8.

    The rule of ``_moe_quantize`` in blocks of 128: the smallest exponent that keeps the largest value
    in range; 255 and NaN for a block with an infinity or a NaN."""
    if rows.dtype != torch.float64:
        code = F.ScalingType.BlockWise1x128.value
        data, scale = torch.ops.aten._moe_quantize(rows, code)
        return data, (scale.view(torch.int32) >> 23).to(torch.uint8)
    T, D = rows.shape
    blocks = F.pad(rows.float(), (0, -D % _BLOCK)).view(T, -(-D // _BLOCK), _BLOCK)
    amax = blocks.abs().amax(dim=2)
    mantissa, exponent = torch.frexp(amax * (1 / _LARGEST))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = torch.where(amax > 0, exponent + _BIAS, 0).clamp(0, 254)
    is_finite = amax.isfinite()
    scaled = torch.ldexp(blocks, (_BIAS - exponent)[:, :, None])
    scaled = torch.where(is_finite[:, :, None], scaled, torch.nan).flatten(1)[:, :D]
    data = scaled.to(torch.float8_e4m3fn)
    return data, torch.where(is_finite, exponent, 255).to(torch.uint8)


def encode(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """(T, D) rows in their sent form: (T, D) bfloat16 or (T, D + D/128) uint8.

    FP8 rows are ``D`` float8_e4m3fn bytes followed by one byte per 128 values with the
    exponent of their scale. They are rounded once, not again along the other axis."""
    if dtype == torch.bfloat16:
        return rows.to(dtype)
    data, exponent = _quantize_blocks(rows)
    return torch.cat([data.view(torch.uint8), exponent], dim=1)


def decode(packed: Tensor, dtype: torch.dtype, dim: int, out: torch.dtype) -> Tensor:
    """Inverse of :func:`encode` up to rounding: (T, dim) rows of dtype ``out``."""
    if dtype == torch.bfloat16:
        return packed.to(out)
    data, scale = scaled_rows(packed, dim)
    return (data.float() * scale.repeat_interleave(_BLOCK, dim=1)[:, :dim]).to(out)


def scaled_rows(packed: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Codes (T, dim) and float32 scales (T, dim/128) of the FP8 rows of :func:`encode`."""
    exponent = packed[:, dim:].int() - _BIAS
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    return packed[:, :dim].view(torch.float8_e4m3fn), scale


# -- messages


_PLAIN = (Tensor, torch.nn.Parameter)
# Aligns every part of a row for its dtype, and rows for vector loads.
_ALIGN = 16


class _Part(NamedTuple):
    """Bytes ``[begin, end)`` of a row, ``width`` values of ``dtype``."""

    begin: int
    end: int
    width: int
    dtype: torch.dtype


def _layout(parts: Iterable[tuple[int, torch.dtype]]) -> tuple[list[_Part], int]:
    """Where values of (width, dtype) are in a row, and the bytes of a row."""
    at, layout = 0, []
    for width, dtype in parts:
        end = at + width * dtype.itemsize
        layout.append(_Part(at, end, width, dtype))
        at = -(-end // _ALIGN) * _ALIGN
    return layout, at


def empty_message(
    rows: int, parts: Iterable[tuple[int, torch.dtype]], device: torch.device
) -> Tensor:
    """(rows, bytes) uint8 for parts of (width, dtype)."""
    _, size = _layout(parts)
    return torch.empty(rows, size, dtype=torch.uint8, device=device)


def pack(
    parts: list[Tensor], fill: list[int] | None = None, index: Tensor | None = None
) -> Tensor:
    """(N, width) tensors side by side as bytes, (N, bytes) uint8; int32 is possible if operators are
    recorded.

    Args:
        fill (list[int], optional): appends a row of these values, one for each part.
        index (Tensor, optional): (M) int64 of the rows to pack, in this order.
    """
    layout, size = _layout((p.shape[1], p.dtype) for p in parts)
    rows = parts[0].shape[0]
    if is_traced(parts[0]) and type(parts[0]) in _PLAIN:
        return _pack_words([p.detach() for p in parts], fill, index)
    if index is not None and fill is None and not is_traced(parts[0]):
        out = parts[0].new_empty((index.shape[0], size), dtype=torch.uint8)
        for part, at in zip(parts, layout, strict=True):
            place = out.narrow(1, at.begin, at.end - at.begin).view(at.dtype)
            torch.index_select(part.detach(), 0, index, out=place)
        return out
    shape = (rows + (fill is not None), size)
    out = torch.empty(shape, dtype=torch.uint8, device=parts[0].device)
    for i, (part, at) in enumerate(zip(parts, layout, strict=True)):
        place = out.narrow(1, at.begin, at.end - at.begin).view(at.dtype)
        if fill is None:
            place.copy_(part)
        else:
            place.narrow(0, 0, rows).copy_(part)
            place.narrow(0, rows, 1).fill_(fill[i])
    return out if index is None else out.index_select(0, index)


def _pack_words(
    parts: list[Tensor], fill: list[int] | None, index: Tensor | None
) -> Tensor:
    """:func:`pack` in functional ops, which Inductor turns into two copies.

    In a graph, a write to columns would copy the message, and bytes are neither vectorized nor
    concatenated in place. In eager mode, selective checkpointing may have kept the message.
    """
    fits = all(p.shape[1] * p.dtype.itemsize % 4 == 0 for p in parts)
    word = torch.int32 if fits else torch.uint8
    columns: list[Tensor] = []
    for i, part in enumerate(parts):
        if fill is not None and index is not None:
            part = rows_or(part, index, fill[i])
        elif fill is not None:
            part = torch.cat([part, part.new_full((1, part.shape[1]), fill[i])])
        elif index is not None:
            part = part.index_select(0, index)
        else:
            # A view may start inside a word.
            part = part.clone(memory_format=torch.contiguous_format)
        words = part.contiguous().view(word)
        columns.append(words)
        gap = -words.shape[1] % (_ALIGN // word.itemsize)
        if gap:
            columns.append(words.new_zeros(words.shape[0], gap))
    return torch.cat(columns, dim=1)


def rows_or(source: Tensor, index: Tensor, value: int) -> Tensor:
    """Rows of ``source`` in a graph; ``value`` where ``index`` is the row after the last."""
    rows = source.shape[0]
    if guard_or_false(rows > 0):
        taken = source.index_select(0, index.clamp_max(rows - 1))
        return torch.where((index < rows).unsqueeze(1), taken, value)
    return with_row(source, value).index_select(0, index)


def with_row(rows: Tensor, value: int = 0) -> Tensor:
    """``rows``, and one more of ``value``."""
    if torch.compiler.is_compiling() and guard_or_false(rows.shape[0] == 0):
        # A graph drops empty parts of cat. Without the dependency, collectives of a rank that has no
        # tokens would run in another order, and those of its backward in the forward.
        row = rows.sum(0, True, dtype=rows.dtype) + value
        return row + unmerged_zero(rows.device).to(rows.dtype)
    return torch.cat([rows, rows.new_full((1, *rows.shape[1:]), value)])


def unmerged_zero(device: torch.device) -> Tensor:
    """(1) int64 0 for a graph that must keep collectives of equal messages.

    A rank has equal messages where chunks have no tokens. A graph merges equal operators, of which
    aten.empty is none, and then the others would wait for a collective of this rank.
    """
    return torch.empty(1, dtype=torch.int64, device=device).clamp(0, 0)


def unpack(message: Tensor, parts: Iterable[tuple[int, torch.dtype]]) -> list[Tensor]:
    """Views of the parts of a message, of (width, dtype) each."""
    # Not views of columns, which Inductor copies, and again for users of their strides.
    return [
        message.view(at.dtype).narrow(1, at.begin // at.dtype.itemsize, at.width)
        for at in _layout(parts)[0]
    ]


def is_traced(x: Tensor) -> bool:
    """Whether operators on ``x`` are seen by a compiler, a dispatch mode or a subclass."""
    return (
        torch.compiler.is_compiling()
        or type(x) not in _PLAIN
        or torch._C._len_torch_dispatch_stack() > 0
    )
