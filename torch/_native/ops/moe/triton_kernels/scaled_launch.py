"""The expert MLP in FP8: ``aten::_moe_mlp_scaled`` and its backward.

Memory-bound kernels, tile lists and the order of the backward are those of launch.py.
``aten::_moe_quantize`` quantises tokens and weights that are not quantised yet; kernels quantise
their results (A, dH) in their epilogues.
"""

import functools
from collections.abc import Sequence
from typing import Any

import triton

import torch
from torch import Tensor

from .configs import OPTIONS, TileConfig
from .experts import row_major
from .launch import ActGrads, gradients, Wanted, zero_gradients
from .matmuls import (
    bias_strides,
    or_else,
    room_for_partials,
    run,
    tile_args,
    tile_grid,
    weight_grad,
    weight_operands,
)
from .rows import LaunchPlan, Rows
from .scaled_backward import (
    column_scales_kernel,
    columns_kernel,
    scaled_act_backward_kernel,
    scaled_weight_grad_kernel,
)
from .scaled_forward import scaled_mm_kernel, scaled_up_kernel
from .scaled_operands import (
    Preact,
    PREACT_BLOCK,
    PREACT_RECIPE,
    Quantized,
    Recipe,
    ScaledExperts,
)


_E4M3 = torch.float8_e4m3fn
# Rows of an expert's columns: ALIGNMENT of scaled_backward.py.
_PLACE = 128


def _strides(w: Quantized) -> tuple[int, ...]:
    return (*w.codes.stride()[:2], *w.scale.stride())


def _tile_args(
    recipe: Recipe, config: TileConfig, num_columns: int, num_inner: int
) -> dict[str, Any]:
    args = tile_args(config, num_columns, num_inner)
    # Only act_backward takes its epilogue in parts.
    del args["EPILOGUE_PARTS"]
    return {"BLOCK": recipe.block, "WIDEN": recipe.widen, **args}


def _up(
    rows: Rows,
    experts: ScaledExperts,
    x: Quantized,
    preact: Preact,
    store_preact: bool = True,
) -> Quantized:
    """act(H) (R, F), and preact = H if ``store_preact``."""
    recipe, act, b_in = experts.recipe, experts.act, experts.b_in
    dim, num_hidden = x.codes.shape[1], experts.num_hidden
    product_type = experts.product_type
    room = (experts.input, rows.num_buffer_rows, num_hidden, product_type)
    hidden = recipe.room(*room)
    gate, up, square, up_shift = experts.gate_and_up()

    def launch(config: TileConfig) -> None:
        operands, flags = weight_operands(rows.plan, config, gate.codes, up.codes)
        rows.plan.kernel(scaled_up_kernel)[tile_grid(rows, config, num_hidden)](
            *x, *operands, gate.scale, up.scale, or_else(b_in, gate.scale),
            rows.row_slots, rows.tiles(config.block_m), *preact[:2], *hidden,
            dim, num_hidden, rows.top_k, *_strides(gate), *bias_strides(b_in),
            **act.kernel_args(),
            HAS_SLOTS=rows.has_slots, HAS_BIAS=b_in is not None, STORE_PREACT=store_preact,
            PREACT_8BIT=preact.is_8bit, ROUND=product_type == torch.bfloat16, INT8=preact.is_int8,
            SQUARE=square, UP_SHIFT=up_shift, USE_TMA=flags["USE_TMA"],
            **_tile_args(recipe, config, num_hidden, dim),
        )  # fmt: skip

    kernel = recipe.kernel("up_gated" if act.gated else "up_plain")
    traits = (product_type, act, preact.values.dtype, store_preact)
    run(rows, kernel, num_hidden, dim, traits, launch)
    return hidden


def _mm(
    rows: Rows,
    recipe: Recipe,
    kernel: str,
    a: Quantized,
    w: Quantized,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    w_up: Quantized | None = None,
) -> None:
    """out (R, N) = scale * (a (R, P) @ w (E, N, P)^T + bias (E, N)) by expert.

    With ``w_up`` too, the halves of ``a`` (R, 2P) are multiplied with ``w`` and ``w_up``.
    """
    num_columns, num_inner = w.codes.shape[1:]
    second = w if w_up is None else w_up

    def launch(config: TileConfig) -> None:
        operands, flags = weight_operands(rows.plan, config, w.codes, second.codes)
        rows.plan.kernel(scaled_mm_kernel)[tile_grid(rows, config, num_columns)](
            a.codes.view(_E4M3), a.scale, operands[0], w.scale, operands[1], second.scale,
            or_else(bias, w.scale), or_else(scale, w.scale),
            rows.row_slots, rows.tiles(config.block_m), out,
            num_columns, num_inner, *_strides(w), *bias_strides(bias),
            TWO_WEIGHTS=w_up is not None, HAS_SLOTS=rows.has_slots,
            HAS_BIAS=bias is not None, HAS_SCALE=scale is not None,
            SQUARE=recipe.square, USE_TMA=flags["USE_TMA"],
            **_tile_args(recipe, config, num_columns, num_inner),
        )  # fmt: skip

    traits = (out.dtype, scale is not None, w_up is not None)
    run(rows, recipe.kernel(kernel), num_columns, num_inner, traits, launch)


def _preact_room(
    rows: Rows, experts: ScaledExperts, is_kept: bool
) -> tuple[Tensor, Tensor, Preact]:
    """preact, preact_scale, and what the kernel writes: these, or H before it is quantised."""
    like, width = experts.input, experts.width
    dtype = like.dtype if experts.preact_dtype is None else experts.preact_dtype
    num_rows = rows.num_rows if is_kept else 0
    preact = like.new_empty(num_rows, width, dtype=dtype)
    absent = like.new_empty(0)
    if preact.element_size() > 1 or not is_kept:
        return preact, absent, Preact.of(preact, absent)
    # As bytes: a compiler does not allocate the FP8 type.
    num_blocks = triton.cdiv(width, PREACT_BLOCK)
    scale = like.new_empty(num_rows, num_blocks, dtype=torch.uint8)
    kept = Preact.of(preact, scale)
    if experts.halves_adjacent and experts.num_hidden % PREACT_BLOCK != 0:
        values = like.new_empty(num_rows, width, dtype=experts.product_type)
        kept = Preact.of(values, values)._replace(is_8bit=True)
    return preact, scale.view(torch.float8_e8m0fnu), kept


def moe_mlp_scaled_forward(
    plan: LaunchPlan,
    experts: ScaledExperts,
    *,
    compute_preact: bool = True,
    combine: bool = True,
) -> tuple[Tensor, ...]:
    """``aten::_moe_mlp_scaled``: output, input_data, input_scale, preact, preact_scale.

    ``combine`` is that of ``launch.moe_mlp_forward``.
    """
    experts = experts.on(plan.table)
    rows, recipe, like = Rows.of(plan, experts), experts.recipe, experts.input
    saved = (like.new_empty(0), like.new_empty(0))
    input_scaled = experts.input_scaled
    if not input_scaled:
        saved = torch.ops.aten._moe_quantize(row_major(like), recipe.rows)
        input_scaled = saved
    preact, preact_scale, kept = _preact_room(rows, experts, compute_preact)
    if rows.is_empty:
        for x in (preact, preact_scale):
            x.view(torch.uint8).zero_()
        return like.new_zeros(like.shape), *saved, preact, preact_scale

    x = Quantized.of(*input_scaled)
    hidden = _up(rows, experts, x, kept, compute_preact)
    if compute_preact:
        rows.zero_tail(kept.values)
        if kept.values.dtype == torch.uint8:
            rows.zero_tail(kept.scale)
        elif preact.element_size() == 1:
            preact, preact_scale = torch.ops.aten._moe_quantize(
                kept.values, PREACT_RECIPE, dtype=preact.dtype
            )
    hidden, w = recipe.finished(hidden), experts.weight("w_out")
    routed = like.new_empty(rows.num_rows, like.shape[1])
    options = {"bias": experts.b_out, "scale": rows.scale}
    _mm(rows, recipe, "down", hidden, w, routed, **options)
    return rows.finish(routed, combine), *saved, preact, preact_scale


def _columns(
    rows: Rows,
    recipe: Recipe,
    source: Tensor,
    source_scale: Tensor | None = None,
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
    # If the rows of expert e begin at b, its block j is b // 128 + e + j.
    length = (rows.num_rows // _PLACE + rows.num_experts) * _PLACE
    codes = source.new_empty(num_columns, length, dtype=torch.uint8)
    # Whole columns have one scale per expert.
    num_blocks = length // recipe.block if recipe.block else rows.num_experts
    # In the order of reading: neighbouring columns side by side, or neighbouring blocks.
    together = recipe.block != 32
    shape = (num_blocks, num_columns) if together else (num_columns, num_blocks)
    scale = source.new_empty(shape, dtype=recipe.scale_dtype)
    sizes = (num_columns, rows.top_k, source.stride(0))
    sizes += (0 if source_scale is None else source_scale.stride(0),)
    if source_scale is not None:
        source = source.view(torch.uint8)
    operands = (source, or_else(source_scale, codes), rows.row_slots, rows.offs)
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
        *operands, rows.tiles(_PLACE), codes, scale,
        num_columns, length, *sizes[1:], *scale.stride(), BLOCK=recipe.block, **options,
    )  # fmt: skip
    return Quantized(codes.view(_E4M3), scale)


def _weight_grad(
    rows: Rows, recipe: Recipe, p: Quantized, q: Quantized, w: Tensor
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
        args = _tile_args(recipe, config, num_n, num_m)
        args["EVEN_M"] = num_m % config.block_m == 0
        del args["EVEN_K"]
        rows.plan.kernel(scaled_weight_grad_kernel)[(rows.num_experts * tiles,)](
            *p, *q, rows.offs, out, num_m, num_n, p.codes.shape[1], rows.num_experts,
            *p.scale.stride(), *q.scale.stride(), *out.stride(), **args,
        )  # fmt: skip

    run(rows, recipe.kernel("weight_grad"), num_n, num_m, (w.dtype,), launch)
    return grad


class _Products:
    """Implements launch.Products; with ``hp_wgrad`` weight gradients are 16-bit products.

    Args:
        rows, experts: the call's, with dO (T, D) as ``experts.input``.
        x: rows of X.
        preact: H; None to compute it again.
    """

    def __init__(
        self, rows: Rows, experts: ScaledExperts, x: Quantized, preact: Preact | None
    ) -> None:
        self.rows, self.experts, self.recipe = rows, experts, experts.recipe
        self.x, self.preact, self.grad_out = x, preact, row_major(experts.input)

    @functools.cached_property
    def x_values(self) -> Tensor:
        return self.recipe.values(self.x, self.experts.product_type)

    @functools.cached_property
    def x_columns(self) -> Quantized:
        return _columns(self.rows, self.recipe, *self.x, gather=True)

    def act_backward(self, wanted: Wanted) -> ActGrads:
        rows, experts, recipe = self.rows, self.experts, self.recipe
        self.grad_codes = grad_codes = recipe.quantize(self.grad_out)
        preact = self.preact
        if preact is None:
            shape, dtype = (rows.num_rows, experts.width), experts.product_type
            values = experts.input.new_empty(shape, dtype=dtype)
            preact = Preact.of(values, values)
            _up(rows, experts, self.x, preact)
        w, act, scale = experts.transposed("w_out"), experts.act, rows.scale
        num_hidden, dim = w.codes.shape[1:]
        width, product_type = experts.width, experts.product_type

        def empty(needed: bool, columns: int) -> Tensor:
            num_rows = rows.num_buffer_rows if needed else 0
            return self.grad_out.new_empty(num_rows, columns, dtype=product_type)

        # If an epilogue cannot know a scale, it stores values, which are quantised later.
        want_w_ins = wanted.w_in or wanted.w_up
        need_codes = wanted.input or (want_w_ins and not experts.hp_wgrad)
        behind = need_codes and experts.scales_behind
        stores_codes = need_codes and not behind
        stores_values = wanted.b_in or (want_w_ins and experts.hp_wgrad) or behind
        halves = 2 if experts.halves_adjacent else 1
        num_rows = rows.num_buffer_rows if stores_codes else 0
        room = (self.grad_out, num_rows, width // halves, product_type, halves)
        codes = recipe.room(*room)
        values = empty(stores_values, width)
        hidden = empty(wanted.w_out, num_hidden)

        def launch(config: TileConfig) -> Tensor:
            partials = room_for_partials(rows, experts, config, wanted.topk_weights)
            operands, flags = weight_operands(rows.plan, config, w.codes)
            grid = tile_grid(rows, config, num_hidden)
            tile = _tile_args(recipe, config, num_hidden, dim)
            named = act.kernel_args()
            # Plain SwiGLU fits. The erf of GeGLU and the masks of odd sizes would spill.
            is_plain = named["ACTIVATION"] == "swiglu" and not named["HAS_LIMIT"]
            if not (is_plain and tile["EVEN_N"] and tile["EVEN_K"]):
                tile.pop("maxnreg", None)
            rows.plan.kernel(scaled_act_backward_kernel)[grid](
                *grad_codes, *operands, w.scale, *preact[:2], or_else(scale, w.scale),
                rows.row_slots, rows.tiles(config.block_m),
                *codes, values, hidden, partials,
                dim, num_hidden, rows.num_rows, rows.top_k, *_strides(w),
                **named,
                HAS_SLOTS=rows.has_slots, HAS_SCALE=scale is not None,
                STORE_CODES=stores_codes, STORE_VALUES=stores_values,
                STORE_HIDDEN=wanted.w_out, STORE_PARTIALS=wanted.topk_weights,
                INT8=preact.is_int8, ALIGNED=num_hidden % PREACT_BLOCK == 0,
                SQUARE=recipe.square, USE_TMA=flags["USE_TMA"], EPILOGUE_PARTS=config.epilogue_parts,
                **tile,
            )  # fmt: skip
            return partials

        needs = (stores_codes, stores_values, wanted.w_out, wanted.topk_weights)
        traits = (product_type, act, preact.values.dtype, *needs)
        kernel = recipe.kernel("act_backward")
        partials = run(rows, kernel, num_hidden, dim, traits, launch)
        if wanted.topk_weights and experts.b_out is not None:
            rows.bias_dot(self.grad_out, experts.b_out, partials[-1])
        if behind:
            codes = recipe.finished(Quantized(values, values), experts.halves)
        self.dh_codes = codes
        return ActGrads(values, hidden, partials)

    def input_grad(self, grads: ActGrads) -> Tensor:
        routed = self.grad_out.new_empty(self.rows.num_rows, self.grad_out.shape[1])
        w, w_up = map(self.experts.transposed, ("w_in", "w_up"))
        _mm(self.rows, self.recipe, "input_grad", self.dh_codes, w, routed, w_up=w_up)
        return routed

    def w_out_grad(self, grads: ActGrads) -> Tensor:
        rows, recipe, w_out = self.rows, self.recipe, self.experts.w_out
        if self.experts.hp_wgrad:
            dy = self.grad_out.to(grads.hidden.dtype)
            return weight_grad(rows, dy, grads.hidden, w_out, gather_p=True)
        p = _columns(rows, recipe, *self.grad_codes, gather=True)
        return _weight_grad(
            rows, recipe, p, _columns(rows, recipe, grads.hidden), w_out
        )

    def w_in_grad(self, grads: ActGrads, i: int, w: Tensor) -> Tensor:
        rows, recipe, halves = self.rows, self.recipe, self.experts.halves
        if self.experts.hp_wgrad:
            half = grads.values.chunk(halves, 1)[i]
            return weight_grad(rows, half, self.x_values, w, gather_q=True)
        q = self.x_columns
        # Blocks of rows begin with each half.
        p = _columns(rows, recipe, *(x.chunk(halves, 1)[i] for x in self.dh_codes))
        return _weight_grad(rows, recipe, p, q, w)


def moe_mlp_scaled_backward(
    plan: LaunchPlan,
    experts: ScaledExperts,
    saved: Sequence[Tensor],
    output_mask: tuple[bool, ...],
    *,
    combine: bool = True,
) -> tuple[Tensor, ...]:
    """``aten::_moe_mlp_scaled_backward``: the seven gradients, see ``launch.gradients``.

    ``experts.input`` is the gradient of the output; ``saved`` are the other outputs of the forward.
    """
    input_data, input_scale, preact, preact_scale = saved
    experts = experts.on(plan.table)
    rows = Rows.of(plan, experts)
    if rows.is_empty:
        return zero_gradients(experts, output_mask)
    x = Quantized.of(*(experts.input_scaled or (input_data, input_scale)))
    # The operator has no flag: if H was not saved, it is computed again.
    is_kept = plan.hint(preact.shape[0]) != 0
    kept = Preact.of(preact.contiguous(), preact_scale) if is_kept else None
    products = _Products(rows, experts, x, kept)
    return gradients(rows, experts, products, products.grad_out, output_mask, combine)
