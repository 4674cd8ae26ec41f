# mypy: allow-untyped-defs
"""Time and memory of a model on one CPU rank, from a run under fake tensors.

For a GPU the planner models attention by its sizes. A trace has the model's own ops, their
seconds by :func:`.moe_estimator.op_seconds`, and the bytes that exist at once.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from fnmatch import fnmatch
from typing import Any, cast, TYPE_CHECKING

import torch
from torch import nn, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.moe_estimator import MoERuntimeEstimator
from torch.distributed._tools.moe_traced_model import Traced
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.module_tracker import ModuleTracker


if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from torch.distributed._tools.moe_profile import Profile
    from torch.distributed.tensor.parallel._expert_adapters import ExpertAdapter


__all__ = [
    "LiveBytes",
    "causal_loss",
    "checkpointed",
    "estimated_seconds",
    "fake_parameters",
    "layers_with",
    "matched",
    "trace",
]


class LiveBytes:
    """The bytes of the tensors that exist at once, and their owners."""

    def __init__(self) -> None:
        self.live: dict[int, Any] = {}
        self.bytes = self.peak = 0
        self.by_owner: Counter[Any] = Counter()

    def count(self, out: Any, owner: Any = None) -> None:
        """Counts the results of an operator."""
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.live:
                    self.live[key] = owner
                    self.bytes += size
                    self.by_owner[owner] += size
                    weakref.finalize(storage, self._freed, key, size)

    def move(self, tensor: Tensor, owner: Any) -> None:
        """Moves the bytes of a tensor to another owner."""
        storage = tensor.untyped_storage()
        self.by_owner[self.live[storage._cdata]] -= storage.nbytes()
        self.by_owner[owner] += storage.nbytes()
        self.live[storage._cdata] = owner

    def _freed(self, key: int, size: int) -> None:
        self.by_owner[self.live.pop(key)] -= size
        self.bytes -= size


class _Run(MoERuntimeEstimator, LiveBytes):
    """Also tracks the seconds inside some modules, and the bytes that exist at once."""

    def __init__(self, p: Profile, inside: set[str]) -> None:
        MoERuntimeEstimator.__init__(self, p)
        LiveBytes.__init__(self)
        self.inside, self.split, self.modules = inside, 0.0, ModuleTracker()
        self.before = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        before = self.seconds
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not self.inside.isdisjoint(self.modules.parents):
            self.split += self.seconds - before
        self.count(out)
        self.peak = max(self.peak, self.bytes)
        return out

    def after_last(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of the last layer: a new peak begins when its gradient arrives."""
        first = output[0] if isinstance(output, tuple) else output

        def begin(grad: Tensor) -> None:
            self.before, self.peak = self.peak, self.bytes

        first.register_hook(begin)

    @property
    def dense(self) -> float:
        experts = ("_moe_mlp", "_moe_mlp_backward")
        return self.seconds - sum(self.by_op[name] for name in experts)


def trace(
    model: nn.Module,
    p: Profile,
    seq: int,
    experts: Sequence[str],
    blocks: Sequence[str],
    adapter: ExpertAdapter | None = None,
    loss: Callable[[nn.Module], Tensor] | None = None,
    tp_plan: Mapping[str, str] | None = None,
) -> Traced:
    """A forward and backward of one sequence under fake tensors; nothing is computed.

    Args:
        model (nn.Module): not yet parallel; its parameters may be on the meta device.
        p (Profile): the machine.
        seq (int): tokens of the sequence.
        experts, blocks (sequence of str): names of the modules with experts, and of the layers.
        adapter (ExpertAdapter, optional): of the experts.
        loss (callable, optional): of the model. Default: ``model(input_ids=ids, labels=ids)``
        tp_plan (mapping, optional): of the modules that tensor parallelism splits.
    """
    owner = type(model).__name__
    inside = {f"{owner}.{n.rpartition('.')[0]}" for n in matched(model, tp_plan or {})}
    run = loss or functools.partial(causal_loss, seq=seq)
    forward, split, ops, runs = 0.0, 0.0, 0, {}
    for recompute in ("none", "full"):
        with contextlib.ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            tensors = stack.enter_context(fake_parameters(model))
            stack.enter_context(_local_experts(model, experts, adapter))
            if recompute == "full":
                stack.enter_context(checkpointed(model, blocks))
            seen = stack.enter_context(_Run(p, inside))
            seen.live.update(
                {t.untyped_storage()._cdata: None for t in tensors.values()}
            )
            last = model.get_submodule(blocks[-1])
            tracked = seen.modules if recompute == "none" else contextlib.nullcontext()
            with last.register_forward_hook(seen.after_last), tracked:
                value = run(model)
            if recompute == "none":
                forward, split, ops = seen.dense, seen.split, seen.ops
            value.backward()
        runs[recompute] = seen
    once = runs["none"]
    gradients = max(
        sum(
            p.numel() * p.element_size() for p in model.get_submodule(name).parameters()
        )
        for name in experts
    )
    peaks = {
        name: (float(seen.before), float(max(seen.peak - gradients, 0)))
        for name, seen in runs.items()
    }
    styled = len(experts) + len([*matched(model, tp_plan or {})])
    own = sum(
        p.numel() for name in experts for p in model.get_submodule(name).parameters()
        if p.dim() == 3
    )  # fmt: skip
    return Traced(
        once.dense, once.dense * split / forward, forward, peaks, (once.ops, ops), styled,
        own, sum(p.numel() for p in model.parameters()),
    )  # fmt: skip


def estimated_seconds(
    module: nn.Module, p: Profile, call: Callable[[], object]
) -> tuple[float, int]:
    """Seconds of a call of ``module`` by :func:`.moe_estimator.op_seconds`, and its number of ops."""
    with FakeTensorMode(allow_non_fake_inputs=True), fake_parameters(module):
        with MoERuntimeEstimator(p) as seen:
            call()
    return seen.seconds, seen.ops


def causal_loss(model: nn.Module, seq: int, batch: int = 1) -> Tensor:
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    cached = hasattr(getattr(model, "config", None), "use_cache")
    try:
        options = {"use_cache": False} if cached else {}
        return model(input_ids=ids, labels=ids, **options).loss
    except (AttributeError, TypeError) as error:
        raise ValueError(
            "loss must be given for a model that is not called as "
            f"model(input_ids=ids, labels=ids).loss, got {type(model).__name__}: {error}"
        ) from error


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def layers_with(model: nn.Module, experts: Sequence[str]) -> list[str]:
    """Names of the layers: members of the outermost lists that hold experts, or the model."""
    lists: dict[str, None] = {}
    for name in experts:
        parts = name.split(".")
        for i in range(len(parts)):
            owner = ".".join(parts[:i])
            if isinstance(model.get_submodule(owner), _LISTS):
                lists[owner] = None
                break
        else:
            return [""]
    return [
        f"{owner}.{child}" if owner else child
        for owner in lists
        for child, _ in model.get_submodule(owner).named_children()
    ]


def matched(model: nn.Module, patterns: Iterable[str]) -> Iterator[str]:
    """Names of the modules that match the patterns."""
    for name, _ in model.named_modules():
        if any(fnmatch(name, pattern) for pattern in patterns):
            yield name


def _drop(tensor: Tensor) -> None:
    tensor.grad = None


@contextlib.contextmanager
def fake_parameters(
    model: nn.Module, on_grad: Callable[[Tensor], None] = _drop
) -> Iterator[dict[str, Tensor]]:
    """Fake parameters on the CPU; each gradient is dropped at once, or passed to ``on_grad``."""
    tensors: dict[str, Tensor] = {}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
        if isinstance(t, nn.Parameter):
            fake.requires_grad_(t.requires_grad)
            if t.requires_grad:
                fake.register_post_accumulate_grad_hook(on_grad)
        tensors[name] = fake
    # A weight that is tied has several owners, and a shared module several names.
    with _reparametrize_module(model, tensors, tie_weights=True, stack_weights=True):
        yield tensors


@contextlib.contextmanager
def _local_experts(
    model: nn.Module, experts: Sequence[str], adapter: ExpertAdapter | None
) -> Iterator[None]:
    """Runs all experts by their adapter, as a rank that has all of them would."""
    from torch.distributed.tensor.parallel._expert_adapters import DEFAULT_ADAPTERS

    def exchange(x, ids, weights, run, shared=None):  # type: ignore[no-untyped-def]
        tokens, ids = x.flatten(0, -2), ids.flatten(0, -2)
        weights = torch.ones(ids.shape) if weights is None else weights.flatten(0, -2)
        y = run(tokens, ids, weights).view(x.shape)
        other = None if shared is None else shared()
        return y if other is None else y + other

    with contextlib.ExitStack() as stack:
        for name in experts:
            module = model.get_submodule(name)
            kinds = DEFAULT_ADAPTERS if adapter is None else (adapter,)
            kind = next(a for a in kinds if a.matches(module))
            original = getattr(module, kind.method)
            call = functools.partial(kind.run, module, original, cast("Any", exchange))
            stack.enter_context(_instead(module, kind.method, call))
        yield


@contextlib.contextmanager
def checkpointed(model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in blocks:
            block = model.get_submodule(name)
            call = functools.partial(checkpoint, block.forward, use_reentrant=False)
            stack.enter_context(_instead(block, "forward", call))
        yield


@contextlib.contextmanager
def _instead(module: nn.Module, name: str, call: Callable[..., Any]) -> Iterator[None]:
    before = vars(module).get(name)
    vars(module)[name] = call
    try:
        yield
    finally:
        del vars(module)[name]
        if before is not None:
            vars(module)[name] = before
