# Owner(s): ["oncall: distributed"]

import dataclasses
import functools
import gc
import weakref

from moe_token_switch import (
    leaves_of,
    local_truth,
    OneRankCompileTest,
    run_layer,
    run_on_local_ranks,
    truth_of,
)

import torch
import torch.distributed as dist
from torch._dynamo import lookup_backend
from torch.distributed._moe.all_to_all import (
    TokenSwitchAllToAll,
    TokenSwitchHierarchical,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_moe import slow_subtest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
    TestCase,
)
from torch.testing._internal.moe_generators import get_case, moe_cases, ROUTINGS


@functools.cache
def shape_truth(name, experts):
    case = get_case(name)
    return truth_of(
        dataclasses.replace(
            case, num_experts=experts, num_rows=None, row_alignment=1
        ).operands()
    )


class TestGroups(TestCase):
    def test_switches_let_go_of_their_groups(self):
        """A model may outlive destroy_process_group. If it kept a gloo group alive, the group's
        threads would end in the interpreter's shutdown, which sometimes aborts."""
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("node", "local"))
        groups = [dist.new_group([0]), *mesh.get_all_groups()]
        switches = [
            TokenSwitchAllToAll(groups[0], 64),
            TokenSwitchHierarchical(mesh, 64, capacity=(128, 128)),
        ]
        operands = local_truth("uniform").operands
        for switch in switches:
            switch.use_own_groups()
            leaves = leaves_of(operands)
            run_layer(switch, operands.topk_indices, *leaves).sum().backward()
        refs = [weakref.ref(group) for group in groups]
        del groups, mesh
        dist.destroy_process_group()
        gc.collect()
        self.assertEqual([ref() for ref in refs], [None] * 3)
        # Using them after that raises an error.
        with self.assertRaisesRegex(RuntimeError, r"ranks \[0\] was destroyed"):
            switches[0].create_routing(operands.topk_indices)


@instantiate_parametrized_tests
class TestLocalRanks(TestCase):
    """Many ranks in one process, because the switch does not branch on data."""

    def switch(self, combine, capacity):
        return lambda: TokenSwitchAllToAll(
            dist.group.WORLD, 64, combine=combine, capacity=capacity
        )

    @parametrize("routing", list(ROUTINGS))
    @parametrize("combine", ["reduce", "exact"])
    @parametrize("ranks", [2, 4, 8, 16, 64])
    def test_static_matches_one_rank(self, routing, combine, ranks):
        want = local_truth(routing)
        make = self.switch(combine, 128 // ranks)
        got = run_on_local_ranks(ranks, want.operands, make)
        want.check_all(got, exact=combine == "exact")

    @parametrize("routing", list(ROUTINGS))
    @parametrize("combine", ["reduce", "exact"])
    def test_compact_matches_one_rank(self, routing, combine):
        want = local_truth(routing)
        # Ranks without tokens, and one with most of them.
        shares = [0, 100, 0, 5, 7, 0, 0, 16]
        got = run_on_local_ranks(8, want.operands, self.switch(combine, None), shares)
        want.check_all(got, exact=combine == "exact")

    @parametrize("ep", [1, 4, *(slow_subtest(n) for n in (2, 8))])
    def test_every_generator_shape(self, ep):
        for i, case in enumerate(moe_cases()):
            # The switch does not use the case's row plan. ep must divide the number of experts.
            experts = -(-case.num_experts // ep) * ep
            want = shape_truth(case.name, experts)
            T = case.num_tokens
            shares = [T // ep + (r < T % ep) for r in range(ep)]
            # Over all ep, every shape meets every mode.
            mode = i + ep.bit_length()
            combine = "exact" if mode % 2 else "reduce"
            capacity = max(T, 1) if mode // 2 % 2 else None

            def make():
                return TokenSwitchAllToAll(
                    dist.group.WORLD, experts, combine=combine, capacity=capacity
                )

            with self.subTest(case=case.name, combine=combine, capacity=capacity):
                got = run_on_local_ranks(ep, want.operands, make, shares)
                want.check_all(got, exact=combine == "exact")

    def test_overflow_raises(self):
        want = local_truth("one_expert")
        with self.assertRaisesRegex(RuntimeError, "needed 16 rows but capacity is 15"):
            run_on_local_ranks(8, want.operands, self.switch("reduce", 15))


@instantiate_parametrized_tests
class TestCompile(OneRankCompileTest):
    @parametrize("capacity", [None, 128])
    def test_one_graph(self, capacity):
        combine = "exact" if capacity is None else "reduce"
        switch = TokenSwitchAllToAll(
            dist.group.WORLD, 64, combine=combine, capacity=capacity
        )
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return lookup_backend("aot_eager")(graph, inputs)

        self.check_bits(
            switch, torch.compile(run_layer, backend=backend, fullgraph=True)
        )
        self.assertEqual(len(graphs), 1)
        # The host reads nothing in static mode, and otherwise elements of one tensor.
        read = [n for n in graphs[0].graph.nodes if n.target == "item"]
        tensors = {n.args[0].args[0] for n in read}
        self.assertEqual(len(tensors), 1 if capacity is None else 0)

    @parametrize("capacity", [None, 4])
    def test_a_rank_without_tokens(self, capacity):
        switch = TokenSwitchAllToAll(dist.group.WORLD, 64, capacity=capacity)
        operands = local_truth("uniform").operands
        leaves = leaves_of(operands, slice(0))
        compiled = torch.compile(run_layer, backend="aot_eager", fullgraph=True)
        y = compiled(switch, operands.topk_indices[:0], *leaves)
        self.assertEqual(y.shape, (0, 8))
        y.sum().backward()
        self.assertEqual(leaves[2].grad.count_nonzero(), 0)

    @slowTest
    def test_inductor(self):
        switch = TokenSwitchAllToAll(dist.group.WORLD, 64)
        self.check_bits(switch, torch.compile(run_layer, fullgraph=True))


if __name__ == "__main__":
    run_tests()
