"""torch_patches/series.toml: the series of pull requests and the base pin.

Source of truth is the repository: the patches plus the new files at their
upstream paths. Everything under build/ is derived from them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import tomllib
from packaging.version import Version

from . import benchtable, patchfile, placement
from .errors import ArgumentError, StageError
from .texts import decode


SERIES_FILE = "torch_patches/series.toml"
UPSTREAM_ROOTS = (
    "aten",
    "torch",
    "torchgen",
    "test",
    "benchmarks",
    "docs",
    "functorch",
)
_PR_KEYS = {
    *("name", "series", "needs", "title", "files", "tests", "labels", "owners"),
    *("fixes", "support", "test_plan", "results", "bc", "large", "upstream"),
}
_SERIES_KEYS = {"name", "needs", "why"}
_SERIES_OPTIONS = {"independent"}
_UPSTREAM_KEYS = {"path", "commit", "context"}
# The release in which a C shim appears, in an added line.
_SHIM_VERSION = re.compile(r"^\+.*\b(TORCH_VERSION_\d+_\d+_\d+)\b", re.MULTILINE)


@dataclass(frozen=True)
class Base:
    """The pinned release everything is staged onto."""

    torch: str
    git: str
    python: str
    target_release: str


@dataclass(frozen=True)
class UpstreamFile:
    """Facts about an edited file that the wheel lacks.

    Args:
        path: where it lies upstream.
        commit: the upstream commit its text was read at.
        context: patchfile.context of the patch's hunks in it.
    """

    path: str
    commit: str
    context: str


@dataclass(frozen=True)
class Series:
    """One series: pull requests that a maintainer takes together.

    Args:
        needs: series that have to be applied first.
        why: what it is for, in one sentence.
        independent: its PRs do not build on each other, so that who needs the series needs those
            of lower slots only.
    """

    name: str
    needs: tuple[str, ...]
    why: str
    independent: bool = False


@dataclass(frozen=True)
class PullRequest:
    """One entry of the stack; see the head of series.toml for the fields."""

    name: str
    series: str
    title: str
    needs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    support: tuple[tuple[str, ...], ...] = ()
    test_plan: tuple[str, ...] = ()
    results: tuple[Mapping[str, Any], ...] = ()
    bc: str = ""
    large: str = ""
    upstream: tuple[UpstreamFile, ...] = ()

    @property
    def patch_path(self) -> str:
        """Where its patch lies, relative to the repository."""
        return f"torch_patches/{self.name}.patch"

    @property
    def upstream_paths(self) -> frozenset[str]:
        """The files it edits that the wheel lacks."""
        return frozenset(file.path for file in self.upstream)


@dataclass(frozen=True)
class Stack:
    """The whole stack, first PR first, or the part of it that ``select`` chose."""

    root: Path
    base: Base
    author: str
    non_landing: tuple[str, ...]
    series: tuple[Series, ...]
    prs: tuple[PullRequest, ...]
    # Also those that `select` and the like leave out.
    every_pr: tuple[PullRequest, ...]

    @property
    def tests(self) -> tuple[str, ...]:
        """All test files, in stack order; one may prove several PRs."""
        return tuple(dict.fromkeys(t for pr in self.prs for t in pr.tests))

    def stays(self, path: str) -> bool:
        """Whether a file is in `non_landing`: a part of no pull request."""
        return any(_covers(entry, path) for entry in self.non_landing)

    def get(self, name: str) -> PullRequest:
        """The PR with this name (or slot number).

        Raises:
            ArgumentError: unknown name.
        """
        for pr in self.prs:
            if name in (pr.name, pr.name.split("-")[0]):
                return pr
        known = ", ".join(pr.name.split("-")[0] for pr in self.prs)
        raise ArgumentError(
            f"no PR named {name!r} in {SERIES_FILE}; there are: {known}"
        )

    def upto(self, name: str) -> Stack:
        """The prefix of the stack that ends with this PR."""
        last = self.prs.index(self.get(name))
        return replace(self, prs=self.prs[: last + 1])

    def closure(self, names: Iterable[str]) -> set[str]:
        """These series and all that they need.

        Raises:
            ArgumentError: unknown name.
        """
        known = {one.name: one for one in self.series}
        found: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name not in known:
                raise ArgumentError(
                    f"no series named {name!r} in {SERIES_FILE}; there are: "
                    f"{', '.join(known)}"
                )
            if name not in found:
                found.add(name)
                todo += known[name].needs
        return found

    def select(self, names: Iterable[str]) -> Stack:
        """The PRs of these series and of all that they need.

        A PR with ``needs`` of its own is among them if those series are, too.
        """
        found = self.closure(names)
        chosen = (
            pr for pr in self.prs if pr.series in found and found.issuperset(pr.needs)
        )
        return replace(self, prs=tuple(chosen))

    def only(self, names: Iterable[str]) -> Stack:
        """The PRs with these names."""
        kept = set(names)
        return replace(self, prs=tuple(pr for pr in self.prs if pr.name in kept))

    def left_out(self, names: Collection[str]) -> list[PullRequest]:
        """The PRs of these series that ``select`` leaves out: they need others, too."""
        chosen = self.select(names).prs
        return [pr for pr in self.prs if pr.series in names and pr not in chosen]

    def branches(self) -> list[Stack]:
        """The prefixes that are not part of a longer one: together, every PR."""
        found: dict[tuple[str, ...], Stack] = {}
        for pr in reversed(self.prs):
            prefix = self.prefix(pr.name)
            names = tuple(other.name for other in prefix.prs)
            if not any(names == longer[: len(names)] for longer in found):
                found[names] = prefix
        return list(found.values())[::-1]

    def prefix(self, name: str) -> Stack:
        """The PR, and those before it that its series needs."""
        pr = self.get(name)
        return self.select((pr.series, *pr.needs)).upto(pr.name)

    def owner(self, path: str) -> PullRequest | None:
        """The PR that adds this new file."""
        return next((pr for pr in self.prs if path in pr.files), None)

    def originals(self, pr: PullRequest) -> dict[str, bytes]:
        """The new files of a PR as it adds them: without the edits of later PRs.

        The repository has each file as the whole stack leaves it.

        Raises:
            StageError: a file is missing, or an edit is not in the file.
        """
        found = {}
        for path in pr.files:
            if not (self.root / path).is_file():
                raise StageError(
                    f"{pr.name}: {path} is listed in series.toml but missing"
                )
            found[path] = (self.root / path).read_bytes()
        for later in reversed(self.every_pr[self.every_pr.index(pr) + 1 :]):
            patch = self.patch(later)
            for part in (
                patchfile.split_by_file(patch.only(found).diff) if patch else []
            ):
                path = patchfile.path_of(part)
                data = placement.apply_part(part, found[path], "--reverse")
                if data is None:
                    raise StageError(
                        f"{later.patch_path}: its edits are not in {path}, a new file of "
                        f"{pr.name}",
                        hint=f"the edit is inside lines of {later.name}, or beside them. Take it "
                        f"to the checkout: cp {path} build/checkout/{path} && git checkout {path} "
                        f"&& tools/stage.py refresh {later.name}",
                    )
                found[path] = data
        return found

    def patch(self, pr: PullRequest) -> patchfile.Patch | None:
        """The parsed patch of a PR; None while it is not written yet."""
        path = self.root / pr.patch_path
        if not path.exists():
            return None
        # Not read_text: it would turn "\r\n" into "\n".
        return patchfile.parse(decode(path.read_bytes()))

    def message(self, pr: PullRequest) -> str:
        """Commit message of a PR: its patch's, else its title."""
        patch = self.patch(pr)
        return patch.message if patch and patch.message else f"{pr.title}\n"


def load(root: Path) -> Stack:
    """Reads series.toml of the repository at ``root``.

    Raises:
        StageError: not valid TOML, a missing or unknown field, a doubled name.
    """
    path = root / SERIES_FILE
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StageError(f"{SERIES_FILE} is missing in {root}") from None
    except tomllib.TOMLDecodeError as error:
        raise StageError(f"{SERIES_FILE}: {error}") from None
    try:
        prs = tuple(_pull_request(entry) for entry in data.get("pr", ()))
        stack = Stack(
            root=root,
            base=Base(**data["base"]),
            author=data["project"]["author"],
            non_landing=tuple(data["project"].get("non_landing", ())),
            series=tuple(_series(entry) for entry in data.get("series", ())),
            prs=prs,
            every_pr=prs,
        )
    except KeyError as error:
        raise StageError(f"{SERIES_FILE}: {error} is missing") from None
    except TypeError as error:
        raise StageError(f"{SERIES_FILE}: [base]: {error}") from None
    names = [pr.name for pr in stack.prs]
    if len(set(names)) != len(names):
        raise StageError(f"{SERIES_FILE}: a PR name occurs twice")
    return stack


def _series(entry: dict) -> Series:
    if set(entry) - _SERIES_OPTIONS != _SERIES_KEYS:
        raise StageError(
            f"{SERIES_FILE}: series {entry.get('name', '?')} has the fields "
            f"{', '.join(sorted(_SERIES_KEYS))}, not {', '.join(sorted(entry))}"
        )
    return Series(
        entry["name"],
        tuple(entry["needs"]),
        entry["why"],
        independent=entry.get("independent", False),
    )


def _pull_request(entry: dict) -> PullRequest:
    unknown = set(entry) - _PR_KEYS
    if unknown:
        raise StageError(
            f"{SERIES_FILE}: PR {entry.get('name', '?')}: unknown field "
            f"{', '.join(sorted(unknown))}; allowed: {', '.join(sorted(_PR_KEYS))}"
        )
    lists = ("needs", "files", "labels", "owners", "fixes", "test_plan")
    own = [path for path in entry.get("files", ()) if is_test(path)]
    return PullRequest(
        name=entry["name"],
        series=entry["series"],
        title=entry["title"],
        tests=tuple(dict.fromkeys((*own, *entry.get("tests", ())))),
        support=tuple(tuple(row) for row in entry.get("support", ())),
        bc=entry.get("bc", ""),
        large=entry.get("large", ""),
        results=tuple(_results(entry, r) for r in entry.get("results", ())),
        upstream=tuple(_upstream_file(entry, f) for f in entry.get("upstream", ())),
        **{key: tuple(entry.get(key, ())) for key in lists},
    )


def _results(entry: dict, fields: str | dict) -> Mapping[str, Any]:
    """One results file, or a part of it; see benchtable."""
    fields = {"file": fields} if isinstance(fields, str) else fields
    unknown = set(fields) - benchtable.KEYS
    if unknown or "file" not in fields:
        raise StageError(
            f"{SERIES_FILE}: PR {entry['name']}: an entry of results has a file and of "
            f"the fields {', '.join(sorted(benchtable.KEYS))}; got "
            f"{', '.join(sorted(fields))}"
        )
    return fields


def _upstream_file(entry: dict, fields: dict) -> UpstreamFile:
    if set(fields) != _UPSTREAM_KEYS:
        raise StageError(
            f"{SERIES_FILE}: PR {entry['name']}: an entry of upstream has the fields "
            f"{', '.join(sorted(_UPSTREAM_KEYS))}, not {', '.join(sorted(fields))}"
        )
    return UpstreamFile(**fields)


def is_test(path: str) -> bool:
    """Whether pytest would collect it."""
    return bool(re.fullmatch(r"test/(?:.*/)?test_[^/]*\.py", path))


def problems(stack: Stack) -> list[str]:
    """Every way in which series.toml and the repository disagree."""
    order = list(_order_problems(stack))
    if order:
        return order  # the rest asks what a PR lies on
    return [
        *_file_problems(stack),
        *_import_problems(stack),
        *_patch_problems(stack),
        *_upstream_problems(stack),
        *_neighbour_problems(stack),
        *_shim_problems(stack),
        *_body_problems(stack),
    ]


def _file_problems(stack: Stack) -> Iterator[str]:
    seen: dict[str, str] = {}
    for pr in stack.prs:
        for path in pr.files:
            if path in seen:
                yield f"{path}: listed by {seen[path]} and by {pr.name}"
            seen[path] = pr.name
        below = {path for other in stack.prefix(pr.name).prs for path in other.files}
        for test in sorted(set(pr.tests) - below):
            if stack.stays(test) and (stack.root / test).is_file():
                continue
            yield (
                f"{test}: a test of {pr.name} that is not among its files or those "
                "of an earlier PR of the series it needs"
            )
    for path in landing_files(stack):
        if path not in seen:
            yield f"{path}: belongs to no PR (and is not in non_landing)"
        elif b"\0" in (stack.root / path).read_bytes()[:4096]:
            yield f"{path}: binary data does not land: its source and licence are not in it"


def _import_problems(stack: Stack) -> Iterator[str]:
    """A file may only import, at its top level, files of its own PR or of the PRs below it."""
    owners = {path: pr.name for pr in stack.prs for path in pr.files}
    for pr in stack.prs:
        below = {path for other in stack.prefix(pr.name).prs for path in other.files}
        try:
            files = stack.originals(pr)
        except StageError as error:
            yield f"{error.message}; fix: {error.hint}" if error.hint else error.message
            continue
        for path, text in files.items():
            for found in _imported(text, path, owners):
                if found not in below:
                    yield (
                        f"{path}: imports {found} of {owners[found]}, which {pr.name} does "
                        "not lie on: it lacks series in its needs"
                    )


def _imported(text: bytes, path: str, known: Collection[str]) -> list[str]:
    """The ``known`` files that a Python file imports at its top level."""
    if not path.endswith(".py"):
        return []
    modules: list[str] = []
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):  # the latter for a zero byte, before Python 3.12
        return []  # for ruff to say
    for node in body:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules += [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
    # Relative to the root or, for scripts and tests, to a folder that contains the file.
    folders = ("", *(f"{folder}/" for folder in PurePosixPath(path).parents))
    files = (f"{f}{m.replace('.', '/')}.py" for m in modules for f in folders)
    return sorted({file for file in files if file in known})


def landing_files(stack: Stack) -> list[str]:
    """Files of the repository at upstream paths, minus the non-landing ones."""
    found = []
    for top in UPSTREAM_ROOTS:
        for path in sorted((stack.root / top).rglob("*")):
            name = path.relative_to(stack.root).as_posix()
            parts = name.split("/")
            # Caches of Python, pytest and ruff are nobody's sources.
            if path.is_dir() or "__pycache__" in parts:
                continue
            if any(part.startswith(".") for part in parts):
                continue
            if not stack.stays(name):
                found.append(name)
    return found


def _covers(entry: str, name: str) -> bool:
    return name.startswith(entry) if entry.endswith("/") else name == entry


def _patch_problems(stack: Stack) -> Iterator[str]:
    folder = stack.root / "torch_patches"
    named = {pr.patch_path for pr in stack.prs}
    for path in sorted(folder.glob("*.patch")):
        if f"torch_patches/{path.name}" not in named:
            yield f"torch_patches/{path.name}: no PR of {SERIES_FILE} names it"
    for pr in stack.prs:
        patch = stack.patch(pr)
        if patch is None:
            yield f"{pr.patch_path}: missing; it carries at least the PR description"
            continue
        if not patch.message:
            yield f"{pr.patch_path}: no Subject; a patch carries the PR description"
        for path in patch.created:
            yield f"{pr.patch_path}: adds or deletes {path}; new files go into the tree"
        for path in patch.paths:
            owner = stack.owner(path)
            if owner is not None and owner not in stack.prefix(pr.name).prs[:-1]:
                yield (
                    f"{pr.patch_path}: edits {path}, a new file of {owner.name}, which "
                    f"{pr.name} does not lie on"
                )


def _order_problems(stack: Stack) -> Iterator[str]:
    names = [pr.name for pr in stack.prs]
    if names != sorted(names):
        yield f"{SERIES_FILE}: PRs are not in slot order: {', '.join(names)}"
    for pr in stack.prs:
        patch = stack.patch(pr)
        if not pr.files and not (patch and patch.diff):
            yield f"{pr.name}: neither edits a file nor adds one"
    known = {one.name: one for one in stack.series}
    unknown = [
        f"{owner.name}: there is no series {name!r}"
        for owner in (*stack.series, *stack.prs)
        for name in (*owner.needs, getattr(owner, "series", owner.name))
        if name not in known
    ]
    yield from unknown
    for index, pr in enumerate(() if unknown else stack.prs):
        needed = stack.closure((*known[pr.series].needs, *pr.needs))
        for other in stack.prs[index:]:
            if other.series in needed and not known[other.series].independent:
                yield f"{pr.name}: needs {other.series}, but {other.name} is later"


def _upstream_problems(stack: Stack) -> Iterator[str]:
    """Hunks for files the wheel lacks are as they were when upstream was read."""
    for pr in stack.prs:
        patch = stack.patch(pr)
        parts = patchfile.split_by_file(patch.diff) if patch else []
        found = {patchfile.path_of(part): part for part in parts}
        for file in pr.upstream:
            if file.path not in found:
                yield f"{pr.name}: upstream names {file.path}; the patch has no such edit"
            elif patchfile.context(found[file.path]) != file.context:
                yield (
                    f"{pr.patch_path}: the context of {file.path} is not that of upstream "
                    f"commit {file.commit[:10]} (write it with refresh --upstream)"
                )


def _neighbour_problems(stack: Stack) -> Iterator[str]:
    """Hunks for a file the wheel lacks fit those of the PRs below: nothing else applies both."""
    parted: dict[tuple[str, str, str], str] = {}  # (path, line, next line): PR
    joined: dict[tuple[str, str, str], str] = {}
    for pr in stack.prs:
        patch = stack.patch(pr)
        below = {other.name for other in stack.prefix(pr.name).prs} - {pr.name}
        lacking = {file.path for file in pr.upstream}
        for part in patchfile.split_by_file(patch.diff) if patch else []:
            path = patchfile.path_of(part)
            if path not in lacking:
                continue
            for hunk in patchfile.sides(part):
                old, new = ({(path, *two) for two in pairwise(side)} for side in hunk)
                stale = sorted({parted[two] for two in old & parted.keys()} & below)
                ahead = sorted({joined[two] for two in old & joined.keys()} - below)
                for other in stale:
                    yield f"{pr.patch_path}: {path} is as it was before {other} there"
                for other in ahead:
                    yield f"{pr.patch_path}: {path} is as {other} leaves it, which is not below"
                for gone, come, owners in ((old, new, parted), (new, old, joined)):
                    owners.update(dict.fromkeys(gone - come, pr.name))
                    for two in come:
                        owners.pop(two, None)


def _shim_problems(stack: Stack) -> Iterator[str]:
    """New C shims exist from target_release on, which is newer than the base.

    The headers of the base have no macro for it. An undefined one counts as 0 in #if, so the
    staged torch has the shims all the same. Of a shim that an older release has for another
    backend, torchgen keeps that release for all.
    """
    target, base = map(Version, (stack.base.target_release, stack.base.torch))
    if target.release[:2] <= base.release[:2]:
        yield (
            f"{SERIES_FILE}: target_release must be above the base {stack.base.torch}, got "
            f"{stack.base.target_release!r}"
        )
    macro = f"TORCH_VERSION_{target.major}_{target.minor}_0"
    for pr in stack.prs:
        patch = stack.patch(pr)
        named = _SHIM_VERSION.findall(patch.diff) if patch else []
        for name in sorted(set(named) - {macro}):
            if Version(".".join(name.split("_")[2:])).release[:2] < base.release[:2]:
                continue
            yield f"{pr.patch_path}: C shims since {name}; target_release is {macro}"


def _body_problems(stack: Stack) -> Iterator[str]:
    for pr in stack.prs:
        for entry in pr.results:
            try:
                benchtable.render(stack.root, entry)
            except StageError as error:
                yield f"{pr.name}: {error.message}"
        topics = [label for label in pr.labels if label.startswith("topic: ")]
        notes = [label for label in pr.labels if label.startswith("release notes: ")]
        if pr.labels and bool(notes) == (topics == ["topic: not user facing"]):
            yield (
                f"{pr.name}: labels need 'topic: not user facing', or a 'release notes: ' "
                f"and another 'topic: ' label; got {', '.join(pr.labels)}"
            )
        if len({len(row) for row in pr.support}) > 1:
            yield f"{pr.name}: rows of support have different lengths"
