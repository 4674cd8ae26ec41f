# Owner(s): ["module: dsl-native-ops"]
"""Every tile configuration that ships compiles well for every GPU it ships for.

Nothing runs: the assemblers in Triton's wheel compile for GPUs that are not there.
What the kernels compute: test_moe_triton_interpreter.py.
"""

import os


os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch._native.ops.moe.triton_kernels import launch
from torch._native.ops.moe.triton_kernels.configs import (
    KERNELS,
    MAX_CONFIGS,
    TABLES,
    TileConfig,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_triton_sweep import (
    ACTIVATION_KERNELS,
    sweep,
    UP,
    Variant,
)
from torch.testing._internal.triton_static_gate import ARCHITECTURES, compile_only


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


class TestMoeStaticGate(TestCase):
    @parametrize("arch", ARCHITECTURES)
    def test_every_shipped_config(self, arch):
        bad, compiled = [], set()
        for variant, report, problems in sweep(arch):
            block = tuple(report.constants.get(f"BLOCK_{axis}") for axis in "MNK")
            compiled.add((report.kernel, *block, report.num_warps, report.num_stages))
            if problems:
                bad.append((variant, report.kernel, block, report.num_warps, problems))
        self.assertEqual(bad, [])
        self.assertEqual(shipped(arch) - compiled, set())

    def test_tables_are_complete(self):
        self.assertEqual(set(TABLES), set(ARCHITECTURES))
        for table in TABLES.values():
            self.assertEqual(set(table), set(KERNELS))
            for configs in table.values():
                self.assertLessEqual(len(configs), MAX_CONFIGS)
                self.assertGreater(len(configs), 0)
                self.assertEqual(len(set(configs)), len(configs))

    @parametrize("num_tokens,num_experts", [(1, 8), (4096, 4096)])
    def test_ids_are_checked_on_the_device(self, num_tokens, num_experts):
        with compile_only("sm_90") as reports:
            ids = torch.empty(num_tokens, 8, dtype=torch.int64)
            launch.moe_permutation(ids, num_experts)
        checked = [r.kernel for r in reports if "assert" in r.instructions]
        self.assertEqual(checked, ["count_kernel"])
        self.assertEqual([r.problems(matrix=False) for r in reports], [[]] * 5)

    def rejected(self, arch, config, kernels):
        table = dict.fromkeys(KERNELS, (config,))
        rows = list(sweep(arch, table, (Variant("planted", kernels=kernels),)))
        self.assertEqual(len(rows), 1)
        return "; ".join(rows[0].problems)

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


instantiate_parametrized_tests(TestMoeStaticGate)

if __name__ == "__main__":
    run_tests()
