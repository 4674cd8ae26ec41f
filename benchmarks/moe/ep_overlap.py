"""The gain of overlap in an expert-parallel layer: simulated from measured parts, and measured.

    python benchmarks/moe/ep_overlap.py [--ranks 2] [--rounds 11] [--out FOLDER]

Gloo ranks on this machine, one thread each. Every part of a forward (dispatch with routing,
experts, combine, shared experts) is timed alone, per chunk. Two queues, one for communication and
one for computation, then give the time of a schedule. Beside it is the measured time of the
schedule, interleaved with the plain order of parts. All are medians over rounds of the slowest rank.

With the link ``gloo`` communication is copying on the core that computes the experts, so little can
be hidden, and the simulation does not describe it. With the others the
kernel paces the data that leaves the sockets of gloo (``SO_MAX_PACING_RATE``) to one of
``--link-gb-per-s``. As with a network card, waiting for the link takes no core. The slower the link,
the closer is the simulation.
"""

import contextlib
import functools
import itertools
import os
import socket
import statistics
import struct
from collections.abc import Callable

from ep_rank import RankLayer
from report import parse, show
from shapes import OVERLAP_SHAPE as SHAPE, Shape

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._moe.all_to_all import TokenSwitchAllToAll
from torch.distributed._moe.overlap_schedule import (
    OverlapSchedule,
    PartSeconds,
    sequential_schedule,
    simulated_seconds,
)

from measure import on_gloo_ranks, save, slowest_seconds, spread


# Constants of Linux that Python does not name.
_SO_MAX_PACING_RATE, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 47, 32, 33


def limit_links(bytes_per_s: float) -> None:
    """Limits each TCP socket of this process from here on.

    If permitted, buffers get room for a whole message, as a network card does not wait for a
    thread of gloo to get its core.
    """
    rate = struct.pack("Q", int(bytes_per_s))
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = os.dup(int(name))
        except OSError:
            continue  # the descriptor of the listing itself
        try:
            copy = socket.socket(fileno=fd)
        except OSError:
            os.close(fd)
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                copy.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)
                for buffer in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
                    with contextlib.suppress(PermissionError):
                        copy.setsockopt(socket.SOL_SOCKET, buffer, 4 << 20)


class Layer(RankLayer):
    """Operands of one rank, with a shared expert."""

    def __init__(self, shape: Shape) -> None:
        ids = shape.topk_indices(seed=dist.get_rank())
        switch = TokenSwitchAllToAll(dist.group.WORLD, shape.E)
        super().__init__(switch, ids, shape.D, shape.F, shape.E)
        self.shared_weights = [w[:1].clone() for w in (self.w_in, self.w_out)]
        self.zeros = torch.zeros(shape.T, 1, dtype=torch.int64)

    def shared(self) -> Tensor:
        return F.moe_mlp(self.x, self.zeros, None, *self.shared_weights)

    def run(self, schedule: Callable) -> tuple[Tensor, Tensor]:
        """Output of the routed experts, and of the shared one."""
        operands = (self.x, self.ids, self.weights, self.experts, self.shared)
        return schedule(self.switch, *operands)

    def parts(self, chunks: int) -> dict[tuple[str, int, int], Callable[[], object]]:
        """Each part of a forward in chunks, on the results of the parts before it."""
        functions: dict[tuple[str, int, int], Callable[[], object]] = {}
        pieces = (t.tensor_split(chunks) for t in (self.x, self.ids, self.weights))
        for chunk, piece in enumerate(zip(*pieces)):
            dispatch = functools.partial(self.dispatch, *piece)
            routing, received = dispatch()
            experts = functools.partial(self.experts, *received)
            combine = functools.partial(self.switch.combine, routing, experts())
            calls = {"dispatch": dispatch, "experts": experts, "combine": combine}
            functions |= {(name, chunks, chunk): call for name, call in calls.items()}
        return functions


def part_seconds(times: dict, chunks: int) -> PartSeconds:
    medians = (
        tuple(statistics.median(times[part, chunks, i]) for i in range(chunks))
        for part in ("dispatch", "experts", "combine")
    )
    return PartSeconds(*medians, statistics.median(times["shared"]))


@torch.no_grad()
def measure_link(layer: Layer, link: str, args) -> list[dict[str, object]]:
    keys = list(itertools.product(args.chunks, ("dispatch", "combine")))
    schedules = {key: OverlapSchedule(*key) for key in keys}
    functions: dict[object, Callable[[], object]] = {"shared": layer.shared}
    for chunks in sorted({1, *args.chunks}):
        functions |= layer.parts(chunks)
    functions["sequential"] = functools.partial(layer.run, sequential_schedule)
    for key, schedule in schedules.items():
        functions[key] = functools.partial(layer.run, schedule)
    times = slowest_seconds(functions, rounds=args.rounds, warmup=2)
    plain = part_seconds(times, 1)
    sequential = spread(times["sequential"])
    rows = []
    for (chunks, where), schedule in schedules.items():
        parts = part_seconds(times, chunks)
        simulated = simulated_seconds(schedule, parts)
        measured = spread(times[chunks, where])
        rows.append(
            {
                "link": link,
                "chunks": chunks,
                "shared_beside": where,
                "dispatch_ms": 1e3 * sum(parts.dispatch),
                "experts_ms": 1e3 * sum(parts.experts),
                "combine_ms": 1e3 * sum(parts.combine),
                "shared_ms": 1e3 * parts.shared,
                "sequential_parts_ms": 1e3 * plain.total(),
                "simulated_ms": 1e3 * simulated,
                "simulated_gain": plain.total() / simulated,
                "sequential_measured_ms": [1e3 * t for t in sequential],
                "measured_ms": [1e3 * t for t in measured],
                "measured_gain": sequential.median / measured.median,
            }
        )
    return rows


def measure_links(args) -> list[dict[str, object]]:
    layer = Layer(SHAPE)
    rows = measure_link(layer, "gloo", args)
    for rate in args.link_gb_per_s:
        limit_links(1e9 * rate)
        rows += measure_link(layer, f"{rate} GB/s, no core", args)
    return rows


def main() -> None:
    options = {"chunks": [1, 2, 4], "link_gb_per_s": [0.2, 0.05]}
    args = parse(__doc__, ranks=2, rounds=11, **options)
    torch.set_num_threads(1)
    rows = on_gloo_ranks(args.ranks, measure_links, args)[0]
    show("A layer on gloo ranks, forward", rows)
    save(
        args.out,
        ranks=args.ranks,
        tokens_per_rank=SHAPE.sizes(),
        rounds=args.rounds,
        milliseconds="median, or median, p10 and p90, of the slowest rank",
        rows=rows,
    )


if __name__ == "__main__":
    main()
