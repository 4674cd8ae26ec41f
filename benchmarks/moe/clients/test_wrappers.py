# Owner(s): ["module: nn"]
"""What people wrap experts in acts on F.moe_mlp as it does on the eager code: loss and gradients.

Every experts class of transformers in each wrapper of WRAPPERS; the quick shard is one class for each way
in which the client calls experts. Where an adapter cannot keep up, its module runs as before and the
log says why: that is compared as well.
"""

import unittest
from unittest import mock

import moe_mlp_experts
import transformers_experts
from families import build, fill
from matrix import class_inputs, experts_classes, TinyConfig
from moe_mlp_experts import NAME
from routing import record_routing, replay_routing
from transformers_experts import ADAPTERS, experts_of, fused_experts

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize as parametrization
from torch.nn.utils.moe_lora import add_lora
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
    TestCase,
)


try:
    import accelerate
    import peft
except ImportError as error:
    raise unittest.SkipTest(f"{error}; see benchmarks/moe/clients/README.md") from None

# One with an adapter for each way to call children, one of the interface, one with biases.
QUICK = ("Llama4TextMoe", "DbrxExperts", "JetMoeMoE", "LongcatFlashExperts", "MixtralExperts", "GptOssExperts")  # fmt: skip


class Host(nn.Module):
    """A model around one experts module."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts
        self.head = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, *args):
        y = self.experts(*args)
        return self.head(y[0] if isinstance(y, tuple) else y)


def _owners(host: Host) -> list[nn.Module]:
    """Modules within the experts, and they themselves, that have parameters; inner ones first."""
    modules = [m for m in host.experts.modules() if m._parameters]
    if host.experts not in modules:
        modules.insert(0, host.experts)
    return modules[::-1]


def lora(host: Host) -> nn.Module:
    stacked = [
        name
        for name, p in host.named_parameters()
        if p.dim() == 3 or name.startswith("experts.mlp.")
    ]
    config = peft.LoraConfig(
        r=2, target_modules=["head"], target_parameters=stacked, init_lora_weights=False
    )
    torch.manual_seed(3)
    return peft.get_peft_model(host, config)


def merged_again(host: Host) -> nn.Module:
    for seed, module in enumerate(_owners(host)):
        if any(p.dim() == 3 for p in module._parameters.values() if p is not None):
            torch.manual_seed(seed)
            for p in add_lora(module, 2):
                nn.init.normal_(p)
    return host


def _save(host: Host, names: list[str]) -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["head"], modules_to_save=names)
    torch.manual_seed(3)
    model = peft.get_peft_model(host, config)
    for module in model.modules():
        if type(module).__name__ == "ModulesToSaveWrapper":
            fill(module.modules_to_save["default"], 5)  # not a copy any more
    return model


def modules_to_save(host: Host) -> nn.Module:
    return _save(host, ["experts"])


def children_to_save(host: Host) -> nn.Module:
    adapter = ADAPTERS.get(type(host.experts).__name__)
    children = [*adapter.children] if adapter else []
    return _save(host, [f"experts.{name}" for name in children] or ["experts"])


def fsdp2(host: Host) -> nn.Module:
    for module in _owners(host):
        fully_shard(module)
    return fully_shard(host)


def parametrizations(host: Host) -> nn.Module:
    class Scaled(nn.Module):
        def forward(self, weight):
            return weight * 1.5

    for module in _owners(host):
        for name in [*module._parameters]:
            if module._parameters[name] is not None:
                parametrization.register_parametrization(module, name, Scaled())
    return host


def pre_hooks(host: Host) -> nn.Module:
    def hook(module, args):
        host.hooked.add(module)
        return (args[0] * 1.25, *args[1:])

    return _with_hooks(host, "register_forward_pre_hook", hook)


def forward_hooks(host: Host) -> nn.Module:
    def hook(module, args, output):
        host.hooked.add(module)
        return output * 1.25 if isinstance(output, torch.Tensor) else None

    return _with_hooks(host, "register_forward_hook", hook)


def backward_hooks(host: Host) -> nn.Module:
    def hook(module, grads, output_grads):
        host.hooked.add(module)
        return tuple(None if g is None else (g * 1.25).to(g.dtype) for g in grads)

    return _with_hooks(host, "register_full_backward_hook", hook)


def _with_hooks(host: Host, register: str, hook) -> nn.Module:
    host.hooked = set()
    for name, module in host.experts.named_modules():
        # Llama4 adds to its output in place, which a backward hook does not allow.
        if not name.startswith("shared_expert"):
            getattr(module, register)(hook)
    return host


def offloaded(host: Host) -> nn.Module:
    return accelerate.cpu_offload(host, torch.device("cpu"))


WRAPPERS = {
    f.__name__: f
    for f in (
        lora, merged_again, modules_to_save, children_to_save, fsdp2, parametrizations, pre_hooks,
        forward_hooks, backward_hooks, offloaded,
    )
}  # fmt: skip


def outcome(experts_class, wrap, *, fused: bool) -> tuple[dict, Host]:
    """Output, loss and gradients of everything trainable of a wrapped model, in float64."""
    config = TinyConfig()
    config._experts_implementation = NAME if fused else "eager"
    experts = experts_class(config)
    for p in experts.parameters():
        nn.init.zeros_(p)  # some are torch.empty
    fill(experts, 0)
    torch.manual_seed(2)
    host = Host(experts.double())
    if experts_class.__name__ in ADAPTERS:
        transformers_experts._adapt(experts_class)
        experts._uses_moe_mlp = (
            fused and transformers_experts.adapter_reason(experts) is None
        )
    model = wrap(host)
    args, leaves = class_inputs(experts_class.__name__, torch.float64)
    if wrap is offloaded:
        with torch.no_grad():
            y = model(*args)
        return {"y": y}, host
    y = model(*args)
    loss = y.square().mean()
    loss.backward()
    values = {"y": y, "loss": loss}
    leaves |= {n: p for n, p in model.named_parameters() if p.requires_grad}
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            grad = leaf.grad
            values[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return {n: v.detach() for n, v in values.items()}, host


def dbrx_reference(experts_class, wrap) -> dict:
    """Its eager code reaches into its child: no wrapper there works. Merged by hand."""
    if wrap in (fsdp2, offloaded):  # which change no value
        return outcome(experts_class, lambda host: host, fused=False)[0]
    model = outcome(experts_class, lora, fused=True)[1]
    deltas, base = {}, model.experts.mlp
    while type(base).__name__ == "ParamWrapper":
        deltas[base.parameter_name] = base.get_delta_weight("default")
        base = base.base_layer
    model.experts.mlp = base
    head = model.head
    weights = {f"mlp.{n}": p + deltas[n] for n, p in base.named_parameters()}
    args, leaves = class_inputs(experts_class.__name__, torch.float64)
    model.experts._uses_moe_mlp = False
    y = head(torch.func.functional_call(model.experts, weights, args))
    loss = y.square().mean()
    loss.backward()
    return {"y": y, "loss": loss, **{n: leaf.grad for n, leaf in leaves.items()}}


class TestWrappers(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        cls.classes = {c.__name__: c for c in experts_classes()}

    @classmethod
    def tearDownClass(cls):
        dist.destroy_process_group()
        super().tearDownClass()

    def setUp(self):
        super().setUp()
        moe_mlp_experts._logged.clear()

    def _compare(self, experts_class, wrapper):
        wrap, name = WRAPPERS[wrapper], experts_class.__name__
        with mock.patch.object(F, "moe_mlp", wraps=F.moe_mlp) as op:
            ours, host = outcome(experts_class, wrap, fused=True)
        if name == "DbrxExperts" and wrap in (lora, fsdp2, offloaded):
            eager = dbrx_reference(experts_class, wrap)
            common = ours.keys() & eager.keys()
            ours, eager = ({n: v[n] for n in common} for v in (ours, eager))
        else:
            eager, eager_host = outcome(experts_class, wrap, fused=False)
            if hasattr(host, "hooked"):
                paths = {m: n for n, m in host.named_modules()}
                theirs = {m: n for n, m in eager_host.named_modules()}
                self.assertEqual(
                    sorted(paths[m] for m in host.hooked),
                    sorted(theirs[m] for m in eager_host.hooked),
                )
        self.assertEqual(ours.keys(), eager.keys())
        for each, value in eager.items():
            scale = max(value.abs().max().item(), 1e-12)
            self.assertEqual(ours[each], value, atol=1e-5 * scale, rtol=0, msg=each)
        logged = any("falls back" in line for line in moe_mlp_experts._logged)
        self.assertNotEqual(op.called, logged)  # one or the other
        return op.called

    @parametrize("wrapper", list(WRAPPERS))
    @parametrize("name", QUICK)
    def test_class(self, name, wrapper):
        fused = self._compare(self.classes[name], wrapper)
        # The experts of gpt-oss have no submodule that could have hooks.
        self.assertEqual(fused, name == "GptOssExperts" or "hooks" not in wrapper)

    @slowTest
    @parametrize("wrapper", list(WRAPPERS))
    def test_every_class(self, wrapper):
        for name, experts_class in self.classes.items():
            with self.subTest(name):
                moe_mlp_experts._logged.clear()
                self._compare(experts_class, wrapper)

    def test_routing_of_a_replaced_block(self):
        """The block that an adapter replaced routes nothing; one that wraps its parts does."""
        model = build("qwen3_moe")
        model.set_experts_implementation(NAME)
        config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp"])
        model, tokens = peft.get_peft_model(model, config), torch.arange(12)[None]
        with record_routing(model) as record:
            expected = model(tokens).logits
        self.assertEqual(len(record), 2)
        with replay_routing(model, record):
            self.assertEqual(model(tokens).logits, expected)
            with model.disable_adapter():
                with self.assertRaisesRegex(ValueError, "original_module' runs, and"):
                    model(tokens)

    def test_the_switch_finds_experts_below_wrappers(self):
        model = build("mixtral")
        model.set_experts_implementation(NAME)
        config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"])
        model = peft.get_peft_model(model, config)
        for name in ("eager", NAME):
            model.set_experts_implementation(name)
            self.assertEqual(bool(fused_experts(model)), name == NAME)
        self.assertFalse(
            [m for m in experts_of(model) if "Wrapper" in type(m).__name__]
        )
        self.assertEqual(len(fused_experts(model)), 4)  # two layers, original and saved


instantiate_parametrized_tests(TestWrappers)

if __name__ == "__main__":
    run_tests()
