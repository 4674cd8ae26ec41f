"""Times the forms of one row, in turns, and says what each of them saves and allocates."""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import bounds, check
from .peers import Form, left_out, make_forms, OURS
from .shapes import make_operands, Operands, Row
from measure import peak_bytes, saved_bytes, Spread, spread


class Settings(NamedTuple):
    """How a run measures.

    Attributes:
        rounds: timed calls of a form, unless it is capped.
        seconds: a form whose calls take longer than this together gets fewer rounds.
        compiled: with compiled peers.
        compile_seconds: a peer that compiles longer than this is left out.
        tokens, experts: of the sample that is checked.
        stream_bytes: read to measure the rate of memory.
    """

    rounds: int = 15
    seconds: float = 3.0
    compiled: bool = True
    compile_seconds: float = 90.0
    tokens: int = 48
    experts: int = 2
    stream_bytes: int = bounds.STREAM_BYTES


MIN_ROUNDS = 3


class Runner:
    """One form on the operands of a row.

    Calls take the routings of the row in turns. In a decode row they also shift the expert ids
    from form to form, so that no form finds the weights in the cache that another one just read.
    """

    def __init__(self, row: Row, operands: Operands, form: Form, shift: int):
        self.row, self.operands, self.form = row, operands, form
        E = row.case.num_experts
        self.indices = operands.indices
        if row.layers > 1:
            self.indices = [[(i + shift) % E for i in ls] for ls in operands.indices]
        self.calls = 0

    def forward(self, x: Tensor, weights: Tensor, routing: int = 0) -> Tensor:
        for indices, leaves in zip(self.indices[routing], self.form.leaves):
            y = self.form.call(x, indices, weights, leaves)
        return y

    def result(self) -> tuple[Tensor, Sequence[Tensor]]:
        """y of the first layer under the unshifted first routing, and all gradients."""
        o, leaves = self.operands, self.form.leaves[0]
        if not self.row.backward:
            with torch.no_grad():
                return self.form.call(o.x, o.indices[0][0], o.weights, leaves), ()
        x, weights = o.x.detach().requires_grad_(), o.weights.detach().requires_grad_()
        y = self.form.call(x, o.indices[0][0], weights, leaves)
        return y.detach(), torch.autograd.grad(y, (x, weights, *leaves), o.grad_out)

    def __call__(self) -> None:
        o, self.calls = self.operands, self.calls + 1
        if not self.row.backward:
            with torch.no_grad():
                self.forward(o.x, o.weights, self.calls % len(self.indices))
            return
        x, weights = o.x.detach().requires_grad_(), o.weights.detach().requires_grad_()
        y = self.forward(x, weights, self.calls % len(self.indices))
        torch.autograd.grad(y, (x, weights, *self.form.leaves[0]), o.grad_out)

    def saved_bytes(self) -> int:
        """Kept for backward; of a forward row, nothing."""
        if not self.row.backward:
            return 0
        o = self.operands
        x, weights = o.x.detach().requires_grad_(), o.weights.detach().requires_grad_()
        stored = [t for layer in o.layers for t in layer.tensors()]
        return saved_bytes(lambda: self.forward(x, weights), stored)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Low and high end of a confidence interval of the median, and its confidence.

    Order statistics: exact for any distribution. The narrowest with at least 95 %, or all of the
    values where there are too few for that.
    """
    ordered, n = sorted(values), len(values)
    best = (ordered[0], ordered[-1], 1 - 2**-n * 2)
    for cut in range(1, n // 2):
        tail = sum(math.comb(n, i) for i in range(cut + 1)) / 2**n
        if 1 - 2 * tail < 0.95:
            break
        best = (ordered[cut], ordered[-1 - cut], 1 - 2 * tail)
    return best


def _as_json(values: Spread, digits: int) -> dict[str, float]:
    return {k: round(v, digits) for k, v in values._asdict().items()}


def interleaved(
    runners: dict[str, Callable[[], None]],
    rounds: dict[str, int],
    on_round: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of every call. In a round each form runs once; the first one rotates.

    A form with fewer rounds only takes part in the first ones, so that entry i of every list is
    of round i.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for i in range(max(rounds.values())):
        on_round()
        names = [name for name in runners if i < rounds[name]]
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = time.perf_counter()
            runners[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _checked_runners(
    row: Row, operands: Operands, settings: Settings, without: dict[str, str]
) -> tuple[dict[str, Runner], dict[str, dict]]:
    """Runners of the forms whose results are right, and what is known of each so far.

    Raises:
        AssertionError: a result is wrong.
    """
    sample = check.make_sample(
        row, operands.indices[0][0], settings.tokens, settings.experts
    )
    expected = check.expected_values(row, operands, sample)
    runners, entries = {}, {}
    forms = make_forms(row, operands.layers, without, compiled=settings.compiled)
    for i, form in enumerate(forms):
        runner = Runner(row, operands, form, shift=i * 13)
        start = time.perf_counter()
        y, grads = runner.result()
        first_call = time.perf_counter() - start
        actual = check.actual_values(row, form, sample, y, grads)
        share = check.largest_share_of_bound(row, form, expected, actual)
        del y, grads, actual
        if form.compiled and first_call > settings.compile_seconds:
            without[form.name] = (
                f"took {first_call:.0f} s to compile, more than the cap of "
                f"{settings.compile_seconds:.0f} s"
            )
            continue
        runners[form.name] = runner
        entries[form.name] = {
            "source": form.source,
            "kind": "compiled" if form.compiled else "eager",
            "error_over_allowed": round(share, 4),
        }
        if form.compiled:
            entries[form.name]["first_call_seconds"] = round(first_call, 2)
    return runners, entries


def _rounds(name: str, entry: dict, seconds: float, settings: Settings) -> int:
    """Rounds of a form whose call took ``seconds``; a slow peer is capped and says so."""
    rounds = min(settings.rounds, max(MIN_ROUNDS, int(settings.seconds / seconds)))
    if rounds < settings.rounds and name != OURS:
        entry["capped"] = (
            f"{rounds} of {settings.rounds} rounds: a call takes {seconds:.2f} s "
            f"and a form may take {settings.seconds:g} s"
        )
    return rounds


def measure_row(row: Row, settings: Settings) -> dict[str, object]:
    """One row of the JSON; see report.SCHEMA.

    Raises:
        AssertionError: a form computes something else than the float64 reference.
    """
    operands = make_operands(row)
    hits = round(bounds.hit_experts(operands))
    stored = sum(t.nbytes for t in operands.layers[0].tensors())
    copies = row.case.rows * stored // row.case.num_experts
    without = left_out(row, copies, hits, stored)
    runners, entries = _checked_runners(row, operands, settings, without)
    rounds = {}
    for name, runner in runners.items():
        entries[name]["saved_bytes"] = runner.saved_bytes()
        start = time.perf_counter()
        entries[name]["peak_bytes"] = peak_bytes(runner)  # also the warm-up
        warm_up = time.perf_counter() - start
        rounds[name] = _rounds(name, entries[name], warm_up, settings)
    rounds[OURS] = max(rounds.values())
    row_bound = bounds.Bound(row, operands, settings.stream_bytes)
    rates = []
    seconds = interleaved(runners, rounds, lambda: rates.append(row_bound.rates()))
    for name, values in seconds.items():
        entry = entries[name]
        entry["rounds"] = len(values)
        entry["milliseconds"] = _as_json(spread([1e3 * v for v in values]), 4)
        if name != OURS:
            ratios = [a / b for a, b in zip(values, seconds[OURS])]
            low, high, confidence = median_interval(ratios)
            entry["ratio_to_ours"] = {
                **_as_json(spread(ratios), 4),
                "interval": [round(low, 4), round(high, 4)],
                "confidence": round(confidence, 4),
            }
    eager = [n for n, e in entries.items() if e["kind"] == "eager" and n != OURS]
    best = min(eager, key=lambda n: entries[n]["ratio_to_ours"]["median"])
    shares = [
        max(row_bound.seconds(*rate)) / ours
        for rate, ours in zip(rates, seconds[OURS], strict=True)
    ]
    return {
        "id": row.id,
        "shape": row.shape(),
        "routing": row.case.routing,
        "dtype": row.dtype_name,
        "pass": row.pass_name,
        "layers": row.layers,
        "sweep": row.sweep,
        "gradient_bytes": stored if row.backward else 0,
        "best_eager_peer": best,
        "ratio": entries[best]["ratio_to_ours"],
        "of_bound": round(spread(shares).median, 4),
        "bound": row_bound.as_json(rates),
        "forms": entries,
        "left_out": without,
    }
