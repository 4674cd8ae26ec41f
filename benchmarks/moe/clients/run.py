"""Time transformers' experts modules with F.moe_mlp and with transformers' own code.

One row per family, pass and number of tokens, all implementations in this process on the same
weights, called in turns, after their outputs were compared::

    python3 tools/stage.py python benchmarks/moe/clients/run.py --out FILE.json

A ratio above 1 means that F.moe_mlp is faster than that peer. Times are processor time of the process
on one thread, which other jobs of the machine move least.
"""

import pathlib
import sys
import time

import torch


sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

try:
    from transformers_experts import experts_of
except ImportError as error:
    sys.exit(f"run.py: {error}")
from families import build, FAMILIES
from peers import MAX_COPIED_BYTES
from report import make_parser, show

from measure import (
    affordable_rounds,
    interleaved_seconds,
    provenance,
    ratio_record,
    spread,
    timed,
    write_json,
)


PEERS = ("eager", "grouped_mm", "batched_mm")
# Of the largest output; a wrong expert or gate is off by all of it.
TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-4}


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
    k, E = model.config.num_experts_per_tok, experts.num_experts
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, model.config.hidden_size, generator=generator).to(dtype)
    weights, index = torch.randn(tokens, E, generator=generator).softmax(-1).topk(k)
    weights = (weights / weights.sum(-1, keepdim=True)).to(dtype)
    matrices = (experts.gate_up_proj, experts.down_proj)
    copies = tokens * k * sum(m[0].nbytes for m in matrices)
    names, left_out = ["moe_mlp", *PEERS], {}
    if copies > MAX_COPIED_BYTES:
        names.remove("batched_mm")
        left_out["batched_mm"] = f"would copy {copies / 2**30:.1f} GiB of weights"
    F = max(experts.down_proj.shape[1:]) + min(experts.down_proj.shape[1:]) - x.shape[1]
    shape = {"T": tokens, "D": x.shape[1], "F": F, "E": E, "K": k}
    rows = []
    for backward in (False, True):
        functions = functions_of(experts, names, (x, index, weights), backward)
        if not backward:
            check_outputs(functions)
        count = affordable_rounds(rounds, sum(map(timed, functions.values())), seconds)
        times = interleaved_seconds(
            functions, rounds=count, warmup=0, clock=time.process_time
        )
        ours = times["moe_mlp"]
        capped = f"{count} of {rounds} rounds, for a row may take {seconds:g} s"
        rows.append(
            {
                "family": family,
                "pass": "forward+backward" if backward else "forward",
                **shape,
                "dtype": str(dtype).removeprefix("torch."),
                "rounds": count,
                "capped": capped if count < rounds else None,
                "milliseconds": {
                    n: spread([1e3 * v for v in s]) for n, s in times.items()
                },
                "ratio": {p: ratio_record(times[p], ours) for p in names[1:]},
                "left_out": left_out,
            }
        )
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[512])
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--rounds", type=int, default=10)
    add("--seconds", type=float, default=8.0, help="cap for the timed calls of a row")
    add("--family", choices=list(FAMILIES), nargs="+", default=FAMILIES)
    add("--out", type=pathlib.Path, help="also write the rows as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype, rows = getattr(torch, args.dtype), []
    for family in args.family:
        for tokens in args.tokens:
            rows += rows_of(family, tokens, dtype, args.rounds, args.seconds)
    columns = ("family", "pass", "T", "rounds", "milliseconds.moe_mlp")
    columns += tuple(f"ratio.{peer}" for peer in PEERS)
    show("Experts modules of transformers: ms, and peer / ours", rows, columns)
    if args.out:
        write_json({**provenance(), "rows": rows}, args.out)


if __name__ == "__main__":
    main()
