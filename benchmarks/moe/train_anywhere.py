"""Train a small Mixture-of-Experts model on any number of ranks: one script, the same losses.

    torchrun --nproc-per-node 4 benchmarks/moe/train_anywhere.py [--model gpt_oss] [--steps 20] --folder build/anywhere

A transformers model with random weights on real text. Nothing here depends on the number of ranks:
parallelize_moe decides what runs where. Every ``--save-every`` steps model, optimizer and scheduler are
saved. A new start, on any number of ranks, continues from there with its own plan.
"""

import argparse
import json
import os
import pathlib
import sys
import time


_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE / "clients")]

from packages import require_transformers

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._tools.moe_parallelize import parallelize_moe
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from demo import text


_SIZES = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 2048,
}  # fmt: skip
MODELS = {
    "qwen3_moe": ("Qwen3MoeConfig", {
        **_SIZES, "moe_intermediate_size": 128, "num_experts": 32, "num_experts_per_tok": 4,
    }),
    "gpt_oss": ("GptOssConfig", {
        **_SIZES, "intermediate_size": 256, "num_local_experts": 16, "sliding_window": 64,
        "num_experts_per_tok": 4,
    }),
    "mixtral": ("MixtralConfig", {
        **_SIZES, "intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2,
    }),
    # Latent attention, a shared expert, a first layer without experts.
    "deepseek_v3": ("DeepseekV3Config", {
        **_SIZES, "head_dim": 16, "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "intermediate_size": 512,
        "n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
    }),
}  # fmt: skip
SEQ = 128


def build(name: str) -> torch.nn.Module:
    """Builds the same model on all ranks."""
    require_transformers()
    import transformers

    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class Checkpoint:
    """Saves model, optimizer and scheduler in a folder, and loads the last complete ones."""

    def __init__(self, folder: pathlib.Path, model, optimizer, scheduler) -> None:
        self.folder, self.parts = folder, (model, optimizer)
        self.scheduler, self.latest = scheduler, folder / "latest"

    def save(self, step: int) -> None:
        state = dict(zip(("model", "optimizer"), get_state_dict(*self.parts)))
        state["scheduler"] = self.scheduler.state_dict()
        dcp.save(state, checkpoint_id=self.folder / f"step-{step}")
        partial = self.folder / f"latest-{dist.get_rank()}"
        partial.write_text(str(step))
        partial.replace(self.latest)  # all ranks are done when dcp.save returns

    def load(self) -> int:
        """Loads the last checkpoint; the step to continue with."""
        if not self.latest.exists():
            return 0
        step = int(self.latest.read_text())
        state = dict(zip(("model", "optimizer"), get_state_dict(*self.parts)))
        state["scheduler"] = self.scheduler.state_dict()
        dcp.load(state, checkpoint_id=self.folder / f"step-{step}")
        names = {"model_state_dict": "model", "optim_state_dict": "optimizer"}
        set_state_dict(*self.parts, **{k: state[v] for k, v in names.items()})
        self.scheduler.load_state_dict(state["scheduler"])
        return step


def train(args: argparse.Namespace) -> None:
    from transformers_parallel import ADAPTER

    fixed = {name: value for name, value in (("ep", args.ep), ("tp", args.tp)) if value}
    model, plan = parallelize_moe(
        build(args.model), batch=args.batch, seq=SEQ, profile=args.profile,
        adapter=ADAPTER, **fixed,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    checkpoint = Checkpoint(args.folder, model, optimizer, scheduler)
    first = checkpoint.load()
    windows = text.sample_batches(
        text.read_corpus().train, args.steps, args.batch, SEQ, 0
    )
    for step in range(first, args.steps):
        micros = plan.micro_batches(windows[step, :, :SEQ])
        total = torch.zeros(())
        for ids in micros:
            loss = model(input_ids=ids, labels=ids).loss / len(micros)
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            x, ranks = plan.layout, dist.get_world_size()
            row = {"step": step, "loss": total.item() / ranks, "norm": norm.item()}
            row |= {
                "ranks": ranks,
                "ep": x.ep,
                "tp": x.tp,
                "micro_batch": x.micro_batch,
            }
            with open(args.folder / "log.jsonl", "a") as log:
                print(json.dumps(row), file=log)
            print(row, flush=True)
        if (step + 1) % args.save_every == 0:
            checkpoint.save(step + 1)
        time.sleep(args.pause)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3_moe")
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    for name, default in (
        ("steps", 20),
        ("batch", 8),
        ("save_every", 5),
        ("ep", 0),
        ("tp", 0),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument(
        "--profile", help="of the machine, a JSON file; else it is measured once"
    )
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after a step")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    dist.init_process_group()
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
