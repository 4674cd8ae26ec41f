"""The layers that are timed, their operands, and what they must cost at least.

Letters: T tokens, D model dim, F expert hidden dim, E experts, K experts per token.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer; the letters of the module docstring."""

    name: str
    T: int
    D: int
    F: int
    E: int
    K: int

    def forward_flops(self) -> int:
        return 6 * self.T * self.K * self.D * self.F

    def kernel_costs(self) -> dict[str, tuple[int, int]]:
        """(flops, bytes) of every kernel; bfloat16, SwiGLU.

        Every input is read once and every output written once. Experts that no token
        asks for are not read: of E at most T*K are.
        """
        T, D, n, R = self.T, self.D, self.F, self.T * self.K
        mm = 2 * R * n * D
        weights = 2 * min(self.E, R) * n * D
        gradients = 2 * self.E * n * D
        return {
            "up": (2 * mm, 2 * R * D + 2 * weights + 6 * R * n),
            "down": (mm, 2 * R * n + weights + 2 * R * D),
            "combine": (0, 2 * R * D + 4 * R + 2 * T * D),
            "act_backward": (mm, 2 * R * D + weights + 10 * R * n + 4 * R),
            "weight_grad_out": (mm, 2 * R * D + 2 * R * n + gradients),
            "input_grad": (2 * mm, 4 * R * n + 2 * weights + 2 * R * D),
            "weight_grad_in": (2 * mm, 2 * R * D + 4 * R * n + 2 * gradients),
            "combine_grad": (0, 2 * R * D + 2 * T * D),
        }

    def bound_ms(self, kind: str, bandwidth: float, rate: float) -> float:
        """Sum over kernels of the larger of flops / rate and bytes / bandwidth.

        Args:
            kind: "forward", or "step" for forward and backward.
            bandwidth: bytes/s of a copy, read plus written.
            rate: flops/s of a dense bfloat16 product.
        """
        costs = self.kernel_costs()
        names = ("up", "down", "combine") if kind == "forward" else tuple(costs)
        return sum(
            1e3 * max(costs[n][0] / rate, costs[n][1] / bandwidth) for n in names
        )


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
# The expert sizes of the published configurations.
OPEN_MODELS = (
    Shape("OLMoE-1B-7B", 32768, 2048, 1024, 64, 8),
    Shape("gpt-oss-20b", 32768, 2880, 2880, 32, 4),
    Shape("Qwen3-30B-A3B", 32768, 2048, 768, 128, 8),
    Shape("Kimi-Linear-48B", 32768, 2304, 1024, 256, 8),
    Shape("Qwen3-Next-80B", 32768, 2048, 512, 512, 10),
    Shape("Qwen3-235B-A22B", 32768, 4096, 1536, 128, 8),
    Shape("DeepSeek-V3.2", 16384, 7168, 2048, 256, 8),
)
DECODE = tuple(
    Shape(f"OLMoE-decode-T{T}", T, 2048, 1024, 64, 8) for T in (1, 16, 64, 256)
)
GPU_SHAPES = TABLE_9B + OPEN_MODELS + DECODE
# Compiling the peers takes longer than all their runs: a small and a large layer.
COMPILED_PEER = ("7B-n256", "30B-n512")
# What a tuner measures: narrow, middle and wide experts of both model dims, and decode.
TUNING_SHAPES = ("7B-n256", "30B-n512", "OLMoE-1B-7B", "120B-n2048", "OLMoE-decode-T64")
REHEARSAL = (Shape("tiny", 24, 32, 32, 4, 2), Shape("tiny-decode", 1, 32, 32, 4, 2))


@dataclasses.dataclass(frozen=True)
class Operands:
    """x (T, D), ids and weights (T, K), w_in (E, 2F, D), w_out (E, D, F), grad (T, D)."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w_in: Tensor
    w_out: Tensor
    grad: Tensor

    def layer_args(self) -> tuple[Tensor, ...]:
        return (self.x, self.ids, self.weights, self.w_in, self.w_out)

    def leaves(self) -> tuple[Tensor, ...]:
        return (self.x, self.weights, self.w_in, self.w_out)


def make_operands(shape: Shape, device: torch.device) -> Operands:
    """Random values, never zeros, and uniform random routing."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, std: float) -> Tensor:
        x = torch.empty(size, device=device, dtype=torch.bfloat16)
        return x.normal_(0, std, generator=generator).requires_grad_()

    scores = torch.rand(shape.T, shape.E, device=device, generator=generator)
    weights, ids = scores.softmax(-1).topk(shape.K)
    return Operands(
        x=normal(shape.T, shape.D, std=1.0),
        ids=ids,
        weights=weights.requires_grad_(),
        w_in=normal(shape.E, 2 * shape.F, shape.D, std=shape.D**-0.5),
        w_out=normal(shape.E, shape.D, shape.F, std=shape.F**-0.5),
        grad=normal(shape.T, shape.D, std=1.0).detach(),
    )
