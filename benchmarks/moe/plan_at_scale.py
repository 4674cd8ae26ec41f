"""Can plans be instantiated? Published models on 64 to 16,384 GPUs, without a GPU.

    python benchmarks/moe/plan_at_scale.py [--models kimi_k2] [--gpus 64 1024] [--out FILE.json]

parallelize_moe runs with a data sheet, a model on the meta device and a fake process group. Each
requested rank makes its groups and its shards; nothing is computed. A row compares them with the
plan: experts of a rank, members of its groups, bytes of its shards with gradients and optimizer.
"""

import math
import sys
import time
from pathlib import Path


_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE / "clients")]

import report
from packages import require_transformers

import torch
import torch.distributed as dist
from torch.distributed._tools.moe_memory_model import uneven
from torch.distributed._tools.moe_parallelize import parallelize_moe

import measure


_MLA = {
    "hidden_size": 7168, "moe_intermediate_size": 2048, "intermediate_size": 18432,
    "num_hidden_layers": 61, "q_lora_rank": 1536, "kv_lora_rank": 512, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
# From the published config.json files.
MODELS = {
    "deepseek_v3": ("DeepseekV3Config", {
        **_MLA, "n_routed_experts": 256, "num_attention_heads": 128, "num_key_value_heads": 128,
        "vocab_size": 129280, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    }),
    "kimi_k2": ("DeepseekV3Config", {
        **_MLA, "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
        "vocab_size": 163840, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    }),
    "qwen3_235b": ("Qwen3MoeConfig", {
        "hidden_size": 4096, "moe_intermediate_size": 1536, "intermediate_size": 12288,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    }),
}  # fmt: skip
GPUS = [64, 256, 1024, 4096, 16384]


def build(name: str) -> torch.nn.Module:
    require_transformers()
    import transformers

    kind, sizes = MODELS[name]
    config = getattr(transformers, kind)(**sizes)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32
        )


def of_rank(model: torch.nn.Module, plan) -> dict:
    """Groups and shards of this rank, which must agree with the plan."""
    x = plan.layout
    shards = x.dp // x.replicate
    wanted = {
        "efsdp": shards * x.tp // x.ep,
        "ep": x.ep,
        "dp_shard": shards,
        "tp": x.tp,
    }
    if x.replicate > 1:
        wanted["dp_replicate"] = x.replicate
    groups, local = {}, 0
    for name, parameter in model.named_parameters():
        part, mesh = parameter.to_local(), parameter.device_mesh
        local += part.numel()
        for dim in mesh.mesh_dim_names:
            size = groups.setdefault(dim, mesh[dim].size())
            if (size, size) != (wanted[dim], mesh.get_group(dim).size()):
                raise AssertionError(
                    f"{name}: {dim} has {size} ranks, planned {wanted[dim]}"
                )
        if mesh.mesh.unique().numel() != mesh.mesh.numel():
            raise AssertionError(f"{name}: a rank is in the mesh twice")
        if ".experts." in name and part.numel():
            experts, e = len(part), parameter.shape[0]
            most = math.ceil(
                e / x.ep / (1 if e / x.ep < wanted["efsdp"] else wanted["efsdp"])
            )
            if experts != most:
                raise AssertionError(
                    f"{name}: {experts} experts are here, planned {most}"
                )
    numbers = plan.model.parameters()
    own = numbers["expert"] / x.ep / x.expert_dp * uneven(plan.model, x)
    owned = (numbers["other"] / x.dp + own) * x.replicate
    each = x.gradient_bytes + x.optimizer_bytes
    return {
        "groups": groups,
        "shards_gb": local * each / 1e9,
        "planned_shards_gb": owned * each / 1e9,
        "error": owned / local - 1,
        "planned_gb": plan.memory.total / 1e9,
    }


def instantiate(name: str, gpus: int, rank: int, device: str) -> dict:
    """Groups and shards of one rank beside the plan's, or why there is no plan."""
    from transformers_parallel import ADAPTER

    start = time.perf_counter()
    row = {"model": name, "gpus": gpus, "device": device, "rank": rank}
    dist.init_process_group("fake", rank=rank, world_size=gpus)
    try:
        model, plan = parallelize_moe(
            build(name), batch=16 * gpus, seq=4096, profile=device, adapter=ADAPTER
        )
        x = plan.layout
        row |= {
            n: getattr(x, n)
            for n in ("replicate", "ep", "tp", "micro_batch", "recompute")
        }
        row["tokens_per_second_per_gpu"] = plan.step.tokens_per_second
        row |= of_rank(model, plan)
        row["torchtitan"] = plan.parallel_dims()
    except ValueError as error:
        row |= {"refused": str(error), "error": 0.0}
    finally:
        dist.destroy_process_group()
    return row | {"seconds": time.perf_counter() - start}


def main() -> None:
    args = report.parse(__doc__, models=MODELS, gpus=GPUS, device="GB300")
    require_transformers()
    import transformers  # noqa: F401

    rows = []
    for name in args.models:
        for gpus in args.gpus:
            # The first has the largest shards.
            for rank in (
                (0, 5 * gpus // 8 + 3) if gpus in (64, 16384) else (5 * gpus // 8 + 3,)
            ):
                rows.append(instantiate(name, gpus, rank, args.device))
                print(rows[-1], flush=True)
                measure.save(args.out, rows=rows)

    columns = (
        "model",
        "gpus",
        "rank",
        "replicate",
        "ep",
        "tp",
        "recompute",
        "error",
        "seconds",
    )
    report.show("Instantiated under a fake process group", rows, columns)


if __name__ == "__main__":
    main()
