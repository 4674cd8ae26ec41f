"""AOTInductor for a CUDA device that is not there: a whole package, whose code cannot run here.

Test-only. Triton kernels become cubins and are not launched; the wrapper is compiled and linked
against an empty libcuda.so.1, as no driver is installed.
"""

import contextlib
import os
import pathlib
import subprocess
import types
from collections.abc import Iterator
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


# What cuda_runtime_api.h wants of the compiler's headers, which no wheel of torch brings.
_HOST_DEFINES = """
#pragma once
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __location__(a)
#define __specialization_static
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CALLBACK
"""


def _save_binary(self, *args, stream=None, **kwargs) -> None:
    """In place of CachingAutotuner.run: compiles and keeps what a launch would have kept."""
    from torch._inductor.runtime import triton_heuristics

    config = self.configs[0]
    result = self._precompile_config(config)
    function = result.kernel.src.fn
    constexprs = triton_heuristics.get_constexprs(function)
    call_args, def_args, none_args = result._get_arg_lists(
        function.arg_names, constexprs
    )
    chosen = triton_heuristics.config_to_dict(config)
    signature = result.compile_meta["signature"]
    scratch = getattr(result.kernel.metadata, "global_scratch_size", None)
    launcher = types.SimpleNamespace(
        bin=result.kernel,
        config=config,
        def_args=[a for a in def_args if a not in chosen],
        call_args=[
            a
            for a in call_args
            if signature.get(a, "constexpr") != "constexpr" and a not in none_args
        ],
        global_scratch=scratch or None,
        profile_scratch=None,
    )
    self.save_gpu_kernel(0, launcher)


@contextlib.contextmanager
def _headers_and_driver(folder: pathlib.Path) -> Iterator[None]:
    crt = folder / "include" / "crt"
    crt.mkdir(parents=True)
    (crt / "host_defines.h").write_text(_HOST_DEFINES)
    (crt / "host_config.h").write_text("#pragma once\n")
    library = folder / "lib" / "libcuda.so"
    library.parent.mkdir()
    command = ["gcc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1"]
    subprocess.check_call([*command, "-o", str(library)])
    # The CUDA libraries that torch needs are beside it, with their headers.
    toolkits = sorted(pathlib.Path(torch.__file__).parents[1].glob("nvidia/cu[0-9]*"))
    runtime = next(iter(toolkits[-1].glob("lib/libcudart.so.*")))
    (library.parent / "libcudart.so").symlink_to(runtime)
    paths = {
        "CPATH": [crt.parent, toolkits[-1] / "include", os.environ.get("CPATH")],
        "LIBRARY_PATH": [library.parent, os.environ.get("LIBRARY_PATH")],
    }
    with mock.patch.dict(
        os.environ,
        {k: os.pathsep.join(str(p) for p in v if p) for k, v in paths.items()},
    ):
        yield


@contextlib.contextmanager
def fake_aoti(folder: str | os.PathLike) -> Iterator[None]:
    """Inside, under ``fake_gpu()`` of fake_gpu.py, aoti_compile_and_package makes a package.

    Args:
        folder: an empty folder for headers and libraries that a machine with CUDA has.
    """
    from torch._inductor import graph as inductor_graph
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    tune = PythonWrapperCodegen.generate_and_run_autotune_block

    def tune_on_fakes(self):
        with FakeTensorMode(allow_non_fake_inputs=True):
            return tune(self)

    with contextlib.ExitStack() as stack:
        for where, name, answer in (
            (CachingAutotuner, "run", _save_binary),
            (CachingAutotuner, "precompile", lambda self, *args, **options: None),
            (PythonWrapperCodegen, "generate_and_run_autotune_block", tune_on_fakes),
            (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
            (torch.cuda, "_DeviceGuard", lambda device: contextlib.nullcontext()),
            (torch.cuda, "set_device", lambda device: None),
            (inductor_graph, "defake", lambda x: x),
        ):
            stack.enter_context(mock.patch.object(where, name, answer))
        stack.enter_context(
            torch._inductor.config.patch(
                {
                    "triton.autotune_at_compile_time": True,
                    "aot_inductor.precompile_headers": False,
                }
            )
        )
        stack.enter_context(_headers_and_driver(pathlib.Path(folder)))
        yield
