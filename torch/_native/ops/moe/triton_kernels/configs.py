"""Tile configurations of the matmul kernels, per architecture.

``TABLES[arch][kernel]`` lists at most six configurations; the first one that fits
the problem is used (``fitting_configs``). All of them pass the static gate of
test/python_native/test_moe_triton_static_gate.py: no register spills, matrix
instructions of the architecture, shared memory within its limit.
``benchmarks/moe/gpu_lab.py --tune`` measures and rewrites a table; the comment above
it says on what it was measured.

The choice depends on static sizes, never on the routing. It may depend on the
number of rows (``max_rows``, small tiles for decoding), and a token still has the same
bits whatever tokens are beside it: only forward kernels have such entries, and
all entries of a forward kernel sum a row in steps of one matrix instruction, in the
same order. Backward kernels have none, as the width of a column tile changes the bits of
d(topk_weights).
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
        epilogue_parts: 1, 2, 4 or 8; the epilogue takes the tile's columns in so many
            parts, to fit in registers; twice as many where gate and up alternate.
        programs_per_sm: programs per multiprocessor that walk the tiles; 0 for one
            program per tile, which ``act_backward`` always has.
        max_rows: only for at most so many routed rows per expert on average; 0 for
            any number. Forward kernels only.
        max_columns: only for at most so many columns; 0 for any number.
        max_inner: only for contractions of at most so many terms; 0 for any number.
        max_registers: limit of the registers of a thread, so that more programs fit on a
            multiprocessor; 0 for the assembler's choice. Inductor's wrapper of user-defined
            kernels does not pass it on.
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
    max_rows: int = 0
    max_columns: int = 0
    max_inner: int = 0
    max_registers: int = 0


MAX_CONFIGS = 6

# Options of every launch: no environment variable decides whether a * b + c is rounded once.
OPTIONS: Mapping[str, bool] = {"enable_fp_fusion": True}


def itself(x):
    """The hook of a launcher for a kernel or a size, unless a compiler traces it."""
    return x


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

# Their results have the same bits in every configuration of an architecture.
FORWARD_KERNELS: tuple[str, ...] = ("up_gated", "up_plain", "down")

KernelTable = Mapping[str, tuple[TileConfig, ...]]


# --- table sm_80
# cp.async and mma.sync; 163 KiB of shared memory.
# Chosen by hand; measured on no GPU.
_SM_80: KernelTable = {
    "up_gated": (
        TileConfig(16, 64, 64, 4, 4, max_rows=16),
        TileConfig(128, 64, 64, 8, 3, epilogue_parts=2),
        TileConfig(128, 64, 32, 8, 4, epilogue_parts=2),
        TileConfig(64, 64, 64, 4, 3, epilogue_parts=4),
    ),
    "up_plain": (
        TileConfig(16, 64, 64, 4, 4, max_rows=16),
        TileConfig(128, 128, 64, 8, 3, epilogue_parts=2),
        TileConfig(128, 64, 64, 4, 3, epilogue_parts=2),
        TileConfig(64, 64, 64, 4, 3),
    ),
    "down": (
        TileConfig(16, 64, 64, 4, 4, max_rows=16),
        TileConfig(128, 128, 64, 8, 3, epilogue_parts=2),
        TileConfig(128, 64, 64, 4, 3, epilogue_parts=2),
        TileConfig(64, 64, 64, 4, 3),
    ),
    "act_backward": (
        TileConfig(128, 64, 64, 8, 3, epilogue_parts=4),
        TileConfig(64, 64, 64, 4, 3, epilogue_parts=4),
    ),
    "input_grad": (
        TileConfig(128, 128, 64, 8, 3, epilogue_parts=2),
        TileConfig(128, 64, 64, 4, 3, epilogue_parts=2),
        TileConfig(64, 64, 64, 4, 3),
    ),
    "weight_grad": (
        TileConfig(128, 128, 64, 8, 4),
        TileConfig(128, 64, 64, 4, 4),
        TileConfig(64, 64, 64, 4, 4),
    ),
}
# --- end of table sm_80


# --- table sm_90
# wgmma works on 64 rows per group of 4 warps, hence no smaller tile; 227 KiB of
# shared memory. Tiles of 4 warps leave room for a second program on the
# multiprocessor, whose loads and matmuls hide the other's epilogue. weight_grad loads
# the rows' slots one pipeline step ahead of the rows, so that half of the stages,
# rounded up, hold data.
# Two programs of act_backward with 128x128 tiles in 8 warps fit in the registers (128 of 128), as
# it keeps no next tile and its epilogue takes 16 columns at a time.
# Rejected alternatives, with the microseconds that test/python_native/moe_sass.py models at
# (24576, 1536, 256, 128, 8):
# act_backward, 399: one program that loops over tiles and loads the next tile's metadata
# (475); two programs of 4 warps spill, and with 4 parts they do not fit; H fetched into the L2
# ahead of the epilogue (398); the rows of all experts for a window of
# tokens together, which then stay in the L2, while weights do not (as many bytes).
# input_grad, 548: two programs of 128x128 are bound by the L2 (584); 1 epilogue part (547)
# takes 192 registers, 4 (553) take 159.
# weight_grad, 509 and 277; 518 and 281 if a compiler traces the launchers, as its
# descriptors have no strides that wrap around. Its 23.3 and 11.6 waves of tiles take as long as
# 24 and 12; one launch of both products would take 35. num_ctas = 2 loads by TMA without
# multicast, so each of the two multiprocessors loads what both read.
# All kernels: a loop over tiles flattened for the pipeline waits for every matmul (input_grad
# 647, nested 589). warp_specialize does nothing on sm_90 with 8 warps and fails in
# Triton 3.9's pass with 4. tl.assume that a loop runs only removes code that never runs.
# Chosen by hand; measured on no GPU.
_SM_90: KernelTable = {
    "up_gated": (
        TileConfig(64, 64, 64, 4, 4, epilogue_parts=2, tma=True, max_rows=64),
        TileConfig(128, 128, 64, 8, 4, epilogue_parts=8, tma=True, programs_per_sm=1),
        TileConfig(128, 64, 64, 8, 4, epilogue_parts=2, tma=True, programs_per_sm=1),
        TileConfig(64, 64, 64, 4, 4, epilogue_parts=2, tma=True),
    ),
    "up_plain": (
        TileConfig(64, 64, 64, 4, 4, tma=True, max_rows=64),
        TileConfig(128, 256, 64, 8, 4, epilogue_parts=4, tma=True, programs_per_sm=1),
        TileConfig(128, 128, 64, 8, 4, epilogue_parts=2, tma=True, programs_per_sm=1),
        TileConfig(128, 128, 64, 4, 3, epilogue_parts=4, tma=True),
        TileConfig(128, 64, 64, 4, 4, epilogue_parts=2, tma=True),
        TileConfig(64, 64, 64, 4, 4, tma=True),
    ),
    "down": (
        TileConfig(64, 64, 64, 4, 4, tma=True, max_rows=64),
        TileConfig(
            128,
            128,
            64,
            4,
            3,
            epilogue_parts=2,
            tma=True,
            programs_per_sm=2,
            max_inner=512,
        ),
        TileConfig(128, 256, 64, 8, 4, epilogue_parts=2, tma=True, programs_per_sm=1),
        TileConfig(128, 128, 64, 8, 4, epilogue_parts=2, tma=True, programs_per_sm=1),
        TileConfig(128, 64, 64, 4, 4, epilogue_parts=2, tma=True),
        TileConfig(64, 64, 64, 4, 4, tma=True),
    ),
    "act_backward": (
        TileConfig(128, 128, 64, 8, 3, epilogue_parts=8, tma=True),
        TileConfig(128, 64, 64, 4, 3, epilogue_parts=4, tma=True),
        TileConfig(64, 64, 64, 4, 4, epilogue_parts=2, tma=True),
    ),
    "input_grad": (
        TileConfig(128, 256, 64, 8, 4, epilogue_parts=2, tma=True, programs_per_sm=1),
        TileConfig(128, 128, 64, 8, 4, epilogue_parts=2, tma=True, programs_per_sm=1),
        TileConfig(128, 128, 64, 4, 3, epilogue_parts=4, tma=True),
        TileConfig(128, 64, 64, 4, 4, epilogue_parts=2, tma=True),
        TileConfig(64, 64, 64, 4, 4, tma=True),
    ),
    "weight_grad": (
        TileConfig(128, 256, 64, 8, 5, tma=True, programs_per_sm=1),
        TileConfig(256, 128, 64, 8, 5, tma=True, programs_per_sm=1),
        TileConfig(128, 128, 64, 8, 5, tma=True),
        TileConfig(128, 128, 64, 4, 5, tma=True),
        TileConfig(64, 64, 64, 4, 5, tma=True),
    ),
}
# --- end of table sm_90


# --- table sm_100
# Accumulators live in tensor memory; the epilogue's registers are the limit.
# Chosen by hand; measured on no GPU.
_SM_100: KernelTable = {
    "up_gated": (
        TileConfig(64, 64, 64, 4, 4, epilogue_parts=2, tma=True, max_rows=64),
        TileConfig(128, 128, 64, 8, 4, epilogue_parts=4, tma=True, programs_per_sm=1),
        TileConfig(128, 128, 64, 8, 3, epilogue_parts=4, tma=True),
        TileConfig(64, 64, 64, 4, 4, epilogue_parts=2, tma=True),
    ),
    "up_plain": (
        TileConfig(64, 64, 64, 4, 4, tma=True, max_rows=64),
        TileConfig(128, 256, 64, 8, 4, epilogue_parts=4, tma=True, programs_per_sm=1),
        TileConfig(128, 128, 64, 8, 4, epilogue_parts=2, tma=True, programs_per_sm=1),
        TileConfig(64, 64, 64, 4, 4, tma=True),
    ),
    "down": (
        TileConfig(64, 64, 64, 4, 4, tma=True, max_rows=64),
        TileConfig(128, 256, 64, 8, 4, epilogue_parts=4, tma=True, programs_per_sm=1),
        TileConfig(128, 128, 64, 8, 4, epilogue_parts=2, tma=True, programs_per_sm=1),
        TileConfig(128, 128, 64, 4, 3, epilogue_parts=4, tma=True),
        TileConfig(128, 64, 64, 4, 4, epilogue_parts=2, tma=True),
        TileConfig(64, 64, 64, 4, 4, tma=True),
    ),
    "act_backward": (
        TileConfig(128, 128, 64, 8, 3, epilogue_parts=8, tma=True),
        TileConfig(128, 64, 64, 8, 4, epilogue_parts=2, tma=True),
        TileConfig(64, 64, 64, 4, 4, epilogue_parts=4, tma=True),
    ),
    "input_grad": (
        TileConfig(128, 256, 64, 8, 4, epilogue_parts=4, tma=True, programs_per_sm=1),
        TileConfig(128, 128, 64, 8, 4, epilogue_parts=2, tma=True, programs_per_sm=1),
        TileConfig(128, 128, 64, 4, 3, epilogue_parts=4, tma=True),
        TileConfig(128, 64, 64, 4, 4, epilogue_parts=2, tma=True),
    ),
    "weight_grad": (
        TileConfig(128, 256, 64, 8, 5, tma=True, programs_per_sm=1),
        TileConfig(256, 128, 64, 8, 5, tma=True, programs_per_sm=1),
        TileConfig(128, 128, 64, 8, 5, tma=True),
        TileConfig(128, 128, 64, 4, 5, tma=True),
        TileConfig(64, 64, 64, 4, 5, tma=True),
    ),
}
# --- end of table sm_100


# --- table gfx942
# 64 KiB of shared memory.
# Chosen by hand; measured on no GPU.
_GFX942: KernelTable = {
    "up_gated": (TileConfig(128, 64, 64, 8, 2, epilogue_parts=2),),
    "up_plain": (TileConfig(128, 128, 64, 8, 2, epilogue_parts=2),),
    "down": (TileConfig(128, 128, 64, 8, 2, epilogue_parts=2),),
    "act_backward": (TileConfig(128, 64, 64, 8, 2, epilogue_parts=2),),
    "input_grad": (TileConfig(128, 128, 64, 8, 2, epilogue_parts=2),),
    "weight_grad": (TileConfig(128, 128, 64, 8, 2, epilogue_parts=2),),
}
# --- end of table gfx942

TABLES: dict[str, KernelTable] = {
    "sm_80": _SM_80,
    "sm_90": _SM_90,
    "sm_100": _SM_100,
    "gfx942": _GFX942,
}


def table_for_capability(
    major: int, minor: int, tables: dict[str, KernelTable] = TABLES
) -> KernelTable | None:
    """The table of a CUDA compute capability, or None where there is none.

    10.3 (B300) takes the table of 10.0: the same tensor memory and shared memory.
    Consumer parts (8.6, 8.9, 12.x) have about 99 KiB of shared memory, less
    than the tables need, and are not served.
    """
    if (major, minor) == (10, 3):
        minor = 0
    return tables.get(f"sm_{10 * major + minor}")


def table_for_gcn_arch(name: str) -> KernelTable | None:
    """The table of a ROCm ``gcnArchName``, as ``gfx942:sramecc+``, or None.

    gfx950 takes the table of gfx942 and has more shared memory.
    """
    return _GFX942 if name.split(":")[0] in ("gfx942", "gfx950") else None


def fitting_configs(
    table: KernelTable,
    kernel: str,
    num_columns: int,
    num_inner: int,
    rows_per_expert: float,
) -> tuple[TileConfig, ...]:
    """The configurations of ``kernel`` for a problem, in the table's order; never none.

    Args:
        table: an entry of ``TABLES``.
        kernel: one of ``KERNELS``.
        num_columns: columns of the kernel's output (of A for ``up``).
        num_inner: terms of the contraction; rows of the output for ``weight_grad``.
        rows_per_expert: routed rows over experts, both static.
    """

    def fits(config: TileConfig) -> bool:
        return (
            config.block_n < 2 * num_columns
            and (not config.max_rows or rows_per_expert <= config.max_rows)
            and (not config.max_columns or num_columns <= config.max_columns)
            and (not config.max_inner or num_inner <= config.max_inner)
        )

    chosen = tuple(filter(fits, table[kernel])) or table[kernel][-1:]
    # One tile may have two entries: for few rows, and for short contractions.
    tiles: dict[TileConfig, TileConfig] = {}
    for config in chosen:
        tile = dataclasses.replace(config, max_rows=0, max_columns=0, max_inner=0)
        tiles.setdefault(tile, config)
    return tuple(tiles.values())
