"""The expert MLP on the kernels: ``aten::_moe_mlp`` and ``_moe_mlp_backward``.

The caller has checked the arguments and made the tensors' device current (../triton_impl.py).
Nothing here reads a tensor's value. topk.py launches the router, permutation.py the permutation,
rows.py and matmuls.py single kernels.

This folder imports only torch and Triton, so that the kernels run on
releases of torch that lack torch._native.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .experts import Activation as Activation, Experts as Experts, row_major
from .matmuls import act_backward, grouped_mm, up, weight_grad
from .permutation import moe_permutation as moe_permutation
from .rows import LaunchPlan as LaunchPlan, Rows


def moe_mlp_forward(
    plan: LaunchPlan,
    experts: Experts,
    *,
    compute_preact: bool = True,
    combine: bool = True,
) -> tuple[Tensor, Tensor]:
    """``aten::_moe_mlp``: output (T, D) and preact (R, g*F), or (0, g*F).

    Without ``combine``, and with ``slot_rows``, the output is the experts' rows (R, D), which
    the caller sums per token. Rows of no expert are undefined.
    """
    rows, like = Rows.of(plan, experts), experts.input
    preact = like.new_empty(rows.num_rows if compute_preact else 0, experts.width)
    if rows.is_empty:
        return like.new_zeros(like.shape), preact.zero_()

    hidden = like.new_empty(rows.num_buffer_rows, experts.num_hidden)
    up(rows, experts, preact, hidden, compute_preact)
    if compute_preact:
        rows.zero_tail(preact)
    routed = like.new_empty(rows.num_rows, like.shape[1])
    bias, scale = experts.b_out, rows.scale
    grouped_mm(rows, "down", hidden, experts.w_out, routed, bias=bias, scale=scale)
    return rows.finish(routed, combine), preact


class Wanted(NamedTuple):
    """Which gradients are asked for and have an operand, in the order of the output mask."""

    input: bool
    w_in: bool
    w_out: bool
    topk_weights: bool
    b_in: bool
    b_out: bool
    w_up: bool


class ActGrads(NamedTuple):
    """Results of the activation's gradient; unwanted ones have no rows."""

    values: Tensor  # dH (R, g*F)
    hidden: Tensor  # A' (R, F)
    partials: Tensor  # (P, R) float32: dS


class Products(Protocol):
    """The matmuls of one backward; ``grads`` is what ``act_backward`` returned."""

    def act_backward(self, wanted: Wanted) -> Any: ...

    def input_grad(self, grads) -> Tensor:
        """(R, D): dH W_in. dX of a token is the sum of its rows."""
        ...

    def w_out_grad(self, grads) -> Tensor: ...

    def w_in_grad(self, grads, i: int, w: Tensor) -> Tensor:
        """The gradient of ``w``, which is ``w_in`` (``i`` 0) or ``w_up`` (1)."""
        ...


def zero_gradients(experts: Experts, output_mask: tuple[bool, ...]) -> tuple:
    """Zeros for the wanted gradients; those of weights (E, M, N) keep their strides."""
    formats = {True: torch.preserve_format, False: torch.contiguous_format}
    return tuple(
        torch.zeros_like(x, memory_format=formats[x.dim() == 3])
        if wanted and x is not None
        else experts.input.new_empty(0)
        for x, wanted in zip(experts.differentiable, output_mask, strict=True)
    )


def gradients(
    rows: Rows,
    experts: Experts,
    products: Products,
    grad_out: Tensor,
    output_mask: tuple[bool, ...],
    combine: bool = True,
) -> tuple[Tensor, ...]:
    """The seven gradients in ``output_mask`` order, in every precision and by any matmuls.

    A gradient that is masked out, or whose operand is absent, is a tensor of
    shape (0,). Without ``combine`` the gradient of the input stays in rows, as in
    :func:`moe_mlp_forward`.
    """
    operands = experts.differentiable
    wanted = Wanted(
        *(w and x is not None for w, x in zip(output_mask, operands, strict=True))
    )
    grads = [grad_out.new_empty(0) for _ in operands]
    if wanted.b_out and experts.b_out is not None:
        options = {"scale": rows.scale, "gather": True}
        grads[5] = rows.bias_grad(grad_out, experts.b_out, **options)
    if not any(wanted._replace(b_out=False)):
        return tuple(grads)
    made = products.act_backward(wanted)
    if wanted.input:
        grads[0] = rows.finish(products.input_grad(made), combine)
    if wanted.w_out:
        grads[2] = products.w_out_grad(made)
    for i, place in enumerate((1, 6)):
        w = operands[place]
        if wanted[place] and w is not None:
            grads[place] = products.w_in_grad(made, i, w)
    if wanted.topk_weights and experts.topk_weights is not None:
        grads[3] = rows.scale_grad(made.partials, experts.topk_weights)
    if wanted.b_in and experts.b_in is not None:
        grads[4] = rows.bias_grad(made.values, experts.b_in)
    return tuple(grads)


class _Products:
    def __init__(
        self, rows: Rows, experts: Experts, grad_out: Tensor, preact: Tensor
    ) -> None:
        self.rows, self.experts = rows, experts
        self.grad_out, self.preact = grad_out, preact
        self.x = row_major(experts.input)

    def act_backward(self, wanted: Wanted) -> ActGrads:
        needs = {"need_hidden": wanted.w_out, "need_scale": wanted.topk_weights}
        operands = (self.rows, self.experts, self.grad_out, self.preact)
        return ActGrads(*act_backward(*operands, **needs))

    def input_grad(self, grads: ActGrads) -> Tensor:
        experts = self.experts
        routed = grads.values.new_empty(self.rows.num_rows, self.x.shape[1])
        w_up = None if experts.w_up is None else experts.w_up.mT
        w = experts.w_in.mT
        grouped_mm(self.rows, "input_grad", grads.values, w, routed, w_up=w_up)
        return routed

    def w_out_grad(self, grads: ActGrads) -> Tensor:
        operands = (self.grad_out, grads.hidden, self.experts.w_out)
        return weight_grad(self.rows, *operands, gather_p=True)

    def w_in_grad(self, grads: ActGrads, i: int, w: Tensor) -> Tensor:
        half = grads.values.split(w.shape[1], 1)[i]
        return weight_grad(self.rows, half, self.x, w, gather_q=True)


def moe_mlp_backward(
    plan: LaunchPlan,
    experts: Experts,
    grad_out: Tensor,
    preact: Tensor,
    output_mask: tuple[bool, ...],
    *,
    combine: bool = True,
) -> tuple[Tensor, ...]:
    """``aten::_moe_mlp_backward``: the seven gradients, see :func:`gradients`."""
    rows = Rows.of(plan, experts)
    if rows.is_empty:
        return zero_gradients(experts, output_mask)
    grad_out = row_major(grad_out)
    products = _Products(rows, experts, grad_out, preact.contiguous())
    return gradients(rows, experts, products, grad_out, output_mask, combine)
