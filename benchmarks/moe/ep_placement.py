"""Imbalance of expert placements beside EPLB on the same loads.

    python benchmarks/moe/ep_placement.py [--seeds 10] [--json FILE]

Prints two tables, means over seeds of heaviest / mean rank load for 256 experts:
plans judged on the loads they were made for, and plans judged after the loads of the
experts drifted. Times are CPU milliseconds per layer, single-threaded.
"""

import argparse
import json
import time
from statistics import mean

import torch
from torch.distributed._moe.placement import plan, Topology
from torch.distributed._moe.quota import plan_step
from torch.testing._internal.distributed.moe_placement import (
    drifted,
    eplb_imbalance,
    expert_loads,
    LOADS,
)


EXPERTS = 256
TOKEN_COPIES = 4_200_000
# name, topology, groups
STATIC = [
    ("4 nodes x 8, 8 groups", Topology(4, 8, 9), 8),
    ("32 ranks x 9 slots", Topology(4, 8, 9), None),
    ("32 ranks x 8 slots", Topology(4, 8, 8), None),
    ("144 ranks x 2 slots", Topology(18, 8, 2), None),
]
CLUSTER = Topology(8, 8, 6)


def timed(fn):
    start = time.process_time()
    result = fn()
    return result, 1e3 * (time.process_time() - start)


def static_row(name, topology, num_groups, kind, seeds):
    ours, no_swaps, peer, ms = [], [], [], []
    nodes = topology.num_nodes if num_groups else 1
    for seed in range(seeds):
        loads = expert_loads(kind, EXPERTS, seed)
        placement, t = timed(lambda: plan(loads, topology, num_groups=num_groups))
        plain = plan(loads, topology, num_groups=num_groups, use_swaps=False)
        args = (topology.num_slots, num_groups or 1, nodes, topology.num_ranks)
        ours.append(placement.imbalance(loads))
        no_swaps.append(plain.imbalance(loads))
        peer.append(eplb_imbalance(loads, loads, *args))
        ms.append(t)
    return {
        "case": name,
        "loads": kind,
        "eplb": mean(peer),
        "plan_no_swaps": mean(no_swaps),
        "plan": mean(ours),
        "plan_ms": mean(ms),
    }


def drift_row(kind, sigma, shared, seeds):
    two_scales, peer, plan_ms, step_ms = [], [], [], []
    for seed in range(seeds):
        loads = expert_loads(kind, EXPERTS, seed)
        later = drifted(loads, sigma, seed)
        placement, t = timed(
            lambda: plan(
                loads,
                CLUSTER,
                num_groups=EXPERTS,
                num_replicas=EXPERTS + shared,
                num_node_replicas=shared,
            )
        )
        plan_ms.append(t)
        counts = (later * TOKEN_COPIES).round().long()
        step, t = timed(lambda: plan_step(counts, placement))
        step_ms.append(t)
        two_scales.append(step.imbalance())
        slots, ranks = CLUSTER.num_slots, CLUSTER.num_ranks
        peer.append(eplb_imbalance(later, loads, slots, 1, 1, ranks))
    return {
        "loads": kind,
        "drift": sigma,
        "experts_on_two_nodes": shared,
        "eplb": mean(peer),
        "two_time_scales": mean(two_scales),
        "plan_ms": mean(plan_ms),
        "step_ms": mean(step_ms),
    }


def show(title, rows):
    print(f"\n{title}")
    print("  ".join(f"{name:>20}" for name in rows[0]))
    for row in rows:
        cells = (f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values())
        print("  ".join(f"{cell:>20}" for cell in cells))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="draws per row")
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    static = [static_row(*case, kind, args.seeds) for case in STATIC for kind in LOADS]
    show("Same loads", static)
    drift = [
        drift_row(kind, sigma, shared, args.seeds)
        for sigma in (0.0, 0.3, 0.6)
        for kind in LOADS
        for shared in (0, 1, 8)
    ]
    show("64 ranks in nodes of 8, 4 experts and 2 free slots each", drift)
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"seeds": args.seeds, "static": static, "drift": drift}, f)


if __name__ == "__main__":
    main()
