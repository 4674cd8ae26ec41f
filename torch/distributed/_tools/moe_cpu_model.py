# mypy: allow-untyped-defs
"""Seconds of a mixture-of-experts layer on CPU cores, in the manner of :mod:`.moe_cost_model`.

The constants are fields of ``moe_profile.CpuConstants``, which ``moe_calibration`` measures on the
machine at hand; ``benchmarks/moe/sparsity.py`` has the errors.
"""

from __future__ import annotations

import math
from typing import Any, TYPE_CHECKING

from torch.distributed._tools.moe_arguments import check, check_layer
from torch.distributed._tools.moe_cost_model import (
    hit_experts,
    ITEMSIZE,
    smooth_max,
    US,
)
from torch.distributed._tools.moe_exchange_model import all_to_all, copies


if TYPE_CHECKING:
    from torch.distributed._tools.moe_profile import CpuConstants, Profile


__all__ = ["cpu_exchange", "cpu_experts", "cpu_layer", "cpu_parts", "cpu_rate"]


# Most rows of an expert that share a packed weight: kMaxBlockRows of MoEDriver.h.
_BLOCK_ROWS = 240
# The system maps a tensor of at least this size anew, so each page is touched for the first
# time: the largest M_MMAP_THRESHOLD of glibc.
_FRESH_BYTES = 32 << 20


def cpu_rate(
    c: CpuConstants, m: float, dtype: str = "bf16", in_order: bool = False
) -> float:
    """FLOP/s of products with a mean of ``m`` rows of an expert.

    Weights are packed in the products' order once for every block of rows, which takes
    as long as ``half_rows`` rows. ``thin_rows`` rows or fewer with a weight in
    nn.Linear's layout need no packing. Numbers of rows vary around ``m`` by its root.

    Args:
        c (CpuConstants): the machine.
        m (float): mean rows of an expert that has some.
        dtype (str): of the products.
        in_order (bool): weights have the layout that the product reads: transposed storage in
            forward, the other one in backward.
    """
    spread = math.sqrt(2 * m)
    count = max(1, math.ceil((m + 4 * spread) / _BLOCK_ROWS))
    thin = c.thin_rows and not in_order
    starts = [c.thin_rows + 0.5 if thin else -math.inf]
    starts += [float(i * _BLOCK_ROWS) for i in range(1, count)]
    blocks = sum(0.5 + 0.5 * math.erf((m - start) / spread) for start in starts)
    peak = c.rate32 if dtype == "fp32" else c.rate16
    half = c.half_rows_t if in_order else c.half_rows
    return peak * m / (m + half * blocks)


def cpu_experts(
    c: CpuConstants, tokens: float, d: int, f: int, num_experts: int, k: int, *,
    hit: float | None = None, dtype: str = "bf16", pass_: str = "fwd",
    transposed: bool = False,
) -> float:  # fmt: skip
    """Seconds of ``F.moe_mlp`` on a CPU.

    Products reach their rate with enough rows per expert (:func:`cpu_rate`). Weights of
    every expert with rows are read once, gradients are written once, and large gradients are
    touched for the first time.

    Args:
        c (CpuConstants): the machine.
        tokens (float): T.
        d, f, num_experts, k (int): D, F, E, K.

    Keyword Args:
        hit (float, optional): experts with rows. Default: as of uniform routing
        dtype (str): ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        pass_ (str): ``"fwd"`` or ``"fwd+bwd"``.
        transposed (bool): weights stored as (E, D, 2F) and (E, F, D).
    """
    names = {"rows": "tokens", "experts": "num_experts"}
    check("cpu_experts", names, rows=tokens, d=d, f=f, experts=num_experts, k=k)
    if dtype not in ("bf16", "fp16", "fp32") or pass_ not in ("fwd", "fwd+bwd"):
        raise ValueError(
            "cpu_experts: dtype must be bf16, fp16 or fp32 and pass_ fwd or fwd+bwd, got "
            f"{dtype!r} and {pass_!r}"
        )
    rows, size = tokens * k, ITEMSIZE[dtype]
    if hit is None:
        hit = hit_experts(num_experts, rows)
    if not rows or not hit:
        return c.call_us * US
    m = rows / hit
    rate = cpu_rate(c, m, dtype, transposed)
    weights = hit * 3 * d * f * size
    moved = weights + (2 * tokens * d + 3 * rows * f) * size
    forward = smooth_max(6 * rows * f * d / rate, moved / c.memory)
    forward += (c.call_us + hit * c.expert_us) * US
    if pass_ == "fwd":
        return forward
    # Backward: products for input gradients read the transposed weights. Products for
    # weight gradients sum over rows and need no packed weight.
    products = 6 * rows * f * d
    rate = cpu_rate(c, m, dtype, not transposed)
    moved = weights + (5 * tokens * d + 6 * rows * f) * size
    inputs = smooth_max(products / rate, moved / c.memory)
    peak = c.rate32 if dtype == "fp32" else c.rate16
    grads = [num_experts * n * d * f * size for n in (2, 1)]
    fresh = sum(n for n in grads if n >= _FRESH_BYTES)
    backward = inputs + products / (peak * c.wgrad)
    backward += sum(grads) / c.memory + fresh / c.fault
    return forward + backward + (c.call_us + 2 * hit * c.expert_us) * US


def cpu_exchange(
    p: Profile, tokens: float, d: int, num_experts: int, k: int, ep: int, *,
    dtype: str = "bf16", pass_: str = "fwd",
) -> float:  # fmt: skip
    """Seconds of dispatch and combine on a CPU: messages, and the cores' work for them.

    A core gathers rows into messages and sums returned rows, including the rank's own,
    which no link carries. Sizes are one more message. Backward has as many
    rows both ways and no sizes, and writes returned rows beside the gradients of
    their router weights.

    Args:
        p (Profile): the machine, with ``p.cpu``.
        tokens (float): T of a rank.
        d, num_experts, k, ep (int): D, E of all ranks, K, and ranks that share the experts.

    Keyword Args:
        dtype (str): of the rows.
        pass_ (str): ``"fwd"`` or ``"fwd+bwd"``.
    """
    names = {"rows": "tokens", "experts": "num_experts"}
    check("cpu_exchange", names, rows=tokens, d=d, experts=num_experts, k=k, ep=ep)
    if ep == 1:
        return 0.0
    c = p.cpu
    if c is None:
        raise ValueError("cpu_exchange: p must be a profile of a CPU, p.cpu is None")
    messages = sum(
        all_to_all(
            p, tokens, d, num_experts, k, ep, domain=ep, dtype=dtype, combine=back
        )
        for back in (False, True)
    )
    rows = tokens * copies(ep, ep, num_experts, k).ranks
    copied = rows * d * ITEMSIZE[dtype] / c.copy
    forward = messages + 2 * copied + (p.constants.fast_us + c.exchange_us) * US
    if pass_ == "fwd":
        return forward
    return forward + messages + 3 * copied + c.exchange_grad_us * US


def cpu_layer(
    p: Profile, tokens: float, d: int, f: int, num_experts: int, k: int, ep: int = 1,
    **experts: Any,
) -> float:  # fmt: skip
    """Seconds of an expert-parallel layer on CPU ranks.

    Args:
        p (Profile): the machine, with ``p.cpu``.
        tokens (float): T of a rank.
        d, f, num_experts, k (int): D, F, E of all ranks, K.
        ep (int): ranks that share the experts.
        experts: ``hit``, ``dtype``, ``pass_`` and ``transposed`` of :func:`cpu_experts`.
    """
    check_layer("cpu_layer", tokens, d, f, num_experts, k, ep)
    if p.cpu is None:
        raise ValueError("cpu_layer: p must be a profile of a CPU, p.cpu is None")
    work = cpu_experts(p.cpu, tokens, d, f, num_experts // ep, k, **experts)
    both = {name: experts[name] for name in ("dtype", "pass_") if name in experts}
    return work + cpu_exchange(p, tokens, d, num_experts, k, ep, **both)


def cpu_parts(
    p: Profile, tokens: float, d: int, f: int, num_experts: int, k: int, ep: int,
    chunks: int = 1, *, shared_f: int = 0, dtype: str = "bf16",
) -> tuple[float, float, float, float]:  # fmt: skip
    """Seconds of dispatch, experts and combine of one of ``chunks``, and of shared experts.

    Links carry the messages. Cores make them, as they compute the products, so that time is in
    the seconds of the experts. Sizes are not sent, as in a graph
    with a static capacity.

    Args:
        p (Profile): the machine, with ``p.cpu``.
        tokens (float): T of a rank.
        d, f, num_experts, k (int): D, F, E of all ranks, K.
        ep (int): ranks that share the experts.
        chunks (int): of the tokens.

    Keyword Args:
        shared_f (int): width of the shared experts.
        dtype (str): of rows and products.
    """
    check("cpu_parts", chunks=chunks)
    check_layer("cpu_parts", tokens, d, f, num_experts, k, ep)
    if p.cpu is None:
        raise ValueError("cpu_parts: p must be a profile of a CPU, p.cpu is None")
    t = tokens / chunks
    there, back = (
        all_to_all(p, t, d, num_experts, k, ep, domain=ep, dtype=dtype, combine=combine)
        for combine in (False, True)
    )
    around = cpu_exchange(p, t, d, num_experts, k, ep, dtype=dtype) - there - back
    around -= p.constants.fast_us * US if ep > 1 else 0.0
    work = cpu_experts(p.cpu, t, d, f, num_experts // ep, k, dtype=dtype)
    shared = 0.0
    if shared_f:
        shared = cpu_experts(p.cpu, tokens, d, shared_f, 1, 1, dtype=dtype)
    return there, around + work, back, shared
