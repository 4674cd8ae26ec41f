"""One rank of the expert-parallel benchmarks: a layer in parts, its bytes and its times."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._moe.all_to_all import (
    TokenSwitchAllToAll,
    TokenSwitchHierarchical,
)
from torch.distributed._moe.exchange import Exchange
from torch.distributed._moe.wire_bytes import count_wire_bytes
from torch.distributed._tools.moe_calibration import measure_links
from torch.distributed._tools.moe_exchange_model import link_seconds
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.moe_generators import MoeCase


_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parents[1] / "test" / "distributed")]

from moe_placement import deduplicated_rows
from shapes import REAL, recorded_routing

from measure import over_ranks, slowest_seconds, spread


NUM_HOSTS = 2
EXPERTS, TOP_K = 64, 8  # those of the recorded routing
WIRES = {"bfloat16": None, "float8": torch.float8_e4m3fn}


@dataclasses.dataclass(frozen=True)
class Case:
    """One MoE layer on all ranks."""

    routing: str  # REAL or another one of moe_generators
    switch: str  # "flat" or "hierarchical"
    wire: str  # a key of WIRES; tokens are bfloat16
    dim: int


def cases(dim: int, small_dim: int) -> list[Case]:
    both = ("flat", "hierarchical")
    found = [Case(REAL, s, w, dim) for s in both for w in WIRES]
    found += [Case(r, s, "bfloat16", dim) for r in ("uniform", "zipf") for s in both]
    return [*found, Case(REAL, "flat", "bfloat16", small_dim)]


def routed(routing: str, num_tokens: int, seed: int) -> Tensor:
    """(num_tokens, K) expert ids; another ``seed`` is another draw of the same load."""
    if routing == "recorded":
        return recorded_routing()[seed * num_tokens :][:num_tokens]
    sizes = {"num_tokens": num_tokens, "num_experts": EXPERTS, "top_k": TOP_K}
    return MoeCase("ep", **sizes, routing=routing, seed=seed).topk_indices()


def counts_of(indices: Tensor) -> Tensor:
    return torch.bincount(indices.flatten(), minlength=EXPERTS)


class RankLayer:
    """Operands of one rank of an expert-parallel layer, and its forward in parts."""

    def __init__(self, switch, ids: Tensor, dim: int, hidden: int, num_experts: int):
        self.switch, self.ids = switch, ids  # (T, K) of this rank
        generator = torch.Generator().manual_seed(dist.get_rank())
        local = num_experts // dist.get_world_size()

        def leaf(*size: int, std: float = 1.0) -> Tensor:
            values = torch.randn(size, generator=generator) * std
            return values.bfloat16().requires_grad_()

        self.x = leaf(len(ids), dim)
        self.w_in = leaf(local, 2 * hidden, dim, std=dim**-0.5)
        self.w_out = leaf(local, dim, hidden, std=hidden**-0.5)
        weights = torch.randn(ids.shape, generator=generator)
        self.weights = weights.softmax(-1).requires_grad_()
        self.grad_y = leaf(len(ids), dim).detach()

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor):
        """The routing, and (rows, ids, weights, number of slots) for :meth:`experts`."""
        routing = self.switch.create_routing(ids, layout="flat")
        rows, weights, ids = self.switch.dispatch(routing, x, weights)
        num_slots = getattr(self.switch, "num_slots", lambda routing: None)
        return routing, (rows, ids, weights, num_slots(routing))

    def experts(self, rows, ids, weights, num_rows: int | None) -> Tensor:
        weights = (weights, self.w_in, self.w_out)
        return F.moe_mlp(rows, ids, *weights, num_rows=num_rows)

    def forward(self, compute: bool = True) -> Tensor:
        """The layer's output; without ``compute`` only the switch runs."""
        routing, received = self.dispatch(self.x, self.ids, self.weights)
        rows = self.experts(*received) if compute else received[0]
        return self.switch.combine(routing, rows)

    def step(self) -> None:
        leaves = (self.x, self.weights, self.w_in, self.w_out)
        torch.autograd.grad(self.forward(), leaves, self.grad_y)

    @torch.no_grad()
    def there_and_back(self) -> None:
        self.forward(compute=False)


class Layer(RankLayer):
    """A case of ep.py, and the parts of a step that are timed."""

    def __init__(self, case: Case, mesh: DeviceMesh, tokens: int, hidden: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.case = case
        everyone = routed(case.routing, tokens * ranks, seed=0)
        self.of_ranks = list(everyone.chunk(ranks))
        options = {"wire_dtype": WIRES[case.wire]}
        if case.switch == "flat":
            switch = TokenSwitchAllToAll(dist.group.WORLD, EXPERTS, **options)
        else:
            switch = TokenSwitchHierarchical(mesh, EXPERTS, **options)
        super().__init__(switch, self.of_ranks[rank], case.dim, hidden, EXPERTS)

    def experts_only(self) -> Callable[[], None]:
        """The step's computation on the rows that this rank receives."""
        with torch.no_grad():
            _, received = self.dispatch(self.x, self.ids, self.weights)
        rows, ids, weights, slots = received
        rows, weights = rows.detach().requires_grad_(), weights.detach()
        leaves = (rows, self.w_in, self.w_out)

        def compute() -> None:
            out = self.experts(rows, ids, weights, slots)
            torch.autograd.grad(out, leaves, torch.ones_like(out))

        return compute


@contextlib.contextmanager
def send_timer(switch: TokenSwitchAllToAll) -> Iterator[Counter[str]]:
    """Seconds inside the collectives of a switch, by level."""
    seconds: Counter[str] = Counter()

    def timed(exchange: Exchange, send: Callable, *args, **kwargs) -> Tensor:
        # Ranks start together; otherwise waiting for the slowest would count as the link's time.
        dist.barrier(group=exchange.group)
        start = time.perf_counter()
        out = send(*args, **kwargs)
        seconds[exchange.level] += time.perf_counter() - start
        return out

    with contextlib.ExitStack() as stack:
        for exchange in switch.levels:
            send = functools.partial(timed, exchange, exchange.send)
            stack.enter_context(mock.patch.object(exchange, "send", send))
        yield seconds


def fit_links(mesh: DeviceMesh) -> dict[str, dict[str, float]]:
    """Start of an all-to-all, bytes/s that a rank sends to others, and turn, at each level."""
    groups = {"flat": dist.group.WORLD, "node": mesh.get_group(0)}
    groups["local"] = mesh.get_group(1)
    names, sizes = ("start", "rate", "turn"), [2**k for k in range(8, 23, 2)]
    return {k: dict(zip(names, measure_links(g, sizes))) for k, g in groups.items()}


def crossing_rows(layer: Layer, ranks_per_host: int) -> int:
    """Rows that leave hosts one way: one per token and rank with a flat switch, else per host."""
    local = EXPERTS // len(layer.of_ranks)
    total = 0
    for source, ids in enumerate(layer.of_ranks):
        per = local if layer.case.switch == "flat" else local * ranks_per_host
        goes = F.one_hot(ids // per, EXPERTS // per).any(dim=1)
        host = torch.arange(EXPERTS // per) * per // (local * ranks_per_host)
        total += int(goes[:, host != source // ranks_per_host].sum())
    return total


def interface_bytes() -> int | None:
    """Bytes that this host has sent; None without its own interface."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    path = pathlib.Path("/sys/class/net", name, "statistics/tx_bytes")
    return None if name == "lo" else int(path.read_text())


def measure_bytes(layer: Layer, mesh: DeviceMesh, rounds: int) -> dict[str, object]:
    """Bytes of one forward, of all ranks: accounted by level, and seen on the interface."""
    case = layer.case
    with count_wire_bytes(layer.switch) as wire:
        layer.there_and_back()
    shape = (mesh.size(),) if case.switch == "flat" else tuple(mesh.shape)
    dispatched = case.dim * (WIRES[case.wire] or torch.bfloat16).itemsize
    names = ("rows", "scales", "returned", "ids", "weights", "sizes")
    levels = {}
    rows = deduplicated_rows(layer.of_ranks, EXPERTS, shape)
    for level, per_rank in rows.items():
        mine = [wire.sent[level].get(name, 0) for name in names]
        total = dict(zip(names, over_ranks(mine, dist.ReduceOp.SUM), strict=True))
        levels[level] = total | {
            "minimum_rows": sum(per_rank) * dispatched,
            "minimum_returned": sum(per_rank) * case.dim * 2,
            "messages": sum(wire.messages[level].values()),
            "heaviest_rank": over_ranks([sum(mine)])[0],
        }
    dist.barrier()
    before = interface_bytes()
    for _ in range(rounds):
        layer.there_and_back()
    dist.barrier()
    seen = None
    if before is not None:
        first = dist.get_rank() % mesh.size(1) == 0
        sent = ((interface_bytes() or 0) - before) / rounds if first else 0
        seen = over_ranks([sent], dist.ReduceOp.SUM)[0]
    crossing = crossing_rows(layer, mesh.size(1))
    return {"levels": levels, "crossing_rows": crossing, "interface_bytes": seen}


def measure_times(layers: list[Layer], rounds: int) -> list[dict[str, object]]:
    """Seconds of the parts of a step; every rank waits for the others before each."""
    functions: dict[tuple[int, str], Callable[[], None]] = {}
    for i, layer in enumerate(layers):
        functions[i, "step"] = layer.step
        functions[i, "switch"] = layer.there_and_back
        functions[i, "experts"] = layer.experts_only()
    seconds = slowest_seconds(functions, rounds=rounds, warmup=1)
    rows = []
    for i, layer in enumerate(layers):
        row: dict[str, object] = {
            f"{part}_seconds": spread(seconds[i, part])
            for part in ("step", "switch", "experts")
        }
        wire = []
        for _ in range(rounds):
            with send_timer(layer.switch) as sent:
                layer.there_and_back()
            wire.append(sent)
        row["wire_seconds"] = {
            level: over_ranks([median(s[level] for s in wire)])[0] for level in wire[0]
        }
        # Token copies that the experts of each rank compute.
        ranks = dist.get_world_size()
        owners = torch.cat(layer.of_ranks).flatten() // (EXPERTS // ranks)
        loads = owners.bincount(minlength=ranks)
        row["imbalance"] = (loads.max() * ranks / loads.sum()).item()
        rows.append(row)
    return rows


def predicted_seconds(links: dict, levels: dict) -> dict[str, float]:
    """Seconds of the collectives of the rank that sends most, by level."""
    seconds = {}
    for level, seen in levels.items():
        start, rate, turn = links[level].values()
        nbytes, messages = seen["heaviest_rank"], seen["messages"]
        seconds[level] = link_seconds(start, rate, nbytes, messages, turn)
    return seconds


def measure_rank(sizes: dict[str, int]) -> dict[str, object]:
    """Links and all cases, as the ranks of a (hosts, ranks per host) mesh see them."""
    shape = (NUM_HOSTS, dist.get_world_size() // NUM_HOSTS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "local"))
    links, found = fit_links(mesh), []
    all_cases = cases(sizes["dim"], sizes["small_dim"])
    layers = [Layer(c, mesh, sizes["tokens"], sizes["hidden"]) for c in all_cases]
    times = measure_times(layers, sizes["rounds"])
    for layer, timed in zip(layers, times, strict=True):
        row = dataclasses.asdict(layer.case) | timed
        row |= measure_bytes(layer, mesh, rounds=3)
        row["predicted_seconds"] = predicted_seconds(links, row["levels"])
        found.append(row)
    return {"links": links, "cases": found}
