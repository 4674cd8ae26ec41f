# Owner(s): ["module: nn"]
"""aten::_moe_topk, the op behind F.moe_topk: kernels, selection, gradient, graphs."""

import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import jvp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_moe import (
    all_cases,
    BACKENDS,
    call_composite,
    call_native,
    NoHostSyncMode,
    TOPK_OPTIONS,
    with_backward,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)
from torch.testing._internal.moe_reference import moe_topk_reference


_moe_topk, _moe_topk_backward = with_backward("_moe_topk")

E = 16


BACKENDS_OF_THE_ROUTER = parametrize("backend", ["native", "composite"])
ORDERS = ("ascending", "descending", "random", "equal", "few", "special")


def in_order(order, num_tokens, num_experts, dtype=torch.float32):
    """Logits whose scores have this order."""
    row = torch.arange(num_experts, dtype=dtype) / num_experts
    if order == "special":
        kinds = torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan])
        return kinds.to(dtype)[torch.randint(6, (num_tokens, num_experts))]
    return {
        "ascending": row.expand(num_tokens, num_experts),
        "descending": row.flip(0).repeat(num_tokens, 1),
        "random": torch.randn(num_tokens, num_experts, dtype=dtype),
        "equal": torch.zeros(num_tokens, num_experts, dtype=dtype),
        "few": torch.randint(4, (num_tokens, num_experts)).to(dtype),
    }[order]


def sorted_choice(scores, k, bias, num_groups=None, top_groups=None, **_):
    """The rules of F.moe_topk, by a stable sort of all scores."""

    def best(values, k):
        return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]

    choice = scores if bias is None else scores + bias.to(scores.dtype)
    if num_groups is None:
        return best(choice, k)
    size = choice.shape[1] // num_groups
    grouped = choice.unflatten(1, (num_groups, size))
    num_best = 1 if bias is None else min(2, size)
    group_scores = grouped.topk(num_best, dim=-1).values.sum(-1)
    groups = best(group_scores, top_groups).sort(-1).values
    members = (groups.unsqueeze(-1) * size + torch.arange(size)).flatten(1)
    return members.gather(1, best(choice.gather(1, members), k))


class TestMoeTopk(TestCase):
    @BACKENDS_OF_THE_ROUTER
    @all_cases
    def test_reference(self, case, backend):
        logits = torch.randn(case.num_tokens, case.num_experts)
        indices, weights = BACKENDS[backend](_moe_topk, logits, case.top_k)
        expected = moe_topk_reference(logits, case.top_k)
        self.assertEqual(indices, expected[0])
        self.assertEqual(weights, expected[1], exact_dtype=False)

    @parametrize("name", list(TOPK_OPTIONS))
    @parametrize(
        "dtype",
        [torch.float32, torch.bfloat16, torch.float16, torch.float64],
    )
    def test_backward_against_autograd_in_float64(self, name, dtype):
        options = {k: v for k, v in TOPK_OPTIONS[name].items() if "groups" not in k}
        logits = torch.randn(40, 24).to(dtype)
        indices, weights = _moe_topk(logits, 4, **options)
        grad = torch.randn_like(weights)
        leaf = logits.double().requires_grad_()
        scores = leaf.sigmoid() if name.endswith("sigmoid") else leaf.softmax(-1)
        reference = scores.gather(1, indices)
        if options.get("normalize", True):
            reference = reference / reference.sum(-1, keepdim=True)
        reference = reference * options.get("scale", 1.0)
        (expected,) = torch.autograd.grad(reference, leaf, grad.double())
        for call in (call_native, call_composite):
            actual = call(_moe_topk_backward, grad, logits, indices, **options)
            self.assertEqual(actual.dtype, dtype)
            self.assertEqual(actual, expected.to(dtype))

    def check_choice(self, logits, k, bias=None, **options):
        """Checks that the op chooses as a stable sort of its own scores does."""
        num_experts = logits.shape[1]
        score = options.get("score", "softmax")
        # The weights of all experts are the scores in another order.
        everyone, weights = _moe_topk(logits, num_experts, score=score, normalize=False)
        scores = torch.empty_like(weights).scatter_(1, everyone, weights)
        wide = logits.double()
        wide = wide.softmax(-1) if score == "softmax" else wide.sigmoid()
        self.assertEqual(scores, wide, exact_dtype=False)
        indices, _ = _moe_topk(logits, k, bias, **options)
        expected = sorted_choice(scores, k, bias, **options)
        self.assertEqual(indices, expected)

    @parametrize("order", ORDERS)
    @parametrize("num_experts", [1, 8, 33, 64, 300, 1024])
    @parametrize("dtype", [torch.float32, torch.float64])
    def test_selection_is_that_of_a_sort(self, order, num_experts, dtype):
        # Each way in which the kernel selects: by a bound, by quickselect, or by sorting all (210).
        logits = in_order(order, 9, num_experts, dtype)
        for k in (1, 2, 8, num_experts // 4, num_experts // 2, num_experts):
            if 1 <= k <= num_experts:
                self.check_choice(logits, k, score="sigmoid")

    @parametrize("num_experts", [E, 128])
    @parametrize("name", list(TOPK_OPTIONS))
    @parametrize("dtype", [torch.float32, torch.float64])
    def test_selection_with_bias_and_groups(self, num_experts, name, dtype):
        # Ties everywhere; the bias makes every kind of value. Enough rows for two threads.
        logits = torch.randn(80, num_experts, dtype=dtype).round()
        bias = in_order("special", 1, num_experts)[0]
        options = {**TOPK_OPTIONS[name], "scale": 1.0, "normalize": False}
        selectable = num_experts
        if "num_groups" in options:
            selectable = num_experts // options["num_groups"] * options["top_groups"]
        for k in (1, 3, selectable):
            for some_bias in (None, bias):
                self.check_choice(logits, k, some_bias, **options)

    @parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
    def test_bias_is_read_in_the_dtype_of_the_scores(self, dtype):
        logits, bias = torch.randn(50, E), torch.randn(E).mul(2).to(dtype)
        expected = call_native(_moe_topk, logits, 4, bias.float())
        for call in (call_native, call_composite):
            self.assertEqual(call(_moe_topk, logits, 4, bias)[0], expected[0])

    def test_strided_logits(self):
        logits = torch.randn(E, 40)
        expected = torch._moe_topk(logits.t().contiguous(), 4)
        self.assertEqual(torch._moe_topk(logits.t(), 4), expected, rtol=0, atol=0)

    @parametrize("name", list(TOPK_OPTIONS))
    def test_gradcheck(self, name):
        logits = torch.randn(5, E, dtype=torch.float64, requires_grad=True)

        def weights(x):
            return torch.ops.aten._moe_topk(x, 4, **TOPK_OPTIONS[name])[1]

        torch.autograd.gradcheck(weights, (logits,))

    @parametrize("name", list(TOPK_OPTIONS))
    def test_opcheck(self, name):
        logits = torch.randn(6, E, requires_grad=True)
        torch.library.opcheck(
            torch.ops.aten._moe_topk.default,
            (logits, 3, torch.randn(E)),
            TOPK_OPTIONS[name],
            # Without the AOTDispatcher test, whose loss adds floats to the integer sum of the
            # first result. test_compiled covers that part.
            test_utils=(
                "test_schema",
                "test_autograd_registration",
                "test_faketensor",
            ),
        )
        options = {k: v for k, v in TOPK_OPTIONS[name].items() if "groups" not in k}
        indices, weights = torch.ops.aten._moe_topk(logits.detach(), 3, **options)
        torch.library.opcheck(
            torch.ops.aten._moe_topk_backward.default,
            (weights, logits.detach(), indices),
            options,
        )

    @parametrize("dynamic", [False, True])
    @parametrize("name", list(TOPK_OPTIONS))
    def test_compiled(self, name, dynamic):
        def weights(x):
            return torch._moe_topk(x, 4, **TOPK_OPTIONS[name])[1]

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

    def test_second_derivative_says_that_it_is_missing(self):
        logits = torch.randn(6, E, requires_grad=True)
        weights = F.moe_topk(logits, 3)[1]
        (grad,) = torch.autograd.grad(weights.square().sum(), logits, create_graph=True)
        message = "derivative for aten::_moe_topk_backward is not implemented"
        with self.assertRaisesRegex(RuntimeError, message):
            grad.sum().backward()

    @parametrize("api", ("jvp", "forward_ad"))
    def test_forward_mode_says_that_it_is_missing(self, api):
        def weights(x):
            return F.moe_topk(x, 3)[1]

        logits = torch.randn(6, E)
        message = "forward AD with _moe_topk that does not support it"
        with self.assertRaisesRegex(NotImplementedError, message):
            if api == "jvp":
                jvp(weights, (logits,), (logits,))
            else:
                with forward_ad.dual_level():
                    weights(forward_ad.make_dual(logits, logits))

    @parametrize("autocast", (False, True))
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_autocast(self, autocast, dtype):
        # The op has no autocast rule: logits keep their dtype, and weights are float32.
        logits = torch.randn(6, E).to(dtype).requires_grad_()

        def run(enabled):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                indices, weights = torch._moe_topk(logits, 3, **TOPK_OPTIONS["groups"])
            (grad,) = torch.autograd.grad(weights.square().sum(), logits)
            return indices, weights, grad

        actual = run(autocast)
        self.assertEqual([x.dtype for x in actual[1:]], [torch.float32, dtype])
        self.assertEqual(actual, run(False), rtol=0, atol=0)

    @parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    @parametrize("device", ["cpu", "meta", "cuda"])
    def test_functional_is_this_op(self, device, dtype):
        # Also on fake devices, the functional calls only this op, without softmax or gather.
        with FakeTensorMode():
            logits = torch.empty(7, E, device=device, dtype=dtype)
            graph = make_fx(lambda x: F.moe_topk(x, 4))(logits).graph
        called = [n.target for n in graph.nodes if n.op == "call_function"]
        called = [
            target for target in called if isinstance(target, torch._ops.OpOverload)
        ]
        self.assertEqual(called, [_moe_topk])

    def check_no_sync(self, call):
        # On a fake GPU, because copies to the host cannot be detected on the CPU.
        with FakeTensorMode():
            logits = torch.empty(6, E, device="cuda")
            bias = torch.empty(E, device="cuda")
            with NoHostSyncMode():
                for some_bias, options in ((None, {}), (bias, TOPK_OPTIONS["groups"])):
                    indices, weights = call(_moe_topk, logits, 3, some_bias, **options)
                call(_moe_topk_backward, weights, logits, indices)

    def test_no_host_sync(self):
        def synchronising(op, *args, **kwargs):
            args[0].isnan().any().item()
            return call_composite(op, *args, **kwargs)

        self.check_no_sync(call_composite)
        with self.assertRaisesRegex(RuntimeError, "needs a host sync"):
            self.check_no_sync(synchronising)

    def test_export_keeps_the_op(self):
        class Router(torch.nn.Module):
            def forward(self, logits):
                return F.moe_topk(logits, 3)

        logits = torch.randn(6, E)
        program = torch.export.export(Router(), (logits,))
        for exported in (program, program.run_decompositions()):
            called = [n.target for n in exported.graph.nodes if "moe" in str(n.target)]
            self.assertEqual(called, [_moe_topk])
            self.assertEqual(tuple(exported.module()(logits)), tuple(Router()(logits)))

    @config.patch(cpp_wrapper=True)
    @parametrize("name", ["groups", "not_normalized"])
    def test_c_shims(self, name):
        # The shims take strings, bools and optional integers. Without one, Inductor calls Python.
        logits = torch.randn(6, E, requires_grad=True)

        def run(function):
            indices, weights = function(logits)
            (grad,) = torch.autograd.grad(weights.square().sum(), logits)
            return indices, weights.detach(), grad

        def router(x):
            return torch._moe_topk(x, 3, **TOPK_OPTIONS[name])

        torch._dynamo.reset()
        compiled = torch.compile(router, fullgraph=True)
        actual, codes = run_and_get_code(lambda: run(compiled))
        self.assertEqual(actual, run(router))
        for op in ("_moe_topk", "_moe_topk_backward"):
            self.assertIn(f"aoti_torch_cpu_{op}(", "".join(codes))

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
                ({"bias": torch.zeros(E).to_sparse()}, "bias must be a strided"),
                name="bias_layout",
            ),
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


instantiate_parametrized_tests(TestMoeTopk)

if __name__ == "__main__":
    run_tests()
