"""The MoE calls that test_moe_lowering*.py compile for a GPU that is not there.

As a script, ``python moe_lowering_problems.py FILE`` writes what Inductor emits for them, as JSON:
Triton's interpreter, which runs that, cannot share a process with code generation.
"""

import dataclasses


if __name__ == "__main__":
    import fake_gpu

    fake_gpu.require()  # before torch

import torch
import torch.nn.functional as F
from torch.testing._internal.moe_generators import MoeCase, MoeOperands
from torch.testing._internal.moe_reference import moe_permutation_reference


_NAMES = (
    "input",
    "w_in",
    "w_out",
    "offs",
    "topk_weights",
    "row_slots",
    "slot_rows",
    "b_in",
    "b_out",
    "w_up",
)
_ROWS = ("row_slots", "slot_rows")
_PER_TOKEN = ("input", "topk_weights", *_ROWS)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of ``_moe_mlp`` and what surrounds it.

    Attributes:
        name: unique.
        case: shape and routing. D and F are multiples of 16, which the kernels want.
        training: with the backward.
        tokens: "static" or "dynamic" number of tokens and rows.
        traced_tokens: T when it is compiled; what is run has that of ``case``.
        above: only tokens whose first value is above it go to the experts, so that their number is
            an unbacked size. The first columns of those are the logits of ``F.moe_topk``.
        norm: with a residual and an RMS norm behind the experts.
        rows: the operands are rows in expert order: no slots, no router weights.
        bias, split_gate, transposed: which weights, and in which storage.
        activation, gate_interleaved, limit: of the op.
    """

    name: str
    case: MoeCase = MoeCase("small", num_tokens=40, dim=64, hidden=48, num_experts=6)
    training: bool = False
    tokens: str = "static"
    traced_tokens: int | None = None
    norm: bool = False
    above: float | None = None
    rows: bool = False
    bias: bool = False
    split_gate: bool = False
    transposed: bool = False
    activation: str = "swiglu"
    gate_interleaved: bool = False
    limit: float | None = None

    @property
    def options(self) -> dict[str, object]:
        return {
            "activation": self.activation,
            "gate_interleaved": self.gate_interleaved,
            "limit": self.limit,
        }

    def operands(self, num_tokens: int | None = None) -> MoeOperands:
        """bfloat16 operands on the CPU, for other tokens than the case's if asked."""
        case = self.case
        if num_tokens is not None:
            case = dataclasses.replace(case, num_tokens=num_tokens)
        operands = case.operands(
            torch.bfloat16, activation=self.activation, bias=self.bias
        )
        if self.split_gate:
            operands = operands.split_gate()
        if self.transposed:
            operands = dataclasses.replace(
                operands,
                **{
                    name: w.mT.contiguous().mT
                    for name in ("w_in", "w_out", "w_up")
                    if (w := getattr(operands, name)) is not None
                },
            )
        if self.above is not None:
            operands = dataclasses.replace(
                operands, **dict.fromkeys(("offs", "topk_weights", *_ROWS))
            )
        if self.rows:
            used = int(operands.offs[-1])
            operands = dataclasses.replace(
                operands,
                input=operands.input[:1]
                .new_ones(used + 3, case.dim)
                .mul_(torch.linspace(-1, 1, used + 3)[:, None]),
                grad_out=operands.grad_out[:1].expand(used + 3, -1).contiguous(),
                topk_weights=None,
                row_slots=None,
                slot_rows=None,
            )
        return operands

    def present(self, operands: MoeOperands) -> dict[str, torch.Tensor]:
        """The operands that are not None, by name."""
        pairs = zip(_NAMES, operands.args(), strict=True)
        return {name: x for name, x in pairs if x is not None}

    def is_per_token(self, name: str) -> bool:
        return name in _PER_TOKEN

    def has_gradient(self, name: str, x: torch.Tensor) -> bool:
        return x.is_floating_point()

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tokens that go to the experts, their indices and weights."""
        x = x[x[:, 0] > self.above]
        return x, *F.moe_topk(x[:, : self.case.num_experts], self.case.top_k)

    def chosen(self, operands: MoeOperands) -> MoeOperands:
        """What the experts get of ``operands``, with the routing of the chosen tokens."""
        if self.above is None:
            return operands
        x, ids, weights = self.choose(operands.input)
        plan = moe_permutation_reference(ids, self.case.num_experts)
        return dataclasses.replace(
            operands,
            input=x,
            topk_weights=weights,
            grad_out=operands.grad_out[: len(x)],
            offs=plan.offs,
            row_slots=plan.row_slots,
            slot_rows=plan.slot_rows,
        )

    def __call__(self, **operands: torch.Tensor) -> torch.Tensor:
        """What is compiled."""
        if self.above is not None:
            chosen = self.choose(operands.pop("input"))
            return F.moe_mlp(*chosen, **operands, **self.options)
        args = [operands.get(name) for name in _NAMES]
        output, _ = torch._moe_mlp(
            *args, **self.options, compute_preact=torch.is_grad_enabled()
        )
        if self.norm:
            x = operands["input"]
            output = F.rms_norm((x + output).float(), (x.shape[1],)).to(x.dtype)
        return output


def _problems() -> tuple[Problem, ...]:
    empty = MoeCase(
        "empty",
        num_tokens=37,
        dim=64,
        hidden=48,
        num_experts=6,
        routing="empty_experts",
    )
    sentinels = dataclasses.replace(empty, name="sentinels", routing="sentinels")
    one = dataclasses.replace(empty, name="one", routing="one_expert", top_k=1)
    found = [
        Problem("inference"),
        Problem("norm", norm=True),
        Problem("dynamic", tokens="dynamic", traced_tokens=24),
        Problem("unbacked", above=0.0),
        Problem("unbacked_all", above=-100.0),
        Problem("unbacked_none", above=100.0),
        Problem("rows", rows=True),
    ]  # fmt: skip
    variants = {
        "plain": Problem(""),
        "dynamic": Problem("", tokens="dynamic", traced_tokens=24),
        "norm": Problem("", norm=True),
        "transposed": Problem("", empty, transposed=True),
        "split": Problem("", sentinels, split_gate=True, limit=1.0),
        "oai": Problem("", activation="swiglu_oai", gate_interleaved=True, bias=True),
        "relu2": Problem("", one, activation="relu2", bias=True),
        "rows": Problem("", rows=True),
    }
    found += [
        dataclasses.replace(problem, name=f"training_{name}", training=True)
        for name, problem in variants.items()
    ]
    return tuple(found)


PROBLEMS = {problem.name: problem for problem in _problems()}


# So many rows of its 64 columns end beyond 2^31 elements: most are of no slot.
FAR_ROWS = (1 << 25) + 128


def emit(problem: Problem, arch: str = "sm_90", num_rows: int | None = None) -> list:
    """What Inductor emits for ``problem``: the forward and, in training, the backward.

    Args:
        num_rows: of ``row_slots``, if not those of the problem.
    """
    from fake_gpu import emitted_like

    tensors = problem.present(problem.operands(problem.traced_tokens))
    if num_rows is not None:
        slots = tensors["row_slots"]
        tensors["row_slots"] = slots.new_empty(num_rows, device="meta")
    names = tensors if problem.training else ()
    gradients = [n for n in names if problem.has_gradient(n, tensors[n])]
    names = tensors if problem.tokens == "dynamic" else ()
    dynamic = [*filter(problem.is_per_token, names)]
    return emitted_like(
        problem.__call__, tensors, arch, gradients=gradients, dynamic=dynamic
    )


def moe_calls(*graphs, op: str = "_moe_") -> list[str]:
    """The calls of MoE operators that are left in ``graphs``."""
    return [c for graph in graphs for c in graph.extern_calls if op in c]


if __name__ == "__main__":
    import sys

    torch._inductor.config.triton.moe_kernels = True
    graphs = {name: emit(problem) for name, problem in PROBLEMS.items()}
    graphs["far_rows"] = emit(PROBLEMS["inference"], num_rows=FAR_ROWS)
    fake_gpu.write_graphs(sys.argv[1], graphs)
