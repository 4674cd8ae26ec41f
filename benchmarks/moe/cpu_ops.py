"""Time F.moe_mlp on the CPU beside what people run today, and beside a bound.

Every row runs all forms in this process, in turns, on views of the same weights, after it
has compared each of them with float64::

    python benchmarks/moe/cpu_ops.py --out FILE.json --plot FILE.png

``--rows`` takes names or shell patterns of ids (``--list`` shows them); rows of several runs
of one commit merge in the same file, each with its own command and time. Peers are those of
the transformers package where it can be imported, else our own code in the same forms; every
entry names its source.

By default memory is what malloc makes of it: buffers of more than 32 MiB, weight gradients
above all, are given back to the system by every form and are touched for the first time in
every call. ``--keep-memory`` measures as under an allocator that keeps them (tcmalloc or
jemalloc, which ``torch.backends.xeon.run_cpu`` loads).
"""

import argparse
import datetime
import os
import pathlib
import platform
import sys

from cpu import report, shapes
from cpu.timing import measure_row, Settings

import torch

from measure import provenance


# For glibc: no buffer is a mapping of its own, none is given back.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", metavar="PATTERN", help="only these rows")
    parser.add_argument("--list", action="store_true", help="print ids of rows, no run")
    parser.add_argument("--quick", action="store_true", help="tiny rows: a smoke test")
    parser.add_argument("--rounds", type=int, help="timed calls per form")
    parser.add_argument(
        "--seconds", type=float, help="cap for all timed calls of a form in a row"
    )
    parser.add_argument("--no-compiled", action="store_true", help="no compiled peers")
    parser.add_argument(
        "--out", type=pathlib.Path, help="JSON, merged with what it has"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="drop what the JSON has instead of merging"
    )
    parser.add_argument(
        "--keep-memory", action="store_true", help="malloc keeps what it has (glibc)"
    )
    parser.add_argument("--plot", type=pathlib.Path, help="PNG of all rows of the JSON")
    return parser.parse_args(argv)


def settings_of(args: argparse.Namespace) -> Settings:
    settings = Settings()
    if args.quick:
        settings = Settings(rounds=3, seconds=1.0, compiled=False, tokens=10**6, experts=10**6, stream_bytes=1 << 26)  # fmt: skip
    if args.rounds is not None:
        settings = settings._replace(rounds=args.rounds)
    if args.seconds is not None:
        settings = settings._replace(seconds=args.seconds)
    if args.no_compiled:
        settings = settings._replace(compiled=False)
    return settings


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.keep_memory and platform.libc_ver()[0] != "glibc":
        print("cpu_ops.py: --keep-memory needs glibc's malloc", file=sys.stderr)
        return 2
    if args.keep_memory and not KEEP_MEMORY.items() <= os.environ.items():
        # malloc reads its settings when a process starts.
        command = [sys.executable, *(sys.argv if argv is None else [__file__, *argv])]
        os.execve(sys.executable, command, {**os.environ, **KEEP_MEMORY})
    rows = shapes.quick_rows() if args.quick else shapes.default_rows()
    try:
        rows = shapes.select(rows, args.rows)
        settings = settings_of(args)
        record = report.open_record(args.out, provenance(), fresh=args.fresh)
    except ValueError as error:
        print(f"cpu_ops.py: {error}", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(row.id for row in rows))
        return 0
    torch.manual_seed(0)
    for row in report.progress(rows):
        start = datetime.datetime.now(datetime.timezone.utc)
        measured = measure_row(row, settings)
        run = {
            "command": record["command"],
            "started": start.isoformat(timespec="seconds"),
            "load_average": report.load_average(),
        }
        report.add_row(record, {**measured, **run})
        report.print_row(record["rows"][-1])
        if args.out:
            report.write(record, args.out)  # after every row, so that a stop loses none
    report.print_table(record["rows"])
    if args.plot:
        report.plot(record["rows"], args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
