"""Lowerings of ``aten::_moe_mlp`` and its backward on CUDA.

The launchers of torch/_native/ops/moe are traced, so that their Triton kernels become
user-defined kernels of the graph: one source of kernels, and none of them needs Python at run
time, which AOTInductor and the C++ wrapper do not have. The sum over a token's rows, the last
step of the forward and of the gradient of the input, is Inductor IR, so that what follows
(residual, cast, norm) fuses into it.

An op that the kernels do not serve is not lowered and chooses its kernel at run time.
TORCH_LOGS="+inductor" says why. An op whose kernels no GPU has run
(torch/_native/ops/moe/proven.py) is not lowered either, unless ``config.triton.moe_kernels`` is set.
"""

import dataclasses
import functools
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
from torch.utils._pytree import tree_flatten, tree_unflatten


if TYPE_CHECKING:
    from torch._native.ops.moe.triton_kernels.rows import LaunchPlan

log = logging.getLogger(__name__)
aten = torch.ops.aten

ALIGNMENT = 16


# --- who is served ---------------------------------------------------------------------------


def is_static(sizes: Sequence[Any]) -> bool:
    return all(isinstance(size, int) or size.is_number for size in sizes)


def is_aligned(node: IRNode) -> bool:
    """Whether the kernels may assume that ``node`` begins at a multiple of 16 bytes.

    An input that is aligned at compile time is aligned in every call: Inductor copies others.
    """
    if node.get_name() in V.graph.unaligned_buffers:
        return False
    offset = node.get_layout().offset * node.get_dtype().itemsize
    return V.graph.sizevars.statically_known_multiple_of(offset, ALIGNMENT)


def graph_reason(experts: Any) -> str | None:
    """Why the launchers cannot be traced on these nodes, or None."""
    input, slot_rows = experts.input, experts.slot_rows
    biases = {"b_in": experts.b_in, "b_out": experts.b_out}
    for name, node in {**experts.weights, **biases}.items():
        if node is None:
            continue
        if not is_static([*node.get_size(), *node.get_stride()]):
            return f"{name} has dynamic sizes or strides"
        if not is_aligned(node):
            return f"{name} is not known to be aligned to {ALIGNMENT} bytes"
    if slot_rows is not None and not is_static(slot_rows.get_size()[1:]):
        return "the number of experts of a token is dynamic"
    if V.graph.sizevars.statically_known_equals(input.get_numel(), 0):
        return "there are no tokens"
    return None


def general_reason(op: str, node: IRNode) -> str | None:
    """Why ``op`` on the device of ``node`` does not become kernels, whatever its operands, or None."""
    device = node.get_device()
    if device is None or device.type != "cuda":
        return f"device is {device}, not CUDA"
    if config.triton.moe_kernels is None:
        from torch._native.ops.moe.triton_impl import runs_by_default

        if not runs_by_default(op, device):
            return "no GPU like this one has run the kernels: config.triton.moe_kernels"
    elif not config.triton.moe_kernels:
        return "config.triton.moe_kernels is False"
    return None


def with_hints(*nodes: IRNode | None) -> list[Any]:
    """Fake tensors with numbers for sizes, so that no rule becomes a guard.

    The meta kernels have checked what a dynamic size could break.
    """
    with V.fake_mode:
        return [ir_node_to_tensor(x, replace_symbols_with_hints=True) for x in nodes]


def realized(node: Any) -> Any:
    return None if node is None else TensorBox(ExternKernel.realize_input(node))


# --- tracing ---------------------------------------------------------------------------------


def _hint(size: Any) -> int:
    if isinstance(size, int):
        return size
    return int(V.graph.sizevars.optimization_hint(size.node.expr))


def _is_addressable(x: torch.Tensor) -> bool:
    # The base is a buffer, or what is_aligned() let through.
    size: Any = x.numel()
    some = isinstance(size, int) or V.graph.sizevars.statically_known_gt(
        size.node.expr, 0
    )
    return some and bool(x.storage_offset() * x.element_size() % ALIGNMENT == 0)


def traced_plan(
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


def trace(function: Callable[..., Any], operands: Sequence[Any]) -> Sequence[TensorBox]:
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


def sum_of_rows(routed: TensorBox, slot_rows: TensorBox) -> TensorBox:
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


# --- the lowerings ---------------------------------------------------------------------------


def stays(op: str, reason: str | None) -> bool:
    counters["inductor"][f"{op}_{'kernels' if reason is None else 'extern'}"] += 1
    if reason is not None:
        log.info("%s stays an extern call: %s", op, reason)
    return reason is not None


def experts_reason(
    op: str,
    make: Callable[..., Any],
    operands: Sequence[Any],
    rest: Sequence[Any],
    check: Callable[..., str | None],
) -> str | None:
    """Why an op of the experts is not lowered, or None.

    Args:
        op: its name.
        make: the description (``Experts`` of torch/_native/ops/moe), of tensors or nodes.
        operands, rest: realized nodes of the description, and the others.
        check: the rules of torch/_native/ops, on a description and tensors.
    """
    reason = general_reason(op, operands[0])
    reason = reason or graph_reason(make(*operands))
    if reason is None:
        nodes, spec = tree_flatten((operands, rest))
        operands, rest = tree_unflatten(with_hints(*nodes), spec)
        reason = check(make(*operands), *rest)
    return reason


def experts_kernels(
    launcher: Callable[..., Any],
    make: Callable[..., Any],
    operands: Sequence[Any],
    rest: Sequence[Any],
    plan_of: "Callable[[int], LaunchPlan]",
    mask: Sequence[bool] | None = None,
    **own: Any,
) -> list[Any]:
    """The results of ``launcher`` as nodes, the first one summed per token.

    Args:
        launcher: of launch.py or scaled_launch.py.
        make, operands, rest: as of :func:`experts_reason`.
        plan_of: the plan of a device.
        mask: of a backward, which gradients are wanted.
        own: options that only this launcher has.
    """
    experts = make(*operands)
    plan, chooser = traced_plan(experts.input.get_device(), plan_of)
    nodes, spec = tree_flatten((operands, rest))

    def call(*tensors: Any, wanted: Sequence[bool] | None = mask) -> Any:
        operands, rest = tree_unflatten(tensors, spec)
        if wanted is not None:
            rest = (*rest, tuple(wanted))
        return launcher(plan, make(*operands), *rest, **own, combine=False)

    stages = [lambda *tensors: call(*tensors)[0]]
    if mask is not None:

        def gradient(i: int, count: int = len(mask)) -> Callable[..., Any]:
            only = [j == i for j in range(count)]
            return lambda *tensors: call(*tensors, wanted=only)[i]

        # Those with a matmul: of the input and the weights.
        stages = [gradient(i) for i in (0, 1, 2, 6) if mask[i]]
    # The autotuner's cache knows sizes and strides. Its key needs all else that kernels depend on.
    present = "".join("01"[node is not None] for node in nodes)
    traits = [
        getattr(experts, field.name)
        for field in dataclasses.fields(experts)
        if field.kw_only
    ]
    text = f"{launcher.__name__}_{nodes[0].get_dtype()}_{present}_{mask}_{own}_{traits}"
    tune(re.sub(r"\W+", "_", text), chooser, stages, nodes, experts)
    first, *others = trace(call, nodes)
    if experts.slot_rows is not None and (mask is None or mask[0]):
        first = sum_of_rows(first, experts.slot_rows)
    return [first, *others]


_fallback = fallback_handler(aten._moe_mlp.default, add_to_fallback_set=False)


@register_lowering(aten._moe_mlp.default, type_promotion_kind=None)
def _moe_mlp(*args, compute_preact=True, **options):
    from torch._native.ops.moe import triton_impl

    # Those that may be left out may also come by name.
    names = [field.name for field in dataclasses.fields(triton_impl.Experts)]
    named = [options.pop(n, None) for n in names[len(args) :] if n != "act"]
    operands = [realized(x) for x in (*args, *named)]
    make = functools.partial(triton_impl.experts_of, **options)
    check = functools.partial(triton_impl.mlp_reason, memory=False)
    if stays("_moe_mlp", experts_reason("_moe_mlp", make, operands, (), check)):
        return _fallback(*operands, **options, compute_preact=compute_preact)

    from torch._native.ops.moe.triton_kernels.launch import moe_mlp_forward

    return experts_kernels(
        moe_mlp_forward,
        make,
        operands,
        (),
        triton_impl.launch_plan,
        compute_preact=compute_preact,
    )


_fallback_backward = fallback_handler(
    aten._moe_mlp_backward.default, add_to_fallback_set=False
)


@register_lowering(aten._moe_mlp_backward.default, type_promotion_kind=None)
def _moe_mlp_backward(*args, **options):
    from torch._native.ops.moe import triton_impl

    *nodes, mask = args
    grad_out, *operands, preact = (realized(x) for x in nodes)
    make = functools.partial(triton_impl.experts_of, **options)
    check = functools.partial(triton_impl.mlp_backward_reason, memory=False)
    rest = (grad_out, preact)
    if stays(
        "_moe_mlp_backward",
        experts_reason("_moe_mlp_backward", make, operands, rest, check),
    ):
        return _fallback_backward(grad_out, *operands, preact, mask, **options)

    from torch._native.ops.moe.triton_kernels.launch import moe_mlp_backward

    return experts_kernels(
        moe_mlp_backward, make, operands, rest, triton_impl.launch_plan, mask
    )
