# Owner(s): ["module: inductor"]
"""Blocks of experts with operands that are written in place: moe_fusion sees each write."""

from moe_fusion_problem import (
    added,
    D,
    E,
    FormTest,
    gated,
    in_order,
    K,
    mlp,
    product,
    registered_in,
)

import torch
import torch.nn.functional as F
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)


FORMS = {}
form = registered_in(FORMS)


@form("none", training=False)
def bias_added_to_what_was_read(m, x, ids, weights):
    sorted_ids, perm, offs = in_order(ids)
    h = product(x[perm // K], m.w_in, offs)
    hidden = gated(h)
    h.add_(m.b_in[sorted_ids])
    return added(x, product(hidden, m.w_out, offs), perm, weights)


@form("none", training=False)
def bias_added_between_halves(m, x, ids, weights):
    sorted_ids, perm, offs = in_order(ids)
    h = product(x[perm // K], m.w_in, offs)
    gate, up = h.chunk(2, -1)
    gate = F.silu(gate)
    h += m.b_in[sorted_ids]
    return added(x, product(gate * up, m.w_out, offs), perm, weights)


@form("core", training=False)
def bias_added_to_what_was_combined(m, x, ids, weights):
    sorted_ids, perm, offs = in_order(ids)
    rows = mlp(m, x[perm // K], offs)
    y = added(x, rows, perm, weights)
    rows.add_(m.b_out[sorted_ids])
    return y


@form("core")
def tokens_that_are_limited_in_place(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    token = perm // K
    token.clamp_(max=5)
    return torch.zeros_like(x).index_add(0, token, mlp(m, x[token], offs))


@form("core", training=False)
def tokens_that_change_in_between(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    token = torch.arange(x.shape[0]).repeat_interleave(K)[perm]
    rows = x[token]
    token.copy_(token.flip(0))
    return torch.zeros_like(x).index_add(0, token, mlp(m, rows, offs))


@form("core")
def tokens_divided_in_between(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    tokens = x = x * 1
    rows = x[perm // K]
    x /= 2
    return added(x, mlp(m, rows, offs), perm, weights) + tokens


@form("core", training=False)
def tokens_renormalized_in_between(m, x, ids, weights):
    x = x * 1
    _, perm, offs = in_order(ids)
    rows = x[perm // K]
    few = F.embedding((rows[:3, 0] * 0).long(), x, max_norm=0.5)
    return added(x, mlp(m, rows, offs), perm, weights) + few.sum()


@form("core", training=False)
def tokens_as_running_mean(m, x, ids, weights):
    x = x * 1
    _, perm, offs = in_order(ids)
    rows = x[perm // K]
    F.batch_norm(rows, x[0], torch.ones_like(x[0]), training=True)
    return added(x, mlp(m, rows, offs), perm, weights)


@form("full")
def tokens_written_later(m, x, ids, weights):
    x = x * 1
    _, perm, offs = in_order(ids)
    y = added(x, mlp(m, x[perm // K], offs), perm, weights)
    x.mul_(3)
    return y + x


@form("core")
def order_that_is_limited_in_place(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    perm.clamp_(max=30)
    token = perm // K
    return torch.zeros_like(x).index_add(0, token, mlp(m, x[token], offs))


@form("core")
def order_that_is_shifted_in_place(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    shifted = perm
    shifted >>= 1
    token = perm // K
    return torch.zeros_like(x).index_add(0, token, mlp(m, x[token], offs))


@form("core")
def inverse_order_that_is_written(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    inverse = perm.argsort()
    inverse.copy_(inverse.flip(0))
    return mlp(m, x[perm // K], offs)[inverse].view(-1, K, D).sum(1)


@form("core", training=False)
def inverse_order_that_is_read_too_early(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    inverse = torch.zeros_like(perm)
    rows = mlp(m, x[perm // K], offs)[inverse]
    inverse.scatter_(0, perm, torch.arange(perm.shape[0]))
    return rows.view(-1, K, D).sum(1)


@form("core", training=False)
def inverse_order_of_places_that_are_written(m, x, ids, weights):
    _, perm, offs = in_order(ids)
    places = torch.arange(perm.shape[0])
    places.copy_(places.flip(0))
    inverse = torch.empty_like(perm)
    inverse[perm] = places
    return mlp(m, x[perm // K], offs)[inverse].view(-1, K, D).sum(1)


@form("full", training=False)
def choice_that_is_written_before_a_cast(m, x, ids, weights):
    chosen = x[:, :E].float().topk(K)[1]
    chosen[weights < 0.3] = 100  # no expert
    _, perm, offs = in_order(chosen.int())
    return added(x, mlp(m, x[perm // K], offs), perm, weights)


@instantiate_parametrized_tests
class TestMoEFusionWrites(FormTest):
    @parametrize("name", [*FORMS])
    @parametrize("training", [False, True])
    def test_form(self, name, training):
        odd = "core" if name == "tokens_written_later" and training else None
        self.check_form(FORMS[name], training, odd)


if __name__ == "__main__":
    run_tests()
