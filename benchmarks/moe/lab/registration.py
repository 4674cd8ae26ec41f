"""The launchers as torch.library operators, for a torch that has no torch/_native.

Same schemas as aten::_moe_topk, _moe_permutation, _moe_mlp and their backward, in
namespace ``moe_lab``, so that the layer can be compiled, traced with fake tensors and
differentiated on any release that Triton runs on. There is one kernel per op and no
fallback: what torch/_native leaves to the composite is an error of the launcher here.
"""

import torch
from torch import Tensor

from .loading import launch, topk


NAMESPACE = "moe_lab"
_ACTIVATION = (
    'str activation="swiglu", bool gate_interleaved=False, '
    "float? alpha=None, float? limit=None"
)
_ROUTER = 'str score="softmax", bool normalize=True'
_GROUPS = "int? num_groups=None, int? top_groups=None"
_OPERANDS = (
    "Tensor input, Tensor w_in, Tensor w_out, Tensor offs, Tensor? topk_weights, "
    "Tensor? row_slots, Tensor? slot_rows, Tensor? b_in, Tensor? b_out, Tensor? w_up"
)
SCHEMAS: dict[str, str] = {
    "_moe_topk": f"(Tensor logits, int k, Tensor? bias=None, *, {_ROUTER}, {_GROUPS}, "
    "float scale=1.0) -> (Tensor topk_indices, Tensor topk_weights)",
    "_moe_topk_backward": "(Tensor grad_weights, Tensor logits, Tensor topk_indices, "
    f"*, {_ROUTER}, float scale=1.0) -> Tensor",
    "_moe_permutation": "(Tensor topk_indices, SymInt num_experts, *, "
    "SymInt? num_rows=None, SymInt row_alignment=1) -> "
    "(Tensor row_slots, Tensor slot_rows, Tensor offs, Tensor counts)",
    "_moe_mlp": f"({_OPERANDS}, *, {_ACTIVATION}, bool compute_preact=True) -> "
    "(Tensor output, Tensor preact)",
    "_moe_mlp_backward": f"(Tensor grad_out, {_OPERANDS}, Tensor preact, "
    f"bool[7] output_mask, *, {_ACTIVATION}) -> "
    "(Tensor grad_input, Tensor grad_w_in, Tensor grad_w_out, "
    "Tensor grad_topk_weights, Tensor grad_b_in, Tensor grad_b_out, "
    "Tensor grad_w_up)",
}

_plan: launch.LaunchPlan | None = None


def use_plan(plan: launch.LaunchPlan) -> None:
    """The tile tables that the operators launch with from now on."""
    global _plan
    _plan = plan


def current_plan() -> launch.LaunchPlan:
    """What the operators launch with."""
    if _plan is None:
        raise RuntimeError("moe_lab: call registration.use_plan before an operator")
    return _plan


def _activation(options: dict) -> launch.Activation:
    return launch.Activation(
        options.get("activation", "swiglu"),
        options.get("gate_interleaved", False),
        options.get("alpha"),
        options.get("limit"),
    )


def _mlp(*tensors, compute_preact=True, **options):
    return launch.moe_mlp_forward(
        current_plan(), *tensors, _activation(options), compute_preact=compute_preact
    )


def _mlp_backward(grad_out, *args, **options):
    *tensors, output_mask = args
    return launch.moe_mlp_backward(
        current_plan(), grad_out, *tensors, tuple(output_mask), _activation(options)
    )


def _fake_topk(logits, k, bias=None, **options):
    indices = logits.new_empty(logits.shape[0], k, dtype=torch.int64)
    return indices, torch.empty_like(indices, dtype=torch.float32)


def _fake_permutation(topk_indices, num_experts, *, num_rows=None, row_alignment=1):
    if num_rows is None:
        slots = topk_indices.numel()
        num_rows = slots + min(num_experts, slots) * (row_alignment - 1)
    new = topk_indices.new_empty
    return (
        new(num_rows, dtype=torch.int32),
        new(topk_indices.shape, dtype=torch.int32),
        new(num_experts, dtype=torch.int32),
        new(num_experts, dtype=torch.int32),
    )


def _fake_mlp(
    input, w_in, w_out, offs, topk_weights, row_slots, *rest, compute_preact=True, **_
):
    num_rows = input.shape[0] if row_slots is None else row_slots.shape[0]
    rows = num_rows if compute_preact else 0
    return input.new_empty(input.shape), input.new_empty(rows, w_in.shape[1])


def _fake_mlp_backward(grad_out, *args, **options):
    output_mask = args[-1]
    operands = (args[0], args[1], args[2], args[4], args[7], args[8], args[9])
    return tuple(
        torch.empty_like(x) if wanted and x is not None else grad_out.new_empty(0)
        for x, wanted in zip(operands, output_mask, strict=True)
    )


def _setup_topk(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(inputs[0], output[0])
    ctx.mark_non_differentiable(output[0])
    ctx.options = {
        name: keyword_only_inputs[name] for name in ("score", "normalize", "scale")
    }


def _topk_gradient(ctx, grad_indices, grad_weights):
    logits, topk_indices = ctx.saved_tensors
    ops = getattr(torch.ops, NAMESPACE)
    grad = ops._moe_topk_backward(grad_weights, logits, topk_indices, **ctx.options)
    return grad, None, None


def _setup_mlp(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.options = {
        name: value
        for name, value in keyword_only_inputs.items()
        if name != "compute_preact"
    }


def _mlp_gradient(ctx, grad_output, grad_preact):
    *operands, preact = ctx.saved_tensors
    # input, w_in, w_out, topk_weights, b_in, b_out, w_up
    differentiable = (0, 1, 2, 4, 7, 8, 9)
    mask = [ctx.needs_input_grad[i] for i in differentiable]
    ops = getattr(torch.ops, NAMESPACE)
    grads = ops._moe_mlp_backward(grad_output, *operands, preact, mask, **ctx.options)
    result = [None] * len(operands)
    for i, wanted, grad in zip(differentiable, mask, grads):
        result[i] = grad if wanted else None
    return tuple(result)


def register(device_key: str = "CUDA") -> torch.library.Library:
    """Defines the operators of namespace ``moe_lab`` for one kind of device.

    Args:
        device_key: dispatch key; "CPU" for a rehearsal in the interpreter.

    Returns:
        The library; the operators live as long as it does.
    """
    library = torch.library.Library(NAMESPACE, "DEF")
    kernels = {
        "_moe_topk": (topk.moe_topk, _fake_topk),
        "_moe_topk_backward": (
            topk.moe_topk_backward,
            lambda grad, logits, *rest, **options: logits.new_empty(logits.shape),
        ),
        "_moe_permutation": (launch.moe_permutation, _fake_permutation),
        "_moe_mlp": (_mlp, _fake_mlp),
        "_moe_mlp_backward": (_mlp_backward, _fake_mlp_backward),
    }
    for name, schema in SCHEMAS.items():
        kernel, fake = kernels[name]
        library.define(name + schema)
        library.impl(name, kernel, device_key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    for name, gradient, setup in (
        ("_moe_topk", _topk_gradient, _setup_topk),
        ("_moe_mlp", _mlp_gradient, _setup_mlp),
    ):
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}", gradient, setup_context=setup, lib=library
        )
    return library


def layer(x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor):
    """A SwiGLU expert layer, (T, D) from routing that is given."""
    ops = getattr(torch.ops, NAMESPACE)
    row_slots, slot_rows, offs, _ = ops._moe_permutation(ids, w_in.shape[0])
    needs_grad = torch.is_grad_enabled() and any(
        t.requires_grad for t in (x, weights, w_in, w_out)
    )
    output, _ = ops._moe_mlp(
        x, w_in, w_out, offs, weights, row_slots, slot_rows, None, None, None,
        compute_preact=needs_grad,
    )  # fmt: skip
    return output


def route(logits: Tensor, k: int, **options) -> tuple[Tensor, Tensor]:
    """``F.moe_topk`` through the router kernel."""
    ops = getattr(torch.ops, NAMESPACE)
    return ops._moe_topk(logits, k, **options)
