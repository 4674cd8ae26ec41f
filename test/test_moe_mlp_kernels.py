# Owner(s): ["module: nn"]
"""The CPU kernels of _moe_mlp: blocked and portable, and what a token's result may depend on.

test_moe_mlp.py compares the kernel that a plain call gets with float64; here the portable kernel is
forced where the blocked kernel would be taken, and determinism level 2 is checked for both. The
blocked kernel multiplies bfloat16 on AMX tiles where there are some, and is kept from it here.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import unittest

import torch
from torch.profiler import profile
from torch.testing._internal.common_moe import num_threads
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)
from torch.testing._internal.moe_generators import moe_cases
from torch.testing._internal.moe_reference import (
    check_close,
    moe_mlp_backward_reference,
    moe_mlp_backward_unfused,
    moe_mlp_reference,
    moe_mlp_unfused,
    moe_permutation_reference,
)


_moe_mlp = torch.ops.aten._moe_mlp.default
_moe_mlp_backward = torch.ops.aten._moe_mlp_backward.default

all_cases = parametrize("case", [subtest(c, name=c.name) for c in moe_cases()])
all_dtypes = parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
# float64 is always the portable kernel.
level_2_dtypes = parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
# The blocked kernel heeds PyTorch's switch for special CPU kernels.
both_kernels = parametrize("portable", [False, True])


def kernel(portable):
    if portable:
        return torch.backends.mkldnn.flags(enabled=False)
    return contextlib.nullcontext()


def run_op(args, grad_out, portable=False):
    """Output, preact and the gradients that belong to tokens, then those of the weights."""
    with kernel(portable):
        output, preact = _moe_mlp(*args)
        args = tuple(args) + (None,) * (10 - len(args))
        grads = _moe_mlp_backward(grad_out, *args, preact, [True] * 7)
    return output, preact, grads


def large_operands(shape, dtype, transposed):
    """Input, weights, router weights and choices of 3 experts, 2 per token; and a gradient."""
    tokens, model_dim, hidden = shape
    generator = torch.Generator().manual_seed(0)

    def randn(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    def weight(rows, cols):
        if transposed:
            return randn(3, cols, rows, scale=cols**-0.5).transpose(1, 2)
        return randn(3, rows, cols, scale=cols**-0.5)

    x, grad_out = randn(tokens, model_dim), randn(tokens, model_dim)
    w_in, w_out = weight(2 * hidden, model_dim), weight(model_dim, hidden)
    weights = torch.rand(tokens, 2, generator=generator)
    indices = torch.randint(3, (tokens, 2), generator=generator)
    return (x, w_in, w_out, weights, indices), grad_out


def large_args(shape, dtype, transposed):
    """Arguments of _moe_mlp, and a gradient."""
    (x, w_in, w_out, weights, indices), grad_out = large_operands(
        shape, dtype, transposed
    )
    plan = moe_permutation_reference(indices, 3)
    args = (x, w_in, w_out, plan.offs, weights, plan.row_slots, plan.slot_rows)
    return args, grad_out


def allocated_bytes(dtype, portable=False):
    """What _moe_mlp allocates, which tells the kernels apart: their results may be the same bits."""
    args, _ = large_args((90, 300, 24), dtype, False)
    with kernel(portable), profile(profile_memory=True) as profiler:
        _moe_mlp(*args)
    events = profiler.profiler.kineto_results.events()
    return sum(max(0, e.nbytes()) for e in events if e.name() == "[memory]")


# What chooses kernels from outside.
SWITCHES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def run_python(*args, **switches):
    """Python with these switches and no others, where the tests can be imported."""
    env = {k: v for k, v in os.environ.items() if k not in SWITCHES}
    tests = os.path.dirname(os.path.abspath(__file__))
    paths = [tests, *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    return subprocess.run(
        [sys.executable, *args],
        env={**env, **switches},
        capture_output=True,
        text=True,
    )


class TestMoeMlpKernels(TestCase):
    @all_cases
    @all_dtypes
    def test_portable_reference(self, case, dtype):
        args = case.operands(dtype, "cpu", bias=True).args()
        grad_out = torch.randn(args[0].shape).to(dtype)
        output, preact, grads = run_op(args, grad_out, portable=True)
        expected, unfused = moe_mlp_reference(*args), moe_mlp_unfused(*args)
        check_close(output, expected[0], unfused[0], dtype, "output")
        check_close(preact, expected[1], unfused[1], dtype, "preact")
        expected = moe_mlp_backward_reference(grad_out, *args)
        unfused = moe_mlp_backward_unfused(grad_out, *args)
        for name, grad, want, yardstick in zip(
            expected._fields, grads, expected, unfused
        ):
            if want is not None:
                check_close(grad, want, yardstick, dtype, name)

    @all_cases
    @level_2_dtypes
    @both_kernels
    def test_thread_count(self, case, dtype, portable):
        args = case.operands(dtype, "cpu", bias=True).args()
        grad_out = torch.randn(args[0].shape).to(dtype)
        many = run_op(args, grad_out, portable)
        with num_threads(3 if torch.get_num_threads() == 1 else 1):
            other = run_op(args, grad_out, portable)
        self.assertEqual(many, other, rtol=0, atol=0)

    @level_2_dtypes
    @both_kernels
    @parametrize("shape", [(200, 70, 45), (1300, 72, 40), (600, 24, 1300)])
    @parametrize("transposed", [False, True])
    def test_thread_count_large(self, dtype, portable, shape, transposed):
        """Where the number of threads decides how rows are cut and how much is packed at once."""
        args, grad_out = large_args(shape, dtype, transposed)
        with num_threads(1):
            one = run_op(args, grad_out, portable)
        for count in (2, 3, 8):
            with num_threads(count):
                other = run_op(args, grad_out, portable)
            self.assertEqual(other, one, rtol=0, atol=0)

    @all_cases
    @level_2_dtypes
    @both_kernels
    @parametrize("exact_weights", [False, True])
    def test_batch_composition(self, case, dtype, portable, exact_weights):
        """y, dX and d(topk_weights) of a token are the same bits in every batch it is part of."""
        ops = case.operands(dtype, "cpu", bias=True)
        if not exact_weights:
            ops = dataclasses.replace(ops, topk_weights=ops.topk_weights.to(dtype))
        routed = (ops.topk_indices >= 0) & (ops.topk_indices < case.num_experts)
        clips = (ops.slot_rows[routed] < 0).any()

        def run(tokens):
            plan = moe_permutation_reference(
                ops.topk_indices[tokens],
                case.num_experts,
                # A token may fit into one batch and not into another.
                num_rows=None if clips else case.num_rows,
                row_alignment=case.row_alignment,
            )
            args = (ops.input[tokens], ops.w_in, ops.w_out, plan.offs)
            args += (ops.topk_weights[tokens], plan.row_slots, plan.slot_rows)
            args += (ops.b_in, ops.b_out)
            output, _, grads = run_op(args, ops.grad_out[tokens], portable)
            return output, grads[0], grads[3]

        every = torch.arange(case.num_tokens)
        whole = run(every)
        for tokens in (every[-1:], every[: len(every) // 3], every.flip(0)[::2]):
            expected = [x[tokens] for x in whole]
            self.assertEqual(list(run(tokens)), expected, rtol=0, atol=0)

    @all_dtypes
    @both_kernels
    @parametrize(
        "shape",
        [(1300, 72, 40), (1300, 600, 40), (90, 2300, 24), (200, 70, 45)]
        + [(1300, 24, 1300), (40, 8, 8300)],
    )
    @parametrize("transposed", [False, True])
    def test_large_reference(self, dtype, portable, shape, transposed):
        """More rows than one step of a weight gradient, depth that is cut, and activations that
        are too many to pack at once."""
        args, grad_out = large_args(shape, dtype, transposed)
        output, preact, grads = run_op(args, grad_out, portable)
        expected, unfused = moe_mlp_reference(*args), moe_mlp_unfused(*args)
        check_close(output, expected[0], unfused[0], dtype, "output")
        check_close(preact, expected[1], unfused[1], dtype, "preact")
        expected = moe_mlp_backward_reference(grad_out, *args)
        unfused = moe_mlp_backward_unfused(grad_out, *args)
        for name, grad, want, yardstick in zip(
            expected._fields, grads, expected, unfused
        ):
            if want is not None:
                check_close(grad, want, yardstick, dtype, name)

    @level_2_dtypes
    @both_kernels
    @parametrize("shape", [(200, 70, 45), (70, 2100, 24), (700, 40, 24)])
    @parametrize("transposed", [False, True])
    def test_other_tokens(self, dtype, portable, shape, transposed):
        """The same over more than one tile of rows, depth that is cut, and both storage orders."""
        operands, grad_out = large_operands(shape, dtype, transposed)
        x, w_in, w_out, weights, indices = operands

        def run_first(count):
            plan = moe_permutation_reference(indices[:count], 3)
            args = (x[:count], w_in, w_out, plan.offs, weights[:count])
            args += (plan.row_slots, plan.slot_rows)
            output, _, grads = run_op(args, grad_out[:count], portable)
            return output, grads[0], grads[3]

        every = run_first(len(x))
        for count in (1, 2, 3, 5, 17, 40):
            expected = [result[:count] for result in every]
            self.assertEqual(list(run_first(count)), expected, rtol=0, atol=0)

    def check_in_subprocess(self, tests, **switches):
        # Not run_tests(): where the environment says CI it wants xmlrunner, which pytest does not.
        run = run_python("-m", "pytest", "-q", __file__, "-k", tests, **switches)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        self.assertRegex(run.stdout, r"\d\d passed")

    @parametrize("isa", ["AVX512_CORE_BF16", "AVX512_CORE"])
    def test_less_than_amx(self, isa):
        """What a CPU without AMX runs, and one without AVX512-BF16: the limit makes such."""
        self.check_in_subprocess(
            "bfloat16 and portable_False and (large_reference or other_tokens or "
            "thread_count or batch_composition)",
            ONEDNN_MAX_CPU_ISA=isa,
        )

    @unittest.skipIf(
        torch.backends.cpu.get_cpu_capability() != "AVX512",
        "the portable kernel is the only one without AVX512",
    )
    @parametrize(
        "name,isa,kernels",
        [
            # Kernels of bfloat16 and float32; which one bfloat16 has without a limit
            # depends on the CPU.
            subtest(("ONEDNN_MAX_CPU_ISA", "other", (None, "avx512")), name="other"),
            subtest(
                ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", ("portable", "avx512")),
                name="avx512",
            ),
            subtest(
                ("ONEDNN_MAX_CPU_ISA", "avx2", ("portable", "portable")), name="avx2"
            ),
            subtest(
                ("DNNL_MAX_CPU_ISA", "AVX2", ("portable", "portable")), name="old_name"
            ),
        ],
    )
    def test_choice_of_kernel(self, name, isa, kernels):
        """Both switches choose the kernel."""
        dtypes = (torch.bfloat16, torch.float32)
        code = (
            "import torch, test_moe_mlp_kernels as t; "
            "print(*map(t.allocated_bytes, (torch.bfloat16, torch.float32)))"
        )
        run = run_python("-c", code, **{name: isa})
        self.assertEqual(run.returncode, 0, run.stderr)
        found = [int(word) for word in run.stdout.split()[-2:]]
        for dtype, got, expected in zip(dtypes, found, kernels):
            if expected is not None:
                portable = allocated_bytes(dtype, portable=True)
                self.assertEqual(got == portable, expected == "portable", f"{dtype}")

    @parametrize("capability", ["avx2", "default"])
    def test_portable_builds(self, capability):
        """The portable kernel as compiled for CPUs without AVX512."""
        switches = {"ATEN_CPU_CAPABILITY": capability}
        code = (
            "import torch, test_moe_mlp_kernels as t; t.allocated_bytes(torch.float32)"
        )
        run = run_python("-c", code, **switches)
        if "DispatchStub: missing" in run.stderr:
            self.skipTest(f"this torch has no kernels for {capability}: a host build")
        self.assertEqual(run.returncode, 0, run.stderr)
        self.check_in_subprocess(
            "portable_False and (large_reference and (shape2 or shape3) or "
            "bfloat16 and (thread_count or batch_composition))",
            **switches,
        )


instantiate_parametrized_tests(TestMoeMlpKernels)

if __name__ == "__main__":
    run_tests()
