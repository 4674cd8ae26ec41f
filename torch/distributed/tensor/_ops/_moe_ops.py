"""DTensor sharding rules of the MoE ops.

Besides "everything replicated" there is one rule: tensor parallelism over F, the hidden
dimension of the experts.

    w_in, b_in, preact   sharded along g*F        output, grad_input,
    w_out                sharded along F          grad_topk_weights    partial sums
    b_out                partial, as the output must add it only once

Gate and up as two weights, w_in and w_up, are sharded alike. preact is then a strided shard
with each half sharded separately. b_in would need the same, so with b_in all operands are
gathered. With gate and up in one weight, g = 2, a shard of w_in must hold
the gate and the up row of each of its hidden units. It does if they are interleaved and the
ranks share F evenly; otherwise w_in is cut at other hidden units than w_out, and gates stored before
ups would need another layout than a shard. Then there is no rule, and the operands are gathered.

There is no rule where it would be wrong:

    rows, tokens         row_slots, slot_rows and offs hold positions in the whole tensor
    E                    expert ids are global; expert parallelism moves tokens instead
    D                    the activation is not linear in partial sums over D

Operands sharded along rows, tokens or D are gathered first, which is correct: they are small, but
every rank then computes all tokens. ``ExplicitRedistributionContext`` shows where. Experts sharded
along E are an error: they are sharded because they are large, and a silent gather would use the
memory that this saves.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast, TypeAlias

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import (
    OpSchema,
    OpStrategy,
    PlacementList,
    RuntimeSchemaInfo,
)
from torch.distributed.tensor._ops.utils import (
    expand_to_full_mesh_op_strategy,
    is_tensor_evenly_shardable,
    register_op_strategy,
)
from torch.distributed.tensor.placement_types import (
    _StridedShard,
    Partial,
    Placement,
    Replicate,
    Shard,
)
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_true


aten = torch.ops.aten

# Placements of the outputs, and those of the tensor operands that are not Replicate.
_Rule: TypeAlias = tuple[Sequence[Placement], dict[str, Placement]]

_STATIC_KWARGS = ["activation", "gate_interleaved", "alpha", "limit", "compute_preact"]
# Operands whose dimension 0 counts experts.
_PER_EXPERT = ("w_in", "w_out", "offs", "b_in", "b_out", "w_up")


def _operands(op_schema: OpSchema) -> dict[str, object]:
    """The arguments by name, positional and keyword ones."""
    names = [argument.name for argument in op_schema.op._schema.arguments]
    return {**dict(zip(names, op_schema.args_schema)), **op_schema.kwargs_schema}


def _is_sharded_by_expert(spec: DTensorSpec) -> bool:
    shards = (p for p in spec.placements if isinstance(p, (Shard, _StridedShard)))
    return any(placement.dim == 0 for placement in shards)


def _check_no_expert_is_elsewhere(
    op: torch._ops.OpOverload, operands: dict[str, object]
) -> None:
    """Raises NotImplementedError where an operand comes sharded along its experts."""
    for name in _PER_EXPERT:
        operand = operands.get(name)
        if not isinstance(operand, OpStrategy):
            continue
        # One strategy per operand, unless the query is for all placements at once.
        specs = [strategy.output_spec for strategy in operand.strategies]
        if all(_is_sharded_by_expert(spec) for spec in specs):
            raise NotImplementedError(
                f"{op}: {name} has placements {specs[0].placements}, and dimension 0 of "
                f"{name} counts experts. Allowed are Replicate, and shards of the hidden "
                "dimension of the experts: the ids in topk_indices are global, so a rank "
                "with some of the experts would need the tokens that ask for them. Move "
                "tokens to their experts and call the op on local tensors, or "
                "redistribute the experts to Replicate first."
            )


def _is_even(
    operand: int,
    inputs: list[DTensorSpec],
    outputs: DTensorSpec | tuple[DTensorSpec | None, ...],
) -> bool:
    """Whether all ranks get equally much of the operand; for full_mesh_strategy_filter."""
    spec = inputs[operand]
    if free_unbacked_symbols(spec.shape):
        return not spec.is_sharded()
    return is_tensor_evenly_shardable(spec.shape, spec)


def _strategy(
    op_schema: OpSchema,
    num_outputs: int,
    rule: _Rule | None,
    *,
    even: str | None = None,
) -> OpStrategy:
    """Everything replicated, or ``rule``.

    A data-dependent size is sharded only if it is known to reach all ranks: torch._check(T >= n).

    Args:
        num_outputs: of the op.
        rule: placements that may be sharded.
        even: the operand that must be sharded evenly.
    """
    operands = _operands(op_schema)
    _check_no_expert_is_elsewhere(op_schema.op, operands)
    tensors = [n for n, operand in operands.items() if isinstance(operand, OpStrategy)]
    rules: list[PlacementList] = [[Replicate()] * (num_outputs + len(tensors))]
    if rule is not None:
        outputs, placements = rule
        rules.append([*outputs, *(placements.get(n, Replicate()) for n in tensors)])
    return expand_to_full_mesh_op_strategy(
        op_schema.get_mesh_from_args(),
        op_schema,
        rules,
        input_index=num_outputs,
        allow_unbacked_sharding=False,
        full_mesh_strategy_filter=partial(_is_even, tensors.index(even))
        if even is not None
        else None,
    )


@register_op_strategy(
    aten._moe_permutation.default,
    schema_info=RuntimeSchemaInfo(1, ["num_rows", "row_alignment"]),
)
def moe_permutation_strategy(op_schema: OpSchema) -> OpStrategy:
    """No rule: the row of a slot depends on all slots before it."""
    return _strategy(op_schema, 4, None)


_TENSOR_PARALLEL: dict[str, Placement] = {
    "w_in": Shard(1),
    "w_out": Shard(2),
    "w_up": Shard(1),
    "b_in": Shard(1),
    "b_out": Partial("sum"),
}


def _preact_placement(operands: dict[str, object]) -> Placement:
    """With w_up, each half of the columns, gates and ups, is sharded separately."""
    if operands.get("w_up") is not None:
        return _StridedShard(1, split_factor=2)
    return Shard(1)


def _is_gated(operands: dict[str, object]) -> bool:
    w_in, w_out = operands["w_in"], operands["w_out"]
    if not isinstance(w_in, OpStrategy) or not isinstance(w_out, OpStrategy):
        raise AssertionError(f"Expected OpStrategy, got {type(w_in)}, {type(w_out)}")
    # For data-dependent sizes only the rule without a shard is right for both.
    return guard_or_true(w_in.shape[1] != w_out.shape[2])


def _mlp_strategy(op_schema: OpSchema, num_outputs: int, rule: _Rule) -> OpStrategy:
    """``rule`` where a shard of g*F holds the same hidden units as one of F."""
    operands = _operands(op_schema)
    if operands.get("w_up") is not None:
        if operands.get("b_in") is not None:
            return _strategy(op_schema, num_outputs, None)
        return _strategy(op_schema, num_outputs, rule, even="w_out")
    if not _is_gated(operands):
        return _strategy(op_schema, num_outputs, rule)
    if not operands.get("gate_interleaved", False):
        return _strategy(op_schema, num_outputs, None)
    return _strategy(op_schema, num_outputs, rule, even="w_out")


@register_op_strategy(
    aten._moe_mlp.default, schema_info=RuntimeSchemaInfo(static_kwargkey=_STATIC_KWARGS)
)
def moe_mlp_strategy(op_schema: OpSchema) -> OpStrategy:
    """Outputs: output, preact."""
    preact = _preact_placement(_operands(op_schema))
    return _mlp_strategy(op_schema, 2, ((Partial("sum"), preact), _TENSOR_PARALLEL))


@register_op_strategy(
    aten._moe_mlp_backward.default,
    schema_info=RuntimeSchemaInfo(12, _STATIC_KWARGS),
)
def moe_mlp_backward_strategy(op_schema: OpSchema) -> OpStrategy:
    """Outputs: the seven gradients in the order of output_mask."""
    operands = _operands(op_schema)
    gradients = {
        "input": Partial("sum"),
        "w_in": Shard(1),
        "w_out": Shard(2),
        "topk_weights": Partial("sum"),
        "b_in": Shard(1),
        # A sum over rows of grad_out, the same on every rank.
        "b_out": Replicate(),
        "w_up": Shard(1),
    }
    # A masked gradient, or one without an operand, is an empty tensor without a
    # dimension to shard.
    mask = cast("Sequence[bool]", operands["output_mask"])
    outputs = [
        gradient
        if wanted and isinstance(operands.get(name), OpStrategy)
        else Replicate()
        for (name, gradient), wanted in zip(gradients.items(), mask, strict=True)
    ]
    placements = {**_TENSOR_PARALLEL, "preact": _preact_placement(operands)}
    return _mlp_strategy(op_schema, 7, (outputs, placements))
