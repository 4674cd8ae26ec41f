"""Forward kernels in FP8: gathered up-projection with the activation and its quantisation,
and the grouped matmul that serves the down-projection and the input gradient.

Letters, tile list, row tiles and weight tiles are those of forward.py. Codes are float8e4nv (uint8
when written). K, the dimension that a product sums, is dense in both operands, as matrix
instructions of FP8 need it. ``BLOCK`` is how many neighbours along K share a scale:

    32   scales are bytes, applied by the matrix instruction. WIDEN is for GPUs without one:
         codes times scales are exact in bfloat16, and these are multiplied
    128  scales are float32; a step of the loop is one block, whose product is scaled and
         added to the sum in float32
    0    all share one: the sum is scaled

``SQUARE`` is how many columns of a product share a weight's scale: 1, or with BLOCK 128 also
128, or 64 if gate and up interleave. ``SHIFT`` is how many columns of the first square precede
the first column.

A program has one tile. A loop over tiles would keep values in registers, also during the
matmuls, that do not change between tiles: a thread's places in all layouts of an epilogue.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from .activations import apart_from_limit, glu_forward, unary_forward
from .forward import (
    load_rows,
    load_weight,
    routed_rows,
    row_tile,
)
from .permutation import tile_of
from .scaling import as_scale, power_of_two, quantize_rows


@triton.jit
def scales_along(length, BLOCK: tl.constexpr):
    """Number of scales of ``length`` neighbours."""
    return tl.cdiv(length, BLOCK) if BLOCK else 1


@triton.jit
def load_row_scale(
    ptrs, k, num_blocks, BLOCK: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scales of a row tile from ``k``: (BLOCK_M, BLOCK_K // 32) for BLOCK 32, None for 0, else (BLOCK_M,).

    ``ptrs`` (BLOCK_M,) point to the rows' first scales.
    """
    if BLOCK == 32:
        blocks = k // 32 + tl.arange(0, BLOCK_K // 32)
        if EVEN_K:
            scale = tl.load(ptrs[:, None] + blocks[None, :])
        else:
            mask = blocks[None, :] < num_blocks
            scale = tl.load(ptrs[:, None] + blocks[None, :], mask=mask, other=127)
    elif BLOCK:
        scale = tl.load(ptrs + k // BLOCK_K)
    else:
        scale = None
    return scale


@triton.jit
def load_weight_scale(
    scale,  # (E, rows, blocks) by strides
    expert, first_n, k, n_end, num_blocks, stride_e, stride_n, stride_k,
    BLOCK: tl.constexpr, SQUARE: tl.constexpr, SHIFT: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scales of a weight tile: (BLOCK_N, BLOCK_K // 32) for BLOCK 32, None for 0, else one or (BLOCK_N,)."""
    corner = scale + expert.to(tl.int64) * stride_e
    n = first_n + tl.arange(0, BLOCK_N)
    if BLOCK == 32:
        blocks = k // 32 + tl.arange(0, BLOCK_K // 32)
        ptrs = corner + n[:, None] * stride_n + blocks[None, :] * stride_k
        if EVEN_N and EVEN_K:
            value = tl.load(ptrs)
        else:
            mask = (n[:, None] < n_end) & (blocks[None, :] < num_blocks)
            value = tl.load(ptrs, mask=mask, other=127)
    elif BLOCK == 0:
        value = None
    elif SQUARE % BLOCK_N == 0 and SHIFT == 0:
        corner += k // BLOCK_K * stride_k
        value = tl.load(corner + first_n // SQUARE * stride_n)
    else:
        # Two squares are two loads. A load by column would give a thread a scale and an
        # address for each of its columns of the product.
        tl.static_assert(BLOCK_N % SQUARE == 0 and SHIFT + BLOCK_N <= 2 * SQUARE)
        corner += k // BLOCK_K * stride_k + first_n // SQUARE * stride_n
        OWN: tl.constexpr = SQUARE - SHIFT
        left = tl.load(corner)
        right = tl.load(corner + stride_n, mask=first_n + OWN < n_end, other=0.0)
        value = tl.where(tl.arange(0, BLOCK_N) < OWN, left, right)
    return value


@triton.jit
def widened(codes, byte, M: tl.constexpr, N: tl.constexpr):
    """Exact bfloat16 values of codes (M, N) with scale bytes (M, N // 32)."""
    blocks = tl.reshape(codes.to(tl.bfloat16), (M, N // 32, 32))
    scale = power_of_two(byte.to(tl.int32)).to(tl.bfloat16)
    return tl.reshape(blocks * scale[:, :, None], (M, N))


@triton.jit
def scaled_dot(
    acc, a, a_scale, w, w_scale,
    BLOCK: tl.constexpr, WIDEN: tl.constexpr, SQUARE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``acc`` plus one step of the sum over K, with the scales loaded above unless BLOCK is 0."""
    if BLOCK == 0 and cuda_capability_geq(10):
        acc = tl.dot(a, w, acc)
    elif BLOCK == 0:
        # Tensor cores of compute capability 9.0 keep 14 bits of a sum, so only a step is summed there.
        acc += tl.dot(a, w)
    elif WIDEN:
        a = widened(a, a_scale, BLOCK_M, BLOCK_K)
        w = tl.trans(widened(tl.trans(w), w_scale, BLOCK_N, BLOCK_K))
        acc = tl.dot(a, w, acc)
    elif BLOCK == 32:
        acc = tl.dot_scaled(a, a_scale, "e4m3", w, w_scale, "e4m3", acc)
    elif SQUARE % BLOCK_N == 0:
        acc += tl.dot(a, w) * (a_scale * w_scale)[:, None]
    else:
        acc += tl.dot(a, w) * w_scale[None, :] * a_scale[:, None]
    return acc


@triton.jit
def add_product(
    acc, a, a_scale, w, w_scale, expert, first_n, k, N, K,
    stride_we, stride_wn, stride_se, stride_sn, stride_sk,
    BLOCK: tl.constexpr, WIDEN: tl.constexpr, SQUARE: tl.constexpr, SHIFT: tl.constexpr,
    USE_TMA: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``acc`` plus one step of the sum over K: ``a`` (BLOCK_M, BLOCK_K) times a tile of w[e]^T."""
    w_tile = load_weight(
        w, expert, first_n, k, N, K, stride_we, stride_wn, 1,
        True, USE_TMA, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    w_tile_scale = load_weight_scale(
        w_scale, expert, first_n, k, N, scales_along(K, BLOCK),
        stride_se, stride_sn, stride_sk,
        BLOCK, SQUARE, SHIFT, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    return scaled_dot(
        acc, a, a_scale, w_tile, w_tile_scale,
        BLOCK, WIDEN, 1 if SHIFT else SQUARE, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def contract(
    acc,
    a_ptrs,  # (BLOCK_M, BLOCK_K) at the first columns of the rows
    a_scale_ptrs,  # (BLOCK_M,) at their first scales
    w,  # (E, N, K) codes by strides, K dense, or TMA descriptor
    w_scale,  # (E, rows, blocks) by strides
    expert, first_n, N, K, stride_we, stride_wn, stride_se, stride_sn, stride_sk,
    BLOCK: tl.constexpr, WIDEN: tl.constexpr, SQUARE: tl.constexpr, USE_TMA: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``acc`` (BLOCK_M, BLOCK_N) plus the rows times w[e]^T."""
    num_blocks = scales_along(K, BLOCK)
    total = acc
    if BLOCK == 0:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        a = load_rows(a_ptrs, k, K, EVEN_K, BLOCK_K)
        # Not add_product: the rows' scales are loaded after the weight's tile, as in the recorded code.
        w_tile = load_weight(
            w, expert, first_n, k, N, K, stride_we, stride_wn, 1,
            True, USE_TMA, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        a_scale = load_row_scale(a_scale_ptrs, k, num_blocks, BLOCK, EVEN_K, BLOCK_K)
        w_tile_scale = load_weight_scale(
            w_scale, expert, first_n, k, N, num_blocks, stride_se, stride_sn, stride_sk,
            BLOCK, SQUARE, 0, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        total = scaled_dot(
            total, a, a_scale, w_tile, w_tile_scale,
            BLOCK, WIDEN, SQUARE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if BLOCK == 0:
        total = acc + scaled_sum(
            total, a_scale_ptrs, w_scale, expert, first_n, N,
            stride_se, stride_sn, EVEN_N, BLOCK_N,
        )  # fmt: skip
    return total


@triton.jit
def scaled_sum(
    acc, a_scale_ptrs, w_scale, expert, first_n, N, stride_se, stride_sn,
    EVEN_N: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sum times the scales of its rows and columns if BLOCK is 0."""
    n = first_n + tl.arange(0, BLOCK_N)
    ptrs = w_scale + expert.to(tl.int64) * stride_se + n * stride_sn
    if EVEN_N:
        column_scale = tl.load(ptrs)
    else:
        column_scale = tl.load(ptrs, mask=n < N, other=0.0)
    return acc * tl.load(a_scale_ptrs)[:, None] * column_scale[None, :]


@triton.jit
def _rounded(x, ROUND: tl.constexpr):
    """float32 ``x`` rounded to the type of the products: bfloat16 with ROUND."""
    return x.to(tl.bfloat16).to(tl.float32) if ROUND else x


@triton.jit
def tile_mask(
    first_row, row_end, first_col, col_end,
    EVEN_N: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Mask of a tile below ``row_end`` and ``col_end``; with EVEN_N all columns are."""
    mask = (first_row + tl.arange(0, M) < row_end)[:, None]
    if not EVEN_N:
        mask = mask & (first_col + tl.arange(0, N) < col_end)[None, :]
    return mask


@triton.jit
def store_rows(
    x, out, scale, first_row, row_end, half, first_col, length,
    BLOCK: tl.constexpr, INT8: tl.constexpr, HALVES: tl.constexpr, EVEN_N: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Stores a float32 tile (M, N) in ``out`` (rows, HALVES * length): its values, or if
    ``out`` is bytes, codes and scales of ``BLOCK``.

    The columns are ``half``'s from ``first_col``, a multiple of BLOCK; blocks begin with a half.
    """
    ARE_CODES: tl.constexpr = out.dtype.element_ty == tl.uint8
    if ARE_CODES:
        x, byte = quantize_rows(x, M, N, BLOCK, INT8, True)
    ptrs = row_tile(out, first_row, half * length + first_col, HALVES * length, M, N)
    mask = tile_mask(first_row, row_end, first_col, length, EVEN_N, M, N)
    tl.store(ptrs, x.to(out.dtype.element_ty), mask=mask)
    if ARE_CODES:
        first, blocks = first_col // BLOCK, tl.cdiv(length, BLOCK)
        ptrs = row_tile(
            scale, first_row, half * blocks + first, HALVES * blocks, M, N // BLOCK
        )
        mask = tile_mask(first_row, row_end, first, blocks, EVEN_N, M, N // BLOCK)
        # pyrefly: ignore[unbound-name]
        tl.store(ptrs, as_scale(byte, scale.dtype.element_ty), mask=mask)


@triton.jit
def _up_epilogue(
    acc_gate, acc_up, first_row, row_end, valid, expert, first_n,
    b_in, preact, preact_scale, hidden, hidden_scale, stride_be, stride_bf,
    alpha, limit, F,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PREACT: tl.constexpr,
    PREACT_8BIT: tl.constexpr, ROUND: tl.constexpr, INT8: tl.constexpr, BLOCK: tl.constexpr,
    EVEN_N: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Bias, rounding, activation and quantisation of some columns of H and A."""
    cols = first_n + tl.arange(0, N)
    mask = cols < F
    # Between the gates of neighbouring columns, and from a gate to its up.
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    b_ptrs = b_in + expert.to(tl.int64) * stride_be
    b_ptrs += (cols * STEP).to(tl.int64) * stride_bf
    if HAS_BIAS:
        acc_gate += tl.load(b_ptrs, mask=mask, other=0.0).to(tl.float32)[None, :]
    gate = _rounded(tl.where(valid[:, None], acc_gate, 0.0), ROUND)
    if GATED:
        if HAS_BIAS:
            b_ptrs += (1 if INTERLEAVED else tl.cast(F, tl.int64)) * stride_bf
            acc_up += tl.load(b_ptrs, mask=mask, other=0.0).to(tl.float32)[None, :]
        up = _rounded(tl.where(valid[:, None], acc_up, 0.0), ROUND)
        a = glu_forward(gate, up, alpha, limit, ACTIVATION, HAS_LIMIT)
    else:
        a = unary_forward(gate, ACTIVATION)
    if STORE_PREACT and HAS_LIMIT and PREACT_8BIT:
        # pyrefly: ignore[unbound-name]
        gate, up = apart_from_limit(gate, up, limit)
        gate, up = _rounded(gate, ROUND), _rounded(up, ROUND)
    if STORE_PREACT and GATED and INTERLEAVED:
        store_rows(
            # pyrefly: ignore[unbound-name]
            tl.reshape(tl.join(gate, up), (M, N * 2)), preact, preact_scale,
            first_row, row_end, 0, first_n * 2, F * 2, 32, INT8, 1, EVEN_N, M, N * 2,
        )  # fmt: skip
    elif STORE_PREACT:
        HALVES: tl.constexpr = 2 if GATED else 1
        store_rows(
            gate, preact, preact_scale, first_row, row_end, 0, first_n, F,
            32, INT8, HALVES, EVEN_N, M, N,
        )  # fmt: skip
        if GATED:
            store_rows(
                # pyrefly: ignore[unbound-name]
                up, preact, preact_scale, first_row, row_end, 1, first_n, F,
                32, INT8, HALVES, EVEN_N, M, N,
            )  # fmt: skip
    store_rows(
        _rounded(a, ROUND), hidden, hidden_scale, first_row, row_end, 0, first_n, F,
        BLOCK, False, 1, EVEN_N, M, N,
    )  # fmt: skip


@triton.jit
def scaled_up_kernel(
    x,  # (T, D) codes, contiguous
    x_scale,  # (T, blocks) contiguous
    w_gate,  # (E, F, D) codes of the gate by strides, D dense, or TMA descriptor
    w_up,  # (E, F, D) of up with the same strides; read when gated
    gate_scale,  # (E, rows, blocks) by strides
    up_scale,  # (E, rows, blocks) with the same strides
    b_in,  # (E, g*F) by strides
    row_slots,  # (R,) int32
    tiles,  # tile list
    preact,  # (R, g*F) contiguous, written: H, quantised if uint8, which are codes
    preact_scale,  # (R, cdiv(g*F, 32)) bytes, written if H is quantised
    hidden,  # (R, F) contiguous, written: A = act(H), quantised if uint8, which are codes
    hidden_scale,  # (R, blocks) contiguous, written if A is quantised
    D, F, top_k,
    stride_we, stride_wn, stride_se, stride_sn, stride_sk, stride_be, stride_bf,
    alpha, limit,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    STORE_PREACT: tl.constexpr, PREACT_8BIT: tl.constexpr, ROUND: tl.constexpr,
    INT8: tl.constexpr, BLOCK: tl.constexpr, WIDEN: tl.constexpr, SQUARE: tl.constexpr, UP_SHIFT: tl.constexpr,
    USE_TMA: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """H = x[token(r)] @ w_in[e]^T + b_in[e] and A = act(H), both quantised as rows."""
    num_n = tl.cdiv(F, BLOCK_N)
    num_tiles = tl.load(tiles) * num_n
    num_blocks = scales_along(D, BLOCK)
    index = tl.program_id(0)
    if index < num_tiles:
        expert, first_row, row_end, tile_n = tile_of(tiles, index, num_n, GROUP_M)
        _, slots, valid = routed_rows(row_slots, first_row, row_end, HAS_SLOTS, BLOCK_M)
        tokens = (slots // top_k).to(tl.int64)
        x_ptrs = x + tokens[:, None] * D + tl.arange(0, BLOCK_K)[None, :]
        x_scale_ptrs = x_scale + tokens * num_blocks
        first_n = tile_n * BLOCK_N
        acc_gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        acc_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, D, BLOCK_K):
            a = load_rows(x_ptrs, k, D, EVEN_K, BLOCK_K)
            a_scale = load_row_scale(
                x_scale_ptrs, k, num_blocks, BLOCK, EVEN_K, BLOCK_K
            )
            acc_gate = add_product(
                acc_gate, a, a_scale, w_gate, gate_scale, expert, first_n, k, F, D,
                stride_we, stride_wn, stride_se, stride_sn, stride_sk,
                BLOCK, WIDEN, SQUARE, 0, USE_TMA, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if GATED:
                acc_up = add_product(
                    acc_up, a, a_scale, w_up, up_scale, expert, first_n, k, F, D,
                    stride_we, stride_wn, stride_se, stride_sn, stride_sk, BLOCK, WIDEN,
                    SQUARE, UP_SHIFT, USE_TMA, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
        if BLOCK == 0:
            acc_gate = scaled_sum(
                acc_gate, x_scale_ptrs, gate_scale, expert, first_n, F,
                stride_se, stride_sn, EVEN_N, BLOCK_N,
            )  # fmt: skip
            if GATED:
                acc_up = scaled_sum(
                    acc_up, x_scale_ptrs, up_scale, expert, first_n, F,
                    stride_se, stride_sn, EVEN_N, BLOCK_N,
                )  # fmt: skip
        _up_epilogue(
            acc_gate, acc_up, first_row, row_end, valid, expert, first_n,
            b_in, preact, preact_scale, hidden, hidden_scale, stride_be, stride_bf,
            alpha, limit, F,
            ACTIVATION, HAS_LIMIT, GATED, INTERLEAVED, HAS_BIAS, STORE_PREACT,
            PREACT_8BIT, ROUND, INT8, BLOCK, EVEN_N, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit
def scaled_mm_kernel(
    a,  # (R, P) codes of rows in expert-major order, contiguous
    a_scale,  # (R, blocks) contiguous; with TWO_WEIGHTS both halves have as many
    w,  # (E, N, P) codes by strides, P dense, or TMA descriptor
    w_scale,  # (E, rows, blocks) by strides
    w_up,  # with TWO_WEIGHTS: (E, N, P) for the second P columns of (R, 2*P) rows
    w_up_scale,  # with TWO_WEIGHTS; strides as of the first
    bias,  # (E, N) by strides
    scale,  # (T*K,) contiguous: router weight of each slot
    row_slots,  # (R,) int32
    tiles,  # tile list
    out,  # (R, N) contiguous, written
    N: tl.constexpr, P: tl.constexpr,
    stride_we, stride_wn, stride_se, stride_sn, stride_sk, stride_be, stride_bn,
    TWO_WEIGHTS: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr, WIDEN: tl.constexpr, SQUARE: tl.constexpr, USE_TMA: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[r] = scale[slot(r)] * (a[r] @ w[e]^T + bias[e]), rounded once.

    Down-projection: a = A, w = w_out (N = D, P = F). Input gradient per routed row:
    a = dH, w = w_in with its last two dimensions swapped (N = D, P = g*F). Rows of the
    tile that hold no slot are written too; nothing reads them.
    """
    num_n = tl.cdiv(N, BLOCK_N)
    HALVES: tl.constexpr = 2 if TWO_WEIGHTS else 1
    row_blocks = scales_along(P, BLOCK)
    num_tiles = tl.load(tiles) * num_n
    index = tl.program_id(0)
    if index < num_tiles:
        expert, first_row, row_end, tile_n = tile_of(tiles, index, num_n, GROUP_M)
        first_n = tile_n * BLOCK_N
        # A row past the expert's end may be past the tensor's end.
        rows = first_row + tl.arange(0, BLOCK_M)
        safe_rows = tl.where(rows < row_end, rows, first_row).to(tl.int64)
        a_ptrs = a + safe_rows[:, None] * (P * HALVES) + tl.arange(0, BLOCK_K)[None, :]
        s_ptrs = a_scale + safe_rows * (row_blocks * HALVES)
        acc = contract(
            tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), a_ptrs, s_ptrs, w, w_scale,
            expert, first_n, N, P, stride_we, stride_wn, stride_se, stride_sn, stride_sk,
            BLOCK, WIDEN, SQUARE, USE_TMA, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if TWO_WEIGHTS:
            acc = contract(
                acc, a_ptrs + P, s_ptrs + row_blocks, w_up, w_up_scale,
                expert, first_n, N, P,
                stride_we, stride_wn, stride_se, stride_sn, stride_sk,
                BLOCK, WIDEN, SQUARE, USE_TMA, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        cols = first_n + tl.arange(0, BLOCK_N)
        if HAS_BIAS:
            b_ptrs = bias + expert.to(tl.int64) * stride_be
            b_ptrs += cols.to(tl.int64) * stride_bn
            b = tl.load(b_ptrs, mask=cols < N, other=0.0)
            acc += b[None, :].to(tl.float32)
        if HAS_SCALE:
            _, slots, valid = routed_rows(
                row_slots, first_row, row_end, HAS_SLOTS, BLOCK_M
            )
            acc *= tl.load(scale + slots, mask=valid, other=0.0).to(tl.float32)[:, None]
        ptrs = row_tile(out, first_row, first_n, N, BLOCK_M, BLOCK_N)
        mask = tile_mask(first_row, row_end, first_n, N, EVEN_N, BLOCK_M, BLOCK_N)
        tl.store(ptrs, acc.to(out.dtype.element_ty), mask=mask)
