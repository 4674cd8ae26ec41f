# Owner(s): ["oncall: distributed"]
"""DTensor rules of the MoE ops: values, gradients, placements, communication."""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    distribute_tensor,
    DTensor,
    Partial,
    Replicate,
    Shard,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorContinuousTestBase,
)


T, K, E, D, H = 12, 2, 4, 8, 16
# Placements that the tensor-parallel rule takes as they are.
TENSOR_PARALLEL = {"w_in": Shard(1), "w_out": Shard(2), "b_in": Shard(1)}


def operands(gated=True, bias=True, hidden=H, separate_up=False):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = {
        "input": randn(T, D),
        "topk_weights": randn(T, K),
        "w_in": randn(E, (2 if gated else 1) * hidden, D),
        "w_out": randn(E, D, hidden),
    }
    if bias:
        tensors |= {
            "b_in": randn(E, (2 if gated else 1) * hidden),
            "b_out": randn(E, D),
        }
    if separate_up:
        tensors["w_in"], tensors["w_up"] = tensors["w_in"].clone().chunk(2, dim=1)
    topk_indices = torch.rand(T, E, generator=generator).topk(K).indices
    topk_indices[0, 0] = -1
    return tensors, topk_indices


class TestMoeDTensor(DTensorContinuousTestBase):
    world_size = 2

    def _distribute(self, tensors, topk_indices, placements):
        mesh = self.build_device_mesh()
        distributed = {
            name: distribute_tensor(
                tensor, mesh, [placements.get(name, Replicate())]
            ).requires_grad_()
            for name, tensor in tensors.items()
        }
        return distributed, distribute_tensor(topk_indices, mesh, [Replicate()])

    def _compare(
        self, placements, gated=True, bias=True, hidden=H, separate_up=False, **kwargs
    ):
        """Against plain tensors; returns the output and the two communication logs."""
        tensors, topk_indices = operands(gated, bias, hidden, separate_up)
        leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
        expected = F.moe_mlp(topk_indices=topk_indices, **leaves, **kwargs)
        grad = torch.ones_like(expected)
        expected.backward(grad)

        leaves_d, topk_d = self._distribute(tensors, topk_indices, placements)
        with CommDebugMode() as forward:
            out = F.moe_mlp(topk_indices=topk_d, **leaves_d, **kwargs)
        placement = out.placements
        self.assertEqual(out.full_tensor(), expected)
        grad = distribute_tensor(grad, out.device_mesh, [Replicate()])
        with CommDebugMode() as backward:
            out.backward(grad)
        for name, leaf in leaves.items():
            self.assertEqual(leaves_d[name].grad.full_tensor(), leaf.grad, msg=name)
        return placement, leaves_d, forward, backward

    @parametrize("bias", (False, True))
    @parametrize(
        "activation,gate_interleaved", [("swiglu", True), ("swiglu_oai", True), ("relu", False)]
    )  # fmt: skip
    def test_tensor_parallel(self, activation, gate_interleaved, bias):
        placement, leaves, forward, _ = self._compare(
            TENSOR_PARALLEL,
            gated=gate_interleaved,
            bias=bias,
            activation=activation,
            gate_interleaved=gate_interleaved,
        )
        # Partial sums over the hidden units, without communication.
        self.assertEqual(placement, (Partial("sum"),))
        self.assertEqual(forward.get_total_counts(), 0)
        for name, shard in TENSOR_PARALLEL.items():
            if name in leaves:
                self.assertEqual(leaves[name].grad.placements, (shard,), msg=name)

    def test_tensor_parallel_with_separate_up(self):
        placements = {**TENSOR_PARALLEL, "w_up": Shard(1)}
        placement, leaves, forward, backward = self._compare(
            placements, bias=False, separate_up=True
        )
        self.assertEqual(placement, (Partial("sum"),))
        self.assertEqual(forward.get_total_counts(), 0)
        for name in ("w_in", "w_up", "w_out"):
            self.assertEqual(leaves[name].grad.placements, (placements[name],))
        # Nothing of the size of weights or pre-activations is sent.
        self.assertNotIn(
            torch.ops.c10d_functional.all_gather_into_tensor,
            {op for op, count in backward.get_comm_counts().items() if count},
        )

    def test_separate_up_with_biases_is_gathered(self):
        placement, _, forward, _ = self._compare(
            {**TENSOR_PARALLEL, "w_up": Shard(1)}, separate_up=True
        )
        self.assertEqual(placement, (Replicate(),))
        self.assertGreater(forward.get_total_counts(), 0)

    def test_gates_before_ups_are_gathered(self):
        # A shard of w_in would hold gates only or ups only.
        placement, _, forward, _ = self._compare(TENSOR_PARALLEL)
        self.assertEqual(placement, (Replicate(),))
        self.assertGreater(forward.get_total_counts(), 0)

    @parametrize("gated", (False, True))
    def test_uneven_shards_of_hidden_units(self, gated):
        # 3 and 2 of 5. With gates, w_in is cut in the middle of its 10 rows.
        placement, _, forward, _ = self._compare(
            TENSOR_PARALLEL,
            gated=gated,
            hidden=5,
            activation="swiglu" if gated else "relu",
            gate_interleaved=gated,
        )
        self.assertEqual(placement, (Replicate() if gated else Partial("sum"),))
        self.assertEqual(forward.get_total_counts() > 0, gated)

    @parametrize("name", ("w_in", "w_out", "b_in", "b_out"))
    @parametrize("placement", (Shard(0), _StridedShard(0, split_factor=1)))
    def test_experts_elsewhere_are_an_error(self, name, placement):
        # Not a gather: a rank that holds a shard of the experts has no room for all.
        tensors, topk_indices = operands()
        leaves, topk = self._distribute(tensors, topk_indices, {name: placement})
        message = f"_moe_mlp.default: {name} has placements .*0.*counts experts"
        with CommDebugMode() as mode:
            with self.assertRaisesRegex(NotImplementedError, message):
                F.moe_mlp(topk_indices=topk, **leaves, gate_interleaved=True)
        self.assertEqual(mode.get_total_counts(), 0)

    def test_experts_elsewhere_on_one_mesh_dimension(self):
        # One of two mesh dimensions is enough.
        mesh = init_device_mesh(self.device_type, (1, 2), mesh_dim_names=("ep", "tp"))
        tensors, topk_indices = operands()
        placements = {n: [Replicate(), p] for n, p in TENSOR_PARALLEL.items()}
        placements["w_out"] = [Shard(0), Shard(2)]
        replicated = [Replicate(), Replicate()]

        def call():
            leaves = {
                name: distribute_tensor(tensor, mesh, placements.get(name, replicated))
                for name, tensor in tensors.items()
            }
            topk = distribute_tensor(topk_indices, mesh, replicated)
            return F.moe_mlp(topk_indices=topk, **leaves, gate_interleaved=True)

        with self.assertRaisesRegex(NotImplementedError, "w_out has placements"):
            call()
        placements["w_out"] = [Replicate(), Shard(2)]
        out = call()
        self.assertEqual(out.placements, (Replicate(), Partial("sum")))
        expected = F.moe_mlp(
            topk_indices=topk_indices, **tensors, gate_interleaved=True
        )
        self.assertEqual(out.full_tensor(), expected)

    @parametrize("name", ("input", "topk_weights"))
    def test_tokens_are_gathered(self, name):
        # Rows are counted in the whole tensor.
        placement, _, forward, _ = self._compare(
            {name: Shard(0)}, activation="swiglu", gate_interleaved=True
        )
        self.assertEqual(placement, (Replicate(),))
        self.assertGreater(forward.get_total_counts(), 0)

    def test_replicated(self):
        placement, _, forward, backward = self._compare({})
        self.assertEqual(placement, (Replicate(),))
        self.assertEqual(forward.get_total_counts(), 0)
        self.assertEqual(backward.get_total_counts(), 0)

    def test_frozen_experts(self):
        # Gradients that the output mask leaves out have no meaningful placement.
        tensors, topk_indices = operands()
        leaves, topk = self._distribute(tensors, topk_indices, TENSOR_PARALLEL)
        for name in ("w_in", "w_out", "b_in", "b_out"):
            leaves[name].requires_grad_(False)
        F.moe_mlp(topk_indices=topk, **leaves, gate_interleaved=True).sum().backward()
        plain = {name: t.clone() for name, t in tensors.items()}
        plain["input"].requires_grad_()
        F.moe_mlp(
            topk_indices=topk_indices, **plain, gate_interleaved=True
        ).sum().backward()
        self.assertEqual(leaves["input"].grad.full_tensor(), plain["input"].grad)
        self.assertIsNone(leaves["w_in"].grad)

    def test_no_grad(self):
        tensors, topk_indices = operands()
        leaves, topk = self._distribute(tensors, topk_indices, TENSOR_PARALLEL)
        with torch.no_grad():
            out = F.moe_mlp(topk_indices=topk, **leaves, gate_interleaved=True)
        expected = F.moe_mlp(
            topk_indices=topk_indices, **tensors, gate_interleaved=True
        )
        self.assertEqual(out.full_tensor(), expected)

    @parametrize("placement", (Replicate(), Shard(0)))
    def test_permutation(self, placement):
        _, topk_indices = operands()
        mesh = self.build_device_mesh()
        expected = torch.ops.aten._moe_permutation(topk_indices, E, row_alignment=4)
        actual = torch.ops.aten._moe_permutation(
            distribute_tensor(topk_indices, mesh, [placement]), E, row_alignment=4
        )
        for ours, theirs in zip(actual, expected):
            self.assertIsInstance(ours, DTensor)
            self.assertEqual(ours.full_tensor(), theirs)


instantiate_parametrized_tests(TestMoeDTensor)

if __name__ == "__main__":
    run_tests()
