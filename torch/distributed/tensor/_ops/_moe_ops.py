"""DTensor sharding rules of the MoE ops.

There is one rule besides "everything replicated": tensor parallelism over F, the hidden
dimension of the experts.

    w_in, b_in, preact   sharded along g*F        output, grad_input,
    w_out                sharded along F          grad_topk_weights    partial sums
    b_out                partial, as its summand of the output must be added once

With g = 2 this is right only if a shard of w_in holds the gate and the up row of each of
its hidden units, that is when they are interleaved. Gates stored before ups would need
another layout than a shard, so the rule is left out.

What has no rule, because it would be wrong:

    rows, tokens         row_slots, slot_rows and offs hold positions in the whole tensor
    E                    expert ids are global; expert parallelism moves tokens instead
    D                    the activation is not linear in partial sums over D

Such operands are gathered first; ``ExplicitRedistributionContext`` shows where.
"""

import torch
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._op_schema import (
    ArgsType,
    KwargsType,
    RuntimeSchemaInfo,
)
from torch.distributed.tensor._ops.single_dim_strategy import (
    _ShardingPlaceholder,
    register_single_dim_strategy,
)
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate


aten = torch.ops.aten

_Rule = list[Placement | _ShardingPlaceholder | None]

_STATIC_KWARGS = ["activation", "gate_interleaved", "alpha", "limit", "compute_preact"]


@register_single_dim_strategy(
    aten._moe_permutation.default,
    schema_info=RuntimeSchemaInfo(1, ["num_rows", "row_alignment"]),
)
def moe_permutation_strategy(
    op: torch._ops.OpOverload, args_schema: ArgsType, kwargs_schema: KwargsType
) -> list[_Rule]:
    """No rule: where a slot goes depends on all slots before it."""
    return []


def _shards_of_hidden_units(
    w_in: object, w_out: object, kwargs_schema: KwargsType
) -> bool:
    """Whether an even shard of g*F holds the same hidden units as one of F."""
    if not isinstance(w_in, TensorMeta) or not isinstance(w_out, TensorMeta):
        raise AssertionError(f"Expected TensorMeta, got {type(w_in)}, {type(w_out)}")
    gated = w_in.shape[1] != w_out.shape[2]
    return not gated or bool(kwargs_schema.get("gate_interleaved", False))


def _tensor_placements(
    args_schema: ArgsType, placements: dict[int, Placement | _ShardingPlaceholder]
) -> _Rule:
    """One placement per tensor operand, Replicate unless listed by position."""
    return [
        placements.get(position, Replicate())
        for position, arg in enumerate(args_schema)
        if isinstance(arg, TensorMeta)
    ]


@register_single_dim_strategy(
    aten._moe_mlp.default, schema_info=RuntimeSchemaInfo(static_kwargkey=_STATIC_KWARGS)
)
def moe_mlp_strategy(
    op: torch._ops.OpOverload, args_schema: ArgsType, kwargs_schema: KwargsType
) -> list[_Rule]:
    """Positions: 1 w_in, 2 w_out, 7 b_in, 8 b_out."""
    if not _shards_of_hidden_units(args_schema[1], args_schema[2], kwargs_schema):
        return []
    operands: dict[int, Placement | _ShardingPlaceholder] = {
        1: _ShardingPlaceholder(1),
        2: _ShardingPlaceholder(2),
        7: _ShardingPlaceholder(1),
        8: Partial("sum"),
    }
    output, preact = Partial("sum"), _ShardingPlaceholder(1)
    return [[output, preact, *_tensor_placements(args_schema, operands)]]


@register_single_dim_strategy(
    aten._moe_mlp_backward.default,
    schema_info=RuntimeSchemaInfo(11, _STATIC_KWARGS),
)
def moe_mlp_backward_strategy(
    op: torch._ops.OpOverload, args_schema: ArgsType, kwargs_schema: KwargsType
) -> list[_Rule]:
    """Positions: 2 w_in, 3 w_out, 8 b_in, 9 b_out, 10 preact, 11 output_mask."""
    if not _shards_of_hidden_units(args_schema[2], args_schema[3], kwargs_schema):
        return []
    operands: dict[int, Placement | _ShardingPlaceholder] = {
        2: _ShardingPlaceholder(1),
        3: _ShardingPlaceholder(2),
        8: _ShardingPlaceholder(1),
        9: Partial("sum"),
        10: _ShardingPlaceholder(1),
    }
    gradients = (
        Partial("sum"),  # input
        _ShardingPlaceholder(1),  # w_in
        _ShardingPlaceholder(2),  # w_out
        Partial("sum"),  # topk_weights
        _ShardingPlaceholder(1),  # b_in
        Replicate(),  # b_out: a sum over rows of grad_out, the same on every rank
    )
    # A gradient that the mask leaves out is an empty tensor, which has no dimension
    # to shard.
    masked: _Rule = [
        gradient if wanted else Replicate()
        for gradient, wanted in zip(gradients, args_schema[11])
    ]
    return [[*masked, *_tensor_placements(args_schema, operands)]]
