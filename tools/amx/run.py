"""Runs tests with the kernels for AMX, on a CPU without it: emulation.h computes their instructions.

    python3 tools/stage.py setup && python3 tools/amx/run.py test/test_moe_mlp.py [PYTEST ARGUMENTS]

The kernels of build/build.ninja are compiled once more into build/amx, with three edits: the target of
the functions becomes emulation.h, and the CPU is not asked for AMX. The library takes the place of
the staged one. The CPU needs AVX512-BF16.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys


ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
HEADERS = "aten/src/ATen/native/cpu"
EDITS = {
    "MoEAmx.h": (
        '#define MOE_AMX_TARGET __attribute__((target("amx-tile,amx-bf16,amx-int8")))',
        f'#include "{ROOT}/tools/amx/emulation.h"',
    ),
    "MoEMicroGemmX86.h": (
        'has_instructions("amx_bf16") && at::cpu::init_amx()',
        "true",
    ),
    "MoELowBitDecoder.h": ('has_instructions("amx_int8")', "true"),
}


def write_headers(folder: pathlib.Path) -> None:
    """Copies the headers of the kernels, with the edits."""
    folder.mkdir(parents=True, exist_ok=True)
    for header in (BUILD / "checkout" / HEADERS).glob("MoE*.h"):
        shutil.copy2(header, folder)
    for name, (old, new) in EDITS.items():
        text = (folder / name).read_text()
        if text.count(old) != 1:
            raise SystemExit(
                f"{HEADERS}/{name} has {text.count(old)} times instead of once: {old}"
            )
        (folder / name).write_text(text.replace(old, new))


def build(folder: pathlib.Path) -> None:
    """Compiles the kernels for AVX512 into ``folder``, and links them with the other objects."""
    ninja = (BUILD / "build.ninja").read_text().replace("$$", "$")
    [common], [link], [objects] = (
        re.findall(pattern, ninja, re.MULTILINE)
        for pattern in (
            r"^common = (.*)$",
            r"^rule library\n  command = (.*)$",
            r"^build \S*/libtorch\.so: library ([^|\n]*)",
        )
    )
    kernels = re.findall(
        r"^build (\S*/\S*MoE\w*\.AVX512\.o): cc (\S+)\n  flags = (.*)$",
        ninja,
        re.MULTILINE,
    )
    if not kernels:
        raise SystemExit(
            "build/build.ninja has no kernels for AVX512; run: python3 tools/stage.py setup"
        )
    compilers = []
    for target, source, flags in kernels:
        out = str(folder / pathlib.Path(target).name)
        objects = objects.replace(target, out)
        command = f"g++ -I{folder}/include {common} {flags} -c {source} -o {out}"
        compilers.append(subprocess.Popen(command, shell=True))
    if any([compiler.wait() for compiler in compilers]):  # noqa: C419, waits for all
        raise SystemExit("the kernels for AVX512 do not compile")
    out = str(folder / "libtorch.so")
    link = link.replace("$out", out).replace("$in", objects)
    subprocess.run(link, shell=True, check=True)


def main() -> int:
    if "avx512_bf16" not in pathlib.Path("/proc/cpuinfo").read_text():
        raise SystemExit("emulated AMX needs a CPU with AVX512-BF16")
    folder = BUILD / "amx"
    write_headers(folder / "include" / "ATen/native/cpu")
    build(folder)
    [libraries] = BUILD.glob("venv/lib/python*/site-packages/torch/lib")
    environment = os.environ | {
        "LD_PRELOAD": str(folder / "libtorch.so"),
        "LD_LIBRARY_PATH": str(libraries),
    }
    python = str(BUILD / "venv/bin/python")
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
