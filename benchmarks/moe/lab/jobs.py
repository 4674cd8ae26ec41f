"""Runs the parts of a run, each in its own process group and with a time limit.

A part that hangs, dies or breaks its CUDA context loses only its own result. It is a
fork of this process, which has the common imports and must never touch the device, or a command.
"""

import ctypes
import dataclasses
import faulthandler
import json
import math
import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from measure import write_json


_EXCERPT = 600  # characters at either end
_POLL_S = 0.05
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG: a run that is killed leaves nothing behind
_LIBC = ctypes.CDLL(None)

Save = Callable[[Mapping[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class Job:
    """One part.

    Attributes:
        name: of the part, and of its files.
        limit_s: seconds until its process group is ended.
        run: a function for a fork, called with a function that writes the result so far and at the
            end; or a command, which writes its result itself.
        env: environment of a command, added to this process's.
    """

    name: str
    limit_s: float
    run: Callable[[Save], object] | list[str]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def path(self, folder: pathlib.Path, suffix: str) -> pathlib.Path:
        return folder / (self.name.replace("/", "_").replace(" ", "_") + suffix)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a part ended, "ok" or the reason why not, and what it had written by then."""

    job: Job
    status: str
    seconds: float
    result: Any
    log: str

    @property
    def excerpt(self) -> str:
        """Both ends of the log: a traceback of Python ends, and one of a fault begins, with the place."""
        if len(self.log) <= 2 * _EXCERPT:
            return self.log
        return f"{self.log[:_EXCERPT]}\n...\n{self.log[-_EXCERPT:]}"


def _child(job: Job, folder: pathlib.Path) -> None:
    """Runs a job in the fork; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        log = os.open(job.path(folder, ".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(log, descriptor)
            setattr(sys, name, os.fdopen(descriptor, "w", buffering=1, closefd=False))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if isinstance(job.run, list):
            os.execvpe(job.run[0], job.run, {**os.environ, **job.env})
        # Logs where it was when it died or when time was up.
        faulthandler.enable(file=2)
        faulthandler.dump_traceback_later(0.8 * job.limit_s, file=2)
        path = job.path(folder, ".json")
        result = job.run(lambda fields: write_json(fields, path))
        if result is not None:
            write_json(result, path)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _start(job: Job, folder: pathlib.Path) -> int:
    for suffix in (".json", ".log"):
        job.path(folder, suffix).unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _child(job, folder)
    return pid


def _has_ended(pid: int) -> bool:
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, pid, flags) is not None


def _end_group(pid: int) -> int:
    """Ends what is left of the group of ``pid``, and returns its wait status."""
    for kill in (os.killpg, os.kill):  # there is no group before the child's first call
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return os.waitpid(pid, 0)[1]


def _outcome(job: Job, folder: pathlib.Path, wait: int | None, seconds: float):
    """``wait`` is the wait status, None when time was up."""
    status = f"longer than {job.limit_s:.0f} s"
    if wait is not None:
        code = os.waitstatus_to_exitcode(wait)
        status = "ok" if code == 0 else f"exit status {code}"
        if code < 0:
            status = f"died of {signal.Signals(-code).name}"
    path, log = job.path(folder, ".json"), job.path(folder, ".log")
    result = json.loads(path.read_text()) if path.exists() else None
    text = log.read_text(errors="replace") if log.exists() else ""
    return Outcome(job, status, seconds, result, text)


def run_jobs(
    jobs: Iterable[Job],
    folder: pathlib.Path,
    parallel: int = 1,
    end: float = math.inf,
) -> Iterator[Outcome]:
    """Runs ``jobs`` in order, some at a time, and yields their outcomes as they end.

    Args:
        folder: for the result and the log of each.
        parallel: how many run at a time.
        end: time of the monotonic clock when running jobs are ended and no other begins.
    """
    waiting, running = list(jobs), {}
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job, left = waiting.pop(0), end - time.monotonic()
                if left < 1:
                    yield Outcome(job, "not run: no time was left", 0, None, "")
                    continue
                job = dataclasses.replace(job, limit_s=min(job.limit_s, left))
                running[_start(job, folder)] = (job, time.monotonic())
            for pid, (job, begin) in list(running.items()):
                seconds = time.monotonic() - begin
                ended = _has_ended(pid)
                if ended or seconds > job.limit_s:
                    wait = _end_group(pid)
                    del running[pid]
                    yield _outcome(job, folder, wait if ended else None, seconds)
            time.sleep(_POLL_S)
    finally:
        for pid in running:
            _end_group(pid)
