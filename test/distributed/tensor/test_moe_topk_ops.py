# Owner(s): ["oncall: distributed"]
"""DTensor rules of _moe_topk: values, gradients, placements, communication."""

from test_moe_op_rules import ShardingRulesTest

import torch
import torch.nn.functional as F
from torch.distributed.tensor import distribute_tensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorContinuousTestBase,
)
from torch.testing._internal.opinfo.definitions.moe_topk import op_db


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


class TestMoeTopkShardingRules(ShardingRulesTest):
    """PyTorch's own check of sharding rules, on the samples of the OpInfos."""

    @parametrize("name", [op.name for op in op_db])
    def test_rule_is_confirmed(self, name):
        self.check_confirmed(name, 1)

    @parametrize("name", [op.name for op in op_db])
    def test_sizes_that_are_data(self, name):
        self.check_sizes_that_are_data(op_db, name)


instantiate_parametrized_tests(TestMoeTopkDTensor)
instantiate_parametrized_tests(TestMoeTopkShardingRules)

if __name__ == "__main__":
    run_tests()
