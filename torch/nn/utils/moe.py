"""Losses, counts and routings for training a Mixture-of-Experts layer. Prototype: may change.

All functions are pure functions of tensors. They work on any router's output and any
device, and keep no state between steps. They are losses and a bias that balance the load of the
experts, and a routing in whole tiles of rows. Losses and counts take jagged nested tensors, too.

Padding is ignored: no count, sum or mean includes tokens that a mask excludes, or tokens
whose ids all mean "no expert".

Terms: T tokens, E experts, K experts per token, f_e tokens that chose expert e.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


__all__ = [
    "TokenRounding",
    "balance_counts",
    "expert_counts",
    "load_balancing_loss",
    "moe_mlp_rounded",
    "router_z_loss",
    "token_rounding",
    "updated_expert_bias",
]

_ROUNDINGS = ("nearest", "up", "down")


def _tokens(x: Any) -> Any:
    """``x``, or the values of a jagged nested tensor."""
    return x.values() if x is not None and x.is_nested else x


def _check_ids(name: str, topk_indices: Tensor) -> None:
    if topk_indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{name}: topk_indices must have dtype int32 or int64, got "
            f"{topk_indices.dtype}"
        )


def _below_functorch(tensor: Tensor) -> Tensor:
    """Unwraps the tensors of torch.func; for vmap, the result is the whole batch."""
    if not torch.compiler.is_compiling():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _assert_all(condition: Tensor, message: str) -> None:
    """Asserts without a synchronisation; of a DTensor, this rank's part."""
    # vmap has no rule for the assertion, so it checks the whole batch at once.
    condition = _below_functorch(condition)
    if is_traceable_wrapper_subclass(condition) and hasattr(condition, "to_local"):
        condition = condition.to_local()
    torch._assert_async(condition.all(), message)


def _assert_in_range(name: str, ids: Tensor, num_experts: int) -> None:
    """Asserts that ids are in [-1, E]."""
    _assert_all(
        (ids >= -1) & (ids <= num_experts),
        f"{name}: topk_indices must be in [-1, E] = [-1, {num_experts}]",
    )


def _expert_columns(name: str, topk_indices: Tensor, num_experts: int) -> Tensor:
    """``(*, K)`` int64 ids in which "no expert" is E. Callers cut off column E."""
    ids = topk_indices.long()
    _assert_in_range(name, ids, num_experts)
    return torch.where(ids < 0, num_experts, ids)


def _check_floating(name: str, argument: str, value: Tensor) -> None:
    if not value.is_floating_point():
        raise TypeError(
            f"{name}: {argument} must be a floating point tensor, got {value.dtype}"
        )


def _check_same_tokens(name: str, topk_indices: Tensor, scores: Tensor) -> None:
    _check_ids(name, topk_indices)
    if topk_indices.dim() < 2 or topk_indices.shape[:-1] != scores.shape[:-1]:
        raise ValueError(
            f"{name}: scores (*, E) and topk_indices (*, K) must have the same leading "
            f"dimensions, at least one, got {tuple(scores.shape)} and "
            f"{tuple(topk_indices.shape)}"
        )


def _check_mask(name: str, mask: Tensor | None, shape: torch.Size) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"{name}: mask must be bool, got {mask.dtype}")
    if mask.shape != shape:
        raise ValueError(
            f"{name}: mask must have the shape of the tokens, {tuple(shape)}, got "
            f"{tuple(mask.shape)}"
        )


def _counts(columns: Tensor, num_experts: int) -> Tensor:
    """``(*, S, K)`` of :func:`_expert_columns` to ``(*, E)`` numbers of slots."""
    ids = columns.flatten(-2)
    # Integers, so that the order of the additions does not matter.
    counts = ids.new_zeros((*ids.shape[:-1], num_experts + 1))
    return counts.scatter_add(-1, ids, torch.ones_like(ids))[..., :num_experts]


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """``(*, N, ...)`` to the mean over the N that are ``counted``, ``(*, N)``; others are 0.

    The mean of no values is 0, so that a rank without tokens adds no loss and no gradient.
    """
    total = values.sum(counted.dim() - 1)
    # A tensor op, because the exporter simplifies max(T, 1) of a dynamic T to T.
    count = counted.sum(-1).clamp(min=1)
    return total / count.view(count.shape + (1,) * (total.dim() - count.dim()))


def expert_counts(
    topk_indices: Tensor, num_experts: int, *, mask: Tensor | None = None
) -> Tensor:
    """The number of slots of each expert, for :func:`updated_expert_bias`.

    Args:
        topk_indices: ``(*, K)`` int32 or int64; -1 and E mean "no expert" and are not
            counted.
        num_experts: E.
        mask: ``(*,)`` bool; tokens where it is False, such as padding, are not counted.

    Returns:
        Tensor: ``(E,)`` int64.

    Raises:
        ValueError: shapes that do not belong together, or ``num_experts`` is below 1.
        TypeError: a dtype breaks a rule above.
        RuntimeError: an expert id is outside [-1, E]. On CUDA this is a device-side
            assert.
    """
    topk_indices, mask = _tokens(topk_indices), _tokens(mask)
    _check_ids("expert_counts", topk_indices)
    if num_experts < 1:
        raise ValueError(
            f"expert_counts: num_experts must be at least 1, got {num_experts}"
        )
    if topk_indices.dim() == 0:
        raise ValueError("expert_counts: topk_indices must have shape (*, K), got ()")
    _check_mask("expert_counts", mask, topk_indices.shape[:-1])
    ids = _expert_columns("expert_counts", topk_indices, num_experts)
    if mask is not None:
        ids = torch.where(mask.unsqueeze(-1), ids, num_experts)
    return _counts(ids.reshape(-1, 1), num_experts)


def balance_counts(
    topk_indices: Tensor, num_experts: int, *, mask: Tensor | None = None
) -> Tensor:
    """Counts of a whole batch, for a :func:`load_balancing_loss` of a part of it.

    The counts are integers, so the sum over micro-batches and ranks is exact and does not depend on the order.
    Call this once for each part, outside of what activation checkpointing recomputes.

    Args:
        topk_indices: as of :func:`expert_counts`.
        num_experts: E.
        mask: as of :func:`expert_counts`.

    Returns:
        Tensor: ``(E + 1,)`` int64: :func:`expert_counts`, and how many tokens chose an expert.

    Raises:
        As :func:`expert_counts`.
    """
    topk_indices, mask = _tokens(topk_indices), _tokens(mask)
    slots = expert_counts(topk_indices, num_experts, mask=mask)
    tokens = ((topk_indices >= 0) & (topk_indices < num_experts)).any(-1)
    tokens = tokens if mask is None else tokens & mask
    return torch.cat([slots, tokens.sum().view(1)])


def load_balancing_loss(
    scores: Tensor,
    topk_indices: Tensor,
    *,
    per_sequence: bool = False,
    mask: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    r"""The sum over experts of the share of slots times the mean score.

    .. math::
        E \sum_e f_e P_e, \quad
        f_e = \frac{\sum_{t \in V} c_{t,e}}{\sum_{t \in V} \sum_j c_{t,j}}, \quad
        P_e = \frac{1}{|V|} \sum_{t \in V} \frac{s_{t,e}}{\sum_j s_{t,j}}

    V are the tokens that ``mask`` keeps and that chose at least one expert, and
    :math:`c_{t,e}` is how many slots of token t chose expert e. Padding does not change the
    loss. It is 1 if f or P is uniform, E at most (if all tokens want and choose one
    expert), and 0 without tokens. Only :math:`P` has a gradient. Switch Transformer
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
            nowhere. A token without an expert is ignored, like padding.
        per_sequence: balance each sequence by itself, and average over the sequences that
            have tokens: ``scores`` must be ``(*, S, E)`` with sequences of S tokens.
            Otherwise all tokens are balanced together.
        mask: ``(*,)`` bool; tokens where it is False take no part, as padding.
        counts: ``(E + 1,)`` int64, :func:`balance_counts` of a batch of which these tokens are a
            part, summed over its micro-batches and ranks. The result is then the part's share: the shares
            sum to the loss of the whole batch, and their gradients to its gradient. Not allowed with
            ``per_sequence``: there, multiply the loss of a part by its fraction of the sequences.

    Returns:
        Tensor: a float32 scalar (float64 for float64 scores).

    Raises:
        ValueError: shapes that do not belong together, or ``counts`` with ``per_sequence``.
        TypeError: a dtype breaks a rule above, as when the arguments are swapped.
        RuntimeError: an expert id is outside [-1, E], or a score that counts is negative.
            On CUDA this is a device-side assert.
    """
    scores, topk_indices = _tokens(scores), _tokens(topk_indices)
    mask = _tokens(mask)
    _check_floating("load_balancing_loss", "scores", scores)
    _check_same_tokens("load_balancing_loss", topk_indices, scores)
    _check_mask("load_balancing_loss", mask, scores.shape[:-1])
    if per_sequence and scores.dim() < 3:
        raise ValueError(
            "load_balancing_loss: per_sequence=True needs scores, not nested, of shape (*, S, E), "
            f"got {tuple(scores.shape)}"
        )
    num_experts = scores.shape[-1]
    if counts is not None:
        if per_sequence or counts.shape != (num_experts + 1,):
            raise ValueError(
                f"load_balancing_loss: counts must be (E + 1,) = ({num_experts + 1},) of "
                f"balance_counts, without per_sequence, got {tuple(counts.shape)} and "
                f"per_sequence={per_sequence}"
            )
        if counts.dtype != torch.int64:
            raise TypeError(
                f"load_balancing_loss: counts must be int64, got {counts.dtype}"
            )
    if scores.dtype != torch.float64:
        scores = scores.float()
    ids = _expert_columns("load_balancing_loss", topk_indices, num_experts)
    counted = (ids < num_experts).any(-1)
    if mask is not None:
        counted = counted & mask
    # Padding may hold anything, NaN too, and gets no gradient.
    scores = torch.where(counted.unsqueeze(-1), scores, 0.0)
    _assert_all(
        ~(scores < 0), "load_balancing_loss: scores must not be negative, as logits are"
    )
    ids = torch.where(counted.unsqueeze(-1), ids, num_experts)
    if not per_sequence:
        scores, ids = scores.flatten(0, -2), ids.flatten(0, -2)
        counted = counted.flatten()
    # As in moe_topk: the small number prevents a division by 0.
    wanted = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    if counts is None:
        wanted, slots = _mean(wanted, counted), _counts(ids, num_experts)
    else:
        wanted, slots = wanted.sum(0) / counts[-1].clamp(min=1), counts[:-1]
    slots = slots.to(scores.dtype)
    # Without slots the loss is 0, not 0 / 0.
    chosen = slots / slots.sum(-1, keepdim=True).clamp(min=1)
    if counts is not None:
        return num_experts * (chosen * wanted).sum()
    balance = (chosen * wanted).sum(-1).flatten()
    return num_experts * _mean(balance, counted.any(-1).flatten())


def router_z_loss(logits: Tensor, *, mask: Tensor | None = None) -> Tensor:
    r"""The mean square of the logits' log-sum-exp, which keeps logits small.

    .. math::
        \frac{1}{|V|} \sum_{t \in V} \Bigl(\log \sum_e \exp l_{t,e}\Bigr)^2

    V are the tokens that ``mask`` keeps. Large logits lose precision in the softmax.
    ST-MoE (arXiv:2202.08906, equation 5).

    Args:
        logits: ``(*, E)`` floating point.
        mask: ``(*,)`` bool; tokens where it is False take no part, as padding. If ids
            of -1 mark padding, pass ``(topk_indices >= 0).any(-1)``.

    Returns:
        Tensor: a float32 scalar (float64 for float64 logits); 0 without tokens.

    Raises:
        ValueError: ``mask`` does not have the shape of the tokens.
        TypeError: ``logits`` is not floating point, or ``mask`` not bool.
    """
    logits, mask = _tokens(logits), _tokens(mask)
    _check_floating("router_z_loss", "logits", logits)
    _check_mask("router_z_loss", mask, logits.shape[:-1])
    if logits.dtype != torch.float64:
        logits = logits.float()
    if mask is None:
        mask = logits.new_ones(logits.shape[:-1], dtype=torch.bool)
    logits = torch.where(mask.unsqueeze(-1), logits, 0.0)
    squares = torch.where(mask, logits.logsumexp(-1).square(), 0.0)
    return _mean(squares.flatten(), mask.flatten())


def updated_expert_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    r"""The next selection bias of balancing without an auxiliary loss.

    The bias of an expert goes up by ``rate`` if its load is below the mean, and down if
    its load is above. At exactly the mean it stays. The bias only affects which experts are
    chosen (``bias`` of :func:`torch.nn.functional.moe_topk`), so it disturbs no gradient.
    Loss-free balancing (arXiv:2408.15664, algorithm 1).

    Args:
        bias: ``(E,)`` float32 or float64. Lower precisions are refused, because a step
            of 0.001 rounds away once the bias is large, and balancing stops.
        counts: ``(E,)`` integers, the slots per expert of the last step as
            :func:`expert_counts` returns them, summed over all ranks that share the experts.
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


class TokenRounding(NamedTuple):
    """A routing of :func:`token_rounding`, which :func:`moe_mlp_rounded` runs.

    Attributes:
        topk_indices: ``(*, E)``; entry e is e where the token goes to expert e, else
            -1. When not training, the router's own choice, ``(*, K)``.
        topk_weights: same shape as ``topk_indices``, zero where the index is -1.
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

    Grouped matmuls work in tiles of rows. When experts get few tokens each, partly filled
    tiles cost a good part of the time. This function changes a few (token, expert) pairs so
    that every tile is full. An expert that rounds down drops the tokens with the lowest
    weights. An expert that rounds up adds the tokens with the highest scores that did not
    choose it. No expert gains or loses ``tile`` tokens or more. This is the token rounding
    of SonicMoE (arXiv:2512.14080, Algorithm 4; its nearest, up and down rules).

    Kept pairs have their weight from ``topk_weights``, added pairs from ``scores``.
    Gradients flow through both. Nothing is synchronised with the host.

    .. warning::
        A prototype. The choice for one token depends on the other tokens, later ones
        included, so it must be off (``training=False``) in evaluation and generation.
        Quality is reported to hold when experts get two tiles or more on average, and
        to suffer at one.

    Args:
        topk_indices: ``(*, K)`` int32 or int64, the experts of each token; -1 and E
            mean no expert. The experts of a token must be distinct; this is not checked.
            A repeated expert gets the token once, with either weight.
        topk_weights: ``(*, K)`` float32 or float64, their weights.
        scores: ``(*, E)`` of the dtype of ``topk_weights``, how much each token wants
            each expert: the softmax or sigmoid of the router's logits, with its scale.
        tile: rows per tile of the kernel in use, at least 1. When training, at most the
            number of tokens, unless there are none.
        rounding: "nearest" (halves go up), "up" or "down". Where rounding up asks for
            more tokens than there are, it rounds down.
        training: when False, return the arguments as they are, for any number of
            tokens.

    Returns:
        TokenRounding: the routing, for :func:`moe_mlp_rounded`.

    Raises:
        ValueError: shapes that do not belong together, a tile that is not between 1
            and the number of tokens, an unknown rounding.
        TypeError: a dtype breaks a rule above, or ``tile`` is not an int.
        RuntimeError: when training, an expert id is outside [-1, E]. On CUDA this is a
            device-side assert.

    Example::

        >>> logits = torch.randn(256, 8)
        >>> scores = logits.softmax(-1)
        >>> topk_weights, topk_indices = scores.topk(2)
        >>> rounded = token_rounding(topk_indices, topk_weights, scores, 32)
        >>> counts = (rounded.topk_indices >= 0).sum(0)
        >>> assert (counts % 32 == 0).all()
    """
    _check_token_rounding(topk_indices, topk_weights, scores, tile, rounding, training)
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


def moe_mlp_rounded(
    input: Tensor,
    routing: TokenRounding,
    w_in: Tensor,
    w_out: Tensor,
    **kwargs: Any,
) -> Tensor:
    """:func:`torch.nn.functional.moe_mlp` of a rounded routing.

    Returns the same values as ``F.moe_mlp(input, routing.topk_indices, routing.topk_weights,
    w_in, w_out, **kwargs)``, but allocates only the rows of the routing, not E per token.

    Args:
        input: ``(*, D)`` tokens.
        routing: the routing of these tokens.
        w_in: see :func:`torch.nn.functional.moe_mlp`.
        w_out: ``(E, D, F)``.
        **kwargs: other arguments of :func:`torch.nn.functional.moe_mlp`.

    Returns:
        Tensor: of the shape and dtype of ``input``.

    Raises:
        ValueError: as :func:`torch.nn.functional.moe_mlp`, which may raise other errors too.
    """
    return F.moe_mlp(
        input,
        routing.topk_indices,
        routing.topk_weights,
        w_in,
        w_out,
        num_rows=routing.num_rows,
        **kwargs,
    )


def _check_token_rounding(
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
    _check_ids("token_rounding", topk_indices)
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
    if not isinstance(tile, (int, torch.SymInt)):
        raise TypeError(f"token_rounding: tile must be an int, got {tile!r}")
    if tile < 1:
        raise ValueError(f"token_rounding: tile must be at least 1, got {tile}")
    num_tokens = topk_indices.shape[:-1].numel()
    if training and 0 < num_tokens < tile:
        raise ValueError(
            "token_rounding: tile must be between 1 and the number of tokens, "
            f"{num_tokens}, got {tile}"
        )


def _dense(indices: Tensor, weights: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """``(T, E)`` whether the router chose the pair, and the pair's weight or else its score."""
    num_tokens, num_experts = scores.shape
    columns = _expert_columns("token_rounding", indices, num_experts)
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

    Tokens that chose the expert come first. Within each group, larger weights come first,
    and the earlier token wins a tie.
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
