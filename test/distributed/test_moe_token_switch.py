# Owner(s): ["oncall: distributed"]

import contextlib
import dataclasses
import functools
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._moe import wire
from torch.distributed._moe.all_to_all import grow_and_rerun, TokenSwitchAllToAll
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_moe import NoHostSyncMode
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_generators import MoeCase, ROUTINGS
from torch.testing._internal.moe_reference import (
    check_close,
    moe_mlp_backward_reference,
    moe_mlp_backward_unfused,
    moe_mlp_reference,
    moe_mlp_unfused,
)


# Tokens of each of the four ranks.
SHARES = {"even": (5, 4, 4, 4), "gaps": (9, 0, 7, 1), "all_on_one": (0, 0, 17, 0)}
CASE = MoeCase("ep", num_tokens=17, num_experts=8, top_k=3)


def case_of(routing):
    """17 tokens with a routing; the recorded one has its own E and K."""
    if routing == "recorded":
        return dataclasses.replace(CASE, routing=routing, num_experts=64, top_k=8)
    return dataclasses.replace(CASE, routing=routing)


@dataclasses.dataclass
class Result:
    """Output and gradients of one rank's tokens and experts."""

    output: torch.Tensor
    grad_input: torch.Tensor
    grad_weights: torch.Tensor
    grad_w_in: torch.Tensor
    grad_w_out: torch.Tensor


class TokenSwitchTest(MultiProcContinuousTest):
    world_size = 4

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    @staticmethod
    @functools.cache
    def mesh(ep):
        """The world as (world / ep, ep); once, as a gloo group owns threads."""
        return init_device_mesh("cpu", (4 // ep, ep), mesh_dim_names=("dp", "ep"))

    def switch(self, ep=4, num_experts=8, **kwargs):
        group = self.mesh(ep).get_group("ep")
        return TokenSwitchAllToAll(group, num_experts, **kwargs)

    def slices(self, ep, share, num_experts=8):
        """Tokens and experts of this rank; each EP group routes the tokens of its
        own ranks."""
        bounds = [sum(SHARES[share][:r]) for r in range(5)]
        tokens = slice(bounds[self.rank], bounds[self.rank + 1])
        local, first = num_experts // ep, self.rank % ep
        return tokens, slice(local * first, local * (first + 1))

    def run_switch(self, switch, operands, tokens, experts, grow=False) -> Result:
        x, weights, w_in, w_out = (
            t.detach().clone().requires_grad_()
            for t in (
                operands.input[tokens],
                operands.topk_weights[tokens],
                operands.w_in[experts],
                operands.w_out[experts],
            )
        )

        def step():
            for t in (x, weights, w_in, w_out):
                t.grad = None
            ids = operands.topk_indices[tokens]
            routing = switch.create_routing(ids, layout="flat")
            rows, row_weights, row_ids = switch.dispatch(routing, x, weights)
            out = F.moe_mlp(rows, row_ids, row_weights, w_in, w_out)
            y = switch.combine(routing, out)
            y.backward(operands.grad_out[tokens])
            return y.detach()

        y = grow_and_rerun([switch], step) if grow else step()
        return Result(y, x.grad, weights.grad, w_in.grad, w_out.grad)

    def one_rank(self, operands) -> Result:
        """F.moe_mlp of all tokens and experts in this process."""
        leaves = [
            t.detach().clone().requires_grad_()
            for t in (
                operands.input,
                operands.topk_weights,
                operands.w_in,
                operands.w_out,
            )
        ]
        x, weights, w_in, w_out = leaves
        y = F.moe_mlp(x, operands.topk_indices, weights, w_in, w_out)
        y.backward(operands.grad_out)
        return Result(y.detach(), *(t.grad for t in leaves))

    def sum_over_replicas(self, grad, ep):
        """Adds what the EP groups, which hold copies of the experts, contribute."""
        total = grad.double()
        dist.all_reduce(total, group=self.mesh(ep).get_group("dp"))
        return total

    def assert_within_invariant_1(self, got, operands, tokens, experts, dtype, ep):
        args = operands.args()
        ref, _ = moe_mlp_reference(*args)
        unfused, _ = moe_mlp_unfused(*args)
        grads = moe_mlp_backward_reference(operands.grad_out, *args)
        unfused_grads = moe_mlp_backward_unfused(operands.grad_out, *args)

        def check(name, value, want, loose, part):
            if value.numel():
                check_close(value, want[part], loose[part], dtype, name)

        check("output", got.output, ref, unfused, tokens)
        for name, part, value in (
            ("input", tokens, got.grad_input),
            ("topk_weights", tokens, got.grad_weights),
            ("w_in", experts, self.sum_over_replicas(got.grad_w_in, ep)),
            ("w_out", experts, self.sum_over_replicas(got.grad_w_out, ep)),
        ):
            want = getattr(grads, f"grad_{name}")
            check(name, value, want, getattr(unfused_grads, f"grad_{name}"), part)


@instantiate_parametrized_tests
class TestAllToAll(TokenSwitchTest):
    @parametrize("routing", list(ROUTINGS))
    @parametrize("ep", [1, 2, 4])
    @parametrize("combine", ["reduce", "exact"])
    def test_matches_one_rank(self, routing, ep, combine):
        case = case_of(routing)
        E = case.num_experts
        for dtype in (torch.float32, torch.bfloat16):
            operands = case.operands(dtype)
            whole = self.one_rank(operands)
            for share in SHARES:
                tokens, experts = self.slices(ep, share, E)
                switch = self.switch(ep, E, combine=combine)
                got = self.run_switch(switch, operands, tokens, experts)
                self.assert_within_invariant_1(
                    got, operands, tokens, experts, dtype, ep
                )
                if combine == "exact":
                    for name in ("output", "grad_input", "grad_weights"):
                        want = getattr(whole, name)[tokens]
                        self.assertTrue(torch.equal(getattr(got, name), want), name)

    @parametrize("combine", ["reduce", "exact"])
    def test_static_gives_the_compact_bits(self, combine):
        for routing in ROUTINGS:
            case = case_of(routing)
            operands, E = case.operands(), case.num_experts
            for share in SHARES:
                tokens, experts = self.slices(4, share, E)
                compact = self.run_switch(
                    self.switch(4, E, combine=combine), operands, tokens, experts
                )
                switch = self.switch(4, E, combine=combine, capacity=17)
                static = self.run_switch(switch, operands, tokens, experts)
                switch.check_overflow()
                for name in ("output", "grad_input", "grad_weights"):
                    got, want = getattr(static, name), getattr(compact, name)
                    self.assertTrue(torch.equal(got, want), (routing, share, name))

    @parametrize("combine", ["reduce", "exact"])
    def test_overflow_raises_on_every_rank_and_a_rerun_recovers(self, combine):
        operands = case_of("one_expert").operands()
        tokens, experts = self.slices(4, "gaps")
        switch = self.switch(combine=combine, capacity=2)
        self.run_switch(switch, operands, tokens, experts)
        with self.assertRaisesRegex(RuntimeError, "needed 9 rows but capacity is 2"):
            switch.check_overflow()
        got = self.run_switch(switch, operands, tokens, experts, grow=True)
        self.assertEqual(switch.capacity, 9)
        compact = self.run_switch(
            self.switch(combine=combine), operands, tokens, experts
        )
        for name in ("output", "grad_input", "grad_weights"):
            self.assertTrue(torch.equal(getattr(got, name), getattr(compact, name)))

    @parametrize("combine", ["reduce", "exact"])
    def test_static_reads_nothing_on_the_host(self, combine):
        operands = CASE.operands(torch.bfloat16)
        tokens, experts = self.slices(4, "even")
        switch = self.switch(combine=combine, capacity=8)
        x = operands.input[tokens].requires_grad_()
        weights = operands.topk_weights[tokens].requires_grad_()
        # Reading a value goes through these two whatever the device.
        forbidden = mock.Mock(side_effect=AssertionError("host read"))
        with (
            NoHostSyncMode(),
            mock.patch.object(torch.Tensor, "tolist", forbidden),
            mock.patch.object(torch.Tensor, "item", forbidden),
        ):
            routing = switch.create_routing(operands.topk_indices[tokens])
            rows, row_weights, _ = switch.dispatch(routing, x, weights)
            y = switch.combine(routing, rows * row_weights.sum(1, keepdim=True))
            y.sum().backward()

    def test_compact_reads_the_sizes_once(self):
        switch = self.switch()
        ids = CASE.topk_indices()
        calls = []
        original = torch.Tensor.tolist

        def tolist(t):
            calls.append(t)
            return original(t)

        with mock.patch.object(torch.Tensor, "tolist", tolist):
            routing = switch.create_routing(ids)
            x = torch.randn(17, 16, requires_grad=True)
            rows, _, _ = switch.dispatch(routing, x, torch.ones(17, 3))
            switch.combine(routing, rows).sum().backward()
        self.assertEqual(len(calls), 1)

    @contextlib.contextmanager
    def count_wire(self, switch):
        """Bytes per dtype that this rank sends to other ranks."""
        sent = {}
        exchange = switch._exchange

        def counting(x, splits):
            rows = x.shape[0] if splits.send is None else sum(splits.send)
            own = rows // 4 if splits.send is None else splits.send[self.rank]
            per_row = x[0].numel() * x.element_size() if x.shape[0] else 0
            sent[x.dtype] = sent.get(x.dtype, 0) + (rows - own) * per_row
            return exchange(x, splits)

        with mock.patch.object(switch, "_exchange", counting):
            yield sent

    def test_wire_bytes_are_the_deduplicated_minimum(self):
        T, D, K, E = 64, 2048, 8, 32
        torch.manual_seed(self.rank)
        ids = torch.rand(T, E).argsort(1)[:, :K]
        x, weights = torch.randn(T, D).bfloat16(), torch.rand(T, K)
        copies = 0
        for t in range(T):
            copies += len({e // 8 for e in ids[t].tolist()} - {self.rank})
        switch = self.switch(num_experts=E)
        with self.count_wire(switch) as sent:
            routing = switch.create_routing(ids)
            switch.dispatch(routing, x, weights)
        self.assertEqual(sent.pop(torch.bfloat16), copies * D * 2)
        self.assertLessEqual(sum(sent.values()), 0.02 * copies * D * 2)

        switch = self.switch(num_experts=E, wire_dtype=torch.float8_e4m3fn)
        with self.count_wire(switch) as sent:
            routing = switch.create_routing(ids)
            switch.dispatch(routing, x, weights)
        self.assertLessEqual(sent[torch.uint8], 0.52 * copies * D * 2)

    @parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
    def test_wire_dtype_rounds_the_rows_once(self, dtype):
        operands = CASE.operands()
        tokens, experts = self.slices(4, "gaps")
        got = self.run_switch(
            self.switch(combine="exact", wire_dtype=dtype), operands, tokens, experts
        )
        rounded = wire.decode(
            wire.encode(operands.input, dtype), dtype, 16, torch.float32
        )
        whole = self.one_rank(dataclasses.replace(operands, input=rounded))
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
