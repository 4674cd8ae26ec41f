"""Launchers of the CuTe backend: ``aten::_moe_mlp`` and ``_moe_mlp_backward``.

The arguments are those of the ops, already checked by ../cutedsl_impl.py, with weights
contiguous, in one tensor per projection and without biases. The matmuls come as an
argument, so that tests can put functions of the same signature in their place.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..triton_kernels import matmuls
from ..triton_kernels.experts import Experts, row_major
from ..triton_kernels.launch import ActGrads, gradients, Wanted, zero_gradients
from ..triton_kernels.rows import LaunchPlan, Rows
from .rows import route_rows, zero_padding


class Gemms(Protocol):
    """The functions of gemms.py, where they are described."""

    def up(self, x, tokens, w_in, cu, act, preact, hidden) -> None: ...

    def down(self, a, w, cu, score, out) -> None: ...

    def act_backward(
        self, grad, tokens, w, cu, preact, score, act, grad_preact, hidden
    ) -> Tensor: ...

    def mm(self, a, w, cu, out) -> None: ...

    def weight_grad(self, x, tokens, b, cu, out) -> None: ...


class CutePlan(NamedTuple):
    """What a launcher has to know.

    Attributes:
        gemms: the matmuls.
        triton: the plan of the Triton kernels.
    """

    gemms: Gemms
    triton: LaunchPlan


class _Segments:
    """The routed rows of one call as the matmuls take them.

    Attributes:
        rows: what the Triton kernels take.
        cu: (E + 1,) int32, 0 and the end offsets.
        tokens: (R,) int32; None where the operands have the rows already.
        score: (R,) float32, 0 for padding; None for all ones.
    """

    def __init__(self, plan: LaunchPlan, experts: Experts) -> None:
        self.rows = rows = Rows.of(plan, experts)
        self.cu = torch.nn.functional.pad(experts.offs, (1, 0))
        self.tokens = self.score = None
        if rows.has_slots:
            self.tokens, self.score = route_rows(
                rows.row_slots, rows.offs, rows.top_k, experts.topk_weights
            )
        elif rows.scale is not None:
            self.score = rows.scale.float()


def moe_mlp_forward(
    plan: CutePlan, experts: Experts, *, compute_preact: bool = True
) -> tuple[Tensor, Tensor]:
    """``aten::_moe_mlp``: output (T, D) and preact (R, g*F), or (0, g*F)."""
    segments, like = _Segments(plan.triton, experts), experts.input
    rows, cu, tokens = segments.rows, segments.cu, segments.tokens
    preact = like.new_empty(rows.num_rows if compute_preact else 0, experts.width)
    if rows.is_empty:
        return like.new_zeros(like.shape), preact.zero_()

    hidden = like.new_empty(rows.num_rows, experts.num_hidden)
    kept = preact if compute_preact else None
    x, w_in = row_major(like), experts.w_in
    plan.gemms.up(x, tokens, w_in, cu, experts.act, kept, hidden)
    if kept is not None and tokens is None:
        rows.zero_tail(kept)
    elif kept is not None:
        zero_padding(rows.row_slots, kept)
    routed = like.new_empty(rows.num_rows, like.shape[1])
    score = None if rows.scale is None else segments.score
    plan.gemms.down(hidden, experts.w_out, cu, score, routed)
    return rows.finish(routed), preact


class _Products:
    """Implements launch.Products of the Triton kernels."""

    def __init__(
        self,
        gemms: Gemms,
        segments: _Segments,
        experts: Experts,
        grad_out: Tensor,
        preact: Tensor,
    ) -> None:
        self.gemms, self.segments, self.experts = gemms, segments, experts
        self.grad_out, self.preact = grad_out, preact

    def act_backward(self, wanted: Wanted) -> ActGrads:
        """The Triton kernel runs if gate and up are two halves, as QuACK's reads pairs. Storing
        pairs in the forward would not help: another backend may run the backward, and expects
        the weight's layout.
        """
        experts, segments, preact = self.experts, self.segments, self.preact
        if experts.halves_adjacent:
            operands = (segments.rows, experts, self.grad_out, preact)
            need_scale = segments.rows.scale is not None
            options = {"need_hidden": True, "need_scale": need_scale}
            return ActGrads(*matmuls.act_backward(*operands, **options))
        grad_preact = torch.empty_like(preact)
        hidden = preact.new_empty(preact.shape[0], experts.num_hidden)
        score = segments.score
        if score is None:
            score = preact.new_ones(preact.shape[0], dtype=torch.float32)
        dot = self.gemms.act_backward(
            self.grad_out,
            segments.tokens,
            experts.w_out,
            segments.cu,
            preact,
            score,
            experts.act,
            grad_preact,
            hidden,
        )
        return ActGrads(grad_preact, hidden, dot.unsqueeze(0))

    def input_grad(self, grads: ActGrads) -> Tensor:
        num_rows = self.segments.rows.num_rows
        routed = grads.values.new_empty(num_rows, self.experts.input.shape[1])
        self.gemms.mm(grads.values, self.experts.w_in, self.segments.cu, routed)
        return routed

    def _weight_grad(self, x: Tensor, b: Tensor, out: Tensor) -> None:
        self.gemms.weight_grad(x, self.segments.tokens, b, self.segments.cu, out)

    def w_out_grad(self, grads: ActGrads) -> Tensor:
        grad = torch.empty_like(self.experts.w_out)
        self._weight_grad(self.grad_out, grads.hidden, grad)
        return grad

    def w_in_grad(self, grads: ActGrads, i: int, w: Tensor) -> Tensor:
        grad = torch.empty_like(w)
        self._weight_grad(row_major(self.experts.input), grads.values, grad.mT)
        return grad


def moe_mlp_backward(
    plan: CutePlan,
    experts: Experts,
    grad_out: Tensor,
    preact: Tensor,
    output_mask: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    """``aten::_moe_mlp_backward``: the seven gradients; (0,) where not wanted or absent."""
    segments = _Segments(plan.triton, experts)
    if segments.rows.is_empty:
        return zero_gradients(experts, output_mask)
    grad_out, preact = row_major(grad_out), preact.contiguous()
    products = _Products(plan.gemms, segments, experts, grad_out, preact)
    return gradients(segments.rows, experts, products, grad_out, output_mask)
