"""The routers and permutations that test_moe_routing_lowering*.py compile for a GPU that is not there.

As a script, ``python moe_routing_problems.py FILE`` writes what Inductor emits for them, as JSON:
Triton's interpreter, which runs that, cannot share a process with code generation.
"""

import dataclasses


if __name__ == "__main__":
    import fake_gpu

    fake_gpu.require()  # before torch

import torch
import torch.nn.functional as F


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is compiled; dynamic if it is traced with other tokens than it is run with.

    Attributes:
        name: unique.
        num_tokens: T of what is run.
        traced_tokens: T when it is compiled.
        above: only tokens whose first value is above it take part: an unbacked number.
    """

    name: str
    num_tokens: int = 40
    traced_tokens: int | None = None
    above: float | None = None

    training = False

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.above is None else x[x[:, 0] > self.above]


@dataclasses.dataclass(frozen=True)
class Permutation(Problem):
    """A call of ``_moe_permutation``.

    Attributes:
        num_experts, top_k: E and K.
        sentinels: with ids -1 and E, "no expert".
        dtype: of the ids.
        transposed: the ids of a token are not next to each other.
        rows_per_token: gives ``num_rows``, of T tokens; None leaves it out.
        row_alignment: of the op.
    """

    num_experts: int = 6
    top_k: int = 2
    sentinels: bool = False
    dtype: torch.dtype = torch.int64
    transposed: bool = False
    rows_per_token: int | None = None
    row_alignment: int = 1

    def tensors(self, num_tokens: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(num_tokens)
        low, high = (
            (-1, self.num_experts + 1) if self.sentinels else (0, self.num_experts)
        )
        shape = (num_tokens, self.top_k)
        ids = torch.randint(low, high, shape, generator=generator).to(self.dtype)
        return {"ids": ids.mT.contiguous().mT if self.transposed else ids}

    def options(self, ids: torch.Tensor) -> dict[str, int]:
        options = {"row_alignment": self.row_alignment}
        if self.rows_per_token is not None:
            options["num_rows"] = ids.shape[0] * self.rows_per_token
        return options

    def __call__(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids = self.keep(ids)
        return torch._moe_permutation(ids, self.num_experts, **self.options(ids))


@dataclasses.dataclass(frozen=True)
class Router(Problem):
    """A call of ``F.moe_topk``.

    Attributes:
        num_experts, top_k: E and K.
        dtype: of the logits.
        bias: with one.
        transposed: the logits of a token are not next to each other.
        training: with the backward.
        options: of the function.
    """

    num_experts: int = 16
    top_k: int = 3
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    transposed: bool = False
    training: bool = False
    options: dict = dataclasses.field(default_factory=dict)

    def tensors(self, num_tokens: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(num_tokens)
        logits = torch.randn(num_tokens, self.num_experts, generator=generator)
        logits = logits.to(self.dtype)
        if self.transposed:
            logits = logits.mT.contiguous().mT
        found = {"logits": logits}
        if self.bias:
            found["bias"] = torch.randn(self.num_experts, generator=generator)
        return found

    def __call__(self, logits, bias=None):
        logits = self.keep(logits)
        ids, weights = F.moe_topk(logits, self.top_k, bias=bias, **self.options)
        # The gradient comes to the first result of what is compiled.
        return weights, ids


@dataclasses.dataclass(frozen=True)
class Block(Problem):
    """A whole block: router, permutation, experts, combine, residual and norm."""

    training: bool = True
    dim: int = 64
    hidden: int = 48
    num_experts: int = 8  # or padding of the router's matmul would be measured
    top_k: int = 2

    def tensors(self, num_tokens: int) -> dict[str, torch.Tensor]:
        D, H, E = self.dim, self.hidden, self.num_experts
        generator = torch.Generator().manual_seed(num_tokens)

        def randn(*shape: int) -> torch.Tensor:
            x = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            return x.bfloat16()

        x = randn(num_tokens, D) * D**0.5
        return {
            "x": x,
            "router": randn(E, D),
            "w_in": randn(E, 2 * H, D),
            "w_out": randn(E, D, H),
        }

    def __call__(self, x, router, w_in, w_out):
        x = self.keep(x)
        ids, weights = F.moe_topk(F.linear(x, router), self.top_k)
        y = x + F.moe_mlp(x, ids, weights, w_in, w_out)
        return F.rms_norm(y.float(), (self.dim,)).to(x.dtype)


def _problems() -> tuple[Problem, ...]:
    v3 = {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5}
    return (
        Permutation("permutation_one_program"),
        Permutation("permutation_sentinels", sentinels=True, dtype=torch.int32),
        Permutation("permutation_few_rows", rows_per_token=1, row_alignment=4),
        Permutation("permutation_one_expert", sentinels=True, num_experts=1, top_k=1),
        Permutation("permutation_no_tokens", 0),
        Permutation("permutation_transposed", transposed=True, row_alignment=8),
        Permutation("permutation_blocks", 700, num_experts=40, sentinels=True),
        Permutation("permutation_aligned_blocks", 600, row_alignment=16),
        Permutation("permutation_dynamic", traced_tokens=24, sentinels=True),
        Permutation("permutation_dynamic_blocks", 900, 24, row_alignment=16),
        Permutation("permutation_dynamic_rows", 30, 600, rows_per_token=1),
        Permutation("permutation_unbacked", above=1),
        Permutation("permutation_unbacked_none", above=99),
        Permutation("permutation_unbacked_blocks", 900, above=1, rows_per_token=3),
        Router("router"),
        Router("router_no_tokens", 0),
        Router("router_float32", dtype=torch.float32, bias=True, transposed=True),
        Router("router_groups", bias=True, options=v3),
        Router("router_dynamic", 70, 24, options={"normalize": False}),
        Router("router_unbacked", above=0.0),
        Router("router_unbacked_none", above=99.0),
        Router("router_training", training=True),
        Router("router_training_unbacked", above=0.0, training=True),
        Router("router_training_unbacked_none", above=99.0, training=True),
        Router("router_training_groups", training=True, options=v3),
        Router("router_training_dynamic", 70, 24, training=True, transposed=True),
        Block("block"),
        Block("block_dynamic", 70, 24),
        Block("block_unbacked", above=0.0),
        Block("block_unbacked_none", above=99.0),
        Block("block_inference_unbacked", above=0.0, training=False),
    )


PROBLEMS = {problem.name: problem for problem in _problems()}


def emit(problem: Problem, arch: str = "sm_90") -> list:
    """What Inductor emits for ``problem``: the forward and, in training, the backward."""
    from fake_gpu import emitted_like

    tensors = problem.tensors(problem.traced_tokens or problem.num_tokens)
    names = tensors if problem.training else ()
    gradients = [n for n in names if tensors[n].is_floating_point()]
    dynamic = [*tensors][: problem.traced_tokens is not None]
    return emitted_like(
        problem.__call__, tensors, arch, gradients=gradients, dynamic=dynamic
    )


if __name__ == "__main__":
    import sys

    torch._inductor.config.triton.moe_kernels = True
    graphs = {name: emit(problem) for name, problem in PROBLEMS.items()}
    fake_gpu.write_graphs(sys.argv[1], graphs)
