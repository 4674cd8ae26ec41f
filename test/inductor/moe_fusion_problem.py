"""Operands of the blocks that the tests of moe_fusion compile, and how these run."""

import torch


T, D, HIDDEN, E, K = 20, 32, 16, 6, 3


def make_inputs(dtype):
    """Tokens, expert ids and router weights."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, D, generator=generator)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    ids = torch.where(ids == 2, 3, ids)  # expert 2 is empty, 3 has a token twice
    weights = torch.rand(T, K, generator=generator)
    return x.to(dtype), ids, weights.to(dtype)


def run(fn, module, inputs, training):
    """Output, then with training the gradients of tokens, router weights and parameters."""
    x, ids, weights = inputs
    if not training:
        with torch.no_grad():
            return [fn(x, ids, weights)]
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = fn(x, ids, weights)
    grads = torch.autograd.grad(
        y,
        [x, weights, *module.parameters()],
        torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype),
        allow_unused=True,
        materialize_grads=True,
    )
    return [y, *grads]
