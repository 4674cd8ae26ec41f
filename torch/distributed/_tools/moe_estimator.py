# mypy: allow-untyped-defs
"""Time of a module that runs under ``FakeTensorMode``, in the manner of ``RuntimeEstimator``.

:func:`op_seconds` is the time of one op by its tensors, for :class:`MoERuntimeEstimator` and for
Inductor (:func:`inductor_estimate`).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any, TYPE_CHECKING

import torch
from torch.distributed._tools import moe_cost_model as cost
from torch.distributed._tools.moe_cpu_model import cpu_experts
from torch.distributed._tools.moe_exchange_model import link_seconds
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._runtime_estimation import _IGNORE_OPS, _VIEW_OPS
from torch.utils.flop_counter import flop_registry


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed._tools.moe_profile import Profile


__all__ = ["inductor_estimate", "MoERuntimeEstimator", "op_seconds"]


_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def _moe_op_seconds(p: Profile, name: str, args: Sequence[Any]) -> float:
    """Seconds of ``_moe_mlp`` or its backward; rows are even over experts, as the balance is unknown."""
    shift = 1 if name == "_moe_mlp_backward" else 0
    x, w_in, w_out, offs = args[shift : shift + 4]
    slots = args[shift + 5] if len(args) > shift + 5 else None
    rows = slots.shape[0] if slots is not None else x.shape[0]
    (e, d, f), dtype = w_out.shape, _DTYPES.get(x.dtype, "bf16")
    pass_ = "bwd" if shift else "fwd"
    if not w_out.numel():  # nothing is multiplied
        return 0.0
    if p.cpu is not None:
        whole = {
            q: cpu_experts(p.cpu, rows, d, f, e, 1, dtype=dtype, pass_=q)
            for q in ("fwd", "fwd+bwd")
        }
        return whole["fwd"] if pass_ == "fwd" else whole["fwd+bwd"] - whole["fwd"]
    return cost.experts(
        p, rows, d, f, e, kernel="moe_mlp", dtype=dtype, pass_=pass_, tokens=x.shape[0]
    )


def op_seconds(p: Profile, func: Any, args: Sequence[Any], out: Any) -> float:
    """Seconds of one op by its fake or meta tensors; 0 for views.

    Products and ``_moe_mlp`` are modelled, other ops stream their bytes once.
    """
    packet = getattr(func, "_overloadpacket", func)
    name = packet.__name__
    if packet in _VIEW_OPS or packet in _IGNORE_OPS or func.namespace != "aten":
        return 0.0
    if name in ("_moe_mlp", "_moe_mlp_backward"):
        return _moe_op_seconds(p, name, args)
    tensors = [t for t in (*args, *(out if isinstance(out, (tuple, list)) else (out,)))
               if isinstance(t, torch.Tensor)]  # fmt: skip
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        a, b = args[-2:] if name in ("mm", "bmm") else args[1:3]
        groups = a.shape[0] if a.dim() == 3 else 1
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        dtype = _DTYPES.get(a.dtype, "bf16")
        if p.cpu is None:
            return cost.gemm(p, groups, m, n, k, dtype)
        rate = p.cpu.rate32 if dtype == "fp32" else p.cpu.rate16
        moved = sum(t.numel() * t.element_size() for t in tensors) / p.cpu.memory
        return cost.smooth_max(2 * groups * m * n * k / rate, moved)
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    if p.cpu is not None:
        moved = nbytes / p.cpu.memory
        if packet in flop_registry:  # attention
            rate = p.cpu.rate32 if tensors[0].dtype == torch.float32 else p.cpu.rate16
            moved = cost.smooth_max(
                flop_registry[packet](*args, out_val=out) / rate, moved
            )
        return moved
    seconds = cost.stream(p, nbytes)
    if name == "_grouped_mm":
        a, b = args[:2]
        groups = b.shape[0] if b.dim() == 3 else args[2].shape[0]
        m, k, n = a.shape[-2] / groups, a.shape[-1], b.shape[-1]
        if b.dim() == 2:  # weight gradients: the summed dimension is the ragged one
            m, k = a.shape[-2], a.shape[-1] / groups
        relative = p.constants.grouped16
        return cost.gemm(
            p, groups, m, n, k, _DTYPES.get(a.dtype, "bf16"), relative=relative
        )
    if packet in flop_registry:
        flops = flop_registry[packet](*args, out_val=out)
        return cost.smooth_max(flops / (0.55 * p.device.bf16), seconds)
    return seconds


def inductor_estimate(p: Profile) -> Callable[[Any, int | None], float | None]:
    """``custom_runtime_estimation`` of Inductor's overlap scheduling, for MoE layers.

    Milliseconds of ``_moe_mlp`` and its backward, and with a profile of a CPU, whose links are
    measured, of an all-to-all; None, which leaves the node to Inductor, for everything else.
    All ranks need the same profile: from others, they would order collectives differently.

    Example::
        >>> config = torch._inductor.config.aten_distributed_optimizations
        >>> config.custom_runtime_estimation = inductor_estimate(profile("H100"))
    """
    # It can be pickled, as keys of Inductor's caches must be.
    return functools.partial(_inductor_milliseconds, p)


def _inductor_milliseconds(
    p: Profile, node: Any, override_size: int | None = None
) -> float | None:
    name = getattr(getattr(node.target, "_overloadpacket", None), "__name__", "")
    if name == "all_to_all_single" and p.cpu is not None:
        x, splits, *_ = node.args
        nbytes = _by_hints(x).nbytes if override_size is None else override_size
        sent = nbytes * (1 - 1 / len(splits))
        start = p.constants.fast_us * cost.US
        return 1e3 * link_seconds(start, p.device.fast, sent, turn=p.cpu.turn)
    if name not in ("_moe_mlp", "_moe_mlp_backward"):
        return None
    args = torch.fx.map_arg(node.args, _by_hints)
    return 1e3 * op_seconds(p, node.target, args, None)


def _by_hints(node: torch.fx.Node) -> Any:
    """A node's result with hints for dynamic sizes, as an estimate must not guard."""
    from torch._inductor.config import unbacked_symint_fallback as fallback

    x = node.meta.get("val")
    if not isinstance(x, torch.Tensor):
        return x
    sizes = [optimization_hint(n, fallback) for n in x.shape]
    return torch.empty(sizes, dtype=x.dtype, device="meta")


class MoERuntimeEstimator(TorchDispatchMode):
    """Sums the modelled seconds and the counted FLOPs of the ops of a module.

    Like ``RuntimeEstimator``, it computes and allocates nothing under ``FakeTensorMode``.
    Unlike it, it models the products of routed experts.

    Args:
        profile (Profile): the device.

    Attributes:
        seconds (float): of all ops.
        flops (int): of all ops, as ``FlopCounterMode`` counts them.
        ops (int): that take time; views do not.
        by_op (dict[str, float]): seconds by op.

    Example::
        >>> # xdoctest: +SKIP("needs a model")
        >>> with FakeTensorMode(), MoERuntimeEstimator(profile("H100")) as estimate:
        ...     model(tokens).sum().backward()
        >>> estimate.seconds, estimate.by_op["_moe_mlp"]
    """

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self.profile = profile
        self.seconds, self.flops, self.ops = 0.0, 0, 0
        self.by_op: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        seconds = op_seconds(self.profile, func, args, out)
        packet = func._overloadpacket
        self.seconds += seconds
        self.ops += seconds > 0
        self.by_op[packet.__name__] += seconds
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        return out
