"""JSON, table and plot of cpu_ops.py."""

import json
import os
import pathlib
from collections.abc import Iterable, Iterator

import rich.box
import rich.console
import rich.progress
import rich.table

import torch

from .peers import OURS
from .shapes import Row


LOG_WIDTH = 150  # of the table where there is no terminal to ask
_console = rich.console.Console()
if not _console.is_terminal:
    _console = rich.console.Console(width=LOG_WIDTH)

# What every row of the JSON has. Times are of one call, through all layers of the row; ratios are
# peer over ours, per round, with p10, p90 and an interval of the median; bytes are of one call.
SCHEMA = {
    "id": str,
    "shape": dict,
    "routing": str,
    "dtype": str,
    "pass": str,
    "layers": int,
    "sweep": (str, type(None)),
    "gradient_bytes": int,
    "best_eager_peer": str,
    "ratio": dict,
    "of_bound": float,
    "bound": dict,
    "forms": dict,
    "left_out": dict,
    "command": str,
    "started": str,
    "load_average": float,
}
# What must not differ between the runs that share a file.
_SAME = ("git", "torch", "torch_git", "machine", "threads", "cpu_flags")


def load_average() -> float:
    """Of the last minute: what else the machine did, besides these threads."""
    return round(os.getloadavg()[0], 2)


def open_record(
    path: pathlib.Path | None, provenance: dict[str, object], *, fresh: bool
) -> dict[str, object]:
    """The record that rows are added to: that of the file, if it has rows of the same commit.

    Raises:
        ValueError: the file is of another commit, torch, machine or thread count.
    """
    flags = [n for n, has in torch.cpu.get_capabilities().items() if has is True]
    record = {**provenance, "cpu_flags": " ".join(sorted(flags)), "rows": []}
    if path is None or fresh or not path.exists():
        return record
    old = json.loads(path.read_text())
    differ = [key for key in _SAME if old.get(key) != record[key]]
    if differ:
        changes = ", ".join(f"{k}: {old.get(k)} there, {record[k]} now" for k in differ)
        raise ValueError(
            f"--out {path.name} holds rows of another state ({changes}); "
            "give --fresh to drop them, or another file"
        )
    return {**record, "rows": old["rows"]}


def add_row(record: dict[str, object], row: dict[str, object]) -> None:
    """Appends a row, in place of an older one with its id."""
    record["rows"] = [r for r in record["rows"] if r["id"] != row["id"]] + [row]


def check_schema(record: dict[str, object]) -> None:
    """Raises ValueError where a record is not what README.md says."""
    for row in record["rows"]:
        for key, kind in SCHEMA.items():
            if not isinstance(row.get(key), kind):
                raise ValueError(f"{row.get('id')}: {key} is {row.get(key)!r}")
        if OURS not in row["forms"] or row["best_eager_peer"] not in row["forms"]:
            raise ValueError(f"{row['id']}: forms are {list(row['forms'])}")
        for name, form in row["forms"].items():
            expected = {"source", "kind", "error_over_allowed", "saved_bytes"}
            expected |= {"peak_bytes", "rounds", "milliseconds"}
            if name != OURS:
                expected.add("ratio_to_ours")
            if missing := expected - form.keys():
                raise ValueError(f"{row['id']}: {name} has no {sorted(missing)}")


def write(record: dict[str, object], path: pathlib.Path) -> None:
    check_schema(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def progress(rows: list[Row]) -> Iterator[Row]:
    """The rows, with a bar that names the current one where there is a terminal."""
    with rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        console=_console,
        disable=not _console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=len(rows))
        for row in rows:
            bar.update(task, description=row.id)
            yield row
            bar.advance(task)


def print_row(row: dict[str, object]) -> None:
    """All forms of a row, the fastest first."""
    _console.print(
        f"[bold]{row['id']}[/]  {row['of_bound']:.0%} of the bound "
        f"({row['bound']['milliseconds']:.2f} ms, {row['bound']['limited_by']})",
        highlight=False,
    )
    forms = row["forms"].items()
    for name, form in sorted(forms, key=lambda f: f[1]["milliseconds"]["median"]):
        ms, ratio = form["milliseconds"], form.get("ratio_to_ours")
        text = f"  {name:32} {ms['median']:9.2f} ms ({ms['p10']:.2f} - {ms['p90']:.2f})"
        if ratio:
            low, high = ratio["interval"]
            text += f"  {ratio['median']:.2f}x [{low:.2f}, {high:.2f}]"
        text += f"  peak {form['peak_bytes'] / 2**20:.0f} MiB"
        text += f"  saved {form['saved_bytes'] / 2**20:.1f} MiB"
        _console.print(text + ("  capped" if "capped" in form else ""), highlight=False)
    for name, reason in row["left_out"].items():
        _console.print(f"  {name:32} left out: {reason}", highlight=False, markup=False)


def print_table(rows: Iterable[dict[str, object]]) -> None:
    table = rich.table.Table(box=rich.box.SIMPLE, title="F.moe_mlp on the CPU")
    left = ("row", "best eager peer")
    right = ("ms", "peer ms", "ratio", "interval", "of bound", "peak", "least peer peak", "saved")  # fmt: skip
    for column in left[:1] + right[:1] + left[1:] + right[1:]:
        table.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        ours, best = row["forms"][OURS], row["forms"][row["best_eager_peer"]]
        low, high = row["ratio"]["interval"]
        peaks = [f["peak_bytes"] for n, f in row["forms"].items() if n != OURS]
        table.add_row(
            row["id"],
            f"{ours['milliseconds']['median']:.2f}",
            row["best_eager_peer"],
            f"{best['milliseconds']['median']:.2f}",
            f"{row['ratio']['median']:.2f}",
            f"{low:.2f} - {high:.2f}",
            f"{row['of_bound']:.0%}",
            f"{ours['peak_bytes'] / 2**20:.0f} MiB",
            f"{min(peaks) / 2**20:.0f} MiB",
            f"{ours['saved_bytes'] / 2**20:.1f} MiB",
        )
    _console.print(table)


def _plot_ratios(axes, rows: list[dict[str, object]]) -> None:
    y = range(len(rows))
    medians = [r["ratio"]["median"] for r in rows]
    low = [m - r["ratio"]["interval"][0] for m, r in zip(medians, rows)]
    high = [r["ratio"]["interval"][1] - m for m, r in zip(medians, rows)]
    axes.barh(y, medians, xerr=[low, high], color="tab:blue", ecolor="black")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(y, [r["id"] for r in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("time of the best eager peer / F.moe_mlp")


def _plot_bounds(axes, rows: list[dict[str, object]]) -> None:
    axes.barh(range(len(rows)), [r["of_bound"] for r in rows], color="tab:green")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [""] * len(rows))
    axes.invert_yaxis()
    axes.set_xlabel("bound / F.moe_mlp")


def _plot_sweep(axes, rows: list[dict[str, object]], sweep: str) -> None:
    chosen = sorted(
        (r for r in rows if r["sweep"] == sweep), key=lambda r: r["shape"]["E"]
    )
    names = dict.fromkeys(name for row in chosen for name in row["forms"])
    for name in names:
        points = [
            (row["shape"]["E"], row["forms"][name]["milliseconds"]["median"])
            for row in chosen
            if name in row["forms"]
        ]
        axes.plot(
            *zip(*points), marker="o", label=name, linewidth=3 if name == OURS else 1
        )
    bounds = [(r["shape"]["E"], r["bound"]["milliseconds"]) for r in chosen]
    if bounds:
        axes.plot(*zip(*bounds), "k:", label="bound")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend(fontsize=6)
    axes.set_xlabel(f"E, {sweep}")
    axes.set_ylabel("forward + backward, ms")


def plot(rows: list[dict[str, object]], path: pathlib.Path) -> None:
    """Ratios, shares of the bound, and the two sweeps, as one PNG."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2, 2, figsize=(13, 11), height_ratios=(2, 1), layout="constrained"
    )
    _plot_ratios(axes[0, 0], rows)
    _plot_bounds(axes[0, 1], rows)
    _plot_sweep(axes[1, 0], rows, "constant K")
    _plot_sweep(axes[1, 1], rows, "constant FLOPs")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
