"""What overlap would gain in an expert-parallel layer: simulated from measured parts.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/moe/ep_overlap.py [--out FOLDER]

Every part of the forward (dispatch with routing, experts, combine, shared experts) is
timed alone, per chunk, as medians over rounds, after a barrier, and the slowest rank
counts. Two queues, one for communication and one for computation, then give the time
under a schedule. Beside it: what the two schedules take when they run here, where
communication and computation share the same cores.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._moe.all_to_all import TokenSwitchAllToAll
from torch.distributed._moe.schedule import (
    OverlapSchedule,
    PartSeconds,
    simulated_seconds,
)
from torch.distributed._token_switch import TokenSwitch

from measure import provenance


def _seconds(function: Callable[[], object], rounds: int) -> tuple[float, object]:
    """Median over rounds of the slowest rank's seconds, and the last result."""
    times, result = [], None
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        result = function()
        spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        times.append(spent.item())
    return statistics.median(times[1:]), result


@torch.no_grad()
def measure_parts(
    schedule: OverlapSchedule,
    switch: TokenSwitch,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Callable[[Tensor, Tensor, Tensor, int | None], Tensor],
    shared: Callable[[], Tensor] | None = None,
    rounds: int = 7,
) -> PartSeconds:
    """Seconds of every part of a forward, each alone. Collective.

    Args:
        schedule: gives the number of chunks.
        switch: as for the schedule; so are the other tensors and functions.
        rounds: measured rounds of each part, after one that is not.
    """
    chunks = schedule.num_chunks
    dispatch, compute, combine = [], [], []
    for part in zip(*(t.tensor_split(chunks) for t in (x, ids, weights))):

        def send(part=part):
            routing = switch.create_routing(part[1], layout="flat")
            return routing, switch.dispatch(routing, part[0], part[2])

        seconds, (routing, received) = _seconds(send, rounds)
        dispatch.append(seconds)
        num_slots = getattr(switch, "num_slots", None)
        num_rows = None if num_slots is None else num_slots(routing)
        rows, row_weights, row_ids = received
        args = (rows, row_ids, row_weights, num_rows)
        seconds, rows = _seconds(functools.partial(experts, *args), rounds)
        compute.append(seconds)
        send_back = functools.partial(switch.combine, routing, rows)
        combine.append(_seconds(send_back, rounds)[0])
    alone = _seconds(shared, rounds)[0] if shared else 0.0
    return PartSeconds(tuple(dispatch), tuple(compute), tuple(combine), alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("T", 2048), ("D", 1024), ("F", 512), ("E", 32), ("K", 4)):
        parser.add_argument(f"-{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=pathlib.Path, help="folder for the JSON")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(rank)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).bfloat16()

    x = randn(args.T, args.D)
    ids = torch.rand(args.T, args.E, generator=g).topk(args.K, dim=1).indices
    weights = torch.rand(args.T, args.K, generator=g)
    local = args.E // ranks
    w_in = randn(local, 2 * args.F, args.D) * args.D**-0.5
    w_out = randn(local, args.D, args.F) * args.F**-0.5
    one_in, one_out = randn(1, 2 * args.F, args.D), randn(1, args.D, args.F)
    nobody = torch.zeros(args.T, 1, dtype=torch.int64)
    ones = torch.ones(args.T, 1)
    switch = TokenSwitchAllToAll(dist.group.WORLD, args.E)

    def experts(
        rows: Tensor, row_ids: Tensor, row_weights: Tensor, num_rows: int | None
    ) -> Tensor:
        return F.moe_mlp(rows, row_ids, row_weights, w_in, w_out, num_rows=num_rows)

    def shared() -> Tensor:
        return F.moe_mlp(x, nobody, ones, one_in, one_out)

    rows = []
    for chunks in args.chunks:
        for where in ("dispatch", "combine"):
            schedule = OverlapSchedule(chunks, where)
            operands = (switch, x, ids, weights, experts, shared)
            parts = measure_parts(schedule, *operands, args.rounds)
            with torch.no_grad():
                here, _ = _seconds(lambda: schedule(*operands), args.rounds)
            predicted = simulated_seconds(schedule, parts)
            rows.append(
                {
                    "chunks": chunks,
                    "shared": where,
                    "sequential_ms": 1e3 * parts.total(),
                    "simulated_ms": 1e3 * predicted,
                    "simulated_gain": parts.total() / predicted,
                    "measured_here_ms": 1e3 * here,
                    "parts_s": dataclasses.asdict(parts),
                }
            )
            if rank == 0:
                shown = {k: v for k, v in rows[-1].items() if k != "parts_s"}
                values = (f"{v:.4g}" if type(v) is float else v for v in shown.values())
                print(*(f"{name} {v} " for name, v in zip(shown, values)))
    if rank == 0 and args.out:
        shapes = {name: getattr(args, name) for name in "TDFEK"}
        result = {
            "provenance": provenance(),
            "ranks": ranks,
            "tokens_per_rank": shapes,
            "rounds": args.rounds,
            "rows": rows,
        }
        text = json.dumps(result, indent=1) + "\n"
        (args.out / "ep_overlap.json").write_text(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
