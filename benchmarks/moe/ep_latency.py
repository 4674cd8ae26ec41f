"""A token switch beside a plain dispatcher, from 8 to 4096 tokens a rank, in turns on gloo ranks.

    python benchmarks/moe/ep_latency.py [--ranks 2] [--hosts 1 2] [--tokens 8 32 ...] [--rounds 101] [--out FILE.json]

The plain dispatcher follows the description of torchtitan's AllToAllTokenDispatcher. It sorts slots
by expert, exchanges their counts and reads them on the host, sends one row per slot, and sorts the
rows by local expert. Rows return the same way and are weighted and added at the source. Both use
the same expert kernel (``F.moe_mlp``, ``F.grouped_mlp``), so only the exchange differs.
``decode`` is TokenSwitchAllGather, without gradients. Two hosts are two network namespaces of this
machine, with half of the ranks each (two loopback addresses if namespaces are not permitted). With
more than one rank per host, ``hierarchical`` is TokenSwitchHierarchical.

Ratios are of one round: the plain dispatcher's time over ours. ``wall`` is of the slowest rank;
``cpu`` is the process time of a rank, all threads, which other jobs on the machine disturb less.
"""

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
from torch.distributed._moe import all_to_all
from torch.distributed._moe.all_gather import TokenSwitchAllGather
from torch.distributed.device_mesh import init_device_mesh

import measure


DECODE_TOKENS = 128  # a rank, at most
SIZES = {"D": 1024, "F": 256, "E": 32, "K": 4}


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
        # From the order of ranks to that of the local experts.
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
    """Wall time and process time."""
    return torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)


def seconds_of(
    layers: dict[str, RankLayer], what: Callable[[RankLayer], None], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every round by layer and clock, of the slowest rank."""
    calls = {name: functools.partial(what, layer) for name, layer in layers.items()}
    options = {"warmup": 2, "before": dist.barrier, "clock": clocks}
    times = measure.interleaved_seconds(calls, rounds=rounds, **options)
    of_clocks = {name: torch.stack(values).t() for name, values in times.items()}
    return {
        name: {"wall": measure.over_ranks(wall), "cpu": measure.over_ranks(cpu)}
        for name, (wall, cpu) in of_clocks.items()
    }


def measure_all(args, hosts: int) -> list[dict[str, object]]:
    D, hidden, E, K = SIZES.values()
    group = dist.group.WORLD
    switches: dict = {"switch": all_to_all.TokenSwitchAllToAll(group, E)}
    if hosts > 1 and args.ranks > hosts:
        shape = (hosts, args.ranks // hosts)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "local"))
        switches["hierarchical"] = all_to_all.TokenSwitchHierarchical(mesh, E)
    decode = TokenSwitchAllGather(group, E, max_tokens=DECODE_TOKENS)
    parts = {
        "exchange": RankLayer.there_and_back,
        "forward": lambda layer: torch.no_grad()(layer.forward)(),
        "forward+backward": RankLayer.step,
    }
    rows = []
    for tokens in args.tokens:
        gen = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.rand(tokens, E, generator=gen).topk(K, 1).indices
        sizes = (ids, D, hidden, E)
        layers = {name: RankLayer(s, *sizes) for name, s in switches.items()}
        layers["plain"] = Plain(None, *sizes)
        if tokens <= DECODE_TOKENS:
            layers["decode"] = RankLayer(decode, *sizes)
        for part, what in parts.items():
            if part == "forward+backward":
                layers.pop("decode", None)
            rounds = max(9, min(args.rounds, 40_000 // tokens))
            seen = seconds_of(layers, what, rounds)
            plain = seen.pop("plain")
            for name, times in seen.items():
                row = {"tokens": tokens, "part": part, "form": name}
                for clock in ("wall", "cpu"):
                    a, b = plain[clock], times[clock]
                    row[f"{clock}_ms"] = 1e3 * measure.spread(b).median
                    row[f"plain_{clock}_ms"] = 1e3 * measure.spread(a).median
                    row[f"{clock}_ratio"] = measure.ratio_record(a, b)
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
                each = args.ranks // 2
                rows, *_ = measure.on_hosts(cluster, each, measure_all, args, 2)
                fields["two_hosts"] = cluster.describe()
        else:
            rows, *_ = measure.on_gloo_ranks(args.ranks, measure_all, args, 1)
        rows = [{"hosts": hosts, **row} for row in rows]
        where = f"{args.ranks} gloo ranks on {hosts} host(s), {SIZES}"
        columns = ("tokens", "part", "form", "plain_cpu_ms", "cpu_ms")
        columns += ("cpu_ratio", "wall_ratio")
        show(f"{where}: ms, and plain / ours [interval]", rows, columns)
        fields["rows"] += rows
        measure.save(args.out, **fields)


if __name__ == "__main__":
    main()
