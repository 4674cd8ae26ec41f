"""The expert-parallel part of the demo: the same training on gloo ranks of this machine.

The model, its initial weights and the text are those of train_demo.py. Every rank takes its share
of each batch; ExpertParallel spreads the experts over the ranks and FSDP2 everything else.
"""

import functools
import pathlib
import sys
from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, Tensor
from torch.distributed._moe.all_to_all import (
    TokenSwitchAllToAll,
    TokenSwitchHierarchical,
)
from torch.distributed._moe.wire_bytes import count_wire_bytes
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ExpertParallel, parallelize_module


_MOE = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(_MOE.parents[1] / "test" / "distributed"))

import peers
import report
from moe_placement import deduplicated_rows

from demo import text
from demo.model import LanguageModel, ModelConfig, MoE
from demo.train import learning_rate, make_run
from measure import on_gloo_ranks, over_ranks, spread


RANKS = 2
COUNT_EVERY = 10  # steps; these count bytes, the others are timed


class DemoAdapter(ExpertParallel.Adapter):
    """Shows ExpertParallel the expert weights of the demo's MoE layer."""

    method = "run_experts"

    def __init__(self, on_route: Callable[[Tensor], None]) -> None:
        self.on_route = on_route  # called with the (T, K) expert ids of every layer

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, MoE)

    def expert_parameters(self, module: nn.Module) -> dict[str, int | None]:
        return {"w_in": 1, "w_out": 2}

    def run(self, module, original, exchange, x_TD, indices_TK, weights_TK) -> Tensor:
        def experts(rows, ids, weights, num_rows: int | None = None) -> Tensor:
            # The experts of this rank. A received row may have 1 to K slots here;
            # num_rows is their number.
            local = (p.to(module.dtype) for p in (module.w_in, module.w_out))
            return F.moe_mlp(rows, ids, weights, *local, num_rows=num_rows)

        self.on_route(indices_TK)
        return exchange(x_TD, indices_TK, weights_TK, experts)


def make_switch(
    num_hosts: int, num_experts: int, combine: Literal["reduce", "exact"]
) -> tuple[DeviceMesh, TokenSwitchAllToAll]:
    """Flat all-to-all on (ranks,) on one host or with one rank per host, else on (hosts, ranks)."""
    ranks = dist.get_world_size()
    if num_hosts in (1, ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
        group = mesh.get_group()
        return mesh, TokenSwitchAllToAll(group, num_experts, combine=combine)
    shape = (num_hosts, ranks // num_hosts)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "local"))
    return mesh, TokenSwitchHierarchical(mesh, num_experts, combine=combine)


def shard(model: LanguageModel, mesh: DeviceMesh, style) -> list[list[nn.Parameter]]:
    """Experts of the MoE layers by ``style``, everything else by FSDP2; the parameters of both."""
    flat = mesh if mesh.ndim == 1 else mesh._flatten("ep")
    parallelize_module(model, flat, {"layers.*.moe": style})
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    experts = [p for layer in layers for p in (layer.w_in, layer.w_out)]
    for p in experts:
        # The loss is the mean over ranks; FSDP averages the other gradients.
        p.register_hook(lambda grad: grad / flat.size())
    # One group, as layers without experts are too small for a message each.
    fully_shard(model, mesh=flat, ignored_params=set(experts))
    own = {id(p) for p in experts}
    return [experts, [p for p in model.parameters() if id(p) not in own]]


class WireCounter:
    """Bytes between ranks in some steps, beside the fewest that suffice.

    Attributes:
        steps: how many were counted.
        levels: of the mesh: "flat", or "node" and "local"; each with the bytes of all counted
            steps and all ranks together.
            payload: token rows to the experts and back, and their gradients.
            minimum: payload if each token and its gradient travel once each way between its rank
                and every other rank (or node) with one of its experts.
            metadata: expert ids, router weights and their gradients, sizes.
        routed: the (T, K) expert ids of every layer since the last counted step began.
    """

    def __init__(self, switch, mesh: DeviceMesh, config: ModelConfig):
        self.switch, self.mesh, self.config = switch, mesh, config
        self.steps = 0
        self.levels: dict[str, Counter[str]] = {}
        self.routed: list[Tensor] = []

    def count(self, step: Callable[[], None]) -> None:
        """Run ``step`` and add its bytes."""
        self.routed.clear()
        with count_wire_bytes(self.switch) as wire:
            step()
        row_bytes = self.config.d_model * self.config.expert_dtype.itemsize
        minimum: Counter[str] = Counter()
        for indices in self.routed:
            of_ranks = [torch.empty_like(indices) for _ in range(self.mesh.size())]
            dist.all_gather(of_ranks, indices.contiguous())
            rows = deduplicated_rows(of_ranks, self.config.experts, self.mesh.shape)
            for level, per_rank in rows.items():
                minimum[level] += 4 * row_bytes * per_rank[dist.get_rank()]
        for level in minimum:
            sent = dict(wire.sent[level])
            payload = sent.pop("rows", 0) + sent.pop("returned", 0)
            counts = [payload, minimum[level], sum(sent.values())]
            counts = map(int, over_ranks(counts, dist.ReduceOp.SUM))
            counts = dict(zip(("payload", "minimum", "metadata"), counts, strict=True))
            self.levels.setdefault(level, Counter()).update(counts)
        self.steps += 1

    def per_step(self) -> dict[str, dict[str, float]]:
        return {
            level: {name: total / self.steps for name, total in counts.items()}
            for level, counts in self.levels.items()
        }


class Setup(NamedTuple):
    """How the ranks train."""

    steps: int
    batch: int  # windows of all ranks
    seed: int  # of weights and the order of the text
    evaluation_batches: int
    hosts: int = 1
    # One row back per token and rank, or per slot.
    combine: Literal["reduce", "exact"] = "reduce"


def train_rank(setup: Setup) -> dict[str, object]:
    """Train and return the results, which are the same on every rank except for times."""
    config = ModelConfig()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    corpus = text.read_corpus()
    shape, seed = (setup.batch, config.sequence), setup.seed
    batches = text.sample_batches(corpus.train, setup.steps, *shape, seed)
    count = setup.evaluation_batches
    held_out = text.sample_batches(corpus.held_out, count, *shape, seed)
    mesh, switch = make_switch(setup.hosts, config.experts, setup.combine)
    wire = WireCounter(switch, mesh, config)
    torch.manual_seed(seed)
    model = LanguageModel(config, peers.fused())
    # All layers share the switch: it keeps nothing of a batch.
    adapter = DemoAdapter(wire.routed.append)
    style = ExpertParallel(token_switch=lambda mesh, n: switch, adapter=adapter)
    run = make_run("expert-parallel", model, shard(model, mesh, style))
    steps = setup.steps if rank == 0 else 0
    with report.progress(f"Training on {ranks} ranks", steps) as advance:
        for i in range(setup.steps):
            window = batches[i].chunk(ranks)[rank]
            rate = learning_rate(i, setup.steps)
            if i % COUNT_EVERY == 0:
                wire.count(functools.partial(run.step, window, rate))
                run.seconds.pop()
            else:
                run.step(window, rate)
            if rank == 0:
                advance(f"loss {run.losses[-1]:.3f} on rank 0")
    held_out_end = run.evaluate(held_out.chunk(ranks, dim=1)[rank])
    return {
        "ranks": ranks,
        "losses": [x / ranks for x in over_ranks(run.losses, dist.ReduceOp.SUM)],
        "held_out_end": over_ranks([held_out_end], dist.ReduceOp.SUM)[0] / ranks,
        "seconds": run.seconds,
        "wire_bytes": wire.per_step(),
    }


def train(fused_losses: list[float], setup: Setup) -> dict[str, object]:
    """Train on RANKS ranks; the losses must agree with ``fused_losses``, those of one process."""
    row = on_gloo_ranks(RANKS, train_rank, setup)[0]
    pairs = zip(row["losses"], fused_losses, strict=True)
    row["differences"] = [abs(a - b) for a, b in pairs]
    tokens = setup.batch * ModelConfig().sequence
    rates = [tokens / s for s in row.pop("seconds")]
    return row | {"tokens_per_second": spread(rates)}
