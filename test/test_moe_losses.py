# Owner(s): ["module: nn"]
"""Router losses and the loss-free bias: values by loops, gradients, edge cases."""

import math
import unittest

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.moe import (
    balance_counts,
    expert_counts,
    load_balancing_loss,
    router_z_loss,
    token_rounding,
    updated_expert_bias,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.utils.checkpoint import checkpoint


B, S, E, K = 3, 10, 4, 2


def router(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, S, E, generator=generator, dtype=dtype)
    scores = logits.sigmoid()
    return logits, scores, scores.topk(K).indices


def loop(scores, indices):
    """One group of tokens: ``(T, E)`` and ``(T, K)``."""
    tokens, experts = scores.shape
    ids = [i for i in indices.flatten().tolist() if 0 <= i < experts]
    total = 0.0
    for e in range(experts):
        wanted = sum((scores[t, e] / scores[t].sum()).item() for t in range(tokens))
        total += ids.count(e) / max(len(ids), 1) * wanted / tokens
    return experts * total


class TestMoeLosses(TestCase):
    def test_all_tokens(self):
        _, scores, indices = router()
        expected = loop(scores.flatten(0, 1), indices.flatten(0, 1))
        self.assertEqual(load_balancing_loss(scores, indices).item(), expected)

    def test_per_sequence(self):
        _, scores, indices = router()
        expected = sum(loop(scores[b], indices[b]) for b in range(B)) / B
        actual = load_balancing_loss(scores, indices, per_sequence=True)
        self.assertEqual(actual.item(), expected)
        self.assertNotEqual(expected, load_balancing_loss(scores, indices).item())

    @parametrize("sentinel", (-1, E))
    def test_no_expert_counts_nowhere(self, sentinel):
        _, scores, indices = router()
        indices[:, ::2, 0] = sentinel
        expected = loop(scores.flatten(0, 1), indices.flatten(0, 1))
        self.assertEqual(load_balancing_loss(scores, indices).item(), expected)
        nobody = torch.full_like(indices, sentinel)
        self.assertEqual(load_balancing_loss(scores, nobody).item(), 0.0)

    @parametrize("how", ("mask", "ids", "both"))
    def test_padding_takes_no_part(self, how):
        logits, scores, indices = router()
        lengths = (S, 4, 0)  # the last sequence is padding only
        mask = torch.arange(S) < torch.tensor(lengths).unsqueeze(1)
        logits.requires_grad_()
        given, ids = {}, indices
        if how != "ids":
            given["mask"] = mask
        if how != "mask":
            ids = torch.where(mask.unsqueeze(-1), indices, -1)
        # What padding holds does not matter.
        padded = logits.masked_fill(~mask.unsqueeze(-1), math.nan)
        scores = padded.sigmoid()

        kept = [(logits[b, :n], indices[b, :n]) for b, n in enumerate(lengths) if n]
        flat_logits, flat_ids = (torch.cat(part) for part in zip(*kept))
        self.assertEqual(
            load_balancing_loss(scores, ids, **given),
            load_balancing_loss(flat_logits.sigmoid(), flat_ids),
        )
        each = [loop(part.sigmoid(), part_ids) for part, part_ids in kept]
        loss = load_balancing_loss(scores, ids, per_sequence=True, **given)
        self.assertEqual(loss.item(), sum(each) / 2)
        z_loss = router_z_loss(padded, mask=mask)
        self.assertEqual(z_loss, router_z_loss(flat_logits))
        (grad,) = torch.autograd.grad(loss + z_loss, logits)
        self.assertTrue(grad.isfinite().all())
        self.assertEqual(grad[~mask].count_nonzero().item(), 0)
        self.assertTrue((grad[mask] != 0).all())

        counts = expert_counts(ids, E, **given)
        self.assertEqual(counts, flat_ids.flatten().bincount(minlength=E))
        self.assertEqual(counts, expert_counts(flat_ids.int(), E))

    @parametrize("backend", ("eager", "inductor"))
    def test_padding_compiled(self, backend):
        logits, scores, indices = router(torch.float32)
        mask = torch.rand(B, S) > 0.5

        def function(logits, scores, indices, mask):
            loss = load_balancing_loss(scores, indices, mask=mask)
            z_loss = router_z_loss(logits, mask=mask)
            return loss + z_loss, expert_counts(indices, E, mask=mask)

        args = (logits, scores, indices, mask)
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        self.assertEqual(compiled(*args), function(*args))

    def test_vmap(self):
        """Over sequences, as for an ensemble or gradients per sample."""
        _, scores, ids = router()
        ids[1, 3] = torch.tensor([-1, E])
        weights = scores.gather(-1, ids.clamp(0, E - 1))

        def loss(scores, ids):
            per_sequence = load_balancing_loss(
                scores[None], ids[None], per_sequence=True
            )
            return load_balancing_loss(scores, ids) + per_sequence

        for function, args in (
            (loss, (scores, ids)),
            (torch.func.grad(loss), (scores, ids)),
            (lambda ids: expert_counts(ids, E), (ids,)),
            (lambda ids: balance_counts(ids, E), (ids,)),
            (lambda *routing: token_rounding(*routing, 4)[:2], (ids, weights, scores)),
        ):
            expected = [function(*each) for each in zip(*args)]
            if isinstance(expected[0], tuple):
                expected = tuple(map(torch.stack, zip(*expected)))
            else:
                expected = torch.stack(expected)
            self.assertEqual(torch.func.vmap(function)(*args), expected)
            nested = torch.func.vmap(torch.func.vmap(function))
            twice = nested(*(x[None] for x in args))
            self.assertEqual(
                torch.utils._pytree.tree_map(lambda x: x[0], twice), expected
            )
        ids[2, 4, 0] = E + 1
        with self.assertRaisesRegex(RuntimeError, "load_balancing_loss: topk_indices"):
            torch.func.vmap(loss)(scores, ids)

    @parametrize("shape", ((0,), (0, S), (B, 0)))
    @parametrize("per_sequence", (False, True))
    def test_no_tokens(self, shape, per_sequence):
        # A rank may have none; its loss is added to that of the others.
        logits = torch.zeros(*shape, E, requires_grad=True)
        loss = router_z_loss(logits)
        if not per_sequence or len(shape) == 2:
            indices = torch.zeros(*shape, K, dtype=torch.int64)
            loss = loss + load_balancing_loss(
                logits.softmax(-1), indices, per_sequence=per_sequence
            )
        self.assertEqual(loss.item(), 0.0)
        loss.backward()
        self.assertEqual(logits.grad, torch.zeros_like(logits))

    @parametrize("num_tokens", [0, 1, 7])
    def test_exported(self, num_tokens):
        class Losses(torch.nn.Module):
            def forward(self, logits, indices):
                balance = load_balancing_loss(logits.softmax(-1), indices)
                return balance + router_z_loss(logits)

        shapes = ({0: torch.export.Dim("num_tokens", min=0)},) * 2
        example = (torch.randn(5, E), torch.randint(E, (5, K)))
        program = torch.export.export(Losses(), example, dynamic_shapes=shapes)
        args = (torch.randn(num_tokens, E), torch.randint(E, (num_tokens, K)))
        self.assertEqual(program.module()(*args), Losses()(*args))

    @parametrize("recompute", (False, True))
    def test_counted_once(self, recompute):
        """Micro-batches of ranks, padded, recomputed, and in any order: one large batch."""
        torch.manual_seed(0)
        D, num_experts, k = 6, 5, 2
        x = torch.randn(4, 3, 7, D, dtype=torch.float64)  # 4 parts of 3 sequences
        mask = torch.rand(4, 3, 7) < 0.7
        mask[1] = False  # a rank with nothing but padding
        gate = torch.randn(num_experts, D, dtype=torch.float64, requires_grad=True)

        def route(x, gate):
            scores = (x @ gate.T).softmax(-1)
            return scores, scores.topk(k)[1]

        scores, ids = route(x, gate)
        expected = load_balancing_loss(scores, ids, mask=mask)
        (grad,) = torch.autograd.grad(expected, gate)
        whole = balance_counts(ids, num_experts, mask=mask)
        self.assertEqual(whole[-1], mask.sum())
        self.assertEqual(whole[:-1].sum(), k * mask.sum())

        routed, counts = [], torch.zeros_like(whole)
        for part in (2, 0, 3, 1):
            if recompute:
                found = checkpoint(route, x[part], gate, use_reentrant=False)
            else:
                found = route(x[part], gate)
            counts += balance_counts(found[1], num_experts, mask=mask[part])
            routed.append((*found, mask[part]))
        loss = 0.0
        for scores, ids, kept in routed:
            share = load_balancing_loss(scores, ids, mask=kept, counts=counts)
            loss += share.detach()
            share.backward()
        self.assertEqual(counts, whole)  # after the backwards too
        self.assertEqual(loss, expected.detach())
        self.assertEqual(gate.grad, grad)
        biases = [
            updated_expert_bias(torch.zeros(num_experts), c[:-1], 0.1)
            for c in (counts, whole)
        ]
        self.assertEqual(*biases, atol=0, rtol=0)

    def test_sequences_counted_once(self):
        scores = torch.rand(5, 7, 6, dtype=torch.float64)
        ids = scores.topk(2)[1]
        expected = load_balancing_loss(scores, ids, per_sequence=True)
        parts = [
            load_balancing_loss(scores[s], ids[s], per_sequence=True) * n / 5
            for s, n in ((slice(2), 2), (slice(2, 5), 3))
        ]
        self.assertEqual(sum(parts), expected)

    def test_counts_errors(self):
        scores = torch.rand(2, 3, 4)
        ids = scores.topk(2)[1]
        counts = balance_counts(ids, 4)
        for options in (
            {"counts": counts[:-1]},
            {"counts": counts, "per_sequence": True},
        ):
            with self.assertRaisesRegex(
                ValueError, r"counts must be \(E \+ 1,\) = \(5,\)"
            ):
                load_balancing_loss(scores, ids, **options)
        with self.assertRaisesRegex(
            TypeError, "counts must be int64, got torch.float32"
        ):
            load_balancing_loss(scores, ids, counts=counts.float())

    def test_scores_that_underflow(self):
        # All scores of token 1 are zero in float32.
        logits = torch.zeros(3, E)
        logits[1] = -200.0
        logits.requires_grad_()
        indices = torch.tensor([[0, 1], [0, 1], [0, 1]])
        loss = load_balancing_loss(logits.sigmoid(), indices)
        self.assertEqual(loss.item(), 2 / 3)
        loss.backward()
        self.assertTrue(logits.grad.isfinite().all())
        self.assertGreater(logits.grad[0].abs().max().item(), 0)

    @parametrize("compiled", (False, True))
    @parametrize("per_sequence", (False, True))
    @parametrize("bad", (-2, E + 1))
    def test_ids_out_of_range(self, bad, per_sequence, compiled):
        _, scores, indices = router()
        indices[2, 3, 1] = bad
        function = load_balancing_loss
        if compiled:
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        message = rf"load_balancing_loss: topk_indices must be in .* \[-1, {E}\]"
        with self.assertRaisesRegex(RuntimeError, message):
            function(scores, indices, per_sequence=per_sequence)

    @parametrize("per_sequence", (False, True))
    def test_negative_scores(self, per_sequence):
        logits, _, indices = router()
        with self.assertRaisesRegex(RuntimeError, "scores must not be negative"):
            load_balancing_loss(logits, indices, per_sequence=per_sequence)
        # Those of padding are not read.
        mask = (logits >= 0).all(-1)
        loss = load_balancing_loss(logits, indices, mask=mask)
        self.assertTrue(loss.isfinite())

    def test_extremes(self):
        uniform = torch.full((8, E), 1 / E)
        one = torch.zeros(8, 1, dtype=torch.int64)
        self.assertEqual(load_balancing_loss(uniform, one).item(), 1.0)
        wants_one = torch.eye(E)[:1].expand(8, E)
        self.assertEqual(load_balancing_loss(wants_one, one).item(), float(E))
        even = torch.arange(8).view(8, 1) % E
        self.assertEqual(load_balancing_loss(wants_one, even).item(), 1.0)

    @parametrize("per_sequence", (False, True))
    def test_gradcheck(self, per_sequence):
        _, scores, indices = router()
        scores.requires_grad_()
        self.assertTrue(
            torch.autograd.gradcheck(
                lambda s: load_balancing_loss(s, indices, per_sequence=per_sequence),
                (scores,),
            )
        )

    def test_descent_balances(self):
        # Steps against the gradient alone move a lopsided router to an even one.
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(256, 8, generator=generator)
        weight = torch.randn(E, 8, generator=generator) * 0.1
        offset = torch.tensor([1.0, 0.0, 0.0, 0.0]).requires_grad_()

        def busiest():
            scores = (F.linear(x, weight) + offset).softmax(-1)
            indices = scores.topk(1).indices
            return scores, indices, indices.flatten().bincount(minlength=E).max().item()

        before = busiest()[2]
        for _ in range(60):
            scores, indices, _ = busiest()
            (grad,) = torch.autograd.grad(load_balancing_loss(scores, indices), offset)
            offset = (offset - grad).detach().requires_grad_()
        self.assertGreater(before, 200)
        self.assertLess(busiest()[2], 110)

    def test_z_loss(self):
        logits, _, _ = router()
        terms = [
            math.log(sum(math.exp(v) for v in row)) ** 2
            for row in logits.flatten(0, 1).tolist()
        ]
        self.assertEqual(router_z_loss(logits).item(), sum(terms) / len(terms))
        logits.requires_grad_()
        self.assertTrue(torch.autograd.gradcheck(router_z_loss, (logits,)))

    @parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
    def test_low_precision_is_computed_in_float32(self, dtype):
        logits, scores, indices = router(torch.float32)
        logits, scores = logits.to(dtype), scores.to(dtype)
        for actual, expected in (
            (router_z_loss(logits), router_z_loss(logits.float())),
            (
                load_balancing_loss(scores, indices),
                load_balancing_loss(scores.float(), indices),
            ),
        ):
            self.assertEqual(actual.dtype, torch.float32)
            self.assertEqual(actual, expected, atol=0, rtol=0)

    @unittest.skipIf(not dist.is_available(), "needs torch.distributed")
    @parametrize("dim", [None, 0, 1])
    def test_distributed_tensors(self, dim):
        from torch.distributed._local_tensor import LocalTensorMode
        from torch.distributed.tensor import distribute_tensor, Replicate, Shard

        def losses(scores, logits, ids, mask):
            return load_balancing_loss(scores, ids, mask=mask) + router_z_loss(logits)

        logits, scores, ids = (t[0] for t in router())
        ids[3] = -1
        mask = torch.arange(S) != 5
        leaf = logits.clone().requires_grad_()
        want = losses(leaf.softmax(-1), leaf, ids, mask)
        want.backward()
        dist.init_process_group("fake", rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)
        with LocalTensorMode(2):
            mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
            placement = Replicate() if dim is None else Shard(dim)
            x, chosen = (distribute_tensor(t, mesh, [placement]) for t in (logits, ids))
            kept = distribute_tensor(mask, mesh, [Replicate()])
            x.requires_grad_()
            loss = losses(x.softmax(-1), x, chosen, kept)
            self.assertEqual(loss.full_tensor().reconcile(), want)
            loss.backward()
            self.assertEqual(x.grad.full_tensor().reconcile(), leaf.grad)
            counts = expert_counts(chosen, E).full_tensor().reconcile()
            self.assertEqual(counts, expert_counts(ids, E))

    def test_bias_update(self):
        bias = torch.tensor([0.5, 0.0, -0.5, 0.25])
        counts = torch.tensor([10, 6, 2, 6], dtype=torch.int32)
        actual = updated_expert_bias(bias, counts, 0.125)
        self.assertEqual(actual, torch.tensor([0.375, 0.0, -0.375, 0.25]))
        self.assertEqual(bias, torch.tensor([0.5, 0.0, -0.5, 0.25]))

    def test_bias_update_beyond_32_bits(self):
        # 4 * 2**30 does not fit in the int32 that _moe_permutation counts in.
        counts = torch.tensor([2**30, 0, 0, 0], dtype=torch.int32)
        actual = updated_expert_bias(torch.zeros(4), counts, 0.125)
        self.assertEqual(actual, torch.tensor([-0.125, 0.125, 0.125, 0.125]))

    def test_bias_balances(self):
        generator = torch.Generator().manual_seed(2)
        logits = torch.randn(512, E, generator=generator)
        logits += torch.tensor([3.0, 0.0, 0.0, -3.0])
        bias = torch.zeros(E)
        for _ in range(1500):
            indices, _ = F.moe_topk(logits, 1, score="sigmoid", bias=bias)
            counts = indices.flatten().bincount(minlength=E)
            bias = updated_expert_bias(bias, counts, 0.001)
        self.assertLess(counts.max().item(), 160)
        self.assertGreater(counts.min().item(), 96)

    @parametrize("backend", ("aot_eager", "inductor"))
    def test_compile(self, backend):
        logits, scores, indices = router(torch.float32)
        counts = indices.flatten().bincount(minlength=E)

        def function(logits, scores, indices, counts):
            loss = load_balancing_loss(scores, indices, per_sequence=True)
            return loss + router_z_loss(logits), updated_expert_bias(
                torch.zeros(E), counts, 0.1
            )

        args = (logits, scores, indices, counts)
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        self.assertEqual(compiled(*args), function(*args))
        fewer = (*(t[:, :7] for t in args[:3]), counts)
        self.assertEqual(compiled(*fewer), function(*fewer))

    def test_errors(self):
        _, scores, indices = router()
        with self.assertRaisesRegex(ValueError, r"got \(3, 10, 4\) and \(3, 9, 2\)"):
            load_balancing_loss(scores, indices[:, :9])
        with self.assertRaisesRegex(ValueError, r"\(\*, S, E\), got \(10, 4\)"):
            load_balancing_loss(scores[0], indices[0], per_sequence=True)
        for counts in (expert_counts, balance_counts):
            with self.assertRaisesRegex(
                ValueError, "num_experts must be at least 1, got -1"
            ):
                counts(indices, -1)
        mask = torch.ones(B, S - 1, dtype=torch.bool)
        for name, call in (
            (
                "load_balancing_loss",
                lambda m: load_balancing_loss(scores, indices, mask=m),
            ),
            ("router_z_loss", lambda m: router_z_loss(scores, mask=m)),
            ("expert_counts", lambda m: expert_counts(indices, E, mask=m)),
        ):
            with self.assertRaisesRegex(
                ValueError, rf"{name}: .*\(3, 10\), got \(3, 9\)"
            ):
                call(mask)
            with self.assertRaisesRegex(TypeError, f"{name}: mask must be bool"):
                call(torch.ones(B, S))
        with self.assertRaisesRegex(
            RuntimeError, "expert_counts: topk_indices must be in"
        ):
            expert_counts(indices + E, E)
        with self.assertRaisesRegex(ValueError, r"got \(4,\) and \(3,\)"):
            updated_expert_bias(torch.zeros(4), torch.zeros(3), 0.1)

    def test_dtype_errors(self):
        logits, scores, indices = router()
        with self.assertRaisesRegex(TypeError, "scores must be .*, got torch.int64"):
            load_balancing_loss(indices, scores)
        with self.assertRaisesRegex(
            TypeError, "topk_indices must have dtype .*, got torch.float64"
        ):
            load_balancing_loss(scores, scores)
        with self.assertRaisesRegex(TypeError, "logits must be .*, got torch.int64"):
            router_z_loss(indices)
        counts = torch.ones(4, dtype=torch.int64)
        for dtype in (torch.float32, torch.bool):
            with self.assertRaisesRegex(
                TypeError, f"counts must be integers, got {dtype}"
            ):
                updated_expert_bias(torch.zeros(4), counts.to(dtype), 0.1)
        for dtype in (torch.bfloat16, torch.float16, torch.int64):
            with self.assertRaisesRegex(
                TypeError, f"bias must be float32 or float64, got {dtype}"
            ):
                updated_expert_bias(torch.zeros(4, dtype=dtype), counts, 0.1)


instantiate_parametrized_tests(TestMoeLosses)

if __name__ == "__main__":
    run_tests()
