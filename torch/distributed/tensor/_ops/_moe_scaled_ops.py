"""DTensor rules of the low-precision MoE ops: everything replicated.

Tensor parallelism over F, the rule of _moe_mlp, would cut blocks of scales at other elements than one
device does, and a rank would round by another scale: left out, operands are gathered. Experts
sharded along their ids are an error, as there.
"""

import torch
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops._moe_ops import _strategy
from torch.distributed.tensor._ops.utils import register_op_strategy


aten = torch.ops.aten

_STATIC_KWARGS = [
    "recipe_a", "recipe_w", "swizzle_w", "preact_dtype", "hp_wgrad", "activation",
    "gate_interleaved", "alpha", "limit", "compute_preact",
]  # fmt: skip


@register_op_strategy(
    aten._moe_quantize.default,
    schema_info=RuntimeSchemaInfo(1, ["dim", "dtype", "swizzle"]),
)
def moe_quantize_strategy(op_schema: OpSchema) -> OpStrategy:
    """Outputs: data, scale."""
    return _strategy(op_schema, 2, None)


@register_op_strategy(
    aten._moe_mlp_scaled.default,
    schema_info=RuntimeSchemaInfo(static_kwargkey=_STATIC_KWARGS),
)
def moe_mlp_scaled_strategy(op_schema: OpSchema) -> OpStrategy:
    """Outputs: output, input_data, input_scale, preact, preact_scale."""
    return _strategy(op_schema, 5, None)


@register_op_strategy(
    aten._moe_mlp_scaled_backward.default,
    schema_info=RuntimeSchemaInfo(18, _STATIC_KWARGS),
)
def moe_mlp_scaled_backward_strategy(op_schema: OpSchema) -> OpStrategy:
    """Outputs: the gradients, in the order of output_mask."""
    return _strategy(op_schema, 7, None)
