"""Inputs of plans: loads of experts over ranks and time, and times of steps."""

from __future__ import annotations

import contextlib
import math
import time
from statistics import median
from typing import Any, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import detect_fake_mode
from torch.distributed import distributed_c10d as c10d
from torch.distributed._moe.groups import scalar_device
from torch.utils._python_dispatch import _disable_current_modes


if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = ["LoadStats", "StepTimes"]


def _of_forwards(counts: Tensor) -> tuple[Tensor, int]:
    """Sum and number of the counts below the wrappers of torch.func: one for each element of a vmap."""
    functorch, dim = torch._C._functorch, 0
    while functorch.is_functorch_wrapped_tensor(counts):
        if functorch.is_batchedtensor(counts):
            dim += functorch.maybe_get_bdim(counts) <= dim
        counts = functorch.get_unwrapped(counts)
    with temporarily_clear_interpreter_stack():
        rows = counts.movedim(dim, -1).reshape(-1, counts.shape[dim])
        return rows.sum(0), len(rows)


def _sum_over(group: ProcessGroup | None, x: Tensor, what: str) -> Tensor:
    try:
        dist.all_reduce(x, group=group)
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        error.add_note(
            f"{what}: sum over ranks {ranks} failed, on rank {dist.get_rank()}"
        )
        raise
    return x


class LoadStats:
    """Token copies of a forward, per layer and expert: sum over ranks, average over time.

    :meth:`record` adds the router's counts on their device, and reads nothing on the host.
    :meth:`update` sums them over ranks, and reads the average.

    Records during backward do not count, as activation checkpointing runs a layer again
    there. Forwards without gradients count, as a serving model may plan by its loads.

    Args:
        num_layers (int): number of MoE layers.
        num_experts (int): number of experts of each.

    Keyword Args:
        group (ProcessGroup or name, optional): ranks to sum over. Default: the default
            group
        decay (float): weight of the past in the average, in [0, 1). Default: 0.9
        device (torch.device, optional): device of the counts. Default: cpu
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        group: ProcessGroup | c10d.GroupName | None = None,
        decay: float = 0.9,
        device: torch.device | str | None = None,
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"LoadStats: decay must be in [0, 1), got {decay}")
        # By name, as a group kept alive keeps its threads.
        self._group_name: Any = getattr(group, "group_name", group)
        self._decay = decay
        # The last column is the number of forwards. No inference tensor: the first forward may be an
        # evaluation, and training counts on.
        with torch.inference_mode(False):
            self._sums = torch.zeros(
                num_layers, num_experts + 1, dtype=torch.int64, device=device
            )
        self._average: Tensor | None = None

    @property
    def _group(self) -> ProcessGroup | None:
        name = self._group_name
        return None if name is None else c10d._resolve_process_group(name)

    def record(self, layer: int, counts: Tensor) -> None:
        """Adds the (num_experts) integer ``counts`` of one forward pass of one layer.

        Under :func:`torch.func.vmap` each element of the batch is a forward.
        """
        num_experts = self._sums.shape[1] - 1
        if counts.shape != (num_experts,):
            raise ValueError(
                f"LoadStats.record: counts must have shape ({num_experts},), "
                f"got {tuple(counts.shape)}"
            )
        modes, forwards = contextlib.nullcontext(), 1
        if not torch.compiler.is_compiling():
            # Inside a backward: a recomputed layer was counted before.
            if torch._C._current_graph_task_id() != -1:
                return
            if torch._C._len_torch_dispatch_stack() and detect_fake_mode() is None:
                # Selective checkpointing numbers its ops and would miss these in backward.
                modes = _disable_current_modes()
            if torch._C._functorch.peek_interpreter_stack() is not None:
                counts, forwards = _of_forwards(counts)
                modes = temporarily_clear_interpreter_stack()
        with modes:
            sums = self._sums[layer]
            sums[:num_experts].add_(counts)
            sums[num_experts].add_(forwards)

    def update(self) -> tuple[Tensor, Tensor]:
        """Adds the records since the last update to the average. Collective, and one sync.

        Returns:
            (Tensor, Tensor): the average, and that of the records alone, both (num_layers,
            num_experts) float64 on CPU, equal on all ranks.
        """
        what = "loads of experts, as of ExpertPlacement.step()"
        sums = _sum_over(self._group, self._sums.clone(), what)
        self._sums.zero_()
        total = sums.double().cpu()
        forwards = total[:, -1:] / dist.get_world_size(self._group)
        average = latest = total[:, :-1] / forwards.clamp_min(1)
        if self._average is not None:
            average = self._average.lerp(latest, 1 - self._decay)
        self._average = average
        return average.clone(), latest

    def state_dict(self) -> dict[str, Any]:
        """Average, and the records since. Collective; changes nothing.

        Counts are sums over ranks. Forwards are those of one rank, as another number of ranks may
        continue. The state is equal on all ranks, so one of them may save it.
        """
        what = "loads of experts, as of ExpertPlacement.state_dict()"
        recorded = _sum_over(self._group, self._sums.clone(), what)
        recorded[:, -1] //= dist.get_world_size(self._group)
        average = self._average
        average = None if average is None else average.clone()
        return {"average": average, "recorded": recorded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from ``state``, on any number of ranks."""
        recorded, average = state["recorded"], state["average"]
        if recorded.shape != self._sums.shape:
            raise ValueError(
                "LoadStats: state must be of (num_layers, num_experts + 1) = "
                f"{tuple(self._sums.shape)}, got {tuple(recorded.shape)}"
            )
        # Forwards are those of this rank. Counts are sums over ranks, so one rank adds them.
        self._sums.copy_(recorded)
        self._average = None if average is None else average.clone()
        if dist.get_rank(self._group):
            self._sums[:, :-1] = 0


# How much of its time training may lose to trials of copies; most windows at home after a trial.
_MAX_LOSS, _LONGEST_REST = 0.01, 100


class StepTimes:
    """Whether steps with copies of experts take longer than steps at home; equal on all ranks.

    Experts rest at home after slower steps until these cost 1 % of the time, 100 windows at most.
    """

    def __init__(self) -> None:
        self._begun: float | None = None
        self._since: float | None = None
        self._seconds: list[float] = []  # of the steps of this window
        self._at_home: float | None = None
        self._rest = 0  # windows
        self.fresh = False  # whether the window before this one was at home

    def begin(self) -> None:
        """Begins a step, unless it has begun; time between steps does not count."""
        if self._begun is None:
            self._begun = time.perf_counter()

    def tick(self) -> None:
        """Ends a step. If none was begun, it began with the end of the previous one."""
        now = time.perf_counter()
        if self._since is not None:
            self._seconds.append(now - (self._begun or self._since))
        self._begun, self._since = None, now

    def slower(self, group: ProcessGroup | None) -> tuple[bool, bool]:
        """Ends the window. If it had copies, sums its median step and that at home over ranks.

        Args:
            group (ProcessGroup, optional): ranks to sum over; None if it had no copies.

        Returns:
            (bool, bool): whether the next window is at home; and whether this one was slower than
            a window at home right before it, so that copies are the cause.
        """
        steps, self._seconds = self._seconds, []
        if self._rest > 1:
            self._rest -= 1
            return True, False
        if not steps:  # The first step of a process is not typical.
            return group is not None, False
        if group is None:
            self._at_home, self._rest, self.fresh = median(steps), 0, True
            return False, False
        if self._at_home is None:
            return True, False
        device = scalar_device(group)
        times = torch.tensor([median(steps), self._at_home], device=device)
        _sum_over(group, times, "times of steps, as of ExpertPlacement.step()")
        took, at_home = times.tolist()
        fresh, self.fresh = self.fresh, False
        if took <= at_home:
            return False, False
        self._rest = min(math.ceil((took / at_home - 1) / _MAX_LOSS), _LONGEST_REST)
        return True, fresh
