# Owner(s): ["module: nn"]
"""Quantised expert weights of others as operands: their values, exactly, and the op on them."""

import torch
import torch.nn.functional as F
from torch.nn.utils._moe_checkpoints import (
    from_compressed_tensors,
    from_fp8_blocks,
    from_mxfp4_blocks,
    from_torchao,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


E, D, H, T, K = 3, 256, 384, 9, 2
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Int8Tensor:
    """Attributes of torchao's."""

    def __init__(self, qdata, scale, zero_point=None):
        self.qdata, self.scale, self.zero_point = qdata, scale, zero_point


class Float8Tensor(Int8Tensor):
    pass


def fp8(*shape):
    return torch.randn(shape).mul_(8).to(torch.float8_e4m3fn)


def int8(*shape):
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def packed(numbers):
    """(E, N, K) in [-8, 7] as "pack-quantized" has them, eight in an int32."""
    shifts = torch.arange(8) * 4
    words = ((numbers.long() + 8).unflatten(-1, (-1, 8)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def scales(*shape, dtype=torch.float32):
    return ((torch.rand(shape) + 0.5) * 1e-3).to(dtype)


def form(name, N, K):
    """An operand and the float64 values that its format means."""
    exponents = torch.randint(115, 122, (E, N, K // 32), dtype=torch.uint8)
    factors = torch.pow(2.0, exponents.double() - 127)
    if name == "mxfp8":
        data = fp8(E, N, K)
        values = data.double() * factors.repeat_interleave(32, -1)
        return from_compressed_tensors(data, exponents), values
    if name.startswith("mxfp4"):
        blocks = torch.randint(256, (E, N, K // 32, 16), dtype=torch.uint8)
        table = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=torch.float64)
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
        values = (table[codes] * factors.unsqueeze(-1)).flatten(2)
        if name == "mxfp4_bytes":
            return from_compressed_tensors(blocks.flatten(2), exponents), values
        return from_mxfp4_blocks(blocks, exponents), values
    if name == "deepseek":
        data, scale = fp8(E, N, K), scales(E, -(-N // 128), -(-K // 128))
        wide = scale.repeat_interleave(128, 1)[:, :N].repeat_interleave(128, 2)
        return from_fp8_blocks(data, scale), data.double() * wide[..., :K].double()
    kind, _, groups = name.partition("_")
    size = K if groups in ("rows", "tensor") else int(groups)
    scale = scales(E, N, K // size, dtype=torch.bfloat16)
    if groups == "tensor":
        scale = scales(E, 1)
    if kind == "int4":
        data = torch.randint(-8, 8, (E, N, K))
        operand = from_compressed_tensors(packed(data), scale, weight_shape=(N, K))
    elif kind == "torchao":
        data, scale = int8(E, N, K), scale.float()
        operand = from_torchao(Int8Tensor(data, scale, torch.zeros(E, N, 1)))
    elif kind == "torchaofp8":
        data, scale = fp8(E, N, K), scale.float()
        operand = from_torchao(Float8Tensor(data, scale))
    else:
        data = {"int8": int8, "fp8": fp8}[kind](E, N, K)
        operand = from_compressed_tensors(data, scale)
    wide = scale.double().reshape(E, -1, scale.shape[-1]).repeat_interleave(size, -1)
    return operand, data.double() * wide


FORMS = (
    "mxfp4", "mxfp4_bytes", "mxfp8", "deepseek", "int4_32", "int4_64", "int4_128", "int8_rows",
    "int8_tensor", "int8_128", "fp8_rows", "fp8_tensor", "fp8_128", "torchao_rows", "torchaofp8_rows",
)  # fmt: skip


class TestMoeCheckpoints(TestCase):
    @parametrize("name", FORMS)
    def test_means_their_dequantisation(self, name):
        torch.manual_seed(0)
        w_in, in_values = form(name, 2 * H, D)
        w_out, out_values = form(name, D, H)
        self.assertEqual(w_in.recipe, w_out.recipe)
        ids, weights = F.moe_topk(torch.randn(T, E), K)
        row_slots, slot_rows, offs, _ = torch._moe_permutation(ids, E)
        x = torch.randn(T, D)
        actual, *_ = torch._moe_mlp_scaled(
            x, None, None, offs, weights, row_slots, slot_rows, None, None, None, [],
            [*w_in[:2]], [*w_out[:2]], [], recipe_a=[], recipe_w=[w_in.recipe],
            compute_preact=False,
        )  # fmt: skip
        wanted = F.moe_mlp(x.double(), ids, weights.double(), in_values, out_values)
        scale = wanted.abs().max().item()
        self.assertEqual(actual.double(), wanted, atol=2e-6 * scale, rtol=0)

    def test_whole_rows_of_int4_of_two_lengths(self):
        """128 is no multiple of 96: both weights of a call need blocks of 32."""
        words = [packed(torch.randint(-8, 8, (E, 32, size))) for size in (128, 96)]
        scale = torch.rand(E, 32, 1)
        recipes = [
            [
                from_compressed_tensors(
                    w, scale, weight_shape=(32, size), block=block
                ).recipe
                for w, size in zip(words, (128, 96))
            ]
            for block in (None, 32)
        ]
        self.assertNotEqual(*recipes[0])
        self.assertEqual(*recipes[1])

    @parametrize("name", FORMS)
    def test_every_number_is_theirs(self, name):
        torch.manual_seed(0)
        weight, values = form(name, D, D)
        # One unit row for each column and expert, and w_out that returns the hidden units.
        offs = torch.arange(1, E + 1).int() * D
        parts = [
            torch._moe_mlp_scaled(
                sign * torch.eye(D).repeat(E, 1), None, None, offs, None, None, None, None,
                None, None, [], [*weight[:2]], [*self._identity(name)], [],
                recipe_a=[], recipe_w=[weight.recipe], activation="relu",
                compute_preact=False,
            )[0]
            for sign in (1, -1)
        ]  # fmt: skip
        actual = (parts[0] - parts[1]).unflatten(0, (E, D)).transpose(1, 2)
        # Float32 holds code times scale but for the last bit.
        self.assertEqual(actual.double(), values, atol=0, rtol=2**-23)

    def _identity(self, name):
        eye = torch.eye(D).expand(E, D, D)
        if name == "mxfp8":
            ones = torch.full((E, D, D // 32), 127, dtype=torch.uint8)
            return from_compressed_tensors(eye.to(torch.float8_e4m3fn), ones)[:2]
        if name.startswith("mxfp4"):
            codes = (eye * 2).to(torch.uint8)  # code 2 is 1.0
            data = (codes[..., ::2] | codes[..., 1::2] << 4).unflatten(-1, (-1, 16))
            ones = torch.full((E, D, D // 32), 127, dtype=torch.uint8)
            return from_mxfp4_blocks(data.contiguous(), ones)[:2]
        if name == "deepseek":
            ones = torch.ones(E, D // 128, D // 128)
            return from_fp8_blocks(eye.to(torch.float8_e4m3fn), ones)[:2]
        kind, _, groups = name.partition("_")
        size = D if groups in ("rows", "tensor") else int(groups)
        ones = torch.ones(E, D, D // size)
        if kind == "int4":
            args = (packed(eye), ones)
            return from_compressed_tensors(*args, weight_shape=(D, D))[:2]
        dtype = torch.float8_e4m3fn if kind == "fp8" else torch.int8
        return from_compressed_tensors(eye.to(dtype), ones)[:2]

    def test_refused(self):
        data, ones = int8(E, 32, 64), torch.ones(E, 32, 1)
        words = packed(torch.zeros(E, 32, 64))
        exponents = ones.byte()
        # Packed along the rows; the last word of 12 rows is padded with 0, which means -8.
        zeros = packed(torch.zeros(E, 1, 32)).mT
        few = packed(torch.zeros(E, 1, 16)).mT.clone()
        few[:, 1] &= 0xFFFF
        from_compressed_tensors(
            words[:, :12].contiguous(),
            ones[:, :12],
            weight_shape=(12, 64),
            weight_zero_point=few,
        )
        shape = {"weight_shape": (32, 64)}
        columns = torch.arange(64).expand(E, 64)
        from_compressed_tensors(
            words,
            ones,
            **shape,
            weight_zero_point=zeros,
            weight_g_idx=-torch.ones_like(columns),
        )
        for message, call in (
            ("zero points must be 0", lambda: from_compressed_tensors(data, ones, weight_zero_point=ones)),
            ("zero points must be 0", lambda: from_compressed_tensors(words, ones, **shape, weight_zero_point=zeros * 0)),
            ("zero points must be 0", lambda: from_compressed_tensors(words, ones, **shape, weight_zero_point=zeros + 16)),
            ("weight_g_idx must be -1", lambda: from_compressed_tensors(words, ones, **shape, weight_g_idx=columns)),
            ("exponents in uint8, got", lambda: from_compressed_tensors(data.view(torch.uint8), ones)),
            ("exponents in uint8, got", lambda: from_compressed_tensors(fp8(E, 32, 64), exponents)),
            ("exponents in uint8, got", lambda: from_compressed_tensors(data, exponents)),
            ("floating point, got torch.int32", lambda: from_compressed_tensors(data, ones.int())),
            ("floating point, got torch.uint8", lambda: from_fp8_blocks(fp8(E, 32, 64), exponents[:, :1])),
            ("one for all, for each expert", lambda: from_compressed_tensors(int8(E, E, 64), ones[:1, :E])),
            ("zero points must be 0", lambda: from_torchao(Int8Tensor(data, ones, ones))),
            ("got Tensor; quantise its dequantize", lambda: from_torchao(ones)),
            ("pack 8 numbers of 4 bits", lambda: from_compressed_tensors(words, ones)),
            ("pack 8 numbers of 4 bits", lambda: from_compressed_tensors(words, ones, weight_shape=(32, 32))),
            ("weight_shape .N, K. of one expert", lambda: from_compressed_tensors(words, ones, weight_shape=(31, 64))),
            ("weight_shape .N, K. of one expert", lambda: from_compressed_tensors(words, ones, weight_shape=torch.tensor([[32, 64]] * E))),
            ("block must be 32 or 128", lambda: from_compressed_tensors(words, ones, weight_shape=(32, 64), block=64)),
            ("a multiple of 128, got 64", lambda: from_compressed_tensors(words, ones, weight_shape=(32, 64), block=128)),
            ("of whole rows or one of .*, got 32", lambda: from_compressed_tensors(data, torch.ones(E, 32, 2))),
            ("a multiple of 32, got 16", lambda: from_compressed_tensors(words, torch.ones(E, 32, 4), weight_shape=(32, 64))),
            ("groups that divide K = 64", lambda: from_compressed_tensors(data, torch.ones(E, 32, 3))),
            ("float8_e4m3fn, int8 or int4", lambda: from_compressed_tensors(data.float(), ones)),
            ("must be uint8", lambda: from_mxfp4_blocks(data, ones)),
            ("float8_e4m3fn, got", lambda: from_fp8_blocks(data, ones)),
            (r"must be \(3, 1, 1\)", lambda: from_fp8_blocks(fp8(E, 32, 64), ones)),
        ):  # fmt: skip
            with self.assertRaisesRegex(ValueError, message):
                call()


instantiate_parametrized_tests(TestMoeCheckpoints)

if __name__ == "__main__":
    run_tests()
