"""Lowerings of ``aten::_moe_topk``, its backward and ``aten::_moe_permutation`` on CUDA.

As in moe.py: the launchers of torch/_native/ops/moe are traced, so that their Triton kernels
become user-defined kernels of the graph. Without that the C++ wrapper and AOTInductor call the
composites, which sort. Ops that the kernels do not serve stay; TORCH_LOGS="+inductor" says why.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy

import torch
from torch._inductor.ir import ExternKernel, IRNode, TensorBox
from torch._inductor.kernel.moe import (
    general_reason,
    is_static,
    stays,
    trace,
    with_hints,
)
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V
from torch.utils._sympy.numbers import int_oo


aten = torch.ops.aten


def fixed(node: Any) -> Any:
    """``node``, realized, with strides that no longer change."""
    if node is None:
        return None
    node = TensorBox(ExternKernel.realize_input(node))
    node.freeze_layout()
    return node


def _bound(size: Any) -> float:
    """An upper bound of ``size``, without a guard."""
    if isinstance(size, int):
        return size
    upper = V.graph.sizevars.shape_env.bound_sympy(size.node.expr).upper
    return math.inf if upper in (int_oo, sympy.oo) else int(upper)


def traced(launcher: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    from torch.library import wrap_triton

    return functools.partial(launcher, kernel=wrap_triton, bound=_bound, **options)


# --- the permutation -------------------------------------------------------------------------

_permutation_fallback = fallback_handler(
    aten._moe_permutation.default, add_to_fallback_set=False
)


def _permutation_reason(
    topk_indices: IRNode, num_experts: Any, num_rows: Any, row_alignment: Any
) -> str | None:
    reason = general_reason("_moe_permutation", topk_indices)
    if reason is not None:
        return reason
    for name, size in (("num_experts", num_experts), ("row_alignment", row_alignment)):
        if not is_static([size]):
            return f"{name} is dynamic"
    from torch._native.ops.moe.triton_impl import permutation_reason

    if num_rows is not None:
        num_rows = int(V.graph.sizevars.optimization_hint(num_rows))
    (ids,) = with_hints(topk_indices)
    return permutation_reason(
        ids,
        int(num_experts),
        num_rows,
        int(row_alignment),
        memory=False,
    )


@register_lowering(aten._moe_permutation.default, type_promotion_kind=None)
def _moe_permutation(topk_indices, num_experts, *, num_rows=None, row_alignment=1):
    topk_indices = fixed(topk_indices)
    reason = _permutation_reason(topk_indices, num_experts, num_rows, row_alignment)
    if stays("_moe_permutation", reason):
        return _permutation_fallback(
            topk_indices, num_experts, num_rows=num_rows, row_alignment=row_alignment
        )

    from torch._native.ops.moe.triton_kernels.permutation import moe_permutation

    # The launcher would copy as well, and ask for strides that may be symbolic.
    topk_indices = ExternKernel.require_contiguous(topk_indices)
    if num_rows is not None and is_static([num_rows]):
        num_rows = int(num_rows)
    launch = traced(moe_permutation, row_alignment=int(row_alignment))

    def permute(topk_indices, rows):
        return launch(
            topk_indices, int(num_experts), num_rows=num_rows if rows is None else rows
        )

    dynamic_rows = None if isinstance(num_rows, int) else num_rows
    return trace(permute, [topk_indices, dynamic_rows])


# --- the router ------------------------------------------------------------------------------

_topk_fallback = fallback_handler(aten._moe_topk.default, add_to_fallback_set=False)
_topk_backward_fallback = fallback_handler(
    aten._moe_topk_backward.default, add_to_fallback_set=False
)


def _router_reason(
    op: str,
    logits: IRNode,
    nodes: Sequence[IRNode | None],
    check: Callable[..., str | None],
) -> str | None:
    """Why the router or its backward, whose tensors are ``nodes``, is not lowered, or None."""
    reason = general_reason(op, logits)
    if reason is not None:
        return reason
    if not is_static(logits.get_size()[1:]):
        return "the number of experts is dynamic"
    if any(x is not None and not is_static(x.get_size()[1:]) for x in nodes):
        return "the number of experts of a token is dynamic"
    return check(*with_hints(*nodes))


@register_lowering(aten._moe_topk.default, type_promotion_kind=None)
def _moe_topk(logits, k, bias=None, **options):
    logits, bias = fixed(logits), fixed(bias)

    def check(logits, bias):
        from torch._native.ops.moe.triton_impl import topk_reason

        return topk_reason(logits, k, bias, **options, memory=False)

    if stays("_moe_topk", _router_reason("_moe_topk", logits, (logits, bias), check)):
        return _topk_fallback(logits, k, bias, **options)

    from torch._native.ops.moe.triton_kernels.topk import moe_topk

    launch = traced(moe_topk, **options)
    return trace(lambda logits, bias: launch(logits, k, bias), [logits, bias])


@register_lowering(aten._moe_topk_backward.default, type_promotion_kind=None)
def _moe_topk_backward(grad_weights, logits, topk_indices, **options):
    operands = [fixed(node) for node in (grad_weights, logits, topk_indices)]

    def check(*tensors):
        from torch._native.ops.moe.triton_impl import topk_backward_reason

        return topk_backward_reason(*tensors, **options, memory=False)

    reason = _router_reason("_moe_topk_backward", operands[1], operands, check)
    if stays("_moe_topk_backward", reason):
        return _topk_backward_fallback(*operands, **options)

    from torch._native.ops.moe.triton_kernels.topk import moe_topk_backward

    return trace(traced(moe_topk_backward, **options), operands)
