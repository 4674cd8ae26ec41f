"""Single files of a released torch wheel, without downloading all of it.

A torch wheel is half a gigabyte and more; a drift table needs twenty texts of
it. pip finds the wheel as it would to install it (index, mirror and proxy are
the user's), and its own lazy reader fetches the parts that are needed. What was
read is kept in the user's cache. Used by drift.
"""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from .config import cache_folder, write_atomically
from .errors import ArgumentError, StageError


_VERSION = re.compile(r"^\d+\.\d+(\.\d+)?([a-z0-9.+]+)?$")


class WheelFile:
    """One released version; ``read`` gives a member's bytes.

    Args:
        version: as pip spells it, for example "2.14.1".
        cache: folder of the user's cache; default as everywhere.
    """

    def __init__(self, version: str, cache: Path | None = None) -> None:
        if not _VERSION.match(version):
            raise ArgumentError(
                f"{version!r} is no version of torch",
                hint="give released versions, for example: drift 2.14.1 2.13.0",
            )
        self.version = version
        self._folder = (cache or cache_folder()) / "wheels" / f"torch-{version}"

    def fetch(self, names: set[str]) -> None:
        """Brings these members into the cache, those the wheel has.

        Raises:
            StageError: no such version, or no network.
        """
        listing = self._folder / "names.json"
        known = set(json.loads(listing.read_text())) if listing.exists() else None
        wanted = names if known is None else names & known
        missing = {n for n in wanted if not (self._folder / "files" / n).exists()}
        if known is not None and not missing:
            return
        with _opened(_wheel_url(self.version), self.version) as archive:
            there = set(archive.namelist())
            for name in sorted(missing & there):
                write_atomically(self._folder / "files" / name, archive.read(name))
            text = json.dumps(sorted(there), indent=0)
            write_atomically(listing, text.encode())

    def read(self, name: str) -> bytes | None:
        """A member fetched before; None if the wheel has none of that name."""
        try:
            return (self._folder / "files" / name).read_bytes()
        except FileNotFoundError:
            return None


def _wheel_url(version: str) -> str:
    """Where pip would take the wheel from; nothing is installed."""
    with tempfile.TemporaryDirectory() as target:
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"),
            *("--no-deps", "--ignore-installed", "--target", target),
            *("--disable-pip-version-check", "--no-input", "--report", "-"),
            *("--only-binary", ":all:", f"torch=={version}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [s for s in done.stderr.splitlines() if s.startswith("ERROR")]
        raise StageError(
            f"pip finds no wheel of torch {version}: {lines[-1] if lines else ''}",
            hint="check the version and the network",
        )
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return report["install"][0]["download_info"]["url"]


@contextmanager
def _opened(url: str, version: str) -> Iterator[zipfile.ZipFile]:
    """The wheel as an archive: a local one, parts of it, or all of it."""
    parsed = urlparse(url)
    if parsed.scheme == "file":
        with zipfile.ZipFile(unquote(parsed.path)) as archive:
            yield archive
        return
    lazy = _lazy_file(url)
    if lazy is not None:
        with lazy, zipfile.ZipFile(lazy) as archive:
            yield archive
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--disable-pip-version-check", "--no-input", "--only-binary", ":all:"),
            *("--dest", folder, f"torch=={version}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise StageError(f"pip download torch=={version}: {done.stderr.strip()}")
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as archive:
            yield archive


def _lazy_file(url: str):
    """pip's file object over HTTP ranges; None where pip or server cannot."""
    try:
        from pip._internal.commands import create_command
        from pip._internal.network.lazy_wheel import (
            HTTPRangeRequestUnsupported,
            LazyZipOverHTTP,
        )

        command: Any = create_command("download")
        options, _ = command.parse_args(["torch"])
        session = command._build_session(options)
    except (ImportError, AttributeError):
        return None  # another pip: it may have moved
    try:
        return LazyZipOverHTTP(url, session)
    except HTTPRangeRequestUnsupported:
        return None
