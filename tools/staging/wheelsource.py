"""A PyTorch source tree recovered from the installed wheel, as a git repository.

A wheel holds every Python file, the yaml files and templates of torchgen, and
every public header. This module puts them back to their source paths:

    torch/**, functorch/**, torchgen/**          same path
    torchgen/packaged/ATen/**                    aten/src/ATen/**
    torchgen/packaged/autograd/**                tools/autograd/**
    torch/include/{ATen,c10,caffe2,torch}/**     aten/src/ATen, c10, caffe2, torch

What the wheel does not hold (.cpp files, tests, docs) cannot be patched here.
Used by checkout (which clones it) and farm (which needs the way back).
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from .baseenv import BaseEnv
from .console import Console
from .gitrepo import GitRepo


# Series of the folder name: a new recovery rule makes a new tree.
_FORMAT = 1
_GUARD = "#if !defined(TORCH_STABLE_ONLY) && !defined(TORCH_TARGET_VERSION)"
_GUARD_END = (
    "\n#else\n"
    '#error "This file should not be included when either TORCH_STABLE_ONLY or '
    'TORCH_TARGET_VERSION is defined."\n'
    f"#endif  // {_GUARD.removeprefix('#if ')}\n"
)
_SKIPPED_FOLDERS = {"include", "lib", "bin", "share", "test"}
_SKIPPED_FILES = {
    "torch/version.py",
    "torch/testing/_internal/generated/annotated_fn_args.py",
}
_HEADER_ROOTS = {
    "ATen": "aten/src/ATen",
    "c10": "c10",
    "caffe2": "caffe2",
    "torch": "torch",
}
_SHIM_HEADERS = "/aoti_torch/generated/"

# Source path -> path below site-packages, for files a patch or PR may hold.
_INSTALLED = (
    (
        r"aten/src/ATen/(native/(?:native_functions|tags)\.yaml|templates/.*)",
        r"torchgen/packaged/ATen/\1",
    ),
    (r"tools/autograd/(.*)", r"torchgen/packaged/autograd/\1"),
    (r"aten/src/(ATen/.*\.(?:h|cuh))", r"torch/include/\1"),
    (r"(c10/.*\.h)", r"torch/include/\1"),
    (r"(torch/(?:csrc|headeronly)/.*\.h)", r"torch/include/\1"),
    # A stub is made of its template; see stubs.py.
    (r"(torch/.*\.pyi)\.in", r"\1"),
    (
        r"((?:torch|torchgen|functorch)/.*\.(?:py|pyi|jinja|json|yaml|in|txt|npz|md))",
        r"\1",
    ),
)


def installed_path(source_path: str) -> str | None:
    """Where a build installs this source file, below site-packages.

    Returns:
        None for what is not installed: C++ sources, tests, docs, benchmarks.
    """
    for pattern, target in _INSTALLED:
        if re.fullmatch(pattern, source_path):
            return re.sub(f"^{pattern}$", target, source_path)
    return None


def guard(text: str) -> str:
    """Wraps a header the way setup.py wraps every header it installs."""
    return f"{_GUARD}\n{text}{_GUARD_END}"


def unguard(text: str) -> str:
    """The inverse of guard; other text is returned unchanged."""
    if not text.startswith(_GUARD + "\n"):
        return text
    return text[len(_GUARD) + 1 : text.rindex("\n#else\n")]


def ensure(env: BaseEnv, console: Console) -> GitRepo:
    """Makes the source repository of a base environment if it is not there."""
    final = env.folder / f"source-{_FORMAT}"
    if final.exists():
        return GitRepo(final)
    temporary = env.folder / "source.tmp"
    with console.step("recover the PyTorch sources from the wheel"):
        shutil.rmtree(temporary, ignore_errors=True)
        write_tree(env.site, temporary)
        repo = GitRepo(temporary)
        repo.run("init", "-q")
        repo.run("add", "-A", "-f")
        repo.run("commit", "-q", "-m", "PyTorch sources recovered from the wheel")
        os.rename(temporary, final)
    return GitRepo(final)


def write_tree(site: Path, out: Path) -> int:
    """Copies every source file of the wheel to its source path below ``out``.

    Returns:
        How many files.
    """
    count = 0
    for source, target in _sources(site):
        destination = out / target
        destination.parent.mkdir(parents=True, exist_ok=True)
        if "include/" in str(source.relative_to(site)):
            text = source.read_text(encoding="utf-8", errors="surrogateescape")
            destination.write_text(
                unguard(text), encoding="utf-8", errors="surrogateescape"
            )
        else:
            shutil.copyfile(source, destination)
        count += 1
    return count


def _sources(site: Path) -> Iterator[tuple[Path, str]]:
    for top in ("torch", "functorch", "torchgen"):
        for path in _walk(site / top, _SKIPPED_FOLDERS if top == "torch" else set()):
            name = path.relative_to(site).as_posix()
            if _is_source(name):
                yield path, _source_path(name)
    include = site / "torch" / "include"
    for top, target in _HEADER_ROOTS.items():
        for path in _walk(include / top, set()):
            name = path.relative_to(include).as_posix()
            if not _is_generated(path, name):
                yield path, target + name.removeprefix(top)


def _walk(root: Path, skipped: set[str]) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        at_top = Path(folder) == root
        folders[:] = sorted(
            f for f in folders if f != "__pycache__" and not (at_top and f in skipped)
        )
        yield from (Path(folder) / file for file in sorted(files))


def _is_source(name: str) -> bool:
    binary = name.endswith((".so", ".pyc", ".pyi")) or ".so." in name
    return not binary and name not in _SKIPPED_FILES


def _source_path(name: str) -> str:
    if name.startswith("torchgen/packaged/ATen/"):
        return "aten/src/ATen/" + name.removeprefix("torchgen/packaged/ATen/")
    if name.startswith("torchgen/packaged/autograd/"):
        return "tools/autograd/" + name.removeprefix("torchgen/packaged/autograd/")
    return name


def _is_generated(path: Path, name: str) -> bool:
    """Generated headers are not sources, except the C shims upstream checks in."""
    if name.startswith("ATen/ops/"):
        return True
    if _SHIM_HEADERS in f"/{name}":
        return False
    if "/generated/" in name:
        return True
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(600)
    return "@generated by torchgen" in head or "@generated from" in head
