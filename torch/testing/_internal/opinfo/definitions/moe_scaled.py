# mypy: ignore-errors

"""OpInfos of the low-precision MoE ops: _moe_quantize, _moe_mlp_scaled, F.scaled_moe_mlp.

The gradients of the last two test _moe_mlp_scaled_backward. There is no gradcheck: numerical gradients
are no yardstick for rounded products, and the ops do not take float64.
"""

import unittest
from functools import partial

import torch
import torch.nn.functional as F
from torch.testing import make_tensor
from torch.testing._internal.moe_generators import MoeCase
from torch.testing._internal.opinfo.core import (
    DecorateInfo,
    ErrorInput,
    OpInfo,
    SampleInput,
)
from torch.testing._internal.opinfo.definitions.moe import (
    concrete,
    error_input,
    NO_BATCHING_RULE,
    NO_FORWARD_OVER_REVERSE,
    NO_SMALLER_ROUNDING,
    NO_SUM_OF_OUTPUTS,
)


# The four ranks of test_dtensor_ops.py cannot share these experts or tokens: some groups are fake, and
# would gather ids that are no routing. Only the first case has sizes that the GPU kernels take and
# that are sharded in every combination.
case = partial(MoeCase, num_experts=3)
CASES = (
    case("uniform", num_tokens=9, dim=32, hidden=48),
    case("sentinels", num_tokens=13, dim=42, hidden=18, routing="sentinels"),
    case("empty", num_tokens=0, dim=34, hidden=18),
)
RECIPES = tuple(F._MOE_RECIPES)
scaled_dtypes = (torch.float32, torch.bfloat16, torch.float16)


def sample_inputs_moe_quantize(op_info, device, dtype, requires_grad, **kwargs):
    x = make_tensor((40, 70), device=device, dtype=dtype)
    for recipe in (1, 3, 4, 5):
        yield SampleInput(x.clone(), args=(recipe,))
    yield SampleInput(x.clone(), args=(4,), kwargs={"dim": 0})
    offs = torch.tensor([3, 3, 40], dtype=torch.int32, device=device)
    yield SampleInput(x.clone(), args=(4,), kwargs={"dim": 0, "offs": offs})
    yield SampleInput(x.clone(), args=(4,), kwargs={"dtype": torch.int8})


def error_inputs_moe_quantize(op_info, device, **kwargs):
    x = torch.zeros(4, 32, device=device)
    yield ErrorInput(
        SampleInput(x, args=(2,)), error_type=ValueError,
        error_regex=r"_moe_quantize: recipe must be one of .*, got 2",
    )  # fmt: skip
    yield ErrorInput(
        SampleInput(x, args=(3,), kwargs={"dim": 2}), error_type=IndexError,
        error_regex=r"_moe_quantize: dim must be in \[-2, 2\), got 2",
    )  # fmt: skip


@concrete
def sample_inputs_moe_mlp_scaled(op_info, device, dtype, requires_grad, **kwargs):
    for i, case in enumerate(CASES):
        ops = case.operands(dtype, device, bias=i == 1, requires_grad=requires_grad)
        first, *rest = ops.args()
        a, w = F._MOE_RECIPES[RECIPES[i]]
        yield SampleInput(
            first,
            args=(*rest, [], [], [], []),
            kwargs={
                "recipe_a": [a],
                "recipe_w": [w],
                "preact_dtype": torch.int8 if i else None,
            },
            output_process_fn_grad=lambda outputs: outputs[0],
        )


def error_inputs_moe_mlp_scaled(op_info, device, **kwargs):
    ops = CASES[0].operands(torch.float32, device)

    def error(text, **options):
        args = (*ops.args(), [], [], [], [])
        return error_input("_moe_mlp_scaled: ", text, *args, **options)

    yield error("recipe_w must have one code, got 0", recipe_a=[3])
    yield error(
        "recipe_a and recipe_w must be RowWise both", recipe_a=[3], recipe_w=[1]
    )
    yield error(
        "activation must be one of", recipe_a=[3], recipe_w=[3], activation="tanh"
    )


@concrete
def sample_inputs_scaled_moe_mlp(op_info, device, dtype, requires_grad, **kwargs):
    for case, recipe in zip(CASES, RECIPES, strict=True):
        ops = case.operands(dtype, device, requires_grad=requires_grad)
        args = (ops.topk_indices, ops.topk_weights, ops.w_in, ops.w_out)
        yield SampleInput(ops.input, args=args, kwargs={"recipe": recipe})


def error_inputs_scaled_moe_mlp(op_info, device, **kwargs):
    ops = CASES[0].operands(torch.float32, device)
    args = (ops.topk_indices, ops.topk_weights, ops.w_in, ops.w_out)
    yield ErrorInput(
        SampleInput(ops.input, args=args, kwargs={"recipe": "fp8"}), error_type=ValueError,
        error_regex="scaled_moe_mlp: recipe must be one of mxfp8",
    )  # fmt: skip


# Without a batching rule vmap loops over the samples, but not if tensors come in lists, as scales
# do.
NO_VMAP = (
    DecorateInfo(
        unittest.expectedFailure,
        "TestVmapOperatorsOpInfoDevice",
        "test_vmap_exhaustive",
    ),
    DecorateInfo(unittest.expectedFailure, "TestOperators", "test_vjpvmap"),
    DecorateInfo(unittest.expectedFailure, "TestOperators", "test_vmap_autograd_grad"),
    DecorateInfo(unittest.expectedFailure, "TestOperators", "test_vmapvjp"),
)


def no_tolerance_for_float8(*dtypes):
    """Inductor's suite passes a tolerance, and float8 outputs cannot be compared with one.
    test_moe_scaled_opinfo.py compares them as bytes."""
    return DecorateInfo(
        unittest.expectedFailure,
        "TestInductorOpInfo",
        "test_comprehensive",
        dtypes=dtypes,
    )


scaled_op_info = partial(OpInfo, dtypes=scaled_dtypes, supports_out=False)

op_db: list[OpInfo] = [
    scaled_op_info(
        "_moe_quantize",
        op=torch.ops.aten._moe_quantize.default,
        sample_inputs_func=sample_inputs_moe_quantize,
        error_inputs_func=error_inputs_moe_quantize,
        supports_autograd=False,
        # The suites compare with a tolerance, which float8 does not support.
        skips=NO_BATCHING_RULE[:1]
        + NO_VMAP[:1]
        + (no_tolerance_for_float8(torch.float32),),
    ),
    scaled_op_info(
        "_moe_mlp_scaled",
        op=torch.ops.aten._moe_mlp_scaled.default,
        sample_inputs_func=sample_inputs_moe_mlp_scaled,
        error_inputs_func=error_inputs_moe_mlp_scaled,
        supports_gradgrad=False,
        skips=NO_BATCHING_RULE
        + NO_VMAP
        + NO_FORWARD_OVER_REVERSE
        + NO_SUM_OF_OUTPUTS
        + (no_tolerance_for_float8(torch.float32, torch.float16),),
    ),
    scaled_op_info(
        "nn.functional.scaled_moe_mlp",
        op=F.scaled_moe_mlp,
        sample_inputs_func=sample_inputs_scaled_moe_mlp,
        error_inputs_func=error_inputs_scaled_moe_mlp,
        supports_gradgrad=False,
        # TorchScript has no keyword-only arguments with defaults.
        supports_scripting=False,
        decorators=(NO_SMALLER_ROUNDING,),
        skips=NO_BATCHING_RULE + NO_VMAP + NO_FORWARD_OVER_REVERSE,
    ),
]
