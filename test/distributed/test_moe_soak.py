# Owner(s): ["oncall: distributed"]
"""Expert-parallel training for hours: routing drifts, ranks are killed, and training goes on.

    python test/distributed/test_moe_soak.py --seconds 3600

Four ranks train and save a checkpoint every few steps. Again and again one of them is killed at a
random moment. The others must fail with an error, and all start again from the last checkpoint.
Experts run away from home, by average loads and by the loads of a forward. A step that is run again
must have a loss with the same bits, and so must an undisturbed run from the first checkpoint to the
last. Memory, threads and file descriptors of a rank must not grow.
"""

import argparse
import ast
import datetime
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._moe.wire_bytes import count_wire_bytes
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ExpertParallel,
    ExpertPlacement,
    parallelize_module,
)


if "--seconds" in sys.argv:
    # A rank runs no tests, and the test imports take longer than torch itself.
    TestCase, slowTest = object, lambda function: function
else:
    from torch.testing._internal.common_utils import run_tests, slowTest, TestCase


RANKS, D, HIDDEN, E, K, TOKENS = 4, 32, 24, 16, 4, 64
INTERVAL = 20  # steps between checkpoints
# Seconds allowed for a collective, and for the other ranks to end after a kill.
TIMEOUT, DEADLINE = 60, 180
STYLES = (
    {"combine": "exact"},
    {"num_chunks": 3},
    {"token_switch": "hierarchical", "ranks_per_node": 2, "num_chunks": 2},
    {"capacity": RANKS * TOKENS},
)
# The layers use them in turn. Prices are fixed, because measured prices would change plans and bits.
PLACEMENTS = (
    {"slots_per_rank": 6, "every": 7, "copy_cost": 4.0},
    {"slots_per_rank": 6, "online": True, "copy_cost": 30.0},
)
# What the errors say after a rank was killed.
LOST = r"[Cc]onnection closed by peer|Connection reset by peer|Broken pipe|[Tt]imed out"
# Allowed growth of a rank after its first interval, because caches of allocators fill slowly.
GROWTH = {"MiB": 24, "threads": 0, "descriptors": 0}


# -- what a rank does


class Drifting(nn.MoE):
    """Tokens choose by a distribution that moves with the steps, from a few experts to all."""

    step = 0

    def route(self, input, topk_indices=None):
        place = torch.arange(E, dtype=torch.float32) - self.step / 7
        skew = -2 * (1 + torch.sin(torch.tensor(self.step / 50)))
        logits = self.router(input)
        wanted = skew * (place % E).sqrt()
        indices = (logits.detach() + wanted).topk(K, dim=1).indices
        return super().route(input, indices)


def used():
    """Memory, threads and open files of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def train(rank, folder, first, last):
    """Steps ``first`` to ``last``, from the checkpoint of ``first`` if there is one."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    model = nn.Sequential(*(Drifting(D, HIDDEN, E, K) for _ in STYLES))
    placements = [ExpertPlacement(**options) for options in PLACEMENTS]
    for i, style in enumerate(STYLES):
        style = ExpertParallel(placement=placements[i % len(placements)], **style)
        parallelize_module(model[i], mesh, style)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if first:
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
        dcp.load(state, checkpoint_id=f"{folder}/step{first}")
        set_state_dict(
            *(model, optimizer),
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        for placement, saved in zip(
            placements, torch.load(f"{folder}/step{first}/placements")
        ):
            placement.load_state_dict(saved)
    routers = [p for name, p in model.named_parameters() if "router" in name]
    log, base = Path(f"{folder}/log{rank}"), None
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x, target = torch.randn(2, TOKENS, D, generator=generator)
        for layer in model:
            layer.step = step
        with count_wire_bytes(
            *(layer for p in placements for layer in p.layers)
        ) as wire:
            loss = (x + model(x) - target).square().sum() / RANKS
            loss.backward()
        total = loss.detach()
        dist.all_reduce(total)
        for p in routers:
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        for placement in placements:
            placement.step()
        row = {"step": step, "loss": total.item().hex()}
        row["fetches"] = wire.messages["experts"]["experts"]
        if (step + 1) % INTERVAL == 0:
            state = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
            dcp.save(state, checkpoint_id=f"{folder}/step{step + 1}.part")
            saved = [placement.state_dict() for placement in placements]
            if rank == 0:
                torch.save(saved, f"{folder}/step{step + 1}.part/placements")
                os.rename(f"{folder}/step{step + 1}.part", f"{folder}/step{step + 1}")
            dist.barrier()
            now = used()
            base = base or now
            row["grown"] = {name: now[name] - base[name] for name in now}
        with log.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def run_rank(rank, folder, life, first, last, loses):
    """Trains. With ``loses``, an error of a lost rank ends the training, and other errors are raised."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store{life}", RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    try:
        train(rank, folder, first, last)
    except RuntimeError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        print(f"rank {rank}: {text}", flush=True)
        if not loses or not re.search(LOST, text):
            raise
    dist.destroy_process_group()


# -- what the parent of the ranks does


def last_checkpoint(folder):
    steps = [path.name[4:] for path in Path(folder).glob("step*")]
    return max((int(step) for step in steps if step.isdigit()), default=0)


class Soak:
    """Lives of four ranks, each from the last checkpoint until one of them is killed."""

    def __init__(self, folder):
        self.folder, self.lives, self.problems = folder, 0, []

    def live(self, folder, first, last, seconds=None, victim=None):
        """Forks the ranks; kills ``victim`` after ``seconds``, or waits until they reach ``last``."""
        pids, self.lives = [], self.lives + 1
        killed = None
        for rank in range(RANKS):
            pid = os.fork()
            if pid == 0:
                out = os.open(
                    f"{folder}/out{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND
                )
                os.dup2(out, 1), os.dup2(out, 2)
                run_rank(rank, folder, self.lives, first, last, victim is not None)
                raise SystemExit
            pids.append(pid)
        start, codes = time.monotonic(), {}
        ending = None  # time of the kill or of the first exit
        while len(codes) < RANKS:
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    seen, status = os.waitpid(pid, os.WNOHANG)
                    if seen:
                        codes[rank] = os.waitstatus_to_exitcode(status)
            now = time.monotonic()
            if ending is None and codes:
                ending = now
            # Not before there is a checkpoint to start from.
            if (
                victim is not None
                and ending is None
                and now - start > seconds
                and last_checkpoint(folder) > first
            ):
                os.kill(pids[victim], signal.SIGKILL)
                killed, ending = victim, now
            elif ending is not None and now - ending > DEADLINE:
                self.problems.append(
                    f"life {self.lives}: ranks {sorted(codes)} ended only"
                )
                for rank, pid in enumerate(pids):
                    if rank not in codes:
                        os.kill(pid, signal.SIGKILL)
                ending = math.inf  # Said once.
            time.sleep(0.05)
        if victim is not None and codes[victim] != -signal.SIGKILL:
            self.problems.append(f"life {self.lives}: ended before the kill")
        for rank, code in codes.items():
            if code and rank != killed:
                self.problems.append(
                    f"life {self.lives}: rank {rank} ended with {code}"
                )

    def rows(self, folder):
        return [
            [
                json.loads(line)
                for line in Path(f"{folder}/log{rank}").read_text().splitlines()
            ]
            for rank in range(RANKS)
        ]

    def check(self, folder, losses):
        """Bits of a step are the same whenever it was run, and nothing grows."""
        grown = dict.fromkeys(GROWTH, 0)
        for rank, rows in enumerate(self.rows(folder)):
            for row in rows:
                want = losses.setdefault(row["step"], row["loss"])
                if row["loss"] != want:
                    self.problems.append(f"step {row['step']}, rank {rank}: other loss")
                for name, value in row.get("grown", {}).items():
                    grown[name] = max(grown[name], value)
        for name, most in GROWTH.items():
            if grown[name] > most:
                self.problems.append(f"a rank grew by {grown[name]} {name}")
        return grown


def soak(seconds, seed, life_seconds=60.0):
    """What happened: lives, steps, steps that were run again, and problems."""
    draw, folder = random.Random(seed), tempfile.mkdtemp(prefix="moe_soak_")
    run, end = Soak(folder), time.monotonic() + seconds
    # A busy machine gets more time, until there are steps to compare; a failing run does not.
    while time.monotonic() < end or (
        last_checkpoint(folder) <= INTERVAL and not run.problems
    ):
        first = last_checkpoint(folder)
        wait = draw.uniform(0.2, 1) * life_seconds
        run.live(folder, first, 10**9, wait, draw.randrange(RANKS))
        for path in Path(folder).glob("step*"):
            step = path.name[4:]
            # Removes partial checkpoints, and all but the first and the last.
            old = step.isdigit() and INTERVAL < int(step) < last_checkpoint(folder)
            if not step.isdigit() or old:
                shutil.rmtree(path)
    losses = {}
    grown = run.check(folder, losses)
    ran = len(run.rows(folder)[0])
    # The undisturbed run has the rest of twice the time.
    calm, last = tempfile.mkdtemp(prefix="moe_soak_"), last_checkpoint(folder)
    shutil.copytree(f"{folder}/step{INTERVAL}", f"{calm}/step{INTERVAL}")
    run.live(calm, INTERVAL, last)
    calm_grown = run.check(calm, losses)
    rows = run.rows(calm)[0]
    compared, fetches = len(rows), sum(row["fetches"] for row in rows)
    if compared != last - INTERVAL:
        run.problems.append(
            f"the undisturbed run had {compared} steps of {last - INTERVAL}"
        )
    row = {
        "lives": run.lives,
        "steps": ran,
        "again": ran - len(losses),
        "compared": compared,
        "fetches": fetches,
    }
    row |= {"grown": grown, "undisturbed": calm_grown, "problems": run.problems}
    if run.problems:
        row["output"] = [
            p.read_text()[-3000:] for p in sorted(Path(folder).glob("out*"))
        ]
    shutil.rmtree(folder), shutil.rmtree(calm)
    return row


# Lives whose ranks fail in different ways. Only the first one is right.
FAULTS = """
import os, sys, time
here, folder = sys.argv[1:]
sys.path.insert(0, here)
sys.argv = ["soak", "--seconds", "0"]
import test_moe_soak as soak

def fails(text, after):
    def train(rank, folder, first, last):
        # All ranks have met; what a kill waits for.
        os.makedirs(f"{folder}/step20", exist_ok=True)
        time.sleep(after)
        raise RuntimeError(text)
    return train

run = soak.Soak(folder)
for text, after, seconds, victim in (
    ("Connection closed by peer", 3, 0, 1),
    ("shapes differ", 3, 0, 1),
    ("Connection closed by peer", 0, 60, 1),
    ("Connection closed by peer", 0, None, None),
):
    soak.train = fails(text, after)
    life = f"{folder}/{run.lives}"
    os.mkdir(life)
    run.live(life, 0, 10**9, seconds, victim)
print(run.problems)
"""


class TestSoak(TestCase):
    @slowTest
    def test_other_failures_are_seen(self):
        with tempfile.TemporaryDirectory() as folder:
            here = os.path.dirname(os.path.abspath(__file__))
            done = subprocess.run(
                [sys.executable, "-c", FAULTS, here, folder],
                capture_output=True,
                text=True,
            )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        wanted = [f"life 2: rank {rank} ended with 1" for rank in (0, 2, 3)]
        wanted.append("life 3: ended before the kill")
        wanted += [f"life 4: rank {rank} ended with 1" for rank in range(RANKS)]
        self.assertEqual(sorted(ast.literal_eval(done.stdout)), wanted)

    @slowTest
    def test_training_goes_on_where_it_was(self):
        command = [sys.executable, os.path.abspath(__file__), "--seconds"]
        seconds = os.environ.get("MOE_SOAK_SECONDS", "6")
        done = subprocess.run(
            [*command, seconds, "--life", "4" if seconds == "6" else "60"],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        row = json.loads(done.stdout)
        self.assertGreater(row["compared"], 0)
        self.assertGreater(row["fetches"], 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float)
    parser.add_argument(
        "--life", type=float, default=60.0, help="most seconds until a kill"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    row = soak(args.seconds, args.seed, args.life)
    print(json.dumps(row))
    return 1 if row["problems"] else 0


if __name__ == "__main__":
    if "--seconds" in sys.argv:
        raise SystemExit(main())
    run_tests()
