# mypy: ignore-errors

import dataclasses
import unittest
from functools import partial, wraps
from operator import itemgetter

import numpy as np

import torch
from torch.testing import make_tensor
from torch.testing._internal.common_device_type import tol, toleranceOverride
from torch.testing._internal.common_dtype import floating_types_and
from torch.testing._internal.moe_generators import MoeCase
from torch.testing._internal.moe_reference import (
    moe_mlp_backward_reference,
    moe_mlp_reference,
    moe_permutation_reference,
    moe_topk_reference,
)
from torch.testing._internal.opinfo.core import (
    DecorateInfo,
    ErrorInput,
    OpInfo,
    SampleInput,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only


# test_dtensor_ops.py shards every size that four ranks can share, in every combination.
tiny = partial(MoeCase, num_tokens=5, dim=6, hidden=3, num_experts=3)

# Small enough for a numerical Jacobian, and between them every kind of row plan.
CASES = (
    tiny("plain"),
    tiny("sentinels", num_tokens=6, routing="sentinels", num_rows=10),
    tiny("clipped_aligned", row_alignment=4, num_rows=9),
    tiny("no_tokens", num_tokens=0),
)

# Case, keyword arguments and present optional operands. Generic suites try every subset of a
# sample's tensors, and vmap tries every way to batch the positional ones. So most samples have few
# tensors (rows in expert order need no permutation), and optional tensors are keyword arguments.
MLP_SAMPLES = (
    (CASES[0], {}, {"permuted": True, "weighted": True}),
    (CASES[1], {"activation": "silu"}, {"permuted": True}),
    (CASES[2], {"activation": "geglu", "limit": 1.0}, {"permuted": True}),
    (CASES[3], {}, {}),
    (CASES[0], {}, {"weighted": True, "separate_up": True}),
    (CASES[0], {"activation": "geglu_tanh", "gate_interleaved": True}, {"bias": True}),
    # Hidden units that two ranks can share.
    (tiny("even", hidden=4), {"activation": "relu"}, {"bias": True}),
    (
        tiny("even_gated", hidden=4),
        {
            "activation": "swiglu_oai",
            "gate_interleaved": True,
            "alpha": 1.5,
            "limit": 2.0,
        },
        {},
    ),
)


def concrete(sample_inputs):
    """``sample_inputs`` outside of dispatch modes. A row plan depends on the values of the ids, and
    these differ by rank under modes such as LocalTensorMode."""

    @wraps(sample_inputs)
    def samples(*args, **kwargs):
        with _disable_current_modes():
            found = list(sample_inputs(*args, **kwargs))
        return iter(found)

    return samples


def operands_of_sample(
    case,
    dtype,
    device,
    requires_grad,
    activation="swiglu",
    *,
    permuted=False,
    weighted=False,
    separate_up=False,
    bias=False,
):
    """Router weights are float32 if the expert dtype is lower, as in F.moe_topk."""
    if not permuted:
        case = dataclasses.replace(case, top_k=1, num_rows=None, row_alignment=1)
    ops = case.operands(
        dtype,
        device,
        activation=activation,
        weights_dtype=torch.promote_types(dtype, torch.float32) if weighted else None,
        bias=bias,
        requires_grad=requires_grad,
    )
    if not permuted:
        ops = dataclasses.replace(ops, row_slots=None, slot_rows=None)
    return ops.split_gate() if separate_up else ops


def mlp_samples(dtype, device, requires_grad=False, samples=MLP_SAMPLES, **fixed):
    """Operands and keyword arguments of each sample. ``fixed`` overrides which operands are present."""
    for case, kwargs, options in samples:
        activation = kwargs.get("activation", "swiglu")
        options = {**options, **fixed}
        yield (
            operands_of_sample(
                case, dtype, device, requires_grad, activation, **options
            ),
            kwargs,
        )


def optional_operands(ops, *names):
    """The operands among ``names`` that are not None, by name."""
    values = {name: getattr(ops, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def numpy_reference(reference):
    """``reference`` with NumPy arrays as arguments and results, as OpInfo requires."""

    def ref(*args, **kwargs):
        args, kwargs = tree_map_only(np.ndarray, torch.from_numpy, (args, kwargs))
        return tree_map_only(torch.Tensor, np.asarray, reference(*args, **kwargs))

    return ref


def error_input(prefix, text, *args, error_type=ValueError, **kwargs):
    """A call and the text of its error, which begins with ``prefix``."""
    sample = SampleInput(args[0], args=args[1:], kwargs=kwargs)
    return ErrorInput(sample, error_type=error_type, error_regex=prefix + text)


def sample_inputs_moe_permutation(op_info, device, dtype, requires_grad, **kwargs):
    for case in CASES:
        yield SampleInput(
            case.topk_indices(device).to(dtype),
            args=(case.num_experts,),
            kwargs={"num_rows": case.num_rows, "row_alignment": case.row_alignment},
        )


def error_inputs_moe_permutation(op_info, device, **kwargs):
    indices = torch.zeros(3, 2, dtype=torch.int64, device=device)
    error = partial(error_input, "_moe_permutation: ")
    yield error(
        "topk_indices must have dtype int32 or int64, got float32",
        indices.float(),
        3,
        error_type=TypeError,
    )
    yield error("topk_indices must have 2 dimensions", indices[0], 3)
    yield error("num_experts must be in .*, got 0", indices, 0)
    yield error("num_rows must be in .*, got -1", indices, 3, num_rows=-1)
    yield error("row_alignment must be in .*, got 0", indices, 3, row_alignment=0)


OPTIONAL_OPERANDS = ("topk_weights", "row_slots", "slot_rows", "b_in", "b_out", "w_up")


@concrete
def sample_inputs_moe_mlp(op_info, device, dtype, requires_grad, **kwargs):
    for ops, op_kwargs in mlp_samples(dtype, device, requires_grad):
        yield SampleInput(
            ops.input,
            args=(ops.w_in, ops.w_out, ops.offs),
            kwargs={**optional_operands(ops, *OPTIONAL_OPERANDS), **op_kwargs},
        )


def error_inputs_moe_mlp(op_info, device, **kwargs):
    ops = CASES[0].operands(torch.float32, device)

    def error(text, *, error_type=ValueError, op_kwargs=None, **changes):
        args = dataclasses.replace(ops, **changes).args()
        options = {"error_type": error_type, **(op_kwargs or {})}
        return error_input("_moe_mlp: ", text, *args, **options)

    yield error(
        "w_out must have the dtype of input, float32, got float64",
        w_out=ops.w_out.double(),
        error_type=TypeError,
    )
    yield error(
        "offs must have dtype int32, got int64",
        offs=ops.offs.long(),
        error_type=TypeError,
    )
    yield error(
        r"w_in must have shape \(E, 2\*F, D\) = \(3, 6, 6\), got \(3, 5, 6\)",
        w_in=ops.w_in[:, :5],
    )
    yield error(
        r"topk_weights must have shape \(T, K\) = \(5, 2\), got \(4, 2\)",
        topk_weights=ops.topk_weights[:4],
    )
    yield error(
        "activation must be one of .*, got 'mish'", op_kwargs={"activation": "mish"}
    )
    yield error("alpha is an argument of activation", op_kwargs={"alpha": 1.0})


def reference_moe_mlp(*args, **kwargs):
    kwargs.pop("compute_preact", None)
    return moe_mlp_reference(*args, **kwargs)


@concrete
def sample_inputs_moe_mlp_backward(op_info, device, dtype, requires_grad, **kwargs):
    some = [True, False, True, False, True, False, True]
    masks = ([True] * 7, [True] * 7, some, [False] * 7)
    # Two more tensors would make four times as many subsets.
    samples = mlp_samples(
        dtype, device, samples=MLP_SAMPLES[2:], weighted=False, bias=False
    )
    for i, (ops, op_kwargs) in enumerate(samples):
        _, preact = moe_mlp_reference(*ops.args(), **op_kwargs)
        operands = dict.fromkeys(OPTIONAL_OPERANDS)
        operands.update(optional_operands(ops, *OPTIONAL_OPERANDS))
        yield SampleInput(
            ops.grad_out,
            args=(ops.input, ops.w_in, ops.w_out, ops.offs),
            kwargs={
                **operands,
                "preact": preact.to(dtype),
                "output_mask": masks[i % len(masks)],
                **op_kwargs,
            },
        )


def error_inputs_moe_mlp_backward(op_info, device, **kwargs):
    ops = CASES[0].operands(torch.float32, device)
    preact = torch.zeros(10, 6, device=device)

    def error(text, grad_out, preact):
        args = (grad_out, *ops.args(), preact, [True] * 7)
        return error_input("_moe_mlp_backward: ", text, *args)

    yield error(
        r"grad_out must have shape \(T, D\) = \(5, 6\), got \(5, 3\)",
        ops.grad_out[:, :3],
        preact,
    )
    yield error(
        r"preact must have shape .*, got \(0, 6\); preact has 0 rows when the forward ran",
        ops.grad_out,
        preact[:0],
    )


def reference_moe_mlp_backward(
    grad_out, *args, preact=None, output_mask=(True,) * 7, **kwargs
):
    operands = (*args, *(kwargs.pop(name) for name in OPTIONAL_OPERANDS))
    grads = moe_mlp_backward_reference(grad_out, *operands, **kwargs)
    empty = grad_out.new_empty(0)
    return tuple(
        grad if on and grad is not None else empty
        for on, grad in zip(output_mask, grads, strict=True)
    )


def sample_inputs_moe_topk(op_info, device, dtype, requires_grad, **kwargs):
    make = partial(make_tensor, device=device, dtype=dtype, low=-4, high=4)

    def sample(shape, k, **kwargs):
        logits = make(shape, requires_grad=requires_grad)
        # The first result, the indices, has no gradient.
        return SampleInput(
            logits, args=(k,), kwargs=kwargs, output_process_fn_grad=itemgetter(1)
        )

    groups = {"num_groups": 4, "top_groups": 2}
    yield sample((5, 8), 2)
    yield sample((2, 3, 8), 3, normalize=False, scale=2.5)
    yield sample((8,), 8, score="sigmoid")
    yield sample((5, 8), 3, **groups)
    yield sample((5, 8), 4, score="sigmoid", bias=make((8,)), **groups)
    yield sample((0, 8), 2)


def error_inputs_moe_topk(op_info, device, **kwargs):
    logits = torch.zeros(3, 8, device=device)
    # The functional makes the checks, or the op that it calls.
    error = partial(error_input, "_?moe_topk: ")
    yield error("logits must be a floating point tensor", logits.long(), 2)
    yield error(r"k must be in \[1, 8\].*, got 9", logits, 9)
    yield error(
        r"k must be in \[1, 2\].*, got 3", logits, 3, num_groups=4, top_groups=1
    )
    yield error("score must be .*, got 'tanh'", logits, 2, score="tanh")
    yield error(
        r"bias must be .* of shape \(E,\) = \(8,\), got .* of shape \(7,?\)",
        logits,
        2,
        bias=logits[0, :7],
    )
    yield error(
        "num_groups and top_groups must be given together", logits, 2, num_groups=4
    )
    yield error(
        "num_groups must divide E = 8, got 3", logits, 2, num_groups=3, top_groups=1
    )
    yield error(
        r"top_groups must be in .*, got 5", logits, 2, num_groups=4, top_groups=5
    )


@concrete
def sample_inputs_functional_moe_mlp(op_info, device, dtype, requires_grad, **kwargs):
    samples = [
        (dataclasses.replace(case, num_rows=None, row_alignment=1), *rest)
        for case, *rest in MLP_SAMPLES
    ]
    samples = mlp_samples(dtype, device, requires_grad, samples, permuted=True)
    for i, (ops, op_kwargs) in enumerate(samples):
        args = (ops.topk_indices, ops.topk_weights, ops.w_in, ops.w_out)
        # Weights, if any, are positional: export on fake tensors takes no keyword argument that
        # an op reads before a positional one.
        first = 4 if i == 0 else 1 if ops.topk_weights is None else 2
        names = ("topk_weights", "w_in", "w_out")[first - 1 :]
        yield SampleInput(
            ops.input,
            args=args[:first],
            kwargs={
                **{name: getattr(ops, name) for name in names},
                **optional_operands(ops, "b_in", "b_out", "w_up"),
                **op_kwargs,
            },
        )


@concrete
def sample_inputs_grouped_mlp(op_info, device, dtype, requires_grad, **kwargs):
    samples = mlp_samples(dtype, device, requires_grad, permuted=False, weighted=False)
    for ops, op_kwargs in samples:
        yield SampleInput(
            ops.input,
            args=(ops.w_in, ops.w_out),
            kwargs={
                **optional_operands(ops, "offs", "b_in", "b_out", "w_up"),
                **op_kwargs,
            },
        )


def error_inputs_grouped_mlp(op_info, device, **kwargs):
    ops = operands_of_sample(CASES[0], torch.float32, device, False)

    def error(text, *, error_type=ValueError, **changes):
        w_in, w_out, offs = (
            changes.pop(name, getattr(ops, name)) for name in ("w_in", "w_out", "offs")
        )
        options = {"error_type": error_type, "offs": offs, **changes}
        return error_input("_moe_mlp: ", text, ops.input, w_in, w_out, **options)

    yield error(
        "offs must have dtype int32", offs=ops.offs.long(), error_type=TypeError
    )
    yield error(r"offs must have shape \(E\) = \(3\), got \(2\)", offs=ops.offs[:2])
    yield error(r"w_out must have shape", w_out=ops.w_out[:2])
    yield error("w_in must have shape .*, the gate next to w_up", w_up=ops.w_in[:, :3])


def reference_grouped_mlp(input, w_in, w_out, *, offs, **kwargs):
    return moe_mlp_reference(input, w_in, w_out, offs, **kwargs)[0]


def error_inputs_functional_moe_mlp(op_info, device, **kwargs):
    ops = CASES[0].operands(torch.float32, device)
    names = ("input", "topk_indices", "topk_weights", "w_in", "w_out")

    def error(text, *, error_type=ValueError, **changes):
        args = [changes.pop(name, getattr(ops, name)) for name in names]
        return error_input("", text, *args, error_type=error_type, **changes)

    yield error(
        r"moe_mlp: topk_indices must have shape .*, got \(4, 2\)",
        topk_indices=ops.topk_indices[:4],
    )
    yield error(
        r"moe_mlp: topk_weights must have the shape of topk_indices",
        topk_weights=ops.topk_weights[:, :1],
    )
    yield error(r"moe_mlp: w_in must have 3 dimensions", w_in=ops.w_in[0])
    yield error(
        "_moe_permutation: topk_indices must have dtype",
        topk_indices=ops.topk_indices.float(),
        error_type=TypeError,
    )
    yield error(r"_moe_mlp: w_out must have shape", w_out=ops.w_out[:2])


def reference_functional_moe_mlp(
    input, topk_indices, topk_weights, w_in, w_out, **kwargs
):
    plan = moe_permutation_reference(topk_indices, w_in.shape[0])
    output, _ = moe_mlp_reference(
        input,
        w_in,
        w_out,
        plan.offs,
        topk_weights,
        plan.row_slots,
        plan.slot_rows,
        **kwargs,
    )
    return output


# The functorch suites ask every op for a batching rule and for forward over reverse mode. There is no
# batching rule, because the samples of a batch have different permutations, so vmap loops.
NO_BATCHING_RULE = (
    DecorateInfo(
        unittest.expectedFailure,
        "TestVmapOperatorsOpInfoDevice",
        "test_op_has_batch_rule",
    ),
    DecorateInfo(
        unittest.expectedFailure, "TestOperators", "test_vmapvjp_has_batch_rule"
    ),
)
NO_FORWARD_OVER_REVERSE = (
    DecorateInfo(unittest.expectedFailure, "TestOperators", "test_jvpvjp"),
    DecorateInfo(unittest.expectedFailure, "TestOperators", "test_vmapjvpvjp"),
)

# The suite sums all outputs into the first one in place, which has integers or no sum.
NO_SUM_OF_OUTPUTS = tuple(
    DecorateInfo(
        unittest.expectedFailure, "TestEagerFusionOpInfo", f"test_aot_autograd_{name}"
    )
    for name in (
        "exhaustive",
        "symbolic_exhaustive",
        "disable_functionalization_exhaustive",
        "disable_functionalization_symbolic_exhaustive",
    )
)

# The suite compares float16 with float32 at rtol 1e-3 and atol 1e-5. The hidden units are rounded
# too, so an element that is small by cancellation has the rounding error of its summands. On these
# samples the error is at most 1.15 ulp of the largest output.
NO_SMALLER_ROUNDING = DecorateInfo(
    toleranceOverride({torch.half: tol(atol=2e-3, rtol=2e-3)}),
    "TestInductorOpInfo",
    "test_comprehensive",
)

moe_dtypes = floating_types_and(torch.float16, torch.bfloat16)


def moe_op_info(name, reference, sample_inputs, error_inputs, **options):
    return OpInfo(
        name,
        ref=numpy_reference(reference),
        sample_inputs_func=sample_inputs,
        error_inputs_func=error_inputs,
        supports_out=False,
        **{"dtypes": moe_dtypes, **options},
    )


# _moe_mlp_backward has no derivative, and TorchScript is deprecated.
mlp_functional_op_info = partial(
    moe_op_info,
    supports_gradgrad=False,
    supports_scripting=False,
    decorators=(NO_SMALLER_ROUNDING,),
    skips=NO_BATCHING_RULE + NO_FORWARD_OVER_REVERSE,
)

op_db: list[OpInfo] = [
    moe_op_info(
        "_moe_permutation",
        moe_permutation_reference,
        sample_inputs_moe_permutation,
        error_inputs_moe_permutation,
        dtypes=(torch.int32, torch.int64),
        supports_autograd=False,
        skips=NO_BATCHING_RULE[:1],
    ),
    moe_op_info(
        "_moe_mlp",
        reference_moe_mlp,
        sample_inputs_moe_mlp,
        error_inputs_moe_mlp,
        # _moe_mlp_backward has no derivative.
        supports_gradgrad=False,
        decorators=(NO_SMALLER_ROUNDING,),
        skips=NO_BATCHING_RULE
        + NO_FORWARD_OVER_REVERSE
        + (
            # The suite prints keyword arguments into the script, and tensors with only four digits.
            DecorateInfo(
                unittest.expectedFailure, "TestJit", "test_variant_consistency_jit"
            ),
        ),
    ),
    moe_op_info(
        "_moe_mlp_backward",
        reference_moe_mlp_backward,
        sample_inputs_moe_mlp_backward,
        error_inputs_moe_mlp_backward,
        op=torch.ops.aten._moe_mlp_backward.default,
        supports_autograd=False,
        decorators=(NO_SMALLER_ROUNDING,),
        skips=NO_BATCHING_RULE[:1],
    ),
    moe_op_info(
        "nn.functional.moe_topk",
        moe_topk_reference,
        sample_inputs_moe_topk,
        error_inputs_moe_topk,
        supports_forward_ad=True,
        supports_fwgrad_bwgrad=True,
        # TorchScript has no keyword-only arguments with defaults.
        supports_scripting=False,
        skips=NO_SUM_OF_OUTPUTS,
    ),
    mlp_functional_op_info(
        "nn.functional.moe_mlp",
        reference_functional_moe_mlp,
        sample_inputs_functional_moe_mlp,
        error_inputs_functional_moe_mlp,
    ),
    mlp_functional_op_info(
        "nn.functional.grouped_mlp",
        reference_grouped_mlp,
        sample_inputs_grouped_mlp,
        error_inputs_grouped_mlp,
    ),
]
