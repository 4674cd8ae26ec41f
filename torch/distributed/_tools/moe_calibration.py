# mypy: allow-untyped-defs
"""Measures the profile of the machine at hand, in at most half a minute.

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
import sys
import time
from typing import Any, TYPE_CHECKING

import torch
from torch.distributed._tools.moe_arguments import ArgumentParser, check
from torch.distributed._tools.moe_cost_model import gemm, stream
from torch.distributed._tools.moe_cpu_model import cpu_exchange
from torch.distributed._tools.moe_fit import CpuRow, fit, fit_cpu, fit_link
from torch.distributed._tools.moe_profile import (
    BOUNDS,
    Constants,
    CpuConstants,
    Device,
    DEVICES,
    Profile,
    profile,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


__all__ = [
    "CPU_ROWS", "calibrate", "cpu_call", "measure_calls", "measure_exchange", "measure_kernels",
    "measure_links",
]  # fmt: skip


# Many and few rows per expert, both dtypes, wide gradients, weights read once, transposed
# weights, small and large experts with 16 rows. At least two rows determine each constant,
# and weights outgrow caches, as in models. Together 95 GFLOP: two seconds on the
# slowest CPU that was tried.
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
    """A call of ``F.moe_mlp`` (or of the same products one by one, if it is missing), and the
    number of experts with rows."""
    gen = torch.Generator().manual_seed(0)
    T, D, F, E, K = row[:5]
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[row.dtype]
    grad = row.pass_ != "fwd"

    def weight(rows: int, columns: int) -> torch.Tensor:
        if row.transposed:
            w = torch.empty(E, columns, rows, dtype=dtype, device="cpu").transpose(1, 2)
        else:
            w = torch.empty(E, rows, columns, dtype=dtype, device="cpu")
        drawn = torch.randn(rows, columns, generator=gen, device="cpu")
        return w.copy_(drawn * columns**-0.5)

    x = torch.randn(T, D, generator=gen, device="cpu").to(dtype).requires_grad_(grad)
    ids = torch.rand(T, E, generator=gen, device="cpu").topk(K, 1).indices
    weights = torch.full((T, K), 1.0 / K, device="cpu").requires_grad_(grad)
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
    """Median seconds of every call. Calls take turns until ``seconds`` are over, at least
    ``least`` times, so that other jobs disturb all alike. A first round only warms up; with
    ``least = 0`` its times count if it took all ``seconds``."""

    def timed(call: Callable[[], object]) -> float:
        synchronize()
        start = clock()
        call()
        synchronize()
        return clock() - start

    end = time.perf_counter() + seconds
    first = [timed(call) for call in calls]
    rounds: list[list[float]] = []
    while time.perf_counter() < end or len(rounds) < least:
        rounds.append([timed(call) for call in calls])
    return [statistics.median(t) for t in zip(*(rounds or [first]))]


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

    The time of a dispatch and its combine beyond their collectives, whose start and rate
    ``p`` has, without and with their backward. Collective over ``group``; the slowest rank
    counts.
    """
    import torch.distributed as dist
    from torch.distributed._moe.all_to_all import TokenSwitchAllToAll

    if p.cpu is None:
        raise ValueError(
            "measure_exchange: p must be a profile of a CPU, p.cpu is None"
        )
    cpu, ranks = p.cpu, dist.get_world_size(group)
    calls = []
    for tokens, d, local, k in exchanges:
        gen = torch.Generator().manual_seed(dist.get_rank(group))
        switch = TokenSwitchAllToAll(group, local * ranks)
        x = (
            torch.randn(tokens, d, generator=gen, device="cpu")
            .bfloat16()
            .requires_grad_()
        )
        scores = torch.rand(tokens, local * ranks, generator=gen, device="cpu")
        ids = scores.topk(k, 1).indices
        weights = torch.ones(tokens, k, device="cpu", requires_grad=True)
        calls.append((switch, ids, x, weights))
    times: list[list[list[float]]] = [[[], []] for _ in calls]
    # The weights that experts read empty the caches before every part.
    others = torch.zeros(1 << 22, device="cpu")

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
        got = (
            cpu_exchange(q, t, d, local * ranks, k, ranks, pass_=x)
            for (t, d, local, k), x in cases
        )
        return sum(
            abs(math.log(g / t)) for g, t in zip(got, slowest.flatten().tolist())
        )

    names = ("exchange_us", "exchange_grad_us", "copy")
    start = {name: getattr(cpu, name) for name in names}
    most = {"copy": (0.0, cpu.memory)}
    found = fit(start, loss, stiffness=lambda name: 0.0, bounds=most)
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
        group (ProcessGroup, optional): group whose links are measured as well.
        seconds (float): time to measure kernels.
        clock (str): ``"wall"``, or ``"process"``: process time, for one thread on a machine with
            other jobs.
    """
    check("calibrate", seconds=seconds)
    if clock not in ("wall", "process") or device not in ("cpu", "cuda"):
        raise ValueError(
            "calibrate: clock must be wall or process, device cpu or cuda, got "
            f"{clock!r}, {device!r}"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("calibrate: device must be here, got 'cuda' without a GPU")
    if gpu is not None and device != "cuda":
        raise ValueError(
            f"calibrate: gpu is of device='cuda', got {gpu!r} with {device!r}"
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
    read = torch.zeros(1 << 24, device="cpu")
    *measured, whole = measure_calls([*calls, read.sum], seconds, tick)
    fitted = fit_cpu(CPU_ROWS, hit, measured, 1.25 * read.nbytes / whole)
    cpu = dataclasses.replace(fitted, turn=turn)
    memory = math.inf  # if it is unknown, as on Windows
    if sys.platform != "win32":
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


def _run(argv: Sequence[str] | None) -> None:
    parser = ArgumentParser(
        prog="python -m torch.distributed._tools.moe_calibration",
        description="Measures the profile of this machine.",
    )
    parser.add_argument("--output", default="profile.json")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gpu", choices=DEVICES, help="data sheet, of CUDA")
    parser.add_number("--seconds", default=20.0)
    parser.add_argument("--clock", choices=("wall", "process"), default="wall")
    args = parser.parse_args(argv)
    options = {n: getattr(args, n) for n in ("device", "gpu", "seconds", "clock")}
    p = calibrate(**options)
    shown = " ".join(f"--{n} {v}" for n, v in options.items() if v is not None)
    data = {
        "command": f"python -m torch.distributed._tools.moe_calibration {shown}",
        "torch": torch.__version__,
        "profile": p.to_json(),
    }
    with open(args.output, "w") as file:
        json.dump(data, file, indent=1)
    print(f"{args.output}: {p.provenance}")
    for name, value in dataclasses.asdict(p.cpu or p.constants).items():
        print(f"  {name:12} {value:.4g}")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        _run(argv)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
