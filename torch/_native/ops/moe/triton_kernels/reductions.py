"""Memory-bound kernels: combine, router-weight gradient, bias gradients, zero tail.

Letters: T tokens, D model dim, F expert hidden dim, E experts, K experts per
token, R routed rows. Every sum has one fixed order and no atomic.
"""

import triton
import triton.language as tl

from .forward import routed_rows
from .permutation import tile_of


@triton.jit(do_not_specialize=["num_tokens"])
def combine_kernel(
    rows,  # (R, D) contiguous
    slot_rows,  # (T, K) int32 contiguous
    out,  # (T, D) contiguous, written
    num_tokens, D,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k in slot order of rows[slot_rows[t, k]], in float32.

    Computes y and dX. A slot without a row adds nothing.
    Grid: (cdiv(T, BLOCK_T), cdiv(D, BLOCK_D)).
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_range = t < num_tokens
    acc = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        slot = t.to(tl.int64) * TOP_K + k
        row = tl.load(slot_rows + slot, mask=in_range, other=-1)
        ptrs = rows + row[:, None].to(tl.int64) * D + cols[None, :]
        mask = (row[:, None] >= 0) & (cols[None, :] < D)
        acc += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    ptrs = out + t[:, None].to(tl.int64) * D + cols[None, :]
    mask = in_range[:, None] & (cols[None, :] < D)
    tl.store(ptrs, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_slots", "num_rows", "num_partials"])
def scale_grad_kernel(
    partials,  # (P, R) float32
    slot_rows,  # (T*K,) int32
    out,  # (T*K,) written: d(topk_weights)
    num_slots, num_rows, num_partials,
    HAS_SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums the dS partials of each slot's row in order; 0 without a row.

    Without slots, row r is slot r and ``slot_rows`` holds the one offset past
    the last routed row (``offs[-1:]``). Grid: (cdiv(T*K, BLOCK),).
    """
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_range = slots < num_slots
    if HAS_SLOTS:
        row = tl.load(slot_rows + slots, mask=in_range, other=-1)
    else:
        row = tl.where(slots < tl.load(slot_rows), slots, -1)
    valid = in_range & (row >= 0)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for p in range(num_partials):
        ptrs = partials + tl.cast(p, tl.int64) * num_rows + row
        acc += tl.load(ptrs, mask=valid, other=0.0)
    tl.store(out + slots, acc.to(out.dtype.element_ty), mask=in_range)


@triton.jit
def bias_dot_kernel(
    grad_out,  # (T, D), contiguous last dimension
    b_out,  # (E, D) by strides
    row_slots,  # (R,) int32
    tiles,  # tile list
    partial,  # (R,) float32, written: <dO[token(r)], b_out[e]>
    D, top_k, stride_gt, stride_be, stride_bd,
    HAS_SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The term of the output bias in dS. Grid: (programs,)."""
    for index in tl.range(tl.program_id(0), tl.load(tiles), tl.num_programs(0)):
        expert, first_row, row_end, _ = tile_of(tiles, index, 1, 1)
        rows, slots, valid = routed_rows(
            row_slots, first_row, row_end, HAS_SLOTS, BLOCK_M
        )
        tokens = (slots // top_k).to(tl.int64)
        acc = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for first in range(0, D, BLOCK_D):
            cols = first + tl.arange(0, BLOCK_D)
            in_range = cols < D
            g = tl.load(
                grad_out + tokens[:, None] * stride_gt + cols[None, :],
                mask=valid[:, None] & in_range[None, :],
                other=0.0,
            )
            b_ptrs = b_out + expert.to(tl.int64) * stride_be
            b_ptrs += cols.to(tl.int64) * stride_bd
            b = tl.load(b_ptrs, mask=in_range, other=0.0)
            acc += tl.sum(g.to(tl.float32) * b[None, :].to(tl.float32), 1)
        tl.store(partial + rows, acc, mask=rows < row_end)


@triton.jit
def bias_grad_kernel(
    source,  # (R, N) contiguous rows, or (T, N) when GATHER
    scale,  # (T*K,) contiguous router weights
    row_slots,  # (R,) int32
    offs,  # (E,) int32
    out,  # (E, N) by strides, written
    N, top_k, stride_source, stride_oe, stride_on,
    GATHER: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_SCALE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[e] = sum over the rows of expert e of scale * source; zeros if none.

    db_in: source = dH. db_out: source = dO gathered, with the router weights.
    Grid: (E, cdiv(N, BLOCK_N)).
    """
    expert = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(offs + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs + expert)
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first in range(start, end, BLOCK_R):
        rows, slots, valid = routed_rows(row_slots, first, end, HAS_SLOTS, BLOCK_R)
        if GATHER:
            row_of = (slots // top_k).to(tl.int64)
        else:
            row_of = rows.to(tl.int64)
        ptrs = source + row_of[:, None] * stride_source + cols[None, :]
        mask = valid[:, None] & (cols[None, :] < N)
        tile = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        if HAS_SCALE:
            s = tl.load(scale + slots, mask=valid, other=0.0).to(tl.float32)
            tile *= s[:, None]
        acc += tl.sum(tile, 0)
    ptrs = out + expert.to(tl.int64) * stride_oe + cols.to(tl.int64) * stride_on
    tl.store(ptrs, acc.to(out.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=["num_rows"])
def zero_tail_kernel(
    out,  # (R, N) contiguous; rows [offs[-1], R) are written
    last_offset,  # (1,) int32: offs[-1:]
    num_rows, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Zeroes the rows that belong to no expert; usually there are none.

    Grid: (programs, cdiv(N, BLOCK_N)).
    """
    first = tl.load(last_offset)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first += tl.program_id(0) * BLOCK_M
    zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype=out.dtype.element_ty)
    for row in tl.range(first, num_rows, tl.num_programs(0) * BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        ptrs = out + rows[:, None].to(tl.int64) * N + cols[None, :]
        mask = (rows[:, None] < num_rows) & (cols[None, :] < N)
        tl.store(ptrs, zeros, mask=mask)
