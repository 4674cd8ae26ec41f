"""Tile configurations of the matmul kernels, per architecture.

``TABLES[arch][kernel]`` lists at most six configurations; the first whose
columns fit the problem is used, the others are what a tuner may choose from.
All of them pass the static gate of
test/python_native/test_moe_triton_static_gate.py: no register spills, matrix
instructions of the architecture, shared memory within its limit. None has been
measured on a GPU; benchmarks/moe/gpu_lab.py --tune is what reorders them.

The choice depends on the expert shape and never on T or the routing, so that a
token's result does not change with the tokens beside it.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One way to launch a matmul kernel.

    Attributes:
        block_m: routed rows of a tile; rows of the gradient for ``weight_grad``.
        block_n: columns of a tile; of A (not of H) for ``up``.
        block_k: step of the contraction; routed rows for ``weight_grad``.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        group_m: row tiles that walk the columns together (L2 reuse).
        tma: read weights, and rows that need no gather, through TMA.
        epilogue_parts: 1, 2 or 4; the epilogue takes the tile's columns in so many
            parts, to fit in registers.
        programs_per_sm: programs per multiprocessor that walk the tiles; 0 for one
            program per tile.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    epilogue_parts: int = 1
    tma: bool = False
    programs_per_sm: int = 0


MAX_CONFIGS = 6

# up_gated / up_plain   H = x W_in^T with the activation; gathered rows
# down                  o = s * (A W_out^T)
# act_backward          dA' = dO W_out with dAct, A', dS; gathered rows
# input_grad            dH W_in
# weight_grad           dW of either projection; one operand gathered
KERNELS: tuple[str, ...] = (
    "up_gated",
    "up_plain",
    "down",
    "act_backward",
    "input_grad",
    "weight_grad",
)

KernelTable = Mapping[str, tuple[TileConfig, ...]]


def _ampere() -> KernelTable:
    # cp.async and mma.sync; 163 KiB of shared memory.
    up_gated = (
        TileConfig(128, 64, 64, num_warps=8, num_stages=3, epilogue_parts=2),
        TileConfig(128, 64, 32, num_warps=8, num_stages=4, epilogue_parts=2),
        TileConfig(64, 64, 64, num_warps=4, num_stages=3, epilogue_parts=4),
    )
    plain = (
        TileConfig(128, 128, 64, num_warps=8, num_stages=3, epilogue_parts=2),
        TileConfig(128, 64, 64, num_warps=4, num_stages=3, epilogue_parts=2),
        TileConfig(64, 64, 64, num_warps=4, num_stages=3),
    )
    act_backward = (
        TileConfig(128, 64, 64, num_warps=8, num_stages=3, epilogue_parts=2),
        TileConfig(64, 64, 64, num_warps=4, num_stages=3, epilogue_parts=4),
    )
    weight_grad = (
        TileConfig(128, 128, 64, num_warps=8, num_stages=4),
        TileConfig(128, 64, 64, num_warps=4, num_stages=4),
        TileConfig(64, 64, 64, num_warps=4, num_stages=4),
    )
    return {
        "up_gated": up_gated,
        "up_plain": plain,
        "down": plain,
        "act_backward": act_backward,
        "input_grad": plain,
        "weight_grad": weight_grad,
    }


def _tma(*args: int, epilogue_parts: int = 1, programs_per_sm: int = 0) -> TileConfig:
    m, n, k, warps, stages = args
    return TileConfig(
        m,
        n,
        k,
        num_warps=warps,
        num_stages=stages,
        epilogue_parts=epilogue_parts,
        tma=True,
        programs_per_sm=programs_per_sm,
    )


def _hopper() -> KernelTable:
    # wgmma works on 64 rows per group of 4 warps; 227 KiB of shared memory.
    # Tiles of 4 warps leave room for a second program on the multiprocessor,
    # whose loads and matmuls hide the other's epilogue.
    up_gated = (
        _tma(128, 128, 64, 8, 4, epilogue_parts=4, programs_per_sm=1),
        _tma(128, 128, 64, 8, 3, epilogue_parts=4),
        _tma(128, 64, 64, 8, 4, epilogue_parts=2, programs_per_sm=1),
        _tma(64, 64, 64, 4, 4, epilogue_parts=2),
    )
    plain = (
        _tma(128, 256, 64, 8, 4, epilogue_parts=4, programs_per_sm=1),
        _tma(128, 128, 64, 8, 4, epilogue_parts=2, programs_per_sm=1),
        _tma(128, 128, 64, 4, 3, epilogue_parts=4),
        _tma(128, 64, 64, 4, 4, epilogue_parts=2),
        _tma(64, 64, 64, 4, 4),
    )
    act_backward = (
        _tma(128, 128, 64, 8, 4, epilogue_parts=4, programs_per_sm=1),
        _tma(128, 128, 64, 8, 3, epilogue_parts=4),
        _tma(128, 64, 64, 4, 3, epilogue_parts=4),
        _tma(64, 64, 64, 4, 4, epilogue_parts=2),
    )
    # The rows' slots are loaded one pipeline step ahead of the rows, so that half
    # of the stages, rounded up, hold data.
    weight_grad = (
        _tma(128, 256, 64, 8, 5, programs_per_sm=1),
        _tma(256, 128, 64, 8, 5, programs_per_sm=1),
        _tma(128, 128, 64, 8, 5),
        _tma(128, 128, 64, 4, 5),
        _tma(64, 64, 64, 4, 5),
    )
    return {
        "up_gated": up_gated,
        "up_plain": plain,
        "down": plain,
        "act_backward": act_backward,
        "input_grad": plain,
        "weight_grad": weight_grad,
    }


def _blackwell() -> KernelTable:
    # Accumulators live in tensor memory; the epilogue's registers are the limit.
    table = dict(_hopper())
    table["up_gated"] = (
        _tma(128, 128, 64, 8, 4, epilogue_parts=4, programs_per_sm=1),
        _tma(128, 128, 64, 8, 3, epilogue_parts=4),
        _tma(64, 64, 64, 4, 4, epilogue_parts=2),
    )
    table["up_plain"] = (
        _tma(128, 256, 64, 8, 4, epilogue_parts=4, programs_per_sm=1),
        _tma(128, 128, 64, 8, 4, epilogue_parts=2, programs_per_sm=1),
        _tma(64, 64, 64, 4, 4),
    )
    table["act_backward"] = (
        _tma(128, 128, 64, 8, 4, epilogue_parts=4, programs_per_sm=1),
        _tma(128, 128, 64, 8, 3, epilogue_parts=4),
        _tma(128, 64, 64, 8, 4, epilogue_parts=2),
        _tma(64, 64, 64, 4, 4, epilogue_parts=4),
    )
    return table


def _cdna3() -> KernelTable:
    # 64 KiB of shared memory. Compiled by the gate only: no op is registered for
    # ROCm, which uses the composite.
    gated = (TileConfig(128, 64, 64, num_warps=8, num_stages=2, epilogue_parts=2),)
    plain = (TileConfig(128, 128, 64, num_warps=8, num_stages=2, epilogue_parts=2),)
    return {
        "up_gated": gated,
        "up_plain": plain,
        "down": plain,
        "act_backward": gated,
        "input_grad": plain,
        "weight_grad": plain,
    }


TABLES: dict[str, KernelTable] = {
    "sm_80": _ampere(),
    "sm_90": _hopper(),
    "sm_100": _blackwell(),
    "gfx942": _cdna3(),
}


def table_for_capability(major: int, minor: int) -> KernelTable | None:
    """The table of a CUDA compute capability, or None where there is none.

    Consumer parts (8.6, 8.9, 12.x) have about 99 KiB of shared memory, less
    than the tables need, and are not served.
    """
    return TABLES.get(f"sm_{10 * major + minor}")


def choose_config(table: KernelTable, kernel: str, num_columns: int) -> TileConfig:
    """The first configuration of ``kernel`` that is not wider than the problem.

    Args:
        table: an entry of ``TABLES``.
        kernel: one of ``KERNELS``.
        num_columns: columns of the kernel's output (of A for ``up``).
    """
    configs = table[kernel]
    for config in configs:
        if config.block_n < 2 * num_columns:
            return config
    return configs[-1]
