# Owner(s): ["oncall: distributed"]

"""Faults at random moments of expert-parallel training.

    python test/distributed/test_moe_random_faults.py --seeds 0 200 [--log FILE]

A seed determines how the layers communicate, and what happens to which rank and when. In time, all
ranks must finish or fail with an error that says what was lost, and must exit Python normally.
Ranks are forked from a process that has imported torch, because the import takes longest.
"""

import contextlib
import datetime
import json
import os
import random
import re
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ExpertParallel, parallelize_module


sys.path.append(os.path.dirname(os.path.abspath(__file__)))

from moe_fault_ranks import (  # noqa: E402
    check_seeds,
    forked,
    free_port,
    init_ranks,
    run_seeds,
)


if "--seeds" in sys.argv:
    # Ranks run no tests, and the test imports take longer than torch itself.
    TestCase = object

    def slowTest(test):
        return test

else:
    from torch.testing._internal.common_utils import run_tests, slowTest, TestCase


RANKS, STEPS = 4, 10
D, HIDDEN, E, K, TOKENS = 16, 8, 8, 2, 24
# Seconds: timeout of collectives from the step of a fault that makes them wait; length of a pause, which
# must not fail a collective; and limit of a whole seed, without the time that ranks wait for a core. To
# exit Python, a rank needs more than one second of a core.
TIMEOUT, PAUSE, DEADLINE = 5.0, 6.0, 90.0
# What happens to one rank: it is killed, stopped for good, stopped for a pause, busy for longer than
# the timeout, or has no tokens.
FAULTS = ("kill", "stop", "pause", "idle", "empty")
SWITCHES = {
    "flat": {},
    "two chunks": {"num_chunks": 2},
    "three chunks, capacity": {"num_chunks": 3, "capacity": 4 * TOKENS},
    "hierarchical": {"token_switch": "hierarchical", "ranks_per_node": 2},
    "hierarchical, two chunks": {
        "token_switch": "hierarchical",
        "ranks_per_node": 2,
        "num_chunks": 2,
    },
}


class Plan:
    """What a seed says."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.seed = seed
        self.fault = FAULTS[seed % len(FAULTS)]
        self.switch = draw.choice(list(SWITCHES))
        self.victim = draw.randrange(RANKS)
        self.step = draw.randrange(1, STEPS - 4)
        self.moment = draw.random()  # of that step
        # Before the fault, ranks that share few cores may be further apart than TIMEOUT.
        self.waits = self.fault in ("stop", "idle")

    def describe(self) -> str:
        return f"{self.fault} rank {self.victim} in step {self.step}, {self.switch}"


# -- what a rank does


def say(**fields: object) -> None:
    # Others write to stdout too, so the report is on its own line.
    os.write(1, f"\n{json.dumps(fields)}\n".encode())


def strike(plan: Plan, step_seconds: float) -> threading.Timer:
    """Starts the fault at a moment of this step that does not depend on the main thread."""

    def act() -> None:
        say(struck=time.time())
        name = {"kill": "SIGKILL", "idle": "SIGALRM"}.get(plan.fault, "SIGSTOP")
        os.kill(os.getpid(), getattr(signal, name))

    timer = threading.Timer(plan.moment * step_seconds, act)
    timer.start()
    return timer


def train(rank: int, plan: Plan) -> None:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    torch.manual_seed(plan.seed)
    model = nn.Sequential(*(nn.MoE(D, HIDDEN, E, K) for _ in range(2)))
    styles = {name: ExpertParallel(**SWITCHES[plan.switch]) for name in ("0", "1")}
    parallelize_module(model, mesh, styles)
    optimizer = torch.optim.AdamW(model.parameters())
    routers = [p for name, p in model.named_parameters() if "router" in name]
    generator = torch.Generator().manual_seed(rank)
    seconds, timer = 0.0, None
    for step in range(STEPS):
        start = time.monotonic()
        if plan.waits and step == plan.step:
            for group in dist.distributed_c10d._world.pg_map:
                dist.set_timeout(datetime.timedelta(seconds=TIMEOUT), group)
        struck = rank == plan.victim and step >= plan.step
        tokens = 0 if struck and plan.fault == "empty" else TOKENS
        if struck and plan.fault != "empty" and timer is None:
            timer = strike(plan, seconds)
        model(torch.randn(tokens, D, generator=generator)).square().sum().backward()
        for p in routers:
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.monotonic() - start
    say(finished=[p.sum().item() for p in routers])


def run_rank(rank: int, port: int, plan: Plan) -> None:
    signal.signal(signal.SIGALRM, lambda *_: time.sleep(2.5 * TIMEOUT))
    try:
        init_ranks(rank, RANKS, port, DEADLINE)
        train(rank, plan)
    except Exception as e:
        error = "; ".join([f"{type(e).__name__}: {e}", *getattr(e, "__notes__", [])])
        say(error=error, at=time.time())
    dist.destroy_process_group()
    say(destroyed=True)
    # Exits normally: a thread that still waits for a dead rank would block the exit.


# -- what the parent of the ranks does


def waited(pid: int) -> float:
    """Total seconds that the threads of a process were ready to run but had no core."""
    total = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # It has ended.
            total += int(stat.read_text().split()[1])
    return total / 1e9


def wait_for_all(pids: list[int], plan: Plan) -> tuple[list[int | None], float]:
    """Exit codes, and seconds without a core. A rank that does not end is killed and has code None."""
    codes: dict[int, int] = {}
    end, wake, no_core = time.monotonic() + DEADLINE, None, 0.0
    while len(codes) < RANKS and time.monotonic() < end + no_core:
        no_core = max(no_core, sum(map(waited, pids)))
        for rank, pid in enumerate(pids):
            if rank in codes:
                continue
            seen, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if seen and os.WIFSTOPPED(status):
                wake = time.monotonic() + PAUSE
            elif seen:
                codes[rank] = os.waitstatus_to_exitcode(status)
        others = len(codes.keys() - {plan.victim}) == RANKS - 1
        if plan.fault == "pause" and wake is not None and time.monotonic() > wake:
            os.kill(pids[plan.victim], signal.SIGCONT)
            wake = None
        elif plan.fault == "stop" and wake is not None and others:
            os.kill(pids[plan.victim], signal.SIGKILL)
            wake = None
        time.sleep(0.05)
    for rank, pid in enumerate(pids):
        if rank not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [codes.get(rank) for rank in range(RANKS)], no_core


LOST = "connection|timed? ?out|closed|reset|broken pipe"
WHERE = r"expert parallel layer \d+ \(MoE\): .+ failed at level '\w+', group .+ of ranks .+, on rank"


def problems(
    plan: Plan, codes: list[int | None], reports: list[dict], no_core: float
) -> list[str]:
    """What went wrong. ``no_core`` is the seconds in which ranks had no core."""
    found = []
    survived = plan.fault in ("pause", "empty")
    # The victim may finish if the fault comes after all that the others need.
    late = "finished" in reports[plan.victim]
    struck = reports[plan.victim].get("struck")
    for rank, (code, report) in enumerate(zip(codes, reports)):
        gone = rank == plan.victim and plan.fault in ("kill", "stop") and not late
        # The last step may have ended while the timer ran.
        ends = {-signal.SIGKILL} if gone else {0}
        if rank == plan.victim and late and plan.fault in ("kill", "stop") and struck:
            ends.add(-signal.SIGKILL)
        if code not in ends:
            found.append(f"rank {rank} ended with {code}")
        if code != 0:
            continue
        if "destroyed" not in report:
            found.append(f"rank {rank} destroyed no process group")
        if "finished" in report:
            if not survived and not late:
                found.append(f"rank {rank} finished without rank {plan.victim}")
            elif report["finished"] != next(
                r["finished"] for r in reports if "finished" in r
            ):
                found.append(f"rank {rank} has other routers")
            continue
        error = report.get("error", "nothing")
        lost = struck and re.search(LOST, error, re.IGNORECASE)
        if survived or late or not lost:
            found.append(f"rank {rank} says {error}")
        elif "failed at level" in error and not re.search(WHERE, error):
            found.append(f"rank {rank} does not say where: {error}")
        elif rank != plan.victim and report["at"] - struck > 2 * TIMEOUT + no_core:
            found.append(f"rank {rank} took {report['at'] - struck:.1f} s: {error}")
    return found


def run_seed(seed: int) -> dict[str, object]:
    """Forks the ranks of a seed. Returns what happened, in the parent."""
    plan, port, start = Plan(seed), free_port(), time.monotonic()
    run = partial(run_rank, port=port, plan=plan)
    (codes, no_core), texts = forked(RANKS, run, partial(wait_for_all, plan=plan))
    reports = [{} for _ in texts]
    for report, text in zip(reports, texts):
        for line in re.findall("(?m)^{.*}$", text):
            report |= json.loads(line)
    found = problems(plan, codes, reports, no_core)
    struck = reports[plan.victim].get("struck")
    waits = [r["at"] - struck for r in reports if "at" in r and struck]
    row: dict[str, object] = {"seed": seed, "what": plan.describe()}
    row["errors"] = sum("error" in r for r in reports)
    row["slowest_error_s"] = round(max(waits), 2) if waits else None
    row["seconds"] = round(time.monotonic() - start, 2)
    row["no_core_s"] = round(no_core, 2)
    row["problems"] = found
    if found:
        row["output"] = texts
    return row


class TestRandomFaults(TestCase):
    # test_moe_faults.py has each fault once, at a moment that counts.
    @slowTest
    def test_all_ranks_finish_or_say_what_was_lost(self):
        count = len(FAULTS)
        check_seeds(self, __file__, count, timeout=count * DEADLINE)


if __name__ == "__main__":
    if "--seeds" in sys.argv:
        raise SystemExit(run_seeds(__doc__, run_seed))
    run_tests()
