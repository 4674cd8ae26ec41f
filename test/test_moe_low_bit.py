# Owner(s): ["module: nn"]
"""Inference of _moe_mlp_scaled with weights of 8 and 4 bits on CPU, in every layout."""

import dataclasses

from test_moe_mlp_kernels import check_in_subprocess, skip_without_build

import torch
from torch.nn.functional import ScalingType
from torch.nn.utils._moe_low_bit import pack_panels
from torch.profiler import profile
from torch.testing._internal.common_moe import (
    all_cases,
    BACKENDS,
    call_composite,
    num_threads,
    parametrize_named,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_generators import MoeCase
from torch.testing._internal.moe_low_bit import low_bit_format, LOW_BIT_FORMATS
from torch.testing._internal.moe_quantized_reference import (
    quantized_values,
    swizzle_reference,
)
from torch.testing._internal.moe_reference import (
    ACTIVATIONS,
    apply_activation,
    check_close,
    GATED_ACTIVATIONS,
    moe_mlp_reference,
    moe_mlp_unfused,
)


E8M0 = torch.float8_e8m0fnu
_op = torch.ops.aten._moe_mlp_scaled.default
_moe_mlp = torch.ops.aten._moe_mlp.default

all_formats = parametrize_named("fmt", LOW_BIT_FORMATS)
all_layouts = parametrize("panels", [False, True])


class Layer:
    """Operands of a case with its weights in a format, and what they mean."""

    def __init__(self, case, fmt, dtype, *, bias=False, w_up=False, **activation):
        self.fmt, self.kwargs = fmt, activation
        name = activation.get("activation", "swiglu")
        generator = torch.Generator().manual_seed(case.seed + 7)
        o = case.operands(dtype, activation=name, bias=bias)
        gates = 2 if name in GATED_ACTIVATIONS and not w_up else 1
        E, D, F = case.num_experts, case.dim, case.hidden
        self.w_in = fmt.draw(E, gates * F, D, generator)
        self.w_out = fmt.draw(E, D, F, generator)
        self.w_up = fmt.draw(E, F, D, generator) if w_up else None
        self.rows = (o.offs, o.topk_weights, o.row_slots, o.slot_rows, o.b_in, o.b_out)
        self.input = o.input

    def int8_rows(self, input=None):
        input = self.input if input is None else input
        recipe = self.fmt.scaling.value
        return torch._moe_quantize(input, recipe, dtype=torch.int8)

    def run(
        self, *, panels=False, input=None, rows=None, int8=False, call=_op, **kwargs
    ):
        """``int8``: rows in int8, or codes and scales of such rows."""
        lists = [w.pair() if w else [] for w in (self.w_in, self.w_out, self.w_up)]
        if panels:
            lists = [list(pack_panels(*pair)) if pair else [] for pair in lists]
        input = self.input if input is None else input
        offs, s, row_slots, slot_rows, b_in, b_out = rows or self.rows
        recipe = self.fmt.scaling.value
        scaled = self.int8_rows(input) if int8 is True else int8 or ()
        kwargs = {"compute_preact": False, **self.kwargs, **kwargs}
        return call(
            input, None, None, offs, s, row_slots, slot_rows, b_in, b_out, None,
            list(scaled), *lists,
            recipe_a=[recipe] if int8 else [],
            recipe_w=[recipe],
            swizzle_w=[2] if panels else [],
            **kwargs,
        )[0]  # fmt: skip

    def plain_args(self, dtype):
        """Arguments of _moe_mlp, with the values of the weights rounded to ``dtype``."""
        offs, s, row_slots, slot_rows, b_in, b_out = self.rows
        weights = (self.w_in, self.w_out, self.w_up)
        w_in, w_out, w_up = (w.values.to(dtype) if w else None for w in weights)
        return self.input, w_in, w_out, offs, s, row_slots, slot_rows, b_in, b_out, w_up

    def check(self, actual, name):
        args = self.plain_args(torch.float64)
        dtype = self.input.dtype
        reference, _ = moe_mlp_reference(*args, **self.kwargs)
        unfused, _ = moe_mlp_unfused(*self.plain_args(dtype), **self.kwargs)
        check_close(actual, reference, unfused, dtype, name)


def shape_of(fmt, dim=96, hidden=64, **kwargs):
    """A case of a shape that the blocks of fmt and of panels cut as they like."""
    return MoeCase("shape", dim=dim, hidden=hidden, **kwargs)


class TestMoeLowBit(TestCase):
    @all_formats
    @parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @parametrize("dim,hidden", [(96, 64), (160, 48), (256, 144), (34, 22)])
    def test_float64_loop(self, fmt, dtype, dim, hidden):
        for tokens in (1, 5, 40):
            layer = Layer(shape_of(fmt, dim, hidden, num_tokens=tokens), fmt, dtype)
            actual = layer.run()
            layer.check(actual, f"{tokens} tokens")
            if dim % 16 == 0:
                self.assertEqual(layer.run(panels=True), actual, rtol=0, atol=0)

    @parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @parametrize("dim,hidden", [(8, 65), (96, 100), (264, 65)])
    def test_lines_across_squares(self, dtype, dim, hidden):
        """Up begins at any row of a square of scales, which may lie side by side along the rows."""
        fmt = low_bit_format("fp8_128x128")
        for tokens in (1, 2, 4, 40):
            layer = Layer(shape_of(fmt, dim, hidden, num_tokens=tokens), fmt, dtype)
            want = layer.run()
            layer.check(want, f"{tokens} tokens")
            scale = layer.w_in.scale.mT.contiguous().mT
            layer.w_in = dataclasses.replace(layer.w_in, scale=scale)
            self.assertEqual(layer.run(), want, rtol=0, atol=0)

    @all_cases
    @parametrize("name", ["fp8_128x128", "mxfp4", "int8_rowwise"])
    def test_routing(self, case, name):
        """Empty experts, sentinels, tails, no tokens; rows and depths that are not even by blocks."""
        fmt = low_bit_format(name)
        if name == "mxfp4" and case.name == "ragged":
            case = MoeCase("even", num_tokens=11, dim=14, hidden=6, num_experts=5)
        layer = Layer(case, fmt, torch.bfloat16, bias=True)
        layer.check(layer.run(), case.name)

    @all_formats
    @parametrize("tokens", [2, 60])
    def test_no_hidden_units(self, fmt, tokens):
        """A sum over nothing is 0, and there may be no scale to read."""
        layer = Layer(shape_of(fmt, 128, 128, num_tokens=tokens), fmt, torch.bfloat16)
        in_blocks = fmt.scaling is not ScalingType.RowWise

        def cut(scale, dim):
            return scale.narrow(dim, 0, 0) if scale.dim() == 3 else scale

        layer.w_in = dataclasses.replace(
            layer.w_in, data=layer.w_in.data[:, :0], scale=cut(layer.w_in.scale, 1)
        )
        layer.w_out = dataclasses.replace(
            layer.w_out,
            data=layer.w_out.data[:, :, :0],
            scale=cut(layer.w_out.scale, 2) if in_blocks else layer.w_out.scale,
        )
        for int8 in (False, True) if fmt.takes_int8_rows else (False,):
            actual = layer.run(int8=int8)
            self.assertEqual(actual, torch.zeros_like(layer.input), rtol=0, atol=0)

    @parametrize("activation", list(ACTIVATIONS))
    @parametrize("name", ["fp8_rowwise", "mxfp4"])
    def test_activations(self, activation, name):
        fmt = low_bit_format(name)
        kinds = [{}]
        if activation in GATED_ACTIVATIONS:
            kinds += [{"gate_interleaved": True}, {"w_up": True}]
        for kind in kinds:
            layer = Layer(
                shape_of(fmt),
                fmt,
                torch.bfloat16,
                bias=True,
                activation=activation,
                **kind,
            )
            actual = layer.run()
            layer.check(actual, str(kind))
            self.assertEqual(layer.run(panels=True), actual, rtol=0, atol=0)

    @all_layouts
    def test_mxfp8_has_the_bits_of_bfloat16(self, panels):
        fmt = low_bit_format("mxfp8")
        for tokens in (1, 2, 7, 60):
            case = shape_of(fmt, 288, 96, num_tokens=tokens)
            layer = Layer(case, fmt, torch.bfloat16, bias=True)
            dense, _ = _moe_mlp(*layer.plain_args(torch.bfloat16))
            self.assertEqual(layer.run(panels=panels), dense, rtol=0, atol=0)

    @all_formats
    @all_layouts
    @parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_token_alone(self, fmt, panels, dtype):
        """A token's bits depend neither on the other tokens nor on the threads."""
        case = shape_of(fmt, 384, 160, num_tokens=70)
        layer, experts = Layer(case, fmt, dtype), case.topk_indices()
        self.check_token_alone(layer, experts, panels, int8=False)
        if fmt.takes_int8_rows:
            self.check_token_alone(layer, experts, panels, int8=True)

    def check_token_alone(self, layer, experts, panels, int8):
        whole = layer.run(panels=panels, int8=int8)
        with num_threads(1):
            one = layer.run(panels=panels, int8=int8)
        self.assertEqual(one, whole, rtol=0, atol=0)
        s = layer.rows[1]
        for t in (0, 33, 69):
            row_slots, slots, offs, _ = torch._moe_permutation(experts[t : t + 1], 4)
            rows = (offs, s[t : t + 1], row_slots, slots, None, None)
            alone = layer.run(
                panels=panels, int8=int8, input=layer.input[t : t + 1], rows=rows
            )
            self.assertEqual(alone[0], whole[t], rtol=0, atol=0)
        for value in (0.0, float("nan")):
            input = layer.input.clone()
            input[5, :128] = input[6] = value
            others = layer.run(panels=panels, int8=int8, input=input)
            for t in range(len(whole)):
                if t not in (5, 6):
                    self.assertEqual(others[t], whole[t], rtol=0, atol=0)

    @parametrize(
        "name", ["fp8_tensorwise", "mxfp8", "int8_rowwise", "mxfp4", "int4_1x32"]
    )
    @all_layouts
    @parametrize("tokens", [1, 12])
    def test_every_code(self, name, panels, tokens):
        """W_in holds every byte in every line and place of a word; NaN stays in its line."""
        fmt = low_bit_format(name)
        hidden, dim = 16, 512 if fmt.bits >= 8 else 1024
        case = MoeCase("codes", tokens, dim, hidden, num_experts=1, top_k=1)
        layer = Layer(case, fmt, torch.bfloat16, activation="relu")
        lines = [torch.arange(512, dtype=torch.uint8).roll(i) for i in range(hidden)]
        data = torch.stack(lines)[None].view(fmt.data)
        values = self.values(fmt, data)
        is_nan = values.isnan()
        for with_nan in {False, is_nan.any().item()}:
            scale = torch.ones(layer.w_in.scale.shape).to(layer.w_in.scale.dtype)
            kept = data.view(torch.uint8).clone()
            if not with_nan:
                kept[kept & 0x7F == 0x7F] = 5 if is_nan.any() else 0x7F
            else:
                kept[:, 1:][kept[:, 1:] & 0x7F == 0x7F] = 5
            kept = kept.view(fmt.data)
            layer.w_in = layer.w_in.__class__(kept, scale, self.values(fmt, kept))
            actual = layer.run(panels=panels)
            if with_nan:
                self.assertTrue(actual.isnan().all())
            else:
                layer.check(actual, name)

    @staticmethod
    def values(fmt, data):
        if fmt.data is torch.float8_e4m3fn or fmt.data is torch.int8:
            return data.double()
        byte = data.view(torch.uint8)
        codes = torch.stack([byte & 15, byte >> 4], -1).flatten(-2).long()
        if fmt.data is torch.uint8:
            return (codes - 8).double()
        magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        return magnitude[codes & 7] * (1 - 2.0 * (codes >> 3))

    @parametrize("name", ["mxfp8", "mxfp4"])
    @all_layouts
    @parametrize("tokens", [1, 30])
    def test_extreme_scales(self, name, panels, tokens):
        """Byte 255 is NaN; the smallest and the largest scales are powers of two like others."""
        fmt = low_bit_format(name)
        case = MoeCase(
            "scales", dim=64, hidden=32, num_tokens=tokens, num_experts=1, top_k=1
        )
        for byte in (0, 1, 126, 244, 245, 246, 250, 255):
            layer = Layer(case, fmt, torch.bfloat16, activation="relu")
            layer.w_in.scale.view(torch.uint8)[:, 3, 1] = byte
            w = layer.w_in.values
            old = layer.w_in.scale.view(torch.uint8)
            block = self.values(fmt, layer.w_in.data)[:, 3, 32:]
            factor = 2.0 ** (byte - 127) if byte < 255 else float("nan")
            w[:, 3, 32:] = block * factor
            del old
            x = layer.input.clone()
            x[:, 32:] *= 2.0**-100 if byte > 200 else 1.0
            actual = layer.run(panels=panels, input=x)
            if byte == 255:
                self.assertTrue(actual.isnan().all())
                continue
            layer.input = x
            layer.check(actual, f"byte {byte}")

    def check_flushed(self, layer, panels):
        want = layer.run(panels=panels)
        self.assertGreater(want.abs().max().item(), 0)
        if not torch.set_flush_denormal(True):
            self.skipTest("this CPU cannot flush denormal numbers")
        try:
            actual = layer.run(panels=panels)
        finally:
            torch.set_flush_denormal(False)
        self.assertEqual(actual, want, rtol=0, atol=0)

    @parametrize("name", ["fp8_rowwise", "fp8_128x128", "mxfp8"])
    @all_layouts
    @parametrize("tokens", [1, 30])
    def test_flush_denormal(self, name, panels, tokens):
        """Codes without a leading one count, whatever torch.set_flush_denormal says."""
        fmt = low_bit_format(name)
        case = shape_of(fmt, 128, 64, num_tokens=tokens)
        layer = Layer(case, fmt, torch.bfloat16)
        data = torch.randint(1, 8, layer.w_in.data.shape, dtype=torch.uint8)
        layer.w_in = dataclasses.replace(layer.w_in, data=data.view(fmt.data))
        self.check_flushed(layer, panels)

    @parametrize("name", ["mxfp8", "mxfp4"])
    @parametrize("dtype", [torch.float32, torch.bfloat16])
    @all_layouts
    @parametrize("tokens", [1, 30])
    def test_flush_denormal_scales(self, name, dtype, panels, tokens):
        """The scale 2^-127 is a denormal number, but its products with codes are not."""
        fmt = low_bit_format(name)
        case = shape_of(fmt, 128, 64, num_tokens=tokens)
        layer = Layer(case, fmt, dtype, activation="relu")
        layer.w_in.data.view(torch.uint8).fill_(0x77)  # 240 in mxfp8, 6 in mxfp4
        layer.w_in.scale.view(torch.uint8).zero_()
        layer.input = torch.full_like(layer.input, 2.0**100)
        self.check_flushed(layer, panels)

    @parametrize_named(
        "fmt",
        [
            f
            for f in LOW_BIT_FORMATS
            if f.takes_int8_rows and f.scaling is not ScalingType.BlockWise1x32
        ],
    )
    @parametrize("tokens", [1, 50])
    @parametrize("what", ["scale", "code"])
    def test_int8_rows_of_others(self, fmt, tokens, what):
        """Scales that are no powers of two, or the code -128, are not rounded again."""
        layer = Layer(shape_of(fmt, 128, 128, num_tokens=tokens), fmt, torch.float32)
        codes, scales = layer.int8_rows()
        if what == "scale":
            scales[-1] *= 1.3
        else:
            codes[-1, 0], scales[-1] = -128, scales[-1].max()
        actual = layer.run(int8=(codes, scales))
        composite = layer.run(
            int8=(codes, scales), call=lambda *a, **k: call_composite(_op, *a, **k)
        )
        error = (actual - composite).norm() / composite.norm()
        self.assertLess(error.item(), 1e-5)

    @parametrize_named("fmt", [f for f in LOW_BIT_FORMATS if f.takes_int8_rows])
    @all_layouts
    @parametrize("tokens", [1, 3, 8, 50])
    def test_int8_rows(self, fmt, panels, tokens):
        layer = Layer(shape_of(fmt, 320, 96, num_tokens=tokens), fmt, torch.bfloat16)
        actual = layer.run(int8=True, panels=panels)

        def rounded(x):
            recipe = fmt.scaling.value
            return quantized_values(x.bfloat16(), recipe, dtype=torch.int8)

        offs, s, row_slots, slot_rows, *_ = layer.rows
        x = rounded(layer.input)
        want = torch.zeros_like(x)
        start = 0
        for e, end in enumerate(offs.tolist()):
            for r in range(start, end):
                slot = row_slots[r].item()
                h = layer.w_in.values[e] @ x[slot // 2]
                a = rounded(apply_activation(h.bfloat16()[None], "swiglu"))
                o = layer.w_out.values[e] @ a[0]
                want[slot // 2] += (s.flatten()[slot].double() * o).bfloat16()
            start = end
        error = (actual.double() - want).square().sum() / want.square().sum()
        self.assertLess(error.item(), 10**-3.5)  # a few codes of A round the other way
        composite = layer.run(
            int8=True, panels=panels, call=lambda *a, **k: call_composite(_op, *a, **k)
        )
        error = (composite.double() - want).square().sum() / want.square().sum()
        self.assertLess(error.item(), 10**-3.5)
        dense = layer.run()
        error = (
            actual.double() - dense.double()
        ).square().sum() / dense.double().square().sum()
        self.assertLess(error.item(), 10**-3)

    @all_formats
    def test_composite_reads_panels(self, fmt):
        layer = Layer(shape_of(fmt, 128, 160), fmt, torch.bfloat16)

        def composite(*args, **kwargs):
            return call_composite(_op, *args, **kwargs)

        plain = layer.run(call=composite)
        self.assertEqual(layer.run(call=composite, panels=True), plain, rtol=0, atol=0)

    @parametrize("name", ["mxfp8", "mxfp4"])
    @parametrize("backend", list(BACKENDS))
    def test_swizzled_scales(self, name, backend):
        fmt = low_bit_format(name)
        layer = Layer(shape_of(fmt, 128, 160), fmt, torch.bfloat16)

        def swizzled(*args, **kwargs):
            lists = [
                [data, torch.stack(list(map(swizzle_reference, scale)))]
                for data, scale in args[11:13]
            ]
            lists = [[data, scale.view(E8M0)] for data, scale in lists]
            args = (*args[:11], *lists, *args[13:])
            return BACKENDS[backend](_op, *args, **{**kwargs, "swizzle_w": [1]})

        layer.check(layer.run(call=swizzled), name)

    @all_formats
    def test_no_copy_of_weights(self, fmt):
        """Weights are decoded where they are multiplied, never as a whole."""
        layer = Layer(
            shape_of(fmt, 512, 256, num_tokens=1, num_experts=8), fmt, torch.bfloat16
        )
        layer.run()
        with profile(profile_memory=True) as run:
            layer.run()
        # Names of memory events differ by version: what counts is what was allocated at all.
        allocated = sum(max(0, e.cpu_memory_usage) for e in run.events())
        self.assertLess(allocated, layer.w_in.data.nbytes // 2)

    def test_strided_weights(self):
        fmt = low_bit_format("fp8_rowwise")
        layer = Layer(shape_of(fmt), fmt, torch.bfloat16)
        want = layer.run()
        for change in (
            lambda t: t.mT.contiguous().mT,
            lambda t: torch.cat([t, t], 2)[..., : t.shape[2]],
            lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
        ):
            moved = Layer(shape_of(fmt), fmt, torch.bfloat16)
            as_bytes = moved.w_in.data.view(torch.uint8)
            data = change(as_bytes).view(torch.float8_e4m3fn)
            moved.w_in = moved.w_in.__class__(data, moved.w_in.scale, moved.w_in.values)
            self.assertEqual(moved.run(), want, rtol=0, atol=0)

    def test_errors(self):
        fmt = low_bit_format("mxfp4")
        layer = Layer(shape_of(fmt), fmt, torch.bfloat16)
        with self.assertRaisesRegex(ValueError, r"swizzle_w must be .*got \[3\]"):
            layer.run(call=lambda *a, **k: _op(*a, **{**k, "swizzle_w": [3]}))
        odd = Layer(shape_of(fmt, 96, 40), fmt, torch.bfloat16, activation="relu")
        with self.assertRaisesRegex(ValueError, "N a multiple of 16 and K of 8"):
            odd.run(call=lambda *a, **k: _op(*a, **{**k, "swizzle_w": [2]}))
        with self.assertRaisesRegex(
            ValueError, "multiples of 32 with input_scaled in int8"
        ):
            odd.run(int8=True)
        wide = Layer(shape_of(fmt), low_bit_format("mxfp8"), torch.bfloat16)
        with self.assertRaisesRegex(
            TypeError, "got int8 with w_in_scaled in float8_e4m3fn"
        ):
            wide.run(int8=True)
        with self.assertRaisesRegex(ValueError, r"data must be \(E, N, K\) with N"):
            pack_panels(torch.zeros(1, 8, 8, dtype=torch.int8), torch.ones(1, 8, 1))
        with self.assertRaisesRegex(ValueError, "data must have dtype"):
            pack_panels(torch.zeros(1, 16, 8), torch.ones(1, 16, 1))

    @parametrize("capability", ["avx2", "default"])
    def test_other_builds(self, capability):
        """The kernel that is compiled for CPUs with fewer instructions."""
        # Without a kernel of that capability _moe_mlp_scaled runs its composite.
        skip_without_build(self, capability)
        tests = "float64_loop and dim_96 or int8_rows or extreme_scales and tokens_30"
        check_in_subprocess(self, __file__, tests, ATEN_CPU_CAPABILITY=capability)


instantiate_parametrized_tests(TestMoeLowBit)

if __name__ == "__main__":
    run_tests()
