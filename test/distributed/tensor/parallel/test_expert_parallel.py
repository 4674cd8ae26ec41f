# Owner(s): ["oncall: distributed"]
"""ExpertParallel gives the result of one process, on every mesh."""

import copy
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ExpertParallel, parallelize_module
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


D, H, E, K = 16, 24, 8, 3
# Tokens of each of the four ranks.
SHARES = {"even": (5, 4, 4, 4), "gaps": (9, 0, 7, 1), "all_on_one": (0, 0, 17, 0)}
T = 17


class ExpertParallelTest(MultiProcContinuousTest):
    world_size = 4

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    @staticmethod
    @functools.cache
    def mesh(*shape, names):
        """Once each, as a gloo group owns threads."""
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    def tokens(self, share):
        """Slice of this rank."""
        begin = sum(SHARES[share][: self.rank])
        return slice(begin, begin + SHARES[share][self.rank])


class RowMoE(nn.MoE):
    """A router whose logits of a token do not depend on how many there are; fp32 GEMMs
    round differently for a few rows."""

    def route(self, input):
        logits = (input.unsqueeze(-2) * self.router).sum(-1)
        return logits, *F.moe_topk(logits, self.top_k, **self.routing)


@instantiate_parametrized_tests
class TestExpertParallel(ExpertParallelTest):
    def compare(self, split, layer, share, x, grad):
        """Output and input gradient of this rank's tokens, their bits in one process,
        and (name, gradient, gradient in one process) of all parameters."""
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        whole = layer(leaf).output
        whole.backward(grad)
        part = self.tokens(share)
        mine = x[part].clone().requires_grad_()
        split.zero_grad()
        output = split(mine).output
        output.backward(grad[part])
        grads = []
        for name, p in split.named_parameters():
            if isinstance(p, DTensor):
                self.assertEqual(p.grad.placements, p.placements)
                got = p.grad.full_tensor()
            else:
                got = p.grad.clone()
                dist.all_reduce(got)
            grads.append((name, got, layer.get_parameter(name).grad))
        return (output, whole[part]), (mine.grad, leaf.grad[part]), grads

    @parametrize("ep", [1, 2, 4])
    def test_exact_gives_the_bits_of_one_process(self, ep):
        torch.manual_seed(0)
        x, grad = torch.randn(T, D), torch.randn(T, D)
        layer = RowMoE(D, H, E, K, shared_hidden_dim=8)
        mesh = self.mesh(4 // ep, ep, names=("dp_replicate", "ep"))
        split = parallelize_module(
            copy.deepcopy(layer), mesh, ExpertParallel(combine="exact")
        )
        for share in SHARES:
            y, dx, grads = self.compare(split, layer, share, x, grad)
            self.assertTrue(torch.equal(*y), share)
            self.assertTrue(torch.equal(*dx), share)
            for name, got, want in grads:
                self.assertEqual(got, want, msg=name)


if __name__ == "__main__":
    run_tests()
