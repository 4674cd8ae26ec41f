# mypy: allow-untyped-defs
"""Devices, what is fitted about them, and how: profiles for :mod:`.moe_cost_model`.

A :class:`Profile` is a data sheet (peaks from ``torch._inductor.analysis.device_info``
where it has them) and the constants that no data sheet has. :func:`calibrate` measures
them on the machine at hand in at most half a minute; the constants of GPUs that were not
at hand are in :data:`FITTED`, fitted on published rows and labelled so.

    python -m torch.distributed._tools.moe_calibration --output cpu.json
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
from torch.distributed._tools.moe_cost_model import (
    expert_flops,
    gemm,
    ITEMSIZE,
    link_seconds,
    stream,
)
from torch.distributed._tools.moe_cpu_model import (
    cpu_exchange,
    cpu_experts,
    CpuConstants,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


__all__ = [
    "BOUNDS",
    "Constants",
    "DEVICES",
    "Device",
    "FITTED",
    "FITTED_PROVENANCE",
    "HELD_OUT_ERROR",
    "Profile",
    "CPU_ROWS",
    "CpuRow",
    "calibrate",
    "cpu_call",
    "fit",
    "fit_cpu",
    "fit_link",
    "measure_calls",
    "measure_exchange",
    "measure_kernels",
    "measure_links",
    "profile",
]


# ---- devices ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """Data sheet of a device: dense FLOP/s and B/s of one direction.

    Attributes:
        generation (str): devices of a generation share their fitted constants.
        units (int): SMs, compute units or cores.
        bf16, fp8, fp4 (float): dense FLOP/s; fp8 doubles where the sheet has no fp4.
        memory_rate (float): B/s of device memory.
        fast (float): B/s a device sends into its domain (NVLink, xGMI).
        slow (float): B/s a device sends out of it (a network card per device).
        memory (float): bytes.
        cache (float): bytes of the last cache level.
        domain (int): devices joined by the fast link in the usual machine.
    """

    generation: str
    units: int
    bf16: float
    fp8: float
    memory_rate: float
    fast: float
    slow: float
    memory: float
    cache: float = 50e6
    domain: int = 8
    fp4: float = 0.0


class _Sheet(NamedTuple):
    """What ``device_info`` lacks; ``bf16`` to ``memory`` only where it lacks the device."""

    info: str | None
    generation: str
    units: int
    fast: float
    slow: float
    domain: int = 8
    cache: float = 50e6
    bf16: float = 0.0
    memory_rate: float = 0.0
    memory: float = 0.0


# Links and units: NVIDIA and AMD product sheets. H800 is an H100 with 400 GB/s of NVLink.
_SHEETS = {
    "A100": _Sheet("NVIDIA A100", "ampere", 108, 300e9, 25e9, cache=40e6),
    "H100": _Sheet("NVIDIA H100", "hopper", 132, 450e9, 50e9),
    "H800": _Sheet("NVIDIA H100", "hopper", 132, 200e9, 50e9),
    "H200": _Sheet(
        "NVIDIA H100", "hopper", 132, 450e9, 50e9, 8, 50e6, 0, 4.8e12, 141e9
    ),
    "B200": _Sheet("NVIDIA B200", "blackwell", 148, 900e9, 50e9, 8, 126e6),
    "GB200": _Sheet(
        "NVIDIA GB300", "blackwell", 148, 900e9, 50e9, 72, 126e6, 0, 8e12, 186e9
    ),
    "B300": _Sheet(
        "NVIDIA B200", "blackwell", 148, 900e9, 100e9, 8, 126e6, 0, 8e12, 270e9
    ),
    "GB300": _Sheet("NVIDIA GB300", "blackwell", 148, 900e9, 100e9, 72, 126e6),
    "MI300X": _Sheet("AMD MI300X", "cdna", 304, 448e9, 50e9, cache=256e6),
    "MI355X": _Sheet("AMD MI355X", "cdna", 256, 537e9, 50e9, cache=256e6),
}


@functools.cache
def _device(name: str) -> Device:
    from torch._inductor.analysis.device_info import lookup_device_info

    sheet = _SHEETS[name]
    info = lookup_device_info(sheet.info) if sheet.info else None
    if info is None:
        raise ValueError(f"device_info has no {sheet.info!r} any more")
    dense = 1e12 / info.tops_sparsity_factor
    bf16 = sheet.bf16 or info.tops[torch.bfloat16] * dense
    fp8 = info.tops.get(torch.float8_e5m2, 0) * dense or 2 * bf16
    if sheet.generation == "ampere":
        fp8 = bf16
    return Device(
        generation=sheet.generation,
        units=sheet.units,
        bf16=bf16,
        fp8=fp8,
        memory_rate=sheet.memory_rate or info.dram_bw_gbs * 1e9,
        fast=sheet.fast,
        slow=sheet.slow,
        memory=sheet.memory or info.dram_gb * 1e9,
        cache=sheet.cache,
        domain=sheet.domain,
        fp4=2 * fp8 if sheet.generation == "blackwell" else 0.0,
    )


DEVICES = tuple(_SHEETS)


@dataclass(frozen=True)
class Constants:
    """What is fitted, per generation of devices. :data:`BOUNDS` has start and range.

    Attributes:
        mma16, mma8: share of the data sheet's FLOP/s that the best products reach.
        memory: share of the data sheet's memory rate that streams reach.
        tile_start: start and end of an output tile, in bytes of the summed dimension.
        launch_us: of a kernel.
        grouped16, grouped8: ``torch._grouped_mm`` and its scaled form against the best.
        fast, slow: share of the links' rate.
        fast_us, slow_us: start of an exchange inside and outside of the domain.
        floor_us: shortest read of remote rows and their sum in a one-sided combine; stores
            of a dispatch take a quarter.
        setup_us: counts, notification and the host's wait before an exchange.
        fabric: rate lost each time the number of ranks doubles beyond eight.
        unit_rate: B/s that one SM of a communication kernel moves.
        row_bytes: bytes that a row costs such an SM beside its own.
        host_us: of a layer's forward and backward, on the host, without CUDA graphs.
        exposed: share of a layer's exchange that frameworks do not hide.
        stack: measured time of a layer in training over the sum of its kernels, which
            were measured alone and at higher clocks.
        drift: speed that a year of software brings.
    """

    mma16: float = 0.70
    mma8: float = 0.70
    memory: float = 0.85
    tile_start: float = 300.0
    launch_us: float = 4.0
    grouped16: float = 0.85
    grouped8: float = 0.85
    fast: float = 0.75
    slow: float = 0.88
    fast_us: float = 18.0
    slow_us: float = 35.0
    floor_us: float = 12.0
    setup_us: float = 100.0
    fabric: float = 0.02
    unit_rate: float = 40e9
    row_bytes: float = 2000.0
    host_us: float = 6000.0
    exposed: float = 0.6
    stack: float = 1.25
    drift: float = 0.2


BOUNDS: dict[str, tuple[float, float]] = {
    "mma16": (0.4, 0.95),
    "mma8": (0.3, 0.95),
    "memory": (0.5, 0.95),
    "tile_start": (5, 900),
    "launch_us": (1, 12),
    "grouped16": (0.4, 1.0),
    "grouped8": (0.4, 1.0),
    "fast": (0.3, 0.98),
    "slow": (0.3, 1.0),
    "fast_us": (5, 100),
    "slow_us": (10, 300),
    "floor_us": (1, 60),
    "setup_us": (1, 600),
    "fabric": (0.001, 0.15),
    "unit_rate": (10e9, 200e9),
    "row_bytes": (10, 8000),
    "host_us": (300, 12000),
    "exposed": (0.05, 1.0),
    "stack": (0.8, 2.0),
    "drift": (0.001, 0.6),
}


@dataclass(frozen=True, eq=False)  # a key of caches by identity
class Profile:
    """A device, its fitted constants, and where they come from.

    Attributes:
        name (str): of the device.
        device (Device): its data sheet.
        constants (Constants): its fitted constants.
        provenance (str): ``measured ...`` here, or ``fitted on published rows``.
        cpu (CpuConstants, optional): of a machine without an accelerator.
    """

    name: str
    device: Device
    constants: Constants
    provenance: str = "data sheet and start values, not fitted"
    cpu: CpuConstants | None = None

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` reads."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any] | str) -> Profile:
        """From the dict of :meth:`to_json`, or from the path of a JSON file."""
        if isinstance(data, str):
            with open(data) as file:
                data = json.load(file)
        data = data.get("profile", data)
        try:
            return Profile(
                data["name"],
                Device(**data["device"]),
                Constants(**data["constants"]),
                data["provenance"],
                CpuConstants(**data["cpu"]) if data.get("cpu") else None,
            )
        except (KeyError, TypeError) as e:
            raise ValueError(
                "Profile.from_json: expected name, device, constants and provenance as "
                f"written by moe_calibration, got keys {sorted(data)}: {e}"
            ) from e


@functools.cache
def profile(name: str) -> Profile:
    """The profile of a GPU by name, one of :data:`DEVICES`, or of a JSON file by path.

    Constants are fitted on published rows, as no such GPU was at hand.
    """
    if name.endswith(".json"):
        return Profile.from_json(name)
    if name not in _SHEETS:
        raise ValueError(
            f"profile: device must be one of {', '.join(DEVICES)} or the path of a "
            f".json profile of moe_calibration, got {name!r}"
        )
    device = _device(name)
    fitted = FITTED.get(device.generation)
    if fitted is None:
        return Profile(name, device, Constants())
    return Profile(name, device, Constants(**fitted), FITTED_PROVENANCE)


# Written by `python benchmarks/moe/published.py --fit`.
FITTED_PROVENANCE = "fitted on published rows"
FITTED: dict[str, dict[str, float]] = {
    "hopper": {
        "mma16": 0.8976, "mma8": 0.7, "memory": 0.7785, "tile_start": 300.0,
        "launch_us": 1.0, "grouped16": 0.85, "grouped8": 0.85, "fast": 0.75, "slow": 0.9852,
        "fast_us": 32.74, "slow_us": 35.48, "floor_us": 12.0, "setup_us": 130.5,
        "fabric": 0.01992, "unit_rate": 40280000000.0, "row_bytes": 2000.0,
        "host_us": 9786.0, "exposed": 0.5252, "stack": 1.395, "drift": 0.1594,
    },
    "blackwell": {
        "mma16": 0.4547, "mma8": 0.5709, "memory": 0.7589, "tile_start": 100.0,
        "launch_us": 9.853, "grouped16": 0.79, "grouped8": 0.5524, "fast": 0.75,
        "slow": 1.0, "fast_us": 14.29, "slow_us": 35.0, "floor_us": 16.93,
        "setup_us": 144.2, "fabric": 0.02238, "unit_rate": 55170000000.0,
        "row_bytes": 2012.0, "host_us": 9786.0, "exposed": 0.5252, "stack": 1.196,
        "drift": 0.1594,
    },
    "cdna": {
        "mma16": 0.7, "mma8": 0.7, "memory": 0.85, "tile_start": 300.0, "launch_us": 4.0,
        "grouped16": 0.85, "grouped8": 0.85, "fast": 0.75, "slow": 0.88, "fast_us": 18.0,
        "slow_us": 35.0, "floor_us": 12.0, "setup_us": 100.0, "fabric": 0.02,
        "unit_rate": 40000000000.0, "row_bytes": 2000.0, "host_us": 9786.0,
        "exposed": 0.5252, "stack": 1.395, "drift": 0.1594,
    },
}  # fmt: skip


# Median relative error on the published rows that were held out, by level: the table of
# docs/source/distributed.moe_planner.md.
HELD_OUT_ERROR = {
    "a2a": 0.051,
    "gemm": 0.078,
    "layer_ep": 0.135,
    "infer": 0.027,
    "train": 0.152,
}


# ---- fitting ---------------------------------------------------------------------------


def fit(
    start: Mapping[str, float],
    loss: Callable[[dict[str, float]], float],
    *,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    stiffness: Callable[[str], float] = lambda name: 0.03,
    steps: Sequence[float] = (2, 1.5, 1.25, 1.12, 1.06, 1.03, 1.015),
) -> dict[str, float]:
    """Values with the least loss: a coordinate search in log space.

    The loss is a sum of absolute log errors, which is not smooth, and has a few values;
    hence no gradients. Ties to the start keep what the rows do not determine.

    Args:
        start (dict): start values, positive.
        loss (callable): of a dict of values.

    Keyword Args:
        bounds (dict, optional): lowest and highest value by name.
        stiffness (callable): weight of a value's distance from its start, in logs.
        steps (sequence of float): factors to try, coarse to fine.
    """
    now = dict(start)

    def total() -> float:
        ties = sum(stiffness(n) * abs(math.log(now[n] / start[n])) for n in now)
        return loss(now) + ties

    best = total()
    for step in steps:
        for _ in range(4):
            before = best
            for name in now:
                for factor in (step, 1 / step):
                    old = now[name]
                    low, high = (bounds or {}).get(name, (0.0, math.inf))
                    now[name] = min(high, max(low, old * factor))
                    new = best if now[name] == old else total()
                    if new < best - 1e-9:
                        best = new
                    else:
                        now[name] = old
            if before - best < 1e-4:
                break
    return now


# ---- measuring -------------------------------------------------------------------------


class CpuRow(NamedTuple):
    """A call of the microbenchmark: shape, dtype, pass, layout of the weights."""

    T: int
    D: int
    F: int
    E: int
    K: int
    dtype: str = "bf16"
    pass_: str = "fwd"
    transposed: bool = False


# Many and few rows an expert, both dtypes, wide gradients, weights read once, transposed
# weights, small and large experts with 16 rows: each constant is seen by two rows at least,
# and weights outgrow caches, as they do in models. Together 95 GFLOP: two seconds on the
# slowest CPU that was met.
CPU_ROWS = (
    CpuRow(512, 1024, 512, 8, 4),
    CpuRow(512, 1024, 512, 16, 4),
    CpuRow(256, 1024, 512, 32, 2),
    CpuRow(64, 1024, 512, 32, 4, pass_="fwd+bwd"),
    CpuRow(256, 1536, 256, 64, 4, pass_="fwd+bwd"),
    CpuRow(512, 1024, 256, 64, 8),
    CpuRow(256, 768, 384, 32, 4),
    CpuRow(128, 1024, 128, 32, 4),
    CpuRow(64, 2048, 1024, 8, 2),
    CpuRow(256, 1024, 512, 8, 4, pass_="fwd+bwd"),
    CpuRow(512, 768, 512, 8, 4, pass_="fwd+bwd"),
    CpuRow(256, 1024, 512, 8, 4, "fp32"),
    CpuRow(128, 1024, 512, 8, 4, "fp32", "fwd+bwd"),
    CpuRow(1, 2048, 768, 32, 8),
    CpuRow(8, 2048, 768, 32, 8),
    CpuRow(32, 2048, 768, 32, 4),
    CpuRow(256, 1440, 1440, 8, 2, transposed=True),
    CpuRow(128, 1440, 1440, 8, 2, pass_="fwd+bwd", transposed=True),
)


def cpu_call(row: CpuRow) -> tuple[Callable[[], object], float]:
    """A call of ``F.moe_mlp`` (or, without it, of the same products one by one), and the
    number of experts that have rows."""
    gen = torch.Generator().manual_seed(0)
    T, D, F, E, K = row[:5]
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[row.dtype]
    grad = row.pass_ != "fwd"

    def weight(rows: int, columns: int) -> torch.Tensor:
        if row.transposed:
            w = torch.empty(E, columns, rows, dtype=dtype).transpose(1, 2)
        else:
            w = torch.empty(E, rows, columns, dtype=dtype)
        return w.copy_(torch.randn(rows, columns, generator=gen) * columns**-0.5)

    x = torch.randn(T, D, generator=gen).to(dtype).requires_grad_(grad)
    ids = torch.rand(T, E, generator=gen).topk(K, 1).indices
    weights = torch.full((T, K), 1.0 / K).requires_grad_(grad)
    w_in = weight(2 * F, D).requires_grad_(grad)
    w_out = weight(D, F).requires_grad_(grad)
    leaves = (x, weights, w_in, w_out)

    def forward() -> torch.Tensor:
        if hasattr(torch.nn.functional, "moe_mlp"):
            return torch.nn.functional.moe_mlp(x, ids, weights, w_in, w_out)
        out = x.new_zeros(T, D)
        for e in range(E):
            t, k = (ids == e).nonzero(as_tuple=True)
            gate, up = (x[t] @ w_in[e].T).chunk(2, 1)
            y = (torch.nn.functional.silu(gate) * up) @ w_out[e].T
            out = out.index_add(0, t, (weights[t, k, None] * y).to(dtype))
        return out

    def call() -> None:
        with torch.set_grad_enabled(grad):
            y = forward()
            if grad:
                torch.autograd.grad(y, leaves, torch.ones_like(y))

    return call, float(ids.unique().numel())


def measure_calls(
    calls: Sequence[Callable[[], object]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], object] = lambda: None,
    least: int = 3,
) -> list[float]:
    """Median seconds of every call; calls take turns until ``seconds`` are over, at least
    ``least`` times, so that what disturbs the machine disturbs all alike."""
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    for call in calls:
        call()
    while time.perf_counter() < end or len(times[0]) < least:
        for call, into in zip(calls, times):
            synchronize()
            start = clock()
            call()
            synchronize()
            into.append(clock() - start)
    return [statistics.median(t) for t in times]


def fit_cpu(
    rows: Sequence[CpuRow], hit: Sequence[float], seconds: Sequence[float]
) -> CpuConstants:
    """Constants of a CPU from measured calls.

    The search starts at the best rates among the calls, with few and with many rows of a
    block that reach half of them, with cheap and dear experts, without and with a kernel
    for few rows.
    """

    def loss(thin: float, v: dict[str, float]) -> float:
        c, total = CpuConstants(**v, thin_rows=thin), 0.0
        for row, h, t in zip(rows, hit, seconds):
            got = cpu_experts(
                c, *row[:5], hit=h, dtype=row.dtype, pass_=row.pass_,
                transposed=row.transposed,
            )  # fmt: skip
            total += abs(math.log(got / t))
        return total

    # Chosen below, and those of measure_exchange and measure_links.
    elsewhere = {"thin_rows", "exchange_us", "exchange_grad_us", "copy", "turn"}
    fields = dataclasses.asdict(CpuConstants()).items()
    start: dict[str, float] = {k: v for k, v in fields if k not in elsewhere}
    flops = [
        expert_flops(r.T * r.K, r.D, r.F, pass_=r.pass_) / t
        for r, t in zip(rows, seconds)
    ]
    for name, dtype in (("rate16", "bf16"), ("rate32", "fp32")):
        best = [f for f, r in zip(flops, rows) if r.dtype == dtype]
        start[name] = 1.25 * max(best, default=start[name])
    read = [h * 3 * r.D * r.F * ITEMSIZE[r.dtype] for r, h in zip(rows, hit)]
    start["memory"] = 1.5 * max(n / t for n, t in zip(read, seconds))
    found = []
    for thin, half, expert in itertools.product((0.0, 8.0), (10.0, 40.0), (5.0, 50.0)):
        start |= {"half_rows": half, "half_rows_t": half, "expert_us": expert}
        v = fit(start, functools.partial(loss, thin), stiffness=lambda name: 0.01)
        found.append((loss(thin, v), thin, v))
    _, thin, best = min(found, key=lambda x: x[0])
    return CpuConstants(
        **{k: float(f"{v:.4g}") for k, v in best.items()}, thin_rows=thin
    )


def fit_link(
    points: Sequence[tuple[float, float]], turns: bool = True
) -> tuple[float, float, float]:
    """(start, rate, turn) of :func:`.link_seconds` with the least relative error.

    Args:
        points (sequence of tuple): bytes to others, and their seconds.
        turns (bool): allow a turn; it stays where it at least halves the error.
    """

    def loss(turn: float, v: dict[str, float]) -> float:
        law = functools.partial(link_seconds, v["start"], v["rate"], turn=turn)
        return sum(abs(math.log(law(n) / t)) for n, t in points)

    def best(turn: float) -> tuple[float, float, float, float]:
        start = {"start": 1e-4, "rate": 1e9}
        v = fit(start, functools.partial(loss, turn), stiffness=lambda name: 0.0,
                steps=(10, 3, 2, 1.5, 1.25, 1.12, 1.06, 1.03, 1.015))  # fmt: skip
        return loss(turn, v), v["start"], v["rate"], turn

    plain = best(0.0)
    # One search over all three would not leave the rate that suits no turn.
    found = min(best(2 ** (n / 4)) for n in range(56, 77)) if turns else plain
    return (found if 2 * found[0] <= plain[0] else plain)[1:]


def measure_links(
    group: Any, sizes: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float, float]:
    """Start in seconds, B/s that a rank sends to others, and turn of an all-to-all.

    The backend decides the device: NCCL on CUDA, gloo on CPU. :func:`fit_link` over the
    sizes in bytes; the slowest rank counts.
    """
    import torch.distributed as dist

    ranks = dist.get_world_size(group)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    points = []
    for size in sizes:
        part = max(1, size // ranks)
        x = torch.zeros(part * ranks, dtype=torch.uint8, device=device)
        y = torch.empty_like(x)
        times = []
        rounds = 21 if size < 1 << 20 else 7
        for _ in range(rounds):
            dist.barrier(group)
            synchronize()
            start = clock()
            dist.all_to_all_single(y, x, group=group)
            synchronize()
            times.append(clock() - start)
        slowest = torch.tensor(
            statistics.median(times), dtype=torch.float64, device=device
        )
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        points.append((part * (ranks - 1), slowest.item()))

    return fit_link(points, turns=device == "cpu")


# Tokens of a rank, D, experts of a rank, K: few and many rows, narrow and wide.
EXCHANGES = ((32, 512, 8, 2), (512, 512, 8, 4), (256, 2048, 8, 2), (1024, 768, 8, 4))


def measure_exchange(
    p: Profile,
    group: Any,
    exchanges: Sequence[tuple[int, int, int, int]] = EXCHANGES,
    clock: Callable[[], float] = time.perf_counter,
) -> CpuConstants:
    """``p.cpu`` with the constants of this machine's token switch.

    What a dispatch and its combine take beyond their collectives, whose start and rate
    ``p`` has, without and with their backward. Collective over ``group``; the slowest rank
    counts.
    """
    import torch.distributed as dist
    from torch.distributed._moe.switch import TokenSwitchAllToAll

    if p.cpu is None:
        raise ValueError(
            "measure_exchange: p must be a profile of a CPU, p.cpu is None"
        )
    cpu, ranks = p.cpu, dist.get_world_size(group)
    calls = []
    for tokens, d, local, k in exchanges:
        gen = torch.Generator().manual_seed(dist.get_rank(group))
        switch = TokenSwitchAllToAll(group, local * ranks)
        x = torch.randn(tokens, d, generator=gen).bfloat16().requires_grad_()
        ids = torch.rand(tokens, local * ranks, generator=gen).topk(k, 1).indices
        calls.append((switch, ids, x, torch.ones(tokens, k, requires_grad=True)))
    times: list[list[list[float]]] = [[[], []] for _ in calls]
    # What experts read empties the caches before every part.
    others = torch.zeros(1 << 22)

    def timed(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
        others.add_(1)
        start = clock()
        result = function(*args)
        return clock() - start, result

    def there(switch: Any, ids: Any, x: Any, weights: Any) -> Any:
        routing = switch.create_routing(ids, layout="flat")
        return routing, *switch.dispatch(routing, x, weights)

    for i in range(13):
        for (switch, ids, x, weights), into in zip(calls, times):
            dist.barrier(group)
            first, (routing, rows, scores, _) = timed(there, switch, ids, x, weights)
            second, y = timed(switch.combine, routing, rows)
            grad, ones = torch.ones_like(y), torch.ones_like(scores)
            third, (got,) = timed(torch.autograd.grad, y, rows, grad)
            both = (rows, scores), (x, weights), (got, ones)
            fourth, _ = timed(torch.autograd.grad, *both)
            if i > 1:
                into[0].append(first + second)
                into[1].append(first + second + third + fourth)
    medians = [[statistics.median(t) for t in both] for both in times]
    slowest = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)

    def loss(v: dict[str, float]) -> float:
        q = dataclasses.replace(p, cpu=dataclasses.replace(cpu, **v))
        cases = itertools.product(exchanges, ("fwd", "fwd+bwd"))
        got = (cpu_exchange(q, t, d, k, ranks, pass_=x) for (t, d, _, k), x in cases)
        return sum(
            abs(math.log(g / t)) for g, t in zip(got, slowest.flatten().tolist())
        )

    names = ("exchange_us", "exchange_grad_us", "copy")
    start = {name: getattr(cpu, name) for name in names}
    found = fit(start, loss, stiffness=lambda name: 0.0)
    return dataclasses.replace(cpu, **{k: float(f"{v:.4g}") for k, v in found.items()})


def measure_kernels(p: Profile, device: str, seconds: float = 15.0) -> Constants:
    """Constants of products and of memory, by products and copies on ``device``."""
    small = device == "cpu"
    sizes = (128, 256, 512) if small else (512, 2048, 4096, 8192)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    shapes = [(m, n, n) for m in sizes for n in sizes[1:]]
    calls: list[Callable[[], object]] = []
    for m, n, k in shapes:
        a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        b = torch.randn(k, n, device=device, dtype=torch.bfloat16)
        calls.append(functools.partial(torch.mm, a, b))
    copied = [1 << 12, (1 << 22) if small else (1 << 28)]
    for n in copied:
        calls.append(torch.empty(n, dtype=torch.uint8, device=device).clone)
    measured = measure_calls(calls, seconds, synchronize=synchronize)

    def predicted(c: Constants) -> list[float]:
        q = dataclasses.replace(p, constants=c)
        return [gemm(q, 1, m, n, k) for m, n, k in shapes] + [
            stream(q, 2 * n) for n in copied
        ]

    def loss(v: dict[str, float]) -> float:
        got = predicted(dataclasses.replace(p.constants, **v))
        return sum(abs(math.log(g / t)) for g, t in zip(got, measured))

    names = ("mma16", "memory", "tile_start", "launch_us")
    start = {n: getattr(p.constants, n) for n in names}
    found = fit(start, loss, bounds=None if small else BOUNDS)
    return dataclasses.replace(p.constants, **found)


def calibrate(
    *,
    device: str = "cpu",
    gpu: str | None = None,
    group: Any = None,
    seconds: float = 20.0,
    clock: str = "wall",
) -> Profile:
    """The profile of the machine at hand, in at most about 30 seconds.

    Keyword Args:
        device (str): ``"cpu"`` or ``"cuda"``.
        gpu (str, optional): data sheet to start from, one of :data:`DEVICES`, for CUDA.
        group (ProcessGroup, optional): whose links are measured as well.
        seconds (float): to measure kernels for.
        clock (str): ``"wall"``, or ``"process"``: time of this process, for a machine with
            neighbours and one thread.
    """
    if clock not in ("wall", "process") or device not in ("cpu", "cuda"):
        raise ValueError(
            "calibrate: clock must be wall or process, device cpu or cuda, got "
            f"{clock!r}, {device!r}"
        )
    threads = torch.get_num_threads()
    where = f"{threads} threads, {torch.backends.cpu.get_cpu_capability()}"
    start, rate, turn = 1e-4, 1e9, 0.0
    tick = time.process_time if clock == "process" else time.perf_counter
    if group is not None:
        sizes = [1 << n for n in range(10, 25, 2)]
        start, rate, turn = measure_links(group, sizes, tick)
    if device == "cuda":
        p = profile(gpu or "H100")
        constants = measure_kernels(p, "cuda", seconds)
        if group is not None:
            constants = dataclasses.replace(
                constants, fast=min(0.98, rate / p.device.fast), fast_us=1e6 * start
            )
        return dataclasses.replace(
            p, constants=constants, provenance="measured on this machine"
        )
    calls, hit = zip(*(cpu_call(row) for row in CPU_ROWS))
    measured = measure_calls(calls, seconds, tick)
    cpu = dataclasses.replace(fit_cpu(CPU_ROWS, hit, measured), turn=turn)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sheet = Device(
        "cpu", threads, cpu.rate16, cpu.rate16, cpu.memory, rate, rate, float(memory),
        domain=1 << 20,
    )  # fmt: skip
    ideal = Constants(fast=1.0, slow=1.0, fast_us=1e6 * start, slow_us=1e6 * start,
                      setup_us=0.0, fabric=0.0)  # fmt: skip
    found = f"measured on this machine ({where}, {clock} clock)"
    p = Profile("this CPU", sheet, ideal, found, cpu)
    if group is None:
        return p
    return dataclasses.replace(p, cpu=measure_exchange(p, group, clock=tick))


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(
        description="Measures the profile of this machine."
    )
    parser.add_argument("--output", default="profile.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gpu", help=f"data sheet: {', '.join(DEVICES)}")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--clock", choices=("wall", "process"), default="wall")
    args = parser.parse_args()
    p = calibrate(
        device=args.device, gpu=args.gpu, seconds=args.seconds, clock=args.clock
    )
    command = (
        f"python -m torch.distributed._tools.moe_calibration --device {args.device} "
        f"--seconds {args.seconds:g} --clock {args.clock}"
    )
    with open(args.output, "w") as file:
        json.dump({"command": command, "torch": torch.__version__, "profile": p.to_json()},
                  file, indent=1)  # fmt: skip
    print(f"{args.output}: {p.provenance}")
    for name, value in dataclasses.asdict(p.cpu or p.constants).items():
        print(f"  {name:12} {value:.4g}")


if __name__ == "__main__":
    main()
