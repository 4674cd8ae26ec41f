"""Measures tile configurations and rewrites the tables of configs.py.

For every kernel the candidates are the committed table and a few neighbours of it. A
candidate that spills registers, needs more shared memory than there is, or fails is
refused. What is kept, at most MAX_CONFIGS per kernel and architecture:

    forward kernels first    the fastest on the decode shapes, for few rows per expert
    then, by columns         the fastest on the shapes of each width, narrow ones first
    last                     the narrowest tile, for problems that no other fits
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

from shapes import make_operands, Shape

import torch

from .loading import configs, launch, matmuls, Rows
from measure import interleaved_seconds, replace_text


TileConfig = configs.TileConfig
Call = Callable[[launch.LaunchPlan], object]


@dataclasses.dataclass(frozen=True)
class Effort:
    """Where and how much is measured."""

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
    """The committed configurations of a kernel and their neighbours, in a fixed order."""
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


def kernel_calls(plan, shape: Shape, operands) -> dict[str, tuple[int, Call]]:
    """Per kernel: columns of its output, and a call that launches it with a plan.

    All calls share buffers, which every kernel overwrites: trying a configuration takes
    no memory but its tile list and dS partials.
    """
    x, ids, weights, w_in, w_out = (t.detach() for t in operands.layer_args())
    row_slots, slot_rows, offs, _ = launch.moe_permutation(ids, shape.E)
    experts = launch.Experts(x, w_in, w_out, offs, weights, row_slots, slot_rows)
    plain = dataclasses.replace(
        experts, w_in=w_in[:, : shape.F], act=launch.Activation("silu")
    )
    rows = Rows.of(plan, experts)
    preact = x.new_empty(rows.num_rows, experts.width)
    hidden = x.new_empty(rows.num_rows, shape.F)
    routed = x.new_empty(rows.num_rows, shape.D)
    matmuls.up(rows, experts, preact, hidden, True)

    def on(p):
        """The rows for another plan, with their tile lists."""
        other = copy.copy(rows)
        other.plan = p
        return other

    def act_backward(p):
        needs = {"need_hidden": True, "need_scale": True}
        return matmuls.act_backward(on(p), experts, operands.grad, preact, **needs)

    dh, a_scaled, _ = act_backward(plan)

    def weight_grads(p):
        matmuls.weight_grad(on(p), dh, x, w_in, gather_q=True)
        matmuls.weight_grad(on(p), operands.grad, a_scaled, w_out, gather_p=True)

    def mm(kernel, *args, **options):
        return lambda p: matmuls.grouped_mm(on(p), kernel, *args, routed, **options)

    def up(experts, stores):
        return lambda p: matmuls.up(on(p), experts, preact, hidden, stores)

    return {
        "up_gated": (shape.F, up(experts, True)),
        "up_plain": (shape.F, up(plain, False)),
        "down": (shape.D, mm("down", hidden, w_out, scale=rows.scale)),
        "act_backward": (shape.F, act_backward),
        "input_grad": (shape.D, mm("input_grad", dh, w_in.mT)),
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
        if spills := getattr(kernel, "n_spills", 0):
            return f"{spills} spilled registers"
        shared = getattr(getattr(kernel, "metadata", None), "shared", 0) or 0
        if shared > shared_limit:
            return f"{shared} bytes of shared memory, {shared_limit} allowed"
    return ""


def try_candidate(call: Call, plan: launch.LaunchPlan, shared_limit: int) -> str:
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
    call: Call,
    effort: Effort,
) -> list[Result]:
    """All candidates of one kernel on one shape, interleaved."""
    results, functions = [], {}
    where = (kernel, shape.name, columns, shape.T * shape.K / shape.E)
    for config in candidates(plan.table, kernel, effort.max_candidates):
        candidate = launch.LaunchPlan({**plan.table, kernel: (config,)}, plan.num_sms)
        refused = try_candidate(call, candidate, effort.shared_limit)
        if config.block_n >= 2 * columns and columns > 16:
            refused = refused or "wider than the problem"
        if refused:
            results.append(Result(*where, config, None, refused))
        else:
            functions[config] = functools.partial(call, candidate)
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
        # The text breaks ties, so that equal times give one table.
        return sum(map(math.log, slower)), repr(config)

    return min(everywhere, key=score, default=None)


def choose(kernel: str, results: list[Result], committed, decode_rows: int) -> tuple:
    """The new table entry of a kernel; the committed one where nothing could be measured."""
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
    # Too many: the widest ones, and one more for the last resort.
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
    shapes: Iterable[Shape],
    effort: Effort,
    is_late: Callable[[], bool],
) -> tuple[configs.KernelTable, list[Result]]:
    """Measures every kernel on every shape; returns the new table and the measurements.

    When ``is_late`` it stops measuring, and chooses from what there is.
    """
    results: list[Result] = []
    for shape in shapes:
        if is_late():
            print(f"{shape.name}: not measured, out of time", flush=True)
            continue
        calls = kernel_calls(plan, shape, make_operands(shape, effort.device))
        for kernel, (columns, call) in calls.items():
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
