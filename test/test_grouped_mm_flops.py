# Owner(s): ["module: nn"]
"""What the subsystems know of the grouped matmuls: FLOPs, and that they cost too much to redo."""

import torch
import torch.nn.functional as F
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch._functorch import config
from torch._functorch.partitioners import get_default_op_list
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.utils.flop_counter import FlopCounterMode


# T rows in G groups, K summands, N columns: all different, so that a formula
# that mixes two of them up gives another number.
G, T, K, N = 3, 40, 16, 24
OFFS = (8, 16, 40)

# layout: (shape of mat_a, shape of mat_b, has offs, FLOPs)
LAYOUTS = {
    "2d_3d": ((T, K), (G, K, N), True, 2 * T * K * N),
    "3d_3d": ((G, T, K), (G, K, N), False, 2 * G * T * K * N),
    "2d_2d": ((K, T), (T, N), True, 2 * K * T * N),
    "3d_2d": ((G, N, K), (K, T), True, 2 * N * K * T),
}


def executed_flops(mat_a, mat_b, offs):
    """FLOPs of the same product written as a loop of ``mm``."""
    starts = (0, *OFFS[:-1])
    with FlopCounterMode(display=False) as counter:
        for group, (start, end) in enumerate(zip(starts, OFFS)):
            if offs is None:
                torch.mm(mat_a[group], mat_b[group])
            elif mat_a.dim() == 2 and mat_b.dim() == 3:
                torch.mm(mat_a[start:end], mat_b[group])
            elif mat_a.dim() == 2:
                torch.mm(mat_a[:, start:end], mat_b[start:end])
            else:
                torch.mm(mat_a[group], mat_b[:, start:end])
    return counter.get_total_flops()


class TestGroupedMMFlops(TestCase):
    def _operands(self, a_shape, b_shape, ragged, requires_grad=False):
        mat_a = torch.randn(a_shape, dtype=torch.bfloat16, requires_grad=requires_grad)
        mat_b = torch.randn(b_shape, dtype=torch.bfloat16, requires_grad=requires_grad)
        offs = torch.tensor(OFFS, dtype=torch.int32) if ragged else None
        return mat_a, mat_b, offs

    @parametrize("layout", list(LAYOUTS))
    def test_forward(self, layout):
        a_shape, b_shape, ragged, expected = LAYOUTS[layout]
        mat_a, mat_b, offs = self._operands(a_shape, b_shape, ragged)
        with FlopCounterMode(display=False) as counter:
            F.grouped_mm(mat_a, mat_b, offs=offs)
        self.assertEqual(counter.get_total_flops(), expected)
        self.assertEqual(executed_flops(mat_a, mat_b, offs), expected)

    @parametrize("layout", list(LAYOUTS))
    def test_backward(self, layout):
        a_shape, b_shape, ragged, expected = LAYOUTS[layout]
        operands = self._operands(a_shape, b_shape, ragged, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            out = F.grouped_mm(*operands[:2], offs=operands[2])
            out.backward(torch.ones_like(out))
        self.assertEqual(counter.get_total_flops(), 3 * expected)

    def test_one_gradient(self):
        mat_a, mat_b, offs = self._operands((T, K), (G, K, N), True)
        mat_a.requires_grad_()
        with FlopCounterMode(display=False) as counter:
            out = F.grouped_mm(mat_a, mat_b, offs=offs)
            out.backward(torch.ones_like(out))
        self.assertEqual(counter.get_total_flops(), 2 * 2 * T * K * N)

    def test_left_over_rows_are_an_upper_bound(self):
        mat_a, mat_b, _ = self._operands((T, K), (G, K, N), True)
        offs = torch.tensor((8, 16, 24), dtype=torch.int32)
        with FlopCounterMode(display=False) as counter:
            F.grouped_mm(mat_a, mat_b, offs=offs)
        self.assertEqual(counter.get_total_flops(), 2 * T * K * N)

    def test_scaled_grouped_mm(self):
        with FakeTensorMode(), FlopCounterMode(display=False) as counter:
            mat_a = torch.empty(T, K, device="cuda", dtype=torch.float8_e4m3fn)
            mat_b = torch.empty(G, N, K, device="cuda", dtype=torch.float8_e4m3fn)
            torch._scaled_grouped_mm(
                mat_a,
                mat_b.transpose(-2, -1),
                torch.empty(T, device="cuda"),
                torch.empty(G, N, device="cuda"),
                torch.empty(G, device="cuda", dtype=torch.int32),
                out_dtype=torch.bfloat16,
            )
        self.assertEqual(counter.get_total_flops(), 2 * T * K * N)

    def test_formula_of_every_grouped_op(self):
        for op in ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"):
            formula = FlopCounterMode(display=False).flop_registry[
                getattr(torch.ops.aten, op)
            ]
            for name, (a_shape, b_shape, _, expected) in LAYOUTS.items():
                flops = formula(torch.empty(a_shape), torch.empty(b_shape))
                self.assertEqual(flops, expected, msg=f"{op} {name}")


def grouped(x, w, offs):
    return F.grouped_mm(x, w, offs=offs).sin().cos()


def dense(x, w, offs):
    return torch.mm(x, w[0]).sin().cos()


def count(graph_module, op):
    return len(graph_module.graph.find_nodes(op="call_function", target=op))


class TestGroupedMMPartitioner(TestCase):
    def _backward_graph(self, function):
        graphs = []

        def keep(graph_module, _):
            graphs.append(graph_module)
            return nop(graph_module, _)

        x = torch.randn(32, 32, requires_grad=True)
        w = torch.randn(2, 32, 32, requires_grad=True)
        compiled = aot_function(
            function,
            fw_compiler=nop,
            bw_compiler=keep,
            partition_fn=min_cut_rematerialization_partition,
        )
        out = compiled(x, w, torch.tensor((16, 32), dtype=torch.int32))
        out.backward(torch.ones_like(out))
        self.assertEqual(len(graphs), 1)
        return graphs[0]

    @parametrize("aggressive", (False, True))
    def test_not_recomputed(self, aggressive):
        # ``x`` and ``w`` are saved anyway, so the minimum cut would rather
        # recompute the product than save it; with aggressive recomputation
        # only the list of compute-intensive ops keeps it from doing so.
        with config.patch(aggressive_recomputation=aggressive):
            self.assertEqual(
                count(self._backward_graph(dense), torch.ops.aten.mm.default), 2
            )
            self.assertEqual(
                count(
                    self._backward_graph(grouped), torch.ops.aten._grouped_mm.default
                ),
                2,
            )

    @parametrize("name", ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"))
    def test_listed(self, name):
        ops = get_default_op_list()
        self.assertIn(getattr(torch.ops.aten, name), ops.compute_intensive_ops)


instantiate_parametrized_tests(TestGroupedMMFlops)
instantiate_parametrized_tests(TestGroupedMMPartitioner)

if __name__ == "__main__":
    run_tests()
