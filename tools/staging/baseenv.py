"""The base environment: a venv with exactly the pinned packages, never edited.

It lives in the user's cache, shared by clones with the same pins. A stamp file
written last tells a complete environment from one that a killed pip left.
Whether torch is still as released is checked against the sha256 sums of the
wheel's RECORD; sizes and times are remembered so that it costs nothing when
nothing was touched.
"""

import base64
import csv
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import filelock

from .config import base_key, read_json, Workspace, write_atomically, write_json
from .console import Console
from .errors import no_space, StageError
from .series import Stack
from .subprocesses import die_with_parent


_NEEDED_BYTES = 7 * 2**30  # 5.4 GB installed, plus the largest wheel unpacked


class BaseEnv:
    """Paths inside one base environment of the cache."""

    def __init__(self, folder: Path, python_version: str) -> None:
        self.folder = folder
        self.venv = folder / "venv"
        self.python = self.venv / "bin" / "python"
        self.site = self.venv / "lib" / f"python{python_version}" / "site-packages"
        self.stamp = folder / "complete"

    @property
    def key(self) -> str:
        """Changes when the environment was built anew."""
        return self.stamp.read_text()


def locate(workspace: Workspace, stack: Stack) -> BaseEnv:
    """Where the base environment is (or will be)."""
    folder = workspace.cache / f"base-{base_key(stack)}"
    return BaseEnv(folder, stack.base.python)


def ensure(
    workspace: Workspace, stack: Stack, console: Console, fresh: bool = False
) -> BaseEnv:
    """Makes the base environment if needed and checks that torch is untouched.

    Args:
        fresh: delete it first, whatever its state.

    Raises:
        StageError: no space, no network, wrong torch build, an edited file.
    """
    env = locate(workspace, stack)
    env.folder.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(f"{env.folder}.lock")
    if not _try(lock):
        console.note("another process is making the base environment; waiting")
        lock.acquire()
    with lock:
        if fresh and env.folder.exists():
            with console.step("remove the base environment"):
                shutil.rmtree(env.folder)
        if not env.stamp.exists():
            _create(env, stack, console)
        _check_untouched(env, console)
    lock.release()
    return env


def _try(lock: filelock.FileLock) -> bool:
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    return True


def _create(env: BaseEnv, stack: Stack, console: Console) -> None:
    if env.folder.exists():
        shutil.rmtree(env.folder)
    free = shutil.disk_usage(env.folder.parent).free
    if free < _NEEDED_BYTES:
        raise StageError(
            f"the base environment needs {_NEEDED_BYTES / 2**30:.0f} GB, the disk of "
            f"{env.folder.parent} has {free / 2**30:.1f} GB free",
            hint="free some space, or set MOE_STAGING_CACHE to a folder elsewhere",
        )
    with console.step(f"install torch {stack.base.torch} into {env.folder}") as update:
        subprocess.run(
            [sys.executable, "-m", "venv", str(env.venv)],
            check=True,
            capture_output=True,
        )
        _pip_install(env, stack, update)
    _check_build(env, stack)
    # Random, so that a rebuilt environment never matches an old staged one.
    write_atomically(env.stamp, os.urandom(8).hex().encode())


def _pip_install(env: BaseEnv, stack: Stack, update: Callable[[str], None]) -> None:
    log = env.folder / "pip.log"
    command = [
        *(str(env.python), "-m", "pip", "install", "--progress-bar=off"),
        *("--disable-pip-version-check", "--no-input", "--log", str(log)),
        *("-r", str(stack.root / "requirements.txt")),
        f"torch=={stack.base.torch}",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=die_with_parent,
    )
    lines = []
    for line in process.stdout or ():
        lines.append(line.rstrip())
        if line.startswith(
            ("Collecting", "Downloading", "Installing", "  Downloading")
        ):
            update(line.strip()[:90])
    if process.wait():
        raise _pip_error(lines, log)


def _pip_error(lines: list[str], log: Path) -> StageError:
    text = "\n".join(lines)
    if "No space left on device" in text:
        return no_space(log.parent)
    errors = [line for line in lines if line.startswith("ERROR")]
    first = errors[0] if errors else (lines[-1] if lines else "no output")
    return StageError(
        f"pip: {first}",
        hint="check the network and pip's settings, then repeat the command",
        log=log,
    )


def _check_build(env: BaseEnv, stack: Stack) -> None:
    """The version number alone does not say which commit a wheel was built from."""
    namespace: dict[str, str] = {}
    exec((env.site / "torch" / "version.py").read_text(), namespace)
    if namespace["git_version"] != stack.base.git:
        raise StageError(
            f"torch {stack.base.torch} was built from {namespace['git_version']}, "
            f"series.toml pins {stack.base.git}",
            hint="install from the official index, or correct [base] git",
        )


def _check_untouched(env: BaseEnv, console: Console) -> None:
    cache_file = env.folder / "verified.json"
    known = read_json(cache_file)
    stale, current = _changed_since(env, known)
    if not stale:
        return
    if not known:
        with console.step("check torch against the RECORD of its wheel"):
            _compare(env, stale)
    else:
        _compare(env, stale)
    write_json(cache_file, current)


def _changed_since(
    env: BaseEnv, known: dict[str, list[int]]
) -> tuple[list[tuple[str, str]], dict[str, list[int]]]:
    """RECORD rows whose size or time differs from ``known``, and all of them."""
    stale, current = [], {}
    site = str(env.site)
    for name, expected in _record(env):
        try:
            info = os.stat(f"{site}/{name}")
        except FileNotFoundError:
            stale.append((name, expected))
            continue
        current[name] = [info.st_size, info.st_mtime_ns]
        if known.get(name) != current[name]:
            stale.append((name, expected))
    return stale, current


def _record(env: BaseEnv) -> list[tuple[str, str]]:
    """(path below site-packages, sha256 as RECORD spells it) of the torch wheel."""
    records = list(env.site.glob("torch-*.dist-info/RECORD"))
    if len(records) != 1:
        raise StageError(
            f"{len(records)} torch installations in {env.site}", hint=_REPAIR
        )
    with records[0].open(newline="") as rows:
        return [
            (row[0], row[1].removeprefix("sha256="))
            for row in csv.reader(rows)
            if row and row[1].startswith("sha256=") and not row[0].startswith("..")
        ]


_REPAIR = "python3 tools/stage.py setup --fresh   (installs the base anew)"


def _compare(env: BaseEnv, rows: list[tuple[str, str]]) -> None:
    for name, expected in rows:
        path = env.site / name
        if not path.exists():
            raise StageError(f"base environment: {path} is missing", hint=_REPAIR)
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").digest()
        if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != expected:
            raise StageError(
                f"base environment: {path} differs from the released wheel "
                "(something wrote through a link of the staged environment)",
                hint=_REPAIR,
            )
