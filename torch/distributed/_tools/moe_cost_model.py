# mypy: allow-untyped-defs
"""Seconds of a mixture-of-experts layer's kernels, as pure functions of shapes and a profile.

Contract
    A kernel takes the smooth maximum of compute and memory traffic, plus a launch. Every
    number that is not on a data sheet is a field of ``moe_profile.Constants``, never a literal
    in a formula. Units: seconds, bytes, FLOPs, rows; nothing here makes a tensor or uses a
    device. :mod:`.moe_exchange_model` has the exchanges, :mod:`.moe_cpu_model` CPU cores.

Notation
    T tokens, D model width, F expert width, E experts, K experts of a token, R routed rows
    of a GPU, EP ranks that share the experts, domain ranks joined by the fast link.

``benchmarks/moe/published.py`` measures its errors, which are in
``docs/source/distributed.moe_planner.md`` with a map of the files beside this one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple, TYPE_CHECKING

from torch.distributed._tools.moe_arguments import check


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed._tools.moe_profile import Profile


__all__ = [
    "EXPERT_KERNELS", "ITEMSIZE", "LOW_PRECISION", "US", "copy_cost", "dense_mlp", "expert_flops",
    "experts", "expert_shares", "gemm", "hit_experts", "quantize", "recipe_seconds", "router",
    "smooth_max", "stream",
]  # fmt: skip


US = 1e-6
# Bytes an element, scales of blocks of 32 (FP8, MXFP8) or of 16 (NVFP4) included.
ITEMSIZE: dict[str, float] = {
    "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1 + 1 / 32, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16,
    "fp8xfp4": 1 + 1 / 32,  # activations; the weights are nvfp4
}  # fmt: skip
LOW_PRECISION = ("fp8", "mxfp8", "nvfp4", "fp8xfp4")


# ---- kernels ---------------------------------------------------------------------------


def smooth_max(a: float, b: float, p: float = 4) -> float:
    """(a^p + b^p)^(1/p): two close bounds cost more than either."""
    if not a or not b:
        return max(a, b)
    return (a**p + b**p) ** (1 / p)


_TILES = [
    (m, n)
    for m in (64, 128, 256)
    for n in (16, 32, 64, 96, 112, 128, 160, 192, 256)
    if m * n <= 128 * 256
]


@functools.lru_cache(1 << 16)
def _waves(groups: int, m: float, n: float, units: int) -> list[tuple[int, int, int]]:
    """(rows, columns, waves) of every tile shape over all groups."""
    return [
        (bm, bn, math.ceil(groups * math.ceil(m / bm) * math.ceil(n / bn) / units))
        for bm, bn in _TILES
    ]


def _operand_traffic(
    p: Profile, groups: float, m: float, n: float, k: float, a: float, b: float
) -> float:
    """Bytes of both operands from memory; read again once a group outgrows the cache.

    A wave of tiles is nearly a square of the output and reads two strips as long as its
    side. Later waves read them from the cache while a group fits there.
    """
    once = groups * (m * k * a + n * k * b)
    if m * k * a + n * k * b <= p.device.cache:
        return once
    tiles = math.ceil(m / 128) * math.ceil(n / 256)
    side = math.sqrt(p.device.units * 128 * 256)
    strips = groups * tiles / p.device.units * (min(side, m) * a + min(side, n) * b) * k
    return max(once, strips)


@functools.lru_cache(1 << 16)
def gemm(
    p: Profile,
    groups: float,
    m: float,
    n: float,
    k: float,
    dtype: str = "bf16",
    *,
    extra_bytes: float = 0.0,
    relative: float = 1.0,
    out_bytes: float = 2.0,
    align: int = 1,
) -> float:
    """Seconds of ``groups`` products (m, k) @ (k, n).

    Output tiles come in waves over the SMs, with the best tile shape. The start
    and the end of a tile cost as much as a longer summed dimension. Small tiles have
    more operand traffic per product.

    Args:
        p (Profile): the device.
        groups (float): products, empty ones not counted (:func:`hit_experts`).
        m (float): mean rows of a group, padded to ``align``.
        n, k (float): columns, and the summed dimension.
        dtype (str): a key of ``ITEMSIZE``.

    Keyword Args:
        extra_bytes (float): bytes that an epilogue reads or writes.
        relative (float): speed of this kernel relative to the best one.
        out_bytes (float): bytes of an output element.
        align (int): rows to which a group is padded.
    """
    if dtype not in ITEMSIZE:
        raise ValueError(f"gemm: dtype must be one of {list(ITEMSIZE)}, got {dtype!r}")
    p.check_dtype("gemm", dtype)
    for name, value in (("groups", groups), ("m", m), ("n", n), ("k", k)):
        check("gemm", {"rows": name}, rows=value)
    if not (m and groups and n and k):
        return 0.0
    c, d = p.constants, p.device
    m = math.ceil(m / align) * align
    low = dtype in LOW_PRECISION
    peak = d.fp4 if dtype == "nvfp4" and d.fp4 else d.fp8 if low else d.bf16
    rate = peak * (c.mma8 if low else c.mma16) * relative / d.units
    if dtype == "fp32":
        rate /= 2  # tf32
    depth = k + c.tile_start / (1 if low else 2)
    compute = min(
        waves * 2 * bm * bn * depth / rate * (1 + 12 * (bm + bn) / (bm * bn)) / 1.14
        for bm, bn, waves in _waves(math.ceil(groups), m, n, d.units)
    )
    size = ITEMSIZE[dtype]
    weight = ITEMSIZE["nvfp4"] if dtype == "fp8xfp4" else size
    traffic = _operand_traffic(p, groups, m, n, k, size, weight)
    traffic += groups * m * n * out_bytes + extra_bytes
    return smooth_max(compute, traffic / (d.memory_rate * c.memory)) + c.launch_us * US


def _passes(who: str, pass_: str) -> int:
    """Forwards that take as long as a pass."""
    known = {"fwd": 1, "bwd": 2, "fwd+bwd": 3}
    if pass_ not in known:
        raise ValueError(f"{who}: pass_ must be fwd, bwd or fwd+bwd, got {pass_!r}")
    return known[pass_]


def stream(p: Profile, nbytes: float, kernels: int = 1) -> float:
    """Seconds of elementwise kernels that read and write ``nbytes``."""
    rate = p.device.memory_rate * p.constants.memory
    return nbytes / rate + kernels * p.constants.launch_us * US


def quantize(p: Profile, elements: float, both: bool = False) -> float:
    """Seconds of bf16 to 8 bits with scales, and of the scales' swizzle.

    Args:
        p (Profile): the device.
        elements (float): elements to quantise.
        both (bool): quantises along rows and columns, from one read.
    """
    if not elements:
        return 0.0
    return stream(p, elements * (4.06 + 0.12 if both else 3.03 + 0.06), 2)


def hit_experts(num_experts: float, rows: float) -> float:
    """Expected number of experts that get at least one of ``rows`` uniform rows."""
    if num_experts <= 1:
        return min(1.0, rows)
    return num_experts * (1 - (1 - 1 / num_experts) ** rows)


# ---- one layer of experts --------------------------------------------------------------


class ExpertKernel(NamedTuple):
    """Speed of the products relative to the best ones, and the separate kernels around them.

    Attributes:
        relative: speed of the products; None: fitted as ``grouped16`` and ``grouped8``.
        apart: 0 gather and activation inside the products, 1 separate activation, 2 also separate
            gather, 3 separate gate and up products and unfused elementwise work.
    """

    relative: float | None
    apart: int


# Relative speeds are those of SonicMoE's published ablations (arXiv 2512.14080).
EXPERT_KERNELS = {
    "moe_mlp": ExpertKernel(0.80, 0),
    "sonic": ExpertKernel(1.0, 0),
    "deepgemm++": ExpertKernel(1.0, 2),
    "scattermoe": ExpertKernel(0.80, 1),
    "momoe": ExpertKernel(0.70, 1),
    "liger": ExpertKernel(0.87, 0),
    "grouped_mm": ExpertKernel(None, 3),
    "mcore": ExpertKernel(0.95, 2),
    "mcore_fused": ExpertKernel(0.95, 0),
}


class _Products:
    """Products of one layer: forward (``mm``) and of the weights' gradients (``wgrad``)."""

    def __init__(self, p: Profile, rows: float, local: float, kernel: str, dtype: str):
        if kernel not in EXPERT_KERNELS:
            raise ValueError(
                f"experts: kernel must be one of {list(EXPERT_KERNELS)}, got {kernel!r}"
            )
        relative, self.apart = EXPERT_KERNELS[kernel]
        low = dtype in LOW_PRECISION
        if relative is None:
            relative = p.constants.grouped8 if low else p.constants.grouped16
        self.p, self.dtype, self.low, self.relative = p, dtype, low, relative
        self.hit = hit_experts(local, rows)
        self.rows = rows / max(self.hit, 1e-9)
        # FP8 products need groups of 128 rows, hence the padding.
        self.align = 128 if low else 1

    def mm(self, n: float, k: float, extra_bytes: float = 0.0) -> float:
        return gemm(
            self.p, self.hit, self.rows, n, k, self.dtype,
            extra_bytes=extra_bytes, relative=self.relative, align=self.align,
        )  # fmt: skip

    def wgrad(self, n: float, k: float) -> float:
        # Short sums over an expert's rows are 8 % slower, with scales along them 20 %.
        return gemm(
            self.p, max(self.hit, 1.0), n, k, self.rows, self.dtype,
            relative=self.relative * (0.80 if self.low else 0.92),
            out_bytes=4 if self.low else 2,
        )  # fmt: skip

    def quantized(self, elements: float, both: bool = True) -> float:
        return quantize(self.p, elements, both) if self.low and self.apart else 0.0

    def weights(self, elements: float) -> float:
        """Quantises the weights: torchao in every call, others once a step."""
        return self.quantized(elements, False) if self.apart == 3 else 0.0


def _forward(g: _Products, rows: float, tokens: float, d: int, f: float) -> float:
    p, apart = g.p, g.apart
    t = stream(p, 4 * rows * d) if apart > 1 else 0.0  # gather
    t += g.quantized(rows * d) + g.weights(g.hit * 2 * f * d)
    if apart < 3:
        t += g.mm(2 * f, d, 2 * rows * f if apart == 0 else 0)
    else:
        t += 2 * g.mm(f, d)
    if apart:
        t += stream(p, (6 if apart < 3 else 14) * rows * f, 1 if apart < 3 else 3)
    t += g.quantized(rows * f) + g.weights(g.hit * f * d)
    t += g.mm(d, f) + stream(p, 2 * rows * d + 2 * tokens * d)  # and the weighted sum
    if apart == 3:
        t += stream(p, 8 * rows * d, 2)  # float32 scores, scatter-add
    return t


def _backward(g: _Products, rows: float, tokens: float, d: int, f: float) -> float:
    p, apart = g.p, g.apart
    t = stream(p, 6 * rows * d) if apart > 1 else 0.0  # rows of dO, scaled; d(weights)
    t += g.quantized(rows * d) + g.weights(g.hit * f * d)
    t += g.mm(f, d, 8 * rows * f if apart == 0 else 0) + g.wgrad(d, f)
    if apart:
        t += stream(p, (12 if apart < 3 else 22) * rows * f, 1 if apart < 3 else 4)
    if apart == 1:
        t += stream(p, 8 * rows * d, 2)  # ScatterMoE groups X and dO
    t += g.quantized(2 * rows * f) + g.weights(g.hit * 2 * f * d)
    if apart < 3:
        t += g.mm(d, 2 * f) + g.wgrad(2 * f, d)
    else:
        t += 2 * (g.mm(d, f) + g.wgrad(f, d))
    return t + stream(p, 2 * rows * d + 2 * tokens * d)


@functools.lru_cache(1 << 14)
def experts(
    p: Profile,
    rows: float,
    d: int,
    f: float,
    local: float,
    *,
    kernel: str = "moe_mlp",
    dtype: str = "bf16",
    pass_: str = "fwd",
    tokens: float | None = None,
) -> float:
    """Seconds of the routed experts of one GPU, gated: up (2F, D) and down (D, F).

    Args:
        p (Profile): the device.
        rows (float): R.
        d (int): D.
        f (float): F.
        local (float): experts of this GPU.

    Keyword Args:
        kernel (str): a key of :data:`EXPERT_KERNELS`.
        dtype (str): of the products.
        pass_ (str): ``"fwd"``, ``"bwd"`` or ``"fwd+bwd"``.
        tokens (float, optional): output rows. Default: ``rows``
    """
    _passes("experts", pass_)
    check("experts", {"width": "f"}, rows=rows, d=d, width=f, local=local)
    if tokens is None:
        tokens = rows
    check("experts", {"rows": "tokens"}, rows=tokens)
    g = _Products(p, rows, local, kernel, dtype)
    t = _forward(g, rows, tokens, d, f) if "fwd" in pass_ else 0.0
    return t + (_backward(g, rows, tokens, d, f) if "bwd" in pass_ else 0.0)


def copy_cost(
    p: Profile, rows: float, d: int, f: float, local: float, ep: int, domain: int | None = None
) -> float:  # fmt: skip
    """``copy_cost`` of an ``ExpertPlacement``: time of a fetched expert over that of a token copy.

    The expert's weights and gradient are sent; the token copy sends two rows each way and takes a
    row's share of forward and backward. Arguments as in :func:`experts`.
    """
    if not rows > 0:
        raise ValueError(f"copy_cost: rows must be above 0, got {rows}")
    near, size = ep <= (domain or p.device.domain), ITEMSIZE["bf16"]
    rate = p.device.fast * p.constants.fast
    if not near:
        rate = p.device.slow * p.constants.slow
    computed = experts(p, rows, d, f, local, pass_="fwd+bwd") / rows
    return 2 * 3 * d * f * size / rate / (computed + 4 * d * size / rate)


def expert_shares(
    p: Profile, rows: float, d: int, f: float, local: float, **kw: Any
) -> dict[str, float]:
    """Where the time of :func:`experts` goes: ``compute``, ``memory``, ``quantisation``.

    Compute is the time with infinitely fast memory, quantisation the time that the same
    products without scales would save, memory the rest.
    """
    fast = dataclasses.replace(
        p, device=dataclasses.replace(p.device, memory_rate=1e18)
    )
    whole = experts(p, rows, d, f, local, **kw)
    g = _Products(p, rows, local, kw.get("kernel", "moe_mlp"), kw.get("dtype", "bf16"))
    once = g.quantized(rows * d) + g.weights(g.hit * 3 * f * d)
    pass_ = kw.get("pass_", "fwd")
    q = once + g.quantized(rows * f) if "fwd" in pass_ else 0.0
    q += once + g.quantized(2 * rows * f) if "bwd" in pass_ else 0.0
    compute = min(experts(fast, rows, d, f, local, **kw), whole - q)
    return {"compute": compute, "memory": whole - compute - q, "quantisation": q}


def expert_flops(
    rows: float, d: int, f: float, *, gated: bool = True, pass_: str = "fwd"
) -> float:
    """FLOPs of the experts' products, as the flop counter counts them for ``_moe_mlp``."""
    forward = 2 * rows * d * f * (3 if gated else 2)
    return forward * _passes("expert_flops", pass_)


def recipe_seconds(
    p: Profile,
    rows: float,
    d: int,
    f: float,
    local: float,
    dtypes: Sequence[str] = ("bf16", "mxfp8"),
) -> dict[str, dict[str, float]]:
    """Seconds of every GEMM of the experts in every dtype, for a selector to compare.

    Weights are quantised once a step, activations and gradients where they are made:
    along rows for ``forward`` and ``dgrad``, along columns for ``wgrad``.

    Returns:
        ``{"forward": {"bf16": s, "mxfp8": s}, "dgrad": ..., "wgrad": ...}``; the
        quantisation is in the low-precision numbers.

    Example::
        >>> times = recipe_seconds(profile("H100"), 8192, 7168, 2048, 8, ("bf16", "fp8"))
        >>> recipe = {gemm: min(s, key=s.get) for gemm, s in times.items()}
    """
    check("recipe_seconds", {"width": "f"}, rows=rows, d=d, width=f, local=local)
    out: dict[str, dict[str, float]] = {"forward": {}, "dgrad": {}, "wgrad": {}}
    for dtype in dtypes:
        g = _Products(p, rows, local, "mcore", dtype)
        weights = quantize(p, 3 * g.hit * f * d) if g.low else 0.0
        rowwise = g.quantized(rows * d, False) + g.quantized(rows * f, False)
        gradients = g.quantized(rows * d, False) + g.quantized(2 * rows * f, False)
        out["forward"][dtype] = g.mm(2 * f, d) + g.mm(d, f) + rowwise + weights
        out["dgrad"][dtype] = g.mm(f, d) + g.mm(d, 2 * f) + gradients + weights
        out["wgrad"][dtype] = g.wgrad(d, f) + g.wgrad(2 * f, d) + rowwise + gradients
    return out


def router(
    p: Profile, tokens: float, d: int, e: int, k: int, pass_: str = "fwd"
) -> float:
    """Seconds of logits, top-k and permutation; backward takes as long again."""
    check(
        "router", {"rows": "tokens", "experts": "e"}, rows=tokens, d=d, experts=e, k=k
    )
    logits = gemm(p, 1, tokens, e, d)
    t = logits + stream(p, tokens * (8 * e + 16 * k), 6)
    return t * _passes("router", pass_)


def dense_mlp(
    p: Profile, tokens: float, d: int, f: float, dtype: str = "bf16", pass_: str = "fwd", tp: int = 1
) -> float:  # fmt: skip
    """Seconds of a gated MLP: a shared expert or a dense layer, over ``tp`` ranks."""
    check(
        "dense_mlp", {"rows": "tokens", "width": "f"}, rows=tokens, d=d, width=f, tp=tp
    )
    if not f:
        return 0.0
    f = int(f / tp)
    q = 0.0
    if dtype in LOW_PRECISION:
        q = quantize(p, tokens * d) + quantize(p, tokens * f)
    products = gemm(p, 1, tokens, 2 * f, d, dtype) + gemm(p, 1, tokens, d, f, dtype)
    t = products + stream(p, 6 * tokens * f) + q
    return t * _passes("dense_mlp", pass_)
