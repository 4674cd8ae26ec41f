"""QuACK's grouped matmuls, in the CuTe DSL, for ``aten::_moe_mlp`` and its backward.

They run only where ``torch.nn.utils.moe_kernel.moe_kernel`` names ``MoeBackend.CUTEDSL``: each
kernel compiles for seconds at its first use, and none has run on a GPU yet. They need the packages
nvidia-cutlass-dsl and apache-tvm-ffi; the kernels are in torch._vendor.quack.

Supported calls (the functions ``*_reason`` return why another is not): those of the Triton
kernels (triton_impl.py) with

  - compute capability 9.0, 10.0 or 10.3
  - swiglu, geglu_tanh, reglu, silu, relu, relu2, without limit and alpha: QuACK has no gated
    function for the others
  - contiguous weights, gate and up in one, no biases
  - no tensor of 2^31 elements or more

The Triton kernels run the router, the permutation, the combine, and the activation's gradient
if gate and up are two halves of a weight. Pre-activations have the layout of every
backend, so different backends may run forward and backward.

Native AOT (torch/_native/aot_manifest.py) does not reach these kernels: its dispatch is
generated into structured CUDA kernels, and _moe_mlp has none.
"""

import functools
from typing import TYPE_CHECKING

from torch import Tensor

from ... import cutedsl_utils as cu
from . import triton_impl
from .triton_kernels.experts import Experts


if TYPE_CHECKING:
    from .cutedsl_kernels.launch import CutePlan

_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
# As in cutedsl_kernels/gemms.py, which cannot be imported without the CuTe DSL;
# test_moe_cutedsl.py compares the two.
_ACTIVATIONS = ("swiglu", "geglu_tanh", "reglu", "silu", "relu", "relu2")
_MAX_ELEMENTS = 2**31


def _own_reason(experts: Experts) -> str | None:
    """Why CuTe cannot run what the Triton kernels can, or None."""
    act, input = experts.act, experts.input
    if act.activation not in _ACTIVATIONS:
        return f"activation {act.activation!r} is not one of {_ACTIVATIONS}"
    if act.limit is not None:
        return f"limit = {act.limit} is not served"
    for name in ("b_in", "b_out", "w_up"):
        if getattr(experts, name) is not None:
            return f"{name} is not served"
    for name, weight in experts.weights.items():
        if not weight.is_contiguous():
            return f"{name} is not contiguous: strides {weight.stride()}"
    rows = len(input if experts.row_slots is None else experts.row_slots)
    sizes = [input.numel(), rows * max(experts.w_in.shape[1:])]
    largest = max(*sizes, *(w.numel() for w in experts.weights.values()))
    if largest >= _MAX_ELEMENTS:
        return f"a tensor has {largest} elements, 2^31 or more"
    return triton_impl.capability_reason(input.device.index or 0, _CAPABILITIES)


def mlp_reason(experts: Experts) -> str | None:
    """Why CuTe cannot run ``_moe_mlp`` on these operands, or None."""
    return triton_impl.mlp_reason(experts) or _own_reason(experts)


def mlp_backward_reason(experts: Experts, *tensors: Tensor) -> str | None:
    """``mlp_reason`` for the backward."""
    reason = triton_impl.mlp_backward_reason(experts, *tensors)
    return reason or _own_reason(experts)


@functools.cache
def _plan(device_index: int) -> "CutePlan":
    from .cutedsl_kernels import gemms
    from .cutedsl_kernels.launch import CutePlan

    return CutePlan(gemms, triton_impl.launch_plan(device_index))


_mlp_cond = triton_impl.cond_of(
    "_moe_mlp",
    lambda *a, **k: mlp_reason(triton_impl.experts_of(*a, **k)),
    "CUTEDSL",
)
_mlp_backward_cond = triton_impl.cond_of(
    "_moe_mlp_backward",
    lambda *a, **k: mlp_backward_reason(*triton_impl.backward_of(*a, **k)),
    "CUTEDSL",
)


def _mlp_impl(*args, compute_preact=True, **options):
    from .cutedsl_kernels.launch import moe_mlp_forward

    experts = triton_impl.experts_of(*args, **options)
    with triton_impl.on_device(experts.input):
        plan = _plan(experts.input.get_device())
        return moe_mlp_forward(plan, experts, compute_preact=compute_preact)


def _mlp_backward_impl(*args, **options):
    from .cutedsl_kernels.launch import moe_mlp_backward

    operands = triton_impl.backward_of(*args, **options)
    with triton_impl.on_device(args[0]):
        plan = _plan(args[0].get_device())
        return moe_mlp_backward(plan, *operands, tuple(args[-1]))


def register_to_dispatch() -> None:
    for op_symbol, cond, impl in (
        ("_moe_mlp", _mlp_cond, _mlp_impl),
        ("_moe_mlp_backward", _mlp_backward_cond, _mlp_backward_impl),
    ):
        cu.register_op_override(
            "aten",
            op_symbol,
            "CUDA",
            cond=cond,
            impl=impl,
            allow_multiple_override=True,
        )
