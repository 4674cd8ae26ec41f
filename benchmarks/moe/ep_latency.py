"""A token switch beside a plain dispatcher, from 8 to 4096 tokens a rank, in turns on gloo ranks.

    python benchmarks/moe/ep_latency.py [--ranks 2] [--hosts 1 2] [--tokens 8 32 ...] [--rounds 101] [--out FILE.json]

The plain one is written from the description of torchtitan's AllToAllTokenDispatcher: slots sorted
by expert, their numbers exchanged and read on the host, one row per slot sent, put into the order of
the local experts, and back the same way, weighted and added at the source. Both hand their rows to
the same kernel of experts (``F.moe_mlp``, ``F.grouped_mlp``), so that what differs is the exchange.
``decode`` is TokenSwitchAllGather, without gradients. Two hosts are two network namespaces of this
machine, half of the ranks on each (two loopback addresses where those are not permitted); with more
than one rank on each, ``hierarchical`` is TokenSwitchHierarchical.

Ratios are of one round: the plain dispatcher's time over ours. ``wall`` is of the slowest rank;
``cpu`` is the time of a rank's process, all its threads, which neighbours on the machine disturb less.
"""

import argparse
import functools
import time
from collections.abc import Callable

from ep_rank import RankLayer
from report import parse, show
from two_hosts import two_hosts

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._moe.switch import (
    TokenSwitchAllGather,
    TokenSwitchAllToAll,
    TokenSwitchHierarchical,
)
from torch.distributed._token_switch import TokenSwitch
from torch.distributed.device_mesh import init_device_mesh

from measure import (
    interleaved_seconds,
    on_gloo_ranks,
    on_hosts,
    over_ranks,
    ratio_record,
    save,
    spread,
)


DECODE_TOKENS = 128  # a rank, at most
SIZES = {"D": 1024, "F": 256, "E": 32, "K": 4}


def make_layer(kind: type[RankLayer], switch: TokenSwitch | None, T: int) -> RankLayer:
    gen = torch.Generator().manual_seed(dist.get_rank())
    D, hidden, E, K = SIZES.values()
    ids = torch.rand(T, E, generator=gen).topk(K, 1).indices
    return kind(switch, ids, D, hidden, E)


class Plain(RankLayer):
    def forward(self, compute: bool = True) -> Tensor:
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


def clocks() -> Tensor:
    """Of the wall, and of the process."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


def measure(
    layers: dict[str, RankLayer], what: Callable[[RankLayer], None], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every round by layer and clock, of the slowest rank."""
    calls = {name: functools.partial(what, layer) for name, layer in layers.items()}
    times = interleaved_seconds(
        calls, rounds=rounds, warmup=2, before=lambda: dist.barrier(), clock=clocks
    )
    return {
        name: dict(zip(("wall", "cpu"), map(over_ranks, torch.stack(values).t())))
        for name, values in times.items()
    }


def measure_all(args: argparse.Namespace, hosts: int) -> list[dict[str, object]]:
    E, rows = SIZES["E"], []
    switches: dict[str, TokenSwitch] = {
        "switch": TokenSwitchAllToAll(dist.group.WORLD, E)
    }
    if hosts > 1 and args.ranks > hosts:
        shape = (hosts, args.ranks // hosts)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "local"))
        switches["hierarchical"] = TokenSwitchHierarchical(mesh, E)
    decode = TokenSwitchAllGather(dist.group.WORLD, E, max_tokens=DECODE_TOKENS)
    parts = {
        "exchange": RankLayer.there_and_back,
        "forward": lambda layer: torch.no_grad()(layer.forward)(),
        "forward+backward": RankLayer.step,
    }
    for tokens in args.tokens:
        layers = {"plain": make_layer(Plain, None, tokens)}
        for name, switch in switches.items():
            layers[name] = make_layer(RankLayer, switch, tokens)
        if tokens <= DECODE_TOKENS:
            layers["decode"] = make_layer(RankLayer, decode, tokens)
        for part, what in parts.items():
            if part == "forward+backward":
                layers.pop("decode", None)
            rounds = max(9, min(args.rounds, 40_000 // tokens))
            seen = measure(layers, what, rounds)
            plain = seen.pop("plain")
            for name, times in seen.items():
                row = {"tokens": tokens, "part": part, "form": name}
                for clock in ("wall", "cpu"):
                    a, b = plain[clock], times[clock]
                    row[f"{clock}_ms"] = 1e3 * spread(b).median
                    row[f"plain_{clock}_ms"] = 1e3 * spread(a).median
                    row[f"{clock}_ratio"] = ratio_record(a, b)
                rows.append(row)
    return rows


def main() -> None:
    tokens = [8, 32, 128, 512, 2048, 4096]
    args = parse(__doc__, ranks=2, hosts=[1], tokens=tokens, rounds=101)
    torch.set_num_threads(1)
    fields: dict = {"ranks": args.ranks, "sizes": SIZES, "rows": []}
    for hosts in args.hosts:
        if hosts == 2:
            with two_hosts() as cluster:
                rows = on_hosts(cluster, args.ranks // 2, measure_all, args, 2)[0]
                fields["two_hosts"] = cluster.describe()
        else:
            rows = on_gloo_ranks(args.ranks, measure_all, args, 1)[0]
        rows = [{"hosts": hosts, **row} for row in rows]
        where = f"{args.ranks} gloo ranks on {hosts} host(s), {SIZES}"
        columns = ("tokens", "part", "form", "plain_cpu_ms", "cpu_ms")
        columns += ("cpu_ratio", "wall_ratio")
        show(f"{where}: ms, and plain / ours [interval]", rows, columns)
        fields["rows"] += rows
        save(args.out, **fields)


if __name__ == "__main__":
    main()
