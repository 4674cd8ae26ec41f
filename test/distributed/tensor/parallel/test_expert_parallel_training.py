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
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


TESTS = Path(__file__).resolve().parents[3]
sys.path.append(str(TESTS / "distributed"))

from moe_gloo import GlooTest  # noqa: E402


# Optimizer: plain, foreach, fused. "groups" works with `groups_of` only. Adafactor divides by norms of
# whole parameters, and takes that of the rank's own experts: .item() of a DTensor that is a partial norm.
TABLE = {
    "Adadelta": ("yes", "groups", "-"),
    "Adafactor": ("differs", "differs", "-"),
    "Adagrad": ("yes", "groups", "no"),
    "Adam": ("yes", "groups", "groups"),
    "AdamW": ("yes", "groups", "groups"),
    "Adamax": ("yes", "groups", "-"),
    "ASGD": ("yes", "groups", "-"),
    "LBFGS": ("no", "-", "-"),
    "NAdam": ("yes", "groups", "-"),
    "RAdam": ("yes", "groups", "-"),
    "RMSprop": ("yes", "groups", "-"),
    "Rprop": ("yes", "no", "-"),
    "SGD": ("yes", "groups", "no"),
}
# Take no model with experts in 3-D weights, or with dense gradients, parallel or not.
OTHERS = {"Muon", "SparseAdam"}


def groups_of(model):
    """The two lines of the page."""
    experts = [p for p in model.parameters() if isinstance(p, DTensor)]
    others = [p for p in model.parameters() if not isinstance(p, DTensor)]
    return [{"params": others}, {"params": experts}]


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
        for outcome, arrange in (("yes", nn.Module.parameters), ("groups", groups_of)):
            model = self._model()
            try:
                optimizer = optimizer_class(arrange(model), **options)
                self._steps(optimizer, model, True)
            except (RuntimeError, ValueError, NotImplementedError):
                continue
            try:
                self._equal(model, reference)
            except AssertionError:
                return "differs"
            return outcome
        return "no"

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

    def test_averaged_model(self):
        for how, mixed in (("default", False), ("multi", True)):
            given = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)} if mixed else {}
            model, reference = self._model(), self._model(parallel=False)
            average = AveragedModel(model, **given)
            wanted = AveragedModel(reference, **given)
            for optimized, averaged in ((model, average), (reference, wanted)):
                averaged.update_parameters(optimized)  # the first one copies
                with torch.no_grad():
                    for p in optimized.parameters():
                        p.mul_(2)
            wanted.update_parameters(reference)
            if mixed:
                with self.assertRaisesRegex(
                    RuntimeError, "mixed torch.Tensor and DTensor"
                ):
                    average.update_parameters(model)
                continue
            average.update_parameters(model)
            self._equal(average, wanted)
        # What the page gives in place of multi_avg_fn.
        average = AveragedModel(model, avg_fn=lambda a, p, _: a.lerp(p, 0.5))
        average.update_parameters(model)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        average.update_parameters(model)
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            self.assertEqual(full(a), 0.75 * full(p))

    def test_clip_grad_norm(self):
        model, reference = self._model(), self._model(parallel=False)
        self._backward(model)
        self._backward(reference, False)
        norm = ExpertParallel.clip_grad_norm_(model.parameters(), 0.5)
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        self.assertEqual(full(norm), wanted)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            self.assertEqual(full(p.grad), q.grad)

    def test_grad_scaler(self):
        def step(optimizers, scaler, model, overflow=False):
            self._backward(model, scale=8.0)
            if overflow and self.rank == 0:
                model[1].w_in.grad.to_local().fill_(torch.inf)
            scaler.scale(torch.zeros(()))  # as scaler.scale(loss) does, makes its state
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()

        sgd = functools.partial(torch.optim.SGD, lr=0.01, foreach=False)
        model, scaler = self._model(), torch.amp.GradScaler("cpu", init_scale=8.0)
        with self.assertRaisesRegex(RuntimeError, "mixed torch.Tensor and DTensor"):
            step([sgd(groups_of(model))], scaler, model)  # one list for each device

        # What the page gives: an optimizer for each.
        model, scaler = self._model(), torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizers = [sgd([group]) for group in groups_of(model)]
        step(optimizers, scaler, model)
        reference = self._model(parallel=False)
        self._backward(reference, False)
        sgd(reference.parameters()).step()
        self._equal(model, reference)
        before = full(model[1].w_in).clone()
        step(optimizers, scaler, model, overflow=True)
        self.assertEqual(full(model[1].w_in), before)  # on all ranks
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

    def test_checkpoint_of_model_and_optimizer(self):
        model = self._model()
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01, foreach=True)
        self._backward(model)
        optimizer.step()
        saved = copy.deepcopy(dcp.get_state_dict(model, optimizer))
        for _ in range(2):
            self._backward(model)
            optimizer.step()
        other = self._model()
        resumed = torch.optim.AdamW(groups_of(other), lr=0.01, foreach=True)
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
