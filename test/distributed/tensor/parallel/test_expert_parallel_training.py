# Owner(s): ["oncall: distributed"]
"""What trains a model takes one whose experts are DTensors and whose other parameters are not.

TABLE is what docs/source/distributed.expert_parallel.md says; each row of it is tried on two ranks,
against the same steps of one process.
"""

import copy
import functools
import inspect
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ExpertParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.moe_lora import add_lora
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


TESTS = Path(__file__).resolve().parents[3]
sys.path.append(str(TESTS / "distributed"))

from moe_gloo import GlooTest  # noqa: E402


# Optimizer: plain, foreach, fused, all of model.parameters() in one list. Adafactor divides by norms of
# whole parameters, and takes that of the rank's own experts: .item() of a DTensor that is a partial norm.
TABLE = {
    "Adadelta": ("yes", "yes", "-"),
    "Adafactor": ("differs", "differs", "-"),
    "Adagrad": ("yes", "yes", "no"),
    "Adam": ("yes", "yes", "yes"),
    "AdamW": ("yes", "yes", "yes"),
    "Adamax": ("yes", "yes", "-"),
    "ASGD": ("yes", "yes", "-"),
    "LBFGS": ("no", "-", "-"),
    "NAdam": ("yes", "yes", "-"),
    "RAdam": ("yes", "yes", "-"),
    "RMSprop": ("yes", "yes", "-"),
    "Rprop": ("yes", "no", "-"),
    "SGD": ("yes", "yes", "no"),
}
# Do not take all parameters of this model, parallel or not.
OTHERS = {"Muon", "SparseAdam"}


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class TestExpertParallelTraining(GlooTest):
    world_size = 2

    def _model(self, parallel=True):
        torch.manual_seed(0)
        layers = (nn.Linear(8, 8), nn.MoE(8, 6, 4, 2), nn.Linear(8, 8))
        model = nn.Sequential(*layers).double()
        if parallel:
            plan = {"1": ExpertParallel()}
            parallelize_module(model, self.mesh(("ep",), 2), plan)
        return model

    def _loss(self, model, parallel=True):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(6, 8, dtype=torch.float64, generator=generator)
        if parallel:
            x = x.chunk(2)[self.rank]
        return model(x).square().sum()

    def _backward(self, model, parallel=True, scale=1.0):
        model.zero_grad()
        (self._loss(model, parallel) * scale).backward()
        for p in model.parameters() if parallel else ():
            if not isinstance(p, DTensor):
                dist.all_reduce(p.grad)

    def _equal(self, model, other):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            self.assertEqual(full(p), full(q), atol=1e-7, rtol=1e-7)

    def _steps(self, optimizer, model, parallel):
        if isinstance(optimizer, torch.optim.LBFGS):

            def closure():
                self._backward(model, parallel)
                return self._loss(model, parallel).detach()

            optimizer.step(closure)
            return
        for _ in range(2):
            self._backward(model, parallel)
            optimizer.step()

    def _tried(self, optimizer_class, form):
        options = {"lr": 0.01}
        known = inspect.signature(optimizer_class).parameters
        options |= {"momentum": 0.9} if "momentum" in known else {}
        if form != "plain" and form not in known:
            return "-"
        reference = self._model(parallel=False)
        step = optimizer_class(reference.parameters(), **options)
        self._steps(step, reference, False)
        for name in ("foreach", "fused"):
            if name in known:
                options[name] = form == name
        model = self._model()
        try:
            optimizer = optimizer_class(model.parameters(), **options)
            self._steps(optimizer, model, True)
        except (RuntimeError, ValueError, NotImplementedError):
            return "no"
        try:
            self._equal(model, reference)
        except AssertionError:
            return "differs"
        return "yes"

    @parametrize("name", list(TABLE))
    def test_optimizer(self, name):
        optimizer_class = getattr(torch.optim, name)
        forms = ("plain", "foreach", "fused")
        outcomes = tuple(self._tried(optimizer_class, form) for form in forms)
        self.assertEqual(outcomes, TABLE[name])

    def test_every_optimizer_has_its_row(self):
        found = {
            name
            for name, each in vars(torch.optim).items()
            if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
        }
        self.assertEqual(found - {"Optimizer"}, TABLE.keys() | OTHERS)

    def test_the_page_has_the_table(self):
        page = TESTS.parent / "docs/source/distributed.expert_parallel.md"
        if not page.exists():
            self.skipTest("the docs are not beside the tests")
        text = page.read_text()
        for name, row in TABLE.items():
            self.assertIn(f"| `{name}` | " + " | ".join(row) + " |", text)

    @parametrize("form", ("default", "avg_fn", "multi_avg_fn"))
    def test_averaged_model(self, form):
        given = {
            "default": {},
            "avg_fn": {"avg_fn": lambda a, p, _: a.lerp(p, 0.5)},
            "multi_avg_fn": {"multi_avg_fn": get_ema_multi_avg_fn(0.5)},
        }[form]
        models = self._model(), self._model(parallel=False)
        averages = [AveragedModel(model, **given) for model in models]
        for model, average in zip(models, averages, strict=True):
            average.update_parameters(model)  # the first one copies
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2)
            average.update_parameters(model)
        self._equal(*averages)

    def test_clip_grad_norm(self):
        model, reference = self._model(), self._model(parallel=False)
        self._backward(model)
        self._backward(reference, False)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        self.assertEqual(full(norm), wanted)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            self.assertEqual(full(p.grad), q.grad)

    def test_grad_scaler(self):
        def step(optimizer, scaler, model, overflow=False):
            self._backward(model, scale=8.0)
            if overflow and self.rank == 0:
                model[1].w_in.grad.to_local().fill_(torch.inf)
            scaler.scale(torch.zeros(()))  # as scaler.scale(loss) does, makes its state
            scaler.step(optimizer)
            scaler.update()

        model, scaler = self._model(), torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step(optimizer, scaler, model)
        reference = self._model(parallel=False)
        self._backward(reference, False)
        torch.optim.SGD(reference.parameters(), lr=0.01).step()
        self._equal(model, reference)
        before = [full(p).clone() for p in model.parameters()]
        step(optimizer, scaler, model, overflow=True)
        after = [full(p) for p in model.parameters()]
        self.assertEqual(after, before)  # on all ranks
        self.assertEqual(scaler.get_scale(), 4.0)

    def test_distributed_data_parallel(self):
        model = self._model()
        with self.assertRaisesRegex(RuntimeError, "mixed|DTensor"):
            DistributedDataParallel(self._model())
        experts = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, experts
        )
        wrapped = DistributedDataParallel(model)
        self._loss(wrapped).backward()
        reference = self._model(parallel=False)
        self._backward(reference, False)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            # It averages over ranks; gradients of experts are sums.
            wanted = q.grad if isinstance(p, DTensor) else q.grad / 2
            self.assertEqual(full(p.grad), wanted)
        # Of the module that it wraps, it compares names with and without a dot.
        layer = self._model()[1]
        names = [n for n, p in layer.named_parameters() if isinstance(p, DTensor)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            layer, [*names, *(f".{name}" for name in names)]
        )
        self._loss(DistributedDataParallel(layer)).backward()

    def test_fsdp2(self):
        model, reference = self._model(), self._model(parallel=False)
        experts = {p for p in model.parameters() if isinstance(p, DTensor)}
        mesh = self.mesh(("ep",), 2)
        fully_shard(model, mesh=mesh, ignored_params=experts)
        model.set_gradient_divide_factor(1.0)
        step = functools.partial(torch.optim.AdamW, lr=0.01)
        # All of them are DTensors of one mesh now: one list.
        optimizer = step(model.parameters(), foreach=True)
        other = step(reference.parameters())
        for _ in range(2):
            model.zero_grad()
            self._loss(model).backward()
            optimizer.step()
            self._backward(reference, False)
            other.step()
        self._equal(model, reference)

    def test_full_state_dict_of_rank_0(self):
        """Every rank gets its experts, not those of rank 0 (huggingface/transformers#45662)."""
        reference, model = self._model(parallel=False), self._model()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        options = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state = reference.state_dict() if self.rank == 0 else {}
        dcp.set_model_state_dict(model, state, options=options)
        self._equal(model, reference)

    def test_low_rank_adapters_in_fsdp2(self):
        model, reference = self._model(False), self._model(parallel=False)
        for m in (model, reference):
            add_lora(m[1], rank=3)
        with torch.no_grad():
            for ours, theirs in zip(model[1].parameters(), reference[1].parameters()):
                ours.copy_(theirs.normal_())
        for module in (model[1], model):
            fully_shard(module, mesh=self.mesh(("ep",), 2)).set_gradient_divide_factor(
                1.0
            )
        for _ in range(2):
            for m in (model, reference):
                m.zero_grad()
            self._loss(model).backward()
            self._backward(reference, False)
            with torch.no_grad():
                pairs = zip(model[1].parameters(), reference[1].parameters())
                for ours, theirs in pairs:
                    if theirs.requires_grad:
                        self.assertEqual(full(ours.grad), theirs.grad)
                        ours.sub_(ours.grad, alpha=0.1)
                        theirs.sub_(theirs.grad, alpha=0.1)
        self._equal(model[1], reference[1])

    def test_checkpoint_of_model_and_optimizer(self):
        model = self._model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        self._backward(model)
        optimizer.step()
        saved = copy.deepcopy(dcp.get_state_dict(model, optimizer))
        for _ in range(2):
            self._backward(model)
            optimizer.step()
        other = self._model()
        resumed = torch.optim.AdamW(other.parameters(), lr=0.01, foreach=True)
        state, moments = saved
        dcp.set_state_dict(
            other, resumed, model_state_dict=state, optim_state_dict=moments
        )
        for _ in range(2):
            self._backward(other)
            resumed.step()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            self.assertEqual(full(p), full(q), atol=0, rtol=0)


instantiate_parametrized_tests(TestExpertParallelTraining)

if __name__ == "__main__":
    run_tests()
