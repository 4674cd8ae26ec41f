# Owner(s): ["oncall: distributed"]

import contextlib
import functools
import threading
from types import SimpleNamespace
from unittest import mock

from moe_token_switch import (
    leaves_of,
    SHARES,
    TokenSwitchTest,
    truth,
)

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._moe.all_to_all import (
    TokenSwitchAllToAll,
    TokenSwitchHierarchical,
)
from torch.distributed._moe.in_flight import _Flight
from torch.distributed._moe.overlap_schedule import (
    _chunk_sizes,
    OverlapSchedule,
    PartSeconds,
    simulated_seconds,
)
from torch.distributed._moe.recompute import save_communication
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ExpertParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_moe import bits_of_kernel
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn


SWITCHES = {
    "flat_reduce": {},
    "flat_exact": {"combine": "exact"},
    "static_exact": {"combine": "exact", "capacity": 17},
    "hierarchical_reduce": {},
    "hierarchical_exact": {"combine": "exact"},
}


def sequential_schedule(switch, tokens, ids, weights, experts, shared=None):
    """Two chunks without overlap, which a trace must reject."""
    outputs = []
    for x, i, w in zip(tokens.chunk(2), ids.chunk(2), weights.chunk(2)):
        routing = switch.create_routing(i, layout="flat")
        rows, row_weights, row_ids = switch.dispatch(routing, x, w)
        outputs.append(
            switch.combine(routing, experts(rows, row_ids, row_weights, None))
        )
    return torch.cat(outputs), None if shared is None else shared()


class DenseAndMoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 16)
        self.moe = nn.MoE(16, 12, 8, top_k=2)

    def forward(self, x):
        y = self.moe(self.before(x))
        return self.after(y[0] if isinstance(y, tuple) else y)


class Switch:
    """A switch without a group."""


class PassingMode(TorchDispatchMode):
    """Stands for any mode, which does not see the ops of another thread."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Trace:
    """When communication begins and ends, in the order of the calls of a switch.

    A computation calls :meth:`in_flight`, which waits until calls of another part end. This
    succeeds only if the communication makes progress while the computation runs.
    """

    def __init__(self, patience):
        self.patience = patience
        self.lock = threading.Condition()
        self.ended = []
        self.seen = {}

    def record(self, name, function):
        def recorded(*args, **kwargs):
            result = function(*args, **kwargs)
            with self.lock:
                self.ended.append(name)
                self.lock.notify_all()
            return result

        return recorded

    def in_flight(self, computation, name, count):
        """Notes whether ``count`` calls of ``name`` end while ``computation`` runs."""
        with self.lock:
            self.seen[computation] = self.lock.wait_for(
                lambda: self.ended.count(name) >= count, self.patience
            )

    @contextlib.contextmanager
    def of(self, switch):
        names = {
            "_dispatch_new": "dispatch",
            "_combine_new": "combine",
            "_dispatch_backward": "combine",
            "_dispatch_grad": "dispatch_grad",
        }
        with contextlib.ExitStack() as stack:
            for method, name in names.items():
                recorded = self.record(name, getattr(switch, method))
                stack.enter_context(mock.patch.object(switch, method, recorded))
            yield self


@instantiate_parametrized_tests
class TestOverlap(TokenSwitchTest):
    def switch(self, name):
        if name.startswith("hierarchical"):
            return TokenSwitchHierarchical(self.mesh(None, 2, 2), 8, **SWITCHES[name])
        return TokenSwitchAllToAll(self.mesh(None, 4).get_group(), 8, **SWITCHES[name])

    @parametrize("name", list(SWITCHES))
    def test_result_of_one_rank(self, name):
        schedules = [
            OverlapSchedule(1),
            OverlapSchedule(2, shared="combine"),
            OverlapSchedule(5),
            OverlapSchedule(3, shared="combine"),
        ]
        switch = self.switch(name)
        for number, schedule in enumerate(schedules):
            routing = ("uniform", "one_expert", "sentinels", "zipf")[number]
            share = list(SHARES)[number % len(SHARES)]
            case = truth(routing)
            tokens, experts = self.part(4, share)

            def layer(switch, ids, x, weights, w_in, w_out):
                def local(rows, row_ids, row_weights, num_rows):
                    return F.moe_mlp(
                        rows, row_ids, row_weights, w_in, w_out, num_rows=num_rows
                    )

                y, twice = schedule(switch, x, ids, weights, local, lambda: 2 * x)
                self.assertEqual(twice, 2 * x)
                return y

            got = self.run_switch(switch, case.operands, tokens, experts, layer=layer)
            self.check(got, case, tokens, experts, exact="exact" in name)

    def traced(self, schedule, patience):
        """Which communication made progress during which computation."""
        case = truth("uniform")
        tokens, part = self.part(4, "even")
        switch = self.switch("flat_exact")
        trace = Trace(patience)
        chunks = []

        def layer(switch, ids, x, weights, w_in, w_out):
            def local(rows, row_ids, row_weights, num_rows):
                chunk = len(chunks)
                chunks.append(chunk)
                if chunk == 0:
                    # The next chunk arrives although nothing waits for it.
                    trace.in_flight("experts_0", "dispatch", 2)
                else:
                    trace.in_flight("experts_1", "combine", 1)
                out = F.moe_mlp(
                    rows, row_ids, row_weights, w_in, w_out, num_rows=num_rows
                )

                def backward(grad):
                    # Backward starts with the last chunk.
                    if chunk == 1:
                        trace.in_flight("backward_1", "dispatch_grad", 2)
                    else:
                        # The gradient of chunk 1's tokens, after both combines.
                        trace.in_flight("backward_0", "combine", 3)

                if out.requires_grad:
                    out.register_hook(backward)
                return out

            def shared():
                trace.in_flight("shared", "dispatch", 1)
                return x * 1

            y, other = schedule(switch, x, ids, weights, local, shared)
            return y + 0 * other

        with trace.of(switch):
            self.run_switch(switch, case.operands, tokens, part, layer=layer)
        return trace.seen

    def test_beside_data_parallelism(self):
        """DDP reduces gradients from another thread between the same ranks."""
        torch.manual_seed(0)
        model = DenseAndMoE()
        style = ExpertParallel(num_chunks=2)
        parallelize_module(model, self.mesh(None, 4), {"moe": style})
        experts = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
        ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, experts)
        # A bucket for every parameter makes reductions overlap with the gradients of chunks.
        ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
        generator = torch.Generator().manual_seed(self.rank)
        for _ in range(3):
            y = ddp(torch.randn(32, 16, generator=generator))
            y.square().sum().backward()
        grads = model.before.weight.grad
        everywhere = [torch.empty_like(grads) for _ in range(4)]
        dist.all_gather(everywhere, grads)
        for other in everywhere:
            self.assertEqual(other, grads, atol=0, rtol=0)

    def test_communication_runs_under_computation(self):
        seen = self.traced(OverlapSchedule(2), patience=60)
        parts = ("shared", "experts_0", "experts_1", "backward_1", "backward_0")
        self.assertEqual(seen, dict.fromkeys(parts, True))

    def test_trace_rejects_a_schedule_without_overlap(self):
        seen = self.traced(sequential_schedule, patience=0.5)
        self.assertFalse(seen["experts_0"])
        self.assertFalse(seen["backward_1"])

    def test_shared_experts_under_the_last_combine(self):
        case = truth("uniform")
        tokens, part = self.part(4, "gaps")
        switch, trace = self.switch("flat_reduce"), Trace(60)

        def layer(switch, ids, x, weights, w_in, w_out):
            def local(rows, row_ids, row_weights, num_rows):
                return F.moe_mlp(
                    rows, row_ids, row_weights, w_in, w_out, num_rows=num_rows
                )

            def shared():
                trace.in_flight("shared", "combine", 2)
                return x

            schedule = OverlapSchedule(2, shared="combine")
            return schedule(switch, x, ids, weights, local, shared)[0]

        with trace.of(switch):
            self.run_switch(switch, case.operands, tokens, part, layer=layer)
        self.assertTrue(trace.seen["shared"])

    @parametrize("name", ["flat_reduce", "static_exact", "hierarchical_exact"])
    def test_checkpoint_does_not_communicate_again(self, name):
        operands, part = truth("zipf").operands, self.part(4, "gaps")
        switch, schedule = self.switch(name), OverlapSchedule(3)

        def behind(switch, ids, x, weights, w_in, w_out):
            def local(rows, row_ids, row_weights, num_rows):
                return F.moe_mlp(
                    rows, row_ids, row_weights, w_in, w_out, num_rows=num_rows
                )

            y, twice = schedule(switch, x, ids, weights, local, lambda: 2 * x)
            # Recomputing this needs what combine returned.
            return (y + twice).sin().sin()

        def layer_with(context_fn):
            return functools.partial(
                checkpoint, behind, use_reentrant=False, context_fn=context_fn
            )

        def collectives():
            groups = [level.group for level in switch.levels]
            return sum(group._get_sequence_number_for_group() for group in groups)

        def run(layer, mode=contextlib.nullcontext):
            threads, dispatch = [], switch._dispatch_new

            def recording(*args):
                threads.append(threading.current_thread() is threading.main_thread())
                return dispatch(*args)

            before = collectives()
            with mode(), mock.patch.object(switch, "_dispatch_new", recording):
                got = self.run_switch(switch, operands, *part, layer=layer)
            return got, collectives() - before, threads

        self.run_switch(switch, operands, *part, layer=behind)  # compares arguments
        want, once, _ = run(behind)
        kept = layer_with(save_communication())
        got, count, on_main_thread = run(kept)
        self.assert_same_bits(got, want)
        self.assertEqual(count, once)
        # Forward communicates on another thread. The recomputation only reads saved results.
        self.assertEqual(on_main_thread, [False] * 3 + [True] * 3)
        # Under another mode nothing overlaps, and nothing is sent again either.
        got, count, on_main_thread = run(kept, PassingMode)
        self.assert_same_bits(got, want)
        self.assertEqual(count, once)
        self.assertEqual(on_main_thread, [True] * 6)
        # Shows that the test can fail: without saving, the forward's collectives are repeated.
        with torch.no_grad():
            before = collectives()
            behind(switch, *self.leaves(operands, part))
            forward = collectives() - before
        got, count, _ = run(layer_with(noop_context_fn))
        self.assert_same_bits(got, want)
        self.assertEqual(count, once + forward)

    def test_checkpoint_can_be_run_backward_once(self):
        operands, part = truth("uniform").operands, self.part(4, "even")
        ids, *leaves = self.leaves(operands, part)
        switch = self.switch("flat_reduce")

        def layer(x, weights, w_in, w_out):
            def local(rows, i, w, n):
                return F.moe_mlp(rows, i, w, w_in, w_out, num_rows=n)

            return OverlapSchedule(2)(switch, x, ids, weights, local)[0].sin()

        y = checkpoint(
            layer, *leaves, use_reentrant=False, context_fn=save_communication()
        )
        y.sum().backward(retain_graph=True)
        with self.assertRaisesRegex(RuntimeError, "backward an extra time"):
            y.sum().backward()

    def leaves(self, operands, part):
        tokens, experts = part
        return operands.topk_indices[tokens], *leaves_of(operands, tokens, experts)

    def test_error_of_communication_reaches_the_caller(self):
        case = truth("uniform")
        tokens, _ = self.part(4, "even")
        switch = self.switch("flat_reduce")
        ids = case.operands.topk_indices[tokens].float()
        x, weights = case.operands.input[tokens], case.operands.topk_weights[tokens]
        with self.assertRaisesRegex(ValueError, "topk_idx must be an integer tensor"):
            OverlapSchedule(2)(switch, x, ids, weights, lambda rows, i, w, n: rows)

    def test_inference(self):
        case = truth("uniform")
        tokens, part = self.part(4, "even")
        switch, o = self.switch("flat_exact"), case.operands
        with torch.no_grad():
            y, none = OverlapSchedule(3)(
                switch,
                o.input[tokens],
                o.topk_indices[tokens],
                o.topk_weights[tokens],
                lambda rows, i, w, _: F.moe_mlp(
                    rows, i, w, o.w_in[part], o.w_out[part]
                ),
            )
        self.assertIsNone(none)
        self.assertFalse(y.requires_grad)
        self.assertEqual(y, case.one_rank.output[tokens], **bits_of_kernel())


@instantiate_parametrized_tests
class TestSchedule(TestCase):
    def test_default_order(self):
        parts = [f"{part[0]}{chunk}" for part, chunk in OverlapSchedule(3).steps()]
        self.assertEqual(" ".join(parts), "d0 d1 s0 e0 c0 d2 e1 c1 e2 c2")
        order = OverlapSchedule(2, shared="combine").steps()
        parts = [f"{part[0]}{chunk}" for part, chunk in order]
        self.assertEqual(" ".join(parts), "d0 d1 e0 c0 e1 c1 s0")

    def test_chunk_sizes(self):
        for total in range(9):
            for n in (1, 2, 3, 4):
                sizes = _chunk_sizes(total, n)
                self.assertEqual(sum(sizes), total)
                self.assertEqual(sizes, sorted(sizes, reverse=True))
                self.assertLessEqual(sizes[0] - sizes[-1], 1)

        # A dynamic number of tokens does not need a graph for each number.
        @torch.compile(backend="eager", fullgraph=True, dynamic=True)
        def first(x):
            return x.split(_chunk_sizes(x.shape[0], 3))[0]

        self.assertEqual(first(torch.ones(8)), torch.ones(3))
        with torch.compiler.set_stance("fail_on_recompile"):
            for total in (9, 10, 11, 64):
                self.assertEqual(len(first(torch.ones(total))), -(-total // 3))

    def test_simulation(self):
        # Two queues by hand: d0 0-1, d1 1-2, shared 0-2, e0 2-6, c0 6-7, e1 6-10, c1 10-11.
        parts = PartSeconds((1, 1), (4, 4), (1, 1), 2)
        self.assertEqual(parts.total(), 14)
        self.assertEqual(simulated_seconds(OverlapSchedule(2), parts), 11)
        # One chunk overlaps only with the shared experts.
        one = PartSeconds((2,), (8,), (2,), 2)
        self.assertEqual(simulated_seconds(OverlapSchedule(1), one), 12)
        # Never longer than the sum of both queues, never shorter than either.
        g = torch.Generator().manual_seed(0)
        for chunks in (1, 2, 5):
            for _ in range(20):
                d, e, c = torch.rand(3, chunks, generator=g).tolist()
                parts = PartSeconds(tuple(d), tuple(e), tuple(c), 0.7)
                for shared in ("dispatch", "combine"):
                    got = simulated_seconds(OverlapSchedule(chunks, shared), parts)
                    self.assertLessEqual(got, parts.total() + 1e-9)
                    self.assertGreaterEqual(got, max(sum(d + c), sum(e) + 0.7) - 1e-9)

    @parametrize(
        "kwargs, message",
        [
            subtest(
                ({"num_chunks": 0}, "num_chunks .* at least 1, got 0"), name="chunks"
            ),
            subtest(
                ({"num_chunks": 2.0}, "num_chunks must be an integer .*, got 2.0"),
                name="type_of_chunks",
            ),
            subtest(
                ({"shared": "late"}, "shared must be .* got 'late'"), name="shared"
            ),
        ],
    )
    def test_errors(self, kwargs, message):
        with self.assertRaisesRegex(ValueError, message):
            OverlapSchedule(**kwargs)

    def test_nothing_is_sent_behind_a_failure(self):
        noticed, sent = threading.Event(), []

        def fail(x):
            noticed.wait(60)
            raise RuntimeError("connection closed")

        def send(x):
            sent.append(x)
            return x

        x, a = (torch.ones(1),), Switch()
        failing, queued = _Flight(fail, x, a), _Flight(send, x, a)
        noticed.set()
        with self.assertRaisesRegex(RuntimeError, "^connection closed"):
            failing.result()
        for flight in (queued, _Flight(fail, x, a)):
            with self.assertRaisesRegex(RuntimeError, "connection closed"):
                flight.result()
        self.assertEqual(sent, [])
        # The caller has seen the failure.
        self.assertEqual(_Flight(send, x, a).result(), x[0])

    def test_a_failure_stops_its_own_groups_only(self):
        def fail(x):
            raise RuntimeError("connection closed")

        x, a = (torch.ones(1),), Switch()
        failing = _Flight(fail, x, a)
        # Another model, whose groups work, runs before the failure is handled.
        self.assertEqual(_Flight(lambda x: x, x, Switch()).result(), x[0])
        with self.assertRaisesRegex(RuntimeError, "connection closed"):
            _Flight(lambda x: x, x, a).result()
        with self.assertRaisesRegex(RuntimeError, "connection closed"):
            failing.result()

    def test_a_failure_ends_with_its_group(self):
        # The failure is not handled, and a new group gets the name of the old one.
        def fail(x):
            raise RuntimeError("connection closed")

        x, old, new = (torch.ones(1),), Switch(), Switch()
        for switch in (old, new):
            group = Switch()
            switch.levels = (SimpleNamespace(group=group, group_name="name"),)
        flight = _Flight(fail, x, old)
        del old.levels
        self.assertEqual(_Flight(lambda x: x, x, new).result(), x[0])
        with self.assertRaisesRegex(RuntimeError, "connection closed"):
            flight.result()

    def test_simulation_error(self):
        with self.assertRaisesRegex(ValueError, "parts must be of 2 chunks"):
            simulated_seconds(OverlapSchedule(2), PartSeconds((1,), (1,), (1,)))


if __name__ == "__main__":
    run_tests()
