# Owner(s): ["module: inductor"]
"""Every experts class of transformers, as config.moe_fusion rewrites it.

A class is built from a tiny config, and compiled in the forms that
transformers has. Which are not rewritten as a whole is listed here, with the reason that is logged.

MOE_FAMILIES=mixtral,zaya tests these model families only.
"""

import os
import pathlib
import sys

import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.moe_reference import error_and_bound


HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "test" / "inductor")]

from packages import require_transformers


require_transformers()

from matrix import experts_classes, TinyConfig
from moe_fusion_problem import D, E, HIDDEN, make_inputs, run
from moe_mlp_experts import experts_forward, plan_of
from test_moe_fusion import rewritten_eager
from transformers_parallel import ADAPTER


OTHERS = {
    "Inkling2Experts": "its activation is not known",  # tanh over gate and up
    "Inkling2LoopExperts": "its activation is not known",
    "MuseSparkExperts": "the combine is not known",  # a norm in front of it
}


class Config(TinyConfig):
    """With the sizes of the inputs."""

    hidden_size = dim = moe_hidden_size = D

    def __init__(self, implementation):
        self._experts_implementation = implementation

    def __getattr__(self, name):
        value = super().__getattr__(name)
        return {4: E, 12: HIDDEN}.get(value, value) if type(value) is int else value


def chosen_classes():
    """The classes that have implementations, of the families in MOE_FAMILIES or of all."""
    families = os.environ.get("MOE_FAMILIES", "").split(",")
    for experts_class in experts_classes():
        family = experts_class.__module__.split(".")[2]
        # Our adapters, which another test may have installed, do not count.
        forward = getattr(experts_class, "_moe_mlp_original", experts_class.forward)
        if hasattr(forward, "__wrapped__") and (families == [""] or family in families):
            yield experts_class


def build(experts_class, implementation):
    made = experts_class(Config(implementation))
    generator = torch.Generator().manual_seed(0)
    for p in made.parameters():
        p.data = torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5
    return made


@instantiate_parametrized_tests
class TestExpertsClasses(TestCase):
    def check(self, experts_class, implementation, training, dynamic, sentinels=False):
        experts = build(experts_class, implementation).to(torch.bfloat16)
        # The loop of transformers knows no sentinels.
        exact = build(experts_class, implementation if sentinels else "eager").double()
        exact.load_state_dict(experts.state_dict())
        inputs = make_inputs(torch.bfloat16)
        if sentinels:
            for module in (experts, exact):
                module._is_expert_parallel = True
            dropped = inputs[1] == 5
            weights = inputs[2].masked_fill(dropped, 0)
            inputs = inputs[0], inputs[1].masked_fill(dropped, E), weights
        exact_inputs = inputs[0].double(), inputs[1], inputs[2].double()
        want = run(exact, exact, exact_inputs, training)
        written = run(experts, experts, inputs, training)
        torch._dynamo.reset()
        counters.clear()
        logger = "torch._inductor.fx_passes.moe_fusion"
        with config.patch(moe_fusion=True), self.assertLogs(logger, "INFO") as logs:
            compiled = torch.compile(
                experts, fullgraph=True, dynamic=dynamic, backend=rewritten_eager
            )
            got = run(compiled, experts, inputs, training)
        name = experts_class.__name__
        if name in OTHERS:
            self.assertIn(OTHERS[name], logs.output[-1])
        else:
            self.assertGreater(counters["inductor"]["moe_fusion_full"], 0, logs.output)
        for ours, theirs, exact in zip(got, written, want, strict=True):
            error, bound = error_and_bound(ours, exact, theirs, torch.bfloat16)
            self.assertLessEqual(error, bound)

    @parametrize("implementation", ["grouped_mm", "batched_mm"])
    @parametrize("training", [False, True])
    @parametrize("dynamic", [False, True])
    def test_rewritten(self, implementation, training, dynamic):
        tested = 0
        for experts_class in chosen_classes():
            with self.subTest(experts_class.__name__):
                self.check(experts_class, implementation, training, dynamic)
            tested += 1
        self.assertGreater(tested, 0)

    @parametrize("implementation", ["grouped_mm", "batched_mm"])
    @parametrize("training", [False, True])
    def test_sentinels_of_expert_parallelism(self, implementation, training):
        for experts_class in chosen_classes():
            with self.subTest(experts_class.__name__):
                self.check(experts_class, implementation, training, False, True)

    def test_expert_parallelism_rounds_as_one_process(self):
        def exchange(tokens, ids, weights, run):
            return run(tokens, ids, weights)

        inputs = make_inputs(torch.bfloat16)
        tested = set()
        for experts_class in chosen_classes():
            experts = build(experts_class, "eager").to(torch.bfloat16)
            plan = plan_of(experts)
            if plan.reason is not None:
                continue
            tested.add(plan.float32)
            with self.subTest(experts_class.__name__):
                found = ADAPTER.run(experts, None, exchange, *inputs)
                expected = experts_forward(experts, *inputs)
                self.assertEqual(found, expected, atol=0, rtol=0)
        if "MOE_FAMILIES" not in os.environ:
            self.assertEqual(tested, {False, True})


if __name__ == "__main__":
    run_tests()
