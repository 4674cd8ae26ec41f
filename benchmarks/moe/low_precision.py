"""Train the demo's language model with experts in FP8, and measure what quantisation costs.

::

    python benchmarks/moe/low_precision.py --out benchmarks/moe/results/low_precision.json

For every seed, models with the same initial weights and batches are trained in turns: the fused layer
in bfloat16, F.scaled_moe_mlp with pre-activations kept in float8 and in int8, and "dual", which keeps 16 bits and
quantises every operand of a product from them, along the dimension that the product sums.

Then the operands of every layer of the trained bfloat16 model on another batch, and the gradients that
reach its outputs, are put through every recipe and compared with float64: signal to quantisation noise in dB.
"""

import argparse
import collections
import functools
import itertools
import pathlib
from collections.abc import Callable

from peers import MoEBlock
from report import make_parser, progress, show
from shapes import make_operands, Shape

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.moe_quantized_reference import sqnr

from demo import text
from demo.evidence import capture
from demo.model import ModelConfig
from demo.train import make_runs, train
from measure import provenance, saved_bytes, write_json


FORMATS = {
    "float8 H": {},
    "int8 H": {"preact_dtype": torch.int8},
    "16-bit H": {"preact_dtype": None},
    "recomputed H": {"recompute": True},
    "float8 H, hp_wgrad": {"hp_wgrad": True},
}
MXFP8 = F.ScalingType.BlockWise1x32.value
NAMES = ("y", "grad_input", "grad_topk_weights", "grad_w_in", "grad_w_out")


def mx_values(x: Tensor, dim: int) -> Tensor:
    """What ``x`` stands for in MXFP8 with blocks along ``dim``."""
    data, scale = torch.ops.aten._moe_quantize(x, MXFP8, dim=dim)
    scale = scale.float().repeat_interleave(32, dim).narrow(dim, 0, x.shape[dim])
    return (data.float() * scale).to(x.dtype)


class DualProduct(torch.autograd.Function):
    """x W^T in MXFP8: no operand is rounded twice, as x and W are kept in 16 bits."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return mx_values(x, 1) @ mx_values(w, 1).t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad_x = mx_values(grad, 1) @ mx_values(w, 0)
        return grad_x, mx_values(grad, 0).t() @ mx_values(x, 0)


def dual_moe_mlp(
    x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor
) -> Tensor:
    """F.moe_mlp of swiglu experts with :class:`DualProduct`, sums in float32."""
    tokens, y = x.float(), torch.zeros(x.shape)
    for e, (up, down) in enumerate(zip(w_in.unbind(), w_out.unbind(), strict=True)):
        rows, slots = (ids == e).nonzero(as_tuple=True)
        if len(rows) == 0:
            continue
        h = DualProduct.apply(tokens[rows].to(x.dtype), up).float()
        gate, linear = h.chunk(2, 1)
        out = DualProduct.apply((F.silu(gate) * linear).to(x.dtype), down)
        y = y.index_add(0, rows, out * weights[rows, slots, None].float())
    return y.to(x.dtype)


def scaled_moe_mlp(recipe: str, **options: object) -> Callable[..., Tensor]:
    return functools.partial(F.scaled_moe_mlp, recipe=recipe, **options)


def blocks(recipe: str) -> dict[str, MoEBlock]:
    layers = {"bf16": F.moe_mlp, "dual": dual_moe_mlp}
    for name in ("float8 H", "int8 H"):
        layers[name] = scaled_moe_mlp(recipe, **FORMATS[name])
    return {name: MoEBlock(F.moe_topk, experts) for name, experts in layers.items()}


def differences(losses: list[float], reference: list[float]) -> dict[str, float]:
    gaps = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    return {"largest": max(gaps), "mean": sum(gaps) / len(gaps)}


def over_dual(rows: list[dict]) -> list[dict[str, object]]:
    """Differences to bf16 over those of dual, both summed over the seeds."""
    total = collections.Counter()
    for row in rows:
        for kind, value in row["difference"].items():
            total[row["run"], kind] += value
    return [
        {"run": run, "difference": kind, "over_dual": value / total["dual", kind]}
        for (run, kind), value in total.items()
        if run not in ("bf16", "dual")
    ]


def train_seed(config: ModelConfig, arguments: argparse.Namespace, seed: int, corpus):
    """Losses of all models of one seed, and the trained ones."""
    steps, batch = arguments.steps, arguments.batch
    batches = text.sample_batches(corpus.train, steps, batch, config.sequence, seed)
    held_out = text.sample_batches(corpus.held_out, 8, batch, config.sequence, seed + 1)
    runs = make_runs(blocks(arguments.recipe), config, seed)
    with progress(f"seed {seed}", steps) as advance:
        train(runs, batches, lambda step: advance(f"{runs[0].losses[-1]:.3f}"))
    reference = runs[0].losses
    rows = [
        {
            "seed": seed,
            "run": run.name,
            "held_out": run.evaluate(held_out),
            "last_loss": run.losses[-1],
            "difference": differences(run.losses, reference),
        }
        for run in runs
    ]
    # Text that no model saw, of twice the batch.
    window = text.sample_batches(
        corpus.train, 1, 2 * batch, config.sequence, seed + 1000
    )[0]
    return rows, {run.name: run.losses for run in runs}, runs[0].model, window


def results_of(function, operands, dtype=None):
    """y and the gradients of the captured layer, see NAMES."""
    o = operands
    leaves = [
        t.detach().to(dtype or t.dtype).requires_grad_()
        for t in (o.x, o.weights, o.w_in, o.w_out)
    ]
    x, weights, w_in, w_out = leaves
    y = function(x, o.ids, weights, w_in, w_out)
    return [y.detach(), *torch.autograd.grad(y, leaves, o.grad.to(y.dtype))]


def noise(model, window):
    """SQNR of every recipe and format: the mean of the layers."""
    block = MoEBlock(F.moe_topk, F.moe_mlp)
    samples = [sample.routed(block) for sample in capture(model, window)]
    rows = []
    variants = [("bf16", "-", F.moe_mlp), ("mxfp8", "dual", dual_moe_mlp)] + [
        (recipe, name, scaled_moe_mlp(recipe, **options))
        for recipe, (name, options) in itertools.product(
            F._MOE_RECIPES, FORMATS.items()
        )
    ]
    exact = [results_of(F.moe_mlp, s, torch.float64) for s in samples]
    for recipe, name, function in variants:
        found = [
            [sqnr(a, b) for a, b in zip(one, results_of(function, s), strict=True)]
            for one, s in zip(exact, samples, strict=True)
        ]
        means = [sum(column) / len(column) for column in zip(*found, strict=True)]
        rows.append(
            {"recipe": recipe, "saved": name, **dict(zip(NAMES, means, strict=True))}
        )
    return rows


def saved(shape: Shape) -> list[dict[str, object]]:
    """Bytes that a layer saves, parameters aside."""
    operands = make_operands(shape, weights_dtype=torch.float32)
    rows = []
    for name, recipe in (("bf16", None), *((r, r) for r in F._MOE_RECIPES)):
        count = saved_bytes(
            lambda: F.moe_mlp(*operands.layer_args(), recipe=recipe), operands.stored()
        )
        rows.append({**shape.sizes(), "recipe": name, "bytes": count})
    for row in rows:
        row["of_bf16"] = row["bytes"] / rows[0]["bytes"]
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipe", default="mxfp8", help="of the trained models")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--out", type=pathlib.Path)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    config = ModelConfig(
        layers=arguments.layers,
        d_model=128,
        heads=4,
        experts=arguments.experts,
        top_k=4,
        expert_hidden=128,
        sequence=arguments.sequence,
    )
    corpus = text.read_corpus()
    rows, losses, noises = [], {}, []
    for seed in range(arguments.seeds):
        found, curves, model, window = train_seed(config, arguments, seed, corpus)
        rows += found
        losses[str(seed)] = curves
        noises += [{"seed": seed, **row} for row in noise(model, window)]
        fields = {
            **provenance(),
            "settings": {k: v for k, v in vars(arguments).items() if k != "out"},
            "runs": rows,
            "over_dual": over_dual(rows),
            "noise": noises,
            "saved": saved(Shape("saved", 512, 2048, 768, 16, 8)),
            "losses": losses,
        }
        if arguments.out is not None:
            write_json(fields, arguments.out)
    differences = ("difference.largest", "difference.mean")
    show("Loss next to bf16", rows, ("run", "seed", "held_out", *differences))
    show("Over dual, all seeds", fields["over_dual"])
    show("SQNR, dB", noises, ("recipe", "saved", "seed", *NAMES))
    show("Saved bytes", fields["saved"], ("recipe", "bytes", "of_bf16"))


if __name__ == "__main__":
    main()
