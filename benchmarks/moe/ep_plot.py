"""The picture of an ep.py run."""

import pathlib

import matplotlib


matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes


COLORS = {"flat": "#2e6f95", "node": "#d1495b", "local": "#3a7d44"}
KINDS = {
    "rows": "#2e6f95",
    "returned": "#7fb2cf",
    "scales": "#e0a458",
    "metadata": "#d1495b",
}


def write_plot(result: dict, path: pathlib.Path) -> None:
    """Bytes, links, predictions and balance, as PNG."""
    figure, axes = plt.subplots(2, 2, figsize=(13, 8.5), layout="constrained")
    _plot_bytes(axes[0, 0], result["cases"])
    _plot_links(axes[0, 1], result["links"])
    _plot_predictions(axes[1, 0], result["cases"])
    _plot_balance(axes[1, 1], result["placements"])
    figure.suptitle(f"Expert parallelism on {result['hosts']}, 2 gloo ranks each")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _label(row: dict) -> str:
    placed = ", placed" if row["placed"] else ""
    return f"{row['routing']}, {row['switch']}, {row['wire']}, D={row['dim']}{placed}"


def _plot_bytes(axes: Axes, cases: list[dict]) -> None:
    upwards = cases[::-1]
    labels = [_label(row) for row in upwards]
    left = [0.0] * len(upwards)
    for kind, color in KINDS.items():
        names = ("ids", "weights", "sizes") if kind == "metadata" else (kind,)
        widths = [
            sum(level[n] for level in row["levels"].values() for n in names) / 2**20
            for row in upwards
        ]
        axes.barh(labels, widths, left=left, color=color, height=0.6, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    least = [
        sum(v["minimum_rows"] + v["minimum_returned"] for v in row["levels"].values())
        for row in upwards
    ]
    axes.plot([b / 2**20 for b in least], labels, "k|", ms=14, label="fewest for rows")
    axes.set_title("Bytes between ranks in one forward (MiB)", loc="left", fontsize=10)
    axes.legend(
        frameon=False,
        fontsize=8,
        ncols=5,
        loc="upper center",
        bbox_to_anchor=(0.4, -0.07),
    )
    _clean(axes, "x")


def _plot_links(axes: Axes, links: dict) -> None:
    for level, link in links.items():
        sizes = link["bytes"]
        times = [1e3 * s for s in link["seconds"]]
        fit = [1e3 * (link["alpha"] + link["beta"] * n) for n in sizes]
        axes.loglog(sizes, times, "o", color=COLORS[level], label=level)
        axes.loglog(sizes, fit, "-", color=COLORS[level], lw=1)
    axes.set_title(
        "All-to-all, dots measured, lines alpha + beta n", loc="left", fontsize=10
    )
    axes.set_xlabel("bytes n that a rank sends to others")
    axes.set_ylabel("ms")
    axes.legend(frameon=False)
    _clean(axes, "both")


def _plot_predictions(axes: Axes, cases: list[dict]) -> None:
    for level, color in COLORS.items():
        pairs = [
            (1e3 * row["predicted_seconds"][level], 1e3 * row["wire_seconds"][level])
            for row in cases
            if level in row["levels"]
        ]
        axes.loglog(*zip(*pairs, strict=True), "o", color=color, label=level)
    low, high = axes.get_xlim()
    axes.plot([low, high], [low, high], "k:", lw=1)
    axes.set_title(
        "Collectives of a forward: measured over predicted", loc="left", fontsize=10
    )
    axes.set_xlabel("alpha-beta prediction (ms)")
    axes.set_ylabel("measured (ms)")
    axes.legend(frameon=False)
    _clean(axes, "both")


def _plot_balance(axes: Axes, rows: list[dict]) -> None:
    labels = [
        f"{row['routing']}, {row['ranks'] // row['ranks_per_node']}x{row['ranks_per_node']}"
        for row in rows
    ][::-1]
    for name, color, height in (("before", "#9aa5ad", 0.7), ("after", "#3a7d44", 0.35)):
        label = {"before": "experts in order", "after": "placed"}[name]
        values = [row[name] for row in rows][::-1]
        axes.barh(labels, values, color=color, height=height, label=label)
    axes.axvline(1, color="black", lw=1)
    axes.set_title(
        "Heaviest / mean rank load, on loads the plan has not seen",
        loc="left",
        fontsize=10,
    )
    axes.legend(frameon=False)
    _clean(axes, "x")


def _clean(axes: Axes, grid: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.25)
