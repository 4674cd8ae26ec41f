"""The shapes and routings of every MoE test and benchmark.

A :class:`MoeCase` names a shape, a routing and the static row plan; :meth:`MoeCase.operands` makes
its tensors. Tests iterate over :func:`moe_cases`. Benchmarks build their own :class:`MoeCase` from the
same routings, so that "Zipf" and "skewed" mean the same everywhere.

moe_reference.py defines the letters (T, D, F, E, K, R, g).
"""

import dataclasses

import torch
from torch import Tensor
from torch.testing._internal.moe_reference import (
    default_num_rows,
    GATED_ACTIVATIONS,
    moe_permutation_reference,
)


def _distinct_experts(
    shares: Tensor, num_tokens: int, top_k: int, generator: torch.Generator
) -> Tensor:
    """(T, K) experts drawn without replacement within a token, with probabilities ``shares`` (E,)."""
    if num_tokens == 0:
        return torch.empty(0, top_k, dtype=torch.int64)
    return torch.multinomial(
        shares.expand(num_tokens, -1), top_k, replacement=False, generator=generator
    )


def _uniform(
    num_tokens: int, top_k: int, num_experts: int, generator: torch.Generator
) -> Tensor:
    return _distinct_experts(torch.ones(num_experts), num_tokens, top_k, generator)


def _zipf(
    num_tokens: int, top_k: int, num_experts: int, generator: torch.Generator
) -> Tensor:
    """Expert e is chosen with probability proportional to 1/(e + 1)."""
    shares = 1 / torch.arange(1, num_experts + 1, dtype=torch.float64)
    return _distinct_experts(shares, num_tokens, top_k, generator)


def _one_expert(
    num_tokens: int, top_k: int, num_experts: int, generator: torch.Generator
) -> Tensor:
    """Every slot chooses the last expert, so each token chooses it ``top_k`` times."""
    return torch.full((num_tokens, top_k), num_experts - 1)


def _empty_experts(
    num_tokens: int, top_k: int, num_experts: int, generator: torch.Generator
) -> Tensor:
    """Only odd experts are chosen. Experts 0, 2, 4, ... are empty."""
    shares = torch.arange(num_experts) % 2
    return _distinct_experts(shares.double(), num_tokens, top_k, generator)


def _sentinels(
    num_tokens: int, top_k: int, num_experts: int, generator: torch.Generator
) -> Tensor:
    """Uniform, but about a third of the slots have one of the two "no expert" ids; token 0 has no expert."""
    indices = _uniform(num_tokens, top_k, num_experts, generator)
    dice = torch.randint(6, indices.shape, generator=generator)
    indices = indices.masked_fill(dice == 0, -1).masked_fill(dice == 1, num_experts)
    indices[:1] = -1
    return indices


def _skewed(
    num_tokens: int, top_k: int, num_experts: int, generator: torch.Generator
) -> Tensor:
    """Log-normal shares in random order. With 64 experts and K = 8 the heaviest has about five times
    the mean load, as in trained models."""
    quantiles = (torch.arange(num_experts, dtype=torch.float64) + 0.5) / num_experts
    shares = torch.special.ndtri(quantiles).exp()
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(0))
    return _distinct_experts(shares[order], num_tokens, top_k, generator)


ROUTINGS = {
    "uniform": _uniform,
    "zipf": _zipf,
    "one_expert": _one_expert,
    "empty_experts": _empty_experts,
    "sentinels": _sentinels,
    "skewed": _skewed,
}


@dataclasses.dataclass(frozen=True, eq=False)
class MoeOperands:
    """Tensors of one ``_moe_mlp`` call, in its order, and the indices of the row plan.

    Attributes:
        input: (T, D)
        w_in: (E, g*F, D)
        w_out: (E, D, F)
        offs: (E,) int32
        topk_weights: (T, K) or None
        row_slots: (R,) int32
        slot_rows: (T, K) int32
        b_in: (E, g*F) or None
        b_out: (E, D) or None
        w_up: (E, F, D) or None; w_in is then (E, F, D) too
        grad_out: (T, D)
        topk_indices: (T, K) int64
    """

    input: Tensor
    w_in: Tensor
    w_out: Tensor
    offs: Tensor
    topk_weights: Tensor | None
    row_slots: Tensor
    slot_rows: Tensor
    b_in: Tensor | None
    b_out: Tensor | None
    w_up: Tensor | None
    grad_out: Tensor
    topk_indices: Tensor

    def args(self) -> tuple[Tensor | None, ...]:
        """The tensor arguments of ``_moe_mlp``."""
        return (
            self.input,
            self.w_in,
            self.w_out,
            self.offs,
            self.topk_weights,
            self.row_slots,
            self.slot_rows,
            self.b_in,
            self.b_out,
            self.w_up,
        )

    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The operands of ``_moe_mlp`` that have a gradient, in the order of output_mask."""
        return (*self.args()[:3], self.topk_weights, *self.args()[7:])

    def split_gate(self) -> "MoeOperands":
        """The same layer with the two halves of ``w_in`` as ``w_in`` and ``w_up``."""
        gate, up = (w.detach().clone() for w in self.w_in.chunk(2, dim=1))
        for w in (gate, up):
            w.requires_grad_(self.w_in.requires_grad)
        return dataclasses.replace(self, w_in=gate, w_up=up)

    def take_tokens(self, tokens: slice) -> "MoeOperands":
        """The same layer for these tokens only."""
        topk_indices = self.topk_indices[tokens]
        plan = moe_permutation_reference(topk_indices, self.offs.shape[0])
        return dataclasses.replace(
            self,
            input=self.input[tokens],
            offs=plan.offs,
            topk_weights=self.topk_weights[tokens],
            row_slots=plan.row_slots,
            slot_rows=plan.slot_rows,
            grad_out=self.grad_out[tokens],
            topk_indices=topk_indices,
        )


@dataclasses.dataclass(frozen=True)
class MoeCase:
    """A shape, a routing and the row plan of one MoE layer call.

    Attributes:
        name: unique, usable in a test name.
        num_tokens: T
        dim: D
        hidden: F
        num_experts: E
        top_k: K
        routing: a key of ROUTINGS.
        num_rows: R, or None for the default of ``_moe_permutation``.
        row_alignment: every expert's rows start at a multiple of this number.
        seed: random seed of the routing and the operands.
    """

    name: str
    num_tokens: int = 13
    dim: int = 16
    hidden: int = 24
    num_experts: int = 4
    top_k: int = 2
    routing: str = "uniform"
    num_rows: int | None = None
    row_alignment: int = 1
    seed: int = 0

    @property
    def rows(self) -> int:
        """R."""
        if self.num_rows is not None:
            return self.num_rows
        slots = self.num_tokens * self.top_k
        return default_num_rows(slots, self.num_experts, self.row_alignment)

    def topk_indices(self, device: torch.device | str = "cpu") -> Tensor:
        """(T, K) int64 expert ids; the same on every device."""
        generator = torch.Generator().manual_seed(self.seed)
        make = ROUTINGS[self.routing]
        return make(self.num_tokens, self.top_k, self.num_experts, generator).to(device)

    def operands(
        self,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        activation: str = "swiglu",
        weights_dtype: torch.dtype | None = torch.float32,
        bias: bool = False,
        requires_grad: bool = False,
    ) -> MoeOperands:
        """Operands with values of order one in every intermediate.

        Args:
            dtype: dtype of the input and the expert parameters.
            device: their device; the values do not depend on it.
            activation: decides g.
            weights_dtype: dtype of the router weights; None for no weights.
            bias: whether to make ``b_in`` and ``b_out``.
            requires_grad: set on every floating point operand except ``grad_out``.
        """
        generator = torch.Generator().manual_seed(self.seed + 1)
        T, D, F, E = self.num_tokens, self.dim, self.hidden, self.num_experts
        gF = 2 * F if activation in GATED_ACTIVATIONS else F

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            x = torch.randn(shape, generator=generator, dtype=torch.float64) * std
            return x.to(device, dtype).requires_grad_(requires_grad)

        topk_weights = None
        if weights_dtype is not None:
            topk_weights = torch.rand(
                T, self.top_k, generator=generator, dtype=torch.float64
            )
            topk_weights = topk_weights.to(device, weights_dtype).requires_grad_(
                requires_grad
            )
        topk_indices = self.topk_indices()
        plan = moe_permutation_reference(
            topk_indices,
            E,
            num_rows=self.num_rows,
            row_alignment=self.row_alignment,
        )
        return MoeOperands(
            input=normal(T, D),
            w_in=normal(E, gF, D, std=D**-0.5),
            w_out=normal(E, D, F, std=F**-0.5),
            offs=plan.offs.to(device),
            topk_weights=topk_weights,
            row_slots=plan.row_slots.to(device),
            slot_rows=plan.slot_rows.to(device),
            b_in=normal(E, gF) if bias else None,
            b_out=normal(E, D) if bias else None,
            w_up=None,
            grad_out=normal(T, D).detach(),
            topk_indices=topk_indices.to(device),
        )


def one_token_with_preact(preact: Tensor, hidden: int, grad: float) -> MoeOperands:
    """Operands for which H is ``preact``, A is the output and dA is ``grad``, in any dtype.

    Args:
        preact: (g*F,)
        hidden: F, which is D as well.
        grad: of the output, a number.
    """
    x = preact.new_zeros(1, hidden)
    return MoeOperands(
        input=x,
        w_in=preact.new_zeros(1, preact.shape[0], hidden),
        w_out=torch.eye(hidden, dtype=preact.dtype, device=preact.device).unsqueeze(0),
        offs=torch.ones(1, dtype=torch.int32, device=preact.device),
        topk_weights=None,
        row_slots=None,
        slot_rows=None,
        b_in=preact.unsqueeze(0),
        b_out=None,
        w_up=None,
        grad_out=torch.full_like(x, grad),
        topk_indices=None,
    )


def extreme_gates(dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Values where exp(-x) overflows, or where x times a tiny sigmoid would not be tiny."""
    gates = [-3e38, -1e38, -1e30, -5e4, -1e3, -100, -89, -88, -80, 0, 80, 100, 1e3]
    wide = torch.tensor(gates, dtype=torch.float64, device=device)
    return wide.clamp(min=torch.finfo(dtype).min).to(dtype)


def moe_cases() -> tuple[MoeCase, ...]:
    """Small cases that together cover the corner cases of routing, row plan and shape."""
    return (
        MoeCase("uniform"),
        MoeCase("zipf", num_tokens=37, num_experts=8, routing="zipf"),
        MoeCase("one_expert", routing="one_expert"),
        MoeCase("empty_experts", num_experts=6, routing="empty_experts"),
        MoeCase("sentinels", num_tokens=20, routing="sentinels"),
        MoeCase("skewed", num_tokens=48, num_experts=64, top_k=8, routing="skewed"),
        MoeCase("tail", num_rows=40),
        MoeCase("aligned", routing="zipf", row_alignment=8),
        MoeCase("aligned_tail", routing="sentinels", row_alignment=4, num_rows=64),
        MoeCase("clipped", num_rows=15),
        MoeCase("clipped_aligned", routing="zipf", row_alignment=8, num_rows=24),
        MoeCase("no_rows", num_rows=0),
        MoeCase("no_tokens", num_tokens=0),
        MoeCase("one_token", num_tokens=1),
        MoeCase("top_1", top_k=1),
        MoeCase("one_of_one", num_experts=1, top_k=1),
        MoeCase("all_of_all", num_experts=3, top_k=3),
        MoeCase("ragged", num_tokens=11, dim=13, hidden=7, num_experts=5),
    )


def get_case(name: str) -> MoeCase:
    """The case of :func:`moe_cases` called ``name``."""
    return next(case for case in moe_cases() if case.name == name)
