# Owner(s): ["oncall: distributed"]

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed._moe.all_to_all import TokenSwitchAllToAll
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.moe_generators import MoeCase, ROUTINGS


CASE = MoeCase("local", num_tokens=128, num_experts=64, top_k=8, dim=8, hidden=8)


@instantiate_parametrized_tests
class TestStaticSwitch(TestCase):
    """Static routing reads nothing on the host, so that many ranks fit one process."""

    def tearDown(self):
        if dist.is_initialized():
            dist.destroy_process_group()
        super().tearDown()

    def on_ranks(self, ranks, operands, combine):
        """Output and gradients of all tokens, computed by ``ranks`` local ranks."""
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        with LocalTensorMode(ranks):

            def shard(t):
                parts = dict(enumerate(t.detach().chunk(ranks)))
                return LocalTensor({r: p.clone() for r, p in parts.items()})

            x, weights, w_in, w_out = (
                shard(t).requires_grad_()
                for t in (
                    operands.input,
                    operands.topk_weights,
                    operands.w_in,
                    operands.w_out,
                )
            )
            switch = TokenSwitchAllToAll(
                dist.group.WORLD, 64, combine=combine, capacity=128 // ranks
            )
            routing = switch.create_routing(shard(operands.topk_indices))
            rows, row_weights, ids = switch.dispatch(routing, x, weights)
            out = F.moe_mlp(rows, ids, row_weights, w_in, w_out)
            y = switch.combine(routing, out)
            y.backward(shard(operands.grad_out))
            results = (y.detach(), x.grad, weights.grad, w_in.grad, w_out.grad)
            parts = [[t._local_tensors[r] for r in range(ranks)] for t in results]
        return [torch.cat(p) for p in parts]

    @parametrize("routing", list(ROUTINGS))
    @parametrize("combine", ["reduce", "exact"])
    @parametrize("ranks", [8, 64])
    def test_matches_one_rank(self, routing, combine, ranks):
        operands = dataclasses.replace(CASE, routing=routing).operands()
        leaves = [
            t.detach().clone().requires_grad_()
            for t in (
                operands.input,
                operands.topk_weights,
                operands.w_in,
                operands.w_out,
            )
        ]
        y = F.moe_mlp(leaves[0], operands.topk_indices, *leaves[1:])
        y.backward(operands.grad_out)
        want = [y.detach()] + [t.grad for t in leaves]
        got = self.on_ranks(ranks, operands, combine)
        names = ("output", "input", "topk_weights", "w_in", "w_out")
        for name, a, b in zip(names, got, want):
            if combine == "exact" and name in names[:3]:
                self.assertTrue(torch.equal(a, b), name)
            else:
                self.assertEqual(a, b, msg=lambda m: f"{name}: {m}")

    @parametrize("combine", ["reduce", "exact"])
    def test_compiles_as_one_graph(self, combine):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        operands = CASE.operands()
        switch = TokenSwitchAllToAll(
            dist.group.WORLD, 64, combine=combine, capacity=128
        )

        def layer(x, ids, weights, w_in, w_out):
            routing = switch.create_routing(ids)
            rows, row_weights, row_ids = switch.dispatch(routing, x, weights)
            return switch.combine(
                routing, F.moe_mlp(rows, row_ids, row_weights, w_in, w_out)
            )

        results = []
        for fn in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            x, weights = (
                t.detach().clone().requires_grad_()
                for t in (operands.input, operands.topk_weights)
            )
            y = fn(x, operands.topk_indices, weights, operands.w_in, operands.w_out)
            y.backward(operands.grad_out)
            results.append((y.detach(), x.grad, weights.grad))
        for eager, compiled in zip(*results):
            self.assertTrue(torch.equal(eager, compiled))


if __name__ == "__main__":
    run_tests()
