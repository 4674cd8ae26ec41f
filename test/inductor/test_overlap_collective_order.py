# Owner(s): ["module: inductor"]
"""In which order the overlap scheduler issues the collectives of one group. Runs without a GPU."""

from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor.fx_passes import overlap_scheduling
from torch._inductor.fx_passes.overlap_scheduling import OverlapScheduler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed.fake_pg import FakeStore


RANKS = 4


def is_send(node):
    return "all_to_all" in str(node.target)


class TestCollectiveOrder(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
        cls.addClassCleanup(dist.destroy_process_group)

    def issued(self, gather_ms, send_ms=10.0, matmul_ms=20.0, groups=1):
        """Names of sends and matmuls as scheduled.

        A gather, which only the first send needs, comes before it; the second send has all that it
        needs, and the second matmul needs it.
        """
        group = dist.group.WORLD
        other = group if groups == 1 else dist.new_group(list(range(RANKS)))

        def send(x, group):
            sent = torch.ops._c10d_functional.all_to_all_single(
                x, [x.shape[0] // RANKS] * RANKS, [x.shape[0] // RANKS] * RANKS,
                group.group_name,
            )  # fmt: skip
            return torch.ops._c10d_functional.wait_tensor(sent)

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
        self.assertEqual(self.issued(gather_ms=1.0), want)

    def test_fails_without_the_rule(self):
        with mock.patch.object(
            OverlapScheduler, "_would_delay_next_compute", lambda *args: False
        ):
            order = self.issued(gather_ms=1.0)
        self.assertEqual(order, [self.second, self.first, "mm", "mm_1"])

    def test_what_hides_most_of_it_may_come_first(self):
        # 4 ms of delay against 6 hidden ones.
        order = self.issued(gather_ms=6.0)
        self.assertEqual(order[:2], [self.second, self.first])
        self.assertEqual(self.issued(gather_ms=4.0)[:2], [self.first, self.second])

    def test_other_groups_do_not_wait(self):
        order = self.issued(gather_ms=1.0, groups=2)
        self.assertEqual(order[:2], [self.second, self.first])


if __name__ == "__main__":
    run_tests()
