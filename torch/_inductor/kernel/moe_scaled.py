"""Lowerings of ``aten::_moe_quantize``, ``_moe_mlp_scaled`` and its backward on CUDA.

As in moe.py: the launchers of torch/_native/ops are traced, so that their Triton kernels become
user-defined kernels of the graph. Without that the C++ wrapper and AOTInductor call the composites,
which turn every weight into 16 bits on each call. The kernels take codes and scales of 8 bits as
bytes, with few exceptions, as Inductor's own kernels know few of their types.

What the kernels do not serve stays the op; TORCH_LOGS="+inductor" says why.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.ir import get_free_symbols, IRNode
from torch._inductor.kernel.moe import (
    _ALIGNMENT,
    _cache_name,
    _general_reason,
    _graph_reason,
    _is_aligned,
    _is_static,
    _plan,
    _realized,
    _stays,
    _sum_of_rows,
    _trace,
)
from torch._inductor.kernel.moe_autotune import tune
from torch._inductor.kernel.moe_routing import _fixed, _traced, _with_hints
from torch._inductor.lowering import fallback_handler, register_lowering
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


aten = torch.ops.aten


# --- rows and weights ------------------------------------------------------------------------

_quantize_fallback = fallback_handler(
    aten._moe_quantize.default, add_to_fallback_set=False
)


def _quantize_reason(
    x: IRNode, recipe: int, offs: IRNode | None, options: dict[str, Any]
) -> str | None:
    reason = _general_reason(x)
    if reason is not None:
        return reason
    if offs is not None and not _is_static(offs.get_size()):
        return "the number of experts is dynamic"
    if get_free_symbols(x.get_stride(), unbacked_only=True):
        return "self has strides that are not known"
    from torch._native.ops.moe.quantize_impl import quantize_reason

    tensor, offs = _with_hints(x, offs)
    return quantize_reason(tensor, recipe, offs=offs, **options, memory=False)


@register_lowering(aten._moe_quantize.default, type_promotion_kind=None)
def _moe_quantize(x, recipe, *, offs=None, dim=-1, dtype=None, swizzle=0):
    x, offs = _fixed(x), _fixed(offs)
    options = {"dim": dim, "dtype": dtype, "swizzle": swizzle}
    if _stays("_moe_quantize", _quantize_reason(x, recipe, offs, options)):
        return _quantize_fallback(x, recipe, offs=offs, **options)

    from torch._native.ops.moe.quantize_impl import _converts_float8
    from torch._native.ops.moe.triton_kernels.quantize import moe_quantize

    native = _converts_float8(x.get_device().index or 0)
    launch = _traced(moe_quantize, native=native, **options)
    return _trace(lambda x, offs: launch(x, recipe, offs=offs), [x, offs])


# --- the experts -----------------------------------------------------------------------------


# Where the lists of quantised tensors are among the arguments.
_LISTS = {
    10: "input_scaled",
    11: "w_in_scaled",
    12: "w_out_scaled",
    13: "w_up_scaled",
}
_ACTIVATION = {
    "activation": "swiglu",
    "gate_interleaved": False,
    "alpha": None,
    "limit": None,
}


def _reason(args: Sequence[Any], check: Callable[..., str | None]) -> str | None:
    """Why the op stays, or None.

    Args:
        args: realized, in the order of the op; the first one is ``input`` or its like.
        check: the rules of torch/_native/ops/moe_scaled, on tensors like ``args``.
    """
    reason = _general_reason(args[0]) or _graph_reason(args[:10])
    if reason is not None:
        return reason
    for i, name in _LISTS.items():
        for node in args[i]:
            # Those of the input have as many rows as there are tokens.
            sizes = node.get_size()[1:] if i == 10 else node.get_size()
            if not _is_static([*sizes, *node.get_stride()]):
                return f"{name} has dynamic sizes or strides"
            if not _is_aligned(node):
                return f"{name} is not known to be aligned to {_ALIGNMENT} bytes"
    nodes, spec = tree_flatten(args)
    return check(*tree_unflatten(_with_hints(*nodes), spec))


def _kernels(
    launcher: Callable[..., Any],
    args: Sequence[Any],
    options: dict[str, Any],
    stages: Callable[[Callable[..., Any]], list[Callable[..., Any]]],
    **own: Any,
) -> list[Any]:
    """The results of ``launcher`` as nodes, the first one in rows.

    Args:
        launcher: of scaled_launch.py.
        args: as for :func:`_reason`.
        options: of the op.
        stages: makes of a function of tensors, one per node of ``args``, those that are tuned.
        own: options that only this launcher has.
    """
    from torch._native.ops.moe.triton_kernels.activations import Activation
    from torch._native.ops.moe_scaled import triton_impl

    device = args[0].get_device()
    plan, chooser = _plan(device, triton_impl._plan)
    act = Activation(*(options.get(k, default) for k, default in _ACTIVATION.items()))
    recipe = triton_impl._recipe(device.index or 0, **options)
    nodes, spec = tree_flatten(args)

    def call(*tensors: Any, **changed: Any) -> Any:
        return launcher(
            plan,
            *tree_unflatten(tensors, spec),
            **{**own, **changed},
            recipe=recipe,
            act=act,
            combine=False,
        )

    name = _cache_name(launcher.__name__, act, (recipe, own), nodes)
    tune(name, chooser, stages(call), nodes, first=0)
    return list(_trace(call, nodes))


_mlp_fallback = fallback_handler(
    aten._moe_mlp_scaled.default, add_to_fallback_set=False
)


@register_lowering(aten._moe_mlp_scaled.default, type_promotion_kind=None)
def _moe_mlp_scaled(*args, **options):
    args = tree_map(_realized, args)

    def check(*tensors):
        from torch._native.ops.moe_scaled.triton_impl import mlp_reason

        return mlp_reason(*tensors, **options, memory=False)

    if _stays("_moe_mlp_scaled", _reason(args, check)):
        return _mlp_fallback(*args, **options)

    from torch._native.ops.moe.triton_kernels.scaled_launch import (
        moe_mlp_scaled_forward,
    )

    output, *saved = _kernels(
        moe_mlp_scaled_forward,
        args,
        options,
        lambda call: [lambda *tensors: call(*tensors)[0]],
        preact_dtype=options.get("preact_dtype"),
        compute_preact=options.get("compute_preact", True),
    )
    slot_rows = args[6]
    if slot_rows is not None:
        output = _sum_of_rows(output, slot_rows)
    return output, *saved


_mlp_backward_fallback = fallback_handler(
    aten._moe_mlp_scaled_backward.default, add_to_fallback_set=False
)


@register_lowering(aten._moe_mlp_scaled_backward.default, type_promotion_kind=None)
def _moe_mlp_scaled_backward(*args, **options):
    *args, mask = args
    args = tree_map(_realized, args)

    def check(*tensors):
        from torch._native.ops.moe_scaled.triton_impl import mlp_backward_reason

        return mlp_backward_reason(*tensors, mask, **options, memory=False)

    # ``input`` is none of the arguments, and the gradient of the output has its sizes.
    if _stays("_moe_mlp_scaled_backward", _reason(args, check)):
        return _mlp_backward_fallback(*args, mask, **options)

    from torch._native.ops.moe.triton_kernels.scaled_launch import (
        moe_mlp_scaled_backward,
    )

    def stages(call):
        def one_gradient(i):
            only = tuple(j == i for j in range(len(mask)))
            return lambda *tensors: call(*tensors, output_mask=only)[i]

        # Those with a matmul: of the input and the weights.
        return [one_gradient(i) for i in (0, 1, 2, 6) if mask[i]]

    grads = _kernels(
        moe_mlp_scaled_backward,
        args,
        options,
        stages,
        output_mask=tuple(mask),
        hp_wgrad=options.get("hp_wgrad", False),
    )
    slot_rows = args[6]
    if mask[0] and slot_rows is not None:
        grads[0] = _sum_of_rows(grads[0], slot_rows)
    return grads
