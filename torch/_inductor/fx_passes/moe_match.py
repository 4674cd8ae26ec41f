"""What moe_fusion recognises in a graph before autograd: activations, and one matmul per expert.

Functions take a node and answer what it computes, or None. They see torch functions, methods and
aten overloads alike (:func:`op_name`), and read shapes and dtypes from the traced values.

Why not ``pattern_matcher``: its patterns are traced functions, one for each way to write a block,
and here ways to gather, count, activate, add a bias and combine multiply; before autograd a graph is
neither normalized nor functional, so that every in-place form needs a look at who else writes
(:func:`writers`), which a pattern cannot ask.
"""

import contextlib
import math
import operator
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import (
    guard_or_false,
    has_free_unbacked_symbols,
    statically_known_true,
)


CASTS = {
    "to",
    "_to_copy",
    "float",
    "bfloat16",
    "half",
    "type_as",
    "convert_element_type",
}
VIEWS = {
    "view",
    "reshape",
    "_unsafe_view",
    "flatten",
    "unsqueeze",
    "contiguous",
    "expand",
}
# activation of the gate -> name of the gated activation of _moe_mlp
_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}
_CLAMPED = ("swiglu", "geglu")  # of those, the ones that take a limit
_PLAIN = ("silu", "gelu", "relu", "relu2")


def op_name(node: Any) -> str:
    """Name of the op that a node calls, the same for torch functions, methods and aten; else "".

    Also "" if it has keyword arguments only, which no function here reads.
    """
    if not isinstance(node, Node) or not node.args:
        return ""
    target = node.target
    if node.op == "call_method":
        return str(target)
    if node.op != "call_function":
        return ""
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace in ("aten", "prims") else ""
    name = getattr(target, "__name__", "")
    known = (torch, F, torch._C._nn, operator, torch.ops.aten)
    return name if any(getattr(m, name, None) is target for m in known) else ""


def argument(node: Any, position: int, name: str, default: Any = None) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def number(argument: Any) -> Any:
    """The number that an argument is, else None.

    With dynamic shapes K and the limits of activations are symbols as well. They are guarded: no
    model changes them, and the op needs to know them.
    """
    if isinstance(argument, Node):
        argument = argument.meta.get("example_value", argument.meta.get("val"))
    if isinstance(argument, (torch.SymInt, torch.SymFloat)):
        if has_free_unbacked_symbols(argument):
            return None
        return int(argument) if isinstance(argument, torch.SymInt) else float(argument)
    return argument if isinstance(argument, (int, float)) else None


def value_of(node: Any) -> Any:
    if not isinstance(node, Node):
        return None
    value = node.meta.get("example_value", node.meta.get("val"))
    return value if isinstance(value, torch.Tensor) else None


def rank(node: Any) -> int:
    value = value_of(node)
    return -1 if value is None else value.dim()


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal without a guard."""
    return a is b or bool(statically_known_true(a == b))


# A cast to fewer bits is an intended quantisation.
COMPUTED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def uncast(node: Any) -> Any:
    """``node`` without the casts that do not change what the fused op computes in float32."""
    while op_name(node) in CASTS | {"contiguous"} and isinstance(node.args[0], Node):
        before, after = value_of(node.args[0]), value_of(node)
        if before is None or after is None or before.device != after.device:
            break
        if not (before.dtype in COMPUTED and after.dtype in COMPUTED):
            break
        node = node.args[0]
    return node


_IN_PLACE = {"setitem"} | {
    f"i{name}"
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
}


def _may_write(node: Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if node.op == "output" or node.target is getattr:
        return False
    name = op_name(node)
    if node.kwargs.get("inplace") or "out" in node.kwargs:
        return True
    if name in ("batch_norm", "instance_norm"):
        return True  # to the running statistics
    if name in ("embedding", "embedding_bag"):
        return argument(node, 3, "max_norm") is not None
    if node.target is getattr(F, name, None) and any(a is True for a in node.args):
        return True  # F.relu(ids, True)
    if getattr(operator, name, None) is node.target:  # operator.or_ writes nothing
        return name in _IN_PLACE
    return not name or name.endswith("_")


def _memory(node: Any) -> int | None:
    value = value_of(node)
    while value is not None and torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return None if value is None else value.untyped_storage()._cdata


# The writers of each memory in the graph being rewritten, in order. One graph per thread.
_written: ContextVar[dict[int | None, list[Node]]] = ContextVar("moe_fusion_written")


@contextlib.contextmanager
def known_writers(graph: Graph) -> Iterator[None]:
    """Makes :func:`writers` answer for ``graph``, which may only lose writers meanwhile."""
    found: dict[int | None, list[Node]] = {}
    for node in filter(_may_write, graph.nodes):
        name, written = op_name(node), node.all_input_nodes
        if (name.endswith("_") or name in _IN_PLACE) and isinstance(node.args[0], Node):
            written = node.args[:1]
        for memory in set(map(_memory, written)):
            found.setdefault(memory, []).append(node)
    token = _written.set(found)
    try:
        yield
    finally:
        _written.reset(token)


def writers(
    node: Any, until: Node | None = None, since: Node | None = None
) -> list[Node]:
    """The nodes from since to until that may write to the memory of node, by whatever view."""
    return [
        other
        for other in _written.get().get(_memory(node), ())
        if not other._erased
        and (until is None or other < until)
        and (since is None or other >= since)
    ]


class Modes(NamedTuple):
    """What a node runs under: grad mode, and the regions of autocast and inference mode around it."""

    grad: bool
    regions: tuple[tuple[Any, ...], ...]


def modes_of(graph: Graph) -> dict[Node, Modes]:
    grad, regions = torch.is_grad_enabled(), ()
    found: dict[Node, Modes] = {}
    for node in graph.nodes:
        found[node] = Modes(grad, regions)
        name = str(getattr(node.target, "__name__", ""))
        if name == "_set_grad_enabled":
            grad = bool(node.args[0])
        elif name.startswith("_enter_"):
            regions = (*regions, (name, *node.args))
        elif name.startswith("_exit_"):
            regions = regions[:-1]
    return found


# Index computations that give the same result wherever they run.
_PURE = {"floordiv", "floor_divide", "div", "divide", "getitem", "argsort", "sort"}


def same_value(a: Any, b: Any) -> bool:
    """Whether two nodes are one, or compute one index twice (``order // K`` and ``order // K``)."""
    if a is b:
        return True
    if (
        value_of(a) is None and value_of(b) is None
    ):  # K, which may be a symbol in one of them
        x, y = number(a), number(b)
        return x == y if x is not None else type(a) is type(b) and a == b
    if not isinstance(a, Node) or not isinstance(b, Node):
        return False
    if (a.op, a.target) != (b.op, b.target) or op_name(a) not in _PURE | VIEWS:
        return False
    if len(a.args) != len(b.args) or a.kwargs != b.kwargs:
        return False
    read = (*a.all_input_nodes, *b.all_input_nodes, a, b)
    if any(writers(node) for node in read):
        return False
    return all(same_value(x, y) for x, y in zip(a.args, b.args))


def _column_of(node: Any, dim: int) -> Any:
    """rows where node is a column of each, ``rows.unsqueeze(dim)`` or ``rows[..., None]``."""
    if op_name(node) == "unsqueeze":
        at = argument(node, 1, "dim")
        return node.args[0] if isinstance(at, int) and at % 3 == dim else None
    last = ((Ellipsis, None), (slice(None), slice(None), None))
    if op_name(node) == "getitem" and dim == 2 and node.args[1] in last:
        return node.args[0]
    return None


def operand_orders(node: Any, *names: str) -> Iterator[tuple[Any, Any]]:
    """Both orders of the two operands of a commutative op."""
    if (
        isinstance(node, Node)
        and op_name(node) in names
        and len(node.args) == 2
        and not node.kwargs
    ):
        a, b = node.args
        yield a, b
        yield b, a


def row_selection(node: Any) -> tuple[Any, Any] | None:
    """(source, positions) where node is ``source[positions]`` along dimension 0."""
    name = op_name(node)
    if not isinstance(node, Node):
        return None
    source, positions = (node.args[0] if node.args else None), None
    if name == "getitem":
        positions = node.args[1]
        if isinstance(positions, tuple) and len(positions) == 1:
            positions = positions[0]
    elif (
        name == "index"
        and isinstance(node.args[1], (list, tuple))
        and len(node.args[1]) == 1
    ):
        positions = node.args[1][0]
    elif name == "index_select" and argument(node, 1, "dim") == 0:
        positions = argument(node, 2, "index")
    elif name == "gather" and argument(node, 1, "dim") in (0, -rank(source)):
        positions = rows_of_expanded(argument(node, 2, "index"), source)
    value = value_of(positions)
    if (
        value is None
        or value.dim() != 1
        or value.dtype not in (torch.int64, torch.int32)
    ):
        return None
    return (source, positions) if isinstance(source, Node) else None


def rows_of_expanded(index: Any, of: Any) -> Any:
    """tok where index is ``tok`` repeated for all columns of ``of``, for gather and scatter_add."""
    if rank(index) == 1:
        return index
    if rank(index) != 2 or rank(of) != 2:
        return None
    # A guard: the width may be a symbol in one of them.
    if not guard_or_false(value_of(index).shape[1] == value_of(of).shape[1]):
        return None
    if op_name(index) in ("expand", "expand_as", "repeat"):
        column, flat = index.args[0], flat_source(index.args[0])
        if (rank(column), rank(flat)) != (2, 1):
            return None
        rows = value_of(index).shape[0]
        sizes = zip((*value_of(column).shape, *value_of(flat).shape), (rows, 1, rows))
        if all(guard_or_false(a == b) for a, b in sizes):
            return flat
    return None


def repeated(node: Any) -> tuple[Any, int] | None:
    """(source, K) where node has every entry of source along dimension 0 K times, one after the other."""
    if op_name(node) == "repeat_interleave":
        source, times = node.args[0], number(argument(node, 1, "repeats"))
        flat = argument(node, 2, "dim") is None and rank(source) == 1
        if isinstance(times, int) and (
            flat or argument(node, 2, "dim") in (0, -rank(source))
        ):
            return source, times
        return None
    wide = node.args[0] if op_name(node) in ("reshape", "flatten", "view") else None
    if wide is None or op_name(wide) != "expand" or rank(wide) != rank(node) + 1:
        return None
    column, shape, flat = wide.args[0], value_of(wide).shape, value_of(node).shape
    is_new = op_name(column) == "unsqueeze" and argument(column, 1, "dim") == 1
    is_new |= op_name(column) == "getitem" and column.args[1] in (
        (slice(None), None),
        (slice(None), None, slice(None)),
        (slice(None), None, Ellipsis),
    )
    if not is_new:
        return None
    source = column.args[0]
    times = number(shape[1])
    # Of (T, 1, D) only the dimension of 1 grows, and D stays as it is.
    sizes = zip(
        (shape[0], *shape[2:], *flat[1:]), (*value_of(source).shape, *shape[2:])
    )
    if isinstance(times, int) and all(same_size(a, b) for a, b in sizes):
        return source, times
    return None


def counts_from_zero(node: Any) -> bool:
    """Whether node is 0, 1, 2, ..., which nothing writes to."""
    if op_name(node) not in ("arange", "iota") or writers(node):
        return False
    if node.kwargs.get("start", 0) != 0 or node.kwargs.get("step", 1) != 1:
        return False
    numbers = [a for a in node.args if not isinstance(a, torch.dtype)]
    return len(numbers) == 1 or (len(numbers) == 2 and numbers[0] == 0)


def token_of_slots(node: Any) -> int | None:
    """K where node is 0, 0, ..., 1, 1, ...: the tokens of slots, each K times."""
    found = repeated(node)
    if found is None or not counts_from_zero(found[0]) or writers(node):
        return None
    return found[1]


def flat_source(node: Any) -> Any:
    """The one-dimensional node of which node is a column, or node."""
    while op_name(node) in VIEWS and rank(node) > 1:
        node = node.args[0]
    if (
        op_name(node) == "getitem"
        and isinstance(node, Node)
        and node.args[1]
        in (
            (slice(None), None),
            (Ellipsis, None),
        )
    ):
        node = node.args[0]
    return node


# --- activations -----------------------------------------------------------------------------


def _unary(node: Any) -> tuple[str, Any] | None:
    """(activation, its argument)."""
    node = uncast(node)
    name = op_name(node)
    if not isinstance(node, Node):
        return None
    if name in ("silu", "relu") and not argument(node, 1, "inplace", False):
        return name, node.args[0]
    if name == "gelu":
        approximate = argument(node, 1, "approximate", "none")
        return ("gelu_tanh" if approximate == "tanh" else "gelu"), node.args[0]
    for x, gate in operand_orders(node, "mul"):
        if op_name(uncast(gate)) == "sigmoid" and uncast(
            uncast(gate).args[0]
        ) is uncast(x):
            return "silu", x
    squared = name == "square" or (
        name in ("pow", "pow_") and argument(node, 1, "exponent") == 2
    )
    if squared and (inner := _unary(node.args[0])) is not None and inner[0] == "relu":
        return "relu2", inner[1]
    return None


def _clamped(node: Any) -> tuple[Any, float | None, float | None]:
    """(x, lowest, highest)."""
    node, low, high = uncast(node), None, None
    while isinstance(node, Node) and op_name(node) in (
        "clamp",
        "clip",
        "clamp_max",
        "clamp_min",
    ):
        name = op_name(node)
        lo = argument(node, 1, "min") if name != "clamp_max" else None
        hi = argument(node, 2, "max") if name in ("clamp", "clip") else None
        hi = argument(node, 1, "max") if name == "clamp_max" else hi
        known = [number(v) for v in (lo, hi)]
        if known.count(None) != (lo, hi).count(None) or (
            lo is not None and low is not None
        ):
            break
        lo, hi = known
        if hi is not None and high is not None:
            break
        low, high = (lo if low is None else low), (hi if high is None else high)
        node = uncast(node.args[0])
    return node, low, high


def _common_limit(
    low: float | None, high: float | None, up_low: float | None, up_high: float | None
) -> float | None:
    """What clamps the gate from above and up from both sides, if it is one number."""
    if low is not None or high is None or not 0 < high < math.inf:
        return None
    return float(high) if (up_low, up_high) == (-high, high) else None


def _half(node: Any) -> tuple[Any, int, bool] | None:
    """(H, 0 or 1, interleaved) where node is one half of the last dimension of H (R, 2F)."""
    node = uncast(node)
    if (
        not isinstance(node, Node)
        or not node.args
        or not isinstance(node.args[0], Node)
    ):
        return None
    name, source = op_name(node), node.args[0]
    which: Any = None
    interleaved = False
    if name == "getitem" and isinstance(node.args[1], int):
        which, parts = node.args[1], source
        source = parts.args[0] if parts.args else None
        if op_name(parts) == "unbind":
            return _half_of_pairs(source, argument(parts, 1, "dim", 0), which)
        last = argument(parts, 2, "dim", 0) in (-1, rank(source) - 1)
        if not last or op_name(parts) not in (
            "chunk",
            "split",
            "split_with_sizes",
            "tensor_split",
        ):
            return None
        if len(list(parts.meta.get("example_value", parts.meta.get("val", ())))) != 2:
            return None
    elif name == "select":
        return _half_of_pairs(
            source, argument(node, 1, "dim"), argument(node, 2, "index")
        )
    elif name in ("getitem", "slice") and rank(source) == 2:
        cut = _last_slice(node)
        width = value_of(source).shape[1]
        if cut is None:
            return None
        start, stop, step = cut
        interleaved = step == 2 and start in (None, 0, 1) and _reaches(stop, width)
        if interleaved:
            which = start or 0
        elif (
            step in (None, 1)
            and start in (None, 0)
            and stop is not None
            and same_size(stop * 2, width)
        ):
            which = 0
        elif (
            step in (None, 1)
            and start is not None
            and same_size(start * 2, width)
            and _reaches(stop, width)
        ):
            which = 1
    same_halves = (
        value_of(node) is not None
        and rank(source) == 2
        and same_size(
            value_of(node).shape[1] * 2,
            value_of(source).shape[1],
        )
    )
    if which not in (0, 1) or not same_halves:
        return None
    return source, which, interleaved


def _reaches(stop: Any, width: Any) -> bool:
    return stop is None or (
        isinstance(stop, int) and isinstance(width, int) and stop >= width
    )


def _last_slice(node: Any) -> tuple | None:
    """(start, stop, step) of a slice of the last of two dimensions."""
    if op_name(node) == "slice":
        if argument(node, 1, "dim", 0) not in (1, -1):
            return None
        return (
            argument(node, 2, "start"),
            argument(node, 3, "end"),
            argument(node, 4, "step", 1),
        )
    index = node.args[1]
    if (
        isinstance(index, tuple)
        and len(index) == 2
        and index[0] in (Ellipsis, slice(None))
    ):
        cut = index[1]
        if isinstance(cut, slice) and not any(
            isinstance(v, Node) for v in (cut.start, cut.stop)
        ):
            return cut.start, cut.stop, cut.step
    return None


def _half_of_pairs(pairs: Any, dim: Any, which: Any) -> tuple[Any, int, bool] | None:
    """Halves of H viewed as (R, 2, F), or interleaved as (R, F, 2)."""
    if op_name(pairs) not in ("view", "reshape", "unflatten") or rank(pairs) != 3:
        return None
    source, value = pairs.args[0], value_of(pairs)
    if rank(source) != 2 or not isinstance(dim, int) or which not in (0, 1):
        return None
    dim %= 3
    if dim == 0 or not same_size(value.shape[dim], 2):
        return None
    return source, which, dim == 2


@dataclass
class ActivationMatch:
    name: str
    hidden: tuple[Any, ...]  # one projection (R, G*F), or gate and up apart
    interleaved: bool = False
    alpha: float | None = None
    limit: float | None = None


def _gated(name: str, gate: Any, up: Any, **options: Any) -> ActivationMatch | None:
    gate, up = uncast(gate), uncast(up)
    first, second = _half(gate), _half(up)
    if first is not None and second is not None:
        if (
            first[0] is second[0]
            and (first[1], second[1]) == (0, 1)
            and first[2] == second[2]
        ):
            return ActivationMatch(name, (first[0],), first[2], **options)
        return None
    if first is None and second is None and rank(gate) == rank(up) == 2:
        return ActivationMatch(name, (gate, up), **options)
    return None


def _oai(node: Any) -> ActivationMatch | None:
    """(up + 1) * gate * sigmoid(alpha * gate), both clamped (gpt-oss)."""
    for shifted, glu in operand_orders(node, "mul"):
        for up, one in operand_orders(uncast(shifted), "add"):
            if one not in (1, 1.0):
                continue
            for gate, sigmoid in operand_orders(uncast(glu), "mul"):
                sigmoid = uncast(sigmoid)
                if op_name(sigmoid) != "sigmoid":
                    continue
                for scaled, alpha in operand_orders(uncast(sigmoid.args[0]), "mul"):
                    if uncast(scaled) is not uncast(gate) or number(alpha) is None:
                        continue
                    x, low, high = _clamped(gate)
                    u, up_low, up_high = _clamped(up)
                    limit = _common_limit(low, high, up_low, up_high)
                    if limit is not None:
                        options = {"alpha": float(number(alpha)), "limit": limit}
                        return _gated("swiglu_oai", x, u, **options)
    return None


def activation_of(node: Any) -> ActivationMatch | None:
    node = uncast(node)
    if (oai := _oai(node)) is not None:
        return oai
    for activated, up in operand_orders(node, "mul"):
        inner = _unary(activated)
        if inner is None or inner[0] not in _GATED:
            continue
        name = _GATED[inner[0]]
        gate, low, high = _clamped(inner[1])
        u, up_low, up_high = _clamped(up)
        limit = _common_limit(low, high, up_low, up_high)
        if (low, high, up_low, up_high) == (None,) * 4:
            found = _gated(name, gate, u)
        elif name in _CLAMPED and limit is not None:
            found = _gated(name, gate, u, limit=limit)
        else:
            continue
        if found is not None:
            return found
    inner = _unary(node)
    if inner is not None and inner[0] in _PLAIN and rank(uncast(inner[1])) == 2:
        return ActivationMatch(inner[0], (uncast(inner[1]),))
    return None


# --- projections -----------------------------------------------------------------------------


@dataclass
class Projection:
    """One matmul per expert: rows (R, N) -> (R, M)."""

    out: Any
    rows: Any
    weight: Any  # (E, M, N), or (E, N, M) if transposed
    transposed: bool
    experts: Any  # grouped: offs (E); batched: the expert of every row (R)
    grouped: bool
    bias: Any = None  # (E, M)
    bias_index: Node | None = (
        None  # expert of every row; None if the matmul has the bias
    )
    effects: tuple[Any, ...] = ()
    masks: tuple[Any, ...] = ()  # (R, 1), true for rows of out that are set to zero


def _linear_weight(node: Any) -> tuple[Any, bool]:
    """(w, transposed): w (E, M, N) whose transpose is node, else node itself."""
    name = op_name(node)
    if isinstance(node, Node) and rank(node) == 3:
        dims = [d % 3 if isinstance(d, int) else d for d in node.args[1:3]]
        swapped = name in ("transpose", "swapaxes") and sorted(dims, key=str) == [1, 2]
        order: Any = node.args[1] if len(node.args) == 2 else node.args[1:]
        swapped |= name == "permute" and tuple(order) in ((0, 2, 1), (0, -1, -2))
        swapped |= (
            node.target is getattr
            and len(node.args) == 2
            and node.args[1] in ("mT", "mH")
        )
        if swapped and node.args[0] is not None:
            return node.args[0], False
    return node, True


def matmul_of(node: Any) -> Projection | None:
    node = uncast(node)
    name = op_name(node)
    if not isinstance(node, Node):
        return None
    if name in ("grouped_mm", "_grouped_mm"):
        rows, weight = node.args[0], argument(node, 1, "mat2")
        offs = argument(node, 2, "offs")
        if rank(rows) != 2 or rank(weight) != 3 or not isinstance(offs, Node):
            return None
        if value_of(node).dtype != value_of(rows).dtype:
            return None
        linear, transposed = _linear_weight(weight)
        return Projection(node, rows, linear, transposed, offs, True)
    if name == "squeeze" and op_name(node.args[0]) in ("bmm", "matmul"):
        product: Any = node.args[0]
        if len(product.args) != 2:
            return None
        a, b = product.args
        for weight, column, dim, transposed in ((a, b, 2, False), (b, a, 1, True)):
            weight, as_stored = _linear_weight(weight)
            transposed = transposed if as_stored else not transposed
            selected, rows = row_selection(weight), _column_of(column, dim)
            if selected is None or rows is None or rank(selected[0]) != 3:
                continue
            squeezed = argument(node, 1, "dim")
            if not isinstance(squeezed, int) or squeezed % 3 != dim:
                continue
            return Projection(node, rows, selected[0], transposed, selected[1], False)
    return None


def unmasked(node: Any) -> tuple[Any, tuple[Any, ...]]:
    """(rows, masks) where node is rows, those of masks set to zero."""
    node, masks = uncast(node), ()
    while op_name(node) == "masked_fill" and argument(node, 2, "value") == 0:
        masks += (argument(node, 1, "mask"),)
        node = uncast(node.args[0])
    return node, masks


def projection_of(node: Any) -> Projection | None:
    """A matmul, the bias that is added to it, and the masks of its rows."""
    node, masks = unmasked(node)
    found = _biased(node)
    if found is not None:
        found.masks = masks
    return found


def _bias_of_groups(node: Any, offs: Any) -> Any:
    """The bias (E, M) if ``node`` holds each row's bias, as ``F.grouped_mm(bias=)`` computes it."""
    if op_name(node) != "_grouped_mm":
        return None
    ones, (row, as_stored) = node.args[0], _linear_weight(node.args[1])
    same = same_value(argument(node, 2, "offs"), offs)
    if as_stored or not same or (op_name(ones), op_name(row)) != ("pad", "pad"):
        return None
    one, column = ones.args[0], row.args[0]
    names, added = (op_name(one), op_name(column)), ((0, 7), "constant", None)
    if names != ("new_ones", "unsqueeze") or {ones.args[1:], row.args[1:]} != {added}:
        return None
    is_column = same_size(value_of(one).shape[1], 1) and column.args[1:] == (-1,)
    return column.args[0] if is_column and not writers(ones) else None


def _biased(node: Any) -> Projection | None:
    orders = [*operand_orders(node, "add", "iadd", "add_")]
    if op_name(node) != "add":
        # In place, and others read the product: an effect, see below.
        orders = orders[:1] if node.users else []
    for product, added in orders:
        found, index = matmul_of(product), row_selection(uncast(added))
        if found is None:
            continue
        bias = _bias_of_groups(uncast(added), found.experts) if found.grouped else None
        if bias is not None:
            found.out, found.bias = node, bias
            return found
        if index is None:
            continue
        experts = value_of(found.weight).shape[0]
        if same_size(value_of(index[0]).shape[0], experts):
            found.out, (found.bias, found.bias_index) = node, index
            return found
    found = matmul_of(node)
    if found is not None:
        for user in found.out.users:
            if (
                op_name(user) in ("add_", "iadd")
                and user.args[0] is found.out
                and not user.users
            ):
                if len(user.args) != 2 or user.kwargs:
                    return None
                index = row_selection(user.args[1])
                if index is None:
                    return None
                if any(other < user for other in found.out.users):
                    return None  # read, or viewed to be read, without the bias
                (found.bias, found.bias_index), found.effects = index, (user,)
    return found
