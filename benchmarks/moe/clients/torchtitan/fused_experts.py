"""F.moe_mlp and a token switch inside torchtitan, by its own override mechanism.

Nothing of torchtitan is edited; one entry of a training config activates it::

    config.override.imports.append("fused_experts.fused_routed_experts")

RoutedExperts keeps its parameters, their sharding, initialisation and checkpoints, in any form that torchtitan has had: w1 and
w3 apart (0.3.0, and until 2026-08), read in place as F.moe_mlp's w_in and w_up; w13 of (E, 2, F, D) in GroupedExperts; or
w13 and w2 as GroupedLinear of RoutedExperts itself (from 2026-09), of which w_in is a view. What changes is its forward, between
router and sum. Without expert parallelism that is one call; with it, each token goes once to every
rank that has one of its experts, with its ids and router weights.

The modules that hold the weights are called for them, as torchtitan calls them, so that what is around them (FSDP2's gather, an
adapter's wrapper) does its work; with hooks of others on one the forward is torchtitan's own. Experts with a bias, another
activation or another product (LoRA, FP8) are subclasses there, and are refused.
"""

import functools
import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from torchtitan.config import derive, override
from torchtitan.models.common import moe

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor


sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

from moe_mlp_experts import hooked, log_once


def _local(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if type(local).__module__.startswith("torchao."):
        # Wrappers of its low-precision training replace grouped_mm only; F.moe_mlp would run in bfloat16.
        raise NotImplementedError(
            f"fused_experts: weights must be plain tensors, got a {type(local).__name__} of torchao"
        )
    return local.flatten(1, -2).to(dtype)  # (E, 2, F, D): gates first


def _lending(kind: type, *names: str) -> type:
    """A subclass whose forward calls a given function with the weights that it holds."""

    class Lending(kind):
        @dataclass(kw_only=True, slots=True)
        class Config(kind.Config):
            pass

        def forward(self, x: torch.Tensor, then: torch.Tensor | Callable):
            if not callable(then):
                return super().forward(x, then)
            weights = (getattr(self, n) for n in names if hasattr(self, n))
            # As torchtitan's: experts compute in bfloat16 whatever comes in.
            return then(x, *(_local(p, torch.bfloat16) for p in weights))

    return Lending


GroupedExperts, GroupedLinear = getattr(moe, "GroupedExperts", None), None
RoutedExperts = moe.RoutedExperts
if GroupedExperts is not None:
    LentExperts = _lending(GroupedExperts, "w13_E2FD", "w1_EFD", "w2_EDF", "w3_EFD")
else:
    from torchtitan.models.common.linear import GroupedLinear

    LentLinear = _lending(GroupedLinear, "weight")


class FusedRoutedExperts(RoutedExperts):
    """RoutedExperts on F.moe_mlp; letters as there."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    switch = None

    def holders(self) -> tuple[torch.nn.Module, ...]:
        """The modules that hold the weights."""
        return (self.inner_experts,) if GroupedLinear is None else (self.w13, self.w2)

    def with_weights(self, x: torch.Tensor, run: Callable) -> torch.Tensor:
        """``run(x, w_in, w_out)``, with ``w_up`` if there are three, inside the modules that hold them."""
        if GroupedLinear is None:
            return self.inner_experts(x, run)
        return self.w13(
            x, lambda x, w_in: self.w2(x, lambda x, w_out: run(x, w_in, w_out))
        )

    def parallelize(self, parallel_dims) -> None:
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None and mesh.size() > 1:
            from torch.distributed._moe.all_to_all import TokenSwitchAllToAll

            num_experts = self.token_dispatcher.num_experts
            self.switch = TokenSwitchAllToAll(mesh.get_group(), num_experts)

    # Names of arguments, of which torchtitan has changed some, are those of its placements.
    @functools.wraps(RoutedExperts.forward)
    def forward(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        if any(hooked(module) for module in self.holders()):
            log_once("FusedRoutedExperts runs as torchtitan's: its experts have hooks")
            return super().forward(
                x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        # (B, L, D) in torchtitan 0.3.0
        x, scores, ids = (
            t.flatten(0, -2) for t in (x_TD, topk_scores_TK, topk_expert_ids_TK)
        )
        x, scores = x.bfloat16(), scores.float()
        if self.switch is None:

            def experts(x, w_in, w_out, w_up=None):
                return F.moe_mlp(x, ids, scores, w_in, w_out, w_up=w_up)

            return self.with_weights(x, experts).type_as(x_TD).view_as(x_TD)
        routing = self.switch.create_routing(ids, layout="flat")
        rows, row_scores, row_ids = self.switch.dispatch(routing, x, scores)
        slots = self.switch.num_slots(routing)

        def local_experts(rows, w_in, w_out, w_up=None):
            operands = (rows, row_ids, row_scores, w_in, w_out)
            return F.moe_mlp(*operands, num_rows=slots, w_up=w_up)

        y = self.with_weights(rows, local_experts)
        return self.switch.combine(routing, y).type_as(x_TD).view_as(x_TD)


@override(
    target=RoutedExperts.Config,
    description="F.moe_mlp and a deduplicating token switch",
)
def fused_routed_experts(config: RoutedExperts.Config) -> RoutedExperts.Config:
    if GroupedLinear is None:
        names, known, lending = ("inner_experts",), GroupedExperts, LentExperts
        owner = config.inner_experts
    else:
        names, known, lending = ("w13", "w2"), GroupedLinear, LentLinear
        owner = config
    kinds = [type(getattr(config, name)) for name in names]
    activation = getattr(owner, "activation_fn", None)
    after = getattr(config, "output_postprocess", None)
    dispatcher = type(config.token_dispatcher).__qualname__.removesuffix(".Config")
    before = getattr(config.token_dispatcher, "score_before_experts", False)
    plain = ("LocalTokenDispatcher", "AllToAllTokenDispatcher")
    if (
        any(kind is not known.Config for kind in kinds)
        or getattr(owner, "w13", None) is not None and owner.w13.num_linears != 2
        or activation is not None and "SwiGLU" not in type(activation).__qualname__.split(".")
        or not dispatcher.endswith(plain)
        or after is not None
        or before
    ):  # fmt: skip
        raise NotImplementedError(
            f"fused_routed_experts replaces torchtitan's {known.__name__} of SwiGLU with a local or "
            f"an all-to-all dispatcher, not {', '.join(kind.__qualname__ for kind in kinds)} with "
            f"{dispatcher}, activation {type(activation).__qualname__}, output_postprocess "
            f"{type(after).__qualname__} and score_before_experts={before}"
        )
    fused = derive(config, FusedRoutedExperts.Config)
    for name in names:
        setattr(fused, name, derive(getattr(config, name), lending.Config))
    return fused
