"""Balance and fetches of plans beside EPLB's policy, and where a plan pays on three models.

    python benchmarks/moe/ep_placement.py [--seeds 5] [--out FOLDER]

Two tables of means over seeds. ``balance`` has heaviest / mean rank load for 256 experts on 64
ranks, on the loads of the plan and on drifted loads, and the number of
experts away from home, whose weights are fetched in every forward. ``pays`` has a forward
and backward of published layers on 64 to 1,024 ranks, by the cost model of H100s with links of
some GB/s: the share of the time at home that a plan per forward saves, minus its fetches, which
overlap with nothing. ``--out`` also writes ep_placement.json and a plot.
"""

import dataclasses
import gc
import itertools
import pathlib
import sys
import time
from statistics import mean

import torch
from torch.distributed._moe.plan import Plan, plan, Topology
from torch.distributed._tools import moe_cost_model as cost
from torch.distributed._tools.moe_config import MODELS
from torch.distributed._tools.moe_profile import profile


_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parents[1] / "test" / "distributed")]

import moe_placement
from report import figure, parse, show

from measure import provenance, write_json


EXPERTS, RANKS = 256, 64
TOKEN_COPIES = 4_200_000
DRIFTS = (0.0, 0.3, 0.6)
PUBLISHED = ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")
TOKENS = (512, 2048, 8192)  # of a rank
GBPS = (25, 50, 100, 200, 400, 900)


def timed(fn):
    # As timeit does: collecting the garbage of imports is not the plan's time.
    gc.disable()
    start = time.process_time()
    result = fn()
    spent = time.process_time() - start
    gc.enable()
    return result, 1e3 * spent


def means(rows):
    return {name: mean(row[name] for row in rows) for name in rows[0]}


def balance(kind, sigma, free, seed):
    """Plans for the loads of ``seed`` and for their drifted form."""
    loads = moe_placement.expert_loads(kind, EXPERTS, seed)
    later = moe_placement.drifted(loads, sigma, seed)
    before, now = ((w * TOKEN_COPIES).round().long() for w in (loads, later))
    topology = Topology(1, RANKS, EXPERTS // RANKS + free)
    standing, plan_ms = timed(lambda: plan(before, topology))
    online = plan(now, topology)
    slots = topology.num_ranks * topology.slots_per_rank
    experts, _ = moe_placement.eplb_rank_experts(loads, slots, 1, 1, RANKS)
    each = EXPERTS // RANKS
    return {
        "at_home": Plan.home(topology, EXPERTS).imbalance(now),
        "eplb": moe_placement.eplb_imbalance(later, loads, slots, 1, 1, RANKS),
        "standing": standing.imbalance(now),
        "online": online.imbalance(now),
        "eplb_fetches": sum(
            len({e for e in held if e // each != rank})
            for rank, held in enumerate(experts)
        ),
        "fetches": int((standing.slot_experts >= 0).sum()) - EXPERTS,
        "not_at_home": int(
            (
                standing.quotas[range(EXPERTS), [e // each for e in range(EXPERTS)]]
                == 0
            ).sum()
        ),
        "plan_ms": plan_ms,
    }


def pays(name, ranks, tokens, gbps, seed):
    """Share of the time of a layer's experts and tokens that a plan saves."""
    model, p = MODELS[name], profile("H100")
    # With more ranks than experts, several groups have all experts and wait for each other.
    ep = min(ranks, model.experts)
    device = dataclasses.replace(p.device, slow=gbps * 1e9, fast=gbps * 1e9)
    p = dataclasses.replace(p, device=device)
    rows = tokens * model.k
    price = cost.copy_cost(p, rows, model.d, model.f, model.experts / ep, ep)
    loads = moe_placement.expert_loads("lognormal_0.5", model.experts, seed)
    topology = Topology(1, ep, model.experts // ep + 2)
    home = Plan.home(topology, model.experts)
    groups = []
    for group in range(ranks // ep):
        # Each group routes a little differently.
        share = moe_placement.drifted(loads, 0.1, 100 * seed + group)
        counts = (share * rows * ep).round().long()
        found = plan(counts, topology, price=price, tries=3)
        fetches = found.busiest()
        heaviest = found.rank_loads(counts).max().item()
        at_home = home.rank_loads(counts).max().item()
        groups.append((at_home, heaviest + price * fetches, heaviest, fetches))
    at_home, placed, heaviest, fetches = map(max, zip(*groups))
    return {
        "price_tokens": price,
        "imbalance_at_home": at_home / rows,
        "imbalance": heaviest / rows,
        "fetches_of_busiest": fetches,
        "gain": 1 - placed / at_home,
    }


def plot(rows, path):
    with figure(path, 1, len(PUBLISHED), figsize=(12, 3.4)) as axes:
        for axis, name in zip(axes, PUBLISHED):
            for ranks, tokens in itertools.product((64, 1024), (512, 8192)):
                key = (name, ranks, tokens)
                found = [
                    r for r in rows if (r["model"], r["ranks"], r["tokens"]) == key
                ]
                gains = [100 * r["gain"] for r in found]
                label = f"{ranks} ranks, {tokens} tokens each"
                axis.plot([r["gbps"] for r in found], gains, label=label)
            axis.set(title=name, xscale="log", xlabel="GB/s of a rank", ylim=(0, None))
        axes[0].set(ylabel="time saved, %")
        axes[0].legend(fontsize=8)


def main() -> None:
    args = parse(__doc__, seeds=5)
    torch.set_num_threads(1)
    seeds = range(args.seeds)
    drift, paying = [], []
    for sigma, kind, free in itertools.product(DRIFTS, moe_placement.LOADS, (1, 2)):
        found = means([balance(kind, sigma, free, seed) for seed in seeds])
        drift.append({"loads": kind, "drift": sigma, "free_slots": free, **found})
    show(f"{EXPERTS} experts, {RANKS} ranks", drift)
    cases = itertools.product(PUBLISHED, (64, 256, 1024), TOKENS, GBPS)
    for name, ranks, tokens, gbps in cases:
        found = means([pays(name, ranks, tokens, gbps, seed) for seed in seeds])
        key = {"model": name, "ranks": ranks, "tokens": tokens, "gbps": gbps}
        paying.append({**key, **found})
    show("Published layers, two free slots a rank", paying)
    if args.out:
        result = {"provenance": provenance(), "seeds": args.seeds}
        write_json(result | {"balance": drift, "pays": paying}, args.out)
        plot(paying, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
