# Owner(s): ["oncall: distributed"]
"""What a training step needs besides a token switch: rerun, checkpoint, byte counts."""

import functools

from moe_placement import deduplicated_rows
from moe_token_switch import (
    AllToAllTest,
    metadata_bytes,
    OneRankCompileTest,
    run_layer,
    truth,
)

import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.distributed._moe.all_gather import TokenSwitchAllGather
from torch.distributed._moe.all_to_all import (
    grow_and_rerun,
    TokenSwitchAllToAll,
    TokenSwitchHierarchical,
)
from torch.distributed._moe.recompute import save_communication
from torch.distributed._moe.wire_bytes import count_wire_bytes
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, CheckpointPolicy, noop_context_fn


SENDS = (
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
)


class CountSends(TorchDispatchMode):
    """Counts the all-to-alls and all_gathers that run, in forward and backward."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in SENDS
        return func(*args, **(kwargs or {}))


@instantiate_parametrized_tests
class TestSwitchTools(AllToAllTest):
    @parametrize("combine", ["reduce", "exact"])
    def test_a_rerun_recovers_from_overflow(self, combine):
        operands = truth("one_expert").operands
        part = self.part(4, "gaps")
        switch = self.switch(combine=combine, capacity=2)
        got = self.run_switch(switch, operands, *part, rerun=grow_and_rerun)
        self.assertEqual(switch.capacity, 9)
        compact = self.run_switch(self.switch(combine=combine), operands, *part)
        self.assert_same_bits(got, compact)

    def test_a_recomputation_does_not_hide_overflow(self):
        """Also where the checkpoint keeps what each op returned, counters included."""
        switch = self.switch(capacity=2)
        kept = save_communication(lambda *_, **__: CheckpointPolicy.MUST_SAVE)

        def layer(x):
            ids = torch.zeros(len(x), 1, dtype=torch.int64)
            routing = switch.create_routing(ids)
            rows, _, _ = switch.dispatch(routing, x, ids.float())
            return switch.combine(routing, rows.sin())

        outputs = [
            checkpoint(
                layer,
                torch.ones(tokens, 4, requires_grad=True),
                use_reentrant=False,
                context_fn=kept,
            )
            for tokens in (1, 3)
        ]
        outputs[0].sum().backward()
        with self.assertRaisesRegex(RuntimeError, "needed 3 rows but capacity is 2"):
            switch.check_overflow()

    def test_all_replicas_rerun_together(self):
        # Ranks 0 and 1 share experts, 2 and 3 hold copies; only the first pair has
        # more tokens than fit, and each step ends with a collective over all four.
        switch = self.switch(ep=2, capacity=2)
        tokens = 3 if self.rank < 2 else 1
        steps = []

        def step():
            ids = torch.zeros(tokens, 1, dtype=torch.int64)
            routing = switch.create_routing(ids)
            rows, _, _ = switch.dispatch(routing, torch.ones(tokens, 4), ids.float())
            total = switch.combine(routing, rows).sum()
            dist.all_reduce(total)
            steps.append(total.item())

        grow_and_rerun([switch], step, groups=[dist.group.WORLD])
        self.assertEqual(steps, [4 * (2 + 2 + 1 + 1), 4 * (3 + 3 + 1 + 1)])
        self.assertEqual(switch.capacity, 3 if self.rank < 2 else 2)

        with self.assertRaisesRegex(RuntimeError, "did not fit after 0 reruns"):
            switch.capacity = 1
            tokens = 5
            grow_and_rerun([switch], step, max_reruns=0, groups=[dist.group.WORLD])

    @parametrize("combine", ["reduce", "exact"])
    @parametrize("capacity", [None, 17])
    def test_checkpoint_does_not_communicate_again(self, combine, capacity):
        operands = truth("zipf").operands
        part = self.part(4, "gaps")
        switch = self.switch(combine=combine, capacity=capacity)

        def behind(switch, *args):
            # Recomputing this needs what combine returned.
            return run_layer(switch, *args).sin().sin()

        def layer_with(context_fn):
            return functools.partial(
                checkpoint, behind, use_reentrant=False, context_fn=context_fn
            )

        counts, results = [], []
        kept = save_communication()
        for layer in (behind, layer_with(kept), layer_with(noop_context_fn)):
            with CountSends() as mode:
                results.append(self.run_switch(switch, operands, *part, layer=layer))
            counts.append(mode.count)
        for got in results[1:]:
            self.assert_same_bits(got, results[0])
        # Forward: sizes or a meeting (static), rows, returned; backward: the last two.
        once = 5
        self.assertEqual(counts[:2], [once, once])
        # Shows that the test can fail.
        self.assertEqual(counts[2], once + once - 2)

    def fixed(self, kind):
        """A switch with messages of a fixed size, or a compact switch."""
        if kind == "all_gather":
            group = self.mesh(None, 4).get_group()
            return TokenSwitchAllGather(group, 8, max_tokens=6)
        if kind in ("static", "compact"):
            return self.switch(capacity=40 if kind == "static" else None)
        mesh = self.mesh(("node", "local"), 2, 2)
        capacity = (40, 40) if kind == "hierarchical" else None
        return TokenSwitchHierarchical(mesh, 8, capacity=capacity)

    def run_fixed(self, switch, K=2, dtype=torch.float32, tokens=6, width=16):
        g = torch.Generator().manual_seed(self.rank)
        w_in = torch.randn(2, 8, width, generator=g).to(dtype)
        w_out = torch.randn(2, width, 4, generator=g).to(dtype)
        ids = torch.rand(tokens, 8, generator=g).topk(K, dim=1).indices
        x = torch.randn(tokens, width, generator=g).to(dtype)
        routing = switch.create_routing(ids)
        rows, weights, ids = switch.dispatch(routing, x, torch.rand(tokens, K))
        return switch.combine(routing, F.moe_mlp(rows, ids, weights, w_in, w_out))

    @parametrize("kind", ["all_gather", "static", "hierarchical"])
    def test_shapes_that_change_under_a_capacity(self, kind):
        """Shapes may change on all ranks. A change on one rank is an error on every rank at once."""
        switch, run = self.fixed(kind), self.run_fixed

        def agreed():
            """All ranks can still communicate, and nothing is left in flight."""
            for K, dtype in (
                (2, torch.float32),
                (3, torch.bfloat16),
                (2, torch.float32),
            ):
                self.assertTrue(run(switch, K, dtype).isfinite().all())
            self.assertTrue(run(switch, tokens=2 * self.rank).isfinite().all())
            if kind == "all_gather":
                with self.assertRaisesRegex(ValueError, "at most max_tokens = 6 .* 7"):
                    run(switch, tokens=7)
            else:
                switch.capacity = 50 if kind == "static" else (50, 60)
                self.assertTrue(run(switch).isfinite().all())
                switch.check_overflow()

        if kind == "all_gather":
            # Also in the first forward.
            for odd in ({"tokens": 7}, {"K": 3}, {"width": 24}):
                with self.assertRaisesRegex(
                    RuntimeError,
                    f"{list(odd)[0].replace('width', 'D')} must be the same",
                ):
                    run(switch, **odd if self.rank == 2 else {})
        agreed()
        odds = [("K", {"K": 3}), ("dtype", {"dtype": torch.bfloat16})]
        odds.append(("D", {"width": 24}))
        if kind == "all_gather":
            odds.append(("tokens", {"tokens": 7}))
        # One rank, all but one, both ranks of a node, and one of each node.
        for ranks in ((1,), (0, 2, 3), (2, 3), (1, 3)):
            for name, odd in odds:
                with self.assertRaisesRegex(
                    RuntimeError, f"{name}.* must be the same on all ranks"
                ):
                    run(switch, **odd if self.rank in ranks else {})
            agreed()
        # All ranks change, but to different values.
        with self.assertRaisesRegex(RuntimeError, r"K must .* have \[3, 4, 4, 4\]"):
            run(switch, 3 + (self.rank > 0))
        agreed()

    @parametrize(
        "kind",
        ["all_gather", "static", "hierarchical", "compact", "compact hierarchical"],
    )
    def test_what_requires_gradients_is_compared(self, kind):
        """An int32 message distinguishes all answers, for any number of parameters."""
        switch, none = self.fixed(kind), (False,) * 64
        for at in (0, 13, 14, 31, 32, 63):
            one = (*none[:at], True, *none[at + 1 :])
            for needs in (none, one, none):
                switch.requires_grad = needs
                self.assertTrue(self.run_fixed(switch).isfinite().all())
            # Ranks change to an earlier answer or to a new one: one rank, and all but one.
            for other in (one, (*one[:at], True, *one[at + 1 : 63], not one[63])):
                for ranks in ((2,), (0, 1, 3)):
                    switch.requires_grad = other if self.rank in ranks else none
                    with self.assertRaisesRegex(
                        RuntimeError,
                        "requires_grad of .* must be the same on all ranks",
                    ):
                        self.run_fixed(switch)

    def test_wire_bytes_are_the_deduplicated_minimum(self):
        T, D, K, E = 64, 2048, 8, 32
        generator = torch.Generator().manual_seed(0)
        ids = [
            torch.rand(T, E, generator=generator).argsort(1)[:, :K] for _ in range(3)
        ]
        ids.append(torch.zeros(T, K, dtype=torch.int64))  # one row, K slots
        mine = ids[self.rank].int()
        x, weights = torch.randn(T, D).bfloat16(), torch.rand(T, K)
        copies = 0
        for t in range(T):
            copies += len({e // 8 for e in mine[t].tolist()} - {self.rank})
        minimum = deduplicated_rows(ids, E, (4,))["flat"][self.rank]
        self.assertEqual(minimum, copies)
        bf16 = copies * D * 2

        for combine in ("reduce", "exact"):
            switch = self.switch(num_experts=E, combine=combine)
            with count_wire_bytes(switch) as sent:
                routing = switch.create_routing(mine)
                switch.dispatch(routing, x, weights)
            self.assertEqual(sent.sent["flat"]["rows"], bf16)
            # K int32 and K floats a row; to three ranks, seven int32 per rank and the number of calls.
            sizes = 3 * (4 * 28 + 4)
            self.assertEqual(metadata_bytes(sent.sent["flat"]), 8 * K * copies + sizes)
            self.assertLessEqual(metadata_bytes(sent.sent["flat"]), 0.02 * bf16)
            self.assertEqual(sent.sent["flat"]["scales"], 0)

        switch = self.switch(num_experts=E, wire_dtype=torch.float8_e4m3fn)
        with count_wire_bytes(switch) as sent:
            routing = switch.create_routing(mine)
            rows, _, _ = switch.dispatch(routing, x, weights)
        self.assertEqual(sent.sent["flat"]["rows"], copies * D)
        self.assertEqual(sent.sent["flat"]["scales"], copies * D // 128)
        self.assertLessEqual(
            sent.sent["flat"]["rows"] + sent.sent["flat"]["scales"], 0.52 * bf16
        )
        with count_wire_bytes(switch) as sent:
            switch.combine(routing, rows)
        received = sum(
            len({e // 8 for e in row.tolist()} & {self.rank})
            for source, other in enumerate(ids)
            if source != self.rank
            for row in other
        )
        self.assertEqual(sent.sent["flat"], {"returned": received * D * 2})


@instantiate_parametrized_tests
class TestCompiledCheckpoint(OneRankCompileTest):
    # The overflow counter is set in the region; setting it again would not hurt.
    @torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
    @parametrize("capacity", [None, 128])
    def test_checkpoint_does_not_communicate_again(self, capacity):
        switch = TokenSwitchAllToAll(dist.group.WORLD, 64, capacity=capacity)
        kept = save_communication()
        collectives = {"forward": 0, "backward": 0}

        def behind(switch, *args):
            # Recomputing this needs what combine returned.
            return run_layer(switch, *args).sin().sin()

        def layer(switch, *args):
            return checkpoint(
                behind, switch, *args, use_reentrant=False, context_fn=kept
            )

        def count(which):
            def compiler(graph, inputs):
                collectives[which] += sum(n.target in SENDS for n in graph.graph.nodes)
                return make_boxed_func(graph.forward)

            return compiler

        backend = aot_autograd(
            fw_compiler=count("forward"),
            bw_compiler=count("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        self.check_bits(switch, compiled, behind)
        once = 3 if capacity is None else 2
        self.assertEqual(collectives, {"forward": once, "backward": 2})


if __name__ == "__main__":
    run_tests()
