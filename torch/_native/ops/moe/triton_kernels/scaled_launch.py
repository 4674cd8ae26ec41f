"""Launchers of ``aten::_moe_mlp_scaled`` and its backward, in FP8.

As launch.py, whose tile lists and memory-bound kernels these are: arguments are checked
(../../moe_scaled/triton_impl.py), and nothing here reads a tensor's value. Rows of tokens
and weights that do not come quantised are quantised by ``aten::_moe_quantize``; what kernels
make (A, dH) they quantise in their epilogues.
"""

from typing import Any, NamedTuple

import triton

import torch
from torch import Tensor

from .activations import Activation
from .configs import OPTIONS, TileConfig
from .launch import (
    _bias_dot,
    _bias_grad,
    _descriptor,
    _finish_rows,
    _nothing_to_do,
    _row_major,
    _Rows,
    _run,
    _scale_grad,
    _slot_weights,
    _tile_args,
    _tma_ok,
    _weight_grad,
    _zero_gradients,
    _zero_tail,
    LaunchPlan,
)
from .scaled_backward import (
    column_scales_kernel,
    columns_kernel,
    scaled_act_backward_kernel,
    scaled_weight_grad_kernel,
)
from .scaled_forward import scaled_mm_kernel, scaled_up_kernel
from .scaled_operands import Preact, PREACT_BLOCK, Quantized, Recipe


_E4M3 = torch.float8_e4m3fn
_PREACT_RECIPE = torch.nn.functional.ScalingType.BlockWise1x32.value
# Rows of an expert's columns: ALIGNMENT of scaled_backward.py.
_PLACE = 128


def _weight_args(
    plan: LaunchPlan, config: TileConfig, *weights: Quantized
) -> tuple[list[object], dict[str, bool]]:
    """What kernels take for the codes of ``weights``, which have one layout, and its flag."""
    use_tma = config.tma and all(_tma_ok(plan, w.codes) for w in weights)
    operands: list[object] = [w.codes for w in weights]
    if use_tma:
        block = [1, config.block_n, config.block_k]
        operands = [_descriptor(w.codes, block) for w in weights]
    return operands, {"USE_TMA": use_tma}


def _strides(w: Quantized) -> tuple[int, ...]:
    return (*w.codes.stride()[:2], *w.scale.stride())


def _scaled_tile_args(
    recipe: Recipe, config: TileConfig, num_columns: int, num_inner: int
) -> dict[str, Any]:
    args = _tile_args(config, num_columns, num_inner)
    # Only one kernel takes its epilogue in parts.
    del args["EPILOGUE_PARTS"]
    return {"BLOCK": recipe.block, "WIDEN": recipe.widen, **args}


def _up(
    plan: LaunchPlan,
    rows: _Rows,
    recipe: Recipe,
    x: Quantized,
    w: Quantized,
    w_up: Quantized | None,
    b_in: Tensor | None,
    act: Activation,
    product_type: torch.dtype,
    preact: Preact,
    hidden: Quantized,
    store_preact: bool,
) -> None:
    """preact = H if ``store_preact``, and hidden (R, F) = act(H)."""
    dim, num_hidden = x.codes.shape[1], hidden.codes.shape[1]
    gate, up, square, up_shift = recipe.gate_and_up(w, w_up, act)

    def launch(config: TileConfig) -> None:
        operands, flags = _weight_args(plan, config, gate, up)
        num_n = triton.cdiv(num_hidden, config.block_n)
        grid = (rows.max_tiles(config.block_m) * num_n,)
        plan.kernel(scaled_up_kernel)[grid](
            x.codes,
            x.scale,
            *operands,
            gate.scale,
            up.scale,
            gate.scale if b_in is None else b_in,
            rows.row_slots,
            rows.tiles(config.block_m),
            preact.values,
            preact.scale,
            hidden.codes,
            hidden.scale,
            dim,
            num_hidden,
            rows.top_k,
            *_strides(gate),
            *((0, 0) if b_in is None else b_in.stride()),
            **act.kernel_args(),
            HAS_SLOTS=rows.has_slots,
            HAS_BIAS=b_in is not None,
            STORE_PREACT=store_preact,
            ROUND=product_type == torch.bfloat16,
            INT8=preact.is_int8,
            SQUARE=square,
            UP_SHIFT=up_shift,
            **flags,
            **_scaled_tile_args(recipe, config, num_hidden, dim),
        )

    kernel = recipe.kernel("up_gated" if act.gated else "up_plain")
    traits = (product_type, act, preact.values.dtype, store_preact)
    _run(plan, kernel, rows, num_hidden, dim, traits, launch)


def _scaled_mm(
    plan: LaunchPlan,
    kernel: str,
    rows: _Rows,
    recipe: Recipe,
    a: Quantized,
    w: Quantized,
    w_up: Quantized | None,
    bias: Tensor | None,
    scale: Tensor | None,
    out: Tensor,
) -> None:
    """out (R, N) = scale * (a (R, P) @ w (E, N, P)^T + bias (E, N)) by expert.

    With ``w_up`` too, the halves of ``a`` (R, 2P) are multiplied with ``w`` and ``w_up``.
    """
    num_columns, num_inner = w.codes.shape[1:]
    second = w if w_up is None else w_up

    def launch(config: TileConfig) -> None:
        operands, flags = _weight_args(plan, config, w, second)
        num_n = triton.cdiv(num_columns, config.block_n)
        grid = (rows.max_tiles(config.block_m) * num_n,)
        plan.kernel(scaled_mm_kernel)[grid](
            a.codes.view(_E4M3),
            a.scale,
            operands[0],
            w.scale,
            operands[1],
            second.scale,
            w.scale if bias is None else bias,
            w.scale if scale is None else scale,
            rows.row_slots,
            rows.tiles(config.block_m),
            out,
            num_columns,
            num_inner,
            *_strides(w),
            *((0, 0) if bias is None else bias.stride()),
            TWO_WEIGHTS=w_up is not None,
            HAS_SLOTS=rows.has_slots,
            HAS_BIAS=bias is not None,
            HAS_SCALE=scale is not None,
            SQUARE=recipe.square,
            **flags,
            **_scaled_tile_args(recipe, config, num_columns, num_inner),
        )

    traits = (out.dtype, scale is not None, w_up is not None)
    _run(plan, recipe.kernel(kernel), rows, num_columns, num_inner, traits, launch)


def _product_type(x: Tensor) -> torch.dtype:
    """In which H, A and their gradients are rounded: quantised numbers are exact in it."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32


def _preact_room(
    like: Tensor,
    num_rows: int | torch.SymInt,
    width: int,
    dtype: torch.dtype,
    is_kept: bool,
    splits_blocks: bool,
) -> tuple[Tensor, Tensor, Preact]:
    """preact, preact_scale, and what the kernel writes: these, or H before it is quantised."""
    preact = like.new_empty(num_rows, width, dtype=dtype)
    absent = like.new_empty(0)
    if preact.element_size() > 1 or not is_kept:
        return preact, absent, Preact.of(preact, absent)
    # Bytes: a compiler does not allocate the type.
    num_blocks = triton.cdiv(width, PREACT_BLOCK)
    scale = like.new_empty(num_rows, num_blocks, dtype=torch.uint8)
    kept = Preact.of(preact, scale)
    if splits_blocks:
        values = like.new_empty(num_rows, width, dtype=_product_type(like))
        kept = Preact.of(values, values)
    return preact, scale.view(torch.float8_e8m0fnu), kept


def moe_mlp_scaled_forward(
    plan: LaunchPlan,
    input: Tensor,
    w_in: Tensor | None,
    w_out: Tensor | None,
    offs: Tensor,
    topk_weights: Tensor | None,
    row_slots: Tensor | None,
    slot_rows: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
    w_up: Tensor | None,
    input_scaled: list[Tensor],
    w_in_scaled: list[Tensor],
    w_out_scaled: list[Tensor],
    w_up_scaled: list[Tensor],
    *,
    recipe: Recipe,
    preact_dtype: torch.dtype | None,
    act: Activation,
    compute_preact: bool = True,
    combine: bool = True,
) -> tuple[Tensor, ...]:
    """``aten::_moe_mlp_scaled``: output, input_data, input_scale, preact, preact_scale.

    ``combine`` is that of ``launch.moe_mlp_forward``.
    """
    num_tokens, dim = input.shape
    rows = _Rows(plan, offs, row_slots, slot_rows, num_tokens)
    absent = input.new_empty
    saved = (absent(0), absent(0))
    if not input_scaled:
        saved = torch.ops.aten._moe_quantize(_row_major(input), recipe.rows)
        input_scaled = list(saved)
    # pyrefly: ignore[missing-attribute]
    num_hidden = (w_out_scaled[0] if w_out is None else w_out).shape[2]
    width = num_hidden * (2 if act.gated else 1)
    preact, preact_scale, kept = _preact_room(
        input,
        rows.num_rows if compute_preact else 0,
        width,
        input.dtype if preact_dtype is None else preact_dtype,
        compute_preact,
        act.gated and not act.gate_interleaved and num_hidden % PREACT_BLOCK != 0,
    )
    if _nothing_to_do(plan, num_tokens, rows.num_rows):
        for x in (preact, preact_scale):
            x.view(torch.uint8).zero_()
        return input.new_zeros(num_tokens, dim), *saved, preact, preact_scale

    w = recipe.weight(w_in, w_in_scaled)
    up = recipe.weight(w_up, w_up_scaled)
    out_weight = recipe.weight(w_out, w_out_scaled)
    product_type = _product_type(input)
    hidden = recipe.room(input, rows.num_buffer_rows, num_hidden, product_type)
    x = Quantized.of(*input_scaled)
    _up(
        plan,
        rows,
        recipe,
        x,
        w,
        up,
        b_in,
        act,
        product_type,
        kept,
        hidden,
        compute_preact,
    )
    if compute_preact:
        _zero_tail(plan, rows, kept.values)
        if kept.values.dtype == torch.uint8:
            _zero_tail(plan, rows, kept.scale)
        elif preact.element_size() == 1:
            preact, preact_scale = torch.ops.aten._moe_quantize(
                kept.values, _PREACT_RECIPE, dtype=preact.dtype
            )
    hidden = recipe.finished(hidden)
    scale = _slot_weights(topk_weights)
    routed = absent(rows.num_rows, dim)
    _scaled_mm(
        plan, "down", rows, recipe, hidden, out_weight, None, b_out, scale, routed
    )
    output = _finish_rows(plan, rows, routed, num_tokens, combine)
    return output, *saved, preact, preact_scale


class _ActGrads(NamedTuple):
    """What comes of ``scaled_act_backward_kernel``; parts without a taker have no rows."""

    codes: Quantized  # dH (R, g*F)
    values: Tensor  # dH, not quantised
    scaled_hidden: Tensor  # A' (R, F)
    partials: Tensor  # (P, R) float32


def _act_backward(
    plan: LaunchPlan,
    rows: _Rows,
    recipe: Recipe,
    grad_out: Tensor,
    grad_codes: Quantized,
    w: Quantized,
    b_out: Tensor | None,
    preact: Preact,
    scale: Tensor | None,
    act: Activation,
    has_up: bool,
    *,
    need_codes: bool,
    need_values: bool,
    need_hidden: bool,
    need_scale: bool,
) -> _ActGrads:
    num_hidden, dim = w.codes.shape[1:]
    width = preact.values.shape[1]
    product_type = _product_type(grad_out)

    def empty(needed: bool, columns: int) -> Tensor:
        num_rows = rows.num_buffer_rows if needed else 0
        return grad_out.new_empty(num_rows, columns, dtype=product_type)

    # Scales that an epilogue cannot know are those of numbers that were stored.
    behind = need_codes and recipe.scales_behind(act, has_up, num_hidden)
    stores_codes = need_codes and not behind
    halves = 1 if act.gate_interleaved else width // num_hidden
    num_rows = rows.num_buffer_rows if stores_codes else 0
    codes = recipe.room(grad_out, num_rows, width // halves, product_type, halves)
    values = empty(need_values or behind, width)
    hidden = empty(need_hidden, num_hidden)

    def launch(config: TileConfig) -> Tensor:
        num_n = triton.cdiv(num_hidden, config.block_n)
        num_partials = num_n + (b_out is not None) if need_scale else 0
        partials = grad_out.new_empty(num_partials, rows.num_rows, dtype=torch.float32)
        operands, flags = _weight_args(plan, config, w)
        grid = (rows.max_tiles(config.block_m) * num_n,)
        plan.kernel(scaled_act_backward_kernel)[grid](
            grad_codes.codes,
            grad_codes.scale,
            *operands,
            w.scale,
            preact.values,
            preact.scale,
            w.scale if scale is None else scale,
            rows.row_slots,
            rows.tiles(config.block_m),
            codes.codes,
            codes.scale,
            values,
            hidden,
            partials,
            dim,
            num_hidden,
            rows.num_rows,
            rows.top_k,
            *_strides(w),
            **act.kernel_args(),
            HAS_SLOTS=rows.has_slots,
            HAS_SCALE=scale is not None,
            STORE_CODES=stores_codes,
            STORE_VALUES=need_values or behind,
            STORE_HIDDEN=need_hidden,
            STORE_PARTIALS=need_scale,
            ROUND=product_type == torch.bfloat16,
            INT8=preact.is_int8,
            ALIGNED=num_hidden % PREACT_BLOCK == 0,
            SQUARE=recipe.square,
            EPILOGUE_PARTS=config.epilogue_parts,
            **flags,
            **_scaled_tile_args(recipe, config, num_hidden, dim),
        )
        return partials

    needs = (stores_codes, need_values or behind, need_hidden, need_scale)
    traits = (product_type, act, preact.values.dtype, *needs)
    kernel = recipe.kernel("act_backward")
    partials = _run(plan, kernel, rows, num_hidden, dim, traits, launch)
    if need_scale and b_out is not None:
        _bias_dot(rows, grad_out, b_out, partials[-1])
    if behind:
        codes = recipe.finished(Quantized(values, values), 2 if has_up else 1)
    return _ActGrads(codes, values, hidden, partials)


def _columns(
    rows: _Rows,
    recipe: Recipe,
    source: Tensor,
    source_scale: Tensor | None,
    *,
    gather: bool = False,
) -> Quantized:
    """(N, length) codes of the columns of ``source`` (R, N), or (T, N) when ``gather``.

    Args:
        rows, recipe: the call's.
        source: codes if it has a scale.
        source_scale: (R or T, blocks).
        gather: the operand is per token.
    """
    num_columns = source.shape[1]
    # Block j of the expert e, whose rows begin at b, is b // 128 + e + j.
    places = rows.num_rows // _PLACE + rows.num_experts
    length = places * _PLACE
    codes = source.new_empty(num_columns, length, dtype=torch.uint8)
    # Of whole columns, one of each expert.
    num_blocks = length // recipe.block if recipe.block else rows.num_experts
    # As they are read: of neighbouring columns side by side, or of one.
    together = recipe.block != 32
    shape = (num_blocks, num_columns) if together else (num_columns, num_blocks)
    scale = source.new_empty(shape, dtype=recipe.scale_dtype)
    if source_scale is not None:
        source = source.view(torch.uint8)
    operands = (
        source,
        codes if source_scale is None else source_scale,
        rows.row_slots,
        rows.offs,
    )
    sizes = (num_columns, rows.top_k, source.stride(0))
    sizes += (0 if source_scale is None else source_scale.stride(0),)
    options = {"GATHER": gather and rows.has_slots, "BLOCK_N": 128, "num_warps": 8}
    options |= OPTIONS
    tiles_n = triton.cdiv(num_columns, options["BLOCK_N"])
    if not recipe.block:
        rows.plan.kernel(column_scales_kernel)[(rows.num_experts, tiles_n)](
            *operands, scale, *sizes, BLOCK_R=64, **options
        )
    if together:
        scale = scale.t()
    rows.plan.kernel(columns_kernel)[(rows.max_tiles(_PLACE), tiles_n)](
        *operands,
        rows.tiles(_PLACE),
        codes,
        scale,
        num_columns,
        length,
        *sizes[1:],
        *scale.stride(),
        BLOCK=recipe.block,
        **options,
    )
    return Quantized(codes.view(_E4M3), scale)


def _scaled_weight_grad(
    plan: LaunchPlan, rows: _Rows, recipe: Recipe, p: Quantized, q: Quantized, w: Tensor
) -> Tensor:
    """(E, M, N) like ``w``: per expert, the sum over its rows of p (M, length) q (N, length)^T."""
    grad = torch.empty_like(w)
    out = grad
    if grad.stride(1) == 1 and grad.stride(2) != 1:
        # The transposed product stores along the contiguous dimension.
        p, q, out = q, p, grad.transpose(1, 2)
    num_m, num_n = out.shape[1:]

    def launch(config: TileConfig) -> None:
        tiles = triton.cdiv(num_m, config.block_m) * triton.cdiv(num_n, config.block_n)
        args = _scaled_tile_args(recipe, config, num_n, num_m)
        args["EVEN_M"] = num_m % config.block_m == 0
        del args["EVEN_K"]
        plan.kernel(scaled_weight_grad_kernel)[(rows.num_experts * tiles,)](
            p.codes,
            p.scale,
            q.codes,
            q.scale,
            rows.offs,
            out,
            num_m,
            num_n,
            p.codes.shape[1],
            rows.num_experts,
            *p.scale.stride(),
            *q.scale.stride(),
            *out.stride(),
            **args,
        )

    kernel = recipe.kernel("weight_grad")
    _run(plan, kernel, rows, num_n, num_m, (w.dtype,), launch)
    return grad


def _recomputed_preact(
    plan: LaunchPlan,
    rows: _Rows,
    recipe: Recipe,
    x: Quantized,
    w: Quantized,
    w_up: Quantized | None,
    b_in: Tensor | None,
    act: Activation,
    like: Tensor,
    num_hidden: int,
) -> Preact:
    width = num_hidden * (2 if act.gated else 1)
    product_type = _product_type(like)
    values = like.new_empty(rows.num_rows, width, dtype=product_type)
    preact = Preact.of(values, values)
    hidden = recipe.room(like, rows.num_buffer_rows, num_hidden, product_type)
    _up(plan, rows, recipe, x, w, w_up, b_in, act, product_type, preact, hidden, True)
    return preact


class _WeightGrads:
    """Gradients of weights, from columns that are made once.

    Args:
        x: rows of X.
        grad_out: dO (T, D) and its codes.
        act_grads: of ``_act_backward``.
        hp_wgrad: products in 16 bits instead of codes of columns.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        rows: _Rows,
        recipe: Recipe,
        x: Quantized,
        grad_out: tuple[Tensor, Quantized],
        act_grads: _ActGrads,
        hp_wgrad: bool,
    ) -> None:
        self.plan, self.rows, self.recipe, self.hp = plan, rows, recipe, hp_wgrad
        self.x, self.grad_out, self.act_grads = x, grad_out, act_grads

    def of_w_out(self, w: Tensor) -> Tensor:
        values, codes = self.grad_out
        hidden = self.act_grads.scaled_hidden
        if self.hp:
            values = values.to(hidden.dtype)
            return _weight_grad(self.plan, self.rows, values, hidden, w, gather_p=True)
        p = _columns(self.rows, self.recipe, *codes, gather=True)
        q = _columns(self.rows, self.recipe, hidden, None)
        return _scaled_weight_grad(self.plan, self.rows, self.recipe, p, q, w)

    def of_w_in(self, *weights: Tensor | None, halves: int) -> list[Tensor]:
        """Of ``w_in``, or with two ``halves`` of gate and up; of those that are given."""

        def half(x: Tensor, i: int) -> Tensor:
            width = x.shape[1] // halves
            return x[:, i * width : (i + 1) * width]

        plan, rows, recipe = self.plan, self.rows, self.recipe
        given = [(i, w) for i, w in enumerate(weights) if w is not None]
        if self.hp:
            values = self.act_grads.values
            x = recipe.values(self.x, values.dtype)
            return [
                _weight_grad(plan, rows, half(values, i), x, w, gather_q=True)
                for i, w in given
            ]
        q = _columns(rows, recipe, *self.x, gather=True)
        grads = []
        for i, w in given:
            # Blocks of rows begin with each half.
            p = _columns(rows, recipe, *(half(x, i) for x in self.act_grads.codes))
            grads.append(_scaled_weight_grad(plan, rows, recipe, p, q, w))
        return grads


def moe_mlp_scaled_backward(
    plan: LaunchPlan,
    grad_out: Tensor,
    w_in: Tensor | None,
    w_out: Tensor | None,
    offs: Tensor,
    topk_weights: Tensor | None,
    row_slots: Tensor | None,
    slot_rows: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
    w_up: Tensor | None,
    input_scaled: list[Tensor],
    w_in_scaled: list[Tensor],
    w_out_scaled: list[Tensor],
    w_up_scaled: list[Tensor],
    input_data: Tensor,
    input_scale: Tensor,
    preact: Tensor,
    preact_scale: Tensor,
    output_mask: tuple[bool, ...],
    *,
    recipe: Recipe,
    act: Activation,
    hp_wgrad: bool = False,
    combine: bool = True,
) -> tuple[Tensor, ...]:
    """``aten::_moe_mlp_scaled_backward``: the seven gradients in ``output_mask`` order.

    A gradient that is masked out, or whose operand is absent, has the shape (0,); ``combine`` is
    that of ``launch.moe_mlp_backward``.
    """
    num_tokens, dim = grad_out.shape
    rows = _Rows(plan, offs, row_slots, slot_rows, num_tokens)
    operands = (grad_out, w_in, w_out, topk_weights, b_in, b_out, w_up)
    if _nothing_to_do(plan, num_tokens, rows.num_rows):
        return _zero_gradients(operands, output_mask, grad_out)
    want_x, want_w_in, want_w_out, want_scale, want_b_in, want_b_out, want_w_up = (
        wanted and operand is not None
        for wanted, operand in zip(output_mask, operands, strict=True)
    )
    grads = [grad_out.new_empty(0) for _ in operands]
    grad_out = _row_major(grad_out)
    scale = _slot_weights(topk_weights)
    if want_b_out:
        grads[5] = _bias_grad(rows, grad_out, b_out, scale=scale, gather=True)
    want_w_ins = want_w_in or want_w_up
    if not any((want_x, want_w_ins, want_w_out, want_scale, want_b_in)):
        return tuple(grads)

    x = Quantized.of(*(input_scaled or (input_data, input_scale)))
    grad_codes = Quantized.of(*recipe.quantize(grad_out))
    w = recipe.transposed(w_out, w_out_scaled)
    has_up = w_up is not None or len(w_up_scaled) > 0
    # The operator has no flag: rows that are not saved are the request to compute them.
    if plan.hint(preact.shape[0]) == 0:
        kept = _recomputed_preact(
            plan,
            rows,
            recipe,
            x,
            recipe.weight(w_in, w_in_scaled),
            recipe.weight(w_up, w_up_scaled),
            b_in,
            act,
            grad_out,
            w.codes.shape[1],
        )
    else:
        kept = Preact.of(preact.contiguous(), preact_scale)
    act_grads = _act_backward(
        plan,
        rows,
        recipe,
        grad_out,
        grad_codes,
        w,
        b_out,
        kept,
        scale,
        act,
        has_up,
        need_codes=want_x or (want_w_ins and not hp_wgrad),
        need_values=want_b_in or (want_w_ins and hp_wgrad),
        need_hidden=want_w_out,
        need_scale=want_scale,
    )
    if want_x:
        routed, dh = grad_out.new_empty(rows.num_rows, dim), act_grads.codes
        w = recipe.transposed(w_in, w_in_scaled)
        up = recipe.transposed(w_up, w_up_scaled)
        _scaled_mm(plan, "input_grad", rows, recipe, dh, w, up, None, None, routed)
        grads[0] = _finish_rows(plan, rows, routed, num_tokens, combine)
    of = _WeightGrads(
        plan, rows, recipe, x, (grad_out, grad_codes), act_grads, hp_wgrad
    )
    if want_w_out and w_out is not None:
        grads[2] = of.of_w_out(w_out)
    if want_w_ins:
        made = of.of_w_in(
            w_in if want_w_in else None,
            w_up if want_w_up else None,
            halves=2 if has_up else 1,
        )
        if want_w_in:
            grads[1] = made[0]
        if want_w_up:
            grads[6] = made[-1]
    if want_scale:
        grads[3] = _scale_grad(rows, act_grads.partials, topk_weights)
    if want_b_in:
        grads[4] = _bias_grad(rows, act_grads.values, b_in)
    return tuple(grads)
