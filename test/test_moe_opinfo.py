# Owner(s): ["module: nn"]
"""The MoE OpInfos under the checks of the generic OpInfo suites.

test_ops.py and its siblings pick these OpInfos up from op_db. They test 700
operators; this file asks the same questions about ours alone: TestCommon, TestMeta,
TestFakeTensor, TestGradients, TestProxyTensor, functionalization, schema check,
TestDecomp, TestInductorOpInfo, unbacked sizes, the expected failures of functorch's suites.
Forward-mode derivatives and double backward are checked where the OpInfo claims them, and to
raise where it does not.
"""

import re
import unittest

import torch
from torch._decomp import core_aten_decompositions
from torch._inductor import config as inductor_config
from torch._subclasses import CrossRefFakeMode, FakeTensorMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal import composite_compliance, optests
from torch.testing._internal.common_device_type import (
    instantiate_device_type_tests,
    OpDTypes,
    ops,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_moe import mark_sizes_unbacked, to_meta
from torch.testing._internal.common_utils import (
    noncontiguous_like,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.opinfo.definitions import moe
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)


# The functionals and the ops that they are made of, as far as PyTorch has them: the router may be
# an op or not.
NAMES = re.compile(
    r"_moe_(permutation|topk|mlp)(_backward)?|nn\.functional\.(moe_topk|moe_mlp|grouped_mlp)"
)
moe_op_db = [op for op in op_db if NAMES.fullmatch(op.name)]
differentiable = [op for op in moe_op_db if op.supports_autograd]
all_ops = ops(moe_op_db, allowed_dtypes=(torch.float32, torch.int64))
low_precision_too = ops(
    moe_op_db, allowed_dtypes=(torch.float32, torch.bfloat16, torch.int64)
)
float32_only = ops(differentiable, allowed_dtypes=(torch.float32,))
float64_only = ops(differentiable, allowed_dtypes=(torch.float64,))


def arguments(sample):
    return (sample.input, *sample.args), sample.kwargs


def is_leaf(x):
    return isinstance(x, torch.Tensor) and x.requires_grad


def leaves(sample):
    return [x for x in tree_leaves(arguments(sample)) if is_leaf(x)]


def function_of_leaves(op, sample):
    """``op`` as a function of the differentiable operands of ``sample`` only."""
    values, spec = tree_flatten(arguments(sample))
    where = [i for i, x in enumerate(values) if is_leaf(x)]

    def function(*tensors):
        for i, x in zip(where, tensors, strict=True):
            values[i] = x
        args, kwargs = tree_unflatten(values, spec)
        return floating_outputs(op(*args, **kwargs))

    return function


def function_of_input(op, sample):
    """``op`` as a function of the first operand of ``sample`` only."""
    args, kwargs = arguments(sample)
    return lambda x: op(x, *args[1:], **kwargs)


def floating_outputs(result):
    return tuple(x for x in tree_leaves(result) if x.is_floating_point())


def backward(result, sample):
    """Gradients for the operands of ``sample``, from a cotangent of no symmetry."""
    outputs = [x for x in tree_leaves(result) if is_leaf(x)]
    cotangents = [torch.cos(torch.arange(x.numel())).view_as(x).to(x) for x in outputs]
    return torch.autograd.grad(outputs, leaves(sample), cotangents, allow_unused=True)


def error_of(function, *args):
    """The RuntimeError that the call raises, or None."""
    try:
        function(*args)
    except RuntimeError as error:
        return error
    return None


def layout(result):
    return [(x.shape, x.stride(), x.dtype) for x in tree_leaves(result)]


class TestMoeOpInfo(TestCase):
    def test_in_op_db(self, device):
        names = [op.name for op in moe_op_db]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual(len(moe.op_db), 6)
        self.assertEqual({op.name for op in moe.op_db} - set(names), set())

    # TestCommon

    @ops(moe_op_db, dtypes=OpDTypes.none)
    def test_dtypes(self, device, op):
        claimed = op.supported_dtypes(torch.device(device).type)
        sample = next(iter(op.sample_inputs(device, next(iter(claimed)))))
        works = set()
        for dtype in (*claimed, torch.int16, torch.int32, torch.complex64, torch.bool):
            moved = sample.transform(
                lambda x, dtype=dtype: (
                    x.to(dtype)
                    if isinstance(x, torch.Tensor) and x.dtype == sample.input.dtype
                    else x
                )
            )
            args, kwargs = arguments(moved)
            try:
                op(*args, **kwargs)
            except (TypeError, ValueError):
                continue
            works.add(dtype)
        self.assertEqual(works, set(claimed))
        if not op.supports_autograd:
            return
        for dtype in claimed:
            sample = next(iter(op.sample_inputs(device, dtype, requires_grad=True)))
            args, kwargs = arguments(sample)
            # What the suite takes the gradient of: the first of several results.
            result = sample.output_process_fn_grad(op(*args, **kwargs))
            result = result[0] if isinstance(result, tuple) else result
            result.sum().backward()
            self.assertIsNotNone(sample.input.grad)

    @ops(moe_op_db, allowed_dtypes=(torch.float64, torch.int32))
    def test_reference(self, device, dtype, op):
        for sample in op.reference_inputs(device, dtype):
            self.compare_with_reference(op, op.ref, sample, exact_dtype=True)

    @all_ops
    def test_noncontiguous_samples(self, device, dtype, op):
        grad = op.supports_autograd
        for sample in op.sample_inputs(device, dtype, requires_grad=grad):
            other = sample.transform(
                lambda x: noncontiguous_like(x) if isinstance(x, torch.Tensor) else x
            )
            results = []
            for s in (sample, other):
                args, kwargs = arguments(s)
                result = op(*args, **kwargs)
                results.append((result, backward(result, s) if grad else None))
            self.assertEqual(results[1], results[0])

    @low_precision_too
    def test_consistency(self, device, dtype, op):
        # A second call gives the same bits, and out= is refused as supports_out says.
        for sample in op.sample_inputs(device, dtype):
            args, kwargs = arguments(sample)
            expected = op(*args, **kwargs)
            self.assertEqual(op(*args, **kwargs), expected, rtol=0, atol=0)
            with self.assertRaisesRegex((TypeError, RuntimeError), "out"):
                op(*args, **kwargs, out=expected)

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
        # test_operator of TestCompositeCompliance runs every subset of a sample's tensors, and
        # vmap's exhaustive test three ways to batch each positional one. Two minutes, once.
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

    @ops(differentiable, allowed_dtypes=(torch.float32,))
    def test_composite_compliance(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype):
            args, kwargs = arguments(sample)
            composite_compliance.check_with_mode(op, args, kwargs, self.assertEqual)
        for sample in op.sample_inputs(device, dtype, requires_grad=True):
            args, kwargs = arguments(sample)
            composite_compliance.check_backward_formula(
                op.get_op(), args, kwargs, None, None, self.assertEqual
            )

    # TestMeta, TestFakeTensor

    @low_precision_too
    def test_meta(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype):
            args, kwargs = arguments(sample)
            meta_args, meta_kwargs = to_meta((args, kwargs))
            actual = op(*meta_args, **meta_kwargs)
            self.assertEqual(layout(actual), layout(op(*args, **kwargs)))
            self.assertTrue(all(x.is_meta for x in tree_leaves(actual)))

    @low_precision_too
    def test_fake(self, device, dtype, op):
        # Compares shape, strides, dtype and aliasing of every call with a fake one.
        grad = op.supports_autograd
        for sample in op.sample_inputs(device, dtype, requires_grad=grad):
            args, kwargs = arguments(sample)
            optests.fake_check(op, args, kwargs)
            with CrossRefFakeMode():
                result = op(*args, **kwargs)
                if grad:
                    backward(result, sample)

    # TestGradients

    @float64_only
    def test_gradcheck(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype, requires_grad=True):
            self.assertTrue(
                gradcheck(
                    function_of_leaves(op, sample),
                    leaves(sample),
                    check_forward_ad=op.supports_forward_ad,
                    check_batched_grad=op.check_batched_grad,
                )
            )

    @float64_only
    def test_gradgrad(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype, requires_grad=True):
            function, operands = function_of_leaves(op, sample), leaves(sample)
            if op.supports_gradgrad:
                self.assertTrue(gradgradcheck(function, operands))
                continue
            loss = sum(y.sum() for y in function(*operands))
            grads = torch.autograd.grad(loss, operands, create_graph=True)
            with self.assertRaisesRegex(
                RuntimeError, "_moe_(mlp|topk)_backward is not implemented"
            ):
                sum(g.sum() for g in grads).backward()

    @float64_only
    def test_forward_ad(self, device, dtype, op):
        # Where it is claimed, test_gradcheck has it.
        if op.supports_forward_ad:
            return
        sample = next(iter(op.sample_inputs(device, dtype)))
        args, kwargs = arguments(sample)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(args[0], args[0])
            with self.assertRaisesRegex(
                NotImplementedError, "forward AD with _moe_(mlp|topk)"
            ):
                op(dual, *args[1:], **kwargs)

    # TestProxyTensor, functionalization, AOTAutograd

    @all_ops
    def test_make_fx(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype):
            optests.make_fx_check(
                op, *arguments(sample), tracing_mode="symbolic", randomize_data=False
            )

    @all_ops
    def test_functionalize(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype):
            function, x = function_of_input(op, sample), sample.input
            self.assertEqual(torch.func.functionalize(function)(x), function(x))

    @parametrize("dynamic", [False, True])
    @all_ops
    def test_aot_autograd(self, device, dtype, op, dynamic):
        grad = op.supports_autograd

        def function(*args, **kwargs):
            result = op(*args, **kwargs)
            # The check sums all outputs; integers have no place in that sum.
            return floating_outputs(result) if grad else result

        for sample in op.sample_inputs(device, dtype, requires_grad=grad):
            optests.aot_autograd_check(
                function, *arguments(sample), dynamic, check_gradients=grad
            )

    # TestSchemaCheckModeOpInfo, TestDecomp

    @low_precision_too
    def test_schema(self, device, dtype, op):
        # Nothing is mutated and nothing aliased unless the schemas say so.
        grad = op.supports_autograd
        for sample in op.sample_inputs(device, dtype, requires_grad=grad):
            args, kwargs = arguments(sample)
            with SchemaCheckMode():
                result = op(*args, **kwargs)
                if grad:
                    backward(result, sample)

    @all_ops
    def test_core_aten(self, device, dtype, op):
        # The ops are kernels, not decompositions; what the functionals add to
        # them decomposes to core ATen with the same result.
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

    # functorch: TestOperators, TestVmapOperatorsOpInfo

    def check_expected_failures(self, op, failure, cls_name, test_names):
        """That the tests that fail for this reason, and only they, are said to."""
        for name in test_names:
            expected = any(
                info.decorators[0] is unittest.expectedFailure
                for info in op.decorators
                if (info.cls_name, info.test_name) == (cls_name, name)
            )
            self.assertEqual(expected, failure is not None, f"{name}: {failure}")

    @all_ops
    def test_batching_rules(self, device, dtype, op):
        sample = next(iter(op.sample_inputs(device, dtype)))
        function = function_of_input(op, sample)
        batch = torch.stack([sample.input] * 2)
        expected = function(sample.input)
        actual = vmap(function)(batch)
        for one, both in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
            self.assertEqual(both, torch.stack([one, one]))
        torch._C._functorch._set_vmap_fallback_enabled(False)
        try:
            failure = error_of(vmap(function), batch)
        finally:
            torch._C._functorch._set_vmap_fallback_enabled(True)
        self.check_expected_failures(
            op, failure, "TestVmapOperatorsOpInfoDevice", ["test_op_has_batch_rule"]
        )
        if op.supports_autograd:
            self.check_expected_failures(
                op, failure, "TestOperators", ["test_vmapvjp_has_batch_rule"]
            )

    @float32_only
    def test_forward_over_reverse(self, device, dtype, op):
        sample = next(iter(op.sample_inputs(device, dtype, requires_grad=True)))
        function = function_of_leaves(op, sample)
        primals = tuple(x.detach() for x in leaves(sample))

        def gradients(*primals):
            outputs, pullback = vjp(function, *primals)
            return pullback(tuple(map(torch.ones_like, outputs)))

        failure = error_of(jvp, gradients, primals, primals)
        self.check_expected_failures(
            op, failure, "TestOperators", ["test_jvpvjp", "test_vmapjvpvjp"]
        )

    # TestInductorOpInfo, test_ops_unbacked

    @all_ops
    def test_inductor(self, device, dtype, op):
        grad = op.supports_autograd
        # One sample: the others differ in sizes and strings that reach Inductor only as
        # arguments of one extern kernel call, and each costs a C++ compilation.
        sample = next(iter(op.sample_inputs(device, dtype, requires_grad=grad)))
        args, kwargs = arguments(sample)
        compiled = torch.compile(op.get_op(), fullgraph=True)
        expected = op(*args, **kwargs)
        # As the suite compiles: an op without a lowering is an error.
        with inductor_config.patch(implicit_fallbacks=False):
            actual = compiled(*args, **kwargs)
            self.assertEqual(actual, expected)
            self.assertEqual(layout(actual), layout(expected))
            if grad:
                self.assertEqual(backward(actual, sample), backward(expected, sample))

    @ops(moe_op_db, allowed_dtypes=(torch.float16,))
    def test_float16(self, device, dtype, op):
        # The tolerance that the suite is told, and its own where it is told none.
        told = [
            info.decorators[0].d[dtype]
            for info in op.decorators
            if (info.cls_name, info.test_name)
            == ("TestInductorOpInfo", "test_comprehensive")
        ]
        atol, rtol = told[0] if told else (1e-5, 1e-3)
        for sample in op.sample_inputs(device, dtype):
            args, kwargs = arguments(sample)
            wide = tree_map_only(
                torch.Tensor,
                lambda x: x.float() if x.dtype == dtype else x,
                (args, kwargs),
            )
            self.assertEqual(
                op(*args, **kwargs),
                op(*wide[0], **wide[1]),
                atol=atol,
                rtol=rtol,
                exact_dtype=False,
            )

    @all_ops
    def test_unbacked(self, device, dtype, op):
        # The number of tokens T, and of rows R, is data: it is after an all-to-all.
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

    @all_ops
    def test_all_sizes_unbacked(self, device, dtype, op):
        # As test_ops_unbacked.py does: no two sizes are known to be the same.
        for sample in op.sample_inputs(device, dtype):
            args, kwargs = arguments(sample)
            expected = op(*args, **kwargs)
            torch._dynamo.reset()
            mark_sizes_unbacked((args, kwargs))
            compiled = torch.compile(op.get_op(), backend="eager", fullgraph=True)
            self.assertEqual(compiled(*args, **kwargs), expected)

    def test_functional_export_on_fake_tensors(self, device):
        # As test_export_opinfo.py does: keyword arguments are constants of the module.
        op = next(op for op in moe_op_db if op.name == "nn.functional.moe_mlp")
        mode = FakeTensorMode()
        for sample in op.sample_inputs(device, torch.float32):
            args, kwargs = tree_map_only(
                torch.Tensor, mode.from_tensor, arguments(sample)
            )
            module = torch.nn.Module()
            module.forward = lambda *args, kwargs=kwargs: op(*args, **kwargs)
            with mode:
                program = torch.export.export(module, args)
            targets = [node.target for node in program.graph.nodes]
            self.assertIn(torch.ops.aten.moe_mlp.default, targets)


instantiate_device_type_tests(TestMoeOpInfo, globals())

if __name__ == "__main__":
    run_tests()
