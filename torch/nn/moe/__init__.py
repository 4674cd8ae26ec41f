"""Companions of :func:`torch.nn.functional.moe_mlp` for training. Prototype: may change.

Everything here is a pure function of tensors: it works on any router's output, on any
device, and keeps no state between steps.

    torch.nn.moe.routing    changes a routing for the hardware's sake
    torch.nn.moe.losses     what keeps the load of the experts balanced
"""
