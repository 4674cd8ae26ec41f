# Owner(s): ["module: nn"]

import dataclasses
import inspect
import re
import typing

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import get_testing_overrides, TorchFunctionMode
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_moe import (
    all_cases,
    all_dtypes,
    nbytes,
    read_page,
    RecordOps,
    run_code_blocks,
    run_docstring,
    saved_bytes_bound,
    saved_for_backward,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_generators import get_case, MoeCase
from torch.testing._internal.moe_reference import (
    ACTIVATIONS,
    check_close,
    check_moe_mlp,
    check_moe_mlp_backward,
    moe_mlp_backward_reference,
    moe_mlp_backward_unfused,
    moe_topk_reference,
)


# One line per published router.
ROUTERS = {
    "switch": (1, {"normalize": False}),
    "mixtral": (2, {}),
    "qwen": (8, {"score": "softmax", "normalize": True}),
    "deepseek_v2": (
        4,
        {"normalize": False, "num_groups": 4, "top_groups": 2, "scale": 16.0},
    ),
    "deepseek_v3": (
        4,
        {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5},
    ),
}

all_routers = parametrize("router", list(ROUTERS))


def router_arguments(router, device, num_experts=16):
    k, kwargs = ROUTERS[router]
    if router == "deepseek_v3":
        generator = torch.Generator().manual_seed(1)
        bias = torch.randn(num_experts, generator=generator).to(device)
        kwargs = {**kwargs, "bias": bias}
    return k, kwargs


class TestMoeTopk(TestCase):
    @all_routers
    @parametrize("shape", [(33,), (3, 5), (0,), ()])
    def test_reference(self, device, router, shape):
        logits = torch.randn(*shape, 16, device=device, requires_grad=True)
        k, kwargs = router_arguments(router, device)
        indices, weights = F.moe_topk(logits, k, **kwargs)
        expected_indices, expected_weights = moe_topk_reference(logits, k, **kwargs)
        self.assertEqual(indices.dtype, torch.int64)
        self.assertEqual(weights.dtype, torch.float32)
        self.assertEqual(tuple(indices.shape), (*shape, k))
        self.assertEqual(indices, expected_indices)
        self.assertEqual(weights, expected_weights, exact_dtype=False)

        cotangent = torch.randn_like(weights)
        (grad,) = torch.autograd.grad(weights, logits, cotangent)
        (expected,) = torch.autograd.grad(expected_weights, logits, cotangent.double())
        self.assertEqual(grad, expected)

    @parametrize(
        "dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float64]
    )
    def test_dtype(self, device, dtype):
        # Scores are never computed in less than float32.
        logits = torch.randn(40, 16, device=device).to(dtype)
        indices, weights = F.moe_topk(logits, 4)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        expected_indices, expected_weights = F.moe_topk(logits.to(wide), 4)
        self.assertEqual(weights.dtype, wide)
        self.assertEqual(indices, expected_indices)
        self.assertEqual(weights, expected_weights, rtol=0, atol=0)

    @parametrize("score", ["softmax", "sigmoid"])
    @parametrize("groups", [False, True])
    def test_ties_go_to_the_lower_index(self, device, score, groups):
        kwargs = {"num_groups": 4, "top_groups": 2} if groups else {}
        logits = torch.zeros(2, 64, device=device)
        logits[1, 5] = 1.0
        indices, _ = F.moe_topk(logits, 4, score=score, **kwargs)
        self.assertEqual(indices.tolist(), [[0, 1, 2, 3], [5, 0, 1, 2]])

    def test_never_leaves_the_chosen_groups(self, device):
        # The best group has two experts that are ruled out by the bias.
        logits = torch.zeros(1, 8, device=device)
        bias = torch.tensor([0, 0, 0, 0, 9, 9, -torch.inf, -torch.inf], device=device)
        indices, _ = F.moe_topk(
            logits, 4, score="sigmoid", bias=bias, num_groups=2, top_groups=1
        )
        self.assertEqual(indices.tolist(), [[4, 5, 6, 7]])

    def test_bias_changes_no_weight_and_gets_no_gradient(self, device):
        logits = torch.randn(6, 8, device=device, requires_grad=True)
        bias = torch.zeros(8, device=device, requires_grad=True)
        shift = torch.tensor([9.0, 0, 0, 0, 0, 0, 0, 0], device=device)
        indices, weights = F.moe_topk(logits, 3, bias=bias + shift, normalize=False)
        self.assertTrue((indices[:, 0] == 0).all())
        self.assertEqual(weights, logits.softmax(-1).gather(1, indices))
        weights.sum().backward()
        self.assertIsNone(bias.grad)
        self.assertGreater(logits.grad.abs().max(), 0)

    def test_gradient_of_the_chosen_only(self, device):
        # A sigmoid score depends on its own logit alone.
        logits = torch.randn(6, 8, device=device, requires_grad=True)
        indices, weights = F.moe_topk(logits, 3, score="sigmoid")
        weights.square().sum().backward()
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)
        self.assertEqual(logits.grad[~chosen].count_nonzero(), 0)
        self.assertEqual(logits.grad[chosen].count_nonzero(), 18)

    @parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_fake(self, device, dtype):
        # On every device, whether it is there or not.
        for where in (device, "meta", "cuda"):
            with FakeTensorMode():
                fake = torch.empty(7, 16, device=where, dtype=dtype)
                indices, weights = F.moe_topk(fake, 4)
            self.assertEqual(indices.device, fake.device)
            self.assertEqual(indices.dtype, torch.int64)
            self.assertEqual(weights.device, fake.device)
            self.assertEqual(weights.dtype, torch.promote_types(dtype, torch.float32))

    def test_normalize_survives_underflow(self, device):
        logits = torch.full((1, 4), -200.0, device=device)
        _, weights = F.moe_topk(logits, 2, score="sigmoid")
        self.assertEqual(weights.tolist(), [[0.0, 0.0]])


def moe_mlp_arguments(ops):
    return (ops.input, ops.topk_indices, ops.topk_weights, ops.w_in, ops.w_out)


class TestMoeMlp(TestCase):
    @parametrize("dtype", [torch.float32, torch.bfloat16])
    @all_cases
    @parametrize("separate_up", [False, True])
    def test_reference(self, device, separate_up, case, dtype):
        case = dataclasses.replace(case, num_rows=None, row_alignment=1)
        ops = case.operands(dtype, device, bias=True, requires_grad=True)
        ops = ops.split_gate() if separate_up else ops
        others = {"b_in": ops.b_in, "b_out": ops.b_out, "w_up": ops.w_up}
        output = F.moe_mlp(*moe_mlp_arguments(ops), **others)
        self.assertEqual(output.dtype, dtype)
        check_moe_mlp((output,), ops.args())

        operands = (ops.input, ops.w_in, ops.w_out, ops.topk_weights, *others.values())
        operands = operands if separate_up else operands[:-1]
        grads = torch.autograd.grad(output, operands, ops.grad_out)
        grads += (output.new_empty(0),) * (7 - len(grads))
        check_moe_mlp_backward(grads, ops.grad_out, ops.args())

    @all_dtypes
    @parametrize("of_logits", [torch.float64, torch.float32, torch.bfloat16])
    def test_router_of_another_dtype(self, device, dtype, of_logits):
        # Whatever moe_topk returns, moe_mlp takes, with a gradient for the logits.
        ops = MoeCase("pairs", num_tokens=12).operands(dtype, device)
        num_experts = ops.w_in.shape[0]
        logits = torch.randn(12, num_experts, device=device).to(of_logits)
        indices, weights = F.moe_topk(logits.requires_grad_(), 2)
        wide = torch.promote_types(of_logits, torch.float32)
        self.assertEqual(weights.dtype, wide)
        output = F.moe_mlp(ops.input, indices, weights, ops.w_in, ops.w_out)
        kept = weights if wide == dtype else weights.float()
        expected = F.moe_mlp(ops.input, indices, kept, ops.w_in, ops.w_out)
        self.assertEqual(output, expected, rtol=0, atol=0)
        (grad,) = torch.autograd.grad(output.sum(), logits)
        self.assertEqual(grad.dtype, of_logits)
        self.assertGreater(grad.abs().max(), 0)

    @parametrize("shape", [(3, 4), (2, 2, 3), (12, 1)])
    def test_leading_dimensions(self, device, shape):
        ops = MoeCase("flat", num_tokens=12).operands(torch.float32, device)
        x, indices, weights, *experts = moe_mlp_arguments(ops)
        expected = F.moe_mlp(x, indices, weights, *experts)
        actual = F.moe_mlp(
            x.view(*shape, -1),
            indices.view(*shape, -1),
            weights.view(*shape, -1),
            *experts,
        )
        self.assertEqual(actual, expected.view(*shape, -1), rtol=0, atol=0)

    def test_one_token_without_leading_dimension(self, device):
        ops = get_case("one_token").operands(torch.float32, device)
        x, indices, weights, *experts = moe_mlp_arguments(ops)
        expected = F.moe_mlp(x, indices, weights, *experts)
        actual = F.moe_mlp(x[0], indices[0], weights[0], *experts)
        self.assertEqual(actual, expected[0], rtol=0, atol=0)

    @all_routers
    def test_router_learns(self, device, router):
        # The gradient reaches the router's weight through F.moe_topk.
        case = MoeCase("router", num_tokens=11, num_experts=16, dim=8, hidden=6)
        ops = case.operands(torch.float64, device)
        weight = torch.randn(16, 8, device=device, dtype=torch.float64)
        k, kwargs = router_arguments(router, device)

        def layer(weight):
            routing = F.moe_topk(F.linear(ops.input, weight), k, **kwargs)
            return F.moe_mlp(ops.input, *routing, ops.w_in, ops.w_out)

        self.assertTrue(
            torch.autograd.gradcheck(layer, weight.requires_grad_(), fast_mode=True)
        )

    def test_slots_that_do_not_fit(self, device):
        # Two rows for three slots of one expert: the last token comes back empty.
        x = torch.randn(3, 4, device=device)
        indices = torch.zeros(3, 1, dtype=torch.int64, device=device)
        experts = (
            torch.randn(1, 6, 4, device=device),
            torch.randn(1, 4, 3, device=device),
        )
        full = F.moe_mlp(x, indices, None, *experts)
        clipped = F.moe_mlp(x, indices, None, *experts, num_rows=2)
        self.assertEqual(clipped[:2], full[:2])
        self.assertEqual(clipped[2].count_nonzero(), 0)

    @parametrize("which", ["none", "no_grad", "input", "w_out", "topk_weights", "b_in"])
    def test_preact_only_for_backward(self, device, which):
        ops = get_case("uniform").operands(torch.float32, device, bias=True)
        if which == "no_grad":
            ops.input.requires_grad_()
        elif which != "none":
            getattr(ops, which).requires_grad_()
        with torch.set_grad_enabled(which != "no_grad"), RecordOps() as record:
            F.moe_mlp(*moe_mlp_arguments(ops), b_in=ops.b_in, b_out=ops.b_out)
        (kwargs,) = [
            kwargs
            for func, kwargs, _ in record.calls
            if func is torch.ops.aten._moe_mlp.default
        ]
        self.assertEqual(
            kwargs.get("compute_preact", True), which not in ("none", "no_grad")
        )

    def test_jit_trace(self, device):
        # Its sizes are tensors.
        ops = get_case("uniform").operands(torch.float32, device)
        x, *others = moe_mlp_arguments(ops)
        traced = torch.jit.trace(lambda x: F.moe_mlp(x, *others), x)
        self.assertEqual(traced(2 * x), F.moe_mlp(2 * x, *others))

    @parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_saved_bytes(self, device, dtype):
        case = MoeCase("saved", num_tokens=50, num_experts=8, top_k=4)
        ops = case.operands(dtype, device, requires_grad=True)
        with saved_for_backward(exclude=(ops.w_in, ops.w_out)) as saved:
            F.moe_mlp(*moe_mlp_arguments(ops))
        bound = saved_bytes_bound(dtype, 50, 16, 2 * 24, num_experts=8, top_k=4)
        self.assertLessEqual(nbytes(saved), bound)
        self.assertGreater(nbytes(saved), dtype.itemsize * 200 * 48)

    @parametrize("dtype", [torch.float32, torch.bfloat16])
    @parametrize("separate_up", [False, True])
    def test_grouped_mlp(self, device, separate_up, dtype):
        # The last row belongs to no group, and the second group has none.
        case = MoeCase("rows", num_tokens=9, top_k=1, num_experts=3)
        ops = case.operands(
            dtype, device, weights_dtype=None, bias=True, requires_grad=True
        )
        offs = torch.tensor([3, 3, 8], dtype=torch.int32, device=device)
        ops = dataclasses.replace(ops, offs=offs, row_slots=None, slot_rows=None)
        ops = ops.split_gate() if separate_up else ops
        options = {"b_in": ops.b_in, "b_out": ops.b_out, "w_up": ops.w_up}
        output = F.grouped_mlp(ops.input, ops.w_in, ops.w_out, offs=offs, **options)
        args = ops.args()
        check_moe_mlp((output,), args)
        self.assertEqual(output[8].count_nonzero(), 0)
        present = [x for x in (ops.input, ops.w_in, ops.w_out) if x is not None]
        present += [x for x in options.values() if x is not None]
        grads = torch.autograd.grad(output, present, ops.grad_out)
        expected = moe_mlp_backward_reference(ops.grad_out, *args)
        unfused = moe_mlp_backward_unfused(ops.grad_out, *args)
        names = [n for n, x in zip(expected._fields, expected) if x is not None]
        for name, grad in zip(names, grads, strict=True):
            tensors = grad, getattr(expected, name), getattr(unfused, name)
            check_close(*tensors, dtype, name)

    def test_grouped_mlp_keeps_preactivations_for_backward_only(self, device):
        ops = get_case("top_1").operands(torch.float32, device)
        args, offs = (ops.input, ops.w_in, ops.w_out), ops.offs
        for requires_grad in (False, True):
            ops.w_in.requires_grad_(requires_grad)
            with RecordOps() as record:
                F.grouped_mlp(*args, offs=offs)
            ((_, kwargs, _),) = record.calls
            self.assertEqual(kwargs.get("compute_preact", True), requires_grad)

    @parametrize("functional", ["moe_mlp", "moe_topk", "grouped_mlp"])
    def test_torch_function(self, device, functional):
        ops = get_case("uniform").operands(torch.float32, device)
        if functional == "moe_mlp":
            function, args = F.moe_mlp, moe_mlp_arguments(ops)
            kwargs = {"activation": "swiglu_oai", "limit": 2.0, "alpha": 1.5}
        elif functional == "grouped_mlp":
            function, args = F.grouped_mlp, (ops.input, ops.w_in, ops.w_out)
            offs = ops.offs.clamp(max=13)
            kwargs = {"offs": offs, "limit": 2.0}
        else:
            function, args = F.moe_topk, (ops.input, 2)
            kwargs = {"score": "sigmoid", "scale": 2.0}
        seen = []

        class Mode(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                if func is function:
                    seen.append(kwargs)
                return func(*args, **(kwargs or {}))

        class Subclass(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                if func is function:
                    seen.append(kwargs)
                return super().__torch_function__(func, types, args, kwargs)

        expected = function(*args, **kwargs)
        with Mode():
            self.assertEqual(function(*args, **kwargs), expected)
        actual = function(args[0].as_subclass(Subclass), *args[1:], **kwargs)
        self.assertIsInstance(tuple(actual)[-1], Subclass)
        self.assertEqual(len(seen), 2)
        for received in seen:
            self.assertEqual({k: received[k] for k in kwargs}, kwargs)
        # The stub for test_overrides.py has the arguments of the documentation.
        stub = inspect.signature(get_testing_overrides()[function])
        (signature,) = re.findall(
            rf"^ *{functional}\((.*)\) -> ", function.__doc__, re.M
        )
        names = [a.partition("=")[0] for a in signature.split(", ") if a != "*"]
        self.assertEqual(list(stub.parameters), names)


@instantiate_parametrized_tests
class TestMoeFunctionalText(TestCase):
    def test_activation_names(self):
        # One list in C++, printed by the validator; one Literal; one reference.
        literal = typing.get_args(F._MoeActivation)
        self.assertEqual(literal, ACTIVATIONS)
        ops = get_case("uniform").operands(torch.float32)
        with self.assertRaisesRegex(ValueError, f"one of {', '.join(literal)}, got ''"):
            F.moe_mlp(*moe_mlp_arguments(ops), activation="")

    @parametrize("functional", ["moe_mlp", "moe_topk"])
    def test_examples(self, functional):
        # Its examples run.
        run_docstring(getattr(F, functional), {"torch": torch, "F": F})

    def test_documentation(self):
        count, names = run_code_blocks(read_page(__file__, "nn.functional.moe.md"))
        self.assertEqual(count, 5)
        gate, up = names["gate_up_proj"].mT[:, 0::2], names["gate_up_proj"].mT[:, 1::2]
        bias = names["gate_up_proj_bias"]
        z = F.moe_mlp(
            *(names[name] for name in ("x", "indices", "weights")),
            torch.cat([gate, up], dim=1),
            names["down_proj"].mT.contiguous(),
            b_in=torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1),
            b_out=names["down_proj_bias"],
            activation="swiglu_oai",
        )
        self.assertEqual(names["z"], z)


instantiate_device_type_tests(TestMoeTopk, globals())
instantiate_device_type_tests(TestMoeMlp, globals())

if __name__ == "__main__":
    run_tests()
