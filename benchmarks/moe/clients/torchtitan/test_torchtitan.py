# Owner(s): ["module: nn"]
"""FusedRoutedExperts on a recorded shape of torchtitan's modules.

torchtitan is not installed in CI: RECORDED holds the attributes, parameters and calls of its
RoutedExperts at b5bcd76 (2026-08-21) that the client uses, and stands in for it here. train.py runs
torchtitan itself.
"""

import importlib
import pathlib
import sys
import types
from dataclasses import dataclass
from unittest import mock

import torch
from torch.testing._internal.common_utils import run_tests, TestCase


HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from peers import three_grouped_mm


E, D, F, T, K = 6, 16, 24, 20, 3


def recorded() -> dict[str, types.ModuleType]:
    """Stand-ins with the recorded shape: what the client imports and what it reads of them."""

    @dataclass(kw_only=True, slots=True)
    class GroupedConfig:
        dim: int = D
        hidden_dim: int = F
        num_experts: int = E

    class GroupedExperts(torch.nn.Module):
        Config = GroupedConfig

        def __init__(self):
            super().__init__()
            self.w1_EFD = torch.nn.Parameter(torch.randn(E, F, D) * D**-0.5)
            self.w2_EDF = torch.nn.Parameter(torch.randn(E, D, F) * F**-0.5)
            self.w3_EFD = torch.nn.Parameter(torch.randn(E, F, D) * D**-0.5)

    class LocalTokenDispatcher:
        class Config:
            pass

        num_experts, top_k = E, K

    @dataclass(kw_only=True, slots=True)
    class RoutedConfig:
        inner_experts: object
        token_dispatcher: object

    class RoutedExperts(torch.nn.Module):
        Config = RoutedConfig

        def __init__(self, config):
            super().__init__()
            self.inner_experts = GroupedExperts()
            self.token_dispatcher = LocalTokenDispatcher()

        def parallelize(self, parallel_dims):
            pass

    def override(**kwargs):
        return lambda factory: factory

    def derive(config, target):
        experts, dispatcher = config.inner_experts, config.token_dispatcher
        return target(inner_experts=experts, token_dispatcher=dispatcher)

    parts = ("", ".config", ".models", ".models.common", ".models.common.moe")
    names = [f"torchtitan{part}" for part in parts]
    modules = {name: types.ModuleType(name) for name in names}
    modules["torchtitan.config"].__dict__.update(derive=derive, override=override)
    moe = modules["torchtitan.models.common.moe"]
    moe.__dict__.update(GroupedExperts=GroupedExperts, RoutedExperts=RoutedExperts)
    moe.LocalTokenDispatcher = LocalTokenDispatcher
    return modules


class TestFusedRoutedExperts(TestCase):
    def setUp(self):
        super().setUp()
        modules = recorded()
        self.moe = modules["torchtitan.models.common.moe"]
        with mock.patch.dict(sys.modules, modules):
            sys.modules.pop("fused_experts", None)
            self.client = importlib.import_module("fused_experts")
            sys.modules.pop("fused_experts")

    def _config(self, experts=None, dispatcher=None):
        return self.moe.RoutedExperts.Config(
            inner_experts=experts or self.moe.GroupedExperts.Config(),
            token_dispatcher=dispatcher or self.moe.LocalTokenDispatcher.Config(),
        )

    def test_forward_and_gradients(self):
        config = self.client.fused_routed_experts(self._config())
        self.assertIsInstance(config, self.client.FusedRoutedExperts.Config)
        module = self.client.FusedRoutedExperts(config)
        w = module.inner_experts
        x = torch.randn(T, D, requires_grad=True)
        scores, ids = torch.rand(T, E).topk(K)
        scores.requires_grad_()
        counts = torch.bincount(ids.flatten(), minlength=E)
        leaves = (x, scores, w.w1_EFD, w.w3_EFD, w.w2_EDF)
        names = ("x", "scores", "w1", "w3", "w2")
        y = module(x, scores, ids, counts)
        grads = torch.autograd.grad(y.square().sum(), leaves)
        weights = (p.bfloat16() for p in (w.w1_EFD, w.w3_EFD, w.w2_EDF))
        own = three_grouped_mm(x.bfloat16(), ids, scores, *weights).type_as(x)
        expected = torch.autograd.grad(own.square().sum(), leaves)
        self.assertEqual(y, own, atol=3e-2, rtol=3e-2)
        for name, grad, other in zip(names, grads, expected):
            scale = other.abs().max().item()
            self.assertEqual(grad, other, atol=3e-2 * scale, rtol=0, msg=name)

    def test_other_experts_or_dispatchers_are_refused(self):
        class Other:
            pass

        for config in (self._config(experts=Other()), self._config(dispatcher=Other())):
            with self.assertRaisesRegex(NotImplementedError, "Other"):
                self.client.fused_routed_experts(config)


if __name__ == "__main__":
    run_tests()
