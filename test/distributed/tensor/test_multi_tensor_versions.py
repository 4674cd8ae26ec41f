# Owner(s): ["oncall: distributed"]
"""Multi-tensor operators increase the versions of the DTensors that they write to."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


@instantiate_parametrized_tests
class TestMultiTensorVersions(TestCase):
    def setUp(self):
        super().setUp()
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        self.mesh = init_device_mesh("cpu", (1,))

    def tearDown(self):
        dist.destroy_process_group()
        super().tearDown()

    def _dtensor(self):
        return distribute_tensor(torch.randn(2, 3), self.mesh, [Shard(0)])

    def _parameters(self):
        parameters = nn.ParameterList(self._dtensor() for _ in range(2))
        for p in parameters:
            p.grad = self._dtensor()
        return parameters

    @parametrize("form", ("foreach", "fused"))
    def test_optimizer(self, form):
        parameters = self._parameters()
        optimizer = torch.optim.AdamW(parameters, **{form: True})
        for _ in range(2):
            versions = [p._version for p in parameters]
            read = [p.grad._version for p in parameters]
            optimizer.step()
            for p, version, of_grad in zip(parameters, versions, read, strict=True):
                self.assertGreater(p._version, version)
                if form == "foreach":
                    self.assertEqual(p.grad._version, of_grad)

    def test_averaged_model(self):
        model = self._parameters()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        average.update_parameters(model)
        versions = [p._version for p in average.module]
        average.update_parameters(model)
        self.assertEqual(
            [p._version for p in average.module], [v + 1 for v in versions]
        )

    def test_saved_for_backward(self):
        values, weights = ([self._dtensor() for _ in range(2)] for _ in range(2))
        x = self._dtensor().requires_grad_()
        y = x * values[0]
        torch._foreach_mul_(values, weights)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            y.sum().backward()

    def test_what_is_only_read(self):
        values, others = ([self._dtensor() for _ in range(2)] for _ in range(2))
        torch._foreach_add(values, others)
        torch._foreach_add_(values, others)
        self.assertEqual([t._version for t in others], [0, 0])
        self.assertEqual([t._version for t in values], [1, 1])

    def test_inference_tensors(self):
        with torch.inference_mode():
            values = [self._dtensor() for _ in range(2)]
            torch._foreach_zero_(values)
        self.assertEqual(values[0].full_tensor(), torch.zeros(2, 3))

    def test_compiled(self):
        parameters = self._parameters()
        optimizer = torch.optim.AdamW(parameters, foreach=True)
        step = torch.compile(optimizer.step, backend="aot_eager")
        step()
        self.assertTrue(all(p._version for p in parameters))


if __name__ == "__main__":
    run_tests()
