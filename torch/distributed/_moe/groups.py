"""Process groups that only MoE communication uses, and what their backends tell.

This file keeps names of groups, not groups. A model outlives ``destroy_process_group``; a group that
it held would keep its threads, which would end during the interpreter's shutdown.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast, TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = ["group_timeout", "own_group", "scalar_device", "sub_group"]


# Groups only for MoE communication, by their parent group, their ranks, and whether
# they belong to the communication thread.
_sub_groups: WeakKeyDictionary[
    ProcessGroup, dict[tuple[tuple[int, ...], bool], c10d.GroupName]
]
_sub_groups = WeakKeyDictionary()
# How many of these groups each set of ranks has made, by the world.
_names: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def group_timeout(group: ProcessGroup) -> timedelta | None:
    """Timeout of the group's first backend that has one, or None."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


def scalar_device(group: ProcessGroup) -> torch.device:
    """The accelerator if the group has a native backend for it (NCCL), else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    config = c10d.BackendConfig(c10d.get_backend_config(group)).get_device_backend_map()
    own = accelerator and config.get(accelerator.type) not in (None, "gloo", "fake")
    return accelerator if own else torch.device("cpu")


def sub_group(
    group: ProcessGroup, ranks: list[int], *, own: bool = False
) -> c10d.GroupName:
    """Name of a group of some ranks of ``group``, only for MoE communication.

    Collective over ``ranks``. The first call makes the group, with the backend and the timeout of
    ``group``; all layers share it. Errors have a note that says what must be equal on the ranks.

    Args:
        ranks (list[int]): global ranks, ascending.

    Keyword Args:
        own (bool): a separate group, see :func:`own_group`; the group of a switch's level may have
            all ranks, too. Default: ``False``
    """
    made, key = _sub_groups.setdefault(group, {}), (tuple(ranks), own)
    if key not in made:
        # A group's name is salted with the number of groups that the process made. Ranks with
        # other layers, as in a pipeline, made other numbers. So the salt here is negative, and
        # the number is restored; otherwise a later new_group would have different names. A name is
        # never used again, as the store keeps the addresses of a destroyed group.
        world, names = c10d._world, _names.setdefault(dist.group.WORLD, Counter())
        count = world.group_count
        try:
            world.group_count = -1 - names[key[0]]
            new = dist.new_group(
                ranks,
                timeout=group_timeout(group),
                backend=dist.get_backend(group),
                use_local_synchronization=True,
                group_desc="moe_communication",
            )
        except RuntimeError as error:
            error.add_note(
                f"expert parallel: a group of ranks {ranks} was not made on rank {dist.get_rank()}; "
                "all of them must make the same layers parallel, with the same token_switch, "
                "ranks_per_node, num_chunks and schedule"
            )
            raise
        finally:
            world.group_count = count
        # Not where it failed: other ranks may not have tried yet.
        names[key[0]] += 1
        made[key] = cast("ProcessGroup", new).group_name
    return made[key]


def own_group(group: ProcessGroup) -> c10d.GroupName:
    """:func:`sub_group` of all ranks of ``group``; such a group is its own.

    All ranks must issue the collectives of a group in one order. A communication thread
    can't keep that order with what other threads send in the group, such as the gradients
    of data parallelism."""
    ranks = dist.get_process_group_ranks(group)
    name = sub_group(group, ranks, own=True)
    _sub_groups[c10d._resolve_process_group(name)] = {(tuple(ranks), True): name}
    return name
