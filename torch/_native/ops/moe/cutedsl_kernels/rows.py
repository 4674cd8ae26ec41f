"""Per-row metadata for matmuls that know segments but no padding.

Letters: T tokens, K experts per token, R routed rows.
"""

import triton
import triton.language as tl

import torch
from torch import Tensor

from ..triton_kernels.configs import OPTIONS


@triton.jit(do_not_specialize=["num_rows", "top_k"])
def route_rows_kernel(
    row_slots,  # (R,) int32
    offs,  # (E,) int32, contiguous
    weights,  # (T*K,) contiguous; not read without HAS_WEIGHTS
    tokens,  # (R,) int32, written
    scores,  # (R,) float32, written
    num_rows, num_experts, top_k,
    HAS_WEIGHTS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token and the router weight of each row, see :func:`route_rows`."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_range = rows < num_rows
    slots = tl.load(row_slots + rows, mask=in_range, other=-1)
    valid = slots >= 0
    if HAS_WEIGHTS:
        score = tl.load(weights + slots, mask=valid, other=0.0).to(tl.float32)
    else:
        score = tl.where(valid, 1.0, 0.0)
    tl.store(scores + rows, score, mask=in_range)

    if tl.max((in_range & ~valid).to(tl.int32), 0) > 0:
        # The expert of a row is the number of offsets that do not exceed it.
        expert, high = tl.zeros_like(rows), tl.zeros_like(rows) + num_experts
        for _ in tl.static_range(STEPS):
            searching = ~valid & (expert < high)
            middle = (expert + high) // 2
            end = tl.load(offs + middle, mask=searching, other=0)
            expert = tl.where(searching & (end <= rows), middle + 1, expert)
            high = tl.where(searching & (end > rows), middle, high)
        first = tl.load(offs + expert - 1, mask=~valid & (expert > 0), other=0)
        in_range_first = ~valid & (first < num_rows)
        first_slot = tl.load(row_slots + first, mask=in_range_first, other=-1)
        slots = tl.where(valid, slots, tl.maximum(first_slot, 0))
    tl.store(tokens + rows, slots // top_k, mask=in_range)


@triton.jit(do_not_specialize=["num_rows"])
def zero_padding_kernel(
    row_slots,  # (R,) int32
    out,  # (R, N) contiguous, written
    num_rows, N,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Zeroes the rows of ``out`` that hold no slot, which are few or at the end."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    slots = tl.load(row_slots + rows, mask=rows < num_rows, other=0)
    padding = slots < 0
    if tl.max(padding.to(tl.int32), 0) > 0:
        for first in tl.range(0, N, BLOCK_N):
            cols = first + tl.arange(0, BLOCK_N)
            ptrs = out + rows[:, None].to(tl.int64) * N + cols[None, :]
            mask = padding[:, None] & (cols[None, :] < N)
            tl.store(ptrs, tl.zeros_like(mask).to(out.dtype.element_ty), mask=mask)


def route_rows(
    row_slots: Tensor, offs: Tensor, top_k: int, topk_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(R,) int32 token and (R,) float32 router weight of each row of ``row_slots`` (R,).

    A padding row has the token of its expert's first row, with weight 0. Matmuls without masks
    add it only to the sums of that expert. If the token is not finite, 0 times it is NaN, but
    then the expert's gradients are NaN anyway.
    """
    tokens = torch.empty_like(row_slots)
    scores = torch.empty_like(row_slots, dtype=torch.float32)
    block = 1024
    route_rows_kernel[(triton.cdiv(row_slots.numel(), block),)](
        row_slots,
        offs,
        row_slots if topk_weights is None else topk_weights.contiguous(),
        tokens,
        scores,
        row_slots.numel(),
        offs.numel(),
        top_k,
        HAS_WEIGHTS=topk_weights is not None,
        STEPS=offs.numel().bit_length(),
        BLOCK=block,
        **OPTIONS,
    )
    return tokens, scores


def zero_padding(row_slots: Tensor, out: Tensor) -> None:
    """Zeroes the rows of ``out`` (R, N) whose slot is -1."""
    num_rows, num_columns = out.shape
    block_r = 16
    zero_padding_kernel[(triton.cdiv(num_rows, block_r),)](
        row_slots, out, num_rows, num_columns, BLOCK_R=block_r, BLOCK_N=256, **OPTIONS
    )
