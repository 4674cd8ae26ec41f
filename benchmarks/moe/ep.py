"""Expert parallelism on two hosts: bytes, times, balance, and what a model predicts.

    python benchmarks/moe/ep.py [--quick] [--out FILE.json]

Two hosts of two gloo ranks each, in two network namespaces of this machine (or two loopback
addresses if namespaces are not permitted). Each row is one MoE layer, before or after placement of
the experts, with bfloat16 or FP8 rows and a flat or hierarchical switch. It has the bytes on the
wire beside the fewest that suffice, seconds of a step and of its parts, and seconds of the
collectives beside the cost model's prediction. Then, without ranks, the balance that placement
reaches on bigger machines. ``--quick`` only shows that it runs.
"""

import itertools
import pathlib
import statistics
import sys
import time

import torch
from torch.distributed._moe.plan import Plan, plan, Topology


_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parents[1] / "test" / "distributed")]

from ep_rank import counts_of, EXPERTS, measure_rank, routed
from report import parse, show
from shapes import REAL
from two_hosts import two_hosts

from measure import on_hosts, save


RANKS_PER_HOST = 2
SIZES = {"tokens": 128, "dim": 2048, "small_dim": 128, "hidden": 64, "rounds": 7}
QUICK = {"tokens": 16, "dim": 256, "small_dim": 128, "hidden": 16, "rounds": 2}


def total(row: dict, *names: str) -> float:
    """Bytes of the named kinds over all levels of a case."""
    return sum(level[name] for level in row["levels"].values() for name in names)


def add_shares(row: dict) -> None:
    """Adds the ratios that the tables show."""
    minimum = total(row, "minimum_rows", "minimum_returned")
    row["payload_of_minimum"] = total(row, "rows", "returned") / minimum
    # Relative to the rows to the experts, as only these need the metadata.
    there = total(row, "rows")
    row["metadata_share"] = total(row, "ids", "weights", "sizes") / there
    row["scales_share"] = total(row, "scales") / there
    width = row["dim"] * 2
    sent = width if row["wire"] == "bfloat16" else row["dim"] * (1 + 1 / 128)
    row["crossing_bytes"] = row["crossing_rows"] * (sent + width)


def placements(seeds: int) -> list[dict[str, object]]:
    """Balance of the recorded and of synthetic routing on bigger machines.

    A plan is made for one draw and evaluated on another.
    """
    rows, tokens = [], 2235  # half of the record
    for ranks, free in itertools.product((4, 8, 32), (1, 2)):
        topology = Topology(1, ranks, EXPERTS // ranks + free)
        at_home = Plan.home(topology, EXPERTS)
        for routing in (REAL, "uniform", "zipf"):
            draws = []
            for seed in range(1 if routing == "recorded" else seeds):
                known = counts_of(routed(routing, tokens, 2 * seed))
                later = counts_of(routed(routing, tokens, 2 * seed + 1))
                start = time.process_time()
                found = plan(known, topology)
                spent = time.process_time() - start
                before, after = (p.imbalance(later) for p in (at_home, found))
                fetched = int((found.slot_experts >= 0).sum()) - EXPERTS
                draws.append((before, after, fetched, 1e3 * spent))
            means = map(statistics.fmean, zip(*draws))
            names = ("before", "after", "fetched", "plan_ms")
            key = {"ranks": ranks, "free_slots": free, "routing": routing}
            rows.append(key | dict(zip(names, means)))
    return rows


def show_all(result: dict) -> None:
    print(f"{result['hosts']}; 2 gloo ranks each, one thread a rank")
    cases = []
    for row in result["cases"]:
        columns = {
            "layer": f"{row['routing']}, {row['switch']}",
            "there_kib": total(row, "rows") / 1024,
            "back_kib": total(row, "returned") / 1024,
            "host_to_host_kib": row["crossing_bytes"] / 1024,
            "step_ms": [1e3 * s for s in row["step_seconds"]],
            "switch_ms": 1e3 * row["switch_seconds"][0],
            "collectives_ms": 1e3 * sum(row["wire_seconds"].values()),
            "predicted_ms": 1e3 * sum(row["predicted_seconds"].values()),
        }
        cases.append(row | columns)
    layer = ("layer", "dim", "wire")
    sent = ("there_kib", "back_kib", "payload_of_minimum", "scales_share")
    sent += ("metadata_share", "host_to_host_kib", "interface_bytes")
    title = "KiB of one forward, all ranks; scales and metadata as a share of the rows there"
    show(title, cases, layer + sent)
    times = ("step_ms", "switch_ms", "collectives_ms", "predicted_ms", "imbalance")
    title = "Milliseconds of one layer, slowest rank; imbalance of its token copies"
    show(title, cases, layer + times)
    links = [{"level": level, **link} for level, link in result["links"].items()]
    show("Levels: start, rate and turn of an all-to-all", links)
    title = "Heaviest / mean rank load, planned on one draw and judged on another"
    show(title, result["placements"])


def main() -> None:
    args = parse(__doc__, quick=False)
    torch.set_num_threads(1)
    start = time.perf_counter()
    sizes = QUICK if args.quick else SIZES
    with two_hosts() as cluster:
        seen = on_hosts(cluster, RANKS_PER_HOST, measure_rank, sizes)[0]
        result = {"settings": sizes, "hosts": cluster.describe(), **seen}
    for row in result["cases"]:
        add_shares(row)
    result["placements"] = placements(2 if args.quick else 10)
    result["seconds"] = time.perf_counter() - start
    save(args.out, **result)
    show_all(result)


if __name__ == "__main__":
    main()
