"""One page of text and one plot of a gpu_lab.py report, and what it proves, from its JSON alone.

python benchmarks/moe/lab/summary.py run.json            # writes run.txt and run.png beside it
python benchmarks/moe/lab/summary.py run.json --prove    # and its rows of proven.py
"""

import json
import math
import pathlib
import runpy
import sys
import textwrap


sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

from report import figure


PROVEN = pathlib.Path(__file__).resolve().parents[3] / "torch/_native/ops/moe/proven.py"
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
    lines = [first.format(**report)]
    lines += textwrap.wrap(f"command: {report['command']}", WIDTH)
    if "mm_flops_per_s" in report:
        copy, mm = report["copy_bytes_per_s"] / 1e9, report["mm_flops_per_s"] / 1e12
        line = f"this card: copy {copy:,.0f} GB/s, dense bfloat16 {mm:,.1f} TFLOP/s"
        lines.append(line)
    if report["device"] == "interpreter":
        lines.append("A REHEARSAL on a CPU: the times mean nothing.")
    return lines


def _checks(report: dict) -> list[str]:
    rows = report.get("checks", [])
    good = [row["family"] for row in rows if row.get("ok")]
    lines = ["", f"Correctness: {len(good)} of {len(rows)} kernel families"]
    if good:
        indents = {"initial_indent": "  ", "subsequent_indent": "  "}
        lines += textwrap.wrap(f"ok: {', '.join(good)}", WIDTH, **indents)
    for row in rows:
        for case, error in row.get("failed", {}).items():
            lines.append(f"  FAILED {row['family']}, {case}: {error}")
            break  # the others are in the JSON
        if "absent" in row:
            lines.append(f"  {row['family']} is not here: {row['absent']}")
    for row in report.get("repeatable", []):
        verdict = "ok" if row.get("ok") else f"FAILED {row}"
        lines.append(f"  same bits, {row.get('shape')}: {verdict}")
    for tool, row in report.get("sanitizer", {}).items():
        text = row if isinstance(row, str) else row["status"]
        if isinstance(row, dict) and "by" in row:
            text += f", {row['by']}"
        if isinstance(row, dict) and (row.get("failed") or row["status"] != "ok"):
            text = f"FAILED {row['status']} {row.get('failed') or row['errors']}"
        lines.append(f"  {tool}: {text}")
    return [line[:WIDTH] for line in lines]


def _stages(report: dict) -> list[str]:
    stages = report.get("stages", {}).items()
    minutes = ", ".join(f"{name} {row['minutes']:.1f}" for name, row in stages)
    lines = ["", f"Minutes: {minutes}"]
    compiled = report.get("compiled", [])
    bad = [row for row in compiled if row["compiled"] != "ok" or row.get("spills")]
    seconds = sum(row.get("seconds", 0) for row in compiled)
    lines.append(f"{len(compiled)} kernels compiled in {seconds:.0f} s of processors")
    lines += [f"  FAILED {json.dumps(row)}"[:WIDTH] for row in bad[:5]]
    for name, row in report.get("not_ok", {}).items():
        lines.append(f"  FAILED {name}: {row['status']}"[:WIDTH])
    return lines


def _kernels(report: dict) -> list[str]:
    """Microseconds of kernels, and measured / predicted, a line per shape and pass."""
    lines = []
    for row in report.get("kernels", []):
        if "failed" in row:
            lines.append(f"  {row['shape']}: FAILED {row['failed']}")
            continue
        sums = []
        for name in ("forward_us", "backward_us"):
            text, predicted = f"{row[name]:,.0f}", row.get(f"predicted_{name}")
            ratio = f" x{row[name] / predicted:.2f}" if predicted else ""
            sums.append(text + ratio)
        lines.append(f"  {row['shape']}, {row['family']}: {', '.join(sums)}")
        parts = [
            f"{k['kernel']} {k['us']:,.0f}"
            + (f" x{k['ratio']:.2f}" if "ratio" in k else "")
            for k in sorted(row["kernels"], key=lambda k: -k["us"])[:6]
        ]
        lines.append(f"    {', '.join(parts)}")
    heading = (
        "Kernels: sums of forward and backward, then each; us, x of the prediction"
    )
    return ["", heading, *lines] if lines else []


def row_lines(row: dict) -> list[str]:
    """Ours, then what is faster or slower, a line per pass."""
    shape = row["shape"]
    sizes = " ".join(f"{name}={shape[name]}" for name in "TDFEK")
    lines = [f"{shape['name']}: {sizes}"]
    for kind, factor in KINDS:
        times = peer_times(row, kind)
        if OURS not in times:
            lines.append(f"  {kind:8s}FAILED {row.get('failed')}"[:WIDTH])
            continue
        own = times.pop(OURS)
        flops = factor * 6 * shape["T"] * shape["K"] * shape["D"] * shape["F"]
        text = f"  {kind:8s}{own:9.3f} ms {flops / own / 1e9:6.1f} TFLOP/s"
        text += f" {row['bound_ms'][kind] / own:5.0%} of bound"
        predicted = row.get("predicted_h100_ms", {}).get(kind)
        if predicted is not None:
            text += f", x{own / predicted:.2f} of the model"
        marks = ((n, t, " FASTER" if t < own else "") for n, t in times.items())
        peers = ", ".join(f"{n} x{t / own:.2f}{m}" for n, t, m in marks)
        indents = {"initial_indent": " " * 4, "subsequent_indent": " " * 4}
        lines += [text, *textwrap.wrap(peers, WIDTH, **indents)]
    return lines


def page(report: dict) -> str:
    """The page of text, losing rows included."""
    lines = _head(report) + _checks(report) + _stages(report) + _kernels(report)
    if report.get("rows"):
        lines += ["", "Layers, and the time of peers over ours"]
    for row in report.get("rows", []):
        lines += row_lines(row)
    absent = report.get("peers", {}).get("absent", {})
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


def read_report(output: pathlib.Path) -> dict:
    """The report of a run.

    Raises:
        OSError: there is no such file.
        ValueError: it is no report, or of a run that did not start.
    """
    try:
        report = json.loads(output.read_text())
    except ValueError as e:
        raise ValueError(f"{output}: is not JSON: {e}") from e
    if not isinstance(report, dict) or "device" not in report:
        raise ValueError(f"{output}: is not the report of a run that found its device")
    return report


def write_summary(output: pathlib.Path) -> str:
    """Writes the page, and with matplotlib the plot, beside a report; returns the page."""
    report = read_report(output)
    text = page(report)
    try:
        plot(report, output.with_suffix(".png"))
    except ImportError as e:
        text += f"\nno plot: {e}; `python lab/summary.py {output.name}` draws it elsewhere\n"
    output.with_suffix(".txt").write_text(text)
    return text


def prove(report: dict, path: pathlib.Path = PROVEN) -> list[tuple[str, ...]]:
    """Adds the kernel families that passed in a run to proven.py, and removes those that failed.

    Returns:
        The rows of that file, (family, arch, card, date, versions).

    Raises:
        ValueError: the run was a rehearsal on a CPU, or checked nothing.
    """
    if report["device"] == "interpreter":
        raise ValueError("a rehearsal proves nothing of a GPU")
    if "checks" not in report:
        raise ValueError("a run without the stage check proves nothing")
    arch, card = report["arch"], report["device"]
    versions = f"torch {report['torch']}, Triton {report['triton']}"
    rows = {row["family"]: row["ok"] for row in report["checks"]}
    kept = [
        tuple(run)
        for run in runpy.run_path(str(path))["RUNS"]
        if run.arch != arch or run.family not in rows
    ]
    new = [(f, arch, card, report["date"], versions) for f, ok in rows.items() if ok]
    runs = sorted(kept + new)
    lines = [f"    Run({', '.join(map(json.dumps, run))}),\n" for run in runs]
    value = f"(\n{''.join(lines)})" if runs else "()"
    start, end = "# --- runs\n", "# --- end of runs\n"
    before, _, rest = path.read_text().partition(start)
    after = rest.partition(end)[2]
    text = f"{before}{start}RUNS: tuple[Run, ...] = {value}\n{end}{after}"
    path.write_text(text)
    return runs


def main(words: list[str]) -> int:
    paths = [word for word in words if word != "--prove"]
    if len(paths) != 1 or paths[0].startswith("-"):
        print("usage: summary.py RUN.json [--prove]", file=sys.stderr)
        return 2
    output, runs = pathlib.Path(paths[0]), []
    try:
        if "--prove" in words:  # first, as it may refuse
            runs = prove(read_report(output))
        print(write_summary(output), end="")
    except (OSError, ValueError) as e:
        print(f"summary.py: {e}", file=sys.stderr)
        return 2
    for run in runs:
        print(*run)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
