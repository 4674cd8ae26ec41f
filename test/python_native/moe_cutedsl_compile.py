"""Compiles the matmuls of the MoE ops' CuTe backend for a GPU that is not there.

Test-only. The functions of torch/_native/ops/moe/cutedsl_kernels/gemms.py are called on CPU
tensors: QuACK compiles, writes the object to its cache, and fails where it would launch. What
is in the object is then read with the tools of Triton's wheel. For a process of its own:

    python moe_cutedsl_compile.py --arch 90 --packages FOLDER [--only PART] [--keep FOLDER]

FOLDER holds nvidia-cutlass-dsl and what it needs, as ``pip install --target`` leaves them
(its name must be site-packages). One JSON row per kernel goes to stdout.
"""

import argparse
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator


MACHINE_CUDA = 190  # e_machine of a cubin
MATRIX_OPS = {"90": "HGMMA", "100": "UTCHMMA", "103": "UTCHMMA"}
# Gate and up of a layer as SonicMoE's smallest, and rows of two experts per token.
T, D, F, E, K = 4096, 1536, 256, 8, 2
LONG = 1024  # terms, of a contraction that gemms.py does not call short


def cubins(path: pathlib.Path) -> Iterator[bytes]:
    """The device ELF files inside of a host object."""
    data = path.read_bytes()
    start = data.find(b"\x7fELF", 1)
    while start >= 0:
        (machine,) = struct.unpack_from("<H", data, start + 18)
        if machine == MACHINE_CUDA:
            phoff, shoff = struct.unpack_from("<QQ", data, start + 32)
            phsize, phnum, shsize, shnum = struct.unpack_from("<4H", data, start + 54)
            size = max(shoff + shsize * shnum, phoff + phsize * phnum)
            yield data[start : start + size]
        start = data.find(b"\x7fELF", start + 4)


def describe(cubin: bytes, arch: str) -> dict[str, object]:
    """Registers, spills and matrix instructions of a cubin."""
    import triton

    tools = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def run(*command: object) -> str:
            command = (*map(str, command), file.name)
            return subprocess.run(command, capture_output=True, text=True).stdout

        usage = run(tools / "cuobjdump", "--dump-resource-usage")
        listing = run(tools / "nvdisasm", "-c")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    registers, stack, _, local = map(int, found.groups()) if found else (0, -1, 0, -1)
    shape = re.search(MATRIX_OPS[arch] + r"\.(\d+x\d+x\d+)", listing)
    return {
        "registers": registers,
        "spill_bytes": stack + local,
        "mma": MATRIX_OPS[arch] + (" " + shape[1] if shape else ""),
        "matrix_instructions": len(re.findall(MATRIX_OPS[arch], listing)),
        "local_instructions": len(re.findall(r"\b(?:LDL|STL)\b", listing)),
    }


def calls() -> dict[str, Callable[[], object]]:
    """By name, every kernel that the backend can ask for."""
    import torch
    from torch._native.ops.moe.cutedsl_kernels import gemms
    from torch._native.ops.moe.triton_kernels.experts import Activation

    def int32(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32)

    R, cu, tokens, score = T * K, int32(E + 1), int32(T * K), torch.empty(T * K)
    found: dict[str, Callable[[], object]] = {}

    def add(kind: str, act: Activation, dtype: torch.dtype, index=tokens) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype)

        g = 2 if act.gated else 1
        x = empty(T if index is not None else R, D)
        h, a, y = empty(R, g * F), empty(R, F), empty(R, D)
        long_a, long_w = empty(R, LONG), empty(E, D, LONG)
        w_in, w_out = empty(E, g * F, D), empty(E, D, F)
        layout = " interleaved" if act.gate_interleaved else ""
        rest = "" if index is not None else ", no gather"
        name = f"{kind} {act.activation}{layout} {str(dtype).split('.')[1]}{rest}"
        found[name] = {
            "up": lambda: gemms.up(x, index, w_in, cu, act, h, a),
            "up, inference": lambda: gemms.up(x, index, w_in, cu, act, None, a),
            "down": lambda: gemms.down(a, w_out, cu, score, y),
            "down, no weights": lambda: gemms.down(a, w_out, cu, None, y),
            "down, long": lambda: gemms.down(long_a, long_w, cu, score, y),
            "down, no weights, long": lambda: gemms.down(long_a, long_w, cu, None, y),
            "act_backward": lambda: gemms.act_backward(
                x, index, w_out, cu, h, score, act, torch.empty_like(h), a
            ),
            "input_grad": lambda: gemms.mm(h, w_in, cu, y),
            "input_grad, long": lambda: gemms.mm(long_a, empty(E, LONG, D), cu, y),
            "dw_in": lambda: gemms.weight_grad(x, index, h, cu, w_in.mT),
            "dw_out": lambda: gemms.weight_grad(x, index, a, cu, w_out),
        }[kind]

    swiglu = Activation()
    for dtype in (torch.bfloat16, torch.float16):
        for kind in ("up", "down", "down, no weights", "input_grad", "dw_in", "dw_out"):
            add(kind, swiglu, dtype)
        add("act_backward", Activation("swiglu", True), dtype)
        configs = gemms.CONFIGS[gemms._capacity(score)]
        if configs["mm"] != configs["mm_short"]:
            for kind in ("down, long", "down, no weights, long", "input_grad, long"):
                add(kind, swiglu, dtype)
    add("up, inference", swiglu, torch.bfloat16)
    for kind in ("up", "dw_in", "dw_out"):
        add(kind, swiglu, torch.bfloat16, None)
    for name in gemms.ACTIVATIONS:
        act = Activation(name)
        if act.gated:
            if name != "swiglu":
                add("up", act, torch.bfloat16)
                add("act_backward", Activation(name, True), torch.bfloat16)
            add("up", Activation(name, True), torch.bfloat16)
        else:
            add("up", act, torch.bfloat16)
            add("act_backward", act, torch.bfloat16)
    add("act_backward", Activation("swiglu", True), torch.bfloat16, None)
    return found


def compile_rows(arch: str, only: str, keep: str | None) -> Iterator[dict[str, object]]:
    """Compiles, and describes what came out."""
    from torch._vendor.quack.cache import jit

    cache = pathlib.Path(jit.get_cache_path())
    for name, call in calls().items():
        if only not in name:
            continue
        before, error = set(cache.rglob("*.o")), None
        try:
            call()
        except Exception as e:  # at the launch, or earlier
            error = e
        fresh = sorted(set(cache.rglob("*.o")) - before)
        if not fresh:
            # Or it would be one that an earlier call had compiled.
            yield {"kernel": name, "arch": arch, "problem": f"not compiled: {error}"}
        for path in fresh:
            for cubin in cubins(path):
                row = {"kernel": name, "arch": arch, **describe(cubin, arch)}
                if keep:
                    row["cubin"] = re.sub(r"\W+", "_", f"{name}_{arch}") + ".cubin"
                    pathlib.Path(keep, row["cubin"]).write_bytes(cubin)
                yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", choices=sorted(MATRIX_OPS), required=True)
    parser.add_argument("--packages", type=pathlib.Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=pathlib.Path)
    options = parser.parse_args()
    os.environ.update(
        CUDA_VISIBLE_DEVICES="",
        QUACK_ARCH=options.arch,
        CUTE_DSL_ARCH=f"sm_{options.arch}a",
    )
    if options.packages:
        folder = options.packages.resolve()
        sys.path[:0] = [str(folder), str(folder / "nvidia_cutlass_dsl/dsl_packages")]
    with tempfile.TemporaryDirectory(prefix="moe_cutedsl_") as cache:
        tempfile.tempdir = cache  # of objects, which would be found again
        for row in compile_rows(options.arch, options.only, options.keep):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
