# Owner(s): ["oncall: distributed"]

"""Users of the cost model get its numbers, and no others."""

import dataclasses
import itertools
import math
import pickle
from unittest import mock

import torch
from torch.distributed._moe.overlap_schedule import (
    OverlapSchedule,
    PartSeconds,
    simulated_seconds,
)
from torch.distributed._tools import moe_cost_model as cost, moe_layer_plan
from torch.distributed._tools.moe_calibration import (
    calibrate,
    cpu_call,
    measure_exchange,
    measure_kernels,
    measure_links,
)
from torch.distributed._tools.moe_cpu_model import (
    cpu_exchange,
    cpu_experts,
    cpu_layer,
    cpu_parts,
    cpu_rate,
)
from torch.distributed._tools.moe_estimator import inductor_estimate
from torch.distributed._tools.moe_exchange_model import all_to_all, copies, link_seconds
from torch.distributed._tools.moe_fit import CpuRow, fit_cpu, fit_link
from torch.distributed._tools.moe_layer_plan import (
    choose_chunks,
    fastest_dtypes,
    layer_chunks,
    overlap_schedule,
)
from torch.distributed._tools.moe_profile import (
    Constants,
    CpuConstants,
    Profile,
    profile,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


class TestSchedule(TestCase):
    def test_chunks_of_the_model(self):
        p = profile("H100")
        # Two nodes and long sequences: links as slow as products.
        args = (32768, 4096, 1536, 128, 8, 32)
        ranked = layer_chunks(p, *args)
        schedule = overlap_schedule(p, *args)
        self.assertEqual(schedule.num_chunks, ranked[0].num_chunks)
        self.assertGreater(schedule.num_chunks, 1)
        # Few tokens: starts outweigh what could hide.
        self.assertEqual(overlap_schedule(p, 64, *args[1:]).num_chunks, 1)
        for place, bad in ((0, 0), (0, 40.5), (2, -1), (4, 129), (5, 3)):
            changed = (*args[:place], bad, *args[place + 1 :])
            with self.assertRaisesRegex(ValueError, "overlap_schedule: .*, got"):
                overlap_schedule(p, *changed)
        for place, bad in ((0, -1), (3, 4), (4, 129), (5, 256)):
            changed = (*args[:place], bad, *args[place + 1 :])
            with self.assertRaisesRegex(ValueError, "layer_chunks: .*, got"):
                layer_chunks(p, *changed)
        for candidates in ((0,), ()):
            with self.assertRaisesRegex(ValueError, "candidates must .*, got"):
                layer_chunks(p, *args, candidates=candidates)
        # A broken model, whose exchange is free, has nothing to hide.
        with mock.patch.object(moe_layer_plan, "all_to_all", lambda *a, **k: 0.0):
            self.assertEqual(overlap_schedule(p, *args).num_chunks, 1)

    def test_shared_experts_beside_the_longer_part(self):
        p, args = profile("H100"), (32768, 4096, 1536, 128, 8, 32)
        # Dispatch in FP8 takes half as long as combine; dispatch by copies per expert longer.
        schedule = overlap_schedule(p, *args, shared_f=12288, wire_dtype="fp8")
        self.assertEqual(schedule.shared, "combine")
        for dispatch, combine, beside in (
            (1.0, 3.0, "combine"),
            (3.0, 1.0, "dispatch"),
            (2.0, 2.0, "dispatch"),
        ):
            best, *_ = choose_chunks(
                lambda n: (dispatch, 1.0, combine), 2.5, candidates=(1,)
            )
            self.assertEqual((best.num_chunks, best.shared), (1, beside))
            # Beside the other part it takes longer, unless both are as long.
            parts = PartSeconds((dispatch,), (1.0,), (combine,), 2.5)
            other = {"combine": "dispatch", "dispatch": "combine"}[beside]
            slower = simulated_seconds(OverlapSchedule(1, other), parts)
            self.assertEqual(slower > best.seconds, dispatch != combine)

    def test_chunks_of_a_cpu(self):
        p = profile("H100")
        device = dataclasses.replace(p.device, fast=2e7)
        constants = Constants(fast=1.0, fast_us=300.0, setup_us=0.0, fabric=0.0)
        p = Profile("x", device, constants, "x", CpuConstants(rate16=1.5e11))
        args = (256, 1024, 256, 16, 8, 2)
        there, work, back, shared = cpu_parts(p, *args, 2, shared_f=512)
        # All tokens have an expert on the other rank: their rows, at the link's rate.
        rows = 128 * (1 - 1 / math.comb(16, 8))
        self.assertEqual(there, 3e-4 + rows * 2048 / 2e7)
        self.assertEqual(back, there)
        self.assertEqual(shared, cpu_experts(p.cpu, 256, 1024, 512, 1, 1))
        self.assertGreater(work, cpu_experts(p.cpu, 128, 1024, 256, 8, 8))
        ranked = layer_chunks(p, *args)
        self.assertGreater(ranked[0].num_chunks, 1)
        parts = PartSeconds((there,) * 2, (work,) * 2, (back,) * 2)
        two = next(c for c in ranked if c.num_chunks == 2)
        self.assertEqual(two.seconds, simulated_seconds(OverlapSchedule(2), parts))
        there, work, back, _ = cpu_parts(p, *args, 2, dtype="fp32")
        parts = PartSeconds((there,) * 2, (work,) * 2, (back,) * 2)
        two = layer_chunks(p, *args, dtype="fp32", candidates=(2,))[0]
        self.assertEqual(two.seconds, simulated_seconds(OverlapSchedule(2), parts))
        with self.assertRaisesRegex(ValueError, "p.cpu is None"):
            cpu_parts(profile("H100"), *args)


class TestInductor(TestCase):
    def graph(self, T=512, D=256, f=128, E=16, K=4, mode="fake"):
        def layer(x, w_in, w_out, weights):
            ids = torch.arange(weights.numel()).view_as(weights) % E
            y = F.moe_mlp(x, ids, weights, w_in, w_out)
            return torch.autograd.grad(y.sum(), (x, w_in, w_out))

        args = (
            torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True),
            torch.randn(E, 2 * f, D, dtype=torch.bfloat16, requires_grad=True),
            torch.randn(E, D, f, dtype=torch.bfloat16, requires_grad=True),
            torch.rand(T, K, requires_grad=True),
        )
        return make_fx(layer, tracing_mode=mode)(*args).graph

    def test_hook(self):
        p = profile("H100")
        estimate = inductor_estimate(p)
        seen = {}
        for node in self.graph().nodes:
            ms = estimate(node)
            if ms is not None:
                seen[node.target._overloadpacket.__name__] = ms
        self.assertEqual(set(seen), {"_moe_mlp", "_moe_mlp_backward"})
        for name, pass_ in (("_moe_mlp", "fwd"), ("_moe_mlp_backward", "bwd")):
            want = cost.experts(p, 2048, 256, 128, 16, pass_=pass_, tokens=512)
            self.assertEqual(seen[name], 1e3 * want)

    def test_sizes_that_are_not_known(self):
        gpu = profile("H100")
        for p in (gpu, dataclasses.replace(gpu, cpu=CpuConstants())):
            estimate = inductor_estimate(p)
            static, dynamic = (self.graph(mode=mode) for mode in ("fake", "symbolic"))
            x = next(node for node in dynamic.nodes if node.op == "placeholder")
            guards = x.meta["val"].shape[0].node.shape_env.guards
            before = len(guards)
            want, found = ([*map(estimate, g.nodes)] for g in (static, dynamic))
            self.assertEqual([*filter(None, found)], [*filter(None, want)])
            self.assertEqual(len([*filter(None, found)]), 2)
            self.assertEqual(len(guards), before)

    def test_all_to_all_of_measured_links(self):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(8, 16, dtype=torch.bfloat16, device="meta")
        send = torch.ops._c10d_functional.all_to_all_single.default
        node = graph.call_function(send, (x, [2] * 4, [2] * 4, "group"))
        gpu = profile("H100")
        self.assertIsNone(inductor_estimate(gpu)(node))
        pickle.dumps(inductor_estimate(gpu))  # part of the keys of Inductor's caches
        device = dataclasses.replace(gpu.device, fast=1e6)
        p = Profile("x", device, Constants(fast_us=200.0), "x", CpuConstants())
        self.assertEqual(
            inductor_estimate(p)(node), 0.2 + 1e3 * 8 * 16 * 2 * 0.75 / 1e6
        )
        self.assertEqual(inductor_estimate(p)(node, 0), 0.2)
        # Directions that take turns after 64 bytes: what is beyond them takes twice as long.
        turns = dataclasses.replace(p, cpu=CpuConstants(turn=64.0))
        want = 0.2 + 1e3 * (2 * 192 - 64) / 1e6
        self.assertEqual(inductor_estimate(turns)(node), want)
        args = (8, 16, 64, 4, 4)
        sent = 8 * 16 * 2 * copies(4, 4, 64, 4).fast
        before, after = (all_to_all(q, *args, domain=4) for q in (p, turns))
        rate = 1e6 * p.constants.fast
        self.assertEqual(after - before, (sent - 64) / rate, rtol=1e-9, atol=0)

    def test_inductor_takes_it(self):
        from torch._inductor.fx_passes.overlap_scheduling import get_custom_estimation

        estimate = inductor_estimate(profile("B200"))
        node = next(n for n in self.graph().nodes if "_moe_mlp" in str(n.target))
        self.assertEqual(get_custom_estimation(node, estimate), estimate(node))
        config = torch._inductor.config.aten_distributed_optimizations
        self.assertIsNone(config.custom_runtime_estimation)  # gated: nobody sets it


class TestPrecision(TestCase):
    def test_quantisation_is_compared(self):
        p = profile("B200")
        with self.assertRaisesRegex(ValueError, "^fastest_dtypes: rows .*got -1"):
            fastest_dtypes(p, -1, 7168, 2048, 8)
        recipe, times = fastest_dtypes(p, 131072, 7168, 2048, 8)
        self.assertEqual(set(recipe), {"forward", "dgrad", "wgrad"})
        with mock.patch.object(cost, "quantize", lambda *a, **k: 0.0):
            _, free = fastest_dtypes(p, 131072, 7168, 2048, 8)
        for gemm in recipe:
            self.assertLess(free[gemm]["mxfp8"], times[gemm]["mxfp8"])
            self.assertEqual(free[gemm]["bf16"], times[gemm]["bf16"])


class TestCalibrate(TestCase):
    @parametrize("thin", [0.0, 8.0])
    def test_fit_finds_a_machine(self, thin):
        true = CpuConstants(
            rate16=3e11, half_rows=20.0, memory=3e10, expert_us=30.0, thin_rows=thin
        )
        from torch.distributed._tools.moe_calibration import CPU_ROWS

        hit = [cost.hit_experts(r.E, r.T * r.K) for r in CPU_ROWS]

        def seconds(c, r, h):
            return cpu_experts(
                c, *r[:5], hit=h, dtype=r.dtype, pass_=r.pass_, transposed=r.transposed
            )

        times = [seconds(true, r, h) for r, h in zip(CPU_ROWS, hit)]
        found = fit_cpu(CPU_ROWS, hit, times)
        self.assertEqual(found.thin_rows, thin)
        for shape in (
            (2048, 1024, 512, 32, 4), (64, 2048, 768, 128, 8), (64, 1024, 2048, 16, 4)
        ):  # fmt: skip
            for pass_ in ("fwd", "fwd+bwd"):
                row = CpuRow(*shape, pass_=pass_)
                h = cost.hit_experts(row.E, row.T * row.K)
                want = seconds(true, row, h)
                self.assertEqual(seconds(found, row, h), want, rtol=0.2, atol=0)

    def test_few_rows_read_weights_as_stored(self):
        # Up to 8 rows nothing is turned; what is stored the other way always is.
        c = CpuConstants(thin_rows=8.0, half_rows=16.0, half_rows_t=16.0)
        without = dataclasses.replace(c, thin_rows=0.0)
        self.assertGreater(cpu_rate(c, 2), 4 * cpu_rate(without, 2))
        for m in (40, 100, 1000):
            self.assertEqual(cpu_rate(c, m), cpu_rate(without, m), rtol=1e-3, atol=0)
        self.assertEqual(cpu_rate(c, 2, in_order=True), cpu_rate(without, 2))

    def test_calls_run(self):
        for row in (
            CpuRow(8, 32, 16, 4, 2), CpuRow(8, 32, 16, 4, 2, "fp32", "fwd+bwd"),
            CpuRow(8, 32, 16, 4, 2, pass_="fwd+bwd", transposed=True),
        ):  # fmt: skip
            call, hit = cpu_call(row)
            call()
            self.assertTrue(1 <= hit <= 4)

    def test_profile_of_this_machine(self):
        tiny = (CpuRow(8, 32, 16, 4, 2), CpuRow(8, 32, 16, 4, 2, pass_="fwd+bwd"))
        with mock.patch("torch.distributed._tools.moe_calibration.CPU_ROWS", tiny):
            p = calibrate(seconds=0.0)
        self.assertIn("measured on this machine", p.provenance)
        self.assertEqual(Profile.from_json(p.to_json()).cpu, p.cpu)
        with self.assertRaisesRegex(ValueError, "clock must be wall or process"):
            calibrate(clock="sun")

    @parametrize("turn", [0.0, 131072.0, 300000.0])
    def test_links_that_take_turns(self, turn):
        # What gloo sends of a message beyond its sockets waits for the other direction. A
        # straight line through such times is 30 % off; where there is one, it stays.
        sizes = [1 << n for n in (9, 13, 15, 17, 18, 19, 20)]
        times = [link_seconds(2e-4, 5e7, n, turn=turn) for n in sizes]
        noise = (1.03, 0.97, 1.02, 0.98, 1.01, 0.99, 1.0)
        points = [(n, t * e) for n, t, e in zip(sizes, times, noise)]
        start, rate, found = fit_link(points)
        self.assertEqual(found, turn, rtol=0.2, atol=0)
        self.assertEqual(fit_link(points, turns=False)[2], 0)
        for n in (1 << 12, 200_000, 700_000, 1 << 22):
            got = link_seconds(start, rate, n, turn=found)
            want = link_seconds(2e-4, 5e7, n, turn=turn)
            self.assertEqual(got, want, rtol=0.08, atol=0)

    def test_kernels_rehearsed_on_cpu(self):
        # What runs on CUDA, on small sizes: products and copies get faster constants
        # than a device a thousand times faster would have.
        got = measure_kernels(profile("H100"), "cpu", seconds=0.0)
        self.assertLess(got.memory, 0.5)
        self.assertGreater(got.mma16, 0)


instantiate_parametrized_tests(TestCalibrate)


class TestLinks(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_start_and_rate(self):
        group = torch.distributed.group.WORLD
        start, rate, turn = measure_links(group, [1 << 10, 1 << 16, 1 << 20])
        self.assertGreater(rate, 0)
        self.assertGreater(start, 0)
        self.assertGreaterEqual(turn, 0)

    def test_exchange(self):
        # By a clock that goes on by a millisecond when it is read: dispatch, combine and
        # the backward of each take one, whatever their size.
        group = torch.distributed.group.WORLD
        p = Profile("x", profile("H100").device, Constants(), "x", CpuConstants())
        ticks = itertools.count()
        sizes = [(4, 32, 2, 2), (64, 64, 2, 2)]
        found = measure_exchange(p, group, sizes, lambda: 1e-3 * next(ticks))
        q = dataclasses.replace(p, cpu=found)
        for tokens, d, local, k in sizes:
            for pass_, want in (("fwd", 2e-3), ("fwd+bwd", 4e-3)):
                got = cpu_exchange(q, tokens, d, 2 * local, k, 2, pass_=pass_)
                self.assertEqual(got, want, rtol=0.05, atol=0)
        shape = (64, 64, 32, 4, 2)
        both, forward = (cpu_layer(q, *shape, 2, pass_=x) for x in ("fwd+bwd", "fwd"))
        experts = cpu_layer(q, 64, 64, 32, 2, 2, pass_="fwd+bwd")
        self.assertEqual(both - experts, 4e-3, rtol=0.05, atol=0)
        self.assertLess(forward, both)
        with self.assertRaisesRegex(ValueError, "must be a profile of a CPU"):
            measure_exchange(profile("H100"), group)


if __name__ == "__main__":
    run_tests()
