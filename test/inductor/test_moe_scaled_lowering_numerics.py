# Owner(s): ["module: inductor"]
"""What Inductor emits for the MoE ops of low precision on CUDA computes what the ops do.

Runs without a GPU, as test_moe_lowering_numerics.py does.
"""

import os


os.environ["TRITON_INTERPRET"] = "1"

from inductor_interpreter import arguments, EmittedTestCase, load, run_training
from moe_scaled_problems import Experts, PROBLEMS, Quantize

import torch
from torch.testing._internal.common_moe import call_composite
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTestIf,
    subtest,
)
from torch.testing._internal.moe_quantized_reference import ScaledMlp
from torch.testing._internal.moe_reference import (
    check_close,
    MoeMlpGrads,
)


def problems(kind):
    found = [p for p in PROBLEMS.values() if isinstance(p, kind)]
    return parametrize(
        "problem",
        [subtest(p, name=p.name, decorators=[slowTestIf(p.slow)]) for p in found],
    )


class TestMoeScaledLoweringNumerics(EmittedTestCase):
    script = "moe_scaled_problems.py"

    def graphs(self, problem):
        graphs = self.emitted[problem.name]
        for graph in graphs:
            # Or another implementation would be what is compared.
            self.assertNotRegex(graph["source"], r"aten\._moe_\w+\.default\(")
        return graphs

    @problems(Quantize)
    def test_quantize(self, problem):
        (graph,) = self.graphs(problem)
        tensors = problem.tensors(problem.num_tokens)
        args = arguments(graph["inputs"], list(tensors.values()))
        found = load(graph["source"], self.folder.name)(args)
        expected = problem(**tensors)
        for name, actual, truth in zip(("data", "scale"), found, expected, strict=True):
            self.assertEqual(
                (actual.dtype, actual.shape, actual.stride()),
                (truth.dtype, truth.shape, truth.stride()),
                msg=name,
            )
            bits = (x.contiguous().view(torch.uint8) for x in (actual, truth))
            self.assertEqual(*bits, msg=name)

    def references(self, problem, operands):
        """The loop over experts in float64, and rounded at each step."""
        operands = problem.chosen(operands)
        options = {
            **problem.options,
            "preact_dtype": None if problem.recompute else problem.preact_dtype,
            "hp_wgrad": problem.hp_wgrad,
        }
        return [
            ScaledMlp(operands, *problem.codes, dtype=dtype, **options)
            for dtype in (None, torch.bfloat16)
        ]

    def gradients(self, problem, operands, reference):
        """Gradients of the given tensors by name: of the experts, and through the choice of tokens."""
        names = [field.removeprefix("grad_") for field in MoeMlpGrads._fields]
        grads = dict(zip(names, reference.backward(), strict=True))
        if problem.above is not None:
            leaf = operands.input.double().requires_grad_()
            x, _, weights = problem.choose(leaf)
            outer = [
                grads[n].to(w.dtype)
                for n, w in (("input", x), ("topk_weights", weights))
            ]
            (grads["input"],) = torch.autograd.grad((x, weights), leaf, outer)
        return grads

    @problems(Experts)
    def test_experts(self, problem):
        graphs = self.graphs(problem)
        operands = problem.operands()
        present = problem.present(operands)
        exact, rounded = self.references(problem, operands)
        tensors, grads = list(present.values()), []
        if problem.training:
            grad_out = exact.ops.grad_out
            (output,), grads = run_training(
                *graphs, self.folder.name, tensors, [grad_out]
            )
        else:
            (graph,) = graphs
            args = arguments(graph["inputs"], tensors)
            (output, *_) = load(graph["source"], self.folder.name)(args)
        truth, other = exact.forward()[0], rounded.forward()[0]
        self.assertEqual(output.shape, truth.shape)
        check_close(output, truth, other, torch.bfloat16, "output")
        if not problem.training:
            return
        grads = dict(zip(present, grads, strict=True))
        wanted = [name for name, x in present.items() if problem.has_gradient(name, x)]
        self.assertEqual([n for n, x in grads.items() if x is not None], wanted)
        truths, others = (
            self.gradients(problem, operands, ref) for ref in (exact, rounded)
        )
        for name in wanted:
            check_close(grads[name], truths[name], others[name], torch.bfloat16, name)
            self.assertEqual(grads[name].stride(), present[name].stride(), name)
        if problem.integers:
            self.check_bits(problem, operands, grads)

    def check_bits(self, problem, operands, grads):
        """The composite's, where every sum is exact."""
        args = (*operands.args(), [], [], [], [])
        rows, weights = problem.codes
        options = {
            **problem.options,
            "recipe_a": [rows],
            "recipe_w": [weights],
            "preact_dtype": problem.preact_dtype,
        }
        aten = torch.ops.aten
        _, *saved = call_composite(aten._moe_mlp_scaled.default, *args, **options)
        mask = [
            f in ("grad_input", "grad_w_in", "grad_w_out") for f in MoeMlpGrads._fields
        ]
        expected = call_composite(
            aten._moe_mlp_scaled_backward.default,
            operands.grad_out,
            *args[1:],
            *saved,
            mask,
            **options,
        )
        for name, grad in zip(("input", "w_in", "w_out"), expected[:3], strict=True):
            self.assertGreater(grad.count_nonzero(), 0)
            self.assertEqual(grads[name], grad, rtol=0, atol=0, msg=name)


instantiate_parametrized_tests(TestMoeScaledLoweringNumerics)

if __name__ == "__main__":
    run_tests()
