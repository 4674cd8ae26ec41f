# Owner(s): ["module: inductor"]
"""inductor_interpreter.py runs what Inductor wrote for CUDA, and only what fits together.

The sources are of a process of its own: code generation and the interpreter exclude each other.
"""

import os


os.environ["TRITON_INTERPRET"] = "1"

import json
import pathlib
import re
import subprocess
import sys

from inductor_interpreter import arguments, EmittedTestCase, load, run_training

import torch
from torch.testing._internal.common_utils import run_tests


EMIT = """
import fake_gpu, dataclasses, json, sys, torch, torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

def pointwise(x, y):
    return (x + 1).relu() * y, x.transpose(0, 1).exp()

def norm(x, w):
    return F.rms_norm(x.float(), (x.shape[1],)).bfloat16() @ w

def training(x, w):
    return F.silu(x @ w) + 1

emitted = {}
for f, grad, dynamic in ((pointwise, False, False), (norm, False, True), (training, True, True)):
    with fake_gpu.fake_gpu(), FakeTensorMode(), torch.set_grad_enabled(grad):
        other = (48, 80) if f is pointwise else (80, 32)
        args = [torch.empty(s, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
                for s in ((48, 80), other)]
        if dynamic:
            torch._dynamo.mark_dynamic(args[0], 0)
        emitted[f.__name__] = [
            dataclasses.asdict(g) for g in fake_gpu.emitted(torch.compile(f), *args)]
json.dump(emitted, sys.stdout)
"""


def silu_layer(x, w):
    return torch.nn.functional.silu(x @ w) + 1


class TestInductorInterpreter(EmittedTestCase):
    @classmethod
    def emit(cls):
        here = str(pathlib.Path(__file__).resolve().parent)
        env = {**os.environ, "PYTHONPATH": here}
        del env["TRITON_INTERPRET"]
        done = subprocess.run(
            [sys.executable, "-c", EMIT],
            env=env,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return json.loads(done.stdout.splitlines()[-1])

    def run_graph(self, name, *tensors):
        (graph,) = self.emitted[name]
        return load(graph["source"], self.folder.name)(
            arguments(graph["inputs"], tensors)
        )

    def test_pointwise(self):
        x, y = torch.randn(2, 48, 80).bfloat16().unbind()
        a, b = self.run_graph("pointwise", x, y)
        self.assertEqual(a, ((x.float() + 1).relu() * y.float()).bfloat16())
        self.assertEqual(b, x.float().exp().T.bfloat16())

    def test_reduction_with_another_size_than_compiled(self):
        for size in (1, 7, 100):
            x, w = torch.randn(size, 80).bfloat16(), torch.randn(80, 32).bfloat16()
            (y,) = self.run_graph("norm", x, w)
            normed = torch.nn.functional.rms_norm(x.float(), (80,)).bfloat16()
            self.assertEqual(y, normed @ w)

    def test_training(self):
        forward, backward = self.emitted["training"]
        x, w, grad = (torch.randn(s).bfloat16() for s in ((9, 80), (80, 32), (9, 32)))
        (y,), grads = run_training(forward, backward, self.folder.name, [x, w], [grad])
        leaves = [t.double().requires_grad_() for t in (x, w)]
        expected = silu_layer(*leaves)
        truth = torch.autograd.grad(expected, leaves, grad.double())
        for a, b in zip((y, *grads), (expected, *truth), strict=True):
            error = (a.double() - b).norm() / b.norm()
            self.assertLess(error.item(), 1e-2)

    def test_a_wrong_kernel_is_seen(self):
        (graph,) = self.emitted["pointwise"]
        broken = re.sub(r"tl.full\(\[1\], 1\.0,", "tl.full([1], 2.0,", graph["source"])
        self.assertNotEqual(broken, graph["source"])
        x, y = torch.randn(2, 48, 80).bfloat16().unbind()
        a, _ = load(broken, self.folder.name)([x, y])
        self.assertEqual(a, ((x.float() + 2).relu() * y.float()).bfloat16())

    def test_arguments_that_do_not_fit(self):
        inputs = [["n", "s0"], ["a", ["s0", "4"]], ["b", ["s0", "s0"]]]
        self.assertEqual(arguments(inputs, [torch.ones(3, 4), torch.ones(3, 3)])[0], 3)
        with self.assertRaisesRegex(ValueError, r"b: \(3, 2\) is not"):
            arguments(inputs, [torch.ones(3, 4), torch.ones(3, 2)])
        with self.assertRaisesRegex(ValueError, r"a: \(3, 5\) is not"):
            arguments(inputs, [torch.ones(3, 5), torch.ones(3, 3)])
        with self.assertRaisesRegex(ValueError, "more tensors than the 2"):
            arguments(inputs, [torch.ones(3, 4), torch.ones(3, 3), torch.ones(1)])


if __name__ == "__main__":
    run_tests()
