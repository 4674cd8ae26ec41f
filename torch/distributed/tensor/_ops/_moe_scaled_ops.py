"""DTensor rules of the low-precision MoE ops: everything replicated.

Tensor parallelism over F, the rule of _moe_mlp, would cut blocks of scales at other elements than one
device does, and a rank would round with another scale. So operands are gathered. Experts
sharded along E are an error, as in _moe_mlp.
"""

import torch
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops._moe_ops import _strategy
from torch.distributed.tensor._ops.utils import register_op_strategy


aten = torch.ops.aten

_STATIC_KWARGS = [
    "recipe_a", "recipe_w", "swizzle_w", "preact_dtype", "hp_wgrad", "activation",
    "gate_interleaved", "alpha", "limit", "compute_preact",
]  # fmt: skip


def _replicate(op, num_outputs: int, schema_info: RuntimeSchemaInfo) -> None:
    register_op_strategy(op, schema_info=schema_info)(
        lambda op_schema: _strategy(op_schema, num_outputs, None)
    )


_replicate(
    aten._moe_quantize.default, 2, RuntimeSchemaInfo(1, ["dim", "dtype", "swizzle"])
)
_replicate(
    aten._moe_mlp_scaled.default, 5, RuntimeSchemaInfo(static_kwargkey=_STATIC_KWARGS)
)
_replicate(
    aten._moe_mlp_scaled_backward.default, 7, RuntimeSchemaInfo(18, _STATIC_KWARGS)
)
