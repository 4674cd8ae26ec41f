# Owner(s): ["module: nn"]
"""Expert weight gradients that the kernel adds to ``.grad``: the same bits, and nobody can notice.

What autograd does by itself is had by holding the AccumulateGrad nodes: see ``held``.
"""

import copy
import pathlib
import threading
import unittest

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.profiler import profile, ProfilerActivity
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    IS_LINUX,
    parametrize,
    run_tests,
    TEST_WITH_ASAN,
    TestCase,
)
from torch.testing._internal.moe_generators import get_case
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


class NewGradients:
    """Counts the weight gradients that backwards make: each is an empty_like of a weight.

    Seen from outside by a profiler, as any hook would switch the accumulation off.
    """

    def __enter__(self):
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._profile.__enter__()
        return self

    def __exit__(self, *error):
        self._profile.__exit__(*error)
        events = self._profile.events()
        names = [e.name for e in events if e.name == "aten::_moe_mlp_backward"]
        if not names and error[0] is None:
            raise AssertionError("no backward of _moe_mlp was seen")
        self.made = sum(
            e.name == "aten::empty_like"
            and e.cpu_parent is not None
            and e.cpu_parent.name == "aten::_moe_mlp_backward"
            for e in events
        )


def bits(t):
    """The integers that floating point values are: -0 is not 0, and any NaN is NaN.

    Which of two NaN their sum is depends on whether add does vectors or what is left.
    """
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    one_nan = torch.where(t.detach().isnan(), torch.nan, t.detach())
    return one_nan.contiguous().view(sizes[t.element_size()])


class TestGradAccumulation(TestCase):
    def _leaves(self, name="uniform", dtype=torch.float32, separate=False, bias=True):
        o = get_case(name).operands(dtype, bias=bias, requires_grad=True)
        leaves = {"x": o.input, "s": o.topk_weights, "w_in": o.w_in, "w_out": o.w_out}
        if separate:
            gate, up = (w.detach().clone() for w in o.w_in.chunk(2, dim=1))
            leaves |= {"w_in": gate.requires_grad_(), "w_up": up.requires_grad_()}
        if bias:
            leaves |= {"b_in": o.b_in, "b_out": o.b_out}
        return o, leaves

    def _forward(self, o, leaves):
        named = {n: leaves[n] for n in ("w_up", "b_in", "b_out") if n in leaves}
        args = (leaves[n] for n in ("s", "w_in", "w_out"))
        return F.moe_mlp(leaves["x"], o.topk_indices, *args, **named)

    def _micro_batches(self, o, leaves, count=3, held=False):
        """.grad after ``count`` backwards with other gradients of y; held: by autograd alone."""
        edges = [get_gradient_edge(v) for v in leaves.values()] if held else []
        for leaf in leaves.values():
            leaf.grad = None
        for i in range(count):
            self._forward(o, leaves).backward(o.grad_out * (i + 1) / 3)
        del edges
        return {name: leaf.grad.clone() for name, leaf in leaves.items()}

    def _made(self, prepare=lambda o, leaves: None, backward=None, **case):
        """How many weight gradients a backward makes where ``.grad`` is there."""
        o, leaves = self._leaves(bias=False, **case)
        self._micro_batches(o, leaves, 1)
        kept = prepare(o, leaves)  # noqa: F841, what it returns stays alive
        y = self._forward(o, leaves)
        with NewGradients() as new:
            (backward or (lambda y, o, leaves: y.backward(o.grad_out)))(y, o, leaves)
        return new.made

    @parametrize(
        "name",
        (
            "uniform",
            "empty_experts",
            "sentinels",
            "one_of_one",
            "no_tokens",
            "recorded",
        ),
    )
    @parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
    @parametrize("separate", (False, True))
    def test_same_bits(self, name, dtype, separate):
        o, leaves = self._leaves(name, dtype, separate)
        expected = self._micro_batches(o, leaves, held=True)
        found = self._micro_batches(o, leaves)
        self.assertEqual(found, expected, atol=0, rtol=0)
        for leaf in leaves:
            self.assertEqual(bits(found[leaf]), bits(expected[leaf]))

    def _both(self, run, **case):
        """What ``run(o, leaves)`` leaves has the bits and versions that autograd alone leaves."""
        found = []
        for held in (True, False):
            o, leaves = self._leaves(**case)
            edges = [get_gradient_edge(v) for v in leaves.values()] if held else []
            run(o, leaves)
            found.append(
                {
                    n: (bits(v.grad.to_dense()), v.grad._version)
                    for n, v in leaves.items()
                }
            )
            del edges
        self.assertEqual(found[1], found[0], atol=0, rtol=0)

    @parametrize("name", ("empty_experts", "sentinels", "no_tokens"))
    @parametrize("value", (-0.0, 0.0, float("nan"), float("inf")))
    @parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    def test_zeros_and_what_is_not_finite(self, name, value, dtype):
        def run(o, leaves):
            for leaf in leaves.values():
                leaf.grad = torch.full_like(leaf, value)
            self._forward(o, leaves).backward(o.grad_out)
            self._forward(o, leaves).backward(o.grad_out * -value)

        self._both(run, name=name, dtype=dtype)

    @parametrize("of", ("grad_out", "x", "w_in"))
    def test_lazy_negation(self, of):
        def run(o, leaves):
            self._forward(o, leaves).backward(o.grad_out)
            grad_out, used = o.grad_out, leaves
            if of == "grad_out":
                grad_out = torch._neg_view(grad_out)
            else:
                used = leaves | {of: torch._neg_view(leaves[of].detach())}
            self._forward(o, used).backward(grad_out)

        self._both(run)

    @parametrize(
        "form", ("sparse", "float32", "overlap", "the weight", "requires_grad", "view")
    )
    def test_any_form_of_the_gradient(self, form):
        def run(o, leaves):
            for leaf in leaves.values():
                leaf.grad = torch.ones_like(leaf)
            w_in, w_out = leaves["w_in"], leaves["w_out"]
            if form == "sparse":
                w_in.grad = w_in.grad.to_sparse()
            elif form == "float32":
                w_in.grad, w_in.grad_dtype = None, torch.float32
                w_in.grad = torch.ones_like(w_in, dtype=torch.float32)
            elif form == "overlap":
                buffer = torch.ones(w_in.numel() + 3, dtype=w_in.dtype)
                w_in.grad = buffer[3:].view_as(w_in)
                w_out.grad = buffer[: w_out.numel()].view_as(w_out)
            elif form == "the weight":
                w_in.grad = w_in.detach()
            elif form == "requires_grad":
                w_in.grad.requires_grad_()
            else:
                factor = torch.ones((), dtype=w_in.dtype, requires_grad=True)
                base = torch.ones_like(w_in)
                w_in.grad = base.view_as(base)
                base.mul_(factor)
            for i in range(2):
                self._forward(o, leaves).backward(o.grad_out * (i + 1))

        self._both(run, dtype=torch.bfloat16)

    def test_fsdp(self):
        """It keeps unsharded gradients of micro-batches that are not reduced: they are added to."""
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        o, leaves = self._leaves(bias=False)
        expected = self._micro_batches(o, leaves)

        class Experts(torch.nn.Module):
            def forward(module, x):
                return self._forward(o, leaves | dict(module.named_parameters()))

        model, made = Experts(), []
        for name in ("w_in", "w_out"):
            model.register_parameter(name, torch.nn.Parameter(leaves[name].detach()))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
            fully_shard(model, mesh=mesh)
            for i in range(3):
                model.set_requires_gradient_sync(i == 2)
                with NewGradients() as new:
                    model(o.input).backward(o.grad_out * (i + 1) / 3)
                made.append(new.made)
            for name, weight in model.named_parameters():
                grad = weight.grad.to_local()
                self.assertEqual(grad, expected[name], atol=0, rtol=0)
        finally:
            dist.destroy_process_group()
        self.assertEqual(made, [2, 0, 0])

    def test_zero_tensor(self):
        def run(o, leaves):
            self._forward(o, leaves).backward(o.grad_out)
            zero = torch._efficientzerotensor(o.grad_out.shape)
            self._forward(o, leaves).backward(zero)

        self._both(run)

    def test_tangent_of_the_gradient_is_not_dropped(self):
        o, leaves = self._leaves(bias=False)
        self._micro_batches(o, leaves, 1)
        y = self._forward(o, leaves)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(o.grad_out, torch.ones_like(o.grad_out))
            with self.assertRaisesRegex(NotImplementedError, "forward AD"):
                y.backward(dual)

    def test_node_that_a_hook_calls(self):
        """It returns gradients to the hook, and adds none."""
        o, leaves = self._leaves(bias=False)
        self._micro_batches(o, leaves, 1)
        before = leaves["w_in"].grad.clone()
        node = self._forward(o, leaves).grad_fn
        while node.name() != "MoeMlpBackward0":
            node = node.next_functions[0][0]
        found = []
        other = torch.ones(2, requires_grad=True) * 1
        other.register_hook(lambda _: found.extend(node(o.grad_out)))
        other.sum().backward()
        self.assertEqual(found[1], before * 3, atol=1e-5, rtol=1e-5)
        self.assertEqual(leaves["w_in"].grad, before, atol=0, rtol=0)

    @parametrize("other", ("shape", "dtype"))
    def test_leaf_with_other_data_than_was_saved(self, other):
        o, leaves = self._leaves(bias=False)
        with saved_tensors_hooks(torch.clone, lambda t: t):
            y = self._forward(o, leaves)
        w = leaves["w_in"]
        w.data = w.data[:1].clone() if other == "shape" else w.data.double()
        w.grad = torch.zeros_like(w)
        if other == "shape":
            with self.assertRaisesRegex(RuntimeError, "doesn't match the broadcast"):
                y.backward(o.grad_out)
            self.assertEqual(w.grad, torch.zeros_like(w))
        else:
            y.backward(o.grad_out)
            self.assertEqual(w.grad.dtype, torch.float64)
            self.assertNotEqual(w.grad, torch.zeros_like(w))

    def test_memory_of_two_storages(self):
        def run(o, leaves):
            self._forward(o, leaves).backward(o.grad_out)
            same = torch.from_dlpack(leaves["w_in"].grad)
            grad_out = same.flatten()[: o.grad_out.numel()].view_as(o.grad_out)
            self._forward(o, leaves).backward(grad_out)

        self._both(run, bias=False)

    def test_versions_of_first_gradients(self):
        def run(o, leaves):
            leaves["w_in"].grad = torch.zeros_like(leaves["w_in"])
            self._forward(o, leaves).backward(o.grad_out)

        self._both(run)

    def test_shapes_in_a_profile(self):
        shapes = []
        for held in (True, False):
            o, leaves = self._leaves()
            self._micro_batches(o, leaves, 1)
            edges = [get_gradient_edge(v) for v in leaves.values()] if held else []
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as p:
                self._forward(o, leaves).backward(o.grad_out)
            (event,) = (e for e in p.events() if e.name == "aten::_moe_mlp_backward")
            shapes.append(event.input_shapes[:12])
            del edges
        self.assertEqual(shapes[1], shapes[0])
        self.assertIn([4, 48, 16], shapes[1])

    def test_expanded_gradient_of_the_output(self):
        made = self._made(backward=lambda y, o, leaves: y.sum().backward())
        self.assertEqual(made, 0)

    def test_nothing_is_made(self):
        self.assertEqual(self._made(), 0)
        self.assertEqual(self._made(separate=True), 0)

    def test_the_same_tensor_of_a_new_version(self):
        o, leaves = self._leaves()
        self._micro_batches(o, leaves, 1)
        grad = leaves["w_in"].grad
        version, address = grad._version, grad.data_ptr()
        self._forward(o, leaves).backward(o.grad_out)
        self.assertIs(leaves["w_in"].grad, grad)
        self.assertEqual(grad.data_ptr(), address)
        self.assertEqual(grad._version, version + 1)

    @parametrize("form", ("transposed", "strided", "flat buffer"))
    def test_any_strides_of_the_gradient(self, form):
        def like(w):
            if form == "transposed":
                return torch.ones_like(w.mT.contiguous()).mT
            if form == "strided":
                return torch.ones(*w.shape, 2, dtype=w.dtype)[..., 0]
            return torch.ones(w.numel() + 3, dtype=w.dtype)[3:].view_as(w)

        o, leaves = self._leaves(dtype=torch.bfloat16)
        found = []
        for held in (True, False):
            edges = [get_gradient_edge(v) for v in leaves.values()] if held else []
            for leaf in leaves.values():
                leaf.grad = None
            for name in ("w_in", "w_out"):
                leaves[name].grad = like(leaves[name])
            self._forward(o, leaves).backward(o.grad_out)
            found.append([leaves[n].grad.clone() for n in ("w_in", "w_out")])
            del edges
        self.assertEqual(found[0], found[1], atol=0, rtol=0)

    @parametrize("order", ((0, 2, 1), (1, 0, 2), (1, 2, 0)))
    def test_any_strides_of_a_weight(self, order):
        """A tile of the gradient is dense, or autograd adds it."""

        def permuted(w):
            back = sorted(range(3), key=order.__getitem__)
            return w.detach().permute(order).contiguous().permute(back)

        def run(o, leaves):
            for name in ("w_in", "w_out"):
                leaves[name].data = permuted(leaves[name])
            self._forward(o, leaves).backward(o.grad_out)
            with NewGradients() as new:
                self._forward(o, leaves).backward(o.grad_out / 3)
            seen.append(new.made)

        seen = []
        self._both(run)
        self.assertEqual(seen, [2, 0 if order == (0, 2, 1) else 2])

    @unittest.skipIf(not IS_LINUX or TEST_WITH_ASAN, "limits the address space")
    def test_no_memory_for_one_gradient(self):
        """None was added to, so that the backward can be tried again."""
        import resource

        x = torch.randn(8, 1024)
        ids = torch.zeros(8, 1, dtype=torch.int64)
        w_in, w_out = (
            torch.randn(size).requires_grad_()
            for size in ((8, 2048, 1024), (8, 1024, 1024))
        )
        w_in.grad = torch.zeros_like(w_in)
        y = F.moe_mlp(x, ids, torch.ones(8, 1), w_in, w_out).sum()
        y.backward(retain_graph=True, inputs=[w_in])  # whatever is made once
        w_in.grad.zero_()
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        before = resource.getrlimit(resource.RLIMIT_AS)
        limit = pages * resource.getpagesize() + w_out.nbytes // 2
        try:
            resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
            with self.assertRaisesRegex(RuntimeError, "DefaultCPUAllocator"):
                y.backward(retain_graph=True)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        self.assertEqual(w_in.grad.count_nonzero(), 0)
        self.assertIsNone(w_out.grad)

    def test_two_weights_in_one_buffer(self):
        o, leaves = self._leaves()
        expected = self._micro_batches(o, leaves, 2, held=True)
        weights = [leaves["w_in"], leaves["w_out"]]
        buffer = torch.zeros(sum(w.numel() for w in weights))
        for w, part in zip(weights, buffer.split([w.numel() for w in weights])):
            w.grad = part.view_as(w)
        for i in range(2):
            self._forward(o, leaves).backward(o.grad_out * (i + 1) / 3)
        for name in ("w_in", "w_out"):
            self.assertEqual(leaves[name].grad, expected[name], atol=0, rtol=0)

    def test_only_one_weight_has_a_gradient(self):
        def prepare(o, leaves):
            leaves["w_out"].grad = None

        self.assertEqual(self._made(prepare), 2)
        o, leaves = self._leaves()
        leaves["w_in"].requires_grad_(False)
        del leaves["w_in"].grad
        leaves["w_out"].grad = torch.ones_like(leaves["w_out"])
        self._forward(o, leaves).backward(o.grad_out)
        self.assertIsNone(leaves["w_in"].grad)
        self.assertNotEqual(leaves["w_out"].grad, torch.ones_like(leaves["w_out"]))

    @parametrize("kind", ("tensor", "post-accumulate", "pre", "post"))
    def test_hooks_see_their_gradient(self, kind):
        seen = []

        def prepare(o, leaves):
            weight = leaves["w_in"]
            node = get_gradient_edge(weight).node
            if kind == "tensor":
                weight.register_hook(seen.append)
            elif kind == "post-accumulate":
                weight.register_post_accumulate_grad_hook(seen.append)
            elif kind == "pre":
                node.register_prehook(lambda grads: seen.append(grads[0]))
            else:
                node.register_hook(lambda _, grads: seen.append(grads[0]))
            return node if kind in ("pre", "post") else None

        self.assertEqual(self._made(prepare), 2)
        self.assertEqual([tuple(g.shape) for g in seen], [(4, 48, 16)])

    @parametrize("leaf", ("x", "w_in", "w_out"))
    def test_hook_that_reads_other_gradients_and_raises(self, leaf):
        def run(o, leaves):
            self._micro_batches(o, leaves, 1)

            def hook(_):
                seen.append({n: v.grad.clone() for n, v in leaves.items()})
                raise ValueError("from the hook")

            leaves[leaf].register_hook(hook)
            with self.assertRaisesRegex(ValueError, "from the hook"):
                self._forward(o, leaves).backward(o.grad_out)

        seen = []
        self._both(run)
        self.assertEqual(seen[1], seen[0], atol=0, rtol=0)

    def test_hook_of_the_node(self):
        seen = []

        def backward(y, o, leaves):
            y.grad_fn.next_functions  # a view
            node = y.grad_fn
            while node.name() != "MoeMlpBackward0":
                node = node.next_functions[0][0]
            node.register_hook(lambda inputs, _: seen.append(inputs[1].shape))
            y.backward(o.grad_out)

        self.assertEqual(self._made(backward=backward), 2)
        self.assertEqual(len(seen), 1)

    def test_autograd_grad_leaves_grad_alone(self):
        before = {}

        def prepare(o, leaves):
            before.update({n: v.grad.clone() for n, v in leaves.items()})
            before["leaves"] = leaves

        def grad(y, o, leaves):
            found = torch.autograd.grad(y, leaves["w_in"], o.grad_out)
            self.assertEqual(found[0], before["w_in"] * 3, atol=1e-5, rtol=1e-5)

        self.assertEqual(self._made(prepare, grad), 1)
        for name, leaf in before.pop("leaves").items():
            self.assertEqual(leaf.grad, before[name], atol=0, rtol=0)

    def test_inputs_leave_a_weight_out(self):
        before = []

        def prepare(o, leaves):
            before.extend((leaves["w_in"], leaves["w_in"].grad.clone()))

        def backward(y, o, leaves):
            y.backward(o.grad_out, inputs=[leaves["x"], leaves["w_out"]])

        self.assertEqual(self._made(prepare, backward), 1)  # of w_out alone
        self.assertEqual(before[0].grad, before[1], atol=0, rtol=0)

    def test_create_graph_anomaly_mode_and_modes(self):
        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                names.append(function.name())
                return function(*args, **(kwargs or {}))

        def in_mode(y, o, leaves):
            with Mode():
                y.backward(o.grad_out)

        def anomaly(y, o, leaves):
            with torch.autograd.detect_anomaly(check_nan=True):
                y.backward(o.grad_out)

        names = []
        self.assertEqual(self._made(backward=in_mode), 2)
        self.assertIn("aten::_moe_mlp_backward", names)
        with self.assertWarns(UserWarning):
            self.assertEqual(self._made(backward=anomaly), 2)
        graph = self._made(
            backward=lambda y, o, _: y.backward(o.grad_out, create_graph=True)
        )
        self.assertEqual(graph, 2)

    def test_computed_weights(self):
        o, leaves = self._leaves()
        grads = []
        for held in (True, False):
            edges = [get_gradient_edge(leaves["w_in"])] if held else []
            leaves["w_in"].grad = torch.ones_like(leaves["w_in"])
            self._forward(o, leaves | {"w_in": leaves["w_in"] * 2}).backward(o.grad_out)
            grads.append(leaves["w_in"].grad)
            del edges
        self.assertEqual(grads[0], grads[1], atol=0, rtol=0)

    def test_a_weight_that_is_used_twice(self):
        o, leaves = self._leaves(dtype=torch.bfloat16)
        grads = []
        for held in (True, False):
            edges = [get_gradient_edge(v) for v in leaves.values()] if held else []
            self._micro_batches(o, leaves, 1)
            y = sum(self._forward(o, leaves) for _ in range(2))
            (y * o.grad_out).sum().backward()
            (self._forward(o, leaves).sum() + leaves["w_in"].sum()).backward()
            grads.append({n: v.grad.clone() for n, v in leaves.items()})
            del edges
        self.assertEqual(grads[0], grads[1], atol=0, rtol=0)

    def test_gradient_that_the_backward_reads(self):
        o, leaves = self._leaves(bias=False)
        grads = []
        for held in (True, False):
            edges = [get_gradient_edge(leaves["w_in"])] if held else []
            storage = torch.ones(leaves["w_in"].numel() + o.grad_out.numel())
            leaves["w_in"].grad = storage[: leaves["w_in"].numel()].view_as(
                leaves["w_in"]
            )
            grad_out = storage[: o.grad_out.numel()].view_as(o.grad_out)
            self._forward(o, leaves).backward(grad_out)
            grads.append(leaves["w_in"].grad)
            del edges
        self.assertEqual(grads[0], grads[1], atol=0, rtol=0)

    def test_retained_graph_counts_each_backward_once(self):
        o, leaves = self._leaves(bias=False)
        self._micro_batches(o, leaves, 1)
        first = leaves["w_in"].grad.clone()
        y = self._forward(o, leaves)
        for _ in range(2):
            y.backward(o.grad_out / 3, retain_graph=True)
        self.assertEqual(leaves["w_in"].grad, first * 3)

    @parametrize("reentrant", (False, True))
    def test_checkpoint(self, reentrant):
        o, leaves = self._leaves(bias=False)
        expected = self._micro_batches(o, leaves, 2)
        for leaf in leaves.values():
            leaf.grad = None
        for i in range(2):

            def run(x):
                return self._forward(o, leaves | {"x": x})

            y = checkpoint(run, leaves["x"], use_reentrant=reentrant)
            with NewGradients() as new:
                y.backward(o.grad_out * (i + 1) / 3)
        self.assertEqual(new.made, 0)
        for name, leaf in leaves.items():
            self.assertEqual(leaf.grad, expected[name], atol=0, rtol=0)

    def test_threads(self):
        o, leaves = self._leaves(bias=False)
        weights = {n: leaves[n] for n in ("w_in", "w_out")}
        self._micro_batches(o, leaves, 1)
        one = {n: w.grad.clone() for n, w in weights.items()}
        for w in weights.values():
            w.grad.zero_()

        def work():
            mine = {n: v.detach().requires_grad_() for n, v in leaves.items()} | weights
            for _ in range(20):
                self._forward(o, mine).backward(o.grad_out / 3)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n, w in weights.items():
            self.assertEqual(w.grad, one[n] * 80, atol=1e-3, rtol=1e-4)

    def test_ddp(self):
        import torch.distributed as dist

        o, leaves = self._leaves(bias=False)
        weights = {n: torch.nn.Parameter(leaves[n].detach()) for n in ("w_in", "w_out")}
        seen = []

        class Experts(torch.nn.Module):
            def __init__(self):
                super().__init__()
                for name, weight in weights.items():
                    self.register_parameter(name, weight)

            def forward(module, x):
                return self._forward(
                    o, leaves | dict(module.named_parameters()) | {"x": x}
                )

        def hook(state, bucket):
            seen.append(bucket.buffer().clone())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            expected = copy.deepcopy(Experts())
            model = torch.nn.parallel.DistributedDataParallel(Experts())
            model.register_comm_hook(None, hook)
            for _ in range(2):
                model(o.input).backward(o.grad_out)
                expected(o.input).backward(o.grad_out)
        finally:
            dist.destroy_process_group()
        self.assertEqual(len(seen), 2)
        for a, b in zip(model.parameters(), expected.parameters()):
            self.assertEqual(a.grad, b.grad)

    def test_compiled(self):
        o, leaves = self._leaves(bias=False)
        expected = self._micro_batches(o, leaves, 3)
        forward = torch.compile(
            lambda **leaves: self._forward(o, leaves), backend="aot_eager"
        )
        for leaf in leaves.values():
            leaf.grad = None
        for i in range(3):
            forward(**leaves).backward(o.grad_out * (i + 1) / 3)
        for name, leaf in leaves.items():
            self.assertEqual(leaf.grad, expected[name])


instantiate_parametrized_tests(TestGradAccumulation)

if __name__ == "__main__":
    run_tests()
