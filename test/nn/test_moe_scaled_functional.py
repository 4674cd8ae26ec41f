# Owner(s): ["module: nn"]

"""F.scaled_moe_mlp, recipes of F.moe_mlp, and the cache of quantised weights."""

import copy
import pickle
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.utils.moe_scaled import quantize_weight, WeightCache
from torch.overrides import get_testing_overrides, TorchFunctionMode
from torch.testing._internal.common_moe import (
    nbytes,
    read_page,
    run_code_blocks,
    run_docstring,
    saved_for_backward,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_generators import MoeCase
from torch.testing._internal.moe_quantized_reference import sqnr
from torch.utils.checkpoint import checkpoint


RECIPES = tuple(F._MOE_RECIPES)
recipes = parametrize("recipe", RECIPES)
CASE = MoeCase("layer", num_tokens=40, dim=64, hidden=96, num_experts=4)


def layer_args(ops):
    return ops.input, ops.topk_indices, ops.topk_weights, ops.w_in, ops.w_out


def gradients(y, ops):
    leaves = (ops.input, ops.topk_weights, ops.w_in, ops.w_out)
    return torch.autograd.grad(y, leaves, ops.grad_out, retain_graph=True)


class TestScaledFunctional(TestCase):
    def assert_same(self, one, other):
        for a, b in zip(one, other, strict=True):
            self.assertEqual(a, b, rtol=0, atol=0)

    @recipes
    def test_recipe_is_scaled_moe_mlp(self, recipe):
        ops = CASE.operands(torch.bfloat16, requires_grad=True)
        plain = F.moe_mlp(*layer_args(ops))
        y = F.moe_mlp(*layer_args(ops), recipe=recipe)
        other = F.scaled_moe_mlp(*layer_args(ops), recipe=recipe)
        self.assert_same((y, *gradients(y, ops)), (other, *gradients(other, ops)))
        self.assertNotEqual(y, plain, rtol=0, atol=0)
        self.assertGreater(sqnr(plain, y), 20)
        for a, b in zip(gradients(plain, ops), gradients(y, ops), strict=True):
            self.assertGreater(sqnr(a, b), 19)

    @recipes
    def test_leading_dimensions_and_inference(self, recipe):
        ops = CASE.operands(torch.bfloat16)
        x, ids, weights, *experts = layer_args(ops)
        flat = F.moe_mlp(x, ids, weights, *experts, recipe=recipe)
        shaped = F.moe_mlp(
            x.view(2, 20, -1),
            ids.view(2, 20, -1),
            weights.view(2, 20, -1),
            *experts,
            recipe=recipe,
        )
        self.assertEqual(shaped, flat.view(2, 20, -1), rtol=0, atol=0)
        leaf = ops.input.clone().requires_grad_()
        trained = F.moe_mlp(leaf, ids, weights, *experts, recipe=recipe)
        self.assertEqual(trained, flat, rtol=0, atol=0)

    @recipes
    def test_options(self, recipe):
        ops = CASE.operands(torch.bfloat16, requires_grad=True)
        results = {}
        for name, options in {
            "default": {},
            "recompute": {"recompute": True},
            "whole": {"preact_dtype": None},
            "int8": {"preact_dtype": torch.int8},
            "hp": {"hp_wgrad": True},
        }.items():
            with saved_for_backward((ops.w_in, ops.w_out)) as saved:
                y = F.scaled_moe_mlp(*layer_args(ops), recipe=recipe, **options)
            results[name] = (nbytes(saved), y, gradients(y, ops))
        self.assert_same(results["recompute"][2], results["whole"][2])
        self.assertLess(results["recompute"][0], results["default"][0])
        self.assertLess(results["default"][0], results["whole"][0])
        self.assertEqual(results["int8"][0], results["default"][0])
        for _, y, _ in results.values():
            self.assertEqual(y, results["default"][1], rtol=0, atol=0)
        exact = gradients(F.moe_mlp(*layer_args(ops)), ops)
        hp, default = (sqnr(exact[2], results[n][2][2]) for n in ("hp", "default"))
        self.assertGreater(hp, default)

    @recipes
    def test_rows_from_a_wire(self, recipe):
        ops = CASE.operands(torch.bfloat16, requires_grad=True)
        rows = torch._moe_quantize(ops.input.detach(), F._MOE_RECIPES[recipe][0])
        y = F.moe_mlp(*layer_args(ops), recipe=recipe)
        handle = torch.empty(()).bfloat16().expand(40, 64).requires_grad_()
        _, *rest = layer_args(ops)
        other = F.scaled_moe_mlp(handle, *rest, recipe=recipe, input_scaled=tuple(rows))
        self.assertEqual(other, y, rtol=0, atol=0)
        (grad,) = torch.autograd.grad(other, handle, ops.grad_out)
        self.assertEqual(grad, gradients(y, ops)[0], rtol=0, atol=0)

    def test_parameters_have_one_dtype(self):
        x, ids, weights, w_in, w_out = layer_args(CASE.operands(torch.bfloat16))[:5]
        for recipe in (None, "mxfp8"):  # refused with and without a recipe
            for in_, out in ((w_in.float(), w_out), (w_in, w_out.float())):
                with self.assertRaisesRegex((TypeError, RuntimeError), "dtype"):
                    F.moe_mlp(x, ids, weights, in_, out, recipe=recipe)
        with self.assertRaisesRegex(
            TypeError, "w_out must have the dtype of w_in, float32"
        ):
            F.scaled_moe_mlp(x, ids, weights, w_in.float(), w_out)
        # Rows are bfloat16, and all parameters are quantised from float32.
        F.scaled_moe_mlp(x, ids, weights, w_in.float(), w_out.float())
        with torch.autocast("cpu", torch.bfloat16):
            F.moe_mlp(x, ids, weights, w_in.float(), w_out.float(), recipe="mxfp8")

    def test_options_that_exclude_each_other(self):
        args = layer_args(CASE.operands(torch.bfloat16))
        for preact in (torch.int8, None):
            with self.assertRaisesRegex(ValueError, "recompute=True keeps no pre-act"):
                F.scaled_moe_mlp(*args, preact_dtype=preact, recompute=True)

    def test_errors(self):
        ops = CASE.operands(torch.bfloat16)
        with self.assertRaisesRegex(
            ValueError, "moe_mlp: recipe must be None or one of mxfp8,"
        ):
            F.moe_mlp(*layer_args(ops), recipe="fp8")
        for recipe in ("fp8", None):
            with self.assertRaisesRegex(
                ValueError, f"scaled_moe_mlp: recipe must be one of .*, got {recipe!r}"
            ):
                F.scaled_moe_mlp(*layer_args(ops), recipe=recipe)
        with self.assertRaisesRegex(
            TypeError, "preact_dtype must be None, float8_e4m3fn, int8"
        ):
            F.scaled_moe_mlp(*layer_args(ops), preact_dtype=torch.float8_e5m2)
        with self.assertRaisesRegex(
            TypeError, "input must have dtype float32, bfloat16 or"
        ):
            F.moe_mlp(*layer_args(CASE.operands(torch.float64)), recipe="mxfp8")
        with self.assertRaisesRegex(ValueError, "recipe must be one of mxfp8"):
            quantize_weight(ops.w_in, "mx")
        with self.assertRaisesRegex(ValueError, "^WeightCache: recipe .*got 'x'"):
            WeightCache("x")

    @recipes
    def test_weight_cache(self, recipe):
        ops = CASE.operands(torch.float32)
        w_in, w_out = (torch.nn.Parameter(w) for w in (ops.w_in, ops.w_out))
        caches = WeightCache(recipe), WeightCache(recipe)
        optimizer = torch.optim.SGD([w_in, w_out], lr=0.5)

        def step(cached):
            lists = {}
            if cached:
                lists = {
                    "w_in_scaled": caches[0](w_in),
                    "w_out_scaled": caches[1](w_out),
                }
            args = (ops.input, ops.topk_indices, ops.topk_weights, w_in, w_out)
            y = F.scaled_moe_mlp(*args, recipe=recipe, **lists)
            return (y, *torch.autograd.grad(y, (w_in, w_out), ops.grad_out))

        for _ in range(3):
            self.assertIs(caches[0](w_in), caches[0](w_in))
            before = caches[0](w_in)
            self.assert_same(step(True), step(False))
            w_in.grad, w_out.grad = step(True)[1:]
            optimizer.step()
            self.assertIsNot(caches[0](w_in), before)
        before = caches[0](w_in)
        with torch.no_grad():
            w_in.mul_(2)
        self.assertIsNot(caches[0](w_in), before)
        self.assert_same(step(True), step(False))
        # Everything else that changes the numbers, such as loading.
        layer = torch.nn.ParameterDict({"w": w_in})
        saved = {"w": w_in.detach() * 3}
        for change in (
            lambda: w_in.detach().copy_(saved["w"]),
            lambda: layer.load_state_dict(saved),
            lambda: setattr(w_in, "data", saved["w"] * 2),
        ):
            before = caches[0](w_in)
            change()
            self.assertIsNot(caches[0](w_in), before)
            self.assert_same(step(True), step(False))
        # Autograd does not count writes such as FSDP's gather. Only the optimizer's step shows them.
        before = caches[0](w_in)
        w_in.data.mul_(2)
        self.assertIs(caches[0](w_in), before)
        optimizer.step()
        self.assertIsNot(caches[0](w_in), before)

    def test_weight_cache_of_a_module(self):
        """Copies have a cache of their own, and Module.to may swap the weight."""
        layer = torch.nn.Linear(32, 64)
        layer.weight = torch.nn.Parameter(torch.randn(2, 64, 32))
        layer.cache = WeightCache("mxfp8")
        layer.cache(layer.weight)
        other = torch.nn.Parameter(torch.zeros(1))
        other.grad = torch.ones(1)
        for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            before = copied.cache(copied.weight)
            self.assertIs(copied.cache(copied.weight), before)
            copied.weight.data.mul_(2)
            torch.optim.SGD([other], lr=0.1).step()
            self.assertIsNot(copied.cache(copied.weight), before)
        wanted = layer.cache(layer.weight)
        with mock.patch.object(
            torch.__future__, "get_swap_module_params_on_conversion", lambda: True
        ):
            layer.bfloat16()
        self.assertIsNot(layer.cache(layer.weight), wanted)
        # Another view of the same memory.
        view = layer.weight.detach()
        self.assertIs(layer.cache(view), layer.cache(layer.weight))
        self.assertIsNot(layer.cache(view[:1]), layer.cache(view))
        # A lazily negated one has the same memory and strides.
        z = torch.randn(2, 64, 32, dtype=torch.complex64)
        for view in (z.imag, z.conj().imag):
            self.assert_same(layer.cache(view), quantize_weight(view, "mxfp8"))

    def test_weight_cache_of_a_transform(self):
        cache, w = WeightCache("mxfp8"), torch.randn(2, 64, 32)

        def loss(w):
            return (w * cache(w)[0].float()).sum()

        self.assertEqual(
            torch.func.grad(loss)(w), quantize_weight(w, "mxfp8")[0].float()
        )

    def test_weight_cache_and_inference_mode(self):
        ops = CASE.operands(torch.float32)
        caches = WeightCache("mxfp8"), WeightCache("mxfp8")
        w_in, w_out = (torch.nn.Parameter(w) for w in (ops.w_in, ops.w_out))

        def layer(*weights):
            args = ops.input, ops.topk_indices, ops.topk_weights, *weights
            scaled = [cache(w) for cache, w in zip(caches, weights)]
            return F.scaled_moe_mlp(
                *args, recipe="mxfp8", w_in_scaled=scaled[0], w_out_scaled=scaled[1]
            )

        with torch.inference_mode():  # an evaluation before a step
            wanted = layer(w_in, w_out)
            frozen = w_in.clone(), w_out.clone()
            self.assertEqual(layer(*frozen), wanted)
            self.assertIs(caches[0](frozen[0]), caches[0](frozen[0]))
        got = layer(w_in, w_out)
        self.assertEqual(got, wanted)
        got.sum().backward()
        self.assertGreater(w_in.grad.abs().sum(), 0)

    def test_quantize_weight_needs_experts(self):
        with self.assertRaisesRegex(ValueError, r"shape \(E, N, K\), got \(64, 32\)"):
            quantize_weight(torch.ones(64, 32), "mxfp8")
        with self.assertRaisesRegex(TypeError, "weight must be .*got torch.float64"):
            quantize_weight(torch.ones(2, 64, 32).double(), "mxfp8")

    @parametrize("use_reentrant", [False, True])
    def test_checkpoint(self, use_reentrant):
        ops = CASE.operands(torch.bfloat16, requires_grad=True)

        def layer(*args):
            return F.moe_mlp(*args, recipe="mxfp8")

        y = checkpoint(layer, *layer_args(ops), use_reentrant=use_reentrant)
        expected = layer(*layer_args(ops))
        self.assertEqual(y, expected, rtol=0, atol=0)
        y.backward(ops.grad_out)
        self.assert_same(
            [x.grad for x in (ops.input, ops.topk_weights, ops.w_in, ops.w_out)],
            gradients(expected, ops),
        )

    def test_torch_function(self):
        ops = CASE.operands(torch.bfloat16)
        seen = []

        class Mode(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                if func in (F.scaled_moe_mlp, F.moe_mlp):
                    seen.append((func, kwargs))
                return func(*args, **(kwargs or {}))

        with Mode():
            F.scaled_moe_mlp(*layer_args(ops), recipe="fp8_rowwise", hp_wgrad=True)
            F.moe_mlp(*layer_args(ops), recipe="mxfp8")
        (first, kwargs), (second, other) = seen
        self.assertEqual((first, second), (F.scaled_moe_mlp, F.moe_mlp))
        self.assertEqual((kwargs["recipe"], kwargs["hp_wgrad"]), ("fp8_rowwise", True))
        self.assertEqual(other["recipe"], "mxfp8")
        self.assertIn(F.scaled_moe_mlp, get_testing_overrides())

    def test_documentation(self):
        text = read_page(__file__, "nn.functional.moe_scaled.md")
        count, names = run_code_blocks(text)
        self.assertEqual(count, 1)
        self.assertEqual(names["w_in"].grad.dtype, torch.bfloat16)
        for recipe in RECIPES:
            self.assertIn(f"`{recipe}`", text)

    def test_docstrings(self):
        for thing in (F.scaled_moe_mlp, WeightCache):
            run_docstring(thing, {"torch": torch, "F": F, "WeightCache": WeightCache})


instantiate_parametrized_tests(TestScaledFunctional)

if __name__ == "__main__":
    run_tests()
