"""Communication beside computation: where it runs, and its two autograd nodes.

Where communication runs
    cpu      on one thread of the process, first in first out, in groups that only it
             uses. So all ranks issue the same collectives in the same order,
             whatever their threads do. The first call makes the groups.
    other    on a side stream of the device, issued by the calling thread.
    inline   on the calling thread, after everything in flight, if another thread would miss
             its dispatch mode (LocalTensorMode, selective checkpointing, ..., but not that of
             save_communication).
    compile  in the graph, in the order of the steps. The compiler decides what
             overlaps.

Backward
    Every communication is a pair of autograd nodes. The backward of the later one
    issues the communication of the gradient, the backward of the earlier one waits for
    it. The engine runs nodes in the reverse order of their creation. Gradients of all
    outputs are sent first. Then the chunks of a schedule run, last chunk first;
    each computes while the gradients of its neighbours travel. Only
    the shared experts can hide the first gradient to arrive and the last to leave.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.autograd.function import once_differentiable
from torch.distributed._local_tensor import local_tensor_mode
from torch.distributed._moe.recompute import part_of_region
from torch.multiprocessing._atfork import register_after_fork
from torch.utils._python_dispatch import _disable_current_modes, TorchDispatchMode


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed._token_switch import Routing


__all__ = ["begin", "end", "InFlight", "use_own_groups"]


@functools.cache
def _communication_thread() -> ThreadPoolExecutor:
    # One for all layers, as two could issue collectives of a group in any order.
    return ThreadPoolExecutor(1, thread_name_prefix="moe_communication")


def use_own_groups(switch: object) -> None:
    """Takes ``switch`` out of the groups that other threads communicate in."""
    if detect_fake_mode() or local_tensor_mode() is not None:
        return  # Nothing is sent.
    use = getattr(switch, "use_own_groups", None)
    if use is None:
        raise TypeError(
            "OverlapSchedule: on CPU, where communication has a thread of its own, switch "
            "must have groups of its own (use_own_groups) for it, "
            f"{type(switch).__name__} has none"
        )
    with _disable_current_modes():
        use()


def _drain() -> None:
    """Waits until the communication thread is idle."""
    if _communication_thread.cache_info().currsize:
        _communication_thread().submit(int).result()


@functools.cache
def _side_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


# A forked process has no threads but its own.
register_after_fork(_communication_thread.cache_clear)


class _Queue:
    """The communication in some groups since the caller saw their last failure.

    After a failure nothing is sent. Other ranks are elsewhere by then, and a message of
    an unexpected size would end their process in a thread of gloo.
    """

    # Only the text, as an error holds its frames.
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


# By the first group of a switch, so that other models go on. Names of groups are reused.
_queues: WeakKeyDictionary[Any, _Queue] = WeakKeyDictionary()


def _queue_of(switch: Any) -> _Queue:
    levels = getattr(switch, "levels", None)
    return _queues.setdefault(levels[0].group if levels else switch, _Queue())


class _Flight:
    """Result of issued communication that may not have arrived."""

    def __init__(
        self, work: Callable[..., Any], inputs: Sequence[Tensor], switch: Any
    ) -> None:
        self._done: torch.Event | None = None
        self._future: Future[Any] | None = None
        region, alone = part_of_region()
        mode = None if region is None else region.part(inline=not alone)
        if region is not None and region.replays:
            # Nothing to wait for, as the results of the collectives were kept.
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
                # Breaks a reference cycle of the error and its frames, which would keep the process
                # group and its threads alive until Python shuts down.
                del future
        if self._done is not None:
            stream = torch.accelerator.current_stream(self._done.device)
            stream.wait_event(self._done)
            _used_on(stream, self._value)
        return self._value

    def _seen(self) -> None:
        """The caller knows of the failure, so later communication starts anew."""
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
    # Grad mode is per thread; the autograd nodes are made below.
    with torch.no_grad():
        if mode is None:
            return work(*inputs)
        with _disable_current_modes(), mode:
            return work(*inputs)


class InFlight:
    """An issued part: its forward communication, then its backward.

    Args:
        part (object): has the ``switch`` that communicates, ``forward(*inputs)`` and ``backward(needs,
            *grads)`` without autograd, and ``traced(*inputs)`` with autograd, for a graph.
    """

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
    """Issues communication; its backward waits for the gradients."""

    @staticmethod
    # pyrefly: ignore [bad-override]
    def forward(ctx: Any, exchange: InFlight, *inputs: Tensor) -> Tensor:
        ctx.exchange = exchange
        exchange.needs = ctx.needs_input_grad[1:]
        exchange.there = exchange.fly(exchange.part.forward, inputs)
        # Only carries the edge of the graph; _End returns what arrives.
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
    def forward(ctx: Any, exchange: InFlight, edge: Tensor) -> Any:
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


def begin(part: Any, inputs: Sequence[Tensor]) -> tuple[InFlight, Any]:
    """Issues ``part``; returns the arguments of :func:`end`."""
    exchange = InFlight(part)
    if torch.compiler.is_compiling():
        return exchange, part.traced(*inputs)
    return exchange, _Begin.apply(exchange, *inputs)


def end(exchange: InFlight, sent: Any) -> Any:
    """Waits for the results; a single output is not in a tuple."""
    return sent if torch.compiler.is_compiling() else _End.apply(exchange, sent)
