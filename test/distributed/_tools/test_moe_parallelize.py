# Owner(s): ["oncall: distributed"]
"""parallelize_moe: what is planned is what runs, and trains as one process does."""

import contextlib
import copy
import io
import itertools
import json
import os
import sys
import tempfile
import unittest
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed._tools import moe_machine, moe_train_calibration
from torch.distributed._tools.moe_config import MODELS, MoEConfig
from torch.distributed._tools.moe_layout import Layout
from torch.distributed._tools.moe_machine import device_type
from torch.distributed._tools.moe_memory_model import memory, saved_bytes
from torch.distributed._tools.moe_parallelize import parallelize_moe
from torch.distributed._tools.moe_plan import plan
from torch.distributed._tools.moe_planner import main
from torch.distributed._tools.moe_profile import (
    Constants,
    CpuConstants,
    Device,
    Profile,
)
from torch.distributed._tools.moe_step_memory import explain_memory
from torch.distributed._tools.moe_trace import checkpointed, layers_with
from torch.distributed._tools.moe_traced_model import Traced
from torch.distributed.fsdp import FSDPModule
from torch.distributed.launcher import elastic_launch, LaunchConfig
from torch.distributed.tensor import DTensor
from torch.profiler import profile
from torch.testing._internal.common_moe import has_cpu_kernel
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


sys.path.append(str(Path(__file__).resolve().parents[1]))

from moe_gloo import GlooTest  # noqa: E402


D, H, E, K, V, B, S = 16, 24, 8, 2, 32, 8, 6
CPU = Profile(
    "test CPU", Device("cpu", 1, 5e10, 5e10, 1e10, 1e9, 1e9, 16e9, domain=1 << 20),
    Constants(fast_us=100.0), cpu=CpuConstants(),
)  # fmt: skip
TP_PLAN = {"layers.*.attention.up": "colwise", "layers.*.attention.down": "rowwise"}


class Attention(nn.Module):
    """What tensor parallelism splits; no keys, so that tokens are told apart by position alone."""

    head_dim = 4

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.moe = nn.MoE(D, H, E, K, shared_hidden_dim=8)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.moe(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Tied(Model):
    """Its head has the weight of its embedding, and two names."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight
        self.output = self.head


class GroupedExperts(nn.Module):
    """Called with rows in expert order and counts."""

    def __init__(self):
        super().__init__()
        for name, shape in (("w1", (E, H, D)), ("w2", (E, D, H)), ("w3", (E, H, D))):
            setattr(self, name, nn.Parameter(0.1 * torch.randn(shape)))

    def forward(self, x, num_tokens_per_expert):
        offs = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        return F.grouped_mlp(x, torch.cat([self.w1, self.w3], 1), self.w2, offs)


class GroupedMoE(nn.Module):
    top_k = K

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(D, E, bias=False), GroupedExperts()

    def forward(self, x):
        tokens = x.flatten(0, -2)
        ids, weights = F.moe_topk(self.router(tokens), K)
        row_slots, slot_rows, _, counts = torch._moe_permutation(ids, E)
        rows = self.experts(tokens[row_slots // K], counts)
        return (rows[slot_rows] * weights[..., None]).sum(1).view_as(x)


def make_model():
    torch.manual_seed(0)
    return Model().double()


def one_sequence(model):
    return model(torch.zeros(1, S, dtype=torch.int64))


KW = {"batch": B, "seq": S, "profile": CPU, "loss": one_sequence, "tp_plan": TP_PLAN}


def train(model, micro_batches, ranks=1, steps=3, placement=None):
    """Losses of the batch, and norms of its gradient, of a script as people write it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    generator, seen = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        ids = torch.randint(V, (B, S), generator=generator)
        micros, loss = micro_batches(ids), torch.zeros((), dtype=torch.float64)
        for micro in micros:
            value = model(micro) / len(micros)
            value.backward()
            loss += value.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if placement is not None:
            placement.step()
        if ranks > 1:
            dist.all_reduce(loss)
        seen.append((loss.item() / ranks, norm.item()))
    return seen


def train_under(launcher):
    if launcher != "torchrun":
        del os.environ["TORCHELASTIC_RUN_ID"]
    model, found = parallelize_moe(make_model(), **KW)
    world = found.parallel_dims()["world_size"]
    seen = train(model, found.micro_batches, ranks=world)
    dist.destroy_process_group()
    return world, seen


@instantiate_parametrized_tests
class TestApplied(GlooTest):
    @parametrize(
        "fixed",
        [
            {},
            {"ep": 4},
            {"ep": 2, "recompute": "full", "micro_batch": 1},
            {"ep": 4, "tp": 2},
            {"ep": 2, "replicate": 2},
            {"ep": 1, "tp": 2, "recompute": "full"},
        ],
        name_fn=lambda fixed: "_".join(map(str, fixed.values())) or "planned",
    )
    def test_trains_as_one_process(self, fixed):
        whole = make_model()
        model, found = parallelize_moe(copy.deepcopy(whole), **KW, **fixed)
        x = found.layout
        for name, value in fixed.items():
            self.assertEqual(getattr(x, name), value)
        w_in = model.layers[0].get_parameter("moe.w_in")
        self.assertIsInstance(w_in, DTensor)
        self.assertEqual(w_in.device_mesh["ep"].size(), x.ep)
        shards = 4 // x.replicate  # by ep and FSDP together
        self.assertEqual(w_in.to_local().shape[0] * shards, E)
        self.assertIsInstance(model.layers[1], FSDPModule)
        got = train(model, found.micro_batches, ranks=4)
        self.assertEqual(got, train(whole, lambda ids: (ids,)))
        for name, want in whole.named_parameters():
            value = dict(model.named_parameters())[name]
            self.assertEqual(value.full_tensor(), want, msg=name)

    def test_experts_that_get_replicas_move(self):
        whole = make_model()
        load = [40.0] + [1.0] * (E - 1)
        kw = {**KW, "load": load, "ep": 4}
        model, found = parallelize_moe(copy.deepcopy(whole), **kw)
        placement = found.placement
        self.assertEqual(placement.slots_per_rank * 4, E + found.replicas)
        self.assertEqual(len(placement.layers), len(model.layers))
        home = placement.slot_experts
        placement.every = 1
        got = train(model, found.micro_batches, ranks=4, placement=placement)
        self.assertNotEqual(placement.slot_experts, home)
        self.assertEqual(got, train(whole, lambda ids: (ids,)))
        # Nothing to step where all experts are on every rank.
        _, found = parallelize_moe(make_model(), **{**kw, "ep": 1}, dry_run=True)
        self.assertIsNone(found.placement)

    def test_experts_that_are_called_with_rows_and_counts(self):
        whole = make_model()
        for layer in whole.layers:
            layer.moe = GroupedMoE().double()
        with self.assertRaisesRegex(ValueError, "tp=2 cannot be applied: .*counts"):
            parallelize_moe(whole, **KW, tp=2)
        model, found = parallelize_moe(copy.deepcopy(whole), **KW, ep=2)
        self.assertEqual({x.tp for _, x in found.best}, {1})
        got = train(model, found.micro_batches, ranks=4)
        self.assertEqual(got, train(whole, lambda ids: (ids,)))

    def test_the_device_of_a_plain_process_group(self):
        # As init_process_group() makes it on a machine with a GPU.
        config, gpu = "cpu:gloo,cuda:nccl", torch.device("cuda")
        self.assertEqual(device_type(), "cpu")
        with (
            mock.patch.object(c10d, "get_backend_config", return_value=config),
            mock.patch.object(torch.accelerator, "current_accelerator", return_value=gpu),
        ):  # fmt: skip
            self.assertEqual(device_type(), "cuda")

    def test_training_is_measured(self):
        small = {
            "SIZES": ((32, 8), (64, 16)),
            "SUMMED": ((32, 8), (64, 16)),
            "ROUNDS": 2,
        }
        with mock.patch.multiple(moe_train_calibration, **small):
            alone = moe_train_calibration.measure_training(CPU)
            found = moe_train_calibration.measure_training(CPU, dist.group.WORLD)
        names = ("op_us", "recompute_us", "shard_us", "shard", "tp_us", "reduce")
        changed = {n for n in names if getattr(alone.cpu, n) != getattr(CPU.cpu, n)}
        self.assertEqual(changed, {"op_us", "recompute_us"})
        for name in names:
            # The difference of two times can be zero on a busy machine.
            self.assertGreaterEqual(getattr(found.cpu, name), 0)
        self.assertGreater(found.cpu.op_us, 0)
        everywhere = [None] * 4
        dist.all_gather_object(everywhere, found.to_json())
        self.assertEqual([*map(str, everywhere)], [str(everywhere[0])] * 4)

    def test_the_accelerator_is_selected_before_it_is_measured(self):
        order = []
        with (
            mock.patch.object(moe_machine, "init_device_mesh", lambda *a: order.append(a)),
            mock.patch.object(torch.cuda, "get_device_name", lambda: order.append("name") or "H100"),
            mock.patch.object(moe_machine, "calibrate", lambda **kw: order.append("measure") or CPU),
        ):  # fmt: skip
            moe_machine.machine_profile("cuda", cache=False)
        self.assertEqual(order, [("cuda", (4,)), "name", "measure"])

    def test_dry_run_changes_nothing(self):
        model = make_model()
        before = [(n, type(m), id(m)) for n, m in model.named_modules()]
        parameters = [id(p) for p in model.parameters()]
        same, found = parallelize_moe(model, **KW, dry_run=True)
        self.assertIs(same, model)
        self.assertEqual(
            [(n, type(m), id(m)) for n, m in model.named_modules()], before
        )
        self.assertEqual([id(p) for p in model.parameters()], parameters)
        self.assertEqual(
            train(model, lambda ids: (ids,)), train(make_model(), lambda ids: (ids,))
        )
        explained = found.explain()
        for choice in ("ep", "tp", "micro_batch", "recompute"):
            self.assertRegex(explained, rf"(?m)^  {choice} .*\n.*because: ")
        self.assertIn("next: ", explained)
        self.assertEqual(found.parallel_dims()["world_size"], 4)

    @parametrize(
        "fixed,message",
        [
            ({"pp": 2}, r"parallelize_moe: pp=2 cannot be applied.*nearest that can: pp=1 with ep="),
            ({"cp": 2}, r"cp=2 cannot be applied.*cp=1"),
            ({"ep": 3}, r"plan: ep must divide the experts, 8, got 3; nearest that works: ep="),
            ({"batch": 6, "micro_batch": 4}, r"batch must be a multiple.*nearest that works"),
            ({"fsdp": False}, r"fsdp=False cannot be applied.*fsdp=True with"),
            ({"recompute": "selective"}, r"recompute=selective .*recompute=none or recompute=full"),
            ({"graphs": 2}, r"graphs=2 cannot be applied.*graphs=0"),
            ({"virtual": 2}, r"virtual=2 cannot be applied.*virtual=1"),
            ({"algorithm": "flat"}, r"algorithm=flat cannot be applied.*=hierarchical"),
            ({"node_limit": 4}, r"node_limit=4 cannot be applied.*node_limit=0"),
            ({"dtype": "fp16"}, r"dtype=fp16 cannot be applied.*dtype=fp32 or dtype=bf16 with"),
            ({"dtypes": ("bf16", "fp8")}, r"dtypes=fp8 cannot be applied.*dtypes=bf16 with"),
            ({"dtypes": "fp32"}, r"parallelize_moe: dtypes must be a sequence .*got 'fp32'"),
            ({"dtypes": ()}, r"parallelize_moe: dtypes must be a sequence .*got \(\)"),
            ({"pp": 2, "cp": 2, "graphs": 1}, r"pp=2 cannot be applied.*pp=1"),
            ({"tp": 4}, r"tp must divide the tokens of a sequence, 6, got 4; .*works: tp=2"),
            ({"replicate": 3}, r"replicate must divide the 4 GPUs, got 3; .*works: replicate=2"),
            ({"replicate": 2, "ep": 4}, r"no layout divides gpus=4"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_applied(self, fixed, message):
        with self.assertRaisesRegex(ValueError, message) as caught:
            parallelize_moe(make_model(), **{**KW, **fixed})
        self.assertNotIn("\n", str(caught.exception))

    def test_choices_are_those_of_a_layout(self):
        with self.assertRaisesRegex(ValueError, "fixed must be of .*, got gpus") as e:
            parallelize_moe(make_model(), **KW, gpus=2)
        names = str(e.exception).split(" of ")[1].split(", got")[0].split(", ")
        self.assertEqual({*names, "gpus"}, {f.name for f in fields(Layout)})

    def test_ranks_of_tp_share_out_a_sequence(self):
        def one(model):
            return model(torch.zeros(1, 5, dtype=torch.int64))

        kw = {**KW, "seq": 5, "loss": one, "dry_run": True}
        _, found = parallelize_moe(make_model(), **kw)
        self.assertEqual({x.tp for _, x in found.best}, {1})

    def test_a_model_without_a_tp_plan(self):
        message = (
            "tp=2 cannot be applied: the model has no tp_plan.*nearest that can: tp=1"
        )
        with self.assertRaisesRegex(ValueError, message):
            parallelize_moe(make_model(), **{**KW, "tp_plan": {}}, tp=2)

    def test_a_model_that_is_called_otherwise(self):
        kw = {**KW, "loss": None}
        with self.assertRaisesRegex(ValueError, "loss must be given.*got Model"):
            parallelize_moe(make_model(), **kw)

    @parametrize("dry_run", (False, True))
    def test_a_model_that_is_parallel_already(self, dry_run):
        model, _ = parallelize_moe(make_model(), **KW)
        with self.assertRaisesRegex(
            ValueError, "not be parallel yet, got a DTensor as"
        ):
            parallelize_moe(model, **KW, dry_run=dry_run)

    def test_no_experts(self):
        with self.assertRaisesRegex(ValueError, "model must have experts"):
            parallelize_moe(nn.Linear(4, 4), batch=8, profile=CPU)

    def test_uneven_shards_are_planned(self):
        # 12 experts of a rank over 8 ranks: some have 2, as FSDP shards whole experts.
        model, even = MODELS["kimi-k2"], Layout(gpus=128, ep=32, fsdp=True)
        uneven = replace(even, gpus=256)
        least, most = (memory(model, x).weights for x in (uneven, even))
        self.assertGreater(least, most / 2 * 4 / 3)
        self.assertLess(least, most)

    def test_slow_links_and_small_memory_change_the_plan(self):
        kw = {**KW, "dry_run": True}
        _, fast = parallelize_moe(make_model(), **kw)
        slow = replace(CPU, device=replace(CPU.device, fast=1e5))
        _, kept = parallelize_moe(make_model(), **{**kw, "profile": slow})
        # Exchanged tokens are fewer bytes than all weights.
        self.assertEqual((fast.layout.ep, fast.layout.tp), (1, 1))
        self.assertEqual(kept.layout.ep, 4)
        need = fast.memory.total
        tight = replace(CPU, device=replace(CPU.device, memory=0.9 * need))
        _, small = parallelize_moe(make_model(), **{**kw, "profile": tight})
        self.assertLess(small.memory.total, need)


@instantiate_parametrized_tests
class TestPlanned(TestCase):
    @parametrize("launcher", ["torchrun", "another"])
    def test_a_launcher_makes_the_ranks(self, launcher):
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
        )  # fmt: skip
        seen = elastic_launch(config, train_under)(launcher)
        whole = train(make_model(), lambda ids: (ids,))
        self.assertEqual(seen, dict.fromkeys(range(2), (2, whole)))

    @parametrize("device", ["cpu", "meta"])
    def test_a_trace_leaves_a_tied_weight_alone(self, device):
        with torch.device(device):
            model = Tied()
        weight = model.embedding.weight
        parallelize_moe(model, **KW, dry_run=True)
        for module in (model.embedding, model.head, model.output):
            self.assertIs(module.weight, weight)
        for name, parameter in model.named_parameters():
            self.assertIsNone(parameter.grad, msg=name)

    def test_a_failed_trace_leaves_no_hook(self):
        def fails(model):
            one_sequence(model)
            raise RuntimeError("after the forward")

        model = make_model()
        with self.assertRaisesRegex(RuntimeError, "after the forward"):
            parallelize_moe(model, **{**KW, "loss": fails}, dry_run=True)
        for name, module in model.named_modules():
            self.assertEqual(len(module._forward_hooks), 0, msg=name)

    def test_fixed_costs_are_in_a_step(self):
        config, whole = MoEConfig.from_module(make_model()), {"none": (0.0, 0.0)}
        traced = Traced(1e-3, 5e-4, 4e-4, {**whole, "full": (0.0, 0.0)}, (100, 40), 6)
        none = dict.fromkeys(("op_us", "recompute_us", "shard_us", "tp_us"), 0.0)

        def seconds(constants, **kw):
            layout = {"gpus": 4, "fsdp": True, "dtype": "fp32", "recompute": "none"}
            p = replace(CPU, cpu=replace(CPU.cpu, **{**none, **constants}))
            x, kw = Layout(**{**layout, **kw}), {"global_batch": 16, "seq": S}
            return traced.step(p, config, x, **kw).seconds

        # Once a micro-batch, of which a rank has four or two; the layers are two, and each has experts.
        for new, kw, want in (
            ({"op_us": 1.0}, {}, 4 * 100), ({"op_us": 1.0}, {"micro_batch": 2}, 2 * 100),
            ({"recompute_us": 1.0}, {}, 0), ({"recompute_us": 1.0}, {"recompute": "full"}, 4 * 40),
            ({"shard_us": 1.0}, {}, 4 * 3 * 5), ({"tp_us": 1.0}, {}, 0),
            ({"tp_us": 1.0}, {"tp": 2}, 8 * 6),
            ({"tp_us": 1.0}, {"tp": 2, "recompute": "full"}, 8 * 6 * 1.5),
        ):  # fmt: skip
            with self.subTest(new=new, **kw):
                cost = seconds(new, **kw) - seconds({}, **kw)
                self.assertEqual(cost, 1e-6 * want, atol=1e-9, rtol=1e-6)

    def test_nothing_fits_by_what_was_traced(self):
        # A TB of activations a sequence, on however many ranks.
        peaks = {"none": (2e12, 2e12), "full": (1e12, 1e12)}
        kw = {"global_batch": B, "seq": S, "dtypes": ("fp32",), "fsdp": True, "pp": 1}
        traced = Traced(1e-3, 0.0, 1e-3, peaks)
        config = MoEConfig.from_module(make_model())
        message = "16 GB; .* recompute=full, needs 1,000 GB .* activations$"
        with self.assertRaisesRegex(ValueError, message):
            plan(config, CPU, 4, traced=traced, kernel="moe_mlp", **kw)


class Decoder(Model):
    """With attention, and wide enough that scratch memory of kernels is small beside it."""

    def __init__(self, width=64, experts=8, vocabulary=512, layers=2):
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = Layer()
            layer.attention = nn.TransformerEncoderLayer(
                width, 4, width, 0.0, batch_first=True, bias=False
            )
            layer.moe = nn.MoE(width, 2 * width, experts, K)
            self.layers.append(layer)


EXPLAINED = {
    "experts": (dict(width=128, experts=16), torch.float32),
    "vocabulary": (dict(vocabulary=4096), torch.float32),
    "bfloat16": (dict(width=128, layers=4), torch.bfloat16),
}


def peak_of_a_step(model, ids, recompute):
    """Bytes that are allocated at once in the second step, with what is there before it."""
    update = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        with contextlib.ExitStack() as stack:
            if recompute == "full":
                experts = [n for n, m in model.named_modules() if type(m) is nn.MoE]
                stack.enter_context(checkpointed(model, layers_with(model, experts)))
            model(ids).backward()
        update.step()
        update.zero_grad()

    step()
    with profile(profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    sizes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    state = (t for values in update.state.values() for t in values.values())
    held = sum(t.nbytes for t in (*model.parameters(), *state))
    return held + max(itertools.accumulate((n for _, n in sizes), initial=0))


@instantiate_parametrized_tests
class TestExplained(TestCase):
    @unittest.skipUnless(
        has_cpu_kernel(),
        "memory is explained for the kernels of F.moe_mlp; the composite allocates more",
    )
    @parametrize("recompute", ("none", "full"))
    @parametrize("name", tuple(EXPLAINED))
    def test_measured_peak(self, name, recompute):
        sizes, dtype = EXPLAINED[name]
        model, ids = Decoder(**sizes).to(dtype), torch.zeros(4, 128, dtype=torch.int64)
        kw = {"batch": 4, "seq": 128, "recompute": recompute}
        found = explain_memory(model, lambda model: model(torch.zeros_like(ids)), **kw)
        measured = peak_of_a_step(model, ids, recompute)
        self.assertEqual(found.total / measured, 1.0, rtol=0, atol=0.05)
        self.assertTrue(all(n > 0 for n in found.peak.values()))

    def test_layers_and_kinds(self):
        model, tokens = Decoder(layers=3), 4 * 128
        found = explain_memory(
            model, lambda m: m(torch.zeros(4, 128, dtype=torch.int64))
        )
        for i in range(3):
            layer = f"layers.{i}"
            weights = sum(p.nbytes for p in model.layers[i].parameters())
            count = len([*model.layers[i].parameters()])
            self.assertEqual(found.peak[layer, "weights"], weights)
            # Two moments, and how many steps there were.
            self.assertEqual(found.peak[layer, "optimizer"], 2 * weights + 4 * count)
            # The input is another's, of which there are tokens * width elements.
            sizes = (tokens, K * tokens, 64, 128)
            kept = saved_bytes(*sizes, k=K, num_experts=8, itemsize=4)
            kept -= 4 * tokens * 64 + 4 * tokens * K  # the router's weights are its own
            self.assertEqual(found.kept[layer, "experts"], kept)
            self.assertGreater(found.kept[layer, "attention"], 4 * 4 * tokens * 64)
            self.assertIn((layer, "router"), found.kept)
        self.assertEqual(found.peak["", "weights"], 2 * 512 * 64 * 4)
        self.assertGreaterEqual(found.kept["", "loss"], 4 * tokens * 512)
        text = found.explain()
        self.assertIn(f"in {found.where[0]} of", text)
        self.assertIn("layers.0 ... layers.1, each", text)

    def test_layers_of_a_dict(self):
        def peak(container):
            model = Decoder(layers=4)
            model.position = nn.Parameter(torch.zeros(1, 1, 64))
            if container is nn.ModuleDict:
                model.layers = Layers({str(i): m for i, m in enumerate(model.layers)})
            return explain_memory(model, one_sequence, recompute="full").total

        class Layers(nn.ModuleDict):
            def __iter__(self):
                return iter(self.values())

        self.assertEqual(peak(nn.ModuleDict), peak(nn.ModuleList))

    def test_the_model_is_left_alone(self):
        model = Tied()
        before = copy.deepcopy(model.state_dict())
        explain_memory(model, one_sequence, recompute="full")
        self.assertEqual(model.state_dict(), before)
        self.assertIs(model.head.weight, model.embedding.weight)
        for name, module in model.named_modules():
            self.assertEqual(len(module._forward_hooks), 0, msg=name)
            self.assertNotIn("forward", vars(module))
        self.assertTrue(all(p.grad is None for p in model.parameters()))
        with self.assertRaisesRegex(ValueError, "stacked weights.*in Linear"):
            explain_memory(nn.Linear(2, 2))
        with self.assertRaisesRegex(ValueError, "batch must be an integer from 1 to"):
            explain_memory(nn.MoE(8, 8, 4, 2), batch=0)
        for loss, options, error in (
            (one_sequence, {"recompute": "Full"}, "recompute must be 'none' or 'full', got 'Full'"),
            (lambda m: m.embedding.weight, {}, "loss must be one number, got shape"),
            (one_sequence, {"optimizer": torch.optim.Adafactor}, "optimizer must not read .*Adafactor"),
        ):  # fmt: skip
            with self.assertRaisesRegex(ValueError, error):
                explain_memory(model, loss, **options)
        with self.assertRaisesRegex(ValueError, "must have a parameter that requires"):
            explain_memory(nn.MoE(8, 8, 4, 2).requires_grad_(False))

    def test_command(self):
        source = """
import torch, types
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 16)
        self.layers = torch.nn.ModuleList([torch.nn.MoE(16, 8, 4, 2)])
    def forward(self, input_ids, labels):
        x = self.layers[0](self.embedding(input_ids)) @ self.embedding.weight.T
        loss = torch.nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())
        return types.SimpleNamespace(loss=loss)
"""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.py")
            path.write_text(source)

            def run(*words):
                out, err = io.StringIO(), io.StringIO()
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                    code = main(words)
                return code, out.getvalue(), err.getvalue()

            words = (f"{path}:Model", "--explain-memory", "--batch", "2", "--seq", "8")
            code, out, err = run(*words)
            self.assertEqual((code, err), (0, ""))
            self.assertIn("a training step with AdamW, 2 x 8 tokens", out)
            self.assertRegex(out, r"layers\.0 +\d")
            code, out, _ = run(*words, "--json", "-")
            data = json.loads(out)
            self.assertEqual(sum(n for *_, n in data["peak"]), data["total"])
            for words, message in (
                ((f"{path}:Missing",), "has no function 'Missing'"),
                (("qwen3-30b-a3b",), "must be FILE.py:FUNCTION"),
                (
                    (f"{path}:Model", "--gpus", "8"),
                    "--gpus has no meaning for --explain",
                ),
                ((f"{path}:Model", "--recompute", "selective"), "must be none or full"),
            ):
                code, _, err = run(*words, "--explain-memory")
                self.assertEqual(code, 2)
                self.assertIn(message, err)


if __name__ == "__main__":
    run_tests()
