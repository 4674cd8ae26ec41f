# Owner(s): ["module: nn"]
"""Token rounding: counts, which pairs change, weights, gradients, and use in the MLP."""

import torch
import torch.nn.functional as F
from torch.nn.utils.moe import moe_mlp_rounded, token_rounding
from torch.testing._internal.common_moe import saved_for_backward
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)


ROUNDINGS = ("nearest", "up", "down")


def router(num_tokens, num_experts, k, skew=0.0, seed=0):
    """Scores and renormalised top-k weights; ``skew`` makes low experts popular."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    logits = logits - skew * torch.arange(num_experts)
    scores = logits.softmax(-1)
    weights, indices = scores.topk(k)
    return indices, weights / weights.sum(-1, keepdim=True), scores


def loop(indices, weights, scores, tile, rounding):
    """Expert by expert, in Python: the pairs and weights that rounding must give."""
    num_tokens, num_experts = scores.shape
    pairs = {}
    for expert in range(num_experts):
        wants = {}
        for token in range(num_tokens):
            for slot, choice in enumerate(indices[token].tolist()):
                if choice == expert:
                    wants[token] = weights[token, slot].item()
        count = len(wants)
        down = count // tile * tile
        up = -(-count // tile) * tile
        if rounding == "nearest":
            target = up if count - down >= tile / 2 else down
        else:
            target = up if rounding == "up" else down
        if target > num_tokens:
            target = down
        others = [t for t in range(num_tokens) if t not in wants]
        others.sort(key=lambda t: -scores[t, expert].item())
        takes = sorted(wants, key=lambda t: -wants[t]) + others
        for token in takes[:target]:
            pairs[token, expert] = wants.get(token, scores[token, expert].item())
    return pairs


class TestMoeTokenRounding(TestCase):
    @parametrize("rounding", ROUNDINGS)
    @parametrize("tile", (1, 3, 8, 64))
    @parametrize("skew", (0.0, 0.7))
    def test_against_the_loop(self, rounding, tile, skew):
        routing = router(64, 6, 2, skew)
        rounded = token_rounding(*routing, tile, rounding=rounding)
        token, expert = torch.where(rounded.topk_indices >= 0)
        self.assertEqual(rounded.topk_indices[token, expert], expert)
        actual = {
            (t, e): rounded.topk_weights[t, e].item()
            for t, e in zip(token.tolist(), expert.tolist())
        }
        self.assertEqual(actual, loop(*routing, tile, rounding), rtol=0, atol=0)
        self.assertEqual(rounded.topk_weights[rounded.topk_indices < 0].sum(), 0)

    @parametrize("rounding", ROUNDINGS)
    @parametrize("seed", range(5))
    def test_deviation_is_less_than_a_tile(self, rounding, seed):
        tile = 16
        indices, weights, scores = router(200, 12, 3, skew=0.4, seed=seed)
        rounded = token_rounding(indices, weights, scores, tile, rounding=rounding)
        before = indices.flatten().bincount(minlength=12)
        after = (rounded.topk_indices >= 0).sum(0)
        self.assertEqual(after % tile, torch.zeros_like(after))
        self.assertLess((after - before).abs().max().item(), tile)
        if rounding == "nearest":
            # Halves may go up. The one exception is an expert that nearly all 200 tokens
            # chose, because it cannot have 208.
            room = before + tile // 2 < 208
            self.assertLessEqual((after - before)[room].abs().max().item(), tile // 2)
        if rounding == "down":
            self.assertTrue((after <= before).all())
        self.assertLessEqual(after.sum().item(), rounded.num_rows)
        self.assertEqual(rounded.num_rows % tile, 0)

    def test_a_multiple_stays_as_it_is(self):
        # Each of 4 experts is chosen by exactly 8 tokens.
        indices = torch.arange(32).view(32, 1) % 4
        scores = torch.rand(32, 4, generator=torch.Generator().manual_seed(0))
        weights = torch.rand(32, 1, generator=torch.Generator().manual_seed(1))
        for rounding in ROUNDINGS:
            rounded = token_rounding(indices, weights, scores, 8, rounding=rounding)
            kept = rounded.topk_indices >= 0
            self.assertEqual(torch.where(kept)[1], indices[:, 0])
            self.assertEqual(rounded.topk_weights[kept], weights[:, 0])

    def test_a_chosen_token_precedes_any_other(self):
        # The token that chose expert 0 wants it less than the ones that did not.
        scores = torch.tensor([[0.4, 0.6], [0.4, 0.6], [0.45, 0.55], [0.1, 0.2]])
        indices = torch.tensor([[1], [1], [1], [0]])
        rounded = token_rounding(indices, torch.ones(4, 1), scores, 2, rounding="up")
        self.assertEqual(rounded.topk_indices[:, 0], torch.tensor([-1, -1, 0, 0]))
        self.assertEqual(rounded.topk_weights[:, 0], torch.tensor([0, 0, 0.45, 1]))

    def test_equal_scores_go_to_the_earlier_token(self):
        scores = torch.full((8, 2), 0.5)
        indices = torch.zeros(8, 1, dtype=torch.int64)
        weights = torch.ones(8, 1)
        rounded = token_rounding(
            indices[:5], weights[:5], scores[:5], 4, rounding="down"
        )
        self.assertEqual(rounded.topk_indices[:, 0], torch.tensor([0, 0, 0, 0, -1]))

    @parametrize("dtype", (torch.int32, torch.int64))
    def test_no_expert(self, dtype):
        indices, weights, scores = router(32, 4, 2)
        indices = indices.to(dtype)
        indices[::2, 0] = -1
        indices[1::2, 1] = 4
        rounded = token_rounding(indices, weights, scores, 8, rounding="down")
        self.assertEqual(rounded.topk_indices.dtype, dtype)
        routed = (rounded.topk_indices >= 0).sum().item()
        self.assertGreater(routed, 0)
        self.assertLessEqual(routed, 32)

    def test_experts_that_nobody_chose_stay_empty(self):
        indices = torch.zeros(16, 1, dtype=torch.int64)
        scores = torch.rand(16, 4)
        for rounding in ROUNDINGS:
            rounded = token_rounding(
                indices, torch.ones(16, 1), scores, 4, rounding=rounding
            )
            self.assertEqual(
                (rounded.topk_indices >= 0).sum(0), torch.tensor([16, 0, 0, 0])
            )

    def test_not_training_is_top_k(self):
        indices, weights, scores = router(6, 4, 2)
        rounded = token_rounding(indices, weights, scores, 4, training=False)
        self.assertIs(rounded.topk_indices, indices)
        self.assertIs(rounded.topk_weights, weights)
        self.assertEqual(rounded.num_rows, 12)

    @parametrize("num_tokens", (0, 1, 127))
    def test_not_training_takes_any_number_of_tokens(self, num_tokens):
        routing = router(num_tokens, 4, 2)
        rounded = token_rounding(*routing, 128, training=False)
        self.assertIs(rounded.topk_indices, routing[0])
        self.assertEqual(rounded.num_rows, 2 * num_tokens)

    def test_float64(self):
        # The dtypes that F.moe_topk returns for float64 logits.
        logits = torch.randn(32, 4, dtype=torch.float64)
        indices, weights = F.moe_topk(logits, 2)
        scores = logits.softmax(-1)
        rounded = token_rounding(indices, weights, scores, 8, rounding="up")
        self.assertEqual(rounded.topk_weights.dtype, torch.float64)
        token, expert = torch.where(rounded.topk_indices >= 0)
        actual = {
            (t, e): rounded.topk_weights[t, e].item()
            for t, e in zip(token.tolist(), expert.tolist())
        }
        self.assertEqual(
            actual, loop(indices, weights, scores, 8, "up"), rtol=0, atol=0
        )

    @parametrize("compiled", (False, True))
    @parametrize("bad", (-2, 5))
    def test_ids_out_of_range(self, compiled, bad):
        indices, weights, scores = router(16, 4, 2)
        indices[3, 1] = bad
        function = token_rounding
        if compiled:
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        message = r"token_rounding: topk_indices must be in .* \[-1, 4\]"
        with self.assertRaisesRegex(RuntimeError, message):
            function(indices, weights, scores, 4)

    def test_leading_dimensions_and_no_tokens(self):
        indices, weights, scores = router(24, 5, 2)
        flat = token_rounding(indices, weights, scores, 4)
        shaped = token_rounding(
            indices.view(2, 12, 2), weights.view(2, 12, 2), scores.view(2, 12, 5), 4
        )
        self.assertEqual(shaped.topk_indices, flat.topk_indices.view(2, 12, 5))
        self.assertEqual(shaped.topk_weights, flat.topk_weights.view(2, 12, 5))
        none = token_rounding(indices[:0], weights[:0], scores[:0], 4)
        self.assertEqual(none.topk_indices.shape, (0, 5))
        self.assertEqual(none.num_rows, 0)

    def test_gradients(self):
        indices, weights, scores = router(16, 4, 2)
        weights.requires_grad_()
        scores.requires_grad_()
        rounded = token_rounding(indices, weights, scores, 4, rounding="up")
        grad = torch.rand_like(scores)
        rounded.topk_weights.backward(grad)
        kept = rounded.topk_indices >= 0
        chosen = torch.zeros_like(kept).scatter(1, indices, True)
        # A kept pair has its gradient in topk_weights, an added pair in scores, and a dropped
        # pair has none.
        self.assertTrue((kept & ~chosen).any())
        self.assertEqual(scores.grad, torch.where(kept & ~chosen, grad, 0.0))
        expected = torch.where(kept & chosen, grad, 0.0).gather(1, indices)
        self.assertEqual(weights.grad, expected)

    @parametrize("rounding", ROUNDINGS)
    def test_in_the_mlp(self, rounding):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(64, 8, generator=generator, dtype=torch.float64)
        w_in = torch.randn(6, 32, 8, generator=generator, dtype=torch.float64)
        w_out = torch.randn(6, 8, 16, generator=generator, dtype=torch.float64)
        rounded = token_rounding(*router(64, 6, 2), 16, rounding=rounding)
        indices, weights, num_rows = rounded
        self.assertLess(num_rows, 64 * 6)
        w_in.requires_grad_()
        with saved_for_backward() as saved:
            out = moe_mlp_rounded(x, rounded, w_in, w_out)
        # The pre-activations have the rows of the routing, not E for each token.
        self.assertIn((num_rows, 32), [tuple(t.shape) for t in saved])
        self.assertEqual(out, F.moe_mlp(x, indices, weights, w_in, w_out))
        expected = torch.zeros_like(x)
        for expert in range(6):
            gate, up = F.linear(x, w_in[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, w_out[expert])
            expected += weights[:, expert, None].double() * y
        self.assertEqual(out, expected)

    @parametrize("backend", ("aot_eager", "inductor"))
    def test_compile(self, backend):
        compiled = torch.compile(token_rounding, fullgraph=True, backend=backend)
        for rounding in ROUNDINGS:
            routing = router(64, 6, 2)
            self.assertEqual(
                compiled(*routing, 8, rounding=rounding),
                token_rounding(*routing, 8, rounding=rounding),
            )

    @parametrize(
        "change,message",
        [
            subtest(({"tile": 0}, "tile must be at least 1, got 0"), name="tile_0"),
            subtest(({"tile": 0, "training": False}, "at least 1, got 0"), name="tile_0_eval"),
            subtest(({"tile": 17}, "tile must be between 1 and the number of tokens, 16, got 17"), name="tile_17"),
            subtest(({"rounding": "even"}, r"one of \('nearest', 'up', 'down'\), got 'even'"), name="rounding"),
            subtest(({"topk_weights": torch.rand(16, 3)}, r"\(16, 2\) and \(16, 3\)"), name="weights_shape"),
            subtest(({"scores": torch.rand(15, 4)}, r"dimensions \(16,\) of topk_indices, got \(15, 4\)"), name="scores_shape"),
        ],
    )  # fmt: skip
    def test_errors(self, change, message):
        self._check_error(ValueError, change, message)

    @parametrize(
        "change,message",
        [
            subtest(({"scores": torch.rand(16, 4).double()}, "got torch.float64 and torch.float32"), name="mixed"),
            subtest(({"scores": torch.rand(16, 4).bfloat16()}, "got torch.bfloat16 and torch.float32"), name="scores"),
            subtest(({"tile": 4.0}, "tile must be an int, got 4.0"), name="tile"),
            subtest(({"topk_indices": torch.rand(16, 2)}, "topk_indices must have dtype int32 or int64, got torch.float32"), name="indices"),
        ],
    )  # fmt: skip
    def test_dtype_errors(self, change, message):
        self._check_error(TypeError, change, message)

    def _check_error(self, error, change, message):
        indices, weights, scores = router(16, 4, 2)
        arguments = dict(
            topk_indices=indices, topk_weights=weights, scores=scores, tile=4
        )
        with self.assertRaisesRegex(error, message):
            token_rounding(**{**arguments, **change})


instantiate_parametrized_tests(TestMoeTokenRounding)

if __name__ == "__main__":
    run_tests()
