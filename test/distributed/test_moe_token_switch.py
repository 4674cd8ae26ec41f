# Owner(s): ["oncall: distributed"]

import dataclasses
import datetime
import functools

from moe_token_switch import (
    AllToAllTest,
    CASE,
    host_reads,
    one_rank,
    run_layer,
    truth,
)

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import distributed_c10d as c10d
from torch.distributed._moe.all_gather import TokenSwitchAllGather
from torch.distributed._moe.all_to_all import (
    TokenSwitchAllToAll,
    TokenSwitchHierarchical,
)
from torch.distributed._moe.groups import group_timeout, sub_group
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_moe import NoHostSyncMode
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
)
from torch.testing._internal.moe_generators import ROUTINGS
from torch.utils._python_dispatch import TorchDispatchMode


def scale_layer(switch, ids, x, weights, w_in, w_out):
    """A layer whose experts cannot synchronise."""
    routing = switch.create_routing(ids)
    rows, row_weights, _ = switch.dispatch(routing, x, weights)
    return switch.combine(routing, rows * row_weights.sum(1, keepdim=True).to(x.dtype))


class OpTrace(TorchDispatchMode):
    """Names of the ops that run, without the sizes and values they have."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@instantiate_parametrized_tests
class TestAllToAll(AllToAllTest):
    @parametrize("routing", list(ROUTINGS))
    @parametrize("ep", [1, 2, 4])
    @parametrize("combine", ["reduce", "exact"])
    def test_matches_one_rank(self, routing, ep, combine):
        switch = functools.partial(self.switch, ep)
        self.check_matches_one_rank(switch, routing, combine, ep)

    @parametrize("combine", ["reduce", "exact"])
    def test_static_gives_the_compact_bits(self, combine):
        switch = functools.partial(self.switch, combine=combine)
        self.check_static(switch, ROUTINGS, capacity=17)

    @parametrize("combine", ["reduce", "exact"])
    def test_overflow_raises_on_every_rank(self, combine):
        operands = truth("one_expert").operands
        part = self.part(4, "gaps")
        switch = self.switch(combine=combine, capacity=2)
        self.run_switch(switch, operands, *part)
        with self.assertRaisesRegex(RuntimeError, "needed 9 rows but capacity is 2"):
            switch.check_overflow()

    @parametrize("combine", ["reduce", "exact"])
    @parametrize("capacity", [None, 8])
    def test_host_reads(self, combine, capacity):
        """Host syncs: none in static mode. In compact mode, one for the sizes.

        Not counted: the comparison of arguments at the first use of a switch.
        """
        operands = CASE.operands(torch.bfloat16)
        tokens, experts = self.part(4, "even")
        switch = self.switch(combine=combine, capacity=capacity)
        self.run_switch(switch, operands, tokens, experts, layer=scale_layer)
        with host_reads() as read:
            self.run_switch(switch, operands, tokens, experts, layer=scale_layer)
        self.assertEqual(len(read), 1 if capacity is None else 0)

    @slowTest
    def test_compiles_as_one_graph(self):
        """Sizes that differ by rank. This is slow, because four processes compile the same.
        test_moe_token_switch_local.py compiles on one rank."""
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

    @parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
    def test_wire_dtype_rounds_the_rows_once(self, dtype):
        self.check_rounded_once(self.switch, dtype)

    def test_all_gather_for_decoding(self):
        """Any number of tokens up to the bound uses buffers that never move."""
        operands = truth("sentinels").operands
        _, experts = self.part(4, "even")
        group = self.mesh(None, 4).get_group()
        switch = TokenSwitchAllGather(group, 8, max_tokens=17)
        weights = operands.w_in[experts], operands.w_out[experts]
        want = one_rank(operands).output
        places, ops = [], []
        # The first call makes the buffers.
        for share in ("even", "gaps", "all_on_one", "even"):
            tokens, _ = self.part(4, share)
            leaves = operands.input[tokens], operands.topk_weights[tokens]
            trace = OpTrace()
            with torch.inference_mode(), NoHostSyncMode(), trace:
                routing = switch.create_routing(operands.topk_indices[tokens])
                rows, row_weights, ids = switch.dispatch(routing, *leaves)
                out = F.moe_mlp(rows, ids, row_weights, *weights)
                got = switch.combine(routing, out)
            self.assertEqual(got, want[tokens])
            places.append((rows.data_ptr(), row_weights.data_ptr(), ids.data_ptr()))
            ops.append(trace.ops)
        # The ops depend neither on values nor on the number of tokens.
        self.assertEqual(places[1:], [places[0]] * 3)
        self.assertEqual(ops[2:], [ops[1]] * 2)
        self.assertFalse(any("item" in op or "nonzero" in op for op in ops[1]))
        x = operands.input[:2].clone().requires_grad_()
        routing = switch.create_routing(operands.topk_indices[:2])
        rows, *_ = switch.dispatch(routing, x, operands.topk_weights[:2])
        with self.assertRaisesRegex(NotImplementedError, "train with 'all_to_all'"):
            rows.sum().backward()
        with self.assertRaisesRegex(
            ValueError, "at most max_tokens = 17 tokens, got 34"
        ):
            twice = (operands.topk_indices, operands.input, operands.topk_weights)
            ids, *leaves = (t.repeat(2, 1) for t in twice)
            switch.dispatch(switch.create_routing(ids), *leaves)

    def test_groups_that_are_handed_over_stay_as_they_are(self):
        """Given groups keep the user's timeout, and groups made from them have it too."""
        world = dist.group.WORLD
        before = group_timeout(world)
        dist.set_timeout(datetime.timedelta(seconds=77), world)
        try:
            mesh = init_device_mesh("cpu", (2, 2))
            own = dist.new_group(timeout=datetime.timedelta(seconds=55))
            given = [world, *mesh.get_all_groups(), own]
            timeouts = [group_timeout(group) for group in given]
            switch = TokenSwitchHierarchical(mesh, 8)
            TokenSwitchAllToAll(own, 8)
            name = sub_group(own, [0, 1, 2, 3])
            switch.use_own_groups()
            self.assertEqual([group_timeout(group) for group in given], timeouts)
            for level, timeout in zip(switch.levels, timeouts[1:]):
                self.assertEqual(group_timeout(level.group), timeout)
            made = c10d._resolve_process_group(name)
            self.assertEqual(group_timeout(made).total_seconds(), 55)
        finally:
            dist.set_timeout(before, world)

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
        for capacity in (0, 40.0, True, "2"):
            message = f"capacity must be an integer .* 1, got {capacity!r}"
            with self.assertRaisesRegex(ValueError, message):
                self.switch(capacity=capacity)
        with self.assertRaisesRegex(
            ValueError, r"pair .* 'hierarchical', got \(1, 2\)"
        ):
            self.switch(capacity=(1, 2))
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


if __name__ == "__main__":
    run_tests()
