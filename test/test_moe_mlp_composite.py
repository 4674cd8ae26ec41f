# Owner(s): ["module: nn"]
"""Which matmuls the composite kernel of _moe_mlp is made of.

That it computes the same is in test_moe_mlp.py, which runs on every kernel of the build.
"""

import dataclasses

import torch
from torch import Tensor
from torch.testing._internal.common_moe import (
    backends_of,
    call_composite,
    num_threads,
    RecordOps,
    with_backward,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_generators import MoeCase
from torch.utils._pytree import tree_leaves


_moe_mlp, _moe_mlp_backward = with_backward("_moe_mlp")


def ops_of_both(dim, dtype):
    """Names of the ops in forward and backward."""
    case = MoeCase("ops", num_tokens=13, num_experts=4, top_k=2, dim=dim, hidden=24)
    ops = case.operands(dtype)
    with RecordOps() as seen:
        _, preact = call_composite(_moe_mlp, *ops.args())
        args = (ops.grad_out, *ops.args(), preact, [True] * 7)
        call_composite(_moe_mlp_backward, *args)
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

    def test_address_decides_not_the_offset(self):
        # The storage of a foreign buffer may start anywhere.
        case = MoeCase(
            "address", num_tokens=13, num_experts=4, top_k=2, dim=16, hidden=24
        )
        ops = case.operands(torch.bfloat16)
        size = 2 * ops.w_in.numel()
        buffer = bytearray(size + 32)
        start = -torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() % 16
        expected, _ = call_composite(_moe_mlp, *ops.args())
        for shift, name in ((0, "_grouped_mm"), (2, "mm")):
            w_in = torch.frombuffer(
                buffer, dtype=torch.bfloat16, offset=start + shift, count=size // 2
            ).view(ops.w_in.shape)
            w_in.copy_(ops.w_in)
            self.assertEqual(w_in.storage_offset(), 0)
            self.assertEqual(w_in.data_ptr() % 16, shift)
            with RecordOps() as seen:
                out, _ = call_composite(
                    _moe_mlp, *dataclasses.replace(ops, w_in=w_in).args()
                )
            self.assertEqual({"_grouped_mm", "mm"}.intersection(seen.names), {name})
            self.assertEqual(out, expected)

    @parametrize("storage", ("dense", "odd_stride", "transposed"))
    def test_gradient_is_not_copied(self, storage):
        # One expert: the stride of its dimension is anything, and means nothing.
        case = MoeCase("copy", num_tokens=5, num_experts=1, top_k=1, dim=16, hidden=24)
        ops = case.operands(torch.bfloat16)
        w_in = ops.w_in
        if storage == "odd_stride":
            w_in = w_in.as_strided(w_in.shape, (8, *w_in.stride()[1:]))
        elif storage == "transposed":
            w_in = w_in.mT.contiguous().mT
        args = dataclasses.replace(ops, w_in=w_in).args()
        _, preact = call_composite(_moe_mlp, *args)
        mask = [False, True, True, *[False] * 4]
        with RecordOps() as record:
            call_composite(_moe_mlp_backward, ops.grad_out, *args, preact, mask)
        # By address, what is as large as a weight and larger than the rows.
        made = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves(record.calls)
            if isinstance(x, Tensor) and x.numel() >= ops.w_out.numel()
        }
        # The gradients, and where the weight has other strides than the product a copy.
        self.assertEqual(len(made), 3 if storage == "transposed" else 2)

    def test_separate_up_is_not_concatenated(self):
        # Activations are, at most; a copy of all weights in every step is what w_up saves.
        case = MoeCase("up", num_tokens=4, num_experts=8, top_k=1, dim=64, hidden=96)
        ops = case.operands(torch.bfloat16).split_gate()
        with RecordOps() as record:
            _, preact = call_composite(_moe_mlp, *ops.args())
            args = (ops.grad_out, *ops.args(), preact, [True] * 7)
            call_composite(_moe_mlp_backward, *args)
        cat = torch.ops.aten.cat.default
        copied = max(x.numel() for op, _, x in record.calls if op is cat)
        self.assertEqual(copied, preact.numel())

    @parametrize("threads", [1, 64])
    def test_no_activations_in_the_accumulation_type(self, threads):
        # As many bytes as all that is saved. They are made of some rows at a time.
        case = MoeCase("parts", num_tokens=300, dim=512, hidden=512)
        ops = case.operands(torch.bfloat16, bias=True)
        with num_threads(threads), RecordOps() as record:
            _, preact = call_composite(_moe_mlp, *ops.args())
            args = (ops.grad_out, *ops.args(), preact, [True] * 7)
            call_composite(_moe_mlp_backward, *args)
        made = [x for *_, x in record.calls if isinstance(x, Tensor)]
        wide = [x.numel() for x in made if x.dtype == torch.float32]
        self.assertLess(max(wide), preact.numel() / 4)

    # Backward is often called inside of autocast, and both with other operands than autocast makes.
    @parametrize("dim", [7, 16])
    @parametrize(
        "dtype, autocast",
        [
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.float16),
            (torch.float16, torch.bfloat16),
        ],
    )
    def test_autocast_does_not_reach_the_ops(self, dim, dtype, autocast):
        case = MoeCase("autocast", num_tokens=13, num_experts=4, dim=dim, hidden=24)
        ops = case.operands(dtype, bias=True)
        results = []
        for enabled in (False, True):
            with torch.autocast("cpu", autocast, enabled=enabled):
                output, preact = call_composite(_moe_mlp, *ops.args())
                args = (ops.grad_out, *ops.args(), preact, [True] * 7)
                grads = call_composite(_moe_mlp_backward, *args)
            results.append((output, preact, *grads))
        self.assertEqual(results[0], results[1], atol=0, rtol=0)

    @parametrize("num_experts", [1, 3])
    def test_bias_gradients_keep_only_their_bytes(self, num_experts):
        case = MoeCase(
            "bias", num_tokens=13, num_experts=num_experts, top_k=1, dim=16, hidden=24
        )
        ops = case.operands(torch.bfloat16, bias=True)
        _, preact = call_composite(_moe_mlp, *ops.args())
        grads = call_composite(
            _moe_mlp_backward, ops.grad_out, *ops.args(), preact, [True] * 7
        )
        for grad in grads[4:6]:
            self.assertEqual(grad.untyped_storage().nbytes(), grad.numel() * 2)

    def test_bias_gradients_of_many_rows(self):
        # In a loop over the experts: sums as exact as those of torch.sum.
        tokens, dim = 200_000, 1
        generator = torch.Generator().manual_seed(0)
        grad_out = torch.rand(tokens, dim, generator=generator)
        offs = torch.tensor([0, tokens], dtype=torch.int32)
        w = torch.ones(2, dim, dim)
        args = (torch.zeros(tokens, dim), w, w, offs, None, None, None)
        args += (torch.ones(2, dim), torch.zeros(2, dim), None)
        kwargs = {"activation": "relu"}
        _, preact = call_composite(_moe_mlp, *args, **kwargs)
        mask = [False, False, False, False, True, True, False]
        call = (_moe_mlp_backward, grad_out, *args, preact, mask)
        grads = call_composite(*call, **kwargs)
        expected = torch.stack([torch.zeros(dim).double(), grad_out.double().sum(0)])
        eps = 4 * torch.finfo(torch.float32).eps
        for grad in (grads[4], grads[5]):
            self.assertEqual(grad.double(), expected, rtol=eps, atol=0)

    @parametrize("looped", [False, True])
    def test_infinite_router_weight_stays_with_its_expert(self, looped):
        # Padding rows of the other experts have no slot, nor any slot's weight.
        case = MoeCase(
            "inf",
            num_tokens=4,
            num_experts=4,
            top_k=1,
            dim=16,
            hidden=24,
            row_alignment=8,
        )
        ops = case.operands(torch.float64 if looped else torch.bfloat16, bias=True)
        weights = torch.ones(4, 1)
        weights[0] = torch.inf
        ops = dataclasses.replace(ops, topk_weights=weights.to(ops.topk_weights.dtype))
        expert = int(ops.topk_indices[0])
        _, preact = call_composite(_moe_mlp, *ops.args())
        args = (ops.grad_out, *ops.args(), preact, [True] * 7)
        grads = call_composite(_moe_mlp_backward, *args)
        others = [e for e in range(case.num_experts) if e != expert]
        for grad in (grads[1], grads[2], grads[4], grads[5]):
            self.assertFalse(grad[expert].isfinite().all())
            self.assertTrue(grad[others].isfinite().all())

    def test_gradient_has_the_strides_of_the_weight(self):
        case = MoeCase(
            "strides", num_tokens=13, num_experts=3, top_k=1, dim=16, hidden=24
        )
        ops = case.operands(torch.bfloat16)
        w_in = ops.w_in.mT.contiguous().mT
        ops = dataclasses.replace(ops, w_in=w_in, w_out=ops.w_out[:1].expand(3, -1, -1))
        args = (*ops.args(), *[None] * (10 - len(ops.args())))
        _, preact = call_composite(_moe_mlp, *args)
        mask = [False, True, True, *[False] * 4]
        grads = call_composite(_moe_mlp_backward, ops.grad_out, *args, preact, mask)
        for operand, grad in zip((ops.w_in, ops.w_out), grads[1:3]):
            self.assertEqual(grad.stride(), torch.empty_like(operand).stride())


if __name__ == "__main__":
    run_tests()
