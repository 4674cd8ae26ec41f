# Owner(s): ["module: nn"]
"""The outputs of layers with added, removed and merged experts, and of upcycled MLPs."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.moe_state import merge_experts, select_experts, upcycle_mlp
from torch.testing._internal.common_moe import read_page, run_code_blocks
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)


D, H, E, K = 8, 12, 6, 2
OPTIONS = [
    subtest({}, name="plain"),
    subtest({"separate_up": True, "bias": True}, name="bias"),
    subtest({"score": "sigmoid", "balance_bias": True}, name="balance_bias"),
    subtest({"activation": "relu", "shared_hidden_dim": 5}, name="shared"),
]


def make(num_experts=E, top_k=K, **options):
    torch.manual_seed(0)
    layer = nn.MoE(D, H, num_experts, top_k, dtype=torch.float64, **options)
    if layer.balance_bias is not None:
        layer.balance_bias.normal_()
    return layer


def load(state, num_experts, top_k=K, **options):
    layer = make(num_experts, top_k, **options)
    layer.load_state_dict(state)
    return layer


class TestMoeState(TestCase):
    @parametrize("options", OPTIONS)
    def test_removed_experts(self, options):
        """The output of the layer if it never chooses the removed experts."""
        layer, x = make(**options), torch.randn(30, D, dtype=torch.float64)
        kept = [5, 0, 3, 2]
        bias = torch.zeros(E, dtype=torch.float64)
        if layer.balance_bias is not None:
            bias += layer.balance_bias
        bias[[1, 4]] = -torch.inf
        routing = F.moe_topk(layer.router(x), K, bias=bias, **layer.routing)
        expected = layer.run_experts(x, *routing)
        found = load(select_experts(layer.state_dict(), kept), 4, **options)
        self.assertEqual(found(x), expected)

    @parametrize("options", OPTIONS)
    def test_copies(self, options):
        layer, x = make(**options), torch.randn(30, D, dtype=torch.float64)
        state = select_experts(layer.state_dict(), [*range(E), *range(E)])
        found = load(state, 2 * E, 2 * K, **options)
        self.assertEqual(found(x), layer(x))
        again = merge_experts(state, [[e, e + E] for e in range(E)])
        self.assertEqual(again, dict(layer.state_dict()))

    def test_merged_experts(self):
        layer = make(bias=True)
        state = layer.state_dict()
        weights = torch.tensor([1, 3, 0, 2, 2, 9])
        found = merge_experts(state, [[0, 1], [5], [3, 4, 2]], weights=weights)
        self.assertEqual(list(found), list(state))
        for name, old in state.items():
            mean = [(old[0] + 3 * old[1]) / 4, old[5], (old[3] + old[4]) / 2]
            self.assertEqual(found[name], torch.stack(mean))
        mean = merge_experts(state, [range(E)])
        self.assertEqual(mean["w_in"], state["w_in"].mean(0, keepdim=True))

    def test_groups_that_repeat_experts(self):
        state, groups = make().state_dict(), [[0, 0, 1], [2, 3, 3]]
        merged = merge_experts(state, torch.tensor(groups))
        for same in (groups, map(iter, groups)):
            self.assertEqual(merged, merge_experts(state, same), rtol=0, atol=0)
        w = state["w_in"]
        self.assertEqual(merged["w_in"][0], (2 * w[0] + w[1]) / 3)

    def test_experts_that_are_gone(self):
        """NaN and infinities of an expert in no group, or of weight 0, reach nothing."""
        state = make().state_dict()
        bad = {name: tensor.clone() for name, tensor in state.items()}
        for name, tensor in bad.items():
            tensor[3] = -torch.inf if name == "router.weight" else torch.nan
        expected = merge_experts(state, [[0, 1], [2]])
        self.assertEqual(merge_experts(bad, [[0, 1], [2]]), expected)
        weights = torch.tensor([1, 1, 1, 0, 1, 1])
        self.assertEqual(
            merge_experts(bad, [[0, 1, 3], [2]], weights=weights), expected
        )

    def test_low_precision_sums(self):
        state = {"w_in": torch.full((300, 2), 1.0, dtype=torch.bfloat16)}
        self.assertEqual(merge_experts(state, [range(300)])["w_in"], state["w_in"][:1])

    def test_one_layer_of_a_model(self):
        model = nn.Sequential(make(), nn.Linear(D, D), make())
        state = model.state_dict()
        found = select_experts(state, [1], prefix="2.")
        for name, tensor in state.items():
            if name.startswith("2."):
                self.assertEqual(found[name], tensor[1:2])
                self.assertNotEqual(found[name].data_ptr(), tensor.data_ptr())
            else:
                self.assertIs(found[name], tensor)

    def test_names_of_others(self):
        state = {"gate.weight": torch.randn(3, 2), "experts.up": torch.randn(3, 4, 2)}
        names = ("gate.weight", "experts.up")
        found = select_experts(state, [2, 0], names=names)
        self.assertEqual(found, {n: t[[2, 0]] for n, t in state.items()})
        with self.assertRaisesRegex(ValueError, r"has no \['gate'\]"):
            merge_experts(state, [[0]], names=("gate", "experts.up"))

    @parametrize("separate", (False, True))
    @parametrize("bias", (False, True))
    def test_upcycled_mlp_is_the_mlp(self, separate, bias):
        options = {"dtype": torch.float64, "bias": bias}
        gate, up = nn.Linear(D, H, **options), nn.Linear(D, H, **options)
        down = nn.Linear(H, D, **options)
        x = torch.randn(20, D, dtype=torch.float64)
        expected = down(F.silu(gate(x)) * up(x))
        weights = {"w_in": torch.cat([gate.weight, up.weight]), "w_out": down.weight}
        if separate:
            weights |= {"w_in": gate.weight, "w_up": up.weight}
        if bias:
            weights |= {"b_in": torch.cat([gate.bias, up.bias]), "b_out": down.bias}
        state = upcycle_mlp(num_experts=E, **weights)
        self.assertTrue(all(not t.requires_grad for t in state.values()))
        layer = load(state, E, separate_up=separate, bias=bias)
        self.assertEqual(layer(x), expected)
        _, _, ids = layer(x, need_routing=True)
        self.assertGreater(len(ids.unique()), K)

    def test_noise_and_generator(self):
        w_in, w_out = torch.randn(2 * H, D), torch.randn(D, H)
        draws = [
            upcycle_mlp(
                w_in, w_out, E, noise=0.1, generator=torch.Generator().manual_seed(3)
            )
            for _ in range(2)
        ]
        self.assertEqual(*draws, rtol=0, atol=0)
        difference = draws[0]["w_in"] - w_in
        self.assertEqual(difference.std(), 0.1 * w_in.std(), atol=0.02, rtol=0)
        self.assertNotEqual(difference[0], difference[1])

    def test_errors(self):
        state = make().state_dict()
        for bad in (
            [],
            [E],
            [-1],
            torch.arange(E) < 2,
            [True] * E,
            [0.0],
            [[0, 1]],
            [1j],
        ):
            with self.assertRaisesRegex(ValueError, r"be ids in \[0, E\) = \[0, 6\)"):
                select_experts(state, bad)
        with self.assertRaisesRegex(ValueError, "groups must have at least one group"):
            merge_experts(state, [])
        for bad in ([[]], [[0], [6]], [[0.0]], [[True] * E], torch.ones(1, E)):
            with self.assertRaisesRegex(ValueError, r"groups must be ids in \[0, E\)"):
                merge_experts(state, bad)
        for bad in (torch.ones(2), -torch.ones(E), torch.full((E,), torch.inf)):
            with self.assertRaisesRegex(ValueError, r"weights must have shape \(E,\)"):
                merge_experts(state, [[0]], weights=bad)
        with self.assertRaisesRegex(ValueError, "weights of a group are all 0"):
            merge_experts(state, [[0]], weights=torch.zeros(E))
        for bad in ({}, state | {"w_in": state["w_in"][1:]}):
            with self.assertRaisesRegex(ValueError, "the same first dimension E"):
                select_experts(bad, [0])
        adapted = {"parametrizations.w_in.original": state["w_in"]}
        adapted |= {k: w for k, w in state.items() if k != "w_in"}
        with self.assertRaisesRegex(ValueError, "parametrized tensors may have exp"):
            merge_experts(adapted, [[0]])
        for name, rows in (
            ("router.bias", 1),
            ("router.parametrizations.a", 1),
            ("gain", E),
        ):
            other = state | {name: torch.ones(rows)}
            with self.assertRaisesRegex(
                ValueError, rf"or pass names, got \['{name}'\]"
            ):
                select_experts(other, [0])
            names = [n for n in ("router.weight", "w_in", "w_out") if n in state]
            self.assertIs(select_experts(other, [0], names=names)[name], other[name])
        with torch.device("meta"):  # where a user builds the next model
            merged = merge_experts(state, [[0, 1]])
        self.assertEqual(merged["w_in"], state["w_in"][:2].mean(0, keepdim=True))
        quantized = state | {"w_in": state["w_in"].to(torch.float8_e4m3fn)}
        with self.assertRaisesRegex(
            ValueError, "at least 16 bits, got {'w_in': .*dequant"
        ):
            merge_experts(quantized, [[0, 1]])
        mlp = {"w_in": torch.ones(6, 4), "w_out": torch.ones(4, 3)}
        for name, shape in {
            "w_in": (5, 4),
            "w_up": (6, 4),
            "b_in": (3,),
            "b_out": (3,),
        }.items():
            with self.assertRaisesRegex(ValueError, "must have shape"):
                upcycle_mlp(num_experts=2, **mlp | {name: torch.ones(shape)})
        with self.assertRaisesRegex(ValueError, r"w_in must be \(gF, D\)"):
            upcycle_mlp(torch.ones(2, 3, 4), torch.ones(4, 3), 2)

    def test_documentation(self):
        run_code_blocks(read_page(__file__, "nn.utils.moe_state.md"))


instantiate_parametrized_tests(TestMoeState)

if __name__ == "__main__":
    run_tests()
