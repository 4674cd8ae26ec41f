"""What our layer is compared with, each behind the same call.

A peer is called with (x, ids, weights, w_in, w_out) in nn.Linear convention, gate rows
before up rows. Weights that a library wants in another order are reordered once, before
any clock starts, and are leaves of their own.

The two on ``torch._grouped_mm`` are always there. The libraries are used where they can
be imported, from the environment or from the folder that ``--peers`` names; nothing of
them lies in this repository. What is written here follows their public functions:
scattermoe.parallel_experts.parallel_linear and
sonicmoe.functional.moe_general_routing_inputs.
"""

import dataclasses
import importlib
import inspect
import pathlib
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .shapes import Operands, Shape


@dataclasses.dataclass(frozen=True)
class Peer:
    """One way to compute the layer.

    Attributes:
        layer: () -> (T, D).
        leaves: what a training step differentiates.
    """

    layer: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]


def _expert_order(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Slots in expert order, and the int32 end offset of every expert; no host sync."""
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.histc(flat.float(), num_experts, 0, num_experts - 1)
    return order, counts.cumsum(0).to(torch.int32)


def titan_block(x, ids, weights, gate, up, down) -> Tensor:
    """torchtitan's order of things: three grouped products, scatter-add of the rows."""
    order, offs = _expert_order(ids, gate.shape[0])
    tokens = order // ids.shape[1]
    rows = x[tokens]
    hidden = F.silu(torch._grouped_mm(rows, gate.mT, offs=offs))
    hidden = hidden * torch._grouped_mm(rows, up.mT, offs=offs)
    out = torch._grouped_mm(hidden, down.mT, offs=offs)
    out = (out * weights.reshape(-1)[order, None]).to(x.dtype)
    return torch.zeros_like(x).index_add(0, tokens, out)


def fused_gate_block(x, ids, weights, w_in, w_out) -> Tensor:
    """Two grouped products, the rows put back in token order and summed."""
    order, offs = _expert_order(ids, w_in.shape[0])
    gate, up = torch._grouped_mm(x[order // ids.shape[1]], w_in.mT, offs=offs).chunk(
        2, dim=1
    )
    out = torch._grouped_mm(F.silu(gate) * up, w_out.mT, offs=offs)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    out = out[back].view(*ids.shape, -1) * weights[..., None]
    return out.sum(1).to(x.dtype)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().contiguous().requires_grad_()


def _titan(operands: Operands, compiled: bool) -> Peer:
    gate, up = (_leaf(half) for half in operands.w_in.chunk(2, dim=1))
    block = torch.compile(titan_block, dynamic=False) if compiled else titan_block
    x, ids, weights, _, w_out = operands.layer_args()
    return Peer(
        lambda: block(x, ids, weights, gate, up, w_out), (x, weights, gate, up, w_out)
    )


def _fused_gate(operands: Operands, compiled: bool) -> Peer:
    block = fused_gate_block
    if compiled:
        block = torch.compile(block, dynamic=False)
    return Peer(lambda: block(*operands.layer_args()), operands.leaves())


def _transformers(operands: Operands) -> Peer:
    """Qwen3's experts module with its own grouped_mm implementation."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    E, two_f, D = operands.w_in.shape
    config = Qwen3MoeConfig(
        hidden_size=D,
        moe_intermediate_size=two_f // 2,
        num_experts=E,
        num_experts_per_tok=operands.ids.shape[1],
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj = torch.nn.Parameter(operands.w_in.detach())
    experts.down_proj = torch.nn.Parameter(operands.w_out.detach())
    x, ids, weights = operands.layer_args()[:3]
    leaves = (x, weights, experts.gate_up_proj, experts.down_proj)
    return Peer(lambda: experts(x, ids, weights), leaves)


def _scattermoe(operands: Operands) -> Peer:
    module = importlib.import_module("scattermoe.parallel_experts")
    gate, up = operands.w_in.detach().chunk(2, dim=1)
    # Its gated MLP takes the first half as the one that is not activated.
    w_in = _leaf(torch.cat([up, gate], dim=1))
    x, ids, weights, _, w_out = operands.layer_args()
    num_experts, top_k = w_in.shape[0], ids.shape[1]

    def layer() -> Tensor:
        with torch.no_grad():
            if hasattr(module, "flatten_sort_count"):
                order = module.flatten_sort_count(ids, num_experts=num_experts)
            else:
                experts, slots = ids.flatten().sort()
                counts = experts.bincount(minlength=num_experts)
                order = (experts, slots, counts.cumsum(-1))
        up_rows, gate_rows = module.parallel_linear(
            x, w_in.permute(0, 2, 1), top_k, *order, grouped_out=True
        ).chunk(2, dim=-1)
        return module.parallel_linear(
            F.silu(gate_rows) * up_rows,
            w_out.permute(0, 2, 1),
            1,
            *order,
            grouped_in=True,
            # It multiplies them by rows in the dtype of x.
            gates=weights.to(x.dtype),
        )

    return Peer(layer, (x, weights, w_in, w_out))


def _sonicmoe(operands: Operands) -> Peer:
    functional = importlib.import_module("sonicmoe.functional")
    enums = importlib.import_module("sonicmoe.enums")
    run = functional.moe_general_routing_inputs
    parameters = inspect.signature(run).parameters
    E, two_f, D = operands.w_in.shape
    halves = operands.w_in.detach().view(E, 2, two_f // 2, D)
    # Its storage alternates gate and up rows.
    w_in = _leaf(halves.transpose(1, 2).reshape(E, two_f, D))
    x, ids, weights, _, w_out = operands.layer_args()
    tokens = torch.arange(len(ids), device=ids.device, dtype=torch.int32)
    inference = next(name for name in parameters if name.startswith("is_inference"))

    def layer() -> Tensor:
        out, _ = run(
            x=x,
            router_scores=weights.reshape(-1),
            token_indices=tokens.repeat_interleave(ids.shape[1]),
            expert_indices=ids.reshape(-1).int(),
            w1=w_in.permute(1, 2, 0),
            b1=None,
            w2=w_out.permute(1, 2, 0),
            b2=None,
            E=E,
            stream_id=torch.cuda.current_stream().cuda_stream,
            activation_type=enums.ActivationType.SWIGLU,
            **{inference: not torch.is_grad_enabled()},
        )
        return out

    return Peer(layer, (x, weights, w_in, w_out))


# Libraries: how to make the peer, and what has to be importable.
LIBRARIES: dict[str, tuple[Callable[[Operands], Peer], str]] = {
    "transformers": (_transformers, "transformers"),
    "scattermoe": (_scattermoe, "scattermoe"),
    "sonicmoe": (_sonicmoe, "sonicmoe"),
}


def find_libraries(folder: pathlib.Path | None) -> tuple[list[str], dict[str, str]]:
    """Which libraries can be imported, and why the others cannot.

    Args:
        folder: searched first; holds packages or checkouts with a package each.
    """
    if folder is not None:
        if not folder.is_dir():
            raise SystemExit(f"--peers: {folder} is not a folder")
        for path in (*sorted(p for p in folder.iterdir() if p.is_dir()), folder):
            sys.path.insert(0, str(path))
    found, missing = [], {}
    for name, (_, module) in LIBRARIES.items():
        try:
            importlib.import_module(module)
            found.append(name)
        except Exception as error:  # a broken installation is no reason to stop
            missing[name] = f"{type(error).__name__}: {error}"[:200]
    return found, missing


def make_peers(
    shape: Shape, operands: Operands, libraries: list[str], compiled: bool
) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers of one row, and why some could not be made.

    Args:
        shape: of the row.
        operands: its operands.
        libraries: names from LIBRARIES that can be imported.
        compiled: also the compiled forms of the two torch-native peers.
    """
    makers: dict[str, Callable[[], Peer]] = {
        "titan": lambda: _titan(operands, False),
        "fused_gate": lambda: _fused_gate(operands, False),
    }
    if compiled:
        makers["titan_compiled"] = lambda: _titan(operands, True)
        makers["fused_gate_compiled"] = lambda: _fused_gate(operands, True)
    for name in libraries:
        makers[name] = lambda make=LIBRARIES[name][0]: make(operands)
    peers, failed = {}, {}
    for name, make in makers.items():
        try:
            peers[name] = make()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    return peers, failed


TORCH_NATIVE = ("titan", "fused_gate", "titan_compiled", "fused_gate_compiled")
