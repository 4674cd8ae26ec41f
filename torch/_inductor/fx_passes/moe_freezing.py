"""Expert weights of a frozen graph, stored once as the CPU kernels read them fastest.

Some checkpoints store expert weights along N, gpt-oss for one: (E, D, 2F) and (E, F, D), which
reach ``_moe_mlp`` as transposed views. Its CPU kernels then transpose a panel of every weight
that they multiply, in every call, which costs most where there are few rows. When a graph is
frozen, the weights are constants, and this pass stores them along K instead, once.

    parameter p (E, D, 2F), strides (D 2F, 2F, 1)  ->  the same values, strides (D 2F, 1, D)
    constant w = p.mT                              ->  the same view of the new storage

The module that owns p keeps it: p gets the new storage as its ``data``, as from
``p.to(memory_format=...)``, so that one copy is alive and later graphs find it in order. Where
something else may read the old storage, the weight stays as it is.
TORCH_LOGS="+inductor" says what became of every weight.
"""

import gc
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.freezing_utils import maybe_set_is_frozen_param
from torch._inductor.virtualized import V
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.fx import GraphModule, Node
from torch.utils.weak import WeakTensorKeyDictionary


log = logging.getLogger(__name__)

_OP = torch.ops.aten._moe_mlp.default
_WEIGHTS = {"w_in": 1, "w_out": 2, "w_up": 9}
# Half is converted to float on the way to a panel, which costs the same in either storage.
_DTYPES = (torch.bfloat16, torch.float32)


# Constants of frozen graphs, whose code has their strides.
_in_code = WeakTensorKeyDictionary()


class _Stays(Exception):
    """Why a weight stays as it is stored."""


# --- what the constants of the graph are -----------------------------------------------------


def _weights_of(node: Node) -> dict[str, Any]:
    return {
        name: node.args[at] if at < len(node.args) else node.kwargs.get(name)
        for name, at in _WEIGHTS.items()
    }


def _constants(gm: GraphModule) -> dict[int, dict[Node, Tensor]]:
    """The tensors of the graph, by the address of their storage."""
    found: dict[int, dict[Node, Tensor]] = {}
    nodes = gm.graph.find_nodes(op="get_attr")
    # Of nodes that went with their last user, constant folding leaves the tensor.
    for name in gm._buffers.keys() - {node.target for node in nodes}:
        delattr(gm, name)
    for node in nodes:
        value = getattr(gm, str(node.target), None)
        if isinstance(value, Tensor) and value.layout is torch.strided:
            found.setdefault(_storage(value), {})[node] = value
    return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_weight_only(node: Node) -> bool:
    return all(
        user.target is _OP
        and user.all_input_nodes.count(node) == 1
        and any(w is node for w in _weights_of(user).values())
        for user in node.users
    )


# --- one storage -----------------------------------------------------------------------------


def _steps(distance: Any, base: Tensor) -> list[int]:
    """Steps along every dimension of ``base``, which is dense, that ``distance`` elements are."""
    steps = [0] * base.dim()
    for d in sorted(range(base.dim()), key=base.stride, reverse=True):
        if base.shape[d] > 1:
            steps[d], distance = divmod(distance, base.stride(d))
    return steps


def _same_view(view: Tensor, base: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that takes of a tensor of other strides what ``view`` is of ``base``."""
    start = _steps(view.storage_offset() - base.storage_offset(), base)
    along = [_steps(stride, base) for stride in view.stride()]
    for d, size in enumerate(base.shape):
        last = sum(
            steps[d] * (n - 1) for steps, n in zip(along, view.shape, strict=True)
        )
        if start[d] < 0 or start[d] + last >= size:
            raise _Stays("it is a view across dimensions")

    def take(new: Tensor) -> Tensor:
        def distance(steps: list[int]) -> int:
            return sum(
                s * stride for s, stride in zip(steps, new.stride(), strict=True)
            )

        strides = [distance(steps) for steps in along]
        return new.as_strided(view.shape, strides, distance(start))

    return take


def _depth_of(view: Tensor, base: Tensor) -> int:
    """The dimension of ``base`` that is K of the weight ``view``."""
    steps = _steps(view.stride(-1), base)
    if sum(steps) != 1:
        raise _Stays("its K is no dimension of its parameter")
    return steps.index(1)


def _is_optimized(param: Tensor) -> bool:
    """Whether an optimizer has a state of it, which is the key of a ``defaultdict`` only."""
    return param.requires_grad and any(
        isinstance(holder, defaultdict) and param in holder
        for holder in gc.get_referrers(param)
    )


def _owner(constants: dict[Node, Tensor], params: Sequence[Any]) -> tuple[Tensor, bool]:
    """The parameter that has the storage of ``constants``, or the one constant that does.

    Returns:
        tuple: the tensor, and whether a module keeps it.

    Raises:
        _Stays: if something else may read it.
    """
    first = next(iter(constants.values()))
    storage = first.untyped_storage()
    plain = {id(p): p for p in params if type(p) in (Tensor, torch.nn.Parameter)}
    owners = [p for p in plain.values() if _storage(p) == storage._cdata]
    if not owners and len(constants) > 1:
        raise _Stays("several constants share its storage, and no parameter has it")
    if len(owners) > 1 or storage.is_shared():
        raise _Stays("its storage is shared")
    # Nothing but these and `storage` may refer to it.
    known = {id(x) for x in (*constants.values(), *owners)}
    if torch._C._storage_Use_Count(storage._cdata) > len(known) + 1:
        raise _Stays("its storage is shared")
    base = owners[0] if owners else first
    if base in _in_code:
        raise _Stays("the code of another graph has its strides")
    if owners and (base.grad is not None or _is_optimized(base)):
        # A fused optimizer asks for the strides that its state has.
        raise _Stays("it is in training")
    # DLPack lends the memory of a tensor, and refers to no more than the tensor.
    users = 1 + sum(x._base is base for x in constants.values())
    if owners and base._use_count() > users:
        raise _Stays("its storage is shared")
    if not is_non_overlapping_and_dense_or_false(base):
        raise _Stays("its storage has gaps")
    return base, bool(owners)


def _relayout(
    constants: dict[Node, Tensor], params: Sequence[Any]
) -> dict[Node, Tensor]:
    """The constants, which are views of one storage, on a new one."""
    for node, value in constants.items():
        if value.device.type != "cpu" or value.dtype not in _DTYPES:
            raise _Stays(f"{value.dtype} on {value.device} is read as fast")
        if value.dim() != 3 or not value.numel():
            raise _Stays("it is empty")
        if not _is_weight_only(node):
            raise _Stays("it is used by more than the experts")
    if V.aot_compilation:
        # A package holds constants of its own, and of each all of its storage.
        return {
            node: value.detach().clone(memory_format=torch.contiguous_format)
            for node, value in constants.items()
        }
    base, is_kept = _owner(constants, params)
    depths = {_depth_of(value, base) for value in constants.values()}
    if len(depths) > 1:
        raise _Stays("it is used along N and along K")
    views = {node: _same_view(value, base) for node, value in constants.items()}
    depth = depths.pop()
    # A parameter is an inference tensor or none for good: its new data has to be the same.
    with torch.inference_mode(base.is_inference()):
        new = base.detach().movedim(depth, -1).contiguous().movedim(-1, depth)
        if is_kept:
            base.data = new
        return {node: take(new) for node, take in views.items()}


# --- the pass --------------------------------------------------------------------------------


def _set_constant(gm: GraphModule, node: Node, value: Tensor) -> None:
    setattr(gm, str(node.target), value)
    maybe_set_is_frozen_param(value)
    if "val" in node.meta:
        node.meta["val"] = node.meta["val"].new_empty_strided(
            value.shape, value.stride()
        )
    for user in node.users:
        if "eager_input_vals" not in user.meta:
            continue
        # needs_exact_strides: else it would be copied back in every call.
        args, kwargs = user.meta["eager_input_vals"]
        args, kwargs = list(args), dict(kwargs)
        for name, at in _WEIGHTS.items():
            if _weights_of(user)[name] is not node:
                continue
            where: Any = (args, at) if at < len(args) else (kwargs, name)
            where[0][where[1]] = where[0][where[1]].new_empty_strided(
                value.shape, value.stride()
            )
        user.meta["eager_input_vals"] = (tuple(args), kwargs)


def relayout_expert_weights(gm: GraphModule, params: Sequence[Any]) -> None:
    """Stores the constants that are expert weights along K.

    Args:
        gm: a graph whose parameters are constants.
        params: the parameters and buffers that they were.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return  # narrower vectors read both storages as fast
    weights = {
        w
        for node in gm.graph.find_nodes(op="call_function", target=_OP)
        for w in _weights_of(node).values()
        if isinstance(w, Node)
    }
    with torch.utils._python_dispatch._disable_current_modes():
        by_storage = _constants(gm)
        for key in list(by_storage):
            constants = by_storage.pop(key)
            name = ", ".join(map(str, constants))
            is_in_order = all(
                node not in weights or value.stride(-1) == 1
                for node, value in constants.items()
            )
            is_packed_twice = V.aot_compilation and len(constants) > 1
            if not weights & constants.keys() or (is_in_order and not is_packed_twice):
                continue
            try:
                relaid = _relayout(constants, params)
            except _Stays as why:
                log.info("expert weight %s stays as it is stored: %s", name, why)
                continue
            for node, value in relaid.items():
                _set_constant(gm, node, value)
            log.info("expert weight %s is stored along K", name)
            counters["inductor"]["moe_weight_relayout"] += 1
        if not V.aot_compilation:
            for constants in _constants(gm).values():
                for value in constants.values():
                    _in_code[value] = None
