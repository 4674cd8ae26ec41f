# Owner(s): ["oncall: export"]

import io

import torch
import torch.nn.functional as F
from torch.export import Dim, export, load, save
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


class MoeLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(16, 4)
        self.w_in = torch.nn.Parameter(torch.randn(4, 48, 16))
        self.w_out = torch.nn.Parameter(torch.randn(4, 16, 24))

    def forward(self, x):
        return F.moe_mlp(x, *F.moe_topk(self.router(x), 2), self.w_in, self.w_out)


def mlp_nodes(program):
    """The nodes of F.moe_mlp."""
    ops = (torch.ops.aten._moe_permutation.default, torch.ops.aten._moe_mlp.default)
    return [node for node in program.graph.nodes if node.target in ops]


@instantiate_parametrized_tests
class TestMoeExport(TestCase):
    @parametrize("grad", [False, True])
    @parametrize("dynamic", [False, True])
    def test_export(self, grad, dynamic):
        layer, x = MoeLayer(), torch.randn(9, 16)
        shapes = ({0: Dim("num_tokens")},) if dynamic else None
        with torch.set_grad_enabled(grad):
            program = export(layer, (x,), dynamic_shapes=shapes)
        # One op: whether the pre-activations are kept is decided where the program runs.
        targets = [node.target for node in program.graph.nodes]
        self.assertEqual(targets.count(torch.ops.aten.moe_mlp.default), 1)
        self.assertEqual(mlp_nodes(program), [])
        for num_tokens in (9, 3, 40) if dynamic else (9,):
            x = torch.randn(num_tokens, 16)
            self.assertEqual(program.module()(x), layer(x))

    def test_decompositions_keep_the_ops(self):
        layer = MoeLayer()
        program = export(layer, (torch.randn(9, 16),)).run_decompositions()
        names = ("_moe_permutation", "_moe_mlp")
        self.assertEqual(
            [node.target for node in mlp_nodes(program)],
            [getattr(torch.ops.aten, name).default for name in names],
        )

    def test_inference_program_does_not_write_preactivations(self):
        # Exported in grad mode, as most are, and decomposed without.
        layer, x = MoeLayer(), torch.randn(9, 16)
        program = export(layer, (x,), dynamic_shapes=({0: Dim("num_tokens")},))
        program = program.run_decompositions()
        _, mlp = mlp_nodes(program)
        self.assertFalse(mlp.kwargs["compute_preact"])
        self.assertEqual(mlp.meta["val"][1].shape, (0, 48))
        x = torch.randn(5, 16)
        self.assertEqual(program.module()(x), layer(x))

    def test_save_and_load(self):
        layer, x = MoeLayer(), torch.randn(9, 16)
        file = io.BytesIO()
        save(export(layer, (x,)), file)
        file.seek(0)
        self.assertEqual(load(file).module()(x), layer(x))

    @parametrize("decomposed", [False, True])
    def test_exported_program_trains(self, decomposed):
        layer, x = MoeLayer(), torch.randn(9, 16)
        program = export(layer, (x,))
        module = (program.run_decompositions() if decomposed else program).module()
        expected = torch.autograd.grad(layer(x).sum(), layer.w_in)
        self.assertEqual(torch.autograd.grad(module(x).sum(), module.w_in), expected)


if __name__ == "__main__":
    run_tests()
