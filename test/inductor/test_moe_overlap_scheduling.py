# Owner(s): ["module: inductor"]
"""Inductor's overlap scheduler on a chunked expert-parallel layer. Runs without a GPU.

Eight ranks of a fake process group, fake CUDA tensors; what the graph would take is simulated with
two queues, of computation and of communication, and the scheduler's own estimates.
"""

import os


os.environ.pop("TRITON_INTERPRET", None)

import fake_gpu


fake_gpu.require()  # before torch

from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._runtime_estimation as runtime_estimation
from torch._inductor import config
from torch._inductor.fx_passes import overlap_scheduling
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._moe.schedule import OverlapSchedule
from torch.distributed._moe.switch import TokenSwitchAllToAll
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed.fake_pg import FakeStore


RANKS, CHUNKS = 8, 2
T, D, H, E, K = 4096, 2048, 768, 64, 8


def is_all_to_all(node):
    return "all_to_all" in str(node.target)


def is_experts(node):
    return node.target is torch.ops.aten._moe_mlp.default


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


def exposed_ms(graph):
    """Milliseconds that computation waits for communication, in the order of ``graph``."""
    collectives, compute = estimates(graph)
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


class TestMoeOverlapScheduling(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
        cls.addClassCleanup(dist.destroy_process_group)

    def scheduled(self):
        """The graph of a layer with shared experts, before and after the scheduler."""
        switch = TokenSwitchAllToAll(
            dist.group.WORLD, E, capacity=int(T // CHUNKS * 0.8)
        )
        schedule = OverlapSchedule(num_chunks=CHUNKS)

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

        orders = []
        original = overlap_scheduling.schedule_overlap_bucketing

        def record(graph_module, **options):
            for step in (
                lambda: graph_module,
                lambda: original(graph_module, **options),
            ):
                result = step()
                orders.append(
                    (
                        [
                            "send" if is_all_to_all(n) else "experts"
                            for n in result.graph.nodes
                            if is_all_to_all(n) or is_experts(n)
                        ],
                        exposed_ms(result.graph),
                        estimates(result.graph),
                    )
                )
            return result

        shapes = (
            *((T, D), (E, D), (E // RANKS, 2 * H, D), (E // RANKS, D, H)),
            *((D, 2 * H), (H, D)),
        )
        optimizations = "aten_distributed_optimizations."
        patches = {
            optimizations + "enable_overlap_scheduling": True,
            optimizations + "compute_estimator": "analytical",
            optimizations + "insert_overlap_deps": False,
        }
        with (
            fake_gpu.fake_gpu(),
            FakeTensorMode(),
            torch.no_grad(),
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
            args = [torch.empty(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
            fake_gpu.emitted(torch.compile(layer, fullgraph=True), *args)
        return orders

    def test_communication_runs_under_the_experts_of_the_other_chunk(self):
        (_, exposed_before, _), (order, exposed, (collectives, compute)) = (
            self.scheduled()
        )
        self.assertEqual(order, ["send", "send", "experts", "send", "experts", "send"])
        self.assertEqual(len(collectives), 2 * CHUNKS)
        total = sum(collectives.values())
        self.assertAlmostEqual(exposed_before, total, delta=1e-3 * total)
        # Dispatch 1 under experts 0 and combine 0 under experts 1; the first dispatch and
        # the last combine have the shared experts alone.
        _, dispatch, combine, _ = collectives.values()
        first, second = (ms for n, ms in compute.items() if is_experts(n))
        shared = sum(compute.values()) - first - second
        hideable = min(dispatch, first) + min(combine, second) + shared
        self.assertGreaterEqual((total - exposed) / hideable, 0.8)


if __name__ == "__main__":
    run_tests()
