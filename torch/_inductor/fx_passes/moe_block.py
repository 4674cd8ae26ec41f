"""Recognises a block of experts for moe_fusion: its operands, its end, and that nothing else uses it.

From the second matmul, :func:`match_block` walks to what is around it:

    rows -> up projection(s) -> activation -> down projection -> router weights -> sum per token

A *full* block has gather, experts and combine; a *core* only the experts, on rows that are in expert
order already. :class:`NoMatch` says what was not recognised.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._prims_common import is_contiguous_or_false
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from .moe_match import (
    activation_of,
    ActivationMatch,
    argument,
    CASTS,
    COMPUTED,
    counts_from_zero,
    flat_source,
    matmul_of,
    modes_of,
    number,
    op_name,
    operand_orders,
    Projection,
    projection_of,
    rank,
    repeated,
    row_selection,
    rows_of_expanded,
    same_size,
    same_value,
    token_of_slots,
    uncast,
    unmasked,
    value_of,
    VIEWS,
    writers,
)
from .moe_row_order import (
    is_ascending,
    is_mask_of_no_expert,
    sorted_by,
    why_not_expert_of_row,
)


_FRESH = {"empty_like", "zeros_like", "empty", "zeros", "new_empty", "new_zeros"}


_SUMS = ("index_add", "scatter_add", "scatter_reduce")


class NoMatch(Exception):
    """Why a block stays as it is written."""


# --- the block -------------------------------------------------------------------------------


@dataclass
class Block:
    """What _moe_mlp replaces: every node between its operands and end."""

    activation: ActivationMatch
    ups: list[Projection]
    down: Projection
    rows: Any  # (R, D)
    end: Any
    # only if gather and combine are part of it:
    tokens: Any = None  # (T, D)
    top_k: int = 0
    perm: Any = None  # (R) slot of every row; None if rows are in slot order
    inverse: Any = None  # (R) row of every slot, if the graph has it
    weights: Any = None  # (R) in slot order
    base: Any = None  # (T, D) that the combine adds to
    effects: list[Node] = field(default_factory=list)
    masks: list[Any] = field(default_factory=list)
    why_core: str = ""

    @property
    def num_experts(self) -> int:
        return value_of(self.down.weight).shape[0]

    def check_mask(self, mask: Any) -> None:
        """Accepts a mask of rows without an expert only: the op makes these zero as well."""
        if not self.down.grouped or not is_mask_of_no_expert(
            mask, self.down.experts, self.num_experts
        ):
            raise NoMatch("rows of experts may be masked")
        self.masks.append(mask)


def _match_core(down_node: Any) -> Block:
    down = matmul_of(down_node)
    if down is None:
        raise NoMatch("is no matmul per expert")
    for user in down.out.users:  # the bias comes after the anchor
        is_sum = op_name(user) in ("add", "add_", "iadd")
        biased = projection_of(user) if is_sum else None
        if biased is not None and biased.bias is not None:
            down = biased
    down = projection_of(down.out) or down
    activation = activation_of(down.rows)
    if activation is None:
        raise NoMatch("its input is no known activation")
    found = [projection_of(h) for h in activation.hidden]
    ups = [u for u in found if u and same_value(u.experts, down.experts)]
    if len(ups) != len(found):
        raise NoMatch("the activation is not of projections with the same offsets")
    rows = [uncast(u.rows) for u in ups]
    if any(r is not rows[0] for r in rows) or rank(rows[0]) != 2:
        raise NoMatch("gate and up read different rows")
    if len({u.bias is None for u in ups}) > 1:
        raise NoMatch("only one of gate and up has a bias")
    if torch._C._functorch.is_functorch_wrapped_tensor(value_of(down.out)):
        raise NoMatch("torch.func transforms it, and the op has no rules for that")
    for p in (*ups, down):
        kind = type(value_of(p.weight))
        # One from elsewhere, as of quantised weights, may know the matmul alone.
        is_subclass = is_traceable_wrapper_subclass_type(kind)
        if is_subclass and not kind.__module__.startswith("torch."):
            raise NoMatch(f"its weights are of {kind.__name__}")
    block = Block(activation, ups, down, rows[0], down.out)
    for p in (*ups, down):
        if p.bias_index is not None and (
            why := why_not_expert_of_row(
                p.bias_index, p.experts, p.grouped, block.num_experts
            )
        ):
            raise NoMatch(why)
        for mask in p.masks:
            block.check_mask(mask)
    dtypes = {
        value_of(n).dtype
        for p in (*ups, down)
        for n in (p.weight, p.bias)
        if n is not None
    }
    if len(dtypes) != 1:
        raise NoMatch(f"weights have dtypes {dtypes}")
    if len({value_of(p.out).dtype for p in (*ups, down)}) != 1:
        raise NoMatch("the products have several dtypes")
    block.effects = [e for p in (*ups, down) for e in p.effects]
    _check_sizes(block)
    return block


def _check_sizes(block: Block) -> None:
    """The matmuls may broadcast, or use a selection of the weights. The op does neither."""
    experts, width = block.num_experts, value_of(block.rows).shape[1]

    def outputs(p: Projection) -> Any:
        return value_of(p.weight).shape[2 if p.transposed else 1]

    for p in (*block.ups, block.down):
        wanted = width if p is block.down else outputs(block.ups[0])
        sizes = [(value_of(p.weight).shape[0], experts), (outputs(p), wanted)]
        if p.bias is not None:
            sizes += [
                (rank(p.bias), 2),
                *zip(value_of(p.bias).shape, (experts, wanted)),
            ]
        if not all(guard_or_false(a == b) for a, b in sizes):
            raise NoMatch("its weights differ in sizes")


def _match_gather(block: Block) -> None:
    """tokens, top_k and perm from rows = tokens[token of every row]."""
    rows, masks = unmasked(block.rows)
    block.rows = rows
    for user in rows.users:
        if op_name(user) == "masked_fill_" and not user.users:
            if user.args[0] is rows and argument(user, 2, "value") == 0:
                masks += (argument(user, 1, "mask"),)
                block.effects.append(user)
    for mask in masks:
        block.check_mask(mask)
    if not block.down.grouped and (copies := repeated(rows)) is not None:
        block.tokens, block.top_k = copies
    elif (taken := row_selection(rows)) is not None:
        token_of = taken[1]
        by_slot = row_selection(token_of)
        times = token_of_slots(token_of if by_slot is None else by_slot[0])
        if op_name(token_of) in ("floordiv", "floor_divide", "div", "divide"):
            by, rounding = (
                number(token_of.args[1]),
                token_of.kwargs.get("rounding_mode", "floor"),
            )
            exact = (
                op_name(token_of) in ("floordiv", "floor_divide")
                or "rounding_mode" in token_of.kwargs
            )
            if isinstance(by, int) and exact and rounding in ("floor", "trunc"):
                block.tokens, block.top_k, block.perm = taken[0], by, token_of.args[0]
        elif times is not None:
            block.tokens, block.top_k = taken[0], times
            block.perm = by_slot and by_slot[1]
        elif (copies := repeated(taken[0])) is not None:
            (block.tokens, block.top_k), block.perm = copies, token_of
    if block.tokens is None:
        raise NoMatch("the gather of its rows is not known")
    is_sorted = sorted_by(block.perm) is not None and not writers(block.perm)
    if block.down.grouped and not is_sorted:
        is_input = isinstance(block.perm, Node) and block.perm.op == "placeholder"
        where = " in this graph, perhaps after a graph break" if is_input else ""
        raise NoMatch(f"rows are not ordered by a sort{where}")
    if not block.down.grouped and block.perm is not None:
        raise NoMatch("bmm over rows that are not in the order of slots")
    tokens, all_rows = value_of(block.tokens), value_of(rows)
    if tokens is None or tokens.dim() != 2 or block.top_k < 1:
        raise NoMatch("tokens are not two-dimensional")
    # A guard: nothing has related the sizes of ids and tokens yet if both are inputs.
    if not guard_or_false(tokens.shape[0] * block.top_k == all_rows.shape[0]):
        raise NoMatch("there are not K rows per token")


def _only_user(node: Any, block: Block) -> Any:
    # zeros_like reads a shape only.
    users = [
        u for u in node.users if u not in block.effects and op_name(u) not in _FRESH
    ]
    return users[0] if len(users) == 1 else None


def _match_combine(block: Block) -> None:
    """weights and the sum over the rows of a token, from the end of the experts on."""
    node, in_slots, is_summed = block.down.out, block.perm is None, False
    while (user := _only_user(node, block)) is not None:
        name = op_name(user)
        if is_summed and name in ("squeeze", "view", "reshape"):
            if rank(user) != 2 or not same_size(
                value_of(user).shape[1], value_of(block.tokens).shape[1]
            ):
                raise NoMatch(
                    "the sum over rows is viewed with a shape other than (T, D)"
                )
            block.end = user
            return
        if name in CASTS | {"contiguous"}:
            if value_of(user).dtype not in COMPUTED:
                break
        elif name == "masked_fill" and argument(user, 2, "value") == 0:
            if node is not user.args[0] or in_slots or is_summed:
                raise NoMatch("the result is masked")
            block.check_mask(argument(user, 1, "mask"))
        elif name == "mul" and block.weights is None:
            other = next((o for n, o in operand_orders(user, "mul") if n is node), None)
            block.weights = _slot_weights(other, block, in_slots, rank(node) == 3)
            if block.weights is None:
                raise NoMatch("the rows are not multiplied by router weights")
        elif (
            (taken := row_selection(user)) is not None
            and taken[0] is node
            and not in_slots
        ):
            if not _inverts(taken[1], block, user):
                raise NoMatch("the rows are reordered, but not into slot order")
            block.inverse, in_slots = taken[1], True
        elif not in_slots and (slots := _put_into_slots(user, node, block)) is not None:
            user, in_slots = slots, True
        elif name in ("view", "reshape", "unflatten") and in_slots and rank(user) == 3:
            slots, tokens = value_of(user), value_of(block.tokens)
            if not (
                same_size(slots.shape[1], block.top_k)
                and same_size(slots.shape[2], tokens.shape[1])
            ):
                raise NoMatch("rows are viewed with a shape other than (T, K, D)")
        elif name in ("bmm", "matmul") and rank(node) == 3 and node is user.args[1]:
            if block.weights is not None or is_summed:
                raise NoMatch("the rows are weighted twice")
            block.weights = _row_weights(user.args[0], block)
            if block.weights is None:
                raise NoMatch("the rows are not multiplied by router weights")
            is_summed = True
        elif name == "einsum" and in_slots and rank(node) == 3 and not is_summed:
            _match_weighted_sum(user, node, block)
            return
        elif name == "sum" and rank(node) == 3 and not is_summed:
            dim = argument(user, 1, "dim")
            if dim not in (1, -2, [1], (1,), [-2], (-2,)) or argument(
                user, 2, "keepdim", False
            ):
                raise NoMatch("a sum that is not over the K rows of a token")
            block.end = user
            return
        elif name.rstrip("_") in _SUMS and not in_slots:
            _match_add(user, node, block)
            return
        else:
            break
        node = user
    raise NoMatch(
        f"the combine is not known: {op_name(user) if user else 'several users'}"
    )


def _put_into_slots(user: Any, rows: Any, block: Block) -> Any:
    """The tensor that has ``rows`` in slot order, if user puts them there."""
    if op_name(user) == "setitem":
        base, at, written = user.args
    elif op_name(user) == "index_copy" and argument(user, 1, "dim") == 0:
        base, at = user.args[0], argument(user, 2, "index")
        written = argument(user, 3, "source")
    else:
        return None
    if written is not rows or not same_value(at, block.perm):
        return None
    if op_name(base) not in _FRESH or not same_size(
        value_of(base).shape[0], value_of(rows).shape[0]
    ):
        return None
    if op_name(user) == "index_copy":
        return user
    if value_of(base).dtype != value_of(rows).dtype or any(
        u is not user and u < user for u in base.users
    ):
        return None
    block.effects.append(user)
    return base


def _match_weighted_sum(user: Any, node: Any, block: Block) -> None:
    """einsum("tkd,tk->td", rows of the slots, weights), in either order."""
    operands = user.args[1:] if len(user.args) == 3 else user.args[1]
    terms = str(user.args[0]).replace(" ", "").replace("->", ",").split(",")
    if len(terms) == 3 and len(operands) == 2 and block.weights is None:
        at = 0 if operands[0] is node else 1
        (t, k, d), other, out = terms[at].ljust(3)[:3], terms[1 - at], terms[2]
        weights = uncast(operands[1 - at])
        if (
            len({t, k, d}) == len(terms[at]) == 3
            and (other, out) == (t + k, t + d)
            and operands[at] is node
            and _is_token_weights(weights, block)
        ):
            block.weights, block.end = weights, user
            return
    raise NoMatch("an einsum that is not over the K rows of a token")


def _row_weights(node: Any, block: Block) -> Any:
    """Router weights, (R) or (T, K), that node has as (T, 1, K)."""
    flat = uncast(node)
    if rank(flat) != 3 or not same_size(value_of(flat).shape[1], 1):
        return None
    while op_name(flat) in VIEWS - {"expand"} and rank(flat) == 3:
        flat = flat.args[0]
    if op_name(flat) == "getitem" and flat.args[1] == (slice(None), None):
        flat = flat.args[0]
    flat = uncast(flat)
    return flat if rank(flat) == 1 or _is_token_weights(flat, block) else None


def _is_token_weights(node: Any, block: Block) -> bool:
    """Whether node is (T, K)."""
    if rank(node) != 2 or not same_size(value_of(node).shape[1], block.top_k):
        return False
    tokens = value_of(block.tokens).shape[0]
    return guard_or_false(value_of(node).shape[0] == tokens)


def _slot_weights(node: Any, block: Block, in_slots: bool, cube: bool) -> Any:
    """Router weights (R) or (T, K) in slot order of which node is a column."""
    node = uncast(node)
    if cube:  # (T, K, 1)
        if rank(node) != 3:  # of fewer dimensions it would be repeated for each token
            return None
        while op_name(node) == "expand":
            node = node.args[0]
        if not same_size(value_of(node).shape[-1], 1):
            return None
        flat = node
        while op_name(flat) in VIEWS and rank(flat) == 3:
            flat = flat.args[0]
        last = ((Ellipsis, None), (slice(None), slice(None), None))
        if op_name(flat) == "getitem" and flat.args[1] in last:
            flat = flat.args[0]
        return flat if _is_token_weights(flat, block) else None
    if rank(node) != 2 or not same_size(value_of(node).shape[1], 1):
        return None
    if not guard_or_false(value_of(node).shape[0] == value_of(block.rows).shape[0]):
        return None  # one number for all rows
    flat = uncast(flat_source(node))
    taken = row_selection(node) or row_selection(flat)
    if op_name(flat) == "getitem" and isinstance(flat.args[1], tuple):
        if len(flat.args[1]) == 2 and flat.args[1][1] is None:  # weights[perm, None]
            taken = flat.args[0], flat.args[1][0]
    elif in_slots and (rank(flat) == 1 or _is_token_weights(flat, block)):
        return flat
    if taken is None or in_slots:
        return None
    source, order = taken
    is_column = rank(source) == 2 and same_size(value_of(source).shape[1], 1)
    if (rank(source) != 1 and not is_column) or not same_value(order, block.perm):
        return None
    return source


def _inverts(inverse: Any, block: Block, reader: Node) -> bool:
    """Whether inverse[perm] is 0, 1, 2, ... where reader reads it."""
    written = writers(inverse)
    if op_name(inverse) in _FRESH:
        return (
            len(written) == 1
            and written[0] < reader
            and written[0].args[0] is inverse
            and op_name(written[0]) in ("setitem", "index_put_", "scatter_")
            and _writes_inverse(written[0], block)
        )
    if any(node is not inverse for node in written):
        return False
    if op_name(inverse) == "argsort":
        return is_ascending(inverse) and same_value(inverse.args[0], block.perm)
    if (
        op_name(inverse) == "getitem"
        and inverse.args[1] == 1
        and op_name(inverse.args[0]) == "sort"
    ):
        sort = inverse.args[0]
        return is_ascending(sort) and sort.args[0] is block.perm
    if op_name(inverse) in ("index_put", "scatter", "scatter_", "index_put_"):
        return _writes_inverse(inverse, block)
    return False


def _writes_inverse(writer: Any, block: Block) -> bool:
    if op_name(writer).startswith("scatter"):
        if argument(writer, 1, "dim") not in (0, -1):
            return False
        at, written = argument(writer, 2, "index"), argument(writer, 3, "src")
        if len(writer.args) > 4 or {"reduce", "value"} & {*writer.kwargs}:
            return False
    else:
        at, written = writer.args[1], writer.args[2]
        if len(writer.args) > 3 or writer.kwargs:  # accumulate
            return False
        if isinstance(at, (tuple, list)) and len(at) == 1:
            at = at[0]
    return at is block.perm and counts_from_zero(written)


def _is_plain_sum(user: Any) -> bool:
    """Whether a scatter_reduce adds to what is there."""
    added = argument(user, 4, "reduce") == "sum"
    return added and argument(user, 5, "include_self", True) is True


def _match_add(user: Any, rows: Any, block: Block) -> None:
    """base.index_add(0, token of every row, rows), scatter_add or scatter_reduce, in place or not."""
    name, base = op_name(user), user.args[0]
    index, source = (
        argument(user, 2, "index"),
        argument(user, 3, "source" if "index" in name else "src"),
    )
    if (
        argument(user, 1, "dim") not in (0, -2)
        or source is not rows
        or user.kwargs.get("alpha", 1) != 1
        or ("reduce" in name and not _is_plain_sum(user))
    ):
        raise NoMatch(f"{name} is not over rows")
    token_of = index if "index" in name else rows_of_expanded(index, rows)
    if token_of is None or ("scatter" in name and rank(index) != 2):
        raise NoMatch(f"the index of {name} is in no known form")
    taken = row_selection(block.rows)
    if taken is None or not same_value(token_of, taken[1]):
        raise NoMatch(f"{name} is not to the tokens of the rows")
    shape = value_of(base).shape if rank(base) == 2 else ()
    tokens = value_of(block.tokens).shape
    if len(shape) != 2 or not all(
        guard_or_false(a == b) for a, b in zip(shape, tokens)
    ):
        raise NoMatch(f"{name} adds to a tensor of a shape other than (T, D)")
    block.end = user
    fresh = op_name(base) in ("zeros_like", "zeros", "new_zeros")
    if name.endswith("_"):
        if not fresh or any(u is not user and u < user for u in base.users):
            raise NoMatch(f"{name} adds to a tensor that is in use")
        if not is_contiguous_or_false(value_of(base)):
            raise NoMatch(f"{name} adds to a tensor with other strides than the op's")
    elif not fresh:
        block.base = base


def _is_slower(block: Block) -> bool:
    """Whether MKL's products, one expert at a time, are faster than the op: in float32 on CPUs with
    AMX (0.81 to 0.91 of the time, 1,024 tokens of 256, 32 experts of 192)."""
    out = value_of(block.down.out)
    is_float = out.dtype == torch.float32 and out.device.type == "cpu"
    return is_float and block.down.grouped and torch.cpu._is_amx_tile_supported()


def match_block(down_node: Any) -> Block:
    block = _match_core(down_node)
    if _is_slower(block):
        raise NoMatch("its products in float32 are faster as written on this CPU")
    try:
        _match_gather(block)
        _match_combine(block)
        tokens, weights = value_of(block.tokens), value_of(block.weights)
        if weights is not None and not guard_or_false(
            weights.numel() == tokens.shape[0] * block.top_k
        ):
            raise NoMatch("there is not one router weight per row")
        end, out = value_of(block.end).dtype, value_of(block.down.out).dtype
        readers = {*block.end.users}
        if op_name(block.end).endswith("_"):
            readers |= {u for u in block.end.args[0].users if u is not block.end}
        narrowed = all(
            op_name(u) in CASTS
            and value_of(u) is not None  # of an op that this pass has made
            and value_of(u).dtype.itemsize <= out.itemsize
            for u in readers
        )
        wider = end.itemsize > out.itemsize
        if end not in COMPUTED or (wider and (not narrowed or block.base is not None)):
            # The op rounds its result: it must be what the block does anyway.
            raise NoMatch(f"the combine keeps {end}, the experts have {out}")
        _check_closed(block)
    except NoMatch as why:
        core = _match_core(down_node)
        core.why_core = str(why)
        if not core.down.grouped:
            raise
        _check_closed(core)
        return core
    return block


def _operands_of(block: Block) -> set[Node]:
    """What the op reads, where the block ends."""
    projections = (*block.ups, block.down)
    nodes = [n for p in projections for n in (p.weight, p.bias, p.experts)]
    nodes += [block.perm, block.inverse, block.weights, block.base]
    nodes.append(block.tokens if block.tokens is not None else block.rows)
    return {n for n in nodes if n is not None}


def inside_of(block: Block) -> set[Node]:
    """The nodes between the operands and the end."""
    stop, inside, todo = _operands_of(block), set(), [block.end, *block.effects]
    stop |= {p.bias_index for p in (*block.ups, block.down)} | {*block.masks}
    while todo:
        node = todo.pop()
        if node in stop or node in inside or node.op in ("placeholder", "get_attr"):
            continue
        inside.add(node)
        if op_name(node) not in _FRESH:  # of which only the shape is read
            todo += node.all_input_nodes
    return inside


def _computes(node: Node) -> bool:
    value = value_of(node)
    return value is not None and value.is_floating_point()


def _check_closed(block: Block) -> None:
    """Nothing outside reads or writes an intermediate, or changes an operand after it is read."""
    inside = inside_of(block)
    modes = modes_of(block.end.graph)
    if len({modes[n] for n in (*inside, block.end) if _computes(n)}) > 1:
        raise NoMatch("its parts differ in grad mode or autocast")
    for operand in _operands_of(block):
        reads = [user for user in operand.users if user in inside]
        changes = writers(operand, block.end, min(reads)) if reads else []
        for node in changes:
            if node not in block.effects:
                raise NoMatch(f"{node} changes {operand} before the block ends")
        if modes[block.end].grad and any(
            op_name(node) for node in writers(operand, since=block.end)
        ):
            raise NoMatch(f"{operand}, which the backward needs, changes later")
    for node in inside:
        if node is block.end:
            continue
        if not _computes(node):
            if any(w not in inside for w in writers(node, block.end)):
                raise NoMatch(f"{node} is written before the block ends")
            continue
        if not any(u in inside for u in node.users) and node not in block.effects:
            continue
        for user in node.users:
            fresh_sum = op_name(block.end).endswith("_") and block.end.args[0] is node
            if user not in inside and not fresh_sum:
                raise NoMatch(f"{node} is used by {user} as well")
