"""Causal attention without FlexAttention, which torchtitan compiles: for both sides of train.py."""

from dataclasses import dataclass

from torchtitan.config import derive, override
from torchtitan.models.common.attention import FlexAttention

import torch
import torch.nn.functional as F


class CausalAttention(FlexAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q_TNH,
        k_TNH,
        v_TNH,
        *,
        attention_masks=None,
        scale=None,
        enable_gqa=False,
        **kwargs,
    ) -> torch.Tensor:
        q_NTH, k_NTH, v_NTH = (t.transpose(0, 1)[None] for t in (q_TNH, k_TNH, v_TNH))
        out = F.scaled_dot_product_attention(
            q_NTH, k_NTH, v_NTH, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        return out[0].transpose(0, 1)


@override(target=FlexAttention.Config, description="one causal window on a CPU")
def causal_attention(config: FlexAttention.Config) -> FlexAttention.Config:
    return derive(config, CausalAttention.Config)
