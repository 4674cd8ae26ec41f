# Owner(s): ["module: meta tensors"]
"""_scaled_grouped_mm_v2 on meta and fake tensors gives the results and errors of the CPU kernel."""

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


M, K, N, G = 64, 128, 96, 3
FP8 = torch.float8_e4m3fn
ROWS, MX = ScalingType.RowWise.value, ScalingType.BlockWise1x32.value


def fp8(*sizes):
    return torch.randn(*sizes).to(FP8)


def ends(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def weights(n=N, k=K):
    return fp8(G, n, k).transpose(1, 2)


def arguments(**change):
    """Arguments of a RowWise call: rows times a stack."""
    call = {
        "self": fp8(M, K), "mat2": weights(),
        "scale_a": [torch.ones(M)], "recipe_a": [ROWS], "swizzle_a": [0],
        "scale_b": [torch.ones(G, N)], "recipe_b": [ROWS], "swizzle_b": [0],
        "offs": ends(10, 10, M),
    }  # fmt: skip
    return {**call, **change}


def depth(**change):
    """Arguments of a call that sums over rows: (M, 64) times (64, N) in groups."""
    return arguments(
        self=fp8(M, 64), mat2=fp8(N, 64).t(), scale_a=[torch.ones(G * M)],
        scale_b=[torch.ones(G * N)], offs=ends(16, 16, 64), **change,
    )  # fmt: skip


def mx():
    bytes_of = lambda *n: torch.full(n, 127, dtype=torch.uint8).view(
        torch.float8_e8m0fnu
    )  # noqa: E731
    return arguments(
        scale_a=[bytes_of(M, K // 32)], recipe_a=[MX],
        scale_b=[bytes_of(G, N, K // 32)], recipe_b=[MX],
    )  # fmt: skip


def result(call, convert=lambda t: t):
    """Size, strides and dtype of the result, or type and first line of the error."""

    def converted(x):
        if isinstance(x, list):
            return [converted(t) for t in x]
        return convert(x) if isinstance(x, torch.Tensor) else x

    try:
        out = torch.ops.aten._scaled_grouped_mm_v2(
            **{k: converted(v) for k, v in call.items()}
        )
    except (ValueError, TypeError, RuntimeError) as e:
        return type(e).__name__, str(e).split("\n", 1)[0]
    return tuple(out.shape), out.stride(), out.dtype


def meta(t):
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


# The part of the error that running and tracing share, or None for no error.
CALLS = {
    "rows": (arguments, None),
    "depth": (depth, None),
    "mx": (mx, None),
    "bfloat16": (lambda: arguments(out_dtype=torch.bfloat16), None),
    "bias": (lambda: arguments(bias=torch.ones(N)), "Bias not supported yet"),
    "bias of groups": (lambda: arguments(bias=torch.ones(G, N)), "Bias not supported yet"),
    "float32": (lambda: arguments(out_dtype=torch.float32), "Only bf16 high precision"),
    "int32": (lambda: depth(out_dtype=torch.int32), "Only bf16 high precision"),
    "bias before dtype": (
        lambda: arguments(bias=torch.ones(N), out_dtype=torch.float32), "Bias not supported"),
    "bias before offs": (lambda: arguments(bias=torch.ones(N), offs=None), "Bias not supported"),
    "no offs": (lambda: arguments(offs=None), "Have to provide offsets"),
    "offs of stacks": (lambda: arguments(self=fp8(G, M, K)), "Have to provide offsets"),
    "2D offs": (lambda: arguments(offs=ends(10, 10, M)[None]), "offs has to be 1D"),
    "int64 offs": (lambda: arguments(offs=ends(9, 9, M, dtype=torch.int64)), "Offsets have to be int32"),
    "fewer offs": (lambda: arguments(offs=ends(10, M)), "matrix batch sizes have to match"),
    "dtype before groups": (
        lambda: arguments(offs=ends(10, M), out_dtype=torch.float32), "Only bf16 high precision"),
    "depth differs": (lambda: arguments(mat2=weights(k=K + 16)), "contraction dimension of mat_a and"),
    "1D": (lambda: arguments(self=fp8(K)), "mat_a has to be 2 or 3d"),
    "1D weight": (lambda: arguments(mat2=fp8(K)), "mat_b has to be 2 or 3d"),
    "short depth": (
        lambda: arguments(self=fp8(M, 8), mat2=weights(k=8)),
        "Expected trailing dimension of mat_a to be divisible by 16 but got mat1 shape: ([64, 8])."),
    "few columns": (
        lambda: arguments(mat2=weights(n=8), scale_b=[torch.ones(G, 8)]),
        "Expected mat_b shape to be divisible by 16 but got mat_b shape: ([3, 128, 8])."),
}  # fmt: skip


class TestScaledGroupedMMMeta(TestCase):
    @parametrize("name", list(CALLS))
    def test_agrees_with_cpu(self, name):
        make, words = CALLS[name]
        call = make()
        want = result(call)
        self.assertEqual(result(call, meta), want)
        with FakeTensorMode() as mode:
            self.assertEqual(result(call, mode.from_tensor), want)
        if words is None:
            self.assertEqual(want[2], torch.bfloat16)
        else:
            self.assertIn(words, want[1])

    @parametrize("dynamic", [False, True])
    def test_compile(self, dynamic):
        def rows(a, b, sa, sb, offs, out_dtype):
            return F.scaled_grouped_mm(
                a, b, sa, ScalingType.RowWise, sb, ScalingType.RowWise,
                offs=offs, output_dtype=out_dtype,
            )  # fmt: skip

        compiled = torch.compile(rows, fullgraph=True, dynamic=dynamic)
        for m in (M, M + 7):
            a = fp8(m, K)
            call = (a, weights(), torch.ones(m), torch.ones(G, N), ends(1, 9, m))
            self.assertEqual(
                compiled(*call, torch.bfloat16), rows(*call, torch.bfloat16)
            )
        with self.assertRaisesRegex(Exception, "Only bf16 high precision"):
            compiled(*call, torch.float32)


instantiate_parametrized_tests(TestScaledGroupedMMMeta)

if __name__ == "__main__":
    run_tests()
