# Owner(s): ["module: inductor"]
"""Expert weights of frozen graphs (torch/_inductor/fx_passes/moe_freezing.py)."""

import copy
import gc
import os
import tempfile
import zipfile
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.fx_passes.moe_freezing import relayout_expert_weights
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph, GraphModule
from torch.profiler import profile, ProfilerActivity
from torch.testing._internal.common_moe import slow_subtest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)


T, D, HIDDEN, E, K = 5, 64, 32, 4, 2


class Experts(nn.Module):
    """Expert weights as gpt-oss stores them: (E, D, 2F) and (E, F, D)."""

    def __init__(self, dtype=torch.bfloat16, hidden=HIDDEN):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(E, D, 2 * hidden, dtype=dtype))
        self.down = nn.Parameter(torch.randn(E, hidden, D, dtype=dtype))

    def forward(self, x, ids, weights):
        return F.moe_mlp(x, ids, weights, self.gate_up.mT, self.down.mT)


class KMajor(Experts):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for weight in self.parameters():
            weight.data = weight.data.mT.contiguous().mT


class Halves(Experts):
    """Gate and up are halves of one parameter."""

    def forward(self, x, ids, weights):
        gate, up = self.gate_up.mT.chunk(2, dim=1)
        return F.moe_mlp(x, ids, weights, gate, self.down.mT, w_up=up)


class KMajorHalves(Halves, KMajor):
    pass


class TwoLayers(Experts):
    """Tied: two layers have the same experts."""

    def forward(self, x, ids, weights):
        for _ in range(2):
            x = super().forward(x, ids, weights)
        return x


class Written(Experts):
    """As people write it; config.moe_fusion makes it the op."""

    def forward(self, x, ids, weights):
        order = ids.flatten().argsort(stable=True)
        counts = torch.histc(ids.float(), E, 0, E - 1)
        offs = counts.cumsum(0, dtype=torch.int32)
        tokens = order // K
        gate, up = F.grouped_mm(x[tokens], self.gate_up, offs=offs).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, self.down, offs=offs)
        y = y * weights.flatten()[order][:, None].to(y.dtype)
        return torch.zeros_like(x).index_add(0, tokens, y)


class UsedElsewhere(Experts):
    def forward(self, x, ids, weights):
        w_in, w_out = self.gate_up.mT, self.down.mT
        first = ids[0, :1]
        y = F.moe_mlp(x, ids, weights, w_in, w_out)
        return y + w_in[first][0, :1, :1] + w_out[first][0, :1, :1]


def inputs(num_tokens=T, dtype=torch.bfloat16):
    ids = torch.rand(num_tokens, E).topk(K).indices
    return torch.randn(num_tokens, D, dtype=dtype), ids, torch.rand(num_tokens, K)


def frozen(layer, *args, **options):
    """The output of ``layer`` compiled with freezing, and its generated code."""
    torch._dynamo.reset()
    counters.clear()
    with config.patch(freezing=True, **options), torch.no_grad():
        output, (code, *_) = run_and_get_code(torch.compile(layer), *args)
    return output, code


def relaid():
    return counters["inductor"]["moe_weight_relayout"]


def memory_of(function):
    """Bytes on the CPU that ``function`` leaves allocated."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        function()
        gc.collect()
    return sum(event.self_cpu_memory_usage for event in prof.key_averages())


def capability(name):
    return mock.patch.object(
        torch.backends.cpu, "get_cpu_capability", return_value=name
    )


class TestMoeFreezing(TestCase):
    def setUp(self):
        super().setUp()
        # The pass asks for it; the kernels are those of this machine.
        self.enterContext(capability("AVX512"))

    def test_narrower_vectors_read_both_storages_as_fast(self):
        layer = Experts()
        with capability("AVX2"):
            frozen(layer, *inputs())
        self.assertEqual(relaid(), 0)
        self.assertTrue(layer.gate_up.is_contiguous())

    @parametrize("dtype", [torch.bfloat16, slow_subtest(torch.float32)])
    @parametrize("layer", [Experts, Halves, TwoLayers, Written])
    def test_weights_are_stored_along_k_once(self, layer, dtype):
        layer, args = layer(dtype=dtype), inputs(dtype=dtype)
        values = [p.detach().clone() for p in layer.parameters()]
        old = [(p.data_ptr(), p.stride()) for p in layer.parameters()]
        self.made = len(values) + (type(layer) is Halves)
        off = copy.deepcopy(layer)
        reference, _ = frozen(
            off, *args, moe_fusion=True, **{"cpp.moe_weight_relayout": False}
        )
        self.assertEqual(relaid(), 0)
        self.assertTrue(all(p.is_contiguous() for p in off.parameters()))
        output, _ = frozen(layer, *args, moe_fusion=True)
        self.assertEqual(relaid(), self.made)
        self.assertEqual(output, reference)
        # The module is as it was.
        self.assertEqual([(p.data_ptr(), p.stride()) for p in layer.parameters()], old)
        self.assertEqual([*layer.parameters()], values, rtol=0, atol=0)
        eager = off.double()(args[0].double(), *args[1:])
        error = (layer(*args) - eager).norm() / eager.norm()
        self.assertLess(error, 1e-2)

    def test_the_code_of_a_call_copies_nothing(self):
        args = inputs()
        _, code = frozen(Experts(), *args)
        _, of_k_major = frozen(KMajor(), *args)
        self.assertEqual(relaid(), 0)
        for text in ("empty_strided", "cpp_fused", "_moe_mlp"):
            self.assertEqual(code.count(text), of_k_major.count(text), text)
        self.assertIn("_moe_mlp", code)

    @parametrize("discard", [False, True])
    def test_memory(self, discard):
        layers, total = [], 3 * E * D * 1024 * 2

        def make():
            layers.append(Experts(hidden=1024))
            frozen(layers[0], *inputs(), freezing_discard_parameters=discard)

        left = memory_of(make)
        self.assertEqual(relaid(), 2)
        copies = 1 if discard else 2
        self.assertGreater(left, (copies - 0.05) * total)
        self.assertLess(left, (copies + 0.1) * total)

    def test_a_second_graph_has_the_same_constants(self):
        layer = Experts(hidden=1024)
        total, compiled = (
            sum(p.nbytes for p in layer.parameters()),
            torch.compile(layer),
        )

        def call(num_tokens):
            compiled(*inputs(num_tokens))

        counters.clear()
        with config.patch(freezing=True), torch.no_grad():
            self.assertGreater(memory_of(lambda: call(3)), 0.95 * total)
            self.assertLess(memory_of(lambda: call(4)), 0.1 * total)
            self.assertEqual(counters["stats"]["unique_graphs"], 2)
            self.assertEqual(relaid(), 4)
            # Not those of weights that changed.
            with torch.no_grad():
                layer.gate_up.zero_()
            torch._dynamo.reset()
            self.assertEqual(torch.compile(layer)(*inputs()).abs().max(), 0)

    @parametrize("made_for_inference", [False, True])
    @parametrize("compiled_for_inference", [False, True])
    def test_inference_mode(self, made_for_inference, compiled_for_inference):
        with torch.inference_mode(made_for_inference):
            layer = Experts()
        args = inputs()
        with torch.no_grad():
            want = layer(*args)
        with torch.inference_mode(compiled_for_inference):
            output, _ = frozen(layer, *args)
            self.assertEqual(output, want, rtol=2e-2, atol=2e-2)
        self.assertEqual(relaid(), 2)
        with torch.no_grad():
            self.assertEqual(layer(*args), want, rtol=2e-2, atol=2e-2)
        for weight in layer.parameters():
            self.assertEqual(weight.is_inference(), made_for_inference)
        if not made_for_inference:
            layer(*args).float().sum().backward()

    @parametrize(
        "layer",
        [Halves, *(slow_subtest(x) for x in (Experts, KMajorHalves))],
    )
    def test_package(self, layer):
        layer, args = layer(hidden=8192), inputs()
        total = sum(p.nbytes for p in layer.parameters())
        counters.clear()
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            reference = layer(*args)
            tokens = torch.export.Dim("tokens", min=2, max=1000)
            program = torch.export.export(
                layer, args, dynamic_shapes=({0: tokens},) * 3
            )
            path = torch._inductor.aoti_compile_and_package(
                program,
                package_path=os.path.join(folder, "experts.pt2"),
                inductor_configs={"freezing": True},
            )
            # Only gate and up of KMajorHalves, which share a storage.
            self.assertEqual(relaid(), 2 if type(layer) is not Halves else 3)
            self.assertLess(os.path.getsize(path), 1.5 * total)
            runner = torch._inductor.aoti_load_package(path)
            self.assertEqual(runner(*args), reference, rtol=2e-2, atol=2e-2)
            with zipfile.ZipFile(path) as package:
                (name,) = (n for n in package.namelist() if n.endswith("wrapper.cpp"))
                code = package.read(name).decode()
        # The constants are operands as they are.
        self.assertRegex(code, r"__moe_mlp\([^;]*_frozen_param\d, _frozen_param\d,")

    # --- what stays ---------------------------------------------------------------------

    def assert_relaid(self, layer, args):
        with torch.no_grad():
            want = layer(*args)
        output, _ = frozen(layer, *args)
        self.assertEqual(relaid(), 2)
        self.assertEqual(output, want, rtol=2e-2, atol=2e-2)

    def assert_stays(self, layer, args, reason, **options):
        strides = [p.stride() for p in layer.parameters()]
        with self.assertLogs("torch._inductor.fx_passes.moe_freezing", "INFO") as logs:
            frozen(layer, *args, **options)
        self.assertEqual(relaid(), 0)
        self.assertIn(reason, "\n".join(logs.output))
        self.assertEqual([p.stride() for p in layer.parameters()], strides)

    def test_used_elsewhere(self):
        self.assert_stays(UsedElsewhere(), inputs(), "used by more than the experts")

    @parametrize("reader", [torch.ops.aten.sum.default, None])
    def test_two_nodes_of_one_constant(self, reader):
        layer, graph = Experts(), Graph()
        for weight in layer.parameters():
            weight.data = weight.data.mT
        x, offs = (graph.placeholder(name) for name in ("x", "offs"))
        names = ("gate_up", "gate_up", "down")
        first, second, down = (graph.create_node("get_attr", name) for name in names)
        calls = [
            graph.call_function(torch.ops.aten._moe_mlp.default, (x, w, down, offs))
            for w in ([first] if reader else [first, second])
        ]
        if reader:
            calls.append(graph.call_function(reader, (second,)))
        graph.output(calls)
        gm = GraphModule(layer, graph)
        relayout_expert_weights(gm)
        self.assertEqual(gm.gate_up.stride(-1), 2 * HIDDEN if reader else 1)
        self.assertEqual(gm.down.stride(-1), 1)

    @parametrize("lend", [lambda p: p.numpy(), torch.from_dlpack])
    def test_memory_is_lent(self, lend):
        layer = Experts(dtype=torch.float32).requires_grad_(False)
        lent = [lend(p) for p in layer.parameters()]
        frozen(layer, *inputs(dtype=torch.float32))
        self.assertEqual(relaid(), 2)
        self.assertEqual(torch.as_tensor(lent[0]).data_ptr(), layer.gate_up.data_ptr())

    @parametrize("set_to_none", [False, True])
    def test_in_training(self, set_to_none):
        # A fused optimizer takes it that its state has the strides of the parameter.
        def trained(freeze):
            torch.manual_seed(0)
            layer, args = Experts(dtype=torch.float32), inputs(dtype=torch.float32)
            optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
            for step in range(3):
                layer(*args).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none)
                if freeze and not step:
                    frozen(layer, *args)
                    self.assertEqual(relaid(), 2)
            return layer.gate_up

        self.assertEqual(trained(True), trained(False), rtol=0, atol=0)

    def test_two_modules_with_one_parameter(self):
        first, second, args = Experts(), Experts(), inputs()
        second.gate_up = first.gate_up
        with torch.no_grad():  # a graph of autograd would have views
            want = [layer(*args) for layer in (first, second)]
        output, _ = frozen(first, *args)
        self.assertEqual(relaid(), 2)
        self.assertEqual([output, second(*args)], want, rtol=2e-2, atol=2e-2)
        self.assertIs(first.gate_up, second.gate_up)
        output, _ = frozen(second, *args)
        self.assertEqual(relaid(), 2)
        self.assertEqual(output, want[1], rtol=2e-2, atol=2e-2)

    @parametrize("way", ["data", "another parameter"])
    def test_a_write_that_the_parameter_does_not_count(self, way):
        """A graph that is frozen later has the weights of that time, and none of an earlier one."""
        layer, args = Experts(), inputs()
        before, _ = frozen(layer, *args)
        if way == "data":
            for weight in layer.parameters():
                weight.data.mul_(2)
        else:
            other = Experts()
            for name, weight in layer.named_parameters():
                setattr(other, name, nn.Parameter(weight.data))
            with torch.no_grad():
                for weight in layer.parameters():
                    weight.mul_(2)
            layer = other
        want = layer(*args)
        output, _ = frozen(layer, *args)
        self.assertEqual(output, want, rtol=2e-2, atol=2e-2)
        self.assertNotEqual(before, want)

    def test_state_dict(self):
        layer, args = Experts(), inputs()
        state = {name: p.clone() for name, p in layer.state_dict().items()}
        want = layer(*args)
        with config.patch(freezing=True), torch.no_grad():
            compiled = torch.compile(layer)
            compiled(*args)
            self.assertEqual(layer.state_dict(), state, rtol=0, atol=0)
            # Loaded in place: the module has it, and the graph its constants.
            layer.load_state_dict({n: torch.zeros_like(p) for n, p in state.items()})
            self.assertEqual(layer(*args).abs().max(), 0)
            self.assertEqual(compiled(*args), want, rtol=2e-2, atol=2e-2)
            layer.load_state_dict(state)
            fresh = Experts()
            fresh.load_state_dict(layer.state_dict())
            self.assertTrue(fresh.gate_up.is_contiguous())
            self.assertEqual(fresh(*args), want)

    def test_cast_in_the_graph(self):
        class Cast(Experts):
            def forward(self, x, ids, weights):
                w_in, w_out = self.gate_up.mT.to(x.dtype), self.down.mT.to(x.dtype)
                return F.moe_mlp(x, ids, weights, w_in, w_out)

        layer, args = Cast(dtype=torch.float32), inputs()
        want = layer(*args)
        output, _ = frozen(layer, *args)
        # The casts are constants of the graph; the parameters are not read.
        self.assertEqual(relaid(), 2)
        self.assertTrue(layer.gate_up.is_contiguous())
        self.assertEqual(output, want, rtol=2e-2, atol=2e-2)

    def test_shared_between_processes(self):
        layer = Experts().share_memory()
        frozen(layer, *inputs())
        self.assertEqual(relaid(), 2)
        self.assertTrue(layer.gate_up.is_shared())

    def test_parameters_that_are_constants_themselves(self):
        class Transposed(Experts):
            """No view in the graph: the parameters lie along N."""

            def __init__(self):
                super().__init__()
                for weight in self.parameters():
                    weight.data = weight.data.mT

            def forward(self, x, ids, weights):
                return F.moe_mlp(x, ids, weights, self.gate_up, self.down)

        layer, args = Transposed(), inputs()
        self.assert_relaid(layer, args)

    def test_float16_is_read_as_fast(self):
        layer, args = Experts(dtype=torch.float16), inputs(dtype=torch.float16)
        self.assert_stays(layer, args, "torch.float16 on cpu is read as fast")

    def test_storage_with_gaps(self):
        layer, args = Experts(), inputs()
        for weight in layer.parameters():
            gaps = torch.empty(*weight.shape, 2, dtype=weight.dtype)[..., 0]
            weight.data = gaps.copy_(weight)
        self.assert_relaid(layer, args)

    def test_view_outside_of_the_parameter(self):
        class Before(Experts):
            def __init__(self):
                super().__init__()
                both = torch.randn(2, *self.gate_up.shape, dtype=torch.bfloat16)
                self.gate_up = nn.Parameter(both[1])

            def forward(self, x, ids, weights):
                w_in = self.gate_up.as_strided(
                    self.gate_up.shape, self.gate_up.stride(), 0
                )
                return F.moe_mlp(x, ids, weights, w_in.mT, self.down.mT)

        layer, args = Before(), inputs()
        self.assert_relaid(layer, args)

    def test_training(self):
        layer, args = Experts(), inputs()
        counters.clear()
        with config.patch(freezing=True):
            torch.compile(layer)(*args).float().sum().backward()
        self.assertEqual(relaid(), 0)
        self.assertTrue(layer.gate_up.is_contiguous() and layer.down.is_contiguous())

    def test_without_freezing(self):
        layer = Experts()
        counters.clear()
        with torch.no_grad():
            torch.compile(layer)(*inputs())
        self.assertEqual(relaid(), 0)
        self.assertTrue(layer.gate_up.is_contiguous())


instantiate_parametrized_tests(TestMoeFreezing)

if __name__ == "__main__":
    run_tests()
