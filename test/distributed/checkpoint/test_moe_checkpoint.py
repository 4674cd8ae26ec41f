# Owner(s): ["oncall: distributed checkpointing"]
"""A model saved at one expert-parallel degree loads at every other one, bit by bit."""

import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ExpertParallel, parallelize_module
from torch.distributed.tensor.parallel._expert_mesh import (
    expert_shard_placement,
    fold_expert_parallel,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.distributed.checkpoint_utils import with_temp_dir


sys.path.append(str(Path(__file__).resolve().parents[1]))

from moe_gloo import GlooTest  # noqa: E402


D, H, E, K = 16, 24, 8, 3


def make_model(seed):
    torch.manual_seed(seed)
    options = {"bias": True, "shared_hidden_dim": 8, "balance_bias": True}
    return nn.Sequential(
        nn.Linear(D, D), nn.ModuleDict({"moe": nn.MoE(D, H, E, K, **options)})
    )


def run(model, x):
    return model[1]["moe"](model[0](x))


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def flatten(state, prefix=""):
    """Leaves of nested dicts by dotted name, DTensors gathered."""
    if not isinstance(state, dict):
        return {prefix: whole(state)}
    leaves = {}
    for key, value in state.items():
        leaves.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


@instantiate_parametrized_tests
class TestMoECheckpoint(GlooTest):
    @staticmethod
    @functools.cache
    def sparse(ep):
        return fold_expert_parallel(TestMoECheckpoint.mesh(("dp_shard",), 4), ep)

    def parallel_model(self, how, seed):
        """``how``: "ep4", "ep2", "ep1" or, with FSDP2 on top, "fsdp_ep2" and so on; "plain" has no
        DTensor at all."""
        model = make_model(seed)
        if how == "plain":
            return model
        ep = int(how[-1])
        if how.startswith("fsdp"):
            sparse = self.sparse(ep)
            parallelize_module(model, sparse["ep"], {"1.moe": ExpertParallel()})
            mesh = self.mesh(("dp_shard",), 4)
            placement = expert_shard_placement(model, sparse["efsdp"], mesh)
            fully_shard(model[1]["moe"], mesh=mesh, shard_placement_fn=placement)
            fully_shard(model[0], mesh=mesh)
        else:
            mesh = self.mesh(("dp_replicate", "ep"), 4 // ep, ep)
            parallelize_module(model, mesh, {"1.moe": ExpertParallel()})
        return model

    def train(self, model, optimizer, steps=2):
        for step in range(steps):
            # Equal tokens on all ranks: plain parameters stay equal without a reduction.
            torch.manual_seed(step)
            run(model, torch.randn(6, D)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    @parametrize(
        "saved,loaded",
        [
            ("ep4", "ep2"),
            ("ep4", "ep1"),
            ("ep4", "plain"),
            ("ep1", "ep4"),
            ("plain", "ep4"),
            ("fsdp_ep4", "fsdp_ep2"),
            ("fsdp_ep2", "fsdp_ep1"),
            ("fsdp_ep2", "ep4"),
            ("ep4", "fsdp_ep2"),
        ],
    )
    @with_temp_dir
    def test_reshard(self, saved, loaded):
        model = self.parallel_model(saved, seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.train(model, optimizer)
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
        want = flatten(state)
        dcp.save(state, checkpoint_id=self.temp_dir)

        other = self.parallel_model(loaded, seed=1)
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
        state = dict(zip(("model", "optim"), get_state_dict(other, other_optimizer)))
        fresh = flatten(state)
        self.assertEqual(sorted(fresh), sorted(want))
        self.assertEqual(
            [k for k in fresh if k.startswith("model.")],
            ["model." + k for k in make_model(0).state_dict()],
        )
        dcp.load(state, checkpoint_id=self.temp_dir)
        set_state_dict(
            other,
            other_optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        state = dict(zip(("model", "optim"), get_state_dict(other, other_optimizer)))
        for name, value in flatten(state).items():
            if isinstance(value, torch.Tensor):
                self.assertTrue(torch.equal(value, want[name]), name)
            else:
                self.assertEqual(value, want[name], msg=name)
        # What was loaded is what the layer computes with.
        x = torch.randn(5, D)
        dist.broadcast(x, 0)
        self.assertEqual(run(other, x), run(model, x))


if __name__ == "__main__":
    run_tests()
