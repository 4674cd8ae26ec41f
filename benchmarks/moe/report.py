"""Output of the benchmarks: progress, tables of rows, figures.

rich and matplotlib are imported at their use, as a bare GPU machine may lack both.
"""

import argparse
import contextlib
import errno
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from measure import Spread


LOG_WIDTH = 150  # of the tables where there is no terminal to ask
SAY_EVERY = 10  # seconds


@contextlib.contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Yields ``advance(detail)``: a bar on a terminal, elsewhere a plain line every 10 seconds."""
    from rich.progress import Progress

    terminal, over = sys.stdout.isatty(), threading.Event()
    start, done, last = time.monotonic(), 0, ""
    columns = (*Progress.get_default_columns(), "[dim]{task.fields[detail]}")

    def say() -> None:
        count = f"{done}/{total} " if total else f"{time.monotonic() - start:.0f} s "
        print(f"{title}: {count}{last}".rstrip(), flush=True)

    def say_often() -> None:
        while not over.wait(SAY_EVERY):
            say()

    with Progress(*columns, disable=not terminal) as bars:
        task = bars.add_task(title, total=total, detail="")

        def advance(detail: str = "") -> None:
            nonlocal done, last
            done, last = done + 1, detail
            bars.update(task, advance=1, detail=detail)

        if not terminal and total != 0:
            threading.Thread(target=say_often, daemon=True).start()
        try:
            yield advance
        finally:
            over.set()
    if not terminal and total != 0:
        say()


def existing_file(text: str) -> pathlib.Path:
    """The type of an option whose value is a file that is there."""
    if not pathlib.Path(text).is_file():
        raise argparse.ArgumentTypeError(f"no file {text!r}")
    return pathlib.Path(text)


def existing_folder(text: str) -> pathlib.Path:
    """The type of an option whose value is a folder that is there."""
    if not pathlib.Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"no folder {text!r}")
    return pathlib.Path(text)


def _parser_of(kind: type, least: int = 0) -> Callable[[str], object]:
    """The type of an argument, whose numbers are not below ``least``."""
    if kind not in (int, float):
        return kind

    def number(text: str) -> object:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    number.__name__ = kind.__name__  # "invalid int value"
    return number


def _output(path: pathlib.Path, name: str) -> pathlib.Path:
    """The file that ``--out`` names; raises OSError before any work if none can be written."""
    if path.suffix != ".json" or path.is_dir():
        path = path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    with tempfile.TemporaryFile(dir=path.parent):
        return path


def parse(
    doc: str | None, *, argv=None, name: str | None = None, **defaults: Any
) -> argparse.Namespace:
    """The command line of a script: ``--out FILE.json`` or a folder, and options by their defaults.

    Args:
        name: of the output in a folder. Default: that of the script
        defaults: a list takes several values, a dict several of its keys, by default all. A tuple
            lists the allowed values, the default first. False is a switch. A type has no default.
            A function is the type of a value that has no default. Ellipsis is a file that must be
            given. Numbers are not negative, and integers whose default is positive are at least 1.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("--out", "--json", "--output")
    parser.add_argument(*names, type=pathlib.Path, help="results, as JSON")
    for option, default in defaults.items():
        one = default[0] if isinstance(default, list) else default
        least = int(type(one) is int and one > 0)
        kind: dict[str, Any] = {
            "default": default,
            "type": _parser_of(type(one), least),
        }
        if default is ...:
            kind = {"required": True, "type": existing_file}
        elif default is False:
            kind = {"action": "store_true"}
        elif isinstance(default, type):
            kind = {"nargs": "*"} if default is list else {"type": _parser_of(default)}
        elif isinstance(default, list):
            kind |= {"nargs": "+"}
        elif isinstance(default, dict):
            kind = {"nargs": "+", "choices": [*default], "default": [*default]}
        elif isinstance(default, tuple):
            kind = {"choices": default, "default": default[0]}
        elif callable(default):
            kind = {"type": default}
        parser.add_argument(f"--{option.replace('_', '-')}", **kind)
    args = parser.parse_args(argv)
    if args.out is not None:
        name = name or pathlib.Path(sys.argv[0]).with_suffix(".json").name
        try:
            args.out = _output(args.out, name)
        except OSError as error:
            parser.error(f"argument --out: cannot write {args.out}: {error.strerror}")
    return args


@contextlib.contextmanager
def figure(path: pathlib.Path, *grid: int, **options: object) -> Iterator[Any]:
    """Axes of a figure that is written as PNG; arguments are those of plt.subplots."""
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


def _cell(value: object) -> str:
    if isinstance(value, Spread | list):  # JSON has no tuples
        return spread_text(value, digits=2)
    if isinstance(value, Mapping) and "interval" in value:
        return "{:.2f} [{:.2f}, {:.2f}]".format(value["median"], *value["interval"])
    if isinstance(value, Mapping) and "median" in value:
        return spread_text(value.values(), digits=2)
    if type(value) is int:  # and not bool
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return "" if value is None else str(value)


def at(row: Mapping[str, Any], path: str) -> object:
    """The value at "key.key" of nested objects; None where there is none."""
    for key in path.split("."):
        row = row.get(key) if isinstance(row, Mapping) else None
    return row


def show(
    title: str,
    rows: Sequence[Mapping[str, object]],
    columns: Iterable[str] | Mapping[str, str] = (),
) -> None:
    """A table; a spread is its median and deciles, a ratio its median and interval.

    ``columns`` are keys of the rows, "key.key" for nested ones, or heading -> key. Default: all
    keys of the first row.
    """
    import rich.box
    import rich.console
    import rich.table

    columns = columns or list(rows[0])
    if not isinstance(columns, Mapping):
        columns = {key: key for key in columns}
    cells = [[_cell(at(row, key)) for key in columns.values()] for row in rows]
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
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    console.print(table)
