# Owner(s): ["module: inductor"]
"""Blocks of experts in the styles of code in use, as moe_fusion takes or leaves them.

Every form says what becomes of it: ``full`` (gather, experts and combine), ``core`` (the experts
only) or ``none``; its results are compared with the same code in float64.
"""

import copy
from unittest import mock

from moe_fusion_problem import (
    added,
    backend,
    by_slot,
    D,
    E,
    FormTest,
    gated,
    in_order,
    K,
    make_inputs,
    mlp,
    product,
    registered_in,
    T,
    Weights,
)

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.utils.checkpoint import checkpoint


FORMS = {}
form = registered_in(FORMS)


# --- where rows come from, and where they go ---


@form("full")
def number_of_slots_as_symbol_and_constant(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    return added(x, mlp(m, x[perm // ids.shape[1]], offs), perm, weights)


@form("full")
def tokens_repeated(m, x, ids, weights):
    token = torch.arange(ids.shape[0]).repeat_interleave(ids.shape[1])
    order = torch.argsort(ids.flatten())
    token, scores = token.index_select(0, order), weights.flatten()[order]
    counts = torch.bincount(ids.flatten(), minlength=E)
    rows = mlp(m, x.index_select(0, token), counts.cumsum(0, dtype=torch.int32))
    y = torch.zeros(
        x.shape, dtype=torch.float64 if x.dtype.itemsize == 8 else torch.float32
    )
    y.index_add_(0, token, (rows * scores[:, None]).to(y.dtype))
    return y.to(x.dtype)


@form("full")
def tokens_expanded(m, x, ids, weights):
    n, k = ids.shape
    token = torch.arange(n).unsqueeze(1).expand(-1, k).reshape(-1)
    _, perm, offs = in_order(ids)
    rows = mlp(m, x[token[perm]], offs) * weights.flatten()[perm].unsqueeze(-1)
    return torch.zeros_like(x).index_add_(0, token[perm], rows)


@form("core")
def tokens_expanded_the_other_way(m, x, ids, weights):
    token = torch.arange(x.shape[0]).unsqueeze(0).expand(K, -1).reshape(-1)
    _, perm, offs = in_order(ids)
    return torch.zeros_like(x).index_add(0, token[perm], mlp(m, x[token[perm]], offs))


@form("full")
def weights_as_column_in_order(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    rows = mlp(m, x[perm // K], offs) * weights.view(-1, 1)[perm]
    return by_slot(rows, perm).view(-1, K, D).sum(1)


@form("full")
def weights_as_column_of_slots(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    rows = by_slot(mlp(m, x[perm // K], offs), perm) * weights.view(-1, 1)
    return rows.view(-1, K, D).sum(1)


@form("full")
def weights_as_columns_of_slots(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    rows = by_slot(mlp(m, x[perm // K], offs), perm).view(-1, K, D)
    return (rows * weights[:, :, None]).sum(1)


@form("core")
def weights_as_rows_of_slots(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    rows = by_slot(mlp(m, x[perm // K], offs), perm).view(-1, K, D)
    return (rows * x[:, None, :]).sum(1)


@form("full")
def combined_by_einsum(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    rows = by_slot(mlp(m, x[perm // K], offs), perm).view(-1, K, D)
    return torch.einsum("tk, tkd -> td", weights, rows)


@form("full")
def batched_over_expanded_tokens(m, x, ids, weights):
    rows = x.unsqueeze(1).expand(-1, K, -1).reshape(-1, D)
    h = torch.bmm(m.w_in[ids.view(-1)], rows.unsqueeze(-1)).squeeze(-1)
    rows = torch.bmm(m.w_out[ids.view(-1)], gated(h).unsqueeze(-1)).squeeze(-1)
    return (rows.view(-1, K, D) * weights.unsqueeze(-1)).sum(1)


@form("full")
def batched_with_transposed_selection(m, x, ids, weights):
    rows, ids = x.repeat_interleave(K, 0), ids.view(-1)
    h = torch.bmm(rows.unsqueeze(1), m.w_in[ids].transpose(1, 2)).squeeze(1)
    rows = torch.bmm(gated(h).unsqueeze(1), m.w_out[ids].transpose(1, 2)).squeeze(1)
    return (rows.view(-1, K, D) * weights.unsqueeze(-1)).sum(1)


@form("full")
def biases_added_in_place(m, x, ids, weights):
    sorted_ids, perm, offs = in_order(ids)
    h = product(x[perm // K], m.w_in, offs)
    h += m.b_in[sorted_ids]
    rows = product(gated(h), m.w_out, offs).add_(m.b_out[sorted_ids])
    return added(x, rows, perm, weights)


INDICES = {
    "none": lambda token: token[:, None].expand(-1, D),
    "ellipsis": lambda token: token[..., None].expand(token.shape[0], D),
    "repeat": lambda token: token.unsqueeze(1).repeat(1, D),
    "repeat_of_view": lambda token: token.view(-1, 1).repeat((1, D)),
}
NEAR_INDICES = {
    "of_other_rows": lambda token: token.flip(0)[:, None].repeat(1, D),
    "of_next_token": lambda token: ((token + 1) % T)[:, None].expand(-1, D),
    "of_columns": lambda token: token[None, :D].expand(token.shape[0], -1),
    "of_first_row": lambda token: token[:1][:, None].repeat(token.shape[0], D),
    "of_rows_repeated": lambda token: token[:T][:, None].repeat(K, D),
    "written": lambda token: written(token[:, None].repeat(1, D)),
    "seen_while_written": lambda token: written(token[:, None]).expand(-1, D),
}


def indexed(name, add):
    def fn(m, x, ids, weights):
        _, perm, offs = in_order(ids)
        token = perm // K
        index = {**INDICES, **NEAR_INDICES}[name](token)
        rows = x[token] if add else x.gather(0, index)
        rows = mlp(m, rows, offs) * weights.flatten()[perm][:, None]
        zeros = torch.zeros_like(x)
        return (
            zeros.scatter_add(0, index, rows)
            if add
            else zeros.index_add(0, token, rows)
        )

    return fn


@form("core")
def one_token_for_all_rows(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    perm = ids[0, :1].argsort()
    index = (perm // K).view(-1, 1).expand(ids.numel(), D)
    return torch.zeros_like(x).scatter_add(0, index, mlp(m, x.gather(0, index), offs))


def batched(token, m, x, ids, weights):
    rows, ids = x[token], ids.flatten()
    rows = selected(gated(selected(rows, m.w_in, ids)), m.w_out, ids)
    return (rows.view(-1, K, D) * weights.unsqueeze(-1)).sum(1)


@form("full")
def batched_over_tokens_of_slots(m, x, *slots):  # transformers 5
    token = torch.arange(x.shape[0]).unsqueeze(1).expand(-1, K).reshape(-1)
    return batched(token, m, x, *slots)


@form("full")
def batched_over_tokens_repeated(m, x, *slots):
    return batched(torch.arange(x.shape[0]).repeat_interleave(K), m, x, *slots)


@form("none")
def batched_over_tokens_the_other_way(m, x, *slots):
    token = torch.arange(x.shape[0]).unsqueeze(0).expand(K, -1).reshape(-1)
    return batched(token, m, x, *slots)


@form("none")
def batched_over_tokens_from_the_end(m, x, *slots):
    token = torch.arange(0, -x.shape[0], step=-1).repeat_interleave(K)
    return batched(token, m, x, *slots)


@form("none")
def batched_over_tokens_of_another_k(m, x, *slots):
    token = torch.arange(T * K)[:, None].expand(-1, 1).reshape(-1)
    return batched(token, m, x.repeat(K, 1), *slots)


@form("none")
def batched_over_some_tokens(m, x, *slots):
    token = torch.arange(T).repeat_interleave(K)
    return batched(token, m, torch.cat([x, x]), *slots)


@form("none")
def batched_over_tokens_that_are_written(m, x, *slots):
    token = written(torch.arange(x.shape[0]).repeat_interleave(K))
    return batched(token, m, x, *slots)


# --- what counts the rows of an expert, with biases, which are by expert id ---


def with_biases(m, x, ids, weights, counts, sorted_ids, perm):
    offs = counts if counts.dtype == torch.int32 else counts.cumsum(0).int()
    h = product(x[perm // K], m.w_in, offs) + m.b_in[sorted_ids]
    rows = product(gated(h), m.w_out, offs) + m.b_out[sorted_ids]
    return added(x, rows, perm, weights)


COUNTS = {
    "bincount": lambda ids, _: torch.bincount(ids.flatten(), minlength=E),
    "bincount_method": lambda _, ids: ids.bincount(minlength=E),
    "one_hot": lambda ids, _: F.one_hot(ids.reshape(-1), E).sum(0),
    "one_hot_of_slots": lambda ids, _: F.one_hot(ids, num_classes=E).sum((0, 1)),
    "one_hot_twice": lambda ids, _: F.one_hot(ids, E).float().sum(1).sum(0),
    "scatter_add": lambda ids, _: torch.zeros(E, dtype=torch.long).scatter_add(
        0, ids.flatten(), torch.ones_like(ids.flatten())
    ),
    "scatter_add_": lambda ids, _: ids.new_zeros(E).scatter_add_(
        0, ids.view(-1), ids.new_ones(ids.numel())
    ),
    "index_add": lambda _, ids: torch.zeros(E).index_add(
        0, ids, torch.ones(ids.shape[0])
    ),
    "equal": lambda ids, _: (ids.flatten()[:, None] == torch.arange(E)).sum(0),
    "equal_of_slots": lambda ids, _: (ids.unsqueeze(-1) == torch.arange(E)).sum((0, 1)),
    "equal_to_column": lambda ids, _: (
        torch.arange(E)[:, None] == ids.flatten()[None]
    ).sum(1),
    "searched": lambda _, ids: torch.searchsorted(
        ids, torch.arange(E), right=True, out_int32=True
    ),
    "searched_ends": lambda _, ids: torch.searchsorted(
        ids, torch.arange(1, E + 1)
    ).int(),
    "histc": lambda ids, _: torch.histc(ids.float(), E, 0, E - 1),
}


def written(tensor, number=0, end=9):
    tensor[:end] = number
    return tensor


def sums_at(ids, base, added):
    return base.scatter_add(0, ids.flatten(), added)


# Counts of other ids, or of the same ones in another sense.
NEAR_COUNTS = {
    "one_hot_of_more": lambda ids, _: F.one_hot(ids.flatten(), E + 1).sum(0)[:E],
    "one_hot_flipped": lambda ids, _: F.one_hot(E - 1 - ids.flatten(), E).sum(0),
    "scatter_of_ids": lambda ids, _: ids.new_zeros(E).scatter_add(
        0, ids.view(-1), ids.view(-1).clamp(1, 1)
    ),
    "scatter_on_ones": lambda ids, _: ids.new_ones(E).scatter_add(
        0, ids.view(-1), torch.ones_like(ids.view(-1))
    ) - 1,
    "equal_to_others": lambda ids, _: (ids.flatten()[:, None] == torch.arange(E).flip(0)).sum(0).flip(0),
    "scatter_once": lambda ids, _: torch.zeros(T, E).scatter(1, ids, 1).sum(0) + 0 * ids.sum(),
    "searched_left": lambda _, ids: torch.searchsorted(ids, torch.arange(E) + 1).int(),
    "weighted": lambda ids, _: torch.bincount(
        ids.flatten(), torch.ones(ids.numel()), minlength=E
    ),
    "half": lambda ids, _: F.one_hot(ids.flatten(), E).half().sum(0).float(),
    "full_written": lambda ids, _: sums_at(ids, ids.new_zeros(E), written(torch.full((ids.numel(),), 1))),
    "ones_written_then_cast": lambda ids, _: sums_at(ids, ids.new_zeros(E), written(torch.ones(ids.numel())).long()),
    "ones_cast_then_written": lambda ids, _: sums_at(ids, ids.new_zeros(E), written(torch.ones(ids.numel()).long())),
    "zeros_written_then_cast": lambda ids, _: sums_at(ids, written(torch.zeros(E), -1, 1).long(), torch.ones_like(ids.flatten())),
    "partial_sum_written": lambda ids, _: written(F.one_hot(ids, E).sum(1)).sum(0),
}  # fmt: skip


def counted(name):
    def fn(m, x, ids, weights):
        sorted_ids, perm = ids.flatten().sort(stable=True)
        counts = {**COUNTS, **NEAR_COUNTS}[name](ids, sorted_ids)
        return with_biases(m, x, ids, weights, counts, sorted_ids, perm)

    return fn


@form("full")
def combined_by_scatter_reduce(m, x, ids, weights, reduce="sum"):
    _, perm, offs = in_order(ids)
    rows = mlp(m, x[perm // K], offs) * weights.flatten()[perm].unsqueeze(-1)
    index = (perm // K).unsqueeze(-1).expand(-1, D)
    return torch.zeros_like(x).scatter_reduce(0, index, rows, reduce=reduce)


@form("core")
def largest_by_scatter_reduce(m, x, ids, weights):
    return combined_by_scatter_reduce(m, x, ids, weights, reduce="amax")


@form("none")
def loop_over_modules(m, x, ids, weights):
    y = torch.zeros_like(x)
    for e in range(E):
        scores = (weights * (ids == e)).sum(1, keepdim=True)
        every = torch.arange(x.shape[0])
        rows = x[every]
        h = F.silu(F.linear(rows, m.w_gate[e])) * F.linear(rows, m.w_up[e])
        y = y.index_add(0, every, F.linear(h, m.w_out[e]) * scores)
    return y


@form("none")
def gshard_einsum(m, x, ids, weights):
    chosen = F.one_hot(ids, E)  # (T, K, E)
    slot = (chosen.sum(1).cumsum(0) - 1).clamp(0, T - 1)
    place = F.one_hot(slot, T).to(x.dtype)  # (T, E, C)
    combine = torch.einsum("tk,tke,tec->tec", weights, chosen.to(x.dtype), place)
    batches = torch.einsum("tec,td->ecd", (combine > 0).to(x.dtype), x)
    h = gated(torch.einsum("ecd,efd->ecf", batches, m.w_in))
    return torch.einsum(
        "tec,ecd->td", combine, torch.einsum("ecf,edf->ecd", h, m.w_out)
    )


@form("core")
def residual_of_rows(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    rows = x[perm // K]
    return added(x, mlp(m, rows, offs) + rows, perm, weights)


@form("full")
def routing_without_grad(m, x, ids, weights):
    with torch.no_grad():
        sorted_ids, perm, _ = in_order(ids)
    rows = x[perm // K]
    with torch.no_grad():
        offs = torch.histc(sorted_ids.float(), E, 0, E - 1).cumsum(0).int()
    return added(x, mlp(m, rows, offs), perm, weights)


@form("full")
def recomputed(m, x, ids, weights):
    block = number_of_slots_as_symbol_and_constant
    return checkpoint(block, m, x, ids, weights, use_reentrant=False)


# --- results that a rewrite would change ---


@form("none")
def bias_times_alpha(m, x, ids, weights):
    sorted_ids, perm, offs = in_order(ids)
    h = product(x[perm // K], m.w_in, offs)
    h.add_(m.b_in[sorted_ids], alpha=0.25)
    return added(x, product(gated(h), m.w_out, offs), perm, weights)


@form("none", training=False)
def hidden_rounded_to_fp8(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    h = product(x[perm // K], m.w_in, offs).to(torch.float8_e5m2).to(x.dtype)
    return added(x, product(gated(h), m.w_out, offs), perm, weights)


@form("core", training=False)
def rows_and_result_rounded_to_fp8(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    rows = x[perm // K].to(torch.float8_e4m3fn).to(x.dtype)
    rows = mlp(m, rows, offs).to(torch.float8_e5m2).to(x.dtype)
    return added(x, rows, perm, weights)


@form("core")
def one_number_for_all_rows(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    rows = by_slot(mlp(m, x[perm // K], offs), perm) * weights.sum().view(1, 1)
    return rows.view(-1, K, D).sum(1)


@form("core", training=False)  # whose gradient scatter_add does not have
def half_of_the_columns_added(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    index = (perm // K).view(-1, 1).expand(-1, D // 2)
    return torch.zeros_like(x).scatter_add(0, index, mlp(m, x[perm // K], offs))


@form("core")
def half_of_the_columns_gathered(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    rows = torch.cat([x, x + 1], 1).gather(0, (perm // K).view(-1, 1).expand(-1, D))
    return added(x, mlp(m, rows, offs), perm, weights)


@form("core")
def added_to_more_columns(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    index = (perm // K).view(-1, 1).expand(-1, D)
    wide = torch.zeros(x.shape[0], D + 8, dtype=x.dtype)
    return wide.scatter_add(0, index, mlp(m, x[perm // K], offs))


@form("core")
def order_that_is_multiplied_into_zeros(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    inverse = torch.zeros_like(perm)
    inverse.scatter_(0, perm, torch.arange(perm.shape[0]), reduce="multiply")
    return mlp(m, x[perm // K], offs)[inverse].view(-1, K, D).sum(1)


@form("none")
def gate_without_grad(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    rows = x[perm // K]
    with torch.no_grad():
        gate = product(rows, m.w_gate, offs)
    up = product(rows, m.w_up, offs)
    return added(x, product(F.silu(gate) * up, m.w_out, offs), perm, weights)


@form("core")
def combined_under_autocast(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    rows = mlp(m, x[perm // K], offs)
    with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype.itemsize < 8):
        rows = by_slot(rows, perm).view(-1, K, D)
        return (weights.unsqueeze(1) @ rows).squeeze(1).to(x.dtype)


@form("none")
def written_negative_limit(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    gate, up = product(x[perm // K], m.w_in, offs).chunk(2, -1)
    rows = F.silu(gate.clamp(max=-1.0)) * up.clamp(min=1.0, max=-1.0)
    return added(x, product(rows, m.w_out, offs), perm, weights)


@form("none")
def all_experts_for_all_tokens(m, x, ids, weights):
    scores = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids, weights).t()
    rows = (x.repeat(E, 1) * scores.reshape(-1, 1)).view(E, -1, D)
    h = gated(torch.bmm(rows, m.w_in.transpose(1, 2)))
    return torch.bmm(h, m.w_out.transpose(1, 2)).sum(0)


@form("none")
def selected_weights_by_einsum(m, x, ids, weights):
    h = gated(torch.einsum("td,tkfd->tkf", x, m.w_in[ids]))
    rows = torch.einsum("tkf,tkdf->tkd", h, m.w_out[ids])
    return torch.einsum("tkd,tk->td", rows, weights)


@form("core", training=False)
def inverse_order_of_descending_sort(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    inverse = perm.sort(descending=True)[1]
    return mlp(m, x[perm // K], offs)[inverse].view(-1, K, D).sum(1)


@form("core", training=False)
def inverse_order_of_descending_argsort(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    inverse = perm.argsort(descending=True)
    return mlp(m, x[perm // K], offs)[inverse].view(-1, K, D).sum(1)


@form("core")
def weights_of_one_slot_for_all_tokens(m, x, ids, weights):
    # (T, 1, D) * (T, 1) is (T, T, D).
    _, perm, offs = in_order(ids[:, :1])
    rows = by_slot(mlp(m, x[perm // 1], offs), perm).view(-1, 1, D)
    return (rows * weights[:, :1]).sum(1)


@form("core")
def weighted_twice(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    rows = mlp(m, x[perm // K], offs) * weights.flatten()[perm].unsqueeze(-1)
    rows = by_slot(rows, perm).view(-1, K, D)
    return torch.bmm((2 * weights).unsqueeze(1), rows).squeeze(1)


@form("core")
def slots_of_all_tokens_weighted_alike(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    rows = by_slot(mlp(m, x[perm // K], offs), perm).view(-1, K, D)
    return (m.b_out[0, :K].view(1, 1, K) @ rows).squeeze(1)


@form("core")
def weights_of_more_rows(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    return added(x, mlp(m, x[perm // K], offs), perm, torch.cat([weights, weights]))


@form("core", training=False)
def result_rounded_to_fp8(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    rows = mlp(m, x[perm // K], offs).to(torch.float8_e5m2).to(x.dtype)
    return added(x, rows, perm, weights)


@form("core")
def sum_kept_in_more_bits(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    y = torch.zeros(x.shape, dtype=torch.float64)
    y.index_add_(0, perm // K, mlp(m, x[perm // K], offs).double())
    return y


@form("none")
def fewer_outputs_than_inputs(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    rows = product(gated(product(x[perm // K], m.w_in, offs)), m.w_out[:, :8], offs)
    y = torch.zeros(x.shape[0], 8, dtype=x.dtype)
    return y.index_add(0, perm // K, rows)


@form("none")
def bias_of_one_number(m, x, ids, weights):
    sorted_ids, perm, offs = in_order(ids)
    rows = mlp(m, x[perm // K], offs) + m.b_out[:, :1][sorted_ids]
    return added(x, rows, perm, weights)


def selected(rows, weight, ids):
    return torch.bmm(weight[ids], rows.unsqueeze(-1)).squeeze(-1)


@form("none")
def up_of_one_column(m, x, ids, weights):
    rows, ids = x.repeat_interleave(K, 0), ids.flatten()
    up = selected(rows, m.w_up[:, :1], ids)
    rows = selected(F.silu(selected(rows, m.w_gate, ids)) * up, m.w_out, ids)
    return (rows.view(-1, K, D) * weights.unsqueeze(-1)).sum(1)


@form("none")
def weights_of_fewer_experts(m, x, ids, weights):
    rows, ids = x.repeat_interleave(K, 0), ids.clamp(max=3).flatten()
    rows = selected(gated(selected(rows, m.w_in, ids)), m.w_out[:4], ids)
    return (rows.view(-1, K, D) * weights.unsqueeze(-1)).sum(1)


@form("core")
def slots_added_to_the_tokens_of_rows(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    slots = by_slot(mlp(m, x[perm // K], offs), perm)
    return torch.zeros_like(x).index_add(0, perm // K, slots)


@form("core", training=False)
def sum_of_integers(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    x = 20 * x
    slots = by_slot(mlp(m, x[perm // K], offs), perm)
    return slots.view(-1, K, D).sum(1, dtype=torch.int16).to(x.dtype)


@form("full")
def base_of_other_strides(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    base = x.t().contiguous().t()
    y = base.index_add(0, perm // K, mlp(m, x[perm // K], offs))
    return y.view(-1)


@form("core")
def sum_of_other_strides(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    y = torch.zeros_like(x.t().contiguous().t())
    y.index_add_(0, perm // K, mlp(m, x[perm // K], offs))
    return y.t().view(-1)


@form("full")
def wide_sum_that_feeds_the_next_block(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    y, token = x, perm // K
    for _ in range(2):
        rows = mlp(m, y[token].to(x.dtype), offs)
        wide = torch.promote_types(x.dtype, torch.float32)
        y = torch.zeros(x.shape, dtype=wide)
        y.index_add_(0, token, rows.to(wide))
    return y.to(x.dtype)


@form("core")
def weights_over_the_width(m, x, ids, weights):
    # A token has as many slots as it is wide: (T, 1, D) broadcasts over them.
    ids, weights = ids[:, :1].expand(-1, D), x.abs()
    _, perm, offs = in_order(ids)
    rows = by_slot(mlp(m, x[perm // D], offs), perm).view(-1, D, D)
    return (rows * weights.unsqueeze(1)).sum(1)


class Codes(torch.Tensor):
    """A weight of another library that knows the matmul, and not the op."""

    def __new__(cls, values):
        options = {"dtype": values.dtype, "strides": values.stride()}
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, **options)

    def __init__(self, values):
        self.values_ = values

    def __repr__(self):
        return "Codes"

    def __tensor_flatten__(self):
        return ["values_"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Codes(inner["values_"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default:
            return func(args[0], args[1].values_, *args[2:], **kwargs or {})
        views = torch.ops.aten.transpose.int, torch.ops.aten.detach.default
        if func not in views:
            raise NotImplementedError(f"codes have no {func}")
        return cls(func(args[0].values_, *args[1:], **kwargs or {}))


@form("none", training=False)
def transformed_by_func(m, x, ids, weights):
    def block(x):
        _, perm, offs = in_order(ids)
        return added(x, mlp(m, x[perm // K], offs), perm, weights).sum()

    return torch.func.grad(block)(x)


@instantiate_parametrized_tests
class TestMoEFusionForms(FormTest):
    @parametrize("name", [*FORMS])
    @parametrize("training", [False, True])
    def test_form(self, name, training):
        odd = "full" if name == "gate_without_grad" and not training else None
        self.check_form(FORMS[name], training, odd)

    @parametrize("name", [*COUNTS])
    @parametrize("training", [False, True])
    def test_counts(self, name, training):
        kind, logs = self.compare(counted(name), training, training, torch.bfloat16)
        self.assertEqual(kind, "full", logs)

    @parametrize("name", [*INDICES, *NEAR_INDICES])
    @parametrize("add", [False, True])
    def test_indices(self, name, add):
        kind, logs = self.compare(indexed(name, add), True, False, torch.float32)
        self.assertEqual(kind, "full" if name in INDICES else "core", logs)
        if add and name in ("of_columns", "of_first_row", "of_rows_repeated"):
            self.assertIn("the index of scatter_add is in no known form", logs[-1])

    @parametrize("name", [*NEAR_COUNTS])
    def test_near_miss_counts_are_named(self, name):
        kind, logs = self.compare(counted(name), False, False, torch.bfloat16)
        self.assertEqual(kind, "none", logs)
        self.assertRegex(
            logs[-1], "has a bias, and what counts .* is not known|other ids"
        )

    def test_ids_of_batched_rows_wrap_or_raise(self):
        x, ids, weights = make_inputs(torch.float32)
        module = Weights(batched_over_expanded_tokens)
        want = module(x, ids, weights)
        with config.patch(moe_fusion=True):
            lowered = torch.compile(module)
            fused = torch.compile(module, fullgraph=True, backend=backend)
            self.assertEqual(fused(x, ids - E * (ids > 2), weights), want)
            self.assertEqual(counters["inductor"]["moe_fusion_full"], 1)
            for bad in (E, E + 2, -E - 1, -2 * E):
                ids[1, 1] = bad
                with self.assertRaisesRegex(IndexError, f"index {bad} is out of"):
                    fused(x, ids, weights)
                with self.assertRaisesRegex(RuntimeError, "index out of bounds"):
                    lowered(x, ids, weights)

    @parametrize("captures", [False, True])
    def test_bincount_breaks_the_graph(self, captures):
        def fn(m, x, ids, weights):
            _, perm = ids.flatten().sort()
            offs = torch.bincount(ids.flatten(), minlength=E).cumsum(0).int()
            return added(x, mlp(m, x[perm // K], offs), perm, weights)

        capture = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=captures)
        with (
            capture,
            torch.no_grad(),
            self.assertLogs("torch._inductor.fx_passes.moe_fusion", "INFO") as logs,
        ):
            compiled = torch.compile(Weights(fn), backend=backend)
            compiled(*make_inputs(torch.float32))
        why = r"full" if captures else r"core \(.* sort in this graph, .* graph break\)"
        self.assertRegex(logs.output[-1], why)

    def test_weights_of_a_subclass(self):
        x, ids, weights = make_inputs(torch.bfloat16)
        plain = Weights(number_of_slots_as_symbol_and_constant).to(torch.bfloat16)
        coded = copy.deepcopy(plain)
        for name in ("w_in", "w_out"):
            values = Codes(getattr(plain, name).detach())
            setattr(coded, name, nn.Parameter(values, requires_grad=False))
        with (
            torch.no_grad(),
            config.patch(moe_fusion=True),
            self.assertLogs("torch._inductor.fx_passes.moe_fusion", "INFO") as logs,
        ):
            found = torch.compile(coded, fullgraph=True)(x, ids, weights)
        self.assertIn("its weights are of Codes", logs.output[-1])
        self.assertEqual(found, plain(x, ids, weights), atol=0.02, rtol=0.02)

    def test_stays_are_logged(self):
        for fn, why in (
            (loop_over_modules, f"a product of one expert, of {E} in a loop"),
            (gshard_einsum, "products of whole batches"),
            (selected_weights_by_einsum, "products of whole batches"),
        ):
            _, logs = self.compare(fn, False, False, torch.bfloat16)
            self.assertRegex(logs[-1], f"stays: {why}")

    def test_float32_that_is_faster_as_written(self):
        for amx, dtype, becomes in (
            (True, torch.float32, "none"),
            (False, torch.float32, "full"),
            (True, torch.bfloat16, "full"),
        ):
            with mock.patch("torch.cpu._is_amx_tile_supported", return_value=amx):
                kind, logs = self.compare(tokens_expanded, True, False, dtype)
            self.assertEqual(kind, becomes)
            why = "are faster as written" if becomes == "none" else "became"
            self.assertIn(why, logs[-1])

    @parametrize("training", [False, True])
    def test_autocast(self, training):
        def experts_without_it(m, x, ids, weights):
            _, perm, offs = in_order(ids)
            with torch.autocast("cpu", enabled=False):
                rows = mlp(m, x[perm // K], offs)
            return added(x, rows, perm, weights)

        autocast = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
        for fn, becomes in (
            (experts_without_it, "core"),
            # The sum over slots keeps the float32 of the router weights.
            (batched_over_expanded_tokens, "none"),
        ):
            kind, logs = self.compare(fn, training, False, torch.float32, autocast)
            self.assertEqual(kind, becomes, logs)

    def test_backward_of_a_region_with_grad(self):
        def block(m, x, ids, weights):
            with torch.enable_grad():
                return number_of_slots_as_symbol_and_constant(m, x, ids, weights)

        module, (x, *others) = Weights(block), make_inputs(torch.float32)
        x.requires_grad_()
        with torch.no_grad(), config.patch(moe_fusion=True):
            y = torch.compile(module, fullgraph=True, backend=backend)(x, *others)
        (got,) = torch.autograd.grad(y.sum(), x)
        (want,) = torch.autograd.grad(module(x, *others).sum(), x)
        self.assertEqual(got, want)


if __name__ == "__main__":
    run_tests()
