"""The picture of a demo run."""

import itertools
import pathlib

import matplotlib


matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from demo.report import Result


FUSED_COLOR = "#d1495b"
UNFUSED_COLOR = "#2e6f95"
OTHER_COLOR = "#9aa5ad"
RANKS_COLOR = "#3a7d44"


def write_plot(result: Result, path: pathlib.Path) -> None:
    """Loss curves, their differences, and the blocks' time and memory, as PNG."""
    figure = plt.figure(figsize=(12, 7), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.7, 1))
    loss_axes = figure.add_subplot(grid[0, 0])
    _plot_losses(loss_axes, result)
    _plot_differences(figure.add_subplot(grid[1, 0], sharex=loss_axes), result)
    rows = result.blocks[::-1]  # barh counts upwards
    names = [row.block for row in rows]
    _plot_bars(
        figure.add_subplot(grid[0, 1]),
        "MoE block, forward + backward (ms)",
        names,
        [1e3 * row.seconds.median for row in rows],
        [
            [1e3 * (row.seconds.median - row.seconds.p10) for row in rows],
            [1e3 * (row.seconds.p90 - row.seconds.median) for row in rows],
        ],
    )
    _plot_bars(
        figure.add_subplot(grid[1, 1]),
        "Saved for backward by the experts (MiB)",
        names,
        [row.saved_bytes / 2**20 for row in rows],
    )
    settings = result.settings
    figure.suptitle(
        f"MoE language model, {settings['parameters'] / 1e6:.1f} M parameters, "
        f"{settings['experts']} experts, top-{settings['top_k']}, trained on the text of torch "
        f"{result.provenance['torch']}",
        fontsize=12,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _plot_losses(axes: Axes, result: Result) -> None:
    rows = {row.run: row for row in result.training}
    steps = range(len(result.training[0].losses))
    axes.plot(
        steps,
        rows["unfused"].losses,
        color=UNFUSED_COLOR,
        lw=4,
        alpha=0.45,
        label="unfused",
    )
    axes.plot(
        steps,
        rows["fused"].losses,
        color=FUSED_COLOR,
        lw=1.2,
        label="fused (F.moe_mlp)",
    )
    axes.axhline(result.text["byte_entropy"], color=OTHER_COLOR, ls="--", lw=1)
    axes.annotate(
        "byte frequencies alone",
        (steps[-1], result.text["byte_entropy"]),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        color="#66717a",
    )
    if result.expert_parallel is not None:
        axes.plot(
            steps,
            result.expert_parallel.losses,
            color=RANKS_COLOR,
            lw=1.2,
            ls=(0, (2, 2)),
            label=f"fused on {result.expert_parallel.ranks} expert-parallel ranks",
        )
    axes.set_ylabel("training loss (nats per byte)")
    axes.legend(frameon=False)
    _clean(axes)


def _plot_differences(axes: Axes, result: Result) -> None:
    """Dots are steps; lines are the largest difference so far, which the check is about."""
    noise = [d for pair, d in result.differences.items() if pair != "fused - unfused"]
    limit = 2 * max(map(max, noise))

    def plot(
        difference: list[float], color: str, width: float, label: str | None
    ) -> None:
        steps = range(len(difference))
        axes.plot(steps, difference, ".", color=color, ms=3, alpha=0.35, mew=0)
        largest = list(itertools.accumulate(difference, max))
        axes.step(steps, largest, where="post", color=color, lw=width, label=label)

    for i, difference in enumerate(noise):
        plot(
            difference,
            UNFUSED_COLOR,
            1.2,
            None if i else "two unfused runs, other expert order",
        )
    plot(result.differences["fused - unfused"], FUSED_COLOR, 2, "fused and unfused")
    if result.expert_parallel is not None:
        label = f"fused on {result.expert_parallel.ranks} ranks and on one"
        plot(result.expert_parallel.differences, RANKS_COLOR, 2, label)
    axes.axhline(limit, color="black", ls=":", lw=1)
    axes.annotate(
        "allowed: 2x the largest between unfused runs",
        (0, limit),
        xytext=(0, 3),
        textcoords="offset points",
    )
    axes.set_yscale("log")
    axes.set_ylim(limit / 3e3, 3 * limit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("|difference of losses|, largest so far")
    axes.legend(frameon=False, loc="lower right")
    _clean(axes)


def _plot_bars(
    axes: Axes,
    title: str,
    names: list[str],
    values: list[float],
    errors: list[list[float]] | None = None,
) -> None:
    colors = [FUSED_COLOR if name == "fused" else UNFUSED_COLOR for name in names]
    bars = axes.barh(names, values, xerr=errors, color=colors, alpha=0.8, height=0.6)
    axes.bar_label(bars, fmt="%.1f", padding=6)
    axes.margins(x=0.18)
    axes.set_title(title, fontsize=10, loc="left")
    _clean(axes)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y" if axes.get_ylabel() else "x", alpha=0.25)
