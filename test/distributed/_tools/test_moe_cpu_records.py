# Owner(s): ["oncall: distributed"]
"""The structure of the CPU model fits measurements of CPUs that are not at hand.

Stays with the records (benchmarks/moe/results), which are no part of a pull request.
"""

import json
import pathlib
import statistics

from torch.distributed._tools.moe_cpu_model import cpu_experts
from torch.distributed._tools.moe_fit import CpuRow, fit_cpu
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


RESULTS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks/moe/results"


def recorded(path):
    """Rows of cpu_ops.py as calls: shapes, experts with rows, seconds of a layer."""
    calls, hit, seconds = [], [], []
    for row in json.loads(path.read_text())["rows"]:
        calls.append(
            CpuRow(
                *row["shape"].values(),
                {"bfloat16": "bf16", "float32": "fp32"}[row["dtype"]],
                "fwd" if row["pass"] == "forward" else "fwd+bwd",
                transposed="gpt_oss" in row["id"],
            )
        )
        hit.append(row["bound"]["hit_experts"])
        ms = row["forms"]["moe_mlp"]["milliseconds"]["median"]
        seconds.append(1e-3 * ms / row["layers"])
    return calls, hit, seconds


def median_error(c, rows, hit, seconds):
    return statistics.median(
        abs(
            cpu_experts(
                c, *r[:5], hit=h, dtype=r.dtype, pass_=r.pass_, transposed=r.transposed
            ) / t - 1
        )
        for r, h, t in zip(rows, hit, seconds)
    )  # fmt: skip


class TestOtherMachines(TestCase):
    @parametrize("name", ["cpu_ops", "cpu_ops_zen4", "cpu_ops_zen5"])
    def test_refit(self, name):
        rows = recorded(RESULTS / f"{name}.json")
        self.assertLess(median_error(fit_cpu(*rows), *rows), 0.08)

    def test_held_out_half(self):
        calls, hit, seconds = recorded(RESULTS / "cpu_ops_zen5.json")
        found = fit_cpu(calls[::2], hit[::2], seconds[::2])
        others = calls[1::2], hit[1::2], seconds[1::2]
        self.assertLess(median_error(found, *others), 0.14)

    def test_constants_of_another_machine_do_not_fit(self):
        found = fit_cpu(*recorded(RESULTS / "cpu_ops_zen5.json"))
        rows = recorded(RESULTS / "cpu_ops_zen4.json")
        self.assertGreater(median_error(found, *rows), 0.2)


instantiate_parametrized_tests(TestOtherMachines)

if __name__ == "__main__":
    run_tests()
