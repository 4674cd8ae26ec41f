"""Triton kernels in FP8 for ``aten::_moe_mlp_scaled`` and its backward.

Who is served (the functions ``*_reason`` return why not): of what the kernels of
../moe/triton_impl.py serve, on NVIDIA GPUs

  - recipes fp8_blockwise (rows by 1 x 128, weights by 128 x 128) on compute capability 9.0,
    10.0 and 10.3, and mxfp8 (all by 1 x 32) on 10.0 and 10.3
  - operands of bfloat16, float16 or float32, weights and biases of that or of float32
  - where gate and up are halves of H, F a multiple of the recipe's block, so that no block
    has numbers of both
  - weights and rows that come quantised: float8_e4m3fn in the plain layout; for gradients
    of the rows, weights by 1 x 32 along both dimensions

Everything else falls through to the composite kernel, which also owns the error messages:
see ../moe/triton_impl.py, whose layers these are. The kernels are in
../moe/triton_kernels/scaled_*.py.
"""

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from ... import triton_utils as tu
from ..moe import triton_impl as moe


if TYPE_CHECKING:
    from ..moe.triton_kernels.launch import LaunchPlan
    from ..moe.triton_kernels.scaled_launch import Recipe

_E4M3 = torch.float8_e4m3fn
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MX = (ScalingType.BlockWise1x32.value,) * 2
_FP8 = (ScalingType.BlockWise1x128.value, ScalingType.BlockWise128x128.value)
_BLOCK = {_FP8: 128, _MX: 32}
_SCALE_DTYPE = {_FP8: torch.float32, _MX: torch.float8_e8m0fnu}
_CAPABILITIES = {_FP8: ((9, 0), (10, 0), (10, 3)), _MX: ((10, 0), (10, 3))}


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _pair_reason(
    name: str, pair: list[Tensor], recipe: tuple, shape: tuple, scale_shape: tuple
) -> str | None:
    data, scale = pair
    if data.dtype != _E4M3 or scale.dtype != _SCALE_DTYPE[recipe]:
        return f"{name} has dtypes {data.dtype} and {scale.dtype}"
    if tuple(data.shape) != shape or tuple(scale.shape) != scale_shape:
        return f"{name} has shapes {tuple(data.shape)} and {tuple(scale.shape)}"
    return None


def _weight_list_reason(
    name: str,
    w: Tensor | None,
    scaled: list[Tensor],
    recipe: tuple,
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
    E, N, K = shape
    block = _BLOCK[recipe]
    if recipe == _FP8:
        scale_shapes = ((E, _cdiv(N, block), _cdiv(K, block)),) * 2
    else:
        scale_shapes = (E, N, _cdiv(K, block)), (E, _cdiv(N, block), K)
        if need_transposed and len(scaled) == 2:
            return f"{name} comes quantised along one dimension only"
    for i, scale_shape in zip(range(0, len(scaled), 2), scale_shapes):
        pair = scaled[i : i + 2]
        reason = _pair_reason(f"{name}_scaled", pair, recipe, shape, scale_shape)
        if reason is not None:
            return reason
    return None


def _blocks_reason(F: int, activation: str, interleaved: bool, block: int):
    if moe._is_gated(activation) and not interleaved and F % block:
        return f"F = {F} is not a multiple of {block}, and a block of H has both halves"
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
    if recipe not in _BLOCK:
        return f"recipe_a {list(recipe_a)} with recipe_w {list(recipe_w)}"
    if any(swizzle_w):
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
        reason = _weight_list_reason(name, w, scaled, recipe, dtypes, is_backward)
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
    block = _BLOCK[recipe]
    T, D = rows.shape
    if input_scaled:
        if len(input_scaled) != 2:
            return f"input_scaled has {len(input_scaled)} tensors"
        scale_shape = (T, _cdiv(D, block))
        reason = _pair_reason("input_scaled", input_scaled, recipe, (T, D), scale_shape)
        if reason is not None:
            return reason
    if is_backward and hp_wgrad and dtype != torch.bfloat16:
        return f"hp_wgrad with {dtype}"
    reason = _blocks_reason(
        logical_out.shape[2], activation, gate_interleaved, block
    ) or moe._device_reason(
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
    if capability not in _CAPABILITIES[recipe]:
        return f"compute capability {capability} is not one of {_CAPABILITIES[recipe]}"
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
    recipe = (*options["recipe_a"], *options["recipe_w"])
    T, D = grad_out.shape
    if not lists[0]:
        scale_shape = (T, _cdiv(D, _BLOCK[recipe]))
        pair = [input_data, input_scale]
        reason = _pair_reason("input", pair, recipe, (T, D), scale_shape)
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


def _recipe(recipe_a, recipe_w) -> "Recipe":
    from ..moe.triton_kernels.scaled_launch import Recipe

    return Recipe(recipe_a[0], recipe_w[0])


def _mlp_impl(
    input,
    *tensors,
    recipe_a,
    recipe_w,
    preact_dtype=None,
    activation="swiglu",
    gate_interleaved=False,
    alpha=None,
    limit=None,
    compute_preact=True,
    **_rest,
):
    from ..moe.triton_kernels.launch import Activation
    from ..moe.triton_kernels.scaled_launch import moe_mlp_scaled_forward

    with moe._on_device(input):
        return moe_mlp_scaled_forward(
            _plan(input.get_device()),
            input,
            *tensors,
            recipe=_recipe(recipe_a, recipe_w),
            preact_dtype=preact_dtype,
            act=Activation(activation, gate_interleaved, alpha, limit),
            compute_preact=compute_preact,
        )


def _mlp_backward_impl(
    grad_out,
    *tensors,
    recipe_a,
    recipe_w,
    hp_wgrad=False,
    activation="swiglu",
    gate_interleaved=False,
    alpha=None,
    limit=None,
    **_rest,
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
            recipe=_recipe(recipe_a, recipe_w),
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
