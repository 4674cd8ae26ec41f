"""Train the demo's language model with experts in FP8, and measure what quantisation costs.

::

    python benchmarks/moe/low_precision.py --out benchmarks/moe/results/low_precision.json

For every seed, models with the same initial weights and batches are trained in turns: the fused layer
in bfloat16, F.scaled_moe_mlp with pre-activations kept in float8 and in int8, and "dual", which keeps 16 bits and
quantises every operand of a product from them, along the dimension that the product sums.

Then every recipe runs on the operands of every layer of the trained bfloat16 model on another batch, and on the
gradients that reach its outputs. Results are compared with float64: signal to quantisation noise in dB.
"dual, best scales" takes for each block the power of two with the least squared error; no rule for
scales of MXFP8 can beat it on a single operand. ``budget`` rounds only one operand of the
six products at a time. The powers of these noises add up to the noise of all ("sum"), so they show how much
of a floor each operand takes.
"""

import argparse
import collections
import functools
import itertools
import math
from collections.abc import Callable
from statistics import fmean

from peers import fused, MoEBlock
from report import parse, progress, show
from shapes import make_operands, Shape

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.moe_quantized_reference import sqnr

from demo import text
from demo.evidence import capture
from demo.model import ModelConfig
from demo.train import make_runs, train
from measure import save, saved_bytes


FORMATS = {
    "float8 H": {},
    "int8 H": {"preact_dtype": torch.int8},
    "16-bit H": {"preact_dtype": None},
    "recomputed H": {"recompute": True},
    "float8 H, hp_wgrad": {"hp_wgrad": True},
}
MXFP8 = F.ScalingType.BlockWise1x32.value
NAMES = ("y", "grad_input", "grad_topk_weights", "grad_w_in", "grad_w_out")
# Required floors of MXFP8 with H in float8, in dB.
FLOORS = dict(zip(NAMES, (30, 26, 28, 28, 28), strict=True))


def mx_values(x: Tensor, dim: int, place: object = None) -> Tensor:
    """``x`` rounded to MXFP8 with blocks along ``dim``."""
    data, scale = torch.ops.aten._moe_quantize(x, MXFP8, dim=dim)
    scale = scale.float().repeat_interleave(32, dim).narrow(dim, 0, x.shape[dim])
    return (data.float() * scale).to(x.dtype)


def best_values(x: Tensor, dim: int, place: object = None) -> Tensor:
    """The same with the power of two that has the least squared error for each block."""
    scale = torch.ops.aten._moe_quantize(x, MXFP8, dim=dim)[1]
    lines = x.float().movedim(dim, -1)
    blocks = F.pad(lines, (0, -lines.shape[-1] % 32)).unflatten(-1, (-1, 32))
    found, least = torch.zeros_like(blocks), torch.full((), torch.inf)
    for shift in (-2, -1, 0, 1, 2):
        unit = scale.float().movedim(dim, -1)[..., None].clamp(min=2.0**-100)
        unit = unit * 2.0**shift
        codes = (blocks / unit).clamp(-448, 448).to(torch.float8_e4m3fn)
        values = codes.float() * unit
        error = (values - blocks).square().sum(-1, keepdim=True)
        found = torch.where(error < least, values, found)
        least = torch.minimum(error, least)
    lines = found.flatten(-2)[..., : x.shape[dim]]
    return lines.movedim(-1, dim).to(x.dtype)


# The operands of the products of a layer and of their gradients, by the product's name.
OPERANDS = ("rows", "weight", "gradient", "weight^T", "gradient^T", "rows^T")
PLACES = tuple(itertools.product(("in", "out"), OPERANDS))


class DualProduct(torch.autograd.Function):
    """x W^T in MXFP8: no operand is rounded twice, as x and W are kept in 16 bits.

    ``quantize(x, dim, place)`` rounds, see PLACES.
    """

    @staticmethod
    def forward(ctx, x, w, quantize, name):
        ctx.save_for_backward(x, w)
        ctx.quantize, ctx.name = quantize, name
        return quantize(x, 1, (name, "rows")) @ quantize(w, 1, (name, "weight")).t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors

        def rounded(t, dim, operand):
            return ctx.quantize(t, dim, (ctx.name, operand))

        grad_x = rounded(grad, 1, "gradient") @ rounded(w, 0, "weight^T")
        left = rounded(grad, 0, "gradient^T").t()
        return grad_x, left @ rounded(x, 0, "rows^T"), None, None


def dual_moe_mlp(x, ids, weights, w_in, w_out, *, quantize=mx_values) -> Tensor:
    """F.moe_mlp of swiglu experts with :class:`DualProduct`, sums in float32."""
    tokens, y = x.float(), torch.zeros(x.shape)
    for e, (up, down) in enumerate(zip(w_in.unbind(), w_out.unbind(), strict=True)):
        rows, slots = (ids == e).nonzero(as_tuple=True)
        if len(rows) == 0:
            continue
        h = DualProduct.apply(tokens[rows].to(x.dtype), up, quantize, "in").float()
        gate, linear = h.chunk(2, 1)
        act = (F.silu(gate) * linear).to(x.dtype)
        out = DualProduct.apply(act, down, quantize, "out")
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
    return {"largest": max(gaps), "mean": fmean(gaps)}


def over_dual(rows: list[dict]) -> list[dict[str, object]]:
    """Differences from bf16 over those of dual, both summed over the seeds."""
    total = collections.Counter()
    for row in rows:
        for kind, value in row["difference"].items():
            total[row["run"], kind] += value
    return [
        {"run": run, "difference": kind, "over_dual": value / total["dual", kind]}
        for (run, kind), value in total.items()
        if run not in ("bf16", "dual") and total["dual", kind] > 0
    ]


def train_seed(config: ModelConfig, arguments: argparse.Namespace, seed: int, corpus):
    """Losses of all models of one seed, and the trained ones."""
    steps, batch = arguments.steps, arguments.batch
    batches = text.sample_batches(corpus.train, steps, batch, config.sequence, seed)
    held_out = text.sample_batches(corpus.held_out, 8, batch, config.sequence, seed + 1)
    layers = blocks(arguments.recipe)
    runs = make_runs({name: layers[name] for name in arguments.models}, config, seed)
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
    # Twice a batch of text that no model saw.
    sizes = (2 * batch, config.sequence)
    (window,) = text.sample_batches(corpus.train, 1, *sizes, seed + 1000)
    return rows, {run.name: run.losses for run in runs}, runs[0].model, window


def results_of(function, o, dtype=None):
    """y and the gradients of the captured layer, see NAMES."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in o.leaves()]
    x, *others = leaves
    y = function(x, o.ids, *others)
    return [y.detach(), *torch.autograd.grad(y, leaves, o.grad.to(y.dtype))]


def noise(samples, exact) -> list[dict[str, object]]:
    """SQNR of every recipe and format: the mean of the layers."""
    best = functools.partial(dual_moe_mlp, quantize=best_values)
    variants = [
        ("bf16", "-", F.moe_mlp),
        ("mxfp8", "dual", dual_moe_mlp),
        ("mxfp8", "dual, best scales", best),
    ]
    for recipe, name in itertools.product(F._MOE_RECIPES, FORMATS):
        layer = scaled_moe_mlp(recipe, **FORMATS[name])
        variants.append((recipe, name, layer))
    return [
        {"recipe": recipe, "saved": name, **decibels(function, samples, exact)}
        for recipe, name, function in variants
    ]


def decibels(function, samples, exact, dtype=None) -> dict[str, float]:
    """By NAMES, the mean of the layers."""
    found = [
        [sqnr(a, b) for a, b in zip(one, results_of(function, s, dtype), strict=True)]
        for one, s in zip(exact, samples, strict=True)
    ]
    return dict(zip(NAMES, map(fmean, zip(*found, strict=True)), strict=True))


def budget(samples, exact) -> list[dict[str, object]]:
    """The noise of each single rounding of dual_moe_mlp, and their sum; products in float32."""
    rows = []
    for place in PLACES:

        def only(t, dim, here, place=place):
            return mx_values(t, dim) if here == place else t

        alone = functools.partial(dual_moe_mlp, quantize=only)
        found = decibels(alone, samples, exact, torch.float32)
        # A tensor that does not depend on the operand differs by the rounding of float32.
        kept = {name: db if db < 90 else None for name, db in found.items()}
        rows.append({"product": place[0], "operand": place[1], **kept})
    powers = {
        name: sum(10 ** (-row[name] / 10) for row in rows if row[name] is not None)
        for name in NAMES
    }
    total = {name: -10 * math.log10(power) for name, power in powers.items()}
    return [*rows, {"product": "all", "operand": "sum", **total}]


def over_floors(noises: list[dict]) -> list[dict[str, object]]:
    """Means of the seeds for MXFP8: a tensor's floor, its SQNR, and the best possible one."""

    columns = {"measured": "float8 H", "int8 H": "int8 H", "dual": "dual"}
    columns["bound"] = "dual, best scales"
    rows = [{"tensor": name, "floor": FLOORS[name]} for name in NAMES]
    for row, (column, saved) in itertools.product(rows, columns.items()):
        row[column] = fmean(
            noise[row["tensor"]]
            for noise in noises
            if (noise["recipe"], noise["saved"]) == ("mxfp8", saved)
        )
    return rows


def saved(shape: Shape) -> list[dict[str, object]]:
    """Bytes that a layer saves, parameters aside."""
    operands = make_operands(shape, weights_dtype=torch.float32)
    args, rows = operands.layer_args(), []
    for recipe in (None, *F._MOE_RECIPES):
        layer = functools.partial(F.moe_mlp, *args, recipe=recipe)
        count = saved_bytes(layer, operands.stored())
        rows.append({**shape.sizes(), "recipe": recipe or "bf16", "bytes": count})
    for row in rows:
        row["of_bf16"] = row["bytes"] / rows[0]["bytes"]
    return rows


def main() -> None:
    models = blocks("mxfp8")  # the first one is what others are compared with
    training = {"steps": 200, "batch": 4, "seeds": 3, "recipe": "mxfp8"}
    sizes = {"layers": 3, "experts": 16, "sequence": 128}
    arguments = parse(__doc__, **training, models=models, **sizes)
    config = ModelConfig(
        d_model=128, heads=4, top_k=4, expert_hidden=128,
        **{name: getattr(arguments, name) for name in sizes},
    )  # fmt: skip
    corpus = text.read_corpus()
    rows, losses, noises, budgets = [], {}, [], []
    for seed in range(arguments.seeds):
        found, curves, model, window = train_seed(config, arguments, seed, corpus)
        rows += found
        losses[str(seed)] = curves
        samples = [sample.routed(fused()) for sample in capture(model, window)]
        exact = [results_of(F.moe_mlp, s, torch.float64) for s in samples]
        noises += [{"seed": seed, **row} for row in noise(samples, exact)]
        budgets += [{"seed": seed, **row} for row in budget(samples, exact)]
        fields = {
            "settings": {k: v for k, v in vars(arguments).items() if k != "out"},
            "runs": rows,
            "over_dual": over_dual(rows),
            "noise": noises,
            "floors": over_floors(noises),
            "budget": budgets,
            "saved": saved(Shape("saved", 512, 2048, 768, 16, 8)),
            "losses": losses,
        }
        save(arguments.out, **fields)
    differences = ("difference.largest", "difference.mean")
    show("Loss next to bf16", rows, ("run", "seed", "held_out", *differences))
    if fields["over_dual"]:
        show("Over dual, all seeds", fields["over_dual"])
    show("SQNR, dB", noises, ("recipe", "saved", "seed", *NAMES))
    show("MXFP8 with H in float8, dB", fields["floors"])
    show("One rounding alone, dB", budgets, ("product", "operand", "seed", *NAMES))
    show("Saved bytes", fields["saved"], ("recipe", "bytes", "of_bf16"))


if __name__ == "__main__":
    main()
