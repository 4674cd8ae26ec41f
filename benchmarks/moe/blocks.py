"""MoE feed-forward blocks: what people write today, and ours.

Every block is a pair of functions with one meaning:

    route(logits_TE, k) -> indices_TK, weights_TK     softmax over all experts, the k best,
                                                      renormalized
    experts(x_TD, indices_TK, weights_TK, w_in_EGD, w_out_EDF) -> y_TD
                                                      SwiGLU experts, weighted sum

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
) -> Tensor:
    """Gather the tokens of one expert, two linears, weight, add back; the next expert.

    This is the form of the eager MoE layers of Hugging Face Transformers.

    Args:
        expert_order: the order in which experts are visited; None for ascending.
    """
    num_experts = len(w_in_EGD)
    mask_EKT = F.one_hot(indices_TK, num_experts).permute(2, 1, 0)
    hit_E = mask_EKT.sum((1, 2)).tolist()
    y_TD = torch.zeros_like(x_TD)
    for expert in expert_order or range(num_experts):
        if not hit_E[expert]:
            continue
        choices, tokens = torch.where(mask_EKT[expert])
        gate, up = F.linear(x_TD[tokens], w_in_EGD[expert]).chunk(2, dim=-1)
        o = F.linear(F.silu(gate) * up, w_out_EDF[expert])
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
) -> Tensor:
    """The same loop without its largest cost.

    The gradient of ``w[expert]`` is as large as all of ``w`` and there is one per expert; unbound
    once, ``w`` gets a single gradient.
    """
    w_in, w_out = w_in_EGD.unbind(), w_out_EDF.unbind()
    return loop_over_hit_experts(
        x_TD, indices_TK, weights_TK, w_in, w_out, expert_order
    )


def sorted_grouped_mm(
    x_TD: Tensor,
    indices_TK: Tensor,
    weights_TK: Tensor,
    w_in_EGD: Tensor,
    w_out_EDF: Tensor,
) -> Tensor:
    """Sort the rows by expert, two ``F.grouped_mm``, add the rows back."""
    indices_R = indices_TK.flatten()
    slots_R = indices_R.argsort(stable=True)
    tokens_R = slots_R // indices_TK.shape[1]
    counts_E = torch.bincount(indices_R, minlength=w_in_EGD.shape[0])
    offs_E = counts_E.cumsum(0, dtype=torch.int32)
    h_RG = F.grouped_mm(x_TD[tokens_R], w_in_EGD.transpose(-2, -1), offs=offs_E)
    gate, up = h_RG.chunk(2, dim=-1)
    o_RD = F.grouped_mm(F.silu(gate) * up, w_out_EDF.transpose(-2, -1), offs=offs_E)
    o_RD = o_RD * weights_TK.flatten()[slots_R, None]
    return torch.zeros_like(x_TD).index_add_(0, tokens_R, o_RD.to(x_TD.dtype))


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
