# Owner(s): ["oncall: distributed"]

from moe_gloo import GlooTest

import torch
import torch.distributed as dist
from torch.distributed._moe.placement import Placement, plan, Topology
from torch.distributed._moe.replicas import migrate, sum_replica_gradients
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


E, SHAPE = 8, (3, 5)
TOPOLOGY = Topology(2, 2, 3)


def expert_values(expert, dtype, salt):
    """What an expert's weights or state are, so that every rank knows all of them."""
    g = torch.Generator().manual_seed(100 * salt + expert)
    return torch.randn(SHAPE, generator=g).to(dtype)


def slot_values(placement, rank, dtype, salt):
    rows = [
        expert_values(e, dtype, salt) if e >= 0 else torch.full(SHAPE, -1.0).to(dtype)
        for e in placement.slot_experts[rank].tolist()
    ]
    return torch.stack(rows)


@instantiate_parametrized_tests
class TestMigration(GlooTest):
    def placements(self):
        g = torch.Generator().manual_seed(0)
        loads = torch.rand(2, E, generator=g)
        return [
            plan(loads[0], TOPOLOGY, num_replicas=E),
            plan(loads[1], TOPOLOGY),
            Placement.contiguous(TOPOLOGY, E),
        ]

    @parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
    def test_bits_arrive(self, dtype):
        first, replicated, plain = self.placements()
        for old, new in ((first, replicated), (replicated, plain), (plain, plain)):
            weights = slot_values(old, self.rank, dtype, 1)
            moved = migrate([weights], old, new)
            self.assertEqual(moved, new.moves_from(old))
            filled = new.slot_experts[self.rank] >= 0
            want = slot_values(new, self.rank, dtype, 1)
            self.assertEqual(
                weights[filled].view(torch.uint8), want[filled].view(torch.uint8)
            )

    def test_training_goes_on_with_the_same_bits(self):
        first, second, _ = self.placements()

        def build(placement):
            torch.manual_seed(7)
            rows = slot_values(placement, self.rank, torch.float32, 1)
            param = torch.nn.Parameter(rows)
            return param, torch.optim.AdamW([param], lr=0.1)

        def step(param, optimizer, placement, number):
            param.grad = slot_values(placement, self.rank, torch.float32, number)
            optimizer.step()

        stays, reference = build(second)
        moves, optimizer = build(first)
        for number in (2, 3):
            step(stays, reference, second, number)
            step(moves, optimizer, first, number)
        migrate([moves], first, second, optimizer=optimizer)
        for number in (4, 5):
            step(stays, reference, second, number)
            step(moves, optimizer, second, number)
        filled = second.slot_experts[self.rank] >= 0
        self.assertEqual(moves[filled], stays[filled], atol=0, rtol=0)
        for name in ("exp_avg", "exp_avg_sq"):
            got, want = optimizer.state[moves][name], reference.state[stays][name]
            self.assertEqual(got[filled], want[filled], atol=0, rtol=0)

    def test_factored_state_moves(self):
        """Adafactor keeps row and column moments, of other shapes than the weights."""
        first, second, _ = self.placements()

        def build(placement):
            rows = slot_values(placement, self.rank, torch.float32, 1)
            param = torch.nn.Parameter(rows)
            return param, torch.optim.Adafactor([param], lr=0.1)

        param, optimizer = build(first)
        reference, expected = build(second)
        for p, o, placement in (
            (param, optimizer, first),
            (reference, expected, second),
        ):
            p.grad = slot_values(placement, self.rank, torch.float32, 2)
            o.step()
        migrate([param], first, second, optimizer=optimizer)
        filled = second.slot_experts[self.rank] >= 0
        moved = [
            name
            for name, value in optimizer.state[param].items()
            if value.dim() and value.shape != param.shape
        ]
        self.assertEqual(len(moved), 2)
        for name in moved:
            got, want = optimizer.state[param][name], expected.state[reference][name]
            self.assertEqual(got[filled], want[filled], atol=0, rtol=0)

    def test_state_without_experts_is_refused(self):
        first, second, _ = self.placements()
        param = torch.nn.Parameter(slot_values(first, self.rank, torch.float32, 1))
        before = param.detach().clone()
        optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
        for state in (torch.zeros(5, 5), [torch.zeros(3)]):
            optimizer.state[param]["preconditioner"] = state
            with self.assertRaisesRegex(
                ValueError, "state 'preconditioner' of SGD .* 3 slots .* got "
            ):
                migrate([param], first, second, optimizer=optimizer)
            self.assertEqual(param, before)

    @parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_replicas_train_as_one(self, dtype):
        _, replicated, _ = self.placements()
        copies = replicated.rank_holds().sum(0)
        self.assertGreater(copies.max().item(), 1)
        rows = slot_values(replicated, self.rank, dtype, 1)
        param = torch.nn.Parameter(rows)
        optimizer = torch.optim.AdamW([param], lr=0.1)

        def grad_of(expert, rank, step):
            return expert_values(expert, dtype, 10 * step + rank)

        held = replicated.slot_experts[self.rank].tolist()
        for step in (1, 2):
            param.grad = torch.stack(
                [grad_of(max(e, 0), self.rank, step) for e in held]
            )
            sum_replica_gradients([param], replicated)
            for slot, e in enumerate(held):
                if e < 0:
                    continue
                ranks = replicated.rank_holds()[:, e].nonzero().flatten().tolist()
                want = sum(grad_of(e, r, step).float() for r in ranks).to(dtype)
                self.assertEqual(param.grad[slot], want, atol=0, rtol=0)
            optimizer.step()
        # Replicas still have the same bits on every rank.
        everywhere = [torch.empty_like(param.data) for _ in range(self.world_size)]
        dist.all_gather(everywhere, param.data)
        for e in range(E):
            at = (replicated.slot_experts == e).nonzero().tolist()
            for rank, slot in at:
                first_rank, first_slot = at[0]
                self.assertEqual(
                    everywhere[rank][slot],
                    everywhere[first_rank][first_slot],
                    atol=0,
                    rtol=0,
                )

    def test_errors_on_every_rank(self):
        plain = Placement.contiguous(TOPOLOGY, E)
        other = Placement.contiguous(Topology(1, 4, 3), E)
        with self.assertRaisesRegex(ValueError, "one topology and number of experts"):
            migrate([torch.zeros(3, 2)], plain, other)
        small = Placement.contiguous(Topology(1, 2, 4), E)
        with self.assertRaisesRegex(ValueError, "for 2 ranks, group has 4"):
            migrate([torch.zeros(4, 2)], small, small)
        with self.assertRaisesRegex(ValueError, "for 2 ranks, group has 4"):
            sum_replica_gradients([torch.zeros(4, 2)], small)
        with self.assertRaisesRegex(ValueError, r"3 slots .* got shape \(2, 2\)"):
            migrate([torch.zeros(2, 2)], plain, plain)


if __name__ == "__main__":
    run_tests()
