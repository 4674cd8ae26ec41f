"""The one table of what is measured: shapes, rows and their operands, on a CPU and on a GPU.

Letters: T tokens, D model dim, F expert hidden dim, E experts, K experts per token, R = T*K routed
rows, G = 2*F (gate rows, then up rows).
"""

import dataclasses
import fnmatch
import functools
import pathlib

import torch
from torch import Tensor


try:
    from torch.testing._internal.moe_generators import MoeCase, ROUTINGS
except ModuleNotFoundError:  # on a bare GPU machine gpu_lab.py loads it by path
    from lab.loading import generators

    MoeCase, ROUTINGS = generators.MoeCase, generators.ROUTINGS


_RECORD = pathlib.Path(__file__).parent / "results/routing/olmoe_1b_7b_layer0_gsm8k.npz"
# Choices of trained routers; the record does not land with the benchmarks.
REAL = "recorded" if _RECORD.exists() else "skewed"


@functools.cache
def recorded_routing() -> Tensor:
    """(4471, 8) int64 experts of 64 that layer 0 of OLMoE-1B-7B chose for GSM8K."""
    import numpy as np

    with np.load(_RECORD) as data:
        return torch.from_numpy(data["topk_ids"].astype(np.int64))


def _recorded(
    num_tokens: int, top_k: int, num_experts: int, generator: torch.Generator
) -> Tensor:
    ids = recorded_routing()
    if (top_k, num_experts) != (8, 64) or num_tokens > len(ids):
        raise ValueError(
            f"recorded routing has K=8, E=64 and at most {len(ids)} tokens, got "
            f"K={top_k}, E={num_experts}, T={num_tokens}"
        )
    return ids[:num_tokens].clone()


ROUTINGS["recorded"] = _recorded

PASSES = {False: "forward", True: "forward+backward"}  # by whether there is a backward


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer; the letters of the module docstring.

    ``gpt_oss`` has biases, clamped GLU, interleaved gates and matrices stored ``(E, D, 2F)`` and
    ``(E, F, D)``; else SwiGLU, gates first, in nn.Linear layout.
    """

    name: str
    T: int
    D: int
    F: int
    E: int
    K: int
    routing: str = "uniform"
    gpt_oss: bool = False

    def sizes(self) -> dict[str, int]:
        return {letter: getattr(self, letter) for letter in "TDFEK"}

    def activation(self) -> dict[str, object]:
        """The activation as arguments of F.moe_mlp and moe_reference.py."""
        if not self.gpt_oss:
            return {"activation": "swiglu"}
        limits = {"alpha": 1.702, "limit": 7.0}
        return {"activation": "swiglu_oai", "gate_interleaved": True, **limits}

    def topk_indices(self, seed: int = 0) -> Tensor:
        """(T, K) int64."""
        case = MoeCase(self.name, self.T, self.D, self.F, self.E, self.K, self.routing)
        return dataclasses.replace(case, seed=seed).topk_indices()

    def products(self, backward: bool, rows: int) -> list[tuple[int, int, int]]:
        """(m, k, n) of the matrix products of one expert with ``rows`` rows."""
        D, F = self.D, self.F
        forward = [(rows, D, 2 * F), (rows, F, D)]
        if not backward:
            return forward
        # dA = dO W_out, dX = dH W_in, dW_in = dH^T X, dW_out = dO^T A
        back = [(rows, D, F), (rows, 2 * F, D), (2 * F, rows, D), (D, rows, F)]
        return forward + back

    def flops(self, backward: bool = False) -> int:
        """FLOPs of all products of a layer."""
        products = self.products(backward, self.T * self.K)
        return 2 * sum(m * k * n for m, k, n in products)

    def compulsory_bytes(self, backward: bool, hits: float, itemsize: int = 2) -> float:
        """Bytes that a layer has to read and to write; ``hits`` are experts with rows."""
        expert, R = 3 * self.D * self.F, self.T * self.K
        elements = hits * expert + 2 * self.T * self.D
        if backward:
            # pre-activation written and read; dY, X read again, dX; weights again, dW of all
            elements += 2 * 2 * R * self.F + 3 * self.T * self.D
            elements += (hits + self.E) * expert
        return elements * itemsize

    def bound_ms(self, kind: str, bandwidth: float, rate: float) -> float:
        """Sum over Triton kernels of the larger of flops / rate and bytes / bandwidth.

        In bfloat16, every input is read once and every output written once. Only experts with
        tokens are read, at most T*K of E. ``kind`` is "forward", or "step" for
        forward and backward; ``bandwidth`` is that of a copy, read plus written.
        """
        T, D, n, R = self.T, self.D, self.F, self.T * self.K
        mm = 2 * R * n * D
        weights = 2 * min(self.E, R) * n * D
        gradients = 2 * self.E * n * D
        costs = [
            (2 * mm, 2 * R * D + 2 * weights + 6 * R * n),  # up
            (mm, 2 * R * n + weights + 2 * R * D),  # down
            (0, 2 * R * D + 4 * R + 2 * T * D),  # combine
            (mm, 2 * R * D + weights + 10 * R * n + 4 * R),  # act_backward
            (mm, 2 * R * D + 2 * R * n + gradients),  # weight_grad_out
            (2 * mm, 4 * R * n + 2 * weights + 2 * R * D),  # input_grad
            (2 * mm, 2 * R * D + 4 * R * n + 2 * gradients),  # weight_grad_in
            (0, 2 * R * D + 2 * T * D),  # combine_grad
        ]
        costs = costs[:3] if kind == "forward" else costs
        return 1e3 * sum(max(flops / rate, b / bandwidth) for flops, b in costs)


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured row of cpu_ops.py."""

    shape: Shape
    dtype: torch.dtype = torch.bfloat16  # of input, experts and router weights
    backward: bool = False  # forward and backward; else forward under no_grad
    layers: int = 1  # layers of a call, each with its own weights
    routings: int = 1  # routings that the calls take in turns
    sweep: str | None = None
    compiled: bool = False  # with compiled peers beside

    @property
    def id(self) -> str:
        """name/dtype/pass"""
        return f"{self.shape.name}/{self.dtype_name}/{PASSES[self.backward]}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def _named(*sizes: int, prefix: str = "", **options) -> Shape:
    return Shape(prefix + "-".join(map(str, sizes)), *sizes, **options)


_TRAINING = (_named(2048, 1024, 512, 32, 4), _named(2048, 1536, 256, 128, 8))
_LARGE = (
    _named(4096, 2048, 768, 128, 8),
    _named(512, 2880, 2880, 32, 4, prefix="gpt_oss-", gpt_oss=True),
    _named(512, 4096, 14336, 8, 2, prefix="mixtral-"),
    _named(4096, 2048, 1024, 64, 8, prefix=f"{REAL}-", routing=REAL),
)
_DECODE = tuple(_named(T, 2048, 768, 128, 8, prefix="decode-") for T in (1, 8, 64))
# Sparsity: E at constant K, and finer experts at constant FLOPs (K*F and E*F constant).
_CONSTANT_K = tuple(
    Shape(f"sparsity-K4-E{E}", 2048, 1024, 512, E, 4) for E in (8, 16, 32, 64, 128, 256)
)
_CONSTANT_FLOPS = tuple(
    Shape(f"sparsity-KF2048-E{8 * K}", 2048, 1024, 2048 // K, 8 * K, K)
    for K in (1, 2, 4, 8, 16)
)
CPU_ROWS = (
    *(
        Row(shape, dtype, b, compiled=dtype == torch.bfloat16)
        for shape in _TRAINING
        for dtype in (torch.bfloat16, torch.float32)
        for b in PASSES
    ),
    # A backward of Mixtral's layer takes more memory than most CPUs here have.
    *(Row(s, backward=b) for s in _LARGE for b in PASSES if not (b and s.F == 14336)),
    *(Row(s, layers=4, routings=8, compiled=s.T == 8) for s in _DECODE),
    *(
        Row(s, backward=True, sweep="constant K", compiled=s.E == 8)
        for s in _CONSTANT_K
    ),
    *(
        Row(s, backward=True, sweep="constant FLOPs", compiled=s.K >= 8)
        for s in _CONSTANT_FLOPS
    ),
)
# transformers' own modules, with the proportions of a real model at a quarter of its width.
CLIENT_ROWS = tuple(
    Row(Shape(f"{name}-T{T}", T, *sizes, gpt_oss=name == "gpt_oss"), backward=b)
    for name, sizes in (
        ("mixtral", (1024, 3584, 8, 2)),
        ("qwen3_moe", (512, 192, 128, 8)),
        ("olmoe", (512, 256, 64, 8)),
        ("deepseek_v3", (1792, 512, 64, 8)),
        ("gpt_oss", (720, 720, 32, 4)),
    )
    for T, b in ((1, False), (16, False), (512, False), (512, True))
)
_TINY = Shape("tiny", 24, 32, 16, 4, 2)
_TINY_OSS = dataclasses.replace(_TINY, name="tiny-gpt_oss", gpt_oss=True)
_TINY_RECORDED = Shape("tiny-recorded", 40, 32, 16, 64, 8, routing=REAL)
# One tiny row of every kind, for a smoke test.
QUICK_ROWS = (
    *(Row(_TINY, t, b) for t in (torch.bfloat16, torch.float32) for b in PASSES),
    *(Row(s, backward=b) for s in (_TINY_OSS, _TINY_RECORDED) for b in PASSES),
    Row(Shape("tiny-decode", 2, 32, 16, 4, 2), layers=4, routings=3),
    Row(Shape("tiny-sparsity", *_TINY.sizes().values()), backward=True, sweep="constant K"),
)  # fmt: skip

# SonicMoE (arXiv 2512.14080), table 9b.
TABLE_9B = tuple(
    Shape(f"{model}-n{n}", T, D, n, E, K)
    for model, T, D, sizes in (
        ("1.4B", 40960, 768, ((256, 128, 8), (512, 64, 4), (1024, 32, 2))),
        ("7B", 24576, 1536, ((256, 128, 8), (512, 64, 4), (1024, 32, 2))),
        ("30B", 32768, 4096, ((256, 256, 16), (512, 128, 8), (1024, 64, 4))),
        ("120B", 32768, 4096, ((512, 256, 16), (1024, 128, 8), (2048, 64, 4))),
    )
    for n, E, K in sizes
)
_OLMOE = (2048, 1024, 64, 8)
# The expert sizes of the published configurations.
OPEN_MODELS = (
    Shape("OLMoE-1B-7B", 32768, *_OLMOE),
    Shape("gpt-oss-20b", 32768, 2880, 2880, 32, 4),
    Shape("Qwen3-30B-A3B", 32768, 2048, 768, 128, 8),
    Shape("Kimi-Linear-48B", 32768, 2304, 1024, 256, 8),
    Shape("Qwen3-Next-80B", 32768, 2048, 512, 512, 10),
    Shape("Qwen3-235B-A22B", 32768, 4096, 1536, 128, 8),
    Shape("DeepSeek-V3.2", 16384, 7168, 2048, 256, 8),
)
DECODE = tuple(Shape(f"OLMoE-decode-T{T}", T, *_OLMOE) for T in (1, 16, 64, 256))
GPU_SHAPES = TABLE_9B + OPEN_MODELS + DECODE
# Shapes of the tuner: narrow, middle and wide experts of both model dims, and decode.
TUNING_SHAPES = ("7B-n256", "30B-n512", "OLMoE-1B-7B", "120B-n2048", "OLMoE-decode-T64")
REHEARSAL = (Shape("tiny", 24, 32, 32, 4, 2), Shape("tiny-decode", 1, 32, 32, 4, 2))

# (T, E, K) of cpu_router.py.
ROUTER_SHAPES = ((1, 128, 8), (64, 128, 8), (512, 64, 8), (2048, 128, 8), (4096, 256, 8))  # fmt: skip
# For low_bit.py, which sets the number of tokens.
LOW_BIT_SHAPES = (
    Shape("qwen3", 1, 2048, 768, 128, 8),
    Shape("gpt_oss", 1, 2880, 2880, 32, 4),
    Shape("qwen3_part", 1, 2048, 768, 16, 8),  # more rows for each expert, prefill
)
# For engines.py: decode and prefill of serving engines, with the same weights side by side.
ENGINE_SHAPES = tuple(
    _named(*sizes)
    for sizes in (
        *((T, 2048, 768, 128, 8) for T in (1, 4, 16, 256, 1024)),
        (2048, 1024, 512, 32, 4),
        *((T, 2880, 2880, 32, 4) for T in (1, 256)),
        (512, 2048, 1408, 64, 6),
    )
)
# A layer of the model of serve.py.
SERVE_SHAPE = Shape("serve", 0, 512, 192, 64, 8)
# Every rank of ep_overlap.py.
OVERLAP_SHAPE = Shape("overlap", 2048, 1024, 512, 32, 4)
# Every rank of ep_compiled.py.
COMPILED_OVERLAP_SHAPE = Shape("compiled_overlap", 256, 1024, 256, 16, 8)


def select(rows: tuple[Row, ...], patterns: list[str] | None) -> list[Row]:
    """The rows whose id or name matches one of the patterns (shell wildcards); None for all."""
    if patterns is None:
        return list(rows)
    chosen: set[str] = set()
    for pattern in patterns:
        found = {r.id for r in rows if r.shape.name == pattern}
        found |= set(fnmatch.filter((r.id for r in rows), pattern))
        if not found:
            names = "\n  ".join(r.id for r in rows)
            raise ValueError(f"--rows {pattern} matches none of\n  {names}")
        chosen |= found
    return [row for row in rows if row.id in chosen]


@dataclasses.dataclass(frozen=True)
class Operands:
    """One layer's tensors as they are stored; every peer works on views of them."""

    x: Tensor  # (T, D)
    ids: Tensor  # (T, K) int64
    weights: Tensor  # (T, K), of the router
    w_in: Tensor  # (E, 2F, D), or (E, D, 2F) for gpt-oss
    w_out: Tensor  # (E, D, F), or (E, F, D) for gpt-oss
    grad: Tensor  # (T, D), of the output
    b_in: Tensor | None = None  # (E, 2F)
    b_out: Tensor | None = None  # (E, D)

    def layer_args(self) -> tuple[Tensor, ...]:
        return (self.x, self.ids, self.weights, self.w_in, self.w_out)

    def leaves(self) -> tuple[Tensor, ...]:
        return (self.x, self.weights, self.w_in, self.w_out)

    def stored(self) -> tuple[Tensor, ...]:
        """Expert parameters, as they are stored."""
        weights = (self.w_in, self.w_out)
        return weights if self.b_in is None else (*weights, self.b_in, self.b_out)


def make_operands(
    shape: Shape,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    *,
    layer: int = 0,
    weights_dtype: torch.dtype | None = None,
) -> Operands:
    """Operands that give intermediates of order one, never zeros; the same in every call.

    Args:
        layer: another layer has other weights and another routing, of the same kind.
        weights_dtype: of the router weights; default ``dtype``, as in transformers.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(layer)
    randn = functools.partial(torch.randn, generator=generator, device=device)
    T, D, F, E, K = shape.sizes().values()

    def experts(rows: int, columns: int, fan_in: int) -> Tensor:
        # A few random matrices, rotated by e rows, are different enough and do not
        # take minutes to draw.
        w = torch.empty(E, rows, columns, dtype=dtype, device=device)
        for e in range(E):
            w[e] = randn(rows, columns) * fan_in**-0.5 if e < 4 else w[e % 4].roll(e, 0)
        return w

    x, grad = randn(T, D).to(dtype), randn(T, D).to(dtype)
    if device.type == "cpu":
        ids = shape.topk_indices(layer)
    else:  # the generator draws on a CPU, which would take longer than the layer
        ids = torch.rand(T, E, device=device, generator=generator).topk(K).indices
    weights = torch.rand(T, K, device=device, generator=generator) + 0.5
    weights = (weights / weights.sum(-1, keepdim=True)).to(weights_dtype or dtype)
    biases = {}
    if shape.gpt_oss:
        biases = {"b_in": randn(E, 2 * F).to(dtype), "b_out": randn(E, D).to(dtype)}
        w_in, w_out = experts(D, 2 * F, D), experts(F, D, F)
    else:
        w_in, w_out = experts(2 * F, D, D), experts(D, F, F)
    leaves = [t.requires_grad_() for t in (x, weights, w_in, w_out)]
    return Operands(leaves[0], ids, *leaves[1:], grad, **biases)
