# Owner(s): ["module: nn"]
"""Stacked experts that torchao and compressed-tensors quantise, as operands of ``_moe_mlp_scaled``.

The values are those of their own dequantisation, in the models of transformers too.
"""

import unittest

import torch
from torch.nn.utils._moe_checkpoints import from_compressed_tensors, from_torchao
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


try:
    from packages import require_transformers

    require_transformers()
    import transformers_experts
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from families import build
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import (
        Float8Tensor,
    )
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor
except ImportError as error:
    raise unittest.SkipTest(f"{error}; see benchmarks/moe/clients/README.md") from None


class TestQuantizedExperts(TestCase):
    def test_torchao(self):
        for kind in (Int8Tensor, Float8Tensor):
            theirs = kind.from_hp(torch.randn(3, 32, 64), granularity=PerRow())
            data, scale, _ = from_torchao(theirs)
            self.assertEqual(data.float() * scale, theirs.dequantize(), atol=0, rtol=0)

    def test_compressed_tensors(self):
        numbers = torch.randint(-8, 8, (3, 32, 64), dtype=torch.int8)
        packed = pack_to_int32(numbers, 4)
        scale = torch.rand(3, 32, 2)
        data, ours, _ = from_compressed_tensors(packed, scale, weight_shape=(32, 64))
        codes = torch.stack([data & 15, data >> 4], -1).flatten(-2).int() - 8
        self.assertEqual(codes, numbers.int())
        self.assertEqual(ours, scale)

    @parametrize("kind", (Int8Tensor, Float8Tensor))
    @parametrize("family", ("qwen3_moe", "gpt_oss"))
    def test_model(self, family, kind):
        model, plain = build(family), build(family)
        for experts, others in zip(
            *map(transformers_experts.experts_of, (model, plain)), strict=True
        ):
            for name in ("gate_up_proj", "down_proj"):
                theirs = kind.from_hp(
                    getattr(experts, name).detach(), granularity=PerRow()
                )
                setattr(experts, name, torch.nn.Parameter(theirs, requires_grad=False))
                setattr(others, name, torch.nn.Parameter(theirs.dequantize()))
        model.set_experts_implementation("moe_mlp")
        embedded = torch.randn(2, 9, 32)
        if family == "gpt_oss":  # along another dimension than the op's
            with self.assertRaisesRegex(NotImplementedError, "Quantise their .mT"):
                model(inputs_embeds=embedded)
            return
        found, wanted = [], []
        for each, values in ((model, found), (plain, wanted)):
            x = embedded.clone().requires_grad_()
            values.append(each(inputs_embeds=x).logits)
            values += torch.autograd.grad(values[0].square().mean(), x)
        self.assertEqual(found, wanted)

    def test_module(self):
        layer = torch.nn.MoE(32, 48, 8, 2)
        theirs = Int8Tensor.from_hp(layer.w_in.detach(), granularity=PerRow())
        layer.w_in = torch.nn.Parameter(theirs, requires_grad=False)
        with self.assertRaises(NotImplementedError) as caught:
            layer(torch.randn(3, 32))
        (note,) = caught.exception.__notes__
        self.assertRegex(note, r"w_in of MoE is an? Int8Tensor.*dequantize\(\)")


instantiate_parametrized_tests(TestQuantizedExperts)

if __name__ == "__main__":
    run_tests()
