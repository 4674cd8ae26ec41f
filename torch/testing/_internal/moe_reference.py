"""Reference of the Mixture-of-Experts ops as plain loops, and the tolerance of comparisons with it.

Every MoE kernel, fallback, compiled or exported program is compared with the functions of this
file, never only with another kernel. They favour clarity over speed.

Terms:
    T tokens, D model dim, F expert hidden dim, E experts, K experts per token, R routed rows,
    g = 2 for gated (GLU) activations and 1 otherwise. Slot ``s = t*K + k`` is the k-th choice of
    token t. A routed row is one slot at its place in expert-major order.

The MLP is one loop over experts, run at two precisions:
    ``*_reference``  every operand in float64: the truth.
    ``*_unfused``    the operands' own dtype, every intermediate rounded to it, as a model written
                     with ``mm`` computes it: the yardstick of the tolerance in :func:`check_close`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class MoePermutation(NamedTuple):
    """What ``_moe_permutation`` returns; all int32.

    Attributes:
        row_slots: (R,) slot of each routed row, -1 for padding.
        slot_rows: (T, K) routed row of each slot, -1 for no expert or no room.
        offs: (E,) end row of each expert, a multiple of the alignment unless clipped to R.
        counts: (E,) slots that choose each expert, before clipping.
    """

    row_slots: Tensor
    slot_rows: Tensor
    offs: Tensor
    counts: Tensor


class MoeMlpGrads(NamedTuple):
    """Gradients of ``_moe_mlp`` in ``output_mask`` order; None for an absent operand."""

    grad_input: Tensor | None
    grad_w_in: Tensor | None
    grad_w_out: Tensor | None
    grad_topk_weights: Tensor | None
    grad_b_in: Tensor | None
    grad_b_out: Tensor | None
    grad_w_up: Tensor | None


def _clamp_gate(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    if limit is None:
        return gate, up
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


def _swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    gate, up = _clamp_gate(gate, up, limit)
    return F.silu(gate) * up


def _geglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    gate, up = _clamp_gate(gate, up, limit)
    return F.gelu(gate) * up


def _swiglu_oai(
    gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 7.0
) -> Tensor:
    gate, up = _clamp_gate(gate, up, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


GATED_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "swiglu": _swiglu,
    "geglu": _geglu,
    "geglu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "reglu": lambda gate, up: F.relu(gate) * up,
    "swiglu_oai": _swiglu_oai,
}

PLAIN_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}

ACTIVATIONS: tuple[str, ...] = (*GATED_ACTIVATIONS, *PLAIN_ACTIVATIONS)


def default_num_rows(num_slots: int, num_experts: int, row_alignment: int = 1) -> int:
    """Enough rows for every slot under any routing: the default R of ``_moe_permutation``."""
    num_nonempty = min(num_experts, num_slots)
    return num_slots + num_nonempty * (row_alignment - 1)


def moe_permutation_reference(
    topk_indices: Tensor,
    num_experts: int,
    *,
    num_rows: int | None = None,
    row_alignment: int = 1,
) -> MoePermutation:
    """Stable expert-major order of the slots, one slot at a time.

    Args:
        topk_indices: (T, K) int32 or int64; -1 and ``num_experts`` mean "no expert".
        num_experts: E.
        num_rows: R; None for the bound that gives every slot a row.
        row_alignment: every expert starts at a multiple of this number.

    Raises:
        ValueError: an index outside [-1, num_experts].
    """
    expert_of_slot = topk_indices.reshape(-1).tolist()
    R = num_rows
    if R is None:
        R = default_num_rows(len(expert_of_slot), num_experts, row_alignment)
    slots_of_expert: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(expert_of_slot):
        if not -1 <= expert <= num_experts:
            raise ValueError(
                f"topk_indices must be in [-1, {num_experts}], got {expert} at slot {slot}"
            )
        if 0 <= expert < num_experts:
            slots_of_expert[expert].append(slot)

    row_slots = [-1] * R
    slot_rows = [-1] * len(expert_of_slot)
    offs = []
    start = 0
    for slots in slots_of_expert:
        for row, slot in enumerate(slots, start):
            if row < R:
                row_slots[row] = slot
                slot_rows[slot] = row
        start += math.ceil(len(slots) / row_alignment) * row_alignment
        offs.append(min(start, R))

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=topk_indices.device)

    return MoePermutation(
        row_slots=int32(row_slots),
        slot_rows=int32(slot_rows).view(topk_indices.shape),
        offs=int32(offs),
        counts=int32([len(slots) for slots in slots_of_expert]),
    )


def apply_activation(
    preact: Tensor,
    activation: str,
    *,
    gate_interleaved: bool = False,
    alpha: float | None = None,
    limit: float | None = None,
) -> Tensor:
    """Maps the (R, g*F) pre-activation to (R, F)."""
    if activation in PLAIN_ACTIVATIONS:
        return PLAIN_ACTIVATIONS[activation](preact)
    if gate_interleaved:
        gate, up = preact[:, 0::2], preact[:, 1::2]
    else:
        gate, up = preact.chunk(2, dim=1)
    given = {"alpha": alpha, "limit": limit}
    given = {name: value for name, value in given.items() if value is not None}
    return GATED_ACTIVATIONS[activation](gate, up, **given)


def _sum_of_halves(a: Tensor, b: Tensor) -> Tensor:
    # BLAS libraries may add thousands of products one after the other. With 16600 products the
    # largest error was 18 eps of the largest element, against 3 eps for the kernel under test.
    depth = a.shape[1]
    if depth <= 512:
        return a @ b
    half = depth // 2
    return _sum_of_halves(a[:, :half], b[:half]) + _sum_of_halves(a[:, half:], b[half:])


class _Product(torch.autograd.Function):
    """``a @ b``, and its gradients, with the error of short sums."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _sum_of_halves(a, b)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return _sum_of_halves(grad, b.mT), _sum_of_halves(a.mT, grad)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = _Product.apply(x, weight.mT)
    return y if bias is None else y + bias


def _linear_reversed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Sums in reverse order, which is as accurate as _linear but not bitwise equal. Otherwise the
    # yardstick for float64 operands would have an error of exactly zero.
    y = F.linear(x.flip(-1), weight.flip(-1))
    return y if bias is None else y + bias


def _moe_mlp_loop(
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    input: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    offs: Tensor,
    topk_weights: Tensor | None = None,
    row_slots: Tensor | None = None,
    slot_rows: Tensor | None = None,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    w_up: Tensor | None = None,
    **activation_kwargs,
) -> tuple[Tensor, Tensor]:
    """The loop over experts, in the dtype of the operands; differentiable.

    Args:
        linear: how a (rows, in) x (out, in) product is computed.
        input, w_in, w_out, offs, topk_weights, row_slots, slot_rows, b_in, b_out, w_up: as in
            ``_moe_mlp``.
        activation_kwargs: keyword arguments of :func:`apply_activation`.

    Returns:
        output (T, D) and preact (R, g*F).
    """
    top_k = 1 if slot_rows is None else slot_rows.shape[1]
    num_rows = input.shape[0] if row_slots is None else row_slots.shape[0]
    if row_slots is None:
        row_slots = torch.arange(num_rows, device=input.device)
    output = input.new_zeros(input.shape)
    matrices = (w_in,) if w_up is None else (w_in, w_up)
    preact = input.new_zeros(num_rows, len(matrices) * w_in.shape[1])
    start = 0
    for expert, end in enumerate(offs.tolist()):
        rows = torch.arange(start, end, device=input.device)
        start = end
        rows = rows[row_slots[rows] >= 0]
        slots = row_slots[rows].long()
        tokens = slots // top_k

        biases = [None] * len(matrices)
        if b_in is not None:
            biases = b_in[expert].chunk(len(matrices))
        h = torch.cat(
            [
                linear(input[tokens], w[expert], b)
                for w, b in zip(matrices, biases, strict=True)
            ],
            dim=1,
        )
        a = apply_activation(h, **activation_kwargs)
        o = linear(a, w_out[expert], None if b_out is None else b_out[expert])
        if topk_weights is not None:
            o = (o * topk_weights.reshape(-1)[slots, None]).to(o.dtype)
        output = output.index_add(0, tokens, o)
        preact = preact.index_copy(0, rows, h)
    return output, preact


def _double(x):
    """``x`` in float64 if it is a floating point tensor."""
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def moe_mlp_reference(
    *args, activation: str = "swiglu", **kwargs
) -> tuple[Tensor, Tensor]:
    """``_moe_mlp`` in float64.

    Args:
        args: the tensors of ``_moe_mlp`` in its order (None where absent).
        activation: a key of ACTIVATIONS.
        kwargs: ``gate_interleaved``, ``alpha``, ``limit``, and tensors by name.

    Returns:
        output (T, D) and preact (R, g*F), both float64.
    """
    args = tuple(map(_double, args))
    kwargs = {name: _double(value) for name, value in kwargs.items()}
    return _moe_mlp_loop(_linear, *args, activation=activation, **kwargs)


def moe_mlp_unfused(
    *args, activation: str = "swiglu", **kwargs
) -> tuple[Tensor, Tensor]:
    """``_moe_mlp`` in the dtype of input: gather, two matmuls per expert, activation, weighted sum."""
    return _moe_mlp_loop(_linear_reversed, *args, activation=activation, **kwargs)


def _backward(
    forward: Callable[..., tuple[Tensor, Tensor]], grad_out: Tensor, args, kwargs
) -> MoeMlpGrads:
    leaves = [
        x.detach().requires_grad_() if x is not None and x.is_floating_point() else x
        for x in args
    ]
    with torch.enable_grad():
        output, _ = forward(*leaves, **kwargs)
    order = (0, 1, 2, 4, 7, 8, 9)  # input, w_in, w_out, topk_weights, b_in, b_out, w_up
    operands = [leaves[i] if i < len(leaves) else None for i in order]
    grads = torch.autograd.grad(
        output,
        [x for x in operands if x is not None],
        grad_out.to(output.dtype),
        materialize_grads=True,
    )
    present = iter(grads)
    return MoeMlpGrads(*(None if x is None else next(present) for x in operands))


def moe_mlp_backward_reference(grad_out: Tensor, *args, **kwargs) -> MoeMlpGrads:
    """Gradients of :func:`moe_mlp_reference` in float64, for its ``args`` and ``kwargs``.

    Args:
        grad_out: (T, D) gradient of the output.
    """
    return _backward(moe_mlp_reference, grad_out, tuple(map(_double, args)), kwargs)


def moe_mlp_backward_unfused(grad_out: Tensor, *args, **kwargs) -> MoeMlpGrads:
    """Gradients of :func:`moe_mlp_unfused` in the operands' dtype."""
    return _backward(moe_mlp_unfused, grad_out, args, kwargs)


def moe_topk_reference(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    normalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int | None = None,
    top_groups: int | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """``F.moe_topk`` in float64, one token at a time; differentiable in ``logits``.

    Returns:
        topk_indices (*, k) int64 and topk_weights (*, k) float64.
    """
    E = logits.shape[-1]
    rows = logits.double().reshape(-1, E)
    indices, weights = [], []
    for row in rows:
        scores = row.softmax(0) if score == "softmax" else row.sigmoid()
        chosen = _select_experts(
            scores.tolist(),
            None if bias is None else bias.double().tolist(),
            k,
            num_groups,
            top_groups,
        )
        w = scores[chosen]
        if normalize:
            w = w / (w.sum() + 1e-20)
        indices.append(chosen)
        weights.append(w * scale)
    shape = (*logits.shape[:-1], k)
    topk_indices = torch.tensor(indices, dtype=torch.int64, device=logits.device)
    topk_weights = torch.stack(weights) if weights else rows[:, :k]
    return topk_indices.reshape(shape), topk_weights.reshape(shape)


def _select_experts(
    scores: list[float],
    bias: list[float] | None,
    k: int,
    num_groups: int | None,
    top_groups: int | None,
) -> list[int]:
    """The k experts with the highest (biased) scores in the chosen groups. The lower index wins ties."""
    biased = (
        scores if bias is None else [s + b for s, b in zip(scores, bias, strict=True)]
    )
    candidates = list(range(len(scores)))
    if num_groups is not None:
        size = len(scores) // num_groups
        groups = [candidates[i : i + size] for i in range(0, len(scores), size)]
        best = 1 if bias is None else 2

        def group_score(group: list[int]) -> float:
            return sum(sorted((biased[e] for e in group), reverse=True)[:best])

        groups = sorted(groups, key=group_score, reverse=True)[:top_groups]
        candidates = sorted(e for group in groups for e in group)
    return sorted(candidates, key=lambda e: biased[e], reverse=True)[:k]


# Forward and backward, in float64 and in the dtype of the operands.
REFERENCE = (moe_mlp_reference, moe_mlp_backward_reference)
UNFUSED = (moe_mlp_unfused, moe_mlp_backward_unfused)


def error_and_bound(
    actual: Tensor, reference: Tensor, unfused: Tensor, dtype: torch.dtype
) -> tuple[float, float]:
    """The largest error of ``actual``, and the largest allowed error.

    Args:
        actual: the result under test.
        reference: the float64 truth, same shape.
        unfused: the same-dtype yardstick, same shape.
        dtype: dtype of the expert operands, in which every intermediate is rounded.
    """
    if actual.shape != reference.shape:
        raise AssertionError(
            f"shape {tuple(actual.shape)} differs from the reference's {tuple(reference.shape)}"
        )
    if actual.numel() == 0:
        return 0.0, 0.0
    exact = reference.detach().cpu()
    errors = (actual.detach().cpu().double() - exact).abs()
    yardsticks = (unfused.detach().cpu().double() - exact).abs()
    eps = torch.finfo(dtype).eps

    def worst(start: int, ulps: int) -> tuple[float, float]:
        error, yardstick, size = (
            x.flatten(start).amax(-1).flatten()
            for x in (errors, yardsticks, exact.abs())
        )
        # What cancels almost to 0 has the error of its terms.
        bound = 2 * yardstick + ulps * eps * size.clamp_min(size.max() / 64)
        # 0 of 0 is right, and NaN is the worst.
        excess = torch.where(error == 0, 0, error / bound).nan_to_num(nan=torch.inf)
        at = excess.argmax()
        return error[at].item(), bound[at].item()

    error, bound = worst(0, 4)
    # Rows of few numbers, as the gradients of router weights, may be small by chance.
    if error <= bound and exact.dim() > 1 and exact[0].numel() >= 8:
        return worst(1, 16)
    return error, bound


def check_close(
    actual: Tensor,
    reference: Tensor,
    unfused: Tensor,
    dtype: torch.dtype,
    name: str = "result",
) -> None:
    """Checks the tolerance of every MoE test: at most twice the error of the unfused computation.

    ``max|actual - reference| <= 2*max|unfused - reference| + 4*eps(dtype)*max|reference|``

    It holds for the whole tensor, and with ``16*eps`` for each row of at least 8 numbers or, of three
    dimensions, each expert, down to 1/64 of the largest: what is small next to the rest is not lost
    in its tolerance.

    Raises:
        AssertionError: the error is larger (NaN never passes), or shapes differ.
    """
    error, bound = error_and_bound(actual, reference, unfused, dtype)
    if not error <= bound:
        raise AssertionError(
            f"{name}: error {error:.3e} against float64 exceeds the allowed {bound:.3e} ({dtype})"
        )


def check_gradients(
    actual: Sequence[Tensor],
    reference: MoeMlpGrads,
    unfused: MoeMlpGrads,
    dtype: torch.dtype,
    output_mask: Sequence[bool] = (True,) * 7,
) -> None:
    """:func:`check_close` of each gradient. A masked gradient, or one without an operand, must have shape (0,)."""
    everything = (MoeMlpGrads._fields, actual, reference, unfused, output_mask)
    for name, grad, ref, yardstick, wanted in zip(*everything, strict=True):
        if wanted and ref is not None:
            check_close(grad, ref, yardstick, dtype, name)
        elif grad.shape != (0,):
            raise AssertionError(f"{name}: must have shape (0,), got {grad.shape}")


def check_moe_mlp(
    results: Sequence[Tensor], args: Sequence[Any], **kwargs: Any
) -> None:
    """:func:`check_close` of what ``_moe_mlp(*args, **kwargs)`` gives.

    Args:
        results: the output, or output and pre-activations.
    """
    truth = moe_mlp_reference(*args, **kwargs)
    unfused = moe_mlp_unfused(*args, **kwargs)
    for name, *tensors in zip(("output", "preact"), results, truth, unfused):
        check_close(*tensors, args[0].dtype, name)


def check_moe_mlp_backward(
    grads: Sequence[Tensor],
    grad_out: Tensor,
    args: Sequence[Any],
    output_mask: Sequence[bool] = (True,) * 7,
    **kwargs: Any,
) -> None:
    """:func:`check_gradients` of ``_moe_mlp(*args, **kwargs)``."""
    truth = moe_mlp_backward_reference(grad_out, *args, **kwargs)
    unfused = moe_mlp_backward_unfused(grad_out, *args, **kwargs)
    check_gradients(grads, truth, unfused, grad_out.dtype, output_mask)
