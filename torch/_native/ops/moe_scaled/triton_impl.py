"""Triton kernels in FP8 for ``aten::_moe_mlp_scaled`` and its backward.

Who is served (the functions ``*_reason`` return why not): of what the kernels of
../moe/triton_impl.py serve, on NVIDIA GPUs

  - compute capability 9.0, 10.0 and 10.3
  - recipes fp8_blockwise (rows by 1 x 128, weights by 128 x 128), fp8_rowwise, and
    mxfp8 (all by 1 x 32), which 9.0 multiplies in bfloat16
  - operands of bfloat16, float16 or float32, weights and biases of that or of float32
  - weights and rows that come quantised: float8_e4m3fn, scales plain or those of weights by
    1 x 32 in SWIZZLE_32_4_4; for gradients of the rows, weights that have no squares along both
    dimensions

Everything else falls through to the composite kernel, which also owns the error messages:
see ../moe/triton_impl.py, whose layers these are. The kernels are in
../moe/triton_kernels/scaled_*.py.
"""

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from ... import triton_utils as tu
from ..moe import triton_impl as moe


if TYPE_CHECKING:
    from ..moe.triton_kernels.launch import LaunchPlan
    from ..moe.triton_kernels.scaled_operands import Recipe

_E4M3 = torch.float8_e4m3fn
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROW, _MX, _B128, _SQUARE = (
    kind.value
    for kind in (
        ScalingType.RowWise,
        ScalingType.BlockWise1x32,
        ScalingType.BlockWise1x128,
        ScalingType.BlockWise128x128,
    )
)
# Weights by 1 x 128 too would spill in the tiles that ship.
_RECIPES = ((_ROW, _ROW), (_MX, _MX), (_B128, _SQUARE))
_SWIZZLE = SwizzleType.SWIZZLE_32_4_4.value
_CAPABILITIES = ((9, 0), (10, 0), (10, 3))


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _scale_shape(
    code: int, shape: tuple[int, ...], dim: int, swizzled: bool = False
) -> tuple[int, ...]:
    """Of the scales of data of ``shape``, quantised along ``dim``."""
    sizes = list(shape)
    block = {_ROW: sizes[dim], _MX: 32}.get(code, 128)
    sizes[dim] = _cdiv(sizes[dim], block) if block else 1
    if code == _SQUARE:
        sizes[-2] = _cdiv(sizes[-2], 128)
    if swizzled:
        rows = _cdiv(sizes[3 - dim], 128) * 128
        return sizes[0], rows * _cdiv(sizes[dim], 4) * 4
    return tuple(sizes)


def _pair_reason(
    name: str, pair: list[Tensor], code: int, shape: tuple, dim: int, swizzled=False
) -> str | None:
    data, scale = pair
    wanted = torch.float8_e8m0fnu if code == _MX else torch.float32
    if data.dtype != _E4M3 or scale.dtype != wanted:
        return f"{name} has dtypes {data.dtype} and {scale.dtype}"
    scale_shape = _scale_shape(code, shape, dim, swizzled)
    if tuple(data.shape) != shape or tuple(scale.shape) != scale_shape:
        return f"{name} has shapes {tuple(data.shape)} and {tuple(scale.shape)}"
    return None


def _weight_list_reason(
    name: str,
    w: Tensor | None,
    scaled: list[Tensor],
    code: int,
    swizzled: bool,
    dtypes: tuple,
    need_transposed: bool,
) -> str | None:
    """Why a weight and what it comes quantised as are not served."""
    if w is not None and w.dtype not in dtypes:
        return f"{name} has dtype {w.dtype}"
    if not scaled:
        return None
    shape = tuple((scaled[0] if w is None else w).shape)
    if len(scaled) not in (2, 4) or len(shape) != 3:
        return f"{name}_scaled has {len(scaled)} tensors for the shape {shape}"
    if need_transposed and len(scaled) == 2 and code != _SQUARE:
        return f"{name} comes quantised along one dimension only"
    for i, dim in zip(range(0, len(scaled), 2), (2, 1)):
        pair = scaled[i : i + 2]
        # A square has the same scales along both.
        dim = 2 if code == _SQUARE else dim
        reason = _pair_reason(f"{name}_scaled", pair, code, shape, dim, swizzled)
        if reason is not None:
            return reason
    return None


def _call_reason(
    rows: Tensor,
    w_in: Tensor | None,
    w_out: Tensor | None,
    offs: Tensor,
    topk_weights: Tensor | None,
    row_slots: Tensor | None,
    slot_rows: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
    w_up: Tensor | None,
    lists: tuple[list[Tensor], ...],
    *,
    recipe_a=(),
    recipe_w=(),
    swizzle_w=(),
    preact_dtype: torch.dtype | None = None,
    hp_wgrad: bool = False,
    activation: str = "swiglu",
    gate_interleaved: bool = False,
    alpha: float | None = None,
    limit: float | None = None,
    compute_preact: bool = True,
    is_backward: bool = False,
    memory: bool = True,
) -> str | None:
    """What forward and backward ask alike; ``rows`` is the input or its gradient.

    Without ``memory`` for tensors that have none; the caller answers for their alignment.
    """
    recipe = (*recipe_a, *recipe_w)
    if recipe not in _RECIPES:
        return f"recipe_a {list(recipe_a)} with recipe_w {list(recipe_w)}"
    swizzled = any(swizzle_w)
    if swizzled and (tuple(swizzle_w) != (_SWIZZLE,) or recipe != (_MX, _MX)):
        return f"swizzle_w is {list(swizzle_w)}"
    if torch.version.hip is not None:
        return "ROCm"
    dtype = rows.dtype
    if dtype not in _DTYPES:
        return f"dtype {dtype} is not one of {_DTYPES}"
    if preact_dtype not in (None, dtype, _E4M3, torch.int8):
        return f"preact_dtype is {preact_dtype}"
    dtypes = (dtype, torch.float32)
    if topk_weights is not None and topk_weights.dtype not in dtypes:
        return f"topk_weights has dtype {topk_weights.dtype}"
    if any(b is not None and b.dtype not in dtypes for b in (b_in, b_out)):
        return "a bias has another dtype"
    input_scaled, w_in_scaled, w_out_scaled, w_up_scaled = lists
    operands = []
    for name, w, scaled in (
        ("w_in", w_in, w_in_scaled),
        ("w_out", w_out, w_out_scaled),
        ("w_up", w_up, w_up_scaled),
    ):
        reason = _weight_list_reason(
            name, w, scaled, recipe[1], swizzled, dtypes, is_backward
        )
        if reason is not None:
            return reason
        operands.append(scaled[0] if w is None and scaled else w)
    logical_in, logical_out, logical_up = operands
    if logical_in is None or logical_out is None:
        return "w_in or w_out is missing"
    reason = moe._activation_reason(
        activation, gate_interleaved, alpha, limit, logical_up is not None
    ) or moe._shape_reason(
        rows,
        logical_in,
        logical_out,
        offs,
        topk_weights,
        row_slots,
        slot_rows,
        b_in,
        b_out,
        logical_up,
        moe._is_gated(activation),
    )
    if reason is not None:
        return reason
    if input_scaled:
        if len(input_scaled) != 2:
            return f"input_scaled has {len(input_scaled)} tensors"
        shape = tuple(rows.shape)
        reason = _pair_reason("input_scaled", input_scaled, recipe[0], shape, 1)
        if reason is not None:
            return reason
    if is_backward and hp_wgrad and dtype != torch.bfloat16:
        return f"hp_wgrad with {dtype}"
    reason = moe._device_reason(
        (
            rows,
            w_in,
            w_out,
            w_up,
            *(x for scaled in lists for x in scaled),
            offs,
            topk_weights,
            row_slots,
            slot_rows,
            b_in,
            b_out,
        ),
        memory,
    )
    if reason is not None:
        return reason
    capability = moe._capability(rows.device.index or 0)
    if capability not in _CAPABILITIES:
        return f"compute capability {capability} is not one of {_CAPABILITIES}"
    if not memory:
        return None
    data = {f"data {i}": scaled[0] for i, scaled in enumerate(lists) if scaled}
    return moe._address_reason(**data)


def mlp_reason(input: Tensor, *tensors, **options) -> str | None:
    """Why Triton cannot run ``_moe_mlp_scaled`` on these arguments, or None."""
    return _call_reason(input, *tensors[:9], lists=tensors[9:], **options)


def mlp_backward_reason(grad_out: Tensor, *tensors, **options) -> str | None:
    """Why Triton cannot run ``_moe_mlp_scaled_backward`` on these arguments, or None."""
    operands, lists, saved = tensors[:9], tensors[9:13], tensors[13:17]
    options |= {"lists": lists, "is_backward": True}
    reason = _call_reason(grad_out, *operands, **options)
    if reason is not None:
        return reason
    input_data, input_scale, preact, preact_scale = saved
    T, D = grad_out.shape
    if not lists[0]:
        pair = [input_data, input_scale]
        reason = _pair_reason("input", pair, options["recipe_a"][0], (T, D), 1)
        if reason is not None:
            return reason
    for mask, name, w in ((1, "w_in", operands[0]), (2, "w_out", operands[1])):
        if tensors[17][mask] and w is None:
            return f"the gradient of {name}, which was not given"
    w_out, row_slots = operands[1], operands[4]
    F = (lists[2][0] if w_out is None else w_out).shape[2]
    activation = options.get("activation", "swiglu")
    width = F * (2 if moe._is_gated(activation) else 1)
    R = T if row_slots is None else len(row_slots)
    dtype = options.get("preact_dtype") or grad_out.dtype
    if preact.dim() != 2 or len(preact):
        scale_shape = (0,) if dtype == grad_out.dtype else (R, _cdiv(width, 32))
        if preact.dtype != dtype or preact.shape != (R, width):
            return f"preact is {preact.dtype} of shape {tuple(preact.shape)}"
        if scale_shape != (0,) and (
            preact_scale.shape != scale_shape
            or preact_scale.dtype != torch.float8_e8m0fnu
        ):
            return "preact_scale does not fit preact"
    return moe._device_reason((grad_out, *saved), options.get("memory", True))


def _mlp_cond(*args, **kwargs) -> bool:
    return moe._choose("_moe_mlp_scaled", mlp_reason, args, kwargs)


def _mlp_backward_cond(*args, **kwargs) -> bool:
    return moe._choose("_moe_mlp_scaled_backward", mlp_backward_reason, args, kwargs)


@functools.cache
def _plan(device_index: int) -> "LaunchPlan":
    import dataclasses

    from ..moe.triton_kernels.scaled_configs import scaled_table_for_capability

    plan = moe._plan(device_index)
    table = scaled_table_for_capability(*moe._capability(device_index))
    assert table is not None, "the reasons let an unserved device through"
    return dataclasses.replace(plan, table={**plan.table, **table})


def _recipe(device_index: int, recipe_a, recipe_w, swizzle_w=(), **_rest) -> "Recipe":
    from ..moe.triton_kernels.scaled_operands import Recipe

    # Before 10.0 no matrix instruction takes scales.
    widen = recipe_a[0] == _MX and moe._capability(device_index)[0] < 10
    return Recipe(recipe_a[0], recipe_w[0], widen, any(swizzle_w))


def _mlp_impl(
    input,
    *tensors,
    preact_dtype=None,
    activation="swiglu",
    gate_interleaved=False,
    alpha=None,
    limit=None,
    compute_preact=True,
    **options,
):
    from ..moe.triton_kernels.launch import Activation
    from ..moe.triton_kernels.scaled_launch import moe_mlp_scaled_forward

    with moe._on_device(input):
        return moe_mlp_scaled_forward(
            _plan(input.get_device()),
            input,
            *tensors,
            recipe=_recipe(input.get_device(), **options),
            preact_dtype=preact_dtype,
            act=Activation(activation, gate_interleaved, alpha, limit),
            compute_preact=compute_preact,
        )


def _mlp_backward_impl(
    grad_out,
    *tensors,
    hp_wgrad=False,
    activation="swiglu",
    gate_interleaved=False,
    alpha=None,
    limit=None,
    **options,
):
    from ..moe.triton_kernels.launch import Activation
    from ..moe.triton_kernels.scaled_launch import moe_mlp_scaled_backward

    *operands, output_mask = tensors
    with moe._on_device(grad_out):
        return moe_mlp_scaled_backward(
            _plan(grad_out.get_device()),
            grad_out,
            *operands,
            output_mask=tuple(output_mask),
            recipe=_recipe(grad_out.get_device(), **options),
            act=Activation(activation, gate_interleaved, alpha, limit),
            hp_wgrad=hp_wgrad,
        )


def register_to_dispatch() -> None:
    for op_symbol, cond, impl in (
        ("_moe_mlp_scaled", _mlp_cond, _mlp_impl),
        ("_moe_mlp_scaled_backward", _mlp_backward_cond, _mlp_backward_impl),
    ):
        tu.register_op_override(
            "aten",
            op_symbol,
            "CUDA",
            cond=cond,
            impl=impl,
            allow_multiple_override=True,
        )
