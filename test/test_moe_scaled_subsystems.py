# Owner(s): ["module: nn"]

"""_moe_mlp_scaled in other subsystems: FLOPs, autocast, graphs, packages, DTensor."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_generators import MoeCase
from torch.utils.flop_counter import FlopCounterMode


T, K, E, D, H = 24, 2, 4, 64, 96
CASE = MoeCase("layer", num_tokens=T, dim=D, hidden=H, num_experts=E, top_k=K)
RECIPES = tuple(F._MOE_RECIPES)
recipes = parametrize("recipe", RECIPES)
op = torch.ops.aten._moe_mlp_scaled.default


def operands(dtype=torch.bfloat16, requires_grad=True, case=CASE):
    ops = case.operands(dtype, requires_grad=requires_grad)
    return (
        ops.input,
        ops.topk_indices,
        ops.topk_weights,
        ops.w_in,
        ops.w_out,
    ), ops.grad_out


def gradients(y, args, grad_out):
    leaves = [x for x in args if x.requires_grad]
    return torch.autograd.grad(y, leaves, grad_out.to(y.dtype))


class TestScaledSubsystems(TestCase):
    def assert_same(self, one, other):
        for a, b in zip(one, other, strict=True):
            self.assertEqual(a, b, rtol=0, atol=0)

    def test_flops(self):
        args, grad_out = operands()
        forward = 2 * T * K * 3 * D * H
        for options, again in (({}, 0), ({"recompute": True}, 2 * T * K * 2 * D * H)):
            with FlopCounterMode(display=False) as counter:
                y = F.scaled_moe_mlp(*args, **options)
            self.assertEqual(counter.get_total_flops(), forward)
            with FlopCounterMode(display=False) as counter:
                gradients(y, args, grad_out)
            self.assertEqual(counter.get_total_flops(), 2 * forward + again)
        # Weights that are already quantised, here to 4 bits.
        rows, slots, offs, _ = torch._moe_permutation(args[1], E)
        code = F.ScalingType.BlockWise1x32.value
        lists = [
            [
                torch.empty(E, n, k // 2, dtype=torch.uint8).view(
                    torch.float4_e2m1fn_x2
                ),
                torch.ones(E, n, k // 32, dtype=torch.float8_e8m0fnu),
            ]
            for n, k in ((2 * H, D), (D, H))
        ]
        with FlopCounterMode(display=False) as counter:
            op(
                args[0].detach(),
                None,
                None,
                offs,
                None,
                rows,
                slots,
                None,
                None,
                None,
                [],
                *lists,
                [],
                recipe_w=[code],
                compute_preact=False,
            )
        self.assertEqual(counter.get_total_flops(), forward)

    @recipes
    def test_autocast(self, recipe):
        args, grad_out = operands(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            y = F.moe_mlp(*args, recipe=recipe)
        self.assertEqual(y.dtype, torch.bfloat16)
        grads = gradients(y, args, grad_out)
        self.assertEqual({g.dtype for g in grads}, {torch.float32})
        # Rows in bfloat16, parameters quantised from float32.
        low = [args[0].detach().bfloat16().requires_grad_(), *args[1:]]
        expected = F.moe_mlp(*low, recipe=recipe)
        self.assertEqual(y, expected, rtol=0, atol=0)
        others = gradients(expected, low, grad_out)
        self.assert_same(
            grads, [g.to(x.dtype) for g, x in zip(others, grads, strict=True)]
        )

    @recipes
    def test_decomposed_program_casts(self, recipe):
        class Layer(torch.nn.Module):
            def forward(self, *args):
                with torch.autocast("cpu", torch.bfloat16):
                    return F.moe_mlp(*args, recipe=recipe)

        args = tuple(arg.detach() for arg in operands(torch.float32)[0])
        exported = torch.export.export(Layer(), args).run_decompositions()
        expected = Layer()(*args)
        self.assertEqual(expected.dtype, torch.bfloat16)
        self.assertEqual(exported.module()(*args), expected, rtol=0, atol=0)

    @recipes
    @parametrize("dynamic", [False, True])
    def test_compile(self, recipe, dynamic):
        def layer(x, *rest):
            return F.moe_mlp(x * 2, *rest, recipe=recipe) + 1

        compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
        for tokens in (T, T + 9)[: 1 + dynamic]:
            args, grad_out = operands(
                case=MoeCase("c", num_tokens=tokens, dim=D, hidden=H, num_experts=E)
            )
            y, expected = compiled(*args), layer(*args)
            self.assertEqual(y, expected, rtol=0, atol=0)
            self.assert_same(
                gradients(y, args, grad_out), gradients(expected, args, grad_out)
            )

    def test_partitioner_saves_bytes_and_runs_once(self):
        """The compiled layer saves the same tensors as the eager one, and no product runs twice."""
        args, grad_out = operands()
        graphs = []

        def keep(graph_module, example_inputs):
            graphs.append(graph_module)
            return nop(graph_module, example_inputs)

        compiled = aot_function(
            lambda *a: F.moe_mlp(*a, recipe="mxfp8"),
            fw_compiler=keep,
            bw_compiler=keep,
            partition_fn=min_cut_rematerialization_partition,
        )
        gradients(compiled(*args), args, grad_out)
        forward, backward = (g.graph for g in graphs)
        self.assertEqual(len(forward.find_nodes(op="call_function", target=op)), 1)
        self.assertEqual(len(backward.find_nodes(op="call_function", target=op)), 0)
        saved = [n.meta["val"] for n in forward.output_node().args[0][1:]]
        parameters = {x.shape for x in args[3:]}
        saved = [
            v
            for v in saved
            if isinstance(v, torch.Tensor) and v.shape not in parameters
        ]
        elements = T * D + T * K * 2 * H
        total = sum(v.numel() * v.element_size() for v in saved)
        self.assertLessEqual(total, elements * 33 // 32 + 24 * T * K + 8 * E)
        self.assertGreater(total, elements)

    @recipes
    def test_export_and_aoti(self, recipe):
        class Layer(torch.nn.Module):
            def forward(self, x, ids, weights, w_in, w_out):
                return F.moe_mlp(x, ids, weights, w_in, w_out, recipe=recipe)

        args, _ = operands(requires_grad=False)
        tokens = torch.export.Dim("tokens", min=2, max=4096)
        shapes = ({0: tokens}, {0: tokens}, {0: tokens}, None, None)
        program = torch.export.export(Layer(), args, dynamic_shapes=shapes)
        other, _ = operands(
            requires_grad=False,
            case=MoeCase("o", num_tokens=T + 7, dim=D, hidden=H, num_experts=E),
        )
        for inputs in (args, other):
            self.assertEqual(
                program.module()(*inputs), Layer()(*inputs), rtol=0, atol=0
            )
        if recipe != "mxfp8":
            return
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "layer.pt2")
            torch._inductor.aoti_compile_and_package(program, package_path=path)
            package = torch._inductor.aoti_load_package(path)
            for inputs in (args, other):
                self.assertEqual(package(*inputs), Layer()(*inputs), rtol=0, atol=0)

    def test_dtensor(self):
        dist.init_process_group("fake", rank=0, world_size=2)
        try:
            mesh = DeviceMesh("cpu", [0, 1])
            args, grad_out = operands()
            expected = F.moe_mlp(*args, recipe="mxfp8")

            def place(x, placement=None):
                leaf = x.detach().clone()
                made = DTensor.from_local(
                    leaf, mesh, [placement or Replicate()], run_check=False
                )
                return made.requires_grad_(x.requires_grad)

            placed = [place(x) for x in args]
            y = F.moe_mlp(*placed, recipe="mxfp8")
            self.assertEqual(y.placements, (Replicate(),))
            self.assertEqual(y.to_local(), expected, rtol=0, atol=0)
            grads = gradients(y, placed, place(grad_out))
            for one, other in zip(
                grads, gradients(expected, args, grad_out), strict=True
            ):
                self.assertEqual(one.to_local(), other, rtol=0, atol=0)
            sharded = [*placed[:3], *(place(w, Shard(0)) for w in args[3:])]
            offs = place(torch.zeros(2 * E, dtype=torch.int32))
            with self.assertRaisesRegex(
                NotImplementedError, "dimension 0 of w_in counts experts"
            ):
                op(
                    sharded[0],
                    sharded[3],
                    sharded[4],
                    offs,
                    *[None] * 6,
                    [],
                    [],
                    [],
                    [],
                    recipe_a=[3],
                    recipe_w=[3],
                )
        finally:
            dist.destroy_process_group()


instantiate_parametrized_tests(TestScaledSubsystems)

if __name__ == "__main__":
    run_tests()
