"""Operands of the FP8 kernels: recipes, and rows and weights as codes with scales."""

import dataclasses
from typing import NamedTuple

import triton

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from .activations import Activation
from .launch import _row_major


_E4M3 = torch.float8_e4m3fn
# Columns of H that share a scale, with every recipe.
PREACT_BLOCK = 32
# Neighbours along the dimension that a product sums that share a scale; 0: all of them.
_BLOCKS = {
    ScalingType.RowWise.value: 0,
    ScalingType.BlockWise1x32.value: 32,
    ScalingType.BlockWise1x128.value: 128,
}
_NAMES = {0: "row", 32: "mx", 128: "fp8"}
_SQUARE = 128


class Quantized(NamedTuple):
    """float8_e4m3fn codes, and scales as float32 powers of two or as their bytes (uint8)."""

    codes: Tensor
    scale: Tensor

    @classmethod
    def of(cls, data: Tensor, scale: Tensor) -> "Quantized":
        if scale.dtype == torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        return cls(data.contiguous(), scale.contiguous())


def unswizzled(scale: Tensor, rows: int, columns: int) -> Tensor:
    """(E, rows, columns) scales of (E, padded) ones in the order of SWIZZLE_32_4_4.

    A copy: a weight has one byte of them for 32 of codes.
    """
    tiles = triton.cdiv(rows, 128), triton.cdiv(columns, 4)
    x = scale.view(torch.uint8).view(-1, *tiles, 32, 4, 4).permute(0, 1, 4, 3, 2, 5)
    x = x.reshape(-1, tiles[0] * 128, tiles[1] * 4)[:, :rows, :columns]
    return x.contiguous().view(scale.dtype)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How rows and weights are scaled.

    Attributes:
        rows, weights: codes of ``torch.nn.functional.ScalingType``.
        widen: products are computed in bfloat16, where codes of blocks of 32 are exact; for
            architectures without a matrix instruction for these blocks.
        swizzled: scales of weights that come quantised are in SWIZZLE_32_4_4.
    """

    rows: int
    weights: int
    widen: bool = False
    swizzled: bool = False

    @property
    def block(self) -> int:
        """Neighbours of a row that share a scale; 0: the whole row."""
        return _BLOCKS[self.rows]

    @property
    def has_squares(self) -> bool:
        return self.weights == ScalingType.BlockWise128x128.value

    @property
    def square(self) -> int:
        """Rows of a weight that share a scale."""
        return _SQUARE if self.has_squares else 1

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.uint8 if self.block == 32 else torch.float32

    def kernel(self, name: str) -> str:
        """Its entry of ``SCALED_TABLES``."""
        return f"{'wide' if self.widen else _NAMES[self.block]}_{name}"

    def num_scales(self, columns: int | torch.SymInt) -> int | torch.SymInt:
        """Of a row."""
        return triton.cdiv(columns, self.block) if self.block else 1

    def scales_behind(self, act: Activation, has_up: bool, num_hidden: int) -> bool:
        """Whether an epilogue sees only part of what a scale of dH's rows covers.

        So it does where that is the whole row, or columns of gate and of up. With ``w_up`` the
        halves are rows of two products, each with scales of its own.
        """
        if not self.block:
            return True
        halves = act.gated and not act.gate_interleaved and not has_up
        return halves and num_hidden % self.block != 0

    # --- rows

    def quantize(self, rows: Tensor) -> Quantized:
        """Rows (N, C), as ``_moe_quantize`` makes them."""
        return Quantized.of(*torch.ops.aten._moe_quantize(_row_major(rows), self.rows))

    def room(
        self,
        like: Tensor,
        rows: int | torch.SymInt,
        columns: int,
        dtype: torch.dtype,
        halves: int = 1,
    ) -> Quantized:
        """What a kernel writes rows of ``halves * columns`` to: codes as uint8, with scales.

        Of scales of whole rows an epilogue sees a part only; then numbers of ``dtype``.
        """
        if not self.block:
            values = like.new_empty(rows, halves * columns, dtype=dtype)
            return Quantized(values, values)
        num_scales = halves * self.num_scales(columns)
        return Quantized(
            like.new_empty(rows, halves * columns, dtype=torch.uint8),
            like.new_empty(rows, num_scales, dtype=self.scale_dtype),
        )

    def finished(self, written: Quantized, halves: int = 1) -> Quantized:
        """What was written to :meth:`room`, quantised; each half of a row for itself."""
        codes, scale = written
        if codes.dtype == torch.uint8:
            return written
        num_rows, width = codes.shape
        if halves > 1:
            codes = codes.view(num_rows * halves, width // halves)
        codes, scale = self.quantize(codes)
        return Quantized(
            codes.view(torch.uint8).view(num_rows, width),
            scale.view(num_rows, scale.shape[1] * halves),
        )

    def values(self, rows: Quantized, dtype: torch.dtype) -> Tensor:
        """(N, C) numbers of row codes."""
        codes, scale = rows
        if self.block == 32:
            scale = scale.view(torch.float8_e8m0fnu)
        scale = scale.to(torch.float32)
        if self.block:
            scale = scale.repeat_interleave(self.block, 1)[:, : codes.shape[1]]
        return (codes.to(torch.float32) * scale).to(dtype)

    # --- weights

    def _given(self, data: Tensor, scale: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """A pair whose scale is of plain (E, rows, columns), quantised along ``dim``."""
        if self.swizzled:
            # As _moe_quantize leaves them: the scaled dimension last.
            rows, length = data.shape[3 - dim], data.shape[dim]
            scale = unswizzled(scale, rows, triton.cdiv(length, self.block))
            scale = scale if dim == 2 else scale.mT
        return data, scale

    def weight(self, w: Tensor | None, scaled: list[Tensor]) -> Quantized:
        """``w`` (E, N, K) along K; None without ``w_up``, the one that may be absent."""
        if scaled:
            return Quantized.of(*self._given(*scaled[:2], dim=2))
        if w is None:
            return None  # pyrefly: ignore[bad-return]
        return Quantized.of(*torch.ops.aten._moe_quantize(w, self.weights))

    def transposed(self, w: Tensor | None, scaled: list[Tensor]) -> Quantized:
        """(E, K, N): ``w`` (E, N, K) along N, the dense dimension then; None as above."""
        if len(scaled) == 4:
            data, scale = self._given(*scaled[2:], dim=1)
        elif scaled:
            data, scale = scaled  # squares, which serve both
        elif w is None:
            return None  # pyrefly: ignore[bad-return]
        elif self.has_squares:
            return Quantized.of(*torch.ops.aten._moe_quantize(w.mT, self.weights))
        else:
            data, scale = torch.ops.aten._moe_quantize(w, self.weights, dim=1)
        # Contiguous copies of bytes: FP8 is a dtype that few kernels know.
        data = data.view(torch.uint8).mT.contiguous().view(_E4M3)
        return Quantized.of(data, scale.mT)

    def gate_and_up(
        self, w: Quantized, w_up: Quantized | None, act: Activation
    ) -> tuple[Quantized, Quantized, int, int]:
        """(E, F, D) of gate and up, how many of their rows share a scale, and how many rows
        of the gate share up's first one.
        """
        square = self.square
        if w_up is not None or not act.gated:
            return w, w_up or w, square, 0
        codes, scale = w
        if act.gate_interleaved:
            scales = (scale,) * 2 if self.has_squares else _alternate(scale)
            gate, up = (Quantized(*pair) for pair in zip(_alternate(codes), scales))
            return gate, up, max(square // 2, 1), 0
        first, shift = divmod(codes.shape[1] // 2, square)
        gate, up = codes.chunk(2, 1)
        return Quantized(gate, scale), Quantized(up, scale[:, first:]), square, shift


def _alternate(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, 0::2], x[:, 1::2]


class Preact(NamedTuple):
    """H (R, g*F): 16 or 32 bits, or codes as uint8 with their scales."""

    values: Tensor
    scale: Tensor
    is_int8: bool

    @classmethod
    def of(cls, values: Tensor, scale: Tensor) -> "Preact":
        if values.element_size() > 1:
            return cls(values, values, False)
        codes, scale = (x.contiguous().view(torch.uint8) for x in (values, scale))
        return cls(codes, scale, values.dtype == torch.int8)
