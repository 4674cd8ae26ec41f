"""Train an expert-parallel layer while its routing drifts: balance over steps, with a plot.

    python benchmarks/moe/ep_drift.py [--ranks 2 4] [--leans 0.7 2] [--steps 48] [--out FOLDER]

Tokens lean in a direction that turns once in ``--steps``, and so do the hot experts.
Layers train in turns, from the same weights on the same batches: experts at home (twice, to show the
noise), plans by average loads every few steps (``placed``), plans in every forward (``online``), and ``free``,
which plans as if a fetch cost nothing and shows the best balance that a plan can reach. The
others find the price of a fetch by the clock. Per step: the heaviest rank's token copies over the mean, megabytes
of experts fetched and gradients returned, milliseconds by the clock and of the processors, and the loss,
which is the same in all. Gloo ranks, one thread each.
"""

import itertools
import math
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence

from report import figure, parse, show

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._moe.overlap_schedule import sequential_schedule
from torch.distributed._moe.wire_bytes import count_wire_bytes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel._expert_placement import ExpertPlacement
from torch.distributed.tensor.parallel.expert_parallel import ExpertParallel

from measure import on_gloo_ranks, over_ranks, save


D, HIDDEN, E, K, TOKENS = 256, 256, 32, 4, 1024  # tokens of a rank
FREE_SLOTS = 3
FORMS = {
    "at home": None,
    "at home again": None,
    "placed, free": {"every": 12, "copy_cost": 0.0},
    "placed": {"every": 12},
    "placed, kept": {"every": 12, "keep": True},
    "online, free": {"every": None, "online": True, "copy_cost": 0.0},
    "online": {"every": None, "online": True},
}


def batch(step: int, steps: int, rank: int, lean: float) -> torch.Tensor:
    a, b = torch.randn(2, D, generator=torch.Generator().manual_seed(1))
    angle = 2 * math.pi * step / steps
    gen = torch.Generator().manual_seed(1000 * step + rank)
    direction = math.cos(angle) * a + math.sin(angle) * b
    return torch.randn(TOKENS, D, generator=gen) + lean * direction


def train(
    options: dict | None, steps: int, lean: float, mesh
) -> Iterator[dict[str, float]]:
    """Yields the measurements of every step."""
    copies: list[int] = []

    def counting(switch, tokens, ids, weights, experts, shared):
        def counted(rows, local, scores, slots):
            copies.append(int((local >= 0).sum()))
            return experts(rows, local, scores, slots)

        return sequential_schedule(switch, tokens, ids, weights, counted, shared)

    placement = None
    if options is not None:
        slots = E // mesh.size() + FREE_SLOTS
        placement = ExpertPlacement(slots_per_rank=slots, **options)
    torch.manual_seed(0)
    model = nn.MoE(D, HIDDEN, E, top_k=K)
    for param in model.parameters():
        nn.init.normal_(param, std=0.08)
    style = ExpertParallel(schedule=counting, placement=placement)
    parallelize_module(model, mesh, style)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    layers = [] if placement is None else placement.layers
    for step in range(steps):
        x = batch(step, steps, dist.get_rank(), lean)
        start, cpu = time.perf_counter(), time.process_time()
        with count_wire_bytes(*layers) as wire:
            y = model(x)
            loss = (y - x.roll(1, -1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
        for p in model.parameters():
            if not isinstance(p, DTensor):
                dist.all_reduce(p.grad)
        optimizer.step()
        if placement is not None:
            placement.step()
        ms = 1e3 * (time.perf_counter() - start)
        cpu_ms = 1e3 * (time.process_time() - cpu)
        seen = [loss.item(), sum(wire.sent["experts"].values()), cpu_ms]
        seen += [0.0] * mesh.size()
        seen[3 + dist.get_rank()] = copies[-1]
        total, nbytes, cpu_ms, *loads = over_ranks(seen, dist.ReduceOp.SUM)
        yield {
            "imbalance": max(loads) * len(loads) / sum(loads),
            "loss": total / mesh.size(),
            "expert_mb": nbytes / 1e6,
            "ms": over_ranks([ms])[0],
            "cpu_ms": cpu_ms,
        }


def train_all(args, ranks: int, lean: float) -> dict[str, dict[str, list[float]]]:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    runs = [train(options, args.steps, lean, mesh) for options in FORMS.values()]
    steps = list(zip(*runs))
    return {
        form: {key: [step[i][key] for step in steps] for key in steps[0][i]}
        for i, form in enumerate(FORMS)
    }


def plot(seen: dict, path: pathlib.Path) -> None:
    with figure(path, 1, 2, figsize=(9, 3.4)) as (left, right):
        for name, curves in seen.items():
            left.plot(curves["imbalance"], label=name)
            right.plot(curves["loss"], label=name)
        left.set(xlabel="step", ylabel="heaviest rank / mean", ylim=(0.95, None))
        right.set(xlabel="step", ylabel="loss")
        left.legend(fontsize=8)


def cpu_ratio(curves: dict, plain: dict, steps: Sequence[int]) -> float | None:
    """Processor time in ``steps`` over that at home."""
    spent, home = (sum(c["cpu_ms"][i] for i in steps) for c in (curves, plain))
    return spent / home if steps else None


def rows_of(ranks: int, lean: float, seen: dict) -> Iterator[dict[str, object]]:
    plain = seen["at home"]
    for form, curves in seen.items():
        # They take turns, so each step is compared with the same step at home.
        ratios = [a / b for a, b in zip(curves["ms"], plain["ms"])]
        still = [i for i, n in enumerate(curves["expert_mb"]) if i > 1 and not n]
        differences = [abs(a - b) for a, b in zip(curves["loss"], plain["loss"])]
        yield {
            "ranks": ranks,
            "lean": lean,
            "form": form,
            "mean_imbalance": statistics.fmean(curves["imbalance"]),
            "largest_imbalance": max(curves["imbalance"]),
            "mean_expert_mb": statistics.fmean(curves["expert_mb"]),
            "median_ms": statistics.median(curves["ms"]),
            "time_to_home": statistics.median(ratios),
            "total_to_home": sum(curves["ms"][2:]) / sum(plain["ms"][2:]),
            "cpu_to_home": cpu_ratio(curves, plain, range(2, len(ratios))),
            "cpu_without_copies": cpu_ratio(curves, plain, still),
            "largest_loss_difference": max(differences),
            **curves,
        }


def main() -> None:
    args = parse(__doc__, ranks=[2, 4], leans=[0.7, 2.0], steps=48)
    rows = []
    for lean, ranks in itertools.product(args.leans, args.ranks):
        seen = on_gloo_ranks(ranks, train_all, args, ranks, lean)[0]
        rows += rows_of(ranks, lean, seen)
    title = f"{E} experts, {args.steps} steps of drifting routing"
    show(title, rows, list(rows[0])[:12])
    save(args.out, steps=args.steps, rows=rows)
    if args.out:
        plot(seen, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
