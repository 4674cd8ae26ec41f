"""Token switch over an all-gather, for decoding: fixed buffers, nothing read on the host."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed._moe.exchange import empty_message, unpack
from torch.distributed._moe.groups import inherit_timeout, SameOnAllRanks
from torch.distributed._moe.switch import (
    check_ids,
    check_switch,
    check_tokens,
    NewTensorsSwitch,
)
from torch.distributed._token_switch import Routing


if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = ["TokenSwitchAllGather"]


class TokenSwitchAllGather(NewTensorsSwitch):
    """Token switch for decoding: every rank gets all tokens and keeps what is its own.

    For few tokens, where a message costs more than its bytes. Buffers are made at the
    first use and have ``max_tokens`` rows for every rank, whatever T is; what runs does
    not depend on a value, and on T only in the copies into and out of the buffers. No
    value is read on the host, so that a CUDA graph can hold it.

    No gradients. The rows, weights and ids that ``dispatch`` returns are views of the
    buffers, valid until the next dispatch; what ``combine`` returns is a new tensor.

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
        name = type(self).__name__
        self.ranks = dist.get_process_group_ranks(group)
        check_switch(name, num_experts, len(self.ranks))
        if max_tokens < 1:
            raise ValueError(f"{name}: max_tokens must be at least 1, got {max_tokens}")
        inherit_timeout(group)
        self._group_name = group.group_name
        self._num_experts = num_experts
        self._first = dist.get_rank(group) * (num_experts // len(self.ranks))
        self._max_tokens = max_tokens
        self._agreed = SameOnAllRanks(name, [group])
        self._buffers: dict[tuple[Any, ...], _Buffers] = {}
        self._returned: dict[tuple[Any, ...], Tensor] = {}

    def create_routing(
        self,
        topk_idx: Tensor,
        per_expert_token_counts: Tensor | None = None,
        *,
        layout: str = "flat",
    ) -> Routing:
        """Nothing but checks; see :meth:`TokenSwitchAllToAll.create_routing`."""
        name = type(self).__name__
        check_ids(name, topk_idx, self._num_experts, layout)
        if topk_idx.shape[0] > self._max_tokens:
            raise ValueError(
                f"{name}: at most max_tokens = {self._max_tokens} tokens, got "
                f"{topk_idx.shape[0]}"
            )
        if per_expert_token_counts is not None:
            raise ValueError(f"{name}: per_expert_token_counts is not supported")
        return Routing(handle=None, topk_idx=topk_idx, layout=layout)

    def _exact_recv_tokens(self, routing: Routing) -> int:
        return len(self.ranks) * self._max_tokens

    def _buffers_for(self, tokens: Tensor, topk_weights: Tensor) -> _Buffers:
        D, K = tokens.shape[1], topk_weights.shape[1]
        key = (D, K, tokens.dtype, topk_weights.dtype, tokens.device)
        if key not in self._buffers:
            if not torch.compiler.is_compiling():
                self._agreed.check(
                    num_experts=self._num_experts,
                    max_tokens=self._max_tokens,
                    D=D,
                    K=K,
                    tokens_dtype=tokens.dtype,
                    topk_weights_dtype=topk_weights.dtype,
                )
            # Not of inference mode, so that they can be written outside of it.
            with torch.inference_mode(False):
                self._buffers[key] = _Buffers(
                    [(D, tokens.dtype), (K, topk_weights.dtype), (K, torch.int32)],
                    self._max_tokens,
                    len(self.ranks),
                    tokens.device,
                )
        return self._buffers[key]

    def _dispatch_new(
        self,
        routing: Routing,
        tokens: Tensor,
        topk_weights: Tensor,
        max_recv_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        name, ids = type(self).__name__, routing.topk_idx
        check_tokens(name, ids, tokens, topk_weights)
        buffers = self._buffers_for(tokens, topk_weights)
        for source, sent in zip((tokens, topk_weights, ids), buffers.sent):
            sent.narrow(0, 0, source.shape[0]).copy_(source)
        # Rows without a token have no expert; what else is in them does not matter.
        rest = self._max_tokens - ids.shape[0]
        buffers.sent[2].narrow(0, ids.shape[0], rest).fill_(-1)
        group = c10d._resolve_process_group(self._group_name)
        dist.all_gather_into_tensor(buffers.all_bytes, buffers.bytes, group=group)
        values, weights, ids = buffers.received
        local, local_experts = buffers.local, self._num_experts // len(self.ranks)
        torch.sub(ids, self._first, out=local)
        torch.lt(local, 0, out=buffers.elsewhere)
        torch.ge(local, local_experts, out=buffers.above)
        local.masked_fill_(buffers.elsewhere.logical_or_(buffers.above), -1)
        return values, weights, local

    def _combine_new(self, routing: Routing, expert_tokens: Tensor) -> Tensor:
        T, W, rows = routing.topk_idx.shape[0], len(self.ranks), self._max_tokens
        if expert_tokens.dim() != 2 or expert_tokens.shape[0] != W * rows:
            raise ValueError(
                f"{type(self).__name__}: expert_tokens must have shape (M, D) with M = "
                f"{W * rows} dispatched rows, got {tuple(expert_tokens.shape)}"
            )
        expert_tokens = expert_tokens.contiguous()
        key = (expert_tokens.shape[1], expert_tokens.dtype, expert_tokens.device)
        if key not in self._returned:
            with torch.inference_mode(False):
                self._returned[key] = torch.empty_like(expert_tokens)
        returned = self._returned[key]
        group = c10d._resolve_process_group(self._group_name)
        dist.all_to_all_single(returned, expert_tokens, group=group)
        wide = torch.float64 if returned.dtype == torch.float64 else torch.float32
        rows_of_ranks = returned.view(W, rows, -1).narrow(1, 0, T)
        return rows_of_ranks.sum(0, dtype=wide).to(returned.dtype)

    # pyrefly: ignore[bad-override]
    def _dispatch_backward(self, *args: Any) -> tuple[None, None]:
        raise NotImplementedError(_NO_GRADIENT)

    # pyrefly: ignore[bad-override]
    def _dispatch_grad(self, *args: Any) -> Tensor:
        raise NotImplementedError(_NO_GRADIENT)


_NO_GRADIENT = (
    "TokenSwitchAllGather: no gradients; train with 'all_to_all' or 'hierarchical'"
)


class _Buffers:
    """Message of this rank and of all ranks, and what is made of its ids."""

    def __init__(
        self,
        parts: list[tuple[int, torch.dtype]],
        rows: int,
        num_ranks: int,
        device: torch.device,
    ) -> None:
        self.bytes = empty_message(rows, parts, device).zero_()
        self.all_bytes = empty_message(num_ranks * rows, parts, device).zero_()
        self.sent = unpack(self.bytes, parts)
        self.received = unpack(self.all_bytes, parts)
        self.local = torch.empty_like(
            self.received[2],
            dtype=torch.int64,
            memory_format=torch.contiguous_format,
        )
        self.elsewhere = torch.empty_like(self.local, dtype=torch.bool)
        self.above = torch.empty_like(self.elsewhere)
