# Owner(s): ["module: inductor"]
"""What Inductor emits for the MoE ops on CUDA computes what float64 says.

Runs without a GPU: another process writes the wrappers (moe_lowering_problems.py), this one runs
them on CPU tensors, their kernels in Triton's interpreter.
"""

import os


os.environ["TRITON_INTERPRET"] = "1"

from inductor_interpreter import arguments, EmittedTestCase, load, run_training
from moe_lowering_problems import FAR_ROWS, PROBLEMS

import torch
from torch.testing._internal.common_moe import parametrize_named
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    run_tests,
)
from torch.testing._internal.moe_reference import (
    check_close,
    moe_mlp_reference,
    moe_mlp_unfused,
)


class TestMoeLoweringNumerics(EmittedTestCase):
    script = "moe_lowering_problems.py"

    def truth(self, function, problem, operands):
        """What ``problem`` computes, with ``function`` for its op."""
        operands = problem.chosen(operands)
        output, _ = function(*operands.args(), **problem.options)
        if problem.norm:
            x = operands.input.to(output.dtype)
            output = torch.nn.functional.rms_norm(x + output, (x.shape[1],))
        return output

    @parametrize_named("problem", [p for p in PROBLEMS.values() if not p.training])
    def test_inference(self, problem):
        (graph,) = self.emitted[problem.name]
        operands = problem.operands()
        args = arguments(graph["inputs"], list(problem.present(operands).values()))
        (output, *_) = load(graph["source"], self.folder.name)(args)
        truth = self.truth(moe_mlp_reference, problem, operands)
        unfused = self.truth(moe_mlp_unfused, problem, operands)
        check_close(output, truth, unfused, torch.bfloat16, "output")

    def test_sum_of_rows_beyond_int32(self):
        # The kernel alone, on rows at the end of 4 GiB, of which nothing else is touched.
        (graph,) = self.emitted["far_rows"]
        kernels = load(graph["source"], self.folder.name).kernels
        (name,) = (n for n in kernels if n.startswith("triton_poi_fused__moe_mlp"))
        case = PROBLEMS["inference"].case
        T, K, D = case.num_tokens, case.top_k, case.dim
        routed = torch.empty(FAR_ROWS, D, dtype=torch.bfloat16)
        rows = FAR_ROWS - 1 - torch.randperm(T * K)
        self.assertGreater(rows.min().item() * D, 2**31)
        values = torch.randn(T * K, D).bfloat16()
        routed[rows] = values
        output = torch.empty(T, D, dtype=torch.bfloat16)
        slot_rows = rows.int().view(T, K)
        kernels[name](slot_rows, routed, output, output.numel())
        expected = values.view(T, K, D).double().sum(1)
        self.assertEqual(output.double(), expected, rtol=2**-8, atol=1e-6)

    @parametrize_named("problem", [p for p in PROBLEMS.values() if p.training])
    def test_training(self, problem):
        forward, backward = self.emitted[problem.name]
        operands = problem.operands()
        present = problem.present(operands)
        (output,), grads = run_training(
            forward,
            backward,
            self.folder.name,
            list(present.values()),
            [operands.grad_out],
        )
        grads = dict(zip(present, grads, strict=True))
        truths, yardsticks = (
            self.training_truth(function, problem, present, operands.grad_out)
            for function in (moe_mlp_reference, moe_mlp_unfused)
        )
        check_close(output, truths[0], yardsticks[0], torch.bfloat16, "output")
        for name, truth in truths[1].items():
            check_close(
                grads[name],
                truth,
                yardsticks[1][name],
                torch.bfloat16,
                f"grad of {name}",
            )
            self.assertEqual(grads[name].stride(), present[name].stride(), name)

    def training_truth(self, function, problem, present, grad_out):
        exact = function is moe_mlp_reference
        leaves = {
            name: (x.double() if exact else x.clone()).detach().requires_grad_()
            if x.is_floating_point()
            else x
            for name, x in present.items()
        }
        output, _ = function(**leaves, **problem.options)
        if problem.norm:
            output = torch.nn.functional.rms_norm(
                leaves["input"] + output, (output.shape[1],)
            )
        wanted = {n: x for n, x in leaves.items() if x.requires_grad}
        grads = torch.autograd.grad(
            output, list(wanted.values()), grad_out.to(output.dtype)
        )
        return output, dict(zip(wanted, grads, strict=True))


instantiate_parametrized_tests(TestMoeLoweringNumerics)

if __name__ == "__main__":
    run_tests()
