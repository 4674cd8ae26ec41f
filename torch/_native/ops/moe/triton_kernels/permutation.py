"""Routing metadata: the stable expert-major order of the slots, and tile lists.

Letters: T tokens, K experts per token, E experts, R routed rows, S = T*K slots.
Slot ``s = t*K + k``. Nothing here reads a value on the host: every grid is a
static bound.

The order is a counting sort:

    count    per block of slots, how many ask for each expert   -> (blocks, E)
    scan     prefix over the blocks, then over the experts      -> counts, offs
    scatter  rank within the block + the two prefixes           -> row_slots, slot_rows

If one block holds all slots, as in decoding, one kernel does all three steps.

Ids -1 and E mean "no expert". Any other id outside [0, E) trips the device assert
of ``count_kernel``, which its launch turns on; no kernel ever indexes with one.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

import torch
from torch import Tensor

from .configs import itself, OPTIONS


@triton.jit
def _load_experts(topk_indices, slots, num_slots, num_experts):
    """Expert of each slot as int32; E for "no expert" and past the end."""
    expert = tl.load(topk_indices + slots, mask=slots < num_slots, other=-1)
    tl.device_assert(
        (expert >= -1) & (expert <= num_experts),
        "_moe_permutation: topk_indices must be in [-1, num_experts] = [-1, E]",
    )
    in_range = (expert >= 0) & (expert < num_experts)
    return tl.where(in_range, expert, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["num_slots", "num_rows", "num_blocks"])
def count_kernel(
    topk_indices,  # (S,) int32 or int64
    block_counts,  # (blocks, E) int32, written
    row_slots,  # (R,) int32, written: -1, until the scatter
    num_slots,
    num_rows,
    num_blocks,
    num_experts,
    BLOCK_S: tl.constexpr,
    BINS: tl.constexpr,  # power of two > E: bin E collects "no expert"
):
    """How many slots of this block ask for each expert, and row_slots without slots.

    Grid: (cdiv(max(S, R), BLOCK_S),), at least 1.
    """
    block = tl.program_id(0)
    slots = block * BLOCK_S + tl.arange(0, BLOCK_S)
    tl.store(
        row_slots + slots, tl.full((BLOCK_S,), -1, tl.int32), mask=slots < num_rows
    )
    if block < num_blocks:
        expert = _load_experts(topk_indices, slots, num_slots, num_experts)
        bins = tl.arange(0, BINS)
        tl.store(
            block_counts + block.to(tl.int64) * num_experts + bins,
            tl.histogram(expert, BINS),
            mask=bins < num_experts,
        )


@triton.jit(do_not_specialize=["num_blocks"])
def scan_blocks_kernel(
    block_counts,  # (blocks, E) int32, replaced by its exclusive prefix over blocks
    counts,  # (E,) int32, written
    num_blocks,
    num_experts,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Exclusive prefix over the blocks, per expert. Grid: (cdiv(E, BLOCK_E),)."""
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    running = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCK_B):
        blocks = first + tl.arange(0, BLOCK_B)
        ptrs = block_counts + blocks[:, None].to(tl.int64) * num_experts
        ptrs += experts[None, :]
        mask = (blocks[:, None] < num_blocks) & (experts[None, :] < num_experts)
        n = tl.load(ptrs, mask=mask, other=0)
        inclusive = tl.cumsum(n, 0)
        tl.store(ptrs, running[None, :] + inclusive - n, mask=mask)
        running += tl.sum(n, 0)
    tl.store(counts + experts, running, mask=experts < num_experts)


@triton.jit(do_not_specialize=["num_rows"])
def expert_offsets_kernel(
    counts,  # (E,) int32
    offs,  # (E,) int32, written: end row of each expert, clipped to R
    starts,  # (E,) int64, written: first row of each expert, not clipped
    num_rows,
    num_experts,
    row_alignment,
    BLOCK_E: tl.constexpr,
):
    """Aligned prefix of ``counts`` over the experts. Grid: (1,)."""
    # int64: the aligned sum may exceed 2^31, although R, which clips it, does not.
    running = tl.zeros((), dtype=tl.int64)
    alignment = tl.cast(row_alignment, tl.int64)
    for first in range(0, num_experts, BLOCK_E):
        experts = first + tl.arange(0, BLOCK_E)
        mask = experts < num_experts
        n = tl.load(counts + experts, mask=mask, other=0).to(tl.int64)
        n = tl.cdiv(n, alignment) * alignment
        end = running + tl.cumsum(n, 0)
        tl.store(starts + experts, end - n, mask=mask)
        tl.store(offs + experts, tl.minimum(end, num_rows).to(tl.int32), mask=mask)
        running += tl.sum(n, 0)


@triton.jit
def _run_start(expert_a, start_a, expert_b, start_b):
    # Where the run of the last element began, over an ascending sequence.
    return expert_b, tl.where(expert_a == expert_b, start_a, start_b)


@triton.jit
def _sort_by_expert(expert, BLOCK_S: tl.constexpr):
    """The positions of a block in the order of their experts.

    Args:
        expert: (BLOCK_S,) int32; times BLOCK_S it has to fit in int32.

    Returns:
        Expert and position in that order, and the rank among those of the same expert.
    """
    place = tl.arange(0, BLOCK_S)
    # Sorting (expert, position) pairs packed in one integer is stable by
    # construction; the rank is the distance to the start of the expert's run.
    packed = tl.sort(expert * BLOCK_S + place)
    expert = packed // BLOCK_S
    _, run_start = tl.associative_scan((expert, place), 0, _run_start)
    return expert, packed % BLOCK_S, place - run_start


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def scatter_kernel(
    topk_indices,  # (S,) int32 or int64
    block_prefix,  # (blocks, E) int32: exclusive prefix over blocks
    starts,  # (E,) int64
    row_slots,  # (R,) int32, preset to -1
    slot_rows,  # (S,) int32, written
    num_slots,
    num_rows,
    num_experts,
    BLOCK_S: tl.constexpr,
):
    """Rows of the slots of this block, in slot order within an expert. Grid: (blocks,)."""
    block = tl.program_id(0)
    slots = block * BLOCK_S + tl.arange(0, BLOCK_S)
    expert = _load_experts(topk_indices, slots, num_slots, num_experts)
    expert, position, rank = _sort_by_expert(expert, BLOCK_S)
    slot = block * BLOCK_S + position
    routed = expert < num_experts
    prefix = tl.load(
        block_prefix + block.to(tl.int64) * num_experts + expert, mask=routed, other=0
    )
    row = tl.load(starts + expert, mask=routed, other=0) + (prefix + rank)
    fits = routed & (row < num_rows)
    tl.store(row_slots + row, slot, mask=fits)
    tl.store(
        slot_rows + slot, tl.where(fits, row, -1).to(tl.int32), mask=slot < num_slots
    )


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def permute_block_kernel(
    topk_indices,  # (S,) int32 or int64
    row_slots,  # (R,) int32, written
    slot_rows,  # (S,) int32, written
    offs,  # (E,) int32, written: end row of each expert, clipped to R
    counts,  # (E,) int32, written
    num_slots,
    num_rows,
    num_experts,
    row_alignment,
    BLOCK_S: tl.constexpr,
    BINS: tl.constexpr,  # power of two > E: bin E collects "no expert"
):
    """The whole permutation of at most BLOCK_S slots. Grid: (1,)."""
    place = tl.arange(0, BLOCK_S)
    expert = _load_experts(topk_indices, place, num_slots, num_experts)
    bins = tl.arange(0, BINS)
    is_expert = bins < num_experts
    count = tl.where(is_expert, tl.histogram(expert, BINS), 0)
    alignment = tl.cast(row_alignment, tl.int64)
    aligned = tl.cdiv(count.to(tl.int64), alignment) * alignment
    end = tl.cumsum(aligned, 0)
    tl.store(counts + bins, count, mask=is_expert)
    tl.store(offs + bins, tl.minimum(end, num_rows).to(tl.int32), mask=is_expert)

    none = tl.full((BLOCK_S,), -1, tl.int32)
    for first in range(0, num_rows, BLOCK_S):
        tl.store(row_slots + first + place, none, mask=first + place < num_rows)
    expert, slot, rank = _sort_by_expert(expert, BLOCK_S)
    # Rows past R are not used, so clipped starts suffice.
    start = tl.gather(tl.minimum(end - aligned, num_rows).to(tl.int32), expert, 0)
    row = start.to(tl.int64) + rank
    fits = (expert < num_experts) & (row < num_rows)
    # Other threads have marked these rows as padding.
    tl.debug_barrier()
    tl.store(row_slots + row, slot, mask=fits)
    tl.store(
        slot_rows + slot, tl.where(fits, row, -1).to(tl.int32), mask=slot < num_slots
    )


@triton.jit
def schedule_tiles_kernel(
    offs,  # (E,) int32
    tiles,  # (1 + bound, 4) int32, written; see below
    num_experts,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """The row tiles of all experts, in expert order. Grid: (cdiv(bound, BLOCK_T),).

    ``tiles[0, 0]`` is the number of tiles. ``tiles[1 + i]`` is (expert, first
    row, end row of the expert, -) of tile i; a tile never spans two experts.
    The bound that makes the grid static is ``R // BLOCK_M + min(E, R)``.
    """
    tile = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.zeros((BLOCK_T,), dtype=tl.int32)
    first_tile = tl.zeros((BLOCK_T,), dtype=tl.int32)
    total = tl.zeros((), dtype=tl.int32)
    for first in range(0, num_experts, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        end = tl.load(offs + e, mask=e < num_experts, other=0)
        start = tl.load(offs + e - 1, mask=(e > 0) & (e < num_experts), other=0)
        n = tl.where(e < num_experts, tl.cdiv(end - start, BLOCK_M), 0)
        tiles_end = total + tl.cumsum(n, 0)
        # Experts whose tiles all come before this one.
        before = (tiles_end[None, :] <= tile[:, None]) & (e[None, :] < num_experts)
        expert += tl.sum(before.to(tl.int32), 1)
        first_tile = tl.maximum(
            first_tile, tl.max(tl.where(before, tiles_end[None, :], 0), 1)
        )
        total += tl.sum(n, 0)
    used = tile < total
    start = tl.load(offs + expert - 1, mask=used & (expert > 0), other=0)
    end = tl.load(offs + expert, mask=used, other=0)
    entry = tiles + 4 + tile * 4
    tl.store(entry, expert, mask=used)
    tl.store(entry + 1, start + (tile - first_tile) * BLOCK_M, mask=used)
    tl.store(entry + 2, end, mask=used)
    if tl.program_id(0) == 0:
        tl.store(tiles, total)


@triton.jit
def _tile_entry(tiles, num_m, index, num_n, GROUP_M: tl.constexpr):
    group = index // (GROUP_M * num_n)
    first_m = group * GROUP_M
    group_m = tl.minimum(num_m - first_m, GROUP_M)
    within = index % (GROUP_M * num_n)
    return tiles + 4 + (first_m + within % group_m) * 4, within // group_m


@triton.jit
def tile_of(tiles, index, num_n, GROUP_M: tl.constexpr):
    """Tile ``index`` of the (row tiles x column tiles) grid, in L2-friendly order.

    ``GROUP_M`` neighbouring row tiles walk the columns together: they mostly
    share the expert's weights, and each reuses its own rows.

    Returns:
        expert, first row, end row of the expert, column tile (all scalars).
    """
    entry, tile_n = _tile_entry(tiles, tl.load(tiles), index, num_n, GROUP_M)
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tile_n


@triton.jit
def tile_ahead(tiles, num_m, index, num_n, GROUP_M: tl.constexpr):
    """:func:`tile_of` of a list known to have ``num_m`` row tiles.

    Past the last tile it returns one without rows, so that a program can load its
    next tile's entry before it is done with this tile.
    """
    inside = index < num_m * num_n
    index = tl.where(inside, index, 0)
    entry, tile_n = _tile_entry(tiles, tl.maximum(num_m, 1), index, num_n, GROUP_M)
    expert = tl.load(entry, mask=inside, other=0)
    first_row = tl.load(entry + 1, mask=inside, other=0)
    row_end = tl.load(entry + 2, mask=inside, other=0)
    return expert, first_row, row_end, tile_n


# Slots, rows and experts that one program permutes alone.
_BLOCK_SLOTS = 1024
_BLOCK_ROWS = 8192
_BLOCK_EXPERTS = 1023
# Slots of a program if there are more. A sort of 1024 compiles for twice as long.
_SLOTS_PER_PROGRAM = 512


def minimum(a: int | torch.SymInt, b: int) -> int:
    """The minimum, without a guard on a size that a compiler does not know."""
    smaller: Any = torch.sym_min(a, b)
    return smaller


def _is_at_most(size: int, limit: int) -> int:
    """1 if it is, else 0."""
    return minimum(torch.sym_max(limit + 1 - size, 0), 1)


def _permute_blocks(
    topk_indices: Tensor,
    row_slots: Tensor,
    slot_rows: Tensor,
    offs: Tensor,
    counts: Tensor,
    row_alignment: int,
    kernel: Callable[[Any], Any],
    on: int,
) -> None:
    """Writes what :func:`moe_permutation` returns, by blocks of slots; nothing if ``on`` is 0."""
    num_slots, num_rows = slot_rows.numel(), row_slots.shape[0]
    num_experts = offs.shape[0]
    block_s, block_e = _SLOTS_PER_PROGRAM, 16
    # sym_max: no guard either.
    num_blocks = torch.sym_max(triton.cdiv(num_slots, block_s), 1)
    starts = torch.empty_like(offs, dtype=torch.int64)
    block_counts = offs.new_empty(num_blocks, num_experts)
    grid = torch.sym_max(num_blocks, triton.cdiv(num_rows, block_s))
    kernel(count_kernel)[(grid * on,)](
        topk_indices,
        block_counts,
        row_slots,
        num_slots,
        num_rows,
        num_blocks,
        num_experts,
        BLOCK_S=block_s,
        BINS=triton.next_power_of_2(num_experts + 1),
        # Only the device assert on the ids.
        debug=True,
        sanitize_overflow=False,
        **OPTIONS,
    )
    kernel(scan_blocks_kernel)[(triton.cdiv(num_experts, block_e) * on,)](
        block_counts,
        counts,
        num_blocks,
        num_experts,
        BLOCK_B=256,
        BLOCK_E=block_e,
        **OPTIONS,
    )
    kernel(expert_offsets_kernel)[(on,)](
        counts,
        offs,
        starts,
        num_rows,
        num_experts,
        row_alignment,
        BLOCK_E=min(1024, triton.next_power_of_2(num_experts)),
        **OPTIONS,
    )
    kernel(scatter_kernel)[(num_blocks * on,)](
        topk_indices,
        block_counts,
        starts,
        row_slots,
        slot_rows,
        num_slots,
        num_rows,
        num_experts,
        BLOCK_S=block_s,
        **OPTIONS,
    )


def moe_permutation(
    topk_indices: Tensor,
    num_experts: int,
    *,
    num_rows: int | None = None,
    row_alignment: int = 1,
    kernel: Callable[[Any], Any] = itself,
    bound: Callable[[int], float] = itself,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``aten::_moe_permutation``: row_slots, slot_rows, offs, counts (all int32).

    Args:
        topk_indices, num_experts, num_rows, row_alignment: of the op, checked.
        kernel: maps a kernel to what is launched instead. This and ``bound`` are for a compiler
            that traces the launch (torch/_inductor/kernel/moe_routing.py).
        bound: upper bound of a size, math.inf if there is none.
    """
    num_tokens, top_k = topk_indices.shape
    num_slots = num_tokens * top_k
    if num_rows is None:
        num_rows = num_slots + minimum(num_experts, num_slots) * (row_alignment - 1)
    topk_indices = topk_indices.contiguous()

    def int32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=topk_indices.device)

    row_slots = int32(num_rows)
    slot_rows = int32(num_tokens, top_k)
    offs = int32(num_experts)
    counts = int32(num_experts)
    # A compiler that does not know the size launches both ways, one with an empty grid.
    one = minimum(
        _is_at_most(num_slots, _BLOCK_SLOTS), _is_at_most(num_rows, _BLOCK_ROWS)
    )
    if num_experts > _BLOCK_EXPERTS:
        one = 0
    if bound(one):
        kernel(permute_block_kernel)[(one,)](
            topk_indices,
            row_slots,
            slot_rows,
            offs,
            counts,
            num_slots,
            num_rows,
            num_experts,
            row_alignment,
            # One slot per thread at least.
            BLOCK_S=max(
                128, triton.next_power_of_2(int(min(bound(num_slots), _BLOCK_SLOTS)))
            ),
            BINS=max(128, triton.next_power_of_2(num_experts + 1)),
            debug=True,
            sanitize_overflow=False,
            **OPTIONS,
        )
    if bound(1 - one):
        _permute_blocks(
            topk_indices,
            row_slots,
            slot_rows,
            offs,
            counts,
            row_alignment,
            kernel,
            1 - one,
        )
    return row_slots, slot_rows, offs, counts
