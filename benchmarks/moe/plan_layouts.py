"""Is the plan right? Every layout that the planner can choose, run on gloo ranks and ranked.

    python benchmarks/moe/plan_layouts.py [--ranks 2] [--rounds 7] [--models qwen3_moe ...] [--out FILE.json]

Small transformers models with random weights; one thread per rank. All layouts of a model exist
at once and take turns, so that other jobs on the machine disturb all alike. A row has the step's
seconds (median and fastest of the slowest rank) and peak bytes, each beside the planned value.
``noise`` is the difference between the halves of a layout's rounds: smaller differences mean nothing.
``cpu_seconds`` is the process time of a rank, which other jobs disturb less. Rows are sorted by
it, and the profile is measured with that clock, so ``predicted_seconds`` predicts it.
"""

import itertools
import os
import pathlib
import statistics
import sys
import time


_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE / "clients")]

import report
from packages import require_transformers
from train_anywhere import build, MODELS

import torch
import torch.distributed as dist
from torch.distributed._tools import moe_parallelize
from torch.distributed._tools.moe_config import MoEConfig
from torch.distributed._tools.moe_machine import machine_profile
from torch.distributed._tools.moe_plan import plan
from torch.distributed._tools.moe_trace import trace
from torch.distributed.tensor import DTensor

import measure


NAMES = ("ep", "tp", "micro_batch", "recompute")


class Run:
    """A model with an applied layout, and its training step."""

    def __init__(self, name: str, found, adapter, ids: torch.Tensor) -> None:
        self.found, self.ids = found, ids
        self.model = moe_parallelize.apply_plan(build(name), found, adapter=adapter)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.cpu: list[float] = []
        self.step()

    def step(self) -> None:
        start = time.process_time()
        micros = self.found.micro_batches(self.ids)
        for micro in micros:
            (self.model(input_ids=micro, labels=micro).loss / len(micros)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.cpu.append(time.process_time() - start)

    def held(self) -> int:
        state = (s for p in self.optimizer.state.values() for s in p.values())
        tensors = itertools.chain(self.model.parameters(), state)
        local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
        return sum(t.numel() * t.element_size() for t in local)


def measure_model(name: str, batch: int, seq: int, rounds: int, p) -> list[dict]:
    from transformers_parallel import ADAPTER

    ids = torch.randint(2048, (batch, seq), generator=torch.Generator().manual_seed(0))
    model = build(name)
    modules = (
        moe_parallelize.expert_names(model, ADAPTER),
        moe_parallelize.block_names(model, ADAPTER),
    )
    tp_plan = moe_parallelize.default_tp_plan(model)
    traced = trace(model, p, seq, *modules, ADAPTER, None, tp_plan)
    config = MoEConfig.from_module(model)

    def planned(**fixed):
        fixed |= {} if tp_plan else {"tp": 1}
        return plan(
            config, p, dist.get_world_size(), global_batch=batch, seq=seq, traced=traced,
            dtypes=("fp32",), top=1000, fsdp=True, pp=1, kernel="moe_mlp", **fixed,
        )  # fmt: skip

    layouts = [x for _, x in planned().best]
    plans = [planned(**{n: getattr(x, n) for n in NAMES}) for x in layouts]
    runs = [Run(name, found, ADAPTER, ids) for found in plans]
    peaks = [
        measure.over_ranks([run.held() + measure.peak_bytes(run.step)])[0]
        for run in runs
    ]
    seconds = measure.slowest_seconds(
        {i: r.step for i, r in enumerate(runs)}, rounds=rounds, warmup=1
    )
    cpu = measure.over_ranks([statistics.median(run.cpu[-rounds:]) for run in runs])
    rows = []
    for i, found in enumerate(plans):
        times = seconds[i]
        halves = [statistics.median(times[k::2]) for k in (0, 1)]
        rows.append({
            "model": name,
            **{n: getattr(found.layout, n) for n in NAMES},
            "chunks": found.chunks,
            "planned": i == 0,
            "seconds": measure.spread(times),
            "fastest": min(times),
            "cpu_seconds": cpu[i],
            "predicted_seconds": found.step.seconds,
            "seconds_error": found.step.seconds / cpu[i] - 1,
            "noise": abs(halves[0] / halves[1] - 1),
            "peak_bytes": peaks[i],
            "predicted_bytes": found.memory.total,
            "bytes_error": found.memory.total / peaks[i] - 1,
        })  # fmt: skip
    least, best = min(row["seconds"][0] for row in rows), min(cpu)
    for row in rows:
        row["of_best"] = row["seconds"][0] / least
        row["cpu_of_best"] = row["cpu_seconds"] / best
    return sorted(rows, key=lambda row: row["cpu_of_best"])


def measure_rank(name: str, batch: int, seq: int, rounds: int) -> dict:
    require_transformers()
    p = machine_profile(cache=False, clock="process")
    load = os.getloadavg()[0]
    rows = measure_model(name, batch, seq, rounds, p)
    loads = [load, os.getloadavg()[0]]
    return {
        "rows": rows,
        "machine": {"model": name, "load": loads, "profile": p.to_json()},
    }


def main() -> None:
    args = report.parse(__doc__, ranks=2, rounds=7, batch=4, seq=256, models=MODELS)
    rows, machines = [], []
    for name in args.models:
        call = (name, args.batch, args.seq, args.rounds)
        found = measure.on_gloo_ranks(args.ranks, measure_rank, *call)[0]
        rows, machines = rows + found["rows"], [*machines, found["machine"]]
        settings = {"ranks": args.ranks, "batch": args.batch, "seq": args.seq}
        measure.save(args.out, **settings, rows=rows, machines=machines)
    columns = ("model", *NAMES, "seconds", "noise", "cpu_seconds", "predicted_seconds")
    report.show("Layouts, best first", rows, (*columns, "cpu_of_best", "bytes_error"))


if __name__ == "__main__":
    main()
