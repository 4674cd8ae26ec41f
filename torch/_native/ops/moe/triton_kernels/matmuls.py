"""Launches of the matmul kernels of ``_moe_mlp``: tile choice, TMA operands, strides."""

from collections.abc import Callable
from typing import Any, TypeVar

import triton
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

import torch
from torch import Tensor

from .backward import act_backward_kernel, weight_grad_kernel
from .configs import fitting_configs, OPTIONS, TileConfig
from .experts import Experts, row_major
from .forward import grouped_mm_kernel, up_kernel
from .permutation import minimum
from .rows import LaunchPlan, Rows


_Result = TypeVar("_Result")
# Triton's default for float32 is tf32, which is less precise; gfx950 has no tf32.
_PRECISION = "ieee"


# --- what every matmul kernel is launched with


def tma_ok(plan: LaunchPlan, x: Tensor) -> bool:
    """Whether a TMA descriptor can describe ``x``: 16-byte rows, unit last stride."""
    size = x.element_size()
    return (
        x.stride(-1) == 1
        and plan.is_addressable(x)
        and all(s > 0 and s * size % 16 == 0 for s in x.stride()[:-1])
    )


def descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def or_else(x: Tensor | None, other: Tensor) -> Tensor:
    """``x``, or a pointer that the kernel does not read."""
    return other if x is None else x


def bias_strides(bias: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if bias is None else bias.stride()


def tile_args(
    config: TileConfig, num_columns: int, num_inner: int, interleaved: bool = False
) -> dict[str, Any]:
    # An interleaved part has gate and up side by side, and as many columns of H as otherwise.
    parts = config.epilogue_parts * (2 if interleaved else 1)
    limit = {"maxnreg": config.max_registers} if config.max_registers else {}
    return {
        "EVEN_N": num_columns % config.block_n == 0,
        "EVEN_K": num_inner % config.block_k == 0,
        "GROUP_M": config.group_m,
        "EPILOGUE_PARTS": parts,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **limit,
        **OPTIONS,
    }


def tile_grid(rows: Rows, config: TileConfig, num_columns: int) -> tuple[int]:
    """One program per tile."""
    return (rows.max_tiles(config.block_m) * triton.cdiv(num_columns, config.block_n),)


def _looping(rows: Rows, config: TileConfig, grid: tuple[int]) -> tuple[int]:
    """The grid of a kernel whose programs walk the tiles, if the configuration says so."""
    if config.programs_per_sm:
        return (minimum(grid[0], rows.plan.num_sms * config.programs_per_sm),)
    return grid


def run(
    rows: Rows,
    kernel: str,
    num_columns: int,
    num_inner: int,
    traits: tuple[object, ...],
    launch: Callable[[TileConfig], _Result],
) -> _Result:
    """Calls ``launch`` with the configuration of ``kernel`` for this problem.

    Args:
        rows: the call's.
        kernel: an entry of the plan's table.
        num_columns, num_inner: columns of the output and length of the contraction.
        traits: what else selects the compiled code; for the autotuner.
        launch: launches the kernel; ``run`` returns its result.
    """
    plan = rows.plan
    density = plan.hint(rows.num_rows) / rows.num_experts
    configs = fitting_configs(plan.table, kernel, num_columns, num_inner, density)
    config = configs[0]
    if plan.autotuner is not None:
        problem = (kernel, num_columns, num_inner, traits, int(density).bit_length())
        config = plan.autotuner.choose(problem, configs, launch)
    return launch(config)


# --- the products


def weight_operands(
    plan: LaunchPlan,
    config: TileConfig,
    *weights: Tensor,
    width: int = 1,
    may_use_tma: bool = True,
) -> tuple[list[Any], dict[str, bool]]:
    """What a kernel takes for ``weights``, and the flags that describe it.

    Args:
        plan, config: the launch's.
        weights: (E, N, K) views of expert weights, of one layout.
        width: columns of a weight tile in ``block_n``.
        may_use_tma: whether TMA can read the other operands.
    """
    use_tma = may_use_tma and config.tma
    use_tma = use_tma and all(tma_ok(plan, w) or tma_ok(plan, w.mT) for w in weights)
    k_major = weights[0].stride(2) == 1
    operands: list[Any] = list(weights)
    if use_tma:
        n, k = config.block_n * width, config.block_k
        operands = [
            descriptor(w, [1, n, k]) if k_major else descriptor(w.mT, [1, k, n])
            for w in weights
        ]
    return operands, {"K_MAJOR": k_major, "USE_TMA": use_tma}


def up(
    rows: Rows, experts: Experts, preact: Tensor, hidden: Tensor, store_preact: bool
) -> None:
    """preact (R, g*F) = H if ``store_preact``, and hidden (R, F) = act(H)."""
    w_in, b_in, act = experts.w_in, experts.b_in, experts.act
    x = row_major(experts.input)
    dim, num_hidden = w_in.shape[2], hidden.shape[1]
    adjacent = experts.halves_adjacent and experts.w_up is None
    # (E, F, D) of gate and up; w_in twice if they are one weight.
    gate, second = w_in, or_else(experts.w_up, w_in)
    if adjacent:
        gate, second = w_in[:, :num_hidden], w_in[:, num_hidden:]

    def launch(config: TileConfig) -> None:
        width = 2 if act.gate_interleaved else 1
        operands, flags = weight_operands(rows.plan, config, gate, second, width=width)
        paired = flags["USE_TMA"] and adjacent and flags["K_MAJOR"]
        if paired:
            both = w_in.unflatten(1, (2, num_hidden))
            operands = [descriptor(both, [1, 2, config.block_n, config.block_k])] * 2
        grid = _looping(rows, config, tile_grid(rows, config, num_hidden))
        rows.plan.kernel(up_kernel)[grid](
            x, *operands, or_else(b_in, w_in), rows.row_slots, rows.tiles(config.block_m),
            preact, hidden, dim, num_hidden, rows.top_k,
            x.stride(0), *gate.stride(), *second.stride(), *bias_strides(b_in),
            **act.kernel_args(), PAIRED=paired,
            HAS_SLOTS=rows.has_slots, HAS_BIAS=b_in is not None, STORE_PREACT=store_preact,
            PRECISION=_PRECISION, **flags,
            **tile_args(config, num_hidden, dim, act.gate_interleaved),
        )  # fmt: skip

    kernel = "up_gated" if act.gated else "up_plain"
    traits = (x.dtype, act, adjacent, w_in.stride(2) == 1, store_preact)
    run(rows, kernel, num_hidden, dim, traits, launch)


def grouped_mm(
    rows: Rows,
    kernel: str,
    a: Tensor,
    w: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    w_up: Tensor | None = None,
) -> None:
    """out (R, N) = scale * (a (R, P) @ w (E, N, P)^T + bias (E, N)) by expert.

    With ``w_up`` (E, N, P) too, ``a`` is (R, 2P), and its halves are multiplied with
    ``w`` and ``w_up``.
    """
    plan, (num_columns, num_inner) = rows.plan, w.shape[1:]
    weights = (w, or_else(w_up, w))
    halves = (a, a) if w_up is None else (a[:, :num_inner], a[:, num_inner:])

    def launch(config: TileConfig) -> None:
        operands, flags = weight_operands(
            plan, config, *weights, may_use_tma=tma_ok(plan, a)
        )
        a_operands: tuple[Any, ...] = halves
        if flags["USE_TMA"]:
            block = [config.block_m, config.block_k]
            a_operands = tuple(descriptor(half, block) for half in halves)
        grid = _looping(rows, config, tile_grid(rows, config, num_columns))
        plan.kernel(grouped_mm_kernel)[grid](
            a_operands[0], operands[0], a_operands[1], operands[1],
            or_else(bias, w), or_else(scale, w),
            rows.row_slots, rows.tiles(config.block_m), out, num_columns, num_inner,
            *weights[0].stride(), *weights[1].stride(), *bias_strides(bias),
            TWO_WEIGHTS=w_up is not None, HAS_SLOTS=rows.has_slots,
            HAS_BIAS=bias is not None, HAS_SCALE=scale is not None,
            PRECISION=_PRECISION, **flags, **tile_args(config, num_columns, num_inner),
        )  # fmt: skip

    traits = (a.dtype, w.stride(2) == 1, scale is not None, w_up is not None)
    run(rows, kernel, num_columns, num_inner, traits, launch)


def room_for_partials(
    rows: Rows, experts: Experts, config: TileConfig, needed: bool
) -> Tensor:
    """(P, R) float32 for dS by column tile; the last one is the output bias's."""
    num_n = triton.cdiv(experts.num_hidden, config.block_n)
    num_partials = num_n + (experts.b_out is not None) if needed else 0
    return experts.input.new_empty(num_partials, rows.num_rows, dtype=torch.float32)


def act_backward(
    rows: Rows,
    experts: Experts,
    grad_out: Tensor,
    preact: Tensor,
    *,
    need_hidden: bool,
    need_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dH (R, g*F), A' (R, F) or empty, dS partials (P, R) float32 or empty."""
    w_out, act, scale = experts.w_out, experts.act, rows.scale
    dim, num_hidden = w_out.shape[1:]
    grad_preact = preact.new_empty(rows.num_buffer_rows, preact.shape[1])
    num_kept = rows.num_buffer_rows if need_hidden else 0
    scaled_hidden = preact.new_empty(num_kept, num_hidden)

    def launch(config: TileConfig) -> Tensor:
        partials = room_for_partials(rows, experts, config, need_scale)
        operands, flags = weight_operands(rows.plan, config, w_out.mT)
        rows.plan.kernel(act_backward_kernel)[tile_grid(rows, config, num_hidden)](
            grad_out, *operands, preact, or_else(scale, preact),
            rows.row_slots, rows.tiles(config.block_m), grad_preact, scaled_hidden, partials,
            dim, num_hidden, rows.num_rows, rows.top_k, grad_out.stride(0), *w_out.stride(),
            **act.kernel_args(), HAS_SLOTS=rows.has_slots, HAS_SCALE=scale is not None,
            STORE_HIDDEN=need_hidden, STORE_PARTIALS=need_scale,
            PRECISION=_PRECISION, **flags,
            **tile_args(config, num_hidden, dim, act.gate_interleaved),
        )  # fmt: skip
        return partials

    traits = (preact.dtype, act, w_out.stride(1) == 1, need_hidden, need_scale)
    partials = run(rows, "act_backward", num_hidden, dim, traits, launch)
    if need_scale and experts.b_out is not None:
        rows.bias_dot(grad_out, experts.b_out, partials[-1])
    return grad_preact, scaled_hidden, partials


def weight_grad(
    rows: Rows,
    p: Tensor,
    q: Tensor,
    w: Tensor,
    *,
    gather_p: bool = False,
    gather_q: bool = False,
) -> Tensor:
    """(E, M, N) like ``w``: per expert, the sum over its rows of p^T q.

    Args:
        rows: the call's.
        p: (R, M) rows, or (T, M) when ``gather_p``.
        q: (R, N) rows, or (T, N) when ``gather_q``.
        w: the weight, whose strides the gradient follows.
        gather_p, gather_q: the operand is per token.
    """
    plan, grad = rows.plan, torch.empty_like(w)
    out = grad
    if grad.stride(1) == 1 and grad.stride(2) != 1:
        # The transposed product stores along the contiguous dimension.
        p, q, gather_p, gather_q = q, p, gather_q, gather_p
        out = grad.transpose(1, 2)
    num_m, num_n = out.shape[1:]
    gather_p = gather_p and rows.has_slots
    gather_q = gather_q and rows.has_slots

    def launch(config: TileConfig) -> None:
        use_tma = (
            config.tma
            and (gather_p or tma_ok(plan, p))
            and (gather_q or tma_ok(plan, q))
        )
        ragged = use_tma and plan.ragged and rows.num_rows <= 1 << 30
        describe = create_ragged_descriptor if ragged else descriptor
        p_desc = q_desc = rows.offs
        if use_tma and not gather_p:
            p_desc = describe(p, [config.block_k, config.block_m])
        if use_tma and not gather_q:
            q_desc = describe(q, [config.block_k, config.block_n])
        tiles_per_expert = triton.cdiv(num_m, config.block_m) * triton.cdiv(
            num_n, config.block_n
        )
        args = tile_args(config, num_n, num_m)
        args["EVEN_M"] = num_m % config.block_m == 0
        # The contraction runs over rows, and the epilogue only stores.
        del args["EVEN_K"], args["EPILOGUE_PARTS"]
        if not (gather_p or gather_q):
            # No stage holds the rows' slots, so as many tiles fit as with a gather.
            args["num_stages"] = (config.num_stages + 1) // 2
        grid = _looping(rows, config, (rows.num_experts * tiles_per_expert,))
        plan.kernel(weight_grad_kernel)[grid](
            p, q, p_desc, q_desc, rows.row_slots, rows.offs, out,
            num_m, num_n, rows.num_experts, p.stride(0), q.stride(0), *out.stride(),
            TOP_K=rows.top_k, GATHER_P=gather_p, GATHER_Q=gather_q,
            USE_TMA=use_tma, RAGGED=ragged, PRECISION=_PRECISION, **args,
        )  # fmt: skip

    traits = (p.dtype, gather_p, gather_q)
    run(rows, "weight_grad", num_n, num_m, traits, launch)
    return grad
