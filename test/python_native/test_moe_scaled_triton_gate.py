# Owner(s): ["module: dsl-native-ops"]
"""Which calls of ``_moe_mlp_scaled`` the FP8 kernels take, that their launchers read no value,
and that every tile configuration that ships compiles well for every GPU it ships for.

Nothing runs on a GPU, and none is needed. What the kernels compute: test_moe_scaled_triton.py.
"""

import os


os.environ.pop("TRITON_INTERPRET", None)

import unittest
from unittest import mock

import test_moe_triton_eligibility as eligibility
import triton
from moe_scaled_sweep import (
    call,
    E4M3,
    FAMILY,
    RECIPES as SWEPT,
    RECORDED,
    SCALED_FUNCTIONS,
    Variant,
    variants,
)
from moe_triton_sweep import parallel_sweep, source_hash, sweep

import torch
from torch._native.ops.moe.triton_kernels import (
    launch,
    scaling,
)
from torch._native.ops.moe.triton_kernels.configs import (
    KERNELS,
    table_for_capability,
    TABLES,
    TileConfig,
)
from torch._native.ops.moe.triton_kernels.scaled_configs import (
    SCALED_KERNELS,
    SCALED_TABLES,
)
from torch._native.ops.moe.triton_kernels.scaled_operands import Recipe, ScaledExperts
from torch._native.ops.moe_scaled import triton_impl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import ScalingType
from torch.nn.utils.moe_kernel import moe_kernel, MoeBackend
from torch.testing._internal.common_moe import traced_size
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
    subtest,
    TestCase,
)
from torch.testing._internal.moe_generators import MoeCase


ROW = ScalingType.RowWise.value
# By the entries of the tables that they take on compute capability 10.0.
RECIPES = {
    name: (recipe.rows, recipe.weights)
    for name, recipe in SWEPT.items()
    if name in ("fp8", "mx", "row")
}
B128, SQUARE = RECIPES["fp8"]
MX = RECIPES["mx"][0]


class TestMoeScaledEligibility(eligibility.EligibilityTestCase):
    capability = (10, 0)

    def call(self, recipe="fp8", lists=([], [], [], []), args=None, **options):
        """Reasons of forward and backward."""
        if args is None:
            args = MoeCase("a", dim=64, hidden=128).operands(torch.bfloat16).args()
        a, w = RECIPES[recipe]
        options = {"recipe_a": [a], "recipe_w": [w], "preact_dtype": E4M3, **options}
        experts = triton_impl.experts_of(*args, *lists, **options)
        forward = triton_impl.mlp_reason(experts)
        quantize = torch.ops.aten._moe_quantize
        saved = quantize(args[0], a if recipe in RECIPES else B128)
        rows, width = len(args[0] if args[5] is None else args[5]), 2 * args[2].shape[2]
        preact = torch.empty(rows, width).to(E4M3)
        scale = torch.empty(rows, -(-width // 32)).to(torch.float8_e8m0fnu)
        backward = triton_impl.mlp_backward_reason(
            experts, *saved, preact, scale, output_mask=[True] * 7
        )
        return forward, backward

    @parametrize("recipe", list(RECIPES))
    @parametrize("capability", [(8, 0), (9, 0), (10, 0), (10, 3), (12, 0)])
    def test_capabilities(self, recipe, capability):
        self.capability = capability
        served = capability in ((9, 0), (10, 0), (10, 3))
        for reason in self.call(recipe):
            if served:
                self.assertIsNone(reason)
            else:
                self.assertIn("compute capability", reason)
        if served:
            a, w = RECIPES[recipe]
            table = table_for_capability(*capability, SCALED_TABLES)
            experts = ScaledExperts(*[None] * 4, recipe=Recipe(a, w))
            chosen = experts.on(table).recipe
            self.assertEqual(chosen.widen, capability == (9, 0) and recipe == "mx")
            prefix = chosen.kernel("")
            names = {name for name in SCALED_KERNELS if name.startswith(prefix)}
            self.assertEqual(len(names), len(KERNELS))
            self.assertGreaterEqual(set(table), names)

    @parametrize(
        "options,text",
        [
            subtest(({"recipe_a": []}, "recipe_a"), name="weight_only"),
            subtest(({"recipe_w": [B128]}, "recipe_w"), name="weights_by_1x128"),
            subtest(({"swizzle_w": [2]}, "swizzle_w"), name="panels"),
        ],
    )
    def test_what_is_left_to_the_composite(self, options, text):
        for reason in self.call(**options):
            self.assertIn(text, reason)

    @parametrize("recipe", list(RECIPES))
    def test_blocks_with_gate_and_up(self, recipe):
        args = MoeCase("a", dim=64, hidden=80).operands(torch.bfloat16).args()
        self.assertEqual(self.call(recipe, args=args), (None, None))

    def test_swizzled_weights(self):
        args = MoeCase("a", dim=64, hidden=96).operands(torch.bfloat16).args()
        w_in, w_out = (
            [
                x
                for dim in (2, 1)
                for x in torch.ops.aten._moe_quantize(w, MX, dim=dim, swizzle=1)
            ]
            for w in args[1:3]
        )
        lists = ([], w_in, w_out, [])
        options = {"args": args, "swizzle_w": [1]}
        self.assertEqual(self.call("mx", lists, **options), (None, None))
        panels = {"args": args, "swizzle_w": [2]}
        self.assertIn("swizzle_w", self.call("mx", lists, **panels)[0])

    @parametrize("recipe", list(RECIPES))
    def test_operands_that_come_quantised(self, recipe):
        args = MoeCase("a", dim=64, hidden=128).operands(torch.bfloat16).args()
        quantize, (a, w) = torch.ops.aten._moe_quantize, RECIPES[recipe]
        w_in, w_out = (list(quantize(x, w)) for x in args[1:3])
        x = list(quantize(args[0], a))
        forward, backward = self.call(recipe, (x, w_in, w_out, []))
        self.assertIsNone(forward)
        if recipe != "fp8":
            self.assertIn("one dimension only", backward)
            w_in, w_out = (
                pair + list(quantize(x, w, dim=1))
                for pair, x in zip((w_in, w_out), args[1:3])
            )
            self.assertIsNone(self.call(recipe, (x, w_in, w_out, []))[1])
        else:
            self.assertIsNone(backward)
        wrong = [w_in[0].view(torch.int8), w_in[1]]
        self.assertIn(
            "w_in_scaled has codes", self.call(recipe, ([], wrong, [], []))[0]
        )

    @parametrize("recipe", list(RECIPES))
    @parametrize("shape", [{"num_tokens": 0}, {"num_rows": 0}], name_fn="_".join)
    def test_no_tokens_and_no_rows(self, recipe, shape):
        ops = MoeCase("a", dim=64, hidden=128, **shape).operands(torch.bfloat16)
        self.assertEqual(self.call(recipe, args=ops.args()), (None, None))

    def test_malformed_calls(self):
        """They raise what the op raises: the rules are said once, in C++."""
        args = MoeCase("a", dim=64, hidden=128).operands(torch.bfloat16).args()
        w_in = list(torch.ops.aten._moe_quantize(args[1], SQUARE))
        lists, wrong = [[], [], [], []], [[], [w_in[0], w_in[1][:, :-1]], [], []]
        calls = [((*args, *wrong), {})]
        for i, change in (
            (0, lambda x: x[:-1]),
            (1, lambda x: x[:, :-2]),
            (1, lambda x: x[0]),
            (1, lambda x: x.double()),
            (4, lambda x: x.double()),
            (6, lambda x: x.long()),
        ):
            changed = (*args[:i], change(args[i]), *args[i + 1 :], *lists)
            calls.append((changed, {}))
        for options in (
            {"activation": "tanh"},
            {"preact_dtype": torch.float16},
            {"swizzle_w": [1]},
        ):
            calls.append(((*args, *lists), options))
        for given, options in calls:
            options = {"recipe_a": [B128], "recipe_w": [SQUARE], **options}
            with self.assertRaises(Exception) as expected:
                torch.ops.aten._moe_mlp_scaled(*given, **options)
            with moe_kernel(MoeBackend):
                with self.assertRaises(type(expected.exception)) as found:
                    triton_impl._mlp_cond(*given, **options)
            self.assertEqual(str(found.exception), str(expected.exception))

    def test_a_backend_that_is_asked_for_does_not_fall_back(self):
        args = MoeCase("a", dim=64, hidden=96).operands(torch.bfloat16).args()
        options = {"recipe_a": [B128], "recipe_w": [B128]}
        with mock.patch("torch.nn.utils.moe_kernel._is_registered", lambda b: True):
            with moe_kernel(MoeBackend.TRITON):
                with self.assertRaisesRegex(RuntimeError, "_moe_mlp_scaled.*recipe_a"):
                    triton_impl._mlp_cond(*args, [], [], [], [], **options)
        self.assertFalse(triton_impl._mlp_cond(*args, [], [], [], [], **options))


class TestMoeScaledLaunches(TestCase):
    @unittest.skipIf(
        not torch.backends.cuda.is_built(), "fake CUDA tensors need a CUDA build"
    )
    @parametrize("recipe", list(RECIPES))
    @parametrize("tokens", ["static", "unbacked"])
    def test_launchers_read_no_value(self, recipe, tokens):
        launched, shape_env = [], ShapeEnv()

        def run(self, *args, grid, warmup, **kwargs):
            launched.append((self.__name__, kwargs.get("enable_fp_fusion")))

        config = TileConfig(64, 128, 128, num_warps=4, num_stages=2)
        plan = launch.LaunchPlan(
            dict.fromkeys((*KERNELS, *SCALED_KERNELS), (config,)),
            num_sms=132,
            hint=lambda size: size if isinstance(size, int) else 4096,
        )
        with (
            mock.patch.object(triton.runtime.jit.JITFunction, "run", run),
            FakeTensorMode(shape_env=shape_env),
        ):
            T = traced_size(4096, tokens, shape_env)
            variant = Variant("fake", recipe, ())
            args, output, saved, grads = call(plan, variant, "cuda", T)
            expected = torch.ops.aten._moe_mlp_scaled(
                *args,
                recipe_a=[RECIPES[recipe][0]],
                recipe_w=[RECIPES[recipe][1]],
                preact_dtype=E4M3,
            )
        for actual, wanted in zip((output, *saved), expected, strict=True):
            self.assertEqual(
                (actual.shape, actual.dtype, actual.device.type),
                (wanted.shape, wanted.dtype, "cuda"),
            )
        for i, operand in enumerate((args[0], *args[1:3], args[4], *args[7:9])):
            self.assertEqual(grads[i].shape, operand.shape)
            self.assertEqual(grads[i].dtype, operand.dtype)
        names = [name for name, _ in launched]
        self.assertEqual({fusion for _, fusion in launched}, {True})
        self.assertEqual(shape_env.guards, [])
        for name, count in (
            ("scaled_up_kernel", 1),
            ("scaled_mm_kernel", 2),
            ("scaled_act_backward_kernel", 1),
            ("columns_kernel", 4),
            ("column_scales_kernel", 4 if recipe == "row" else 0),
            ("scaled_weight_grad_kernel", 2),
            ("combine_kernel", 2),
        ):
            self.assertEqual(names.count(name), count, name)

    def test_a_program_has_one_tile(self):
        for table in SCALED_TABLES.values():
            for name, configs in table.items():
                self.assertFalse(any(c.programs_per_sm for c in configs), name)

    def compiled(self, table=None):
        """Rows of sm_90, as a training step with biases launches them."""
        chosen = tuple(v for v in variants() if v.name == "fp8 all_kernels")
        return list(sweep("sm_90", table, chosen, family=FAMILY))

    def test_swiglu_on_hopper(self):
        rows = self.compiled()
        self.assertEqual([row for row in rows if row.problems], [])
        kernels = {row.report.kernel for row in rows}
        names = {kernel.__name__ for kernel in SCALED_FUNCTIONS}
        self.assertEqual(kernels, names - {"column_scales_kernel"})

    def test_gate_rejects_spills(self):
        # The epilogue of the whole tile at once does not fit in registers.
        config = TileConfig(128, 128, 128, 8, 3, tma=True)
        table = {**TABLES["sm_90"], **SCALED_TABLES["sm_90"]}
        bad = [
            r
            for r in self.compiled({**table, "fp8_act_backward": (config,)})
            if r.problems
        ]
        self.assertEqual({r.report.kernel for r in bad}, {"scaled_act_backward_kernel"})
        self.assertIn("spills", bad[0].problems[0])

    @slowTest
    def test_every_shipped_config(self):
        for arch, rows in parallel_sweep(FAMILY).items():
            bad = [
                (row.variant, row.report.kernel, arch, row.problems)
                for row in rows
                if row.problems
            ]
            self.assertEqual(bad, [])
            self.assertGreater(len(rows), 10)

    def test_hash_is_of_what_kernels_call(self):
        # In scaling.py, which has no kernel.
        before, other = source_hash(RECORDED), triton.language.constexpr(254)
        with mock.patch.object(scaling, "NAN_BYTE", other):
            self.assertNotEqual(source_hash(RECORDED), before)


instantiate_parametrized_tests(TestMoeScaledEligibility)
instantiate_parametrized_tests(TestMoeScaledLaunches)

if __name__ == "__main__":
    run_tests()
