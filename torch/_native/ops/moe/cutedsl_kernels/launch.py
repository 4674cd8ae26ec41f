"""Launchers of the CuTe backend: ``aten::_moe_mlp`` and ``_moe_mlp_backward``.

The arguments are those of the ops, already checked by ../cutedsl_impl.py, with weights
contiguous, in one tensor per projection and without biases. The matmuls come as an
argument, so that tests can put functions of the same signature in their place.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..triton_kernels import launch as triton_launch
from ..triton_kernels.launch import Activation, LaunchPlan
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
        triton: of the Triton kernels beside them.
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

    def __init__(
        self,
        plan: LaunchPlan,
        offs: Tensor,
        topk_weights: Tensor | None,
        row_slots: Tensor | None,
        slot_rows: Tensor | None,
        num_tokens: int,
    ) -> None:
        self.rows = triton_launch._Rows(plan, offs, row_slots, slot_rows, num_tokens)
        self.cu = torch.nn.functional.pad(offs, (1, 0))
        self.tokens = self.score = None
        if row_slots is not None:
            self.tokens, self.score = route_rows(
                self.rows.row_slots, self.rows.offs, self.rows.top_k, topk_weights
            )
        elif topk_weights is not None:
            self.score = topk_weights.contiguous().view(-1).float()

    def zero_padding(self, out: Tensor) -> None:
        """Zeroes the rows of ``out`` (R, N) that hold no slot."""
        if self.tokens is None:
            triton_launch._zero_tail(self.rows.plan, self.rows, out)
        else:
            zero_padding(self.rows.row_slots, out)

    def sum_per_token(self, routed: Tensor, num_tokens: int) -> Tensor:
        """(T, D) from the rows ``routed`` (R, D)."""
        return triton_launch._finish_rows(
            self.rows.plan, self.rows, routed, num_tokens, True
        )


def moe_mlp_forward(
    plan: CutePlan,
    input: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    offs: Tensor,
    topk_weights: Tensor | None,
    row_slots: Tensor | None,
    slot_rows: Tensor | None,
    act: Activation,
    *,
    compute_preact: bool = True,
) -> tuple[Tensor, Tensor]:
    """``aten::_moe_mlp``: output (T, D) and preact (R, g*F), or (0, g*F)."""
    num_tokens, dim = input.shape
    segments = _Segments(
        plan.triton, offs, topk_weights, row_slots, slot_rows, num_tokens
    )
    num_rows = segments.rows.num_rows
    preact = input.new_empty(num_rows if compute_preact else 0, w_in.shape[1])
    if min(num_tokens, num_rows) == 0:
        return input.new_zeros(num_tokens, dim), preact.zero_()

    hidden = input.new_empty(num_rows, w_out.shape[2])
    x, cu = triton_launch._row_major(input), segments.cu
    plan.gemms.up(
        x, segments.tokens, w_in, cu, act, preact if compute_preact else None, hidden
    )
    if compute_preact:
        segments.zero_padding(preact)
    routed = input.new_empty(num_rows, dim)
    score = None if topk_weights is None else segments.score
    plan.gemms.down(hidden, w_out, cu, score, routed)
    return segments.sum_per_token(routed, num_tokens), preact


def _act_backward(
    plan: CutePlan,
    segments: _Segments,
    grad_out: Tensor,
    w_out: Tensor,
    topk_weights: Tensor | None,
    preact: Tensor,
    act: Activation,
) -> tuple[Tensor, Tensor, Tensor]:
    """dH (R, g*F), A' (R, F), dS partials (P, R) float32.

    Gate and up in two halves are for the Triton kernel: QuACK's reads them in pairs, and
    pre-activations of another layout than the weight's would be of no use to a backward
    that another backend runs.
    """
    if act.gated and not act.gate_interleaved:
        return triton_launch._act_backward(
            plan.triton,
            segments.rows,
            grad_out,
            w_out,
            None,
            preact,
            triton_launch._slot_weights(topk_weights),
            act,
            need_hidden=True,
            need_scale=topk_weights is not None,
        )
    grad_preact = torch.empty_like(preact)
    hidden = preact.new_empty(preact.shape[0], w_out.shape[2])
    score = segments.score
    if score is None:
        score = preact.new_ones(preact.shape[0], dtype=torch.float32)
    dot = plan.gemms.act_backward(
        grad_out,
        segments.tokens,
        w_out,
        segments.cu,
        preact,
        score,
        act,
        grad_preact,
        hidden,
    )
    return grad_preact, hidden, dot.unsqueeze(0)


def moe_mlp_backward(
    plan: CutePlan,
    grad_out: Tensor,
    input: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    offs: Tensor,
    topk_weights: Tensor | None,
    row_slots: Tensor | None,
    slot_rows: Tensor | None,
    preact: Tensor,
    output_mask: tuple[bool, ...],
    act: Activation,
) -> tuple[Tensor, ...]:
    """``aten::_moe_mlp_backward``: the seven gradients; (0,) where not wanted or absent."""
    operands = (input, w_in, w_out, topk_weights, None, None, None)
    wanted = [w and x is not None for w, x in zip(output_mask, operands, strict=True)]
    num_tokens, dim = input.shape
    segments = _Segments(
        plan.triton, offs, topk_weights, row_slots, slot_rows, num_tokens
    )
    num_rows = segments.rows.num_rows
    if min(num_tokens, num_rows) == 0:
        return triton_launch._zero_gradients(operands, output_mask, input)

    grads = [input.new_empty(0) for _ in operands]
    if not any(wanted):
        return tuple(grads)
    x, grad_out = map(triton_launch._row_major, (input, grad_out))
    cu, tokens = segments.cu, segments.tokens
    grad_preact, hidden, partials = _act_backward(
        plan, segments, grad_out, w_out, topk_weights, preact.contiguous(), act
    )
    if wanted[0]:
        routed = input.new_empty(num_rows, dim)
        plan.gemms.mm(grad_preact, w_in, cu, routed)
        grads[0] = segments.sum_per_token(routed, num_tokens)
    if wanted[1]:
        grads[1] = torch.empty_like(w_in)
        plan.gemms.weight_grad(x, tokens, grad_preact, cu, grads[1].mT)
    if wanted[2]:
        grads[2] = torch.empty_like(w_out)
        plan.gemms.weight_grad(grad_out, tokens, hidden, cu, grads[2])
    if wanted[3]:
        grads[3] = triton_launch._scale_grad(segments.rows, partials, topk_weights)
    return tuple(grads)
