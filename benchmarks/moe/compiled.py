"""What torch.compile makes of MoE layers on the CPU: three tables, in one JSON.

rewrites    blocks as people write them (peers.py), compiled as they are, rewritten by
            ``torch._inductor.config.moe_fusion``, and ``F.moe_mlp`` compiled on their operands
layouts     ``F.moe_mlp`` on expert weights as nn.Linear stores them, and on the transposed storage
            of gpt-oss, eager and frozen, where Inductor stores them anew
compiles    how many graphs and kernels a layer makes over changing numbers of tokens, and seconds
            of all threads to compile; the experts of transformers if it is installed

One thread, its own processor time, forms in turns, ratios of one round: others may use the machine.

    python benchmarks/moe/compiled.py --out FILE.json
"""

import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import peers
from report import make_parser
from shapes import make_operands, Operands, Shape

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config, metrics

from measure import interleaved_seconds, provenance, ratio_record, spread, write_json


FORMS = ("sorted_grouped_mm", "three_grouped_mm", "batched_mm")
TOKENS = (1, 8, 64, 512)
# The block of gathered weights copies K matrices per token.
MAX_BATCHED_TOKENS = 8


def _shape(num_tokens: int, quick: bool) -> Shape:
    sizes = (64, 32, 8, 2) if quick else (1024, 512, 32, 4)
    return Shape(f"T{num_tokens}", num_tokens, *sizes)


def _step(function: Callable[..., Tensor], args: tuple, grad: Tensor, backward: bool):
    """A call, and its gradients if ``backward``."""
    if not backward:

        def forward() -> object:
            with torch.no_grad():
                return function(*args)

        return forward
    leaves = [x for x in args if x.is_floating_point()]

    def train() -> object:
        return torch.autograd.grad(function(*args), leaves, grad)

    return train


def _compiled(function: Callable[..., Tensor], fusion: bool) -> Callable[..., Tensor]:
    return torch.compile(
        function, fullgraph=True, dynamic=False, options={"moe_fusion": fusion}
    )


def _block(form: str, operands: Operands, backward: bool) -> tuple:
    """The arguments of a form, and ``F.moe_mlp`` on them."""
    w_in, w_out = operands.w_in, operands.w_out
    weights: tuple[Tensor, ...] = (w_in, w_out)
    direct = F.moe_mlp
    if form == "three_grouped_mm":
        gate, up = (w.contiguous() for w in w_in.chunk(2, dim=1))
        weights = (gate, up, w_out)

        def direct(x, ids, scores, gate, up, w_out):
            return F.moe_mlp(x, ids, scores, gate, w_out, w_up=up)

    args = (operands.x, operands.ids, operands.weights, *weights)
    return tuple(
        x.detach().requires_grad_(backward and x.is_floating_point()) for x in args
    ), direct


def _timed(steps: dict[str, Callable], rounds: int) -> tuple[dict, dict]:
    """Seconds of every round by name, and their spread in milliseconds."""
    seconds = interleaved_seconds(
        steps, rounds=rounds, warmup=2, clock=time.thread_time
    )
    return seconds, {n: spread([1e3 * s for s in v]) for n, v in seconds.items()}


def measure_rewrite(form: str, shape: Shape, backward: bool, rounds: int) -> dict:
    """One row: a form as written, rewritten and called directly."""
    torch._dynamo.reset()
    operands = make_operands(shape)
    args, direct = _block(form, operands, backward)
    written = getattr(peers, form)
    functions = {
        "written": _compiled(written, False),
        "rewritten": _compiled(written, True),
        "direct": _compiled(direct, False),
    }
    steps = {
        name: _step(f, args, operands.grad, backward) for name, f in functions.items()
    }
    counters.clear()
    for step in steps.values():
        step()
    seconds, milliseconds = _timed(steps, rounds)
    return {
        "form": form,
        "pass": "forward+backward" if backward else "forward",
        **shape.sizes(),
        "blocks": counters["inductor"]["moe_fusion"],
        "whole_blocks": counters["inductor"]["moe_fusion_full"],
        "milliseconds": milliseconds,
        **{
            f"{name}_over_rewritten": ratio_record(seconds[name], seconds["rewritten"])
            for name in ("written", "direct")
        },
    }


class _Layer(torch.nn.Module):
    """``F.moe_mlp`` on parameters, which freezing makes constants."""

    def __init__(self, w_in: Tensor, w_out: Tensor, transposed: bool):
        super().__init__()
        self.transposed = transposed
        weights = (w.mT if transposed else w for w in (w_in, w_out))
        self.w_in, self.w_out = (
            torch.nn.Parameter(w.clone(memory_format=torch.contiguous_format))
            for w in weights
        )

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        w_in, w_out = self.w_in, self.w_out
        if self.transposed:
            w_in, w_out = w_in.mT, w_out.mT
        return F.moe_mlp(x, ids, weights, w_in, w_out)


def measure_layout(shape: Shape, rounds: int) -> dict:
    """One row: K-major and N-major storage of the same weights, eager, and with freezing."""
    torch._dynamo.reset()
    o = make_operands(shape)
    args = (o.x, o.ids, o.weights)
    steps = {}
    counters.clear()
    for name, transposed in (("k_major", False), ("n_major", True)):
        steps[name] = _step(_Layer(o.w_in, o.w_out, transposed), args, o.grad, False)
        with config.patch(freezing=True):
            frozen = torch.compile(_Layer(o.w_in, o.w_out, transposed), dynamic=False)
            steps[f"frozen_{name}"] = _step(frozen, args, o.grad, False)
            steps[f"frozen_{name}"]()
    seconds, milliseconds = _timed(steps, rounds)
    return {
        **shape.sizes(),
        "relaid_weights": counters["inductor"]["moe_weight_relayout"],
        "milliseconds": milliseconds,
        **{
            f"{kind}n_major_over_k_major": ratio_record(
                seconds[f"{kind}n_major"], seconds[f"{kind}k_major"]
            )
            for kind in ("", "frozen_")
        },
    }


def _experts_of_transformers(implementation: str) -> Callable[..., Tensor] | None:
    """The experts of a tiny Qwen3-MoE, if transformers is installed (clients/)."""
    folder = pathlib.Path(__file__).resolve().parent / "clients"
    sys.path.append(str(folder))
    try:
        from families import build
        from transformers_experts import experts_of
    except ImportError:
        return None
    model = build("qwen3_moe")
    model.set_experts_implementation(implementation)
    return experts_of(model)[0]


def _layers_to_compile(quick: bool) -> dict[str, tuple[Any, Callable[..., tuple]]]:
    """What is compiled, by name, and a function that makes its arguments for T tokens."""

    def of_block(name: str) -> Callable[..., tuple]:
        def args(num_tokens: int, backward: bool) -> tuple:
            operands = make_operands(_shape(num_tokens, quick))
            return _block(name, operands, backward)[0]

        return args

    found = {
        "moe_mlp": (F.moe_mlp, of_block("moe_mlp")),
        "sorted_grouped_mm": (peers.sorted_grouped_mm, of_block("sorted_grouped_mm")),
    }
    shape = _shape(1, quick)
    layer = torch.nn.MoE(shape.D, shape.F, num_experts=shape.E, top_k=shape.K)
    found["nn.MoE"] = (
        layer,
        lambda num_tokens, backward: (
            torch.randn(num_tokens, shape.D, requires_grad=backward),
        ),
    )
    for name in ("moe_mlp", "grouped_mm"):
        experts = _experts_of_transformers(name)
        if experts is None:
            continue
        dim = next(experts.parameters()).shape[-1]

        def args(num_tokens: int, backward: bool, E=experts.num_experts, dim=dim):
            weights, ids = torch.rand(num_tokens, E).topk(2)
            x = torch.randn(num_tokens, dim, requires_grad=backward)
            return x, ids, weights

        found[f"transformers, {name}"] = (experts, args)
    return found


def measure_compiles(
    name: str, layer: Any, make_args: Callable[..., tuple], backward: bool
) -> dict:
    """Graphs, kernels and seconds of a layer over four numbers of tokens."""
    torch._dynamo.reset()
    counters.clear()
    metrics.reset()
    compiled = torch.compile(layer)
    graphs, seconds = [], []
    for num_tokens in (16, 24, 40, 96):
        args = make_args(num_tokens, backward)
        start = time.process_time()
        with torch.set_grad_enabled(backward):
            output = compiled(*args)
            if backward:
                output.sum().backward()
        seconds.append(time.process_time() - start)
        graphs.append(counters["stats"]["unique_graphs"])
    return {
        "form": name,
        "pass": "forward+backward" if backward else "forward",
        "graphs": graphs[-1],
        "graph_breaks": sum(counters["graph_break"].values()),
        "kernels": metrics.generated_kernel_count,
        "extern_calls": counters["inductor"]["extern_calls"],
        "compile_seconds": sum(seconds[:2]) - sum(seconds[2:]),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, few rounds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--tables", nargs="*", default=["rewrites", "layouts", "compiles"]
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    # Both compiled forms would be found there.
    config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    tokens = (8,) if args.quick else TOKENS
    rounds = 3 if args.quick else args.rounds
    record = provenance() | {"load": os.getloadavg()[0], "clock": "thread_time"}

    def add(table: str, row: dict) -> None:
        record.setdefault(table, []).append(row)
        write_json(record, args.out)
        print(table, *list(row.values())[:7], file=sys.stderr, flush=True)

    if "layouts" in args.tables:
        for num_tokens in tokens:
            shape = _shape(num_tokens, args.quick)
            add("layouts", measure_layout(shape, rounds * max(1, 64 // num_tokens)))
    if "rewrites" in args.tables:
        for form in FORMS:
            for num_tokens in tokens[1:] or tokens:
                if form == "batched_mm" and num_tokens > MAX_BATCHED_TOKENS:
                    continue
                for backward in (False, True):
                    shape = _shape(num_tokens, args.quick)
                    # A forward is short: the noise of one is above what is compared.
                    more = rounds if backward else rounds * max(4, 64 // num_tokens)
                    add("rewrites", measure_rewrite(form, shape, backward, more))
    if "compiles" in args.tables:
        torch.compile(lambda x: x + 1)(torch.ones(1))  # what the first one imports
        for name, (layer, make_args) in _layers_to_compile(args.quick).items():
            for backward in (False, True):
                add("compiles", measure_compiles(name, layer, make_args, backward))


if __name__ == "__main__":
    main()
