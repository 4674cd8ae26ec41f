"""Lowerings of ``aten::_moe_mlp`` and its backward on CUDA.

The launchers of torch/_native/ops/moe are traced, so that their Triton kernels become
user-defined kernels of the graph: one source of kernels, and none of them needs Python at run
time, which AOTInductor and the C++ wrapper do not have. The sum over a token's rows, the last
step of the forward and of the gradient of the input, is Inductor IR, so that what follows
(residual, cast, norm) fuses into it.

What the kernels do not serve stays the op, which chooses its kernel at run time. TORCH_LOGS="+inductor"
says why. All of them stay unless ``config.triton.moe_kernels``: no kernel has run on a GPU yet.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, cast, TYPE_CHECKING

import sympy

import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.codegen.subgraph import inline_subgraph_to_ir_nodes
from torch._inductor.ir import (
    ExternKernel,
    ir_node_to_tensor,
    IRNode,
    Pointwise,
    TensorBox,
)
from torch._inductor.kernel.moe_autotune import TileChooser, tune
from torch._inductor.lowering import fallback_handler, ops, register_lowering
from torch._inductor.utils import convert_shape_to_symint
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx


if TYPE_CHECKING:
    from torch._native.ops.moe.triton_kernels.launch import LaunchPlan

log = logging.getLogger(__name__)
aten = torch.ops.aten

_ALIGNMENT = 16


# --- who is served ---------------------------------------------------------------------------


def _is_static(sizes: Sequence[Any]) -> bool:
    return all(isinstance(size, int) or size.is_number for size in sizes)


def _is_aligned(node: IRNode) -> bool:
    """Whether the kernels may take it that ``node`` begins at a multiple of 16 bytes.

    Inputs of the graph that do when it is compiled do so in every call: others are copied.
    """
    if node.get_name() in V.graph.unaligned_buffers:
        return False
    offset = node.get_layout().offset * node.get_dtype().itemsize
    return V.graph.sizevars.statically_known_multiple_of(offset, _ALIGNMENT)


def _graph_reason(operands: Sequence[IRNode | None]) -> str | None:
    """Why the launchers cannot be traced on the operands of the forward, or None."""
    input, w_in, w_out, _, _, _, slot_rows, b_in, b_out, w_up = operands
    assert input is not None
    for name, node in (
        ("w_in", w_in),
        ("w_out", w_out),
        ("w_up", w_up),
        ("b_in", b_in),
        ("b_out", b_out),
    ):
        if node is None:
            continue
        if not _is_static([*node.get_size(), *node.get_stride()]):
            return f"{name} has dynamic sizes or strides"
        if not _is_aligned(node):
            return f"{name} is not known to be aligned to {_ALIGNMENT} bytes"
    if slot_rows is not None and not _is_static(slot_rows.get_size()[1:]):
        return "the number of experts of a token is dynamic"
    if V.graph.sizevars.statically_known_equals(input.get_numel(), 0):
        return "there are no tokens"
    return None


def _general_reason(node: IRNode) -> str | None:
    """Why no MoE op on the device of ``node`` becomes kernels, or None."""
    device = node.get_device()
    if device is None or device.type != "cuda":
        return f"device is {device}, not CUDA"
    if not config.triton.moe_kernels:
        return "config.triton.moe_kernels is False"
    return None


def _reason(
    operands: Sequence[IRNode | None], check: Callable[[list[Any]], str | None]
) -> str | None:
    """Why the op stays, or None.

    Args:
        operands: of the forward.
        check: the rules of torch/_native/ops/moe, on tensors like ``operands``.
    """
    input = operands[0]
    assert input is not None
    reason = _general_reason(input) or _graph_reason(operands)
    if reason is None:
        # With hints for sizes, so that no rule becomes a guard: torch._moe_permutation and
        # the meta kernel have checked what a dynamic size could break.
        with V.fake_mode:
            tensors = [
                ir_node_to_tensor(node, replace_symbols_with_hints=True)
                for node in operands
            ]
        reason = check(tensors)
    return reason


def _realized(node: Any) -> Any:
    return None if node is None else TensorBox(ExternKernel.realize_input(node))


# --- tracing ---------------------------------------------------------------------------------


def _hint(size: Any) -> int:
    if isinstance(size, int):
        return size
    return int(V.graph.sizevars.optimization_hint(size.node.expr))


def _is_addressable(x: torch.Tensor) -> bool:
    # The base is a buffer, or what _is_aligned() let through.
    size: Any = x.numel()
    some = isinstance(size, int) or V.graph.sizevars.statically_known_gt(
        size.node.expr, 0
    )
    return some and bool(x.storage_offset() * x.element_size() % _ALIGNMENT == 0)


def _plan(
    device: torch.device, plan_of: "Callable[[int], LaunchPlan]"
) -> "tuple[LaunchPlan, TileChooser]":
    """``plan_of`` the device, for launchers that are traced."""
    from torch.library import wrap_triton

    chooser = TileChooser()
    plan = dataclasses.replace(
        plan_of(device.index or 0),
        autotuner=cast("Any", chooser),  # with the method of Autotuner that is called
        kernel=wrap_triton,
        hint=_hint,
        is_addressable=_is_addressable,
        ragged=False,
    )
    return plan, chooser


def _trace(
    function: Callable[..., Any], operands: Sequence[Any]
) -> Sequence[TensorBox]:
    """``function(*tensors)`` as nodes of the graph that is being lowered.

    Args:
        function: calls launchers; an operand that is None is None for it.
        operands: realized nodes, symbolic sizes, or None.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._library.triton import set_wrap_triton_enabled

    present = [node for node in operands if node is not None]

    def call(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        return function(*(None if node is None else next(rest) for node in operands))

    with V.fake_mode, set_wrap_triton_enabled(True):
        fakes = [
            convert_shape_to_symint([node])[0]
            if isinstance(node, sympy.Expr)
            else ir_node_to_tensor(node)
            for node in present
        ]
        traced = make_fx(call, decomposition_table=select_decomp_table())(*fakes)
    return inline_subgraph_to_ir_nodes(traced, present, "moe")


def _sum_of_rows(routed: TensorBox, slot_rows: TensorBox) -> TensorBox:
    """(T, D): per token, the sum in float32 of its rows of ``routed`` (R, D), in slot order.

    Args:
        slot_rows: (T, K) rows; below 0 for none.
    """
    num_tokens, top_k = slot_rows.get_size()
    num_rows, dim = routed.get_size()
    load_row, load_value = slot_rows.make_loader(), routed.make_loader()
    dtype = routed.get_dtype()

    def inner(index):
        token, column = index
        total = ops.constant(0.0, torch.float32)
        for k in range(int(top_k)):
            # int64: a row times D may pass 2^31.
            row = ops.to_dtype(load_row([token, k]), torch.int64)
            at = ops.indirect_indexing(row, num_rows, check=False, wrap_neg=False)
            value = ops.masked(
                ops.ge(row, ops.constant(0, torch.int64)),
                lambda at=at: ops.to_dtype(load_value([at, column]), torch.float32),
                0.0,
            )
            total = ops.add(total, value)
        return ops.to_dtype(total, dtype)

    return Pointwise.create(
        device=routed.get_device(),
        dtype=dtype,
        inner_fn=inner,
        ranges=[num_tokens, dim],
    )


def _cache_name(op: str, act: Any, options: Any, operands: Sequence[Any]) -> str:
    """For the autotuner's cache, which knows sizes and strides: what else the kernels are of."""
    present = "".join("01"[node is not None] for node in operands)
    dtype = operands[0].get_dtype()
    text = f"{op}_{dtype}_{present}_{options}_{dataclasses.astuple(act)}"
    return re.sub(r"\W+", "_", text)


# --- the lowerings ---------------------------------------------------------------------------


def _stays(op: str, reason: str | None) -> bool:
    counters["inductor"][f"{op}_{'kernels' if reason is None else 'extern'}"] += 1
    if reason is not None:
        log.info("%s stays an extern call: %s", op, reason)
    return reason is not None


_fallback = fallback_handler(aten._moe_mlp.default, add_to_fallback_set=False)


@register_lowering(aten._moe_mlp.default, type_promotion_kind=None)
def _moe_mlp(
    input,
    w_in,
    w_out,
    offs,
    topk_weights=None,
    row_slots=None,
    slot_rows=None,
    b_in=None,
    b_out=None,
    w_up=None,
    *,
    activation="swiglu",
    gate_interleaved=False,
    alpha=None,
    limit=None,
    compute_preact=True,
):
    given = (
        input,
        w_in,
        w_out,
        offs,
        topk_weights,
        row_slots,
        slot_rows,
        b_in,
        b_out,
        w_up,
    )
    options: dict[str, Any] = {
        "activation": activation,
        "gate_interleaved": gate_interleaved,
        "alpha": alpha,
        "limit": limit,
    }
    operands = [_realized(node) for node in given]

    def check(tensors):
        from torch._native.ops.moe.triton_impl import mlp_reason

        return mlp_reason(*tensors, **options, memory=False)

    if _stays("_moe_mlp", _reason(operands, check)):
        return _fallback(*operands, **options, compute_preact=compute_preact)

    from torch._native.ops.moe import triton_impl
    from torch._native.ops.moe.triton_kernels import launch

    plan, chooser = _plan(input.get_device(), triton_impl._plan)
    act = launch.Activation(*options.values())

    def forward(*tensors):
        return launch.moe_mlp_forward(
            plan, *tensors, act=act, compute_preact=compute_preact, combine=False
        )

    name = _cache_name("moe_mlp", act, compute_preact, operands)
    tune(name, chooser, [lambda *t: forward(*t)[0]], operands, first=0)
    output, preact = _trace(forward, operands)
    if slot_rows is not None:
        output = _sum_of_rows(output, operands[6])
    return output, preact


_fallback_backward = fallback_handler(
    aten._moe_mlp_backward.default, add_to_fallback_set=False
)


@register_lowering(aten._moe_mlp_backward.default, type_promotion_kind=None)
def _moe_mlp_backward(
    grad_out,
    *rest,
    activation="swiglu",
    gate_interleaved=False,
    alpha=None,
    limit=None,
):
    *given, preact, output_mask = rest
    options: dict[str, Any] = {
        "activation": activation,
        "gate_interleaved": gate_interleaved,
        "alpha": alpha,
        "limit": limit,
    }
    grad_out, preact, *operands = map(_realized, (grad_out, preact, *given))

    def check(tensors):
        from torch._native.ops.moe.triton_impl import mlp_reason

        dtypes = {x.get_dtype() for x in (grad_out, preact)} | {tensors[0].dtype}
        if len(dtypes) > 1:
            return f"grad_out, preact and input have dtypes {dtypes}"
        return mlp_reason(*tensors, **options, memory=False)

    if _stays("_moe_mlp_backward", _reason(operands, check)):
        return _fallback_backward(grad_out, *operands, preact, output_mask, **options)

    from torch._native.ops.moe import triton_impl
    from torch._native.ops.moe.triton_kernels import launch

    plan, chooser = _plan(grad_out.get_device(), triton_impl._plan)
    act = launch.Activation(*options.values())

    def backward(grad_out, *tensors, mask=tuple(output_mask)):
        return launch.moe_mlp_backward(
            plan,
            grad_out,
            *tensors,
            output_mask=mask,
            act=act,
            combine=False,
        )

    def one_gradient(i):
        mask = tuple(j == i for j in range(len(output_mask)))
        return lambda *tensors: backward(*tensors, mask=mask)[i]

    nodes = [grad_out, *operands, preact]
    name = _cache_name("moe_mlp_backward", act, tuple(output_mask), operands)
    # Those with a matmul: of the input and the weights.
    stages = [one_gradient(i) for i in (0, 1, 2, 6) if output_mask[i]]
    tune(name, chooser, stages, nodes, first=1)
    grads = list(_trace(backward, nodes))
    slot_rows = operands[6]
    if output_mask[0] and slot_rows is not None:
        grads[0] = _sum_of_rows(grads[0], slot_rows)
    return grads
