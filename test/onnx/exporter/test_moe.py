# Owner(s): ["module: onnx"]
"""MoE ops exported to ONNX with a dynamic number of tokens, run by onnxruntime, beside eager."""

import importlib.util
import itertools
import os
import sys
import unittest

import torch
import torch.nn.functional as F
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_reference import ACTIVATIONS


# A folder with the packages, which bring more than they need into an environment.
if folder := os.environ.get("MOE_ONNX_PACKAGES"):
    sys.path.append(folder)
PACKAGES = ("onnxscript", "onnxruntime")
missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
if missing:
    raise unittest.SkipTest(
        f"needs {' and '.join(missing)}; .ci/long onnx installs them"
    )

D, H, E, K = 8, 6, 5, 2
NUM_TOKENS = (0, 1, 2, 33)


def exported(module, example):
    """A function of the tensors that runs the model of ``module`` in onnxruntime."""
    import onnxruntime

    tokens = torch.export.Dim("tokens", min=0)
    shapes = tuple({0: tokens} for _ in example)
    if isinstance(module, Call):
        shapes = (shapes,)  # of *args
    with torch.no_grad():
        program = torch.onnx.export(
            module.eval(), example, dynamo=True, dynamic_shapes=shapes, verbose=False
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), options
    )

    def run(*tensors):
        names = [each.name for each in session.get_inputs()]
        feed = dict(zip(names, (t.numpy() for t in tensors), strict=True))
        return [torch.from_numpy(each) for each in session.run(None, feed)]

    return run


class Call(torch.nn.Module):
    """A functional with weights that are parameters."""

    def __init__(self, function, **weights):
        super().__init__()
        self.function = function
        self.weights = torch.nn.ParameterDict(weights)

    def forward(self, *args):
        return self.function(*args, **dict(self.weights.items()))


class TestMoeOnnx(TestCase):
    def setUp(self):
        super().setUp()
        torch.manual_seed(0)

    def _same(self, module, inputs_of, **tolerance):
        run = exported(module, inputs_of(7))
        for num_tokens in NUM_TOKENS:
            inputs = inputs_of(num_tokens)
            with torch.no_grad():
                expected = module(*inputs)
            if isinstance(expected, torch.Tensor):
                expected = (expected,)
            for actual, wanted in zip(run(*inputs), expected, strict=True):
                self.assertEqual(actual, wanted, **tolerance)

    @parametrize("score", ("softmax", "sigmoid"))
    @parametrize("form", ("plain", "bias", "groups", "bias_groups"))
    def test_topk(self, score, form):
        options = {"score": score, "normalize": form != "bias", "scale": 2.5}
        if "groups" in form:
            options |= {"num_groups": 4, "top_groups": 2}
        weights = {"bias": torch.randn(8) * 0.1} if "bias" in form else {}

        def function(logits, bias=None):
            return F.moe_topk(logits, 3, bias=bias, **options)

        def inputs(num_tokens):
            logits = torch.randn(num_tokens, 8)
            logits[1::2] = logits[1::2].round()  # equal scores
            return (logits,)

        self._same(Call(function, **weights), inputs)

    @parametrize("normalize", (True, False))
    def test_topk_of_low_scores(self, normalize):
        def function(logits):
            return F.moe_topk(logits, 3, score="sigmoid", normalize=normalize)

        def inputs(num_tokens):
            low = -torch.linspace(15, 110, max(num_tokens, 1))[:num_tokens]
            return (low[:, None] - torch.rand(num_tokens, 8).mul(30).round(),)

        self._same(Call(function), inputs)

    def _routed(self, num_tokens):
        ids = torch.randint(-1, E + 1, (num_tokens, K))
        ids[:, 0] = ids[:, 0].clamp(max=1)  # experts without tokens
        return torch.randn(num_tokens, D), ids, torch.rand(num_tokens, K)

    @parametrize("activation", ACTIVATIONS)
    @parametrize("biased", (False, True))
    def test_mlp(self, activation, biased):
        gates = 2 if "glu" in activation else 1
        weights = {"w_in": torch.randn(E, gates * H, D), "w_out": torch.randn(E, D, H)}
        if biased:
            weights |= {"b_in": torch.randn(E, gates * H), "b_out": torch.randn(E, D)}
        limit = {"limit": 0.5} if activation in ("swiglu", "geglu") else {}

        def function(x, ids, scores, **weights):
            return F.moe_mlp(x, ids, scores, **weights, activation=activation, **limit)

        self._same(Call(function, **weights), self._routed, atol=2e-5, rtol=2e-5)

    @parametrize("form", ("interleaved", "separate", "unweighted", "float16"))
    def test_mlp_forms(self, form):
        options, dtype = {}, torch.float32
        w_in = torch.randn(E, 2 * H, D)
        weights = {"w_in": w_in, "w_out": torch.randn(E, D, H)}
        if form == "interleaved":
            options["gate_interleaved"] = True
        elif form == "separate":
            weights |= {"w_in": w_in[:, :H].clone(), "w_up": w_in[:, H:].clone()}
        elif form == "float16":
            dtype = torch.float16
            weights = {name: w.to(dtype) * 0.3 for name, w in weights.items()}

        def function(x, ids, scores, **weights):
            scores = None if form == "unweighted" else scores
            return F.moe_mlp(x, ids, scores, **weights, **options)

        def inputs(num_tokens):
            x, ids, scores = self._routed(num_tokens)
            return (x.to(dtype), ids, scores)

        tolerance = 2e-3 if dtype == torch.float16 else 2e-5
        self._same(Call(function, **weights), inputs, atol=tolerance, rtol=tolerance)

    @parametrize("shared", (None, 4))
    def test_module(self, shared):
        layer = torch.nn.MoE(
            D, H, E, K, bias=True, balance_bias=True, shared_hidden_dim=shared
        )

        def inputs(num_tokens):
            return (torch.randn(num_tokens, D),)

        self._same(layer, inputs, atol=1e-5, rtol=1e-5)

    def test_no_token_has_an_expert(self):
        weights = {"w_in": torch.randn(E, 2 * H, D), "w_out": torch.randn(E, D, H)}
        run = exported(Call(F.moe_mlp, **weights), self._routed(7))
        for num_tokens, nobody in itertools.product((1, 3), (-1, E)):
            x, ids, scores = self._routed(num_tokens)
            (actual,) = run(x, torch.full_like(ids, nobody), scores)
            self.assertEqual(actual, torch.zeros(num_tokens, D))


instantiate_parametrized_tests(TestMoeOnnx)

if __name__ == "__main__":
    run_tests()
