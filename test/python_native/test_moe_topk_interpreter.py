# Owner(s): ["module: dsl-native-ops"]
"""What the Triton router kernels compute and which memory they touch.

As test_moe_triton_interpreter.py does for the expert MLP: in Triton's interpreter on
CPU tensors, against float64, with NaN in fresh allocations and every access checked.
"""

import os


# Before anything can import Triton: its own helpers decide at import time.
os.environ["TRITON_INTERPRET"] = "1"

from unittest import mock

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton_interpreter import CheckedMemory, require_interpreter

import torch
import torch.nn.functional as F
from torch._native.ops.moe import triton_impl
from torch._native.ops.moe.triton_kernels import topk
from torch.testing._internal.common_moe import all_cases
from torch.testing._internal.common_utils import (
    DeterministicGuard,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_reference import check_close, moe_topk_reference


require_interpreter()


# k and options of published routers, over 16 experts.
ROUTERS = {
    "switch": (1, {"normalize": False}),
    "mixtral": (2, {}),
    "deepseek_v2": (
        4,
        {"normalize": False, "num_groups": 4, "top_groups": 2, "scale": 16.0},
    ),
    "deepseek_v3": (
        3,
        {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5},
    ),
    "uneven_groups": (5, {"num_groups": 5, "top_groups": 3}),
    "sigmoid": (6, {"score": "sigmoid"}),
}


def backward_options(options):
    names = ("score", "normalize", "scale")
    return {name: options[name] for name in names if name in options}


class TestMoeTopk(CheckedMemory, TestCase):
    def check(self, logits, k, **options):
        """Indices equal, weights and d(logits) within the tolerance of every MoE test."""
        indices, weights = topk.moe_topk(logits, k, **options)
        leaf = logits.detach().double().requires_grad_()
        truth_indices, truth = moe_topk_reference(leaf, k, **options)
        self.assertEqual(indices, truth_indices)
        yardstick_leaf = logits.detach().requires_grad_()
        _, yardstick = F.moe_topk(yardstick_leaf, k, **options)
        check_close(weights, truth, yardstick, torch.float32, "topk_weights")

        cotangent = torch.randn_like(weights)
        grad = topk.moe_topk_backward(
            cotangent, logits, indices, **backward_options(options)
        )
        (truth,) = torch.autograd.grad(truth, leaf, cotangent.double())
        (yardstick,) = torch.autograd.grad(yardstick, yardstick_leaf, cotangent)
        self.assertEqual(grad.dtype, logits.dtype)
        check_close(grad, truth, yardstick, logits.dtype, "grad_logits")
        return indices, weights, grad

    @all_cases
    @parametrize("score", ["softmax", "sigmoid"])
    def test_cases(self, case, score):
        logits = torch.randn(case.num_tokens, case.num_experts)
        self.check(logits, case.top_k, score=score)
        if case.num_tokens:
            self.assertGreater(self.sanitizer.num_accesses, 0)

    @parametrize("router", list(ROUTERS))
    @parametrize("bias", [False, True])
    def test_routers(self, router, bias):
        k, options = ROUTERS[router]
        num_experts = 15 if router == "uneven_groups" else 16
        if bias:
            options = {**options, "bias": torch.randn(num_experts)}
        self.check(torch.randn(70, num_experts), k, **options)

    @parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_dtypes(self, dtype):
        # Few distinct values, so that there are ties.
        logits = torch.randn(40, 16).mul(4).round().to(dtype)
        _, weights, _ = self.check(logits, 4)
        self.assertEqual(weights.dtype, torch.float32)
        self.check(logits, 4, score="sigmoid", num_groups=4, top_groups=2)

    @parametrize("num_experts", [1, 2, 3, 63, 64, 65, 300])
    def test_num_experts(self, num_experts):
        k = min(num_experts, 7)
        self.check(torch.randn(9, num_experts), k)
        self.check(torch.randn(9, num_experts), k, bias=torch.randn(num_experts))

    def test_many_experts_in_groups(self):
        # DeepSeek-V2 and -V3; 160 experts in 8 groups are 20 each, no power of two.
        self.check(torch.randn(5, 160), 6, num_groups=8, top_groups=3, scale=16.0)
        self.check(
            torch.randn(5, 256),
            8,
            score="sigmoid",
            bias=torch.randn(256) * 0.1,
            num_groups=8,
            top_groups=4,
        )

    def test_groups_of_one_expert(self):
        logits = torch.randn(20, 8)
        for bias in (None, torch.randn(8)):
            indices, _, _ = self.check(logits, 3, bias=bias, num_groups=8, top_groups=5)

    @parametrize("score", ["softmax", "sigmoid"])
    @parametrize("groups", [False, True])
    def test_ties_go_to_the_lower_index(self, score, groups):
        options = {"num_groups": 4, "top_groups": 2} if groups else {}
        logits = torch.zeros(2, 64)
        logits[1, 5] = 1.0
        indices, _ = topk.moe_topk(logits, 4, score=score, **options)
        self.assertEqual(indices.tolist(), [[0, 1, 2, 3], [5, 0, 1, 2]])

    def test_infinite_bias_never_leaves_the_chosen_groups(self):
        logits = torch.zeros(1, 8)
        bias = torch.tensor([0, 0, 0, 0, 9, 9, -torch.inf, -torch.inf])
        options = {"score": "sigmoid", "num_groups": 2, "top_groups": 1}
        indices, _, _ = self.check(logits, 4, bias=bias, **options)
        self.assertEqual(indices.tolist(), [[4, 5, 6, 7]])

    @parametrize("score", ["softmax", "sigmoid"])
    def test_values_that_are_not_finite(self, score):
        logits = torch.randn(6, 8)
        logits[0, 3], logits[1, 3] = torch.nan, -torch.inf
        logits[2], logits[3, 5] = -torch.inf, torch.inf
        logits[4, 2:] = -torch.inf
        indices, weights = topk.moe_topk(logits, 3, score=score)
        expected = F.moe_topk(logits, 3, score=score)
        self.assertEqual(indices, expected[0])
        self.assertEqual(weights, expected[1])

    @parametrize("score", ["softmax", "sigmoid"])
    @parametrize("groups", [False, True])
    @parametrize("bias", [False, True])
    def test_special_values_as_in_the_composite(self, score, groups, bias):
        # NaN, infinities, both zeros and ties, in every combination that 300 rows hit.
        values = torch.tensor(
            [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, 1.0, 2.0]
        )
        logits = values[torch.randint(1, 8, (300, 16))]
        logits[::3] = values[torch.randint(3, 8, (100, 16))]
        logits[::5, 3] = torch.nan
        options = {"num_groups": 4, "top_groups": 2} if groups else {}
        if bias:
            options["bias"] = values[torch.randint(1, 8, (16,))]
            options["bias"][2:4] = torch.nan
        indices, weights = topk.moe_topk(logits, 5, score=score, **options)
        expected = torch.ops.aten._moe_topk(logits, 5, score=score, **options)
        self.assertEqual(indices, expected[0])
        self.assertEqual(weights, expected[1])
        cotangent = torch.randn_like(weights)
        grad = topk.moe_topk_backward(cotangent, logits, indices, score=score)
        expected = torch.ops.aten._moe_topk_backward(
            cotangent, logits, indices, score=score
        )
        self.assertEqual(grad, expected)

    def test_normalize_survives_underflow(self):
        _, weights = topk.moe_topk(torch.full((1, 4), -200.0), 2, score="sigmoid")
        self.assertEqual(weights.tolist(), [[0.0, 0.0]])

    def test_strides(self):
        logits = torch.randn(16, 33).t()
        bias = torch.randn(16, 2)[:, 0]
        self.check(logits, 4, bias=bias)
        indices, _ = topk.moe_topk(logits, 4)
        cotangent = torch.randn(4, 33).t()
        actual = topk.moe_topk_backward(cotangent, logits, indices)
        expected = topk.moe_topk_backward(cotangent.contiguous(), logits, indices)
        self.assertEqual(actual, expected, atol=0, rtol=0)

    def test_bits_do_not_depend_on_the_other_tokens(self):
        logits = torch.randn(50, 64)
        options = {"num_groups": 8, "top_groups": 4}
        everyone = topk.moe_topk(logits, 6, **options)
        cotangent = torch.randn(50, 6)
        grads = topk.moe_topk_backward(cotangent, logits, everyone[0])
        for first, last in ((0, 1), (7, 50), (49, 50)):
            some = topk.moe_topk(logits[first:last], 6, **options)
            grad = topk.moe_topk_backward(
                cotangent[first:last], logits[first:last], some[0]
            )
            for a, b in zip((*some, grad), (*everyone, grads)):
                self.assertEqual(a, b[first:last], atol=0, rtol=0)

    def test_rows_beyond_int32(self):
        # Rows 2^30 elements apart. Only the pages in use exist.
        storage = torch.empty(0)
        with DeterministicGuard(False):
            storage = torch.empty((3 << 30) + 64, dtype=torch.bfloat16)
        logits = storage.as_strided((4, 16), (1 << 30, 1)).copy_(torch.randn(4, 16))
        indices, weights = topk.moe_topk(logits, 3)
        expected = F.moe_topk(logits, 3)
        self.assertEqual(indices, expected[0])
        self.assertEqual(weights, expected[1])

    def test_bias_beyond_int32(self):
        with DeterministicGuard(False):
            storage = torch.empty(300 << 23, dtype=torch.float16)
        bias = storage.as_strided((300,), (1 << 23,)).copy_(torch.randn(300))
        logits = torch.randn(2, 300)
        found = topk.moe_topk(logits, 3, bias)
        expected = F.moe_topk(logits, 3, bias=bias.clone())
        self.assertEqual(found, expected)

    def test_gradient_of_no_expert(self):
        """It reads nothing before or behind a row."""
        logits = torch.randn(5, 8)
        cotangent = torch.randn(5, 2)
        ids = torch.tensor([[0, 1]] * 5)
        for bad in (-1, 8):
            ids[2] = torch.tensor([bad, 3])
            grad = topk.moe_topk_backward(cotangent, logits, ids, normalize=False)
            alone = topk.moe_topk_backward(
                cotangent[:, 1:], logits, ids[:, 1:], normalize=False
            )
            self.assertEqual(grad[2], alone[2], atol=0, rtol=0)

    def test_sanitizer_finds_a_short_bias(self):
        with self.assertRaisesRegex(InterpreterError, "out of bounds"):
            topk.moe_topk(torch.randn(4, 8), 2, torch.randn(7))


@triton.jit
def _no_tie_break(value, index, count):
    # What _pack would be without its low half: equal scores are equal.
    bits = value.to(tl.int32, bitcast=True)
    return bits.to(tl.int64) << 32


class TestTheTestsCanFail(CheckedMemory, TestCase):
    def test_a_wrong_order_is_seen(self):
        with mock.patch.object(topk, "_pack", _no_tie_break):
            indices, _ = topk.moe_topk(torch.zeros(2, 8), 3)
        self.assertNotEqual(indices.tolist(), [[0, 1, 2]] * 2)


class TestDispatch(CheckedMemory, TestCase):
    """The implementations of triton_impl.py behind the ops, with their autograd."""

    def setUp(self):
        super().setUp()
        lib = torch.library._scoped_library("aten", "IMPL")
        self.calls = []
        handle = lib.__enter__()
        self.addCleanup(lib.__exit__, None, None, None)
        for op, impl in (
            ("_moe_topk", triton_impl._topk_impl),
            ("_moe_topk_backward", triton_impl._topk_backward_impl),
        ):

            def counted(*args, op=op, impl=impl, **kwargs):
                self.calls.append(op)
                # As in test_moe_triton_interpreter.py: results without references.
                out = impl(*args, **kwargs)
                return (
                    tuple(x.clone() for x in out)
                    if isinstance(out, tuple)
                    else out.clone()
                )

            handle.impl(op, counted, "CPU", allow_override=True)
        patch = mock.patch.object(
            triton_impl, "on_device", lambda tensor: mock.MagicMock()
        )
        patch.start()
        self.addCleanup(patch.stop)

    @parametrize("router", list(ROUTERS))
    def test_autograd(self, router):
        k, options = ROUTERS[router]
        num_experts = 15 if router == "uneven_groups" else 16
        logits = torch.randn(12, num_experts, requires_grad=True)
        indices, weights = torch.ops.aten._moe_topk(logits, k, **options)
        self.assertFalse(indices.requires_grad)
        (grad,) = torch.autograd.grad(weights.square().sum(), logits)
        self.assertEqual(self.calls, ["_moe_topk", "_moe_topk_backward"])
        expected_indices, expected = F.moe_topk(logits, k, **options)
        self.assertEqual(indices, expected_indices)
        self.assertEqual(weights, expected)
        (expected,) = torch.autograd.grad(expected.square().sum(), logits)
        self.assertEqual(grad, expected)


instantiate_parametrized_tests(TestMoeTopk)
instantiate_parametrized_tests(TestDispatch)

if __name__ == "__main__":
    run_tests()
