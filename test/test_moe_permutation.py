# Owner(s): ["module: nn"]

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_device_type import (
    instantiate_device_type_tests,
    onlyCPU,
)
from torch.testing._internal.common_moe import (
    all_cases,
    BACKENDS,
    call_composite,
    call_native,
    fill_uninitialized_memory,
    to_meta,
)
from torch.testing._internal.common_utils import parametrize, run_tests, TestCase
from torch.testing._internal.moe_generators import get_case, moe_cases, MoeCase
from torch.testing._internal.moe_reference import moe_permutation_reference


_moe_permutation = torch.ops.aten._moe_permutation.default

ids = torch.zeros(3, 2, dtype=torch.int64)

# name: indices, num_experts, keyword arguments, error, and the error's text after the op's name
ERRORS = {
    "float": (
        ids.float(),
        4,
        {},
        TypeError,
        "topk_indices must have dtype int32 or int64, got float32",
    ),
    "int16": (
        ids.short(),
        4,
        {},
        TypeError,
        "topk_indices must have dtype int32 or int64, got int16",
    ),
    "rank": (
        ids[0],
        4,
        {},
        ValueError,
        "topk_indices must have 2 dimensions (T, K), got shape (2)",
    ),
    "num_experts": (ids, 0, {}, ValueError, "num_experts must be in [1, 2**31), got 0"),
    "num_experts_large": (
        ids,
        2**31,
        {},
        ValueError,
        "num_experts must be in [1, 2**31), got 2147483648",
    ),
    "num_rows": (
        ids,
        4,
        {"num_rows": -1},
        ValueError,
        "num_rows must be in [0, 2**31), got -1",
    ),
    "num_rows_large": (
        ids,
        4,
        {"num_rows": 2**31},
        ValueError,
        "num_rows must be in [0, 2**31), got 2147483648",
    ),
    "row_alignment": (
        ids,
        4,
        {"row_alignment": 0},
        ValueError,
        "row_alignment must be in [1, 2**31), got 0",
    ),
    "default_rows_large": (
        ids,
        4,
        {"row_alignment": 2**30},
        ValueError,
        "the number of rows T*K + min(E, T*K) * (row_alignment - 1) must be less than"
        " 2**31, got 4294967298; pass num_rows",
    ),
    "slots": (
        ids[:1, :1].expand(2**16, 2**15),
        4,
        {},
        ValueError,
        "topk_indices must have fewer than 2**31 elements, got shape (65536, 32768)",
    ),
}


def tensors(result):
    return dict(zip(("row_slots", "slot_rows", "offs", "counts"), result, strict=True))


class TestMoePermutation(TestCase):
    def check(self, actual, expected):
        for name, tensor in tensors(actual).items():
            self.assertEqual(
                tensor.cpu(),
                getattr(expected, name),
                msg=lambda m, name=name: f"{name}: {m}",
            )
            self.assertTrue(tensor.is_contiguous())

    @parametrize("backend", list(BACKENDS))
    @parametrize("dtype", [torch.int32, torch.int64])
    @all_cases
    def test_reference(self, device, case, dtype, backend):
        indices = case.topk_indices(device).to(dtype)
        plan = {"num_rows": case.num_rows, "row_alignment": case.row_alignment}
        with fill_uninitialized_memory():
            actual = BACKENDS[backend](
                _moe_permutation, indices, case.num_experts, **plan
            )
        self.check(
            actual, moe_permutation_reference(indices.cpu(), case.num_experts, **plan)
        )

    @parametrize("backend", list(BACKENDS))
    def test_skewed(self, device, backend):
        case = MoeCase("all", 4471, num_experts=64, top_k=8, routing="skewed")
        indices = case.topk_indices(device)
        expected = moe_permutation_reference(indices.cpu(), 64, row_alignment=16)
        actual = BACKENDS[backend](_moe_permutation, indices, 64, row_alignment=16)
        self.check(actual, expected)

    @parametrize("backend", list(BACKENDS))
    def test_more_experts_than_slots(self, device, backend):
        indices = torch.tensor([[4999, 3], [0, 3], [5000, -1]], device=device)
        expected = moe_permutation_reference(indices.cpu(), 5000, row_alignment=8)
        actual = BACKENDS[backend](_moe_permutation, indices, 5000, row_alignment=8)
        self.check(actual, expected)

    @parametrize("backend", list(BACKENDS))
    def test_strides(self, device, backend):
        indices = torch.randint(-1, 6, (7, 10), device=device)
        views = (
            indices.T,
            indices[:, ::3],
            indices[:, :1].expand(7, 3),
            indices[::2, 1:4],
        )
        for view in views:
            actual = BACKENDS[backend](_moe_permutation, view, 5)
            self.check(actual, moe_permutation_reference(view.cpu(), 5))

    @onlyCPU
    @parametrize("name", list(ERRORS))
    def test_errors(self, device, name):
        indices, num_experts, kwargs, error, text = ERRORS[name]
        for call, topk_indices in (
            (call_native, indices),
            (call_composite, indices),
            (call_native, to_meta(indices)),
        ):
            with self.assertRaises(error) as raised:
                call(_moe_permutation, topk_indices, num_experts, **kwargs)
            self.assertEqual(str(raised.exception), f"_moe_permutation: {text}")

    @onlyCPU
    @parametrize("value", [-2, 5, 2**40, -(2**40)])
    def test_index_outside(self, device, value):
        # 2**40 truncates to 0 in int32, so the check must see the original value.
        indices = torch.tensor([[0, 1], [4, value], [7, 0]])
        for call in (call_native, call_composite):
            with self.assertRaises(IndexError) as raised:
                call(_moe_permutation, indices, 4)
            self.assertEqual(
                str(raised.exception),
                "_moe_permutation: topk_indices must be in [-1, 4] (-1 and num_experts mean"
                f" no expert), got {value} at [1, 1]",
            )

    def test_meta(self, device):
        for case in moe_cases():
            plan = {"num_rows": case.num_rows, "row_alignment": case.row_alignment}
            indices = case.topk_indices(device)
            actual = _moe_permutation(indices, case.num_experts, **plan)
            meta = _moe_permutation(to_meta(indices), case.num_experts, **plan)
            for a, m in zip(actual, meta, strict=True):
                self.assertEqual(
                    (a.shape, a.stride(), a.dtype), (m.shape, m.stride(), m.dtype)
                )
                self.assertEqual(m.device.type, "meta")

    @parametrize("row_alignment", [1, 8])
    def test_symbolic(self, device, row_alignment):
        # No size is specialised, so that one trace serves every T.
        def plan(indices):
            return _moe_permutation(indices, 4, row_alignment=row_alignment)

        traced = make_fx(plan, tracing_mode="symbolic")(
            get_case("uniform").topk_indices(device)
        )
        for T in (29, 2):
            indices = torch.randint(-1, 5, (T, 2), device=device)
            self.assertEqual(traced(indices), plan(indices))

    @parametrize("case_name", ["uniform", "aligned_tail", "no_tokens"])
    def test_opcheck(self, device, case_name):
        case = get_case(case_name)
        torch.library.opcheck(
            _moe_permutation,
            (case.topk_indices(device), case.num_experts),
            {"num_rows": case.num_rows, "row_alignment": case.row_alignment},
        )


instantiate_device_type_tests(TestMoePermutation, globals())

if __name__ == "__main__":
    run_tests()
