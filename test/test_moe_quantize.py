# Owner(s): ["module: nn"]

"""_moe_quantize: codes and scales, bit by bit against a reference without bit operations."""

import torch
from torch.nn.functional import ScalingType
from torch.testing._internal.common_moe import (
    BACKENDS,
    num_threads,
    parametrize_named,
    to_meta,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_quantized_reference import (
    dequantize_reference,
    LARGEST,
    moe_quantize_reference,
    RECIPES,
    scale_to_double,
    sqnr,
    swizzle_reference,
)


op = torch.ops.aten._moe_quantize.default
MX = ScalingType.BlockWise1x32
E4M3 = torch.float8_e4m3fn
BACKEND = parametrize("backend", list(BACKENDS))
RECIPE = parametrize_named("recipe", RECIPES)


def quantize(backend, x, recipe, **kwargs):
    return BACKENDS[backend](op, x, recipe.value, **kwargs)


def wild(*shape, dtype=torch.bfloat16):
    """Numbers over 60 binades, zeros of both signs, and a block of zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    low, high = (-12, 10) if dtype == torch.float16 else (-30, 30)
    x = x * torch.exp2(torch.randint(low, high, shape, generator=generator))
    x = torch.where(torch.rand(shape, generator=generator) < 0.05, -0.0, x).to(dtype)
    x.view(-1)[:128] = 0
    return x


class TestMoeQuantize(TestCase):
    def check(self, backend, x, recipe, **kwargs):
        data, scale = quantize(backend, x, recipe, **kwargs)
        expected_data, expected_scale = moe_quantize_reference(
            x, recipe.value, **kwargs
        )
        self.assertEqual(data.dtype, expected_data.dtype)
        self.assertEqual(data.view(torch.uint8), expected_data.view(torch.uint8))
        self.assertEqual(scale.dtype, expected_scale.dtype)
        if scale.dtype != torch.float32:
            scale, expected_scale = (
                s.view(torch.uint8) for s in (scale, expected_scale)
            )
        self.assertEqual(scale, expected_scale, rtol=0, atol=0)

    @BACKEND
    @RECIPE
    @parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_bits(self, backend, recipe, dtype):
        for shape in ((70, 300), (1, 32), (3, 130, 129)):
            x = wild(*shape, dtype=dtype) if len(shape) < 3 else wild(*shape)
            for dim in range(-2, 0):
                self.check(backend, x, recipe, dim=dim)
        self.check(backend, wild(5, 40, 6), recipe, dim=1)
        self.check(backend, wild(4, 64), recipe, dtype=torch.int8)
        self.check(backend, wild(64, 5), recipe, dtype=torch.int8, dim=0)

    @BACKEND
    @RECIPE
    def test_strides_and_empty(self, backend, recipe):
        self.check(backend, wild(40, 70).t(), recipe)
        self.check(backend, wild(40, 140)[:, ::2], recipe, dim=0)
        self.check(backend, wild(3, 40, 33).transpose(1, 2), recipe, dim=1)
        self.check(backend, torch.randn(1, 33).expand(5, 33), recipe)
        for shape in ((0, 64), (4, 0)):
            for dim in (0, 1):
                if recipe != ScalingType.BlockWise128x128:
                    self.check(backend, torch.zeros(shape), recipe, dim=dim)

    @BACKEND
    def test_every_amax(self, backend):
        """The exponent is exact for every bfloat16, including subnormals."""
        amax = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
        x = torch.zeros(len(amax), 32, dtype=torch.bfloat16)
        x[:, 7] = -amax
        self.check(backend, x, MX)
        data, scale = quantize(backend, x, MX)
        # Nothing saturates, and half the scale would be too small.
        number = data[:, 7].double().abs() * scale_to_double(scale)[:, 0]
        half = scale_to_double(scale)[:, 0] / 2
        inside = (half >= 2.0**-127) & (half < 2.0**126)
        self.assertTrue((amax.double() <= 448 * 2 * half).all())
        self.assertTrue((amax.double() > 448 * half)[inside].all())
        self.assertEqual(number[inside], amax.double()[inside], rtol=2**-4, atol=0)

    @BACKEND
    @parametrize("dtype", [E4M3, torch.int8])
    def test_amax_beside_a_step(self, backend, dtype):
        """The largest number times any power of two, and its float32 neighbours on both sides."""
        step = torch.exp2(torch.arange(-120.0, 120.0)) * LARGEST[dtype]
        bits = step[step.isfinite()].view(torch.int32)
        amax = torch.stack([bits - 1, bits, bits + 1], 1).view(torch.float32)
        x = torch.zeros(amax.numel(), 32)
        x[:, 7] = amax.flatten()
        self.check(backend, x, MX, dtype=dtype)
        scale = scale_to_double(quantize(backend, x, MX, dtype=dtype)[1])
        self.assertTrue((x.double().amax(1) <= LARGEST[dtype] * scale[:, 0]).all())

    @BACKEND
    @parametrize("dtype", [E4M3, torch.int8])
    def test_special_blocks(self, backend, dtype):
        x = torch.randn(5, 64)
        x[0, :32] = 0
        x[1, 3], x[2, 4], x[3, 5] = torch.inf, -torch.inf, torch.nan
        x[4, :] = 3.4e38
        data, scale = quantize(backend, x, MX, dtype=dtype)
        byte = scale.view(torch.uint8)
        self.assertEqual(byte[0, 0], 0)
        self.assertEqual(byte[1:4, 0].tolist(), [255] * 3)
        self.assertTrue((byte[:4, 1] < 255).all())
        nan = 0x7F if dtype == E4M3 else 0
        self.assertEqual(data.view(torch.uint8)[1:4, :32].unique().tolist(), [nan])
        self.assertTrue(data[4].double().abs().max() <= LARGEST[dtype])
        self.check(backend, x, MX, dtype=dtype)
        self.check(backend, x.t(), MX, dtype=dtype, dim=0)
        self.check(backend, x.t().contiguous(), MX, dtype=dtype, dim=0)

    @BACKEND
    @parametrize_named("recipe", [r for r in RECIPES if r.name != "BlockWise128x128"])
    def test_blocks_begin_with_experts(self, backend, recipe):
        x = wild(300, 70)
        for ends in ([0, 5, 5, 133, 300], [300], [0, 0, 0], [32, 64, 290]):
            offs = torch.tensor(ends, dtype=torch.int32)
            self.check(backend, x, recipe, dim=0, offs=offs)
            self.check(backend, x.t().contiguous().t(), recipe, dim=0, offs=offs)
        # NaN of an expert does not reach the rows that belong to none.
        for place in (2, 250):
            x[place] = torch.nan
            offs = torch.tensor([5, 280], dtype=torch.int32)
            self.check(backend, x, recipe, dim=0, offs=offs)
            data, _ = quantize(backend, x, recipe, dim=0, offs=offs)
            self.assertEqual(data[280:].double().abs().max(), 0)
        x = wild(300, 70)
        # An expert's codes do not depend on where it begins.
        part = quantize(backend, x[5:133], recipe, dim=0)[0]
        offs = torch.tensor([5, 133, 300], dtype=torch.int32)
        whole = quantize(backend, x, recipe, dim=0, offs=offs)[0]
        self.assertEqual(whole[5:133].view(torch.uint8), part.view(torch.uint8))

    @BACKEND
    def test_swizzle(self, backend):
        for rows, cols in ((1, 32), (130, 200), (256, 128)):
            x = wild(rows, cols)
            scale = quantize(backend, x, MX)[1]
            swizzled = quantize(backend, x, MX, swizzle=1)[1]
            expected = swizzle_reference(scale)
            self.assertEqual(swizzled.view(torch.uint8).flatten(), expected)
            self.assertEqual(swizzled.shape[0] % 128, 0)
            other = quantize(backend, x.t(), MX, swizzle=1, dim=0)[1]
            self.assertEqual(other.view(torch.uint8).flatten(), expected)
        x = wild(2, 40, 64)
        swizzled = quantize(backend, x, MX, swizzle=1)[1]
        expected = [swizzle_reference(quantize(backend, w, MX)[1]) for w in x]
        self.assertEqual(swizzled.view(torch.uint8), torch.stack(expected))

    @RECIPE
    def test_meta_is_what_runs(self, recipe):
        offs = torch.tensor([3, 20], dtype=torch.int32)
        calls = [
            ({}, wild(40, 70)),
            ({"dim": 0}, wild(40, 70)),
            ({"dim": 1}, wild(3, 40, 5)),
        ]
        if recipe != ScalingType.BlockWise128x128:
            calls.append(({"dim": 0, "offs": offs}, wild(20, 70)))
        if recipe == MX:
            calls += [({"swizzle": 1}, wild(40, 70)), ({"swizzle": 1}, wild(2, 40, 70))]
        for kwargs, x in calls:
            results = [quantize(b, x, recipe, **kwargs) for b in BACKENDS]
            meta = op(to_meta(x), recipe.value, **to_meta(kwargs))
            for result in results:
                for one, other in zip(result, meta, strict=True):
                    self.assertEqual(one.dtype, other.dtype)
                    self.assertEqual(one.shape, other.shape)
                    self.assertEqual(one.stride(), other.stride())

    def test_threads_change_nothing(self):
        x = wild(300, 700)
        for recipe in RECIPES:
            for dim in (0, 1):
                results = []
                for threads in (1, 3):
                    with num_threads(threads):
                        results.append(op(x, recipe.value, dim=dim))
                for one, other in zip(*results, strict=True):
                    self.assertTrue(
                        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
                        if one.dtype != torch.float32
                        else torch.equal(one, other)
                    )

    @parametrize("recipe", [MX, ScalingType.BlockWise1x128])
    def test_rows_become_columns_without_loss(self, recipe):
        """Columns made from quantised rows are as accurate as others. Training relies on this."""
        torch.manual_seed(0)
        x = torch.randn(1024, 256) * torch.exp(2 * torch.randn(1024, 1))
        code = recipe.value
        rows = dequantize_reference(*op(x, code), code)
        again = dequantize_reference(*op(rows.float(), code, dim=0), code, dim=0)
        direct = dequantize_reference(*op(x, code, dim=0), code, dim=0)
        self.assertGreater(sqnr(x, again), sqnr(x, direct) - 0.1)
        # Scales that are not powers of two round once more.
        rows = self.float_scales(x, 1)
        direct = sqnr(x, self.float_scales(x, 0))
        self.assertLess(sqnr(x, self.float_scales(rows, 0)), direct - 1)

    @staticmethod
    def float_scales(x, dim):
        blocks = x.unflatten(dim, (-1, 32))
        scale = blocks.abs().amax(dim + 1, keepdim=True) / 448
        return ((blocks / scale).to(E4M3).float() * scale).flatten(dim, dim + 1)

    def test_errors_are_the_same_everywhere(self):
        x, offs = torch.randn(4, 64), torch.tensor([2, 4], dtype=torch.int32)
        calls = [
            (
                TypeError,
                "self must have dtype float32, bfloat16 or float16, got int64",
                (x.long(), 3),
                {},
            ),
            (
                ValueError,
                r"recipe must be one of 1 \(RowWise\), 3 \(BlockWise1x32\), .*, got 0",
                (x, 0),
                {},
            ),
            (
                ValueError,
                "self must have at least 2 dimensions with recipe BlockWise128x128",
                (x[0], 5),
                {},
            ),
            (IndexError, r"dim must be in \[-2, 2\), got 2", (x, 3), {"dim": 2}),
            (
                TypeError,
                "dtype must be float8_e4m3fn or int8, got float8_e5m2",
                (x, 3),
                {"dtype": torch.float8_e5m2},
            ),
            (
                ValueError,
                "swizzle must be 0 .* got 1 with recipe RowWise",
                (x, 1),
                {"swizzle": 1},
            ),
            (
                TypeError,
                "offs must have dtype int32, got int64",
                (x, 3),
                {"offs": offs.long(), "dim": 0},
            ),
            (
                ValueError,
                "offs needs a self of 2 dimensions, dim=0",
                (x, 3),
                {"offs": offs},
            ),
            (
                ValueError,
                "offs must have at least 1 element",
                (x, 3),
                {"offs": offs[:0], "dim": 0},
            ),
        ]
        for error, text, args, kwargs in calls:
            for backend in BACKENDS.values():
                with self.assertRaisesRegex(error, f"_moe_quantize: {text}"):
                    backend(op, *args, **kwargs)
            with self.assertRaisesRegex(error, f"_moe_quantize: {text}"):
                op(*to_meta(args), **to_meta(kwargs))
        with self.assertRaisesRegex(
            ValueError, r"offs must be non-decreasing in \[0, R\]"
        ):
            op(x, 3, dim=0, offs=offs.flip(0))

    def test_no_gradient(self):
        data, scale = torch._moe_quantize(torch.randn(2, 32, requires_grad=True), 3)
        self.assertFalse(data.requires_grad or scale.requires_grad)

    @parametrize("dynamic", [False, True])
    def test_compile(self, dynamic):
        def f(x):
            data, scale = torch._moe_quantize(x, 3, dim=0)
            return data.view(torch.uint8), scale.view(torch.uint8)

        compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
        for rows in (40, 64):
            x = wild(rows, 48)
            self.assertEqual(compiled(x), f(x))


instantiate_parametrized_tests(TestMoeQuantize)

if __name__ == "__main__":
    run_tests()
