# Owner(s): ["module: nn"]
"""Load reports and the search for numbers that are not finite."""

import math
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.moe_report import find_nonfinite, load_report
from torch.testing._internal.common_moe import read_page, run_code_blocks
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


class TestLoadReport(TestCase):
    @parametrize("dtype", (torch.int32, torch.int64, torch.float32, torch.float64))
    def test_numbers(self, dtype):
        counts = torch.randint(0, 9, (4, 6))
        counts[1] = 0
        counts[2] = torch.tensor([0, 0, 7, 0, 0, 0])
        counts[3] = 5
        overflow = torch.tensor([1, 0, 7, 3])
        report = load_report(counts.to(dtype), overflow=overflow.to(dtype))
        for i, row in enumerate(counts.tolist()):
            total = sum(row)
            shares = [c / total if total else 0.0 for c in row]
            self.assertEqual(report.load[i].tolist(), shares)
            entropy = -sum(s * math.log(s) for s in shares if s) / math.log(6)
            self.assertEqual(report.entropy[i].item(), entropy)
            self.assertEqual(report.heaviest[i].item(), max(shares) * 6)
            self.assertEqual(report.dead[i].item(), row.count(0) if total else 0)
            spilled = overflow[i].item() / total if total else 0.0
            self.assertEqual(report.overflow[i].item(), spilled)
        self.assertEqual(report.entropy[2:].tolist(), [0.0, 1.0])

    def test_text_and_scalars(self):
        counts = torch.tensor([[1, 3], [4, 0]])
        report = load_report(
            counts, names=("a", "layers.1"), overflow=torch.tensor([0, 1])
        )
        head, first, second = str(report).split("\n")
        self.assertEqual(len({len(line.split("%")[0]) for line in (first, second)}), 1)
        self.assertIn("1: 75.0 %, 0: 25.0 %", first)
        self.assertRegex(second, r"layers\.1 +0\.000 +2\.00 +1 +25\.00 % +0: 100\.0 %")
        scalars = report.scalars("routing", experts=True)
        self.assertEqual(len(scalars), 2 * 4 + 2 * 2)
        self.assertTrue(all(type(v) is float for v in scalars.values()))
        self.assertEqual(scalars["routing/layers.1/heaviest"], 2.0)
        self.assertEqual(scalars["routing/a/load/1"], 0.75)
        self.assertEqual(
            str(load_report(torch.zeros(0, 3))), head.replace("   ", "", 1)
        )

    def test_one_expert(self):
        report = load_report(torch.tensor([[3]]))
        self.assertEqual(report.entropy.tolist(), [0.0])
        self.assertEqual(report.heaviest.tolist(), [1.0])

    def test_errors(self):
        counts = torch.ones(2, 3)
        for bad in (counts[0], counts[None], torch.ones(2, 0)):
            with self.assertRaisesRegex(ValueError, r"counts must have shape \(L, E\)"):
                load_report(bad)
        with self.assertRaisesRegex(ValueError, r"overflow must have shape .* \(2,\)"):
            load_report(counts, overflow=torch.ones(3))
        with self.assertRaisesRegex(ValueError, "names must be of the 2 layers, got 1"):
            load_report(counts, names=["a"])
        with self.assertRaisesRegex(
            ValueError, r"names must be different, got \['a', 'a'\]"
        ):
            load_report(counts, names=["a", "a"])
        for value in (-1.0, math.nan, math.inf):
            with self.assertRaisesRegex(ValueError, "finite and not negative"):
                load_report(counts * value)
        for value in (-1.0, 3.5, math.nan):
            with self.assertRaisesRegex(
                ValueError, rf"overflow must be .*3.0\], got \[0.0, {value}\]"
            ):
                load_report(counts, overflow=torch.tensor([0.0, value]))


class TestFindNonfinite(TestCase):
    def _model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.MoE(8, 12, 4, 2), nn.Linear(8, 3))

    def test_all_finite(self):
        model = self._model()
        with find_nonfinite(model) as found:
            model(torch.randn(5, 8)).sum().backward()
        self.assertEqual(found, [])
        self.assertFalse(any(m._forward_hooks for m in model.modules()))

    def test_first_output_is_the_origin(self):
        model, x = self._model(), torch.randn(20, 8)
        with torch.no_grad():
            model[1].w_out[2] = math.inf
        with find_nonfinite(model) as found:
            model(x)
        self.assertEqual(
            [(f.kind, f.name) for f in found],
            [("output", n) for n in ("1", "2", "")] + [("parameter", "1.w_out")],
        )
        self.assertEqual(found[-1].experts, (2,))
        self.assertEqual(found[-1].count, model[1].w_out[2].numel())

    def test_compiled(self):
        """The hooks of the context also run if a graph without hooks is at hand."""
        model, x = self._model(), torch.randn(20, 8)
        compiled = torch.compile(model, backend="aot_eager")
        compiled(x)
        x[3] = math.nan
        with find_nonfinite(model) as eager:
            model(x)
        with find_nonfinite(model) as found:
            compiled(x)
        self.assertEqual(found, eager)
        self.assertEqual(found[0][:2], ("output", "0"))

    def test_gradients_name_the_experts(self):
        model, x = self._model(), torch.randn(20, 8)
        with find_nonfinite(model) as found:
            y, _, ids = model[1](x, need_routing=True)
            (
                y * torch.where((ids == 1).any(1, keepdim=True), math.nan, 1.0)
            ).sum().backward()
        gradients = {f.name: f.experts for f in found if f.kind == "gradient"}
        others = set(ids[(ids == 1).any(1)].flatten().tolist())
        self.assertEqual(set(gradients["1.w_in"]), others)
        self.assertIsNone(gradients["1.router.weight"])

    def test_buffers_and_integers(self):
        model = nn.BatchNorm1d(3)
        model.running_mean[1] = math.nan
        with find_nonfinite(model) as found:
            pass
        self.assertEqual(found, [("buffer", "running_mean", 1, None, None)])

    def test_sparse_and_four_bits(self):
        model = nn.Embedding(9, 4, sparse=True)
        codes = torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        model.register_buffer("codes", codes)
        with find_nonfinite(model) as found:
            (model(torch.tensor([1, 1, 2])) * math.inf).sum().backward()
        self.assertEqual(found, [("gradient", "weight", 8, None, None)])

    def test_tensors_that_cannot_be_read(self):
        class Codes(torch.Tensor):
            @staticmethod
            def __new__(cls):
                return torch.Tensor._make_wrapper_subclass(cls, (2, 3))

            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
                if func is torch.ops.aten.detach.default:
                    return cls()
                raise NotImplementedError(str(func))

        model, x = self._model(), torch.full((5, 8), math.nan)
        model.register_buffer("codes", Codes())
        model.register_buffer("offloaded", torch.empty(3, device="meta"))
        with find_nonfinite(model) as found:
            model(x)
        self.assertEqual({f.kind for f in found}, {"output"})

    def test_tokens(self):
        model, x = self._model(), torch.randn(3, 20, 8)
        x[1, 4] = x[2, 5:] = math.nan
        with find_nonfinite(model) as found:
            model(x)
        self.assertEqual(found[0][:2], ("output", "0"))
        self.assertEqual(found[0].tokens, (24, *range(45, 52)))

    @unittest.skipIf(not dist.is_available(), "needs torch.distributed")
    def test_experts_of_a_rank(self):
        from torch.distributed.tensor import DTensor, Shard

        dist.init_process_group("fake", rank=1, world_size=2)
        self.addCleanup(dist.destroy_process_group)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        mine = torch.zeros(4, 3, 2)
        mine[2, 0, 0] = math.inf
        model = nn.Module()
        model.w = nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)]))
        with find_nonfinite(model) as found:
            pass
        self.assertEqual(found, [("parameter", "w", 1, (6,), None)])

    def test_documentation(self):
        count, _ = run_code_blocks(read_page(__file__, "nn.utils.moe_report.md"))
        self.assertGreater(count, 1)

    def test_jagged_tokens(self):
        moe = nn.Sequential(nn.MoE(8, 16, 4, 2))
        x = torch.nested.nested_tensor(
            [torch.randn(3, 8), torch.randn(2, 8)], layout=torch.jagged
        )
        with torch.no_grad():
            x.values()[4, 0] = float("nan")
        with find_nonfinite(moe) as found:
            moe(x)
        self.assertEqual((found[0].kind, found[0].tokens), ("output", (4,)))


instantiate_parametrized_tests(TestLoadReport)


if __name__ == "__main__":
    run_tests()
