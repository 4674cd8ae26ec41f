# Owner(s): ["module: nn"]
"""What the MoE ops cost, and who avoids paying for them twice."""

import functools

import torch
import torch.nn.functional as F
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch._functorch import config
from torch.testing._internal.common_moe import RecordOps, with_backward
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode


_moe_mlp, _moe_mlp_backward = with_backward("_moe_mlp")

# All different, so that a formula that mixes two of them up gives another number.
T, K, E, D, H = 24, 2, 3, 8, 16
R = T * K


def operands(activation="swiglu", requires_grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator).requires_grad_(requires_grad)

    gates = 1 if activation == "relu" else 2
    topk_indices = torch.rand(T, E, generator=generator).topk(K).indices
    return (
        randn(T, D),
        topk_indices,
        randn(T, K),
        randn(E, gates * H, D),
        randn(E, D, H),
    )


def count_calls(graph_module, op):
    return len(graph_module.graph.find_nodes(op="call_function", target=op))


class TestMoeFlops(TestCase):
    @parametrize("activation,gates", [("swiglu", 2), ("relu", 1)])
    def test_forward_and_backward(self, activation, gates):
        args = operands(activation, requires_grad=True)
        forward = 2 * R * (gates * H * D + D * H)
        with FlopCounterMode(display=False) as counter:
            out = F.moe_mlp(*args, activation=activation)
        self.assertEqual(counter.get_total_flops(), forward)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        self.assertEqual(counter.get_total_flops(), 2 * forward)

    def test_equals_a_loop_over_experts(self):
        x, topk_indices, _, w_in, w_out = operands()
        with FlopCounterMode(display=False) as counter:
            for expert in range(E):
                rows = x[(topk_indices == expert).nonzero()[:, 0]]
                gate, up = torch.mm(rows, w_in[expert].T).chunk(2, -1)
                torch.mm(F.silu(gate) * up, w_out[expert].T)
        with FlopCounterMode(display=False) as fused:
            F.moe_mlp(x, topk_indices, None, w_in, w_out)
        self.assertEqual(fused.get_total_flops(), counter.get_total_flops())

    @parametrize("rows", (R + 40, R, 10))
    def test_padding_rows_are_free(self, rows):
        with FlopCounterMode(display=False) as counter:
            F.moe_mlp(*operands(), num_rows=rows)
        self.assertEqual(counter.get_total_flops(), 2 * min(rows, R) * 3 * H * D)

    def test_expert_major_rows(self):
        x, _, _, w_in, w_out = operands()
        offs = torch.tensor((8, 8, T), dtype=torch.int32)
        with FlopCounterMode(display=False) as counter:
            F.grouped_mlp(x, w_in, w_out, offs=offs)
        self.assertEqual(counter.get_total_flops(), 2 * T * 3 * H * D)

    @parametrize(
        "names,products",
        [
            (("w_in", "w_out"), 1 + 1 + 1),
            (("w_up",), 1 + 1),
            (("input", "w_in", "w_up", "w_out"), 1 + 2 + 2 + 1),
        ],
    )
    def test_separate_up(self, names, products):
        x, topk_indices, weights, w_in, w_out = operands()
        gate, up = w_in.chunk(2, dim=1)
        named = {"input": x, "w_in": gate.clone(), "w_up": up.clone(), "w_out": w_out}
        for name in names:
            named[name].requires_grad_()
        with FlopCounterMode(display=False) as counter:
            out = F.moe_mlp(topk_indices=topk_indices, topk_weights=weights, **named)
        self.assertEqual(counter.get_total_flops(), 2 * R * 3 * H * D)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        self.assertEqual(counter.get_total_flops(), products * 2 * R * D * H)

    def test_keyword_operands(self):
        x, topk_indices, weights, w_in, w_out = operands()
        rows = torch.ops.aten._moe_permutation(topk_indices, E)
        with FlopCounterMode(display=False) as counter:
            _moe_mlp(
                x,
                w_in,
                w_out,
                rows[2],
                topk_weights=weights,
                row_slots=rows[0],
                slot_rows=rows[1],
            )
        self.assertEqual(counter.get_total_flops(), 2 * R * 3 * H * D)

    @parametrize(
        "names,products",
        [
            (("input",), 1 + 2),
            (("w_in",), 1 + 2),
            (("w_out",), 1),
            (("topk_weights",), 1),
            (("input", "topk_weights"), 1 + 2),
            (("w_in", "w_out"), 1 + 2 + 1),
        ],
    )
    def test_frozen_operands(self, names, products):
        # In units of one product with w_out; one with w_in is twice as much.
        x, topk_indices, weights, w_in, w_out = operands()
        named = {"input": x, "topk_weights": weights, "w_in": w_in, "w_out": w_out}
        for name in names:
            named[name].requires_grad_()
        out = F.moe_mlp(x, topk_indices, weights, w_in, w_out)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        self.assertEqual(counter.get_total_flops(), products * 2 * R * D * H)

    @parametrize("aggressive", (False, True))
    def test_partitioner_keeps_the_forward_out_of_the_backward(self, aggressive):
        graphs = []

        def keep(graph_module, _):
            graphs.append(graph_module)
            return nop(graph_module, _)

        def function(x, topk_indices, weights, w_in, w_out):
            return F.moe_mlp(x, topk_indices, weights, w_in, w_out).sin().cos()

        args = operands(requires_grad=True)
        with config.patch(aggressive_recomputation=aggressive):
            compiled = aot_function(
                function,
                fw_compiler=nop,
                bw_compiler=keep,
                partition_fn=min_cut_rematerialization_partition,
            )
            compiled(*args).sum().backward()
        self.assertEqual(count_calls(graphs[0], _moe_mlp), 0)
        self.assertEqual(count_calls(graphs[0], _moe_mlp_backward), 1)

    @parametrize(
        "policy,forwards",
        [
            (None, 1),
            (CheckpointPolicy.MUST_SAVE, 1),
            (CheckpointPolicy.PREFER_RECOMPUTE, 2),
        ],
    )
    def test_selective_checkpoint(self, policy, forwards):
        def block(*args):
            return F.moe_mlp(*args).sin()

        def rule(ctx, op, *args, **kwargs):
            return policy if op is _moe_mlp else CheckpointPolicy.PREFER_RECOMPUTE

        run = block
        if policy is not None:
            context_fn = functools.partial(create_selective_checkpoint_contexts, rule)
            run = functools.partial(
                checkpoint, block, use_reentrant=False, context_fn=context_fn
            )
        args = operands(requires_grad=True)
        with RecordOps() as record:
            out = run(*args)
            out.sum().backward()
        ran = [op for op, *_ in record.calls]
        self.assertEqual(ran.count(_moe_mlp), forwards)
        self.assertEqual(ran.count(_moe_mlp_backward), 1)

        plain_args = operands(requires_grad=True)
        plain = block(*plain_args)
        plain.sum().backward()
        self.assertEqual(out, plain, atol=0, rtol=0)
        for arg, plain_arg in zip(args, plain_args):
            self.assertEqual(arg.grad, plain_arg.grad, atol=0, rtol=0)


instantiate_parametrized_tests(TestMoeFlops)

if __name__ == "__main__":
    run_tests()
