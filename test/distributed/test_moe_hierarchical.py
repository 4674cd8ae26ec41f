# Owner(s): ["oncall: distributed"]

import functools

from moe_placement import deduplicated_rows
from moe_token_switch import (
    CASE,
    host_reads,
    local_truth,
    metadata_bytes,
    OneRankCompileTest,
    run_layer,
    run_on_local_ranks,
    TokenSwitchTest,
    truth,
)

import torch
from torch.distributed._moe.all_to_all import grow_and_rerun, TokenSwitchHierarchical
from torch.distributed._moe.wire_bytes import count_wire_bytes
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_generators import ROUTINGS


@instantiate_parametrized_tests
class TestHierarchical(TokenSwitchTest):
    def switch(self, num_experts=8, nodes=2, **kwargs):
        mesh = self.mesh(None, nodes, 4 // nodes)
        return TokenSwitchHierarchical(mesh, num_experts, **kwargs)

    @parametrize("routing", list(ROUTINGS))
    @parametrize("combine", ["reduce", "exact"])
    def test_matches_one_rank(self, routing, combine):
        self.check_matches_one_rank(self.switch, routing, combine)

    @parametrize("nodes", [1, 4])
    def test_one_node_and_nodes_of_one_rank(self, nodes):
        want = truth("zipf")
        tokens, experts = self.part(4, "gaps")
        for combine in ("reduce", "exact"):
            switch = self.switch(nodes=nodes, combine=combine)
            got = self.run_switch(switch, want.operands, tokens, experts)
            self.check(got, want, tokens, experts, exact=combine == "exact")

    @parametrize("combine", ["reduce", "exact"])
    def test_static_gives_the_compact_bits(self, combine):
        switch = functools.partial(self.switch, combine=combine)
        self.check_static(switch, ("zipf", "sentinels", "skewed"), capacity=(17, 17))

    @parametrize("combine", ["reduce", "exact"])
    def test_overflow_of_each_level(self, combine):
        operands = truth("one_expert").operands
        part = self.part(4, "gaps")
        compact = self.run_switch(self.switch(combine=combine), operands, *part)
        for capacity, level, needed in (((2, 17), "node", 9), ((17, 3), "local", 16)):
            switch = self.switch(combine=combine, capacity=capacity)
            self.run_switch(switch, operands, *part)
            with self.assertRaisesRegex(
                RuntimeError, f"needed {needed} rows but capacity of level '{level}'"
            ):
                switch.check_overflow()
        # Rows that the first level drops do not reach the second, so two reruns are needed.
        switch = self.switch(combine=combine, capacity=(2, 3))
        got = self.run_switch(switch, operands, *part, rerun=grow_and_rerun)
        self.assertEqual(switch.capacity, (9, 16))
        self.assert_same_bits(got, compact)

    def test_wire_bytes_are_the_deduplicated_minimum(self):
        T, D, K, E = 64, 2048, 8, 32
        generator = torch.Generator().manual_seed(0)
        ids = [
            torch.rand(T, E, generator=generator).argsort(1)[:, :K] for _ in range(4)
        ]
        mine = ids[self.rank]
        x, weights = torch.randn(T, D).bfloat16(), torch.rand(T, K)
        # The minimum by its definition, for 2 nodes of 2 ranks of 8 experts.
        node = sum(
            len({e // 16 for e in row} - {self.rank // 2}) for row in mine.tolist()
        )
        local = sum(
            (self.rank ^ 1) in {e // 8 for e in row}
            for source, other in enumerate(ids)
            if source % 2 == self.rank % 2
            for row in other.tolist()
        )
        minimum = deduplicated_rows(ids, E, (2, 2))
        self.assertEqual(minimum["node"][self.rank], node)
        self.assertEqual(minimum["local"][self.rank], local)
        # The flat switch sends a token to both ranks of the other node.
        flat = deduplicated_rows(ids, E, (4,))["flat"]
        self.assertLess(sum(minimum["node"]), 0.6 * sum(flat))

        for wire_dtype, size in ((None, 2), (torch.float8_e4m3fn, 1)):
            switch = self.switch(E, wire_dtype=wire_dtype)
            with count_wire_bytes(switch) as sent:
                routing = switch.create_routing(mine)
                switch.dispatch(routing, x, weights)
            for level, rows in (("node", node), ("local", local)):
                bf16 = rows * D * 2
                payload, scales = sent.sent[level]["rows"], sent.sent[level]["scales"]
                self.assertEqual(payload, rows * D * size)
                self.assertEqual(scales, rows * D // 128 if size == 1 else 0)
                self.assertLessEqual(metadata_bytes(sent.sent[level]), 0.02 * bf16)
                if size == 1:
                    self.assertLessEqual(payload + scales, 0.52 * bf16)

    def test_wire_dtype_rounds_the_rows_once(self):
        self.check_rounded_once(self.switch, torch.float8_e4m3fn)

    @parametrize("capacity", [None, (17, 17)])
    def test_host_reads(self, capacity):
        """Host syncs: none in static mode. In compact mode, one for the sizes of both levels.

        Not counted: the comparison of arguments at the first use of a switch.
        """
        switch = self.switch(capacity=capacity)
        tokens, _ = self.part(4, "even")
        ids = CASE.topk_indices()[tokens]
        x = torch.randn(ids.shape[0], 8, requires_grad=True)
        weights = torch.rand(ids.shape, requires_grad=True)
        switch.dispatch(switch.create_routing(ids), x, weights)
        with host_reads() as read:
            routing = switch.create_routing(ids)
            rows, row_weights, _ = switch.dispatch(routing, x, weights)
            y = switch.combine(routing, rows * row_weights.sum(1, keepdim=True))
            y.sum().backward()
        self.assertEqual(len(read), 1 if capacity is None else 0)

    def test_counts(self):
        ids = CASE.topk_indices()
        for combine in ("reduce", "exact"):
            counts = torch.zeros(2, dtype=torch.int32)
            self.switch(combine=combine).create_routing(ids, counts)
            want = torch.bincount(ids.flatten(), minlength=8)[2 * self.rank :][:2]
            self.assertEqual(counts, 4 * want, exact_dtype=False)

    def test_errors_on_every_rank(self):
        switch = self.switch()
        ids = torch.zeros(3, 2, dtype=torch.int64)
        with self.assertRaisesRegex(ValueError, r"2 dimensions .* 1 of shape \(4,\)"):
            TokenSwitchHierarchical(self.mesh(None, 4), 8)
        with self.assertRaisesRegex(ValueError, "multiple of the 4 ranks .* got 6"):
            self.switch(6)
        with self.assertRaisesRegex(ValueError, "capacity must be None or a tuple"):
            self.switch(capacity=5)
        with self.assertRaisesRegex(ValueError, "capacity must be an integer .* 0"):
            self.switch(capacity=(5, 0))
        with self.assertRaisesRegex(RuntimeError, r"must be in \[-1, num_experts\]"):
            switch.create_routing(ids + 9)
        with self.assertRaisesRegex(RuntimeError, "K must be the same on all ranks"):
            switch.create_routing(ids[:, : 1 + self.rank // 2])


@instantiate_parametrized_tests
class TestHierarchicalCompile(OneRankCompileTest):
    @parametrize("capacity", [None, (128, 128)])
    def test_compiles_as_one_graph(self, capacity):
        mesh = init_device_mesh("cpu", (1, 1))
        combine = "exact" if capacity is None else "reduce"
        switch = TokenSwitchHierarchical(mesh, 64, combine=combine, capacity=capacity)
        self.check_bits(
            switch, torch.compile(run_layer, backend="aot_eager", fullgraph=True)
        )


@instantiate_parametrized_tests
class TestHierarchicalLocalRanks(TestCase):
    """Up to 64 ranks in one process."""

    def run_ranks(self, nodes, per_node, routing, combine, capacity, shares=None):
        want = local_truth(routing)

        def make():
            mesh = init_device_mesh("cpu", (nodes, per_node))
            return TokenSwitchHierarchical(mesh, 64, combine=combine, capacity=capacity)

        got = run_on_local_ranks(nodes * per_node, want.operands, make, shares)
        want.check_all(got, exact=combine == "exact")

    @parametrize("routing", list(ROUTINGS))
    @parametrize(
        "shape,combine",
        [
            ((2, 1), "reduce"),
            ((2, 2), "exact"),
            ((2, 4), "exact"),
            ((4, 2), "reduce"),
            ((4, 4), "exact"),
        ],
    )
    def test_static_matches_one_rank(self, routing, shape, combine):
        nodes, per_node = shape
        most = 128 // (nodes * per_node)
        self.run_ranks(*shape, routing, combine, (most, most * nodes))

    @parametrize("routing", list(ROUTINGS))
    def test_64_ranks(self, routing):
        combine = "exact" if list(ROUTINGS).index(routing) % 2 else "reduce"
        self.run_ranks(8, 8, routing, combine, (2, 16))

    @parametrize("combine", ["reduce", "exact"])
    def test_compact_matches_one_rank(self, combine):
        for routing in ("zipf", "sentinels", "one_expert"):
            shares = [0, 100, 0, 5, 7, 0, 0, 16]
            self.run_ranks(2, 4, routing, combine, None, shares)


if __name__ == "__main__":
    run_tests()
