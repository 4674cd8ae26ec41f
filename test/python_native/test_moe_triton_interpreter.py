# Owner(s): ["module: dsl-native-ops"]
"""What the Triton kernels of the MoE ops compute and which memory they touch.

The kernels run in Triton's interpreter on CPU tensors, against the float64 loops
of moe_reference.py, with every fresh allocation filled with NaN and with every
load and store checked. Speed and code generation: test_moe_triton_static_gate.py.
"""

import os


# Before anything can import Triton: its own helpers decide at import time.
os.environ["TRITON_INTERPRET"] = "1"

import contextlib
import dataclasses
import itertools
from unittest import mock

from triton.runtime.errors import InterpreterError
from triton_interpreter import CheckedMemory, require_interpreter, shuffled_programs

import torch
from torch._native.ops.moe import triton_impl
from torch._native.ops.moe.triton_kernels import launch, matmuls, permutation, topk
from torch._native.ops.moe.triton_kernels.configs import (
    FORWARD_KERNELS,
    KERNELS,
    TileConfig,
)
from torch._native.ops.moe.triton_kernels.experts import (
    Activation,
    Experts,
    GATED_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
)
from torch._native.ops.moe.triton_kernels.rows import Rows
from torch.testing._internal.common_moe import all_cases, slow_subtest, to_meta
from torch.testing._internal.common_utils import (
    DeterministicGuard,
    instantiate_parametrized_tests,
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
    moe_mlp_backward_reference,
    moe_mlp_reference,
    moe_permutation_reference,
)


require_interpreter()

ALL = (True,) * 7


def make_plan(**config) -> launch.LaunchPlan:
    """One tile configuration for all kernels, and three multiprocessors."""
    config = {
        "block_m": 32,
        "block_n": 32,
        "block_k": 32,
        "num_warps": 4,
        "num_stages": 2,
        **config,
    }
    return launch.LaunchPlan(
        {kernel: (TileConfig(**config),) for kernel in KERNELS}, num_sms=3
    )


# The two forms that ship: pointers with a program per tile, and TMA with a loop
# over tiles. The small columns make F and D span several tiles.
POINTERS = make_plan(block_n=16, epilogue_parts=2)
TMA = make_plan(block_n=32, epilogue_parts=4, tma=True, programs_per_sm=1)
SLOW_TMA = slow_subtest(TMA, name="tma")


def layer(plan, args, grad_out, act=Activation()):
    """Output, pre-activations and gradients."""
    experts = Experts(*args, act=act)
    output, preact = launch.moe_mlp_forward(plan, experts)
    grads = launch.moe_mlp_backward(plan, experts, grad_out, preact, ALL)
    return output, preact, *grads


class MoeKernelTestCase(CheckedMemory, TestCase):
    def check_against_reference(
        self, args, grad_out, plan, act=None, output_mask=ALL, **kwargs
    ):
        """Forward and backward of ``args`` within the tolerance; returns the results."""
        act = Activation() if act is None else act
        kwargs = dataclasses.asdict(act)
        experts = Experts(*args, act=act)
        output, preact = launch.moe_mlp_forward(plan, experts)
        check_moe_mlp((output, preact), args, **kwargs)
        grads = launch.moe_mlp_backward(plan, experts, grad_out, preact, output_mask)
        check_moe_mlp_backward(grads, grad_out, args, output_mask, **kwargs)
        return output, preact, grads


class TestMoePermutation(MoeKernelTestCase):
    def check(self, topk_indices, num_experts, **kwargs):
        actual = permutation.moe_permutation(topk_indices, num_experts, **kwargs)
        expected = moe_permutation_reference(topk_indices, num_experts, **kwargs)
        for name, a, b in zip(expected._fields, actual, expected):
            self.assertEqual(a, b, atol=0, rtol=0, msg=lambda m: f"{name}: {m}")

    @all_cases
    @parametrize("dtype", [torch.int32, torch.int64])
    @parametrize("alone", [False, slow_subtest(True)])
    def test_cases(self, case, dtype, alone):
        # All of them fit in one block; without that kernel they take several.
        limits = {"_BLOCK_SLOTS": 1024 if alone else -1, "_SLOTS_PER_PROGRAM": 32}
        with mock.patch.multiple(permutation, **limits):
            self.check(
                case.topk_indices().to(dtype),
                case.num_experts,
                num_rows=case.num_rows,
                row_alignment=case.row_alignment,
            )

    @parametrize("num_slots,num_rows,num_experts", [(1024, 8192, 1023), (1, 1, 1)])
    def test_largest_block(self, num_slots, num_rows, num_experts):
        ids = torch.randint(-1, num_experts + 1, (num_slots, 1))
        launched = []
        original = permutation.permute_block_kernel.run

        def run(*args, **kwargs):
            launched.append(kwargs["grid"])
            return original(*args, **kwargs)

        with (
            mock.patch.object(permutation.permute_block_kernel, "run", run),
            mock.patch.object(permutation, "_SLOTS_PER_PROGRAM", 128),
        ):
            self.check(ids, num_experts, num_rows=num_rows)
            self.assertEqual(len(launched), 1)
            for slots, rows, experts in ((1025, 1, 1), (1, 8193, 1), (1, 1, 1024)):
                ids = torch.zeros(slots, 1, dtype=torch.int64)
                permutation.moe_permutation(ids, experts, num_rows=rows)
            self.assertEqual(len(launched), 1)

    def test_aligned_starts_beyond_int32(self):
        # Experts that start past R, and past int32; their slots did not fit.
        ids = torch.arange(8).repeat(3)[:, None]
        for limit in (1024, -1):
            limits = {"_BLOCK_SLOTS": limit, "_SLOTS_PER_PROGRAM": 16}
            with mock.patch.multiple(permutation, **limits):
                self.check(ids, 8, num_rows=5, row_alignment=2**31 - 1)

    def test_many_blocks_of_slots(self):
        case = MoeCase(
            "many", num_tokens=150, num_experts=64, top_k=8, routing="skewed"
        )
        with mock.patch.object(permutation, "_SLOTS_PER_PROGRAM", 256):
            self.check(case.topk_indices(), 64)
            self.check(case.topk_indices(), 64, num_rows=700, row_alignment=16)

    @parametrize("num_experts", [1, 63, 64, 65, 300])
    def test_num_experts(self, num_experts):
        indices = torch.randint(-1, num_experts + 1, (3, 40)).t()
        self.check(indices, num_experts, row_alignment=4)


class TestMoeMlp(MoeKernelTestCase):
    @all_cases
    @parametrize("plan", [subtest(POINTERS, name="pointers"), subtest(TMA, name="tma")])
    def test_cases(self, case, plan):
        act = Activation(gate_interleaved=plan is TMA)
        operands = case.operands(torch.bfloat16, bias=True)
        self.check_against_reference(operands.args(), operands.grad_out, plan, act)
        if case.num_tokens and case.rows:
            self.assertGreater(self.sanitizer.num_accesses, 0)

    @parametrize("stride", [(0, 0), (2, 1), (0, 1)])
    def test_strides_of_router_weights(self, stride):
        # With top-1 the weights may be a column of a larger tensor, or one number for all.
        operands = get_case("top_1").operands(torch.bfloat16, bias=True)
        weights = torch.rand(64).as_strided(operands.topk_weights.shape, stride)
        args = dataclasses.replace(operands, topk_weights=weights).args()
        self.check_against_reference(args, operands.grad_out, POINTERS)

    @parametrize("case", ["uniform", "no_rows"])
    def test_strides_of_gradients(self, case):
        """They are the strides that meta tensors get, whatever those of the operands."""
        operands = get_case(case).operands(torch.bfloat16, bias=True)
        grad_out, *args = (
            x if x is None else x.mT.contiguous().mT if x.dim() > 1 else x
            for x in (operands.grad_out, *operands.args())
        )
        experts = Experts(*args)
        preact = launch.moe_mlp_forward(POINTERS, experts)[1]
        grads = launch.moe_mlp_backward(POINTERS, experts, grad_out, preact, ALL)
        args = (grad_out, *args, preact, ALL)
        expected = torch.ops.aten._moe_mlp_backward(*to_meta(args))
        for i, (grad, meta) in enumerate(zip(grads, expected, strict=True)):
            self.assertEqual(
                (grad.shape, grad.stride()), (meta.shape, meta.stride()), i
            )

    @parametrize(
        "activation,gate_interleaved",
        [(name, False) for name in (*GATED_ACTIVATIONS, *PLAIN_ACTIVATIONS)]
        + [slow_subtest((name, True)) for name in GATED_ACTIVATIONS],
    )
    def test_activations(self, activation, gate_interleaved):
        act = Activation(activation, gate_interleaved)
        operands = get_case("zipf").operands(torch.float32, activation=activation)
        self.check_against_reference(operands.args(), operands.grad_out, POINTERS, act)

    def test_swiglu_oai_parameters(self):
        # A limit that most of H exceeds, and both clamps.
        act = Activation("swiglu_oai", alpha=0.7, limit=0.4)
        operands = get_case("uniform").operands(torch.float32, bias=True)
        self.check_against_reference(operands.args(), operands.grad_out, TMA, act)

    @parametrize("activation", ["swiglu", "geglu"])
    @parametrize("gate_interleaved", [False, True])
    def test_limit(self, activation, gate_interleaved):
        act = Activation(activation, gate_interleaved, limit=0.4)
        operands = get_case("uniform").operands(torch.bfloat16, bias=True)
        self.check_against_reference(operands.args(), operands.grad_out, TMA, act)

    @parametrize("activation", ["swiglu", "geglu", "swiglu_oai"])
    def test_gradient_at_the_limit_is_that_of_clamp(self, activation):
        gates = torch.tensor([-1.0, 0.5, 2.984375, 3.0, 5.0])
        ups = torch.tensor([-5.0, -3.0, -2.984375, 0.5, 2.984375, 3.0, 5.0])
        gate, up = torch.cartesian_prod(gates, ups).bfloat16().unbind(1)
        operands = one_token_with_preact(torch.cat([gate, up]), len(gate), 1.0)
        self.check_preact(operands, Activation(activation, limit=3.0))

    def check_preact(self, operands, act):
        """Activation and its gradient for the pre-activation that is b_in."""
        kwargs = {"activation": act.activation, "limit": act.limit}
        experts = Experts(*operands.args(), act=act)
        output, preact = launch.moe_mlp_forward(POINTERS, experts)
        self.assertEqual(preact, operands.b_in, rtol=0, atol=0)
        mask = (False,) * 4 + (True, False, False)
        grad = launch.moe_mlp_backward(
            POINTERS, experts, operands.grad_out, preact, mask
        )[4]
        expected, _ = moe_mlp_reference(*operands.args(), **kwargs)
        tolerance = {"rtol": 4 * torch.finfo(output.dtype).eps, "atol": 1e-30}
        self.assertEqual(output.double(), expected, **tolerance)
        expected = moe_mlp_backward_reference(
            operands.grad_out, *operands.args(), **kwargs
        )
        self.assertEqual(grad.double(), expected.grad_b_in, **tolerance)

    @parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @parametrize("activation", ["silu", "swiglu", "swiglu_oai"])
    def test_extreme_gates(self, activation, dtype):
        gates = extreme_gates(dtype)
        preact = gates if activation == "silu" else torch.cat([gates, gates.sign() / 2])
        operands = one_token_with_preact(preact, len(gates), 1.0)
        self.check_preact(operands, Activation(activation))

    @parametrize("dtype", [torch.bfloat16, torch.float32])
    @parametrize("activation", ["relu", "relu2"])
    def test_infinite_gradient(self, activation, dtype):
        # Zero where the gate is not positive, not NaN.
        preact = torch.tensor([-2.0, -0.0, 0.0, 3.0], dtype=dtype)
        operands = one_token_with_preact(preact, 4, float("inf"))
        operands = dataclasses.replace(operands, w_out=torch.ones_like(operands.w_out))
        self.check_preact(operands, Activation(activation))

    @parametrize("interleaved", [False, True])
    def test_infinite_gradient_stays_in_the_experts_of_its_token(self, interleaved):
        # Rows that hold no slot read token 0, and their expert's weights sum them.
        operands = get_case("aligned").operands(torch.bfloat16)
        act = Activation(gate_interleaved=interleaved)

        def grads(value):
            grad_out = operands.grad_out.index_fill(0, torch.tensor(0), value)
            return layer(TMA, operands.args(), grad_out, act)[3:5]

        own = torch.searchsorted(operands.offs, operands.slot_rows[0], right=True)
        for clean, dirty in zip(grads(0.0), grads(float("inf"))):
            self.assertFalse(dirty[own].isfinite().all())
            dirty[own] = clean[own]
            self.assertEqual(dirty, clean, atol=0, rtol=0)

    @parametrize("dtype", [torch.float16, torch.float32])
    @parametrize("weights_dtype", [None, torch.float32, "input"])
    def test_dtypes(self, dtype, weights_dtype):
        weights_dtype = dtype if weights_dtype == "input" else weights_dtype
        operands = get_case("aligned").operands(
            dtype, weights_dtype=weights_dtype, bias=True
        )
        self.check_against_reference(operands.args(), operands.grad_out, TMA)

    @parametrize(
        "block",
        [
            subtest((64, 64, 64), name="larger_than_the_problem"),
            subtest((16, 16, 16), name="many_tiles"),
            subtest((32, 16, 64), name="rows_in_one_step"),
        ],
    )
    @parametrize("tma", [False, True])
    def test_blocks(self, block, tma):
        m, n, k = block
        plan = make_plan(block_m=m, block_n=n, block_k=k, tma=tma, group_m=2)
        operands = MoeCase("blocks", num_tokens=40, dim=48, hidden=32).operands(
            torch.bfloat16
        )
        self.check_against_reference(operands.args(), operands.grad_out, plan)

    def test_weight_gradient_of_an_expert_reads_no_other_rows(self):
        # TMA reads blocks of rows, which no expert's end and not the last row divides.
        operands = get_case("zipf").operands(torch.bfloat16)
        num_rows = len(operands.row_slots)
        end, next_end = operands.offs[:2].tolist()
        self.assertTrue(end % 32 and next_end > end)
        p = torch.randn(num_rows + 5, 48).bfloat16()
        q = torch.randn(num_rows, 32).bfloat16()
        w = torch.empty(len(operands.offs), 48, 32, dtype=torch.bfloat16)
        p[operands.offs[-1] :] = float("nan")

        def grads(**kwargs):
            for ragged in (True, False):
                plan = dataclasses.replace(TMA, ragged=ragged)
                rows = Rows(plan, operands.offs, operands.row_slots, None, 0)
                yield matmuls.weight_grad(rows, p, q, w, **kwargs)

        clean, same = grads(gather_q=True)
        self.assertFalse(clean.isnan().any())
        self.assertEqual(clean, same, atol=0, rtol=0)
        p[end:next_end] = float("inf")
        for dirty in grads(gather_q=True):
            self.assertFalse(dirty[1].isfinite().any())
            dirty[1] = clean[1]
            self.assertEqual(dirty, clean, atol=0, rtol=0)

    @parametrize("offs", [[3, 3, 11, 13], [0, 0, 0, 9], [0, 0, 0, 0]])
    def test_rows_that_are_expert_major_already(self, offs):
        operands = get_case("top_1").operands(torch.bfloat16, bias=True)
        args = list(operands.args())
        args[3] = torch.tensor(offs, dtype=torch.int32)
        args[5] = args[6] = None
        for plan in (POINTERS, TMA):
            self.check_against_reference(args, operands.grad_out, plan)

    @parametrize("tma", [False, True])
    def test_strides(self, tma):
        operands = get_case("zipf").operands(torch.bfloat16, bias=True)
        args = list(operands.args())
        args[0] = args[0].t().contiguous().t()
        for i in (1, 2):  # expert weights stored transposed
            args[i] = args[i].transpose(1, 2).contiguous().transpose(1, 2)
        args[7] = args[7].t().contiguous().t()
        args[8] = args[8][:1].expand_as(args[8])
        grad_out = operands.grad_out[:1].expand_as(operands.grad_out)
        plan = TMA if tma else POINTERS
        _, _, grads = self.check_against_reference(args, grad_out, plan)
        self.assertEqual(grads[1].stride(), args[1].stride())
        self.assertEqual(grads[2].stride(), args[2].stride())

    @parametrize("two_weights", [slow_subtest(False), True])
    def test_output_masks(self, two_weights):
        operands = get_case("sentinels").operands(torch.bfloat16, bias=True)
        if two_weights:
            operands = operands.split_gate()
        for mask in itertools.chain(
            ([i == j for i in range(7)] for j in range(7)), [(False,) * 7]
        ):
            self.check_against_reference(
                operands.args(), operands.grad_out, POINTERS, output_mask=tuple(mask)
            )

    @parametrize("plan", [subtest(POINTERS, name="pointers"), subtest(TMA, name="tma")])
    @parametrize("transposed", [False, True])
    @parametrize(
        "case",
        ["sentinels", "top_1", slow_subtest("zipf")],
    )
    def test_gate_and_up_as_two_weights(self, case, transposed, plan):
        operands = get_case(case).operands(torch.bfloat16, bias=True)
        act = Activation("swiglu", limit=1.5)
        results = []
        for one in (operands, operands.split_gate()):
            args = list(one.args())
            for i in (1, 2, 9):
                if transposed and args[i] is not None:
                    args[i] = args[i].transpose(1, 2).contiguous().transpose(1, 2)
            results.append(self.check_against_reference(args, one.grad_out, plan, act))
        (output, preact, grads), (output_2, preact_2, grads_2) = results
        # Every row is summed as with one weight; dX where no step straddles the halves.
        self.assertEqual(output_2, output, rtol=0, atol=0)
        self.assertEqual(preact_2, preact, rtol=0, atol=0)
        both = torch.cat([grads_2[1], grads_2[6]], 1)
        self.assertEqual(both, grads[1], rtol=0, atol=0)
        for i in (2, 3, 4, 5):
            self.assertEqual(grads_2[i], grads[i], rtol=0, atol=0)

    def test_no_preact_in_inference(self):
        operands = get_case("tail").operands(torch.bfloat16)
        args = (TMA, Experts(*operands.args()))
        expected, _ = launch.moe_mlp_forward(*args)
        output, preact = launch.moe_mlp_forward(*args, compute_preact=False)
        self.assertEqual(preact.shape, (0, operands.w_in.shape[1]))
        self.assertEqual(output, expected, atol=0, rtol=0)

    def test_bits_do_not_depend_on_the_other_tokens(self):
        # Every other token is dropped: its ids become "no expert".
        case = get_case("zipf")
        operands = case.operands(torch.bfloat16, bias=True)

        def run(topk_indices):
            row_slots, slot_rows, offs, _ = permutation.moe_permutation(
                topk_indices, case.num_experts
            )
            args = list(operands.args())
            args[3], args[5], args[6] = offs, row_slots, slot_rows
            output, _, *grads = layer(POINTERS, args, operands.grad_out)
            return output, grads[0], grads[3]

        everyone = run(operands.topk_indices)
        again = run(operands.topk_indices)
        alone = operands.topk_indices.clone()
        alone[1::2] = -1
        for i, (a, b, c) in enumerate(zip(everyone, again, run(alone))):
            self.assertEqual(a, b, atol=0, rtol=0, msg=str(i))
            self.assertEqual(a[::2], c[::2], atol=0, rtol=0, msg=str(i))
            self.assertEqual(c[1::2].abs().max().item(), 0.0, msg=str(i))

    @parametrize("plan", [subtest(POINTERS, name="pointers"), subtest(TMA, name="tma")])
    def test_bits_do_not_depend_on_the_order_of_programs(self, plan):
        # Every kernel: what a program reads no other of its launch writes. The
        # sanitizer watches as well; test_triton_interpreter.py has the racy kernel
        # that both find.
        case = get_case("zipf")
        operands = case.operands(torch.bfloat16, bias=True).split_gate()
        logits = torch.randn(case.num_tokens, case.num_experts)
        act = Activation("swiglu", limit=2.0)

        def run():
            routed = topk.moe_topk(logits, case.top_k)
            grad_logits = topk.moe_topk_backward(routed[1], logits, routed[0])
            # One block, and several.
            permuted = permutation.moe_permutation(routed[0], case.num_experts)
            limits = {"_BLOCK_SLOTS": -1, "_SLOTS_PER_PROGRAM": 16}
            with mock.patch.multiple(permutation, **limits):
                again = permutation.moe_permutation(routed[0], case.num_experts)
            self.assertEqual(permuted, again)
            results = layer(plan, operands.args(), operands.grad_out, act)
            return (*routed, grad_logits, *permuted, *results)

        expected = run()
        for seed in range(3):
            with shuffled_programs(seed):
                for i, (a, b) in enumerate(zip(run(), expected, strict=True)):
                    self.assertEqual(a, b, atol=0, rtol=0, msg=f"seed {seed}, {i}")

    def test_few_rows_take_small_tiles_and_have_the_same_bits(self):
        # Two tables in one: the entry for decoding is used below 4 rows per expert.
        large = TileConfig(64, 16, 32, 4, 2, epilogue_parts=2)
        small = TileConfig(16, 16, 32, 4, 2, max_rows=4)
        table = {
            kernel: (small, large) if kernel in FORWARD_KERNELS else (large,)
            for kernel in KERNELS
        }
        plan = launch.LaunchPlan(table, num_sms=3)
        case = get_case("zipf")  # 74 rows, 8 experts
        operands = case.operands(torch.bfloat16, bias=True)
        chosen = []
        original = matmuls.tile_args

        def tile_args(config, *sizes):
            chosen.append(config)
            return original(config, *sizes)

        def run(num_tokens):
            row_slots, slot_rows, offs, _ = permutation.moe_permutation(
                operands.topk_indices[:num_tokens], case.num_experts
            )
            args = list(operands.args())
            args[0], args[3] = args[0][:num_tokens], offs
            args[4:7] = args[4][:num_tokens], row_slots, slot_rows
            with mock.patch.object(matmuls, "tile_args", tile_args):
                return layer(plan, args, operands.grad_out[:num_tokens])[0]

        batch = run(37)
        self.assertEqual(set(chosen), {large})
        chosen.clear()
        for num_tokens in (1, 16):
            self.assertEqual(run(num_tokens), batch[:num_tokens], atol=0, rtol=0)
        self.assertEqual(set(chosen), {small, large})
        self.assertEqual(chosen[:2], [small, small])

    @parametrize(
        "position,index,value",
        [
            subtest((5, 0, 26), name="slot_past_the_last"),
            subtest((3, -1, 33), name="offset_past_the_last_row"),
            subtest((6, (0, 0), 99), name="row_past_the_last"),
        ],
    )
    def test_sanitizer_finds_a_wrong_index(self, position, index, value):
        # The CPU kernel refuses such metadata; on CUDA it is the caller's contract.
        operands = get_case("uniform").operands(torch.bfloat16)
        args = list(operands.args())
        args[position][index] = value
        with self.assertRaisesRegex(InterpreterError, "out of bounds"):
            launch.moe_mlp_forward(POINTERS, Experts(*args))


class TestOffsetsBeyondInt32(MoeKernelTestCase):
    """Tensors of more than 2^31 elements, of which only the pages in use exist."""

    FAR = 1 << 21  # rows; times 1024 columns it is 2^31 elements
    ROWS, COLUMNS = FAR + 64, 1024

    def storage(self, *shape, dtype=torch.bfloat16):
        with DeterministicGuard(False):
            return torch.empty(shape, dtype=dtype)

    def spread(self, x, stride, offset=0):
        """``x`` in storage whose first dimension has this stride."""
        storage = self.storage((x.shape[0] - 1) * stride + offset + x.stride(0))
        strides = (stride, *x.stride()[1:])
        return storage.as_strided(x.shape, strides, offset).copy_(x)

    @parametrize("plan", [subtest(POINTERS, name="pointers"), SLOW_TMA])
    def test_experts_and_tokens(self, plan):
        case = MoeCase("far", num_tokens=4, num_experts=2, top_k=2)
        operands = case.operands(torch.bfloat16, bias=True)
        args = list(operands.args())
        args[0] = self.spread(args[0], 1 << 30)
        for i in (1, 2, 7, 8):
            args[i] = self.spread(args[i], (1 << 31) + 16)
        grad_out = self.spread(operands.grad_out, 1 << 30)
        self.check_against_reference(args, grad_out, plan)

    @parametrize("transposed", [False, True])
    @parametrize("plan", [subtest(POINTERS, name="pointers"), SLOW_TMA])
    def test_weight_gradients(self, plan, transposed):
        # Far rows of both operands, and far experts of the gradient.
        case = get_case("top_1")
        operands = case.operands(torch.bfloat16)
        rows = Rows(plan, operands.offs, operands.row_slots, None, case.num_tokens)
        num_rows, num_experts = len(operands.row_slots), case.num_experts
        p = torch.randn(num_rows, 48).bfloat16()
        q = torch.randn(case.num_tokens, 32).bfloat16()
        w = torch.empty(num_experts, 48, 32, dtype=torch.bfloat16)
        if transposed:
            w = w.transpose(1, 2).contiguous().transpose(1, 2)
        near = matmuls.weight_grad(rows, p, q, w, gather_q=True)
        far = self.spread(torch.zeros_like(w), 1 << 30)
        with mock.patch.object(torch, "empty_like", lambda _: far):
            matmuls.weight_grad(
                rows,
                self.spread(p, 1 << 28),
                self.spread(q, 1 << 28),
                w,
                gather_q=True,
            )
        self.assertEqual(far.stride(0), 1 << 30)
        self.assertEqual(far, near, atol=0, rtol=0)

    @parametrize("two_weights", [False, True])
    @parametrize("plan", [subtest(POINTERS, name="pointers"), SLOW_TMA])
    def test_strides_of_weight_rows(self, plan, two_weights):
        # (g*F, E, D) storage: a row's offset passes int32, as with 8192 rows of 128
        # experts of 4096 columns. TMA does not care; dW and the pointers must not.
        stride = 1 << 23
        case = MoeCase("rows", num_tokens=4, num_experts=2, top_k=1, hidden=288)
        operands = case.operands(torch.bfloat16)
        if two_weights:
            operands = operands.split_gate()
        args = list(operands.args())
        for i in (1, 9):
            if args[i] is not None:
                far = self.spread(args[i].transpose(0, 1).contiguous(), stride)
                args[i] = far.transpose(0, 1)
                self.assertGreater(args[i].shape[1] * stride, 1 << 31)
        self.check_against_reference(args, operands.grad_out, plan)

    def test_strides_of_weight_gradient_rows(self):
        case = get_case("top_1")
        operands = case.operands(torch.bfloat16)
        rows = Rows(POINTERS, operands.offs, operands.row_slots, None, case.num_tokens)
        p = torch.randn(len(operands.row_slots), 288).bfloat16()
        q = torch.randn(case.num_tokens, 16).bfloat16()
        w = torch.empty(case.num_experts, 288, 16, dtype=torch.bfloat16)
        near = matmuls.weight_grad(rows, p, q, w, gather_q=True)
        far = self.spread(torch.zeros_like(w).transpose(0, 1).contiguous(), 1 << 23)
        far = far.transpose(0, 1)
        with mock.patch.object(torch, "empty_like", lambda _: far):
            matmuls.weight_grad(rows, p, q, w, gather_q=True)
        self.assertEqual(far, near, atol=0, rtol=0)

    def far_rows(self, block_m, plan=POINTERS):
        """Five rows of expert 1 behind FAR rows of expert 0, whose tiles are left out."""
        first, end = self.FAR, self.FAR + 5
        row_slots = torch.full((self.ROWS,), -1, dtype=torch.int32)
        row_slots[first:end] = torch.arange(5, dtype=torch.int32)
        slot_rows = torch.arange(first, end, dtype=torch.int32)[:, None]
        offs = torch.tensor([first, end], dtype=torch.int32)
        rows = Rows(plan, offs, row_slots, slot_rows, 5, torch.rand(5, 1))
        tiles = [[1, 0, 0, 0], [1, first, end, 0]]
        rows._tiles[block_m] = torch.tensor(tiles, dtype=torch.int32)
        return rows, slice(first, end)

    @parametrize("tma", [False, True])
    def test_routed_rows(self, tma):
        # Every tensor of routed rows is far; the near result is that of five rows.
        # Large tiles, as programs walk those of all FAR rows.
        n, block_m = self.COLUMNS, 1024
        plan = make_plan(
            block_m=block_m, block_n=n // 2, block_k=256, tma=tma, programs_per_sm=1
        )
        act = Activation("relu2")
        rows, here = self.far_rows(block_m, plan)
        near = Rows(
            plan,
            torch.tensor([0, 5], dtype=torch.int32),
            torch.arange(5, dtype=torch.int32),
            torch.arange(5, dtype=torch.int32)[:, None],
            5,
            rows.scale[:, None],
        )
        x, grad = torch.randn(2, 5, 32).bfloat16().unbind()
        w_in = torch.randn(2, n, 32).bfloat16()
        w_wide = torch.randn(2, n, n).bfloat16()
        w_out = torch.randn(2, 32, n).bfloat16()
        experts = Experts(x, w_in, w_out, rows.offs, act=act)

        results = []
        for r, which in ((near, slice(None)), (rows, here)):
            preact, hidden = (self.storage(r.num_rows, n) for _ in range(2))
            matmuls.up(r, experts, preact, hidden, True)
            routed = self.storage(r.num_rows, n)
            matmuls.grouped_mm(r, "down", hidden, w_wide, routed, scale=r.scale)
            total = r.combine(routed)
            result = [preact[which].clone(), hidden[which].clone(), total]
            del hidden, routed
            with DeterministicGuard(False):
                dh, scaled, partials = matmuls.act_backward(
                    r, experts, grad, preact, need_hidden=True, need_scale=True
                )
            results.append(
                [*result, dh[which], scaled[which], partials[:, which].clone()]
            )
            del dh, scaled, preact
        names = ("preact", "hidden", "output", "grad_preact", "scaled_hidden", "dS")
        for name, a, b in zip(names, *results):
            self.assertEqual(b, a, atol=0, rtol=0, msg=name)

    def test_zero_tail_and_dS_partials(self):
        rows, _ = self.far_rows(16)
        out = self.storage(self.ROWS, self.COLUMNS)
        out[self.FAR :].fill_(1)
        rows.zero_tail(out)
        tail = out[self.FAR :].float().sum(1)
        self.assertEqual(tail.tolist(), [self.COLUMNS] * 5 + [0] * 59)
        del out

        partials = self.storage(self.COLUMNS + 1, self.ROWS, dtype=torch.float32)
        here = partials[:, self.FAR : self.FAR + 5]
        here.copy_(torch.randint(-8, 8, here.shape))
        grad = rows.scale_grad(partials, torch.empty(5, 1))
        self.assertEqual(grad[:, 0], here.sum(0), atol=0, rtol=0)

    def test_bias_gradients(self):
        operands = get_case("top_1").operands(torch.bfloat16, bias=True)
        rows = Rows(
            POINTERS,
            operands.offs,
            operands.row_slots,
            operands.slot_rows,
            len(operands.input),
        )
        source = torch.randn(rows.num_rows, 32).bfloat16()
        far = self.spread(source, 1 << 28)
        for options in ({}, {"gather": True}):
            expected = rows.bias_grad(source, operands.b_out, **options)
            actual = rows.bias_grad(far, operands.b_out, **options)
            self.assertEqual(actual, expected, atol=0, rtol=0)


class TestMoeDispatch(MoeKernelTestCase):
    """The implementations of triton_impl.py behind the ops, with their autograd."""

    def setUp(self):
        super().setUp()
        lib = self.enter_context(torch.library._scoped_library("aten", "IMPL"))
        self.calls = []
        for op, impl in (
            ("_moe_permutation", triton_impl._permutation_impl),
            ("_moe_mlp", triton_impl._mlp_impl),
            ("_moe_mlp_backward", triton_impl._mlp_backward_impl),
        ):

            def counted(*args, op=op, impl=impl, **kwargs):
                self.calls.append(op)
                # The interpreter keeps references to the storages of its arguments;
                # a debug build checks that an op's results have none.
                return tuple(x.clone() for x in impl(*args, **kwargs))

            lib.impl(op, counted, "CPU", allow_override=True)
        # There is no device to ask, and none to make current.
        for name, replacement in (
            ("launch_plan", lambda index: POINTERS),
            ("on_device", lambda tensor: contextlib.nullcontext()),
        ):
            self.enter_context(mock.patch.object(triton_impl, name, replacement))

    def enter_context(self, context):
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def test_functional_and_autograd(self):
        operands = get_case("sentinels").operands(
            torch.float32, bias=True, requires_grad=True
        )
        leaves = [
            getattr(operands, name)
            for name in ("input", "w_in", "w_out", "topk_weights", "b_in", "b_out")
        ]
        x, w_in, w_out, weights, b_in, b_out = leaves
        output = torch.nn.functional.moe_mlp(
            x, operands.topk_indices, weights, w_in, w_out, b_in=b_in, b_out=b_out
        )
        grads = torch.autograd.grad(output, leaves, operands.grad_out)
        self.assertEqual(
            self.calls, ["_moe_permutation", "_moe_mlp", "_moe_mlp_backward"]
        )
        args = [x if x is None else x.detach() for x in operands.args()]
        check_moe_mlp((output,), args)
        grads = (*grads, torch.empty(0))
        check_moe_mlp_backward(grads, operands.grad_out, args)

    def test_schema_defaults_and_keywords(self):
        operands = get_case("zipf").operands(torch.bfloat16, activation="relu2")
        output, preact = torch.ops.aten._moe_mlp(
            *operands.args()[:7], activation="relu2", compute_preact=False
        )
        check_moe_mlp((output,), operands.args(), activation="relu2")
        self.assertEqual(preact.shape[0], 0)


instantiate_parametrized_tests(TestMoePermutation)
instantiate_parametrized_tests(TestMoeMlp)
instantiate_parametrized_tests(TestOffsetsBeyondInt32)

if __name__ == "__main__":
    run_tests()
