# mypy: allow-untyped-defs
"""Bytes of a rank in training: weights, gradients, optimizer, and activations kept for backward."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import NamedTuple, TYPE_CHECKING

from torch.distributed._tools.moe_cost_model import ITEMSIZE, LOW_PRECISION


if TYPE_CHECKING:
    from torch.distributed._tools.moe_config import MoEConfig
    from torch.distributed._tools.moe_layout import Layout


__all__ = ["block_weights", "layer_peak", "Memory", "memory", "saved_bytes", "uneven"]


def saved_bytes(
    tokens: float,
    rows: float,
    d: int,
    f: float,
    *,
    k: int = 0,
    num_experts: int = 0,
    gated: bool = True,
    itemsize: float = 2,
    kernel: str = "moe_mlp",
) -> float:
    """Bytes that the experts of one layer keep for backward.

    ``moe_mlp`` keeps its input and the pre-activations; with ``k`` and ``num_experts``
    also the router weights (float32), slots of rows, rows of slots and offsets. Values of other
    libraries are from their papers.

    Args:
        tokens, rows (float): T and R.
        d (int): D.
        f (float): F.

    Keyword Args:
        k, num_experts (int): of the metadata of ``moe_mlp``; 0 leaves it out.
        gated (bool): gate and up projections.
        itemsize (float): of the activations.
        kernel (str): ``moe_mlp``, ``deepgemm++``, ``scattermoe`` or ``mcore``.
    """
    g = 2 if gated else 1
    kept = {
        "moe_mlp": tokens * d + g * rows * f,
        "deepgemm++": (tokens + rows) * d + g * rows * f,
        "scattermoe": (tokens + rows) * d + (g + 2) * rows * f,
        "mcore": rows * d + (g + 1) * rows * f,
    }
    if kernel not in kept:
        raise ValueError(
            f"saved_bytes: kernel must be one of {list(kept)}, got {kernel!r}"
        )
    metadata = 0.0
    if kernel == "moe_mlp" and k:
        metadata = tokens * k * 4 + 4 * rows + 4 * tokens * k + 4 * num_experts
    return itemsize * kept[kernel] + metadata


class Memory(NamedTuple):
    """Bytes on the first pipeline rank.

    Attributes:
        weights: bf16 weights, gradients, sharded optimizer state.
        attention, experts: activations kept for backward, all micro-batches in flight;
            of dense layers as of experts.
        reserve: of the framework, its buffers and fragmentation.
        total: of all.
    """

    weights: float
    attention: float
    experts: float
    reserve: float

    @property
    def total(self) -> float:
        return sum(self)


def memory(
    model: MoEConfig,
    layout: Layout,
    *,
    seq: int = 4096,
    global_batch: int | None = None,
    capacity: float = 1.0,
) -> Memory:
    """Peak bytes of a GPU in training.

    Layers of multi-token prediction are on the last pipeline rank, so they count without a
    pipeline only. Recomputation: ``"selective"`` computes norms, activation functions and the up-projections
    of latent attention again, ``"full"`` keeps only the input of a block.

    Keyword Args:
        seq (int): length of a sequence.
        global_batch (int, optional): bounds the micro-batches in flight.
        capacity (float): rows that the experts' buffers hold, over the mean.
    """
    if layout.pp == 1:
        model = replace(model, layers=model.layers + model.mtp, mtp=0)
    weights = model.parameters()
    other = weights["other"] / layout.tp / layout.pp
    expert = weights["expert"] / layout.ep / layout.expert_tp / layout.pp
    own = expert / layout.expert_dp * uneven(model, layout)
    sharded = (other / layout.dp + own) * layout.replicate
    size = _itemsize(layout)
    held = (size + layout.gradient_bytes) * (other + expert)
    held += layout.optimizer_bytes * sharded
    if layout.fsdp:
        held = (layout.gradient_bytes + layout.optimizer_bytes) * sharded
        held += _gathered(model, layout)
    t = layout.micro_batch * seq / layout.cp / layout.tp
    rows, low = t * model.k * capacity, layout.dtype in LOW_PRECISION
    attention = t * size * (model.d * 4 + sum(n for n, _ in model.attention()))
    kept = functools.partial(
        saved_bytes, t, d=model.d, gated=model.gated, itemsize=size
    )
    experts = kept(rows, f=model.f, kernel=layout.kernel)
    shared = kept(t, f=model.shared_f) if model.shared_f else 0.0
    dense = kept(t, f=model.dense_f) if model.dense_f else 0.0
    if layout.recompute == "full":
        attention = experts = shared = dense = 0.0
    elif layout.recompute == "selective":
        attention *= (0.35 if model.mla else 0.6) * (0.6 if low else 1)
        experts = kept(rows, f=model.f)
        if layout.kernel == "mcore":  # its gathered input as well, in 8 bits if low
            experts += rows * model.d * (1 if low else size)
    flight = layout.pp
    if global_batch is not None:
        flight = min(layout.accumulation(global_batch), layout.pp)
    if layout.virtual > 1:
        flight *= 1 + (layout.pp - 1) / (layout.pp * layout.virtual)
    layers = model.layers / layout.pp * flight
    attention = (attention + size * t * model.d) * layers
    moe = 1 - model.dense / model.layers
    mlps = (experts + shared) * moe + dense * (1 - moe)
    return Memory(held, attention, mlps * layers, 6e9)


def _itemsize(layout: Layout) -> float:
    """Bytes of weights and activations; products of 8 bits read weights of bfloat16."""
    return max(ITEMSIZE[layout.dtype], ITEMSIZE["bf16"])


def uneven(model: MoEConfig, layout: Layout) -> float:
    """Largest shard over the mean, as FSDP shards whole experts."""
    local, shards = model.experts // layout.ep, layout.expert_dp // layout.replicate
    if not layout.fsdp or local < shards:
        return 1.0
    return math.ceil(local / shards) * shards / local


def _gathered(model: MoEConfig, layout: Layout) -> float:
    """Bytes that FSDP holds unsharded: all outside the layers, two layers, a layer's gradients."""
    around = 2 * model.vocab * model.d
    return _itemsize(layout) * (around + 3 * block_weights(model, layout))


def block_weights(model: MoEConfig, layout: Layout, dense: bool = False) -> float:
    """Weights of a block on a rank, whose gradients are accumulated in float32."""
    own = model.matrices * model.d * model.f * model.experts * (not dense)
    own /= layout.ep * layout.expert_tp
    other = sum(n * k for n, k in model.attention())
    width = model.dense_f if dense else model.shared_f
    return own + (other + model.matrices * model.d * width) / layout.tp


def layer_peak(
    tokens: float,
    rows: float,
    d: int,
    f: float,
    local: float,
    *,
    shared_f: int = 0,
    low: bool = False,
    kernel: str = "moe_mlp",
) -> float:
    """Peak bytes of one layer forward and backward: weights, gradients, what is kept, and
    the largest transients (dH, dA and the rows of dX)."""
    weights = 3 * d * f * local + 3 * d * shared_f
    saved = saved_bytes(tokens, rows, d, f, kernel=kernel)
    if shared_f:
        saved += saved_bytes(tokens, tokens, d, shared_f) + 2 * tokens * shared_f
    return weights * (4 + 2 * low) + saved + rows * (6 * f + 2 * d) + 8 * tokens * d
