"""Imbalance of expert placements beside EPLB on the same loads.

    python benchmarks/moe/ep_placement.py [--seeds 10] [--out FOLDER]

Prints two tables, means over seeds of heaviest / mean rank load for 256 experts: plans
judged on the loads they were made for, and plans judged after the loads of the experts
drifted. ``bound`` is what no plan with these replicas, or no quota inside the nodes, can
be below. Times are CPU milliseconds per layer, single-threaded. ``--out`` also writes
ep_placement.json.
"""

import gc
import itertools
import pathlib
import sys
import time
from statistics import mean

import torch
from torch.distributed._moe.placement import plan, Topology
from torch.distributed._moe.quota import plan_step


_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parents[1] / "test" / "distributed")]

import moe_placement
from report import parse, show

from measure import provenance, write_json


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
DRIFTS = (0.0, 0.3, 0.6)
# What plan is asked about experts on a second node.
SHARED = ("none", "as needed", "1", "8", "for drift")
# Another range of draws, to see what a mean of few is worth.
OTHER_SEEDS = range(1000, 1040)


def timed(fn):
    # As timeit does: a collection of all that imports left behind is not of the plan.
    gc.disable()
    start = time.process_time()
    result = fn()
    spent = time.process_time() - start
    gc.enable()
    return result, 1e3 * spent


def means(rows):
    return {name: mean(row[name] for row in rows) for name in rows[0]}


def static(topology, num_groups, kind, seed):
    """Plans judged on the loads they were made for."""
    nodes = topology.num_nodes if num_groups else 1
    args = (topology.num_slots, num_groups or 1, nodes, topology.num_ranks)
    loads = moe_placement.expert_loads(kind, EXPERTS, seed)
    placement, t = timed(lambda: plan(loads, topology, num_groups=num_groups))
    plain = plan(loads, topology, num_groups=num_groups, use_swaps=False)
    heaviest = placement.rank_loads(loads).max().item()
    bound = moe_placement.placement_bound(placement, loads, num_groups)
    return {
        "eplb": moe_placement.eplb_imbalance(loads, loads, *args),
        "plan_no_swaps": plain.imbalance(loads),
        "plan": placement.imbalance(loads),
        "plan_to_bound": heaviest / bound,
        "plan_ms": t,
    }


def two_time_scales(kind, sigma, shared, seed):
    """Plan on the loads of ``seed``, quotas on what they drifted to."""
    loads = moe_placement.expert_loads(kind, EXPERTS, seed)
    later = moe_placement.drifted(loads, sigma, seed)
    fixed = {"none": 0, "1": 1, "8": 8}.get(shared)
    options = {"num_groups": EXPERTS, "num_replicas": EXPERTS + (fixed or 0)}
    if fixed is not None:
        options["num_node_replicas"] = fixed
    elif shared == "for drift":
        options["drift"] = sigma
    placement, plan_ms = timed(lambda: plan(loads, CLUSTER, **options))
    counts = (later * TOKEN_COPIES).round().long()
    step, step_ms = timed(lambda: plan_step(counts, placement))
    per_node = step.quotas.sum(0).view(CLUSTER.num_nodes, -1).sum(1).double()
    slots, ranks = CLUSTER.num_slots, CLUSTER.num_ranks
    return {
        "eplb": moe_placement.eplb_imbalance(later, loads, slots, 1, 1, ranks),
        "bound": (per_node.max() / per_node.mean()).item(),
        "two_time_scales": step.imbalance(),
        "experts_on_two_nodes": int((placement.slot_experts >= 0).sum()) - EXPERTS,
        "plan_ms": plan_ms,
        "step_ms": step_ms,
    }


def main() -> None:
    args = parse(__doc__, seeds=10)
    torch.set_num_threads(1)
    seeds = range(args.seeds)
    same_loads, drift = [], []
    for (name, *case), kind in itertools.product(STATIC, moe_placement.LOADS):
        found = means([static(*case, kind, seed) for seed in seeds])
        same_loads.append({"case": name, "loads": kind, **found})
    show("Same loads", same_loads)
    for sigma, kind, shared in itertools.product(DRIFTS, moe_placement.LOADS, SHARED):
        asked = (kind, sigma, shared)
        found = means([two_time_scales(*asked, seed) for seed in seeds])
        others = means([two_time_scales(*asked, seed) for seed in OTHER_SEEDS])
        found["other_draws"] = others["two_time_scales"]
        drift.append({"loads": kind, "drift": sigma, "asked": shared, **found})
    show("64 ranks in nodes of 8, 4 experts and 2 free slots each", drift)
    if args.out:
        result = {"provenance": provenance(), "seeds": args.seeds}
        result["other_draws"] = len(OTHER_SEEDS)
        write_json(result | {"static": same_loads, "drift": drift}, args.out)


if __name__ == "__main__":
    main()
