"""What can be said about one MoE block inside a trained model: time, bytes, error."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.testing._internal.moe_reference import (
    error_and_bound,
    moe_mlp_backward_reference,
    moe_mlp_backward_unfused,
    moe_mlp_reference,
    moe_mlp_unfused,
    moe_permutation_reference,
)

from blocks import MoEBlock
from demo.model import LanguageModel, MoE
from measure import peak_bytes, saved_bytes


@dataclasses.dataclass(frozen=True)
class BlockSample:
    """What one MoE layer of a model computed with: its operands and the gradient that came back.

    Attributes:
        x: (T, D) input; requires grad.
        logits: (T, E) float32 router logits; require grad.
        w_in: (E, 2*F, D); requires grad.
        w_out: (E, D, F); requires grad.
        grad_y: (T, D) gradient of the block's output.
        k: experts per token.
    """

    x: Tensor
    logits: Tensor
    w_in: Tensor
    w_out: Tensor
    grad_y: Tensor
    k: int

    def forward(self, block: MoEBlock) -> Tensor:
        return block(self.x, self.logits, self.k, self.w_in, self.w_out)

    def forward_backward(self, block: MoEBlock) -> tuple[Tensor, ...]:
        """Gradients of x, logits, w_in and w_out."""
        operands = (self.x, self.logits, self.w_in, self.w_out)
        return torch.autograd.grad(self.forward(block), operands, self.grad_y)

    def accumulate_grads(self, block: MoEBlock) -> None:
        """The same gradients, added to ``.grad`` of the operands."""
        self.forward(block).backward(self.grad_y)


def capture(model: LanguageModel, window: Tensor) -> list[BlockSample]:
    """The operands of every MoE layer of ``model`` on one (B, S + 1) window."""
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    inputs: dict[MoE, Tensor] = {}
    grads: dict[MoE, Tensor] = {}

    def keep_input(module: MoE, args: tuple[Tensor]) -> None:
        inputs[module] = args[0].detach().flatten(0, -2)

    def keep_grad(module: MoE, grad_input: object, grad_output: tuple[Tensor]) -> None:
        grads[module] = grad_output[0].flatten(0, -2)

    handles = [layer.register_forward_pre_hook(keep_input) for layer in layers]
    handles += [layer.register_full_backward_hook(keep_grad) for layer in layers]
    model.loss(window).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()

    def leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.detach().to(dtype, copy=True).requires_grad_()

    return [
        BlockSample(
            x=leaf(inputs[layer], layer.dtype),
            logits=leaf(layer.router(inputs[layer]), torch.float32),
            w_in=leaf(layer.w_in, layer.dtype),
            w_out=leaf(layer.w_out, layer.dtype),
            grad_y=grads[layer].to(layer.dtype),
            k=layer.top_k,
        )
        for layer in layers
    ]


class SavedBytes(NamedTuple):
    """Invariant: operand_bytes <= measured <= operand_bytes + allowance.

    Attributes:
        measured: bytes saved for backward, parameters not counted.
        operand_bytes: itemsize * (T*D + g*R*F), the input and the pre-activation.
        allowance: at most 24 bytes per slot and 8 per expert for weights and metadata.
    """

    measured: int
    operand_bytes: int
    allowance: int

    def holds(self) -> bool:
        return 0 <= self.measured - self.operand_bytes <= self.allowance


def saved_by_experts(
    sample: BlockSample, block: MoEBlock, wrap: Callable = lambda function: function
) -> SavedBytes:
    """Saved bytes of ``block.experts`` for given indices and weights.

    Args:
        wrap: applied to the function first, such as ``torch.compile``.
    """
    indices, weights = block.route(sample.logits.detach(), sample.k)
    weights.requires_grad_()
    experts = wrap(block.experts)
    num_experts, gate_up, _ = sample.w_in.shape
    return SavedBytes(
        measured=saved_bytes(
            lambda: experts(sample.x, indices, weights, sample.w_in, sample.w_out),
            (sample.w_in, sample.w_out),
        ),
        operand_bytes=sample.x.itemsize
        * (sample.x.numel() + gate_up * indices.numel()),
        allowance=24 * indices.numel() + 8 * num_experts,
    )


def peak_activation_bytes(forward_backward: Callable[[], object]) -> int:
    """Peak of forward and backward beyond what lives anyway: parameters and their gradients.

    Args:
        forward_backward: accumulates into ``.grad``. Runs twice: the first time leaves the
            gradients behind, so that the second, which is measured, allocates only buffers.
    """
    forward_backward()
    return peak_bytes(forward_backward)


class Float64Error(NamedTuple):
    """Error of one tensor against the float64 reference.

    Attributes:
        error: max|actual - reference|.
        bound: the error that invariant 1 allows.
        scale: max|reference|.
    """

    error: float
    bound: float
    scale: float


def float64_errors(sample: BlockSample, block: MoEBlock) -> dict[str, Float64Error]:
    """Errors of the output and of every gradient of ``block.experts``."""
    indices, weights = block.route(sample.logits.detach(), sample.k)
    weights.requires_grad_()
    operands = (sample.x, sample.w_in, sample.w_out, weights)
    y = block.experts(sample.x, indices, weights, sample.w_in, sample.w_out)
    actual = (y, *torch.autograd.grad(y, operands, sample.grad_y))

    plan = moe_permutation_reference(indices, sample.w_in.shape[0])
    args = (sample.x, sample.w_in, sample.w_out, plan.offs, weights)
    args = tuple(a.detach() for a in (*args, plan.row_slots, plan.slot_rows))
    reference = (
        moe_mlp_reference(*args)[0],
        *moe_mlp_backward_reference(sample.grad_y, *args)[:4],
    )
    unfused = (
        moe_mlp_unfused(*args)[0],
        *moe_mlp_backward_unfused(sample.grad_y, *args)[:4],
    )
    names = ("output", "grad_input", "grad_w_in", "grad_w_out", "grad_topk_weights")
    errors = {}
    for name, a, r, u in zip(names, actual, reference, unfused, strict=True):
        error, bound = error_and_bound(a, r, u, sample.x.dtype)
        errors[name] = Float64Error(error, bound, r.abs().max().item())
    return errors
