# mypy: allow-untyped-defs
"""Measures costs of training on this machine beside products: ops, shards, tensor parallelism.

Decoder layers of two widths run plain and parallel: narrow ones have only fixed costs, wide ones
also bytes. They are not layers of a model that is planned later.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any, TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, Tensor
from torch.distributed._composable import checkpoint
from torch.distributed._tools.moe_calibration import measure_calls
from torch.distributed._tools.moe_cost_model import US
from torch.distributed._tools.moe_trace import estimated_seconds
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ExpertParallel,
    parallelize_module,
    RowwiseParallel,
)


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed._tools.moe_profile import Profile
    from torch.distributed.tensor.parallel import ParallelStyle


__all__ = ["measure_training"]

LAYERS, ROUNDS = 2, 15
# Width and tokens, narrow and wide: of decoder layers, and of two products with a sum.
SIZES = ((64, 16), (384, 256))
SUMMED = ((64, 16), (256, 2048))


class _Decoder(nn.Module):
    """A layer of single ops, as in most models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.gate, self.up = linear(width, width), linear(width, width)
        self.down = linear(width, width)
        self.norms = nn.ParameterList([torch.ones(width), torch.ones(width)])

    def norm(self, x: Tensor, i: int) -> Tensor:
        root = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.norms[i] * (x * root)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x, 0)).unflatten(-1, (3, -1, 32))
        y = F.scaled_dot_product_attention(
            *heads.permute(2, 0, 3, 1, 4), is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.norm(x, 1)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _decoders(width: int) -> nn.Sequential:
    return nn.Sequential(*(_Decoder(width) for _ in range(LAYERS)))


def _products(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.Linear(hidden, width))


def _run(module: nn.Module, width: int, tokens: int) -> Callable[[], None]:
    x = torch.randn(1, tokens, width, requires_grad=True)

    def call() -> None:
        module(x).sum().backward()

    return call


def measure_training(p: Profile, group: Any = None, clock: str = "wall") -> Profile:
    """``p`` of a CPU with the constants of training: ``stack``, and with a group those of ranks.

    Collective over ``group``, the default one; the slowest rank counts.
    """
    if (cpu := p.cpu) is None:
        raise ValueError(
            "measure_training: p must be a profile of a CPU, p.cpu is None"
        )
    ranks = 1 if group is None else dist.get_world_size(group)
    plain = [_decoders(width) for width, _ in SIZES]
    calls = [_run(module, *size) for module, size in zip(plain, SIZES)]
    again = _decoders(SIZES[0][0])
    for layer in again:
        checkpoint(layer, context_fn=ExpertParallel.save_communication())
    calls.append(_run(again, *SIZES[0]))
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for size in SIZES:
            sharded = _decoders(size[0])
            for layer in sharded:
                fully_shard(layer, mesh=mesh)
            fully_shard(sharded, mesh=mesh)
            calls.append(_run(sharded, *size))
        styles: dict[str, ParallelStyle] = {
            "0": ColwiseParallel(),
            "1": RowwiseParallel(),
        }
        for width, tokens in SUMMED:
            whole = parallelize_module(_products(width, width * ranks), mesh, styles)
            for module in (_products(width, width), whole):
                calls.append(_run(module, width, tokens))
    tick = time.process_time if clock == "process" else time.perf_counter
    # Equally often on every rank, as the calls are collective.
    measured = torch.tensor(
        measure_calls(calls, 0.0, tick, least=ROUNDS), dtype=torch.float64
    )
    if ranks > 1:
        dist.all_reduce(measured, dist.ReduceOp.MAX, group=group)
    narrow, wide, twice, *rest = measured.tolist()
    x = torch.randn(1, SIZES[0][1], SIZES[0][0])
    both = (*zip(plain, calls), (plain[0], functools.partial(plain[0], x)))
    (little, ops), (much, _), (_, forward) = (
        estimated_seconds(module, p, call) for module, call in both
    )
    op_us = max(0.0, narrow - little) / ops / US
    stack = max(0.1, (wide - ops * op_us * US) / much)
    found = {"op_us": op_us, "recompute_us": max(0.0, twice - narrow) / forward / US}
    if ranks > 1:
        fixed, bytes_too = (
            (t - base) / LAYERS for t, base in zip(rest[:2], (narrow, wide))
        )
        moved = 12 * (7 * SIZES[1][0] ** 2) * (1 - 1 / ranks)
        found["shard_us"] = max(0.0, fixed) / 3 / US
        found["shard"] = moved / max(bytes_too - fixed, 1e-6)
        fixed, bytes_too = rest[3] - rest[2], rest[5] - rest[4]
        found["tp_us"] = max(0.0, fixed) / 2 / US
        summed = 2 * 4 * SUMMED[1][0] * SUMMED[1][1]
        found["reduce"] = summed / max(bytes_too - fixed, 1e-6)
    values = {name: float(f"{value:.4g}") for name, value in found.items()}
    constants = dataclasses.replace(p.constants, stack=stack)
    return dataclasses.replace(
        p, constants=constants, cpu=dataclasses.replace(cpu, **values)
    )
