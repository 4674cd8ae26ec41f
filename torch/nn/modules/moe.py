"""The Mixture-of-Experts feed-forward layer as a module."""

import math
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import init
from torch.nn.parameter import Parameter

from .linear import Linear
from .module import Module


__all__ = ["MoE"]


class MoE(Module):
    r"""A feed-forward layer in which a router picks ``top_k`` of the experts per token.

    .. warning:: This module is a prototype and may change in any release.

    .. math::
        y_t = \sum_{e \in \mathrm{topk}(W_r x_t)} s_{t,e} \, \mathrm{MLP}_e(x_t)
        \; [+ \mathrm{MLP}_\mathrm{shared}(x_t)]

    It is :func:`~torch.nn.functional.moe_topk` and
    :func:`~torch.nn.functional.moe_mlp` with parameters. The layer adds no loss and keeps
    no state. :mod:`torch.nn.utils.moe` has functions that balance the experts, and
    ``need_routing=True`` returns their arguments.

    :func:`torch.export.export`, AOTInductor, :func:`torch.onnx.export` with
    ``dynamo=True`` from opset 20 on, and :func:`torch.jit.trace` take this module.
    The deprecated :func:`torch.jit.script` does not, as it lacks keyword-only
    arguments with defaults, such as those of :func:`~torch.nn.functional.moe_topk`.

    Args:
        embed_dim: D, width of a token.
        hidden_dim: F, width of an expert.
        num_experts: E.
        top_k: K, experts per token.
        activation: activation of the experts, see :func:`~torch.nn.functional.moe_mlp`.
        gate_interleaved: whether gate and up rows of ``w_in`` alternate, see
            :func:`~torch.nn.functional.moe_mlp`. Default: ``False``
        separate_up: whether the up projection is a parameter ``w_up`` of its own, as many
            checkpoints store it; gated activations only. Default: ``False``
        alpha: see :func:`~torch.nn.functional.moe_mlp`.
        limit: see :func:`~torch.nn.functional.moe_mlp`.
        bias: whether the routed experts have biases. Default: ``False``
        score: "softmax" or "sigmoid", see :func:`~torch.nn.functional.moe_topk`.
        normalize: whether the weights of a token's experts sum to ``scale``.
        num_groups: see :func:`~torch.nn.functional.moe_topk`.
        top_groups: see :func:`~torch.nn.functional.moe_topk`.
        scale: factor of all router weights. Default: 1.0
        balance_bias: whether a buffer ``balance_bias`` is added to the scores when experts
            are selected; :func:`~torch.nn.utils.moe.updated_expert_bias` computes its
            update. Default: ``False``
        shared_hidden_dim: width of an expert that every token uses in addition, with
            weight 1 and always without biases; none if ``None``.
        recipe: precision of the routed experts' products, see
            :func:`~torch.nn.functional.moe_mlp`; also an attribute, which may be set at any time: it
            is not part of the state dict. Backward saves the input twice: in 8 bits for the experts and
            in its own dtype for the router. It is not exported to ONNX. Default: ``None``, the dtype of
            the parameters

    Shape:
        - Input: :math:`(*, D)`.
        - Output: :math:`(*, D)`. With ``need_routing=True``, a tuple of the output, the router's
          logits :math:`(*, E)` and the chosen experts :math:`(*, K)`.

    Attributes:
        router: :class:`~torch.nn.Linear` from D to E without bias.
        w_in: :math:`(E, gF, D)`, g = 2 for gated activations and 1 otherwise; with
            ``separate_up`` the gate, :math:`(E, F, D)`.
        w_up: :math:`(E, F, D)` with ``separate_up``, else None.
        w_out: :math:`(E, D, F)`.
        b_in: :math:`(E, gF)`, or None; with ``separate_up`` the gate's F first.
        b_out: :math:`(E, D)`, or None.
        shared_w_in: :math:`(gF_s, D)`, or None.
        shared_w_up: :math:`(F_s, D)` with ``separate_up``, or None.
        shared_w_out: :math:`(D, F_s)`, or None.
        balance_bias: :math:`(E)` buffer, or None. Constructed in at least float32, whatever
            ``dtype`` is, because :func:`~torch.nn.utils.moe.updated_expert_bias` refuses
            bfloat16, which would round its steps away. ``module.to(torch.bfloat16)`` casts it
            like every buffer.

    The state dict has exactly ``router.weight`` and the parameters and the buffer above that
    are not None.

    :meth:`run_experts` and :func:`~torch.nn.functional.moe_topk` are batch invariant: the
    output bits of a token depend on its own experts and weights, and not on the other tokens
    of the call. Only the router is not batch invariant. It is a
    :class:`~torch.nn.Linear`, whose float32 matmul may round the logits of a token
    differently when there are few tokens. A subclass is invariant as a whole if its
    ``route`` computes the logits as
    ``(input.unsqueeze(-2) * self.router.weight).sum(-1)``.

    All parameters are initialized from :math:`\mathcal{U}(-\sqrt{k}, \sqrt{k})`, where k is 1 /
    the number of input features, as in :class:`~torch.nn.Linear`.

    Raises:
        ValueError: a size is below 1, ``top_k`` above ``num_experts``, ``activation`` unknown to
            :func:`~torch.nn.functional.moe_mlp`, or ``separate_up`` is given without a gate
            or with ``gate_interleaved``; the message names it. The other arguments are validated by
            the two functionals in the first forward pass.

    Example::

        >>> layer = torch.nn.MoE(16, 32, num_experts=8, top_k=2)
        >>> layer(torch.randn(4, 10, 16)).shape
        torch.Size([4, 10, 16])
        >>> output, logits, indices = layer(torch.randn(4, 10, 16), need_routing=True)
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        gate_interleaved: bool = False,
        separate_up: bool = False,
        alpha: float | None = None,
        limit: float | None = None,
        bias: bool = False,
        score: str = "softmax",
        normalize: bool = True,
        num_groups: int | None = None,
        top_groups: int | None = None,
        scale: float = 1.0,
        balance_bias: bool = False,
        shared_hidden_dim: int | None = None,
        recipe: str | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        for name, size in (
            ("embed_dim", embed_dim),
            ("hidden_dim", hidden_dim),
            ("num_experts", num_experts),
            ("shared_hidden_dim", shared_hidden_dim),
        ):
            if size is not None and size < 1:
                raise ValueError(f"MoE: {name} must be at least 1, got {size}")
        if not 1 <= top_k <= num_experts:
            raise ValueError(
                f"MoE: top_k must be between 1 and num_experts = {num_experts}, got {top_k}"
            )
        if activation not in get_args(F._MoeActivation):
            raise ValueError(
                "MoE: activation must be one of "
                f"{', '.join(get_args(F._MoeActivation))}, got {activation!r}"
            )
        recipes = get_args(F._MoeRecipe)
        if recipe is not None and recipe not in recipes:
            known = ", ".join(("None", *map(repr, recipes)))
            raise ValueError(f"MoE: recipe must be one of {known}, got {recipe!r}")
        is_gated = activation in get_args(F._MoeGatedActivation)
        if separate_up and (not is_gated or gate_interleaved):
            raise ValueError(
                "MoE: separate_up=True needs a gated activation and gate_interleaved=False, "
                f"got {activation!r} and gate_interleaved={gate_interleaved}"
            )
        self.embed_dim = embed_dim
        self.hidden_dim = hidden_dim
        self.top_k = top_k
        self.activation = activation
        self.gate_interleaved = gate_interleaved
        self.alpha, self.limit, self.recipe = alpha, limit, recipe
        self.routing: dict[str, Any] = {
            "score": score,
            "normalize": normalize,
            "num_groups": num_groups,
            "top_groups": top_groups,
            "scale": scale,
        }

        def parameter(*shape: int) -> Parameter:
            return Parameter(torch.empty(shape, device=device, dtype=dtype))

        gates = 2 if is_gated else 1
        in_rows = 1 if separate_up else gates
        E, D, H, S = num_experts, embed_dim, hidden_dim, shared_hidden_dim
        self.router = Linear(D, E, bias=False, device=device, dtype=dtype)
        self.w_in = parameter(E, in_rows * H, D)
        self.w_up = parameter(E, H, D) if separate_up else None
        self.w_out = parameter(E, D, H)
        self.b_in = parameter(E, gates * H) if bias else None
        self.b_out = parameter(E, D) if bias else None
        self.shared_w_in = self.shared_w_up = self.shared_w_out = None
        if S is not None:
            self.shared_w_in = parameter(in_rows * S, D)
            self.shared_w_up = parameter(S, D) if separate_up else None
            self.shared_w_out = parameter(D, S)
        zeros = None
        if balance_bias:
            bias_dtype = torch.promote_types(self.w_in.dtype, torch.float32)
            zeros = torch.zeros(E, device=device, dtype=bias_dtype)
        self.register_buffer("balance_bias", zeros)
        self._reset_experts()

    @property
    def num_experts(self) -> int:
        """E, the rows of the router weight, so that experts may be removed from a layer."""
        # In an expert parallel forward, w_in and w_out hold the experts of one rank only.
        # Quantised routers and those of subclasses may have no weight (E, D).
        weight = getattr(self.router, "weight", None)
        has_rows = isinstance(weight, Tensor) and weight.shape[1:] == (self.embed_dim,)
        return (weight if has_rows else self.w_in).shape[0]

    def reset_parameters(self) -> None:
        """Draws new parameters, of adapters too, and zeroes the balance bias."""
        self.router.reset_parameters()
        self._reset_experts()

    def _reset_experts(self) -> None:
        parametrizations: Any = self._modules.get("parametrizations", {})
        for name, bias in (
            ("w_in", self.b_in),
            ("w_up", None),
            ("w_out", self.b_out),
            ("shared_w_in", None),
            ("shared_w_up", None),
            ("shared_w_out", None),
        ):
            weight = getattr(self, name)
            parts = parametrizations[name] if name in parametrizations else ()
            can_be_set = parts and all(hasattr(part, "right_inverse") for part in parts)
            if not can_be_set:  # the attribute is only a merged value, as with add_lora
                weight = getattr(parts, "original", weight)
            if weight is not None:
                bound = 1 / math.sqrt(weight.shape[-1])
                init.uniform_(weight, -bound, bound)
                if can_be_set:
                    setattr(self, name, weight)
                if bias is not None:
                    init.uniform_(bias, -bound, bound)
        for part in (part for parts in parametrizations.values() for part in parts):
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        if self.balance_bias is not None:
            init.zeros_(self.balance_bias)

    def route(
        self, input: Tensor, topk_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits ``(*, E)``, chosen experts ``(*, K)`` and their weights ``(*, K)``.

        If given, ``topk_indices`` replace the choice, see :func:`~torch.nn.functional.moe_topk`.
        A subclass with another router overrides this method. It may omit the argument, and then
        :mod:`torch.nn.utils.moe_replay` does not support it.
        """
        logits = self.router(input)
        indices, weights = F.moe_topk(
            logits,
            self.top_k if topk_indices is None else topk_indices.shape[-1],
            bias=self.balance_bias,
            topk_indices=topk_indices,
            **self.routing,
        )
        return logits, indices, weights

    def run_routed(
        self,
        input: Tensor,
        topk_indices: Tensor,
        topk_weights: Tensor,
        num_rows: int | None = None,
        input_scaled: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Weighted sum ``(*, D)`` of the experts that the router chose.

        :class:`~torch.distributed.tensor.parallel.ExpertParallel` calls it with rows, ids and expert
        weights of one rank, and with ``num_rows``, which an override must take.

        ``num_rows`` is a static bound of the rows, for a caller that knows one, as
        expert parallelism with a capacity does: slots that do not fit add nothing.
        ``input_scaled`` has the rows as they came over a wire in FP8, see
        :func:`torch.nn.functional.scaled_moe_mlp`.
        """
        experts: dict[str, Any] = {
            "w_up": self.w_up,
            "b_in": self.b_in,
            "b_out": self.b_out,
            "num_rows": num_rows,
            **self._options(),
        }
        if self.recipe is not None:
            experts["recipe"] = self.recipe
        operands = (input, topk_indices, topk_weights, self.w_in, self.w_out)
        if input_scaled:
            return F.scaled_moe_mlp(*operands, input_scaled=input_scaled, **experts)
        return F.moe_mlp(*operands, **experts)

    def run_shared(self, input: Tensor) -> Tensor | None:
        """Output ``(*, D)`` of the expert that every token uses, None without one."""
        if self.shared_w_in is None or self.shared_w_out is None:
            return None
        rows = torch.atleast_2d(input).flatten(0, -2)
        w_up = self.shared_w_up
        # A dense MLP is one expert with all rows.
        output = F.grouped_mlp(
            rows,
            self.shared_w_in.unsqueeze(0),
            self.shared_w_out.unsqueeze(0),
            offs=rows.new_full((1,), rows.shape[0], dtype=torch.int32),
            w_up=None if w_up is None else w_up.unsqueeze(0),
            **self._options(),
        )
        return output.view(input.shape)

    def _options(self) -> dict[str, Any]:
        return {
            "activation": self.activation,
            "gate_interleaved": self.gate_interleaved,
            "alpha": self.alpha,
            "limit": self.limit,
        }

    def run_experts(
        self, input: Tensor, topk_indices: Tensor, topk_weights: Tensor
    ) -> Tensor:
        """The routed and shared experts, which is all of the layer after the router.

        :class:`~torch.distributed.tensor.parallel.ExpertParallel` replaces this method, to send
        tokens to the ranks of their experts, or ``run_routed`` if a subclass has this one.
        """
        output = self.run_routed(input, topk_indices, topk_weights)
        shared = self.run_shared(input)
        return output if shared is None else output + shared

    def forward(
        self,
        input: Tensor,
        *,
        need_routing: bool = False,
        topk_indices: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Runs the forward pass.

        Args:
            input: ``(*, D)``, or a jagged nested tensor ``(B, j, D)``; results are nested alike.
            need_routing: whether to return the router's logits ``(*, E)`` and the
                chosen experts ``(*, K)`` as well, for losses and statistics.
            topk_indices: ``(*, K)`` experts to take instead of choosing, -1 for none, see
                :func:`~torch.nn.functional.moe_topk`.
        """
        if isinstance(input, Tensor) and input.is_nested:  # a proxy of torch.fx is none
            functional: Any = F  # the stub has no private functions
            options = {"need_routing": need_routing, "topk_indices": topk_indices}
            return functional._of_jagged_values("MoE", self.forward, input, **options)
        given = () if topk_indices is None else (topk_indices,)
        logits, topk_indices, topk_weights = self.route(input, *given)
        try:
            output = self.run_experts(input, topk_indices, topk_weights)
        except NotImplementedError as error:
            self._explain(error)
            raise
        return (output, logits, topk_indices) if need_routing else output

    def _explain(self, error: NotImplementedError) -> None:
        """Adds a note on weights whose class does not implement the op, such as quantised tensors."""
        for name in ("w_in", "w_up", "w_out"):
            weight = getattr(self, name)
            kind = type(getattr(weight, "_local_tensor", weight))  # of a DTensor
            if kind not in (Parameter, Tensor, type(None)):
                error.add_note(
                    f"{name} of MoE is a {kind.__name__}. If that has no torch._moe_mlp: its dequantize() "
                    "is a weight for this layer, and torch._moe_mlp_scaled takes numbers and scales, see "
                    "'Quantised checkpoints of others' in the documentation of F.scaled_moe_mlp."
                )
                return

    def extra_repr(self) -> str:
        """The sizes, and arguments that differ from their defaults."""
        parts = [
            f"{self.embed_dim}, {self.w_out.shape[-1]}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}, activation={self.activation!r}"
        ]
        if self.gate_interleaved:
            parts.append("gate_interleaved=True")
        if self.w_up is not None:
            parts.append("separate_up=True")
        if self.alpha is not None:
            parts.append(f"alpha={self.alpha}")
        if self.limit is not None:
            parts.append(f"limit={self.limit}")
        if self.b_in is not None:
            parts.append("bias=True")
        if self.recipe is not None:
            parts.append(f"recipe={self.recipe!r}")
        if self.shared_w_out is not None:
            parts.append(f"shared_hidden_dim={self.shared_w_out.shape[-1]}")
        if self.balance_bias is not None:
            parts.append("balance_bias=True")
        return ", ".join(parts)


# As defined above. ExpertParallel compares with them, as it must not replace a patched method.
_METHODS = {
    name: getattr(MoE, name) for name in ("forward", "run_experts", "run_routed")
}
