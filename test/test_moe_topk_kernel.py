# Owner(s): ["module: nn"]
"""The CPU kernel of aten::_moe_topk. test_moe_topk.py tests what all kernels share."""

import torch
from torch.testing._internal.common_moe import (
    call_composite,
    call_native,
    num_threads,
    TOPK_OPTIONS,
    with_backward,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


_moe_topk, _moe_topk_backward = with_backward("_moe_topk")

E = 16


class TestMoeTopkKernel(TestCase):
    def test_registered(self):
        for op in (_moe_topk, _moe_topk_backward):
            has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
            self.assertTrue(has_kernel(op.name(), "CPU"))

    @parametrize("name", list(TOPK_OPTIONS))
    @parametrize("bias", [False, True])
    @parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_kernels_agree(self, name, bias, dtype):
        options = dict(TOPK_OPTIONS[name], bias=torch.randn(E) if bias else None)
        # Few distinct values, so that there are ties.
        logits = torch.randn(40, E).mul(4).round().to(dtype)
        actual = call_native(_moe_topk, logits, 4, **options)
        expected = call_composite(_moe_topk, logits, 4, **options)
        self.assertEqual(actual[0], expected[0])
        self.assertEqual(actual[1], expected[1])

    def test_bad_bounds(self):
        # The kernel bounds the k-th score by the maxima of groups. Few groups have all the best
        # scores here.
        logits = torch.randn(4, 1024)
        logits[:, ::32] += 100
        everyone, _ = _moe_topk(logits, 1024)
        for k in (20, 200):
            self.assertEqual(_moe_topk(logits, k)[0], everyone[:, :k])

    def test_a_token_does_not_depend_on_threads_or_others(self):
        logits = torch.randn(60, 96)
        options = {"num_groups": 8, "top_groups": 4, "bias": torch.randn(96)}
        with num_threads(1):
            expected = _moe_topk(logits, 6, **options)
        with num_threads(4):
            self.assertEqual(_moe_topk(logits, 6, **options), expected, rtol=0, atol=0)
        for t in (0, 27, 59):
            alone = _moe_topk(logits[t : t + 1], 6, **options)
            self.assertEqual(
                [x[0] for x in alone], [x[t] for x in expected], rtol=0, atol=0
            )

    def test_bad_index_in_backward(self):
        logits, grad = torch.zeros(2, E), torch.zeros(2, 1)
        with self.assertRaisesRegex(IndexError, r"in \[0, E\), E = 16, got 16"):
            _moe_topk_backward(grad, logits, torch.tensor([[0], [E]]))


instantiate_parametrized_tests(TestMoeTopkKernel)

if __name__ == "__main__":
    run_tests()
