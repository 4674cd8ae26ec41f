# Owner(s): ["module: inductor"]
"""What the MoE router and permutation become in code for CUDA. Runs without a GPU."""

import fake_gpu


fake_gpu.require()  # before torch

import ast
import re
import tempfile
import zipfile
from unittest import mock

from fake_aoti import fake_aoti
from moe_lowering_problems import moe_calls
from moe_routing_problems import Block, emit, Permutation, PROBLEMS, Router

import torch
from torch._inductor import config
from torch._native.ops.moe import triton_impl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_moe import slow_subtest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
    TestCase,
)


ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
ONE_PROGRAM = ["permute_block_kernel"]
BLOCKS = [
    "count_kernel",
    "scan_blocks_kernel",
    "expert_offsets_kernel",
    "scatter_kernel",
]
LOGGER = "torch._inductor.kernel.moe"


@config.patch({"triton.moe_kernels": True})
@instantiate_parametrized_tests
class TestMoeRoutingLowering(TestCase):
    @parametrize("arch", ARCHITECTURES)
    @parametrize("tokens", ["static", "dynamic"])
    def test_block_has_no_extern_call(self, arch, tokens):
        traced = 24 if tokens == "dynamic" else None
        forward, backward = emit(Block("", traced_tokens=traced), arch)
        self.assertEqual(moe_calls(forward, backward), [])
        permutation = ONE_PROGRAM + (BLOCKS if tokens == "dynamic" else [])
        self.assertEqual(
            forward.launched[: 1 + len(permutation)], ["topk_kernel", *permutation]
        )
        self.assertEqual(backward.launched.count("topk_backward_kernel"), 1)
        for graph in (forward, backward):
            # The router's matmul, forward and for the two gradients.
            self.assertTrue(all("mm" in c for c in graph.extern_calls))

    def test_unbacked_block_has_no_extern_call(self):
        (graph,) = emit(PROBLEMS["block_inference_unbacked"])
        self.assertEqual(moe_calls(graph), [])

    @parametrize("training", [False, True])
    def test_cpp_wrapper(self, training):
        with config.patch(cpp_wrapper=True):
            problem = Block("", traced_tokens=24, training=training)
            graphs = emit(problem)
            with config.patch({"triton.moe_kernels": False}):
                without = emit(problem)
        self.assertEqual(moe_calls(*graphs), [])
        calls = {c.removeprefix("aoti_torch_cuda_") for c in moe_calls(*without)}
        expected = {"_moe_topk", "_moe_permutation", "_moe_mlp"}
        if training:
            expected |= {"_moe_topk_backward", "_moe_mlp_backward"}
        self.assertEqual(calls, expected)

    def test_flag(self):
        with config.patch({"triton.moe_kernels": False}):
            graphs = emit(Block(""))
        calls = moe_calls(*graphs)
        self.assertEqual(len(calls), 5, calls)

    @slowTest
    def test_package_of_aot_inductor(self):
        problem = Block("", 512, training=False, dim=128, hidden=128)
        tokens = torch.export.Dim("tokens", min=2, max=1 << 16)

        class Layer(torch.nn.Module):
            def forward(self, x, router, w_in, w_out):
                return problem(x, router, w_in, w_out)

        with fake_gpu.fake_gpu("sm_90"), tempfile.TemporaryDirectory() as folder:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                args = tuple(
                    torch.empty(x.shape, device="cuda", dtype=x.dtype)
                    for x in problem.tensors(problem.num_tokens).values()
                )
            program = torch.export.export(
                Layer(), args, dynamic_shapes=({0: tokens}, None, None, None)
            )
            with fake_aoti(folder):
                path = torch._inductor.aoti_compile_and_package(
                    program, package_path=f"{folder}/layer.pt2"
                )
            with zipfile.ZipFile(path) as package:
                files = {name: package.read(name) for name in package.namelist()}
        (library,) = (f for n, f in files.items() if n.endswith(".wrapper.so"))
        self.assertNotIn(b"aoti_torch_cuda__moe", library)
        cubins = [f for n, f in files.items() if n.endswith(".cubin")]
        routing = ("topk_kernel", *ONE_PROGRAM, *BLOCKS)
        for kernel in (*routing, "up_kernel", "grouped_mm_kernel"):
            held = [c for c in cubins if f".text.{kernel}".encode() in c]
            self.assertEqual(len(held), 1, kernel)

    @parametrize(
        "bounds,kernels",
        [
            ({}, ONE_PROGRAM + BLOCKS),
            ({"min": 2, "max": 512}, ONE_PROGRAM),
            ({"min": 513, "max": 1 << 20}, BLOCKS),
        ],
        name_fn=lambda bounds, kernels: "_".join(map(str, bounds.values())) or "none",
    )
    def test_bounds_on_the_tokens_are_used(self, bounds, kernels):
        dynamic = torch._dynamo.mark_dynamic

        def mark(x, dim):
            dynamic(x, dim, **bounds)

        with mock.patch.object(torch._dynamo, "mark_dynamic", mark):
            (graph,) = emit(Permutation("", traced_tokens=bounds.get("max", 24)))
        self.assertEqual(graph.launched, kernels)
        if kernels == ONE_PROGRAM + BLOCKS:
            self.check_that_one_way_runs(graph)

    def check_that_one_way_runs(self, graph):
        # The wrapper has both; the grid of one of them is empty.
        calls = re.findall(r"^ +(\w+\.run\(.*\))$", graph.source, re.MULTILINE)
        grids = [ast.unparse(ast.parse(c, mode="eval").body.args[-3]) for c in calls]
        (size,) = set(re.findall(r"\bs\d+\b", " ".join(grids)))
        for num_tokens, one in ((2, True), (512, True), (513, False), (5000, False)):
            found = [eval(grid, {size: num_tokens}) > 0 for grid in grids]
            self.assertEqual(found, [one] + 4 * [not one], f"{num_tokens} tokens")

    def test_ids_are_checked_as_in_eager_mode(self):
        # Whatever Inductor's own assertions are set to.
        with config.patch(assert_indirect_indexing=False):
            for problem, kernel in (
                (Permutation(""), "permute_block_kernel"),
                (Permutation("", traced_tokens=24), "count_kernel"),
            ):
                (graph,) = emit(problem)
                place = graph.source.index(f"async_compile.triton('{kernel}'")
                options = graph.source[place:].partition("'backend_options': ")[2]
                self.assertTrue(options.startswith("{'debug': True"), options[:80])

    @parametrize(
        "problem,change,reason",
        [
            (Permutation("many", num_experts=5000), {}, "num_experts is 5000"),
            (Permutation("arch"), {"_CAPABILITIES": ((8, 0),)}, "compute capability"),
            (
                Router("dtype", dtype=torch.float64),
                {},
                "dtype torch.float64 is not one of",
            ),
            (Router("k", num_experts=64, top_k=40), {}, "k is 40"),
            (Router("arch"), {"_CAPABILITIES": ((8, 0),)}, "compute capability"),
        ],
        name_fn=lambda problem, change, reason: (
            f"{type(problem).__name__}_{problem.name}".lower()
        ),
    )
    def test_reason_of_an_extern_call(self, problem, change, reason):
        with (
            self.assertLogs(LOGGER, "INFO") as logs,
            mock.patch.dict(vars(triton_impl), change),
        ):
            (graph,) = emit(problem)
        self.assertIn(reason, "\n".join(logs.output))
        self.assertEqual(len(moe_calls(graph)), 1)

    def test_reason_of_an_extern_backward(self):
        with self.assertLogs(LOGGER, "INFO") as logs:
            _, backward = emit(Router("", dtype=torch.float64, training=True))
        self.assertIn("_moe_topk_backward stays an extern call", "\n".join(logs.output))
        self.assertEqual(len(moe_calls(backward)), 1)

    @parametrize(
        "arch",
        [a if a == "sm_90" else slow_subtest(a) for a in ARCHITECTURES],
    )
    @parametrize("model", ["deepseek_v3", slow_subtest("qwen3")])
    def test_emitted_kernels_pass_the_static_gate(self, arch, model):
        sizes, options = {
            "qwen3": ({"num_experts": 128, "top_k": 8}, {}),
            "deepseek_v3": (
                {"num_experts": 256, "top_k": 8},
                {"score": "sigmoid", "num_groups": 8, "top_groups": 4, "scale": 2.5},
            ),
        }[model]
        problems = (
            Router(
                "",
                4096,
                64,
                training=True,
                options=options,
                bias=bool(options),
                **sizes,
            ),
            # Both ways, and decoding.
            Permutation("", 4096, 64, row_alignment=8, **sizes),
            Permutation("", 64, **sizes),
        )
        compiled = []
        for graph in (g for problem in problems for g in emit(problem, arch)):
            for report in fake_gpu.compiled(graph, arch):
                self.assertEqual(
                    report.problems(matrix=False), [], f"{report.kernel} on {arch}"
                )
                compiled.append(report.kernel)
        self.assertEqual(
            compiled,
            [
                "topk_kernel",
                "topk_backward_kernel",
                *ONE_PROGRAM,
                *BLOCKS,
                *ONE_PROGRAM,
            ],
        )


if __name__ == "__main__":
    run_tests()
