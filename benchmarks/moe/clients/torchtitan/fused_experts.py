"""F.moe_mlp and a token switch inside torchtitan, by its own override mechanism.

Nothing of torchtitan is edited; one entry of a training config activates it::

    config.override.imports.append("fused_experts.fused_routed_experts")

RoutedExperts keeps its parameters, their sharding, initialisation and checkpoints: w1 and w3 stay two
parameters and are read in place (F.moe_mlp's w_in and w_up). What changes is its forward, between
router and sum. Without expert parallelism that is one call; with it, each token goes once to every
rank that has one of its experts, with its ids and router weights.

The module that holds the weights is called for them, as torchtitan calls it, so that what is around it (FSDP2's gather, an
adapter's wrapper) does its work; with hooks of others on it the forward is torchtitan's own.
"""

import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor


sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

from moe_mlp_experts import hooked, log_once


def _local(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.to(dtype)


class LentExperts(GroupedExperts):
    """GroupedExperts that hand their weights to a function which they are called with."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x: torch.Tensor, then: torch.Tensor | Callable) -> torch.Tensor:
        if not callable(then):
            return super().forward(x, then)
        # As torchtitan's: experts compute in bfloat16 whatever comes in.
        weights = (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        return then(x, *(_local(p, torch.bfloat16) for p in weights))


class FusedRoutedExperts(RoutedExperts):
    """RoutedExperts on F.moe_mlp; letters as there."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    switch = None

    def parallelize(self, parallel_dims) -> None:
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None and mesh.size() > 1:
            from torch.distributed._moe.all_to_all import TokenSwitchAllToAll

            num_experts = self.token_dispatcher.num_experts
            self.switch = TokenSwitchAllToAll(mesh.get_group(), num_experts)

    def forward(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        if hooked(self.inner_experts):
            log_once("FusedRoutedExperts runs as torchtitan's: its experts have hooks")
            return super().forward(
                x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        x, scores = x_TD.bfloat16(), topk_scores_TK.float()
        if self.switch is None:

            def experts(x, w1, w2, w3):
                return F.moe_mlp(x, topk_expert_ids_TK, scores, w1, w2, w_up=w3)

            return self.inner_experts(x, experts).type_as(x_TD)
        routing = self.switch.create_routing(topk_expert_ids_TK, layout="flat")
        rows, scores, ids = self.switch.dispatch(routing, x, scores)
        slots = self.switch.num_slots(routing)

        def local_experts(rows, w1, w2, w3):
            return F.moe_mlp(rows, ids, scores, w1, w2, num_rows=slots, w_up=w3)

        y = self.inner_experts(rows, local_experts)
        return self.switch.combine(routing, y).type_as(x_TD)


@override(
    target=RoutedExperts.Config,
    description="F.moe_mlp and a deduplicating token switch",
)
def fused_routed_experts(config: RoutedExperts.Config) -> RoutedExperts.Config:
    experts = type(config.inner_experts)
    dispatcher = type(config.token_dispatcher).__qualname__.removesuffix(".Config")
    plain = ("LocalTokenDispatcher", "AllToAllTokenDispatcher")
    if experts is not GroupedExperts.Config or not dispatcher.endswith(plain):
        raise NotImplementedError(
            "fused_routed_experts replaces torchtitan's GroupedExperts with a local or an "
            f"all-to-all dispatcher, not {experts.__qualname__} with {dispatcher}"
        )
    fused = derive(config, FusedRoutedExperts.Config)
    fused.inner_experts = derive(config.inner_experts, LentExperts.Config)
    return fused
