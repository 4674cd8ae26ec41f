# Owner(s): ["module: amp (automated mixed precision)"]
"""Autocast of the MoE functionals: low-precision experts, float32 router."""

import torch
import torch.nn.functional as F
from torch.testing._internal.common_moe import RecordOps
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


T, K, E, D, H = 24, 2, 4, 16, 32


def operands(dtype=torch.float32, bias=False, separate_up=False):
    torch.manual_seed(0)
    topk_indices, topk_weights = F.moe_topk(torch.randn(T, E), K)
    tensors = {
        "input": torch.randn(T, D, dtype=dtype),
        "topk_weights": topk_weights.to(dtype),
        "w_in": torch.randn(E, 2 * H, D, dtype=dtype),
        "w_out": torch.randn(E, D, H, dtype=dtype),
    }
    if bias:
        tensors["b_in"] = torch.randn(E, 2 * H, dtype=dtype)
        tensors["b_out"] = torch.randn(E, D, dtype=dtype)
    if separate_up:
        tensors["w_in"], tensors["w_up"] = tensors["w_in"].clone().chunk(2, dim=1)
    return tensors, topk_indices


def cast_all_but_router_weights(tensors, dtype):
    return {k: v if k == "topk_weights" else v.to(dtype) for k, v in tensors.items()}


class TestMoeAutocast(TestCase):
    def check(self, out, leaves, low, topk_indices):
        """out and the gradients of leaves are those of the cast operands low."""
        out.sum().backward()
        low = {k: v.clone().requires_grad_() for k, v in low.items()}
        expected = F.moe_mlp(topk_indices=topk_indices, **low)
        self.assertEqual(out, expected, atol=0, rtol=0)
        expected.sum().backward()
        for name, leaf in leaves.items():
            self.assertEqual(leaf.grad.dtype, leaf.dtype)
            grad = low[name].grad.to(leaf.dtype)
            self.assertEqual(leaf.grad, grad, atol=0, rtol=0, msg=name)

    @parametrize("dtype", (torch.bfloat16, torch.float16))
    @parametrize("bias", (False, True))
    @parametrize("separate_up", (False, True))
    @parametrize("compiled", (False, True))
    def test_experts_are_cast_and_router_weights_are_not(
        self, dtype, bias, separate_up, compiled
    ):
        tensors, topk_indices = operands(bias=bias, separate_up=separate_up)

        def function(tensors):
            with torch.autocast("cpu", dtype):
                return F.moe_mlp(topk_indices=topk_indices, **tensors)

        if compiled:
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        leaves = {k: v.clone().requires_grad_() for k, v in tensors.items()}
        out = function(leaves)
        self.assertEqual(out.dtype, dtype)
        low = cast_all_but_router_weights(tensors, dtype)
        self.check(out, leaves, low, topk_indices)

    def test_rounded_router_weights_would_show(self):
        # The comparison above can tell the two rules apart.
        tensors, topk_indices = operands()
        low = cast_all_but_router_weights(tensors, torch.bfloat16)
        out = F.moe_mlp(topk_indices=topk_indices, **low)
        low["topk_weights"] = low["topk_weights"].bfloat16()
        self.assertFalse(torch.equal(out, F.moe_mlp(topk_indices=topk_indices, **low)))

    def test_activation_of_an_earlier_op(self):
        tensors, topk_indices = operands()
        tensors["input"] = tensors["input"].bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            out = F.moe_mlp(topk_indices=topk_indices, **tensors)
        low = cast_all_but_router_weights(tensors, torch.bfloat16)
        self.assertEqual(
            out, F.moe_mlp(topk_indices=topk_indices, **low), atol=0, rtol=0
        )

    @parametrize("given", (torch.bfloat16, torch.float16))
    @parametrize("dtype", (torch.bfloat16, torch.float16))
    def test_16_bit_router_weights(self, given, dtype):
        # Legal next to operands of their dtype, so legal when those are cast.
        tensors, topk_indices = operands(given)
        leaves = {k: v.clone().requires_grad_() for k, v in tensors.items()}
        with torch.autocast("cpu", dtype):
            out = F.moe_mlp(topk_indices=topk_indices, **leaves)
        self.assertEqual(out.dtype, dtype)
        tensors["topk_weights"] = tensors["topk_weights"].float()
        low = cast_all_but_router_weights(tensors, dtype)
        self.check(out, leaves, low, topk_indices)

    def test_backward_inside_autocast(self):
        tensors, topk_indices = operands()
        grads = []
        for inside in (False, True):
            leaves = {k: v.clone().requires_grad_() for k, v in tensors.items()}
            with torch.autocast("cpu", torch.bfloat16):
                out = F.moe_mlp(topk_indices=topk_indices, **leaves)
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                out.sum().backward()
            grads.append([leaf.grad for leaf in leaves.values()])
        self.assertEqual(grads[0], grads[1], atol=0, rtol=0)

    @parametrize("grouped", (False, True))
    def test_decomposed_program_casts(self, grouped):
        # torch.export keeps composite ops, and decomposes them below autocast.
        tensors, topk_indices = operands()

        class Layer(torch.nn.Module):
            def forward(self, input, topk_weights, w_in, w_out):
                with torch.autocast("cpu", torch.bfloat16):
                    if grouped:
                        offs = torch.arange(1, E + 1, dtype=torch.int32) * (T // E)
                        return F.grouped_mlp(input, w_in, w_out, offs=offs)
                    return F.moe_mlp(input, topk_indices, topk_weights, w_in, w_out)

        args = tuple(tensors.values())
        exported = torch.export.export(Layer(), args).run_decompositions()
        out = exported.module()(*args)
        self.assertEqual(out.dtype, torch.bfloat16)
        self.assertEqual(out, Layer()(*args), atol=0, rtol=0)

    def test_weight_casts_are_cached(self):
        tensors, topk_indices = operands()
        tensors["w_in"].requires_grad_()
        tensors["w_out"].requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), RecordOps() as record:
            F.moe_mlp(topk_indices=topk_indices, **tensors)
            F.moe_mlp(topk_indices=topk_indices, **tensors)
        cast = torch.ops.aten._to_copy.default
        casts = [tuple(x.shape) for op, _, x in record.calls if op is cast]
        self.assertEqual(casts.count((E, 2 * H, D)), 1)
        self.assertEqual(casts.count((E, D, H)), 1)
        self.assertEqual(casts.count((T, K)), 0)

    @parametrize("dtype", (torch.float32, torch.float64))
    def test_left_alone(self, dtype):
        # Switched off, and for float64, which autocast never casts.
        tensors, topk_indices = operands(dtype)
        expected = F.moe_mlp(topk_indices=topk_indices, **tensors)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float64):
            out = F.moe_mlp(topk_indices=topk_indices, **tensors)
        self.assertEqual(out, expected, atol=0, rtol=0)

    @parametrize("score", ("softmax", "sigmoid"))
    def test_router_computes_in_float32(self, score):
        logits = torch.randn(T, E, dtype=torch.bfloat16)
        expected = F.moe_topk(logits, K, score=score)
        with torch.autocast("cpu", torch.bfloat16):
            actual = F.moe_topk(logits, K, score=score)
        self.assertEqual(actual[1].dtype, torch.float32)
        self.assertEqual(actual, expected, atol=0, rtol=0)


instantiate_parametrized_tests(TestMoeAutocast)

if __name__ == "__main__":
    run_tests()
