# Owner(s): ["oncall: distributed"]
"""ExpertParallel next to FSDP2, tensor, sequence and pipeline parallelism, and checkpointing."""

import copy
import datetime
import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed._moe.groups import group_timeout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ExpertParallel,
    parallelize_module,
    RowwiseParallel,
)
from torch.distributed.tensor.parallel._expert_mesh import (
    expert_shard_placement,
    fold_expert_parallel,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.utils.checkpoint import checkpoint


sys.path.append(str(Path(__file__).resolve().parents[2]))

from moe_gloo import GlooTest  # noqa: E402


D, H, E, K, T = 16, 24, 8, 3, 20


class Block(nn.Module):
    """A dense MLP and a MoE layer, both with a skip connection."""

    def __init__(self, num_experts=E, top_k=K, hidden=H, **kwargs):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.moe = nn.MoE(D, hidden, num_experts, top_k, shared_hidden_dim=8, **kwargs)
        self.checkpoint = False

    def run(self, x):
        x = x + self.down(self.up(x).relu())
        return x + self.moe(x)

    def forward(self, x):
        if self.checkpoint:
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)


def make_model(**kwargs):
    """Two blocks, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(Block(**kwargs), Block(**kwargs)).double()


def make_batch():
    torch.manual_seed(1)
    return torch.randn(T, D).double(), torch.randn(T, D).double()


class CompositionTest(GlooTest):
    @staticmethod
    @functools.cache
    def sparse(names, shape, ep):
        return fold_expert_parallel(CompositionTest.mesh(names, *shape), ep)

    def tokens(self, parts=4, part=None):
        """Slice of the batch, 5 tokens for each of 4 ranks by default."""
        part = self.rank if part is None else part
        return slice(part * T // parts, (part + 1) * T // parts)

    def compare(self, model, whole, parts, part):
        """Two steps of AdamW. ``parts`` data parallel ranks have a part of the batch each; the
        loss is the mean over them of the sum over their tokens."""
        optimizers = [
            torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, whole)
        ]
        x, target = make_batch()
        mine = self.tokens(parts, part)
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            output, want = model(x[mine]), whole(x)
            ((output - target[mine]) ** 2).sum().backward()
            (((want - target) ** 2).sum() / parts).backward()
            got = {
                name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                for name, p in model.named_parameters()
            }
            self.assertEqual(output, want[mine])
            names = [name for name, _ in whole.named_parameters()]
            self.assertEqual(list(got), names)
            for name in names:
                want_grad = whole.get_parameter(name).grad
                self.assertEqual(got[name], want_grad, msg=name)
            for optimizer in optimizers:
                optimizer.step()
        for name, p in model.named_parameters():
            value = p.full_tensor() if isinstance(p, DTensor) else p
            self.assertEqual(value, whole.get_parameter(name), msg=name)


@instantiate_parametrized_tests
class TestFSDP(CompositionTest):
    def shard(self, model, mesh, placement, parts):
        for block in model:
            fully_shard(block, mesh=mesh, shard_placement_fn=placement)
        fully_shard(model, mesh=mesh)
        for block in model:
            block.set_gradient_divide_factor(parts)

    @parametrize("ep,recompute", [(1, False), (2, False), (2, True), (4, False)])
    def test_experts_have_their_own_mesh(self, ep, recompute):
        whole = make_model()
        model = copy.deepcopy(whole)
        dense = self.mesh(("dp_shard",), 4)
        sparse = self.sparse(("dp_shard",), (4,), ep)
        parallelize_module(model, sparse["ep"], {"*.moe": ExpertParallel()})
        placement = expert_shard_placement(model, sparse["efsdp"], dense)
        self.shard(model, dense, placement, 4)
        for block in model:
            block.checkpoint = recompute
            w_in = block.moe.w_in
            # The same ranks as of the dense part are the same mesh.
            fsdp_dim = "dp_shard" if ep == 1 else "efsdp"
            self.assertEqual(w_in.device_mesh.mesh_dim_names, (fsdp_dim, "ep"))
            self.assertEqual(w_in.to_local().shape, (E // 4, 2 * H, D))
            self.assertEqual(block.up.weight.device_mesh, dense)
        self.compare(model, whole, 4, self.rank)

    @parametrize("norm_type", [2.0, 1.0])
    def test_clip_grad_norm(self, norm_type):
        whole = make_model()
        model = copy.deepcopy(whole)
        dense, sparse = self.mesh(("dp_shard",), 4), self.sparse(("dp_shard",), (4,), 2)
        parallelize_module(model, sparse["ep"], {"*.moe": ExpertParallel()})
        # The second block stays without FSDP: its dense gradients are plain.
        placement = expert_shard_placement(model, sparse["efsdp"], dense)
        fully_shard(model[0], mesh=dense, shard_placement_fn=placement)
        x, _ = make_batch()
        for m in (model, whole):
            # The same tokens on all ranks: their gradients count once per rank of ep.
            m(x).square().sum().backward()
        for p in model[1].parameters():
            if isinstance(p, DTensor):
                p.grad.div_(2)
        for name in ("w_in", "w_out"):
            model[0].moe.get_parameter(name).grad.div_(2)
        norms = [
            nn.utils.clip_grad_norm_(m.parameters(), 0.5, norm_type)
            for m in (model, whole)
        ]
        self.assertEqual(*norms)
        for name, p in model.named_parameters():
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            self.assertEqual(grad, whole.get_parameter(name).grad, msg=name)

    def test_fewer_experts_than_ranks(self):
        whole = make_model(num_experts=2, top_k=1)
        model = copy.deepcopy(whole)
        sparse = self.sparse(("dp_shard",), (4,), 2)
        parallelize_module(model, sparse["ep"], {"*.moe": ExpertParallel()})
        dense = self.mesh(("dp_shard",), 4)
        placement = expert_shard_placement(model, sparse["efsdp"], dense)
        self.shard(model, dense, placement, 4)
        self.assertEqual(model[0].moe.w_in.to_local().shape, (1, H, D))
        self.compare(model, whole, 4, self.rank)

    def test_fewer_experts_than_ranks_and_an_odd_dim(self):
        # FSDP shards only the first dim unevenly: two of four ranks have no rows.
        whole = make_model(num_experts=2, top_k=1, hidden=7, activation="relu")
        model, dense = copy.deepcopy(whole), self.mesh(("dp_shard",), 4)
        sparse = self.sparse(("dp_shard",), (4,), 1)
        parallelize_module(model, sparse["ep"], {"*.moe": ExpertParallel()})
        placement = expert_shard_placement(model, sparse["efsdp"], dense)
        self.shard(model, dense, placement, 4)
        self.compare(model, whole, 4, self.rank)

    def test_hybrid_sharding(self):
        whole = make_model()
        model = copy.deepcopy(whole)
        names, shape = ("dp_replicate", "dp_shard"), (2, 2)
        dense, sparse = self.mesh(names, *shape), self.sparse(names, shape, 2)
        parallelize_module(model, sparse["ep"], {"*.moe": ExpertParallel()})
        hybrid = sparse["dp_replicate", "efsdp"]
        placement = expert_shard_placement(model, hybrid, dense)
        self.shard(model, dense, placement, 4)
        self.compare(model, whole, 4, self.rank)

    def test_errors(self):
        dense, sparse = self.mesh(("dp_shard",), 4), self.sparse(("dp_shard",), (4,), 2)
        with self.assertRaisesRegex(ValueError, "a module that is expert parallel"):
            expert_shard_placement(make_model(), sparse["efsdp"], dense)
        with self.assertRaisesRegex(ValueError, "1-D, or 2-D .* got a 3-D mesh"):
            mesh = self.mesh(("pp", "dp_replicate", "efsdp"), 1, 2, 2)
            expert_shard_placement(make_model(), mesh, dense)


class TestTensorParallel(CompositionTest):
    def test_sequence_parallel_ranks_are_folded(self):
        """Tokens of a data parallel rank are sharded over tp, and ep is dp_shard * tp."""
        whole = make_model()
        model = copy.deepcopy(whole)
        names, shape = ("dp_shard", "tp"), (2, 2)
        dense, sparse = self.mesh(names, *shape), self.sparse(names, shape, 4)
        plan = {
            "*.up": ColwiseParallel(input_layouts=Shard(0)),
            "*.down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(model, dense["tp"], plan)
        style = ExpertParallel(sequence_parallel_mesh=dense["tp"])
        parallelize_module(model, sparse["ep"], {"*.moe": style})
        placement = expert_shard_placement(model, sparse["efsdp"], dense["dp_shard"])
        for block in model:
            fully_shard(block, mesh=dense["dp_shard"], shard_placement_fn=placement)
            block.set_gradient_divide_factor(2)
        # Each rank has a quarter of the batch, although there are two data parallel ranks.
        quarter = self.tokens(4)
        x, target = make_batch()
        output, want = model(x[quarter]), whole(x)
        self.assertEqual(output, want[quarter])
        ((output - target[quarter]) ** 2).sum().backward()
        (((want - target) ** 2).sum() / 2).backward()
        for name, p in model.named_parameters():
            got = p.grad.full_tensor()
            self.assertEqual(got, whole.get_parameter(name).grad, msg=name)

    def test_tensor_parallel_experts_under_fsdp(self):
        whole = make_model(activation="relu", bias=True)
        model = copy.deepcopy(whole)
        mesh = self.mesh(("efsdp", "ep", "tp"), 1, 2, 2)
        parallelize_module(model, mesh["ep", "tp"], {"*.moe": ExpertParallel()})
        dense = mesh["efsdp", "ep"]._flatten("dp")
        placement = expert_shard_placement(model, mesh["efsdp"], dense)
        for block in model:
            fully_shard(block, mesh=dense, shard_placement_fn=placement)
            block.set_gradient_divide_factor(2)
        self.compare(model, whole, 2, self.rank // 2)


class TestWithoutFSDP(CompositionTest):
    def test_replicas_of_experts(self):
        """Experts are summed over their replicas in backward; the rest is all-reduced."""
        whole = make_model()
        model = copy.deepcopy(whole)
        mesh = self.mesh(("dp_replicate", "ep"), 2, 2)
        parallelize_module(model, mesh, {"*.moe": ExpertParallel()})

        def average(p):
            p.grad.div_(4)
            if not isinstance(p, DTensor):
                dist.all_reduce(p.grad)

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(average)
        self.compare(model, whole, 4, self.rank)

    def test_folded_meshes_have_the_timeout_of_their_mesh(self):
        world, options = dist.group.WORLD, dist.ProcessGroupGloo._Options()
        before, options._timeout = group_timeout(world), datetime.timedelta(seconds=77)
        override = dict.fromkeys(("dp_shard", "tp"), ("gloo", options))
        mesh = init_device_mesh(
            *("cpu", (2, 2)),
            mesh_dim_names=("dp_shard", "tp"),
            backend_override=override,
        )
        for ep in (1, 2, 4):
            groups = fold_expert_parallel(mesh, ep).get_all_groups()
            names = {group.group_name for group in groups} - {world.group_name}
            self.assertEqual(
                {group_timeout(c10d._resolve_process_group(n)) for n in names},
                {options._timeout},
            )
        self.assertEqual(group_timeout(world), before)


@instantiate_parametrized_tests
class TestOverflow(CompositionTest):
    """Ranks that share gradients of experts agree whether tokens did not fit."""

    @parametrize("kind", ["replicas", "fsdp", "hybrid", "fsdp_unsharded"])
    def test_every_rank_knows_of_one(self, kind):
        model, style = make_model(), {"*.moe": ExpertParallel(capacity=8)}
        if kind == "replicas":
            parallelize_module(model, self.mesh(("dp_replicate", "ep"), 2, 2), style)
        else:
            names, shape = (("dp_shard",), (4,))
            if kind == "hybrid":
                names, shape = (("dp_replicate", "dp_shard"), (2, 2))
            dense = self.mesh(names, *shape)
            sparse = self.sparse(names, shape, 1 if kind == "hybrid" else 2)
            parallelize_module(model, sparse["ep"], style)
            efsdp = (
                sparse["dp_replicate", "efsdp"] if kind == "hybrid" else sparse["efsdp"]
            )
            placement = expert_shard_placement(model, efsdp, dense)
            for block in model:
                fully_shard(block, mesh=dense, shard_placement_fn=placement)
                # As for the micro-batches of a step.
                block.set_reshard_after_backward(kind != "fsdp_unsharded")
        x = torch.randn(40 if self.rank == 1 else 1, D, dtype=torch.double)

        def step():
            model.zero_grad()
            model(x).square().sum().backward()

        step()
        raised = torch.zeros(1)
        try:
            ExpertParallel.check_overflow(model)
        except RuntimeError as error:
            self.assertIn("tokens were left out", str(error))
            raised += 1
        dist.all_reduce(raised)
        self.assertEqual(raised.item(), 4)
        # The collectives of FSDP are of all ranks: one that reran alone would wait.
        ExpertParallel.grow_and_rerun(model, step)
        ExpertParallel.check_overflow(model)


class TestPipelineParallel(CompositionTest):
    def test_stage_with_experts(self):
        whole = make_model()
        mesh = self.mesh(("pp", "ep"), 2, 2)
        index = mesh["pp"].get_local_rank()
        block = copy.deepcopy(whole[index])
        parallelize_module(block, mesh["ep"], {"moe": ExpertParallel()})
        # The halves of the batch are on the ranks of ep, in microbatches of 5 tokens.
        half = self.tokens(2, mesh["ep"].get_local_rank())
        x, target = make_batch()
        example = torch.empty(5, D, dtype=torch.double)
        stage = PipelineStage(
            *(block, index, 2, torch.device("cpu")),
            input_args=example.clone().requires_grad_(index > 0),
            output_args=example.clone().requires_grad_(),
            group=mesh["pp"].get_group(),
        )
        schedule = Schedule1F1B(
            stage, 2, loss_fn=lambda y, t: ((y - t) ** 2).sum(), scale_grads=False
        )
        losses = []
        if index == 0:
            schedule.step(x[half])
        else:
            schedule.step(target=target[half], losses=losses)
        want = ((whole(x) - target) ** 2).sum()
        want.backward()
        for name, p in block.named_parameters():
            grad = p.grad
            if isinstance(grad, DTensor):
                grad = grad.full_tensor()
            else:
                dist.all_reduce(grad, group=mesh["ep"].get_group())
            self.assertEqual(grad, whole[index].get_parameter(name).grad, msg=name)
        if index == 1:
            loss = torch.stack(losses).sum().detach()
            dist.all_reduce(loss, group=mesh["ep"].get_group())
            self.assertEqual(loss, want.detach())


if __name__ == "__main__":
    run_tests()
