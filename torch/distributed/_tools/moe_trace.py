# mypy: allow-untyped-defs
"""What a model takes on one CPU rank, from a run under fake tensors.

The planner knows attention by its sizes; a model at hand says what it does: its own ops, their
seconds by :func:`.moe_estimator.op_seconds`, and the bytes that are there at once.
:func:`explain_memory` says whose these are.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections import Counter
from fnmatch import fnmatch
from typing import Any, cast, NamedTuple, TYPE_CHECKING

import torch
from torch import nn, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import moe_cost_model as cost
from torch.distributed._tools.moe_calibration import measure_calls
from torch.distributed._tools.moe_config import _has_experts
from torch.distributed._tools.moe_cpu_model import cpu_exchange, cpu_experts
from torch.distributed._tools.moe_estimator import (
    Memory,
    MoERuntimeEstimator,
    Step,
    uneven,
)
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
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

    from torch.distributed._tools.moe_config import MoEConfig
    from torch.distributed._tools.moe_estimator import Layout
    from torch.distributed._tools.moe_profile import Profile
    from torch.distributed.tensor.parallel._expert_adapters import ExpertAdapter


__all__ = ["explain_memory", "measure_stack", "StepMemory", "trace", "Traced"]


class Traced(NamedTuple):
    """Of one sequence.

    Attributes:
        dense: seconds of forward and backward without ``_moe_mlp``.
        split: those of them that tensor parallelism shares out.
        repeated: of the forward, which is run twice where the layers are checkpointed.
        bytes: by ``recompute``, peaks of activations and temporary tensors: until the gradient is at
            the last layer; and after that, without the gradients of a layer's experts.
    """

    dense: float
    split: float
    repeated: float
    bytes: dict[str, tuple[float, float]]

    def memory(
        self, model: MoEConfig, x: Layout, seq: int, global_batch: int
    ) -> Memory:
        """Peak bytes of a rank: its shards, what FSDP has together, and activations."""
        weights, size = model.parameters(), cost.ITEMSIZE[x.dtype]
        expert, (split, around) = weights["expert"], self._others(model, weights)
        own = expert / x.ep / x.expert_dp * uneven(model, x)
        owned = ((split / x.tp + around) / x.dp + own) * x.replicate
        layer = (expert / x.ep + split / x.tp) / model.layers
        # Beside the gathered vocabulary and the gradient of its head: two layers, the gradients
        # of one, and in float32 what is scattered and its sum.
        around *= 1.5 * size
        layers = 3 * layer * size + 4 * layer * (1 + 1 / x.gpus)
        share = 1 - self.split / self.dense * (1 - 1 / x.tp)
        head, kept = (x.micro_batch * n * share for n in self.bytes[x.recompute])
        rows = 0.0
        if x.ep > 1:  # of experts: received, and what returns
            tokens = x.micro_batch * seq / x.tp
            rows = 2 * tokens * cost.copies(x.ep, x.ep, model.k).ranks
            rows *= 1 if x.recompute == "full" else model.layers - model.dense
        exchanged, gradients = rows * model.d * size, x.gradient_bytes * owned
        if x.accumulation(global_batch) == 1:  # gradients come as activations go
            gradients = max(0.0, gradients - kept - exchanged)
        held = x.optimizer_bytes * owned + around + gradients
        if head > kept + layers:
            return Memory(held, head, exchanged, 0.0)
        return Memory(held + layers, kept, exchanged, 0.0)

    def step(
        self,
        p: Profile,
        model: MoEConfig,
        x: Layout,
        *,
        global_batch: int,
        seq: int,
        imbalance: float = 1.0,
    ) -> Step:
        """A training step on CPU ranks: parts of which none hides another."""
        if (c := p.cpu) is None:
            raise ValueError(f"step: {p.name} must be the profile of a CPU")
        accumulation, full = x.accumulation(global_batch), x.recompute == "full"
        layers, moe, size = (
            model.layers,
            model.layers - model.dense,
            cost.ITEMSIZE[x.dtype],
        )
        tokens = x.micro_batch * seq / x.tp  # that a rank sends to the experts
        sizes = (tokens, model.d, model.f, model.experts // x.ep, model.k)
        work = cpu_experts(c, *sizes, pass_="fwd+bwd", dtype=x.dtype)
        if full:
            work += cpu_experts(c, *sizes, pass_="fwd", dtype=x.dtype)
        sent = cpu_exchange(
            p, tokens, model.d, model.k, x.ep, pass_="fwd+bwd", dtype=x.dtype
        )

        def link(nbytes: float, ranks: int, messages: int = 1) -> float:
            """A gather, or a scatter of sums, of so many bytes of all ranks together."""
            if ranks == 1:
                return 0.0
            start = p.constants.fast_us * cost.US
            return messages * start + nbytes * (1 - 1 / ranks) / p.device.fast

        weights = model.parameters()
        expert, (split, around) = weights["expert"] / x.ep, self._others(model, weights)
        other = split / x.tp + around
        # Gathered in both passes, reduced in float32; copied out of and into what travels.
        moved = 2 * size + 4
        fsdp = link(other * moved, x.dp, 3 * layers)
        fsdp += link(expert * moved, x.expert_dp, 3 * moe)
        fsdp += 2 * (expert + other) * moved / c.memory
        row = x.micro_batch * seq * model.d * size
        # Sums of attention in both passes, and tokens around the experts.
        links = (2 + full) * (2 * layers + moe) * link(row, x.tp)
        dense = self.dense - self.split * (1 - 1 / x.tp) + full * self.repeated
        owned = (other / x.dp + expert / x.expert_dp) * x.replicate
        parts = {
            "attention": x.micro_batch * dense * p.constants.stack,
            "experts": moe * work * imbalance,
            "comm": moe * sent,
            "tp_links": links,
            "fsdp": fsdp,
        }
        micro = sum(parts.values())
        seconds = accumulation * micro + 28 * owned / c.memory
        rate = global_batch * seq / seconds / x.gpus
        # As of the GPUs' steps: of a block.
        of_block = {name: value / layers for name, value in parts.items()}
        layer = sum(of_block.values())
        return Step(rate, seconds, layer, of_block["comm"], 0.0, of_block, False)

    @staticmethod
    def _others(model: MoEConfig, weights: dict[str, float]) -> tuple[float, float]:
        """Parameters that tensor parallelism splits, and that it does not: router, vocabulary."""
        around = 2 * model.vocab * model.d
        around += (model.layers - model.dense) * model.d * model.experts
        return weights["other"] - around, around


class _Bytes:
    """The bytes of the tensors that are there at once, and whose they are."""

    def __init__(self) -> None:
        self.live: dict[int, Any] = {}
        self.bytes = self.peak = 0
        self.by_owner: Counter[Any] = Counter()

    def count(self, out: Any, owner: Any = None) -> None:
        """What an operator returned."""
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
        """Its bytes are another's."""
        storage = tensor.untyped_storage()
        self.by_owner[self.live[storage._cdata]] -= storage.nbytes()
        self.by_owner[owner] += storage.nbytes()
        self.live[storage._cdata] = owner

    def _freed(self, key: int, size: int) -> None:
        self.by_owner[self.live.pop(key)] -= size
        self.bytes -= size


class _Run(MoERuntimeEstimator, _Bytes):
    """Also the seconds inside of some modules, and the bytes that are there at once."""

    def __init__(self, p: Profile, inside: set[str]) -> None:
        MoERuntimeEstimator.__init__(self, p)
        _Bytes.__init__(self)
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
        """A forward hook of the last layer: where its gradient comes, another peak begins."""
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
    run = loss or functools.partial(_causal_loss, seq=seq)
    forward, split, runs = 0.0, 0.0, {}
    for recompute in ("none", "full"):
        with contextlib.ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            tensors = stack.enter_context(_fake_parameters(model))
            stack.enter_context(_local_experts(model, experts, adapter))
            if recompute == "full":
                stack.enter_context(_checkpointed(model, blocks))
            seen = stack.enter_context(_Run(p, inside))
            seen.live.update(
                {t.untyped_storage()._cdata: None for t in tensors.values()}
            )
            last = model.get_submodule(blocks[-1])
            tracked = seen.modules if recompute == "none" else contextlib.nullcontext()
            with last.register_forward_hook(seen.after_last), tracked:
                value = run(model)
            if recompute == "none":
                forward, split = seen.dense, seen.split
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
    return Traced(once.dense, once.dense * split / forward, forward, peaks)


class StepMemory(NamedTuple):
    """The bytes of tensors when a training step has most of them.

    Attributes:
        peak: by layer, which is the name of a block or "" for what is around the blocks, and by kind.
            ``weights``, ``gradients`` and ``optimizer`` are of the layer's parameters. ``attention``,
            ``router``, ``experts``, ``embedding``, ``loss`` (the head included) and ``other`` (norms and
            residuals) are what forward made there. ``backward`` are gradients of activations, and what
            checkpointing computes again; ``update`` the optimizer's temporary tensors.
        kept: the same at the end of forward, without parameters: what is saved for backward.
        where: pass, module and operator of the peak.
    """

    peak: dict[tuple[str, str], int]
    kept: dict[tuple[str, str], int]
    where: tuple[str, str, str]

    @property
    def total(self) -> int:
        return sum(self.peak.values())

    def explain(self) -> str:
        """A table of both, equal neighbours in one row, and where the peak is."""
        pass_, module, op = self.where
        lines = [
            f"peak {_size(self.total)}, in {pass_} of {module or 'the model'}, {op}"
        ]
        for title, parts in (
            ("at the peak", self.peak),
            ("kept by forward", self.kept),
        ):
            kinds = [k for k in _KINDS if any(kind == k for _, kind in parts)]
            rows: list[tuple[list[str], list[int]]] = []
            for layer in dict.fromkeys(layer for layer, _ in parts):
                sizes = [parts.get((layer, kind), 0) for kind in kinds]
                if rows and rows[-1][1] == sizes:
                    rows[-1][0].append(layer)
                else:
                    rows.append(([layer], sizes))
            rows.append((["total"], [sum(column) for column in zip(*(
                [n * len(layers) for n in sizes] for layers, sizes in rows
            ))]))  # fmt: skip
            cells = [[title, *kinds, "all"]]
            for layers, sizes in rows:
                name = layers[0] or "around the layers"
                name += f" ... {layers[-1]}, each" if len(layers) > 1 else ""
                cells.append([name, *map(_size, (*sizes, sum(sizes)))])
            widths = [max(map(len, column)) for column in zip(*cells)]
            lines.append("")
            for name, *sizes in cells:
                numbers = (size.rjust(w) for size, w in zip(sizes, widths[1:]))
                lines.append("  ".join((name.ljust(widths[0]), *numbers)))
        return "\n".join(lines)


_ADAMW = functools.partial(torch.optim.AdamW, fused=True)
_KINDS = ("weights", "gradients", "optimizer", "embedding", "attention", "router",
          "experts", "other", "loss", "backward", "update")  # fmt: skip


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes / 1e3:.3g} kB"


class _Modules(ModuleTracker):
    """Without hooks on what checkpointing computes again, which would keep it."""

    def _fw_pre_hook(self, mod, input) -> None:
        if not self.is_bw:
            super()._fw_pre_hook(mod, input)

    def _fw_post_hook(self, mod, input, output) -> None:
        if not self.is_bw:
            super()._fw_post_hook(mod, input, output)


class _Owned(TorchDispatchMode, _Bytes):
    """Layer and kind of the bytes, as StepMemory has them."""

    def __init__(
        self, model: nn.Module, experts: Sequence[str], blocks: Sequence[str]
    ) -> None:
        TorchDispatchMode.__init__(self)
        _Bytes.__init__(self)
        self.modules, self.root = _Modules(), f"{type(model).__name__}."
        self.experts, self.blocks, self.updates = experts, blocks, False
        self.peaks: dict[tuple[str, str], int] = {}
        self.where = ("", "", "")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        names = (n for n in self.modules.parents if n.startswith(self.root))
        name = max((n.removeprefix(self.root) for n in names), key=len, default="")
        pass_ = "backward" if self.modules.is_bw else "forward"
        pass_ = "update" if self.updates else pass_
        op = func._overloadpacket.__name__
        self.count(
            out, self.owner(name, self.kind(name, op) if pass_ == "forward" else pass_)
        )
        if self.bytes > self.peak:
            self.peak, self.peaks = self.bytes, self.now()
            self.where = (pass_, name, op)
        return out

    def now(self) -> dict[tuple[str, str], int]:
        return {owner: n for owner, n in self.by_owner.items() if n}

    def owner(self, name: str, kind: str) -> tuple[str, str]:
        """Of what belongs to the module or parameter."""
        return max(
            (b for b in self.blocks if _inside(name, b)), key=len, default=""
        ), kind

    def kind(self, name: str, op: str) -> str:
        """Of what an operator of forward makes in a module."""
        block, _ = self.owner(name, "")
        parts = name.removeprefix(block).split(".")
        if not block and "" not in self.blocks:
            return "embedding" if "embed" in parts[-1] else "loss"
        if op == "_moe_topk" or {"gate", "router"} & {*parts}:
            return "router"
        if any("attn" in part or "attention" in part for part in parts):
            return "attention"
        return "experts" if any(_inside(name, e) for e in self.experts) else "other"


def _inside(name: str, owner: str) -> bool:
    return not owner or name == owner or name.startswith(f"{owner}.")


def explain_memory(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor] | None = None,
    *,
    batch: int = 1,
    seq: int = 4096,
    recompute: str = "none",
    optimizer: Callable[..., torch.optim.Optimizer] = _ADAMW,
) -> StepMemory:
    """Whose the bytes of a training step on the CPU are; nothing is computed or allocated.

    The second step runs: the optimizer has its state, and gradients are None.

    Args:
        model (nn.Module): its parameters may be on the meta device.
        loss (callable, optional): of the model. Default: ``model(input_ids=ids, labels=ids)``

    Keyword Args:
        batch, seq (int): of ``ids``.
        recompute (str): ``"full"`` checkpoints every layer, ``"none"`` does not.
        optimizer (callable): from the parameters. Default: ``AdamW(fused=True)``, as a step in
            place needs no temporary tensors

    Raises:
        ValueError: the model has no experts, or is called otherwise.
    """
    experts = [n for n, m in model.named_modules() if _has_experts(m)]
    if not experts:
        raise ValueError(
            "explain_memory: model must have stacked weights of experts, (E, out, in), got none "
            f"in {type(model).__name__}"
        )
    blocks = layers_with(model, experts)
    run = loss or functools.partial(_causal_loss, seq=seq, batch=batch)
    names: dict[int, str] = {}
    seen = _Owned(model, experts, blocks)

    def keep(tensor: Tensor) -> None:
        seen.move(
            cast("Tensor", tensor.grad), seen.owner(names[id(tensor)], "gradients")
        )

    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        tensors = stack.enter_context(_fake_parameters(model, keep))
        if recompute == "full":
            stack.enter_context(_checkpointed(model, blocks))
        for name, tensor in tensors.items():
            names[id(tensor)] = name
            seen.count(tensor, seen.owner(name, "weights"))
        stack.enter_context(seen)
        trained = [t for t in tensors.values() if t.requires_grad]
        update = optimizer(trained)
        for tensor in trained:
            tensor.grad = torch.empty_like(tensor)
        update.step()  # makes its state
        update.zero_grad()
        for tensor, state in update.state.items():
            owner = seen.owner(names[id(tensor)], "optimizer")
            for value in state.values():
                if isinstance(value, Tensor):
                    seen.move(value, owner)
        seen.peak = 0
        with seen.modules:
            value = run(model)
            kept = seen.now()
            value.backward()
        seen.updates = True
        update.step()
    fixed = ("weights", "gradients", "optimizer")
    kept = {owner: n for owner, n in kept.items() if owner[1] not in fixed}
    return StepMemory(seen.peaks, kept, seen.where)


def measure_stack(p: Profile, clock: str = "wall", seconds: float = 1.0) -> float:
    """``Constants.stack`` of a CPU: a layer of attention as it runs, over the sum of its ops."""
    width, gen = 512, torch.Generator().manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 8, 2 * width, 0.0, batch_first=True)
    x = torch.randn(1, 256, width, generator=gen, requires_grad=True)

    def call() -> None:
        layer(x).sum().backward()

    tick = time.process_time if clock == "process" else time.perf_counter
    (measured,) = measure_calls([call], seconds, tick)
    with FakeTensorMode(allow_non_fake_inputs=True), _fake_parameters(layer):
        with _Run(p, set()) as seen:
            call()
    return measured / seen.seconds


def _causal_loss(model: nn.Module, seq: int, batch: int = 1) -> Tensor:
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


def layers_with(model: nn.Module, experts: Sequence[str]) -> list[str]:
    """Names of the layers: members of the outermost lists that hold experts, or the model."""
    lists: dict[str, None] = {}
    for name in experts:
        parts = name.split(".")
        for i in range(len(parts)):
            owner = ".".join(parts[:i])
            if isinstance(model.get_submodule(owner), (nn.ModuleList, nn.Sequential)):
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
    """Names of the modules that patterns are for."""
    for name, _ in model.named_modules():
        if any(fnmatch(name, pattern) for pattern in patterns):
            yield name


def _drop(tensor: Tensor) -> None:
    tensor.grad = None


@contextlib.contextmanager
def _fake_parameters(
    model: nn.Module, on_grad: Callable[[Tensor], None] = _drop
) -> Iterator[dict[str, Tensor]]:
    """Fake ones on the CPU, whose gradients are gone as soon as they are there, or ``on_grad``."""
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
    """All experts here, by their adapter: as on a rank that has all of them."""
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
def _checkpointed(model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
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
