# Owner(s): ["module: dsl-native-ops"]
"""triton_static_gate.py sees what it judges, on a plain matmul."""

import os


os.environ.pop("TRITON_INTERPRET", None)

import triton
import triton.language as tl
from triton_static_gate import (
    ARCHITECTURES,
    compile_only,
    KernelReport,
    MATRIX_INSTRUCTION,
)

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
    subtest,
    TestCase,
)


@triton.jit
def _matmul_kernel(
    a, b, c, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a + m[:, None] * K + k[None, :]
    b_ptrs = b + n[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, K, BLOCK_K):
        acc = tl.dot(tl.load(a_ptrs), tl.load(b_ptrs), acc)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    tl.store(c + m[:, None] * N + n[None, :], acc.to(c.dtype.element_ty))


@triton.jit
def _scaled_matmul_kernel(
    a, a_scale, b, b_scale, c, M, N, K, BLOCK: tl.constexpr
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for first in range(0, K, BLOCK):
        k = first + tl.arange(0, BLOCK)
        s = first // 32 + tl.arange(0, BLOCK // 32)
        at = tl.load(a + m[:, None] * K + k[None, :])
        bt = tl.load(b + n[None, :] * K + k[:, None])
        sa = tl.load(a_scale + m[:, None] * (K // 32) + s[None, :])
        sb = tl.load(b_scale + n[:, None] * (K // 32) + s[None, :])
        acc = tl.dot_scaled(at, sa, "e4m3", bt, sb, "e4m3", acc)
    tl.store(c + m[:, None] * N + n[None, :], acc)


@triton.jit
def _count_kernel(ids, counts, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts + tl.load(ids + i), 1)


def compile_matmul(
    arch: str, block: tuple[int, int, int] = (64, 64, 64), size: int = 512, **options
) -> KernelReport:
    a, b, c = torch.empty(3, size, size, dtype=torch.bfloat16).unbind()
    m, n, k = block
    with compile_only(arch) as reports:
        _matmul_kernel[(8, 8)](
            a, b, c, size, size, size, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, **options
        )
    (report,) = reports
    return report


class TestStaticGate(TestCase):
    @parametrize("arch", ARCHITECTURES)
    def test_accepts_a_good_kernel(self, arch):
        report = compile_matmul(arch, num_warps=4, num_stages=2)
        self.assertEqual(report.problems(), [])
        self.assertEqual((report.arch, report.kernel), (arch, "_matmul_kernel"))
        self.assertIn(MATRIX_INSTRUCTION[arch], report.instructions)
        self.assertGreater(report.registers, 16)
        self.assertGreaterEqual(report.shared_bytes, 64 * 64 * 2)

    def test_float8_products(self):
        c = torch.empty(512, 512)
        scale = torch.empty(512, 16, dtype=torch.uint8)
        found = {}
        for arch in ("sm_90", "sm_100"):
            a, b = torch.empty(2, 512, 512).to(torch.float8_e4m3fn).unbind()
            with compile_only(arch) as reports:
                _matmul_kernel[(4, 4)](
                    a, b, c, 512, 512, 512, BLOCK_M=128, BLOCK_N=128, BLOCK_K=128
                )
                _scaled_matmul_kernel[(4, 4)](
                    a, scale, b, scale, c, 512, 512, 512, BLOCK=128
                )
            found[arch] = [report.problems(fp8=True) for report in reports]
        # One with scales is a product of bfloat16 there, with spills on top.
        self.assertEqual(
            found["sm_90"].pop()[0], "no matrix instruction has float8 operands"
        )
        self.assertEqual(found, {"sm_90": [[]], "sm_100": [[], []]})
        self.assertIn("no matrix", compile_matmul("sm_90").problems(fp8=True)[0])

    def test_no_launch_reaches_a_device(self):
        marker = torch.full((512, 512), 7.0, dtype=torch.bfloat16)
        with compile_only("sm_90"):
            _matmul_kernel[(8, 8)](
                marker, marker, marker, 512, 512, 512,
                BLOCK_M=64, BLOCK_N=64, BLOCK_K=64,
            )  # fmt: skip
        self.assertEqual(marker, torch.full_like(marker, 7.0))

    def test_equal_launches_are_reported_once_per_target(self):
        for arch in ("sm_80", "sm_90"):
            self.assertEqual(compile_matmul(arch).arch, arch)

    @parametrize(
        "arch",
        ["sm_90", *(subtest(a, decorators=[slowTest]) for a in ("sm_80", "gfx942"))],
    )
    def test_rejects_spills(self, arch):
        report = compile_matmul(arch, (256, 256, 64), num_warps=2, num_stages=1)
        self.assertGreater(report.spill_bytes, 0)
        self.assertIn("bytes of spills", "; ".join(report.problems()))

    def test_rejects_too_much_shared_memory(self):
        report = compile_matmul("sm_90", (128, 256, 64), num_warps=8, num_stages=6)
        self.assertIn("bytes of shared memory", "; ".join(report.problems()))

    def test_rejects_loads_that_are_not_asynchronous(self):
        report = compile_matmul("sm_80", num_stages=1)
        self.assertIn("loads are not asynchronous", report.problems())
        # Rows of 2 * 511 bytes: no address is known to be aligned.
        report = compile_matmul("sm_80", size=511)
        self.assertIn("loads are not asynchronous", report.problems())

    def test_rejects_missing_instructions(self):
        report = compile_matmul("sm_90")
        self.assertIn("no TMA load", report.problems(tma=True))
        ids = torch.empty(1024, dtype=torch.int32)
        with compile_only("sm_90") as reports:
            _count_kernel[(1,)](ids, ids, BLOCK=1024)
        problems = reports[0].problems()
        self.assertIn("no wgmma instruction", problems)
        self.assertIn("atomic", "; ".join(problems))


instantiate_parametrized_tests(TestStaticGate)

if __name__ == "__main__":
    run_tests()
