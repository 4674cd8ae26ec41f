# Owner(s): ["module: dsl-native-ops"]
"""The parts of benchmarks/moe/gpu_lab.py, in Triton's interpreter.

Whole runs, and the processes that they consist of: test_moe_gpu_lab_rehearsal.py.
"""

import os


# Before anything can import Triton: its own helpers decide at import time.
os.environ["TRITON_INTERPRET"] = "1"

import argparse
import dataclasses
import io
import json
import operator
import pathlib
import runpy
import shutil
import subprocess
import sys
import tempfile
import types
from unittest import mock

from triton_interpreter import exact_floats, require_interpreter

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


require_interpreter()
MOE_BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks/moe"
sys.path.insert(0, str(MOE_BENCHMARKS))
import gpu_lab
import peers
import shapes
from lab import checks, kernels, layer as lab_layer, summary, tuning
from lab.loading import autotune, configs, KERNELS, launch


CONFIG = configs.TileConfig


def plan_of(*entries):
    return launch.LaunchPlan(dict.fromkeys(configs.KERNELS, entries), num_sms=2)


TILE = CONFIG(32, 32, 32, 4, 2)

# Imports the lab with the packages that its machine has: torch, what torch needs, triton and numpy.
BARE_IMPORT = """
import pathlib, sys

LAB = pathlib.Path(sys.argv.pop())
HAS = {"torch", "torchgen", "functorch", "triton", "numpy", "sympy", "mpmath", "networkx", "filelock",
       "fsspec", "jinja2", "markupsafe", "typing_extensions", "setuptools", *sys.stdlib_module_names}

class Bare:
    def find_spec(self, name, path=None, target=None):
        ours = (LAB / name).is_dir() or (LAB / f"{name}.py").exists()
        if "." not in name and name[0] != "_" and name not in HAS and not ours:
            raise ModuleNotFoundError(f"{name} is not on that machine", name=name)

sys.meta_path.insert(0, Bare())
sys.path.insert(0, str(LAB))
import gpu_lab
"""


class TestBareMachine(TestCase):
    def test_imports_what_the_machine_has(self):
        command = [sys.executable, "-c", BARE_IMPORT, str(MOE_BENCHMARKS)]
        run = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stderr)


class TestSummary(TestCase):
    def report(self):
        shape = {"name": "tiny", "T": 64, "D": 32, "F": 16, "E": 4, "K": 2}
        row = {
            "shape": shape,
            "failed": {"liger/step": "RuntimeError: no"},
            "ms": {"ours/forward": 2.0, "ours/step": 6.0, "slow/forward": 3.0},
            "bound_ms": {"forward": 1.0, "step": 3.0},
            "predicted_h100_ms": {"forward": 1.6, "step": 4.8},
        }
        row["ms"]["fast/step"] = 3.0
        kernels_row = {
            "shape": "Qwen3", "family": "layer", "forward_us": 30.0, "backward_us": 50.0,
            "predicted_forward_us": 20.0, "predicted_backward_us": 100.0,
            "kernels": [{"kernel": "up", "us": 30.0, "predicted_us": 10.0, "ratio": 3.0}],
        }  # fmt: skip
        died = {"shape": {**shape, "name": "died"}, "failed": {"row": "died"}}
        return {
            "device": "H100",
            "arch": "sm_90",
            "torch": "2.16",
            "triton": "3.9",
            "command": "c",
            "date": "2026-11-27",
            "checks": [
                {"family": "up", "ok": True},
                {"family": "down", "ok": False, "failed": {"zipf": "longer than 45 s"}},
            ],
            "repeatable": [{"shape": "tiny", "ok": True}],
            "sanitizer": {
                "racecheck": {"status": "exit status 99", "errors": ["at up"]}
            },
            "stages": {"check": {"minutes": 1.25}},
            "compiled": [{"kernel": "up_kernel", "compiled": "ok", "spills": 8}],
            "not_ok": {"check/down": {"status": "longer than 45 s"}},
            "kernels": [kernels_row, {"shape": "other", "failed": "died of SIGABRT"}],
            "rows": [row, died],
            "peers": {"absent": ["sonicmoe"]},
        }

    def test_losing_rows_and_failures_are_on_the_page(self):
        page = summary.page(self.report())
        for text in (
            "1 of 2 kernel families",
            "FAILED down, zipf: longer than 45 s",
            "racecheck: FAILED exit status 99 ['at up']",
            "Minutes: check 1.2",
            '"spills": 8',
            "FAILED check/down: longer than 45 s",
            "Qwen3, layer: 30 x1.50, 50 x0.50\n    up 30 x3.00\n",
            "other: FAILED died of SIGABRT",
            "50% of bound, x1.25 of the model\n    slow x1.50\n",
            "    fast x0.50 FASTER\n",
            "FAILED {'row': 'died'}",
            "not there: sonicmoe",
        ):
            self.assertIn(text, page)
        self.assertNotIn("REHEARSAL", page)

    def test_without_matplotlib_there_is_a_page(self):
        with tempfile.TemporaryDirectory() as folder:
            output = pathlib.Path(folder) / "run.json"
            output.write_text(json.dumps(self.report()))
            summary.write_summary(output)
            self.assertTrue(output.with_suffix(".png").exists())
            with mock.patch.dict(sys.modules, {"matplotlib": None}):
                text = summary.write_summary(output)
            self.assertIn("no plot", text)
            self.assertEqual(output.with_suffix(".txt").read_text(), text)

    def test_what_passed_is_proven(self):
        report = self.report()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "proven.py"
            path.write_bytes(summary.PROVEN.read_bytes())

            def proven_by(**change):
                return [row[:2] for row in summary.prove(report | change, path)]

            arch = report["arch"]
            before = [row for row in runpy.run_path(path)["RUNS"] if row[1] != arch]
            self.assertEqual(len(proven_by()), len(before) + 1)
            (run,) = (r for r in runpy.run_path(path)["RUNS"] if r.arch == arch)
            self.assertEqual((run.family, run.card), ("up", report["device"]))
            self.assertEqual(run.date, report["date"])
            # A run elsewhere adds, a failure takes back, a run of other families leaves it.
            self.assertIn(("up", "gfx942"), proven_by(arch="gfx942"))
            self.assertIn(("up", arch), proven_by(checks=[]))
            failed = [{"family": "up", "ok": False}]
            self.assertNotIn(("up", arch), proven_by(checks=failed))
            with self.assertRaisesRegex(ValueError, "rehearsal"):
                proven_by(device="interpreter")
            # On the command line an error is one line, and nothing was written.
            output = pathlib.Path(folder) / "run.json"
            for text, error in (
                (None, "No such file"), ("{}", "not the report"), ("x", "not JSON"),
                (json.dumps({**report, "device": "interpreter"}), "rehearsal"),
            ):  # fmt: skip
                if text is not None:
                    output.write_text(text)
                with mock.patch("sys.stderr", io.StringIO()) as said:
                    self.assertEqual(summary.main([str(output), "--prove"]), 2)
                self.assertRegex(said.getvalue(), f"^summary.py: .*{error}.*\n$")
                self.assertFalse(output.with_suffix(".txt").exists())
        ops = runpy.run_path(summary.PROVEN)["FAMILIES"].values()
        self.assertEqual({f for names in ops for f in names}, checks.FAMILIES.keys())


class TestTables(TestCase):
    def rewritten(self, arch, times=1):
        """The text and the tables of configs.py once the committed table was written anew."""
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / "configs.py"
            shutil.copy(KERNELS / "configs.py", copy)
            for _ in range(times):
                tuning.rewrite(copy, arch, configs.TABLES[arch], "a card")
            text = copy.read_text()
        module = {"__name__": "rewritten", "dataclasses": dataclasses}
        exec(compile(text, "configs.py", "exec"), module)
        return text, module["TABLES"]

    @parametrize("arch", list(configs.TABLES))
    def test_a_rewritten_table_has_the_same_entries(self, arch):
        text, tables = self.rewritten(arch)
        for name, table in configs.TABLES.items():
            self.assertEqual(repr(dict(tables[name])), repr(dict(table)))
        self.assertIn("measured on a card.", text)
        self.assertEqual(self.rewritten(arch, times=2)[0], text)

    def check_left_as_it_is(self, error, table):
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / "configs.py"
            shutil.copy(KERNELS / "configs.py", copy)
            before = copy.read_text()
            with self.assertRaises(error):
                tuning.rewrite(copy, "sm_90", table, "a card")
            self.assertEqual(copy.read_text(), before)
            self.assertEqual(os.listdir(folder), ["configs.py"])

    def test_rewrite_refuses_a_bad_table_and_leaves_the_file(self):
        good = dict(configs.TABLES["sm_90"])
        seven = tuple(CONFIG(64, 64, 64, 4, stages) for stages in range(2, 9))
        for kernel, entry in (
            ("down", seven),
            ("down", ()),
            ("down", (TILE, TILE)),
            ("weight_grad", (dataclasses.replace(TILE, max_rows=8),)),
        ):
            self.check_left_as_it_is(ValueError, {**good, kernel: entry})

    def test_a_crash_while_writing_leaves_the_file(self):
        with mock.patch.object(os, "replace", side_effect=KeyboardInterrupt):
            self.check_left_as_it_is(KeyboardInterrupt, configs.TABLES["sm_90"])

    def test_an_unknown_architecture_leaves_the_file(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / "configs.py"
            copy.write_text("nothing\n")
            with self.assertRaisesRegex(ValueError, "has no table sm_90"):
                tuning.rewrite(copy, "sm_90", configs.TABLES["sm_90"], "a card")
            self.assertEqual(copy.read_text(), "nothing\n")


class TestTuner(TestCase):
    def result(
        self, ms, config=TILE, shape="a", columns=512, rows=512.0, kernel="down"
    ):
        return tuning.Result(kernel, shape, columns, rows, config, ms)

    def test_keeps_the_fastest_over_all_shapes(self):
        slow_on_one = CONFIG(64, 64, 32, 4, 2)
        results = [
            self.result(1.0, shape="a"),
            self.result(1.1, shape="b"),
            self.result(0.9, slow_on_one, shape="a"),
            self.result(3.0, slow_on_one, shape="b"),
        ]
        entry = tuning.choose("down", results, (TILE, slow_on_one), 64)
        self.assertEqual(entry[0], TILE)

    def test_separates_decoding_and_widths(self):
        few, narrow, wide = (CONFIG(64, 64, 64, 4, n) for n in (2, 3, 4))
        results = [
            *(self.result(ms, c, "d", 512, 4.0) for c, ms in ((few, 1), (narrow, 2))),
            *(self.result(ms, c, "n", 256) for c, ms in ((narrow, 1), (wide, 2))),
            *(self.result(ms, c, "w", 2048) for c, ms in ((narrow, 2), (wide, 1))),
        ]
        entry = tuning.choose("down", results, (TILE,), 64)
        self.assertEqual(entry[0], dataclasses.replace(few, max_rows=64))
        self.assertEqual(entry[1], dataclasses.replace(narrow, max_columns=256))
        self.assertEqual(entry[2:], (wide, TILE))
        table = dict.fromkeys(configs.KERNELS, entry)

        def choose(num_columns, density):
            return configs.fitting_configs(table, "down", num_columns, 64, density)[0]

        self.assertIs(choose(512, 4.0), entry[0])
        self.assertIs(choose(256, 512.0), entry[1])
        self.assertIs(choose(2048, 512.0), entry[2])
        self.assertEqual(choose(16, 512.0), TILE)

    def test_backward_kernels_do_not_depend_on_the_number_of_rows(self):
        results = [self.result(1.0, rows=1.0, kernel="weight_grad")]
        entry = tuning.choose("weight_grad", results, (TILE,), 64)
        self.assertEqual(entry, (TILE,))

    def test_nothing_measured_keeps_the_committed_entry(self):
        self.assertEqual(tuning.choose("down", [], (TILE,), 64), (TILE,))
        refused = [self.result(None)]
        self.assertEqual(tuning.choose("down", refused, (TILE,), 64), (TILE,))

    def test_never_more_than_the_limit(self):
        results = [
            self.result(1.0, CONFIG(64, 64, 64, 4, n + 2), f"s{n}", 64 << n)
            for n in range(9)
        ]
        entry = tuning.choose("down", results, (TILE,), 64)
        self.assertLessEqual(len(entry), configs.MAX_CONFIGS)
        self.assertEqual(entry[-1], TILE)

    def test_refuses_what_must_not_ship(self):
        class Compiled:
            def __init__(self, spills, shared):
                self.n_spills = spills
                self.metadata = mock.Mock(shared=shared)

        seen = [Compiled(0, 100)]
        self.assertEqual(tuning.problem(seen, 200), "")
        seen.append(Compiled(0, 300))
        self.assertIn("300 bytes of shared memory", tuning.problem(seen, 200))
        self.assertIn("4 spilled registers", tuning.problem([Compiled(4, 0)], 200))

        def fails(plan):
            raise RuntimeError("out of resource")

        launches, refused = tuning.try_candidate(fails, plan_of(TILE), 1)
        self.assertEqual(launches, [])
        self.assertIn("out of resource", refused)

    def test_candidates_are_distinct_and_begin_with_the_table(self):
        for table in configs.TABLES.values():
            for kernel in configs.KERNELS:
                found = tuning.candidates(table, kernel, limit=14)
                self.assertEqual(len(set(found)), len(found))
                self.assertLessEqual(len(found), 14)
                committed = {tuning._plain(c) for c in table[kernel]}
                self.assertEqual(set(found[: len(committed)]), committed)


class TestAutotuner(TestCase):
    def test_measures_once_and_remembers(self):
        slow, fast = TILE, CONFIG(16, 16, 16, 4, 2)
        launched = []
        times = {slow: 2.0, fast: 1.0}

        def measure(function):
            function()
            return times[launched[-1]]

        tuner = autotune.Autotuner(measure, is_capturing=lambda: False)
        for _ in range(2):
            chosen = tuner.choose("problem", (slow, fast), launched.append)
            self.assertEqual(chosen, fast)
        self.assertEqual(launched, [slow, fast])
        tuner.clear()
        tuner.choose("problem", (slow, fast), launched.append)
        self.assertEqual(len(launched), 4)

    def test_the_device_is_busy_until_a_call_is_queued(self):
        # Otherwise the time of a short kernel would be that of its launch.
        log = []

        def event(enable_timing):
            return mock.Mock(
                record=lambda: log.append("event"), elapsed_time=lambda end: 2.0
            )

        with (
            mock.patch.object(torch.cuda, "Event", event),
            mock.patch.object(torch.cuda, "_sleep", lambda n: log.append("busy")),
        ):
            ms = autotune.measure_ms(lambda: log.append("call"))
        self.assertEqual(ms, 2.0)
        self.assertEqual(log, ["call", *["busy", "event", "call", "event"] * 5])

    def test_passes_over_what_does_not_fit(self):
        def measure(function):
            raise torch.OutOfMemoryError("no memory")

        tuner = autotune.Autotuner(measure, is_capturing=lambda: False)
        chosen = tuner.choose("problem", (TILE, CONFIG(16, 16, 16, 4, 2)), print)
        self.assertEqual(chosen, TILE)

    def test_measures_nothing_while_a_graph_is_captured(self):
        tuner = autotune.Autotuner(
            lambda function: self.fail("measured"), is_capturing=lambda: True
        )
        configurations = (TILE, CONFIG(16, 16, 16, 4, 2))
        self.assertEqual(tuner.choose("problem", configurations, print), TILE)

    def test_forgets_before_it_grows_without_bound(self):
        tuner = autotune.Autotuner(lambda function: 1.0, is_capturing=lambda: False)
        configurations = (TILE, CONFIG(16, 16, 16, 4, 2))
        with mock.patch.object(autotune, "MAX_PROBLEMS", 3):
            for problem in range(10):
                tuner.choose(problem, configurations, print)
                self.assertLessEqual(len(tuner._chosen), 3)

    def test_is_off_unless_asked_for(self):
        with mock.patch.dict(os.environ):
            os.environ.pop(autotune.ENVIRONMENT_VARIABLE, None)
            self.assertFalse(autotune.is_enabled())
            os.environ[autotune.ENVIRONMENT_VARIABLE] = "1"
            self.assertTrue(autotune.is_enabled())

    def test_the_layer_has_the_same_bits_with_it(self):
        entries = (TILE, dataclasses.replace(TILE, block_m=16, block_n=16))
        case = checks.generators.MoeCase("wide", dim=32, hidden=32)
        args = case.operands(torch.bfloat16).args()
        tried = []

        def measure(function):
            function()
            tried.append(None)
            return 1.0 / len(tried)  # the last one tried is the fastest

        tuner = autotune.Autotuner(measure, is_capturing=lambda: False)
        with exact_floats():
            experts = launch.Experts(*args, act=checks.ACT)
            plain = launch.moe_mlp_forward(plan_of(*entries), experts)
            plan = dataclasses.replace(plan_of(*entries), autotuner=tuner)
            tuned = launch.moe_mlp_forward(plan, experts)
        self.assertEqual(tuned, plain, atol=0, rtol=0)
        self.assertEqual(len(tried), 4)
        self.assertEqual(set(tuner._chosen.values()), {entries[1]})


class _Broken:
    """In place of a kernel."""

    def __init__(self, kernel):
        self.__name__, self.arg_names = kernel.__name__, kernel.arg_names

    def __getitem__(self, grid):
        raise RuntimeError("planted")


def module_with(kernel):
    """The module of the launcher that launches ``kernel``."""
    name = "rows" if kernel == "zero_tail_kernel" else "matmuls"
    return sys.modules[f"{launch.__package__}.{name}"]


class TestFamilies(TestCase):
    def check(self, *names, plan=None):
        plan = plan_of(TILE) if plan is None else plan
        with exact_floats():
            device = torch.device("cpu")
            return [checks.check_family(name, plan, device) for name in names]

    @parametrize(
        "kernel,family,others",
        [
            ("up_kernel", "up", ("down",)),
            ("grouped_mm_kernel", "down", ("up", "act_backward")),
            ("act_backward_kernel", "act_backward", ("input_grad", "weight_grad")),
            ("weight_grad_kernel", "weight_grad", ("act_backward", "input_grad")),
        ],
    )
    def test_a_broken_kernel_is_its_family_and_no_other(self, kernel, family, others):
        module = module_with(kernel)
        broken = _Broken(getattr(module, kernel))
        with mock.patch.object(module, kernel, broken):
            row, *rows = self.check(family, *others)
        self.assertFalse(row["ok"])
        for error in row["failed"].values():
            self.assertIn("planted", error)
        self.assertEqual(set(row["failed"]), set(checks.REHEARSAL_CASES))
        for row in rows:
            self.assertTrue(row["ok"], row)

    def test_what_a_kernel_does_not_write_is_found(self):
        class Silent(_Broken):
            def __getitem__(self, grid):
                return lambda *args, **kwargs: None

        for kernel, family in (
            ("act_backward_kernel", "act_backward"),
            ("zero_tail_kernel", "up"),
            ("weight_grad_kernel", "weight_grad"),
        ):
            module = module_with(kernel)
            silent = Silent(getattr(module, kernel))
            with mock.patch.object(module, kernel, silent):
                (row,) = self.check(family)
            self.assertIn("error nan", row["failed"]["aligned_tail"])

    def test_a_wrong_kernel_is_found(self):
        right = launch.moe_mlp_forward

        def wrong(*args, **kwargs):
            output, preact = right(*args, **kwargs)
            return output * 1.1, preact

        with mock.patch.object(launch, "moe_mlp_forward", wrong):
            row, other = self.check("up", "act_backward")
        self.assertIn("output: error", row["failed"]["ragged"])
        self.assertTrue(other["ok"], other)

    def test_every_kernel_of_the_tables_is_in_a_family(self):
        launched = {family.launched for family in checks.FAMILIES.values()}
        self.assertEqual(launched - {None}, set(checks._MATMULS))
        recipes = {family.recipe for family in checks.FAMILIES.values()} - {None}
        self.assertEqual(len(recipes), 3)

    def test_a_torch_without_the_kernels_in_fp8(self):
        with mock.patch.object(checks.loading, "NO_SCALED", "no such module"):
            (row,) = self.check("mxfp8")
            self.assertEqual(checks.exercise(["quantize"], None, None), {})
        self.assertEqual((row["ok"], row["absent"]), (True, "no such module"))


class TestKernels(TestCase):
    def test_what_is_compiled_ahead_is_what_runs(self):
        # Kernels that the interpreter has taken have no parameters that are constants.
        run = subprocess.run(
            [sys.executable, "-c", SPECIALISATIONS],
            capture_output=True,
            text=True,
            cwd=MOE_BENCHMARKS,
            env={**os.environ, "TRITON_INTERPRET": "0"},
        )
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        ahead, running = json.loads(run.stdout.splitlines()[-1])
        self.assertGreater(len(running), 12)
        self.assertEqual(set(running) - set(ahead), set())

    def test_predictions_name_the_kernels_of_a_layer(self):
        for row in kernels.predictions():
            parts = {name.rsplit(" warps")[0].rsplit(" ", 1)[0] for name in row["us"]}
            needed = {"up", "down", "act_backward", "input_grad", "dw_in", "dw_out"}
            self.assertEqual(needed - parts, set(), row["family"])
            self.assertIsNotNone(row["layer"]["forward_us"])
        families = [row["family"] for row in kernels.predictions()]
        self.assertEqual(families.count("layer"), 5)
        self.assertEqual(set(families), {"layer", *kernels.SCALED_PREFIX})

    def test_the_worst_are_different_kernels(self):
        def row(shape, **ratios):
            found = [{"kernel": k, "us": 1.0, "ratio": r} for k, r in ratios.items()]
            return {
                "shape": shape,
                "family": "layer",
                "kernels": [*found, {"kernel": "x"}],
            }

        rows = [row("a", up=1.5, down=1.1, dw_in=0.9, dw_out=1.2), row("b", up=1.6)]
        rows.append({"shape": "c", "failed": "died"})
        expected = [
            ("b", "layer", "up"),
            ("a", "layer", "dw_out"),
            ("a", "layer", "down"),
        ]
        self.assertEqual(kernels.worst(rows), expected)

    def test_metrics_of_ncu(self):
        log = (
            "==PROF== Connected\n"
            '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
            '"0","up_kernel","DRAM Throughput","%","61.5"\n'
            '"0","up_kernel","","",""\n'
        )
        self.assertEqual(kernels.ncu_metrics(log), {"DRAM Throughput": "61.5 %"})


SPECIALISATIONS = """
import json, sys
sys.path.insert(0, ".")
import torch
import gpu_lab
from lab import checks, kernels, loading
from shapes import REHEARSAL
plan, cpu, keys = gpu_lab.rehearsal_plan(), torch.device("cpu"), ([], [])
collect = [lambda one, k=k: k.append(kernels._specialisation(one)) for k in keys]
failed = kernels.walk(plan, cpu, ["layer", "fp8_rowwise"], REHEARSAL, collect[0])
assert not failed, failed
loading.use_quantizer(loading.reference_quantizer)
hooked = loading.hooked(plan, collect[1])
for name in ("layer", "fp8_rowwise"):
    for case in checks.cases_of(name, cpu):
        kernels.run_layer(hooked, case.operands(torch.bfloat16, bias=True), name)
print(json.dumps(keys))
"""


class TestRobustness(TestCase):
    def test_a_row_says_how_it_ended(self):
        for status, log, expected in (
            ("longer than 850 s", "", "longer than 850 s"),
            ("died of SIGSEGV", "Timeout (0:12:00)!", "died of SIGSEGV"),
            ("exit status 1", "Timeout (0:00:45)!", "longer than 45 s"),
        ):
            rows = [{"failed": {"row": "died"}}]
            run = argparse.Namespace(report={})
            outcome = argparse.Namespace(status=status, log=log, result={"rows": rows})
            gpu_lab.Run.add_rows(run, outcome)
            self.assertEqual(run.report["rows"][0]["failed"], {"row": expected})

    def test_rounds_shrink_before_rows_do(self):
        budget = gpu_lab.Budget(10)
        self.assertEqual(budget.rounds(1e-3, 10, 20), 20)
        self.assertEqual(budget.rounds(0.1, 10, 20), 9)
        self.assertEqual(gpu_lab.Budget(-1).rounds(0.1, 10, 20), 3)

    def test_a_peer_that_fails_when_repeated_leaves_its_row(self):
        shape, plan = shapes.REHEARSAL[0], plan_of(TILE)
        options = argparse.Namespace(
            rounds=3, compiled_peers=False, hung=["weight_grad"]
        )
        budget = gpu_lab.Budget(60)
        device = torch.device("cpu")
        lab = gpu_lab.Lab(options, device, plan, "", "sm_90", 0, (shape,), budget)

        def fails_at(call):
            calls = []

            def flaky(*args):
                calls.append(None)
                if len(calls) == call:
                    raise torch.OutOfMemoryError("planted")
                return lab_layer.layer(*args)

            return flaky

        names = {
            peers.OURS: lab_layer.layer,
            "twice": fails_at(2),
            "later": fails_at(4),
        }
        stored = operator.methodcaller("stored")
        found = [peers.Peer(name, "", call, stored) for name, call in names.items()]
        lab_layer.use_plan(plan)
        with (
            exact_floats(),
            mock.patch.object(peers, "make_peers", return_value=(found, {})),
        ):
            row = gpu_lab.time_row(lab, shape, (1e9, 1e12), [], 1)
        self.assertIn("planted", row["failed"]["twice/forward"])
        self.assertIn("planted", row["failed"]["later/step"])
        # Kernels of the backward hung before: ours is not launched again.
        names = {name for name in row["ms"] if "graph" not in name}
        self.assertEqual(names, {"later/forward", "ours/forward", "twice/step"})

    def test_peers_that_cannot_be_imported_are_named(self):
        with tempfile.TemporaryDirectory() as folder:
            package = pathlib.Path(folder) / "checkout/scattermoe"
            package.mkdir(parents=True)
            (package / "__init__.py").write_text("raise OSError('no CUDA here')\n")
            path = list(sys.path)
            try:
                found, missing = peers.find_libraries(pathlib.Path(folder))
            finally:
                sys.path[:] = path
        self.assertNotIn("scattermoe", found)
        self.assertIn("no CUDA here", missing["scattermoe"])

    def test_libraries_are_called_as_they_are_meant(self):
        # Stand-ins with the signatures of the libraries.
        class Function:
            @staticmethod
            def apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
                assert top_k_index.dtype == torch.int32
                args = (x, top_k_index.long(), top_k_weights, gate_up_proj, down_proj)
                return peers.sorted_grouped_mm(*args)

        def fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, inplace=False):
            return Function.apply(hidden_states, w1, w2, topk_ids, topk_weights)

        modules = {}
        for name in (
            "liger_kernel.ops.fused_moe",
            "vllm.model_executor.layers.fused_moe",
        ):
            parts = name.split(".")
            for i in range(len(parts)):
                modules[".".join(parts[: i + 1])] = types.ModuleType(parts[i])
            modules[name].LigerFusedMoEFunction = Function
            modules[name].fused_experts = fused_experts
        shape = shapes.REHEARSAL[0]
        operands = shapes.make_operands(shape, torch.device("cpu"))
        with mock.patch.dict(sys.modules, modules):
            names, missing = peers.find_libraries(None)
            found, failed = peers.make_peers(shape, gpu_lab.NOT_ON_GPU, libraries=names)
        self.assertEqual((names, failed), (["liger", "vllm"], {}))
        self.assertEqual(set(missing), {"ours_cutedsl", "scattermoe", "sonicmoe"})
        calls = {p.name: p for p in found}
        x, ids, weights = operands.layer_args()[:3]
        with torch.no_grad():
            expected = calls[peers.OURS].call(x, ids, weights, *operands.stored())
            for name in names:
                leaves = calls[name].leaves(operands)
                output = calls[name].call(x, ids, weights, *leaves)
                self.assertEqual(output, expected, atol=2e-2, rtol=2e-2)
        with self.assertRaisesRegex(NotImplementedError, "no backward"):
            calls["vllm"].call(x, ids, weights, *operands.stored())


class TestCutedsl(TestCase):
    def test_the_cute_backend_is_a_peer(self):
        from test_moe_cutedsl import LoopGemms

        gemms = {"moe_kernels.cutedsl_kernels.gemms": LoopGemms()}
        shape = shapes.REHEARSAL[0]
        operands = shapes.make_operands(
            shape, torch.device("cpu"), weights_dtype=torch.float32
        )
        plan = plan_of(TILE)
        with (
            mock.patch.dict(sys.modules, gemms),
            mock.patch.object(lab_layer, "_plan", plan),
            exact_floats(),
        ):
            names, missing = peers.find_libraries(None)
            self.assertIn("ours_cutedsl", names, missing)
            found, _ = peers.make_peers(shape, libraries=["ours_cutedsl"])
            ours, cute = found[0], found[-1]
            results = []
            for peer in (ours, cute):
                x, ids, weights = operands.layer_args()[:3]
                leaves = peer.leaves(operands)
                output = peer.call(x, ids, weights, *leaves)
                inputs = (x, weights, *leaves)
                grads = torch.autograd.grad(output, inputs, operands.grad)
                results.append([output, *grads])
        E, width, D = operands.w_in.shape
        interleaved = results[1][3].view(E, width // 2, 2, D)
        results[1][3] = interleaved.transpose(1, 2).reshape(E, width, D)
        for expected, found in zip(*results, strict=True):
            self.assertEqual(found, expected, atol=5e-2, rtol=5e-2)
        (called,) = (g.called for g in gemms.values())
        self.assertEqual(len(set(called)), 5)


class TestLayer(TestCase):
    """The layer on the launchers alone, for an older torch."""

    def setUp(self):
        super().setUp()
        context = exact_floats()
        context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        lab_layer.use_plan(plan_of(TILE))

    def test_layer_and_gradients(self):
        shape = shapes.Shape("layer", 12, 32, 16, 4, 2)
        operands = shapes.make_operands(shape, torch.device("cpu"))
        output = lab_layer.layer(*operands.layer_args())
        grads = torch.autograd.grad(output, operands.leaves(), operands.grad)
        x, ids, weights, w_in, w_out = operands.layer_args()
        expected = torch.nn.functional.moe_mlp(x, ids, weights, w_in, w_out)
        truth = torch.autograd.grad(expected, operands.leaves(), operands.grad)
        self.assertEqual(output, expected, atol=2e-2, rtol=2e-2)
        for grad, other in zip(grads, truth):
            self.assertEqual(grad, other, atol=5e-2, rtol=5e-2)

    def test_frozen_operands_cost_no_gradient(self):
        shape = shapes.Shape("frozen", 6, 32, 16, 4, 2)
        operands = shapes.make_operands(shape, torch.device("cpu"))
        x, ids, weights, w_in, w_out = operands.layer_args()
        with mock.patch.object(
            launch, "moe_mlp_backward", wraps=launch.moe_mlp_backward
        ) as backward:
            output = lab_layer.layer(
                x, ids, weights.detach(), w_in.detach(), w_out.detach()
            )
            (grad,) = torch.autograd.grad(output, x, operands.grad)
        self.assertEqual(backward.call_args.args[-1], (True, *[False] * 6))
        self.assertEqual(grad.shape, x.shape)

    def test_no_preactivation_without_a_backward(self):
        operands = shapes.make_operands(shapes.REHEARSAL[1], torch.device("cpu"))
        with (
            mock.patch.object(
                launch, "moe_mlp_forward", wraps=launch.moe_mlp_forward
            ) as forward,
            torch.no_grad(),
        ):
            lab_layer.layer(*operands.layer_args())
        self.assertFalse(forward.call_args.kwargs["compute_preact"])

    def test_needs_a_plan(self):
        lab_layer.use_plan(None)
        operands = shapes.make_operands(shapes.REHEARSAL[1], torch.device("cpu"))
        with self.assertRaisesRegex(RuntimeError, "use_plan"):
            lab_layer.layer(*operands.layer_args())


instantiate_parametrized_tests(TestFamilies)
instantiate_parametrized_tests(TestTables)

if __name__ == "__main__":
    run_tests()
