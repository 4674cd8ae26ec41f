# Owner(s): ["oncall: distributed"]
"""PyTorch's own check of the DTensor rules of the MoE ops, on the samples of their OpInfos."""

import unittest.mock

import torch
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate
from torch.distributed.tensor._ops import _moe_ops
from torch.distributed.tensor._ops.strategy_validation import compare_operator
from torch.testing._internal.common_moe import FakeRanksTest, mark_sizes_unbacked
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.opinfo.definitions.moe import op_db
from torch.utils._pytree import tree_leaves, tree_map_only


class ShardingRulesTest(FakeRanksTest):
    """Checks of the ops of an OpInfo database."""

    world_size = 2

    def check_confirmed(self, name, samples):
        """The rules must be right on as many samples as two ranks can share."""
        stats = compare_operator(name, incorrect_only=True)
        self.assertFalse(stats.no_dtensor_support)
        self.assertEqual(stats.false_positives, [])
        self.assertEqual(stats.true_positives, samples)

    def check_sizes_that_are_data(self, op_db, name):
        """As test_dtensor_ops.py does: no size is known, so neither is whether w_in has gates."""
        op = next(op for op in op_db if op.name == name)
        mesh = init_device_mesh("cpu", (2,))
        for sample in op.sample_inputs("cpu", torch.float32):
            args, kwargs = tree_map_only(
                torch.Tensor,
                lambda t: distribute_tensor(t, mesh, [Replicate()]),
                ((sample.input, *sample.args), sample.kwargs),
            )
            mark_sizes_unbacked((args, kwargs))
            torch._dynamo.reset()
            compiled = torch.compile(op.get_op(), backend="eager", fullgraph=True)
            actual = tree_map_only(DTensor, DTensor.to_local, compiled(*args, **kwargs))
            expected = op(sample.input, *sample.args, **sample.kwargs)
            self.assertEqual(actual, expected)


class TestMoeShardingRules(ShardingRulesTest):
    @parametrize("name", ("_moe_mlp", "_moe_mlp_backward"))
    def test_rules_are_confirmed(self, name):
        self.check_confirmed(name, 2)

    @parametrize("name", ("_moe_mlp", "_moe_mlp_backward"))
    def test_sizes_that_are_data(self, name):
        self.check_sizes_that_are_data(op_db, name)

    @parametrize("name", ("_moe_mlp", "_moe_mlp_backward", "nn.functional.moe_mlp"))
    def test_samples_of_local_tensors(self, name):
        # test_dtensor_ops.py asks for samples in this mode, in which what a generator gives
        # differs by rank: a row plan is made of values.
        op = next(op for op in op_db if op.name == name)
        with LocalTensorMode(2):
            samples = list(op.sample_inputs("cpu", torch.float32))
        for sample in samples:
            kinds = {type(x) for x in tree_leaves((sample.input, sample.args))}
            self.assertNotIn(LocalTensor, kinds)

    def test_wrong_rule_is_found(self):
        # The output of a shard of the hidden units is a summand, not the output.
        def wrong(op_schema):
            strategy = _moe_ops.moe_mlp_strategy(op_schema)
            for spec in strategy.strategies:
                first, second = spec.output_specs
                first.placements = (Replicate(),)
            return strategy

        funcs = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
        with unittest.mock.patch.dict(funcs, {torch.ops.aten._moe_mlp.default: wrong}):
            stats = compare_operator("_moe_mlp", incorrect_only=True)
        self.assertEqual(stats.true_positives, 0)
        self.assertEqual(len(stats.false_positives), 2)


instantiate_parametrized_tests(TestMoeShardingRules)

if __name__ == "__main__":
    run_tests()
