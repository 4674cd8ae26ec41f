# Owner(s): ["module: inductor"]
"""In which order the overlap scheduler issues the collectives of one group. Runs without a GPU."""

import random

import torch
import torch.distributed as dist
from torch._inductor import config
from torch._inductor.fx_passes import overlap_scheduling
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


RANKS = 4
BY_TIMES = config.patch("aten_distributed_optimizations.order_all_to_all_groups", False)


def is_send(node):
    return "all_to_all" in str(node.target)


def is_collective(node):
    return "_c10d_functional" in str(node.target) and not is_wait(node)


def is_wait(node):
    return "wait_tensor" in str(node.target)


ops = torch.ops._c10d_functional


def send(x, group):
    sizes = [x.shape[0] // RANKS] * RANKS
    return ops.wait_tensor(ops.all_to_all_single(x, sizes, sizes, group.group_name))


def gather(x, group):
    gathered = ops.all_gather_into_tensor(x, RANKS, group.group_name)
    return ops.wait_tensor(gathered)


def scatter(x, group):
    scattered = ops.reduce_scatter_tensor(x, "sum", RANKS, group.group_name)
    return ops.wait_tensor(scattered)


def sharded_layers(x, index, weights, exchange, shard):
    """Layers with sharded weights and two chunks of experts; gradients of shards go out."""
    shards = []
    for w in weights:
        x = x @ gather(w, shard)
        chunks = x.chunk(2)
        rows = [send(chunk[index], exchange) for chunk in chunks]
        rows = [r @ gather(w, shard) for r in rows]
        x = x + torch.cat([send(r, exchange) for r in rows])
        shards.append(scatter(x.mT @ x, shard))
    return x, shards


@instantiate_parametrized_tests
class TestCollectiveOrder(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        dist.init_process_group("fake", rank=0, world_size=RANKS)
        cls.addClassCleanup(dist.destroy_process_group)

    def issued(self, gather_ms, send_ms=10.0, matmul_ms=20.0, groups=1):
        """Names of sends and matmuls as scheduled.

        A gather, which only the first send needs, comes before it; the second send has all that it
        needs, and the second matmul needs it.
        """
        group = dist.group.WORLD
        other = group if groups == 1 else dist.new_group(list(range(RANKS)))

        def layer(x, y, index, w):
            return send(x[index], group) @ w, send(y, other) @ w

        def estimate(node, size=None):
            if is_send(node):
                return send_ms
            if node.target is torch.ops.aten.mm.default:
                return matmul_ms
            return gather_ms if node.target is torch.ops.aten.index.Tensor else 0.0

        with FakeTensorMode():
            x = torch.empty(64, 64)
            index = torch.empty(64, dtype=torch.int64)
            graph = make_fx(layer)(x, torch.empty(64, 64), index, x)
        overlap_scheduling.schedule_overlap_bucketing(
            graph,
            custom_runtime_estimation=estimate,
            compute_estimator="analytical",
            pre_bucketing_fsdp_collectives=False,
        )
        return [
            node.name
            for node in graph.graph.nodes
            if is_send(node) or node.target is torch.ops.aten.mm.default
        ]

    first, second = "all_to_all_single", "all_to_all_single_1"

    def test_first_needed_first(self):
        want = [self.first, self.second, "mm", "mm_1"]
        for gather_ms in (1.0, 6.0, 40.0):
            self.assertEqual(self.issued(gather_ms), want)

    def test_fails_without_the_order(self):
        with BY_TIMES:
            order = self.issued(gather_ms=1.0)
        self.assertEqual(order, [self.second, self.first, "mm", "mm_1"])

    def test_an_op_of_another_name_exchanges_no_tokens(self):
        # It was found by "all_to_all" in the name.
        with torch.library._scoped_library("moe_order_test", "DEF") as lib:
            lib.define("no_all_to_all_at_all(Tensor x) -> Tensor")
            target = torch.ops.moe_order_test.no_all_to_all_at_all.default
            graph = torch.fx.Graph()
            node = graph.call_function(target, (graph.placeholder("x"),))
            self.assertTrue(overlap_scheduling.is_time_shared([node]))
        target = torch.ops._c10d_functional.all_to_all_single.default
        node = graph.call_function(target, (node, [1], [1], "0"))
        self.assertFalse(overlap_scheduling.is_time_shared([node]))
        with BY_TIMES:
            self.assertTrue(overlap_scheduling.is_time_shared([node]))

    def test_other_groups_do_not_wait(self):
        order = self.issued(gather_ms=1.0, groups=2)
        self.assertEqual(order[:2], [self.second, self.first])

    def orders(self, rank, exchange, shard, tokens=64, **options):
        """Collectives of every group, by name, in the order in which a rank issues them."""
        times = random.Random(rank)

        def estimate(node, size=None):
            if is_wait(node) or node.op != "call_function":
                return 0.0
            return times.choice([0.0, 0.1, 1.0, 10.0])

        with FakeTensorMode():
            weights = [torch.empty(64 // RANKS, 64) for _ in range(3)]
            index = torch.empty(tokens // 2, dtype=torch.int64)
            x = torch.empty(tokens, 64)
            args = x, index, weights, exchange, shard
            graph = make_fx(lambda *args: sharded_layers(*args, exchange, shard))(
                *args[:3]
            )
        overlap_scheduling.schedule_overlap_bucketing(
            graph,
            custom_runtime_estimation=estimate,
            compute_estimator="analytical",
            pre_bucketing_fsdp_collectives=False,
            **options,
        )
        issued = [node for node in graph.graph.nodes if is_collective(node)]
        if not options:
            self.assertEqual(len(issued), 3 * 8)
        by_group = {exchange: [], shard: []}
        for node in issued:
            group = overlap_scheduling.get_group_name(node)
            by_group[exchange if group == exchange.group_name else shard].append(
                node.name
            )
        return by_group

    @parametrize("groups", [1, 2])
    @parametrize("bucketing", [False, True])
    def test_no_rank_has_an_order_of_its_own(self, groups, bucketing):
        exchange = dist.group.WORLD
        shard = exchange if groups == 1 else dist.new_group(list(range(RANKS)))
        options = {"collective_bucketing": True} if bucketing else {}

        def seen():
            return {
                tuple(self.orders(rank, exchange, shard, tokens, **options)[exchange])
                for rank in range(6)
                for tokens in (64, 512)
            }

        self.assertEqual(len(seen()), 1)
        with BY_TIMES:
            self.assertGreater(len(seen()), 1)  # as it was

    def test_another_group_keeps_its_buckets(self):
        exchange, shard = dist.group.WORLD, dist.new_group(list(range(RANKS)))
        found = self.orders(0, exchange, shard, collective_bucketing=True)
        self.assertEqual(len(found[exchange]), 3 * 4)
        self.assertLess(len(found[shard]), 3 * 4)


if __name__ == "__main__":
    run_tests()
