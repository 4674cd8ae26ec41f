# Owner(s): ["oncall: distributed"]
"""Experts live at home and run anywhere: weights are fetched, and gradients are sent back."""

import copy
import tempfile

from moe_gloo import GlooTest
from moe_placement import any_plan, place_experts

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._moe.exchange import Exchange
from torch.distributed._moe.fetch import after_fetch, Copies, moves_of
from torch.distributed._moe.plan import Plan, Topology
from torch.distributed._moe.recompute import save_communication
from torch.distributed._moe.wire_bytes import count_wire_bytes
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ExpertParallel
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    slowTest,
)
from torch.utils.checkpoint import checkpoint, noop_context_fn


D, H, E, K, TOKENS = 16, 12, 8, 2, 24
TOPOLOGY = Topology(2, 2, 4)
EXPERTS = ("w_in", "w_out")


class PlacedTest(GlooTest):
    """What test_moe_fetch_ahead.py needs too."""

    def batch(self, step):
        g = torch.Generator().manual_seed(step)
        return torch.randn(TOKENS, D, generator=g, dtype=torch.float64)

    def sum_gradients(self, model, group=None):
        for p in model.parameters():
            if not isinstance(p, DTensor):
                dist.all_reduce(p.grad, group=group)

    def check_same(self, model, whole, attribute=None):
        for name, p in model.named_parameters():
            value, want = p, whole.get_parameter(name)
            if attribute is not None:
                value, want = getattr(p, attribute), getattr(want, attribute)
            value = value.full_tensor() if isinstance(value, DTensor) else value
            self.assertEqual(value, want, atol=1e-9, rtol=1e-9, msg=name)


@instantiate_parametrized_tests
class TestFetch(GlooTest):
    @staticmethod
    def fetch(exchange, moves, weights):
        return dict(zip(weights, Copies(exchange, moves).traced(*weights.values())))

    @parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_weights_come_and_gradients_go_back(self, dtype):
        exchange = Exchange(dist.group.WORLD, E, None, level="experts")
        home = slice(self.rank * 2, self.rank * 2 + 2)
        g = torch.Generator().manual_seed(0)
        shapes = {"a": (3, 5), "b": (7,), "frozen": (2,)}
        whole = {
            name: torch.randn(E, *shape, generator=g).to(dtype)
            for name, shape in shapes.items()
        }
        for seed in range(6):
            placement = any_plan(TOPOLOGY, E, seed)
            held = placement.slot_experts
            moves = moves_of(placement, self.rank)
            mine = {n: w[home].clone().requires_grad_() for n, w in whole.items()}
            mine["frozen"].requires_grad_(False)
            with count_wire_bytes(exchange) as wire:
                got = self.fetch(exchange, moves, mine)
                copies = held[self.rank, 2:]
                copies = copies[copies >= 0]
                for name, rows in got.items():
                    self.assertEqual(rows, whole[name][copies], atol=0, rtol=0)
                # The gradient of each slot of each rank differs.
                factor = (self.rank + 1 + torch.arange(len(copies)) / 8).to(dtype)
                sums = [(got[n].flatten(1).sum(1) * factor).sum() for n in ("a", "b")]
                sum(sums).backward()
            self.assertEqual(
                wire.messages["experts"],
                {"sizes": 1, "experts": 1, "expert_grads": 1},
            )
            self.assertIsNone(mine["frozen"].grad)
            at = [(held == e).nonzero().tolist() for e in range(E)]
            for name in ("a", "b"):
                for local, e in enumerate(range(E)[home]):
                    # Sums in the order of the ranks, in at least fp32.
                    away = [x for x in at[e] if x[0] != self.rank]
                    total = torch.zeros((), dtype=torch.float64)
                    for r, s in away:
                        total += torch.tensor(r + 1 + (s - 2) / 8).to(dtype).double()
                    want = total.to(dtype).expand(shapes[name])
                    self.assertEqual(mine[name].grad[local], want, atol=0, rtol=0)

    def test_experts_that_do_not_use_their_weights(self):
        # As in a loop over experts with tokens: a rank may use no weight, but others wait for it.
        exchange = Exchange(dist.group.WORLD, E, None, level="experts")
        plan = any_plan(TOPOLOGY, E, 1)
        with self.assertRaisesRegex(ValueError, "the experts of the rank, then copies"):
            flipped = plan.slot_experts.flip(1)
            moves_of(Plan(TOPOLOGY, flipped, plan.quotas), self.rank)
        moves = moves_of(plan, self.rank)
        weight = torch.ones(2, 3, requires_grad=True)
        x = torch.ones(3, requires_grad=True)
        got = self.fetch(exchange, moves, {"w": weight})
        output = x * 2 if self.rank % 2 else x * got["w"].sum()
        after_fetch(output, got).sum().backward()
        self.assertIsNotNone(weight.grad)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.moe = nn.MoE(D, H, E, top_k=K)
        self.recompute = None

    def forward(self, x):
        x = self.first(x)
        if self.recompute is not None:
            x = checkpoint(self.moe, x, use_reentrant=False, context_fn=self.recompute)
            return self.last(x)
        return self.last(self.moe(x))


@instantiate_parametrized_tests
class TestPlacedTraining(PlacedTest):
    """What users add to a training loop, with plans that change in every step."""

    def pair(self, ranks=4, style=None, **options):
        """The model of one process, its parallel copy, the copy's placement, its mesh and its tokens."""
        torch.manual_seed(0)
        whole = Model().double()
        model = copy.deepcopy(whole)
        mesh = self.mesh(("pair", "ep"), 4 // ranks, ranks)["ep"]
        options = {
            "slots_per_rank": 16 // ranks,
            "copy_cost": 0.0,
            "every": None,
        } | options
        placement = place_experts(model, mesh, "moe", style, **options)
        share = TOKENS // ranks
        mine = slice(mesh.get_local_rank() * share, (mesh.get_local_rank() + 1) * share)
        return whole, model, placement, mesh, mine

    def optimizers(self, model, weight_decay=0.1):
        # foreach does not accept plain tensors together with DTensors.
        experts = [model.moe.get_parameter(name) for name in EXPERTS]
        rest = [p for p in model.parameters() if all(p is not e for e in experts)]
        return [
            torch.optim.AdamW(
                experts[:1], lr=1e-2, eps=1e-2, weight_decay=weight_decay
            ),
            torch.optim.SGD(experts[1:], lr=1e-2, momentum=0.9, weight_decay=0.1),
            torch.optim.SGD(rest, lr=1e-2, momentum=0.9),
        ]

    def backward(self, model, x, scale=1.0, group=None):
        y = model(x)
        ((y - x.roll(1, -1)).square().sum() * scale / TOKENS).backward()
        if group is not None:
            self.sum_gradients(model, group)

    def train(self, ranks, steps, recompute=None, **style):
        """Compares clipping, weight decay, three optimizers and an EMA with one process."""
        whole, model, placement, mesh, mine = self.pair(ranks, style)
        (layer,) = placement.layers
        model.recompute = recompute
        both = ((whole, None), (model, mesh.get_group()))
        optimizers = [self.optimizers(m) for m, _ in both]
        ema = get_ema_avg_fn(0.9)
        averages = [AveragedModel(m, avg_fn=ema) for m, _ in both]
        for step in range(steps):
            layer.use(any_plan(layer.home.topology, E, step))
            norms = []
            for i, (m, group) in enumerate(both):
                x = self.batch(step)
                m.zero_grad()
                self.backward(m, x if group is None else x[mine], group=group)
            self.check_same(model, whole, "grad")
            for i, (m, _) in enumerate(both):
                norms.append(nn.utils.clip_grad_norm_(m.parameters(), 0.5))
                for optimizer in optimizers[i]:
                    optimizer.step()
                averages[i].update_parameters(m)
            self.assertEqual(norms[1], norms[0], atol=1e-9, rtol=1e-9)
        self.check_same(model, whole)
        self.check_same(averages[1].module, averages[0].module)

    @parametrize("ranks", [2, 4])
    @parametrize("recompute", ["no", "fetches_again", "keeps"])
    def test_same_weights_as_one_process(self, ranks, recompute):
        contexts = {"fetches_again": noop_context_fn, "keeps": save_communication()}
        self.train(ranks, 4, contexts.get(recompute))

    @parametrize("ranks_per_node", [None, 2])
    def test_same_weights_with_chunks(self, ranks_per_node):
        style = {"num_chunks": 2, "combine": "exact"}
        if ranks_per_node:
            style |= {"token_switch": "hierarchical", "ranks_per_node": 2}
        self.train(4, 3, **style)

    @slowTest
    @parametrize("ranks", [2, 4])
    def test_same_weights_after_100_steps(self, ranks):
        self.train(ranks, 100)

    def test_parameters_are_ordinary(self):
        whole, model, placement, mesh, mine = self.pair()
        (layer,) = placement.layers
        layer.use(any_plan(TOPOLOGY, E, 0))
        self.backward(model, self.batch(0)[mine])
        self.assertEqual(list(model.state_dict()), list(whole.state_dict()))
        for name in EXPERTS:
            p = model.moe.get_parameter(name)
            self.assertEqual(p.placements, (Shard(0),))
            self.assertEqual(p.shape, whole.moe.get_parameter(name).shape)
            self.assertEqual(p.grad.placements, (Shard(0),))

    def test_frozen_experts_keep_their_weights(self):
        whole, model, placement, mesh, mine = self.pair()
        before = model.moe.w_in.full_tensor().clone()
        for m in (whole, model):
            m.moe.w_in.requires_grad_(False)
        optimizers = self.optimizers(model), self.optimizers(whole)
        for step in range(3):
            placement.layers[0].use(any_plan(TOPOLOGY, E, step))
            self.backward(model, self.batch(step)[mine], group=mesh.get_group())
            self.backward(whole, self.batch(step))
            self.assertIsNone(model.moe.w_in.grad)
            for optimizer in sum(optimizers, []):
                optimizer.step()
                optimizer.zero_grad()
        self.assertEqual(model.moe.w_in.full_tensor(), before, atol=0, rtol=0)
        self.check_same(model, whole)

    def test_grad_scaler(self):
        whole, model, placement, mesh, mine = self.pair()
        placement.layers[0].use(any_plan(TOPOLOGY, E, 3))
        self.backward(whole, self.batch(0))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        self.backward(model, self.batch(0)[mine], 1024.0, mesh.get_group())
        optimizers = self.optimizers(model)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        self.check_same(model, whole, "grad")
        for optimizer in optimizers:
            scaler.step(optimizer)
        for optimizer in self.optimizers(whole):
            optimizer.step()
        scaler.update()
        self.check_same(model, whole)

    def test_gradients_are_accumulated(self):
        # A plan per micro-batch, and one backward after all forwards.
        whole, model, placement, mesh, mine = self.pair()
        losses = []
        for step in range(3):
            self.backward(whole, self.batch(step))
            placement.layers[0].use(any_plan(TOPOLOGY, E, step))
            x = self.batch(step)[mine]
            losses.append((model(x) - x.roll(1, -1)).square().sum() / TOKENS)
        for loss in reversed(losses):
            loss.backward()
        for p in model.parameters():
            if not isinstance(p, DTensor):
                dist.all_reduce(p.grad)
        self.check_same(model, whole, "grad")

    def run_with_plans(self, save):
        """Weights and plans of a training that plans every second step."""
        torch.manual_seed(0)
        _, model, placement, mesh, mine = self.pair(every=2)
        with torch.no_grad():
            model.moe.router.weight[:2] += 1.0  # two hot experts
        optimizers = self.optimizers(model)
        plans, states = [], []
        for step in range(9):
            model.zero_grad()
            if save:
                placement.state_dict()
            self.backward(model, self.batch(step)[mine].abs(), group=mesh.get_group())
            for number, optimizer in enumerate(optimizers):
                if save:
                    states.append(placement.state_dict())
                    self.assertEqual(placement.state_dict(), states[-1])
                optimizer.step()
            placement.step()
            if save:
                placement.state_dict()
            plans.append(placement.slot_experts[0].clone())
        return {n: p.detach() for n, p in model.named_parameters()}, plans

    def test_saving_changes_nothing(self):
        want, plans = self.run_with_plans(False)
        got, again = self.run_with_plans(True)
        self.assertEqual(again, plans)
        home = Plan.home(Topology(1, 4, 4), E).slot_experts
        self.assertTrue(any(not torch.equal(plan, home) for plan in plans))
        for name, value in want.items():
            local, other = (
                t.to_local() if isinstance(t, DTensor) else t
                for t in (value, got[name])
            )
            self.assertEqual(local, other, atol=0, rtol=0, msg=name)

    @parametrize("planned", [False, True])
    def test_resumes_where_it_was_saved(self, planned):
        runs = []
        for resume in (False, True):
            _, model, placement, mesh, mine = self.pair(every=2)
            optimizers = self.optimizers(model)
            for step in range(7):
                if resume and step == (4 if planned else 3):
                    state = copy.deepcopy(placement.state_dict())
                    some = any(map(any, state["stats"]["recorded"]))
                    self.assertEqual(some, not planned)
                    model2 = copy.deepcopy(Model().double())
                    other = place_experts(
                        model2, mesh, "moe", slots_per_rank=4, every=2, copy_cost=0.0
                    )
                    model2.load_state_dict(model.state_dict())
                    other.load_state_dict(state)
                    optimizers2 = self.optimizers(model2)
                    for new, old in zip(optimizers2, optimizers):
                        new.load_state_dict(old.state_dict())
                    model, placement, optimizers = model2, other, optimizers2
                model.zero_grad()
                self.backward(
                    model, self.batch(step)[mine].abs(), group=mesh.get_group()
                )
                for optimizer in optimizers:
                    optimizer.step()
                placement.step()
            runs.append((placement.slot_experts[0], model.moe.w_in.to_local()))
        self.assertEqual(*runs, atol=0, rtol=0)

    @parametrize("how", ["loaded", "home", "used"])
    def test_plans_that_differ(self, how):
        """Each rank loads a file of another step: same shapes, but copies of other experts, or none."""
        _, model, placement, _, mine = self.pair()
        (layer,) = placement.layers
        plan = any_plan(layer.home.topology, E, self.rank // 2)
        if how == "home" and self.rank == 1:
            plan = layer.home
        message = "TokenSwitchAllToAll: checksum of the loaded plan must be the same"
        if how == "used":
            # Nothing loads it, so that only the fetch can tell.
            layer.use(plan)
            message = "layer 0 .MoE.: the checksum of the plan must be the same"
        else:
            state = placement.state_dict()
            state["slot_experts"] = [plan.slot_experts.tolist()]
            state["quotas"] = [plan.quotas.tolist()]
            placement.load_state_dict(state)
        with self.assertRaisesRegex(RuntimeError, message):
            model(self.batch(0)[mine])

    @parametrize("saved, loaded", [(0, 0), (0, 2), (3, 0), (3, 2)])
    def test_state_in_a_distributed_checkpoint(self, saved, loaded):
        """It is loaded at any step, as keys and kinds of its entries never change."""
        path = [tempfile.mkdtemp()]
        dist.broadcast_object_list(path)
        placements = []
        for steps in (saved, loaded):
            _, model, placement, _, mine = self.pair(every=2)
            for step in range(steps):
                self.backward(model, self.batch(step)[mine].abs())
                placement.step()
            placements.append(placement)
        before, after = placements
        dcp.save({"placement": before.state_dict()}, checkpoint_id=path[0])
        dcp.load({"placement": after}, checkpoint_id=path[0])
        self.assertEqual(after.state_dict(), before.state_dict())
        self.assertEqual(after.slot_experts, before.slot_experts)

    @parametrize("keep", [False, True])
    def test_a_write_that_no_version_counts(self, keep):
        _, model, placement, _, mine = self.pair(keep=keep)
        placement.layers[0].use(any_plan(placement.layers[0].home.topology, E, 1))
        x = self.batch(0)[mine]
        path = [tempfile.mkdtemp()]
        dist.broadcast_object_list(path)
        with torch.no_grad():
            want = model(x)
            dcp.save(model.state_dict(), checkpoint_id=path[0])
            for weight in model.moe.parameters():
                weight.mul_(2)
            model(x)
            dcp.load(model.state_dict(), checkpoint_id=path[0])
            placement.forget()
            self.assertEqual(model(x), want)

    def test_loads_on_other_ranks(self):
        _, model, placement, mesh, mine = self.pair(every=1)
        for step in range(3):
            self.backward(model, self.batch(step)[mine].abs())
            placement.step()
        path = [tempfile.mkdtemp()]
        dist.broadcast_object_list(path)
        dcp.save(model.state_dict(), checkpoint_id=path[0])
        want = {
            n: p.full_tensor() for n, p in model.moe.named_parameters() if n in EXPERTS
        }
        # And counts of one more forward.
        self.backward(model, self.batch(3)[mine].abs())
        whole, fewer, other, _, half = self.pair(2, every=1)
        with torch.device("meta"):
            other.load_state_dict(placement.state_dict())
        self.assertEqual(other.slot_experts[0].shape, (2, 8))
        for m in (whole, fewer):
            state = {k: torch.zeros_like(v) for k, v in m.state_dict().items()}
            dcp.load(state, checkpoint_id=path[0])
            m.load_state_dict(state)
            for name in EXPERTS:
                p = m.moe.get_parameter(name)
                p = p.full_tensor() if isinstance(p, DTensor) else p
                self.assertEqual(p, want[name], atol=0, rtol=0)
        # The averages continue as if the number of ranks had not changed.
        with torch.no_grad():
            model(self.batch(4)[mine]), fewer(self.batch(4)[half])
        placement.step(), other.step()
        self.assertEqual(other.loads, placement.loads, atol=1e-9, rtol=1e-9)
        self.assertEqual(other.loads.sum().item(), TOKENS * K)

    def test_fsdp(self):
        torch.manual_seed(0)
        whole = Model().double()
        model = copy.deepcopy(whole)
        dense = self.mesh(("dp_shard",), 4)
        sparse = ExpertParallel.fold_mesh(dense, 2)
        options = {"slots_per_rank": 8, "every": None, "copy_cost": 0.0}
        placement = place_experts(model, sparse["ep"], "moe", **options)
        shard = ExpertParallel.shard_placement(model, sparse["efsdp"], dense)
        fully_shard(model.moe, mesh=dense, shard_placement_fn=shard)
        fully_shard(model, mesh=dense, shard_placement_fn=shard)
        for module in (model.moe, model):
            module.set_gradient_divide_factor(1)
        optimizers = [
            torch.optim.AdamW(m.parameters(), eps=1e-2) for m in (whole, model)
        ]
        mine = slice(self.rank * 6, self.rank * 6 + 6)
        for step in range(3):
            plan = any_plan(Topology(1, 2, 8), E, 10 * step)
            placement.layers[0].use(plan)
            self.backward(whole, self.batch(step))
            self.backward(model, self.batch(step)[mine])
            self.check_same(model, whole, "grad")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        self.check_same(model, whole)


if __name__ == "__main__":
    run_tests()
