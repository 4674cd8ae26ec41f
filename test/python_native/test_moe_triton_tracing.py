# Owner(s): ["module: dsl-native-ops"]
"""On CUDA the MoE layer is one graph without host syncs or data-dependent shapes.

Runs without a GPU, on fake CUDA tensors. A fake tensor has no values, so that any
read of one on the host is an error.
"""

import os


os.environ.pop("TRITON_INTERPRET", None)

import unittest
from unittest import mock

import triton

import torch
import torch.nn.functional as F
from torch._native.ops.moe.triton_kernels import launch, permutation, topk
from torch._native.ops.moe.triton_kernels.configs import KERNELS, TileConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    free_unbacked_symbols,
    ShapeEnv,
)
from torch.testing._internal.common_moe import traced_size
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


E, K, D, H = 8, 2, 64, 128


def layer(x, logits, w_in, w_out):
    indices, weights = F.moe_topk(logits, K)
    return F.moe_mlp(x, indices, weights, w_in, w_out)


def fake_layer_args(num_tokens, device="cuda"):
    def empty(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device=device)

    return (
        empty(num_tokens, D),
        empty(num_tokens, E),
        empty(E, 2 * H, D),
        empty(E, D, H),
    )


def gradients(output, cotangent, leaves):
    """``torch.autograd.grad`` without the engine, which asks the driver for its device."""
    order, pending, found = [], {}, {}

    def visit(node):
        if node is not None and node not in order:
            for below, _ in node.next_functions:
                visit(below)
            order.append(node)

    def send(node, position, grad):
        if node is not None and grad is not None:
            received = pending.setdefault(node, [None] * len(node._input_metadata))
            before = received[position]
            received[position] = grad if before is None else before + grad

    visit(output.grad_fn)
    send(output.grad_fn, output.output_nr, cotangent)
    for node in reversed(order):
        grads = pending.pop(node, None)
        if grads is None:
            continue
        if hasattr(node, "variable"):
            found[node.variable] = grads[0]
            continue
        out = node(*grads)
        out = out if isinstance(out, tuple) else (out,)
        for (below, position), grad in zip(node.next_functions, out, strict=True):
            send(below, position, grad)
    return [found[leaf] for leaf in leaves]


def routed_layer(x, router, w_in, w_out):
    return layer(x, x @ router, w_in, w_out)


def step(x, router, w_in, w_out, cotangent):
    """Forward and backward of router, permutation and experts."""
    leaves = [t.detach().requires_grad_() for t in (x, router, w_in, w_out)]
    output = routed_layer(*leaves)
    return output, *gradients(output, cotangent, leaves)


@unittest.skipIf(
    not torch.backends.cuda.is_built(), "fake CUDA tensors need a CUDA build"
)
class TestMoeTracing(TestCase):
    @parametrize("tokens", ["static", "backed", "unbacked"])
    def test_forward_and_backward_are_one_graph(self, tokens):
        shape_env = ShapeEnv()
        with FakeTensorMode(shape_env=shape_env):
            T = traced_size(40, tokens, shape_env)
            x, _, w_in, w_out = fake_layer_args(T)
            args = (x, x.new_empty(D, E), w_in, w_out, torch.empty_like(x))
            graph = make_fx(step)(*args).graph
            output, *grads = step(*args)
        for result, operand in zip((output, *grads), (x, *args[:4]), strict=True):
            self.assertEqual(result.shape, operand.shape)
            self.assertEqual(result.device.type, "cuda")
        called = [n.target for n in graph.nodes if n.op == "call_function"]
        aten = torch.ops.aten
        for op in (
            aten._moe_topk,
            aten._moe_permutation,
            aten._moe_mlp,
            aten._moe_mlp_backward,
            aten._moe_topk_backward,
        ):
            self.assertEqual(called.count(op.default), 1, op)
        # Nothing reads a value, no size comes from one, and T is not specialized.
        self.assertNotIn(aten._local_scalar_dense.default, called)
        self.assertNotIn(aten.nonzero.default, called)
        made = {
            s for n in graph.nodes for s in free_unbacked_symbols(n.meta.get("val"))
        }
        self.assertEqual(len(made), 1 if tokens == "unbacked" else 0)
        self.assertEqual(shape_env.guards, [])

    @parametrize("dynamic", [False, True])
    @parametrize("grad", [False, True])
    def test_layer_is_one_graph(self, dynamic, grad):
        torch._dynamo.reset()
        graphs = []

        def backend(graph_module, example_inputs):
            graphs.append(graph_module)
            return graph_module

        with FakeTensorMode(), torch.set_grad_enabled(grad):
            args = tuple(x.requires_grad_(grad) for x in fake_layer_args(40))
            if dynamic:
                torch._dynamo.mark_dynamic(args[0], 0)
                torch._dynamo.mark_dynamic(args[1], 0)
            compiled = torch.compile(layer, fullgraph=True, backend=backend)
            out = compiled(*args)
        self.assertEqual(out.shape, (40, D))
        self.assertEqual(out.device.type, "cuda")
        self.assertEqual(out.requires_grad, grad)
        self.assertEqual(len(graphs), 1)
        nodes = graphs[0].graph.nodes
        for op in (torch._moe_topk, torch._C._nn.moe_mlp):
            self.assertIn(op, [node.target for node in nodes])
        methods = [node.target for node in nodes if node.op == "call_method"]
        self.assertFalse(set(methods) & {"item", "tolist", "nonzero", "cpu"}, methods)

    def test_launchers_read_no_value(self):
        launched, contracts = [], []

        def run(self, *args, grid, warmup, **kwargs):
            launched.append(self.__name__)
            # No environment variable decides it, and no version of Triton.
            contracts.append(kwargs.get("enable_fp_fusion"))

        config = TileConfig(64, 64, 32, num_warps=4, num_stages=2)
        plan = launch.LaunchPlan(dict.fromkeys(KERNELS, (config,)), 132)
        with (
            mock.patch.object(triton.runtime.jit.JITFunction, "run", run),
            FakeTensorMode(),
        ):
            x, _, w_in, w_out = fake_layer_args(40)
            logits = fake_layer_args(40)[1]
            indices, weights = topk.moe_topk(
                logits, K, logits[0], num_groups=4, top_groups=2
            )
            grad_logits = topk.moe_topk_backward(weights, logits, indices)
            row_slots, slot_rows, offs, _ = permutation.moe_permutation(indices, E)
            args = (x, w_in, w_out, offs, weights, row_slots, slot_rows, *[None] * 3)
            experts = launch.Experts(*args)
            out, preact = launch.moe_mlp_forward(plan, experts)
            grads = launch.moe_mlp_backward(plan, experts, x, preact, (True,) * 7)
        self.assertEqual(set(contracts), {True})
        self.assertEqual(out.shape, x.shape)
        for grad, operand in zip(grads, (x, w_in, w_out, weights)):
            self.assertEqual(grad.shape, operand.shape)
            self.assertEqual(grad.device.type, "cuda")
        self.assertEqual((grad_logits.shape, grad_logits.dtype), ((40, E), x.dtype))
        self.assertEqual(launched[:2], ["topk_kernel", "topk_backward_kernel"])
        self.assertIn("permute_block_kernel", launched)
        self.assertEqual(launched.count("weight_grad_kernel"), 2)
        self.assertEqual(launched.count("combine_kernel"), 2)

    def test_a_host_read_would_be_seen(self):
        with FakeTensorMode():
            offs = torch.empty(E, dtype=torch.int32, device="cuda")
            with self.assertRaisesRegex(
                Exception, "data-dependent|_local_scalar_dense"
            ):
                offs[-1].item()

    def test_backward_op_on_fake_tensors(self):
        with FakeTensorMode():
            logits = fake_layer_args(40)[1]
            topk_indices, topk_weights = torch.ops.aten._moe_topk(logits, K)
            grad = torch.ops.aten._moe_topk_backward(topk_weights, logits, topk_indices)
            self.assertEqual((grad.shape, grad.dtype), (logits.shape, logits.dtype))
            x, _, w_in, w_out = fake_layer_args(40)
            indices = torch.empty(40, K, dtype=torch.int64, device="cuda")
            weights = torch.empty(40, K, device="cuda")
            row_slots, slot_rows, offs, _ = torch.ops.aten._moe_permutation(indices, E)
            args = (x, w_in, w_out, offs, weights, row_slots, slot_rows, *[None] * 3)
            _, preact = torch.ops.aten._moe_mlp(*args)
            grads = torch.ops.aten._moe_mlp_backward(x, *args, preact, [True] * 7)
        for grad, operand in zip(grads, (x, w_in, w_out, weights)):
            self.assertEqual((grad.shape, grad.dtype), (operand.shape, operand.dtype))


instantiate_parametrized_tests(TestMoeTracing)

if __name__ == "__main__":
    run_tests()
