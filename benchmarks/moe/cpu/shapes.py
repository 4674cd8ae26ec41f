"""The rows of cpu_ops.py: which shapes, which routing, which weights.

T tokens, D model dim, F expert hidden dim, E experts, K experts per token, R = T*K routed rows.
"""

import dataclasses
import fnmatch
from typing import NamedTuple

import torch
from torch import Tensor
from torch.testing._internal.moe_generators import MoeCase


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured row.

    Attributes:
        name: of the shape.
        case: T, D, F, E, K and the routing.
        dtype: of input, experts and router weights.
        backward: forward and backward, else forward alone (under no_grad).
        gpt_oss: gpt-oss's experts: biases, clamped GLU, interleaved gates and matrices stored
            ``(E, D, 2F)`` and ``(E, F, D)``; else SwiGLU, gates first, in nn.Linear layout.
        layers: how many layers, each with its own weights, one timed call runs through.
        routings: how many routings the calls take in turns.
        sweep: the sweep that the row belongs to.
        compiled: with compiled peers beside.
    """

    name: str
    case: MoeCase
    dtype: torch.dtype = torch.bfloat16
    backward: bool = False
    gpt_oss: bool = False
    layers: int = 1
    routings: int = 1
    sweep: str | None = None
    compiled: bool = False

    @property
    def id(self) -> str:
        """name/dtype/pass"""
        return f"{self.name}/{self.dtype_name}/{self.pass_name}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def pass_name(self) -> str:
        return "forward+backward" if self.backward else "forward"

    def shape(self) -> dict[str, int]:
        c = self.case
        return dict(
            zip("TDFEK", (c.num_tokens, c.dim, c.hidden, c.num_experts, c.top_k))
        )

    def activation_kwargs(self) -> dict[str, object]:
        """The activation as F.moe_mlp and moe_reference.py name it."""
        if not self.gpt_oss:
            return {"activation": "swiglu"}
        return {
            "activation": "swiglu_oai",
            "gate_interleaved": True,
            "alpha": 1.702,
            "limit": 7.0,
        }


def _case(name: str, *shape: int, routing: str = "uniform") -> MoeCase:
    return MoeCase(name, **dict(zip(_CASE_FIELDS, shape, strict=True)), routing=routing)


_CASE_FIELDS = ("num_tokens", "dim", "hidden", "num_experts", "top_k")
_PASSES = (False, True)


def _training_rows() -> list[Row]:
    rows = []
    for shape in ((2048, 1024, 512, 32, 4), (2048, 1536, 256, 128, 8)):
        case = _case("-".join(map(str, shape)), *shape)
        rows += [
            Row(case.name, case, dtype, b, compiled=dtype == torch.bfloat16)
            for dtype in (torch.bfloat16, torch.float32)
            for b in _PASSES
        ]
    case = _case("4096-2048-768-128-8", 4096, 2048, 768, 128, 8)
    rows += [Row(case.name, case, backward=b) for b in _PASSES]
    case = _case("gpt_oss-512-2880-2880-32-4", 512, 2880, 2880, 32, 4)
    rows += [Row(case.name, case, backward=b, gpt_oss=True) for b in _PASSES]
    case = _case("mixtral-512-4096-14336-8-2", 512, 4096, 14336, 8, 2)
    rows.append(Row(case.name, case))
    case = _case("recorded-4096-2048-1024-64-8", 4096, 2048, 1024, 64, 8, routing="recorded")  # fmt: skip
    rows += [Row(case.name, case, backward=b) for b in _PASSES]
    return rows


def _decode_rows() -> list[Row]:
    return [
        Row(
            f"decode-{tokens}-2048-768-128-8",
            _case(f"decode-{tokens}", tokens, 2048, 768, 128, 8),
            layers=4,
            routings=8,
            compiled=tokens == 8,
        )
        for tokens in (1, 8, 64)
    ]


def _sweep_rows() -> list[Row]:
    """Sparsity: E at constant K, and finer experts at constant FLOPs (K*F and E*F constant)."""
    rows = []
    for E in (8, 16, 32, 64, 128, 256):
        case = _case(f"sparsity-K4-E{E}", 2048, 1024, 512, E, 4)
        rows.append(Row(case.name, case, backward=True, sweep="constant K"))
    for F, E, K in (
        (2048, 8, 1),
        (1024, 16, 2),
        (512, 32, 4),
        (256, 64, 8),
        (128, 128, 16),
    ):
        case = _case(f"sparsity-KF2048-E{E}", 2048, 1024, F, E, K)
        rows.append(Row(case.name, case, backward=True, sweep="constant FLOPs"))
    return rows


def default_rows() -> tuple[Row, ...]:
    return (*_training_rows(), *_decode_rows(), *_sweep_rows())


def quick_rows() -> tuple[Row, ...]:
    """One tiny row of every kind, for a smoke test."""
    tiny = _case("tiny", 24, 32, 16, 4, 2)
    recorded = _case("tiny-recorded", 40, 32, 16, 64, 8, routing="recorded")
    rows = [
        Row("tiny", tiny, dtype, b)
        for dtype in (torch.bfloat16, torch.float32)
        for b in _PASSES
    ]
    rows += [Row("tiny-gpt_oss", tiny, backward=b, gpt_oss=True) for b in _PASSES]
    rows += [Row("tiny-recorded", recorded, backward=b) for b in _PASSES]
    rows.append(Row("tiny-decode", _case("d", 2, 32, 16, 4, 2), layers=4, routings=3))
    rows.append(Row("tiny-sparsity", tiny, backward=True, sweep="constant K"))
    return tuple(rows)


def select(rows: tuple[Row, ...], patterns: list[str] | None) -> list[Row]:
    """The rows whose id or name matches one of the patterns (shell wildcards); None for all.

    Raises:
        ValueError: a pattern without a match.
    """
    if patterns is None:
        return list(rows)
    chosen = []
    for pattern in patterns:
        hits = [r for r in rows if fnmatch.fnmatch(r.id, pattern) or r.name == pattern]
        if not hits:
            names = "\n  ".join(r.id for r in rows)
            raise ValueError(f"--rows {pattern} matches none of\n  {names}")
        chosen += hits
    return [r for r in rows if r in chosen]


class Layer(NamedTuple):
    """The weights of one layer as they are stored; every form works on views of them.

    Attributes:
        w_in: ``(E, 2F, D)``, or ``(E, D, 2F)`` for gpt-oss.
        w_out: ``(E, D, F)``, or ``(E, F, D)`` for gpt-oss.
        b_in: ``(E, 2F)`` or None.
        b_out: ``(E, D)`` or None.
    """

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None = None
    b_out: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self if t is not None)


class Operands(NamedTuple):
    """What one row works on.

    Attributes:
        x: ``(T, D)``.
        indices: per routing and layer ``(T, K)`` int64.
        weights: ``(T, K)`` in the dtype of x, as transformers has them.
        layers: one Layer per layer.
        grad_out: ``(T, D)``.
    """

    x: Tensor
    indices: list[list[Tensor]]
    weights: Tensor
    layers: list[Layer]
    grad_out: Tensor


def make_operands(row: Row) -> Operands:
    """Operands with values of order one in every intermediate; the same for every call."""
    generator = torch.Generator().manual_seed(row.case.seed)
    c = row.case
    T, D, F, E, K = c.num_tokens, c.dim, c.hidden, c.num_experts, c.top_k

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(row.dtype)

    def experts(rows: int, columns: int, fan_in: int) -> Tensor:
        # Few random matrices, turned by e rows, are as different as is needed and do not
        # take minutes.
        w = torch.empty(E, rows, columns, dtype=row.dtype)
        for e in range(E):
            if e < 4:
                w[e] = torch.randn(rows, columns, generator=generator) * fan_in**-0.5
            else:
                w[e] = w[e % 4].roll(e, 0)
        return w

    def layer() -> Layer:
        if row.gpt_oss:
            return Layer(
                experts(D, 2 * F, D), experts(F, D, F), normal(E, 2 * F), normal(E, D)
            )
        return Layer(experts(2 * F, D, D), experts(D, F, F))

    indices = [
        [
            dataclasses.replace(c, seed=c.seed + 100 * i + j).topk_indices()
            for j in range(row.layers)
        ]
        for i in range(row.routings)
    ]
    weights = torch.rand(T, K, generator=generator) + 0.5
    weights = (weights / weights.sum(-1, keepdim=True)).to(row.dtype)
    return Operands(
        x=normal(T, D),
        indices=indices,
        weights=weights,
        layers=[layer() for _ in range(row.layers)],
        grad_out=normal(T, D),
    )
