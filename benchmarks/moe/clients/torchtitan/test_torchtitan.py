# Owner(s): ["module: nn"]
"""FusedRoutedExperts on a recorded shape of torchtitan's modules.

torchtitan is not installed in CI: RECORDED holds the attributes, parameters and calls of its
RoutedExperts at b5bcd76 (2026-08-21) that the client uses, and stands in for it here; NEWER those of 2026-09
and later, where gate and up are one parameter and experts are two GroupedLinear. train.py runs torchtitan itself.
"""

import copy
import importlib
import inspect
import pathlib
import sys
import types
from dataclasses import dataclass, fields
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._moe.all_to_all import TokenSwitchAllToAll
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


def newer() -> dict[str, types.ModuleType]:
    """The same of torchtitan with w13 and w2 as GroupedLinear, and without GroupedExperts."""
    modules = recorded()
    old = modules["torchtitan.models.common.moe"]

    @dataclass(kw_only=True, slots=True)
    class LinearConfig:
        group_size: int = E
        in_features: int
        out_features: int
        num_linears: int = 1

    class GroupedLinear(torch.nn.Module):
        Config = LinearConfig

        def __init__(self, config):
            super().__init__()
            n, out = config.num_linears, (config.out_features,)
            shape = (E, *((n, *out) if n > 1 else out), config.in_features)
            self.weight = torch.nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)

        def forward(self, input_RI, offsets_E):
            found, begin = [], 0
            for end, weight in zip(offsets_E.tolist(), self.weight.bfloat16()):
                rows = input_RI[begin:end] @ weight.flatten(0, -2).T
                found.append(rows.view(-1, *weight.shape[:-1]))
                begin = end
            return torch.cat(found)

    class SwiGLU:
        class Config:
            pass

        def __call__(self, gate, up, **kwargs):
            return torch.nn.functional.silu(gate) * up

    def build(config):
        kinds = (GroupedLinear, *GroupedLinear.__subclasses__())
        return next(k for k in kinds if k.Config is type(config))(config)

    @dataclass(kw_only=True, slots=True)
    class RoutedConfig:
        w13: object
        w2: object
        token_dispatcher: object
        activation_fn: object
        output_postprocess: object = None

    class RoutedExperts(torch.nn.Module):
        Config = RoutedConfig
        parallelize = old.RoutedExperts.parallelize

        def __init__(self, config):
            super().__init__()
            self.w13, self.w2 = build(config.w13), build(config.w2)
            self.activation_fn = SwiGLU()
            self.token_dispatcher = old.LocalTokenDispatcher()

        def forward(self, x, scores, ids, counts):
            order = ids.flatten().argsort(stable=True)
            offsets = counts.cumsum(0)
            h = self.w13(x.bfloat16()[order // K], offsets)
            rows = self.w2(self.activation_fn(*h.unbind(-2), offsets=offsets), offsets)
            rows = rows * scores.flatten()[order, None]
            return torch.zeros_like(x).index_add(0, order // K, rows.type_as(x))

    moe = types.ModuleType("torchtitan.models.common.moe")
    moe.__dict__.update(RoutedExperts=RoutedExperts, SwiGLU=SwiGLU)
    moe.LocalTokenDispatcher = old.LocalTokenDispatcher
    linear = types.ModuleType("torchtitan.models.common.linear")
    linear.GroupedLinear = GroupedLinear
    modules |= {module.__name__: module for module in (moe, linear)}
    return modules


def import_client(modules):
    common = modules["torchtitan.models.common"]
    common.moe = modules["torchtitan.models.common.moe"]
    with mock.patch.dict(sys.modules, modules):
        sys.modules.pop("fused_experts", None)
        client = importlib.import_module("fused_experts")
        sys.modules.pop("fused_experts")
    return client


class TestGroupedLinears(TestCase):
    """torchtitan's newer form."""

    def setUp(self):
        super().setUp()
        modules = newer()
        self.moe = modules["torchtitan.models.common.moe"]
        self.linear = modules["torchtitan.models.common.linear"].GroupedLinear
        self.client = import_client(modules)

    def _config(self, **options):
        return self.moe.RoutedExperts.Config(**{
            "w13": self.linear.Config(in_features=D, out_features=F, num_linears=2),
            "w2": self.linear.Config(in_features=F, out_features=D),
            "token_dispatcher": self.moe.LocalTokenDispatcher.Config(),
            "activation_fn": self.moe.SwiGLU.Config(),
            **options,
        })  # fmt: skip

    def _tried(self, module):
        torch.manual_seed(1)
        x = torch.randn(T, D, requires_grad=True)
        scores, ids = torch.rand(T, E).topk(K)
        scores.requires_grad_()
        y = module(x, scores, ids, torch.bincount(ids.flatten(), minlength=E))
        y.square().mean().backward()
        grads = [p.grad for p in module.parameters()]
        grads = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        return y, x.grad, scores.grad, *grads

    def _fused(self):
        module = self.client.FusedRoutedExperts(
            self.client.fused_routed_experts(self._config())
        )
        theirs = self.moe.RoutedExperts(self._config())
        self.assertEqual(module.state_dict().keys(), theirs.state_dict().keys())
        theirs.load_state_dict(module.state_dict())
        return module, theirs

    def _check_close(self, found, expected):
        for ours, other in zip(found, expected, strict=True):
            scale = other.abs().max().item()
            self.assertEqual(ours, other, atol=3e-2 * scale, rtol=0)

    def test_forward_and_gradients(self):
        module, theirs = self._fused()
        with (
            mock.patch.object(torch, "_grouped_mm", side_effect=AssertionError),
            mock.patch.object(
                torch.nn.functional, "moe_mlp", wraps=torch.nn.functional.moe_mlp
            ) as op,
        ):
            found = self._tried(module)
        op.assert_called_once()
        self._check_close(found, self._tried(theirs))

    def test_calls_the_linears(self):
        module, _ = self._fused()
        expected = self._tried(copy.deepcopy(module))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            fully_shard(module.w13)
            fully_shard(module.w2)
            gathered = self._tried(module)
        finally:
            dist.destroy_process_group()
        self.assertEqual(gathered, expected, atol=0, rtol=0)

    def test_hooks_see_what_torchtitan_gives_them(self):
        module, theirs = self._fused()
        seen = []
        module.w2.register_forward_hook(lambda m, args, output: seen.append(args[1]))
        self._check_close(self._tried(module), self._tried(theirs))
        self.assertEqual(seen[0][-1], T * K)

    def test_what_is_refused(self):
        class Biased(self.linear):  # gpt-oss
            @dataclass(kw_only=True, slots=True)
            class Config(self.linear.Config):
                pass

        class SiTUGLU:
            class Config:
                pass

        plain = self.linear.Config(in_features=D, out_features=F)
        biased = Biased.Config(in_features=F, out_features=D)
        scored = self.moe.LocalTokenDispatcher.Config()
        scored.score_before_experts = True
        for options, message in (
            ({"w2": biased}, "Biased"),
            ({"w13": plain}, "GroupedLinear of SwiGLU"),
            ({"activation_fn": SiTUGLU.Config()}, "activation .*SiTUGLU"),
            ({"output_postprocess": plain}, "output_postprocess .*Config"),
            ({"token_dispatcher": scored}, "score_before_experts=True"),
        ):
            with self.assertRaisesRegex(NotImplementedError, message):
                self.client.fused_routed_experts(self._config(**options))

    def test_weights_with_products_of_their_own(self):
        """torchao's wrappers, whose __torch_function__ knows grouped_mm only."""
        wrapper = type("Wrapper", (torch.Tensor,), {"__module__": "torchao.training"})
        module, _ = self._fused()
        module.w2.weight = torch.nn.Parameter(module.w2.weight.as_subclass(wrapper))
        with self.assertRaisesRegex(
            NotImplementedError, "plain tensors, got a Wrapper"
        ):
            self._tried(module)


class TestFusedRoutedExperts(TestCase):
    def setUp(self):
        super().setUp()
        modules = recorded()
        self.moe = modules["torchtitan.models.common.moe"]
        self.client = import_client(modules)

    def test_gate_and_up_in_one_parameter(self):
        """(E, 2, F, D), as GroupedExperts had it in between."""
        module = self.client.FusedRoutedExperts(
            self.client.fused_routed_experts(self._config())
        )
        expected = self._tried(copy.deepcopy(module))
        w = module.inner_experts
        w.w13_E2FD = torch.nn.Parameter(torch.stack([w.w1_EFD, w.w3_EFD], 1).detach())
        del w.w1_EFD, w.w3_EFD
        y, x_grad, w2_grad, w13_grad = self._tried(module)
        self.assertEqual((y, x_grad), expected[:2], atol=0, rtol=0)
        w1_grad, found, w3_grad = expected[2:]
        self.assertEqual(w2_grad, found, atol=0, rtol=0)
        self.assertEqual(w13_grad.unbind(1), (w1_grad, w3_grad), atol=0, rtol=0)

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

    def test_arguments_have_the_names_that_placements_have(self):
        """torchtitan finds the placement of an argument by its name: x_BLD in 0.3.0, x_TD later."""
        names = [
            [*inspect.signature(c.forward).parameters]
            for c in (self.client.FusedRoutedExperts, self.moe.RoutedExperts)
        ]
        self.assertEqual(*names)

    def test_leading_dimensions(self):
        """(B, L, D), as in torchtitan 0.3.0."""
        config = self.client.fused_routed_experts(self._config())
        module = self.client.FusedRoutedExperts(config)
        x, (scores, ids) = torch.randn(T, D), torch.rand(T, E).topk(K)
        expected = module(x, scores, ids, None)
        folded = [t.view(2, T // 2, -1) for t in (x, scores, ids)]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            for switch in (None, TokenSwitchAllToAll(dist.group.WORLD, E)):
                module.switch = switch
                y = module(*folded, None)
                self.assertEqual(y.shape, folded[0].shape)
                self.assertEqual(y.view(T, D), expected, atol=0, rtol=0)
        finally:
            dist.destroy_process_group()

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
            """Like PEFT's wrapper, it has no attribute with the name of a weight."""

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
