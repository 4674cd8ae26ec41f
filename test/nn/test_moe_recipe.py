# Owner(s): ["module: nn"]
"""torch.nn.utils.moe_recipe.select_recipe."""

import json
import re
import tempfile
from unittest import mock

import torch
import torch.nn.functional as F
from torch.distributed._tools import (
    moe_calibration,
    moe_cost_model as cost,
    moe_layer_plan,
)
from torch.distributed._tools.moe_config import MoEConfig
from torch.distributed._tools.moe_profile import CpuConstants, Profile, profile
from torch.nn.utils.moe_recipe import select_recipe
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


SMALL = MoEConfig(1, 64, 32, 8, 2, 1, 1, 64, 1)


def with_times(*milliseconds: float):
    """A measure_calls that returns these times of forward and backward for bf16 and each recipe."""

    def measure(calls, seconds, **kw):
        for call in calls:
            call()
        if len(calls) != len(milliseconds):
            raise AssertionError(f"{len(calls)} calls")
        return [1e-3 * t for t in milliseconds]

    return mock.patch.object(moe_calibration, "measure_calls", measure)


class TestModelled(TestCase):
    @parametrize("device,name", [("B200", "mxfp8"), ("H100", "fp8_blockwise")])
    def test_large_experts_pay(self, device, name):
        recipe, reason = select_recipe("deepseek-v3", device, tokens=16384, ep=32)
        self.assertEqual(recipe, name)
        self.assertIn("not measured", reason)
        # The ms of both sides come from the performance model.
        times = cost.recipe_seconds(
            profile(device), 16384 * 8, 7168, 2048, 8, ("bf16", name.split("_")[0])
        )
        for side, dtype in ((name, name.split("_")[0]), ("bfloat16", "bf16")):
            ms = 1e3 * sum(t[dtype] for t in times.values())
            largest = 1e3 * max(t[dtype] for t in times.values())
            self.assertIn(f"{side} {ms:.3g} ms, most of it", reason)
            self.assertIn(f"with {largest:.3g} ms", reason)
        self.assertRegex(reason, r"quantisation is [\d.]+ ms of it")

    def test_few_rows_do_not(self):
        recipe, reason = select_recipe(SMALL, "B200", tokens=64)
        self.assertIsNone(recipe)
        self.assertIn("not measured", reason)

    def test_gains_below_the_error_are_none(self):
        def close(p, rows, d, f, local, dtypes=None):
            times = {
                g: {"bf16": 1.0, "mxfp8": 0.96} for g in ("forward", "dgrad", "wgrad")
            }
            return dict.fromkeys(times, "mxfp8"), times

        with mock.patch.object(moe_layer_plan, "fastest_dtypes", close):
            recipe, reason = select_recipe(SMALL, "B200", tokens=64)
        self.assertIsNone(recipe)
        self.assertIn("1.04 times as fast, which is less than the error of 8%", reason)
        self.assertIn("error 8% (17 rows that calibrated nothing)", reason)

    def test_weight_gradients_in_bfloat16(self):
        def split(p, rows, d, f, local, dtypes=None):
            times = {
                "forward": {"bf16": 2.0, "mxfp8": 1.0},
                "dgrad": {"bf16": 2.0, "mxfp8": 1.0},
                "wgrad": {"bf16": 1.0, "mxfp8": 1.1},
            }
            return {"forward": "mxfp8", "dgrad": "mxfp8", "wgrad": "bf16"}, times

        with mock.patch.object(moe_layer_plan, "fastest_dtypes", split):
            recipe, reason = select_recipe(SMALL, "B200", tokens=64)
        self.assertEqual(recipe, "mxfp8")
        self.assertIn("hp_wgrad=True", reason)
        self.assertIn(
            "mxfp8 3.1e+03 ms, most of it the products of the weights'", reason
        )

    def test_inference_is_forward_only(self):
        recipe, reason = select_recipe(
            "deepseek-v3", "B200", tokens=16384, ep=32, training=False
        )
        self.assertEqual(recipe, "mxfp8")
        self.assertNotIn("gradients", reason)
        self.assertNotIn("for backward", reason)
        self.assertIn("the forward products", reason)

    def test_no_products_of_8_bits(self):
        recipe, reason = select_recipe("mixtral-8x7b", "A100", tokens=4096)
        self.assertIsNone(recipe)
        self.assertRegex(
            reason, r"^bfloat16 [\d.]+ ms, most of it .*multiplies no 8-bit"
        )
        # No measurement of this GPU was fitted, so its error is not known.
        self.assertRegex(reason, "not fitted, not measured, its error is not known$")

    def test_float32_is_compared_with_float32(self):
        layer = torch.nn.MoE(2048, 512, num_experts=8, top_k=2)
        recipe, reason = select_recipe(layer, "B200", tokens=16384)
        self.assertEqual(recipe, "mxfp8")
        self.assertRegex(reason, r"against float32 [\d.]+ ms")
        _, wider = select_recipe(layer.bfloat16(), "B200", tokens=16384)
        self.assertRegex(wider, r"against bfloat16 [\d.]+ ms")

    def test_profile_and_path(self):
        p = profile("B200")
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(p.to_json(), file)
            file.flush()
            want = select_recipe("deepseek-v3", "B200", tokens=4096, ep=32)
            for device in (p, file.name):
                self.assertEqual(
                    select_recipe("deepseek-v3", device, tokens=4096, ep=32), want
                )


class TestMeasured(TestCase):
    def test_cpu(self):
        layer = torch.nn.MoE(64, 32, num_experts=8, top_k=2, dtype=torch.bfloat16)
        before = [p.clone() for p in layer.parameters()]
        recipe, reason = select_recipe(layer, "cpu", tokens=40, seconds=0.0)
        self.assertIn(recipe, (None, *F._MOE_RECIPES))
        self.assertIn("measured on cpu", reason)
        self.assertNotIn("not measured", reason)
        self.assertIn("(T, D, F, E, K) = (40, 64, 32, 8, 2)", reason)
        self.assertEqual(
            len(re.findall(r"[\d.]+ ms, most of it (?:forward|backward)", reason)), 2
        )
        _, of_float = select_recipe(layer.float(), "cpu", tokens=40, seconds=0.0)
        self.assertRegex(of_float, r"against float32 [\d.]+ ms")
        layer.bfloat16()
        other = torch.nn.Conv1d(2, 2, 1)
        model = torch.nn.Sequential(other, layer)
        _, of_bfloat16 = select_recipe(model, "cpu", tokens=40, seconds=0.0)
        self.assertRegex(of_bfloat16, r"bfloat16 [\d.]+ ms")
        # Each candidate runs once where there is no budget for more.
        # Its tensors are not on the default device.
        wrapped = mock.patch.object(F, "moe_mlp", wraps=F.moe_mlp)
        with wrapped as calls, torch.device("meta"):
            select_recipe(layer, "cpu", tokens=40, seconds=0.0)
        self.assertEqual(calls.call_count, 1 + len(F._MOE_RECIPES))
        # PyTorch itself never selects a recipe.
        self.assertIsNone(layer.recipe)
        self.assertEqual(before, list(layer.parameters()))

    @parametrize("training", [True, False])
    def test_the_faster_one(self, training):
        def recipe_of(*times):
            if not training:
                times = times[::2]
            with with_times(*times):
                return select_recipe(SMALL, "cpu", tokens=9, training=training)

        recipe, reason = recipe_of(2, 4, 1, 2, 1.5, 3, 1.9, 3)
        self.assertEqual(recipe, "mxfp8")
        self.assertIn("2.00 times as fast", reason)
        self.assertIn(
            "mxfp8 3 ms, most of it backward with 2 ms against bfloat16 6 ms, most of it "
            "backward with 4 ms" if training else
            "mxfp8 1 ms, most of it forward with 1 ms against bfloat16 2 ms", reason,
        )  # fmt: skip
        recipe, reason = recipe_of(2, 4, 3, 6, 4, 8, 2.5, 5)
        self.assertIsNone(recipe)
        self.assertIn("fp8_rowwise", reason)
        self.assertIn("1.25 times as slow", reason)

    @parametrize("activation", ["silu", "swiglu"])
    def test_saved_bytes_are_those_of_the_layer(self, activation):
        T, D, H, E, K = 512, 256, 96, 8, 4
        layer = torch.nn.MoE(
            D, H, num_experts=E, top_k=K, activation=activation, dtype=torch.bfloat16
        )
        with with_times(*[1.0] * 8):
            _, reason = select_recipe(layer, "cpu", tokens=T)
        found = re.search(r"keeps ([\d.]+) MiB with .*, and ([\d.]+) without", reason)
        x = torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True)
        parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        for recipe, text in zip(("mxfp8", None), found.groups()):
            layer.recipe, kept = recipe, {}

            def pack(t):
                storage = t.untyped_storage()
                if storage.data_ptr() not in parameters:
                    kept[storage.data_ptr()] = storage.nbytes()
                return t

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                y = layer(x)
            # The router's scores, which no recipe changes, are not counted.
            scores = T * E * 4 + T * K * 4
            self.assertLess(abs(float(text) * 2**20 - sum(kept.values())), 1.5 * scores)
            self.assertEqual(y.shape, x.shape)


class TestBadInput(TestCase):
    @parametrize(
        "change,error,text",
        [
            ({"config": "no-model"}, ValueError, "model must be one of"),
            ({"config": 3}, TypeError, "config must be a MoEConfig, the name of one or a module, got int"),
            ({"config": torch.nn.Linear(2, 2)}, ValueError, "neither a .config nor parameters"),
            ({"device": "H9000"}, ValueError, "device must be a device of this machine, one of A100"),
            ({"device": "meta"}, ValueError, "a torch.device is measured, so it must be one of ['cpu'"),
            ({"device": 3}, TypeError, "device must be a str, a torch.device or a Profile, got int"),
            ({"tokens": 0}, ValueError, "tokens must be an integer from 1 to 268,435,456, got 0"),
            ({"tokens": 1.5}, ValueError, "tokens must be an integer from 1 to 268,435,456, got 1.5"),
            ({"config": torch.nn.MoE(4, 4, 2, 1, dtype=torch.float64)}, ValueError, "got torch.float64"),
            ({"ep": 3}, ValueError, "ep must divide the experts, 8, got 3"),
            ({"ep": -1}, ValueError, "ep must be an integer from 1 to 65,536, got -1"),
            ({"seconds": -1}, ValueError, "seconds must be a number from 0.0 to 3,600.0, got -1"),
            ({"seconds": float("nan")}, ValueError, "seconds must be a number from 0.0"),
        ],
    )  # fmt: skip
    def test_errors(self, change, error, text):
        call = {"config": SMALL, "device": "B200", "tokens": 8, **change}
        with self.assertRaisesRegex(error, re.escape(text)):
            select_recipe(call.pop("config"), call.pop("device"), **call)

    def test_profile_of_a_cpu(self):
        p = profile("B200")
        cpu = Profile("a CPU", p.device, p.constants, cpu=CpuConstants())
        with self.assertRaisesRegex(ValueError, "a CPU is measured, not modelled"):
            select_recipe(SMALL, cpu, tokens=8)

    def test_layer_without_a_gate(self):
        layer = torch.nn.MoE(64, 32, num_experts=8, top_k=2, activation="relu2")
        with self.assertRaisesRegex(ValueError, "only gated layers are modelled"):
            select_recipe(layer, "H100", tokens=8)
        recipe, reason = select_recipe(layer, "cpu", tokens=8, seconds=0.0)
        self.assertIn("measured on cpu", reason)


instantiate_parametrized_tests(TestModelled)
instantiate_parametrized_tests(TestMeasured)
instantiate_parametrized_tests(TestBadInput)

if __name__ == "__main__":
    run_tests()
