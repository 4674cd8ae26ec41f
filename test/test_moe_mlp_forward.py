# Owner(s): ["module: nn"]
"""_moe_mlp forward: values against the float64 reference, and every error of its validator."""

import dataclasses

import torch
from torch.testing._internal.common_device_type import (
    instantiate_device_type_tests,
    onlyCPU,
)
from torch.testing._internal.common_moe import (
    all_cases,
    all_dtypes,
    BACKENDS,
    backends_of,
    call_native,
    fill_uninitialized_memory,
    to_meta,
)
from torch.testing._internal.common_utils import (
    parametrize,
    run_tests,
    subtest,
    TestCase,
)
from torch.testing._internal.moe_generators import get_case
from torch.testing._internal.moe_reference import ACTIVATIONS, check_moe_mlp


_moe_mlp = torch.ops.aten._moe_mlp.default


def bad(name, error, text, /, **changes):
    return subtest((error, text, changes), name=name)


f32 = torch.float32
ERRORS = [
    bad(
        "input_dtype",
        TypeError,
        "input must have dtype float64, float32, bfloat16 or float16, got int64",
        input=torch.zeros(13, 16, dtype=torch.int64),
    ),
    bad(
        "w_in_dtype",
        TypeError,
        "w_in must have the dtype of input, float32, got bfloat16",
        w_in=torch.zeros(4, 48, 16, dtype=torch.bfloat16),
    ),
    bad(
        "b_out_dtype",
        TypeError,
        "b_out must have the dtype of input, float32, got float64",
        b_out=torch.zeros(4, 16, dtype=torch.float64),
    ),
    bad(
        "topk_weights_dtype",
        TypeError,
        "topk_weights must have dtype float32 or the dtype of input, float32, got float64",
        topk_weights=torch.zeros(13, 2, dtype=torch.float64),
    ),
    bad(
        "offs_dtype",
        TypeError,
        "offs must have dtype int32, got int64",
        offs=torch.zeros(4, dtype=torch.int64),
    ),
    bad(
        "input_rank",
        ValueError,
        "input must have 2 dimensions (T, D), got shape (13)",
        input=torch.zeros(13),
    ),
    bad(
        "input_shape",
        ValueError,
        "input must have shape (T, D) = (13, 16), got (13, 15)",
        input=torch.zeros(13, 15),
    ),
    bad(
        "w_in_shape",
        ValueError,
        "w_in must have shape (E, 2*F, D) = (4, 48, 16), got (4, 47, 16)",
        w_in=torch.zeros(4, 47, 16),
    ),
    bad(
        "w_in_plain",
        ValueError,
        "w_in must have shape (E, F, D) = (4, 24, 16), got (4, 48, 16)",
        activation="silu",
    ),
    bad(
        "w_out_shape",
        ValueError,
        "w_out must have shape (E, D, F) = (4, 16, 24), got (4, 15, 24)",
        w_out=torch.zeros(4, 15, 24),
    ),
    bad(
        "offs_shape",
        ValueError,
        "offs must have shape (E) = (4), got (5)",
        offs=torch.zeros(5, dtype=torch.int32),
    ),
    bad(
        "topk_weights_shape",
        ValueError,
        "topk_weights must have shape (T, K) = (13, 2), got (13, 3)",
        topk_weights=torch.zeros(13, 3),
    ),
    bad(
        "slot_rows_shape",
        ValueError,
        "slot_rows must have shape (T, K) = (13, 2), got (12, 2)",
        slot_rows=torch.zeros(12, 2, dtype=torch.int32),
    ),
    bad(
        "b_in_shape",
        ValueError,
        "b_in must have shape (E, 2*F) = (4, 48), got (4, 24)",
        b_in=torch.zeros(4, 24),
    ),
    bad(
        "only_row_slots",
        ValueError,
        "row_slots and slot_rows must be given together, got only row_slots",
        slot_rows=None,
    ),
    bad(
        "activation",
        ValueError,
        f"activation must be one of {', '.join(ACTIVATIONS)}, got 'mish'",
        activation="mish",
    ),
    bad(
        "gate_interleaved",
        ValueError,
        "gate_interleaved=True needs an activation with a gate, got 'relu'",
        activation="relu",
        gate_interleaved=True,
    ),
    bad(
        "alpha",
        ValueError,
        "alpha is an argument of activation 'swiglu_oai' only, got alpha=1.5 with 'swiglu'",
        alpha=1.5,
    ),
    bad(
        "alpha_nan",
        ValueError,
        "alpha must be a number, got nan",
        activation="swiglu_oai",
        alpha=float("nan"),
    ),
    bad(
        "limit",
        ValueError,
        "limit must be > 0, got -7",
        activation="swiglu_oai",
        limit=-7.0,
    ),
    bad(
        "limit_of_reglu",
        ValueError,
        "limit is an argument of activations swiglu, geglu, swiglu_oai only, got limit=7 "
        "with 'reglu'",
        activation="reglu",
        limit=7.0,
    ),
    bad(
        "w_up_dtype",
        TypeError,
        "w_up must have the dtype of input, float32, got bfloat16",
        w_in=torch.zeros(4, 24, 16),
        w_up=torch.zeros(4, 24, 16, dtype=torch.bfloat16),
    ),
    bad(
        "w_up_shape",
        ValueError,
        "w_up must have shape (E, F, D) = (4, 24, 16), got (4, 16, 24)",
        w_in=torch.zeros(4, 24, 16),
        w_up=torch.zeros(4, 16, 24),
    ),
    bad(
        "w_up_and_both_halves",
        ValueError,
        "w_in must have shape (E, F, D), the gate next to w_up, = (4, 24, 16), got (4, 48, 16)",
        w_up=torch.zeros(4, 24, 16),
    ),
    bad(
        "w_up_plain",
        ValueError,
        "w_up needs an activation with a gate, got 'silu'",
        w_up=torch.zeros(4, 24, 16),
        activation="silu",
    ),
    bad(
        "w_up_interleaved",
        ValueError,
        "gate_interleaved=True needs gate and up in one tensor, got w_up",
        w_up=torch.zeros(4, 24, 16),
        gate_interleaved=True,
    ),
]

# Errors that depend on values, which only the CPU checks. R = 26, offs = [6, 15, 19, 26].
OFFS_ERRORS = [
    subtest(((2,), 14, r"offs must .*got 14"), name="offs_decreasing"),
    subtest(((3,), 27, r"offs must .*got 27"), name="offs_beyond"),
    subtest(((0,), -1, r"offs must .*got -1"), name="offs_negative"),
]


class TestMoeMlpForward(TestCase):
    @parametrize("backend", backends_of(_moe_mlp))
    @all_dtypes
    @all_cases
    def test_inference(self, device, case, dtype, backend):
        ops = case.operands(dtype, device, bias=True)
        for separate_up in (False, True):
            args = (ops.split_gate() if separate_up else ops).args()
            with fill_uninitialized_memory():
                output, preact = BACKENDS[backend](
                    _moe_mlp, *args, compute_preact=False
                )
            self.assertEqual(preact.shape[0], 0)
            check_moe_mlp((output,), args)

    @parametrize("error,text,changes", ERRORS)
    def test_same_text(self, device, error, text, changes):
        ops = get_case("uniform").operands(f32, device, bias=True)
        names = [f.name for f in dataclasses.fields(ops)][:10]
        tensors = dict(zip(names, ops.args(), strict=True))
        for name in tensors:
            if name in changes:
                change = changes[name]
                tensors[name] = None if change is None else change.to(device)
        kwargs = {k: v for k, v in changes.items() if k not in tensors}
        args = tuple(tensors.values())
        calls = [(BACKENDS[name], args) for name in backends_of(_moe_mlp)]
        for call, operands in (*calls, (call_native, to_meta(args))):
            with self.assertRaises(error) as raised:
                call(_moe_mlp, *operands, **kwargs)
            self.assertEqual(str(raised.exception), f"_moe_mlp: {text}")

    def test_devices(self, device):
        ops = get_case("uniform").operands(f32, device)
        args = list(ops.args())
        args[2] = args[2].to("meta")
        text = f"_moe_mlp: all tensors must be on one device, got input on {ops.input.device}"
        for backend in backends_of(_moe_mlp):
            with self.assertRaises(RuntimeError) as raised:
                BACKENDS[backend](_moe_mlp, *args)
            self.assertEqual(str(raised.exception), f"{text} and w_out on meta")

    @onlyCPU
    @parametrize("backend", backends_of(_moe_mlp))
    @parametrize("where,value,text", OFFS_ERRORS)
    def test_offs(self, device, where, value, text, backend):
        ops = get_case("uniform").operands(f32, device)
        offs = ops.offs.clone()
        offs[where] = value
        args = dataclasses.replace(ops, offs=offs).args()
        with self.assertRaisesRegex(ValueError, f"_moe_mlp: .*{text}"):
            BACKENDS[backend](_moe_mlp, *args)


instantiate_device_type_tests(TestMoeMlpForward, globals())

if __name__ == "__main__":
    run_tests()
