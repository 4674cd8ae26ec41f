"""Tile configurations of the FP8 kernels, per architecture; see configs.py.

A step of the contraction is one or several blocks of a recipe's scales. It is equally long in every
configuration of a recipe, so that all sum a row in the same order. A column tile of ``up`` and
``act_backward`` is at least one block, as its results are quantised. A program has one tile, so
``programs_per_sm`` stays 0.
"""

from .configs import KernelTable, TileConfig


# fp8_: scales of 1 x 128 and 128 x 128. row_: of whole rows. mx_: of 1 x 32. wide_: of 1 x 32, with
# products in bfloat16.
#
# wgmma, whose sum of a step is added to the accumulator in registers. Three programs of
# 64x128 in 4 warps hide each other's first loads and stores, which take as long as the matmuls
# of a short contraction, and the conversions of "wide". They load half as much again
# (test/python_native/moe_scaled_sass.py).
# Chosen by hand; measured on no GPU.
_SM_90: KernelTable = {
    "fp8_up_gated": (TileConfig(64, 128, 128, 8, 4, tma=True),),
    "fp8_up_plain": (
        TileConfig(64, 128, 128, 4, 3, tma=True, max_rows=64),
        TileConfig(128, 128, 128, 8, 4, tma=True),
    ),
    "fp8_down": (
        TileConfig(64, 128, 128, 4, 3, tma=True, max_rows=64),
        TileConfig(64, 128, 128, 4, 3, tma=True, max_inner=1024),
        TileConfig(128, 128, 128, 8, 4, tma=True),
    ),
    # Two programs fit; with 172 registers only one would.
    "fp8_act_backward": (
        TileConfig(64, 128, 128, 8, 4, epilogue_parts=8, tma=True, max_registers=128),
    ),
    "fp8_input_grad": (
        TileConfig(64, 128, 128, 4, 3, tma=True, max_inner=1024),
        TileConfig(128, 128, 128, 8, 4, tma=True),
    ),
    "fp8_weight_grad": (TileConfig(128, 128, 128, 8, 4),),
    "row_up_gated": (TileConfig(64, 128, 128, 8, 4, tma=True),),
    "row_up_plain": (TileConfig(128, 128, 128, 8, 4, tma=True),),
    "row_down": (
        TileConfig(64, 128, 128, 4, 3, tma=True, max_inner=1024),
        TileConfig(128, 128, 128, 8, 4, tma=True),
    ),
    "row_act_backward": (TileConfig(64, 128, 128, 8, 4, epilogue_parts=4, tma=True),),
    "row_input_grad": (
        TileConfig(64, 128, 128, 4, 3, tma=True, max_inner=1024),
        TileConfig(128, 128, 128, 8, 4, tma=True),
    ),
    "row_weight_grad": (TileConfig(128, 128, 128, 8, 4),),
    # Both operands pass through registers: steps of 128 would spill.
    "wide_up_gated": (TileConfig(64, 64, 64, 4, 3, tma=True),),
    "wide_up_plain": (TileConfig(128, 128, 64, 8, 4, tma=True),),
    "wide_down": (TileConfig(64, 128, 64, 4, 3, tma=True),),
    "wide_act_backward": (TileConfig(64, 128, 64, 8, 4, epilogue_parts=4, tma=True),),
    "wide_input_grad": (TileConfig(64, 128, 64, 4, 3, tma=True),),
    "wide_weight_grad": (TileConfig(128, 128, 64, 8, 4),),
}

# Chosen by hand; measured on no GPU.
_SM_100: KernelTable = {
    "fp8_up_gated": (TileConfig(64, 128, 128, 8, 3, tma=True),),
    "fp8_up_plain": (TileConfig(128, 128, 128, 8, 3, tma=True),),
    "fp8_down": (TileConfig(128, 128, 128, 8, 3, tma=True),),
    "fp8_act_backward": (TileConfig(64, 128, 128, 8, 3, epilogue_parts=4, tma=True),),
    "fp8_input_grad": (TileConfig(128, 128, 128, 8, 3, tma=True),),
    "fp8_weight_grad": (TileConfig(64, 128, 128, 8, 3),),
    "row_up_gated": (TileConfig(64, 128, 128, 8, 3, tma=True),),
    "row_up_plain": (TileConfig(128, 128, 128, 8, 3, tma=True),),
    "row_down": (TileConfig(128, 128, 128, 8, 3, tma=True),),
    "row_act_backward": (TileConfig(64, 128, 128, 8, 3, epilogue_parts=4, tma=True),),
    "row_input_grad": (TileConfig(128, 128, 128, 8, 3, tma=True),),
    "row_weight_grad": (TileConfig(128, 128, 128, 8, 3),),
    "mx_up_gated": (TileConfig(128, 64, 128, 8, 3, tma=True),),
    "mx_up_plain": (TileConfig(128, 128, 128, 8, 3, tma=True),),
    "mx_down": (TileConfig(128, 128, 128, 8, 3, tma=True),),
    "mx_act_backward": (TileConfig(128, 64, 128, 8, 2, epilogue_parts=4, tma=True),),
    "mx_input_grad": (TileConfig(128, 128, 128, 8, 3, tma=True),),
    "mx_weight_grad": (TileConfig(128, 256, 128, 8, 3),),
}

SCALED_TABLES: dict[str, KernelTable] = {"sm_90": _SM_90, "sm_100": _SM_100}
SCALED_KERNELS: tuple[str, ...] = tuple(dict.fromkeys([*_SM_90, *_SM_100]))
