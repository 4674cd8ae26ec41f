"""The picture of a demo run."""

import itertools
import pathlib
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from report import figure


FUSED, UNFUSED, RANKS = "#d1495b", "#2e6f95", "#3a7d44"


def write_plot(result: dict, path: pathlib.Path) -> None:
    """Loss curves, their differences, and the blocks' time and memory, as PNG."""
    grid = {"figsize": (12, 7), "width_ratios": (1.7, 1)}
    with figure(path, 2, 2, **grid) as axes:
        _plot_all(axes, result)


def _plot_all(axes: Any, result: dict) -> None:
    _plot_losses(axes[0, 0], result)
    _plot_differences(axes[1, 0], result)
    axes[1, 0].sharex(axes[0, 0])
    rows = result["blocks"][::-1]  # barh counts upwards
    times = [[1e3 * v for v in row["seconds"]] for row in rows]
    errors = [[m - low for m, low, _ in times], [high - m for m, _, high in times]]
    title = "MoE block, forward + backward (ms)"
    _plot_bars(axes[0, 1], title, rows, [m for m, _, _ in times], errors)
    saved = [row["saved_bytes"] / 2**20 for row in rows]
    _plot_bars(axes[1, 1], "Saved for backward by the experts (MiB)", rows, saved)
    settings = result["settings"]
    axes[0, 0].figure.suptitle(
        f"MoE language model, {settings['parameters'] / 1e6:.1f} M parameters, "
        f"{settings['experts']} experts, top-{settings['top_k']}, trained on the text of torch "
        f"{result['torch']}",
        fontsize=12,
    )


def _plot_losses(axes: Axes, result: dict) -> None:
    losses = {row["run"]: row["losses"] for row in result["training"]}
    axes.plot(losses["unfused"], color=UNFUSED, lw=4, alpha=0.45, label="unfused")
    axes.plot(losses["fused"], color=FUSED, lw=1.2, label="fused (F.moe_mlp)")
    entropy = result["text"]["byte_entropy"]
    axes.axhline(entropy, color="#9aa5ad", ls="--", lw=1)
    axes.annotate(
        "byte frequencies alone",
        (len(losses["fused"]) - 1, entropy),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        color="#66717a",
    )
    if ranks := result["expert_parallel"]:
        label = f"fused on {ranks['ranks']} expert-parallel ranks"
        axes.plot(ranks["losses"], color=RANKS, lw=1.2, ls=(0, (2, 2)), label=label)
    axes.set_ylabel("training loss (nats per byte)")
    axes.legend(frameon=False)
    _clean(axes)


def _plot_differences(axes: Axes, result: dict) -> None:
    """Dots are steps; lines are the largest difference so far, which the check is about."""
    pairs = dict(result["differences"])
    fused = pairs.pop("fused - unfused")
    lines = [(d, UNFUSED, 1.2, None) for d in pairs.values()]
    lines[0] = (*lines[0][:3], "two unfused runs, other expert order")
    lines.append((fused, FUSED, 2, "fused and unfused"))
    if ranks := result["expert_parallel"]:
        label = f"fused on {ranks['ranks']} ranks and on one"
        lines.append((ranks["differences"], RANKS, 2, label))
    for difference, color, width, label in lines:
        axes.plot(difference, ".", color=color, ms=3, alpha=0.35, mew=0)
        largest = list(itertools.accumulate(difference, max))
        steps = range(len(largest))
        axes.step(steps, largest, where="post", color=color, lw=width, label=label)
    limit = 2 * max(map(max, pairs.values()))
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
    axes: Axes, title: str, rows: list[dict], values: list, errors: list | None = None
) -> None:
    names = [row["block"] for row in rows]
    colors = [FUSED if name == "fused" else UNFUSED for name in names]
    bars = axes.barh(names, values, xerr=errors, color=colors, alpha=0.8, height=0.6)
    axes.bar_label(bars, fmt="%.1f", padding=6)
    axes.margins(x=0.18)
    axes.set_title(title, fontsize=10, loc="left")
    _clean(axes)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y" if axes.get_ylabel() else "x", alpha=0.25)
