"""drift: how the patches fit other PyTorch versions, hunk by hunk.

The stack is applied in order to the texts another version has, so that a later
PR meets what the earlier ones made. A hunk in conflict is put in by force and
counted, so that one conflict is not reported by every PR above it.

Sources are released wheels (a few members of each are fetched) and git
checkouts. What no wheel holds (C++ sources, docs, expect files) is reported as
"not in wheel" there, and tested against a checkout.
"""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import rich.console
import rich.table
import rich.text

from . import patchfile, wheelsource
from .checkout import Checkout
from .console import Console
from .errors import ArgumentError
from .gitrepo import GitError, GitRepo
from .placement import place, Placement
from .series import PullRequest, Stack
from .texts import decode, encode
from .wheelfile import WheelFile


NOT_IN_WHEEL = "not in wheel"
# A new file of the stack, which that version has as well: apply stops on it.
SAME_NAME = "file exists"
# Worst first: a PR is as its worst file.
_ORDER = ("conflict", SAME_NAME, "no such file", "fuzzy", "clean", "already upstream")
_LINE = re.compile(r"\(@@ -(\d+).*\)")
_WORDS = {"absent": "no such file", "already": "already upstream"}


@dataclass(frozen=True)
class FileDrift:
    """One edited file of one PR in one version."""

    path: str
    status: str
    hunks: tuple[str, ...] = ()


@dataclass(frozen=True)
class PatchDrift:
    """One PR in one version; ``files`` are the files its patch edits."""

    name: str
    files: tuple[FileDrift, ...]

    @property
    def status(self) -> str:
        """The worst of its files; "no edits" for a PR of new files only."""
        found = {file.status for file in self.files}
        if not found:
            return "no edits"
        return next((word for word in _ORDER if word in found), NOT_IN_WHEEL)


@dataclass(frozen=True)
class VersionDrift:
    """The whole stack in one version.

    Args:
        version: "2.14.1", or the name of a checkout.
        commit: of a checkout, else "".
    """

    version: str
    commit: str
    patches: tuple[PatchDrift, ...]


class WheelSource:
    """Texts of a release."""

    commit = ""

    def __init__(self, version: str, cache: Path | None = None) -> None:
        self.name = version
        self._wheel = WheelFile(version, cache)

    def prepare(self, paths: set[str]) -> None:
        """Fetches what the wheel has of these."""
        members = {wheelsource.installed_path(path) for path in paths}
        self._wheel.fetch({m for m in members if m})

    def holds(self, path: str) -> bool:
        """Whether a wheel has files of this kind at all."""
        return wheelsource.installed_path(path) is not None

    def read(self, path: str) -> bytes | None:
        member = wheelsource.installed_path(path)
        data = self._wheel.read(member) if member else None
        if data is None or not member or not member.startswith("torch/include/"):
            return data
        return encode(wheelsource.unguard(decode(data)))


class CheckoutSource:
    """Texts of a git checkout at its HEAD; the work tree is not read."""

    def __init__(self, path: Path) -> None:
        self._git = GitRepo(path)
        try:
            self.commit = self._git.resolve("HEAD")
        except (GitError, OSError):
            raise ArgumentError(
                f"{path} is not a git checkout with a commit",
                hint="drift --checkout takes a checkout of PyTorch",
            ) from None
        self.name = self.commit[:10]

    def prepare(self, paths: set[str]) -> None:
        pass

    def holds(self, path: str) -> bool:
        return True

    def read(self, path: str) -> bytes | None:
        try:
            return self._git.run_bytes("show", f"HEAD:{path}")
        except GitError:
            return None


def measure(
    checkout: Checkout,
    stack: Stack,
    source: WheelSource | CheckoutSource,
    advance: Callable[[int, str], None] = lambda done, detail: None,
) -> VersionDrift:
    """Puts the stack onto the texts of ``source``, PR by PR.

    Args:
        checkout: build/checkout; its commits are the versions to merge.
    """
    diffs = {pr.name: parts(stack, pr) for pr in stack.prs}
    paths = {patchfile.path_of(p) for parts in diffs.values() for p in parts}
    source.prepare(paths | {path for pr in stack.prs for path in pr.files})
    texts: dict[str, bytes | None] = {}
    commits = checkout.commits(checkout.commit_stack(stack, {}))
    patches = []
    for done, (commit, name, _) in enumerate(commits):
        advance(done, name)
        files = _same_names(stack, stack.get(name), source)
        for part in diffs[name]:
            path = patchfile.path_of(part)
            if not source.holds(path):
                files.append(FileDrift(path, NOT_IN_WHEEL))
                continue
            if path not in texts:
                texts[path] = source.read(path)
            found = place(part, texts[path], _versions(checkout, commit, path))
            if found.status != "absent":
                texts[path] = found.data
            files.append(_file(path, found))
        patches.append(PatchDrift(name, tuple(files)))
    return VersionDrift(source.name, source.commit, tuple(patches))


def measure_with_progress(
    checkout: Checkout,
    stack: Stack,
    source: WheelSource | CheckoutSource,
    console: Console,
) -> VersionDrift:
    """measure, with a progress bar."""
    with console.progress(f"drift against {source.name}", len(stack.prs)) as advance:
        return measure(checkout, stack, source, advance)


_COLOURS = {"clean": "green", "fuzzy": "yellow", "conflict": "red"}


def show(drifts: list[VersionDrift]) -> None:
    """Prints the table and, below it, every hunk that needs a human."""
    table = rich.table.Table("PR", *(d.version for d in drifts))
    for index, patch in enumerate(drifts[0].patches):
        words = [d.patches[index].status for d in drifts]
        table.add_row(
            patch.name, *(rich.text.Text(w, _COLOURS.get(w, "")) for w in words)
        )
    console = rich.console.Console(highlight=False, soft_wrap=True)
    console.print(table)
    for line in _details(drifts):
        print(line)


def markdown(data: dict) -> str:
    """The table of CONTRIBUTING.md: PRs that fare alike in one row.

    PRs that only add files are left out, unless a file of that name is there.

    Args:
        data: as in the result file.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for patches in zip(*(version["patches"] for version in data["versions"])):
        statuses = tuple(patch["status"] for patch in patches)
        if not any(patch["files"] for patch in patches):
            continue
        groups.setdefault(statuses, []).append(patches[0]["name"].split("-")[0])
    heads = ["PRs", *(version["version"] for version in data["versions"])]
    rows = [[", ".join(slots), *statuses] for statuses, slots in groups.items()]
    return "\n".join(map(_row, [heads, ["---"] * len(heads), *rows])) + "\n"


def result(drifts: list[VersionDrift], stack: Stack, command: str) -> dict:
    """What the result file holds; the table can be made from it."""
    return {
        "command": command,
        "base": {"torch": stack.base.torch, "git": stack.base.git},
        "versions": [
            {
                "version": d.version,
                "commit": d.commit,
                "patches": [
                    {
                        "name": p.name,
                        "status": p.status,
                        "files": [asdict(f) for f in p.files],
                    }
                    for p in d.patches
                ],
            }
            for d in drifts
        ],
    }


def _details(drifts: list[VersionDrift]) -> list[str]:
    """One line per file that needs a human, and the files no wheel has."""
    lines = [
        f"- {d.version}, {p.name}: `{f.path}`: {_hunks(f) or f.status}"
        for d in drifts
        for p in d.patches
        for f in p.files
        if f.status in ("conflict", "no such file", SAME_NAME)
    ]
    files = [f for d in drifts for p in d.patches for f in p.files]
    unknown = sorted({f.path for f in files if f.status == NOT_IN_WHEEL})
    if unknown:
        names = ", ".join(f"`{path}`" for path in unknown)
        lines.append(f"- {NOT_IN_WHEEL}, so only `--checkout` can tell: {names}")
    return lines


def _hunks(file: FileDrift) -> str:
    """ "hunk 1 of 5 (line 8754)": numbers of the patch, lines of the base."""
    return ", ".join(_LINE.sub(r"(line \1)", hunk) for hunk in file.hunks)


def parts(stack: Stack, pr: PullRequest) -> list[str]:
    """The hunks for files of PyTorch: those for files of other PRs cannot drift."""
    patch = stack.patch(pr)
    parts = patchfile.split_by_file(patch.diff) if patch else []
    return [p for p in parts if stack.owner(patchfile.path_of(p)) is None]


def _same_names(
    stack: Stack, pr: PullRequest, source: WheelSource | CheckoutSource
) -> list[FileDrift]:
    """New files of the PR that this version has with other contents."""
    found = {path: source.read(path) for path in pr.files if source.holds(path)}
    return [
        FileDrift(path, SAME_NAME)
        for path, data in found.items()
        if data is not None and data != (stack.root / path).read_bytes()
    ]


def _versions(checkout: Checkout, commit: str, path: str) -> tuple[bytes, bytes] | None:
    """The file before and after the PR; None for what the wheel lacks."""
    old, new = f"{commit}^:{path}", f"{commit}:{path}"
    if not checkout.git.has(old):
        return None
    return checkout.git.run_bytes("show", old), checkout.git.run_bytes("show", new)


def _file(path: str, found: Placement) -> FileDrift:
    return FileDrift(path, _WORDS.get(found.status, found.status), found.rejected)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
