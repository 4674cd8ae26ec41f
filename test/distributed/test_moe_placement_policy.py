# Owner(s): ["oncall: distributed"]
"""When experts run away from home: how much a plan must save, by loads and by the clock."""

import contextlib
from unittest import mock

from moe_gloo import GlooTest
from moe_placement import place_experts

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._moe import loads
from torch.distributed._moe.wire_bytes import count_wire_bytes
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    _expert_placed_layer,
    ExpertParallel,
    ExpertPlacement,
    parallelize_module,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


D, H, E, K, TOKENS = 16, 8, 8, 2, 16


@instantiate_parametrized_tests
class TestPolicy(GlooTest):
    def layer(self, **options):
        torch.manual_seed(0)
        moe = nn.MoE(D, H, E, K)
        with torch.no_grad():
            moe.router.weight.zero_()
            moe.router.weight[:2, 0] = 5.0  # both on rank 0
        mesh = self.mesh(("ep",), 4)
        placement = place_experts(moe, mesh, slots_per_rank=4, **options)
        return moe, placement, placement.layers[0]

    def run_steps(self, moe, placement, seconds, steps, between=None):
        """Returns whether each step had copies. A step takes ``seconds(copies)`` by the clock.

        ``between(step)`` runs between steps and returns its seconds.
        """
        clock, found = [0.0], []
        with mock.patch.object(loads.time, "perf_counter", lambda: clock[0]):
            for step in range(steps):
                clock[0] += between(step) if between is not None else 0.0
                x = torch.rand(TOKENS, D)
                with count_wire_bytes(*placement.layers) as wire:
                    moe(x).sum().backward()
                found.append(bool(wire.messages["experts"]))
                # Ranks measure different times, some of them the opposite, and must still decide alike.
                clock[0] += seconds(found[-1]) * (1 + self.rank / 8)
                clock[0] += 0.4 * (self.rank - 1.5) * found[-1]
                placement.step()
        together = [None] * 4
        dist.all_gather_object(together, found)
        self.assertEqual(together, [found] * 4)
        return found

    @parametrize("online", [False, True])
    def test_steps_with_copies_are_slower(self, online):
        moe, placement, layer = self.layer(every=4, online=online)
        layer.copy_cost = 1.0
        prices = []
        found = self.run_steps(moe, placement, lambda copies: 1.0 + copies, 45)
        # First at home, then one window of copies, and no more, because copies cost more than they save.
        self.assertEqual([i for i, copies in enumerate(found) if copies], [4, 5, 6, 7])
        self.assertGreater(layer.copy_cost, 2.0)
        # For other loads copies may pay.
        prices.append(layer.copy_cost)
        self.assertEqual(layer.plan.slot_experts, layer.home.slot_experts)

    @parametrize("online", [False, True])
    def test_steps_with_copies_are_faster(self, online):
        moe, placement, layer = self.layer(every=4, online=online)
        layer.copy_cost = 1.0
        found = self.run_steps(moe, placement, lambda copies: 2.0 - copies, 24)
        self.assertEqual(found, [False] * 4 + [True] * 20)
        self.assertEqual(layer.copy_cost, 1.0)

    @parametrize("online", [False, True])
    def test_time_between_steps_is_not_of_a_step(self, online):
        # Such as a data loader, or an evaluation that takes long whenever there are copies.
        moe, placement, layer = self.layer(every=4, online=online)
        layer.copy_cost = 1.0

        def between(step):
            placed = layer.moves if not online else layer.tried is not None
            with torch.no_grad():
                state = placement.state_dict()
                moe(torch.rand(TOKENS, D))
                placement.load_state_dict(state)
            return 100.0 * (step > 4 if placed else step % 2)

        found = self.run_steps(moe, placement, lambda copies: 2.0 - copies, 24, between)
        self.assertTrue(all(found[6:]))
        self.assertEqual(layer.copy_cost, 1.0)

    @parametrize("online", [False, True])
    @parametrize("slower, rest", [(0.045, 5), (0.001, 1), (3.0, 8)])
    def test_slower_copies_lose_one_percent(self, online, slower, rest):
        moe, placement, layer = self.layer(every=4, online=online)

        def between(step):
            layer.copy_cost = 1.0  # The loads changed, and by them it would pay.
            return 0.0

        # A window at home, then three trials, each with its rest.
        steps = 4 * (1 + 3 * (1 + rest))
        with mock.patch.object(loads, "_LONGEST_REST", 8):
            found = self.run_steps(
                moe, placement, lambda copies: 1.0 + slower * copies, steps, between
            )
        trials = [i // 4 for i, copies in enumerate(found) if copies][::4]
        self.assertEqual(trials, [1 + i * (1 + rest) for i in range(3)])
        if rest < 8:
            self.assertLess(slower * sum(found), 0.01 * steps)

    @parametrize("online", [False, True])
    @parametrize("slower", [False, True])
    def test_a_trial_ends_after_four_steps(self, online, slower):
        moe, placement, layer = self.layer(every=12, online=online)

        def between(step):
            layer.copy_cost = 1.0  # The loads changed, and by them it would pay.
            return 0.0

        sums = []
        with mock.patch.object(
            loads.LoadStats, "update", autospec=True, side_effect=loads.LoadStats.update
        ) as update:

            def seconds(copies):
                sums.append(update.call_count)
                return 2.0 - copies + 1.06 * slower * copies

            found = self.run_steps(moe, placement, seconds, 60, between)
        tries = [i for i, copies in enumerate(found) if copies]
        # 3 % slower: three windows of rest, counted from the end of the trial. Loads are summed when a
        # plan is made.
        if slower:
            self.assertEqual(tries, [*range(12, 16), *range(48, 52)])
        else:
            self.assertEqual(tries, [*range(12, 60)])
        plans = [i for i, (a, b) in enumerate(zip(sums, sums[1:])) if a != b]
        expected = [11, 47] if slower else [11, 23, 35, 47]
        self.assertEqual(plans, [] if online else expected)

    @parametrize("online", [False, True])
    def test_short_windows_are_whole_trials(self, online):
        # After four of six steps, two noisy ones would be left.
        moe, placement, layer = self.layer(every=6, online=online)
        layer.copy_cost = 1.0
        found = self.run_steps(moe, placement, lambda copies: 1.0 + copies, 24)
        self.assertEqual(
            [i for i, copies in enumerate(found) if copies], [*range(6, 12)]
        )

    def test_windows_without_every(self):
        # Windows are eight steps at home and four steps of a trial.
        moe, placement, layer = self.layer(every=None, online=True)

        def between(step):
            layer.copy_cost = 1.0
            return 0.0

        found = self.run_steps(
            moe, placement, lambda copies: 1.0 + 0.015 * copies, 32, between
        )
        tries = [i for i, copies in enumerate(found) if copies]
        self.assertEqual(tries, [8, 9, 10, 11, 24, 25, 26, 27])

    def test_a_price_is_not_measured(self):
        moe, placement, layer = self.layer(every=4, copy_cost=1.0)
        found = self.run_steps(moe, placement, lambda copies: 1.0 + copies, 24)
        self.assertTrue(all(found[6:]))
        self.assertEqual(layer.copy_cost, 1.0)

    def test_loads_that_change_as_fast_as_plans(self):
        _, placement, layer = self.layer(copy_cost=0.0)
        hot = torch.full((3, 1, E), 10.0, dtype=torch.float64)
        for i in range(3):
            hot[i, 0, 2 * i : 2 * i + 2] = 100.0
        placement.loads = hot[0]
        placement._plan(None, hot[0])
        self.assertTrue(layer.moves)
        # The plan for the loads before is worse for these.
        placement.loads = hot[1]
        placement._plan(hot[0], hot[1])
        self.assertGreater(layer.home.cost(hot[1, 0]), 0)
        self.assertFalse(layer.moves)
        placement._plan(hot[1], hot[1])
        self.assertTrue(layer.moves)
        placement.loads = hot[2]
        placement._plan(hot[1], hot[2])
        self.assertFalse(layer.moves)

    def test_online_plans_that_stay_at_home_are_seldom(self):
        moe, placement, layer = self.layer(every=None, online=True, copy_cost=1e6)
        planned = []
        with mock.patch.object(
            layer, "_plan_online", side_effect=layer._plan_online
        ) as plan:
            for _ in range(40):
                # Both micro-batches and the recomputation of a step plan in the same way.
                for _ in range(2):
                    moe(torch.rand(TOKENS, D))
                placement.step()
                planned.append(plan.call_count)
                plan.reset_mock()
        self.assertEqual([i for i, n in enumerate(planned) if n], [0, 2, 6, 14, 30])
        self.assertEqual(set(planned), {0, 2})
        layer.copy_cost = 0.0
        for _ in range(8):
            moe(torch.rand(TOKENS, D))
            placement.step()
        self.assertEqual((layer.pause, layer.pauses), (0, 0))
        self.assertIsNotNone(layer.tried)

    def test_resumed_online_plans_are_those_of_the_run(self):
        moe, placement, layer = self.layer(every=None, online=True, copy_cost=1e6)
        planned = []
        for _ in range(20):
            # Another run continues from each step, as after a checkpoint.
            again, resumed, other = self.layer(online=True, copy_cost=1e6)
            resumed.load_state_dict(placement.state_dict())
            for model, run in ((moe, placement), (again, resumed)):
                model(torch.rand(TOKENS, D))
                run.step()
            planned.append(layer.pauses)
            self.assertEqual((other.pause, other.pauses), (layer.pause, layer.pauses))
        self.assertEqual(sorted(set(planned)), [1, 3, 7, 15])

    @parametrize("seen", [False, True])
    def test_a_state_from_before_the_first_forward(self, seen):
        """Loads of an evaluation between saving and loading are forgotten."""
        moe, placement, layer = self.layer(every=1, copy_cost=0.0)
        state = placement.state_dict()
        if seen:
            with torch.no_grad():
                moe(torch.rand(5 * TOKENS, D))
        placement.load_state_dict(state)
        moe(torch.rand(TOKENS, D))
        placement.step()
        self.assertEqual(placement.loads.sum().item(), 4 * TOKENS * K)

    def test_state_of_other_layers(self):
        _, placement, layer = self.layer(every=1)
        before = placement.state_dict()
        for change in (lambda rows: rows[:4], lambda rows: rows + rows):
            state = placement.state_dict()
            state["quotas"] = [change(rows) for rows in state["quotas"]]
            state["steps"] = 7
            with self.assertRaisesRegex(
                ValueError, rf"layers of \[.*\] experts, .*\[{E}\]"
            ):
                placement.load_state_dict(state)
            self.assertEqual(placement.state_dict(), before)
        for place, expert, message in (
            (2, E, f"expert {E} in a layer of {E}"),
            (0, 1, "slots must have the experts of the rank"),
        ):
            state = placement.state_dict()
            state["slot_experts"][0][0][place] = expert
            state["steps"] = 7
            with self.assertRaisesRegex(ValueError, message):
                placement.load_state_dict(state)
            self.assertEqual(placement.state_dict(), before)
        with self.assertRaisesRegex(ValueError, "0 plans"):
            placement.load_state_dict({**before, "slot_experts": []})

    def test_state_of_other_nodes(self):
        """A copy that crosses nodes is no plan of smaller ones."""
        _, placement, layer = self.layer(every=1)
        state = placement.state_dict()
        state["slot_experts"][0][3][2] = 0
        placement.load_state_dict(state)
        self.assertIsNotNone(layer.moves)
        _, other, layer = self.layer(every=1, ranks_per_node=2)
        other.load_state_dict(state)
        self.assertIsNone(layer.moves)

    def test_arguments(self):
        for options, message in (
            ({"slots_per_rank": 3.0}, "slots_per_rank must be an integer .*got 3.0"),
            ({"ranks_per_node": 0}, "ranks_per_node must be an integer .*got 0"),
            ({"every": 2.5}, "every must be an integer of at least 1, got 2.5"),
            ({"decay": 1}, r"decay must be in \[0, 1\), got 1"),
            ({"copy_cost": -1.0}, "copy_cost must be finite"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                ExpertPlacement(**{"slots_per_rank": 3} | options)
        with self.assertRaisesRegex(TypeError, "an ExpertPlacement, got 3"):
            ExpertParallel(placement=3)

    @parametrize("options", [{"every": 2}, {"online": True}, {"keep": True}])
    def test_settings_that_differ(self, options):
        odd = options if self.rank == 1 else {}
        moe, _, _ = self.layer(**{"copy_cost": 0.0, "every": 1} | odd)
        with self.assertRaisesRegex(RuntimeError, "settings must be the same on all"):
            moe(torch.rand(TOKENS, D))

    def test_layers_of_one_rank_only(self):
        moe, placement, _ = self.layer(copy_cost=0.0)
        if self.rank == 1:
            placement.layers.append(placement.make_layer(E, dist.group.WORLD))
        with self.assertRaisesRegex(RuntimeError, r"layers of .* \[1, 2, 1, 1\]"):
            moe(torch.rand(TOKENS, D))

    @parametrize(
        "options",
        [
            {"combine": "mean"},
            {"capacity": 0},
            {"token_switch": "hierarchical", "ranks_per_node": 3},
            {"token_switch": lambda mesh, num_experts: None},
        ],
    )
    def test_a_style_that_fails_adds_no_layer(self, options):
        placement = ExpertPlacement(slots_per_rank=4)
        style = ExpertParallel(placement=placement, **options)
        with self.assertRaises((ValueError, TypeError)):
            parallelize_module(nn.MoE(D, H, E, K), self.mesh(("ep",), 4), style)
        self.assertEqual(placement.layers, [])

    def test_rests_send_nothing(self):
        # Between trials of online plans, no counts are sent, and times only for the last window at home.
        moe, placement, layer = self.layer(every=4, online=True)
        sent = []

        def counted(module, name):
            # Not those of the token switch.
            def call(*args, **kwargs):
                sent[-1].append(name)
                return getattr(dist, name)(*args, **kwargs)

            seen = mock.Mock(wraps=dist, **{name: call})
            return mock.patch.object(module, "dist", seen)

        def between(step):
            sent.append([])
            layer.copy_cost = 1.0  # The loads changed, and by them it would pay.
            return 0.0

        names = "all_reduce", "all_gather_into_tensor"
        with contextlib.ExitStack() as stack:
            for module, name in zip((loads, _expert_placed_layer), names):
                stack.enter_context(counted(module, name))
            found = self.run_steps(
                moe, placement, lambda copies: 1.0 + 0.045 * copies, 80, between
            )
        # Router gradients send nothing, because there is no data parallelism. Trials take one window,
        # rests five, and times are summed at the end of a trial.
        plans = [i for i, step in enumerate(sent) if names[1] in step]
        self.assertEqual(plans, [i for i, copies in enumerate(found) if copies])
        times = [i for i, step in enumerate(sent) if names[0] in step]
        self.assertEqual(times, [7, 31, 55, 79])
        self.assertEqual({len(step) for step in sent}, {0, 1, 2})

    def test_at_home_nothing_is_added(self):
        moe, placement, layer = self.layer(every=100, copy_cost=0.0)
        plain = nn.MoE(D, H, E, K)
        parallelize_module(plain, self.mesh(("ep",), 4), ExpertParallel())
        names = []
        for module in (moe, plain):
            x = torch.rand(TOKENS, D, requires_grad=True)
            with count_wire_bytes(module._expert_parallel.switch, layer) as wire:
                y = module(x)
                y.sum().backward()
            nodes, seen = [y.grad_fn], []
            while nodes:
                node = nodes.pop()
                if node is not None:
                    seen.append(node.name())
                    nodes += [n for n, _ in node.next_functions]
            names.append((sorted(seen), {k: dict(v) for k, v in wire.messages.items()}))
        self.assertEqual(*names)

    def test_memory_is_of_the_copies(self):
        moe, placement, layer = self.layer(every=1, copy_cost=0.0, keep=True)
        optimizer = torch.optim.AdamW([p for p in moe.parameters() if p.dim() == 3])
        for _ in range(4):
            moe(torch.rand(TOKENS, D)).sum().backward()
            optimizer.step()
            placement.step()
        moe(torch.rand(TOKENS, D))
        _, copies = layer.fetcher._kept
        mine = layer.plan.slot_experts[self.rank]
        self.assertGreater(layer.plan.busiest(), 0)
        for kept in copies:
            self.assertEqual(len(kept), int((mine[2:] >= 0).sum()))
        for p, state in optimizer.state.items():
            for value in (v for v in state.values() if v.dim() == 3):
                self.assertIsInstance(value, DTensor)
                self.assertEqual(value.to_local().shape, p.to_local().shape)
                self.assertEqual(len(value.to_local()), E // 4)


if __name__ == "__main__":
    run_tests()
