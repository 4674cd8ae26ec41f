"""Time F.moe_mlp on the CPU beside what people run today, and beside a bound.

Every row compares all forms with float64, then runs them in turns in this process, on views of
the same weights::

    python benchmarks/moe/cpu_ops.py --out FILE.json [--rows PATTERN ...]

``--rows`` takes names or shell patterns of ids; ``--seconds`` caps all timed calls of a form in a
row; ``--quick`` has tiny rows. Peers come from the transformers package if it can be
imported, else from our own code in the same forms; every entry names its source.

The bound is the larger of two times: of the arithmetic at the rate of at::mm, measured on the row's
matrices (as many rows as an expert has on average, operands in the cache, no allocation), and of the
bytes that every implementation moves, at the rate of memory. Both rates are measured in
every round, so that other jobs on the machine slow down the bound and the forms alike.
"""

import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import check
import shapes
from peers import make_peers, OURS, Peer, too_costly
from report import parse, progress, show
from shapes import make_operands, Operands, PASSES, Row

import torch
from torch import Tensor

import measure


# Fields of every form of a row in the JSON, beside its ratio to ours. Times and bytes are of one
# call, through all layers of the row; ratios are peer over ours, per round.
FORM_KEYS = {"source", "kind", "error_over_allowed", "saved_bytes", "peak_bytes", "rounds", "milliseconds"}  # fmt: skip


class Settings(NamedTuple):
    """How a run measures."""

    rounds: int = 15  # timed calls of a form, unless it is capped
    seconds: float = 3.0  # a form whose calls take longer together gets fewer rounds
    compiled: bool = True
    compile_seconds: float = 90.0  # a peer that compiles longer is left out
    tokens: int = 48  # of the sample that is checked
    experts: int = 2
    stream_bytes: int = 1 << 30  # to measure memory with; far beyond the cache


QUICK = Settings(3, 1.0, False, tokens=10**6, experts=10**6, stream_bytes=1 << 26)


class Runner:
    """One form on the operands of a row.

    Calls take the routings of the row in turns. In a decode row each form also shifts the expert
    ids, so that the weights that another form just read are of no use in the cache.
    """

    def __init__(self, row: Row, layers: Sequence, ids: list, peer: Peer, shift: int):
        self.row, self.layers, self.peer = row, layers, peer
        self.leaves = [peer.leaves(layer) for layer in layers]
        shift = shift if row.layers > 1 else 0
        self.ids = [[(i + shift) % row.shape.E for i in of_layer] for of_layer in ids]
        self.calls = 0

    def forward(self, routing: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """y of the last layer with ids in ``routing``, and the tensors that get gradients."""
        o = self.layers[0]
        x, weights = (t.detach().requires_grad_() for t in (o.x, o.weights))
        with torch.set_grad_enabled(self.row.backward):
            for ids, leaves in zip(routing, self.leaves):
                y = self.peer.call(x, ids, weights, *leaves)
        return y, (x, weights, *self.leaves[0])

    def step(self, routing: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        y, leaves = self.forward(routing)
        if not self.row.backward:
            return y, ()
        return y, torch.autograd.grad(y, leaves, self.layers[0].grad)

    def result(self) -> tuple[Tensor, Sequence[Tensor]]:
        """y of the first layer under the unshifted first routing, and all gradients."""
        y, grads = self.step([self.layers[0].ids])
        return y, grads and (*grads[:2], *self.peer.canonical(grads[2:]))

    def __call__(self) -> None:
        self.calls += 1
        self.step(self.ids[self.calls % len(self.ids)])

    def saved_bytes(self) -> int:
        """Bytes kept for backward; 0 in a forward row."""
        if not self.row.backward:
            return 0
        stored = [t for layer in self.layers for t in layer.stored()]
        return measure.saved_bytes(lambda: self.forward(self.ids[0]), stored)


class Bound:
    """The bound of a row; times are of all layers of a call.

    Args:
        hits: experts with rows, averaged over layers and routings.
    """

    def __init__(self, row: Row, hits: float, stream_bytes: int):
        self.row, self.hits, self.stream_bytes = row, hits, stream_bytes
        shape = row.shape
        self.rows = max(1, round(shape.T * shape.K / shape.E))
        self._products = shape.products(row.backward, self.rows)
        # Which operands are transposed views, as weights are (out, in).
        views = ((0, 1), (0, 1), (0, 0), (0, 0), (1, 0), (1, 0))
        self._mm = [self._mm_of(*p, *v) for p, v in zip(self._products, views)]
        source = torch.ones(stream_bytes // 4)
        half = source[: len(source) // 2]
        target = torch.empty_like(half)
        self._stream = (source.sum, lambda: target.copy_(half))

    def _mm_of(self, m: int, k: int, n: int, a_view: int, b_view: int) -> Callable:
        def operand(rows: int, columns: int, as_view: int) -> Tensor:
            sizes = (columns, rows) if as_view else (rows, columns)
            x = torch.randn(sizes).to(self.row.dtype)
            return x.t() if as_view else x

        a, b = operand(m, k, a_view), operand(k, n, b_view)
        out = torch.empty(m, n, dtype=self.row.dtype)
        return lambda: torch.mm(a, b, out=out)

    def rates(self, budget: float = 0.02) -> tuple[float, float]:
        """FLOPs and bytes per second now; ``budget`` seconds for each measurement."""

        def median(function: Callable[[], object]) -> float:
            function()
            seconds, end = [], time.perf_counter() + budget
            while len(seconds) < 3 or time.perf_counter() < end:
                seconds.append(measure.timed(function))
            return statistics.median(seconds)

        stream = min(map(median, self._stream))
        work = 2 * sum(m * k * n for m, k, n in self._products)
        return work / sum(map(median, self._mm)), self.stream_bytes / stream

    def seconds(self, mm_rate: float, stream_rate: float) -> tuple[float, float]:
        """Seconds of the arithmetic and of the bytes, at these rates."""
        row, size = self.row, self.row.dtype.itemsize
        moved = row.shape.compulsory_bytes(row.backward, self.hits, size)
        work = row.shape.flops(row.backward)
        return row.layers * work / mm_rate, row.layers * moved / stream_rate

    def record(self, rates: Sequence[tuple[float, float]]) -> dict[str, object]:
        """The bound's fields in a row of the JSON, by the medians of the rates."""
        mm_rate, stream_rate = map(statistics.median, zip(*rates))
        compute, memory = self.seconds(mm_rate, stream_rate)
        return {
            "milliseconds": 1e3 * max(compute, memory),
            "limited_by": "compute" if compute >= memory else "memory",
            "compute_milliseconds": 1e3 * compute,
            "memory_milliseconds": 1e3 * memory,
            "gflop": self.row.layers * self.row.shape.flops(self.row.backward) / 1e9,
            "mm_tflops": mm_rate / 1e12,
            "mm_rows": self.rows,
            "hit_experts": self.hits,
            "stream_gb_per_second": stream_rate / 1e9,
        }


def _checked_runners(
    row: Row, layers: Sequence[Operands], ids: list, settings: Settings, without: dict
) -> tuple[dict[str, Runner], dict[str, dict], dict[str, int]]:
    """Runners of the forms with correct results, the JSON entry of each, and its rounds."""
    shape, first = row.shape, layers[0]
    sample = check.make_sample(shape, first.ids, settings.tokens, settings.experts)
    expected = check.truth(shape, first, sample, backward=row.backward)
    runners, entries, rounds = {}, {}, {}
    compiled = settings.compiled and row.compiled
    peers, failed = make_peers(shape, without, compiled=compiled)
    without |= failed
    for i, peer in enumerate(peers):
        runner = Runner(row, layers, ids, peer, shift=i * 13)
        start = time.perf_counter()
        y, grads = runner.result()
        first_call = time.perf_counter() - start
        actual = check.sampled(sample, y, grads)
        who = f"{row.id}: {peer.name} ({peer.source})"
        share = check.largest_share(check.errors(actual, expected, row.dtype, who), who)
        del y, grads, actual
        if peer.compiled and first_call > settings.compile_seconds:
            limit = f"more than the cap of {settings.compile_seconds:.0f} s"
            without[peer.name] = f"took {first_call:.0f} s to compile, {limit}"
            continue
        kind = "compiled" if peer.compiled else "eager"
        entry = {"source": peer.source, "kind": kind, "error_over_allowed": share}
        if peer.compiled:
            entry["first_call_seconds"] = round(first_call, 2)
        entry["saved_bytes"] = runner.saved_bytes()
        start = time.perf_counter()
        entry["peak_bytes"] = measure.peak_bytes(runner)  # also the warm-up
        call = time.perf_counter() - start
        some = measure.affordable_rounds(settings.rounds, call, settings.seconds)
        if some < settings.rounds and peer.name != OURS:
            limit = f"a form may take {settings.seconds:g} s"
            why = f"a call takes {call:.2f} s and {limit}"
            entry["capped"] = f"{some} of {settings.rounds} rounds: {why}"
        runners[peer.name], entries[peer.name] = runner, entry
        rounds[peer.name] = some
    rounds[OURS] = max(rounds.values())
    return runners, entries, rounds


def measure_row(row: Row, settings: Settings) -> dict[str, object]:
    """One row of the JSON; a form with wrong results raises."""
    shape = row.shape
    layers = [make_operands(shape, dtype=row.dtype, layer=i) for i in range(row.layers)]
    seeds = (range(100 * i, 100 * i + row.layers) for i in range(row.routings))
    ids = [[shape.topk_indices(seed) for seed in of_layers] for of_layers in seeds]
    hits = statistics.mean(len(i.unique()) for of_layer in ids for i in of_layer)
    stored = sum(t.nbytes for t in layers[0].stored())
    without = too_costly(shape, round(hits), stored, row.backward)
    if row.sweep:
        few = "a sweep has one loop and one grouped form only"
        without |= {"transformers_eager": few, "three_grouped_mm": few}
    forms = _checked_runners(row, layers, ids, settings, without)
    runners, entries, rounds = forms
    bound, rates = Bound(row, hits, settings.stream_bytes), []
    seconds = measure.interleaved_seconds(
        runners, rounds=rounds, warmup=0, on_round=lambda i: rates.append(bound.rates())
    )
    for name, values in seconds.items():
        entry = entries[name]
        entry["rounds"] = len(values)
        entry["milliseconds"] = measure.spread([1e3 * v for v in values])._asdict()
        if name != OURS:
            entry["ratio_to_ours"] = measure.ratio_record(values, seconds[OURS])
    eager = [n for n, e in entries.items() if e["kind"] == "eager" and n != OURS]
    best = min(eager, key=lambda n: entries[n]["ratio_to_ours"]["median"])
    bounds = [max(bound.seconds(*rate)) for rate in rates]
    return {
        "id": row.id,
        "shape": shape.sizes(),
        "routing": shape.routing,
        "dtype": row.dtype_name,
        "pass": PASSES[row.backward],
        "layers": row.layers,
        "sweep": row.sweep,
        "gradient_bytes": stored if row.backward else 0,
        "best_eager_peer": best,
        "ratio": entries[best]["ratio_to_ours"],
        "of_bound": measure.paired_ratio(bounds, seconds[OURS]).median,
        "bound": bound.record(rates),
        "forms": entries,
        "left_out": without,
    }


def main(argv: list[str] | None = None) -> int:
    options = {"rows": list, "quick": False, "rounds": int, "seconds": float}
    args = parse(__doc__, argv=argv, no_compiled=False, **options)
    settings = QUICK if args.quick else Settings()
    given = {"rounds": args.rounds, "seconds": args.seconds}
    given["compiled"] = False if args.no_compiled else None
    settings = settings._replace(**{k: v for k, v in given.items() if v is not None})
    table = shapes.QUICK_ROWS if args.quick else shapes.CPU_ROWS + shapes.CLIENT_ROWS
    try:
        rows = shapes.select(table, args.rows)
    except ValueError as error:
        print(f"cpu_ops.py: {error}", file=sys.stderr)
        return 2
    flags = [name for name, has in torch.cpu.get_capabilities().items() if has is True]
    measured: list[dict] = []
    torch.manual_seed(0)
    with progress("Rows", len(rows)) as advance:
        for row in rows:
            started = datetime.datetime.now(datetime.timezone.utc)
            record = measure_row(row, settings)
            record["started"] = started.isoformat(timespec="seconds")
            measured.append(record | {"load_average": round(os.getloadavg()[0], 2)})
            advance(row.id)
            # Saved after every row, so that an interruption loses none.
            measure.save(args.out, cpu_flags=" ".join(sorted(flags)), rows=measured)
    ours = f"forms.{OURS}."
    columns = {
        "row": "id",
        "ms": ours + "milliseconds",
        "best eager peer": "best_eager_peer",
        "peer / ours": "ratio",
        "of bound": "of_bound",
        "peak bytes": ours + "peak_bytes",
        "saved": ours + "saved_bytes",
    }
    show("F.moe_mlp on the CPU", measured, columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
