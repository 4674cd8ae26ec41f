"""Runs lintrunner with the pinned tools on every file; reports large PRs."""

import os
import subprocess
import sys
from pathlib import Path

from . import patchfile
from .prbody import file_sizes, growth
from .series import Stack


# Committed or not: a new file is checked before it is added.
_FILES = "git ls-files --cached --others --exclude-standard"


# What a reviewer takes on in one sitting; the aim for every PR of the stack.
MAX_CHANGED_LINES = 500
BUILD_LIST = "build_variables.bzl"
_NO_PATCH = patchfile.Patch("", "")


def large_prs(stack: Stack) -> list[str]:
    """One line per PR above the size that is aimed at; a report, not an error.

    Counted are changed lines outside tests, generated files, docs, data and
    kernels.
    """
    found, later = [], growth(stack)
    for pr in stack.prs:
        sizes = [
            (path, n) for path, n, kind in file_sizes(stack, pr, later) if not kind
        ]
        total = sum(n for _, n in sizes)
        if total > MAX_CHANGED_LINES:
            path, most = max(sizes, key=lambda item: item[1])
            why = "; its `large` in series.toml says why" if pr.large else ""
            found.append(
                f"{pr.name}: {total} changed lines outside tests, generated files and "
                f"kernels, aim {MAX_CHANGED_LINES}; most in {path} ({most}){why}"
            )
    return found


def unlisted_sources(stack: Stack) -> list[str]:
    """One line per new C++ source that upstream's build list lacks.

    CMake finds it by a glob, so the staged build and most of CI are green
    without; builds from build_variables.bzl would lack it.
    """
    listed = {
        line[1:].strip().strip(',"')
        for pr in stack.prs
        for part in patchfile.split_by_file((stack.patch(pr) or _NO_PATCH).diff)
        if patchfile.path_of(part) == BUILD_LIST
        for line in part.split("\n")
        if line.startswith("+ ")
    }
    return [
        f"{pr.name}: {path} has no line in {BUILD_LIST}; add it in a checkout of "
        f"PyTorch, then refresh {pr.name} --upstream"
        for pr in stack.prs
        for path in pr.files
        if path.startswith("aten/src/ATen/native/")
        and path.endswith(".cpp")
        and path not in listed
    ]


def run(repo: Path, apply: bool) -> int:
    """Lints the repository.

    Args:
        apply: also write the fixes of formatters.

    Returns:
        Exit status of lintrunner.
    """
    tools = Path(sys.executable).parent
    command = [str(tools / "lintrunner"), f"--paths-cmd={_FILES}"]
    command += ["--apply-patches"] if apply else []
    path = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
    env = {**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=repo, env=env).returncode
