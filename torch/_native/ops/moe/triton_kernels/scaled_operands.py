"""An expert layer in FP8 as one value: recipe, and rows and weights as codes with scales.

Imports no Triton, as experts.py.
"""

import dataclasses
from collections.abc import Container
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from .experts import Experts, row_major
from .scaling_rules import SCALING_RULES


_E4M3 = torch.float8_e4m3fn
# Columns of H that share a scale, with every recipe.
PREACT_BLOCK = 32
PREACT_RECIPE = ScalingType.BlockWise1x32.value
_NAMES = {0: "row", 32: "mx", 128: "fp8"}


def cdiv(a, b: int):
    return (a + b - 1) // b


class Quantized(NamedTuple):
    """float8_e4m3fn codes, and scales as float32 powers of two or as their bytes (uint8)."""

    codes: Tensor
    scale: Tensor

    @classmethod
    def of(cls, data: Tensor, scale: Tensor) -> "Quantized":
        if scale.dtype == torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        return cls(data.contiguous(), scale.contiguous())


class Preact(NamedTuple):
    """H (R, g*F): 16 or 32 bits, or codes as uint8 with their scales.

    Attributes:
        is_8bit: whether values are codes, or become codes later.
    """

    values: Tensor
    scale: Tensor
    is_int8: bool
    is_8bit: bool

    @classmethod
    def of(cls, values: Tensor, scale: Tensor) -> "Preact":
        if values.element_size() > 1:
            return cls(values, values, False, False)
        codes, scale = (x.contiguous().view(torch.uint8) for x in (values, scale))
        return cls(codes, scale, values.dtype == torch.int8, True)


def unswizzled(scale: Tensor, rows: int, columns: int) -> Tensor:
    """(E, rows, columns) scales of (E, padded) ones in the order of SWIZZLE_32_4_4.

    A copy: a weight has one byte of them for 32 of codes.
    """
    tiles = cdiv(rows, 128), cdiv(columns, 4)
    x = scale.view(torch.uint8).view(-1, *tiles, 32, 4, 4).permute(0, 1, 4, 3, 2, 5)
    x = x.reshape(-1, tiles[0] * 128, tiles[1] * 4)[:, :rows, :columns]
    return x.contiguous().view(scale.dtype)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How rows and weights are scaled.

    Attributes:
        rows, weights: codes of ``torch.nn.functional.ScalingType``.
        swizzle: order of the scales of weights that come quantised, a code of
            ``torch.nn.functional.SwizzleType``.
        widen: products are computed in bfloat16, which holds codes times scales of blocks of 32
            exactly; for architectures without a matrix instruction for these blocks.
    """

    rows: int
    weights: int
    swizzle: int = 0
    widen: bool = False

    @property
    def block(self) -> int:
        """Neighbours of a row that share a scale; 0: the whole row."""
        return SCALING_RULES[self.rows].block

    @property
    def has_squares(self) -> bool:
        return SCALING_RULES[self.weights].square

    @property
    def square(self) -> int:
        """Rows of a weight that share a scale."""
        return SCALING_RULES[self.weights].block if self.has_squares else 1

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.uint8 if SCALING_RULES[self.rows].as_byte else torch.float32

    def kernel(self, name: str) -> str:
        """The key of ``name`` in ``SCALED_TABLES``."""
        return f"{'wide' if self.widen else _NAMES[self.block]}_{name}"

    def quantize(self, rows: Tensor) -> Quantized:
        """Rows (N, C), as ``_moe_quantize`` makes them."""
        return Quantized.of(*torch.ops.aten._moe_quantize(row_major(rows), self.rows))

    def room(
        self,
        like: Tensor,
        rows: int | torch.SymInt,
        columns: int,
        dtype: torch.dtype,
        halves: int = 1,
    ) -> Quantized:
        """Outputs for rows of ``halves * columns``: codes as uint8, with scales.

        With scales of whole rows, of which an epilogue sees only a part: values of ``dtype``.
        """
        if not self.block:
            values = like.new_empty(rows, halves * columns, dtype=dtype)
            return Quantized(values, values)
        num_scales = halves * cdiv(columns, self.block)
        return Quantized(
            like.new_empty(rows, halves * columns, dtype=torch.uint8),
            like.new_empty(rows, num_scales, dtype=self.scale_dtype),
        )

    def finished(self, written: Quantized, halves: int = 1) -> Quantized:
        """Quantises what was written to :meth:`room`, each half of a row by itself."""
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
        """(N, C) values of row codes."""
        codes, scale = rows
        if self.block == 32:
            scale = scale.view(torch.float8_e8m0fnu)
        scale = scale.to(torch.float32)
        if self.block:
            scale = scale.repeat_interleave(self.block, 1)[:, : codes.shape[1]]
        return (codes.to(torch.float32) * scale).to(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledExperts(Experts):
    """The operands of ``_moe_mlp_scaled`` in the order of its schema, and how they are scaled.

    ``w_in`` and ``w_out`` are None where they come quantised only. In the backward ``input`` is
    the gradient of the output.

    Attributes:
        input_scaled: codes and scales of the input, or nothing.
        w_in_scaled, w_out_scaled, w_up_scaled: the same along the last dimension, and
            perhaps along the other one, or nothing.
        recipe: how they are scaled.
        preact_dtype: dtype of the H kept for backward; None for the input's.
        hp_wgrad: weight gradients are 16-bit products.
    """

    input_scaled: list[Tensor] = dataclasses.field(default_factory=list)
    w_in_scaled: list[Tensor] = dataclasses.field(default_factory=list)
    w_out_scaled: list[Tensor] = dataclasses.field(default_factory=list)
    w_up_scaled: list[Tensor] = dataclasses.field(default_factory=list)
    recipe: Recipe = dataclasses.field(kw_only=True)
    preact_dtype: torch.dtype | None = dataclasses.field(default=None, kw_only=True)
    hp_wgrad: bool = dataclasses.field(default=False, kw_only=True)

    def on(self, table: Container[str]) -> "ScaledExperts":
        """Widened if ``table`` is of an architecture before 10.0, whose matrix instructions take no scales."""
        if self.recipe.kernel("down") in table:
            return self
        recipe = dataclasses.replace(self.recipe, widen=True)
        return dataclasses.replace(self, recipe=recipe)

    @property
    def lists(self) -> dict[str, list[Tensor]]:
        """The quantised operands, by name."""
        names = ("input_scaled", "w_in_scaled", "w_out_scaled", "w_up_scaled")
        return {name: getattr(self, name) for name in names}

    @property
    def weights(self) -> dict[str, Tensor]:
        """The given weights, or else their codes, by name."""
        lists = {name.removesuffix("_scaled"): s for name, s in self.lists.items()}
        codes = {name: s[0] for name, s in lists.items() if s and name != "input"}
        return {**codes, **super().weights}

    @property
    def num_hidden(self) -> int:
        return self.weights["w_out"].shape[2]

    @property
    def halves(self) -> int:
        """Separately scaled parts of a row of dH: 2 if gate and up are two weights."""
        return 2 if "w_up" in self.weights else 1

    @property
    def product_type(self) -> torch.dtype:
        """Dtype to which H, A and their gradients are rounded; it holds quantised values exactly."""
        is_bfloat16 = self.input.dtype == torch.bfloat16
        return torch.bfloat16 if is_bfloat16 else torch.float32

    @property
    def scales_behind(self) -> bool:
        """Whether a scale of dH's rows covers more than an epilogue sees.

        It does if it covers the whole row, or columns of gate and of up. With ``w_up`` the
        halves are rows of two products, each with its own scales.
        """
        block = self.recipe.block
        if not block:
            return True
        return (
            self.halves_adjacent and self.halves == 1 and self.num_hidden % block != 0
        )

    def _pair(self, scaled: list[Tensor], dim: int) -> tuple[Tensor, Tensor]:
        """Data and its scale without swizzle, (E, rows, columns), quantised along ``dim``."""
        data, scale = scaled
        if self.recipe.swizzle:
            # As _moe_quantize leaves them: the scaled dimension last.
            rows, length = data.shape[3 - dim], data.shape[dim]
            scale = unswizzled(scale, rows, cdiv(length, self.recipe.block))
            scale = scale if dim == 2 else scale.mT
        return data, scale

    def weight(self, name: str) -> Quantized:
        """(E, N, K) quantised along K; None if it is an absent ``w_up``."""
        w, scaled = getattr(self, name), self.lists[f"{name}_scaled"]
        if scaled:
            return Quantized.of(*self._pair(scaled[:2], dim=2))
        if w is None:
            return None  # pyrefly: ignore[bad-return]
        return Quantized.of(*torch.ops.aten._moe_quantize(w, self.recipe.weights))

    def transposed(self, name: str) -> Quantized:
        """(E, K, N): a weight (E, N, K) quantised along N, which is dense; None as above."""
        w, scaled = getattr(self, name), self.lists[f"{name}_scaled"]
        code = self.recipe.weights
        if len(scaled) == 4:
            data, scale = self._pair(scaled[2:], dim=1)
        elif scaled:
            data, scale = scaled  # squares, which serve both
        elif w is None:
            return None  # pyrefly: ignore[bad-return]
        elif self.recipe.has_squares:
            return Quantized.of(*torch.ops.aten._moe_quantize(w.mT, code))
        else:
            data, scale = torch.ops.aten._moe_quantize(w, code, dim=1)
        # The copy is of bytes, as few kernels support FP8.
        data = data.view(torch.uint8).mT.contiguous().view(_E4M3)
        return Quantized.of(data, scale.mT)

    def gate_and_up(self) -> tuple[Quantized, Quantized, int, int]:
        """Gate and up (E, F, D), how many of their rows share a scale, and how many rows
        of the gate share the first scale of up.
        """
        square, w, w_up = self.recipe.square, self.weight("w_in"), self.weight("w_up")
        if w_up is not None or not self.act.gated:
            return w, w_up or w, square, 0
        codes, scale = w
        if self.act.gate_interleaved:
            scales = (scale,) * 2 if self.recipe.has_squares else _alternate(scale)
            gate, up = (Quantized(*pair) for pair in zip(_alternate(codes), scales))
            return gate, up, max(square // 2, 1), 0
        first, shift = divmod(codes.shape[1] // 2, square)
        gate, up = codes.chunk(2, 1)
        return Quantized(gate, scale), Quantized(up, scale[:, first:]), square, shift


def _alternate(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, 0::2], x[:, 1::2]
