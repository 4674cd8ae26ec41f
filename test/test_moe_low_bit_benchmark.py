# Owner(s): ["module: nn"]
"""Smoke test of benchmarks/moe/low_bit.py: a tiny layer in every format, the JSON, the check."""

import json
import pathlib
import sys
import tempfile

import torch
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.moe_low_bit import low_bit_format


_BENCHMARKS = pathlib.Path(__file__).resolve().parents[1] / "benchmarks" / "moe"
sys.path.insert(0, str(_BENCHMARKS))

import low_bit


class TestMoeLowBitBenchmark(TestCase):
    def test_quick_run(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "rows.json")
            self.assertEqual(low_bit.main(["--quick", "--out", str(out)]), 0)
            record = json.loads(out.read_text())
        rows = record["rows"]
        self.assertEqual(len(rows), 2 * len(low_bit.FORMATS))
        for row in rows:
            forms = set(row["forms"])
            peers = set(low_bit.PEERS.get(row["format"], {}))
            self.assertLessEqual({low_bit.BF16, "checkpoint", "panels"} | peers, forms)
            for name, form in row["forms"].items():
                self.assertGreater(form["milliseconds"]["median"], 0)
                self.assertEqual("this_over_checkpoint" in form, name in peers)

    def test_check_finds_another_layer(self):
        fmt = low_bit_format("mxfp8")
        y = torch.randn(4, 8)
        same = {low_bit.BF16: y, "checkpoint": y, "panels": y.clone()}
        low_bit.check(same, fmt)
        with self.assertRaisesRegex(AssertionError, "two layouts differ"):
            low_bit.check({**same, "panels": y + 1e-3}, fmt)
        for name in ("peer", "checkpoint, int8 rows"):
            with self.assertRaisesRegex(AssertionError, f"{name} is another layer"):
                low_bit.check({**same, name: 1.1 * y}, fmt)


if __name__ == "__main__":
    run_tests()
