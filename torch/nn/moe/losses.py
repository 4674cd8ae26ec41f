"""What keeps the load of the experts balanced. Prototype: may change.

Terms: T tokens, E experts, K experts per token.
"""

import torch
from torch import Tensor
from torch.nn.moe._ids import check_dtype, expert_columns


__all__ = ["load_balancing_loss", "router_z_loss", "updated_expert_bias"]


def _check_floating(name: str, argument: str, value: Tensor) -> None:
    if not value.is_floating_point():
        raise TypeError(
            f"{name}: {argument} must be a floating point tensor, got {value.dtype}"
        )


def _check_same_tokens(name: str, topk_indices: Tensor, scores: Tensor) -> None:
    check_dtype(name, topk_indices)
    if topk_indices.dim() < 2 or topk_indices.shape[:-1] != scores.shape[:-1]:
        raise ValueError(
            f"{name}: scores (*, E) and topk_indices (*, K) must have the same leading "
            f"dimensions, at least one, got {tuple(scores.shape)} and "
            f"{tuple(topk_indices.shape)}"
        )


def _counts(topk_indices: Tensor, num_experts: int) -> Tensor:
    """``(*, S, K)`` ids to ``(*, E)`` numbers of slots; -1 and E count nowhere."""
    ids = expert_columns(topk_indices, num_experts).flatten(-2)
    # Integers, so that the order of the additions does not matter.
    counts = ids.new_zeros((*ids.shape[:-1], num_experts + 1))
    return counts.scatter_add(-1, ids, torch.ones_like(ids))[..., :num_experts]


def _mean(values: Tensor, dim: int) -> Tensor:
    """The mean, 0 of nothing: a rank without tokens adds no loss and no gradient."""
    # On a tensor: the exporter takes max(T, 1) of a dynamic T for T.
    count = values.new_full((), values.shape[dim]).clamp(min=1)
    return values.sum(dim) / count


def load_balancing_loss(
    scores: Tensor, topk_indices: Tensor, *, per_sequence: bool = False
) -> Tensor:
    r"""The product of how often experts are chosen and how much they are wanted.

    .. math::
        E \sum_e f_e P_e, \quad
        f_e = \frac{\text{slots of expert } e}{\text{all slots}}, \quad
        P_e = \operatorname{mean}_t \frac{s_{t,e}}{\sum_j s_{t,j}}

    It is 1 when either is uniform, up to E when all tokens want and choose one
    expert, and 0 without tokens. Only :math:`P` has a gradient. Switch Transformer
    (arXiv:2101.03961, equation 4) for K = 1; per sequence it is the complementary loss
    of DeepSeek-V3 (arXiv:2412.19437, equations 17-20). Multiply by a coefficient of
    your choice.

    .. note::
        Equation 18 of DeepSeek-V3 counts the K experts with the highest scores, without
        the bias of the selection. Where a bias took part in the choice
        (``balance_bias=True`` of :class:`torch.nn.MoE`), pass
        ``F.moe_topk(logits, k, score=...)[0]`` here instead of the chosen experts.

    Args:
        scores: ``(*, E)`` floating point, not negative: softmax or sigmoid of the
            router's logits.
        topk_indices: ``(*, K)`` int32 or int64; -1 and E mean no expert and count
            nowhere.
        per_sequence: balance each sequence by itself, and average: ``scores`` must
            be ``(*, S, E)`` with sequences of S tokens. Otherwise all tokens are
            balanced together.

    Returns:
        Tensor: a float32 scalar (float64 for float64 scores).

    Raises:
        ValueError: shapes that do not belong together.
        TypeError: a dtype breaks a rule above, as when the arguments are swapped.
        IndexError: an expert id is outside [-1, E]. On CUDA this is a device-side
            assert.
    """
    _check_floating("load_balancing_loss", "scores", scores)
    _check_same_tokens("load_balancing_loss", topk_indices, scores)
    if not per_sequence:
        scores, topk_indices = scores.flatten(0, -2), topk_indices.flatten(0, -2)
    elif scores.dim() < 3:
        raise ValueError(
            "load_balancing_loss: per_sequence=True needs scores of shape (*, S, E), "
            f"got {tuple(scores.shape)}"
        )
    if scores.dtype != torch.float64:
        scores = scores.float()
    num_experts = scores.shape[-1]
    # The guard of moe_topk, against a sum of 0.
    wanted = _mean(scores / (scores.sum(-1, keepdim=True) + 1e-20), -2)
    counts = _counts(topk_indices, num_experts).to(scores.dtype)
    # Without a single slot there is nothing to balance: 0, not 0 / 0.
    chosen = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return num_experts * _mean((chosen * wanted).sum(-1).flatten(), 0)


def router_z_loss(logits: Tensor) -> Tensor:
    r"""The mean square of the logits' log-sum-exp, which keeps logits small.

    Large logits lose precision in the softmax. ST-MoE (arXiv:2202.08906, equation 5).

    Args:
        logits: ``(*, E)`` floating point.

    Returns:
        Tensor: a float32 scalar (float64 for float64 logits); 0 without tokens.

    Raises:
        TypeError: ``logits`` is not floating point.
    """
    _check_floating("router_z_loss", "logits", logits)
    if logits.dtype != torch.float64:
        logits = logits.float()
    return _mean(logits.logsumexp(-1).square().flatten(), 0)


def updated_expert_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    r"""The next selection bias of balancing without an auxiliary loss.

    The bias of an expert with less than the mean load goes up by ``rate``, with more
    it goes down, and with exactly the mean it stays. It takes part in the choice of
    experts only (``bias`` of :func:`torch.nn.functional.moe_topk`), so it disturbs no
    gradient. Loss-free balancing (arXiv:2408.15664, algorithm 1).

    Args:
        bias: ``(E,)`` float32 or float64. Lower precisions are refused: there a step
            of 0.001 rounds away as soon as the bias is large, and balancing stops.
        counts: ``(E,)`` integers, slots per expert of the last step, summed over all
            ranks that share the experts.
        rate: a step, 0.001 in the paper.

    Returns:
        Tensor: a new tensor like ``bias``; assign it when the step is over.

    Raises:
        ValueError: shapes that differ, or are not ``(E,)``.
        TypeError: a dtype breaks a rule above.
    """
    if bias.dim() != 1 or bias.shape != counts.shape:
        raise ValueError(
            "updated_expert_bias: bias and counts must have the same shape (E,), got "
            f"{tuple(bias.shape)} and {tuple(counts.shape)}"
        )
    if bias.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"updated_expert_bias: bias must be float32 or float64, got {bias.dtype}"
        )
    if counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool:
        raise TypeError(
            f"updated_expert_bias: counts must be integers, got {counts.dtype}"
        )
    # mean - count, times E: exact in integers, but not in 32 bits
    counts = counts.long()
    missing = counts.sum() - counts * counts.numel()
    return bias.detach() + rate * missing.sign().to(bias.dtype)
