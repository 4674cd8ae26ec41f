"""Tokens a second of a whole Qwen3-MoE on CPU: transformers with F.moe_mlp, its own experts, and vLLM.

    python3 tools/stage.py python benchmarks/moe/clients/whole_model.py --out FILE.json
        [--threads 1 2] [--layers 2] [--cases NAME ...] [--rounds 9] [--seconds 60]

Layers of Qwen3-30B-A3B with random weights, in bfloat16; vLLM runs where ``engines.py --install``
made its environment. Each form generates the same number of tokens greedily: one for a prompt
(prefill), and then so many more for short ones (decode: the time of all less that of one). Forms take
turns, in processes with weights in huge pages. ``experts`` is the share of the time that experts have
in ours, so that 1 / (1 - experts) is what a layer of no time would gain; ``same_tokens`` is the share of
tokens that are those of transformers' eager code, which another rounding may change, and all that follow
with them; eager is not timed. Rows of an earlier run in ``--out`` stay unless they are measured again.
"""

import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import NamedTuple

import torch


sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from engines import Engine, EngineError, PAUSE, python_of
from report import parse, progress, show

import measure


OURS, REFERENCE = "moe_mlp", "eager"
SIZES = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 16384, "max_position_embeddings": 1024,
}  # fmt: skip


class Case(NamedTuple):
    """A task: ``more`` tokens after the first, for a number of prompts of one length."""

    name: str
    prompts: int
    length: int
    more: int


CASES = (
    Case("prefill 1 x 512", 1, 512, 0),
    Case("prefill 8 x 128", 8, 128, 0),
    Case("decode 1", 1, 16, 16),
    Case("decode 8", 8, 16, 16),
)
# Share of first tokens that must equal the reference's. Later tokens may follow different ones.
ALLOWED = 0.5


def generate(engine: Engine, form: str, case: Case, seed: int) -> dict:
    """Seconds of a case, tokens, and the seconds that experts had."""
    g = torch.Generator().manual_seed(seed)
    size = (case.prompts, case.length)
    prompts = torch.randint(SIZES["vocab_size"], size, generator=g).tolist()
    made = engine("generate", form, prompts, 1 + case.more)
    if case.more:
        first = engine("generate", form, prompts, 1)
        for key in ("seconds", "experts"):
            if key in made:
                made[key] -= first[key]
    return made


def rows_of(case: Case, forms: dict, rounds: int, seconds: float) -> list[dict]:
    """Rows of the JSON of a case: forms in turns, one row for each number of threads."""
    start, tokens, left_out = time.perf_counter(), {}, {}
    for key, engine in forms.items():
        try:
            tokens[key] = generate(engine, key[1], case, 0)["tokens"]
        except EngineError as error:
            if key[1] in (OURS, REFERENCE):
                raise
            left_out[key[1]] = str(error)
    took = time.perf_counter() - start
    made: dict[tuple, list[dict]] = {k: [] for k in tokens if k[1] != REFERENCE}
    for i in range(measure.affordable_rounds(rounds, took, seconds)):
        order = list(made)
        for key in order[i % len(order) :] + order[: i % len(order)]:
            time.sleep(PAUSE)
            made[key].append(generate(forms[key], key[1], case, i))
    count = case.prompts * (case.more or case.length)
    rows = []
    for threads in sorted({key[0] for key in made}):
        here = {
            k[1]: [m["seconds"] for m in v] for k, v in made.items() if k[0] == threads
        }
        ours, expected = made[threads, OURS], torch.tensor(tokens[threads, REFERENCE])
        share = [m["experts"] / m["seconds"] for m in ours]
        record: dict = {}
        for form, times in here.items():
            same = torch.tensor(tokens[threads, form]) == expected
            if same[:, 0].double().mean() < ALLOWED:
                raise EngineError(f"{form} generates something else for {case}")
            record[form] = {
                "tokens_per_s": count / statistics.median(times),
                "over_ours": measure.ratio_record(times, here[OURS]),
                "same_tokens": same.double().mean().item(),
            }
        peer = max(set(here) - {OURS}, key=lambda f: record[f]["tokens_per_s"])
        rows.append({
            "id": f"{case.name}/{threads}", "threads": threads, "rounds": len(ours),
            "tokens_per_s": record[OURS]["tokens_per_s"],
            "experts": statistics.median(share), "forms": record, "left_out": left_out,
            "best_peer": peer, "ratio": record[peer]["over_ours"],
        })  # fmt: skip
    return rows


def main() -> int:
    options = {"threads": [1, 2], "layers": 2, "rounds": 9, "seconds": 60.0}
    args = parse(__doc__, cases=dict.fromkeys(c.name for c in CASES), **options)
    cases = [case for case in CASES if case.name in args.cases]
    measured: dict[str, dict] = {}
    if args.out and args.out.is_file():
        measured = {row["id"]: row for row in json.loads(args.out.read_text())["rows"]}
    script = pathlib.Path(__file__).resolve().with_name("model_worker.py")
    names = ["transformers", *(["vllm"] if python_of("vllm").exists() else [])]
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            (n, name): Engine(name, n, "huge", script)
            for n in args.threads
            for name in names
        }
        sizes = SIZES | {"num_hidden_layers": args.layers}
        engines[args.threads[0], "transformers"]("draw", folder, sizes)
        forms = {
            (n, form): engine
            for (n, _), engine in engines.items()
            for form in engine("load", folder)
        }
        with progress("Cases", len(cases)) as advance:
            for case in cases:
                for row in rows_of(case, forms, args.rounds, args.seconds):
                    measured[row["id"]] = row
                measure.save(args.out, sizes=sizes, rows=[*measured.values()])
                advance(case.name)
        for engine in engines.values():
            engine.close()
    columns = {"case/threads": "id", "tokens/s": "tokens_per_s", "experts": "experts"}
    columns |= {"best peer": "best_peer", "peer / ours, time": "ratio"}
    show("A whole model", [*measured.values()], columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
