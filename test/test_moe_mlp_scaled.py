# Owner(s): ["module: nn"]

"""_moe_mlp_scaled and its backward, against a loop over experts on quantised operands in float64."""

import dataclasses

import torch
from torch.testing._internal.common_moe import (
    all_cases,
    BACKENDS,
    fill_uninitialized_memory,
    nbytes,
    num_threads,
    saved_for_backward,
    slow_subtest,
    to_meta,
    with_backward,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_generators import (
    get_case,
    MoeCase,
    one_token_with_preact,
)
from torch.testing._internal.moe_quantized_reference import (
    apart_from_limit,
    CODES,
    dequantize_reference,
    moe_quantize_reference,
    MX,
    ScaledMlp,
    sqnr,
    SQUARE,
)
from torch.testing._internal.moe_reference import (
    ACTIVATIONS,
    check_close,
    check_gradients,
    GATED_ACTIVATIONS,
    moe_mlp_backward_reference,
    moe_mlp_reference,
    MoeMlpGrads,
)


op, backward_op = with_backward("_moe_mlp_scaled")
E4M3 = torch.float8_e4m3fn
all_backends = parametrize("backend", list(BACKENDS))
all_recipes = parametrize("recipe", list(CODES))


def recipe_args(recipe):
    a, w = CODES[recipe]
    return {"recipe_a": [a], "recipe_w": [w]}


def scaled_args(ops, *, w_in=(), w_out=(), w_up=(), x=()):
    """The tensors of ``_moe_mlp_scaled``, without and with the lists."""
    return (*ops.args(), list(x), list(w_in), list(w_out), list(w_up))


def run_both(backend, ops, lists=None, mask=None, compute_preact=True, **kwargs):
    """output, what the forward keeps, and the gradients."""
    run = BACKENDS[backend]
    args = scaled_args(ops, **(lists or {}))
    with fill_uninitialized_memory():
        output, *saved = run(op, *args, compute_preact=compute_preact, **kwargs)
        if mask is None:
            mask = [x is not None for x in ops.differentiable()]
        grads = run(backward_op, ops.grad_out, *args[1:], *saved, mask, **kwargs)
    return output, saved, MoeMlpGrads(*grads)


class TestMoeMlpScaled(TestCase):
    def check(
        self, ops, recipe, backend="native", preact_dtype=E4M3, hp_wgrad=False, **kwargs
    ):
        a, w = CODES[recipe]
        output, saved, grads = run_both(
            backend,
            ops,
            preact_dtype=preact_dtype,
            hp_wgrad=hp_wgrad,
            **recipe_args(recipe),
            **kwargs,
        )
        dtype = ops.input.dtype
        product = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        options = {"preact_dtype": preact_dtype, "hp_wgrad": hp_wgrad, **kwargs}
        exact = ScaledMlp(ops, a, w, **options)
        yardstick = ScaledMlp(ops, a, w, dtype=product, **options)
        self.assertEqual(output.dtype, dtype)
        check_close(output, exact.forward()[0], yardstick.forward()[0], dtype, "output")
        for operand, grad in zip(ops.differentiable(), grads, strict=True):
            if operand is not None:
                self.assertEqual(grad.dtype, operand.dtype)
        check_gradients(grads, exact.backward(), yardstick.backward(), dtype)
        return output, saved, grads

    @all_backends
    @all_recipes
    @all_cases
    def test_cases(self, backend, recipe, case):
        self.check(case.operands(torch.bfloat16, bias=True), recipe, backend)

    @all_backends
    @all_recipes
    @parametrize(
        "dtype",
        [
            torch.bfloat16,
            slow_subtest(torch.float32, name="float32"),
            slow_subtest(torch.float16, name="float16"),
        ],
    )
    def test_larger(self, backend, recipe, dtype):
        case = MoeCase("larger", num_tokens=150, dim=96, hidden=160, num_experts=3)
        self.check(case.operands(dtype), recipe, backend)

    @all_backends
    @parametrize(
        "activation,interleaved",
        [(name, False) for name in ACTIVATIONS]
        + [(name, True) for name in GATED_ACTIVATIONS],
    )
    def test_activations(self, backend, activation, interleaved):
        case = MoeCase("act", num_tokens=40, dim=64, hidden=64)
        ops = case.operands(torch.bfloat16, activation=activation, bias=True)
        self.check(
            ops,
            "mxfp8",
            backend,
            activation=activation,
            **({"gate_interleaved": True} if interleaved else {}),
        )

    @all_backends
    @all_recipes
    def test_w_up(self, backend, recipe):
        case = MoeCase("w_up", num_tokens=40, dim=64, hidden=128)
        ops = case.operands(torch.bfloat16, bias=True)
        apart = self.check(ops.split_gate(), recipe, backend)
        together = self.check(ops, recipe, backend)
        # Each half consists of whole blocks, so the operands and the bits are the same.
        self.assertEqual(apart[0], together[0], rtol=0, atol=0)
        # Otherwise the blocks of dH begin anew in each half.
        for case in (get_case("ragged"), MoeCase("part", dim=32, hidden=80)):
            self.check(case.operands(torch.bfloat16).split_gate(), recipe, backend)

    @all_backends
    @parametrize("limit,alpha", [(1.5, None), (2.0, 1.3)])
    def test_limit(self, backend, limit, alpha):
        name = "swiglu_oai" if alpha else "swiglu"
        ops = MoeCase("limit", dim=64, hidden=64).operands(torch.bfloat16)
        kwargs = {"limit": limit, **({"alpha": alpha} if alpha else {})}
        self.check(ops, "mxfp8", backend, activation=name, **kwargs)

    @all_backends
    @parametrize("interleaved", [False, True])
    @parametrize("preact_dtype", [E4M3, torch.int8])
    @parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_saved_values_stay_on_their_side_of_the_limit(
        self, backend, interleaved, preact_dtype, dtype
    ):
        """Rounded to it or beyond it, they would have no gradient."""
        gate = 7 + torch.linspace(-1, 1, 64)
        up = gate * torch.tensor([1, -1]).repeat(32)
        gate[3], up[7], up[40] = torch.inf, -torch.inf, torch.nan
        h = (
            torch.stack([gate, up], 1).flatten()
            if interleaved
            else torch.cat([gate, up])
        )
        h = h.to(dtype)
        kwargs = {"activation": "swiglu_oai", "gate_interleaved": interleaved}
        _, saved, _ = run_both(
            backend,
            one_token_with_preact(h, 64, 1.0),
            preact_dtype=preact_dtype,
            **recipe_args("mxfp8"),
            **kwargs,
        )
        wide = apart_from_limit(h[None].double(), **kwargs).to(dtype)
        wanted = moe_quantize_reference(wide, MX, dtype=preact_dtype)
        for got, want in zip(saved[2:], wanted):
            self.assertEqual(got.view(torch.uint8), want.view(torch.uint8))
        kept = dequantize_reference(*saved[2:], MX)[0]
        good = kept.isfinite()
        self.assertEqual(good.sum(), len(h) - 32)
        self.assertEqual(kept.abs()[good] < 7, h.abs()[good] < 7)

    @all_backends
    @all_recipes
    @parametrize("preact_dtype", [None, torch.int8])
    @parametrize("hp_wgrad", [False, True])
    def test_saved_formats(self, backend, recipe, preact_dtype, hp_wgrad):
        ops = MoeCase("saved", num_tokens=60, dim=64, hidden=64).operands(
            torch.bfloat16
        )
        _, saved, _ = self.check(ops, recipe, backend, preact_dtype, hp_wgrad)
        self.assertEqual(saved[2].dtype, preact_dtype or torch.bfloat16)

    @all_backends
    @all_recipes
    def test_recompute(self, backend, recipe):
        """Without a saved H, the backward gives the same bits as with it."""
        ops = MoeCase("again", num_tokens=60, dim=64, hidden=64).operands(
            torch.bfloat16
        )
        kept = run_both(backend, ops, **recipe_args(recipe))[2]
        again = run_both(backend, ops, compute_preact=False, **recipe_args(recipe))[2]
        for one, other in zip(kept, again, strict=True):
            self.assertEqual(one, other, rtol=0, atol=0)

    @all_backends
    @all_recipes
    def test_lists(self, backend, recipe):
        """Quantised rows and weights give the bits of a call that quantises them itself."""
        a, w = CODES[recipe]
        ops = MoeCase("lists", num_tokens=60, dim=64, hidden=96).operands(
            torch.bfloat16, bias=True
        )
        quantize = torch._moe_quantize

        def pairs(x):
            again = () if w == SQUARE else quantize(x, w, dim=1)
            return (*quantize(x, w), *again)

        lists = {
            "w_in": pairs(ops.w_in),
            "w_out": pairs(ops.w_out),
            "x": quantize(ops.input, a),
        }
        kwargs = {**recipe_args(recipe), "preact_dtype": E4M3}
        expected = run_both(backend, ops, **kwargs)
        # With quantised rows, the values of input are not read.
        handle = dataclasses.replace(
            ops, input=torch.full((), torch.nan).bfloat16().expand(60, 64)
        )
        output, saved, grads = run_both(backend, handle, lists, **kwargs)
        self.assertEqual(output, expected[0], rtol=0, atol=0)
        self.assertEqual(saved[0].numel() + saved[1].numel(), 0)
        for one, other in zip(grads, expected[2], strict=True):
            self.assertEqual(one, other, rtol=0, atol=0)

    @all_backends
    def test_swizzled_scales(self, backend):
        """Weight scales in SWIZZLE_32_4_4 give the results of unswizzled scales."""
        ops = MoeCase("swizzled", num_tokens=40, dim=160, hidden=96).operands(
            torch.bfloat16
        )
        weights = {"w_in": ops.w_in, "w_out": ops.w_out}
        found = []
        for swizzle in (0, 1):
            lists = {
                name: [
                    x
                    for dim in (2, 1)
                    for x in torch._moe_quantize(w, MX, dim=dim, swizzle=swizzle)
                ]
                for name, w in weights.items()
            }
            kwargs = {**recipe_args("mxfp8"), "swizzle_w": [swizzle]}
            found.append(run_both(backend, ops, lists, preact_dtype=E4M3, **kwargs))
        for one, other in zip(found[0][2], found[1][2], strict=True):
            self.assertEqual(one, other, rtol=0, atol=0)
        self.assertEqual(found[0][0], found[1][0], rtol=0, atol=0)

    @all_backends
    def test_weight_dtypes_and_strides(self, backend):
        """float32 parameters with bfloat16 rows: parameters are rounded once, their gradients are not."""
        ops = MoeCase("float", num_tokens=40, dim=64, hidden=64).operands(
            torch.bfloat16, bias=True
        )
        wide = {n: getattr(ops, n).float() for n in ("w_in", "w_out", "b_in", "b_out")}
        wide["w_in"] = wide["w_in"].mT.contiguous().mT
        self.check(dataclasses.replace(ops, **wide), "mxfp8", backend)
        _, _, grads = run_both(
            backend,
            dataclasses.replace(ops, **wide),
            preact_dtype=E4M3,
            **recipe_args("mxfp8"),
        )
        self.assertEqual(grads.grad_w_in.stride(), wide["w_in"].stride())

    @all_backends
    def test_rows_in_order(self, backend):
        """Without row_slots and slot_rows, the rows are already in expert order."""
        ops = MoeCase("rows", num_tokens=30, dim=64, hidden=64, top_k=1).operands(
            torch.bfloat16
        )
        offs = torch.tensor([7, 7, 20, 28], dtype=torch.int32)
        ops = dataclasses.replace(
            ops, offs=offs, row_slots=None, slot_rows=None, topk_weights=None
        )
        output, _, grads = self.check(ops, "mxfp8", backend)
        self.assertEqual(output[28:].count_nonzero().item(), 0)
        self.assertEqual(grads.grad_input[28:].count_nonzero().item(), 0)

    @all_backends
    def test_output_mask(self, backend):
        ops = MoeCase("mask", num_tokens=30, dim=64, hidden=64).operands(
            torch.bfloat16, bias=True
        )
        kwargs = {**recipe_args("mxfp8"), "preact_dtype": E4M3}
        every = run_both(backend, ops, **kwargs)[2]
        for i in range(6):
            mask = [j == i for j in range(7)]
            grads = run_both(backend, ops, mask=mask, **kwargs)[2]
            for j, grad in enumerate(grads):
                if j == i:
                    self.assertEqual(grad, every[j], rtol=0, atol=0)
                else:
                    self.assertEqual(grad.shape, (0,))

    @all_recipes
    def test_autograd(self, recipe):
        ops = get_case("sentinels").operands(
            torch.bfloat16, bias=True, requires_grad=True
        )
        kwargs = {**recipe_args(recipe), "preact_dtype": E4M3}
        output = torch._moe_mlp_scaled(*scaled_args(ops), **kwargs)[0]
        leaves = [x for x in ops.differentiable() if x is not None]
        grads = torch.autograd.grad(output, leaves, ops.grad_out)
        with torch.no_grad():
            expected = [g for g in run_both("native", ops, **kwargs)[2] if g.numel()]
        for one, other in zip(grads, expected, strict=True):
            self.assertEqual(one, other, rtol=0, atol=0)
        with self.assertRaisesRegex(RuntimeError, "_moe_mlp_scaled_backward"):
            output = torch._moe_mlp_scaled(*scaled_args(ops), **kwargs)[0]
            grad = torch.autograd.grad(output.sum(), ops.input, create_graph=True)[0]
            grad.sum().backward()

    @all_recipes
    def test_saved_bytes(self, recipe):
        """At most 33/32 byte per element of X and H, 24 bytes per slot and 8 per expert are saved."""
        T, D, F, E, K = 64, 256, 384, 4, 4
        case = MoeCase("bytes", num_tokens=T, dim=D, hidden=F, num_experts=E, top_k=K)
        ops = case.operands(torch.bfloat16, requires_grad=True)
        parameters = (ops.w_in, ops.w_out)
        with saved_for_backward(parameters) as saved:
            torch._moe_mlp_scaled(
                *scaled_args(ops), preact_dtype=E4M3, **recipe_args(recipe)
            )
        elements = T * D + T * K * 2 * F
        scales = {"fp8_rowwise": 4 * T + T * K * 2 * F // 32}.get(
            recipe, elements // 32
        )
        self.assertLessEqual(nbytes(saved), elements + scales + 24 * T * K + 8 * E)
        self.assertGreater(nbytes(saved), elements + scales)

    @all_backends
    def test_same_bits(self, backend):
        """Level 1: the same input gives the same bits, on any number of threads."""
        case = MoeCase("bits", num_tokens=70, dim=96, hidden=64, num_experts=5)
        ops = case.operands(torch.bfloat16, bias=True)
        kwargs = {**recipe_args("mxfp8"), "preact_dtype": E4M3}
        results = []
        for threads in (1, 1, 3):
            with num_threads(threads):
                output, _, grads = run_both(backend, ops, **kwargs)
                results.append((output, *grads))
        for other in results[1:2] if backend == "composite" else results[1:]:
            for a, b in zip(results[0], other, strict=True):
                self.assertEqual(a, b, rtol=0, atol=0)

    def test_rows_do_not_see_where_they_lie(self):
        """Levels 1 and 2 for rows so short that a vector would span several rows and threads."""
        case = MoeCase("narrow", num_tokens=40000, dim=96, hidden=1, num_experts=5)
        ops = case.operands(torch.float32, activation="silu")
        kwargs = {**recipe_args("mxfp8"), "activation": "silu"}
        results = []
        for threads in (1, 3):
            with num_threads(threads):
                results.append(run_both("native", ops, **kwargs)[2].grad_topk_weights)
        self.assertEqual(results[0], results[1], rtol=0, atol=0)
        for count in (1, 7, 35, 300, 1003):
            grads = run_both("native", ops.take_tokens(slice(count)), **kwargs)[2]
            self.assertEqual(
                grads.grad_topk_weights, results[0][:count], rtol=0, atol=0
            )

    @all_recipes
    @parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_tokens_do_not_see_each_other(self, recipe, dtype):
        """Level 2: y, dX and d(topk_weights) of a token have the same bits as without other tokens."""
        case = MoeCase("alone", num_tokens=40, dim=160, hidden=96, num_experts=3)
        ops = case.operands(dtype)
        kwargs = {**recipe_args(recipe), "preact_dtype": E4M3}

        def run(tokens):
            output, _, grads = run_both("native", ops.take_tokens(tokens), **kwargs)
            return output, grads.grad_input, grads.grad_topk_weights

        every = run(torch.arange(40))
        for tokens in ([0], [3, 17], list(range(7)), list(range(5, 40))):
            for a, b in zip(run(torch.tensor(tokens)), every, strict=True):
                self.assertEqual(a, b[tokens], rtol=0, atol=0)

    @all_recipes
    def test_meta_is_what_runs(self, recipe):
        for case in ("uniform", "no_tokens", "clipped_aligned"):
            ops = get_case(case).operands(torch.bfloat16, bias=True)
            for preact_dtype in (None, E4M3, torch.int8):
                for compute_preact in (True, False):
                    kwargs = {**recipe_args(recipe), "preact_dtype": preact_dtype}
                    args = scaled_args(ops)
                    meta = op(*to_meta(args), compute_preact=compute_preact, **kwargs)
                    mask = [x is not None for x in ops.differentiable()]
                    meta_grads = backward_op(
                        *to_meta((ops.grad_out, *args[1:])), *meta[1:], mask, **kwargs
                    )
                    for backend in BACKENDS:
                        output, saved, grads = run_both(
                            backend, ops, compute_preact=compute_preact, **kwargs
                        )
                        for real, fake in zip(
                            (output, *saved, *grads), (*meta, *meta_grads), strict=True
                        ):
                            self.assertEqual(real.shape, fake.shape)
                            self.assertEqual(real.dtype, fake.dtype)
                            self.assertEqual(real.stride(), fake.stride())

    @all_backends
    def test_every_code_and_scale(self, backend):
        """With D = 1 and w_in = 1, H has the values of all 256 codes with all 256 scales, NaN too."""
        codes = torch.arange(256, dtype=torch.uint8)
        data = codes.repeat(256)[:, None].view(E4M3)
        scale = codes.repeat_interleave(256)[:, None].view(torch.float8_e8m0fnu)
        one = torch._moe_quantize(torch.ones(1, 1, 1), MX)
        offs = torch.tensor([len(data)], dtype=torch.int32)
        args = (torch.zeros(len(data), 1), None, None, offs, *[None] * 6)
        lists = ([data, scale], list(one), list(one), [])
        kwargs = {**recipe_args("mxfp8"), "activation": "relu"}
        preact = BACKENDS[backend](op, *args, *lists, **kwargs)[3]
        expected = dequantize_reference(data, scale, MX, dim=1).float()
        self.assertEqual(preact, expected, rtol=0, atol=0, equal_nan=True)

    @all_backends
    @parametrize("preact_dtype", [E4M3, torch.int8])
    def test_noise_where_many_values_reach_the_limit(self, backend, preact_dtype):
        """That of saving H in 8 bits alone, which was 16 dB where values moved to the limit."""
        case = MoeCase("limit", num_tokens=256, dim=128, hidden=128, num_experts=2)
        ops = case.operands(torch.float32)
        ops.w_in.mul_(6 / (ops.w_in.std() * ops.input.std() * 128**0.5))
        kwargs = {"activation": "swiglu", "limit": 7.0}
        grads = run_both(
            backend, ops, preact_dtype=preact_dtype, **recipe_args("mxfp8"), **kwargs
        )[2]
        exact = ScaledMlp(ops, *CODES["mxfp8"], preact_dtype=None, **kwargs).backward()
        for name in ("grad_input", "grad_w_in", "grad_w_out", "grad_topk_weights"):
            noise = sqnr(getattr(exact, name), getattr(grads, name))
            self.assertGreater(noise, 26, msg=name)

    @parametrize(
        "recipe,floor", [("mxfp8", 22), ("fp8_blockwise", 22), ("fp8_rowwise", 21)]
    )
    def test_noise(self, recipe, floor):
        """Noise against an unquantised layer of normal numbers, the hardest for FP8."""
        case = MoeCase(
            "noise", num_tokens=256, dim=256, hidden=128, num_experts=8, top_k=4
        )
        ops = case.operands(torch.bfloat16)
        output, _, grads = run_both(
            "native", ops, preact_dtype=E4M3, **recipe_args(recipe)
        )
        expected = moe_mlp_backward_reference(ops.grad_out, *ops.args())
        self.assertGreater(sqnr(moe_mlp_reference(*ops.args())[0], output), floor)
        for one, other in zip(expected, grads, strict=True):
            if one is not None:
                self.assertGreater(sqnr(one, other), floor - 1)


instantiate_parametrized_tests(TestMoeMlpScaled)

if __name__ == "__main__":
    run_tests()
