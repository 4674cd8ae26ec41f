"""Train an expert-parallel layer while its routing drifts: balance over steps, with a plot.

    python benchmarks/moe/ep_drift.py [--ranks 4] [--steps 48] [--out FOLDER]

Tokens lean in a direction that turns once in ``--steps``, and with it the experts that are hot.
Three times from the same weights on the same batches: experts at home, ``ExpertPlacement`` that
plans anew every few steps where they run, by their loads, and the same with a plan in every
forward (``online``). Per step: the heaviest rank's token copies over the mean, megabytes of
experts fetched and gradients returned, milliseconds, and the loss, which is the same in all
three. Gloo ranks, one thread each.
"""

import math
import pathlib
import statistics
import time

from report import figure, parse, show

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._moe.exchange import count_wire_bytes
from torch.distributed._moe.schedule import sequential_schedule
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel._expert_placement import ExpertPlacement
from torch.distributed.tensor.parallel.expert_parallel import ExpertParallel

from measure import on_gloo_ranks, over_ranks, save


D, HIDDEN, E, K, TOKENS = 64, 32, 32, 4, 256  # tokens of a rank
FORMS = {
    "at home": None,
    "placed": {"every": 6},
    "placed, online": {"every": 6, "replicas": 0, "online": True},
}


def batch(step: int, steps: int, rank: int) -> torch.Tensor:
    a, b = torch.randn(2, D, generator=torch.Generator().manual_seed(1))
    angle = 2 * math.pi * step / steps
    gen = torch.Generator().manual_seed(1000 * step + rank)
    lean = math.cos(angle) * a + math.sin(angle) * b
    return torch.randn(TOKENS, D, generator=gen) + 0.7 * lean


def train(options: dict | None, steps: int, mesh) -> dict[str, list[float]]:
    copies: list[int] = []

    def counting(switch, tokens, ids, weights, experts, shared):
        def counted(rows, local, scores, slots):
            copies.append(int((local >= 0).sum()))
            return experts(rows, local, scores, slots)

        return sequential_schedule(switch, tokens, ids, weights, counted, shared)

    placement = None
    if options is not None:
        slots = E // mesh.size() + 3
        # Free, to show the most that a plan can do for the balance.
        placement = ExpertPlacement(slots_per_rank=slots, copy_cost=0.0, **options)
    torch.manual_seed(0)
    model = nn.MoE(D, HIDDEN, E, top_k=K)
    for param in model.parameters():
        nn.init.normal_(param, std=0.2)
    style = ExpertParallel(schedule=counting, placement=placement)
    parallelize_module(model, mesh, style)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    losses, balance, sent, times = [], [], [], []
    layers = [] if placement is None else placement.layers
    for step in range(steps):
        x = batch(step, steps, dist.get_rank())
        start = time.perf_counter()
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
        times.append(1e3 * (time.perf_counter() - start))
        seen = [0.0] * mesh.size() + [loss.item(), sum(wire.sent["experts"].values())]
        seen[dist.get_rank()] = copies[-1]
        *loads, total, nbytes = over_ranks(seen, dist.ReduceOp.SUM)
        balance.append(max(loads) * len(loads) / sum(loads))
        losses.append(total / mesh.size())
        sent.append(nbytes / 1e6)
    return {"imbalance": balance, "loss": losses, "expert_mb": sent, "ms": times}


def train_all(args) -> dict[str, dict[str, list[float]]]:
    mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("ep",))
    return {name: train(options, args.steps, mesh) for name, options in FORMS.items()}


def plot(seen: dict, path: pathlib.Path) -> None:
    with figure(path, 1, 2, figsize=(9, 3.4)) as (left, right):
        for name, curves in seen.items():
            left.plot(curves["imbalance"], label=name)
            right.plot(curves["loss"], label=name)
        left.set(xlabel="step", ylabel="heaviest rank / mean", ylim=(0.95, None))
        right.set(xlabel="step", ylabel="loss")
        left.legend(fontsize=8)


def main() -> None:
    args = parse(__doc__, ranks=4, steps=48)
    seen = on_gloo_ranks(args.ranks, train_all, args)[0]
    plain = seen["at home"]["loss"]
    rows = [
        {
            "form": form,
            "mean_imbalance": statistics.fmean(curves["imbalance"]),
            "largest_imbalance": max(curves["imbalance"]),
            "mean_expert_mb": statistics.fmean(curves["expert_mb"]),
            "median_ms": statistics.median(curves["ms"]),
            "largest_loss_difference": max(
                abs(a - b) for a, b in zip(curves["loss"], plain)
            ),
            **curves,
        }
        for form, curves in seen.items()
    ]
    title = f"{args.ranks} ranks, {E} experts, {args.steps} steps of drifting routing"
    show(title, rows, list(rows[0])[:6])
    save(args.out, ranks=args.ranks, steps=args.steps, rows=rows)
    if args.out:
        plot(seen, args.out / "ep_drift.png")


if __name__ == "__main__":
    main()
