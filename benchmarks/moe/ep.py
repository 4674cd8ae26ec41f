"""Expert parallelism on two hosts: bytes, times, balance, and what a model predicts.

    python benchmarks/moe/ep.py [--quick] [--out build/ep] [--json FILE]

Two hosts of two gloo ranks each, in two network namespaces of this machine (or two loopback
addresses where those are not permitted). One MoE layer per row: bytes on the wire beside the
fewest that would do, seconds of a step and of its parts, what the cost model
predicts for the collectives beside what they took, before and after placement of the experts, bfloat16 and FP8
rows, flat and hierarchical switch. Then, without ranks, the balance that placement reaches on
bigger machines. Prints tables; writes ep.json.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable

import torch
from torch.distributed._moe.placement import Placement, plan, Topology
from torch.testing._internal.moe_generators import recorded_routing


_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parents[1] / "test" / "distributed")]

from ep_rank import counts_of, EXPERTS, measure_rank, routed
from report import make_parser, show, spread_text
from two_hosts import two_hosts

from measure import on_hosts, provenance, write_json


RANKS_PER_HOST = 2


# What is measured; --quick only shows that it runs.
SIZES = {"tokens": 128, "dim": 2048, "small_dim": 128, "hidden": 64, "rounds": 7}
QUICK = {"tokens": 16, "dim": 256, "small_dim": 128, "hidden": 16, "rounds": 2}


def measure(sizes: dict[str, int]) -> dict[str, object]:
    """What the ranks saw, and what their hosts were."""
    with two_hosts() as cluster:
        seen = on_hosts(cluster, RANKS_PER_HOST, measure_rank, sizes)
        return {"hosts": cluster.describe(), **seen[0]}


def total(row: dict, *names: str) -> float:
    """Bytes of the named kinds over all levels of a case."""
    return sum(level[name] for level in row["levels"].values() for name in names)


def add_shares(row: dict) -> None:
    """The ratios that the tables and the plot show."""
    payload = total(row, "rows", "returned")
    minimum = total(row, "minimum_rows", "minimum_returned")
    row["payload_of_minimum"] = payload / minimum
    # Of the rows to the experts alone, which is all that the metadata is needed for.
    metadata = total(row, "ids", "weights", "sizes")
    row["metadata_share"] = metadata / total(row, "rows")
    row["scales_share"] = total(row, "scales") / total(row, "rows")
    width = row["dim"] * 2
    sent = width if row["wire"] == "bfloat16" else row["dim"] * (1 + 1 / 128)
    row["crossing_bytes"] = row["crossing_rows"] * (sent + width)


def placements(seeds: int) -> list[dict[str, object]]:
    """Balance of the recorded and of synthetic routing on bigger machines.

    The plan sees one draw and is judged on another one.
    """
    rows = []
    for topology in (Topology(2, 2, 16), Topology(2, 4, 8), Topology(4, 8, 3)):
        home = dataclasses.replace(
            topology, slots_per_rank=EXPERTS // topology.num_ranks
        )
        for routing in ("recorded", "uniform", "zipf"):
            draws = range(1 if routing == "recorded" else seeds)
            before, after, milliseconds = [], [], []
            for seed in draws:
                tokens = len(recorded_routing()[0]) // 2
                known = counts_of(routed(routing, tokens, 2 * seed))
                later = counts_of(routed(routing, tokens, 2 * seed + 1))
                start = time.process_time()
                placement = plan(known, topology, num_replicas=topology.num_slots)
                milliseconds.append(1e3 * (time.process_time() - start))
                in_order = Placement.contiguous(home, EXPERTS)
                before.append(in_order.imbalance(later))
                after.append(placement.imbalance(later))
            rows.append(
                {
                    "ranks": topology.num_ranks,
                    "ranks_per_node": topology.ranks_per_node,
                    "slots_per_rank": topology.slots_per_rank,
                    "routing": routing,
                    "before": sum(before) / len(before),
                    "after": sum(after) / len(after),
                    "plan_ms": sum(milliseconds) / len(milliseconds),
                }
            )
    return rows


def name_of(row: dict) -> str:
    placed = ", placed" if row["placed"] else ""
    return f"{row['routing']}, {row['switch']}{placed}"


def kib(*names: str) -> Callable[[dict], str]:
    return lambda row: f"{total(row, *names) / 1024:,.0f}"


def seen(row: dict) -> str:
    found = row["interface_bytes"]
    return "-" if found is None else f"{found / 1024:,.0f}"


def show_all(result: dict) -> None:
    print(f"{result['hosts']}; 2 gloo ranks each, one thread a rank")
    layer = {"layer": name_of, "D": "dim", "wire": "wire"}
    show(
        "KiB of one forward, all ranks; scales and metadata as a share of the rows there",
        result["cases"],
        layer
        | {
            "there": kib("rows"),
            "back": kib("returned"),
            "/ minimum": "payload_of_minimum",
            "scales": lambda r: f"{r['scales_share']:.1%}",
            "metadata": lambda r: f"{r['metadata_share']:.1%}",
            "host to host": lambda r: f"{r['crossing_bytes'] / 1024:,.0f}",
            "interface": seen,
        },
    )
    show(
        "Milliseconds of one layer, slowest rank; imbalance of its token copies",
        result["cases"],
        layer
        | {
            "fwd + bwd": lambda r: spread_text(r["step_seconds"], 1e3),
            "switch, fwd": lambda r: 1e3 * r["switch_seconds"][0],
            "collectives": lambda r: 1e3 * sum(r["wire_seconds"].values()),
            "predicted": lambda r: 1e3 * sum(r["predicted_seconds"].values()),
            "imbalance": "imbalance",
        },
    )
    links = []
    for level, link in result["links"].items():
        row = next(r for r in result["cases"] if level in r["levels"])
        links.append({"level": level, **link, **row})
    show(
        "Levels: start and rate of an all-to-all; recorded routing, bfloat16",
        links,
        {
            "level": "level",
            "start us": lambda r: 1e6 * r["start"],
            "MB/s": lambda r: 1e-6 * r["rate"],
            "measured ms": lambda r: 1e3 * r["wire_seconds"][r["level"]],
            "predicted ms": lambda r: 1e3 * r["predicted_seconds"][r["level"]],
        },
    )
    show(
        "Heaviest / mean rank load, planned on one draw and judged on another",
        result["placements"],
        {
            "routing": "routing",
            "ranks": lambda r: (
                f"{r['ranks'] // r['ranks_per_node']} x {r['ranks_per_node']}"
            ),
            "slots a rank": "slots_per_rank",
            "in order": "before",
            "placed": "after",
            "plan ms": "plan_ms",
        },
    )


def main() -> int:
    default_out = pathlib.Path(__file__).resolve().parents[2] / "build" / "ep"
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="small: does it run at all")
    add("--out", type=pathlib.Path, default=default_out, help="folder to write")
    add("--json", type=pathlib.Path, help="also write the JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    sizes = QUICK if arguments.quick else SIZES
    measured = measure(sizes)
    for row in measured["cases"]:
        add_shares(row)
    result = {
        **provenance(),
        "settings": sizes,
        **measured,
        "placements": placements(2 if arguments.quick else 10),
    }
    result["seconds"] = time.perf_counter() - start
    for path in (arguments.out / "ep.json", arguments.json):
        if path is not None:
            write_json(result, path)
    show_all(result)
    print(f"{result['seconds']:.0f} s; wrote {arguments.out}/ep.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
