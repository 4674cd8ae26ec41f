# Owner(s): ["module: inductor"]
"""Inductor's overlap scheduler on a chunked expert-parallel layer. Runs without a GPU.

Eight ranks of a fake process group, fake CUDA tensors; what the graph would take is simulated with
two queues, of computation and of communication, and the scheduler's own estimates.
"""

import fake_gpu


fake_gpu.require()  # before torch

from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._runtime_estimation as runtime_estimation
from torch._inductor import config
from torch._inductor.fx_passes import overlap_scheduling
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._moe.all_to_all import TokenSwitchAllToAll
from torch.distributed._moe.overlap_schedule import OverlapSchedule
from torch.testing._internal.common_moe import FakeRanksTest, slow_subtest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


RANKS = FakeRanksTest.world_size
T, D, H, E, K = 4096, 2048, 768, 64, 8


def is_all_to_all(node):
    return "all_to_all" in str(node.target)


def is_experts(node):
    return node.target in (
        torch.ops.aten._moe_mlp.default,
        torch.ops.aten._moe_mlp_backward.default,
    )


def estimates(graph):
    """Milliseconds of every collective and of every compute node."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    collectives = {
        n: overlap_scheduling.estimate_collective_time(n)
        for n in calls
        if is_all_to_all(n)
    }
    compute = {
        n: overlap_scheduling.estimate_roofline_runtime_ms(n)
        for n in calls
        if overlap_scheduling.is_compute_node(n)
    }
    return collectives, compute


def exposed_ms(graph, collectives, compute):
    """Milliseconds that computation waits for communication, in the order of ``graph``."""
    now = sent = 0.0
    arrived = {}
    for node in graph.nodes:
        if node in collectives:
            sent = max(sent, now) + collectives[node]
            arrived[node] = sent
        elif "wait_tensor" in str(node.target):
            source = node.args[0]
            while source not in arrived:
                (source,) = source.all_input_nodes[:1]
            now = max(now, arrived[source])
        elif node in compute:
            now += compute[node]
    return now - sum(compute.values())


def hideable_ms(collectives, compute):
    """Milliseconds of communication that computation could hide, at most.

    Experts hide neither the first collective, which the first of them wait for, nor the last, which
    comes from the last of them. The other matmuls can hide those as well.
    """
    first, *_, last = collectives.values()
    total = sum(collectives.values())
    experts = sum(ms for n, ms in compute.items() if is_experts(n))
    hidden = min(experts, total - first - last)
    return hidden + min(sum(compute.values()) - experts, total - hidden)


class Seen(NamedTuple):
    """A graph in front of the overlap scheduler, or behind it.

    Attributes:
        order: "send" and "experts".
        exposed: milliseconds of communication that nothing hides.
        total: of the communication.
        hideable: of it.
    """

    order: list[str]
    exposed: float
    total: float
    hideable: float

    @classmethod
    def of(cls, graph):
        collectives, compute = estimates(graph)
        order = [
            "send" if is_all_to_all(n) else "experts"
            for n in graph.nodes
            if is_all_to_all(n) or is_experts(n)
        ]
        total = sum(collectives.values())
        hideable = hideable_ms(collectives, compute)
        return cls(order, exposed_ms(graph, collectives, compute), total, hideable)

    @property
    def hidden(self):
        """Share of what could be hidden."""
        return (self.total - self.exposed) / self.hideable


@instantiate_parametrized_tests
class TestMoeOverlapScheduling(FakeRanksTest):
    def scheduled(self, num_chunks=2, shared_width=H):
        """Forward and backward of a layer with shared experts, before and after the scheduler."""
        switch = TokenSwitchAllToAll(
            dist.group.WORLD, E, capacity=int(T // num_chunks * 0.8)
        )
        schedule = OverlapSchedule(num_chunks=num_chunks)

        def layer(x, router, w_in, w_out, shared_in, shared_out):
            def experts(rows, ids, weights, num_rows):
                row_slots, slot_rows, offs, _ = torch._moe_permutation(
                    ids, E // RANKS, num_rows=num_rows
                )
                return torch._moe_mlp(
                    rows, w_in, w_out, offs, weights, row_slots, slot_rows
                )[0]

            def shared():
                gate, up = (x @ shared_in).chunk(2, -1)
                return (F.silu(gate) * up) @ shared_out

            ids, weights = F.moe_topk(F.linear(x, router), K)
            routed, rest = schedule(switch, x, ids, weights, experts, shared)
            return routed + rest

        seen = []
        original = overlap_scheduling.schedule_overlap_bucketing

        def record(graph_module, **options):
            before = Seen.of(graph_module.graph)
            result = original(graph_module, **options)
            seen.append((before, Seen.of(result.graph)))
            return result

        shapes = (
            *((T, D), (E, D), (E // RANKS, 2 * H, D), (E // RANKS, D, H)),
            *((D, 2 * shared_width), (shared_width, D)),
        )
        optimizations = "aten_distributed_optimizations."
        patches = {
            optimizations + "enable_overlap_scheduling": True,
            optimizations + "compute_estimator": "analytical",
            optimizations + "insert_overlap_deps": False,
        }
        options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
        with (
            fake_gpu.fake_gpu(),
            FakeTensorMode(),
            config.patch(patches),
            mock.patch.object(overlap_scheduling, "schedule_overlap_bucketing", record),
            mock.patch.object(
                runtime_estimation, "get_device_tflops", lambda *args, **kw: 989.0
            ),
            mock.patch.object(
                runtime_estimation, "get_device_dram_gbps", lambda *args, **kw: 3350.0
            ),
            mock.patch.object(torch.cuda, "device_count", lambda: RANKS),
        ):
            args = [torch.empty(s, **options) for s in shapes]
            fake_gpu.emitted(torch.compile(layer, fullgraph=True), *args)
        forward, backward = seen
        return {"forward": forward, "backward": backward}

    @parametrize(
        "num_chunks, shared_width",
        [(2, H), slow_subtest((4, 8 * H))],
    )
    def test_communication_is_hidden(self, num_chunks, shared_width):
        for name, (before, after) in self.scheduled(num_chunks, shared_width).items():
            with self.subTest(name):
                # Nothing is hidden in the order of the trace.
                self.assertAlmostEqual(
                    before.exposed, before.total, delta=0.02 * before.total
                )
                self.assertEqual(after.order.count("send"), 2 * num_chunks)
                self.assertGreaterEqual(after.hidden, 0.8)
                if num_chunks == 2:
                    # Dispatch 1 under experts 0, combine 0 under experts 1; backward the same.
                    order = ["send", "send", "experts", "send", "experts", "send"]
                    self.assertEqual(after.order, order)

    def test_fails_without_the_order_of_collectives(self):
        with mock.patch.object(overlap_scheduling, "is_time_shared", lambda _: True):
            _, after = self.scheduled()["backward"]
        self.assertLess(after.hidden, 0.6)


if __name__ == "__main__":
    run_tests()
