# Owner(s): ["oncall: distributed"]

import torch
from torch.distributed._token_switch import Routing, TokenSwitch
from torch.testing._internal.common_utils import run_tests, TestCase


class BufferSwitch(TokenSwitch):
    """A backend of one rank that only fills buffers, as TokenSwitchNCCL does.

    Row r of the dispatched buffer is token ``N - 1 - r``; the rest is free.
    """

    _max_recv_tokens_per_rank = 5

    def create_routing(self, topk_idx, per_expert_token_counts=None, *, layout="flat"):
        return Routing(handle=None, topk_idx=topk_idx, layout=layout)

    def _alloc_dispatch_outputs(
        self, routing, tokens, topk_weights, max_recv_tokens, H, K
    ):
        return (
            tokens.new_zeros(max_recv_tokens, H),
            topk_weights.new_zeros(max_recv_tokens, K),
            tokens.new_zeros(max_recv_tokens, K, dtype=torch.int64),
        )

    def _dispatch(self, routing, tokens, topk_weights, out_tokens, out_w, out_idx):
        N = tokens.shape[0]
        for out, value in (
            (out_tokens, tokens),
            (out_w, topk_weights),
            (out_idx, routing.topk_idx),
        ):
            out[:N] = value.flip(0)

    def _combine(self, routing, expert_tokens, out_tokens):
        out_tokens.copy_(expert_tokens[: out_tokens.shape[0]].flip(0))


class ExactSwitch(BufferSwitch):
    """The same backend with exact sizes and gradients of the router weights."""

    _max_recv_tokens_per_rank = None

    def _exact_recv_tokens(self, routing):
        return routing.topk_idx.shape[0]

    def _dispatch_backward(self, routing, grad_tokens, grad_topk_weights):
        return tuple(
            None if grad is None else grad.flip(0)
            for grad in (grad_tokens, grad_topk_weights)
        )

    def _dispatch_grad(self, routing, grad_out_tokens, expert_shape, expert_dtype):
        return grad_out_tokens.to(expert_dtype).flip(0)


class TestTokenSwitchHooks(TestCase):
    def operands(self):
        torch.manual_seed(0)
        tokens = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
        return tokens, weights, torch.tensor([[0, 1], [2, 3], [1, 0]])

    def round_trip(self, switch, tokens, weights, idx, max_recv_tokens=None):
        routing = switch.create_routing(idx, layout="flat")
        rows, row_weights, row_idx = switch.dispatch(
            routing, tokens, weights, max_recv_tokens
        )
        self.assertFalse(row_idx.requires_grad)
        self.assertEqual(row_idx[:3], idx.flip(0))
        return switch.combine(routing, rows * row_weights.sum(1, keepdim=True))

    def test_defaults_send_no_gradient_to_the_weights(self):
        tokens, weights, idx = self.operands()
        y = self.round_trip(BufferSwitch(), tokens, weights, idx, 5)
        self.assertEqual(y, tokens * weights.sum(1, keepdim=True))
        grad = torch.randn_like(y)
        y.backward(grad)
        self.assertEqual(tokens.grad, grad * weights.sum(1, keepdim=True))
        self.assertIsNone(weights.grad)

    def test_defaults_need_a_bound(self):
        switch = BufferSwitch()
        with self.assertRaisesRegex(ValueError, "max_recv_tokens is required"):
            self.round_trip(switch, *self.operands())

    def test_hooks_give_gradients_and_exact_sizes(self):
        tokens, weights, idx = self.operands()
        switch = ExactSwitch()
        routing = switch.create_routing(idx)
        self.assertEqual(switch.dispatch(routing, tokens, weights)[0].shape[0], 3)
        self.assertTrue(
            torch.autograd.gradcheck(
                lambda t, w: self.round_trip(switch, t, w, idx), (tokens, weights)
            )
        )

    def test_no_second_derivative(self):
        # A transport records no graph, so it would be a constant in a second derivative.
        tokens, weights, idx = self.operands()
        y = self.round_trip(ExactSwitch(), tokens, weights, idx)[0].square().sum()
        (grad,) = torch.autograd.grad(y, tokens, create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "differentiate twice"):
            grad.sum().backward()

    def test_gradients_are_only_computed_where_needed(self):
        tokens, weights, idx = self.operands()
        switch = ExactSwitch()
        self.round_trip(switch, tokens.detach(), weights, idx).sum().backward()
        self.assertEqual(weights.grad, tokens.sum(1, keepdim=True).expand(3, 2))
        self.round_trip(switch, tokens, weights.detach(), idx).sum().backward()
        want = weights.sum(1, keepdim=True).expand(3, 4)
        self.assertEqual(tokens.grad, want)


if __name__ == "__main__":
    run_tests()
