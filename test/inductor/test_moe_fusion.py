# Owner(s): ["module: inductor"]
"""The rewrite of MoE blocks to _moe_mlp (torch/_inductor/fx_passes/moe_fusion.py)."""

import copy
import threading
from contextlib import nullcontext
from unittest import mock

from moe_fusion_problem import D, E, HIDDEN, K, make_inputs, run, T

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.fx_passes.moe_fusion import moe_fusion
from torch._inductor.fx_passes.moe_match import known_writers, op_name, writers
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)


def gate_swiglu(gate, up):
    return F.silu(gate) * up


def gate_clamped(gate, up):
    return F.silu(gate.clamp(max=2)) * up.clamp(min=-2, max=2)


def gate_oai(gate, up, limit=2.0, alpha=1.702):
    gate, up = gate.clamp(min=None, max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


GATES = {
    "swiglu": gate_swiglu,
    "clamped": gate_clamped,
    "oai": gate_oai,
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "geglu_tanh": lambda gate, up: up * F.gelu(gate, approximate="tanh"),
    "reglu": lambda gate, up: torch.relu(gate) * up,
    "sigmoid": lambda gate, up: gate * torch.sigmoid(gate) * up,
}
PLAIN = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda h: torch.square(F.relu(h)),
}


def halves(h, how):
    return {
        "chunk": lambda: h.chunk(2, dim=-1),
        "split": lambda: h.split(h.shape[-1] // 2, dim=-1),
        "slices": lambda: (h[..., : h.shape[-1] // 2], h[..., h.shape[-1] // 2 :]),
        "unbind": lambda: h.unflatten(-1, (2, -1)).unbind(-2),
        "interleaved": lambda: (h[..., ::2], h[..., 1::2]),
        "pairs": lambda: h.view(h.shape[0], -1, 2).unbind(-1),
    }[how]()


class Experts(nn.Module):
    """Experts as people write them: ``form`` says with what, the rest how."""

    def __init__(
        self,
        form="grouped",
        gate="swiglu",
        split="chunk",
        apart=False,
        bias=False,
        transposed=False,
        combine="sum",
        before=False,
    ):
        super().__init__()
        self.form, self.gate, self.split, self.apart = form, gate, split, apart
        self.transposed, self.combine, self.before = transposed, combine, before
        generator = torch.Generator().manual_seed(0)

        def weight(*shape):
            w = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            return nn.Parameter(
                w.mT.contiguous() if transposed and len(shape) == 3 else w
            )

        self.limit, self.alpha = 2.0, 1.702  # symbols with dynamic shapes
        wide = HIDDEN if apart or gate in PLAIN else 2 * HIDDEN
        self.w_in, self.w_out = weight(E, wide, D), weight(E, D, HIDDEN)
        self.w_up = weight(E, wide, D) if apart else None
        self.b_in = weight(E, wide) if bias else None
        self.b_out = weight(E, D) if bias else None

    def linear(self, rows, weight, bias, experts):
        if self.form == "grouped":
            weight = weight if self.transposed else weight.transpose(-2, -1)
            out = F.grouped_mm(rows, weight, offs=experts[0])
            ids = experts[1]
        else:
            ids = experts
            if self.transposed:
                out = torch.bmm(rows.unsqueeze(1), weight[ids]).squeeze(1)
            else:
                out = torch.bmm(weight[ids], rows.unsqueeze(-1)).squeeze(-1)
        if bias is not None:
            out.add_(bias[ids])
        return out

    def mlp(self, rows, experts):
        h = self.linear(rows, self.w_in, self.b_in, experts)
        if self.gate in PLAIN:
            a = PLAIN[self.gate](h)
        elif self.apart:
            a = GATES[self.gate](h, self.linear(rows, self.w_up, None, experts))
        elif self.gate == "oai":
            a = gate_oai(*halves(h, self.split), self.limit, self.alpha)
        else:
            a = GATES[self.gate](*halves(h, self.split))
        return self.linear(a, self.w_out, self.b_out, experts)

    def forward(self, x, topk_indices, topk_weights):
        top_k = topk_indices.size(-1)
        ids, weights = topk_indices.reshape(-1), topk_weights.reshape(-1)
        if self.form == "batched":
            out = self.mlp(x.repeat_interleave(top_k, dim=0), ids)
            out = out * weights.unsqueeze(-1)
            return out.view(-1, top_k, D).sum(dim=1).to(x.dtype)
        sorted_ids, perm = torch.sort(ids)
        counts = torch.histc(sorted_ids.float(), bins=E, min=0, max=E - 1)
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        token = perm // top_k
        index = token.reshape(-1, 1).expand(-1, D)
        rows = x.gather(0, index) if self.combine == "scatter_add" else x[token]
        column = weights[perm].unsqueeze(-1)
        if self.before:
            rows = (rows * column).to(x.dtype)
        out = self.mlp(rows, (offs, sorted_ids))
        if self.combine == "index_copy":
            slots = torch.zeros_like(out).index_copy(0, perm, out).view(-1, top_k, D)
            y = topk_weights.float()[:, None] @ slots.float()
            return y.squeeze(1).to(x.dtype)
        if self.combine == "bmm":  # torchtitan
            slots = torch.zeros(x.shape[0] * top_k, D, dtype=out.dtype)
            slots[perm] = out
            y = torch.bmm(
                topk_weights.reshape(-1, 1, top_k), slots.reshape(-1, top_k, D)
            )
            return y.to(x.dtype).squeeze(1)
        if not self.before:
            out = (out * column).to(x.dtype)
        if self.combine == "scatter_add":
            return torch.zeros_like(x).scatter_add(0, index, out)
        if self.combine == "index_add":
            return torch.zeros_like(x).index_add(0, token, out)
        if self.combine == "index_add_":
            y = torch.zeros_like(x)
            y.index_add_(0, token, out)
            return y
        if self.combine == "shared":
            return (x * 0.5).index_add(0, token, out)
        if self.combine == "setitem":
            slots = torch.zeros_like(out)
            slots[perm] = out
            return slots.view(-1, top_k, D).sum(dim=1).to(x.dtype)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.size(0))
        return out[inverse].view(-1, top_k, D).sum(dim=1).to(x.dtype)


class SentinelExperts(Experts):
    """Expert parallelism of transformers: ids from E on are sorted last and their rows are masked.

    ``near`` is what differs from that: a mask that may hit rows of experts, or that is no zero.
    """

    def __init__(self, near="", **options):
        super().__init__(**options)
        self.near = near

    def forward(self, x, topk_indices, topk_weights):
        top_k = topk_indices.size(-1)
        ids = torch.where(topk_indices == 5, E, topk_indices).reshape(-1)
        sorted_ids, perm = torch.sort(ids)
        rows = x[perm // top_k]
        asked = ids if self.near == "order" else sorted_ids
        early = asked >= E
        if self.near == "clamped_before_count":
            sorted_ids.clamp_(max=E - 1)
        last = E if self.near == "counted" else E - 1
        counts = torch.histc(sorted_ids.float(), bins=E, min=0, max=last)
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        if self.near == "written":
            sorted_ids.add_(1)
        mask = asked >= (E - 2 if self.near == "expert" else E)
        if self.near == "not_minus_one":
            mask = sorted_ids != -1
        mask = early if self.near == "clamped_before_count" else mask
        mask = mask.unsqueeze(-1)
        if self.near == "mask":
            mask.logical_not_()
        sorted_ids.clamp_(max=E - 2 if self.near == "clamp" else E - 1)
        if self.near == "out_of_place":
            rows = rows.masked_fill(mask, 0.0)
        else:
            rows.masked_fill_(mask, 1.0 if self.near == "rows" else 0.0)
        h = self.linear(rows, self.w_in, self.b_in, (offs, sorted_ids))
        h = h.masked_fill(mask, 0.5 if self.near == "hidden" else 0.0)
        a = GATES[self.gate](*halves(h, self.split))
        out = self.linear(a, self.w_out, self.b_out, (offs, sorted_ids))
        if self.near == "result":
            mask = mask | (perm % 2 == 0).unsqueeze(-1)
        out = out.masked_fill(mask, 0.0) * topk_weights.reshape(-1)[perm].unsqueeze(-1)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.size(0))
        return out[inverse].view(-1, top_k, D).sum(dim=1).to(x.dtype)


class RoutedExperts(Experts):
    """Counts offsets as ``how`` says; the ids may come from a topk."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x, topk_indices, topk_weights):
        how, ids = self.how, topk_indices
        if how.startswith("topk"):
            # The first K of E, or of some that are no expert.
            more = 2 if how == "topk_of_more" else 0
            ids = F.pad(x[:, :E].float().softmax(-1), (0, more)).topk(K)[1]
        if how == "topk_written":
            ids.masked_fill_(ids == 0, E)
        flat = ids.flatten()
        sorted_ids, perm = flat.sort(stable=True, descending=how == "descending")
        if how == "topk_argsort":
            perm = flat.argsort(stable=True)
        if how == "written":
            sorted_ids.clamp_(max=E - 2)
        counted = {"topk_argsort": flat, "unsorted": ids}.get(how, sorted_ids)
        counted = counted.bfloat16() if how == "bfloat16" else counted.float()
        last = E if how in ("topk_to_the_end", "to_the_end") else E - 1
        bins = E - 1 if how == "bins" else E
        counts = torch.histc(counted, bins, 0, last).int()
        counts = F.pad(counts, (0, 1)) if how == "bins" else counts
        if how == "counts_written":
            counts.clamp_(max=3)
        offs = counts.cumsum(0, dtype=torch.int32)
        if how == "topk_offs_written":
            offs.clamp_(max=9)
        if how == "topk_order_written":
            perm.copy_(perm.flip(0))
        token = perm // K
        out = self.mlp(x[token], (offs, None))
        out = out * topk_weights.flatten()[perm].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, token, out)


def rewritten_eager(gm, example_inputs):
    """A backend that runs the rewritten graph as it is."""
    moe_fusion(gm.graph)
    gm.recompile()
    return gm.forward


@instantiate_parametrized_tests
class TestMoEFusion(TestCase):
    def setUp(self):
        super().setUp()
        counters.clear()

    def check(
        self,
        experts,
        full,
        training=False,
        dynamic=False,
        blocks=1,
        backend=rewritten_eager,
    ):
        experts = experts.to(torch.bfloat16)
        inputs = make_inputs(torch.bfloat16)
        exact = copy.deepcopy(experts).double()
        exact_inputs = (inputs[0].double(), inputs[1], inputs[2].double())
        with torch._dynamo.config.patch(disable=True):
            want = run(exact, exact, exact_inputs, training)
            written = run(experts, experts, inputs, training)
        torch._dynamo.reset()
        with config.patch(moe_fusion=True):
            compiled = torch.compile(
                experts, fullgraph=True, dynamic=dynamic, backend=backend
            )
            got = run(compiled, experts, inputs, training)
        self.assertEqual(counters["inductor"]["moe_fusion"], blocks)
        self.assertEqual(counters["inductor"]["moe_fusion_full"], blocks * full)
        eps = torch.finfo(torch.bfloat16).eps
        for ours, theirs, ref in zip(got, written, want, strict=True):
            self.assertEqual(ours.dtype, theirs.dtype)
            error, allowed = (
                (ours.double() - ref).abs().max(),
                (theirs.double() - ref).abs().max(),
            )
            self.assertLessEqual(error, 2 * allowed + 4 * eps * ref.abs().max())

    @parametrize("training", [False, True])
    @parametrize("dynamic", [False, True])
    @parametrize("form", ["grouped", "batched"])
    @parametrize("kind", ["fused", "oai"])
    def test_modes(self, form, kind, training, dynamic):
        options = {"gate": "swiglu"}
        if kind == "oai":
            options = {
                "gate": "oai",
                "split": "interleaved",
                "bias": True,
                "transposed": True,
            }
        self.check(Experts(form, **options), True, training, dynamic)

    @parametrize("form", ["grouped", "batched"])
    @parametrize("gate", [*GATES, *PLAIN])
    def test_activations(self, form, gate):
        self.check(Experts(form, gate=gate), True)

    @parametrize("split", ["split", "slices", "unbind", "interleaved", "pairs"])
    def test_halves(self, split):
        self.check(Experts(split=split), True)

    @parametrize("training", [False, True])
    @parametrize("dynamic", [False, True])
    @parametrize(
        "combine",
        [
            "scatter_add", "index_add", "index_add_", "shared", "setitem", "index_copy",
            "bmm",
        ],
    )  # fmt: skip
    def test_combines(self, combine, training, dynamic):
        self.check(Experts(combine=combine, apart=True), True, training, dynamic)

    @parametrize("near", ["row", "other_order", "part", "read"])
    def test_near_miss_combine(self, near):
        class Near(Experts):
            def forward(self, x, topk_indices, topk_weights):
                ids, perm = topk_indices.flatten().sort(stable=True)
                counts = torch.histc(ids.float(), bins=E, min=0, max=E - 1)
                offs = torch.cumsum(counts, 0, dtype=torch.int32)
                out = self.mlp(x[perm // K], (offs, ids))
                more = 2 if near == "part" else 1
                slots = torch.zeros(x.shape[0] * K * more, D, dtype=out.dtype)
                early = slots.sum() if near == "read" else 0
                slots[perm.flip(0) if near == "other_order" else perm] = out
                slots = slots[: x.shape[0] * K].view(-1, K, D)
                if near == "row":  # one weight for a slot of all tokens
                    weights = topk_weights[:1].reshape(1, 1, K).expand(x.shape[0], 1, K)
                else:
                    weights = topk_weights.reshape(-1, 1, K)
                return torch.bmm(weights, slots).squeeze(1) + early

        self.check(Near(), full=False)

    @parametrize("training", [False, True])
    @parametrize("form", ["grouped", "batched"])
    def test_gate_and_up_apart(self, form, training):
        self.check(Experts(form, apart=True), True, training)

    @parametrize("training", [False, True])
    def test_scores_before_experts(self, training):
        self.check(Experts(before=True, combine="index_add"), False, training)

    @parametrize("form", ["grouped", "batched"])
    def test_inductor(self, form):
        options = {"gate": "oai", "split": "interleaved", "bias": True}
        self.check(Experts(form, **options), True, True, backend="inductor")

    @parametrize("form", ["grouped", "batched"])
    def test_k_and_limits_are_guarded(self, form):
        experts = Experts(form, gate="oai", split="interleaved", bias=True)
        experts = experts.to(torch.bfloat16)
        x, ids, weights = make_inputs(torch.bfloat16)
        options = {"fullgraph": True, "dynamic": True, "backend": rewritten_eager}
        compiled = torch.compile(experts, **options)

        def rewritten(*args):
            """Whether the call compiled the op anew, having checked its result."""
            counters.clear()
            with config.patch(moe_fusion=True), torch.no_grad():
                want = experts(*args)
                self.assertEqual(compiled(*args), want, rtol=0.05, atol=0.05)
            stats = counters["inductor"]
            self.assertEqual(stats["moe_fusion"], stats["moe_fusion_full"])
            return stats["moe_fusion"] > 0

        self.assertTrue(rewritten(x, ids, weights))
        self.assertFalse(rewritten(x[:7], ids[:7], weights[:7]))
        self.assertTrue(rewritten(x, ids[:, :2], weights[:, :2]))
        experts.limit = 0.25
        self.assertTrue(rewritten(x, ids, weights))

    @parametrize("training", [False, True])
    @parametrize("form", ["twice", "none_index", "batched"])
    def test_indices_written_in_other_ways(self, form, training):
        class Other(Experts):
            def forward(self, x, topk_indices, topk_weights):
                ids, weights = topk_indices.flatten(), topk_weights.flatten()
                if form == "batched":
                    rows = x.repeat_interleave(K, 0)
                    h = torch.bmm(self.w_in[ids], rows[..., None]).squeeze(-1)
                    gate, up = h.chunk(2, dim=-1)
                    a = (F.silu(gate) * up)[..., None]
                    out = torch.bmm(self.w_out[ids], a).squeeze(-1)
                    return (out * weights[:, None]).view(-1, K, D).sum(1)
                order = ids.argsort(stable=True)
                counts = torch.histc(ids.float(), bins=E, min=0, max=E - 1)
                offs = (torch.cumsum(counts, 0, dtype=torch.int32), None)
                out = self.mlp(x[order // K], offs)
                if form == "twice":
                    out = out * weights[ids.argsort(stable=True)].unsqueeze(-1)
                    return torch.zeros_like(x).index_add(0, order // K, out)
                out = out * weights[order, None]
                rows = torch.empty_like(order)
                rows[order] = torch.arange(order.size(0))
                return out[rows].view(-1, K, D).sum(1)

        self.check(Other(), full=True, training=training)

    def test_near_miss_index_that_changes_in_between(self):
        class Changed(Experts):
            def forward(self, x, topk_indices, topk_weights):
                ids, weights = topk_indices.flatten(), topk_weights.flatten()
                order = ids.argsort(stable=True)
                counts = torch.histc(ids.float(), bins=E, min=0, max=E - 1)
                offs = (torch.cumsum(counts, 0, dtype=torch.int32), None)
                rows = x[order // K]
                order.copy_(order.flip(0))
                out = self.mlp(rows, offs) * weights.unsqueeze(-1)
                return torch.zeros_like(x).index_add(0, order // K, out)

        self.check(Changed(), full=False)

    @parametrize("training", [False, True])
    @parametrize("bias", [False, True])
    @parametrize("near", ["", "out_of_place"])
    def test_sentinel_rows_are_masked(self, near, bias, training):
        self.check(SentinelExperts(near, bias=bias), True, training)

    @parametrize(
        "near,blocks",
        [
            ("expert", 0),
            ("order", 0),
            ("written", 0),
            ("hidden", 0),
            ("clamp", 0),
            ("clamped_before_count", 0),
            ("counted", 0),
            ("not_minus_one", 0),
            ("mask", 0),
            ("rows", 1),
            ("result", 1),
        ],
    )
    def test_near_miss_masks(self, near, blocks):
        # At most the experts alone are the op's.
        self.check(SentinelExperts(near, bias=True), full=False, blocks=blocks)

    def names_after(self, experts, training=False, full=True):
        """What a block calls when it is rewritten, having checked its results."""
        names = set()

        def backend(gm, example_inputs):
            moe_fusion(gm.graph)
            gm.recompile()
            used = copy.deepcopy(gm.graph)  # which loses what is written in place
            used.eliminate_dead_code()
            names.update(op_name(node) for node in used.nodes)
            return gm.forward

        self.check(experts, full=full, training=training, backend=backend)
        return names & {"sort", "argsort", "histc", "searchsorted", "_moe_permutation"}

    @parametrize("training", [False, True])
    @parametrize("how", ["topk", "topk_argsort", "topk_to_the_end"])
    def test_experts_that_topk_chose_are_permuted_by_the_op(self, how, training):
        self.assertEqual(
            self.names_after(RoutedExperts(how), training), {"_moe_permutation"}
        )

    @parametrize("how", ["sorted", "unsorted", "topk_of_more"])
    def test_sorted_ids_are_searched(self, how):
        self.assertEqual(self.names_after(RoutedExperts(how)), {"sort", "searchsorted"})

    @parametrize(
        "how",
        [
            "bfloat16", "bins", "counts_written", "descending", "to_the_end",
            "topk_offs_written", "topk_order_written", "topk_written", "written",
        ],
    )  # fmt: skip
    def test_near_miss_counts(self, how):
        # Rows that no offset reaches are undefined in some of these: the counts stay as written.
        undefined = how in ("counts_written", "topk_offs_written", "topk_written")
        with mock.patch.object(self, "assertLessEqual") if undefined else nullcontext():
            # An order that is written is any: gather and combine stay as well.
            names = self.names_after(
                RoutedExperts(how), full=how != "topk_order_written"
            )
        self.assertEqual(names, {"sort", "histc"})

    @parametrize("written", ["x", "view", "weights"])
    def test_near_miss_operand_that_is_written(self, written):
        # The op would read it where the block ends.
        class Written(Experts):
            def forward(self, x, topk_indices, topk_weights):
                x, weights = x * 1, topk_weights.flatten() * 1
                ids, perm = topk_indices.flatten().sort(stable=True)
                counts = torch.histc(ids.float(), bins=E, min=0, max=E - 1)
                offs = (torch.cumsum(counts, 0, dtype=torch.int32), None)
                out = self.mlp(x[perm // K], offs)
                out = out * weights[perm, None]
                {"x": x, "view": x[:9], "weights": weights}[written].mul_(2)
                return torch.zeros_like(x).index_add(0, perm // K, out)

        self.check(Written(), full=False)

    def test_searched_offsets_are_those_of_histc(self):
        def offsets(ids):
            perm = ids.flatten().sort(stable=True)
            counts = torch.histc(perm[0].float(), bins=E, min=0, max=E - 1)
            return torch.cumsum(counts, 0, dtype=torch.int32), perm[1]

        inputs = make_inputs(torch.bfloat16)
        experts, seen = Experts().to(torch.bfloat16), []

        def fn(x, ids, weights):
            offs, perm = offsets(ids)
            out = experts.mlp(x[perm // K], (offs, None))
            out = out * weights.flatten()[perm, None]
            return torch.zeros_like(x).index_add(0, perm // K, out)

        def backend(gm, example_inputs):
            moe_fusion(gm.graph)
            (op,) = (n for n in gm.graph.nodes if op_name(n) == "_moe_mlp")
            (end,) = gm.graph.find_nodes(op="output")
            end.args = ((*end.args[0], op.args[3]),)
            gm.recompile()

            def run(*args):
                *outputs, offs = gm.forward(*args)
                seen.append(offs)
                return outputs

            return run

        compiled = torch.compile(fn, fullgraph=True, backend=backend)
        generator = torch.Generator().manual_seed(3)
        for low, high in ((0, E), (-3, E + 3), (E, E + 2), (2, 3), (-9, 0)):
            ids = torch.randint(low, high, (T, K), generator=generator)
            with torch.no_grad():
                compiled(inputs[0], ids, inputs[2])
            self.assertEqual(seen[-1], offsets(ids)[0])

    def test_threads_do_not_share_what_is_written(self):
        def graph(write):
            g = torch.fx.Graph()
            x = g.placeholder("x")
            x.meta["example_value"] = torch.zeros(2)
            if write:
                g.call_method("add_", (x, 1))
            return g, x

        (one, x), (other, y) = graph(True), graph(False)
        with known_writers(one):
            thread = threading.Thread(target=moe_fusion, args=(other,))
            thread.start()
            thread.join()
            self.assertEqual(len(writers(x)), 1)
            with known_writers(other):
                self.assertEqual(writers(y), [])
            self.assertEqual(len(writers(x)), 1)

    def test_off_by_default(self):
        inputs = make_inputs(torch.bfloat16)
        torch.compile(Experts().to(torch.bfloat16), fullgraph=True)(*inputs)
        self.assertEqual(counters["inductor"]["moe_fusion"], 0)

    def check_untouched(self, fn, experts):
        experts = experts.to(torch.bfloat16)
        inputs = make_inputs(torch.bfloat16)
        with torch.no_grad():
            want = fn(experts, *inputs)
            compiled = torch.compile(fn, fullgraph=True, backend=rewritten_eager)
            got = compiled(experts, *inputs)
        self.assertEqual(counters["inductor"]["moe_fusion"], 0)
        self.assertEqual(got, want)

    def test_near_miss_used_activation(self):
        class Hooked(Experts):
            def linear(self, rows, weight, bias, experts):
                if rows.shape[-1] == HIDDEN:
                    self.seen = rows
                return super().linear(rows, weight, bias, experts)

        def fn(m, *args):
            y = m(*args)
            return y, m.seen

        self.check_untouched(fn, Hooked())

    def test_near_miss_other_activation(self):
        class Tanh(Experts):
            def mlp(self, rows, experts):
                h = self.linear(rows, self.w_in, None, experts)
                gate, up = h.chunk(2, -1)
                return self.linear(torch.tanh(gate) * up, self.w_out, None, experts)

        with self.assertLogs("torch._inductor.fx_passes.moe_fusion", "INFO") as logs:
            self.check_untouched(lambda m, *args: m(*args), Tanh())
        self.assertRegex(logs.output[-1], "stays: its activation is not known")

    def test_near_miss_up_before_gate(self):
        class Swapped(Experts):
            def mlp(self, rows, experts):
                up, gate = self.linear(rows, self.w_in, None, experts).chunk(2, -1)
                return self.linear(F.silu(gate) * up, self.w_out, None, experts)

        self.check_untouched(lambda m, *args: m(*args), Swapped())

    def test_near_miss_other_offsets(self):
        class Offset(Experts):
            def linear(self, rows, weight, bias, experts):
                offs, ids = experts
                if rows.shape[-1] == HIDDEN:
                    offs = torch.clamp(offs, max=30)
                return super().linear(rows, weight, bias, (offs, ids))

        def fn(m, *args):  # rows past the last offset are undefined as written
            return m(*args) * 0

        self.check_untouched(fn, Offset())

    @parametrize("training", [False, True])
    @parametrize("one_for_all", [False, True])
    def test_bias_of_grouped_mm(self, one_for_all, training):
        class WithBias(Experts):
            def linear(self, rows, weight, bias, experts):
                bias = bias[0] if one_for_all else bias
                return F.grouped_mm(rows, weight.mT, offs=experts[0], bias=bias)

        self.check(WithBias(bias=True), True, training)

    def test_near_miss_bias_of_other_ids(self):
        class Other(Experts):
            def linear(self, rows, weight, bias, experts):
                offs, ids = experts
                return super().linear(rows, weight, bias, (offs, ids.flip(0)))

        self.check_untouched(lambda m, *args: m(*args), Other(bias=True))

    def test_near_miss_bias_of_the_gate_only(self):
        self.check_untouched(lambda m, *args: m(*args), Experts(apart=True, bias=True))

    def test_near_miss_wrong_limit(self):
        def gate(gate, up):
            return F.silu(gate.clamp(max=2)) * up.clamp(min=-2, max=1)

        GATES["asymmetric"] = gate
        self.addCleanup(GATES.pop, "asymmetric")
        self.check_untouched(lambda m, *args: m(*args), Experts(gate="asymmetric"))

    def test_core_with_other_tokens(self):
        # Rows of one token go to another one: only the experts are the op's.
        class Shifted(Experts):
            def forward(self, x, ids, weights):
                ids, weights = ids.reshape(-1), weights.reshape(-1)
                sorted_ids, perm = torch.sort(ids)
                counts = torch.histc(sorted_ids.float(), bins=E, min=0, max=E - 1)
                offs = torch.cumsum(counts, 0, dtype=torch.int32)
                out = self.mlp(x[perm // K], (offs, sorted_ids))
                out = (out * weights[perm].unsqueeze(-1)).to(x.dtype)
                return torch.zeros_like(x).index_add(0, (perm // K + 1) % T, out)

        self.check(Shifted(), False)

    def test_two_layers_that_share_weights(self):
        class Two(Experts):
            def forward(self, x, ids, weights):
                x = super().forward(x, ids, weights)
                return super().forward(x, ids, weights)

        self.check(Two(), True, training=True, blocks=2)

    def test_sentinel_rows_are_dropped(self):
        # offs that end before the rows do: the rest belongs to no expert.
        module = Experts().to(torch.bfloat16)
        x, ids, weights = make_inputs(torch.bfloat16)
        ids = torch.where(ids == 5, E, ids)  # past the last expert

        def fn(x, ids, weights):
            ids_, perm = torch.sort(ids.reshape(-1))
            counts = torch.histc(ids_.float(), bins=E, min=0, max=E - 1)
            offs = torch.cumsum(counts, 0, dtype=torch.int32)
            out = module.mlp(x[perm // K], (offs, ids_))
            out = out * weights.reshape(-1)[perm].unsqueeze(-1)
            inverse = torch.argsort(perm)
            return out[inverse].view(-1, K, D).sum(dim=1)

        with torch.no_grad():
            compiled = torch.compile(fn, fullgraph=True, backend=rewritten_eager)
            got = compiled(x, ids, weights)
        self.assertEqual(counters["inductor"]["moe_fusion_full"], 1)
        want = F.moe_mlp(x, ids, weights, module.w_in, module.w_out)
        self.assertEqual(got, want)


if __name__ == "__main__":
    run_tests()
