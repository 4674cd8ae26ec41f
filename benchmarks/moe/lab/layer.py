"""The layer of F.moe_mlp on the launchers alone, for a torch that has no torch/_native.

There is one kernel per product and no fallback: calls that torch/_native leaves to the composite
are errors of the launcher here.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .loading import launch


class Backend(NamedTuple):
    """Forward and backward of the experts.

    Attributes:
        forward: (plan, operands, compute_preact=) -> output and preact.
        backward: (plan, grad_output, operands, preact, output_mask) -> gradients, those of the
            input, w_in, w_out and the router weights first.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, ...]]


def _triton_forward(plan, operands, **options):
    return launch.moe_mlp_forward(plan, launch.Experts(*operands), **options)


def _triton_backward(plan, grad_output, operands, preact, mask):
    experts = launch.Experts(*operands)
    return launch.moe_mlp_backward(plan, experts, grad_output, preact, mask)


TRITON = Backend(_triton_forward, _triton_backward)
_plan: launch.LaunchPlan | None = None


def use_plan(plan: launch.LaunchPlan | None) -> None:
    """The tile tables that layers launch with from now on."""
    global _plan
    _plan = plan


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, compute_preact, x, ids, weights, w_in, w_out):
        row_slots, slot_rows, offs, _ = launch.moe_permutation(ids, w_in.shape[0])
        operands = (x, w_in, w_out, offs, weights, row_slots, slot_rows)
        output, preact = backend.forward(_plan, operands, compute_preact=compute_preact)
        ctx.backend = backend
        ctx.save_for_backward(*operands, preact)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        *operands, preact = ctx.saved_tensors
        need_x, _, need_weights, need_in, need_out = ctx.needs_input_grad[2:]
        mask = (need_x, need_in, need_out, need_weights, False, False, False)
        grads = ctx.backend.backward(_plan, grad_output, operands, preact, mask)
        dx, dw_in, dw_out, dweights = (
            grad if wanted else None for grad, wanted in zip(grads[:4], mask)
        )
        return None, None, dx, None, dweights, dw_in, dw_out


def layer(x, ids, weights, w_in, w_out, *, backend: Backend = TRITON) -> Tensor:
    """A SwiGLU expert layer, (T, D), from routing that is given; shapes are F.moe_mlp's."""
    if _plan is None:
        raise RuntimeError("lab.layer: call use_plan before a layer")
    leaves = (x, weights, w_in, w_out)
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in leaves)
    return _Experts.apply(backend, trains, x, ids, weights, w_in, w_out)
