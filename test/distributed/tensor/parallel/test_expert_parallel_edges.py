# Owner(s): ["oncall: distributed"]
"""ExpertParallel at its edges: uneven ranks, odd orders of calls, what it refuses."""

import contextlib
import copy
import datetime
import functools
import io
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed._moe.overlap_schedule import OverlapSchedule
from torch.distributed._moe.recompute import save_communication
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ExpertParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.moe_lora import add_lora
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
)
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)


sys.path.append(str(Path(__file__).resolve().parents[2]))

from moe_gloo import GlooTest  # noqa: E402


D, H, E, K = 16, 24, 8, 3
# Tokens of each rank, of one step after the other.
STEPS = ((5, 4, 0, 3), (0, 0, 7, 0), (0, 0, 0, 0), (2, 6, 1, 1))
OPTIONS = [
    subtest({}, name="compact"),
    subtest({"combine": "exact"}, name="exact"),
    subtest({"capacity": 8}, name="static"),
    subtest({"num_chunks": 3}, name="chunks"),
    subtest({"token_switch": "hierarchical", "ranks_per_node": 2}, name="hierarchical"),
]


class GroupedExperts(nn.Module):
    """Rows in expert order and counts, in ops that can be differentiated twice."""

    def __init__(self):
        super().__init__()
        shapes = ((E, H, D), (E, D, H), (E, H, D))
        weights = (nn.Parameter(torch.randn(s).double() / 4) for s in shapes)
        self.w1, self.w2, self.w3 = weights

    def forward(self, x, counts):
        expert = torch.arange(len(counts)).repeat_interleave(counts)
        expert = F.pad(expert, (0, len(x) - len(expert)))
        hidden = F.silu(torch.einsum("rd,rhd->rh", x, self.w1[expert]))
        hidden = hidden * torch.einsum("rd,rhd->rh", x, self.w3[expert])
        return torch.einsum("rh,rdh->rd", hidden, self.w2[expert])


class OwnRunExperts(nn.MoE):
    def run_experts(self, input, topk_indices, topk_weights):
        return input - 2 * super().run_experts(input, topk_indices, topk_weights)


class OwnForward(nn.MoE):
    def forward(self, input):
        _, *routing = self.route(input)
        return input - self.run_routed(input, *routing)


class OwnShared(nn.MoE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dense = nn.Linear(D, D, dtype=self.w_in.dtype)

    def run_shared(self, input):
        return self.dense(input)


@instantiate_parametrized_tests
class TestEdges(GlooTest):
    def parallel(self, module, **options):
        module = copy.deepcopy(module)
        return parallelize_module(
            module, self.mesh(("ep",), 4), ExpertParallel(**options)
        )

    def pair(self, cls=nn.MoE, dtype=torch.float64, **options):
        torch.manual_seed(0)
        whole = cls(D, H, E, K, dtype=dtype)
        return whole, self.parallel(whole, **options)

    def tokens(self, counts, seed=1):
        """Tokens of all ranks, and the slice of this one."""
        torch.manual_seed(seed)
        begin = sum(counts[: self.rank])
        x = torch.randn(sum(counts), D).double()
        return x, slice(begin, begin + counts[self.rank])

    def total(self, param):
        """Gradient of all ranks."""
        if isinstance(param.grad, DTensor):
            return param.grad.full_tensor()
        grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
        dist.all_reduce(grad)
        return grad

    def check(self, model, whole, counts, call=lambda model, x: model(x)):
        """Output and gradients of a step are those of one process."""
        x, mine = self.tokens(counts)
        inputs = [x[mine].clone().requires_grad_(), x.clone().requires_grad_()]
        model.zero_grad(), whole.zero_grad()
        output, want = call(model, inputs[0]), whole(inputs[1])
        output.backward(output.detach() + 1)
        want.backward(want.detach() + 1)
        self.assertEqual(output, want[mine])
        self.assertEqual(inputs[0].grad, inputs[1].grad[mine])
        for name, param in model.named_parameters():
            other = whole.get_parameter(name)
            if not other.requires_grad:
                self.assertIsNone(param.grad)
                continue
            grad = torch.zeros_like(other) if other.grad is None else other.grad
            self.assertEqual(self.total(param), grad, msg=name)

    @parametrize("options", OPTIONS)
    def test_ranks_without_tokens(self, options):
        whole, model = self.pair(**options)
        for counts in STEPS:
            self.check(model, whole, counts)
        with torch.inference_mode():
            x, mine = self.tokens(STEPS[0])
            self.assertEqual(model(x[mine]), whole(x)[mine])

    @parametrize("options", OPTIONS)
    @parametrize("cls", [OwnRunExperts, OwnForward, OwnShared])
    def test_subclass(self, cls, options):
        whole, model = self.pair(cls, **options)
        for counts in STEPS[:2]:
            self.check(model, whole, counts)

    def test_replaced_methods(self):
        # As tracers and accelerate replace them: no bound method, or one of another object.
        whole, _ = self.pair()
        for name in ("forward", "run_experts", "run_routed"):
            for kind in (
                functools.partial,
                lambda f: lambda *args, **kw: f(*args, **kw),
            ):
                layer = copy.deepcopy(whole)
                replaced = kind(getattr(layer, name))
                setattr(layer, name, lambda *args, f=replaced, **kw: -f(*args, **kw))
                model = parallelize_module(
                    layer, self.mesh(("ep",), 4), ExpertParallel()
                )
                x, mine = self.tokens(STEPS[0])
                self.assertEqual(model(x[mine]), -whole(x)[mine], msg=name)
        with mock.patch.object(
            nn.MoE, "run_experts", lambda *args, f=nn.MoE.run_experts: -f(*args)
        ):
            model = self.parallel(whole)
            self.assertEqual(model(x[mine]), whole(x)[mine])

    def test_methods_without_forward(self):
        whole, model = self.pair()
        self.check(
            model, whole, STEPS[0], lambda m, x: m.run_experts(x, *m.route(x)[1:])
        )

    def test_own_experts_are_refused(self):
        # Each rank has some of the weights and ids of all experts.
        class Loop(nn.MoE):
            def run_experts(self, input, topk_indices, topk_weights):
                return input @ self.w_out[0].T @ self.w_in[0]

        class Function(nn.MoE):
            def forward(self, input):
                return F.moe_mlp(input, *self.route(input)[1:], self.w_in, self.w_out)

        for cls in (Loop, Function):
            _, model = self.pair(cls)
            with self.assertRaisesRegex(RuntimeError, "mixed torch.Tensor and DTensor"):
                model(torch.randn(3, D).double())

    @parametrize("name", ["b_in", "b_out"])
    def test_one_bias(self, name):
        torch.manual_seed(0)
        whole = nn.MoE(D, H, E, K, bias=True, dtype=torch.float64)
        setattr(whole, name, None)
        self.check(self.parallel(whole), whole, STEPS[0])

    @parametrize("options", OPTIONS)
    @parametrize("frozen", ["router", "experts"])
    def test_frozen(self, frozen, options):
        whole, _ = self.pair()
        for name, param in whole.named_parameters():
            param.requires_grad_(("router" in name) != (frozen == "router"))
        model = self.parallel(whole, **options)
        for counts in STEPS[:2]:
            self.check(model, whole, counts)

    @parametrize("options", OPTIONS)
    def test_tokens_that_are_not_finite(self, options):
        # They affect neither other ranks nor other tokens of the rank, and nothing waits.
        _, model = self.pair(**options)
        x, _ = self.tokens((4, 4, 4, 4))

        def run(x):
            x = x[4 * self.rank :][:4].clone().requires_grad_()
            y = model(x)
            y.sum().backward()
            return y.detach(), x.grad

        clean = run(x)
        for value in (torch.nan, torch.inf):
            bad = x.clone()
            bad[:4], bad[9] = value, value  # rank 0, and token 1 of rank 2
            good = bad[4 * self.rank :][:4].isfinite().all(1)
            self.assertEqual(good.sum(), (0, 4, 3, 4)[self.rank])
            for got, want in zip(run(bad), clean):
                self.assertEqual(got[good], want[good])
                self.assertFalse(got[~good].isfinite().all(1).any())

    @parametrize("options", OPTIONS)
    @parametrize("kind", ["reentrant", "plain", "save_communication", "selective"])
    def test_checkpoint(self, kind, options):
        # In the first step of a new switch, too.
        whole, model = self.pair(**options)
        kwargs = {"use_reentrant": kind == "reentrant"}
        if kind == "save_communication":
            kwargs["context_fn"] = save_communication()
        elif kind == "selective":
            # A mode of PyTorch's own: what is recomputed may not overtake what is in flight, and
            # what an operator of ours returned may be kept, so that it is not written to.
            names = "mm index_select index sub new_zeros".split()
            saved = [getattr(torch.ops.aten, name) for name in names]
            saved = [getattr(op, op.overloads()[0]) for op in saved]
            saved.append(torch.ops.aten.empty.memory_format)
            kwargs["context_fn"] = functools.partial(
                create_selective_checkpoint_contexts, saved
            )

        def call(model, x):
            return checkpoint(model, x, **kwargs)

        for counts in STEPS[:2]:
            self.check(model, whole, counts, call)

    @parametrize("options", OPTIONS)
    def test_calls_before_backward(self, options):
        whole, model = self.pair(**options)
        others = self.pair(**options)
        x, mine = self.tokens((4, 2, 0, 5))
        for order in ((0, 1, 2), (2, 0, 1)):
            results = []
            for layers in ((model, others[1]), (whole, others[0])):
                part = mine if layers[0] is model else slice(None)
                inputs = [(x[part] + i).requires_grad_() for i in range(3)]
                # The same layer twice, and another one, in any order of backward.
                outputs = [layers[i == 1](x).sum() for i, x in enumerate(inputs)]
                for i in order:
                    outputs[i].backward(retain_graph=True)
                    outputs[i].backward()
                results.append(
                    [x.grad[mine if part != mine else slice(None)] for x in inputs]
                )
            self.assertEqual(*results)

    def test_data_parallel_in_the_same_group(self):
        # Gradients of the dense part are reduced while experts' backward communicates.
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
                self.moe = nn.MoE(D, H, E, K)

            def forward(self, x):
                return self.last(self.moe(self.first(x)).relu())

        torch.manual_seed(0)
        whole, mesh = Net().double(), self.mesh(("ep",), 4)
        for options in ({}, {"num_chunks": 2}, {"capacity": 8}):
            model = copy.deepcopy(whole)
            parallelize_module(model, mesh, {"moe": ExpertParallel(**options)})
            experts = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
            ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            ignore(model, experts)
            parallel = DistributedDataParallel(
                model, process_group=mesh.get_group(), bucket_cap_mb=1e-4
            )
            for counts in STEPS:
                x, mine = self.tokens(counts)
                model.zero_grad(), whole.zero_grad()
                parallel(x[mine]).sum().backward()
                whole(x).sum().backward()
                for name, param in model.named_parameters():
                    want = whole.get_parameter(name).grad
                    if name in experts:
                        self.assertEqual(param.grad.full_tensor(), want, msg=name)
                    else:
                        self.assertEqual(param.grad, want / 4, msg=name)

    @parametrize("options", OPTIONS)
    @parametrize("first", [True, False])
    def test_ranks_that_disagree_about_gradients(self, options, first):
        # Some would send gradients that others do not wait for, so all ranks raise at once.
        for odd in ("input", "router", "experts", "no_grad"):
            _, model = self.pair(**options)
            # Without gradients of their own, tokens pass none of the router's on.
            x = torch.randn(4, D).double().requires_grad_(odd != "router")
            if not first:
                model(x).sum().backward()
            if self.rank == 1:
                x = x.detach() if odd in ("input", "experts") else x
                names = {"router": "router", "experts": ""}.get(odd, "nothing")
                for name, param in model.named_parameters():
                    param.requires_grad_(names not in name)
            message = "requires_grad.* must be the same on all ranks"
            with self.assertRaisesRegex(RuntimeError, message):
                with torch.set_grad_enabled(odd != "no_grad" or self.rank != 1):
                    model(x)

    @parametrize("options", [OPTIONS[0], OPTIONS[3], OPTIONS[4]])
    def test_rank_whose_tokens_change_alone(self, options):
        # Later than the first comparison. Gloo gives who expects more bytes than it gets
        # what was in its memory, and ends the process of who expects less.
        _, model = self.pair(**options)
        x = torch.randn(4, D).double()
        model(x)
        if self.rank == 1:
            model.float()
            x = x.float()
        message = r"row bytes must be the same on all ranks, .* have \["
        with self.assertRaisesRegex(RuntimeError, message):
            model(x)

    def test_errors_of_collectives_name_the_layer(self):
        # Collectives other than all-to-alls, which test_moe_faults.py covers.
        x = torch.randn(4, D).double()
        gather = {"token_switch": "all_gather", "max_tokens": 4}
        for options, collective, phase in (
            ({}, "all_gather_object", "comparison"),
            (gather, "all_gather_object", "comparison"),
            (gather, "all_gather_into_tensor", "dispatch"),
            (gather, "all_to_all_single", "combine"),
        ):
            _, model = self.pair(**options)
            lost = mock.Mock(side_effect=torch.OutOfMemoryError("lost"))
            message = (
                rf"^expert parallel layer \d+ \(MoE\): {phase} failed at level 'flat', group "
                rf"'.*' of ranks \[0, 1, 2, 3\], on rank {self.rank}$"
            )
            threads, store = set(threading.enumerate()), mock.Mock()
            store.set.side_effect = store.check.side_effect = lambda *_: time.sleep(8)
            with (
                mock.patch.object(dist, collective, lost),
                mock.patch.object(c10d, "_get_default_store", return_value=store),
                torch.no_grad(),
            ):
                # The error of the backend, with a note.
                with self.assertRaisesRegex(torch.OutOfMemoryError, "^lost$") as caught:
                    model(x)
            (note,) = caught.exception.__notes__
            self.assertRegex(note, message)
            # No thread still waits for the lost store: it would be inside c10d when Python shuts
            # down, and that aborts the process.
            self.assertEqual(set(threading.enumerate()), threads)

    @parametrize("options", OPTIONS)
    def test_low_rank_adapters(self, options):
        torch.manual_seed(0)
        whole = nn.MoE(D, H, E, K, dtype=torch.float64)
        for p in add_lora(whole, 2):
            nn.init.normal_(p, std=0.3)
        model = self.parallel(whole, **options)
        adapter = model.parametrizations.w_in[0].a
        self.assertEqual(adapter.to_local().shape, (E // 4, 2, D))
        for counts in STEPS[:2]:
            self.check(model, whole, counts)
        x = self.tokens(STEPS[0])[0]
        expected = model(x).detach()
        for name in ("w_in", "w_out"):
            # Unusable after this: ``whole``, whose class is that of its copy.
            remove_parametrizations(model, name)
            out = model(x)
            self.assertEqual(out, expected)
        model.w_in.requires_grad_()
        model(x).square().sum().backward()
        self.assertEqual(model.w_in.grad.placements, model.w_in.placements)
        _, model = self.pair(**options)
        message = (
            "must come before parallelize_module.*'w_in', 'w_out'. are of type DTensor"
        )
        with self.assertRaisesRegex(ValueError, message):
            add_lora(model, 2)
        # PEFT does it in each forward.
        register_parametrization(model, "w_out", nn.Identity())
        with self.assertRaisesRegex(RuntimeError, "'w_out' was parametrized after"):
            model(self.tokens(STEPS[0])[0])
        mesh = self.mesh(("ep", "tp"), 2, 2)
        whole = nn.MoE(D, H, E, K)
        add_lora(whole, 2)
        with self.assertRaisesRegex(ValueError, "'w_in' is parametrized"):
            parallelize_module(whole, mesh, ExpertParallel())

    def test_parametrizations_of_each_expert(self):
        class Parametrization(nn.Module):
            def __init__(self, function, **tensors):
                super().__init__()
                self.function, self.tensors = function, nn.ParameterDict(tensors)

            def forward(self, w):
                return self.function(w, *self.tensors.values())

        def layer(parametrization):
            made = nn.MoE(D, H, E, K, dtype=torch.float64)
            register_parametrization(made, "w_in", parametrization)
            return made

        gain, mask = torch.rand(E, 1, 1).double(), torch.rand(E, 2 * H, D).double()
        weight_norm(normed := nn.MoE(D, H, E, K, dtype=torch.float64), "w_out")
        tanh = layer(Parametrization(torch.tanh))
        gains = layer(Parametrization(torch.mul, gain=gain))
        for whole in (normed, tanh, gains):
            self.check(self.parallel(whole), whole, STEPS[0])
        self.parallel(layer(nn.Dropout(0.5)))  # is compared without noise

        spectral_norm(spectral := nn.MoE(D, H, E, K, dtype=torch.float64), "w_in")
        one = torch.ones(()).double()
        for whole, message in (
            (
                layer(Parametrization(lambda w: w / w.norm())),
                "Parametrization, .* other weights",
            ),
            (
                layer(Parametrization(lambda w: w - w.mean(0))),
                "of 2 experts it gives other",
            ),
            (
                layer(Parametrization(lambda w: w * mask)),
                "it raises The size of tensor",
            ),
            (
                layer(Parametrization(torch.mul, scale=one)),
                "must have the experts on dim 0",
            ),
            (spectral, "'w_in' of MoE .* by _SpectralNorm, .* it raises"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                self.parallel(whole)
        self.assertTrue(spectral.parametrizations.w_in[0].training)

    @parametrize("options", [{}, {"num_chunks": 2}])
    def test_low_rank_adapters_of_grouped_experts(self, options):
        torch.manual_seed(0)
        whole = GroupedExperts()
        for p in add_lora(whole, 2):
            nn.init.normal_(p, std=0.3)
        model = self.parallel(whole, **options)
        low_rank = model.parametrizations.w1[0].a
        self.assertEqual(low_rank.to_local().shape, (E // 4, 2, D))
        counts = torch.arange(E) % 3
        rows = torch.randn(int(counts.sum()) + 1, D).double()
        for m in (whole, model):
            m.zero_grad()
            x = rows.clone().requires_grad_()
            out = m(x, counts)[: counts.sum()]
            out.sin().sum().backward()
            found = [out.detach(), x.grad]
            for name, p in m.named_parameters():
                if p.requires_grad:
                    # All ranks have these rows.
                    grad = p.grad / 4 if isinstance(p, DTensor) else p.grad
                    found.append(grad.full_tensor() if m is model else grad)
            if m is whole:
                want = found
        self.assertEqual(found, want, atol=1e-10, rtol=1e-10)

    def test_no_second_derivative(self):
        # Results of collectives have no graph, so a second derivative would miss terms.
        torch.manual_seed(0)
        experts = GroupedExperts()
        counts = torch.full((E,), 2)
        for options in ({}, {"num_chunks": 2}):
            model = self.parallel(experts, **options)
            x = torch.randn(2 * E, D).double().requires_grad_()
            (grad,) = torch.autograd.grad(
                model(x, counts).square().sum(), x, create_graph=True
            )
            with self.assertRaisesRegex(RuntimeError, "differentiate twice"):
                grad.square().sum().backward()
        # In one process there is a second derivative.
        (grad,) = torch.autograd.grad(
            experts(x, counts).square().sum(), x, create_graph=True
        )
        grad.square().sum().backward()

    def test_transforms_of_torch_func_are_refused(self):
        _, model = self.pair()
        x = torch.randn(2, D).double()
        with self.assertRaisesRegex(RuntimeError, "MoE was called inside a transform"):
            torch.func.grad(lambda x: model(x).sum())(x)

    def test_errors_of_groups_say_what_must_be_equal(self):
        """Such as where one rank alone has chunks, and waits for the group's other ranks."""
        group = dist.new_group()
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
        error = dist.DistStoreError("wait timeout")
        with (
            mock.patch.object(dist, "new_group", side_effect=error),
            self.assertRaises(dist.DistStoreError) as caught,
        ):
            model = nn.MoE(D, H, E, K)
            parallelize_module(model, mesh, ExpertParallel(num_chunks=2))
            model(torch.randn(4, D))
        (note,) = caught.exception.__notes__
        message = (
            rf"ranks \[0, 1, 2, 3\] was not made on rank {self.rank};.* num_chunks"
        )
        self.assertRegex(note, message)
        dist.destroy_process_group(group)

    def test_pickle(self):
        _, model = self.pair()
        with self.assertRaisesRegex(TypeError, "can't be pickled.*save its state_dict"):
            torch.save(model, io.BytesIO())
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        torch.manual_seed(5)
        other = self.parallel(nn.MoE(D, H, E, K).double())
        other.load_state_dict(torch.load(file, weights_only=False))
        x, mine = self.tokens((1, 2, 3, 4))
        self.assertEqual(other(x[mine]), model(x[mine]))

    def test_another_order_of_layers_on_a_rank(self):
        """Each layer would have weights of the other one, and their numbers look right."""
        torch.manual_seed(0)
        model = nn.ModuleList(nn.MoE(D, H, E, K) for _ in range(2))
        for i in (1, 0) if self.rank == 2 else (0, 1):
            parallelize_module(model[i], self.mesh(("ep",), 4), ExpertParallel())
        layer = r"expert parallel layer \d+ \(MoE\)"
        message = (
            "layer must be the same on all ranks, ranks .* have "
            rf"\[({layer}), \1, (?!\1){layer}, \1\]"
        )
        with self.assertRaisesRegex(RuntimeError, message):
            model[0](torch.randn(2, D))

    @parametrize("options", OPTIONS)
    def test_a_rank_leaves_another_layer_out(self, options):
        """Its tokens would be computed by experts of another layer, of the same shape."""
        torch.manual_seed(0)
        layers = [self.parallel(nn.MoE(D, H, E, K), **options) for _ in range(3)]
        x = torch.randn(2, D)
        for layer in layers:
            layer(x)
        kept = layers[1:] if self.rank == 1 else layers[:2]
        with self.assertRaisesRegex(RuntimeError, "layer.* must be the same on all"):
            for layer in kept:
                layer(x)

    @parametrize("recomputes", [False, True])
    @parametrize("options", OPTIONS)
    def test_backwards_of_calls_in_another_order(self, options, recomputes):
        """They would get gradients of another call, in messages of the same size."""
        whole, model = self.pair(**options)
        x = self.tokens((8,) * 4)[0][:8].requires_grad_()
        call = model
        if recomputes:
            call = functools.partial(
                checkpoint, model, use_reentrant=False, context_fn=save_communication()
            )
        message = (
            r"layer 0 \(MoE\): the number \(from 1\) of the call whose backward runs must be "
            r"the same on all ranks, they have \d+ to \d+, this one \d+"
        )
        for _ in range(2):
            losses = [call(x).sum() for _ in range(3)]
            # A later call has another number than those that wait, after a recomputation, too.
            losses.pop(0).backward()
            losses.append(call(x).sum())
            losses = losses[:: -1 if self.rank == 1 else 1]
            with self.assertRaisesRegex(RuntimeError, message):
                losses[0].backward()
        # All ranks know, and no message is on its way.
        self.check(model, whole, (8,) * 4)

    @parametrize("way", ["loss", "backward", "experts", "gradients"])
    @parametrize("options", [OPTIONS[0], *OPTIONS[2:]])
    def test_a_rank_goes_on_alone(self, options, way):
        """Its next message meets another kind of message, for which gloo would end a process."""
        groups = c10d._world.pg_map
        others = set(groups)
        group = dist.new_group()
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
        torch.manual_seed(0)
        layers = [nn.MoE(D, H, E, K) for _ in range(2)]
        for layer in layers:
            parallelize_module(layer, mesh, ExpertParallel(**options))
        odd, x = self.rank == 1, torch.randn(6, D, requires_grad=True)
        fails = mock.patch.object(F, "moe_mlp", side_effect=torch.OutOfMemoryError)

        def step(alone):
            hidden = layers[0](x)
            with fails if alone and way == "experts" else contextlib.nullcontext():
                output = layers[1](hidden)
            if alone and way == "gradients":
                hidden.register_hook(mock.Mock(side_effect=torch.OutOfMemoryError))
            if alone and way == "backward":
                return
            # The loss leaves the last layer out.
            output = hidden if alone and way == "loss" else output
            output.square().sum().backward()

        step(False)
        made = set(groups) - others
        # Only a loss without a layer is known at once.
        seconds = datetime.timedelta(seconds=60 if way == "loss" else 2)
        for group in made:
            dist.set_timeout(seconds, group)
        with self.assertRaises(RuntimeError) as caught:
            with contextlib.suppress(torch.OutOfMemoryError):
                step(odd)
            step(False)
        error = caught.exception
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
        self.assertRegex(said, r"expert parallel layer \d+ \(MoE\)")
        lost = "[Tt]imed out|[Tt]imeout|[Cc]onnection|closed"
        differs = "the layer whose backward runs must be the same on all"
        self.assertRegex(said, differs if way == "loss" else lost)
        for group in made:
            dist.destroy_process_group(group)

    @parametrize("options", OPTIONS)
    def test_shapes_of_input(self, options):
        """One token without its dim, jagged tokens, and tokens that are not contiguous."""
        whole, model = self.pair(**options)
        x = self.tokens((6, 6, 6, 6))[0].view(4, 6, D)[self.rank]
        jagged = torch.nested.nested_tensor_from_jagged(
            x, torch.tensor([0, 2, 2, 5 - self.rank % 2, 6])
        )
        for tokens in (x[0], x[:1].expand(6, D), x[::2], x.view(2, 3, D), x[:0]):
            output = model(tokens)
            self.assertEqual(output, whole(tokens))
            output.detach_()  # as pipeline schedules with a split backward do
        self.assertEqual(model(jagged).values(), whole(x))

    def test_rank_outside_of_the_mesh(self):
        mesh = DeviceMesh("cpu", [0, 2], mesh_dim_names=("ep",))
        module = nn.MoE(D, H, E, K)
        if self.rank in (0, 2):
            parallelize_module(module, mesh, ExpertParallel())
            self.assertEqual(module(torch.randn(2, D)).shape, (2, D))
        else:
            message = rf"must have the rank.*got ranks \[0, 2\] on rank {self.rank}"
            with self.assertRaisesRegex(ValueError, message):
                parallelize_module(module, mesh, ExpertParallel())

    @parametrize("options", [OPTIONS[0], OPTIONS[4]])
    def test_tied_experts_stay_tied(self, options):
        torch.manual_seed(0)
        whole = nn.Sequential(*(nn.MoE(D, H, E, K).double() for _ in range(2)))
        for name in ("w_in", "w_out"):
            setattr(whole[1], name, whole[0].get_parameter(name))
        model = copy.deepcopy(whole)
        parallelize_module(
            model, self.mesh(("ep",), 4), {"*": ExpertParallel(**options)}
        )
        self.assertIs(model[0].w_in, model[1].w_in)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, whole)]
        for counts in STEPS[:2]:
            self.check(model, whole, counts)
            for param in model.parameters():
                if not isinstance(param, DTensor):
                    param.grad = self.total(param)
            for optimizer in optimizers:
                optimizer.step()
        # A mesh each is two parameters.
        other = DeviceMesh(
            "cpu", torch.arange(4).view(2, 2), mesh_dim_names=("a", "ep")
        )
        tied = copy.deepcopy(whole)
        parallelize_module(tied[0], self.mesh(("ep",), 4), ExpertParallel())
        with self.assertRaisesRegex(ValueError, "'w_in' is tied to one .* untie them"):
            parallelize_module(tied[1], other["ep"], ExpertParallel())
        # A tied layer that is not parallelized would train its own parameter.
        with self.assertRaisesRegex(RuntimeError, "'w_(in|out)' is tied .* untie them"):
            tied(self.tokens(STEPS[0])[0]).sum().backward()
        with torch.no_grad():
            tied(self.tokens(STEPS[0])[0])

    @parametrize("chunks", [1, 2])
    def test_groups_are_of_a_mesh(self, chunks):
        # Not of a layer; and stages of other depth make them without the others.
        ranks = torch.tensor([[1, 2], [0, 3]])
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("stage", "ep"))["ep"]
        options = {"token_switch": "hierarchical", "ranks_per_node": 2}
        before = set(c10d._world.pg_names.values())
        layers = []
        for _ in range(1 if self.rank in (1, 2) else 4):
            layer = nn.MoE(D, H, E, K)
            style = ExpertParallel(num_chunks=chunks, **options)
            layers.append(parallelize_module(layer, mesh, style))
            layer(torch.randn(3, D)).sum().backward()
        made = set(c10d._world.pg_names.values()) - before
        self.assertEqual(len(made), 2 * chunks)
        # A group of all ranks has one name on all of them.
        group = dist.new_group(timeout=datetime.timedelta(seconds=20))
        count = torch.ones(())
        dist.all_reduce(count, group=group)
        self.assertEqual(count.item(), 4)
        dist.destroy_process_group(group)

    def test_imports_where_there_is_no_fork(self):
        # As on Windows, whose os and signal lack these, and which has no such modules.
        if self.rank:
            return
        program = """
import os, signal, sys, torch, torch.distributed._token_switch, torch.distributed.checkpoint
from torch.multiprocessing import _atfork
_atfork._register = lambda function: None
for name in "register_at_fork fork forkpty killpg setsid setpgid getuid uname nice waitid".split():
    delattr(os, name)
for name in "sched_getaffinity sysconf getloadavg mkfifo WNOHANG WIFSTOPPED".split():
    delattr(os, name)
for name in "SIGKILL SIGALRM SIGSTOP SIGCONT SIGUSR1 SIGHUP setitimer alarm pthread_kill".split():
    delattr(signal, name)
for name in "fcntl grp posix pty pwd resource syslog termios tty".split():
    sys.modules[name] = None
ours = "torch.distributed._moe", "torch.distributed.tensor.parallel"
for name in [name for name in sys.modules if name.startswith(ours)]:
    del sys.modules[name]
import torch.distributed.tensor.parallel.expert_parallel
import torch.distributed._moe.all_gather, torch.distributed._moe.overlap_schedule
"""
        subprocess.run([sys.executable, "-c", program], check=True, timeout=120)

    def test_all_gather_has_no_chunks(self):
        gather = {"token_switch": "all_gather", "max_tokens": 4}
        for chunks in ({"num_chunks": 2}, {"schedule": OverlapSchedule(2)}):
            with self.assertRaisesRegex(
                ValueError, "'all_gather' has no chunks, got 2"
            ):
                ExpertParallel(**gather, **chunks)


if __name__ == "__main__":
    run_tests()
