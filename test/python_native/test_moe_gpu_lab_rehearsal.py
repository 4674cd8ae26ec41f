# Owner(s): ["module: dsl-native-ops"]
"""Whole runs of benchmarks/moe/gpu_lab.py, rehearsed on a CPU in Triton's interpreter.

Also as on the machine that it is for: from a bare copy, under an older torch and Triton, with kernels
that hang, fault, are wrong or do not compile.
"""

import ast
import ctypes
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import torch
from torch.testing._internal.common_utils import run_tests, slowTest, TestCase


MOE_BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks/moe"
SCRIPT = MOE_BENCHMARKS / "gpu_lab.py"
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(MOE_BENCHMARKS))
import gpu_lab
import peers
import shapes
from lab import jobs
from lab.loading import configs, KERNELS


def rehearse(*arguments):
    """Runs the script; its exit status is checked."""
    command = [sys.executable, str(SCRIPT), "--rehearse", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        raise AssertionError(run.stdout + run.stderr)
    return run.stdout


def table_text(text, arch):
    return text.split(f"# --- table {arch}\n")[1].split("# --- end of table")[0]


class TestWithoutGpu(TestCase):
    @unittest.skipIf(torch.cuda.is_available(), "a GPU is here")
    def test_says_so_before_it_writes(self):
        with tempfile.TemporaryDirectory() as folder:
            for more in ((), ("--tune", "down")):
                output = pathlib.Path(folder) / "run.json"
                command = [sys.executable, SCRIPT, "--output", output, *more]
                run = subprocess.run(command, capture_output=True, text=True)
                self.assertEqual(run.returncode, 2, run.stderr)
                self.assertIn("gpu_lab.py: no GPU here; --rehearse", run.stderr)
                self.assertNotIn("Traceback", run.stdout + run.stderr)
                self.assertEqual(os.listdir(folder), [])


class TestRehearsal(TestCase):
    def test_check_and_time(self):
        families = ["topk", "up", "layer", "quantize"]
        names = [shape.name for shape in shapes.REHEARSAL]
        with tempfile.TemporaryDirectory() as folder:
            output = pathlib.Path(folder) / "run.json"
            only = ("--only", *families, *names)
            printed = rehearse("--rounds", 1, *only, "--output", output)
            report = json.loads(output.read_text())
            page = output.with_suffix(".txt").read_text()
            picture = output.with_suffix(".png").read_bytes()
            self.assertIn("--- check/up: ok", output.with_suffix(".log").read_text())
        self.assertTrue(printed.endswith(page))
        self.assertIn("A REHEARSAL", page)
        self.assertLessEqual(max(map(len, page.splitlines())), 120)
        self.assertLess(len(page.splitlines()), 66)  # one page
        self.assertEqual(picture[:4], b"\x89PNG")
        self.assertEqual([row["family"] for row in report["checks"]], families)
        for row in (*report["checks"], *report["repeatable"]):
            self.assertTrue(row["ok"], row)
        self.assertEqual(report["not_ok"], {})
        self.assertEqual(set(report["stages"]), {*gpu_lab.STAGES} - {"ncu"})
        self.assertGreater(len(report["compiled"]), 3)
        for row in report["compiled"]:
            self.assertEqual(row["compiled"], "ok", row)
        self.assertEqual(report["sanitizer"]["memcheck"]["failed"], {})
        self.assertIn("layer", report["sanitizer"]["memcheck"]["ran"])
        self.assertIn("memcheck: ok, the interpreter's own checks, not", page)
        (kernels_row,) = report["kernels"]
        found = {row["kernel"] for row in kernels_row["kernels"]}
        expected = {"up", "down", "act_backward", "input_grad", "dw_in", "dw_out"}
        self.assertEqual(expected - found, set())
        self.assertEqual([row["shape"]["name"] for row in report["rows"]], names)
        for row in report["rows"]:
            for name in ("ours", "three_grouped_mm", "transformers_grouped_mm"):
                for kind in ("forward", "step"):
                    self.assertGreater(row["ms"][f"{name}/{kind}"], 0)
            for name in ("three_grouped_mm", "transformers_grouped_mm"):
                self.assertLess(row["relative_distance_to_ours"][name], 2e-2)
            self.assertGreater(row["bound_ms"]["step"], row["bound_ms"]["forward"])
        self.assertIn("ours_graph/forward", report["rows"][1]["ms"])
        for name in peers.LIBRARIES:
            self.assertIn(name, report["peers"]["absent"])
        self.assertIn("of bound", printed)
        self.assertIn("--rehearse", report["command"])

    @slowTest
    def test_tune_rewrites_the_table(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder) / "configs.py"
            shutil.copy(KERNELS / "configs.py", copy)
            output = pathlib.Path(folder) / "tune.json"
            rehearse(
                "--tune", "all", "--rounds", 1, "--configs", copy, "--output", output,
            )  # fmt: skip
            text, report = copy.read_text(), json.loads(output.read_text())
            self.assertEqual(sorted(os.listdir(folder)), ["configs.py", "tune.json"])
        module = {"__name__": "tuned", "dataclasses": dataclasses}
        exec(compile(text, "configs.py", "exec"), module)
        tuned = module["TABLES"]["sm_90"]
        self.assertEqual(set(tuned), set(configs.KERNELS))
        for kernel, entry in tuned.items():
            self.assertLessEqual(len(entry), configs.MAX_CONFIGS)
            forward = kernel in configs.FORWARD_KERNELS
            self.assertEqual(any(c.max_rows for c in entry), forward, kernel)
            self.assertIn(f'"{kernel}"', report["table"])
            measured = [r for r in report["results"] if r["kernel"] == kernel]
            self.assertTrue(all(r["ms"] > 0 for r in measured), measured)
            self.assertEqual(len(measured), 6 if forward else 3, kernel)
        self.assertIn("measured on interpreter, torch", text)
        # The other architectures are as they were.
        original = (KERNELS / "configs.py").read_text()
        for arch in ("sm_80", "sm_100", "gfx942"):
            self.assertEqual(table_text(text, arch), table_text(original, arch))
        self.assertNotEqual(table_text(text, "sm_90"), table_text(original, "sm_90"))


# What the machine that the lab is for has, and the numpy with which Triton 3.6 interprets.
REQUIREMENTS = ("torch==2.11.0", "triton==3.6.0", "numpy<2.4")
# kernel -> its file, and a line that its body begins with.
FAULTS = {
    "quantize_kernel": ("quantize.py", "while True: pass"),
    "scaled_weight_grad_kernel": ("scaled_backward.py", "no_such_name()"),
    "topk_kernel": ("topk.py", "tl.store(topk_weights + (1 << 44), 1.0)"),
    "act_backward_kernel": ("backward.py", "top_k = top_k + 1"),
}
FAILING = {
    "quantize": "longer than",
    "topk": "died of SIGSEGV",
    "act_backward": "error",
    "layer": "error",
    "gpt_oss": "error",
    "fp8_blockwise": "no_such_name",
    "fp8_rowwise": "no_such_name",
    "mxfp8": "no_such_name",
}


def older_python():
    """A Python with REQUIREMENTS: that of MOE_LAB_PYTHON, or an environment that is kept."""
    if given := os.environ.get("MOE_LAB_PYTHON"):
        return given
    folder = pathlib.Path(tempfile.gettempdir()) / "moe_gpu_lab_torch_2_11"
    python, complete = folder / "bin/python", folder / "complete"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        for command in (
            [sys.executable, "-m", "venv", folder],
            [python, "-m", "pip", "install", "--quiet", *REQUIREMENTS],
        ):
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode != 0:
                why = (run.stderr.strip().splitlines() or ["no message"])[-1]
                raise unittest.SkipTest(f"{REQUIREMENTS} cannot be installed: {why}")
        complete.touch()
    return python


def plant(kernels: pathlib.Path, kernel: str, file: str, line: str) -> None:
    path = kernels / file
    text = path.read_text()
    (function,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == kernel
    )
    lines = text.splitlines()
    first = function.body[1]  # behind the docstring
    lines.insert(first.lineno - 1, f"{' ' * first.col_offset}{line}")
    path.write_text("\n".join(lines) + "\n")


class TestBareMachine(TestCase):
    @slowTest
    def test_planted_faults_are_named_and_cost_nothing_else(self):
        python, root = older_python(), MOE_BENCHMARKS.parents[1]
        with tempfile.TemporaryDirectory() as folder:
            bare, output = (
                pathlib.Path(folder) / "bare",
                pathlib.Path(folder) / "a.json",
            )
            for part in (
                "benchmarks/moe",
                "torch/_native/ops/moe",
                "torch/testing/_internal",
                "test/python_native",
            ):
                ignore = shutil.ignore_patterns("__pycache__", "clients")
                shutil.copytree(root / part, bare / part, ignore=ignore)
            for kernel, fault in FAULTS.items():
                plant(bare / "torch/_native/ops/moe/triton_kernels", kernel, *fault)
            command = [python, bare / "benchmarks/moe/gpu_lab.py", "--rehearse"]
            command += ["--rounds", "1", "--budget", "1500", "--output", output]
            run = subprocess.run(command, capture_output=True, text=True)
            self.assertEqual(run.returncode, 1, run.stderr)  # something failed
            self.assertTrue(output.exists(), run.stderr)
            report = json.loads(output.read_text())
            page = output.with_suffix(".txt").read_text()
        self.assertEqual(report["torch"].split("+")[0], "2.11.0")
        self.assertEqual(report["triton"], "3.6.0")
        rows = {row["family"]: row for row in report["checks"]}
        self.assertEqual(set(rows), set(gpu_lab.checks.FAMILIES))
        for family, row in rows.items():
            if family not in FAILING:
                self.assertTrue(row["ok"], row)
                continue
            self.assertFalse(row["ok"], family)
            self.assertIn(FAILING[family], str(row["failed"]), family)
            self.assertIn(f"FAILED {family}", page)
        sanitizer = report["sanitizer"]["memcheck"]
        self.assertIn("store out of bounds", sanitizer["failed"]["topk"])
        self.assertNotIn("quantize", sanitizer["ran"])  # it would hang again
        self.assertIn("layer", sanitizer["ran"])
        self.assertEqual([row["ok"] for row in report["repeatable"]], [True])
        self.assertIn("up", [row["kernel"] for row in report["kernels"][0]["kernels"]])
        for row in report["rows"]:
            for name in ("ours", "three_grouped_mm"):
                self.assertGreater(row["ms"][f"{name}/step"], 0)


class TestJobs(TestCase):
    def run_jobs(self, *parts, limit_s=20, **options):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            todo = [jobs.Job(f"{i}/{p}", limit_s, p) for i, p in enumerate(parts)]
            outcomes = list(jobs.run_jobs(todo, folder, **options))
        return {o.job.run: o for o in outcomes}

    def test_each_end_is_told_from_the_others(self):
        def good(save):
            save({"a": 1})
            return {"a": 2}

        def raises(save):
            save({"running": "zipf"})
            raise ValueError("planted")

        def faults(save):
            ctypes.string_at(0)

        outcomes = self.run_jobs(good, raises, faults, parallel=2)
        self.assertEqual(
            (outcomes[good].status, outcomes[good].result), ("ok", {"a": 2})
        )
        self.assertEqual(outcomes[raises].status, "exit status 1")
        self.assertEqual(outcomes[raises].result, {"running": "zipf"})
        self.assertIn("ValueError: planted", outcomes[raises].excerpt)
        self.assertEqual(outcomes[faults].status, "died of SIGSEGV")
        self.assertIn("in faults", outcomes[faults].excerpt)

    def test_a_hang_ends_with_all_that_it_started(self):
        def hangs(save):
            sleeper = subprocess.Popen(["sleep", "600"])
            save({"pid": sleeper.pid})
            time.sleep(600)

        outcome = self.run_jobs(hangs, limit_s=6)[hangs]
        self.assertEqual(outcome.status, "longer than 6 s")
        self.assertIn("in hangs", outcome.excerpt)  # where it was
        self.assertFalse(is_running(outcome.result["pid"]))

    def test_what_a_part_leaves_behind_is_ended(self):
        def leaves(save):
            save({"pid": subprocess.Popen(["sleep", "600"]).pid})

        outcome = self.run_jobs(leaves)[leaves]
        self.assertEqual(outcome.status, "ok")
        self.assertFalse(is_running(outcome.result["pid"]))

    def test_a_run_that_is_killed_leaves_nothing_behind(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)

            def hangs(save):
                save({"pid": os.getpid()})
                time.sleep(600)

            job = jobs.Job("hangs", 60, hangs)
            run = os.fork()
            if run == 0:
                list(jobs.run_jobs([job], folder))
                os._exit(0)
            path = job.path(folder, ".json")
            while not path.exists():
                time.sleep(0.05)
            os.kill(run, signal.SIGKILL)
            os.waitpid(run, 0)
            pid, end = json.loads(path.read_text())["pid"], time.monotonic() + 10
            while is_running(pid) and time.monotonic() < end:
                time.sleep(0.05)
            self.assertFalse(is_running(pid))

    def test_nothing_begins_when_time_is_up(self):
        def sleeps(save):
            time.sleep(600)

        later = functools.partial(sleeps)
        outcomes = self.run_jobs(sleeps, later, end=time.monotonic() + 2)
        self.assertIn("longer than", outcomes[sleeps].status)
        self.assertIn("no time was left", outcomes[later].status)


def is_running(pid):
    """Whether it is there, and no zombie that nobody waits for."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


if __name__ == "__main__":
    run_tests()
