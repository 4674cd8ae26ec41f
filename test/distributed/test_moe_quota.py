# Owner(s): ["oncall: distributed"]

from statistics import mean

from moe_placement import (
    drifted,
    eplb_imbalance,
    expert_loads,
    LOADS,
    num_calls,
)

import torch
from torch.distributed._moe.placement import Placement, plan, Topology
from torch.distributed._moe.quota import (
    plan_step,
    reroute,
    slots_of,
    split_by_source,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)


SEEDS = range(10)
TOKEN_COPIES = 4_200_000
# The two-time-scale setting: 64 ranks in nodes of 8, 4 experts and 2 free slots each.
CLUSTER = Topology(8, 8, 6)


def max_flow_heaviest(counts, placement):
    """Lightest possible heaviest rank if nothing is borrowed, by maximum flows."""
    hosts = [[] for _ in counts]
    for rank, row in enumerate(placement.slot_experts.tolist()):
        for e in row:
            if e >= 0:
                hosts[e].append(rank)

    def fits(cap):
        load = [0] * placement.topology.num_ranks
        flow = [dict.fromkeys(ranks, 0) for ranks in hosts]
        for e, left in enumerate(counts):
            while left:
                came, queue, end = {}, [], None
                for rank in hosts[e]:
                    came[rank] = (None, e)
                    queue.append(rank)
                for rank in queue:
                    if load[rank] < cap:
                        end = rank
                        break
                    for other, tokens in enumerate(flow):
                        if tokens.get(rank):
                            for r in hosts[other]:
                                if r not in came:
                                    came[r] = (rank, other)
                                    queue.append(r)
                if end is None:
                    return False
                amount, path, rank = min(left, cap - load[end]), [], end
                while rank is not None:
                    before, other = came[rank]
                    path.append((before, other, rank))
                    if before is not None:
                        amount = min(amount, flow[other][before])
                    rank = before
                for before, other, rank in path:
                    flow[other][rank] += amount
                    if before is not None:
                        flow[other][before] -= amount
                load[end] += amount
                left -= amount
        return True

    low, high = -(-sum(counts) // placement.topology.num_ranks), sum(counts)
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return max(low, 1)


def token_counts(loads):
    return (loads * TOKEN_COPIES).round().long()


@instantiate_parametrized_tests
class TestQuota(TestCase):
    def assert_legal(self, step, counts, placement):
        per_node = placement.topology.ranks_per_node
        self.assertEqual(step.quotas.sum(1), counts)
        self.assertGreaterEqual(step.quotas.min().item(), 0)
        # What is placed stays, and only free slots are borrowed into.
        placed = placement.slot_experts >= 0
        self.assertEqual(step.slot_experts[placed], placement.slot_experts[placed])
        here = torch.zeros(placement.topology.num_ranks, placement.num_experts + 1)
        empty = placement.num_experts
        here.scatter_(1, step.slot_experts.masked_fill(step.slot_experts < 0, empty), 1)
        here = here[:, :empty].bool()
        # Tokens only where the weights are.
        self.assertFalse((step.quotas.t().gt(0) & ~here).any())
        # Weights are borrowed inside a node only.
        nodes = placement.topology.num_nodes
        home = placement.rank_holds().bool().view(nodes, per_node, -1).any(1)
        self.assertFalse((here.view(nodes, per_node, -1) & ~home[:, None]).any())
        # No expert twice on a rank.
        for row in step.slot_experts.tolist():
            held = [e for e in row if e >= 0]
            self.assertEqual(len(held), len(set(held)))

    # (loads, options of plan, most mean imbalance). Zipf-1 and one draw of lognormal 1.0
    # have an expert heavier than a node's share, which plan puts on a second node.
    @parametrize(
        "kind, options, limit",
        [
            subtest(("uniform", {}, 1.14), name="uniform"),
            subtest(("lognormal_0.5", {}, 1.14), name="lognormal_0_5"),
            subtest(("lognormal_1.0", {}, 1.14), name="lognormal_1_0"),
            subtest(("zipf_1", {}, 1.25), name="zipf_1"),
            subtest(("uniform", {"drift": 0.3}, 1.06), name="uniform_for_drift"),
            subtest(("lognormal_0.5", {"drift": 0.3}, 1.06), name="log_0_5_for_drift"),
            subtest(("lognormal_1.0", {"drift": 0.3}, 1.06), name="log_1_0_for_drift"),
            subtest(("zipf_1", {"drift": 0.3}, 1.10), name="zipf_1_for_drift"),
        ],
    )
    def test_two_time_scales_under_drift(self, kind, options, limit):
        self.check_two_time_scales(kind, options, limit, SEEDS)
        # Draws that were not looked at when the planner was written.
        if options or kind.startswith("lognormal"):
            self.check_two_time_scales(kind, options, limit, range(500, 510))

    def check_two_time_scales(self, kind, options, limit, seeds):
        two_scales, floors, peer = [], [], []
        for seed in seeds:
            loads = expert_loads(kind, 256, seed)
            later = drifted(loads, 0.3, seed)
            placement = plan(
                loads, CLUSTER, num_groups=256, num_replicas=256, **options
            )
            counts = token_counts(later)
            step = plan_step(counts, placement)
            self.assert_legal(step, counts, placement)
            two_scales.append(step.imbalance())
            nodes = step.quotas.sum(0).view(8, 8).sum(1).double()
            floors.append((nodes.max() / nodes.mean()).item())
            peer.append(eplb_imbalance(later, loads, CLUSTER.num_slots, 1, 1, 64))
        self.assertLessEqual(mean(two_scales), limit)
        self.assertLess(mean(two_scales), mean(peer))
        # Inside the nodes, ranks are level: the more free slots, the better.
        self.assertLessEqual(mean(two_scales), mean(floors) * 1.10)

    def test_near_the_maximum_flow(self):
        """200 cases: never above an even split, and within 5 % of the best one."""
        shapes = [(1, 8, 4, 24), (2, 4, 5, 32), (4, 4, 5, 64), (8, 2, 6, 64)]
        for seed in range(50):
            for nodes, per_node, slots, E in shapes:
                topology = Topology(nodes, per_node, slots)
                loads = expert_loads(LOADS[seed % 4], E, seed)
                replicas = (topology.num_slots, (topology.num_slots + E) // 2, E)
                placement = plan(
                    drifted(loads, 0.6, seed) if seed % 3 else torch.ones(E),
                    topology,
                    num_replicas=replicas[seed // 4 % 3],
                    num_groups=E if seed % 2 else None,
                )
                counts = (loads * (2_000, 100_000)[seed % 5 > 2]).round().long()
                step = plan_step(counts, placement)
                self.assertEqual(step.quotas.sum(1), counts)
                heaviest = step.quotas.sum(0).max().item()
                even = placement.rank_loads(counts).max().item()
                self.assertLessEqual(heaviest, even + 1)
                best = max_flow_heaviest(counts.tolist(), placement)
                self.assertLessEqual(heaviest, 1.05 * best, (seed, topology))

    def test_effort_is_bounded(self):
        loads = expert_loads("lognormal_0.5", 256, 0)
        placement = plan(loads, CLUSTER, num_groups=256, num_replicas=256)
        counts = token_counts(drifted(loads, 0.3, 0))
        self.assertLess(num_calls(lambda: plan_step(counts, placement)), 11_000)

    @parametrize("per_node", [8, 16, 64])
    def test_effort_with_skewed_loads_is_bounded(self, per_node):
        # 64 ranks in one domain, placed without a load: the most work that was found.
        topology = Topology(64 // per_node, per_node, 6)
        for seed in range(3):
            loads = expert_loads("zipf_1", 256, seed)
            placement = plan(torch.ones(256), topology, num_replicas=320)
            counts = token_counts(drifted(loads, 0.3, seed))
            calls = num_calls(lambda: plan_step(counts, placement))
            self.assertLess(calls, 25_000)

    @parametrize(
        "counts",
        [
            subtest([0] * 8, name="no_tokens"),
            subtest([1000] + [0] * 7, name="all_to_one_expert"),
            subtest([1, 0, 0, 0, 0, 0, 0, 0], name="one_token"),
            subtest([3, 1, 4, 1, 5, 9, 2, 6], name="small"),
        ],
    )
    @parametrize("min_tokens", [1, 64])
    def test_extreme_counts_are_legal(self, counts, min_tokens):
        placement = plan(torch.ones(8), Topology(2, 2, 3), num_groups=8, num_replicas=8)
        counts = torch.tensor(counts)
        step = plan_step(counts, placement, min_tokens_per_replica=min_tokens)
        self.assert_legal(step, counts, placement)

    def test_small_loads_do_not_borrow(self):
        placement = plan(torch.ones(8), Topology(1, 4, 3), num_groups=8, num_replicas=8)
        counts = torch.tensor([90, 0, 0, 0, 0, 0, 0, 0])
        borrowing = plan_step(counts, placement)
        frugal = plan_step(counts, placement, min_tokens_per_replica=100)
        self.assertEqual(borrowing.quotas.sum(0).max().item(), 23)
        self.assertEqual(frugal.slot_experts, placement.slot_experts)

    def test_static_replicas_share_exactly(self):
        # Expert 0 is on both nodes; the split levels the nodes, not the replicas.
        slots = torch.tensor([[0, 1], [2, -1], [0, 3], [4, -1]])
        placement = Placement(Topology(2, 2, 2), 5, slots)
        counts = torch.tensor([100, 50, 30, 10, 10])
        step = plan_step(counts, placement)
        self.assert_legal(step, counts, placement)
        self.assertEqual(step.quotas.sum(0), torch.tensor([50, 50, 50, 50]))

    def test_split_has_both_sums_and_keeps_own_tokens(self):
        torch.manual_seed(0)
        source = torch.randint(0, 50, (4, 16)) * (torch.rand(4, 16) < 0.7)
        placement = plan(
            torch.ones(16), Topology(1, 4, 6), num_groups=16, num_replicas=16
        )
        step = plan_step(source.sum(0), placement)
        split = split_by_source(source, step.quotas)
        self.assertEqual(split.sum(2), source)
        self.assertEqual(split.sum(0), step.quotas)
        self.assertGreaterEqual(split.min().item(), 0)
        own = torch.minimum(source, step.quotas.t())
        for rank in range(4):
            self.assertGreaterEqual((split[rank, :, rank] - own[rank]).min().item(), 0)

    def test_reroute_sends_what_the_split_says(self):
        torch.manual_seed(0)
        ranks, E, T, K = 4, 16, 64, 2
        topk = torch.randint(-1, E + 1, (ranks, T, K)) // 3  # skewed
        topk[0, 0] = torch.tensor([-1, E])
        source = torch.stack(
            [torch.bincount(t[(t >= 0) & (t < E)], minlength=E) for t in topk]
        )
        placement = plan(torch.ones(E), Topology(2, 2, 6), num_groups=E, num_replicas=E)
        step = plan_step(source.sum(0), placement)
        split = split_by_source(source, step.quotas)
        table = slots_of(step.slot_experts, E)
        flat = step.slot_experts.flatten()
        for rank in range(ranks):
            slots = reroute(topk[rank], split[rank], table, 6)
            routed = (topk[rank] >= 0) & (topk[rank] < E)
            self.assertEqual(slots >= 0, routed)
            self.assertEqual(flat[slots[routed]], topk[rank][routed])
            sent = torch.zeros(E, ranks, dtype=torch.int64)
            index = (topk[rank][routed], slots[routed] // 6)
            sent.index_put_(index, torch.ones_like(index[0]), accumulate=True)
            self.assertEqual(sent, split[rank])

    def test_errors(self):
        placement = Placement.contiguous(Topology(1, 2, 2), 4)
        with self.assertRaisesRegex(
            ValueError, r"\(num_experts\) = \(4,\), got \(5,\)"
        ):
            plan_step(torch.ones(5, dtype=torch.int64), placement)
        with self.assertRaisesRegex(ValueError, "must be integers"):
            plan_step(torch.ones(4), placement)
        with self.assertRaisesRegex(ValueError, "not negative"):
            plan_step(torch.tensor([1, 1, 1, -1]), placement)
        with self.assertRaisesRegex(ValueError, "at least 1, got 0"):
            plan_step(torch.tensor([1] * 4), placement, min_tokens_per_replica=0)
        source = torch.ones(2, 4, dtype=torch.int64)
        with self.assertRaisesRegex(ValueError, "expert 0 has 2 token copies .* for 0"):
            split_by_source(source, torch.zeros(4, 2, dtype=torch.int64))
        with self.assertRaisesRegex(ValueError, r"\(4, 2\), got \(2, 4\)"):
            split_by_source(source, source)


if __name__ == "__main__":
    run_tests()
