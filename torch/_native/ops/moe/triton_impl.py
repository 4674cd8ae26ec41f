"""Triton kernels for ``aten::_moe_topk``, ``_moe_permutation``, ``_moe_mlp`` and backward.

Who is served (the functions ``*_reason`` return why not):

  - CUDA tensors on compute capability 8.0, 9.0, 10.0 or 10.3, and ROCm tensors on gfx942
    and gfx950. Consumer parts (8.6, 8.9, 12.x) have less shared memory per block than
    the tiles need
  - bfloat16 or float16 operands, router weights in that dtype or float32
  - D and F multiples of 16, so that rows are read 16 bytes at a time
  - expert weights contiguous in one of their last two dimensions (gate and up, where
    they are two, in the same) and aligned to 16 bytes; transposed storage needs no copy
  - at most 4096 experts and 32 experts per token; the router takes float32 too
  - no copy-on-write tensor

Everything else, and everything malformed, falls through to the composite kernel
of the op, which also owns the error messages. ``torch.nn.utils.moe_kernel.moe_kernel`` restricts
the choice; a call that only allows Triton and is not eligible raises. Tiles come from
a table; TORCH_MOE_TRITON_AUTOTUNE=1 measures instead (triton_kernels/autotune.py).

Three layers, each with one job: reasons (cheap, no allocation, no Triton import),
the device guard (``_on_device``), and the launchers in triton_kernels/launch.py,
imported at the first call.
"""

import functools
import logging
from collections.abc import Callable
from typing import get_args, TYPE_CHECKING

import torch
from torch import Tensor

from ... import triton_utils as tu


if TYPE_CHECKING:
    from .triton_kernels.launch import LaunchPlan

log = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
_ROUTER_DTYPES = (*_DTYPES, torch.float32)
_CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))
_GCN_ARCHS = ("gfx942", "gfx950")
_MAX_EXPERTS = 4096
_MAX_TOP_K = 32
# Elements: a row of them is a multiple of 16 bytes, and Triton specializes a size
# as vectorizable only if 16 divides it.
_ALIGNMENT = 16
_INT32_MAX = 2**31 - 1
# No tile is higher or wider; offsets within one are int32.
_MAX_BLOCK = 256
# Of slots and rows: blocks of them, which may reach past the last, are counted in int32.
_MAX_ROWS = _INT32_MAX - 4096


@functools.cache
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


@functools.cache
def _gcn_arch(device_index: int) -> str:
    return torch.cuda.get_device_properties(device_index).gcnArchName


def _device_reason(
    tensors: tuple[Tensor | None, ...], memory: bool = True
) -> str | None:
    """Why the tensors' device, or their storage if ``memory``, rules Triton out, or None."""
    first = tensors[0]
    assert first is not None
    if not first.is_cuda:
        return f"device is {first.device}, not CUDA"
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.device != first.device:
            return f"tensors are on {first.device} and {tensor.device}"
        # pyrefly: ignore[missing-attribute]
        if memory and torch._C._is_cow_tensor(tensor):
            return "a tensor is copy-on-write"
    if torch.version.hip is not None:
        name = _gcn_arch(first.device.index or 0)
        if name.split(":")[0] not in _GCN_ARCHS:
            return f"{name} is not one of {_GCN_ARCHS}"
        return None
    capability = _capability(first.device.index or 0)
    if capability not in _CAPABILITIES:
        return f"compute capability {capability} is not one of {_CAPABILITIES}"
    return None


def permutation_reason(
    topk_indices: Tensor,
    num_experts: int,
    num_rows: int | None = None,
    row_alignment: int = 1,
    *,
    memory: bool = True,
) -> str | None:
    """Why Triton cannot run ``_moe_permutation`` on these arguments, or None.

    Without ``memory``, here and below, for tensors that have none.
    """
    if topk_indices.dim() != 2 or topk_indices.dtype not in (torch.int32, torch.int64):
        return "topk_indices is not a (T, K) int32 or int64 tensor"
    if not 1 <= num_experts <= _MAX_EXPERTS:
        return f"num_experts is {num_experts}, not in [1, {_MAX_EXPERTS}]"
    if not 1 <= row_alignment <= _INT32_MAX:
        return f"row_alignment is {row_alignment}"
    if num_rows is None:
        slots = topk_indices.numel()
        num_rows = slots + min(num_experts, slots) * (row_alignment - 1)
    if not 0 <= num_rows <= _MAX_ROWS or topk_indices.numel() > _MAX_ROWS:
        return "more slots or rows than int32 can count"
    return _device_reason((topk_indices,), memory)


def topk_reason(
    logits: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    score: str = "softmax",
    normalize: bool = True,
    num_groups: int | None = None,
    top_groups: int | None = None,
    scale: float = 1.0,
    memory: bool = True,
) -> str | None:
    """Why Triton cannot run ``_moe_topk`` on these arguments, or None."""
    if logits.dim() != 2 or logits.dtype not in _ROUTER_DTYPES:
        return f"logits is not (T, E) of one of {_ROUTER_DTYPES}"
    E = logits.shape[1]
    if score not in ("softmax", "sigmoid"):
        return f"score is {score!r}"
    if bias is not None and (bias.shape != (E,) or bias.dtype not in _ROUTER_DTYPES):
        return f"bias is not (E,) of one of {_ROUTER_DTYPES}"
    if (num_groups is None) != (top_groups is None):
        return "only one of num_groups and top_groups is given"
    groups, chosen = num_groups or 1, top_groups or 1
    if num_groups is not None and (num_groups < 1 or E % num_groups):
        return f"num_groups = {num_groups} does not divide E = {E}"
    if not 1 <= chosen <= groups:
        return f"top_groups is {top_groups}"
    if not 1 <= k <= min(_MAX_TOP_K, E // groups * chosen):
        return f"k is {k}"
    # Every group is padded to a power of two of at least two experts.
    padded = _next_power_of_2(groups) * _next_power_of_2(max(E // groups, 2))
    if padded > _MAX_EXPERTS:
        return f"{E} experts in {groups} groups need {padded} columns"
    return _device_reason((logits, bias), memory)


def topk_backward_reason(
    grad_weights: Tensor,
    logits: Tensor,
    topk_indices: Tensor,
    *,
    score: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    memory: bool = True,
) -> str | None:
    """Why Triton cannot run ``_moe_topk_backward`` on these arguments, or None."""
    if topk_indices.dim() != 2 or topk_indices.dtype != torch.int64:
        return "topk_indices is not a (T, K) int64 tensor"
    if grad_weights.shape != topk_indices.shape:
        return "grad_weights and topk_indices differ in shape"
    if logits.shape[:1] != topk_indices.shape[:1]:
        return "logits and topk_indices differ in T"
    if grad_weights.dtype != torch.float32:
        return f"grad_weights has dtype {grad_weights.dtype}"
    reason = topk_reason(logits, topk_indices.shape[1], score=score, memory=memory)
    return reason or _device_reason((logits, grad_weights, topk_indices), memory)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _weight_reason(name: str, weight: Tensor) -> str | None:
    strides = weight.stride()
    if (_MAX_BLOCK - 1) * (strides[1] + strides[2]) > _INT32_MAX:
        return (
            f"a tile of {name}, of strides {strides}, spans more than int32 can count"
        )
    if 1 not in strides[1:]:
        return f"neither of the last two dimensions of {name} is contiguous"
    other = [s for s in strides if s != 1]
    if any(s % _ALIGNMENT for s in other):
        return f"{name} is not aligned to 16 bytes"
    return None


def _address_reason(**weights: Tensor | None) -> str | None:
    for name, weight in weights.items():
        if weight is not None and weight.data_ptr() % 16:
            return f"{name} is not aligned to 16 bytes"
    return None


def _dtype_reason(
    input: Tensor, topk_weights: Tensor | None, operands: tuple[Tensor | None, ...]
) -> str | None:
    dtype = input.dtype
    if dtype not in _DTYPES:
        return f"dtype {dtype} is not one of {_DTYPES}"
    if any(x is not None and x.dtype != dtype for x in operands):
        return "operands have several dtypes"
    if topk_weights is not None and topk_weights.dtype not in (dtype, torch.float32):
        return f"topk_weights has dtype {topk_weights.dtype}"
    return None


def _shape_reason(
    input: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    offs: Tensor,
    topk_weights: Tensor | None,
    row_slots: Tensor | None,
    slot_rows: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
    w_up: Tensor | None,
    gated: bool,
) -> str | None:
    """Why the shapes are not served; malformed ones are among those."""
    if (input.dim(), w_in.dim(), w_out.dim(), offs.dim()) != (2, 3, 3, 1):
        return "an operand has the wrong number of dimensions"
    T, D = input.shape
    E, _, F = w_out.shape
    gF = 2 * F if gated else F
    routed = slot_rows is not None
    K = slot_rows.shape[-1] if slot_rows is not None else 1
    expected = (
        (w_in, (E, gF if w_up is None else F, D)),
        (w_up, (E, F, D)),
        (w_out, (E, D, F)),
        (offs, (E,)),
        (b_in, (E, gF)),
        (b_out, (E, D)),
        (slot_rows, (T, K)),
        (topk_weights, (T, K)),
    )
    if any(x is not None and x.shape != shape for x, shape in expected):
        return "the operands' shapes do not fit together"
    if routed != (row_slots is not None) or (
        row_slots is not None and row_slots.dim() != 1
    ):
        return "row_slots and slot_rows do not fit together"
    if any(
        x is not None and x.dtype != torch.int32 for x in (offs, row_slots, slot_rows)
    ):
        return "offs, row_slots or slot_rows is not int32"
    if not 1 <= E <= _MAX_EXPERTS or not 1 <= K <= _MAX_TOP_K:
        return f"E = {E} or K = {K} is out of range"
    if T * K > _MAX_ROWS or (row_slots is not None and len(row_slots) > _MAX_ROWS):
        return "more slots or rows than int32 can count"
    if D == 0 or F == 0 or D % _ALIGNMENT or F % _ALIGNMENT:
        return f"D = {D} or F = {F} is not a positive multiple of {_ALIGNMENT}"
    if _MAX_BLOCK * max(D, gF) > _INT32_MAX:
        return f"D = {D} or F = {F}: a tile spans more than int32 can count"
    if w_up is not None and (w_up.stride(2) == 1) != (w_in.stride(2) == 1):
        return "w_in and w_up are contiguous in different dimensions"
    return (
        _weight_reason("w_in", w_in)
        or _weight_reason("w_out", w_out)
        or (None if w_up is None else _weight_reason("w_up", w_up))
    )


def _is_gated(activation: str) -> bool:
    return activation in get_args(torch.nn.functional._MoeGatedActivation)


def _activation_reason(
    activation: str,
    gate_interleaved: bool,
    alpha: float | None,
    limit: float | None,
    has_up: bool,
) -> str | None:
    # The composite names the mistake.
    if activation not in get_args(torch.nn.functional._MoeActivation):
        return f"unknown activation {activation!r}"
    if (gate_interleaved or has_up) and not _is_gated(activation):
        return "gate_interleaved or w_up without a gate"
    if gate_interleaved and has_up:
        return "gate_interleaved and w_up"
    if alpha is not None and activation != "swiglu_oai":
        return "alpha without swiglu_oai"
    if limit is not None and activation not in _LIMITED:
        return f"limit with {activation}"
    if limit is not None and not limit > 0:
        return f"limit is {limit}"
    return None


# As in triton_kernels/activations.py, which cannot be imported before Triton;
# test_moe_triton_eligibility.py compares the two.
_LIMITED = ("swiglu", "geglu", "swiglu_oai")


def mlp_reason(
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
    gate_interleaved: bool = False,
    alpha: float | None = None,
    limit: float | None = None,
    compute_preact: bool = True,
    memory: bool = True,
) -> str | None:
    """Why Triton cannot run ``_moe_mlp`` on these arguments, or None.

    Without ``memory`` for tensors that have none; the caller answers for their alignment.
    """
    has_up = w_up is not None
    weights = (w_in, w_out, w_up)
    metadata = (offs, topk_weights, row_slots, slot_rows)
    return (
        _dtype_reason(input, topk_weights, (*weights, b_in, b_out))
        or _activation_reason(activation, gate_interleaved, alpha, limit, has_up)
        or _shape_reason(
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
            _is_gated(activation),
        )
        or _device_reason((input, *weights, *metadata, b_in, b_out), memory)
        or (_address_reason(w_in=w_in, w_out=w_out, w_up=w_up) if memory else None)
    )


def mlp_backward_reason(
    grad_out: Tensor,
    input: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    offs: Tensor,
    topk_weights: Tensor | None,
    row_slots: Tensor | None,
    slot_rows: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
    w_up: Tensor | None,
    preact: Tensor,
    output_mask: list[bool],
    **options,
) -> str | None:
    """Why Triton cannot run ``_moe_mlp_backward`` on these arguments, or None.

    ``options`` are those of ``mlp_reason``.
    """
    reason = mlp_reason(
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
        **options,
    )
    if reason is not None:
        return reason
    if grad_out.dtype != input.dtype or preact.dtype != input.dtype:
        return "grad_out or preact has another dtype than input"
    num_rows = input.shape[0] if row_slots is None else row_slots.shape[0]
    width = w_in.shape[1] * (1 if w_up is None else 2)
    if grad_out.shape != input.shape or preact.shape != (num_rows, width):
        return "grad_out or preact has the wrong shape"
    return _device_reason((input, grad_out, preact))


def _choose(
    op: str,
    reason_of: Callable[..., str | None],
    args: tuple,
    kwargs: dict[str, object],
    backend: str = "TRITON",
) -> bool:
    """Whether ``backend`` runs this call; ``reason_of`` says why it cannot (None: it can).

    Raises:
        RuntimeError: ``torch.nn.utils.moe_kernel.moe_kernel`` allows none of the backends
            that are asked after this one, which cannot.
    """
    from torch.nn.utils.moe_kernel import _enabled_backends, MoeBackend

    enabled, this = _enabled_backends(), MoeBackend[backend]
    if MoeBackend.CUTEDSL in enabled and op not in _MATMUL_OPS:
        # Around its matmuls that backend has the kernels of this one.
        enabled = (*enabled, MoeBackend.TRITON)
    if this not in enabled:
        reason = f"moe_kernel() does not allow {this}"
    else:
        reason = reason_of(*args, **kwargs)
        members = list(MoeBackend)
        if not set(members[members.index(this) + 1 :]) & set(enabled):
            if reason is None and not tu._try_initialize_driver():
                # The router would fall back in silence.
                reason = "Triton found no driver"
            if reason is not None:
                raise RuntimeError(
                    f"{op}: moe_kernel() allows only {', '.join(map(str, enabled))}, "
                    f"which cannot run this call: {reason}"
                )
    if log.isEnabledFor(logging.DEBUG):
        instead = "composite" if this is MoeBackend.TRITON else f"not {this.value}"
        log.debug(
            "%s: %s", op, this.value if reason is None else f"{instead}: {reason}"
        )
    return reason is None


_MATMUL_OPS = ("_moe_mlp", "_moe_mlp_backward")


def _permutation_cond(*args, **kwargs) -> bool:
    return _choose("_moe_permutation", permutation_reason, args, kwargs)


def _topk_cond(*args, **kwargs) -> bool:
    return _choose("_moe_topk", topk_reason, args, kwargs)


def _topk_backward_cond(*args, **kwargs) -> bool:
    return _choose("_moe_topk_backward", topk_backward_reason, args, kwargs)


def _mlp_cond(*args, **kwargs) -> bool:
    return _choose("_moe_mlp", mlp_reason, args, kwargs)


def _mlp_backward_cond(*args, **kwargs) -> bool:
    return _choose("_moe_mlp_backward", mlp_backward_reason, args, kwargs)


@functools.cache
def _plan(device_index: int) -> "LaunchPlan":
    from .triton_kernels import autotune
    from .triton_kernels.configs import table_for_capability, table_for_gcn_arch
    from .triton_kernels.launch import LaunchPlan

    if torch.version.hip is not None:
        table = table_for_gcn_arch(_gcn_arch(device_index))
    else:
        table = table_for_capability(*_capability(device_index))
    assert table is not None, "the reasons let an unserved device through"
    properties = torch.cuda.get_device_properties(device_index)
    autotuner = autotune.Autotuner() if autotune.is_enabled() else None
    return LaunchPlan(table, properties.multi_processor_count, autotuner)


def _on_device(tensor: Tensor):
    # Python overrides get no device guard from the dispatcher.
    return torch.cuda.device(tensor.get_device())


def _permutation_impl(topk_indices, num_experts, *, num_rows=None, row_alignment=1):
    from .triton_kernels.permutation import moe_permutation

    with _on_device(topk_indices):
        return moe_permutation(
            topk_indices, num_experts, num_rows=num_rows, row_alignment=row_alignment
        )


def _topk_impl(logits, k, bias=None, **options):
    from .triton_kernels.topk import moe_topk

    with _on_device(logits):
        return moe_topk(logits, k, bias, **options)


def _topk_backward_impl(grad_weights, logits, topk_indices, **options):
    from .triton_kernels.topk import moe_topk_backward

    with _on_device(logits):
        return moe_topk_backward(grad_weights, logits, topk_indices, **options)


def _mlp_impl(
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
    from .triton_kernels.launch import Activation, moe_mlp_forward

    with _on_device(input):
        return moe_mlp_forward(
            _plan(input.get_device()),
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
            Activation(activation, gate_interleaved, alpha, limit),
            compute_preact=compute_preact,
        )


def _mlp_backward_impl(
    grad_out,
    *tensors,
    activation="swiglu",
    gate_interleaved=False,
    alpha=None,
    limit=None,
):
    from .triton_kernels.launch import Activation, moe_mlp_backward

    *operands, output_mask = tensors
    with _on_device(grad_out):
        return moe_mlp_backward(
            _plan(grad_out.get_device()),
            grad_out,
            *operands,
            output_mask=tuple(output_mask),
            act=Activation(activation, gate_interleaved, alpha, limit),
        )


def register_to_dispatch() -> None:
    for op_symbol, cond, impl in (
        ("_moe_topk", _topk_cond, _topk_impl),
        ("_moe_topk_backward", _topk_backward_cond, _topk_backward_impl),
        ("_moe_permutation", _permutation_cond, _permutation_impl),
        ("_moe_mlp", _mlp_cond, _mlp_impl),
        ("_moe_mlp_backward", _mlp_backward_cond, _mlp_backward_impl),
    ):
        tu.register_op_override(
            "aten",
            op_symbol,
            "CUDA",
            cond=cond,
            impl=impl,
            allow_multiple_override=True,
        )
