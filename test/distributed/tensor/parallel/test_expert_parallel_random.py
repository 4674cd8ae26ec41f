# Owner(s): ["oncall: distributed"]
"""Random compositions of ExpertParallel with what people put around it.

    python test/distributed/tensor/parallel/test_expert_parallel_random.py --seeds 0 300 [--log FILE]

A seed draws ranks, layers, how they communicate, what wraps them, and sometimes a fault of one
rank. Outputs, gradients and trained parameters must be those of one rank in float64; after a
fault, every rank must have one clear error within the timeout of the process group. Then the groups
are made again, and the same must hold for another draw in the same processes.
Ranks are forked from a process that has imported torch, what takes longest.
"""

import copy
import datetime
import functools
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ExpertParallel,
    ExpertPlacement,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.moe_lora import add_lora
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)


sys.path.append(str(Path(__file__).resolve().parents[2]))

from moe_fault_ranks import (  # noqa: E402
    check_seeds,
    forked,
    run_seeds,
    wait_for_ranks,
)


if "--seeds" in sys.argv:
    # These processes are ranks, not tests. Imports for tests take longer than torch.
    TestCase = object
else:
    from torch.testing._internal.common_utils import run_tests, TestCase


D, HIDDEN, STEPS = 8, 6, 3  # plans by average loads are used from the second step on
# Small, so that weights, and with them rounding errors, do not explode in these steps.
LR = 0.005
# Seconds: of a collective, of one that a fault makes wait, and of all that a seed does.
TIMEOUT, SHORT_TIMEOUT, DEADLINE = 120, 15, 300
# What one rank does: it raises between dispatch and combine, or is given something else.
FAULTS = {
    "exception": "planted",
    "interrupt": "KeyboardInterrupt",
    "input needs no gradient": "requires_grad.* must be the same on all ranks",
    "dtype": "must be the same on all ranks",
    "top_k": "K.* must be the same on all ranks",
}
# Share of the draws that are compiled, which takes half a minute each.
COMPILED = float(os.environ.get("MOE_RANDOM_COMPILED", "0"))
LOST = r"(?i)connection|timed? ?out|closed|reset|broken pipe"
SAVED = "mm addmm _moe_mlp _moe_topk _moe_permutation index index_select cat sub empty".split()
SAVED += ["all_to_all_single", "wait_tensor", "everything"]


class Plan:
    """What a seed says. The attributes are all that a draw depends on."""

    def __init__(self, seed: int, part: int) -> None:
        draw = random.Random(f"{seed} {part}")
        pick = draw.choice
        self.seed, self.ranks = seed, random.Random(seed).choice((2, 3, 4, 4, 5))
        self.wrap = pick(("none", "none", "ddp", "fsdp", "fsdp ignores", "replicate"))
        degrees = [n for n in range(1, self.ranks + 1) if self.ranks % n == 0]
        self.ep = pick(degrees) if self.wrap in ("fsdp", "replicate") else self.ranks
        # Ranks of the mesh; the others watch.
        self.first = 0
        if self.wrap == "none" and self.ranks > 2 and draw.random() < 0.4:
            self.ep = draw.randrange(1, self.ranks)
            self.first = self.ranks - self.ep
        self.experts = self.ep * draw.randrange(1, 4)
        self.top_k = draw.randrange(1, min(4, self.experts) + 1)
        self.layers = draw.randrange(1, 3)
        self.micro = pick((1, 1, 2, 3))
        self.moe = {"activation": pick(("swiglu", "relu", "geglu"))}
        self.moe["bias"] = draw.random() < 0.4
        self.moe["shared_hidden_dim"] = pick((None, None, 4))
        self.style = {
            "combine": pick(("reduce", "exact")),
            "num_chunks": pick((1, 1, 2, 3)),
        }
        per_node = [n for n in range(1, self.ep + 1) if self.ep % n == 0]
        capacity = pick((None, None, 64))
        if draw.random() < 0.3:
            self.style |= {
                "token_switch": "hierarchical",
                "ranks_per_node": pick(per_node),
            }
            # Rows of all ranks of a node may meet on the way to one.
            capacity = capacity and (capacity, capacity * self.ranks)
        self.style["capacity"] = capacity
        kinds = ("no", "no", "reentrant", "plain", "save", "save with policy", "policy")
        self.recompute = pick(kinds)
        self.saved = draw.sample(SAVED, draw.randrange(1, 5))
        self.frozen = pick(("", "", "", "w_in", "router", "moe"))
        self.lora = not self.moe["bias"] and draw.random() < 0.15
        self.tied = self.layers == 2 and draw.random() < 0.3
        self.copied = draw.random() < 0.2
        self.saves = draw.random() < 0.4  # state_dict before each backward
        self.given = draw.random() < 0.4  # ids with repetitions and -1
        self.input_grad = draw.random() < 0.6
        self.autocast = draw.random() < 0.12
        self.weights_dtype = pick((None, None, None, torch.float32))
        self.reload = draw.random() < 0.3  # at another degree
        self.compiled = draw.random() < COMPILED
        self.fault = pick(list(FAULTS)) if draw.random() < 0.25 else None
        self.stays = draw.random() < 0.5  # the rank of the fault, until others gave up
        self.models = 2 if draw.random() < 0.2 else 1  # one after the other in a step
        self.victim = self.first + draw.randrange(self.ep)
        self.counts = [
            [draw.choice((0, 1, 2, 5, 9)) for _ in range(self.ranks)]
            for _ in range(STEPS * self.micro)
        ]
        self.placement = None
        if draw.random() < 0.4:
            self.placement = {
                "slots_per_rank": self.experts // self.ep + pick((1, 2)),
                "every": 1,
                "online": draw.random() < 0.5,
                "keep": draw.random() < 0.4,
                "copy_cost": 0.0,
            }
        self._legalize()

    def _legalize(self) -> None:
        """Removes combinations that ExpertParallel refuses; the docs give each reason."""
        if self.wrap == "replicate":
            self.placement = None
        if self.lora:
            self.frozen, self.tied, self.reload = "", False, False
        if self.autocast:
            self.weights_dtype = None
        if self.fault:
            self.models, self.compiled = 1, False
            raises = self.fault in ("exception", "interrupt")
            if self.wrap == "replicate" and (self.ep == 1 or not raises):
                # Copies that need not hear of each other, in a forward without its backward.
                self.experts *= self.ranks // self.ep
                self.wrap, self.ep = "none", self.ranks
            apart = self.ep == 1 or self.wrap.startswith("fsdp")
            if apart and not raises:
                self.fault = (
                    "exception"  # nobody to disagree with, or only the whole is called
                )
        if self.placement and self.compiled:
            self.placement["online"] = False
        if self.wrap == "none":
            return
        if self.wrap != "replicate" or self.ep == 1:
            # Their hooks and hidden copies know one owner.
            self.tied = False
        if self.wrap == "ddp":
            # Buckets wait for parameters of all forwards; not with reentrant recomputation.
            self.recompute = {"reentrant": "plain"}.get(self.recompute, self.recompute)

    def describe(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in vars(self).items() if k != "counts")

    @property
    def members(self) -> range:
        return range(self.first, self.first + self.ep * self.copies)

    @property
    def timeout(self) -> int:
        return SHORT_TIMEOUT if self.fault else TIMEOUT

    @property
    def copies(self) -> int:
        """Ranks that have the same experts."""
        return self.ranks // self.ep if self.wrap in ("fsdp", "replicate") else 1


class Layer(nn.MoE):
    """A MoE layer whose routing may be odd, and whose experts may raise on a rank."""

    plan: Plan
    planted = odd_weights = False

    def route(self, input, topk_indices=None):
        logits, ids, weights = super().route(input, topk_indices)
        if self.plan.given and ids.numel() and topk_indices is None:
            # By the token alone, so that one rank chooses the same.
            odd = (input.detach().abs().sum(-1, keepdim=True) * 1e4).long() % 3
            first = ids[..., :1].expand_as(ids)
            ids = torch.where(
                odd == 0, first, torch.where(odd == 1, ids, ids - (ids == 0).long())
            )
        if self.plan.weights_dtype is not None:
            weights = weights.to(self.plan.weights_dtype)
        if self.odd_weights:
            weights = weights.bfloat16()
        return logits, ids, weights

    def run_routed(self, *args, **kwargs):
        if self.planted:
            raise (
                KeyboardInterrupt
                if self.plan.fault == "interrupt"
                else ArithmeticError("planted")
            )
        return super().run_routed(*args, **kwargs)


class Net(nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        self.first = nn.Linear(D, D)
        self.layers = nn.ModuleList(
            Layer(D, HIDDEN, plan.experts, plan.top_k, **plan.moe)
            for _ in range(plan.layers)
        )
        self.last = nn.Linear(D, D)
        for layer in self.layers:
            layer.plan = plan
            if plan.lora:
                for p in add_lora(layer, 2):
                    nn.init.normal_(p, std=0.3)
        if plan.tied:
            for name in ("w_in", "w_out"):
                setattr(self.layers[1], name, getattr(self.layers[0], name))
        for name, p in self.named_parameters():
            frozen = plan.frozen == "moe" and "layers" in name and "router" not in name
            if frozen or (plan.frozen and plan.frozen != "moe" and plan.frozen in name):
                p.requires_grad_(False)

    def context(self):
        """Arguments of checkpoint."""
        kind, saved = self.plan.recompute, self.plan.saved

        def policy(ctx, op, *args, **kwargs):
            name = op.name().split("::")[1].split(".")[0]
            if name in saved or "everything" in saved:
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        selective = functools.partial(create_selective_checkpoint_contexts, policy)
        save = ExpertParallel.save_communication
        made = {"save": save(), "save with policy": save(policy), "policy": selective}
        known = {"context_fn": made[kind]} if kind in made else {}
        return {"use_reentrant": kind == "reentrant", **known}

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            parallel = hasattr(layer, "_expert_parallel")
            if parallel and self.plan.recompute != "no":
                x = x + checkpoint(layer, x, **self.context())
            else:
                x = x + layer(x)
        return self.last(x)


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


class Run:
    """A model of a plan on its ranks, next to one on this rank alone."""

    def __init__(self, plan, rank, seed):
        self.plan, self.rank = plan, rank
        torch.manual_seed(seed)
        self.one = Net(plan).double()
        self.mesh, self.group = self.make_meshes()
        self.model, self.call = self.wrap(copy.deepcopy(self.one))
        self.scale = self.mean()

    def make_meshes(self):
        plan, options = self.plan, dist.ProcessGroupGloo._Options()
        # Or the groups of a mesh have half an hour.
        options._timeout = datetime.timedelta(seconds=plan.timeout)
        if plan.wrap == "none":
            group = dist.new_group(list(plan.members), timeout=options._timeout)
            ranks = list(plan.members)
            return DeviceMesh.from_group(
                group, "cpu", ranks, mesh_dim_names=("ep",)
            ), group
        if plan.wrap == "replicate":
            names, shape = ("dp_replicate", "ep"), (plan.copies, plan.ep)
        else:
            names, shape = ("dp_shard",), (plan.ranks,)
        override = dict.fromkeys(names, ("gloo", options))
        mesh = init_device_mesh(
            "cpu", shape, mesh_dim_names=names, backend_override=override
        )
        return mesh, dist.group.WORLD

    def wrap(self, model):
        plan, self.placement = self.plan, None
        if plan.placement is not None:
            self.placement = ExpertPlacement(**plan.placement)
        style = ExpertParallel(placement=self.placement, **plan.style)
        mesh, dense = self.mesh, self.mesh
        if plan.wrap == "fsdp":
            sparse = ExpertParallel.fold_mesh(dense, plan.ep)
            mesh = sparse["ep"]
        parallelize_module(model, mesh, {"layers.*": style})
        if plan.copied:
            model = copy.deepcopy(model)
        experts = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
        self.experts = experts
        call = model
        if plan.wrap == "ddp":
            ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            ignore(model, experts)
            call = DistributedDataParallel(model, process_group=self.group)
        elif plan.wrap == "fsdp ignores":
            fully_shard(
                model,
                mesh=dense,
                ignored_params={model.get_parameter(n) for n in experts},
            )
        elif plan.wrap == "fsdp":
            place = ExpertParallel.shard_placement(model, sparse["efsdp"], dense)
            for layer in model.layers:
                fully_shard(layer, mesh=dense, shard_placement_fn=place)
                layer.set_gradient_divide_factor(dense.size())
            fully_shard(model, mesh=dense, shard_placement_fn=place)
        if plan.compiled:
            call = torch.compile(call, backend="aot_eager")
        return model, call

    def mean(self):
        """What a gradient of one rank is divided by, of dense parameters and of experts."""
        ranks = self.plan.ranks
        if self.plan.wrap in ("ddp", "fsdp ignores"):
            return ranks, 1
        return (ranks, ranks) if self.plan.wrap == "fsdp" else (1, 1)

    def tokens(self, at):
        """Tokens of all members in a micro-batch, and the slice of this rank."""
        generator = torch.Generator().manual_seed(1000 * self.plan.seed + at)
        counts = [self.plan.counts[at][r] for r in self.plan.members]
        mine = self.rank - self.plan.first
        x = torch.randn(sum(counts), D, generator=generator).double()
        return x, slice(sum(counts[:mine]), sum(counts[: mine + 1]))

    def backward(self, at, last):
        """Forward and backward of a micro-batch; compares output and gradient of the input."""
        plan, call = self.plan, self.call
        if plan.wrap == "ddp":
            call.require_backward_grad_sync = last
        elif plan.wrap.startswith("fsdp"):
            self.model.set_requires_gradient_sync(last)
        x, mine = self.tokens(at)
        mine_x = x[mine].clone().requires_grad_(plan.input_grad)
        all_x = x.clone().requires_grad_(plan.input_grad)
        with torch.autocast("cpu", torch.bfloat16, enabled=plan.autocast):
            output = call(mine_x)
        want = self.one(all_x)
        if plan.saves:
            self.model.state_dict()
        self.close(output, want[mine], "output")
        loss, want_loss = (y.double().sin().sum() for y in (output, want))
        if want_loss.requires_grad:
            loss.backward()
            want_loss.backward()
        if plan.input_grad:
            self.close(mine_x.grad, all_x.grad[mine], "gradient of the input")

    def close(self, got, want, what):
        limit = 0.1 if self.plan.autocast else 1e-9
        if self.plan.weights_dtype == torch.float32:
            limit = 1e-5
        if got is None or want is None:
            if got is not want and (want if got is None else got).abs().max() > 0:
                raise AssertionError(f"{what}: got {got}, want {want}")
            return
        if got.shape != want.shape:
            raise AssertionError(f"{what}: shape {got.shape}, want {want.shape}")
        if got.numel():
            error = (got.double() - want).abs().max() / max(
                1.0, want.abs().max().item()
            )
            if not error <= limit:
                raise AssertionError(f"{what}: off by {error.item():.3g}")

    def parameters(self):
        theirs = dict(self.one.named_parameters())
        return [
            (n, p, theirs[n.replace("module.", "")])
            for n, p in self.model.named_parameters()
        ]

    def compare_gradients(self):
        """Also leaves in ``.grad`` what an optimizer has to see."""
        plan = self.plan
        dense, experts = self.mean()
        for name, p, other in self.parameters():
            of_expert = name in self.experts
            grad = whole(p.grad) if p.grad is not None else None
            if not of_expert and plan.wrap in ("none", "replicate") and p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad, group=self.group)
                grad = p.grad
            want = other.grad
            if want is not None:
                want.div_(experts if of_expert else dense)
            if not other.requires_grad and grad is not None:
                raise AssertionError(f"{name} is frozen and has a gradient")
            self.close(grad, want, f"gradient of {name}")

    def train(self, step):
        for m in (self.model, self.one):
            m.zero_grad()
        for micro in range(self.plan.micro):
            self.backward(step * self.plan.micro + micro, micro == self.plan.micro - 1)
        self.compare_gradients()
        if self.plan.style["capacity"] is not None:
            ExpertParallel.check_overflow(self.model)
        with torch.no_grad():
            for _, p, other in self.parameters():
                if p.grad is not None:
                    p -= LR * p.grad
                if other.grad is not None:
                    other -= LR * other.grad
        for name, p, other in self.parameters():
            self.close(whole(p.detach()), other.detach(), f"parameter {name}")
        if self.placement is not None:
            self.placement.step()

    def reload(self, folder):
        """The same model at another degree, from what this one saved."""
        plan = copy.copy(self.plan)
        degrees = [
            n
            for n in range(1, plan.ranks + 1)
            if plan.ranks % n == 0 and plan.experts % n == 0
        ]
        plan.wrap, plan.ep, plan.first = (
            "replicate",
            random.Random(plan.seed).choice(degrees),
            0,
        )
        plan.style = {"combine": plan.style["combine"], "capacity": None}
        plan.placement = None
        plan.copied, plan.tied = False, self.plan.tied
        dcp.save({"model": self.model.state_dict()}, checkpoint_id=folder)
        other = Run(plan, self.rank, plan.seed + 1)
        state = {"model": other.model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        other.model.load_state_dict(state["model"])
        other.one.load_state_dict(self.one.state_dict())
        other.train(0)


def break_it(run, rank):
    """The fault of a plan, in the first forward or a later one."""
    plan, victim = run.plan, rank == run.plan.victim
    if plan.seed % 2:
        run.train(0)
    layer, x = run.model.layers[0], torch.randn(4, D, dtype=torch.float64)
    if plan.fault in ("exception", "interrupt"):
        layer.planted = victim
        run.call(x).sum().backward()
        return
    layer.odd_weights = victim and plan.fault == "dtype"
    ids = torch.zeros(
        4, plan.top_k + (victim and plan.fault == "top_k"), dtype=torch.long
    )
    x.requires_grad_(plan.fault != "input needs no gradient" or not victim)
    layer(x, topk_indices=ids)


def run_part(plan, rank, folder):
    """One draw. Raises what is wrong."""
    if rank not in plan.members:
        for _ in range(plan.models):
            dist.new_group(list(plan.members))  # made by all ranks
        return
    runs = [Run(plan, rank, plan.seed + i) for i in range(plan.models)]
    if plan.fault is None:
        for step in range(STEPS):
            for run in runs:
                run.train(step)
        if plan.wrap in ("none", "replicate"):
            try:
                torch.save(runs[0].model, io.BytesIO())
            except (TypeError, RuntimeError) as error:
                if not re.search(
                    "state_dict", str(error)
                ):  # ours, or of a parametrization
                    raise
            else:
                raise AssertionError("a parallel model was pickled")
        if plan.reload and len(plan.members) == plan.ranks:
            runs[0].reload(folder)
        return
    error, start = None, time.monotonic()
    try:
        break_it(runs[0], rank)
    except BaseException as e:
        error = "; ".join([f"{type(e).__name__}: {e}", *getattr(e, "__notes__", [])])
    wait, wanted = time.monotonic() - start, FAULTS[plan.fault]
    if plan.fault in ("exception", "interrupt") and rank != plan.victim:
        wanted = LOST
    if error is None or not re.search(wanted, error, re.DOTALL):
        raise AssertionError(
            f"{plan.fault} on rank {plan.victim} ended here in {error}"
        )
    if wait > 2 * SHORT_TIMEOUT:
        raise AssertionError(f"the error took {wait:.1f} s")
    if rank == plan.victim and plan.stays:
        # Or the others hear of its closed connections.
        time.sleep(1.5 * SHORT_TIMEOUT)


def run_rank(rank, seed, folder):
    plans = [Plan(seed, part) for part in range(2)]
    problem, at = None, 0
    try:
        for at, plan in enumerate(plans):
            if rank >= plan.ranks:
                return
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(f"{folder}/store{at}", plan.ranks),
                rank=rank,
                world_size=plan.ranks,
                timeout=datetime.timedelta(
                    seconds=TIMEOUT
                ),  # a rank may stay in its fault
            )
            dist.set_timeout(datetime.timedelta(seconds=plan.timeout))
            run_part(plan, rank, f"{folder}/saved{at}")
            if plan.fault is None:
                dist.barrier()
            dist.destroy_process_group()
    except BaseException as e:
        notes = getattr(e, "__notes__", [])
        problem = f"part {at}: " + "; ".join([f"{type(e).__name__}: {e}", *notes])
        traceback.print_exc()
    Path(f"{folder}/rank{rank}.json").write_text(json.dumps({"problem": problem}))
    sys.stdout.flush(), sys.stderr.flush()


# -- what the parent of the ranks does


def run_seed(seed):
    """What happened, in the parent."""
    start, folder = time.monotonic(), tempfile.mkdtemp(prefix="moe_random_")
    run = functools.partial(run_rank, seed=seed, folder=folder)
    wait = functools.partial(wait_for_ranks, seconds=DEADLINE)
    (codes, texts), problems = forked(Plan(seed, 0).ranks, run, wait), []
    for rank, code in enumerate(codes):
        report = Path(f"{folder}/rank{rank}.json")
        said = (
            json.loads(report.read_text())["problem"] if report.exists() else "nothing"
        )
        if code != 0 or said:
            problems.append(f"rank {rank} ended with {code} and said {said}")
    row = {
        "seed": seed,
        "seconds": round(time.monotonic() - start, 2),
        "problems": problems,
    }
    row["what"] = [Plan(seed, part).describe() for part in range(2)]
    if problems:
        row["output"] = texts
    shutil.rmtree(folder)
    return row


class TestRandomCompositions(TestCase):
    def test_who_disagrees_has_one_group(self):
        # Replicas of the experts would not hear of it.
        plans = [Plan(seed, 0) for seed in range(500)]
        plans = [p for p in plans if p.fault not in (None, "exception", "interrupt")]
        self.assertGreater(len(plans), 20)
        self.assertEqual({p.copies for p in plans}, {1})

    def test_seeds(self):
        count = int(os.environ.get("MOE_RANDOM_COMPOSITIONS", "5"))
        check_seeds(self, __file__, count)


if __name__ == "__main__":
    if "--seeds" in sys.argv:
        raise SystemExit(run_seeds(__doc__, run_seed))
    run_tests()
