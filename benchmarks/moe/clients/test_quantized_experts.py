# Owner(s): ["module: nn"]
"""Stacked experts that torchao and compressed-tensors quantise, as operands of ``_moe_mlp_scaled``.

The values are those of their own dequantisation.
"""

import unittest

import torch
from torch.nn.utils._moe_checkpoints import from_compressed_tensors, from_torchao
from torch.testing._internal.common_utils import run_tests, TestCase


try:
    from packages import add_client_packages

    add_client_packages()
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
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


if __name__ == "__main__":
    run_tests()
