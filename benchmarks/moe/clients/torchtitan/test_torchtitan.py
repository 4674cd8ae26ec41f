# Owner(s): ["module: nn"]
"""FusedRoutedExperts on a recorded shape of torchtitan's modules.

torchtitan is not installed in CI: RECORDED holds the attributes, parameters and calls of its
RoutedExperts at b5bcd76 (2026-08-21) that the client uses, and stands in for it here. train.py runs
torchtitan itself.
"""

import copy
import importlib
import pathlib
import sys
import types
from dataclasses import dataclass, fields
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
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

        def forward(self, x_RD, num_tokens_per_expert_E):
            weights = (self.w1_EFD, self.w3_EFD, self.w2_EDF)
            found = []
            for rows, *w in zip(x_RD.split(num_tokens_per_expert_E.tolist()), *weights):
                w1, w3, w2 = (p.bfloat16() for p in w)
                h = torch.nn.functional.silu(rows @ w1.T) * (rows @ w3.T)
                found.append(h @ w2.T)
            return torch.cat(found)

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
            # Their build() makes what their class is nested in.
            kinds = (GroupedExperts, *GroupedExperts.__subclasses__())
            kind = next(k for k in kinds if k.Config is type(config.inner_experts))
            self.inner_experts = kind()
            self.token_dispatcher = LocalTokenDispatcher()

        def parallelize(self, parallel_dims):
            pass

        def forward(self, x, scores, ids, counts):
            order = ids.flatten().argsort(stable=True)
            rows = self.inner_experts(x.bfloat16()[order // K], counts)
            rows = rows * scores.flatten()[order, None]
            return torch.zeros_like(x).index_add(0, order // K, rows.type_as(x))

    def override(**kwargs):
        return lambda factory: factory

    def derive(config, target):
        return target(**{f.name: getattr(config, f.name) for f in fields(config)})

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

    def _tried(self, module, around=lambda experts: None):
        torch.manual_seed(1)
        x = torch.randn(T, D, requires_grad=True)
        scores, ids = torch.rand(T, E).topk(K)
        counts = torch.bincount(ids.flatten(), minlength=E)
        wrapped = around(module.inner_experts)
        if isinstance(wrapped, torch.nn.Module):
            module.inner_experts = wrapped
        y = module(x, scores, ids, counts)
        y.square().mean().backward()
        grads = [p.grad for p in module.parameters()]
        grads = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        return y, x.grad, *grads

    def test_calls_the_experts(self):
        """FSDP2 gathers the weights when the module that holds them is called."""
        config = self.client.fused_routed_experts(self._config())
        module = self.client.FusedRoutedExperts(config)
        plain = copy.deepcopy(module.state_dict())
        expected = self._tried(copy.deepcopy(module))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            gathered = self._tried(module, fully_shard)
        finally:
            dist.destroy_process_group()
        self.assertEqual(gathered, expected, atol=0, rtol=0)

        class Adapter(torch.nn.Module):
            """Has none of the weights' names, as PEFT's wrapper; more than calls it."""

            def __init__(self, experts):
                super().__init__()
                self.base_layer = experts

            def forward(self, x, *args):
                with torch.no_grad():
                    self.base_layer.w2_EDF.mul_(2)
                return self.base_layer(x, *args)

        module = self.client.FusedRoutedExperts(config)
        module.load_state_dict(copy.deepcopy(plain))
        y, *_ = self._tried(module, Adapter)
        self.assertEqual(y, 2 * expected[0], atol=0, rtol=0)

    def test_hooks_see_what_torchtitan_gives_them(self):
        config = self.client.fused_routed_experts(self._config())
        module = self.client.FusedRoutedExperts(config)
        expected = self._tried(copy.deepcopy(module))
        seen = []

        def hook(experts, args, output):
            seen.append(args[1])

        found = self._tried(module, lambda m: m.register_forward_hook(hook))
        self.assertEqual(seen[0].sum(), T * K)
        for ours, other in zip(found, expected, strict=True):
            scale = other.abs().max().item()
            self.assertEqual(ours, other, atol=3e-2 * scale, rtol=0)

    def test_other_experts_or_dispatchers_are_refused(self):
        class Other:
            pass

        for config in (self._config(experts=Other()), self._config(dispatcher=Other())):
            with self.assertRaisesRegex(NotImplementedError, "Other"):
                self.client.fused_routed_experts(config)


if __name__ == "__main__":
    run_tests()
