"""The router: scores, selection and weights of ``F.moe_topk`` in one kernel, and its backward.

Letters: T tokens, E experts, K experts per token, G groups of experts.

Selection works on integers that sort like (score, lower index first), so that ties
have one answer and no two candidates are equal:

    high 32 bits    the float32 score, its bits mapped to a signed integer of the same
                    order; NaN above everything, as torch.sort has it
    low 32 bits     E - 1 - index

One program computes a token in one layout whatever T is, so its result does
not depend on other tokens.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

import torch
from torch import Tensor

from .configs import itself, OPTIONS


# Below every packed candidate: padding, and groups that were not chosen.
_NONE = tl.constexpr(-(2**63))
# Added to the sum of scores, which may be 0, as in F.moe_topk.
_SUM_GUARD = tl.constexpr(1e-20)
# Scores a program holds at once.
_BLOCK_ELEMENTS = 2048


@triton.jit
def _pack(value, index, count):
    """int64 that sorts like (value, lower index first); see the module docstring."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    key = tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (key.to(tl.int64) << 32) | (count - 1 - index).to(tl.int64)


@triton.jit
def _unpack_value(packed):
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _row_statistics(x, SOFTMAX: tl.constexpr):
    """The row's maximum and sum, which a score needs besides its own logit."""
    if SOFTMAX:
        top = tl.max(x, 1)
        total = tl.sum(tl.exp(x - top[:, None]), 1)
    else:
        top = tl.zeros((x.shape[0],), dtype=tl.float32)
        total = top
    return top, total


@triton.jit
def _score(x, top, total, SOFTMAX: tl.constexpr):
    """Scores of logits ``x`` (rows, columns) in float32."""
    if SOFTMAX:
        p = tl.exp(x - top[:, None]) / total[:, None]
    else:
        p = tl.sigmoid(x)
    return p


@triton.jit
def _keep_best_groups(
    packed, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SUM_OF_TWO: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """``packed`` (BLOCK_T, BLOCK_G * BLOCK_S) with the other groups' candidates removed.

    The score of a group is its best candidate, or the sum of its two best.
    """
    members = tl.reshape(packed, (BLOCK_T, BLOCK_G, BLOCK_S))
    best = tl.max(members, 2)
    value = _unpack_value(best)
    if SUM_OF_TWO:
        rest = tl.where(members == best[:, :, None], _NONE, members)
        value += _unpack_value(tl.max(rest, 2))
    group = tl.arange(0, BLOCK_G)[None, :]
    groups = tl.where(group < NUM_GROUPS, _pack(value, group, NUM_GROUPS), _NONE)
    # A group is chosen if it is not below the last chosen one.
    last = tl.max(groups, 1)
    rest = groups
    for _ in range(1, TOP_GROUPS):
        rest = tl.where(rest == last[:, None], _NONE, rest)
        last = tl.max(rest, 1)
    chosen = groups >= last[:, None]
    members = tl.where(chosen[:, :, None], members, _NONE)
    return tl.reshape(members, (BLOCK_T, BLOCK_G * BLOCK_S))


@triton.jit(do_not_specialize=["num_tokens"])
def topk_kernel(
    logits,  # (T, E), contiguous last dimension
    bias,  # (E,) by stride
    topk_indices,  # (T, K) int64 contiguous, written
    topk_weights,  # (T, K) float32 contiguous, written
    num_tokens, num_experts, stride_logits, stride_bias, scale,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Chooses the experts of BLOCK_T tokens and weighs them. Grid: (cdiv(T, BLOCK_T),).

    Columns are (group, member), each padded to a power of two.
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_range = t < num_tokens
    row = logits + t[:, None].to(tl.int64) * stride_logits
    column = tl.arange(0, BLOCK_G * BLOCK_S)
    member = column % BLOCK_S
    expert = (column // BLOCK_S) * GROUP_SIZE + member
    real = (member < GROUP_SIZE) & (expert < num_experts)
    mask = in_range[:, None] & real[None, :]
    x = tl.load(row + expert[None, :], mask=mask, other=-float("inf")).to(tl.float32)
    # Rows past the end are 0: from -inf they would become NaN, which is harmless but avoidable.
    x = tl.where(in_range[:, None], x, 0.0)
    top, total = _row_statistics(x, SOFTMAX)
    choice = _score(x, top, total, SOFTMAX)
    if HAS_BIAS:
        b = tl.load(bias + expert.to(tl.int64) * stride_bias, mask=real, other=0.0)
        choice += b[None, :].to(tl.float32)
    packed = tl.where(real[None, :], _pack(choice, expert[None, :], num_experts), _NONE)
    if NUM_GROUPS > 1:
        packed = _keep_best_groups(
            packed, NUM_GROUPS, TOP_GROUPS, HAS_BIAS and GROUP_SIZE > 1,
            BLOCK_T, BLOCK_G, BLOCK_S,
        )  # fmt: skip
    # k is small: k maxima are no slower than a partial sort, and compile much faster.
    k = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.full((BLOCK_T, BLOCK_K), _NONE, dtype=tl.int64)
    for i in range(TOP_K):
        best = tl.max(packed, 1)[:, None]
        chosen = tl.where(k == i, best, chosen)
        packed = tl.where(packed == best, _NONE, packed)

    mask = in_range[:, None] & (k < TOP_K)
    index = num_experts - 1 - (chosen & 0xFFFFFFFF).to(tl.int32)
    # The weight is the score without the bias, computed again from the logit.
    x = tl.load(row + index, mask=mask, other=0.0).to(tl.float32)
    w = tl.where(mask, _score(x, top, total, SOFTMAX), 0.0)
    if NORMALIZE:
        w /= (tl.sum(w, 1) + _SUM_GUARD)[:, None]
    slot = t[:, None].to(tl.int64) * TOP_K + k
    tl.store(topk_indices + slot, index.to(tl.int64), mask=mask)
    tl.store(topk_weights + slot, w * scale, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def topk_backward_kernel(
    grad_weights,  # (T, K) contiguous
    logits,  # (T, E), contiguous last dimension
    topk_indices,  # (T, K) int64 contiguous
    grad_logits,  # (T, E) contiguous, written
    num_tokens, num_experts, stride_logits, scale,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """d(logits) of BLOCK_T tokens. Grid: (cdiv(T, BLOCK_T),).

    With p the scores, s_k those of the chosen and S their sum:

        ds_k = scale * (g_k - sum_i g_i s_i / S) / S     or scale * g_k
        softmax: dlogit_e = [e chosen] ds_k s_k - p_e * sum_i ds_i s_i
        sigmoid: dlogit_e = [e chosen] ds_k s_k (1 - s_k)
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_range = t < num_tokens
    row = logits + t[:, None].to(tl.int64) * stride_logits
    expert = tl.arange(0, BLOCK_E)
    all_mask = in_range[:, None] & (expert < num_experts)[None, :]
    x = tl.load(row + expert[None, :], mask=all_mask, other=-float("inf"))
    x = tl.where(in_range[:, None], x.to(tl.float32), 0.0)
    top, total = _row_statistics(x, SOFTMAX)

    k = tl.arange(0, BLOCK_K)[None, :]
    mask = in_range[:, None] & (k < TOP_K)
    slot = t[:, None].to(tl.int64) * TOP_K + k
    # -1, also of padded lanes, is no expert and gets no gradient.
    index = tl.load(topk_indices + slot, mask=mask, other=-1).to(tl.int32)
    mask &= (index >= 0) & (index < num_experts)
    chosen_x = tl.load(row + index, mask=mask, other=0.0).to(tl.float32)
    s = tl.where(mask, _score(chosen_x, top, total, SOFTMAX), 0.0)
    grad = tl.load(grad_weights + slot, mask=mask, other=0.0).to(tl.float32) * scale
    if NORMALIZE:
        sum_s = (tl.sum(s, 1) + _SUM_GUARD)[:, None]
        grad = (grad - (tl.sum(grad * s, 1)[:, None] / sum_s)) / sum_s
    weighted = tl.where(mask, grad * s, 0.0)
    if SOFTMAX:
        out = _score(x, top, total, SOFTMAX) * -tl.sum(weighted, 1)[:, None]
    else:
        out = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
        weighted *= 1.0 - s
    for i in range(TOP_K):
        index_i = tl.sum(tl.where(k == i, index, 0), 1)
        weighted_i = tl.sum(tl.where(k == i, weighted, 0.0), 1)
        hit = expert[None, :] == index_i[:, None]
        out += tl.where(hit, weighted_i[:, None], 0.0)
    out_ptrs = grad_logits + t[:, None].to(tl.int64) * num_experts + expert[None, :]
    tl.store(out_ptrs, out.to(grad_logits.dtype.element_ty), mask=all_mask)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _block(columns: int) -> dict[str, int]:
    """Tokens, warps and options of a program that holds ``columns`` scores per token."""
    block_t = max(1, _BLOCK_ELEMENTS // columns)
    num_warps = 8 if columns > 1024 else 4
    return {"BLOCK_T": min(block_t, 32), "num_warps": num_warps, **OPTIONS}


def _grid(num_tokens: int, block_t: int) -> tuple[int]:
    # At least 1: a compiler may not know that there are tokens.
    return (torch.sym_max(triton.cdiv(num_tokens, block_t), 1),)


def topk_columns(num_experts: int, num_groups: int | None) -> int:
    """Padded columns of a token: whether a program can hold them decides eligibility."""
    groups = num_groups or 1
    size = triton.next_power_of_2(max(num_experts // groups, 2))
    return triton.next_power_of_2(groups) * size


def moe_topk(
    logits: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    score: str = "softmax",
    normalize: bool = True,
    num_groups: int | None = None,
    top_groups: int | None = None,
    scale: float = 1.0,
    kernel: Callable[[Any], Any] = itself,
    bound: Callable[[int], float] = itself,
) -> tuple[Tensor, Tensor]:
    """``aten::_moe_topk``: topk_indices (T, K) int64 and topk_weights (T, K) float32.

    Args:
        logits: (T, E) bfloat16, float16 or float32.
        k: experts per token.
        bias: (E,) or None.
        score, normalize, num_groups, top_groups, scale: as in ``F.moe_topk``; checked.
        kernel, bound: as in ``permutation.moe_permutation``.
    """
    num_tokens, num_experts = logits.shape
    logits = _rows(logits)
    topk_indices = torch.empty(num_tokens, k, dtype=torch.int64, device=logits.device)
    topk_weights = torch.empty_like(topk_indices, dtype=torch.float32)
    if bound(num_tokens) == 0:
        return topk_indices, topk_weights
    groups = num_groups or 1
    size = num_experts // groups
    columns = topk_columns(num_experts, num_groups)
    block_g = triton.next_power_of_2(groups)
    args = _block(columns)
    kernel(topk_kernel)[_grid(num_tokens, args["BLOCK_T"])](
        logits,
        logits if bias is None else bias,
        topk_indices,
        topk_weights,
        num_tokens,
        num_experts,
        logits.stride(0),
        0 if bias is None else bias.stride(0),
        scale,
        SOFTMAX=score == "softmax",
        NORMALIZE=normalize,
        HAS_BIAS=bias is not None,
        TOP_K=k,
        NUM_GROUPS=groups,
        TOP_GROUPS=top_groups or 1,
        GROUP_SIZE=size,
        BLOCK_G=block_g,
        BLOCK_S=columns // block_g,
        BLOCK_K=triton.next_power_of_2(k),
        **args,
    )
    return topk_indices, topk_weights


def moe_topk_backward(
    grad_weights: Tensor,
    logits: Tensor,
    topk_indices: Tensor,
    *,
    score: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    kernel: Callable[[Any], Any] = itself,
    bound: Callable[[int], float] = itself,
) -> Tensor:
    """``aten::_moe_topk_backward``: d(logits) (T, E), in the dtype of ``logits``.

    Args:
        grad_weights: (T, K) gradient of topk_weights.
        logits: (T, E), as in the forward.
        topk_indices: (T, K) int64, as the forward returned them.
        score, normalize, scale: as in the forward.
        kernel, bound: as in ``permutation.moe_permutation``.
    """
    num_tokens, num_experts = logits.shape
    logits = _rows(logits)
    grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if bound(grad_logits.numel()) == 0:
        return grad_logits
    block_e = topk_columns(num_experts, None)
    args = _block(block_e)
    kernel(topk_backward_kernel)[_grid(num_tokens, args["BLOCK_T"])](
        grad_weights.contiguous(),
        logits,
        topk_indices.contiguous(),
        grad_logits,
        num_tokens,
        num_experts,
        logits.stride(0),
        scale,
        SOFTMAX=score == "softmax",
        NORMALIZE=normalize,
        TOP_K=topk_indices.shape[1],
        BLOCK_E=block_e,
        BLOCK_K=triton.next_power_of_2(topk_indices.shape[1]),
        **args,
    )
    return grad_logits
