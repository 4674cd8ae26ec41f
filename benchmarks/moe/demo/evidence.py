"""Measures one MoE block inside a trained model: operands, saved bytes, error."""

import dataclasses
from typing import NamedTuple

import check
from peers import MoEBlock
from shapes import Operands, Shape

import torch
from torch import Tensor

from demo.model import LanguageModel, MoE
from measure import saved_bytes


@dataclasses.dataclass(frozen=True)
class BlockSample:
    """The operands of one MoE layer of a model, and the gradient that reached its output."""

    shape: Shape
    logits: Tensor  # (T, E) float32
    operands: Operands  # of the experts, without ids and router weights

    def forward(self, block: MoEBlock) -> Tensor:
        o = self.operands
        return block(o.x, self.logits, self.shape.K, o.w_in, o.w_out)

    def forward_backward(self, block: MoEBlock) -> tuple[Tensor, ...]:
        """Gradients of x, logits, w_in and w_out."""
        o = self.operands
        leaves = (o.x, self.logits, o.w_in, o.w_out)
        return torch.autograd.grad(self.forward(block), leaves, o.grad)

    def accumulate_grads(self, block: MoEBlock) -> None:
        """The same gradients, added to ``.grad`` of the operands."""
        self.forward(block).backward(self.operands.grad)

    def routed(self, block: MoEBlock) -> Operands:
        """The operands with the ids and weights of the block's router."""
        ids, weights = block.route(self.logits.detach(), self.shape.K)
        weights = weights.detach().requires_grad_()
        return dataclasses.replace(self.operands, ids=ids, weights=weights)


def capture(model: LanguageModel, window: Tensor) -> list[BlockSample]:
    """The operands of every MoE layer of ``model`` on one (B, S + 1) window."""
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    inputs: dict[MoE, Tensor] = {}
    grads: dict[MoE, Tensor] = {}

    def keep(module: MoE, args: tuple[Tensor], output: Tensor) -> None:
        inputs[module] = args[0].detach().flatten(0, -2)
        output.register_hook(lambda g: grads.update({module: g.flatten(0, -2)}))

    handles = [layer.register_forward_hook(keep) for layer in layers]
    model.loss(window).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()

    def leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.detach().to(dtype, copy=True).requires_grad_()

    samples = []
    for layer in layers:
        tensors = (inputs[layer], layer.w_in, layer.w_out)
        x, w_in, w_out = (leaf(t, layer.dtype) for t in tensors)
        E, D, F = layer.w_out.shape
        shape = Shape("demo", x.shape[0], D, F, E, layer.top_k)
        logits = leaf(layer.router(inputs[layer]), torch.float32)
        none = torch.empty(0)
        operands = Operands(x, none, none, w_in, w_out, grads[layer].to(layer.dtype))
        samples.append(BlockSample(shape, logits, operands))
    return samples


class SavedBytes(NamedTuple):
    """Without parameters. Invariant: operand_bytes <= measured <= operand_bytes + allowance."""

    measured: int
    operand_bytes: int  # itemsize * (T*D + g*R*F), the input and the pre-activation
    allowance: int  # 24 bytes per slot and 8 per expert for weights and metadata

    def holds(self) -> bool:
        return 0 <= self.measured - self.operand_bytes <= self.allowance


def saved_by_experts(sample: BlockSample, block, *, compiled=False) -> SavedBytes:
    """Saved bytes of ``block.experts`` for given indices and weights."""
    o, shape = sample.routed(block), sample.shape
    experts = torch.compile(block.experts) if compiled else block.experts
    slots = shape.T * shape.K
    measured = saved_bytes(lambda: experts(*o.layer_args()), (o.w_in, o.w_out))
    operand_bytes = o.x.itemsize * (shape.T * shape.D + slots * 2 * shape.F)
    return SavedBytes(measured, operand_bytes, 24 * slots + 8 * shape.E)


def float64_errors(sample: BlockSample, block: MoEBlock) -> dict[str, check.Error]:
    """Errors of the output and of every gradient of ``block.experts``."""
    o = sample.routed(block)
    whole = check.Sample(torch.arange(sample.shape.T), list(range(sample.shape.E)))
    y = block.experts(*o.layer_args())
    grads = torch.autograd.grad(y, o.leaves(), o.grad)
    expected = check.truth(sample.shape, o, whole, backward=True)
    actual = check.sampled(whole, y, grads)
    return check.errors(actual, expected, o.x.dtype, "the block")
