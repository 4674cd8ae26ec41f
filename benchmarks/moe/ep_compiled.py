"""Compiled expert-parallel layers over a limited link: chunks against one, and the model's answer.

    python benchmarks/moe/ep_compiled.py [--link-mb-per-s 50 25] [--out FOLDER]

Two gloo ranks, one thread each, forward. The link is limited by the kernel, which paces what leaves
the sockets of gloo (``SO_MAX_PACING_RATE``): rows travel at that rate and take no core. Sequential
and chunked layers are compiled by Inductor, the latter with the overlap scheduler and the cost
model's estimates; they take turns in every round.

Prediction: ``moe_calibration`` measures products and what messages take of the cores in the time
of the process, and start and rate of the limited link by the clock;
``moe_cost_model.layer_chunks`` gives the seconds. On a machine with neighbours a rank waits for its
core: the experts alone take part in the rounds, and what they take by the clock over what they take
of the process, ``neighbours``, slows the cores of the model.
Choose links that are as slow as the experts then are.
"""

import dataclasses
import functools
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable

from ep_overlap import Layer, limit_links
from report import make_parser, show
from shapes import COMPILED_OVERLAP_SHAPE as SHAPE, Shape

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._moe.schedule import OverlapSchedule, sequential_schedule
from torch.distributed._moe.switch import TokenSwitchAllToAll
from torch.distributed._tools import moe_calibration, moe_cost_model as cost
from torch.distributed._tools.moe_calibration import Profile
from torch.distributed._tools.moe_cpu_model import cpu_parts
from torch.distributed._tools.moe_estimator import inductor_estimate

from measure import (
    interleaved_seconds,
    on_gloo_ranks,
    over_ranks,
    paired_ratio,
    provenance,
    spread,
    write_json,
)


class CompiledLayer(Layer):
    """One compiled forward, with room for all tokens of a chunk on every rank."""

    def __init__(self, shape: Shape, schedule: Callable, chunks: int) -> None:
        super().__init__(shape)
        capacity = -(-shape.T // chunks)
        self.switch = TokenSwitchAllToAll(dist.group.WORLD, shape.E, capacity=capacity)
        self.schedule = schedule

    def forward(self) -> Tensor:  # type: ignore[override]
        operands = (self.x, self.ids, self.weights, self.experts, self.shared)
        routed, shared = self.schedule(self.switch, *operands)
        return routed + shared

    def compiled(self, p: Profile | None) -> Callable[[], Tensor]:
        """With the overlap scheduler and the estimates of ``p``, if there is one."""
        prefix = "aten_distributed_optimizations."
        # Of the function, not of the first call: a switch with a capacity is traced again at the
        # second, where there is a count of rows to take the maximum with.
        options: dict = {prefix + "enable_overlap_scheduling": p is not None}
        if p is not None:
            options[prefix + "custom_runtime_estimation"] = inductor_estimate(p)
            options[prefix + "compute_estimator"] = "analytical"
        function = torch.compile(
            self.forward, fullgraph=True, dynamic=False, options=options
        )
        return torch.no_grad()(function)


def with_link(p: Profile) -> Profile:
    """``p`` with the constants of the link as it is now."""
    sizes = [1 << n for n in (10, 14, 16, 18, 19, 20, 21)]
    start, rate, turn = moe_calibration.measure_links(dist.group.WORLD, sizes)
    device = dataclasses.replace(p.device, fast=rate, slow=rate)
    constants = dataclasses.replace(
        p.constants, fast_us=1e6 * start, slow_us=1e6 * start
    )
    cpu = dataclasses.replace(p.cpu, turn=turn)
    return dataclasses.replace(p, device=device, constants=constants, cpu=cpu)


def slowed(p: Profile, factor: float) -> Profile:
    """``p`` with cores that all take ``factor`` times as long."""
    assert p.cpu is not None
    per_second = ("rate16", "rate32", "memory", "fault", "copy")
    values = {name: getattr(p.cpu, name) / factor for name in per_second}
    for name in ("expert_us", "call_us", "exchange_us", "exchange_grad_us"):
        values[name] = getattr(p.cpu, name) * factor
    return dataclasses.replace(p, cpu=dataclasses.replace(p.cpu, **values))


def calibrated() -> Profile:
    """Of rank 0, for all: ranks that estimate differently would order collectives so."""
    p = moe_calibration.calibrate(seconds=5, clock="process")
    # Seconds of links are the clock's and come later. What messages take of the cores is
    # measured with what makes them: as if the links took no time.
    free = dataclasses.replace(p.device, fast=math.inf, slow=math.inf)
    no_start = dataclasses.replace(p.constants, fast_us=0.0, slow_us=0.0)
    cpu = moe_calibration.measure_exchange(
        dataclasses.replace(p, device=free, constants=no_start),
        dist.group.WORLD,
        clock=time.process_time,
    )
    found = [dataclasses.replace(p, cpu=cpu)]
    dist.broadcast_object_list(found)
    return found[0]


def measure(chunks: list[int], rates: list[float], rounds: int) -> list[dict]:
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
    shared = [with_link(p)]
    dist.broadcast_object_list(shared)
    (link,) = shared
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
        seconds = interleaved_seconds(
            functions | {"experts": experts},
            rounds=rounds,
            warmup=2,
            before=lambda: dist.barrier(),
        )
        of_experts = over_ranks(seconds.pop("experts"))
        of_process = over_ranks(process)
        waits = statistics.median(of_experts) / statistics.median(of_process)
        q = slowed(q, waits)
        seconds = {n: over_ranks(times) for n, times in seconds.items()}
        s = SHAPE
        layer_chunks = functools.partial(
            cost.layer_chunks, q, s.T, s.D, s.F, s.E, s.K, 2, shared_f=s.F
        )
        predicted = {c.num_chunks: c.seconds for c in layer_chunks(candidates=chunks)}
        predicted[1] = sum(cpu_parts(q, s.T, s.D, s.F, s.E, s.K, 2, shared_f=s.F))
        medians = {n: spread(times).median for n, times in seconds.items()}
        for n in functions:
            rows.append(
                {
                    "link_mb_per_s": rate,
                    "chunks": n,
                    "ms": spread(1e3 * t for t in seconds[n]),
                    "model_ms": 1e3 * predicted[n],
                    "error": predicted[n] / medians[n] - 1,
                    "gain": paired_ratio(seconds[1], seconds[n]),
                    "model_gain": predicted[1] / predicted[n],
                    "neighbours": waits,
                }
            )
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--link-mb-per-s", type=float, nargs="+", default=[50, 25])
    parser.add_argument("--out", type=pathlib.Path, help="folder for the JSON")
    args = parser.parse_args()
    rows, _ = on_gloo_ranks(2, measure, args.chunks, args.link_mb_per_s, args.rounds)
    show("Compiled layers on two gloo ranks, forward", rows)
    if args.out:
        result = {
            **provenance(),
            "ranks": 2,
            "tokens_per_rank": SHAPE.sizes(),
            "rounds": args.rounds,
            "load": os.getloadavg()[0],
            "rows": rows,
        }
        write_json(result, args.out / "ep_compiled.json")


if __name__ == "__main__":
    main()
