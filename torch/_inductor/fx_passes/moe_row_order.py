"""The order of rows as moe_fusion recognises it: sorts, counts behind offsets, and the expert of a row."""

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
    operand_orders,
    rank,
    row_selection,
    same_size,
    same_value,
    value_of,
    VIEWS,
    writers,
)


def why_not_expert_of_row(
    index: Any, experts: Any, grouped: bool, num_experts: int
) -> str:
    """ "" if ``index`` is the expert of every row, else why that is not certain.

    The experts of rows are the ids of a bmm, or else the sorted ids that ``offs`` counts. A row
    without an expert may have any index, so ``index.clamp_(max=num_experts - 1)`` is allowed. Ids
    are taken as not negative: below 0, most counts would assign each row to another expert.
    """
    if not grouped:
        known = same_value(index, experts)
        return "" if known else "a bias is not indexed by the experts of the rows"
    count, ids = _count_of(experts, num_experts), _sorted_from(index)
    if count is None:
        return f"it has a bias, and what counts an expert's rows, {_source(experts)}, is not known"
    if ids is None:
        return f"a bias is indexed by {index}, which is not known as ids in ascending order"
    values = count.values
    if values is not index and not same_value(_flat(values), _flat(ids)):
        return f"a bias is indexed by {index}, and {values}, which is counted, are other ids"
    read = max(index, count.node)
    if writers(ids, index) or writers(values, read):
        return f"{values}, which is counted, is written in between"
    if all(_is_last_expert_at_most(w, num_experts) for w in writers(index)):
        return ""
    return f"{index}, which indexes a bias, is written"


def _source(offs: Any) -> str:
    """The node that may count, and what it calls, for a message."""
    node = _exact_source(offs)
    if op_name(node) == "cumsum":
        node = _exact_source(node.args[0])
    return f"{node} ({op_name(node) or getattr(node, 'op', 'a constant')})"


def is_mask_of_no_expert(mask: Any, experts: Any, num_experts: int) -> bool:
    """Whether mask (R, 1) is true only for rows without an expert: ids from num_experts on come last."""
    flat, value = flat_source(mask), value_of(mask)
    if rank(mask) != 2 or rank(flat) != 1 or not same_size(value.shape[1], 1):
        return False
    least = {"ge": num_experts, "gt": num_experts - 1, "eq": num_experts}
    name, count = op_name(flat), _count_of(experts, num_experts)
    if name not in least or number(argument(flat, 1, "other")) != least[name]:
        return False
    if count is None or count.last != num_experts - 1 or writers(mask):
        return False
    return not why_not_expert_of_row(flat.args[0], experts, True, num_experts)


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
    """The node before views that do not change how often a number occurs."""
    while op_name(node) in VIEWS - {"expand"}:
        if value_of(node).dtype != value_of(node.args[0]).dtype:
            break
        node = node.args[0]
    return node


@dataclass
class _Count:
    """Integers up to ``last``, and the node that counts them.

    ``last`` is None if all of them are experts: other ids are an error of ``node``.
    """

    values: Any
    node: Node
    last: int | None = None


def _count_of(offs: Any, num_experts: int) -> _Count | None:
    """What ``offs[e]`` counts in [0, e], the last of offs up to ``last``; None if not certain."""
    total, exact = _exact_source(offs), (*_INTEGERS, torch.float32, torch.float64)
    if writers(total):
        return None
    node = total
    if op_name(total) == "cumsum" and argument(total, 1, "dim") in (0, -1):
        node = _exact_source(total.args[0])
    elif op_name(total) != "searchsorted":
        return None
    if value_of(node) is None or value_of(node).dtype not in exact:
        return None
    written = writers(node)
    if any(w > total for w in written):
        return None
    values = (_searched if node is total else _counted)(node, num_experts)
    if values is None or value_of(values).dtype in (torch.float16, torch.bfloat16):
        return None
    last = None
    if op_name(node) == "histc":
        last = (
            number(argument(node, 3, "max")) or 1
        )  # an empty range stands for that of the values
    read = max((node, *written))
    return _Count(_exact_source(values, read), read, last)


def _counted(node: Node, num_experts: int) -> Any:
    """The ids of which node (E) says how many are of each expert, however it is written."""
    name, written = op_name(node), writers(node)
    if name in _ADDS or len(written) == 1:
        return _added_ones(node, num_experts)
    if written:
        return None
    if name == "histc":
        bins, low, last = (number(argument(node, i, n)) for i, n in (
            (1, "bins"), (2, "min"), (3, "max")))  # fmt: skip
        if (bins, low) != (num_experts, 0) or num_experts > _EXACT_BINS:
            return None
        return node.args[0] if last in (num_experts - 1, num_experts) else None
    if name == "bincount":
        return node.args[0] if argument(node, 1, "weights") is None else None
    return _summed(node, num_experts) if name == "sum" else None


_ADDS = ("scatter_add", "scatter_add_", "index_add", "index_add_")


def _added_ones(node: Node, num_experts: int) -> Any:
    """ids of ``zeros(E).scatter_add(0, ids, ones)``, in place or not, or of index_add."""
    base = node
    if op_name(node) not in _ADDS:
        (node,) = writers(node)
    elif op_name(node).endswith("_"):
        base = node.args[0]
        if writers(base) != [node]:
            return None
    elif writers(node) or writers(node.args[0]):
        return None
    name = op_name(node)
    if name not in _ADDS or (base is not node and node.args[0] is not base):
        return None
    zeros, index = node.args[0], argument(node, 2, "index")
    ones = argument(node, 3, "source" if "index" in name else "src")
    exact = value_of(zeros).dtype in (*_INTEGERS, torch.float32, torch.float64)
    if not exact or not _is_filled(zeros, 0) or not _is_filled(ones, 1):
        return None
    if argument(node, 1, "dim") not in (0, -1) or node.kwargs.get("alpha", 1) != 1:
        return None
    # A row for each id, or scatter_add leaves the others out.
    if rank(index) != 1 or not guard_or_false(
        value_of(ones).shape[0] == value_of(index).shape[0]
    ):
        return None
    return index if same_size(value_of(zeros).shape[0], num_experts) else None


def _is_filled(node: Any, value: int) -> bool:
    """Whether all entries of ``node`` are ``value`` before counting starts.

    Of zeros only what was written before a cast counts: the counting itself writes to them.
    """
    if value and writers(node):
        return False
    name = op_name(node).removeprefix("new_").removesuffix("_like")
    while name in ("expand", "to", "int", "long"):
        node = node.args[0]
        if writers(node):
            return False
        name = op_name(node).removeprefix("new_").removesuffix("_like")
    if name == "full":
        at = 2 if op_name(node) == "new_full" else 1
        return number(argument(node, at, "fill_value")) == value
    return name == ("ones" if value else "zeros")


def _is_arange(node: Any, start: int, end: int) -> bool:
    if op_name(node) not in ("arange", "iota") or writers(node):
        return False
    numbers = [number(a) for a in node.args if not isinstance(a, torch.dtype)]
    counts = start == 0 and numbers == [end]
    return counts or numbers in ([start, end], [start, end, 1])


def _summed(node: Node, num_experts: int) -> Any:
    """ids of ``one_hot(ids, E)``, of ``ids[:, None] == arange(E)`` or of ones that are scattered
    to ids, each (..., E), that node sums over all dimensions but that of the experts."""
    if argument(node, 2, "keepdim", False) or rank(node) != 1:
        return None
    of = _exact_source(node.args[0], node)
    dims = argument(node, 1, "dim")
    dims = dims if isinstance(dims, (list, tuple)) else (dims,)
    if op_name(of) == "sum" and rank(of) == 2:  # one dimension after the other
        inner = argument(of, 1, "dim")
        if writers(of) or argument(of, 2, "keepdim", False) or (inner, dims) not in (
            (0, (0,)), (1, (0,)), (0, (-2,)), (1, (-2,)), (-2, (0,)),
        ):  # fmt: skip
            return None
        of, dims = _exact_source(of.args[0], node), (0, 1)
    if not isinstance(of, Node) or rank(of) < 2 or any(d is None for d in dims):
        return None
    left = {*range(rank(of))} - {d % rank(of) for d in dims}
    name, last = op_name(of), left == {rank(of) - 1}
    if name == "one_hot" and last and not writers(of):
        classes = number(argument(of, 1, "num_classes", -1))
        return of.args[0] if classes == num_experts else None
    if name in ("scatter", "scatter_") and last:
        # Each expert once in a row of ids: a token's choices by topk.
        ids, base = argument(of, 2, "index"), of.args[0]
        one = argument(of, 3, "value", of.kwargs.get("src"))
        whole = number(one) == 1 or (isinstance(one, Node) and _is_filled(one, 1))
        alone = [w for w in writers(base) if w is not of]
        if rank(of) != 2 or argument(of, 1, "dim") not in (1, -1) or alone:
            return None
        if len(of.args) > 4 or "reduce" in of.kwargs or not whole:
            return None
        return ids if _is_filled(base, 0) and is_topk_index(ids, num_experts) else None
    if name != "eq" or len(left) != 1 or writers(of):
        return None
    for ids, experts in operand_orders(of, "eq"):
        column, line = _broadcast(ids), _broadcast(experts)
        if column is None or line is None or not _is_arange(line[0], 0, num_experts):
            continue
        at = rank(of) - rank(experts) + line[1]
        taken = {rank(of) - rank(ids) + d for d in column[2]}
        of_each = {at} == left and taken == {*range(rank(of))} - left
        if len(line[2]) == 1 and of_each:
            return column[0]
    return None


def _broadcast(node: Any) -> tuple[Any, int, set[int]] | None:
    """(source, its first dimension, its dimensions) if ``node`` is ``source`` with more dimensions
    of size 1."""
    value = value_of(node)
    if value is None:
        return None
    wide = {d for d, n in enumerate(value.shape) if not same_size(n, 1)}
    while op_name(node) in ("unsqueeze", "view", "reshape", "getitem"):
        if op_name(node) == "getitem":
            at = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            if any(i not in (None, Ellipsis, slice(None)) for i in at):
                break
        if any(writers(n) for n in (node, node.args[0])):
            return None
        node = node.args[0]
    # The entries are those of source in its order, as no dimension was moved.
    return (node, min(wide), wide) if wide else None


def _searched(node: Any, num_experts: int) -> Any:
    """The sorted ids in which ``node`` searches for the end of each expert."""
    ids, ends = node.args[0], argument(node, 1, "input")
    if rank(ids) != 1 or node.kwargs.get("sorter") is not None:
        return None
    right = node.kwargs.get("right", False) or node.kwargs.get("side") == "right"
    known = _is_arange(ends, 0 if right else 1, num_experts + (not right))
    return ids if known and _sorted_from(ids) is not None else None


def counted_ids(offs: Any, perm: Any, num_experts: int) -> tuple[Any, int] | None:
    """(ids, last): integers (R) that perm sorts, where ``offs[e]`` is how many are in [0, e].

    The last entry of ``offs`` counts up to ``last``, which is the number of experts or one less,
    or -1 if topk made the ids, so that all are experts. None if this does not hold for any ids.
    """
    ids, sort, count = sorted_by(perm), sort_of(perm), _count_of(offs, num_experts)
    if not is_ascending(sort) or rank(ids) != 1 or writers(perm):
        return None
    if count is None or (count.last is None and not is_topk_index(ids, num_experts)):
        return None
    values = count.values
    if _sorted_from(values) is not ids and not same_value(_flat(values), _flat(ids)):
        return None
    if not guard_or_false(value_of(ids).shape[0] <= _EXACT_COUNT):
        return None
    until = max(sort, count.node)
    if value_of(ids).dtype not in _INTEGERS or writers(ids, until):
        return None
    if writers(values, until):
        return None
    return ids, -1 if count.last is None else count.last


def is_topk_index(ids: Any, num_experts: int) -> bool:
    """Whether ids are positions that topk found among num_experts, so that all are experts.

    The caller checks that ``ids`` itself is not written.
    """
    while op_name(ids) in {"int", "long", "to", *VIEWS}:
        if value_of(ids).dtype not in _INTEGERS:
            return False
        ids = ids.args[0]
        if writers(ids):
            return False
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


def is_ascending(sort: Any) -> bool:
    return argument(sort, 2, "descending", False) is False


def _sorted_from(index: Any) -> Any:
    """ids where index is ``sort(ids)[0]`` or ``ids[argsort(ids)]``."""
    if op_name(index) == "getitem" and index.args[1] == 0:
        sort = index.args[0]
        return sort.args[0] if op_name(sort) == "sort" and is_ascending(sort) else None
    taken = row_selection(index)
    if taken is None or sorted_by(taken[1]) is not taken[0]:
        return None
    perm = taken[1]
    return taken[0] if is_ascending(sort_of(perm)) and not writers(perm) else None


def sort_of(perm: Any) -> Any:
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
