# Owner(s): ["oncall: distributed"]

import functools
import itertools

import torch
import torch.distributed as dist
from torch.distributed._moe.loads import LoadStats
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.common_utils import run_tests


E = 8


class TestLoadStats(MultiThreadedTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_average_over_ranks_and_time(self):
        stats = LoadStats(2, E, decay=0.75)
        counts = torch.arange(E, dtype=torch.int32)
        stats.record(0, counts * (self.rank + 1))
        stats.record(1, counts)
        stats.record(1, counts)
        first, _ = stats.update()
        # Loads are averages per forward, summed over ranks. The second layer had two forwards.
        want = torch.stack([counts * 10, counts * 4]).double()
        self.assertEqual(first, want)
        stats.record(0, counts)
        second = torch.stack([counts * 4, counts * 0]).double()
        average, latest = stats.update()
        self.assertEqual(average, 0.75 * want + 0.25 * second)
        self.assertEqual(latest, second)
        gathered = [None] * self.world_size
        dist.all_gather_object(gathered, first.tolist())
        self.assertTrue(all(g == gathered[0] for g in gathered))

    def test_saving_takes_nothing(self):
        stats = LoadStats(1, E, decay=0.5)
        counts = torch.arange(E) * (self.rank + 1)
        stats.record(0, counts)
        states = [stats.state_dict() for _ in range(2)]
        self.assertEqual(*states)
        other = LoadStats(1, E, decay=0.5)
        other.load_state_dict(states[0])
        for each in (stats, other):
            average, _ = each.update()
            self.assertEqual(average, torch.arange(E).double()[None] * 10)

    def test_torch_func(self):
        """Each element of a vmap counts as a forward. Gradients count nothing twice."""
        x, w = torch.randn(3, 5, 4), torch.randn(4, E)

        def loss(stats, w, x):
            scores = x @ w
            ids = scores.topk(2).indices.flatten()
            counts = torch.zeros(E, dtype=torch.int64)
            stats.record(0, counts.scatter_add(0, ids, torch.ones_like(ids)))
            return scores.square().sum()

        expected, found = LoadStats(1, E), LoadStats(1, E)
        run = functools.partial(loss, found)
        grad, vmap = torch.func.grad, torch.func.vmap
        of_all, of_both = vmap(run, (None, 0)), torch.stack([w, -w])
        for transformed, weights, inputs in (
            (lambda: grad(run)(w, x[0]), [w], x[:1]),
            (lambda: vmap(grad(run), (None, 0))(w, x), [w], x),
            (lambda: vmap(of_all, (0, None))(of_both, x), of_both, x),
            (lambda: vmap(run, (None, 2))(w, x.movedim(0, 2)), [w], x),
        ):
            transformed()
            for each in itertools.product(weights, inputs):
                loss(expected, *each)
            self.assertEqual(found.update(), expected.update())

    def test_errors(self):
        with self.assertRaisesRegex(ValueError, r"decay must be in \[0, 1\), got 1"):
            LoadStats(1, E, decay=1)
        with self.assertRaisesRegex(ValueError, r"shape \(8,\), got \(7,\)"):
            LoadStats(1, E).record(0, torch.zeros(7, dtype=torch.int32))


if __name__ == "__main__":
    run_tests()
