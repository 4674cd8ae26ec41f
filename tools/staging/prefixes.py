"""verify --each, test --series: every part of the stack stages and passes its own tests.

All of them are staged one after the other in one build folder, so a prefix
only compiles what its last PR changed. What passed is remembered under a hash
of everything it consists of; a repeated or interrupted run goes on from there.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import pipeline, testing
from .baseenv import locate
from .checkout import pr_digest
from .config import digest, read_json, Workspace, write_json
from .console import Console
from .errors import ArgumentError, StageError
from .series import PullRequest, Stack


@dataclass(frozen=True)
class Result:
    """How one prefix did.

    Args:
        name: its last PR.
        status: "passed", "passed before", "failed", "does not stage" or "not tried".
        seconds: staging and tests, if it was tried.
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


def select(
    stack: Stack,
    first: str | None = None,
    only: Sequence[str] = (),
    series: Sequence[str] = (),
) -> list[str]:
    """Names of the prefixes to run: all, those from ``first`` on, or ``only``.

    Args:
        series: of these only.

    Raises:
        ArgumentError: an unknown name, or both at once.
    """
    if first and only:
        raise ArgumentError("give either --from or --only", hint="leave one out")
    stack.closure(series)  # an unknown name is an error
    names = [pr.name for pr in stack.prs if not series or pr.series in series]
    if only:
        wanted = {stack.get(name).name for name in only}
        return [name for name in names if name in wanted]
    return [name for name in names if not first or name >= stack.get(first).name]


def run(
    workspace: Workspace,
    stack: Stack,
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
        One result per prefix. What contains a prefix that does not stage is not tried.
    """
    memory = _Memory(workspace.state / "prefixes.json")
    keys = prefix_keys(workspace, stack)
    results: list[Result] = []
    broken: set[str] = set()
    for name in names:
        if broken & {pr.name for pr in stack.prefix(name).prs}:
            results.append(Result(name, "not tried"))
            continue
        if not redo and memory.has(name, keys[name]):
            results.append(Result(name, "passed before"))
            continue
        result = _one(workspace, stack.prefix(name), console, jobs)
        if result.good:
            memory.add(name, keys[name], result.seconds)
        results.append(result)
        print(result, flush=True)
        if result.status == "does not stage":
            broken.add(name)
    return results


def test(
    workspace: Workspace,
    stack: Stack,
    tests: Sequence[str],
    pytest_args: Sequence[str],
    console: Console,
    jobs: int = 1,
) -> int:
    """Stages a part of the stack on its own, below build/prefix, and runs tests there.

    Returns:
        0 if everything passed.
    """
    prefix = Workspace(workspace.repo, workspace.build / "prefix", workspace.cache)
    with pipeline.locked(prefix, console):
        staged = pipeline.setup(prefix, stack, console, discard=True)
        status = testing.run(prefix, staged, tests, pytest_args, jobs) if tests else 0
    # One per part, and no other can use it.
    shutil.rmtree(prefix.build / "inductor", ignore_errors=True)
    return status


def prefix_keys(workspace: Workspace, stack: Stack) -> dict[str, str]:
    """PR name -> hash of the prefix that ends with it, and of the base."""
    base = locate(workspace, stack).folder.name
    own = {pr.name: digest(pr_digest(stack, pr), *pr.tests) for pr in stack.prs}
    return {
        name: digest(base, *(own[pr.name] for pr in stack.prefix(name).prs))
        for name in own
    }


def _one(workspace: Workspace, stack: Stack, console: Console, jobs: int) -> Result:
    pr: PullRequest = stack.prs[-1]
    console.note(f"prefix up to {pr.name}")
    start = time.monotonic()
    try:
        added = testing.added_tests(workspace, stack.only([pr.name]))
        failed = test(workspace, stack, [*pr.tests, *added], [], console, jobs)
    except StageError as error:
        print(f"error: {error}", flush=True)
        seconds = time.monotonic() - start
        return Result(pr.name, "does not stage", seconds, str(error))
    status = "failed" if failed else "passed"
    return Result(pr.name, status, time.monotonic() - start)


class _Memory:
    """Which prefixes passed, with what in them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = read_json(path)

    def has(self, name: str, key: str) -> bool:
        return self._known.get(name, {}).get("key") == key

    def add(self, name: str, key: str, seconds: float) -> None:
        self._known[name] = {"key": key, "seconds": round(seconds, 1)}
        write_json(self._path, self._known)
