# mypy: allow-untyped-defs
"""The owners of the bytes of a training step, by layer and kind, from a run under fake tensors."""

from __future__ import annotations

import contextlib
import functools
from typing import cast, NamedTuple, TYPE_CHECKING

import torch
from torch import nn, Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
)
from torch.distributed._tools.moe_arguments import check
from torch.distributed._tools.moe_config import expert_weights
from torch.distributed._tools.moe_trace import (
    causal_loss,
    checkpointed,
    fake_parameters,
    layers_with,
    LiveBytes,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


__all__ = ["explain_memory", "StepMemory"]


class StepMemory(NamedTuple):
    """The bytes of tensors at the peak of a training step.

    Attributes:
        peak: by layer, the name of a block or "" outside the blocks, and by kind.
            ``weights``, ``gradients`` and ``optimizer`` belong to the layer's parameters. ``attention``,
            ``router``, ``experts``, ``embedding``, ``loss`` (with the head) and ``other`` (norms and
            residuals) are results of forward there. ``backward`` are gradients of activations, and results
            that checkpointing computes again; ``update`` are the optimizer's temporary tensors.
        kept: the same at the end of forward, without parameters: bytes saved for backward.
        where: pass, module and operator of the peak.
    """

    peak: dict[tuple[str, str], int]
    kept: dict[tuple[str, str], int]
    where: tuple[str, str, str]

    @property
    def total(self) -> int:
        return sum(self.peak.values())

    def explain(self) -> str:
        """A table of both, with equal neighbours in one row, and the place of the peak."""
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
    """A tracker without hooks on recomputed tensors, which would keep them alive."""

    def _fw_pre_hook(self, mod, input) -> None:
        if not self.is_bw:
            super()._fw_pre_hook(mod, input)

    def _fw_post_hook(self, mod, input, output) -> None:
        if not self.is_bw:
            super()._fw_post_hook(mod, input, output)


class _Owned(TorchDispatchMode, LiveBytes):
    """Tracks layer and kind of the bytes for StepMemory."""

    def __init__(
        self, model: nn.Module, experts: Sequence[str], blocks: Sequence[str]
    ) -> None:
        TorchDispatchMode.__init__(self)
        LiveBytes.__init__(self)
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
        """Owner of the tensors of a module or parameter."""
        return max(
            (b for b in self.blocks if _inside(name, b)), key=len, default=""
        ), kind

    def kind(self, name: str, op: str) -> str:
        """Kind of the result of a forward operator in a module."""
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
    """The owners of the bytes of a training step on the CPU; nothing is computed or allocated.

    It runs the second step: the optimizer has its state, and gradients are None. It does not see
    memory that an op allocates and frees inside: the kernels of ``F.moe_mlp`` need little,
    its composite form needs more.

    Args:
        model (nn.Module): its parameters may be on the meta device.
        loss (callable, optional): of the model. Default: ``model(input_ids=ids, labels=ids)``

    Keyword Args:
        batch, seq (int): of ``ids``.
        recompute (str): ``"full"`` checkpoints every layer, ``"none"`` does not.
        optimizer (callable): parameters -> optimizer. Default: ``AdamW(fused=True)``, whose
            step needs no temporary tensors

    Raises:
        ValueError: the model has no experts, trains nothing, is parallel or is called differently,
            ``loss`` is no scalar, ``recompute`` is another word, or the optimizer reads values.
    """
    check("explain_memory", batch=batch, seq=seq)
    if recompute not in ("none", "full"):
        raise ValueError(
            f"explain_memory: recompute must be 'none' or 'full', got {recompute!r}"
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"explain_memory: model must not be parallel yet, got a DTensor as {name}"
            )
    experts = [*expert_weights(model)]
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "explain_memory: model must have a parameter that requires a gradient"
        )
    if not experts:
        raise ValueError(
            "explain_memory: model must have stacked weights of experts, (E, out, in), got none "
            f"in {type(model).__name__}"
        )
    blocks = layers_with(model, experts)
    run = loss or functools.partial(causal_loss, seq=seq, batch=batch)
    names: dict[int, str] = {}
    seen = _Owned(model, experts, blocks)

    def keep(tensor: Tensor) -> None:
        seen.move(
            cast("Tensor", tensor.grad), seen.owner(names[id(tensor)], "gradients")
        )

    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        tensors = stack.enter_context(fake_parameters(model, keep))
        if recompute == "full":
            stack.enter_context(checkpointed(model, blocks))
        for name, tensor in tensors.items():
            names[id(tensor)] = name
            seen.count(tensor, seen.owner(name, "weights"))
        stack.enter_context(seen)
        trained = [t for t in tensors.values() if t.requires_grad]
        update = optimizer(trained)
        for tensor in trained:
            tensor.grad = torch.empty_like(tensor)
        try:
            update.step()  # makes its state
        except DataDependentOutputException as error:
            raise ValueError(
                "explain_memory: optimizer must not read values of tensors in its step, got "
                f"{type(update).__name__}: {error}"
            ) from error
        update.zero_grad()
        for tensor, state in update.state.items():
            owner = seen.owner(names[id(tensor)], "optimizer")
            for value in state.values():
                if isinstance(value, Tensor):
                    seen.move(value, owner)
        seen.peak = 0
        with seen.modules:
            value = run(model)
            if value.numel() != 1:
                raise ValueError(
                    f"explain_memory: loss must be one number, got shape {tuple(value.shape)}"
                )
            kept = seen.now()
            value.backward()
        seen.updates = True
        update.step()
    fixed = ("weights", "gradients", "optimizer")
    kept = {owner: n for owner, n in kept.items() if owner[1] not in fixed}
    return StepMemory(seen.peaks, kept, seen.where)
