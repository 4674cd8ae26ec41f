"""DTensor sharding rules of _moe_topk and its backward.

The router works on one token at a time, so tokens may be sharded. Experts may not: softmax
scores and the choice depend on all of them. Operands sharded along E are gathered.
"""

import torch
from torch.distributed.tensor._op_schema import (
    OpSchema,
    OpStrategy,
    RuntimeSchemaInfo,
)
from torch.distributed.tensor._ops._moe_ops import _strategy
from torch.distributed.tensor._ops.utils import register_op_strategy
from torch.distributed.tensor.placement_types import Shard


aten = torch.ops.aten


@register_op_strategy(
    aten._moe_topk.default,
    schema_info=RuntimeSchemaInfo(
        1, ["score", "normalize", "num_groups", "top_groups", "scale"]
    ),
)
def moe_topk_strategy(op_schema: OpSchema) -> OpStrategy:
    """Tokens may be sharded; the bias is replicated."""
    return _strategy(op_schema, 2, ((Shard(0), Shard(0)), {"logits": Shard(0)}))


@register_op_strategy(
    aten._moe_topk_backward.default,
    schema_info=RuntimeSchemaInfo(static_kwargkey=["score", "normalize", "scale"]),
)
def moe_topk_backward_strategy(op_schema: OpSchema) -> OpStrategy:
    """Tokens may be sharded."""
    tokens = ("grad_weights", "logits", "topk_indices")
    return _strategy(op_schema, 1, ((Shard(0),), dict.fromkeys(tokens, Shard(0))))
