"""The owners of the bytes of a training step, beside the measured peak.

    python benchmarks/moe/step_memory.py [--models qwen3_moe ...] [--batch 2] [--seq 256] --out FILE.json

Small transformers models with random weights on one CPU rank, with grouped_mm experts of
transformers and with F.moe_mlp. ``explain_memory`` runs nothing; the peak is of the second step.
"""

import contextlib
import itertools
import pathlib
import sys


sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent / "clients")]

import report
from packages import require_transformers
from train_anywhere import build, MODELS

import torch
from torch.distributed._tools.moe_step_memory import explain_memory
from torch.distributed._tools.moe_trace import checkpointed, layers_with

import measure


def measured_peak(model, ids: torch.Tensor, recompute: str) -> int:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    experts = [n for n, m in model.named_modules() if hasattr(m, "down_proj")]

    def step() -> None:
        with contextlib.ExitStack() as stack:
            if recompute == "full":
                stack.enter_context(checkpointed(model, layers_with(model, experts)))
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = (t for values in optimizer.state.values() for t in values.values())
    tensors = itertools.chain(model.parameters(), model.buffers(), state)
    return sum(t.nbytes for t in tensors) + measure.peak_bytes(step)


def main() -> None:
    args = report.parse(__doc__, models=MODELS, batch=2, seq=256)
    require_transformers()
    import transformers_experts  # noqa: F401  registers moe_mlp

    torch.set_num_threads(1)
    ids = torch.randint(2048, (args.batch, args.seq))
    rows = []
    for name, experts, recompute in itertools.product(
        args.models, ("grouped_mm", "moe_mlp"), ("none", "full")
    ):
        model = build(name)
        model.set_experts_implementation(experts)
        kw = {"batch": args.batch, "seq": args.seq, "recompute": recompute}
        found = explain_memory(model, **kw)
        peak = measured_peak(model, ids, recompute)
        kinds: dict[str, int] = {}
        for (_, kind), n in found.peak.items():
            kinds[kind] = kinds.get(kind, 0) + n
        row = {"model": name, "experts": experts, "recompute": recompute}
        row |= {"explained_bytes": found.total, "peak_bytes": peak}
        row |= {"error": found.total / peak - 1, "where": list(found.where)}
        rows.append(row | {"kinds": kinds})
    settings = {"batch": args.batch, "seq": args.seq}
    measure.save(args.out, **settings, rows=rows)
    columns = [name for name in rows[0] if name not in ("where", "kinds")]
    report.show("Peak bytes of a step", rows, columns)


if __name__ == "__main__":
    main()
