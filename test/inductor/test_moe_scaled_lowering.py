# Owner(s): ["module: inductor"]
"""What the MoE ops of low precision become in code that Inductor generates for CUDA. Runs without a GPU."""

import fake_gpu


fake_gpu.require()  # before torch

import re
from collections import Counter

from moe_lowering_problems import moe_calls

import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_moe import slow_subtest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
    TestCase,
)


LOGGER = "torch._inductor.kernel.moe"
OPS = ("_moe_mlp_scaled", "_moe_mlp_scaled_backward")
# Recipes that the kernels serve, architectures, and the kernel that quantises the weights.
SERVED = (
    ("fp8_blockwise", "sm_90", "quantize_square_kernel"),
    ("fp8_blockwise", "sm_100", "quantize_square_kernel"),
    ("fp8_rowwise", "sm_90", "quantize_segments_kernel"),
    ("fp8_rowwise", "sm_100", "quantize_segments_kernel"),
    ("mxfp8", "sm_90", "quantize_kernel"),
    ("mxfp8", "sm_100", "quantize_kernel"),
)
ROUTING = ("topk", "permute", "count", "scan", "expert_offsets", "scatter", "schedule")
served = parametrize("recipe,arch,of_weights", SERVED)


def emit(
    recipe,
    arch="sm_90",
    *,
    tokens=512,
    dim=256,
    hidden=128,
    experts=8,
    dynamic=True,
    training=True,
    change=None,
    pick=None,
    **options,
):
    """The graphs of a router, experts of ``recipe`` and the residual, forward and backward."""

    def block(x, router, w_in, w_out):
        ids, weights = F.moe_topk(F.linear(x, router), 2)
        return x + F.moe_mlp(x, ids, weights, w_in, w_out, recipe=recipe, **options)

    sizes = (tokens, dim), (experts, dim), (experts, 2 * hidden, dim)
    with fake_gpu.fake_gpu(arch, pick), FakeTensorMode():
        args = [
            torch.empty(
                size, device="cuda", dtype=torch.bfloat16, requires_grad=training
            )
            for size in (*sizes, (experts, dim, hidden))
        ]
        if change is not None:
            args = change(*args)
        if dynamic:
            torch._dynamo.mark_dynamic(args[0], 0)
        return fake_gpu.emitted(torch.compile(block, fullgraph=True), *args)


def emit_quantize(recipe, shape, arch="sm_90", offs=None, dynamic=(), **options):
    def quantize(x, offs):
        return torch.ops.aten._moe_quantize.default(x, recipe, offs=offs, **options)

    with fake_gpu.fake_gpu(arch), FakeTensorMode():
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        if offs is not None:
            offs = torch.empty(offs, device="cuda", dtype=torch.int32)
        for tensor in dynamic:
            torch._dynamo.mark_dynamic((x, offs)[tensor], 0)
        (graph,) = fake_gpu.emitted(torch.compile(quantize, fullgraph=True), x, offs)
        return graph


def launches(graph):
    return Counter(name for name in graph.launched if not name.startswith(ROUTING))


@config.patch({"triton.moe_kernels": True})
@instantiate_parametrized_tests
class TestMoeScaledLowering(TestCase):
    @served
    @parametrize("dynamic", [slow_subtest(False), True])
    def test_training_block(self, recipe, arch, of_weights, dynamic):
        forward, backward = emit(recipe, arch, dynamic=dynamic)
        self.assertEqual(moe_calls(forward, backward), [])
        # Rows and two weights, H and its scales, and the sum with the residual.
        of_rows = "quantize_kernel"
        if recipe == "fp8_rowwise":
            of_rows = of_weights
        expected = Counter(
            {of_rows: 1},
            scaled_up_kernel=1,
            scaled_mm_kernel=1,
            zero_tail_kernel=2,
        )
        # With whole rows, a separate kernel quantises A.
        expected[of_weights] += 3 if recipe == "fp8_rowwise" else 2
        (fused,) = (n for n in launches(forward) if n.startswith("triton_"))
        self.assertEqual(launches(forward), expected + Counter([fused]))
        for part in ("moe_mlp_scaled", "add"):
            self.assertIn(part, fused)
        ours = launches(backward)
        for name, count in (
            ("scaled_act_backward_kernel", 1),
            ("scaled_mm_kernel", 1),
            ("scaled_weight_grad_kernel", 2),
            ("columns_kernel", 4),
            ("column_scales_kernel", 4 if recipe == "fp8_rowwise" else 0),
            ("scale_grad_kernel", 1),
            ("combine_kernel", 0),
        ):
            self.assertEqual(ours[name], count, name)
        (fused,) = (n for n in ours if "moe_mlp_scaled_backward" in n)
        self.assertIn("add", fused)

    @parametrize("recipe", ["fp8_blockwise", "fp8_rowwise", "mxfp8"])
    def test_blocks_with_gate_and_up(self, recipe):
        # Neither dH nor H can be quantised in an epilogue.
        graphs = emit(recipe, hidden=80)
        self.assertEqual(moe_calls(*graphs), [])

    @parametrize("cpp_wrapper", [False, True])
    def test_flag(self, cpp_wrapper):
        options = {"training": not cpp_wrapper}
        with config.patch(cpp_wrapper=cpp_wrapper):
            graphs = emit("fp8_blockwise", **options)
            with (
                config.patch({"triton.moe_kernels": False}),
                self.assertLogs(LOGGER, "INFO") as logs,
            ):
                without = emit("fp8_blockwise", **options)
        self.assertEqual(moe_calls(*graphs), [])
        self.assertIn("scaled_mm_kernel", graphs[0].kernels)
        ops = OPS[: len(graphs)]
        calls = moe_calls(*without, op="scaled")
        # The C++ one calls the composite: no Triton kernel is left.
        names = "aoti_torch_cuda_{}" if cpp_wrapper else "torch.ops.aten.{}.default"
        self.assertEqual(calls, [names.format(op) for op in ops])
        for op in ops:
            text = f"{op} stays an extern call: config.triton.moe_kernels is False"
            self.assertEqual(len([o for o in logs.output if text in o]), 1, op)

    @parametrize(
        "what,reason",
        [
            ("arch", "compute capability (8, 0) is not one of"),
            ("experts", "w_in has dynamic sizes"),
            ("unaligned", "w_in is not known to be aligned to 16 bytes"),
        ],
    )
    def test_reason_of_the_extern_calls(self, what, reason):
        def change(x, router, w_in, w_out):
            if what == "experts":
                for by_expert in (router, w_in, w_out):
                    torch._dynamo.maybe_mark_dynamic(by_expert, 0)
            elif what == "unaligned":
                flat = torch.empty(w_in.numel() + 1, dtype=w_in.dtype, device="cuda")
                w_in = flat[1:].view_as(w_in).requires_grad_()
            return x, router, w_in, w_out

        arch = "sm_80" if what == "arch" else "sm_90"
        with self.assertLogs(LOGGER, "INFO") as logs:
            graphs = emit("fp8_blockwise", arch, change=change)
        # With other experts the router and the permutation stay as well.
        calls = moe_calls(*graphs, op="scaled")
        self.assertEqual(calls, [f"torch.ops.aten.{op}.default" for op in OPS])
        for op in OPS:
            text = f"{op} stays an extern call: {reason}".replace("\\", "")
            self.assertEqual(len([o for o in logs.output if text in o]), 1, logs.output)

    @parametrize("arch", ["sm_80", "sm_90", "sm_100"])
    @parametrize(
        "recipe,options,kernel",
        [
            (3, {"dynamic": (0,)}, "quantize_kernel"),
            (3, {"swizzle": 1}, "quantize_kernel"),
            (4, {"dim": 0}, "quantize_kernel"),
            (5, {}, "quantize_square_kernel"),
            (1, {}, "quantize_segments_kernel"),
            (4, {"dim": 0, "offs": 8, "dynamic": (0,)}, "quantize_segments_kernel"),
        ],
    )
    def test_quantize(self, arch, recipe, options, kernel):
        graph = emit_quantize(recipe, (512, 272), arch, **options)
        self.assertEqual(moe_calls(graph), [])
        self.assertEqual(launches(graph), Counter([kernel]))
        native = "True" if arch != "sm_80" else "False"
        self.assertIn(f"'NATIVE': {native}", graph.source)

    def test_quantize_that_stays(self):
        with self.assertLogs(LOGGER, "INFO") as logs:
            graph = emit_quantize(4, (512, 272), offs=8, dim=0, dynamic=(1,))
        self.assertEqual(moe_calls(graph), ["torch.ops.aten._moe_quantize.default"])
        text = "_moe_quantize stays an extern call: the number of experts is dynamic"
        self.assertIn(text, logs.output[0])

    def test_tiles_are_choices_of_the_autotuner(self):
        def pick(choices):
            seen.append(len(choices))
            return choices[-1]

        seen, sources = [], []
        for tuned in (False, True):
            options = {"max_autotune": tuned, "max_autotune_gemm_backends": "ATEN"}
            with config.patch(options):
                # So few rows that both tiles of the down projection fit.
                (graph,) = emit("fp8_blockwise", tokens=64, training=False, pick=pick)
            self.assertEqual(moe_calls(graph), [])
            place = graph.source.index("'kernel_name': 'scaled_mm_kernel")
            tile = re.search(r"'BLOCK_M': (\d+)", graph.source[place:])
            sources.append(tile[1])
        self.assertEqual(seen, [2])
        self.assertNotEqual(*sources)

    @slowTest
    @served
    def test_emitted_kernels_pass_the_static_gate(self, recipe, arch, of_weights):
        # Sizes of a real layer: the tiles that ship.
        graphs = emit(recipe, arch, tokens=4096, dim=2048, hidden=768, experts=64)
        for graph in graphs:
            for report in fake_gpu.compiled(graph, arch):
                if not report.kernel.startswith(("scaled_", "columns", "quantize")):
                    continue
                matmul = report.kernel.startswith("scaled_")
                tma = matmul and report.kernel.startswith(("scaled_up", "scaled_mm"))
                fp8 = matmul and (recipe, arch) != ("mxfp8", "sm_90")
                problems = report.problems(matrix=matmul, tma=tma, fp8=fp8)
                self.assertEqual(problems, [], f"{report.kernel} on {arch}")


if __name__ == "__main__":
    run_tests()
