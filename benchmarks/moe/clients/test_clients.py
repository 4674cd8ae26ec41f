# Owner(s): ["module: nn"]
"""F.moe_mlp inside transformers: five families against its eager code.

The quick shard of matrix.py, which runs every experts class and whole models.
"""

import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
from unittest import mock

import matrix
import moe_mlp_experts
import transformers_experts
from families import build, FAMILIES, fill
from matrix import error_over_allowed, outcome_of
from moe_mlp_experts import NAME
from transformers_experts import ADAPTERS, experts_of, fused_experts

import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


families = parametrize("family", list(FAMILIES))


class TestTransformers(TestCase):
    @families
    @parametrize("dtype", (torch.float64, torch.float32))
    def test_model(self, family, dtype):
        g = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, 96, (2, 24), generator=g)
        ours = build(family, dtype=dtype)
        ours.set_experts_implementation("moe_mlp")
        called = []
        for experts in experts_of(ours):
            experts.register_forward_hook(lambda *_: called.append(1))
        op = torch.ops.aten._moe_mlp.default
        with torch.profiler.profile() as profile:
            actual = outcome_of(ours, tokens)
        ops = [event.name for event in profile.events()]
        self.assertEqual(ops.count(op.name()), len(called))
        self.assertEqual(len(called), 2)
        eager = outcome_of(build(family, dtype=dtype), tokens)
        exact = outcome_of(build(family, dtype=torch.float64), tokens)
        self.assertLessEqual(error_over_allowed(actual, [eager], exact), 1)

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
        results, exact = [], torch.float64
        for name, cast in ((NAME, dtype), ("eager", dtype), ("eager", exact)):
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
        self.assertLessEqual(error_over_allowed(actual, [eager], reference), 1)

    # All of FAMILIES, an adapter that routes inside, and one that adds identity experts.
    @parametrize(
        "name", [*FAMILIES.values(), "Llama4ForCausalLM", "LongcatFlashForCausalLM"]
    )
    def test_autocast(self, name):
        import transformers

        def build(dtype, implementation):
            model_class = getattr(transformers, name)
            return matrix.build_model(model_class, dtype, implementation)

        tokens = torch.arange(4, 84).view(2, 40)
        self.assertLessEqual(matrix._autocast(build, tokens), 1)

    @parametrize(
        "name",
        ["MixtralExperts", "LongcatFlashExperts", "Step3p7Experts", "DbrxExperts"],
    )
    def test_autocast_goes_on_in_what_it_got(self, name):
        classes = {c.__name__: c for c in matrix.experts_classes()}
        config = matrix.TinyConfig()
        config._experts_implementation = NAME
        experts = classes[name](config)
        if name in ADAPTERS:
            transformers_experts._adapt(classes[name])
            experts._uses_moe_mlp = True
        args, _ = matrix.class_inputs(name, torch.float32)
        with mock.patch.object(
            torch.nn.functional, "moe_mlp", wraps=torch.nn.functional.moe_mlp
        ) as op:
            with torch.autocast("cpu", torch.bfloat16):
                self.assertEqual(experts(*args).dtype, torch.float32)
        self.assertTrue(op.called)

    def test_autocast_gradient_of_one_number(self):
        """A factor of all weights of the router, as Inkling's global_scale, over many draws.

        Its gradient is a sum of both signs, so that of one draw either form may be many times nearer to
        float64 than the other.
        """
        errors = []
        config = matrix.TinyConfig()
        classes = {c.__name__: c for c in matrix.experts_classes()}
        experts = classes["InklingExperts"](config)
        for seed in range(48):
            fill(experts, seed)
            g = torch.Generator().manual_seed(seed)
            x, grad = torch.randn(2, 24, 16, generator=g)
            weights, ids = torch.rand(24, 4, generator=g).topk(2)
            found = []
            for name, dtype in (("eager", torch.float64), (NAME, torch.float32), ("eager", torch.float32)):  # fmt: skip
                config._experts_implementation = name
                scale = torch.ones(1, dtype=dtype, requires_grad=True)
                low = dtype == torch.float32
                with torch.autocast("cpu", torch.bfloat16, enabled=low):
                    y = experts.to(dtype)(x.to(dtype), ids, weights.to(dtype) * scale)
                y.backward(grad.to(dtype))
                found.append(scale.grad.double())
            errors.append([(value - found[0]).square() for value in found[1:]])
        ours, eager = torch.tensor(errors).mean(0).sqrt()
        self.assertLess(ours, 1.2 * eager)

    def test_experts_that_compute_in_float32(self):
        classes = {c.__name__: c for c in matrix.experts_classes()}
        config, found = matrix.TinyConfig(), []
        config._experts_implementation = NAME
        for dtype in (torch.bfloat16, torch.float32):
            experts = classes["OpenAIPrivacyFilterExperts"](config)
            fill(experts, 0)
            experts.to(dtype)
            args, leaves = matrix.class_inputs("", dtype)
            y = experts(*args)
            y.backward(torch.ones_like(y))
            leaves |= dict(experts.named_parameters())
            found.append([y.detach(), *(leaf.grad for leaf in leaves.values())])
        low, exact = found
        self.assertEqual(low, [value.bfloat16() for value in exact], atol=0, rtol=2**-8)

    def test_nan_is_an_error(self):
        for size in (1, 32):
            exact = {"y": torch.ones(size, dtype=torch.float64)}
            found = {"y": torch.full((size,), torch.nan)}
            unfused = {"y": torch.ones(size)}
            self.assertEqual(error_over_allowed(unfused, [unfused], exact), 0)
            self.assertEqual(error_over_allowed(found, [unfused], exact), torch.inf)
            self.assertEqual(error_over_allowed(unfused, [found], exact), torch.inf)
            twice = {"y": torch.full((size,), 2.0)}
            self.assertGreater(error_over_allowed(twice, [unfused], exact), 1)

    def test_two_graphs_over_changing_tokens(self):
        model = build("qwen3_moe").eval()
        model.set_experts_implementation(NAME)
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        with torch.no_grad():
            for tokens in (16, 24, 40, 96):
                ids = torch.arange(tokens)[None] % 96
                compiled(input_ids=ids, use_cache=False)
        self.assertEqual(counter.frame_count, 2)

    def test_compiled_training(self):
        ours, eager = build("qwen3_moe"), build("qwen3_moe")
        ours.set_experts_implementation(NAME)
        options = {"fullgraph": True, "dynamic": True, "backend": "aot_eager"}
        ours.compile(**options)
        for shape in ((2, 12), (1, 1), (1, 2)):
            tokens = torch.arange(shape[0] * shape[1]).view(shape)
            ours.zero_grad()
            eager.zero_grad()
            self.assertEqual(outcome_of(ours, tokens), outcome_of(eager, tokens))

    def test_exported(self):
        eager, ours = build("gpt_oss"), build("gpt_oss")
        ours.set_experts_implementation(NAME)
        kwargs = {"input_ids": torch.arange(24).view(2, 12), "use_cache": False}
        dims = (torch.export.Dim.AUTO,) * 2
        dynamic = {"input_ids": dims, "use_cache": None}
        program = torch.export.export(ours, (), kwargs, dynamic_shapes=dynamic)
        targets = [str(node.target) for node in program.graph.nodes]
        self.assertEqual(targets.count("aten.moe_mlp.default"), 2)
        for shape in ((2, 12), (1, 5), (3, 30)):
            kwargs["input_ids"] = torch.randint(96, shape)
            found = program.module()(**kwargs).logits
            self.assertEqual(found, eager(**kwargs).logits)

    def test_grad_scaler(self):
        found = []
        for implementation in (NAME, "eager"):
            model = build("qwen3_moe", dtype=torch.float64)
            model.set_experts_implementation(implementation)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1)
            for factor in (1, torch.inf, 1):  # the second step is left out
                loss = model(input_ids=torch.arange(24)[None]).logits.square().mean()
                optimizer.zero_grad()
                scaler.scale(loss * factor).backward()
                scaler.step(optimizer)
                scaler.update()
            self.assertEqual(scaler.get_scale(), 2.0**41)
            found.append(dict(model.named_parameters()))
        self.assertEqual(*found)

    def test_missing_package_names_the_command(self):
        # Without site-packages nothing is installed, wherever these tests find it.
        command = [sys.executable, matrix.__file__]
        with tempfile.TemporaryDirectory() as empty:
            env = {**os.environ, "MOE_CLIENTS": empty}
            done = subprocess.run(command, env=env, capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("pip install --target build/clients", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    # A limit; act_fn is a function; clamped and transposed; without gates
    @parametrize("name", ["Lfm2Moe", "Gemma4Text", "GptOss", "NemotronH"])
    def test_class(self, name):
        classes = {c.__name__: c for c in matrix.experts_classes()}
        row = matrix.run_class(classes[f"{name}Experts"])
        self.assertEqual(row["state"], "runs", row)


class TestModelsOfAFile(TestCase):
    """matrix.py --models FILE."""

    def _run(self, folder, name):
        command = [sys.executable, matrix.__file__, "--models", name, "--out", "o.json"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return json.loads(pathlib.Path(folder, "o.json").read_text())

    def test_toml_and_config_json(self):
        with tempfile.TemporaryDirectory() as folder:
            build("mixtral").config.save_pretrained(folder)
            config = pathlib.Path(folder, "config.json")
            stored = json.loads(config.read_text())
            stored["architectures"] = ["MixtralForCausalLM"]
            config.write_text(json.dumps(stored))
            pathlib.Path(folder, "mine.toml").write_text(
                '[[models]]\nconfig = "config.json"\nnum_local_experts = 4\n'
                '[[models]]\nconfig = "config.json"\nnum_hidden_layers = 3\n'
            )
            found = self._run(folder, "mine.toml")
            self.assertNotIn("experts", found)
            layers = [row["layers"] for row in found["models"]]
            self.assertEqual(layers, ["2 of 2", "3 of 3"])
            found["models"] += self._run(folder, "config.json")["models"]
        self.assertEqual(len(found["models"]), 3)
        for row in found["models"]:
            seen = (row["state"], row["generate"], row["compile"])
            self.assertEqual(seen, ("runs", "same", "same"))

    def test_what_is_missing(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "mine.json")
            for text, message in (
                ("{}", "no list of models"),
                ('[{"hidden_size": 8}]', "a model without architectures"),
            ):
                path.write_text(text)
                with self.assertRaisesRegex(ValueError, message):
                    matrix.models_of(path)


class TestChoice(TestCase):
    """experts_implementation="moe_mlp" by one import: it takes effect, or the log says why not."""

    def setUp(self):
        super().setUp()
        moe_mlp_experts._logged.clear()

    def _logs(self, function):
        with self.assertLogs("moe_mlp_experts", "WARNING") as logs:
            function()
        return "\n".join(logs.output)

    def test_from_config_and_saved(self):
        import transformers

        config = build("qwen3_moe").config
        auto = transformers.AutoModelForCausalLM
        model = auto.from_config(config, experts_implementation=NAME)
        self.assertEqual(len(fused_experts(model)), 2)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            saved = json.loads(pathlib.Path(folder, "config.json").read_text())
            self.assertEqual(saved["experts_implementation"], NAME)
            loaded = auto.from_pretrained(folder)
            self.assertEqual(len(fused_experts(loaded)), 2)
            other = auto.from_pretrained(folder, experts_implementation="eager")
            self.assertEqual(fused_experts(other), [])
            other.save_pretrained(folder)
            saved = json.loads(pathlib.Path(folder, "config.json").read_text())
            self.assertNotIn("experts_implementation", saved)

    def test_switch_there_and_back(self):
        model = build("mixtral")
        for name, count in ((NAME, 2), ("eager", 0), (NAME, 2)):
            model.set_experts_implementation(name)
            self.assertEqual(len(fused_experts(model)), count)

    def test_unknown_activation_falls_back(self):
        model = build("mixtral")
        tokens = torch.arange(8)[None]
        for experts in experts_of(model):
            experts.act_fn = torch.nn.Hardswish()
        model.set_experts_implementation("grouped_mm")
        expected = model(input_ids=tokens).logits

        def run():
            model.set_experts_implementation(NAME)
            self.assertEqual(model(input_ids=tokens).logits, expected)

        text = self._logs(run)
        self.assertIn("act_fn of MixtralExperts is Hardswish", text)
        self.assertIn("has no effect on MixtralForCausalLM", text)

    def test_unknown_gate_falls_back(self):
        experts = experts_of(build("mixtral"))[0]

        def _apply_gate(self, gate_up):
            return gate_up.chunk(2, dim=-1)[0]

        with mock.patch.object(type(experts), "_apply_gate", _apply_gate):
            plan = moe_mlp_experts.plan_of(experts)
        self.assertIn("a gate of its own", plan.reason)
        experts.has_post_expert_norm = True
        self.assertIn("norm", moe_mlp_experts.plan_of(experts).reason)

    def _fp8_experts(self, *, has_gate=True, fp4=False, **config):
        """FP8Experts of transformers with random blocks, and its weights in float64."""
        import transformers
        from transformers.integrations import finegrained_fp8
        from transformers.integrations.moe import use_experts_implementation

        sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 4}
        config = transformers.Qwen3MoeConfig(**sizes | config)
        config._experts_implementation = NAME
        kind = use_experts_implementation(
            type("FP8Experts", (finegrained_fp8.FP8Experts,), {}),
            experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS,
            has_gate=has_gate,
        )
        options = {"has_gate": has_gate, "expert_dtype": "fp4" if fp4 else "fp8"}
        options["scale_fmt"] = "ue8m0" if fp4 else "float"
        experts, values = kind(config, block_size=(128, 128), **options), []
        for name in (moe_mlp_experts.first_name(experts), "down_proj"):
            weight, scale = (
                getattr(experts, name + suffix).data for suffix in ("", "_scale_inv")
            )
            if fp4:
                weight.random_(-128, 128)
                scale.copy_(torch.randint(-6, -3, scale.shape).float().exp2())
                codes = weight.view(torch.uint8)
                codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
                table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
                factors = scale.double().repeat_interleave(32, -1)
                values.append(torch.cat([table, -table])[codes] * factors)
            else:
                weight.copy_(torch.randn(weight.shape))
                scale.copy_(torch.rand(scale.shape) / 8)
                wide = scale.double().repeat_interleave(128, 1)[:, : weight.shape[1]]
                wide = wide.repeat_interleave(128, 2)[..., : weight.shape[2]]
                values.append(weight.double() * wide)
        return experts, values

    @parametrize(
        "options",
        [
            {},
            {"fp4": True},
            {"has_gate": False},
            {"swiglu_limit": 1.0},
            {"swiglu_limit": 2.0, "swiglu_alpha": 1.7},
        ],
    )
    def test_fp8_experts(self, options):
        """Their numbers and scales as they are; their own code needs a GPU."""
        torch.manual_seed(0)
        experts, (w_in, w_out) = self._fp8_experts(**options)
        x = torch.randn(9, 256, requires_grad=True)
        ids, weights = torch.randint(0, 5, (9, 2)), torch.rand(9, 2)  # 4: no expert
        found = experts(x, ids, weights)
        exact = x.detach().double().requires_grad_()
        gates = {1.0: ("swiglu", 1.0, None), 2.0: ("swiglu_oai", 2.0, 1.7)}
        default = "swiglu" if options.get("has_gate", True) else "silu", None, None
        activation, limit, alpha = gates.get(options.get("swiglu_limit"), default)
        chosen = {"activation": activation, "limit": limit, "alpha": alpha}
        wanted = F.moe_mlp(exact, ids, weights.double(), w_in, w_out, **chosen)
        self.assertEqual(found.double(), wanted, rtol=1e-4, atol=1e-4)
        grads = (
            torch.autograd.grad(y.sum(), z)[0] for y, z in ((found, x), (wanted, exact))
        )
        self.assertEqual(*(grad.double() for grad in grads), rtol=1e-4, atol=1e-4)

    def test_fp8_experts_fall_back(self):
        for options, reason in (
            ({"mlp_gate_softcap": 3.0}, "a gate with a softcap"),
            ({"moe_intermediate_size": 48}, "gate_up_proj of FP8Experts is not taken"),
        ):
            experts, _ = self._fp8_experts(**options)
            theirs = "transformers.integrations.finegrained_fp8.fp8_grouped_mm_experts_forward"
            with mock.patch(theirs) as forward:
                text = self._logs(lambda: experts(*[torch.zeros(1, 1)] * 3))
            self.assertIn(reason, text)
            forward.assert_called_once()

    @parametrize("name", ["Mixtral", "GptOss", "Llama4", "Dbrx", "JetMoe"])
    def test_what_is_replaced_between_two_calls(self, name):
        import transformers

        class Half(torch.nn.Module):
            def forward(self, x):
                return x / 2

        def of_its_own(gate_up):
            return gate_up.chunk(2, dim=-1)[0]

        activation = {"Dbrx": "activation_fn", "JetMoe": "activation"}.get(
            name, "act_fn"
        )
        changes = [(activation, torch.nn.GELU("tanh")), (activation, Half())]
        if name == "GptOss":
            changes = [("limit", 0.05), ("alpha", 3.0), ("_apply_gate", of_its_own)]
        model_class = getattr(transformers, f"{name}ForCausalLM")
        ours, eager = (matrix.build_model(model_class, torch.float64) for _ in "ab")
        ours.set_experts_implementation(NAME)
        self.assertEqual(len(fused_experts(ours)), 2)
        names = [n for n, m in ours.named_modules() if m in experts_of(ours)]
        tokens = torch.arange(8)[None]
        with torch.no_grad():
            for change in (None, *changes):
                for model in (ours, eager) if change else ():
                    for part in (
                        p for n in names for p in model.get_submodule(n).modules()
                    ):
                        if hasattr(part, change[0]):
                            setattr(part, *change)
                found, expected = (m(input_ids=tokens).logits for m in (ours, eager))
                self.assertEqual(found, expected, msg=str(change))
        self.assertEqual(fused_experts(ours), [])  # the last change has no F.moe_mlp

    def test_forward_of_an_instance_was_replaced(self):
        """Packages with their own kernels do this. Their forward stays, and the log says so."""
        model = build("mixtral")
        for experts in experts_of(model):
            experts.forward = lambda x, ids, weights: x * 0
        text = self._logs(lambda: model.set_experts_implementation(NAME))
        self.assertIn("the forward of this MixtralExperts was replaced before", text)
        with mock.patch.object(F, "moe_mlp", wraps=F.moe_mlp) as op:
            model(torch.arange(8)[None])
        self.assertFalse(op.called)

    def test_a_model_without_experts_says_so(self):
        import transformers

        config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)  # fmt: skip
        auto = transformers.AutoModelForCausalLM
        text = self._logs(lambda: auto.from_config(config, experts_implementation=NAME))
        self.assertIn("has no effect on LlamaForCausalLM", text)
        # Nor do experts of another kind have a place for the choice.
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "num_experts": 4, "vocab_size": 32}  # fmt: skip
        switch = transformers.SwitchTransformersConfig(**sizes)
        model = transformers.SwitchTransformersForConditionalGeneration(switch)
        text = self._logs(lambda: model.set_experts_implementation(NAME))
        self.assertIn("has no effect on SwitchTransformersForConditional", text)
        with self.assertNoLogs("moe_mlp_experts", "WARNING"):
            auto.from_config(config)  # nobody asked

    def test_unpickled_in_another_process(self):
        import transformers

        model = matrix.build_model(transformers.Llama4ForCausalLM, torch.float32, NAME)
        model.set_experts_implementation(NAME)
        pickled = pickle.dumps(model)
        adapted = type(model.model.layers[0].feed_forward)
        with mock.patch.object(adapted, "forward", adapted._moe_mlp_original):
            del adapted._moe_mlp_original  # nobody asked there yet
            loaded = pickle.loads(pickled)
            self.assertEqual(len(fused_experts(loaded)), 2)
            tokens = torch.arange(8)[None]
            with mock.patch.object(F, "moe_mlp", wraps=F.moe_mlp) as op:
                self.assertEqual(loaded(tokens).logits, model(tokens).logits)
            self.assertEqual(op.call_count, 4)

    @parametrize("name", ["Llama4ForCausalLM", "DbrxForCausalLM", "JetMoeForCausalLM"])
    def test_model_without_the_interface(self, name):
        import transformers

        row = matrix.run_model(getattr(transformers, name), compiled=False)
        self.assertEqual((row["state"], row["layers"]), ("runs", "2 of 2"), row)
        self.assertEqual(row["generate"], "same")


class TestPatch(TestCase):
    """transformers.patch applies, and imports the module that is copied beside it."""

    def test_applies(self):
        import transformers

        patch = str(pathlib.Path(__file__).with_name("transformers.patch"))
        installed = pathlib.Path(transformers.__file__).with_name("integrations")
        with tempfile.TemporaryDirectory() as folder:
            target = pathlib.Path(folder, "src/transformers/integrations/moe.py")
            target.parent.mkdir(parents=True)
            target.write_text((installed / "moe.py").read_text())
            for command in (["init", "-q"], ["apply", "--unidiff-zero", patch]):
                subprocess.run(["git", *command], cwd=folder, check=True)
            text = target.read_text()
        self.assertIn('"moe_mlp": moe_mlp_experts_forward', text)
        name = re.search(r"from \.moe_mlp_experts import (\w+) as", text)[1]
        self.assertIs(getattr(moe_mlp_experts, name), moe_mlp_experts.experts_forward)


instantiate_parametrized_tests(TestTransformers)
instantiate_parametrized_tests(TestChoice)

if __name__ == "__main__":
    run_tests()
