"""A token switch beside a plain dispatcher, from 8 to 4096 tokens a rank, in turns on gloo ranks.

    python benchmarks/moe/ep_latency.py [--ranks 2] [--tokens 8 32 128 512 2048 4096] [--json FILE]

The plain one is written from the description of torchtitan's AllToAllTokenDispatcher: slots sorted
by expert, their numbers exchanged and read on the host, one row per slot sent, put into the order of
the local experts, and back the same way, weighted and added at the source. Both hand their rows to
the same kernel of experts (``F.moe_mlp``, ``F.grouped_mlp``), so that what differs is the exchange.
``decode`` is TokenSwitchAllGather, without gradients.

Ratios are of one round: the plain dispatcher's time over ours. ``wall`` is of the slowest rank;
``cpu`` is the time of a rank's process, all its threads, which neighbours on the machine disturb less.
"""

import argparse
import datetime
import json
import pathlib
import tempfile
import time
from collections.abc import Callable

from report import show

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._moe.switch import TokenSwitchAllGather, TokenSwitchAllToAll

from measure import end_rank, provenance, ratio_record, spread, write_json


TIMEOUT = datetime.timedelta(seconds=120)
DECODE_TOKENS = 128  # a rank, at most
SIZES = {"D": 1024, "F": 256, "E": 32, "K": 4}


class Layer:
    """Operands of one rank; subclasses say how tokens travel."""

    def __init__(self, tokens: int, num_ranks: int) -> None:
        D, hidden, E, K = SIZES.values()
        gen = torch.Generator().manual_seed(dist.get_rank())

        def leaf(*size: int, std: float = 1.0) -> Tensor:
            return (torch.randn(size, generator=gen) * std).bfloat16().requires_grad_()

        self.x = leaf(tokens, D)
        self.ids = torch.rand(tokens, E, generator=gen).topk(K, 1).indices
        self.weights = torch.rand(tokens, K, generator=gen).requires_grad_()
        self.w_in = leaf(E // num_ranks, 2 * hidden, D, std=D**-0.5)
        self.w_out = leaf(E // num_ranks, D, hidden, std=hidden**-0.5)
        self.grad = torch.randn(tokens, D, generator=gen).bfloat16()

    def exchange(self, compute: bool) -> Tensor:
        raise NotImplementedError

    def there_and_back(self) -> None:
        with torch.no_grad():
            self.exchange(compute=False)

    def forward(self) -> None:
        with torch.no_grad():
            self.exchange(compute=True)

    def step(self) -> None:
        leaves = (self.x, self.weights, self.w_in, self.w_out)
        torch.autograd.grad(self.exchange(compute=True), leaves, self.grad)


class Switched(Layer):
    def __init__(self, switch, tokens: int) -> None:  # type: ignore[no-untyped-def]
        super().__init__(tokens, len(switch.ranks))
        self.switch = switch

    def exchange(self, compute: bool) -> Tensor:
        routing = self.switch.create_routing(self.ids, layout="flat")
        rows, weights, ids = self.switch.dispatch(routing, self.x, self.weights)
        if compute:
            slots = None
            if isinstance(self.switch, TokenSwitchAllToAll):
                slots = self.switch.num_slots(routing)
            rows = F._moe_mlp_in_rows(
                rows, ids, weights, self.w_in, self.w_out, num_rows=slots
            )
        return self.switch.combine(routing, rows)


class Plain(Layer):
    def exchange(self, compute: bool) -> Tensor:
        E, K, W = SIZES["E"], SIZES["K"], dist.get_world_size()
        group = dist.group.WORLD
        counts = torch.histc(self.ids.flatten().float(), E, 0, E).long()
        order = self.ids.flatten().argsort(stable=True)
        tokens = order // K
        there = funcol.wait_tensor(funcol.all_to_all_single(counts, None, None, group))
        there = there.view(W, -1)
        send = counts.view(W, -1).sum(1).tolist()
        received = there.sum(1).tolist()
        rows = funcol.all_to_all_single_autograd(self.x[tokens], received, send, group)
        # From the order of the ranks to that of the experts here.
        ends = there.flatten().cumsum(0)
        starts = (ends - there.flatten()).view(W, -1)
        by_expert = there.t().flatten()
        first = starts.t().flatten() - (by_expert.cumsum(0) - by_expert)
        place = torch.arange(sum(received)) + first.repeat_interleave(by_expert)
        rows = rows[place]
        if compute:
            offs = there.sum(0).cumsum(0).int()
            rows = F.grouped_mlp(rows, self.w_in, self.w_out, offs=offs)
        back = torch.empty_like(place)
        back[place] = torch.arange(len(place))
        rows = rows[back]
        rows = funcol.all_to_all_single_autograd(rows, send, received, group)
        scores = self.weights.flatten()[order]
        rows = (rows.float() * scores[:, None]).to(rows.dtype)
        return torch.zeros_like(self.x).index_add(0, tokens, rows)


def measure(
    layers: dict[str, Layer], what: Callable[[Layer], None], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every round by layer and clock; ``wall`` of the slowest rank."""
    times: dict[str, list[list[float]]] = {name: [] for name in layers}
    names = list(layers)
    for i in range(rounds + 2):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            what(layers[name])
            end = time.perf_counter(), time.process_time()
            if i >= 2:
                times[name].append([b - a for a, b in zip(start, end)])
    out = {}
    for name, values in times.items():
        both = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        out[name] = dict(zip(("wall", "cpu"), both.t().tolist()))
    return out


def rank_main(rank: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank,
        world_size=args.ranks, timeout=TIMEOUT,
    )  # fmt: skip
    E, rows = SIZES["E"], []
    switch = TokenSwitchAllToAll(dist.group.WORLD, E)
    decode = TokenSwitchAllGather(dist.group.WORLD, E, max_tokens=DECODE_TOKENS)
    for tokens in args.tokens:
        layers = {
            "plain": Plain(tokens, args.ranks),
            "switch": Switched(switch, tokens),
        }
        parts = {
            "exchange": Layer.there_and_back,
            "forward": Layer.forward,
            "forward+backward": Layer.step,
        }
        for part, what in parts.items():
            if tokens <= DECODE_TOKENS and part != "forward+backward":
                layers["decode"] = Switched(decode, tokens)
            else:
                layers.pop("decode", None)
            rounds = max(9, min(args.rounds, 40_000 // tokens))
            seen = measure(layers, what, rounds)
            for name in layers:
                if name == "plain":
                    continue
                row = {"tokens": tokens, "part": part, "form": name}
                for clock in ("wall", "cpu"):
                    a, b = seen["plain"][clock], seen[name][clock]
                    row[f"{clock}_ms"] = 1e3 * spread(b).median
                    row[f"plain_{clock}_ms"] = 1e3 * spread(a).median
                    row[f"{clock}_ratio"] = ratio_record(a, b)
                rows.append(row)
    if rank == 0:
        pathlib.Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
    end_rank()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[8, 32, 128, 512, 2048, 4096]
    )
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, args), nprocs=args.ranks)
        rows = json.loads(pathlib.Path(folder, "rows.json").read_text())
    show(
        f"{args.ranks} gloo ranks, {SIZES}: ms, and plain / ours (interval)",
        rows,
        {n: n for n in ("tokens", "part", "form", "plain_cpu_ms", "cpu_ms")}
        | {
            clock: lambda r, c=clock: "{:.2f} ({:.2f} - {:.2f})".format(
                r[f"{c}_ratio"]["median"], *r[f"{c}_ratio"]["interval"]
            )
            for clock in ("cpu", "wall")
        },
    )
    if args.json:
        write_json(
            {**provenance(), "ranks": args.ranks, "sizes": SIZES, "rows": rows},
            args.json,
        )


if __name__ == "__main__":
    main()
