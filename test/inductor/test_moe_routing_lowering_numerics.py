# Owner(s): ["module: inductor"]
"""What Inductor emits for the MoE router and permutation on CUDA computes what float64 says.

Runs without a GPU, as test_moe_lowering_numerics.py does.
"""

import os


os.environ["TRITON_INTERPRET"] = "1"

import re

from inductor_interpreter import arguments, EmittedTestCase, load, run_training
from moe_routing_problems import Block, Permutation, PROBLEMS, Router

import torch
import torch.nn.functional as F
from torch.testing._internal.common_moe import parametrize_named
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    run_tests,
)
from torch.testing._internal.moe_reference import (
    check_close,
    moe_mlp_reference,
    moe_mlp_unfused,
    moe_permutation_reference,
    moe_topk_reference,
)


def problems(kind):
    found = [p for p in PROBLEMS.values() if isinstance(p, kind)]
    return parametrize_named("problem", found)


class TestMoeRoutingLoweringNumerics(EmittedTestCase):
    script = "moe_routing_problems.py"

    def run_emitted(self, problem, tensors, grad_out=None):
        """The results and, in training, the gradients by name."""
        graphs = self.emitted[problem.name]
        for graph in graphs:
            # Or another implementation would be what is compared.
            self.assertNotRegex(graph["source"], r"aten\._moe_\w+\.default\(")
        values = list(tensors.values())
        if not problem.training:
            (graph,) = graphs
            args = arguments(graph["inputs"], values)
            return load(graph["source"], self.folder.name)(args), {}
        results, grads = run_training(*graphs, self.folder.name, values, [grad_out])
        return results, dict(zip(tensors, grads, strict=True))

    @problems(Permutation)
    def test_permutation(self, problem):
        tensors = problem.tensors(problem.num_tokens)
        found, _ = self.run_emitted(problem, tensors)
        ids = problem.keep(tensors["ids"])
        # Most of them would pass with nothing to do.
        self.assertEqual(
            len(ids) == 0, re.search("none|no_tokens", problem.name) is not None
        )
        expected = moe_permutation_reference(
            ids, problem.num_experts, **problem.options(ids)
        )
        for name, actual, truth in zip(expected._fields, found, expected, strict=True):
            self.assertEqual(actual, truth, msg=name)

    @problems(Router)
    def test_router(self, problem):
        tensors = problem.tensors(problem.num_tokens)
        logits, bias = tensors["logits"], tensors.get("bias")
        cotangent = torch.randn(len(problem.keep(logits)), problem.top_k)
        (weights, *rest), grads = self.run_emitted(problem, tensors, cotangent)
        leaf = logits.detach().double().requires_grad_()
        options = {"bias": bias, **problem.options}
        ids, truth = moe_topk_reference(problem.keep(leaf), problem.top_k, **options)
        other_leaf = logits.detach().clone().requires_grad_()
        _, unfused = F.moe_topk(problem.keep(other_leaf), problem.top_k, **options)
        if len(ids):
            check_close(weights, truth, unfused, torch.float32, "topk_weights")
        self.assertEqual(weights.shape, truth.shape)
        if not problem.training:
            self.assertEqual(rest[0], ids)
            return
        (truth,) = torch.autograd.grad(truth, leaf, cotangent.double())
        (unfused,) = torch.autograd.grad(unfused, other_leaf, cotangent)
        check_close(grads["logits"], truth, unfused, logits.dtype, "grad of logits")

    @problems(Block)
    def test_block(self, problem):
        tensors = problem.tensors(problem.num_tokens)
        grad_out = torch.randn_like(problem.keep(tensors["x"]))
        (output, *_), grads = self.run_emitted(problem, tensors, grad_out)
        truths, yardsticks = (
            self.block(function, problem, tensors, grad_out)
            for function in (moe_mlp_reference, moe_mlp_unfused)
        )
        check_close(output, truths[0], yardsticks[0], torch.bfloat16, "output")
        self.assertEqual(set(grads), set(truths[1]))
        for name, truth in truths[1].items():
            other = yardsticks[1][name]
            check_close(grads[name], truth, other, torch.bfloat16, f"grad of {name}")

    def block(self, experts, problem, tensors, grad_out):
        """``problem`` with the experts that bfloat16 logits choose."""
        exact = experts is moe_mlp_reference
        logits = F.linear(problem.keep(tensors["x"]), tensors["router"])
        ids, _ = F.moe_topk(logits, problem.top_k)
        plan = moe_permutation_reference(ids, problem.num_experts)
        leaves = {
            name: (x.double() if exact else x.detach().clone()).requires_grad_()
            for name, x in tensors.items()
        }
        x = problem.keep(leaves["x"])
        scores = F.linear(x, leaves["router"])
        scores = (scores if exact else scores.float()).softmax(-1).gather(1, ids)
        weights = scores / scores.sum(-1, keepdim=True)
        y, _ = experts(
            x,
            leaves["w_in"],
            leaves["w_out"],
            plan.offs,
            weights,
            plan.row_slots,
            plan.slot_rows,
        )
        y = x + y
        y = F.rms_norm(y if exact else y.float(), (problem.dim,)).to(x.dtype)
        if not problem.training:
            return y, {}
        grads = torch.autograd.grad(y, list(leaves.values()), grad_out.to(y.dtype))
        return y, dict(zip(leaves, grads, strict=True))


instantiate_parametrized_tests(TestMoeRoutingLoweringNumerics)

if __name__ == "__main__":
    run_tests()
