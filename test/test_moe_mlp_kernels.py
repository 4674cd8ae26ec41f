# Owner(s): ["module: nn"]
"""The two CPU kernels of _moe_mlp: brgemm and portable, and what a token's result may depend on.

test_moe_mlp.py compares the kernel that a plain call gets with float64; here the portable kernel is
forced where the brgemm kernel would be taken, and determinism level 2 is checked for both.
"""

import contextlib

import torch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)
from torch.testing._internal.moe_generators import moe_cases
from torch.testing._internal.moe_reference import (
    check_close,
    moe_mlp_backward_reference,
    moe_mlp_backward_unfused,
    moe_mlp_reference,
    moe_mlp_unfused,
    moe_permutation_reference,
)


_moe_mlp = torch.ops.aten._moe_mlp.default
_moe_mlp_backward = torch.ops.aten._moe_mlp_backward.default

all_cases = parametrize("case", [subtest(c, name=c.name) for c in moe_cases()])
all_dtypes = parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
# brgemm is part of oneDNN: without it the portable kernel runs.
both_kernels = parametrize("portable", [False, True])


def kernel(portable):
    if portable:
        return torch.backends.mkldnn.flags(enabled=False)
    return contextlib.nullcontext()


def run_op(args, grad_out, portable=False):
    """Output, preact and the gradients that belong to tokens, then those of the weights."""
    with kernel(portable):
        output, preact = _moe_mlp(*args)
        args = tuple(args) + (None,) * (9 - len(args))
        grads = _moe_mlp_backward(grad_out, *args, preact, [True] * 6)
    return output, preact, grads


class TestMoeMlpKernels(TestCase):
    @all_cases
    @all_dtypes
    def test_portable_reference(self, case, dtype):
        args = case.operands(dtype, "cpu", bias=True).args()
        grad_out = torch.randn(args[0].shape).to(dtype)
        output, preact, grads = run_op(args, grad_out, portable=True)
        expected, unfused = moe_mlp_reference(*args), moe_mlp_unfused(*args)
        check_close(output, expected[0], unfused[0], dtype, "output")
        check_close(preact, expected[1], unfused[1], dtype, "preact")
        expected = moe_mlp_backward_reference(grad_out, *args)
        unfused = moe_mlp_backward_unfused(grad_out, *args)
        for name, grad, want, yardstick in zip(
            expected._fields, grads, expected, unfused
        ):
            if want is not None:
                check_close(grad, want, yardstick, dtype, name)

    @all_cases
    @all_dtypes
    @both_kernels
    def test_thread_count(self, case, dtype, portable):
        args = case.operands(dtype, "cpu", bias=True).args()
        grad_out = torch.randn(args[0].shape).to(dtype)
        many = run_op(args, grad_out, portable)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(3 if threads == 1 else 1)
            other = run_op(args, grad_out, portable)
        finally:
            torch.set_num_threads(threads)
        self.assertEqual(many, other, rtol=0, atol=0)

    @all_dtypes
    @both_kernels
    @parametrize("kept", [1, 2, 3, 5, 17, 40])
    def test_other_tokens(self, dtype, portable, kept):
        """y, dX and d(topk_weights) of the first tokens are those of a batch without the others."""
        tokens, model_dim, hidden, experts, top_k = 90, 70, 45, 3, 2
        generator = torch.Generator().manual_seed(kept)

        def randn(*shape):
            return torch.randn(shape, generator=generator).to(dtype)

        x, grad_out = randn(tokens, model_dim), randn(tokens, model_dim)
        w_in = randn(experts, 2 * hidden, model_dim)
        w_out = randn(experts, model_dim, hidden)
        weights = torch.rand(tokens, top_k, generator=generator)
        indices = torch.randint(experts, (tokens, top_k), generator=generator)

        def run_first(count):
            plan = moe_permutation_reference(indices[:count], experts)
            args = (x[:count], w_in, w_out, plan.offs, weights[:count])
            args += (plan.row_slots, plan.slot_rows)
            output, _, grads = run_op(args, grad_out[:count], portable)
            return output[:kept], grads[0][:kept], grads[3][:kept]

        self.assertEqual(run_first(kept), run_first(tokens), rtol=0, atol=0)


instantiate_parametrized_tests(TestMoeMlpKernels)

if __name__ == "__main__":
    run_tests()
