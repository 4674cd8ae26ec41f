# Owner(s): ["module: nn"]
"""gpt-oss of transformers with MXFP4 blocks as in its checkpoints, against its dequantised path."""

import os
import tempfile

from gpt_oss_mxfp4 import experts_of, keep_blocks, pack
from packages import require_transformers

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


require_transformers()
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


E, D, HIDDEN = 8, 128, 96
CONFIG = {
    "num_hidden_layers": 2, "num_local_experts": E, "num_experts_per_tok": 2,
    "hidden_size": D, "intermediate_size": HIDDEN, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96, "sliding_window": 16,
    "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip


def checkpoint(g):
    """The tensors of a file of openai/gpt-oss-20b by name, for the reduced config."""
    torch.manual_seed(0)
    state = GptOssForCausalLM(GptOssConfig(**CONFIG)).bfloat16().state_dict()
    for layer in range(CONFIG["num_hidden_layers"]):
        sizes = {"gate_up_proj": (2 * HIDDEN, D), "down_proj": (D, HIDDEN)}
        for name, (rows, depth) in sizes.items():
            name = f"model.layers.{layer}.mlp.experts.{name}"
            del state[name]
            shape = (E, rows, depth // 32)
            options = {"generator": g, "dtype": torch.uint8}
            state[f"{name}_blocks"] = torch.randint(256, (*shape, 16), **options)
            state[f"{name}_scales"] = torch.randint(121, 124, shape, **options)
            bias = torch.randn(E, rows, generator=g) * 0.1
            state[f"{name}_bias"] = bias.bfloat16()
    return state


def dequantised(state, dtype):
    """transformers' own path: blocks become weights when they are loaded."""
    full = {k: v for k, v in state.items() if not k.endswith(("_blocks", "_scales"))}
    for name, blocks in state.items():
        if name.endswith("_blocks"):
            scales = state[name.replace("_blocks", "_scales")]
            weight = convert_moe_packed_tensors(blocks, scales)
            full[name.removesuffix("_blocks")] = weight
    model = GptOssForCausalLM(GptOssConfig(**CONFIG)).to(dtype)
    model.load_state_dict({k: v.to(dtype) for k, v in full.items()})
    return model.eval()


def kept(state):
    with torch.device("meta"):
        model = GptOssForCausalLM(GptOssConfig(**CONFIG)).bfloat16()
    # It is not in a checkpoint.
    rotary = GptOssForCausalLM(GptOssConfig(**CONFIG)).model.rotary_emb
    model.model.rotary_emb = rotary
    keep_blocks(model)
    model.load_state_dict(state, assign=True)
    return model.eval()


class TestGptOssMxfp4(TestCase):
    def setUp(self):
        self.generator = torch.Generator().manual_seed(1)
        self.state = checkpoint(self.generator)
        self.tokens = torch.randint(96, (2, 24), generator=self.generator)

    def logits(self, model, tokens=None):
        with torch.no_grad():
            tokens = self.tokens if tokens is None else tokens
            return model(input_ids=tokens).logits.double()

    @parametrize("packed", [False, True])
    @parametrize("int8_rows", [False, True])
    def test_logits(self, packed, int8_rows):
        model = kept(self.state)
        if packed:
            pack(model)
        for experts in experts_of(model):
            experts.int8_rows = int8_rows
        actual = self.logits(model)
        own = self.logits(dequantised(self.state, torch.bfloat16))
        exact = self.logits(dequantised(self.state, torch.float32))
        # Both round to bfloat16 in attention; rows in int8 add what a bfloat16 row loses.
        error = (own - exact).abs().max().item()
        allowed = (6 if int8_rows else 2) * error
        self.assertEqual(actual, exact, atol=allowed, rtol=0)
        self.assertGreater(exact.abs().max().item(), 10 * error)

    def test_packed_models_and_checkpoints(self):
        """Packing changes no checkpoint, is not saved as one, and is undone by loading one."""
        model, other = kept(self.state), kept(self.state)
        expected = self.logits(model)
        pack(model)
        self.assertEqual(self.logits(other), expected)
        with self.assertRaisesRegex(RuntimeError, "layers.0.mlp.experts is packed"):
            model.state_dict()
        for assign in (False, True):
            model.load_state_dict(self.state, assign=assign)
            self.assertEqual(self.logits(model), expected)
            pack(model)

        # A part of a checkpoint that has no experts, and one that has half of them.
        rest = {k: v for k, v in self.state.items() if ".experts." not in k}
        model.load_state_dict(rest, strict=False)
        self.assertEqual(self.logits(model), expected)
        half = {k: v for k, v in self.state.items() if "gate_up_proj" in k}
        with self.assertRaisesRegex(
            RuntimeError, "all at once; missing are .'down_proj"
        ):
            model.load_state_dict(half, strict=False)
        self.assertEqual(self.logits(model), expected)

    @parametrize("packed", [False, True])
    def test_gradients_of_the_rest(self, packed):
        """Embeddings, attention and the router train beside frozen experts."""
        model, full = kept(self.state), dequantised(self.state, torch.float32)
        if packed:
            pack(model)
        model.float()
        names = ("model.embed_tokens.weight", "model.layers.0.mlp.router.weight")
        grads = []
        for m in (model, full):
            m(input_ids=self.tokens).logits.square().mean().backward()
            grads.append([m.get_parameter(name).grad for name in names])
        self.assertEqual(*grads, rtol=1e-3, atol=1e-6)

    def test_sizes(self):
        with torch.device("meta"):
            model = GptOssForCausalLM(
                GptOssConfig(**{**CONFIG, "intermediate_size": 48})
            )
        with self.assertRaisesRegex(ValueError, "down_proj must have .*of 32 .*got 48"):
            keep_blocks(model)

    def test_bytes(self):
        model, full = kept(self.state), dequantised(self.state, torch.bfloat16)
        ours = sum(p.nbytes for m in experts_of(model) for p in m.parameters())
        theirs = sum(p.nbytes for n, p in full.named_parameters() if ".experts." in n)
        self.assertLess(ours / theirs, 0.28)

    def test_generate_and_file(self):
        """Greedy decoding through a file of the checkpoint's names and layouts."""
        from safetensors.torch import load_file, save_file

        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.safetensors")
            save_file({k: v.contiguous() for k, v in self.state.items()}, path)
            model = kept(load_file(path))
        pack(model)
        prompt = self.tokens[:1]
        with torch.profiler.profile() as profile:
            text = model.generate(prompt, max_new_tokens=4, do_sample=False)
        self.assertEqual(text.shape, (1, prompt.shape[1] + 4))
        names = [event.name for event in profile.events()]
        self.assertEqual(names.count("aten::_moe_mlp_scaled"), 4 * 2)
        # One forward over the whole sequence gives the same tokens.
        again = self.logits(model, text)[0, prompt.shape[1] - 1 : -1].argmax(-1)
        self.assertEqual(again, text[0, prompt.shape[1] :])


instantiate_parametrized_tests(TestGptOssMxfp4)

if __name__ == "__main__":
    run_tests()
