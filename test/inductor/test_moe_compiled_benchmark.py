# Owner(s): ["module: inductor"]
"""benchmarks/moe/compiled.py on tiny shapes, and what its counts say of compilation."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from torch.testing._internal.common_utils import run_tests, slowTest, TestCase


SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "benchmarks/moe/compiled.py"


class TestMoeCompiledBenchmark(TestCase):
    def run_script(self, *options):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "out.json"
            command = [sys.executable, str(SCRIPT), "--quick", "--out", str(path)]
            env = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
            subprocess.run([*command, *options], check=True, env=env)
            return json.loads(path.read_text())

    @slowTest
    def test_two_graphs_over_changing_tokens_and_no_break(self):
        record = self.run_script("--tables", "compiles")
        forms = {row["form"] for row in record["compiles"]}
        self.assertLessEqual({"moe_mlp", "sorted_grouped_mm", "nn.MoE"}, forms)
        for row in record["compiles"]:
            self.assertEqual(row["graphs"], 2, row)
            self.assertEqual(row["graph_breaks"], 0, row)
        of = {(row["form"], row["pass"]): row["kernels"] for row in record["compiles"]}
        for what in ("forward", "forward+backward"):
            self.assertLess(of["moe_mlp", what], of["sorted_grouped_mm", what])

    def test_layouts(self):
        (row,) = self.run_script("--tables", "layouts")["layouts"]
        self.assertEqual((row["T"], row["D"]), (8, 64))
        self.assertGreater(row["milliseconds"]["n_major"]["median"], 0)
        self.assertGreater(row["milliseconds"]["frozen_n_major"]["median"], 0)


if __name__ == "__main__":
    run_tests()
