"""What the assembler made of the MoE matmul kernels, and what that should cost on an H100.

Test-only, and no GPU: the shipped configurations are compiled by the real launchers
(``compile_only``), disassembled with the nvdisasm of Triton's wheel, and read.

:func:`figures` are facts: instructions of the loop per matrix instruction, registers,
and so on; the record of them is what a change is compared with (test_moe_records.py).
:func:`estimate` is a model of one kernel in cycles per tile:

    tile      = fill + steps * step + epilogue
    step      = max(tensor cores, shared memory, L2 port, issue slots, static stalls)
    kernel    = 4-norm of the time of the multiprocessors, of DRAM and of power

Nothing in it is fitted per kernel. Two constants are fitted, CLOCK and POWER_FLOPS, both
on the dense persistent matmul of tritonbench (8192^3: 674 TFLOP/s). CALIBRATION is what
it said about kernels that others measured and published; not modelled are bank conflicts,
the cost of cp.async beyond its instructions and bytes, and clocks that move. Those it is off
by more than a tenth on load by cp.async, or are a layer of such kernels. What is quoted is
corrected by the median of the ratios, and has their range.

    python test/python_native/moe_sass.py --output benchmarks/moe/results/triton_sass.json
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence

from moe_triton_sweep import MATRIX_KERNELS
from triton_static_gate import compile_only

import torch
from torch._native.ops.moe.triton_kernels import launch
from torch._native.ops.moe.triton_kernels.configs import TABLES


ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# Instructions of 16 bits, then of 8.
MATRIX_OPS = {
    "sm_80": ("HMMA",),
    "sm_90": ("HGMMA", "QGMMA"),
    "sm_100": ("UTCHMMA", "UTCQMMA"),
}
SHARED_PER_SM = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}

# H100 SXM.
SMS = 132
CLOCK = 1.70e9
POWER_FLOPS = 800e12
# For QGMMA: the fastest FP8 matmul on an H800 in DeepGEMM's README. Nothing was fitted on FP8.
POWER_FLOPS_FP8 = 1550e12
DRAM_BYTES = 3.35e12 * 0.90
L2_PORT = 44  # bytes per clock and multiprocessor, all of them together
L2_CAPACITY = 36 << 20  # of 50 MiB, what writes and duplicates leave
L2_LATENCY, DRAM_LATENCY = 300, 800
BARRIER = 25
RELAUNCH = 700  # cycles from a program's end to its successor's first instruction
LAUNCH_SECONDS = 4e-6
# Microseconds per call of a layer outside of its matmul kernels.
SMALL_FORWARD = {"permutation": 25, "zero_tail": 3}
SMALL_BACKWARD = {"scale_grad": 6}

# (kernel, predicted, published microseconds) of kernels on H100 that nothing was fitted
# on, with the model above and a replay of their tile order for DRAM. Sources: SGLang
# pull request 36543 (fused MoE, E 128, N 768, 5034 rows); ScatterMoE as measured in
# figure 6 of the SonicMoE paper (arXiv 2512.14080), the first one derived from FLOP/s.
CALIBRATION = (
    ("SGLang up, TMA", 515, 531),
    ("SGLang down, TMA", 294, 283),
    ("SGLang up, cp.async", 520, 626),
    ("SGLang down, cp.async", 307, 316),
    ("ScatterMoE up", 595, 603),
    ("ScatterMoE dA", 339, 430),
    ("ScatterMoE forward", 1756, 2255),
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer: tokens, model dim, expert hidden dim, experts, experts per token."""

    name: str
    T: int
    D: int
    F: int
    E: int
    K: int

    @property
    def rows(self) -> int:
        return self.T * self.K

    def row_tiles(self, block_m: int) -> int:
        """Row tiles of one drawn, uniform routing."""
        draw = random.Random(0)
        counts = [0] * self.E
        for expert in draw.choices(range(self.E), k=self.rows):
            counts[expert] += 1
        return sum(-(-count // block_m) for count in counts)


SHAPES = (
    Shape("SonicMoE 7B", 24576, 1536, 256, 128, 8),
    Shape("Qwen3-30B-A3B", 32768, 2048, 768, 128, 8),
    Shape("OLMoE-1B-7B", 32768, 2048, 1024, 64, 8),
    Shape("Qwen3-235B-A22B", 32768, 4096, 1536, 128, 8),
    Shape("DeepSeek-V3", 16384, 7168, 2048, 256, 8),
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of SASS.

    Attributes:
        op: opcode with its modifiers; "NOP" where the predicate is never true.
        text: the line without address and encoding.
        predicated: whether a predicate guards it.
        stall: cycles that the scheduler waits after it, from the encoding.
    """

    op: str
    text: str
    predicated: bool
    stall: int


_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);?\s*/\* 0x[0-9a-f]{16} \*/")
_SECOND_WORD = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"^(\.L_\w+):")


@dataclasses.dataclass(frozen=True)
class Listing:
    """Instructions of a kernel, and its labels as indices into them."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def loops(self) -> list[tuple[int, int]]:
        """(first, last) instruction of every backward branch's loop, short ones first."""
        found: dict[int, int] = {}
        for i, ins in enumerate(self.instructions):
            target = re.search(r"`\((\.L_\w+)\)", ins.text)
            if ins.op.startswith("BRA") and target and target[1] in self.labels:
                first = self.labels[target[1]]
                # A jump to itself ends the program's code.
                if first < i or (first == i and ins.predicated):
                    found[first] = max(i, found.get(first, 0))
        return sorted(found.items(), key=lambda span: span[1] - span[0])

    def matrix_op(self, arch: str) -> str:
        """The opcode of its matrix instructions."""
        return next(
            op
            for op in MATRIX_OPS[arch]
            if any(ins.op.startswith(op) for ins in self.instructions)
        )

    def split(self, matrix_op: str) -> tuple[list[Instruction], list[Instruction]]:
        """The innermost loop with matrix instructions, and the rest of its outer loop."""
        code = self.instructions
        loops = self.loops()
        first, last = next(
            (a, b)
            for a, b in loops
            if any(ins.op.startswith(matrix_op) for ins in code[a : b + 1])
        )
        around = [
            (a, b)
            for a, b in loops
            if a <= first and last <= b and (a, b) != (first, last)
        ]
        begin, end = around[-1] if around else (0, len(code) - 1)
        outside = [*code[begin:first], *code[last + 1 : end + 1]]
        return list(code[first : last + 1]), outside


def nvdisasm() -> pathlib.Path:
    """The disassembler in Triton's wheel."""
    import triton

    return pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


def disassemble(cubin: bytes) -> Listing:
    """The listing of a cubin with one kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [nvdisasm(), "-c", "-hex", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label, code = _LABEL.match(line.strip()), _LINE.match(line)
        if label:
            labels[label[1]] = len(instructions)
        elif code:
            body, predicate = code[1].strip().rstrip(";").strip(), ""
            if body.startswith("@"):
                predicate, body = body.split(None, 1)
            op = "NOP" if predicate == "@!PT" else body.split()[0]
            instructions.append(Instruction(op, body, bool(predicate), 0))
        elif instructions and (word := _SECOND_WORD.match(line)):
            stall = (int(word[1], 16) >> 41) & 15
            instructions[-1] = dataclasses.replace(instructions[-1], stall=stall)
    return Listing(tuple(instructions), labels)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compiled configuration.

    Attributes:
        name: what it does in a layer.
        arch: an entry of ARCHITECTURES.
        constants: its compile-time arguments.
        num_warps, registers, spill_bytes, shared_bytes: from the compiler.
        listing: its code.
    """

    name: str
    arch: str
    constants: dict[str, object]
    num_warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    listing: Listing

    @property
    def block(self) -> tuple[int, int, int]:
        m, n, k = (self.constants[f"BLOCK_{axis}"] for axis in "MNK")
        return m, n, k

    @property
    def label(self) -> str:
        m, n, k = self.block
        parts = self.constants.get("EPILOGUE_PARTS", 1)
        return f"{self.name} {m}x{n}x{k} warps {self.num_warps} parts {parts}"

    @property
    def occupancy(self) -> int:
        """Programs that fit on a multiprocessor."""
        threads = 32 * self.num_warps
        by_registers = 65536 // (math.ceil(self.registers / 8) * 8 * threads)
        by_shared = SHARED_PER_SM[self.arch] // (self.shared_bytes + 1024)
        return max(1, min(by_registers, by_shared, 2048 // threads))


def _count(instructions: Iterable[Instruction], prefix: str) -> int:
    return sum(ins.op.startswith(prefix) for ins in instructions)


def figures(kernel: Kernel) -> dict[str, object]:
    """The facts of a kernel that its speed hangs on; lower is better, but for occupancy."""
    matrix_op = kernel.listing.matrix_op(kernel.arch)
    loop, outside = kernel.listing.split(matrix_op)
    matrix = [ins for ins in loop if ins.op.startswith(matrix_op)]
    m, n, _ = kernel.block
    outputs = m * n / (32 * kernel.num_warps)  # per thread
    waits = [ins.text for ins in loop if ins.op.startswith("WARPGROUP.DEPBAR")]
    depth = re.search(r"0x([0-9a-f]+)", waits[-1]) if waits else None
    shape = re.search(r"\d+x\d+x\d+|\.\d{4,5}\b", matrix[0].op)
    return {
        "mma": matrix_op + ("" if shape is None else " " + shape[0].strip(".")),
        "loop_instructions_per_mma": round(len(loop) / len(matrix), 2),
        "matmuls_in_flight": None if depth is None else int(depth[1], 16),
        "epilogue_mufu_per_output": round(_count(outside, "MUFU") / outputs, 2),
        "epilogue_instructions_per_output": round(len(outside) / outputs, 2),
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "shared_bytes": kernel.shared_bytes,
        "occupancy": kernel.occupancy,
    }


# ---- the model


@dataclasses.dataclass(frozen=True)
class Work:
    """What a kernel has to do for a shape.

    Attributes:
        tiles: output tiles, padding included.
        steps: of the contraction, on average.
        step_bytes: brought into shared memory per step.
        flops: useful ones.
        dram_bytes: read and written.
        fill_loads: loads in a row before the first operand can be loaded.
        ahead: of them, those that a program with another tile makes during that one.
        epilogue_loads: loads in a row in the epilogue; no part's goes before the stores of
            the last one, which the compiler cannot tell from it.
    """

    tiles: float
    steps: float
    step_bytes: int
    flops: float
    dram_bytes: float
    fill_loads: float
    ahead: float
    epilogue_loads: float


def gathered_bytes(shape: Shape, row_bytes: float, other_bytes: float) -> float:
    """DRAM bytes of the rows of all slots, of ``row_bytes`` each, from T tokens.

    A token's row is read again by its next expert; that hits if less than the L2's
    capacity went by, where its K uses lie anywhere in the kernel's traffic.
    """
    total = shape.rows * row_bytes
    share = min(1.0, L2_CAPACITY / (total + other_bytes))
    hits = (shape.K - 1) / shape.K * (1 - (1 - share) ** shape.K)
    return total * (1 - hits)


def weight_bytes(shape: Shape, bm: int, n: int, k: int, size: float = 2.0) -> float:
    """DRAM bytes of weights (E, n, k), whose elements have ``size``."""
    # Row groups of an expert share its weights if they fit beside the rows.
    rows = shape.rows / shape.E
    fits = size * (n * k + min(8 * bm, rows) * k) <= L2_CAPACITY
    reads = 1 if fits else max(1.0, rows / (8 * bm))
    return size * shape.E * n * k * reads


def work_of(kernel: Kernel, shape: Shape) -> Work:
    """The :class:`Work` of a kernel of :func:`kernels_of` for ``shape``."""
    D, F, E, R = shape.D, shape.F, shape.E, shape.rows
    bm, bn, bk = kernel.block
    constants = kernel.constants

    weights = functools.partial(weight_bytes, shape, bm)
    if kernel.name.startswith("up"):
        tiles = shape.row_tiles(bm) * -(-F // bn)
        rest = weights(2 * F, D) + 2 * R * F * (3 if constants["STORE_PREACT"] else 1)
        dram = gathered_bytes(shape, 2 * D, rest) + rest
        step = (bm + 2 * bn) * bk * 2
        return Work(tiles, D / bk, step, 4.0 * R * D * F, dram, 3, 3, 0)
    if kernel.name.startswith("act_backward"):
        tiles = shape.row_tiles(bm) * -(-F // bn)
        rest = weights(F, D) + 2 * R * F * 5
        dram = gathered_bytes(shape, 2 * D, rest) + rest
        loads = constants["EPILOGUE_PARTS"]
        step = (bm + bn) * bk * 2
        return Work(tiles, D / bk, step, 2.0 * R * D * F, dram, 3, 0, loads)
    if kernel.name.startswith(("down", "input_grad")):
        inner = F if kernel.name.startswith("down") else 2 * F
        tiles = shape.row_tiles(bm) * -(-D // bn)
        dram = weights(D, inner) + 2 * R * inner + 2 * R * D
        chain = 3 if constants["HAS_SCALE"] else 2
        # Two weights are two loops alike, and the pipeline is filled twice.
        fills = chain + (DRAM_LATENCY / L2_LATENCY if constants["TWO_WEIGHTS"] else 0)
        flops = 2.0 * R * D * inner
        step = (bm + bn) * bk * 2
        return Work(tiles, inner / bk, step, flops, dram, fills, chain, 0)
    wide = 2 * F if kernel.name.startswith("dw_in") else F
    m, n = (wide, D) if constants["GATHER_Q"] else (D, wide)
    rest = 2.0 * R * wide + 2 * E * m * n
    dram = gathered_bytes(shape, 2 * D, rest) + rest
    tiles = E * -(-m // bm) * -(-n // bn)
    steps = R / E / bk + 0.5
    # The last block of rows that stands after the loop waits for its loads.
    ahead, waits = (1, 0) if constants.get("RAGGED") else (0, 0.4)
    step = (bm + bn) * bk * 2
    return Work(tiles, steps, step, 2.0 * R * m * n, dram, 3, ahead, waits)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Microseconds of a kernel, and where they go.

    Attributes:
        us: the estimate.
        of_dense: its useful FLOP/s over POWER_FLOPS.
        limiter: what takes longest.
        parts: microseconds of the multiprocessors and of DRAM, and the multiple of the
            useful FLOPs that padded tiles make of them.
        bound: microseconds if tiles followed one another without a gap, each epilogue
            beside the next tile's matmuls: no other schedule of these tiles is faster.
    """

    us: float
    of_dense: float
    limiter: str
    parts: dict[str, float]
    bound: float | None = None

    @property
    def explained(self) -> str | None:
        """Why the kernel is below 60 % of the dense rate; None if it is not."""
        if self.of_dense >= 0.6:
            return None
        padding = self.parts["padding"]
        times = (f"{k} {v:.0f} us" for k, v in self.parts.items() if k != "padding")
        return f"{', '.join(times)}; {padding:.2f} times the useful FLOPs"


def _matrix_cost(loop: list[Instruction]) -> tuple[int, int]:
    """FLOPs of the loop's wgmmas in one warpgroup, and the bytes they read."""
    flops = read = 0
    for ins in loop:
        if ins.op.startswith(MATRIX_OPS["sm_90"]):
            m, n, k = map(int, re.search(r"(\d+)x(\d+)x(\d+)", ins.op).groups())
            from_registers = re.search(r"GMMA\S+ R\d+, R\d+, gdesc", ins.text)
            size = 2 if ins.op.startswith("HGMMA") else 1
            flops += 2 * m * n * k
            read += ((0 if from_registers else m * k) + n * k) * size
    return flops, read


def _moved(kernel: Kernel, loop: list[Instruction]) -> int:
    """Bytes that a step moves between registers and shared memory, of operands it converts."""
    if not kernel.constants.get("WIDEN"):
        return 0
    moved = 0
    for ins in loop:
        if ins.op.startswith(("LDS", "STS", "LDSM", "STSM")):
            bits = re.search(r"\.(128|64|32|16|8)\b", ins.op)
            matrices = re.search(r"\.M\d+\.(\d)|\.(\d)$", ins.op)
            width = 4 if bits is None else int(bits[1]) // 8
            if ins.op.startswith(("LDSM", "STSM")):
                width = 4 * int((matrices[1] or matrices[2]) if matrices else 1)
            moved += 32 * kernel.num_warps * width
    return moved


def _waits_for_every_matmul(loop: list[Instruction]) -> bool:
    waits = [ins.text for ins in loop if ins.op.startswith("WARPGROUP.DEPBAR")]
    return bool(waits) and re.search(r"0x0\b", waits[-1]) is not None


def estimate(kernel: Kernel, work: Work) -> Estimate:
    """Time of ``kernel``, compiled for sm_90, on an H100."""
    matrix_op = kernel.listing.matrix_op("sm_90")
    loop, outside = kernel.listing.split(matrix_op)
    is_fp8 = matrix_op == "QGMMA"
    flops_per_clock = 8192 if is_fp8 else 4096
    power_flops = POWER_FLOPS_FP8 if is_fp8 else POWER_FLOPS
    warps = kernel.num_warps
    flops, operand_bytes = (warps // 4 * x for x in _matrix_cost(loop))
    costs = {
        "tensor cores": flops / flops_per_clock,
        "shared memory": (operand_bytes + work.step_bytes + _moved(kernel, loop)) / 128,
        "L2": work.step_bytes / L2_PORT,
        "issue": len(loop) * warps / 4,
    }
    shared_step = max(costs.values())
    costs["latency"] = sum(ins.stall for ins in loop) + BARRIER * _count(
        loop, "BAR.SYNC"
    )
    if _waits_for_every_matmul(loop):
        # What a warpgroup does with a product comes after it.
        costs["latency"] += _matrix_cost(loop)[0] / flops_per_clock
    step = max(costs.values())
    issue = (len(outside) + 3 * _count(outside, "MUFU")) * warps / 4
    stalls = sum(ins.stall for ins in outside) + BARRIER * _count(outside, "BAR.SYNC")
    epilogue = max(issue, stalls) + work.epilogue_loads * DRAM_LATENCY
    resident = kernel.occupancy
    # With no more programs than fit, a kernel loops over its tiles, or has no more of them.
    persistent = kernel.constants["GRID"] <= resident * SMS
    if persistent:
        resident = min(resident, math.ceil(kernel.constants["GRID"] / SMS))
    fill = work.fill_loads * L2_LATENCY + DRAM_LATENCY
    if persistent:
        fill -= work.ahead * L2_LATENCY
    else:
        fill += RELAUNCH
    tile = per_tile = fill + work.steps * step + epilogue
    if resident > 1:
        # Programs hide each other's gaps, but not what they share.
        busy = max(work.steps * shared_step, issue)
        per_tile = max(busy, tile / resident) + 0.1 * (tile - busy) / resident
    if persistent:
        cycles = math.ceil(work.tiles / (SMS * resident)) * resident * per_tile
    else:
        cycles = work.tiles / SMS * per_tile + 0.5 * tile
    times = {
        f"loop ({max(costs, key=costs.__getitem__)})"
        if work.steps * step > tile / 2
        else "epilogue and fill": cycles / CLOCK,
        "DRAM": work.dram_bytes / DRAM_BYTES,
        "power": work.tiles * work.steps * flops / power_flops,
    }
    seconds = sum(t**4 for t in times.values()) ** 0.25 + LAUNCH_SECONDS
    busy = work.tiles / SMS * max(work.steps * shared_step, issue) / CLOCK
    bound = (busy**4 + times["DRAM"] ** 4 + times["power"] ** 4) ** 0.25
    of_dense = work.flops / seconds / power_flops
    # Programs side by side share it.
    step = shared_step if resident > 1 else step
    matmuls = min(work.tiles / SMS * work.steps * step, cycles) / CLOCK
    parts = {
        "at the dense rate": 1e6 * work.flops / power_flops,
        "loop": 1e6 * matmuls,
        "epilogue and fill": 1e6 * (cycles / CLOCK - matmuls),
        "instructions of the epilogue": 1e6 * work.tiles / SMS * issue / CLOCK,
        "DRAM": 1e6 * times["DRAM"],
        "padding": work.tiles * work.steps * flops / work.flops,
    }
    limiter = max(times, key=times.__getitem__)
    bound_us = 1e6 * (bound + LAUNCH_SECONDS)
    return Estimate(1e6 * seconds, of_dense, limiter, parts, bound_us)


# ---- the kernels of a layer


def _launch_layer(table, shape: Shape, two_weights: bool) -> None:
    """Forward and backward of a training step, on operands that nothing touches."""
    D, F, E, R = shape.D, shape.F, shape.E, shape.rows
    plan = launch.LaunchPlan(table, SMS)

    def bf16(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16)

    def int32(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.int32)

    x = bf16(shape.T, D)
    args = (
        x,
        bf16(E, F if two_weights else 2 * F, D),
        bf16(E, D, F),
        int32(E),
        torch.empty(shape.T, shape.K),
        int32(R),
        int32(shape.T, shape.K),
        None,
        None,
        bf16(E, F, D) if two_weights else None,
    )
    mask = (True, True, True, True, False, False, two_weights)
    experts = launch.Experts(*args)
    _, preact = launch.moe_mlp_forward(plan, experts)
    launch.moe_mlp_backward(plan, experts, x, preact, mask)


def _name(report, two_weights: bool) -> str | None:
    """What a matmul kernel does in the layer; None for those of no interest here."""
    constants = report.constants
    if report.kernel == "up_kernel":
        return "up, two weights" if two_weights else "up"
    if report.kernel == "grouped_mm_kernel" and not constants["HAS_SCALE"]:
        return "input_grad, two weights" if two_weights else "input_grad"
    if two_weights:
        return None
    if report.kernel == "weight_grad_kernel":
        return "dw_in" if constants["GATHER_Q"] else "dw_out"
    return {"grouped_mm_kernel": "down"}.get(report.kernel, "act_backward")


def compiled(
    arch: str,
    functions: tuple,
    calls: Iterable[tuple[Shape, Callable[[], None], Callable[..., str | None]]],
) -> dict[Shape, list[Kernel]]:
    """The kernels of ``functions`` that calls launch, as compiled.

    Args:
        arch: an entry of ARCHITECTURES.
        functions: for ``compile_only``.
        calls: of a shape; what launches, and the name of a report, None for those of no
            interest.
    """
    reports: dict[int, tuple] = {}
    listings: dict[int, Listing] = {}
    found: dict[Shape, list[Kernel]] = {}

    def keep(report, binary, grid) -> None:
        # A later shape may launch what an earlier one had compiled.
        key = id(binary)
        report, binary = reports.setdefault(key, (report, binary))
        name = name_of(report)
        if name is None:
            return
        if key not in listings:
            listings[key] = disassemble(binary.asm["cubin"])
        kernel = Kernel(
            name,
            arch,
            {**report.constants, "GRID": grid[0]},
            report.num_warps,
            report.registers,
            report.spill_bytes,
            report.shared_bytes,
            listings[key],
        )
        found.setdefault(shape, []).append(kernel)

    with compile_only(arch, functions, on_launch=keep):
        for shape, call, name_of in calls:
            call()
    return found


def kernels_of(arch: str, shapes: Iterable[Shape]) -> dict[Shape, list[Kernel]]:
    """The matmul kernels that a training step of each shape launches, as compiled."""
    calls = []
    for shape in shapes:
        # Two weights are compiled alike for every shape.
        for two_weights in (False, True) if shape == SHAPES[0] else (False,):
            call = functools.partial(_launch_layer, TABLES[arch], shape, two_weights)
            name_of = functools.partial(_name, two_weights=two_weights)
            calls.append((shape, call, name_of))
    return compiled(arch, MATRIX_KERNELS, calls)


def layer_microseconds(shape: Shape, times: dict[str, float]) -> dict[str, float]:
    """Forward and backward of ``shape`` from its matmuls', with what is no matmul."""
    combine = 2 * shape.D * (shape.rows + shape.T) + 4 * shape.rows
    combine_us = 1e6 * (combine / DRAM_BYTES + LAUNCH_SECONDS)
    forward = times["up"] + times["down"] + combine_us + sum(SMALL_FORWARD.values())
    backward = combine_us + sum(SMALL_BACKWARD.values())
    for name in ("act_backward", "input_grad", "dw_in", "dw_out"):
        backward += times[name]
    return {"forward_us": forward, "backward_us": backward}


def bias() -> tuple[float, float, float]:
    """Published over predicted, of CALIBRATION: median, lowest, highest."""
    ratios = [published / predicted for _, predicted, published in CALIBRATION]
    return statistics.median(ratios), min(ratios), max(ratios)


def forecast(shape: Shape, times: dict[str, float]) -> dict[str, object]:
    """:func:`layer_microseconds`, and times the :func:`bias`."""
    row: dict[str, object] = {}
    middle, low, high = bias()
    for name, us in layer_microseconds(shape, times).items():
        us = round(us)
        row[name] = us
        row[f"{name}_corrected"] = round(us * middle)
        row[f"{name}_range"] = [round(us * low), round(us * high)]
    return row


def estimated(kernel: Kernel, shape: Shape, work: Work) -> dict[str, object]:
    """A row of the record's estimates."""
    cost = estimate(kernel, work)
    return {
        "shape": shape.name,
        "kernel": kernel.label,
        "us": round(cost.us, 1),
        "bound_us": round(cost.bound or cost.us, 1),
        "of_dense": round(cost.of_dense, 3),
        "limiter": cost.limiter,
        "explained": cost.explained,
    }


def measure(
    architectures: Sequence[str] = ARCHITECTURES, shapes: Sequence[Shape] = SHAPES
) -> dict[str, list[dict[str, object]]]:
    """The rows of the record, or some of them: ``shapes`` are those of sm_90."""
    kernels: dict[tuple[str, str], dict[str, object]] = {}
    estimates, layers = [], []
    for arch in architectures:
        # The narrowest and the widest take every configuration that a layer takes.
        extremes = SHAPES[0], SHAPES[-1]
        launched = kernels_of(arch, shapes if arch == "sm_90" else extremes)
        for shape, found in launched.items():
            for kernel in found:
                head = {"arch": arch, "kernel": kernel.label}
                kernels[arch, kernel.label] = {**head, **figures(kernel)}
            if arch != "sm_90":
                continue
            for kernel in found:
                estimates.append(estimated(kernel, shape, work_of(kernel, shape)))
            costs = {k.name: estimate(k, work_of(k, shape)) for k in found}
            times = {name: cost.us for name, cost in costs.items()}
            least = {name: cost.bound or cost.us for name, cost in costs.items()}
            row = dataclasses.asdict(shape) | forecast(shape, times)
            for name, us in layer_microseconds(shape, least).items():
                row[f"{name}_bound"] = round(us)
            layers.append(row)
    return {"kernels": list(kernels.values()), "estimates": estimates, "layers": layers}


# ---- the record

TOLERANCE = 0.03


def regressions(before: dict, after: dict) -> list[str]:
    """What in ``after`` is worse than in ``before`` by more than TOLERANCE, as text."""
    found = []
    for table, keys in (
        ("kernels", ("arch", "kernel")),
        ("estimates", ("shape", "kernel")),
    ):
        fresh = {tuple(row[k] for k in keys): row for row in after[table]}
        for old in before[table]:
            key = tuple(old[k] for k in keys)
            new = fresh.get(key)
            if new is None:
                found.append(f"{', '.join(key)}: in the record, not launched any more")
                continue
            for name, value in old.items():
                if name in (*keys, "of_dense", "limiter", "explained"):
                    continue
                if new[name] == value:
                    continue
                if isinstance(value, (int, float)) and isinstance(
                    new[name], (int, float)
                ):
                    more_is_better = name in ("occupancy", "matmuls_in_flight")
                    worse = value - new[name] if more_is_better else new[name] - value
                    if worse <= TOLERANCE * abs(value):
                        continue
                found.append(f"{', '.join(key)}: {name} {value} -> {new[name]}")
    return found


def record(
    path: pathlib.Path,
    measure: Callable[[], dict[str, list[dict[str, object]]]] = measure,
    script: str = "moe_sass",
) -> None:
    """Measures, and writes the record."""
    import triton

    rows = measure()
    tables = ",\n ".join(
        f'"{name}": [\n  ' + ",\n  ".join(map(json.dumps, table)) + "\n ]"
        for name, table in rows.items()
    )
    head = {
        "command": f"python test/python_native/{script}.py --output FILE",
        "triton": triton.__version__,
        "model": {"sms": SMS, "clock": CLOCK, "power_flops": POWER_FLOPS},
        "calibration": [
            {
                "kernel": name,
                "predicted_us": a,
                "published_us": b,
                "ratio": round(b / a, 2),
            }
            for name, a, b in CALIBRATION
        ],
        "published_over_predicted": dict(zip(("median", "low", "high"), bias())),
    }
    lines = ",\n ".join(f'"{k}": {json.dumps(v)}' for k, v in head.items())
    path.write_text(f"{{\n {lines},\n {tables}\n}}\n")
    for row in rows["layers"]:
        print(row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, required=True)
    sys.exit(record(parser.parse_args().output))
