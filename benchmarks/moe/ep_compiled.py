"""Compiled expert-parallel layers over a limited link: chunks against one, and the model's answer.

    python benchmarks/moe/ep_compiled.py [--link-mb-per-s 50 25] [--out FOLDER]

Two gloo ranks, one thread each, forward. The kernel limits the link: it paces the data that leaves
the sockets of gloo (``SO_MAX_PACING_RATE``), so rows travel at that rate and take no core. Inductor
compiles sequential and chunked layers, the latter with the overlap scheduler and the cost
model's estimates; they take turns in every round.

Prediction: ``moe_calibration`` measures products and the cores' part of messages in process time,
and start and rate of the limited link by the clock;
``moe_layer_plan.layer_chunks`` gives the seconds. On a machine with other jobs a rank waits for its
core. So the rounds also time the experts alone; their clock time over their process
time, ``neighbours``, slows the cores of the model.
Choose links that are as slow as the experts then are.
"""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable

from ep_overlap import Layer, limit_links
from report import parse, show
from shapes import COMPILED_OVERLAP_SHAPE as SHAPE, Shape

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._moe.all_to_all import TokenSwitchAllToAll
from torch.distributed._moe.overlap_schedule import OverlapSchedule, sequential_schedule
from torch.distributed._tools import moe_calibration
from torch.distributed._tools.moe_cpu_model import cpu_parts
from torch.distributed._tools.moe_estimator import inductor_estimate
from torch.distributed._tools.moe_layer_plan import layer_chunks
from torch.distributed._tools.moe_profile import Profile

import measure


class CompiledLayer(Layer):
    """One compiled forward, with room for all tokens of a chunk on every rank."""

    def __init__(self, shape: Shape, schedule: Callable, chunks: int) -> None:
        super().__init__(shape)
        capacity = -(-shape.T // chunks)
        self.switch = TokenSwitchAllToAll(dist.group.WORLD, shape.E, capacity=capacity)
        self.schedule = schedule

    def forward(self) -> Tensor:  # type: ignore[override]
        routed, shared = self.run(self.schedule)
        return routed + shared

    def compiled(self, p: Profile | None) -> Callable[[], Tensor]:
        """The compiled layer, with the overlap scheduler and the estimates of ``p`` if it is given."""
        prefix = "aten_distributed_optimizations."
        # For all calls of the function, as a switch with a capacity is traced again at the second
        # call, which takes the maximum with the first count of rows.
        options: dict = {prefix + "enable_overlap_scheduling": p is not None}
        if p is not None:
            options[prefix + "custom_runtime_estimation"] = inductor_estimate(p)
            options[prefix + "compute_estimator"] = "analytical"
        whole = {"fullgraph": True, "dynamic": False, "options": options}
        return torch.no_grad()(torch.compile(self.forward, **whole))


def with_link(p: Profile) -> Profile:
    """``p`` with the constants of the link as it is now."""
    sizes = [1 << n for n in (10, 14, 16, 18, 19, 20, 21)]
    start, rate, turn = moe_calibration.measure_links(dist.group.WORLD, sizes)
    device = dataclasses.replace(p.device, fast=rate, slow=rate)
    us = 1e6 * start
    constants = dataclasses.replace(p.constants, fast_us=us, slow_us=us)
    cpu = dataclasses.replace(p.cpu, turn=turn)
    return dataclasses.replace(p, device=device, constants=constants, cpu=cpu)


def slowed(p: Profile, factor: float) -> Profile:
    """``p`` with cores that take ``factor`` times as long."""
    assert p.cpu is not None
    per_second = ("rate16", "rate32", "memory", "fault", "copy")
    values = {name: getattr(p.cpu, name) / factor for name in per_second}
    for name in ("expert_us", "call_us", "exchange_us", "exchange_grad_us"):
        values[name] = getattr(p.cpu, name) * factor
    return dataclasses.replace(p, cpu=dataclasses.replace(p.cpu, **values))


def of_rank_0(p: Profile) -> Profile:
    """The profile of rank 0: ranks with different estimates would order collectives differently."""
    found = [p]
    dist.broadcast_object_list(found)
    return found[0]


def calibrated() -> Profile:
    p = moe_calibration.calibrate(seconds=5, clock="process")
    # Seconds of links are clock time and come later. The cores' part of messages is measured
    # here, as if links took no time.
    free = dataclasses.replace(p.device, fast=math.inf, slow=math.inf)
    no_start = dataclasses.replace(p.constants, fast_us=0.0, slow_us=0.0)
    q = dataclasses.replace(p, device=free, constants=no_start)
    measure_exchange = moe_calibration.measure_exchange
    cpu = measure_exchange(q, dist.group.WORLD, clock=time.process_time)
    return of_rank_0(dataclasses.replace(p, cpu=cpu))


def measure_all(chunks: list[int], rates: list[float], rounds: int) -> list[dict]:
    p = calibrated()
    process: list[float] = []
    alone = Layer(SHAPE)
    _, received = alone.dispatch(alone.x, alone.ids, alone.weights)

    @torch.no_grad()
    def experts() -> None:
        start = time.process_time()
        alone.experts(*received)
        process.append(time.process_time() - start)

    schedules = {1: sequential_schedule} | {n: OverlapSchedule(n) for n in chunks}
    functions, outputs = {}, {}
    limit_links(1e6 * rates[0])
    link = of_rank_0(with_link(p))
    for n, schedule in schedules.items():
        layer = CompiledLayer(SHAPE, schedule, n)
        functions[n] = layer.compiled(link if n > 1 else None)
        outputs[n] = functions[n]()
        torch.testing.assert_close(outputs[n], outputs[1], atol=0.02, rtol=0.02)
    rows = []
    for rate in rates:
        limit_links(1e6 * rate)
        q = with_link(p)
        process.clear()
        calls = functions | {"experts": experts}
        seconds = measure.slowest_seconds(calls, rounds=rounds, warmup=2)
        of_process = statistics.median(measure.over_ranks(process))
        waits = statistics.median(seconds["experts"]) / of_process
        layer = (slowed(q, waits), *SHAPE.sizes().values(), 2)
        options = {"candidates": chunks, "shared_f": SHAPE.F}
        of_chunks = layer_chunks(*layer, **options)
        predicted = {each.num_chunks: each.seconds for each in of_chunks}
        predicted[1] = sum(cpu_parts(*layer, shared_f=SHAPE.F))
        for n in functions:
            rows.append(
                {
                    "link_mb_per_s": rate,
                    "chunks": n,
                    "ms": measure.spread(1e3 * t for t in seconds[n]),
                    "model_ms": 1e3 * predicted[n],
                    "error": predicted[n] / statistics.median(seconds[n]) - 1,
                    "gain": measure.paired_ratio(seconds[1], seconds[n]),
                    "model_gain": predicted[1] / predicted[n],
                    "neighbours": waits,
                }
            )
    return rows


def main() -> None:
    args = parse(__doc__, rounds=41, chunks=[2, 4], link_mb_per_s=[50.0, 25.0])
    options = (args.chunks, args.link_mb_per_s, args.rounds)
    rows, _ = measure.on_gloo_ranks(2, measure_all, *options)
    show("Compiled layers on two gloo ranks, forward", rows)
    fields = {"ranks": 2, "tokens_per_rank": SHAPE.sizes(), "rounds": args.rounds}
    measure.save(args.out, **fields, load=os.getloadavg()[0], rows=rows)


if __name__ == "__main__":
    main()
