# Owner(s): ["oncall: distributed"]

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    distribute_module,
    distribute_tensor,
    DTensor,
    Replicate,
    Shard,
)
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import run_tests


class TestCPURandom(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def shards(self, placement, fill):
        """The local parts of all ranks after ``fill``, and what rand draws next."""
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(3)
        x = distribute_tensor(torch.zeros(6, 512), mesh, [placement])
        fill(x)
        after = torch.rand(1)
        local = DTensor.from_local(x.to_local()[None], mesh, [Shard(0)])
        after = DTensor.from_local(after, mesh, [Shard(0)])
        return local.full_tensor().unbind(0), after.full_tensor()

    def test_shards_differ_and_replicas_do_not(self):
        for fill in (nn.init.normal_, nn.init.uniform_, lambda x: x.bernoulli_(0.5)):
            (first, second), after = self.shards(Shard(0), fill)
            self.assertNotEqual(first, second)
            # The generators of the ranks stay together.
            self.assertEqual(after[0], after[1])
            again, _ = self.shards(Shard(0), fill)
            self.assertEqual(again[1], second)
            (first, second), after = self.shards(Replicate(), fill)
            self.assertEqual(first, second)
            self.assertEqual(after[0], after[1])
        # As many numbers as an ordinary tensor where nothing is sharded.
        (first, _), _ = self.shards(Replicate(), nn.init.normal_)
        torch.manual_seed(3)
        self.assertEqual(first, nn.init.normal_(torch.zeros(6, 512)))

    def test_uneven_shards_and_generators(self):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.zeros(3, 512), mesh, [Shard(0)])
        g = torch.Generator().manual_seed(1)
        before = torch.get_rng_state()
        x.normal_(generator=g)
        self.assertEqual(torch.get_rng_state(), before)
        once = x.full_tensor()
        self.assertNotEqual(once[0], once[2])
        x.normal_(generator=g)
        self.assertNotEqual(x.full_tensor(), once)
        x.normal_(generator=g.manual_seed(1))
        self.assertEqual(x.full_tensor(), once)

    def test_a_module_made_on_meta(self):
        def shard(name, module, mesh):
            for key, param in module.named_parameters():
                shape = distribute_tensor(param, mesh, [Shard(0)])
                module.register_parameter(key, nn.Parameter(shape))

        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        with torch.device("meta"):
            module = nn.Linear(64, 8)
        module = distribute_module(module, mesh, shard).to_empty(device="cpu")
        module.reset_parameters()
        weight = module.weight.full_tensor()
        self.assertNotEqual(weight[:4], weight[4:])
        self.assertLess(weight.abs().max().item(), 64**-0.5)


if __name__ == "__main__":
    run_tests()
