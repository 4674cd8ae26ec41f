# Owner(s): ["module: nn"]
"""Low-rank adapters of stacked experts: values, gradients, what is saved, and life with checkpointing."""

import copy
import io
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrize
from torch.nn.utils.moe_lora import add_lora
from torch.nn.utils.parametrizations import weight_norm
from torch.testing._internal.common_moe import (
    nbytes,
    read_page,
    run_code_blocks,
    saved_for_backward,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize as parametrize_test,
    run_tests,
    subtest,
    TestCase,
)
from torch.utils.checkpoint import checkpoint


# nn.MoE has recipes in some prefixes of the stack only.
RECIPES = [None, *(["mxfp8"] if "recipe" in signature(nn.MoE).parameters else [])]


def make(dim=8, hidden=12, num_experts=6, top_k=2, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return nn.MoE(dim, hidden, num_experts, top_k, dtype=dtype, **options)


def adapt(layer, rank=3, **options):
    """An adapted layer whose b are not zero."""
    for p in layer.parameters():
        p.requires_grad_(False)
    parameters = add_lora(layer, rank, **options)
    for p in parameters:
        nn.init.normal_(p, std=0.3)
    return parameters


def merged(layer, name, scale):
    """The definition, expert by expert."""
    parts = getattr(layer.parametrizations, name)
    original, a, b = parts.original, parts[0].a, parts[0].b
    return torch.stack([w + scale * b[e] @ a[e] for e, w in enumerate(original)])


class TestMoeLora(TestCase):
    @parametrize_test(
        "options",
        [
            subtest({}, name="plain"),
            subtest({"separate_up": True}, name="separate_up"),
            subtest({"bias": True, "activation": "relu"}, name="bias"),
        ],
    )
    def test_values_and_gradients(self, options):
        plain = make(**options)
        layer = copy.deepcopy(plain)
        parameters = adapt(layer, alpha=6)
        names = [n for n, p in plain.named_parameters() if p.dim() == 3]
        self.assertEqual(len(parameters), 2 * len(names))
        weights = {name: merged(layer, name, 6 / 3) for name in names}
        x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
        expected = torch.func.functional_call(plain, weights, x)
        found = layer(x)
        self.assertEqual(found, expected)
        grad = torch.randn_like(found)
        leaves = [x, *parameters]
        self.assertEqual(
            torch.autograd.grad(found, leaves, grad),
            torch.autograd.grad(expected, leaves, grad),
        )

    def test_merges_once_in_forward_and_once_in_backward(self):
        class Experts(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.randn(4, 5, 3))

            def forward(self, x):
                rows = self.w.shape[1]  # a read
                return torch.bmm(x, self.w.mT).view(4, -1, rows)

        module, x = Experts(), torch.randn(4, 7, 3, requires_grad=True)
        add_lora(module, 2)
        low_rank = module.parametrizations.w[0]
        merge = mock.Mock(side_effect=low_rank.merge)
        with mock.patch.object(low_rank, "merge", merge):
            y = module(x)
            self.assertEqual(merge.call_count, 1)
            y.sum().backward()
            self.assertEqual(merge.call_count, 2)
        expected = torch.bmm(torch.ones(4, 7, 5), module.parametrizations.w.original)
        self.assertEqual(x.grad, expected)

    def test_adapters_of_another_dtype(self):
        layer = make(dtype=torch.bfloat16)
        parameters = add_lora(layer, 2)
        layer.parametrizations.w_in[0].float()
        layer(torch.randn(7, 8, dtype=torch.bfloat16)).sum().backward()
        self.assertEqual(parameters[1].dtype, torch.float32)
        self.assertEqual(parameters[1].grad.dtype, torch.float32)
        self.assertGreater(parameters[1].grad.abs().sum(), 0)

    @parametrize_test("dtype", [torch.bfloat16, torch.float16])
    @parametrize_test("recipe", RECIPES)
    def test_autocast(self, dtype, recipe):
        """The forward's merged weight is that of the backward, which runs without autocast."""
        results = []
        for merges in (False, True):
            options = {} if recipe is None else {"recipe": recipe}
            module = make(32, 32, dtype=torch.float32, **options)
            adapt(module)
            if merges:
                for name in ("w_in", "w_out"):
                    parametrize.remove_parametrizations(module, name)
            x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
            x.requires_grad_()
            with torch.autocast("cpu", dtype):
                y = module(x)
            y.sum().backward()
            results.append((y, x.grad))
        self.assertEqual(*results, rtol=0, atol=0)

    def test_saved_whole_after_merging(self):
        layer, file = make(), io.BytesIO()
        adapt(layer)
        for name in ("w_in", "w_out"):
            parametrize.remove_parametrizations(layer, name)
        torch.save(layer, file)
        file.seek(0)
        x = torch.randn(3, 8, dtype=torch.float64)
        self.assertEqual(torch.load(file, weights_only=False)(x), layer(x))

    def test_saves_what_the_frozen_layer_saves(self):
        sizes = {}
        x = torch.randn(256, 64)
        for form in ("frozen", "lora", "kept"):
            layer = make(64, 32, 32, 4, dtype=torch.float32)
            for p in layer.parameters():
                p.requires_grad_(False)
            if form != "frozen":
                adapt(layer, rank=4)
            if form == "kept":  # the parametrization alone
                del type(layer).forward
            with saved_for_backward(exclude=layer.parameters()) as saved:
                y = layer(x.clone().requires_grad_())
            sizes[form] = nbytes(saved)
            del y
        self.assertLessEqual(sizes["lora"], 1.1 * sizes["frozen"])
        self.assertGreater(sizes["kept"], 1.5 * sizes["frozen"])

    def test_shallow_copies_run_themselves(self):
        # Those of nn.DataParallel, as of copy.copy, have another __dict__ and the same methods.
        x, ran = torch.randn(7, 8, dtype=torch.float64), []
        for merge in (False, True):
            layer = make()
            adapt(layer)
            if merge:
                for name in ("w_in", "w_out"):
                    parametrize.remove_parametrizations(layer, name)
                self.assertIs(type(layer), nn.MoE)
                self.assertNotIn("forward", layer.__dict__)
            replica = layer._replicate_for_data_parallel()
            replica._parameters.update(layer._parameters)
            replica._modules["router"] = copy.deepcopy(layer.router)
            replica.router.register_forward_hook(lambda *_: ran.append(merge))
            replica(x)
        self.assertEqual(ran, [False, True])

    def test_changed_in_an_outer_forward(self):
        class Outer(nn.MoE):
            def forward(self, x):
                y = inner(x)
                with torch.no_grad():
                    inner.parametrizations.w_in[0].a.neg_()
                return y, inner(x)

        inner, x = make(), torch.randn(7, 8, dtype=torch.float64)
        adapt(inner)
        outer = Outer(8, 12, 6, 2, dtype=torch.float64)
        adapt(outer)
        y = outer(x)
        self.assertEqual(y[1], inner(x))
        self.assertNotEqual(y[0], y[1])

    @parametrize_test("copied", (False, True))
    def test_replaced_forward(self, copied):
        layer, x = make(), torch.randn(7, 8, dtype=torch.float64)
        layer.forward = types.MethodType(
            lambda self, x: -nn.MoE.forward(self, x), layer
        )
        adapt(layer)
        with torch.no_grad():
            expected = -nn.MoE.forward(layer, x)
        model = copy.deepcopy(layer) if copied else layer
        with saved_for_backward(exclude=model.parameters()) as saved:
            self.assertEqual(model(x), expected)
        self.assertFalse(any(t.shape == layer.w_in.shape for t in saved))
        nn.init.zeros_(model.router.weight)
        self.assertEqual(torch.equal(layer(x), expected), copied)

    @parametrize_test("use_reentrant", (False, True))
    def test_checkpoint(self, use_reentrant):
        model = nn.Sequential(make(), nn.Tanh(), make())
        parameters = adapt(model[0]) + adapt(model[2])
        x = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
        expected = torch.autograd.grad(model(x).square().sum(), [x, *parameters])
        with saved_for_backward(exclude=[x, *model.parameters()]) as saved:
            y = checkpoint(model, x, use_reentrant=use_reentrant)
        self.assertEqual(nbytes(saved), 0)  # all is the checkpoint's
        y.square().sum().backward()
        self.assertEqual([t.grad for t in (x, *parameters)], expected)

    def test_hooks_around_see_the_rest(self):
        layer = make()
        parameters = adapt(layer)
        x = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
        expected = torch.autograd.grad(layer(x).square().sum(), [x, *parameters])
        packed = []

        def pack(t):
            packed.append(t.shape)
            return t.numpy(force=True).copy()

        with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
            loss = layer(x).square().sum()
        self.assertIn(x.shape, packed)
        self.assertNotIn(torch.Size((6, 24, 8)), packed)
        self.assertEqual(torch.autograd.grad(loss, [x, *parameters]), expected)

    def test_where_hooks_are_not_allowed(self):
        """As in torch.func, with gradients per sample."""
        layer = make()
        parameters = adapt(layer)
        trained = {n: p for n, p in layer.named_parameters() if p.requires_grad}
        x = torch.randn(3, 7, 8, dtype=torch.float64)

        def loss(trained, x):
            return functional_call(layer, trained, (x,)).square().sum()

        expected = [torch.autograd.grad(layer(s).square().sum(), parameters) for s in x]
        given = {n: p.detach() for n, p in trained.items()}
        found = vmap(grad(loss), in_dims=(None, 0))(given, x)
        for name, p in trained.items():
            place = next(i for i, each in enumerate(parameters) if each is p)
            self.assertEqual(found[name], torch.stack([g[place] for g in expected]))
        ensemble = {n: torch.stack([p, -p, 2 * p]) for n, p in given.items()}
        found = vmap(grad(loss), in_dims=(0, None))(ensemble, x[0])
        for i in range(3):
            one = grad(loss)({n: p[i] for n, p in ensemble.items()}, x[0])
            self.assertEqual({n: g[i] for n, g in found.items()}, one)
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            y = layer(x[0])
        self.assertEqual(torch.autograd.grad(y.square().sum(), parameters), expected[0])

    def test_steps_train_only_the_adapters(self):
        layer = make()
        before = {n: p.clone() for n, p in layer.named_parameters()}
        optimizer = torch.optim.SGD(add_lora(layer, 2), lr=0.5)
        x, target = torch.randn(2, 20, 8, dtype=torch.float64)
        losses = []
        for _ in range(20):
            loss = (layer(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        self.assertLess(losses[-1], losses[0])
        self.assertEqual(layer.parametrizations.w_in.original, before["w_in"])
        y = layer(x)
        state = layer.state_dict()
        other = make()
        add_lora(other, 2)
        other.load_state_dict(state)
        self.assertEqual(other(x), y)
        for name in ("w_in", "w_out"):
            parametrize.remove_parametrizations(layer, name)
        self.assertEqual(layer(x), y)
        self.assertEqual(list(layer.state_dict()), list(before))

    def test_modified_between_forward_and_backward(self):
        # Where one of a and b is frozen, as in LoRA-FA, autograd itself does not look at the other.
        cases = [(name, None) for name in ("original", "a", "b", "input")]
        for name, frozen in [*cases, ("a", "b"), ("b", "a")]:
            layer = make()
            adapt(layer)
            if frozen is not None:
                getattr(layer.parametrizations.w_in[0], frozen).requires_grad_(False)
            parts = layer.parametrizations.w_in
            x = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
            y = layer(x)
            changed = {"original": parts.original, "input": x}.get(name)
            with torch.no_grad():
                (getattr(parts[0], name) if changed is None else changed).mul_(2)
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace"):
                y.sum().backward()

    @parametrize_test("freed", ["original", "0.a"])
    def test_parameters_freed_after_their_forward(self, freed):
        # As ZeRO-3 of DeepSpeed does, which gathers them again for the backward of their module.
        layer, x = make(), torch.randn(7, 8, dtype=torch.float64)
        parameters = adapt(layer)
        expected = layer(x)
        grads = torch.autograd.grad(expected.sum(), parameters)
        part = layer.parametrizations.w_in
        freed = part.get_parameter(freed)
        whole = freed.data

        def gather(*args):
            freed.data = whole

        def free(module, args, output):
            freed.data = whole.new_empty(0)
            output.register_hook(gather)

        part.register_forward_pre_hook(gather)
        part.register_forward_hook(free)
        found = layer(x)
        self.assertEqual(found, expected)
        self.assertEqual(torch.autograd.grad(found.sum(), parameters), grads)

    @parametrize_test("interrupt", (False, True))
    def test_after_an_error_in_forward(self, interrupt):
        layer = make()
        parameters = adapt(layer)
        # Module calls no hooks behind an interrupt, as of a notebook, where life goes on.
        error, planted = RuntimeError, mock.DEFAULT
        if interrupt:
            error = planted = KeyboardInterrupt
        with (
            self.assertRaises(error),
            mock.patch.object(F, "moe_topk", side_effect=planted) as topk,
        ):
            layer(torch.randn(3, 8 if interrupt else 5, dtype=torch.float64))
        self.assertEqual(topk.called, interrupt)
        with saved_for_backward() as saved:
            parameters[0].square().sum()
        self.assertEqual(len(saved), 1)
        layer(torch.randn(3, 8, dtype=torch.float64)).sum().backward()
        self.assertTrue(all(p.grad is not None for p in parameters))

    def test_threads(self):
        """Each merges for itself, in one module and in several."""
        layers = [make(), make()]
        layers.append(layers[0])
        parameters = {layer: adapt(layer) for layer in layers[:2]}
        inputs = [torch.randn(7, 8, dtype=torch.float64) for _ in layers]

        def gradients(place):
            layer, x = layers[place], inputs[place]
            return torch.autograd.grad(layer(x).square().sum(), parameters[layer])

        expected = [gradients(place) for place in range(3)]
        barrier, run = threading.Barrier(3, timeout=60), F.moe_mlp

        def together(*args, **kwargs):
            barrier.wait()  # all have merged
            return run(*args, **kwargs)

        with (
            mock.patch.object(F, "moe_mlp", together),
            ThreadPoolExecutor(3) as threads,
        ):
            for _ in range(5):
                found = list(threads.map(gradients, range(3)))
                self.assertEqual(found, expected, rtol=0, atol=0)

    def test_names_one_after_the_other(self):
        layer, other = make(), make()
        other.load_state_dict(layer.state_dict())
        x = torch.randn(7, 8, dtype=torch.float64)
        adapt(layer)
        for name in ("w_in", "w_out"):
            add_lora(other, 3, names=[name])
        other.load_state_dict(layer.state_dict())
        self.assertEqual(other(x), layer(x))

    def test_no_grad_and_compile(self):
        layer = make()
        adapt(layer)
        x = torch.randn(3, 8, dtype=torch.float64)
        expected = layer(x)
        with torch.no_grad():
            self.assertEqual(layer(x), expected)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        self.assertEqual(compiled(x), expected)

    def test_reset_after_the_meta_device(self):
        with torch.device("meta"):
            layer = make()
            add_lora(layer, 3)
        layer.to_empty(device="cpu")
        for p in layer.parameters():
            p.data.fill_(torch.nan)
        layer.reset_parameters()
        for name, bound in (("w_in", 8**-0.5), ("w_out", 12**-0.5)):
            parts = layer.parametrizations[name]
            for p in (parts.original, parts[0].a):
                self.assertTrue(0.8 * bound < p.abs().max() < bound)
            self.assertFalse(parts[0].b.any())

    @parametrize_test("kind", ("norm", "exponential"))
    def test_other_parametrizations(self, kind):
        class Exponential(nn.Module):
            def forward(self, x):
                return x.exp()

            def right_inverse(self, x):
                return x.log()

        layer = make()
        if kind == "norm":
            weight_norm(layer, "w_in")
        else:
            layer.w_in.data.uniform_(1, 2)
            parametrize.register_parametrization(layer, "w_in", Exponential())
        parts = [*layer.parametrizations["w_in"].parameters(recurse=False)]
        old = [p.clone() for p in parts]
        with mock.patch.object(nn.init, "uniform_", lambda w, a, b: w.fill_(b)):
            with torch.no_grad():
                layer.reset_parameters()
        self.assertEqual(layer.w_in, torch.full_like(layer.w_in, 8**-0.5))
        for before, now in zip(old, parts):
            self.assertFalse((before == now).any())
        name = type(layer.parametrizations["w_in"][0]).__name__
        for names in (None, ["w_in"]):
            with self.assertRaisesRegex(ValueError, f"has a parametrization, {name}"):
                add_lora(layer, 2, names=names)
        self.assertEqual(len(add_lora(layer, 2, names=["w_out"])), 2)

    def test_export(self):
        layer, x = make(), torch.randn(5, 8, dtype=torch.float64)
        plain = signature(layer.forward)
        adapt(layer)
        self.assertEqual(signature(layer.forward), plain)
        shapes = {"input": {0: torch.export.Dim.DYNAMIC}}
        exported = torch.export.export(layer, (x,), dynamic_shapes=shapes)
        self.assertEqual(exported.module()(x[:3]), layer(x[:3]))

    def test_errors(self):
        for options in (
            {"rank": 0},
            {"rank": 2.5},
            {"rank": 2, "names": ["w"]},
            {"rank": 2, "names": ["b_in"]},
            {"rank": 2, "names": []},
            {"rank": 2, "names": "w_in"},
            {"rank": 2, "names": ["w_in", "w_in"]},
        ):
            with self.assertRaisesRegex(
                ValueError, "add_lora: rank must be an integer"
            ):
                add_lora(make(bias=True), **options)
        with self.assertRaisesRegex(ValueError, "add_lora: .* it has .*weight"):
            add_lora(nn.Linear(2, 2), 1)
        layer = make()
        add_lora(layer, 2)
        for names in (None, ["w_in"]):
            with self.assertRaisesRegex(
                ValueError, "adapted .'w_in', 'w_out'. already"
            ):
                add_lora(layer, 2, names=names)

    def test_documentation(self):
        run_code_blocks(read_page(__file__, "nn.utils.moe_lora.md"))


instantiate_parametrized_tests(TestMoeLora)

if __name__ == "__main__":
    run_tests()
