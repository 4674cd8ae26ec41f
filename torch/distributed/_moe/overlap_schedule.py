"""Orders in which the parts of an expert-parallel layer run, and their possible gain.

Contract
    A schedule cuts the tokens of this rank into chunks and gives the order in which the
    parts of the layer are issued: ``dispatch``, ``experts`` and ``combine`` of every
    chunk and the ``shared`` experts of all tokens. Communication of a part is in
    flight (in_flight.py) while later parts compute. The layer waits
    for it right before it uses the result. Any :class:`TokenSwitch` works, as a part is a
    whole ``dispatch`` or ``combine``, with all its levels, its gathers and the host sync
    of compact routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed._moe.agreement import check_counts
from torch.distributed._moe.in_flight import begin, end, use_own_groups


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed._token_switch import Routing, TokenSwitch


__all__ = [
    "OverlapSchedule",
    "PartSeconds",
    "sequential_schedule",
    "simulated_seconds",
    "Step",
]


class Step(NamedTuple):
    """Issue one part of the layer.

    Attributes:
        part (str): ``"dispatch"``, ``"experts"``, ``"combine"`` or ``"shared"``.
        chunk (int): chunk of tokens; 0 for shared experts.
    """

    part: str
    chunk: int = 0


@dataclass(frozen=True)
class OverlapSchedule:
    """Runs chunks of tokens so that communication hides behind computation.

    It is a ``schedule`` of ``ExpertParallel``; a planner may set its fields.

    Args:
        num_chunks (int): chunks of tokens of each rank; equal on all ranks. More chunks hide
            more communication, but experts compute fewer rows at once. Static capacities are per
            chunk. Default: 2
        shared (str): shared experts run while the first chunks are dispatched
            (``"dispatch"``), or while the last chunk is combined (``"combine"``).
            Default: ``"dispatch"``

    Results are those of one chunk, per token bit-equal if a row of the experts' kernel does
    not depend on others. Gradients of expert weights are sums over the
    chunks, so their order of addition differs.

    Activation checkpointing repeats the communication of a recomputed layer, unless its
    ``context_fn`` is :func:`~torch.distributed._moe.recompute.save_communication`.

    Example::
        >>> # xdoctest: +SKIP("needs a process group")
        >>> schedule = OverlapSchedule(num_chunks=4)
        >>> y, shared = schedule(switch, x, topk_indices, topk_weights, experts, mlp)
    """

    num_chunks: int = 2
    shared: Literal["dispatch", "combine"] = "dispatch"

    def __post_init__(self) -> None:
        check_counts("OverlapSchedule", num_chunks=self.num_chunks)
        if self.shared not in ("dispatch", "combine"):
            raise ValueError(
                "OverlapSchedule: shared must be 'dispatch' or 'combine', "
                f"got {self.shared!r}"
            )

    def steps(self) -> tuple[Step, ...]:
        """The parts in the order in which they are issued."""
        order = [Step("dispatch", 0)]
        for chunk in range(self.num_chunks):
            if chunk + 1 < self.num_chunks:
                order.append(Step("dispatch", chunk + 1))
            if chunk == 0 and self.shared == "dispatch":
                order.append(Step("shared"))
            order += [Step("experts", chunk), Step("combine", chunk)]
        if self.shared == "combine":
            order.append(Step("shared"))
        return tuple(order)

    def __call__(
        self,
        switch: TokenSwitch,
        tokens: Tensor,
        topk_indices: Tensor,
        topk_weights: Tensor,
        experts: Callable[[Tensor, Tensor, Tensor, int | None], Tensor],
        shared: Callable[[], Tensor | None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layer. Collective over the ranks of ``switch``.

        Args:
            switch (TokenSwitch): takes tokens to the ranks of their experts and back.
            tokens (Tensor): (T, D) of this rank.
            topk_indices (Tensor): (T, K) integer ids in [-1, E].
            topk_weights (Tensor): (T, K).
            experts (callable): ``experts(rows, local ids, weights, num_rows) -> rows``,
                where ``num_rows`` bounds the slots of the rows, or is None.
            shared (callable, optional): the shared experts of all tokens.

        Returns:
            (Tensor, Tensor or None): (T, D) routed output, and what ``shared`` returned.
        """
        if tokens.dim() != 2 or topk_indices.shape[:1] != tokens.shape[:1]:
            raise ValueError(
                "OverlapSchedule: tokens must have shape (T, D) and topk_indices "
                f"(T, K), got {tuple(tokens.shape)} and {tuple(topk_indices.shape)}"
            )
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            use_own_groups(switch)
        sizes = _chunk_sizes(tokens.shape[0], self.num_chunks)
        if torch.compiler.is_compiling():
            from torch.fx.experimental.symbolic_shapes import guard_or_false

            # Inside of the dispatch, an autograd.Function, Dynamo can't make a size a constant.
            sizes = [1 if guard_or_false(size == 1) else size for size in sizes]
        ids = topk_indices.split(sizes)
        inputs = list(zip(tokens.split(sizes), topk_weights.split(sizes)))
        sent: list[Any] = [None] * self.num_chunks
        rows: list[Any] = [None] * self.num_chunks
        shared_output = None
        for part, chunk in self.steps():
            if part == "dispatch":
                sent[chunk] = begin(_Dispatch(switch, ids[chunk]), inputs[chunk])
            elif part == "experts":
                out, weights, local = end(*sent[chunk])
                routing = sent[chunk][0].routing
                rows[chunk] = _run(experts, switch, routing, out, local, weights)
            elif part == "combine":
                routing = sent[chunk][0].routing
                sent[chunk] = begin(_Combine(switch, routing), (rows[chunk],))
                rows[chunk] = None
            elif shared is not None:
                shared_output = shared()
        return torch.cat([end(*pair) for pair in sent]), shared_output


def sequential_schedule(
    switch: TokenSwitch,
    tokens: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor,
    experts: Callable[[Tensor, Tensor, Tensor, int | None], Tensor],
    shared: Callable[[], Tensor | None] | None,
) -> tuple[Tensor, Tensor | None]:
    """Dispatch, experts, combine, shared experts, one after the other.

    A schedule is a function with this signature, that of :meth:`OverlapSchedule.__call__`.
    ``ExpertParallel(schedule=...)`` takes another one.
    """
    routing = switch.create_routing(topk_indices, layout="flat")
    rows, weights, ids = switch.dispatch(routing, tokens, topk_weights)
    if weights is None or ids is None:
        raise AssertionError("the flat layout has weights and ids")
    output = _run(experts, switch, routing, rows, ids, weights)
    output = switch.combine(routing, output)
    return output, None if shared is None else shared()


def _run(
    experts: Callable[..., Tensor], switch: TokenSwitch, routing: Routing, *rows: Tensor
) -> Tensor:
    """Runs ``experts`` on received rows, ids and weights, with what the switch knows of them."""
    num_slots = getattr(switch, "num_slots", None)
    num_rows = None if num_slots is None else num_slots(routing)
    scaled = getattr(routing.handle, "scaled", ())
    if scaled:
        return experts(*rows, num_rows, input_scaled=scaled)
    return experts(*rows, num_rows)


def _chunk_sizes(total: int, num_chunks: int) -> list[int]:
    """Sizes as equal as possible, larger ones first; 0 if there are too few tokens."""
    # No divmod, which a dynamic number of tokens lacks, and no comparison, which it guards on.
    top = total + num_chunks - 1
    return [(top - chunk) // num_chunks for chunk in range(num_chunks)]


class _Dispatch:
    """Routing and dispatch of one chunk."""

    def __init__(self, switch: TokenSwitch, topk_indices: Tensor) -> None:
        self.switch = switch
        self.topk_indices = topk_indices
        self.routing: Routing

    def forward(self, tokens: Tensor, topk_weights: Tensor) -> tuple[Any, ...]:
        switch = self.switch
        self.routing = switch.create_routing(self.topk_indices, layout="flat")
        rows = switch._exact_recv_tokens(self.routing)
        if rows is None:
            raise ValueError(
                "OverlapSchedule: switch must know the rows that a dispatch returns, "
                f"{type(switch).__name__} does not"
            )
        return switch._dispatch_new(self.routing, tokens, topk_weights, rows)

    def traced(self, tokens: Tensor, topk_weights: Tensor) -> tuple[Any, ...]:
        self.routing = self.switch.create_routing(self.topk_indices, layout="flat")
        return self.switch.dispatch(self.routing, tokens, topk_weights)

    def backward(
        self, needs: Sequence[bool], grad_rows: Tensor, grad_weights: Tensor, _: Any
    ) -> tuple[Tensor | None, ...]:
        return self.switch._dispatch_backward(
            self.routing,
            grad_rows.contiguous() if needs[0] else None,
            grad_weights if needs[1] else None,
        )


class _Combine:
    """Combine of one chunk."""

    def __init__(self, switch: TokenSwitch, routing: Routing) -> None:
        self.switch = switch
        self.routing = routing

    def forward(self, rows: Tensor) -> tuple[Tensor]:
        self.shape, self.dtype = rows.shape, rows.dtype
        return (self.switch._combine_new(self.routing, rows),)

    def traced(self, rows: Tensor) -> Tensor:
        return self.switch.combine(self.routing, rows)

    def backward(self, needs: Sequence[bool], grad: Tensor) -> tuple[Tensor]:
        return (self.switch._dispatch_grad(self.routing, grad, self.shape, self.dtype),)


@dataclass(frozen=True)
class PartSeconds:
    """Measured seconds of the parts of a layer, each run alone.

    Attributes:
        dispatch (tuple[float, ...]): of every chunk, routing included.
        experts (tuple[float, ...]): of every chunk.
        combine (tuple[float, ...]): of every chunk.
        shared (float): of the shared experts of all tokens.
    """

    dispatch: tuple[float, ...]
    experts: tuple[float, ...]
    combine: tuple[float, ...]
    shared: float = 0.0

    def total(self) -> float:
        """Seconds without any overlap."""
        parts = (*self.dispatch, *self.experts, *self.combine)
        return sum(parts) + self.shared


def simulated_seconds(schedule: OverlapSchedule, parts: PartSeconds) -> float:
    """Seconds of a forward if communication and computation do not slow each other.

    Two queues, one for communication and one for computation, each first in first out.
    A part is issued when the computation before it in the order has ended, experts
    wait for their dispatch, and the end waits for everything.

    Args:
        schedule (OverlapSchedule): the order.
        parts (PartSeconds): of as many chunks.
    """
    chunks = {len(parts.dispatch), len(parts.experts), len(parts.combine)}
    if chunks != {schedule.num_chunks}:
        raise ValueError(
            f"simulated_seconds: parts must be of {schedule.num_chunks} chunks, "
            f"got {sorted(chunks)}"
        )
    computed = communicated = 0.0
    arrived: dict[int, float] = {}
    for part, chunk in schedule.steps():
        if part == "shared":
            computed += parts.shared
        elif part == "experts":
            computed = max(computed, arrived[chunk]) + parts.experts[chunk]
        else:
            seconds = getattr(parts, part)[chunk]
            communicated = max(communicated, computed) + seconds
            arrived[chunk] = communicated
    return max(computed, communicated)
