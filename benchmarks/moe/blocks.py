"""MoE feed-forward blocks: what people write today, and ours.

The demo compares four of them; cpu_ops.py all, with biases and other gates where a model has them.
Every block is a pair of functions with one meaning:

    route(logits_TE, k) -> indices_TK, weights_TK     softmax over all experts, the k best,
                                                      renormalized
    experts(x_TD, indices_TK, weights_TK, w_in_EGD, w_out_EDF) -> y_TD
                                                      gated experts (SwiGLU), weighted sum

T tokens, D model dim, F expert hidden dim, G = 2*F (gate rows, then up rows), E experts,
K = k experts per token, R = T*K routed rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class MoEBlock(NamedTuple):
    """A router and the experts it feeds."""

    route: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

    def __call__(
        self,
        x_TD: Tensor,
        logits_TE: Tensor,
        k: int,
        w_in_EGD: Tensor,
        w_out_EDF: Tensor,
    ) -> Tensor:
        return self.experts(x_TD, *self.route(logits_TE, k), w_in_EGD, w_out_EDF)


def swiglu(h_RG: Tensor) -> Tensor:
    """(R, 2*F) with the gates first -> (R, F)."""
    gate, up = h_RG.chunk(2, dim=-1)
    return F.silu(gate) * up


def clamped_swiglu(h_RG: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gpt-oss's gate: (R, 2*F) with gates and ups interleaved -> (R, F)."""
    gate, up = h_RG[..., 0::2], h_RG[..., 1::2]
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def route(logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Plain torch router: indices (T, k) int64, weights (T, k) float32."""
    weights_TK, indices_TK = logits_TE.softmax(-1, dtype=torch.float32).topk(k)
    return indices_TK, weights_TK / weights_TK.sum(-1, keepdim=True)


def loop_over_hit_experts(
    x_TD: Tensor,
    indices_TK: Tensor,
    weights_TK: Tensor,
    w_in_EGD: Tensor | Sequence[Tensor],
    w_out_EDF: Tensor | Sequence[Tensor],
    expert_order: Sequence[int] | None = None,
    *,
    b_in_EG: Tensor | Sequence[Tensor] | None = None,
    b_out_ED: Tensor | Sequence[Tensor] | None = None,
    gate: Callable[[Tensor], Tensor] = swiglu,
) -> Tensor:
    """Gather the tokens of one expert, two linears, weight, add back; the next expert.

    This is the form of the eager MoE layers of Hugging Face Transformers.

    Args:
        expert_order: the order in which experts are visited; None for ascending.
        gate: (rows, G) -> (rows, F).
    """
    num_experts = len(w_in_EGD)
    mask_EKT = F.one_hot(indices_TK, num_experts).permute(2, 1, 0)
    hit_E = mask_EKT.sum((1, 2)).tolist()
    y_TD = torch.zeros_like(x_TD)
    for expert in expert_order or range(num_experts):
        if not hit_E[expert]:
            continue
        choices, tokens = torch.where(mask_EKT[expert])
        b_in = None if b_in_EG is None else b_in_EG[expert]
        b_out = None if b_out_ED is None else b_out_ED[expert]
        h = F.linear(x_TD[tokens], w_in_EGD[expert], b_in)
        o = F.linear(gate(h), w_out_EDF[expert], b_out)
        o = o * weights_TK[tokens, choices, None]
        y_TD.index_add_(0, tokens, o.to(y_TD.dtype))
    return y_TD


def loop_over_unbound_experts(
    x_TD: Tensor,
    indices_TK: Tensor,
    weights_TK: Tensor,
    w_in_EGD: Tensor,
    w_out_EDF: Tensor,
    expert_order: Sequence[int] | None = None,
    *,
    b_in_EG: Tensor | None = None,
    b_out_ED: Tensor | None = None,
    gate: Callable[[Tensor], Tensor] = swiglu,
) -> Tensor:
    """The same loop without its largest cost.

    The gradient of ``w[expert]`` is as large as all of ``w`` and there is one per expert; unbound
    once, ``w`` gets a single gradient.
    """
    return loop_over_hit_experts(
        x_TD,
        indices_TK,
        weights_TK,
        w_in_EGD.unbind(),
        w_out_EDF.unbind(),
        expert_order,
        b_in_EG=None if b_in_EG is None else b_in_EG.unbind(),
        b_out_ED=None if b_out_ED is None else b_out_ED.unbind(),
        gate=gate,
    )


def _sorted_by_expert(
    indices_TK: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots in expert order (R), the expert of each (R), and the end row of every expert (E)."""
    experts_R, slots_R = indices_TK.flatten().sort(stable=True)
    counts_E = torch.histc(
        experts_R.float(), bins=num_experts, min=0, max=num_experts - 1
    )
    return slots_R, experts_R, counts_E.cumsum(0, dtype=torch.int32)


def _sum_over_slots(o_RD: Tensor, slots_R: Tensor, weights_TK: Tensor) -> Tensor:
    """Weight the rows, put them back into slot order and sum those of a token."""
    T, K = weights_TK.shape
    o_RD = o_RD * weights_TK.flatten()[slots_R, None]
    rows_R = torch.empty_like(slots_R)
    rows_R[slots_R] = torch.arange(len(slots_R), device=slots_R.device)
    return o_RD[rows_R].view(T, K, -1).sum(1)


def sorted_grouped_mm(
    x_TD: Tensor,
    indices_TK: Tensor,
    weights_TK: Tensor,
    w_in_EGD: Tensor,
    w_out_EDF: Tensor,
    *,
    b_in_EG: Tensor | None = None,
    b_out_ED: Tensor | None = None,
    gate: Callable[[Tensor], Tensor] = swiglu,
) -> Tensor:
    """Sort the rows by expert, two ``F.grouped_mm``, sum the rows of a token.

    This is the form of "grouped_mm" in Hugging Face Transformers.
    """
    slots_R, experts_R, offs_E = _sorted_by_expert(indices_TK, w_in_EGD.shape[0])
    x_RD = x_TD[slots_R // indices_TK.shape[1]]
    h_RG = F.grouped_mm(x_RD, w_in_EGD.mT, offs=offs_E)
    if b_in_EG is not None:
        h_RG = h_RG + b_in_EG[experts_R]
    o_RD = F.grouped_mm(gate(h_RG), w_out_EDF.mT, offs=offs_E)
    if b_out_ED is not None:
        o_RD = o_RD + b_out_ED[experts_R]
    return _sum_over_slots(o_RD, slots_R, weights_TK).to(x_TD.dtype)


def three_grouped_mm(
    x_TD: Tensor,
    indices_TK: Tensor,
    weights_TK: Tensor,
    w1_EFD: Tensor,
    w3_EFD: Tensor,
    w_out_EDF: Tensor,
) -> Tensor:
    """The form of torchtitan: gate and up are two matrices, the sum over slots is fp32.

    Args:
        w1_EFD: the gates.
        w3_EFD: the ups.
    """
    slots_R, _, offs_E = _sorted_by_expert(indices_TK, w1_EFD.shape[0])
    T, K = indices_TK.shape
    x_RD = x_TD[slots_R // K]
    h_RF = F.silu(F.grouped_mm(x_RD, w1_EFD.mT, offs=offs_E))
    h_RF = h_RF * F.grouped_mm(x_RD, w3_EFD.mT, offs=offs_E)
    o_RD = F.grouped_mm(h_RF, w_out_EDF.mT, offs=offs_E)
    slots_RD = torch.zeros_like(o_RD).index_copy(0, slots_R, o_RD)
    y_T1D = weights_TK.float()[:, None] @ slots_RD.view(T, K, -1).float()
    return y_T1D.squeeze(1).to(x_TD.dtype)


def batched_mm(
    x_TD: Tensor,
    indices_TK: Tensor,
    weights_TK: Tensor,
    w_in_EGD: Tensor,
    w_out_EDF: Tensor,
    *,
    b_in_EG: Tensor | None = None,
    b_out_ED: Tensor | None = None,
    gate: Callable[[Tensor], Tensor] = swiglu,
) -> Tensor:
    """Copy the matrices of one expert per slot, then ``bmm``.

    This is the form of "batched_mm" in Hugging Face Transformers, for a few tokens.
    """
    T, K = indices_TK.shape
    experts_R = indices_TK.flatten()
    x_RD1 = x_TD.repeat_interleave(K, 0)[..., None]
    h_RG = torch.bmm(w_in_EGD[experts_R], x_RD1).squeeze(-1)
    if b_in_EG is not None:
        h_RG = h_RG + b_in_EG[experts_R]
    o_RD = torch.bmm(w_out_EDF[experts_R], gate(h_RG)[..., None]).squeeze(-1)
    if b_out_ED is not None:
        o_RD = o_RD + b_out_ED[experts_R]
    o_RD = o_RD * weights_TK.flatten()[:, None]
    return o_RD.view(T, K, -1).sum(1).to(x_TD.dtype)


def unfused(expert_order: Sequence[int] | None = None) -> MoEBlock:
    """The baseline of every comparison: the faster of the two loops.

    Args:
        expert_order: the order in which experts are visited; None for ascending. Another order
            changes only the order of the sums, and so shows what rounding alone does.
    """
    experts = functools.partial(loop_over_unbound_experts, expert_order=expert_order)
    return MoEBlock(route, experts)


def unfused_indexed() -> MoEBlock:
    """The loop as it stands in model code, indexing the stacked weights in every turn."""
    return MoEBlock(route, loop_over_hit_experts)


def grouped_mm() -> MoEBlock:
    return MoEBlock(route, sorted_grouped_mm)


def fused() -> MoEBlock:
    """``F.moe_topk`` and ``F.moe_mlp``."""
    return MoEBlock(F.moe_topk, F.moe_mlp)
