"""The base of the token switches: checks arguments, and raises on ranks that disagree instead of hanging."""

from __future__ import annotations

import functools
from typing import Any, cast, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch.distributed._moe.exchange import meet, MEETS_FOR
from torch.distributed._token_switch import Routing, TokenSwitch
from torch.utils._python_dispatch import _disable_current_modes


if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed._moe.exchange import Exchange


__all__ = ["AGREED", "check_counts", "CheckedTokenSwitch", "ODD"]


# Facts that shapes of collectives depend on, including those of backward, and the layer: one that a rank
# leaves out alone would get the tokens of the next one.
AGREED = (
    "layer, from 1,",
    "K",
    "num_experts",
    "row bytes",
    "autocast, requires_grad of tokens, router weights and experts, and a fetch, as bits,",
)

# Marks of static rows; larger marks say what requires gradients. A rank whose messages change
# size announces it in a message of the size that the others expect: with
# CHANGED if all ranks heard so far do the same, else with ODD.
ODD, CHANGED = 0, 1
# Layers whose marks differ.
_LAYERS = 64


def check_counts(who: str, **values: object) -> None:
    """Raises if one of ``values`` is no integer of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{who}: {name} must be an integer of at least 1, got {value!r}"
            )


class CheckedTokenSwitch(TokenSwitch):
    """Token switch that allocates its own outputs, and the checks of all switches.

    Attributes:
        ranks (list[int]): global ranks in the order of the experts that they hold.
        levels (tuple[Exchange, ...]): where the communication happens.
        layer (int): number of its layer among those of the ranks, from 1. 0 is any layer.
        settings (str): of its owner, which must be the same on all ranks.
    """

    ranks: list[int]
    levels: tuple[Exchange, ...]
    layer = 0
    settings = ""
    # Whether backward sends gradients of each tensor, if known before dispatch.
    requires_grad: tuple[bool, ...] = ()

    def _set_experts(self, num_experts: int, ranks: list[int]) -> None:
        if num_experts < 1 or num_experts % len(ranks):
            raise ValueError(
                f"{type(self).__name__}: num_experts must be a multiple of the "
                f"{len(ranks)} ranks that share them, got {num_experts}"
            )
        self._num_experts = num_experts
        self.ranks = ranks
        self._agreed: set[tuple[str, ...]] = set()
        # Facts that sizes of static messages depended on in the last forward.
        self._last_facts: dict[str, str] = {}
        # Mark by what requires gradients, in the order in which all ranks agreed.
        self._marks: dict[int, int] = {}

    def name_owner(self, owner: str, layer: int) -> None:
        """Names the owner of the switch in errors of its communication."""
        self.layer = layer
        for level in self.levels:
            level.owner = owner

    def _must_agree(self, **values: object) -> None:
        """Raises on all ranks if one of ``values``, as text, is not the same on all.

        It compares only at the first use of an argument, by a collective of Python objects and
        one host sync. Whether it compares must not depend on the values: a rank with a new value
        would wait here for peers that go on. Messages carry what reveals later changes:
        sizes in compact routing, marks in static routing (:meth:`_compare_facts`).

        Nothing is compared if nothing communicates (:meth:`_communicates`).
        """
        # The order matters: a graph guards what it reads of self.
        if not self._communicates() or tuple(values) in self._agreed:
            return
        # Layers that were parallelized in another order on some ranks have each other's weights and plans.
        facts = {"layer": self.levels[0].owner, "settings": self.settings, **values}
        rows = [(dist.get_rank(), {name: str(v) for name, v in facts.items()})]
        # A mode of one rank only, such as a profiler, must not change what is sent.
        with _disable_current_modes():
            meet(self.levels, self.levels[0].needed, "agree", {MEETS_FOR: 1})
            for level in self.levels:
                parts: list[Any] = [None] * level.num_ranks
                gather = functools.partial(
                    dist.all_gather_object, parts, rows, group=level.group
                )
                level.named("agree", gather)
                rows = [row for part in parts for row in part]
        rows.sort(key=lambda row: row[0])
        for name in facts:
            found = [row[name] for _, row in rows]
            if len(set(found)) > 1:
                ranks = [rank for rank, _ in rows]
                raise RuntimeError(
                    f"{type(self).__name__}: {name} must be the same on all ranks, ranks "
                    f"{ranks} have [{', '.join(found)}]"
                )
        self._agreed.add(tuple(values))

    def _communicates(self) -> bool:
        """False in graphs, in FakeTensorMode, and on the fake backend."""
        if torch.compiler.is_compiling() or detect_fake_mode():
            return False
        return "fake" not in [dist.get_backend(level.group) for level in self.levels]

    def _compare_facts(self, **facts: object) -> int:
        """Raises if this rank, but not all, would now send static messages of another size.

        Collective only on ranks where ``facts`` changed, or where gradients are required in a
        new combination. To the other ranks it looks like a dispatch whose marks make them raise.

        Returns:
            int: the mark of what requires gradients; the first one if nothing communicates.
        """
        # First, as in _must_agree.
        if not self._communicates():
            return CHANGED + 1
        bits = self._grad_bits()
        now, last = {k: str(v) for k, v in facts.items()}, self._last_facts
        if now == last and bits in self._marks:
            return self._marks[bits]
        new = CHANGED + 1 + self.layer % _LAYERS + _LAYERS * len(self._marks)
        mark = self._marks.get(bits, new)
        if (mark + 1) * (self._num_experts + 2) >= 2**31:
            raise RuntimeError(
                f"{type(self).__name__}: {self._num_experts} experts and {len(self._marks)} ways "
                "to require gradients do not fit the ids of a message; leave capacity out"
            )
        if last:
            everyone = True
            with _disable_current_modes():
                for level in self.levels:
                    sent = CHANGED if everyone else ODD
                    everyone = self._announce(level, sent) and everyone
            if not everyone:
                changes = [
                    f"{k} from {last[k]} to {v}" for k, v in now.items() if last[k] != v
                ]
                changes = changes or [f"{AGREED[-1]} to {bits:b}"]
                raise RuntimeError(
                    f"{type(self).__name__}: {', '.join(now)}, {AGREED[-1]} must be the same on "
                    f"all ranks, this one changed {', '.join(changes)}, and others did not"
                )
        now_and_bits = {**now, AGREED[-1].rstrip(","): bits}
        self._agreed.discard(tuple(now_and_bits))
        self._must_agree(**now_and_bits)
        self._last_facts, self._marks[bits] = now, mark
        return mark

    def _announce(self, level: Exchange, mark: int) -> bool:
        """Sends ``mark`` to ``level``, in a message like the last one; whether all ranks sent it, and no tokens."""
        return level.announce(mark)

    def _same_mark(self, same: Tensor) -> None:
        """Raises if a static message has another mark."""
        torch._assert_async(
            same,
            f"{type(self).__name__}: the layer, K, D, dtypes, capacity, {AGREED[-1]} must be the same "
            "on all ranks, and one of them has changed some of it alone",
        )

    def _grad_bits(self) -> int:
        return sum(needs << i for i, needs in enumerate(self.requires_grad))

    def _check_ids(self, topk_idx: Tensor, layout: str) -> None:
        name, most = type(self).__name__, self._num_experts
        if layout != "flat":
            raise ValueError(f"{name}: layout must be 'flat', got {layout!r}")
        if topk_idx.dim() != 2 or topk_idx.is_floating_point():
            raise ValueError(
                f"{name}: topk_idx must be an integer tensor of shape (T, K), got "
                f"{topk_idx.dtype} of shape {tuple(topk_idx.shape)}"
            )
        # Without a sync if the ids are on a device.
        torch._assert_async(
            (topk_idx.clamp(-1, most) == topk_idx).all(),
            f"{name}: topk_idx must be in [-1, num_experts]; -1 and num_experts mean "
            "no expert",
        )

    def _check_tokens(
        self, topk_idx: Tensor, tokens: Tensor, topk_weights: Tensor
    ) -> None:
        name = type(self).__name__
        if tokens.dim() != 2 or tokens.shape[0] != topk_idx.shape[0]:
            raise ValueError(
                f"{name}: tokens must have shape (T, D) with T = "
                f"{topk_idx.shape[0]}, got {tuple(tokens.shape)}"
            )
        if topk_weights.shape != topk_idx.shape:
            raise ValueError(
                f"{name}: topk_weights must have shape (T, K) = "
                f"{tuple(topk_idx.shape)}, got {tuple(topk_weights.shape)}"
            )

    def _check_expert_tokens(self, expert_tokens: Tensor, rows: int) -> None:
        if expert_tokens.dim() != 2 or expert_tokens.shape[0] != rows:
            raise ValueError(
                f"{type(self).__name__}: expert_tokens must have shape (M, D) with M = "
                f"{rows} dispatched rows, got {tuple(expert_tokens.shape)}"
            )

    def _alloc_dispatch_outputs(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("dispatch makes its outputs")

    def _dispatch(
        self,
        routing: Routing,
        tokens: Tensor,
        topk_weights: Tensor,
        out_tokens: Tensor,
        out_topk_weights: Tensor | None,
        out_topk_idx: Tensor | None,
    ) -> None:
        rows = cast("int", self._exact_recv_tokens(routing))
        results = self._dispatch_new(routing, tokens, topk_weights, rows)
        for out, result in zip((out_tokens, out_topk_weights, out_topk_idx), results):
            if out is not None and result is not None:
                out.copy_(result)

    def _combine(
        self, routing: Routing, expert_tokens: Tensor, out_tokens: Tensor
    ) -> None:
        out_tokens.copy_(self._combine_new(routing, expert_tokens))
