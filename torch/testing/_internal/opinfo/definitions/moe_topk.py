# mypy: ignore-errors

"""OpInfos of the router's ops, _moe_topk and _moe_topk_backward."""

from functools import partial
from operator import itemgetter

import torch
from torch.testing import make_tensor
from torch.testing._internal.moe_reference import moe_topk_reference
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.testing._internal.opinfo.definitions.moe import (
    error_input,
    error_inputs_moe_topk,
    moe_op_info,
    NO_BATCHING_RULE,
    NO_FORWARD_OVER_REVERSE,
    NO_SUM_OF_OUTPUTS,
    op_db as moe_op_db,
    sample_inputs_moe_topk,
)


def sample_inputs_moe_topk_op(op_info, device, dtype, requires_grad, **kwargs):
    # The samples of the functional that the op takes unchanged.
    samples = sample_inputs_moe_topk(op_info, device, dtype, requires_grad, **kwargs)
    yield from (sample for sample in samples if sample.input.dim() == 2)
    # Tokens that two ranks can share.
    make = partial(make_tensor, device=device, dtype=dtype, low=-4, high=4)
    logits = make((6, 8), requires_grad=requires_grad)
    yield SampleInput(
        logits,
        args=(3,),
        kwargs={"bias": make((8,))},
        output_process_fn_grad=itemgetter(1),
    )


def error_inputs_moe_topk_op(op_info, device, **kwargs):
    text = r"logits must be .* of shape \(T, E\), got .*\(8\)"
    yield error_input("_moe_topk: ", text, torch.zeros(8, device=device), 2)
    yield from error_inputs_moe_topk(op_info, device, **kwargs)


def sample_inputs_moe_topk_backward(op_info, device, dtype, requires_grad, **kwargs):
    for sample in sample_inputs_moe_topk_op(op_info, device, dtype, False, **kwargs):
        indices, weights = moe_topk_reference(
            sample.input, *sample.args, **sample.kwargs
        )
        grad = make_tensor(weights.shape, dtype=dtype, device=device, low=-4, high=4)
        names = ("score", "normalize", "scale")
        options = {n: sample.kwargs[n] for n in names if n in sample.kwargs}
        yield SampleInput(grad, args=(sample.input, indices), kwargs=options)


def error_inputs_moe_topk_backward(op_info, device, **kwargs):
    grad, logits = torch.zeros(3, 2, device=device), torch.zeros(3, 8, device=device)
    indices = torch.zeros(3, 2, dtype=torch.int64, device=device)
    error = partial(error_input, "_moe_topk_backward: ")
    yield error(
        r"topk_indices must have shape \(T, K\) with T = 3, got \(2, 2\)",
        grad,
        logits,
        indices[:2],
    )
    yield error(
        r"grad_weights must have shape \(T, K\) = \(3, 2\), got \(3, 1\)",
        grad[:, :1],
        logits,
        indices,
    )
    yield error(
        "topk_indices must have dtype int64, got int32",
        grad,
        logits,
        indices.int(),
        error_type=TypeError,
    )
    yield error("score must be .*, got 'tanh'", grad, logits, indices, score="tanh")


def reference_moe_topk_backward(grad_weights, logits, topk_indices, **kwargs):
    """Gradient of the chosen experts' weights in float64, through autograd."""
    leaf = logits.detach().double().requires_grad_()
    scores = leaf.sigmoid() if kwargs.get("score") == "sigmoid" else leaf.softmax(-1)
    weights = scores.gather(-1, topk_indices)
    if kwargs.get("normalize", True):
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * kwargs.get("scale", 1.0)
    return torch.autograd.grad(weights, leaf, grad_weights.double())[0]


op_db: list[OpInfo] = [
    moe_op_info(
        "_moe_topk",
        moe_topk_reference,
        sample_inputs_moe_topk_op,
        error_inputs_moe_topk_op,
        # _moe_topk_backward has no derivative.
        supports_gradgrad=False,
        skips=NO_BATCHING_RULE + NO_FORWARD_OVER_REVERSE + NO_SUM_OF_OUTPUTS,
    ),
    moe_op_info(
        "_moe_topk_backward",
        reference_moe_topk_backward,
        sample_inputs_moe_topk_backward,
        error_inputs_moe_topk_backward,
        op=torch.ops.aten._moe_topk_backward.default,
        supports_autograd=False,
        skips=NO_BATCHING_RULE[:1],
    ),
]

# F.moe_topk calls the op where there is one, so the op's limitations apply to F.moe_topk too.
for info in moe_op_db:
    if info.name == "nn.functional.moe_topk":
        info.supports_gradgrad = info.check_batched_gradgrad = False
        info.supports_forward_ad = info.supports_fwgrad_bwgrad = False
        info.check_batched_forward_grad = False
        info.check_inplace_batched_forward_grad = False
        info.decorators += NO_BATCHING_RULE + NO_FORWARD_OVER_REVERSE
