"""Adapters of expert parallelism to kinds of MoE modules.

An :class:`ExpertAdapter` names the expert parameters of a module and the method to
replace, and translates a call of that method to tokens, expert ids and router weights.
:class:`~torch.distributed.tensor.parallel.ExpertParallel` does the rest.

Terms: T tokens, K experts per token, E experts, D model dim, F hidden dim of an expert,
R rows = copies of tokens in expert order, M rows that a rank received.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from typing import Any, cast, Protocol, TYPE_CHECKING

import torch
from torch import nn, Tensor
from torch._guards import detect_fake_mode
from torch.func import functional_call
from torch.nn.modules.moe import _METHODS
from torch.nn.utils import parametrize


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


__all__ = [
    "ExpertAdapter",
    "ExpertExchange",
    "Experts",
    "GroupedExpertsAdapter",
    "MoEAdapter",
    "RoutedMoEAdapter",
]


class Experts(Protocol):
    """Local experts of a rank.

    Args:
        rows (Tensor): (M, D) received rows.
        ids (Tensor): (M, k) of local experts, or -1.
        weights (Tensor): (M, k).
        num_rows (int, optional): upper bound of the ids that are not -1, and so of the rows that
            experts need memory for, if the token switch knows one. Default: None

    Returns:
        Tensor: (M, D).
    """

    def __call__(
        self,
        rows: Tensor,
        ids: Tensor,
        weights: Tensor,
        /,
        num_rows: int | None = None,
    ) -> Tensor: ...


class ExpertExchange(Protocol):
    """Runs experts on the ranks that have them. An adapter calls it.

    Args:
        input (Tensor): (\\*, D) tokens of this rank.
        topk_indices (Tensor): (\\*, K) integer expert ids in [-1, E].
        topk_weights (Tensor, optional): (\\*, K); None if the experts apply none.
        experts (Experts): runs the local experts on received rows.
        shared (callable, optional): returns the output (\\*, D) of shared experts, which is
            added. It may be called at any point, to overlap with communication.

    Returns:
        Tensor: (\\*, D).
    """

    def __call__(
        self,
        input: Tensor,
        topk_indices: Tensor,
        topk_weights: Tensor | None,
        experts: Experts,
        shared: Callable[[], Tensor | None] | None = None,
    ) -> Tensor: ...


class ExpertAdapter(ABC):
    """Describes a kind of MoE module to expert parallelism.

    Attributes:
        method (str): the method that gets routed tokens and returns the experts' output.
            It is replaced on the parallelized module.
    """

    method: str = "forward"

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Whether ``module`` is of this kind."""

    @abstractmethod
    def expert_parameters(self, module: nn.Module) -> dict[str, int | None]:
        """Names of the parameters with E on dim 0, and their dim over F.

        A parameter without such a dim, such as an output bias, has None and is added
        to the output once.
        """

    @abstractmethod
    def run(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        exchange: ExpertExchange,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Replaces ``method``: calls ``exchange`` with the translated arguments.

        Args:
            module (nn.Module): the parallelized module. Its expert parameters are the
                local ones, plain tensors with E / EP experts, during the call.
            original (callable): the replaced method, bound to ``module``.
            exchange (ExpertExchange): takes tokens to their experts and back.
        """

    def check_tensor_parallel(self, module: nn.Module) -> None:
        """Raises if an even shard of the dims over F does not hold whole hidden units."""
        return None

    def takes_scaled(self, module: nn.Module) -> bool:
        """Whether the experts take FP8 rows in their sent form: ``input_scaled`` has codes and
        scales of blocks of 128, and the experts do not read the values of the rows."""
        return False


class MoEAdapter(ExpertAdapter):
    """:class:`torch.nn.MoE` and its subclasses."""

    method = "run_experts"

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, nn.MoE)

    def expert_parameters(self, module: nn.Module) -> dict[str, int | None]:
        dims: dict[str, int | None] = {"w_in": 1, "w_out": 2}
        module = cast(nn.MoE, module)
        if module.b_in is not None:
            dims["b_in"] = 1
        if module.b_out is not None:
            dims["b_out"] = None
        if module.w_up is not None:
            dims["w_up"] = 1
        return dims

    def run(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        exchange: ExpertExchange,
        input: Tensor,
        topk_indices: Tensor,
        topk_weights: Tensor,
    ) -> Tensor:
        module = cast(nn.MoE, module)
        if self.method == "run_routed":
            return exchange(input, topk_indices, topk_weights, original)
        shared = functools.partial(module.run_shared, input)
        return exchange(input, topk_indices, topk_weights, module.run_routed, shared)

    def takes_scaled(self, module: nn.Module) -> bool:
        # A run_routed that is not MoE's own may read the rows.
        module = cast(nn.MoE, module)
        if type(module).run_routed is not _METHODS["run_routed"]:
            return False
        return "run_routed" not in module.__dict__ and module.recipe == "fp8_blockwise"

    def check_tensor_parallel(self, module: nn.Module) -> None:
        module = cast(nn.MoE, module)
        w_in, w_out = module.w_in, module.w_out
        name, halved = "w_in", w_in
        if module.w_up is not None:
            name, halved = "b_in", module.b_in
        if halved is None or module.gate_interleaved:
            return
        if halved.shape[1] != w_out.shape[2]:
            raise ValueError(
                "ExpertParallel: tensor parallel experts need the gate and the up row of a "
                f"hidden unit on one rank, but {name} of shape "
                f"{tuple(halved.shape)} has all {w_out.shape[2]} gate rows before the up "
                "rows (activation="
                f"{module.activation!r}, gate_interleaved=False). Use "
                "gate_interleaved=True, an activation without gate, or a mesh without "
                "the tensor parallel dim"
            )


class RoutedMoEAdapter(MoEAdapter):
    """Subclasses of :class:`torch.nn.MoE` that replace what calls ``run_routed``.

    Their code runs as it is, so shared experts don't overlap with communication.
    """

    method = "run_routed"

    def matches(self, module: nn.Module) -> bool:
        if not isinstance(module, nn.MoE):
            return False
        kind = type(module)
        methods = {
            "forward": inspect.unwrap(kind.forward),  # add_lora wraps it
            "run_experts": kind.run_experts,
        }
        plain = methods.items() <= _METHODS.items()
        return not plain or not methods.keys().isdisjoint(module.__dict__)


def _original(module: nn.Module, name: str) -> Any:
    """A parameter of ``module``, or None; the original of a parametrized one, as by LoRA."""
    if parametrize.is_parametrized(module, name):
        module, name = module.get_submodule(f"parametrizations.{name}"), "original"
    # Not by type: a trace replaces parameters by fake tensors.
    return module._parameters.get(name)


def present_name(module: nn.Module, name: str) -> str:
    """The present name of a parameter: a part of a parametrization becomes the weight when
    ``remove_parametrizations`` merges it."""
    of_part = name.split(".")[1] if name.startswith("parametrizations.") else ""
    merged = of_part and not parametrize.is_parametrized(module, of_part)
    return of_part if merged else name


def trained_parameters(
    module: nn.Module, dims: dict[str, int | None], roles: tuple[str, ...]
) -> dict[str, int | None]:
    """``dims`` with the parameters from which a parametrization, as by LoRA, computes a weight."""
    found: dict[str, int | None] = {}
    for name, dim in dims.items():
        if not parametrize.is_parametrized(module, name):
            found[name] = dim
            continue
        if "tp" in roles:
            raise ValueError(
                f"ExpertParallel: {name!r} is parametrized, whose parts a mesh with a tensor "
                "parallel dim can't shard; use a mesh without"
            )
        parts = module.get_submodule(f"parametrizations.{name}").named_parameters()
        found |= {f"parametrizations.{name}.{part}": None for part, _ in parts}
    return found


def check_parametrizations(module: nn.Module, names: Iterable[str], count: int) -> None:
    """Raises if a parametrization mixes experts, found by computing the weights of the first ``count``.

    Tensors without data, on the meta device or fake, are not checked.
    """
    for name in names:
        if not parametrize.is_parametrized(module, name):
            continue
        parts = module.get_submodule(f"parametrizations.{name}")
        params = dict(parts.named_parameters())
        tensors = [*params.values(), *parts.buffers()]
        if any(x.is_meta for x in tensors) or detect_fake_mode(tensors) is not None:
            continue
        modes = {m: m.training for m in parts.modules()}
        kind = parametrize.type_before_parametrizations(module).__name__
        by = ", ".join(type(p).__name__ for p in parts.children())
        what = (
            f"ExpertParallel: {name!r} of {kind} is parametrized by {by}, which must compute the "
            "weight of each expert from its own parameters; from those of "
            f"{count} experts it "
        )
        try:
            parts.eval()  # spectral_norm, for one, changes its buffers in training
            with torch.no_grad():
                whole = parts()[:count]
                mine = functional_call(parts, {n: p[:count] for n, p in params.items()})
        except Exception as error:
            raise ValueError(f"{what}raises {error}") from error
        finally:
            for m, training in modes.items():
                m.training = training
        # Products may be rounded otherwise for fewer experts, by less than this in bfloat16.
        change, size = (mine.float() - whole.float()).norm(), whole.float().norm()
        if change > 1e-2 * size:
            raise ValueError(f"{what}gives other weights (by {change / size:.2g})")


class GroupedExpertsAdapter(ExpertAdapter):
    """Experts called with rows in expert order. Arguments give other names of the weights.

    ``forward(x, num_tokens_per_expert) -> out`` with x and out (R, D), the rows of expert
    0 first, and counts (E). Rows past the sum of the counts are padding. The
    three weights are (E, F, D), (E, D, F) and (E, F, D). Each copy of a token is a separate row
    here, so each copy is sent; a module that is called with tokens and expert
    ids sends each token once per rank.

    Args:
        w1 (str): gate projection. Default: ``"w1"``
        w2 (str): down projection. Default: ``"w2"``
        w3 (str): up projection. Default: ``"w3"``
    """

    def __init__(self, w1: str = "w1", w2: str = "w2", w3: str = "w3") -> None:
        self.w1, self.w2, self.w3 = w1, w2, w3

    def matches(self, module: nn.Module) -> bool:
        weights = [_original(module, name) for name in (self.w1, self.w2, self.w3)]
        return all(w is not None and w.dim() == 3 for w in weights)

    def expert_parameters(self, module: nn.Module) -> dict[str, int | None]:
        return {self.w1: 1, self.w2: 2, self.w3: 1}

    def run(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        exchange: ExpertExchange,
        x: Tensor,
        num_tokens_per_expert: Tensor,
    ) -> Tensor:
        ends = num_tokens_per_expert.long().cumsum(0)
        row = torch.arange(x.shape[0], device=x.device)
        # E, no expert, for the padding at the end.
        ids = torch.bucketize(row, ends, right=True)

        def experts(
            rows: Tensor,
            local_ids: Tensor,
            weights: Tensor,
            num_rows: int | None = None,
        ) -> Tensor:
            local = _original(module, self.w1).shape[0]
            key = local_ids[:, 0]
            key = torch.where(key < 0, local, key)
            counts = key.new_zeros(local + 1).scatter_add_(0, key, torch.ones_like(key))
            order = torch.argsort(key, stable=True)
            out = original(rows[order], counts[:local].to(num_tokens_per_expert.dtype))
            return out[torch.argsort(order)]

        return exchange(x, ids[:, None], None, experts)


#: Tried in this order by :class:`~torch.distributed.tensor.parallel.ExpertParallel`.
DEFAULT_ADAPTERS: tuple[ExpertAdapter, ...] = (
    RoutedMoEAdapter(),
    MoEAdapter(),
    GroupedExpertsAdapter(),
)
