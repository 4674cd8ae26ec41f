"""verify --each: every prefix of the stack stages and passes its own tests.

All prefixes are staged one after the other in one build folder, so a prefix
only compiles what its last PR changed. What passed is remembered under a hash
of everything it consists of; a repeated or interrupted run goes on from there.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from . import pipeline, testing
from .baseenv import locate
from .checkout import pr_digest
from .config import digest, Workspace, write_atomically
from .console import Console
from .errors import ArgumentError, StageError
from .series import PullRequest, Series


@dataclass(frozen=True)
class Result:
    """How one prefix did.

    Args:
        name: its last PR.
        status: "passed", "passed before", "failed" or "does not stage".
        seconds: staging and tests; 0 for "passed before".
        detail: the error, if it does not stage.
    """

    name: str
    status: str
    seconds: float = 0.0
    detail: str = ""

    @property
    def good(self) -> bool:
        return self.status.startswith("passed")

    def __str__(self) -> str:
        return f"{self.name:32} {self.status:15} {self.seconds:6.1f} s"


def select(series: Series, first: str | None, only: tuple[str, ...]) -> list[str]:
    """Names of the prefixes to run: all, those from ``first`` on, or ``only``.

    Raises:
        ArgumentError: an unknown name, or both at once.
    """
    if first and only:
        raise ArgumentError("give either --from or --only", hint="leave one out")
    names = [pr.name for pr in series.prs]
    if only:
        wanted = {series.get(name).name for name in only}
        return [name for name in names if name in wanted]
    return names[names.index(series.get(first).name) :] if first else names


def run(
    workspace: Workspace,
    series: Series,
    names: list[str],
    console: Console,
    redo: bool = False,
    jobs: int = 1,
) -> list[Result]:
    """Stages and tests prefixes, oldest first.

    Args:
        names: last PRs of the prefixes.
        redo: also those that passed before.
        jobs: test files of a prefix at the same time.

    Returns:
        One result per prefix. A prefix that does not stage ends the run: the
        later ones contain it.
    """
    memory = _Memory(workspace.state / "prefixes.json")
    keys = prefix_keys(workspace, series)
    results: list[Result] = []
    for name in names:
        if not redo and memory.has(name, keys[name]):
            results.append(Result(name, "passed before"))
            continue
        result = _one(workspace, series.prefix(name), console, jobs)
        if result.good:
            memory.add(name, keys[name], result.seconds)
        results.append(result)
        print(result, flush=True)
        if result.status == "does not stage":
            break
    return results


def prefix_keys(workspace: Workspace, series: Series) -> dict[str, str]:
    """PR name -> hash of the prefix that ends with it, and of the base."""
    base = locate(workspace, series).folder.name
    own = {pr.name: digest(pr_digest(series, pr), *pr.tests) for pr in series.prs}
    return {
        name: digest(base, *(own[pr.name] for pr in series.prefix(name).prs))
        for name in own
    }


def _one(workspace: Workspace, series: Series, console: Console, jobs: int) -> Result:
    pr: PullRequest = series.prs[-1]
    build = workspace.build / "prefix"
    prefix = Workspace(workspace.repo, build, workspace.cache)
    console.note(f"prefix up to {pr.name}")
    start = time.monotonic()
    try:
        with pipeline.locked(prefix, console):
            staged = pipeline.setup(prefix, series, console, discard=True)
            failed = pr.tests and testing.run(prefix, staged, pr.tests, [], jobs)
    except StageError as error:
        print(f"error: {error}", flush=True)
        seconds = time.monotonic() - start
        return Result(pr.name, "does not stage", seconds, str(error))
    # One per prefix, and no later prefix can use it.
    shutil.rmtree(build / "inductor", ignore_errors=True)
    status = "failed" if failed else "passed"
    return Result(pr.name, status, time.monotonic() - start)


class _Memory:
    """Which prefixes passed, with what in them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._known = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            self._known = {}

    def has(self, name: str, key: str) -> bool:
        return self._known.get(name, {}).get("key") == key

    def add(self, name: str, key: str, seconds: float) -> None:
        self._known[name] = {"key": key, "seconds": round(seconds, 1)}
        write_atomically(self._path, json.dumps(self._known, indent=1).encode())
