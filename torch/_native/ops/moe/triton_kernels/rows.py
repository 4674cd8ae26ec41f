"""The routed rows of a call: tile lists, and the launches of the memory-bound kernels."""

import dataclasses
from collections.abc import Callable
from typing import Any

import triton

import torch
from torch import Tensor

from .autotune import Autotuner
from .configs import itself, KernelTable, OPTIONS
from .experts import Experts
from .permutation import minimum, schedule_tiles_kernel
from .reductions import (
    bias_dot_kernel,
    bias_grad_kernel,
    combine_kernel,
    scale_grad_kernel,
    zero_tail_kernel,
)


def _is_addressable(x: Tensor) -> bool:
    return x.numel() > 0 and x.data_ptr() % 16 == 0


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """What a launcher has to know about the device.

    Attributes:
        table: tile configurations of its architecture.
        num_sms: its multiprocessors.
        autotuner: chooses among the configurations that fit; None for the first.
        kernel: maps a kernel to what is launched instead. This and the next three are for a compiler
            that traces the launchers (torch/_inductor/kernel/moe.py), on tensors without memory
            and with symbolic sizes.
        hint: a number for a size that matters for speed, or that may be 0.
        is_addressable: whether a tensor has elements, the first at a multiple of 16 bytes.
        ragged: whether a TMA descriptor may have strides that wrap around.
    """

    table: KernelTable
    num_sms: int
    autotuner: Autotuner | None = None
    kernel: Callable[[Any], Any] = itself
    hint: Callable[[int], int] = itself
    is_addressable: Callable[[Tensor], bool] = _is_addressable
    ragged: bool = True


class Rows:
    """The routed rows of one call, and their tile list per tile height.

    Args:
        plan: the device.
        offs, row_slots, slot_rows, topk_weights: as in :class:`Experts`.
        num_tokens: T.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        offs: Tensor,
        row_slots: Tensor | None,
        slot_rows: Tensor | None,
        num_tokens: int,
        topk_weights: Tensor | None = None,
    ) -> None:
        self.plan = plan
        self.num_tokens = num_tokens
        self.offs = offs.contiguous()
        self.last_offset = self.offs[-1:]
        self.num_experts = offs.shape[0]
        self.has_slots = row_slots is not None
        # The kernels do not read it if HAS_SLOTS is False.
        self.row_slots = offs if row_slots is None else row_slots.contiguous()
        self.slot_rows = None if slot_rows is None else slot_rows.contiguous()
        self.top_k = 1 if slot_rows is None else slot_rows.shape[1]
        self.num_rows = num_tokens if row_slots is None else row_slots.shape[0]
        # TMA needs buffers of at least one row, even if a compiler does not know of any.
        self.num_buffer_rows = torch.sym_max(self.num_rows, 1)
        self.scale = None
        if topk_weights is not None:
            # (T*K,); reshape() keeps the stride of (T, 1) and of an expanded one.
            self.scale = topk_weights.contiguous().view(-1)
        self._tiles: dict[int, Tensor] = {}

    @classmethod
    def of(cls, plan: LaunchPlan, experts: Experts) -> "Rows":
        metadata = (experts.offs, experts.row_slots, experts.slot_rows)
        return cls(plan, *metadata, experts.input.shape[0], experts.topk_weights)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch."""
        return 0 in (self.plan.hint(self.num_tokens), self.plan.hint(self.num_rows))

    def max_tiles(self, block_m: int) -> int:
        """No routing has more row tiles than this."""
        return self.num_rows // block_m + minimum(self.num_experts, self.num_rows)

    def tiles(self, block_m: int) -> Tensor:
        """(1 + max_tiles, 4) int32 list of ``schedule_tiles_kernel``."""
        if block_m not in self._tiles:
            bound = self.max_tiles(block_m)
            block_t = 64
            tiles = self.offs.new_empty(1 + bound, 4)
            self.plan.kernel(schedule_tiles_kernel)[(triton.cdiv(bound, block_t),)](
                self.offs,
                tiles,
                self.num_experts,
                BLOCK_M=block_m,
                BLOCK_E=min(128, triton.next_power_of_2(self.num_experts)),
                BLOCK_T=block_t,
                **OPTIONS,
            )
            self._tiles[block_m] = tiles
        return self._tiles[block_m]

    def zero_tail(self, out: Tensor) -> None:
        """Zeroes the rows of ``out`` (R, N) past the last expert's."""
        num_rows, num_columns = out.shape
        block_m, block_n = 8, 512
        grid = (
            minimum(triton.cdiv(num_rows, block_m), self.plan.num_sms),
            triton.cdiv(num_columns, block_n),
        )
        self.plan.kernel(zero_tail_kernel)[grid](
            out,
            self.last_offset,
            num_rows,
            num_columns,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            **OPTIONS,
        )

    def combine(self, routed: Tensor) -> Tensor:
        """(T, D): per token, the sum of its rows of ``routed`` (R, D)."""
        dim, block_t = routed.shape[1], 4
        out = routed.new_empty(self.num_tokens, dim)
        block_d = min(512, triton.next_power_of_2(dim))
        grid = (triton.cdiv(self.num_tokens, block_t), triton.cdiv(dim, block_d))
        self.plan.kernel(combine_kernel)[grid](
            routed,
            self.slot_rows,
            out,
            self.num_tokens,
            dim,
            TOP_K=self.top_k,
            BLOCK_T=block_t,
            BLOCK_D=block_d,
            **OPTIONS,
        )
        return out

    def finish(self, routed: Tensor, combine: bool = True) -> Tensor:
        """``routed`` (R, D) summed per token (T, D), or its rows (R, D) if not ``combine``."""
        if self.slot_rows is None:
            self.zero_tail(routed)
        elif combine:
            return self.combine(routed)
        return routed

    def bias_dot(self, grad_out: Tensor, b_out: Tensor, partial: Tensor) -> None:
        """partial (R,) = the term of the output bias in dS."""
        dim, block_m = grad_out.shape[1], 16
        self.plan.kernel(bias_dot_kernel)[(self.max_tiles(block_m),)](
            grad_out,
            b_out,
            self.row_slots,
            self.tiles(block_m),
            partial,
            dim,
            self.top_k,
            grad_out.stride(0),
            *b_out.stride(),
            HAS_SLOTS=self.has_slots,
            BLOCK_M=block_m,
            BLOCK_D=min(512, triton.next_power_of_2(dim)),
            **OPTIONS,
        )

    def scale_grad(self, partials: Tensor, topk_weights: Tensor) -> Tensor:
        """d(topk_weights) (T, K) from the dS partials (P, R)."""
        grad = torch.empty_like(topk_weights, memory_format=torch.contiguous_format)
        block = 256
        self.plan.kernel(scale_grad_kernel)[(triton.cdiv(grad.numel(), block),)](
            partials,
            self.last_offset if self.slot_rows is None else self.slot_rows,
            grad,
            grad.numel(),
            self.num_rows,
            partials.shape[0],
            HAS_SLOTS=self.has_slots,
            BLOCK=block,
            **OPTIONS,
        )
        return grad

    def bias_grad(
        self,
        source: Tensor,
        bias: Tensor,
        *,
        scale: Tensor | None = None,
        gather: bool = False,
    ) -> Tensor:
        """(E, N) contiguous: per expert, the sum of scale * source over its rows."""
        grad = torch.empty_like(bias, memory_format=torch.contiguous_format)
        num_columns, block_n = grad.shape[1], 128
        grid = (self.num_experts, triton.cdiv(num_columns, block_n))
        self.plan.kernel(bias_grad_kernel)[grid](
            source,
            source if scale is None else scale,
            self.row_slots,
            self.offs,
            grad,
            num_columns,
            self.top_k,
            source.stride(0),
            *grad.stride(),
            GATHER=gather and self.has_slots,
            HAS_SLOTS=self.has_slots,
            HAS_SCALE=scale is not None,
            BLOCK_R=32,
            BLOCK_N=block_n,
            **OPTIONS,
        )
        return grad
