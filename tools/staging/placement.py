"""Where the hunks of one file fit in another version of that file.

Everything is git's own judgement: `git apply` for exact and fuzzy placement,
`git merge-file` for the three-way merge, `git apply --reject` for the number of
a hunk that fits nowhere. Used by apply (files the wheel lacks, names of hunks
in conflict) and by drift.
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import patchfile
from .gitrepo import GitError, GitRepo


_REJECTED = re.compile(r"^Rejected hunk #(\d+)\.$", re.MULTILINE)


@dataclass(frozen=True)
class Placement:
    """How the edits of one file fit.

    Args:
        status: "clean" (at most moved), "fuzzy" (needs a three-way merge or less
            context), "conflict", "already" (the text has them), "absent" (there
            is no such file).
        data: the file afterwards; on a conflict with our side of it.
        rejected: the hunks in conflict, as patchfile.hunk_at names them.
    """

    status: str
    data: bytes
    rejected: tuple[str, ...] = ()


def place(
    part: str,
    current: bytes | None,
    versions: tuple[bytes, bytes] | None = None,
) -> Placement:
    """Applies the hunks of one file to ``current``.

    Args:
        part: one piece of patchfile.split_by_file.
        current: the text to apply them to; None if there is no such file.
        versions: the file before and after the hunks in the tree they were made
            for, if known: makes a three-way merge possible.
    """
    if current is None:
        return Placement("absent", b"")
    exact = apply_part(part, current)
    if exact is not None:
        return Placement("clean", exact)
    if apply_part(part, current, "--reverse") is not None:
        return Placement("already", current)
    if versions is None:
        fuzzy = apply_part(part, current, "-C1")
        if fuzzy is not None:
            return Placement("fuzzy", fuzzy)
        return Placement("conflict", current, rejected(part, current))
    merged, conflicts = _merge(current, *versions)
    if not conflicts:
        return Placement("already" if merged == current else "fuzzy", merged)
    ours, _ = _merge(current, *versions, "--theirs")
    return Placement("conflict", ours, rejected(part, current))


def apply_part(part: str, data: bytes, *options: str) -> bytes | None:
    """The file with the hunks applied; None where `git apply` refuses."""
    with _scratch({patchfile.path_of(part): data}) as git:
        try:
            git.run("apply", "--whitespace=nowarn", *options, "-", data=part)
        except GitError:
            return None
        return (git.path / patchfile.path_of(part)).read_bytes()


def rejected(part: str, data: bytes) -> tuple[str, ...]:
    """Names of the hunks that `git apply` finds no place for in ``data``."""
    headers = patchfile.hunks(part)
    with _scratch({patchfile.path_of(part): data}) as git:
        try:
            git.run("apply", "--whitespace=nowarn", "--reject", "-v", "-", data=part)
        except GitError as error:
            numbers = [int(n) for n in _REJECTED.findall(error.stderr)]
            return tuple(
                f"hunk {n} of {len(headers)} ({headers[n - 1]})" for n in numbers
            )
    return ()


def _merge(current: bytes, old: bytes, new: bytes, *options: str) -> tuple[bytes, int]:
    """(result, conflicts) of `git merge-file`."""
    files = {"current": current, "old": old, "new": new}
    with _scratch(files) as git:
        command = ("merge-file", "-q", *options, "current", "old", "new")
        try:
            git.run(*command)
            conflicts = 0
        except GitError:
            conflicts = 1
        return (git.path / "current").read_bytes(), conflicts


@contextmanager
def _scratch(files: dict[str, bytes]) -> Iterator[GitRepo]:
    """A throw-away folder that is no repository, with these files."""
    with tempfile.TemporaryDirectory(prefix="stage-") as name:
        root = Path(name)
        for path, data in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        yield _Outside(root)


class _Outside(GitRepo):
    """Git that finds no repository above its folder."""

    def _environment(self) -> dict[str, str]:
        ceiling = str(self.path.resolve().parent)
        return {**super()._environment(), "GIT_CEILING_DIRECTORIES": ceiling}
