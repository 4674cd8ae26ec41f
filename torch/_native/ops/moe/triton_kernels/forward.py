"""Forward kernels: gathered up-projection with fused activation, and the grouped
matmul that serves both the weighted down-projection and the input gradient.

Letters: T tokens, D model dim, F expert hidden dim, E experts, K experts per
token, R routed rows, g = 2 for a gated activation else 1.

Both kernels walk a list of row tiles (``permutation.schedule_tiles_kernel``) in
a loop whose stride is the grid, so a grid of one program per tile and a grid of one
program per SM run the same kernel. The entry of the next tile is loaded before this one's
matmuls, and its slots before this one's epilogue.

Kernels that only multiply take the sizes of the layer as constants, which avoids a division
between two tiles. The others need the registers that constants take.

``w`` is a pointer, or a TMA descriptor over (E, rows, columns) when USE_TMA. TMA
fills reads outside an expert's matrix with zeros, so it needs no masks.
Offsets by row number or expert number are int64, and so is the
corner of a weight tile. Offsets within a tile are int32 (``_weight_reason`` of
../triton_impl.py bounds the strides).
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from .activations import glu_forward, INLINE_ASM, unary_forward
from .permutation import tile_ahead


@triton.jit
def load_weight(
    w,  # (E, N, K) tensor by strides, or TMA descriptor
    expert,
    first_n,
    first_k,
    n_end,
    k_end,
    stride_e,
    stride_n,
    stride_k,
    K_MAJOR: tl.constexpr,  # K is the contiguous dimension
    USE_TMA: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(BLOCK_K, BLOCK_N) operand tile of one expert's weight, zero outside it."""
    if USE_TMA:
        if K_MAJOR:
            tile = w.load([expert, first_n, first_k])
            tile = tl.trans(tl.reshape(tile, (BLOCK_N, BLOCK_K)))
        else:
            tile = w.load([expert, first_k, first_n])
            tile = tl.reshape(tile, (BLOCK_K, BLOCK_N))
    else:
        n = tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        corner = w + expert.to(tl.int64) * stride_e
        corner += tl.cast(first_n, tl.int64) * stride_n
        corner += tl.cast(first_k, tl.int64) * stride_k
        ptrs = corner + (k[:, None] * stride_k + n[None, :] * stride_n)
        if EVEN_N and EVEN_K:
            tile = tl.load(ptrs)
        else:
            mask = (n[None, :] < n_end - first_n) & (k[:, None] < k_end - first_k)
            tile = tl.load(ptrs, mask=mask, other=0.0)
    return tile


@triton.jit
def load_rows(ptrs, first_k, k_end, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """(BLOCK_M, BLOCK_K) tile of gathered rows at ``ptrs`` (columns from ``first_k``)."""
    if EVEN_K:
        tile = tl.load(ptrs + first_k)
    else:
        k = first_k + tl.arange(0, BLOCK_K)
        tile = tl.load(ptrs + first_k, mask=k[None, :] < k_end, other=0.0)
    return tile


@triton.jit
def routed_rows(
    row_slots, first_row, row_end, HAS_SLOTS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Rows of a tile, their slots, and which of them hold a slot.

    A row without a slot gets slot 0, which can always be loaded; its result
    is masked when it is stored.
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    valid = rows < row_end
    if HAS_SLOTS:
        slots = tl.load(row_slots + rows, mask=valid, other=-1)
        valid = slots >= 0
        slots = tl.where(valid, slots, 0)
    else:
        slots = tl.where(valid, rows, 0)
    return rows, slots, valid


@triton.jit
def row_tile(
    base, first_row, first_col, row_length, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Pointers to a (BLOCK_M, BLOCK_N) tile of a contiguous (rows, row_length) tensor.

    Only the corner's offset needs 64 bits; 32-bit offsets within the tile keep
    an epilogue that touches several tensors in registers.
    """
    corner = base + first_row.to(tl.int64) * row_length + first_col
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    return corner + m[:, None] * row_length + n[None, :]


@triton.jit
def _zero_rows(x, valid):
    """float32 ``x`` (M, N) with zeros in the rows that are not ``valid``.

    LLVM would move a select behind the next rounding, and there take apart the pairs that the
    hardware rounds.
    """
    if INLINE_ASM and is_cuda():
        y = tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;",
            "=f,f,r",
            [x, tl.where(valid, -1, 0)[:, None]],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        y = tl.where(valid[:, None], x, 0.0)
    return y


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def column_parts(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """A (ROWS, COLUMNS) block as a tuple of PARTS blocks of adjacent columns.

    PARTS is a power of 2. An epilogue that works on a part at a time needs fewer
    registers beside the accumulator.
    """
    tl.static_assert(COLUMNS % PARTS == 0)
    if PARTS == 1:
        parts = (x,)
    else:
        left, right = _halves(x, ROWS, COLUMNS)
        parts = column_parts(left, ROWS, COLUMNS // 2, PARTS // 2) + column_parts(
            right, ROWS, COLUMNS // 2, PARTS // 2
        )
    return parts


@triton.jit
def _up_epilogue(
    acc_gate, acc_up, first_row, row_end, valid, expert, first_n,
    b_in, preact, hidden, stride_be, stride_bf, alpha, limit, F,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PREACT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Bias, rounding of H, activation, and the stores of some columns of H and A.

    With INTERLEAVED ``acc_gate`` holds 2*BLOCK_N columns, gate and up in turn.
    """
    dtype = hidden.dtype.element_ty
    cols = first_n + tl.arange(0, BLOCK_N)
    in_tile = (first_row + tl.arange(0, BLOCK_M) < row_end)[:, None]
    b_row = b_in + expert.to(tl.int64) * stride_be
    b_ptrs = b_row + cols.to(tl.int64) * stride_bf
    if GATED and INTERLEAVED:
        h_cols = first_n * 2 + tl.arange(0, BLOCK_N * 2)
        if HAS_BIAS:
            b_ptrs = b_row + h_cols.to(tl.int64) * stride_bf
            bias = tl.load(b_ptrs, mask=h_cols < 2 * F, other=0.0)
            acc_gate += bias[None, :].to(tl.float32)
        h = _zero_rows(acc_gate, valid).to(dtype)
        if STORE_PREACT:
            ptrs = row_tile(preact, first_row, first_n * 2, F * 2, BLOCK_M, BLOCK_N * 2)
            tl.store(ptrs, h, mask=in_tile & (h_cols[None, :] < 2 * F))
        gate, up = tl.split(tl.reshape(h, (BLOCK_M, BLOCK_N, 2)))
        a = glu_forward(
            gate.to(tl.float32), up.to(tl.float32), alpha, limit, ACTIVATION, HAS_LIMIT
        )
    elif GATED:
        if HAS_BIAS:
            bias = tl.load(b_ptrs, mask=cols < F, other=0.0)
            acc_gate += bias[None, :].to(tl.float32)
            b_ptrs += tl.cast(F, tl.int64) * stride_bf
            bias = tl.load(b_ptrs, mask=cols < F, other=0.0)
            acc_up += bias[None, :].to(tl.float32)
        gate = _zero_rows(acc_gate, valid).to(dtype)
        up = _zero_rows(acc_up, valid).to(dtype)
        if STORE_PREACT:
            ptrs = row_tile(preact, first_row, first_n, F * 2, BLOCK_M, BLOCK_N)
            mask = in_tile & (cols[None, :] < F)
            tl.store(ptrs, gate, mask=mask)
            tl.store(ptrs + F, up, mask=mask)
        a = glu_forward(
            gate.to(tl.float32), up.to(tl.float32), alpha, limit, ACTIVATION, HAS_LIMIT
        )
    else:
        if HAS_BIAS:
            bias = tl.load(b_ptrs, mask=cols < F, other=0.0)
            acc_gate += bias[None, :].to(tl.float32)
        h = _zero_rows(acc_gate, valid).to(dtype)
        if STORE_PREACT:
            ptrs = row_tile(preact, first_row, first_n, F, BLOCK_M, BLOCK_N)
            tl.store(ptrs, h, mask=in_tile & (cols[None, :] < F))
        a = unary_forward(h.to(tl.float32), ACTIVATION)
    ptrs = row_tile(hidden, first_row, first_n, F, BLOCK_M, BLOCK_N)
    tl.store(ptrs, a.to(dtype), mask=in_tile & (cols[None, :] < F))


@triton.jit
def up_kernel(
    x,  # (T, D), contiguous last dimension
    w_in,  # (E, F, D) of the gate, or (E, 2*F, D) when INTERLEAVED, by strides,
    #        or TMA descriptor: of that, or of (E, 2, F, D) when PAIRED
    w_up,  # (E, F, D) likewise; read when gated, neither INTERLEAVED nor PAIRED
    b_in,  # (E, g*F) by strides
    row_slots,  # (R,) int32
    tiles,  # tile list
    preact,  # (R, g*F) contiguous, written: H
    hidden,  # (R, F) contiguous, written: A = act(H)
    D, F, top_k,
    stride_xt, stride_we, stride_wf, stride_wd, stride_ue, stride_uf, stride_ud,
    stride_be, stride_bf,
    alpha, limit,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, PAIRED: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PREACT: tl.constexpr,
    K_MAJOR: tl.constexpr, USE_TMA: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr, EPILOGUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """H = x[token(r)] @ w_in[e]^T + b_in[e], A = act(H).

    BLOCK_N counts columns of A. A gated tile holds both halves of H for them: two
    accumulators, or one of twice the width when the halves interleave or one TMA
    load brings both (PAIRED), so that one matrix instruction reads x once for both.
    """
    num_n = tl.cdiv(F, BLOCK_N)
    num_m = tl.load(tiles)
    WIDE: tl.constexpr = GATED and (INTERLEAVED or PAIRED)
    WIDTH: tl.constexpr = BLOCK_N * 2 if WIDE else BLOCK_N
    expert, first_row, row_end, tile_n = tile_ahead(
        tiles, num_m, tl.program_id(0), num_n, GROUP_M
    )
    _, slots, valid = routed_rows(row_slots, first_row, row_end, HAS_SLOTS, BLOCK_M)
    for index in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        next_expert, next_row, next_end, next_n = tile_ahead(
            tiles, num_m, index + tl.num_programs(0), num_n, GROUP_M
        )
        tokens = (slots // top_k).to(tl.int64)
        x_ptrs = x + tokens[:, None] * stride_xt + tl.arange(0, BLOCK_K)[None, :]
        first_n = tile_n * BLOCK_N
        acc_gate = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
        acc_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, D, BLOCK_K):
            a = load_rows(x_ptrs, k, D, EVEN_K, BLOCK_K)
            if PAIRED:
                w = w_in.load([expert, 0, first_n, k])
                w = tl.trans(tl.reshape(w, (WIDTH, BLOCK_K)))
            else:
                w = load_weight(
                    w_in, expert, first_n * (WIDTH // BLOCK_N), k,
                    F * (WIDTH // BLOCK_N), D, stride_we, stride_wf, stride_wd,
                    K_MAJOR, USE_TMA, EVEN_N, EVEN_K, WIDTH, BLOCK_K,
                )  # fmt: skip
            acc_gate = tl.dot(a, w, acc_gate, input_precision=PRECISION)
            if GATED and not WIDE:
                w = load_weight(
                    w_up, expert, first_n, k, F, D, stride_ue, stride_uf, stride_ud,
                    K_MAJOR, USE_TMA, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                acc_up = tl.dot(a, w, acc_up, input_precision=PRECISION)
        _, next_slots, next_valid = routed_rows(
            row_slots, next_row, next_end, HAS_SLOTS, BLOCK_M
        )
        if PAIRED:
            acc_gate, acc_up = _halves(acc_gate, BLOCK_M, WIDTH)
        H_COLUMNS: tl.constexpr = BLOCK_N if PAIRED else WIDTH
        gate_parts = column_parts(acc_gate, BLOCK_M, H_COLUMNS, EPILOGUE_PARTS)
        up_parts = column_parts(acc_up, BLOCK_M, BLOCK_N, EPILOGUE_PARTS)
        for i in tl.static_range(EPILOGUE_PARTS):
            _up_epilogue(
                gate_parts[i], up_parts[i], first_row, row_end, valid, expert,
                first_n + i * (BLOCK_N // EPILOGUE_PARTS),
                b_in, preact, hidden, stride_be, stride_bf, alpha, limit, F,
                ACTIVATION, HAS_LIMIT, GATED, INTERLEAVED, HAS_BIAS, STORE_PREACT,
                BLOCK_M, BLOCK_N // EPILOGUE_PARTS,
            )  # fmt: skip
        expert, first_row, row_end, tile_n = next_expert, next_row, next_end, next_n
        slots, valid = next_slots, next_valid


@triton.jit
def grouped_mm_kernel(
    a,  # (R, P) rows in expert-major order, contiguous, or TMA descriptor
    w,  # (E, N, P) by strides, or TMA descriptor
    a_up,  # with TWO_WEIGHTS: the second P columns of (R, 2*P) rows, likewise
    w_up,  # with TWO_WEIGHTS: (E, N, P) that they are multiplied with, likewise
    bias,  # (E, N) by strides
    scale,  # (T*K,) contiguous: router weight of each slot
    row_slots,  # (R,) int32
    tiles,  # tile list
    out,  # (R, N) contiguous, written
    N: tl.constexpr, P: tl.constexpr,
    stride_we, stride_wn, stride_wp, stride_ue, stride_un, stride_up,
    stride_be, stride_bn,
    TWO_WEIGHTS: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr,
    K_MAJOR: tl.constexpr, USE_TMA: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr, EPILOGUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[r] = scale[slot(r)] * (a[r] @ w[e]^T + bias[e]), rounded once.

    Down-projection: a = A, w = w_out (N = D, P = F). Input gradient per routed
    row: a = dH, w = w_in with its last two dimensions swapped (N = D, P = g*F);
    with gate and up as two weights, P = F, for one after the other.
    Rows of the tile that hold no slot are written too; nothing reads them.
    """
    num_n = tl.cdiv(N, BLOCK_N)
    ROW: tl.constexpr = 2 if TWO_WEIGHTS else 1  # row length of a in P
    num_m = tl.load(tiles)
    expert, first_row, row_end, tile_n = tile_ahead(
        tiles, num_m, tl.program_id(0), num_n, GROUP_M
    )
    if HAS_SCALE:
        _, slots, valid = routed_rows(row_slots, first_row, row_end, HAS_SLOTS, BLOCK_M)
    for index in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        next_expert, next_row, next_end, next_n = tile_ahead(
            tiles, num_m, index + tl.num_programs(0), num_n, GROUP_M
        )
        if HAS_SCALE:
            # pyrefly: ignore[unbound-name]
            s = tl.load(scale + slots, mask=valid, other=0.0).to(tl.float32)
        first_n = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if not USE_TMA:
            # A row past the expert's end may be past the tensor's end.
            rows = first_row + tl.arange(0, BLOCK_M)
            safe_rows = tl.where(rows < row_end, rows, first_row).to(tl.int64)
            offsets = safe_rows[:, None] * (ROW * P) + tl.arange(0, BLOCK_K)[None, :]
            a_ptrs = a + offsets
            a_up_ptrs = a_up + offsets
        for k in tl.range(0, P, BLOCK_K):
            if USE_TMA:
                a_tile = a.load([first_row, k])
            else:
                # pyrefly: ignore[unbound-name]
                a_tile = load_rows(a_ptrs, k, P, EVEN_K, BLOCK_K)
            w_tile = load_weight(
                w, expert, first_n, k, N, P, stride_we, stride_wn, stride_wp,
                K_MAJOR, USE_TMA, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            acc = tl.dot(a_tile, w_tile, acc, input_precision=PRECISION)
        if TWO_WEIGHTS:
            # A second loop: in the one above every second matmul would wait for the first.
            for k in tl.range(0, P, BLOCK_K):
                if USE_TMA:
                    a_tile = a_up.load([first_row, k])
                else:
                    # pyrefly: ignore[unbound-name]
                    a_tile = load_rows(a_up_ptrs, k, P, EVEN_K, BLOCK_K)
                w_tile = load_weight(
                    w_up, expert, first_n, k, N, P, stride_ue, stride_un, stride_up,
                    K_MAJOR, USE_TMA, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                acc = tl.dot(a_tile, w_tile, acc, input_precision=PRECISION)

        if HAS_SCALE:
            _, slots, valid = routed_rows(
                row_slots, next_row, next_end, HAS_SLOTS, BLOCK_M
            )
        in_tile = (first_row + tl.arange(0, BLOCK_M) < row_end)[:, None]
        parts = column_parts(acc, BLOCK_M, BLOCK_N, EPILOGUE_PARTS)
        WIDTH: tl.constexpr = BLOCK_N // EPILOGUE_PARTS
        for i in tl.static_range(EPILOGUE_PARTS):
            o = parts[i]
            first_col = first_n + i * WIDTH
            cols = first_col + tl.arange(0, WIDTH)
            if HAS_BIAS:
                b_ptrs = bias + expert.to(tl.int64) * stride_be
                b_ptrs += cols.to(tl.int64) * stride_bn
                b = tl.load(b_ptrs, mask=cols < N, other=0.0)
                o += b[None, :].to(tl.float32)
            if HAS_SCALE:
                o *= s[:, None]  # pyrefly: ignore[unbound-name]
            ptrs = row_tile(out, first_row, first_col, N, BLOCK_M, WIDTH)
            mask = in_tile & (cols[None, :] < N)
            tl.store(ptrs, o.to(out.dtype.element_ty), mask=mask)
        expert, first_row, row_end, tile_n = next_expert, next_row, next_end, next_n
