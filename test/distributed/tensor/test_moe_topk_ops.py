# Owner(s): ["oncall: distributed"]
"""DTensor rules of _moe_topk: values, gradients, placements, communication."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.distributed.tensor._ops.strategy_validation import compare_operator
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_moe import mark_sizes_unbacked
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorContinuousTestBase,
)
from torch.testing._internal.opinfo.definitions.moe_topk import op_db
from torch.utils._pytree import tree_map_only


T, K, E = 12, 2, 4


class TestMoeTopkDTensor(DTensorContinuousTestBase):
    world_size = 2

    @parametrize("bias", [False, True])
    def test_sharded_tokens(self, bias):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(T, E, generator=generator)
        shift = torch.randn(E, generator=generator) if bias else None
        leaf = logits.clone().requires_grad_()
        indices, weights = F.moe_topk(leaf, K, bias=shift)
        cotangent = torch.randn(T, K, generator=generator)
        weights.backward(cotangent)

        mesh = self.build_device_mesh()
        leaf_d = distribute_tensor(logits, mesh, [Shard(0)]).requires_grad_()
        if bias:
            shift = distribute_tensor(shift, mesh, [Replicate()])
        with CommDebugMode() as communication:
            indices_d, weights_d = F.moe_topk(leaf_d, K, bias=shift)
            weights_d.backward(distribute_tensor(cotangent, mesh, [Shard(0)]))
        for actual in (indices_d, weights_d, leaf_d.grad):
            self.assertEqual(actual.placements, (Shard(0),))
        self.assertEqual(indices_d.full_tensor(), indices)
        self.assertEqual(weights_d.full_tensor(), weights)
        self.assertEqual(leaf_d.grad.full_tensor(), leaf.grad)
        counts = communication.get_comm_counts()
        self.assertEqual(sum(counts.values()), 1)  # distribute_tensor scatters


class TestMoeTopkShardingRules(TestCase):
    """PyTorch's own check of sharding rules, on the samples of the OpInfos."""

    def setUp(self):
        super().setUp()
        dist.init_process_group("fake", rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)

    @parametrize("name", [op.name for op in op_db])
    def test_rule_is_confirmed(self, name):
        # On the sample whose tokens two ranks can share.
        stats = compare_operator(name, incorrect_only=True)
        self.assertFalse(stats.no_dtensor_support)
        self.assertEqual(stats.false_positives, [])
        self.assertEqual(stats.true_positives, 1)

    @parametrize("name", [op.name for op in op_db])
    def test_sizes_that_are_data(self, name):
        op = next(op for op in op_db if op.name == name)
        mesh = init_device_mesh("cpu", (2,))
        for sample in op.sample_inputs("cpu", torch.float32):
            args = (sample.input, *sample.args)
            arguments = tree_map_only(
                torch.Tensor,
                lambda t: distribute_tensor(t, mesh, [Replicate()]),
                (args, sample.kwargs),
            )
            mark_sizes_unbacked(arguments)
            torch._dynamo.reset()
            compiled = torch.compile(op.get_op(), backend="eager", fullgraph=True)
            actual = compiled(*arguments[0], **arguments[1])
            actual = tree_map_only(DTensor, DTensor.to_local, actual)
            self.assertEqual(actual, op(*args, **sample.kwargs))


instantiate_parametrized_tests(TestMoeTopkDTensor)
instantiate_parametrized_tests(TestMoeTopkShardingRules)

if __name__ == "__main__":
    run_tests()
