"""The expert-parallel part of the demo: the same training on gloo ranks of this machine.

As a script it is one of the ranks; :func:`train` and torchrun start it::

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/moe/demo/expert_parallel.py --out FILE

The model, its initial weights and the text are those of train_demo.py. Every rank takes its share
of each batch; ExpertParallel spreads the experts over the ranks and FSDP2 everything else. Rank 0
writes what was measured to FILE.
"""

import argparse
import datetime
import functools
import json
import pathlib
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, Tensor
from torch.distributed._moe.exchange import count_wire_bytes
from torch.distributed._moe.switch import (
    TokenSwitchAllToAll,
    TokenSwitchHierarchical,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.launcher.api import elastic_launch, LaunchConfig
from torch.distributed.tensor.parallel import ExpertParallel, parallelize_module


_MOE = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(_MOE))
sys.path.append(str(_MOE.parents[1] / "test" / "distributed"))

import peers
import report
from moe_placement import deduplicated_rows

from demo import text
from demo.model import LanguageModel, ModelConfig, MoE
from demo.train import learning_rate, make_run
from measure import leave_groups, over_ranks, spread


RANKS = 2
TIMEOUT = datetime.timedelta(seconds=60)  # of a collective, so that nothing hangs
COUNT_EVERY = 10  # steps; bytes are counted in these and time in the others


class DemoAdapter(ExpertParallel.Adapter):
    """Shows ExpertParallel the expert weights of the demo's MoE layer.

    Args:
        on_route: called with the (T, K) expert ids of every layer.
    """

    method = "run_experts"

    def __init__(self, on_route: Callable[[Tensor], None]) -> None:
        self.on_route = on_route

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, MoE)

    def expert_parameters(self, module: nn.Module) -> dict[str, int | None]:
        return {"w_in": 1, "w_out": 2}

    def run(
        self,
        module: nn.Module,
        original: Callable[..., Tensor],
        exchange: Callable[..., Tensor],
        x_TD: Tensor,
        indices_TK: Tensor,
        weights_TK: Tensor,
    ) -> Tensor:
        def experts(
            rows: Tensor, ids: Tensor, weights: Tensor, num_rows: int | None = None
        ) -> Tensor:
            # The experts of this rank. A received row may have K slots here, or one:
            # num_rows is how many there are.
            local = (p.to(module.dtype) for p in (module.w_in, module.w_out))
            return F._moe_mlp_in_rows(rows, ids, weights, *local, num_rows=num_rows)

        self.on_route(indices_TK)
        return exchange(x_TD, indices_TK, weights_TK, experts)


def make_mesh(num_hosts: int) -> DeviceMesh:
    """(ranks,) "ep" on one host or one rank per host, else (hosts, ranks per host)."""
    ranks = dist.get_world_size()
    if ranks % num_hosts:
        raise ValueError(f"{ranks} ranks do not divide over --hosts {num_hosts}")
    if num_hosts in (1, ranks):
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    shape = (num_hosts, ranks // num_hosts)
    return init_device_mesh("cpu", shape, mesh_dim_names=("node", "local"))


def make_switch(
    mesh: DeviceMesh, num_experts: int, combine: Literal["reduce", "exact"]
) -> TokenSwitchAllToAll:
    """Flat all-to-all on a 1-D mesh; node, then local on a 2-D one."""
    if mesh.ndim == 1:
        return TokenSwitchAllToAll(mesh.get_group(), num_experts, combine=combine)
    return TokenSwitchHierarchical(mesh, num_experts, combine=combine)


def shard(
    model: LanguageModel, mesh: DeviceMesh, style: ExpertParallel
) -> list[list[nn.Parameter]]:
    """Experts of the MoE layers by ``style``, everything else by FSDP2.

    Returns:
        The parameters of experts and the others, for the optimizer.
    """
    flat = mesh if mesh.ndim == 1 else mesh._flatten("ep")
    parallelize_module(model, flat, {"layers.*.moe": style})
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    experts = [p for layer in layers for p in (layer.w_in, layer.w_out)]
    for p in experts:
        # The loss is the mean over ranks, which FSDP sees to for the others.
        p.register_hook(lambda grad: grad / flat.size())
    # One group: without the experts the layers are too small to be worth a message each.
    fully_shard(model, mesh=flat, ignored_params=set(experts))
    own = {id(p) for p in experts}
    return [experts, [p for p in model.parameters() if id(p) not in own]]


class WireCounter:
    """Bytes between ranks in some steps, beside the fewest that would do.

    Attributes:
        steps: how many were counted.
        levels: of the mesh: "flat", or "node" and "local"; each with the bytes of all counted
            steps and all ranks together.
            payload: token rows to the experts and back, and their gradients.
            minimum: payload if each token goes once to every other rank (or node) that holds
                one of its experts, comes back once, and so does its gradient.
            metadata: expert ids, router weights and their gradients, sizes.
    """

    def __init__(
        self, switch: TokenSwitchAllToAll, mesh: DeviceMesh, config: ModelConfig
    ):
        self.switch, self.mesh, self.config = switch, mesh, config
        self.steps = 0
        self.levels: dict[str, Counter[str]] = {}
        self._routed: list[Tensor] | None = None

    def on_route(self, indices: Tensor) -> None:
        if self._routed is not None:
            self._routed.append(indices)

    def count(self, step: Callable[[], None]) -> None:
        """Run ``step`` and add its bytes."""
        self._routed = []
        with count_wire_bytes(self.switch) as wire:
            step()
        routed, self._routed = self._routed, None
        row_bytes = self.config.d_model * self.config.expert_dtype.itemsize
        minimum: Counter[str] = Counter()
        for indices in routed:
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


def train_rank(arguments: argparse.Namespace) -> dict[str, object]:
    """Train and return what was seen: the same on every rank, but for the times."""
    config = ModelConfig()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if arguments.batch % ranks:
        raise ValueError(
            f"--batch {arguments.batch} must be a multiple of {ranks} ranks"
        )
    corpus = text.read_corpus()
    shape, seed = (arguments.batch, config.sequence), arguments.seed
    batches = text.sample_batches(corpus.train, arguments.schedule, *shape, seed)
    held_out = text.sample_batches(
        corpus.held_out, arguments.evaluation_batches, *shape, seed
    )
    mesh = make_mesh(arguments.hosts)
    switch = make_switch(mesh, config.experts, arguments.combine)
    wire = WireCounter(switch, mesh, config)
    torch.manual_seed(seed)
    model = LanguageModel(config, peers.fused())
    # All layers share the switch: it keeps nothing of a batch.
    style = ExpertParallel(
        token_switch=lambda mesh, num_experts: switch,
        adapter=DemoAdapter(wire.on_route),
    )
    run = make_run("expert-parallel", model, shard(model, mesh, style))
    steps = arguments.steps if rank == 0 else 0
    with report.progress(f"Training on {ranks} ranks", steps) as advance:
        for i in range(arguments.steps):
            window = batches[i].chunk(ranks)[rank]
            rate = learning_rate(i, arguments.schedule)
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


def train(
    fused_losses: list[float],
    *,
    seed: int,
    batch: int,
    tokens_per_step: int,
    evaluation_batches: int,
) -> dict[str, object]:
    """Train the demo's model on RANKS ranks, one thread each, as long as the fused run was.

    Args:
        fused_losses: of the single-process run that this one must agree with.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed; the
            others were ended.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=RANKS,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "expert_parallel.json")
        options = {
            "out": out,
            "steps": len(fused_losses),
            "seed": seed,
            "batch": batch,
            "evaluation-batches": evaluation_batches,
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        elastic_launch(config, sys.executable)(__file__, *words)
        row = json.loads(out.read_text())
    pairs = zip(row["losses"], fused_losses, strict=True)
    row["differences"] = [abs(a - b) for a, b in pairs]
    rates = [tokens_per_step / s for s in row.pop("seconds")]
    return row | {"tokens_per_second": spread(rates)}


def parse_arguments() -> argparse.Namespace:
    parser = report.make_parser(__doc__)
    add = parser.add_argument
    add("--out", type=pathlib.Path, required=True, help="JSON to write")
    add("--steps", type=int, default=200, help="steps to train")
    add("--schedule", type=int, help="steps of the rate's schedule (default: --steps)")
    add("--seed", type=int, default=0, help="weights and order of text")
    add("--batch", type=int, default=4, help="windows of all ranks")
    add("--evaluation-batches", type=int, default=8)
    add("--hosts", type=int, default=1, help="hosts the ranks are on")
    modes = ("reduce", "exact")
    what = "one row back per token and rank, or per slot"
    add("--combine", choices=modes, default="reduce", help=what)
    arguments = parser.parse_args()
    arguments.schedule = arguments.schedule or arguments.steps
    return arguments


@record
def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group("gloo", timeout=TIMEOUT)
    result = train_rank(arguments)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(result))
    leave_groups()


if __name__ == "__main__":
    main()
