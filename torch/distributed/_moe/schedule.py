"""How expert-parallel layers run in a step: order, recomputation, rerun.

Contract
    A schedule cuts the tokens of this rank into chunks and says in which order the
    parts of the layer are issued: ``dispatch``, ``experts`` and ``combine`` of every
    chunk and the ``shared`` experts of all tokens. Communication of one part is in
    flight while the parts that are issued after it compute; it is waited for right
    before its result is used. Any :class:`TokenSwitch` will do, as a part is a whole
    ``dispatch`` or ``combine``, with all its levels, its gathers and the host sync of
    compact routing.

Where communication runs
    cpu      on one thread of the process, first in first out, and in groups that only it
             uses, so that all ranks issue the same collectives in the same order
             whatever their threads do. The groups are made at the first call.
    other    on a side stream of the device, issued by the calling thread.
    inline   by the calling thread, after all that is in flight, where another thread could
             not see what this one does: under a dispatch mode (LocalTensorMode, selective
             checkpointing, ...) other than that of save_communication.
    compile  in the graph, in the order of the steps. What runs beside what is up to
             the compiler.

Backward
    Every communication is a pair of autograd nodes. The backward of the later one
    issues the communication of the gradient, the backward of the earlier one waits for
    it. The engine runs nodes in the reverse order of their creation: gradients of all
    outputs are sent first, then the chunks go backwards, last chunk first, each
    computing while the gradients of its neighbours travel. What is not overlapped: the
    first gradient to arrive, and the last to leave, have nothing to hide behind but
    the shared experts.

Recomputation
    Plain activation checkpointing runs a region a second time in backward, and with it
    every all-to-all and every host read of sizes. :func:`save_communication` keeps what
    the collectives returned instead: sizes, the messages that the experts received, and
    the rows that came back. All else is recomputed. Rows are kept as they travelled, so
    that FP8 rows cost half of what bfloat16 rows do. The rows that came back are used if
    something behind combine, inside the region, has to be recomputed from its output;
    they are kept in any case. To save them, end the region in front of combine.

    Communication on another thread or stream is not seen by the dispatch mode of the
    region. It gets a mode of its own, :func:`part_of_region`, and stays in flight.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.autograd.function import once_differentiable
from torch.distributed._local_tensor import local_tensor_mode
from torch.multiprocessing._atfork import register_after_fork
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    TorchDispatchMode,
)
from torch.utils.checkpoint import (
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from typing_extensions import Self

    from torch.distributed._moe.switch import TokenSwitchAllToAll
    from torch.distributed._token_switch import Routing, TokenSwitch
    from torch.distributed.distributed_c10d import ProcessGroup

    R = TypeVar("R")


__all__ = [
    "grow_and_rerun",
    "OverlapSchedule",
    "PartSeconds",
    "save_communication",
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


def _default_order(num_chunks: int, shared: str) -> tuple[Step, ...]:
    order = [Step("dispatch", 0)]
    for chunk in range(num_chunks):
        if chunk + 1 < num_chunks:
            order.append(Step("dispatch", chunk + 1))
        if chunk == 0 and shared == "dispatch":
            order.append(Step("shared"))
        order += [Step("experts", chunk), Step("combine", chunk)]
    if shared == "combine":
        order.append(Step("shared"))
    return tuple(order)


@dataclass(frozen=True)
class OverlapSchedule:
    """Runs chunks of tokens so that communication hides behind computation.

    Is a ``schedule`` of ``ExpertParallel``; a planner may fill its fields.

    Args:
        num_chunks (int): chunks of tokens of each rank; equal on all ranks. More hide
            more, but experts compute fewer rows at once. Static capacities are per
            chunk. Default: 2
        shared (str): shared experts run while the first chunks are dispatched
            (``"dispatch"``), or while the last chunk is combined (``"combine"``).
            Default: ``"dispatch"``
        order (tuple[Step], optional): order of all parts. Every chunk is dispatched,
            computed and combined once, in this order; ``Step("shared")`` comes
            once. Equal on all ranks. Default: None (dispatch of chunk i + 1, experts of
            chunk i, combine of chunk i, and so on)

    Results are those of one chunk: per token bit-equal where the experts' kernel does
    not let a row depend on others; gradients of expert weights are sums over the
    chunks, in another order than without.

    Activation checkpointing repeats the communication of a recomputed layer, unless its
    ``context_fn`` is :func:`~torch.distributed._moe.schedule.save_communication`.

    Example::
        >>> # xdoctest: +SKIP("needs a process group")
        >>> schedule = OverlapSchedule(num_chunks=4)
        >>> y, shared = schedule(switch, x, topk_indices, topk_weights, experts, mlp)
    """

    num_chunks: int = 2
    shared: Literal["dispatch", "combine"] = "dispatch"
    order: tuple[Step, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_chunks < 1:
            raise ValueError(
                f"OverlapSchedule: num_chunks must be at least 1, got {self.num_chunks}"
            )
        if self.shared not in ("dispatch", "combine"):
            raise ValueError(
                "OverlapSchedule: shared must be 'dispatch' or 'combine', "
                f"got {self.shared!r}"
            )
        if self.order is None:
            return
        wanted = {Step("shared")}
        for chunk in range(self.num_chunks):
            parts = [Step(p, chunk) for p in ("dispatch", "experts", "combine")]
            wanted.update(parts)
            at = [self.order.index(s) for s in parts if s in self.order]
            if len(at) < 3 or at != sorted(at):
                raise ValueError(
                    "OverlapSchedule: order must dispatch, compute and combine chunk "
                    f"{chunk} in this order, got {self.order}"
                )
        if set(self.order) != wanted or len(self.order) != len(wanted):
            raise ValueError(
                f"OverlapSchedule: order must have the parts of {self.num_chunks} "
                f"chunks and one shared, each once, got {self.order}"
            )

    def steps(self) -> tuple[Step, ...]:
        """The parts in the order in which they are issued."""
        return self.order or _default_order(self.num_chunks, self.shared)

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
            _own_groups(switch)
        sizes = _chunk_sizes(tokens.shape[0], self.num_chunks)
        inputs = list(
            zip(
                tokens.split(sizes),
                topk_indices.split(sizes),
                topk_weights.split(sizes),
            )
        )
        sent: list[Any] = [None] * self.num_chunks
        rows: list[Any] = [None] * self.num_chunks
        shared_output = None
        for part, chunk in self.steps():
            if part == "dispatch":
                sent[chunk] = _begin(_Dispatch(switch, inputs[chunk][1]), inputs[chunk])
            elif part == "experts":
                out, weights, ids = _end(*sent[chunk])
                routing = sent[chunk][0].routing
                rows[chunk] = _run(experts, switch, routing, out, ids, weights)
            elif part == "combine":
                routing = sent[chunk][0].routing
                sent[chunk] = _begin(_Combine(switch, routing), (rows[chunk],))
                rows[chunk] = None
            elif shared is not None:
                shared_output = shared()
        return torch.cat([_end(*pair) for pair in sent]), shared_output


def sequential_schedule(
    switch: TokenSwitch,
    tokens: Tensor,
    topk_indices: Tensor,
    topk_weights: Tensor,
    experts: Callable[[Tensor, Tensor, Tensor, int | None], Tensor],
    shared: Callable[[], Tensor | None] | None,
) -> tuple[Tensor, Tensor | None]:
    """Dispatch, experts, combine, shared experts, one after the other.

    The order in which the parts of a layer run is a function of this signature, which is that
    of :meth:`OverlapSchedule.__call__`, and ``ExpertParallel(schedule=...)`` takes another one.
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
    """``experts`` of received rows, ids and weights, with what the switch knows of them."""
    num_slots = getattr(switch, "num_slots", None)
    num_rows = None if num_slots is None else num_slots(routing)
    scaled = getattr(routing.handle, "scaled", ())
    if scaled:
        return experts(*rows, num_rows, input_scaled=scaled)
    return experts(*rows, num_rows)


def _chunk_sizes(total: int, num_chunks: int) -> list[int]:
    """As equal as possible, the larger ones first; 0 where there are too few."""
    # No divmod or comparison, which a dynamic number of tokens lacks or guards on.
    top = total + num_chunks - 1
    return [(top - chunk) // num_chunks for chunk in range(num_chunks)]


# -- communication in flight


@functools.cache
def _communication_thread() -> ThreadPoolExecutor:
    # One for all layers: two could issue collectives of a group in any order.
    return ThreadPoolExecutor(1, thread_name_prefix="moe_communication")


def _own_groups(switch: object) -> None:
    """Takes ``switch`` out of the groups that other threads communicate in."""
    if detect_fake_mode() or local_tensor_mode() is not None:
        return  # Nothing is sent.
    use_own_groups = getattr(switch, "use_own_groups", None)
    if use_own_groups is None:
        raise TypeError(
            "OverlapSchedule: on CPU, where communication has a thread of its own, switch "
            "must have groups of its own (use_own_groups) for it, "
            f"{type(switch).__name__} has none"
        )
    with _disable_current_modes():
        use_own_groups()


def _drain() -> None:
    """Waits for what the communication thread was given."""
    if _communication_thread.cache_info().currsize:
        _communication_thread().submit(int).result()


@functools.cache
def _side_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


# A forked process has no threads but its own.
register_after_fork(_communication_thread.cache_clear)


class _Queue:
    """What was sent in some groups since the last failure there that was seen.

    Behind a failure nothing is sent: other ranks are elsewhere by then, and a message of
    another size than they expect ends their process in a thread of gloo.
    """

    # The text: an error holds its frames.
    failure: str | None = None

    def run(self, work: Callable[..., Any], *inputs: Tensor) -> Any:
        if self.failure is not None:
            raise RuntimeError(
                "expert parallel communication: not sent, as what came before it failed: "
                f"{self.failure}"
            )
        try:
            return work(*inputs)
        except Exception as error:
            self.failure = "\n".join([str(error), *getattr(error, "__notes__", ())])
            raise


# By the first group of a switch, so that other models go on. Not by its name, which comes again.
_queues: WeakKeyDictionary[Any, _Queue] = WeakKeyDictionary()


def _queue_of(switch: TokenSwitch) -> _Queue:
    levels = getattr(switch, "levels", None)
    return _queues.setdefault(levels[0].group if levels else switch, _Queue())


class _Flight:
    """Result of communication that was issued and may not have arrived."""

    def __init__(
        self, work: Callable[..., Any], inputs: Sequence[Tensor], switch: TokenSwitch
    ) -> None:
        self._done: torch.Event | None = None
        self._future: Future[Any] | None = None
        region, alone = part_of_region()
        mode = None if region is None else region.part(inline=not alone)
        if region is not None and region.replays:
            # Nothing to wait for: what the collectives returned was kept.
            self._value = _without_grad(work, mode, *inputs)
            return
        work = functools.partial(_without_grad, work, mode)
        device = inputs[0].device
        if device.type == "cpu":
            if threading.current_thread().name.startswith("moe_communication"):
                raise AssertionError("communication inside communication")
            self._queue = _queue_of(switch)
        if not alone and device.type == "cpu":
            _drain()
            try:
                self._value = self._queue.run(work, *inputs)
            except Exception:
                self._seen()
                raise
        elif not alone:
            self._value = work(*inputs)
        elif device.type == "cpu":
            thread = _communication_thread()
            self._future = thread.submit(self._queue.run, work, *inputs)
        else:
            stream = _side_stream(device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            _used_on(stream, inputs)
            with stream:
                self._value = work(*inputs)
                self._done = stream.record_event()

    def result(self) -> Any:
        """Waits; raises what the communication raised."""
        if self._future is not None:
            future, self._future = self._future, None
            try:
                return future.result()
            except Exception:
                self._seen()
                raise
            finally:
                # Breaks a reference cycle of the error and its frames. It would keep the process
                # group alive, and the threads of the group run into the shutdown of Python.
                del future
        if self._done is not None:
            stream = torch.accelerator.current_stream(self._done.device)
            stream.wait_event(self._done)
            _used_on(stream, self._value)
        return self._value

    def _seen(self) -> None:
        """The caller knows of a failure: what it does from now on is a new beginning."""
        for key in [k for k, queue in _queues.items() if queue is self._queue]:
            del _queues[key]


def _used_on(stream: torch.Stream, tensors: Sequence[Tensor | None]) -> None:
    """Keeps the allocator from reusing ``tensors`` before ``stream`` is done."""
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)


def _without_grad(
    work: Callable[..., Any], mode: TorchDispatchMode | None, *inputs: Tensor
) -> Any:
    # Grad mode belongs to a thread, and the autograd nodes are made below.
    with torch.no_grad():
        if mode is None:
            return work(*inputs)
        with _disable_current_modes(), mode:
            return work(*inputs)


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


class _Exchange:
    """A :class:`_Dispatch`, a :class:`_Combine` or a fetch in both directions."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.needs: Sequence[bool]
        self.there: _Flight
        self.back: _Flight

    @property
    def routing(self) -> Routing:
        return self.part.routing

    def fly(self, work: Callable[..., Any], inputs: Sequence[Tensor]) -> _Flight:
        return _Flight(work, inputs, self.part.switch)


class _Begin(torch.autograd.Function):
    """Issues communication; its backward waits for that of the gradients."""

    @staticmethod
    # pyrefly: ignore [bad-override]
    def forward(ctx: Any, exchange: _Exchange, *inputs: Tensor) -> Tensor:
        ctx.exchange = exchange
        exchange.needs = ctx.needs_input_grad[1:]
        exchange.there = exchange.fly(exchange.part.forward, inputs)
        # Carries the edge of the graph; what was sent arrives in _End.
        return inputs[0].new_empty(0)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        flight = ctx.exchange.back
        del ctx.exchange.back
        return None, *flight.result()


class _End(torch.autograd.Function):
    """Waits for communication; its backward issues that of the gradients."""

    @staticmethod
    # pyrefly: ignore [bad-override]
    def forward(ctx: Any, exchange: _Exchange, edge: Tensor) -> Any:
        ctx.exchange = exchange
        outputs = exchange.there.result()
        del exchange.there  # Nothing keeps what arrived but its users.
        ctx.edge = (edge.dtype, edge.device)
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        exchange = ctx.exchange
        backward = functools.partial(exchange.part.backward, exchange.needs)
        exchange.back = exchange.fly(backward, grads)
        dtype, device = ctx.edge
        return None, torch.zeros(0, dtype=dtype, device=device)


def _begin(part: Any, inputs: tuple[Tensor, ...]) -> tuple[_Exchange, Any]:
    exchange = _Exchange(part)
    if isinstance(part, _Dispatch):
        inputs = (inputs[0], inputs[2])  # without the ids
    if torch.compiler.is_compiling():
        return exchange, part.traced(*inputs)
    return exchange, _Begin.apply(exchange, *inputs)


def _end(exchange: _Exchange, sent: Any) -> Any:
    return sent if torch.compiler.is_compiling() else _End.apply(exchange, sent)


# -- what a schedule would gain


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


# -- recomputation


_COLLECTIVES = (
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._c10d_functional.wait_tensor.default,
)


def _policy(
    inner: Callable[..., CheckpointPolicy] | None,
    ctx: Any,
    op: Any,
    *args: Any,
    **kwargs: Any,
) -> CheckpointPolicy:
    if op in _COLLECTIVES:
        return CheckpointPolicy.MUST_SAVE
    if op is torch.ops.aten._to_copy.default:
        target = kwargs.get("device")
        # Sizes on their way to the host: reading them again would sync again.
        if target is not None and torch.device(target).type == "cpu":
            if args[0].device.type != "cpu":
                return CheckpointPolicy.MUST_SAVE
    if inner is None:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return inner(ctx, op, *args, **kwargs)


class Region(Protocol):
    """Dispatch mode of a checkpointed region, in its forward or in its recomputation.

    Attributes:
        replays (bool): whether the region is recomputed.
    """

    replays: bool

    def part(self, inline: bool) -> TorchDispatchMode | None:
        """See :func:`part_of_region`."""
        ...


class _Saving(_CachingTorchDispatchMode):
    """Forward of a region."""

    replays = False

    def __init__(
        self,
        policy: Callable[..., CheckpointPolicy],
        parts: list[TorchDispatchMode | None],
    ) -> None:
        super().__init__(policy, defaultdict(dict))
        self.parts = parts

    def part(self, inline: bool) -> TorchDispatchMode | None:
        if inline:
            self.parts.append(None)
            return None
        # A storage of its own, as parts and what runs beside them have no common order.
        saving, replaying = create_selective_checkpoint_contexts(self.policy_fn)
        self.parts.append(replaying)
        return saving


class _Replaying(_CachedTorchDispatchMode):
    """Recomputation of a region."""

    replays = True

    def __init__(self, forward: _Saving) -> None:
        super().__init__(None, forward.storage)
        self.parts = forward.parts
        self.next_part = 0

    def __enter__(self) -> Self:
        self.next_part = 0
        return super().__enter__()

    def part(self, inline: bool) -> TorchDispatchMode | None:
        self.next_part += 1
        return self.parts[self.next_part - 1]


def part_of_region() -> tuple[Region | None, bool]:
    """The innermost :func:`save_communication` region here, and if it is the only mode.

    Communication inside a region that is to run elsewhere calls ``region.part(inline)``
    and runs under the mode that this returns. In the recomputation, it must be called in
    the same order, and the work run under the mode with no other, which gives back what
    the collectives returned. None stands for work that runs, or ran in forward, under
    the mode of the region itself.
    """
    stack = _get_current_dispatch_mode_stack()
    for mode in reversed(stack):
        if isinstance(mode, (_Saving, _Replaying)):
            return mode, len(stack) == 1
    return None, not stack


def _contexts(
    policy: Callable[..., CheckpointPolicy],
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    forward = _Saving(policy, [])
    return forward, _Replaying(forward)


def save_communication(
    policy: Callable[..., CheckpointPolicy] | None = None,
) -> Callable[[], tuple[TorchDispatchMode, TorchDispatchMode]]:
    """``context_fn`` of :func:`torch.utils.checkpoint.checkpoint` for MoE layers.

    Args:
        policy (callable, optional): decides, as a policy function of
            :func:`~torch.utils.checkpoint.create_selective_checkpoint_contexts`, about
            all other ops. Default: None (they are recomputed)

    Under :func:`torch.compile`, a static switch sets its overflow counter inside the
    region, which needs
    ``torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True``.

    Example::
        >>> # xdoctest: +SKIP("needs a process group")
        >>> y = checkpoint(layer, x, use_reentrant=False, context_fn=save_communication())
    """
    return functools.partial(_contexts, functools.partial(_policy, policy))


# -- rerun


def grow_and_rerun(
    switches: list[TokenSwitchAllToAll],
    step: Callable[[], R],
    *,
    max_reruns: int = 2,
    group: ProcessGroup | None = None,
) -> R:
    """Runs ``step`` and, if tokens did not fit, again with enough capacity.

    Collective over the groups of ``switches``; all ranks rerun together.

    Args:
        switches (list[TokenSwitchAllToAll]): static switches that ``step`` uses.
        step (callable): forward and backward of one step. Runs again from the
            start: it must zero its gradients itself, and change nothing else.

    Keyword Args:
        max_reruns (int): one is enough unless a rerun routes differently, as when
            a later layer or level routes tokens that an earlier one left out: then
            one for each. Default: 2
        group (ProcessGroup, optional): ranks that ``step`` communicates with beyond
            the groups of the switches, such as data-parallel replicas: if one has to
            rerun, all do. Default: None

    Returns:
        What the last ``step`` returned; nothing was left out in it.
    """
    for _ in range(max_reruns + 1):
        result = step()
        # Every switch communicates, so that no rank stops at the first overflow.
        grown = [switch.grow() for switch in switches]
        overflow = any(grown)
        if group is not None:
            device = dist.distributed_c10d._get_pg_default_device(group)
            flag = torch.tensor([overflow], dtype=torch.int32, device=device)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
            overflow = bool(flag)
        if not overflow:
            return result
    raise RuntimeError(
        f"grow_and_rerun: tokens still did not fit after {max_reruns} reruns; "
        f"capacities are now {[s.capacity for s in switches]}"
    )
