"""The expert-parallel part of the demo: the same training on two gloo ranks of this machine."""

import json
import pathlib
import sys
import tempfile
import uuid

from torch.distributed.launcher.api import elastic_launch, LaunchConfig

from demo import ep_worker
from demo.report import Check, ExpertParallelRow
from measure import spread


RANKS = 2


def train(
    fused_losses: list[float],
    *,
    seed: int,
    batch: int,
    tokens_per_step: int,
    evaluation_batches: int,
) -> ExpertParallelRow:
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
        elastic_launch(config, sys.executable)(ep_worker.__file__, *words)
        seen = json.loads(out.read_text())
    return ExpertParallelRow(
        ranks=seen["ranks"],
        losses=seen["losses"],
        held_out_end=seen["held_out_end"],
        differences=[
            abs(a - b) for a, b in zip(seen["losses"], fused_losses, strict=True)
        ],
        tokens_per_second=spread([tokens_per_step / s for s in seen["seconds"]]),
        wire_bytes=seen["wire_bytes"],
    )


def checks(row: ExpertParallelRow, noise: float) -> list[Check]:
    """What the expert-parallel run promises.

    Args:
        noise: the largest loss difference of two unfused runs in other expert orders.
    """
    largest = max(row.differences)
    wire = row.total_wire_bytes()
    return [
        Check(
            f"{row.ranks} expert-parallel ranks train like one",
            f"largest loss difference {largest:.2e} ({largest / noise:.2f}x)",
            f"<= 2x {noise:.2e}, as above",
            largest <= 2 * noise,
        ),
        Check(
            "rows cross ranks only as often as they must",
            f"{wire['payload']:,.0f} bytes per step",
            f"= {wire['minimum']:,.0f}, once per token and other rank and direction",
            wire["payload"] == wire["minimum"] > 0,
        ),
    ]
