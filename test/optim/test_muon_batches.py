# Owner(s): ["module: optimizer"]
"""torch.optim.Muon on parameters (..., A, B): every matrix as if it were a parameter of its own."""

import torch
from torch.optim import Muon
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


def train(params, grads, **options):
    """Steps on ``grads``, a list with a gradient of each parameter for each step."""
    optimizer = Muon(params, lr=1.0, **options)
    for of_step in grads:
        for p, grad in zip(params, of_step, strict=True):
            p.grad = grad
        optimizer.step()
    return optimizer


class TestMuonBatches(TestCase):
    @parametrize(
        "shape", ((5, 16, 24), (5, 24, 16), (2, 3, 16, 16), (1, 8, 4), (0, 4, 8))
    )
    @parametrize("adjust_lr_fn", ("original", "match_rms_adamw", "spectral_unclamped"))
    @parametrize("nesterov", (False, True))
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_is_a_loop_over_matrices(self, shape, adjust_lr_fn, nesterov, dtype):
        options = {"adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
        start = torch.randn(shape, dtype=dtype)
        # Each has another scale, so a norm over all of them would show.
        scale = 10.0 ** torch.arange(-3, -3 + start[..., :1, :1].numel())
        scale = scale.view(*shape[:-2], 1, 1)
        grads = [(torch.randn(shape) * scale).to(dtype) for _ in range(3)]
        batch = start.clone().requires_grad_()
        optimizer = train([batch], [[g] for g in grads], **options)
        flat = start.flatten(0, -3)
        alone = [w.clone().requires_grad_() for w in flat]
        if alone:
            each = train(alone, [list(g.flatten(0, -3)) for g in grads], **options)
        # The products are of bfloat16, and in another order.
        tolerance = {"atol": 0.03, "rtol": 0.03}
        for i, w in enumerate(alone):
            self.assertEqual(batch.detach().flatten(0, -3)[i], w.detach(), **tolerance)
            self.assertEqual(
                optimizer.state[batch]["momentum_buffer"].flatten(0, -3)[i],
                each.state[w]["momentum_buffer"],
                rtol=0,
                atol=0,
            )

    def test_update_is_orthogonal(self):
        w = torch.zeros(6, 12, 20, requires_grad=True)
        w.grad = torch.randn(6, 12, 20) * torch.logspace(-4, 4, 6).view(6, 1, 1)
        Muon([w], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
        values = torch.linalg.svdvals(w.detach())
        self.assertTrue(((values > 0.5) & (values < 1.5)).all(), values)

    def test_strides(self):
        """Experts whose rows are columns in memory, as gpt-oss stores them."""
        found = []
        grad = torch.randn(3, 8, 12)
        for copy in (lambda t: t.clone(), lambda t: t.mT.contiguous().mT):
            w = copy(torch.ones(3, 8, 12)).requires_grad_()
            train([w], [[copy(grad)]])
            found.append(w.detach())
        self.assertEqual(found[0], found[1], atol=0.02, rtol=0.02)

    def test_a_matrix_is_updated_as_before(self):
        for shape in ((12, 20), (20, 12)):
            grad = torch.randn(shape)
            g = grad.to(torch.bfloat16, copy=True)
            g = g.T if shape[0] > shape[1] else g
            g.div_(g.norm().clamp(min=1e-7))
            for _ in range(5):
                gram = g @ g.T
                update = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
                g = torch.addmm(g, update, g, beta=3.4445)
            g = g.T if shape[0] > shape[1] else g
            w = torch.zeros(shape, requires_grad=True)
            w.grad = grad
            options = {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
            Muon([w], lr=1.0, adjust_lr_fn="match_rms_adamw", **options).step()
            expected = torch.zeros(shape).add_(g, alpha=-0.2 * max(shape) ** 0.5)
            self.assertEqual(w.detach(), expected, rtol=0, atol=0)

    def test_vectors_are_refused(self):
        for shape in ((), (3,)):
            with self.assertRaisesRegex(
                ValueError, "parameters of 2 or more dimensions"
            ):
                Muon([torch.zeros(shape, requires_grad=True)])


instantiate_parametrized_tests(TestMuonBatches)

if __name__ == "__main__":
    run_tests()
