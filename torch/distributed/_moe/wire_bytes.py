"""Counts what token switches send: bytes and collectives by level and kind."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import Any, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = ["count_wire_bytes", "WireBytes"]


class WireBytes:
    """Bytes and collectives by level and kind.

    An exchange counts what it passes to collectives for other ranks, not what a rank
    sends to itself. Only sends of this rank count; the sum over the ranks is
    the traffic of the level.

    Levels are ``"flat"``, or ``"node"`` and ``"local"``. Kinds:
        rows          to the experts: tokens, in backward gradients of the outputs
        scales        of FP8 rows; they travel in the same message as the rows
        ids, weights  expert ids and router weights of the rows, in the same message
        returned      from the experts: outputs, in backward gradients of the tokens
        weight_grads  gradients of the router weights, with the gradients of the tokens
        sizes         how many rows and slots there will be, and what ranks compare
        experts, expert_grads   weights of copies, of level ``"experts"``, and their gradients

    Attributes:
        sent (dict[str, dict[str, int]]): bytes for other ranks.
        messages (dict[str, dict[str, int]]): number of collectives, by the first kind
            in them.
    """

    def __init__(self) -> None:
        self.sent: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.messages: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, level: str, kind: str, rows: int, kinds: dict[str, int]) -> None:
        """Counts one all-to-all of ``rows`` with ``kinds`` bytes in each row."""
        if torch.compiler.is_compiling():
            raise RuntimeError("count_wire_bytes counts in eager mode only")
        self.messages[level][kind] += 1
        for name, size in kinds.items():
            if size:
                self.sent[level][name] += rows * size


@contextlib.contextmanager
def count_wire_bytes(*switches: Any) -> Iterator[WireBytes]:
    """Counts what token switches send in the body, in forward and in backward.

    Example::
        >>> # xdoctest: +SKIP("needs a process group")
        >>> with count_wire_bytes(switch) as wire:
        ...     routing = switch.create_routing(topk_indices)
        ...     switch.dispatch(routing, tokens, topk_weights)
        >>> wire.sent["flat"]["scales"] / wire.sent["flat"]["rows"]
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
