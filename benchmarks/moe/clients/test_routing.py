# Owner(s): ["module: nn"]
"""Router replay in models of transformers, and in torchtitan's router: bits, gradients, and who is refused."""

import functools
import pathlib
import sys
import warnings
from contextlib import nullcontext
from unittest import mock

import matrix
import transformers
from families import build_model
from routing import record_routing, replay_routing

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
    TestCase,
)


# A router of each rule: softmax of all, of the chosen, sigmoid in groups; within an adapted class.
QUICK = ("Qwen3MoeForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM", "JetMoeForCausalLM", "Llama4ForCausalLM")  # fmt: skip
TOKENS = torch.arange(24).view(2, 12)


class TokenChoiceTopKRouter(nn.Module):
    """Has the name and the rule of torchtitan's router."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.top_k = 8, 2
        self.gate = nn.Linear(16, 8)

    def forward(self, x_TD, expert_bias_E=None):
        scores = F.linear(x_TD, self.gate.weight, self.gate.bias).float().sigmoid()
        biased = scores if expert_bias_E is None else scores + expert_bias_E
        _, ids = torch.topk(biased, k=self.top_k, dim=-1, sorted=False)
        weights = scores.gather(dim=-1, index=ids)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20), ids


def outcome(model):
    model.zero_grad()
    logits = model(TOKENS).logits
    logits.square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [logits.detach(), *grads]


class TestRouting(TestCase):
    def _check(self, model_class, experts="eager"):
        model = build_model(model_class, torch.float32)
        model.set_experts_implementation(experts)
        with record_routing(model) as record:
            expected = outcome(model)
        self.assertGreater(len(record), 0)
        with replay_routing(model, record):
            self.assertEqual(outcome(model), expected, atol=0, rtol=0)
        other = {name: (ids + 1) % 8 for name, ids in record.items()}
        with replay_routing(model, other), record_routing(model) as found:
            moved = outcome(model)
        self.assertEqual(found, other)
        self.assertNotEqual(moved[0], expected[0])
        self.assertEqual(len(moved), len(expected))

    @parametrize("name", QUICK)
    @parametrize("experts", ["eager", "moe_mlp"])
    def test_model(self, name, experts):
        self._check(getattr(transformers, name), experts)

    @slowTest
    def test_every_model(self):
        refused = set()
        for model_class in matrix.model_classes():
            with self.subTest(model_class.__name__):
                try:
                    model = build_model(model_class, torch.float32)
                    model(TOKENS)
                except Exception:
                    continue  # not from a config alone: matrix.py says why
                try:
                    for experts in ("eager", "moe_mlp"):
                        self._check(model_class, experts)
                except (NotImplementedError, ValueError) as error:
                    self.assertRegex(
                        str(error), "topk over its experts|no module of the"
                    )
                    refused.add(model_class.__name__)
        print("refused:", *sorted(refused), file=sys.stderr)

    def test_recomputation(self):
        """Recorded once, replayed twice."""
        model = build_model(transformers.Qwen3MoeForCausalLM, torch.float32).train()
        with record_routing(model) as record:
            outcome(model)
        other = {name: ids.flip(0) for name, ids in record.items()}
        with replay_routing(model, other):
            expected = outcome(model)
        model.gradient_checkpointing_enable()
        with replay_routing(model, other):
            self.assertEqual(outcome(model), expected, atol=0, rtol=0)
        with record_routing(model) as again:
            outcome(model)
        self.assertEqual(again, record)
        with replay_routing(model, other):
            logits = model(TOKENS).logits
        with self.assertRaisesRegex(RuntimeError, "1.mlp' is computed again for a"):
            logits.sum().backward()

    def test_record_around_replay(self):
        """The order of the two contexts does not matter. Of two replays, the inner one counts."""
        model = build_model(transformers.Qwen3MoeForCausalLM, torch.float32)
        with record_routing(model) as record:
            model(TOKENS)
        other = {name: ids.flip(0) for name, ids in record.items()}
        with replay_routing(model, other):
            expected = outcome(model)
        with record_routing(model) as found, replay_routing(model, record):
            with replay_routing(model, other):
                self.assertEqual(outcome(model), expected, atol=0, rtol=0)
        self.assertEqual(found, other)

    @parametrize("wrapper", ["compile", "checkpoint_wrapper", "offload_wrapper"])
    def test_wrapped_experts(self, wrapper):
        if wrapper == "compile":
            wrap = functools.partial(torch.compile, backend="aot_eager")
        else:
            wrap = getattr(checkpoint_wrapper, wrapper)
        model = build_model(transformers.Qwen3MoeForCausalLM, torch.float32)
        model.set_experts_implementation("moe_mlp")
        with record_routing(model) as record:
            expected = model(TOKENS).logits
        for layer in model.model.layers:
            layer.mlp.experts = wrap(layer.mlp.experts)
        with record_routing(model) as found, replay_routing(model, record):
            self.assertEqual(model(TOKENS).logits, expected)
        self.assertEqual(found, record)

    @parametrize("tokens", [(10,), (2, 5)])  # the latter until 2026-08
    def test_torchtitan(self, tokens):
        model, x = nn.Sequential(TokenChoiceTopKRouter()), torch.randn(*tokens, 16)
        bias = torch.randn(8)
        with record_routing(model) as record:
            weights, ids = model[0](x, bias)
        flat = (torch.int8, ids.view(10, 2))
        self.assertEqual((record["0"].dtype, record["0"].long()), flat)
        with replay_routing(
            model, record
        ):  # the weights of the ids, whatever the bias is
            found = model[0](x)
        self.assertEqual(found, (weights, ids), atol=0, rtol=0)
        grads = [
            torch.autograd.grad(w.square().sum(), model[0].gate.weight)
            for w in (weights, found[0])
        ]
        self.assertEqual(*grads)

    def test_refused(self):
        model = build_model(transformers.DeepseekV4ForCausalLM, torch.float32)
        with self.assertRaisesRegex(
            NotImplementedError, "DeepseekV4SparseMoeBlock.* has 0"
        ):
            with record_routing(model):
                model(TOKENS)
        with self.assertRaisesRegex(ValueError, "no module of the model"):
            with record_routing(nn.Linear(2, 2)):
                pass
        for chosen in (
            lambda scores: scores.topk(2, dim=0).indices,
            lambda scores: scores.T.topk(2).indices,
        ):
            router = TokenChoiceTopKRouter()
            router.forward = lambda x: chosen(router.gate(x))  # experts choose tokens
            with self.assertRaisesRegex(NotImplementedError, "has 0 topk over its exp"):
                with record_routing(router):
                    router(torch.randn(10, 16))
        model, x = nn.Sequential(TokenChoiceTopKRouter()), torch.randn(3, 16)
        with record_routing(model) as record:
            model(x)
            with self.assertRaisesRegex(RuntimeError, "'0' ran a second time"):
                model(x)
        for wrong, message in (
            ({"1": record["0"]}, "record is of ..1.., the model has ..0"),
            ({"0": record["0"] - 8}, "'0' has tokens without an expert"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                with replay_routing(model, wrong):
                    pass
        with replay_routing(model, record):
            with self.assertRaisesRegex(ValueError, "got 4 tokens, the record has 3"):
                model(torch.randn(4, 16))
            with self.assertRaises(ValueError):  # the failed call left nothing behind
                model(torch.randn(4, 16))
            model(x)
        with replay_routing(model, {}), warnings.catch_warnings(action="error"):
            with self.assertRaisesRegex(ValueError, "'0' runs, and the record has not"):
                model(x)
        self.assertFalse(torch.overrides._get_current_function_mode_stack())

    def test_trains_what_was_served(self):
        """replay.py: exactly 0 with replay and invariant sums, and no other experts with replay."""
        benchmarks = str(pathlib.Path(__file__).resolve().parents[1])
        with mock.patch.object(sys, "path", [benchmarks, *sys.path]):
            import replay

        for experts, replayed, parts in (
            ("moe_mlp", True, replay.PARTS),
            ("moe_mlp", True, ()),
            ("eager", True, replay.PARTS),
        ):
            model = replay.build(torch.bfloat16, experts)
            around = replay.Invariant(model, parts) if parts else nullcontext()
            with around:
                row = replay.train(model, *replay.roll_out(model, 3), replayed)
            self.assertEqual(row["other_experts"], 0)
            ours = experts == "moe_mlp" and parts
            self.assertEqual(row["largest"] == 0, bool(ours), msg=f"{experts}, {parts}")
            self.assertEqual(row["kl"] == 0, bool(ours))
            self.assertTrue(all(p.grad.isfinite().all() for p in model.parameters()))


instantiate_parametrized_tests(TestRouting)

if __name__ == "__main__":
    run_tests()
