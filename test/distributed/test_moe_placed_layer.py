# Owner(s): ["oncall: distributed"]

import copy
import threading
from unittest import mock

from moe_placement import any_plan, place_experts
from moe_token_switch import TokenSwitchTest

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._moe.all_to_all import TokenSwitchAllToAll
from torch.distributed._moe.exchange import Exchange
from torch.distributed._moe.fetch import Copies, moves_of
from torch.distributed._moe.loads import LoadStats
from torch.distributed._moe.plan import Plan, plan, reroute, split_by_source, Topology
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ExpertParallel,
    ExpertPlacement,
    parallelize_module,
)
from torch.nn.utils.moe_lora import add_lora
from torch.testing._internal.common_moe import bits_of_kernel
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.utils.checkpoint import checkpoint, CheckpointPolicy


E = 8
TOPOLOGY = Topology(2, 2, 3)


@instantiate_parametrized_tests
class TestPlacedLayer(TokenSwitchTest):
    """Compares a layer with placed experts, by plans of its counts and random plans, with one rank."""

    D, HIDDEN, TOKENS, K = 16, 12, 24, 2

    def make_data(self):
        """Makes the data. setUp would not do, because the processes of the ranks do not call it."""
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(self.TOKENS, self.D, generator=g)
        # Experts 0 and 1 are hot, so that replicas and quotas have something to do.
        logits = torch.randn(self.TOKENS, E, generator=g)
        logits[:, :2] += 1.5
        self.ids = logits.topk(self.K, dim=1).indices
        self.ids[5] = torch.tensor([-1, E])
        self.weights = torch.rand(self.TOKENS, self.K, generator=g)
        # Small weights, because the sine of a large output would amplify the composite's rounding.
        self.w_in = torch.randn(E, 2 * self.HIDDEN, self.D, generator=g) / 4
        self.w_out = torch.randn(E, self.D, self.HIDDEN, generator=g) / 4
        share = self.TOKENS // self.world_size
        self.mine = slice(self.rank * share, (self.rank + 1) * share)

    def fetched(self, placed):
        """Weights of this rank's slots. Free slots follow the copies and hold NaN."""
        exchange = Exchange(dist.group.WORLD, E, None, level="experts")
        home = slice(2 * self.rank, 2 * self.rank + 2)
        copies = Copies(exchange, moves_of(placed, self.rank))
        mine = self.w_in[home], self.w_out[home]
        slots = placed.topology.slots_per_rank
        rows = []
        for weight, arrived in zip(mine, copies.traced(*mine)):
            free = weight.new_full((slots - 2, *weight.shape[1:]), float("nan"))
            rows.append(torch.cat([weight, arrived, free])[:slots])
        return rows

    def counts(self):
        """(W, E) token copies of each rank."""
        source = torch.zeros(self.world_size, E, dtype=torch.int64)
        for rank, ids in enumerate(self.ids.chunk(self.world_size)):
            routed = ids[(ids >= 0) & (ids < E)]
            source[rank] = torch.bincount(routed, minlength=E)
        return source

    def slot_ids(self, found, quotas):
        """This rank's ids as slots of a plan."""
        split = split_by_source(self.counts(), quotas, self.rank)
        table = found.slots()
        slots_per_rank = found.topology.slots_per_rank
        return reroute(self.ids[self.mine], split, table, slots_per_rank)

    def run_layer(self, slots, w_in, w_out):
        num_slots = TOPOLOGY.num_ranks * TOPOLOGY.slots_per_rank
        switch = TokenSwitchAllToAll(dist.group.WORLD, num_slots, combine="exact")
        x = self.x[self.mine].clone().requires_grad_()
        weights = self.weights[self.mine].clone().requires_grad_()
        routing = switch.create_routing(slots)
        rows, row_weights, row_ids = switch.dispatch(routing, x, weights)
        y = switch.combine(routing, F.moe_mlp(rows, row_ids, row_weights, w_in, w_out))
        y.sin().sum().backward()
        return y.detach(), x.grad, weights.grad

    def one_rank(self):
        x = self.x.clone().requires_grad_()
        weights = self.weights.clone().requires_grad_()
        y = F.moe_mlp(x, self.ids, weights, self.w_in, self.w_out)
        y.sin().sum().backward()
        return tuple(t[self.mine] for t in (y.detach(), x.grad, weights.grad))

    def test_same_bits_wherever_experts_run(self):
        self.make_data()
        counts = self.counts().sum(0)
        want, copies = self.one_rank(), 0
        for found in (plan(counts, TOPOLOGY), plan(counts, Topology(1, 4, 3))):
            slots = self.slot_ids(found, found.quotas)
            copies += int((found.slot_experts >= 0).sum()) - E
            got = self.run_layer(slots, *self.fetched(found))
            for value, bits in zip(got, want):
                self.assertEqual(value, bits, **bits_of_kernel())
        self.assertGreater(copies, 0)
        for seed in range(4):
            # Quotas as for other counts: one rank has all rows of an expert.
            found = any_plan(TOPOLOGY, E, seed)
            quotas = torch.zeros_like(found.quotas)
            quotas[torch.arange(E), found.shares().argmax(1)] = counts
            slots = self.slot_ids(found, quotas)
            got = self.run_layer(slots, *self.fetched(found))
            for value, bits in zip(got, want):
                self.assertEqual(value, bits, **bits_of_kernel())

    def test_weights_of_another_plan_are_noticed(self):
        # Shows that the comparison above can fail: bits differ on some rank.
        self.make_data()
        found = plan(self.counts().sum(0), TOPOLOGY)
        slots = self.slot_ids(found, found.quotas)
        other = Plan.home(TOPOLOGY, E)
        got, _, _ = self.run_layer(slots, *self.fetched(other))
        same = torch.tensor(torch.equal(got, self.one_rank()[0]), dtype=torch.int32)
        dist.all_reduce(same, dist.ReduceOp.MIN)
        self.assertEqual(same.item(), 0)

    def trained(self, style, steps=9, turns=True):
        """Losses of steps with drifting routing, and final experts in order."""
        torch.manual_seed(0)
        model = nn.MoE(self.D, self.HIDDEN, E, top_k=2)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(torch.randn(param.shape) * 0.3)
        if style is not None:
            parallelize_module(model, self.mesh(("ep",), 4), style)
        # Router gradients vanish up to rounding, and AdamW would scale the rounding up to full steps.
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        placement = None if style is None else style.placement
        losses, seen = [], []
        for step in range(steps):
            g = torch.Generator().manual_seed(step)
            # Tokens point in one direction. If it turns, so do the hot experts. Plans by averages need
            # hot experts that stay.
            turn = step // 3 if turns else 0
            hot = torch.randn(self.D, generator=torch.Generator().manual_seed(turn))
            x = torch.randn(self.TOKENS, self.D, generator=g) + 2 * hot
            part = x if style is None else x[self.mine]
            y = model(part)
            y = y[0] if isinstance(y, tuple) else y
            loss = (y - part.roll(1, -1)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            if style is not None:
                for p in model.parameters():
                    if not isinstance(p, DTensor):
                        dist.all_reduce(p.grad)
                loss = loss.detach()
                dist.all_reduce(loss)
            optimizer.step()
            if placement is not None:
                placement.step()
            losses.append(loss.item())
            if placement is not None and placement.layers[0].last_plan is not None:
                seen.append(placement.layers[0].last_plan)
        return model, losses, seen

    @parametrize("online", [False, True])
    def test_training_with_a_placement(self, online):
        self.make_data()
        reference, want, _ = self.trained(None, turns=online)
        placement = ExpertPlacement(
            slots_per_rank=3,
            ranks_per_node=2,
            every=2,
            online=online,
            copy_cost=0.0,
        )
        style = ExpertParallel(placement=placement)
        model, losses, seen = self.trained(style, turns=online)
        # The same training, wherever experts are and however they are shared.
        self.assertEqual(losses, want, atol=2e-3, rtol=2e-4)
        got = model.w_out.full_tensor()
        self.assertEqual(got, reference.w_out.detach(), atol=5e-3, rtol=1e-2)
        home = Plan.home(TOPOLOGY, E)
        slots = placement.slot_experts[0]
        if not online:
            # Experts did run away from home.
            self.assertFalse(torch.equal(slots, home.slot_experts))
        else:
            borrowed = [not torch.equal(p.slot_experts, slots) for p in seen]
            self.assertTrue(any(borrowed))
            # With two nodes and all tokens in one of them, its ranks have twice the mean.
            loads = [p.quotas.sum(0).double() for p in seen]
            self.assertLessEqual(max((n.max() / n.mean()).item() for n in loads), 2.0)
        state = placement.state_dict()
        other, mesh = nn.MoE(self.D, self.HIDDEN, E, top_k=2), self.mesh(("ep",), 4)
        options = {"slots_per_rank": 3, "ranks_per_node": 2, "every": 2}
        again = place_experts(other, mesh, **options)
        again.load_state_dict(state)
        self.assertEqual(again.slot_experts[0], slots)
        self.assertEqual(again.state_dict()["stats"], state["stats"])

    @parametrize("num_chunks", [1, 2])
    def test_low_rank_updates_of_copies(self, num_chunks):
        # A copy has updates of its own. Both are merged once in a forward, for all of its chunks.
        self.make_data()
        torch.manual_seed(0)
        whole = nn.MoE(self.D, self.HIDDEN, E, top_k=self.K).double()
        for p in add_lora(whole, 2):
            nn.init.normal_(p, std=0.3)
        model = copy.deepcopy(whole)
        style, options = {"num_chunks": num_chunks}, {"online": True, "copy_cost": 0.0}
        mesh = self.mesh(("ep",), 4)
        placement = place_experts(model, mesh, style=style, slots_per_rank=4, **options)
        x, ids = self.x.double(), self.ids.clamp(0, E - 1)
        low_rank = type(model.parametrizations.w_in[0])
        with mock.patch.object(
            low_rank, "merge", autospec=True, side_effect=low_rank.merge
        ) as merge:
            got = model(x[self.mine], topk_indices=ids[self.mine])
        want = whole(x, topk_indices=ids)
        (layer,) = placement.layers
        self.assertTrue(layer.tried is layer.last_plan)
        copies = bool((layer.last_plan.slot_experts[self.rank, 2:] >= 0).any())
        self.assertEqual(merge.call_count, 2 * (1 + copies))
        self.assertEqual(got, want[self.mine], atol=1e-9, rtol=1e-9)
        got.sin().sum().backward()
        want.sin().sum().backward()
        for name, p in model.named_parameters():
            if isinstance(p, DTensor) and p.requires_grad:
                grad = whole.get_parameter(name).grad
                self.assertEqual(p.grad.full_tensor(), grad, atol=1e-9, rtol=1e-9)

    @parametrize("per_node", [1, 2, 4])
    def test_fetches_have_a_group_of_their_own(self, per_node):
        # Also beside a level of all ranks: the main thread sends there while a fetch is in flight.
        layer, mesh = nn.MoE(self.D, self.HIDDEN, E, top_k=2), self.mesh(("ep",), 4)
        style = {"token_switch": "hierarchical", "ranks_per_node": per_node}
        options = {"slots_per_rank": 3, "online": True, "copy_cost": 0.0}
        placement = place_experts(layer, mesh, style=style, **options)
        layer(torch.randn(8, self.D)).sum().backward()
        (placed,) = placement.layers
        self.assertTrue(placed.tried is placed.last_plan)
        levels = {level.group_name for level in layer._expert_parallel.switch.levels}
        self.assertNotIn(placed.exchange.group_name, levels)
        self.assertNotIn(placed.group_name, levels)
        # What ranks meet for is sent by the thread that has the group.
        maximum, met = Exchange._maximum, set()

        def recorded(exchange, x):
            met.add((exchange.group_name, threading.current_thread().name))
            return maximum(exchange, x)

        with mock.patch.object(Exchange, "_maximum", recorded):
            layer(torch.randn(8, self.D)).sum().backward()
        flies = {group: thread.startswith("moe_communication") for group, thread in met}
        self.assertEqual(len(flies), len(met))  # no group has two threads
        self.assertTrue(flies.pop(placed.exchange.group_name))
        self.assertFalse(flies.pop(placed.group_name))

    def test_nothing_is_sent_where_it_does_not_pay(self):
        self.make_data()
        style = ExpertParallel(
            placement=ExpertPlacement(slots_per_rank=3, every=1, online=True)
        )
        # By bytes, an expert is worth 18 tokens here, and a rank has 12 copies. The first window
        # is at home without a plan.
        _, _, seen = self.trained(style, steps=5)
        self.assertGreater(len(seen), 0)
        home = Plan.home(Topology(1, 4, 3), E).slot_experts
        self.assertEqual(style.placement.layers[0].copy_cost, 1.5 * self.HIDDEN)
        for step in seen:
            self.assertEqual(step.slot_experts, home)

    def test_a_plan_is_worth_its_fetches(self):
        placement = ExpertPlacement(slots_per_rank=4, copy_cost=0.0)
        layer = placement.make_layer(E, dist.group.WORLD)
        placement.layers.append(layer)
        loads = torch.tensor([900, 100, 100, 100, 100, 100, 100, 100]).double()
        placement.loads = loads[None]
        found = []
        for layer.copy_cost in (0.0, 50.0, 150.0, 1000.0):
            placement._plan()
            heaviest = layer.plan.rank_loads(loads).max().item()
            copies = layer.plan.busiest()
            found.append((copies, heaviest))
            # A plan never costs more than staying at home.
            self.assertLessEqual(heaviest + copies * layer.copy_cost, 1000.0)
        copies, heaviest = zip(*found)
        self.assertEqual(list(copies), sorted(copies, reverse=True))
        self.assertEqual(list(heaviest), sorted(heaviest))
        self.assertLess(heaviest[0], 500)
        self.assertLess(heaviest[1], 700)
        self.assertEqual(found[-1], (0, 1000.0))

    @parametrize("online", [False, True])
    @parametrize("keeps", [None, CheckpointPolicy.MUST_SAVE])
    def test_recomputation_is_counted_once(self, keeps, online):
        """Also if a policy keeps every result, keyed by the number of its op in the region."""
        self.make_data()
        options = {"online": True, "copy_cost": 0.0} if online else {"every": None}
        layer, mesh = nn.MoE(self.D, self.HIDDEN, E, top_k=2), self.mesh(("ep",), 4)
        placement = place_experts(layer, mesh, slots_per_rank=4, **options)
        x = self.x[self.mine].clone().requires_grad_()
        known = {}
        if keeps is not None:
            keep = ExpertParallel.save_communication(lambda *args, **kw: keeps)
            known["context_fn"] = keep
        y = checkpoint(layer, x, use_reentrant=False, **known)
        y.sum().backward()
        if online:
            # The plan of this forward: the recomputation made the same one again.
            total = placement.layers[0].last_plan.quotas.sum().item()
            self.assertIsNone(placement.state_dict()["stats"]["recorded"])
        else:
            recorded = torch.tensor(placement.state_dict()["stats"]["recorded"])
            total = recorded[:, :E].sum().item()
            self.assertEqual(recorded[0, E].item(), 1)
        self.assertEqual(total, self.TOKENS * 2)
        got, x.grad = x.grad, None
        layer(x).sum().backward()
        self.assertEqual(got, x.grad)

    def test_collects_while_a_layer_trains(self):
        # Counts of the switch itself.
        stats = LoadStats(1, E, decay=0.0)
        switch = TokenSwitchAllToAll(dist.group.WORLD, E)
        total = torch.zeros(E, dtype=torch.int64)
        for step in range(3):
            g = torch.Generator().manual_seed(10 * step)
            ids = torch.randint(0, E, (self.world_size, 6, 2), generator=g)
            received = torch.zeros(E // self.world_size, dtype=torch.int32)
            switch.create_routing(ids[self.rank], received)
            local = slice(2 * self.rank, 2 * self.rank + 2)
            counts = torch.zeros(E, dtype=torch.int32)
            counts[local] = received
            stats.record(0, counts)
            total += torch.bincount(ids.flatten(), minlength=E)
        average, _ = stats.update()
        self.assertEqual(average[0], total.double() / 3)


if __name__ == "__main__":
    run_tests()
