# Owner(s): ["module: nn"]
"""aten::_moe_topk is F.moe_topk, bit by bit, as one op."""

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)
from torch.testing._internal.moe_generators import moe_cases
from torch.testing._internal.moe_reference import moe_topk_reference


E = 16
OPTIONS = {
    "default": {},
    "not_normalized": {"normalize": False},
    "sigmoid": {"score": "sigmoid", "scale": 2.5},
    "groups": {"num_groups": 4, "top_groups": 2},
    "groups_sigmoid": {"score": "sigmoid", "num_groups": 4, "top_groups": 3},
}


class TestMoeTopk(TestCase):
    @parametrize("case", [subtest(case, name=case.name) for case in moe_cases()])
    def test_reference(self, case):
        logits = torch.randn(case.num_tokens, case.num_experts)
        indices, weights = torch.ops.aten._moe_topk(logits, case.top_k)
        expected = moe_topk_reference(logits, case.top_k)
        self.assertEqual(indices, expected[0])
        self.assertEqual(weights, expected[1], exact_dtype=False)

    @parametrize("name", list(OPTIONS))
    @parametrize("bias", [False, True])
    @parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_is_the_functional(self, name, bias, dtype):
        options = dict(OPTIONS[name], bias=torch.randn(E) if bias else None)
        # Few distinct values, so that there are ties.
        logits = torch.randn(40, E).mul(4).round().to(dtype).requires_grad_()
        actual = torch.ops.aten._moe_topk(logits, 4, **options)
        expected = F.moe_topk(logits, 4, **options)
        self.assertEqual(actual, expected, rtol=0, atol=0)
        cotangent = torch.randn_like(expected[1])
        (grad,) = torch.autograd.grad(actual[1], logits, cotangent)
        (expected,) = torch.autograd.grad(expected[1], logits, cotangent)
        self.assertEqual(grad, expected)

    @parametrize("num_experts", [E, 128])
    @parametrize("name", list(OPTIONS))
    @parametrize("dtype", [torch.float32, torch.float64])
    def test_selection_is_that_of_a_sort(self, num_experts, name, dtype):
        # Ties everywhere; the bias makes every kind of value. Enough rows for two threads.
        logits = torch.randn(600, num_experts, dtype=dtype).round()
        kinds = torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan])
        bias = kinds[torch.randint(len(kinds), (num_experts,))]
        score = OPTIONS[name].get("score", "softmax")
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        num_groups, top_groups = (
            OPTIONS[name].get(key) for key in ("num_groups", "top_groups")
        )
        selectable = num_experts // (num_groups or 1) * (top_groups or 1)
        for k in (1, 3, selectable):
            for some_bias in (None, bias, bias[torch.randperm(num_experts)]):
                indices, _ = torch._moe_topk(logits, k, some_bias, **OPTIONS[name])
                expected = F._select_experts(
                    scores, k, some_bias, num_groups, top_groups
                )
                self.assertEqual(indices, expected)

    def test_strided_logits(self):
        logits = torch.randn(E, 40)
        expected = torch._moe_topk(logits.t().contiguous(), 4)
        self.assertEqual(torch._moe_topk(logits.t(), 4), expected, rtol=0, atol=0)

    @parametrize("name", list(OPTIONS))
    def test_gradcheck(self, name):
        logits = torch.randn(5, E, dtype=torch.float64, requires_grad=True)

        def weights(x):
            return torch.ops.aten._moe_topk(x, 4, **OPTIONS[name])[1]

        torch.autograd.gradcheck(weights, (logits,))

    @parametrize("name", list(OPTIONS))
    def test_opcheck(self, name):
        logits = torch.randn(6, E, requires_grad=True)
        torch.library.opcheck(
            torch.ops.aten._moe_topk.default,
            (logits, 3, torch.randn(E)),
            OPTIONS[name],
            # Its loss adds floats to the sum of the first result, which is integer
            # here; test_compiled has that part.
            test_utils=(
                "test_schema",
                "test_autograd_registration",
                "test_faketensor",
            ),
        )
        options = {k: v for k, v in OPTIONS[name].items() if "groups" not in k}
        indices, weights = torch.ops.aten._moe_topk(logits.detach(), 3, **options)
        torch.library.opcheck(
            torch.ops.aten._moe_topk_backward.default,
            (weights, logits.detach(), indices),
            options,
        )

    @parametrize("dynamic", [False, True])
    @parametrize("name", list(OPTIONS))
    def test_compiled(self, name, dynamic):
        def weights(x):
            return torch._moe_topk(x, 4, **OPTIONS[name])[1]

        torch._dynamo.reset()
        compiled = torch.compile(
            weights, fullgraph=True, backend="aot_eager", dynamic=dynamic
        )
        for num_tokens in (6, 9):
            logits = torch.randn(num_tokens, E, requires_grad=True)
            actual, expected = compiled(logits), weights(logits)
            self.assertEqual(actual, expected, rtol=0, atol=0)
            cotangent = torch.randn_like(expected)
            (a,) = torch.autograd.grad(actual, logits, cotangent)
            (b,) = torch.autograd.grad(expected, logits, cotangent)
            self.assertEqual(a, b, rtol=0, atol=0)

    def test_bias_receives_no_gradient(self):
        logits = torch.randn(6, E, requires_grad=True)
        bias = torch.randn(E, requires_grad=True)
        indices, weights = torch.ops.aten._moe_topk(logits, 3, bias)
        self.assertFalse(indices.requires_grad)
        weights.sum().backward()
        self.assertIsNone(bias.grad)

    def test_second_derivative_says_so(self):
        logits = torch.randn(6, E, requires_grad=True)
        weights = torch.ops.aten._moe_topk(logits, 3)[1]
        (grad,) = torch.autograd.grad(weights.square().sum(), logits, create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "_moe_topk_backward"):
            grad.sum().backward()

    @parametrize(
        "kwargs,text",
        [
            subtest(({"score": "tanh"}, "score must be"), name="score"),
            subtest(({"k": 0}, "k must be in"), name="k_zero"),
            subtest(({"k": E + 1}, "k must be in"), name="k_large"),
            subtest(
                ({"num_groups": 4, "top_groups": 1, "k": 5}, "k must be in"),
                name="k_groups",
            ),
            subtest(({"num_groups": 3, "top_groups": 1}, "must divide"), name="groups"),
            subtest(({"num_groups": 4}, "given together"), name="one_of_two"),
            subtest(
                ({"num_groups": 4, "top_groups": 5}, "top_groups must"),
                name="top_groups",
            ),
            subtest(({"bias": torch.zeros(3)}, "bias must be a real"), name="bias"),
            subtest(
                ({"bias": torch.zeros(E, dtype=torch.complex64)}, "got complex64"),
                name="complex_bias",
            ),
        ],
    )
    @parametrize("device", ["cpu", "meta"])
    def test_errors(self, kwargs, text, device):
        kwargs = {"k": 2, **kwargs}
        if "bias" in kwargs:
            kwargs["bias"] = kwargs["bias"].to(device)
        with self.assertRaisesRegex(ValueError, text):
            torch.ops.aten._moe_topk(torch.zeros(2, E, device=device), **kwargs)

    @parametrize("device", ["cpu", "meta"])
    def test_bad_logits(self, device):
        for logits in (torch.zeros(E), torch.zeros(2, E, dtype=torch.int64)):
            with self.assertRaisesRegex(ValueError, "logits must be"):
                torch.ops.aten._moe_topk(logits.to(device), 2)

    @parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_functional_calls_it_on_cuda(self, dtype):
        # float64 keeps the steps that can be differentiated twice.
        called = []

        class Record(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                called.append(func)
                return func(*args, **(kwargs or {}))

        with FakeTensorMode():
            logits = torch.empty(2, 3, E, dtype=dtype, device="cuda")
            with Record():
                indices, weights = F.moe_topk(logits, 4)
        self.assertEqual(indices.shape, (2, 3, 4))
        self.assertEqual(weights.shape, (2, 3, 4))
        self.assertEqual(indices.dtype, torch.int64)
        wide = torch.promote_types(dtype, torch.float32)
        self.assertEqual(weights.dtype, wide)
        is_op = torch.ops.aten._moe_topk.default in called
        self.assertEqual(is_op, dtype != torch.float64)
        self.assertNotIn(torch.ops.aten._local_scalar_dense.default, called)


instantiate_parametrized_tests(TestMoeTopk)

if __name__ == "__main__":
    run_tests()
