# Owner(s): ["module: nn"]
"""Recording and replaying the choices of experts: weights, gradients, records and errors."""

import copy
import functools
import inspect
import io
import pickle
import types
import unittest
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils.moe_replay import record_routing, replay_routing
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.common_moe import bits_of_kernel
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_reference import moe_topk_reference
from torch.utils.checkpoint import checkpoint


D, E, K = 8, 6, 2


class Router(nn.Module):
    """A router with only what the module docstring requires, and nothing else of nn.MoE."""

    def __init__(self, dim=D, num_experts=E, top_k=K):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.scale = nn.Parameter(torch.rand(num_experts, dim))
        self.top_k = top_k
        self.calls = 0

    def forward(self, input, *, need_routing=False, topk_indices=None):
        self.calls += 1
        logits = self.gate(input)
        k = self.top_k if topk_indices is None else topk_indices.shape[-1]
        ids, weights = F.moe_topk(logits, k, topk_indices=topk_indices)
        scales = self.scale[ids.clamp(min=0)] * weights.unsqueeze(-1)
        output = input + input * scales.sum(-2)
        return (output, logits, ids) if need_routing else output


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(Router(), nn.Tanh(), Router())


class Uncounted(Router):
    """The number of calls would be a constant of a graph."""

    calls = property(lambda self: 0, lambda self, calls: None)


def make_layers():
    torch.manual_seed(0)
    return nn.Sequential(Uncounted(), nn.Tanh(), Uncounted())


def gradients(model):
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


class TestMoeTopkIndices(TestCase):
    @parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
    @parametrize("score", ("softmax", "sigmoid"))
    @parametrize("normalize", (False, True))
    @parametrize("sizes", ((7, 2), (64, 8), (256, 8), (37, 37)))
    def test_weights_have_the_bits_of_a_choice(self, dtype, score, normalize, sizes):
        num_experts, k = sizes
        logits = (torch.randn(3, 40, num_experts) * 4).to(dtype).requires_grad_()
        options = {"score": score, "normalize": normalize, "scale": 2.5}
        # The choice depends on more than the logits, which the replay cannot know.
        bias = torch.randn(num_experts)
        ids, weights = F.moe_topk(logits, k, bias=bias, **options)
        found_ids, found = F.moe_topk(
            logits, k, topk_indices=ids.to(torch.int16), **options
        )
        self.assertEqual(found_ids, ids)
        self.assertEqual(found, weights, **bits_of_kernel("_moe_topk"))
        grad = torch.randn_like(weights)
        self.assertEqual(
            torch.autograd.grad(found, logits, grad),
            torch.autograd.grad(weights, logits, grad),
        )

    @unittest.skipIf(not dist.is_available(), "needs torch.distributed")
    @parametrize("score", ("softmax", "sigmoid"))
    def test_distributed_tensors(self, score):
        from torch.distributed._local_tensor import LocalTensorMode
        from torch.distributed.tensor import distribute_tensor, Shard

        logits, ids = torch.randn(4, 5), torch.tensor([[0, 1], [4, -1], [2, 3], [5, 0]])
        _, want = F.moe_topk(logits, 2, topk_indices=ids, score=score)
        dist.init_process_group("fake", rank=0, world_size=2)
        self.addCleanup(dist.destroy_process_group)
        with LocalTensorMode(2):
            mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
            logits, ids = (
                distribute_tensor(t, mesh, [Shard(0)]) for t in (logits, ids)
            )
            _, weights = F.moe_topk(logits, 2, topk_indices=ids, score=score)
            self.assertEqual(weights.placements, (Shard(0),))
            self.assertEqual(weights.full_tensor().reconcile(), want)
            with self.assertRaisesRegex(RuntimeError, "moe_topk: topk_indices must be"):
                F.moe_topk(logits, 2, topk_indices=ids + 2, score=score)

    @parametrize("score", ("softmax", "sigmoid"))
    @parametrize("normalize", (False, True))
    def test_varying_numbers_of_experts(self, score, normalize):
        """A token with fewer experts has the result of a smaller k."""
        logits = torch.randn(9, E, dtype=torch.float64, requires_grad=True)
        options = {"score": score, "normalize": normalize}
        for k in range(4):
            ids = torch.full((9, 4), -1 if k % 2 else E)
            expected = torch.zeros(9, 4, dtype=torch.float64)
            if k:
                chosen, weights = moe_topk_reference(logits.detach(), k, **options)
                ids[:, 1 : k + 1], expected[:, 1 : k + 1] = chosen, weights
            _, found = F.moe_topk(logits, 4, topk_indices=ids, **options)
            self.assertEqual(found, expected)
            self.assertTrue(
                torch.autograd.gradcheck(
                    lambda x: F.moe_topk(x, 4, topk_indices=ids, **options)[1], logits
                )
            )

    @parametrize("score", ("softmax", "sigmoid"))
    def test_logits_that_are_not_finite(self, score):
        logits = torch.randn(9, E)
        for row, bad in enumerate((float("nan"), float("inf"), -float("inf"))):
            logits[row, row], logits[row + 3] = bad, bad
        ids, weights = F.moe_topk(logits, E, score=score, bias=torch.randn(E))
        found = F.moe_topk(logits, E, score=score, topk_indices=ids)[1]
        self.assertEqual(found, weights, **bits_of_kernel("_moe_topk"))

    def test_a_sigmoid_is_of_the_chosen_alone(self):
        logits = torch.randn(9, E)
        ids, weights = F.moe_topk(logits, K, score="sigmoid")
        with mock.patch.object(torch, "_moe_topk", wraps=torch._moe_topk) as op:
            found = F.moe_topk(logits, K, score="sigmoid", topk_indices=ids)
        self.assertEqual(op.call_args.args[0].shape, (9, K))
        self.assertEqual(found, (ids, weights), rtol=0, atol=0)

    @parametrize("shape", ((), (0,), (2, 3)))
    def test_leading_dimensions(self, shape):
        logits = torch.randn(*shape, E)
        ids, weights = F.moe_topk(logits, K)
        found = F.moe_topk(logits, K, topk_indices=ids.to(torch.int8))
        self.assertEqual(found, (ids, weights), rtol=0, atol=0)

    def test_errors(self):
        logits = torch.randn(3, E)
        ids = torch.zeros(3, K, dtype=torch.int64)
        for bad in (ids.float(), ids.to(torch.uint8), ids.bool()):
            with self.assertRaisesRegex(TypeError, "must be int8, int16, int32 or"):
                F.moe_topk(logits, K, topk_indices=bad)
        with self.assertRaisesRegex(ValueError, "k must be at least 1, got 0"):
            F.moe_topk(logits, 0, topk_indices=ids[:, :0])
        for bad in (ids[:2], ids[:, :1], ids[0], ids.unsqueeze(0)):
            with self.assertRaisesRegex(ValueError, r"shape \(\*, k\) with k = 2"):
                F.moe_topk(logits, K, topk_indices=bad)
        for bad in (-2, E + 1):
            with self.assertRaisesRegex(RuntimeError, r"must be in \[-1, E\] = \[-1"):
                F.moe_topk(logits, K, topk_indices=torch.full((3, K), bad))

    @parametrize("score", ("softmax", "sigmoid"))
    def test_vmap(self, score):
        logits = torch.randn(3, 5, E, requires_grad=True)
        ids = logits.detach().flip(0).topk(K).indices
        ids[0, 0, 1] = -1

        def weights_of(logits, ids):
            return F.moe_topk(logits, K, score=score, topk_indices=ids)[1]

        def loss(logits, ids):
            return weights_of(logits, ids).square().sum()

        expected = weights_of(logits, ids)
        (grad,) = torch.autograd.grad(expected.square().sum(), logits)
        vmap = torch.func.vmap
        self.assertEqual(vmap(weights_of)(logits, ids), expected, rtol=0, atol=0)
        self.assertEqual(vmap(torch.func.grad(loss))(logits.detach(), ids), grad)
        of_one = vmap(weights_of, in_dims=(None, 0))(logits[0], ids)
        self.assertEqual(of_one, torch.stack([weights_of(logits[0], i) for i in ids]))
        ids[2, 4, 0] = E + 1
        with self.assertRaisesRegex(RuntimeError, r"must be in \[-1, E\] = \[-1"):
            vmap(weights_of)(logits, ids)

    @parametrize("dynamic", (False, True))
    def test_compiles_in_one_graph(self, dynamic):
        @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
        def weights_of(logits, ids):
            return F.moe_topk(logits, K, topk_indices=ids)[1]

        for num_tokens in (5, 12):
            logits = torch.randn(num_tokens, E, requires_grad=True)
            ids, weights = F.moe_topk(logits, K)
            found = weights_of(logits, ids)
            self.assertEqual(found, weights, rtol=0, atol=0)
            self.assertEqual(
                torch.autograd.grad(found.square().sum(), logits),
                torch.autograd.grad(weights.square().sum(), logits),
            )


class TestMoeReplay(TestCase):
    def test_replays_what_was_recorded(self):
        model, x = make_model(), torch.randn(3, 5, D)
        expected = model(x)
        with record_routing(model) as record:
            self.assertEqual(model(x), expected, rtol=0, atol=0)
        shapes = {name: (tuple(ids.shape), ids.dtype) for name, ids in record.items()}
        self.assertEqual(shapes, dict.fromkeys("02", ((15, K), torch.int8)))
        other = x + torch.randn(3, 5, D)
        with record_routing(model) as chosen:
            model(other)
        self.assertNotEqual(chosen, record)
        with replay_routing(model, record):
            self.assertEqual(model(x), expected, rtol=0, atol=0)
            with record_routing(model) as again:
                model(other)
        self.assertEqual(again, record)
        self.assertFalse(model[0]._forward_hooks or model[0]._forward_pre_hooks)

    @parametrize("shape", ((), (0,), (2, 0), (2, 3)))
    def test_shapes_of_tokens(self, shape):
        router, x = Router(), torch.randn(*shape, D)
        with record_routing(router) as record:
            expected = router(input=x)
        self.assertEqual(record[""].shape, (x.shape[:-1].numel(), K))
        with replay_routing(router, record):
            self.assertEqual(router(x), expected, rtol=0, atol=0)
            self.assertEqual(router(input=x), expected, rtol=0, atol=0)

    def test_who_asks_for_the_routing_gets_it(self):
        router, x = Router(), torch.randn(4, D)
        with record_routing(nn.Sequential(router)) as record:
            self.assertIsInstance(router(x, need_routing=True), tuple)
        self.assertEqual(router(x, need_routing=True)[2], record["0"].long())

        class Asks(Router):
            def forward(self, input, *, need_routing=True, topk_indices=None):
                return super().forward(
                    input, need_routing=need_routing, topk_indices=topk_indices
                )

        class Forgets(Router):
            def forward(self, input, *, need_routing=False, topk_indices=None):
                return super().forward(input, topk_indices=topk_indices)

        with record_routing(router := Asks()):
            self.assertIsInstance(router(x), tuple)
        with record_routing(router):
            self.assertIsInstance(router(x, need_routing=False), torch.Tensor)
        with (
            record_routing(router := Forgets()),
            self.assertRaisesRegex(RuntimeError, "'' must return .* got Tensor"),
        ):
            router(x)

    @parametrize("num_experts", (127, 128, 32767, 32768))
    def test_smallest_dtype(self, num_experts):
        model = nn.Sequential(Router(num_experts=num_experts))
        with record_routing(model) as record:
            model(torch.randn(2, D))
        expected = {127: torch.int8, 128: torch.int16, 32767: torch.int16}
        self.assertEqual(record["0"].dtype, expected.get(num_experts, torch.int32))

    def test_micro_batches_in_any_order(self):
        model = make_model()
        batches = [torch.randn(n, D) for n in (4, 7, 3)]
        records = []
        for x in batches:
            with record_routing(model) as record:
                model(x)
            records.append(record)
        moved = [x + 0.5 * torch.randn_like(x) for x in batches]
        expected = {}
        for i in (0, 1, 2):
            with replay_routing(model, records[i]):
                model(moved[i]).square().sum().backward()
            expected[i] = gradients(model)
        outputs = {}
        for i in (2, 0, 1):  # as a pipeline does: forwards, then backwards
            with replay_routing(model, records[i]):
                outputs[i] = model(moved[i])
        for i in (1, 2, 0):
            with replay_routing(model, records[i]):
                outputs[i].square().sum().backward()
            self.assertEqual(gradients(model), expected[i], rtol=0, atol=0)

    @parametrize("use_reentrant", (False, True))
    def test_checkpoint_records_once_and_replays_twice(self, use_reentrant):
        model = make_model()
        x = torch.randn(6, D, requires_grad=True)
        run = functools.partial(checkpoint, model, use_reentrant=use_reentrant)
        model(x).square().sum().backward()
        expected = gradients(model)
        with record_routing(model) as record:
            y = run(x)
            kept = {name: ids.clone() for name, ids in record.items()}
            y.square().sum().backward()
        self.assertEqual(record, kept)
        self.assertEqual(gradients(model), expected, rtol=0, atol=0)

        moved = (x + 0.5 * torch.randn_like(x)).detach().requires_grad_()
        with replay_routing(model, record):
            model(moved).square().sum().backward()
            expected = gradients(model)
            calls = model[0].calls
            run(moved).square().sum().backward()
        self.assertEqual(model[0].calls, calls + 2)
        self.assertEqual(gradients(model), expected, rtol=0, atol=0)

    @parametrize("use_reentrant", (False, True))
    def test_recomputation_outside_of_the_context(self, use_reentrant):
        """A recomputation outside of the context would choose other experts than the forward."""
        model = make_model()
        x = torch.randn(6, D, requires_grad=True)
        run = functools.partial(checkpoint, model, use_reentrant=use_reentrant)
        with record_routing(model) as record:
            run(x).sum().backward()
            expected = gradients(model)
        flipped = {name: ids.flip(0) for name, ids in record.items()}
        with replay_routing(model, flipped):
            y = run(x)
        pickle.dumps(model)
        with self.assertRaisesRegex(RuntimeError, "'0' is computed again for a backw"):
            y.sum().backward()
        with replay_routing(model, flipped):
            y = run(x)
        with replay_routing(model, flipped):  # as a pipeline does
            y.sum().backward()
        model.zero_grad()
        run(x).sum().backward()  # after a replay whose backward has finished
        self.assertEqual(gradients(model), expected)
        with replay_routing(model, flipped), torch.no_grad():
            model(x)
        run(x).sum().backward()
        self.assertEqual(gradients(model), expected)
        del y
        model(x)
        self.assertFalse(model[0]._forward_pre_hooks)

    @parametrize("use_reentrant", (False, True))
    def test_recomputation_of_another_forward(self, use_reentrant):
        """Only recomputations of forwards in the context are refused, not of those before or after."""
        model = make_model()
        x = torch.randn(6, D, requires_grad=True)

        def run(x):
            return checkpoint(model, x, use_reentrant=use_reentrant)

        with record_routing(model) as record:
            run(x).sum().backward()
        expected = gradients(model)
        flipped = {name: ids.flip(0) for name, ids in record.items()}
        y = run(x)
        with replay_routing(model, flipped), torch.no_grad():
            run(x), model(x)  # as of a reference
        y.sum().backward()
        self.assertEqual(gradients(model), expected)
        y = run(x)
        with replay_routing(model, flipped):
            replayed = run(x)
        y.sum().backward()
        self.assertEqual(gradients(model), expected)
        run(x).sum().backward()
        with self.assertRaisesRegex(RuntimeError, "'0' is computed again for a backw"):
            replayed.sum().backward()

    @parametrize("use_reentrant", (False, True))
    def test_recomputation_in_the_context_of_another(self, use_reentrant):
        """It takes the experts of its forward: of its own record, or the router's choice."""
        model = make_model()
        x = torch.randn(6, D, requires_grad=True)
        with record_routing(model) as record:
            model(x)
        flipped = {name: ids.flip(0) for name, ids in record.items()}
        other = {name: (ids + 1) % E for name, ids in record.items()}
        shorter = {name: ids[:5] for name, ids in other.items()}

        def run(x):  # the second one is recomputed while the first one is
            return checkpoint(nested, x, use_reentrant=use_reentrant)

        def nested(x):
            return checkpoint(model, x, use_reentrant=use_reentrant)

        model(x).sum().backward()
        expected = gradients(model)
        y = run(x)
        with replay_routing(model, other):
            y.sum().backward()
        self.assertEqual(gradients(model), expected)
        with replay_routing(model, flipped):
            model(x).sum().backward()
            expected = gradients(model)
            y = run(x)
            with replay_routing(model, other):
                z = run(x)
        with replay_routing(model, shorter):
            y.sum().backward()
        self.assertEqual(gradients(model), expected)
        with replay_routing(model, other):
            model(x).sum().backward()
        expected = gradients(model)
        with replay_routing(model, flipped):
            z.sum().backward()
        self.assertEqual(gradients(model), expected)

    @parametrize("use_reentrant", (False, True))
    def test_checkpoints_around_a_replay(self, use_reentrant):
        model = make_model()
        x = torch.randn(6, D, requires_grad=True)
        with record_routing(model) as record:
            model(x)
        flipped = {name: ids.flip(0) for name, ids in record.items()}

        def run(function, x):
            return checkpoint(function, x, use_reentrant=use_reentrant)

        def twice(x):  # recomputed together with its context
            with replay_routing(model, flipped):
                x = model(x)
            return model(x)

        twice(x).sum().backward()
        expected = gradients(model)
        run(twice, x).sum().backward()
        self.assertEqual(gradients(model), expected)

        with replay_routing(model, flipped):
            y = run(lambda x: run(model, x), x)
        with self.assertRaisesRegex(RuntimeError, "'0' is computed again for a backw"):
            y.sum().backward()

    def test_a_checkpoint_of_another_library(self):
        class Recomputed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, function, x):
                ctx.function = function
                ctx.save_for_backward(x)
                return function(x)

            @staticmethod
            def backward(ctx, grad):
                x = ctx.saved_tensors[0].detach().requires_grad_()
                with torch.enable_grad():
                    y = ctx.function(x)
                torch.autograd.backward(y, grad)
                return None, x.grad

        model = make_model()
        x = torch.randn(6, D, requires_grad=True)
        with record_routing(model) as record:
            y = Recomputed.apply(model, x)
        flipped = {name: ids.flip(0) for name, ids in record.items()}
        with replay_routing(model, flipped):
            replayed = Recomputed.apply(model, x)
        y.sum().backward()
        with self.assertRaisesRegex(RuntimeError, "'0' is computed again for a backw"):
            replayed.sum().backward()

    def test_two_threads(self):
        """Threads may replay at once if each has its own model. Only one thread may use a model."""
        model, other, x = make_model(), make_model(), torch.randn(3, D)
        with ThreadPoolExecutor(1) as thread:

            def elsewhere(model):
                with record_routing(model) as record:
                    model(x)
                return record

            with record_routing(model) as record:
                self.assertEqual(
                    thread.submit(elsewhere, other).result().keys(), {"0", "2"}
                )
                with self.assertRaisesRegex(RuntimeError, "another thread records or"):
                    thread.submit(elsewhere, model).result()
                thread.submit(model, x).result()  # the forward in this context
            with replay_routing(model, record), replay_routing(model, record):
                with self.assertRaisesRegex(RuntimeError, "another thread records or"):
                    thread.submit(elsewhere, model).result()
            self.assertEqual(thread.submit(elsewhere, model).result(), record)

    def test_records_are_saved_and_joined(self):
        model = make_model()
        parts = []
        for n in (4, 1, 1):  # a prompt, then one token at a time
            with record_routing(model) as record:
                model(torch.randn(n, D))
            parts.append(record)
        joined = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
        file = io.BytesIO()
        torch.save(joined, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        for ids in joined.values():  # what safetensors asks for
            self.assertTrue(ids.is_contiguous() and not ids.requires_grad)
            self.assertEqual(ids.untyped_storage().nbytes(), ids.nbytes)
        with replay_routing(model, loaded), record_routing(model) as found:
            model(torch.randn(6, D))
        self.assertEqual(found, joined)

    def test_names_without_wrappers(self):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
            checkpoint_wrapper,
        )

        model, x = make_model(), torch.randn(3, D)
        with record_routing(model) as record:
            model(x)
        model[0] = checkpoint_wrapper(model[0])
        for wrap in (nn.Identity(), nn.DataParallel, AveragedModel):
            wrapped = wrap(model)
            with replay_routing(wrapped, record), record_routing(wrapped) as found:
                wrapped(x * -2)
            self.assertEqual(found, record)

    def test_a_router_that_did_not_run(self):
        """A router does not run, as in a layer that is dropped or that an adapter replaced."""
        model, x = make_model(), torch.randn(3, D)
        with record_routing(model) as record:
            model[0](x)
        self.assertEqual(record.keys(), {"0"})
        with replay_routing(model, record), record_routing(model) as found:
            model[0](-x)
        self.assertEqual(found, record)

    def test_forward_of_an_instance_was_replaced(self):
        model, x = make_model(), torch.randn(3, D)
        with record_routing(model) as record:
            expected = model(x)
        inner = model[0].forward
        model[0].forward = lambda *args, **kwargs: inner(*args, **kwargs)
        with record_routing(model) as found:
            model(x)
        self.assertEqual(found, record)
        with replay_routing(model, record):
            self.assertEqual(model(x), expected, rtol=0, atol=0)

    def test_torch_func(self):
        model, x = make_model(), torch.randn(6, D)
        with record_routing(model) as record:
            model(x)

        def loss(x):
            return model(x).square().sum()

        with record_routing(model) as found:
            torch.func.grad(loss)(x)
        self.assertEqual(found, record)  # not dead wrappers
        moved = x + 0.5 * torch.randn_like(x)
        with replay_routing(model, record):
            expected = torch.autograd.functional.jacobian(loss, moved)
            self.assertEqual(torch.func.grad(loss)(moved), expected)
        with self.assertRaisesRegex(RuntimeError, "a router runs under vmap"):
            with record_routing(model):
                torch.func.vmap(model)(x[None])

    def test_compiled(self):
        """What was compiled outside of the contexts is not run inside, and the other way round."""
        model, x = make_layers(), torch.randn(6, D)
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        moved = x + torch.randn_like(x)
        outside = model(moved)
        with record_routing(model) as record:
            model(x)
        with replay_routing(model, record):
            replayed = model(moved)
        self.assertNotEqual(replayed, outside)
        for _ in range(2):
            self.assertEqual(compiled(moved), outside)
            with replay_routing(model, record):
                self.assertEqual(compiled(moved), replayed)
                with record_routing(model) as found:
                    self.assertEqual(compiled(moved), replayed)
                self.assertEqual(found, record)
                self.assertEqual(compiled(moved), replayed)
            with record_routing(model) as found:
                compiled(x)
            self.assertEqual(found, record)
        self.assertEqual(counter.frame_count, 4)
        self.assertNotIn("forward", vars(model[0]))

    def test_what_changes_inside(self):
        """A context ends as it began, whatever happened to the routers inside."""
        model, x = make_layers(), torch.randn(6, D)
        before, text = [set(vars(module)) for module in model], repr(model)
        add = nn.utils.parametrize.register_parametrization
        remove = nn.utils.parametrize.remove_parametrizations
        with record_routing(model):
            self.assertEqual((repr(model), type(model[0])), (text, Uncounted))
            add(model[0], "scale", nn.Tanh())
            expected = model(x)
        self.assertEqual(model(x), expected)
        with record_routing(model) as record:
            add(model[2], "scale", nn.Identity())
            remove(model[0], "scale")
            self.assertEqual(model(x), expected)
        remove(model[2], "scale")
        self.assertEqual(record.keys(), {"0", "2"})
        self.assertEqual(model(x), expected)
        self.assertEqual([set(vars(module)) for module in model], before)

    @parametrize("compiles", [False, True])
    def test_own_forward(self, compiles):
        """Of a router whose forward was replaced, before or inside; copies call their own."""
        model, x = make_layers(), torch.randn(6, D)

        def doubled(self, *args, **kwargs):
            output = Uncounted.forward(self, *args, **kwargs)
            return (2 * output[0], *output[1:]) if type(output) is tuple else 2 * output

        own = model[0].forward = types.MethodType(doubled, model[0])
        run = torch.compile(model, backend="eager") if compiles else model
        expected = run(x)
        with record_routing(model) as record:
            self.assertEqual(run(x), expected)
        with replay_routing(model, record):
            self.assertEqual(run(x), expected)
            with record_routing(model) as again:
                self.assertEqual(run(x), expected)
            other = copy.deepcopy(model[0])
            other.scale.data.zero_()
        self.assertEqual((record.keys(), again), ({"0", "2"}, record))
        self.assertIs(vars(model[0])["forward"], own)
        self.assertEqual(other(x), 2 * x)
        # The second context finds a wrapper around the forward of the first one.
        for _ in range(2):
            with replay_routing(model, record):
                inner = model[2].forward
                model[2].forward = functools.partial(
                    lambda f, *a, **k: f(*a, **k), inner
                )
                with record_routing(model) as again:
                    self.assertEqual(run(x), expected)
            self.assertEqual(again, record)
            self.assertEqual(run(x), expected)

    def test_copies(self):
        """A copy made in a context neither records nor replays, and may have contexts of its own."""
        model, x = make_layers(), torch.randn(6, D)
        expected = model(-x)
        with record_routing(model) as record:
            copies = [copy.deepcopy(model)]
            model(x)
        with replay_routing(model, record):
            copies += [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
            signature = inspect.signature(model[0].forward)
        self.assertEqual(signature, inspect.signature(model[0].forward))
        self.assertEqual(model(-x), expected)
        for other in copies:
            for tokens in (-x, -x[:5]):
                self.assertEqual(other(tokens), model(tokens))
            with record_routing(other) as found:
                other(x)
            self.assertEqual(found, record)
            self.assertNotIn("forward", vars(other[0]))

    def test_errors(self):
        model, x = make_model(), torch.randn(3, D)
        with self.assertRaisesRegex(ValueError, "no module of the model has need_rout"):
            with record_routing(nn.Linear(2, 2)):
                pass
        with record_routing(model) as record:
            model(x)
            with self.assertRaisesRegex(RuntimeError, "'0' ran a second time"):
                model(x)
        with replay_routing(model, record):
            with self.assertRaisesRegex(ValueError, "'0' got 4 tokens of shape"):
                model(torch.randn(4, D))
        record["1"] = record.pop("2")
        with self.assertRaisesRegex(
            ValueError, r"model does not have: \['1'\]; it has \['0', '2'\]"
        ):
            with replay_routing(model, record):
                pass
        del record["1"]

        with mock.patch.object(model[0], "route", lambda input: input, create=True):
            with self.assertRaisesRegex(ValueError, "'0' can't be replayed, as route"):
                with replay_routing(model, record):
                    pass
        with replay_routing(model, record):
            model[0](x)
            with self.assertRaisesRegex(ValueError, "'2' runs, and .* only of .'0'"):
                model(x)
        self.assertFalse(model[0]._forward_hooks or model[0]._forward_pre_hooks)


instantiate_parametrized_tests(TestMoeTopkIndices)
instantiate_parametrized_tests(TestMoeReplay)

if __name__ == "__main__":
    run_tests()
