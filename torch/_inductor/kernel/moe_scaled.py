"""Lowerings of ``aten::_moe_quantize``, ``_moe_mlp_scaled`` and its backward on CUDA.

As in moe.py: the launchers of torch/_native/ops are traced, so that their Triton kernels become
user-defined kernels of the graph. Without that the C++ wrapper and AOTInductor call the composites,
which turn every weight into 16 bits on each call. The kernels take codes and scales of 8 bits as
bytes, with few exceptions, as Inductor's own kernels know few of their types.

Ops that the kernels do not serve stay; TORCH_LOGS="+inductor" says why.
"""

import functools
from typing import Any

import torch
from torch._inductor.ir import get_free_symbols, IRNode
from torch._inductor.kernel.moe import (
    ALIGNMENT,
    experts_kernels,
    experts_reason,
    general_reason,
    is_aligned,
    is_static,
    realized,
    stays,
    trace,
    with_hints,
)
from torch._inductor.kernel.moe_routing import fixed, traced
from torch._inductor.lowering import fallback_handler, register_lowering
from torch.utils._pytree import tree_map


aten = torch.ops.aten


# --- rows and weights ------------------------------------------------------------------------

_quantize_fallback = fallback_handler(
    aten._moe_quantize.default, add_to_fallback_set=False
)


def _quantize_reason(
    x: IRNode, recipe: int, offs: IRNode | None, options: dict[str, Any]
) -> str | None:
    reason = general_reason("_moe_quantize", x)
    if reason is not None:
        return reason
    if offs is not None and not is_static(offs.get_size()):
        return "the number of experts is dynamic"
    if get_free_symbols(x.get_stride(), unbacked_only=True):
        return "self has strides that are not known"
    from torch._native.ops.moe.quantize_impl import quantize_reason

    tensor, offs = with_hints(x, offs)
    return quantize_reason(tensor, recipe, offs=offs, **options, memory=False)


@register_lowering(aten._moe_quantize.default, type_promotion_kind=None)
def _moe_quantize(x, recipe, *, offs=None, dim=-1, dtype=None, swizzle=0):
    x, offs = fixed(x), fixed(offs)
    options = {"dim": dim, "dtype": dtype, "swizzle": swizzle}
    if stays("_moe_quantize", _quantize_reason(x, recipe, offs, options)):
        return _quantize_fallback(x, recipe, offs=offs, **options)

    from torch._native.ops.moe.quantize_impl import converts_float8
    from torch._native.ops.moe.triton_kernels.quantize import moe_quantize

    native = converts_float8(x.get_device().index or 0)
    launch = traced(moe_quantize, native=native, **options)
    return trace(lambda x, offs: launch(x, recipe, offs=offs), [x, offs])


# --- the experts -----------------------------------------------------------------------------


def _reason(op, make, operands, rest, check) -> str | None:
    for name, scaled in make(*operands).lists.items():
        for node in scaled:
            # Those of the input have as many rows as there are tokens.
            sizes = node.get_size()[int(name == "input_scaled") :]
            if not is_static([*sizes, *node.get_stride()]):
                return f"{name} has dynamic sizes or strides"
            if not is_aligned(node):
                return f"{name} is not known to be aligned to {ALIGNMENT} bytes"
    return experts_reason(op, make, operands, rest, check)


_mlp_fallback = fallback_handler(
    aten._moe_mlp_scaled.default, add_to_fallback_set=False
)


@register_lowering(aten._moe_mlp_scaled.default, type_promotion_kind=None)
def _moe_mlp_scaled(*args, compute_preact=True, **options):
    from torch._native.ops.moe_scaled import triton_impl

    operands = tree_map(realized, args)
    make = functools.partial(triton_impl.experts_of, **options)
    check = functools.partial(triton_impl.mlp_reason, memory=False)
    if stays("_moe_mlp_scaled", _reason("_moe_mlp_scaled", make, operands, (), check)):
        return _mlp_fallback(*operands, **options, compute_preact=compute_preact)

    from torch._native.ops.moe.triton_kernels.scaled_launch import (
        moe_mlp_scaled_forward,
    )

    return experts_kernels(
        moe_mlp_scaled_forward,
        make,
        operands,
        (),
        triton_impl.launch_plan,
        compute_preact=compute_preact,
    )


_mlp_backward_fallback = fallback_handler(
    aten._moe_mlp_scaled_backward.default, add_to_fallback_set=False
)


@register_lowering(aten._moe_mlp_scaled_backward.default, type_promotion_kind=None)
def _moe_mlp_scaled_backward(*args, **options):
    from torch._native.ops.moe_scaled import triton_impl

    *nodes, mask = args
    nodes = tree_map(realized, nodes)
    # There is no argument ``input``. The gradient of the output has its sizes.
    operands, saved = nodes[: -triton_impl.NUM_SAVED], nodes[-triton_impl.NUM_SAVED :]
    make = functools.partial(triton_impl.experts_of, **options)
    reason = triton_impl.mlp_backward_reason
    check = functools.partial(reason, output_mask=mask, memory=False)
    if stays(
        "_moe_mlp_scaled_backward",
        _reason("_moe_mlp_scaled_backward", make, operands, saved, check),
    ):
        return _mlp_backward_fallback(*nodes, mask, **options)

    from torch._native.ops.moe.triton_kernels.scaled_launch import (
        moe_mlp_scaled_backward,
    )

    return experts_kernels(
        moe_mlp_scaled_backward,
        make,
        operands,
        (saved,),
        triton_impl.launch_plan,
        mask,
    )
