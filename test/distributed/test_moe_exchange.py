# Owner(s): ["oncall: distributed"]
"""One level of communication on simulated ranks: what goes where, and what returns."""

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed._moe.consistency import SameOnAllRanks
from torch.distributed._moe.exchange import Exchange, read_on_host, Sizes, Splits, take
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.distributed.fake_pg import FakeStore


W, E, K, D, T = 4, 8, 3, 5, 6


def routing(name):
    """(W * T, K) ids without an expert twice in a row, as a router gives them."""
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(W * T, E, generator=g).argsort(1)[:, :K]
    if name == "sentinels":
        ids[::2, 0], ids[1::3, 1] = -1, E
    elif name == "one_rank":
        ids[:] = torch.tensor([6, 7, -1])
    elif name == "none":
        ids[:] = -1
    return ids


@instantiate_parametrized_tests
class TestExchange(TestCase):
    def setUp(self):
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=W)
        self.addCleanup(dist.destroy_process_group)

    def shard(self, t):
        return LocalTensor(dict(enumerate(p.clone() for p in t.chunk(W))))

    def parts(self, t):
        return [t._local_tensors[r] for r in range(W)]

    def route(self, ids, capacity):
        exchange = Exchange(dist.group.WORLD, E, capacity, level="flat")
        demand = exchange.demand(ids)
        if capacity is not None:
            return exchange, exchange.plan(ids, demand, None)
        mine, theirs = exchange.exchange_counts(demand.row_counts, demand.slot_counts)
        (send, send_slots), (recv, recv_slots) = read_on_host(mine, theirs)
        sizes = Sizes(Splits(send, recv), Splits(send_slots, recv_slots))
        return exchange, exchange.plan(ids, demand, sizes)

    # For each token, the ranks that have one of its experts.
    def destinations(self, ids):
        local = E // W
        return [{e // local for e in row if 0 <= e < E} for row in ids.tolist()]

    @parametrize("capacity", [None, T])
    @parametrize("name", ["uniform", "sentinels", "one_rank", "none"])
    def test_a_token_goes_once_to_each_rank_and_returns(self, name, capacity):
        ids, x = routing(name), torch.randn(W * T, D)
        with LocalTensorMode(W):
            exchange, route = self.route(self.shard(ids), capacity)
            rows = exchange.send_rows(route, self.shard(x))
            # Every rank sends the rows back as they are.
            back = exchange.return_rows(route, rows)
        ranks = self.destinations(ids)
        for rank, (got, local_ids) in enumerate(
            zip(self.parts(rows), self.parts(route.recv_idx), strict=True)
        ):
            used = (local_ids >= 0).any(1)
            tokens = [t for t in range(W * T) if rank in ranks[t]]
            self.assertEqual(got[used], x[tokens], atol=0, rtol=0)
            if capacity is None:
                self.assertEqual(got.shape[0], len(tokens))
            # The experts of this rank, at the place of the slot.
            mine = torch.div(ids[tokens], E // W, rounding_mode="floor") == rank
            want = torch.where(mine, ids[tokens] % (E // W), -1)
            self.assertEqual(local_ids[used], want)
        copies = torch.tensor([len(r) for r in ranks])[:, None]
        self.assertEqual(torch.cat(self.parts(back)), x * copies)

    @parametrize("capacity", [None, T])
    def test_slots_return_to_where_they_came_from(self, capacity):
        ids, values = routing("sentinels"), torch.randn(W * T, K)
        with LocalTensorMode(W):
            exchange, route = self.route(self.shard(ids), capacity)
            slots = exchange.send_slots(route, self.shard(values))
            matrix = exchange.slots_to_matrix(route, slots)
            slots = exchange.slots_of(route, matrix)
            returned = exchange.return_slots(route, slots)
            back = take(returned, route.slot_index)
        want = values.masked_fill((ids < 0) | (ids >= E), 0)
        self.assertEqual(torch.cat(self.parts(back)), want)

    def test_what_does_not_fit_is_counted(self):
        ids, ones = routing("one_rank"), torch.ones(W * T, D)
        with LocalTensorMode(W):
            exchange, route = self.route(self.shard(ids), T - 1)
            rows = exchange.send_rows(route, self.shard(ones))
        self.assertEqual(self.parts(exchange.needed), [torch.tensor(T)] * W)
        self.assertEqual(torch.cat(self.parts(rows)).sum().item(), W * (T - 1) * D)


class TestSameOnAllRanks(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_names_what_differs(self):
        same = SameOnAllRanks("Owner", [dist.group.WORLD])
        same.check(dtype=torch.float32)
        text = r"Owner: K must be the same on all ranks, ranks \[0, 1\] have \[2, 3\]"
        with self.assertRaisesRegex(RuntimeError, text):
            same.check(K=2 + dist.get_rank(), dtype=torch.float32)
        # Compared at the first use only, whatever the values are then.
        same.check(dtype=dist.get_rank())


if __name__ == "__main__":
    run_tests()
