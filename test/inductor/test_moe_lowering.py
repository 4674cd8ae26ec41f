# Owner(s): ["module: inductor"]
"""What the MoE ops become in code that Inductor generates for CUDA. Runs without a GPU."""

import fake_gpu


fake_gpu.require()  # before torch

import re
from collections import Counter
from functools import partial
from unittest import mock

import moe_lowering_problems

import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._inductor.codecache import compiled_fx_graph_hash
from torch._inductor.kernel.moe_autotune import even_routing
from torch._native.ops.moe import proven, triton_impl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.moe_kernel import moe_kernel, MoeBackend
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
    TestCase,
)


ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
D, HIDDEN, E, K = 256, 128, 8, 2
# Kernels of the router and the permutation.
ROUTING = ("topk", "permute", "count", "scan", "expert_offsets", "scatter")

# Those of the router may be left.
moe_calls = partial(moe_lowering_problems.moe_calls, op="_moe_mlp")


def block(x, router, w_in, w_out, norm):
    """A router, its experts, the residual and the norm of the next block."""
    ids, weights = F.moe_topk(F.linear(x, router), K)
    x = x + F.moe_mlp(x, ids, weights, w_in, w_out)
    return x, F.rms_norm(x.float(), (D,)).to(x.dtype) * norm


def operands(*, tokens=512, dtype=torch.bfloat16, hidden=HIDDEN, grad=False):
    def empty(*shape):
        return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=grad)

    return (
        empty(tokens, D),
        empty(E, D),
        empty(E, 2 * hidden, D),
        empty(E, D, hidden),
        empty(D),
    )


def emit_block(arch="sm_90", *, dynamic=False, change=None, pick=None, **options):
    """The graphs of ``block`` on operands of ``options``, which ``change`` may replace."""
    with (
        fake_gpu.fake_gpu(arch, pick),
        FakeTensorMode(),
        torch.set_grad_enabled(options.get("grad", False)),
    ):
        args = operands(**options)
        if change is not None:
            args = change(*args)
        if dynamic:
            torch._dynamo.mark_dynamic(args[0], 0)
        return fake_gpu.emitted(torch.compile(block, fullgraph=True), *args)


@config.patch({"triton.moe_kernels": True})
@instantiate_parametrized_tests
class TestMoeLowering(TestCase):
    @parametrize("arch", ARCHITECTURES)
    @parametrize("dynamic", [False, True])
    def test_block_fuses_combine_residual_and_norm(self, arch, dynamic):
        (graph,) = emit_block(arch, dynamic=dynamic)
        self.assertEqual(moe_calls(graph), [])
        *ours, last = graph.launched
        experts = Counter(n for n in ours if not n.startswith(ROUTING))
        self.assertEqual(
            experts,
            Counter(schedule_tiles_kernel=1, up_kernel=1, grouped_mm_kernel=1),
        )
        for part in ("moe_mlp", "add", "rms_norm"):
            self.assertIn(part, last)

    @parametrize("dynamic", [False, True])
    def test_training_block(self, dynamic):
        forward, backward = emit_block(dynamic=dynamic, grad=True)
        self.assertEqual(moe_calls(forward, backward), [])
        ours = Counter(backward.launched)
        for name, count in (
            ("act_backward_kernel", 1),
            ("scale_grad_kernel", 1),
            ("grouped_mm_kernel", 1),
            ("weight_grad_kernel", 2),
            ("combine_kernel", 0),
        ):
            self.assertEqual(ours[name], count, name)
        # dX is summed and added to the gradient of the residual by one kernel.
        sums = [name for name in backward.launches if "moe_mlp_backward" in name]
        self.assertEqual(len(sums), 1, sums)
        self.assertIn("add", sums[0])

    @parametrize("training", [False, True])
    def test_flag(self, training):
        with config.patch({"triton.moe_kernels": False}):
            graphs = emit_block(grad=training)
        for graph in graphs:
            self.assertEqual(len(moe_calls(graph)), 1)
            self.assertFalse([n for n in graph.kernels if n.endswith("mm_kernel")])

    def test_cpp_wrapper(self):
        with config.patch(cpp_wrapper=True):
            (graph,) = emit_block(dynamic=True)
            with config.patch({"triton.moe_kernels": False}):
                (without,) = emit_block(dynamic=True)
        self.assertEqual(moe_calls(graph), [])
        self.assertIn("grouped_mm_kernel", graph.kernels)
        # Which calls the composite: no Triton kernel is left.
        self.assertEqual(moe_calls(without), ["aoti_torch_cuda__moe_mlp"])

    def test_no_operand_is_copied(self):
        # Weights as gpt-oss stores them, and a slice of a longer token tensor.
        def change(x, router, w_in, w_out, norm):
            longer = torch.empty(1024, D, dtype=x.dtype, device="cuda")
            w_in, w_out = (w.mT.contiguous().mT for w in (w_in, w_out))
            return longer[:512], router, w_in, w_out, norm

        (graph,) = emit_block(change=change)
        self.assertEqual(moe_calls(graph), [])
        made = re.findall(r"empty_strided_cuda\(\((\d+), (\d+), \d+\)", graph.source)
        self.assertEqual(made, [])

    @parametrize(
        "what,reason",
        [
            ("float32", "dtype torch.float32 is not one of"),
            ("hidden", "F = 24 is not a positive multiple of 16"),
            ("unaligned", "w_in is not known to be aligned to 16 bytes"),
            ("dynamic_experts", "w_in has dynamic sizes"),
            ("strided", "neither of the last two dimensions of w_out is contiguous"),
            ("no_tokens", "there are no tokens"),
            ("arch", "compute capability"),
        ],
    )
    def test_reason_of_an_extern_call(self, what, reason):
        def change(x, router, w_in, w_out, norm):
            if what == "unaligned":
                flat = torch.empty(w_in.numel() + 1, dtype=w_in.dtype, device="cuda")
                w_in = flat[1:].view_as(w_in)
            elif what == "dynamic_experts":
                for x_by_expert in (router, w_in, w_out):
                    torch._dynamo.maybe_mark_dynamic(x_by_expert, 0)
            elif what == "strided":
                w_out = torch.empty(
                    *w_out.shape[:2], 2 * HIDDEN, dtype=w_out.dtype, device="cuda"
                )[..., ::2]
            return x, router, w_in, w_out, norm

        options = {
            "float32": {"dtype": torch.float32},
            "hidden": {"hidden": 24},
            "no_tokens": {"tokens": 0},
        }.get(what, {})
        with self.assertLogs("torch._inductor.kernel.moe", "INFO") as logs:
            served = ((8, 0),) if what == "arch" else triton_impl._CAPABILITIES
            with mock.patch.object(triton_impl, "_CAPABILITIES", served):
                graphs = emit_block(change=change, **options)
        # An op without elements in its result is not called at all.
        self.assertEqual(len(moe_calls(graphs[0])), int(what != "no_tokens"))
        self.assertIn(reason, "\n".join(logs.output))

    @slowTest
    @parametrize("arch", ARCHITECTURES)
    def test_emitted_kernels_pass_the_static_gate(self, arch):
        # Sizes of a real layer: the tiles that ship.
        with mock.patch.dict(globals(), D=2048, HIDDEN=768, E=64, K=8):
            graphs = emit_block(arch, tokens=4096, hidden=768, dynamic=True, grad=True)
        for graph in graphs:
            reports = fake_gpu.compiled(graph, arch)
            self.assertEqual(len(reports), len(graph.kernels))
            for report in reports:
                matmul = report.kernel.startswith(
                    ("up_", "grouped_mm", "act_backward", "weight_grad")
                )
                tma = matmul and arch != "sm_80" and "weight_grad" not in report.kernel
                problems = report.problems(matrix=matmul, tma=tma)
                self.assertEqual(problems, [], f"{report.kernel} on {arch}")

    @parametrize("dynamic", [False, True])
    def test_tiles_are_choices_of_the_autotuner(self, dynamic):
        def tiles(graph, kernel):
            place = graph.source.index(f"'kernel_name': '{kernel}")
            constants = graph.source[place:].partition("'constants': ")[2]
            return tuple(
                re.search(rf"'BLOCK_{axis}': (\d+)", constants)[1] for axis in "MNK"
            )

        def sources(position, **patches):
            seen = []

            def pick(choices):
                seen.append(len(choices))
                return choices[position]

            with config.patch(patches):
                graphs = emit_block(pick=pick, dynamic=dynamic, grad=True)
            return seen, graphs

        seen, (forward, backward) = sources(
            -1, max_autotune=True, max_autotune_gemm_backends="ATEN"
        )
        # up and down; act_backward, input_grad and weight_grad of either weight.
        self.assertEqual(len(seen), 6)
        self.assertTrue(all(n > 1 for n in seen), seen)
        self.assertEqual(moe_calls(forward, backward), [])
        untuned, (first, first_backward) = sources(-1)
        self.assertEqual(untuned, [])
        for kernel in ("up_kernel", "grouped_mm_kernel"):
            self.assertNotEqual(tiles(forward, kernel), tiles(first, kernel))
        for kernel in ("act_backward", "weight_grad", "grouped_mm"):
            self.assertNotEqual(
                tiles(backward, kernel), tiles(first_backward, kernel), kernel
            )
        # Nothing of the candidates is left in the graph.
        self.assertEqual(sorted(forward.launched), sorted(first.launched))

    def test_operands_of_the_autotuner_are_a_routing(self):
        for T, K, R, E in (
            (10, 2, 20, 4),
            (10, 2, 32, 3),
            (10, 2, 15, 4),
            (0, 2, 0, 4),
        ):
            offs, row_slots, slot_rows = even_routing(T, K, R, E, torch.device("cpu"))
            used = min(T * K, R)
            self.assertEqual(offs[-1].item(), used)
            self.assertLessEqual(offs.diff().max() - offs.diff().min(), 1)
            for row, slot in enumerate(row_slots[:used].tolist()):
                self.assertEqual(slot_rows.flatten()[slot].item(), row)
            self.assertTrue((row_slots[used:] == -1).all())
            self.assertEqual((slot_rows >= 0).sum().item(), used)

    def test_flag_is_part_of_the_cache_key(self):
        # Or a graph of one would be found on disk by the other.
        def key():
            module = torch.fx.symbolic_trace(lambda x: x + 1)
            return compiled_fx_graph_hash(module, [], {}, [])[0]

        kernels = key()
        with config.patch({"triton.moe_kernels": False}):
            self.assertNotEqual(key(), kernels)
        # For operators that run.
        with moe_kernel(MoeBackend.COMPOSITE):
            self.assertEqual(key(), kernels)

    def test_by_default_what_a_gpu_has_run(self):
        default = config._config["triton.moe_kernels"].default
        self.assertIs(default, None)
        forward = [
            proven.Run(family, "sm_90", "a card", "2026-11-27", "2.16.0, 3.9.0")
            for family in proven.FAMILIES["_moe_mlp"]
        ]
        elsewhere = [run._replace(arch="sm_80") for run in forward]
        for runs, calls in ((), 1), (forward[:-1], 1), (forward, 0), (elsewhere, 1):
            with (
                config.patch({"triton.moe_kernels": None}),
                mock.patch.object(proven, "RUNS", runs),
            ):
                (graph,) = emit_block("sm_90")
            self.assertEqual(len(moe_calls(graph)), calls)

    def test_rows_beyond_int32_are_indexed_in_int64(self):
        # R * D = 2^32.
        (graph,) = emit_block(tokens=1 << 23)
        combine = graph.source[graph.source.rindex("def triton_") :]
        (row,) = set(re.findall(r"(tmp\d+) = tl.load\(\w+ \+ \(2\*x0\)", combine))
        self.assertIn(f"{row}.to(tl.int64)", combine)


if __name__ == "__main__":
    run_tests()
