"""Compiles what a launcher would launch, for GPUs that are not there.

Test-only. Inside :func:`compile_only` every Triton kernel launch is replaced by its
compilation for the given target, with the same specialization on dtypes, strides
and alignments as the real launch; Triton's wheel carries the assemblers. Operands
may be ordinary CPU tensors: nothing reads or writes them.

Each compilation gives a :class:`KernelReport`. What can be judged from it: matrix
instructions, TMA and cp.async, register spills, serialized wgmma, shared memory.
What cannot: speed, occupancy in practice, anything that happens at run time.

An interpreted and a compiled Triton cannot share a process, so TRITON_INTERPRET
must not be set.
"""

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Iterator

import torch


# Shared memory that one block can have, in bytes.
SHARED_MEMORY_LIMIT: dict[str, int] = {
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_103": 227 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}
MATRIX_INSTRUCTION: dict[str, str] = {
    "sm_80": "mma.sync",
    "sm_90": "wgmma",
    "sm_100": "tcgen05",
    "sm_103": "tcgen05",
    "gfx942": "mfma",
    "gfx950": "mfma",
}
# Each has a tile table; sm_103 and gfx950 use those of sm_100 and gfx942.
ARCHITECTURES: tuple[str, ...] = ("sm_80", "sm_90", "sm_100", "gfx942")

_PTX_INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mma.sync": r"\bmma\.sync",
    # Matrix instructions whose operands are float8: `tl.dot` of such operands, and from
    # sm_100 on `tl.dot_scaled`, which older architectures do in bfloat16.
    "fp8": r"(?:wgmma\.mma_async|\bmma\.sync)\S*\.e[45]m[23]\b|tcgen05\.mma\S*f8f6f4",
    "tma": r"cp\.async\.bulk\.tensor",
    "cp.async": r"cp\.async\.c[ag]\.shared",
    "atomic": r"\b(?:atom|red)\.global",
    "assert": r"__assertfail",
}


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """What the compiler says about one kernel and configuration.

    Attributes:
        kernel: name of the Triton function.
        arch: a key of SHARED_MEMORY_LIMIT.
        num_warps: warps of a program.
        num_stages: pipeline depth asked for.
        constants: the compile-time arguments.
        instructions: how often each interesting instruction occurs.
        registers: per thread.
        spill_bytes: stores and loads of spilled registers.
        stack_bytes: stack frame.
        shared_bytes: shared memory of a program.
        warnings: what the assembler complained about.
    """

    kernel: str
    arch: str
    num_warps: int
    num_stages: int
    constants: dict[str, object]
    instructions: dict[str, int]
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    warnings: tuple[str, ...]

    def problems(
        self, *, matrix: bool = True, tma: bool = False, fp8: bool = False
    ) -> list[str]:
        """Why this kernel must not ship; empty if it may.

        Args:
            matrix: it must use the architecture's matrix instruction.
            tma: it must use TMA.
            fp8: its matrix instructions must have float8 operands (NVIDIA).
        """
        found = []
        if fp8 and "fp8" not in self.instructions:
            found.append("no matrix instruction has float8 operands")
        if matrix and MATRIX_INSTRUCTION[self.arch] not in self.instructions:
            found.append(f"no {MATRIX_INSTRUCTION[self.arch]} instruction")
        if self.spill_bytes or self.stack_bytes:
            found.append(
                f"{self.spill_bytes} bytes of spills, {self.stack_bytes} bytes of stack"
            )
        if self.shared_bytes > SHARED_MEMORY_LIMIT[self.arch]:
            found.append(
                f"{self.shared_bytes} bytes of shared memory, the limit is "
                f"{SHARED_MEMORY_LIMIT[self.arch]}"
            )
        if tma and "tma" not in self.instructions:
            found.append("no TMA load")
        nvidia = self.arch.startswith("sm_")
        if matrix and nvidia and not {"tma", "cp.async"} & self.instructions.keys():
            found.append("loads are not asynchronous")
        if "atomic" in self.instructions:
            found.append("a global atomic: the result may depend on the order")
        found.extend(self.warnings)
        return found


def gpu_target(arch: str):
    """Triton's description of an architecture of SHARED_MEMORY_LIMIT."""
    from triton.backends.compiler import GPUTarget

    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, 64)


class _StubDriver:
    """The part of a Triton driver that compilation asks; there is no device."""

    def __init__(self, target) -> None:
        self._target = target

    def get_current_target(self):
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _parse_ptxas(log: str) -> dict[str, object]:
    def number(pattern: str) -> int:
        match = re.search(pattern, log)
        return int(match[1]) if match else 0

    return {
        "registers": number(r"Used (\d+) registers"),
        "spill_bytes": number(r"(\d+) bytes spill stores")
        + number(r"(\d+) bytes spill loads"),
        "stack_bytes": number(r"(\d+) bytes stack frame"),
        "warnings": tuple(re.findall(r"\(C75\d+\)[^\n]*", log)),
    }


def _parse_amdgcn(asm: str) -> dict[str, object]:
    def number(field: str) -> int:
        match = re.search(rf"\.{field}:\s*(\d+)", asm)
        return int(match[1]) if match else 0

    return {
        "registers": number("vgpr_count"),
        "spill_bytes": 4 * number("vgpr_spill_count"),
        "stack_bytes": number("private_segment_fixed_size"),
        "warnings": (),
    }


def report(compiled, kernel: str, arch: str, constants: dict, log: str) -> KernelReport:
    """What the compiler says about ``compiled``.

    Args:
        compiled: what Triton compiled for ``arch`` under ``knobs.nvidia.dump_ptxas_log``.
        kernel: its name.
        constants: its compile-time arguments.
        log: what was printed meanwhile.
    """
    if "ptx" in compiled.asm:
        ptx = compiled.asm["ptx"]
        counts = {n: len(re.findall(p, ptx)) for n, p in _PTX_INSTRUCTIONS.items()}
        resources = _parse_ptxas(log)
    else:
        asm = compiled.asm["amdgcn"]
        counts = {"mfma": len(re.findall(r"v_mfma", asm))}
        resources = _parse_amdgcn(asm)
    return KernelReport(
        kernel=kernel,
        arch=arch,
        num_warps=compiled.metadata.num_warps,
        num_stages=compiled.metadata.num_stages,
        constants=constants,
        instructions={n: c for n, c in counts.items() if c},
        shared_bytes=compiled.metadata.shared,
        **resources,
    )


@contextlib.contextmanager
def compile_only(
    arch: str,
    kernels: tuple = (),
    seen: str | None = None,
    on_launch: Callable[..., None] | None = None,
) -> Iterator[list[KernelReport]]:
    """Launches inside compile for ``arch`` and append to the list that is yielded.

    Args:
        arch: a key of SHARED_MEMORY_LIMIT.
        kernels: JIT functions to compile; launches of others are skipped. Empty
            means all. A launch equal to an earlier one is not reported again.
        seen: a folder, empty at first, that several contexts and processes may share;
            what one of them has compiled no other compiles or reports again.
        on_launch: called for every launch with its report (None where an earlier
            launch was equal), the compiled kernel, and the grid.
    """
    import triton
    from triton.runtime import driver, jit

    if triton.knobs.runtime.interpret:
        raise RuntimeError("compile_only needs a process without TRITON_INTERPRET")
    reports: list[KernelReport] = []
    compiled_functions: list = []
    # amdgcn comes without a log; equal launches have one object.
    amd_reported: set[int] = set()
    original_run = jit.JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        if kernels and self not in kernels:
            return None
        if self not in compiled_functions:
            # The in-memory cache does not know about targets.
            self.device_caches.clear()
            compiled_functions.append(self)
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            compiled = original_run(self, *args, grid=grid, warmup=True, **kwargs)
        fresh = bool(log.getvalue())
        if "amdgcn" in compiled.asm:
            fresh = id(compiled) not in amd_reported
            amd_reported.add(id(compiled))
        said = None
        if fresh:
            names = {p.name for p in self.params if p.is_constexpr}
            constants = {n: v for n, v in kwargs.items() if n in names}
            said = report(compiled, self.__name__, arch, constants, log.getvalue())
            reports.append(said)
        if on_launch is not None:
            on_launch(said, compiled, grid)
        return compiled

    knobs = triton.knobs
    previous = driver._active
    jit.JITFunction.run = run
    driver.set_active(_StubDriver(gpu_target(arch)))
    try:
        with knobs.nvidia.scope(), knobs.compilation.scope(), knobs.cache.scope():
            knobs.nvidia.dump_ptxas_log = True
            # A cached binary comes without its log, so that it is not reported.
            knobs.compilation.always_compile = seen is None
            if seen is not None:
                knobs.cache.dir = seen
            yield reports
    finally:
        jit.JITFunction.run = original_run
        driver._active = previous
        for function in compiled_functions:
            function.device_caches.clear()
