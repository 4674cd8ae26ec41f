# Owner(s): ["module: dsl-native-ops"]
"""What the CuTe backend of the MoE ops does around its matmuls, and whom it serves.

No GPU and no CuTe DSL: the matmuls are replaced by loops with the same signatures
(:class:`LoopGemms`), Triton's kernels run in its interpreter. What is checked against the
float64 loops is everything else: segments, padding, layouts, weights and masks. That
the matmuls compile: test_moe_cutedsl_gate.py.
"""

import os


# Before anything can import Triton: its own helpers decide at import time.
os.environ["TRITON_INTERPRET"] = "1"

import ast
import concurrent.futures
import dataclasses
import pathlib
from unittest import mock

from triton_interpreter import CheckedMemory, require_interpreter

import torch
from torch._native.ops.moe import cutedsl_impl, triton_impl
from torch._native.ops.moe.cutedsl_kernels import launch, rows
from torch._native.ops.moe.triton_kernels.configs import KERNELS, TileConfig
from torch._native.ops.moe.triton_kernels.launch import (
    Activation,
    Experts,
    LaunchPlan,
    moe_mlp_backward as triton_backward,
    moe_mlp_forward as triton_forward,
)
from torch.nn.utils.moe_kernel import moe_kernel, MoeBackend
from torch.testing._internal.common_moe import all_cases
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_generators import get_case, MoeCase
from torch.testing._internal.moe_reference import (
    apply_activation,
    check_moe_mlp,
    check_moe_mlp_backward,
)


require_interpreter()

TILE = TileConfig(32, 32, 32, num_warps=4, num_stages=2)
TRITON = LaunchPlan(dict.fromkeys(KERNELS, (TILE,)), num_sms=3)
ALL = (True, True, True, True, False, False, False)


def apply(act, preact):
    return apply_activation(
        preact, activation=act.activation, gate_interleaved=act.gate_interleaved
    )


def differentiate(act, preact, grad):
    """act(preact) and its gradient."""
    h = preact.detach().requires_grad_()
    a = apply(act, h)
    return a.detach(), torch.autograd.grad(a, h, grad)[0]


class LoopGemms:
    """The functions of cutedsl_kernels/gemms.py as loops over segments, in float32.

    Each touches the rows of the segments and no other, as there: what it was not to write
    stays NaN, and what it was not to read would show.
    """

    def __init__(self):
        self.called = []

    def segments(self, name, cu, w=None):
        self.called.append(name)
        bounds = cu.tolist()
        assert bounds[0] == 0 and cu.dtype == torch.int32, bounds
        for e, (first, last) in enumerate(zip(bounds, bounds[1:])):
            yield slice(first, last), None if w is None else w[e].float()

    @staticmethod
    def rows(x, tokens, segment):
        if tokens is None:
            return x[segment].float()
        indices = tokens[segment]
        assert ((indices >= 0) & (indices < len(x))).all(), indices
        return x[indices.long()].float()

    def up(self, x, tokens, w_in, cu, act, preact, hidden):
        for rows_of, w in self.segments("up", cu, w_in):
            h = self.rows(x, tokens, rows_of) @ w.T
            if preact is not None:
                preact[rows_of] = h.to(preact.dtype)
            hidden[rows_of] = apply(act, h).to(hidden.dtype)

    def down(self, a, w, cu, score, out):
        for rows_of, w_e in self.segments("down", cu, w):
            y = a[rows_of].float() @ w_e.T
            if score is not None:
                assert score.dtype == torch.float32
                y *= score[rows_of, None]
            out[rows_of] = y.to(out.dtype)

    def act_backward(
        self, grad, tokens, w, cu, preact, score, act, grad_preact, hidden
    ):
        assert act.gate_interleaved or not act.gated
        dot = score.new_full(score.shape, float("nan"))
        for rows_of, w_e in self.segments("act_backward", cu, w):
            d = self.rows(grad, tokens, rows_of) @ w_e
            s = score[rows_of, None]
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                # Behind an op, where this thread has no autograd.
                args = (act, preact[rows_of].float(), d * s)
                a, dh = pool.submit(differentiate, *args).result()
            grad_preact[rows_of] = dh.to(grad_preact.dtype)
            hidden[rows_of] = (a * s).to(hidden.dtype)
            dot[rows_of] = (a * d).sum(1)
        return dot

    def mm(self, a, w, cu, out):
        for rows_of, w_e in self.segments("mm", cu, w):
            out[rows_of] = (a[rows_of].float() @ w_e).to(out.dtype)

    def weight_grad(self, x, tokens, b, cu, out):
        assert 1 in out.stride()[1:], out.stride()
        for e, (rows_of, _) in enumerate(self.segments("weight_grad", cu)):
            rows = self.rows(x, tokens, rows_of)
            out[e] = (rows.T @ b[rows_of].float()).to(out.dtype)


class CuteTestCase(CheckedMemory, TestCase):
    def setUp(self):
        super().setUp()
        self.gemms = LoopGemms()
        self.plan = launch.CutePlan(self.gemms, TRITON)

    def check(self, operands, act, output_mask=ALL, args=None, grad_out=None):
        args = operands.args() if args is None else args
        grad_out = operands.grad_out if grad_out is None else grad_out
        kwargs = dataclasses.asdict(act)
        experts = Experts(*args, act=act)
        output, preact = launch.moe_mlp_forward(self.plan, experts)
        check_moe_mlp((output, preact), args, **kwargs)
        grads = launch.moe_mlp_backward(
            self.plan, experts, grad_out, preact, output_mask
        )
        check_moe_mlp_backward(grads, grad_out, args, output_mask, **kwargs)
        return preact


@instantiate_parametrized_tests
class TestCutedslLaunch(CuteTestCase):
    @all_cases
    @parametrize("gate_interleaved", [False, True])
    def test_cases(self, case, gate_interleaved):
        operands = case.operands(torch.bfloat16)
        self.check(operands, Activation("swiglu", gate_interleaved))

    @parametrize("activation", cutedsl_impl._ACTIVATIONS)
    @parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_activations(self, activation, dtype):
        for interleaved in (False, True):
            act = Activation(activation, interleaved)
            if act.gated or not interleaved:
                operands = get_case("zipf").operands(dtype, activation=activation)
                self.check(operands, act)
        kernels = {"up", "down", "mm", "weight_grad", "act_backward"}
        self.assertEqual(set(self.gemms.called), kernels)

    @parametrize("weights_dtype", [None, torch.bfloat16])
    @parametrize("gate_interleaved", [False, True])
    def test_router_weights(self, weights_dtype, gate_interleaved):
        # Padding inside of segments has no weight even where no slot has one.
        for name in ("aligned", "top_1"):
            operands = get_case(name).operands(
                torch.bfloat16, weights_dtype=weights_dtype
            )
            self.check(operands, Activation("swiglu", gate_interleaved))

    @parametrize("offs", [[3, 3, 11, 13], [0, 0, 0, 9], [0, 0, 0, 0]])
    @parametrize("gate_interleaved", [False, True])
    @parametrize("weights_dtype", [None, torch.float32])
    def test_rows_that_are_expert_major_already(
        self, offs, gate_interleaved, weights_dtype
    ):
        operands = get_case("top_1").operands(
            torch.bfloat16, weights_dtype=weights_dtype
        )
        args = list(operands.args())
        args[3] = torch.tensor(offs, dtype=torch.int32)
        args[5] = args[6] = None
        self.check(operands, Activation("swiglu", gate_interleaved), args=args)

    def test_strides(self):
        operands = get_case("zipf").operands(torch.bfloat16)
        args = list(operands.args())
        args[0] = args[0].t().contiguous().t()
        grad_out = operands.grad_out[:1].expand_as(operands.grad_out)
        self.check(operands, Activation("swiglu"), args=args, grad_out=grad_out)

    @parametrize("gate_interleaved", [False, True])
    def test_output_masks(self, gate_interleaved):
        operands = get_case("sentinels").operands(torch.bfloat16)
        act = Activation("swiglu", gate_interleaved)
        for wanted in (0, 1, 2, 3, None):
            mask = tuple(i == wanted for i in range(7))
            self.check(operands, act, mask)

    def test_no_preact_in_inference(self):
        for interleaved in (False, True):
            args = get_case("aligned").operands(torch.bfloat16).args()
            experts = Experts(*args, act=Activation("swiglu", interleaved))
            expected, _ = launch.moe_mlp_forward(self.plan, experts)
            output, preact = launch.moe_mlp_forward(
                self.plan, experts, compute_preact=False
            )
            self.assertEqual(preact.shape, (0, args[1].shape[1]))
            self.assertEqual(output, expected, rtol=0, atol=0)

    @parametrize("gate_interleaved", [False, True])
    def test_backward_of_another_backend(self, gate_interleaved):
        # The pre-activations of one are those of the other, padding included.
        act = Activation("swiglu", gate_interleaved)
        operands = get_case("aligned").operands(torch.bfloat16)
        args, grad_out = operands.args(), operands.grad_out
        kwargs = {"activation": "swiglu", "gate_interleaved": gate_interleaved}
        experts = Experts(*args, act=act)
        _, ours = launch.moe_mlp_forward(self.plan, experts)
        _, theirs = triton_forward(TRITON, experts)
        grads = triton_backward(TRITON, experts, grad_out, ours, ALL)
        check_moe_mlp_backward(grads, grad_out, args, **kwargs)
        grads = launch.moe_mlp_backward(self.plan, experts, grad_out, theirs, ALL)
        check_moe_mlp_backward(grads, grad_out, args, **kwargs)

    @parametrize("gate_interleaved", [False, True])
    @parametrize("bad", [float("nan"), float("inf")])
    @parametrize("name", ["aligned", "aligned_tail", "clipped_aligned"])
    def test_a_token_that_is_not_finite_stays_with_its_experts(
        self, name, bad, gate_interleaved
    ):
        case = get_case(name)
        operands = case.operands(torch.bfloat16)
        act = Activation("swiglu", gate_interleaved)
        args = operands.args()
        slots, bounds = args[5], [0, *args[3].tolist()]
        segments = [slots[a:b] for a, b in zip(bounds, bounds[1:])]
        others = [bool((s // case.top_k != 0).all()) for s in segments]
        # An expert without the token has rows that hold no slot.
        self.assertTrue(any((s < 0).any() for s, o in zip(segments, others) if o))

        def run(value):
            x, grad_out = args[0].clone(), operands.grad_out.clone()
            x[0] = grad_out[0] = value
            experts = Experts(x, *args[1:], act=act)
            output, preact = launch.moe_mlp_forward(self.plan, experts)
            return output, *launch.moe_mlp_backward(
                self.plan, experts, grad_out, preact, ALL
            )

        output, dx, dw_in, dw_out, dweights, *_ = run(bad)
        expected = run(1.0)
        for i, (found, kept) in enumerate(
            (
                (output, slice(1, None)),
                (dx, slice(1, None)),
                (dw_in, others),
                (dw_out, others),
                (dweights, slice(1, None)),
            )
        ):
            self.assertEqual(found.isfinite().all().item(), all(others), i)
            self.assertEqual(found[kept], expected[i][kept], rtol=0, atol=0)

    @parametrize("broken", ["score", "tokens", "zero_padding", "cu"])
    def test_checks_can_fail(self, broken):
        # One step left out at a time: what the cases above would not have seen.
        original, zero = rows.route_rows, rows.zero_padding

        def route_rows(slots, offs, top_k, weights):
            tokens, score = original(slots, offs, top_k, weights)
            if broken == "tokens":
                tokens = (slots // top_k).to(torch.int32)
            if broken == "score":
                score = torch.where(slots < 0, 1.0, score)
            return tokens, score

        def zero_padding(slots, out):
            if broken != "zero_padding":
                zero(slots, out)

        def pad(offs, widths):
            return (
                torch.cat([offs, offs[-1:]])
                if broken == "cu"
                else original_pad(offs, widths)
            )

        original_pad = torch.nn.functional.pad
        # Not a gated one: where H is 0, so are both of its gradients.
        operands = get_case("aligned").operands(torch.bfloat16, activation="silu")
        with (
            mock.patch.object(launch, "route_rows", route_rows),
            mock.patch.object(launch, "zero_padding", zero_padding),
            mock.patch.object(torch.nn.functional, "pad", pad),
            self.assertRaises(AssertionError),
        ):
            self.check(operands, Activation("silu"))


class TestCutedslChoice(TestCase):
    """Whom the backend serves, and what moe_kernel() makes of it; the device is mocked."""

    def setUp(self):
        super().setUp()
        self.capability = (9, 0)
        for target, name, replacement in (
            (triton_impl, "device_reason", lambda *args: None),
            (triton_impl, "capability_of", lambda index: self.capability),
            (triton_impl.tu, "_try_initialize_driver", lambda: True),
        ):
            patch = mock.patch.object(target, name, replacement)
            patch.start()
            self.addCleanup(patch.stop)
        patch = mock.patch("torch.nn.utils.moe_kernel._is_registered", lambda b: True)
        patch.start()
        self.addCleanup(patch.stop)
        case = MoeCase("choice", dim=32, hidden=48)
        self.args = case.operands(torch.bfloat16).args()

    def test_served(self):
        for self.capability in ((9, 0), (10, 0), (10, 3)):
            self.assertIsNone(cutedsl_impl.mlp_reason(Experts(*self.args)))

    def test_not_served(self):
        def reason(**changes):
            names = ("w_in", "w_out", "b_in", "b_out", "w_up")
            args = list(self.args)
            for position, name in zip((1, 2, 7, 8, 9), names):
                args[position] = changes.pop(name, args[position])
            experts = Experts(*args, act=Activation(**changes))
            return cutedsl_impl.mlp_reason(experts)

        w_in, w_out = self.args[1:3]
        transposed = w_out.mT.contiguous().mT
        for expected, changes in (
            ("activation 'geglu' is not one of", {"activation": "geglu"}),
            ("activation 'swiglu_oai'", {"activation": "swiglu_oai"}),
            ("limit = 7.0", {"limit": 7.0}),
            ("w_out is not contiguous", {"w_out": transposed}),
            ("b_in is not served", {"b_in": w_in[:, :, 0].contiguous()}),
            ("b_out is not served", {"b_out": w_out[:, :, 0].contiguous()}),
            (
                "w_up is not served",
                {"w_in": w_in[:, :48].contiguous(), "w_up": w_in[:, 48:].contiguous()},
            ),
        ):
            self.assertIn(expected, reason(**changes) or "served")
        with mock.patch.object(cutedsl_impl, "_MAX_ELEMENTS", 1000):
            self.assertIn("2^31", reason())
        for self.capability in ((8, 0), (11, 0), (12, 0)):
            self.assertIn("compute capability", reason())

    def test_runs_only_where_it_is_asked_for(self):
        self.assertFalse(cutedsl_impl._mlp_cond(*self.args))
        with moe_kernel(MoeBackend.TRITON):
            self.assertFalse(cutedsl_impl._mlp_cond(*self.args))
        with moe_kernel(MoeBackend.CUTEDSL):
            self.assertTrue(cutedsl_impl._mlp_cond(*self.args))
            with self.assertRaisesRegex(RuntimeError, "only.*CUTEDSL.*'geglu'"):
                cutedsl_impl._mlp_cond(*self.args, activation="geglu")
            # Router and permutation are Triton's.
            indices = get_case("uniform").topk_indices()
            self.assertTrue(triton_impl._permutation_cond(indices, 4))
            self.assertTrue(triton_impl._topk_cond(torch.zeros(2, 8), 2))
            with self.assertRaisesRegex(RuntimeError, "_moe_permutation"):
                triton_impl._permutation_cond(indices, 5000)
        with moe_kernel([MoeBackend.TRITON, MoeBackend.CUTEDSL]):
            self.assertFalse(cutedsl_impl._mlp_cond(*self.args, activation="geglu"))
            self.assertTrue(triton_impl._mlp_cond(*self.args, activation="geglu"))
            with self.assertRaisesRegex(RuntimeError, "dtype"):
                case = MoeCase("choice", dim=32, hidden=48)
                triton_impl._mlp_cond(*case.operands(torch.float64).args())

    def test_backward_asks_the_same(self):
        args = self.args
        preact = torch.empty(len(args[5]), args[1].shape[1], dtype=torch.bfloat16)
        backward = (torch.empty_like(args[0]), *args, preact, [True] * 7)
        with moe_kernel(MoeBackend.CUTEDSL):
            self.assertTrue(cutedsl_impl._mlp_backward_cond(*backward))
            with self.assertRaisesRegex(ValueError, "preact must have shape"):
                wrong = (*backward[:-2], preact[:-1], backward[-1])
                cutedsl_impl._mlp_backward_cond(*wrong)

    def test_activations_agree_with_the_kernels(self):
        # Read, since they cannot be imported without the CuTe DSL.
        path = pathlib.Path(launch.__file__).parent / "gemms.py"
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AnnAssign) and node.target.id == "ACTIVATIONS":
                table = ast.literal_eval(node.value)
        self.assertEqual(tuple(table), cutedsl_impl._ACTIVATIONS)

    def test_stand_ins_have_the_signatures_of_the_kernels(self):
        path = pathlib.Path(launch.__file__).parent / "gemms.py"
        functions = {
            node.name: [arg.arg for arg in node.args.args]
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        for name in ("up", "down", "act_backward", "mm", "weight_grad"):
            for owner in (LoopGemms, launch.Gemms):
                code = getattr(owner, name).__code__
                names = list(code.co_varnames[1 : code.co_argcount])
                self.assertEqual(names, functions[name], name)


@instantiate_parametrized_tests
class TestCutedslOps(CuteTestCase):
    """The implementations behind the ops, with their autograd."""

    @parametrize("gate_interleaved", [False, True])
    def test_functional_and_autograd(self, gate_interleaved):
        def on_cpu(impl):
            # The interpreter keeps references to the storages of its arguments.
            return lambda *args, **kwargs: tuple(
                x.clone() for x in impl(*args, **kwargs)
            )

        operands = get_case("sentinels").operands(torch.bfloat16, requires_grad=True)
        leaves = [operands.input, operands.w_in, operands.w_out, operands.topk_weights]
        with (
            torch.library._scoped_library("aten", "IMPL") as lib,
            mock.patch.object(cutedsl_impl, "_plan", lambda index: self.plan),
            mock.patch.object(triton_impl, "on_device", mock.MagicMock()),
        ):
            for op, impl in (
                ("_moe_mlp", cutedsl_impl._mlp_impl),
                ("_moe_mlp_backward", cutedsl_impl._mlp_backward_impl),
            ):
                lib.impl(op, on_cpu(impl), "CPU", allow_override=True)
            x, w_in, w_out, weights = leaves
            output = torch.nn.functional.moe_mlp(
                x,
                operands.topk_indices,
                weights,
                w_in,
                w_out,
                gate_interleaved=gate_interleaved,
            )
            grads = torch.autograd.grad(output, leaves, operands.grad_out)
        args = [x if x is None else x.detach() for x in operands.args()]
        kwargs = {"gate_interleaved": gate_interleaved}
        check_moe_mlp((output,), args, **kwargs)
        grads = (*grads, *[torch.empty(0)] * 3)
        check_moe_mlp_backward(grads, operands.grad_out, args, **kwargs)


if __name__ == "__main__":
    run_tests()
