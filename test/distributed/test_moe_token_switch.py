# Owner(s): ["oncall: distributed"]

import dataclasses
import functools
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._moe import wire
from torch.distributed._moe.accounting import count_wire_bytes, deduplicated_rows
from torch.distributed._moe.all_to_all import grow_and_rerun, TokenSwitchAllToAll
from torch.distributed._moe.checkpoint import save_communication
from torch.testing._internal.common_moe import NoHostSyncMode
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
    TestCase,
)
from torch.testing._internal.distributed.moe_token_switch import (
    CASE,
    one_rank,
    run_layer,
    SHARES,
    TokenSwitchTest,
    truth,
)
from torch.testing._internal.moe_generators import ROUTINGS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn


def scale_layer(switch, ids, x, weights, w_in, w_out):
    """A layer whose experts do nothing that could sync."""
    routing = switch.create_routing(ids)
    rows, row_weights, _ = switch.dispatch(routing, x, weights)
    return switch.combine(routing, rows * row_weights.sum(1, keepdim=True).to(x.dtype))


class CountAllToAll(TorchDispatchMode):
    """Counts the all-to-alls that run, in forward and backward."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops._c10d_functional.all_to_all_single.default
        return func(*args, **(kwargs or {}))


@instantiate_parametrized_tests
class TestAllToAll(TokenSwitchTest):
    def switch(self, ep=4, num_experts=8, **kwargs):
        group = self.mesh(4 // ep, ep).get_group(1)
        return TokenSwitchAllToAll(group, num_experts, **kwargs)

    @parametrize("routing", list(ROUTINGS))
    @parametrize("ep", [1, 2, 4])
    @parametrize("combine", ["reduce", "exact"])
    def test_matches_one_rank(self, routing, ep, combine):
        for dtype in (torch.float32, torch.bfloat16):
            want = truth(routing, dtype)
            E = want.operands.w_in.shape[0]
            for share in SHARES:
                tokens, experts = self.part(ep, share, E)
                switch = self.switch(ep, E, combine=combine)
                got = self.run_switch(switch, want.operands, tokens, experts)
                exact = combine == "exact"
                self.check(got, want, tokens, experts, exact=exact, ep=ep)

    @parametrize("combine", ["reduce", "exact"])
    def test_static_gives_the_compact_bits(self, combine):
        for routing in ROUTINGS:
            operands = truth(routing).operands
            E = operands.w_in.shape[0]
            for share in SHARES:
                part = self.part(4, share, E)
                compact = self.run_switch(
                    self.switch(4, E, combine=combine), operands, *part
                )
                switch = self.switch(4, E, combine=combine, capacity=17)
                static = self.run_switch(switch, operands, *part)
                switch.check_overflow()
                self.assert_same_bits(static, compact, (routing, share))

    @parametrize("combine", ["reduce", "exact"])
    def test_overflow_raises_on_every_rank_and_a_rerun_recovers(self, combine):
        operands = truth("one_expert").operands
        part = self.part(4, "gaps")
        switch = self.switch(combine=combine, capacity=2)
        self.run_switch(switch, operands, *part)
        with self.assertRaisesRegex(RuntimeError, "needed 9 rows but capacity is 2"):
            switch.check_overflow()
        got = self.run_switch(switch, operands, *part, grow=True)
        self.assertEqual(switch.capacity, 9)
        compact = self.run_switch(self.switch(combine=combine), operands, *part)
        self.assert_same_bits(got, compact)

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

        grow_and_rerun([switch], step, group=dist.group.WORLD)
        self.assertEqual(steps, [4 * (2 + 2 + 1 + 1), 4 * (3 + 3 + 1 + 1)])
        self.assertEqual(switch.capacity, 3 if self.rank < 2 else 2)

        with self.assertRaisesRegex(RuntimeError, "did not fit after 0 reruns"):
            switch.capacity = 1
            tokens = 5
            grow_and_rerun([switch], step, max_reruns=0, group=dist.group.WORLD)

    @parametrize("combine", ["reduce", "exact"])
    @parametrize("capacity", [None, 8])
    def test_host_reads(self, combine, capacity):
        """None in static mode; in compact mode the sizes, once.

        Not counted: the comparison of arguments at the first use of a switch.
        """
        operands = CASE.operands(torch.bfloat16)
        tokens, experts = self.part(4, "even")
        switch = self.switch(combine=combine, capacity=capacity)
        self.run_switch(switch, operands, tokens, experts, layer=scale_layer)
        read = []
        tolist = torch.Tensor.tolist

        def spy(t):
            read.append(t)
            return tolist(t)

        # Eager CPU tensors are read without a dispatch, which the mode would see.
        forbidden = mock.Mock(side_effect=AssertionError("host read"))
        with (
            NoHostSyncMode(),
            mock.patch.object(torch.Tensor, "tolist", spy),
            mock.patch.object(torch.Tensor, "item", forbidden),
            mock.patch.object(torch.Tensor, "__bool__", forbidden),
            mock.patch.object(torch.Tensor, "__int__", forbidden),
        ):
            self.run_switch(switch, operands, tokens, experts, layer=scale_layer)
        self.assertEqual(len(read), 1 if capacity is None else 0)

    @slowTest
    def test_compiles_as_one_graph(self):
        """Sizes that differ by rank. Slow, as four processes compile the same; on one
        rank in test_moe_token_switch_local.py."""
        torch._dynamo.reset()
        switch = self.switch(4, 64, combine="exact")
        case = dataclasses.replace(CASE, num_experts=64, top_k=8)
        part = self.part(4, "gaps", 64)
        with torch._dynamo.config.patch(
            capture_scalar_outputs=True, error_on_recompile=True
        ):
            compiled = torch.compile(run_layer, backend="aot_eager", fullgraph=True)
            for routing in (*ROUTINGS, "none"):
                operands = dataclasses.replace(
                    case, routing="uniform" if routing == "none" else routing
                ).operands()
                if routing == "none":
                    operands.topk_indices.fill_(-1)
                want = self.run_switch(switch, operands, *part)
                got = self.run_switch(switch, operands, *part, layer=compiled)
                self.assert_same_bits(got, want, routing)
                self.assertEqual(got.grad_w_in, want.grad_w_in)

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
            with CountAllToAll() as mode:
                results.append(self.run_switch(switch, operands, *part, layer=layer))
            counts.append(mode.count)
        for got in results[1:]:
            self.assert_same_bits(got, results[0])
        # Forward: sizes (compact), ids, rows, weights, returned; backward: the last 3.
        once = 8 if capacity is None else 7
        self.assertEqual(counts[:2], [once, once])
        # Shows that the test can fail.
        self.assertEqual(counts[2], once + once - 3)

    def test_wire_bytes_are_the_deduplicated_minimum(self):
        T, D, K, E = 64, 2048, 8, 32
        generator = torch.Generator().manual_seed(0)
        ids = [
            torch.rand(T, E, generator=generator).argsort(1)[:, :K] for _ in range(3)
        ]
        ids.append(torch.zeros(T, K, dtype=torch.int64))  # one row, K slots
        mine = ids[self.rank].int()
        x, weights = torch.randn(T, D).bfloat16(), torch.rand(T, K)
        copies, slots = 0, 0
        for t in range(T):
            copies += len({e // 8 for e in mine[t].tolist()} - {self.rank})
            slots += sum(e // 8 != self.rank for e in mine[t].tolist())
        minimum = deduplicated_rows(ids, E, (4,))["flat"][self.rank]
        self.assertEqual(minimum, copies)
        bf16 = copies * D * 2

        for combine in ("reduce", "exact"):
            switch = self.switch(num_experts=E, combine=combine)
            with count_wire_bytes(switch) as sent:
                routing = switch.create_routing(mine)
                switch.dispatch(routing, x, weights)
            self.assertEqual(sent.payload("flat"), bf16)
            # An int32 and a float per slot, four int32 per pair of ranks.
            self.assertEqual(sent.metadata("flat"), 8 * slots + 3 * 16)
            self.assertLessEqual(sent.metadata("flat"), 0.02 * bf16)
            self.assertEqual(sent.scales("flat"), 0)

        switch = self.switch(num_experts=E, wire_dtype=torch.float8_e4m3fn)
        with count_wire_bytes(switch) as sent:
            routing = switch.create_routing(mine)
            rows, _, _ = switch.dispatch(routing, x, weights)
        self.assertEqual(sent.payload("flat"), copies * D)
        self.assertEqual(sent.scales("flat"), copies * D // 128)
        self.assertLessEqual(sent.payload("flat") + sent.scales("flat"), 0.52 * bf16)
        with count_wire_bytes(switch) as sent:
            switch.combine(routing, rows)
        received = sum(
            len({e // 8 for e in row.tolist()} & {self.rank})
            for source, other in enumerate(ids)
            if source != self.rank
            for row in other
        )
        self.assertEqual(sent.sent["flat"], {"returned": received * D * 2})

    @parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
    def test_wire_dtype_rounds_the_rows_once(self, dtype):
        operands = CASE.operands()
        tokens, experts = self.part(4, "gaps")
        got = self.run_switch(
            self.switch(combine="exact", wire_dtype=dtype), operands, tokens, experts
        )
        rounded = wire.decode(
            wire.encode(operands.input, dtype), dtype, 16, torch.float32
        )
        whole = one_rank(dataclasses.replace(operands, input=rounded))
        for name in ("output", "grad_input", "grad_weights"):
            want = getattr(whole, name)[tokens]
            self.assertTrue(torch.equal(getattr(got, name), want), name)

    def test_counts_and_int32_ids(self):
        ids = CASE.topk_indices().int()
        counts = torch.zeros(2, dtype=torch.int32)
        self.switch().create_routing(ids, counts)
        want = torch.bincount(ids.flatten(), minlength=8)[2 * self.rank :][:2]
        self.assertEqual(counts, 4 * want, exact_dtype=False)

    def test_out_buffers(self):
        switch = self.switch()
        operands = CASE.operands()
        routing = switch.create_routing(operands.topk_indices)
        want = switch.dispatch(routing, operands.input, operands.topk_weights)
        out = tuple(torch.empty_like(t) for t in want)
        switch.dispatch(routing, operands.input, operands.topk_weights, out=out)
        for a, b in zip(out, want):
            self.assertEqual(a, b)
        y = torch.empty_like(operands.input)
        switch.combine(routing, want[0], out=y)
        self.assertEqual(y, switch.combine(routing, want[0]))

    def test_errors_on_every_rank(self):
        switch = self.switch()
        ids = torch.zeros(3, 2, dtype=torch.int64)
        with self.assertRaisesRegex(ValueError, "multiple of the 4 ranks .* got 6"):
            self.switch(num_experts=6)
        with self.assertRaisesRegex(ValueError, "'reduce' or 'exact', got 'sum'"):
            self.switch(combine="sum")
        with self.assertRaisesRegex(ValueError, "capacity must be at least 1, got 0"):
            self.switch(capacity=0)
        with self.assertRaisesRegex(ValueError, "wire_dtype .* got torch.float16"):
            self.switch(wire_dtype=torch.float16)
        with self.assertRaisesRegex(ValueError, "layout must be 'flat'"):
            switch.create_routing(ids, layout="expert_major")
        with self.assertRaisesRegex(ValueError, r"got torch.float32 of shape \(3, 2\)"):
            switch.create_routing(ids.float())
        with self.assertRaisesRegex(RuntimeError, r"must be in \[-1, num_experts\]"):
            switch.create_routing(ids + 9)
        with self.assertRaisesRegex(RuntimeError, "K must be the same on all ranks"):
            switch.create_routing(ids[:, : 1 + self.rank % 2])
        uneven = self.switch(num_experts=8 + 4 * (self.rank == 1))
        with self.assertRaisesRegex(RuntimeError, r"num_experts .* \[8, 12, 8, 8\]"):
            uneven.create_routing(ids)
        routing = switch.create_routing(ids)
        x = torch.zeros(3, 4)
        with self.assertRaisesRegex(ValueError, r"T = 3, got \(2, 4\)"):
            switch.dispatch(routing, x[:2], torch.ones(3, 2))
        with self.assertRaisesRegex(ValueError, r"\(T, K\) = \(3, 2\), got \(3, 1\)"):
            switch.dispatch(routing, x, torch.ones(3, 1))
        with self.assertRaisesRegex(ValueError, "expert_tokens must have shape"):
            switch.combine(routing, torch.zeros(1000, 4))
        with self.assertRaisesRegex(RuntimeError, "no static routing was made"):
            switch.required_capacity()


class TestWire(TestCase):
    def test_fp8_error_and_range(self):
        torch.manual_seed(0)
        for dim in (1, 127, 128, 300):
            self.assertEqual(
                wire.encode(torch.empty(0, dim), torch.float8_e4m3fn).numel(), 0
            )
            x = torch.randn(7, dim) * torch.logspace(-20, 20, 7)[:, None]
            x[3] = 0
            packed = wire.encode(x, torch.float8_e4m3fn)
            self.assertEqual(packed.shape, (7, dim + -(-dim // 128)))
            back = wire.decode(packed, torch.float8_e4m3fn, dim, x.dtype)
            self.assertEqual(back[3], x[3])
            # 3 mantissa bits: half a unit of 2**-3 relative, or of the smallest
            # subnormal of a block whose largest value is 2**8 and above.
            largest = x.abs().amax(1, keepdim=True)
            allowed = torch.maximum(x.abs() / 16, largest * 2.0**-17)
            self.assertTrue(((back - x).abs() <= allowed).all())

    def test_fp8_twice_is_once(self):
        x = torch.randn(5, 256)
        for _ in range(2):
            once = wire.decode(
                wire.encode(x, torch.float8_e4m3fn),
                torch.float8_e4m3fn,
                256,
                torch.bfloat16,
            )
            if x.dtype == torch.bfloat16:
                self.assertEqual(once, x, atol=0, rtol=0)
            x = once


if __name__ == "__main__":
    run_tests()
