# Owner(s): ["module: nn"]

"""The promises of the MoE ops, each with the proof that its test can fail.

Every invariant is one ``check_*`` method that takes an implementation. A test
runs it on the real ops, where it must pass, and on a variant that breaks this
one promise, where it must fail.
"""

import re
import unittest

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_cuda import IS_SM90, IS_SM100
from torch.testing._internal.common_moe import (
    all_dtypes,
    call_composite,
    call_native,
    has_cpu_kernel,
    nbytes,
    NoHostSyncMode,
    num_threads,
    saved_bytes_bound,
    saved_for_backward,
    to_meta,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_generators import get_case, moe_cases, MoeCase
from torch.testing._internal.moe_reference import (
    apply_activation,
    check_moe_mlp,
    moe_mlp_unfused,
    moe_permutation_reference,
)


aten = torch.ops.aten
OPS = (
    aten._moe_permutation.default,
    aten._moe_mlp.default,
    aten._moe_mlp_backward.default,
)
needs_cpu_kernel = unittest.skipUnless(
    has_cpu_kernel(), "the composite makes no promise about rounding and other tokens"
)
# These and the ops of PRs that lie on this one.
ALL_OPS = [
    getattr(aten, name.removeprefix("aten::")).default
    for name in sorted(torch._C._dispatch_get_all_op_names())
    if re.fullmatch(r"aten::_moe_\w+", name)
]


def moe_mlp(x, indices, weights, w_in, w_out, **kwargs):
    return F.moe_mlp(x, indices, weights, w_in, w_out, **kwargs)


# ----- variants, each of which breaks one promise


def clipped_ids(x, indices, weights, w_in, w_out, **kwargs):
    """Takes ids that mean "no expert" for the nearest expert."""
    indices = indices.clamp(0, w_in.shape[0] - 1)
    return F.moe_mlp(x, indices, weights, w_in, w_out, **kwargs)


def rounded_before_weight(x, indices, weights, w_in, w_out, **kwargs):
    """Rounds an expert's output, then weights it and rounds again."""
    K = indices.shape[1]
    rows = [
        F.moe_mlp(x, indices[:, k : k + 1], None, w_in, w_out, **kwargs)
        for k in range(K)
    ]
    routed = torch.stack(rows, dim=1)
    weighted = (routed.float() * weights.float().unsqueeze(-1)).to(x.dtype)
    return weighted.float().sum(dim=1).to(x.dtype)


def rounded_in_every_sum(x, indices, weights, w_in, w_out, **kwargs):
    """Rounds the running sum over a token's experts."""
    output = torch.zeros_like(x)
    for k in range(indices.shape[1]):
        slot = slice(k, k + 1)
        output = output + F.moe_mlp(
            x, indices[:, slot], weights[:, slot], w_in, w_out, **kwargs
        )
    return output


def gathering(x, indices, weights, w_in, w_out, **kwargs):
    """Composed of ops that autograd knows, so every intermediate is saved."""
    with torch.no_grad():
        plan = torch._moe_permutation(indices, w_in.shape[0])
    return moe_mlp_unfused(
        x, w_in, w_out, plan.offs, weights, plan.row_slots, plan.slot_rows
    )[0]


class AtomicCombine:
    """Adds a token's rows in the order in which they happen to arrive."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, x, indices, weights, w_in, w_out, **kwargs):
        order = torch.randperm(indices.shape[1], generator=self.generator)
        output = torch.zeros_like(x)
        for k in order.tolist():
            slot = slice(k, k + 1)
            output = output + F.moe_mlp(
                x, indices[:, slot], weights[:, slot], w_in, w_out, **kwargs
            )
        return output


def batch_normalised(x, indices, weights, w_in, w_out, **kwargs):
    """Lets the tokens of a batch see each other through a scale that cancels out."""
    scale = x.abs().amax()
    return F.moe_mlp(x / scale, indices, weights, w_in * scale, w_out, **kwargs)


def split_over_threads(x, indices, weights, w_in, w_out, **kwargs):
    """Every thread multiplies its share of the hidden units, and the shares are summed."""
    hidden, output = w_out.shape[2], 0
    for units in torch.arange(hidden).tensor_split(torch.get_num_threads()):
        gates_and_ups = w_in[:, torch.cat([units, hidden + units])]
        share = (gates_and_ups, w_out[:, :, units])
        output = output + F.moe_mlp(x, indices, weights, *share, **kwargs)
    return output


def synchronising(op, *args, **kwargs):
    """Asks the host how many rows are in use, as loops over experts do."""
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.dtype == torch.int32:
            arg.max().item()
    return call_composite(op, *args, **kwargs)


def own_words(op, *args, **kwargs):
    """A second validator: the rule is the same, the text is not."""
    try:
        return call_native(op, *to_meta(args), **kwargs)
    except ValueError as error:
        raise ValueError(f"shape mismatch in {op.name()}") from error


class TestMoeInvariants(TestCase):
    def assertBreaks(self, check, *args, error=AssertionError, text=""):
        with self.assertRaisesRegex(error, text):
            check(*args)

    # 1. One meaning

    def check_meaning(self, mlp):
        for case in moe_cases():
            if case.num_rows is not None:
                continue
            ops = case.operands(torch.bfloat16)
            args = (ops.input, ops.topk_indices, ops.topk_weights, ops.w_in, ops.w_out)
            check_moe_mlp((mlp(*args),), ops.args())

    def test_one_meaning(self):
        self.check_meaning(moe_mlp)
        self.check_meaning(torch.compile(moe_mlp, fullgraph=True, backend="aot_eager"))
        self.assertBreaks(self.check_meaning, clipped_ids)

    # 2. Numerics contract

    def check_rounding(self, mlp):
        """Small integers make every product and fp32 sum exact: only roundings remain."""
        generator = torch.Generator().manual_seed(0)

        def integers(*shape):
            values = torch.randint(-3, 4, shape, generator=generator)
            return values.to(torch.bfloat16)

        T, D, hidden, E, K = 16, 16, 64, 4, 4
        x, w_in, w_out = integers(T, D), integers(E, hidden, D), integers(E, D, hidden)
        indices = torch.arange(E).expand(T, K).contiguous()
        weights = torch.randint(1, 128, (T, K), generator=generator) / 64
        routed = []
        for k in range(K):
            a = apply_activation(x.double() @ w_in[k].double().T, "relu")
            self.assertEqual(a.bfloat16().double(), a, rtol=0, atol=0)
            o = weights[:, k, None] * (a @ w_out[k].double().T)
            routed.append(o.bfloat16().float())
        expected = routed[0]
        for o in routed[1:]:
            expected = expected + o
        actual = mlp(x, indices, weights, w_in, w_out, activation="relu")
        self.assertEqual(actual, expected.bfloat16(), rtol=0, atol=0)

    @needs_cpu_kernel
    def test_numerics_contract(self):
        self.check_rounding(moe_mlp)
        self.assertBreaks(self.check_rounding, rounded_before_weight)
        self.assertBreaks(self.check_rounding, rounded_in_every_sum)

    # 3. Memory

    def check_memory(self, mlp):
        for dtype in (torch.float32, torch.bfloat16):
            case = MoeCase("memory", 64, 32, 24, num_experts=8, top_k=4)
            ops = case.operands(dtype, requires_grad=True)
            with saved_for_backward(exclude=(ops.w_in, ops.w_out)) as saved:
                mlp(ops.input, ops.topk_indices, ops.topk_weights, ops.w_in, ops.w_out)
            bound = saved_bytes_bound(dtype, 64, 32, 2 * 24, num_experts=8, top_k=4)
            self.assertLessEqual(nbytes(saved), bound)

    def test_memory(self):
        self.check_memory(moe_mlp)
        self.check_memory(torch.compile(moe_mlp, fullgraph=True, backend="aot_eager"))
        self.assertBreaks(self.check_memory, gathering)

    # 4. Determinism

    def check_same_bits(self, mlp):
        case = MoeCase("bits", 64, 32, 48, num_experts=8, top_k=4, routing="zipf")
        ops = case.operands(torch.float32, requires_grad=True)
        leaves = (ops.input, ops.topk_weights, ops.w_in, ops.w_out)

        def run():
            out = mlp(ops.input, ops.topk_indices, *leaves[1:])
            return out.detach(), *torch.autograd.grad(out, leaves, ops.grad_out)

        first = run()
        for _ in range(4):
            self.assertEqual(run(), first, rtol=0, atol=0)

    def test_determinism(self):
        self.check_same_bits(moe_mlp)
        self.assertBreaks(self.check_same_bits, AtomicCombine())

    def run_tokens(self, mlp, dtype, tokens=slice(None)):
        """y, dX and d(topk_weights) of some of the tokens of a case."""
        case = MoeCase("alone", 96, 40, 56, num_experts=4, top_k=2, routing="zipf")
        ops = case.operands(dtype, requires_grad=True)
        x, weights = ops.input[tokens], ops.topk_weights[tokens]
        out = mlp(x, ops.topk_indices[tokens], weights, ops.w_in, ops.w_out)
        grads = torch.autograd.grad(out, (x, weights), ops.grad_out[tokens])
        return out.detach(), *grads

    def check_neighbours(self, mlp, dtype):
        """A token's results ignore the other tokens."""
        everyone = self.run_tokens(mlp, dtype)
        for tokens in (slice(0, 1), slice(3, 5), slice(10, 17), slice(1, 96, 7)):
            expected = tuple(t[tokens] for t in everyone)
            actual = self.run_tokens(mlp, dtype, tokens)
            self.assertEqual(actual, expected, rtol=0, atol=0)

    def check_threads(self, mlp, dtype):
        """A token's results ignore the number of threads."""
        everyone = self.run_tokens(mlp, dtype)
        for count in (1, 3):
            with num_threads(count):
                actual = self.run_tokens(mlp, dtype)
            self.assertEqual(actual, everyone, rtol=0, atol=0)

    @needs_cpu_kernel
    @all_dtypes
    def test_independence_on_cpu(self, dtype):
        self.check_neighbours(moe_mlp, dtype)
        self.check_threads(moe_mlp, dtype)
        self.assertBreaks(self.check_neighbours, batch_normalised, dtype)
        self.assertBreaks(self.check_threads, split_over_threads, dtype)

    # 5. No host sync

    def run_all_ops(self, call, ops):
        plan = call(OPS[0], ops.topk_indices, ops.w_in.shape[0])
        args = (*ops.args()[:5], plan[0], plan[1], ops.b_in, ops.b_out, None)
        _, preact = call(OPS[1], *args)
        call(OPS[2], ops.grad_out, *args, preact, [True] * 7)

    def check_no_sync(self, call):
        ops = get_case("sentinels").operands(torch.bfloat16, bias=True)
        with NoHostSyncMode():
            self.run_all_ops(call, ops)

    def test_no_host_sync(self):
        # 16-byte rows: the composite takes its grouped_mm branch, as it would on
        # a GPU. Data-dependent shapes could not be traced either.
        self.check_no_sync(call_composite)
        self.assertBreaks(
            self.check_no_sync, synchronising, error=RuntimeError, text="host sync"
        )

    def check_no_sync_on_cuda(self, call):
        ops = get_case("sentinels").operands(torch.bfloat16, "cuda", bias=True)
        self.run_all_ops(call_native, ops)  # what is allocated once may synchronize
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.run_all_ops(call, ops)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @unittest.skipUnless(
        IS_SM90 or IS_SM100, "needs sm_90 or sm_100: others read offs on the host"
    )
    def test_no_host_sync_on_cuda(self):
        # What the mode above cannot see: copies and waits that are no ops.
        for call in (call_native, call_composite):
            self.check_no_sync_on_cuda(call)
        self.assertBreaks(
            self.check_no_sync_on_cuda,
            synchronising,
            error=RuntimeError,
            text="synchron",
        )

    def check_router_without_sync(self, topk):
        # Fake tensors need no GPU. On the CPU, copies to the host cannot be seen.
        with FakeTensorMode():
            logits = torch.empty(6, 8, device="cuda")
            bias = torch.empty(8, device="cuda")
            with NoHostSyncMode():
                for options in ({}, {"num_groups": 4, "top_groups": 2, "bias": bias}):
                    topk(logits, 3, **options)

    def test_router_without_host_sync(self):
        def synchronising(logits, k, **kwargs):
            k = min(k, int(logits.isfinite().sum()))
            return F.moe_topk(logits, k, **kwargs)

        self.check_router_without_sync(F.moe_topk)
        self.assertBreaks(
            self.check_router_without_sync,
            synchronising,
            error=RuntimeError,
            text="host sync",
        )

    SYNCS = {
        "item": lambda x: x[0].item(),
        "tolist": lambda x: x.tolist(),
        "bool": lambda x: bool(x[0] > 0),
        "nonzero": lambda x: x.nonzero(),
        "mask": lambda x: x[x > 0],
        "cpu": lambda x: x.cpu(),
        "to": lambda x: x.to("cpu", torch.float64),
        "copy": lambda x: torch.empty(4, device="cpu").copy_(x),
    }

    @parametrize("name", list(SYNCS))
    def test_host_syncs_are_seen(self, name):
        # Asserts what the mode is worth, on a GPU that need not be there.
        with FakeTensorMode():
            x = torch.empty(4, device="cuda")
            with self.assertRaisesRegex(RuntimeError, "needs a host sync"):
                with NoHostSyncMode():
                    self.SYNCS[name](x)

    def test_what_is_no_host_sync(self):
        with FakeTensorMode():
            x, host = torch.empty(4, device="cuda"), torch.empty(4)
            with NoHostSyncMode():
                x.to(torch.float64).copy_(host)
                host.to("cuda")
                host.clone().copy_(host)
                x[x.argsort()].repeat_interleave(
                    torch.ones_like(x).long(), output_size=4
                )

    # 6. Any routing is legal, nothing else is

    def check_ids(self, mlp):
        ops = get_case("uniform").operands(torch.float32)
        E = ops.w_in.shape[0]
        operands = (ops.topk_weights, ops.w_in, ops.w_out)
        for nobody in (-1, E):
            out = mlp(ops.input, torch.full_like(ops.topk_indices, nobody), *operands)
            self.assertEqual(out.count_nonzero(), 0)
        for wrong in (-2, E + 1, 2**40):
            indices = ops.topk_indices.clone()
            indices[5, 1] = wrong
            with self.assertRaisesRegex(
                (ValueError, IndexError), rf"topk_indices.*\[-1, {E}\].*{wrong}"
            ):
                mlp(ops.input, indices, *operands)

    def test_any_routing(self):
        self.check_ids(moe_mlp)
        self.assertBreaks(self.check_ids, clipped_ids)

    # 7. One validator

    def check_texts(self, meta_call):
        ops = get_case("uniform").operands(torch.float32)
        args = list(ops.args())
        args[2] = ops.w_out[:, :-1]
        texts = set()
        for call in (call_native, call_composite, meta_call):
            with self.assertRaises(ValueError) as raised:
                call(OPS[1], *args)
            texts.add(str(raised.exception))
        self.assertEqual(len(texts), 1, texts)

    def test_one_validator(self):
        self.check_texts(lambda op, *args: call_native(op, *to_meta(args)))
        self.assertBreaks(self.check_texts, own_words)

    def test_one_list_of_activations(self):
        from typing import get_args

        ops = get_case("uniform").operands(torch.float32)
        with self.assertRaises(ValueError) as raised:
            OPS[1](*ops.args(), activation="")
        listed = str(raised.exception).split("one of ")[1].split(", got")[0]
        self.assertEqual(tuple(listed.split(", ")), get_args(F._MoeActivation))

    # 8. Upstream shape

    def check_upstream_shape(self, op):
        name = op.name()
        key = "CompositeExplicitAutograd"
        self.assertTrue(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
        # Its own or that of the composite.
        computed = torch._C._dispatch_has_computed_kernel_for_dispatch_key
        self.assertTrue(computed(name, "Meta"))
        from torchgen.aoti.fallback_ops import inductor_fallback_ops

        self.assertIn(
            f"aten.{name.removeprefix('aten::')}.default", inductor_fallback_ops
        )
        if not name.endswith("_backward"):  # torchgen makes no binding for these
            binding = getattr(torch, name.removeprefix("aten::"))
            from torch._dynamo.trace_rules import lookup

            self.assertEqual(lookup(binding).__name__, "TorchInGraphFunctionVariable")

    @parametrize("op", ALL_OPS, name_fn=lambda op: op.name().removeprefix("aten::"))
    def test_upstream_shape(self, op):
        self.check_upstream_shape(op)
        self.assertBreaks(self.check_upstream_shape, aten._efficientzerotensor.default)

    def test_schemas_describe_the_reference(self):
        plan = moe_permutation_reference(torch.zeros(1, 1, dtype=torch.int64), 1)
        returns = [r.name for r in OPS[0]._schema.returns]
        self.assertEqual(returns, list(plan._fields))


instantiate_parametrized_tests(TestMoeInvariants)

if __name__ == "__main__":
    run_tests()
