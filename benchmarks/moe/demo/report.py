"""What the demo shows and writes: progress, tables, plot, JSON."""

import contextlib
import dataclasses
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterator

import rich.box
import rich.console
import rich.progress
import rich.table

from measure import Spread


LOG_WIDTH = 120  # of the tables where there is no terminal to ask


@dataclasses.dataclass(frozen=True)
class TrainingRow:
    """One trained model.

    Attributes:
        losses: training loss of every step (nats per byte).
        held_out_start, held_out_end: loss on text that is never trained on.
        tokens_per_second: over the steps.
        saved_bytes: kept for backward by one forward of the whole model.
        peak_bytes: allocated at once by forward and backward, beyond parameters and gradients.
    """

    run: str
    losses: list[float]
    held_out_start: float
    held_out_end: float
    tokens_per_second: Spread
    saved_bytes: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class BlockRow:
    """One MoE block on the operands of a trained layer.

    Attributes:
        seconds: router and experts, forward and backward.
        slowdown: seconds over those of the fused block in the same round.
        saved_bytes: kept for backward by the experts.
        peak_bytes: as in TrainingRow, for the block.
        relative_error: max|y - reference| / max|reference| of the output.
        of_allowed: largest error over the allowed error, over the output and all gradients.
    """

    block: str
    seconds: Spread
    slowdown: Spread
    saved_bytes: int
    peak_bytes: int
    relative_error: float
    of_allowed: float


@dataclasses.dataclass(frozen=True)
class ExpertParallelRow:
    """The fused model trained with its experts on several ranks.

    Attributes:
        losses: training loss of every step, mean over ranks (nats per byte).
        held_out_end: loss on text that is never trained on.
        differences: per step |loss difference| to the fused run of one process.
        tokens_per_second: of all ranks together, over the steps.
        wire_bytes: by level of the mesh, of all ranks and layers in one step: "payload" (token
            rows), "minimum" (payload with every row sent once per rank that needs it), "metadata"
            (ids, router weights, sizes).
    """

    ranks: int
    losses: list[float]
    held_out_end: float
    differences: list[float]
    tokens_per_second: Spread
    wire_bytes: dict[str, dict[str, float]]

    def total_wire_bytes(self) -> dict[str, float]:
        """Sum over the levels."""
        levels = self.wire_bytes.values()
        return {
            name: sum(level[name] for level in levels)
            for name in ("payload", "minimum", "metadata")
        }


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing the demo promises; the demo fails when one does not hold."""

    name: str
    seen: str
    rule: str
    passed: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """Everything the demo found; the JSON file is this."""

    provenance: dict[str, object]
    settings: dict[str, object]
    text: dict[str, object]
    training: list[TrainingRow]
    differences: dict[str, list[float]]
    blocks: list[BlockRow]
    expert_parallel: ExpertParallelRow | None
    checks: list[Check]
    seconds: float


class Display:
    """Tables on stdout; progress as a bar on a terminal and as plain lines elsewhere."""

    def __init__(self) -> None:
        self.console = rich.console.Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = LOG_WIDTH

    @contextlib.contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        """Yields ``advance(detail)``, to be called ``total`` times."""
        if not self.console.is_terminal:
            count = itertools.count(1)
            every = max(1, total // 5)

            def advance(detail: str = "") -> None:
                done = next(count)
                if done % every == 0 or done == total:
                    print(f"{title}: {done}/{total} {detail}".rstrip(), flush=True)

            yield advance
            return
        columns = (
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeRemainingColumn(elapsed_when_finished=True),
            rich.progress.TextColumn("[dim]{task.fields[detail]}"),
        )
        with rich.progress.Progress(*columns, console=self.console) as bars:
            task = bars.add_task(title, total=total, detail="")
            yield lambda detail="": bars.update(task, advance=1, detail=detail)

    def show(self, result: Result) -> None:
        self.console.print(_training_table(result))
        self.console.print(_block_table(result))
        if result.expert_parallel is not None:
            self.console.print(_expert_parallel_table(result, result.expert_parallel))
        self.console.print(_check_table(result))


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f}"


def make_table(title: str, *columns: str) -> rich.table.Table:
    """A left-aligned column, then right-aligned ones."""
    table = rich.table.Table(
        title=title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD
    )
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _training_table(result: Result) -> rich.table.Table:
    table = make_table(
        "Training: nats per byte; bytes of one forward and backward of the model",
        "block",
        "loss first",
        "last",
        "held-out start",
        "end",
        "tokens/s",
        "saved MiB",
        "peak MiB",
    )
    for row in result.training:
        table.add_row(
            row.run,
            f"{row.losses[0]:.4f}",
            f"{row.losses[-1]:.4f}",
            f"{row.held_out_start:.4f}",
            f"{row.held_out_end:.4f}",
            f"{row.tokens_per_second.median:,.0f}",
            _mib(row.saved_bytes),
            _mib(row.peak_bytes),
        )
    return table


def _block_table(result: Result) -> rich.table.Table:
    table = make_table(
        "One MoE block of the trained model, forward and backward: median (p10 - p90)",
        "block",
        "ms",
        "time / fused",
        "saved MiB",
        "peak MiB",
        "error vs float64",
        "of allowed",
    )
    for row in result.blocks:
        ms = Spread(*(1e3 * s for s in row.seconds))
        table.add_row(
            row.block,
            f"{ms.median:.1f} ({ms.p10:.1f} - {ms.p90:.1f})",
            f"{row.slowdown.median:.2f} ({row.slowdown.p10:.2f} - {row.slowdown.p90:.2f})",
            _mib(row.saved_bytes),
            _mib(row.peak_bytes),
            f"{row.relative_error:.1e}",
            f"{row.of_allowed:.0%}",
        )
    return table


def _expert_parallel_table(result: Result, row: ExpertParallelRow) -> rich.table.Table:
    table = make_table(
        "Expert parallel: the fused model on more ranks, one thread each; bytes between ranks",
        "run",
        "loss last",
        "held-out end",
        "largest difference",
        "tokens/s",
        "payload KiB/step",
        "minimum",
        "metadata",
    )
    fused = next(r for r in result.training if r.run == "fused")
    table.add_row(
        f"fused, 1 process, {result.provenance['threads']} threads",
        f"{fused.losses[-1]:.4f}",
        f"{fused.held_out_end:.4f}",
        "",
        f"{fused.tokens_per_second.median:,.0f}",
        *("",) * 3,
    )
    wire = row.total_wire_bytes()
    table.add_row(
        f"{row.ranks} gloo ranks",
        f"{row.losses[-1]:.4f}",
        f"{row.held_out_end:.4f}",
        f"{max(row.differences):.1e}",
        f"{row.tokens_per_second.median:,.0f}",
        *(f"{wire[name] / 2**10:,.1f}" for name in ("payload", "minimum", "metadata")),
    )
    return table


def _check_table(result: Result) -> rich.table.Table:
    table = rich.table.Table(
        title="Checks", title_justify="left", title_style="bold", box=rich.box.SIMPLE
    )
    for column in ("", "promise", "seen", "rule"):
        table.add_column(column)
    for check in result.checks:
        verdict = "[green]ok[/]" if check.passed else "[bold red]FAIL[/]"
        table.add_row(verdict, check.name, check.seen, check.rule)
    return table


def _rounded(value: object) -> object:
    """Seven digits are more than any measurement here has."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _rounded(value._asdict())
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def format_json(fields: dict[str, object]) -> str:
    """Numbers rounded, every list of numbers on one line."""
    lines = json.dumps(_rounded(fields), indent=1)
    lines = re.sub(
        r"\[[-+.\deE,\s]+\]",
        lambda numbers: " ".join(numbers[0].split()).replace("[ ", "["),
        lines,
    )
    return lines + "\n"


def write_json(result: Result, path: pathlib.Path) -> None:
    """The result as JSON, provenance on top."""
    fields = dict(vars(result))
    fields = fields.pop("provenance") | fields
    for name in ("training", "blocks", "checks"):
        fields[name] = [vars(row) for row in fields[name]]
    if result.expert_parallel is not None:
        fields["expert_parallel"] = vars(result.expert_parallel)
    path.write_text(format_json(fields))
