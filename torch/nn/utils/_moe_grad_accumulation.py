"""Adds weight gradients of ``F.moe_mlp`` to ``.grad`` while they are in the cache.

Autograd writes the gradient of all experts to new memory and then adds it to ``.grad``. With few rows per
expert that is most of a step: every page of the new tensor is cleared, written, read again, and given
back. Here the backward goes through the experts in groups: the gradient of one group is a few megabytes,
which are the same memory for each, and is added to its part of ``.grad`` at once. Experts without rows are
not touched. What is added is the gradient as it was, rounded to the dtype of the weight, so that
``.grad`` has the bits that it had.

    y = moe_mlp_accumulating(x, *F.moe_topk(logits, k), w_in, w_out)

It steps aside, call by call, wherever somebody could notice: see :func:`accumulates_alone`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


__all__ = ["accumulates_alone", "moe_mlp_accumulating"]

# Of weight gradients at a time: together with the operands of their experts in a second level cache or
# a share of a third, and below what malloc maps and unmaps for each call.
GROUP_BYTES = 6 << 20

_TENSORS = (
    "input", "w_in", "w_out", "offs", "topk_weights",
    "row_slots", "slot_rows", "b_in", "b_out", "w_up",
)  # fmt: skip
_WEIGHTS = {"w_in": 1, "w_out": 2, "w_up": 9}
_MASK = ("input", "w_in", "w_out", "topk_weights", "b_in", "b_out", "w_up")


def accumulates_alone(weight: Tensor, node: Any) -> bool:
    """Whether this backward would only add to ``weight.grad``, and nobody watches.

    Not for a tensor that is computed (its gradient goes on), before the first gradient (which autograd
    keeps instead of adding), with hooks of the tensor, or an optimizer that runs in the backward; not
    when ``torch.autograd.grad`` collects gradients or ``inputs=`` leaves this one out. Hooks that were
    put on the AccumulateGrad node itself cannot be seen from here: DDP's, which are, switch it off in
    :func:`moe_mlp_accumulating`.

    Args:
        weight: a leaf.
        node: its AccumulateGrad node.
    """
    grad = weight.grad
    if (
        grad is None
        or type(weight) not in (Tensor, torch.nn.Parameter)
        or type(grad) is not Tensor
        or grad.layout != torch.strided
        or (grad.dtype, grad.device) != (weight.dtype, weight.device)
        or grad.requires_grad
        or weight._backward_hooks
        or weight._post_accumulate_grad_hooks
        or hasattr(weight, "_in_backward_optimizers")
    ):
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad captures it
        return False


def _backward(
    saved: dict[str, Tensor | None], grad_out: Tensor, preact: Tensor, mask, options
):
    operands = [saved[name] for name in _TENSORS]
    return torch.ops.aten._moe_mlp_backward(
        grad_out, *operands, preact, mask, **options
    )


def _groups(ends: list[int], expert_bytes: int) -> list[tuple[int, int, int, int]]:
    """(first expert, last expert + 1, first row, last row + 1), none without rows."""
    size = max(1, GROUP_BYTES // max(1, expert_bytes))
    found, first, start = [], 0, 0
    for e, end in enumerate(ends):
        if e + 1 - first == size or e + 1 == len(ends) or (end == start and first == e):
            if end > start:
                found.append((first, e + 1, start, end))
            first, start = e + 1, end
    return found


def _accumulating_backward(saved, grad_out: Tensor, preact: Tensor, mask, options):
    """The gradients of ``_MASK``, but for those of the weights, which are in ``.grad``.

    One backward per group of experts, on its rows in expert order. Rows of the gradient of the
    input are summed per token afterwards, in the order of its slots, as the op does.
    """
    x, row_slots, slot_rows = saved["input"], saved["row_slots"], saved["slot_rows"]
    offs, scores = saved["offs"], saved["topk_weights"]
    if row_slots is None:
        row_slots = torch.arange(x.shape[0], dtype=torch.int32)
        slot_rows = row_slots.unsqueeze(1)
    top_k, ends = slot_rows.shape[1], offs.tolist()
    grads: dict[str, Tensor | None] = dict.fromkeys(_MASK)
    for name, wanted in zip(_MASK, mask):
        if wanted and name in ("topk_weights", "b_in", "b_out"):
            grads[name] = torch.zeros_like(
                saved[name], memory_format=torch.contiguous_format
            )
    last_row = ends[-1] if ends else 0
    grad_rows = x.new_empty(last_row, x.shape[1]) if mask[0] else None
    scores = None if scores is None else scores.detach().reshape(-1)
    stored = [
        n for n in ("w_in", "w_out", "w_up", "b_in", "b_out") if saved[n] is not None
    ]
    expert_bytes = sum(saved[n][0].nbytes for n in stored)
    for first, last, start, end in _groups(ends, expert_bytes):
        slots = row_slots[start:end].long()
        kept = slots >= 0
        slots = slots.clamp(min=0)
        tokens = slots // top_k
        part = dict.fromkeys(_TENSORS)
        part |= {name: saved[name].detach()[first:last] for name in stored}
        part |= {"offs": offs[first:last] - start, "input": x[tokens]}
        out = grad_out[tokens]
        if scores is not None:
            part["topk_weights"] = scores[slots].unsqueeze(1)
        if not kept.all():  # padding rows give nothing to their expert
            out = out * kept.unsqueeze(1)
        found = _backward(part, out, preact[start:end], mask, options)
        for name, grad, wanted in zip(_MASK, found, mask):
            if not wanted:
                continue
            if name == "input":
                grad_rows[start:end] = grad
            elif name == "topk_weights":
                grads[name].view(-1)[slots[kept]] = grad.reshape(-1)[kept]
            elif name in _WEIGHTS:
                saved[name].grad[first:last].add_(grad)
            else:
                grads[name][first:last] = grad
    if grad_rows is not None:
        grads["input"] = _sum_over_slots(grad_rows, slot_rows, x)
    return [grads[name] for name in _MASK]


def _sum_over_slots(rows: Tensor, slot_rows: Tensor, like: Tensor) -> Tensor:
    """(T, D): the rows of a token, added in float32 (float64 of float64) in slot order."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(like.shape, dtype=dtype)
    if len(rows):
        for of_slot in slot_rows.unbind(1):
            kept = (of_slot >= 0).unsqueeze(1)
            added = rows[of_slot.clamp(min=0).long()]
            total += added if kept.all() else added.where(kept, 0)
    return total.to(rows.dtype)


class _MoeMlp(torch.autograd.Function):
    """``torch._moe_mlp`` with a backward that may add to ``.grad``."""

    @staticmethod
    def forward(ctx, options, watched, *tensors):
        output, preact = torch._moe_mlp(*tensors, **options)
        ctx.save_for_backward(*tensors, preact)
        ctx.mark_non_differentiable(preact)
        ctx.options = options
        ctx.watched = watched
        ctx.set_materialize_grads(False)
        return output, preact

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, _):
        if grad_out is None:
            return (None,) * (2 + len(_TENSORS))
        *tensors, preact = ctx.saved_tensors
        saved = dict(zip(_TENSORS, tensors))
        needs = dict(zip(_TENSORS, ctx.needs_input_grad[2:]))
        mask = [needs[name] for name in _MASK]
        wanted = [saved[name] for name in _WEIGHTS if needs[name]]
        alone = wanted and all(
            accumulates_alone(w, node)
            for w, node in zip(wanted, (ctx.watched[n] for n in _WEIGHTS if needs[n]))
        )
        function = _accumulating_backward if alone else _backward
        grads = dict(zip(_MASK, function(saved, grad_out, preact, mask, ctx.options)))
        found = (grads.get(name) if needs[name] else None for name in _TENSORS)
        return (None, None, *found)


def moe_mlp_accumulating(
    input: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor | None,
    w_in: Tensor,
    w_out: Tensor,
    *,
    w_up: Tensor | None = None,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    **activation: Any,
) -> Tensor:
    """:func:`torch.nn.functional.moe_mlp`, whose backward on a CPU adds to an existing ``.grad``.

    ``.grad`` has the same bits as with that function, which is called for compiled code, without
    gradients, on other devices, for computed (not leaf) weights, inside DDP's forward and for tensor
    subclasses. Arguments, result and errors are those of it.
    """
    weights = (None, w_in, w_out, *(None,) * 6, w_up)
    tensors = (input, topk_weights, w_in, w_out, w_up, b_in, b_out)
    wanted = {
        name: weights[i]
        for name, i in _WEIGHTS.items()
        if weights[i] is not None and weights[i].requires_grad
    }
    if (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or not wanted
        or not all(w.is_leaf and w.device.type == "cpu" for w in wanted.values())
        or torch.overrides.has_torch_function(tensors)
        or torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
        is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        options = {"w_up": w_up, "b_in": b_in, "b_out": b_out, **activation}
        return F.moe_mlp(input, topk_indices, topk_weights, w_in, w_out, **options)
    x, ids = (torch.atleast_2d(t).flatten(0, -2) for t in (input, topk_indices))
    if topk_weights is not None:
        topk_weights = torch.atleast_2d(topk_weights).flatten(0, -2)
    row_slots, slot_rows, offs, _ = torch._moe_permutation(ids, w_in.shape[0])
    watched = {
        name: torch.autograd.graph.get_gradient_edge(w).node
        for name, w in wanted.items()
    }
    operands = (x, w_in, w_out, offs, topk_weights, row_slots, slot_rows)
    output, _ = _MoeMlp.apply(activation, watched, *operands, b_in, b_out, w_up)
    return output.view(input.shape)
