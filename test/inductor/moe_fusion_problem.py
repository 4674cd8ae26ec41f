"""Blocks of experts that the tests of moe_fusion compile: their operands and parts, and how they run."""

import contextlib
import copy
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.fx_passes.moe_fusion import moe_fusion
from torch._inductor.test_case import TestCase
from torch.testing._internal.common_utils import TEST_WITH_SLOW


T, D, HIDDEN, E, K = 20, 32, 16, 6, 3


def make_inputs(dtype):
    """Tokens, expert ids and router weights."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, D, generator=generator)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    ids = torch.where(ids == 2, 3, ids)  # expert 2 is empty, 3 has a token twice
    weights = torch.rand(T, K, generator=generator)
    return x.to(dtype), ids, weights.to(dtype)


def run(fn, module, inputs, training):
    """Output, then with training the gradients of tokens, router weights and parameters."""
    x, ids, weights = inputs
    if not training:
        with torch.no_grad():
            return [fn(x, ids, weights)]
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = fn(x, ids, weights)
    grads = torch.autograd.grad(
        y,
        [x, weights, *module.parameters()],
        torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype),
        allow_unused=True,
        materialize_grads=True,
    )
    return [y, *grads]


class Weights(nn.Module):
    def __init__(self, fn):
        super().__init__()
        g = torch.Generator().manual_seed(0)

        def weight(*shape):
            return nn.Parameter(torch.randn(shape, generator=g) / shape[-1] ** 0.5)

        self.fn = fn
        self.w_gate, self.w_up = weight(E, HIDDEN, D), weight(E, HIDDEN, D)
        self.w_in, self.w_out = weight(E, 2 * HIDDEN, D), weight(E, D, HIDDEN)
        self.b_in, self.b_out = weight(E, 2 * HIDDEN), weight(E, D)

    def forward(self, *inputs):
        return self.fn(self, *inputs)


def product(rows, weight, offs):
    return F.grouped_mm(rows, weight.transpose(-2, -1), offs=offs)


def gated(h):
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def in_order(ids):
    sorted_ids, perm = ids.flatten().sort(stable=True)
    counts = torch.histc(sorted_ids.float(), E, 0, E - 1)
    return sorted_ids, perm, counts.cumsum(0, dtype=torch.int32)


def mlp(m, rows, offs):
    return product(gated(product(rows, m.w_in, offs)), m.w_out, offs)


def added(x, rows, perm, weights):
    rows = rows * weights.flatten()[perm].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, perm // K, rows.to(x.dtype))


def by_slot(rows, perm):
    return rows[torch.argsort(perm)]


def backend(gm, example_inputs):
    """Runs the rewritten graphs as they are, those of checkpointed regions too."""
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            moe_fusion(module.graph)
            module.recompile()
    return gm.forward


def registered_in(forms):
    """The decorator of a form: what becomes of it, and whether it is also trained."""

    def form(becomes, training=True):
        def register(fn):
            forms[fn.__name__] = (fn, becomes, training)
            return fn

        return register

    return form


class FormTest(TestCase):
    def setUp(self):
        super().setUp()  # float32 as well, whatever this CPU is
        amx = "torch.cpu._is_amx_tile_supported"
        self.enterContext(mock.patch(amx, return_value=False))

    def compare(self, fn, training, dynamic, dtype, context=contextlib.nullcontext):
        """Compares with float64; returns what became of the block, and the log."""
        module, inputs = Weights(fn).to(dtype), make_inputs(dtype)
        exact = copy.deepcopy(module).double()
        with torch._dynamo.config.patch(disable=True):
            exact_inputs = [t.double() if t.is_floating_point() else t for t in inputs]
            want = run(exact, exact, exact_inputs, training)
            with context():
                written = run(module, module, inputs, training)
        torch._dynamo.reset()
        counters.clear()
        with (
            config.patch(moe_fusion=True),
            context(),
            self.assertLogs("torch._inductor.fx_passes.moe_fusion", "INFO") as logs,
        ):
            compiled = torch.compile(
                module, fullgraph=True, dynamic=dynamic, backend=backend
            )
            got = run(compiled, module, inputs, training)
        for ours, theirs, ref in zip(got, written, want, strict=True):
            self.assertEqual((ours.dtype, ours.shape), (theirs.dtype, theirs.shape))
            eps = torch.finfo(theirs.dtype).eps
            error = (ours.double() - ref).abs().max()
            allowed = (
                2 * (theirs.double() - ref).abs().max() + 4 * eps * ref.abs().max()
            )
            self.assertLessEqual(error, allowed)
        found = counters["inductor"]
        if not found["moe_fusion"]:
            return "none", logs.output
        return ("full" if found["moe_fusion_full"] else "core"), logs.output

    def check_form(self, form, training, odd=None):
        """Compares a form with what it says becomes of it, or with ``odd``."""
        fn, becomes, can_train = form
        if training > can_train:
            self.skipTest("nothing to train")
        becomes = odd or becomes
        # What becomes of a form does not hang on these, and its gradients see both.
        modes = [(torch.bfloat16, False), (torch.float32, True)]
        for dtype, dynamic in modes if training or TEST_WITH_SLOW else modes[:1]:
            kind, logs = self.compare(fn, training, dynamic, dtype)
            self.assertEqual(kind, becomes, logs)
            self.assertRegex(logs[-1], "stays" if kind == "none" else "became")
