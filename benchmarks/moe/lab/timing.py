"""Clocks, interleaving, and the two ceilings of the card."""

import statistics
import time
from collections.abc import Callable

import torch


class Budget:
    """Seconds that are left, for choosing how often to repeat.

    Args:
        seconds: from now.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()

    def rounds(self, ms_per_round: float, rows_left: int, wanted: int) -> int:
        """Repetitions for one of ``rows_left`` rows: ``wanted`` if time allows, 3 at least."""
        share = max(self.left(), 0) / max(rows_left, 1)
        affordable = int(1e3 * share / max(ms_per_round, 1e-3))
        return max(min(3, wanted), min(wanted, affordable))


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call."""
    if device.type != "cuda":
        begin = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - begin)
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def interleaved(
    functions: dict[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    warmup: int = 1,
) -> dict[str, list[float]]:
    """Milliseconds of each function, ``rounds`` of each; a round calls all of them once."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(warmup + rounds):
        for name, function in functions.items():
            ms = timed(function, device)
            if i >= warmup:
                times[name].append(ms)
    return times


def median_and_spread(times: list[float]) -> tuple[float, float]:
    """The median, and half the distance between the quartiles."""
    ordered = sorted(times)
    n = len(ordered)
    return statistics.median(ordered), (ordered[3 * (n - 1) // 4] - ordered[n // 4]) / 2


def graph_replay(
    function: Callable[[], object], device: torch.device
) -> Callable[[], object]:
    """``function`` as a replayed CUDA graph, which leaves out launch gaps; itself on CPU."""
    if device.type != "cuda":
        return function
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = function()

    def replay() -> object:
        graph.replay()
        return held

    return replay


def measure_ceilings(device: torch.device, rehearse: bool) -> tuple[float, float]:
    """Copy bandwidth in bytes/s (read plus written) and dense bfloat16 flops/s."""
    size, n = (1 << 20, 128) if rehearse else (1 << 31, 8192)
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, n, n, device=device, dtype=torch.bfloat16).unbind()
    times = interleaved(
        {"copy": lambda: target.copy_(source), "mm": lambda: a @ b}, device, 20, 3
    )
    copy, mm = (statistics.median(times[name]) for name in ("copy", "mm"))
    return 2 * size / copy * 1e3, 2 * n**3 / mm * 1e3
