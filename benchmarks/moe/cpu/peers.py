"""Everything a row times: F.moe_mlp and its peers, all on views of one set of weights."""

import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


_FOLDER = pathlib.Path(__file__).resolve().parents[1]
if str(_FOLDER) not in sys.path:
    sys.path.insert(0, str(_FOLDER))

import blocks
from .shapes import Layer, Row


OURS = "moe_mlp"

# What a peer may cost before it is left out of a row; the row then says what it would have cost.
MAX_COPIED_BYTES = 2 << 30  # of weights, by batched_mm, in one layer
MAX_INDEX_GRAD_BYTES = 4 << 30  # gradients of w[expert], by transformers' eager loop

Call = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor]], Tensor]


def _all(leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(leaves)


class Form(NamedTuple):
    """One way to compute a layer.

    Attributes:
        name: of the row's entry.
        source: whose code runs.
        leaves: the weights that its gradients are of, views of the stored ones, per layer.
        call: (x (T, D), indices (T, K), weights (T, K), leaves of a layer) -> y (T, D).
        canonical: gradients of ``leaves`` -> those of the stored weights.
        compiled: whether it is a compiled peer.
    """

    name: str
    source: str
    leaves: list[tuple[Tensor, ...]]
    call: Call
    canonical: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = _all
    compiled: bool = False


def _operands(row: Row, leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor, dict]:
    """w_in (E, 2F, D), w_out (E, D, F) and the keyword arguments of blocks.py."""
    if not row.gpt_oss:
        w_in, w_out = leaves
        return w_in, w_out, {}
    w_in, w_out, b_in, b_out = leaves
    kwargs = {"b_in_EG": b_in, "b_out_ED": b_out, "gate": blocks.clamped_swiglu}
    return w_in.mT, w_out.mT, kwargs


def _ours(row: Row) -> Call:
    activation = row.activation_kwargs()

    def call(x, indices, weights, leaves):
        w_in, w_out, kwargs = _operands(row, leaves)
        return F.moe_mlp(
            x,
            indices,
            weights,
            w_in,
            w_out,
            b_in=kwargs.get("b_in_EG"),
            b_out=kwargs.get("b_out_ED"),
            **activation,
        )

    return call


def _block(row: Row, experts: Callable[..., Tensor]) -> Call:
    def call(x, indices, weights, leaves):
        w_in, w_out, kwargs = _operands(row, leaves)
        return experts(x, indices, weights, w_in, w_out, **kwargs)

    return call


def _views(layers: Sequence[Layer], row: Row) -> list[tuple[Tensor, ...]]:
    return [
        tuple(t.detach().requires_grad_(row.backward) for t in layer.tensors())
        for layer in layers
    ]


def _three_grouped_mm(layers: Sequence[Layer], row: Row) -> Form:
    def leaves(layer: Layer) -> tuple[Tensor, ...]:
        w1, w3 = layer.w_in.chunk(2, dim=1)
        views = (w1, w3, layer.w_out)
        return tuple(t.detach().requires_grad_(row.backward) for t in views)

    return Form(
        "three_grouped_mm",
        "own, the form of torchtitan",
        [leaves(layer) for layer in layers],
        lambda x, indices, weights, leaves: blocks.three_grouped_mm(
            x, indices, weights, *leaves
        ),
        lambda grads: (torch.cat(grads[:2], dim=1), grads[2]),
    )


def transformers_version() -> str | None:
    """Version of the transformers package, None where it cannot be imported."""
    if (_FOLDER / "clients").is_dir():  # the staging tree's, which brings the package
        clients = str(_FOLDER / "clients")
        if clients not in sys.path:
            sys.path.append(clients)
        from transformers_experts import add_client_packages

        add_client_packages()
    try:
        import transformers
    except ImportError:
        return None
    return transformers.__version__


def _transformers_module(row: Row, name: str) -> torch.nn.Module:
    """An experts module of transformers without weights, set to one implementation."""
    import transformers
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    c = row.case
    sizes = {
        "hidden_size": c.dim,
        "intermediate_size": c.hidden,
        "num_local_experts": c.num_experts,
        "num_experts_per_tok": c.top_k,
    }
    if row.gpt_oss:
        config, module = transformers.GptOssConfig(**sizes), GptOssExperts
    else:
        config, module = transformers.MixtralConfig(**sizes), MixtralExperts
    config._experts_implementation = name
    with torch.device("meta"):
        return module(config)


def _transformers(layers: Sequence[Layer], row: Row, name: str, version: str) -> Form:
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    modules, leaves = {}, []
    for views in _views(layers, row):
        module = _transformers_module(row, name)
        parameters = [torch.nn.Parameter(v, requires_grad=row.backward) for v in views]
        for parameter_name, parameter in zip(names, parameters):
            module.register_parameter(parameter_name, parameter)
        leaves.append(tuple(parameters))
        modules[id(parameters[0])] = module

    def call(x, indices, weights, leaves):
        return modules[id(leaves[0])](x, indices, weights)

    return Form(f"transformers_{name}", f"transformers {version}", leaves, call)


_OWN_FORMS = {
    "eager": blocks.loop_over_hit_experts,
    "grouped_mm": blocks.sorted_grouped_mm,
    "batched_mm": blocks.batched_mm,
}


def _compiled(form: Form, row: Row) -> Form:
    if form.name.startswith("transformers_"):
        # A module of transformers holds its weights, so that every layer would be compiled
        # for itself; ours in the same form takes them as arguments.
        name = form.name.removeprefix("transformers_")
        form = form._replace(
            source=f"own, the form of {name} in transformers",
            call=_block(row, _OWN_FORMS[name]),
        )
    return form._replace(
        name=f"{form.name}, compiled",
        call=torch.compile(form.call, dynamic=False),
        compiled=True,
    )


def left_out(
    row: Row, copies: int, hit_experts: int, layer_bytes: int
) -> dict[str, str]:
    """Peers that cost too much to be timed on a row, and what they would have cost.

    Args:
        copies: bytes of weights that batched_mm copies in a layer.
        hit_experts: experts with rows.
        layer_bytes: bytes of the weights of a layer.
    """
    reasons = {}
    if copies > MAX_COPIED_BYTES:
        reasons["transformers_batched_mm"] = (
            f"would copy {copies / 2**30:.1f} GiB of weights, more than the cap of "
            f"{MAX_COPIED_BYTES >> 30} GiB"
        )
    index_grads = hit_experts * layer_bytes
    if row.backward and index_grads > MAX_INDEX_GRAD_BYTES:
        reasons["transformers_eager"] = (
            f"its w[expert] has a gradient as large as w per expert, "
            f"{index_grads / 2**30:.0f} GiB in a backward, more than the cap of "
            f"{MAX_INDEX_GRAD_BYTES >> 30} GiB"
        )
    if row.sweep:
        few = "a sweep has one loop and one grouped form only"
        reasons |= {"transformers_eager": few, "three_grouped_mm": few}
    if row.gpt_oss:
        reasons["three_grouped_mm"] = "torchtitan's GroupedExperts has no biases"
    return reasons


def make_forms(
    row: Row, layers: Sequence[Layer], without: dict[str, str], *, compiled: bool
) -> list[Form]:
    """F.moe_mlp first, then its peers.

    Args:
        row: what is timed.
        layers: the weights; every form gets views of them.
        without: names of forms to leave out.
        compiled: with the compiled peers of the row.
    """
    version = transformers_version()
    views = functools.partial(_views, layers, row)
    forms = [Form(OURS, "F.moe_mlp", views(), _ours(row))]
    for name, experts in _OWN_FORMS.items():
        if f"transformers_{name}" in without:
            continue
        if version is None:
            source = f"own, the form of {name} in transformers"
            form = Form(f"transformers_{name}", source, views(), _block(row, experts))
        else:
            form = _transformers(layers, row, name, version)
        forms.append(form)
    forms.append(
        Form(
            "loop_unbound",
            "own: transformers' loop over w.unbind() instead of w[expert]",
            views(),
            _block(row, blocks.loop_over_unbound_experts),
        )
    )
    if "three_grouped_mm" not in without:
        forms.append(_three_grouped_mm(layers, row))
    if compiled and row.compiled:
        capturable = ("grouped_mm", "batched_mm")  # the loops are data-dependent
        forms += [_compiled(f, row) for f in forms if f.name.endswith(capturable)]
    return forms
