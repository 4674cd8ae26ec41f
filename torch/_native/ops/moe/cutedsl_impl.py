"""QuACK's grouped matmuls, in the CuTe DSL, for ``aten::_moe_mlp`` and its backward.

Only where ``torch.nn.utils.moe_kernel.moe_kernel`` names ``MoeBackend.CUTEDSL``: each kernel takes
seconds to compile at its first use, and none has run on a GPU yet. Needs the packages
nvidia-cutlass-dsl and apache-tvm-ffi; the kernels are in torch._vendor.quack.

Who is served (the functions ``*_reason`` return why not): what the Triton kernels serve
(triton_impl.py), and

  - compute capability 9.0, 10.0 or 10.3
  - swiglu, geglu_tanh, reglu, silu, relu, relu2, without limit and alpha: GELU by erf and
    clamps are in no gated function there
  - contiguous weights, gate and up in one, no biases
  - no tensor of 2^31 elements or more

The router, the permutation, the combine, and the activation's gradient where gate and up are
two halves of a weight are the Triton kernels'. Pre-activations are laid out as in every
backend, so that forward and backward may be run by different ones.

Native AOT (torch/_native/aot_manifest.py) does not reach these kernels: its dispatch is
generated into structured CUDA kernels, of which _moe_mlp has none.
"""

import functools
from typing import TYPE_CHECKING

from torch import Tensor

from ... import cutedsl_utils as cu
from . import triton_impl


if TYPE_CHECKING:
    from .cutedsl_kernels.launch import CutePlan

_CAPABILITIES = ((9, 0), (10, 0), (10, 3))
# As in cutedsl_kernels/gemms.py, which cannot be imported without the CuTe DSL;
# test_moe_cutedsl.py compares the two.
_ACTIVATIONS = ("swiglu", "geglu_tanh", "reglu", "silu", "relu", "relu2")
_MAX_ELEMENTS = 2**31


def _own_reason(
    input: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    offs: Tensor,
    topk_weights: Tensor | None = None,
    row_slots: Tensor | None = None,
    slot_rows: Tensor | None = None,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    w_up: Tensor | None = None,
    *,
    activation: str = "swiglu",
    limit: float | None = None,
    **_rest,
) -> str | None:
    """Why CuTe cannot run what the Triton kernels can, or None."""
    if activation not in _ACTIVATIONS:
        return f"activation {activation!r} is not one of {_ACTIVATIONS}"
    if limit is not None:
        return f"limit = {limit} is not served"
    for name, absent in (("b_in", b_in), ("b_out", b_out), ("w_up", w_up)):
        if absent is not None:
            return f"{name} is not served"
    for name, weight in (("w_in", w_in), ("w_out", w_out)):
        if not weight.is_contiguous():
            return f"{name} is not contiguous: strides {weight.stride()}"
    rows = len(input if row_slots is None else row_slots)
    largest = max(
        input.numel(), w_in.numel(), w_out.numel(), rows * max(w_in.shape[1:])
    )
    if largest >= _MAX_ELEMENTS:
        return f"a tensor has {largest} elements, 2^31 or more"
    capability = triton_impl._capability(input.device.index or 0)
    if capability not in _CAPABILITIES:
        return f"compute capability {capability} is not one of {_CAPABILITIES}"
    return None


def mlp_reason(*args, **options) -> str | None:
    """Why CuTe cannot run ``_moe_mlp`` on these arguments, or None."""
    return triton_impl.mlp_reason(*args, **options) or _own_reason(*args, **options)


def mlp_backward_reason(grad_out: Tensor, *args, **options) -> str | None:
    """Why CuTe cannot run ``_moe_mlp_backward`` on these arguments, or None."""
    reason = triton_impl.mlp_backward_reason(grad_out, *args, **options)
    # Without preact and output_mask.
    return reason or _own_reason(*args[:-2], **options)


def _mlp_cond(*args, **kwargs) -> bool:
    return triton_impl._choose("_moe_mlp", mlp_reason, args, kwargs, "CUTEDSL")


def _mlp_backward_cond(*args, **kwargs) -> bool:
    return triton_impl._choose(
        "_moe_mlp_backward", mlp_backward_reason, args, kwargs, "CUTEDSL"
    )


@functools.cache
def _plan(device_index: int) -> "CutePlan":
    from .cutedsl_kernels import gemms
    from .cutedsl_kernels.launch import CutePlan

    return CutePlan(gemms, triton_impl._plan(device_index))


# No biases, w_up, alpha or limit: _own_reason() and the checks of the activation.


def _mlp_impl(
    input,
    w_in,
    w_out,
    offs,
    topk_weights=None,
    row_slots=None,
    slot_rows=None,
    *_absent,
    activation="swiglu",
    gate_interleaved=False,
    compute_preact=True,
    **_none,
):
    from .cutedsl_kernels.launch import moe_mlp_forward
    from .triton_kernels.launch import Activation

    with triton_impl._on_device(input):
        return moe_mlp_forward(
            _plan(input.get_device()),
            input,
            w_in,
            w_out,
            offs,
            topk_weights,
            row_slots,
            slot_rows,
            Activation(activation, gate_interleaved),
            compute_preact=compute_preact,
        )


def _mlp_backward_impl(
    grad_out, *tensors, activation="swiglu", gate_interleaved=False, **_none
):
    from .cutedsl_kernels.launch import moe_mlp_backward
    from .triton_kernels.launch import Activation

    *operands, _, _, _, preact, output_mask = tensors
    with triton_impl._on_device(grad_out):
        return moe_mlp_backward(
            _plan(grad_out.get_device()),
            grad_out,
            *operands,
            preact=preact,
            output_mask=tuple(output_mask),
            act=Activation(activation, gate_interleaved),
        )


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
