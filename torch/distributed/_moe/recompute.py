"""Recomputation of an expert-parallel layer that does not communicate again.

Plain activation checkpointing runs a region a second time in backward, with
every all-to-all and every host read of sizes. :func:`save_communication` instead keeps the
results of collectives: sizes, the messages that the experts received, and
the returned rows. Everything else is recomputed. Rows are kept in their sent form, so
FP8 rows cost half of what bfloat16 rows do. The returned rows are kept in any case, but
used only if the region recomputes something from the output of combine.
To save their memory, end the region before combine.

The dispatch mode of the region does not see communication on another thread or stream.
That gets its own mode, :func:`part_of_region`, and stays in flight.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any, Protocol, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    TorchDispatchMode,
)
from torch.utils.checkpoint import (
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)


if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self


__all__ = ["part_of_region", "Region", "save_communication"]


_COLLECTIVES = (
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._c10d_functional.wait_tensor.default,
)
# Of integers only, as sizes are. Others are of the model, such as those of tensor parallelism.
_COLLECTIVES_OF_SIZES = (
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
)


def _policy(
    inner: Callable[..., CheckpointPolicy] | None,
    ctx: Any,
    op: Any,
    *args: Any,
    **kwargs: Any,
) -> CheckpointPolicy:
    if op in _COLLECTIVES or (
        op in _COLLECTIVES_OF_SIZES and not args[0].is_floating_point()
    ):
        return CheckpointPolicy.MUST_SAVE
    if op is torch.ops.aten._to_copy.default:
        target = kwargs.get("device")
        # Copies of sizes to the host: reading them again would sync again.
        if target is not None and torch.device(target).type == "cpu":
            if args[0].device.type != "cpu":
                return CheckpointPolicy.MUST_SAVE
    if inner is None:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return inner(ctx, op, *args, **kwargs)


class Region(Protocol):
    """Dispatch mode of a checkpointed region, in its forward or in its recomputation.

    Attributes:
        replays (bool): whether the region is recomputed.
    """

    replays: bool

    def part(self, inline: bool) -> TorchDispatchMode | None:
        """See :func:`part_of_region`."""
        ...


class _Saving(_CachingTorchDispatchMode):
    """Forward of a region."""

    replays = False

    def __init__(
        self,
        policy: Callable[..., CheckpointPolicy],
        parts: list[TorchDispatchMode | None],
    ) -> None:
        super().__init__(policy, defaultdict(dict))
        self.parts = parts

    def part(self, inline: bool) -> TorchDispatchMode | None:
        if inline:
            self.parts.append(None)
            return None
        # A separate storage, as parts and what runs beside them have no common order.
        saving, replaying = create_selective_checkpoint_contexts(self.policy_fn)
        self.parts.append(replaying)
        return saving


class _Replaying(_CachedTorchDispatchMode):
    """Recomputation of a region."""

    replays = True

    def __init__(self, forward: _Saving) -> None:
        super().__init__(None, forward.storage)
        self.parts = forward.parts
        self.next_part = 0

    def __enter__(self) -> Self:
        self.next_part = 0
        return super().__enter__()

    def part(self, inline: bool) -> TorchDispatchMode | None:
        self.next_part += 1
        return self.parts[self.next_part - 1]


def part_of_region() -> tuple[Region | None, bool]:
    """The innermost :func:`save_communication` region here, and whether it is the only mode.

    Communication inside a region that runs on another thread or stream calls
    ``region.part(inline)`` and runs under the returned mode. In the recomputation, the calls must
    have the same order, and the work must run under that mode alone, which returns the kept
    results. None means that the work runs, or ran in forward, under
    the mode of the region itself.
    """
    stack = _get_current_dispatch_mode_stack()
    for mode in reversed(stack):
        if isinstance(mode, (_Saving, _Replaying)):
            return mode, len(stack) == 1
    return None, not stack


def _contexts(
    policy: Callable[..., CheckpointPolicy],
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    forward = _Saving(policy, [])
    return forward, _Replaying(forward)


def save_communication(
    policy: Callable[..., CheckpointPolicy] | None = None,
) -> Callable[[], tuple[TorchDispatchMode, TorchDispatchMode]]:
    """``context_fn`` of :func:`torch.utils.checkpoint.checkpoint` for MoE layers.

    Args:
        policy (callable, optional): policy function of
            :func:`~torch.utils.checkpoint.create_selective_checkpoint_contexts` for
            all other ops. Default: None (they are recomputed)

    Where :func:`torch.compile` traces the checkpoint, a layer sets attributes of its switch
    inside the region, which needs
    ``torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True``.

    Example::
        >>> # xdoctest: +SKIP("needs a process group")
        >>> y = checkpoint(layer, x, use_reentrant=False, context_fn=save_communication())
    """
    return functools.partial(_contexts, functools.partial(_policy, policy))
