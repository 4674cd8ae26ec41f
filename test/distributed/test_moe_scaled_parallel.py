# Owner(s): ["oncall: distributed"]
"""Recipes of nn.MoE alone, under expert parallelism with an FP8 wire, and under FSDP2."""

import copy
from unittest import mock

from moe_gloo import GlooTest

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._moe import all_to_all, payload
from torch.distributed._moe.overlap_schedule import OverlapSchedule, sequential_schedule
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ExpertParallel, parallelize_module
from torch.distributed.tensor.parallel.expert_parallel import token_switches
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


# Two blocks of the wire, the second one short.
D, H, E, K, T = 160, 48, 4, 2, 22
FP8 = torch.float8_e4m3fn
RECIPES = tuple(F._MOE_RECIPES)


def layer_of(recipe, dtype=torch.bfloat16, kind=nn.MoE):
    torch.manual_seed(0)
    return kind(D, H, num_experts=E, top_k=K, recipe=recipe, dtype=dtype)


def run(layer, x, grad):
    """Output, and gradients of the input and of the router."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, layer.router.weight.grad


def own_schedule(*args):
    return sequential_schedule(*args)


class TestWireRows(TestCase):
    @parametrize("dim", [1, 128, 300])
    def test_codes_and_scales_are_the_rows(self, dim):
        x = torch.randn(9, dim) * torch.logspace(-20, 20, 9)[:, None]
        x[3], x[4, 0] = 0, torch.inf
        packed = payload.encode(x, FP8)
        data, scale = payload.scaled_rows(packed, dim)
        code = torch.nn.functional.ScalingType.BlockWise1x128.value
        codes, scales = torch.ops.aten._moe_quantize(x, code)
        self.assertEqual(data.view(torch.uint8), codes.view(torch.uint8))
        finite = scales.isfinite()
        self.assertEqual(scale[finite], scales[finite], atol=0, rtol=0)
        self.assertFalse(scale[~finite].isfinite().any())
        # A view of the received buffer, not a copy.
        self.assertEqual(data.untyped_storage().data_ptr(), packed.data_ptr())

    def test_rule_is_that_of_the_op(self):
        torch.manual_seed(0)
        x = torch.randn(50, 300) * torch.exp2(torch.randint(-140, 120, (50, 300)))
        x[0, 0], x[1] = torch.inf, 0
        # The exponent changes at powers of two times 448.
        x[2, 0], x[3, 0], x[4, 0] = 448.0, 448.0001, 3.4e38
        for rows in (x, x.bfloat16()):
            # In float64, where torch ops compute the rule.
            want = payload.encode(rows.double(), FP8)
            self.assertEqual(payload.encode(rows, FP8), want)


class TestModule(TestCase):
    def test_no_such_recipe(self):
        with self.assertRaisesRegex(
            ValueError, "recipe must be one of None.*, got 'fp7'"
        ):
            layer_of("fp7")

    @parametrize("recipe", RECIPES)
    def test_module(self, recipe):
        torch.manual_seed(0)
        layer = torch.nn.MoE(
            64, 96, num_experts=4, top_k=2, shared_hidden_dim=32, recipe=recipe
        )
        self.assertIn(f"recipe='{recipe}'", repr(layer))
        x = torch.randn(3, 10, 64)
        y = layer(x)
        logits, ids, weights = layer.route(x)
        routed = F.moe_mlp(x, ids, weights, layer.w_in, layer.w_out, recipe=recipe)
        self.assertEqual(y, routed + layer.run_shared(x), rtol=0, atol=0)
        # The recipe is no part of the state, and can be taken away.
        other = torch.nn.MoE(64, 96, num_experts=4, top_k=2, shared_hidden_dim=32)
        other.load_state_dict(layer.state_dict())
        self.assertEqual(other.recipe, None)
        copied = copy.deepcopy(layer)
        self.assertEqual(copied(x), y, rtol=0, atol=0)
        copied.recipe = None
        self.assertEqual(copied(x), other(x), rtol=0, atol=0)


class TestScaledParallel(GlooTest):
    world_size = 2

    def parts(self):
        """Tokens and gradients of all ranks, and the slice of this one (9 and 13)."""
        gen = torch.Generator().manual_seed(1)
        x, grad = (torch.randn(T, D, generator=gen).bfloat16() for _ in range(2))
        return x, grad, slice(0, 9) if self.rank == 0 else slice(9, T)

    def parallel(self, layer, **options):
        style = ExpertParallel(wire_dtype=FP8, **options)
        return parallelize_module(copy.deepcopy(layer), self.mesh(("ep",), 2), style)

    @parametrize("schedule", ["sequential", "overlap"])
    @parametrize("capacity", [None, T * K])
    def test_rows_go_into_the_op_as_they_came(self, schedule, capacity):
        x, grad, mine = self.parts()
        layer = layer_of("fp8_blockwise")
        want = run(layer, x, grad)
        options = {"schedule": OverlapSchedule(2)} if schedule == "overlap" else {}
        parallel = self.parallel(layer, combine="exact", capacity=capacity, **options)
        # A conversion of the rows would call decode. The values of the rows are NaN.
        with mock.patch.object(all_to_all, "decode", side_effect=AssertionError):
            got = run(parallel, x[mine], grad[mine])
        (switch,) = token_switches(parallel)
        self.assertTrue(switch.keep_scaled)
        # The wire and the recipe have the same codes, so the bits equal those of one process.
        for i in range(2):
            self.assertEqual(got[i], want[i][mine], atol=0, rtol=0)
        router = got[2]
        dist.all_reduce(router)
        self.assertEqual(router, want[2], atol=2e-2, rtol=2e-2)
        for name in ("w_in", "w_out"):
            g = parallel.get_parameter(name).grad.full_tensor()
            w = layer.get_parameter(name).grad
            error = (g - w).float().norm() / w.float().norm()
            self.assertLess(error.item(), 1e-2)

    @parametrize("ranks_per_node", [None, 1])
    def test_sums_on_the_way(self, ranks_per_node):
        x, grad, mine = self.parts()
        layer = layer_of("fp8_blockwise")
        want = run(layer, x, grad)
        options = {}
        if ranks_per_node is not None:
            options = {"token_switch": "hierarchical", "ranks_per_node": ranks_per_node}
        got = run(self.parallel(layer, **options), x[mine], grad[mine])
        for i in range(2):
            self.assertEqual(got[i], want[i][mine], atol=3e-2, rtol=3e-2)

    @parametrize("case", ["mxfp8", "no recipe", "own schedule", "own experts"])
    def test_others_get_values(self, case):
        class Own(nn.MoE):
            def run_routed(self, input, topk_indices, topk_weights, num_rows=None):
                return super().run_routed(input, topk_indices, topk_weights, num_rows)

        recipe = {"mxfp8": "mxfp8", "no recipe": None}.get(case, "fp8_blockwise")
        layer = layer_of(recipe, kind=Own if case == "own experts" else nn.MoE)
        x, grad, mine = self.parts()
        options = {"schedule": own_schedule} if case == "own schedule" else {}
        parallel = self.parallel(layer, combine="exact", **options)
        with mock.patch.object(all_to_all, "decode", wraps=payload.decode) as decode:
            got = run(parallel, x[mine], grad[mine])
        self.assertEqual(decode.call_count, 1)
        if recipe == "fp8_blockwise":
            # Decoding loses nothing, because quantising again gives the same codes.
            want = run(layer, x, grad)
            self.assertEqual(got[0], want[0][mine], atol=0, rtol=0)
        self.assertTrue(all(t.isfinite().all() for t in got))

    def test_recipe_can_change(self):
        x, grad, mine = self.parts()
        layer = layer_of("fp8_blockwise")
        parallel = self.parallel(layer, combine="exact")
        for recipe in ("fp8_blockwise", None, "fp8_blockwise"):
            layer.recipe = parallel.recipe = recipe
            got = parallel(x[mine])
            (switch,) = token_switches(parallel)
            self.assertEqual(switch.keep_scaled, recipe is not None)
            if recipe is not None:
                self.assertEqual(got, layer(x)[mine], atol=0, rtol=0)

    def test_rows_of_16_bits_are_never_made(self):
        x, _, mine = self.parts()
        original, seen = nn.MoE.run_routed, []

        def run_routed(self, input, *args, input_scaled=()):
            seen.append((input, *input_scaled))
            return original(self, input, *args, input_scaled=input_scaled)

        with (
            mock.patch.object(nn.MoE, "run_routed", run_routed),
            mock.patch.dict(nn.modules.moe._METHODS, run_routed=run_routed),
        ):
            self.parallel(layer_of("fp8_blockwise"))(x[mine])
        ((rows, data, scale),) = seen
        self.assertEqual(rows.untyped_storage().nbytes(), rows.element_size())
        self.assertEqual(data.dtype, FP8)
        self.assertEqual((data.shape, scale.shape), (rows.shape, (len(rows), 2)))

    @parametrize("recipe", RECIPES)
    def test_fsdp(self, recipe):
        x, grad, mine = self.parts()
        layer = layer_of(recipe, torch.float32)
        sharded = copy.deepcopy(layer)
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
        fully_shard(sharded, mesh=self.mesh(("ep",), 2), mp_policy=policy)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (layer, sharded)]
        for _ in range(2):
            # Each rank's part of the batch in one process, with the parameters in bfloat16.
            parts, grads = [], []
            for part in (slice(0, 9), slice(9, T)):
                whole = copy.deepcopy(layer).bfloat16()
                parts.append(run(whole, x[part], grad[part])[:2])
                grads.append([p.grad.float() for p in whole.parameters()])
            got = run(sharded, x[mine], grad[mine])
            for g, w in zip(got[:2], parts[self.rank], strict=True):
                self.assertEqual(g, w, atol=0, rtol=0)
            for p, q, *g in zip(
                layer.parameters(), sharded.parameters(), *grads, strict=True
            ):
                p.grad = sum(g) / 2
                self.assertEqual(q.grad.full_tensor(), p.grad, atol=0, rtol=0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


instantiate_parametrized_tests(TestModule)
instantiate_parametrized_tests(TestWireRows)
instantiate_parametrized_tests(TestScaledParallel)

if __name__ == "__main__":
    run_tests()
