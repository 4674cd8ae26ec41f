"""Inductor's code generation for a CUDA device that is not there.

Test-only, and nothing can run on the device: tensors are fake, autotuning takes the choice that
the test asks for, and compilation stops when the source of a graph is written. What comes out is
what a machine with the device would get, to be counted, compiled (triton_static_gate.py) or run
in Triton's interpreter (inductor_interpreter.py).

Import it before torch, which asks for its device hooks once:

    import fake_gpu

    fake_gpu.require()  # first
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with fake_gpu.fake_gpu("sm_90"), FakeTensorMode():
        x = torch.empty(64, 32, device="cuda")
        (graph,) = fake_gpu.emitted(torch.compile(torch.relu), x)
    print(graph.source)
"""

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Container, Iterator
from unittest import mock


_HERE = pathlib.Path(__file__).resolve().parent


def _build_hooks(root: pathlib.Path) -> pathlib.Path:
    """The shared library of fake_gpu_hooks.cpp for the torch in ``root``."""
    source = _HERE / "fake_gpu_hooks.cpp"
    # Another torch in the same folder has other virtual functions.
    built_for = os.fsencode(root) + (root / "version.py").read_bytes()
    key = hashlib.sha256(source.read_bytes() + built_for).hexdigest()[:16]
    folder = pathlib.Path(tempfile.gettempdir()) / f"fake_gpu_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"libfake_gpu_hooks_{key}.so"
    if not library.exists():
        # Another process may be at it as well.
        partial = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20"]
        command += [f"-I{root / 'include'}", str(source), "-o", str(partial)]
        command += [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        subprocess.check_call([*command, f"-Wl,-rpath,{root / 'lib'}"])
        partial.rename(library)
    return library


def require() -> None:
    """Says in a test file that this module comes before torch; the import has checked it."""


def _pretend_device() -> None:
    if "torch" in sys.modules:
        raise RuntimeError("import fake_gpu before torch, which keeps its device hooks")
    # Code generation needs Triton's compiler, not its interpreter.
    os.environ.pop("TRITON_INTERPRET", None)
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    root = pathlib.Path(spec.origin).parent
    library = _build_hooks(root)
    ctypes.CDLL(str(root / "lib" / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    hooks = ctypes.CDLL(str(library))
    hooks.install_fake_guard()


_pretend_device()

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402


sys.path.append(str(_HERE.parent / "python_native"))
from triton_static_gate import (  # noqa: E402
    gpu_target,
    KernelReport,
    report,
    SHARED_MEMORY_LIMIT,
)


_MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}

_CONFIG = {
    # One process, no cache, and nothing that a device would have to run.
    "compile_threads": 1,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "autotune_local_cache": False,
    "autotune_remote_cache": False,
    "use_static_triton_launcher": False,
    "benchmark_template_fusion": False,
    "joint_graph_constant_folding": False,
    # A device would decide by times whether to pad sizes that are no multiple of 8.
    "shape_padding": False,
}


class _Driver:
    """Triton's driver, as far as code generation asks for it."""

    def __init__(self, arch: str) -> None:
        self._target = gpu_target(arch)

    def get_current_target(self):
        return self._target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device) -> None:
        pass

    def get_current_stream(self, device=None) -> int:
        return 0

    def get_device_capability(self, device=0) -> tuple[int, int]:
        return divmod(self._target.arch, 10)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self):
        return torch.cuda

    def get_benchmarker(self):
        return lambda fn, quantiles=None, **options: [1.0, 1.0, 1.0]

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def _properties(arch: str) -> types.SimpleNamespace:
    major, minor = divmod(int(arch.removeprefix("sm_")), 10)
    return types.SimpleNamespace(
        name=f"fake {arch}",
        major=major,
        minor=minor,
        multi_processor_count=_MULTIPROCESSORS[arch],
        total_memory=80 << 30,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        gcnArchName=arch,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=SHARED_MEMORY_LIMIT[arch],
        shared_memory_per_multiprocessor=SHARED_MEMORY_LIMIT[arch] + 1024,
        L2_cache_size=50 << 20,
        is_integrated=False,
        is_multi_gpu_board=False,
        clock_rate=1980000,
        memory_clock_rate=2619000,
        memory_bus_width=5120,
    )


def _device_questions(properties: types.SimpleNamespace) -> dict[str, Callable]:
    """What torch.cuda answers."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (
            properties.major,
            properties.minor,
        ),
        "get_device_name": lambda device=None: properties.name,
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: None,
        "is_bf16_supported": lambda *args, **options: True,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }


def _patch_questions(stack: contextlib.ExitStack, properties) -> None:
    import torch._dynamo.device_interface as interface

    questions = _device_questions(properties)
    for name, answer in questions.items():
        stack.enter_context(mock.patch.object(torch.cuda, name, answer))
    stack.enter_context(
        mock.patch.object(
            torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False
        )
    )
    # A scalar tensor on a fake device is not made on the real one first.
    stack.enter_context(
        mock.patch.object(
            FakeTensorMode, "avoid_device_init", property(lambda self: True)
        )
    )
    interface.get_interface_for_device("cuda")  # registers the interfaces
    for table, answer in (
        (interface.caching_worker_device_properties, [properties]),
        (interface.caching_worker_current_devices, 0),
    ):
        stack.enter_context(mock.patch.dict(table, {"cuda": answer}))
    # The interface kept torch.cuda's functions when its class was made.
    answers = {
        **{
            name: questions[f"_{name}" if f"_{name}" in questions else name]
            for name in (
                "exchange_device",
                "maybe_exchange_device",
                "current_device",
                "device_count",
                "get_device_properties",
                "synchronize",
                "is_bf16_supported",
            )
        },
        "get_raw_stream": lambda device: 0,
        "get_compute_capability": lambda device=None: (
            10 * properties.major + properties.minor
        ),
    }
    for name, answer in answers.items():
        stack.enter_context(
            mock.patch.object(interface.CudaInterface, name, staticmethod(answer))
        )


def _patch_memory_of_answers(stack: contextlib.ExitStack, arch: str) -> None:
    """Empties Inductor's caches of what a device answered, on entry and on exit."""
    import torch._inductor.codecache as codecache
    import torch._inductor.kernel.mm_grouped as mm_grouped
    import torch._inductor.runtime.hints as hints
    import torch._inductor.utils as inductor_utils
    import torch.utils._triton as triton_utils

    modules = [triton_utils, inductor_utils, hints, codecache]
    modules += [m for n, m in sys.modules.items() if n.startswith("torch._native.")]
    caches = [
        f
        for module in modules
        for f in vars(module).values()
        if isinstance(f, functools._lru_cache_wrapper)
    ]
    caches += [hints.DeviceProperties.create, codecache.CacheBase.get_system]

    def forget() -> None:
        for cache in caches:
            if hasattr(cache, "cache_clear"):
                cache.cache_clear()

    forget()
    stack.callback(forget)
    for module in (inductor_utils, mm_grouped):
        stack.enter_context(
            mock.patch.object(
                module, "get_gpu_shared_memory", lambda: SHARED_MEMORY_LIMIT[arch]
            )
        )


def _patch_autotuning(stack: contextlib.ExitStack, pick: Callable | None) -> None:
    from torch._inductor.select_algorithm import (
        AlgorithmSelectorCache,
        TritonTemplateCaller,
    )

    def first_template(choices):
        templates = [c for c in choices if isinstance(c, TritonTemplateCaller)]
        return (templates or choices)[0]

    def make_benchmark_fn(cls, choices, *args, **options):
        def benchmark(choices):
            choices = list(choices)
            winner = (pick or first_template)(choices)
            return {c: 0.5 if c is winner else 1.0 for c in choices}

        return benchmark

    stack.enter_context(
        mock.patch.object(
            AlgorithmSelectorCache, "make_benchmark_fn", classmethod(make_benchmark_fn)
        )
    )
    stack.enter_context(
        mock.patch.object(
            AlgorithmSelectorCache,
            "make_precompile_fn",
            lambda self, *args, **options: dict,
        )
    )


@contextlib.contextmanager
def fake_gpu(arch: str = "sm_90", pick: Callable | None = None) -> Iterator[None]:
    """Inside, torch.compile generates code for one device of ``arch``.

    Args:
        arch: "sm_80", "sm_90" or "sm_100".
        pick: takes the choices of an autotuning and returns the one that is to win; the first
            template if None.
    """
    from triton.runtime import driver

    import torch._inductor.runtime.triton_helpers as triton_helpers

    if arch not in _MULTIPROCESSORS:
        raise ValueError(f"arch is {arch!r}, not one of {tuple(_MULTIPROCESSORS)}")
    with contextlib.ExitStack() as stack:
        _patch_questions(stack, _properties(arch))
        _patch_memory_of_answers(stack, arch)
        _patch_autotuning(stack, pick)
        stack.callback(setattr, driver, "_active", driver._active)
        driver.set_active(_Driver(arch))
        stack.enter_context(
            mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None)
        )
        stack.enter_context(torch._inductor.config.patch(**_CONFIG))
        stack.enter_context(
            torch._functorch.config.patch(
                enable_autograd_cache=False, force_non_lazy_backward_lowering=True
            )
        )
        yield


@dataclasses.dataclass(frozen=True)
class EmittedGraph:
    """One graph as Inductor wrote it.

    Attributes:
        source: of the wrapper with its kernels; with cpp_wrapper, C++ and then the kernels.
        inputs: (name, sizes) of the arguments of the wrapper's ``call``: a tensor's sizes as
            expressions, or for a size the expression that it is. What a backward gets has the
            name that it has as an input or output of the forward.
        outputs: names of its results; None for a constant.
    """

    source: str
    inputs: tuple[tuple[str, tuple[str, ...] | str], ...]
    outputs: tuple[str | None, ...]

    @property
    def kernels(self) -> list[str]:
        """Names of the Triton kernels, each once."""
        return re.findall(r"async_compile\.triton\('(\w+)'", self.source)

    @property
    def launches(self) -> list[str]:
        """Names of the Triton kernels in the order of their launches."""
        return re.findall(r"^\s+(\w+)\.run\(", self.source, re.MULTILINE)

    @property
    def launched(self) -> list[str]:
        """``launches`` without the numbers that tell kernels of one name apart."""
        return [re.sub(r"_\d+$", "", name) for name in self.launches]

    @property
    def extern_calls(self) -> list[str]:
        """What is called besides Triton kernels, in order."""
        found = re.findall(
            r"(torch\.ops\.[\w.]+|extern_kernels\.\w+|aoti_torch_\w+)\(", self.source
        )
        bookkeeping = (
            r"delete|new_|get_|assign|empty|clone|reinterpret|set_|device|dtype|item"
        )
        return [f for f in found if not re.search(bookkeeping, f)]


class _Stop(Exception):
    """The source is written; there is no device to go on with."""


def emitted(function: Callable, *args, **kwargs) -> list[EmittedGraph]:
    """The graphs that ``function(*args, **kwargs)`` compiles, none of them imported or run.

    Args:
        function: made by torch.compile, with arguments on a fake device. If one requires a
            gradient, the backward's graph follows the forward's.
    """
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import TensorBox

    graphs: list[EmittedGraph] = []

    def sizes_of(value) -> tuple[str, ...] | str:
        if isinstance(value, TensorBox):
            return tuple(map(str, value.get_size()))
        return str(value)  # a size, or a process group

    def stop(self):
        wrapper, kernels = (
            self.codegen_with_cpp_wrapper() if self.cpp_wrapper else self.codegen()
        )
        source = wrapper.value + (kernels.value if kernels else "")
        (results,) = self.module.graph.output_node().args
        outputs = tuple(getattr(result, "name", None) for result in results)
        inputs = tuple((n, sizes_of(v)) for n, v in self.graph_inputs.items())
        graphs.append(EmittedGraph(source, inputs, outputs))

        def call(*args, **kwargs):
            raise _Stop

        return types.SimpleNamespace(__file__=None, call=call)

    torch._dynamo.reset()
    with mock.patch.object(GraphLowering, "compile_to_module", stop):
        try:
            function(*args, **kwargs)
        except _Stop:
            pass
    return graphs


def emitted_like(
    function: Callable,
    tensors: dict[str, torch.Tensor],
    arch: str = "sm_90",
    *,
    gradients: Container[str] = (),
    dynamic: Container[str] = (),
) -> list[EmittedGraph]:
    """What ``function(**tensors)`` compiles on ``arch``, given fake tensors of these shapes and strides.

    Args:
        gradients: names of the tensors that require one; without any, nothing is recorded.
        dynamic: names of the tensors whose first dimension is.
    """
    with (
        fake_gpu(arch),
        FakeTensorMode(),
        torch.set_grad_enabled(bool(gradients)),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        fakes = {}
        for name, x in tensors.items():
            fake = torch.empty_strided(
                x.shape, x.stride(), dtype=x.dtype, device="cuda"
            )
            fakes[name] = fake.requires_grad_(name in gradients)
            if name in dynamic:
                torch._dynamo.mark_dynamic(fake, 0)
        return emitted(torch.compile(function, fullgraph=True), **fakes)


def write_graphs(path: str, graphs: dict[str, list[EmittedGraph]]) -> None:
    """Writes, as JSON, what inductor_interpreter.py reads in another process."""
    found = {name: [*map(dataclasses.asdict, g)] for name, g in graphs.items()}
    pathlib.Path(path).write_text(json.dumps(found))


def compiled(graph: EmittedGraph, arch: str) -> list[KernelReport]:
    """Compiles every Triton kernel of ``graph``, in its first configuration, as its launch would.

    Args:
        graph: emitted under ``fake_gpu(arch)``.
        arch: as there.
    """
    import triton

    found = re.findall(
        r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str",
        graph.source,
        re.DOTALL,
    )
    reports = []
    with (
        fake_gpu(arch),
        tempfile.TemporaryDirectory() as folder,
        triton.knobs.nvidia.scope(),
        triton.knobs.compilation.scope(),
    ):
        triton.knobs.nvidia.dump_ptxas_log = True
        # A cached binary comes without its log.
        triton.knobs.compilation.always_compile = True
        for i, (name, source) in enumerate(found):
            path = pathlib.Path(folder) / f"emitted_kernel_{i}.py"
            path.write_text(source)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            kernel = getattr(module, name)
            log = io.StringIO()
            with contextlib.redirect_stdout(log):
                binary = kernel._precompile_config(kernel.configs[0]).kernel
            constants = kernel.triton_meta["constants"]
            reports.append(report(binary, name, arch, constants, log.getvalue()))
    return reports
