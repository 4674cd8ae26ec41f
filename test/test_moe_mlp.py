# Owner(s): ["module: nn"]

import dataclasses

import torch
from torch.testing._internal.common_device_type import (
    instantiate_device_type_tests,
    onlyCPU,
)
from torch.testing._internal.common_moe import (
    ACTIVATION_FORMS,
    all_activations,
    all_cases,
    all_dtypes,
    BACKENDS,
    backends_of,
    call_native,
    fill_uninitialized_memory,
    nbytes,
    num_threads,
    saved_bytes_bound,
    saved_for_backward,
    to_meta,
    with_backward,
)
from torch.testing._internal.common_utils import (
    parametrize,
    run_tests,
    subtest,
    TestCase,
)
from torch.testing._internal.moe_generators import (
    extreme_gates,
    get_case,
    MoeCase,
    one_token_with_preact,
)
from torch.testing._internal.moe_reference import (
    check_moe_mlp,
    check_moe_mlp_backward,
    GATED_ACTIVATIONS,
    moe_mlp_backward_reference,
    moe_mlp_reference,
    MoeMlpGrads,
)


_moe_mlp, _moe_mlp_backward = with_backward("_moe_mlp")

all_backends = parametrize("backend", backends_of(_moe_mlp))


def run_backward(backend, ops, preact, mask=None, **kwargs):
    if mask is None:
        mask = [x is not None for x in ops.differentiable()]
    grads = BACKENDS[backend](
        _moe_mlp_backward, ops.grad_out, *ops.args(), preact, mask, **kwargs
    )
    return MoeMlpGrads(*grads)


def with_integer_preacts(ops):
    """Pre-activations that are small integers, so that any dtype and any order of summation
    gives them exactly, and many of them are the limit of an activation."""

    def whole(x):
        return None if x is None else x.detach().mul(2).round().clamp(-2, 2)

    return dataclasses.replace(
        ops,
        input=whole(ops.input),
        w_in=whole(ops.w_in),
        b_in=whole(ops.b_in),
        w_up=whole(ops.w_up),
    )


def strided_operands(ops):
    """The same values in other memory layouts, none of them contiguous."""

    def gaps(x):
        return torch.stack([x, torch.zeros_like(x)], dim=-1)[..., 0]

    def column_major(x):
        return x.mT.contiguous().mT

    return dataclasses.replace(
        ops,
        input=gaps(ops.input),
        w_in=column_major(ops.w_in),
        w_out=column_major(ops.w_out),
        offs=gaps(ops.offs),
        topk_weights=column_major(ops.topk_weights),
        row_slots=gaps(ops.row_slots),
        slot_rows=column_major(ops.slot_rows),
        b_in=gaps(ops.b_in),
        b_out=column_major(ops.b_out),
        w_up=None if ops.w_up is None else gaps(ops.w_up).mT.contiguous().mT,
        grad_out=column_major(ops.grad_out),
    )


class TestMoeMlp(TestCase):
    def check_forward(self, ops, backend="native", **kwargs):
        with fill_uninitialized_memory():
            output, preact = BACKENDS[backend](_moe_mlp, *ops.args(), **kwargs)
        for result in (output, preact):
            self.assertEqual(result.dtype, ops.input.dtype)
            self.assertTrue(result.is_contiguous())
        check_moe_mlp((output, preact), ops.args(), **kwargs)
        return output, preact

    def check_backward(self, ops, preact, backend="native", **kwargs):
        with fill_uninitialized_memory():
            grads = run_backward(backend, ops, preact, **kwargs)
        for operand, grad in zip(ops.differentiable(), grads, strict=True):
            if operand is not None:
                self.assertEqual(grad.dtype, operand.dtype)
        check_moe_mlp_backward(grads, ops.grad_out, ops.args(), **kwargs)
        return grads

    @all_backends
    @all_dtypes
    @all_cases
    def test_reference(self, device, case, dtype, backend):
        ops = case.operands(dtype, device, bias=True)
        output, preact = self.check_forward(ops, backend)
        self.assertEqual(preact[ops.row_slots < 0].count_nonzero(), 0)
        homeless = (ops.slot_rows < 0).all(dim=1)
        self.assertEqual(output[homeless].count_nonzero(), 0)
        self.check_backward(ops, preact, backend)

    @all_backends
    @parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
    @parametrize("routing", ["uniform", "sentinels"])
    def test_more_rows_than_are_activated_at_a_time(
        self, device, routing, dtype, backend
    ):
        case = MoeCase("parts", num_tokens=300, hidden=512, routing=routing)
        ops = case.operands(dtype, device, bias=True)
        with num_threads(1):
            _, preact = self.check_forward(ops, backend)
            self.check_backward(ops, preact, backend)

    @all_backends
    @parametrize("dtype", [torch.float32, torch.bfloat16])
    @all_activations
    def test_activation(self, device, activation, gate_interleaved, dtype, backend):
        ops = get_case("sentinels").operands(dtype, device, activation=activation)
        kwargs = {"activation": activation, "gate_interleaved": gate_interleaved}
        if activation == "swiglu_oai":
            kwargs.update(alpha=1.25)
        _, preact = self.check_forward(ops, backend, **kwargs)
        self.check_backward(ops, preact, backend, **kwargs)

    @all_backends
    @parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    @parametrize("form", ["halves", "interleaved", "separate"])
    @parametrize("activation", ["swiglu", "geglu", "swiglu_oai"])
    def test_limit(self, device, activation, form, dtype, backend):
        ops = get_case("sentinels").operands(dtype, device, bias=True)
        ops = with_integer_preacts(ops.split_gate() if form == "separate" else ops)
        kwargs = {"activation": activation, "limit": 3.0}
        if form == "interleaved":
            kwargs["gate_interleaved"] = True
        _, preact = self.check_forward(ops, backend, **kwargs)
        for value in (-3, 3):
            self.assertGreater(preact.eq(value).sum(), 10)
        self.assertGreater(preact.abs().gt(3).sum(), 10)
        self.check_backward(ops, preact, backend, **kwargs)

    @all_backends
    def test_limit_of_swiglu_oai_is_7(self, device, backend):
        ops = get_case("sentinels").operands(torch.float32, device, bias=True)
        ops = with_integer_preacts(ops)
        kwargs = {"activation": "swiglu_oai"}
        output, preact = self.check_forward(ops, backend, **kwargs)
        self.assertGreater(preact.abs().gt(7).sum(), 10)
        self.check_backward(ops, preact, backend, **kwargs)
        free, _ = BACKENDS[backend](_moe_mlp, *ops.args(), limit=float("inf"), **kwargs)
        self.assertNotEqual(free, output)

    @all_backends
    def test_gradient_at_the_limit_is_that_of_clamp(self, device, backend):
        for limit in (7.0, float("inf")):
            preact = torch.tensor([7.0, -7.0, 1.0, 7.0, -7.0, 1.0], device=device)
            ops = one_token_with_preact(preact, 3, 1.0)
            mask = [False] * 4 + [True, False, False]
            grads = run_backward(backend, ops, ops.b_in, mask, limit=limit)
            b = ops.b_in.detach().requires_grad_()
            gate, up = b.chunk(2, dim=1)
            y = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(
                -limit, limit
            )
            (expected,) = torch.autograd.grad(y.sum(), b)
            self.assertEqual(grads.grad_b_in, expected)

    @all_backends
    @parametrize("dtype", [torch.float32, torch.bfloat16])
    @all_cases
    def test_separate_up(self, device, case, dtype, backend):
        ops = case.operands(dtype, device, bias=True).split_gate()
        _, preact = self.check_forward(ops, backend)
        self.assertEqual(preact.shape[1], 2 * ops.w_up.shape[1])
        self.check_backward(ops, preact, backend)

    def check_preact(self, ops, backend, activation):
        """Activation and its gradient for the pre-activation that is b_in."""
        kwargs = {"activation": activation}
        output, preact = BACKENDS[backend](_moe_mlp, *ops.args(), **kwargs)
        self.assertEqual(preact, ops.b_in, rtol=0, atol=0)
        mask = [False] * 4 + [True, False, False]
        grads = run_backward(backend, ops, preact, mask, **kwargs)
        expected, _ = moe_mlp_reference(*ops.args(), **kwargs)
        rtol = 4 * torch.finfo(output.dtype).eps
        self.assertEqual(output.double(), expected, rtol=rtol, atol=1e-30)
        expected = moe_mlp_backward_reference(ops.grad_out, *ops.args(), **kwargs)
        actual = grads.grad_b_in.double()
        self.assertEqual(actual, expected.grad_b_in, rtol=rtol, atol=1e-30)

    @all_backends
    @all_dtypes
    @parametrize("activation", ["silu", "swiglu", "swiglu_oai"])
    def test_extreme_gates(self, device, activation, dtype, backend):
        gates = extreme_gates(dtype, device)
        preact = gates if activation == "silu" else torch.cat([gates, gates.sign() / 2])
        ops = one_token_with_preact(preact, len(gates), 1.0)
        self.check_preact(ops, backend, activation)

    @all_backends
    @all_dtypes
    @parametrize("activation", ["relu", "relu2"])
    @parametrize("grad", [float("inf"), -float("inf")])
    def test_infinite_gradient(self, device, activation, grad, dtype, backend):
        # Zero where the gate is not positive, not NaN.
        preact = torch.tensor([-2.0, -0.0, 0.0, 3.0], dtype=dtype, device=device)
        ops = one_token_with_preact(preact, 4, grad)
        ops = dataclasses.replace(ops, w_out=torch.ones_like(ops.w_out))
        self.check_preact(ops, backend, activation)

    @all_backends
    @parametrize("weights_dtype", [None, torch.float32, torch.bfloat16])
    def test_topk_weights(self, device, weights_dtype, backend):
        ops = get_case("clipped").operands(
            torch.bfloat16, device, weights_dtype=weights_dtype
        )
        _, preact = self.check_forward(ops, backend)
        self.check_backward(ops, preact, backend)

    @all_backends
    @parametrize("bias", ["b_in", "b_out"])
    def test_one_bias(self, device, bias, backend):
        ops = get_case("zipf").operands(torch.float32, device, bias=True)
        ops = dataclasses.replace(ops, **{bias: None})
        _, preact = self.check_forward(ops, backend)
        self.check_backward(ops, preact, backend)

    @all_backends
    @parametrize("weighted", [False, True])
    @parametrize("offs", [(3, 3, 7, 9), (0, 2, 6, 6)])
    def test_expert_major_rows(self, device, offs, weighted, backend):
        # No permutation: row r is token r; with the second offs the last 3 rows have no expert.
        case = MoeCase("rows", num_tokens=9, top_k=1)
        ops = dataclasses.replace(
            case.operands(torch.float32, device, bias=True),
            offs=torch.tensor(offs, dtype=torch.int32, device=device),
            row_slots=None,
            slot_rows=None,
        )
        if not weighted:
            ops = dataclasses.replace(ops, topk_weights=None)
        output, preact = self.check_forward(ops, backend)
        for tensor in (output, preact):
            self.assertEqual(tensor[offs[-1] :].count_nonzero(), 0)
        self.check_backward(ops, preact, backend)

    @all_backends
    @parametrize("separate_up", [False, True])
    def test_output_mask(self, device, separate_up, backend):
        ops = get_case("uniform").operands(torch.float32, device, bias=True)
        ops = ops.split_gate() if separate_up else ops
        _, preact = _moe_mlp(*ops.args())
        full = run_backward(backend, ops, preact, [True] * 7)
        self.assertEqual(full.grad_w_up.numel() > 0, separate_up)
        for index in range(7):
            for wanted in (True, False):
                mask = [(i == index) == wanted for i in range(7)]
                grads = run_backward(backend, ops, preact, mask)
                for on, grad, expected in zip(mask, grads, full, strict=True):
                    if on:
                        self.assertEqual(grad, expected, rtol=0, atol=0)
                    else:
                        self.assertEqual(tuple(grad.shape), (0,))

    @all_backends
    @parametrize("dtype", [torch.float32, torch.bfloat16])
    @parametrize("separate_up", [False, True])
    def test_strides(self, device, separate_up, dtype, backend):
        ops = get_case("aligned").operands(dtype, device, bias=True)
        ops = strided_operands(ops.split_gate() if separate_up else ops)
        for x in (*ops.args(), ops.grad_out):
            self.assertFalse(x is not None and x.is_contiguous())
        _, preact = self.check_forward(ops, backend)
        grads = self.check_backward(ops, preact, backend)
        self.assertEqual(grads.grad_w_in.stride(), ops.w_in.stride())
        self.assertEqual(grads.grad_w_out.stride(), ops.w_out.stride())
        if separate_up:
            self.assertEqual(grads.grad_w_up.stride(), ops.w_up.stride())

    @all_backends
    @parametrize("dtype", [torch.float32, torch.bfloat16])
    @parametrize("transposed", [False, True])
    @parametrize("with_slots", [False, True])
    def test_odd_strides(self, device, with_slots, transposed, dtype, backend):
        """Dense rows an odd number of elements apart, from an odd one on: a part of a parameter
        that also holds a bias, a gradient through ``torch.cat``. 8 rows, and many more."""
        case = MoeCase("odd", num_tokens=75, top_k=1)
        ops = case.operands(dtype, device)
        offs = torch.tensor([8, 8, 20, 75], dtype=torch.int32, device=device)
        slots = torch.arange(75, dtype=torch.int32, device=device)

        def odd(x):
            wide = torch.nn.functional.pad(x, (1, 2)).contiguous()
            self.assertEqual(wide.stride(-2) % 2, 1)
            return wide[..., 1:-2]

        def odd_weight(w):
            return odd(w.mT).mT if transposed else odd(w)

        ops = dataclasses.replace(
            ops,
            input=odd(ops.input),
            w_in=odd_weight(ops.w_in),
            w_out=odd_weight(ops.w_out),
            grad_out=odd(ops.grad_out),
            offs=offs,
            row_slots=slots if with_slots else None,
            slot_rows=slots[:, None] if with_slots else None,
        )
        _, preact = self.check_forward(ops, backend)
        self.check_backward(ops, preact, backend)

    @all_backends
    @parametrize(
        "size, weight, scale, grad",
        [
            (0.128, 1e-3, 2e3, 5),
            (19200, 16, 2e-3, 0.01),
            (0.128, 1, 440, 5),
            (64, 0.01, 0.1, 2e-5),
        ],
    )
    def test_large_products_in_float16(
        self, device, size, weight, scale, grad, backend
    ):
        """As exact as where dO is weighted first, as autograd does without the op."""
        case = MoeCase("range", num_tokens=13, num_experts=4, dim=16, hidden=24)
        ops = case.operands(torch.float16, device, activation="silu")
        ops = dataclasses.replace(
            ops,
            input=torch.full_like(ops.input, size),
            w_in=torch.full_like(ops.w_in, 1 / 64),
            w_out=torch.full_like(ops.w_out, scale),
            topk_weights=torch.full_like(ops.topk_weights, weight),
            grad_out=torch.full_like(ops.grad_out, grad),
        )
        _, preact = self.check_forward(ops, backend, activation="silu")
        grads = self.check_backward(ops, preact, backend, activation="silu")
        self.assertTrue(all(g.isfinite().all() for g in grads))

    @all_backends
    def test_expanded(self, device, backend):
        ops = get_case("uniform").operands(torch.float32, device, bias=True)
        E = ops.offs.shape[0]
        # Positive: these have few different numbers, and if they cancelled, the largest error of the
        # unfused computation would be that of a few sums.
        ops = dataclasses.replace(
            ops,
            input=ops.input[:, :1].abs().expand_as(ops.input),
            w_in=ops.w_in[:1].abs().expand_as(ops.w_in),
            w_out=ops.w_out[:, :, :1].abs().expand_as(ops.w_out),
            topk_weights=ops.topk_weights[:1].expand_as(ops.topk_weights),
            b_in=ops.b_in[:1].expand(E, -1),
            grad_out=torch.ones((), device=device).expand_as(ops.grad_out),
        )
        _, preact = self.check_forward(ops, backend)
        self.check_backward(ops, preact, backend)

    @parametrize(
        "frozen", ["input", "w_in", "w_out", "topk_weights", "b_in", "b_out", "w_up"]
    )
    def test_autograd(self, device, frozen):
        ops = get_case("sentinels").operands(
            torch.float32, device, bias=True, requires_grad=True
        )
        ops = ops.split_gate()
        getattr(ops, frozen).requires_grad_(False)
        output, preact = torch._moe_mlp(*ops.args())
        self.assertEqual(type(output.grad_fn).__name__, "MoeMlpBackward0")
        self.assertFalse(preact.requires_grad)
        expected = run_backward("native", ops, preact)
        output.backward(ops.grad_out)
        for x, grad in zip(ops.differentiable(), expected, strict=True):
            if x.requires_grad:
                self.assertEqual(x.grad, grad, rtol=0, atol=0)
            else:
                self.assertIsNone(x.grad)

    @parametrize(
        "activation,gate_interleaved,separate_up",
        [(*form, False) for form in ACTIVATION_FORMS]
        + [(name, False, True) for name in GATED_ACTIVATIONS],
    )
    def test_gradcheck(self, device, separate_up, activation, gate_interleaved):
        case = MoeCase("tiny", 4, 3, 2, num_experts=3, routing="sentinels", num_rows=9)
        ops = case.operands(
            torch.float64,
            device,
            activation=activation,
            weights_dtype=torch.float64,
            bias=True,
            requires_grad=True,
        )
        ops = ops.split_gate() if separate_up else ops

        def mlp(*args):
            return torch._moe_mlp(
                *args, activation=activation, gate_interleaved=gate_interleaved
            )

        self.assertTrue(torch.autograd.gradcheck(mlp, ops.args()))

    def test_double_backward(self, device):
        ops = get_case("top_1").operands(torch.float64, device, requires_grad=True)
        output, _ = torch._moe_mlp(*ops.args())
        (grad,) = torch.autograd.grad(output.sum(), ops.input, create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "_moe_mlp_backward.*not implemented"):
            grad.sum().backward()

    def test_no_preact(self, device):
        ops = get_case("uniform").operands(torch.float32, device)
        output, preact = _moe_mlp(*ops.args(), compute_preact=False)
        self.assertEqual(tuple(preact.shape), (0, 48))
        self.assertEqual(output, _moe_mlp(*ops.args())[0], rtol=0, atol=0)
        with self.assertRaisesRegex(
            ValueError, "forward ran with compute_preact=False"
        ):
            run_backward("native", ops, preact)

    @parametrize("autocast", [False, True])
    def test_no_preact_but_a_gradient(self, device, autocast):
        """Autograd computes it again, as for a program that was exported for inference and is trained."""
        ops = get_case("uniform").operands(torch.float32, device, bias=True)
        ops.w_in.requires_grad_()
        grads = []
        for compute_preact in (True, False):
            output, _ = torch._moe_mlp(*ops.args(), compute_preact=compute_preact)
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                grads.append(torch.autograd.grad(output, ops.w_in, ops.grad_out))
        self.assertEqual(grads[0], grads[1], rtol=0, atol=0)

    @all_backends
    @parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_same_bits_every_time(self, device, dtype, backend):
        case = MoeCase("many", 200, 32, 48, num_experts=8, routing="zipf")
        ops = case.operands(dtype, device, bias=True)

        def run():
            output, preact = BACKENDS[backend](_moe_mlp, *ops.args())
            return output, preact, *run_backward(backend, ops, preact)

        first = run()
        for _ in range(3):
            self.assertEqual(run(), first, rtol=0, atol=0)

    @parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_saved_bytes(self, device, dtype):
        case = MoeCase("saved", 50, 16, 24, num_experts=4, top_k=2)
        ops = case.operands(dtype, device, bias=True, requires_grad=True)
        parameters = (ops.w_in, ops.w_out, ops.b_in, ops.b_out)
        with saved_for_backward(exclude=parameters) as saved:
            torch._moe_mlp(*ops.args())
        bound = saved_bytes_bound(dtype, 50, 16, 2 * 24, num_experts=4, top_k=2)
        self.assertLessEqual(nbytes(saved), bound)
        preact_bytes = dtype.itemsize * 100 * 48
        self.assertGreater(nbytes(saved), preact_bytes)

    @parametrize("case_name", ["uniform", "aligned_tail", "no_tokens"])
    @parametrize("separate_up", [False, True])
    def test_opcheck(self, device, separate_up, case_name):
        ops = get_case(case_name).operands(
            torch.float32, device, bias=True, requires_grad=True
        )
        ops = ops.split_gate() if separate_up else ops
        torch.library.opcheck(_moe_mlp, ops.args())
        num_tokens = ops.input.shape[0]
        all_to_the_first = torch.full_like(ops.offs, num_tokens)
        if not separate_up:
            torch.library.opcheck(_moe_mlp, (*ops.args()[:3], all_to_the_first))
        with torch.no_grad():
            _, preact = _moe_mlp(*ops.args())
        args = [
            None if x is None else x.detach()
            for x in (ops.grad_out, *ops.args(), preact)
        ]
        for mask in ([True] * 7, [False, True, False, True, False, True, False]):
            torch.library.opcheck(_moe_mlp_backward, (*args, mask))


# What only the backward has.
BACKWARD_ERRORS = [
    subtest(
        (
            ValueError,
            "grad_out must have shape (T, D) = (13, 16), got (16, 13)",
            {"grad_out": torch.zeros(16, 13)},
        ),
        name="grad_out_shape",
    ),
    subtest(
        (
            TypeError,
            "preact must have the dtype of input, float32, got float64",
            {"preact": torch.zeros(26, 48, dtype=torch.float64)},
        ),
        name="preact_dtype",
    ),
    subtest(
        (
            ValueError,
            "w_out must have shape (E, D, F) = (4, 16, 24), got (4, 15, 24)",
            {"w_out": torch.zeros(4, 15, 24)},
        ),
        name="w_out_shape",
    ),
]


class TestMoeMlpErrors(TestCase):
    @parametrize("error,text,changes", BACKWARD_ERRORS)
    def test_same_text(self, device, error, text, changes):
        ops = get_case("uniform").operands(torch.float32, device, bias=True)
        names = [f.name for f in dataclasses.fields(ops)][:10]
        tensors = {
            "grad_out": ops.grad_out,
            **dict(zip(names, ops.args(), strict=True)),
        }
        tensors["preact"] = torch.zeros(26, 48, device=device)
        tensors |= {name: change.to(device) for name, change in changes.items()}
        args = (*tensors.values(), [True] * 7)
        calls = [(BACKENDS[name], args) for name in backends_of(_moe_mlp_backward)]
        for call, operands in (*calls, (call_native, to_meta(args))):
            with self.assertRaises(error) as raised:
                call(_moe_mlp_backward, *operands)
            self.assertEqual(str(raised.exception), f"_moe_mlp_backward: {text}")

    @onlyCPU
    @all_backends
    def test_offs(self, device, backend):
        ops = get_case("uniform").operands(torch.float32, device)
        offs = ops.offs.flip(0)
        ops = dataclasses.replace(ops, offs=offs)
        with self.assertRaisesRegex(
            ValueError, "_moe_mlp_backward: offs must .*got 19"
        ):
            run_backward(backend, ops, torch.zeros(26, 48))


instantiate_device_type_tests(TestMoeMlp, globals())
instantiate_device_type_tests(TestMoeMlpErrors, globals())

if __name__ == "__main__":
    run_tests()
