"""Quantised expert weights of every format of ``_moe_mlp_scaled``, with their values in float64.

The codes are random, not rounded from other numbers: tests and benchmarks need every code and
different scales. The codes and scales define the value of a weight.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import ScalingType


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_VALUES = torch.tensor(_E2M1 + tuple(-x for x in _E2M1), dtype=torch.float64)


@dataclasses.dataclass(frozen=True)
class LowBitWeight:
    """A weight as the op takes it, and its value.

    Attributes:
        data: (E, N, K), or (E, N, K / 2) with two numbers a byte.
        scale: one scale per block.
        values: (E, N, K) float64.
    """

    data: Tensor
    scale: Tensor
    values: Tensor

    def pair(self) -> list[Tensor]:
        return [self.data, self.scale]


@dataclasses.dataclass(frozen=True)
class LowBitFormat:
    """How a weight is stored.

    Attributes:
        name: usable in a test name.
        data: dtype of the numbers.
        scaling: what one scale covers. Its integer is the op's ``recipe_w``.
        bits: bits per number, its share of the scales included.
    """

    name: str
    data: torch.dtype
    scaling: ScalingType
    bits: float

    @property
    def takes_int8_rows(self) -> bool:
        """Whether rows may be int8, with scales of the same blocks."""
        return self.data is not torch.float8_e4m3fn

    def draw(
        self, E: int, N: int, K: int, generator: torch.Generator | None = None
    ) -> LowBitWeight:
        """A weight whose values have a standard deviation near K ** -0.5."""
        data, numbers = _DRAW[self.data](E, N, K, generator)
        n, k = _BLOCKS[self.scaling]
        shape = (E, -(-N // (n or N)), -(-K // (k or K)))
        if self.scaling is ScalingType.TensorWise:
            shape = (1, 1, 1)
        target = K**-0.5 / (numbers.square().mean().sqrt().item() or 1)
        scale = torch.rand(shape, generator=generator) + 0.5
        scale = scale * target
        if self.scaling is ScalingType.BlockWise1x32 and self.data in _WITH_E8M0:
            byte = scale.log2().round().add(127).to(torch.uint8)
            scale = byte.view(torch.float8_e8m0fnu)
            factors = torch.pow(2.0, byte.double() - 127)
        else:
            factors = scale.double()
        if self.scaling is ScalingType.TensorWise:
            return LowBitWeight(data, scale.flatten(), numbers * factors)
        factors = factors.repeat_interleave(n or N, 1)[:, :N]
        return LowBitWeight(
            data, scale, numbers * factors.repeat_interleave(k or K, 2)[:, :, :K]
        )


def _draw_e4m3(E, N, K, generator):
    data = torch.randn(E, N, K, generator=generator).mul_(8).to(torch.float8_e4m3fn)
    return data, data.double()


def _draw_int8(E, N, K, generator):
    data = torch.randint(-128, 128, (E, N, K), generator=generator, dtype=torch.int8)
    return data, data.double()


def _draw_bytes(E, N, K, generator):
    data = torch.randint(256, (E, N, K // 2), generator=generator, dtype=torch.uint8)
    return data, torch.stack([data & 15, data >> 4], -1).flatten(-2).long()


def _draw_e2m1(E, N, K, generator):
    data, codes = _draw_bytes(E, N, K, generator)
    return data.view(torch.float4_e2m1fn_x2), _E2M1_VALUES[codes]


def _draw_int4(E, N, K, generator):
    data, codes = _draw_bytes(E, N, K, generator)
    return data, (codes - 8).double()


_DRAW: dict[torch.dtype, Callable] = {
    torch.float8_e4m3fn: _draw_e4m3,
    torch.int8: _draw_int8,
    torch.float4_e2m1fn_x2: _draw_e2m1,
    torch.uint8: _draw_int4,
}
_WITH_E8M0 = (torch.float8_e4m3fn, torch.int8, torch.float4_e2m1fn_x2)
# Rows, and neighbours along K, that share a scale. None means all.
_BLOCKS = {
    ScalingType.TensorWise: (None, None),
    ScalingType.RowWise: (1, None),
    ScalingType.BlockWise1x32: (1, 32),
    ScalingType.BlockWise1x128: (1, 128),
    ScalingType.BlockWise128x128: (128, 128),
}

LOW_BIT_FORMATS: tuple[LowBitFormat, ...] = (
    LowBitFormat("fp8_tensorwise", torch.float8_e4m3fn, ScalingType.TensorWise, 8),
    LowBitFormat("fp8_rowwise", torch.float8_e4m3fn, ScalingType.RowWise, 8),
    LowBitFormat("fp8_1x128", torch.float8_e4m3fn, ScalingType.BlockWise1x128, 8.25),
    LowBitFormat("fp8_128x128", torch.float8_e4m3fn, ScalingType.BlockWise128x128, 8),
    LowBitFormat("mxfp8", torch.float8_e4m3fn, ScalingType.BlockWise1x32, 8.25),
    LowBitFormat("int8_rowwise", torch.int8, ScalingType.RowWise, 8),
    LowBitFormat("int8_1x32", torch.int8, ScalingType.BlockWise1x32, 8.25),
    LowBitFormat("int8_1x128", torch.int8, ScalingType.BlockWise1x128, 8.25),
    LowBitFormat("mxfp4", torch.float4_e2m1fn_x2, ScalingType.BlockWise1x32, 4.25),
    LowBitFormat("int4_1x32", torch.uint8, ScalingType.BlockWise1x32, 5),
    LowBitFormat("int4_1x128", torch.uint8, ScalingType.BlockWise1x128, 4.25),
)


def low_bit_format(name: str) -> LowBitFormat:
    return next(f for f in LOW_BIT_FORMATS if f.name == name)
