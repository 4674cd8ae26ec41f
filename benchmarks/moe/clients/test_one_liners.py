# Owner(s): ["module: nn"]
"""The one-liners of README.md, run from its own text.

A fenced Python block below a comment ``<!-- one-liner: NAME -->``; the names that it takes for
granted are made here.
"""

import importlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

import torch
import torch.nn.functional as F
from torch.testing._internal.common_utils import run_tests, TestCase


HERE = pathlib.Path(__file__).resolve().parent
README = HERE.parents[2] / "README.md"
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE / "torchtitan")]

from packages import require_transformers
from peers import loop_over_hit_experts
from test_torchtitan import recorded


BLOCK = r"(?ms)^<!-- one-liner: (\w+) -->\n+```python\n(.*?)^```$"
FUSED = "aten::_moe_mlp"


def one_liners() -> dict[str, str]:
    return dict(re.findall(BLOCK, README.read_text()))


def ops_of(call) -> set[str]:
    with torch.profiler.profile() as profile:
        call()
    return {event.key for event in profile.key_averages()}


class TestOneLiners(TestCase):
    def test_there_are_three(self):
        names = {"pytorch", "torchtitan", "transformers"}
        self.assertEqual(one_liners().keys(), names)

    def test_pytorch(self):
        E, D, hidden = 16, 8, 6
        x, router = torch.randn(5, D), torch.nn.Linear(D, E)
        w_in, w_out = torch.randn(E, 2 * hidden, D), torch.randn(E, D, hidden)
        names = {"F": F, "torch": torch, "x": x, "router": router, "w_in": w_in}
        names["w_out"] = w_out
        self.assertIn(FUSED, ops_of(lambda: exec(one_liners()["pytorch"], names)))
        ids, weights = names["topk_indices"], names["topk_weights"]
        wanted = loop_over_hit_experts(x, ids, weights, w_in, w_out)
        self.assertEqual(names["y"], wanted)

    def test_transformers(self):
        try:
            require_transformers()
        except ImportError as error:
            raise unittest.SkipTest(str(error)) from None
        from families import build

        # Alone: here what it imports is on the path already.
        imports = one_liners()["transformers"].splitlines()[0]
        environment = os.environ | {"PYTHONPATH": str(HERE)}
        subprocess.run([sys.executable, "-c", imports], env=environment, check=True)
        tokens = torch.arange(24).view(2, 12)
        with tempfile.TemporaryDirectory() as folder:
            eager = build("qwen3_moe", dtype=torch.float32).eval()
            eager.save_pretrained(folder)
            names = {"name": folder}
            exec(one_liners()["transformers"], names)
            model = names["model"].eval()
        with torch.no_grad():
            wanted = eager(input_ids=tokens).logits
            self.assertNotIn(FUSED, ops_of(lambda: eager(input_ids=tokens)))
            self.assertIn(FUSED, ops_of(lambda: model(input_ids=tokens)))
            self.assertEqual(model(input_ids=tokens).logits, wanted)

    def test_torchtitan(self):
        # Its training config, and what its own apply_overrides does with the entry, on a
        # recorded shape of its modules; torchtitan/train.py runs torchtitan itself.
        config = types.SimpleNamespace(override=types.SimpleNamespace(imports=[]))
        exec(one_liners()["torchtitan"], {"config": config})
        (entry,) = config.override.imports
        module, _, factory = entry.rpartition(".")
        stand_ins = recorded()
        moe = stand_ins["torchtitan.models.common.moe"]
        with mock.patch.dict(sys.modules, stand_ins):
            sys.modules.pop(module, None)
            client = importlib.import_module(module)
            sys.modules.pop(module)
        experts = moe.RoutedExperts.Config(
            inner_experts=moe.GroupedExperts.Config(),
            token_dispatcher=moe.LocalTokenDispatcher.Config(),
        )
        layer = client.FusedRoutedExperts(getattr(client, factory)(experts))
        E, _, D = layer.inner_experts.w1_EFD.shape
        scores, ids = torch.rand(20, E).topk(3)
        counts = torch.bincount(ids.flatten(), minlength=E)
        x = torch.randn(20, D)
        self.assertIn(FUSED, ops_of(lambda: layer(x, scores, ids, counts)))


if __name__ == "__main__":
    run_tests()
