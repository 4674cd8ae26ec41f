"""What the benchmarks print: progress, and tables of rows; rich is all they need."""

import argparse
import contextlib
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import rich.box
import rich.console
import rich.progress
import rich.table

from measure import Spread


LOG_WIDTH = 150  # of the tables where there is no terminal to ask


def console() -> rich.console.Console:
    found = rich.console.Console(highlight=False)
    if not found.is_terminal:
        found.width = LOG_WIDTH
    return found


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[..., None]]:
    """Yields ``advance(detail)``: a bar on a terminal, and a few plain lines elsewhere."""
    if not console().is_terminal:
        count, every = itertools.count(1), max(1, total // 5)

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
    with rich.progress.Progress(*columns, console=console()) as bars:
        task = bars.add_task(title, total=total, detail="")
        yield lambda detail="": bars.update(task, advance=1, detail=detail)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """With the docstring of a script as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


@contextlib.contextmanager
def figure(path: pathlib.Path, *grid: int, **options: object) -> Iterator[Any]:
    """Axes of a figure that is then written as PNG; arguments are those of plt.subplots."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(*grid, layout="constrained", **options)
    yield axes
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=120)
    plt.close(drawn)


def spread_text(values: Iterable[float], scale: float = 1.0, digits: int = 1) -> str:
    median, low, high = (f"{scale * v:,.{digits}f}" for v in values)
    return f"{median} ({low} - {high})"


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f}"


def _cell(value: object) -> str:
    if isinstance(value, Spread):
        return spread_text(value, digits=2)
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value)


def show(
    title: str,
    rows: Iterable[Mapping[str, object]],
    columns: Mapping[str, str | Callable[[Mapping], object]],
) -> None:
    """A table.

    Args:
        columns: heading -> key of the rows, or a function of a row. The first is left-aligned.
    """
    cells = [
        [_cell(row[c] if isinstance(c, str) else c(row)) for c in columns.values()]
        for row in rows
    ]
    table = rich.table.Table(
        title=title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD
    )
    for i, heading in enumerate(columns):
        # Words to the left, numbers to the right.
        numbers = all(not row[i] or row[i][0] in "-0123456789" for row in cells)
        justify = "right" if i and numbers else "left"
        table.add_column(heading, justify=justify, no_wrap=not i)
    for row in cells:
        table.add_row(*row)
    console().print(table)
