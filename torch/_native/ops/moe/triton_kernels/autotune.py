"""Optional choice of the tile configuration at run time, by measuring.

Off unless the environment variable TORCH_MOE_TRITON_AUTOTUNE is 1 when the first
kernel runs; then the first call of every problem times the configurations that fit it,
in the order of the table, and later calls reuse the fastest.

Measuring needs hardly more memory than the call itself. A candidate runs on the
operands and writes the outputs of the call, and all kernels overwrite their
outputs. The few tensors that depend on the configuration (tile lists, dS partials) are
freed before the next candidate runs. A candidate that does not fit in memory or in shared
memory is skipped. While a CUDA graph is captured nothing is measured.

The cost is host syncs at the first call of each problem. d(topk_weights)
may differ in the last bit between processes that chose differently; results of the
forward are the same in every configuration (configs.py).
"""

import os
import statistics
from collections.abc import Callable, Hashable, Sequence

import torch

from .configs import TileConfig


ENVIRONMENT_VARIABLE = "TORCH_MOE_TRITON_AUTOTUNE"
# Problems remembered; past it the choices are forgotten and measured again.
MAX_PROBLEMS = 1024
_ROUNDS = 5
# About a millisecond: several launches by the slowest host.
_QUEUE_CYCLES = 2_000_000


def is_enabled() -> bool:
    """Whether the environment asks for measuring."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "0") == "1"


def measure_ms(function: Callable[[], object]) -> float:
    """Median milliseconds of ``function`` on the current CUDA stream, after one call.

    The device is kept busy until the host has queued the call and both events, so that
    what is measured is the device and not the launch.
    """
    function()
    times = []
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_QUEUE_CYCLES)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _resource_errors() -> tuple[type[Exception], ...]:
    from triton.runtime.errors import OutOfResources

    return (OutOfResources, torch.OutOfMemoryError)


class Autotuner:
    """Remembers the fastest configuration of every problem.

    Args:
        measure: milliseconds of a call.
        is_capturing: whether measuring is impossible now.
    """

    def __init__(
        self,
        measure: Callable[[Callable[[], object]], float] = measure_ms,
        is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        self._measure = measure
        self._is_capturing = is_capturing
        self._chosen: dict[Hashable, TileConfig] = {}

    def choose(
        self,
        problem: Hashable,
        configs: Sequence[TileConfig],
        launch: Callable[[TileConfig], object],
    ) -> TileConfig:
        """The fastest of ``configs`` for ``problem``, measured if it is new.

        Args:
            problem: everything the choice may depend on.
            configs: candidates, at least one; the first is used where nothing can be
                measured.
            launch: runs the kernel of this call with a configuration.
        """
        if problem in self._chosen:
            return self._chosen[problem]
        if len(configs) == 1 or self._is_capturing():
            return configs[0]
        best, best_ms = configs[0], float("inf")
        for config in configs:
            try:
                ms = self._measure(lambda config=config: launch(config))
            except _resource_errors():
                continue
            if ms < best_ms:
                best, best_ms = config, ms
        if len(self._chosen) >= MAX_PROBLEMS:
            self.clear()
        self._chosen[problem] = best
        return best

    def clear(self) -> None:
        """Forgets every choice."""
        self._chosen.clear()
