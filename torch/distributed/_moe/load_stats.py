"""Averaged expert loads, collected without making a training step wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor


if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup


__all__ = ["LoadStats"]


class LoadStats:
    """Exponential average of token copies per layer and expert over all ranks.

    :meth:`record` adds the router's counts on their device. :meth:`start` begins
    one asynchronous sum over ranks, :meth:`result` takes it in a later step, when
    it has long arrived. Neither reads a value on the host, except ``result``.

    Recomputed layers (activation checkpointing) record twice; loads are only
    compared inside a layer, so that this does not change a placement.

    Args:
        num_layers (int): number of MoE layers.
        num_experts (int): number of experts of each.

    Keyword Args:
        group (ProcessGroup, optional): ranks to sum over. Default: the default
            group
        decay (float): weight of the past in the average, in [0, 1). Default: 0.9
        device (torch.device, optional): device of the counts. Default: cpu

    Example::
        >>> # xdoctest: +SKIP("needs a process group")
        >>> stats = LoadStats(num_layers=24, num_experts=64)
        >>> for layer, counts in enumerate(counts_of_this_step):
        ...     stats.record(layer, counts)
        >>> if step % 100 == 0:
        ...     stats.start()
        >>> if step % 100 == 50 and stats.pending:
        ...     loads = stats.result()  # then plan(loads[layer], topology)
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        group: ProcessGroup | None = None,
        decay: float = 0.9,
        device: torch.device | str | None = None,
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"LoadStats: decay must be in [0, 1), got {decay}")
        self._group = group
        self._decay = decay
        self._sums = torch.zeros(
            num_layers, num_experts, dtype=torch.int64, device=device
        )
        self._flight: tuple[Tensor, dist.Work] | None = None
        self._average: Tensor | None = None

    @property
    def pending(self) -> bool:
        """Whether a sum was started and not yet taken."""
        return self._flight is not None

    def record(self, layer: int, counts: Tensor) -> None:
        """Adds the counts of one forward pass of one layer.

        Args:
            layer (int): index of the layer.
            counts (Tensor): (num_experts) integer, on the device of this object.
        """
        if counts.shape != self._sums.shape[1:]:
            raise ValueError(
                f"LoadStats.record: counts must have shape "
                f"({self._sums.shape[1]},), got {tuple(counts.shape)}"
            )
        self._sums[layer] += counts

    def start(self) -> None:
        """Begins to sum over ranks what was recorded since the last start."""
        if self._flight is not None:
            raise RuntimeError("LoadStats.start: take result() of the last start first")
        snapshot = self._sums.clone()
        self._sums.zero_()
        work = dist.all_reduce(snapshot, group=self._group, async_op=True)
        self._flight = (snapshot, work)

    def result(self) -> Tensor:
        """Waits for the sum and adds it to the average.

        Returns:
            Tensor: (num_layers, num_experts) float64 on CPU, equal on all ranks.
        """
        if self._flight is None:
            raise RuntimeError("LoadStats.result: call start() first")
        snapshot, work = self._flight
        work.wait()
        self._flight = None
        latest = snapshot.double().cpu()
        if self._average is None:
            self._average = latest
        else:
            self._average = self._average.lerp(latest, 1 - self._decay)
        return self._average.clone()
