# Owner(s): ["module: dsl-native-ops"]
"""What the FP8 kernels of ``_moe_mlp_scaled`` compute, in Triton's interpreter on CPU tensors.

Against the loop of moe_quantized_reference.py, whose operands are quantised like theirs, and
against the composite kernel bit for bit where every sum is exact; with every fresh
allocation filled with NaN and, over layouts, routings and tails, every load and store checked. Code generation and eligibility:
test_moe_scaled_triton_gate.py.
"""

import os


# Before anything can import Triton: its own helpers decide at import time.
os.environ["TRITON_INTERPRET"] = "1"

import dataclasses

from triton_interpreter import (
    exact_floats,
    MemorySanitizer,
    require_interpreter,
    shuffled_programs,
)

import torch
from torch._native.ops.moe.triton_kernels import launch, scaled_launch
from torch._native.ops.moe.triton_kernels.configs import KERNELS, TABLES, TileConfig
from torch._native.ops.moe.triton_kernels.experts import (
    Activation,
    GATED_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
)
from torch._native.ops.moe.triton_kernels.scaled_configs import (
    SCALED_KERNELS,
    SCALED_TABLES,
)
from torch._native.ops.moe.triton_kernels.scaled_operands import Recipe, ScaledExperts
from torch.nn.functional import ScalingType
from torch.testing._internal.common_moe import (
    call_composite,
    fill_uninitialized_memory,
    slow_subtest,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)
from torch.testing._internal.moe_generators import MoeCase
from torch.testing._internal.moe_quantized_reference import ScaledMlp
from torch.testing._internal.moe_reference import (
    check_close,
    check_gradients,
    MoeMlpGrads,
)


require_interpreter()

E4M3 = torch.float8_e4m3fn
MX, B128 = ScalingType.BlockWise1x32.value, ScalingType.BlockWise1x128.value
ROW, SQUARE = ScalingType.RowWise.value, ScalingType.BlockWise128x128.value
RECIPES = {
    "fp8": Recipe(B128, SQUARE),
    "row": Recipe(ROW, ROW),
    "mx": Recipe(MX, MX),
    "wide": Recipe(MX, MX, widen=True),
}
all_recipes = parametrize("recipe", ["fp8", "row", "mx"])
# Where the routings and the bits of the composite, which all have, would fail as well.
one_recipe = parametrize(
    "recipe",
    ["fp8", *(slow_subtest(r) for r in ("row", "mx"))],
)
# With those that share all but their products.
each_product = parametrize("recipe", list(RECIPES))


def codes_of(recipe):
    """The codes of the rows and of the weights, as the op takes them."""
    return RECIPES[recipe].rows, RECIPES[recipe].weights


op = torch.ops.aten._moe_mlp_scaled.default
backward_op = torch.ops.aten._moe_mlp_scaled_backward.default


def make_plan(**config) -> launch.LaunchPlan:
    """One tile configuration for all kernels, and three multiprocessors."""
    config = {
        "block_m": 32,
        "block_n": 128,
        "block_k": 128,
        "num_warps": 4,
        "num_stages": 2,
        **config,
    }
    names = (*KERNELS, *SCALED_KERNELS)
    return launch.LaunchPlan(dict.fromkeys(names, (TileConfig(**config),)), num_sms=3)


POINTERS = make_plan()
TMA = make_plan(epilogue_parts=2, tma=True)


def make_operands(
    dtype=torch.bfloat16, activation="swiglu", bias=False, split=False, **shape
):
    shape = {"num_tokens": 16, "dim": 144, "hidden": 128, **shape}
    case = MoeCase("scaled", **shape)
    ops = case.operands(dtype, activation=activation, bias=bias)
    return ops.split_gate() if split else ops


class TestMoeScaledTriton(TestCase):
    def setUp(self):
        super().setUp()
        for context in (
            exact_floats(),
            fill_uninitialized_memory(),
        ):
            context.__enter__()
            self.addCleanup(context.__exit__, None, None, None)

    def run_kernels(
        self,
        ops,
        recipe,
        act=Activation(),
        preact_dtype=E4M3,
        plan=POINTERS,
        lists=([], [], [], []),
        recompute=False,
        **options,
    ):
        """output, what is saved, and the gradients."""
        options |= {"recipe": RECIPES.get(recipe, recipe), "act": act}
        experts = ScaledExperts(
            *ops.args(), *lists, preact_dtype=preact_dtype, **options
        )
        output, *saved = scaled_launch.moe_mlp_scaled_forward(
            plan, experts, compute_preact=not recompute
        )
        mask = tuple(x is not None for x in ops.differentiable())
        experts = dataclasses.replace(experts, input=ops.grad_out)
        grads = scaled_launch.moe_mlp_scaled_backward(plan, experts, saved, mask)
        return output, saved, grads

    def check(self, ops, recipe, act=Activation(), **options):
        """Output and gradients within the tolerance of every MoE test."""
        output, saved, grads = self.run_kernels(ops, recipe, act, **options)
        dtype = ops.input.dtype
        product = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        kwargs = {
            **dataclasses.asdict(act),
            "preact_dtype": options.get("preact_dtype", E4M3),
            "hp_wgrad": options.get("hp_wgrad", False),
        }
        if options.get("recompute"):
            kwargs["preact_dtype"] = None
        codes = codes_of(recipe)
        exact = ScaledMlp(ops, *codes, **kwargs)
        yardstick = ScaledMlp(ops, *codes, dtype=product, **kwargs)
        check_close(output, exact.forward()[0], yardstick.forward()[0], dtype, "output")
        check_gradients(grads, exact.backward(), yardstick.backward(), dtype)
        return output, saved, grads

    def check_memory(self, *args, **options):
        """``check``, and every access."""
        sanitizer = MemorySanitizer()
        with sanitizer():
            self.check(*args, **options)
        self.assertGreater(sanitizer.num_accesses, 0)

    @one_recipe
    @parametrize(
        "plan,interleaved",
        [
            subtest((POINTERS, False), name="pointers"),
            subtest((TMA, True), name="tma_parts_interleaved"),
            slow_subtest((POINTERS, True), "pointers_interleaved"),
            slow_subtest((TMA, False), "tma_parts"),
        ],
    )
    def test_layouts_with_bias(self, recipe, plan, interleaved):
        act = Activation("swiglu", gate_interleaved=interleaved)
        self.check_memory(make_operands(bias=True), recipe, act, plan=plan)

    @one_recipe
    @parametrize("interleaved", [slow_subtest(False), True])
    def test_parts_of_a_block(self, recipe, interleaved):
        # Four parts share one or two scales in fp8, two or none in mx; a scale of H has 32 columns.
        block_n = 64 if recipe == "mx" else 128
        plan = make_plan(epilogue_parts=4, block_n=block_n, tma=True)
        act = Activation("swiglu", gate_interleaved=interleaved)
        ops = make_operands(bias=True, num_tokens=9, hidden=208 if interleaved else 128)
        self.check_memory(ops, recipe, act, plan=plan)
        whole = make_plan(block_n=block_n)
        for a, b in zip(
            *(self.run_kernels(ops, recipe, act, plan=p)[2] for p in (plan, whole))
        ):
            if a.dim() != 2 or a.shape != ops.topk_weights.shape:
                self.assertTrue(torch.equal(a, b))

    @parametrize(
        "arch,recipe,hidden,interleaved,split",
        [
            # As gpt-oss's 2880, 64 more than a multiple of 128.
            subtest(("sm_90", "fp8", 64, True, False), name="sm_90_fp8_64"),
            slow_subtest(("sm_100", "fp8", 192, True, False), "sm_100_fp8_192"),
            subtest(("sm_100", "mx", 96, False, False), name="sm_100_mx_96"),
            slow_subtest(("sm_100", "mx", 80, False, True), "sm_100_mx_80_split"),
        ],
    )
    def test_blocks_past_the_end(self, arch, recipe, hidden, interleaved, split):
        """The last tile of a row has whole scale blocks past the end: they are nobody's."""
        plan = launch.LaunchPlan({**TABLES[arch], **SCALED_TABLES[arch]}, num_sms=132)
        shape = {"num_tokens": 40, "dim": 128, "num_experts": 2, "top_k": 2}
        ops = make_operands(hidden=hidden, split=split, **shape)
        act = Activation("swiglu", gate_interleaved=interleaved)
        for seed in range(3):
            with shuffled_programs(seed):
                self.check_memory(ops, recipe, act, plan=plan)

    @parametrize("activation", [*GATED_ACTIVATIONS, *PLAIN_ACTIVATIONS])
    def test_activations(self, activation):
        ops = make_operands(torch.float32, activation, num_tokens=10, top_k=1, dim=128)
        limit = 0.4 if activation in ("geglu", "swiglu_oai") else None
        self.check(ops, "mx", Activation(activation, limit=limit))

    @all_recipes
    @parametrize("routing", ["sentinels", "empty_experts", "one_expert"])
    def test_routings(self, recipe, routing):
        self.check_memory(make_operands(routing=routing), recipe)

    @parametrize(
        "shape",
        [
            subtest(
                {"num_tokens": 1, "top_k": 1, "num_experts": 1}, name="one_of_each"
            ),
            subtest(
                {"num_tokens": 150, "top_k": 1, "num_experts": 1}, name="two_blocks"
            ),
            subtest({"row_alignment": 16, "num_rows": 80}, name="aligned"),
        ],
    )
    def test_row_plans(self, shape):
        self.check_memory(make_operands(**shape), "fp8")

    @parametrize("dim,hidden", [(16, 48), (272, 80)])
    @one_recipe
    def test_tails(self, recipe, dim, hidden):
        # Blocks of H have numbers of gate and up where these are not interleaved.
        ops = make_operands(dim=dim, hidden=hidden, bias=True)
        act = Activation("swiglu_oai", gate_interleaved=True)
        self.check_memory(ops, recipe, act, plan=TMA)
        ops = make_operands(dim=dim, hidden=hidden, num_tokens=9)
        self.check_memory(ops, recipe, Activation("swiglu", limit=0.4))
        ops = make_operands(dim=dim, hidden=hidden, activation="relu2", num_tokens=9)
        self.check_memory(ops, recipe, Activation("relu2"))

    @one_recipe
    def test_gate_and_up_as_two_weights(self, recipe):
        self.check(make_operands(split=True, bias=True), recipe)

    @parametrize("recipe,hidden", [("fp8", 160), ("fp8", 80), ("row", 80), ("mx", 48)])
    @parametrize("split", [False, slow_subtest(True)])
    def test_blocks_with_gate_and_up(self, recipe, hidden, split):
        # F is no multiple of a block of dH, and but for the first none of a block of H.
        ops = make_operands(num_tokens=9, dim=32, hidden=hidden, bias=True, split=split)
        self.check_memory(ops, recipe)

    @parametrize(
        "dtype,preact_dtype",
        [
            (torch.bfloat16, None),
            (torch.bfloat16, torch.int8),
            (torch.float16, E4M3),
            (torch.float32, None),
            (torch.float32, torch.int8),
        ],
    )
    def test_dtypes(self, dtype, preact_dtype):
        ops = make_operands(dtype, dim=128, num_tokens=12)
        self.check(ops, "fp8", preact_dtype=preact_dtype)

    @one_recipe
    @parametrize(
        "shape",
        [
            subtest({"num_tokens": 0}, name="no_tokens"),
            subtest({"num_tokens": 0, "num_rows": 32}, name="padding_only"),
            subtest({"num_tokens": 8, "num_rows": 0}, name="no_rows"),
            subtest({"num_tokens": 4}, name="rows"),
        ],
    )
    def test_shapes_and_strides(self, recipe, shape):
        """What an idle rank of expert parallelism gets too."""
        ops = make_operands(bias=True, split=True, dim=48, **shape)
        transposed = {
            name: getattr(ops, name).mT.contiguous().mT
            for name in ("input", "grad_out", "w_in", "topk_weights", "b_in", "b_out")
        }
        ops = dataclasses.replace(ops, **transposed)
        output, saved, grads = self.run_kernels(ops, recipe)
        args = (*ops.args(), [], [], [], [])
        a, w = codes_of(recipe)
        kwargs = {"recipe_a": [a], "recipe_w": [w], "preact_dtype": E4M3}
        expected = call_composite(op, *args, **kwargs)
        expected_grads = call_composite(
            backward_op, ops.grad_out, *args[1:], *expected[1:], [True] * 7, **kwargs
        )
        for i, (x, y) in enumerate(
            zip((output, *saved, *grads), (*expected, *expected_grads), strict=True)
        ):
            self.assertEqual(
                (x.dtype, x.shape, x.stride()), (y.dtype, y.shape, y.stride()), i
            )
        if 0 in (len(ops.input), len(ops.row_slots)):
            for x in (output, *saved[2:], *grads):
                self.assertEqual(x.contiguous().view(torch.uint8).count_nonzero(), 0)

    @one_recipe
    @parametrize("option", ["recompute", "hp_wgrad"])
    def test_options(self, recipe, option):
        self.check(make_operands(bias=True), recipe, **{option: True})

    @one_recipe
    def test_rows_that_are_expert_major_already(self, recipe):
        ops = make_operands(num_tokens=40, top_k=1, num_experts=4)
        offs = torch.tensor([3, 3, 30, 37], dtype=torch.int32)
        ops = dataclasses.replace(ops, offs=offs, row_slots=None, slot_rows=None)
        self.check(ops, recipe)
        self.check(dataclasses.replace(ops, topk_weights=None), recipe)

    @one_recipe
    @parametrize("stride", [(0, 0), (2, 1)])
    def test_strides_of_router_weights(self, recipe, stride):
        ops = make_operands(num_tokens=6, top_k=1, dim=32)
        weights = torch.rand(64).as_strided(ops.topk_weights.shape, stride)
        self.check(dataclasses.replace(ops, topk_weights=weights), recipe)

    @one_recipe
    def test_operands_that_come_quantised(self, recipe):
        ops = make_operands(split=True)
        codes = RECIPES[recipe]
        quantize = torch.ops.aten._moe_quantize
        lists = [list(quantize(ops.input, codes.rows))]
        for w in (ops.w_in, ops.w_out, ops.w_up):
            lists.append(list(quantize(w, codes.weights)))
            if recipe != "fp8":
                lists[-1] += quantize(w, codes.weights, dim=1)
        output, saved, grads = self.run_kernels(ops, recipe)
        layouts = [(recipe, lists)]
        if codes.block == 32:
            swizzled = dataclasses.replace(codes, swizzle=1)
            lists = [lists[0]]
            for w in (ops.w_in, ops.w_out, ops.w_up):
                lists.append([])
                for dim in (2, 1):
                    lists[-1] += quantize(w, codes.weights, dim=dim, swizzle=1)
            layouts.append((swizzled, lists))
        for form, given in layouts:
            same = self.run_kernels(ops, form, lists=given)
            self.assertEqual([x.shape for x in same[1][:2]], [(0,), (0,)])
            for a, b in zip(
                (output, *saved[2:], *grads), (same[0], *same[1][2:], *same[2])
            ):
                self.assertTrue(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))

    @each_product
    @parametrize("layout", ["halves", "interleaved", "split"])
    def test_bits_of_the_composite(self, recipe, layout):
        interleaved, split = layout == "interleaved", layout == "split"
        # Small integers: every sum is exact, those before a rounding below 256.
        ops = make_operands(split=split, bias=True, activation="reglu")

        def integers(x, low, high):
            return None if x is None else torch.randint_like(x, low, high)

        ops = dataclasses.replace(
            ops,
            topk_weights=integers(ops.topk_weights, 1, 3),
            **{
                name: integers(getattr(ops, name), -1, 2)
                for name in (
                    "input",
                    "w_in",
                    "w_up",
                    "w_out",
                    "b_in",
                    "b_out",
                    "grad_out",
                )
            },
        )
        codes = RECIPES[recipe]
        act = Activation("reglu", gate_interleaved=interleaved)
        # As these ship.
        plan = make_plan(block_k=64) if recipe == "wide" else POINTERS
        output, saved, grads = self.run_kernels(ops, recipe, act, plan=plan)
        kwargs = {
            "recipe_a": [codes.rows],
            "recipe_w": [codes.weights],
            "preact_dtype": E4M3,
            "activation": "reglu",
            "gate_interleaved": interleaved,
        }
        args = (*ops.args(), [], [], [], [])
        expected, *expected_saved = call_composite(op, *args, **kwargs)
        mask = [x is not None for x in ops.differentiable()]
        expected_grads = call_composite(
            backward_op, ops.grad_out, *args[1:], *expected_saved, mask, **kwargs
        )
        names = ("output", "input_data", "input_scale", "preact", "preact_scale")
        for name, a, b in zip(
            (*names, *MoeMlpGrads._fields),
            (output, *saved, *grads),
            (expected, *expected_saved, *expected_grads),
            strict=True,
        ):
            self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape), name)
            if name in ("output", "grad_topk_weights") or (
                split and name == "grad_input"
            ):
                # The composite rounds the product before the bias, and dX of gate and up
                # apart; the sum for the router weights passes 2^24.
                error = (a.double() - b.double()).abs().max()
                self.assertLess(error, 2**-6 * b.double().abs().max())
            else:
                same = a.contiguous().view(torch.uint8) == b.contiguous().view(
                    torch.uint8
                )
                self.assertTrue(same.all(), f"{name}: {(~same).sum()} of {a.numel()}")

    @one_recipe
    def test_order_of_programs_and_other_tokens(self, recipe):
        ops = make_operands(bias=True, num_tokens=40)
        output, saved, grads = self.run_kernels(ops, recipe)
        with shuffled_programs(1):
            again = self.run_kernels(ops, recipe)
        for a, b in zip((output, *saved, *grads), (again[0], *again[1], *again[2])):
            self.assertTrue(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
        tokens = slice(7, 16)
        part, _, part_grads = self.run_kernels(ops.take_tokens(tokens), recipe)
        self.assertTrue(torch.equal(part, output[tokens]))
        for i in (0, 3):  # dX and d(topk_weights)
            self.assertTrue(torch.equal(part_grads[i], grads[i][tokens]))

    @one_recipe
    def test_what_is_no_number_stays_with_its_token(self, recipe):
        ops = make_operands(num_tokens=12)
        clean, _, clean_grads = self.run_kernels(ops, recipe)
        ops.input[5, 3], ops.grad_out[7, 2] = float("inf"), float("nan")
        output, _, grads = self.run_kernels(ops, recipe)
        others = torch.arange(12) != 5
        self.assertTrue(output[5].isnan().all())
        self.assertEqual(output[others], clean[others], atol=0, rtol=0)
        others[7] = False
        self.assertTrue(grads[0][7].isnan().all())
        self.assertEqual(grads[0][others], clean_grads[0][others], atol=0, rtol=0)


instantiate_parametrized_tests(TestMoeScaledTriton)

if __name__ == "__main__":
    run_tests()
