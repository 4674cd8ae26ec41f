"""The picture of a demo run."""

import itertools
import pathlib

from matplotlib.axes import Axes
from report import figure


FUSED, UNFUSED, RANKS = "#d1495b", "#2e6f95", "#3a7d44"


def write_plot(result: dict, path: pathlib.Path) -> None:
    """Loss curves, their differences, and the blocks' time and memory, as PNG."""
    grid = {"figsize": (12, 7), "width_ratios": (1.7, 1)}
    settings = result["settings"]
    with figure(path, 2, 2, **grid) as axes:
        _plot_losses(axes[0, 0], result)
        _plot_differences(axes[1, 0], result)
        ms = {row["block"]: 1e3 * row["seconds"].median for row in result["blocks"]}
        _plot_bars(axes[0, 1], "MoE block, forward + backward (ms)", ms)
        mib = {row["block"]: row["saved_bytes"] / 2**20 for row in result["blocks"]}
        _plot_bars(axes[1, 1], "Saved for backward by the experts (MiB)", mib)
        axes[0, 0].figure.suptitle(
            f"MoE language model, {settings['parameters'] / 1e6:.1f} M parameters, "
            f"{settings['experts']} experts, top-{settings['top_k']}, trained on the "
            f"text of torch {result['torch']}"
        )


def _plot_losses(axes: Axes, result: dict) -> None:
    losses = {row["run"]: row["losses"] for row in result["training"]}
    axes.plot(losses["unfused"], color=UNFUSED, lw=4, alpha=0.45, label="unfused")
    axes.plot(losses["fused"], color=FUSED, lw=1.2, label="fused (F.moe_mlp)")
    if ranks := result["expert_parallel"]:
        label = f"fused on {ranks['ranks']} expert-parallel ranks"
        axes.plot(ranks["losses"], color=RANKS, lw=1.2, ls=":", label=label)
    entropy = result["text"]["byte_entropy"]
    axes.axhline(entropy, color="grey", ls="--", label="byte frequencies alone")
    axes.set_ylabel("training loss (nats per byte)")
    axes.legend()


def _plot_differences(axes: Axes, result: dict) -> None:
    """Dots are steps; lines are the largest difference so far, which the demo checks."""
    pairs = dict(result["differences"])
    fused = pairs.pop("fused - unfused")
    label = "two unfused runs, other expert order"
    lines = [(d, UNFUSED, None if i else label) for i, d in enumerate(pairs.values())]
    lines.append((fused, FUSED, "fused and unfused"))
    if ranks := result["expert_parallel"]:
        label = f"fused on {ranks['ranks']} ranks and on one"
        lines.append((ranks["differences"], RANKS, label))
    for difference, color, label in lines:
        axes.plot(difference, ".", color=color, ms=3, alpha=0.35)
        axes.plot(list(itertools.accumulate(difference, max)), color, label=label)
    limit = 2 * result["noise"]
    allowed = "allowed: 2x the largest between unfused runs"
    axes.axhline(limit, color="black", ls=":", label=allowed)
    axes.set(yscale="log", ylim=(limit / 3e3, 3 * limit), xlabel="step")
    axes.set_ylabel("|difference of losses|, largest so far")
    axes.legend(loc="lower right")


def _plot_bars(axes: Axes, title: str, bars: dict[str, float]) -> None:
    colors = [FUSED if name == "fused" else UNFUSED for name in bars]
    drawn = axes.barh([*bars], [*bars.values()], color=colors)
    axes.bar_label(drawn, fmt="%.1f", padding=6)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_title(title, fontsize=10, loc="left")
