"""The Mixture-of-Experts feed-forward layer as a module."""

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import init
from torch.nn.parameter import Parameter

from .module import Module


__all__ = ["MoE", "MoEOutput"]

_GATED = ("swiglu", "geglu", "geglu_tanh", "reglu", "swiglu_oai")


class MoEOutput(NamedTuple):
    """What :class:`MoE` returns.

    Attributes:
        output: ``(*, D)``.
        logits: ``(*, E)``, the router's; losses and statistics start from these.
        topk_indices: ``(*, K)``, the chosen experts; int64 unless another router makes
            other ids.
    """

    output: Tensor
    logits: Tensor
    topk_indices: Tensor


class MoE(Module):
    r"""A feed-forward layer in which a router picks ``top_k`` of the experts per token.

    .. warning:: This module is a prototype and may change in any release.

    .. math::
        y_t = \sum_{e \in \mathrm{topk}(W_r x_t)} s_{t,e} \, \mathrm{MLP}_e(x_t)
        \; [+ \mathrm{MLP}_\mathrm{shared}(x_t)]

    It is :func:`~torch.nn.functional.moe_topk` and
    :func:`~torch.nn.functional.moe_mlp` with parameters. No loss is added and nothing
    is remembered: :mod:`torch.nn.moe.losses` has the functions that keep experts
    balanced, and they take the logits and indices that are returned.

    Args:
        embed_dim: D, width of a token.
        hidden_dim: F, width of an expert.
        num_experts: E.
        top_k: K, experts per token.
        activation: of the experts, see :func:`~torch.nn.functional.moe_mlp`.
        gate_interleaved: whether gate and up rows of ``w_in`` alternate, see
            :func:`~torch.nn.functional.moe_mlp`. Default: ``False``
        alpha: of ``"swiglu_oai"``, see :func:`~torch.nn.functional.moe_mlp`.
        limit: of ``"swiglu_oai"``, see :func:`~torch.nn.functional.moe_mlp`.
        bias: whether the routed experts have biases. Default: ``False``
        score: "softmax" or "sigmoid", see :func:`~torch.nn.functional.moe_topk`.
        normalize: whether the weights of a token's experts sum to ``scale``.
        num_groups: see :func:`~torch.nn.functional.moe_topk`.
        top_groups: see :func:`~torch.nn.functional.moe_topk`.
        scale: factor of all router weights. Default: 1.0
        balance_bias: whether there is a buffer ``balance_bias`` that takes part in the
            choice of experts, to be moved by
            :func:`~torch.nn.moe.losses.updated_expert_bias`. Default: ``False``
        shared_hidden_dim: width of an expert that every token uses in addition, with
            weight 1 and always without biases; none if ``None``.

    Shape:
        - Input: :math:`(*, D)`.
        - Output: a :class:`MoEOutput`.

    Attributes:
        router: :math:`(E, D)`.
        w_in: :math:`(E, gF, D)`, g = 2 for gated activations and 1 otherwise.
        w_out: :math:`(E, D, F)`.
        b_in: :math:`(E, gF)`, or None.
        b_out: :math:`(E, D)`, or None.
        shared_w_in: :math:`(1, gF_s, D)`, or None.
        shared_w_out: :math:`(1, D, F_s)`, or None.
        balance_bias: :math:`(E)` buffer, or None. It is float32 in a layer of lower
            precision too, also after :meth:`~torch.nn.Module.to`: in bfloat16 the steps
            of :func:`~torch.nn.moe.losses.updated_expert_bias` would round away.

    All parameters start from :math:`\mathcal{U}(-\sqrt{k}, \sqrt{k})` with k = 1 / the
    summed dimension, as in :class:`~torch.nn.Linear`.

    Raises:
        ValueError: a size is below 1, ``top_k`` above the number of selectable experts,
            or an option is none of :func:`~torch.nn.functional.moe_topk` or
            :func:`~torch.nn.functional.moe_mlp`; the message names it.

    Example::

        >>> layer = torch.nn.MoE(16, 32, num_experts=8, top_k=2)
        >>> output, logits, topk_indices = layer(torch.randn(4, 10, 16))
        >>> output.shape
        torch.Size([4, 10, 16])
    """

    __constants__ = ["embed_dim", "hidden_dim", "num_experts", "top_k"]

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        gate_interleaved: bool = False,
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
        self.embed_dim = embed_dim
        self.hidden_dim = hidden_dim
        self.num_experts = num_experts
        self.top_k = top_k
        self.activation = activation
        self.gate_interleaved = gate_interleaved
        self.alpha = alpha
        self.limit = limit
        self.routing: dict[str, Any] = {
            "score": score,
            "normalize": normalize,
            "num_groups": num_groups,
            "top_groups": top_groups,
            "scale": scale,
        }

        g = 2 if activation in _GATED else 1
        self._check_options(g)

        def parameter(*shape: int) -> Parameter:
            return Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.router = parameter(num_experts, embed_dim)
        self.w_in = parameter(num_experts, g * hidden_dim, embed_dim)
        self.w_out = parameter(num_experts, embed_dim, hidden_dim)
        self.b_in = parameter(num_experts, g * hidden_dim) if bias else None
        self.b_out = parameter(num_experts, embed_dim) if bias else None
        self.shared_w_in = self.shared_w_out = None
        if shared_hidden_dim is not None:
            self.shared_w_in = parameter(1, g * shared_hidden_dim, embed_dim)
            self.shared_w_out = parameter(1, embed_dim, shared_hidden_dim)
        zeros = None
        if balance_bias:
            bias_dtype = torch.promote_types(self.router.dtype, torch.float32)
            zeros = torch.zeros(num_experts, device=device, dtype=bias_dtype)
        self.register_buffer("balance_bias", zeros)
        self.reset_parameters()

    def _check_options(self, g: int) -> None:
        """Raises here what the functionals would raise in the first forward pass."""
        empty = functools.partial(torch.empty, device="meta", dtype=torch.float32)
        no_tokens = empty(0, 1)
        F.moe_topk(empty(0, self.num_experts), self.top_k, **self.routing)
        self._mlp(no_tokens, no_tokens.long(), None, empty(1, g, 1), empty(1, 1, 1))

    def _apply(self, fn, recurse=True):
        before = self.balance_bias
        super()._apply(fn, recurse)
        after = self.balance_bias
        if before is not None and after is not None:
            dtype = torch.promote_types(after.dtype, torch.float32)
            if after.dtype != dtype:
                # From before, as the cast has lost bits.
                self.balance_bias = before.to(after.device, dtype)
        return self

    def reset_parameters(self) -> None:
        """Draws new parameters, and zeroes the balance bias."""
        for weight, bias in (
            (self.router, None),
            (self.w_in, self.b_in),
            (self.w_out, self.b_out),
            (self.shared_w_in, None),
            (self.shared_w_out, None),
        ):
            if weight is not None:
                bound = 1 / math.sqrt(weight.shape[-1])
                init.uniform_(weight, -bound, bound)
                if bias is not None:
                    init.uniform_(bias, -bound, bound)
        if self.balance_bias is not None:
            init.zeros_(self.balance_bias)

    def route(self, input: Tensor) -> tuple[Any, ...]:
        """Logits ``(*, E)``, chosen experts ``(*, K)`` and their weights ``(*, K)``.

        A subclass with another router overrides this. It may return ``num_rows`` of
        :func:`~torch.nn.functional.moe_mlp` as a fourth value, for a router that knows
        that its choice needs fewer rows than one per id.
        """
        logits = F.linear(input, self.router)
        indices, weights = F.moe_topk(
            logits, self.top_k, bias=self.balance_bias, **self.routing
        )
        return logits, indices, weights

    def run_routed(
        self,
        input: Tensor,
        topk_indices: Tensor,
        topk_weights: Tensor,
        num_rows: int | None = None,
    ) -> Tensor:
        """Weighted sum ``(*, D)`` of the experts that the router chose.

        ``num_rows`` is that of :func:`~torch.nn.functional.moe_mlp`.
        """
        return self._mlp(
            input,
            topk_indices,
            topk_weights,
            self.w_in,
            self.w_out,
            b_in=self.b_in,
            b_out=self.b_out,
            num_rows=num_rows,
        )

    def run_shared(self, input: Tensor) -> Tensor | None:
        """Output ``(*, D)`` of the expert that every token uses, None without one."""
        if self.shared_w_in is None or self.shared_w_out is None:
            return None
        everyone = torch.zeros(
            input.shape[:-1] + (1,), dtype=torch.int64, device=input.device
        )
        return self._mlp(input, everyone, None, self.shared_w_in, self.shared_w_out)

    def _mlp(
        self,
        input: Tensor,
        topk_indices: Tensor,
        topk_weights: Tensor | None,
        w_in: Tensor,
        w_out: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        return F.moe_mlp(
            input,
            topk_indices,
            topk_weights,
            w_in,
            w_out,
            activation=self.activation,
            gate_interleaved=self.gate_interleaved,
            alpha=self.alpha,
            limit=self.limit,
            **kwargs,
        )

    def run_experts(
        self,
        input: Tensor,
        topk_indices: Tensor,
        topk_weights: Tensor,
        num_rows: int | None = None,
    ) -> Tensor:
        """Routed and shared experts: all of the layer that comes after the router.

        :class:`~torch.distributed.tensor.parallel.ExpertParallel` replaces this method,
        to send tokens to the ranks of their experts. ``num_rows`` is that of
        :func:`~torch.nn.functional.moe_mlp`.
        """
        output = self.run_routed(input, topk_indices, topk_weights, num_rows)
        shared = self.run_shared(input)
        return output if shared is None else output + shared

    def forward(self, input: Tensor) -> MoEOutput:
        """Runs the forward pass."""
        logits, topk_indices, topk_weights, *num_rows = self.route(input)
        output = self.run_experts(input, topk_indices, topk_weights, *num_rows)
        return MoEOutput(output, logits, topk_indices)

    def extra_repr(self) -> str:
        """Sizes, and what differs from the defaults."""
        parts = [
            f"{self.embed_dim}, {self.hidden_dim}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}, activation={self.activation!r}"
        ]
        if self.gate_interleaved:
            parts.append("gate_interleaved=True")
        if self.alpha is not None:
            parts.append(f"alpha={self.alpha}")
        if self.limit is not None:
            parts.append(f"limit={self.limit}")
        if self.b_in is not None:
            parts.append("bias=True")
        if self.shared_w_out is not None:
            parts.append(f"shared_hidden_dim={self.shared_w_out.shape[-1]}")
        if self.balance_bias is not None:
            parts.append("balance_bias=True")
        return ", ".join(parts)
