"""The CuTe backend of this repository as one more library that may be there.

It needs torch 2.15, which vendors QuACK, and the packages of tools/cutedsl-requirements.txt; else
importing this module fails with what is missing. Gate and up of the weights interleave, so that
every matmul is QuACK's. Its first call of a kernel compiles for seconds.
"""

import functools
import sys
import types

from . import layer as lab_layer
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


def _forward(plan, operands, compute_preact):
    return cute.moe_mlp_forward(
        cute.CutePlan(gemms, plan),
        *operands,
        _ACTIVATION,
        compute_preact=compute_preact,
    )


def _backward(plan, grad_output, operands, preact, mask):
    plan = cute.CutePlan(gemms, plan)
    return cute.moe_mlp_backward(
        plan, grad_output, *operands, preact, mask, _ACTIVATION
    )


# As lab.layer.layer, with rows of gate and up in turn in w_in.
layer = functools.partial(
    lab_layer.layer, backend=lab_layer.Backend(_forward, _backward)
)
