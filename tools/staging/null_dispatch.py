"""Ninja step of the host build: null kernels for capabilities not compiled.

    python null_dispatch.py OUT.s OBJECT...

DispatchStub reads one pointer per capability. In a build for this host only,
the others are never defined; PyTorch's dispatch treats null as "no kernel for
this capability" and says so, instead of failing to link.
"""

import re
import subprocess
import sys
from pathlib import Path


_POINTER = re.compile(r"^_ZN2at6native12DispatchStub.*E(?:7DEFAULT|4AVX2|6AVX512)E$")


def missing_pointers(objects: list[str]) -> list[str]:
    """Mangled names of capability pointers used but not defined."""
    output = subprocess.run(
        ["nm", "--no-sort", *objects], capture_output=True, text=True, check=True
    ).stdout
    used, defined = set(), set()
    for line in output.splitlines():
        words = line.split()
        if len(words) >= 2 and _POINTER.match(words[-1]):
            (used if words[-2] == "U" else defined).add(words[-1])
    return sorted(used - defined)


def assembly(names: list[str]) -> str:
    """A data section with one null pointer per name."""
    entries = "".join(
        f".globl {name}\n.type {name}, @object\n.size {name}, 8\n{name}:\n.quad 0\n"
        for name in names
    )
    return f'.data\n.balign 8\n{entries}.section .note.GNU-stack,"",@progbits\n'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(assembly(missing_pointers(sys.argv[2:])))
