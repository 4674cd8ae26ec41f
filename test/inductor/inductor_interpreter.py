"""Runs a wrapper that Inductor wrote for CUDA on CPU tensors, its kernels in Triton's interpreter.

Test-only. TRITON_INTERPRET=1 has to be set before Triton is imported, and code generation needs
it unset: fake_gpu.py writes the source in another process. Extern calls of the wrapper run as
they are, on the CPU tensors; memory planning, launch order, arguments, grids and kernel bodies are
those of the source. What the interpreter cannot show: speed, and races within a program.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from torch.testing._internal.common_utils import TestCase


sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "python_native"))
from triton_interpreter import exact_floats, require_interpreter


# Large blocks: the interpreter's time is the number of programs.
_BLOCKS = {"XBLOCK": 64, "YBLOCK": 64, "ZBLOCK": 1, "R0_BLOCK": 64, "R1_BLOCK": 64}
_BLOCK_OF_ONE_DIMENSION = 1024
# Kernels whose launch carries the grid.
_WITH_GRID = ("user_autotune", "template")
_WITH_NUMELS = ("pointwise", "reduction", "persistent_reduction")


def _as_launched(arg: object) -> object:
    """A launch takes the address of a tensor; the interpreter needs a dtype that Triton has."""
    if isinstance(arg, torch.Tensor) and arg.dtype == torch.float8_e8m0fnu:
        return arg.view(torch.uint8)
    return arg


class _Kernel:
    """What the decorators of triton_heuristics make of a kernel; ``run`` interprets it."""

    def __init__(self, function, heuristic: str, options: dict) -> None:
        if heuristic not in (*_WITH_GRID, *_WITH_NUMELS):
            raise NotImplementedError(f"kernels of triton_heuristics.{heuristic}")
        self.function, self.heuristic = function, heuristic
        self.signature = options["triton_meta"]["signature"]
        self.constants = dict(options["triton_meta"]["constants"])
        declared = options["inductor_meta"].get("declared_constexpr_names", ())
        if heuristic in _WITH_NUMELS:
            declared = [n for n, ty in self.signature.items() if ty == "constexpr"]
        self.free = [name for name in self.signature if name not in declared]

    def _blocks(self) -> dict[str, int]:
        blocks = {
            name: _BLOCKS[name]
            for name, ty in self.signature.items()
            if ty == "constexpr" and name in _BLOCKS
        }
        if list(blocks) == ["XBLOCK"] and self.heuristic == "pointwise":
            blocks["XBLOCK"] = _BLOCK_OF_ONE_DIMENSION
        return blocks

    def run(self, *args, stream=None) -> None:
        constants = dict(self.constants)
        if self.heuristic in _WITH_GRID:
            *args, x, y, z = args
            grid = (x, y, z)
        else:
            blocks = self._blocks()
            constants.update(blocks)
            sizes = dict(zip(self.free, args, strict=True))
            grid = tuple(
                -(-int(sizes[f"{d}numel"]) // blocks[f"{d.upper()}BLOCK"])
                if f"{d.upper()}BLOCK" in blocks
                else 1
                for d in "xyz"
            )
        given = dict(zip(self.free, map(_as_launched, args), strict=True))
        if min(grid) > 0:
            self.function[grid](**{**constants, **given})


class _Heuristics(types.ModuleType):
    """In place of triton_heuristics, when the source of a kernel is imported."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda **options: lambda function: _Kernel(function, name, options)


class _AsyncCompile:
    """In place of Inductor's, when a wrapper is imported; ``folder`` keeps the kernels."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def triton(self, name: str, source: str, device_str: str = "cuda", **options):
        from torch._inductor import runtime

        # triton.jit wants a file with the source; of libdevice the interpreter has Triton's own.
        source = source.replace("triton_helpers.set_driver_to_gpu()", "")
        source = re.sub(r"\blibdevice\.(\w+)\(", r"tl.\1(", source)
        with mock.patch.object(runtime, "triton_heuristics", _Heuristics("heuristics")):
            module = _import_source(name, source, self.folder)
        return getattr(module, name)

    def wait(self, scope: dict) -> None:
        pass


def _import_source(name: str, source: str, folder: pathlib.Path) -> types.ModuleType:
    key = hashlib.sha256(source.encode()).hexdigest()[:16]
    path = folder / f"{name[:60]}_{key}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """What a wrapper asks of the device while it is imported and run."""
    guards = torch._C._dynamo.guards
    with contextlib.ExitStack() as stack:
        for where, name, answer in (
            (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
            (torch.cuda, "_DeviceGuard", lambda device: contextlib.nullcontext()),
            (torch.cuda, "set_device", lambda device: None),
            (guards, "_empty_strided_cuda", guards._empty_strided_cpu),
        ):
            stack.enter_context(mock.patch.object(where, name, answer, create=True))
        stack.enter_context(exact_floats())
        yield


def load(
    source: str, folder: str | pathlib.Path
) -> Callable[[Sequence[object]], list[object]]:
    """The ``call`` of a wrapper.

    Args:
        source: what ``EmittedGraph.source`` of fake_gpu.py says, without cpp_wrapper.
        folder: where the kernels are written; it has to outlive the result.

    Returns:
        A function from the wrapper's arguments, CPU tensors and sizes in the order of
        ``EmittedGraph.inputs``, to the list of its results. ``kernels`` runs one by its name.
    """
    require_interpreter()
    from torch._inductor import async_compile

    folder = pathlib.Path(folder)
    source = source.replace("device(type='cuda', index=0)", "device(type='cpu')")
    head = source.partition("def get_args()")[0]
    with (
        _on_cpu(),
        mock.patch.object(async_compile, "AsyncCompile", lambda: _AsyncCompile(folder)),
    ):
        module = _import_source("wrapper", head, folder)

    def call(args: Sequence[object]) -> list[object]:
        with _on_cpu(), torch.no_grad():
            return list(module.call(list(args)))

    def run(name: str, *args: object) -> None:
        with _on_cpu(), torch.no_grad():
            getattr(module, name).run(*args, stream=0)

    call.kernels = {name: functools.partial(run, name) for name in vars(module)}
    return call


def emitted_by(script: str, folder: str | pathlib.Path) -> dict[str, list[dict]]:
    """The graphs of all problems by name, as fields of ``EmittedGraph``.

    Args:
        script: beside this file; ``python script FILE`` writes them, in a process of its own.
        folder: for the file.
    """
    here, path = pathlib.Path(__file__).resolve().parent, pathlib.Path(folder)
    left_out = ("TRITON_INTERPRET", "PYTHONSAFEPATH")  # a script, with neighbours
    env = {k: v for k, v in os.environ.items() if k not in left_out}
    path /= "emitted.json"
    subprocess.run([sys.executable, here / script, path], env=env, check=True)
    return json.loads(path.read_text())


class EmittedTestCase(TestCase):
    """Has what ``emit`` returns as ``emitted``, and a ``folder`` for its modules."""

    script: str

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.emitted = cls.emit()

    @classmethod
    def emit(cls) -> dict[str, list[dict]]:
        return emitted_by(cls.script, cls.folder.name)


def arguments(inputs: Sequence, tensors: Sequence[torch.Tensor]) -> list[object]:
    """The arguments of a wrapper whose tensors, in their order, are ``tensors``.

    Args:
        inputs: ``EmittedGraph.inputs``. A dynamic size gets the value that it has in ``tensors``.
    """
    rest = iter(tensors)
    found: dict[str, object] = {}
    sizes: dict[str, int] = {}
    for name, shape in inputs:
        if isinstance(shape, str):
            continue
        tensor = found[name] = next(rest)
        for expression, size in zip(shape, tensor.shape, strict=True):
            known = sizes.setdefault(expression, size)
            if known != size or (expression.isdigit() and int(expression) != size):
                raise ValueError(f"{name}: {tuple(tensor.shape)} is not {shape}")
    if next(rest, None) is not None:
        raise ValueError(f"more tensors than the {len(found)} of the wrapper")
    return [
        sizes[shape] if isinstance(shape, str) else found[name]
        for name, shape in inputs
    ]


def run_training(
    forward: dict,
    backward: dict,
    folder: str | pathlib.Path,
    tensors: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor],
) -> tuple[list[object], list[object]]:
    """Runs the two wrappers of a training step.

    Args:
        forward, backward: fields of ``EmittedGraph``.
        folder: as for :func:`load`.
        tensors: inputs of the forward.
        grad_outputs: gradients of its results that the user sees, which come first.

    Returns:
        These results, and the gradients in the order of ``tensors``.
    """
    args = arguments(forward["inputs"], tensors)
    results = load(forward["source"], folder)(args)
    names = [name for name, _ in forward["inputs"]]
    values = dict(zip(names, args, strict=True))
    values.update(zip(forward["outputs"], results, strict=True))
    for i, grad in enumerate(grad_outputs, 1):
        values[f"tangents_{i}"] = grad
    wanted = [values[name] for name, _ in backward["inputs"]]
    grads = load(backward["source"], folder)(wanted)
    is_tensor = [not isinstance(shape, str) for _, shape in forward["inputs"]]
    grads = [g for g, tensor in zip(grads, is_tensor, strict=True) if tensor]
    return results[: len(grad_outputs)], grads
