# Owner(s): ["oncall: distributed"]
"""One level of communication on simulated ranks: where rows go, and what returns."""

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed._moe.all_to_all import TokenSwitchAllToAll
from torch.distributed._moe.exchange import Exchange, read_on_host, Splits, take
from torch.distributed._moe.payload import pack, unpack
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


W, E, K, D, T = 4, 8, 3, 5, 6


def routing(name):
    """(W * T, K) ids, distinct within each row, as a router gives them."""
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
        dist.init_process_group("fake", rank=0, world_size=W)
        self.addCleanup(dist.destroy_process_group)

    def test_the_name_of_a_destroyed_group_is_used_again(self):
        exchange = Exchange(dist.group.WORLD, E, None, level="flat")
        self.assertIs(exchange.group, dist.group.WORLD)
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=2)
        self.assertEqual(dist.group.WORLD.group_name, exchange.group_name)
        with self.assertRaisesRegex(RuntimeError, r"\[0, 1, 2, 3\] was destroyed"):
            exchange.group

    def shard(self, t):
        return LocalTensor(dict(enumerate(p.clone() for p in t.chunk(W))))

    def parts(self, t):
        return [t._local_tensors[r] for r in range(W)]

    def route(self, ids, capacity):
        exchange = Exchange(dist.group.WORLD, E, capacity, level="flat")
        demand = exchange.demand(ids)
        if capacity is not None:
            return exchange, exchange.static(demand)
        mine, theirs, _ = exchange.exchange_counts(
            demand.row_counts, demand.slot_counts
        )
        (send, send_slots), (recv, recv_slots) = read_on_host(mine, theirs)
        route = exchange.compact(
            demand, Splits(send, recv), Splits(send_slots, recv_slots)
        )
        return exchange, route

    def dispatch(self, ids, x, capacity, weights=None):
        """Rows, weights and local ids of all ranks, what returns, and the exchange."""
        weights = torch.zeros(ids.shape) if weights is None else weights
        top_k = ids.shape[1]
        with LocalTensorMode(W):
            ids = self.shard(ids)
            exchange, route = self.route(ids, capacity)
            rows, row_weights, local_ids = exchange.dispatch(
                route, self.shard(x), self.shard(weights), ids, find_slots=True
            )
            # Every rank sends the rows and the weights back as they are.
            back = exchange.return_rows(route, rows, row_weights)
            slots = exchange.rows_to_slots(route, rows, top_k)
            slots, _ = exchange.send_back(route.slots, slots, None)
            by_slot = take(slots, route.slot_index)
        parts = [self.parts(t) for t in (rows, row_weights, local_ids, by_slot)]
        return exchange, *parts, *(torch.cat(self.parts(t)) for t in back)

    # For each token, the ranks that have one of its experts.
    def destinations(self, ids):
        local = E // W
        return [{e // local for e in row if 0 <= e < E} for row in ids.tolist()]

    @parametrize("capacity", [None, T])
    @parametrize("name", ["uniform", "sentinels", "one_rank", "none"])
    def test_a_token_goes_once_to_each_rank_and_returns(self, name, capacity):
        ids, x = routing(name), torch.randn(W * T, D)
        _, rows, _, local, by_slot, back, _ = self.dispatch(ids, x, capacity)
        ranks = self.destinations(ids)
        for rank, (got, local_ids) in enumerate(zip(rows, local, strict=True)):
            used = (local_ids >= 0).any(1)
            tokens = [t for t in range(W * T) if rank in ranks[t]]
            self.assertEqual(got[used], x[tokens], atol=0, rtol=0)
            if capacity is None:
                self.assertEqual(got.shape[0], len(tokens))
            # The experts of this rank keep the positions of their slots.
            mine = torch.div(ids[tokens], E // W, rounding_mode="floor") == rank
            want = torch.where(mine, ids[tokens] % (E // W), -1)
            self.assertEqual(local_ids[used], want)
        copies = torch.tensor([len(r) for r in ranks])[:, None]
        self.assertEqual(back, x * copies)
        valid = ((ids >= 0) & (ids < E))[:, :, None]
        self.assertEqual(torch.cat(by_slot), x[:, None] * valid)

    @parametrize("capacity", [None, T])
    @parametrize("top_k", [K, W + 1])
    def test_weights_return_to_where_they_came_from(self, top_k, capacity):
        g = torch.Generator().manual_seed(1)
        ids = torch.rand(W * T, E, generator=g).argsort(1)[:, :top_k]
        ids[::2, 0], ids[1::3, 1] = -1, E
        values = torch.randn(ids.shape)
        _, _, _, local, *_, back = self.dispatch(
            ids, torch.randn(W * T, D), capacity, values
        )
        want = values.masked_fill((ids < 0) | (ids >= E), 0)
        self.assertEqual(back, want)
        # Also if a row has more columns than there are ranks.
        used = sum(int((ids >= 0).sum()) for ids in local)
        self.assertEqual(used, int((want != 0).sum()))

    def test_parts_of_a_message_are_aligned(self):
        parts = [torch.randn(3, 5).bfloat16(), torch.rand(3, 3), torch.arange(6).int()]
        parts[2] = parts[2].view(3, 2)
        message = pack(parts, fill=[0, 1, -1])
        self.assertEqual(message.shape, (4, 16 + 16 + 16))
        got = unpack(message, [(p.shape[1], p.dtype) for p in parts])
        for part, view, last in zip(parts, got, (0, 1, -1)):
            self.assertEqual(view[:3], part, atol=0, rtol=0)
            self.assertTrue((view[3] == last).all())

    @parametrize(
        "backend, rows, width, offset",
        [
            ("inductor", 5, 8, 0),
            ("aot_eager", 5, 8, 0),
            ("aot_eager", 0, 8, 0),
            ("aot_eager", 1, 8, 1),
            ("aot_eager", 5, 5, 0),
            ("aot_eager", 5, 6, 2),
        ],
    )
    def test_a_graph_packs_the_same_values(self, backend, rows, width, offset):
        g = torch.Generator().manual_seed(0)
        bits = torch.randint(-(2**15), 2**15, (offset + rows * width,), generator=g)
        # All bit patterns, including NaNs with their payloads.
        values = bits.short().view(torch.bfloat16)[offset:].view(rows, width)
        ids = torch.randint(0, 9, (rows, 3), generator=g).int()
        parts = [values, torch.rand(3, rows, generator=g).mT, ids]
        layout = [(p.shape[1], p.dtype) for p in parts]
        order = torch.randint(0, rows + 1, (7,), generator=g)
        compiled = torch.compile(pack, backend=backend, fullgraph=True, dynamic=False)
        for fill, index in (
            (None, None),
            ([0, 1, -1], None),
            ([0, 1, -1], order),
            (None, order[order < rows]),
        ):
            torch._dynamo.reset()
            want = pack(parts, fill, index)
            got = compiled(parts, fill, index)
            self.assertEqual(got.view(torch.uint8).shape, want.shape)
            for one, other in zip(unpack(got, layout), unpack(want, layout)):
                words = [t.contiguous().view(torch.uint8) for t in (one, other)]
                self.assertEqual(*words, rtol=0, atol=0)

    def test_what_does_not_fit_is_counted(self):
        ids, ones = routing("one_rank"), torch.ones(W * T, D)
        exchange, _, _, local, *_ = self.dispatch(ids, ones, T - 1)
        self.assertEqual([n.item() for n in self.parts(exchange.needed)], [T] * W)
        used = sum(int((ids >= 0).any(1).sum()) for ids in local)
        self.assertEqual(used, W * (T - 1))


class TestAgreement(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_names_what_differs(self):
        switch = TokenSwitchAllToAll(dist.group.WORLD, 2)
        switch._must_agree(dtype=torch.float32)
        text = (
            r"AllToAll: K must be the same on all ranks, ranks \[0, 1\] have \[2, 3\]"
        )
        with self.assertRaisesRegex(RuntimeError, text):
            switch._must_agree(K=2 + dist.get_rank(), dtype=torch.float32)
        # K is compared only at the first use, whatever the values are then.
        switch._must_agree(dtype=dist.get_rank())


if __name__ == "__main__":
    run_tests()
