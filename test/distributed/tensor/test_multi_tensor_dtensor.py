# Owner(s): ["oncall: distributed"]
"""Lists with DTensors of several meshes and plain tensors go through the multi-tensor paths."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


OPTIMIZERS = {
    "Adadelta": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {}, "Adamax": {},
    "ASGD": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.9},
    "SGD": {"momentum": 0.9, "nesterov": True},
}  # fmt: skip
# No other op of torch._fused_* takes DTensors.
FORMS = [(n, "foreach") for n in OPTIMIZERS] + [("Adam", "fused"), ("AdamW", "fused")]


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class TestMultiTensorDTensor(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def _model(self, parallel):
        """Plain parameters before, between and after those of two meshes, with gradients."""
        torch.manual_seed(0)
        model = nn.ParameterList(
            torch.randn(4, 3, dtype=torch.float64) for _ in "abcdef"
        )
        model.append(torch.randn(4, 3))  # alone in its dtype
        model[6].grad = torch.randn(4, 3)
        meshes = (
            None,
            *(init_device_mesh("cpu", (2,), mesh_dim_names=n) for n in "ab"),
        )
        for i, mesh in enumerate((*meshes, *meshes)):
            grad = torch.randn(4, 3, dtype=torch.float64)
            if mesh is not None and parallel:
                model[i] = nn.Parameter(
                    distribute_tensor(model[i].data, mesh, [Shard(0)])
                )
                grad = distribute_tensor(grad, mesh, [Shard(0)])
            model[i].grad = grad
        return model

    def _equal(self, model, wanted, of=lambda p: p):
        for p, q in zip(model.parameters(), wanted.parameters(), strict=True):
            self.assertEqual(full(of(p)), of(q))

    def test_groups(self):
        model, plain = self._model(True), self._model(False)
        parameters = list(model)
        groups = _group_tensors_by_device_and_dtype([parameters, []], with_indices=True)
        found = sorted(indices for _, indices in groups.values())
        self.assertEqual(found, [[0, 3], [1, 4], [2, 5], [6]])
        for (tensors, nothing), indices in groups.values():
            self.assertEqual(
                [id(t) for t in tensors], [id(parameters[i]) for i in indices]
            )
            self.assertEqual(nothing, [])
        # Where nothing has to be told apart, the keys are what they were.
        cpu = torch.device("cpu")
        keys = {(cpu, torch.float64), (cpu, torch.float32)}
        self.assertEqual(_group_tensors_by_device_and_dtype([list(plain)]).keys(), keys)
        alone = _group_tensors_by_device_and_dtype([[model[1], model[4]]])
        self.assertEqual([*alone], [(cpu, torch.float64)])

    @parametrize("name,form", FORMS)
    def test_optimizer(self, name, form):
        model, wanted = self._model(True), self._model(False)
        for each in (model, wanted):
            options = OPTIMIZERS[name] | {form: True}
            optimizer = getattr(torch.optim, name)(each.parameters(), lr=0.1, **options)
            for _ in range(2):
                optimizer.step()
        self._equal(model, wanted)

    @parametrize("form", ("foreach", "fused"))
    def test_zero_grad(self, form):
        model, wanted = self._model(True), self._model(False)
        optimizer = torch.optim.AdamW(model.parameters(), **{form: True})
        optimizer.zero_grad(set_to_none=False)
        for p in wanted.parameters():
            p.grad.zero_()
        self._equal(model, wanted, lambda p: p.grad)

    @parametrize("norm_type", (1.0, 2.0, float("inf")))
    def test_clip_grad_norm(self, norm_type):
        model, wanted = self._model(True), self._model(False)
        norms = [
            nn.utils.clip_grad_norm_(m.parameters(), 0.5, norm_type)
            for m in (model, wanted)
        ]
        self.assertEqual(*norms)
        self._equal(model, wanted, lambda p: p.grad)

    def test_clip_grad_value(self):
        model, wanted = self._model(True), self._model(False)
        for each in (model, wanted):
            nn.utils.clip_grad_value_(each.parameters(), 0.5)
        self._equal(model, wanted, lambda p: p.grad)

    def test_averaged_model(self):
        model, wanted = self._model(True), self._model(False)
        averages = []
        for each in (model, wanted):
            average = AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.5))
            for _ in range(2):
                average.update_parameters(each)
                with torch.no_grad():
                    for p in each.parameters():
                        p.mul_(2)
            average.update_parameters(each)
            averages.append(average)
        self._equal(*averages)

    @parametrize("fused", (False, True))
    @parametrize("overflow", (None, 0, 1))
    def test_grad_scaler(self, fused, overflow):
        """``overflow``: the parameter that has an infinity, on one rank."""
        model, wanted = self._model(True), self._model(False)
        start = self._model(False)
        for each in (model, wanted):
            options = {"fused": True} if fused else {"foreach": True}
            optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, **options)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(torch.zeros(()))
            if overflow is not None:
                grad = each[overflow].grad
                if isinstance(grad, DTensor):
                    if self.rank == 1:
                        grad.to_local()[0] = torch.inf
                else:
                    grad[2] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            self.assertEqual(scaler.get_scale(), 8.0 if overflow is None else 4.0)
        self._equal(model, wanted)
        if overflow is not None:
            self._equal(model, start)


instantiate_parametrized_tests(TestMultiTensorDTensor)

if __name__ == "__main__":
    run_tests()
