"""What tests of faults share: their ranks are no tests, and import little."""

import argparse
import contextlib
import datetime
import faulthandler
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist


STARTUP = 120.0  # seconds


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def init_ranks(rank: int, world_size: int, port: int, seconds: float) -> None:
    """Joins the gloo group of this machine, with a timeout of ``seconds``.

    Before that the ranks wait for each other longer, as one may start late on a busy machine.
    """
    start, timeout = (datetime.timedelta(seconds=s) for s in (STARTUP, seconds))
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timeout=start)
    if store.add("started", 1) == world_size:
        store.set("all_started", "")
    store.wait(["all_started"], start)
    store.set_timeout(timeout)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
    )


def fork_ranks(count, run_rank, logs) -> list[int]:
    """Process ids of ranks that call ``run_rank(rank)`` and write to the files ``logs``."""
    pids = []
    for rank, log in zip(range(count), logs, strict=True):
        pid = os.fork()
        if pid == 0:
            os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
            faulthandler.enable()
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            run_rank(rank)
            # Leaves all frames, so that Python shuts down as in any program.
            raise SystemExit
        pids.append(pid)
    return pids


def forked(count, run_rank, wait) -> tuple:
    """What ``wait(pids)`` returns for ranks as of ``fork_ranks``, and what each rank wrote."""
    with contextlib.ExitStack() as stack:
        # Unnamed files, because a rank that exits through these frames must not remove them.
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count)]
        result = wait(fork_ranks(count, run_rank, logs))
        paths = [Path(f"/proc/self/fd/{log.fileno()}") for log in logs]
        return result, [path.read_text(errors="replace") for path in paths]


def wait_for_ranks(pids: list[int], seconds: float) -> list[int | None]:
    """Exit codes; None for a rank that hangs, which says where in its log and is killed."""
    codes, end = {}, time.monotonic() + seconds
    while len(codes) < len(pids) and time.monotonic() < end:
        for rank, pid in enumerate(pids):
            seen, status = (0, 0) if rank in codes else os.waitpid(pid, os.WNOHANG)
            if seen:
                codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    hang = [pid for rank, pid in enumerate(pids) if rank not in codes]
    for number in (signal.SIGUSR1, signal.SIGKILL) if hang else ():
        for pid in hang:
            os.kill(pid, number)
        time.sleep(1)
    for pid in hang:
        os.waitpid(pid, 0)
    return [codes.get(rank) for rank in range(len(pids))]


def run_seeds(description, run_seed) -> int:
    """Prints ``run_seed(seed)``, a line of JSON a seed. Returns 1 if one has problems."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "COUNT"))
    parser.add_argument("--log", type=Path, help="also write the lines to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Or each rank imports it.
    importlib.import_module("torch._dynamo")
    bad = 0
    for seed in range(args.seeds[0], sum(args.seeds)):
        row = run_seed(seed)
        bad += bool(row["problems"])
        print(json.dumps(row), flush=True)
        if args.log:
            with args.log.open("a") as log:
                log.write(json.dumps(row) + "\n")
    return 1 if bad else 0


def check_seeds(test, file, count, timeout=None, **env) -> None:
    """Fails unless ``run_seeds`` of the program ``file`` finds no problem with ``count`` seeds."""
    done = subprocess.run(
        [sys.executable, os.path.abspath(file), "--seeds", "0", str(count)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
    )
    test.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    test.assertEqual(len(done.stdout.splitlines()), count)
