"""Routing rules that choose (token, expert) pairs for the hardware's sake.

Terms: T tokens, E experts, K experts per token, f_e tokens that chose expert e.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.moe._ids import check_dtype, expert_columns


__all__ = ["TokenRounding", "token_rounding"]

_ROUNDINGS = ("nearest", "up", "down")


class TokenRounding(NamedTuple):
    """A routing, as :func:`torch.nn.functional.moe_mlp` takes it.

    Attributes:
        topk_indices: ``(*, E)``; entry e is e where the token goes to expert e, else
            -1. The routing of the router, ``(*, K)``, when not training.
        topk_weights: of the same shape, zero where the index is -1.
        num_rows: the most rows that this routing can have, a constant of the shapes.
    """

    topk_indices: Tensor
    topk_weights: Tensor
    num_rows: int


def token_rounding(
    topk_indices: Tensor,
    topk_weights: Tensor,
    scores: Tensor,
    tile: int,
    *,
    rounding: Literal["nearest", "up", "down"] = "nearest",
    training: bool = True,
) -> TokenRounding:
    r"""Rounds the number of tokens of every expert to a multiple of ``tile``.

    Grouped matmuls work in tiles of rows. When experts get few tokens each, the tiles
    that are not full cost a good part of the time. This changes a few (token, expert)
    pairs so that there are none: an expert that rounds down drops the tokens that want
    it least, one that rounds up also takes the tokens, among those that did not choose
    it, that come closest to choosing it. No expert gains or loses ``tile`` tokens or
    more. This is the token rounding of SonicMoE (arXiv:2512.14080, Algorithm 4; its
    nearest, up and down rules).

    The kept pairs keep their weight of ``topk_weights``; an added pair has its weight
    from ``scores``. Gradients flow through both. Nothing is synchronised with the host.

    .. warning::
        A prototype. The choice for one token depends on the other tokens, later ones
        included, so it must be off (``training=False``) in evaluation and generation.
        Quality is reported to hold when experts get two tiles or more on average, and
        to suffer at one.

    Args:
        topk_indices: ``(*, K)`` int32 or int64, the experts of each token; -1 and E
            mean no expert. They must be distinct, which is not checked: an expert
            that a token names twice has it once, with either weight.
        topk_weights: ``(*, K)`` float32 or float64, their weights.
        scores: ``(*, E)`` of the dtype of ``topk_weights``, how much each token wants
            each expert: the softmax or sigmoid of the router's logits, with its scale.
        tile: rows of a tile of the kernel in use, at most the number of tokens where
            there are any. When not training, any number from 1 on.
        rounding: "nearest" (halves go up), "up" or "down". Where rounding up asks for
            more tokens than there are, it rounds down.
        training: when False, return the arguments as they are, for any number of
            tokens.

    Returns:
        TokenRounding: to be used as ``F.moe_mlp(x, r.topk_indices, r.topk_weights,
        w_in, w_out, num_rows=r.num_rows)``.

    Raises:
        ValueError: shapes that do not belong together, a tile that is not between 1
            and the number of tokens, an unknown rounding.
        TypeError: a dtype breaks a rule above.
        IndexError: when training, an expert id is outside [-1, E]. On CUDA this is a
            device-side assert.

    Example::

        >>> logits = torch.randn(256, 8)
        >>> scores = logits.softmax(-1)
        >>> topk_weights, topk_indices = scores.topk(2)
        >>> rounded = token_rounding(topk_indices, topk_weights, scores, 32)
        >>> counts = (rounded.topk_indices >= 0).sum(0)
        >>> assert (counts % 32 == 0).all()
    """
    _check(topk_indices, topk_weights, scores, tile, rounding, training)
    num_tokens = topk_indices.shape[:-1].numel()
    num_slots = topk_indices.numel()
    if not training:
        return TokenRounding(topk_indices, topk_weights, num_slots)

    num_experts = scores.shape[-1]
    chosen, weights = _dense(
        topk_indices.reshape(num_tokens, topk_indices.shape[-1]),
        topk_weights.reshape(num_tokens, topk_indices.shape[-1]),
        scores.reshape(num_tokens, num_experts),
    )
    target = _rounded_counts(chosen.sum(0), num_tokens, tile, rounding)
    kept = _preference_ranks(chosen, weights.detach()) < target
    experts = torch.arange(
        num_experts, dtype=topk_indices.dtype, device=topk_indices.device
    )
    return TokenRounding(
        torch.where(kept, experts, -1).view(scores.shape),
        torch.where(kept, weights, 0.0).view(scores.shape),
        _most_rows(num_tokens, num_slots, num_experts, tile, rounding),
    )


def _check(
    topk_indices: Tensor,
    topk_weights: Tensor,
    scores: Tensor,
    tile: int,
    rounding: str,
    training: bool,
) -> None:
    if topk_indices.dim() == 0 or topk_indices.shape != topk_weights.shape:
        raise ValueError(
            "token_rounding: topk_indices and topk_weights must have the same shape "
            f"(*, K), got {tuple(topk_indices.shape)} and {tuple(topk_weights.shape)}"
        )
    if scores.dim() == 0 or scores.shape[:-1] != topk_indices.shape[:-1]:
        raise ValueError(
            "token_rounding: scores must have shape (*, E) with the leading dimensions "
            f"{tuple(topk_indices.shape[:-1])} of topk_indices, got {tuple(scores.shape)}"
        )
    check_dtype("token_rounding", topk_indices)
    if (
        scores.dtype not in (torch.float32, torch.float64)
        or topk_weights.dtype != scores.dtype
    ):
        raise TypeError(
            "token_rounding: scores and topk_weights must both be float32 or both be "
            f"float64, got {scores.dtype} and {topk_weights.dtype}"
        )
    if rounding not in _ROUNDINGS:
        raise ValueError(
            f"token_rounding: rounding must be one of {_ROUNDINGS}, got {rounding!r}"
        )
    if tile < 1:
        raise ValueError(f"token_rounding: tile must be at least 1, got {tile}")
    num_tokens = topk_indices.shape[:-1].numel()
    if training and 0 < num_tokens < tile:
        raise ValueError(
            "token_rounding: tile must be between 1 and the number of tokens, "
            f"{num_tokens}, got {tile}"
        )


def _dense(indices: Tensor, weights: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """``(T, E)`` chosen by the router; its weight there, the score elsewhere."""
    num_tokens, num_experts = scores.shape
    columns = expert_columns(indices, num_experts)
    chosen = torch.zeros(
        (num_tokens, num_experts + 1), dtype=torch.bool, device=scores.device
    )
    chosen = chosen.scatter(1, columns, True)
    wide = torch.cat([scores, scores.new_zeros((num_tokens, 1))], dim=1)
    dense = wide.scatter(1, columns, weights)
    return chosen[:, :num_experts], dense[:, :num_experts]


def _rounded_counts(
    counts: Tensor, num_tokens: int, tile: int, rounding: str
) -> Tensor:
    """``(E,)`` multiples of ``tile`` near ``counts``, none above ``num_tokens``."""
    added = {"nearest": tile // 2, "up": tile - 1, "down": 0}[rounding]
    target = (counts + added) // tile * tile
    return torch.where(target > num_tokens, target - tile, target)


def _preference_ranks(chosen: Tensor, weights: Tensor) -> Tensor:
    """``(T, E)`` place of each token in the order in which an expert takes tokens.

    Tokens that chose the expert come first. Within them, and within the others, the
    larger weight comes first, and of equal ones the earlier token.
    """
    order = weights.argsort(dim=0, descending=True, stable=True)
    chosen_in_order = chosen.gather(0, order)
    before = chosen_in_order.cumsum(0)
    rank = torch.where(
        chosen_in_order,
        before - 1,
        before[-1:] + (~chosen_in_order).cumsum(0) - 1,
    )
    return torch.empty_like(rank).scatter(0, order, rank)


def _most_rows(
    num_tokens: int, num_slots: int, num_experts: int, tile: int, rounding: str
) -> int:
    """An upper bound of the sum of the rounded counts."""
    added = {"nearest": tile // 2, "up": tile - 1, "down": 0}[rounding]
    rows = num_slots + min(num_experts, num_slots) * added
    return min(rows // tile, num_tokens // tile * num_experts) * tile
