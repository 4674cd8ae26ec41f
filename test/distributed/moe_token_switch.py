"""What the token switch tests share: one MoE layer on many ranks next to one rank.

Gloo processes use :class:`TokenSwitchTest`; many ranks in one process use
:func:`run_on_local_ranks`. Both are compared with :class:`Truth`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, TYPE_CHECKING
from unittest import mock

from moe_gloo import GlooTest

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed._moe.all_to_all import TokenSwitchAllToAll
from torch.distributed._moe.payload import decode, encode
from torch.testing._internal.common_moe import has_cpu_kernel, NoHostSyncMode
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.moe_generators import MoeCase, MoeOperands
from torch.testing._internal.moe_reference import check_close, REFERENCE, UNFUSED


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


# Tokens of each of the four ranks.
SHARES = {"even": (5, 4, 4, 4), "gaps": (9, 0, 7, 1), "all_on_one": (0, 0, 17, 0)}
CASE = MoeCase("ep", num_tokens=17, num_experts=8, top_k=3)
# The case of tests with many ranks in one process.
LOCAL_CASE = MoeCase("local", num_tokens=128, num_experts=64, top_k=8, dim=8, hidden=8)
# The results whose bits do not depend on the number of ranks with combine="exact".
EXACT = ("output", "grad_input", "grad_weights")


@contextlib.contextmanager
def host_reads() -> Iterator[list[Tensor]]:
    """Yields the tensors that ``tolist`` reads; any other read on the host raises."""
    read = []
    tolist = Tensor.tolist

    def spy(t):
        read.append(t)
        return tolist(t)

    # Eager CPU tensors are read without a dispatch, which the mode would see.
    forbidden = mock.Mock(side_effect=AssertionError("host read"))
    with (
        NoHostSyncMode(),
        mock.patch.object(Tensor, "tolist", spy),
        mock.patch.object(Tensor, "item", forbidden),
        mock.patch.object(Tensor, "__bool__", forbidden),
        mock.patch.object(Tensor, "__int__", forbidden),
    ):
        yield read


def metadata_bytes(sent):
    """The part of the bytes sent at a level that says which rows are for which experts."""
    return sent["ids"] + sent["weights"] + sent["sizes"]


@dataclasses.dataclass
class Result:
    """Output and gradients of some tokens and experts."""

    output: Tensor
    grad_input: Tensor
    grad_weights: Tensor
    grad_w_in: Tensor
    grad_w_out: Tensor


@dataclasses.dataclass
class Truth:
    """A layer on one rank, in float64, unfused, and fused."""

    operands: MoeOperands
    reference: Result
    unfused: Result
    one_rank: Result
    dtype: torch.dtype

    def check(
        self, name: str, got: Tensor, part: slice, *, exact: bool = False
    ) -> None:
        """Raises unless field ``name`` is within invariant 1, and exact if asked for.

        Exact bits are those of one rank where the kernel keeps a row's bits.
        """
        if got.numel():
            want, loose = getattr(self.reference, name), getattr(self.unfused, name)
            check_close(got, want[part], loose[part], self.dtype, name)
        exact = exact and has_cpu_kernel()
        if exact and not torch.equal(got, getattr(self.one_rank, name)[part]):
            raise AssertionError(f"{name} has not the bits of one rank")

    def check_all(self, got: Result, *, exact: bool) -> None:
        """Checks the results of all tokens and experts."""
        for name, value in vars(got).items():
            self.check(name, value, slice(None), exact=exact and name in EXACT)


def leaves_of(
    operands: MoeOperands, tokens: slice = slice(None), experts: slice = slice(None)
) -> tuple[Tensor, ...]:
    """Input, router weights, w_in and w_out of a share, as new leaves."""
    return tuple(
        t[part].detach().clone().requires_grad_()
        for t, part in (
            (operands.input, tokens),
            (operands.topk_weights, tokens),
            (operands.w_in, experts),
            (operands.w_out, experts),
        )
    )


def one_rank(operands: MoeOperands) -> Result:
    """F.moe_mlp of all tokens and experts in this process."""
    leaves = leaves_of(operands)
    y = F.moe_mlp(leaves[0], operands.topk_indices, *leaves[1:])
    y.backward(operands.grad_out)
    return Result(y.detach(), *(t.grad for t in leaves))


def truth_of(operands: MoeOperands) -> Truth:
    """Runs ``operands`` on one rank."""

    def result(forward: Callable, backward: Callable) -> Result:
        grads = backward(operands.grad_out, *operands.args())
        return Result(
            forward(*operands.args())[0],
            grads.grad_input,
            grads.grad_topk_weights,
            grads.grad_w_in,
            grads.grad_w_out,
        )

    return Truth(
        operands,
        result(*REFERENCE),
        result(*UNFUSED),
        one_rank(operands),
        operands.input.dtype,
    )


@functools.cache
def truth(routing: str, dtype: torch.dtype = torch.float32) -> Truth:
    """17 tokens with a routing; the skewed one has its own E and K."""
    case = dataclasses.replace(CASE, routing=routing)
    if routing == "skewed":
        case = dataclasses.replace(case, num_experts=64, top_k=8)
    return truth_of(case.operands(dtype))


@functools.cache
def local_truth(routing: str) -> Truth:
    return truth_of(dataclasses.replace(LOCAL_CASE, routing=routing).operands())


def run_layer(
    switch: TokenSwitchAllToAll,
    ids: Tensor,
    x: Tensor,
    weights: Tensor,
    w_in: Tensor,
    w_out: Tensor,
) -> Tensor:
    """Dispatch, local experts, combine."""
    routing = switch.create_routing(ids, layout="flat")
    rows, row_weights, row_ids = switch.dispatch(routing, x, weights)
    num_rows = switch.num_slots(routing)
    out = F.moe_mlp(rows, row_ids, row_weights, w_in, w_out, num_rows=num_rows)
    return switch.combine(routing, out)


class TokenSwitchTest(GlooTest):
    """Four gloo processes."""

    def part(self, ep: int, share: str, num_experts: int = 8) -> tuple[slice, slice]:
        """Tokens and experts of this rank; each EP group routes the tokens of its
        own ranks."""
        bounds = [sum(SHARES[share][:r]) for r in range(5)]
        tokens = slice(bounds[self.rank], bounds[self.rank + 1])
        local, first = num_experts // ep, self.rank % ep
        return tokens, slice(local * first, local * (first + 1))

    def run_switch(
        self,
        switch: TokenSwitchAllToAll,
        operands: MoeOperands,
        tokens: slice,
        experts: slice,
        *,
        rerun: Callable[..., Tensor] | None = None,
        layer: Callable[..., Tensor] = run_layer,
    ) -> Result:
        """Forward and backward of this rank's tokens and experts.

        Args:
            rerun (callable, optional): ``rerun([switch], step)`` runs the step.
        """
        leaves = leaves_of(operands, tokens, experts)
        ids = operands.topk_indices[tokens]

        def step() -> Tensor:
            for t in leaves:
                t.grad = None
            y = layer(switch, ids, *leaves)
            y.backward(operands.grad_out[tokens])
            return y.detach()

        y = step() if rerun is None else rerun([switch], step)
        return Result(y, *(t.grad for t in leaves))

    def check(
        self,
        got: Result,
        truth: Truth,
        tokens: slice,
        experts: slice,
        *,
        exact: bool,
        ep: int = 4,
    ) -> None:
        """Invariant 1, and the bits of one rank if ``exact``; weight gradients are
        summed over the EP groups, which hold copies of the experts."""
        for name in EXACT:
            truth.check(name, getattr(got, name), tokens, exact=exact)
        copies = self.mesh(None, 4 // ep, ep).get_group(0)
        for name in ("grad_w_in", "grad_w_out"):
            total = getattr(got, name).double()
            dist.all_reduce(total, group=copies)
            truth.check(name, total, experts)

    def check_matches_one_rank(
        self,
        make_switch: Callable[..., TokenSwitchAllToAll],
        routing: str,
        combine: str,
        ep: int = 4,
    ) -> None:
        """Compares every share of the tokens, in two dtypes, with one rank."""
        for dtype in (torch.float32, torch.bfloat16):
            want = truth(routing, dtype)
            E = want.operands.w_in.shape[0]
            for share in SHARES:
                part = self.part(ep, share, E)
                switch = make_switch(num_experts=E, combine=combine)
                got = self.run_switch(switch, want.operands, *part)
                self.check(got, want, *part, exact=combine == "exact", ep=ep)

    def check_rounded_once(
        self, make_switch: Callable[..., TokenSwitchAllToAll], dtype: torch.dtype
    ) -> None:
        """A switch that sends ``dtype`` gives the bits of one rank with rounded inputs."""
        operands = CASE.operands()
        tokens, experts = self.part(4, "gaps")
        switch = make_switch(combine="exact", wire_dtype=dtype)
        got = self.run_switch(switch, operands, tokens, experts)
        rounded = decode(encode(operands.input, dtype), dtype, 16, torch.float32)
        whole = one_rank(dataclasses.replace(operands, input=rounded))
        for name in EXACT:
            want = getattr(whole, name)[tokens]
            self.assertTrue(torch.equal(getattr(got, name), want), name)

    def check_static(
        self,
        make_switch: Callable[..., TokenSwitchAllToAll],
        routings: Iterable[str],
        **capacity: Any,
    ) -> None:
        """A switch with ``capacity`` gives the bits of one without."""
        for routing in routings:
            operands = truth(routing).operands
            E = operands.w_in.shape[0]
            for share in SHARES:
                part = self.part(4, share, E)
                compact = self.run_switch(make_switch(num_experts=E), operands, *part)
                switch = make_switch(num_experts=E, **capacity)
                static = self.run_switch(switch, operands, *part)
                switch.check_overflow()
                self.assert_same_bits(static, compact, (routing, share))

    def assert_same_bits(self, got: Result, want: Result, message: Any = None) -> None:
        """Compares the results that ``combine="exact"`` makes equal."""
        for name in EXACT:
            same = torch.equal(getattr(got, name), getattr(want, name))
            self.assertTrue(same, (message, name))


class AllToAllTest(TokenSwitchTest):
    def switch(
        self, ep: int = 4, num_experts: int = 8, **kwargs: Any
    ) -> TokenSwitchAllToAll:
        group = self.mesh(None, 4 // ep, ep).get_group(1)
        return TokenSwitchAllToAll(group, num_experts, **kwargs)


class OneRankCompileTest(TestCase):
    """On one rank, where the compact sizes depend on the data as on many."""

    def setUp(self) -> None:
        super().setUp()
        torch._dynamo.reset()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        config = torch._dynamo.config.patch(
            capture_scalar_outputs=True, error_on_recompile=True
        )
        config.__enter__()
        self.addCleanup(config.__exit__, None, None, None)

    def check_bits(
        self,
        switch: TokenSwitchAllToAll,
        compiled: Callable[..., Tensor],
        layer: Callable[..., Tensor] = run_layer,
    ) -> None:
        """Compares ``compiled`` with ``layer``, also if nothing is sent and all sizes are 0."""
        for routing in ("uniform", "sentinels", "one_expert", "none"):
            operands = local_truth("uniform" if routing == "none" else routing).operands
            ids = operands.topk_indices
            if routing == "none":
                ids = torch.full_like(ids, -1)
            results = []
            for run in (layer, compiled):
                leaves = leaves_of(operands)
                y = run(switch, ids, *leaves)
                y.backward(operands.grad_out)
                switch.check_overflow()
                results.append([y.detach(), *(t.grad for t in leaves)])
            for want, got in zip(*results, strict=True):
                self.assertTrue(torch.equal(want, got), routing)


def run_on_local_ranks(
    ranks: int,
    operands: MoeOperands,
    make_switch: Callable[[], TokenSwitchAllToAll],
    shares: list[int] | None = None,
) -> Result:
    """The layer on ``ranks`` simulated ranks of this process.

    Args:
        make_switch (callable): makes the switch, called with a fake process group.
        shares (list[int], optional): tokens of each rank; equal parts by default.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        with LocalTensorMode(ranks):

            def shard(t: Tensor, sizes: list[int] | None = None) -> LocalTensor:
                parts = t.detach().split(sizes or t.shape[0] // ranks)
                return LocalTensor({r: p.clone() for r, p in enumerate(parts)})

            x, weights = (
                shard(t, shares).requires_grad_()
                for t in (operands.input, operands.topk_weights)
            )
            w_in, w_out = (
                shard(t).requires_grad_() for t in (operands.w_in, operands.w_out)
            )
            switch = make_switch()
            ids = shard(operands.topk_indices, shares)
            y = run_layer(switch, ids, x, weights, w_in, w_out)
            y.backward(shard(operands.grad_out, shares))
            switch.check_overflow()
            results = (y.detach(), x.grad, weights.grad, w_in.grad, w_out.grad)
            parts = [[t._local_tensors[r] for r in range(ranks)] for t in results]
        return Result(*(torch.cat(p) for p in parts))
    finally:
        dist.destroy_process_group()
