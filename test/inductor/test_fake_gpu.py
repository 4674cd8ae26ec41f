# Owner(s): ["module: inductor"]
"""fake_gpu.py: Inductor writes for each architecture what a machine with it would get."""

import fake_gpu


fake_gpu.require()  # before torch

import os
import subprocess
import sys
import textwrap

import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


def empty(*shape, **options):
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16, **options)


class TestFakeGpu(TestCase):
    def test_pointwise_is_one_kernel(self):
        with fake_gpu.fake_gpu(), FakeTensorMode():
            (graph,) = fake_gpu.emitted(
                torch.compile(lambda x: (x + 1).relu().sum(1)), empty(64, 32)
            )
        self.assertEqual(len(graph.launches), 1)
        self.assertEqual(graph.extern_calls, [])
        self.assertEqual(graph.inputs, (("arg0_1", ("64", "32")),))

    def test_an_extern_call_is_seen(self):
        with fake_gpu.fake_gpu(), FakeTensorMode():
            (graph,) = fake_gpu.emitted(
                torch.compile(lambda x, w: x @ w), empty(64, 32), empty(32, 16)
            )
        self.assertEqual(graph.extern_calls, ["extern_kernels.mm"])
        self.assertEqual(graph.launches, [])

    def test_the_example_runs_as_written(self):
        example = textwrap.dedent(fake_gpu.__doc__.split("once:\n")[1])
        found = subprocess.run(
            [sys.executable, "-c", example],
            capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": os.path.dirname(fake_gpu.__file__)},
        )  # fmt: skip
        self.assertEqual(found.returncode, 0, found.stderr)
        self.assertIn("async_compile.triton", found.stdout)

    def test_sizes_that_are_no_multiple_of_8(self):
        def router(x, w):
            return (x @ w.mT).softmax(-1)

        with fake_gpu.fake_gpu(), FakeTensorMode():
            (graph,) = fake_gpu.emitted(
                torch.compile(router), empty(512, 256), empty(20, 256)
            )
        self.assertEqual(graph.extern_calls, ["extern_kernels.mm"])

    @parametrize("arch", ["sm_80", "sm_90", "sm_100"])
    def test_properties_of_the_device(self, arch):
        def f(x, w, offs):
            return F.grouped_mm(x, w.mT, offs=offs)

        patches = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON,ATEN"}
        with (
            fake_gpu.fake_gpu(arch),
            FakeTensorMode(),
            config.patch(patches),
        ):
            self.assertEqual(
                torch.cuda.get_device_capability(), divmod(int(arch[3:]), 10)
            )
            offs = torch.empty(8, dtype=torch.int32, device="cuda")
            (graph,) = fake_gpu.emitted(
                torch.compile(f), empty(512, 256), empty(8, 512, 256), offs
            )
        # Upstream's template wants 9.0.
        self.assertEqual(len(graph.kernels), 0 if arch == "sm_80" else 1)
        self.assertEqual(len(graph.extern_calls), 1 if arch == "sm_80" else 0)

    def test_the_test_picks_the_choice(self):
        def f(x, w):
            return x @ w

        seen = []

        def last(choices):
            seen.extend(choices)
            return choices[-1]

        patches = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
        sources = []
        for pick in (None, last):
            with (
                fake_gpu.fake_gpu(pick=pick),
                FakeTensorMode(),
                config.patch(patches),
            ):
                (graph,) = fake_gpu.emitted(
                    torch.compile(f), empty(512, 256), empty(256, 512)
                )
            sources.append(graph.source)
        self.assertGreater(len(seen), 1)
        self.assertNotEqual(*sources)

    @parametrize("dynamic", [False, True])
    def test_backward(self, dynamic):
        with fake_gpu.fake_gpu(), FakeTensorMode():
            x = empty(64, 32, requires_grad=True)
            if dynamic:
                torch._dynamo.mark_dynamic(x, 0)
            graphs = fake_gpu.emitted(torch.compile(lambda x: x.sin().exp()), x)
        self.assertEqual([len(g.launches) for g in graphs], [1, 1])
        forward, backward = graphs
        size = "s77" if dynamic else "64"
        self.assertIn(
            ("primals_2" if dynamic else "primals_1", (size, "32")), forward.inputs
        )
        known = {name for name, _ in forward.inputs} | set(forward.outputs)
        for name, _ in backward.inputs:
            self.assertTrue(name in known or name == "tangents_1", name)

    def test_cpp_wrapper(self):
        with (
            fake_gpu.fake_gpu(),
            FakeTensorMode(),
            config.patch(cpp_wrapper=True),
        ):
            (graph,) = fake_gpu.emitted(
                torch.compile(lambda x, w: (x @ w).relu()), empty(64, 32), empty(32, 16)
            )
        self.assertEqual(graph.extern_calls, ["aoti_torch_cuda_mm_out"])
        self.assertEqual(len(graph.kernels), 1)

    def test_an_unknown_architecture_is_an_error(self):
        with self.assertRaisesRegex(ValueError, "arch is 'sm_70', not one of"):
            with fake_gpu.fake_gpu("sm_70"):
                pass

    def test_no_trace_is_left(self):
        before = torch.cuda.get_device_capability, torch.cuda.is_available
        with fake_gpu.fake_gpu():
            pass
        self.assertEqual(
            before, (torch.cuda.get_device_capability, torch.cuda.is_available)
        )

    def test_import_after_torch_is_an_error(self):
        done = subprocess.run(
            [sys.executable, "-c", "import torch, fake_gpu"],
            cwd=os.path.dirname(os.path.abspath(__file__)),
            # The folder of the tests, where `torch` is none of this one's.
            env={**os.environ, "PYTHONPATH": os.path.dirname(fake_gpu.__file__)},
            capture_output=True,
            text=True,
        )
        self.assertIn("import fake_gpu before torch", done.stderr)


instantiate_parametrized_tests(TestFakeGpu)

if __name__ == "__main__":
    run_tests()
