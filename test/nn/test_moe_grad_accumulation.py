# Owner(s): ["module: nn"]
"""torch.nn.utils._moe_grad_accumulation: the same ``.grad`` bits, and off where somebody could notice."""

from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.utils import _moe_grad_accumulation as accumulation
from torch.nn.utils._moe_grad_accumulation import moe_mlp_accumulating
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_generators import get_case


class Spy:
    """Counts the backwards that went group by group."""

    def __enter__(self):
        self.calls = 0
        original = accumulation._accumulating_backward

        def counted(*args):
            self.calls += 1
            return original(*args)

        self._patch = mock.patch.object(accumulation, "_accumulating_backward", counted)
        self._patch.start()
        return self

    def __exit__(self, *error):
        self._patch.stop()


class TestGradAccumulation(TestCase):
    def _operands(
        self, name="uniform", dtype=torch.float32, bias=False, separate=False
    ):
        o = get_case(name).operands(dtype, bias=bias, requires_grad=True)
        leaves = {"x": o.input, "s": o.topk_weights, "w_in": o.w_in, "w_out": o.w_out}
        if separate:
            gate, up = (w.detach().clone() for w in o.w_in.chunk(2, dim=1))
            leaves |= {"w_in": gate.requires_grad_(), "w_up": up.requires_grad_()}
        if bias:
            leaves |= {"b_in": o.b_in, "b_out": o.b_out}
        return o, leaves

    def _forward(self, o, leaves, function=moe_mlp_accumulating):
        named = {n: leaves[n] for n in ("w_up", "b_in", "b_out") if n in leaves}
        args = (leaves[n] for n in ("s", "w_in", "w_out"))
        return function(leaves["x"], o.topk_indices, *args, **named)

    def _train(self, o, leaves, fused, steps=3):
        for leaf in leaves.values():
            leaf.grad = None
        for _ in range(steps):
            y = self._forward(o, leaves, moe_mlp_accumulating if fused else F.moe_mlp)
            y.backward(o.grad_out)
        return {name: leaf.grad.clone() for name, leaf in leaves.items()}

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
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("separate", (False, True))
    def test_same_bits(self, name, dtype, separate):
        o, leaves = self._operands(name, dtype, bias=True, separate=separate)
        with mock.patch.object(accumulation, "GROUP_BYTES", 2000), Spy() as spy:
            fused = self._train(o, leaves, True)
        self.assertEqual(spy.calls, 2)  # the first gradient is kept, not added
        self.assertEqual(fused, self._train(o, leaves, False), atol=0, rtol=0)

    def test_only_weights_need_gradients(self):
        o, leaves = self._operands()
        for name in ("x", "s"):
            leaves[name] = leaves[name].detach()
        leaves["w_out"] = leaves["w_out"].detach()
        leaves["w_in"].grad = torch.ones_like(leaves["w_in"])
        with Spy() as spy:
            self._forward(o, leaves).backward(o.grad_out)
        self.assertEqual(spy.calls, 1)
        other = leaves | {"w_in": leaves["w_in"].detach().requires_grad_()}
        other["w_in"].grad = torch.ones_like(other["w_in"])
        self._forward(o, other, F.moe_mlp).backward(o.grad_out)
        self.assertEqual(leaves["w_in"].grad, other["w_in"].grad, atol=0, rtol=0)

    def _steps_aside(self, prepare=lambda leaves: None, backward=None):
        """Prepared leaves with a ``.grad`` take the usual way; returns them."""
        o, leaves = self._operands()
        self._train(o, leaves, False, steps=1)
        prepare(leaves)
        with Spy() as spy:
            y = self._forward(o, leaves)
            (backward or (lambda y, o, leaves: y.backward(o.grad_out)))(y, o, leaves)
        self.assertEqual(spy.calls, 0)
        return leaves

    def test_hooks_see_their_gradient(self):
        seen = []
        self._steps_aside(lambda v: v["w_in"].register_hook(seen.append))
        self.assertEqual(seen[0].shape, (4, 48, 16))
        seen.clear()
        self._steps_aside(
            lambda v: v["w_out"].register_post_accumulate_grad_hook(seen.append)
        )
        self.assertEqual(len(seen), 1)

    def test_autograd_grad_leaves_grad_alone(self):
        before = {}

        def prepare(leaves):
            before.update({n: v.grad.clone() for n, v in leaves.items()})

        def grad(y, o, leaves):
            found = torch.autograd.grad(y, leaves["w_in"], o.grad_out)
            self.assertEqual(found[0], before["w_in"], atol=0, rtol=0)

        leaves = self._steps_aside(prepare, grad)
        for name, leaf in leaves.items():
            self.assertEqual(leaf.grad, before[name], atol=0, rtol=0)

    def test_inputs_leave_a_weight_out(self):
        before = []

        def prepare(leaves):
            before.append(leaves["w_in"].grad.clone())

        def backward(y, o, leaves):
            y.backward(o.grad_out, inputs=[leaves["x"], leaves["w_out"]])

        leaves = self._steps_aside(prepare, backward)
        self.assertEqual(leaves["w_in"].grad, before[0], atol=0, rtol=0)

    def test_computed_weights(self):
        o, leaves = self._operands()
        computed = leaves | {"w_in": leaves["w_in"] * 2}
        with Spy() as spy:
            for _ in range(2):
                self._forward(o, computed).backward(o.grad_out, retain_graph=True)
        self.assertEqual(spy.calls, 0)

    def test_ddp(self):
        ddp = torch.nn.parallel.DistributedDataParallel
        o, leaves = self._operands()
        self._train(o, leaves, False, steps=1)
        with mock.patch.object(ddp, "_active_ddp_module", object()), Spy() as spy:
            self._forward(o, leaves).backward(o.grad_out)
        self.assertEqual(spy.calls, 0)

    def test_a_weight_that_is_used_twice(self):
        o, leaves = self._operands()
        grads = []
        for fused in (False, True):
            self._train(o, leaves, False, steps=1)
            function = moe_mlp_accumulating if fused else F.moe_mlp
            y = sum(self._forward(o, leaves, function) for _ in range(2))
            (y.sum() + leaves["w_in"].sum()).backward()
            grads.append(leaves["w_in"].grad)
        self.assertEqual(grads[0], grads[1])

    def test_saves_nothing_more(self):
        o, leaves = self._operands()
        saved = []
        for fused in (False, True):
            seen = {}

            def pack(t):
                seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
                return t

            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
            with hooks:
                y = self._forward(
                    o, leaves, moe_mlp_accumulating if fused else F.moe_mlp
                )
            saved.append(sum(seen.values()))
            del y
        self.assertEqual(saved[0], saved[1])


instantiate_parametrized_tests(TestGradAccumulation)

if __name__ == "__main__":
    run_tests()
