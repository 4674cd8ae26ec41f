# Owner(s): ["module: functorch"]
"""torch.func transforms of the MoE functionals: what composes, and what says it does not."""

import functools

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


B, T, K, E, D, H = 3, 6, 2, 4, 5, 7


def mlp(x, logits, w_in, w_out):
    return F.moe_mlp(x, *F.moe_topk(logits, K), w_in, w_out)


def operands():
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return randn(B, T, D), randn(B, T, E), randn(E, 2 * H, D), randn(E, D, H)


class TestMoeFunctorch(TestCase):
    def test_vmap_over_tokens(self):
        x, logits, w_in, w_out = operands()
        out = vmap(mlp, in_dims=(0, 0, None, None))(x, logits, w_in, w_out)
        one_by_one = [mlp(x[i], logits[i], w_in, w_out) for i in range(B)]
        self.assertEqual(out, torch.stack(one_by_one))
        self.assertEqual(out, mlp(x, logits, w_in, w_out))

    def test_vmap_over_weights(self):
        x, logits, w_in, w_out = operands()
        w_in, w_out = (torch.stack([w, 2 * w, -w]) for w in (w_in, w_out))
        out = vmap(mlp, in_dims=(None, None, 0, 0))(x[0], logits[0], w_in, w_out)
        one_by_one = [mlp(x[0], logits[0], w_in[i], w_out[i]) for i in range(B)]
        self.assertEqual(out, torch.stack(one_by_one))

    @parametrize("name", ("input", "topk_indices", "topk_weights", "w_in", "w_out", "w_up", "b_in", "b_out"))  # fmt: skip
    def test_vmap_over_one_operand(self, name):
        # The others are shared, whatever their place in the ops below.
        x, logits, w_in, w_out = operands()
        topk_indices, topk_weights = F.moe_topk(logits, K)
        single = {
            "input": x[0],
            "topk_indices": topk_indices[0],
            "topk_weights": topk_weights[0],
            "w_in": w_in[:, :H],
            "w_up": w_in[:, H:],
            "w_out": w_out,
            "b_in": torch.linspace(-1, 1, E * 2 * H, dtype=x.dtype).view(E, -1),
            "b_out": torch.linspace(1, 2, E * D, dtype=x.dtype).view(E, D),
        }
        batches = {
            "input": x,
            "topk_indices": topk_indices,
            "topk_weights": topk_weights,
        }
        batch = batches.get(name)
        if batch is None:
            batch = torch.stack([single[name] * factor for factor in (1, 2, -1)])
        leaves = [n for n, tensor in single.items() if tensor.is_floating_point()]

        def loss(operand):
            def of_leaves(tensors):
                args = {**single, name: operand, **tensors}
                return F.moe_mlp(**args).sin().sum()

            tensors = {n: operand if n == name else single[n] for n in leaves}
            return grad(of_leaves)(tensors)

        actual = vmap(loss)(batch)
        for i in range(B):
            expected = loss(batch[i])
            self.assertEqual({n: g[i] for n, g in actual.items()}, expected)

    def test_vmap_of_rows_in_expert_order(self):
        x, _, w_in, w_out = operands()
        offs = torch.tensor([[1, 1, 4, 6], [0, 2, 2, 5], [6, 6, 6, 6]]).int()
        function = functools.partial(F.grouped_mlp, w_in=w_in, w_out=w_out)
        out = vmap(lambda x, offs: function(x, offs=offs))(x, offs)
        for i in range(B):
            self.assertEqual(out[i], function(x[i], offs=offs[i]))

    def test_grad(self):
        args = operands()
        actual = grad(lambda *a: mlp(*a).sin().sum(), argnums=(0, 1, 2, 3))(*args)
        leaves = [arg.clone().requires_grad_() for arg in args]
        mlp(*leaves).sin().sum().backward()
        self.assertEqual(actual, tuple(leaf.grad for leaf in leaves))

    def test_per_sample_gradients(self):
        x, logits, w_in, w_out = operands()

        def loss(w_in, w_out, x, logits):
            return mlp(x, logits, w_in, w_out).square().sum()

        per_sample = vmap(grad(loss, argnums=(0, 1)), in_dims=(None, None, 0, 0))
        actual = per_sample(w_in, w_out, x, logits)
        for i in range(B):
            expected = grad(loss, argnums=(0, 1))(w_in, w_out, x[i], logits[i])
            self.assertEqual(tuple(g[i] for g in actual), expected)

    @parametrize("name", ("x", "logits", "w_in", "w_out"))
    @parametrize("outer", ("backward", "grad"))
    def test_gradient_of_a_vmap(self, name, outer):
        # A batched operand does not say inside vmap that it requires grad.
        x, logits, w_in, w_out = operands()
        args = {"x": x[0], "logits": logits[0], "w_in": w_in, "w_out": w_out}
        batches = torch.stack([args[name] * factor for factor in (1, 2, -1)])

        def loss(operand):
            return mlp(**{**args, name: operand}).sin().sum()

        def sum_of_losses(batches):
            return vmap(loss)(batches).sum()

        if outer == "grad":
            actual = grad(sum_of_losses)(batches)
        else:
            batches.requires_grad_()
            (actual,) = torch.autograd.grad(sum_of_losses(batches), batches)
        expected = [grad(loss)(operand) for operand in batches.detach()]
        self.assertEqual(actual, torch.stack(expected))

    @parametrize("transform", ("grad", "vjp"))
    @parametrize("outer", ("grad", "backward", "aot_eager"))
    def test_inner_derivative_by_another_tensor(self, transform, outer):
        """Inside the inner transform, what the outer one differentiates does not say that it requires grad."""
        x, logits, w_in, w_out = operands()
        one = torch.ones((), dtype=torch.float64)

        def inner(w_in):
            def loss(factor):
                return mlp(x[0], logits[0], w_in, w_out).sin().sum() * factor

            if transform == "grad":
                return grad(loss)(one)
            return vjp(loss, one)[1](one)[0]

        if outer == "grad":
            actual = grad(inner)(w_in)
        else:
            function = inner
            if outer == "aot_eager":
                function = torch.compile(inner, fullgraph=True, backend=outer)
            w_in.requires_grad_()
            (actual,) = torch.autograd.grad(function(w_in), w_in)
        leaf = w_in.detach().requires_grad_()
        mlp(x[0], logits[0], leaf, w_out).sin().sum().backward()
        self.assertEqual(actual, leaf.grad)

    def test_vjp_and_jacrev(self):
        x, logits, w_in, w_out = (
            arg[0] if arg.shape[0] == B else arg for arg in operands()
        )
        out, pullback = vjp(lambda x: mlp(x, logits, w_in, w_out), x)
        jacobian = jacrev(lambda x: mlp(x, logits, w_in, w_out))(x)
        self.assertEqual(jacobian.shape, (T, D, T, D))
        direction = torch.ones_like(out)
        expected = torch.einsum("ab,abcd->cd", direction, jacobian)
        self.assertEqual(pullback(direction)[0], expected)
        # A token's output depends on no other token.
        others = ~torch.eye(T, dtype=torch.bool)
        self.assertEqual(jacobian.transpose(1, 2)[others].abs().max().item(), 0)

    def test_functional_call(self):
        class Block(torch.nn.Module):
            def __init__(self, w_in, w_out):
                super().__init__()
                self.w_in = torch.nn.Parameter(w_in)
                self.w_out = torch.nn.Parameter(w_out)

            def forward(self, x, logits):
                return mlp(x, logits, self.w_in, self.w_out)

        x, logits, w_in, w_out = operands()
        params = {"w_in": 2 * w_in, "w_out": 3 * w_out}
        self.assertEqual(
            functional_call(Block(w_in, w_out), params, (x, logits)),
            mlp(x, logits, 2 * w_in, 3 * w_out),
        )

    @parametrize("api", ("jvp", "forward_ad"))
    def test_forward_mode_says_that_it_is_missing(self, api):
        x, logits, w_in, w_out = operands()
        message = "forward AD with _moe_mlp that does not support it"
        with self.assertRaisesRegex(NotImplementedError, message):
            if api == "jvp":
                jvp(lambda x: mlp(x, logits, w_in, w_out), (x,), (x,))
            else:
                with forward_ad.dual_level():
                    mlp(forward_ad.make_dual(x, x), logits, w_in, w_out)

    def test_second_derivative_says_that_it_is_missing(self):
        x, logits, w_in, w_out = operands()
        x.requires_grad_()
        out = mlp(x, logits, w_in, w_out).sin().sum()
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        message = "derivative for aten::_moe_mlp_backward is not implemented"
        with self.assertRaisesRegex(RuntimeError, message):
            first.sum().backward()


GROUPS = {"num_groups": 2, "top_groups": 1}


class TestMoeTopkFunctorch(TestCase):
    @parametrize("options", ({}, GROUPS, {"score": "sigmoid", "normalize": False}))
    def test_vmap(self, options):
        logits, bias = operands()[1], torch.linspace(0, 1, E, dtype=torch.float64)

        def route(logits, bias):
            return F.moe_topk(logits, K, bias=bias, **options)

        actual = vmap(route, in_dims=(0, None))(logits, bias)
        biases = torch.stack([bias, -bias])
        other = vmap(route, in_dims=(None, 0))(logits[0], biases)
        for i in range(B):
            expected = route(logits[i], bias)
            self.assertEqual([x[i] for x in actual], list(expected))
        for i in range(2):
            expected = route(logits[0], biases[i])
            self.assertEqual([x[i] for x in other], list(expected))

    @parametrize("options", ({}, GROUPS, {"score": "sigmoid", "normalize": False}))
    def test_grad_and_vjp(self, options):
        logits = operands()[1]

        def weights(logits):
            return F.moe_topk(logits, K, **options)[1]

        def loss(logits):
            return weights(logits).sin().sum()

        per_sample = vmap(grad(loss))(logits)
        for i in range(B):
            leaf = logits[i].clone().requires_grad_()
            loss(leaf).backward()
            self.assertEqual(grad(loss)(logits[i]), leaf.grad)
            self.assertEqual(per_sample[i], leaf.grad)
        out, pullback = vjp(weights, logits[0])
        leaf = logits[0].clone().requires_grad_()
        cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        weights(leaf).backward(cotangent)
        self.assertEqual(pullback(cotangent)[0], leaf.grad)


instantiate_parametrized_tests(TestMoeFunctorch)
instantiate_parametrized_tests(TestMoeTopkFunctorch)

if __name__ == "__main__":
    run_tests()
