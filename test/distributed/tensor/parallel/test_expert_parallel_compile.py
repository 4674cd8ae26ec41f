# Owner(s): ["oncall: distributed"]
"""ExpertParallel in one graph, and without a host read in static mode."""

import contextlib
import functools
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo import lookup_backend
from torch._dynamo.testing import CompileCounter
from torch.distributed._moe.overlap_schedule import OverlapSchedule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ExpertParallel, parallelize_module
from torch.distributed.tensor.parallel.expert_parallel import token_switches
from torch.testing._internal.common_moe import NoHostSyncMode, slow_subtest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
    subtest,
)


sys.path.append(str(Path(__file__).resolve().parents[2]))

from moe_gloo import GlooTest  # noqa: E402


D, H, E, K, T = 16, 24, 8, 3, 12


class GroupedExperts(nn.Module):
    """Has the interface of torchtitan's experts: rows in expert order, and their counts."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(E, H, D) * D**-0.5)
        self.w2 = nn.Parameter(torch.randn(E, D, H) * H**-0.5)
        self.w3 = nn.Parameter(torch.randn(E, H, D) * D**-0.5)

    def forward(self, x, num_tokens_per_expert):
        offs = num_tokens_per_expert.cumsum(0, dtype=torch.int32)

        def product(rows, weight):
            return F.grouped_mm(rows, weight.transpose(1, 2), offs=offs)

        out = product(F.silu(product(x, self.w1)) * product(x, self.w3), self.w2)
        real = torch.arange(x.shape[0], device=x.device) < offs[-1]
        return torch.where(real[:, None], out, 0)


class SortedMoE(nn.Module):
    """Sorts tokens for ``GroupedExperts``; the shapes do not depend on the data."""

    def __init__(self):
        super().__init__()
        self.experts = GroupedExperts()

    def forward(self, x, ids):
        order = ids.flatten().argsort(stable=True)
        counts = torch.zeros(E, dtype=torch.int32)
        counts = counts.scatter_add(
            0, ids.flatten(), torch.ones(ids.numel(), dtype=torch.int32)
        )
        rows = self.experts(x[order // ids.shape[1]], counts)
        return rows[order.argsort()].view(*ids.shape, -1).sum(1)


@instantiate_parametrized_tests
class TestExpertParallelCompile(GlooTest):
    world_size = 2

    def moe(self, mesh=None, bias=True, activation="swiglu", **kwargs):
        torch.manual_seed(0)
        layer = nn.MoE(
            *(D, H, E, K),
            shared_hidden_dim=8,
            bias=bias,
            activation=activation,
        )
        mesh = self.mesh(("ep",), 2) if mesh is None else mesh
        return parallelize_module(layer, mesh, ExpertParallel(**kwargs))

    def inputs(self, count, seed_of_rank=True):
        """Tokens of this rank; each draw routes differently, the last one to few experts."""
        g = torch.Generator().manual_seed(self.rank if seed_of_rank else 7)
        draws = [torch.randn(T, D, generator=g) for _ in range(count)]
        draws[-1] = draws[-1][:1].expand(T, D).contiguous()
        return draws

    def run_once(self, layer, function, x):
        """Output and all gradients."""
        layer.zero_grad()
        x = x.clone().requires_grad_()
        output = function(x)
        output = getattr(output, "output", output)
        output.backward(torch.ones_like(output) + output.detach())
        grads = {
            name: p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            for name, p in layer.named_parameters()
        }
        for switch in token_switches(layer):
            switch.check_overflow()
        return {"output": output.detach(), "input": x.grad, **grads}

    def check_one_graph(self, layer, *, static, inputs, backend="aot_eager", call=None):
        """Compiled equals eager for all inputs, in one graph; counts its all-to-alls."""
        call = call or (lambda module, x: module(x))
        graphs = []

        def recording(graph, example_inputs):
            graphs.append(graph)
            return lookup_backend(backend)(graph, example_inputs)

        same_bits = {"atol": 0, "rtol": 0} if backend == "aot_eager" else {}
        torch._dynamo.reset()
        eager = functools.partial(call, layer)
        wants = [self.run_once(layer, eager, x) for x in inputs]
        # The graph has neither the check nor its messages to other ranks.
        never = mock.Mock(side_effect=AssertionError("compared arguments"))
        with (
            torch._dynamo.config.patch(
                capture_scalar_outputs=not static, error_on_recompile=True
            ),
            mock.patch.object(dist, "all_gather_object", never),
        ):
            compiled = torch.compile(eager, backend=recording, fullgraph=True)
            for x, want in zip(inputs, wants):
                got = self.run_once(layer, compiled, x)
                self.assertEqual(got, want, **same_bits)
        self.assertEqual(len(graphs), 1)
        # Forwards and backwards of autograd functions are graphs of their own.
        nodes = [
            node
            for module in graphs[0].modules()
            if isinstance(module, torch.fx.GraphModule)
            for node in module.graph.nodes
        ]
        calls = [n for n in nodes if n.op.startswith("call_")]
        read = {n.args[0].args[0] for n in calls if n.target == "item"}
        self.assertEqual(len(read), 0 if static else 1)
        kinds = ("all_to_all_single", "all_gather_into_tensor", "all_reduce")
        return [sum(kind in str(n.target) for n in calls) for kind in kinds]

    @parametrize("capacity, combine", [(None, "exact"), (T, "reduce")])
    def test_one_graph(self, capacity, combine):
        layer = self.moe(capacity=capacity, combine=combine)
        sent = self.check_one_graph(
            layer, static=capacity is not None, inputs=self.inputs(3)
        )
        # Forward: sizes (compact), rows with ids and weights, returned; backward: the last 2,
        # after all ranks have met.
        self.assertEqual(sent, [4, 0 if capacity else 1, 1])

    def test_two_graphs_over_changing_tokens(self):
        # With sizes of the routing.
        layer, graphs = self.moe(), []

        def recording(graph, example_inputs):
            graphs.append(graph)
            return lookup_backend("aot_eager")(graph, example_inputs)

        torch._dynamo.reset()
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            compiled = torch.compile(layer, backend=recording, fullgraph=True)
            for tokens in (T, T + 4, 3 * T, 5):
                x = torch.randn(tokens, D)
                self.assertEqual(
                    self.run_once(layer, compiled, x), self.run_once(layer, layer, x)
                )
        self.assertLessEqual(len(graphs), 2)

    def test_two_graphs_with_a_capacity(self):
        # The first step finds no count of rows, the second one that of the first.
        layer, counter = self.moe(capacity=3 * T), CompileCounter()
        (switch,) = token_switches(layer)
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend=counter, fullgraph=True)
        for i, tokens in enumerate((T, T, T + 4, T + 4, 3 * T, 5, T)):
            x = torch.randn(tokens, D)
            self.assertEqual(compiled(x), layer(x))
            if i == 3:
                switch.check_overflow()
        self.assertLessEqual(counter.frame_count, 2)
        most = torch.tensor(switch.required_capacity())
        self.assertGreater(most, 0)
        with self.assertRaisesRegex(RuntimeError, "no static routing was made"):
            switch.required_capacity()

    @parametrize(
        "backend",
        ["aot_eager_decomp_partition", slow_subtest("inductor", name="inductor")],
    )
    @parametrize("num_chunks", [1, 2])
    @parametrize("capacity", [None, T])
    def test_a_rank_without_tokens(self, capacity, num_chunks, backend):
        """Its collectives, whose messages are empty and equal, keep the order of the other rank's."""
        options = {"capacity": capacity, "num_chunks": num_chunks}
        model = nn.Sequential(self.moe(**options), self.moe(**options))
        x = torch.randn(0 if self.rank == 0 else 4, D)
        want = self.run_once(model, model, x)
        torch._dynamo.reset()
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            compiled = torch.compile(model, backend=backend, fullgraph=True)
            self.assertEqual(self.run_once(model, compiled, x), want)

    def test_a_chunk_of_one_token(self):
        """The number of tokens is dynamic from the second call on, and then a chunk has one token."""

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(D, D, bias=False)
                self.moe = nn.MoE(D, H, E, K, shared_hidden_dim=H, bias=True)

            def forward(self, x):
                x = x + self.linear(x)
                return x + self.moe(x)

        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        style = ExpertParallel(num_chunks=2, capacity=4 * T)
        parallelize_module(model, self.mesh(("ep",), 2), {"*.moe": style})
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for tokens, requires_grad in ((5, False), (7, True), (3, False)):
            x = torch.randn(tokens + 2 * self.rank, D, requires_grad=requires_grad)
            self.assertEqual(compiled(x), model(x))

    def test_one_rank_in_a_graph(self):
        """The comparison before a backward stays in the graph of the backward."""
        model = self.moe()
        (x,) = self.inputs(1)
        want = self.run_once(model, model, x)
        torch._dynamo.reset()
        call = model
        if self.rank == 0:
            call = torch.compile(model, backend="aot_eager_decomp_partition")
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            self.assertEqual(self.run_once(model, call, x), want)

    @slowTest
    @parametrize("capacity", [None, T])
    def test_inductor(self, capacity):
        self.check_one_graph(
            self.moe(capacity=capacity),
            static=capacity is not None,
            inputs=self.inputs(2),
            backend="inductor",
        )

    @parametrize(
        "names, shape, options",
        [
            subtest((("dp_replicate", "ep"), (2, 1), {}), name="replicas"),
            subtest(
                (("ep", "tp"), (1, 2), {"activation": "relu2"}), name="tensor_parallel"
            ),
        ],
    )
    def test_one_graph_on_meshes(self, names, shape, options):
        layer = self.moe(self.mesh(names, *shape), capacity=2 * T, **options)
        # The ranks of tp have the same tokens.
        inputs = self.inputs(2, seed_of_rank="tp" not in names)
        self.check_one_graph(layer, static=True, inputs=inputs)

    def test_one_graph_of_an_overlap_schedule(self):
        layer = self.moe(capacity=T, schedule=OverlapSchedule(2))
        sent = self.check_one_graph(layer, static=True, inputs=self.inputs(2))
        self.assertEqual(sent, [2 * 4, 0, 2])  # of every chunk

    def test_one_graph_of_grouped_experts(self):
        torch.manual_seed(0)
        layer = SortedMoE()
        style = ExpertParallel(capacity=T * K)
        parallelize_module(layer, self.mesh(("ep",), 2), {"experts": style})
        g = torch.Generator().manual_seed(self.rank)
        ids = torch.rand(T, E, generator=g).argsort(1)[:, :K]
        self.check_one_graph(
            layer,
            static=True,
            inputs=self.inputs(2),
            call=lambda module, x: module(x, ids),
        )

    def test_static_mode_reads_nothing_on_the_host(self):
        """From router to gradients, once the arguments were compared at the first use."""
        for combine in ("reduce", "exact"):
            layer = self.moe(capacity=T, combine=combine)
            (x,) = self.inputs(1)
            want = self.run_once(layer, layer, x)
            forbidden = mock.Mock(side_effect=AssertionError("host read"))
            reads = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__")
            copy_of_x = x.clone().requires_grad_()
            layer.zero_grad()
            with contextlib.ExitStack() as stack:
                stack.enter_context(NoHostSyncMode())
                for read in reads:
                    patch = mock.patch.object(torch.Tensor, read, forbidden)
                    stack.enter_context(patch)
                output = layer(copy_of_x)
                output.backward(torch.ones_like(output) + output.detach())
            self.assertEqual(copy_of_x.grad, want["input"], atol=0, rtol=0)
            # Shows that the test can fail: compact mode reads the sizes.
            compact = self.moe(combine=combine)
            compact(x)
            with (
                mock.patch.object(torch.Tensor, "tolist", forbidden),
                self.assertRaisesRegex(AssertionError, "host read"),
            ):
                compact(x)


if __name__ == "__main__":
    run_tests()
