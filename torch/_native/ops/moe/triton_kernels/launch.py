"""Launchers: allocate the outputs of the expert MLP and launch its kernels.

The arguments are those of ``aten::_moe_mlp`` and ``_moe_mlp_backward``, already
checked. Nothing here reads a tensor's value, picks a device or decides whether Triton
should be used at all: the caller has made the tensors' device current (see
../triton_impl.py). The router is launched in topk.py, the permutation in permutation.py.

Besides torch and Triton this folder imports nothing, so that the kernels run on
releases of torch that lack torch._native.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import triton
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

import torch
from torch import Tensor

from .activations import Activation
from .autotune import Autotuner
from .backward import act_backward_kernel, weight_grad_kernel
from .configs import fitting_configs, itself, KernelTable, OPTIONS, TileConfig
from .forward import grouped_mm_kernel, up_kernel
from .permutation import (
    minimum,
    moe_permutation as moe_permutation,
    schedule_tiles_kernel,
)
from .reductions import (
    bias_dot_kernel,
    bias_grad_kernel,
    combine_kernel,
    scale_grad_kernel,
    zero_tail_kernel,
)


def _is_addressable(x: Tensor) -> bool:
    return x.numel() > 0 and x.data_ptr() % 16 == 0


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """What a launcher has to know about the device.

    Attributes:
        table: tile configurations of its architecture.
        num_sms: its multiprocessors.
        autotuner: chooses among the configurations that fit; None for the first.
        kernel: what is launched in place of a kernel. This and the next three are for a compiler
            that traces the launchers (torch/_inductor/kernel/moe.py), on tensors without memory
            and with symbolic sizes.
        hint: a number in place of a size, where the size decides about speed or is 0.
        is_addressable: whether a tensor has elements, the first at a multiple of 16 bytes.
        ragged: whether a TMA descriptor may have strides that wrap around.
    """

    table: KernelTable
    num_sms: int
    autotuner: Autotuner | None = None
    kernel: Callable[[Any], Any] = itself
    hint: Callable[[int], int] = itself
    is_addressable: Callable[[Tensor], bool] = _is_addressable
    ragged: bool = True


class _Rows:
    """The routed rows of one call, and their tile list per tile height."""

    def __init__(
        self,
        plan: LaunchPlan,
        offs: Tensor,
        row_slots: Tensor | None,
        slot_rows: Tensor | None,
        num_tokens: int,
    ) -> None:
        self.plan = plan
        self.offs = offs.contiguous()
        self.last_offset = self.offs[-1:]
        self.num_experts = offs.shape[0]
        self.has_slots = row_slots is not None
        # The kernels never read it where HAS_SLOTS is False.
        self.row_slots = offs if row_slots is None else row_slots.contiguous()
        self.slot_rows = None if slot_rows is None else slot_rows.contiguous()
        self.top_k = 1 if slot_rows is None else slot_rows.shape[1]
        self.num_rows = num_tokens if row_slots is None else row_slots.shape[0]
        # Of buffers that TMA may read, which needs one where a compiler knows of none.
        self.num_buffer_rows = torch.sym_max(self.num_rows, 1)
        self._tiles: dict[int, Tensor] = {}

    def max_tiles(self, block_m: int) -> int:
        """No routing has more row tiles than this."""
        return self.num_rows // block_m + minimum(self.num_experts, self.num_rows)

    def tiles(self, block_m: int) -> Tensor:
        """(1 + max_tiles, 4) int32 list of ``schedule_tiles_kernel``."""
        if block_m not in self._tiles:
            bound = self.max_tiles(block_m)
            block_t = 64
            tiles = self.offs.new_empty(1 + bound, 4)
            self.plan.kernel(schedule_tiles_kernel)[(triton.cdiv(bound, block_t),)](
                self.offs,
                tiles,
                self.num_experts,
                BLOCK_M=block_m,
                BLOCK_E=min(128, triton.next_power_of_2(self.num_experts)),
                BLOCK_T=block_t,
                **OPTIONS,
            )
            self._tiles[block_m] = tiles
        return self._tiles[block_m]


def _row_major(x: Tensor) -> Tensor:
    """``x`` (rows, C) with unit stride in its last dimension, copied only if it lacks one."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _tma_ok(plan: LaunchPlan, x: Tensor) -> bool:
    """Whether a TMA descriptor can describe ``x``: 16-byte rows, unit last stride."""
    size = x.element_size()
    return (
        x.stride(-1) == 1
        and plan.is_addressable(x)
        and all(s > 0 and s * size % 16 == 0 for s in x.stride()[:-1])
    )


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


_Result = TypeVar("_Result")
# tf32 is what Triton would pick for float32, and is no float32 result; gfx950 has none.
_PRECISION = "ieee"


def _weight_operand(
    w: Tensor, config: TileConfig, block_n: int, use_tma: bool
) -> tuple[object, dict[str, bool]]:
    """The ``w`` argument of a matmul kernel and the flags that describe it.

    Args:
        w: (E, N, K) view of an expert weight.
        config: tile configuration.
        block_n: columns of one weight tile.
        use_tma: pass a TMA descriptor instead of a pointer.
    """
    k_major = w.stride(2) == 1
    operand: object = w
    if use_tma:
        if k_major:
            operand = _descriptor(w, [1, block_n, config.block_k])
        else:
            operand = _descriptor(w.transpose(1, 2), [1, config.block_k, block_n])
    return operand, {"K_MAJOR": k_major, "USE_TMA": use_tma}


def _weight_tma_ok(plan: LaunchPlan, *weights: Tensor) -> bool:
    return all(_tma_ok(plan, w) or _tma_ok(plan, w.mT) for w in weights)


def _tile_args(
    config: TileConfig, num_columns: int, num_inner: int, interleaved: bool = False
) -> dict:
    # A part has gate and up side by side then, and no more columns of H than else.
    parts = config.epilogue_parts * (2 if interleaved else 1)
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
        **OPTIONS,
    }


def _run(
    plan: LaunchPlan,
    kernel: str,
    rows: _Rows,
    num_columns: int,
    num_inner: int,
    traits: tuple[object, ...],
    launch: Callable[[TileConfig], _Result],
) -> _Result:
    """Calls ``launch`` with the configuration of ``kernel`` for this problem.

    Args:
        plan, rows: the call's.
        kernel: an entry of ``configs.KERNELS``.
        num_columns, num_inner: columns of the output and length of the contraction.
        traits: what else decides which code is compiled; for the autotuner.
        launch: launches the kernel; returns what the caller wants.
    """
    density = plan.hint(rows.num_rows) / rows.num_experts
    configs = fitting_configs(plan.table, kernel, num_columns, num_inner, density)
    config = configs[0]
    if plan.autotuner is not None:
        problem = (kernel, num_columns, num_inner, traits, int(density).bit_length())
        config = plan.autotuner.choose(problem, configs, launch)
    return launch(config)


def _grid(plan: LaunchPlan, config: TileConfig, num_tiles: int) -> tuple[int]:
    if config.programs_per_sm:
        num_tiles = minimum(num_tiles, plan.num_sms * config.programs_per_sm)
    return (num_tiles,)


def _zero_tail(plan: LaunchPlan, rows: _Rows, out: Tensor) -> None:
    """Zeroes the rows of ``out`` (R, N) past the last expert's."""
    num_rows, num_columns = out.shape
    block_m, block_n = 8, 512
    grid = (
        minimum(triton.cdiv(num_rows, block_m), plan.num_sms),
        triton.cdiv(num_columns, block_n),
    )
    plan.kernel(zero_tail_kernel)[grid](
        out,
        rows.last_offset,
        num_rows,
        num_columns,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        **OPTIONS,
    )


def _combine(rows: _Rows, routed: Tensor, out: Tensor) -> None:
    """out (T, D) = per token, the sum of its rows of ``routed`` (R, D)."""
    num_tokens, dim = out.shape
    block_d = min(512, triton.next_power_of_2(dim))
    block_t = 4
    grid = (triton.cdiv(num_tokens, block_t), triton.cdiv(dim, block_d))
    rows.plan.kernel(combine_kernel)[grid](
        routed,
        rows.slot_rows,
        out,
        num_tokens,
        dim,
        TOP_K=rows.top_k,
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        **OPTIONS,
    )


def _finish_rows(
    plan: LaunchPlan, rows: _Rows, routed: Tensor, num_tokens: int, combine: bool
) -> Tensor:
    """Per token (T, D), or if not ``combine`` per row (R, D), what ``routed`` (R, D) says."""
    if rows.slot_rows is None:
        _zero_tail(plan, rows, routed)
    elif combine:
        output = routed.new_empty(num_tokens, routed.shape[1])
        _combine(rows, routed, output)
        return output
    return routed


def _slot_weights(topk_weights: Tensor | None) -> Tensor | None:
    """(T*K,) contiguous; ``reshape`` alone keeps the stride of (T, 1) and of an expanded one."""
    return None if topk_weights is None else topk_weights.contiguous().view(-1)


def _nothing_to_do(plan: LaunchPlan, *sizes: int) -> bool:
    return any(plan.hint(size) == 0 for size in sizes)


def _gate_and_up(
    w_in: Tensor, w_up: Tensor | None, act: Activation
) -> tuple[Tensor, Tensor]:
    """The (E, F, D) weights of gate and up; ``w_in`` twice where they are not two."""
    if w_up is not None:
        return w_in, w_up
    if act.gated and not act.gate_interleaved:
        num_hidden = w_in.shape[1] // 2
        return w_in[:, :num_hidden], w_in[:, num_hidden:]
    return w_in, w_in


def _up(
    plan: LaunchPlan,
    rows: _Rows,
    x: Tensor,
    w_in: Tensor,
    w_up: Tensor | None,
    b_in: Tensor | None,
    act: Activation,
    preact: Tensor,
    hidden: Tensor,
    store_preact: bool,
) -> None:
    """preact (R, g*F) = H if ``store_preact``, and hidden (R, F) = act(H)."""
    dim, num_hidden = w_in.shape[2], hidden.shape[1]
    gate, up = _gate_and_up(w_in, w_up, act)
    adjacent = act.gated and not act.gate_interleaved and w_up is None

    def launch(config: TileConfig) -> None:
        width = config.block_n * (2 if act.gate_interleaved else 1)
        use_tma = config.tma and _weight_tma_ok(plan, gate, up)
        gate_operand, w_flags = _weight_operand(gate, config, width, use_tma)
        up_operand, _ = _weight_operand(up, config, width, use_tma)
        paired = use_tma and adjacent and w_flags["K_MAJOR"]
        if paired:
            gate_operand = up_operand = _descriptor(
                w_in.unflatten(1, (2, num_hidden)),
                [1, 2, config.block_n, config.block_k],
            )
        num_n = triton.cdiv(num_hidden, config.block_n)
        grid = _grid(plan, config, rows.max_tiles(config.block_m) * num_n)
        plan.kernel(up_kernel)[grid](
            x,
            gate_operand,
            up_operand,
            w_in if b_in is None else b_in,
            rows.row_slots,
            rows.tiles(config.block_m),
            preact,
            hidden,
            dim,
            num_hidden,
            rows.top_k,
            x.stride(0),
            *gate.stride(),
            *up.stride(),
            *((0, 0) if b_in is None else b_in.stride()),
            **act.kernel_args(),
            PAIRED=paired,
            HAS_SLOTS=rows.has_slots,
            HAS_BIAS=b_in is not None,
            STORE_PREACT=store_preact,
            PRECISION=_PRECISION,
            **w_flags,
            **_tile_args(config, num_hidden, dim, act.gate_interleaved),
        )

    kernel = "up_gated" if act.gated else "up_plain"
    traits = (x.dtype, act, adjacent, w_in.stride(2) == 1, store_preact)
    _run(plan, kernel, rows, num_hidden, dim, traits, launch)


def _grouped_mm(
    plan: LaunchPlan,
    kernel: str,
    rows: _Rows,
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    out: Tensor,
    w_up: Tensor | None = None,
) -> None:
    """out (R, N) = scale * (a (R, P) @ w (E, N, P)^T + bias (E, N)) by expert.

    With ``w_up`` (E, N, P) too, ``a`` is (R, 2P), and its halves are multiplied with
    ``w`` and ``w_up``.
    """
    num_columns, num_inner = w.shape[1:]
    weights = (w, w if w_up is None else w_up)
    halves = (a, a) if w_up is None else (a[:, :num_inner], a[:, num_inner:])

    def launch(config: TileConfig) -> None:
        use_tma = config.tma and _tma_ok(plan, a) and _weight_tma_ok(plan, *weights)
        w_operands = [
            _weight_operand(x, config, config.block_n, use_tma) for x in weights
        ]
        a_operands: tuple[object, ...] = halves
        if use_tma:
            block = [config.block_m, config.block_k]
            a_operands = tuple(_descriptor(half, block) for half in halves)
        num_n = triton.cdiv(num_columns, config.block_n)
        grid = _grid(plan, config, rows.max_tiles(config.block_m) * num_n)
        plan.kernel(grouped_mm_kernel)[grid](
            a_operands[0],
            w_operands[0][0],
            a_operands[1],
            w_operands[1][0],
            w if bias is None else bias,
            w if scale is None else scale,
            rows.row_slots,
            rows.tiles(config.block_m),
            out,
            num_columns,
            num_inner,
            *weights[0].stride(),
            *weights[1].stride(),
            *((0, 0) if bias is None else bias.stride()),
            TWO_WEIGHTS=w_up is not None,
            HAS_SLOTS=rows.has_slots,
            HAS_BIAS=bias is not None,
            HAS_SCALE=scale is not None,
            PRECISION=_PRECISION,
            **w_operands[0][1],
            **_tile_args(config, num_columns, num_inner),
        )

    traits = (a.dtype, w.stride(2) == 1, scale is not None, w_up is not None)
    _run(plan, kernel, rows, num_columns, num_inner, traits, launch)


def moe_mlp_forward(
    plan: LaunchPlan,
    input: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    offs: Tensor,
    topk_weights: Tensor | None,
    row_slots: Tensor | None,
    slot_rows: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
    w_up: Tensor | None,
    act: Activation,
    *,
    compute_preact: bool = True,
    combine: bool = True,
) -> tuple[Tensor, Tensor]:
    """``aten::_moe_mlp``: output (T, D) and preact (R, g*F), or (0, g*F).

    Without ``combine``, and with ``slot_rows``, the first one is the experts' rows (R, D), which
    the caller sums per token; those of no expert have undefined values.
    """
    num_tokens, dim = input.shape
    num_hidden = w_out.shape[2]
    rows = _Rows(plan, offs, row_slots, slot_rows, num_tokens)
    width = num_hidden * (2 if act.gated else 1)
    preact = input.new_empty(rows.num_rows if compute_preact else 0, width)
    if _nothing_to_do(plan, num_tokens, rows.num_rows, dim, num_hidden):
        return input.new_zeros(num_tokens, dim), preact.zero_()

    hidden = input.new_empty(rows.num_buffer_rows, num_hidden)
    _up(
        plan,
        rows,
        _row_major(input),
        w_in,
        w_up,
        b_in,
        act,
        preact,
        hidden,
        compute_preact,
    )
    if compute_preact:
        _zero_tail(plan, rows, preact)
    scale = _slot_weights(topk_weights)
    routed = input.new_empty(rows.num_rows, dim)
    _grouped_mm(plan, "down", rows, hidden, w_out, b_out, scale, routed)
    return _finish_rows(plan, rows, routed, num_tokens, combine), preact


def _act_backward(
    plan: LaunchPlan,
    rows: _Rows,
    grad_out: Tensor,
    w_out: Tensor,
    b_out: Tensor | None,
    preact: Tensor,
    scale: Tensor | None,
    act: Activation,
    *,
    need_hidden: bool,
    need_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dH (R, g*F), A' (R, F) or empty, dS partials (P, R) float32 or empty."""
    dim, num_hidden = w_out.shape[1:]
    w = w_out.transpose(1, 2)
    grad_preact = preact.new_empty(rows.num_buffer_rows, preact.shape[1])
    scaled_hidden = preact.new_empty(
        rows.num_buffer_rows if need_hidden else 0, num_hidden
    )

    def launch(config: TileConfig) -> Tensor:
        num_n = triton.cdiv(num_hidden, config.block_n)
        num_partials = num_n + (b_out is not None) if need_scale else 0
        partials = preact.new_empty(num_partials, rows.num_rows, dtype=torch.float32)
        use_tma = config.tma and _weight_tma_ok(plan, w)
        w_operand, w_flags = _weight_operand(w, config, config.block_n, use_tma)
        grid = (rows.max_tiles(config.block_m) * num_n,)
        plan.kernel(act_backward_kernel)[grid](
            grad_out,
            w_operand,
            preact,
            preact if scale is None else scale,
            rows.row_slots,
            rows.tiles(config.block_m),
            grad_preact,
            scaled_hidden,
            partials,
            dim,
            num_hidden,
            rows.num_rows,
            rows.top_k,
            grad_out.stride(0),
            *w_out.stride(),
            **act.kernel_args(),
            HAS_SLOTS=rows.has_slots,
            HAS_SCALE=scale is not None,
            STORE_HIDDEN=need_hidden,
            STORE_PARTIALS=need_scale,
            PRECISION=_PRECISION,
            **w_flags,
            **_tile_args(config, num_hidden, dim, act.gate_interleaved),
        )
        return partials

    traits = (preact.dtype, act, w.stride(2) == 1, need_hidden, need_scale)
    partials = _run(plan, "act_backward", rows, num_hidden, dim, traits, launch)
    if need_scale and b_out is not None:
        _bias_dot(rows, grad_out, b_out, partials[-1])
    return grad_preact, scaled_hidden, partials


def _bias_dot(rows: _Rows, grad_out: Tensor, b_out: Tensor, partial: Tensor) -> None:
    """partial (R,) = what the output bias adds to dS."""
    dim, block_m = grad_out.shape[1], 16
    rows.plan.kernel(bias_dot_kernel)[(rows.max_tiles(block_m),)](
        grad_out,
        b_out,
        rows.row_slots,
        rows.tiles(block_m),
        partial,
        dim,
        rows.top_k,
        grad_out.stride(0),
        *b_out.stride(),
        HAS_SLOTS=rows.has_slots,
        BLOCK_M=block_m,
        BLOCK_D=min(512, triton.next_power_of_2(dim)),
        **OPTIONS,
    )


def _scale_grad(rows: _Rows, partials: Tensor, topk_weights: Tensor | None) -> Tensor:
    """d(topk_weights) (T, K) from the dS partials (P, R)."""
    assert topk_weights is not None
    grad = torch.empty_like(topk_weights, memory_format=torch.contiguous_format)
    block = 256
    rows.plan.kernel(scale_grad_kernel)[(triton.cdiv(grad.numel(), block),)](
        partials,
        rows.last_offset if rows.slot_rows is None else rows.slot_rows,
        grad,
        grad.numel(),
        rows.num_rows,
        partials.shape[0],
        HAS_SLOTS=rows.has_slots,
        BLOCK=block,
        **OPTIONS,
    )
    return grad


def _weight_grad(
    plan: LaunchPlan,
    rows: _Rows,
    p: Tensor,
    q: Tensor,
    w: Tensor,
    *,
    gather_p: bool = False,
    gather_q: bool = False,
) -> Tensor:
    """(E, M, N) like ``w``: per expert, the sum over its rows of p^T q.

    Args:
        plan, rows: the call's.
        p: (R, M) rows, or (T, M) when ``gather_p``.
        q: (R, N) rows, or (T, N) when ``gather_q``.
        w: the weight, whose strides the gradient follows.
        gather_p, gather_q: the operand is per token.
    """
    grad = torch.empty_like(w)
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
            and (gather_p or _tma_ok(plan, p))
            and (gather_q or _tma_ok(plan, q))
        )
        ragged = use_tma and plan.ragged and rows.num_rows <= 1 << 30
        describe = create_ragged_descriptor if ragged else _descriptor
        p_desc = q_desc = rows.offs
        if use_tma and not gather_p:
            p_desc = describe(p, [config.block_k, config.block_m])
        if use_tma and not gather_q:
            q_desc = describe(q, [config.block_k, config.block_n])
        tiles_per_expert = triton.cdiv(num_m, config.block_m) * triton.cdiv(
            num_n, config.block_n
        )
        tile_args = _tile_args(config, num_n, num_m)
        tile_args["EVEN_M"] = num_m % config.block_m == 0
        # The contraction runs over rows, and the epilogue only stores.
        del tile_args["EVEN_K"], tile_args["EPILOGUE_PARTS"]
        if not (gather_p or gather_q):
            # No stage goes to the rows' slots; as many tiles as with a gather fit.
            tile_args["num_stages"] = (config.num_stages + 1) // 2
        grid = _grid(plan, config, rows.num_experts * tiles_per_expert)
        plan.kernel(weight_grad_kernel)[grid](
            p,
            q,
            p_desc,
            q_desc,
            rows.row_slots,
            rows.offs,
            out,
            num_m,
            num_n,
            rows.num_experts,
            p.stride(0),
            q.stride(0),
            *out.stride(),
            TOP_K=rows.top_k,
            GATHER_P=gather_p,
            GATHER_Q=gather_q,
            USE_TMA=use_tma,
            RAGGED=ragged,
            PRECISION=_PRECISION,
            **tile_args,
        )

    traits = (p.dtype, gather_p, gather_q)
    _run(plan, "weight_grad", rows, num_n, num_m, traits, launch)
    return grad


def _bias_grad(
    rows: _Rows,
    source: Tensor,
    bias: Tensor | None,
    *,
    scale: Tensor | None = None,
    gather: bool = False,
) -> Tensor:
    """(E, N) contiguous: per expert, the sum of scale * source over its rows."""
    assert bias is not None
    grad = torch.empty_like(bias, memory_format=torch.contiguous_format)
    num_experts, num_columns = grad.shape
    block_n = 128
    grid = (num_experts, triton.cdiv(num_columns, block_n))
    rows.plan.kernel(bias_grad_kernel)[grid](
        source,
        source if scale is None else scale,
        rows.row_slots,
        rows.offs,
        grad,
        num_columns,
        rows.top_k,
        source.stride(0),
        *grad.stride(),
        GATHER=gather and rows.has_slots,
        HAS_SLOTS=rows.has_slots,
        HAS_SCALE=scale is not None,
        BLOCK_R=32,
        BLOCK_N=block_n,
        **OPTIONS,
    )
    return grad


def _input_grad(
    plan: LaunchPlan,
    rows: _Rows,
    grad_preact: Tensor,
    w_in: Tensor,
    w_up: Tensor | None,
) -> Tensor:
    """(R, D): dH @ (w_in, w_up), whose rows a token sums to its dX."""
    routed = grad_preact.new_empty(rows.num_rows, w_in.shape[2])
    _grouped_mm(
        plan,
        "input_grad",
        rows,
        grad_preact,
        w_in.transpose(1, 2),
        None,
        None,
        routed,
        None if w_up is None else w_up.transpose(1, 2),
    )
    return routed


def _zero_gradients(
    operands: tuple[Tensor | None, ...], output_mask: tuple[bool, ...], like: Tensor
) -> tuple[Tensor, ...]:
    """Those of weights (E, M, N) with their strides, all others contiguous."""
    formats = {True: torch.preserve_format, False: torch.contiguous_format}
    return tuple(
        torch.zeros_like(x, memory_format=formats[x.dim() == 3])
        if wanted and x is not None
        else like.new_empty(0)
        for x, wanted in zip(operands, output_mask, strict=True)
    )


def moe_mlp_backward(
    plan: LaunchPlan,
    grad_out: Tensor,
    input: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    offs: Tensor,
    topk_weights: Tensor | None,
    row_slots: Tensor | None,
    slot_rows: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
    w_up: Tensor | None,
    preact: Tensor,
    output_mask: tuple[bool, ...],
    act: Activation,
    *,
    combine: bool = True,
) -> tuple[Tensor, ...]:
    """``aten::_moe_mlp_backward``: the seven gradients in ``output_mask`` order.

    A gradient that is masked out, or whose operand is absent, is a tensor of
    shape (0,). Without ``combine`` that of the input is left in rows as by
    ``moe_mlp_forward``.
    """
    operands = (input, w_in, w_out, topk_weights, b_in, b_out, w_up)
    num_tokens, dim = input.shape
    rows = _Rows(plan, offs, row_slots, slot_rows, num_tokens)
    if _nothing_to_do(plan, num_tokens, rows.num_rows, dim, w_out.shape[2]):
        return _zero_gradients(operands, output_mask, input)

    grads = [input.new_empty(0) for _ in operands]
    want_x, want_w_in, want_w_out, want_scale, want_b_in, want_b_out, want_w_up = (
        wanted and operand is not None
        for wanted, operand in zip(output_mask, operands, strict=True)
    )
    x, grad_out = _row_major(input), _row_major(grad_out)
    scale = _slot_weights(topk_weights)
    if not any((want_x, want_w_in, want_w_out, want_scale, want_b_in, want_w_up)):
        if want_b_out:
            grads[5] = _bias_grad(rows, grad_out, b_out, scale=scale, gather=True)
        return tuple(grads)
    grad_preact, scaled_hidden, partials = _act_backward(
        plan,
        rows,
        grad_out,
        w_out,
        b_out,
        preact.contiguous(),
        scale,
        act,
        need_hidden=want_w_out,
        need_scale=want_scale,
    )
    if want_x:
        routed = _input_grad(plan, rows, grad_preact, w_in, w_up)
        grads[0] = _finish_rows(plan, rows, routed, num_tokens, combine)
    if want_w_in:
        grad_gate = grad_preact[:, : w_in.shape[1]]
        grads[1] = _weight_grad(plan, rows, grad_gate, x, w_in, gather_q=True)
    if want_w_out:
        grads[2] = _weight_grad(
            plan, rows, grad_out, scaled_hidden, w_out, gather_p=True
        )
    if want_scale:
        grads[3] = _scale_grad(rows, partials, topk_weights)
    if want_b_in:
        grads[4] = _bias_grad(rows, grad_preact, b_in)
    if want_b_out:
        grads[5] = _bias_grad(rows, grad_out, b_out, scale=scale, gather=True)
    if want_w_up and w_up is not None:
        grad_up = grad_preact[:, w_in.shape[1] :]
        grads[6] = _weight_grad(plan, rows, grad_up, x, w_up, gather_q=True)
    return tuple(grads)
