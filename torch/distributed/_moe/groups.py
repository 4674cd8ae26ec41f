"""Process groups of expert parallelism: their timeouts, and what their ranks agree on.

A model outlives ``destroy_process_group``, and a group that something keeps alive keeps its
threads, which then end in the middle of the interpreter's shutdown. Nothing here or in the
modules that use it holds a group: names do.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import _disable_current_modes


if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = [
    "group_timeout",
    "inherit_timeout",
    "own_group",
    "SameOnAllRanks",
    "silent_ranks",
]


# Name of the group that only the communication of MoE layers uses, by the group that it
# has the ranks of.
_own_groups: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
# How long a failing rank waits for the others to say that they failed, too.
_ANSWER_SECONDS = 1.0


def group_timeout(group: ProcessGroup) -> timedelta | None:
    """Timeout of the group's first backend, None where it has none."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


def inherit_timeout(group: ProcessGroup) -> None:
    """Gives a group without a timeout of its own that of the default group.

    Groups of meshes, and ``new_group`` without a timeout, have the backend's stock value
    (half an hour), whatever ``init_process_group`` was told: a lost rank would be
    noticed by the default group only.
    """
    world = dist.group.WORLD
    if world is None or group is world:
        return
    timeout, wanted = group_timeout(group), group_timeout(world)
    stock = c10d._get_default_timeout(dist.get_backend(group))
    if timeout is not None and wanted is not None and timeout == stock != wanted:
        dist.set_timeout(wanted, group)


def silent_ranks(group_name: str, ranks: list[int], attempt: int) -> str:
    """Which of the ranks do not say, over the store, that they failed as well.

    A timeout does not name the rank that was waited for. Those that are alive fail
    about when this one does.
    """
    heard: list[int] = []

    def ask() -> None:
        # The store may be what is lost: never on the thread that has to raise.
        with contextlib.suppress(RuntimeError):
            store = c10d._get_default_store()
            key = f"moe_failed/{group_name}/{attempt}/"
            store.set(key + str(dist.get_rank()), "")
            end = time.monotonic() + _ANSWER_SECONDS
            while len(heard) < len(ranks) and time.monotonic() < end:
                heard[:] = [rank for rank in ranks if store.check([key + str(rank)])]
                time.sleep(0.05)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2 * _ANSWER_SECONDS)
    silent = [rank for rank in ranks if rank not in heard]
    if not heard:
        return "the store does not answer"
    return f"no answer from ranks {silent}" if silent else "all its ranks answer"


def own_group(group: ProcessGroup) -> str:
    """Name of a group of the same ranks that only MoE communication uses. Collective.

    Collectives of one group must be issued in one order by all ranks. A thread of its own
    can't keep that order with what other threads send in the group, such as the gradients
    of data parallelism. Made at the first call for a group.
    """
    if group not in _own_groups:
        own = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=group_timeout(group),
            backend=dist.get_backend(group),
            use_local_synchronization=True,
            group_desc="moe_communication",
        )
        # pyrefly: ignore[missing-attribute, unsupported-operation]
        _own_groups[group] = _own_groups[own] = own.group_name
    return _own_groups[group]


class SameOnAllRanks:
    """Compares arguments over ranks the first time that they are used.

    A collective of Python objects and one host sync per set of argument names; nothing
    after that. It must not depend on the values: a rank whose value is new would wait
    here for peers that go on. A rank that changes a value alone later is left to what
    the collectives carry themselves, or to the timeout of the backend.

    Not compared: in FakeTensorMode, where nothing communicates, and on the fake backend,
    whose ranks are all in this process.

    Args:
        owner (str): starts the error message.
        groups (sequence of ProcessGroup): ranks that must agree: of one group, or the
            groups of the dimensions of a mesh.
    """

    def __init__(self, owner: str, groups: Sequence[ProcessGroup]) -> None:
        self._owner = owner
        self._names = [group.group_name for group in groups]
        self._seen: set[tuple[str, ...]] = set()

    def check(self, **values: Any) -> None:
        """Raises RuntimeError on all ranks if one of the ``values`` differs.

        Args:
            values: by argument name, compared and shown by ``str``.
        """
        key = tuple(values)
        if key in self._seen or detect_fake_mode() is not None:
            return
        groups = [c10d._resolve_process_group(name) for name in self._names]
        if any(dist.get_backend(group) == "fake" for group in groups):
            return
        shown = {name: str(value) for name, value in values.items()}
        rows = [(dist.get_rank(), shown)]
        # A mode of one rank only, such as a profiler, must not change what is sent.
        with _disable_current_modes():
            for group in groups:
                parts: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(parts, rows, group=group)
                rows = [row for part in parts for row in part]
        rows.sort(key=lambda row: row[0])
        for name in values:
            found = [row[name] for _, row in rows]
            if len(set(found)) > 1:
                ranks = [rank for rank, _ in rows]
                raise RuntimeError(
                    f"{self._owner}: {name} must be the same on all ranks, ranks "
                    f"{ranks} have [{', '.join(found)}]"
                )
        self._seen.add(key)
