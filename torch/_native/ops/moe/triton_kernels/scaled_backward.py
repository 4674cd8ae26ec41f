"""Backward kernels in FP8: the activation gradient with its by-products, codes of columns,
and the weight gradients.

The arithmetic is that of backward.py. A weight gradient sums over
rows, so both of its operands are quantised again along the rows. ``columns_kernel`` makes
transposed codes in which an expert's rows begin at a multiple of 128.
"""

import triton
import triton.language as tl

from .activations import (
    glu_backward,
    glu_forward,
    unary_backward,
    unary_forward,
)
from .backward import gradient_tile, store_gradient
from .forward import column_parts, routed_rows, row_tile
from .permutation import tile_of
from .scaled_forward import (
    contract,
    scaled_dot,
    scales_along,
    store_rows,
    tile_mask,
)
from .scaling import (
    as_scale,
    decode,
    dequantize_rows,
    encode,
    magnitude_bits,
    NAN_BYTE,
    power_of_two,
    quantize_columns,
    reciprocal,
    scale_byte,
)


@triton.jit
def _as_byte(scale):
    """int32 bytes of scales that are float32 powers of two, or bytes already."""
    if scale.dtype == tl.float32:
        byte = scale.to(tl.int32, bitcast=True) >> 23
    else:
        byte = scale.to(tl.int32)
    return byte


@triton.jit
def _load_preact(
    preact, preact_scale, first_row, half, first_col, length, valid,
    INT8: tl.constexpr, HALVES: tl.constexpr, ALIGNED: tl.constexpr, EVEN_N: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Tile of H in float32: columns of a half from ``first_col``. Rows without a slot are 0.

    H is (rows, HALVES * length); with ALIGNED a half begins with a block of 32.
    """
    mask = valid[:, None]
    if not EVEN_N:
        mask = mask & (first_col + tl.arange(0, N) < length)[None, :]
    row_length = HALVES * length
    col = half * length + first_col
    ptrs = row_tile(preact, first_row, col, row_length, M, N)
    h = tl.load(ptrs, mask=mask, other=0)
    if preact.dtype.element_ty == tl.uint8:
        blocks = tl.cdiv(row_length, 32)
        if ALIGNED:
            BLOCKS: tl.constexpr = (N + 31) // 32  # or part of one
            mask = valid[:, None]
            if not EVEN_N:
                block = first_col // 32 + tl.arange(0, BLOCKS)
                mask = mask & (block < tl.cdiv(length, 32))[None, :]
            ptrs = row_tile(preact_scale, first_row, col // 32, blocks, M, BLOCKS)
            byte = tl.load(ptrs, mask=mask, other=127)
            h = dequantize_rows(h, byte.to(tl.int32), M, N, N // BLOCKS, INT8)
        else:
            corner = preact_scale + first_row.to(tl.int64) * blocks
            rows = tl.arange(0, M) * blocks
            ptrs = corner + rows[:, None] + ((col + tl.arange(0, N)) // 32)[None, :]
            byte = tl.load(ptrs, mask=mask, other=127)
            h = decode(h, INT8) * power_of_two(byte.to(tl.int32))
    return h.to(tl.float32)


@triton.jit
def _store_grad(
    parts, codes, scale, first_row, row_end, half: tl.constexpr, first_col, length,
    BLOCK: tl.constexpr, HALVES: tl.constexpr, EVEN_N: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Stores codes of a half of dH from ``parts`` (M, N) of adjacent columns, together whole blocks."""
    if PARTS == 1:
        store_rows(
            parts[0][half].to(tl.float32), codes, scale, first_row, row_end, half,
            first_col, length, BLOCK, False, HALVES, EVEN_N, M, N,
        )  # fmt: skip
    else:
        # One block, whose columns keep the layout in which they were computed.
        amax = tl.max(magnitude_bits(parts[0][half].to(tl.float32)), 1)
        for i in tl.static_range(1, PARTS):
            part_amax = tl.max(magnitude_bits(parts[i][half].to(tl.float32)), 1)
            amax = tl.maximum(amax, part_amax)
        byte = scale_byte(amax, False)
        factor, is_nan = reciprocal(byte)[:, None], (byte == NAN_BYTE)[:, None]
        for i in tl.static_range(PARTS):
            col = first_col + i * N
            q = encode(parts[i][half].to(tl.float32) * factor, is_nan, False, True)
            ptrs = row_tile(
                codes, first_row, half * length + col, HALVES * length, M, N
            )
            mask = tile_mask(first_row, row_end, col, length, EVEN_N, M, N)
            tl.store(ptrs, q, mask=mask)
        blocks, block = tl.cdiv(length, BLOCK), first_col // BLOCK
        ptrs = row_tile(scale, first_row, half * blocks + block, HALVES * blocks, M, 1)
        value = as_scale(byte, scale.dtype.element_ty)[:, None]
        # The last tile of a row may have whole blocks past the end.
        mask = tile_mask(first_row, row_end, block, blocks, EVEN_N, M, 1)
        tl.store(ptrs, value, mask=mask)


@triton.jit
def _act_backward_epilogue(
    acc, s, first_row, row_end, valid, first_n,
    preact, preact_scale, grad_codes, grad_scale, grad_preact, scaled_hidden,
    alpha, limit, F,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, STORE_CODES: tl.constexpr, STORE_VALUES: tl.constexpr,
    STORE_HIDDEN: tl.constexpr, INT8: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, EVEN_N: tl.constexpr, PARTS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Stores dH and A' for the columns of dA'; returns their <dA', A> per row.

    It takes a part at a time, which needs fewer registers. Parts narrower than a block wait
    for the others of their scale, in the type of the products: a tile for each half of dH.
    """
    dtype = scaled_hidden.dtype.element_ty
    PART: tl.constexpr = N // PARTS
    HALVES: tl.constexpr = 2 if GATED and not INTERLEAVED else 1
    STEP: tl.constexpr = 2 if GATED and INTERLEAVED else 1
    SHARE: tl.constexpr = 1 if PART * STEP >= BLOCK else BLOCK // (PART * STEP)
    row_length = F * 2 if GATED else F
    parts = column_parts(acc, M, N, PARTS)
    dot = tl.zeros((M,), dtype=tl.float32)
    for i in tl.static_range(PARTS):
        n = first_n + i * PART
        part = tl.where(valid[:, None], parts[i], 0.0)
        grad = part * s[:, None]
        gate = _load_preact(
            preact, preact_scale, first_row, 0, n * STEP, F * STEP, valid,
            INT8, HALVES, ALIGNED or HALVES == 1, EVEN_N, M, PART * STEP,
        )  # fmt: skip
        if GATED:
            if STEP == 2:
                gate, up = tl.split(tl.reshape(gate, (M, PART, 2)))
            else:
                up = _load_preact(
                    preact, preact_scale, first_row, 1, n, F, valid,
                    INT8, HALVES, ALIGNED, EVEN_N, M, PART,
                )  # fmt: skip
            a = glu_forward(gate, up, alpha, limit, ACTIVATION, HAS_LIMIT)
            d_gate, d_up = glu_backward(
                grad, gate, up, alpha, limit, ACTIVATION, HAS_LIMIT
            )
            d_gate, d_up = d_gate.to(dtype), d_up.to(dtype)
            if STEP == 2:
                halves = (tl.reshape(tl.join(d_gate, d_up), (M, PART * 2)),)
            else:
                halves = (d_gate, d_up)
        else:
            a = unary_forward(gate, ACTIVATION)
            halves = (unary_backward(grad, gate, ACTIVATION).to(dtype),)
        a = a.to(dtype).to(tl.float32)
        if STORE_HIDDEN:
            ptrs = row_tile(scaled_hidden, first_row, n, F, M, PART)
            a_scaled = (a * s[:, None]).to(dtype)
            mask = tile_mask(first_row, row_end, n, F, EVEN_N, M, PART)
            tl.store(ptrs, a_scaled, mask=mask)
        dot += tl.sum(part * a, 1)
        if STORE_VALUES:
            ptrs = row_tile(
                grad_preact, first_row, n * STEP, row_length, M, PART * STEP
            )
            mask = tile_mask(
                first_row, row_end, n * STEP, F * STEP, EVEN_N, M, PART * STEP
            )
            for half in tl.static_range(HALVES):
                tl.store(ptrs + half * F, halves[half], mask=mask)
        if STORE_CODES:
            if i % SHARE == 0:
                waiting = (halves,)
            else:
                waiting = waiting + (halves,)  # pyrefly: ignore[unbound-name]
            if i % SHARE == SHARE - 1:
                first = n - (SHARE - 1) * PART
                for half in tl.static_range(HALVES):
                    _store_grad(
                        waiting, grad_codes, grad_scale,
                        first_row, row_end, half, first * STEP, F * STEP,
                        BLOCK, HALVES, EVEN_N, M, PART * STEP, SHARE,
                    )  # fmt: skip
    return dot


@triton.jit(do_not_specialize=["num_rows"])
def scaled_act_backward_kernel(
    grad_out,  # (T, D) codes, contiguous: dO
    grad_out_scale,  # (T, blocks) contiguous
    w_out,  # (E, F, D) codes by strides, D dense, or TMA descriptor
    w_out_scale,  # (E, rows, blocks) by strides
    preact,  # (R, g*F) contiguous: H, quantised if uint8, which are codes
    preact_scale,  # (R, cdiv(g*F, 32)) bytes of codes
    scale,  # (T*K,) contiguous: router weight of each slot
    row_slots,  # (R,) int32
    tiles,  # tile list
    grad_codes,  # (R, g*F) codes as uint8, contiguous, written with STORE_CODES: dH
    grad_scale,  # (R, blocks) contiguous, likewise
    grad_preact,  # (R, g*F) contiguous, written with STORE_VALUES: dH, not quantised
    scaled_hidden,  # (R, F) contiguous, written with STORE_HIDDEN: A'
    scale_partials,  # (cdiv(F, BLOCK_N), R) float32, written with STORE_PARTIALS: dS
    D, F, num_rows, top_k,
    stride_we, stride_wn, stride_se, stride_sn, stride_sk,
    alpha, limit,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_SCALE: tl.constexpr,
    STORE_CODES: tl.constexpr, STORE_VALUES: tl.constexpr, STORE_HIDDEN: tl.constexpr,
    STORE_PARTIALS: tl.constexpr, INT8: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, WIDEN: tl.constexpr, SQUARE: tl.constexpr, USE_TMA: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr, EPILOGUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dH, A' and the dS partials of one tile, from dA' = dO[token(r)] @ w_out[e]."""
    num_n = tl.cdiv(F, BLOCK_N)
    num_tiles = tl.load(tiles) * num_n
    index = tl.program_id(0)
    if index < num_tiles:
        expert, first_row, row_end, tile_n = tile_of(tiles, index, num_n, GROUP_M)
        rows, slots, valid = routed_rows(
            row_slots, first_row, row_end, HAS_SLOTS, BLOCK_M
        )
        tokens = (slots // top_k).to(tl.int64)
        first_n = tile_n * BLOCK_N
        acc = contract(
            tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32),
            grad_out + tokens[:, None] * D + tl.arange(0, BLOCK_K)[None, :],
            grad_out_scale + tokens * scales_along(D, BLOCK),
            w_out, w_out_scale, expert, first_n, F, D,
            stride_we, stride_wn, stride_se, stride_sn, stride_sk,
            BLOCK, WIDEN, SQUARE, USE_TMA, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_SCALE:
            s = tl.load(scale + slots, mask=valid, other=0.0).to(tl.float32)
        else:
            s = tl.where(valid, 1.0, 0.0)
        dot = _act_backward_epilogue(
            acc, s, first_row, row_end, valid, first_n,
            preact, preact_scale, grad_codes, grad_scale, grad_preact, scaled_hidden,
            alpha, limit, F,
            ACTIVATION, HAS_LIMIT, GATED, INTERLEAVED, STORE_CODES, STORE_VALUES,
            STORE_HIDDEN, INT8, ALIGNED, BLOCK, EVEN_N, EPILOGUE_PARTS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if STORE_PARTIALS:
            ptrs = scale_partials + tile_n.to(tl.int64) * num_rows + rows
            tl.store(ptrs, dot, mask=rows < row_end)


# Rows of an expert are padded to a multiple of so many in transposed codes.
ALIGNMENT = tl.constexpr(128)


@triton.jit
def _first_place(begin, expert):
    """Index of the expert's first block of ALIGNMENT places in columns; its rows begin at ``begin``."""
    return begin // ALIGNMENT + expert


@triton.jit
def _source_rows(
    source, source_scale, row_slots, first_row, row_end, first_n, N, top_k,
    stride_source, stride_ss, GATHER: tl.constexpr, BLOCK: tl.constexpr,
    M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(M, BLOCK_N) float32 values of rows; 0 in rows without a slot and columns from N."""
    rows, slots, valid = routed_rows(row_slots, first_row, row_end, GATHER, M)
    if GATHER:
        rows = slots // top_k
    rows = tl.where(valid, rows, 0).to(tl.int64)
    n = first_n + tl.arange(0, BLOCK_N)
    ptrs = source + rows[:, None] * stride_source + n[None, :]
    x = tl.load(ptrs, mask=valid[:, None] & (n[None, :] < N), other=0)
    if source.dtype.element_ty == tl.uint8:
        if BLOCK:
            blocks = first_n // BLOCK + tl.arange(0, BLOCK_N // BLOCK)
            mask = valid[:, None] & (blocks[None, :] < tl.cdiv(N, BLOCK))
            PER_SCALE: tl.constexpr = BLOCK
        else:
            blocks = tl.arange(0, 1)
            mask = valid[:, None]
            PER_SCALE: tl.constexpr = BLOCK_N
        ptrs = source_scale + rows[:, None] * stride_ss + blocks[None, :]
        byte = _as_byte(tl.load(ptrs, mask=mask, other=0))
        x = dequantize_rows(x, byte, M, BLOCK_N, PER_SCALE, False)
    return x.to(tl.float32)


@triton.jit
def column_scales_kernel(
    source,  # (R, N) rows by stride, or (T, N) when GATHER: codes if uint8
    source_scale,  # (rows, blocks) by stride, of codes
    row_slots,  # (R,) int32
    offs,  # (E,) int32
    scale,  # (E, N) contiguous, written
    N, top_k, stride_source, stride_ss,
    GATHER: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scales of whole columns, one of each expert's rows. Grid: (E, cdiv(N, BLOCK_N))."""
    expert = tl.program_id(0)
    first_n = tl.program_id(1) * BLOCK_N
    begin = tl.load(offs + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs + expert)
    amax = tl.zeros((BLOCK_N,), dtype=tl.int32)
    for row in tl.range(begin, end, BLOCK_R):
        x = _source_rows(
            source, source_scale, row_slots, row, end, first_n, N, top_k,
            stride_source, stride_ss, GATHER, 0, BLOCK_R, BLOCK_N,
        )  # fmt: skip
        amax = tl.maximum(amax, tl.max(magnitude_bits(x), 0))
    n = first_n + tl.arange(0, BLOCK_N)
    value = as_scale(scale_byte(amax, False), scale.dtype.element_ty)
    tl.store(scale + expert.to(tl.int64) * N + n, value, mask=n < N)


@triton.jit
def columns_kernel(
    source,  # (R, N) rows by stride, or (T, N) when GATHER: codes if uint8
    source_scale,  # (rows, blocks) by stride, of codes
    row_slots,  # (R,) int32
    offs,  # (E,) int32
    tiles,  # tile list of 128 rows
    out,  # (N, places * 128) codes as uint8, contiguous, written
    out_scale,  # (N, places * 128 / BLOCK) by strides, written; with BLOCK 0 (N, E), read
    N, out_length, top_k, stride_source, stride_ss, stride_on, stride_ob,
    GATHER: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Codes of columns, in blocks of rows that begin at the first row of each expert.

    Grid: (row tiles, cdiv(N, BLOCK_N)).
    """
    index = tl.program_id(0)
    if index < tl.load(tiles):
        expert, first_row, row_end, _ = tile_of(tiles, index, 1, 1)
        begin = tl.load(offs + expert - 1, mask=expert > 0, other=0)
        place = _first_place(begin, expert) + (first_row - begin) // ALIGNMENT
        first_n = tl.program_id(1) * BLOCK_N
        x = _source_rows(
            source, source_scale, row_slots, first_row, row_end, first_n, N, top_k,
            stride_source, stride_ss, GATHER, BLOCK, ALIGNMENT, BLOCK_N,
        )  # fmt: skip
        n = first_n + tl.arange(0, BLOCK_N)
        n64 = n.to(tl.int64)
        if BLOCK:
            codes, byte = quantize_columns(x, ALIGNMENT, BLOCK_N, BLOCK)
            PARTS: tl.constexpr = ALIGNMENT // BLOCK
            i = place.to(tl.int64) * PARTS + tl.arange(0, PARTS)
            ptrs = out_scale + n64[None, :] * stride_on + i[:, None] * stride_ob
            value = as_scale(byte, out_scale.dtype.element_ty)
            tl.store(ptrs, value, mask=(n < N)[None, :])
        else:
            ptrs = out_scale + n64 * stride_on + expert.to(tl.int64) * stride_ob
            byte = _as_byte(tl.load(ptrs, mask=n < N, other=1.0))[None, :]
            codes = encode(x * reciprocal(byte), byte == NAN_BYTE, False, True)
        i = place.to(tl.int64) * ALIGNMENT + tl.arange(0, ALIGNMENT)
        ptrs = out + n64[:, None] * out_length + i[None, :]
        tl.store(ptrs, tl.trans(codes), mask=(n < N)[:, None])


@triton.jit
def _line(corner, first, end, stride, EVEN: tl.constexpr, N: tl.constexpr):
    """Scales of N adjacent columns from ``first``; 0 from ``end``.

    A mask lets a thread hold one address. With columns clamped to the last it would hold
    one for each.
    """
    n = first + tl.arange(0, N)
    if EVEN:
        value = tl.load(corner + n * stride)
    else:
        value = tl.load(corner + n * stride, mask=n < end, other=0.0)
    return value


@triton.jit
def scaled_weight_grad_kernel(
    p,  # (M, places * 128) codes, contiguous
    p_scale,  # (M, blocks) by strides; with BLOCK 0 (M, E)
    q,  # (N, places * 128) codes, contiguous
    q_scale,  # (N, blocks) by strides, likewise
    offs,  # (E,) int32
    out,  # (E, M, N) by strides, written
    M: tl.constexpr, N: tl.constexpr, length, num_experts,
    stride_pm, stride_pb, stride_qn, stride_qb, stride_oe, stride_om, stride_on,
    BLOCK: tl.constexpr, WIDEN: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[e] = sum over the rows r of expert e of p[:, r] q[:, r]^T; zeros if it has none."""
    STEPS: tl.constexpr = ALIGNMENT // BLOCK_K
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    index = tl.program_id(0)
    if index < num_experts * num_m * num_n:
        expert, first_m, first_n, begin, end = gradient_tile(
            index, offs, num_experts, num_m, num_n, GROUP_M, BLOCK_M, BLOCK_N
        )
        place = _first_place(begin, expert)
        m = first_m + tl.arange(0, BLOCK_M)
        n = first_n + tl.arange(0, BLOCK_N)
        # A row past the last repeats the last one; its result is not stored.
        if not EVEN_M:
            m = tl.minimum(m, M - 1)
        if not EVEN_N:
            n = tl.minimum(n, N - 1)
        m64, n64 = m.to(tl.int64), n.to(tl.int64)
        ks = tl.arange(0, BLOCK_K)
        p_ptrs = p + m64[:, None] * length + ks[None, :]
        q_ptrs = q + n64[None, :] * length + ks[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in tl.range(0, tl.cdiv(end - begin, BLOCK_K)):
            # Without the hint no load is asynchronous, and the kernel spills.
            first = (place * STEPS + step).to(tl.int64) * BLOCK_K
            first = tl.multiple_of(first, BLOCK_K)
            p_tile = tl.load(p_ptrs + first)
            q_tile = tl.load(q_ptrs + first)
            sp, sq = None, None
            if BLOCK == 32:
                blocks = first // 32 + tl.arange(0, BLOCK_K // 32)
                sp = tl.load(p_scale + m64[:, None] * stride_pm + blocks[None, :])
                sq = tl.load(q_scale + n64[:, None] * stride_qn + blocks[None, :])
            elif BLOCK:
                block = (place + step).to(tl.int64)
                sp = _line(
                    p_scale + block * stride_pb, first_m, M, stride_pm, EVEN_M, BLOCK_M
                )
                sq = _line(
                    q_scale + block * stride_qb, first_n, N, stride_qn, EVEN_N, BLOCK_N
                )
            acc = scaled_dot(
                acc, p_tile, sp, q_tile, sq,
                BLOCK, WIDEN, 1, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        if BLOCK == 0:
            place = expert.to(tl.int64)
            sp = _line(
                p_scale + place * stride_pb, first_m, M, stride_pm, EVEN_M, BLOCK_M
            )
            sq = _line(
                q_scale + place * stride_qb, first_n, N, stride_qn, EVEN_N, BLOCK_N
            )
            acc = acc * sp[:, None] * sq[None, :]
        store_gradient(
            acc, out, expert, first_m, first_n, M, N, stride_oe, stride_om, stride_on,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
