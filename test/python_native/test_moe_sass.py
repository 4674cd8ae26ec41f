# Owner(s): ["module: dsl-native-ops"]
"""No change makes the machine code of the MoE matmul kernels worse unseen.

Nothing runs: the shipped configurations are compiled, disassembled and held to rules;
test_moe_records.py compares them with the record of moe_sass.py.
"""

import os


os.environ.pop("TRITON_INTERPRET", None)

import copy
import functools
import unittest
from collections import Counter

from moe_sass import (
    ARCHITECTURES,
    bias,
    disassemble,
    measure,
    nvdisasm,
    regressions,
    SHAPES,
)
from triton_static_gate import compile_only

import torch
from torch.testing._internal.common_utils import run_tests, TEST_WITH_SLOW, TestCase


# The rest takes two minutes more. Each run of test_moe_records.py sees that what it spills is on
# record, and the layers between take the configurations of these two.
FEW = {"architectures": ("sm_90",), "shapes": (SHAPES[0], SHAPES[-1])}
ALL = {"architectures": ARCHITECTURES, "shapes": SHAPES}
MEASURED = ALL if TEST_WITH_SLOW else FEW


@functools.cache
def measured():
    return measure(**MEASURED)


def rows(name):
    return [row for row in measured()["kernels"] if row["kernel"].startswith(name)]


@unittest.skipIf(not nvdisasm().exists(), f"no disassembler at {nvdisasm()}")
class TestMoeSass(TestCase):
    def test_gate_and_up_are_one_matrix_instruction(self):
        # One TMA load brings both halves of w_in, and x is read once for them.
        for row in rows("up 128x128x64"):
            if row["arch"] == "sm_90":
                self.assertEqual(row["mma"], "HGMMA 64x256x16")

    def test_backward_computes_its_activation_once(self):
        # An exponential and a reciprocal per output, where two layouts had it twice.
        for row in rows("act_backward 128"):
            if row["arch"] != "sm_80":
                self.assertLess(row["epilogue_mufu_per_output"], 2.2, row)

    def test_no_kernel_spills_or_waits_for_every_matmul(self):
        counts = Counter(row["arch"] for row in measured()["kernels"])
        self.assertGreater(min(counts.values()), 7, counts)
        for row in measured()["kernels"]:
            self.assertEqual(row["spill_bytes"], 0, row)
            self.assertIn(row["matmuls_in_flight"], (None, 1, 2), row)

    def test_worse_figures_are_found(self):
        before = copy.deepcopy({k: measured()[k] for k in ("kernels", "estimates")})
        self.assertEqual(regressions(before, measured()), [])
        before["estimates"][0]["us"] *= 0.98
        self.assertEqual(regressions(before, measured()), [])
        before["estimates"][0]["us"] *= 0.98
        before["kernels"][1]["occupancy"] += 1
        before["kernels"][2]["mma"] = "HGMMA 64x8x16"
        before["kernels"][3]["registers"] *= 0.9
        before["kernels"][4]["kernel"] = "gone"
        found = regressions(before, measured())
        self.assertEqual(len(found), 5, found)
        self.assertIn("not launched any more", found[3])

    def test_forecasts(self):
        middle, _, _ = bias()
        for row in measured()["layers"]:
            for name in ("forward_us", "backward_us"):
                self.assertEqual(row[f"{name}_corrected"], round(row[name] * middle))
                # Not below what the arithmetic and the card allow.
                flops = (6 if name == "forward_us" else 12) * row["T"] * row["K"]
                flops *= row["D"] * row["F"]
                self.assertGreater(row[name] * 1e-6 * 989e12, flops)
        self.assertEqual(len(measured()["layers"]), len(MEASURED["shapes"]))
        for row in measured()["estimates"]:
            self.assertEqual(row["of_dense"] < 0.6, row["explained"] is not None, row)

    def test_listing_of_a_known_loop(self):
        from test_triton_static_gate import _matmul_kernel

        a = torch.empty(512, 512, dtype=torch.bfloat16)
        launched = []
        with compile_only("sm_90", on_launch=lambda *args: launched.append(args)):
            for _ in range(2):
                _matmul_kernel[(8, 8)](
                    a, a, a, 512, 512, 512, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64
                )
        (report, compiled, grid), (again, same, _) = launched
        self.assertEqual((report.kernel, grid, again), ("_matmul_kernel", (8, 8), None))
        self.assertIs(same, compiled)
        loop, outside = disassemble(compiled.asm["cubin"]).split("HGMMA")
        # 64 columns of the contraction, 16 per instruction, in one warpgroup.
        self.assertEqual(sum(i.op.startswith("HGMMA.64x64x16") for i in loop), 4)
        self.assertGreater(sum(i.stall for i in loop), len(loop))
        self.assertTrue(any(i.op.startswith("STG") for i in outside))


if __name__ == "__main__":
    run_tests()
