# Owner(s): ["module: nn"]

"""Invalid arguments of _moe_mlp_scaled and its backward give the same error in every kernel.

Each argument is replaced by everything that it could be confused with. The CPU, composite and Meta
kernels must then agree on whether this is an error, and on its type and text.
"""

import torch
from torch.testing._internal.common_moe import BACKENDS, to_meta, with_backward
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_generators import MoeCase
from torch.testing._internal.moe_quantized_reference import CODES, SQUARE


op, backward_op = with_backward("_moe_mlp_scaled")
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
OPERANDS = (
    "input w_in w_out offs topk_weights row_slots slot_rows b_in b_out w_up"
    " input_scaled w_in_scaled w_out_scaled w_up_scaled"
).split()
SAVED = "input_data input_scale preact preact_scale".split()
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.float8_e5m2,
    E4M3,
    E8M0,
    torch.float4_e2m1fn_x2,
    torch.bool,
)
KEYWORDS = {
    "recipe_a": ([1, 2], [0], [2], [9], [-1], [SQUARE]),
    "recipe_w": ([], [0], [2], [7], [1, 1]),
    "swizzle_w": ([1], [2], [3], [0, 0], [-1]),
    "preact_dtype": (torch.float64, torch.int32, torch.float8_e5m2),
    "activation": ("x", "relu2"),
    "alpha": (2.0, float("nan")),
    "limit": (-1.0, float("nan")),
}


def calls(recipe, with_lists, gated_apart, swizzle=0):
    """Valid (op, names of its arguments, arguments, keywords) of a forward and its backward."""
    ops = MoeCase("e", num_tokens=6, dim=64, hidden=32, num_experts=3).operands(
        torch.bfloat16, bias=True
    )
    ops = ops.split_gate() if gated_apart else ops
    a, w = CODES[recipe]
    lists: list[list[torch.Tensor]] = [[], [], [], []]
    if with_lists:
        lists[0] += torch._moe_quantize(ops.input, a)
        for to, weight in zip(lists[1:], (ops.w_in, ops.w_out, ops.w_up), strict=True):
            for dim in () if weight is None else (2,) if w == SQUARE else (2, 1):
                to += torch._moe_quantize(weight, w, dim=dim, swizzle=swizzle)
    args = [*ops.args(), *lists]
    kwargs = {"recipe_a": [a], "recipe_w": [w], "preact_dtype": E4M3}
    kwargs["swizzle_w"] = [swizzle]
    _, *saved = op(*args, **kwargs)
    mask = [args[i] is not None for i in (0, 1, 2, 4, 7, 8, 9)]
    yield op, OPERANDS, args, kwargs
    backward_args = [ops.grad_out, *args[1:], *saved, mask]
    yield backward_op, ["grad_out", *OPERANDS[1:], *SAVED], backward_args, kwargs


def others(x):
    """Tensors, or lists of them, that x could be confused with."""
    if x is None:
        yield torch.zeros(3, 4, 5)
    elif isinstance(x, list):
        yield from ([], x[:-1], [*x, torch.zeros(1)], [torch.zeros(1)] * 5)
        for i, one in enumerate(x):
            yield from ([*x[:i], other, *x[i + 1 :]] for other in others(one))
    else:
        yield from (x.new_empty(()), x.new_empty([0] * x.dim()), x.unsqueeze(0))
        yield from (x.narrow(d, 0, x.shape[d] // 2) for d in range(x.dim()))
        for d in range(x.dim()):
            longer = list(x.shape)
            longer[d] += 1
            yield x.new_empty(longer)
        yield from (torch.empty(x.shape, dtype=d) for d in DTYPES if d != x.dtype)
        if x.dtype == torch.bfloat16:
            yield x.to_sparse()


def described(x):
    if isinstance(x, list):
        return [described(one) for one in x]
    return x.dtype, tuple(x.shape), x.layout


def outcome(f, args, kwargs):
    try:
        f(*args, **kwargs)
    except Exception as e:
        return type(e), str(e).splitlines()[0]
    return None


class TestScaledErrors(TestCase):
    def assert_agreement(self, op, what, args, kwargs):
        """The outcome on every kernel: None, or the type and the text of the error."""
        found = [outcome(b, (op, *args), kwargs) for b in BACKENDS.values()]
        found.append(outcome(op, to_meta(args), to_meta(kwargs)))
        self.assertEqual(found, found[-1:] * len(found), msg=f"{op}: {what}")
        if found[0] is not None:
            name = op.name().removeprefix("aten::")
            self.assertTrue(found[0][1].startswith(f"{name}: "), f"{what}: {found[0]}")
        return found[0]

    @parametrize(
        "recipe,with_lists,gated_apart,swizzle",
        [
            ("mxfp8", True, True, 0),
            ("mxfp8", True, False, 1),
            ("fp8_blockwise", True, False, 0),
            ("fp8_rowwise", False, False, 0),
        ],
    )
    def test_each_argument(self, recipe, with_lists, gated_apart, swizzle):
        errors = 0
        for f, names, args, kwargs in calls(recipe, with_lists, gated_apart, swizzle):
            self.assertIsNone(self.assert_agreement(f, "as it is", args, kwargs))
            for i, name in enumerate(names):
                for other in others(args[i]):
                    # row_slots defines the number of rows, and only the CPU compares it with offs.
                    is_shorter = name == "row_slots" and other.shape != args[i].shape
                    if is_shorter and other.dim() == 1:
                        continue
                    what = f"{name}: {described(other)}"
                    changed = [*args[:i], other, *args[i + 1 :]]
                    found = self.assert_agreement(f, what, changed, kwargs)
                    errors += found is not None
            for key, values in KEYWORDS.items():
                for value in values:
                    what, changed = f"{key}={value}", {**kwargs, key: value}
                    errors += self.assert_agreement(f, what, args, changed) is not None
        self.assertGreater(errors, 300)

    @parametrize("backend", list(BACKENDS))
    def test_values_of_offs(self, backend):
        for f, names, args, kwargs in calls("mxfp8", True, False):
            name = f.name().removeprefix("aten::")
            for i, value in ((0, 1000), (1, -1)):
                offs = args[names.index("offs")].clone()
                offs[i] = value
                changed = [offs if n == "offs" else x for n, x in zip(names, args)]
                with self.assertRaisesRegex(
                    ValueError,
                    f"{name}: offs must be non-decreasing .*, got {value} at",
                ):
                    BACKENDS[backend](f, *changed, *args[len(names) :], **kwargs)

    @parametrize(
        "name,value,error,text",
        [
            (
                "w_in",
                torch.zeros(()),
                ValueError,
                r"w_in must have 3 dimensions \(E, 2\*F, D\), got shape \(\)",
            ),
            ("b_in", torch.zeros(()), ValueError, r"b_in must have shape .*, got \(\)"),
            (
                "input_scaled",
                [torch.zeros(1)],
                ValueError,
                r"input_scaled must be \[\] or \[data, scale\], got 1 tensors",
            ),
            (
                "w_in_scaled",
                [torch.zeros(1)],
                ValueError,
                r"w_in_scaled must be \[\], \[data, scale\] or \[data, scale, data_t, scale_t\], got 1",
            ),
            (
                "preact",
                torch.zeros((), dtype=E4M3),
                ValueError,
                r"preact must have 2 dimensions \(R, G\*F\), got shape \(\)",
            ),
            (
                "preact",
                torch.zeros(12, 64),
                TypeError,
                "preact must have dtype float8_e4m3fn, got float32",
            ),
            (
                "preact_scale",
                torch.zeros(12, 2),
                TypeError,
                "preact_scale must have dtype float8_e8m0fnu, got float32",
            ),
            (
                "input_data",
                torch.zeros(6, 64, dtype=torch.int8),
                TypeError,
                "input_data must have dtype float8_e4m3fn, got int8",
            ),
        ],
    )
    def test_text(self, name, value, error, text):
        for f, names, args, kwargs in calls("mxfp8", False, False):
            if name in names:
                changed = [value if n == name else a for n, a in zip(names, args)]
                changed += args[len(names) :]
                found = self.assert_agreement(f, name, changed, kwargs)
                self.assertEqual(found[0], error)
                self.assertRegex(found[1], text)

    def test_text_of_recipes(self):
        forward, backward = calls("mxfp8", False, False)
        f, _, args, kwargs = backward
        found = self.assert_agreement(f, "recipe_a", args, {**kwargs, "recipe_a": []})
        text = r"gradients of w_in .* compute_preact=False, need recipe_a, got recipe_a \[\]"
        self.assertRegex(found[1], text)
        f, _, args, kwargs = forward
        tensorwise = {"recipe_a": [], "recipe_w": [0], "swizzle_w": []}
        found = self.assert_agreement(f, "recipe_w", args, {**kwargs, **tensorwise})
        self.assertRegex(found[1], "TensorWise, which needs quantised weights")

    @parametrize("name", ["input", "w_in", "offs", "preact", "preact_scale"])
    def test_other_device(self, name):
        for f, names, args, kwargs in calls("mxfp8", False, False):
            if name in names:
                i = names.index(name)
                changed = [*args[:i], args[i].to("meta"), *args[i + 1 :]]
                found = [outcome(b, (f, *changed), kwargs) for b in BACKENDS.values()]
                self.assertEqual(found[0], found[1])
                self.assertRegex(found[0][1], "all tensors must be on one device, got")


instantiate_parametrized_tests(TestScaledErrors)

if __name__ == "__main__":
    run_tests()
