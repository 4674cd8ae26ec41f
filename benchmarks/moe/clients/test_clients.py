# Owner(s): ["module: nn"]
"""F.moe_mlp inside transformers: five families against its eager code; weight layouts."""

import importlib
import os
import pathlib
import subprocess
import sys
import tempfile
import types

import transformers_experts

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


transformers_experts.require_transformers()

from families import build, experts_of, FAMILIES
from layouts import (
    concatenate,
    ExpertWeights,
    from_torchtitan,
    from_transformers,
    interleave,
    to_torchtitan,
    to_transformers,
)


transformers_experts.register()
families = parametrize("family", list(FAMILIES))


def outcome(model, tokens):
    """Logits and the gradient of every parameter that has one."""
    logits = model(input_ids=tokens).logits
    labels = tokens.roll(-1, dims=1)
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
        labels.flatten(),
    )
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


class TestTransformers(TestCase):
    def _check(self, actual, eager, reference):
        """No further from float64 than twice what eager code is."""
        self.assertEqual(actual.keys(), reference.keys())
        self.assertEqual(eager.keys(), reference.keys())
        for name, expected in reference.items():
            eps = torch.finfo(actual[name].dtype).eps
            error = (eager[name].double() - expected).abs().max().item()
            bound = 2 * error + 4 * eps * expected.abs().max().item()
            self.assertEqual(
                actual[name].double(), expected, atol=bound, rtol=0, msg=name
            )

    @families
    @parametrize("dtype", (torch.float64, torch.float32))
    def test_model(self, family, dtype):
        tokens = torch.randint(
            0, 96, (2, 24), generator=torch.Generator().manual_seed(0)
        )
        ours = build(family, dtype=dtype)
        ours.set_experts_implementation("moe_mlp")
        called = []
        for experts in experts_of(ours):
            experts.register_forward_hook(lambda *_: called.append(1))
        op = torch.ops.aten._moe_mlp.default
        with torch.profiler.profile() as profile:
            actual = outcome(ours, tokens)
        ops = [event.name for event in profile.events()]
        self.assertEqual(ops.count(op.name()), len(called))
        self.assertEqual(len(called), 2)
        self._check(
            actual,
            outcome(build(family, dtype=dtype), tokens),
            outcome(build(family, dtype=torch.float64), tokens),
        )

    @families
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_experts_module(self, family, dtype):
        # In bfloat16 a whole model may route a token differently, so this compares
        # one module with the routing given.
        generator = torch.Generator().manual_seed(2)
        model = build(family)
        config = model.config
        x = torch.randn(40, config.hidden_size, generator=generator)
        num_experts, k = experts_of(model)[0].num_experts, config.num_experts_per_tok
        weights, index = torch.rand(40, num_experts, generator=generator).topk(k)
        results = []
        for name, cast in (
            ("moe_mlp", dtype),
            ("eager", dtype),
            ("eager", torch.float64),
        ):
            model = build(family, dtype=dtype).to(cast)
            model.set_experts_implementation(name)
            experts = experts_of(model)[0]
            leaf = x.to(dtype).to(cast).detach().clone().requires_grad_()
            s = weights.to(dtype).to(cast).detach().clone().requires_grad_()
            out = experts(leaf, index, s)
            out.square().sum().backward()
            grads = {n: p.grad for n, p in experts.named_parameters()}
            results.append({"out": out.detach(), "x": leaf.grad, "s": s.grad, **grads})
        actual, eager, reference = results
        self._check(actual, eager, reference)

    def test_missing_package_names_the_command(self):
        # Without site-packages nothing is installed, wherever these tests find it.
        folder = pathlib.Path(__file__).parent
        with tempfile.TemporaryDirectory() as empty:
            done = subprocess.run(
                [sys.executable, str(folder / "run.py")],
                env={**os.environ, "MOE_CLIENTS": empty},
                capture_output=True,
                text=True,
            )
        self.assertEqual(done.returncode, 1)
        self.assertIn("pip install --target build/clients", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def _experts(self, model, name, dtype=torch.float64):
        """The experts class of a model by itself; no config of a whole model."""
        modeling = importlib.import_module(
            f"transformers.models.{model}.modeling_{model}"
        )
        config = types.SimpleNamespace(
            hidden_size=8,
            intermediate_size=6,
            moe_intermediate_size=6,
            num_experts=3,
            num_local_experts=3,
            n_routed_experts=3,
            hidden_act="silu",
            hidden_activation="gelu_pytorch_tanh",
            mlp_hidden_act="relu2",
            swiglu_alpha=1.5,
            swiglu_limit=0.75,
            mlp_bias=False,
            moe_latent_size=None,
            _experts_implementation="eager",
        )
        if model in ("lfm2_moe", "gemma4"):
            del config.hidden_act
        experts = getattr(modeling, name)(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in experts.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise)
        return experts.to(dtype)

    @parametrize(
        "model,name,activation",
        [
            # act_fn is a function, and the config has no name of it
            ("lfm2_moe", "Lfm2MoeExperts", "swiglu"),
            # the config has another key
            ("gemma4", "Gemma4TextExperts", "geglu_tanh"),
            ("gpt_oss", "GptOssExperts", "swiglu_oai"),
            # the gate of gpt-oss with gates first
            ("openai_privacy_filter", "OpenAIPrivacyFilterExperts", "swiglu_oai"),
            ("minimax_m3_vl", "MiniMaxM3VLExperts", "swiglu_oai"),
        ],
    )
    def test_gates(self, model, name, activation):
        experts = self._experts(model, name)
        arguments = transformers_experts.activation_arguments(experts)
        self.assertEqual(arguments["activation"], activation)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(10, 8, generator=generator, dtype=torch.float64)
        weights, index = torch.rand(10, 3, generator=generator).topk(2)
        expected = experts(x, index, weights.double())
        experts.config._experts_implementation = transformers_experts.NAME
        # One of the models adds in float32.
        actual = experts(x, index, weights.double())
        self.assertEqual(actual, expected.double(), atol=1e-5, rtol=1e-5)

    @parametrize(
        "model,name,message",
        [
            # a limit without alpha
            (
                "deepseek_v4",
                "DeepseekV4Experts",
                "a gate of its own, DeepseekV4Experts",
            ),
            ("glm5_next", "Glm5NextTextExperts", "a gate of its own"),
            ("nemotron_h", "NemotronHExperts", "experts without gates"),
        ],
    )
    def test_unknown_gate_is_an_error(self, model, name, message):
        with self.assertRaisesRegex(NotImplementedError, message):
            transformers_experts.activation_arguments(self._experts(model, name))

    def test_unknown_activation_is_an_error(self):
        experts = experts_of(build("mixtral"))[0]
        experts.act_fn = torch.nn.Hardswish()
        with self.assertRaisesRegex(
            NotImplementedError, "act_fn of MixtralExperts must be .*, got Hardswish"
        ):
            transformers_experts.activation_arguments(experts)


class TestLayouts(TestCase):
    @families
    def test_transformers_round_trip(self, family):
        experts = experts_of(build(family))[0]
        weights = from_transformers(experts)
        # Views: an optimizer step on the parameter is seen.
        self.assertEqual(
            weights.w_in.untyped_storage().data_ptr(),
            experts.gate_up_proj.untyped_storage().data_ptr(),
        )
        layout = {
            "is_transposed": experts.is_transposed,
            "is_concatenated": experts.is_concatenated,
        }
        expected = dict(experts.state_dict())
        for other in (weights, interleave(weights), concatenate(weights)):
            state = to_transformers(other, **layout)
            self.assertEqual(state, expected, atol=0, rtol=0)

    def _weights(self, bias=False):
        b_in, b_out = (torch.randn(3, 8), torch.randn(3, 5)) if bias else (None, None)
        return ExpertWeights(torch.randn(3, 8, 5), torch.randn(3, 5, 4), b_in, b_out)

    def test_torchtitan_round_trip(self):
        weights = self._weights()
        state = to_torchtitan(weights)
        self.assertEqual({n: t.shape for n, t in state.items()}, {
            "w1": (3, 4, 5), "w2": (3, 5, 4), "w3": (3, 4, 5)
        })  # fmt: skip
        self.assertEqual(from_torchtitan(**state), weights, atol=0, rtol=0)
        self.assertEqual(to_torchtitan(interleave(weights)), state, atol=0, rtol=0)

    def test_torchtitan_means_the_same(self):
        weights = self._weights()
        state = to_torchtitan(weights)
        x = torch.randn(7, 5)
        index = torch.randint(0, 3, (7, 1))
        out = torch.nn.functional.moe_mlp(x, index, None, weights.w_in, weights.w_out)
        for t in range(7):
            w1, w2, w3 = (state[name][index[t, 0]] for name in ("w1", "w2", "w3"))
            hidden = torch.nn.functional.silu(w1 @ x[t]) * (w3 @ x[t])
            self.assertEqual(out[t], w2 @ hidden)

    def test_torchtitan_has_no_bias(self):
        with self.assertRaisesRegex(ValueError, "has no biases"):
            to_torchtitan(self._weights(bias=True))

    @parametrize("bias", (False, True))
    def test_interleave_round_trip(self, bias):
        weights = self._weights(bias)
        mixed = interleave(weights)
        self.assertEqual(mixed.w_in[:, 0::2], weights.w_in[:, :4])
        self.assertEqual(mixed.w_in[:, 1::2], weights.w_in[:, 4:])
        self.assertEqual(concatenate(mixed), weights, atol=0, rtol=0)
        self.assertIs(interleave(mixed), mixed)


instantiate_parametrized_tests(TestTransformers)
instantiate_parametrized_tests(TestLayouts)

if __name__ == "__main__":
    run_tests()
