"""What moe_fusion knows of the order of rows: sorts, what offsets count, and which expert a row is of."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import guard_or_false

from .moe_match import (
    argument,
    CASTS,
    flat_source,
    number,
    op_name,
    rank,
    row_selection,
    same_size,
    same_value,
    value_of,
    VIEWS,
    writers,
)


def is_expert_of_row(index: Any, experts: Any, grouped: bool, num_experts: int) -> bool:
    """Whether index is the expert of every row: of a bmm its ids, else what offs counts, sorted.

    A row of no expert may have any, so that ``index.clamp_(max=num_experts - 1)`` changes nothing.
    """
    if not grouped:
        return same_value(index, experts)
    count, ids = _count_of(experts, num_experts), _sorted_from(index)
    if count is None or ids is None or count.values not in (index, ids):
        return False
    read = max(index, count.node)
    if writers(ids, index) or writers(count.values, read):
        return False
    return all(_is_last_expert_at_most(w, num_experts) for w in writers(index))


def is_mask_of_no_expert(mask: Any, experts: Any, num_experts: int) -> bool:
    """Whether mask (R, 1) is true for no row of an expert: ids from num_experts on are sorted last."""
    flat, value = flat_source(mask), value_of(mask)
    if rank(mask) != 2 or rank(flat) != 1 or not same_size(value.shape[1], 1):
        return False
    least = {"ge": num_experts, "gt": num_experts - 1, "eq": num_experts}
    name, count = op_name(flat), _count_of(experts, num_experts)
    if name not in least or number(argument(flat, 1, "other")) != least[name]:
        return False
    if count is None or count.last != num_experts - 1 or writers(mask):
        return False
    return is_expert_of_row(flat.args[0], experts, True, num_experts)


_INTEGERS = (torch.int32, torch.int64)
# histc on float32 is exact for that many values and bins; both are far beyond any layer.
_EXACT_COUNT, _EXACT_BINS = 1 << 24, 1 << 11


def _exact_source(node: Any, until: Node | None = None) -> Any:
    """The node before casts that keep integers up to _EXACT_COUNT and that nothing writes to."""
    exact = (*_INTEGERS, torch.float32, torch.float64)
    while op_name(node) in {"int", "long", *CASTS} and value_of(node).dtype in exact:
        if writers(node, until):
            break
        node = node.args[0]
    return node


def _flat(node: Any) -> Any:
    """The node before views that keep how often a number is there."""
    while op_name(node) in VIEWS - {"expand"}:
        if value_of(node).dtype != value_of(node.args[0]).dtype:
            break
        node = node.args[0]
    return node


@dataclass
class _Count:
    """Integers, and the node that counts them; what is above last is left out."""

    values: Any
    node: Node
    last: int


def _count_of(offs: Any, num_experts: int) -> _Count | None:
    """What ``offs[e]`` counts in [0, e], the last of offs up to ``last``; None if not certain."""
    total = _exact_source(offs)
    if op_name(total) != "cumsum" or argument(total, 1, "dim") not in (0, -1):
        return None
    node = _exact_source(total.args[0])
    if op_name(node) not in ("histc", "bincount") or writers(total) or writers(node):
        return None
    last = num_experts - 1
    if op_name(node) == "histc":
        bins, low, last = (
            number(argument(node, i, name))
            for i, name in ((1, "bins"), (2, "min"), (3, "max"))
        )
        if (bins, low) != (num_experts, 0) or num_experts > _EXACT_BINS:
            return None
        if last not in (num_experts - 1, num_experts):
            return None
        last = last or 1  # an empty range stands for that of the values
    elif argument(node, 1, "weights") is not None:
        return None
    if value_of(node.args[0]).dtype in (torch.float16, torch.bfloat16):
        return None
    return _Count(_exact_source(node.args[0], node), node, int(last))


def counted_ids(offs: Any, perm: Any, num_experts: int) -> tuple[Any, int] | None:
    """(ids, last): integers (R) that perm sorts, where ``offs[e]`` is how many are in [0, e].

    The last of offs counts up to ``last``, the number of experts or one less. None where that is
    not certain, whatever the ids are.
    """
    ids, sort, count = sorted_by(perm), _sort_of(perm), _count_of(offs, num_experts)
    if not _is_ascending(sort) or rank(ids) != 1 or writers(perm):
        return None
    if count is None or op_name(count.node) != "histc":
        return None
    values = count.values
    if _sorted_from(values) is not ids and not same_value(_flat(values), _flat(ids)):
        return None
    if not guard_or_false(value_of(ids).shape[0] <= _EXACT_COUNT):
        return None
    until = max(sort, count.node)
    if value_of(ids).dtype not in _INTEGERS or writers(ids, until):
        return None
    return None if writers(values, until) else (ids, count.last)


def is_topk_index(ids: Any, num_experts: int) -> bool:
    """Whether ids are positions that topk found among num_experts, so that all are experts."""
    while op_name(ids) in {"int", "long", "to", *VIEWS}:
        if value_of(ids).dtype not in _INTEGERS:
            return False
        ids = ids.args[0]
    if op_name(ids) != "getitem" or ids.args[1] != 1 or op_name(ids.args[0]) != "topk":
        return False
    topk = ids.args[0]
    scores = value_of(topk.args[0])
    return (
        scores is not None
        and argument(topk, 2, "dim", -1) in (-1, scores.dim() - 1)
        and same_size(scores.shape[-1], num_experts)
    )


def _is_last_expert_at_most(node: Node, num_experts: int) -> bool:
    """Whether node is ``ids.clamp_(max=num_experts - 1)``."""
    if op_name(node) == "clamp_max_":
        return number(argument(node, 1, "max")) == num_experts - 1
    return (
        op_name(node) == "clamp_"
        and number(argument(node, 1, "min", 0)) in (0, None)
        and number(argument(node, 2, "max")) == num_experts - 1
    )


def _is_ascending(sort: Any) -> bool:
    return argument(sort, 2, "descending", False) is False


def _sorted_from(index: Any) -> Any:
    """ids where index is ``sort(ids)[0]`` or ``ids[argsort(ids)]``."""
    if op_name(index) == "getitem" and index.args[1] == 0:
        sort = index.args[0]
        return sort.args[0] if op_name(sort) == "sort" and _is_ascending(sort) else None
    taken = row_selection(index)
    if taken is None or sorted_by(taken[1]) is not taken[0]:
        return None
    perm = taken[1]
    return taken[0] if _is_ascending(_sort_of(perm)) and not writers(perm) else None


def _sort_of(perm: Any) -> Any:
    return perm.args[0] if op_name(perm) == "getitem" else perm


def sorted_by(perm: Any) -> Any:
    """ids where perm is the order that sorts them, which makes it a permutation; else None."""
    if (
        op_name(perm) == "getitem"
        and perm.args[1] == 1
        and op_name(perm.args[0]) == "sort"
    ):
        return perm.args[0].args[0]
    return perm.args[0] if op_name(perm) == "argsort" else None
