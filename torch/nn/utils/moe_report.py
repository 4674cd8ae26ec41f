"""What to look at when a Mixture-of-Experts model trains badly. Prototype: may change.

It reports how evenly experts are used, as text and as scalars, and which tensor is not finite first.

Terms: L layers, E experts of each.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


__all__ = ["LoadReport", "NonFinite", "find_nonfinite", "load_report"]


class LoadReport(NamedTuple):
    """How layers use their experts. ``str`` returns a table. All numbers of a layer without load are 0.

    Attributes:
        names: names of the layers.
        load: ``(L, E)`` float64 on CPU, each expert's share of the layer's slots.
        entropy: ``(L,)`` entropy of the shares over log E: 1 if all are equal, 0 if one expert has all slots.
        heaviest: ``(L,)`` load of the busiest expert over the mean.
        dead: ``(L,)`` int64, number of experts without a slot.
        overflow: ``(L,)`` share of slots that did not fit a capacity.
    """

    names: tuple[str, ...]
    load: Tensor
    entropy: Tensor
    heaviest: Tensor
    dead: Tensor
    overflow: Tensor

    def scalars(
        self, prefix: str = "moe", *, experts: bool = False
    ) -> dict[str, float]:
        """``{"moe/<layer>/entropy": ...}``, for ``SummaryWriter.add_scalar`` and the like.

        Args:
            prefix: prefix of all names.
            experts: whether to add ``moe/<layer>/load/<expert>``, E for each layer.
        """
        found = {}
        for field in ("entropy", "heaviest", "dead", "overflow"):
            for name, value in zip(self.names, getattr(self, field).tolist()):
                found[f"{prefix}/{name}/{field}"] = float(value)
        if experts:
            for name, row in zip(self.names, self.load.tolist()):
                for expert, value in enumerate(row):
                    found[f"{prefix}/{name}/load/{expert}"] = value
        return found

    def __str__(self) -> str:
        width = max(len("layer"), *map(len, self.names)) if self.names else len("layer")
        lines = [
            f"{'layer':<{width}}  entropy  heaviest/mean  dead  overflow  busiest experts"
        ]
        shares, ids = self.load.sort(dim=1, descending=True, stable=True)
        rows = zip(
            self.names,
            self.entropy.tolist(),
            self.heaviest.tolist(),
            self.dead.tolist(),
            self.overflow.tolist(),
            ids[:, :3].tolist(),
            shares[:, :3].tolist(),
        )
        for name, entropy, heaviest, dead, overflow, *busiest in rows:
            top = ", ".join(f"{i}: {100 * s:.1f} %" for i, s in zip(*busiest))
            lines.append(
                f"{name:<{width}}  {entropy:7.3f}  {heaviest:13.2f}  {dead:4d}"
                f"  {100 * overflow:6.2f} %  {top}"
            )
        return "\n".join(lines)


def load_report(
    counts: Tensor,
    *,
    names: Sequence[str] | None = None,
    overflow: Tensor | None = None,
) -> LoadReport:
    r"""Says how evenly the experts of each layer are used.

    It synchronises with the device once, to read its arguments.

    Args:
        counts: ``(L, E)``, not negative: slots of each expert. Sums over ranks and steps of a ``bincount``
            of the chosen ids will do, and so will averages such as ``ExpertPlacement.loads``.
        names: names of the L layers. Default: "0", "1", ...
        overflow: ``(L,)`` slots of ``counts`` that did not fit a capacity. Default: none

    Returns:
        LoadReport: a number for each layer.

    Raises:
        ValueError: shapes do not match, a count is negative or not finite, or ``overflow`` is not
            between 0 and the layer's sum of counts.

    Example::

        >>> counts = torch.tensor([[4, 4, 4, 4], [14, 2, 0, 0]])
        >>> report = load_report(counts, names=["layers.0", "layers.1"])
        >>> print(report)
        layer     entropy  heaviest/mean  dead  overflow  busiest experts
        layers.0    1.000           1.00     0    0.00 %  0: 25.0 %, 1: 25.0 %, 2: 25.0 %
        layers.1    0.272           3.50     2    0.00 %  0: 87.5 %, 1: 12.5 %, 2: 0.0 %
        >>> report.scalars()["moe/layers.1/dead"]
        2.0
    """
    if counts.dim() != 2 or counts.shape[1] < 1:
        raise ValueError(
            f"load_report: counts must have shape (L, E), got {tuple(counts.shape)}"
        )
    num_layers, num_experts = counts.shape
    counts = counts.detach().double().cpu()
    spilled = counts.new_zeros(num_layers)
    if overflow is not None:
        if overflow.shape != (num_layers,):
            raise ValueError(
                f"load_report: overflow must have shape (L,) = ({num_layers},), got "
                f"{tuple(overflow.shape)}"
            )
        spilled = overflow.detach().double().cpu()
    if names is not None and len(names) != num_layers:
        raise ValueError(
            f"load_report: names must be of the {num_layers} layers, got {len(names)}"
        )
    if names is not None and len({*names}) < num_layers:
        raise ValueError(f"load_report: names must be different, got {[*names]}")
    if not (counts.isfinite().all() and (counts >= 0).all()):
        raise ValueError("load_report: counts must be finite and not negative")
    total = counts.sum(1)
    # Averages of the same slots may differ by a rounding.
    if not ((spilled >= 0) & (spilled <= total * (1 + 1e-6))).all():
        raise ValueError(
            "load_report: overflow must be from 0 to the sums of counts, "
            f"{total.tolist()}, got {spilled.tolist()}"
        )
    some = total.clamp(min=torch.finfo(torch.float64).tiny)
    load = counts / some.unsqueeze(1)
    entropy = torch.special.entr(load).sum(1) / max(math.log(num_experts), 1e-300)
    return LoadReport(
        tuple(names) if names is not None else tuple(map(str, range(num_layers))),
        load,
        entropy,
        load.amax(1) * num_experts,
        (counts == 0).sum(1) * (total > 0),
        spilled / some,
    )


class NonFinite(NamedTuple):
    """A tensor with NaN or infinities.

    Attributes:
        kind: "output" of a module in a forward, "parameter", "buffer" or "gradient".
        name: of the module, parameter or buffer in the model.
        count: how many of its elements are not finite.
        experts: which experts have them, if the tensor is a stacked ``(E, ...)`` parameter of 3
            dimensions or its gradient; else None.
        tokens: the first eight rows that have them, for an output ``(*, D)`` with its leading dimensions
            flattened; else None.
    """

    kind: str
    name: str
    count: int
    experts: tuple[int, ...] | None
    tokens: tuple[int, ...] | None = None


def _inspect(kind: str, name: str, tensor: Tensor) -> NonFinite | None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.dtype == torch.float4_e2m1fn_x2:
        return None  # has neither NaN nor infinities
    if tensor.is_meta:
        return None  # has no numbers, as a parameter that accelerate offloads
    tensor, first = _own_part(tensor.detach())
    try:
        bad = ~tensor.isfinite()
    except NotImplementedError:
        if type(tensor) is Tensor:
            raise
        return None  # such as a quantised weight of torchao
    count = int(bad.sum())
    if not count:
        return None
    experts = tokens = None
    if kind in ("parameter", "gradient") and tensor.dim() == 3:
        rows = bad.flatten(1).any(1).nonzero().flatten()
        experts = tuple((rows + first).tolist())
    if kind == "output" and tensor.dim() > 1:
        tokens = tuple(bad.flatten(0, -2).any(1).nonzero().flatten()[:8].tolist())
    return NonFinite(kind, name, count, experts, tokens)


def _own_part(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's part of a tensor and its offset in dimension 0, without communication."""
    if tensor.is_nested:
        return tensor.values(), 0
    if tensor.is_sparse:
        return tensor.coalesce().values().flatten(), 0
    if not is_traceable_wrapper_subclass(tensor):
        return tensor, 0
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return tensor, 0
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tensor.to_local(), offsets[0] if offsets else 0


@contextmanager
def find_nonfinite(model: Module) -> Iterator[list[NonFinite]]:
    r"""Finds where NaN and infinities come from.

    It checks outputs of modules inside the context. The first entry is the origin: the innermost
    module whose output is not finite. It checks parameters, buffers and gradients when the
    context ends, and names the experts of stacked expert weights. For distributed tensors each rank checks
    its own part, with global expert ids. Tensors on the meta device, and those of classes without
    ``isfinite``, are left out. Every check waits for the device: use it to run a
    failed step again. Functions of :func:`torch.compile` run eagerly inside the context, in all
    threads, so that each module is seen.

    Args:
        model: the model that runs.

    Yields:
        list[NonFinite]: outputs in the order in which they appear, then parameters, buffers and
        gradients by name. Empty if all is finite.

    Example::

        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.MoE(8, 16, 4, 2))
        >>> _ = model[1].w_in.data[2, 0].fill_(float("inf"))
        >>> with find_nonfinite(model) as found:
        ...     _ = model(torch.randn(10, 8))
        >>> [(f.kind, f.name, f.experts) for f in found if f.kind == "parameter"]
        [('parameter', '1.w_in', (2,))]
    """
    found: list[NonFinite] = []

    def watch(name: str) -> Any:
        def hook(module: Module, args: Any, output: Any) -> None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor):
                    if entry := _inspect("output", name, tensor):
                        found.append(entry)

        return hook

    with torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        for name, module in model.named_modules():
            stack.enter_context(module.register_forward_hook(watch(name)))
        yield found
    parameters = list(model.named_parameters())
    tensors = [("parameter", name, p) for name, p in parameters]
    tensors += [("buffer", name, b) for name, b in model.named_buffers()]
    tensors += [("gradient", n, p.grad) for n, p in parameters if p.grad is not None]
    found += [entry for entry in (_inspect(*t) for t in tensors) if entry]
