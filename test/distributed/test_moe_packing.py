# Owner(s): ["oncall: distributed"]

from statistics import mean

from moe_placement import (
    expert_loads,
    heaviest_pack_bound,
    LOADS,
)

import torch
from torch.distributed._moe.placement import (
    assign_slots,
    overlap_matching,
    pack,
    Placement,
    refine,
    Topology,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)


def items(kind, num_owners, copies, seed):
    """Loads and owners; owner o has copies[o % len(copies)] equal items."""
    loads = expert_loads(kind, num_owners, seed).tolist()
    counts = [copies[o % len(copies)] for o in range(num_owners)]
    owners = [o for o, n in enumerate(counts) for _ in range(n)]
    return [loads[o] / counts[o] for o in owners], owners


def heaviest(loads, packs, num_packs):
    total = [0.0] * num_packs
    for load, p in zip(loads, packs, strict=True):
        total[p] += load
    return max(total)


@instantiate_parametrized_tests
class TestPacking(TestCase):
    def assert_legal(self, packs, owners, num_packs, capacity):
        self.assertEqual(len(packs), len(owners))
        for p in range(num_packs):
            held = [o for o, q in zip(owners, packs) if q == p]
            self.assertLessEqual(len(held), capacity)
            self.assertEqual(len(held), len(set(held)))

    # The bound knows nothing of owners. The last case has some with as many items as
    # there are packs, and others with one heavy item.
    @parametrize(
        "num_packs, capacity, copies, limit",
        [
            subtest((8, 8, (1,), 1.005), name="one_item_each"),
            subtest((8, 12, (1, 2), 1.01), name="two_items"),
            subtest((4, 32, (1, 4, 1, 2), 1.15), name="on_every_pack"),
        ],
    )
    def test_swaps_come_near_the_bound(self, num_packs, capacity, copies, limit):
        for kind in LOADS:
            ratios = []
            for seed in range(5):
                loads, owners = items(kind, 64, copies, seed)
                self.assertEqual(len(loads), num_packs * capacity)
                packs = pack(loads, owners, num_packs, capacity)
                self.assert_legal(packs, owners, num_packs, capacity)
                better = refine(loads, owners, packs, num_packs, capacity)
                self.assert_legal(better, owners, num_packs, capacity)
                first = heaviest(loads, packs, num_packs)
                last = heaviest(loads, better, num_packs)
                self.assertLessEqual(last, first * (1 + 1e-12))
                bound = heaviest_pack_bound(loads, num_packs)
                self.assertGreaterEqual(last, bound * (1 - 1e-12))
                ratios.append(last / bound)
            self.assertLessEqual(mean(ratios), limit, kind)

    def test_room_is_made_for_an_owner_that_is_everywhere(self):
        # Owner 3 comes last and the only open pack has it already.
        loads, owners = [5.0, 4.0, 3.0, 1.0, 1.0, 1.0], [0, 1, 2, 3, 3, 3]
        packs = pack(loads, owners, 3, 2)
        self.assert_legal(packs, owners, 3, 2)
        loads, owners = [9.0, 1.0, 1.0, 0.5], [0, 1, 2, 2]
        self.assert_legal(pack(loads, owners, 2, 2), owners, 2, 2)

    def test_a_swap_is_only_made_for_more_than_its_price(self):
        loads, owners = [4.0, 3.0, 2.0, 1.0], [0, 1, 2, 3]
        packs = [0, 0, 1, 1]  # 7 and 3, best is 5 and 5 with two items moved
        moved = refine(loads, owners, packs, 2, 2, price=0.9)
        self.assertEqual(heaviest(loads, moved, 2), 5.0)
        self.assertEqual(refine(loads, owners, packs, 2, 2, price=1.1), packs)

    def test_pairs_are_swapped_where_single_items_do_not_help(self):
        # 10 and 8; a single swap changes a load by 2 or more, a pair by 1.
        loads = [6.0, 4.0, 5.0, 3.0]
        packs = refine(loads, [0, 1, 2, 3], [0, 0, 1, 1], 2, 2)
        self.assertEqual(heaviest(loads, packs, 2), 9.0)

    def test_an_empty_place_takes_an_item(self):
        packs = refine([3.0, 2.0], [0, 1], [0, 0], 2, 2)
        self.assertEqual(sorted(packs), [0, 1])

    def test_names_that_keep_most(self):
        new = [{1, 2}, {3, 4}, {5, 6}]
        old = [{5, 9}, {1, 2}, {3, 8}]
        self.assertEqual(overlap_matching(new, old), [1, 2, 0])


class TestPlacement(TestCase):
    def test_contiguous(self):
        placement = Placement.contiguous(Topology(2, 2, 3), 8)
        want = [[0, 1, -1], [2, 3, -1], [4, 5, -1], [6, 7, -1]]
        self.assertEqual(placement.slot_experts.tolist(), want)
        self.assertEqual(placement.imbalance(torch.ones(8)), 1.0)

    def test_replicas_share_a_load(self):
        slots = torch.tensor([[0, 1], [0, -1]])
        placement = Placement(Topology(1, 2, 2), 2, slots)
        loads = placement.rank_loads(torch.tensor([4, 2]))
        self.assertEqual(loads, torch.tensor([4.0, 2.0], dtype=torch.float64))
        self.assertEqual(placement.imbalance(torch.tensor([4, 2])), 4 / 3)
        alone = Placement(Topology(1, 2, 2), 2, torch.tensor([[0, 1], [-1, 1]]))
        self.assertEqual(placement.moves_from(alone), 1)

    def test_slots_and_names_of_what_stays(self):
        topology = Topology(2, 2, 2)
        first = assign_slots([[0, 1], [2], [3], [4, 5]], topology, 6, None)
        self.assertEqual(
            first.slot_experts.tolist(), [[0, 1], [2, -1], [3, -1], [4, 5]]
        )
        # The same nodes and ranks in another order, and expert 1 on a rank more.
        held = [[5, 4], [3, 1], [2], [1, 0]]
        again = assign_slots(held, topology, 6, first)
        self.assertEqual(again.slot_experts.tolist(), [[0, 1], [2, -1], [3, 1], [4, 5]])
        self.assertEqual(again.moves_from(first), 1)

    def test_errors(self):
        with self.assertRaisesRegex(ValueError, "num_nodes must be at least 1, got 0"):
            Topology(0, 2, 3)
        with self.assertRaisesRegex(ValueError, "rank 0 holds expert 1 twice"):
            Placement(Topology(1, 1, 3), 2, torch.tensor([[0, 1, 1]]))
        with self.assertRaisesRegex(ValueError, r"experts \[1\] are on no rank"):
            Placement(Topology(1, 1, 2), 2, torch.tensor([[0, -1]]))
        with self.assertRaisesRegex(ValueError, "multiple of the 4 ranks"):
            Placement.contiguous(Topology(2, 2, 3), 7)


if __name__ == "__main__":
    run_tests()
