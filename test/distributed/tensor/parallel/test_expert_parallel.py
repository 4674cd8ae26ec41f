# Owner(s): ["oncall: distributed"]
"""ExpertParallel gives the result of one process, on every mesh and kind of module."""

import copy
import dataclasses
import functools
import sys
import unittest
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._moe.all_to_all import (
    grow_and_rerun,
    TokenSwitchAllToAll,
    TokenSwitchHierarchical,
)
from torch.distributed._moe.overlap_schedule import sequential_schedule
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ExpertParallel, parallelize_module
from torch.distributed.tensor.parallel._expert_adapters import (
    ExpertAdapter,
    GroupedExpertsAdapter,
)
from torch.distributed.tensor.parallel.expert_parallel import token_switches
from torch.testing._internal.common_moe import has_cpu_kernel
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
)
from torch.testing._internal.moe_generators import MoeCase, ROUTINGS
from torch.testing._internal.moe_reference import check_close, REFERENCE, UNFUSED


sys.path.append(str(Path(__file__).resolve().parents[2]))

from moe_gloo import GlooTest  # noqa: E402


D, H, E, K, T = 16, 24, 8, 3, 17
# Tokens of each of the four ranks.
SHARES = {"even": (5, 4, 4, 4), "gaps": (9, 0, 7, 1), "all_on_one": (0, 0, 17, 0)}


def case_of(routing):
    """17 tokens with a routing; the skewed one has its own E and K."""
    case = MoeCase("ep", num_tokens=T, num_experts=E, top_k=K)
    if routing == "skewed":
        return dataclasses.replace(case, routing=routing, num_experts=64, top_k=8)
    return dataclasses.replace(case, routing=routing)


class RowMoE(nn.MoE):
    """A router whose logits of a token do not depend on how many there are; fp32 GEMMs
    round differently for a few rows."""

    def route(self, input):
        logits = (input.unsqueeze(-2) * self.router.weight).sum(-1)
        return logits, *F.moe_topk(logits, self.top_k, **self.routing)


class GivenMoE(nn.MoE):
    """Takes the routing it is given."""

    def route(self, input):
        return None, *self.given


class GroupedExperts(nn.Module):
    """Has the interface of torchtitan's experts: rows in expert order, and their counts."""

    def __init__(self, w1, w2, w3):
        super().__init__()
        self.w1, self.w2, self.w3 = map(nn.Parameter, (w1, w2, w3))

    def forward(self, x, num_tokens_per_expert):
        out, begin = [], 0
        for e, count in enumerate(num_tokens_per_expert.tolist()):
            rows = x[begin : begin + count]
            hidden = F.silu(rows @ self.w1[e].T) * (rows @ self.w3[e].T)
            out.append(hidden @ self.w2[e].T)
            begin += count
        return torch.cat([*out, x.new_zeros(len(x) - begin, x.shape[1])])


class SortingMoE(nn.Module):
    """Sorts tokens for ``GroupedExperts`` and weights what comes back."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, ids, weights):
        num_experts = self.experts.w1.shape[0]
        order = ids.flatten().argsort(stable=True)
        order = order[ids.flatten()[order] >= 0]
        counts = torch.bincount(ids.flatten()[order], minlength=num_experts + 1)
        token = order // ids.shape[1]
        rows = self.experts(x[token], counts[:num_experts])
        rows = rows * weights.flatten()[order, None].to(rows.dtype)
        return torch.zeros_like(x).index_add(0, token, rows)


class RoutedExperts(nn.Module):
    """Called with tokens, scores, ids and counts; one fused weight."""

    def __init__(self, w13, w2):
        super().__init__()
        self.w13, self.w2 = nn.Parameter(w13), nn.Parameter(w2)

    def forward(self, x, scores, ids, counts):
        return F.moe_mlp(x, ids, scores, self.w13, self.w2)


class RoutedExpertsAdapter(ExpertAdapter):
    def matches(self, module):
        return isinstance(module, RoutedExperts)

    def expert_parameters(self, module):
        return {"w13": 1, "w2": 2}

    def run(self, module, original, exchange, x, scores, ids, counts):
        def experts(rows, ids, weights, num_rows=None):
            return original(rows, weights, ids, None)

        return exchange(x, ids, scores, experts)


class ExpertParallelTest(GlooTest):
    def ep_mesh(self, ep):
        return self.mesh(("dp_replicate", "ep"), 4 // ep, ep)

    def tokens(self, share):
        """Slice of this rank."""
        begin = sum(SHARES[share][: self.rank])
        return slice(begin, begin + SHARES[share][self.rank])


@dataclasses.dataclass
class Whole:
    """Float64 truth and same-dtype yardstick of output and gradients."""

    truth: dict
    unfused: dict

    @classmethod
    @functools.cache
    def of_case(cls, routing, dtype):
        """Operands of a SwiGLU layer with biases, and what they give."""
        operands = case_of(routing).operands(dtype, bias=True)
        return operands, cls.of(operands)

    @classmethod
    def of(cls, operands, **kwargs):
        args, results = operands.args(), []
        for forward, backward in (REFERENCE, UNFUSED):
            grads = backward(operands.grad_out, *args, **kwargs)._asdict()
            grads = {name.removeprefix("grad_"): g for name, g in grads.items()}
            results.append({"output": forward(*args, **kwargs)[0], **grads})
        return cls(*results)

    def check(self, name, got, dtype, part=slice(None)):
        if got.numel():
            truth, unfused = self.truth[name][part], self.unfused[name][part]
            check_close(got, truth, unfused, dtype, name)


@instantiate_parametrized_tests
class TestExpertParallel(ExpertParallelTest):
    def given_moe(self, operands, activation, interleaved=False):
        """A layer with the operands as parameters."""
        E, D, H = operands.w_out.shape
        layer = GivenMoE(
            *(D, H, E, operands.topk_indices.shape[1]),
            activation=activation,
            bias=operands.b_in is not None,
            gate_interleaved=interleaved,
            dtype=operands.input.dtype,
        )
        with torch.no_grad():
            for name in ("w_in", "w_out", "b_in", "b_out"):
                if getattr(operands, name) is not None:
                    layer.get_parameter(name).copy_(getattr(operands, name))
        return layer

    def run_part(self, layer, operands, part):
        """Output and gradients of some tokens; those of parameters are whole."""
        x = operands.input[part].clone().requires_grad_()
        weights = operands.topk_weights[part].clone().requires_grad_()
        layer.given = operands.topk_indices[part], weights
        layer.zero_grad()
        output = layer(x)
        output.backward(operands.grad_out[part])
        grads = {
            name: p.grad.full_tensor()
            for name, p in layer.named_parameters()
            if name != "router.weight"
        }
        return {"output": output, "input": x.grad, "topk_weights": weights.grad}, grads

    @parametrize("routing", list(ROUTINGS))
    @parametrize("ep", [1, 2, 4])
    @parametrize("combine", ["reduce", "exact"])
    def test_matches_the_float64_loop(self, routing, ep, combine):
        for dtype in (torch.float32, torch.bfloat16):
            operands, whole = Whole.of_case(routing, dtype)
            layer = parallelize_module(
                self.given_moe(operands, "swiglu"),
                self.ep_mesh(ep),
                ExpertParallel(combine=combine),
            )
            for share in SHARES:
                part = self.tokens(share)
                mine, grads = self.run_part(layer, operands, part)
                for name, got in mine.items():
                    whole.check(name, got, dtype, part)
                for name, got in grads.items():
                    whole.check(name, got, dtype)

    @parametrize("activation", ["relu2", "swiglu"])
    def test_tensor_parallel_experts(self, activation):
        mesh = self.mesh(("ep", "tp"), 2, 2)
        kwargs = {"activation": activation}
        if activation == "swiglu":
            kwargs["gate_interleaved"] = True
        for dtype in (torch.float32, torch.bfloat16):
            operands = case_of("zipf").operands(dtype, activation=activation, bias=True)
            whole = Whole.of(operands, **kwargs)
            layer = self.given_moe(operands, activation, activation == "swiglu")
            layer = parallelize_module(layer, mesh, ExpertParallel())
            self.assertEqual(layer.w_out.to_local().shape, (E // 2, D, H // 2))
            # Ranks of tp have the same tokens.
            half = slice(0, 9) if self.rank < 2 else slice(9, T)
            mine, grads = self.run_part(layer, operands, half)
            for name, got in mine.items():
                whole.check(name, got, dtype, half)
            for name, got in grads.items():
                whole.check(name, got, dtype)

    def calls(self, phase, total):
        """Ids of this rank's tokens in each call of a phase."""
        if phase == "decode":
            return [torch.tensor([self.rank + i]) for i in range(0, total, 4)]
        if phase == "alone":
            return [torch.tensor([t] * (self.rank == t % 4)).long() for t in range(7)]
        order = torch.randperm(total, generator=torch.Generator().manual_seed(1))
        shares = (tuple(4 * n for n in share) for share in SHARES.values())
        return [order.split(share)[self.rank] for share in shares]

    def differences(self, split, whole, x, grad, phase):
        """Values of a phase that have not the bits of one process."""
        output, x_grad, routing = whole
        found = set()
        for tokens in self.calls(phase, len(x)):
            mine = x[tokens].requires_grad_(phase == "training")
            with torch.inference_mode(phase != "training"):
                got = {"output": split(mine)}
                got |= zip(("logits", "ids", "weights"), split.route(mine))
            want = {"output": output, **routing}
            if phase == "training":
                got["output"].backward(grad[tokens])
                got["input"], want["input"] = mine.grad, x_grad
            for name, value in got.items():
                if not torch.equal(value, want[name][tokens]):
                    found.add(name)
        return found

    @unittest.skipUnless(
        has_cpu_kernel(), "the composite makes no promise about other tokens"
    )
    @parametrize("ep", [1, 2, 4])
    @parametrize("phase", ["training", "prefill", "decode", "alone"])
    def test_exact_gives_a_token_the_same_bits_everywhere(self, phase, ep):
        """Router and experts, whatever the other tokens are, on however many ranks."""
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            x, grad = torch.randn(2, 4 * T, 64).to(dtype)
            layer = RowMoE(64, 48, E, K, shared_hidden_dim=16, dtype=dtype)
            leaf = x.clone().requires_grad_()
            output, *routing = layer(leaf), *layer.route(leaf)
            output.backward(grad)
            whole = output, leaf.grad, dict(zip(("logits", "ids", "weights"), routing))
            found = {}
            for combine in ("exact", "reduce"):
                split = parallelize_module(
                    copy.deepcopy(layer),
                    self.ep_mesh(ep),
                    ExpertParallel(combine=combine),
                )
                found[combine] = self.differences(split, whole, x, grad, phase)
            self.assertEqual(found["exact"], set(), dtype)
            # Shows that the comparison can fail: this one adds in another order.
            failed = torch.tensor(len(found["reduce"]))
            dist.all_reduce(failed)
            self.assertEqual(bool(failed), ep > 1, dtype)

    @parametrize("ep", [1, 2, 4])
    def test_exact_gives_the_gradients_of_one_process(self, ep):
        torch.manual_seed(0)
        x, grad = torch.randn(T, D), torch.randn(T, D)
        layer = RowMoE(D, H, E, K, shared_hidden_dim=8)
        split = parallelize_module(
            copy.deepcopy(layer), self.ep_mesh(ep), ExpertParallel(combine="exact")
        )
        layer(x).backward(grad)
        for share in SHARES:
            part = self.tokens(share)
            split.zero_grad()
            split(x[part]).backward(grad[part])
            for name, p in split.named_parameters():
                if isinstance(p, DTensor):
                    self.assertEqual(p.grad.placements, p.placements)
                    got = p.grad.full_tensor()
                else:
                    # Router and shared experts belong to data parallelism.
                    got = p.grad.clone()
                    dist.all_reduce(got)
                self.assertEqual(got, layer.get_parameter(name).grad, msg=name)

    @parametrize(
        "names,shape,ep",
        [
            subtest((("ep",), (4,), 4), name="ep4"),
            subtest((("dp_replicate", "ep"), (2, 2), 2), name="ep2"),
            subtest((("ep", "tp"), (2, 2), 2), name="ep2_tp2"),
        ],
    )
    @parametrize("routing", ["zipf", "sentinels", "one_expert"])
    def test_grouped_experts(self, names, shape, ep, routing):
        operands = case_of(routing).operands()
        gate, up = operands.w_in.chunk(2, dim=1)
        layer = SortingMoE(GroupedExperts(gate, operands.w_out, up))
        mesh = self.mesh(names, *shape)
        parallelize_module(layer, mesh, {"experts": ExpertParallel(combine="exact")})
        self.assertEqual(layer.experts.w1.to_local().shape[0], E // ep)
        whole = Whole.of(operands)
        part = self.tokens("gaps")
        if "tp" in names:
            part = slice(0, 9) if self.rank < 2 else slice(9, T)
        x = operands.input[part].clone().requires_grad_()
        weights = operands.topk_weights[part].clone().requires_grad_()
        ids = operands.topk_indices[part]
        # Both "no expert" ids are left out by the sort.
        output = layer(x, ids.masked_fill(ids == E, -1), weights)
        output.backward(operands.grad_out[part])
        grads = {
            name: p.grad.full_tensor() for name, p in layer.experts.named_parameters()
        }
        whole.check("output", output, torch.float32, part)
        whole.check("input", x.grad, torch.float32, part)
        whole.check("topk_weights", weights.grad, torch.float32, part)
        whole.check("w_in", torch.cat([grads["w1"], grads["w3"]], 1), torch.float32)
        whole.check("w_out", grads["w2"], torch.float32)

    def test_a_module_with_its_own_adapter(self):
        operands = case_of("uniform").operands()
        layer = RoutedExperts(operands.w_in, operands.w_out)
        style = ExpertParallel(adapter=RoutedExpertsAdapter())
        parallelize_module(layer, self.ep_mesh(4), style)
        part = self.tokens("even")
        x = operands.input[part].clone().requires_grad_()
        weights, ids = operands.topk_weights[part], operands.topk_indices[part]
        output = layer(x, weights, ids, None)
        output.backward(operands.grad_out[part])
        grads = {name: p.grad.full_tensor() for name, p in layer.named_parameters()}
        whole = Whole.of(operands)
        whole.check("output", output, torch.float32, part)
        whole.check("input", x.grad, torch.float32, part)
        whole.check("w_in", grads["w13"], torch.float32)
        whole.check("w_out", grads["w2"], torch.float32)

    def test_switch_and_schedule_of_ones_own(self):
        torch.manual_seed(0)
        x, layer = torch.randn(T, D), nn.MoE(D, H, E, K, shared_hidden_dim=8)
        calls = []

        def switch(mesh, num_experts):
            calls.append((mesh.mesh_dim_names, num_experts))
            return TokenSwitchAllToAll(mesh.get_group(), num_experts, combine="exact")

        def schedule(switch, tokens, ids, weights, experts, shared):
            """Shared experts first, tokens in two chunks."""
            first = shared()
            routed = [
                sequential_schedule(switch, *chunk, experts, None)[0]
                for chunk in zip(*(t.tensor_split(2) for t in (tokens, ids, weights)))
            ]
            return torch.cat(routed), first

        split = copy.deepcopy(layer)
        style = ExpertParallel(token_switch=switch, schedule=schedule)
        parallelize_module(split, self.ep_mesh(4), style)
        self.assertEqual(calls, [(("ep",), E)])
        for share in SHARES:
            part = self.tokens(share)
            self.assertEqual(split(x[part]), layer(x)[part])

    def test_static_capacity_grows(self):
        torch.manual_seed(0)
        x, layer = torch.randn(T, D), nn.MoE(D, H, E, K)
        split = parallelize_module(
            copy.deepcopy(layer), self.ep_mesh(4), ExpertParallel(capacity=1)
        )
        part = self.tokens("all_on_one")
        (switch,) = token_switches(split)
        split(x[part])
        with self.assertRaisesRegex(RuntimeError, "needed .* rows but capacity is 1"):
            switch.check_overflow()
        output = grow_and_rerun(token_switches(split), lambda: split(x[part]).detach())
        self.assertEqual(output, layer(x)[part])

    def test_overflow_of_several_layers(self):
        """One check reports all of a step, and a layer that did not run has none."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.MoE(D, H, E, K), nn.MoE(D, H, E, K))
        parallelize_module(model, self.ep_mesh(4), {"*": ExpertParallel(capacity=8)})
        model(torch.randn(40, D))
        with self.assertRaisesRegex(RuntimeError, "needed .* rows but capacity is 8"):
            ExpertParallel.check_overflow(model)
        x = torch.randn(4, D)
        for run in (model, model[0], lambda x: x):
            run(x)
            ExpertParallel.check_overflow(model)
        output = ExpertParallel.grow_and_rerun(model, lambda: model[0](x).detach())
        self.assertEqual(output, model[0](x))
        for switch in token_switches(model):
            self.assertEqual(switch.capacity, 8)

    def test_leading_dims_names_and_copies(self):
        torch.manual_seed(0)
        x = torch.randn(2, 3, D)
        layer = nn.MoE(D, H, E, K, bias=True)
        names = list(layer.state_dict())
        split = parallelize_module(
            copy.deepcopy(layer), self.ep_mesh(4), {"": ExpertParallel()}
        )
        self.assertEqual(list(split.state_dict()), names)
        self.assertEqual(split.w_in.placements[-1], Shard(0))
        self.assertEqual(split.w_in.shape, layer.w_in.shape)
        self.assertFalse(isinstance(split.router.weight, DTensor))
        want = layer(x)
        for module in (split, copy.deepcopy(split)):
            self.assertEqual(module(x), want)
        # A copy has its own parameters.
        twin = copy.deepcopy(split)
        with torch.no_grad():
            twin.w_out.zero_()
            twin.b_out.zero_()
        self.assertEqual(twin(x), torch.zeros_like(x))
        self.assertEqual(split(x), want)

    def test_experts_made_on_meta_differ(self):
        torch.manual_seed(0)
        with torch.device("meta"):
            layer = nn.MoE(D, H, E, K)
        parallelize_module(layer, self.ep_mesh(4), ExpertParallel())
        layer.to_empty(device="cpu")
        layer.reset_parameters()
        rows = layer.w_in.full_tensor()
        for e in range(1, E):
            self.assertNotEqual(rows[e], rows[0])
        # What is not distributed is equal.
        mine = layer.router.weight.detach()
        everywhere = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(everywhere, mine)
        for other in everywhere:
            self.assertEqual(other, mine, atol=0, rtol=0)

    def test_experts_have_no_memory_for_slots_of_other_ranks(self):
        layer = nn.MoE(D, H, E, K)
        parallelize_module(layer, self.ep_mesh(4), ExpertParallel())
        rows, x = [], torch.randn(20, D)
        original = F.moe_mlp

        def recording(*args, num_rows, **kwargs):
            rows.append(num_rows)
            return original(*args, num_rows=num_rows, **kwargs)

        with mock.patch.object(F, "moe_mlp", recording):
            layer(x)
        _, ids, _ = layer.route(x)
        counts = torch.bincount(ids.flatten() // (E // 4), minlength=4)
        dist.all_reduce(counts)
        self.assertEqual(rows, [counts[self.rank].item()])

    def test_frozen_experts(self):
        layer = nn.MoE(D, H, E, K).requires_grad_(False)
        layer.router.requires_grad_()
        split = parallelize_module(layer, self.ep_mesh(4), ExpertParallel())
        self.assertFalse(split.w_in.requires_grad)
        split(torch.randn(4, D)).sum().backward()
        self.assertIsNotNone(split.router.weight.grad)
        self.assertIsNone(split.w_in.grad)

    def test_ranks_start_from_the_parameters_of_rank_0(self):
        torch.manual_seed(self.rank)
        layer = nn.MoE(D, H, E, K)
        want = layer.w_in.detach().clone()
        dist.broadcast(want, 0)
        parallelize_module(layer, self.ep_mesh(4), ExpertParallel())
        self.assertEqual(layer.w_in.full_tensor(), want)

    def test_numbers_are_integers(self):
        for name, switch in (
            ("num_chunks", "all_to_all"),
            ("ranks_per_node", "hierarchical"),
            ("max_tokens", "all_gather"),
        ):
            for value in (0, 2.0, True, "2"):
                message = f"{name} must be an integer .* 1, got {value!r}"
                with self.assertRaisesRegex(ValueError, message):
                    ExpertParallel(token_switch=switch, **{name: value})

    def test_errors(self):
        mesh = self.ep_mesh(4)["ep"]
        two_dims = self.mesh(("ep", "tp"), 2, 2)

        def apply(module, mesh=mesh, **kwargs):
            return parallelize_module(module, mesh, ExpertParallel(**kwargs))

        def moe(experts=E, hidden=H, **kwargs):
            return nn.MoE(D, hidden, experts, 2, **kwargs)

        with self.assertRaisesRegex(
            ValueError, r"of the 4 ranks .* got 6 .* 4 or 8 are .* \[1, 2, 3\]"
        ):
            apply(moe(6))
        with self.assertRaisesRegex(ValueError, r"got 3 .* MoE\. 4 are .* \[1, 3\]"):
            apply(moe(3))
        with self.assertRaisesRegex(ValueError, "all 24 gate rows before the up rows"):
            apply(moe(), two_dims)
        with self.assertRaisesRegex(
            ValueError, r"dim 1 of 'w_in' .* multiple of the 2 ranks .* \(8, 7, 16\)"
        ):
            apply(moe(hidden=7, activation="relu"), two_dims)
        odd = moe(hidden=7, gate_interleaved=True)
        with self.assertRaisesRegex(ValueError, "dim 2 of 'w_out' .* of the 2 ranks"):
            apply(odd, two_dims)
        with self.assertRaisesRegex(ValueError, r"1-D, or .* dims \('x', 'y'\)"):
            apply(moe(), self.mesh(("x", "y"), 2, 2))
        with self.assertRaisesRegex(ValueError, "ep_dim='y'.*'tp'"):
            apply(moe(), two_dims, ep_dim="y")
        with self.assertRaisesRegex(NotImplementedError, "got Linear with parameters"):
            apply(nn.Linear(4, 4))
        with self.assertRaisesRegex(AttributeError, "parameter 'gate' in MoE"):
            apply(moe(), adapter=GroupedExpertsAdapter("gate", "down", "up"))
        experts = GroupedExperts(*(torch.zeros(n, 4, 4) for n in (8, 8, 4)))
        with self.assertRaisesRegex(ValueError, r"on dim 0, got shapes .*\(4, 4, 4\)"):
            apply(experts)
        with self.assertRaisesRegex(TypeError, "a TokenSwitch, got int"):
            apply(moe(), token_switch=lambda mesh, num_experts: 3)
        with self.assertRaisesRegex(ValueError, "'reduce' or 'exact', got 'mean'"):
            apply(moe(), combine="mean")
        with self.assertRaisesRegex(ValueError, "are options of 'all_to_all' and"):
            ExpertParallel(token_switch=TokenSwitchAllToAll, capacity=3)
        with self.assertRaisesRegex(
            ValueError, "token_switch must be one of .* 'ring'"
        ):
            ExpertParallel(token_switch="ring")
        with self.assertRaisesRegex(ValueError, "max_tokens goes with .*'all_gather'"):
            ExpertParallel(max_tokens=3)
        with self.assertRaisesRegex(ValueError, "divide the 4 ranks .* got 3"):
            apply(moe(), token_switch="hierarchical", ranks_per_node=3)
        pairs = self.mesh(("a", "b"), 2, 2)
        with self.assertRaisesRegex(
            ValueError, r"has \[0, 1, 2, 3\], .* has \[\d, \d\]"
        ):
            apply(
                moe(),
                token_switch=lambda _, E: TokenSwitchAllToAll(
                    pairs["b"].get_group(), E
                ),
            )
        transposed = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]))
        with self.assertRaisesRegex(
            ValueError, r"mesh has \[0, 1, 2, 3\].* \[0, 2, 1, 3\]"
        ):
            apply(
                moe(), token_switch=lambda _, E: TokenSwitchHierarchical(transposed, E)
            )
        with self.assertRaisesRegex(ValueError, "sequence_parallel_mesh must be 1-D"):
            ExpertParallel(sequence_parallel_mesh=two_dims)
        split = apply(moe())
        with self.assertRaisesRegex(RuntimeError, "already expert parallel"):
            apply(split)
        sharded = moe()
        parallelize_module(sharded, mesh, ExpertParallel())
        del sharded._expert_parallel
        with self.assertRaisesRegex(ValueError, "'w_in' is already distributed"):
            apply(sharded)
        x = DTensor.from_local(torch.randn(4, D), mesh, [Shard(0)])
        with self.assertRaisesRegex(TypeError, "input must be .* plain tensor"):
            split(x)
        split.w_in = nn.Parameter(torch.zeros(2, 2 * H, D))
        with self.assertRaisesRegex(RuntimeError, "'w_in' must be the DTensor"):
            split(torch.randn(4, D))


if __name__ == "__main__":
    run_tests()
