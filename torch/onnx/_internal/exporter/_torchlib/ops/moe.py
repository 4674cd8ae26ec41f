"""torch.ops.aten operators of Mixture-of-Experts layers, for inference.

A loop over experts multiplies the rows of each, so that the products are those of the routed rows
and nothing depends on how many tokens there are.
"""
# mypy: disable-error-code="misc,arg-type,type-arg,valid-type,assignment,return-value,type-var,operator,no-untyped-def,index"
# pyrefly: ignore-errors
# ruff: noqa: TC001

from __future__ import annotations

from onnxscript import INT32, INT64
from onnxscript.onnx_opset import (  # type: ignore[attr-defined]
    opset18 as op18,
    opset20 as op20,
)

import torch
from torch.onnx._internal._lazy_import import onnx_ir as ir
from torch.onnx._internal.exporter._torchlib._tensor_typing import TFloat, TInt
from torch.onnx._internal.exporter._torchlib._torchlib_registry import onnx_impl


aten = torch.ops.aten


@onnx_impl(aten._moe_mlp.default, private=True)
def _grouped_linear(rows: TFloat, weight: TFloat, ends: INT64) -> TFloat:
    """``(n, D)`` rows in expert order, ``(E, O, D)``, end rows ``(E)``: ``(n, O)``."""
    zero = op18.Constant(value_ints=[0])
    one = op18.Constant(value_ints=[1])
    all_starts = op18.Concat(zero, ends, axis=0)
    none = op18.Slice(rows, zero, zero, zero)
    first = op18.Squeeze(op18.Slice(weight, zero, one, zero), zero)
    products = op18.SequenceConstruct(
        op18.MatMul(none, op18.Transpose(first, perm=[1, 0]))
    )
    for expert in range(op18.Squeeze(op18.Shape(ends))):
        start = op18.Slice(
            all_starts, op18.Reshape(expert, one), op18.Reshape(expert + 1, one), zero
        )
        end = op18.Slice(
            all_starts,
            op18.Reshape(expert + 1, one),
            op18.Reshape(expert + 2, one),
            zero,
        )
        own = op18.Slice(rows, start, end, zero)
        matrix = op18.Transpose(op18.Gather(weight, expert, axis=0), perm=[1, 0])
        products = op18.SequenceInsert(products, op18.MatMul(own, matrix))
    return op18.ConcatFromSequence(products, axis=0)


def _compute_dtype(tensor: TFloat):
    """As the kernels: float64 in float64, everything else in float32."""
    is_double = tensor.dtype == ir.DataType.DOUBLE
    return ir.DataType.DOUBLE if is_double else ir.DataType.FLOAT


@onnx_impl(aten._moe_topk.default, trace_only=True)
def aten__moe_topk(
    logits: TFloat,
    k: int,
    bias: TFloat | None = None,
    score: str = "softmax",
    normalize: bool = True,
    num_groups: int | None = None,
    top_groups: int | None = None,
    scale: float = 1.0,
) -> tuple[INT64, TFloat]:
    """_moe_topk(Tensor logits, int k, Tensor? bias=None, *, str score="softmax", bool normalize=True, int? num_groups=None, int? top_groups=None, float scale=1.0) -> (Tensor topk_indices, Tensor topk_weights)"""
    dtype = _compute_dtype(logits)
    scores = op18.Cast(logits, to=dtype)
    if score == "softmax":
        scores = op18.Softmax(scores, axis=-1)
    else:
        # ONNX Runtime's Sigmoid is 0 below -18, where all experts would be equally good.
        one = op18.Cast(op18.Constant(value_float=1.0), to=dtype)
        scores = op18.Reciprocal(op18.Add(op18.Exp(op18.Neg(scores)), one))
    choice = scores
    if bias is not None:
        choice = op18.Add(scores, op18.Cast(bias, to=dtype))
    # TopK prefers the lower index of equal values, as _moe_topk does.
    if num_groups is not None:
        num_experts = logits.shape[-1]
        size = num_experts // num_groups
        grouped = op18.Reshape(choice, [0, num_groups, size], allowzero=0)
        best = min(2, size) if bias is not None else 1
        values, _ = op18.TopK(grouped, [best], axis=-1)
        _, groups = op18.TopK(op18.ReduceSum(values, [-1], keepdims=0), [top_groups])
        group_of_expert = op18.Constant(
            value_ints=[e // size for e in range(num_experts)]
        )
        chosen = op18.Equal(op18.Unsqueeze(groups, [-1]), group_of_expert)
        chosen = op18.ReduceMax(
            op18.Cast(chosen, to=ir.DataType.INT64), [1], keepdims=0
        )
        lowest = op18.Cast(op18.Constant(value_float=float("-inf")), to=dtype)
        choice = op18.Where(op18.Cast(chosen, to=ir.DataType.BOOL), choice, lowest)
    _, topk_indices = op18.TopK(choice, [k], axis=-1)
    topk_weights = op18.GatherElements(scores, topk_indices, axis=-1)
    if normalize:
        total = op18.ReduceSum(topk_weights, [-1])
        # Over total + 1e-20, with both times 2^66: the optimizer takes 1e-20 for zero.
        power = op18.Cast(op18.Constant(value_float=2.0**66), to=dtype)
        tiny = op18.Cast(op18.Constant(value_float=2.0**66 * 1e-20), to=dtype)
        total = op18.Add(op18.Mul(total, power), tiny)
        topk_weights = op18.Div(op18.Mul(topk_weights, power), total)
    if scale != 1.0:
        factor = op18.Cast(op18.Constant(value_float=scale), to=dtype)
        topk_weights = op18.Mul(topk_weights, factor)
    return topk_indices, topk_weights


@onnx_impl(aten._moe_permutation.default, trace_only=True)
def aten__moe_permutation(
    topk_indices: TInt,
    num_experts: int,
    num_rows: int | None = None,
    row_alignment: int = 1,
) -> tuple[INT32, INT32, INT32, INT32]:
    """_moe_permutation(Tensor topk_indices, SymInt num_experts, *, SymInt? num_rows=None, SymInt row_alignment=1) -> (Tensor row_slots, Tensor slot_rows, Tensor offs, Tensor counts)"""
    if num_rows is not None or row_alignment != 1:
        raise NotImplementedError(
            "_moe_permutation exports to ONNX without num_rows and row_alignment only, "
            f"got num_rows={num_rows} and row_alignment={row_alignment}"
        )
    ids = op18.Cast(op18.Reshape(topk_indices, [-1]), to=ir.DataType.INT64)
    none = op18.Constant(value_ints=[num_experts])
    ids = op18.Where(op18.Less(ids, op18.Constant(value_ints=[0])), none, ids)
    # Of equal values TopK takes the lower index first: a stable sort.
    ordered, row_slots = op18.TopK(ids, op18.Shape(ids), axis=0, largest=0, sorted=1)
    no_slot = op18.Constant(value_ints=[-1])
    rows = op18.Range(
        op18.Constant(value_int=0),
        op18.Squeeze(op18.Shape(ids)),
        op18.Constant(value_int=1),
    )
    slot_rows = op18.ScatterElements(rows, row_slots, rows, axis=0)
    slot_rows = op18.Where(op18.Equal(ids, none), no_slot, slot_rows)
    row_slots = op18.Where(op18.Equal(ordered, none), no_slot, row_slots)
    experts = op18.Constant(value_ints=list(range(num_experts)))
    asked = op18.Equal(op18.Unsqueeze(ids, [-1]), experts)
    counts = op18.ReduceSum(op18.Cast(asked, to=ir.DataType.INT64), [0], keepdims=0)
    offs = op18.CumSum(counts, op18.Constant(value_int=0))
    slot_rows = op18.Reshape(slot_rows, op18.Shape(topk_indices))
    return tuple(
        op18.Cast(each, to=ir.DataType.INT32)
        for each in (row_slots, slot_rows, offs, counts)
    )


def _activation(gate, up, activation: str, alpha, limit, dtype):
    """``up`` is None without a gate."""

    def constant(value: float):
        return op18.Cast(op18.Constant(value_float=value), to=dtype)

    if activation == "swiglu_oai":
        alpha = 1.702 if alpha is None else alpha
        limit = 7.0 if limit is None else limit
    if up is not None and limit is not None:
        gate = op18.Min(gate, constant(limit))
        up = op18.Max(op18.Min(up, constant(limit)), constant(-limit))
    if activation == "swiglu_oai":
        gate = op18.Mul(gate, op18.Sigmoid(op18.Mul(gate, constant(alpha))))
        return op18.Mul(gate, op18.Add(up, constant(1.0)))
    if activation in ("swiglu", "silu"):
        gate = op18.Mul(gate, op18.Sigmoid(gate))
    elif activation in ("geglu", "gelu"):
        gate = op20.Gelu(gate)
    elif activation == "geglu_tanh":
        gate = op20.Gelu(gate, approximate="tanh")
    elif activation in ("reglu", "relu", "relu2"):
        gate = op18.Relu(gate)
        if activation == "relu2":
            gate = op18.Mul(gate, gate)
    else:
        raise NotImplementedError(f"_moe_mlp: no ONNX form of activation {activation}")
    return gate if up is None else op18.Mul(gate, up)


@onnx_impl(aten._moe_mlp.default, trace_only=True, opset_introduced=20)
def aten__moe_mlp(
    input: TFloat,
    w_in: TFloat,
    w_out: TFloat,
    offs: INT32,
    topk_weights: TFloat | None = None,
    row_slots: INT32 | None = None,
    slot_rows: INT32 | None = None,
    b_in: TFloat | None = None,
    b_out: TFloat | None = None,
    w_up: TFloat | None = None,
    activation: str = "swiglu",
    gate_interleaved: bool = False,
    alpha: float | None = None,
    limit: float | None = None,
    compute_preact: bool = True,
) -> tuple[TFloat, TFloat]:
    """_moe_mlp(Tensor input, Tensor w_in, Tensor w_out, Tensor offs, Tensor? topk_weights=None, Tensor? row_slots=None, Tensor? slot_rows=None, Tensor? b_in=None, Tensor? b_out=None, Tensor? w_up=None, *, str activation="swiglu", bool gate_interleaved=False, float? alpha=None, float? limit=None, bool compute_preact=True) -> (Tensor output, Tensor preact)"""
    dtype = _compute_dtype(input)
    ends = op18.Cast(offs, to=ir.DataType.INT64)
    zero, last = op18.Constant(value_ints=[0]), op18.Constant(value_ints=[-1])
    end = op18.Slice(ends, last, op18.Constant(value_ints=[2**31]), zero)
    if row_slots is None:
        slots, x = None, op18.Slice(input, zero, end, zero)
        rows = op18.Shape(input, start=0, end=1)
    else:
        slots = op18.Cast(op18.Slice(row_slots, zero, end, zero), to=ir.DataType.INT64)
        rows = op18.Shape(row_slots)
        # A row without a slot, -1, reads the last token; no token reads the row.
        per_token = op18.Shape(slot_rows, start=1, end=2)
        negative = op18.Less(slots, zero)
        tokens = op18.Where(negative, last, op18.Div(slots, per_token))
        x = op18.Gather(input, tokens, axis=0)
    expert = None
    if b_in is not None or b_out is not None:
        places = op18.Range(
            op18.Constant(value_int=0), op18.Squeeze(end), op18.Constant(value_int=1)
        )
        before = op18.GreaterOrEqual(op18.Unsqueeze(places, [-1]), ends)
        before = op18.Cast(before, to=ir.DataType.INT64)
        expert = op18.ReduceSum(before, [-1], keepdims=0)

    hidden = op18.Cast(_grouped_linear(x, w_in, ends), to=dtype)
    if w_up is not None:
        up = op18.Cast(_grouped_linear(x, w_up, ends), to=dtype)
        hidden = op18.Concat(hidden, up, axis=-1)
    if b_in is not None:
        hidden = op18.Add(hidden, op18.Cast(op18.Gather(b_in, expert), to=dtype))
    if activation not in ("swiglu", "geglu", "geglu_tanh", "reglu", "swiglu_oai"):
        gate, up = hidden, None
    elif gate_interleaved:
        gate, up = (op18.Slice(hidden, [i], [2**31], [-1], [2]) for i in (0, 1))
    else:
        gate, up = op18.Split(hidden, axis=-1, num_outputs=2)
    inner = _activation(gate, up, activation, alpha, limit, dtype)
    inner = op18.CastLike(inner, input)
    output = op18.Cast(_grouped_linear(inner, w_out, ends), to=dtype)
    if b_out is not None:
        output = op18.Add(output, op18.Cast(op18.Gather(b_out, expert), to=dtype))
    if topk_weights is not None:
        weights = op18.Cast(op18.Reshape(topk_weights, [-1]), to=dtype)
        if slots is not None:
            weights = op18.Gather(weights, slots, axis=0)
        else:
            weights = op18.Slice(weights, zero, end, zero)
        output = op18.Mul(output, op18.Unsqueeze(weights, [-1]))
    output = op18.CastLike(output, input)

    def padded(values, to):
        """Zero rows below ``values`` up to ``to`` rows."""
        columns = op18.Shape(values, start=1, end=2)
        missing = op18.Sub(to, op18.Shape(values, start=0, end=1))
        shape = op18.Concat(missing, columns, axis=0)
        empty = op18.Expand(
            op18.CastLike(op18.Constant(value_float=0.0), values), shape
        )
        return op18.Concat(values, empty, axis=0)

    preact = padded(op18.CastLike(hidden, input), rows)
    if slot_rows is None:
        return padded(output, rows), preact
    # One zero row at the end, which is what -1 means in slot_rows.
    one_more = op18.Add(end, op18.Constant(value_ints=[1]))
    output = op18.Cast(padded(output, one_more), to=dtype)
    slot_rows = op18.Cast(slot_rows, to=ir.DataType.INT64)
    output = op18.ReduceSum(op18.Gather(output, slot_rows, axis=0), [1], keepdims=0)
    return op18.CastLike(output, input), preact
