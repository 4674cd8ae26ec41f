"""Triton kernels in FP8 for ``aten::_moe_mlp_scaled`` and its backward.

Supported calls (the functions ``*_reason`` return why another is not): those of
../moe/triton_impl.py on NVIDIA GPUs with

  - compute capability 9.0, 10.0 and 10.3
  - recipes fp8_blockwise (rows by 1 x 128, weights by 128 x 128), fp8_rowwise, and
    mxfp8 (all by 1 x 32), which 9.0 multiplies in bfloat16
  - bfloat16, float16 or float32 operands; weights and biases of that dtype or float32
  - quantised weights and rows in float8_e4m3fn, with plain scales, or for weights by
    1 x 32 in SWIZZLE_32_4_4. Gradients of the rows need weights quantised along both dimensions,
    unless squares share a scale

Everything else falls through to the composite kernel. The layers are those of
../moe/triton_impl.py, the kernels are in ../moe/triton_kernels/scaled_*.py.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import _MOE_RECIPES

from ..moe import triton_impl as moe
from ..moe.triton_kernels.scaled_operands import Recipe, ScaledExperts


if TYPE_CHECKING:
    from ..moe.triton_kernels.rows import LaunchPlan

_CAPABILITIES = ((9, 0), (10, 0), (10, 3))


def mlp_reason(experts: ScaledExperts, *, memory: bool = True) -> str | None:
    """Why Triton cannot run ``_moe_mlp_scaled`` on these operands, or None."""
    recipe = experts.recipe
    # Weights by 1 x 128 would spill in the tiles of the tables.
    if (recipe.rows, recipe.weights) not in _MOE_RECIPES.values():
        return f"recipe_a is {recipe.rows} with recipe_w {recipe.weights}"
    if recipe.swizzle not in (0, 1):
        return f"swizzle_w is {recipe.swizzle}"
    lists = experts.lists
    for name, scaled in lists.items():
        if any(codes.dtype != torch.float8_e4m3fn for codes in scaled[::2]):
            return f"{name} has codes of {scaled[0].dtype}"
    reason = (
        ("ROCm" if torch.version.hip is not None else None)
        or moe.shape_reason(experts)
        or moe.device_reason(experts.tensors, memory)
        or moe.capability_reason(experts.input.device.index or 0, _CAPABILITIES)
    )
    if reason is not None or not memory:
        return reason
    return moe.address_reason({n: scaled[0] for n, scaled in lists.items() if scaled})


def mlp_backward_reason(
    experts: ScaledExperts,
    *saved: Tensor,
    output_mask: list[bool],
    memory: bool = True,
) -> str | None:
    """``mlp_reason`` for the backward."""
    if experts.hp_wgrad and experts.input.dtype != torch.bfloat16:
        return f"hp_wgrad with {experts.input.dtype}"
    for name, scaled in experts.lists.items():
        one = len(scaled) == 2 and name != "input_scaled"
        if one and not experts.recipe.has_squares:
            return f"{name} is along one dimension only"
    for wanted, name in zip(output_mask[1:3], ("w_in", "w_out")):
        if wanted and getattr(experts, name) is None:
            return f"the gradient of {name}, which was not given"
    reason = mlp_reason(experts, memory=memory)
    return reason or moe.device_reason((experts.input, *saved), memory)


# --- the ops: their arguments as they come from the dispatcher


def experts_of(
    *operands, recipe_a=(), recipe_w=(), swizzle_w=(), compute_preact=True, **named
) -> ScaledExperts:
    """The operands and keywords of ``_moe_mlp_scaled``."""
    rows, weights, swizzle = (x[0] if x else 0 for x in (recipe_a, recipe_w, swizzle_w))
    recipe = Recipe(rows, weights, swizzle)
    return ScaledExperts.of_call(*operands, recipe=recipe, **named)


NUM_SAVED = 4


def _backward_reason(*args, **options) -> str | None:
    *operands, mask = args
    experts = experts_of(*operands[:-NUM_SAVED], **options)
    return mlp_backward_reason(experts, *operands[-NUM_SAVED:], output_mask=mask)


@functools.cache
def launch_plan(device_index: int) -> "LaunchPlan":
    from ..moe.triton_kernels.configs import table_for_capability
    from ..moe.triton_kernels.scaled_configs import SCALED_TABLES

    plan = moe.launch_plan(device_index)
    table = table_for_capability(*moe.capability_of(device_index), SCALED_TABLES)
    assert table is not None, "the reasons let an unserved device through"
    return dataclasses.replace(plan, table={**plan.table, **table})


def _mlp_impl(*args, compute_preact=True, **options):
    from ..moe.triton_kernels.scaled_launch import moe_mlp_scaled_forward

    experts = experts_of(*args, **options)
    with moe.on_device(experts.input):
        plan = launch_plan(experts.input.get_device())
        return moe_mlp_scaled_forward(plan, experts, compute_preact=compute_preact)


def _mlp_backward_impl(*args, **options):
    from ..moe.triton_kernels.scaled_launch import moe_mlp_scaled_backward

    *operands, mask = args
    experts = experts_of(*operands[:-NUM_SAVED], **options)
    saved = operands[-NUM_SAVED:]
    mask = tuple(mask)
    with moe.on_device(experts.input):
        plan = launch_plan(experts.input.get_device())
        return moe_mlp_scaled_backward(plan, experts, saved, mask)


_mlp_cond = moe.cond_of(
    "_moe_mlp_scaled", lambda *a, **k: mlp_reason(experts_of(*a, **k))
)
_mlp_backward_cond = moe.cond_of("_moe_mlp_scaled_backward", _backward_reason)


def register_to_dispatch() -> None:
    moe.register("_moe_mlp_scaled", _mlp_cond, _mlp_impl)
    moe.register("_moe_mlp_scaled_backward", _mlp_backward_cond, _mlp_backward_impl)
