# Owner(s): ["module: nn"]

"""Tests of the generic suites for the OpInfos of the low-precision MoE ops."""

import torch
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_device_type import (
    instantiate_device_type_tests,
    ops,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_moe import to_meta
from torch.testing._internal.common_utils import (
    noncontiguous_like,
    run_tests,
    TestCase,
)
from torch.testing._internal.opinfo.definitions.moe_scaled import op_db as scaled_db
from torch.utils._pytree import tree_leaves, tree_map_only


every_dtype = ops(scaled_db)
float32 = ops(scaled_db, allowed_dtypes=(torch.float32,))


def numbers(results):
    """Makes tensors comparable: float8 becomes bytes."""
    leaves = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
    return [t.view(torch.uint8) if t.element_size() == 1 else t for t in leaves]


class TestScaledOpInfo(TestCase):
    def samples(self, op, device, dtype, **kwargs):
        found = list(op.sample_inputs(device, dtype, **kwargs))
        self.assertGreater(len(found), 2)
        return found

    def test_in_op_db(self, device):
        names = {op.name for op in op_db}
        self.assertLessEqual({op.name for op in scaled_db}, names)

    @every_dtype
    def test_meta(self, device, dtype, op):
        for s in self.samples(op, device, dtype):
            real = op(s.input, *s.args, **s.kwargs)
            meta = op(*to_meta((s.input, *s.args)), **to_meta(s.kwargs))
            for a, b in zip(tree_leaves(real), tree_leaves(meta), strict=True):
                self.assertEqual(
                    (a.shape, a.dtype, a.stride()), (b.shape, b.dtype, b.stride())
                )

    @every_dtype
    def test_strides(self, device, dtype, op):
        for s in self.samples(op, device, dtype):
            apart = tree_map_only(
                torch.Tensor, lambda t: noncontiguous_like(t) if t.numel() > 1 else t,
                (s.input, s.args, s.kwargs),
            )  # fmt: skip
            expected = numbers(op(s.input, *s.args, **s.kwargs))
            self.assertEqual(
                numbers(op(apart[0], *apart[1], **apart[2])), expected, rtol=0, atol=0
            )

    @float32
    def test_schema_and_trace(self, device, dtype, op):
        for s in self.samples(op, device, dtype):
            expected = numbers(op(s.input, *s.args, **s.kwargs))
            # The mode compares with operators that the CPU lacks for float8. Only the functional
            # has no float8 arguments or results.
            if op.name.startswith("nn."):
                with SchemaCheckMode():
                    op(s.input, *s.args, **s.kwargs)

            def function(x):
                return numbers(op(x, *s.args, **s.kwargs))  # noqa: B023

            for mode in ("real", "fake", "symbolic"):
                traced = make_fx(
                    function, tracing_mode=mode, _allow_non_fake_inputs=True
                )
                self.assertEqual(traced(s.input)(s.input), expected, rtol=0, atol=0)

    @ops(
        [op for op in scaled_db if op.supports_autograd],
        allowed_dtypes=(torch.float32,),
    )
    def test_gradients_are_deterministic(self, device, dtype, op):
        for s in self.samples(op, device, dtype, requires_grad=True):
            leaves = [
                t
                for t in (s.input, *s.args)
                if isinstance(t, torch.Tensor) and t.requires_grad
            ]
            self.assertGreater(len(leaves), 2)

            def gradients(op=op, s=s, leaves=leaves):
                y = op(s.input, *s.args, **s.kwargs)
                y = s.output_process_fn_grad(y)
                return torch.autograd.grad(y.sum(), leaves)

            self.assertEqual(gradients(), gradients(), rtol=0, atol=0)

    @float32
    def test_errors(self, device, dtype, op):
        for e in op.error_inputs(device):
            s = e.sample_input
            with self.assertRaisesRegex(e.error_type, e.error_regex):
                op(s.input, *s.args, **s.kwargs)


instantiate_device_type_tests(TestScaledOpInfo, globals(), only_for="cpu")

if __name__ == "__main__":
    run_tests()
