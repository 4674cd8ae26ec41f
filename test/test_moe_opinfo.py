# Owner(s): ["module: nn"]
"""Tests of the MoE OpInfos that the generic suites lack.

The suites run over op_db (`test_ops.py` and its siblings). The tests here cover errors on the meta
device, unsupported derivatives, decompositions of the functionals, and data-dependent sizes.
"""

import re

import torch
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_device_type import (
    instantiate_device_type_tests,
    OpDTypes,
    ops,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_moe import to_meta
from torch.testing._internal.common_utils import (
    run_tests,
    TestCase,
)
from torch.testing._internal.opinfo.definitions import moe
from torch.utils._pytree import (
    tree_leaves,
    tree_map_only,
)


# The functionals and the ops that they call, if this PyTorch has them. The router is an op in some
# prefixes of the stack only.
NAMES = re.compile(
    r"_moe_(permutation|topk|mlp)(_backward)?|nn\.functional\.(moe_topk|moe_mlp|grouped_mlp)"
)
moe_op_db = [op for op in op_db if NAMES.fullmatch(op.name)]
differentiable = [op for op in moe_op_db if op.supports_autograd]
all_ops = ops(moe_op_db, allowed_dtypes=(torch.float32, torch.int64))
once_only = [op for op in differentiable if not op.supports_gradgrad]
backward_only = [op for op in differentiable if not op.supports_forward_ad]


def arguments(sample):
    return (sample.input, *sample.args), sample.kwargs


def is_leaf(x):
    return isinstance(x, torch.Tensor) and x.requires_grad


def leaves(sample):
    return [x for x in tree_leaves(arguments(sample)) if is_leaf(x)]


def function_of_input(op, sample):
    """``op`` as a function of only the first operand of ``sample``."""
    args, kwargs = arguments(sample)
    return lambda x: op(x, *args[1:], **kwargs)


def backward(result, sample):
    """Gradients for the operands of ``sample``, from a cotangent without symmetry."""
    outputs = [x for x in tree_leaves(result) if is_leaf(x)]
    cotangents = [torch.cos(torch.arange(x.numel())).view_as(x).to(x) for x in outputs]
    return torch.autograd.grad(outputs, leaves(sample), cotangents, allow_unused=True)


class TestMoeOpInfo(TestCase):
    def test_in_op_db(self, device):
        names = [op.name for op in moe_op_db]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual(len(moe.op_db), 6)
        self.assertEqual({op.name for op in moe.op_db} - set(names), set())

    @ops(moe_op_db, dtypes=OpDTypes.none)
    def test_errors(self, device, op):
        count = 0
        for error in op.error_inputs(device):
            args, kwargs = arguments(error.sample_input)
            for operands in ((args, kwargs), to_meta((args, kwargs))):
                with self.assertRaisesRegex(error.error_type, error.error_regex):
                    op(*operands[0], **operands[1])
            count += 1
        self.assertGreaterEqual(count, 2)

    @all_ops
    def test_samples_are_cheap(self, device, dtype, op):
        # test_operator of TestCompositeCompliance runs every subset of a sample's tensors. vmap's
        # exhaustive test tries three ways to batch each positional tensor. They once took two minutes.
        subsets = batches = 0
        for sample in op.sample_inputs(device, dtype):
            args, kwargs = arguments(sample)
            is_tensor = [
                isinstance(x, torch.Tensor) for x in tree_leaves((args, kwargs))
            ]
            subsets += 2 ** sum(is_tensor)
            batches += 3 ** sum(isinstance(x, torch.Tensor) for x in args)
        self.assertLessEqual(subsets, 640)
        self.assertLessEqual(batches, 1500)

    # Unsupported derivatives raise instead of returning wrong values.

    @ops(once_only, allowed_dtypes=(torch.float64,))
    def test_double_backward(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype, requires_grad=True):
            args, kwargs = arguments(sample)
            outputs = [x for x in tree_leaves(op(*args, **kwargs)) if is_leaf(x)]
            loss = sum(y.sum() for y in outputs)
            grads = torch.autograd.grad(loss, leaves(sample), create_graph=True)
            with self.assertRaisesRegex(
                RuntimeError, "_moe_(mlp|topk)_backward is not implemented"
            ):
                sum(g.sum() for g in grads).backward()

    @ops(backward_only, allowed_dtypes=(torch.float64,))
    def test_forward_ad(self, device, dtype, op):
        sample = next(iter(op.sample_inputs(device, dtype)))
        args, kwargs = arguments(sample)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(args[0], args[0])
            with self.assertRaisesRegex(
                NotImplementedError, "forward AD with _moe_(mlp|topk)"
            ):
                op(dual, *args[1:], **kwargs)

    @all_ops
    def test_core_aten(self, device, dtype, op):
        # The ops do not decompose. The rest of the functionals decomposes to core ATen with the
        # same result.
        table = core_aten_decompositions()
        for sample in op.sample_inputs(device, dtype):
            function, x = function_of_input(op, sample), sample.input
            traced = make_fx(function, decomposition_table=table)(x)
            self.assertEqual(traced(x), function(x))
            called = [n.target for n in traced.graph.nodes if n.op == "call_function"]
            kernels = {t.__name__.split(".")[0] for t in called if "moe" in t.__name__}
            router = {op.name for op in moe_op_db} & {"_moe_topk"}
            expected = {
                "nn.functional.moe_topk": router,
                "nn.functional.moe_mlp": {"_moe_permutation", "_moe_mlp"},
                "nn.functional.grouped_mlp": {"_moe_mlp"},
            }.get(op.name, {op.name})
            self.assertEqual(kernels, expected)
            others = [t for t in called if "moe" not in t.__name__]
            self.assertEqual([t for t in others if t in table], [])

    @all_ops
    def test_unbacked(self, device, dtype, op):
        # After an all-to-all, the numbers of tokens T and of rows R depend on data.
        grad = op.supports_autograd
        sample = next(iter(op.sample_inputs(device, dtype, requires_grad=grad)))
        args, kwargs = arguments(sample)
        expected = op(*args, **kwargs)

        def mark(x):
            for dim, size in enumerate(x.shape):
                letter = {5: "T", 10: "R"}.get(size)
                if letter is not None:
                    torch._dynamo.decorators.mark_unbacked(x, dim, shape_id=letter)
            return x

        tree_map_only(torch.Tensor, mark, args)
        compiled = torch.compile(op.get_op(), backend="aot_eager", fullgraph=True)
        actual = compiled(*args, **kwargs)
        self.assertEqual(actual, expected)
        if grad:
            self.assertEqual(backward(actual, sample), backward(expected, sample))


instantiate_device_type_tests(TestMoeOpInfo, globals())

if __name__ == "__main__":
    run_tests()
