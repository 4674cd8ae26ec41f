"""The kernels, the float64 reference and the case generator, from the files beside this one.

The machine may have any release of torch from 2.11 on, without this repository installed.
"""

import pathlib
import sys
import types
from collections.abc import Callable

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


def exact_interpreter():
    """The context in which Triton's interpreter computes bfloat16 as hardware does."""
    sys.path.append(str(ROOT / "test/python_native"))
    from triton_interpreter import exact_floats

    return exact_floats()


def graph_replay(function: Callable, device: torch.device) -> Callable[[], object]:
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
