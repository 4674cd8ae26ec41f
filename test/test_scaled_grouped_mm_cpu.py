# Owner(s): ["module: linear algebra"]
"""F.scaled_grouped_mm on CPU against a float64 loop over the groups."""

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
GROUPS = ([64, 0, 96, 32], [128, 128, 128, 128], [0, 0, 0, 32], [32, 160, 0, 0])
all_groups = parametrize("sizes", GROUPS)


def offsets(sizes):
    return torch.tensor(sizes).cumsum(0).int()


def draw(recipe, *shape):
    """Numbers (..., R, K) with scales of a recipe, and their float64 values."""
    *batch, rows, depth = shape
    data = torch.randn(shape).to(E4M3)
    n, k = {
        ScalingType.RowWise: (1, depth),
        ScalingType.BlockWise1x32: (1, 32),
        ScalingType.BlockWise1x128: (1, 128),
        ScalingType.BlockWise128x128: (128, 128),
    }[recipe]
    size = (*batch, -(-rows // n), -(-depth // k))
    if recipe is ScalingType.BlockWise1x32:
        byte = torch.randint(120, 132, size, dtype=torch.uint8)
        scale, value = byte.view(E8M0), torch.pow(2.0, byte.double() - 127)
    else:
        scale = torch.rand(size) + 0.5
        value = scale.double()
    value = value.repeat_interleave(n, -2)[..., :rows, :]
    value = value.repeat_interleave(k, -1)[..., :depth]
    return data, scale, data.double() * value


def swizzle(scale):
    """(R, C) -> flat bytes, padded to (128, 4), in the order of SWIZZLE_32_4_4."""
    byte = scale.view(torch.uint8)
    rows, cols = byte.shape
    out = torch.zeros(-(-rows // 128) * 128, -(-cols // 4) * 4, dtype=torch.uint8)
    flat = torch.zeros(out.numel(), dtype=torch.uint8)
    tiles = out.shape[1] // 4
    for r in range(rows):
        for c in range(cols):
            tile = (r // 128) * tiles + c // 4
            flat[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = byte[r, c]
    return flat


class TestScaledGroupedMMCPU(TestCase):
    def check(self, actual, want):
        self.assertEqual(actual.dtype, torch.bfloat16)
        atol = 2**-16 * want.abs().max().item()  # where terms cancel
        self.assertEqual(actual.double(), want, rtol=2**-8, atol=atol)

    @all_groups
    @parametrize(
        "recipes",
        [
            (ScalingType.RowWise, ScalingType.RowWise),
            (ScalingType.BlockWise1x32, ScalingType.BlockWise1x32),
            (ScalingType.BlockWise1x128, ScalingType.BlockWise1x128),
            (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
            (ScalingType.BlockWise128x128, ScalingType.BlockWise128x128),
        ],
    )
    def test_rows(self, sizes, recipes):
        """2D x 3D: y = x W^T per expert. Rows after the last group are 0."""
        offs, tail = offsets(sizes), 16
        ends = [0, *offs.tolist()]
        a, scale_a, values_a = draw(recipes[0], ends[-1] + tail, 256)
        w, scale_w, values_w = draw(recipes[1], 4, 192, 256)
        actual = F.scaled_grouped_mm(
            a, w.mT, scale_a, recipes[0], scale_w, recipes[1], offs=offs
        )
        want = [
            values_a[b:e] @ values_w[g].T
            for g, (b, e) in enumerate(zip(ends, ends[1:], strict=False))
        ]
        self.check(actual, torch.cat([*want, torch.zeros(tail, 192).double()]))
        if recipes[0] is ScalingType.RowWise:
            first = torch._scaled_grouped_mm(
                a, w.mT, scale_a.flatten(), scale_w.flatten(1), offs
            )
            self.assertEqual(first, actual, rtol=0, atol=0)

    @all_groups
    @parametrize(
        "recipe",
        [ScalingType.RowWise, ScalingType.BlockWise1x32, ScalingType.BlockWise1x128],
    )
    def test_depth(self, sizes, recipe):
        """2D x 2D: dW = dy^T x per expert; an empty one gets 0."""
        if recipe is ScalingType.BlockWise1x128:
            sizes = [-(-s // 128) * 128 for s in sizes]
        offs = offsets(sizes)
        ends = [0, *offs.tolist()]
        g, scale_g, values_g = draw(recipe, 96, ends[-1])
        x, scale_x, values_x = draw(recipe, 64, ends[-1])
        if recipe is ScalingType.RowWise:  # per group
            scale_g, scale_x = torch.rand(4, 96) + 0.5, torch.rand(4, 64) + 0.5
        want = []
        for e, (b, end) in enumerate(zip(ends, ends[1:], strict=False)):
            left, right = values_g[:, b:end], values_x[:, b:end]
            if recipe is ScalingType.RowWise:
                left = g[:, b:end].double() * scale_g[e, :, None].double()
                right = x[:, b:end].double() * scale_x[e, :, None].double()
            want.append(left @ right.T)
        actual = F.scaled_grouped_mm(
            g, x.T, scale_g, recipe, scale_x, recipe, offs=offs
        )
        self.check(actual, torch.stack(want))

    @all_groups
    @parametrize("layout", ["rows", "depth"])
    def test_swizzled(self, sizes, layout):
        recipe, order = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
        offs = offsets(sizes)
        ends = [0, *offs.tolist()]
        spans = list(zip(ends, ends[1:], strict=False))
        if layout == "rows":
            a, scale_a, _ = draw(recipe, ends[-1], 256)
            b, scale_b, _ = draw(recipe, 4, 192, 256)
            tiles_a = [swizzle(scale_a[i:j]) for i, j in spans]
            tiles_b = torch.stack([swizzle(s) for s in scale_b])
        else:
            a, scale_a, _ = draw(recipe, 96, ends[-1])
            b, scale_b, _ = draw(recipe, 64, ends[-1])
            tiles_a = [swizzle(scale_a[:, i // 32 : j // 32]) for i, j in spans]
            tiles_b = torch.cat(
                [swizzle(scale_b[:, i // 32 : j // 32]) for i, j in spans]
            )
        spare = torch.zeros(2048, dtype=torch.uint8)  # buffers are bounds, not exact
        tiles_a = torch.cat([*tiles_a, spare]).view(E8M0)
        plain = F.scaled_grouped_mm(
            a, b.mT, scale_a, recipe, scale_b, recipe, offs=offs
        )
        actual = F.scaled_grouped_mm(
            a,
            b.mT,
            tiles_a,
            recipe,
            tiles_b.view(E8M0),
            recipe,
            order,
            order,
            offs=offs,
        )
        self.assertEqual(actual, plain, rtol=0, atol=0)

    @parametrize("layout", ["rows", "depth"])
    @parametrize("swizzled", [False, True])
    def test_fp4(self, layout, swizzled):
        """Two numbers per element. offs counts numbers, also if it divides the contraction."""
        recipe, order = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
        magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)

        def draw_fp4(*shape):
            codes = torch.randint(16, shape)
            byte = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
            scale = torch.randint(
                120, 132, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8
            )
            factor = torch.pow(2.0, scale.double() - 127).repeat_interleave(32, -1)
            values = magnitudes[codes & 7] * (1 - 2.0 * (codes >> 3)) * factor
            return byte.view(torch.float4_e2m1fn_x2), scale, values

        sizes = [40, 0, 56] if layout == "rows" else [64, 0, 96]
        offs = offsets(sizes)
        ends = [0, *offs.tolist()]
        spans = list(zip(ends, ends[1:], strict=False))
        if layout == "rows":
            a, scale_a, values_a = draw_fp4(96, 128)
            w, scale_w, values_w = draw_fp4(3, 64, 128)
            want = [values_a[i:j] @ values_w[g].T for g, (i, j) in enumerate(spans)]
            want = torch.cat(want)
            tiles_a = torch.cat([swizzle(scale_a[i:j]) for i, j in spans])
            tiles_w = torch.stack([swizzle(s) for s in scale_w])
        else:
            a, scale_a, values_a = draw_fp4(80, 160)
            w, scale_w, values_w = draw_fp4(48, 160)
            want = [values_a[:, i:j] @ values_w[:, i:j].T for i, j in spans]
            want = torch.stack(want)
            tiles_a, tiles_w = (
                torch.cat([swizzle(s[:, i // 32 : j // 32]) for i, j in spans])
                for s in (scale_a, scale_w)
            )
        orders = (order, order) if swizzled else ()
        if swizzled:
            scale_a, scale_w = tiles_a, tiles_w
        actual = F.scaled_grouped_mm(
            a, w.mT, scale_a.view(E8M0), recipe, scale_w.view(E8M0), recipe, *orders,
            offs=offs,
        )  # fmt: skip
        self.check(actual, want)

    def test_extreme_scales(self):
        a, scale_a, _ = draw(ScalingType.BlockWise1x32, 32, 64)
        w, scale_w, _ = draw(ScalingType.BlockWise1x32, 1, 32, 64)
        scale_a.view(torch.uint8)[3, 1] = 255
        scale_a.view(torch.uint8)[4] = 0
        y = F.scaled_grouped_mm(
            a, w.mT, scale_a, ScalingType.BlockWise1x32, scale_w,
            ScalingType.BlockWise1x32, offs=offsets([32]),
        )  # fmt: skip
        self.assertTrue(y[3].isnan().all())
        self.assertEqual(y[4].abs().max().item(), 0)
        self.assertTrue(y[5:].isfinite().all())

    def test_compile(self):
        recipe = ScalingType.BlockWise1x32
        a, scale_a, _ = draw(recipe, 64, 256)
        w, scale_w, _ = draw(recipe, 4, 192, 256)

        def f(a, w, scale_a, scale_w, offs):
            y = F.scaled_grouped_mm(
                a, w.mT, scale_a, recipe, scale_w, recipe, offs=offs
            )
            return y * 2

        args = (a, w, scale_a, scale_w, offsets([16, 16, 16, 16]))
        self.assertEqual(torch.compile(f, fullgraph=True)(*args), f(*args))

    def test_errors(self):
        recipe = ScalingType.BlockWise1x32
        a, scale_a, _ = draw(recipe, 64, 256)
        w, scale_w, _ = draw(recipe, 2, 192, 256)

        def call(a=a, w=w, scale_a=scale_a, recipe_a=recipe, offs=(32, 32), **kwargs):
            offs = offsets(offs)
            return F.scaled_grouped_mm(
                a, w.mT, scale_a, recipe_a, scale_w, recipe, offs=offs, **kwargs
            )

        for error, message, bad in (
            (ValueError, r"recipe_a on CPU must be one of", {"recipe_a": ScalingType.TensorWise}),
            (TypeError, "scale_a must have dtype float8_e8m0fnu, got float32", {"scale_a": scale_a.float()}),
            (ValueError, "scale_a must have 512 elements", {"scale_a": scale_a[:, 1:]}),
            (ValueError, r"offs must be non-decreasing in \[0, 64\], got 96", {"offs": (96, 0)}),
        ):  # fmt: skip
            with self.assertRaisesRegex(error, message):
                call(**bad)
        rows = ScalingType.RowWise
        a, scale_a, _ = draw(rows, 64, 256)
        w, scale_w, _ = draw(rows, 2, 192, 256)
        plain = (scale_a.flatten(), scale_w.flatten(1), offsets([32, 32]))
        wide = a.to(torch.float8_e5m2)
        for message, first, bad in (
            ("Bias tensor provided", a, {"bias": torch.ones(192)}),
            ("it must be torch.bfloat16", a, {"out_dtype": torch.float32}),
            ("E4M3 FP8 type but got mat_a.dtype=torch.float8_e5m2 and", wide, {}),
            ("Scale result tensor provided", a, {"scale_result": torch.ones(1)}),
        ):
            for device in ("cpu", "meta"):
                args = [t.to(device) for t in (first, w)]
                with self.assertRaisesRegex(RuntimeError, message):
                    torch._scaled_grouped_mm(
                        args[0], args[1].mT, *(t.to(device) for t in plain),
                        **{k: v.to(device) if k != "out_dtype" else v for k, v in bad.items()},
                    )  # fmt: skip
        x, scale_x, _ = draw(recipe, 64, 64)
        with self.assertRaisesRegex(ValueError, "offs must be multiples of 32"):
            F.scaled_grouped_mm(
                x, x.mT, scale_x, recipe, scale_x, recipe, offs=offsets([16, 48])
            )


instantiate_parametrized_tests(TestScaledGroupedMMCPU)

if __name__ == "__main__":
    run_tests()
