# Owner(s): ["module: dsl-native-ops"]
"""Every tile configuration that ships compiles well for every GPU it ships for.

Nothing runs: the assemblers in Triton's wheel compile for GPUs that are not there. The sweep
takes minutes, so it is slow; where the record is, test_moe_records.py compares it with the sources.
What the kernels compute: test_moe_triton_interpreter.py.
"""

import os


os.environ.pop("TRITON_INTERPRET", None)

import concurrent.futures
import functools
import pathlib
import unittest
import unittest.mock

from moe_triton_sweep import (
    ACTIVATION_KERNELS,
    BORROWED,
    MODULES,
    parallel_sweep,
    source_hash,
    sweep,
    UP,
    Variant,
    variants,
)
from triton_static_gate import ARCHITECTURES, compile_only

import torch
from torch._native.ops.moe.cutedsl_kernels import rows
from torch._native.ops.moe.triton_kernels import matmuls, permutation
from torch._native.ops.moe.triton_kernels.configs import (
    FORWARD_KERNELS,
    KERNELS,
    MAX_CONFIGS,
    table_for_capability,
    table_for_gcn_arch,
    TABLES,
    TileConfig,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
    TEST_WITH_SLOW,
    TestCase,
)


# Which kernel function runs the configurations of a table entry.
FUNCTIONS = {
    "up_gated": "up_kernel",
    "up_plain": "up_kernel",
    "down": "grouped_mm_kernel",
    "act_backward": "act_backward_kernel",
    "input_grad": "grouped_mm_kernel",
    "weight_grad": "weight_grad_kernel",
}


def shipped(arch: str) -> set[tuple]:
    """(kernel function, its launch parameters) of every entry of the tables."""
    return {
        (
            FUNCTIONS[kernel],
            config.block_m,
            config.block_n,
            config.block_k,
            config.num_warps,
            config.num_stages,
        )
        for kernel, configs in TABLES[arch].items()
        for config in configs
    }


@functools.cache
def started_sweep():
    """What ships, compiled once for all tests, by processes on all CPUs."""
    return concurrent.futures.ThreadPoolExecutor(1).submit(parallel_sweep)


def compiled_rows():
    return started_sweep().result()


@functools.cache
def current_hash():
    return source_hash()


class TestMoeStaticGateItself(TestCase):
    """The tables, and that the gate refuses what it should."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if TEST_WITH_SLOW:  # for the tests of the other class, which wait for it
            started_sweep()

    def test_tables_are_complete(self):
        self.assertEqual(set(TABLES), set(ARCHITECTURES))
        for table in TABLES.values():
            self.assertEqual(set(table), set(KERNELS))
            for configs in table.values():
                self.assertLessEqual(len(configs), MAX_CONFIGS)
                self.assertGreater(len(configs), 0)
                self.assertEqual(len(set(configs)), len(configs))
        for table in TABLES.values():
            for kernel, entry in table.items():
                if kernel not in FORWARD_KERNELS:
                    self.assertFalse(any(config.max_rows for config in entry))
                # Some problem is too narrow for everything else.
                last = entry[-1]
                self.assertFalse(last.max_rows or last.max_columns or last.max_inner)
            self.assertEqual({c.programs_per_sm for c in table["act_backward"]}, {0})

    @parametrize(
        "num_tokens,num_experts,kernels,checks",
        [(128, 1023, 1, "permute_block_kernel"), (4096, 4096, 4, "count_kernel")],
    )
    def test_ids_are_checked_on_the_device(
        self, num_tokens, num_experts, kernels, checks
    ):
        with compile_only("sm_90") as reports:
            ids = torch.empty(num_tokens, 8, dtype=torch.int64)
            permutation.moe_permutation(ids, num_experts)
        checked = [r.kernel for r in reports if "assert" in r.instructions]
        self.assertEqual(checked, [checks])
        self.assertEqual([r.problems(matrix=False) for r in reports], [[]] * kernels)

    @parametrize("arch", ["sm_90", "sm_100"])
    def test_kernels_beside_those_of_quack(self, arch):
        slots = torch.empty(4096, dtype=torch.int32)
        with compile_only(arch) as reports:
            offs = torch.empty(64, dtype=torch.int32)
            rows.route_rows(slots, offs, 8, torch.empty(512, 8))
            rows.route_rows(slots, offs, 8, None)
            rows.zero_padding(slots, torch.empty(4096, 512, dtype=torch.bfloat16))
        self.assertEqual([r.problems(matrix=False) for r in reports], [[]] * 3)

    def rejected(self, arch, config, kernels):
        table = dict.fromkeys(KERNELS, (config,))
        (row,) = sweep(arch, table, (Variant("planted", kernels=kernels),))
        return "; ".join(row.problems)

    def test_gate_rejects_spills(self):
        # The epilogue of the whole tile at once does not fit in registers.
        config = TileConfig(128, 128, 64, num_warps=8, num_stages=3, tma=True)
        problems = self.rejected("sm_90", config, ACTIVATION_KERNELS[1:])
        self.assertIn("bytes of spills", problems)

    def test_gate_rejects_serialized_wgmma_and_too_much_shared_memory(self):
        config = TileConfig(
            128, 256, 64, num_warps=8, num_stages=4, epilogue_parts=4, tma=True
        )
        problems = self.rejected("sm_90", config, UP)
        self.assertIn("wgmma.mma_async instructions are serialized", problems)
        self.assertIn("bytes of shared memory", problems)

    def test_gate_rejects_loads_that_are_not_asynchronous(self):
        config = TileConfig(64, 64, 64, num_warps=4, num_stages=1)
        self.assertIn("not asynchronous", self.rejected("sm_80", config, UP))


class TestMoeStaticGate(TestCase):
    @slowTest
    @parametrize("arch", ARCHITECTURES)
    def test_every_shipped_config(self, arch):
        bad, compiled = [], set()
        for variant, report, problems in compiled_rows()[arch]:
            block = tuple(report.constants.get(f"BLOCK_{axis}") for axis in "MNK")
            compiled.add((report.kernel, *block, report.num_warps, report.num_stages))
            if problems:
                bad.append((variant, report.kernel, block, report.num_warps, problems))
        self.assertEqual(bad, [])
        self.assertEqual(shipped(arch) - compiled, set())

    @slowTest
    @parametrize("arch", BORROWED)
    def test_tiles_of_another_architecture(self, arch):
        compiled = compiled_rows()[arch]
        self.assertEqual([row for row in compiled if row.problems], [])
        self.assertGreater({row.report.kernel for row in compiled}, {"up_kernel"})
        self.assertIs(table_for_capability(10, 3), TABLES["sm_100"])
        self.assertIs(table_for_gcn_arch("gfx950:xnack-"), TABLES["gfx942"])

    def test_hash_is_of_kernels_and_launches(self):
        # A launch option that no source of a kernel shows.
        before = current_hash()
        with unittest.mock.patch.object(
            matmuls, "OPTIONS", {"enable_fp_fusion": False}
        ):
            self.assertNotEqual(source_hash(), before)

    @slowTest
    @parametrize("arch", ARCHITECTURES)
    def test_every_kernel_is_compiled(self, arch):
        kernels = {
            line.split("(")[0].removeprefix("def ")
            for module in MODULES
            for line in pathlib.Path(module.__file__).read_text().splitlines()
            if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
        }
        self.assertGreater(len(kernels), 15)
        compiled = {report.kernel for _, report, _ in compiled_rows()[arch]}
        self.assertEqual(kernels - compiled, set())

    @slowTest
    def test_forward_kernels_have_one_matrix_instruction(self):
        # Then a row is summed in the same steps whatever tile it is in: configs.py.
        for arch in ("sm_80", "sm_90", "sm_100"):
            for variant, report, _ in compiled_rows()[arch]:
                if report.kernel in ("up_kernel", "grouped_mm_kernel"):
                    matrix = {"mma.sync", "wgmma", "tcgen05"} & set(report.instructions)
                    self.assertEqual(len(matrix), 1, (variant, report))

    @slowTest
    def test_workers_compile_what_one_process_does(self):
        def facts(rows):
            return {
                (r.kernel, r.num_warps, r.num_stages, r.registers, r.shared_bytes)
                for _, r, _ in rows
            }

        names = ("geglu",)
        rows = [row for row in compiled_rows()["sm_80"] if row.variant in names]
        chosen = tuple(v for v in variants() if v.name in names)
        self.assertEqual(facts(rows), facts(sweep("sm_80", chosen=chosen)))


instantiate_parametrized_tests(TestMoeStaticGateItself)
instantiate_parametrized_tests(TestMoeStaticGate)

if __name__ == "__main__":
    run_tests()
