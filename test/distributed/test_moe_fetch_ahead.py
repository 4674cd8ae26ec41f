# Owner(s): ["oncall: distributed"]
"""Copies of experts that are fetched ahead, kept, rounded on the wire, and compiled."""

import contextlib
import copy
import functools
from unittest import mock

from moe_placement import any_plan, place_experts
from test_moe_fetch import D, E, EXPERTS, H, K, PlacedTest, TOKENS, TOPOLOGY

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._moe.fetch import Copies, Fetcher
from torch.distributed._moe.payload import decode, encode
from torch.distributed._moe.plan import Plan
from torch.distributed._moe.recompute import save_communication
from torch.distributed._moe.wire_bytes import count_wire_bytes
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ExpertPlacement
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode


class Model(nn.Module):
    """Three MoE layers; ``layer`` says how each one is called."""

    def __init__(self):
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.moe = nn.ModuleList(nn.MoE(D, H, E, top_k=K) for _ in range(3))
        self.recompute = None

    def block(self, i, x):
        return x + self.moe[i](self.dense[i](x))

    def blocks(self, x, recompute):
        for i in range(3):
            block = functools.partial(self.block, i)
            x = checkpoint(block, x, **recompute) if recompute else block(x)
        return x

    def forward(self, x):
        if self.recompute == "all in one":
            return checkpoint(self.blocks, x, None, use_reentrant=False)
        return self.blocks(x, self.recompute)


RECOMPUTE = {
    "no": None,
    "plain": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "saves": {"use_reentrant": False, "context_fn": save_communication()},
    "all_in_one": "all in one",
}


@instantiate_parametrized_tests
class TestFetchAhead(PlacedTest):
    def pair(self, style=None, **options):
        torch.manual_seed(0)
        whole = Model().double()
        model = copy.deepcopy(whole)
        options = {"slots_per_rank": 4, "copy_cost": 0.0, "every": None} | options
        mesh = self.mesh(("ep",), 4)
        return whole, model, place_experts(model, mesh, "moe.*", style, **options)

    def use(self, placement, seed):
        for i, layer in enumerate(placement.layers):
            layer.use(any_plan(TOPOLOGY, E, 10 * seed + i))

    def loss(self, model, step):
        x = self.batch(step)
        if any(isinstance(p, DTensor) for p in model.parameters()):
            x = x[6 * self.rank : 6 * self.rank + 6]
        x = x.requires_grad_()  # for reentrant checkpoints
        return (model(x) - x.roll(1, -1)).square().sum() / TOKENS

    def optimizers(self, model):
        experts = [p for p in model.parameters() if p.dim() == 3]
        rest = [p for p in model.parameters() if p.dim() < 3]
        adam = torch.optim.AdamW(experts, lr=1e-2, eps=1e-2, weight_decay=0.1)
        return [adam, torch.optim.SGD(rest, lr=1e-2, momentum=0.9)]

    def train(self, steps=3, micro=1, batched=False, recompute=None, plans=True, **kw):
        """Compares steps with one process. Returns how much was fetched ahead and how much was sent."""
        whole, model, placement = self.pair(**kw)
        both = (whole, model)
        model.recompute = recompute
        optimizers = [self.optimizers(m) for m in both]
        seen = {"ahead": 0, "experts": 0, "expert_grads": 0, "sizes": 0}
        for step in range(steps):
            if plans or not step:
                self.use(placement, step)
            with (
                mock.patch.object(
                    Fetcher, "ahead", autospec=True, side_effect=Fetcher.ahead
                ) as ahead,
                count_wire_bytes(*placement.layers) as wire,
            ):
                for m in both:
                    losses = []
                    for i in range(micro):
                        losses.append(self.loss(m, step * micro + i))
                        if not batched:
                            losses.pop().backward()
                    # Pipelines run all forwards before the backwards.
                    for loss in losses:
                        loss.backward()
            seen["ahead"] += ahead.call_count
            for kind, count in wire.messages["experts"].items():
                seen[kind] += count
            self.sum_gradients(model)
            self.check_same(model, whole, "grad")
            for m, opts in zip(both, optimizers):
                for optimizer in opts:
                    optimizer.step()
                m.zero_grad()
            placement.step()
        self.check_same(model, whole)
        return seen

    @parametrize("recompute", list(RECOMPUTE))
    @parametrize("batched", [False, True])
    def test_same_gradients(self, recompute, batched):
        seen = self.train(
            micro=2, batched=batched, recompute=RECOMPUTE[recompute], plans=not batched
        )
        # The first forward records the order of the layers.
        ahead = 0 if recompute == "saves" else 2 * 5
        self.assertEqual(seen["ahead"], ahead)
        # The count includes results that a checkpoint region returns without sending them again.
        again = recompute != "no"
        self.assertEqual(seen["experts"], 18 * (1 + again))
        self.assertEqual(seen["expert_grads"], 18)

    @parametrize("style", ["chunks", "hierarchical", "static"])
    def test_same_gradients_of_other_switches(self, style):
        styles = {
            "chunks": {"num_chunks": 2},
            "hierarchical": {"token_switch": "hierarchical", "ranks_per_node": 2},
            "static": {"capacity": 24},
        }
        seen = self.train(style=styles[style])
        self.assertEqual(seen["ahead"], 4)

    def test_issued_before_the_experts_of_the_layer_before(self):
        whole, model, placement = self.pair()
        self.use(placement, 0)
        self.loss(model, 0)
        order = []
        run = Copies.forward, Copies.backward
        index = {layer.exchange: layer.index for layer in placement.layers}
        issue = Fetcher._issue

        def noted(direction, copies, *args):
            order.append((("fetch", "return")[direction], index[copies.exchange]))
            return run[direction](copies, *args)

        def issued(fetcher, *args):
            order.append(("issue", index[fetcher.exchange]))
            return issue(fetcher, *args)

        def computes(direction, i, *_):
            order.append((("experts", "experts' backward")[direction], i))

        for i, moe in enumerate(model.moe):
            original = moe.run_routed

            def run_routed(*args, i=i, original=original, **kwargs):
                computes(0, i)
                out = original(*args, **kwargs)
                out.register_hook(functools.partial(computes, 1, i))
                return out

            moe.__dict__["run_routed"] = run_routed
        with (
            mock.patch.object(Fetcher, "_issue", issued),
            mock.patch.object(
                Copies,
                "forward",
                functools.partialmethod(lambda c, *a: noted(0, c, *a)),
            ),
            mock.patch.object(
                Copies,
                "backward",
                functools.partialmethod(lambda c, *a: noted(1, c, *a)),
            ),
        ):
            self.loss(model, 1).backward()
        # This thread issues the fetches, which run on another thread. A fetch is ordered only with
        # what it waits for. The copies, if any, are the last experts of a layer.
        self.assertLess(order.index(("issue", 0)), order.index(("experts", 0)))
        for i in (1, 2):
            self.assertLess(order.index(("issue", i)), order.index(("experts", i - 1)))
            self.assertLess(order.index(("fetch", i - 1)), order.index(("fetch", i)))
            last = len(order) - 1 - order[::-1].index(("experts", i))
            if bool((placement.layers[i].plan.slot_experts[self.rank, 2:] >= 0).any()):
                self.assertLess(order.index(("fetch", i)), last)
        backward = [i for what, i in order if what == "return"]
        self.assertEqual(backward, [2, 1, 0])

    @parametrize("keep", [False, True])
    @parametrize("num_chunks", [1, 2])
    def test_a_mode_of_one_rank(self, num_chunks, keep):
        """If only rank 0 counts FLOPs, all ranks send the same messages as without counting."""
        whole, model, placement = self.pair(style={"num_chunks": num_chunks}, keep=keep)
        self.use(placement, 0)
        # The order of the layers is known after the first forward.
        for step in range(3):
            for m in (whole, model):
                m.zero_grad()
            self.loss(whole, step).backward()
            counter = FlopCounterMode(display=False)
            with contextlib.ExitStack() as stack:
                ahead = mock.Mock(side_effect=Fetcher.ahead)
                stack.enter_context(
                    mock.patch.object(Fetcher, "ahead", lambda *args: ahead(*args))
                )
                wire = stack.enter_context(count_wire_bytes(*placement.layers))
                if self.rank == 0:
                    stack.enter_context(counter)
                self.loss(model, step).backward()
            messages = dict(wire.messages["experts"])
            fetched = 0 if keep and step else 3
            self.assertEqual(messages.pop("experts", 0), fetched)
            self.assertEqual(messages.pop("sizes", 0), fetched)
            self.assertEqual(messages, {"expert_grads": 3})
            self.assertEqual(ahead.call_count, 2 if step else 0)
            self.sum_gradients(model)
            self.check_same(model, whole, "grad")
        self.assertEqual(counter.get_total_flops() > 0, self.rank == 0)

    def test_kept_over_micro_batches(self):
        # One fetch per change of weights, and one gradient per backward.
        for batched in (False, True):
            seen = self.train(steps=3, micro=3, batched=batched, plans=False, keep=True)
            self.assertEqual(seen["experts"], 3 * 3)
            self.assertEqual(seen["expert_grads"], 3 * 3 * 3)

    @parametrize("recompute", ["plain", "reentrant", "saves"])
    def test_kept_with_checkpointing(self, recompute):
        seen = self.train(micro=2, recompute=RECOMPUTE[recompute], keep=True)
        self.assertEqual(seen["expert_grads"], 18)

    def test_kept_in_inference(self):
        whole, model, placement = self.pair(keep=True)

        def check(messages, mode=torch.no_grad):
            with mode(), count_wire_bytes(*placement.layers) as wire:
                x = self.batch(0)
                got = model(x[6 * self.rank : 6 * self.rank + 6])
                want = whole(x)[6 * self.rank : 6 * self.rank + 6]
            self.assertEqual(got, want, atol=1e-10, rtol=1e-10)
            self.assertEqual(wire.messages["experts"].get("experts", 0), messages)

        check(0)
        self.use(placement, 0)
        for _ in range(2):
            check(3 if not _ else 0)
        check(0, torch.inference_mode)
        self.use(placement, 1)
        check(3, torch.inference_mode)
        check(0, torch.enable_grad)
        for m in (whole, model):
            with torch.no_grad():
                m.moe[1].w_in.mul_(2)
        check(1)
        # Writes that the version counter does not see.
        for m in (whole, model):
            for p in (m.moe[2].w_in, m.moe[2].w_out):
                p = p.to_local() if isinstance(p, DTensor) else p
                p.data.mul_(2)
        placement.forget()
        check(3)
        # New memory, possibly at the old address.
        for m in (whole, model):
            state = {k: 3 * v.detach() for k, v in m.state_dict().items()}
            m.load_state_dict(state, assign=True)
        check(3)
        # Copies of a model share its placement layers but not its weights.
        whole, model = copy.deepcopy(whole), copy.deepcopy(model)
        with torch.no_grad():
            for m in (whole, model):
                m.moe[0].w_out.mul_(0.5)
        check(3)

    @parametrize("keep", [False, True])
    def test_inference_comes_first(self, keep):
        """A trainer may evaluate before its first step, and a server makes its model in inference mode."""
        for made_in_inference in (True, False):
            with torch.inference_mode(made_in_inference):
                whole, model, placement = self.pair(every=1, keep=keep)
            with torch.inference_mode():
                for step in range(3):
                    x = self.batch(step)
                    mine = slice(6 * self.rank, 6 * self.rank + 6)
                    self.assertEqual(model(x[mine]), whole(x)[mine])
                    placement.step()
            self.assertTrue(any(layer.moves for layer in placement.layers))
        for step in range(3):
            model.zero_grad(), whole.zero_grad()
            self.loss(model, step).backward(), self.loss(whole, step).backward()
            self.sum_gradients(model)
            self.check_same(model, whole, "grad")
            placement.step()

    @parametrize("keep", [False, True])
    @parametrize("form", ["foreach", "fused"])
    def test_multi_tensor_steps_are_noticed(self, form, keep):
        """Steps are noticed before placement.step(), as an evaluation between the two needs."""
        whole, model, placement = self.pair(keep=keep)
        self.use(placement, 0)
        both = whole, model
        x, mine = self.batch(0), slice(6 * self.rank, 6 * self.rank + 6)
        optimizers = []
        for m in both:
            experts = [p for p in m.parameters() if p.dim() == 3]
            optimizers.append(torch.optim.AdamW(experts, lr=1e-2, **{form: True}))
            self.loss(m, 0).backward()
        for _ in range(2):
            with torch.no_grad():
                # The first block may have fetched for the second one before the step.
                for block in (1, 0):
                    got, want = model.block(block, x[mine]), whole.block(block, x)[mine]
                    self.assertEqual(got, want, atol=1e-9, rtol=1e-9)
            for optimizer in optimizers:
                optimizer.step()

    def test_two_models_of_one_placement(self):
        whole, model, placement = self.pair()
        self.use(placement, 0)
        average = copy.deepcopy(model)
        with torch.no_grad():
            for p in average.parameters():
                p.mul_(1.5)
        mine = slice(6 * self.rank, 6 * self.rank + 6)
        wanted = copy.deepcopy(whole)
        with torch.no_grad():
            for p in wanted.parameters():
                p.mul_(1.5)
        for step in range(3):
            x = self.batch(step)
            # First layer by layer, then one model after the other.
            got, other = x[mine], x[mine]
            with torch.no_grad():
                for i in range(3):
                    got, other = model.block(i, got), average.block(i, other)
                self.assertEqual(got, whole(x)[mine], atol=1e-12, rtol=1e-12)
                self.assertEqual(other, wanted(x)[mine], atol=1e-10, rtol=1e-10)
                got, other = model(x[mine]), average(x[mine])
                self.assertEqual(got, whole(x)[mine], atol=1e-12, rtol=1e-12)
                self.assertEqual(other, wanted(x)[mine], atol=1e-10, rtol=1e-10)

    def test_layers_that_are_left_out(self):
        # Weights that were fetched ahead but not used must not be used after a step.
        whole, model, placement = self.pair()
        self.use(placement, 0)
        both = [(m, self.optimizers(m)) for m in (whole, model)]
        for step, order in enumerate(((0, 1, 2), (0, 2), (0, 1, 2), (1,), (0, 1, 2))):
            for m, optimizers in both:
                x = self.batch(step)
                x = x if m is whole else x[6 * self.rank : 6 * self.rank + 6]
                for i in order:
                    x = m.block(i, x)
                m.zero_grad(set_to_none=False)
                (x.square().sum() / TOKENS).backward()
                for p in m.parameters():
                    if m is model and not isinstance(p, DTensor) and p.grad is not None:
                        dist.all_reduce(p.grad)
                for optimizer in optimizers:
                    optimizer.step()
            if step % 2:
                model.eval()
                with torch.no_grad():
                    model(self.batch(step)[6 * self.rank : 6 * self.rank + 6])
                model.train()
        self.check_same(model, whole)

    def test_loaded_plans_are_compared_first(self):
        """A plan of a later layer that differs is refused before it is fetched ahead."""
        whole, model, placement = self.pair()
        self.use(placement, 0)
        good = placement.state_dict()
        for _ in range(2):
            self.loss(model, 0)
        if self.rank == 0:
            placement.layers[2].use(any_plan(TOPOLOGY, E, 40))
        placement.load_state_dict(placement.state_dict())
        with self.assertRaisesRegex(RuntimeError, "checksum of the loaded plan"):
            self.loss(model, 0)
        placement.load_state_dict(good)
        self.loss(model, 0).backward()
        self.loss(whole, 0).backward()
        self.sum_gradients(model)
        self.check_same(model, whole, "grad")

    def test_data_parallel_around(self):
        whole, model, placement = self.pair(keep=True)
        self.use(placement, 0)
        ignored = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, ignored
        )
        parallel = DistributedDataParallel(model)
        for step in range(4):
            self.loss(whole, step).backward()
            x = self.batch(step)[6 * self.rank : 6 * self.rank + 6]
            loss = (parallel(x) - x.roll(1, -1)).square().sum() / TOKENS
            if step < 3:
                with parallel.no_sync():
                    loss.backward()
            else:
                loss.backward()
        for name, p in model.named_parameters():
            got, want = p.grad, whole.get_parameter(name).grad
            # The mean over ranks of what is summed here.
            got = got.full_tensor() if isinstance(got, DTensor) else got * 4
            self.assertEqual(got, want, atol=1e-9, rtol=1e-9, msg=name)

    @parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
    def test_rounded_on_the_wire(self, dtype):
        _, model, placement = self.pair(wire_dtype=dtype)
        (layer, *_), moe = placement.layers, model.moe[0]
        slots = any_plan(TOPOLOGY, E, 3)
        layer.use(slots)
        weights = {n: moe.get_parameter(n).to_local().detach() for n in EXPERTS}
        whole = {n: moe.get_parameter(n).full_tensor() for n in EXPERTS}
        bytes_of = {}
        for wire_dtype in (None, dtype):
            layer.fetcher.wire_dtype = wire_dtype
            with count_wire_bytes(layer) as wire:
                fetch = layer.fetcher.begin(layer.moves, weights, None)
                got = layer.fetcher.end(fetch, weights)
            bytes_of[wire_dtype] = wire.sent["experts"]["experts"]
            for slot, expert in enumerate(slots.slot_experts[self.rank, 2:].tolist()):
                for name in EXPERTS if expert >= 0 else ():
                    want = whole[name][expert].flatten()[None]
                    if wire_dtype is not None:
                        coded = encode(want, dtype)
                        want = decode(coded, dtype, want.shape[1], want.dtype)
                    got_rows = got[name][slot].flatten()[None]
                    self.assertEqual(got_rows, want, atol=0, rtol=0)
        if bytes_of[None]:
            part = bytes_of[dtype] / bytes_of[None]
            self.assertLess(part, {1: 0.15, 2: 0.26}[dtype.itemsize])
        loss = self.loss(model, 0)
        loss.backward()
        self.assertTrue(all(p.grad is not None for p in model.parameters()))

    @parametrize("capacity", [None, 24])
    def test_in_one_graph(self, capacity):
        # Graphs neither keep copies nor fetch ahead. Another plan is another graph.
        _, model, placement = self.pair(style={"capacity": capacity}, keep=True)
        block = model.moe[0]
        options = {"capture_scalar_outputs": capacity is None}
        with torch._dynamo.config.patch(options):
            torch._dynamo.reset()
            compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
            # test_more_plans_than_graphs has the other plan of sizes of the routing.
            for seed in range(2 if capacity else 1):
                self.use(placement, seed)
                x = self.batch(seed)[6 * self.rank : 6 * self.rank + 6]
                found = []
                for run in (block, compiled):
                    block.zero_grad()
                    mine = x.clone().requires_grad_()
                    y = run(mine)
                    y.sin().sum().backward()
                    grads = [p.grad for p in block.parameters()]
                    grads = [
                        g.to_local() if isinstance(g, DTensor) else g for g in grads
                    ]
                    found.append([y.detach(), mine.grad, *grads])
                self.assertEqual(found[1], found[0], atol=1e-12, rtol=1e-12)

    def test_more_plans_than_graphs(self):
        # The plans differ only on ranks 0 and 1. When these fall back to eager mode, so do the others.
        _, model, placement = self.pair()
        block, home = model.moe[0], placement.layers[0].home
        x = self.batch(0)[6 * self.rank : 6 * self.rank + 6]
        want = block(x).detach()
        options = {"capture_scalar_outputs": True, "recompile_limit": 1}
        with torch._dynamo.config.patch(options):
            torch._dynamo.reset()
            compiled = torch.compile(block, backend="aot_eager")
            for copies in (1, 2, 1):
                slots, quotas = home.slot_experts.clone(), home.quotas.clone()
                slots[1, 2 : 2 + copies] = torch.arange(copies)
                quotas[:copies, 1] = 3
                placement.layers[0].use(Plan(home.topology, slots, quotas))
                got = compiled(x.clone().requires_grad_())
                self.assertEqual(got, want, atol=1e-12, rtol=1e-12)
                got.sum().backward()

    def test_wire_dtype_is_checked(self):
        with self.assertRaisesRegex(ValueError, "wire_dtype .* got torch.float16"):
            ExpertPlacement(slots_per_rank=4, wire_dtype=torch.float16)


if __name__ == "__main__":
    run_tests()
