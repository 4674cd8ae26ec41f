"""Backward kernels: the activation gradient with its by-products, and the weight gradients.

Letters: T tokens, D model dim, F expert hidden dim, E experts, K experts per
token, R routed rows, g = 2 for a gated activation else 1. ``s`` is the router
weight of a slot, dO the gradient of the output.

The arithmetic, after SonicMoE (arXiv 2512.14080, section 3.2): no matmul of the
forward is recomputed and neither s*dO nor a gathered copy of x or dO is formed.

    dA' = dO[token(r)] @ w_out[e]         gathered matmul
    A   = act(H)                          recomputed from the saved H
    dS  = <dA', A>                        partial per column tile, summed in order
    dH  = act'(s * dA', H)
    A'  = s * A                           so that dw_out[e] = dO^T A'

No kernel uses an atomic: every output element is written by one program.
"""

import triton
import triton.language as tl
from triton.tools.ragged_tma import load_ragged

from .activations import (
    glu_backward,
    glu_forward,
    unary_backward,
    unary_forward,
)
from .forward import column_parts, load_rows, load_weight, routed_rows, row_tile
from .permutation import tile_of


@triton.jit
def _load_preact(
    preact, first_row, first_col, row_length, in_tile, last_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tile of H in float32, whose rows without a slot hold zeros.

    Pointers load it in the layout of the accumulator's epilogue. A TMA load has
    another layout, in which Triton would compute the activation a second time.
    """
    ptrs = row_tile(preact, first_row, first_col, row_length, BLOCK_M, BLOCK_N)
    cols = first_col + tl.arange(0, BLOCK_N)
    mask = in_tile & (cols[None, :] < last_col)
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _act_backward_epilogue(
    acc, s, first_row, row_end, valid, first_n,
    preact, grad_preact, scaled_hidden, alpha, limit, F,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, STORE_HIDDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stores dH and A' for some columns of dA'; returns their <dA', A> per row.

    The <dA', A> of a row without a slot is undefined; nothing reads it.
    """
    dtype = grad_preact.dtype.element_ty
    cols = first_n + tl.arange(0, BLOCK_N)
    in_tile = (first_row + tl.arange(0, BLOCK_M) < row_end)[:, None]
    # From the product: from acc, the compiler would keep acc whole beside its parts.
    grad = tl.where(valid[:, None], acc * s[:, None], 0.0)
    if GATED and INTERLEAVED:
        h_cols = first_n * 2 + tl.arange(0, BLOCK_N * 2)
        h = _load_preact(
            preact, first_row, first_n * 2, F * 2, in_tile, F * 2, BLOCK_M, BLOCK_N * 2
        )
        gate, up = tl.split(tl.reshape(h, (BLOCK_M, BLOCK_N, 2)))
        a = glu_forward(gate, up, alpha, limit, ACTIVATION, HAS_LIMIT).to(dtype)
        d_gate, d_up = glu_backward(grad, gate, up, alpha, limit, ACTIVATION, HAS_LIMIT)
        dh = tl.join(d_gate.to(dtype), d_up.to(dtype))
        dh = tl.reshape(dh, (BLOCK_M, BLOCK_N * 2))
        ptrs = row_tile(
            grad_preact, first_row, first_n * 2, F * 2, BLOCK_M, BLOCK_N * 2
        )
        tl.store(ptrs, dh, mask=in_tile & (h_cols[None, :] < 2 * F))
    elif GATED:
        gate = _load_preact(
            preact, first_row, first_n, F * 2, in_tile, F, BLOCK_M, BLOCK_N
        )
        up = _load_preact(
            preact, first_row, F + first_n, F * 2, in_tile, F * 2, BLOCK_M, BLOCK_N
        )
        a = glu_forward(gate, up, alpha, limit, ACTIVATION, HAS_LIMIT).to(dtype)
        d_gate, d_up = glu_backward(grad, gate, up, alpha, limit, ACTIVATION, HAS_LIMIT)
        ptrs = row_tile(grad_preact, first_row, first_n, F * 2, BLOCK_M, BLOCK_N)
        mask = in_tile & (cols[None, :] < F)
        tl.store(ptrs, d_gate.to(dtype), mask=mask)
        tl.store(ptrs + F, d_up.to(dtype), mask=mask)
    else:
        h = _load_preact(preact, first_row, first_n, F, in_tile, F, BLOCK_M, BLOCK_N)
        a = unary_forward(h, ACTIVATION).to(dtype)
        dh = unary_backward(grad, h, ACTIVATION)
        ptrs = row_tile(grad_preact, first_row, first_n, F, BLOCK_M, BLOCK_N)
        tl.store(ptrs, dh.to(dtype), mask=in_tile & (cols[None, :] < F))
    a = a.to(tl.float32)
    if STORE_HIDDEN:
        ptrs = row_tile(scaled_hidden, first_row, first_n, F, BLOCK_M, BLOCK_N)
        a_scaled = (a * s[:, None]).to(dtype)
        tl.store(ptrs, a_scaled, mask=in_tile & (cols[None, :] < F))
    return tl.sum(acc * a, 1)


@triton.jit(do_not_specialize=["num_rows"])
def act_backward_kernel(
    grad_out,  # (T, D), contiguous last dimension: dO
    w_out,  # (E, D, F) by strides, or TMA descriptor
    preact,  # (R, g*F) contiguous: H
    scale,  # (T*K,) contiguous: router weight of each slot
    row_slots,  # (R,) int32
    tiles,  # tile list
    grad_preact,  # (R, g*F) contiguous, written: dH
    scaled_hidden,  # (R, F) contiguous, written: A'
    scale_partials,  # (cdiv(F, BLOCK_N), R) float32, written: dS by column tile
    D, F, num_rows, top_k,
    stride_gt, stride_we, stride_wd, stride_wf,
    alpha, limit,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_SCALE: tl.constexpr,
    STORE_HIDDEN: tl.constexpr, STORE_PARTIALS: tl.constexpr,
    K_MAJOR: tl.constexpr, USE_TMA: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr, EPILOGUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dH, A' and the dS partials of one tile, from dA' = dO[token(r)] @ w_out[e].

    The contraction runs over D, so D is the weight's K dimension here. K_MAJOR
    means that D is contiguous, which it is not in nn.Linear's layout. A program has one tile:
    a loop over tiles would keep values between them, and the registers would not hold two
    programs on a multiprocessor, which hide each other's epilogue.
    """
    num_n = tl.cdiv(F, BLOCK_N)
    num_m = tl.load(tiles)
    index = tl.program_id(0)
    if index < num_m * num_n:
        expert, first_row, row_end, tile_n = tile_of(tiles, index, num_n, GROUP_M)
        rows, slots, valid = routed_rows(
            row_slots, first_row, row_end, HAS_SLOTS, BLOCK_M
        )
        tokens = (slots // top_k).to(tl.int64)
        g_ptrs = grad_out + tokens[:, None] * stride_gt
        g_ptrs += tl.arange(0, BLOCK_K)[None, :]
        first_n = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, D, BLOCK_K):
            g = load_rows(g_ptrs, k, D, EVEN_K, BLOCK_K)
            w = load_weight(
                w_out, expert, first_n, k, F, D, stride_we, stride_wf, stride_wd,
                K_MAJOR, USE_TMA, EVEN_N, EVEN_K, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            acc = tl.dot(g, w, acc, input_precision=PRECISION)

        if HAS_SCALE:
            s = tl.load(scale + slots, mask=valid, other=0.0).to(tl.float32)
        else:
            s = tl.where(valid, 1.0, 0.0)
        dot = tl.zeros((BLOCK_M,), dtype=tl.float32)
        parts = column_parts(acc, BLOCK_M, BLOCK_N, EPILOGUE_PARTS)
        for i in tl.static_range(EPILOGUE_PARTS):
            dot += _act_backward_epilogue(
                parts[i], s, first_row, row_end, valid,
                first_n + i * (BLOCK_N // EPILOGUE_PARTS),
                preact, grad_preact, scaled_hidden, alpha, limit, F,
                ACTIVATION, HAS_LIMIT, GATED, INTERLEAVED, STORE_HIDDEN,
                BLOCK_M, BLOCK_N // EPILOGUE_PARTS,
            )  # fmt: skip
        if STORE_PARTIALS:
            ptrs = scale_partials + tile_n.to(tl.int64) * num_rows + rows
            tl.store(ptrs, dot, mask=rows < row_end)


@triton.jit
def _expert_rows(
    base,  # (tokens or R, C), contiguous last dimension
    row_slots, first_row, start, row_end, first_col, C, stride, TOP_K: tl.constexpr,
    GATHER: tl.constexpr, FULL_ROWS: tl.constexpr, USE_TMA: tl.constexpr,
    RAGGED: tl.constexpr,
    EVEN_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """(BLOCK_R, BLOCK_C) tile of an expert's rows; rows without a slot are zero.

    GATHER reads the rows of the slots' tokens. Otherwise ``base`` is in row order
    and has zeros in rows without a slot. FULL_ROWS promises that all rows
    belong to the expert, whose first row is ``start``. Only then may TMA read them,
    except with a RAGGED descriptor, which zeros those past ``row_end``.
    """
    cols = first_col + tl.arange(0, BLOCK_C)
    if USE_TMA and RAGGED and not GATHER:
        tile = load_ragged(base, start, row_end - start, [first_row - start, first_col])
    elif USE_TMA and FULL_ROWS and not GATHER:
        tile = base.load([first_row, first_col])
    else:
        rows = first_row + tl.arange(0, BLOCK_R)
        if GATHER:
            if FULL_ROWS:
                slots = tl.load(row_slots + rows)
            else:
                slots = tl.load(row_slots + rows, mask=rows < row_end, other=-1)
            mask = (slots >= 0)[:, None]
            # The divisor is a constant, as every step of the contraction divides by it.
            source = (tl.where(slots >= 0, slots, 0) // TOP_K).to(tl.int64)
        else:
            mask = (rows < row_end)[:, None]
            source = rows.to(tl.int64)
        if not EVEN_C:
            mask = mask & (cols[None, :] < C)
        ptrs = base + source[:, None] * stride + cols[None, :]
        tile = tl.load(ptrs, mask=mask, other=0.0)
    return tile


@triton.jit
def gradient_tile(
    index, offs, num_experts, num_m, num_n,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Expert, first row and column, and the expert's rows, of a tile of the gradient.

    Past the last tile it returns a tile of the first expert, which can always be loaded.
    """
    expert = tl.where(index < num_experts * num_m * num_n, index // (num_m * num_n), 0)
    within = index % (num_m * num_n)
    first_group = within // (GROUP_M * num_n) * GROUP_M
    group_m = tl.minimum(num_m - first_group, GROUP_M)
    within = within % (GROUP_M * num_n)
    first_m = (first_group + within % group_m) * BLOCK_M
    first_n = (within // group_m) * BLOCK_N
    start = tl.load(offs + expert - 1, mask=expert > 0, other=0)
    return expert, first_m, first_n, start, tl.load(offs + expert)


@triton.jit
def store_gradient(
    acc, out, expert, first_m, first_n, M: tl.constexpr, N: tl.constexpr,
    stride_oe, stride_om, stride_on, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stores a tile of one expert's gradient in ``out`` (E, M, N) by strides."""
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    corner = out + expert.to(tl.int64) * stride_oe
    corner += first_m.to(tl.int64) * stride_om + first_n.to(tl.int64) * stride_on
    ptrs = corner + (m[:, None] * stride_om + n[None, :] * stride_on)
    mask = (m[:, None] < M - first_m) & (n[None, :] < N - first_n)
    tl.store(ptrs, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def weight_grad_kernel(
    p,  # (R, M) contiguous rows, or (T, M) when GATHER_P
    q,  # (R, N) contiguous rows, or (T, N) when GATHER_Q
    p_desc, q_desc,  # TMA descriptors of p and q where USE_TMA applies to them
    row_slots,  # (R,) int32
    offs,  # (E,) int32
    out,  # (E, M, N) by strides, written
    M: tl.constexpr, N: tl.constexpr, num_experts,
    stride_p, stride_q, stride_oe, stride_om, stride_on,
    TOP_K: tl.constexpr,
    GATHER_P: tl.constexpr, GATHER_Q: tl.constexpr, USE_TMA: tl.constexpr,
    RAGGED: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[e] = sum over the rows r of expert e of p[r]^T q[r]; zeros if it has none.

    dw_out: p = dO gathered, q = A'. dw_in: p = dH, q = x gathered. The gather is
    part of the load in the contraction loop. Only an expert's last block of rows
    can be partial. RAGGED descriptors mask it in that loop and load the next tile's rows
    before this one's matmuls. Otherwise the last block is masked alone,
    after the loop, where nothing hides its loads.
    """
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    if RAGGED:
        expert, first_m, first_n, start, end = gradient_tile(
            tl.program_id(0), offs, num_experts, num_m, num_n, GROUP_M, BLOCK_M, BLOCK_N
        )
    for index in tl.range(
        tl.program_id(0), num_experts * num_m * num_n, tl.num_programs(0)
    ):
        if RAGGED:
            next_expert, next_m, next_n, next_start, next_end = gradient_tile(
                index + tl.num_programs(0),
                offs, num_experts, num_m, num_n, GROUP_M, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        else:
            expert, first_m, first_n, start, end = gradient_tile(
                index, offs, num_experts, num_m, num_n, GROUP_M, BLOCK_M, BLOCK_N
            )
        # pyrefly: ignore[unbound-name]
        full_end = start + (end - start) // BLOCK_K * BLOCK_K
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for row in tl.range(start, end if RAGGED else full_end, BLOCK_K):
            p_tile = _expert_rows(
                p_desc if USE_TMA and not GATHER_P else p,
                # pyrefly: ignore[unbound-name]
                row_slots, row, start, end, first_m, M, stride_p, TOP_K,
                GATHER_P, not RAGGED, USE_TMA, RAGGED, EVEN_M, BLOCK_K, BLOCK_M,
            )  # fmt: skip
            q_tile = _expert_rows(
                q_desc if USE_TMA and not GATHER_Q else q,
                # pyrefly: ignore[unbound-name]
                row_slots, row, start, end, first_n, N, stride_q, TOP_K,
                GATHER_Q, not RAGGED, USE_TMA, RAGGED, EVEN_N, BLOCK_K, BLOCK_N,
            )  # fmt: skip
            acc = tl.dot(tl.trans(p_tile), q_tile, acc, input_precision=PRECISION)
        if not RAGGED:
            if full_end < end:
                p_tile = _expert_rows(
                    p, row_slots, full_end, start, end, first_m, M, stride_p, TOP_K,
                    GATHER_P, False, False, False, EVEN_M, BLOCK_K, BLOCK_M,
                )  # fmt: skip
                q_tile = _expert_rows(
                    q, row_slots, full_end, start, end, first_n, N, stride_q, TOP_K,
                    GATHER_Q, False, False, False, EVEN_N, BLOCK_K, BLOCK_N,
                )  # fmt: skip
                acc = tl.dot(tl.trans(p_tile), q_tile, acc, input_precision=PRECISION)

        store_gradient(
            # pyrefly: ignore[unbound-name]
            acc, out, expert, first_m, first_n, M, N, stride_oe, stride_om, stride_on,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if RAGGED:
            # pyrefly: ignore[unbound-name]
            expert, first_m, first_n = next_expert, next_m, next_n
            # pyrefly: ignore[unbound-name]
            start, end = next_start, next_end
