"""A measured layer against float64, by the rule of moe_reference.py.

Float64 copies of all weights of a large layer would not fit in memory, so it is checked on a
sample: y, dX and d(topk_weights) of some tokens, which do not depend on other tokens, and dW and
db of some experts, over all of their rows. Small layers are checked whole.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shapes import Operands, Shape

import torch
from torch import Tensor
from torch.testing._internal import moe_reference


_WEIGHTS = ("dw_in", "dw_out", "db_in", "db_out")
MAX_ELEMENTS = 4 * 10**8  # of the weights that the sampled tokens need in float64


class Sample(NamedTuple):
    """The part of a layer that is checked."""

    tokens: Tensor  # (S,) int64, in ascending order
    experts: list[int]  # whose gradients are checked


class Error(NamedTuple):
    """max|actual - reference|, the error that invariant 1 allows, and max|reference|."""

    error: float
    bound: float
    scale: float


def make_sample(shape: Shape, ids: Tensor, max_tokens: int, max_experts: int) -> Sample:
    """Tokens spread over the batch, and the experts with the most and the fewest rows."""
    affordable = max(2, MAX_ELEMENTS // (shape.K * 3 * shape.D * shape.F))
    count = min(shape.T, max_tokens, affordable)
    tokens = torch.linspace(0, shape.T - 1, count).long().unique()
    load = torch.bincount(ids.flatten(), minlength=shape.E)
    by_load = load.argsort(descending=True).tolist()
    order = [e for pair in zip(by_load, reversed(by_load)) for e in pair]
    return Sample(tokens, list(dict.fromkeys(order))[:max_experts])


def _rows_of(shape: Shape, o: Operands, e: int, chosen: Tensor):
    """Slots (n, 2) of expert ``e`` among the ``chosen`` (T, K), and arguments of its reference."""
    slots = (chosen & (o.ids == e)).nonzero()
    tokens, k = slots.unbind(1)
    w_in, w_out = (w[e : e + 1].detach() for w in (o.w_in, o.w_out))
    if shape.gpt_oss:
        w_in, w_out = w_in.mT, w_out.mT
    rows = torch.arange(len(slots), dtype=torch.int32)
    biases = (None if b is None else b[e : e + 1] for b in (o.b_in, o.b_out))
    x, s = o.x.detach()[tokens], o.weights.detach()[tokens, k, None]
    offs = torch.tensor([len(slots)], dtype=torch.int32)
    return slots, (x, w_in, w_out, offs, s, rows, rows[:, None], *biases)


def _values(shape: Shape, o: Operands, sample: Sample, backward: bool, functions):
    forward, gradients = functions
    dtype = torch.float64 if forward is moe_reference.moe_mlp_reference else o.x.dtype
    of_tokens = torch.zeros_like(o.ids, dtype=torch.bool)
    of_tokens[sample.tokens] = True
    y, dx = torch.zeros(2, *o.x.shape, dtype=dtype)
    ds_dtype = torch.promote_types(dtype, o.weights.dtype)
    ds = torch.zeros(o.weights.shape, dtype=ds_dtype)
    of_experts: dict[str, dict[int, Tensor]] = {}
    hit = o.ids[sample.tokens].unique().tolist()
    for e in sorted({*hit, *(sample.experts if backward else ())}):
        chosen = of_tokens.new_ones(()) if e in sample.experts else of_tokens
        slots, args = _rows_of(shape, o, e, chosen)
        y.index_add_(0, slots[:, 0], forward(*args, **shape.activation())[0])
        if not backward:
            continue
        g = gradients(o.grad[slots[:, 0]], *args, **shape.activation())
        dx.index_add_(0, slots[:, 0], g.grad_input)
        ds[slots[:, 0], slots[:, 1]] = g.grad_topk_weights[:, 0]
        if e in sample.experts:
            w = (g.grad_w_in, g.grad_w_out)
            w = (t.mT for t in w) if shape.gpt_oss else w
            for name, grad in zip(_WEIGHTS, (*w, g.grad_b_in, g.grad_b_out)):
                if grad is not None:
                    of_experts.setdefault(name, {})[e] = grad
    values = {"y": y[sample.tokens]}
    if backward:
        values |= {"dx": dx[sample.tokens], "dweights": ds[sample.tokens]}
    for name, grads in of_experts.items():
        values[name] = torch.cat([grads[e] for e in sample.experts])
    return values


def truth(shape: Shape, operands: Operands, sample: Sample, *, backward: bool):
    """Values of the sample by name, in float64 and unfused in the dtype of the operands."""
    r, args = moe_reference, (shape, operands, sample, backward)
    return _values(*args, r.REFERENCE), _values(*args, r.UNFUSED)


def sampled(sample: Sample, y: Tensor, grads: Sequence[Tensor]) -> dict[str, Tensor]:
    """The sample of y and of the gradients of x, router weights and stored weights, if any."""
    values = {"y": y.detach()[sample.tokens]}
    if grads:
        dx, ds, *of_weights = grads
        values |= {"dx": dx[sample.tokens], "dweights": ds[sample.tokens]}
        values |= {n: grad[sample.experts] for n, grad in zip(_WEIGHTS, of_weights)}
    return values


def errors(actual: Mapping, expected, dtype, who: str) -> dict[str, Error]:
    """The error of every value; ``expected`` comes from :func:`truth`. A missing value raises."""
    reference, unfused = expected
    if actual.keys() != reference.keys():
        raise AssertionError(f"{who} gives {sorted(actual)}, not {sorted(reference)}")
    found = {}
    for name, exact in reference.items():
        values = (actual[name], exact, unfused[name])
        error, bound = moe_reference.error_and_bound(*values, dtype)
        found[name] = Error(error, bound, exact.abs().max().item())
    return found


def largest_share(found: Mapping[str, Error], who: str) -> float:
    """Largest error over the allowed one. A value above 1 raises."""
    for name, (error, bound, _) in found.items():
        if not error <= bound:
            seen = f"{name} of {who} has error {error:.3e} against float64"
            raise AssertionError(f"{seen}, {bound:.3e} is allowed")
    return max(error / bound if bound else 0.0 for error, bound, _ in found.values())
