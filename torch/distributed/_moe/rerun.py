"""Recovers from static capacity that was too small: the step runs again with more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist


if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from torch.distributed._moe.all_to_all import TokenSwitchAllToAll
    from torch.distributed.distributed_c10d import ProcessGroup

    R = TypeVar("R")


__all__ = ["grow_and_rerun"]


def grow_and_rerun(
    switches: list[TokenSwitchAllToAll],
    step: Callable[[], R],
    *,
    max_reruns: int = 2,
    group: ProcessGroup | None = None,
) -> R:
    """Runs ``step`` and, if tokens did not fit, again with enough capacity.

    Collective over the groups of ``switches``; all ranks rerun together.

    Args:
        switches (list[TokenSwitchAllToAll]): static switches that ``step`` uses.
        step (callable): forward and backward of one step. Runs again from the
            start: it must zero its gradients itself, and change nothing else.

    Keyword Args:
        max_reruns (int): one is enough unless a rerun routes differently, as when
            a later layer or level routes tokens that an earlier one left out: then
            one for each. Default: 2
        group (ProcessGroup, optional): ranks that ``step`` communicates with beyond
            the groups of the switches, such as data-parallel replicas: if one has to
            rerun, all do. Default: None

    Returns:
        What the last ``step`` returned; nothing was left out in it.
    """
    for _ in range(max_reruns + 1):
        result = step()
        # Every switch communicates, so that no rank stops at the first overflow.
        grown = [switch.grow() for switch in switches]
        overflow = any(grown)
        if group is not None:
            device = dist.distributed_c10d._get_pg_default_device(group)
            flag = torch.tensor([overflow], dtype=torch.int32, device=device)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
            overflow = bool(flag)
        if not overflow:
            return result
    raise RuntimeError(
        f"grow_and_rerun: tokens still did not fit after {max_reruns} reruns; "
        f"capacities are now {[s.capacity for s in switches]}"
    )
