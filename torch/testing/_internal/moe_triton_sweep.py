"""Compiles every shipped tile configuration of the MoE Triton kernels.

Test-only. :func:`sweep` runs the real launchers under ``compile_only``; the static
gate asserts on its rows, and running the module records them as a table:

    python -m torch.testing._internal.moe_triton_sweep --output FILE

Run it once per Triton version; FILE keeps the rows of the other versions.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch._native.ops.moe.triton_kernels import backward, forward, launch
from torch._native.ops.moe.triton_kernels.activations import (
    GATED_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
)
from torch._native.ops.moe.triton_kernels.configs import (
    KernelTable,
    TABLES,
    TileConfig,
)
from torch.testing._internal.triton_static_gate import (
    ARCHITECTURES,
    compile_only,
    KernelReport,
)


UP = (forward.up_kernel,)
ACTIVATION_KERNELS = (forward.up_kernel, backward.act_backward_kernel)
MATRIX_KERNELS = (
    *ACTIVATION_KERNELS,
    forward.grouped_mm_kernel,
    backward.weight_grad_kernel,
)
MATRIX_KERNEL_NAMES = tuple(kernel.__name__ for kernel in MATRIX_KERNELS)
ALL_KERNELS = ()  # what compile_only takes for "all"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to call the ops, for which configurations are compiled.

    Attributes:
        name: unique.
        kernels: which kernels to compile for it.
        every_config: all configurations of the tables, or only the first.
        activation: the activation arguments.
        dtype: of the operands.
        bias: with biases.
        transposed: expert weights stored with their last two dimensions swapped.
        slots: with a permutation; without, rows are expert-major already.
        odd: the smallest multiples, D and F that no tile divides, and K = E = 1,
            which Triton specializes on.
    """

    name: str
    kernels: tuple = MATRIX_KERNELS
    every_config: bool = False
    activation: launch.Activation = launch.Activation()
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    transposed: bool = False
    slots: bool = True
    odd: bool = False


def variants() -> tuple[Variant, ...]:
    """What is compiled; together they reach every kernel, flag and configuration."""
    chosen = [
        Variant("swiglu", every_config=True),
        Variant(
            "interleaved",
            kernels=ACTIVATION_KERNELS,
            every_config=True,
            activation=launch.Activation("swiglu", gate_interleaved=True),
        ),
        Variant(
            "silu",
            kernels=UP,
            every_config=True,
            activation=launch.Activation("silu"),
        ),
        Variant("all_kernels", kernels=ALL_KERNELS, bias=True),
        Variant("no_slots", kernels=ALL_KERNELS, slots=False, bias=True),
        Variant("odd", kernels=ALL_KERNELS, odd=True, bias=True),
        Variant("transposed", transposed=True),
        Variant("float16", dtype=torch.float16),
    ]
    for name in GATED_ACTIVATIONS + PLAIN_ACTIVATIONS:
        if name not in ("swiglu", "silu"):
            chosen.append(
                Variant(
                    name,
                    kernels=ACTIVATION_KERNELS,
                    # The clamps make it the one that needs most registers.
                    every_config=name == "swiglu_oai",
                    activation=launch.Activation(name),
                )
            )
    return tuple(chosen)


def _one_config(table: KernelTable, index: int) -> dict[str, tuple[TileConfig, ...]]:
    return {
        kernel: (configs[min(index, len(configs) - 1)],)
        for kernel, configs in table.items()
    }


def _launch(variant: Variant, table: KernelTable) -> None:
    """Forward and backward of one call on operands that nothing reads or writes."""
    T, D, F, E, K = (8, 1008, 336, 1, 1) if variant.odd else (4096, 2048, 1408, 64, 8)
    act, dtype = variant.activation, variant.dtype
    K = K if variant.slots else 1
    gF = 2 * F if act.gated else F
    plan = launch.LaunchPlan(table, num_sms=132)

    def weight(rows: int, columns: int) -> torch.Tensor:
        if variant.transposed:
            return torch.empty(E, columns, rows, dtype=dtype).transpose(1, 2)
        return torch.empty(E, rows, columns, dtype=dtype)

    def int32(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32)

    x = torch.empty(T, D, dtype=dtype)
    if not variant.kernels:
        launch.moe_permutation(torch.empty(T, K, dtype=torch.int64), E)
    args = (
        x,
        weight(gF, D),
        weight(D, F),
        int32(E),
        torch.empty(T, K),
        int32(T * K) if variant.slots else None,
        int32(T, K) if variant.slots else None,
        torch.empty(E, gF, dtype=dtype) if variant.bias else None,
        torch.empty(E, D, dtype=dtype) if variant.bias else None,
    )
    _, preact = launch.moe_mlp_forward(plan, *args, act)
    launch.moe_mlp_backward(plan, x, *args, preact, (True,) * 6, act)


class Row(NamedTuple):
    """One compiled kernel.

    Attributes:
        variant: name of the :class:`Variant` that it was compiled for.
        report: what the compiler said.
        problems: why it must not ship; empty if it may.
    """

    variant: str
    report: KernelReport
    problems: list[str]


def sweep(
    arch: str,
    table: KernelTable | None = None,
    chosen: tuple[Variant, ...] | None = None,
) -> Iterator[Row]:
    """Compiles for ``arch`` and judges.

    Args:
        arch: an entry of ARCHITECTURES.
        table: tile configurations; default: the ones that ship.
        chosen: default: :func:`variants`.
    """
    table = TABLES[arch] if table is None else table
    for variant in variants() if chosen is None else chosen:
        count = max(map(len, table.values())) if variant.every_config else 1
        with compile_only(arch, variant.kernels) as reports:
            for index in range(count):
                _launch(variant, _one_config(table, index))
        for report in reports:
            matrix = report.kernel in MATRIX_KERNEL_NAMES
            tma = bool(report.constants.get("USE_TMA"))
            yield Row(variant.name, report, report.problems(matrix=matrix, tma=tma))


def record(path: pathlib.Path, architectures: tuple[str, ...] = ARCHITECTURES) -> int:
    """Writes the rows of this Triton version; returns how many have problems.

    Args:
        path: a table to create, or to replace rows of.
        architectures: whose rows.
    """
    import triton

    table = json.loads(path.read_text()) if path.exists() else {"rows": []}
    kept = [
        row
        for row in table["rows"]
        if row["triton"] != triton.__version__ or row["arch"] not in architectures
    ]
    fresh = []
    for arch in architectures:
        for variant, report, problems in sweep(arch):
            row = {"triton": triton.__version__, "variant": variant}
            row.update(dataclasses.asdict(report))
            row["constants"] = {
                name: value
                for name, value in report.constants.items()
                if name.startswith(("BLOCK", "USE_TMA", "GATHER", "EPILOGUE"))
            }
            row["problems"] = problems
            fresh.append(row)
        print(arch, sum(row["arch"] == arch for row in fresh), "kernels", flush=True)
    command = "python -m torch.testing._internal.moe_triton_sweep --output FILE"
    ordered = sorted(kept + fresh, key=lambda row: (row["triton"], row["arch"]))
    rows = ",\n  ".join(json.dumps(row) for row in ordered)
    path.write_text(f'{{\n "command": "{command}",\n "rows": [\n  {rows}\n ]\n}}\n')
    return sum(bool(row["problems"]) for row in fresh)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument(
        "--arch", action="append", choices=ARCHITECTURES, help="default: all"
    )
    options = parser.parse_args()
    chosen = ARCHITECTURES if options.arch is None else tuple(options.arch)
    sys.exit(1 if record(options.output, chosen) else 0)
