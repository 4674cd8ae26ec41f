"""The token switch for decoding: all tokens to all ranks, in fixed buffers.

See all_to_all.py for the others, and exchange.py for the terms.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._moe import payload
from torch.distributed._moe.agreement import check_counts, CheckedTokenSwitch
from torch.distributed._moe.exchange import Exchange
from torch.distributed._token_switch import Routing


if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = ["TokenSwitchAllGather"]


class _Buffers(NamedTuple):
    """Message of this rank and of all ranks, their parts, and the local ids made of them."""

    mine: Tensor
    all_ranks: Tensor
    sent: list[Tensor]
    received: list[Tensor]
    local: Tensor


class TokenSwitchAllGather(CheckedTokenSwitch):
    """Token switch for decoding: every rank gets all tokens and keeps those of its experts.

    It is for few tokens, whose messages cost more than their bytes. Buffers are allocated at the
    first use, with ``max_tokens`` rows for every rank, whatever T is. The host reads no value, so
    a CUDA graph can capture it. Messages carry the facts that their size depends on, for
    comparison; only a change of these needs its own message.

    It has no gradients. The rows, weights and ids that ``dispatch`` returns are views of the
    buffers and valid until the next dispatch; ``combine`` returns a new tensor.

    Args:
        group (ProcessGroup): ranks that share the experts; rank r of it holds the
            experts ``[r * E/W, (r + 1) * E/W)``.
        num_experts (int): number E of experts, a multiple of the W ranks.

    Keyword Args:
        max_tokens (int): most tokens of a rank; equal on all ranks.
    """

    def __init__(
        self, group: ProcessGroup, num_experts: int, *, max_tokens: int
    ) -> None:
        self._set_experts(num_experts, dist.get_process_group_ranks(group))
        check_counts(type(self).__name__, max_tokens=max_tokens)
        self.levels = (Exchange(group, num_experts, None, level="flat"),)
        self._max_tokens = max_tokens
        self._buffers: dict[tuple[Any, ...], _Buffers] = {}
        self._last_buffers: _Buffers | None = None
        self._returned: dict[tuple[Any, ...], Tensor] = {}

    def create_routing(
        self,
        topk_idx: Tensor,
        per_expert_token_counts: Tensor | None = None,
        *,
        layout: str = "flat",
    ) -> Routing:
        """Only checks arguments; see :meth:`TokenSwitchAllToAll.create_routing`."""
        name = type(self).__name__
        self._check_ids(topk_idx, layout)
        if per_expert_token_counts is not None:
            raise ValueError(f"{name}: per_expert_token_counts is not supported")
        return Routing(handle=None, topk_idx=topk_idx, layout=layout)

    def _exact_recv_tokens(self, routing: Routing) -> int:
        return len(self.ranks) * self._max_tokens

    def _buffers_for(self, tokens: Tensor, topk_weights: Tensor) -> _Buffers:
        D, K = tokens.shape[1], topk_weights.shape[1]
        key = (D, K, tokens.dtype, topk_weights.dtype, tokens.device)
        if key not in self._buffers:
            rows, device = self._max_tokens, tokens.device
            parts = [(D, tokens.dtype), (K, topk_weights.dtype), (K, torch.int32)]
            # No inference tensors, so that they can be written outside of inference mode.
            with torch.inference_mode(False):
                mine = payload.empty_message(rows, parts, device).zero_()
                all_ranks = payload.empty_message(
                    len(self.ranks) * rows, parts, device
                ).zero_()
                local = torch.empty(len(all_ranks), K, dtype=torch.int64, device=device)
                views = payload.unpack(mine, parts), payload.unpack(all_ranks, parts)
                self._buffers[key] = _Buffers(mine, all_ranks, *views, local)
        return self._buffers[key]

    def _dispatch_new(
        self,
        routing: Routing,
        tokens: Tensor,
        topk_weights: Tensor,
        max_recv_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ids, (level,), most = routing.topk_idx, self.levels, self._max_tokens
        self._check_tokens(ids, tokens, topk_weights)
        T, K = ids.shape
        mark = self._compare_facts(
            num_experts=self._num_experts,
            max_tokens=most,
            D=tokens.shape[1],
            K=K,
            tokens_dtype=tokens.dtype,
            topk_weights_dtype=topk_weights.dtype,
            tokens=f"more than {most}" if T > most else f"at most {most}",
        )
        if T > most:  # on all ranks
            self._last_facts = {}
            raise ValueError(
                f"{type(self).__name__}: at most max_tokens = {most} tokens, got {T}"
            )
        buffers = self._last_buffers = self._buffers_for(tokens, topk_weights)
        # Rows without a token have no expert; their other values are ignored.
        first = mark * (self._num_experts + 2)
        for source, sent in zip(
            (tokens, topk_weights, ids + (1 + first)), buffers.sent
        ):
            sent.narrow(0, 0, T).copy_(source)
        buffers.sent[2].narrow(0, T, most - T).fill_(first)
        self._gather(level, buffers)
        values, weights, ids = buffers.received
        self._same_mark(self._have(ids, mark))
        local = buffers.local
        torch.sub(ids, level.rank * level.local_experts + 1 + first, out=local)
        local.masked_fill_(local >= level.local_experts, -1).clamp_min_(-1)
        return values, weights, local

    @staticmethod
    def _gather(level: Exchange, buffers: _Buffers) -> None:
        operands = buffers.all_ranks, buffers.mine
        gather = functools.partial(
            dist.all_gather_into_tensor, *operands, group=level.group
        )
        level.named("rows", gather)

    def _have(self, ids: Tensor, mark: int) -> Tensor:
        """Whether all received ``ids`` carry ``mark``; without a sync."""
        stride = self._num_experts + 2
        return (torch.div(ids, stride, rounding_mode="floor") == mark).all()

    def _announce(self, level: Exchange, mark: int) -> bool:
        buffers = self._last_buffers
        if buffers is None:
            raise AssertionError("announce before a message")
        buffers.sent[2].fill_(mark * (self._num_experts + 2))
        self._gather(level, buffers)
        return bool(self._have(buffers.received[2], mark))

    def _combine_new(self, routing: Routing, expert_tokens: Tensor) -> Tensor:
        T, W, rows = routing.topk_idx.shape[0], len(self.ranks), self._max_tokens
        self._check_expert_tokens(expert_tokens, W * rows)
        expert_tokens = expert_tokens.contiguous()
        key = (expert_tokens.shape[1], expert_tokens.dtype, expert_tokens.device)
        if key not in self._returned:
            with torch.inference_mode(False):
                self._returned[key] = torch.empty_like(expert_tokens)
        returned = self._returned[key]
        (level,), operands = self.levels, (returned, expert_tokens)
        send = functools.partial(dist.all_to_all_single, *operands, group=level.group)
        level.named("returned", send)
        wide = torch.float64 if returned.dtype == torch.float64 else torch.float32
        rows_of_ranks = returned.view(W, rows, -1).narrow(1, 0, T)
        return rows_of_ranks.sum(0, dtype=wide).to(returned.dtype)

    def _dispatch_backward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "TokenSwitchAllGather: no gradients; train with 'all_to_all' or 'hierarchical'"
        )

    _dispatch_grad = _dispatch_backward
