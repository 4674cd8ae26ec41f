"""Activation checkpointing of layers that communicate, without communicating again.

Plain checkpointing runs a region a second time in backward, and with it every
all-to-all and every host read of sizes. :func:`save_communication` keeps what the
collectives returned instead: the counts, expert ids and router weights, the rows that
the experts received, and the rows that came back. All else is recomputed.

The rows are kept as they travelled, so that FP8 rows cost half of what bfloat16 rows
do. The rows that came back are used if something behind combine, inside the region, has
to be recomputed from its output; they are kept in any case. To save them, end the region
in front of combine.
"""

from __future__ import annotations

import functools
from typing import Any, TYPE_CHECKING

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)


if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


__all__ = ["save_communication"]

_COLLECTIVES = (
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._c10d_functional.wait_tensor.default,
)


def _policy(
    inner: Callable[..., CheckpointPolicy] | None,
    ctx: Any,
    op: Any,
    *args: Any,
    **kwargs: Any,
) -> CheckpointPolicy:
    if op in _COLLECTIVES:
        return CheckpointPolicy.MUST_SAVE
    if op is torch.ops.aten._to_copy.default:
        target = kwargs.get("device")
        # Sizes on their way to the host: reading them again would sync again.
        if target is not None and torch.device(target).type == "cpu":
            if args[0].device.type != "cpu":
                return CheckpointPolicy.MUST_SAVE
    if inner is None:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return inner(ctx, op, *args, **kwargs)


def save_communication(
    policy: Callable[..., CheckpointPolicy] | None = None,
) -> Callable[[], tuple[AbstractContextManager, AbstractContextManager]]:
    """``context_fn`` of :func:`torch.utils.checkpoint.checkpoint` for MoE layers.

    Args:
        policy (callable, optional): decides, as a policy function of
            :func:`~torch.utils.checkpoint.create_selective_checkpoint_contexts`, about
            all other ops. Default: None (they are recomputed)

    Under :func:`torch.compile`, a static switch sets its overflow counter inside the
    region, which needs
    ``torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True``.

    Example::
        >>> # xdoctest: +SKIP("needs a process group")
        >>> y = checkpoint(layer, x, use_reentrant=False, context_fn=save_communication())
    """
    return functools.partial(
        create_selective_checkpoint_contexts, functools.partial(_policy, policy)
    )
