"""Loads the kernels, the float64 reference and the case generator by path.

The machine may have any release of torch from 2.11 on, without this repository installed. A launcher
takes its kernels from its plan; the functions here intercept these launches.
"""

import dataclasses
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.testing._internal


ROOT = pathlib.Path(__file__).resolve().parents[3]
KERNELS = ROOT / "torch/_native/ops/moe/triton_kernels"

# A package of its own: importing torch/_native would register the ops.
_package = types.ModuleType("moe_kernels")
_package.__path__ = [str(KERNELS.parent)]
sys.modules["moe_kernels"] = _package
torch.testing._internal.__path__.insert(0, str(ROOT / "torch/testing/_internal"))

from moe_kernels.triton_kernels import (  # noqa: F401
    autotune,
    configs,
    launch,
    matmuls,
    topk,
)
from moe_kernels.triton_kernels.rows import Rows  # noqa: F401

from torch.testing._internal import (  # noqa: F401
    moe_generators as generators,
    moe_reference as reference,
)


try:  # pull requests of their own
    from moe_kernels.triton_kernels import (  # noqa: F401
        quantize,
        scaled_configs,
        scaled_launch,
        scaled_operands,
    )

    from torch.testing._internal import moe_quantized_reference as quantized
except ImportError as error:
    scaled_launch, NO_SCALED = None, f"{type(error).__name__}: {error}"
else:
    NO_SCALED = ""


def use_quantizer(function: Callable[..., tuple]) -> None:
    """Implements ``aten::_moe_quantize`` in a torch that lacks it."""
    global _quantizer
    _quantizer = function


def native_quantizer(x, recipe, **kwargs) -> tuple:
    """The Triton kernels of the op."""
    native = not x.is_cuda or torch.cuda.get_device_capability() >= (8, 9)
    return quantize.moe_quantize(x, recipe, native=native, **kwargs)


def reference_quantizer(x, recipe, **kwargs) -> tuple:
    """The reference, on a CPU."""
    offs = kwargs.pop("offs", None)
    kwargs["offs"] = None if offs is None else offs.cpu()
    pair = quantized.moe_quantize_reference(x.detach().cpu(), recipe, **kwargs)
    return tuple(t.to(x.device) for t in pair)


_quantizer = native_quantizer
if not NO_SCALED and not hasattr(torch.ops.aten, "_moe_quantize"):
    _library = torch.library.Library("aten", "FRAGMENT")  # as long as the process
    _library.define(
        "_moe_quantize(Tensor self, int recipe, *, Tensor? offs=None, int dim=-1, "
        "ScalarType? dtype=None, int swizzle=0) -> (Tensor, Tensor)"
    )
    _call = lambda *args, **kwargs: _quantizer(*args, **kwargs)
    _library.impl("_moe_quantize", _call, "CompositeExplicitAutograd")


def exact_interpreter():
    """The module that makes Triton's interpreter compute as hardware does, and checks accesses."""
    folder = str(ROOT / "test/python_native")
    if folder not in sys.path:
        sys.path.append(folder)
    import triton_interpreter

    return triton_interpreter


class Launch(NamedTuple):
    """One launch of a kernel; a call repeats it."""

    kernel: Any
    grid: tuple
    args: tuple
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return dict(zip(self.kernel.arg_names, self.args)) | self.kwargs

    def __call__(self) -> object:
        return self.kernel[self.grid](*self.args, **self.kwargs)


Action = Callable[[Launch], object]


class _Hooked:
    def __init__(self, kernel: Any, action: Action) -> None:
        self._kernel, self._action = kernel, action

    def __getitem__(self, grid: tuple):
        def launch_with(*args, **kwargs) -> object:
            return self._action(Launch(self._kernel, grid, args, kwargs))

        return launch_with


def hook(action: Action) -> Callable[[Any], Any]:
    """A ``kernel`` argument of launchers that turns every launch into ``action(launch)``."""
    return lambda kernel: _Hooked(kernel, action)


def hooked(plan: launch.LaunchPlan, action: Action) -> launch.LaunchPlan:
    return dataclasses.replace(plan, kernel=hook(action))


def recording(plan: launch.LaunchPlan, launches: list[Launch]) -> launch.LaunchPlan:
    """``plan`` whose launches run and are appended to ``launches``, which keeps their tensors alive."""

    def run(launched: Launch) -> object:
        launches.append(launched)
        return launched()

    return hooked(plan, run)


def graph_replay(function: Callable, device: torch.device) -> Callable[[], object]:
    """``function`` as a replayed CUDA graph, without launch gaps; itself on CPU."""
    if device.type != "cuda":
        return function
    # Once on another stream, so that allocations of a first call are not captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = function()

    def replay() -> object:
        graph.replay()
        return held

    return replay
