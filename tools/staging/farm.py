"""build/venv: the base environment as links, plus the files of the stack.

A hardlink costs no space and no copy, and Python sees ordinary files. A file
is only ever replaced (new file, then rename), never written through a link, so
the base stays as released. Where hardlinks are impossible (another disk) the
farm uses symlinks, and where those fail a copy, and says so.

The manifest lists every file that is not the base's, so that one edit updates
one file, and a file that leaves the stack gets the base's contents back.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .baseenv import BaseEnv
from .config import digest, read_json, Workspace, write_atomically, write_json
from .console import Console
from .errors import StageError


MANIFEST = "staged.json"
_COPY_BYTES = 6 * 2**30


class Farm:
    """The staged environment of one build folder."""

    def __init__(self, workspace: Workspace, env: BaseEnv) -> None:
        self.path = workspace.venv
        self.python = self.path / "bin" / "python"
        self._env = env
        self._site = self.path / env.site.relative_to(env.venv)
        self._manifest = self.path / MANIFEST
        self._linked = workspace.link is not None

    def update(self, files: dict[str, bytes], console: Console) -> bool:
        """Makes the environment hold the base plus ``files``.

        Args:
            files: path below site-packages -> contents.

        Returns:
            Whether anything changed.
        """
        manifest: dict[str, Any] = read_json(self._manifest)
        if manifest.get("base") != self._env.key:
            mode = self._rebuild(console)
            manifest = {"base": self._env.key, "mode": mode, "files": {}}
        old: dict[str, str] = manifest["files"]
        new = {name: digest(data) for name, data in files.items()}
        if old == new:
            return False
        with console.step("install the staged files"):
            # A killed update leaves names without a digest: written again.
            pending = {n: d if new.get(n) == d else "" for n, d in old.items()}
            pending.update({n: "" for n in new if n not in old})
            self._write({**manifest, "files": pending})
            for name, expected in new.items():
                if pending[name] != expected:
                    self._install(name, files[name])
            for name in set(old) - set(new):
                self._restore(name, manifest["mode"])
            self._write({**manifest, "files": new})
        return True

    @property
    def build_hash(self) -> str:
        """Names everything installed; one Inductor cache per value."""
        manifest = read_json(self._manifest)
        text = json.dumps([manifest.get("base"), manifest.get("files")], sort_keys=True)
        return digest(text)[:16]

    # -- making the farm -------------------------------------------------------

    def _rebuild(self, console: Console) -> str:
        temporary = self.path.with_name("venv.tmp")
        with console.step("link the base environment into build/venv"):
            shutil.rmtree(temporary, ignore_errors=True)
            mode, make = self._choose_mode(temporary.parent)
            subprocess.run(
                [sys.executable, "-m", "venv", "--without-pip", str(temporary)],
                check=True,
                capture_output=True,
            )
            if self._linked:
                self._write_interpreter(temporary / "bin")
            site = temporary / self._env.site.relative_to(self._env.venv)
            shutil.rmtree(site)
            shutil.copytree(self._env.site, site, symlinks=True, copy_function=make)
            empty = {"base": self._env.key, "mode": mode, "files": {}}
            (temporary / MANIFEST).write_text(json.dumps(empty))
            old = self.path.with_name("venv.old")
            shutil.rmtree(old, ignore_errors=True)
            if self.path.exists():
                os.rename(self.path, old)
            os.rename(temporary, self.path)
            shutil.rmtree(old, ignore_errors=True)
        if mode != "hardlink":
            console.warn(
                f"hardlinks from {self._env.site} to {self.path} are not possible; "
                f"the staged environment uses {mode} instead"
            )
        return mode

    def _write_interpreter(self, folder: Path) -> None:
        """Python finds its packages below the name it was called by, links and all."""
        real = self.path / "bin" / f"python3.{sys.version_info[1]}"
        for name in ("python", "python3"):
            path = folder / name
            path.unlink()
            path.write_text(f'#!/bin/sh\nexec {shlex.quote(str(real))} "$@"\n')
            path.chmod(0o755)

    def _choose_mode(self, folder: Path) -> tuple[str, Callable[[str, str], object]]:
        """Tries out, with one real file, which kind of link works here."""
        folder.mkdir(parents=True, exist_ok=True)
        sample = str(self._env.site / "torch" / "__init__.py")
        probe = folder / ".link-probe"
        for mode, make in (("hardlink", os.link), ("symlink", os.symlink)):
            probe.unlink(missing_ok=True)
            try:
                make(sample, probe)
            except OSError:
                continue
            probe.unlink()
            return mode, make
        free = shutil.disk_usage(folder).free
        if free < _COPY_BYTES:
            raise StageError(
                f"neither hardlinks nor symlinks work in {folder}, and a copy needs "
                f"{_COPY_BYTES / 2**30:.0f} GB where {free / 2**30:.1f} GB are free",
                hint="set MOE_STAGING_CACHE to a folder on the same disk",
            )
        return "copy", shutil.copy2

    # -- single files ----------------------------------------------------------

    def _install(self, name: str, data: bytes) -> None:
        target = self._site / name
        _forget_bytecode(target)
        write_atomically(target, data)
        if name.endswith(".so"):
            target.chmod(0o755)

    def _restore(self, name: str, mode: str) -> None:
        target, original = self._site / name, self._env.site / name
        _forget_bytecode(target)
        if not original.exists():
            target.unlink(missing_ok=True)
            self._drop_empty_folders(target.parent)
            return
        temporary = target.with_name(f".{target.name}.new")
        temporary.unlink(missing_ok=True)
        make = {"hardlink": os.link, "symlink": os.symlink, "copy": shutil.copy2}[mode]
        make(str(original), str(temporary))
        os.replace(temporary, target)

    def _drop_empty_folders(self, folder: Path) -> None:
        """Removes empty folders that the base lacks: Python would import them as packages."""
        while not (self._env.site / folder.relative_to(self._site)).exists():
            with suppress(OSError):
                (folder / "__pycache__").rmdir()
            try:
                folder.rmdir()
            except OSError:
                return  # others' files
            folder = folder.parent

    def _write(self, manifest: dict) -> None:
        write_json(self._manifest, manifest)


def _forget_bytecode(source: Path) -> None:
    """Python compares times in whole seconds; two quick edits look the same."""
    for cached in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
        cached.unlink()
