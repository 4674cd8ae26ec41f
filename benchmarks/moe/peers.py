"""Every way to compute an MoE layer that is compared here: ours, what people write, what libraries do.

The functions have one meaning, on weights in nn.Linear convention:

    route(logits_TE, k) -> indices_TK, weights_TK     softmax over all experts, the k best,
                                                      renormalized
    experts(x_TD, indices_TK, weights_TK, w_in_EGD, w_out_EDF) -> y_TD
                                                      gated experts (SwiGLU), weighted sum
        b_in_EG, b_out_ED, gate                       of gpt-oss: biases, clamped gate

Letters are those of shapes.py. :func:`make_peers` binds the functions, and the libraries that can be
imported, to the operands of a row; :func:`demo_blocks` pairs them with a router. This repository has
no code of a library. It calls the public functions
of scattermoe.parallel_experts, sonicmoe.functional, liger_kernel.ops and vllm's fused_moe.
"""

import functools
import importlib
import inspect
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shapes import Operands, Shape

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


OURS = "moe_mlp"

# A peer above these costs is left out of a row, which then has its cost.
MAX_COPIED = 2  # GiB of weights, by batched_mm, in one layer
MAX_INDEX_GRAD = 4  # GiB of gradients of w[expert], by transformers' eager loop


class MoEBlock(NamedTuple):
    """A router and the experts it feeds."""

    route: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    experts: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

    def __call__(self, x_TD, logits_TE, k: int, w_in_EGD, w_out_EDF) -> Tensor:
        return self.experts(x_TD, *self.route(logits_TE, k), w_in_EGD, w_out_EDF)


def swiglu(h_RG: Tensor) -> Tensor:
    """(R, 2*F) with the gates first -> (R, F)."""
    gate, up = h_RG.chunk(2, dim=-1)
    return F.silu(gate) * up


def clamped_swiglu(h_RG: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gpt-oss's gate: (R, 2*F) with gates and ups interleaved -> (R, F)."""
    gate, up = h_RG[..., 0::2], h_RG[..., 1::2]
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def route(logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Plain torch router: indices (T, k) int64, weights (T, k) float32."""
    weights_TK, indices_TK = logits_TE.softmax(-1, dtype=torch.float32).topk(k)
    return indices_TK, weights_TK / weights_TK.sum(-1, keepdim=True)


def loop_over_hit_experts(
    x_TD, indices_TK, weights_TK, w_in_EGD, w_out_EDF, expert_order=None, *,
    b_in_EG=None, b_out_ED=None, gate=swiglu, unbind=False,
) -> Tensor:  # fmt: skip
    """Gather the tokens of one expert, two linears, weight, add back; the next expert.

    This is the form of the eager MoE layers of Hugging Face Transformers.

    The gradient of each ``w[expert]`` is as large as all of ``w``, which is the largest cost.
    With ``unbind``, ``w`` is unbound once and gets a single gradient.
    """
    num_experts = len(w_in_EGD)
    parameters = (w_in_EGD, w_out_EDF, b_in_EG, b_out_ED)
    if unbind:
        parameters = (None if p is None else p.unbind() for p in parameters)
    w_in, w_out, b_in, b_out = parameters
    mask_EKT = F.one_hot(indices_TK, num_experts).permute(2, 1, 0)
    hit_E = mask_EKT.sum((1, 2)).tolist()
    y_TD = torch.zeros_like(x_TD)
    for expert in expert_order or range(num_experts):
        if not hit_E[expert]:
            continue
        choices, tokens = torch.where(mask_EKT[expert])
        biases = (None if b is None else b[expert] for b in (b_in, b_out))
        h = F.linear(x_TD[tokens], w_in[expert], next(biases))
        o = F.linear(gate(h), w_out[expert], next(biases))
        o = o * weights_TK[tokens, choices, None]
        y_TD.index_add_(0, tokens, o.to(y_TD.dtype))
    return y_TD


loop_over_unbound_experts = functools.partial(loop_over_hit_experts, unbind=True)


def _sorted_by_expert(indices_TK: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots in expert order (R), the expert of each (R), and the end row of every expert (E)."""
    experts_R, slots_R = indices_TK.flatten().sort(stable=True)
    counts_E = torch.histc(experts_R.float(), bins=E, min=0, max=E - 1)
    return slots_R, experts_R, counts_E.cumsum(0, dtype=torch.int32)


def _plus_bias(x_RN: Tensor, bias_EN: Tensor | None, experts_R: Tensor) -> Tensor:
    return x_RN if bias_EN is None else x_RN + bias_EN[experts_R]


def _sum_over_slots(o_RD: Tensor, slots_R: Tensor, weights_TK: Tensor) -> Tensor:
    """Weight the rows, put them back into slot order and sum those of a token."""
    T, K = weights_TK.shape
    o_RD = o_RD * weights_TK.flatten()[slots_R, None]
    rows_R = torch.empty_like(slots_R)
    rows_R[slots_R] = torch.arange(len(slots_R), device=slots_R.device)
    return o_RD[rows_R].view(T, K, -1).sum(1)


def sorted_grouped_mm(
    x_TD, indices_TK, weights_TK, w_in_EGD, w_out_EDF, *,
    b_in_EG=None, b_out_ED=None, gate=swiglu,
) -> Tensor:  # fmt: skip
    """Sort the rows by expert, two ``F.grouped_mm``, sum the rows of a token.

    This is the form of "grouped_mm" in Hugging Face Transformers.
    """
    slots_R, experts_R, offs_E = _sorted_by_expert(indices_TK, w_in_EGD.shape[0])
    x_RD = x_TD[slots_R // indices_TK.shape[1]]
    h_RG = F.grouped_mm(x_RD, w_in_EGD.mT, offs=offs_E)
    a_RF = gate(_plus_bias(h_RG, b_in_EG, experts_R))
    o_RD = F.grouped_mm(a_RF, w_out_EDF.mT, offs=offs_E)
    o_RD = _plus_bias(o_RD, b_out_ED, experts_R)
    return _sum_over_slots(o_RD, slots_R, weights_TK).to(x_TD.dtype)


def recomputed_grouped_mm(x_TD, indices_TK, weights_TK, w_in_EGD, w_out_EDF) -> Tensor:
    """Two ``F.grouped_mm`` that keep what the op keeps: x, H and the router weights.

    The weight of a row multiplies its activation, so backward needs no expert output. It
    gathers and activates again; a checkpoint stops at the operands of its matmul.
    """
    slots_R, _, offs_E = _sorted_by_expert(indices_TK, w_in_EGD.shape[0])
    T, K = indices_TK.shape
    again = functools.partial(checkpoint, use_reentrant=False)
    gathered = lambda x: F.grouped_mm(x[slots_R // K], w_in_EGD.mT, offs=offs_E)
    h_RG = again(gathered, x_TD)

    def weighted(h_RG, weights_TK):
        a_RF = swiglu(h_RG) * weights_TK.flatten()[slots_R, None]
        return F.grouped_mm(a_RF.to(h_RG.dtype), w_out_EDF.mT, offs=offs_E)

    o_RD = again(weighted, h_RG, weights_TK)
    rows_R = torch.empty_like(slots_R)
    rows_R[slots_R] = torch.arange(len(slots_R), device=slots_R.device)
    return o_RD[rows_R].view(T, K, -1).sum(1)


class Composite(torch.autograd.Function):
    """``F.moe_mlp`` by the composite kernels of its ops, as in series ``moe-core`` alone."""

    @staticmethod
    def forward(ctx, x_TD, indices_TK, weights_TK, w_in_EGD, w_out_EDF):
        # It needs packages of PyTorch's tests, which the machine of gpu_lab.py lacks.
        from torch.testing._internal.common_moe import call_composite as call

        ctx.call, aten = call, torch.ops.aten
        routing = call(aten._moe_permutation.default, indices_TK, w_in_EGD.shape[0])
        row_slots, slot_rows, offs, _ = routing
        operands = (x_TD, w_in_EGD, w_out_EDF, offs, weights_TK, row_slots, slot_rows)
        y_TD, preact = call(aten._moe_mlp.default, *operands)
        ctx.save_for_backward(*operands, preact)
        return y_TD

    @staticmethod
    def backward(ctx, grad_TD):
        *operands, preact = ctx.saved_tensors
        mask = [True, True, True, True, False, False, False]
        backward = torch.ops.aten._moe_mlp_backward.default
        absent = (None, None, None)
        grads = ctx.call(backward, grad_TD, *operands, *absent, preact, mask)
        x_TD, w_in_EGD, w_out_EDF, weights_TK, *_ = grads
        return x_TD, None, weights_TK, w_in_EGD, w_out_EDF


def three_grouped_mm(
    x_TD, indices_TK, weights_TK, gate_EFD, up_EFD, w_out_EDF
) -> Tensor:
    """The form of torchtitan: gate and up are two matrices, the sum over slots is fp32."""
    slots_R, _, offs_E = _sorted_by_expert(indices_TK, gate_EFD.shape[0])
    T, K = indices_TK.shape
    x_RD = x_TD[slots_R // K]
    h_RF = F.silu(F.grouped_mm(x_RD, gate_EFD.mT, offs=offs_E))
    h_RF = h_RF * F.grouped_mm(x_RD, up_EFD.mT, offs=offs_E)
    o_RD = F.grouped_mm(h_RF, w_out_EDF.mT, offs=offs_E)
    slots_RD = torch.zeros_like(o_RD).index_copy(0, slots_R, o_RD)
    y_T1D = weights_TK.float()[:, None] @ slots_RD.view(T, K, -1).float()
    return y_T1D.squeeze(1).to(x_TD.dtype)


def batched_mm(
    x_TD, indices_TK, weights_TK, w_in_EGD, w_out_EDF, *,
    b_in_EG=None, b_out_ED=None, gate=swiglu,
) -> Tensor:  # fmt: skip
    """Copy the matrices of one expert per slot, then ``bmm``.

    This is the form of "batched_mm" in Hugging Face Transformers, for a few tokens.
    """
    T, K = indices_TK.shape
    experts_R = indices_TK.flatten()
    x_RD1 = x_TD.repeat_interleave(K, 0)[..., None]
    h_RG = torch.bmm(w_in_EGD[experts_R], x_RD1).squeeze(-1)
    a_RF1 = gate(_plus_bias(h_RG, b_in_EG, experts_R))[..., None]
    o_RD = torch.bmm(w_out_EDF[experts_R], a_RF1).squeeze(-1)
    o_RD = _plus_bias(o_RD, b_out_ED, experts_R) * weights_TK.flatten()[:, None]
    return o_RD.view(T, K, -1).sum(1).to(x_TD.dtype)


def bind(function: Callable, args: Sequence[Tensor], grad=None) -> Callable[[], object]:
    """A call without a graph; with ``grad`` of the output, forward and all gradients of ``args``."""

    def step() -> tuple[Tensor, ...]:
        leaves = [t for t in args if t.requires_grad]
        return torch.autograd.grad(function(*args), leaves, grad)

    return torch.no_grad()(lambda: function(*args)) if grad is None else step


def fused() -> MoEBlock:
    """``F.moe_topk`` and ``F.moe_mlp``."""
    return MoEBlock(F.moe_topk, F.moe_mlp)


def training_blocks(orders: Sequence = (None,)) -> dict[str, MoEBlock]:
    """The blocks that the demo trains: unfused in several orders of the experts, and fused.

    Another order of the experts changes only the order of the sums, so it shows the effect of
    rounding.
    """
    blocks = {}
    for i, order in enumerate(orders, 1):
        loop = functools.partial(loop_over_unbound_experts, expert_order=order)
        name = f"unfused, order {i}" if i > 1 else "unfused"
        blocks[name] = MoEBlock(route, loop)
    return blocks | {"fused": fused()}


def demo_blocks() -> dict[str, MoEBlock]:
    """The blocks that the demo times on a trained layer."""
    return {
        "unfused, indexed": MoEBlock(route, loop_over_hit_experts),
        "unfused": MoEBlock(route, loop_over_unbound_experts),
        "grouped_mm": MoEBlock(route, sorted_grouped_mm),
        "fused": fused(),
    }


class Peer(NamedTuple):
    """One way to compute a layer.

    Attributes:
        leaves: operands of a layer -> the weights that get gradients: views of the stored ones,
            or a copy in another order, which is not timed.
        canonical: gradients of the leaves -> gradients of the stored weights.
    """

    name: str
    source: str  # whose code runs
    # (x (T, D), indices (T, K), weights (T, K), *leaves) -> y (T, D)
    call: Callable[..., Tensor]
    leaves: Callable[[Operands], tuple[Tensor, ...]]
    canonical: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = tuple
    compiled: bool = False


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _stored(operands: Operands) -> tuple[Tensor, ...]:
    return tuple(map(_leaf, operands.stored()))


def _gate_and_up(operands: Operands) -> tuple[Tensor, ...]:
    return tuple(map(_leaf, (*operands.w_in.chunk(2, dim=1), operands.w_out)))


def _block(experts: Callable[..., Tensor], shape: Shape) -> Callable[..., Tensor]:
    """``experts`` on weights as they are stored."""
    if not shape.gpt_oss:
        return experts

    def call(x, indices, weights, w_in, w_out, b_in, b_out):
        others = {"b_in_EG": b_in, "b_out_ED": b_out, "gate": clamped_swiglu}
        return experts(x, indices, weights, w_in.mT, w_out.mT, **others)

    return call


def _moe_mlp(shape: Shape) -> Callable[..., Tensor]:
    def call(x, indices, weights, w_in, w_out, b_in=None, b_out=None):
        if shape.gpt_oss:
            w_in, w_out = w_in.mT, w_out.mT
        options = {"b_in": b_in, "b_out": b_out, **shape.activation()}
        return F.moe_mlp(x, indices, weights, w_in, w_out, **options)

    return call


def transformers_version() -> str | None:
    """Version of the transformers package, None where it cannot be imported."""
    clients = pathlib.Path(__file__).resolve().parent / "clients"
    if clients.is_dir():  # the staging tree's, which brings the package
        if str(clients) not in sys.path:
            sys.path.append(str(clients))
        from packages import add_client_packages

        add_client_packages()
    try:
        import transformers
    except ImportError:
        return None
    return transformers.__version__


def _transformers(shape: Shape, name: str) -> Callable[..., Tensor]:
    """An experts module of transformers with one implementation, on given weights."""
    import transformers
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config_class, experts_class = transformers.MixtralConfig, MixtralExperts
    if shape.gpt_oss:
        config_class, experts_class = transformers.GptOssConfig, GptOssExperts
    sizes = {"hidden_size": shape.D, "intermediate_size": shape.F}
    sizes |= {"num_local_experts": shape.E, "num_experts_per_tok": shape.K}
    config = config_class(**sizes)
    config._experts_implementation = name
    with torch.device("meta"):
        module = experts_class(config)
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    for parameter in names:
        if hasattr(module, parameter):
            delattr(module, parameter)

    def call(x, indices, weights, *leaves):
        module.__dict__.update(zip(names, leaves))
        return module(x, indices, weights)

    return call


def _scattermoe_leaves(operands: Operands) -> tuple[Tensor, ...]:
    gate, up = operands.w_in.detach().chunk(2, dim=1)
    # Its gated MLP does not activate the first half.
    return _leaf(torch.cat([up, gate], dim=1)), _leaf(operands.w_out)


def _scattermoe(shape: Shape) -> Callable[..., Tensor]:
    module = importlib.import_module("scattermoe.parallel_experts")

    def call(x, ids, weights, w_in, w_out):
        experts, slots = ids.flatten().sort()
        order = (experts, slots, experts.bincount(minlength=shape.E).cumsum(-1))
        up, gate = module.parallel_linear(
            x, w_in.permute(0, 2, 1), shape.K, *order, grouped_out=True
        ).chunk(2, dim=-1)
        gates = weights.to(x.dtype)  # it multiplies them by rows in the dtype of x
        args = (F.silu(gate) * up, w_out.permute(0, 2, 1), 1, *order)
        return module.parallel_linear(*args, grouped_in=True, gates=gates)

    return call


def _sonicmoe_leaves(operands: Operands) -> tuple[Tensor, ...]:
    # Its storage alternates gate and up rows.
    E, two_f, D = operands.w_in.shape
    halves = operands.w_in.detach().view(E, 2, two_f // 2, D)
    return _leaf(halves.transpose(1, 2).reshape(E, two_f, D)), _leaf(operands.w_out)


def _sonicmoe(shape: Shape) -> Callable[..., Tensor]:
    run = importlib.import_module("sonicmoe.functional").moe_general_routing_inputs
    activation = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
    parameters = inspect.signature(run).parameters
    inference = next(name for name in parameters if name.startswith("is_inference"))

    def call(x, ids, weights, w_in, w_out):
        tokens = torch.arange(len(ids), device=ids.device, dtype=torch.int32)
        out, _ = run(
            x=x, router_scores=weights.reshape(-1),
            token_indices=tokens.repeat_interleave(ids.shape[1]),
            expert_indices=ids.reshape(-1).int(), E=shape.E,
            w1=w_in.permute(1, 2, 0), b1=None, w2=w_out.permute(1, 2, 0), b2=None,
            stream_id=torch.cuda.current_stream().cuda_stream,
            activation_type=activation, **{inference: not torch.is_grad_enabled()},
        )  # fmt: skip
        return out

    return call


def _cutedsl(shape: Shape) -> Callable[..., Tensor]:
    return importlib.import_module("lab.cutedsl").layer


def _liger(shape: Shape) -> Callable[..., Tensor]:
    run = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction

    def call(x, ids, weights, w_in, w_out):
        return run.apply(x, w_in, w_out, ids.int(), weights)

    return call


def _vllm(shape: Shape) -> Callable[..., Tensor]:
    run = importlib.import_module("vllm.model_executor.layers.fused_moe").fused_experts

    def call(x, ids, weights, w_in, w_out):
        if torch.is_grad_enabled():
            raise NotImplementedError("vLLM's fused_experts has no backward")
        return run(x, w_in, w_out, topk_weights=weights.float(), topk_ids=ids.int())

    return call


# Peers from GPU libraries, and our kernels on one: the call, its weights, and the modules that
# must be importable.
LIBRARIES = {
    "ours_cutedsl": (_cutedsl, _sonicmoe_leaves, "lab.cutedsl"),
    "scattermoe": (_scattermoe, _scattermoe_leaves, "scattermoe"),
    "sonicmoe": (_sonicmoe, _sonicmoe_leaves, "sonicmoe"),
    "liger": (_liger, _stored, "liger_kernel.ops.fused_moe"),
    "vllm": (_vllm, _stored, "vllm.model_executor.layers.fused_moe"),
}
_OWN_FORMS = {
    "eager": loop_over_hit_experts,
    "grouped_mm": sorted_grouped_mm,
    "batched_mm": batched_mm,
}


def _own_source(form: str) -> str:
    return f"own, the form of {form} in transformers"


def find_libraries(folder: pathlib.Path | None) -> tuple[list[str], dict[str, str]]:
    """Which GPU libraries can be imported, and why the others cannot.

    ``folder`` is searched first; it holds packages or checkouts with a package each.
    """
    if folder is not None:
        for path in (*sorted(p for p in folder.iterdir() if p.is_dir()), folder):
            sys.path.insert(0, str(path))
    found, missing = [], {}
    for name, (*_, module) in LIBRARIES.items():
        try:
            importlib.import_module(module)
            found.append(name)
        except Exception as error:  # a broken installation does not stop the run
            missing[name] = f"{type(error).__name__}: {error}"[:200]
    return found, missing


def too_costly(shape: Shape, hits: float, layer_bytes: int, backward: bool) -> dict:
    """Peers that cost too much to be timed, and their cost.

    ``layer_bytes`` are those of a layer's weights, ``hits`` its experts with rows.
    """
    reasons, cap = {}, "more than the cap of"
    copies = shape.T * shape.K * layer_bytes / shape.E / 2**30
    if copies > MAX_COPIED:
        reason = f"would copy {copies:.1f} GiB of weights, {cap} {MAX_COPIED} GiB"
        reasons["transformers_batched_mm"] = reason
    index_grads = hits * layer_bytes / 2**30
    if backward and index_grads > MAX_INDEX_GRAD:
        reason = "its w[expert] has a gradient as large as w per expert, "
        reason += f"{index_grads:.0f} GiB in a backward, {cap} {MAX_INDEX_GRAD} GiB"
        reasons["transformers_eager"] = reason
    if shape.gpt_oss:
        reasons["three_grouped_mm"] = "torchtitan's GroupedExperts has no biases"
    return reasons


def make_peers(
    shape: Shape,
    without: Sequence[str] = (),
    *,
    libraries: Sequence[str] = (),
    compiled: bool = False,
    ours: Callable[..., Tensor] | None = None,
) -> tuple[list[Peer], dict[str, str]]:
    """Ours first, then its peers, and why some could not be made.

    Args:
        libraries: names from LIBRARIES that can be imported.
        compiled: adds compiled forms of the peers that can be captured.
        ours: function called for F.moe_mlp, by default itself.
    """
    version, partial = transformers_version(), functools.partial
    # name, source, what makes its call, and its leaves and their gradients
    make = lambda: ours or _moe_mlp(shape)
    makers: list[tuple] = [(OURS, "F.moe_mlp", make, _stored)]
    for name, own in _OWN_FORMS.items():
        source, make = _own_source(name), partial(_block, own, shape)
        if version is not None:
            source = f"transformers {version}"
            make = partial(_transformers, shape, name)
        makers.append((f"transformers_{name}", source, make, _stored))
    source = "own: transformers' loop over w.unbind() instead of w[expert]"
    make = partial(_block, loop_over_unbound_experts, shape)
    makers.append(("loop_unbound", source, make, _stored))
    if not shape.gpt_oss:
        source, make = "own, checkpoints of grouped_mm", lambda: recomputed_grouped_mm
        makers.append(("recomputed_grouped_mm", source, make, _stored))
        source, make = "F.moe_mlp without kernels", lambda: Composite.apply
        makers.append(("composite", source, make, _stored))
    makers.append((
        "three_grouped_mm", "own, the form of torchtitan", lambda: three_grouped_mm,
        _gate_and_up, lambda grads: (torch.cat(list(grads[:2]), dim=1), grads[2]),
    ))  # fmt: skip
    for name in libraries:
        call, leaves, _ = LIBRARIES[name]
        makers.append((name, name, partial(call, shape), leaves))
    peers, failed = [], {}
    for name, source, make, *leaves in makers:
        if name in without:
            continue
        try:
            peers.append(Peer(name, source, make(), *leaves))
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    if compiled:  # not the loops, which are data-dependent
        capturable = ("grouped_mm", "batched_mm")
        peers += [_compiled(p, shape) for p in peers if p.name.endswith(capturable)]
    return peers, failed


def _compiled(peer: Peer, shape: Shape) -> Peer:
    name, form = f"{peer.name}, compiled", peer.name.removeprefix("transformers_")
    if form in _OWN_FORMS:
        # The modules of transformers hold their weights, so every layer would be compiled
        # separately; our code in the same form takes them as arguments.
        call = _block(_OWN_FORMS[form], shape)
        peer = peer._replace(call=call, source=_own_source(form))
    call = torch.compile(peer.call, dynamic=False)
    return peer._replace(name=name, call=call, compiled=True)
