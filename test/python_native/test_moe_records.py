# Owner(s): ["module: dsl-native-ops"]
"""The records of compiled MoE kernels are of these sources, and nothing is worse than recorded.

Stays with the records (benchmarks/moe/results), which are no part of a pull request.
"""

import os


os.environ.pop("TRITON_INTERPRET", None)

import json
import pathlib
import tempfile
import unittest

import triton
from moe_cutedsl_model import estimates, sonicmoe
from moe_sass import measure, nvdisasm, regressions, SHAPES
from moe_scaled_sass import measure as measure_scaled, TARGETS
from moe_scaled_sweep import FAMILY, RECORDED
from moe_triton_sweep import BORROWED, source_hash
from test_moe_cutedsl_gate import compiled, HAS_CUTEDSL
from test_moe_triton_static_gate import current_hash, shipped
from triton_static_gate import ARCHITECTURES

from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
    TestCase,
)


RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks/moe/results"
NEEDS_DISASSEMBLER = unittest.skipIf(
    not nvdisasm().exists(), f"no disassembler at {nvdisasm()}"
)


def record_of(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@instantiate_parametrized_tests
class TestMoeRecords(TestCase):
    def rows_of_sources(self, name, version, sources, script):
        """The rows of a Triton; one is installed here, the record says what the others compiled."""
        record = record_of(name)
        text = f"run {script} --output {name}.json under Triton {version}"
        self.assertEqual(record["sources"].get(version), sources, text)
        rows = [row for row in record["rows"] if row["triton"] == version]
        self.assertEqual([row for row in rows if row["problems"]], [])
        return rows

    @parametrize("version", ("3.6.0", "3.9.0"))
    def test_static_gate(self, version):
        rows = self.rows_of_sources(
            "triton_static_gate", version, current_hash(), "moe_triton_sweep.py"
        )
        self.assertEqual({row["arch"] for row in rows}, {*ARCHITECTURES, *BORROWED})
        for arch in ARCHITECTURES:
            names = ("kernel", "num_warps", "num_stages")
            found = set()
            for row in rows:
                if row["arch"] == arch:
                    block = tuple(row["constants"].get(f"BLOCK_{x}") for x in "MNK")
                    kernel, num_warps, num_stages = (row[name] for name in names)
                    found.add((kernel, *block, num_warps, num_stages))
            self.assertEqual(shipped(arch) - found, set())

    def test_scaled_static_gate(self):
        # In Triton 3.6 an assertion of automatic warp specialisation ends the process on
        # mxfp8's kernels for sm_100; torch asks for 3.9.
        rows = self.rows_of_sources(
            "scaled_static_gate", "3.9.0", source_hash(RECORDED), "moe_scaled_sweep.py"
        )
        for row in rows:
            if "column" not in row["kernel"]:
                wide = row["variant"].startswith("wide")
                self.assertEqual("fp8" in row["instructions"], not wide, row)
        self.assertEqual({row["arch"] for row in rows}, set(FAMILY.architectures))

    def no_worse(self, name, measured):
        record = record_of(name)
        if record["triton"] != triton.__version__:
            self.skipTest(f"the record is of Triton {record['triton']}")
        found = "\n".join(regressions(record, measured()))
        self.assertEqual(found, "", f"if it is meant: record {name}.json anew")

    # It compiles again what test_moe_sass.py has compiled and checked, and more, in two minutes.
    @slowTest
    @NEEDS_DISASSEMBLER
    def test_machine_code(self):
        self.no_worse("triton_sass", measure)

    @slowTest
    @NEEDS_DISASSEMBLER
    def test_scaled_machine_code(self):
        measured = measure_scaled()
        self.no_worse("scaled_sass", lambda: measured)
        self.assertEqual({row["recipe"] for row in measured["layers"]}, set(TARGETS))
        for row in measured["kernels"]:
            mma = "HGMMA" if row["kernel"].startswith("wide") else "QGMMA"
            self.assertTrue(row["mma"].startswith(mma), row)
            self.assertEqual(row["spill_bytes"], 0, row)

    @slowTest
    @unittest.skipUnless(HAS_CUTEDSL, "no nvidia-cutlass-dsl here: .ci/long cutedsl")
    def test_modelled_times_of_cutedsl(self):
        record = record_of("cutedsl_gate")
        with tempfile.TemporaryDirectory() as folder:
            for only in ("swiglu bfloat16", "swiglu interleaved bfloat16"):
                compiled("90", only, "--keep", folder)
            found = estimates(pathlib.Path(folder), SHAPES[0])
        rows = [r for r in record["estimates"] if r["shape"] == SHAPES[0].name]
        self.assertEqual([row["kernel"] for row in rows], list(found))
        for row in rows:
            ratio = found[row["kernel"]].us / row["us"]
            self.assertLess(abs(ratio - 1), 0.03, row)

    def test_model_of_layers_that_others_measured(self):
        # CALIBRATION cannot be computed here, where its kernels are not; of these layers, which
        # nothing was fitted on either, the parts that are no matmul are modelled anew.
        record = record_of("cutedsl_gate")
        us = {}
        for row in record["estimates"]:
            if row["shape"] == SHAPES[0].name:
                us[row["kernel"]] = row["us"]
        rows = {row["kernel"]: row for row in sonicmoe(us)}
        self.assertEqual(record["calibration"], list(rows.values()))
        for name in ("SonicMoE forward", "SonicMoE backward"):
            of_published = rows[name]["predicted_us"] / rows[name]["published_us"]
            self.assertLess(abs(of_published - 1), 0.1, rows[name])


if __name__ == "__main__":
    run_tests()
