# Owner(s): ["oncall: distributed"]
"""set_gradient_divide_factor on Gloo, and on shard meshes of one rank: experts have such a mesh
where expert parallelism takes all ranks."""

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


@instantiate_parametrized_tests
class TestDivideFactor(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    @staticmethod
    @functools.cache
    def meshes():
        """Once, as a gloo group owns threads."""
        names = ("replicate", "shard")
        hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
        shard = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        return {"one_rank": hybrid["shard"], "hybrid": hybrid, "two_ranks": shard}

    # float64 and float16 divide before and after the reduction, float32 and
    # bfloat16 in it or, with a forced sum, after it.
    @parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    @parametrize("force_sum", [False, True])
    @parametrize("mesh", ["one_rank", "hybrid", "two_ranks"])
    def test_divides_once(self, dtype, force_sum, mesh):
        mesh = self.meshes()[mesh]
        torch.manual_seed(0)
        weight = torch.randn(4, 4, dtype=dtype)
        x = torch.arange(8, dtype=dtype).view(2, 4)
        for factor in (None, 1.0, 2.0, 4.0, 6.0):
            model = nn.Linear(4, 4, bias=False, dtype=dtype)
            model.weight = nn.Parameter(weight.clone())
            model(x).sum().backward()
            # Every rank has the same gradient.
            want = model.weight.grad * mesh.size() / (factor or mesh.size())
            model.weight.grad = None
            fully_shard(model, mesh=mesh)
            if factor is not None:
                model.set_gradient_divide_factor(factor)
            model.set_force_sum_reduction_for_comms(force_sum)
            model(x).sum().backward()
            self.assertEqual(model.weight.grad.full_tensor(), want, msg=f"{factor}")


if __name__ == "__main__":
    run_tests()
