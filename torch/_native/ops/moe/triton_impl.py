"""Triton kernels for ``aten::_moe_topk``, ``_moe_permutation``, ``_moe_mlp`` and backward.

Supported calls (the functions ``*_reason`` return why another is not):

  - CUDA tensors on compute capability 8.0, 9.0, 10.0 or 10.3, and ROCm tensors on gfx942
    and gfx950. Consumer parts (8.6, 8.9, 12.x) have less shared memory per block than
    the tiles need
  - bfloat16 or float16 operands, router weights in that dtype or float32
  - D and F multiples of 16, so that rows are read 16 bytes at a time
  - expert weights contiguous in one of their last two dimensions (gate and up, where
    they are two, in the same) and aligned to 16 bytes; transposed storage needs no copy
  - at most 4096 experts and 32 experts per token; the router takes float32 too
  - no copy-on-write tensor

Everything else falls through to the composite kernel of the op. The op's validator in C++ finds
malformed calls: its Meta kernel is called first, and raises what every backend raises.
``torch.nn.utils.moe_kernel.moe_kernel`` selects Triton; if it allows nothing else, an unsupported
call raises. By default Triton runs the kernels that a GPU has run (proven.py). Tiles come from a
table; TORCH_MOE_TRITON_AUTOTUNE=1 measures instead (triton_kernels/autotune.py).

Three layers, each with one job: reasons (cheap, no allocation, no Triton import),
the device guard (``on_device``), and the launchers in triton_kernels/launch.py,
imported at the first call.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TYPE_CHECKING

import torch
from torch import Tensor

from ... import triton_utils as tu
from . import proven
from .triton_kernels.experts import Experts


if TYPE_CHECKING:
    from .triton_kernels.rows import LaunchPlan

log = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
ROUTER_DTYPES = (*_DTYPES, torch.float32)
_CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))
_GCN_ARCHS = ("gfx942", "gfx950")
_MAX_EXPERTS = 4096
_MAX_TOP_K = 32
# Elements: a row of them is a multiple of 16 bytes, and Triton specializes a size
# as vectorizable only if 16 divides it.
_ALIGNMENT = 16
INT32_MAX = 2**31 - 1
# No tile is higher or wider; offsets within one are int32.
_MAX_BLOCK = 256
# A tile spans at most int32, and a grid has at most 65535 blocks of 128 columns along y.
_MAX_COLUMNS = min(INT32_MAX // _MAX_BLOCK, 65535 * 128)
# Most slots and rows. Their blocks may reach past the last one and are counted in int32.
MAX_ROWS = INT32_MAX - 4096


@functools.cache
def capability_of(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


@functools.cache
def _gcn_arch(device_index: int) -> str:
    return torch.cuda.get_device_properties(device_index).gcnArchName


def device_reason(tensors: Iterable[Tensor | None], memory: bool = True) -> str | None:
    """Why the tensors' device, or their storage if ``memory``, rules Triton out, or None."""
    present = [x for x in tensors if x is not None]
    device = present[0].device
    if not present[0].is_cuda:
        return f"device is {device}, not CUDA"
    # pyrefly: ignore[missing-attribute]
    if memory and any(map(torch._C._is_cow_tensor, present)):
        return "a tensor is copy-on-write"
    if torch.version.hip is not None:
        name = _gcn_arch(device.index or 0)
        if name.split(":")[0] not in _GCN_ARCHS:
            return f"{name} is not one of {_GCN_ARCHS}"
        return None
    return capability_reason(device.index or 0, _CAPABILITIES)


def capability_reason(device_index: int, served: tuple) -> str | None:
    capability = capability_of(device_index)
    if capability not in served:
        return f"compute capability {capability} is not one of {served}"
    return None


def _arch_of(device: torch.device) -> str | None:
    """The architecture's name in benchmarks/moe/gpu_lab.py."""
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return _gcn_arch(device.index or 0).split(":")[0]
    return "sm_{}{}".format(*capability_of(device.index or 0))


def runs_by_default(op: str, device: torch.device) -> bool:
    """Whether ``op`` runs Triton kernels on ``device`` by default: see proven.py."""
    arch = _arch_of(device) if proven.RUNS else None
    return arch is not None and proven.has_run(op, arch)


# The reasons expect arguments that the validator has passed. ``memory=False`` is for tensors
# without storage; the caller then guarantees their alignment.


def permutation_reason(
    topk_indices: Tensor,
    num_experts: int,
    num_rows: int | None = None,
    row_alignment: int = 1,
    *,
    memory: bool = True,
) -> str | None:
    """Why Triton cannot run ``_moe_permutation`` on these arguments, or None."""
    if num_experts > _MAX_EXPERTS:
        return f"num_experts is {num_experts}, more than {_MAX_EXPERTS}"
    slots = topk_indices.numel()
    if num_rows is None:
        num_rows = slots + min(num_experts, slots) * (row_alignment - 1)
    if max(num_rows, slots) > MAX_ROWS:
        return "more slots or rows than int32 can count"
    return device_reason((topk_indices,), memory)


def topk_reason(
    logits: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    num_groups: int | None = None,
    memory: bool = True,
    **_rest,
) -> str | None:
    """Why Triton cannot run ``_moe_topk`` on these arguments, or None."""
    for x in (logits, bias):
        if x is not None and x.dtype not in ROUTER_DTYPES:
            return f"dtype {x.dtype} is not one of {ROUTER_DTYPES}"
    if k > _MAX_TOP_K:
        return f"k is {k}, more than {_MAX_TOP_K}"
    # Every group is padded to a power of two of at least two experts.
    E, groups = logits.shape[1], num_groups or 1
    padded = _next_power_of_2(groups) * _next_power_of_2(max(E // groups, 2))
    if padded > _MAX_EXPERTS:
        return f"{E} experts in {groups} groups need {padded} columns"
    return device_reason((logits, bias), memory)


def topk_backward_reason(
    grad_weights: Tensor,
    logits: Tensor,
    topk_indices: Tensor,
    *,
    memory: bool = True,
    **_rest,
) -> str | None:
    """Why Triton cannot run ``_moe_topk_backward`` on these arguments, or None."""
    if grad_weights.dtype != torch.float32:
        return f"grad_weights has dtype {grad_weights.dtype}"
    if topk_indices.shape[1] == 0:
        return "there is no chosen expert"
    reason = topk_reason(logits, topk_indices.shape[1], memory=memory)
    return reason or device_reason((logits, grad_weights, topk_indices), memory)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _weight_reason(name: str, weight: Tensor) -> str | None:
    strides = weight.stride()
    if (_MAX_BLOCK - 1) * (strides[1] + strides[2]) > INT32_MAX:
        return (
            f"a tile of {name}, of strides {strides}, spans more than int32 can count"
        )
    if 1 not in strides[1:]:
        return f"neither of the last two dimensions of {name} is contiguous"
    if any(s % _ALIGNMENT for s in strides if s != 1):
        return f"{name} is not aligned to 16 bytes"
    return None


def address_reason(weights: Mapping[str, Tensor]) -> str | None:
    for name, weight in weights.items():
        if weight.data_ptr() % 16:
            return f"{name} is not aligned to 16 bytes"
    return None


def shape_reason(experts: Experts) -> str | None:
    """Why the sizes or the layout of the weights are not served, in any precision."""
    T, D = experts.input.shape
    weights, F = experts.weights, experts.num_hidden
    E, K = experts.offs.shape[0], 1
    num_rows = T
    if experts.row_slots is not None and experts.slot_rows is not None:
        num_rows, K = experts.row_slots.shape[0], experts.slot_rows.shape[1]
    if not 1 <= E <= _MAX_EXPERTS or not 1 <= K <= _MAX_TOP_K:
        return f"E = {E} or K = {K} is out of range"
    if max(T * K, num_rows) > MAX_ROWS:
        return "more slots or rows than int32 can count"
    if D == 0 or F == 0 or D % _ALIGNMENT or F % _ALIGNMENT:
        return f"D = {D} or F = {F} is not a positive multiple of {_ALIGNMENT}"
    if max(D, experts.width) > _MAX_COLUMNS:
        return f"D = {D} or F = {F}: a tile or a grid has more than it can count"
    if "w_up" in weights:
        if (weights["w_up"].stride(2) == 1) != (weights["w_in"].stride(2) == 1):
            return "w_in and w_up are contiguous in different dimensions"
    reasons = (_weight_reason(name, w) for name, w in weights.items())
    return next(filter(None, reasons), None)


def mlp_reason(experts: Experts, *, memory: bool = True) -> str | None:
    """Why Triton cannot run ``_moe_mlp`` or its backward on these operands, or None."""
    if experts.input.dtype not in _DTYPES:
        return f"dtype {experts.input.dtype} is not one of {_DTYPES}"
    return (
        shape_reason(experts)
        or device_reason(experts.tensors, memory)
        or (address_reason(experts.weights) if memory else None)
    )


def mlp_backward_reason(
    experts: Experts, grad_out: Tensor, preact: Tensor, *, memory: bool = True
) -> str | None:
    """``mlp_reason`` for the backward."""
    reason = mlp_reason(experts, memory=memory)
    return reason or device_reason((grad_out, preact), memory)


# --- which backend runs a call


_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)


def _validate(op: str, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises what every backend raises for a malformed call.

    The Meta kernel allocates its results on the device of its arguments, so the expert MLP is
    asked for no pre-activations and no gradients.
    """
    if op in ("_moe_mlp", "_moe_mlp_scaled"):
        kwargs = {**kwargs, "compute_preact": False}
    elif op in ("_moe_mlp_backward", "_moe_mlp_scaled_backward"):
        args = (*args[:-1], [False] * len(args[-1]))
    getattr(torch.ops.aten, op).default.redispatch(_META, *args, **kwargs)


def choose(
    op: str,
    reason_of: Callable[..., str | None],
    args: tuple,
    kwargs: dict[str, Any],
    backend: str,
) -> bool:
    """Whether ``backend`` runs this call; ``reason_of`` says why it cannot (None: it can).

    Raises:
        RuntimeError: ``backend`` cannot run the call, and ``torch.nn.utils.moe_kernel.moe_kernel``
            allows none of the backends after it. Or the call is malformed.
    """
    from torch.nn.utils.moe_kernel import _enabled_backends, _is_chosen, MoeBackend

    enabled, this = _enabled_backends(), MoeBackend[backend]
    if proven.RUNS and not _is_chosen() and this is MoeBackend.TRITON:
        if runs_by_default(op, args[0].device):
            enabled = (this, *enabled)
    if MoeBackend.CUTEDSL in enabled and op not in _MATMUL_OPS:
        # The CuTe backend runs Triton kernels around its matmuls.
        enabled = (*enabled, MoeBackend.TRITON)
    if this not in enabled:
        reason = f"moe_kernel() does not allow {this}"
    else:
        _validate(op, args, kwargs)
        reason = reason_of(*args, **kwargs)
        members = list(MoeBackend)
        if not set(members[members.index(this) + 1 :]) & set(enabled):
            if reason is None and not tu._try_initialize_driver():
                # Otherwise the router would fall back silently.
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


@functools.cache
def launch_plan(device_index: int) -> "LaunchPlan":
    from .triton_kernels import autotune
    from .triton_kernels.configs import table_for_capability, table_for_gcn_arch
    from .triton_kernels.rows import LaunchPlan

    if torch.version.hip is not None:
        table = table_for_gcn_arch(_gcn_arch(device_index))
    else:
        table = table_for_capability(*capability_of(device_index))
    assert table is not None, "the reasons let an unserved device through"
    properties = torch.cuda.get_device_properties(device_index)
    autotuner = autotune.Autotuner() if autotune.is_enabled() else None
    return LaunchPlan(table, properties.multi_processor_count, autotuner)


def on_device(tensor: Tensor):
    # Python overrides get no device guard from the dispatcher.
    return torch.cuda.device(tensor.get_device())


# --- the ops: their arguments as they come from the dispatcher


def experts_of(*operands, compute_preact=True, **named) -> Experts:
    """The operands and keywords of ``_moe_mlp``."""
    return Experts.of_call(*operands, **named)


def backward_of(grad_out, *rest, **named) -> tuple[Experts, Tensor, Tensor]:
    """Operands, grad_out and preact of the arguments of ``_moe_mlp_backward``."""
    *operands, preact, _ = rest
    return experts_of(*operands, **named), grad_out, preact


def _permutation_impl(topk_indices, num_experts, **options):
    from .triton_kernels.permutation import moe_permutation

    with on_device(topk_indices):
        return moe_permutation(topk_indices, num_experts, **options)


def _topk_impl(logits, k, bias=None, **options):
    from .triton_kernels.topk import moe_topk

    with on_device(logits):
        return moe_topk(logits, k, bias, **options)


def _topk_backward_impl(grad_weights, logits, topk_indices, **options):
    from .triton_kernels.topk import moe_topk_backward

    with on_device(logits):
        return moe_topk_backward(grad_weights, logits, topk_indices, **options)


def _mlp_impl(*args, compute_preact=True, **options):
    from .triton_kernels.launch import moe_mlp_forward

    experts = experts_of(*args, **options)
    with on_device(experts.input):
        plan = launch_plan(experts.input.get_device())
        return moe_mlp_forward(plan, experts, compute_preact=compute_preact)


def _mlp_backward_impl(*args, **options):
    from .triton_kernels.launch import moe_mlp_backward

    operands = backward_of(*args, **options)
    with on_device(args[0]):
        plan = launch_plan(args[0].get_device())
        return moe_mlp_backward(plan, *operands, tuple(args[-1]))


def cond_of(
    op: str, reason_of: Callable[..., str | None], backend: str = "TRITON"
) -> Callable[..., bool]:
    """:func:`choose` as the condition of ``op``."""
    return lambda *args, **kwargs: choose(op, reason_of, args, kwargs, backend)


_permutation_cond = cond_of("_moe_permutation", permutation_reason)
_topk_cond = cond_of("_moe_topk", topk_reason)
_topk_backward_cond = cond_of("_moe_topk_backward", topk_backward_reason)
_mlp_cond = cond_of("_moe_mlp", lambda *a, **k: mlp_reason(experts_of(*a, **k)))
_mlp_backward_cond = cond_of(
    "_moe_mlp_backward", lambda *a, **k: mlp_backward_reason(*backward_of(*a, **k))
)


def register(op: str, cond: Callable[..., bool], impl: Callable) -> None:
    tu.register_op_override(
        "aten", op, "CUDA", cond=cond, impl=impl, allow_multiple_override=True
    )


def register_to_dispatch() -> None:
    register("_moe_topk", _topk_cond, _topk_impl)
    register("_moe_topk_backward", _topk_backward_cond, _topk_backward_impl)
    register("_moe_permutation", _permutation_cond, _permutation_impl)
    register("_moe_mlp", _mlp_cond, _mlp_impl)
    register("_moe_mlp_backward", _mlp_backward_cond, _mlp_backward_impl)
