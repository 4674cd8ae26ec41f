"""What overlap gains in an expert-parallel layer: simulated from measured parts, and measured.

    python benchmarks/moe/ep_overlap.py [--ranks 2] [--out FOLDER]

Gloo ranks on this machine, one thread each. Every part of a forward (dispatch with routing,
experts, combine, shared experts) is timed alone, per chunk; two queues, one for communication and
one for computation, then give the time under a schedule. Beside it, the schedule as it runs here,
interleaved with the plain order of parts. All are medians over rounds of the slowest rank.

Links. ``gloo``: communication is copying, which takes the core that the experts compute on, so
that there is little to hide behind: the simulation does not describe this machine. The others:
gloo, and after each collective the time that its bytes to others would take at one of
``--link-gb-per-s``, spent sleeping. That time takes no core, as a network card takes none; the
longer it is, the more of the communication is what the simulation assumes.
"""

import argparse
import contextlib
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._moe.exchange import Exchange, Splits
from torch.distributed._moe.schedule import (
    OverlapSchedule,
    PartSeconds,
    sequential_schedule,
    simulated_seconds,
)
from torch.distributed._moe.switch import TokenSwitchAllToAll


sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from ep_rank import RankLayer
from report import make_parser, show, spread_text
from shapes import OVERLAP_SHAPE, Shape

from measure import (
    interleaved_seconds,
    on_gloo_ranks,
    over_ranks,
    provenance,
    Spread,
    spread,
    write_json,
)


@contextlib.contextmanager
def slow_link(switch: TokenSwitchAllToAll, bytes_per_s: float) -> Iterator[None]:
    """Every collective takes longer, by the time that a link of this rate would take."""

    def send(
        self: Exchange, send: Callable, x: Tensor, splits: Splits, *args, **kwargs
    ) -> Tensor:
        out = send(x, splits, *args, **kwargs)
        # Both directions at once; what the slower one carries.
        row = x.nbytes / max(x.shape[0], 1)
        mine = dist.get_rank(self.group)
        others = []
        for rows, total in ((splits.send, x.shape[0]), (splits.recv, out.shape[0])):
            here = total // self.num_ranks if rows is None else rows[mine]
            others.append(total - here)
        time.sleep(max(others) * row / bytes_per_s)
        return out

    for level in switch.levels:
        level.send = functools.partial(send, level, level.send)
    try:
        yield
    finally:
        for level in switch.levels:
            del level.send


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

    def run(self, schedule: Callable) -> None:
        operands = (self.x, self.ids, self.weights, self.experts, self.shared)
        schedule(self.switch, *operands)

    def parts(self, chunks: int) -> dict[tuple[str, int, int], Callable[[], object]]:
        """Each part of a forward in chunks, on the results of the ones before it."""
        functions: dict[tuple[str, int, int], Callable[[], object]] = {}
        pieces = (t.tensor_split(chunks) for t in (self.x, self.ids, self.weights))
        for chunk, piece in enumerate(zip(*pieces)):
            dispatch = functools.partial(self.dispatch, *piece)
            routing, received = dispatch()
            experts = functools.partial(self.experts, *received)
            combine = functools.partial(self.switch.combine, routing, experts())
            functions["dispatch", chunks, chunk] = dispatch
            functions["experts", chunks, chunk] = experts
            functions["combine", chunks, chunk] = combine
        return functions


def part_seconds(times: dict, chunks: int) -> PartSeconds:
    def medians(part: str) -> tuple[float, ...]:
        each = (times[part, chunks, chunk] for chunk in range(chunks))
        return tuple(statistics.median(t) for t in each)

    shared = statistics.median(times["shared"])
    names = ("dispatch", "experts", "combine")
    return PartSeconds(*(medians(name) for name in names), shared)


def milliseconds(times: Spread) -> list[float]:
    return [1e3 * t for t in times]


@torch.no_grad()
def measure_link(
    layer: Layer, link: str, args: argparse.Namespace
) -> list[dict[str, object]]:
    schedules = {
        (chunks, where): OverlapSchedule(chunks, where)
        for chunks in args.chunks
        for where in ("dispatch", "combine")
    }
    functions: dict[object, Callable[[], object]] = {"shared": layer.shared}
    for chunks in sorted({1, *args.chunks}):
        functions |= layer.parts(chunks)
    functions["sequential"] = functools.partial(layer.run, sequential_schedule)
    for key, schedule in schedules.items():
        functions[key] = functools.partial(layer.run, schedule)
    seconds = interleaved_seconds(
        functions, rounds=args.rounds, warmup=2, before=lambda: dist.barrier()
    )
    # Of every round, the rank that took longest.
    times = {name: over_ranks(values) for name, values in seconds.items()}
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
                "sequential_measured_ms": milliseconds(sequential),
                "measured_ms": milliseconds(measured),
                "measured_gain": sequential.median / measured.median,
            }
        )
    return rows


def measure_links(args: argparse.Namespace) -> list[dict[str, object]]:
    sizes = (getattr(args, name) for name in OVERLAP_SHAPE.sizes())
    layer = Layer(Shape("overlap", *sizes))
    rows = measure_link(layer, "gloo", args)
    for rate in args.link_gb_per_s:
        with slow_link(layer.switch, 1e9 * rate):
            rows += measure_link(layer, f"{rate} GB/s, no core", args)
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    for name, value in OVERLAP_SHAPE.sizes().items():
        parser.add_argument(f"-{name}", type=int, default=value)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--link-gb-per-s", type=float, nargs="*", default=[0.2, 0.05])
    parser.add_argument("--out", type=pathlib.Path, help="folder for the JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = on_gloo_ranks(args.ranks, measure_links, args)[0]
    columns = {n: n for n in rows[0] if "_measured_" not in n and n != "measured_ms"}
    for name in ("sequential_measured_ms", "measured_ms"):
        columns[name] = lambda r, n=name: spread_text(r[n])
    show("A layer on gloo ranks, forward", rows, columns)
    if args.out:
        result = {
            **provenance(),
            "ranks": args.ranks,
            "tokens_per_rank": {
                name: getattr(args, name) for name in OVERLAP_SHAPE.sizes()
            },
            "rounds": args.rounds,
            "milliseconds": "median, or median, p10 and p90, of the slowest rank",
            "rows": rows,
        }
        write_json(result, args.out / "ep_overlap.json")


if __name__ == "__main__":
    main()
