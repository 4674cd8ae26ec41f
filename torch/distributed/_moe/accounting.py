"""Bytes that a token switch puts on the wire, next to the fewest that do the job.

Counted is what the switch hands to the collectives for other ranks; what a rank sends
to itself is not. Sizes are in bytes, of this rank's sends only: the sum over the ranks
is the traffic of the level.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor


if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed._moe.all_to_all import TokenSwitchAllToAll
    from torch.distributed._moe.exchange import Exchange


__all__ = ["WireBytes", "count_wire_bytes", "deduplicated_rows"]


class WireBytes:
    """Bytes and collectives by level and kind.

    Levels are ``"flat"``, or ``"node"`` and ``"local"``. Kinds:
        rows          to the experts: tokens, in backward gradients of the outputs
        scales        of FP8 rows; they travel in the same message as the rows
        returned      from the experts: outputs, in backward gradients of the tokens
        ids           expert ids of the slots
        weights       router weights of the slots
        weight_grads  gradients of the router weights, on the way back
        sizes         how many rows and slots there will be

    Attributes:
        sent (dict[str, dict[str, int]]): bytes for other ranks.
        messages (dict[str, dict[str, int]]): number of collectives.
    """

    def __init__(self) -> None:
        self.sent: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.messages: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def payload(self, level: str) -> int:
        """Bytes of token rows, or of their gradients, to the experts."""
        return self.sent[level]["rows"]

    def scales(self, level: str) -> int:
        """Bytes of the FP8 scales that travel with the payload."""
        return self.sent[level]["scales"]

    def metadata(self, level: str) -> int:
        """Bytes that say which rows are for which experts: ids, weights, sizes."""
        return sum(self.sent[level][kind] for kind in ("ids", "weights", "sizes"))

    def add(
        self,
        exchange: Exchange,
        x: Tensor,
        send: list[int] | None,
        kind: str,
        scale_bytes: int,
    ) -> None:
        """Counts one all-to-all of ``x`` with the row counts ``send``."""
        if torch.compiler.is_compiling():
            raise RuntimeError("count_wire_bytes counts in eager mode only")
        level, me = exchange.level, dist.get_rank(exchange.group)
        own = x.shape[0] // exchange.num_ranks if send is None else send[me]
        rows = x.shape[0] - own
        row_bytes = x.element_size() * (x.shape[1] if x.dim() > 1 else 1)
        self.messages[level][kind] += 1
        self.sent[level][kind] += rows * (row_bytes - scale_bytes)
        if scale_bytes:
            self.sent[level]["scales"] += rows * scale_bytes


@contextlib.contextmanager
def count_wire_bytes(*switches: TokenSwitchAllToAll) -> Iterator[WireBytes]:
    """Counts what ``switches`` send in the body, in forward and in backward.

    Example::
        >>> # xdoctest: +SKIP("needs a process group")
        >>> with count_wire_bytes(switch) as wire:
        ...     routing = switch.create_routing(topk_indices)
        ...     switch.dispatch(routing, tokens, topk_weights)
        >>> wire.metadata("flat") / wire.payload("flat")
    """
    wire = WireBytes()
    levels = [level for switch in switches for level in switch.levels]
    before = [level.counter for level in levels]
    for level in levels:
        level.counter = wire
    try:
        yield wire
    finally:
        for level, counter in zip(levels, before):
            level.counter = counter


def deduplicated_rows(
    topk_indices: list[Tensor], num_experts: int, mesh_shape: tuple[int, ...]
) -> dict[str, list[int]]:
    """Fewest token rows that every rank must send to others, by level.

    Args:
        topk_indices (list[Tensor]): of each rank, (T, K) expert ids in [-1, E].
        num_experts (int): E; flat rank r holds ``[r * E/W, (r + 1) * E/W)``.
        mesh_shape (tuple[int, ...]): ``(W,)`` for one level: each token once to every
            other rank with one of its experts. ``(N, L)`` for nodes of L ranks: each
            token once to every other node, where the rank of the same local index
            sends it on to the other ranks of the node.

    Returns:
        ``{"flat": rows of each rank}`` or ``{"node": ..., "local": ...}``.
    """
    W = len(topk_indices)
    if len(mesh_shape) not in (1, 2) or W != torch.Size(mesh_shape).numel():
        raise ValueError(
            f"deduplicated_rows: mesh_shape must be ({W},) or (N, L) with N * L = {W} "
            f"ranks of topk_indices, got {tuple(mesh_shape)}"
        )
    L = mesh_shape[-1]
    flat, node, local = [0] * W, [0] * W, [0] * W
    for source, idx in enumerate(topk_indices):
        valid = (idx >= 0) & (idx < num_experts)
        rank = torch.where(valid, idx // (num_experts // W), W)
        # (T, W) whether the token has an expert on the rank.
        goes = torch.zeros(idx.shape[0], W + 1, dtype=torch.bool)
        goes = goes.scatter(1, rank.long().cpu(), True)[:, :W]
        counts = goes.sum(0).tolist()
        nodes = goes.view(-1, W // L, L).any(2).sum(0).tolist()
        flat[source] = sum(counts) - counts[source]
        node[source] = sum(nodes) - nodes[source // L]
        for dest, count in enumerate(counts):
            relay = dest // L * L + source % L
            local[relay] += count if relay != dest else 0
    if len(mesh_shape) == 1:
        return {"flat": flat}
    return {"node": node, "local": local}
