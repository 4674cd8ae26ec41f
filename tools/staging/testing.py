"""Runs test files: those of the stack in the staged environment, ours in the tools'.

Every file runs in a process of its own, as PyTorch's run_test.py does: a test
that leaves a patched dispatcher or a compile cache behind cannot help or hurt
the next file. It is a fork of one that has imported PyTorch.
"""

import contextlib
import datetime
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import gitrepo, patchfile
from .config import Workspace, write_if_changed
from .errors import ArgumentError, StageError
from .forkserver import ForkServer
from .pipeline import Staged
from .series import is_test, Stack


STAGER_TESTS = "tools/test"
# Names that PyTorch's test files import, for the tests that patches add to them.
_HEAD = """\
import contextlib
import itertools
import sys
import unittest
from unittest import mock
from unittest.mock import patch

import torch
import torch._inductor.test_case
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.flop_counter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.testing._internal.common_cuda import SM80OrLater
from torch.testing._internal.common_device_type import dtypes, instantiate_device_type_tests
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TEST_CUDA,
    TEST_WITH_TORCHDYNAMO,
    TestCase,
)
from torch.utils._triton import has_triton_package
"""
# A test file that needs Triton's interpreter, which is chosen before Triton is imported.
_INTERPRETS = 'os.environ["TRITON_INTERPRET"] = "1"'
# What it imports before PyTorch, which a fork has imported.
_BEFORE_PYTORCH = "fake_gpu"
_OURS = "moe or grouped_mm or grouped_mlp"
# PyTorch's own suites that know our ops once the stack is in: those that run
# over the OpInfo database, and those that check lists every op must be on. Not
# test_ops_jit.py, which needs the arguments of upstream's run_test.py.
UPSTREAM_SUITES = (
    ("test/test_ops.py", _OURS),
    ("test/test_meta.py", _OURS),
    ("test/test_decomp.py", f"({_OURS}) or HasDecomp"),
    ("test/test_fake_tensor.py", _OURS),
    ("test/test_proxy_tensor.py", _OURS),
    ("test/test_schema_check.py", _OURS),
    ("test/test_ops_gradients.py", _OURS),
    ("test/test_ops_fwd_gradients.py", _OURS),
    ("test/test_ops_unbacked.py", _OURS),
    ("test/functorch/test_ops.py", _OURS),
    ("test/functorch/test_vmap.py", _OURS),
    ("test/functorch/test_aotdispatch.py", _OURS),
    ("test/inductor/test_torchinductor_opinfo.py", _OURS),
    ("test/distributed/tensor/test_dtensor_ops.py", _OURS),
    ("test/export/test_export_opinfo.py", _OURS),
    ("test/test_modules.py", "MoE"),
    ("test/test_autocast.py", ""),
    ("test/test_flop_counter.py", ""),
    ("test/test_namedtuple_return_api.py", ""),
    ("test/test_overrides.py", ""),
    ("test/test_public_bindings.py", ""),
    ("test/dynamo/test_trace_rules.py", ""),
    ("test/python_native", ""),
)
# The outcome of a test, by the first element below its entry in a JUnit file.
_OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}
_NOT_OURS = "failed without the stack too"
_WORDS = ("failed", "error", "passed", "skipped", "xfailed", _NOT_OURS)


@dataclass(frozen=True)
class _Test:
    """One test that ran: class and name, what pytest calls its outcome, and its time."""

    name: str
    outcome: str
    seconds: float


@dataclass
class Report:
    """Sums over all files, printed like pytest's closing line."""

    failed: list[str] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)

    def line(self, seconds: float) -> str:
        """For example "=== 12 passed, 1 skipped in 3.4s (2 files) ==="."""
        parts = [f"{self.counts[w]} {w}" for w in _WORDS if self.counts[w]]
        text = ", ".join(parts) or "no tests ran"
        return f"=== {text} in {seconds:.1f}s ({self.counts['files']} files) ==="


def select(workspace: Workspace, stack: Stack, paths: Sequence[str]) -> list[str]:
    """Test files to run, relative to the repository.

    Args:
        paths: files, folders or ``file::test``, test files of PyTorch to which the stack adds
            classes among them; none means the whole stack's tests, then the stager's own.

    Raises:
        StageError: a path that does not exist.
    """
    if not paths:
        added = added_tests(workspace, stack)
        return [*stack.tests, *added, *_stager_tests(workspace.repo)]
    found: list[str] = []
    for text in paths:
        name, separator, test = text.partition("::")
        if not (workspace.repo / name).exists():
            added = added_tests(workspace, stack, name)
            if added:
                found += [a + separator + test for a in added]
                continue
        path = _locate(workspace.repo, name)
        files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        names = [file.relative_to(workspace.repo).as_posix() for file in files]
        found += [n + separator + test for n in names if n not in found]
    return found


def added_tests(workspace: Workspace, stack: Stack, path: str = "") -> list[str]:
    """Tests that patches add to test files of PyTorch, which the wheel lacks.

    Each hunk is to add whole classes or whole methods, which are run in a class of their own.
    Hunks of other kinds are left out.

    Args:
        path: of this file of PyTorch only.

    Returns:
        Files below the build folder, relative to the repository where they lie in it.
    """
    texts: dict[str, list[str]] = {}
    for pr in stack.prs:
        patch = stack.patch(pr)
        for part in patchfile.split_by_file(patch.diff) if patch else []:
            name = patchfile.path_of(part)
            if name in pr.upstream_paths and is_test(name) and path in ("", name):
                texts.setdefault(name, []).extend(_tests_of(part))
    found = []
    for name, tests in texts.items():
        if not tests:
            continue
        file = workspace.build / "added-tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        tail = 'if __name__ == "__main__":\n    run_tests()\n'
        write_if_changed(file, "\n\n".join([_HEAD, *tests, tail]))
        inside = file.is_relative_to(workspace.repo)
        found.append(
            file.relative_to(workspace.repo).as_posix() if inside else str(file)
        )
    return found


def _tests_of(part: str) -> Iterator[str]:
    """The classes that the hunks of a file add; for a method, one that holds it."""
    for lines in patchfile.added(part):
        text = "\n".join(lines).strip("\n")
        if text.startswith("    def test_"):
            name = re.sub(r"\W", "", text.partition("def ")[2].partition("(")[0])
            yield f"class Added_{name}(TestCase):\n{text}\n"
        elif re.search(r"^class \w+\(", text, re.MULTILINE):
            yield f"{text}\n"


def run(
    workspace: Workspace,
    staged: Staged | None,
    tests: Sequence[str],
    pytest_args: Sequence[str],
    jobs: int = 1,
) -> int:
    """Runs the files and prints a summary.

    Args:
        jobs: files at the same time; with more than one, the output of a file is
            printed when it has ended.

    Returns:
        0 if everything passed.
    """
    start, report = time.monotonic(), Report()
    processes = _Processes(workspace, staged)

    def run_one(test: str) -> tuple[str, Path, int]:
        results = workspace.build / "test-results" / f"{_flat(test)}.xml"
        results.unlink(missing_ok=True)
        args = [*pytest_args, f"--junit-xml={results}"]
        if jobs == 1:
            print(f"--- {test}", flush=True)
            return test, results, processes.run(test, args)
        began = time.monotonic()
        with tempfile.NamedTemporaryFile(mode="r", errors="replace") as output:
            status = processes.run(test, args, Path(output.name))
            seconds = time.monotonic() - began
            print(f"--- {test}  {seconds:.0f} s\n{output.read()}", end="", flush=True)
        return test, results, status

    with contextlib.closing(processes), ThreadPoolExecutor(jobs) as pool:
        for test, results, status in pool.map(run_one, tests):
            _collect(report, test, results, status)
    return _summary(report, start)


def upstream_suites(upstream: Path, paths: Sequence[str]) -> list[tuple[str, str]]:
    """(file, -k expression) of PyTorch's suites to run out of ``upstream``.

    Args:
        paths: only these files or folders; none means all of UPSTREAM_SUITES.

    Raises:
        StageError: not a checkout of PyTorch, or a path it does not have.
    """
    if not (upstream / "test" / "test_ops.py").is_file():
        raise ArgumentError(
            f"{upstream} has no test/test_ops.py",
            hint="--upstream takes a checkout of PyTorch at the pinned release",
        )
    known = dict(UPSTREAM_SUITES)
    if not paths:
        absent = [path for path, _ in UPSTREAM_SUITES if not (upstream / path).exists()]
        if absent:
            print(f"not in {upstream}, so not run: {', '.join(absent)}", flush=True)
        return [s for s in UPSTREAM_SUITES if s[0] not in absent]
    for path in paths:
        if not (upstream / path).exists():
            raise ArgumentError(
                f"no test file or folder {path!r} in {upstream}",
                hint="paths are those of the checkout, e.g. test/test_ops.py",
            )
    return [(path, known.get(path, _OURS)) for path in paths]


def run_upstream(
    workspace: Workspace,
    staged: Staged,
    upstream: Path,
    suites: Sequence[tuple[str, str]],
    pytest_args: Sequence[str],
    released: Path | None = None,
) -> tuple[int, list[dict]]:
    """Runs PyTorch's own suites in the staged environment and sums up.

    The tests are the checkout's, `torch` is the staged one: test files and the
    wheel should be of one release.

    Args:
        released: Python of the environment without the stack. Suites with failures run there
            as well, and what fails in both is not the stack's.

    Returns:
        0 if nothing failed that is the stack's, and a row per suite: its path, how many tests
        had which outcome, the failed ones by name and the slowest.
    """
    start, report, rows = time.monotonic(), Report(), []
    for path, expression in suites:
        print(f"--- {path}{f' -k {expression!r}' if expression else ''}", flush=True)
        began = time.monotonic()
        args = [*(["-k", expression] if expression else []), *pytest_args, "-rs"]
        run = functools.partial(_run_upstream_file, workspace, upstream, path, args)
        status, tests = run(staged.python, environment(workspace, staged))
        failed = _failed(tests)
        elsewhere: set[str] = set()
        if failed and released is not None:
            print(f"--- {path} with the released wheel", flush=True)
            there = run(released, dict(os.environ))[1]
            elsewhere = failed & _failed(there)
            tests = [
                replace(t, outcome=_NOT_OURS) if t.name in elsewhere else t
                for t in tests
            ]
        # 1 is that of failed tests, 5 of none.
        if failed - elsewhere or status not in (0, 1, 5):
            report.failed.append(path)
        report.counts["files"] += 1
        report.counts.update(t.outcome for t in tests)
        rows.append(_row(path, tests, time.monotonic() - began))
    for row in rows:
        for name in row["failures"]:
            print(f"FAILED {row['suite']} {name}")
    nothing = [row["suite"] for row in rows if not row["tests"]]
    if nothing:
        print(f"no test of ours in: {', '.join(nothing)}")
    return _summary(report, start), rows


def upstream_record(
    workspace: Workspace, stack: Stack, upstream: Path, rows: Sequence[dict], file: Path
) -> dict:
    """What a results file says of a run: rows of suites that are in ``file`` already stay."""
    old = json.loads(file.read_text())["rows"] if file.exists() else []
    ran = {row["suite"] for row in rows}
    version = upstream / "version.txt"
    return {
        "command": f"python3 tools/stage.py test --upstream ../pytorch --json {file.name}",
        "date": datetime.date.today().isoformat(),
        "git": gitrepo.UserRepo(workspace.repo).resolve("HEAD"),
        "torch": stack.base.torch,
        "test_files": version.read_text().strip() if version.exists() else "unknown",
        "rows": [*(row for row in old if row["suite"] not in ran), *rows],
    }


def _run_upstream_file(
    workspace: Workspace,
    upstream: Path,
    path: str,
    args: Sequence[str],
    python: Path,
    env: dict[str, str],
) -> tuple[int, list[_Test]]:
    """Exit status of pytest, and what it ran."""
    results = workspace.build / "test-results" / f"upstream.{_flat(path)}.xml"
    results.unlink(missing_ok=True)
    file, folder = (upstream / path).resolve(), (upstream / "test").resolve()
    command = [str(python), "-m", "pytest", str(file), f"--rootdir={folder}"]
    # Upstream's conftest.py is written for pytest 7 and stops later ones.
    command += ["--noconftest", "-p", "no:cacheprovider", "-q", *args]
    command += [f"--junit-xml={results}"]
    # The current folder must not be importable: `torch` is next door.
    env = {**env, "PYTHONSAFEPATH": "1"}
    status = subprocess.run(command, cwd=folder, env=env).returncode
    return status, _read(results)


def _failed(tests: Sequence[_Test]) -> set[str]:
    return {test.name for test in tests if test.outcome in ("failed", "error")}


def _row(path: str, tests: list[_Test], seconds: float) -> dict:
    slowest = max(tests, key=lambda t: t.seconds, default=_Test("", "", 0.0))
    counts = Counter(t.outcome for t in tests)
    return {
        "suite": path,
        "tests": len(tests),
        **{word: counts[word] for word in ("passed", "skipped", "xfailed")},
        "failed": counts["failed"] + counts["error"],
        _NOT_OURS.replace(" ", "_"): counts[_NOT_OURS],
        "failures": sorted(_failed(tests)),
        "slowest": slowest.name,
        "slowest_seconds": round(slowest.seconds, 1),
        "seconds": round(seconds),
    }


def _collect(report: Report, name: str, results: Path, status: int) -> None:
    report.counts["files"] += 1
    report.counts.update(test.outcome for test in _read(results))
    # 5: the -k expression matched nothing in this file.
    if status not in (0, 5):
        report.failed.append(name)


def _summary(report: Report, start: float) -> int:
    for name in report.failed:
        print(f"FAILED {name}")
    print(report.line(time.monotonic() - start), flush=True)
    nothing_ran = not report.counts["passed"] and not report.failed
    return 1 if report.failed or nothing_ran else 0


def environment(workspace: Workspace, staged: Staged) -> dict[str, str]:
    """Environment of a process in the staged Python."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONHOME"}
    # Inductor's key hashes Python files only; a rebuilt kernel needs a new cache.
    cache = workspace.build / "inductor" / staged.build_hash
    kept.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    return kept


class _Processes:
    """Runs pytest on a file in a process of its own; several at once from as many threads."""

    def __init__(self, workspace: Workspace, staged: Staged | None) -> None:
        self._workspace, self._staged = workspace, staged
        # Idle servers, by whether they use one thread and whether they interpret Triton.
        self._idle: defaultdict[tuple[bool, bool], list[ForkServer]] = defaultdict(list)

    def close(self) -> None:
        for server in itertools.chain(*self._idle.values()):
            server.close()

    def run(self, test: str, pytest_args: list[str], output: Path | None = None) -> int:
        """Exit status; ``output`` is where stdout and stderr go if not where ours do."""
        repo = self._workspace.repo
        is_ours = test.startswith(STAGER_TESTS)
        folder = repo / ("tools" if is_ours else "test")
        args = [str(repo / test), f"--rootdir={folder}", "-p", "no:cacheprovider", "-q"]
        args += pytest_args
        if is_ours:
            env = {**os.environ, "PYTHONPATH": str(folder)}
            return _new_process(Path(sys.executable), args, folder, env, output)
        if self._staged is None:
            raise StageError("tests of the stack need a staged environment")
        env = environment(self._workspace, self._staged)
        # The current folder must not be importable: `torch` is next door.
        env["PYTHONSAFEPATH"] = "1"
        # Threads that spin while they wait keep those of the file beside them from running.
        env.setdefault("OMP_WAIT_POLICY", "passive")
        # A rank that dies of a signal says where it was.
        env.setdefault("PYTHONFAULTHANDLER", "1")
        one_thread = "test/distributed/" in test
        if one_thread:
            # As torchrun does: ranks that each spin on all cores crawl.
            env.setdefault("OMP_NUM_THREADS", "1")
        text = (repo / test.split("::")[0]).read_text()
        if _BEFORE_PYTORCH in text:
            return _new_process(self._staged.python, args, folder, env, output)
        interprets = _INTERPRETS in text
        env.pop("TRITON_INTERPRET", None)
        if interprets:
            env["TRITON_INTERPRET"] = "1"
        idle = self._idle[one_thread, interprets]
        server = idle.pop() if idle else ForkServer(self._staged.python, env)
        status = server.run(args, folder, output)
        if server.is_alive():
            idle.append(server)
        return status


def _new_process(
    python: Path,
    args: list[str],
    folder: Path,
    env: dict[str, str],
    output: Path | None,
) -> int:
    command = [str(python), "-m", "pytest", *args]
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(output.open("wb")) if output else None
        return subprocess.run(
            command, cwd=folder, env=env, stdout=file, stderr=file
        ).returncode


def _read(results: Path) -> list[_Test]:
    """The tests of a JUnit file; none if it was not written."""
    try:
        cases = ElementTree.parse(results).getroot().iter("testcase")
    except (FileNotFoundError, ElementTree.ParseError):
        return []
    found = []
    for case in cases:
        outcome = next((_OUTCOMES[c.tag] for c in case if c.tag in _OUTCOMES), "passed")
        if any(c.get("type") == "pytest.xfail" for c in case):
            outcome = "xfailed"
        # The class without its module: of upstream's files, which are not packages.
        names = (case.get("classname", "").split(".")[-1], case.get("name", ""))
        seconds = float(case.get("time", 0))
        found.append(_Test("::".join(filter(None, names)), outcome, seconds))
    return found


def _stager_tests(repo: Path) -> list[str]:
    folder = repo / STAGER_TESTS
    return [p.relative_to(repo).as_posix() for p in sorted(folder.glob("test_*.py"))]


def _locate(repo: Path, name: str) -> Path:
    for base in (Path.cwd(), repo):
        path = (base / name).resolve()
        if path.exists() and path.is_relative_to(repo):
            return path
    raise ArgumentError(
        f"no test file or folder {name!r} in the repository",
        hint="for example: test test/test_moe_mlp.py",
    )


def _flat(test: str) -> str:
    return test.split("::")[0].replace("/", ".").removesuffix(".py")
