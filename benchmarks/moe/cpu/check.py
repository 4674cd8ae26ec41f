"""Every timed form against float64, by the rule of moe_reference.py, before it is timed.

Float64 copies of all weights of a large row would not fit, so that a row of many rows is checked
on a sample: y, dX and d(topk_weights) of some tokens, which no other token has a share in, and dW
and db of some experts, over all of their rows. Small rows are checked whole.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.testing._internal.moe_reference import (
    error_and_bound,
    moe_mlp_backward_reference,
    moe_mlp_backward_unfused,
    moe_mlp_reference,
    moe_mlp_unfused,
)

from .peers import Form
from .shapes import Layer, Operands, Row


class Expected(NamedTuple):
    """Values of the sample, by name, in float64 (reference) or the row's dtype (unfused)."""

    reference: dict[str, Tensor]
    unfused: dict[str, Tensor]


class Sample(NamedTuple):
    """What of a row is checked.

    Attributes:
        tokens: (S,) int64, in ascending order.
        experts: ids of the experts whose gradients are checked.
    """

    tokens: Tensor
    experts: list[int]


MAX_ELEMENTS = 4 * 10**8  # of the weights that the sampled tokens need in float64


def make_sample(row: Row, indices: Tensor, max_tokens: int, max_experts: int) -> Sample:
    """Tokens spread over the batch, and the experts with the most and the fewest rows."""
    c = row.case
    affordable = max(2, MAX_ELEMENTS // (c.top_k * 3 * c.dim * c.hidden))
    count = min(c.num_tokens, max_tokens, affordable)
    tokens = torch.linspace(0, c.num_tokens - 1, count).long().unique()
    load = torch.bincount(indices.flatten(), minlength=c.num_experts)
    by_load = load.argsort(descending=True).tolist()
    order = [e for pair in zip(by_load, reversed(by_load)) for e in pair]
    return Sample(tokens, list(dict.fromkeys(order))[:max_experts])


def _expert(row: Row, layer: Layer, e: int) -> tuple[Tensor, ...]:
    """w_in (1, 2F, D), w_out (1, D, F), b_in, b_out of one expert."""
    w_in, w_out = layer.w_in[e : e + 1], layer.w_out[e : e + 1]
    if row.gpt_oss:
        return w_in.mT, w_out.mT, layer.b_in[e : e + 1], layer.b_out[e : e + 1]
    return w_in, w_out, None, None


def _on_expert(
    function: Callable, row: Row, operands: Operands, e: int, chosen: Tensor, *grad
):
    """``function`` of moe_reference.py on the rows of expert ``e`` among ``chosen`` slots.

    Args:
        chosen: (T, K) bool.
        grad: grad_out (T, D), for a backward.

    Returns:
        The slots (n, 2) as token, k, and what ``function`` returns.
    """
    layer, indices = operands.layers[0], operands.indices[0][0]
    slots = (chosen & (indices == e)).nonzero()
    tokens, k = slots.unbind(1)
    w_in, w_out, b_in, b_out = _expert(row, layer, e)
    offs = torch.tensor([len(slots)], dtype=torch.int32)
    rows = torch.arange(len(slots), dtype=torch.int32)
    args = (
        operands.x[tokens],
        w_in,
        w_out,
        offs,
        operands.weights[tokens, k, None],
        rows,
        rows[:, None],
        b_in,
        b_out,
    )
    result = function(*(g[tokens] for g in grad), *args, **row.activation_kwargs())
    return slots, result


def _values(
    row: Row, operands: Operands, sample: Sample, forward: Callable, backward: Callable
) -> dict[str, Tensor]:
    indices = operands.indices[0][0]
    dtype = torch.float64 if forward is moe_mlp_reference else row.dtype
    chosen = torch.zeros_like(indices, dtype=torch.bool)
    chosen[sample.tokens] = True
    y = torch.zeros(operands.x.shape, dtype=dtype)
    dx, ds = torch.zeros_like(y), torch.zeros(indices.shape, dtype=dtype)
    for e in indices[sample.tokens].unique().tolist():
        slots, (rows, _) = _on_expert(forward, row, operands, e, chosen)
        y.index_add_(0, slots[:, 0], rows)
        if row.backward:
            _, grads = _on_expert(backward, row, operands, e, chosen, operands.grad_out)
            dx.index_add_(0, slots[:, 0], grads.grad_input)
            ds[slots[:, 0], slots[:, 1]] = grads.grad_topk_weights[:, 0]
    values = {"y": y[sample.tokens]}
    if not row.backward:
        return values
    values |= {"dx": dx[sample.tokens], "dweights": ds[sample.tokens]}
    everything = torch.ones_like(chosen)
    names = ("dw_in", "dw_out", "db_in", "db_out")
    stacks: dict[str, list[Tensor]] = {name: [] for name in names}
    for e in sample.experts:
        _, g = _on_expert(backward, row, operands, e, everything, operands.grad_out)
        of_expert = (g.grad_w_in, g.grad_w_out, g.grad_b_in, g.grad_b_out)
        for name, grad in zip(names, of_expert):
            if grad is not None:
                transposed = row.gpt_oss and name.startswith("dw")
                stacks[name].append(grad.mT if transposed else grad)
    return values | {n: torch.cat(s) for n, s in stacks.items() if s}


def expected_values(row: Row, operands: Operands, sample: Sample) -> Expected:
    return Expected(
        _values(row, operands, sample, moe_mlp_reference, moe_mlp_backward_reference),
        _values(row, operands, sample, moe_mlp_unfused, moe_mlp_backward_unfused),
    )


def actual_values(
    row: Row,
    form: Form,
    sample: Sample,
    y: Tensor,
    grads: Sequence[Tensor],
) -> dict[str, Tensor]:
    """The sample of what a form returned.

    Args:
        grads: of x, the router weights and the form's leaves; empty for a forward.
    """
    values = {"y": y[sample.tokens]}
    if row.backward:
        dx, ds, *of_leaves = grads
        values |= {"dx": dx[sample.tokens], "dweights": ds[sample.tokens]}
        names = ("dw_in", "dw_out", "db_in", "db_out")
        for name, grad in zip(names, form.canonical(of_leaves)):
            values[name] = grad[sample.experts]
    return values


def largest_share_of_bound(
    row: Row, form: Form, expected: Expected, actual: dict[str, Tensor]
) -> float:
    """Largest error over the error that invariant 1 allows, over all values.

    Raises:
        AssertionError: a value is wrong, or missing.
    """
    if actual.keys() != expected.reference.keys():
        raise AssertionError(
            f"{row.id}: {form.name} gives {sorted(actual)}, "
            f"not {sorted(expected.reference)}"
        )
    worst = 0.0
    for name, reference in expected.reference.items():
        error, bound = error_and_bound(
            actual[name], reference, expected.unfused[name], row.dtype
        )
        if not error <= bound:
            raise AssertionError(
                f"{row.id}: {name} of {form.name} ({form.source}) has error {error:.3e} "
                f"against float64, {bound:.3e} is allowed"
            )
        worst = max(worst, error / bound if bound else 0.0)
    return worst
