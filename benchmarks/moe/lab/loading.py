"""Loads the kernels, the float64 reference and the case generator by path.

The machine may have any release of torch from 2.11 on, without this repository
installed; only the files beside this one are needed.
"""

import importlib.util
import pathlib
import sys
from collections.abc import Callable

import torch


ROOT = pathlib.Path(__file__).resolve().parents[3]
KERNELS = ROOT / "torch/_native/ops/moe/triton_kernels"
_TESTING = ROOT / "torch/testing/_internal"


def load_by_path(name: str, path: pathlib.Path):
    """Imports a package or a module as ``name``, once."""
    if name in sys.modules:
        return sys.modules[name]
    package = path.is_dir()
    file = path / "__init__.py" if package else path
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(path)] if package else None
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _testing(name: str):
    # Under the upstream name: the generator imports the reference by it.
    return load_by_path(f"torch.testing._internal.{name}", _TESTING / f"{name}.py")


load_by_path("moe_triton_kernels", KERNELS)
from moe_triton_kernels import autotune, configs, launch, topk  # noqa: E402


reference = _testing("moe_reference")
generators = _testing("moe_generators")


def exact_interpreter():
    """The context in which Triton's interpreter computes bfloat16 as hardware does."""
    path = ROOT / "test/python_native/triton_interpreter.py"
    return load_by_path("triton_interpreter", path).exact_floats()


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


__all__ = [
    "autotune",
    "configs",
    "exact_interpreter",
    "generators",
    "graph_replay",
    "KERNELS",
    "launch",
    "load_by_path",
    "reference",
    "ROOT",
    "topk",
]
