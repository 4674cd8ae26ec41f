"""One page of text and one plot of a report of gpu_lab.py, from its JSON alone.

python benchmarks/moe/lab/summary.py run.json    # writes run.txt and run.png beside it
"""

import json
import math
import pathlib
import sys


sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

from report import figure


WIDTH = 92
OURS = "ours"
# (kind of pass, multiple of the forward's FLOPs), as in the rows.
KINDS = (("forward", 1), ("step", 3))


def peer_times(row: dict, kind: str) -> dict[str, float]:
    """Median milliseconds by peer, ours first, then the fastest first."""
    end = f"/{kind}"
    all_times = row.get("ms", {}).items()
    times = {n.removesuffix(end): t for n, t in all_times if n.endswith(end)}
    return dict(sorted(times.items(), key=lambda item: (item[0] != OURS, item[1])))


def _head(report: dict) -> list[str]:
    first = "MoE kernels on {device} ({arch}), torch {torch}, Triton {triton}"
    lines = [first.format(**report), f"command: {report['command']}"]
    if "mm_flops_per_s" in report:
        copy, mm = report["copy_bytes_per_s"] / 1e9, report["mm_flops_per_s"] / 1e12
        line = f"this card: copy {copy:,.0f} GB/s, dense bfloat16 {mm:,.1f} TFLOP/s"
        lines.append(line)
    if report["device"] == "interpreter":
        lines.append("A REHEARSAL on a CPU: the times mean nothing.")
    return lines


def _checks(report: dict) -> list[str]:
    cases = report.get("cases", [])
    bad = [row for row in cases if not row.get("ok")]
    good = f"  {len(cases) - len(bad)} of {len(cases)} cases within the tolerance"
    lines = ["", "Correctness", good]
    lines += [f"  FAILED {json.dumps(row)}" for row in bad[:5]]
    for row in report.get("repeatable", []):
        verdict = "ok" if row.get("ok") else f"FAILED {row}"
        lines.append(f"  same bits, {row.get('shape')}: {verdict}")
    if "sanitizer" in report:
        lines.append(f"  compute-sanitizer: {report['sanitizer']}")
    return [line[:WIDTH] for line in lines]


def row_lines(row: dict) -> list[str]:
    shape = row["shape"]
    sizes = " ".join(f"{name}={shape[name]}" for name in "TDFEK")
    lines = ["", f"{shape['name']}: {sizes}"]
    for kind, factor in KINDS:
        times = peer_times(row, kind)
        if OURS not in times:
            lines.append(f"  {kind:8s} FAILED {row.get('failed')}"[:WIDTH])
            continue
        own = times.pop(OURS)
        flops = factor * 6 * shape["T"] * shape["K"] * shape["D"] * shape["F"]
        text = f"  {kind:8s} {own:9.3f} ms {flops / own / 1e9:7.1f} TFLOP/s"
        text += f" {row['bound_ms'][kind] / own:5.0%} of bound"
        predicted = row.get("predicted_h100_ms", {}).get(kind)
        if predicted is not None:
            text += f", H100 model {predicted:.3f} ms: x{own / predicted:.2f}"
        lines.append(text)
        for name, t in times.items():
            mark = "" if t >= own else "  <- faster than ours"
            lines.append(f"    {name:28s} {t:9.3f} ms  x{t / own:.2f}{mark}")
    return lines


def page(report: dict) -> str:
    """What a reader of the numbers wants to know, losing rows included."""
    lines = _head(report) + _checks(report)
    for row in report.get("rows", []):
        lines += row_lines(row)
    absent = report.get("peers", {}).get("absent", [])
    if absent:
        lines += ["", f"Peers that were not there: {', '.join(absent)}"]
    return "\n".join(lines) + "\n"


def plot(report: dict, path: pathlib.Path) -> None:
    """Our time and every peer's over ours, with the bound and the model's time, as PNG."""
    rows = [row for row in report.get("rows", []) if peer_times(row, "forward")]
    size = (1.6 + 2.2 * max(len(rows), 2), 8)
    with figure(path, len(KINDS), 1, figsize=size) as axes:
        for axis, (kind, _) in zip(axes, KINDS):
            _plot_kind(axis, kind, rows)
        axes[0].set_title("\n".join(_head(report)), fontsize=8)


def _plot_kind(axis, kind: str, rows: list[dict]) -> None:
    over_ours: list[dict[str, float]] = []
    for j, row in enumerate(rows):
        times = peer_times(row, kind)
        own = times.get(OURS, math.inf)
        over_ours.append({name: t / own for name, t in times.items()})
        predicted = row.get("predicted_h100_ms", {}).get(kind, math.nan)
        for ms, color in ((row["bound_ms"][kind], "k"), (predicted, "r")):
            axis.hlines(ms / own, j - 0.45, j + 0.45, color, "--")
    names = list(dict.fromkeys(name for ratios in over_ours for name in ratios))
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        where = [j + (i - len(names) / 2 + 0.5) * width for j in range(len(rows))]
        ratios = [of_row.get(name, math.nan) for of_row in over_ours]
        axis.bar(where, ratios, width, label=name)
    axis.axhline(1, color="#888888", lw=0.8)
    axis.set_xticks(range(len(rows)), [row["shape"]["name"] for row in rows])
    axis.set_ylabel(f"{kind}: time / ours\nblack: bound, red: model of an H100")
    axis.legend(fontsize=8, ncols=3)


def write_summary(output: pathlib.Path) -> str:
    """Writes the page and, where matplotlib is, the plot beside a report; returns the page."""
    report = json.loads(output.read_text())
    text = page(report)
    try:
        plot(report, output.with_suffix(".png"))
    except ImportError as e:
        text += f"\nno plot: {e}; `python lab/summary.py {output.name}` draws it elsewhere\n"
    output.with_suffix(".txt").write_text(text)
    return text


if __name__ == "__main__":
    print(write_summary(pathlib.Path(sys.argv[1])), end="")
