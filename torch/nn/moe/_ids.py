"""Expert ids of a router, as torch.nn.moe reads them."""

import torch
from torch import Tensor


def check_dtype(name: str, topk_indices: Tensor) -> None:
    """Raises a TypeError in the name of a function whose ids are no integers."""
    if topk_indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{name}: topk_indices must have dtype int32 or int64, got "
            f"{topk_indices.dtype}"
        )


def expert_columns(topk_indices: Tensor, num_experts: int) -> Tensor:
    """``(*, K)`` int64 ids in which "no expert" is E, a column to be cut off again.

    Raises:
        IndexError: an id is outside [-1, E]. On CUDA this is a device-side assert.
    """
    # Of the row plan only which slots have no row, and its check of the ids.
    _, slot_rows, _, _ = torch.ops.aten._moe_permutation(
        topk_indices.flatten(0, -2), num_experts
    )
    nowhere = slot_rows.view(topk_indices.shape) < 0
    return topk_indices.long().masked_fill(nowhere, num_experts)
