"""The CuTe backend of this repository as one more library that may be there.

It needs torch 2.15, which vendors QuACK, and the packages of tools/cutedsl-requirements.txt; else
importing this module fails with what is missing. Gate and up of the weights interleave, so that
every matmul is QuACK's. Its first call of a kernel compiles for seconds.
"""

import sys
import types

import torch
from torch import Tensor

from . import registration
from .loading import KERNELS, launch


def _load():
    """``cutedsl_kernels``, by path and on the Triton kernels that are loaded already."""
    parent = types.ModuleType("moe_kernels")
    parent.__path__ = [str(KERNELS.parent)]
    sys.modules["moe_kernels"] = parent
    for name, module in list(sys.modules.items()):
        head, dot, rest = name.partition(".")
        if head == "moe_triton_kernels":
            sys.modules[f"moe_kernels.triton_kernels{dot}{rest}"] = module
    from moe_kernels.cutedsl_kernels import gemms, launch as cute

    return gemms, cute


gemms, cute = _load()
_ACTIVATION = launch.Activation("swiglu", gate_interleaved=True)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, weights, w_in, w_out):
        plan = cute.CutePlan(gemms, registration.current_plan())
        row_slots, slot_rows, offs, _ = launch.moe_permutation(ids, w_in.shape[0])
        operands = (x, w_in, w_out, offs, weights, row_slots, slot_rows)
        output, preact = cute.moe_mlp_forward(
            plan, *operands, _ACTIVATION, compute_preact=any(ctx.needs_input_grad)
        )
        ctx.save_for_backward(*operands, preact)
        return output

    @staticmethod
    # pyrefly: ignore[bad-override]
    def backward(ctx, grad_output):
        plan = cute.CutePlan(gemms, registration.current_plan())
        need_x, _, need_weights, need_in, need_out = ctx.needs_input_grad
        mask = (need_x, need_in, need_out, need_weights, False, False, False)
        grads = cute.moe_mlp_backward(
            plan, grad_output, *ctx.saved_tensors, mask, _ACTIVATION
        )
        grads = [g if wanted else None for g, wanted in zip(grads, mask)]
        return grads[0], None, grads[3], grads[1], grads[2]


def layer(
    x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor
) -> Tensor:
    """A SwiGLU expert layer, (T, D), from routing that is given.

    Args:
        x: (T, D).
        ids, weights: (T, K).
        w_in: (E, 2*F, D), rows of gate and up in turn.
        w_out: (E, D, F).
    """
    return _Layer.apply(x, ids, weights, w_in, w_out)
