# Owner(s): ["module: nn"]
"""The backward of grouped_mm with gradients whose strides its kernels reject.

On CUDA, the backward copies every kind of gradient but the contiguous one with aligned rows. Where
the CPU kernel accepts any strides, these cases also pass without the copy, and show that it
changes no value.
"""

import torch
import torch.nn.functional as F
from torch.testing._internal.common_cuda import SM80OrLater
from torch.testing._internal.common_device_type import (
    instantiate_device_type_tests,
    onlyOn,
    skipCUDAIf,
)
from torch.testing._internal.common_utils import parametrize, run_tests, TestCase


G, M, K = 4, 64, 32


LAYOUTS = ("2d_3d", "3d_3d", "2d_2d", "3d_2d")


def shapes(layout, n):
    return {
        "2d_3d": ((M, K), (G, K, n)),
        "3d_3d": ((G, M, K), (G, K, n)),
        "2d_2d": ((K, M), (M, n)),
        "3d_2d": ((G, n, K), (K, M)),
    }[layout]


def batched(layout, a, b):
    """grouped_mm as one batched matmul, as all groups have the same size."""
    groups = (G, M // G)
    if layout == "2d_3d":
        return (a.unflatten(0, groups) @ b).flatten(0, 1)
    if layout == "2d_2d":
        return a.unflatten(1, groups).transpose(0, 1) @ b.unflatten(0, groups)
    if layout == "3d_2d":
        product = a @ b.unflatten(1, groups).transpose(0, 1)
        return product.transpose(0, 1).flatten(1)
    return a @ b


def gradient(kind, out):
    if kind == "expanded":
        return torch.ones((), dtype=out.dtype, device=out.device).expand(out.shape)
    if kind == "expanded_rows":
        return torch.randn_like(out[..., :1, :]).expand(out.shape)
    if kind == "narrowed":  # unaligned, as from the backward of cat()
        size = (*out.shape[:-1], out.shape[-1] + 3)
        wide = torch.randn(size, dtype=out.dtype, device=out.device)
        return wide[..., 3:]
    if kind == "contiguous":
        return torch.randn(out.shape, dtype=out.dtype, device=out.device)
    wide = torch.randn(*out.shape, 2, dtype=out.dtype, device=out.device)
    return wide[..., 0]  # every other element


class TestGroupedMMGradient(TestCase):
    @onlyOn(["cpu", "cuda"])
    @skipCUDAIf(not SM80OrLater, "Grouped gemm supported only on SM80 or greater")
    @parametrize("layout", LAYOUTS)
    @parametrize(
        "kind", ("contiguous", "expanded", "expanded_rows", "every_other", "narrowed")
    )
    @parametrize("n", (48, 10))
    def test_strides(self, device, layout, kind, n):
        torch.manual_seed(0)
        leaves = []
        for shape in shapes(layout, n):
            leaf = torch.randn(shape, dtype=torch.bfloat16, device=device)
            if shape[-1] == n:  # rows of n elements may not be a multiple of 16 bytes
                leaf = leaf.transpose(-2, -1).contiguous().transpose(-2, -1)
            leaves.append(leaf.requires_grad_())
        offs = None
        if layout != "3d_3d":
            ends = range(M // G, M + 1, M // G)
            offs = torch.tensor(ends, dtype=torch.int32, device=device)
        out = F.grouped_mm(*leaves, offs=offs)
        grad = gradient(kind, out)
        actual = torch.autograd.grad(out, leaves, grad)
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        expected = torch.autograd.grad(batched(layout, *wide), wide, grad.double())
        for got, want in zip(actual, expected):
            self.assertEqual(got.double(), want, atol=0.05, rtol=0.02)


instantiate_device_type_tests(TestGroupedMMGradient, globals())

if __name__ == "__main__":
    run_tests()
