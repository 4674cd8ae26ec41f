# Owner(s): ["oncall: distributed"]
"""An adapter with an exchange of one rank gives the output of the module."""

import types

import torch
from torch import nn
from torch.distributed.tensor.parallel._expert_adapters import (
    DEFAULT_ADAPTERS,
    GroupedExpertsAdapter,
    MoEAdapter,
)
from torch.nn.utils.moe_lora import add_lora
from torch.testing._internal.common_utils import run_tests, TestCase


D, H, E, K, T = 8, 12, 4, 2, 9


class GroupedExperts(nn.Module):
    """Has the interface of torchtitan's experts, which only scale here."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(E, H, D))
        self.w2 = nn.Parameter(torch.randn(E, D, H))
        self.w3 = nn.Parameter(torch.randn(E, H, D))

    def forward(self, x, num_tokens_per_expert):
        counts = num_tokens_per_expert.tolist()
        scales = self.w1[:, 0, 0].repeat_interleave(torch.tensor(counts))
        return torch.cat([x[: sum(counts)] * scales[:, None], 0 * x[sum(counts) :]])


class Squared(nn.MoE):
    def run_experts(self, *args):
        return super().run_experts(*args).square()


class Recorder:
    """An exchange of one rank; keeps what it was given."""

    def __call__(self, input, topk_indices, topk_weights, experts, shared=None):
        self.ids, self.weights = topk_indices, topk_weights
        if topk_weights is None:
            topk_weights = torch.ones_like(topk_indices, dtype=torch.float32)
        ids = topk_indices.masked_fill(topk_indices == E, -1)
        output = experts(input.flatten(0, -2), ids.flatten(0, -2), topk_weights)
        output = output.view(input.shape)
        return output if shared is None else output + shared()


class TestAdapters(TestCase):
    def test_moe(self):
        torch.manual_seed(0)
        module = nn.MoE(D, H, E, K, shared_hidden_dim=H)
        adapter = MoEAdapter()
        self.assertTrue(adapter.matches(module))
        self.assertEqual(adapter.expert_parameters(module), {"w_in": 1, "w_out": 2})
        apart = nn.MoE(D, H, E, K, separate_up=True)
        self.assertEqual(
            adapter.expert_parameters(apart), {"w_in": 1, "w_out": 2, "w_up": 1}
        )
        x = torch.randn(T, D)
        want = module(x)
        _, ids, weights = module.route(x)
        got = adapter.run(module, module.run_experts, Recorder(), x, ids, weights)
        self.assertEqual(got, want, atol=0, rtol=0)

    def test_grouped_experts(self):
        torch.manual_seed(0)
        module = GroupedExperts()
        adapter = GroupedExpertsAdapter()
        self.assertTrue(adapter.matches(module))
        dims = {"w1": 1, "w2": 2, "w3": 1}
        self.assertEqual(adapter.expert_parameters(module), dims)
        x, counts = torch.randn(T, D), torch.tensor([3, 0, 4, 1])
        exchange = Recorder()
        got = adapter.run(module, module.forward, exchange, x, counts)
        self.assertEqual(got, module(x, counts), atol=0, rtol=0)
        # The last row is padding: no expert.
        want = torch.tensor([0, 0, 0, 2, 2, 2, 2, 3, E])
        self.assertEqual(exchange.ids.flatten(), want)
        self.assertIsNone(exchange.weights)

    def test_first_match(self):
        def found(module):
            return [type(a).__name__ for a in DEFAULT_ADAPTERS if a.matches(module)]

        layer = nn.MoE(D, H, E, K)
        self.assertEqual(found(layer), ["MoEAdapter"])
        add_lora(layer, 2)
        self.assertEqual(found(layer), ["MoEAdapter"])
        replaced = nn.MoE(D, H, E, K)
        replaced.forward = types.MethodType(nn.MoE.forward, replaced)
        for layer in (Squared(D, H, E, K), replaced):
            self.assertEqual(found(layer), ["RoutedMoEAdapter", "MoEAdapter"])
        self.assertEqual(found(GroupedExperts()), ["GroupedExpertsAdapter"])
        self.assertEqual(found(nn.Linear(D, H)), [])
        adapted = GroupedExperts()
        add_lora(adapted, 2)
        self.assertEqual(found(adapted), ["GroupedExpertsAdapter"])

    def test_tensor_parallel_needs_gate_and_up_together(self):
        adapter = MoEAdapter()
        adapter.check_tensor_parallel(nn.MoE(D, H, E, K, gate_interleaved=True))
        adapter.check_tensor_parallel(nn.MoE(D, H, E, K, activation="relu"))
        adapter.check_tensor_parallel(nn.MoE(D, H, E, K, separate_up=True))
        for name, options in (
            ("w_in", {}), ("b_in", {"separate_up": True, "bias": True})
        ):  # fmt: skip
            with self.assertRaisesRegex(
                ValueError, f"{name} of .* has all 12 gate rows before the up rows"
            ):
                adapter.check_tensor_parallel(nn.MoE(D, H, E, K, **options))


if __name__ == "__main__":
    run_tests()
