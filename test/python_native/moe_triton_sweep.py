"""Compiles every shipped tile configuration of the MoE Triton kernels.

Test-only. :func:`sweep` runs the real launchers under ``compile_only``; the static
gate asserts on its rows, and running the module records them as a table:

    python test/python_native/moe_triton_sweep.py --output FILE

Run it once per Triton version; FILE keeps the rows of the other versions, and the hash
of the sources that each version's rows were compiled from (:func:`source_hash`).
"""

import argparse
import ast
import atexit
import concurrent.futures
import contextlib
import dataclasses
import gc
import hashlib
import inspect
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import triton
from triton_static_gate import (
    ARCHITECTURES,
    compile_only,
    KernelReport,
)

import torch
from torch._native.ops.moe.triton_kernels import (
    activations,
    backward,
    forward,
    launch,
    permutation,
    reductions,
    topk,
)
from torch._native.ops.moe.triton_kernels.configs import (
    KernelTable,
    TABLES,
    TileConfig,
)
from torch._native.ops.moe.triton_kernels.experts import (
    Activation,
    Experts,
    GATED_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
)


# The modules of its kernels; other files of the package have gates of their own.
MODULES = (activations, backward, forward, permutation, reductions, topk)
UP = (forward.up_kernel,)
ACTIVATION_KERNELS = (forward.up_kernel, backward.act_backward_kernel)
MATRIX_KERNELS = (
    *ACTIVATION_KERNELS,
    forward.grouped_mm_kernel,
    backward.weight_grad_kernel,
)
KERNEL_FUNCTIONS = tuple(
    value
    for module in MODULES
    for name, value in vars(module).items()
    if name.endswith("_kernel") and value.__module__ == module.__name__
)
MATRIX_KERNEL_NAMES = tuple(kernel.__name__ for kernel in MATRIX_KERNELS)
ALL_KERNELS = ()  # what compile_only takes for "all"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to call the ops, for which configurations are compiled.

    Attributes:
        name: unique.
        kernels: which kernels to compile for it.
        every_config: all configurations of the tables, or only the first that is
            not for few rows or columns.
        activation: the activation arguments.
        dtype: of the operands.
        bias: with biases.
        transposed: expert weights stored with their last two dimensions swapped.
        two_weights: gate and up as two weights.
        slots: with a permutation; without, rows are expert-major already.
        odd: the smallest multiples, D and F that no tile divides, and K = E = 1,
            which Triton specializes on.
        traced: as a compiler traces the launchers, without ragged descriptors.
        architectures: for which it is compiled.
    """

    name: str
    kernels: tuple = MATRIX_KERNELS
    every_config: bool = False
    activation: Activation = Activation()
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    transposed: bool = False
    two_weights: bool = False
    slots: bool = True
    odd: bool = False
    traced: bool = False
    architectures: tuple[str, ...] = (*ARCHITECTURES, "gfx950")


# Architectures without a table of their own, and whose table they take.
BORROWED = {"sm_103": "sm_100", "gfx950": "gfx942"}


def variants() -> tuple[Variant, ...]:
    """What is compiled; together they reach every kernel, flag and configuration."""
    chosen = [
        Variant("swiglu", every_config=True),
        Variant(
            "interleaved",
            kernels=ACTIVATION_KERNELS,
            every_config=True,
            activation=Activation("swiglu", gate_interleaved=True),
        ),
        Variant(
            "silu",
            kernels=UP,
            every_config=True,
            activation=Activation("silu"),
        ),
        Variant(
            "all_kernels",
            kernels=ALL_KERNELS,
            bias=True,
            architectures=(*ARCHITECTURES, *BORROWED),
        ),
        Variant("no_slots", kernels=ALL_KERNELS, slots=False, bias=True),
        Variant("odd", kernels=ALL_KERNELS, odd=True, bias=True),
        Variant("transposed", transposed=True),
        Variant("traced", kernels=(backward.weight_grad_kernel,), traced=True),
        Variant(
            "two_weights",
            kernels=(forward.up_kernel, forward.grouped_mm_kernel),
            every_config=True,
            two_weights=True,
        ),
        Variant(
            "two_weights_transposed",
            two_weights=True,
            transposed=True,
        ),
        Variant(
            "swiglu_limit",
            kernels=ACTIVATION_KERNELS,
            activation=Activation("swiglu", limit=7.0),
        ),
        Variant(
            "gpt_oss",
            kernels=ACTIVATION_KERNELS,
            activation=Activation("swiglu_oai", gate_interleaved=True),
            bias=True,
        ),
        # The alternating form that needs most registers.
        Variant(
            "interleaved_geglu",
            kernels=ACTIVATION_KERNELS,
            every_config=True,
            activation=Activation("geglu", gate_interleaved=True, limit=7.0),
        ),
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
                    activation=Activation(name),
                )
            )
    return tuple(chosen)


def _one_config(table: KernelTable, index: int) -> dict[str, tuple[TileConfig, ...]]:
    return {
        kernel: (configs[min(index, len(configs) - 1)],)
        for kernel, configs in table.items()
    }


def _main_config(table: KernelTable) -> dict[str, tuple[TileConfig, ...]]:
    """The first configuration of every kernel that is not for few rows or columns."""
    return {
        kernel: next((c,) for c in configs if not (c.max_rows or c.max_columns))
        for kernel, configs in table.items()
    }


def _tables(
    table: KernelTable, variant: Variant
) -> list[dict[str, tuple[TileConfig, ...]]]:
    """Tables of one configuration per kernel, that together are what ``variant`` takes."""
    if not variant.every_config:
        return [_main_config(table)]
    return [_one_config(table, i) for i in range(max(map(len, table.values())))]


def _launch(variant: Variant, table: KernelTable) -> None:
    """Forward and backward of one call on operands that nothing reads or writes."""
    T, D, F, E, K = (8, 1008, 336, 1, 1) if variant.odd else (4096, 2048, 1408, 64, 8)
    act, dtype = variant.activation, variant.dtype
    K = K if variant.slots else 1
    gF = 2 * F if act.gated else F
    plan = launch.LaunchPlan(table, num_sms=132, ragged=not variant.traced)

    def weight(rows: int, columns: int) -> torch.Tensor:
        if variant.transposed:
            return torch.empty(E, columns, rows, dtype=dtype).transpose(1, 2)
        return torch.empty(E, rows, columns, dtype=dtype)

    def int32(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32)

    x = torch.empty(T, D, dtype=dtype)
    if not variant.kernels:
        for num_tokens in (4096, 1):  # by blocks, and the block for decoding
            permutation.moe_permutation(torch.empty(num_tokens, K).long(), E)
        _launch_router(T, variant)
    args = (
        x,
        weight(F if variant.two_weights else gF, D),
        weight(D, F),
        int32(E),
        torch.empty(T, K),
        int32(T * K) if variant.slots else None,
        int32(T, K) if variant.slots else None,
        torch.empty(E, gF, dtype=dtype) if variant.bias else None,
        torch.empty(E, D, dtype=dtype) if variant.bias else None,
        weight(F, D) if variant.two_weights else None,
    )
    experts = Experts(*args, act=act)
    _, preact = launch.moe_mlp_forward(plan, experts)
    launch.moe_mlp_backward(plan, experts, x, preact, (True,) * 7)


# Experts, experts per token and options of the routers that are compiled: small, the
# groups of DeepSeek-V2 and -V3, and the largest that is served.
ROUTERS: tuple[tuple[int, int, dict[str, object]], ...] = (
    (64, 8, {}),
    (160, 6, {"num_groups": 8, "top_groups": 3}),
    (256, 8, {"score": "sigmoid", "num_groups": 8, "top_groups": 4}),
    (4096, 32, {}),
)


def _launch_router(num_tokens: int, variant: Variant) -> None:
    routers = ((1, 1, {}), (6, 3, {"score": "sigmoid"})) if variant.odd else ROUTERS
    for num_experts, k, options in routers:
        logits = torch.empty(num_tokens, num_experts, dtype=variant.dtype)
        bias = torch.empty(num_experts) if variant.slots else None
        indices, weights = topk.moe_topk(logits, k, bias, **options)
        score = str(options.get("score", "softmax"))
        topk.moe_topk_backward(weights, logits, indices, score=score)


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


def _problems(report: KernelReport) -> list[str]:
    matrix = report.kernel in MATRIX_KERNEL_NAMES
    return report.problems(matrix=matrix, tma=bool(report.constants.get("USE_TMA")))


def _sources(kernels: Iterable[Any]) -> Iterator[ast.AST]:
    """Sources of the kernels, of the functions that they call in any file, and of constants.

    Not those of Triton itself, whose version a record has beside the hash.
    """
    seen: dict[str, ast.AST] = {}
    todo = list(kernels)
    while todo:
        function = todo.pop().fn
        if function.__module__.startswith("triton."):
            continue
        key = f"{function.__module__}.{function.__name__}"
        if key in seen:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        seen[key] = tree
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                used = function.__globals__.get(node.id)
                if isinstance(used, triton.runtime.jit.JITFunction):
                    todo.append(used)
                elif isinstance(used, triton.language.constexpr):
                    text = f"{node.id} = {used.value!r}"
                    seen[f"{function.__module__}.{node.id}"] = ast.parse(text)
    yield from (seen[key] for key in sorted(seen))


@dataclasses.dataclass(frozen=True)
class Family:
    """Kernels that are swept and recorded together.

    Attributes:
        script: of its own.
        architectures: entries of ARCHITECTURES or BORROWED.
        variants: as :func:`variants`.
        tables: tables of one configuration per kernel, of an architecture and a variant.
        launch: calls the ops of a variant with such a table.
        problems: what is wrong with a compiled kernel.
        kernels: all of its kernels.
    """

    script: str
    architectures: tuple[str, ...]
    variants: Callable[[], tuple]
    tables: Callable[[str, Any], list[dict[str, tuple[TileConfig, ...]]]]
    launch: Callable[[Any, Any], None]
    problems: Callable[[KernelReport], list[str]]
    kernels: tuple


def _shipped(arch: str, variant: Variant) -> list[dict[str, tuple[TileConfig, ...]]]:
    return _tables(TABLES[BORROWED.get(arch, arch)], variant)


FAMILY = Family(
    "moe_triton_sweep",
    (*ARCHITECTURES, *BORROWED),
    variants,
    _shipped,
    _launch,
    _problems,
    KERNEL_FUNCTIONS,
)


def sweep(
    arch: str,
    table: KernelTable | None = None,
    chosen: tuple | None = None,
    seen: str | None = None,
    family: Family = FAMILY,
) -> Iterator[Row]:
    """Compiles for ``arch`` and judges.

    Args:
        arch: one of the family's.
        table: tile configurations; default: the ones that ship.
        chosen: default: all variants.
        seen: as in :func:`compile_only`.
        family: what is compiled.
    """
    for variant in family.variants() if chosen is None else chosen:
        if arch not in variant.architectures:
            continue
        tables = (
            family.tables(arch, variant) if table is None else _tables(table, variant)
        )
        with compile_only(arch, variant.kernels, seen) as reports:
            for one_each in tables:
                family.launch(variant, one_each)
        for report in reports:
            yield Row(variant.name, report, family.problems(report))


# The compilers are in the worker and in the assembler that it starts: large heaps of
# small objects, which huge pages make a sixth faster.
_COMPILER_HEAP = (
    "glibc.malloc.hugetlb=1:glibc.malloc.top_pad=67108864:"
    "glibc.malloc.trim_threshold=1073741824"
)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """For the processes that start inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _prepare_worker() -> None:
    torch.set_num_threads(1)
    # What is imported stays; every collection would walk it. Triton's bindings count
    # at exit what was not collected.
    gc.freeze()
    atexit.register(gc.unfreeze)


def _sweep_variant(family: Family, arch: str, index: int, seen: str) -> list[Row]:
    chosen = family.variants()[index : index + 1]
    return list(sweep(arch, chosen=chosen, seen=seen, family=family))


def parallel_sweep(
    family: Family = FAMILY, workers: int | None = None
) -> dict[str, list[Row]]:
    """:func:`sweep` of what ships, each kernel once, on several processes.

    Args:
        family: what is compiled.
        workers: default: one per CPU that this process may use.

    Returns:
        By architecture, in the order of :func:`variants`. A kernel that two variants
        launch alike is a row of one of them.
    """
    workers = workers or len(os.sched_getaffinity(0))
    # Kernels do not pickle, and only the hash of the sources asks for them.
    family = dataclasses.replace(family, kernels=())
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="moe_static_gate_") as folder,
        _environment("GLIBC_TUNABLES", _COMPILER_HEAP),
        concurrent.futures.ProcessPoolExecutor(
            workers, context, initializer=_prepare_worker
        ) as pool,
    ):
        # The variants with every configuration are first and take longest.
        jobs = [
            (
                arch,
                pool.submit(
                    _sweep_variant, family, arch, index, os.path.join(folder, arch)
                ),
            )
            for index in range(len(family.variants()))
            for arch in family.architectures
        ]
        rows: dict[str, list[Row]] = {arch: [] for arch in family.architectures}
        for arch, job in jobs:
            rows[arch] += job.result()
    return rows


def _without_docstrings(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            if isinstance(body[0].value, ast.Constant):
                body[0].value.value = ""
    return ast.dump(tree)


def _launch_text(value: object) -> str:
    """What of an argument of a launch decides about the code that is compiled for it."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.data_ptr() % 16 == 0}"
    if hasattr(value, "block_shape"):  # a TMA descriptor
        return f"{value.base.dtype} {value.block_shape}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"int {value == 1} {value % 16 == 0} {value > 2**31 - 1}"
    return f"{type(value).__name__}"


def launches(family: Family = FAMILY) -> Iterator[str]:
    """Every launch that is compiled, as text; nothing is compiled."""
    jit, seen = triton.runtime.jit, []

    def run(self, *args, grid, warmup, **kwargs):
        names = {p.name for p in self.params if p.is_constexpr}
        fixed = {
            n: v for n, v in kwargs.items() if n in names or n not in self.arg_names
        }
        given = [_launch_text(v) for v in args]
        given += [_launch_text(v) for n, v in kwargs.items() if n not in fixed]
        seen.append(f"{self.__name__} {sorted(fixed.items())} {given}")

    original = jit.JITFunction.run
    jit.JITFunction.run = run
    try:
        for arch in family.architectures:
            for variant in family.variants():
                if arch in variant.architectures:
                    for table in family.tables(arch, variant):
                        seen.clear()
                        family.launch(variant, table)
                        # In which order is of no account.
                        yield f"{arch} {variant.name}"
                        yield from sorted(seen)
    finally:
        jit.JITFunction.run = original


def source_hash(family: Family = FAMILY) -> str:
    """The hash of the kernels, without comments, and of all launches that are compiled.

    It leaves out the code around the launches and what chooses among them.
    """
    digest = hashlib.sha256()
    for node in _sources(family.kernels):
        digest.update(_without_docstrings(ast.unparse(node)).encode())
    for text in launches(family):
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def _json_row(row: Row) -> dict[str, object]:
    fields = {"triton": triton.__version__, "variant": row.variant}
    fields.update(dataclasses.asdict(row.report))
    fields["constants"] = {
        name: value
        for name, value in row.report.constants.items()
        if name.startswith(("BLOCK", "USE_TMA", "GATHER", "EPILOGUE"))
    }
    fields["problems"] = row.problems
    return fields


def record(path: pathlib.Path, family: Family = FAMILY) -> int:
    """Writes the rows of this Triton version to ``path``; returns how many are bad."""
    table = json.loads(path.read_text()) if path.exists() else {"rows": []}
    kept = [row for row in table["rows"] if row["triton"] != triton.__version__]
    fresh = []
    for arch, rows in parallel_sweep(family).items():
        fresh += [_json_row(row) for row in rows]
        print(arch, len(rows), "kernels", flush=True)
    sources = {**table.get("sources", {}), triton.__version__: source_hash(family)}
    command = f"python test/python_native/{family.script}.py --output FILE"
    ordered = sorted(
        kept + fresh, key=lambda row: (row["triton"], row["arch"], row["variant"])
    )
    rows = ",\n  ".join(json.dumps(row) for row in ordered)
    head = f'"command": "{command}",\n "sources": {json.dumps(sources, sort_keys=True)}'
    path.write_text(f'{{\n {head},\n "rows": [\n  {rows}\n ]\n}}\n')
    return sum(bool(row["problems"]) for row in fresh)


def main(family: Family) -> None:
    """The command line of a family's script."""
    parser = argparse.ArgumentParser(description="Records what the kernels compile to.")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    sys.exit(1 if record(parser.parse_args().output, family) else 0)


if __name__ == "__main__":
    main(FAMILY)
