"""The calls in low precision that test_moe_scaled_lowering*.py compile for a GPU that is not there.

As a script, ``python moe_scaled_problems.py FILE`` writes what Inductor emits for them, as JSON:
Triton's interpreter, which runs that, cannot share a process with code generation.
"""

import dataclasses


if __name__ == "__main__":
    import fake_gpu

    fake_gpu.require()  # before torch

import moe_lowering_problems
import moe_routing_problems

import torch
import torch.nn.functional as F
from torch.testing._internal.common_utils import TEST_WITH_SLOW
from torch.testing._internal.moe_generators import MoeCase, MoeOperands


@dataclasses.dataclass(frozen=True)
class Quantize(moe_routing_problems.Problem):
    """A call of ``_moe_quantize``.

    Attributes:
        recipe, dim, swizzle, code: of the op; ``code`` is its ``dtype``.
        shape: of a token, or behind the experts of a weight.
        dtype: of what is quantised.
        experts: blocks begin with one of so many experts, the last of which end before the rows do.
        transposed: dimension 0 is the dense one.
    """

    recipe: int = 3
    shape: tuple[int, ...] = (144,)
    dim: int = -1
    swizzle: int = 0
    code: torch.dtype | None = None
    dtype: torch.dtype = torch.bfloat16
    experts: int | None = None
    transposed: bool = False

    slow = False

    def tensors(self, num_tokens: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(num_tokens)
        x = torch.randn(num_tokens, *self.shape, generator=generator)
        x *= torch.exp2(
            torch.randint(-20, 20, (num_tokens,), generator=generator)
        ).view(-1, *[1] * len(self.shape))
        if num_tokens > 8:
            x[3], x[7].view(-1)[5] = 0, float("inf")
        x = x.to(self.dtype)
        if self.transposed:
            x = x.movedim(0, -1).contiguous().movedim(-1, 0)
        found = {"x": x}
        if self.experts is not None:
            used = min(num_tokens, 11)
            found["offs"] = (torch.arange(self.experts) * used // self.experts).int()
        return found

    def __call__(
        self, x: torch.Tensor, offs: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten._moe_quantize.default(
            self.keep(x),
            self.recipe,
            offs=offs,
            dim=self.dim,
            dtype=self.code,
            swizzle=self.swizzle,
        )


_WEIGHTS = ("w_in", "w_out", "w_up")
# Two blocks of columns in the first, the second of which is short.
_LONG = MoeCase("long", num_tokens=24, dim=144, hidden=128, num_experts=3)
_CASE = dataclasses.replace(_LONG, name="short", dim=112)


@dataclasses.dataclass(frozen=True)
class Experts(moe_lowering_problems.Problem):
    """A call of ``_moe_mlp_scaled``.

    Attributes:
        recipe: of ``F.moe_mlp``.
        slow: compiled and run in the slow shard only.
        preact_dtype, hp_wgrad: of the op.
        recompute: H is not saved.
        integers: operands are small integers, so that every sum is exact.
        quantised: rows and weights come quantised; of weights None are given but in training.
    """

    case: MoeCase = _CASE
    recipe: str = "fp8_blockwise"
    slow: bool = False
    preact_dtype: torch.dtype | None = torch.float8_e4m3fn
    hp_wgrad: bool = False
    recompute: bool = False
    integers: bool = False
    quantised: bool = False

    @property
    def codes(self) -> tuple[int, int]:
        """The codes of the rows and of the weights."""
        return F._MOE_RECIPES[self.recipe]

    @property
    def arch(self) -> str:
        return "sm_100" if self.name.startswith("mx_") else "sm_90"

    def operands(self, num_tokens: int | None = None) -> MoeOperands:
        operands = super().operands(num_tokens)
        if not self.integers:
            return operands

        def integers(name: str, low: int = -1) -> torch.Tensor | None:
            x = getattr(operands, name)
            return None if x is None else torch.randint_like(x, low, low + 3)

        names = ("input", *_WEIGHTS, "b_in", "b_out", "grad_out")
        torch.manual_seed(0)
        return dataclasses.replace(
            operands,
            topk_weights=integers("topk_weights", 1),
            **{name: integers(name) for name in names},
        )

    def present(self, operands: MoeOperands) -> dict[str, torch.Tensor]:
        found = super().present(operands)
        if not self.quantised:
            return found
        quantize = torch.ops.aten._moe_quantize
        rows, weights = self.codes
        made = {"input": quantize(found["input"], rows)}
        for name in _WEIGHTS:
            if (w := found.get(name)) is None:
                continue
            made[name] = quantize(w, weights)
            if self.recipe != "fp8_blockwise":
                made[name] += quantize(w, weights, dim=1)
            if not self.training:
                del found[name]
        pairs = {f"{n}_{i}": x for n, xs in made.items() for i, x in enumerate(xs)}
        return {**found, **pairs}

    def is_per_token(self, name: str) -> bool:
        return super().is_per_token(name) or name in ("input_0", "input_1")

    def has_gradient(self, name: str, x: torch.Tensor) -> bool:
        return x.is_floating_point() and not name[-1].isdigit()

    def lists(self, operands: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
        names = ("input", *_WEIGHTS)
        return [[x for n, x in operands.items() if n[:-2] == name] for name in names]

    def __call__(self, **operands: torch.Tensor) -> torch.Tensor:
        if self.above is not None:
            chosen = self.choose(operands.pop("input"))
            return F.moe_mlp(*chosen, **operands, recipe=self.recipe, **self.options)
        rows, weights = self.codes
        output, *_ = torch._moe_mlp_scaled(
            *map(operands.get, moe_lowering_problems._NAMES),
            *self.lists(operands),
            recipe_a=[rows],
            recipe_w=[weights],
            preact_dtype=self.preact_dtype,
            hp_wgrad=self.hp_wgrad,
            compute_preact=torch.is_grad_enabled() and not self.recompute,
            **self.options,
        )
        return output


def _experts() -> tuple[Experts, ...]:
    sentinels = dataclasses.replace(_CASE, routing="sentinels")
    empty = dataclasses.replace(_LONG, routing="empty_experts", num_rows=80)
    one = dataclasses.replace(_CASE, routing="one_expert", top_k=1)
    oai = {"activation": "swiglu_oai", "gate_interleaved": True, "bias": True}
    train = {"training": True}
    dynamic = {"tokens": "dynamic", "traced_tokens": 40}
    both = (
        Experts("inference"),
        Experts("inference_quantised", quantised=True, **dynamic),
        Experts("unbacked_none", above=100.0),
        Experts("unbacked", above=0.0, **train),
        Experts("dynamic", _LONG, **dynamic, **train),
        Experts("oai", empty, **oai, **dynamic, **train),
        Experts("split", sentinels, split_gate=True, limit=1.0, **train),
        Experts("hp_wgrad", hp_wgrad=True, bias=True, **train),
        Experts("quantised", quantised=True, **train),
        Experts("integers", activation="reglu", integers=True, **train),
    )
    # What differs in neither the recipe's kernels nor their operands.
    once = (
        Experts("inference_rows", rows=True),
        Experts("relu2", one, activation="relu2", bias=True, **train),
        Experts("rows", rows=True, **train),
        Experts("transposed", transposed=True, **train),
        Experts("recompute", recompute=True, **dynamic, **train),
        Experts("preact", preact_dtype=None, **train),
        Experts("int8", preact_dtype=torch.int8, **train),
    )
    # Halves of a row are quantised apart, of H in the epilogue or behind it.
    off = dataclasses.replace(_CASE, hidden=80)
    apart = tuple(
        Experts(name, off, split_gate=split, **dynamic, **train)
        for name, split in (("off", False), ("off_split", True))
    )
    few = [p for p in both if p.name in ("inference", "dynamic", "quantised", "oai")]

    def named(prefix: str, recipe: str, problems, slow: str) -> list[Experts]:
        return [
            dataclasses.replace(
                p, name=f"{prefix}_{p.name}", recipe=recipe, slow=p.name in slow.split()
            )
            for p in problems
        ]

    return (
        *named(
            "fp8",
            "fp8_blockwise",
            (*both, *once, *apart),
            slow="inference_rows relu2 recompute int8 off",
        ),
        *named(
            "mx",
            "mxfp8",
            both,
            slow="inference_quantised unbacked unbacked_none oai hp_wgrad",
        ),
        *named("wide", "mxfp8", few, slow="inference quantised oai"),
        *named("row", "fp8_rowwise", (*few, *apart), slow="inference quantised off"),
    )


def _quantize() -> tuple[Quantize, ...]:
    columns = {"dim": 0, "experts": 3}
    return (
        Quantize("quantize"),
        Quantize("quantize_dynamic", 70, 24),
        Quantize("quantize_unbacked", above=0.0),
        Quantize("quantize_unbacked_none", above=1e30),
        Quantize("quantize_no_tokens", 0),
        Quantize("quantize_int8", code=torch.int8, dtype=torch.float32),
        Quantize("quantize_swizzled", 70, 24, swizzle=1),
        Quantize("quantize_swizzled_unbacked", above=0.0, swizzle=1),
        Quantize("quantize_blocks", 70, 24, recipe=4, dtype=torch.float16),
        Quantize("quantize_blocks_unbacked", above=0.0, recipe=4, transposed=True),
        Quantize("quantize_squares", 4, recipe=5, shape=(136, 144)),
        Quantize("quantize_squares_dynamic", 200, 24, recipe=5),
        Quantize("quantize_weight", 4, shape=(48, 80), dim=1),
        Quantize("quantize_weight_dynamic", 5, 4, shape=(48, 80), dim=1),
        Quantize("quantize_weight_swizzled", 4, shape=(48, 80), dim=1, swizzle=1),
        Quantize("quantize_rows", 70, 24, recipe=1),
        Quantize("quantize_rows_unbacked", above=0.0, recipe=1),
        Quantize("quantize_columns", **columns),
        Quantize("quantize_columns_dynamic", 300, 24, recipe=4, **columns),
        Quantize("quantize_columns_unbacked", above=-1e30, recipe=1, **columns),
        Quantize("quantize_columns_transposed", 70, 24, transposed=True, **columns),
    )


PROBLEMS = {problem.name: problem for problem in (*_quantize(), *_experts())}


def emit(problem: Quantize | Experts) -> list:
    """What Inductor emits for ``problem``: the forward and, in training, the backward."""
    if isinstance(problem, Quantize):
        return moe_routing_problems.emit(problem)
    return moe_lowering_problems.emit(problem, problem.arch)


if __name__ == "__main__":
    import sys

    torch._inductor.config.triton.moe_kernels = True
    graphs = {n: emit(p) for n, p in PROBLEMS.items() if TEST_WITH_SLOW or not p.slow}
    fake_gpu.write_graphs(sys.argv[1], graphs)
