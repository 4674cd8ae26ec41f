# Owner(s): ["module: nn"]
"""The reference and the generators of the MoE tests, tested without any MoE op."""

import itertools
import math

import torch
from torch.testing._internal.common_moe import all_activations, all_cases
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_generators import (
    get_case,
    moe_cases,
    MoeCase,
    ROUTINGS,
)
from torch.testing._internal.moe_reference import (
    apply_activation,
    check_close,
    default_num_rows,
    error_and_bound,
    GATED_ACTIVATIONS,
    moe_mlp_backward_reference,
    moe_mlp_backward_unfused,
    moe_mlp_reference,
    moe_mlp_unfused,
    moe_permutation_reference,
    moe_topk_reference,
)


def scalar_activation(activation, gate, up):
    """One element, in Python floats; ``up`` is ignored by the plain activations."""
    sigmoid = 1 / (1 + math.exp(-gate))
    gelu = 0.5 * gate * (1 + math.erf(gate / math.sqrt(2)))
    cubic = gate + 0.044715 * gate**3
    gelu_tanh = 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * cubic))
    if activation == "swiglu_oai":
        gate, up = min(gate, 7.0), max(min(up, 7.0), -7.0)
        return gate / (1 + math.exp(-1.702 * gate)) * (up + 1)
    return {
        "swiglu": gate * sigmoid * up,
        "geglu": gelu * up,
        "geglu_tanh": gelu_tanh * up,
        "reglu": max(gate, 0.0) * up,
        "silu": gate * sigmoid,
        "gelu": gelu,
        "relu": max(gate, 0.0),
        "relu2": max(gate, 0.0) ** 2,
    }[activation]


def dense_moe_mlp(x, topk_indices, fits, topk_weights, w_in, w_out, b_in, b_out):
    """SwiGLU MoE with every expert applied to every token: no row plan and no loop."""
    h = torch.einsum("td,efd->tef", x, w_in) + b_in
    gate, up = h.chunk(2, dim=-1)
    o = torch.einsum("tef,edf->ted", torch.nn.functional.silu(gate) * up, w_out) + b_out
    one_hot = topk_indices[..., None] == torch.arange(w_in.shape[0])
    s = (one_hot * (topk_weights * fits)[..., None]).sum(1)
    return torch.einsum("te,ted->td", s, o)


@instantiate_parametrized_tests
class TestMoePermutationReference(TestCase):
    def test_by_hand(self):
        indices = torch.tensor([[1, 0], [1, 3], [-1, 1]])
        plan = moe_permutation_reference(indices, 3, num_rows=8, row_alignment=2)
        self.assertEqual(plan.counts.tolist(), [1, 3, 0])
        self.assertEqual(plan.offs.tolist(), [2, 6, 6])
        self.assertEqual(plan.row_slots.tolist(), [1, -1, 0, 2, 5, -1, -1, -1])
        self.assertEqual(plan.slot_rows.tolist(), [[2, 0], [3, -1], [-1, 4]])

    @all_cases
    def test_agrees_with_sort(self, case):
        indices = case.topk_indices()
        E, a = case.num_experts, case.row_alignment
        plan = moe_permutation_reference(
            indices, E, num_rows=case.num_rows, row_alignment=a
        )
        flat = indices.reshape(-1)
        flat = flat.where(flat >= 0, E)
        counts = torch.bincount(flat, minlength=E + 1)[:E]
        ends = ((counts + a - 1) // a * a).cumsum(0)
        starts = torch.cat([torch.zeros(1, dtype=ends.dtype), ends])[:E]
        order = flat.argsort(stable=True)[: int(counts.sum())]
        rank = torch.arange(len(order)) - (counts.cumsum(0) - counts)[flat[order]]
        rows = starts[flat[order]] + rank
        fits = rows < case.rows
        expected_rows = torch.full_like(flat, -1)
        expected_rows[order[fits]] = rows[fits]
        expected_slots = torch.full((case.rows,), -1)
        expected_slots[rows[fits]] = order[fits]
        self.assertEqual(plan.counts.long(), counts)
        self.assertEqual(plan.offs.long(), ends.clamp(max=case.rows))
        self.assertEqual(plan.row_slots.long(), expected_slots)
        self.assertEqual(plan.slot_rows.long(), expected_rows.view_as(indices))

    def test_default_num_rows_holds_every_routing(self):
        for E, slots, a in itertools.product((1, 2, 3), (0, 1, 4), (1, 3, 4)):
            bound = default_num_rows(slots, E, a)
            for routing in itertools.product(range(E), repeat=slots):
                indices = torch.tensor(routing, dtype=torch.int64).view(-1, 1)
                plan = moe_permutation_reference(indices, E, row_alignment=a)
                self.assertEqual(len(plan.row_slots), bound)
                self.assertTrue((plan.slot_rows >= 0).all())

    def test_index_outside(self):
        with self.assertRaisesRegex(ValueError, r"\[-1, 3\], got 4 at slot 1"):
            moe_permutation_reference(torch.tensor([[0, 4]]), 3)


@instantiate_parametrized_tests
class TestMoeMlpReference(TestCase):
    @all_activations
    def test_activation(self, activation, gate_interleaved):
        gate = [-9.0, -1.5, -0.25, 0.0, 0.5, 2.0, 8.5]
        up = [8.0, -9.5, 0.5, 1.0, -2.0, 0.25, 3.0]
        preact = torch.tensor([gate, up], dtype=torch.float64)
        if activation not in GATED_ACTIVATIONS:
            preact = preact[:1]
        preact = (preact.T if gate_interleaved else preact).reshape(1, -1)
        actual = apply_activation(preact, activation, gate_interleaved=gate_interleaved)
        expected = [
            scalar_activation(activation, g, u) for g, u in zip(gate, up, strict=True)
        ]
        self.assertEqual(actual[0], torch.tensor(expected, dtype=torch.float64))

    def test_alpha_and_limit(self):
        preact = torch.tensor([[3.0, -5.0]], dtype=torch.float64)
        actual = apply_activation(preact, "swiglu_oai", alpha=1.0, limit=2.0)
        expected = 2.0 / (1 + math.exp(-2.0)) * (-2.0 + 1)
        self.assertEqual(actual.item(), expected)

    @all_cases
    def test_agrees_with_dense(self, case):
        ops = case.operands(
            torch.float64, bias=True, weights_dtype=torch.float64, requires_grad=True
        )
        operands = ops.differentiable()[:6]
        expected = dense_moe_mlp(
            ops.input,
            ops.topk_indices,
            ops.slot_rows >= 0,
            *(ops.topk_weights, ops.w_in, ops.w_out, ops.b_in, ops.b_out),
        )
        output, _ = moe_mlp_reference(*ops.args())
        self.assertEqual(output, expected)
        grads = moe_mlp_backward_reference(ops.grad_out, *ops.args())
        expected_grads = torch.autograd.grad(expected, operands, ops.grad_out)
        for name, grad, expected_grad in zip(grads._fields, grads, expected_grads):
            self.assertEqual(grad, expected_grad, msg=lambda m, n=name: f"{n}: {m}")

    def test_gradcheck(self):
        case = MoeCase("tiny", 3, 4, 3, num_experts=3, routing="sentinels", num_rows=7)
        ops = case.operands(
            torch.float64, weights_dtype=torch.float64, bias=True, requires_grad=True
        )
        self.assertTrue(torch.autograd.gradcheck(moe_mlp_reference, ops.args()))

    def test_preact(self):
        ops = get_case("aligned_tail").operands(torch.float64)
        _, preact = moe_mlp_reference(*ops.args())
        self.assertEqual(preact.shape, (64, 2 * 24))
        padding = ops.row_slots < 0
        self.assertTrue(padding[int(ops.offs[-1]) :].all())
        self.assertEqual(preact[padding].abs().max().item(), 0)
        row = int((ops.row_slots >= 0).nonzero()[-1])
        slot = int(ops.row_slots[row])
        expert = int(ops.topk_indices.view(-1)[slot])
        self.assertEqual(preact[row], ops.w_in[expert] @ ops.input[slot // 2])

    def test_expert_major_rows(self):
        ops = MoeCase("rows", num_tokens=9, top_k=1).operands(torch.float64)
        order = ops.row_slots.long()
        plain, _ = moe_mlp_reference(*ops.args())
        rows, _ = moe_mlp_reference(
            ops.input[order],
            ops.w_in,
            ops.w_out,
            ops.offs,
            ops.topk_weights[order],
        )
        self.assertEqual(rows, plain[order])

    @all_cases
    @parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_unfused_is_near(self, case, dtype):
        # If the yardstick itself were inaccurate, the tolerance would allow anything.
        ops = case.operands(dtype, bias=True, weights_dtype=None)
        eps = torch.finfo(dtype).eps
        output, _ = moe_mlp_reference(*ops.args())
        unfused, _ = moe_mlp_unfused(*ops.args())
        self.assertEqual(unfused.dtype, dtype)
        grads = moe_mlp_backward_reference(ops.grad_out, *ops.args())
        unfused_grads = moe_mlp_backward_unfused(ops.grad_out, *ops.args())
        self.assertIsNone(grads.grad_topk_weights)
        pairs = [(unfused, output), *zip(unfused_grads, grads)]
        for y, ref in pairs:
            if ref is None or ref.numel() == 0:
                continue
            self.assertLessEqual((y - ref).abs().max(), 16 * eps * ref.abs().max())


class TestMoeTopkReference(TestCase):
    def test_plain(self):
        logits = torch.randn(5, 3, 8, dtype=torch.float64)
        for score in ("softmax", "sigmoid"):
            scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
            top = scores.topk(3)
            indices, weights = moe_topk_reference(
                logits, 3, score=score, normalize=False, scale=2.0
            )
            self.assertEqual(indices, top.indices)
            self.assertEqual(weights, top.values * 2)
            _, weights = moe_topk_reference(logits, 3, score=score)
            self.assertEqual(weights.sum(-1), torch.ones(5, 3, dtype=torch.float64))

    def test_ties_go_to_the_lower_index(self):
        indices, _ = moe_topk_reference(torch.tensor([[0.0, 1.0, 1.0, 1.0]]), 2)
        self.assertEqual(indices.tolist(), [[1, 2]])

    def test_bias_selects_only(self):
        logits = torch.tensor([[0.0, 1.0, 2.0]])
        bias = torch.tensor([9.0, 0.0, 0.0])
        indices, weights = moe_topk_reference(
            logits, 2, score="sigmoid", bias=bias, normalize=False
        )
        self.assertEqual(indices.tolist(), [[0, 2]])
        self.assertEqual(weights, logits.double().sigmoid()[:, [0, 2]])

    def test_groups(self):
        # Without bias the group with the single best expert wins. With bias the group with the best pair wins.
        logits = torch.tensor([[4.0, -4.0, 3.0, 3.0]])
        indices, _ = moe_topk_reference(
            logits, 2, score="sigmoid", num_groups=2, top_groups=1
        )
        self.assertEqual(indices.tolist(), [[0, 1]])
        indices, _ = moe_topk_reference(
            logits,
            2,
            score="sigmoid",
            num_groups=2,
            top_groups=1,
            bias=torch.zeros(4),
        )
        self.assertEqual(indices.tolist(), [[2, 3]])


@instantiate_parametrized_tests
class TestCheckClose(TestCase):
    def setUp(self):
        super().setUp()
        self.reference = torch.tensor([1.0, -4.0], dtype=torch.float64)
        self.unfused = self.reference + torch.tensor([0.0, 0.5])
        self.bound = 2 * 0.5 + 4 * torch.finfo(torch.float32).eps * 4

    def test_bound(self):
        error, bound = error_and_bound(
            self.unfused, self.reference, self.unfused, torch.float32
        )
        self.assertEqual((error, bound), (0.5, self.bound))

    def test_within_and_beyond(self):
        for factor, allowed in ((0.999, True), (1.001, False)):
            actual = self.reference + torch.tensor([factor * self.bound, 0.0])
            args = (actual, self.reference, self.unfused, torch.float32, "grad_w_in")
            if allowed:
                check_close(*args)
            else:
                with self.assertRaisesRegex(AssertionError, "grad_w_in: error 1.001"):
                    check_close(*args)

    @parametrize("shape", [(2, 16), (2, 4, 4)])
    def test_each_expert(self, shape):
        """One that is small next to the others is no longer right if it is lost."""
        reference = torch.ones(shape, dtype=torch.float64)
        reference[1] = 1 / 32
        check_close(reference, reference, reference, torch.bfloat16)
        actual = reference.clone()
        actual[1] = 0
        with self.assertRaisesRegex(AssertionError, "error 3.125e-02"):
            check_close(actual, reference, reference, torch.bfloat16)

    def test_nan_and_shape(self):
        nan = torch.tensor([float("nan"), -4.0])
        with self.assertRaisesRegex(AssertionError, "nan"):
            check_close(nan, self.reference, self.unfused, torch.float32)
        with self.assertRaisesRegex(AssertionError, r"shape \(1, 2\)"):
            check_close(self.unfused[None], self.reference, self.unfused, torch.float32)


@instantiate_parametrized_tests
class TestMoeGenerators(TestCase):
    def test_names_are_unique(self):
        names = [case.name for case in moe_cases()]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual({case.routing for case in moe_cases()}, set(ROUTINGS))

    @all_cases
    def test_operands(self, case):
        ops = case.operands(torch.bfloat16, activation="silu", bias=True)
        T, D, F = case.num_tokens, case.dim, case.hidden
        E, K = case.num_experts, case.top_k
        shapes = [None if x is None else tuple(x.shape) for x in ops.args()]
        self.assertEqual(
            shapes,
            [(T, D), (E, F, D), (E, D, F), (E,)]
            + [(T, K), (case.rows,), (T, K), (E, F), (E, D), None],
        )
        self.assertEqual(ops.topk_indices, case.topk_indices())
        again = case.operands(torch.bfloat16, activation="silu", bias=True)
        self.assertEqual(again.input, ops.input, rtol=0, atol=0)
        self.assertEqual(again.w_out, ops.w_out, rtol=0, atol=0)
        self.assertFalse(ops.grad_out.requires_grad)

    def test_promises(self):
        def load(name):
            case = get_case(name)
            indices = case.topk_indices()
            plan = moe_permutation_reference(
                indices,
                case.num_experts,
                num_rows=case.num_rows,
                row_alignment=case.row_alignment,
            )
            return indices, plan

        _, plan = load("one_expert")
        self.assertEqual((plan.counts > 0).sum(), 1)
        _, plan = load("empty_experts")
        self.assertEqual((plan.counts == 0).tolist(), [True, False] * 3)
        indices, plan = load("sentinels")
        self.assertTrue((indices == -1).any())
        self.assertTrue((indices == 4).any())
        self.assertTrue((plan.slot_rows[0] == -1).all())
        for name in ("tail", "aligned_tail"):
            _, plan = load(name)
            self.assertLess(int(plan.offs[-1]), len(plan.row_slots))
        _, plan = load("aligned")
        self.assertTrue((plan.offs % 8 == 0).all())
        self.assertTrue((plan.counts % 8 != 0).any())
        for name in ("clipped", "clipped_aligned"):
            indices, plan = load(name)
            self.assertEqual(int(plan.offs[-1]), len(plan.row_slots))
            self.assertTrue(((plan.slot_rows < 0) & (indices >= 0)).any())
        _, plan = load("no_rows")
        self.assertTrue((plan.slot_rows == -1).all())
        case = get_case("ragged")
        self.assertTrue(case.dim % 8 and case.hidden % 8)

    def test_zipf_is_skewed(self):
        case = MoeCase("skew", num_tokens=4096, num_experts=8, top_k=1, routing="zipf")
        shares = torch.bincount(case.topk_indices().view(-1), minlength=8) / 4096
        expected = 1 / torch.arange(1, 9)
        self.assertEqual(shares, expected / expected.sum(), rtol=0, atol=0.03)

    @parametrize("routing", ["uniform", "zipf", "empty_experts", "skewed"])
    def test_experts_of_a_token_are_distinct(self, routing):
        E, K = (64, 8) if routing == "skewed" else (8, 3)
        case = MoeCase("t", num_tokens=50, num_experts=E, top_k=K, routing=routing)
        ordered = case.topk_indices().sort(dim=1).values
        self.assertTrue((ordered[:, 1:] > ordered[:, :-1]).all())

    def test_skewed_is_as_skewed_as_trained_models(self):
        case = MoeCase("skew", 4096, num_experts=64, top_k=8, routing="skewed")
        counts = torch.bincount(case.topk_indices().view(-1), minlength=64).double()
        self.assertEqual(counts.max() / counts.mean(), 5.0, rtol=0, atol=0.5)


if __name__ == "__main__":
    run_tests()
