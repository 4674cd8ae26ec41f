"""The CuTe backend of this repository as an optional library.

It needs torch 2.15, which vendors QuACK, and the packages of tools/cutedsl-requirements.txt.
Importing this module fails with the name of what is missing. Gate and up of the weights interleave,
so that QuACK runs every matmul. The first call of a kernel compiles for seconds.
"""

import functools

from . import layer as lab_layer
from .loading import launch


# isort: split
from moe_kernels.cutedsl_kernels import gemms, launch as cute


_ACTIVATION = launch.Activation("swiglu", gate_interleaved=True)


def _forward(plan, operands, **options):
    experts = launch.Experts(*operands, act=_ACTIVATION)
    return cute.moe_mlp_forward(cute.CutePlan(gemms, plan), experts, **options)


def _backward(plan, *arguments):
    grad_output, operands, *preact_and_mask = arguments
    experts = launch.Experts(*operands, act=_ACTIVATION)
    arguments = (experts, grad_output, *preact_and_mask)
    return cute.moe_mlp_backward(cute.CutePlan(gemms, plan), *arguments)


BACKEND = lab_layer.Backend(_forward, _backward)
# lab.layer.layer with interleaved rows of gate and up in w_in.
layer = functools.partial(lab_layer.layer, backend=BACKEND)
