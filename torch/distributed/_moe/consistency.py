"""Finds out that ranks disagree before they exchange rows that do not fit."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = ["SameOnAllRanks"]


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
        self._groups = groups
        self._seen: set[tuple[str, ...]] = set()

    def check(self, **values: Any) -> None:
        """Raises RuntimeError on all ranks if one of the ``values`` differs.

        Args:
            values: by argument name, compared and shown by ``str``.
        """
        key = tuple(values)
        if key in self._seen or detect_fake_mode() is not None:
            return
        if any(dist.get_backend(group) == "fake" for group in self._groups):
            return
        shown = {name: str(value) for name, value in values.items()}
        rows = [(dist.get_rank(), shown)]
        # A mode of one rank only, such as a profiler, must not change what is sent.
        with _disable_current_modes():
            for group in self._groups:
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
