"""A small decoder-only language model whose feed-forward layers are Mixtures of Experts."""

import dataclasses

from peers import MoEBlock

import torch
import torch.nn.functional as F
from torch import nn, Tensor

from demo.text import VOCAB_SIZE


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes. The MoE layers hold nearly all parameters and most of the time goes into them."""

    layers: int = 3
    d_model: int = 128
    heads: int = 4
    experts: int = 64
    top_k: int = 8
    expert_hidden: int = 64
    sequence: int = 128
    expert_dtype: torch.dtype = torch.bfloat16


class MoE(nn.Module):
    """Router, stacked expert weights, and the block that computes with them."""

    def __init__(self, config: ModelConfig, block: MoEBlock) -> None:
        super().__init__()
        E, D, hidden = config.experts, config.d_model, config.expert_hidden
        self.block = block
        self.top_k = config.top_k
        self.dtype = config.expert_dtype
        self.router = nn.Linear(D, E, bias=False)
        self.w_in = nn.Parameter(torch.randn(E, 2 * hidden, D) * D**-0.5)
        self.w_out = nn.Parameter(torch.randn(E, D, hidden) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.flatten(0, -2)
        routed = self.block.route(self.router(x_TD), self.top_k)
        # Mixed precision by hand: router and parameters stay float32.
        y_TD = self.run_experts(x_TD.to(self.dtype), *routed)
        return y_TD.to(x.dtype).view_as(x)

    def run_experts(self, x_TD, indices_TK, weights_TK) -> Tensor:
        experts = (p.to(self.dtype) for p in (self.w_in, self.w_out))
        return self.block.experts(x_TD, indices_TK, weights_TK, *experts)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # (B, S, 3*D) -> three of (B, heads, S, D/heads)
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, block: MoEBlock) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.d_model)
        self.moe = MoE(config, block)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))


class LanguageModel(nn.Module):
    """Bytes (B, S) int64 -> logits (B, S, 256) of the next byte."""

    def __init__(self, config: ModelConfig, block: MoEBlock) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, config.d_model)
        self.position = nn.Embedding(config.sequence, config.d_model)
        self.layers = nn.ModuleList(Layer(config, block) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, VOCAB_SIZE, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def loss(self, window: Tensor) -> Tensor:
        """Mean cross entropy in nats per byte of a (B, S + 1) window."""
        logits = self(window[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
