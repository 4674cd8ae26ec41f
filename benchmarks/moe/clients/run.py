"""Time transformers' experts modules with F.moe_mlp and with transformers' own code.

One row per family, forward and forward with backward, all implementations in this
process on the same weights, called in turns, after their outputs were compared::

    python3 tools/stage.py python benchmarks/moe/clients/run.py --out FILE.json

A ratio above 1 means that F.moe_mlp is faster than that peer.
"""

import argparse
import json
import pathlib
import sys
import time

import torch


sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import transformers_experts
from families import build, experts_of, FAMILIES
from layouts import from_transformers

from measure import interleaved_seconds, paired_ratio, provenance, spread


PEERS = ("eager", "grouped_mm", "batched_mm")
# batched_mm copies one expert per slot; above this it is left out, and said so.
MAX_COPIED_BYTES = 2 << 30
MIN_ROUNDS = 3
# Of the largest output; a wrong expert or gate is off by all of it.
TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-4}


def copied_bytes(experts: torch.nn.Module, slots: int) -> int:
    """Bytes of the weights that batched_mm gathers."""
    matrices = (experts.gate_up_proj, experts.down_proj)
    return slots * sum(m[0].numel() * m.element_size() for m in matrices)


def functions_of(
    experts: torch.nn.Module, names: list[str], routing: tuple, backward: bool
) -> dict:
    """One function per implementation; each runs the module once."""
    x, index, weights = routing
    grad = torch.ones_like(x)

    def function(name):
        def run():
            experts.config._experts_implementation = name
            if not backward:
                with torch.no_grad():
                    return experts(x, index, weights)
            experts.zero_grad(set_to_none=True)
            leaf, s = x.detach().requires_grad_(), weights.detach().requires_grad_()
            experts(leaf, index, s).backward(grad)

        return run

    return {name: function(name) for name in names}


def check_outputs(functions: dict) -> None:
    """Raises AssertionError where an implementation differs from eager."""
    expected = functions["eager"]()
    bound = TOLERANCE[expected.dtype] * expected.abs().max().item()
    for name, function in functions.items():
        error = (function() - expected).abs().max().item()
        if not error <= bound:
            raise AssertionError(
                f"{name} differs from eager by {error}, {bound} allowed"
            )


def affordable_rounds(functions: dict, rounds: int, seconds: float) -> int:
    """Rounds that fit into ``seconds``, from one call of each, which also warms up."""
    start = time.perf_counter()
    for function in functions.values():
        function()
    return min(rounds, max(MIN_ROUNDS, int(seconds / (time.perf_counter() - start))))


def rows_of(
    family: str, tokens: int, dtype: torch.dtype, rounds: int, seconds: float
) -> list[dict]:
    """The two rows of a family.

    Args:
        family: a key of FAMILIES.
        tokens: T.
        dtype: of the experts.
        rounds: timed calls per implementation, at most.
        seconds: cap for all timed calls of a row.
    """
    model = build(family, timed=True, dtype=dtype)
    experts = experts_of(model)[0]
    k = model.config.num_experts_per_tok
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, model.config.hidden_size, generator=generator).to(dtype)
    scores = torch.randn(tokens, experts.num_experts, generator=generator).softmax(-1)
    weights, index = scores.topk(k)
    weights = (weights / weights.sum(-1, keepdim=True)).to(dtype)
    copies = copied_bytes(experts, tokens * k)
    names = ["moe_mlp", *PEERS]
    left_out = {}
    if copies > MAX_COPIED_BYTES:
        names.remove("batched_mm")
        left_out["batched_mm"] = f"would copy {copies / 2**30:.1f} GiB of weights"
    shape = {
        "T": tokens,
        "D": x.shape[1],
        "F": from_transformers(experts).w_out.shape[2],
        "E": experts.num_experts,
        "K": k,
    }
    rows = []
    for backward in (False, True):
        functions = functions_of(experts, names, (x, index, weights), backward)
        if not backward:
            check_outputs(functions)
        count = affordable_rounds(functions, rounds, seconds)
        times = interleaved_seconds(functions, rounds=count, warmup=0)
        peers = [name for name in names if name != "moe_mlp"]
        rows.append(
            {
                "family": family,
                "pass": "forward+backward" if backward else "forward",
                **shape,
                "dtype": str(dtype).removeprefix("torch."),
                "rounds": count,
                "capped": f"{count} of {rounds} rounds, for a row may take {seconds:g} s"
                if count < rounds
                else None,
                "milliseconds": {
                    n: [1e3 * v for v in spread(s)] for n, s in times.items()
                },
                "ratio": {
                    p: list(paired_ratio(times[p], times["moe_mlp"])) for p in peers
                },
                "left_out": left_out,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="cap for the timed calls of a row"
    )
    parser.add_argument("--family", choices=list(FAMILIES), nargs="+", default=FAMILIES)
    parser.add_argument("--out", type=pathlib.Path, help="also write the rows as JSON")
    args = parser.parse_args()
    try:
        transformers_experts.require_transformers()
    except RuntimeError as error:
        sys.exit(f"run.py: {error}")
    transformers_experts.register()
    dtype = getattr(torch, args.dtype)
    rows = []
    for family in args.family:
        for row in rows_of(family, args.tokens, dtype, args.rounds, args.seconds):
            rows.append(row)
            shape = ", ".join(f"{n}={row[n]}" for n in "TDFEK")
            ratios = "  ".join(
                f"{p} {r[0]:.2f}x [{r[1]:.2f}, {r[2]:.2f}]"
                for p, r in row["ratio"].items()
            )
            milliseconds = row["milliseconds"]["moe_mlp"][0]
            print(
                f"{family:12} {row['pass']:17} {shape:36} {milliseconds:8.2f} ms  {ratios}"
            )
    if args.out:
        args.out.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
