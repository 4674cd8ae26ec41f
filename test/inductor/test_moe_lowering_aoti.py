# Owner(s): ["module: inductor"]
"""An AOTInductor package of an MoE layer for CUDA holds our kernels. Runs without a GPU."""

import fake_gpu


fake_gpu.require()  # before torch

import re
import tempfile
import zipfile

from fake_aoti import fake_aoti

import torch
import torch.nn.functional as F
from torch._inductor.lowering import lowerings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_utils import run_tests, TestCase


class Layer(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x, logits, w_in, w_out):
        ids, weights = F.moe_topk(logits, 8)
        return x + F.moe_mlp(x, ids, weights, w_in, w_out, **self.options)


def packaged(layer, arch):
    """The files of a package of ``layer`` with a dynamic number of tokens, by name."""
    T, D, H, E = 512, 2048, 768, 64
    tokens = torch.export.Dim("tokens", min=2, max=1 << 16)
    with fake_gpu.fake_gpu(arch), tempfile.TemporaryDirectory() as folder:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            args = tuple(
                torch.empty(shape, device="cuda", dtype=torch.bfloat16)
                for shape in ((T, D), (T, E), (E, 2 * H, D), (E, D, H))
            )
        program = torch.export.export(
            layer, args, dynamic_shapes=({0: tokens}, {0: tokens}, None, None)
        )
        with (
            fake_aoti(folder),
            torch._inductor.config.patch({"triton.moe_kernels": True}),
        ):
            path = torch._inductor.aoti_compile_and_package(
                program, package_path=f"{folder}/layer.pt2"
            )
        with zipfile.ZipFile(path) as package:
            return {name: package.read(name) for name in package.namelist()}


def check_package(test, files, kernels):
    """No call of an op that has a lowering, and one cubin of each kernel whose name begins so."""

    def check_calls(text):
        calls = set(re.findall(rb"aoti_torch_cuda_(_moe_[a-z_]+)", text))
        # Router and permutation get a lowering later than the experts (650).
        for name in calls:
            lowering = lowerings[getattr(torch.ops.aten, name.decode()).default]
            test.assertTrue(hasattr(lowering, "_is_fallback_handler"), name)

    (wrapper,) = (f for n, f in files.items() if n.endswith(".wrapper.cpp"))
    check_calls(wrapper)
    cubins = [f for n, f in files.items() if n.endswith(".cubin")]
    for kernel in kernels:
        held = [c for c in cubins if f".text.{kernel}".encode() in c]
        test.assertEqual(len(held), 1, kernel)
    (library,) = (f for n, f in files.items() if n.endswith(".wrapper.so"))
    check_calls(library)


class TestMoeAoti(TestCase):
    def test_package_with_a_dynamic_number_of_tokens(self):
        # The last is the sum with the residual.
        kernels = ("schedule_tiles_kernel", "up_kernel", "grouped_mm_kernel", "triton_")
        check_package(self, packaged(Layer(), "sm_90"), kernels)


if __name__ == "__main__":
    run_tests()
