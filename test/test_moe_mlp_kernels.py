# Owner(s): ["module: nn"]
"""The CPU kernel of _moe_mlp: what a token's result may depend on, and the memory that it uses.

test_moe_mlp.py compares with float64 over the shapes of moe_generators.py. The shapes here make the
kernel split rows, columns and depth. The builds for other CPU capabilities are tested, too.
"""

import dataclasses
import itertools
import os
import re
import subprocess
import sys
import unittest

import torch
import torch.nn.functional as F
from torch.profiler import profile
from torch.testing._internal.common_moe import (
    all_cases,
    all_dtypes,
    num_threads,
    slow_subtest,
    with_backward,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)
from torch.testing._internal.moe_generators import get_case
from torch.testing._internal.moe_reference import (
    check_moe_mlp,
    check_moe_mlp_backward,
    moe_permutation_reference,
)


_moe_mlp, _moe_mlp_backward = with_backward("_moe_mlp")


# Invalid values that the kernels would use unchecked. R = 26, T*K = 26.
VALUE_ERRORS = [
    subtest(("row_slots", (7,), 26, r"row_slots must .*got 26"), name="slot_beyond"),
    subtest(("row_slots", (7,), -2, r"row_slots must .*got -2"), name="slot_negative"),
    subtest(("slot_rows", (3, 1), 26, r"slot_rows must .*got 26"), name="row_beyond"),
    subtest(("slot_rows", (3, 1), -2, r"slot_rows must .*got -2"), name="row_negative"),
    subtest(("slot_rows", (3, 1), -1, r"row_slots|slot_rows"), name="row_forgotten"),
    subtest(("row_slots", (7,), -1, r"row_slots|slot_rows"), name="slot_forgotten"),
]


def run_op(args, grad_out):
    """Output, preact and the gradients in the order of output_mask."""
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


def peak_bytes(function):
    """The most bytes that are allocated at once while function runs."""
    with profile(profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    memory = sorted(
        (e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"
    )
    return max(itertools.accumulate((size for _, size in memory), initial=0))


# Environment variables that choose kernels.
SWITCHES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def run_python(*args, **switches):
    """Runs Python with only these of the SWITCHES set, and with the tests importable."""
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


def check_in_subprocess(test, file, tests, **switches):
    """The tests of ``file`` that ``-k tests`` selects pass under ``switches``."""
    # Not run_tests(): with CI in the environment it needs xmlrunner, which pytest does not.
    run = run_python("-m", "pytest", "-q", file, "-k", tests, **switches)
    test.assertEqual(run.returncode, 0, run.stdout + run.stderr)
    test.assertRegex(run.stdout, r"\d\d passed")


def skip_without_build(test, capability):
    """Skips ``test`` where torch has no kernels for ``capability``."""
    code = (
        "import torch, test_moe_mlp_kernels as t; "
        "t.run_op(*t.large_args((9, 8, 8), torch.float32, False))"
    )
    run = run_python("-c", code, ATEN_CPU_CAPABILITY=capability)
    if "DispatchStub: missing" in run.stderr:
        test.skipTest(f"this torch has no kernels for {capability}: a host build")
    test.assertEqual(run.returncode, 0, run.stderr)


class TestMoeMlpKernels(TestCase):
    @parametrize("name,where,value,text", VALUE_ERRORS)
    def test_values(self, name, where, value, text):
        ops = get_case("uniform").operands(torch.float32)
        changed = getattr(ops, name).clone()
        changed[where] = value
        args = dataclasses.replace(ops, **{name: changed}).args()
        with self.assertRaisesRegex((ValueError, IndexError), f"_moe_mlp: .*{text}"):
            _moe_mlp(*args)
        backward = (ops.grad_out, *args, torch.zeros(26, 48), [True] * 7)
        with self.assertRaisesRegex(
            (ValueError, IndexError), f"_moe_mlp_backward: .*{text}"
        ):
            _moe_mlp_backward(*backward)

    @all_cases
    @all_dtypes
    def test_thread_count(self, case, dtype):
        args = case.operands(dtype, "cpu", bias=True).args()
        grad_out = torch.randn(args[0].shape).to(dtype)
        many = run_op(args, grad_out)
        with num_threads(3 if torch.get_num_threads() == 1 else 1):
            other = run_op(args, grad_out)
        self.assertEqual(many, other, rtol=0, atol=0)

    @all_dtypes
    @parametrize("shape", [(200, 70, 45), (1300, 72, 40), (600, 24, 1300)])
    @parametrize("transposed", [False, True])
    def test_thread_count_large(self, dtype, shape, transposed):
        """The number of threads decides how rows of these shapes are split and packed."""
        args, grad_out = large_args(shape, dtype, transposed)
        with num_threads(1):
            one = run_op(args, grad_out)
        for count in (2, 3, 64):
            with num_threads(count):
                other = run_op(args, grad_out)
            self.assertEqual(other, one, rtol=0, atol=0)

    @all_cases
    @all_dtypes
    @parametrize("exact_weights", [False, True])
    def test_batch_composition(self, case, dtype, exact_weights):
        """y, dX and d(topk_weights) of a token have the same bits in every batch that contains it."""
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
            output, _, grads = run_op(args, ops.grad_out[tokens])
            return output, grads[0], grads[3]

        every = torch.arange(case.num_tokens)
        whole = run(every)
        for tokens in (every[-1:], every[: len(every) // 3], every.flip(0)[::2]):
            expected = [x[tokens] for x in whole]
            self.assertEqual(list(run(tokens)), expected, rtol=0, atol=0)

    @all_dtypes
    @parametrize(
        "shape",
        [(1300, 72, 40), (1300, 600, 40), (90, 2300, 24), (200, 70, 45)]
        + [(1300, 24, 1300), (40, 8, 8300)],
    )
    @parametrize("transposed", [False, slow_subtest(True, name="transposed")])
    def test_large_reference(self, dtype, shape, transposed):
        """More rows than one step of a weight gradient, split depth, and too many activations to
        pack at once."""
        args, grad_out = large_args(shape, dtype, transposed)
        output, preact, grads = run_op(args, grad_out)
        check_moe_mlp((output, preact), args)
        check_moe_mlp_backward(grads, grad_out, args)

    @all_dtypes
    @parametrize(
        "shape",
        [(200, 70, 45), (70, 2100, 24), (700, 40, 24)]
        # With few rows, the kernel reads these weights in place instead of packing them.
        + [(200, 96, 64), (70, 1056, 32), (60, 208, 176)]
        # Many rows of 2048 elements are kept apart; longer ones are read a part at a time.
        + [
            (60, 2048, 40),
            (60, 40, 2048),
            (60, 2882, 40),
            (60, 40, 4096),
            (60, 40, 4128),
        ],
    )
    @parametrize("transposed", [False, True])
    def test_other_tokens(self, dtype, shape, transposed):
        """Other tokens change no bit, with several tiles of rows, split depth, and both storage orders."""
        operands, grad_out = large_operands(shape, dtype, transposed)
        x, w_in, w_out, weights, indices = operands

        def run_first(count):
            plan = moe_permutation_reference(indices[:count], 3)
            args = (x[:count], w_in, w_out, plan.offs, weights[:count])
            args += (plan.row_slots, plan.slot_rows)
            output, _, grads = run_op(args, grad_out[:count])
            return output, grads[0], grads[3]

        every = run_first(len(x))
        for count in (1, 2, 3, 5, 17, 40):
            expected = [result[:count] for result in every]
            self.assertEqual(list(run_first(count)), expected, rtol=0, atol=0)

    def test_other_tokens_of_overlapping_weights(self):
        """Overlapping windows are contiguous along both K and N. The order of additions must not vary."""
        for seed in range(20):
            torch.manual_seed(seed)
            w_in = torch.randn(2, 1023).mul(0.05).bfloat16().unfold(1, 512, 1)
            w_out = torch.randn(2, 767).mul(0.05).bfloat16().unfold(1, 256, 1)
            x = torch.randn(40, 512).bfloat16()
            ids, weights = torch.zeros(40, 1, dtype=torch.int32), torch.ones(40, 1)
            every = F.moe_mlp(x, ids, weights, w_in, w_out)
            for rows in torch.arange(40).split(4):
                few = F.moe_mlp(x[rows], ids[rows], weights[rows], w_in, w_out)
                self.assertEqual(few, every[rows], rtol=0, atol=0)

    @parametrize("dtype", [torch.float32, torch.bfloat16])
    @parametrize("transposed", ["neither", "gate", "up", "both"])
    @parametrize("shape", [(150, 70, 45), (6, 96, 64)])
    def test_separate_up(self, dtype, transposed, shape):
        """Separate gate and up, each in its own storage order, give the bits of one tensor."""
        (x, w_in, w_out, weights, indices), grad_out = large_operands(
            shape, dtype, False
        )
        plan = moe_permutation_reference(indices, 3)
        routing = (plan.offs, weights, plan.row_slots, plan.slot_rows, None, None)
        output, preact, grads = run_op((x, w_in, w_out, *routing), grad_out)
        gate, up = (
            half.mT.contiguous().mT if transposed in (name, "both") else half
            for name, half in zip(("gate", "up"), w_in.chunk(2, dim=1))
        )
        others = run_op((x, gate, w_out, *routing, up), grad_out)
        self.assertEqual(others[:2], (output, preact), rtol=0, atol=0)
        grad_gate, grad_up = others[2][1], others[2][6]
        self.assertEqual(torch.cat([grad_gate, grad_up], 1), grads[1], rtol=0, atol=0)
        for i in (0, 2, 3):
            self.assertEqual(others[2][i], grads[i], rtol=0, atol=0)

    def test_bias_gradients_of_many_rows(self):
        """Sums over 200,000 rows, as exact as those of torch.sum."""
        tokens, dim = 200_000, 16
        generator = torch.Generator().manual_seed(0)
        grad_out = torch.rand(tokens, dim, generator=generator)
        offs = torch.tensor([tokens], dtype=torch.int32)
        w = torch.eye(dim)[None]
        args = (torch.zeros(tokens, dim), w, w, offs, None, None, None)
        args += (torch.ones(1, dim), torch.zeros(1, dim), None)
        kwargs = {"activation": "relu"}
        _, preact = _moe_mlp(*args, **kwargs)
        mask = [False, False, False, False, True, True, False]
        grads = _moe_mlp_backward(grad_out, *args, preact, mask, **kwargs)
        expected = grad_out.double().sum(0)
        eps = 4 * torch.finfo(torch.float32).eps
        for grad in (grads[4], grads[5]):
            self.assertEqual(grad[0].double(), expected, rtol=eps, atol=0)
        self.assertEqual(grads[5][0], grad_out.sum(0), rtol=eps, atol=0)

    @all_dtypes
    @parametrize("shape", [(1024, 512, 64), (64, 2048, 768)])
    def test_memory_over_threads(self, shape, dtype):
        """Scratch follows the work, not the number of threads."""
        args, grad_out = large_args(shape, dtype, False)
        preact = _moe_mlp(*args)[1]

        def backward():
            mask = [True, True, True, True, False, False, False]
            _moe_mlp_backward(grad_out, *args, None, None, None, preact, mask)

        for function in (lambda: _moe_mlp(*args), backward):
            with num_threads(1):
                one = peak_bytes(function)
            for count in (16, 64, 128):
                with num_threads(count):
                    self.assertLessEqual(peak_bytes(function), max(1.5 * one, 1 << 22))

    @unittest.skipIf(
        not os.path.exists("/sys/kernel/mm/transparent_hugepage/enabled"),
        "a system without transparent huge pages",
    )
    def test_gradients_in_huge_pages(self):
        """Large gradients are newly mapped in each call, which should cause few page faults."""
        rows, dim, hidden = 4, 2048, 3072
        offs = torch.tensor([rows, rows], dtype=torch.int32)
        x, w_in = torch.ones(rows, dim), torch.zeros(2, 2 * hidden, dim)
        args = (x, w_in, torch.zeros(2, dim, hidden), offs, *(None,) * 6)
        mask = [False, True] + [False] * 5
        grads = _moe_mlp_backward(x, *args, _moe_mlp(*args)[1], mask)
        middle, flags = grads[1][1].data_ptr(), None
        with open("/proc/self/smaps") as file:
            for line in file:
                words = line.split()
                if re.fullmatch("[0-9a-f]+-[0-9a-f]+", words[0]):
                    begin, end = (int(n, 16) for n in words[0].split("-"))
                elif words[0] == "VmFlags:" and begin <= middle < end:
                    flags = words[1:]
        self.assertIn("hg", flags)

    @unittest.skipIf(
        not torch.cpu._is_amx_tile_supported(), "without AMX brgemm is not used"
    )
    def test_without_brgemm(self):
        check_in_subprocess(
            self,
            __file__,
            "bfloat16 and (large_reference or other_tokens or thread_count)",
            ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16",
        )

    @parametrize("capability", ["avx2", "default"])
    def test_other_builds(self, capability):
        """The kernel as compiled for lower CPU capabilities."""
        skip_without_build(self, capability)
        check_in_subprocess(
            self,
            __file__,
            "large_reference and (shape2 or shape3) or "
            "bfloat16 and (thread_count or batch_composition)",
            ATEN_CPU_CAPABILITY=capability,
        )


instantiate_parametrized_tests(TestMoeMlpKernels)

if __name__ == "__main__":
    run_tests()
