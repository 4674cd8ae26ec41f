"""What the assembler made of the FP8 kernels of ``_moe_mlp_scaled``, and what that should cost.

Test-only; the figures and the model are those of moe_sass.py, which was calibrated on no FP8
kernel. Of the memory-bound kernels bytes and launches count.

    python test/python_native/moe_scaled_sass.py --output benchmarks/moe/results/scaled_sass.json
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
from unittest import mock

import moe_sass
from moe_sass import DRAM_BYTES, Kernel, LAUNCH_SECONDS, Shape, SHAPES, Work
from moe_scaled_sweep import MATRIX_KERNELS, meta_quantize, RECIPES

import torch
from torch._native.ops.moe.triton_kernels import launch, scaled_launch
from torch._native.ops.moe.triton_kernels.configs import TABLES
from torch._native.ops.moe.triton_kernels.scaled_configs import SCALED_TABLES
from torch._native.ops.moe.triton_kernels.scaled_operands import ScaledExperts


# The architecture of the model.
ARCH = "sm_90"
# The names of F.moe_mlp's recipes, and how ARCH runs them.
TARGETS = {"fp8_blockwise": "fp8", "fp8_rowwise": "row", "mxfp8": "wide"}
# A code and its share of a scale: a byte of 32, or four of 128; of rows next to nothing.
CODE = {"fp8": 1 + 1 / 32, "wide": 1 + 1 / 32, "row": 1.0}
BF16 = pathlib.Path(__file__).resolve().parents[2] / (
    "benchmarks/moe/results/triton_sass.json"
)


def _launch_layer(shape: Shape, recipe: str) -> None:
    """A training step whose rows and weights come quantised, on operands that nothing touches."""
    T, D, F, E, K, R = shape.T, shape.D, shape.F, shape.E, shape.K, shape.rows
    plan = launch.LaunchPlan({**TABLES[ARCH], **SCALED_TABLES[ARCH]}, moe_sass.SMS)
    bf16 = functools.partial(torch.empty, dtype=torch.bfloat16)
    int32 = functools.partial(torch.empty, dtype=torch.int32)
    args = (
        bf16(T, D), bf16(E, 2 * F, D), bf16(E, D, F), int32(E), torch.empty(T, K),
        int32(R), int32(T, K), None, None, None, [], [], [], [],
    )  # fmt: skip
    experts = ScaledExperts(
        *args, recipe=RECIPES[recipe], preact_dtype=torch.float8_e4m3fn
    )
    with mock.patch.object(torch.ops.aten, "_moe_quantize", meta_quantize):
        _, *saved = scaled_launch.moe_mlp_scaled_forward(plan, experts)
        mask = (True, True, True, True, False, False, False)
        scaled_launch.moe_mlp_scaled_backward(plan, experts, saved, mask)


class _Names:
    """Names of the matmul kernels of one layer, in the order of their launches."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe
        self.left = ["up", "down", "act_backward", "input_grad", "dw_out", "dw_in"]

    def __call__(self, report) -> str:
        return f"{self.recipe} {self.left.pop(0)}"


def work_of(kernel: Kernel, shape: Shape) -> Work:
    """As ``moe_sass.work_of``, whose fills and loads these are."""
    D, F, E, R = shape.D, shape.F, shape.E, shape.rows
    recipe, name = kernel.name.split()
    code, (bm, bn, bk) = CODE[recipe], kernel.block
    # Quantised behind the kernel.
    made = 2.0 if recipe == "row" else code
    tiles, step = shape.row_tiles(bm), (bm + bn) * bk

    def weights(n: int, k: int) -> float:
        return moe_sass.weight_bytes(shape, bm, n, k, code)

    if name == "up":
        tiles, step = tiles * -(-F // bn), (bm + 2 * bn) * bk
        rest = weights(2 * F, D) + R * F * (2 * code + made)
        dram = moe_sass.gathered_bytes(shape, code * D, rest) + rest
        return Work(tiles, D / bk, step, 4.0 * R * D * F, dram, 3, 0, 0)
    if name == "act_backward":
        tiles *= -(-F // bn)
        rest = weights(F, D) + R * F * (2 * code + 2 * made + 2)
        dram = moe_sass.gathered_bytes(shape, code * D, rest) + rest
        loads = kernel.constants["EPILOGUE_PARTS"]
        return Work(tiles, D / bk, step, 2.0 * R * D * F, dram, 3, 0, loads)
    if name in ("down", "input_grad"):
        inner = F if name == "down" else 2 * F
        dram = weights(D, inner) + R * inner * code + 2.0 * R * D
        chain = 3 if name == "down" else 2
        flops = 2.0 * R * D * inner
        return Work(tiles * -(-D // bn), inner / bk, step, flops, dram, chain, 0, 0)
    m, n = (2 * F, D) if name == "dw_in" else (D, F)
    tiles = E * -(-m // bm) * -(-n // bn)
    dram = code * R * (m + n) + 2.0 * E * m * n
    return Work(tiles, R / E / bk + 0.5, step, 2.0 * R * m * n, dram, 3, 0, 0.4)


def around_us(shape: Shape, recipe: str) -> dict[str, float]:
    """Microseconds of what is no matmul: of forward, backward, and codes of all weights once.

    Bytes in 16 bits are read, codes written.
    """
    T, D, F, E, R = shape.T, shape.D, shape.F, shape.E, shape.rows
    code = CODE[recipe]
    made = 2 + code
    tokens = T * D * made
    combine = 2 * D * (R + T)
    # Columns of dO, A', dH and X: codes are read, of A' 16 bits.
    columns = R * (2 * D + 2 * F) * 2 * code + R * F * made
    forward, backward, launches = tokens + combine, tokens + combine + columns, (4, 8)
    if recipe == "row":
        # Numbers twice, of which the second may hit; A and dH, and the scales of columns.
        forward += R * F * (2 + made)
        backward += 2 * R * F * (2 + made) + R * ((2 * D + 2 * F) * code + 2 * F)
        launches = (5, 13)
    weights = 3 * E * D * F * 2 * made
    if recipe != "fp8":
        # Quantised along the other dimension, then turned.
        weights += 3 * E * D * F * 2

    def us(size: float, count: int) -> float:
        return 1e6 * (size / DRAM_BYTES + count * LAUNCH_SECONDS)

    return {
        "forward": us(forward, launches[0]) + sum(moe_sass.SMALL_FORWARD.values()),
        "backward": us(backward, launches[1]) + sum(moe_sass.SMALL_BACKWARD.values()),
        "weights": us(weights, 4),
    }


def gather_us(shape: Shape) -> dict[str, float]:
    """X quantised once and gathered in codes, or gathered in 16 bits and quantised in each tile.

    Bytes alone: of the second way also those that the L2 gives to column tiles of 128.
    """
    T, D = shape.T, shape.D
    rest = shape.E * 2 * shape.F * D + shape.rows * shape.F * 3
    codes = CODE["fp8"]
    once = T * D * (2 + codes) + moe_sass.gathered_bytes(shape, codes * D, rest)
    inside = moe_sass.gathered_bytes(shape, 2.0 * D, rest)
    tiles = -(-shape.F // 128) * shape.rows * D
    port = moe_sass.L2_PORT * moe_sass.SMS * moe_sass.CLOCK
    return {
        "quantised_once_us": 1e6 * (once / DRAM_BYTES + LAUNCH_SECONDS),
        "inside_us": 1e6 * inside / DRAM_BYTES,
        "once_l2_us": 1e6 * codes * tiles / port,
        "inside_l2_us": 1e6 * 2 * tiles / port,
    }


def _layer(shape: Shape, recipe: str, times: dict[str, float]) -> dict[str, object]:
    around = around_us(shape, recipe)
    forward = sum(times[name] for name in ("up", "down")) + around["forward"]
    backward = sum(times.values()) - times["up"] - times["down"] + around["backward"]
    row = {
        "forward_us": round(forward),
        "backward_us": round(backward),
        "weights_us": round(around["weights"]),
    }
    if BF16.exists():
        for layer in json.loads(BF16.read_text())["layers"]:
            if layer["name"] == shape.name:
                row["forward_bf16_us"] = layer["forward_us"]
                row["backward_bf16_us"] = layer["backward_us"]
    return row


def measure() -> dict[str, list[dict[str, object]]]:
    """The rows of the record."""
    kernels: dict[str, dict[str, object]] = {}
    estimates, layers = [], []
    shapes = (SHAPES[0], *SHAPES[3:])
    for name, recipe in TARGETS.items():
        calls = [
            (shape, functools.partial(_launch_layer, shape, recipe), _Names(recipe))
            for shape in shapes
        ]
        for shape, found in moe_sass.compiled(ARCH, MATRIX_KERNELS, calls).items():
            times = {}
            for kernel in found:
                head = {"arch": ARCH, "kernel": kernel.label}
                kernels[kernel.label] = {**head, **moe_sass.figures(kernel)}
                row = moe_sass.estimated(kernel, shape, work_of(kernel, shape))
                estimates.append(row)
                times[kernel.name.split()[1]] = row["us"]
            row = {"recipe": name, **dataclasses.asdict(shape)}
            layers.append(row | _layer(shape, recipe, times))
    gathers = [
        {"name": s.name, **{k: round(v) for k, v in gather_us(s).items()}}
        for s in shapes
    ]
    return {
        "kernels": list(kernels.values()),
        "estimates": estimates,
        "layers": layers,
        "gather": gathers,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, required=True)
    path = parser.parse_args().output
    sys.exit(moe_sass.record(path, measure, "moe_scaled_sass"))
