"""Checks, times and tunes the MoE Triton kernels on whatever GPU is there.

For a bare machine: torch >= 2.11 and Triton >= 3.6, no network, no installed package of
this repository. Carry this file, lab/, measure.py, peers.py, report.py and shapes.py beside it,
torch/_native/ops/moe and torch/testing/_internal/moe_*.py; everything is loaded by path.

    python benchmarks/moe/gpu_lab.py --output run.json    # on a GPU, under 8 minutes
    python benchmarks/moe/gpu_lab.py --tune               # measures, rewrites configs.py
    python benchmarks/moe/gpu_lab.py --rehearse           # on a CPU, in the interpreter

What a run does, in this order:
    1. copy bandwidth and dense bfloat16 rate of this card: the two ceilings
    2. router, permutation, forward and backward on the small cases of the tests
       against float64, the same bits twice, as a CUDA graph and for one token alone;
       compute-sanitizer where it is installed
    3. times, interleaved with the peers of peers.py; a row per shape
    4. one page of text and one plot beside the JSON (lab/summary.py)

A kernel that fails is a row that says so, and a kernel that takes the CUDA context with
it ends only its process: the parent starts another for the rows that are left. When time
is short there are fewer rounds, never fewer rows. The bound of a row is the sum over
kernels of the larger of flops / dense rate and bytes / copy bandwidth. A rehearsal runs
the same code on tiny shapes; its times mean nothing.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from argparse import Namespace


if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import peers
import triton
from lab import checks, loading, summary, tuning
from lab.layer import layer, use_plan
from lab.loading import autotune, configs, launch
from report import parse
from shapes import GPU_SHAPES, make_operands, REHEARSAL, Shape, TUNING_SHAPES

import torch

import measure


# Shared memory of a program in a rehearsal, where no device says.
REHEARSAL_SHARED = 227 << 10
# Loops over experts wait for the device in every turn, and batched_mm copies weights.
NOT_ON_GPU = ("transformers_eager", "transformers_batched_mm", "loop_unbound")
# Compiling the peers takes longer than all their runs: a small and a large layer, and only where
# this much time is left.
COMPILED_PEER = ("7B-n256", "30B-n512")
COMPILE_SECONDS = 120
DEVICE_LOST = 17  # exit status of a stage


class Budget:
    """Seconds that are left, for choosing how often to repeat."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()

    def rounds(self, seconds: float, rows_left: int, wanted: int) -> int:
        """Repetitions for one of ``rows_left`` rows: ``wanted`` if time allows."""
        share = max(self.left(), 0) / max(rows_left, 1)
        return measure.affordable_rounds(wanted, seconds, share)


@dataclasses.dataclass
class Lab:
    """What every stage needs."""

    options: Namespace
    device: torch.device
    plan: launch.LaunchPlan
    name: str
    arch: str
    shared_limit: int
    shapes: tuple[Shape, ...]
    budget: Budget


def rehearsal_plan() -> launch.LaunchPlan:
    """Tiles for tiny shapes, with an entry for decoding."""
    tile = configs.TileConfig(32, 32, 32, 4, 2, epilogue_parts=2)
    few = configs.TileConfig(16, 16, 32, 4, 2, max_rows=1)
    table = {
        kernel: (few, tile) if kernel in configs.FORWARD_KERNELS else (tile,)
        for kernel in configs.KERNELS
    }
    return launch.LaunchPlan(table, num_sms=2)


def open_lab(options: Namespace) -> Lab:
    """The device and its table; a rehearsal has the CPU and a table of its own."""
    budget = Budget(options.budget)
    if options.rehearse:
        return Lab(
            options, torch.device("cpu"), rehearsal_plan(), "interpreter", "sm_90",
            REHEARSAL_SHARED, REHEARSAL, budget,
        )  # fmt: skip
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --rehearse runs on a CPU")
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
        table = configs.table_for_gcn_arch(arch)
    else:
        arch = f"sm_{10 * properties.major + properties.minor}"
        table = configs.table_for_capability(properties.major, properties.minor)
    if table is None:
        raise SystemExit(f"no tile table for {arch}")
    autotuner = autotune.Autotuner() if autotune.is_enabled() else None
    plan = launch.LaunchPlan(table, properties.multi_processor_count, autotuner)
    shared = getattr(properties, "shared_memory_per_block_optin", REHEARSAL_SHARED)
    return Lab(options, device, plan, properties.name, arch, shared, GPU_SHAPES, budget)


def measure_ceilings(device: torch.device, rehearse: bool) -> tuple[float, float]:
    """Copy bandwidth in bytes/s (read plus written) and dense bfloat16 flops/s."""
    size, n = (1 << 20, 128) if rehearse else (1 << 31, 8192)
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, n, n, device=device, dtype=torch.bfloat16).unbind()
    functions = {"copy": lambda: target.copy_(source), "mm": lambda: a @ b}
    times = measure.interleaved_seconds(functions, rounds=20, device=device)
    copy, mm = (measure.spread(times[name]).median for name in functions)
    return 2 * size / copy, 2 * n**3 / mm


def time_row(lab: Lab, shape: Shape, ceilings, libraries, rows_left: int) -> dict:
    """One row of the table: ours and the peers, their spread, and the bound."""
    operands = make_operands(shape, lab.device, weights_dtype=torch.float32)
    compiled = shape.name in COMPILED_PEER and not lab.options.no_compile
    compiled &= lab.budget.left() >= COMPILE_SECONDS
    options = {"libraries": libraries, "compiled": compiled, "ours": layer}
    found, failed = peers.make_peers(shape, NOT_ON_GPU, **options)
    row: dict = {"shape": dataclasses.asdict(shape), "failed": failed}
    row["compiled_peers"] = compiled
    functions, reference_output, slowest, held = {}, None, 0.0, {}
    for peer in found:
        name = "ours" if peer.name == peers.OURS else peer.name
        args = (*operands.layer_args()[:3], *peer.leaves(operands))
        for kind, grad in (("forward", None), ("step", operands.grad)):
            result: dict = {}
            function = peers.bind(peer.call, args, grad)
            output = checks.attempt(result, "ran", function)
            if result["ran"] != "ok":
                row["failed"][f"{name}/{kind}"] = result["ran"]
                continue
            functions[f"{name}/{kind}"] = function
            if kind == "forward" and name == "ours":
                reference_output = output
            elif kind == "forward" and reference_output is not None:
                # A peer that computes something else is no peer.
                error = (output.float() - reference_output.float()).norm()
                error = (error / reference_output.float().norm()).item()
                row.setdefault("relative_distance_to_ours", {})[name] = error
            begin = time.perf_counter()
            checks.attempt(result, "again", function)
            slowest += time.perf_counter() - begin
            if kind == "step":  # between forward and backward, weights aside
                held[name] = measure.saved_bytes(lambda: peer.call(*args), args[3:])
    _add_graphs(lab, shape, functions, row)
    rounds = lab.budget.rounds(slowest, rows_left, lab.options.rounds)
    row["rounds"] = rounds
    if rounds < lab.options.rounds:
        row["note"] = f"{rounds} rounds instead of {lab.options.rounds}: time is short"
    options = {"rounds": rounds, "warmup": 1, "device": lab.device}
    times = measure.interleaved_seconds(functions, **options)
    spreads = {n: measure.spread([1e3 * s for s in t]) for n, t in times.items() if t}
    row["ms"] = {name: s.median for name, s in spreads.items()}
    row["spread_ms"] = {name: [s.p10, s.p90] for name, s in spreads.items()}
    row["bound_ms"] = {k: shape.bound_ms(k, *ceilings) for k in ("forward", "step")}
    row["predicted_h100_ms"] = predicted_ms(shape)
    row["held_bytes"] = held
    return row


def _add_graphs(lab: Lab, shape: Shape, functions: dict, row: dict) -> None:
    """Decoding is launch bound in eager: also time every forward as a graph."""
    if shape.T > 256:
        return
    for name in [name for name in functions if name.endswith("/forward")]:
        result: dict = {}
        capture = functools.partial(loading.graph_replay, functions[name], lab.device)
        replay = checks.attempt(result, "graph", capture)
        graph = name.replace("/", "_graph/")
        if replay is None:
            row["failed"][graph] = result["graph"]
        else:
            functions[graph] = replay


def predicted_ms(shape: Shape) -> dict[str, object]:
    """What the model of the machine code says of our kernels on an H100, with its interval.

    Empty for a shape it has no row of, and where its record was not carried along.
    """
    path = pathlib.Path(__file__).parent / "results/triton_sass.json"
    rows = json.loads(path.read_text())["layers"] if path.exists() else []
    for row in rows:
        if shape.sizes().items() <= row.items():
            forward, backward = row["forward_us"], row["backward_us"]
            ends = zip(row["forward_us_range"], row["backward_us_range"])
            return {
                "forward": forward / 1e3,
                "step": (forward + backward) / 1e3,
                "forward_interval": [us / 1e3 for us in row["forward_us_range"]],
                "step_interval": [(a + b) / 1e3 for a, b in ends],
            }
    return {}


def write(lab: Lab, report: dict) -> None:
    """The report so far: what a killed run leaves is a valid file."""
    if lab.options.out is not None:
        measure.write_json(report, lab.options.out)


def header(lab: Lab) -> dict:
    device = {"device": lab.name, "arch": lab.arch, "triton": triton.__version__}
    return measure.provenance() | device | {"autotune": lab.plan.autotuner is not None}


def stage_check(lab: Lab, report: dict) -> int:
    """Ceilings and correctness."""
    report.update(header(lab))
    bandwidth, rate = measure_ceilings(lab.device, lab.options.rehearse)
    report["copy_bytes_per_s"], report["mm_flops_per_s"] = bandwidth, rate
    print(f"{lab.name}: copy {bandwidth / 1e9:.0f} GB/s, mm {rate / 1e12:.1f} TFLOP/s")
    write(lab, report)
    report["cases"] = checks.check_cases(lab.plan, lab.device)
    repeatable = lab.shapes[:1]
    if not lab.options.rehearse:
        repeatable += lab.shapes[-1:]
    report["repeatable"] = [checks.check_repeatable(s, lab.device) for s in repeatable]
    bad = [row for row in report["cases"] if not row["ok"]]
    print(f"{len(report['cases']) - len(bad)} cases ok, failed: {bad}")
    print(f"same bits: {report['repeatable']}", flush=True)
    write(lab, report)
    return 0


def stage_rows(lab: Lab, report: dict) -> int:
    """The rows that the report does not have yet."""
    libraries, missing = peers.find_libraries(lab.options.peers)
    report["peers"] = {"libraries": libraries, "absent": missing}
    if missing:
        report["peers"]["note"] = "absent peers are not in the rows; see --peers"
    ceilings = (report["copy_bytes_per_s"], report["mm_flops_per_s"])
    rows = report.setdefault("rows", [])
    done = {row["shape"]["name"] for row in rows}
    todo = [shape for shape in lab.shapes if shape.name not in done]
    for i, shape in enumerate(todo):
        result: dict = {}
        # Written before it runs: a process that dies in it is not tried again.
        rows.append({"shape": dataclasses.asdict(shape), "failed": {"row": "died"}})
        write(lab, report)
        args = (lab, shape, ceilings, libraries, len(todo) - i)
        row = checks.attempt(result, "row", lambda: time_row(*args))
        if row is None:
            rows[-1]["failed"]["row"] = result["row"]
            print(f"{shape.name:18s} FAILED {result['row']}", flush=True)
        else:
            rows[-1] = row
            print("\n".join(summary.row_lines(row)), flush=True)
        write(lab, report)
        if checks.device_is_lost(lab.device):
            return DEVICE_LOST
        if lab.device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


def stage_smallest(lab: Lab) -> int:
    """For compute-sanitizer: three small cases, forward and backward."""
    names = ("sentinels", "clipped_aligned", "empty_experts")
    cases = map(checks.generators.get_case, names)
    rows = [checks.check_case(lab.plan, case, lab.device) for case in cases]
    print(rows)
    return 0 if all(row["ok"] for row in rows) else 1


def run_tuning(lab: Lab) -> int:
    """Measures and rewrites the table of this architecture."""
    options, report, shapes = lab.options, header(lab), lab.shapes
    effort = tuning.Effort(lab.device, lab.shared_limit, options.rounds)
    if options.rehearse:
        effort = dataclasses.replace(effort, decode_rows=4, max_candidates=3)
    else:
        shapes = [s for s in shapes if s.name in TUNING_SHAPES]
    is_late = lambda: lab.budget.left() < 0
    table, results = tuning.tune(lab.plan, shapes, effort, is_late)
    records = (dataclasses.asdict(r) | {"config": repr(r.config)} for r in results)
    report["results"] = list(records)
    report["table"] = tuning.table_source(lab.arch, table)
    write(lab, report)
    print(report["table"])
    if options.configs is None and options.rehearse:
        print("a rehearsal rewrites nothing without --configs")
        return 0
    path = options.configs or loading.KERNELS / "configs.py"
    measured_on = f"{lab.name}, torch {torch.__version__}, Triton {triton.__version__}"
    tuning.rewrite(path, lab.arch, table, measured_on)
    print(f"rewrote table {lab.arch} of {path.name}")
    return 0


def run_stage(lab: Lab) -> int:
    """One stage, in this process, on the report of the stages before it."""
    path, stage = lab.options.out, lab.options.stage
    report = json.loads(path.read_text()) if path and path.exists() else {}
    use_plan(lab.plan)
    if stage == "smallest":
        return stage_smallest(lab)
    return stage_rows(lab, report) if stage == "rows" else stage_check(lab, report)


def run_all(lab: Lab) -> int:
    """The stages of a run: on a GPU each in a process of its own."""
    options = lab.options
    with contextlib.ExitStack() as stack:
        if options.out is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            options.out = pathlib.Path(folder) / "report.json"
        options.out.unlink(missing_ok=True)
        command = [sys.executable, __file__, *sys.argv[1:], "--out", str(options.out)]

        def stage(name: str) -> int:
            if options.rehearse:
                options.stage = name
                return run_stage(lab)
            left = ["--budget", str(max(lab.budget.left(), 1))]
            return subprocess.run([*command, "--stage", name, *left]).returncode

        stage("check")
        report = json.loads(options.out.read_text()) if options.out.exists() else {}
        if "mm_flops_per_s" not in report:
            print("the first stage left no rates", file=sys.stderr)
            return 1
        if not options.rehearse and not options.no_sanitizer:
            report["sanitizer"] = checks.run_sanitizer(__file__, timeout_s=45)
            print(f"compute-sanitizer: {report['sanitizer']}", flush=True)
            write(lab, report)
        # A row that takes the context down is skipped by the next process.
        for _ in range(len(lab.shapes) if not options.rehearse else 1):
            if stage("rows") == 0:
                break
        report = json.loads(options.out.read_text())
        rows = report.get("rows", [])
        failed = [r["shape"]["name"] for r in rows if "ms" not in r]
        print(f"{len(rows) - len(failed)} rows, failed: {failed}\n")
        print(summary.write_summary(options.out), end="")
        # Rows decide nothing.
        checked = (report.get("cases") or [{}]) + report.get("repeatable", [])
        return 0 if all(row.get("ok") for row in checked) else 1


def main() -> int:
    options = parse(
        __doc__,
        rehearse=False,
        tune=False,
        configs=pathlib.Path,  # that --tune rewrites
        peers=pathlib.Path,  # a folder with the libraries of peers.py
        no_compile=False,
        no_sanitizer=False,
        rounds=20,
        budget=450.0,  # seconds in all
        only="",  # shapes whose name has this
        stage=("", "check", "rows", "smallest"),
    )
    if options.rounds < 3 and not options.rehearse:
        raise SystemExit("gpu_lab.py: --rounds must be at least 3")
    lab = open_lab(options)
    lab.shapes = tuple(s for s in lab.shapes if options.only in s.name)
    with contextlib.ExitStack() as stack:
        if options.rehearse:
            stack.enter_context(loading.exact_interpreter())
        if options.tune:
            return run_tuning(lab)
        if options.stage:
            return run_stage(lab)
        return run_all(lab)


if __name__ == "__main__":
    sys.exit(main())
