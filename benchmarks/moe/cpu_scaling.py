"""Forecast of rows of cpu_ops.py on many threads, from its records on one thread and on two.

    python benchmarks/moe/cpu_scaling.py --one ONE.json --two TWO.json [--threads 64] [--bandwidth 369]
        [--out FILE.json]

A call on one thread takes as long as its products alone, at the rate measured beside it, and a rest:
memory, other operators, products of few rows. On n threads the products take 1/n. The rest takes 1/n
at best (``all_cores``), and at worst as memory limits it (``one_memory``), with ``--bandwidth`` in GB/s
over the rate of one thread. The default is four fifths of the 460.8 GB/s of 12 channels of DDR5-4800, a
socket of Zen 4. Work that stays on one thread is in no bound, nor is how evenly the experts are spread.

The same forecast for two threads, with the stream rate measured there, is compared with the record.
"""

import json
import pathlib
import statistics

from report import parse, show

from measure import save


def forecast(one: dict, form: str, threads: int, speedup: float) -> float:
    """Milliseconds on ``threads``, if what are not products is ``speedup`` times as fast as on one."""
    products = one["bound"]["compute_milliseconds"]
    rest = max(0.0, one["forms"][form]["milliseconds"]["median"] - products)
    return products / threads + rest / speedup


def stream(rows: dict[str, dict]) -> float:
    """Median GB/s of a sum over memory beside the rows."""
    return statistics.median(r["bound"]["stream_gb_per_second"] for r in rows.values())


def rows_of(path: pathlib.Path) -> dict[str, dict]:
    """Rows of cpu_ops.py by their ids."""
    try:
        rows = json.loads(path.read_text())["rows"]
        return {row["id"]: row for row in rows if row["forms"] and row["bound"]}
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} has no rows of cpu_ops.py: {error!r}") from None


def main() -> None:
    args = parse(__doc__, one=..., two=..., threads=64, bandwidth=0.8 * 460.8)
    one, two = map(rows_of, (args.one, args.two))
    speedup = args.bandwidth / stream(one)
    rows, errors = [], []
    for name, row in one.items():
        forms = {}
        for form in row["forms"]:
            seen = two[name]["forms"].get(form)
            if seen is None:
                continue
            on_two = forecast(row, form, 2, stream(two) / stream(one))
            error = on_two / seen["milliseconds"]["median"] - 1
            errors.append(error)
            forms[form] = {
                "two_threads_error": error,
                "all_cores_milliseconds": forecast(
                    row, form, args.threads, args.threads
                ),
                "one_memory_milliseconds": forecast(row, form, args.threads, speedup),
            }
        for form in forms.values():
            for bound in ("all_cores", "one_memory"):
                key = f"{bound}_milliseconds"
                form[f"{bound}_to_ours"] = form[key] / forms["moe_mlp"][key]
        rows.append({"id": name, "shape": row["shape"], "forms": forms})
    columns = [
        f"forms.{form}.{bound}_to_ours"
        for form in ("composite", "recomputed_grouped_mm", "transformers_grouped_mm")
        for bound in ("all_cores", "one_memory")
    ]
    show(f"{args.threads} threads, over ours", rows, ["id", *columns])
    sizes = sorted(abs(e) for e in errors)
    check = {
        "median": statistics.median(sizes),
        "largest": sizes[-1],
        "bias": statistics.median(errors),
        "forecasts": len(sizes),
    }
    show("Errors of the forecasts of two threads", [check])
    save(
        args.out,
        threads=args.threads,
        bandwidth_gb_per_second=args.bandwidth,
        stream_gb_per_second={"one": stream(one), "two": stream(two)},
        two_threads_error=check,
        rows=rows,
    )


if __name__ == "__main__":
    main()
