"""Measures tile configurations and rewrites the tables of configs.py.

The candidates for a kernel are the committed table and a few neighbours. A
candidate that spills registers, needs too much shared memory, or fails is
refused. A table keeps at most MAX_CONFIGS per kernel and architecture:

    forward kernels first    the fastest on the decode shapes, for few rows per expert
    then, by columns         the fastest on the shapes of each width, narrow ones first
    last                     the narrowest tile, for problems that no other fits
"""

import collections
import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable

from shapes import Shape

import torch

from . import loading
from .checks import ACT, GRADIENTS
from .kernels import layer_operands
from .loading import configs, Launch, launch
from measure import interleaved_seconds, replace_text


TileConfig = configs.TileConfig
Call = Callable[[launch.LaunchPlan], list[Launch]]


@dataclasses.dataclass(frozen=True)
class Effort:
    """The device's limits, and how much is measured."""

    device: torch.device
    shared_limit: int  # bytes of shared memory of a program
    rounds: int
    decode_rows: int = 64  # at most so many rows per expert count as decoding
    # Per kernel; compiling one takes a second or two, and a lease is minutes.
    max_candidates: int = 14


@dataclasses.dataclass(frozen=True)
class Result:
    """One candidate on one shape."""

    kernel: str  # an entry of configs.KERNELS
    shape: str  # its name
    columns: int  # of the kernel's output
    rows_per_expert: float
    config: TileConfig  # without max_rows, max_columns and max_inner
    ms: float | None  # median; None if it was refused
    refused: str = ""  # why


def _plain(config: TileConfig) -> TileConfig:
    return dataclasses.replace(config, max_rows=0, max_columns=0, max_inner=0)


def candidates(table, kernel: str, limit: int) -> tuple[TileConfig, ...]:
    """Committed configurations of a kernel and their neighbours, in a fixed order."""
    committed = [_plain(config) for config in table[kernel]]
    neighbours = [
        dataclasses.replace(config, **change)
        for config in committed
        for change in (
            {"num_stages": max(2, config.num_stages - 1)},
            {"num_stages": config.num_stages + 1},
            {"group_m": 16 if config.group_m == 8 else 8},
            {"programs_per_sm": 0 if config.programs_per_sm else 1},
            {"block_k": 128 if config.block_k == 64 else 64},
        )
    ]
    return tuple(dict.fromkeys(committed + neighbours))[:limit]


def kernel_calls(shape: Shape, operands) -> dict[str, tuple[int, Call]]:
    """Per kernel, the columns of its output and its launches in a pass of a layer with a plan."""
    gated, plain = ACT, launch.Activation("silu")
    halves = dataclasses.replace(operands, w_in=operands.w_in[:, : shape.F])

    def of(name: str, act: launch.Activation, backward: bool = False) -> Call:
        def call(plan: launch.LaunchPlan) -> list[Launch]:
            launches: list[Launch] = []
            recording = loading.recording(plan, launches)
            ops = operands if act.gated else halves
            experts = launch.Experts(*ops.args(), act=act)
            _, preact = launch.moe_mlp_forward(plan if backward else recording, experts)
            if backward:
                args = (experts, ops.grad_out, preact, GRADIENTS)
                launch.moe_mlp_backward(recording, *args)
            return [one for one in launches if one.name == name]

        return call

    return {
        "up_gated": (shape.F, of("up_kernel", gated)),
        "up_plain": (shape.F, of("up_kernel", plain)),
        "down": (shape.D, of("grouped_mm_kernel", gated)),
        "act_backward": (shape.F, of("act_backward_kernel", gated, backward=True)),
        "input_grad": (shape.D, of("grouped_mm_kernel", gated, backward=True)),
        "weight_grad": (shape.D, of("weight_grad_kernel", gated, backward=True)),
    }


def problem(launched: Iterable, shared_limit: int) -> str:
    """Why the launches must not ship; empty if they may."""
    for kernel in launched:
        if spills := getattr(kernel, "n_spills", 0):
            return f"{spills} spilled registers"
        shared = getattr(getattr(kernel, "metadata", None), "shared", 0) or 0
        if shared > shared_limit:
            return f"{shared} bytes of shared memory, {shared_limit} allowed"
    return ""


def try_candidate(
    call: Call, plan: launch.LaunchPlan, shared_limit: int
) -> tuple[list[Launch], str]:
    """The launches of a candidate, and why it is refused, or an empty string."""
    try:
        launches = call(plan)
        compiled = [one() for one in launches]
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"[:200]
    return launches, problem(compiled, shared_limit)


def _all_of(launches: list[Launch]) -> None:
    for one in launches:
        one()


def measure_kernel(
    kernel: str,
    plan: launch.LaunchPlan,
    shape: Shape,
    columns: int,
    call: Call,
    effort: Effort,
) -> list[Result]:
    """All candidates of one kernel on one shape, interleaved."""
    results, functions = [], {}
    where = (kernel, shape.name, columns, shape.T * shape.K / shape.E)
    for config in candidates(plan.table, kernel, effort.max_candidates):
        candidate = launch.LaunchPlan({**plan.table, kernel: (config,)}, plan.num_sms)
        launches, refused = try_candidate(call, candidate, effort.shared_limit)
        if config.block_n >= 2 * columns and columns > 16:
            refused = refused or "wider than the problem"
        if refused:
            results.append(Result(*where, config, None, refused))
        else:
            functions[config] = functools.partial(_all_of, launches)
    if functions:
        options = {"rounds": effort.rounds, "device": effort.device}
        seconds = interleaved_seconds(functions, warmup=1, **options)
        for config, times in seconds.items():
            results.append(Result(*where, config, 1e3 * statistics.median(times)))
    return results


def _best(results: Iterable[Result]) -> TileConfig | None:
    """The configuration with the least geometric mean of time over that of the fastest.

    Only configurations that ran on every shape are compared.
    """
    by_shape = collections.defaultdict(dict)
    for result in results:
        times = by_shape[result.shape]
        if result.ms is not None:
            times[result.config] = result.ms
    everywhere = set.intersection(*map(set, by_shape.values())) if by_shape else set()

    def score(config: TileConfig) -> tuple[float, str]:
        slower = (times[config] / min(times.values()) for times in by_shape.values())
        # The text breaks ties, so that equal times give the same table.
        return sum(map(math.log, slower)), repr(config)

    return min(everywhere, key=score, default=None)


def choose(kernel: str, results: list[Result], committed, decode_rows: int) -> tuple:
    """The new table entry of a kernel; the committed one if nothing could be measured."""
    chosen: list[TileConfig] = []
    forward = kernel in configs.FORWARD_KERNELS
    few = [r for r in results if forward and r.rows_per_expert <= decode_rows]
    many = [r for r in results if r not in few] or results
    decode = _best(few)
    if decode is not None:
        chosen.append(dataclasses.replace(decode, max_rows=decode_rows))
    winners: list[tuple[int, TileConfig]] = []
    for width in sorted({r.columns for r in many}):
        best = _best(r for r in many if r.columns == width)
        if best is None:
            continue
        if winners and winners[-1][1] == best:
            winners.pop()  # neighbouring widths with the same winner are one entry
        winners.append((width, best))
    if not winners:
        return tuple(committed)
    # If there are too many, the widest ones are kept, and one that fits all problems.
    *narrower, (_, widest) = winners[len(chosen) + 1 - configs.MAX_CONFIGS :]
    chosen += [dataclasses.replace(best, max_columns=width) for width, best in narrower]
    chosen.append(widest)
    measured = {r.config for r in results if r.ms is not None}
    last = [_plain(c) for c in committed if _plain(c) in measured or not c.max_rows]
    narrow = min(last, key=lambda c: (c.block_n, c.block_m, repr(c)))
    if narrow not in chosen:
        chosen.append(narrow)
    return tuple(chosen)


def _source(config: TileConfig) -> str:
    """The five sizes, and by name what is not the default."""
    fields = dataclasses.fields(config)
    values = [(field, getattr(config, field.name)) for field in fields]
    arguments = [str(value) for _, value in values[:5]]
    arguments += [f"{f.name}={v}" for f, v in values[5:] if v != f.default]
    return f"TileConfig({', '.join(arguments)})"


def table_source(arch: str, table: configs.KernelTable) -> str:
    """One architecture's table; `stage.py lint -a` wraps its lines."""
    lines = [f"_{arch.upper()}: KernelTable = {{"]
    for kernel in configs.KERNELS:
        entries = ", ".join(map(_source, table[kernel]))
        lines.append(f'    "{kernel}": ({entries},),')
    return "\n".join([*lines, "}"])


def rewrite(path: pathlib.Path, arch: str, table, measured_on: str) -> None:
    """Replaces one architecture's table in configs.py, all at once or not at all.

    Raises:
        ValueError: the table breaks a rule of configs.py, or the file has no such table.
    """
    for kernel in configs.KERNELS:
        entry = table[kernel]
        if not 1 <= len(entry) <= configs.MAX_CONFIGS or len(set(entry)) != len(entry):
            allowed = f"allowed are 1 to {configs.MAX_CONFIGS} different ones"
            raise ValueError(f"{arch} {kernel}: {len(entry)} entries, {allowed}")
        if kernel not in configs.FORWARD_KERNELS and any(c.max_rows for c in entry):
            raise ValueError(f"{arch} {kernel}: max_rows is for forward kernels")
    start, end = f"# --- table {arch}\n", f"# --- end of table {arch}\n"
    before, found, rest = path.read_text().partition(start)
    old, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"{path.name} has no table {arch}")
    comments = [line for line in old.splitlines() if line.startswith("#")]
    notes = [line for line in comments if "measured on" not in line]
    notes.append(f"# Chosen by gpu_lab.py --tune; measured on {measured_on}.")
    lines = [*notes, table_source(arch, table), end]
    replace_text(path, before + start + "\n".join(lines) + after)


def tune(
    plan: launch.LaunchPlan,
    kernels: Iterable[str],
    shapes: Iterable[Shape],
    effort: Effort,
    is_late: Callable[[], bool],
) -> tuple[configs.KernelTable, list[Result]]:
    """Measures ``kernels`` on every shape; returns the new table and the measurements.

    Once ``is_late()`` it stops measuring and chooses from what was measured.
    """
    results: list[Result] = []
    for shape in shapes:
        if is_late():
            print(f"{shape.name}: not measured, out of time", flush=True)
            continue
        calls = kernel_calls(shape, layer_operands(shape, effort.device))
        for kernel in kernels:
            columns, call = calls[kernel]
            decode = shape.T * shape.K / shape.E <= effort.decode_rows
            if is_late() or (decode and kernel not in configs.FORWARD_KERNELS):
                continue
            fresh = measure_kernel(kernel, plan, shape, columns, call, effort)
            results += fresh
            ran = [r for r in fresh if r.ms is not None]
            best = min(ran, key=lambda r: r.ms) if ran else None
            seen = f"{len(ran)} ran, {len(fresh) - len(ran)} refused"
            best = best and best.config
            print(f"{shape.name:18s} {kernel:13s} {seen}, best {best}", flush=True)
    table = {}
    for kernel in configs.KERNELS:
        own = [r for r in results if r.kernel == kernel]
        table[kernel] = choose(kernel, own, plan.table[kernel], effort.decode_rows)
    return table, results
