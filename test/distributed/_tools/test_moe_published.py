# Owner(s): ["oncall: distributed"]

import dataclasses
import hashlib
import pathlib
import sys
import unittest

from torch.distributed._tools import moe_profile
from torch.distributed._tools.moe_profile import Constants
from torch.testing._internal.common_utils import run_tests, TestCase


BENCHMARKS = pathlib.Path(__file__).parents[3] / "benchmarks" / "moe"


def published():
    """The checker of benchmarks/moe, by its path."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import published as module
    finally:
        sys.path.pop(0)
    return module


@unittest.skipUnless((BENCHMARKS / "published.csv").exists(), "needs benchmarks/moe")
class TestPublished(TestCase):
    """Errors on the rows that no constant has seen; the limits are the project's."""

    LIMITS = {
        "all": 14, "level a2a": 9, "level gemm": 9, "level layer_ep": 20,
        "level train": 12, "level gemm_fb": 17,
    }  # fmt: skip

    def check(self, predict):
        p = published()
        rows = p.scored(BENCHMARKS / "published.csv")
        found = p.table(p.errors(rows, predict))
        got = {r["rows"]: r["median"] for r in found}
        count = {r["rows"]: r["n"] for r in found}
        for name, limit in self.LIMITS.items():
            self.assertLessEqual(got[name], limit, name)
        self.assertEqual(
            {
                k: (round(got[f"level {k}"] / 100, 3), count[f"level {k}"])
                for k in moe_profile.HELD_OUT_ERROR
            },
            moe_profile.HELD_OUT_ERROR,
        )

    def test_held_out(self):
        p = published()
        self.check(p.Predictor())
        slow = {
            g: dataclasses.replace(Constants(**v), fast=0.3, mma16=0.4, mma8=0.3)
            for g, v in moe_profile.FITTED.items()
        }
        with self.assertRaises(AssertionError):
            self.check(p.Predictor(slow))

    def test_inductor(self):
        p = published()
        rows = p.scored(BENCHMARKS / "published.csv")
        rows = [r for r in rows if r["level"] == "a2a"]
        (direct, *_), (ring, *_) = (
            p.table(p.errors(rows, p.InductorPredictor(direct=direct)))
            for direct in (True, False)
        )
        self.assertLessEqual(direct["median"], 15)
        self.assertGreater(ring["median"], 60)

    def test_split_is_locked(self):
        p = published()
        rows = p.scored(BENCHMARKS / "published.csv")
        calibrate = [r["id"] for r in rows if r["split"] == "calibration"]
        digest = hashlib.md5("\n".join(sorted(calibrate)).encode()).hexdigest()
        self.assertEqual(digest[:12], "f7b503d3d4b3")
        self.assertLess(len(calibrate) / len(rows), 0.4)

    def test_links_are_fitted_on_calibration_rows_alone(self):
        p = published()
        rows = p.scored(BENCHMARKS / "published.csv")
        rows = [r for r in rows if r["split"] == "calibration" and r["level"] == "a2a"]
        for name, value in dataclasses.asdict(p.fit(rows)["blackwell"]).items():
            if name in p.STAGES[0][1]:
                self.assertEqual(value, moe_profile.FITTED["blackwell"][name], name)


if __name__ == "__main__":
    run_tests()
