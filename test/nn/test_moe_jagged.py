# Owner(s): ["module: nestedtensor"]
"""The MoE functionals and nn.MoE on jagged nested tensors: the same as on the values."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import moe as losses
from torch.nn.utils.moe_replay import record_routing, replay_routing
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


D, H, E, K = 8, 16, 4, 2
LENGTHS = ((3, 0, 5, 1), (1,), (0, 0))


def jagged(lengths, width=D):
    rows = [torch.randn(n, width) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


@instantiate_parametrized_tests
class TestMoeJagged(TestCase):
    @parametrize("lengths", LENGTHS)
    @parametrize("shared", [None, 8])
    def test_module(self, lengths, shared):
        moe = nn.MoE(D, H, E, K, shared_hidden_dim=shared)
        x = jagged(lengths)
        y, logits, indices = moe(x, need_routing=True)
        values = x.detach().values().requires_grad_()
        want = moe(values, need_routing=True)
        for got, plain in zip((y, logits, indices), want):
            # The ragged dimension is that of x, so that a residual can be added.
            self.assertEqual(got.shape[:2], x.shape[:2])
            self.assertEqual(got.values(), plain, atol=0, rtol=0)
        (x + y).values().sin().sum().backward()
        got = [p.grad.clone() for p in moe.parameters()]
        moe.zero_grad()
        (values + want[0]).sin().sum().backward()
        self.assertEqual(x.grad.values(), values.grad)
        self.assertEqual(got, [p.grad for p in moe.parameters()])

    @parametrize("lengths", LENGTHS)
    def test_functionals(self, lengths):
        x, router = jagged(lengths), torch.randn(E, D)
        w_in, w_out = torch.randn(E, 2 * H, D), torch.randn(E, D, H)
        indices, weights = F.moe_topk(F.linear(x, router), K, bias=torch.randn(E))
        again = F.moe_topk(F.linear(x, router), K, topk_indices=indices)[1]
        self.assertEqual(again.values(), weights.values())
        y = F.moe_mlp(x, indices, weights, w_in, w_out)
        want = F.moe_mlp(x.values(), indices.values(), weights.values(), w_in, w_out)
        self.assertEqual(y.values(), want, atol=0, rtol=0)

    def test_compile(self):
        moe = nn.MoE(D, H, E, K)
        compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
        for lengths in ((3, 2, 5), (4, 6), (7, 1, 2, 2)):
            x = jagged(lengths)
            y = compiled(x)
            self.assertEqual(y.values(), moe(x).values())
            y.values().sum().backward()
            got, x.grad = x.grad, None
            moe(x).values().sum().backward()
            self.assertEqual(got.values(), x.grad.values())

    def test_compile_functionals(self):
        router = torch.randn(E, D)
        w_in, w_out = torch.randn(E, 2 * H, D), torch.randn(E, D, H)

        def layer(x):
            return F.moe_mlp(x, *F.moe_topk(F.linear(x, router), K), w_in, w_out)

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for lengths in ((3, 2, 5), (4, 6), (7, 1, 2, 2)):
            x = jagged(lengths)
            self.assertEqual(compiled(x).values(), layer(x).values())

    def test_recorded_and_replayed(self):
        moe = nn.Sequential(nn.MoE(D, H, E, K))
        x = jagged((3, 0, 5))
        with record_routing(moe) as record:
            want = moe(x)
        self.assertEqual(record["0"].shape, (8, K))
        with replay_routing(moe, record):
            self.assertEqual(moe(x).values(), want.values())

    @parametrize("lengths", LENGTHS)
    def test_losses_and_counts(self, lengths):
        _, logits, indices = nn.MoE(D, H, E, K)(jagged(lengths), need_routing=True)
        scores, mask = logits.softmax(-1), logits[..., 0] > 0
        for function, *args in (
            (losses.load_balancing_loss, scores, indices),
            (losses.router_z_loss, logits),
            (losses.expert_counts, indices, E),
            (losses.balance_counts, indices, E),
        ):
            plain = [x.values() if isinstance(x, torch.Tensor) else x for x in args]
            self.assertEqual(function(*args), function(*plain))
            want = function(*plain, mask=mask.values())
            self.assertEqual(function(*args, mask=mask), want)
        with self.assertRaisesRegex(ValueError, "per_sequence=True .* not nested"):
            losses.load_balancing_loss(scores, indices, per_sequence=True)

    def test_errors(self):
        moe, x = nn.MoE(D, H, E, K), jagged((3, 2))
        strided = torch.nested.nested_tensor([torch.randn(2, D)])
        with self.assertRaisesRegex(ValueError, "MoE: nested tensors must have layout"):
            moe(strided)
        holes = torch.nested.nested_tensor_from_jagged(
            torch.randn(5, D), torch.tensor([0, 3, 5]), lengths=torch.tensor([1, 2])
        )
        with self.assertRaisesRegex(
            ValueError, "MoE: .*no lengths, got .*with lengths"
        ):
            moe(holes)
        with self.assertRaisesRegex(ValueError, "ragged in dimension 1"):
            F.moe_topk(x.transpose(1, 2), 1)
        indices, weights = F.moe_topk(jagged((2, 3), E), K)
        args = (torch.randn(E, 2 * H, D), torch.randn(E, D, H))
        with self.assertRaisesRegex(ValueError, "moe_mlp: .*same offsets, got shapes"):
            F.moe_mlp(x, indices, weights, *args)


if __name__ == "__main__":
    run_tests()
