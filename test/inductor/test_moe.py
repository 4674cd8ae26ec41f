# Owner(s): ["module: inductor"]

import os
import re
import subprocess
import sys
import tempfile
import textwrap
import zipfile

import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_moe import saved_bytes_bound, slow_subtest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


T, D, HIDDEN, E, K = 24, 16, 24, 4, 2


class Router(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bias = torch.nn.Buffer(torch.linspace(-1, 1, 8))
        self.options = options

    def forward(self, logits):
        return F.moe_topk(logits, 3, bias=self.bias, **self.options)


ROUTERS = {
    "softmax": {},
    "groups": {"num_groups": 4, "top_groups": 2, "scale": 2.5},
    "sigmoid": {"score": "sigmoid", "normalize": False},
}


class MoeLayer(torch.nn.Module):
    """A router and its experts: what a model compiles."""

    def __init__(self, dtype=torch.float32, separate_up=False):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.nn.Parameter(
                torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
                / shape[-1] ** 0.5
            )

        self.router = normal(E, D)
        self.w_in = normal(E, HIDDEN if separate_up else 2 * HIDDEN, D)
        self.w_up = normal(E, HIDDEN, D) if separate_up else None
        self.w_out = normal(E, D, HIDDEN)
        self.b_in = normal(E, 2 * HIDDEN)
        self.b_out = normal(E, D)

    def forward(self, x):
        indices, weights = F.moe_topk(F.linear(x, self.router), K)
        return F.moe_mlp(
            x,
            indices,
            weights,
            self.w_in,
            self.w_out,
            w_up=self.w_up,
            b_in=self.b_in,
            b_out=self.b_out,
            limit=1.0,
        )


class GroupedLayer(torch.nn.Module):
    """Experts of rows that are in their order."""

    def __init__(self):
        super().__init__()
        experts = MoeLayer(separate_up=True)
        self.w_in, self.w_up, self.w_out = experts.w_in, experts.w_up, experts.w_out

    def forward(self, x):
        # The last row has no expert.
        offs = torch.arange(1, E + 1, device=x.device, dtype=torch.int32)
        offs = offs * ((x.shape[0] - 1) // E)
        return F.grouped_mlp(x, self.w_in, self.w_out, offs=offs, w_up=self.w_up)


LAYERS = {
    "fused": MoeLayer,
    "separate": lambda: MoeLayer(separate_up=True),
    "grouped": GroupedLayer,
}
all_layers = parametrize("name", list(LAYERS))


def tokens(num_tokens=T, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, D, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def run(layer, x):
    """Output and the gradients of the input and of every parameter."""
    output = layer(x)
    grads = torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])
    return output.detach(), *grads


@instantiate_parametrized_tests
class TestMoeCompile(TestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()

    # The ops stay ops under Inductor, so only what it fuses around them (the
    # router, in bfloat16 without the roundings between its ops) may differ.
    def check(self, compiled, layer, x):
        eps = torch.finfo(x.dtype).eps
        for actual, expected in zip(run(compiled, x), run(layer, x), strict=True):
            atol = 4 * eps * expected.abs().max().item()
            self.assertEqual(actual, expected, rtol=4 * eps, atol=atol)

    @parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_static(self, dtype):
        layer = MoeLayer(dtype)
        compiled = torch.compile(layer, fullgraph=True, dynamic=False)
        self.check(compiled, layer, tokens(dtype=dtype))

    @all_layers
    def test_dynamic_tokens(self, name):
        layer = LAYERS[name]()
        counter = CompileCounter()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
        for num_tokens in (T, 7, 61):
            compiled(tokens(num_tokens))
        self.assertEqual(counter.frame_count, 1)

        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        for num_tokens in (T, 7, 61):
            self.check(compiled, layer, tokens(num_tokens))

    @all_layers
    def test_unbacked_tokens(self, name):
        layer = LAYERS[name]()
        compiled = torch.compile(layer, fullgraph=True)
        x = tokens()
        torch._dynamo.decorators.mark_unbacked(x, 0)
        self.check(compiled, layer, x)

    def test_inference_does_not_keep_the_preactivation(self):
        layer = MoeLayer().requires_grad_(False)
        x = tokens().detach()
        compiled = torch.compile(layer, fullgraph=True)
        output, (code,) = run_and_get_code(compiled, x)
        self.assertEqual(output, layer(x))
        self.assertIn("compute_preact=False", code)

    @config.patch(cpp_wrapper=True)
    @parametrize("separate_up", [False, True])
    @parametrize("frozen", [(), ("w_in", "b_out"), ("router", "w_out", "b_in")])
    def test_backward_in_cpp_wrapper(self, frozen, separate_up):
        # A masked gradient that is undefined, rather than empty, crashes only here.
        layer = MoeLayer(separate_up=separate_up)
        for name in frozen:
            layer.get_parameter(name).requires_grad_(False)
        trained = [p for p in layer.parameters() if p.requires_grad]

        def grads(function, x):
            return torch.autograd.grad(function(x).square().sum(), [x, *trained])

        x = tokens()
        compiled = torch.compile(layer, fullgraph=True)
        self.assertEqual(grads(compiled, x), grads(layer, x))

    @config.patch(cpp_wrapper=True)
    @parametrize("name", list(ROUTERS))
    def test_router_in_cpp_wrapper(self, name):
        router = Router(**ROUTERS[name])
        logits = torch.randn(6, 8, requires_grad=True)
        compiled = torch.compile(router, fullgraph=True)

        def run(function):
            indices, weights = function(logits)
            (grad,) = torch.autograd.grad(weights.square().sum(), logits)
            return indices, weights.detach(), grad

        self.assertEqual(run(compiled), run(router))

    @parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_partitioner_saves_no_more_than_eager(self, dtype):
        layer = MoeLayer(dtype)

        def mlp(x, indices, weights):
            return F.moe_mlp(
                x,
                indices,
                weights,
                layer.w_in,
                layer.w_out,
                b_in=layer.b_in,
                b_out=layer.b_out,
            )

        compiled = torch.compile(mlp, fullgraph=True)
        x = tokens(dtype=dtype)
        with torch.no_grad():
            indices, weights = F.moe_topk(F.linear(x, layer.router), K)
        weights.requires_grad_()
        # What the compiled forward hands to the compiled backward.
        saved = [
            t
            for t in compiled(x, indices, weights).grad_fn.saved_tensors
            if not isinstance(t, torch.nn.Parameter)
        ]
        parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        sizes = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved
        }
        total = sum(size for ptr, size in sizes.items() if ptr not in parameters)
        bound = saved_bytes_bound(dtype, T, D, 2 * HIDDEN, E, K)
        self.assertLessEqual(total, bound)
        self.assertGreaterEqual(total, dtype.itemsize * (T * D + T * K * 2 * HIDDEN))

    def test_checkpointing_recomputes_the_layer(self):
        layer = MoeLayer()

        def checkpointed(x):
            return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

        x = tokens()
        expected = run(layer, x)
        for function in (checkpointed, torch.compile(checkpointed, fullgraph=True)):
            output = function(x)
            grads = torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])
            self.assertEqual((output.detach(), *grads), expected)


@instantiate_parametrized_tests
class TestMoeAOTInductor(TestCase):
    def package(self, module, x, **kwargs):
        """The module as a loaded package, and its C++ code."""
        program = torch.export.export(module, (x,), **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "moe.pt2")
            torch._inductor.aoti_compile_and_package(program, package_path=path)
            with zipfile.ZipFile(path) as package:
                code = "".join(
                    package.read(name).decode()
                    for name in package.namelist()
                    if name.endswith(".cpp")
                )
            return torch._inductor.aoti_load_package(path), code

    # A package takes 15 s.
    @parametrize(
        "name", ["fused", *map(slow_subtest, sorted(LAYERS.keys() - {"fused"}))]
    )
    def test_package(self, name):
        # The ops have C shims, so the package does not go through a proxy. The parameters
        # require grad, and yet nobody reads the pre-activations.
        layer = LAYERS[name]()
        x = tokens().detach()
        num_tokens = torch.export.Dim("num_tokens", min=2, max=1024)
        packaged, code = self.package(layer, x, dynamic_shapes=({0: num_tokens},))
        (call,) = re.findall(r"aoti_torch_cpu__moe_mlp\((.*?)\)\);", code, re.DOTALL)
        compute_preact = call.split("&buf")[-3].split(",")[-2].strip()
        self.assertEqual(compute_preact, "0", call)
        if name != "grouped":
            self.assertIn("aoti_torch_cpu__moe_permutation(", code)
        for count in (T, 5):
            x = tokens(count).detach()
            self.assertEqual(packaged(x), layer(x))

    @parametrize(
        "name", ["groups", *map(slow_subtest, sorted(ROUTERS.keys() - {"groups"}))]
    )
    def test_router(self, name):
        router, logits = Router(**ROUTERS[name]), torch.randn(6, 8)
        packaged, _ = self.package(router, logits)
        self.assertEqual(tuple(packaged(logits)), tuple(router(logits)))


class TestMoeOtherProcesses(TestCase):
    PROGRAM = textwrap.dedent(
        """
        import torch
        x, w_in, w_out = torch.randn(5, 4), torch.randn(2, 6, 4), torch.randn(2, 4, 3)
        x.requires_grad_()
        plan = torch._moe_permutation(torch.tensor([[0], [1], [-1], [2], [0]]), 2)
        out = torch._moe_mlp(
            x, w_in, w_out, plan.offs, None, plan.row_slots, plan.slot_rows).output
        assert type(out.grad_fn).__name__ == "MoeMlpBackward0", out.grad_fn
        out.sum().backward()
        print("seen", plan.counts.tolist())
        """
    )

    def test_subprocess(self):
        result = subprocess.run(
            [sys.executable, "-I", "-c", self.PROGRAM], capture_output=True, text=True
        )
        self.assertEqual(result.stdout, "seen [2, 1]\n", result.stderr)

    def test_spawn(self):
        context = torch.multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            self.assertEqual(
                pool.apply(str_of_schema), str(torch.ops.aten._moe_mlp.default._schema)
            )


def str_of_schema() -> str:
    return str(torch.ops.aten._moe_mlp.default._schema)


if __name__ == "__main__":
    run_tests()
