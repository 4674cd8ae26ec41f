"""What torch.compile makes of MoE layers on the CPU: three tables, in one JSON.

rewrites    blocks as people write them (peers.py), compiled unchanged, rewritten by
            ``torch._inductor.config.moe_fusion``, and ``F.moe_mlp`` compiled on their operands, in
            bfloat16 and in float32. A float32 block is not rewritten if the op is slower
layouts     ``F.moe_mlp`` on expert weights as nn.Linear stores them, and on the transposed storage
            of gpt-oss, eager and frozen, where Inductor changes the storage
compiles    graphs and kernels of a layer over changing numbers of tokens, and seconds
            of all threads to compile; the experts of transformers if it is installed (clients/)

Others may use the machine: one thread is timed by its processor time, forms take turns, and
ratios are of one round.

    python benchmarks/moe/compiled.py --out FILE.json
"""

import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import peers
from report import parse
from shapes import make_operands, Operands, PASSES, Shape

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config, metrics

from measure import interleaved_seconds, ratio_record, save, spread


FORMS = ("sorted_grouped_mm", "three_grouped_mm", "batched_mm")
TOKENS = (1, 8, 64, 512)
# The block of gathered weights copies K matrices per token.
MAX_BATCHED_TOKENS = 8


def _shape(num_tokens: int, quick: bool) -> Shape:
    sizes = (64, 32, 8, 2) if quick else (1024, 512, 32, 4)
    return Shape(f"T{num_tokens}", num_tokens, *sizes)


def _compiled(function: Callable[..., Tensor], fusion: bool) -> Callable[..., Tensor]:
    options = {"moe_fusion": fusion}
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def _arguments(form: str, o: Operands, backward: bool) -> tuple[Tensor, ...]:
    weights: tuple[Tensor, ...] = (o.w_in, o.w_out)
    if form == "three_grouped_mm":
        weights = (*(w.contiguous() for w in o.w_in.chunk(2, dim=1)), o.w_out)
    args = tuple(x.detach() for x in (o.x, o.ids, o.weights, *weights))
    return tuple(x.requires_grad_(backward and x.is_floating_point()) for x in args)


def _direct(x: Tensor, ids: Tensor, scores: Tensor, *weights: Tensor) -> Tensor:
    """``F.moe_mlp`` on the arguments of any form."""
    w_in, *up, w_out = weights
    return F.moe_mlp(x, ids, scores, w_in, w_out, w_up=up[0] if up else None)


def _times(steps: dict[str, Callable], rounds: int, ratios: dict) -> dict:
    """Spreads in milliseconds by name; ``ratios``: name -> (numerator, denominator) among the steps."""
    options = {"warmup": 2, "clock": time.thread_time}
    seconds = interleaved_seconds(steps, rounds=rounds, **options)
    of_pairs = {n: ratio_record(seconds[a], seconds[b]) for n, (a, b) in ratios.items()}
    milliseconds = {n: spread([1e3 * s for s in v]) for n, v in seconds.items()}
    return {"milliseconds": milliseconds, **of_pairs}


def measure_rewrite(
    form: str, shape: Shape, backward: bool, rounds: int, dtype: torch.dtype
) -> dict:
    """One row: a form as written, rewritten and called directly."""
    torch._dynamo.reset()
    operands, written = make_operands(shape, dtype=dtype), getattr(peers, form)
    args = _arguments(form, operands, backward)
    functions = {"written": _compiled(written, False)}
    functions["rewritten"] = _compiled(written, True)
    functions["direct"] = _compiled(_direct, False)
    grad = operands.grad if backward else None
    steps = {name: peers.bind(f, args, grad) for name, f in functions.items()}
    counters.clear()
    for step in steps.values():
        step()
    ratios = {f"{n}_over_rewritten": (n, "rewritten") for n in ("written", "direct")}
    return {
        "form": form,
        "pass": PASSES[backward],
        "dtype": str(dtype).removeprefix("torch."),
        **shape.sizes(),
        "blocks": counters["inductor"]["moe_fusion"],
        "whole_blocks": counters["inductor"]["moe_fusion_full"],
        **_times(steps, rounds, ratios),
    }


class _Layer(torch.nn.Module):
    """``F.moe_mlp`` on parameters, which freezing makes constants."""

    def __init__(self, o: Operands, transposed: bool):
        super().__init__()
        self.transposed = transposed
        weights = (w.mT if transposed else w for w in (o.w_in, o.w_out))
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
    args, steps = (o.x, o.ids, o.weights), {}
    counters.clear()
    for name, transposed in (("k_major", False), ("n_major", True)):
        steps[name] = peers.bind(_Layer(o, transposed), args)
        with config.patch(freezing=True):
            frozen = torch.compile(_Layer(o, transposed), dynamic=False)
            steps[f"frozen_{name}"] = peers.bind(frozen, args)
            steps[f"frozen_{name}"]()
    relaid = counters["inductor"]["moe_weight_relayout"]
    ratios = {
        f"{kind}n_major_over_k_major": (f"{kind}n_major", f"{kind}k_major")
        for kind in ("", "frozen_")
    }
    times = _times(steps, rounds, ratios)
    return {**shape.sizes(), "relaid_weights": relaid, **times}


def _layers_to_compile(quick: bool) -> dict[str, tuple[Any, Callable[..., tuple]]]:
    """Compiled layers by name, with a function that makes their arguments for T tokens."""

    def of_block(num_tokens: int, backward: bool) -> tuple:
        return _arguments("", make_operands(_shape(num_tokens, quick)), backward)

    shape = _shape(1, quick)
    layer = torch.nn.MoE(shape.D, shape.F, num_experts=shape.E, top_k=shape.K)
    found = {
        "moe_mlp": (F.moe_mlp, of_block),
        "sorted_grouped_mm": (peers.sorted_grouped_mm, of_block),
        "nn.MoE": (layer, lambda T, b: (torch.randn(T, shape.D, requires_grad=b),)),
    }
    peers.transformers_version()  # puts clients/ on the path
    try:
        from families import build
        from transformers_experts import experts_of
    except ImportError:
        return found
    for name in ("moe_mlp", "grouped_mm"):
        model = build("qwen3_moe")
        model.set_experts_implementation(name)
        experts = experts_of(model)[0]
        dim = next(experts.parameters()).shape[-1]

        def args(num_tokens: int, backward: bool, E=experts.num_experts, dim=dim):
            weights, ids = torch.rand(num_tokens, E).topk(2)
            x = torch.randn(num_tokens, dim, requires_grad=backward)
            return x, ids, weights

        found[f"transformers, {name}"] = (experts, args)
    return found


def measure_compiles(name: str, layer: Any, make_args: Callable, backward: bool):
    """Graphs, kernels and seconds of a layer over four numbers of tokens."""
    torch._dynamo.reset()
    counters.clear()
    metrics.reset()
    compiled = torch.compile(layer)
    seconds = []
    for num_tokens in (16, 24, 40, 96):
        args = make_args(num_tokens, backward)
        start = time.process_time()
        with torch.set_grad_enabled(backward):
            output = compiled(*args)
            if backward:
                output.sum().backward()
        seconds.append(time.process_time() - start)
    return {
        "form": name,
        "pass": PASSES[backward],
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "kernels": metrics.generated_kernel_count,
        "extern_calls": counters["inductor"]["extern_calls"],
        "compile_seconds": sum(seconds[:2]) - sum(seconds[2:]),
    }


def main() -> None:
    tables = dict.fromkeys(("rewrites", "layouts", "compiles"))
    args = parse(__doc__, quick=False, rounds=15, tables=tables)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    # The cache would have both compiled forms.
    config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    tokens = (8,) if args.quick else TOKENS
    rounds = 3 if args.quick else args.rounds
    record = {"load": os.getloadavg()[0], "clock": "thread_time"}

    def add(table: str, row: dict) -> None:
        record.setdefault(table, []).append(row)
        save(args.out, **record)
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
                kinds = itertools.product(
                    (False, True), (torch.bfloat16, torch.float32)
                )
                for backward, dtype in kinds:
                    shape = _shape(num_tokens, args.quick)
                    # One forward is too short: its noise exceeds the differences.
                    more = rounds if backward else rounds * max(4, 64 // num_tokens)
                    row = measure_rewrite(form, shape, backward, more, dtype)
                    add("rewrites", row)
    if "compiles" in args.tables:
        torch.compile(lambda x: x + 1)(torch.ones(1))  # what the first one imports
        for name, (layer, make_args) in _layers_to_compile(args.quick).items():
            for backward in (False, True):
                add("compiles", measure_compiles(name, layer, make_args, backward))


if __name__ == "__main__":
    main()
