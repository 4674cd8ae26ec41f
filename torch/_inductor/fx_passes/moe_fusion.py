"""Rewrites Mixture-of-Experts blocks to ``torch._moe_mlp`` (``config.moe_fusion``, off by default).

People write the experts of a transformer as two matmuls per expert, with ``grouped_mm`` over rows
that a sort put in expert order, or with ``bmm`` over gathered weights, and an activation between
them. The pass finds the second matmul, asks ``moe_block`` for the block around it, and puts the op
in its place.

It runs before autograd, where the block still reads as it was written, so that its backward is the
derivative of the op, and no graph of a backward has to be recognised. This level is not
functional, so every in-place form is matched as such (``out.add_(bias)``, ``y.index_add_``), and a
node that anything else reads or writes keeps its block as it is.

Nothing is assumed about the routing: the op gets the graph's own order of rows and its offsets.
What is assumed of a *bias*, which is indexed by expert id instead, is checked
(``why_not_expert_of_row``). TORCH_LOGS="+inductor" says what became of every block.
"""

import logging
import operator
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.fx import Graph, Node

from .moe_block import Block, inside_of, match_block, NoMatch
from .moe_match import (
    activation_of,
    CASTS,
    known_writers,
    matmul_of,
    modes_of,
    op_name,
    Projection,
    rank,
    value_of,
    VIEWS,
)
from .moe_row_order import counted_ids, is_topk_index, sort_of


log = logging.getLogger(__name__)


# --- the rewrite -----------------------------------------------------------------------------


def _weight(graph: Graph, projection: Projection, weight: Any) -> Any:
    if not projection.transposed:
        return weight
    return graph.call_method("transpose", (weight, 1, 2))


def _int32(graph: Graph, node: Any) -> Any:
    return graph.call_method("to", (node, torch.int32))


def _slots(graph: Graph, block: Block, offs: Any) -> tuple[Any, Node]:
    """row_slots (R) and slot_rows (T, K); rows after those of the last expert have no expert."""
    perm = block.perm
    last = graph.call_function(operator.getitem, (offs, -1))
    count = graph.call_method("size", (perm, 0))
    device = value_of(perm).device
    options = {"dtype": torch.int32, "device": device}
    rows = graph.call_function(torch.arange, (count,), options)
    perm32 = _int32(graph, perm)
    live = graph.call_function(operator.lt, (rows, last))
    row_slots = graph.call_function(torch.where, (live, perm32, -1))
    if block.inverse is None:
        empty = graph.call_function(torch.empty_like, (perm32,))
        inverse = graph.call_method("scatter", (empty, 0, perm, rows))
    else:
        inverse = _int32(graph, block.inverse)
    used = graph.call_function(operator.lt, (inverse, last))
    slot_rows = graph.call_function(torch.where, (used, inverse, -1))
    return row_slots, graph.call_method("view", (slot_rows, -1, block.top_k))


def _permutation(graph: Graph, block: Block, ids: Any) -> tuple[Any, Any, Any]:
    """offs, row_slots, slot_rows of the op that makes them, from ids (R) in slot order."""
    ids = graph.call_method("view", (ids, -1, block.top_k))
    routing = graph.call_function(
        torch.ops.aten._moe_permutation.default, (ids, block.num_experts)
    )
    row_slots, slot_rows, offs = (
        graph.call_function(operator.getitem, (routing, i)) for i in range(3)
    )
    return offs, row_slots, slot_rows


def _searched_offs(graph: Graph, block: Block, sort: Node) -> Any:
    """offs, by a search in the sorted ids: one op instead of a cast, histc and cumsum."""
    values = graph.call_function(operator.getitem, (sort, 0))
    value = value_of(sort.args[0])
    options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    ids = graph.call_function(torch.arange, (-1, block.num_experts), options)
    options = {"right": True, "out_int32": True}
    ends = graph.call_function(torch.searchsorted, (values, ids), options)
    # Ids below 0, which histc leaves out, are sorted first.
    ids_below = graph.call_function(operator.getitem, (ends, 0))
    ends = graph.call_function(operator.getitem, (ends, slice(1, None)))
    return graph.call_function(operator.sub, (ends, ids_below))


def _routing(graph: Graph, block: Block) -> tuple[Any, Node | None, Node | None]:
    """offs, row_slots, slot_rows."""
    offs, experts, perm = block.down.experts, block.num_experts, block.perm
    if block.tokens is not None and not block.down.grouped:
        # Indexing wraps or refuses ids as the gather of weights did; for the op, E is no expert.
        value = value_of(offs)
        options = {"dtype": value.dtype, "device": value.device}
        every = graph.call_function(torch.arange, (experts,), options)
        ids = graph.call_function(operator.getitem, (every, offs))
        return _permutation(graph, block, ids)
    counted = None
    if block.tokens is not None:
        counted = counted_ids(offs, perm, experts)
    if counted is not None:
        ids, last = counted
        sort = sort_of(perm)
        with graph.inserting_before(sort.next):
            if is_topk_index(ids, experts):
                return _permutation(graph, block, ids)
            if sort is not perm and last == experts - 1:
                offs = _searched_offs(graph, block, sort)
    if offs is block.down.experts and value_of(offs).dtype != torch.int32:
        offs = _int32(graph, offs)
    if block.tokens is None:
        return offs, None, None
    return offs, *_slots(graph, block, offs)


def _emit(graph: Graph, block: Block) -> Any:
    """Inserts the op and the nodes that make its operands before the end of the block."""
    # Explicit casts, as another autocast may be active where the op is inserted.
    dtype = value_of(block.down.out).dtype

    def cast(node: Any) -> Any:
        if node is None or value_of(node).dtype == dtype:
            return node
        return graph.call_method("to", (node, dtype))

    x = block.tokens if block.tokens is not None else block.rows
    offs, row_slots, slot_rows = _routing(graph, block)
    weights = block.weights
    if weights is not None:
        if value_of(weights).dtype not in (dtype, torch.float32):
            weights = graph.call_method("float", (weights,))
        weights = graph.call_method("reshape", (weights, -1, block.top_k))
    biases = [cast(u.bias) for u in block.ups]
    b_in = biases[0]
    if len(block.ups) == 2 and b_in is not None:
        b_in = graph.call_function(torch.cat, (biases, 1))
    weights_of = [_weight(graph, p, cast(p.weight)) for p in (block.down, *block.ups)]
    kwargs = {
        "topk_weights": weights,
        "row_slots": row_slots,
        "slot_rows": slot_rows,
        "b_in": b_in,
        "b_out": cast(block.down.bias),
        "w_up": weights_of[2] if len(block.ups) == 2 else None,
        "activation": block.activation.name,
        "gate_interleaved": block.activation.interleaved,
        "alpha": block.activation.alpha,
        "limit": block.activation.limit,
        "compute_preact": modes_of(graph)[block.end].grad,
    }
    args = (cast(x), weights_of[1], weights_of[0], offs)
    given = {name: value for name, value in kwargs.items() if value is not None}
    moe = graph.call_function(torch.ops.aten._moe_mlp.default, args, given)
    out = graph.call_function(operator.getitem, (moe, 0))
    end_dtype = value_of(block.end).dtype
    if end_dtype != dtype:
        out = graph.call_method("to", (out, end_dtype))
    if block.base is not None:
        # The result has the strides of the first operand, and that of index_add is contiguous.
        out = graph.call_function(operator.add, (out, block.base))
    return out


def _rewrite(graph: Graph, block: Block) -> None:
    inside = inside_of(block)
    with graph.inserting_before(block.end):
        out = _emit(graph, block)
    out.meta.update(block.end.meta)
    targets = [block.end]
    if op_name(block.end).endswith("_"):  # later nodes read the tensor that it wrote to
        targets.append(block.end.args[0])
    for target in targets:
        target.replace_all_uses_with(
            out, delete_user_cb=lambda user: user not in inside
        )
    for node in sorted(inside, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _is_second(matmul: Projection) -> bool:
    """Whether the rows come out of another matmul of the same experts."""
    seen, todo = set(), [matmul.rows]
    while todo:
        node = todo.pop()
        if node in seen or not isinstance(node, Node):
            continue
        seen.add(node)
        earlier = matmul_of(node)
        if earlier is not None:
            return earlier.experts is matmul.experts
        todo += node.all_input_nodes
    return False


_PRODUCTS = ("bmm", "baddbmm", "einsum", "matmul")
_ACTIVATIONS = {"silu", "gelu", "relu", "sigmoid", "tanh", "square", "pow"}
# Ops that experts have between their products; attention has others.
_BETWEEN = (
    CASTS | VIEWS | {"mul", "add", "chunk", "split", "getitem", "clamp", "dropout"}
)


def _is_batched(node: Node) -> bool:
    """Whether node is a second product of all experts at once: of (E, C, F), or of (T, K, F) by einsum."""
    if op_name(node) not in _PRODUCTS or any(matmul_of(u) for u in node.users):
        return False
    if any(rank(n) < 3 for n in node.all_input_nodes):
        return False
    seen, todo = set(), [*node.all_input_nodes]
    while todo:
        before = todo.pop()
        if before not in seen and op_name(before) in _BETWEEN | _ACTIVATIONS:
            todo += before.all_input_nodes
        seen.add(before)
    found = {*map(op_name, seen)}
    return bool(found & _ACTIVATIONS and found & {*_PRODUCTS})


def _is_of_one_expert(node: Node) -> bool:
    """Whether node is the second linear of an expert on rows that a loop selected for it."""
    activation = activation_of(node.args[0]) if op_name(node) == "linear" else None
    if activation is None:
        return False
    rows = [h.args[0] for h in activation.hidden if op_name(h) == "linear"]
    while rows and op_name(rows[0]) in VIEWS | CASTS:
        rows = rows[0].args
    return bool(rows) and op_name(rows[0]) in ("getitem", "index", "index_select")


def _try_anchor(graph: Graph, anchor: Node) -> None:
    """Rewrites the block that ends in anchor, or logs why it stays."""
    matmul = matmul_of(anchor)
    if matmul is None:
        if not anchor._erased and _is_batched(anchor):
            log.info("moe_fusion: %s stays: products of whole batches", anchor)
        return
    if activation_of(matmul.rows) is None:
        if _is_second(matmul):
            log.info("moe_fusion: %s stays: its activation is not known", anchor)
        return
    try:
        block = match_block(anchor)
    except NoMatch as why:
        log.info("moe_fusion: %s stays: %s", anchor, why)
        return
    _rewrite(graph, block)
    kind = f"core ({block.why_core})" if block.why_core else "full"
    log.info("moe_fusion: %s became _moe_mlp: %s", anchor, kind)
    counters["inductor"]["moe_fusion"] += 1
    counters["inductor"]["moe_fusion_full"] += not block.why_core


def moe_fusion(graph: Graph) -> None:
    """Rewrites every block of experts that it recognises; the others stay as they are."""
    names = {"grouped_mm", "_grouped_mm", "squeeze", *_PRODUCTS}
    anchors = [n for n in graph.nodes if op_name(n) in names]
    if alone := [n for n in graph.nodes if _is_of_one_expert(n)]:
        log.info(
            "moe_fusion: %s stays: a product of one expert, of %d in a loop over modules",
            alone[0],
            len(alone),
        )
    with known_writers(graph):
        for anchor in reversed(anchors):
            _try_anchor(graph, anchor)
    graph.lint()
