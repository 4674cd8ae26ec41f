"""Expert weights of a frozen graph, as constants that the CPU kernels read fastest.

Some checkpoints store expert weights along N, gpt-oss for one: (E, D, 2F) and (E, F, D), which
reach ``_moe_mlp`` as transposed views. Its CPU kernels then transpose a panel of every weight
that they multiply, in every call, which costs most where there are few rows. When a graph is
frozen, the weights are constants, and this pass makes new ones along K, once.

    constant w = p.mT, strides (D 2F, 1, 2F)  ->  a constant of the same values, strides (D 2F, D, 1)

The module is not touched: its parameter stays as it is, beside the constant, until
``freezing_discard_parameters`` drops it, as with the weights that freezing packs for oneDNN.
Graphs of one parameter share the constant. TORCH_LOGS="+inductor" says what became of every weight.
"""

import logging
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.freezing_utils import maybe_set_is_frozen_param
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef


log = logging.getLogger(__name__)

_OP = torch.ops.aten._moe_mlp.default
_WEIGHTS = {"w_in": 1, "w_out": 2, "w_up": 9}
# Half is converted to float on the way to a panel, which costs the same in either storage.
_DTYPES = (torch.bfloat16, torch.float32)
# Copies that live graphs use: (view of a storage, version) -> (storage, copy).
_copies: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[Tensor]]] = {}


def _weights_of(node: Node) -> dict[str, Any]:
    return {
        name: node.args[at] if at < len(node.args) else node.kwargs.get(name)
        for name, at in _WEIGHTS.items()
    }


def _is_weight_only(node: Node) -> bool:
    """Whether the experts alone read the constant, through this node or another one of its name."""
    same = node.graph.find_nodes(op="get_attr")
    return all(
        user.target is _OP
        and user.all_input_nodes.count(constant) == 1
        and any(w is constant for w in _weights_of(user).values())
        for constant in same
        if constant.target == node.target
        for user in constant.users
    )


def _why_not(node: Node, value: Tensor) -> str:
    """Why a weight stays as it is stored, or ""."""
    if value.device.type != "cpu" or value.dtype not in _DTYPES:
        return f"{value.dtype} on {value.device} is read as fast"
    if value.dim() != 3 or not value.numel():
        return "it is empty"
    return "" if _is_weight_only(node) else "it is used by more than the experts"


def _along_k(value: Tensor) -> Tensor:
    """A copy of ``value`` along its last dimension, one for all graphs of a parameter."""

    def copy() -> Tensor:
        return value.detach().clone(memory_format=torch.contiguous_format)

    if V.aot_compilation or value.is_inference():  # without a version
        return copy()
    for known, (storage, made) in list(_copies.items()):
        if storage.expired() or made() is None:
            del _copies[known]
    storage = value.untyped_storage()
    view = value.storage_offset(), value.shape, value.stride(), value.dtype
    key = (storage._cdata, value._version, *view)
    found = _copies[key][1]() if key in _copies else None
    # A write by .data, or by another tensor of the storage, changes no version that is known here.
    if found is None or not torch.equal(found, value):
        found = copy()
        _copies[key] = StorageWeakRef(storage), weakref.ref(found)
    return found


def _set_constant(gm: GraphModule, node: Node, value: Tensor) -> None:
    # The constant may be a parameter of the module, and setattr() puts no other tensor in its place.
    delattr(gm, str(node.target))
    gm.register_buffer(str(node.target), value)
    maybe_set_is_frozen_param(value)
    if "val" in node.meta:
        node.meta["val"] = node.meta["val"].new_empty_strided(
            value.shape, value.stride()
        )
    for user in node.users:
        if "eager_input_vals" not in user.meta:
            continue
        # Without exact strides it would be copied back in every call.
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


def relayout_expert_weights(gm: GraphModule) -> None:
    """Replaces constants that are expert weights stored along N by constants along K.

    Args:
        gm: a graph whose parameters are constants.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return  # narrower vectors read both layouts equally fast
    nodes = gm.graph.find_nodes(op="get_attr")
    # Constant folding leaves the tensors of nodes that it erased.
    for name in gm._buffers.keys() - {node.target for node in nodes}:
        delattr(gm, name)
    constants = {node: getattr(gm, str(node.target), None) for node in nodes}
    constants = {n: v for n, v in constants.items() if isinstance(v, Tensor)}
    storages = [
        v.untyped_storage()._cdata
        for v in constants.values()
        if v.layout is torch.strided
    ]
    weights = {
        w: None
        for node in gm.graph.find_nodes(op="call_function", target=_OP)
        for w in _weights_of(node).values()
        if w in constants and constants[w].layout is torch.strided
    }
    with torch.utils._python_dispatch._disable_current_modes():
        for node in weights:
            value = constants[node]
            # A package holds the whole storage of each constant.
            shared = storages.count(value.untyped_storage()._cdata) > 1
            if value.stride(-1) == 1 and not (V.aot_compilation and shared):
                continue
            if why := _why_not(node, value):
                log.info("expert weight %s stays as it is stored: %s", node, why)
                continue
            _set_constant(gm, node, _along_k(value))
            log.info("expert weight %s is stored along K", node)
            counters["inductor"]["moe_weight_relayout"] += 1
