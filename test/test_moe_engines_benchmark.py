# Owner(s): ["module: nn"]
"""Smoke test of benchmarks/moe/engines.py without peers: processes, checks, the JSON."""

import json
import pathlib
import sys
import tempfile

from torch.testing._internal.common_utils import run_tests, TestCase


_BENCHMARKS = pathlib.Path(__file__).resolve().parents[1] / "benchmarks" / "moe"
sys.path.insert(0, str(_BENCHMARKS))

import engines


class TestMoeEnginesBenchmark(TestCase):
    def test_quick_run(self):
        formats = [engines.BF16, "mxfp4"]
        words = [
            "--quick",
            "--threads",
            "1",
            "--pages",
            "small",
            "--engines",
            "--formats",
        ]
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "rows.json")
            for fmt in formats:  # the second run keeps the rows of the first
                self.assertEqual(engines.main([*words, fmt, "--out", str(out)]), 0)
            record = json.loads(out.read_text())
        ids = [row["id"] for row in record["rows"]]
        expected = [
            f"{s.name}/{f}/forward/1/small" for f in formats for s in engines.QUICK
        ]
        expected.insert(2, f"{engines.QUICK[1].name}/bfloat16/forward+backward/1/small")
        self.assertEqual(ids, expected)
        self.assertEqual(list(record["versions"]), [engines.OURS])
        for row in record["rows"]:
            self.assertNotIn("best_peer", row)
            self.assertEqual(row["left_out"], {})
            self.assertGreater(row["of_peak"], 0)
            for form in row["forms"].values():
                self.assertLess(form["error"], engines.ALLOWED[row["format"]])

    def test_wrong_weights_are_left_out(self):
        shape = engines.QUICK[0]
        weights = engines.draw_weights(shape, engines.BF16)
        with tempfile.TemporaryDirectory() as folder:
            bench = engines.Bench([engines.OURS], [1], "huge", pathlib.Path(folder))
            self.addCleanup(bench.close)
            bench.load(weights, engines.BF16, shape.K)
            rows = engines.draw_rows(shape)
            self.assertEqual(len(bench.checked_calls(shape, rows, False)), 1)
            bench.weights = {name: -w for name, w in weights.items()}
            self.assertEqual(bench.checked_calls(shape, rows, False), {})
        self.assertIn("another layer", bench.left_out["ours checkpoint"])

    def test_engine_that_dies(self):
        engine = engines.Engine(engines.OURS, 1, "huge")
        with self.assertRaisesRegex(engines.EngineError, "AttributeError"):
            engine("nothing")
        engine.process.kill()
        engine.process.wait()
        with self.assertRaisesRegex(engines.EngineError, "status -9"):
            engine("version")


if __name__ == "__main__":
    run_tests()
