"""Measures tile configurations and rewrites the tables of configs.py.

For every kernel the candidates are the committed table and a few neighbours of it. A
candidate that spills registers, needs more shared memory than there is, or fails is
refused. What is kept, at most MAX_CONFIGS per kernel and architecture:

    forward kernels first    the fastest on the decode shapes, for few rows per expert
    then, by columns         the fastest on the shapes of each width, narrow ones first
    last                     the narrowest tile, for problems that no other fits
"""

import contextlib
import dataclasses
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

from shapes import Operands, Shape

import torch

from .loading import configs, launch
from measure import interleaved_seconds, replace_text


TileConfig = configs.TileConfig
ACT = launch.Activation()


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        decode_rows: at most so many rows per expert count as decoding.
        max_candidates: per kernel; compiling one takes a second or two, and a lease
            is minutes.
        rounds: repetitions.
    """

    decode_rows: int = 64
    max_candidates: int = 14
    rounds: int = 20


@dataclasses.dataclass(frozen=True)
class Result:
    """One candidate on one shape.

    Attributes:
        kernel: an entry of configs.KERNELS.
        shape: name of the shape.
        columns: of the kernel's output there.
        rows_per_expert: there.
        config: the candidate, without max_rows, max_columns and max_inner.
        ms: median; None if it was refused.
        refused: why.
    """

    kernel: str
    shape: str
    columns: int
    rows_per_expert: float
    config: TileConfig
    ms: float | None
    refused: str = ""


def _plain(config: TileConfig) -> TileConfig:
    return dataclasses.replace(config, max_rows=0, max_columns=0, max_inner=0)


def candidates(
    table: configs.KernelTable, kernel: str, limit: int
) -> tuple[TileConfig, ...]:
    """The committed configurations of a kernel and their neighbours, in a fixed order."""
    found: dict[TileConfig, None] = {}
    committed = [_plain(config) for config in table[kernel]]
    for config in committed:
        found.setdefault(config)
    for config in committed:
        for change in (
            {"num_stages": config.num_stages - 1},
            {"num_stages": config.num_stages + 1},
            {"group_m": 16 if config.group_m == 8 else 8},
            {"programs_per_sm": 0 if config.programs_per_sm else 1},
            {"block_k": 128 if config.block_k == 64 else 64},
        ):
            neighbour = dataclasses.replace(config, **change)
            if neighbour.num_stages >= 2:
                found.setdefault(neighbour)
    return tuple(found)[:limit]


def kernel_calls(
    plan: launch.LaunchPlan, shape: Shape, operands: Operands
) -> dict[str, tuple[int, Callable[[launch.LaunchPlan], object]]]:
    """Per kernel: columns of its output, and a call that launches it with a plan.

    All calls share buffers, which every kernel overwrites: trying a configuration takes
    no memory but its tile list and dS partials.
    """
    x, ids, weights, w_in, w_out = (t.detach() for t in operands.layer_args())
    row_slots, slot_rows, offs, _ = launch.moe_permutation(ids, shape.E)
    rows = launch._Rows(plan, offs, row_slots, slot_rows, shape.T)
    scale = weights.reshape(-1)
    preact = x.new_empty(rows.num_rows, w_in.shape[1])
    hidden = x.new_empty(rows.num_rows, shape.F)
    routed = x.new_empty(rows.num_rows, shape.D)
    plain = launch.Activation("silu")
    launch._up(plan, rows, x, w_in, None, None, ACT, preact, hidden, True)
    gated = (None, None, ACT, preact, hidden, True)
    ungated = (None, None, plain, preact[:0], hidden, False)

    def act_backward(p):
        return launch._act_backward(
            p, rows, operands.grad, w_out, None, preact, scale, ACT,
            need_hidden=True, need_scale=True,
        )  # fmt: skip

    dh, a_scaled, _ = act_backward(plan)

    def weight_grads(p):
        launch._weight_grad(p, rows, dh, x, w_in, gather_q=True)
        launch._weight_grad(p, rows, operands.grad, a_scaled, w_out, gather_p=True)

    def mm(kernel, *args):
        return lambda p: launch._grouped_mm(p, kernel, rows, *args, routed)

    return {
        "up_gated": (shape.F, lambda p: launch._up(p, rows, x, w_in, *gated)),
        "up_plain": (
            shape.F,
            lambda p: launch._up(p, rows, x, w_in[:, : shape.F], *ungated),
        ),
        "down": (shape.D, mm("down", hidden, w_out, None, scale)),
        "act_backward": (shape.F, act_backward),
        "input_grad": (shape.D, mm("input_grad", dh, w_in.mT, None, None)),
        "weight_grad": (shape.D, weight_grads),
    }


@contextlib.contextmanager
def launched_kernels() -> Iterator[list]:
    """The compiled kernels that Triton runs meanwhile, in order."""
    from triton.runtime import jit

    original, launched = jit.JITFunction.run, []

    def run(function, *args, **kwargs):
        launched.append(original(function, *args, **kwargs))
        return launched[-1]

    with mock.patch.object(jit.JITFunction, "run", run):
        yield launched


def problem(launched: Iterable, shared_limit: int) -> str:
    """Why what ran must not ship; empty if it may."""
    for kernel in launched:
        spills = getattr(kernel, "n_spills", 0) or 0
        if spills:
            return f"{spills} spilled registers"
        shared = getattr(getattr(kernel, "metadata", None), "shared", 0) or 0
        if shared > shared_limit:
            return f"{shared} bytes of shared memory, {shared_limit} allowed"
    return ""


def try_candidate(
    call: Callable[[launch.LaunchPlan], object],
    plan: launch.LaunchPlan,
    shared_limit: int,
) -> str:
    """Runs a candidate once; returns why it is refused, or an empty string."""
    with launched_kernels() as launched:
        try:
            call(plan)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
    return problem(launched, shared_limit)


def measure_kernel(
    kernel: str,
    plan: launch.LaunchPlan,
    shape: Shape,
    columns: int,
    call: Callable[[launch.LaunchPlan], object],
    device: torch.device,
    shared_limit: int,
    effort: Effort,
) -> list[Result]:
    """All candidates of one kernel on one shape, interleaved."""
    results, functions = [], {}
    density = shape.T * shape.K / shape.E
    for config in candidates(plan.table, kernel, effort.max_candidates):
        candidate = launch.LaunchPlan({**plan.table, kernel: (config,)}, plan.num_sms)
        refused = try_candidate(call, candidate, shared_limit)
        if config.block_n >= 2 * columns and columns > 16:
            refused = refused or "wider than the problem"
        if refused:
            results.append(
                Result(kernel, shape.name, columns, density, config, None, refused)
            )
        else:
            functions[config] = lambda candidate=candidate: call(candidate)
    if functions:
        seconds = interleaved_seconds(
            functions, rounds=effort.rounds, warmup=1, device=device
        )
        for config, times in seconds.items():
            ms = 1e3 * statistics.median(times)
            results.append(Result(kernel, shape.name, columns, density, config, ms))
    return results


def _best(results: Iterable[Result]) -> TileConfig | None:
    """The configuration with the least geometric mean of time over that of the fastest.

    Only configurations that ran on every shape are compared.
    """
    by_shape: dict[str, dict[TileConfig, float]] = {}
    for result in results:
        times = by_shape.setdefault(result.shape, {})
        if result.ms is not None:
            times[result.config] = result.ms
    if not by_shape:
        return None
    everywhere = set.intersection(*(set(times) for times in by_shape.values()))
    if not everywhere:
        return None

    def score(config: TileConfig) -> float:
        return sum(
            math.log(times[config] / min(times.values())) for times in by_shape.values()
        )

    # The text breaks ties, so that equal times give one table.
    return min(everywhere, key=lambda config: (score(config), repr(config)))


def choose(
    kernel: str, results: list[Result], committed, decode_rows: int
) -> tuple[TileConfig, ...]:
    """The new table entry of a kernel; the committed one where nothing could be measured.

    Args:
        kernel: an entry of configs.KERNELS.
        results: its measurements.
        committed: the entry so far.
        decode_rows: as in Effort.
    """
    chosen: list[TileConfig] = []
    forward = kernel in configs.FORWARD_KERNELS
    few = [r for r in results if forward and r.rows_per_expert <= decode_rows]
    many = [r for r in results if r not in few] or results
    decode = _best(few)
    if decode is not None:
        chosen.append(dataclasses.replace(decode, max_rows=decode_rows))
    # One more for the last resort.
    room = configs.MAX_CONFIGS - len(chosen) - 1
    widths = sorted({r.columns for r in many})
    winners: list[tuple[int, TileConfig]] = []
    for width in widths:
        best = _best(r for r in many if r.columns == width)
        if best is not None:
            winners.append((width, best))
    if not winners:
        return tuple(committed)
    # Neighbouring widths with the same winner are one entry; too many: widest ones.
    merged: list[tuple[int, TileConfig]] = []
    for width, best in winners:
        if merged and merged[-1][1] == best:
            merged[-1] = (width, best)
        else:
            merged.append((width, best))
    merged = merged[-room:]
    for width, best in merged[:-1]:
        chosen.append(dataclasses.replace(best, max_columns=width))
    chosen.append(merged[-1][1])
    measured = {r.config for r in results if r.ms is not None}
    narrow = min(
        (_plain(c) for c in committed if _plain(c) in measured or not c.max_rows),
        key=lambda c: (c.block_n, c.block_m, repr(c)),
    )
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


def rewrite(
    path: pathlib.Path, arch: str, table: configs.KernelTable, measured_on: str
) -> None:
    """Replaces one architecture's table in configs.py, all at once or not at all.

    Args:
        path: configs.py.
        arch: a key of TABLES.
        table: the new entries.
        measured_on: for the comment above them.

    Raises:
        ValueError: the table breaks a rule of configs.py, or the file has no such table.
    """
    for kernel in configs.KERNELS:
        entry = table[kernel]
        if not 1 <= len(entry) <= configs.MAX_CONFIGS or len(set(entry)) != len(entry):
            raise ValueError(
                f"{arch} {kernel}: {len(entry)} configurations, allowed are 1 to "
                f"{configs.MAX_CONFIGS} different ones"
            )
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
    shapes: tuple[Shape, ...],
    make_operands: Callable[[Shape, torch.device], Operands],
    device: torch.device,
    shared_limit: int,
    effort: Effort,
    is_late: Callable[[], bool],
) -> tuple[configs.KernelTable, list[Result]]:
    """Measures every kernel on every shape; returns the new table and the measurements.

    Args:
        plan: the committed table.
        shapes: to measure.
        make_operands: as in shapes.py.
        device: where.
        shared_limit: bytes of shared memory of a program.
        effort: how much is measured.
        is_late: stop measuring, and choose from what there is.
    """
    results: list[Result] = []
    for shape in shapes:
        if is_late():
            print(f"{shape.name}: not measured, out of time", flush=True)
            continue
        operands = make_operands(shape, device)
        calls = kernel_calls(plan, shape, operands)
        for kernel, (columns, call) in calls.items():
            decode = shape.T * shape.K / shape.E <= effort.decode_rows
            if is_late() or (decode and kernel not in configs.FORWARD_KERNELS):
                continue
            fresh = measure_kernel(
                kernel, plan, shape, columns, call, device, shared_limit, effort
            )
            results += fresh
            ran = [r for r in fresh if r.ms is not None]
            best = min(ran, key=lambda r: r.ms) if ran else None
            print(
                f"{shape.name:18s} {kernel:13s} {len(ran)} ran, "
                f"{len(fresh) - len(ran)} refused, best {best and best.config}",
                flush=True,
            )
    table = {
        kernel: choose(
            kernel,
            [r for r in results if r.kernel == kernel],
            plan.table[kernel],
            effort.decode_rows,
        )
        for kernel in configs.KERNELS
    }
    return table, results
