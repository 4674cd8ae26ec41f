"""Checks, times and tunes the MoE Triton kernels on the GPU of this machine.

A bare machine needs torch >= 2.11 and Triton >= 3.6 with a C compiler and Python's headers, but no
network and no installed package of this repository. Copy a checkout, or benchmarks/moe,
torch/_native/ops/moe, torch/testing/_internal/moe_*.py, and for a rehearsal test/python_native.
Everything is loaded by path. A rehearsal in Triton 3.6 needs numpy < 2.4.

    python benchmarks/moe/gpu_lab.py --output run.json    # on a GPU, at most 9 minutes
    python benchmarks/moe/gpu_lab.py --output run.json --only up mxfp8     # families, shapes
    python benchmarks/moe/gpu_lab.py --tune down          # measures, rewrites configs.py; or all
    python benchmarks/moe/gpu_lab.py --rehearse           # on a CPU, in the interpreter
    python benchmarks/moe/lab/summary.py run.json --prove    # what passed runs by default: proven.py

A run has these parts, in this order, each in its own process group (lab/jobs.py):

    start      copy bandwidth and dense bfloat16 rate of this card: the two ceilings
    compile    all kernels, in as many processes as there are cores
    check      each kernel family (lab/checks.py) against float64, outputs poisoned
    repeat     the same bits twice, as a CUDA graph and for one token alone
    sanitizer  memcheck and racecheck of compute-sanitizer, one small case
    kernels    each kernel's time beside its prediction (lab/kernels.py)
    rows       layers, interleaved with the peers of peers.py; the predicted and decode first
    ncu        the three kernels farthest from their prediction

Beside run.json are a page of text and a plot (lab/summary.py), run.log and run.ncu.csv. A part
that fails, hangs or loses the device becomes a row that says so, and the others go on. If
time is short there are fewer rounds, never fewer rows. The bound of a row is the sum over
kernels of the larger of flops / dense rate and bytes / copy bandwidth. A rehearsal runs the
same code on tiny shapes; its times mean nothing.

``--peers`` names a folder of packages or checkouts of peers that are not installed. Liger (a wheel of
1 MB, unpacked) and ScatterMoE (a checkout) are Python and Triton. SonicMoE 0.1.2 needs torch 2.9.1 or
older, and its CuTe DSL is a wheel of 74 MB; vLLM is larger still.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import json
import os
import pathlib
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable


if "--rehearse" in sys.argv:  # before Triton is imported; not to compile
    compiles = any(word.startswith("compile/") for word in sys.argv)
    os.environ["TRITON_INTERPRET"] = "0" if compiles else "1"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import peers
import triton
from lab import checks, kernels, loading, summary, tuning
from lab.jobs import Job, run_jobs
from lab.layer import layer, use_plan
from lab.loading import autotune, configs, launch
from report import existing_file, existing_folder, parse
from shapes import GPU_SHAPES, make_operands, REHEARSAL, Shape, TUNING_SHAPES

import torch

import measure


# Shared memory of a program in a rehearsal, which has no device to ask.
REHEARSAL_SHARED = 227 << 10
# Loops over experts wait for the device in every iteration, and batched_mm copies weights.
NOT_ON_GPU = ("transformers_eager", "transformers_batched_mm", "loop_unbound")
REPEATED = ("tiny", "7B-n256", "OLMoE-decode-T256")  # twice, as a graph, a token alone
# Compiling the peers takes longer than all their runs: only a small and a large layer, on request.
COMPILED_PEER = ("7B-n256", "30B-n512")
# Most seconds of each stage, and those kept for the page and the plot. Time left
# after the expected seconds (half of these) goes to the rows.
STAGES = {
    "start": 60,
    "compile": 90,
    "check": 120,
    "repeat": 50,
    "sanitizer": 90,
    "kernels": 110,
    "rows": 170,
    "ncu": 80,
}
RESERVE_S = 15
NCU_S = 45  # kept for ncu after the rows
ROW_S = 45  # for one row, whose kernel may hang
FAMILY_S = 45
CHECKED_AT_ONCE = 4  # processes on one GPU


class Budget:
    """Remaining seconds, which decide the number of repetitions."""

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
    """The state that every part needs."""

    options: Namespace
    device: torch.device
    plan: launch.LaunchPlan
    name: str
    arch: str
    shared_limit: int
    shapes: tuple[Shape, ...]
    budget: Budget


def chosen(options: Namespace, names) -> list[str]:
    """The members of ``names`` that --only lists; all without it."""
    return [name for name in names if not options.only or name in options.only]


def shapes_of(options: Namespace) -> tuple[Shape, ...]:
    """Shapes of the rows: those with a prediction and decode first, the largest last."""
    shapes = REHEARSAL if options.rehearse else GPU_SHAPES
    names = chosen(options, [shape.name for shape in shapes])
    return tuple(
        sorted(
            (shape for shape in shapes if shape.name in names),
            key=lambda s: (not predicted_ms(s) and s.T > 256, s.E * s.D * s.F),
        )
    )


def rehearsal_plan() -> launch.LaunchPlan:
    """Tiles for tiny shapes, with an entry for decoding."""
    tile = configs.TileConfig(32, 32, 32, 4, 2, epilogue_parts=2, tma=True)
    few = configs.TileConfig(16, 16, 32, 4, 2, max_rows=1)
    table = {
        kernel: (few, tile) if kernel in configs.FORWARD_KERNELS else (tile,)
        for kernel in configs.KERNELS
    }
    if not loading.NO_SCALED:
        tile = configs.TileConfig(32, 128, 128, 4, 2)
        names = loading.scaled_configs.SCALED_TABLES["sm_90"]
        table |= dict.fromkeys(names, (tile,))
    return launch.LaunchPlan(table, num_sms=2)


def open_lab(options: Namespace) -> Lab:
    """The device and its table; a rehearsal has the CPU and a table of its own."""
    budget, shapes = Budget(options.budget), shapes_of(options)
    if options.rehearse:
        return Lab(
            options, torch.device("cpu"), rehearsal_plan(), "interpreter", "sm_90",
            REHEARSAL_SHARED, shapes, budget,
        )  # fmt: skip
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --rehearse runs on a CPU")
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    scaled = None
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
        table = configs.table_for_gcn_arch(arch)
    else:
        capability = (properties.major, properties.minor)
        arch = "sm_{}{}".format(*capability)
        table = configs.table_for_capability(*capability)
        if not loading.NO_SCALED:
            tables = loading.scaled_configs.SCALED_TABLES
            scaled = configs.table_for_capability(*capability, tables)
    if table is None:
        raise SystemExit(f"no tile table for {arch}")
    autotuner = autotune.Autotuner() if autotune.is_enabled() else None
    table = {**table, **(scaled or {})}
    plan = launch.LaunchPlan(table, properties.multi_processor_count, autotuner)
    shared = getattr(properties, "shared_memory_per_block_optin", REHEARSAL_SHARED)
    return Lab(options, device, plan, properties.name, arch, shared, shapes, budget)


# --- the parts: (lab, save, *words of the name after the stage) -> the result


def start(lab: Lab, save: Callable) -> dict:
    """Versions, tools and the two ceilings of this card."""
    tools = ("cc", "gcc", "ncu", "compute-sanitizer")
    found = {name: shutil.which(name) is not None for name in tools}
    headers = pathlib.Path(sysconfig.get_path("include"), "Python.h")
    report = {**header(lab), "tools": found | {"Python.h": headers.exists()}}
    save(report)
    size, n = (1 << 20, 128) if lab.options.rehearse else (1 << 31, 8192)
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device=lab.device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, n, n, device=lab.device, dtype=torch.bfloat16).unbind()
    functions = {"copy": lambda: target.copy_(source), "mm": lambda: a @ b}
    times = measure.interleaved_seconds(functions, rounds=20, device=lab.device)
    copy, mm = (measure.spread(times[name]).median for name in functions)
    return report | {"copy_bytes_per_s": 2 * size / copy, "mm_flops_per_s": 2 * n**3 / mm}  # fmt: skip


def header(lab: Lab) -> dict:
    device = {"device": lab.name, "arch": lab.arch, "triton": triton.__version__}
    return measure.provenance() | device | {"autotune": lab.plan.autotuner is not None}


def compile_all(lab: Lab, save: Callable, worker: str, workers: str) -> dict:
    """One worker's share; a rehearsal compiles for sm_90 without a device."""
    if lab.options.rehearse:
        loading.exact_interpreter()  # test/python_native is on the path
        from triton_static_gate import _StubDriver, gpu_target

        triton.runtime.driver.set_active(_StubDriver(gpu_target(lab.arch)))
    families = chosen(lab.options, checks.FAMILIES)
    return kernels.compile_share(
        lab.plan, lab.device, families, lab.shapes, int(worker), int(workers), save
    )


def check(lab: Lab, save: Callable, family: str) -> dict:
    return checks.check_family(family, lab.plan, lab.device, save)


def repeat(lab: Lab, save: Callable, name: str) -> dict:
    (shape,) = (shape for shape in lab.shapes if shape.name == name)
    return checks.check_repeatable(shape, lab.device)


def sanitize(lab: Lab, save: Callable, tool: str) -> dict:
    """Runs kernels under a tool; a rehearsal uses the interpreter's own checks."""
    # The layer launches most kernels of the others.
    names = chosen(lab.options, checks.FAMILIES)
    names = [name for name in names if name not in lab.options.hung]
    if lab.options.rehearse:  # in the interpreter test_moe_scaled_triton.py does
        names = [n for n in names if n not in ("fp8_blockwise", "fp8_rowwise")]
    if "layer" in names:
        names = [n for n in names if not checks.FAMILIES[n].launched or "not" in n]
    watch = contextlib.nullcontext()
    if lab.options.rehearse:
        watch = loading.exact_interpreter().MemorySanitizer()()
    with watch:
        ran = checks.exercise(names, lab.plan, lab.device)
    return {"ran": list(ran), "failed": {n: v for n, v in ran.items() if v != "ok"}}


def time_kernels(lab: Lab, save: Callable, family: str, name: str) -> dict:
    rounds, backward = min(lab.options.rounds, 10), has_backward(lab.options)
    row = predicted_row(lab.options, family, name)
    return kernels.time_kernels(lab.plan, lab.device, row, rounds, backward)


def has_backward(options: Namespace) -> bool:
    """Whether kernels of the backward may be launched: none of them hung."""
    return not any(n == "layer" or checks.FAMILIES[n].backward for n in options.hung)


def predicted(options: Namespace) -> list[dict]:
    """Shapes whose kernels are timed; a rehearsal has one without predictions."""
    if options.rehearse:
        return [{"shape": REHEARSAL[0], "family": "layer", "layer": {}, "us": {}}]
    return kernels.predictions()


def predicted_row(options: Namespace, *where: str) -> dict:
    rows = {(r["family"], r["shape"].name): r for r in predicted(options)}
    return rows[where]


def profile(lab: Lab, save: Callable, family: str, name: str, part: str) -> None:
    shape = predicted_row(lab.options, family, name)["shape"]
    backward = has_backward(lab.options)
    kernels.profile_one(lab.plan, lab.device, shape, family, part, backward)


def time_rows(lab: Lab, save: Callable) -> dict:
    """The rows that the report does not have yet."""
    report = json.loads(lab.options.report.read_text())
    libraries, missing = peers.find_libraries(lab.options.peers)
    result = {"peers": {"libraries": libraries, "absent": missing}}
    ceilings = (report["copy_bytes_per_s"], report["mm_flops_per_s"])
    rows = result["rows"] = report.get("rows", [])
    done = {row["shape"]["name"] for row in rows}
    todo = [shape for shape in lab.shapes if shape.name not in done]
    for i, shape in enumerate(todo):
        attempted: dict = {}
        # Written before it runs, so that a row that kills the process is not tried again.
        rows.append({"shape": dataclasses.asdict(shape), "failed": {"row": "died"}})
        save(result)
        if not lab.options.rehearse:
            faulthandler.dump_traceback_later(ROW_S, exit=True, file=2)
        args = (lab, shape, ceilings, libraries, len(todo) - i)
        row = checks.attempt(attempted, "row", lambda: time_row(*args))
        if row is None:
            rows[-1]["failed"]["row"] = attempted["row"]
        else:
            rows[-1] = row
        print("\n".join(summary.row_lines(rows[-1])), flush=True)
        save(result)
        if checks.device_is_lost(lab.device):
            sys.exit("the device was lost")
        if lab.device.type == "cuda":
            torch.cuda.empty_cache()
    return result


def guarded(function: Callable, name: str, failed: dict) -> Callable[[], object]:
    """``function`` until it raises once, and then nothing; it does not wait for the device."""

    def call() -> object:
        if name in failed:
            return None
        try:
            return function()
        except Exception as error:
            failed[name] = f"{type(error).__name__}, when repeated: {error}"[:400]
        return None

    return call


def time_row(lab: Lab, shape: Shape, ceilings, libraries, rows_left: int) -> dict:
    """One row of the table: ours and the peers, their spread, and the bound."""
    operands = make_operands(shape, lab.device, weights_dtype=torch.float32)
    compiled = lab.options.compiled_peers and shape.name in COMPILED_PEER
    options = {"libraries": libraries, "compiled": compiled, "ours": layer}
    found, failed = peers.make_peers(shape, NOT_ON_GPU, **options)
    row: dict = {"shape": dataclasses.asdict(shape), "failed": failed}
    row["compiled_peers"] = compiled
    functions, reference_output, slowest, held = {}, None, 0.0, {}

    def attempt(name: str, call: Callable) -> object:
        result: dict = {}
        value = checks.attempt(result, name, call)
        if result[name] != "ok":
            failed[name] = result[name]
        return value

    for peer in found:
        ours = peer.name == peers.OURS
        name = "ours" if ours else peer.name
        leaves = attempt(f"{name}/weights", lambda: peer.leaves(operands))
        if leaves is None:
            continue
        args = (*operands.layer_args()[:3], *leaves)
        for kind, grad in (("forward", None), ("step", operands.grad)):
            if ours and kind == "step" and not has_backward(lab.options):
                continue
            key, function = f"{name}/{kind}", peers.bind(peer.call, args, grad)
            output = attempt(key, function)
            if key not in failed and kind == "forward" and ours:
                reference_output = output
            elif (
                key not in failed and kind == "forward" and reference_output is not None
            ):
                # A peer with another result is left out.
                error = (output.float() - reference_output.float()).norm()
                error = (error / reference_output.float().norm()).item()
                row.setdefault("relative_distance_to_ours", {})[name] = error
            del output  # gradients are as large as the weights
            begin = time.perf_counter()
            if key not in failed:
                attempt(key, function)
            if key in failed:
                continue
            slowest += time.perf_counter() - begin
            functions[key] = guarded(function, key, failed)
            if kind == "step":  # between forward and backward, weights aside
                saved = lambda: measure.saved_bytes(lambda: peer.call(*args), args[3:])
                held[name] = attempt(f"{name}/saved", saved)
    if shape.T <= 256:
        # Eager decoding is launch bound, so every forward is also timed as a graph.
        for name in [name for name in functions if name.endswith("/forward")]:
            graph, function = name.replace("/", "_graph/"), functions[name]
            replay = attempt(graph, lambda: loading.graph_replay(function, lab.device))
            if replay is not None:
                functions[graph] = guarded(replay, graph, failed)
    rounds = lab.budget.rounds(slowest, rows_left, lab.options.rounds)
    row["rounds"] = rounds
    if rounds < lab.options.rounds:
        row["note"] = f"{rounds} rounds instead of {lab.options.rounds}: time is short"
    options = {"rounds": rounds, "warmup": 1, "device": lab.device}
    times = measure.interleaved_seconds(functions, **options) if functions else {}
    spreads = {
        n: measure.spread([1e3 * s for s in t])
        for n, t in times.items()
        if t and n not in failed
    }
    row["ms"] = {name: s.median for name, s in spreads.items()}
    row["spread_ms"] = {name: [s.p10, s.p90] for name, s in spreads.items()}
    row["bound_ms"] = {k: shape.bound_ms(k, *ceilings) for k in ("forward", "step")}
    row["predicted_h100_ms"] = predicted_ms(shape)
    row["held_bytes"] = held
    return row


def predicted_ms(shape: Shape) -> dict[str, object]:
    """Time of our kernels on an H100 by the model of the machine code, with its interval.

    Empty for a shape without a row, and if its record is not on this machine.
    """
    for row in kernels.predictions():
        layer = row["layer"]
        if row["family"] == "layer" and shape.sizes().items() <= layer.items():
            forward, backward = layer["forward_us"], layer["backward_us"]
            ends = zip(layer["forward_us_range"], layer["backward_us_range"])
            return {
                "forward": forward / 1e3,
                "step": (forward + backward) / 1e3,
                "forward_interval": [us / 1e3 for us in layer["forward_us_range"]],
                "step_interval": [(a + b) / 1e3 for a, b in ends],
            }
    return {}


def tune(lab: Lab, save: Callable) -> dict:
    """Measures and rewrites the table of this architecture."""
    options, report, shapes = lab.options, header(lab), lab.shapes
    effort = tuning.Effort(lab.device, lab.shared_limit, options.rounds)
    if options.rehearse:
        effort = dataclasses.replace(effort, decode_rows=4, max_candidates=3)
    else:
        shapes = [s for s in shapes if s.name in TUNING_SHAPES]
    names = configs.KERNELS if options.tune == "all" else (options.tune,)
    is_late = lambda: lab.budget.left() < RESERVE_S
    table, results = tuning.tune(lab.plan, names, shapes, effort, is_late)
    records = (dataclasses.asdict(r) | {"config": repr(r.config)} for r in results)
    report["results"] = list(records)
    report["table"] = tuning.table_source(lab.arch, table)
    save(report)
    print(report["table"])
    if options.configs is None and options.rehearse:
        print("a rehearsal rewrites nothing without --configs")
        return report
    path = options.configs or loading.KERNELS / "configs.py"
    measured_on = f"{lab.name}, torch {torch.__version__}, Triton {triton.__version__}"
    tuning.rewrite(path, lab.arch, table, measured_on)
    print(f"rewrote table {lab.arch} of {path.name}")
    return report


PARTS: dict[str, Callable] = {
    "start": start,
    "compile": compile_all,
    "check": check,
    "repeat": repeat,
    "sanitizer": sanitize,
    "kernels": time_kernels,
    "rows": time_rows,
    "ncu": profile,
    "tune": tune,
}


def run_part(options: Namespace, name: str, save: Callable) -> object:
    """Runs a part in its own process."""
    stage, *words = name.split("/")
    with contextlib.ExitStack() as stack:
        if options.rehearse and stage != "compile":
            stack.enter_context(loading.exact_interpreter().exact_floats())
            torch.set_num_threads(1)
        lab = open_lab(options)
        use_plan(lab.plan)
        return PARTS[stage](lab, save, *words)


# --- the run: nothing from here on touches the device


class Run:
    """Runs the stages one after the other, and holds the report so far."""

    def __init__(self, options: Namespace, folder: pathlib.Path) -> None:
        self.options, self.folder = options, folder
        self.budget = Budget(options.budget)
        self.report: dict = {"stages": {}, "not_ok": {}}
        self.logs: list[str] = []
        self.forks = True

    def limit(self, stage: str) -> float:
        """Seconds of a stage; the interpreter needs more."""
        return STAGES[stage] * (5 if self.options.rehearse else 1)

    def hung(self) -> list[str]:
        """Families with a kernel that hung, which are not launched again."""
        return [
            row["family"]
            for row in self.report.get("checks", [])
            if any(e.startswith("longer than") for e in row["failed"].values())
        ]

    def job(self, name: str, limit_s: float, command=(), **env) -> Job:
        """A job as a fork, or else as a command, with ``command`` in front of it."""
        limit_s = max(min(limit_s, self.budget.left() - RESERVE_S), 1)
        given = {"budget": limit_s, "report": self.options.out, "hung": self.hung()}
        if not command and self.forks:
            options = Namespace(**(vars(self.options) | given))
            return Job(name, limit_s, functools.partial(run_part, options, name))
        given |= {"out": Job(name, 0, []).path(self.folder, ".json"), "part": name}
        own = [sys.executable, __file__, *sys.argv[1:]]
        for option, value in given.items():
            words = value if isinstance(value, list) else [value]
            own += [f"--{option}", *map(str, words)]
        return Job(name, limit_s, [*command, *own], env)

    def stage(self, name: str, jobs: list[Job], merge: Callable, parallel: int = 1):
        """Runs jobs of a stage while it has time; ``merge`` adds each outcome to the report."""
        begin = time.monotonic()
        end = begin + min(self.limit(name), self.budget.left() - RESERVE_S)
        for outcome in run_jobs(jobs, self.folder, parallel, end):
            self.logs.append(f"--- {outcome.job.name}: {outcome.status}\n{outcome.log}")
            if outcome.status != "ok":
                said = {"status": outcome.status, "log": outcome.excerpt}
                self.report["not_ok"][outcome.job.name] = said
                print(f"{outcome.job.name}: {outcome.status}", flush=True)
            merge(outcome)
            self.write()
        seconds = time.monotonic() - begin
        entry = self.report["stages"].setdefault(name, {"minutes": 0, "parts": 0})
        entry["minutes"] += seconds / 60
        entry["parts"] += len(jobs)
        # A stage after "compile" should add none.
        cache = pathlib.Path(triton.knobs.cache.dir)
        entry["binaries_in_cache"] = sum(1 for _ in cache.rglob("*.cubin"))
        print(f"{name}: {len(jobs)} parts, {seconds:.0f} s", flush=True)
        self.write()

    def write(self) -> None:
        """Writes the report so far, so that a killed run leaves a valid file."""
        measure.write_json(self.report, self.options.out)

    def start(self) -> bool:
        """Whether the start stage gave rates, in a fork, or in a command if a fork gets no device."""
        for self.forks in (True, False):
            job = self.job("start", self.limit("start") / 2)
            self.stage("start", [job], lambda o: self.report.update(o.result or {}))
            if "mm_flops_per_s" in self.report:
                return True
        return False

    def compile(self) -> None:
        rehearse, workers = self.options.rehearse, os.cpu_count() or 1
        if rehearse:  # one part is enough, in a process without the interpreter
            workers = 16
        forks, self.forks = self.forks, self.forks and not rehearse
        rows = self.report["compiled"] = []
        jobs = [
            self.job(f"compile/{i}/{workers}", self.limit("compile"))
            for i in range(1 if rehearse else workers)
        ]
        self.forks = forks

        def merge(outcome) -> None:
            found = (outcome.result or {}).get("kernels", [])
            if outcome.status != "ok" and found:
                found[-1]["compiled"] = f"the compiler: {outcome.status}"
            rows.extend(found)
            for name, error in (outcome.result or {}).get("failed", {}).items():
                self.report["not_ok"][f"{outcome.job.name}/{name}"] = {"status": error}

        self.stage("compile", jobs, merge, workers)

    def check(self) -> None:
        names = chosen(self.options, checks.FAMILIES)
        rows = self.report["checks"] = [
            {"family": n, "ok": False, "failed": {"": "not run"}} for n in names
        ]

        def merge(outcome) -> None:
            name = outcome.job.name.split("/")[1]
            row = outcome.result or {"family": name, "ok": False, "failed": {}}
            if outcome.status != "ok":
                row["failed"][row.pop("running", "")] = outcome.status
            rows[names.index(name)] = row

        slow = self.options.rehearse
        jobs = [self.job(f"check/{n}", FAMILY_S * (2 if slow else 1)) for n in names]
        self.stage("check", jobs, merge, 1 if slow else CHECKED_AT_ONCE)

    def repeat(self) -> None:
        names = [s.name for s in shapes_of(self.options) if s.name in REPEATED]
        rows = self.report["repeatable"] = []

        def merge(outcome) -> None:
            failed = {"shape": outcome.job.name, "ok": False, "runs": outcome.status}
            rows.append(outcome.result or failed)

        jobs = [self.job(f"repeat/{n}", self.limit("repeat") / 2) for n in names]
        self.stage("repeat", jobs, merge)

    def sanitizer(self) -> None:
        found = self.report["sanitizer"] = {}
        path = shutil.which("compute-sanitizer")
        tools = ("memcheck", "racecheck")
        limit = self.limit("sanitizer")
        if self.options.rehearse:
            jobs = [self.job("sanitizer/memcheck", limit)]
        elif path is None:
            found["note"] = "compute-sanitizer is not on this machine"
            return
        else:
            # Without the caching allocator, an access past a tensor is past an allocation.
            env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            options = ["--error-exitcode", "99", "--tool"]
            jobs = [
                self.job(f"sanitizer/{t}", limit, [path, *options, t], **env) for t in tools
            ]  # fmt: skip

        def merge(outcome) -> None:
            errors = [s for s in outcome.log.splitlines() if s.startswith("=========")]
            row = {"status": outcome.status, "errors": errors[:40]}
            if self.options.rehearse:
                row["by"] = "the interpreter's own checks, not compute-sanitizer"
            found[outcome.job.name.split("/")[1]] = row | (outcome.result or {})

        self.stage("sanitizer", jobs, merge, len(jobs))

    def kernels(self) -> None:
        rows = self.report["kernels"] = []
        hung = {*self.hung()}
        if "quantize" in hung:  # which all of FP8 launches
            hung |= {*kernels.SCALED_PREFIX}
        todo = [(r["family"], r["shape"].name) for r in predicted(self.options)]
        todo = [where for where in todo if where[0] not in hung]
        jobs = [
            self.job("/".join(("kernels", *where)), self.limit("kernels") / 3)
            for where in todo
            if chosen(self.options, where)
        ]

        def merge(outcome) -> None:
            failed = {"shape": outcome.job.name, "failed": outcome.status}
            rows.append(outcome.result or failed)

        self.stage("kernels", jobs, merge)

    def add_rows(self, outcome) -> None:
        self.report.update(outcome.result or {})
        rows = self.report.get("rows", [])
        if outcome.status != "ok" and rows and rows[-1]["failed"] == {"row": "died"}:
            late = f"Timeout (0:00:{ROW_S})" in outcome.log  # of faulthandler
            rows[-1]["failed"]["row"] = (
                f"longer than {ROW_S} s" if late else outcome.status
            )

    def rows(self) -> None:
        shapes = shapes_of(self.options)
        reason = "no time was left"
        # A row that takes the process down is skipped by the next one.
        for _ in shapes:
            seconds = min(self.limit("rows"), self.budget.left() - RESERVE_S - NCU_S)
            before = len(self.report.get("rows", []))
            if before == len(shapes) or seconds < ROW_S / 3:
                break
            self.stage("rows", [self.job("rows", seconds)], self.add_rows)
            if len(self.report.get("rows", [])) == before:
                reason = self.report["not_ok"].get("rows", {}).get("status", reason)
                break
        rows = self.report.setdefault("rows", [])
        ran = {row["shape"]["name"] for row in rows}
        rows += (
            {"shape": dataclasses.asdict(s), "failed": {"row": reason}}
            for s in shapes
            if s.name not in ran
        )
        self.write()

    def ncu(self) -> None:
        path = shutil.which("ncu")
        rows = self.report["ncu"] = []
        if path is None or self.options.rehearse:
            return
        command = kernels.ncu_command(path)
        jobs = [
            self.job("/".join(("ncu", *where)), STAGES["ncu"] / 3, command)
            for where in kernels.worst(self.report.get("kernels", []))
        ]

        def merge(outcome) -> None:
            metrics = kernels.ncu_metrics(outcome.log)
            name = outcome.job.name.removeprefix("ncu/")
            rows.append({"kernel": name, "status": outcome.status, "metrics": metrics})
            lines = [s for s in outcome.log.splitlines() if s.startswith('"')]
            with self.options.out.with_suffix(".ncu.csv").open("a") as file:
                file.write(f"# {name}\n" + "\n".join(lines) + "\n")

        self.stage("ncu", jobs, merge)

    def tune(self) -> int:
        """Runs the tuning, whose report is that of its only part."""
        for outcome in run_jobs([self.job("tune", self.budget.left())], self.folder):
            print(outcome.log, end="")
            if outcome.result is not None:
                measure.write_json(outcome.result, self.options.out)
        return int(outcome.status != "ok")

    def all(self) -> int:
        if not self.start():
            for name, said in self.report["not_ok"].items():
                print(f"{name}: {said['status']}\n{said['log']}", file=sys.stderr)
            return 1
        for stage in STAGES:
            if stage not in ("start", *self.options.without):
                getattr(self, stage)()
        self.options.out.with_suffix(".log").write_text("\n".join(self.logs))
        print("\n" + summary.write_summary(self.options.out), end="")
        # Failed rows do not change the exit status.
        checked = self.report.get("checks", []) + self.report.get("repeatable", [])
        return 0 if all(row["ok"] for row in checked) else 1


def main() -> int:
    options = parse(
        __doc__,
        rehearse=False,
        tune=("", "all", *configs.KERNELS),
        configs=existing_file,  # that --tune rewrites
        peers=existing_folder,  # with the libraries of peers.py
        compiled_peers=False,
        rounds=20,
        budget=520.0,  # seconds in all
        only=list,  # families and shapes
        without=list,  # stages
        part=str,  # what a process of a run does
        report=pathlib.Path,  # of the run that it belongs to
        hung=list,  # families that it must not launch
    )
    known = {*checks.FAMILIES, *(s.name for s in GPU_SHAPES + REHEARSAL)}
    known |= {row["shape"].name for row in kernels.predictions()}
    allowed = {"only": known, "without": {*STAGES} - {"start"}, "hung": known}
    for name, names in allowed.items():
        given = getattr(options, name) or []
        setattr(options, name, given)
        if unknown := {*given} - names:
            raise SystemExit(f"--{name} {unknown}: choose from {sorted(names)}")
    if options.rounds < 3 and not options.rehearse:
        raise SystemExit("gpu_lab.py: --rounds must be at least 3")
    if options.part:
        save = functools.partial(measure.write_json, path=options.out)
        result = run_part(options, options.part, save)
        if result is not None:
            save(result)
        return 0
    # It counts devices without using them, which only parts may do.
    if not options.rehearse and not torch.cuda.device_count():
        print("gpu_lab.py: no GPU here; --rehearse runs on a CPU", file=sys.stderr)
        return 2
    # If it is told to end, it ends its parts first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu_lab.py: told to end"))
    with tempfile.TemporaryDirectory() as folder:
        if options.out is None:
            options.out = pathlib.Path(folder) / "run.json"
        for suffix in (".json", ".ncu.csv"):
            options.out.with_suffix(suffix).unlink(missing_ok=True)
        run = Run(options, pathlib.Path(folder))
        return run.tune() if options.tune else run.all()


if __name__ == "__main__":
    sys.exit(main())
