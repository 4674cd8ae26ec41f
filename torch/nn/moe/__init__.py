"""Companions of :func:`torch.nn.functional.moe_mlp` for training. Prototype: may change.

Everything here is a pure function of tensors: it works on any router's output, on
any device, and keeps no state between steps.
"""

from torch.nn.moe.routing import token_rounding, TokenRounding


__all__ = ["TokenRounding", "token_rounding"]
