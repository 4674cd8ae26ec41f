# Owner(s): ["module: nn"]
"""Smoke tests of benchmarks/moe/cpu_ops.py: tiny rows, every form against float64, the JSON."""

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from unittest import mock

import torch
from torch.testing._internal.common_utils import run_tests, TestCase


_BENCHMARKS = pathlib.Path(__file__).resolve().parents[1] / "benchmarks" / "moe"
sys.path.insert(0, str(_BENCHMARKS))

import check
import cpu_ops
import cpu_router
import cpu_scaling
import peers
import report
import shapes
import train_demo

import measure
from demo import evidence
from demo.model import LanguageModel, ModelConfig


def tiny(name):
    rows = {row.id: row for row in shapes.QUICK_ROWS}
    return cpu_ops.measure_row(rows[name], cpu_ops.QUICK)


class TestCpuOps(TestCase):
    def _run(self, *arguments):
        self.assertEqual(cpu_ops.main(["--quick", *arguments]), 0)

    def test_quick_run(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "rows.json")
            self._run("--out", str(out))
            record = json.loads(out.read_text())
        rows = [row.id for row in shapes.QUICK_ROWS]
        self.assertEqual([row["id"] for row in record["rows"]], rows)
        for row in record["rows"]:
            self.assertIn(row["best_eager_peer"], row["forms"])
            for name, form in row["forms"].items():
                ratio = set() if name == peers.OURS else {"ratio_to_ours"}
                self.assertLessEqual(cpu_ops.FORM_KEYS | ratio, form.keys())
                self.assertLessEqual(form["error_over_allowed"], 1)
            eager = {n for n, f in row["forms"].items() if f["kind"] == "eager"}
            expected = {"moe_mlp", "loop_unbound"}
            expected |= {"transformers_grouped_mm", "transformers_batched_mm"}
            if "gpt_oss" not in row["id"]:
                expected |= {"recomputed_grouped_mm", "composite"}
            if not row["sweep"]:
                expected.add("transformers_eager")
                if "gpt_oss" not in row["id"]:
                    expected.add("three_grouped_mm")
            self.assertEqual(eager, expected)
            self.assertEqual(row["forms"].keys() & row["left_out"].keys(), set())

    def test_saved_bytes(self):
        # Invariant 3, and that a peer which gathers saves more.
        row = tiny("tiny/float32/forward+backward")
        T, D, F, E, K = row["shape"].values()
        ours = row["forms"]["moe_mlp"]["saved_bytes"]
        tensors = 4 * (T * D + 2 * T * K * F)
        self.assertGreaterEqual(ours, tensors)
        self.assertLessEqual(ours, tensors + 24 * T * K + 8 * E)
        peer = row["forms"]["transformers_grouped_mm"]["saved_bytes"]
        self.assertGreater(peer, tensors + 4 * T * K * D)

    def test_wrong_form_is_an_error(self):
        right = peers.three_grouped_mm

        def wrong(x, indices, weights, w1, w3, w_out):
            return right(x, indices, weights, w3, w1, w_out)

        with (
            mock.patch.object(peers, "three_grouped_mm", wrong),
            self.assertRaisesRegex(AssertionError, "y of .*three_grouped_mm .*error"),
        ):
            tiny("tiny/float32/forward")

    def test_wrong_weight_gradient_is_an_error(self):
        right = peers.loop_over_unbound_experts

        def wrong(x, indices, weights, w_in, w_out, **kwargs):
            return right(
                x, indices, weights, w_in, w_out.detach() + 0 * w_out, **kwargs
            )

        with (
            mock.patch.object(peers, "loop_over_unbound_experts", wrong),
            self.assertRaisesRegex(AssertionError, "dw_out of .*loop_unbound"),
        ):
            tiny("tiny/bfloat16/forward+backward")

    def test_a_missing_gradient_is_an_error(self):
        shape = shapes.QUICK_ROWS[0].shape
        operands = shapes.make_operands(shape, dtype=torch.float32)
        whole = check.Sample(torch.arange(shape.T), list(range(shape.E)))
        expected = check.truth(shape, operands, whole, backward=True)
        with self.assertRaisesRegex(AssertionError, "this gives .'y'., not"):
            actual = check.sampled(whole, operands.x, ())
            check.errors(actual, expected, torch.float32, "this")

    def test_without_the_clients_folder(self):
        path = [folder for folder in sys.path if not folder.endswith("clients")]
        modules = {k: v for k, v in sys.modules.items() if "transformers" not in k}
        modules["transformers"] = None  # as if it was not installed
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(peers, "__file__", str(pathlib.Path(folder, "p.py"))),
            mock.patch.object(sys, "path", path),
            mock.patch.dict(sys.modules, modules, clear=True),
        ):
            self.assertIsNone(peers.transformers_version())

    def test_some_rows(self):
        row = "tiny/bfloat16/forward"
        with tempfile.TemporaryDirectory() as folder:
            out = ["--out", folder + "/rows.json"]
            self._run(*out, "--rows", row, "tiny-decode*", "--rounds", "2")
            rows = json.loads(pathlib.Path(out[1]).read_text())["rows"]
        self.assertEqual([r["shape"]["T"] for r in rows], [24, 2])
        self.assertEqual(rows[0]["forms"]["moe_mlp"]["rounds"], 2)
        self.assertEqual(cpu_ops.main(["--quick", "--rows", "nothing"]), 2)

    def test_select(self):
        rows = shapes.CPU_ROWS + shapes.CLIENT_ROWS
        self.assertEqual(len({row.id for row in rows}), len(rows))
        self.assertEqual(shapes.select(rows, None), list(rows))
        chosen = shapes.select(rows, ["decode-*", "2048-1024-512-32-4/float32/forward"])
        self.assertEqual(len(chosen), 4)
        with self.assertRaisesRegex(ValueError, "--rows nothing matches none of"):
            shapes.select(rows, ["nothing"])

    def test_measure_is_a_module(self):
        for words in (["--help"], []):
            command = [sys.executable, measure.__file__, *words]
            run = subprocess.run(command, capture_output=True, text=True)
            self.assertEqual(run.returncode, 2)
            self.assertEqual(
                run.stderr, "measure.py: a module, without a command line of its own\n"
            )

    def test_median_interval(self):
        low, high, confidence = measure.median_interval(range(10))
        self.assertEqual((low, high), (1, 8))
        self.assertEqual(confidence, 1 - 2 * 11 / 1024)
        self.assertEqual(measure.median_interval([3.0, 1.0, 2.0])[:2], (1.0, 3.0))

    def test_forecast_for_more_threads(self):
        forms = {"moe_mlp": {"milliseconds": {"median": 96.0}}}
        row = {"bound": {"compute_milliseconds": 64.0}, "forms": forms}
        self.assertEqual(cpu_scaling.forecast(row, "moe_mlp", 64, 64), 1.5)
        self.assertEqual(cpu_scaling.forecast(row, "moe_mlp", 64, 16), 1 + 2)
        # The products beside it were slower than the call.
        forms["moe_mlp"]["milliseconds"]["median"] = 60.0
        self.assertEqual(cpu_scaling.forecast(row, "moe_mlp", 64, 16), 1.0)

    def test_bound(self):
        row = {row.id: row for row in shapes.QUICK_ROWS}["tiny/float32/forward"]
        T, D, F, E, K = row.shape.sizes().values()
        moved = 4 * (3 * 3 * D * F + 2 * T * D)
        self.assertEqual(row.shape.flops(), 2 * T * K * 3 * D * F)
        self.assertEqual(row.shape.compulsory_bytes(False, 3, 4), moved)
        bound = cpu_ops.Bound(row, 3, stream_bytes=1 << 26)
        measured = bound.rates(0)
        self.assertTrue(all(rate > 0 for rate in measured), measured)
        compute, memory = bound.seconds(1e9, 2e9)
        self.assertEqual(compute, row.shape.flops() / 1e9)
        self.assertEqual(memory, moved / 2e9)
        # Medians of the rounds' rates.
        entry = bound.record([(1e9, 1e9), (2e9, 1e9), (9e9, 1e9)])
        self.assertEqual(entry["compute_milliseconds"], 1e3 * compute / 2)
        self.assertEqual(entry["memory_milliseconds"], 1e3 * memory * 2)
        self.assertEqual(
            entry["milliseconds"],
            max(entry["compute_milliseconds"], entry["memory_milliseconds"]),
        )

    def test_rows_are_the_same_every_time(self):
        shape = shapes.QUICK_ROWS[0].shape
        first, second = (shapes.make_operands(shape) for _ in range(2))
        for a, b in zip(
            first.stored() + first.layer_args(), second.stored() + second.layer_args()
        ):
            self.assertEqual(a, b, atol=0, rtol=0)
        distinct = first.w_in.detach().flatten(1).unique(dim=0)
        self.assertEqual(len(distinct), shape.E)


class TestDemo(TestCase):
    """What the demo says of a layer; `stage.py run` trains one."""

    def test_evidence(self):
        config = ModelConfig(layers=2, d_model=32, experts=6, top_k=2, expert_hidden=16)
        torch.manual_seed(0)
        model = LanguageModel(config, peers.fused())
        samples = evidence.capture(model, torch.randint(256, (1, 40)))
        self.assertEqual(len(samples), 2)
        for block in peers.demo_blocks().values():
            errors = evidence.float64_errors(samples[0], block)
            self.assertEqual(len(errors), 5)
            self.assertLessEqual(check.largest_share(errors, "a block"), 1)
        saved = evidence.saved_by_experts(samples[1], peers.fused())
        self.assertTrue(saved.holds(), saved)
        unfused = evidence.saved_by_experts(samples[1], peers.demo_blocks()["unfused"])
        self.assertFalse(unfused.holds())

    def test_recorded_noise(self):
        differences = {"a - b": [1.0, 3.0], "a - c": [2.0], "fused - a": [9.0]}
        record = {"settings": {"steps": 8, "seed": 1}, "text": {"sha256": "a"}}
        record["differences"] = differences
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "demo.json")
            with mock.patch.object(train_demo, "RECORD", path):
                self.assertIsNone(train_demo.recorded_noise(8, 1, "a"))
                path.write_text(json.dumps(record))
                self.assertEqual(train_demo.recorded_noise(8, 1, "a"), 3.0)
                for other in (8, 0, "a"), (20, 1, "a"), (8, 1, "b"):
                    self.assertIsNone(train_demo.recorded_noise(*other))

    def test_what_takes_long_says_so(self):
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            mock.patch.object(report, "SAY_EVERY", 0.01),
            report.progress("Part", 2) as advance,
        ):
            advance("of it")
            time.sleep(0.5)
        lines = out.getvalue().splitlines()
        self.assertGreater(len(lines), 2)
        self.assertEqual(set(lines[1:]), {"Part: 1/2 of it"})

    def test_arguments(self):
        def refused(*words):
            with (
                contextlib.redirect_stderr(io.StringIO()) as said,
                self.assertRaises(SystemExit),
            ):
                report.parse(
                    "", argv=words, rounds=2, seed=0, table=report.existing_file
                )
            return said.getvalue()

        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "file.json")
            file.write_text("1")
            self.assertEqual(report.parse("", argv=["--out", str(file)]).out, file)
            for out in (file / "x.json", "/proc/x.json"):
                self.assertIn("--out: cannot write", refused("--out", str(out)))
            self.assertEqual(file.read_text(), "1")
            for name in ("new", "new.d/", "."):
                out = pathlib.Path(folder, name)
                found = report.parse("", argv=["--out", str(out)], name="a.json").out
                self.assertEqual(found, out / "a.json")
            self.assertEqual(sorted(os.listdir(folder)), ["file.json", "new", "new.d"])
        for words in (("--rounds", "0"), ("--seed", "-1"), ("--seed", "nan")):
            self.assertIn(f"argument {words[0]}", refused(*words))
        self.assertIn("no file 'missing'", refused("--table", "missing"))
        self.assertEqual(report.parse("", argv=["--seed", "0"], seed=1.0).seed, 0)

    def test_orders_of_experts_give_the_same(self):
        shape = shapes.QUICK_ROWS[0].shape
        operands = shapes.make_operands(shape, dtype=torch.float64)
        blocks = peers.training_blocks([None, [3, 1, 0, 2]])
        self.assertEqual(list(blocks), ["unfused", "unfused, order 2", "fused"])
        first, *others = (b.experts(*operands.layer_args()) for b in blocks.values())
        for other in others:
            self.assertEqual(other, first)


class TestCpuRouter(TestCase):
    def test_all_choose_the_same(self):
        logits = torch.randn(20, 16)
        expected = cpu_router.ROUTERS["moe_topk"](logits, 3)
        for router in cpu_router.ROUTERS.values():
            self.assertEqual(router(logits, 3), expected)

    def test_row(self):
        row = cpu_router.measure((4, 8, 2), rounds=3)
        self.assertEqual((row["T"], row["E"], row["k"]), (4, 8, 2))
        for name in ("milliseconds", "sort_to_ours", "topk_to_ours"):
            self.assertGreater(row[name]["median"], 0)


if __name__ == "__main__":
    run_tests()
