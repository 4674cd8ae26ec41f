# Owner(s): ["oncall: distributed"]

import dataclasses
import unittest

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.moe_config import MODELS, MoEConfig
from torch.distributed._tools.moe_estimator import MoERuntimeEstimator
from torch.distributed._tools.moe_inference_model import infer
from torch.distributed._tools.moe_layout import Layout
from torch.distributed._tools.moe_memory_model import layer_peak, memory, saved_bytes
from torch.distributed._tools.moe_profile import profile
from torch.distributed._tools.moe_step_model import block, train_step
from torch.nn import functional as F
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.utils.flop_counter import FlopCounterMode


HAS_MOE = hasattr(F, "moe_mlp")

QWEN3_30B = {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
    "intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936,
}  # fmt: skip
DEEPSEEK_V3 = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "v_head_dim": 128, "moe_intermediate_size": 2048,
    "intermediate_size": 18432, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 3, "vocab_size": 129280,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "n_group": 8, "topk_group": 4,
    "num_nextn_predict_layers": 1,
}  # fmt: skip


class TestConfig(TestCase):
    def test_from_config(self):
        self.assertEqual(MoEConfig.from_config(QWEN3_30B), MODELS["qwen3-30b-a3b"])
        self.assertEqual(MoEConfig.from_config(DEEPSEEK_V3), MODELS["deepseek-v3"])
        for model_type in ("gpt_oss", "qwen3_moe"):
            found = MoEConfig.from_config({**QWEN3_30B, "model_type": model_type})
            self.assertEqual(found.biased, model_type == "gpt_oss")
        with self.assertRaisesRegex(ValueError, "config has none of .*num_experts"):
            MoEConfig.from_config(
                {k: v for k, v in QWEN3_30B.items() if k != "num_experts"}
            )

    def test_latent_attention_of_other_sizes(self):
        sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                 "v_head_dim": 24, "q_lora_rank": 48, "num_attention_heads": 4}  # fmt: skip
        model = MoEConfig.from_config({**DEEPSEEK_V3, "hidden_size": 64, **sizes})
        q, kv = [(48, 64), (4 * 24, 48)], [(32 + 8, 64), (4 * (16 + 24), 32)]
        self.assertEqual(model.attention(), [*q, *kv, (64, 4 * 24)])
        self.assertEqual((model.cached, MODELS["deepseek-v3"].cached), (40, 576))

    def test_layers_without_experts_are_those_of_the_module(self):
        class Experts(nn.Module):
            def __init__(self):
                super().__init__()
                self.up = nn.Parameter(torch.empty(2, 8, 4))
                self.down = nn.Parameter(torch.empty(2, 4, 8))

        model = nn.ModuleList([nn.Linear(4, 4), Experts(), nn.Linear(4, 4), Experts()])
        model.config = {**QWEN3_30B, "num_hidden_layers": 4}
        found = MoEConfig.from_module(model)
        self.assertEqual((found.layers, found.dense), (4, 2))
        self.assertEqual(
            found.parameters()["expert"] * 24,
            MODELS["qwen3-30b-a3b"].parameters()["expert"],
        )

    def test_parameters(self):
        for name, billions in (("deepseek-v3", 671), ("qwen3-30b-a3b", 30.5),
                               ("mixtral-8x7b", 46.7), ("gpt-oss-120b", 116.8)):  # fmt: skip
            total = sum(MODELS[name].parameters().values()) / 1e9
            self.assertEqual(total, billions, rtol=0.02, atol=0)

    def test_train_flops(self):
        # Six per active parameter, 37 billion of them, and attention.
        model = dataclasses.replace(MODELS["deepseek-v3"], mtp=0)
        flops = model.train_flops(4096) / 1e9
        self.assertGreater(flops, 6 * 36)
        self.assertLess(flops, 6 * 46)

    def test_from_transformers(self):
        try:
            from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
        except ImportError:
            self.skipTest("needs transformers")
        config = Qwen3MoeConfig(**QWEN3_30B)
        with torch.device("meta"):
            small = Qwen3MoeForCausalLM(
                Qwen3MoeConfig(**{**QWEN3_30B, "num_hidden_layers": 2})
            )
        self.assertEqual(MoEConfig.from_config(config), MODELS["qwen3-30b-a3b"])
        self.assertEqual(MoEConfig.from_module(small).layers, 2)
        # The library's own code under fake tensors: logits of 64 tokens, and their backward.
        with FakeTensorMode():
            model = Qwen3MoeForCausalLM(
                Qwen3MoeConfig(**{**QWEN3_30B, "num_hidden_layers": 2})
            )
            model.set_experts_implementation("grouped_mm")
            tokens = torch.zeros(1, 64, dtype=torch.int64)
            with MoERuntimeEstimator(profile("H100")) as estimate:
                model(input_ids=tokens).logits.sum().backward()
        active = 2 * sum(p.numel() for p in model.model.layers.parameters()) * 8 / 128
        self.assertGreater(estimate.flops, 2 * 64 * active)
        self.assertGreater(estimate.seconds, 0)

    def test_from_module(self):
        class Experts(nn.Module):  # the shapes of torchtitan's GroupedExperts
            def __init__(self):
                super().__init__()
                self.w1_EFD = nn.Parameter(torch.empty(16, 96, 64))
                self.w2_EDF = nn.Parameter(torch.empty(16, 64, 96))
                self.w3_EFD = nn.Parameter(torch.empty(16, 96, 64))
                self.top_k = 4

        with FakeTensorMode():
            model = nn.Sequential(nn.Embedding(1000, 64), Experts(), Experts())
            got = MoEConfig.from_module(model)
        want = {"layers": 2, "d": 64, "f": 96, "experts": 16, "k": 4, "vocab": 1000}
        self.assertEqual({k: getattr(got, k) for k in want}, want)
        with self.assertRaisesRegex(ValueError, "neither a .config nor"):
            MoEConfig.from_module(nn.Linear(2, 2))
        got = MoEConfig.from_module(Experts())
        self.assertEqual((got.d, got.f, got.gated), (64, 96, True))
        got = MoEConfig.from_module(nn.Sequential(nn.Embedding(9, 32), Experts()))
        self.assertEqual((got.d, got.f), (64, 96))
        conv = nn.Conv1d(4, 4, 3)
        conv.k = 3
        experts = Experts()
        experts.extra = nn.Parameter(torch.empty(3, 8, 8))
        got = MoEConfig.from_module(nn.Sequential(conv, experts))
        self.assertEqual((got.d, got.f, got.experts, got.k), (64, 96, 16, 4))
        odd = nn.ParameterList([torch.empty(4, 8, 5), torch.empty(4, 7, 3)])
        with self.assertRaisesRegex(ValueError, r"'' has weights .* fit no \(D, F\)"):
            MoEConfig.from_module(odd)

    @unittest.skipUnless(hasattr(nn, "MoE"), "needs nn.MoE")
    @parametrize("options", ({}, {"separate_up": True}, {"activation": "relu2"}))
    @parametrize("lora", (False, True))
    def test_from_layer(self, options, lora):
        kw = {**options, "device": "meta"}
        layers = [nn.MoE(2048, 768, 8, 2, **kw) for _ in range(2)]
        if lora:
            from torch.nn.utils.moe_lora import add_lora

            for layer in layers:
                add_lora(layer, rank=4, alpha=8)
        position = nn.ParameterList([torch.empty(1, 16, 2048), torch.empty(1, 1, 2048)])
        for model in (layers[0], nn.Sequential(position, *layers)):
            got = MoEConfig.from_module(model)
            sizes = (got.d, got.f, got.experts, got.k, got.gated)
            self.assertEqual(sizes, (2048, 768, 8, 2, "activation" not in options))
            self.assertEqual(got.layers, 1 if model is layers[0] else 2)

    @unittest.skipUnless(hasattr(nn, "MoE"), "needs nn.MoE")
    def test_several_shapes(self):
        with self.assertWarnsRegex(UserWarning, "several shapes; those of '0'"):
            MoEConfig.from_module(nn.ModuleList(nn.MoE(8, 4, E, 2) for E in (4, 6)))

    def test_layers_between_those_with_experts(self):
        llama4 = {**QWEN3_30B, "model_type": "llama4_text", "num_local_experts": 128,
                  "intermediate_size": 8192, "intermediate_size_mlp": 16384,
                  "interleave_moe_layer_step": 2}  # fmt: skip
        del llama4["moe_intermediate_size"], llama4["num_experts"]
        got = MoEConfig.from_config({"text_config": llama4})
        sizes = (got.f, got.shared_f, got.dense, got.dense_f)
        self.assertEqual(sizes, (8192, 8192, 24, 16384))
        config = {**QWEN3_30B, "decoder_sparse_step": 3, "mlp_only_layers": [0, 2]}
        got = MoEConfig.from_config(config)
        self.assertEqual((got.dense, got.dense_f), (48 - 15, 6144))
        with self.assertRaisesRegex(
            ValueError, "mlp_only_layers must be a list, got 3"
        ):
            MoEConfig.from_config({**config, "mlp_only_layers": 3})

    def test_bad_sizes(self):
        with self.assertRaisesRegex(ValueError, "k must be at most experts = 4, got 5"):
            MoEConfig(1, 8, 8, 4, 5, 1, 1, 8, 8)
        with self.assertRaisesRegex(
            ValueError, "layers must be an integer from 1 to 10,000, got 0"
        ):
            MoEConfig(0, 8, 8, 4, 2, 1, 1, 8, 8)
        with self.assertRaisesRegex(ValueError, "model must be one of .* got 'gpt'"):
            MoEConfig.by_name("gpt")


def check_saved_bytes(formula):
    """The formula is, byte for byte, what F.moe_mlp saves outside of its weights."""
    for T, D, f, E, K, dtype in (
        (32, 16, 24, 4, 2, torch.float32), (40, 64, 32, 8, 4, torch.bfloat16),
        (7, 16, 16, 3, 1, torch.float32),
    ):  # fmt: skip
        x = torch.randn(T, D, dtype=dtype, requires_grad=True)
        w_in = torch.randn(E, 2 * f, D, dtype=dtype, requires_grad=True)
        w_out = torch.randn(E, D, f, dtype=dtype, requires_grad=True)
        ids = torch.arange(T * K).view(T, K) % E
        weights = torch.rand(T, K, requires_grad=True)
        saved = {}

        def pack(t):
            if not any(t.untyped_storage().data_ptr() == w.untyped_storage().data_ptr()
                       for w in (w_in, w_out)):  # fmt: skip
                saved[t.untyped_storage().data_ptr()] = t.numel() * t.element_size()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            F.moe_mlp(x, ids, weights, w_in, w_out)
        want = formula(T, T * K, D, f, k=K, num_experts=E, itemsize=x.element_size())
        assert sum(saved.values()) == want, (sum(saved.values()), want)


class TestMemory(TestCase):
    @unittest.skipUnless(HAS_MOE, "needs F.moe_mlp")
    def test_saved_bytes(self):
        check_saved_bytes(saved_bytes)

        def broken(*args, **kw):  # gathers its input
            return saved_bytes(*args, **{**kw, "kernel": "deepgemm++"})

        with self.assertRaises(AssertionError):
            check_saved_bytes(broken)

    def test_sizes_reach_the_activations(self):
        model, layout = MODELS["llama4-scout"], Layout(gpus=64, ep=8, recompute="none")
        got = memory(model, layout)
        for change, less, factor in (
            ({"gated": False}, "experts", None), ({"dense": 24}, "experts", 0.5),
            ({"dense": 24, "dense_f": 16384}, "experts", None), ({"mtp": 1}, "attention", 49 / 48),
        ):  # fmt: skip
            other = memory(dataclasses.replace(model, **change), layout)
            ratio = getattr(other, less) / getattr(got, less)
            if factor is None:
                self.assertLess(ratio, 1)
            else:
                self.assertEqual(ratio, factor)
        twice = memory(model, dataclasses.replace(layout, dtype="fp32"))
        self.assertEqual(
            (twice.experts, twice.attention), (2 * got.experts, 2 * got.attention)
        )

    def test_recompute(self):
        model = MODELS["qwen3-30b-a3b"]
        sizes = [
            memory(model, Layout(gpus=16, ep=8, recompute=r)).total
            for r in ("none", "selective", "full")
        ]
        self.assertEqual(sizes, sorted(sizes, reverse=True))
        self.assertGreater(sizes[0], sizes[2])
        with self.assertRaisesRegex(
            ValueError, "recompute must be one of .*got 'some'"
        ):
            memory(model, Layout(recompute="some"))

    @parametrize("field", ("ep", "pp", "gpus"))
    def test_more_ranks_need_less(self, field):
        model = MODELS["deepseek-v3"]
        base = Layout(gpus=256, ep=8, pp=4)
        more = dataclasses.replace(base, **{field: 2 * getattr(base, field)})
        self.assertLess(memory(model, more).weights, memory(model, base).weights)

    def test_published_peaks(self):
        # Megatron's moe_perf/baseline.json: H100, EP8, peak of one layer, GB.
        for d, f, e, k, shared, peak in (
            (7168, 2048, 32, 8, 2048, 2.45), (4096, 14336, 8, 2, 0, 2.04),
        ):  # fmt: skip
            got = layer_peak(
                4096, 4096 * k, d, f, e / 8, shared_f=shared, kernel="mcore"
            )
            self.assertGreater(got / 1e9, 0.5 * peak)
            self.assertLess(got / 1e9, 2.0 * peak)


class TestSteps(TestCase):
    def step(self, **kw):
        layout = Layout(gpus=64, ep=8, dtype="fp8", **kw)
        return train_step(
            profile("H100"), MODELS["qwen3-235b-a22b"], layout, global_batch=512
        )

    def test_train(self):
        base = self.step(pp=4)
        self.assertGreater(base.bubble, self.step(pp=4, virtual=4).bubble)
        self.assertEqual(self.step().bubble, 0)
        self.assertGreater(self.step(pp=4, recompute="full").seconds, base.seconds)
        self.assertLessEqual(self.step(pp=4, graphs=2).seconds, base.seconds)
        self.assertEqual(
            base.tokens_per_second * base.seconds * 64, 512 * 4096, rtol=1e-6, atol=0
        )

    def test_a_pipeline_hides_exchanges(self):
        p, model, kw = profile("H100"), MODELS["qwen3-30b-a3b"], {"global_batch": 512}
        for pp, exposed in ((1, 1.0), (2, p.constants.exposed)):
            layout = Layout(gpus=16, ep=8, pp=pp)
            want = train_step(p, model, layout, exposed=exposed, **kw)
            self.assertEqual(train_step(p, model, layout, **kw), want)

    def test_ranks_that_share_a_width_exchange_rows(self):
        model, layout = MODELS["mixtral-8x22b"], Layout(gpus=16, tp=8, expert_tp=8)
        h100, h800 = (profile(name) for name in ("H100", "H800"))  # 450 and 200 GB/s
        links = [
            block(p, model, x, 4096, 4096, "fwd").tp_links
            for p in (h100, h800) for x in (layout, dataclasses.replace(layout, expert_tp=1))
        ]  # fmt: skip
        rows = 4 * 4096 * model.k * model.d * 7 / 8
        for (shared, whole), p in zip((links[:2], links[2:]), (h100, h800)):
            rate = p.device.fast * p.constants.fast
            self.assertEqual(shared - whole, rows / rate)

    def test_imbalance_slows(self):
        p, model = profile("B200"), MODELS["deepseek-v3"]
        layout = Layout(gpus=256, ep=32, pp=8, dtype="mxfp8", graphs=1)
        seconds = [
            train_step(p, model, layout, global_batch=2048, imbalance=i).seconds
            for i in (1.0, 1.2, 2.0)
        ]
        self.assertEqual(seconds, sorted(seconds))
        self.assertGreater(seconds[2], 1.1 * seconds[0])

    def test_more_work_is_never_faster(self):
        p = profile("H100")
        for pp in (2, 5, 7, 16):
            for name in ("gpt-oss-120b", "llama4-scout"):
                model = MODELS[name]
                layout = Layout(gpus=64 * pp, ep=8, pp=pp)
                seconds = [
                    train_step(
                        p, dataclasses.replace(model, **change), layout,
                        global_batch=1024, imbalance=imbalance,
                    ).seconds
                    for change, imbalance in (
                        ({"dense": 24}, 1.0), ({}, 1.0), ({}, 1.05), ({}, 1.3),
                        ({"layers": model.layers + 1}, 1.3), ({"layers": 2 * model.layers}, 1.3),
                    )
                ]  # fmt: skip
                self.assertEqual(seconds, sorted(seconds), msg=f"{name} {pp}")

    def test_infer(self):
        p, model = profile("H800"), MODELS["deepseek-v3"]
        kw = {"ep": 64, "phase": "decode"}
        few, many = (infer(p, model, t, 4096, **kw) for t in (8, 128))
        self.assertGreater(many, 4 * few)  # weights are read once
        one = infer(p, model, 16384, 4096, ep=32, phase="prefill", two_batches=False)
        two = infer(p, model, 16384, 4096, ep=32, phase="prefill")
        self.assertGreater(two, one)
        with self.assertRaisesRegex(ValueError, "phase must be .*got 'train'"):
            infer(p, model, 1, 1, ep=1, phase="train")


class TestRuntimeEstimator(TestCase):
    def run_block(self, p, T=64):
        with FakeTensorMode():
            x = torch.randn(T, 256, dtype=torch.bfloat16, requires_grad=True)
            w = torch.randn(512, 256, dtype=torch.bfloat16, requires_grad=True)
            with MoERuntimeEstimator(p) as estimate:
                F.linear(x, w).relu().sum().backward()
            with FlopCounterMode(display=False) as counter:
                F.linear(x, w).relu().sum().backward()
        return estimate, counter.get_total_flops()

    def test_products(self):
        estimate, flops = self.run_block(profile("H100"))
        self.assertEqual(estimate.flops, flops)
        self.assertEqual(sum(estimate.by_op.values()), estimate.seconds)
        self.assertNotIn("t", [k for k, v in estimate.by_op.items() if v])
        more, _ = self.run_block(profile("H100"), T=65536)
        self.assertGreater(more.seconds, 2 * estimate.seconds)

    @unittest.skipUnless(HAS_MOE, "needs F.moe_mlp")
    def test_moe_mlp(self):
        T, D, f, E, K = 4096, 512, 256, 32, 4
        with FakeTensorMode():
            x = torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True)
            w_in = torch.randn(E, 2 * f, D, dtype=torch.bfloat16, requires_grad=True)
            w_out = torch.randn(E, D, f, dtype=torch.bfloat16, requires_grad=True)
            ids = torch.zeros(T, K, dtype=torch.int64)
            weights = torch.rand(T, K, requires_grad=True)
            for name in ("H100", "B200"):
                with MoERuntimeEstimator(profile(name)) as estimate:
                    F.moe_mlp(x, ids, weights, w_in, w_out).sum().backward()
                self.assertEqual(estimate.flops, 18 * T * K * D * f)
                self.assertGreater(estimate.by_op["_moe_mlp"], 0)
                self.assertGreater(
                    estimate.by_op["_moe_mlp_backward"], estimate.by_op["_moe_mlp"]
                )
                # No memory was touched and no expert multiplied.
                self.assertLess(estimate.seconds, 0.01)
            with MoERuntimeEstimator(profile("H100")) as estimate:
                F.moe_mlp(x[:, :0], ids, weights, w_in[..., :0], w_out[:, :0])
            self.assertEqual(estimate.by_op["_moe_mlp"], 0)


instantiate_parametrized_tests(TestConfig)
instantiate_parametrized_tests(TestMemory)

if __name__ == "__main__":
    run_tests()
