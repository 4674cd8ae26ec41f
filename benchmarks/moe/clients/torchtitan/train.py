"""Train torchtitan's own debug models with its own experts and with ours, in turns, and compare.

    PYTHONPATH=TORCHTITAN:ITS_PACKAGES python3 tools/stage.py python \
        benchmarks/moe/clients/torchtitan/train.py [--ranks 1 2 4] [--models deepseek_v3 qwen3] [--steps 8] [--tokens 512] [--out FILE.json]

torchtitan is a checkout beside this repository (reviewed and run at b5bcd76) with its packages
(spmd_types, tyro, grain, datasets, ...); nothing of it lies here. Model, parallelisation and
initialisation are its code, the text is the bytes of torch's own sources. Both models start from the
same weights and see the same batches; they take turns within every step. Gloo ranks, one thread each,
expert parallelism over all of them. Seconds are of the process of rank 0, which other jobs of the
machine move least; waiting is not in them.
"""

import importlib
import os
import pathlib
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist


HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from report import parse, show

from demo.text import read_corpus, sample_batches
from measure import on_gloo_ranks, paired_ratio, save, spread


MODELS = {"deepseek_v3": "debugmodel", "qwen3": "debugmodel_moe"}
OURS = "fused_experts.fused_routed_experts"  # the one line that a user adds
LEARNING_RATE = 0.1


def build(family: str, ranks: int, fused: bool, tokens: int) -> torch.nn.Module:
    """torchtitan's model as its Trainer builds it, with or without the override."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.config.override import apply_overrides, OverrideConfig
    from torchtitan.distributed import ParallelDims, utils as dist_utils

    registry = importlib.import_module(f"torchtitan.models.{family}").model_registry
    spec = registry(MODELS[family], attn_backend="flex")
    parallelism = ParallelismConfig(
        expert_parallel_degree=ranks,
        data_parallel_shard_degree=ranks,
        spmd_backend="partial_dtensor",
    )
    training = TrainingConfig(
        num_tokens_per_microbatch_per_dp_rank=tokens,
        max_context_length=tokens,
        mixed_precision_param="float32",
    )
    dims = ParallelDims(
        dp_replicate=1, dp_shard=ranks, cp=1, tp=1, pp=1, ep=ranks,
        world_size=ranks, spmd_backend="partial_dtensor",
    )  # fmt: skip
    dist_utils.set_spmd_backend("partial_dtensor")
    config = SimpleNamespace(parallelism=parallelism, model_spec=spec)
    spec.model.update_from_config(config=config)
    imports = ["cpu_attention.causal_attention", *([OURS] if fused else [])]
    apply_overrides(OverrideConfig(imports=imports), spec.model)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=training, parallelism=parallelism,
        compile_config=CompileConfig(), ac_config=None, dump_folder="",
    )  # fmt: skip
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model.train()


def train_rank(args) -> dict[str, dict]:
    """What this rank saw of all models."""
    # torchtitan asks torch for the machine's accelerator when it is imported.
    torch._utils._get_available_device_type = lambda: "cpu"
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    return {family: train(family, rank, ranks, args) for family in args.models}


def train(family: str, rank: int, ranks: int, args) -> dict:
    own, fused = (build(family, ranks, f, args.tokens) for f in (False, True))
    with torch.no_grad():
        for a, b in zip(own.parameters(), fused.parameters(), strict=True):
            b.copy_(a)
    runs = {"torchtitan": own, "fused": fused}
    optimizers = {
        # AdamW would divide the first gradients by their size: rounding decides those near zero.
        # foreach: parameters live on two meshes where there is expert parallelism.
        name: torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
        for name, model in runs.items()
    }
    windows = sample_batches(read_corpus().train, args.steps, ranks, args.tokens, 0)
    losses, seconds = ({name: [] for name in runs} for _ in range(2))
    for step, window in enumerate(windows):
        mine = window[rank]
        for name in sorted(runs, reverse=step % 2 == 1):
            dist.barrier()
            start = time.process_time()
            logits = runs[name](mine[:-1], torch.arange(args.tokens))
            loss = torch.nn.functional.cross_entropy(logits.float(), mine[1:])
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            seconds[name].append(time.process_time() - start)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses[name].append(mean.item() / ranks)
    return {"losses": losses, "seconds": seconds}


def main() -> None:
    options = {"ranks": [1, 2, 4], "models": list(MODELS), "steps": 8, "tokens": 512}
    args = parse(__doc__, **options)
    rows = []
    for ranks in args.ranks:
        seen = on_gloo_ranks(ranks, train_rank, args)[0]
        for family, row in seen.items():
            pairs = list(zip(*row["losses"].values()))
            warm = {name: values[1:] for name, values in row["seconds"].items()}
            rows.append(
                {
                    "model": f"{family} {MODELS[family]}",
                    "ranks": ranks,
                    "tokens_per_rank": args.tokens,
                    "losses": row["losses"],
                    "largest_loss_difference": max(abs(a - b) for a, b in pairs),
                    "seconds_per_step": {n: spread(v) for n, v in warm.items()},
                    "ratio": paired_ratio(warm["torchtitan"], warm["fused"]),
                }
            )
        save(args.out, torchtitan="b5bcd76", lines_changed=1, rows=rows)
    columns = ["model", "ranks", "largest_loss_difference", "ratio"]
    columns += [f"seconds_per_step.{name}" for name in ("torchtitan", "fused")]
    show("torchtitan's own experts over ours", rows, columns)


if __name__ == "__main__":
    main()
