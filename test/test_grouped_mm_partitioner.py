# Owner(s): ["oncall: pt2"]
"""The partitioner knows that a grouped matmul is too dear to run twice."""

import torch
import torch.nn.functional as F
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch._functorch import config
from torch._functorch.partitioners import get_default_op_list
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


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


instantiate_parametrized_tests(TestGroupedMMPartitioner)

if __name__ == "__main__":
    run_tests()
