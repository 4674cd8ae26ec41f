# Owner(s): ["module: dsl-native-ops"]
"""Every matmul of the CuTe backend of the MoE ops compiles, without spills.

Nothing runs. Needs nvidia-cutlass-dsl, apache-tvm-ffi, protobuf and cuda-bindings: installed, or
in the folder MOE_CUTEDSL_PACKAGES (``.ci/long cutedsl`` does that). What happens around the
matmuls: test_moe_cutedsl.py.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import unittest

from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
    TestCase,
)


SCRIPT = pathlib.Path(__file__).resolve().with_name("moe_cutedsl_compile.py")
PACKAGES = os.environ.get("MOE_CUTEDSL_PACKAGES")
HAS_CUTEDSL = PACKAGES or importlib.util.find_spec("nvidia_cutlass_dsl")


def compiled(arch, only="", *options):
    """The rows of moe_cutedsl_compile.py, from a process of its own."""
    packages = ["--packages", PACKAGES] if PACKAGES else []
    command = [sys.executable, str(SCRIPT), "--arch", arch, "--only", only, *packages]
    command += options
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise AssertionError(f"{' '.join(command)}\n{run.stderr[-4000:]}")
    return [json.loads(line) for line in run.stdout.splitlines() if line[:1] == "{"]


@unittest.skipUnless(
    HAS_CUTEDSL, "no nvidia-cutlass-dsl here: .ci/long cutedsl installs and tests it"
)
@instantiate_parametrized_tests
class TestMoeCutedslGate(TestCase):
    def check(self, rows):
        for row in rows:
            self.assertNotIn("problem", row)
            self.assertEqual(row["spill_bytes"], 0, row)
            self.assertEqual(row["local_instructions"], 0, row)
            self.assertGreater(row["matrix_instructions"], 0, row)
        return {row["kernel"] for row in rows}

    @parametrize("arch", ["90", "100", "103"])
    def test_a_layer_compiles(self, arch):
        kernels = self.check(compiled(arch, "swiglu bfloat16"))
        self.assertGreater(len(kernels), 9)

    @slowTest
    @parametrize("arch", ["90", "100", "103"])
    def test_everything_compiles(self, arch):
        kernels = self.check(compiled(arch))
        self.assertGreater(len(kernels), 30)

    def test_what_does_not_compile_is_a_problem(self):
        # A gather that is not by TMA, on sm_100: see gemms.py.
        code = (
            "import sys\n"
            f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
            "import moe_cutedsl_compile as script\n"
            "calls = script.calls\n"
            "def broken():\n"
            "    from torch._native.ops.moe.cutedsl_kernels import gemms\n"
            "    gemms._config_for = lambda name, *rest: gemms.CONFIGS[10][name]\n"
            "    return calls()\n"
            "script.calls = broken\n"
            "script.main()\n"
        )
        only = ["--arch", "100", "--only", "dw_out swiglu float16"]
        packages = ["--packages", PACKAGES] if PACKAGES else []
        command = [sys.executable, "-c", code, *only, *packages]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        (row,) = [
            json.loads(line) for line in run.stdout.splitlines() if line[:1] == "{"
        ]
        self.assertIn("mbarrier_arrive", row["problem"])


if __name__ == "__main__":
    run_tests()
