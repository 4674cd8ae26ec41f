# Owner(s): ["module: nn"]
"""Which matmuls the composite kernel of _moe_mlp is made of.

That it computes the same is in test_moe_mlp.py, which runs on every kernel of the build.
"""

import torch
from torch.testing._internal.common_moe import backends_of, call_composite
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_generators import MoeCase
from torch.utils._python_dispatch import TorchDispatchMode


_moe_mlp = torch.ops.aten._moe_mlp.default
_moe_mlp_backward = torch.ops.aten._moe_mlp_backward.default


class Seen(TorchDispatchMode):
    """Names of the ops that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def ops_of_both(dim, dtype):
    """Names of the ops in forward and backward."""
    case = MoeCase("ops", num_tokens=13, num_experts=4, top_k=2, dim=dim, hidden=24)
    ops = case.operands(dtype)
    with Seen() as seen:
        _, preact = call_composite(_moe_mlp, *ops.args())
        args = (*ops.args(), *[None] * (9 - len(ops.args())))
        call_composite(_moe_mlp_backward, ops.grad_out, *args, preact, [True] * 6)
    return seen.names


@instantiate_parametrized_tests
class TestMoeMlpComposite(TestCase):
    @parametrize("op", [_moe_mlp, _moe_mlp_backward])
    def test_is_registered(self, op):
        self.assertEqual(backends_of(op), ["native", "composite"])

    def test_grouped_matmuls(self):
        # bfloat16 with rows of a multiple of 16 bytes is what _grouped_mm takes.
        names = ops_of_both(16, torch.bfloat16)
        self.assertIn("_grouped_mm", names)
        self.assertNotIn("mm", names)

    # Neither float64 nor rows of 14 bytes: one matmul per expert.
    @parametrize("dim, dtype", [(16, torch.float64), (7, torch.bfloat16)])
    def test_others_loop_over_the_experts(self, dim, dtype):
        names = ops_of_both(dim, dtype)
        self.assertIn("mm", names)
        self.assertNotIn("_grouped_mm", names)


if __name__ == "__main__":
    run_tests()
