"""Runs ninja, shows progress, and reports the first error only."""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import ninja

from .buildgraph import Binaries
from .config import Workspace, write_atomically
from .console import Console
from .errors import no_space, StageError
from .subprocesses import die_with_parent


_STATUS = "[%f/%t] "
_PROGRESS = re.compile(r"^\[(\d+)/(\d+)\] (.*)")
_ERROR = re.compile(r"^(?P<where>.+?:\d+(?::\d+)?): (?:fatal )?error: (?P<what>.*)")
_LINK_ERROR = re.compile(r"undefined reference to [`'](.*)'")
_BYTES_PER_JOB = 2 * 2**30  # peak of one compiler on ATen headers, with margin


def build(workspace: Workspace, binaries: Binaries, console: Console) -> None:
    """Brings both binaries up to date.

    Raises:
        StageError: no compiler; the first compile or link error.
    """
    check_compiler()
    ninja_file = binaries.ninja_file
    command = [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(ninja_file.parent)]
    if not _has_work(command):
        return
    log = workspace.logs / "ninja.log"
    process = subprocess.Popen(
        [*command, f"-j{_jobs()}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env={**os.environ, "NINJA_STATUS": _STATUS, "LC_ALL": "C"},
        preexec_fn=die_with_parent,
    )
    lines: list[str] = []
    try:
        with console.progress("compile", binaries.sources + 2) as advance:
            for line in process.stdout or ():
                lines.append(line.rstrip("\n"))
                match = _PROGRESS.match(line)
                if match:
                    advance(int(match.group(1)), match.group(3).split("/")[-1])
            if process.wait():
                raise _first_error(lines, workspace, log)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        write_atomically(log, "\n".join(lines).encode())
    warnings = sum(" warning: " in line for line in lines)
    if warnings:
        console.note(f"{warnings} compiler warnings, see {log}")


def check_compiler() -> None:
    """Raises a StageError without a C++20 compiler, binutils or headers of Python, or for MAX_JOBS."""
    _jobs()
    if not shutil.which("g++"):
        raise StageError(
            "no C++ compiler: g++ is not on PATH",
            hint="install it (Debian, Ubuntu: apt-get install g++), version 11 or newer",
        )
    version = subprocess.run(
        ["g++", "-dumpversion"], capture_output=True, text=True
    ).stdout.strip()
    if not version or int(version.split(".")[0]) < 11:
        raise StageError(
            f"g++ {version or '(broken)'} is too old for PyTorch headers",
            hint="install g++ 11 or newer and put it first on PATH",
        )
    absent = [name for name in ("as", "ld", "nm", "readelf") if not shutil.which(name)]
    if absent:
        raise StageError(
            f"not on PATH: {', '.join(absent)}",
            hint="install binutils (Debian, Ubuntu: apt-get install binutils)",
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        package = "python" + sysconfig.get_python_version() + "-dev"
        raise StageError(
            f"no headers of Python: {header} is missing",
            hint=f"install them (Debian, Ubuntu: apt-get install {package})",
        )


def _has_work(command: list[str]) -> bool:
    done = subprocess.run([*command, "-n"], capture_output=True, text=True)
    return "no work to do" not in done.stdout


def _jobs() -> int:
    """MAX_JOBS as in PyTorch's own build, else cores that fit into memory."""
    if jobs := os.environ.get("MAX_JOBS"):
        if not jobs.isdecimal() or not int(jobs):
            raise StageError(f"MAX_JOBS must be an integer of at least 1, got {jobs!r}")
        return int(jobs)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), pages // _BYTES_PER_JOB))


def _first_error(lines: list[str], workspace: Workspace, log: Path) -> StageError:
    if any("No space left on device" in line for line in lines):
        return no_space(workspace.build)
    for number, line in enumerate(lines):
        found = _ERROR.match(line)
        if found:
            context = [
                s for s in lines[number + 1 : number + 4] if re.match(r"\s+\d* ?\|", s)
            ]
            where = _repository_path(found["where"], workspace)
            text = "\n".join([f"{where}: error: {found['what']}", *context])
            return StageError(f"compile error\n{text}", log=log)
        missing = _LINK_ERROR.search(line)
        if missing:
            return StageError(
                f"link error: undefined reference to {missing.group(1)}",
                hint="the function is not defined, or the wheel does not export it; "
                "use an exported at:: function, or see tools/staging/overlay/",
                log=log,
            )
    failed = next(
        (s for s in lines if s.startswith("FAILED:")), lines[-1] if lines else ""
    )
    return StageError(f"the build failed: {failed}", log=log)


def _repository_path(where: str, workspace: Workspace) -> str:
    """Names the file the user edits instead of its copy below build/."""
    match = re.fullmatch(r"(.*?)((?::\d+)+)", where)
    path, line = (match[1], match[2][1:]) if match else (where, "")
    include = f"{workspace.build}/include/"
    if path.startswith(include):
        name = path.removeprefix(include)
        for candidate in (f"aten/src/{name}", name):
            if (workspace.checkout / candidate).exists():
                return f"{candidate}:{line}"
    name = path.removeprefix(f"{workspace.checkout}/")
    return f"{name}:{line}"
