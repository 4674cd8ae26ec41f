"""Compiles the FP8 kernels of ``_moe_mlp_scaled`` in every tile configuration that ships.

Test-only; see moe_triton_sweep.py, whose tools these are:

    python test/python_native/moe_scaled_sweep.py --output FILE
"""

import dataclasses
from unittest import mock

from moe_triton_sweep import _tables, Family, main
from triton_static_gate import KernelReport

import torch
from torch._native.ops.moe.triton_kernels import (
    launch,
    scaled_backward,
    scaled_forward,
    scaled_launch,
)
from torch._native.ops.moe.triton_kernels.configs import TABLES, TileConfig
from torch._native.ops.moe.triton_kernels.experts import (
    Activation,
    GATED_ACTIVATIONS,
    LIMITED_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
)
from torch._native.ops.moe.triton_kernels.scaled_configs import SCALED_TABLES
from torch._native.ops.moe.triton_kernels.scaled_operands import Recipe, ScaledExperts
from torch.nn.functional import ScalingType


_ROW, _MX, _B128 = (
    kind.value
    for kind in (
        ScalingType.RowWise,
        ScalingType.BlockWise1x32,
        ScalingType.BlockWise1x128,
    )
)
RECIPES = {
    "fp8": Recipe(_B128, ScalingType.BlockWise128x128.value),
    "mx": Recipe(_MX, _MX),
    "wide": Recipe(_MX, _MX, widen=True),
    "row": Recipe(_ROW, _ROW),
}
E4M3 = torch.float8_e4m3fn
ACTIVATION_KERNELS = (
    scaled_forward.scaled_up_kernel,
    scaled_backward.scaled_act_backward_kernel,
)
MATRIX_KERNELS = (
    *ACTIVATION_KERNELS,
    scaled_forward.scaled_mm_kernel,
    scaled_backward.scaled_weight_grad_kernel,
)
SCALED_FUNCTIONS = (
    *MATRIX_KERNELS,
    scaled_backward.columns_kernel,
    scaled_backward.column_scales_kernel,
)
_MATRIX_NAMES = tuple(kernel.__name__ for kernel in MATRIX_KERNELS)
_TARGETS = {
    "fp8": ("sm_90", "sm_100"),
    "mx": ("sm_100",),
    "row": ("sm_90", "sm_100"),
    "wide": ("sm_90",),
}
_BORROWED = {"sm_103": "sm_100"}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to call the op: options of ``_moe_mlp_scaled``, and of ``Variant`` there.

    Attributes:
        recipe: an entry of RECIPES.
        off: F is a multiple of 16 only, and blocks of H have columns of gate and up.
        dtype: of operands; products are rounded to it if it is bfloat16.
    """

    name: str
    recipe: str
    architectures: tuple[str, ...]
    kernels: tuple = ACTIVATION_KERNELS
    activation: Activation = Activation()
    dtype: torch.dtype = torch.bfloat16
    preact_dtype: torch.dtype | None = E4M3
    bias: bool = True
    split: bool = False
    hp_wgrad: bool = False
    odd: bool = False
    off: bool = False
    every_config: bool = True


def variants() -> tuple[Variant, ...]:
    """Every activation, clamp and layout; those that need most registers in every type."""
    chosen: list[Variant] = []

    def add(name: str, recipes=("fp8", "mx", "row", "wide"), **options) -> None:
        for recipe in recipes:
            targets = _TARGETS[recipe]
            if name == "all_kernels" and recipe != "wide":
                targets = (*targets, "sm_103")
            chosen.append(Variant(f"{recipe} {name}", recipe, targets, **options))

    add("all_kernels", kernels=SCALED_FUNCTIONS)
    add("no_bias", kernels=SCALED_FUNCTIONS, bias=False, split=True, preact_dtype=None)
    add("odd", kernels=SCALED_FUNCTIONS, odd=True, activation=Activation("silu"))
    add("off", recipes=("fp8", "mx", "row"), off=True)
    add("hp_wgrad", hp_wgrad=True, bias=False)
    for name in (*GATED_ACTIVATIONS, *PLAIN_ACTIVATIONS):
        gated = name in GATED_ACTIVATIONS
        # Their epilogues are those of the others, of which these need most registers.
        recipes = ("fp8", "mx")
        if name in ("geglu", "swiglu_oai"):
            recipes += ("row", "wide")
        for interleaved in (False, True) if gated else (False,):
            layout = " interleaved" if interleaved else ""
            act = Activation(name, interleaved)
            if name in LIMITED_ACTIVATIONS and name != "swiglu_oai":
                clamped = dataclasses.replace(act, limit=7.0)
                for dtype in (torch.bfloat16, torch.float32):
                    label = f"{name}{layout} limit {dtype}"
                    add(label, recipes, activation=clamped, dtype=dtype)
            add(f"{name}{layout}", recipes, activation=act)
            if name in ("swiglu", "geglu", "gelu"):
                for dtype, preact in (
                    (torch.bfloat16, None),
                    (torch.bfloat16, torch.int8),
                    (torch.float32, None),
                ):
                    label = f"{name}{layout} {dtype} preact {preact}"
                    add(
                        label,
                        recipes,
                        activation=act,
                        dtype=dtype,
                        preact_dtype=preact,
                    )
    return tuple(chosen)


# What the record has: every kernel, and the epilogues that need most registers.
_RECORDED = (
    "all_kernels",
    "odd",
    "off",
    "geglu interleaved torch.float32 preact None",
    "geglu limit torch.float32",
)


def recorded_variants() -> tuple[Variant, ...]:
    """The recorded ones of :func:`variants`, all of which the slow gate compiles."""
    return tuple(v for v in variants() if v.name.split(" ", 1)[1] in _RECORDED)


_quantize = torch.ops.aten._moe_quantize


def meta_quantize(x: torch.Tensor, code: int, **options) -> tuple:
    """Shapes of ``_moe_quantize``, without the time that it takes on CPU."""
    out = _quantize(x.to("meta"), code, **options)
    return tuple(torch.empty_strided(y.shape, y.stride(), dtype=y.dtype) for y in out)


def call(plan: launch.LaunchPlan, variant: Variant, device: str = "cpu", tokens=4096):
    """Forward and backward on operands that nothing reads or writes."""
    T, D, F, E, K = (8, 1008, 336, 1, 1) if variant.odd else (tokens, 2048, 1408, 64, 8)
    F = 1424 if variant.off else F
    act = variant.activation
    gF = 2 * F if act.gated else F

    def empty(*shape, dtype=variant.dtype):
        return torch.empty(shape, dtype=dtype, device=device)

    def int32(*shape):
        return empty(*shape, dtype=torch.int32)

    args = (
        empty(T, D),
        empty(E, F if variant.split else gF, D),
        empty(E, D, F),
        int32(E),
        empty(T, K, dtype=torch.float32),
        int32(T * K),
        int32(T, K),
        empty(E, gF) if variant.bias else None,
        empty(E, D) if variant.bias else None,
        empty(E, F, D) if variant.split else None,
        [], [], [], [],
    )  # fmt: skip
    experts = ScaledExperts(
        *args,
        recipe=RECIPES[variant.recipe],
        preact_dtype=variant.preact_dtype,
        hp_wgrad=variant.hp_wgrad,
        act=act,
    )
    output, *saved = scaled_launch.moe_mlp_scaled_forward(plan, experts)
    mask = (True,) * 7
    grads = scaled_launch.moe_mlp_scaled_backward(plan, experts, saved, mask)
    return args, output, saved, grads


def _launch(variant: Variant, table: dict[str, tuple[TileConfig, ...]]) -> None:
    with mock.patch.object(torch.ops.aten, "_moe_quantize", meta_quantize):
        call(launch.LaunchPlan(table, num_sms=132), variant)


def _shipped(arch: str, variant: Variant) -> list[dict[str, tuple[TileConfig, ...]]]:
    arch = _BORROWED.get(arch, arch)
    table = {
        name: configs
        for name, configs in SCALED_TABLES[arch].items()
        if name.startswith(variant.recipe)
    }
    first = {name: configs[-1:] for name, configs in TABLES[arch].items()}
    return [{**first, **one_each} for one_each in _tables(table, variant)]


def _problems(report: KernelReport) -> list[str]:
    matrix = report.kernel in _MATRIX_NAMES
    tma = bool(report.constants.get("USE_TMA"))
    fp8 = matrix and not report.constants.get("WIDEN")
    return report.problems(matrix=matrix, tma=tma, fp8=fp8)


FAMILY = Family(
    "moe_scaled_sweep",
    ("sm_90", "sm_100", "sm_103"),
    variants,
    _shipped,
    _launch,
    _problems,
    SCALED_FUNCTIONS,
)


RECORDED = dataclasses.replace(FAMILY, variants=recorded_variants)


if __name__ == "__main__":
    main(RECORDED)
